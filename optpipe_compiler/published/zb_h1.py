"""ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241 section 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind, Task
from optpipe_compiler.published.common import LINEAR, Tasks, ordered

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("zb-h1", LINEAR, splits=True)
def zb_h1(problem: Problem) -> Tasks:
    """Return the order: 1F1B with split backwards, weight gradients put off while at most P microbatches are open.

    Device d warms up with P - d forwards like 1F1B and puts off its first d weight gradients, so that every device
    holds at most P microbatches between their forward and their weight gradient; the ones put off fill the drain.
    """
    devices = problem.devices
    return [handcrafted(problem, device, devices - device, device) for device in range(devices)]


def handcrafted(problem: Problem, device: int, warmup: int, put_off: int) -> list[Task]:
    """Return `warmup` forwards, then I, W and F in turn; `put_off` weight gradients wait for the drain."""
    count = problem.microbatches
    forwards, weights = min(count, warmup), 0
    order = [Task(Kind.F, device, m) for m in range(forwards)]
    for m in range(count):
        order.append(Task(Kind.I, device, m))
        if m - weights >= put_off:
            order.append(Task(Kind.W, device, weights))
            weights += 1
        if forwards < count:
            order.append(Task(Kind.F, device, forwards))
            forwards += 1
    return order + [Task(Kind.W, device, m) for m in range(weights, count)]
