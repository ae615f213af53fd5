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
    from optpipe_compiler.model.problem import Problem


@ordered("hanayo", WAVES)
def hanayo(problem: Problem) -> Tasks:
    """Return the order; peak P microbatches, and the more waves, the smaller the bubble."""
    last, per_device = len(problem.stages) - 1, problem.per_device
    orders: Tasks = [[] for _ in range(problem.devices)]
    ready: list[list[tuple[bool, int, int, Task]]] = [[] for _ in orders]
    busy = [0] * problem.devices
    """Until when each device is."""
    running: list[tuple[int, int, Task]] = []
    room, entered, now = problem.devices * per_device, 0, 0
    """Stage activations that the first device may still promise to microbatches that enter; how many have; the time."""

    def offer(kind: Kind, stage: int, microbatch: int) -> None:
        is_forward = kind is Kind.F
        rank = -stage if is_forward else microbatch
        task = Task(kind, stage, microbatch)
        heapq.heappush(ready[problem.device_of[stage]], (is_forward, rank, microbatch, task))

    while True:
        while entered < problem.microbatches and room >= per_device:
            offer(Kind.F, 0, entered)
            room, entered = room - per_device, entered + 1
        for device, tasks in enumerate(ready):
            if tasks and busy[device] <= now:
                task = heapq.heappop(tasks)[-1]
                orders[device].append(task)
                busy[device] = now + (1 if task.kind is Kind.F else 2)
                heapq.heappush(running, (busy[device], device, task))
        if not running:
            return orders
        now = running[0][0]
        while running and running[0][0] == now:
            _, device, (kind, stage, microbatch) = heapq.heappop(running)
            if kind is Kind.F:
                following = (Kind.F, stage + 1) if stage < last else (Kind.B, stage)
                offer(*following, microbatch)
            else:
                if stage:
                    offer(Kind.B, stage - 1, microbatch)
                room += device == 0
