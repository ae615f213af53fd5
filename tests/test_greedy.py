"""The greedy scheduler: safe in memory, in order, and finished whenever it promises to be.

What it promises: with unlimited host memory, a policy with fused backwards finishes wherever one microbatch at a time
fits with room for the largest transient of each stage's backward ops, and one with split backwards where, besides, no
stage's residue exceeds what it saved. Tighter caps are the work of `solver.minimum`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings

from optpipe_compiler.heuristics.greedy import Policy, greedy, policies
from optpipe_compiler.problem import Freedom, Problem, Stage
from optpipe_compiler.schedule import Kind, Mode, Schedule, Task
from optpipe_compiler.simulate import Stuck, peaks, predecessors
from tests.instances import problem
from tests.plans import greedies, keep, serial
from tests.strategies import problems

RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cautious(stage: Stage) -> Stage:
    """The stage with the room that the scheduler reserves: the largest transient with every backward op."""
    most = max(stage.backward_extra, stage.backward_input_extra + stage.captured, stage.backward_weight_extra)
    return replace(
        stage,
        backward_extra=most,
        backward_input_extra=most,
        backward_weight_extra=most,
        captured=0,
        residue=stage.saved,
    )


def promised(one: Problem, policy: Policy) -> Problem:
    """The instance with just the memory for which the policy promises to finish."""
    reserved = replace(one, stages=tuple(map(cautious, one.stages)))
    return replace(one, host_budget=None, budget=tuple(peaks(serial(reserved, split=policy.split, mode=policy.mode))))


def check_lanes(timed: Schedule) -> None:
    """No two ops of a lane overlap, and none starts before what it needs."""
    for lane in (*timed.plan.compute, *timed.plan.d2h, *timed.plan.h2d):
        for before, after in pairwise(lane):
            assert timed.end(before) <= timed.starts[after]
    for task, start in timed.starts.items():
        for before, lag in predecessors(timed.problem, task, timed.starts):
            assert timed.end(before) + lag <= start


@RANDOM
@given(one=problems())
def test_it_never_exceeds_device_or_host_memory(one):
    for timed in greedies(one):
        assert all(peak <= budget for peak, budget in zip(peaks(timed), one.budget, strict=True))
        assert one.host_budget is None or sum(timed.host_peaks) <= one.host_budget


@RANDOM
@given(one=problems())
def test_lanes_and_data_are_respected_and_microbatches_run_in_order_per_stage_and_kind(one):
    for timed in greedies(one):
        check_lanes(timed)
        for kind in Kind:
            for stage in range(len(one.stages)):
                mine = [timed.starts.get(Task(kind, stage, m)) for m in range(one.microbatches)]
                there = [start for start in mine if start is not None]
                assert there == sorted(there)


@RANDOM
@given(one=problems())
def test_it_finishes_where_one_microbatch_at_a_time_fits_with_its_reserve(one):
    small = replace(one, stages=tuple(replace(s, residue=min(s.residue, s.saved)) for s in one.stages))
    for policy in policies(one):
        roomy = promised(small if policy.split else one, policy)
        assert len(greedy(roomy, policy).starts) == len(serial(one, split=policy.split, mode=policy.mode).starts)


def test_it_is_stuck_rather_than_above_the_budget_where_not_one_microbatch_fits():
    with pytest.raises(Stuck, match="by-hand: 3 tasks never start"):
        greedy(problem(1, 1, 3), Policy("by-hand", keep, True, 1))


@pytest.mark.parametrize(("depth", "open_at_once"), [(1, 1), (2, 2), (4, 4), (9, 6)])
def test_a_device_opens_no_more_microbatches_than_the_policy_says(depth, open_at_once):
    timed = greedy(problem(2, 6, 100), Policy("", keep, False, depth))
    changes = sorted(
        (timed.end(task), -1) if task.kind is Kind.B else (start, 1)
        for task, start in timed.starts.items()
        if task.stage == 0
    )
    assert max(sum(change for _, change in changes[: n + 1]) for n in range(len(changes))) <= open_at_once


def test_with_room_for_one_activation_it_runs_one_microbatch_at_a_time():
    timed = greedy(problem(2, 3, 4, send_activation=0, send_gradient=0), Policy("", keep, False, 3))
    assert timed.makespan == 3 * 2 * 30
    assert [timed.starts[Task(Kind.F, 0, m)] for m in range(3)] == [0, 60, 120]


def test_with_room_for_all_it_is_as_good_as_one_forward_one_backward():
    timed = greedy(problem(3, 6, 100, send_activation=0, send_gradient=0), Policy("", keep, False, 3))
    assert timed.makespan == (6 + 3 - 1) * 30


def test_every_policy_uses_only_what_is_free_to_use():
    for offload, recompute, split in ((a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)):
        freedom = Freedom(bool(offload), bool(recompute), bool(split))
        for timed in greedies(problem(2, 3, 12, freedom=freedom)):
            assert timed.count(Kind.D) == timed.count(Kind.H)
            assert freedom.offload or timed.count(Kind.D) == 0
            assert freedom.recompute or timed.count(Kind.R) == 0
            assert freedom.split or timed.count(Kind.W) == 0


def test_an_activation_is_offloaded_recomputed_or_kept_as_the_policy_says():
    modes = {0: Mode.OFFLOAD, 1: Mode.RECOMPUTE, 2: Mode.KEEP}
    timed = greedy(problem(1, 3, 8), Policy("", lambda stage, m: modes[m], True, 3))
    assert [[Task(kind, 0, m) in timed.starts for kind in (Kind.D, Kind.H, Kind.R)] for m in range(3)] == [
        [True, True, False],
        [False, False, True],
        [False, False, False],
    ]


def test_policies_have_names_of_their_own():
    names = [policy.name for policy in policies(problem(2, 3, 12, per_device=2))]
    assert len(names) == len(set(names)) > 10
