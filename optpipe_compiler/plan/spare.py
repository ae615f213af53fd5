"""Leave out the offloads and recomputes that a schedule can do without.

Candidates move or drop activations by a fixed pattern, and a search takes what is no slower, needed or not. An
activation that has room to stay is kept: nothing gets later by it, the host link and the compute lane get freer, and
the file gets shorter.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING

from optpipe_compiler import machine
from optpipe_compiler.model.schedule import Kind, Schedule, Stuck, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.model.problem import Stage
    from optpipe_compiler.plan.budget import Budget
    from optpipe_compiler.plan.incumbents import Attempt, Incumbents

ROUNDS = 4
"""Tries, each with less room than the one before, until nothing is over its cap."""
_Away = tuple[int, Task, int, list[Task]]
"""An activation that leaves its device: when, the task that brings it back, its units, and the tasks that do it all."""


def spare(incumbents: Incumbents, budget: Budget) -> None:
    """Keep the activations of the best schedules for which there is room; the answer is chosen among these."""
    for number, (attempt, timed) in enumerate(incumbents.near()):
        if number and budget.is_over():
            return
        _spare(incumbents, attempt, timed, budget)


def _spare(incumbents: Incumbents, attempt: Attempt, timed: Schedule, budget: Budget) -> None:
    room = list(attempt.problem.budget)
    for number in range(ROUNDS):
        if number and budget.is_over():
            return
        less = spared(timed, room)
        if less is timed:
            return
        with suppress(Stuck):
            less = min(machine.orders.retime(less, attempt.problem), less, key=incumbents.cost)
        over = incumbents.spare(attempt, timed, less)
        if over is None:
            return
        room = [size - excess for size, excess in zip(room, over, strict=True)]


def spared(schedule: Schedule, budget: Sequence[int]) -> Schedule:
    """Return `schedule` without the offloads and recomputes for which its devices have room.

    `budget` is in units, by device. No other task moves. Those away for the shortest time come first, so that as many
    as possible can stay.
    """
    starts, levels = dict(schedule.starts), machine.orders.held(schedule).levels
    owned: list[list[int]] = [[] for _ in budget]
    """By device where its tasks are in the sequence, without offloads."""
    away: list[list[_Away]] = [[] for _ in budget]
    for number, task in enumerate(schedule.sequence):
        stage = schedule.problem.at(task.stage, task.microbatch)
        if task.kind is not Kind.D:
            owned[stage.device].append(number)
        if (gone := _away(schedule, task, stage)) is not None:
            away[stage.device].append(gone)
    for device, mine in enumerate(owned):
        tasks = [schedule.sequence[number] for number in mine]
        place = {task: index for index, task in enumerate(tasks)}
        ticks = [starts[task] for task in tasks]
        units_held = levels[mine]
        for since, back, units, needless in sorted(
            away[device], key=lambda one: (schedule.starts[one[1]] - one[0], one)
        ):
            within = units_held[bisect_left(ticks, since) : place[back]]
            if within.size == 0 or within.max() + units <= budget[device]:
                within += units
                for task in needless:
                    del starts[task]
    if len(starts) == len(schedule.starts):
        return schedule
    return Schedule(schedule.problem, f"{schedule.method.removesuffix('-spared')}-spared", starts)


def _away(schedule: Schedule, task: Task, stage: Stage) -> _Away | None:
    """Return the activation that is not there, or not whole, between forward and backward for the sake of a task."""
    if task.kind is Kind.D:
        reload = Task(Kind.H, task.stage, task.microbatch)
        return schedule.end(task), reload, stage.moved, [task, reload]
    if task.kind is Kind.R:
        forward = Task(Kind.F, task.stage, task.microbatch)
        return schedule.end(forward), task, stage.saved - stage.checkpoint, [task]
    return None
