"""ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241 section 2.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import LINEAR, Tasks, one_forward_one_backward, ordered, put_off

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("zb-h2", LINEAR, splits=True)
def zb_h2(problem: Problem) -> Tasks:
    """Return the order: like ZB-H1, but with enough forwards before the first backward to leave no bubble at all.

    Device d warms up with 2(P - d) - 1 forwards and puts off its first 2d weight gradients: at most 2P - 1 microbatches
    are open anywhere, and with F = I = W no device idles between its first and its last op (M >= 2P - 1).
    """
    devices = problem.devices
    warmups = [2 * (devices - device) - 2 for device in range(devices)]
    return put_off(one_forward_one_backward(problem, problem.microbatches, warmups), range(0, 2 * devices, 2))
