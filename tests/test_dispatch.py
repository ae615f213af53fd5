"""The dispatcher: safe in memory, in order, and finished whenever one microbatch at a time fits with its reserve."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from optpipe_compiler.heuristics.dispatch import Dispatcher, Guide
from optpipe_compiler.problem import Freedom, Problem, Stage
from optpipe_compiler.schedule import Kind, Mode, Schedule, Task
from optpipe_compiler.simulate import Stuck, peaks, retime
from tests.instances import problem
from tests.plans import check, dispatched, serial
from tests.strategies import problems

RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def guide(one: Problem, mode: Mode = Mode.KEEP, *, split: bool = True, depth: int = 1, ahead: int = 1) -> Guide:
    """Backwards first, one microbatch after the other; forwards run `depth` microbatches ahead of weight gradients."""
    count, stages = range(one.microbatches), range(len(one.stages))
    able = {Mode.OFFLOAD: one.can_offload, Mode.RECOMPUTE: one.can_recompute}.get(mode, lambda stage: True)
    forward = [[100 * (m - depth) + 90 for m in count] for _ in stages]
    backward = [[100 * m + 10 - s for m in count] for s in stages]
    return Guide(
        "by-hand",
        forward=forward,
        backward=backward,
        weight=[[100 * m + 20 for m in count] for _ in stages],
        offload=forward,
        reload=backward,
        modes=[[int(mode if able(s) else Mode.KEEP) for _ in count] for s in stages],
        fused=[not split] * len(one.stages),
        ahead=ahead,
    )


def run(one: Problem, by: Guide) -> Schedule:
    found = Dispatcher(one).run(by)
    assert found is not None
    timed = found.schedule()
    assert timed.makespan == found.makespan
    return timed


def cautious(stage: Stage) -> Stage:
    """The stage with the room that the dispatcher reserves: the largest transient with every op."""
    most = max(
        stage.backward_extra,
        stage.backward_input_extra + stage.captured,
        stage.backward_weight_extra,
        stage.forward_extra,
    )
    return replace(
        stage,
        backward_extra=most,
        backward_input_extra=most,
        backward_weight_extra=most,
        forward_extra=most,
        captured=0,
        residue=stage.saved,
    )


@RANDOM
@given(one=problems())
def test_lanes_data_and_memory_are_respected_and_microbatches_run_in_order_per_stage_and_kind(one):
    for timed in dispatched(one):
        check(timed)
        for kind in Kind:
            for stage in range(len(one.stages)):
                mine = [timed.starts.get(Task(kind, stage, m)) for m in range(one.microbatches)]
                there = [start for start in mine if start is not None]
                assert there == sorted(there)


@RANDOM
@given(one=problems())
def test_it_finishes_where_one_microbatch_at_a_time_fits_with_its_reserve(one):
    small = replace(one, stages=tuple(replace(s, residue=min(s.residue, s.saved)) for s in one.stages))
    for mode in Mode:
        by = guide(small, mode, split=one.freedom.split)
        reserved = replace(small, stages=tuple(map(cautious, small.stages)), host_budget=None)
        alone = serial(reserved, split=one.freedom.split, mode=lambda s, m, by=by: Mode(by.modes[s][m]))
        roomy = replace(small, host_budget=None, budget=tuple(peaks(alone)))
        assert len(run(roomy, by).starts) == len(alone.starts)


@RANDOM
@given(one=problems())
def test_its_schedules_follow_their_own_plans(one):
    for timed in dispatched(one):
        assert retime(timed, one).makespan <= timed.makespan


def test_it_is_stuck_rather_than_above_the_budget_where_not_one_microbatch_fits():
    one = problem(1, 1, 3)
    with pytest.raises(Stuck, match="by-hand: 1 backwards never start"):
        Dispatcher(one).run(guide(one))


def test_it_gives_up_as_soon_as_a_device_cannot_be_done_in_time():
    one = problem(3, 6, 100, send_activation=0, send_gradient=0)
    dispatcher, by = Dispatcher(one), guide(one, split=False, depth=3)
    whole = dispatcher.run(by)
    assert whole is not None
    ops = dispatcher.ops
    assert dispatcher.run(by, whole.makespan) is not None
    assert dispatcher.run(by, 6 * 30 - 1) is None
    assert dispatcher.ops == 2 * ops


def test_with_room_for_one_activation_it_runs_one_microbatch_at_a_time():
    one = problem(2, 3, 4, send_activation=0, send_gradient=0)
    timed = run(one, guide(one, split=False, depth=3))
    assert timed.makespan == 3 * 2 * 30
    assert [timed.starts[Task(Kind.F, 0, m)] for m in range(3)] == [0, 60, 120]


def test_with_room_for_all_it_is_as_good_as_one_forward_one_backward():
    one = problem(3, 6, 100, send_activation=0, send_gradient=0)
    assert run(one, guide(one, split=False, depth=3)).makespan == (6 + 3 - 1) * 30


def test_what_ranks_lower_goes_first():
    one = problem(1, 4, 100)
    soon, late = run(one, guide(one, depth=0)), run(one, guide(one, depth=4))
    assert [task.kind.name for task in soon.plan.compute[0]] == ["F", "I", "W"] * 4
    assert [task.kind.name for task in late.plan.compute[0]][:4] == ["F"] * 4


def test_every_guide_uses_only_what_is_free_to_use():
    for offload, recompute, split in ((a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)):
        freedom = Freedom(bool(offload), bool(recompute), bool(split))
        for timed in dispatched(problem(2, 3, 12, freedom=freedom)):
            assert timed.count(Kind.D) == timed.count(Kind.H)
            assert freedom.offload or timed.count(Kind.D) == 0
            assert freedom.recompute or timed.count(Kind.R) == 0
            assert freedom.split or timed.count(Kind.W) == 0


def test_an_activation_is_offloaded_recomputed_or_kept_as_the_guide_says():
    one = problem(1, 3, 8)
    by = replace(guide(one), modes=[[int(Mode.OFFLOAD), int(Mode.RECOMPUTE), int(Mode.KEEP)]])
    timed = run(one, by)
    assert [[Task(kind, 0, m) in timed.starts for kind in (Kind.D, Kind.H, Kind.R)] for m in range(3)] == [
        [True, True, False],
        [False, False, True],
        [False, False, False],
    ]


def test_what_the_host_has_no_room_for_is_kept():
    one = replace(problem(1, 3, 100), host_budget=problem(1, 3, 100).stages[0].saved)
    timed = run(one, guide(one, Mode.OFFLOAD, depth=4))
    assert 1 <= timed.count(Kind.D) < 3
    check(timed)


def test_no_more_is_reloaded_ahead_than_the_guide_says_while_there_are_forwards():
    one = problem(1, 6, 100, offload=1, reload=1)
    for ahead in (1, 2, 3):
        timed = run(one, guide(one, Mode.OFFLOAD, depth=2, ahead=ahead))
        last = max(start for task, start in timed.starts.items() if task.kind is Kind.F)
        events = [(start, 1) for task, start in timed.starts.items() if task.kind is Kind.H]
        events += [(start, -1) for task, start in timed.starts.items() if task.kind in (Kind.I, Kind.B)]
        levels = [sum(change for _, change in sorted(events)[: n + 1]) for n in range(len(events))]
        there = [level for level, (start, _) in zip(levels, sorted(events), strict=True) if start < last]
        assert 1 <= max(there) <= ahead
