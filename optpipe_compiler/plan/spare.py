"""Leave out the offloads and recomputes that a schedule can do without.

Candidates move or drop activations by a fixed pattern, and a search takes what is no slower, needed or not. An
activation that has room to stay is kept: nothing gets later by it, the host link and the compute lane get freer, and
the file gets shorter.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler.model.schedule import Kind, Schedule, Task
from optpipe_compiler.model.simulate import memory_curve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_Away = tuple[int, Task, int, list[Task]]
"""An activation that leaves its device: when, the task that brings it back, its units, and the tasks that do it all."""


def spared(schedule: Schedule, budget: Sequence[int]) -> Schedule:
    """Return `schedule` without the offloads and recomputes for which its devices have room (`budget` in units).

    No other task moves. Those away for the shortest time come first, so that as many as possible can stay.
    """
    starts = dict(schedule.starts)
    for device in range(schedule.problem.devices):
        tasks = [task for task in schedule.sequence if schedule.problem.stages[task.stage].device == device]
        place = {task: index for index, task in enumerate(tasks)}
        ticks = [starts[task] for task in tasks]
        held = np.array([units for _, units in memory_curve(schedule, device)])
        for gone, back, units, needless in sorted(
            _away(schedule, tasks), key=lambda away: (schedule.starts[away[1]] - away[0], away)
        ):
            within = held[bisect_left(ticks, gone) : place[back]]
            if within.size == 0 or within.max() + units <= budget[device]:
                within += units
                for task in needless:
                    del starts[task]
    if len(starts) == len(schedule.starts):
        return schedule
    return Schedule(schedule.problem, f"{schedule.method}-spared", starts)


def _away(schedule: Schedule, tasks: Iterable[Task]) -> Iterator[_Away]:
    """Yield the activations that are not on their device, or not whole, between two of `tasks`."""
    for task in tasks:
        stage = schedule.problem.stages[task.stage]
        if task.kind is Kind.D:
            reload = Task(Kind.H, task.stage, task.microbatch)
            yield schedule.end(task), reload, stage.moved, [task, reload]
        elif task.kind is Kind.R:
            forward = Task(Kind.F, task.stage, task.microbatch)
            yield schedule.end(forward), task, stage.saved - stage.checkpoint, [task]
