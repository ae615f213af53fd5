"""The difference of two schedules: what is found, how it is said, and what the exit code says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_schedules import Shape, build, changed, random_shape

from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.diff import compare
from optpipe_compiler.diff.ops import longest_rise
from optpipe_compiler.diff.records import Change, DifferentWaits, Moved, Regrouped
from optpipe_compiler.documents import ir
from optpipe_compiler.view.diff import render, verdict
from tests import test_cli

LOOP = (0, 1, 0, 1)
run, refused = test_cli.run, test_cli.refused


def words(old: ir.Schedule, new: ir.Schedule) -> str:
    return render(compare(old, new), "old.json", "new.json").plain


def swapped(schedule: ir.Schedule, device: int, first: str, second: str) -> ir.Schedule:
    """The schedule with two compute ops in each other's place; legal or not."""

    def change(plain):
        lane = plain["devices"][device]["compute"]
        places = {op.id: index for index, op in enumerate(schedule.devices[device].compute)}
        a, b = places[first], places[second]
        lane[a], lane[b] = lane[b], lane[a]

    return changed(schedule, change)


# -- what is found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_schedule_does_not_differ_from_itself(seed):
    schedule = build(random_shape(Random(seed), placements=[LOOP], microbatches=3), seed)
    difference = compare(schedule, ir.parse(ir.to_text(schedule), "again"))
    assert difference.identical
    assert difference.same_contract
    assert words(schedule, schedule) == "old.json -> new.json: no difference\n"


def test_only_the_timing_changes_when_forecast_and_origin_do():
    old = build(Shape(LOOP))

    def slower(plain):
        plain["forecast"]["makespan_ns"] *= 2
        plain["forecast"]["stages"][1]["forward_ns"] += 7
        plain["provenance"]["profile_digest"] = "another"

    new = changed(old, slower)
    difference = compare(old, new)
    assert difference.same_contract
    assert not difference.identical
    assert new.digest == old.digest
    text = words(old, new)
    assert "only the timing changed; setup, order, waits and promises are the same" in text
    assert "(+100.0%)" in text
    forwards = sum(cost.forward_ns for cost in old.forecast.stages)
    assert difference.costs == [Change("forward_ns", forwards, forwards + 7)]


def test_costs_are_those_of_a_microbatch_however_many_lengths_there_are():
    profile = uniform_profile(UniformOptions(devices=2, sliceable=True, sequence_length=8))
    lengths = {"equal": None, "unequal": (8, 4, 4, 8)}
    plans = {
        name: compile_schedule(profile, Options(10**10, 4, placement="linear", time_limit_s=0, lengths=one)).schedule
        for name, one in lengths.items()
    }
    costs = {row.name: row for row in compare(plans["equal"], plans["unequal"]).costs}
    assert costs["forward_ns"] == Change("forward_ns", 2_000_000, 1_500_000)


def test_other_bandwidths_of_host_links_are_said():
    old = build(Shape((0, 1), ranges=lambda stage, microbatch: [("offload", 2 * stage, 2 * stage + 2)]))
    new = changed(
        old, lambda plain: plain["forecast"]["links"][0].update(d2h_bytes_per_s=2 * 10**9, compute_permille=9)
    )
    link = old.forecast.links[0]
    of = f"device{'s' if len(link.devices) > 1 else ''} {', '.join(map(str, link.devices))}"
    assert compare(old, new).links == [
        Change("d2h_bytes_per_s", link.d2h_bytes_per_s, 2 * 10**9, of),
        Change("compute_permille", link.share_permille, 9, of),
    ]
    text = words(old, new)
    assert "only the timing changed" in text
    assert re.search(rf"host links\n  {of}: d2h .* -> 2.00 GB/s \(", text)


def test_times_of_ops_alone_are_timing_too():
    old = build(Shape(LOOP))
    difference = compare(old, changed(old, lambda plain: plain["forecast"]["times"][0]["start_ns"].__setitem__(0, 1)))
    assert (difference.same_contract, difference.identical) == (True, False)
    assert verdict(difference).startswith("only the timing changed")


def test_setup_changes_are_named_with_both_values():
    old = build(Shape(LOOP))
    new = changed(old, lambda plain: plain["setup"].update(cap_bytes=2 * 10**9, host_cap_bytes=None, reserve_bytes=4))
    assert compare(old, new).setup == [
        Change("cap_bytes", 10**9, 2 * 10**9),
        Change("host_cap_bytes", 2 * 10**9, None),
        Change("reserve_bytes", 3, 4),
    ]
    text = words(old, new)
    assert text.startswith("old.json -> new.json: changes setup\n")
    assert "memory cap per device  1.00 GB -> 2.00 GB (+100.0%)" in text
    assert "host memory cap        2.00 GB -> none\n" in text


def test_truths_are_said_as_yes_and_no():
    old, new = (
        changed(build(Shape(LOOP)), lambda plain, value=value: plain["provenance"]["options"].update(offload=value))
        for value in (True, False)
    )
    assert "option: offload  yes -> no\n" in words(old, new)


def test_a_change_that_rounding_would_hide_is_shown_in_full():
    old = build(Shape(LOOP))
    new = changed(old, lambda plain: plain["setup"].update(cap_bytes=10**9 + 1))
    assert "memory cap per device  1000000000 B -> 1000000001 B (+0.0%)" in words(old, new)


def test_the_number_of_forwards_is_told_where_it_changes():
    old, new = build(Shape(LOOP, microbatches=2)), build(Shape(LOOP, microbatches=3))
    assert Change("forward", 8, 12) in compare(old, new).counts


def test_the_fewest_ops_that_moved_are_counted_and_the_first_difference_is_shown():
    old = build(Shape((0, 1), microbatches=4))
    names = [op.id for op in old.devices[1].compute if not isinstance(op, ir.MessageOp)]
    new = swapped(old, 1, names[3], names[4])
    (row,) = compare(old, new).moved
    assert row == Moved(1, "compute", len(names), 1, 0, 0, 3, names[3], names[4])
    text = words(old, new)
    assert f"  device 1 compute: 1 of {len(names)} ops moved\n" in text
    assert f"    first at position 3: {names[4]} instead of {names[3]}\n" in text


def test_messages_are_a_lane_of_their_own():
    old = build(Shape((0, 1), microbatches=4))
    names = [op.id for op in old.devices[0].compute if isinstance(op, ir.SendActivation)]
    (row,) = compare(old, swapped(old, 0, names[0], names[1])).moved
    assert (row.device, row.lane, row.moved) == (0, "messages", 1)


def offload_of(stages):
    return lambda stage, microbatch: [("offload", 2 * stage, 2 * stage + 2)] if stage in stages else []


def test_memory_ops_are_told_by_stage_layers_and_microbatches():
    old, new = (build(Shape(LOOP, microbatches=4, ranges=offload_of(stages))) for stages in ([1], [2]))
    found = {(row.what, row.stage): row for row in compare(old, new).regrouped}
    everyone = [0, 1, 2, 3]
    assert found == {
        (what, stage): Regrouped(what, stage, (2 * stage, 2 * stage + 2), added, removed)
        for what in ("offload", "reload")
        for stage, added, removed in ((1, [], everyone), (2, everyone, []))
    }
    text = words(old, new)
    assert "stage 1, layers 2-3: offload and reload removed for microbatches 0-3\n" in text
    assert "stage 2, layers 4-5: offload and reload added for microbatches 0-3\n" in text


def test_a_recompute_of_one_layer_of_one_microbatch_is_told_in_the_singular():
    def one(stage, microbatch):
        return [("recompute", 3, 4)] if (stage, microbatch) == (1, 2) else []

    old, new = build(Shape(LOOP, microbatches=4)), build(Shape(LOOP, microbatches=4, ranges=one))
    text = words(old, new)
    assert "stage 1, layer 3: recompute added for microbatch 2\n" in text
    assert "recompute  0 -> 1\n" in text


def test_split_and_fused_backwards_are_told_by_stage():
    old = build(Shape(LOOP, microbatches=4, fused=lambda stage, microbatch: stage == 0 and microbatch in (0, 2)))
    new = build(Shape(LOOP, microbatches=4, fused=lambda stage, microbatch: stage == 0 and microbatch in (1, 2)))
    (row,) = compare(old, new).regrouped
    assert row == Regrouped("split", 0, None, [0], [1])
    text = words(old, new)
    assert "stage 0: backward split for microbatch 0\n" in text
    assert "stage 0: backward fused for microbatch 1\n" in text


def test_memory_ops_and_splits_of_slices_are_told_by_slice():
    def sliced(offloads, fused):
        return build(
            Shape(
                LOOP,
                microbatches=3,
                tokens=6,
                cuts=((0, 2, 4, 6),),
                ranges=lambda stage, unit: [("offload", 0, 2)] if stage == 0 and unit in offloads else [],
                fused=lambda stage, unit: stage == 1 and unit[-1] in fused,
            )
        )

    old, new = sliced(("0.0", "1.2"), "0"), sliced(("0.0", "0.1", "1.1"), "012")
    rows = {(row.what, row.stage): row for row in compare(old, new).regrouped}
    assert rows["offload", 0] == Regrouped("offload", 0, (0, 2), [(0, 1), (1, 1)], [(1, 2)])
    assert rows["split", 1].removed == [(m, part) for m in range(3) for part in (1, 2)]
    text = words(old, new)
    assert "stage 0, layers 0-1: offload and reload added for slices 0.1, 1.1\n" in text
    assert "stage 0, layers 0-1: offload and reload removed for slice 1.2\n" in text
    assert "stage 1: backward fused for slices 0.1-0.2, 1.1-1.2, 2.1-2.2\n" in text


def test_where_slices_are_others_memory_ops_are_told_by_microbatch():
    def everything(stage, unit):
        return [("offload", 0, 2)] if stage == 0 else []

    old, new = (
        build(Shape(LOOP, microbatches=3, tokens=6, cuts=(cuts,), ranges=chosen))
        for cuts, chosen in (((0, 3, 6), everything), ((0, 2, 4, 6), lambda stage, unit: []))
    )
    assert "stage 0, layers 0-1: offload and reload removed for microbatches 0-2\n" in words(old, new)


def test_waits_are_counted_by_device():
    old = build(Shape((0, 1), microbatches=3))
    new = changed(old, lambda plain: plain["devices"][1]["compute"][-1].update(after=[old.devices[1].compute[0].id]))
    difference = compare(old, new)
    assert difference.waits == [DifferentWaits(1, 1, 0)]
    assert verdict(difference) == "changes waits"


def test_promises_are_told_by_device():
    old = build(Shape((0, 1)))
    new = changed(old, lambda plain: plain["devices"][1].update(peak_bytes=10**8))
    difference = compare(old, new)
    assert difference.promises == [Change("peak_bytes", 10**9, 10**8, "device 1")]
    assert verdict(difference) == "changes promises"


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ((0.25, 0.5), "25.0% -> 50.0%"),
        ((0.2743764172335601, 0.2743611345127773), "27.438% -> 27.436%"),
        ((0.0, 1e-30), "0.0 -> 1e-30"),
    ],
)
def test_bubbles_are_told_apart_by_as_few_digits_as_do(shares, told):
    old, new = (
        changed(build(Shape((0, 1))), lambda plain, share=share: plain["forecast"].update(bubble_fraction=share))
        for share in shares
    )
    assert re.search(rf"bubble +{re.escape(told)}\n", words(old, new))


def test_other_cuts_on_the_same_devices_leave_the_order_comparable():
    old = build(Shape(LOOP))

    def recut(plain):
        plain["stages"][0]["layers"], plain["stages"][1]["layers"] = (0, 1), (1, 4)

    difference = compare(old, changed(old, recut))
    assert difference.comparable
    assert difference.stages == [Change("layers", "0-1", "0", "stage 0"), Change("layers", "2-3", "1-3", "stage 1")]
    assert difference.moved == []


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 1, 0), (0, 1, 2)])
def test_schedules_with_other_stages_or_devices_are_compared_as_a_whole(placement):
    old, new = build(Shape(LOOP)), build(Shape(placement, ranges=offload_of([1])))
    difference = compare(old, new)
    assert not difference.comparable
    assert (difference.moved, difference.regrouped, difference.waits) == ([], [], [])
    text = words(old, new)
    assert "ops are not compared one by one" in text
    assert "device of each  0 1 0 1 -> " in text
    assert re.search(r"  offload +0 -> 2\n", text)


@given(st.permutations(range(7)))
def test_the_longest_rise_is_the_longest_of_all(numbers):
    rising = (
        [number for index, number in enumerate(numbers) if mask >> index & 1] for mask in range(1 << len(numbers))
    )
    assert longest_rise(numbers) == max(len(part) for part in rising if part == sorted(part))


@pytest.mark.parametrize("seed", range(6))
def test_turning_the_difference_round_exchanges_old_and_new(seed):
    first, second = (
        build(random_shape(Random(seed + extra), placements=[LOOP], microbatches=3), seed) for extra in (0, 100)
    )
    there, back = compare(first, second), compare(second, first)
    for name in ("setup", "stages", "counts", "promises", "forecast", "costs", "links", "origin"):
        exchanged = [Change(row.name, row.new, row.old, row.of) for row in getattr(there, name)]
        assert exchanged == getattr(back, name)
    assert [(row.moved, row.added, row.removed) for row in there.moved] == [
        (row.moved, row.removed, row.added) for row in back.moved
    ]
    assert [(row.added, row.removed) for row in there.regrouped] == [(row.removed, row.added) for row in back.regrouped]
    assert there.same_contract is (first.digest == second.digest)


def test_a_file_without_any_op_is_compared_too():
    empty = changed(build(Shape((0, 1))), lambda plain: plain.update(devices=[], stages=[]))
    assert not compare(empty, build(Shape((0, 1)))).comparable
    assert compare(empty, empty).identical
    assert "largest promised peak  0 B -> 1.00 GB" in words(empty, build(Shape((0, 1))))


# -- every field --------------------------------------------------------------------------------------------------


def listed(value):
    """A value with lists for tuples, so that each part of it can be changed."""
    if isinstance(value, dict):
        return {key: listed(part) for key, part in value.items()}
    return [listed(part) for part in value] if isinstance(value, list | tuple) else value


def leaves(value, path=()):
    """The paths of all that is no list and no object."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path
    for key, part in items or ():
        yield from leaves(part, (*path, key))


OTHER = {"optimal": "feasible", "feasible": "optimal", "makespan": "span", "paper": "stock", "stock": "paper",
         "composition": "stock"}  # fmt: skip


def another(value):
    if isinstance(value, bool):
        return not value
    return OTHER.get(value, value + "x") if isinstance(value, str) else 7 if value is None else value + 1


def offloads(stage, unit):
    return [("offload", 2, 3), ("recompute", 3, 4)] if stage == 1 else []


def planned() -> ir.Schedule:
    profile = uniform_profile(UniformOptions(devices=2, shared_links="pairs"))
    return compile_schedule(profile, Options(3 * 10**9, 4, placement="loop", time_limit_s=0)).schedule


SCHEDULES = {
    "planned": planned,
    "with memory ops": lambda: build(Shape(LOOP, ranges=offloads)),
    "of lengths": lambda: build(Shape((0, 1), microbatches=4, tokens=6, cuts=((0, 6), (0, 4)))),
    "of slices": lambda: build(Shape(LOOP, microbatches=2, tokens=6, cuts=((0, 2, 6),))),
}
MEANT = {
    ("setup",): "setup",
    ("stages",): "stages",
    ("devices", "compute"): "order",
    ("devices", "peer"): "ends of messages",
    ("devices", "after"): "waits",
    ("devices", "_bytes"): "promises",
    ("devices", "deliveries"): "only the known deliveries changed",
    ("forecast", "_ns"): "only the timing changed",
    ("forecast", "bubble"): "only the timing changed",
    ("forecast", "links"): "only the timing changed",
    ("forecast", "baselines"): "only the baselines changed",
    ("forecast", "bound"): "only the bound changed",
    ("forecast", "outcome"): "only the bound changed",
    ("forecast", "method"): "only the method changed",
    ("provenance",): "only the origin changed",
}
"""What the verdict says of fields whose path has these words, the last that applies."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_change_of_any_one_field_is_told_and_called_what_it_is(name):
    """Of fields in lists the last is changed; what is no schedule any more, or is sealed anew, is left out."""
    old = SCHEDULES[name]()
    plain = listed(msgspec.to_builtins(old))
    paths = {tuple("#" if isinstance(key, int) else key for key in path): path for path in leaves(plain)}
    told = 0
    for fields, path in paths.items():
        if fields[-1] in ("format", "version", "revision", "digest", "op", "lane") or "shape_of" in fields:
            continue
        new = listed(plain)
        *way, last = path
        place = new
        for key in way:
            place = place[key]
        place[last] = another(place[last])
        try:
            changed_one = ir.seal(msgspec.convert(new, ir.Schedule))
        except msgspec.ValidationError:
            continue
        text = words(old, changed_one)
        assert len(text.splitlines()) > 2 or fields[-1] in ("stage", "shape", "slice", "device"), (path, text)
        written = ".".join(map(str, path))
        wanted = [said for parts, said in MEANT.items() if parts[0] == path[0] and all(one in written for one in parts)]
        if wanted and fields[-1] not in ("stage", "shape", "slice", "device"):
            assert wanted[-1] in text.splitlines()[0], (path, text)
            told += 1
    assert told > 40


def test_costs_that_move_between_stages_are_told_by_stage():
    old = build(Shape(LOOP))

    def moved(plain):
        for stage, change in ((0, 3), (1, -3)):
            plain["forecast"]["stages"][stage]["forward_ns"] += change

    had = [cost.forward_ns for cost in old.forecast.stages]
    assert compare(old, changed(old, moved)).costs == [
        Change("forward_ns", had[0], had[0] + 3, "stage 0"),
        Change("forward_ns", had[1], had[1] - 3, "stage 1"),
    ]


def test_bytes_that_move_between_layers_are_told_by_layer():
    old = build(Shape(LOOP))

    def moved(plain):
        saved = plain["stages"][1]["saved_bytes"]
        saved[0], saved[1] = saved[0] + 2, saved[1] - 2

    first, second = old.stages[1].saved_bytes
    assert compare(old, changed(old, moved)).stages == [
        Change("saved_bytes", first, first + 2, "stage 1, layer 2"),
        Change("saved_bytes", second, second - 2, "stage 1, layer 3"),
    ]


def test_lengths_are_told_as_lengths_in_their_order():
    old, new = (
        build(Shape((0, 1), microbatches=4, tokens=6, cuts=cuts)) for cuts in (((0, 6), (0, 4)), ((0, 4), (0, 6)))
    )
    assert compare(old, new).setup[0] == Change("lengths of microbatches", "6, 4, 6, 4", "4, 6, 4, 6")


def test_another_baseline_alone_is_no_timing():
    old = planned()
    names = [name for name, baseline in old.forecast.baselines.items() if baseline.makespan_ns is not None]

    def other(plain):
        plain["forecast"]["baselines"][names[0]]["makespan_ns"] = 5
        del plain["forecast"]["baselines"][names[1]]
        untried = {"makespan_ns": None, "peak_bytes": None, "fits": False, "reason": "not tried"}
        plain["forecast"]["baselines"][names[2]] |= untried

    had = old.forecast.baselines[names[0]].makespan_ns
    difference = compare(old, changed(old, other))
    assert difference.baselines == [
        Change("makespan_ns", had, 5, names[0]),
        Change("is compared with", "yes", "no", names[1]),
        Change("is compared with", "yes", "no: not tried", names[2]),
    ]
    assert verdict(difference).startswith("only the baselines changed")


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def files(run):
    """Three files: a schedule, the same with another forecast, and one with another order."""
    old = build(Shape(LOOP, microbatches=4))
    timing = changed(old, lambda plain: plain["forecast"].update(makespan_ns=1))
    other = build(Shape(LOOP, microbatches=4, ranges=offload_of([2])))
    for name, schedule in (("old", old), ("timing", timing), ("other", other)):
        Path(f"{name}.json").write_text(ir.to_text(schedule))


@pytest.mark.parametrize(("name", "code"), [("old", 0), ("timing", 0), ("other", 1)])
def test_the_exit_code_says_whether_a_run_differs_if_asked(run, files, name, code):
    assert run("diff", "old.json", f"{name}.json").code == 0
    outcome = run("diff", "old.json", f"{name}.json", "--exit-code")
    assert (outcome.code, outcome.err) == (code, "")
    assert outcome.out.startswith(f"old.json -> {name}.json: ")


@pytest.mark.parametrize(
    ("paths", "said"), [(("/dev/null", "old.json"), "new schedule"), (("old.json", "/dev/null"), "removed")]
)
def test_a_schedule_that_is_new_or_removed_is_a_difference_told_in_two_lines(run, files, paths, said):
    outcome = run("diff", *paths)
    first, second = outcome.out.splitlines()
    assert (outcome.code, outcome.err, first) == (0, "", f"{paths[0]} -> {paths[1]}: {said}")
    assert re.fullmatch(r"  \d+ devices, \d+ microbatches: \S+ us per step by \S+, at most .* on a device", second)
    assert run("diff", *paths, "--exit-code").code == 1
    report = json.loads(run("diff", *paths, "--json").out)
    assert (report["verdict"], report["same_contract"]) == (said, False)
    assert report["makespan_ns"] == ir.load("old.json").forecast.makespan_ns


def test_two_that_are_none_are_refused(run):
    assert refused(run("diff", "/dev/null", "/dev/null"), 2) == "OLD and NEW are /dev/null, expected a schedule"


def test_json_is_one_object_with_all_parts(run, files):
    outcome = run("diff", "old.json", "other.json", "--json")
    assert len(outcome.out.splitlines()) == 1
    report = json.loads(outcome.out)
    difference = compare(ir.load("old.json"), ir.load("other.json"))
    assert report.pop("verdict") == verdict(difference)
    assert (report.pop("old"), report.pop("new")) == ("old.json", "other.json")
    assert report == msgspec.json.decode(msgspec.json.encode(difference))


def test_what_is_no_schedule_is_refused(run, files):
    assert refused(run("diff", "old.json", "none.json"), 2) == "none.json: cannot be read: No such file or directory"
    assert refused(run("diff", "profile.json", "old.json"), 2).startswith("profile.json: $.format is ")
