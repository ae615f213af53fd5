"""What memory buys: points that follow from one another, answers computed from them, runs that can be continued."""

from __future__ import annotations

import json
import re
import time
from io import StringIO
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from optpipe_compiler.compiler import Options
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.errors import BadInput
from optpipe_compiler.study import sweep as study
from optpipe_compiler.study.frontier import (
    BestDevices,
    CheapestMemory,
    EnoughMicrobatches,
    Point,
    best_devices,
    cheapest_memory,
    enough_microbatches,
    frontier,
)
from optpipe_compiler.study.sweep import parse_caps, parse_counts
from optpipe_compiler.view import frontier_svg
from optpipe_compiler.view.sweep import device_sentences, memory_sentences, microbatch_sentences, notes, table
from tests.instances import uniform
from tests.processes import children, press_ctrl_c
from tests.test_cli import refused, run, start  # noqa: F401  (run is a fixture)

GB = 10**9
OPEN = ", by the plans found; the bounds leave it open."
SVG = "{http://www.w3.org/2000/svg}"


def point(
    gb: float, makespan: int | None, *, bound: int = 1, devices: int = 2, microbatches: int = 10, gpu: str | None = None
) -> Point:
    """A point; times in ms."""
    return Point(
        gpu=gpu,
        devices=devices,
        microbatches=microbatches,
        mem_bytes=round(gb * GB),
        outcome="infeasible" if makespan is None else "feasible",
        makespan_ns=None if makespan is None else makespan * 10**6,
        lower_bound_ns=bound * 10**6,
        peak_bytes=None if makespan is None else round(gb * GB),
        method="" if makespan is None else f"at {gb} GB",
    )


# -- options ------------------------------------------------------------------------------------------------------


def test_caps_are_a_range_or_a_list():
    assert parse_caps("10GB:80GB:8", "--mem") == tuple(n * 10 * GB for n in range(1, 9))
    assert parse_caps("1GiB:2GiB:2", "--mem") == (2**30, 2**31)
    assert parse_caps("3GB, 1GB,3GB", "--mem") == (GB, 3 * GB)
    assert parse_caps("0:2B:5", "--mem") == (0, 1, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10GB:80GB", "expected FROM:TO:COUNT with a count of 2 to 1000, such as 10GB:80GB:8"),
        ("10GB:80GB:1", "expected FROM:TO:COUNT with a count of 2 to 1000, such as 10GB:80GB:8"),
        ("10GB:80GB:8:9", "expected FROM:TO:COUNT with a count of 2 to 1000, such as 10GB:80GB:8"),
        ("10GB:80GB:x", "expected FROM:TO:COUNT with a count of 2 to 1000, such as 10GB:80GB:8"),
        ("80GB:10GB:3", "expected FROM to be less than TO"),
        ("10:80:8", "--mem is 10, which is 10 bytes; did you mean 10GB?"),
        ("10XB", "expected a size such as 40GB, 37.25GiB or 512MB"),
    ],
)
def test_caps_that_cannot_be_meant_are_refused(text, expected):
    with pytest.raises(BadInput, match=expected) as said:
        parse_caps(text, "--mem")
    assert str(said.value).startswith("--mem is ")


@pytest.mark.parametrize("text", ["0", "4,-1", "4,", "x", "", "1.5"])
def test_counts_that_cannot_be_meant_are_refused(text):
    with pytest.raises(BadInput, match=r"--devices is .*, expected numbers of at least 1, such as 4,8"):
        parse_counts(text, "--devices")


# -- what follows from one point for another ----------------------------------------------------------------------


def test_a_schedule_of_a_smaller_cap_stands_in_for_a_worse_one_and_says_so():
    found = frontier([point(3, 120), point(1, 130), point(2, 100), point(4, 90)])
    assert [p.makespan_ns // 10**6 for p in found] == [130, 100, 100, 90]
    assert [p.carried_from_bytes for p in found] == [None, None, 2 * GB, None]
    assert (found[2].mem_bytes, found[2].method, found[2].peak_bytes) == (3 * GB, "at 2 GB", 2 * GB)
    assert frontier(found) == found


def test_it_stands_in_where_none_was_found_too_and_names_where_it_comes_from():
    lost = structs.replace(point(2, None), outcome="not found", reason="no schedule was found within the time limit")
    found = frontier([point(1, 100), lost, point(3, 110)])
    assert [(p.outcome, p.makespan_ns, p.carried_from_bytes) for p in found[1:]] == [("feasible", 10**8, GB)] * 2
    assert found[1].reason == ""


def test_a_bound_of_a_larger_cap_holds_for_smaller_ones_and_may_prove_them_optimal():
    found = frontier([point(1, 100, bound=80), point(2, 100, bound=100), point(3, 100, bound=90)])
    assert [p.lower_bound_ns // 10**6 for p in found] == [100, 100, 90]
    assert [p.outcome for p in found] == ["optimal", "optimal", "feasible"]


def test_where_caps_choose_the_slices_a_bound_holds_for_its_own_cap_alone():
    points = [point(1, 100, bound=80), point(2, 130, bound=110), point(3, 120, bound=115)]
    found = frontier(points, carries_bounds=False)
    assert [p.makespan_ns // 10**6 for p in found] == [100] * 3
    assert [p.lower_bound_ns // 10**6 for p in found] == [80] * 3, "the plan of the first cap beats the others' bounds"
    assert {p.outcome for p in found} == {"feasible"}
    assert frontier(found, carries_bounds=False) == found


def test_nothing_crosses_from_one_line_to_another():
    found = frontier([point(1, 50, microbatches=5), point(2, 100), point(2, 70, devices=4)])
    assert all(p.carried_from_bytes is None for p in found)


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.none() | st.integers(50, 60), st.integers(1, 50), st.integers(1, 2)),
        unique_by=lambda row: (row[0], row[3]),
    )
)
def test_more_memory_never_shows_less_throughput_nor_a_tighter_bound(rows):
    points = [point(cap, value, bound=bound, devices=devices) for cap, value, bound, devices in rows]
    found = frontier(points)
    assert len(found) == len(points)
    assert frontier(found) == found
    for devices in (1, 2):
        mine = [p for p in found if p.devices == devices]
        assert [p.mem_bytes for p in mine] == sorted(p.mem_bytes for p in mine)
        assert [p.throughput for p in mine] == sorted(p.throughput for p in mine)
        assert [p.lower_bound_ns for p in mine] == sorted((p.lower_bound_ns for p in mine), reverse=True)
        assert all(p.makespan_ns is None or p.lower_bound_ns <= p.makespan_ns for p in mine)


# -- answers ------------------------------------------------------------------------------------------------------


def test_the_cheapest_memory_is_the_first_cap_that_loses_less_than_the_tolerance():
    points = frontier([point(1, None), point(2, 110), point(3, 101), point(4, 100)])
    [found] = cheapest_memory(points, 0.02)
    assert found == CheapestMemory(
        2, 10, 3 * GB, pytest.approx(1 - 100 / 101), 4 * GB, most_loss=pytest.approx(1 - 1 / 101)
    )
    assert cheapest_memory(points, 0.2)[0].mem_bytes == 2 * GB
    assert cheapest_memory(points, 0.001)[0].mem_bytes == 4 * GB
    assert cheapest_memory([point(1, 100)], 0.02) == []
    assert cheapest_memory([point(1, None), point(2, None)], 0.02) == []


def test_enough_microbatches_are_the_fewest_that_lose_less_than_the_tolerance_at_the_largest_cap():
    points = [
        point(9, 130, microbatches=10),
        point(9, 202, microbatches=20),
        point(9, 400, microbatches=40),
        point(1, 900, microbatches=80),
    ]
    [found] = enough_microbatches(points, 0.02)
    assert found == EnoughMicrobatches(2, 20, 40, pytest.approx(0.01), 9 * GB, most_gain=pytest.approx(403))
    assert enough_microbatches(points, 0.005)[0].microbatches == 40
    assert enough_microbatches(points[:1], 0.02) == []


def test_fewer_microbatches_of_which_no_plan_was_found_in_time_leave_it_open_how_many_are_enough():
    found = [point(9, 202, bound=202, microbatches=20), point(9, 400, bound=400, microbatches=40)]
    lost = structs.replace(point(9, None, bound=100, microbatches=10), outcome="not found")
    assert [one.decided for one in enough_microbatches(found, 0.02)] == [True]
    assert [one.decided for one in enough_microbatches([lost, *found], 0.02)] == [False]
    slow = structs.replace(lost, lower_bound_ns=130 * 10**6)
    assert [one.decided for one in enough_microbatches([slow, *found], 0.02)] == [True]


def test_the_best_number_of_devices_has_the_most_throughput_per_device_under_each_cap():
    points = [
        point(1, None, devices=2),
        point(1, 100, devices=4),
        point(8, 100, devices=2),
        point(8, 60, devices=4),
        point(8, 59, devices=4, microbatches=9),
    ]
    low, high = best_devices(points)
    assert low == BestDevices(GB, 4, pytest.approx(25), ((2, 0.0),), decided=True)
    assert high == BestDevices(8 * GB, 2, pytest.approx(50), ((4, pytest.approx(10 / 0.06 / 4)),))
    assert best_devices([point(1, 100)]) == []


def test_the_answers_are_sentences():
    points = frontier(
        [
            point(1, 150),
            point(2, 101),
            point(4, 100),
            point(1, 290, microbatches=20),
            point(2, 191, microbatches=20),
            point(4, 190, microbatches=20),
            point(4, 60, devices=4),
            point(1, None, devices=4),
        ]
    )
    assert list(memory_sentences(cheapest_memory(points, 0.02), 0.02)) == [
        "With 2 devices and 10 or 20 microbatches 2.00 GB is the cheapest cap tried that loses less than 2% against "
        "4.00 GB (1.0%; by the bounds at most 99.5%)" + OPEN,
        "With 4 devices and 10 microbatches all caps tried below 4.00 GB lose 2% or more, which is proven.",
    ]
    assert list(microbatch_sentences(enough_microbatches(points, 0.02), 0.02)) == [
        "With 2 devices under 4.00 GB all numbers tried below 20 lose 2% or more" + OPEN
    ]
    assert list(microbatch_sentences(enough_microbatches(points, 0.1), 0.1)) == [
        "With 2 devices under 4.00 GB 10 microbatches are enough: 20 would give 5.3% more, by the bounds "
        "at most 19900.0%" + OPEN
    ]
    assert list(device_sentences(best_devices(points), None)) == [
        "From 1.00 GB to 4.00 GB 2 devices have the most throughput per device: 52.63 microbatches/s under 4.00 GB, "
        "against 41.67 with 4" + OPEN
    ]


def test_one_microbatch_is_enough_in_the_singular():
    points = frontier([point(1, 10, microbatches=1), point(1, 20, microbatches=2)])
    [said] = microbatch_sentences(enough_microbatches(points, 0.02), 0.02)
    assert said.startswith("With 2 devices under 1.00 GB 1 microbatch is enough: 2 would give 0.0% more, ")


def test_steps_that_take_no_time_are_told_and_are_not_taken_for_none(run):  # noqa: F811
    nothing = {f"{name}_ns": 0 for name in ("forward", "backward_input", "backward_weight", "backward", "recompute")}
    costs = uniform(2, 1)
    layers = [structs.replace(layer, **nothing) for layer in costs.layers]
    free = structs.replace(costs, layers=layers, machine=structs.replace(costs.machine, p2p=[]))
    Path("profile.json").write_text(canonical(free))
    done = run("sweep", "--mem", "1MB,9GB", "--microbatches", "2", "--time-limit", "0", "--no-cache", "--svg", "s.svg")
    assert done.code == 0, done.err
    assert "9.00 GB 0 ns         -       - 0.0% 1.00 GB" in done.out
    assert "nothing fits;" not in done.out


def test_an_answer_is_decided_where_the_bounds_exclude_every_other():
    tight = frontier([point(1, 120, bound=110), point(2, 101, bound=100), point(4, 100, bound=100)])
    [found] = cheapest_memory(tight, 0.02)
    assert (found.mem_bytes, found.decided) == (2 * GB, True)
    assert found.most_loss == pytest.approx(1 - 100 / 101)
    assert next(memory_sentences([found], 0.02)).endswith("(1.0%; by the bounds at most 1.0%), which is proven.")
    better = frontier([point(1, 120, bound=101), point(2, 101, bound=100), point(4, 100, bound=100)])
    assert not cheapest_memory(better, 0.02)[0].decided  # 1 GB may do
    worse = frontier([point(1, 120, bound=110), point(2, 101, bound=90), point(4, 100, bound=90)])
    assert not cheapest_memory(worse, 0.02)[0].decided  # 4 GB may be faster than what was found


def test_a_point_whose_search_had_not_ended_says_so():
    rough = structs.replace(point(1, 100), finished=False)
    found = sweep_of(rough, structs.replace(point(2, 90), finished=True))
    assert "1 of 2 points was still getting better when its time was over" in " ".join(notes(found))
    both = sweep_of(rough, structs.replace(point(2, 90), finished=False))
    assert "2 of 2 points were still getting better when their time was over" in " ".join(notes(both))
    out = Console(width=100, file=StringIO())
    out.print(table(found, out.width))
    assert [line.rstrip().endswith("unfinished") for line in out.file.getvalue().splitlines()[2:4]] == [True, False]


@pytest.mark.parametrize("width", [30, 45, 60, 66, 80, 100])
@pytest.mark.parametrize("tokens", [None, 4096])
def test_no_number_is_cut_where_the_terminal_is_narrow(width, tokens):
    points = [point(20, 2194), point(40, 2034), point(90, None)]
    rough = [structs.replace(one, finished=False, carried_from_bytes=20 * GB) for one in points[:2]]
    gone = structs.replace(points[2], outcome="beyond memory")
    for found in (sweep_of(*points, tokens=tokens), sweep_of(*rough, gone, tokens=tokens)):
        out = Console(width=width, file=StringIO())
        out.print(table(found, out.width))
        words = out.file.getvalue().split()
        assert "…" not in out.file.getvalue()
        for number in ("20.00", "40.00", "90.00", "2.194", "2.034"):
            assert width < 45 or number in words
        columns = {"of", "gap", "step", "peak"} & set(words)
        assert columns == {"of", "gap", "step", "peak"} if width >= 80 else columns >= {"step", "peak"}


def test_a_lean_schedule_of_a_larger_cap_stands_in_for_a_worse_one():
    lean = structs.replace(point(4, 90), peak_bytes=2 * GB)
    found = frontier([point(1, 130), point(2, 100), lean])
    assert [p.makespan_ns // 10**6 for p in found] == [130, 90, 90]
    assert [p.carried_from_bytes for p in found] == [None, 4 * GB, None]


def test_each_point_starts_from_the_best_plan_of_a_smaller_cap():
    costs, common = study.SweptCosts.of(uniform(2, 2)), Options(mem_bytes=0, time_limit_s=0.0, reproducible=True)
    grid = study.Grid((GB, 2 * GB, 3 * GB), (4,))
    started: list[tuple[int, ...]] = []

    def pool(function, questions, jobs):
        for question in questions:
            started.append(tuple(one.schedule.setup.cap_bytes for one in question.options.seeds))
            yield question, function(question)

    begin = study.begin(Path("no.json"), costs, common)
    points = [one for one, _ in study.run(None, begin, study.instances(costs, common, grid), 1, pool)]
    assert started == [(), (GB,), (2 * GB,)]
    assert [one.throughput for one in points] == sorted(one.throughput for one in points)


# -- the picture --------------------------------------------------------------------------------------------------


def sweep_of(*points: Point, tokens: int | None = None) -> study.Sweep:
    return study.Sweep(
        profile="p", profile_digest="sha256:0", options={}, tokens_per_microbatch=tokens, points=frontier(points)
    )


def test_the_picture_has_a_line_and_a_bound_per_devices_and_microbatches_and_a_cross_where_nothing_fits():
    drawn = frontier_svg.render(sweep_of(point(1, None), point(2, 90), point(3, 80), point(3, 70, devices=4)))
    root = ElementTree.fromstring(drawn)
    assert len(root.findall(f"{SVG}polyline")) == 4
    assert len(root.findall(f"{SVG}path")) == 1
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert "2 devices, 10 microbatches" in labels
    assert "4 devices, 10 microbatches" in labels
    assert "throughput, microbatches/s" in labels
    heights = [float(y.split(",")[1]) for y in root.findall(f"{SVG}polyline")[1].get("points").split()]
    assert heights == sorted(heights, reverse=True)
    assert "tokens/s" in frontier_svg.render(sweep_of(point(1, 90), tokens=512))


def test_everything_in_the_picture_is_within_it_and_labels_do_not_overlap():
    points = [point(cap, 90 + n, microbatches=10, devices=n + 1) for n in range(12) for cap in (1, 2)]
    root = ElementTree.fromstring(frontier_svg.render(sweep_of(*points)))
    width, height = map(float, root.get("viewBox").split()[2:])
    ends = [text for text in root.iter(f"{SVG}text") if text.text.endswith("microbatches")]
    ys = sorted(float(text.get("y")) for text in ends)
    assert len(ys) == 12
    assert all(after - before >= 14 for before, after in pairwise(ys))
    for line in root.findall(f"{SVG}polyline"):
        for x, y in (map(float, pair.split(",")) for pair in line.get("points").split()):
            assert 0 <= x <= width
            assert 0 <= y <= height


@pytest.mark.parametrize("points", [[], [point(1, None)], [point(1, 10)], [point(1, None), point(2, 10, bound=10)]])
def test_a_sweep_of_few_points_can_be_drawn(points):
    assert frontier_svg.render(sweep_of(*points)).endswith("</svg>\n")


def test_carried_points_are_explained():
    assert list(notes(sweep_of(point(1, 10), point(2, 10)))) == []
    [said] = notes(sweep_of(point(1, 10), point(2, 11)))
    assert said.startswith("1 of 2 points show the schedule of another cap")


# -- runs ---------------------------------------------------------------------------------------------------------

GRID = ("--mem", "0.1GB:2GB:3", "--microbatches", "3,4", "--time-limit", "0.2")


@pytest.fixture
def here(monkeypatch):
    """Answer in this process instead of others; return what was asked."""
    asked = []

    def answer(function, questions, jobs):
        for question in questions:
            asked.append(question)
            yield question, function(question)

    monkeypatch.setattr(study, "answers", answer)
    return asked


def test_a_sweep_plans_its_grid_in_processes_and_writes_file_and_picture(run):  # noqa: F811
    outcome = run("sweep", "--mem", "0.1GB,2GB", "--microbatches", "3", "--time-limit", "0.2", "--svg", "sweep.svg")
    assert outcome.code == 0
    lines = sorted(outcome.err.splitlines())
    assert lines[0] == "2 devices, 3 microbatches, 100.00 MB: nothing fits"
    assert re.fullmatch(r"2 devices, 3 microbatches, 2\.00 GB: [\d.]+ ms", lines[1])
    assert len(lines) == 2
    assert "nothing fits" in outcome.out
    assert outcome.out.endswith("wrote sweep.json and sweep.svg\n")
    points = json.loads(Path("sweep.json").read_text())["points"]
    assert [(p["mem_bytes"], p["makespan_ns"] is None) for p in points] == [(GB // 10, True), (2 * GB, False)]
    assert points[0]["outcome"] == "infeasible"
    assert "the smallest --mem that would do is" in points[0]["reason"]
    ElementTree.fromstring(Path("sweep.svg").read_text())


def test_where_nothing_fits_the_least_memory_is_said_and_the_end_is_that_of_compile(run):  # noqa: F811
    sizes = ("--microbatches", "3,4", "--time-limit", "0")
    outcome = run("sweep", "--mem", "0.1GB,0.2GB", *sizes)
    least = "the smallest --mem that would do is 1000000000 (1.00 GB (0.93 GiB))"
    assert (outcome.code, outcome.err.splitlines()[-1]) == (3, f"optpipe: nothing fits any of the 4 points; {least}")
    said = " ".join(outcome.out.split())
    assert f"With 2 devices and 3 or 4 microbatches nothing fits; {least}. wrote sweep.json" in said
    again = run("sweep", "--mem", "0.1GB,0.2GB", *sizes, "--json")
    assert again.code == 3
    assert [one["mem_bytes"] for one in json.loads(again.out)["least_memory"]] == [GB] * 2
    path = Path("sweep.json")
    assert all(point["least_is_smallest"] for point in json.loads(path.read_text())["points"])
    path.write_text(path.read_text().replace('"least_is_smallest": true', '"least_is_smallest": false'))
    unsure = run("sweep", "--mem", "0.1GB,0.2GB", *sizes).err.splitlines()[-1]
    assert unsure.endswith("; raise --mem to 1000000000 (1.00 GB (0.93 GiB))")
    assert run("compile", "--mem", "999999999B", *sizes[2:]).code == 3
    assert run("compile", "--mem", "1GB", *sizes[2:]).code == 0
    assert run("sweep", "--mem", "1GB", *sizes).code == 0


def test_the_same_sweep_again_plans_nothing_and_says_the_same(run, here):  # noqa: F811
    first = run("sweep", *GRID)
    assert (first.code, len(here)) == (0, 6)
    text = Path("sweep.json").read_text()
    here.clear()
    again = run("sweep", *GRID)
    assert (again.code, again.out, here) == (0, first.out, [])
    assert Path("sweep.json").read_text() == text


def test_a_larger_grid_adds_to_what_is_there(run, here):  # noqa: F811
    run("sweep", *GRID)
    here.clear()
    outcome = run("sweep", "--mem", "1.5GB,2GB", "--microbatches", "4", "--time-limit", "0.2", "--json")
    assert [(one.options.microbatches, one.options.mem_bytes) for one in here] == [(4, 3 * GB // 2)]
    report = json.loads(outcome.out)
    assert (len(report["points"]), report["points_left"]) == (7, 0)
    assert [one["mem_bytes"] for one in report["points"] if one["microbatches"] == 4] == sorted(
        one["mem_bytes"] for one in report["points"] if one["microbatches"] == 4
    )
    assert {"cheapest_memory", "enough_microbatches", "best_devices"} <= set(report)


def test_the_file_is_whole_after_every_point_and_continued_after_an_interruption(run, monkeypatch, here):  # noqa: F811
    answer = study.answers

    def interrupted(function, questions, jobs):
        for count, found in enumerate(answer(function, questions, jobs)):
            if count == 2:
                raise KeyboardInterrupt
            yield found
            assert len(json.loads(Path("sweep.json").read_text())["points"]) == count + 1

    monkeypatch.setattr(study, "answers", interrupted)
    outcome = run("sweep", *GRID)
    assert outcome.code == 0
    assert outcome.err.splitlines()[-1] == "interrupted: 4 points are left; the same command continues"
    monkeypatch.setattr(study, "answers", answer)
    here.clear()
    assert run("sweep", *GRID).code == 0
    assert len(here) == 4
    assert len(json.loads(Path("sweep.json").read_text())["points"]) == 6


def test_a_sweep_that_took_other_noise_is_not_gone_on_with(tmp_path):
    costs, path = study.SweptCosts.of(uniform(2, 2)), tmp_path / "sweep.json"
    noisy = Options(mem_bytes=0, noise=0.1)
    path.write_text(canonical(study.begin(None, costs, noisy)))
    assert study.begin(path, costs, noisy).options["noise"] == 0.1
    for other in (None, 0.3):
        with pytest.raises(BadInput, match=rf"\$.options.noise is 0.1, expected {other}; name another file"):
            study.begin(path, costs, Options(mem_bytes=0, noise=other))


def test_an_interruption_before_the_first_point_ends_with_exit_code_130(run, monkeypatch):  # noqa: F811
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "answers", interrupt)
    assert refused(run("sweep", *GRID), 130) == "interrupted"
    assert not Path("sweep.json").exists()


def test_another_profile_or_other_options_are_refused(run, here):  # noqa: F811
    run("sweep", *GRID)
    text = Path("sweep.json").read_text()
    sentence = refused(run("sweep", *GRID, "--no-offload"), 2)
    assert sentence == (
        "sweep.json: $.options.offload is True, expected False; name another file with -o, or delete this one"
    )
    Path("profile.json").write_text(canonical(uniform(2, 1, forward_ms=2)))
    sentence = refused(run("sweep", *GRID), 2)
    assert sentence.startswith("sweep.json: $.profile_digest is sha256:")
    assert sentence.endswith("; name another file with -o, or delete this one")
    assert Path("sweep.json").read_text() == text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--mem", "1GB:2GB"), "--mem is '1GB:2GB', expected FROM:TO:COUNT"),
        (("--mem", "1GB", "--microbatches", "0"), "--microbatches is '0', expected numbers of at least 1"),
        (("--mem", "1GB", "--microbatches", "9" * 5000), "--microbatches is '9999"),
        (("--mem", "1GB:2GB:" + "9" * 5000), "--mem is '1GB:2GB:9999"),
        (("--mem", "1GB", "--devices", "3"), "--devices is 3, expected at most the profile's 2 layers"),
        (("--mem", "1GB", "--loss", "200%"), "--loss is '200%', expected a share such as 2% or 0.02"),
        (("--mem", "1GB", "--loss", "some"), "--loss is 'some', expected a share such as 2% or 0.02"),
        (("--mem", "1GB", "--time-limit", "nan"), "--time-limit is nan, expected seconds, at least 0"),
        (("--mem", "1GB", "-o", "no/s.json"), "no/s.json: cannot be written: No such file or directory"),
        (("--mem", "1GB", "--svg", "no/s.svg"), "no/s.svg: cannot be written: No such file or directory"),
        (("none.json", "--mem", "1GB"), "none.json: cannot be read: No such file or directory"),
        (("--mem", "1GB", "-o", "profile.json"), "-o names profile.json, which is the profile that is read"),
    ],
)
def test_bad_input_of_sweep_is_one_sentence_before_any_work(run, here, arguments, sentence):  # noqa: F811
    assert refused(run("sweep", *arguments), 2).startswith(sentence)
    assert here == []
    assert [path.name for path in Path().iterdir()] == ["profile.json"]


def test_options_that_cannot_be_are_refused_before_they_are_compared_with_those_of_the_file(run, here):  # noqa: F811
    assert run("sweep", "--mem", "2GB", "--microbatches", "3", "--time-limit", "0").code == 0
    again = run("sweep", "--mem", "2GB", "--microbatches", "3", "--time-limit", "nan")
    assert refused(again, 2).startswith("--time-limit is nan, expected seconds, at least 0")


def test_more_devices_than_the_profile_has_are_a_point_like_any_other(run, here):  # noqa: F811
    Path("profile.json").write_text(canonical(uniform(2, 2)))
    arguments = ("--mem", "3GB", "--devices", "1,2,4", "--microbatches", "4", "--time-limit", "0.2", "--json")
    report = json.loads(run("sweep", *arguments).out)
    assert [(p["devices"], p["makespan_ns"] is not None) for p in report["points"]] == [(1, True), (2, True), (4, True)]
    assert len(report["best_devices"]) == 1


def test_ctrl_c_on_a_terminal_keeps_what_is_done_and_leaves_no_process(tmp_path):
    (tmp_path / "profile.json").write_text(canonical(uniform(3, 2)))
    arguments = ("sweep", "--mem", "0.01GB,1.1GB", "--microbatches", "6", "--time-limit", "30", "-j", "1")
    with start(*arguments, folder=tmp_path) as process:
        assert process.stderr.readline() == "3 devices, 6 microbatches, 10.00 MB: nothing fits\n"
        until = time.monotonic() + 30
        while not any(children(worker) for worker in alive(process.pid)):  # a search runs below a worker
            assert time.monotonic() < until
            time.sleep(0.05)
        below = descendants(process.pid)
        press_ctrl_c(process.pid, whole_group=True)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err == "interrupted: 1 point is left; the same command continues\n"
    assert "nothing fits" in out
    assert len(json.loads((tmp_path / "sweep.json").read_text())["points"]) == 1
    until = time.monotonic() + 5  # a search that goes on does so for 11 s
    while any(map(command, below)):
        assert time.monotonic() < until
        time.sleep(0.05)


def alive(pid: int) -> list[int]:
    """Children of `pid` that themselves can be asked for children."""
    return [child for child in children(pid) if command(child)]


def descendants(pid: int) -> set[int]:
    below = alive(pid)
    return set(below).union(*map(descendants, below))


def command(pid: int) -> str:
    """What the process runs; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
