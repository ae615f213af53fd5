"""Schedules side by side: the same numbers as their files, the same judge for all, and no comparison of unlike ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Model
from optpipe_compiler.published import METHODS
from optpipe_compiler.study import comparison as study
from optpipe_compiler.study.comparison import (
    Absent,
    Wanted,
    chosen_methods,
    compare,
    kept_by,
    options_for,
    published_row,
)
from optpipe_compiler.study.facts import Facts, judged
from optpipe_compiler.study.pool import answers_here
from optpipe_compiler.view.comparison import render, short_names
from tests.instances import quick, uniform
from tests.test_cli import refused, run  # noqa: F401  (run is a fixture)

GB = 10**9
COSTS = uniform(2, 2, d2h_ms=0.2, h2d_ms=0.2)


@pytest.fixture(scope="module")
def offloading() -> ir.Schedule:
    return quick(COSTS, GB, recompute=False).schedule


@pytest.fixture(scope="module")
def recomputing() -> ir.Schedule:
    return quick(COSTS, GB, offload=False).schedule


@pytest.fixture
def here(monkeypatch):
    """Answer in this process instead of others."""
    monkeypatch.setattr(study, "answers", lambda function, questions, jobs: [(q, function(q)) for q in questions])


def wanted(method: str, profile, schedule: ir.Schedule) -> Wanted:
    return Wanted(method, profile, options_for(schedule, method, "s"))


def shown(comparison: study.Comparison, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(render(comparison, width))
    console.file.close()
    return console.export_text()


def broken(schedule: ir.Schedule) -> ir.Schedule:
    """The same with a peak that its ops exceed."""
    devices = [structs.replace(device, peak_bytes=device.peak_bytes - 1) for device in schedule.devices]
    return ir.seal(structs.replace(schedule, devices=devices))


def test_a_row_says_what_the_file_says(offloading, recomputing):
    row = judged(offloading, "a")
    assert (row.makespan_ns, row.bubble_fraction) == (
        offloading.forecast.makespan_ns,
        offloading.forecast.bubble_fraction,
    )
    assert row.peak_bytes == max(device.peak_bytes for device in offloading.devices)
    assert row.safe
    copies = [op for device in offloading.devices for op in (*device.d2h, *device.h2d)]
    layers = sum(end - first for first, end in (op.layers for op in copies))
    assert row.host_traffic_bytes == layers * COSTS.layers[0].saved_bytes > 0
    assert row.recompute_fraction == 0
    again = judged(recomputing, "b")
    assert again.host_traffic_bytes == 0
    count = sum(op.name == "recompute" for device in recomputing.devices for op in device.compute)
    layer_ns = recomputing.forecast.stages[0].recompute_ns[0]
    layers = sum(
        op.layers[1] - op.layers[0] for device in recomputing.devices for op in device.compute if op.name == "recompute"
    )
    busy = recomputing.forecast.makespan_ns * 2 * (1 - recomputing.forecast.bubble_fraction)
    assert count > 0
    assert again.recompute_fraction == pytest.approx(layers * layer_ns / busy)


def test_tokens_are_counted_where_the_costs_are_of_a_model(offloading):
    assert judged(offloading, "a").tokens_per_s is None
    model = Model(builder="gpt", microbatch_size=3, sequence_length=100)
    schedule = ir.seal(structs.replace(offloading, model=model))
    tokens = 4 * 3 * 100 / (offloading.forecast.makespan_ns / 10**9)
    row = judged(schedule, "a")
    assert row.tokens_per_s == pytest.approx(tokens)
    assert f"{tokens:,.0f}" in shown(compare([row]))


def test_the_fastest_safe_schedule_is_the_best_and_the_first(offloading, recomputing):
    rows = [judged(recomputing, "again"), judged(offloading, "host")]
    comparison = compare(rows)
    assert comparison.differences == ()
    assert [row.name for row in comparison.rows] == sorted(("again", "host"), key=lambda name: times(rows)[name])
    assert comparison.best is comparison.rows[0]


def times(rows: list[Facts]) -> dict[str, int]:
    return {row.name: row.makespan_ns for row in rows}


def test_what_the_judge_rejects_is_never_the_best(offloading, recomputing):
    worse = max((offloading, recomputing), key=lambda schedule: schedule.forecast.makespan_ns)
    better = min((offloading, recomputing), key=lambda schedule: schedule.forecast.makespan_ns)
    comparison = compare([judged(worse, "slow"), judged(broken(better), "wrong")])
    assert comparison.rows[0].name == "wrong"
    assert comparison.rows[0].host_traffic_bytes is None
    assert comparison.best.name == "slow"
    text = shown(comparison)
    assert re.search(r"^\* slow .* safe *$", text, re.MULTILINE)
    assert re.search(r"^  wrong .* unsafe *$", text, re.MULTILINE)
    assert re.search(r"wrong: verify finds \d+ violation", text)
    assert "none is safe, so none is best" in shown(compare([judged(broken(better), "wrong")]))


@pytest.mark.parametrize(
    ("names", "room", "expected"),
    [
        (["a.json", "b.json"], 8, ["a.json", "b.json"]),
        (["runs/monday/plan.json", "runs/tuesday/plan.json"], 20, ["…/monday/plan.json", "…/tuesday/plan.json"]),
        (["x" * 30 + "1.json", "x" * 30 + "2.json"], 14, ["…" + "x" * 7 + "1.json", "…" + "x" * 7 + "2.json"]),
        (["/data/a/schedule.json", "/data/b/schedule.json"], 14, ["…/a/sch…e.json", "…/b/sch…e.json"]),
        (["first/" + "y" * 30 + ".json", "gpipe"], 14, ["…" + "y" * 8 + ".json", "gpipe"]),
        (["same/" * 5 + "plan.json"] * 2, 14, ["…/plan.json"] * 2),
    ],
)
def test_two_rows_that_are_different_have_names_that_are(names, room, expected):
    assert short_names(names, room) == expected


@given(st.lists(st.text("ab/", min_size=1, max_size=40), min_size=1, max_size=5, unique=True), st.integers(14, 30))
def test_short_names_fit_and_stay_different(names, room):
    found = short_names(names, room)
    assert all(len(name) <= room for name in found)
    assert len(set(found)) == len(names)


def test_schedules_of_different_instances_are_warned_about_and_compared_per_microbatch(offloading):
    longer = quick(COSTS, 3 * GB, microbatches=8).schedule
    assert longer.forecast.makespan_ns > offloading.forecast.makespan_ns
    comparison = compare([judged(offloading, "short"), judged(longer, "long")])
    assert comparison.differences == (
        "microbatches differ: 4 in short; 8 in long",
        "caps differ: 1.00 GB in short; 3.00 GB in long",
    )
    assert [row.name for row in comparison.rows] == ["long", "short"]
    text = shown(comparison)
    assert "not of the same instance" in text
    assert "per mb" in text


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (uniform(2, 2, forward_ms=2), r"costs differ: sha256:\w{8} in a; sha256:\w{8} in b"),
        (uniform(3, 2), "devices differ: 2 in a; 3 in b"),
    ],
)
def test_other_costs_and_devices_are_differences_too(offloading, other, sentence):
    found = compare([judged(offloading, "a"), judged(quick(other, GB).schedule, "b")]).differences
    assert any(re.fullmatch(sentence, one) for one in found)


def test_caps_that_look_the_same_are_told_apart_by_their_bytes(offloading):
    near = quick(COSTS, GB + 1, recompute=False).schedule
    found = compare([judged(offloading, "a"), judged(near, "b")]).differences
    assert found == ("caps differ: 1000000000 in a; 1000000001 in b",)


def test_the_table_is_no_wider_than_the_terminal_and_loses_no_number(offloading):
    model = Model(builder="gpt", microbatch_size=512, sequence_length=4096)
    long = ir.seal(structs.replace(offloading, model=model))
    rows = [judged(long, "a/" + "very/" * 20 + "long.json"), judged(quick(COSTS, 3 * GB).schedule, "b.json")]
    text = shown(compare(rows), width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    lines = [line.split() for line in text.splitlines() if line.rstrip().endswith(" safe")]
    assert len(lines) == 2
    row = next(line for line in lines if line[0].endswith("ry/long.json"))
    assert row[-2] == f"{rows[0].tokens_per_s:,.0f}"
    wide = shown(compare(rows), width=200)
    assert rows[0].name in wide
    assert "of cap" in wide


def test_a_narrow_table_leaves_out_the_kind_before_it_cuts_names_of_known_schedules(offloading):
    row = judged(offloading, "schedule.json")
    names = [f"interleaved-1f1b-recompute-{n}" for n in (1, 2, 3)]
    known = [replace(row, name=name, kind="composition") for name in names]
    lines = shown(compare([row, *known])).splitlines()
    assert set(names) <= {word for line in lines for word in line.split()}
    assert "composition" not in " ".join(lines)
    assert "composition" in shown(compare([row, *known]), width=100)


def test_names_of_which_a_number_is_left_stand_whole_below_the_table(offloading):
    rows = [judged(offloading, f"{'x' * 20}{n}{'y' * 20}") for n in (1, 2)]
    text = shown(compare(rows), width=66)
    for number, row in enumerate(rows, start=1):
        assert re.search(rf"^[* ] #{number} …", text, re.MULTILINE)
        assert re.search(rf"^#{number}: {row.name}", text, re.MULTILINE)


# -- published schedules ------------------------------------------------------------------------------------------


def test_a_published_schedule_is_what_compile_makes_of_it(offloading):
    row = published_row(wanted("1f1b", COSTS, quick(COSTS, 2 * GB).schedule))
    expected = quick(COSTS, 2 * GB, method="1f1b").schedule.forecast
    assert isinstance(row, Facts)
    assert (row.name, row.makespan_ns, row.cap_bytes, row.microbatches) == ("1f1b", expected.makespan_ns, 2 * GB, 4)


def test_one_that_does_not_fit_or_is_not_defined_has_the_reason(offloading):
    row = published_row(wanted("gpipe", COSTS, offloading))
    assert isinstance(row, Absent)
    free = quick(COSTS, 100 * GB, method="gpipe").schedule.forecast.makespan_ns
    assert row.reason == f"does not fit: needs 4.00 GB and would take {free / 10**6:.4g} ms"
    missing = published_row(wanted("gis", uniform(2, 1), quick(uniform(2, 1), GB).schedule))
    assert missing == Absent("gis", "2 layers cannot fill 2 devices x 2 stages per device: expected at most 2 stages")


def test_methods_are_named_by_kind_too_and_a_row_says_its_kind():
    assert chosen_methods("stock") == [name for name, method in METHODS.items() if method.kind == "stock"]
    assert chosen_methods("paper,gis-offload,1f1b") == [*chosen_methods("paper"), "gis-offload"]
    rows = [published_row(wanted(name, COSTS, quick(COSTS, 2 * GB).schedule)) for name in ("1f1b", "gis-offload")]
    assert [row.kind for row in rows] == ["paper", "composition"]
    assert {"paper", "composition"} <= set(shown(compare(rows)).split())


def test_too_little_host_memory_is_the_reason_where_it_is():
    short = quick(COSTS, GB, host_mem_bytes=1).schedule
    row = published_row(wanted("gis-offload", COSTS, short))
    assert isinstance(row, Absent)
    assert row.reason.startswith("does not fit the host's memory; with enough it would take ")


def test_a_schedule_that_kept_a_placement_is_compared_with_others_there():
    even = uniform(2, 4)
    (layer,) = even.layers
    first = structs.replace(layer, count=1, forward_ns=6 * layer.forward_ns)
    costs = structs.replace(even, layers=[first, structs.replace(layer, count=7)])
    options = {"microbatches": 6, "time_limit_s": 0.0}
    old = quick(even, 8 * GB, method="1f1b", **options).checked
    plan = quick(costs, 8 * GB, keep=old, **options).schedule
    assert [stage.layers for stage in plan.stages] == [(0, 4), (4, 8)]
    rows = list(study.published_rows(costs, plan, "s", list(METHODS), 1, pool=answers_here))
    told = {name: one.makespan_ns for name, one in plan.forecast.baselines.items() if one.fits}
    assert {row.name: row.makespan_ns for row in rows if isinstance(row, Facts)} == told
    assert "gis" not in told
    assert quick(costs, 8 * GB, method="1f1b", **options).schedule.forecast.makespan_ns < told["1f1b"]
    assert options_for(broken(plan), "1f1b", "s", kept_by(broken(plan))).keep is None


@pytest.mark.parametrize(
    ("cap", "options"), [(GB, {}), (3 * GB // 2, {"objective": "span"}), (2 * GB, {"split": False})]
)
def test_one_schedule_has_one_number_in_its_file_in_compare_and_in_report(cap, options):
    """Also where it fits by waiting for its memory, and where it fits on one placement and is faster on another."""
    costs = uniform(3, 4, d2h_ms=1.5, h2d_ms=1.5, shared_links="pairs")
    plan = quick(costs, cap, microbatches=6, time_limit_s=0.0, **options).schedule
    rows = [published_row(wanted(name, costs, plan)) for name in METHODS]
    compared = {row.name: row.makespan_ns for row in rows if isinstance(row, Facts)}
    told = {name: one.makespan_ns for name, one in plan.forecast.baselines.items() if one.fits}
    assert compared == told
    remarks = {row.name: row.remark for row in rows if isinstance(row, Facts)}
    assert remarks == {name: plan.forecast.baselines[name].reason for name in told}
    assert any(remark.startswith("waits for memory; as defined it takes ") for remark in remarks.values())


def test_all_published_schedules_have_a_row_or_a_reason(run, here):  # noqa: F811
    Path("profile.json").write_text(canonical(COSTS))
    Path("schedule.json").write_text(ir.to_text(quick(COSTS, 2 * GB).schedule))
    report = json.loads(run("compare", "--methods", "all", "--json").out)
    named = [row["name"] for row in report["schedules"]] + [row["name"] for row in report["absent"]]
    assert sorted(named) == sorted([*METHODS, "schedule.json"])
    assert report["differences"] == []
    assert all(row["safe"] and row["peak_bytes"] <= 2 * GB for row in report["schedules"])
    ordered = [row["makespan_ns"] for row in report["schedules"]]
    assert ordered == sorted(ordered)
    assert report["best"] == report["schedules"][0]["name"]


def test_compare_plans_in_processes_and_prints_results_alone_to_stdout(run):  # noqa: F811
    Path("schedule.json").write_text(ir.to_text(quick(uniform(2, 1), 2 * GB).schedule))
    outcome = run("compare", "--methods", "1f1b,gpipe", "-j", "1")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("2 devices, 4 microbatches, cap 2.00 GB (1.86 GiB) per device")
    assert re.search(r"^. 1f1b .*safe", outcome.out, re.MULTILINE)
    assert "gpipe  does not fit: needs 4.00 GB" in outcome.out


def test_costs_of_another_profile_are_a_difference(run, here):  # noqa: F811
    Path("schedule.json").write_text(ir.to_text(quick(uniform(2, 1, forward_ms=3), 2 * GB).schedule))
    report = json.loads(run("compare", "--methods", "1f1b", "--json").out)
    assert [sentence.split(":")[0] for sentence in report["differences"]] == ["costs differ"]


def test_bad_input_of_compare_is_one_sentence(run):  # noqa: F811
    assert refused(run("compare"), 2) == "schedule.json: cannot be read: No such file or directory"
    sentence = refused(run("compare", "--methods", "1f1b,best"), 2)
    assert sentence.startswith("--methods names 'best', expected some of all, paper, stock, composition, gpipe")
    Path("schedule.json").write_text(ir.to_text(quick(uniform(2, 1), 2 * GB).schedule))
    sentence = refused(run("compare", "--methods", "all", "--profile", "no.json"), 2)
    assert sentence == "no.json: cannot be read: No such file or directory"
