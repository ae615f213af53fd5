"""ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241 section 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import LINEAR, Tasks, one_forward_one_backward, ordered, put_off

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("zb-h1", LINEAR, splits=True)
def zb_h1(problem: Problem) -> Tasks:
    """Return the order: 1F1B with split backwards, weight gradients put off while at most P microbatches are open.

    Device d warms up with P - d forwards like 1F1B and puts off its first d weight gradients, so that every device
    holds at most P microbatches between their forward and their weight gradient; the ones put off fill the drain.
    """
    warmups = [problem.devices - device - 1 for device in range(problem.devices)]
    return put_off(one_forward_one_backward(problem, problem.microbatches, warmups), range(problem.devices))
