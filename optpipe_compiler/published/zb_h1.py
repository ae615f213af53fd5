"""ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241 section 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import LINEAR, Tasks, ordered, put_off
from optpipe_compiler.published.one_f_one_b import alternating

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("zb-h1", LINEAR, splits=True)
def zb_h1(problem: Problem) -> Tasks:
    """Return the order: 1F1B with split backwards, weight gradients put off while at most P microbatches are open.

    Device d warms up with P - d forwards like 1F1B and puts off its first d weight gradients, so that every device
    holds at most P microbatches between their forward and their weight gradient; the ones put off fill the drain.
    """
    return put_off(alternating(problem), range(problem.devices))
