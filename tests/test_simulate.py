"""Earliest starts by hand, gates on memory, and re-timing that never loses time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from optpipe_compiler.machine.orders import peaks, retime
from optpipe_compiler.model.schedule import Kind, Mode, Schedule, Stuck, Task
from tests.given_order import LaneOrders, memory_curve
from tests.instances import problem
from tests.machines import at_one_speed, dispatched, simulate
from tests.plans import serial
from tests.strategies import problems

F, I, W, B, R, D, H = Kind  # noqa: E741 (torch's letters)


def tasks(text: str) -> tuple[Task, ...]:
    """`F0.1` is the forward of stage 0 and microbatch 1."""
    parts = (word[1:].split(".") for word in text.split())
    return tuple(
        Task(Kind[word[0]], int(stage), int(microbatch))
        for word, (stage, microbatch) in zip(text.split(), parts, strict=True)
    )


def plan(*lanes: str, d2h: str = "", h2d: str = "", allocations: tuple[str, ...] = (), host: int = 100) -> LaneOrders:
    """A plan with one link per device; memory is taken in the order of the compute lanes if not said otherwise."""
    rest = ("",) * (len(lanes) - 1)
    return LaneOrders(
        tuple(map(tasks, lanes)),
        tuple(map(tasks, (d2h, *rest))),
        tuple(map(tasks, (h2d, *rest))),
        tuple(map(tasks, allocations or lanes)),
        (host,) * len(lanes),
    )


def starts(schedule: Schedule, text: str) -> list[int]:
    return [schedule.starts[task] for task in tasks(text)]


def test_ops_start_when_lane_data_and_messages_allow():
    """F = I = W = 10, messages 1: the round trip of a microbatch, then the other in its gaps."""
    one = problem(2, 2, 100)
    timed = simulate(one, plan("F0.0 F0.1 I0.0 W0.0 I0.1 W0.1", "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1"), "by-hand")
    assert starts(timed, "F0.0 F1.0 I1.0 I0.0 W0.0") == [0, 11, 21, 32, 42]
    assert starts(timed, "F0.1 F1.1 I1.1 W1.0 W1.1") == [10, 31, 41, 51, 61]
    assert starts(timed, "I0.1 W0.1") == [52, 62]
    assert (timed.makespan, timed.span, timed.method) == (72, 72, "by-hand")
    assert timed.bubble_fraction == pytest.approx(1 - 120 / 144)


def test_the_span_is_the_longest_of_one_device_and_shorter_than_the_makespan():
    timed = simulate(problem(2, 1, 100), plan("F0.0 B0.0", "F1.0 B1.0"), "")
    assert (timed.makespan, timed.span) == (10 + 1 + 10 + 20 + 1 + 20, 62)
    late = simulate(problem(2, 1, 100), plan("F0.0 I0.0 W0.0", "F1.0 I1.0 W1.0"), "")
    assert (late.makespan, late.span) == (52, 52)


def test_a_fused_backward_hands_its_gradient_over_after_the_weights():
    timed = simulate(problem(2, 1, 100), plan("F0.0 B0.0", "F1.0 B1.0"), "")
    assert starts(timed, "F1.0 B1.0 B0.0") == [11, 21, 42]


def test_a_backward_waits_for_its_reload_and_the_reload_for_its_offload():
    timed = simulate(
        problem(1, 1, 100),
        plan("F0.0 B0.0", d2h="D0.0", h2d="H0.0", allocations=("F0.0 H0.0 B0.0",)),
        "",
    )
    assert starts(timed, "F0.0 D0.0 H0.0 B0.0") == [0, 10, 22, 34]


def test_transfers_of_devices_behind_one_link_take_turns():
    shared = replace(problem(2, 1, 100), link_of=(0, 0))
    lanes = plan("F0.0 B0.0", "F1.0 B1.0", allocations=("F0.0 H0.0 B0.0", "F1.0 H1.0 B1.0"))
    timed = simulate(shared, lanes._replace(d2h=(tasks("D1.0 D0.0"),), h2d=(tasks("H1.0 H0.0"),)), "")
    assert starts(timed, "D1.0 D0.0 H1.0 H0.0") == [21, 33, 33, 45]


def test_the_next_forward_waits_for_the_memory_that_a_backward_frees():
    """An activation has 4 units: with 7 a second one has no place, with 8 it has."""
    lanes = plan("F0.0 F0.1 B0.0 B0.1")
    order = plan("F0.0 B0.0 F0.1 B0.1")
    assert starts(simulate(problem(1, 2, 8), lanes, ""), "F0.0 F0.1 B0.0") == [0, 10, 20]
    assert starts(simulate(problem(1, 2, 7), order, ""), "F0.0 B0.0 F0.1") == [0, 10, 30]
    with pytest.raises(Stuck, match="3 of 4 tasks never start"):
        simulate(problem(1, 2, 7), lanes, "")


@pytest.mark.parametrize(
    ("lane", "needs"),
    [
        ("F0.0 B0.0 F0.1 B0.1", 4),
        ("F0.0 I0.0 W0.0 F0.1 I0.1 W0.1", 4),
        ("F0.0 I0.0 F0.1 W0.0 I0.1 W0.1", 6),
        ("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1", 6),
        ("F0.0 R0.0 B0.0 F0.1 B0.1", 4),
        ("F0.0 F0.1 R0.0 B0.0 R0.1 B0.1", 5),
    ],
)
def test_an_order_needs_exactly_the_memory_that_it_holds_at_once(lane, needs):
    """An activation has 4 units, 2 of them between I and W; a recomputed one keeps 1."""
    one = problem(1, 2, needs, checkpoint=1)
    assert peaks(simulate(one, plan(lane), "")) == [needs]
    with pytest.raises(Stuck):
        simulate(replace(one, budget=(needs - 1,)), plan(lane), "")


@pytest.mark.parametrize(
    ("extra", "lane", "needs"),
    [
        ({"forward_extra": 3}, "F0.0 B0.0", 7),
        ({"backward_extra": 3}, "F0.0 B0.0", 7),
        ({"backward_input_extra": 3}, "F0.0 I0.0 W0.0", 7),
        ({"backward_weight_extra": 3}, "F0.0 I0.0 W0.0", 5),
        ({"captured": 3, "residue": 5}, "F0.0 I0.0 W0.0", 7),
        ({"forward_extra": 3}, "F0.0 R0.0 B0.0", 7),
    ],
)
def test_what_exists_only_while_an_op_runs_needs_its_memory_then(extra, lane, needs):
    one = problem(1, 1, needs, **extra)
    assert simulate(one, plan(lane), "").starts
    with pytest.raises(Stuck):
        simulate(replace(one, budget=(needs - 1,)), plan(lane), "")


def test_an_op_overtakes_in_memory_only_where_the_earlier_one_still_fits():
    """The reload is planned first but comes late; the forward goes ahead of it only if both fit."""
    lanes = plan("F0.0 F0.1 B0.0 B0.1", d2h="D0.0", h2d="H0.0", allocations=("F0.0 H0.0 F0.1 B0.0 B0.1",))
    assert starts(simulate(problem(1, 2, 12), lanes, ""), "H0.0 F0.1") == [22, 10]
    assert starts(simulate(problem(1, 2, 8), lanes, ""), "H0.0 F0.1") == [22, 22]


def test_offloads_keep_to_their_share_of_the_host():
    lanes = plan(
        "F0.0 F0.1 B0.0 B0.1", d2h="D0.0 D0.1", h2d="H0.0 H0.1", allocations=("F0.0 F0.1 H0.0 B0.0 H0.1 B0.1",)
    )
    one = problem(1, 2, 100)
    assert starts(simulate(one, lanes._replace(host_limit=(8,)), ""), "D0.1 H0.0") == [22, 22]
    assert starts(simulate(one, lanes._replace(host_limit=(7,)), ""), "D0.1 H0.0") == [34, 22]
    assert simulate(one, lanes._replace(host_limit=(4,)), "").host_peaks == (4,)
    with pytest.raises(Stuck):
        simulate(one, lanes._replace(host_limit=(3,)), "")


@pytest.mark.parametrize(
    "lanes",
    [
        ("B0.0 F0.0",),
        ("F0.0 W0.0 I0.0",),
        ("F0.1 B0.0 F0.0 B0.1",),
        ("F0.0 B0.0", "B1.0 F1.0"),
        ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"),
    ],
)
def test_an_order_that_waits_for_itself_is_stuck(lanes):
    with pytest.raises(Stuck, match="tasks never start"):
        simulate(problem(len(lanes), 2, 100), plan(*lanes), "")


def test_the_memory_curve_shows_what_is_held_after_every_start_with_frees_before_allocations():
    timed = simulate(problem(1, 2, 8), plan("F0.0 I0.0 W0.0 F0.1 B0.1"), "")
    assert memory_curve(timed, 0) == [(0, 4), (10, 4), (20, 2), (30, 4), (40, 4)]
    assert peaks(timed) == [4]


# -- re-timing ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(one=problems())
def test_retiming_a_dispatched_schedule_is_never_later_and_never_above_the_budget(one):
    """Never later where no transfer slows another down: a reload that waits may keep an offload from that."""
    alike = at_one_speed(one)
    found = list(dispatched(alike))
    assume(found)
    for timed in found:
        assert all(retime(timed, alike).starts[task] <= start for task, start in timed.starts.items())
    for timed in dispatched(one):
        again = retime(timed, one)
        assert all(peak <= budget for peak, budget in zip(peaks(again), one.budget, strict=True))
        assert all(got <= limit for got, limit in zip(again.host_peaks, timed.host_peaks, strict=True))


@settings(max_examples=60, deadline=None)
@given(one=problems(), split=st.booleans(), modes=st.lists(st.sampled_from(Mode), min_size=8, max_size=8))
def test_retiming_one_microbatch_at_a_time_closes_the_gaps_within_its_own_peak(one, split, modes):
    def mode(stage: int, microbatch: int) -> Mode:
        chosen = modes[(3 * stage + microbatch) % len(modes)]
        return Mode.KEEP if chosen is Mode.OFFLOAD and one.link_of[one.stages[stage].device] is None else chosen

    slow = serial(one, split=split, mode=mode)
    tight = replace(one, budget=tuple(peaks(slow)))
    fast = retime(slow, tight)
    assert all(fast.starts[task] <= start for task, start in slow.starts.items())
    assert all(peak <= budget for peak, budget in zip(peaks(fast), tight.budget, strict=True))


def test_retiming_on_other_units_converts_the_share_of_the_host():
    in_bytes = problem(1, 3, 6 * 1024, saved=4096, residue=2048)
    timed = serial(in_bytes, split=True, mode=lambda stage, microbatch: Mode.OFFLOAD)
    assert timed.host_peaks == (4096,)
    again = retime(timed, replace(problem(1, 3, 6), unit_bytes=1024))
    assert again.host_peaks == (4,)
    assert again.starts == retime(timed, in_bytes).starts
