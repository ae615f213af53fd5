"""What a schedule can do without it does without: no offload or recompute that its memory has room for."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.machine.orders import peaks
from optpipe_compiler.model import bounds
from optpipe_compiler.model.placement import Layout
from optpipe_compiler.model.schedule import Kind, Mode, Schedule
from optpipe_compiler.plan.budget import Budget, Limits
from optpipe_compiler.plan.incumbents import Attempt, Incumbents
from optpipe_compiler.plan.spare import spare, spared
from optpipe_compiler.verify import verify
from tests.instances import problem
from tests.machines import dispatched
from tests.plans import check, serial

AWAY = (Kind.D, Kind.H, Kind.R)


def away(schedule: Schedule) -> int:
    return sum(map(schedule.count, AWAY))


@pytest.mark.parametrize("mode", [Mode.OFFLOAD, Mode.RECOMPUTE])
def test_with_room_for_all_nothing_goes_away(mode):
    one = serial(problem(2, 3, 100), split=True, mode=lambda stage, microbatch: mode)
    assert away(one) > 0
    less = spared(one, one.problem.budget)
    assert away(less) == 0
    again = spared(Schedule(one.problem, less.method, one.starts), one.problem.budget)
    assert again.method == less.method  # said once, however often
    assert less.starts == {task: start for task, start in one.starts.items() if task.kind not in AWAY}


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_keeps_to_the_caps_and_can_spare_no_more(seed):
    rng = Random(seed)
    tight = problem(rng.choice([2, 3]), 4, rng.randint(6, 14), per_device=rng.choice([1, 2]))
    moved = [one for one in dispatched(tight) if away(one)]
    for one in moved:
        room = tuple(budget + rng.randint(0, 6) for budget in tight.budget)
        less = spared(one, room)
        check(Schedule(replace(tight, budget=room), less.method, less.starts))
        assert less.makespan <= one.makespan
        assert all(peak <= cap for peak, cap in zip(peaks(less), room, strict=True))
        assert spared(less, room) is less


def test_a_compiled_schedule_with_all_the_memory_there_is_moves_nothing():
    profile = uniform_profile(UniformOptions(devices=4))
    options = Options(mem_bytes=10**14, microbatches=8, time_limit_s=4)
    schedule = compile_schedule(profile, options).schedule
    assert not verify(schedule, profile)
    assert all(not device.d2h and not device.h2d for device in schedule.devices)
    assert all(op.name != "recompute" for device in schedule.devices for op in device.compute)


def test_plans_nearly_as_good_as_the_best_keep_what_there_is_room_for_too():
    one = problem(2, 3, 100)
    best, near = (serial(one, split=split, mode=lambda *_: Mode.OFFLOAD) for split in (False, True))
    attempt = Attempt(
        Layout("linear", (0, 1, 2), (0, 1)), one, bounds.best(one, "makespan"), (0, 0), lambda _: ([], [])
    )
    incumbents = Incumbents([attempt], "makespan", lambda _: None)
    assert incumbents.keep(attempt, best, "tried") is None
    attempt.near.append(near)
    spare(incumbents, Budget(Limits("makespan", 1.0, 0, 1, reproducible=True), one.tasks, begin=0.0))
    assert away(attempt.best) == 0
    assert [away(timed) for timed in attempt.near] == [0, 0]
    shorter = min(dispatched(one), key=lambda timed: timed.makespan)
    assert incumbents.spare(attempt, attempt.near[1], shorter) is None
    assert attempt.best is shorter


def test_a_published_schedule_asked_for_by_name_keeps_its_offloads():
    profile = uniform_profile(UniformOptions(devices=4))
    schedule = compile_schedule(profile, Options(mem_bytes=10**14, microbatches=8, method="po-f")).schedule
    assert schedule.forecast.method == "po-f"
    assert any(device.d2h for device in schedule.devices)
