"""ZB-V (Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241 section 6; V-ZB in arXiv:2405.15362).

It has zero bubbles at the memory of 1F1B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind
from optpipe_compiler.published.common import Tasks, V, numbered, ordered

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741  (torch's letter)


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
