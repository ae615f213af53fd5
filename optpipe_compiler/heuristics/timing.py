"""Earliest times of a published schedule without memory limits, and when its transfers run.

Without limits the earliest times are longest paths, found in one pass over the lanes: ten times faster than `simulate`,
with the same result (a test compares them). Transfers follow PipeOffload (arXiv:2503.01328 section 3): an activation
leaves as soon as its forward is done and comes back as late as its backward allows, first come first served per link.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

from optpipe_compiler.schedule import Kind, Task, duration
from optpipe_compiler.simulate import Stuck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe_compiler.heuristics.common import Order, Recipe
    from optpipe_compiler.problem import Problem

BACKWARDS = (Kind.I, Kind.B)

ROUND_TRIPS = 3
"""An activation that stays for less than so many transfers there and back is kept, as in the authors' generator."""


def timed(problem: Problem, recipe: Recipe) -> dict[Task, int]:
    """Return the earliest start of every task; raises Stuck when the order waits for itself."""
    starts = _Lanes(problem, recipe.compute).run()
    if not recipe.offloaded:
        return starts
    return _Transfers(problem, recipe, starts).run()


class _Lanes:
    """The longest-path pass: every lane goes on until its next task waits for one that has no time yet."""

    def __init__(
        self,
        problem: Problem,
        compute: Sequence[Sequence[Task]],
        transfers: Sequence[Sequence[Task]] = (),
        gates: dict[Task, Task] | None = None,
        releases: dict[Task, int] | None = None,
    ) -> None:
        self.problem = problem
        self.lanes = [*compute, *transfers]
        self.gates = gates or {}
        self.releases = releases or {}
        self.starts: dict[Task, int] = {}
        self.ends: dict[Task, int] = {}
        self.fused = {(t.stage, t.microbatch) for lane in compute for t in lane if t.kind is Kind.B}
        self.reloaded = {(t.stage, t.microbatch) for lane in transfers for t in lane if t.kind is Kind.H}
        self.waiting: dict[Task, list[int]] = {}

    def run(self) -> dict[Task, int]:
        """Return the starts of all tasks."""
        positions, free = [0] * len(self.lanes), [0] * len(self.lanes)
        ready = list(range(len(self.lanes)))
        while ready:
            lane = ready.pop()
            tasks, position, clock = self.lanes[lane], positions[lane], free[lane]
            while position < len(tasks):
                task = tasks[position]
                start = self._ready(task, lane)
                if start is None:
                    break
                clock = max(clock, start)
                self.starts[task] = clock
                clock += duration(self.problem, task)
                self.ends[task] = clock
                position += 1
                ready += self.waiting.pop(task, ())
            positions[lane], free[lane] = position, clock
        total = sum(map(len, self.lanes))
        if len(self.starts) != total:
            raise Stuck(f"{total - len(self.starts)} of {total} tasks never start")
        return self.starts

    def _ready(self, task: Task, lane: int) -> int | None:
        """Return when what `task` needs from other lanes is there; None, and note who waits, if that is not known."""
        latest = self.releases.get(task, 0)
        for before, lag in self._needs(task):
            end = self.ends.get(before)
            if end is None:
                self.waiting.setdefault(before, []).append(lane)
                return None
            latest = max(latest, end + lag)
        if task in self.gates:
            gate = self.starts.get(self.gates[task])
            if gate is None:
                self.waiting.setdefault(self.gates[task], []).append(lane)
                return None
            latest = max(latest, gate)
        return latest

    def _needs(self, task: Task) -> list[tuple[Task, int]]:
        kind, stage, microbatch = task
        stages = self.problem.stages
        if kind is Kind.F:
            return [(Task(Kind.F, stage - 1, microbatch), stages[stage - 1].send_activation)] if stage else []
        if kind is Kind.W:
            return [(Task(Kind.I, stage, microbatch), 0)]
        if kind is Kind.H:
            return [(Task(Kind.D, stage, microbatch), 0)]
        needs = [(Task(Kind.F, stage, microbatch), 0)]
        if kind in BACKWARDS:
            if stage + 1 < len(stages):
                after = Kind.B if (stage + 1, microbatch) in self.fused else Kind.I
                needs.append((Task(after, stage + 1, microbatch), stages[stage + 1].send_gradient))
            if (stage, microbatch) in self.reloaded:
                needs.append((Task(Kind.H, stage, microbatch), 0))
        return needs


class _Transfers:
    """Places the transfers of a recipe whose compute tasks would run at `starts` if nothing were offloaded."""

    def __init__(self, problem: Problem, recipe: Recipe, starts: dict[Task, int]) -> None:
        self.problem = problem
        self.compute = recipe.compute
        self.starts = postponed(problem, recipe.compute, starts)
        self.backward = {(t.stage, t.microbatch): t for order in recipe.compute for t in order if t.kind in BACKWARDS}
        self.links = max((link for link in problem.link_of if link is not None), default=-1) + 1
        self.offloaded = [key for key in sorted(recipe.offloaded) if self._worth_it(key)]

    def run(self) -> dict[Task, int]:
        """Return the starts of all tasks, with the delays that the transfers cause."""
        offloads = self._by_link(Kind.D, lambda key: (self._done(Task(Kind.F, *key)), key[0], key[1]))
        reloads = self._by_link(Kind.H, lambda key: (self.starts[self.backward[key]], -key[0], key[1]))
        releases = {task: start for task, start in self.starts.items() if task.kind is Kind.F}
        return _Lanes(self.problem, self.compute, [*offloads, *reloads], self._gates(reloads), releases).run()

    def _done(self, task: Task) -> int:
        return self.starts[task] + duration(self.problem, task)

    def _worth_it(self, key: tuple[int, int]) -> bool:
        """Whether the activation stays so long between forward and backward that it can visit the host."""
        stage, backward = self.problem.stages[key[0]], self.backward[key]
        stay = self.starts[backward] - self._done(Task(Kind.F, *key))
        return stay - duration(self.problem, backward) > ROUND_TRIPS * (stage.offload + stage.reload)

    def _by_link(self, kind: Kind, rank: Callable[[tuple[int, int]], tuple[int, int, int]]) -> list[list[Task]]:
        lanes: list[list[Task]] = [[] for _ in range(self.links)]
        for key in sorted(self.offloaded, key=rank):
            link = self.problem.link_of[self.problem.stages[key[0]].device]
            assert link is not None
            lanes[link].append(Task(kind, *key))
        return lanes

    def _gates(self, reloads: list[list[Task]]) -> dict[Task, Task]:
        """Return for each reload the compute task with which it may start: the last one that leaves enough time.

        Enough for it and for the later reloads of its link, each being there when its backward would have started.
        """
        latest = self._latest_starts(reloads)
        position = {task: number for order in self.compute for number, task in enumerate(order)}
        gates = {}
        for task, time in latest.items():
            order = self.compute[self.problem.stages[task.stage].device]
            number = bisect_right(order, time, key=lambda t: self.starts[t])
            number = min(number, position[self.backward[task.stage, task.microbatch]])
            gates[task] = order[max(0, number - 1)]
        return gates

    def _latest_starts(self, reloads: list[list[Task]]) -> dict[Task, int]:
        latest: dict[Task, int] = {}
        for lane in reloads:
            end: int | None = None
            for task in reversed(lane):
                due = self.starts[self.backward[task.stage, task.microbatch]]
                end = due if end is None else min(due, end)
                end = latest[task] = end - duration(self.problem, task)
        return latest


def postponed(problem: Problem, compute: Order, starts: dict[Task, int]) -> dict[Task, int]:
    """Return `starts` with the forwards before a device's first backward as late as they can be without delaying others.

    An activation that is not needed yet need not take memory yet (arXiv:2503.01328, the authors' generator).
    """
    latest = dict(starts)
    for task, following in sorted(_warm_up(compute), key=lambda pair: starts[pair[0]], reverse=True):
        end = latest[following]
        if task.stage + 1 < len(problem.stages):
            after = latest[task._replace(stage=task.stage + 1)]
            end = min(end, after - problem.stages[task.stage].send_activation)
        latest[task] = max(starts[task], end - duration(problem, task))
    return latest


def _warm_up(compute: Order) -> Iterator[tuple[Task, Task]]:
    """Yield each forward before the first other task of its device, with the task after it."""
    for order in compute:
        for task, following in pairwise(order):
            if task.kind is not Kind.F:
                break
            yield task, following
