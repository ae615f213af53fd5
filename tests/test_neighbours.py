"""Neighbouring stages of one device: lifted orders, no messages between them, and what they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings

from optpipe_compiler.compiler import Options, instances, lower_bound, settled
from optpipe_compiler.model import bounds
from optpipe_compiler.model.neighbours import joined, runs
from optpipe_compiler.model.placement import in_runs, layout
from optpipe_compiler.model.problem import Caps, Freedom, Problem, build
from optpipe_compiler.model.schedule import Kind, Task
from optpipe_compiler.plan.instances import MOST_NEIGHBOURS, layouts
from optpipe_compiler.published import is_for, published, recipe
from optpipe_compiler.verify import verify
from tests.instances import problem, quick, uniform
from tests.plans import check
from tests.strategies import problems

TIGHT = {"residue_fraction": 0.5, "boundary_fraction": 0.05, "recompute_ms": 1.0}
GB = 10**9


def fine(devices: int, each: int, microbatches: int) -> Problem:
    """Linear, each layer of a device a stage of its own."""
    profile = uniform(devices, each, **TIGHT)
    place = in_runs(layout("linear", devices, 1, [1] * devices * each), [1] * devices * each, each)
    return build(profile, place, microbatches, Caps(100 * GB, None), Freedom())


def test_each_layer_becomes_a_stage_on_the_device_that_it_was_on():
    uneven = in_runs(layout("linear", 2, 1, [1, 1, 1, 3]), [1] * 4, 8)
    assert uneven.cuts == (0, 1, 2, 3, 4)
    assert uneven.device_of == (0, 0, 0, 1)


def test_more_layers_than_stages_are_cut_into_runs_of_which_the_largest_is_as_small_as_can_be():
    one = in_runs(layout("linear", 2, 1, [1, 1, 1, 1, 4]), [1, 5, 1, 1, 3], 3)
    assert one.cuts == (0, 1, 2, 4, 5)
    assert one.device_of == (0, 0, 0, 1)


def test_joined_stages_are_those_of_the_coarse_placement():
    profile = uniform(3, 4, **TIGHT)
    coarse = build(profile, layout("linear", 3, 1, [1] * 12), 5, Caps(100 * GB, None), Freedom())
    one = joined(fine(3, 4, 5))
    assert runs(fine(3, 4, 5)) == [range(4), range(4, 8), range(8, 12)]
    assert len(one.stages) == 3
    for mine, expected in zip(one.stages, coarse.stages, strict=True):
        for name in ("forward", "backward_input", "backward_weight", "saved", "residue", "checkpoint", "offload"):
            assert getattr(mine, name) == getattr(expected, name)


def test_a_lifted_order_takes_as_long_as_the_coarse_one_and_recomputes_each_layer_right_before_its_backward():
    profile = uniform(2, 2, **TIGHT)
    coarse = build(profile, layout("linear", 2, 1, [1] * 4), 3, Caps(100 * GB, None), Freedom())
    for name in ("1f1b", "zb-h1", "gpipe"):
        assert published(fine(2, 2, 3), name).makespan == published(coarse, name).makespan
    order = recipe(fine(2, 2, 3), "1f1b-recompute").tasks()[1]
    assert [f"{task.kind.name}{task.stage}" for task in order[:8]] == ["F2", "F3", "R3", "B3", "R2", "B2", "F2", "F3"]


def test_on_one_device_orders_are_lifted_too_and_interleaved_ones_are_not():
    """All stages follow each other there, whether they are those of a linear placement or of a loop."""
    for name in ("1f1b", "gpipe", "zb-h1"):
        assert published(fine(1, 4, 3), name).makespan == 3 * sum(stage.work for stage in fine(1, 4, 3).stages)
    (order,) = recipe(fine(1, 2, 2), "1f1b-recompute").tasks()
    assert [f"{task.kind.name}{task.stage}" for task in order[:6]] == ["F0", "F1", "R1", "B1", "R0", "B0"]
    (order,) = recipe(fine(1, 2, 2), "interleaved-1f1b").tasks()
    assert [f"{task.kind.name}{task.stage}" for task in order[:4]] != ["F0", "F1", "B1", "B0"]


def test_what_one_device_recomputes_layer_by_layer_is_a_baseline():
    profile = uniform(1, 4, **TIGHT)
    result = quick(profile, GB // 2, microbatches=4, placement="linear", offload=False)
    assert result.schedule.forecast.baselines["1f1b-recompute"].fits


def test_a_layer_at_a_time_needs_less_memory_than_a_whole_stage():
    """With every layer recomputed right before its backward, one whole layer is there at a time and not all four."""
    profile = uniform(2, 4, **TIGHT)
    found = instances(profile, settled(profile, Options(mem_bytes=GB // 2)))
    assert any(len(one.device_of) == 8 for one, _ in found if one.name == "linear")
    roomy = instances(profile, settled(profile, Options(mem_bytes=9 * GB)))
    assert not any(len(one.device_of) == 8 for one, _ in roomy if one.name == "linear")
    result = quick(profile, GB // 2, microbatches=4, placement="linear", offload=False)
    assert verify(result.schedule, profile) == []
    assert len(result.schedule.stages) == 8
    assert {op.name for op in result.schedule.devices[0].compute} & {"send_gradient", "recv_activation"} == set()


@pytest.mark.parametrize(("placement", "p2p_ms"), [("linear", 0.0), ("auto", 0.0), ("auto", 4.0)])
def test_where_they_are_not_searched_bounds_are_those_of_smaller_caps_all_the_same(placement, p2p_ms):
    """Plans and bounds go from cap to cap, in `sweep` and `explain`, so that no bound may exclude what is searched."""
    profile = uniform(3, 4, **TIGHT, p2p_ms=p2p_ms)
    below = next(
        one.below_bytes
        for one in layouts(profile, settled(profile, Options(mem_bytes=GB, placement=placement)))
        if one.below_bytes is not None
    )
    caps = (below - 1, below, 4 * below)
    options = [settled(profile, Options(mem_bytes=cap, microbatches=6, placement=placement)) for cap in caps]
    few, *many = ([one for one, _ in instances(profile, each)] for each in options)
    lowest = [lower_bound(profile, each).ns for each in options]
    assert lowest == sorted(lowest, reverse=True)
    fine = [one for one in few if one.below_bytes is not None and not one.selective]
    assert fine
    for cap, each in zip(caps[1:], many, strict=True):
        problems = [build(profile, one, 6, Caps(cap, None), Freedom()) for one in fine]
        assert bounds.lowest(problems, "makespan").ticks >= lower_bound(profile, options[caps.index(cap)]).ns
        assert placement == "linear" or p2p_ms or fine[0] not in each, "it would lower no bound"


def test_a_device_of_many_layers_runs_them_in_as_many_runs_as_may_be_stages():
    profile = uniform(2, 12, **TIGHT)
    found = layouts(profile, settled(profile, Options(mem_bytes=GB // 2)))
    assert any(len(one.device_of) == 2 * MOST_NEIGHBOURS for one in found if one.name == "linear")


def test_published_schedules_of_one_stage_per_device_are_for_neighbours_too():
    assert is_for("1f1b", ("linear", 4))
    assert not is_for("gis", ("linear", 4))
    assert not is_for("1f1b", ("loop", 2))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(one=problems(devices=2, stages=4))
def test_lifted_schedules_keep_every_law_but_the_caps(one):
    count = len(one.stages)
    assume(one.devices > 1)
    beside = tuple(replace(stage, device=s * one.devices // count) for s, stage in enumerate(one.stages))
    sends = [s + 1 < count and beside[s + 1].device != beside[s].device for s in range(count)]
    stages = tuple(
        replace(
            stage,
            send_activation=stage.send_activation * sends[s],
            send_gradient=stage.send_gradient * (s > 0 and sends[s - 1]),
        )
        for s, stage in enumerate(beside)
    )
    roomy = replace(one, stages=stages, budget=(10**6,) * one.devices, host_budget=None, hosts=())
    for name in ("1f1b", "gpipe"):
        timed = published(roomy, name)
        check(timed)
        assert timed.count(Kind.F) == count * one.microbatches
        assert Task(Kind.F, count - 1, one.microbatches - 1) in timed.starts


def test_one_stage_per_device_is_lifted_to_itself():
    one = problem(3, 4, 100)
    assert joined(one) == one
