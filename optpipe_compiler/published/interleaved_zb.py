"""Interleaved zero bubble: ZB-H1 on a loop of stages.

The zero-bubble paper (Qi et al., 2023, arXiv:2401.10241) splits backwards for one stage per device; its authors and
torch's ScheduleInterleavedZeroBubble, whose order this is, apply that to interleaved 1F1B (arXiv:2104.04473).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind
from optpipe_compiler.published.common import LOOP, NotDefined, Tasks, grouped, ordered

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem
    from optpipe_compiler.model.schedule import Task


@ordered("interleaved-zb", LOOP, splits=True)
def interleaved_zb(problem: Problem) -> Tasks:
    """Return the order: device d runs (v - 1)g + P - d - 1 stage forwards, then F and I in turn; d W are put off.

    Peak vP stage activations where M is a multiple of P. A round has g = M / max(1, M // P) microbatches, which must be
    a whole number (torch's relaxation of Megatron's rule).
    """
    per_device = problem.per_device
    devices, count = problem.devices, problem.microbatches
    rounds = max(1, count // devices)
    if count % rounds:
        raise NotDefined(f"interleaved-zb runs {rounds} rounds, which do not divide {count} microbatches")
    group = count // rounds
    return [
        _order(problem, device, (per_device - 1) * group + devices - device - 1, group) for device in range(devices)
    ]


def _order(problem: Problem, device: int, warmup: int, group: int) -> list[Task]:
    mine = problem.stages_of(device)
    forwards = grouped(Kind.F, mine, problem.microbatches, group)
    inputs = grouped(Kind.I, mine[::-1], problem.microbatches, group)
    weights = [task._replace(kind=Kind.W) for task in inputs]
    order = forwards[:warmup]
    for number, task in enumerate(inputs):
        order += forwards[warmup + number : warmup + number + 1]
        order.append(task)
        if number >= device:
            order.append(weights[number - device])
    return order + weights[max(0, len(weights) - device) :]
