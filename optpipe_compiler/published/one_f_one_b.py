"""1F1B (PipeDream-Flush; Narayanan et al., 2021, arXiv:2006.09503 section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind
from optpipe_compiler.published.common import Tasks, grouped, needs_linear, one_forward_one_backward, ordered

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered
def one_f_one_b(problem: Problem) -> Tasks:
    """Return the order: device d runs P - d - 1 forwards, then alternates; peak min(M, P - d) microbatches."""
    needs_linear(problem, "1f1b")
    orders = []
    for device in range(problem.devices):
        forwards = grouped(Kind.F, [device], problem.microbatches, problem.microbatches)
        backwards = grouped(Kind.B, [device], problem.microbatches, problem.microbatches)
        warmup = min(problem.microbatches, problem.devices - device - 1)
        orders.append(one_forward_one_backward(forwards, backwards, warmup))
    return orders
