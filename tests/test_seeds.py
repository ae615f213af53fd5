"""Earlier schedules as first candidates: a plan is no worse than a seed that still fits, and no less safe."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from optpipe_compiler.compiler import Options, compile_schedule, instances, settled
from optpipe_compiler.errors import Infeasible
from optpipe_compiler.plan.seeds import layout_of
from optpipe_compiler.verify import check
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
