"""Earliest times of a published order without memory limits.

They are longest paths, found in one pass over the lanes: several times faster than `simulate`, which must look for free
memory at every moment, and with the same result (a test compares them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind, Task, duration
from optpipe_compiler.model.simulate import Stuck

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.model.problem import Problem

BACKWARDS = (Kind.I, Kind.B)


class Lanes:
    """The longest-path pass: every lane goes on until its next task waits for one that has no time yet.

    A task with a gate starts no earlier than that other task, one with a release no earlier than that tick.
    """

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
