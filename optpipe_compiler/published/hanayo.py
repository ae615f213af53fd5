"""Hanayo (Liu et al., 2023, arXiv:2308.15762 section 3): wave-shaped pipelines.

With W waves a device owns 2W stages and a microbatch goes down and up the devices W times. The paper gives the orders
as drawings for P microbatches. This file runs one rule on the drawings' costs (B = 2F, no p2p time), for any number of
microbatches: a device prefers a backward to a forward and the forward that is furthest to one behind, and a microbatch
enters once the first device is sure never to hold more than P of them.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind, Task
from optpipe_compiler.published.common import WAVES, Tasks, ordered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.model.problem import Problem


@ordered("hanayo", WAVES)
def hanayo(problem: Problem) -> Tasks:
    """Return the order; peak P microbatches, and the more waves, the smaller the bubble."""
    return _Waves(problem).run()


class _Waves:
    """Runs the rule in time."""

    def __init__(self, problem: Problem) -> None:
        self.owner = problem.device_of
        self.count = problem.microbatches
        self.orders: Tasks = [[] for _ in range(problem.devices)]
        self.per_device = problem.per_device
        self.ready: list[list[tuple[bool, int, int, Task]]] = [[] for _ in range(problem.devices)]
        self.entered = 0
        self.room = problem.devices * self.per_device
        """Stage activations that the first device may still promise to those who enter."""
        for task in self._enter():
            self._offer(task)

    def run(self) -> Tasks:
        running: list[tuple[int, int, Task]] = []
        idle, now = set(range(len(self.orders))), 0
        while True:
            for device in sorted(idle):
                if self.ready[device]:
                    task = heapq.heappop(self.ready[device])[-1]
                    self.orders[device].append(task)
                    heapq.heappush(running, (now + (1 if task.kind is Kind.F else 2), device, task))
                    idle.remove(device)
            if not running:
                return self.orders
            now = running[0][0]
            while running and running[0][0] == now:
                _, device, task = heapq.heappop(running)
                idle.add(device)
                for following in self._followers(task):
                    self._offer(following)

    def _followers(self, task: Task) -> Iterator[Task]:
        """Yield what `task` makes ready."""
        kind, stage, microbatch = task
        if kind is Kind.F:
            last = stage + 1 == len(self.owner)
            yield Task(Kind.B, stage, microbatch) if last else Task(Kind.F, stage + 1, microbatch)
            return
        if stage > 0:
            yield Task(Kind.B, stage - 1, microbatch)
        if self.owner[stage] == 0:
            self.room += 1
            yield from self._enter()

    def _enter(self) -> Iterator[Task]:
        while self.entered < self.count and self.room >= self.per_device:
            self.room -= self.per_device
            self.entered += 1
            yield Task(Kind.F, 0, self.entered - 1)

    def _offer(self, task: Task) -> None:
        forward = task.kind is Kind.F
        rank = -task.stage if forward else task.microbatch
        heapq.heappush(self.ready[self.owner[task.stage]], (forward, rank, task.microbatch, task))
