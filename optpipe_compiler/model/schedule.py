"""Planned schedules: tasks, the order of every lane, and start times. All planning passes these around."""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe_compiler.documents.ops import LETTERS
from optpipe_compiler.model.problem import DURATIONS, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping


Ints = NDArray[np.int64]
NONE = -1


class Stuck(Exception):
    """An order cannot be executed: it waits for itself, or for memory that is never freed."""


class Kind(IntEnum):
    """What a task does; the names are torch's letters, D and H the transfers to and from the host."""

    F = 0
    I = 1  # noqa: E741  (torch's letter)
    W = 2
    B = 3
    R = 4
    D = 5
    H = 6


KINDS = {name: Kind[letter] for name, letter in LETTERS.items()}
"""By their names in files."""


class Mode(IntEnum):
    """What becomes of an activation between its forward and its backward."""

    KEEP = 0
    OFFLOAD = 1
    RECOMPUTE = 2


class Task(NamedTuple):
    """One op of one stage and microbatch, or unit (Problem) where microbatches are cut."""

    kind: Kind
    stage: int
    microbatch: int


class Columns(NamedTuple):
    """The tasks of a schedule as arrays, sorted as tasks; times in ticks."""

    kind: Ints
    stage: Ints
    microbatch: Ints
    start: Ints
    end: Ints

    def tasks(self) -> list[Task]:
        """Return them one by one."""
        kinds = list(Kind)
        rows = zip(self.kind.tolist(), self.stage.tolist(), self.microbatch.tolist(), strict=True)
        return [Task(kinds[k], s, m) for k, s, m in rows]


class Schedule:
    """Orders with start times in ticks of `problem`; `method` names who made it.

    The times are `ticks` [kind, stage, microbatch], NONE where there is no such task; `starts` are the same by task.
    """

    def __init__(self, problem: Problem, method: str, starts: Mapping[Task, int] | Ints) -> None:
        self.problem = problem
        self.method = method
        if isinstance(starts, np.ndarray):
            self.ticks = starts
        else:
            shape = len(Kind), len(problem.stages), problem.microbatches
            self.ticks = np.full(shape, NONE, np.int64)
            tasks = np.fromiter(chain.from_iterable(starts), np.int64, 3 * len(starts)).reshape(-1, 3)
            self.ticks[tasks[:, 0], tasks[:, 1], tasks[:, 2]] = np.fromiter(starts.values(), np.int64, len(starts))

    @cached_property
    def starts(self) -> dict[Task, int]:
        """The start of every task."""
        return dict(zip(self.columns.tasks(), self.columns.start.tolist(), strict=True))

    def end(self, task: Task) -> int:
        """Return the tick at which the task completes."""
        return int(self._ends[task])

    def is_alone(self, transfer: Task) -> bool:
        """Whether the transfer overlaps none of the other direction of its link, and so takes less time."""
        taken = self.end(transfer) - int(self.ticks[transfer])
        number = self.problem.class_of(transfer.microbatch)
        return bool(taken == alone_lengths(self.problem)[transfer.kind, transfer.stage, number])

    @cached_property
    def _ends(self) -> Ints:
        """[kind, stage, microbatch] when each task completes; of no meaning where there is none."""
        ends = np.empty_like(self.ticks)
        ends[self.columns.kind, self.columns.stage, self.columns.microbatch] = self.columns.end
        return ends

    @cached_property
    def columns(self) -> Columns:
        """All tasks as arrays."""
        kind, stage, microbatch = np.nonzero(self.ticks != NONE)
        start = self.ticks[kind, stage, microbatch]
        return Columns(kind, stage, microbatch, start, _ends(self.problem, kind, stage, microbatch, start))

    @cached_property
    def device(self) -> Ints:
        """The device of each task of `columns`."""
        return np.array(self.problem.device_of)[self.columns.stage]

    @cached_property
    def makespan(self) -> int:
        """Last end minus first start."""
        return int(self.columns.end.max() - self.columns.start.min())

    @cached_property
    def span(self) -> int:
        """The longest time from first start to last end on one device's compute lane."""
        columns = self.columns
        lanes = [(columns.kind < Kind.D) & (self.device == d) for d in range(self.problem.devices)]
        return max(int(columns.end[lane].max() - columns.start[lane].min()) for lane in lanes if lane.any())

    @cached_property
    def has_copied(self) -> bool:
        """Whether compute idles for what copies take from it, behind forwards and before backwards: see `Stage`."""
        busy = figures(self.problem, "offload_busy"), figures(self.problem, "reload_busy")
        if not np.any(busy):
            return True
        columns = self.columns
        rows = self.rows[columns.kind[self.rows] < Kind.D]
        kind, stage, microbatch = columns.kind[rows], columns.stage[rows], columns.microbatch[rows]
        is_offloaded = self.ticks[Kind.D, stage, microbatch] != NONE
        away, back = (one[stage, classes(self.problem)[microbatch]] * is_offloaded for one in busy)
        behind = columns.end[rows] + away * (kind == Kind.F)
        before = columns.start[rows] - back * ((kind == Kind.I) | (kind == Kind.B))
        lanes = [self.device[rows] == d for d in range(self.problem.devices)]
        return all(bool((behind[lane][:-1] <= before[lane][1:]).all()) for lane in lanes)

    @cached_property
    def has_links_in_turn(self) -> bool:
        """Whether the transfers of one direction of a host link follow each other, over all devices behind it."""
        columns = self.columns
        rows = np.flatnonzero(columns.kind >= Kind.D)
        kind, start, end = columns.kind[rows], columns.start[rows], columns.end[rows]
        link = stage_links(self.problem)[columns.stage[rows]]
        by_link = np.lexsort((end, start, kind, link))
        is_next = (np.diff(link[by_link]) == 0) & (np.diff(kind[by_link]) == 0)
        return bool((end[by_link][:-1] <= start[by_link][1:])[is_next].all())

    @cached_property
    def bubble_fraction(self) -> float:
        """Compute-idle time / (devices x makespan)."""
        return 1.0 - sum(self.computed) / (self.problem.devices * self.makespan) if self.makespan else 0.0

    @cached_property
    def computed(self) -> list[int]:
        """Ticks that each device computes."""
        columns, computed = self.columns, np.zeros(self.problem.devices, np.int64)
        np.add.at(computed, self.device, (columns.end - columns.start) * (columns.kind < Kind.D))
        found: list[int] = computed.tolist()
        return found

    @cached_property
    def sequence(self) -> list[Task]:
        """All tasks by start; at one moment what ends first (ops of no length), then by microbatch and data flow.

        Slices of a microbatch ascend in forwards and offloads, and descend on the way back.
        """
        tasks = self.columns.tasks()
        return [tasks[row] for row in self.rows.tolist()]

    @cached_property
    def rows(self) -> Ints:
        """The place in `columns` of each task of `sequence`."""
        kind, stage, microbatch, start, end = self.columns
        depth = np.where(kind == Kind.F, stage, 2 * len(self.problem.stages) - stage)
        whole, slice = np.divmod(microbatch, self.problem.slices)
        turn = np.where(_THERE[kind], slice, -slice)
        return np.lexsort((stage, kind, depth, turn, _PHASE[kind], whole, end, start))

    @cached_property
    def compute_lanes(self) -> list[list[Task]]:
        """The tasks of each device's compute lane, in order."""
        lanes: list[list[Task]] = [[] for _ in range(self.problem.devices)]
        for task in self.sequence:
            if task.kind < Kind.D:
                lanes[self.problem.stages[task.stage].device].append(task)
        return lanes

    @cached_property
    def host_peaks(self) -> tuple[int, ...]:
        """Most host memory that each device's offloads hold at one time (units)."""
        kind, stage, microbatch, start, end = self.columns
        moved = figures(self.problem, "moved")[stage, classes(self.problem)[microbatch]]
        away, back = kind == Kind.D, kind == Kind.H
        times = np.concatenate([start[away], end[back]])
        sizes = np.concatenate([moved[away], -moved[back]])
        owners = np.concatenate([self.device[away], self.device[back]])
        peaks = []
        for d in range(self.problem.devices):
            mine = owners == d
            order = np.lexsort((sizes[mine], times[mine]))  # at one moment decreases come first
            peaks.append(int(np.cumsum(sizes[mine][order]).max(initial=0)))
        return tuple(peaks)

    @cached_property
    def steady(self) -> int:
        """Ticks that one more microbatch takes: the busiest lane's for one, recomputes and transfers included, or,
        where memory lets no lane be busy all the time, what devices take from one microbatch's end to the next one's in
        the first half, before it drains.
        """
        kind, stage, unit, start, end = self.columns
        device, whole, is_compute = self.device, unit // self.problem.slices, kind < Kind.D
        count = self.problem.whole
        on_link = self.problem.devices + 2 * stage_links(self.problem)[stage] + (kind == Kind.H)
        lane = np.where(is_compute, device, on_link)
        busiest = int(np.bincount(lane, end - start).max())
        ended = np.zeros((self.problem.devices, count), np.int64)
        np.maximum.at(ended, (device[is_compute], whole[is_compute]), end[is_compute])
        half = count // 2
        apart = int((ended[:, half] - ended[:, 0]).max())
        return max(busiest // count, apart // max(1, half))

    def count(self, kind: Kind) -> int:
        """Number of tasks of this kind."""
        return int((self.ticks[kind] != NONE).sum())


_PHASE = np.array([0, 3, 4, 3, 2, 1, 1])
"""By kind: what comes first of one microbatch at one moment."""
_THERE = np.array([kind in (Kind.F, Kind.D) for kind in Kind])
"""By kind: whether slices of a microbatch ascend."""


def _ends(problem: Problem, kind: Ints, stage: Ints, microbatch: Ints, start: Ints) -> Ints:
    """Return when tasks complete: those of compute, and transfers that may meet one of the other direction.

    As few meet as can be: all transfers are taken to be alone; pairs that then overlap no longer are, until none do.
    """
    number = classes(problem)[microbatch]
    longest = start + lengths(problem)[kind, stage, number]
    end = start + alone_lengths(problem)[kind, stage, number]
    rows = np.nonzero(end < longest)[0]
    link = stage_links(problem)[stage]
    for one in np.unique(link[rows]):
        here = np.nonzero((kind >= Kind.D) & (link == one))[0]
        here = here[np.argsort(start[here], kind="stable")]
        away, back = here[kind[here] == Kind.D], here[kind[here] == Kind.H]
        grown = True
        while grown:
            grown = False
            for mine, other in ((away, back), (back, away)):
                first = np.searchsorted(end[other], start[mine], side="right")
                beyond = np.searchsorted(start[other], end[mine], side="left")
                meets = mine[(first < beyond) & (end[mine] < longest[mine])]
                end[meets] = longest[meets]
                grown = grown or len(meets) > 0
    return end


@lru_cache(maxsize=64)
def lengths(problem: Problem) -> Ints:
    """Return the lengths of tasks in ticks as an array [kind, stage, class of units], not to be written to."""
    return np.array([figures(problem, DURATIONS[kind]) for kind in Kind])


def figures(problem: Problem, name: str) -> Ints:
    """Return a figure of all stages as an array [stage, class of units]."""
    return np.array([[getattr(stage, name) for stage in stages] for stages in problem.by_class]).T


@lru_cache(maxsize=64)
def classes(problem: Problem) -> Ints:
    """Return `Problem.class_of` by unit, not to be written to."""
    return np.array([problem.class_of(unit) for unit in range(problem.microbatches)], dtype=np.int64)


def stage_links(problem: Problem) -> Ints:
    """Return the host link of each stage's device, NONE where it has none."""
    return np.array([NONE if link is None else link for link in problem.link_of])[list(problem.device_of)]


@lru_cache(maxsize=64)
def alone_lengths(problem: Problem) -> Ints:
    """Return `lengths` with transfers as they are while the other direction of their link is idle."""
    short = lengths(problem).copy()
    short[Kind.D], short[Kind.H] = figures(problem, "offload_alone"), figures(problem, "reload_alone")
    return short


def duration(problem: Problem, task: Task) -> int:
    """Return the task's length in ticks; a transfer's while the other direction of its link is busy."""
    length: int = getattr(problem.at(task.stage, task.microbatch), DURATIONS[task.kind])
    return length


def value(schedule: Schedule, objective: str) -> int:
    """Return what is minimised: `makespan`, or `span` as the zero-bubble papers do."""
    return schedule.makespan if objective == "makespan" else schedule.span
