"""The terminal view: what the chart shows, that it fits, zooms and refuses, and what the summary names."""

from __future__ import annotations

import io
import json
import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from rich.console import Console

from optpipe_compiler import cli
from optpipe_compiler.documents import ir
from optpipe_compiler.forecast import HOLDERS, Analysis, Cause, analyse
from optpipe_compiler.model import bounds
from optpipe_compiler.view.axis import Axis
from optpipe_compiler.view.gantt import LEFT, NARROWEST, RIGHT, render
from optpipe_compiler.view.summary import BOUNDS, MEANINGS, summary
from tests.instances import problem, quick, uniform

GB = 10**9


@cache
def schedule(microbatches: int = 4, *, method: str = "1f1b") -> ir.Schedule:
    return quick(uniform(4, 4, p2p_ms=0.0), 100 * GB, microbatches=microbatches, method=method).schedule


def chart(analysis: Analysis, width: int = 100, **options: object) -> dict[str, str]:
    """The lines of a chart without colours, by label; of several devices the lanes after `dev N` belong to it."""
    found: dict[str, str] = {}
    for line in render(analysis, width, colour=False, **options).plain.splitlines():
        label = line[:LEFT].strip()
        label = (
            f"{len([one for one in found if one.startswith('dev')]) - 1} {label}"
            if label in ("mem", "d2h", "h2d")
            else label
        )
        found.setdefault(label, line[LEFT : LEFT + width - LEFT - RIGHT])
    return found


# -- the chart ----------------------------------------------------------------------------------------------------


def test_ops_stand_where_their_times_are_with_their_microbatches():
    lines = chart(analyse(schedule()), LEFT + RIGHT + 84)  # 21 ms over 84 columns: a forward has four of them
    assert analyse(schedule()).end_ns == 21 * 10**6
    assert lines["dev 0"].startswith("F0--F1--F2--F3--" + "·" * 24)
    assert lines["dev 3"].startswith("·" * 12 + "F0--B0------F1--B1------")
    assert lines["dev 0"].endswith("B3------")
    assert lines["dev 3"].endswith("B3------" + "·" * 24)


def test_a_nanosecond_of_several_columns_is_drawn_over_all_of_them():
    analysis = analyse(schedule())
    first = analysis.lane(0, "compute")[1]
    lines = chart(analysis, LEFT + RIGHT + 84, window=(first.begin_ns - 10, first.begin_ns + 10))
    assert lines["dev 0"] == "F0".ljust(42, "-") + "F1".ljust(42, "-")


def test_a_number_that_does_not_fit_is_left_out_whole():
    line = chart(analyse(schedule(40)), LEFT + RIGHT + 129)["dev 0"]
    assert "F8B8F9" not in line
    assert "B8FB9FB-FB-" in line  # F8 has one column, B10 two


def test_the_lines_of_devices_from_100_on_begin_and_end_where_all_others_do():
    made = quick(uniform(101, 1), GB, microbatches=2, method="1f1b-recompute").schedule
    lines = render(analyse(made), 80, [99, 100], colour=False).plain.splitlines()
    labels = [line[:LEFT] for line in lines]
    assert (labels[0], labels[2]) == ("dev 99 ", " d 100 ")
    assert len(lines[0]) == len(lines[2]) == 80 - RIGHT


@pytest.mark.parametrize(("cap", "said"), [(8 * GB, "at most 50% of 8.00"), (10**4 * GB, "less than 1% of 10")])
def test_the_summary_says_how_much_of_the_cap_is_used(cap, said):
    made = schedule()
    one = msgspec.structs.replace(made, setup=msgspec.structs.replace(made.setup, cap_bytes=cap))
    console = Console(width=200)
    with console.capture() as shown:
        console.print(summary(analyse(one)))
    assert said in shown.get()


def test_memory_is_drawn_against_the_cap():
    analysis = analyse(schedule())
    line = chart(analysis, LEFT + RIGHT + 84)["0 mem"]
    assert set(line) == {"▁"}  # 4 of 100 GB
    full = render(analysis, LEFT + RIGHT + 84, colour=False).plain.splitlines()[1]
    assert full.endswith("  4%")


def test_transfer_lanes_are_drawn_only_where_there_are_transfers():
    assert not any("d2h" in label for label in chart(analyse(schedule())))
    lines = chart(analyse(schedule(method="gis-offload")))
    assert "━" in lines["0 d2h"]
    assert "━" in lines["0 h2d"]
    assert "▁" in lines["host"]


def test_a_transfer_that_takes_little_of_its_column_is_drawn_thin():
    profile = uniform(2, 4, d2h_ms=0.01, h2d_ms=0.01)
    made = analyse(quick(profile, 100 * GB, microbatches=4, method="gis-offload").schedule)
    lines = chart(made, NARROWEST)
    for lane in ("d2h", "h2d"):
        assert "─" in lines[f"0 {lane}"]
        assert "━" not in lines[f"0 {lane}"]


@pytest.mark.parametrize("method", ["1f1b", "interleaved-zb", "gis-offload"])
def test_over_many_columns_each_kind_of_op_has_its_share(method):
    analysis = analyse(schedule(24, method=method))
    line = chart(analysis, 80)["dev 0"]
    whole = analysis.end_ns - analysis.begin_ns
    letters = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
    for name, letter in letters.items():
        spent = sum(item.end_ns - item.begin_ns for item in analysis.lane(0, "compute") if item.op.name == name)
        assert line.count(letter) <= len(line) * spent / whole + 4
        if spent:
            assert letter in line


@pytest.mark.parametrize("width", [NARROWEST, 80, 160])
@pytest.mark.parametrize("method", ["1f1b", "gis-offload"])
def test_nothing_is_wider_than_the_window_and_no_line_of_the_chart_wraps(width, method):
    analysis = analyse(schedule(method=method))
    text = render(analysis, width)
    assert max(map(len, text.plain.splitlines())) <= width
    out = io.StringIO()
    Console(file=out, width=width).print(text)
    assert len(out.getvalue().splitlines()) == len(text.plain.splitlines()) + 1


@pytest.mark.parametrize("height", [9, 12, 20, 23, 39])
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("devices", [4, 24])
def test_the_chart_fits_one_screen_and_says_what_it_leaves_out(devices, width, height):
    made = analyse(wide()) if devices == 24 else analyse(schedule(12, method="gis-offload"))
    text = render(made, width, height=height, colour=False).plain
    whole = render(made, width, colour=False).plain
    assert len(text.splitlines()) <= height
    assert ("no room for" in text) == (text != whole)
    if text == whole:
        return
    shown = re.findall(r"dev (\d+)", text)
    assert (shown[0], shown[-1]) == ("0", str(devices - 1))
    missing = devices - len(shown)
    assert (f"{missing} of {devices} devices" in text) == (missing > 0)
    assert ("mem:" in text) == ("and memory" not in text and "memory and" not in text and "for memory" not in text)


@cache
def wide() -> ir.Schedule:
    return quick(uniform(24, 1, p2p_ms=0.0), 100 * GB, microbatches=24, method="1f1b").schedule


def test_a_chart_shows_all_where_it_has_room():
    text = render(analyse(schedule(12, method="gis-offload")), 80, height=99, colour=False).plain
    assert text == render(analyse(schedule(12, method="gis-offload")), 80, colour=False).plain
    assert "d2h" in text


def test_a_window_of_time_and_devices_shows_only_those():
    analysis = analyse(schedule())
    lines = chart(analysis, LEFT + RIGHT + 40, devices=[3], window=(3 * 10**6, 5 * 10**6))
    assert lines["dev 3"] == "F0" + "-" * 18 + "B0" + "-" * 18
    assert "dev 0" not in lines
    assert "│3 ms" in lines[""]


def test_an_axis_covers_its_times_and_marks_round_ones():
    axis = Axis(0, 26 * 10**6, 60)
    assert axis.ruler() == "│0 ms                  │10 ms                 │20 ms"
    assert axis.edges[0] == 0
    assert axis.edges[-1] == axis.end_ns
    assert all(axis.column(edge) == column for column, edge in enumerate(axis.edges[:-1]))
    assert Axis(12_500_000, 12_600_000, 60).ruler().split("│")[1].strip() == "12.50 ms"


@pytest.mark.parametrize("span", [1, 7, 60, 61, 10**12 + 1])
def test_a_time_falls_into_the_first_of_the_columns_with_the_last_edge_that_is_not_later(span):
    axis = Axis(5, 5 + span, 60)
    for time in (0, 4, *axis.edges, *(edge + 1 for edge in axis.edges), axis.end_ns + 9):
        last = max((edge for edge in axis.edges if edge <= time), default=axis.edges[0])
        assert axis.column(time) == min(59, axis.edges.index(last))


@pytest.mark.parametrize("span", [1, 7, 999, 10**3, 12_345, 10**9, 10**12 + 1])
@pytest.mark.parametrize("columns", [28, 68, 148])
def test_the_marks_of_an_axis_are_apart_and_differ(span, columns):
    for begin in (0, span // 3, 10 * span):
        ruler = Axis(begin, begin + span, columns).ruler()
        assert len(ruler) <= columns
        marks = re.findall(r"│[^│]*", ruler)
        assert len({mark.strip() for mark in marks}) == len(marks)
        numbers = [float(mark[1:].split()[0]) for mark in marks]
        assert all(low < high for low, high in pairwise(numbers))


# -- the summary --------------------------------------------------------------------------------------------------


def said(analysis: Analysis, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(summary(analysis))
    return out.getvalue()


def test_the_summary_names_the_bound_and_what_the_bubbles_are():
    text = said(analyse(schedule()))
    forecast = schedule().forecast
    assert f"({forecast.bound})" in text
    assert BOUNDS[forecast.bound] in text
    assert f"{forecast.bubble_fraction:.2%} " in text
    for cause in {cause for cause, _ in analyse(schedule()).shares()}:
        assert cause.value in text


def test_the_shares_that_the_summary_lists_add_up_to_the_bubble():
    text = said(analyse(schedule(12, method="gis-offload")))
    rows = re.findall(rf"^  (?:{'|'.join(cause.value for cause in Cause)}) +(\d+\.\d+)%", text, re.MULTILINE)
    assert len(rows) >= 2
    assert sum(map(float, rows)) == pytest.approx(
        100 * schedule(12, method="gis-offload").forecast.bubble_fraction, abs=0.05
    )


def test_no_table_of_the_summary_wraps_at_80_columns():
    analysis = analyse(schedule(12, method="gis-offload"))
    narrow, wide = (said(analysis, width).split("assumptions")[0] for width in (80, 200))
    assert [line.rstrip() for line in narrow.splitlines()] == [line.rstrip() for line in wide.splitlines()]


def test_the_layers_of_many_stages_cut_no_number_of_the_devices_at_80_columns():
    made = quick(uniform(2, 400), 1000 * GB, microbatches=4, method="gis", stages_per_device=4).schedule
    text = said(analyse(made)).split("devices\n")[-1].split("assumptions")[0]
    assert "…" not in text
    for device in made.devices:
        for stage in made.stages_of(device.device):
            assert f"{stage.layers[0]}-{stage.layers[1] - 1}" in text


def test_every_bound_and_every_cause_without_a_resource_has_words():
    assert {*bounds.by_name(problem(2, 2, 100), "makespan"), "cp-sat"} == set(BOUNDS)
    assert set(MEANINGS) == {Cause.FILL, Cause.DRAIN, Cause.SLACK}


def test_the_glossary_has_every_bound_outcome_cause_and_holder():
    page = (Path(__file__).parent.parent / "docs" / "GLOSSARY.md").read_text()
    words = {word for row in re.findall(r"^\| ([a-z, -]+) \|", page, re.M) for word in row.split(", ")}
    outcomes = get_args(ir.Outcome)
    assert {*BOUNDS, *outcomes, *(cause.value for cause in Cause), *HOLDERS} <= words


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def show(monkeypatch, capsys, tmp_path):
    """Run `optpipe show` in a directory with a schedule.json; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    Path("schedule.json").write_text(ir.to_text(schedule()))

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["optpipe", "show", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return command


def test_show_zooms_by_options(show):
    code, out, err = show("--device", "3", "--device", "1", "--from", "3ms", "--to", "5000us", "--width", "60")
    assert (code, err) == (0, "")
    assert [line.split()[1] for line in out.splitlines() if line.strip().startswith("dev ")] == ["3", "1"]
    assert out.splitlines()[0].strip().startswith("dev 3 F0---")
    assert max(map(len, out.splitlines())) <= 60


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--device", "4"), "--device is 4, schedule.json has the devices 0 to 3"),
        (("--device", "-1"), "--device is -1, schedule.json has the devices 0 to 3"),
        (("--from", "soon"), "--from is 'soon', expected a time such as 12.5ms, 2s or 300us"),
        (("--to", "5"), "--to is '5', expected a time such as 12.5ms, 2s or 300us"),
        (
            ("--from", "5ms", "--to", "5ms"),
            "--from 5ms to 5ms is no time of the schedule, expected a part of 0 to 21 ms",
        ),
        (("--from", "2s"), "--from 2s to 21 ms is no time of the schedule, expected a part of 0 to 21 ms"),
        (("--to", "0"), "--from 0 to 0 is no time of the schedule, expected a part of 0 to 21 ms"),
        (("--svg", "a.svg", "--from", "1ms"), "--svg draws the whole schedule"),
        (("--svg", "a.png"), "'a.png' is a PNG, expected an .svg"),
    ],
)
def test_show_refuses_what_the_schedule_has_not(show, arguments, sentence):
    code, out, err = show(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"optpipe: {sentence}")
    assert len(err.splitlines()) == 1


def test_show_refuses_a_forecast_that_does_not_fit_its_lanes(show):
    text = Path("schedule.json").read_text()
    start = text.index('"start_ns"')
    Path("schedule.json").write_text(text[:start] + re.sub(r"\[\d+, ", "[", text[start:], count=1))
    code, out, err = show()
    assert (code, out) == (2, "")
    assert "optpipe verify" in err


def test_show_writes_a_picture(show):
    code, out, _ = show("--svg", "a.svg")
    assert (code, out) == (0, "wrote a.svg\n")
    assert Path("a.svg").read_text().startswith("<svg")


def test_show_says_on_top_why_verify_rejects_the_file(show, monkeypatch):
    assert show("--width", "200")[1].lstrip().startswith("dev 0")
    assert json.loads(show("--json")[1])["rejected"] is None
    record = json.loads(Path("schedule.json").read_text())
    record["forecast"]["makespan_ns"] = 9
    Path("schedule.json").write_text(json.dumps(record))
    sentence = "verify rejects this file: lower_bound_ns is "
    code, out, _ = show("--width", "200")
    assert code == 0
    assert out.startswith(sentence)
    assert json.loads(show("--json")[1])["rejected"].startswith(sentence)
    assert sentence in show("--svg", "a.svg")[2]
    monkeypatch.setattr("optpipe_compiler.verify.QUICK_OPS", 0)  # too many ops to be quick
    assert sentence not in show()[1]


def test_show_shows_a_file_that_lacks_costs_of_a_stage(show):
    record = json.loads(Path("schedule.json").read_text())
    del record["forecast"]["stages"][-1]
    Path("schedule.json").write_text(json.dumps(record))
    assert show()[0] == 0
    report = json.loads(show("--json")[1])
    assert report["host_links"] == []
    assert "forecast.stages is for the stages " in report["rejected"]
