"""1F1B (PipeDream-Flush; Narayanan et al., 2021, arXiv:2006.09503 section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.heuristics.common import one_stage_per_device
from optpipe_compiler.schedule import Kind, Task

if TYPE_CHECKING:
    from optpipe_compiler.problem import Problem


def one_f_one_b(problem: Problem) -> list[list[Task]]:
    """Return the order: device d runs P - d - 1 forwards, then alternates; peak min(M, P - d) microbatches."""
    one_stage_per_device(problem, "1f1b")
    orders = []
    for device in range(problem.devices):
        warmup = min(problem.microbatches, problem.devices - device - 1)
        forwards = [Task(Kind.F, device, m) for m in range(problem.microbatches)]
        backwards = [Task(Kind.B, device, m) for m in range(problem.microbatches)]
        steady = [task for pair in zip(forwards[warmup:], backwards, strict=False) for task in pair]
        orders.append(forwards[:warmup] + steady + backwards[problem.microbatches - warmup :])
    return orders
