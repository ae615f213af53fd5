"""The search over guides: what a policy says is safe, searching only gets better, equal budgets find the same."""

from __future__ import annotations

import queue
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optpipe_compiler import bounds, child
from optpipe_compiler.heuristics.islands import Exploration, Found, Islands, Place, Quest, shortened
from optpipe_compiler.heuristics.lockstep import lockstep
from optpipe_compiler.heuristics.tuning import Tuner
from tests.instances import problem
from tests.plans import check
from tests.strategies import problems

if TYPE_CHECKING:
    from optpipe_compiler.problem import Problem

RANDOM = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LOOP = ("loop", 2)


def tight(microbatches: int = 8) -> Problem:
    """Two devices with room for two of their stages' activations each, behind links that are fast enough."""
    return problem(2, microbatches, 8, per_device=2, placement="loop", offload=6, reload=6)


def quest(one: Problem, ops: int, number: int = 0, islands: int = 1, seed: int = 0) -> Quest:
    return Quest((Place(one, LOOP, bounds.best(one, "makespan").ticks),), number, islands, seed, 0.0, ops)


def explored(*arguments: object, **options: int) -> list[Found]:
    return list(Exploration(quest(*arguments, **options)).run())  # type: ignore[arg-type]


@RANDOM
@given(one=problems(), seed=st.integers(0, 9999))
def test_whatever_a_policy_says_its_schedule_is_safe(one, seed):
    tuner, random = Tuner(one, ("linear", 1)), Random(seed)
    policy = next(tuner.first(random.choice([name for name in tuner.names() if name.startswith("lockstep")])))
    for _ in range(8):
        policy = tuner.changed(policy, random)
        timed = tuner.schedule(policy)
        if timed is not None:
            check(timed)


def test_a_change_leaves_the_policy_it_came_from_as_it_was():
    tuner = Tuner(tight(), LOOP)
    policy = next(tuner.first("lockstep-1"))
    before = repr(policy)
    for seed in range(50):
        tuner.changed(policy, Random(seed))
    assert repr(policy) == before


def test_ranks_never_fall_from_one_microbatch_to_the_next():
    tuner, random = Tuner(tight(), LOOP), Random(1)
    policy = next(tuner.first("lockstep-2"))
    for _ in range(30):
        policy = tuner.changed(policy, random)
        guide = tuner.guide(policy)
        for table in (guide.forward, guide.backward, guide.weight):
            assert all(row == sorted(row) for row in table)


def test_exploring_only_gets_better_and_says_what_it_reaches():
    one = tight()
    found = explored(one, 60_000)
    values = [item.value for item in found]
    assert len(values) > 1
    assert values == sorted(set(values), reverse=True)
    timed = Tuner(one, LOOP).schedule(found[-1].policy)
    assert timed is not None
    assert timed.makespan == values[-1] >= bounds.best(one, "makespan").ticks


def test_an_equal_budget_finds_the_same_and_another_seed_or_island_something_else():
    def values(**options: int) -> list[tuple[int, str]]:
        return [(item.value, item.policy.wish) for item in explored(tight(), 40_000, **options)]

    assert values() == values()
    assert values(seed=1) != values()
    first, second = (values(number=number, islands=2) for number in (0, 1))
    assert {wish for _, wish in first}.isdisjoint(wish for _, wish in second)


def test_a_placement_that_cannot_win_is_not_climbed():
    one = problem(1, 4, 100, links=False)  # any order without a gap is optimal
    found = explored(one, 10**9)
    assert found[-1].value == bounds.best(one, "makespan").ticks


def test_a_policy_of_few_microbatches_holds_for_many():
    many = tight(200)
    few = shortened(many)
    assert few.microbatches == 8
    assert shortened(few) == few
    found = explored(many, 40_000)
    timed = Tuner(many, LOOP).schedule(found[-1].policy)
    assert timed is not None
    check(timed)
    assert found[-1].value == pytest.approx(timed.makespan, rel=0.03)


def test_an_island_streams_what_it_finds_and_says_when_it_is_done():
    with Islands([quest(tight(), 30_000)]) as islands:
        found = []
        while islands.running:
            found += islands.wait(0.2)
    assert not islands.unfinished
    assert {number for number, _ in found} == {0}
    assert found[-1][1].value == explored(tight(), 30_000)[-1].value


def test_an_island_that_dies_is_unfinished_and_leaves_its_last_words():
    broken = replace(quest(tight(), 1000), places=None)  # type: ignore[arg-type]
    with Islands([broken]) as islands:
        while islands.running:
            assert islands.wait(0.2) == []
        assert islands.unfinished == [0]
        assert "TypeError" in islands.last_words()


def test_a_child_that_is_closed_twice_is_closed():
    one = child.Child("optpipe_compiler.heuristics.islands", queue.Queue())
    one.close()
    one.close()
    assert one.process.returncode is not None


# -- the wished steady state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["loop", "v"])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("forwards_first", [True, False])
def test_in_lockstep_no_device_runs_two_ops_at_once_and_nothing_comes_before_what_it_needs(
    placement, group, forwards_first
):
    one = problem(4, 16, 100, per_device=2, placement=placement, send_activation=1, send_gradient=1)
    forward, backward, weight = lockstep(one, group, forwards_first)
    stages = one.stages
    for device in range(4):
        busy = sorted(
            (start, start + length)
            for s in one.stages_of(device)
            for table, length in ((forward, 10), (backward, 10), (weight, 10))
            for start in table[s]
        )
        assert all(first[1] <= second[0] for first, second in pairwise(busy))
    for s in range(len(stages)):
        for m in range(16):
            if s:
                assert forward[s - 1][m] + 10 + stages[s - 1].send_activation <= forward[s][m]
                assert backward[s][m] + 10 + stages[s].send_gradient <= backward[s - 1][m]
            assert forward[s][m] + 10 <= backward[s][m] <= weight[s][m] - 10
