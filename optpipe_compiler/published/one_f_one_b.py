"""1F1B (PipeDream-Flush; Narayanan et al., 2021, arXiv:2006.09503 section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import LINEAR, Tasks, one_forward_one_backward, ordered

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("1f1b", LINEAR)
def one_f_one_b(problem: Problem) -> Tasks:
    """Return the order: device d runs P - d - 1 forwards, then alternates; peak min(M, P - d) microbatches."""
    return alternating(problem)


def alternating(problem: Problem, more: int = 0) -> Tasks:
    """Return 1F1B with so many more forwards in every warm-up."""
    warmups = [problem.devices - device - 1 + more for device in range(problem.devices)]
    return one_forward_one_backward(problem, problem.microbatches, warmups)
