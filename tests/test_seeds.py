"""Earlier schedules as first candidates: a plan is no worse than a seed that still fits, and no less safe."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from optpipe_compiler.compiler import Options, compile_schedule, settled
from optpipe_compiler.errors import BadInput, Infeasible
from optpipe_compiler.model.problem import Caps, Freedom, build
from optpipe_compiler.plan import seeds
from optpipe_compiler.plan.carried import Start
from optpipe_compiler.plan.instances import instances
from optpipe_compiler.plan.local_search import LocalSearch, SearchedProblem
from optpipe_compiler.plan.seeds import layout_of
from optpipe_compiler.solver.worker import Limits
from optpipe_compiler.verify import check, verify
from tests.instances import profiles, quick, uniform

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Profile

GB = 10**9
COSTS = uniform(2, 4, d2h_ms=0.5, h2d_ms=0.5)


def seeded(profile: Profile, seed, mem_bytes: int, **options):
    """Plan with the seed and with next to no time for anything else."""
    return quick(profile, mem_bytes, time_limit_s=0.0, seeds=(check(seed),), **options).schedule


@pytest.fixture(scope="module")
def best():
    """A plan that takes some search to find."""
    options = Options(mem_bytes=GB, microbatches=4, time_limit_s=5.0, reproducible=True)
    return compile_schedule(COSTS, options).schedule


def test_what_is_planned_again_is_no_worse(best):
    plain = quick(COSTS, GB, time_limit_s=0.0).schedule
    again = seeded(COSTS, best, GB)
    assert again.forecast.makespan_ns == best.forecast.makespan_ns < plain.forecast.makespan_ns


@pytest.mark.parametrize("mem_bytes", [GB + 1, 5 * GB // 4, 2 * GB])
def test_more_memory_never_gives_a_worse_plan(best, mem_bytes):
    assert seeded(COSTS, best, mem_bytes).forecast.makespan_ns <= best.forecast.makespan_ns


def test_a_seed_that_no_longer_fits_waits_for_its_memory_or_is_left_out(best):
    less = seeded(COSTS, best, 9 * GB // 10)
    assert max(device.peak_bytes for device in less.devices) <= 9 * GB // 10


def test_faster_links_never_give_a_worse_plan(best):
    faster = uniform(2, 4, d2h_ms=0.3, h2d_ms=0.2)
    assert seeded(faster, best, GB).forecast.makespan_ns <= best.forecast.makespan_ns


def test_slower_layers_keep_the_order_and_get_times_of_their_own(best):
    slower = structs.replace(COSTS, layers=[structs.replace(COSTS.layers[0], forward_ns=10**6)])
    assert seeded(slower, best, GB).forecast.makespan_ns > best.forecast.makespan_ns


def test_a_plan_of_free_copies_is_timed_anew_where_they_take_compute(best):
    busy = uniform(2, 4, d2h_ms=0.5, h2d_ms=0.5, copy_share=1.0)
    again = seeded(busy, best, GB)
    assert verify(again, busy) == []
    assert again.forecast.makespan_ns > best.forecast.makespan_ns


def test_a_plan_of_links_for_each_device_is_timed_anew_where_they_share_one():
    costs, shared = (uniform(2, 2, d2h_ms=0.8, h2d_ms=0.8, shared_links=links) for links in ("none", "pairs"))
    seed = quick(costs, 13 * GB // 10, recompute=False, method="gis-offload-1").schedule
    result = quick(shared, 13 * GB // 10, time_limit_s=0.0, recompute=False, seeds=(check(seed),))
    assert result.notes == ()
    assert verify(result.schedule, shared) == []


def test_a_placement_that_is_not_searched_comes_with_its_seed():
    uneven = uniform(2, 4, head_ms=(2, 2, 2))
    seed = quick(uneven, 4 * GB, placement="loop", stages_per_device=2).schedule
    wanted = settled(COSTS, Options(mem_bytes=4 * GB, microbatches=4, placement="loop", stages_per_device=2))
    nine = uniform(2, 4, head_ms=(1, 1, 1))
    alone = {layout.cuts for layout, _ in instances(nine, wanted)}
    cuts = layout_of(seed).cuts
    assert cuts not in alone
    assert cuts in {layout.cuts for layout, _ in instances(nine, replace(wanted, seeds=(check(seed),)))}
    other = replace(wanted, seeds=(check(seed),), placement="v")
    assert cuts not in {layout.cuts for layout, _ in instances(nine, other)}


@pytest.mark.parametrize(("without", "ops"), [("offload", {"offload"}), ("split", {"backward_weight"})])
def test_what_the_options_forbid_is_not_taken_from_a_seed(best, without, ops):
    def names(schedule):
        return {op.name for device in schedule.devices for op in (*device.compute, *device.d2h)}

    assert names(best) >= ops
    assert not names(seeded(COSTS, best, GB, **{without: False})) & ops


@pytest.mark.parametrize("microbatches", [1, 3, 5, 9])
def test_other_microbatches_start_from_the_same_order(best, microbatches):
    wanted = settled(COSTS, Options(mem_bytes=GB, microbatches=microbatches, seeds=(check(best),)))
    found = [
        timed
        for layout, problem in instances(COSTS, wanted)
        for timed in seeds._timed(best, problem, layout)
        if layout == seeds.layout_or_given(best)
    ]
    assert {timed.ticks.shape[2] for timed in found} == {microbatches}
    # at worst one comes after the other, each forward twice
    one = quick(COSTS, GB, microbatches=1).schedule.forecast.makespan_ns + 2 * 10**6
    assert min(timed.makespan for timed in found) <= best.forecast.makespan_ns + one * max(0, microbatches - 4)
    for timed in found:
        forwards = timed.ticks[0]
        assert (np.diff(forwards, axis=1) > 0).all()  # microbatches in order


@settings(max_examples=20, deadline=None)
@given(profiles(), st.integers(1, 5), st.integers(1, 12))
def test_any_plan_starts_any_number_of_microbatches_that_fits(profile, before, after):
    seed = quick(profile, 10**6, microbatches=before).schedule
    again = seeded(profile, seed, 10**6, microbatches=after)
    assert again.setup.microbatches == after


def test_other_devices_start_from_the_order_of_those_that_were_as_far_along():
    old, new = uniform(2, 4), uniform(4, 2)
    seed = quick(old, 2 * GB, placement="linear", stages_per_device=1, microbatches=8).schedule
    starts, _ = seeds.times_of(seed)
    start = Start.of(starts, np.array([cost.backward_input_ns for cost in seed.forecast.stages]))
    moved = start.of_devices((0, 1), (0, 1, 2, 3))
    assert (moved.wish[:, 0] == start.wish[:, 0]).all()
    assert (moved.wish[:, 3] == start.wish[:, 1]).all()
    assert (np.diff(moved.wish[0], axis=0) > 0).all()  # later devices later
    assert moved.modes.shape == (4, 8)
    result = quick(new, 2 * GB, seeds=(check(seed),), microbatches=8)
    assert result.notes == ()


def test_a_plan_for_other_devices_of_the_same_profile_keeps_to_the_devices_that_are_asked_for():
    costs = uniform(4, 2)
    seed = quick(costs, 2 * GB, microbatches=4).schedule
    result = quick(costs, 8 * GB, devices=2, seeds=(check(seed),), microbatches=4)
    assert (seed.setup.devices, result.schedule.setup.devices) == (4, 2)


def test_the_search_starts_from_the_seed():
    """With no wished order but the seed's, a search that may climb finds something better."""
    seed = quick(COSTS, GB, method="gpipe-recompute").schedule
    layout = seeds.layout_or_given(seed)
    problem = build(COSTS, layout, 4, Caps(GB, None), Freedom())
    timed = next(seeds._timed(seed, problem, layout))
    start = Start.of(timed.ticks, np.array([stage.backward_input for stage in problem.stages]))
    instance = SearchedProblem(problem, ("given", 1), 0, (start,))
    assert instance.names(problem)[0] == "start 0"
    with LocalSearch([instance], Limits("makespan", 0.5, 0, 1, True)) as search:
        while search.is_running:
            search.take(0.05)
        assert search.error is None
        screened = search._screen(0, "start 0")
    assert screened.best.value <= timed.makespan


def test_what_no_instance_can_take_over_is_said(best):
    linear = quick(COSTS, GB, placement="linear", seeds=(check(best),))
    is_linear = seeds.layout_or_given(best).name == "linear"
    assert bool(linear.notes) != is_linear


def test_the_placement_of_a_schedule_can_be_kept(best):
    slower = structs.replace(COSTS, layers=[structs.replace(COSTS.layers[0], forward_ns=10**7, count=3), *COSTS.layers])
    slower = structs.replace(slower, layers=[slower.layers[0], structs.replace(COSTS.layers[0], count=5)])
    free = quick(slower, 4 * GB).schedule
    kept = quick(slower, 4 * GB, keep=check(best)).schedule
    where = [(stage.device, stage.layers) for stage in best.stages]
    assert [(stage.device, stage.layers) for stage in kept.stages] == where
    assert [(stage.device, stage.layers) for stage in free.stages] != where
    assert kept.provenance.options["keep_placement"] == best.digest
    assert verify(kept, slower) == []


def test_a_placement_of_other_devices_or_layers_cannot_be_kept(best):
    for profile, options in ((uniform(2, 5), {}), (COSTS, {"devices": 1}), (COSTS, {"placement": "loop"})):
        with pytest.raises(BadInput, match="--keep-placement"):
            quick(profile, GB, keep=check(best), **options)


@settings(max_examples=6, deadline=None)
@given(profiles(), st.integers(2, 4), st.sampled_from([1.0, 1.2, 2.0]))
def test_any_plan_is_a_seed_of_its_own_instance(profile, microbatches, more):
    roomy = quick(profile, 10**6, microbatches=microbatches).schedule
    peak = max(device.peak_bytes for device in roomy.devices)
    try:
        seed = quick(profile, max(1, peak * 2 // 3), microbatches=microbatches).schedule
    except Infeasible:
        seed = roomy
    again = seeded(profile, seed, int(seed.setup.cap_bytes * more), microbatches=microbatches)
    assert again.forecast.makespan_ns <= seed.forecast.makespan_ns
