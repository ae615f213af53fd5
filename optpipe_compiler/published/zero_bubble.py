"""Schedules drawn in Zero Bubble Pipeline Parallelism (Qi et al., 2023, arXiv:2401.10241): ZB-H1, ZB-H2 and ZB-V.

Sections 2.1, 2.2 and 6. ZB-V, V-ZB in arXiv:2405.15362, has zero bubbles at the memory of 1F1B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind
from optpipe_compiler.published.common import LINEAR, Tasks, V, numbered, one_forward_one_backward, ordered, put_off
from optpipe_compiler.published.one_f_one_b import alternating

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741  (torch's letter)


@ordered("zb-h1", LINEAR, splits=True)
def zb_h1(problem: Problem) -> Tasks:
    """Return the order: 1F1B with split backwards, weight gradients put off while at most P microbatches are open.

    Device d warms up with P - d forwards like 1F1B and puts off its first d weight gradients, so that every device
    holds at most P microbatches between their forward and their weight gradient; the ones put off fill the drain.
    """
    return put_off(alternating(problem), range(problem.devices))


@ordered("zb-h2", LINEAR, splits=True)
def zb_h2(problem: Problem) -> Tasks:
    """Return the order: like ZB-H1, but with enough forwards before the first backward to leave no bubble at all.

    Device d warms up with 2(P - d) - 1 forwards and puts off its first 2d weight gradients: at most 2P - 1 microbatches
    are open anywhere, and with F = I = W no device idles between its first and its last op (M >= 2P - 1).
    """
    devices = problem.devices
    warmups = [2 * (devices - device) - 2 for device in range(devices)]
    return put_off(one_forward_one_backward(problem, problem.microbatches, warmups), range(0, 2 * devices, 2))


@ordered("zbv", V, splits=True)
def zbv(problem: Problem) -> Tasks:
    """Return the order drawn for F = I = W: peak 2P stage activations, no bubble on any device from M = 2P - 1 on.

    For fewer microbatches it is the order of 2P - 1 with the missing ones left out.
    """
    return [numbered(_steps(problem, device), problem.microbatches) for device in range(problem.devices)]


def _steps(problem: Problem, device: int) -> list[tuple[Kind, int]]:
    """Return what one device does, by phases; `down` is its first stage, `up` its second."""
    down, up = problem.stages_of(device)
    ahead = problem.devices - device
    cycles = max(2 * problem.devices - 1, problem.microbatches) - problem.devices
    warmup = [(F, down)] * (2 * ahead - 1) + [(F, up), (F, down)] * device + [(F, up), (I, up), (W, up)] * ahead
    steady = [(F, down), (I, down), (W, down), (F, up), (I, up), (W, up)] * cycles
    drain = [(I, down), (I, up)] * device + [(I, down), (W, down)] * ahead
    return warmup + steady + drain + [(W, up)] * device + [(W, down)] * device
