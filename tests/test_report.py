"""The report's page: what it is given, what it says without a browser, the traces it reads, and the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from small_schedules import Shape, build

from optpipe_compiler.cli import cli
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Layer, Machine, Profile
from optpipe_compiler.documents.units import show_ns
from optpipe_compiler.errors import BadInput
from optpipe_compiler.forecast import Cause, Reason, analyse
from optpipe_compiler.view.baselines import OTHERS, best, faster, is_itself, missing, whose
from optpipe_compiler.view.report import render
from optpipe_compiler.view.report.payload import REASONS
from optpipe_compiler.view.report.trace import Measured, measured
from tests.instances import quick, uniform
from tests.report_cases import GB, PROFILE, planned, published

ROOT = Path(__file__).parent.parent
PARTS = {"F": "forward", "I": "backward_input", "W": "backward_weight", "B": "backward", "R": "recompute"}
PARTS |= {"D": "offload", "H": "reload"}


@pytest.fixture(scope="module")
def schedule():
    """Two devices with two stages each; one activation of each microbatch and device is offloaded."""
    return planned()


def payload(page: str) -> dict:
    """What the page's scripts read."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def ids(chart: dict) -> list[str]:
    """The ids of a chart's ops by number."""
    found: list[str] = []
    for lane in chart["lanes"]:
        for kind, stage, microbatch in zip(lane["kind"], lane["stage"], lane["microbatch"], strict=True):
            layers = chart["layers"].get(str(len(found)))
            found.append(f"{PARTS[kind]}:{stage}:{microbatch}" + (f":{layers[0]}-{layers[1]}" if layers else ""))
    return found


def levels(curve: dict) -> list[int]:
    """What all holders of a curve hold together at each step."""
    sums = [0] * len(curve["time"])
    for held in curve["held"].values():
        for (step, size), end in zip(
            zip(held["step"], held["bytes"], strict=True), [*held["step"][1:], len(sums)], strict=True
        ):
            sums[step:end] = [one + size for one in sums[step:end]]
    return sums


def forecast(schedule: ir.Schedule) -> dict[str, tuple[int, int]]:
    """Begin and end of every op but messages, as the file has them."""
    return {
        op.id: (start, end)
        for times in schedule.forecast.times
        for op, start, end in zip(
            getattr(schedule.devices[times.device], times.lane), times.start_ns, times.end_ns, strict=True
        )
        if not isinstance(op, ir.MessageOp)
    }


def later(schedule: ir.Schedule, by: int) -> ir.Schedule:
    """The same schedule, its forecast beginning later."""
    moved = [
        msgspec.structs.replace(t, start_ns=[n + by for n in t.start_ns], end_ns=[n + by for n in t.end_ns])
        for t in schedule.forecast.times
    ]
    return msgspec.structs.replace(schedule, forecast=msgspec.structs.replace(schedule.forecast, times=moved))


# -- what the page is given ---------------------------------------------------------------------------------------


def test_every_op_is_in_the_chart_once_with_its_times(schedule):
    chart = payload(render(schedule))["charts"][0]
    times = [time for lane in chart["lanes"] for time in zip(lane["begin"], lane["end"], strict=True)]
    assert len(times) == len(set(ids(chart)))
    assert dict(zip(ids(chart), times, strict=True)) == forecast(schedule)


def test_times_count_from_the_first_start(schedule):
    assert payload(render(later(schedule, 12345)))["charts"] == payload(render(schedule))["charts"]


def test_what_kept_an_op_from_starting_earlier_ends_before_it_and_only_messages_take_time(schedule):
    page = payload(render(schedule))
    chart, times = page["charts"][0], forecast(schedule)
    names, seen = ids(chart), set()
    for name, cause, number in zip(names, chart["cause"], chart["reason"], strict=True):
        reason = list(REASONS)[number]
        seen.add(reason)
        if cause < 0:
            assert reason is (Reason.START if times[name][0] == 0 else Reason.SLACK)
        elif reason is Reason.MESSAGE:
            assert times[names[cause]][1] < times[name][0]
        else:
            assert times[names[cause]][1] == times[name][0]
    assert {Reason.START, Reason.ORDER, Reason.MESSAGE, Reason.MEMORY, Reason.DATA} <= seen
    assert page["reasons"] == list(REASONS.values())


def test_there_are_words_for_every_reason_and_cause(schedule):
    assert set(REASONS) == set(Reason)
    assert set(payload(render(schedule))["causes"]) == {cause.value for cause in Cause}


def test_waits_are_those_of_the_file_with_those_of_the_messages_issued_just_before(schedule):
    chart = payload(render(schedule))["charts"][0]
    names = ids(chart)
    shown = {names[int(n)]: {w if isinstance(w, str) else names[w] for w in ws} for n, ws in chart["waits"].items()}
    ops = [op for device in schedule.devices for op in (*device.compute, *device.d2h, *device.h2d)]
    for op in ops:
        if not isinstance(op, ir.MessageOp):
            assert set(op.after) <= shown.get(op.id, set())
    assert set().union(*shown.values()) == {name for op in ops for name in op.after}


def test_the_memory_curves_reach_no_promised_peak_from_above_and_carry_the_cap(schedule):
    chart = payload(render(schedule))["charts"][0]
    for curve, device, expected in zip(chart["memory"], schedule.devices, analyse(schedule).memory, strict=True):
        assert curve["cap"] == schedule.setup.cap_bytes
        assert 0 < max(levels(curve)) <= device.peak_bytes
        assert curve["time"] == sorted(curve["time"])
        assert set(expected) <= set(zip(curve["time"], levels(curve), strict=True))
        assert list(curve["held"]) == ["kept", "residue"]
    assert 0 < max(levels(chart["host"])) <= sum(device.host_bytes for device in schedule.devices)


def test_the_gaps_of_the_chart_are_its_bubble(schedule):
    chart = payload(render(schedule))["charts"][0]
    idle = sum(end - begin for gaps in chart["gaps"] for begin, end in zip(gaps["begin"], gaps["end"], strict=True))
    assert idle / (chart["devices"] * chart["makespan_ns"]) == pytest.approx(schedule.forecast.bubble_fraction)


def test_a_schedule_without_offloads_has_no_host_curve():
    assert payload(render(published("1f1b")))["charts"][0]["host"] is None


def test_ops_that_take_no_time_make_a_page():
    layer = Layer(name="free", count=2, forward_ns=0, backward_input_ns=0, backward_weight_ns=0, saved_bytes=1)
    page = render(quick(Profile(name="free", machine=Machine(devices=2), layers=[layer]), GB, method="gpipe").schedule)
    assert payload(page)["charts"][0]["makespan_ns"] == 0


# -- what it says without a browser -------------------------------------------------------------------------------


def text(page: str) -> str:
    """What is to be read of a page without scripts."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def test_the_page_says_how_microbatches_are_cut_and_that_memory_is_what_is_promised():
    sliced = build(Shape((0, 1), microbatches=2, tokens=6, cuts=((0, 2, 6),)))
    assert "2 devices, 2 microbatches of 6 tokens in 2 slices" in text(render(sliced))
    assert re.search(r"host memory [0-9.]+ [GM]B promised ", text(render(published("gis-offload"))))


def test_the_page_says_without_scripts_how_good_the_schedule_is(schedule):
    words = text(render(schedule))
    for part in ("makespan", "proven bound", "gap", "idle (bubble)", "highest peak", "of 3.00 GB"):
        assert part in words
    for name, baseline in schedule.forecast.baselines.items():
        assert (f" {name} " in words) == (baseline.makespan_ns is not None)
    assert f"{schedule.forecast.bubble_fraction:.1%}" in words


def test_the_page_needs_nothing_but_itself(schedule):
    page = render(schedule)
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|<script[^>]+src|@import|\bfetch\(|XMLHttpRequest", page)


def test_names_from_files_cannot_end_the_script_or_become_markup(schedule):
    name = "</script><script>alert(1)</script>{{data}}<b title=\"'x'\">"
    hostile = msgspec.structs.replace(
        schedule,
        provenance=msgspec.structs.replace(schedule.provenance, profile=name),
        forecast=msgspec.structs.replace(schedule.forecast, method=name),
    )
    page = render(hostile)
    assert "<script>alert" not in page
    assert page.count("</script>") == render(schedule).count("</script>")
    assert payload(page)["charts"][0]["title"].startswith(f"this schedule ({name})")
    assert "{{data}}" in page


def test_baselines_without_a_makespan_are_counted_by_why(schedule):
    none = ir.Baseline(makespan_ns=None, peak_bytes=None, fits=False)
    reasons = ["slower by its first microbatches, not run in full", "not tried", "not tried", "is for other placements"]
    made = {f"one-{n}": msgspec.structs.replace(none, reason=reason) for n, reason in enumerate(reasons)}
    forecast = msgspec.structs.replace(schedule.forecast, baselines=made)
    said = ["1 worse by their first microbatches", "1 undefined here", "2 not tried"]
    assert missing(msgspec.structs.replace(schedule, forecast=forecast)) == said


def test_where_the_best_baselines_end_are_lines_and_the_page_says_how_to_see_all_of_it(schedule):
    page = render(schedule)
    lines = {line["label"].split(":")[0]: line["at"] for line in payload(page)["lines"]}
    for label, name in (("best of all", best(schedule)), ("best of papers and stock", best(schedule, OTHERS))):
        assert lines[f"{label}, {name}"] == schedule.forecast.baselines[name].makespan_ns
    assert lines["this schedule"] == schedule.forecast.makespan_ns
    assert "--profile" in text(page)


def test_a_bound_on_the_span_is_no_line_on_the_time_axis():
    made = quick(PROFILE, 9 * GB, method="1f1b", objective="span").schedule
    page = render(made)
    assert not [line for line in payload(page)["lines"] if "bound" in line["label"]]
    assert "proven bound on the span" in text(page)


def compared(schedule: ir.Schedule, kinds: dict[str, str] | None = None, **makespans: int | None) -> ir.Schedule:
    """The schedule with these baselines; one fits unless its name has "big" in it."""
    made = {
        name: ir.Baseline(
            makespan_ns=time, peak_bytes=1, fits="big" not in name, kind=(kinds or {}).get(name, msgspec.UNSET)
        )
        for name, time in makespans.items()
    }
    return msgspec.structs.replace(schedule, forecast=msgspec.structs.replace(schedule.forecast, baselines=made))


def test_the_best_baseline_is_the_fastest_that_fits(schedule):
    assert best(compared(schedule, slow=9, fast=5, big=1, unknown=None)) == "fast"
    assert best(compared(schedule, a=5, **{schedule.forecast.method: 5})) == schedule.forecast.method
    assert best(compared(schedule, big=1, unknown=None)) is None


def test_the_best_of_papers_and_stock_is_told_apart_from_a_composition(schedule):
    kinds = {"made-up": "composition", "written": "paper", "run": "stock"}
    made = compared(schedule, kinds, **{"made-up": 5, "written": 7, "run": 6})
    assert (best(made), best(made, OTHERS), best(made, ("paper",))) == ("made-up", "run", "written")
    assert [whose(made, name) for name in kinds] == ["made-up, a composition", "written, a paper's", "run, stock"]
    assert best(compared(schedule, kinds, **{"made-up": 6, "run": 6})) == "run"


def test_files_that_do_not_say_whose_a_baseline_is_are_shown_without_it(schedule):
    old = msgspec.structs.replace(compared(schedule, gpipe=5), revision=0)
    assert (best(old), best(old, OTHERS), whose(old, "gpipe")) == ("gpipe", None, "gpipe")
    assert "best of papers and stock" not in text(render(old))
    assert json.loads(canonical(old))["forecast"]["baselines"]["gpipe"].keys() == {
        "makespan_ns",
        "peak_bytes",
        "fits",
        "reason",
    }


def test_how_much_faster_is_in_steps_per_second(schedule):
    time = schedule.forecast.makespan_ns
    made = compared(schedule, twice=2 * time, half=time // 2, same=time)
    assert [faster(made, name) for name in ("twice", "half", "same")] == ["100.0% faster", "50.0% slower", "as fast"]


def test_a_schedule_by_the_order_of_a_baseline_need_not_be_that_baseline(schedule):
    """The search tries orders of known schedules with selective recompute, too: these are not among the baselines."""
    time, method = schedule.forecast.makespan_ns, schedule.forecast.method
    for makespan, said, itself in ((time, "as fast", True), (2 * time, "100.0% faster", False)):
        made = compared(schedule, **{method: makespan})
        page = render(made)
        assert (faster(made, method), is_itself(made, method)) == (said, itself)
        assert (f"This schedule is {method} itself." in text(page)) == itself
        assert any(line["label"].startswith(f"best of all, {method}") for line in payload(page)["lines"]) != itself


# -- measured -----------------------------------------------------------------------------------------------------


def write(path: Path, events: list[dict], **more: object) -> Path:
    path.write_text(json.dumps({"traceEvents": events, **more}))
    return path


def event(name: str, begin: float, length: float, **more: object) -> dict:
    return {"name": name, "ph": "X", "pid": 0, "tid": 0, "ts": begin, "dur": length, **more}


def test_ops_of_a_trace_are_found_by_id_by_words_and_by_torchs_names(schedule, tmp_path):
    offload = next(op for device in schedule.devices for op in device.d2h)
    kind = {"op": "forward", "stage": 0, "microbatch": 2}
    trace = write(
        tmp_path / "t.json",
        [
            event("anything", 1000.5, 2, args={"op": "forward:0:0"}),
            event("forward 0 m1", 1003, 1),
            event("0F2", 1004, 1, args=kind),
            event("PP:1F0", 1006, 2.25),
            event("copy", 1007, 1, args={"op": offload.id}),
            event("PP:0SEND_F0", 1007, 1),
            event("aten::mm", 1, 5000),
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
        ],
    )
    assert measured([trace], schedule).ran == {
        "forward:0:0": (0, 2000),
        "forward:0:1": (2500, 3500),
        "forward:0:2": (3500, 4500),
        "forward:1:0": (5500, 7750),
        offload.id: (6500, 7500),
    }


def test_the_last_step_counts(schedule, tmp_path):
    steps = [event("PP:0F0", 100 + n, 1, args={"step": n}) for n in (1, 2, 0)]
    before = [event("PP:0F1", 50, 1, args={"step": 1}), event("PP:0F1", 300, 3, args={"step": 2})]
    assert measured([write(tmp_path / "t.json", steps + before)], schedule).ran == {
        "forward:0:0": (0, 1000),
        "forward:0:1": (198_000, 201_000),
    }
    again = [event("PP:0F0", 300, 2), event("PP:0F0", 100, 1)]
    assert measured([write(tmp_path / "t.json", again)], schedule).ran == {"forward:0:0": (0, 2000)}


def test_traces_of_several_ranks_share_a_clock_and_kernels_count_rather_than_launches(schedule, tmp_path):
    first = write(tmp_path / "0.json", [event("PP:0F0", 5, 1)], baseTimeNanoseconds=1000)
    launch = event("PP:1F0", 7, 1, cat="user_annotation")
    kernel = event("PP:1F0", 9, 2, cat="gpu_user_annotation")
    second = write(tmp_path / "1.json", [kernel, launch], baseTimeNanoseconds=3000)
    assert measured([first, second], schedule).ran == {"forward:0:0": (0, 1000), "forward:1:0": (6000, 8000)}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "t.json: is no Chrome trace: "),
        ("[]", "t.json: is no Chrome trace: Expected an object, got a list"),
        ('{"traceEvents": [{"ph": "X", "ts": "now"}]}', "t.json: is no Chrome trace: Expected a number, got a string"),
        ('{"traceEvents": [{"ph": "X", "dur": -1}]}', "t.json: is no Chrome trace: Expected a number >= 0.0"),
        ('{"traceEvents": []}', "t.json: has no range of an op of this schedule, expected names such as PP:0F0"),
        ('{"traceEvents": [{"ph": "X", "name": "PP:99F0"}]}', "t.json: has no range of an op of this schedule"),
    ],
)
def test_what_is_no_trace_of_the_schedule_is_refused_with_one_sentence(
    schedule, tmp_path, monkeypatch, content, sentence
):
    monkeypatch.chdir(tmp_path)
    Path("t.json").write_text(content)
    with pytest.raises(BadInput) as refused:
        measured([Path("t.json")], schedule)
    assert str(refused.value).startswith(sentence)


def test_measured_times_are_below_the_lanes_and_in_a_table(schedule):
    ran = {name: (2 * begin, 2 * end) for name, (begin, end) in forecast(schedule).items() if name != "forward:0:3"}
    page = render(schedule, measured=Measured(dict(ran)))
    chart = payload(page)["charts"][0]
    names, first = ids(chart), 0
    for lane in chart["lanes"]:
        for begin, end, op in zip(
            *((lane["measured"] or {}).get(key, []) for key in ("begin", "end", "op")), strict=True
        ):
            assert ran.pop(names[first + op]) == (begin, end)
        first += len(lane["kind"])
    assert not ran
    assert "Forecast and measured" in text(page)
    assert re.search(r" step .* 2\.00 x ", text(page))
    assert "Forecast and measured" not in text(render(schedule))


def of_run(path: Path, schedule: ir.Schedule, device: int | None = None, scale: float = 1.0, **about: object) -> Path:
    """The trace of a run that took its forecast times the scale, on one device or on all, as `run --trace` says it."""
    timed = list(schedule.timed(device))
    origin = min(start for *_, start, _ in timed)
    ran = [
        event(op.id, (start - origin) * scale / 1000, (end - start) * scale / 1000, args={"op": op.id})
        for _, _, op, start, end in timed
    ]
    said = {"format": "optpipe-trace", "schedule": schedule.digest, "profile_digest": "", "real": False}
    return write(path, ran, otherData={**said, "time_scale": scale, "stages": [], **about})


def test_a_run_at_a_time_scale_is_as_long_as_its_forecast(schedule, tmp_path):
    ran = measured([of_run(tmp_path / "t.json", schedule, scale=321.0)], schedule)
    assert ran.ran == forecast(schedule)
    words = text(render(schedule, measured=ran))
    assert re.search(r" step .* 1\.00 x ", words)
    assert "Measured times are divided by the time scale of their run, 321." in words
    usual = measured([of_run(tmp_path / "t.json", schedule)], schedule)
    assert "time scale" not in text(render(schedule, measured=usual))


def test_a_device_alone_is_set_against_its_own_forecast(schedule, tmp_path):
    traces = [of_run(tmp_path / f"{device}.json", schedule, device) for device in (0, 1)]
    for device, trace in enumerate(traces):
        times = [(start, end) for _, _, _, start, end in schedule.timed(device)]
        span = max(end for _, end in times) - min(start for start, _ in times)
        ran = measured([trace], schedule)
        assert ran.devices == (device,)
        assert ran.ran.items() <= forecast(schedule).items()
        words = text(render(schedule, measured=ran))
        assert re.search(rf" step of device {device} {show_ns(span)} {show_ns(span)} 1\.00 x ", words)
        assert f"ops that the trace has, of device {device} alone." in words
    both = measured(traces, schedule)
    assert both.devices is None
    assert both.ran == forecast(schedule)


def test_the_trace_of_another_schedule_is_refused(schedule, tmp_path):
    other = published("1f1b")
    trace = of_run(tmp_path / "t.json", other)
    sentence = f"t.json: is the trace of a run of another schedule: its digest is {other.digest[:19]}, expected "
    with pytest.raises(BadInput, match=re.escape(sentence + schedule.digest[:19])):
        measured([trace], schedule)


def test_what_a_run_cannot_say_of_itself_is_refused(schedule, tmp_path):
    for about in ({"time_scale": 0}, {"real": None}):
        with pytest.raises(BadInput, match=r"t\.json: is no trace of optpipe run --trace: Expected "):
            measured([of_run(tmp_path / "t.json", schedule, **about)], schedule)


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch, schedule):
    """A directory with profile.json and schedule.json."""
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text(canonical(PROFILE))
    Path("schedule.json").write_text(ir.to_text(schedule))
    return tmp_path


def test_the_command_writes_the_page_and_says_on_stderr_what_it_does(folder, schedule):
    ended = CliRunner().invoke(cli, ["report"], catch_exceptions=False)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "wrote report.html\n", "drawing the schedule\n")
    assert Path("report.html").read_text() == render(schedule)


def drawn(*arguments: str) -> tuple[list[dict], str, str]:
    """The charts of the page that the command writes, its text, and what was said meanwhile."""
    arguments = ("report", "schedule.json", "--profile", "profile.json", "-o", "r.html", *arguments)
    ended = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert (ended.exit_code, ended.stdout) == (0, "wrote r.html\n")
    page = Path("r.html").read_text()
    return payload(page)["charts"], text(page), ended.stderr


def test_a_trace_may_be_piped_in(folder):
    reads, writes = os.pipe()
    os.write(writes, json.dumps({"traceEvents": [event("PP:0F2", 100.0, 250.0)]}).encode())
    os.close(writes)
    ended = CliRunner().invoke(cli, ["report", "--trace", f"/dev/fd/{reads}", "-o", "r.html"], catch_exceptions=False)
    os.close(reads)
    assert ended.exit_code == 0
    assert "Sums over the 1 of " in text(Path("r.html").read_text())


def test_with_the_profile_the_best_baseline_of_each_kind_is_drawn_below(folder, schedule):
    (first, *below), words, said = drawn()
    assert first == payload(render(schedule))["charts"][0]
    assert below[0]["title"].startswith(f"baseline ({best(schedule)}")
    assert [chart["makespan_ns"] for chart in below] == [
        schedule.forecast.baselines[chart["name"]].makespan_ns for chart in below
    ]
    kinds = [schedule.forecast.baselines[chart["name"]].kind for chart in below]
    assert len(set(kinds)) == len(kinds) == len({b.kind for b in schedule.forecast.baselines.values() if b.fits})
    assert "is drawn below this schedule when clicked" in words
    assert said.splitlines()[0] == f"timing baseline 1 of {len(below)}, {below[0]['name']}"


def test_any_baseline_can_be_drawn_below(folder, schedule):
    fitting = {name for name, baseline in schedule.forecast.baselines.items() if baseline.fits}
    assert {chart["name"] for chart in drawn("--baseline", "all")[0][1:]} == fitting
    assert [chart["name"] for chart in drawn("--baseline", "gis-h-offload")[0][1:]] == ["gis-h-offload"]


def test_a_baseline_that_a_user_has_registered_is_told_of_and_not_drawn(folder, schedule):
    mine = ir.Baseline(makespan_ns=1, peak_bytes=1, fits=True)
    made = msgspec.structs.replace(schedule.forecast, baselines={**schedule.forecast.baselines, "mine": mine})
    Path("schedule.json").write_text(ir.to_text(msgspec.structs.replace(schedule, forecast=made)))
    (_, *below), words, _ = drawn()
    assert {chart["name"] for chart in below} == {"gis-h-offload", "interleaved-1f1b-recompute"}
    assert "mine, your own" in words
    ended = CliRunner().invoke(cli, ["report", "--profile", "profile.json", "--baseline", "mine"])
    sentence = "--baseline is 'mine', which optpipe itself does not know; those that fit: gis-h-off"
    assert str(ended.exception).startswith(sentence)


def test_a_published_schedule_is_not_drawn_above_itself(folder):
    made = published("1f1b")
    Path("schedule.json").write_text(ir.to_text(made))
    arguments = ["report", "--profile", "profile.json"]
    assert CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0
    page = Path("report.html").read_text()
    assert len(payload(page)["charts"]) == 1
    assert "This schedule is 1f1b itself." in text(page)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.json"], "none.json: cannot be read"),
        (["-o", "no/r.html"], "no/r.html: cannot be written"),
        (["--trace", "none.json"], "none.json: cannot be read"),
        (
            ["--trace", "schedule.json"],
            "schedule.json: is no Chrome trace: Object missing required field `traceEvents`",
        ),
        (["--profile", "other.json"], "other.json: is not the profile that schedule.json was compiled from"),
        (["--baseline", "gpipe"], "--baseline needs the costs to time it with, expected --profile profile.json"),
        (
            ["--profile", "profile.json", "--baseline", "interleaved-zb"],
            "--baseline is 'interleaved-zb', which does not fit this cap here; those that fit: gis-h-off",
        ),
        (
            ["--profile", "profile.json", "--baseline", "nix"],
            "--baseline is 'nix', which the schedule does not know; those that fit: gis-h-off",
        ),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(folder, arguments, sentence):
    Path("other.json").write_text(canonical(uniform(2, 2)))
    ended = CliRunner().invoke(cli, ["report", *arguments])
    assert isinstance(ended.exception, BadInput)
    assert str(ended.exception).startswith(sentence)
    assert not list(folder.rglob("*.html"))


def test_equal_input_gives_equal_bytes_in_every_process(folder):
    code = "import sys; sys.argv = ['optpipe', 'report', '-o', '{}']; from optpipe_compiler.cli import main; main()"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code.format(f"{seed}.html")], env=environment, check=True, timeout=60)
    assert Path("1.html").read_bytes() == Path("2.html").read_bytes()
