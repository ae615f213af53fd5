"""The full model: each law alone on the smallest instance that it decides, and optima known by hand or by formula."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import compress, product
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optpipe_compiler.documents.profile import load as load_profile
from optpipe_compiler.documents.profile import value_of
from optpipe_compiler.machine.orders import peaks, retime
from optpipe_compiler.model.placement import layout
from optpipe_compiler.model.problem import Caps, Freedom, Problem, build, coarsen
from optpipe_compiler.model.schedule import Kind, Schedule, Stuck, Task
from optpipe_compiler.plan import exact
from optpipe_compiler.solver import minimum
from optpipe_compiler.solver.minimum import one_at_a_time, quickly_one_at_a_time
from optpipe_compiler.solver.worker import Limits, Request, SearchEvent, solve
from tests.given_order import lane_orders
from tests.instances import problem
from tests.machines import dispatched, simulate
from tests.plans import best, log_of, optimum, start
from tests.strategies import problems

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Stage
    from optpipe_compiler.solver.variables import Activation
    from tests.plans import Force

NOTHING = Freedom(offload=False, recompute=False, split=False)
SPLIT = Freedom(offload=False, recompute=False, split=True)
OFFLOAD = Freedom(offload=True, recompute=False, split=False)
LAG = 2


def shortest(one: Problem, force: Force = lambda a: []) -> int | None:
    """The least makespan over schedules that take the forced decisions."""
    found = best(one, force)
    return None if found is None else found[0]


def taken(**decisions: int) -> Force:
    """Take decisions (split, offload, recompute: 0 or 1) for every activation."""
    return lambda a: [getattr(one, name) == value for one in a.values() for name, value in decisions.items()]


def both(*forces: Force) -> Force:
    return lambda a: [constraint for force in forces for constraint in force(a)]


# -- laws of time -------------------------------------------------------------------------------------------------


def test_a_backward_follows_its_forward():
    assert shortest(problem(1, 1, 4), taken(split=0)) == 10 + 20
    assert shortest(problem(1, 1, 4), taken(split=1)) == 10 + 10 + 10


def test_messages_take_their_time_and_a_split_backward_hands_over_before_the_weights():
    assert shortest(problem(2, 1, 4), taken(split=0)) == (10 + 1 + 10) + (20 + 1 + 20)
    assert shortest(problem(2, 1, 4), taken(split=1)) == (10 + 1 + 10) + (10 + 1 + 10) + 10
    assert shortest(problem(2, 1, 4, send_activation=5, send_gradient=7), taken(split=0)) == 60 + 5 + 7


def test_a_device_computes_one_op_at_a_time():
    assert shortest(problem(1, 2, 100, freedom=NOTHING)) == 2 * 30
    assert shortest(problem(1, 2, 100, freedom=SPLIT)) == 2 * 30
    assert shortest(problem(1, 2, 100), taken(recompute=1)) == 2 * 40


@pytest.mark.parametrize("name", ["forward", "backward", "weight", "away", "back", "again"])
def test_microbatches_run_in_order_per_stage_and_kind(name):
    def reversed_(a: dict[tuple[int, int], Activation]) -> list[Any]:
        return [getattr(a[0, 0], name) > getattr(a[0, 1], name)]

    assert shortest(problem(1, 2, 100), reversed_) is None
    assert shortest(problem(1, 2, 100), lambda a: [getattr(a[0, 0], name) <= getattr(a[0, 1], name)]) == 60


def test_a_backward_waits_for_reload_and_the_reload_for_the_offload():
    assert shortest(problem(1, 1, 4), taken(offload=1)) == 10 + 12 + 12 + 20
    assert shortest(problem(1, 1, 4, offload=3, reload=5), taken(offload=1)) == 10 + 3 + 5 + 20


def test_copies_take_compute_behind_the_forward_and_before_the_backward():
    """By hand: with room for both, the lane idles for the copies of a microbatch beside the ops of the other one."""
    free = {"offload": 4, "reload": 4, "freedom": OFFLOAD}
    both = free | {"offload_busy": 4, "reload_busy": 3}
    assert shortest(problem(1, 1, 4, **free), taken(offload=1)) == 10 + 4 + 4 + 20
    assert shortest(problem(1, 1, 4, **both), taken(offload=1)) == 10 + 4 + 4 + 20
    assert shortest(problem(1, 2, 8, **free), taken(offload=1)) == 60
    assert shortest(problem(1, 2, 8, **free, offload_busy=4), taken(offload=1)) == 60 + 2 * 4
    assert shortest(problem(1, 2, 8, **both), taken(offload=1)) == 60 + 2 * 4 + 2 * 3
    assert shortest(problem(1, 2, 8, **both)) == 60


def test_a_recomputation_runs_between_forward_and_backward():
    assert shortest(problem(1, 1, 4), taken(recompute=1)) == 10 + 10 + 20


@pytest.mark.parametrize(("transfers", "apart", "shared"), [((12, 12), 76, 77), ((1, 12), 65, 66), ((14, 1), 67, 70)])
def test_devices_behind_one_link_take_turns_in_either_direction(transfers, apart, shared):
    """By hand: device 1's transfers are on the critical path, device 0's must fit beside them on a shared link."""
    one = problem(2, 1, 4, offload=transfers[0], reload=transfers[1])
    assert shortest(one, taken(offload=1)) == apart
    assert shortest(replace(one, link_of=(0, 0)), taken(offload=1)) == shared


def test_an_activation_has_exactly_one_fate():
    def fates(*chosen: str) -> Force:
        return lambda a: [getattr(a[0, 0], name) == (name in chosen) for name in ("keep", "offload", "recompute")]

    for one in ("keep", "offload", "recompute"):
        assert shortest(problem(1, 1, 4), fates(one)) is not None
    for several in ((), ("keep", "offload"), ("offload", "recompute"), ("keep", "recompute")):
        assert shortest(problem(1, 1, 4), fates(*several)) is None


@pytest.mark.parametrize(
    ("freedom", "decision"),
    [
        (Freedom(offload=False), {"offload": 1}),
        (Freedom(recompute=False), {"recompute": 1}),
        (Freedom(split=False), {"split": 1}),
    ],
)
def test_what_is_forbidden_is_not_done(freedom, decision):
    assert shortest(problem(1, 1, 4), taken(**decision)) is not None
    assert shortest(problem(1, 1, 4, freedom=freedom), taken(**decision)) is None


def test_a_device_without_a_link_does_not_offload():
    assert shortest(problem(1, 1, 4, links=False), taken(offload=1)) is None


# -- laws of memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "decision", "needs"),
    [
        ({}, {"split": 0}, 4),
        ({}, {"split": 1}, 4),
        ({}, {"offload": 1}, 4),
        ({}, {"recompute": 1}, 4),
        ({"forward_extra": 3}, {"split": 0}, 7),
        ({"forward_extra": 3}, {"recompute": 1}, 7),
        ({"backward_extra": 3}, {"split": 0}, 7),
        ({"backward_extra": 3}, {"split": 1}, 4),
        ({"backward_input_extra": 3}, {"split": 1}, 7),
        ({"backward_input_extra": 3}, {"split": 0}, 4),
        ({"backward_weight_extra": 3}, {"split": 1}, 5),
        ({"captured": 3, "residue": 3}, {"split": 1}, 7),
        ({"captured": 3, "residue": 6, "backward_weight_extra": 2}, {"split": 1}, 8),
        ({"captured": 3, "residue": 6, "backward_weight_extra": 2}, {"split": 0}, 4),
    ],
)
def test_one_microbatch_needs_exactly_what_its_ops_hold(sizes, decision, needs):
    one = problem(1, 1, needs, **sizes)
    assert shortest(one, taken(**decision)) is not None
    assert shortest(replace(one, budget=(needs - 1,)), taken(**decision)) is None


@pytest.mark.parametrize(
    ("decision", "then", "needs"),
    [
        ({"keep": 1, "split": 0}, lambda a: [a[0, 1].forward <= a[0, 0].backward], 8),
        ({"keep": 1, "split": 0}, lambda a: [a[0, 1].forward >= a[0, 0].release], 4),
        ({"keep": 1, "split": 1}, lambda a: [a[0, 1].forward < a[0, 0].weight], 6),
        ({"keep": 1, "split": 1}, lambda a: [a[0, 1].forward < a[0, 0].backward], 8),
        ({"recompute": 1}, lambda a: [a[0, 1].forward < a[0, 0].again], 5),
        ({"recompute": 1}, lambda a: [a[0, 1].forward < a[0, 0].backward, a[0, 0].again < a[0, 1].forward], 8),
        ({"offload": 1}, lambda a: [a[0, 1].forward < a[0, 0].away + 12], 8),
        ({"offload": 1}, lambda a: [a[0, 0].away + 12 <= a[0, 1].forward, a[0, 1].away + 12 <= a[0, 0].back], 4),
        ({"offload": 1}, lambda a: [a[0, 0].back < a[0, 1].forward, a[0, 1].forward < a[0, 0].backward], 8),
    ],
    ids=["two kept", "one kept", "residue", "before I", "checkpoint", "again", "leaving", "away", "back"],
)
def test_two_microbatches_need_what_is_resident_at_once(decision, then, needs):
    """An activation has 4 units, 2 of them between I and W; a recomputed one keeps 1, an offloaded one none."""
    one = problem(1, 2, needs, checkpoint=1)
    assert shortest(one, both(taken(**decision), then)) is not None
    assert shortest(replace(one, budget=(needs - 1,)), both(taken(**decision), then)) is None


@pytest.mark.parametrize(
    ("device", "then", "needs"),
    [
        (1, lambda a: [a[0, 1].forward + 10 <= a[1, 0].backward, a[1, 1].forward >= a[1, 0].release], 10),
        (1, lambda a: [a[0, 1].forward + 10 > a[1, 0].release], 7),
        (0, lambda a: [a[0, 1].forward == a[0, 0].forward + 10], 14),
        (0, lambda a: [a[0, 1].forward >= a[0, 0].forward + 10 + LAG, a[1, 0].release > a[0, 1].forward + 10], 11),
        (0, lambda a: [a[1, 0].release == a[0, 1].forward], 14),
    ],
    ids=["activation waits", "none waits", "being sent", "delivered", "gradient waits"],
)
def test_messages_count_from_when_they_are_made_until_they_are_read_and_delivered(device, then, needs):
    """An activation has 4 units, a message 3, in the op that sends it and in the one that reads it, too."""
    one = problem(2, 2, 100)
    sender, reader = (replace(stage, forward_extra=3, backward_extra=3) for stage in one.stages)
    stages = replace(sender, outgoing=3, send_activation=LAG), replace(reader, incoming=3, send_gradient=0)
    forced = both(taken(keep=1, split=0), then)
    for units, is_enough in ((needs, True), (needs - 1, False)):
        budget = tuple(units if d == device else 100 for d in range(2))
        found = best(replace(one, stages=stages, budget=budget), forced)
        assert (found is not None) == is_enough
        assert found is None or peaks(found[1])[device] <= units


def test_a_recompute_holds_no_message_but_the_gradient_that_waits():
    """Two stages on one device, of 4 units and 3 of a message: no op needs more than both."""
    one = problem(1, 1, 7, per_device=2, placement="loop")
    sender, reader = (replace(stage, forward_extra=3, backward_extra=3) for stage in one.stages)
    one = replace(one, stages=(replace(sender, outgoing=3), replace(reader, incoming=3)))
    forced = taken(recompute=1, split=0)
    found = best(one, forced)
    assert found is not None
    assert (found[0], peaks(found[1])) == (2 * (10 + 10 + 20), [7])
    assert best(replace(one, budget=(6,)), forced) is None


@pytest.mark.parametrize(("microbatches", "needs"), [(1, 8), (2, 8)])
def test_offloads_of_all_devices_share_the_host_even_at_different_times(microbatches, needs):
    """Each device has a fixed share of at least one activation; a second one reuses it."""
    one = replace(problem(2, microbatches, 100), host_budget=needs)
    assert shortest(one, taken(offload=1)) is not None
    assert shortest(replace(one, host_budget=needs - 1), taken(offload=1)) is None


def test_offloads_of_the_devices_of_one_host_share_its_memory():
    one = problem(3, 1, 100)
    assert shortest(replace(one, hosts=(((0, 2), 8), ((1,), 4))), taken(offload=1)) is not None
    assert shortest(replace(one, hosts=(((0, 2), 7), ((1,), 9))), taken(offload=1)) is None
    assert shortest(replace(one, hosts=(((1,), 3),)), taken(offload=1)) is None
    assert shortest(replace(one, hosts=(((1,), 4),), host_budget=11), taken(offload=1)) is None


def test_an_offloaded_activation_is_on_the_host_until_its_reload_ends():
    """Two activations of one device on the host at once need 8 units."""

    def overlap(a: dict[tuple[int, int], Activation]) -> list[Any]:
        return [a[0, 1].away < a[0, 0].back + 12]

    one = problem(1, 2, 100)
    assert shortest(replace(one, host_budget=8), both(taken(offload=1), overlap)) is not None
    assert shortest(replace(one, host_budget=7), both(taken(offload=1), overlap)) is None
    assert shortest(replace(one, host_budget=4), taken(offload=1)) is not None
    assert shortest(replace(one, host_budget=3), taken(offload=1)) is None


# -- optima -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_with_fused_backwards_the_optimum_is_known_for_every_cap(forward, backward, devices):
    """design.md, section 5 (b): (f + b) x max(M + P - 1, Q P + r + P - 1), Q = ceil(M / K) - 1, r = M - Q K."""
    for microbatches in range(1, 5):
        for cap in range(1, microbatches + 1):
            times = {"forward": forward, "backward": backward, "send_activation": 0, "send_gradient": 0}
            one = problem(devices, microbatches, cap, freedom=NOTHING, saved=1, residue=1, **times)
            periods = ceil(microbatches / cap) - 1
            rest = microbatches - periods * cap
            slots = max(microbatches + devices - 1, periods * devices + rest + devices - 1)
            assert optimum(one) == (forward + backward) * slots, (microbatches, cap)


@pytest.mark.parametrize(("freedom", "value"), [(NOTHING, 186), (OFFLOAD, 122), (SPLIT, 156)])
def test_offloading_and_splitting_pay_where_one_activation_fits(freedom, value):
    """Two devices, three microbatches: serial is 3 x 62 fused and 3 x 52 split."""
    assert optimum(problem(2, 3, 4, freedom=freedom, offload=2, reload=2)) == value


def test_an_optimum_is_no_worse_with_more_freedom_or_more_memory():
    tight = {freedom: optimum(problem(2, 3, 4, freedom=freedom)) for freedom in (NOTHING, SPLIT, Freedom())}
    roomy = {freedom: optimum(problem(2, 3, 8, freedom=freedom)) for freedom in (NOTHING, SPLIT, Freedom())}
    assert tight[NOTHING] > tight[SPLIT] > tight[Freedom()]
    assert roomy[NOTHING] > roomy[SPLIT] >= roomy[Freedom()]
    assert all(roomy[freedom] < tight[freedom] for freedom in (NOTHING, SPLIT))


def test_the_host_pays_for_what_the_offloads_gain():
    one = problem(3, 3, 4, freedom=OFFLOAD, offload=2, reload=2)
    values = [optimum(replace(one, host_budget=units)) for units in (0, 4, 8)]
    assert values[0] == values[1] == 3 * (3 * 30 + 4)
    assert values[1] > values[2] > optimum(one)


def test_the_span_leaves_out_the_wait_for_the_first_message_and_the_makespan_does_not():
    """Both devices can work 4 x 30 without a gap; the second starts 11 later."""
    one = problem(2, 4, 100, freedom=SPLIT)
    assert optimum(one, "span") == 120
    assert optimum(one, "makespan") == 131


def test_an_optimal_span_may_take_a_longer_makespan():
    one = problem(2, 4, 100, freedom=SPLIT)
    value, timed = best(one, kind="span")
    assert value == timed.span == 120
    assert timed.makespan == 131


def test_a_span_shorter_than_the_hints_is_found_though_its_makespan_is_longer():
    """The hint has span 24 and makespan 25; the best span is 21, at a makespan of 27."""
    times = ((3, 3, 1, 4, 3), (1, 2, 5, 12, 0), (3, 1, 5, 4, 0))
    one = problem(3, 2, 12, freedom=SPLIT, links=False)
    names = ("forward", "backward_input", "backward_weight", "backward", "send_activation")
    stages = tuple(
        replace(stage, send_gradient=0, **dict(zip(names, mine, strict=True)))
        for stage, mine in zip(one.stages, times, strict=True)
    )
    uneven = replace(one, stages=stages)
    assert best(uneven, kind="span")[0] == 21
    assert optimum(uneven, "span") == 21


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(one=problems(devices=2, stages=2, microbatches=2, ticks=5))
def test_what_the_model_finds_keeps_to_every_cap_when_it_is_replayed(one):
    found = best(one)
    if found is None:
        assert not list(dispatched(one))
        return
    value, planned = found
    again = simulate(one, lane_orders(planned), "again")
    assert all(again.starts[task] <= begin for task, begin in planned.starts.items())
    assert again.makespan == value
    assert all(peak <= budget for peak, budget in zip(peaks(again), one.budget, strict=True))
    assert one.fits_hosts(again.host_peaks)


# -- hint and events ----------------------------------------------------------------------------------------------


def events_of(request: Request) -> list[SearchEvent]:
    events: list[SearchEvent] = []
    solve(request, events.append)
    return events


@pytest.mark.parametrize("kind", ["makespan", "span"])
@pytest.mark.parametrize(
    "one",
    [
        problem(2, 3, 8),
        problem(2, 3, 7, checkpoint=1, captured=1, residue=3, backward_input_extra=1),
        replace(problem(2, 2, 8, per_device=2), host_budget=16, link_of=(0, 0)),
        problem(1, 2, 8, freedom=NOTHING, forward_extra=2, backward_extra=3),
    ],
    ids=["plain", "sizes", "host", "fused"],
)
def test_cp_sat_says_that_every_hint_is_complete_and_feasible_with_its_value(one, kind):
    kinds = set()
    for timed in dispatched(one):
        fates = (timed.count(Kind.D) > 0, timed.count(Kind.R) > 0, timed.count(Kind.W) > 0)
        if fates in kinds:
            continue
        kinds.add(fates)
        log = log_of(Request(timed, Limits(kind, 0.1, seed=0, workers=1, reproducible=True)))
        value = timed.makespan if kind == "makespan" else timed.span
        assert f"The solution hint is complete and is feasible. Its objective value is {value}." in log
    assert kinds


def test_a_search_reports_better_and_better_schedules_and_bounds_and_ends_optimal():
    one = problem(2, 3, 8)
    events = events_of(Request(start(one), Limits("makespan", 60, seed=0, workers=1, reproducible=True)))
    values = [Schedule(one, "", event.starts).makespan for event in events if event.starts is not None]
    bounds = [event.bound for event in events if event.bound is not None]
    assert values == sorted(values, reverse=True)
    assert bounds == sorted(bounds)
    assert values[-1] == bounds[-1] == optimum(one)
    assert events[-1].status == "OPTIMAL"


def test_equal_requests_give_equal_events_in_reproducible_mode():
    one = problem(3, 4, 8)
    request = Request(start(one), Limits("makespan", 0.3, seed=3, workers=1, reproducible=True))
    first, second = (events_of(request) for _ in range(2))
    assert first == second
    assert first[-1].status == "FEASIBLE", "otherwise the limit does not show"


# -- least memory -------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(one=problems(devices=2, stages=2, microbatches=2, ticks=4), fixed=st.tuples(*[st.integers(0, 5)] * 2))
def test_no_schedule_at_all_needs_less_memory_than_one_microbatch_at_a_time(one, fixed):
    """The largest total over the devices, static part included, against the full model with one unit less."""
    static = fixed[: one.devices]
    timed = one_at_a_time(replace(one, budget=(1000,) * one.devices), static)
    needs = max(peak + size for peak, size in zip(peaks(timed), static, strict=True))
    assert one.fits_hosts(timed.host_peaks)
    assert len(timed.starts) >= 2 * len(one.stages) * one.microbatches
    assert best(replace(one, budget=tuple(needs - size for size in static))) is not None
    assert best(replace(one, budget=tuple(max(0, needs - 1 - size) for size in static))) is None


def with_messages(stage: Stage, incoming: int, outgoing: int) -> Stage:
    """A stage that reads and writes messages of so many units."""
    names = ("forward_extra", "backward_input_extra", "backward_extra")
    extra = {name: getattr(stage, name) + incoming + outgoing for name in names}
    return replace(stage, incoming=incoming, outgoing=outgoing, **extra)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(one=problems(microbatches=1), data=st.data())
def test_one_microbatch_needs_no_more_memory_than_the_full_model_finds(one, data):
    """With and without limits of the hosts, and with messages that have sizes."""
    static = tuple(data.draw(st.integers(0, 6)) for _ in range(one.devices))
    sent = [0, *(data.draw(st.integers(0, 4)) for _ in one.stages[1:]), 0]
    stages = tuple(map(with_messages, one.stages, sent, sent[1:]))
    roomy = replace(one, stages=stages, budget=(1000,) * one.devices)

    def most(timed: Schedule) -> int:
        return max(map(int.__add__, static, peaks(timed)))

    found = one_at_a_time(roomy, static)
    together = minimum._serial(roomy, minimum._solve(coarsen(minimum._unit_times(roomy)), static))
    assert one.fits_hosts(found.host_peaks)
    assert most(found) == most(together)


@settings(max_examples=100, deadline=None)
@given(one=problems(microbatches=1), budget=st.integers(0, 16))
def test_what_is_quick_one_at_a_time_fits_and_no_other_treatment_is_quicker(one, budget):
    tight = replace(one, budget=(budget,) * one.devices, host_budget=None, hosts=())
    found = quickly_one_at_a_time(tight)
    least = [quickest(tight, device, budget) for device in range(tight.devices)]
    assert (found is None) == (None in least)
    if found is not None:
        assert max(peaks(found)) <= budget
        again = [(task.stage, task.kind) for task in found.starts if task.kind in (Kind.H, Kind.R)]
        assert sum(ticks(tight.stages[s], kind) for s, kind in again) == sum(least)


def ticks(stage: Stage, kind: Kind | None) -> int:
    """What it takes to bring an activation back."""
    return {None: 0, Kind.R: stage.recompute, Kind.H: stage.offload_alone + stage.reload_alone}[kind]


def quickest(one: Problem, device: int, budget: int) -> int | None:
    """Try everything that may become of a device's activations, backwards in one piece or in halves."""
    alone, found = replace(minimum._alone(one, device), budget=(10**6,)), list[int]()
    stages = range(len(alone.stages))
    back = [[Kind.B], [Kind.I, Kind.W]] if one.freedom.split else [[Kind.B]]
    for kinds in product(*(compress(minimum._KINDS, alone.able(s)) for s in stages)):
        for backwards in product(back, repeat=len(stages)):
            order = [Task(k, s, 0) for s in stages for k in (Kind.F, Kind.D) if k is Kind.F or kinds[s] is Kind.H]
            for s in reversed(stages):
                order += [Task(k, s, 0) for k in (kinds[s], *backwards[s]) if k is not None]
            timed = minimum._serial(alone, {task: at for at, task in enumerate(order)})
            if peaks(timed)[0] <= budget:
                found.append(sum(ticks(stage, kind) for stage, kind in zip(alone.stages, kinds, strict=True)))
    return min(found, default=None)


@pytest.mark.parametrize("host_budget", [None, 0, 200])
def test_the_least_memory_of_many_stages_is_not_searched_for(monkeypatch, host_budget):
    one = problem(2, 1, 10**4, per_device=20, placement="loop", freedom=Freedom())
    stages = tuple(replace(stage, saved=20 + s, checkpoint=10) for s, stage in enumerate(one.stages))
    many = replace(one, stages=stages, host_budget=host_budget)
    monkeypatch.setattr(minimum, "_solve", lambda *_: pytest.fail("solved as a scheduling problem"))
    found = one_at_a_time(many, (0, 0))
    assert many.fits_hosts(found.host_peaks)
    assert max(peaks(found)) < sum(stage.saved for stage in stages[::2])


@pytest.mark.parametrize("what", ["cuts", "offloads", "least memory"])
def test_ctrl_c_means_afterwards_what_it_meant_before(what):
    """CP-SAT, left alone, takes the signal over, and then leaves the system's way to end a process."""
    script = f"""
import os, signal
from optpipe_compiler.model.problem import coarsen
from optpipe_compiler.solver import cuts, minimum
from tests.instances import problem
one = problem(2, 1, 10**4, per_device=2, placement="loop")
what = {what!r}
if what == "cuts":
    cuts.lightest([1, 2, 3, 9, 1, 1, 4], (0, 1, 0, 1), (0, 1, 2, 3, 7))
elif what == "offloads":
    minimum._offloads_that_fit(one, (0, 0))
else:
    minimum._solve(coarsen(minimum._unit_times(one)), (0, 0))
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    said = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert said.stdout == "interrupted\n", said.stderr


def test_a_schedule_that_fills_the_memory_is_searched_in_ticks_in_which_it_fits(monkeypatch):
    profile = load_profile(Path(__file__).parents[1] / "bench" / "measured.json")
    work = [value_of(layer.forward_ns) for layer in profile.expanded_layers()]
    one = build(profile, layout("loop", 2, 3, work), 4, Caps(3 * 10**8, None), Freedom())
    search = exact._Exact(None, SimpleNamespace(left=lambda: 10.0), None)
    refused = 0
    for timed in dispatched(one):
        full = replace(one, budget=tuple(peaks(timed)))
        try:
            best = retime(timed, full)
        except Stuck:
            continue
        coarse = search._coarse(SimpleNamespace(best=best, problem=full))
        assert all(peak <= budget for peak, budget in zip(peaks(coarse), coarse.problem.budget, strict=True))
        with monkeypatch.context() as patched:
            patched.setattr(exact, "FINER", exact.FINER[:1])
            refused += search._coarse(SimpleNamespace(best=best, problem=full)) is None
    assert refused


def test_placements_are_searched_whole_as_far_as_that_may_raise_what_is_proven_of_all(monkeypatch):
    def attempt(name, bound, reached):
        size = SimpleNamespace(stages=(None,), microbatches=1)
        return SimpleNamespace(name=name, bound=SimpleNamespace(ticks=bound), best=reached, problem=size)

    attempts = [attempt("b", 90, 110), attempt("best", 80, 100), attempt("c", 70, 120), attempt("d", 75, 130)]
    incumbents = SimpleNamespace(
        attempts=attempts, reached=lambda a: a.best, is_met=lambda a: False, winner=lambda: attempts[1]
    )
    searched, polished = [], []
    monkeypatch.setattr(exact._Exact, "full_model", lambda _, one, seconds: searched.append((one.name, seconds)))
    monkeypatch.setattr(exact._Exact, "polish", lambda _, one: polished.append(one.name))
    exact.exact(incumbents, SimpleNamespace(left=lambda: 100.0))
    assert [name for name, _ in searched] == ["best", "c"]
    assert polished == ["best"]


@pytest.mark.parametrize("seed", [2**31, 10**20, -1])
def test_any_whole_number_is_a_seed_of_the_exact_search(seed):
    """CP-SAT takes 32 bits: with more the search was left out, and a note said that it had died."""
    events: list[SearchEvent] = []
    tiny = problem(2, 2, 20)
    solve(
        Request(start(tiny, "makespan"), Limits("makespan", 20, seed=seed, workers=1, reproducible=True)), events.append
    )
    assert events[-1].status == "OPTIMAL"
