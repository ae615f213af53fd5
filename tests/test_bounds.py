"""Lower bounds: below every proven optimum, and equal to it where their argument is the whole story."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from optpipe_compiler.machine.orders import peaks
from optpipe_compiler.model.bounds import (
    _FINER,
    _FINEST,
    _STEPS,
    _groups,
    _Mean,
    _Shares,
    _shares,
    device_work,
    fill_and_drain,
    head_and_work,
    memory_time,
    one_by_one,
    resources,
    round_trip,
    slots,
)
from optpipe_compiler.model.bounds import best as best_bound
from optpipe_compiler.model.problem import Freedom, Problem, coarsen, proven_ns
from optpipe_compiler.model.schedule import value
from optpipe_compiler.model.unit_bounds import least_areas
from tests.instances import problem
from tests.machines import dispatched
from tests.plans import best, is_reached, optimum
from tests.strategies import problems

RANDOM = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FUSED = Freedom(offload=False, recompute=False, split=False)
SPLIT = Freedom(offload=False, recompute=False, split=True)


def uneven(forward: tuple[int, ...], freedom: Freedom = SPLIT, **sizes: int) -> Problem:
    """One device per forward time, two microbatches, ample memory."""
    one = problem(len(forward), 2, 100, freedom=freedom, **sizes)
    stages = tuple(replace(stage, forward=time) for stage, time in zip(one.stages, forward, strict=True))
    return replace(one, stages=stages)


@RANDOM
@given(one=problems(devices=2, stages=2, microbatches=2, ticks=5))
def test_every_bound_is_at_most_the_optimum_and_that_at_most_the_best_heuristic(one):
    for kind, bounds in (
        (
            "makespan",
            [device_work, head_and_work, round_trip, memory_time, resources, fill_and_drain, slots, one_by_one],
        ),
        ("span", [device_work, partial(head_and_work, objective="span"), round_trip]),
    ):
        found = best(one, kind=kind)
        assume(found is not None)
        assert found[0] == value(found[1], kind)
        for bound in bounds:
            assert bound(one) <= found[0], (bound, kind)
        assert best_bound(one, kind).ticks == max(bound(one) for bound in bounds)
        for timed in dispatched(one):
            assert found[0] <= value(timed, kind)


@RANDOM
@given(one=problems(devices=2, stages=4, microbatches=2, ticks=3))
def test_bounds_hold_with_several_stages_per_device(one):
    assume(len(one.stages) > one.devices)
    for objective in ("makespan", "span"):
        assert not is_reached(one, best_bound(one, objective).ticks - 1, objective)


@RANDOM
@given(one=problems(devices=2, stages=4, microbatches=4, ticks=9), more=st.integers(1, 6))
def test_more_memory_leaves_no_more_to_be_lost_at_the_ends(one, more):
    wider = replace(one, budget=tuple(budget + more for budget in one.budget))
    assume(min(one.budget) > 0)
    assert fill_and_drain(wider) <= fill_and_drain(one)


def test_the_busiest_devices_work_bounds_the_span_and_is_reached_on_one_device():
    one = problem(1, 4, 100)
    assert device_work(one) == 4 * 30 == optimum(one, "span") == optimum(one)
    assert device_work(uneven((10, 30, 10))) == 2 * 50


def test_split_or_fused_whichever_is_cheaper_counts_as_work():
    assert device_work(problem(1, 1, 100, backward=15)) == 25
    assert device_work(problem(1, 1, 100, backward=25)) == 30
    assert device_work(problem(1, 1, 100, backward=25, freedom=FUSED)) == 35


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(SPLIT, (10 + 1 + 10 + 1) + 2 * 70), (FUSED, (10 + 1 + 10 + 1) + 2 * 70 + (1 + 20 + 1 + 20))],
)
def test_what_comes_before_a_device_and_what_must_follow_it_adds_to_its_work(freedom, expected):
    assert head_and_work(uneven((10, 10, 50), freedom)) == expected


def with_a_heavy_stage(times: tuple[int, ...], cap: int, placement: str) -> Problem:
    """Two stages per device, of which some have a light and a heavy one, as an embedding and a loss head are."""
    devices = len(times) // 2
    one = problem(devices, 3, cap, per_device=2, placement=placement, freedom=SPLIT, send_activation=0, send_gradient=0)
    stages = tuple(
        replace(stage, forward=ticks, backward_input=ticks, backward_weight=ticks, backward=2 * ticks)
        for stage, ticks in zip(one.stages, times, strict=True)
    )
    return replace(one, stages=stages)


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_a_heavy_stage_starts_only_when_the_first_microbatch_has_come_to_it(objective):
    one = with_a_heavy_stage((1, 10, 10, 40), 100, "v")
    assert head_and_work(one, objective) == (1 + 10 + 10) + 3 * 120
    assert device_work(one) < head_and_work(one, objective)
    assert not is_reached(one, head_and_work(one, objective) - 1, objective)


def test_what_a_heavy_stage_loses_at_the_ends_counts_without_the_light_stage_of_its_device(monkeypatch):
    one = with_a_heavy_stage((1, 20, 1, 20, 20, 1, 20, 1), 8, "loop")
    assert fill_and_drain(one) == 265 > head_and_work(one) == 243
    monkeypatch.setattr("optpipe_compiler.model.bounds._last_of", lambda *_: ())
    assert fill_and_drain(one) == 255, "of all stages of each device"


def test_with_fused_backwards_head_work_and_tail_are_the_optimum_of_ample_memory():
    one = problem(3, 5, 100, freedom=FUSED, send_activation=0, send_gradient=0)
    assert head_and_work(one) == optimum(one) == (5 + 3 - 1) * 30


def test_one_microbatch_takes_the_round_trip():
    for freedom, expected in ((SPLIT, 52), (FUSED, 62)):
        one = problem(2, 1, 100, freedom=freedom)
        assert round_trip(one) == optimum(one) == optimum(one, "span") == expected


def test_where_one_activation_fits_memory_times_time_is_the_optimum():
    one = problem(3, 4, 4, freedom=FUSED, send_activation=0, send_gradient=0)
    assert memory_time(one) == optimum(one) == 4 * 90
    for budget in (5, 6, 7):  # still only one fits
        assert memory_time(replace(one, budget=(budget,) * 3)) == 4 * 90
    assert memory_time(replace(one, budget=(8, 8, 8))) < 4 * 90


def test_memory_times_time_counts_the_cheapest_way_to_hold_an_activation():
    """On device 0 kept for 90 ticks; on device 1, from tick 10 on, offloaded for 38.

    Recomputed, device 0 holds it for 40 ticks, and a quarter of it, the checkpoint, for 50 more.
    """
    one = problem(3, 4, 4, send_activation=0, send_gradient=0, offload=3, reload=5, checkpoint=1)
    ticks = {
        freedom: memory_time(replace(one, freedom=freedom))
        for freedom in (FUSED, replace(FUSED, offload=True), replace(FUSED, recompute=True))
    }
    assert list(ticks.values()) == [4 * 90, 10 + 4 * 38, 4 * 40 + 50]


def test_what_memory_is_spared_compute_or_the_link_must_bear():
    one = problem(2, 8, 8, per_device=2, residue=4, offload=30, reload=30, offload_alone=30, reload_alone=30)
    assert resources(one) > max(head_and_work(one), memory_time(one))


def test_the_weights_are_those_at_which_compute_and_memory_meet():
    """x of 8 recomputed: 240 + 10 x ticks of compute, (360 (8 - x) + 160 x) / 8 of memory; both are 274.3 at 3.43."""
    one = problem(3, 8, 8, freedom=replace(FUSED, recompute=True), send_activation=0, send_gradient=0)
    assert resources(one) == 275


def heaviest_one_by_one(shares: _Shares) -> Fraction:
    """The same search as `_Shares.heaviest`, exactly and a pair of weights after the other."""
    best, step = (Fraction(1), Fraction(0)), Fraction(1, _STEPS)
    near = [(x * step, y * step) for x in range(_STEPS + 1) for y in range(_STEPS + 1)]
    while True:
        inside = [best, *(one for one in near if min(*one, 1 - sum(one)) >= 0)]
        best = max(inside, key=lambda one: shares.mean(_Mean(0.0, *one)))
        if step < _FINEST:
            return shares.mean(_Mean(0.0, *best))
        step /= _FINER
        near = [(best[0] + x * step, best[1] + y * step) for x, y in itertools.product(range(-8, 9), repeat=2)]


@settings(RANDOM, max_examples=10)
@given(one=problems(devices=3, stages=4, microbatches=3))
def test_the_weights_found_in_floating_point_are_as_good_as_those_found_exactly(one):
    (areas,) = least_areas(one, [0] * one.devices)
    for group in _groups(one):
        shares = _shares(one, [one.stages_of(device) for device in group], areas, one.budget)
        found = shares.heaviest()
        assert found.about == pytest.approx(float(heaviest_one_by_one(shares)), rel=1e-6)
        assert found.about == pytest.approx(float(shares.mean(found)), rel=1e-9)


def test_a_transfer_alone_on_its_link_is_what_the_bound_counts():
    one = problem(3, 4, 4, freedom=replace(FUSED, offload=True), offload=9, reload=9, offload_alone=3, reload_alone=5)
    assert memory_time(one) == memory_time(replace(one, stages=tuple(map(alone, one.stages))))


def alone(stage):
    return replace(stage, offload=stage.offload_alone, reload=stage.reload_alone)


@pytest.mark.parametrize(
    ("devices", "microbatches", "fits", "turns"),
    [(4, 16, 3, 24), (4, 16, 1, 64), (3, 4, 2, 3 + 2 + 2), (2, 3, 1, 6), (2, 5, 2, 2 * 2 + 1 + 1)],
)
def test_whole_slots_bound_equal_fused_stages_by_rounds_of_the_pipeline(devices, microbatches, fits, turns):
    """In units of F + B; for P = 4, M = 16 and K = 3 Little's law says 21 1/3, the work and its head 19."""
    one = problem(devices, microbatches, 4 * fits, freedom=FUSED, send_activation=0, send_gradient=0)
    assert slots(one) == turns * 30
    assert slots(replace(one, budget=(4 * fits + 3,) * devices)) == turns * 30
    assert slots(replace(one, budget=(4 * microbatches,) * devices)) == 0


@pytest.mark.parametrize(("devices", "microbatches", "fits"), [(4, 16, 3), (6, 30, 4), (4, 9, 2), (3, 7, 2)])
def test_whole_slots_are_reached_by_equal_fused_stages(devices, microbatches, fits):
    one = problem(devices, microbatches, 4 * fits, freedom=FUSED, send_activation=0, send_gradient=0)
    timed = min(dispatched(one), key=lambda timed: timed.makespan)
    assert max(peaks(timed)) <= 4 * fits
    assert timed.makespan == slots(one) > memory_time(one)


def test_where_nothing_fits_beside_a_whole_activation_all_of_a_device_add_up():
    """Sizes 4 and, of the weight gradient, 2 under 5; recomputed, device 0 takes 40 ticks a microbatch."""
    slow = {"offload": 30, "reload": 30, "offload_alone": 30, "reload_alone": 30}
    one = problem(2, 3, 5, residue=2, **slow)
    others = (head_and_work, memory_time, resources, fill_and_drain, slots)
    assert one_by_one(one) == optimum(one) == 3 * 40 > max(bound(one) for bound in others)
    assert one_by_one(replace(one, budget=(6, 6))) == 0


def test_slots_count_messages_split_backwards_and_what_an_op_needs_besides():
    one = problem(2, 3, 4, freedom=FUSED)
    trip = (10 + 1 + 30) + (1 + 20)
    assert slots(one) == 2 * trip + trip
    split = replace(one, freedom=SPLIT)  # I at device 0 ends 10 sooner; W has 2 units left, for which there is no room
    assert slots(split) == 3 * (10 + 1 + 20 + 1 + 20)
    roomy = replace(one, budget=(8, 8), stages=tuple(replace(s, forward_extra=1) for s in one.stages))
    assert slots(roomy) == 3 * trip
    assert slots(replace(one, budget=(8, 8))) == trip + trip
    later = tuple(replace(stage, backward_extra=1) for stage in one.stages)
    assert slots(replace(one, budget=(8, 8), stages=later)) == 3 * trip


def test_slots_of_several_stages_on_a_device_hold_all_earlier_ones_too():
    """A loop of 2 x 2: in flight at stage 2 is a microbatch that is so at stage 0, 8 units in all."""
    one = problem(2, 4, 8, per_device=2, placement="loop", freedom=FUSED, send_activation=0, send_gradient=0)
    assert slots(one) == 20 + 3 * 60 + (60 + 40)
    assert slots(replace(one, budget=(4 + 8 + 4, 4 + 8))) < slots(one)


def test_slots_of_what_can_leave_are_as_small_as_what_stays():
    one = problem(2, 4, 6, freedom=replace(FUSED, recompute=True), checkpoint=1, send_activation=0, send_gradient=0)
    kept = replace(one, freedom=FUSED)
    assert slots(kept) == 5 * 60 - 60 > slots(one)


@RANDOM
@given(one=problems(devices=2, stages=2, microbatches=4, ticks=4), plain=st.booleans())
def test_slots_are_at_most_the_optimum_also_where_nothing_can_leave(one, plain):
    one = replace(one, freedom=replace(one.freedom, offload=False, recompute=False)) if plain else one
    assume(slots(one) > 0)
    assert not is_reached(one, slots(one) - 1)


def test_microbatches_are_not_counted_one_by_one():
    many, one = 10**15, problem(2, 1, 100)
    work = [sum(one.stages[s].work for s in one.stages_of(device)) for device in range(2)]
    assert device_work(replace(one, microbatches=many)) == many * max(work)
    assert best_bound(replace(one, microbatches=many), "makespan").ticks >= many * max(work)


def test_the_best_bound_is_named():
    assert best_bound(problem(1, 4, 100), "makespan").name == "device-work"
    assert best_bound(problem(3, 1, 100), "makespan").name == "round-trip"
    assert best_bound(problem(3, 4, 4, freedom=FUSED), "makespan").name == "memory-time"
    assert best_bound(problem(3, 9, 100), "makespan").name == "head-and-work"


@RANDOM
@given(one=problems(devices=2, stages=2, microbatches=2, least=300, ticks=3000))
def test_the_optimum_of_the_coarse_problem_scaled_back_is_a_bound(one):
    found, coarse = best(one), coarsen(one)
    rough = best(coarse)
    assert (found is None) == (rough is None)
    if found is not None:
        assert proven_ns(coarse, rough[0], is_span=False) <= found[0]
        assert rough[0] * coarse.tick_ns >= 0.9 * found[0]


def test_a_span_may_do_best_to_begin_between_the_ticks_of_the_coarse_problem():
    """Both devices take 73 if the second one begins at 27; where it begins earlier or later one of them takes more."""
    one = problem(2, 2, 100, freedom=SPLIT, saved=1, residue=1, send_activation=0)
    times = {"forward": 20, "backward_input": 16, "backward_weight": 16, "backward": 16}
    first = replace(one.stages[0], **times)
    times = {"forward": 2, "backward_input": 2, "backward_weight": 28, "backward": 30, "send_gradient": 10}
    one = replace(one, stages=(first, replace(one.stages[1], **times)))
    coarse = coarsen(one)
    assert (coarse.tick_ns, coarse.stretch) == (2, 1)
    assert (best(one, kind="span")[0], best(coarse, kind="span")[0]) == (73, 37)
    assert proven_ns(coarse, 37, is_span=True) == 73


def test_what_memory_allows_before_the_first_backward_and_after_the_last_forward_adds_to_the_work():
    one = problem(2, 8, 4, freedom=SPLIT, send_activation=0, send_gradient=0)
    # device 0 waits F0 F1 I1, with room for one F; after its last F come F1 I1 I0, with room for one I and W
    assert fill_and_drain(one) == 8 * 30 + (30 - 10) + (30 - 20)
    assert fill_and_drain(replace(one, budget=(100, 100))) == 8 * 30 + 10  # device 1 waits for the first forward


@pytest.mark.parametrize(("residue", "beside"), [(4, 0), (3, 1), (2, 1), (1, 3)])
def test_behind_its_last_input_gradient_a_device_has_the_weight_gradients_that_memory_holds(residue, beside):
    """Of device 2 the last gradient goes through I1, I0 and W0; 3 units are left beside what it reads."""
    one = problem(3, 9, 4, freedom=SPLIT, send_activation=0, send_gradient=0, residue=residue)
    lost = max(0, 30 - 10 - beside * 10)
    assert fill_and_drain(replace(one, budget=(100, 100, 7))) == 20 + 9 * 30 + lost


def test_weight_gradients_that_hold_nothing_wait_for_the_end_however_little_memory_is_left():
    """Device 1 has room for one activation, and no residue: F0 I0 F1 I1, and W0 W1 while the gradient goes home."""
    one = problem(2, 2, 4, freedom=SPLIT, send_activation=0, send_gradient=0, residue=0)
    tight = replace(one, budget=(100, 4))
    assert fill_and_drain(tight) == optimum(tight) == 10 + 2 * 30


def test_transfers_that_are_not_over_have_moved_nothing():
    """Device 0 has 50 ticks from its first forward to its first backward, 40 of them with an activation to offload."""
    freedom = Freedom(offload=True, recompute=False, split=True)
    ends = []
    for offload in (14, 20, 21):
        one = problem(3, 9, 4, freedom=freedom, send_activation=0, send_gradient=0, offload=offload, reload=1)
        ends.append(fill_and_drain(replace(one, budget=(4, 100, 100))) - 9 * 30)
    assert ends == [50 - 10 * (1 + moved) for moved in (2, 2, 1)]


@RANDOM
@given(one=problems(devices=2, stages=2, microbatches=3, ticks=4))
def test_what_is_lost_behind_the_last_input_gradient_is_lost_by_the_optimum(one):
    stages = tuple(replace(stage, residue=stage.saved) for stage in one.stages)
    one = replace(one, stages=stages, freedom=replace(one.freedom, split=True))
    assert not is_reached(one, fill_and_drain(one) - 1)


def test_a_link_lets_a_device_do_more_before_its_first_backward_and_a_shared_one_less():
    times = {"send_activation": 0, "send_gradient": 0, "offload": 5, "reload": 5}
    one = problem(4, 16, 4, freedom=Freedom(offload=True, recompute=False, split=True), **times)
    alone, shared, none = (
        fill_and_drain(replace(one, link_of=links)) for links in ((0, 1, 2, 3), (0, 0, 1, 1), (None,) * 4)
    )
    assert alone <= shared <= none
    assert alone < none


def test_a_recomputation_that_costs_less_than_a_forward_buys_the_wait():
    dear = problem(3, 9, 8, freedom=Freedom(offload=False, recompute=True, split=True), recompute=10, checkpoint=0)
    cheap = replace(dear, stages=tuple(replace(stage, recompute=2) for stage in dear.stages))
    assert fill_and_drain(cheap) < fill_and_drain(dear)


def test_recomputations_that_take_no_time_leave_nothing_to_be_lost_to_memory():
    fused, times = Freedom(offload=False, recompute=True, split=False), {"forward": 12, "backward": 3, "recompute": 0}
    one = problem(2, 2, 20, per_device=2, placement="linear", freedom=fused, **times)
    tight = replace(one, budget=(20, 4))
    assert fill_and_drain(tight) == head_and_work(tight) == optimum(tight)


@pytest.mark.parametrize("microbatches", [4, 6])
def test_of_what_is_lost_at_the_end_no_more_is_recomputed_than_waiting_for_the_way_home_leaves(microbatches):
    """Device 1 has room for three activations. One recomputation (3 ticks) fills its end, but for the last way home."""
    one = problem(4, microbatches, 100, freedom=Freedom(offload=False, recompute=True, split=False), saved=1, residue=1)
    times = zip(one.stages, ((1, 1), (3, 1), (2, 1), (2, 1)), strict=True)
    stages = (
        replace(stage, forward=there, recompute=there, backward=back, send_activation=0, send_gradient=0)
        for stage, (there, back) in times
    )
    one = replace(one, stages=tuple(stages), budget=(100, 3, 100, 100))
    assert fill_and_drain(one) == 1 + 4 * microbatches + 3 + 1
    assert is_reached(one, fill_and_drain(one))
