"""ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241 section 3.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.heuristics.common import needs_split, one_stage_per_device
from optpipe_compiler.schedule import Kind, Task

if TYPE_CHECKING:
    from optpipe_compiler.problem import Problem


def zb_h1(problem: Problem) -> list[list[Task]]:
    """Return the order: 1F1B with split backwards, weight gradients put off while at most P microbatches are open.

    Device d warms up with P - d forwards like 1F1B and puts off its first d weight gradients, so that every device
    holds at most P microbatches between their forward and their weight gradient; the ones put off fill the drain.
    """
    one_stage_per_device(problem, "zb-h1")
    needs_split(problem, "zb-h1")
    return [_device_order(problem, device) for device in range(problem.devices)]


def _device_order(problem: Problem, device: int) -> list[Task]:
    count = problem.microbatches
    warmup = min(count, problem.devices - device)
    order = [Task(Kind.F, device, m) for m in range(warmup)]
    forwards, weights = warmup, 0
    for m in range(count):
        order.append(Task(Kind.I, device, m))
        if m - weights >= device:
            order.append(Task(Kind.W, device, weights))
            weights += 1
        if forwards < count:
            order.append(Task(Kind.F, device, forwards))
            forwards += 1
    return order + [Task(Kind.W, device, m) for m in range(weights, count)]
