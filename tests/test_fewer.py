"""Policies for many devices from one for fewer of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optpipe_compiler.machine.policy import policy, setting, value
from optpipe_compiler.machine.state import NEVER, machine
from optpipe_compiler.model import bounds
from optpipe_compiler.model.schedule import Mode, Schedule
from optpipe_compiler.plan import fewer, local_search
from optpipe_compiler.plan.carried import Start
from optpipe_compiler.plan.fewer import narrowed, widened
from optpipe_compiler.plan.local_search import LocalSearch, Realiser, SearchedProblem
from optpipe_compiler.plan.wishes import wish
from optpipe_compiler.solver.worker import Limits
from tests.instances import problem
from tests.machines import starts
from tests.plans import check

LOOP = ("loop", 2)
MANY = 32


@pytest.fixture(autouse=True)
def many_are_less(monkeypatch):
    """Tests take less time with fewer devices."""
    monkeypatch.setattr(fewer, "MANY", MANY)


def many(devices: int = MANY, cap: int = 8 * MANY, **changes):
    return problem(devices, 4 * devices, cap, per_device=2, placement="loop", offload=6, reload=6, **changes)


def test_fewer_devices_have_the_stages_of_every_fourth_and_memory_for_as_many_fewer_activations():
    wide = many()
    wide = replace(
        wide,
        link_of=tuple(None if d == 0 else (d - 1) // 2 for d in range(MANY)),
        host_budget=1600,
        hosts=((tuple(range(MANY // 2)), 640), (tuple(range(MANY // 2, MANY)), 320)),
    )
    narrow = narrowed(wide)
    assert (narrow.devices, len(narrow.stages)) == (8, 16)
    assert [stage.device for stage in narrow.stages] == [*range(8), *range(8)]
    first, last = wide.stages[0], wide.stages[-1]
    assert (narrow.stages[0], narrow.stages[-1]) == (first, replace(last, device=7))
    running = max(first.forward_extra, first.backward_input_extra, first.backward_weight_extra, first.backward_extra)
    assert narrow.budget == (running + (wide.budget[0] - running) // 4,) * 8
    assert narrow.link_of == (None, 0, 0, 1, 1, 2, 2, 3)
    assert narrow.host_budget == 1600 // 16
    assert narrow.hosts == (((0, 1, 2, 3), 640 // 16), ((4, 5, 6, 7), 320 // 16))


@pytest.mark.parametrize(
    ("links", "fewer_links"),
    [
        ((*range(16), *range(16)), (0, 1, 2, 3, 0, 1, 2, 3)),
        ((*range(8),) * 4, (0, 1) * 4),
        ((0,) * 32, (0,) * 8),
        (tuple(range(32)), tuple(range(8))),
        ((None, *range(31)), (None, *range(7))),
    ],
)
def test_devices_of_one_link_are_as_far_from_each_other(links, fewer_links):
    assert narrowed(replace(many(), link_of=links)).link_of == fewer_links


def test_a_v_turns_on_the_last_device_without_a_message():
    narrow = narrowed(problem(MANY, 4 * MANY, 8 * MANY, per_device=2, placement="v"))
    assert [stage.device for stage in narrow.stages] == [*range(8), *reversed(range(8))]
    assert [stage.send_activation > 0 for stage in narrow.stages] == [True] * 7 + [False] + [True] * 7 + [False]


def test_few_devices_are_not_made_fewer_nor_those_with_different_numbers_of_stages():
    wide = many()
    assert narrowed(many(MANY - 1)) is None
    assert narrowed(replace(wide, stages=wide.stages[:-1])) is None


def test_each_device_does_what_the_nearest_that_was_left_does():
    wide = many()
    narrow = narrowed(wide)
    modes = np.array([Mode.KEEP] * 8 + [Mode.OFFLOAD] * 4 + [Mode.RECOMPUTE] * 4)
    one = policy(narrow, modes)
    one.shift[:] = [[1, -2], [0, 3], [5, 0]]
    one.yields[0, 1] = False
    one.lead[0] = 2, 30
    same, further = widened(one, narrow, wide)
    for found in (same, further):
        assert found.modes.shape == (*one.modes.shape[:1], 2 * MANY, *one.modes.shape[2:])
        assert set(found.modes[:, :MANY].flat) == {Mode.KEEP}
        assert (found.modes[:, MANY : MANY + 14] == Mode.OFFLOAD).all()
        assert (found.modes[:, -14:] == Mode.RECOMPUTE).all()
        assert found.yields.tolist() == one.yields.tolist()
        assert found.lead.tolist() == [[2, 30], [0, 0]]
        assert len(found.reserve) == MANY
    assert same.shift.tolist() == one.shift.tolist()
    assert further.shift.tolist() == (4 * one.shift).tolist()


def test_what_a_stage_cannot_do_it_does_not_do():
    narrow = narrowed(many())
    one = policy(narrow, np.full(16, int(Mode.OFFLOAD)))
    wide = replace(many(), link_of=(None,) * MANY)
    assert all((found.modes == Mode.KEEP).all() for found in widened(one, narrow, wide))


@pytest.mark.parametrize("name", ["gis-h", "modulo-2"])
def test_a_widened_policy_gives_a_safe_schedule(name):
    wide = many()
    narrow = narrowed(wide)
    given = setting(wide, wish(wide, name), wide.microbatches, is_span=False)
    for one in widened(policy(narrow, np.full(16, int(Mode.OFFLOAD))), narrow, wide):
        x = machine(wide)
        reached = value(x, one, given, NEVER // 2)
        assert reached < NEVER
        timed = Schedule(wide, "widened", starts(x))
        assert timed.makespan == reached
        check(timed)


def search(wide, seed: int = 0, **changes):
    one = SearchedProblem(wide, LOOP, bounds.best(wide, "makespan").ticks)
    limits = Limits("makespan", 0.3, seed, 1, True)
    with LocalSearch([one], replace(limits, **changes)) as run:
        found = []
        while run.is_running:
            found += run.take(0.05)
        found += run.take(0.0)
    assert run.error is None
    best = min(found, key=lambda one: one.value)
    return best.wish, best.value, Realiser(one, is_span=False).schedule(best)


def test_a_search_on_many_devices_begins_with_the_wishes_that_are_best_on_fewer(monkeypatch):
    wide = many()
    screened = []
    screen = LocalSearch._screen
    monkeypatch.setattr(
        LocalSearch,
        "_screen",
        lambda self, number, name: screened.append(self.problems[number].devices) or screen(self, number, name),
    )
    first = search(wide)
    assert screened == sorted(screened), "all of fewer devices comes first"
    assert screened.count(MANY) == local_search.WISHES < screened.count(MANY // 4)
    check(first[2])
    again = search(wide)
    assert (first[:2], first[2].makespan) == (again[:2], again[2].makespan)
    clocked = search(wide, time_limit_s=2.0, reproducible=False)
    check(clocked[2])


def test_an_earlier_schedule_is_run_on_all_devices_whatever_is_best_on_fewer():
    wide = many()
    known = search(wide, time_limit_s=0.05)[2]
    start = Start.of(known.ticks, np.array([stage.backward_input for stage in wide.stages]))
    one = SearchedProblem(wide, LOOP, bounds.best(wide, "makespan").ticks, (start,))
    with LocalSearch([one], Limits("makespan", 0.05, 1, 1, True)) as run:
        run._thread.join()
    assert run.error is None
    assert "start 0" in {climber.best.wish for climber in run._begun}
    assert min(found.value for found in run.take(0.0)) <= known.makespan


def test_where_nothing_fits_on_fewer_devices_all_are_searched_at_once(monkeypatch):
    wide = many()
    nothing = replace(narrowed(wide), budget=(0,) * 8)
    monkeypatch.setattr(local_search, "narrowed", lambda one: nothing if one.devices == MANY else None)
    check(search(wide)[2])
