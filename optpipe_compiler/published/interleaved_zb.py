"""Interleaved zero bubble: ZB-H1 on a loop of stages.

The zero-bubble paper (Qi et al., 2023, arXiv:2401.10241) splits backwards for one stage per device; its authors and
torch's ScheduleInterleavedZeroBubble, whose order this is, apply that to interleaved 1F1B (arXiv:2104.04473).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import LOOP, NotDefined, Tasks, one_forward_one_backward, ordered, put_off

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("interleaved-zb", LOOP, splits=True)
def interleaved_zb(problem: Problem) -> Tasks:
    """Return the order: device d runs (v - 1)g + P - d - 1 stage forwards, then F and I in turn; d W are put off.

    Peak vP stage activations where M is a multiple of P. A round has g = M / max(1, M // P) microbatches, which must be
    a whole number (torch's relaxation of Megatron's rule).
    """
    devices, count = problem.devices, problem.microbatches
    rounds = max(1, count // devices)
    if count % rounds:
        raise NotDefined(f"interleaved-zb runs {rounds} rounds, which do not divide {count} microbatches")
    group = count // rounds
    warmups = [(problem.per_device - 1) * group + devices - device - 1 for device in range(devices)]
    return put_off(one_forward_one_backward(problem, group, warmups), range(devices))
