"""Many devices learn from few: the narrow problem keeps what is alike, and its policies stretch to the wide one."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from optpipe_compiler.heuristics.islands import Exploration, Place, Quest
from optpipe_compiler.heuristics.narrow import narrowed, widened
from optpipe_compiler.heuristics.tuning import Tuner
from tests.instances import problem
from tests.plans import check

if TYPE_CHECKING:
    from optpipe_compiler.problem import Problem


def pairs(devices: int, *, per_device: int = 2, placement: str = "loop", cap: int = 64) -> Problem:
    """Neighbours share a host link."""
    one = problem(devices, 2 * devices, cap, per_device=per_device, placement=placement, offload=6, reload=6)
    return replace(one, link_of=tuple(device // 2 for device in range(devices)), host_budget=4096)


def test_a_narrow_problem_has_whole_links_and_a_share_of_microbatches_and_memory():
    narrow = narrowed(pairs(32))
    assert narrow is not None
    assert narrow.devices == 8
    assert narrow.link_of == (0, 0, 1, 1, 2, 2, 3, 3)
    assert [stage.device for stage in narrow.stages] == [*range(8), *range(8)]
    assert (narrow.microbatches, narrow.budget, narrow.host_budget) == (16, (16,) * 8, 256)


def test_a_v_stays_a_v_and_the_last_device_stays():
    wide = pairs(16, placement="v")
    stages = list(wide.stages)
    stages[15] = replace(stages[15], forward=77)
    narrow = narrowed(replace(wide, stages=tuple(stages)))
    assert narrow is not None
    assert [stage.device for stage in narrow.stages] == [*range(8), *reversed(range(8))]
    assert narrow.stages[7].forward == 77


@pytest.mark.parametrize(
    "wide",
    [
        pairs(14),
        pairs(16, cap=6),  # half of it holds no activation
        replace(pairs(16), link_of=(0,) * 16),  # one link for all: nothing to leave out
    ],
)
def test_there_is_no_narrow_problem_of_few_devices_or_too_little_memory_or_one_link(wide):
    assert narrowed(wide) is None


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_what_a_narrow_policy_suggests_can_be_dispatched(placement):
    wide, placed = pairs(16, placement=placement), (placement, 2)
    narrow = narrowed(wide)
    assert narrow is not None
    small, large, random = Tuner(narrow, placed), Tuner(wide, placed), Random(0)
    for name in small.names():
        policy = next(small.first(name))
        for _ in range(10):
            policy = small.changed(policy, random)
        stretched, as_it_is = widened(policy, narrow, wide)
        assert as_it_is.shift == policy.shift
        assert stretched.shift == [[[2 * ticks for ticks in row] for row in part] for part in policy.shift]
        assert stretched.fill == 2 * policy.fill
        for s, stage in enumerate(wide.stages):
            turn = wide.stages_of(stage.device).index(s)
            assert stretched.modes[1][s] == policy.modes[1][narrow.stages_of(stage.device // 2)[turn]]
        assert stretched.wish in set(large.names())
        timed = large.schedule(stretched)
        if timed is not None:
            check(timed)


def test_lockstep_groups_of_all_or_half_of_the_devices_stay_that():
    wide = pairs(16)
    narrow = narrowed(wide)
    assert narrow is not None
    tuner = Tuner(narrow, ("loop", 2))
    wishes = {
        name: next(widened(next(tuner.first(name)), narrow, wide)).wish for name in ("lockstep-8-back", "lockstep-4")
    }
    assert wishes == {"lockstep-8-back": "lockstep-16-back", "lockstep-4": "lockstep-8"}


def test_a_search_that_is_narrow_first_begins_with_what_the_narrow_one_found():
    place = Place(pairs(16, cap=32), ("loop", 2), 0)
    found = {
        is_narrow_first: min(
            one.value
            for one in Exploration(Quest((place,), 0, 1, 0, 0.0, 60_000, is_narrow_first=is_narrow_first)).run()
        )
        for is_narrow_first in (False, True)
    }
    assert found[True] < found[False]
