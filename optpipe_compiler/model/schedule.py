"""Planned schedules: tasks, the order of every lane, and start times. All planning passes these around."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


class Kind(IntEnum):
    """What a task does; the names are torch's letters, D and H the transfers to and from the host."""

    F = 0
    I = 1  # noqa: E741  (torch's letter)
    W = 2
    B = 3
    R = 4
    D = 5
    H = 6


class Mode(IntEnum):
    """What becomes of an activation between its forward and its backward."""

    KEEP = 0
    OFFLOAD = 1
    RECOMPUTE = 2


class Task(NamedTuple):
    """One op of one stage and microbatch."""

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Plan:
    """The order of every lane: `compute` per device, `d2h` and `h2d` per host link.

    `allocations` is the order, per device, in which tasks of compute and h2d take memory: where it is short, a later
    one waits for an earlier one. `host_limit` is the host memory that each device's offloads may hold (units).
    """

    compute: tuple[tuple[Task, ...], ...]
    d2h: tuple[tuple[Task, ...], ...]
    h2d: tuple[tuple[Task, ...], ...]
    allocations: tuple[tuple[Task, ...], ...]
    host_limit: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """A plan with start times in ticks of `problem`; `method` names who made it."""

    problem: Problem
    method: str
    starts: dict[Task, int]

    def end(self, task: Task) -> int:
        """Return the tick at which the task completes."""
        if task in self.alone:
            stage = self.problem.stages[task.stage]
            return self.starts[task] + (stage.offload_alone if task.kind is Kind.D else stage.reload_alone)
        return self.starts[task] + duration(self.problem, task)

    @cached_property
    def alone(self) -> frozenset[Task]:
        """The transfers that overlap none of the other direction of their link, and so take less time.

        The largest such set: all are assumed to be, and pairs that then overlap no longer are, until none do.
        """
        problem = self.problem
        lanes: dict[tuple[int | None, Kind], list[tuple[int, int, int, Task]]] = {}
        for task, start in self.starts.items():
            if task.kind in (Kind.D, Kind.H):
                stage = problem.stages[task.stage]
                short = stage.offload_alone if task.kind is Kind.D else stage.reload_alone
                lane = lanes.setdefault((problem.link_of[stage.device], task.kind), [])
                lane.append((start, start + short, start + duration(problem, task), task))
        found: set[Task] = set()
        for (link, kind), rows in lanes.items():
            found.update(row[3] for row in rows)
            if kind is Kind.H:
                found -= _meeting(sorted(lanes.get((link, Kind.D), ())), sorted(rows))
        return frozenset(found)

    @cached_property
    def makespan(self) -> int:
        """Last end minus first start."""
        return max(map(self.end, self.starts)) - min(self.starts.values())

    @cached_property
    def span(self) -> int:
        """The longest time from first start to last end on one device's compute lane."""
        return max(
            max(map(self.end, lane)) - min(self.starts[task] for task in lane) for lane in self.plan.compute if lane
        )

    @cached_property
    def bubble_fraction(self) -> float:
        """Compute-idle time / (devices x makespan)."""
        busy = sum(duration(self.problem, task) for lane in self.plan.compute for task in lane)
        return 1.0 - busy / (self.problem.devices * self.makespan) if self.makespan else 0.0

    @cached_property
    def sequence(self) -> list[Task]:
        """All tasks by start; at one moment what ends first (ops of no length), then by microbatch and data flow."""
        return sorted(self.starts, key=self._key)

    @cached_property
    def plan(self) -> Plan:
        """The order of every lane, read off the start times."""
        problem = self.problem
        compute: list[list[Task]] = [[] for _ in range(problem.devices)]
        allocations: list[list[Task]] = [[] for _ in range(problem.devices)]
        links = max((link for link in problem.link_of if link is not None), default=-1) + 1
        transfers: dict[Kind, list[list[Task]]] = {kind: [[] for _ in range(links)] for kind in (Kind.D, Kind.H)}
        for task in self.sequence:
            device = problem.stages[task.stage].device
            link = problem.link_of[device]
            if task.kind not in transfers:
                compute[device].append(task)
            elif link is not None:
                transfers[task.kind][link].append(task)
            if task.kind is not Kind.D:
                allocations[device].append(task)
        return Plan(
            tuple(map(tuple, compute)),
            tuple(map(tuple, transfers[Kind.D])),
            tuple(map(tuple, transfers[Kind.H])),
            tuple(map(tuple, allocations)),
            self.host_peaks,
        )

    @cached_property
    def host_peaks(self) -> tuple[int, ...]:
        """Most host memory that each device's offloads hold at one time (units)."""
        events: list[list[tuple[int, int]]] = [[] for _ in range(self.problem.devices)]
        for task in self.starts:
            stage = self.problem.stages[task.stage]
            if task.kind is Kind.D:
                events[stage.device].append((self.starts[task], stage.moved))
            elif task.kind is Kind.H:
                events[stage.device].append((self.end(task), -stage.moved))
        return tuple(_highest(rows) for rows in events)

    def count(self, kind: Kind) -> int:
        """Number of tasks of this kind."""
        return sum(task.kind is kind for task in self.starts)

    def _key(self, task: Task) -> tuple[int, int, int, int, int, Task]:
        depth = task.stage if task.kind is Kind.F else 2 * len(self.problem.stages) - task.stage
        return self.starts[task], self.end(task), task.microbatch, _PHASE[task.kind], depth, task


_PHASE = (0, 3, 4, 3, 2, 1, 1)


def _meeting(offloads: list[tuple[int, int, int, Task]], reloads: list[tuple[int, int, int, Task]]) -> set[Task]:
    """Return the transfers that overlap one of the other list, being as long as that makes them.

    Rows are (start, end alone, end while both directions are busy, task), serial and in order within a list.
    """
    met: set[Task] = set()
    grown = True
    while grown:
        grown = False
        first = second = 0
        while first < len(offloads) and second < len(reloads):
            one, other = offloads[first], reloads[second]
            one_end, other_end = (row[2] if row[3] in met else row[1] for row in (one, other))
            if one[0] < other_end and other[0] < one_end and not {one[3], other[3]} <= met:
                met |= {one[3], other[3]}
                grown = True
            if one_end <= other_end:
                first += 1
            else:
                second += 1
    return met


def _highest(events: list[tuple[int, int]]) -> int:
    """Return the largest running sum; at one moment decreases come first."""
    level = top = 0
    for _, change in sorted(events):
        level += change
        top = max(top, level)
    return top


def duration(problem: Problem, task: Task) -> int:
    """Return the task's length in ticks; a transfer's while the other direction of its link is busy."""
    stage = problem.stages[task.stage]
    return (
        stage.forward,
        stage.backward_input,
        stage.backward_weight,
        stage.backward,
        stage.recompute,
        stage.offload,
        stage.reload,
    )[task.kind]


def value(schedule: Schedule, objective: str) -> int:
    """Return what is minimised: `makespan`, or `span` as the zero-bubble papers do."""
    return schedule.makespan if objective == "makespan" else schedule.span
