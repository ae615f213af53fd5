"""Seq1F1B (Sun et al., 2024, arXiv:2406.03488 section 3): 1F1B on slices of sequences.

The forwards of a microbatch's slices ascend and its backwards descend, so that the first backward waits for the last
slice: the warm-up is longer by n - 1 slices, and everything else is 1F1B with n times as many, shorter passes. The
paper's Seq1F1B-I and its form of ZB1P do the same to interleaved 1F1B and to ZB-H1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import (
    LINEAR,
    LOOP,
    NotDefined,
    Tasks,
    in_units,
    one_forward_one_backward,
    ordered,
    put_off,
)
from optpipe_compiler.published.one_f_one_b import alternating

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("seq1f1b", LINEAR)
def seq1f1b(problem: Problem) -> Tasks:
    """Return the order: device d runs P - d + n - 2 forwards, then alternates; peak (P + n - 1) / n microbatches."""
    return in_units(problem, alternating(problem, problem.slices - 1))


@ordered("seq1f1b-zb", LINEAR, splits=True)
def seq1f1b_zb(problem: Problem) -> Tasks:
    """Return the order: ZB-H1 on slices, its warm-up longer by n - 1 of them; peak (P + n - 1) / n microbatches."""
    return in_units(problem, put_off(alternating(problem, problem.slices - 1), range(problem.devices)))


@ordered("seq1f1b-interleaved", LOOP)
def seq1f1b_interleaved(problem: Problem) -> Tasks:
    """Return the order: interleaved 1F1B in groups of P slices, the warm-up longer by n - 1 slices.

    Slices of a microbatch are of one group: n divides P, and P divides the number of slices.
    """
    return interleaved(problem, "seq1f1b-interleaved", problem.devices)


def interleaved(problem: Problem, name: str, group: int) -> Tasks:
    """Return interleaved 1F1B in groups of so many slices, which are whole microbatches.

    Device d runs (v - 1) g + n - 1 + 2 (P - d - 1) stage forwards, then alternates: the first backward is that of the
    last slice of the first microbatch in the last stage.
    """
    devices, slices, count = problem.devices, problem.slices, problem.microbatches
    if group % slices or count % group:
        raise NotDefined(
            f"{name} runs groups of {group} slices, which {slices} slices of each of {problem.whole} microbatches "
            "do not fill"
        )
    warmups = [(problem.per_device - 1) * group + slices - 1 + 2 * (devices - device - 1) for device in range(devices)]
    return in_units(problem, one_forward_one_backward(problem, group, warmups))


@ordered("seq1f1b-interleaved-zb", LOOP, splits=True)
def seq1f1b_interleaved_zb(problem: Problem) -> Tasks:
    """Return the order: the interleaved form with split backwards; device d puts its first d weight gradients off."""
    return put_off(interleaved(problem, "seq1f1b-interleaved-zb", problem.devices), range(problem.devices))
