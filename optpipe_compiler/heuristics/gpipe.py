"""GPipe (Huang et al., 2019, arXiv:1811.06965): all forwards, then all backwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.schedule import Kind, Task

if TYPE_CHECKING:
    from optpipe_compiler.problem import Problem


def gpipe(problem: Problem) -> list[list[Task]]:
    """Return the order: stage by stage all forwards, then in reverse all backwards; peak M microbatches."""
    microbatches = range(problem.microbatches)
    orders = []
    for device in range(problem.devices):
        mine = problem.stages_of(device)
        forwards = [Task(Kind.F, stage, m) for stage in mine for m in microbatches]
        backwards = [Task(Kind.B, stage, m) for stage in reversed(mine) for m in microbatches]
        orders.append(forwards + backwards)
    return orders
