"""GPipe (Huang et al., 2019, arXiv:1811.06965 section 2.3): all forwards, then all backwards.

The paper recomputes every activation but its boundary: that is gpipe-recompute. It draws the backwards in reverse; here
the microbatches keep their order, which changes neither bubble nor peak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import LINEAR, Tasks, one_forward_one_backward, ordered

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("gpipe", LINEAR)
def gpipe(problem: Problem) -> Tasks:
    """Return the order; peak M microbatches, bubble (P - 1)(F + B)."""
    return all_forwards_first(problem)


def all_forwards_first(problem: Problem) -> Tasks:
    """Return per device its stages' forwards, stage by stage, then their backwards from the last stage to the first."""
    every = len(problem.stages) * problem.microbatches
    return one_forward_one_backward(problem, problem.microbatches, [every] * problem.devices)
