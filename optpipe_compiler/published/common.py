"""What the published schedules share: the record they return, what they demand of an instance, numbered steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe_compiler.model.placement import stage_devices
from optpipe_compiler.model.schedule import Ints, Kind, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optpipe_compiler.model.problem import Problem

Bools = NDArray[np.bool_]
Order = list[Ints]
"""The compute order of every device: a row (kind, stage, microbatch) for each task."""
Tasks = list[list[Task]]
"""The same as tasks, in which orders are written down."""


class NotDefined(Exception):
    """The published schedule is not defined for this instance; the text says why."""


@dataclass(frozen=True)
class Recipe:
    """A published schedule before it is timed: who computes what in which order, and what visits the host."""

    compute: Order
    offloaded: Bools | None = None
    """[stage, microbatch] whether the activation may be offloaded and reloaded; None: none."""
    streaming: bool = False
    """Whether all of these are offloaded, as hooks do, and not only those that stay long enough."""

    def tasks(self) -> Tasks:
        """Return the compute orders as tasks."""
        kinds = list(Kind)
        return [[Task(kinds[kind], s, m) for kind, s, m in order.tolist()] for order in self.compute]


def rows(tasks: Iterable[Task]) -> Ints:
    """Return tasks as rows of kind, stage, microbatch, not to be written to."""
    found = np.fromiter(chain.from_iterable(tasks), np.int64).reshape(-1, 3)
    found.flags.writeable = False
    return found


class Shape(NamedTuple):
    """The placements that an order is defined for."""

    placement: str
    has: Callable[[int], bool]
    """Whether they may have so many stages per device."""
    says: str


LINEAR = Shape("linear", lambda count: count == 1, "one stage per device")
LOOP = Shape("loop", lambda count: count >= 2, "a loop of at least two stages per device")
V = Shape("v", lambda count: count == 2, "a V of two stages per device")
WAVES = Shape("v", lambda count: count >= 2 and count % 2 == 0, "waves of two stages per device each")


def ordered(
    name: str, shape: Shape, *, splits: bool = False
) -> Callable[[Callable[[Problem], Tasks]], Callable[[Problem], Order]]:
    """Let a schedule return rows, remember its last order, and refuse instances that it is not defined for.

    `splits`: whether it needs split backwards. Compositions ask for one order many times in a row, and tasks are slow
    to make.
    """

    def decorated(schedule: Callable[[Problem], Tasks]) -> Callable[[Problem], Order]:
        last: list[tuple[Problem, Order]] = []

        @wraps(schedule)
        def order(problem: Problem) -> Order:
            count = problem.per_device
            if not shape.has(count) or problem.device_of != stage_devices(shape.placement, problem.devices, count):
                raise NotDefined(f"{name} is defined for {shape.says}, which placement this is not")
            if splits and not problem.freedom.split:
                raise NotDefined(f"{name} splits the backward, which --no-split forbids")
            if not last or last[0][0] != problem:
                last[:] = [(problem, [rows(tasks) for tasks in schedule(problem)])]
            return last[0][1]

        return order

    return decorated


def of_stages(problem: Problem, stages: Iterable[int]) -> Bools:
    """Return as [stage, microbatch] which activations are those of `stages`."""
    found = np.zeros((len(problem.stages), problem.microbatches), np.bool_)
    found[list(stages)] = True
    return found


def numbered(steps: Iterable[tuple[Kind, int]], microbatches: int) -> list[Task]:
    """Return `steps` as tasks, the microbatches of each (kind, stage) in order, and leave out those that do not exist.

    B and I of a stage count together, and so do B and W.
    """
    seen = Counter[tuple[Kind, int]]()
    order = []
    for kind, stage in steps:
        counters = (Kind.I, Kind.W) if kind is Kind.B else (kind,)
        number = seen[counters[0], stage]
        seen.update((counter, stage) for counter in counters)
        if number < microbatches:
            order.append(Task(kind, stage, number))
    return order
