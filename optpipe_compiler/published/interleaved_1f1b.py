"""Interleaved 1F1B (Narayanan et al., Megatron-LM, 2021, arXiv:2104.04473 section 2.2.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import LOOP, NotDefined, Tasks, one_forward_one_backward, ordered

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("interleaved-1f1b", LOOP)
def interleaved_1f1b(problem: Problem) -> Tasks:
    """Return the order: device d runs (v - 1)P + 2(P - d - 1) stage forwards, then alternates.

    Peak (v - 1)P + 2(P - d) - 1 stage activations, bubble (P - 1)(F + B) / v. As in the paper, M is a multiple of P;
    for other M see `gis`, the same groups with a shorter warm-up.
    """
    per_device = problem.per_device
    devices, count = problem.devices, problem.microbatches
    if count % devices:
        raise NotDefined(f"interleaved-1f1b needs a number of microbatches divisible by {devices} devices, not {count}")
    warmups = [(per_device - 1) * devices + 2 * (devices - device - 1) for device in range(devices)]
    return one_forward_one_backward(problem, devices, warmups)
