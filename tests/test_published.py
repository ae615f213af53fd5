"""The published schedules: complete and ordered everywhere, and with the peaks and bubbles that their papers claim."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from itertools import pairwise, product
from math import gcd
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.lower import Certificate, lower
from optpipe_compiler.machine.orders import peaks, retime
from optpipe_compiler.model.placement import layout, stage_devices
from optpipe_compiler.model.problem import Caps, Freedom, Problem, Slicing, Stage, build
from optpipe_compiler.model.schedule import Kind, Schedule, Task
from optpipe_compiler.published import METHODS, NotDefined, Recipe, published
from optpipe_compiler.published.transfers import timed
from optpipe_compiler.verify import verify
from tests.given_order import LaneOrders
from tests.machines import simulate

PLENTY = 1 << 40
memory_limited = import_module("optpipe_compiler.published.zb_memory_limited")
"""The package has a function of that name."""

UNIT = Stage(
    device=0,
    forward=1,
    backward_input=1,
    backward_weight=1,
    backward=2,
    recompute=1,
    offload=1,
    reload=1,
    offload_alone=1,
    reload_alone=1,
    send_activation=0,
    send_gradient=0,
    saved=1,
    residue=1,
    captured=0,
    checkpoint=0,
    forward_extra=0,
    backward_input_extra=0,
    backward_weight_extra=0,
    backward_extra=0,
)
"""F = I = W = 1 per stage, and one unit of memory per stage activation until its weight gradient is done."""


def instance(
    devices: int,
    microbatches: int,
    placement: str,
    per_device: int,
    *,
    cap: int = PLENTY,
    freedom: Freedom | None = None,
    links: bool = True,
    slices: int = 1,
    **changes: int,
) -> Problem:
    """Every stage costs so much for a unit: a microbatch, or a slice of one."""
    changes |= {f"{name}_alone": time for name, time in changes.items() if name in ("offload", "reload")}
    owners = stage_devices(placement, devices, per_device)
    stages = tuple(replace(UNIT, device=owner, **changes) for owner in owners)
    link_of = tuple(device // 2 if links else None for device in range(devices))
    whole = Problem(devices, microbatches, stages, link_of, (cap,) * devices, None, freedom or Freedom())
    if slices == 1:
        return whole
    cut = Slicing(slices, (tuple(range(slices + 1)),), (0,) * microbatches)
    return replace(whole, microbatches=microbatches * slices, slicing=cut, classes=(stages,) * slices)


def on(name: str, devices: int, microbatches: int, per_device: int = 1, **options: int) -> Schedule:
    placement = METHODS[name].placements[0][0]
    return published(instance(devices, microbatches, placement, per_device, slices=cut(name, devices), **options), name)


def cut(name: str, devices: int) -> int:
    """A number of slices for which the schedule is defined."""
    return devices if METHODS[name].sliced else 1


def bubble(schedule: Schedule) -> int:
    """Makespan minus the work of one device, in slots of one stage's F."""
    problem = schedule.problem
    return schedule.makespan - 3 * problem.microbatches * len(problem.stages) // problem.devices


def orders(problem: Problem, name: str) -> list[list[Task]]:
    found = METHODS[name].order(problem)
    return (found if isinstance(found, Recipe) else Recipe(found)).tasks()


SIZES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 3), (3, 7), (4, 2), (4, 8), (4, 13), (5, 20), (7, 4), (8, 16), (8, 17)]


@pytest.mark.parametrize("name", METHODS)
def test_every_pass_is_there_once_in_microbatch_order_and_the_order_runs(name: str):
    ran = 0
    for placement, per_device in METHODS[name].placements:
        for devices, microbatches in SIZES:
            problem = instance(devices, microbatches, placement, per_device, slices=cut(name, devices))
            try:
                found = orders(problem, name)
            except NotDefined:
                continue
            passes = defaultdict(list)
            for device, order in enumerate(found):
                for task in order:
                    assert problem.stages[task.stage].device == device
                    passes[task.kind, task.stage].append(task.microbatch)
            for stage in range(len(problem.stages)):
                everyone = list(range(problem.microbatches))
                assert passes[Kind.F, stage] == everyone
                assert sorted(passes[Kind.I, stage] + passes[Kind.B, stage]) == everyone
                assert passes[Kind.I, stage] == passes[Kind.W, stage] == sorted(passes[Kind.I, stage], key=problem.back)
                assert passes[Kind.B, stage] == sorted(passes[Kind.B, stage], key=problem.back)
            if METHODS[name].sliced == (problem.slices > 1):
                assert published(problem, name).makespan > 0
            ran += 1
    assert ran >= 7


@st.composite
def uneven(draw: st.DrawFn) -> tuple[str, Problem]:
    """A published schedule and an instance with any costs, zeros included."""
    name = draw(st.sampled_from(sorted(METHODS)))
    placement, per_device = draw(st.sampled_from(METHODS[name].placements))
    devices = draw(st.integers(1, 6))
    problem = instance(devices, draw(st.integers(1, 13)), placement, per_device, slices=cut(name, devices))
    time = st.integers(0, 6)

    def costs(stage: Stage) -> Stage:
        halves, transfers = (draw(time), draw(time)), (draw(time), draw(time))
        return replace(
            stage,
            forward=draw(time),
            backward_input=halves[0],
            backward_weight=halves[1],
            backward=sum(halves),
            offload=transfers[0],
            reload=transfers[1],
            offload_alone=min(transfers[0], draw(time)),
            reload_alone=min(transfers[1], draw(time)),
            send_activation=draw(st.integers(0, 2)),
            send_gradient=draw(st.integers(0, 2)),
        )

    return name, replace(problem, stages=tuple(map(costs, problem.stages)))


@settings(max_examples=150, deadline=None)
@given(uneven())
def test_no_costs_make_a_schedule_wait_for_itself_and_its_times_are_the_earliest(drawn: tuple[str, Problem]):
    name, problem = drawn
    try:
        found = METHODS[name].order(problem)
    except NotDefined:
        return
    if METHODS[name].sliced != (problem.slices > 1):
        return
    timed = published(problem, name)
    if isinstance(found, Recipe):
        return
    lanes = tuple(map(tuple, found))
    empty = ((),) * (problem.devices + 1)
    assert (
        simulate(problem, LaneOrders(lanes, empty, empty, lanes, (0,) * problem.devices), name).starts == timed.starts
    )


# -- peaks, in stage activations, device by device -------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("name", "per_device", "peak"),
    [
        ("gpipe", 1, lambda p, v, d: 3 * p),
        ("1f1b", 1, lambda p, v, d: p - d),
        ("zb-h1", 1, lambda p, v, d: p),
        ("zb-h2", 1, lambda p, v, d: 2 * p - 1),
        ("zb-1p", 1, lambda p, v, d: p),
        ("zb-2p", 1, lambda p, v, d: 2 * p),
        ("interleaved-1f1b", 2, lambda p, v, d: (v - 1) * p + 2 * (p - d) - 1),
        ("interleaved-1f1b", 4, lambda p, v, d: (v - 1) * p + 2 * (p - d) - 1),
        ("interleaved-zb", 2, lambda p, v, d: v * p),
        ("interleaved-zb", 4, lambda p, v, d: v * p),
        ("bfs", 2, lambda p, v, d: 3 * p * v),
        ("gis", 2, lambda p, v, d: v * p - d),
        ("gis", 3, lambda p, v, d: v * p - d),
        ("gis-h", 2, lambda p, v, d: (p + 1) // 2 * (v - 1) + p - d),
        ("gis-h", 4, lambda p, v, d: (p + 1) // 2 * (v - 1) + p - d),
        ("gis-m", 4, lambda p, v, d: (3 * p + 3) // 4 * (v - 1) + p - d),
        ("gis-h-uniform", 3, lambda p, v, d: (p + 1) // 2 * (v - 1) + p - d + gcd((p + 1) // 2, v) - 1),
        ("gis-h-uniform", 4, lambda p, v, d: (p + 1) // 2 * (v - 1) + p - d + gcd((p + 1) // 2, v) - 1),
        ("zbv", 2, lambda p, v, d: 2 * p),
        ("dualpipev", 2, lambda p, v, d: 2 * p + 1),
        ("seq1f1b", 1, lambda p, v, d: p + p - 1 - d),
        ("seq1f1b-zb", 1, lambda p, v, d: 2 * p - 1),
        ("seq1f1b-interleaved", 2, lambda p, v, d: v * p + 2 * (p - d) - 2),
        ("slimpipe", 4, lambda p, v, d: v * p + 2 * (p - d - 1)),
        ("1f1b-recompute", 1, lambda p, v, d: 1),
        ("gis-recompute", 4, lambda p, v, d: 1),
    ],
)
def test_peaks_are_those_of_the_paper(name: str, per_device: int, peak, devices: int):
    schedule = on(name, devices, 3 * devices, per_device)
    assert peaks(schedule) == [peak(devices, per_device, device) for device in range(devices)]


@pytest.mark.parametrize("devices", range(1, 13))
def test_v_half_and_v_min_keep_half_and_a_third_of_the_microbatches(devices: int):
    assert max(peaks(on("v-half", devices, 4 * devices, 2))) == 2 * ((devices + 2) // 2)
    assert max(peaks(on("v-min", devices, 4 * devices, 2))) == 2 * ((devices + 4) // 3)


@pytest.mark.parametrize("per_device", [2, 4])
def test_hanayo_never_holds_more_than_one_microbatch_per_device(per_device: int):
    for devices, microbatches in SIZES:
        assert max(peaks(on("hanayo", devices, microbatches, per_device))) <= devices * per_device


@pytest.mark.parametrize("cap", [1, 2, 3, 5, 8, 20])
def test_memory_limited_zero_bubble_keeps_to_the_cap(cap: int):
    timed = on("zb-memory-limited", 4, 12, cap=cap)
    assert max(peaks(timed)) <= cap


# -- bubbles, in slots of one stage's F ------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("name", "per_device", "slots"),
    [
        ("gpipe", 1, lambda p, v: 3 * (p - 1)),
        ("1f1b", 1, lambda p, v: 3 * (p - 1)),
        ("interleaved-1f1b", 2, lambda p, v: 3 * (p - 1)),
        ("interleaved-1f1b", 4, lambda p, v: 3 * (p - 1)),
        ("bfs", 2, lambda p, v: 3 * (p - 1)),
        ("zb-h1", 1, lambda p, v: p - 1),
        ("interleaved-zb", 4, lambda p, v: p - 1),
        ("gis", 3, lambda p, v: 2 * (p - 1)),
        ("gis-h", 2, lambda p, v: 2 * (p - 1) + (p - (p + 1) // 2) * (v - 1)),
        ("gis-h", 4, lambda p, v: 2 * (p - 1) + (p - (p + 1) // 2) * (v - 1)),
    ],
)
def test_bubbles_are_those_of_the_paper(name: str, per_device: int, slots, devices: int):
    assert bubble(on(name, devices, 6 * devices, per_device)) == slots(devices, per_device)


def test_interleaving_as_megatron_does_it_hands_gradients_over_after_the_weight_gradient():
    """Without a split, GIS has the bubble of interleaved 1F1B: (P - 1)(F + B) instead of (P - 1)(F + I) slots."""
    whole = on("gis", 4, 16, 2, freedom=Freedom(split=False))
    assert bubble(whole) == 3 * 3 and not whole.count(Kind.I)
    assert bubble(on("gis", 4, 16, 2)) == 2 * 3


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.tuples(*[st.integers(0, 6)] * 4, st.integers(1, 4)), min_size=2, max_size=4),
    microbatches=st.integers(1, 8),
    room=st.integers(1, 4),
)
def test_of_the_runs_of_the_zero_bubble_heuristic_the_first_of_the_best_is_kept(costs, microbatches, room):
    """Some are left out, since they are the same as others, and some end early, since they are worse."""
    stages = tuple(
        replace(
            UNIT, device=d, forward=f, backward_input=i, backward_weight=w, send_gradient=g, saved=saved, residue=saved
        )
        for d, (f, i, w, g, saved) in enumerate(costs)
    )
    one = replace(instance(len(costs), microbatches, "linear", 1), stages=stages)
    limits = [room * stage.saved for stage in stages]
    runs = [memory_limited._Run(one, limits, *choices) for choices in product((True, False), repeat=3)]
    assert all(run.is_within(None) for run in runs)
    best = min(runs, key=lambda run: run.span())
    assert memory_limited._limited(one, "zb", limits) == [list(device.tasks()) for device in best.devices]


@pytest.mark.parametrize(("name", "per_device"), [("zb-h2", 1), ("zb-2p", 1), ("zbv", 2)])
def test_zero_bubble_schedules_leave_no_device_idle_between_its_first_and_last_op(name: str, per_device: int):
    for devices in (1, 2, 5, 8):
        assert on(name, devices, 3 * devices, per_device).span == 9 * devices * per_device


def test_the_bubbles_of_v_half_and_v_min_are_about_half_and_two_thirds_of_1f1b():
    for devices in (4, 6, 8, 12, 16):
        one = 2 * bubble(on("1f1b", devices, 4 * devices))
        assert bubble(on("v-half", devices, 4 * devices, 2)) <= one // 2
        assert bubble(on("v-min", devices, 4 * devices, 2)) <= 2 * one // 3


def test_more_waves_leave_less_of_the_bubble():
    one, two = on("hanayo", 8, 8, 2), on("hanayo", 8, 8, 4)
    assert bubble(one) == 2 * 7 * 2
    assert bubble(two) / 4 < 0.6 * bubble(one) / 2


def test_memory_limited_zero_bubble_uses_what_it_is_given():
    spans = [on("zb-memory-limited", 6, 18, cap=cap).span for cap in (1, 3, 6, 12)]
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] == 54 < spans[-2] < spans[-3]


# -- independent oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "generator", "per_device"),
    [
        ("interleaved-1f1b", "ScheduleInterleaved1F1B", (2, 3, 4)),
        ("interleaved-zb", "ScheduleInterleavedZeroBubble", (2, 3, 4)),
        ("zbv", "ScheduleZBVZeroBubble", (2,)),
        ("dualpipev", "ScheduleDualPipeV", (2,)),
    ],
)
def test_orders_agree_with_torch(name: str, generator: str, per_device: tuple[int, ...]):
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    compared = 0
    for count in per_device:
        for devices, microbatches in SIZES:
            problem = instance(devices, microbatches, METHODS[name].placements[0][0], count)
            try:
                ours = orders(problem, name)
            except NotDefined:
                continue
            theirs = SimpleNamespace(
                n_local_stages=count,
                num_stages=devices * count,
                pp_group_size=devices,
                _n_microbatches=microbatches,
                microbatches_per_round=microbatches // max(1, microbatches // devices),
            )
            for device, order in enumerate(ours):
                actions = getattr(torch_schedules, generator)._calculate_single_rank_operations(theirs, device)
                flat = [part for action in actions if action for part in action.sub_actions or (action,)]
                assert [f"{t.stage}{t.kind.name}{t.microbatch}" for t in order] == list(map(str, flat))
                compared += 1
    assert compared >= 20


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("1f1b", instance(4, 8, "loop", 2), "1f1b is defined for one stage per device"),
        ("gis", instance(4, 8, "linear", 1), "gis is defined for a loop of at least two stages per device"),
        ("zbv", instance(4, 8, "loop", 2), "zbv is defined for a V of two stages per device"),
        ("zbv", instance(4, 8, "v", 4), "zbv is defined for a V of two stages per device"),
        ("hanayo", instance(4, 8, "v", 3), "hanayo is defined for waves of two stages per device each"),
        ("interleaved-1f1b", instance(4, 10, "loop", 2), "microbatches divisible by 4 devices, not 10"),
        ("interleaved-zb", instance(4, 9, "loop", 2), "2 rounds, which do not divide 9 microbatches"),
        ("dualpipev", instance(4, 7, "v", 2), "at least 8 microbatches on 4 devices, not 7"),
        ("zb-h1", instance(4, 8, "linear", 1, freedom=Freedom(split=False)), "--no-split forbids"),
        ("zb-memory-limited", instance(4, 8, "linear", 1, cap=0), "device 0 has no room for a microbatch"),
        ("po-h", instance(4, 8, "loop", 2, links=False), "po-h offloads stage 0, but device 0 has no host link"),
        ("po-f", instance(4, 8, "loop", 2, freedom=Freedom(offload=False)), "--no-offload forbids"),
        (
            "1f1b-offload",
            instance(4, 8, "linear", 1, links=False),
            "1f1b-offload offloads stage 0, but device 0 has no",
        ),
        ("1f1b-offload", instance(4, 8, "loop", 2), "1f1b is defined for one stage per device"),
        ("gis-offload-3", instance(4, 8, "loop", 3), "defined for more than 3 stages per device, not 3"),
        ("1f1b-recompute", instance(4, 8, "linear", 1, freedom=Freedom(recompute=False)), "--no-recompute forbids"),
        ("1f1b-recompute", instance(4, 8, "linear", 1, checkpoint=1), "stage 0, whose input is as large as all"),
    ],
)
def test_what_a_paper_does_not_define_is_refused_with_the_reason(name: str, problem: Problem, reason: str):
    with pytest.raises(NotDefined, match=reason):
        published(problem, name)


# -- recomputation and offload ---------------------------------------------------------------------------------------


def test_a_recomputation_runs_right_before_its_backward_and_only_for_the_lowest_stages():
    schedule = on("gis-h-recompute-2", 4, 8, 3)
    for order in schedule.compute_lanes:
        for before, task in pairwise(order):
            if before.kind is Kind.R:
                assert task == before._replace(kind=Kind.I)
    assert {t.stage for t in schedule.starts if t.kind is Kind.R} == set(range(8))
    assert schedule.count(Kind.R) == 8 * 8


def test_a_fast_link_makes_offload_free_and_half_the_stages_leave_a_quarter_of_the_memory():
    keep, half = on("gis-h-uniform", 16, 64, 4), on("po-h", 16, 64, 4, offload=0, reload=0)
    assert half.makespan == keep.makespan
    assert half.count(Kind.D) == half.count(Kind.H) == 32 * 64
    assert max(peaks(half)) <= max(peaks(on("interleaved-1f1b", 16, 64, 4))) / 4


def test_the_lowest_stages_of_a_device_are_offloaded_first():
    for name, stages in (("gis-offload-1", 4), ("po-h", 8), ("gis-offload-3", 12), ("gis-h-offload-1", 4)):
        schedule = on(name, 4, 16, 4, offload=0, reload=0)
        assert {task.stage for task in schedule.starts if task.kind is Kind.D} == set(range(stages))


def test_what_stays_too_shortly_for_three_round_trips_is_kept():
    schedule = on("po-f", 4, 16, 2)
    stays = {}
    for task in schedule.starts:
        if task.kind is Kind.I:
            forward = Task(Kind.F, task.stage, task.microbatch)
            stays[task.stage, task.microbatch] = schedule.starts[task] - schedule.end(forward)
    moved = {(task.stage, task.microbatch) for task in schedule.starts if task.kind is Kind.D}
    assert moved and moved != set(stays)
    assert max(stays[key] for key in stays if key not in moved) < min(stays[key] for key in moved) + 6
    assert (7, 0) not in moved


def test_a_reload_takes_memory_no_sooner_than_it_must():
    """On links of its own and ample time, an activation is back one op before its backward at the soonest."""
    problem = instance(2, 8, "loop", 4, offload=0, reload=1)
    schedule = published(replace(problem, link_of=(0, 1)), "gis-offload-1")
    reloads = [task for task in schedule.starts if task.kind is Kind.H]
    assert len(reloads) == 16
    for task in reloads:
        assert schedule.end(task) <= schedule.starts[task._replace(kind=Kind.I)] <= schedule.end(task) + 1


def test_a_link_that_is_too_slow_delays_the_backwards_and_carries_one_transfer_at_a_time():
    free, slow = on("gis", 4, 16, 4), on("po-h", 4, 16, 4, offload=3, reload=4)
    assert slow.makespan > free.makespan
    for kind in (Kind.D, Kind.H):
        for link in (0, 1):
            mine = sorted(
                (slow.starts[t], slow.end(t)) for t in slow.starts if t.kind is kind and (t.stage % 4) // 2 == link
            )
            assert all(end <= start for (_, end), (start, _) in pairwise(mine))


def test_a_schedule_that_does_not_fit_can_wait_for_its_memory():
    problem = instance(8, 32, "loop", 4, cap=16, offload=2, reload=2)
    schedule = published(problem, "gis-offload-2")
    assert max(peaks(schedule)) > 16
    waiting = retime(schedule, problem)
    assert max(peaks(waiting)) <= 16
    assert waiting.makespan >= schedule.makespan


# -- what frameworks run ---------------------------------------------------------------------------------------------


def streamed(devices: int, microbatches: int, **transfers: int) -> Schedule:
    """1F1B with F = 1, B = 2 and every activation offloaded, on a link of its own for each device."""
    problem = instance(devices, microbatches, "linear", 1, **transfers)
    return published(replace(problem, link_of=tuple(range(devices))), "1f1b-offload")


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
def test_checkpointing_everything_costs_one_more_forward_per_backward(name: str):
    """M v (F + R + B) + (P - 1)(F + B): in fill and drain a device recomputes while it waits for the gradient."""
    per_device = METHODS[name].placements[0][1]
    schedule = on(f"{name}-recompute", 4, 16, per_device)
    assert schedule.makespan == 16 * 4 * per_device + 3 * 3
    assert schedule.count(Kind.R) == 16 * 4 * per_device


@pytest.mark.parametrize("count", [1, 2, 3])
def test_checkpointing_some_layers_recomputes_the_lowest_stages_and_keeps_what_the_others_save(count: int):
    schedule, kept = (on(name, 4, 16, 4) for name in (f"interleaved-1f1b-recompute-{count}", "interleaved-1f1b"))
    assert {task.stage for task in schedule.starts if task.kind is Kind.R} == set(range(4 * count))
    assert kept.makespan + 16 * count <= schedule.makespan <= kept.makespan + 19 * count
    # of the (v - 1)P + 2P - 1 = 4 + 4 + 4 + 4 + 3 forwards of device 0 those of other stages stay, and one is running
    assert peaks(schedule)[0] == 4 * (4 - count) + 1


def test_transfers_as_quick_as_the_ops_beside_them_delay_nothing_but_the_turn_at_the_last_device():
    """The last device reloads at once what it has just offloaded, before each backward: 1 + 2 ticks a microbatch."""
    kept = on("1f1b", 4, 16)
    free = streamed(4, 16, offload=0, reload=0)
    assert free.makespan == kept.makespan == (16 + 3) * 3
    assert streamed(1, 16, offload=1, reload=2).makespan == 16 * (1 + 1 + 2 + 2)
    turned = streamed(4, 16, offload=1, reload=2)
    assert turned.count(Kind.D) == turned.count(Kind.H) == 4 * 16
    assert turned.makespan == 3 + 16 * (1 + 1 + 2 + 2) + 3 * 2


def test_streaming_holds_at_most_three_activations_however_many_devices():
    """The one that is computed or read, one that leaves, one that comes back."""
    for devices in (4, 8, 16):
        schedule = streamed(devices, 3 * devices, offload=1, reload=2)
        assert max(peaks(schedule)) == 3
    assert max(peaks(on("1f1b", 16, 48))) == 16


def test_a_reload_overlaps_the_backward_before_its_own_and_no_op_before_that():
    schedule = streamed(4, 12, offload=1, reload=2)
    for order in schedule.compute_lanes:
        backwards = [task for task in order if task.kind is Kind.B]
        for before, task in pairwise(backwards):
            reload = task._replace(kind=Kind.H)
            assert schedule.starts[before] <= schedule.starts[reload]
            assert schedule.end(reload) <= schedule.starts[task]


def test_a_streaming_recipe_offloads_what_it_names_and_nothing_else():
    problem = replace(instance(2, 4, "linear", 1), link_of=(0, 1))
    orders = METHODS["1f1b"].order(problem)
    some = np.zeros((2, 4), np.bool_)
    some[0, 1:3] = True
    schedule = timed(problem, Recipe(orders, some, streaming=True), "some")
    assert [(t.stage, t.microbatch) for t in schedule.starts if t.kind is Kind.D] == [(0, 1), (0, 2)]
    assert [(t.stage, t.microbatch) for t in schedule.starts if t.kind is Kind.H] == [(0, 1), (0, 2)]


def test_a_host_link_that_is_slower_than_the_device_sets_the_pace():
    """Reloads of 5 ticks on one lane, 16 of them, on a device that computes 3 ticks a microbatch."""
    assert streamed(2, 16, offload=5, reload=5).makespan >= 16 * 5
    shared = published(instance(2, 16, "linear", 1, offload=5, reload=5), "1f1b-offload")
    assert shared.makespan >= 2 * 16 * 5


def test_every_method_says_whose_it_is_and_cites_it():
    kinds = {name: method.kind for name, method in METHODS.items()}
    assert {kinds[name] for name in ("1f1b", "zb-h1", "gis", "gis-h", "po-h", "po-f", "dualpipev", "hanayo")} == {
        "paper"
    }
    stock = {name for name, kind in kinds.items() if kind == "stock"}
    assert stock == {
        "interleaved-zb",
        "1f1b-recompute",
        "1f1b-offload",
        "interleaved-1f1b-recompute",
        "interleaved-1f1b-offload",
        *(f"interleaved-1f1b-recompute-{n}" for n in (1, 2, 3)),
        "1f1b-selective",
        "interleaved-1f1b-selective",
    }
    for name, method in METHODS.items():
        assert (method.kind == "composition") == (
            name not in stock and ("-offload" in name or "-recompute" in name)
        ) or (name == "gpipe-recompute")
        assert "arXiv:" in method.source or method.kind == "stock" or "github.com" in method.source


# -- as files, and against the reference table -----------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_schedule_lowers_to_a_file_that_verify_accepts(name: str):
    caps = Caps(10**12, None)
    options = UniformOptions(devices=4, layers_per_device=4, shared_links="pairs")
    slicing = None
    if METHODS[name].sliced:
        options = replace(options, sliceable=True, attention_share=0.5, kv_fraction=0.2, slice_overhead_ms=0.01)
        slicing = Slicing(32768, ((0, 10_000, 20_000, 27_000, 32_768),), (0,) * 8)
    profile = uniform_profile(options)
    for placement, per_device in METHODS[name].placements:
        where = layout(placement, 4, per_device, [1] * 16)
        timed = published(build(profile, where, 8, caps, Freedom(), slicing=slicing), name)
        file = lower(timed, profile, where, caps, Certificate("makespan", "feasible", 0, "none", {}, {}))
        assert verify(file, profile) == []


GPT = UniformOptions(
    devices=4,
    forward_ms=29.935,
    backward_input_ms=29.621,
    backward_weight_ms=19.388,
    p2p_ms=0.535,
    residue_fraction=0.4324,
    d2h_ms=27.63,
    h2d_ms=27.63,
    shared_links="pairs",
    duplex_slowdown=1 / 0.7,
)


@pytest.mark.parametrize(
    ("name", "per_device", "ms", "activations"),
    [
        ("interleaved-zb", 4, 1306.07, 4.0),
        ("gis-h-offload-2", 4, 1384.07, 1.5),
        ("gis-h-offload-3", 4, 1384.07, 1.0),
        ("gis-recompute", 4, 1796.36, 0.5),
    ],
)
def test_the_best_schedules_of_the_reference_table_are_reached(
    name: str, per_device: int, ms: float, activations: float
):
    """GPT 6.2B, P = 4, M = 16; the reference has 1306, 1384, 1643 and 1882 ms at these caps."""
    cut = layout("loop", 4, per_device, [1] * 16)
    timed = published(build(uniform_profile(GPT), cut, 16, Caps(10**12, None), Freedom()), name)
    assert timed.makespan / 1e6 == pytest.approx(ms, abs=0.01)
    assert max(peaks(timed)) <= activations * 10**9
