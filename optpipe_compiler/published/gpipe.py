"""GPipe (Huang et al., 2019, arXiv:1811.06965 section 2.3): all forwards, then all backwards.

The paper recomputes every activation but its boundary: that is gpipe-recompute. It draws the backwards in reverse; here
the microbatches keep their order, which changes neither bubble nor peak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind, Task
from optpipe_compiler.published.common import LINEAR, Tasks, ordered

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("gpipe", LINEAR)
def gpipe(problem: Problem) -> Tasks:
    """Return the order; peak M microbatches, bubble (P - 1)(F + B)."""
    return all_forwards_first(problem)


def all_forwards_first(problem: Problem) -> Tasks:
    """Return per device its stages' forwards, stage by stage, then their backwards from the last stage to the first."""
    microbatches = range(problem.microbatches)
    orders = []
    for device in range(problem.devices):
        mine = problem.stages_of(device)
        forwards = [Task(Kind.F, stage, m) for stage in mine for m in microbatches]
        backwards = [Task(Kind.B, stage, m) for stage in reversed(mine) for m in microbatches]
        orders.append(forwards + backwards)
    return orders
