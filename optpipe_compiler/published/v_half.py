"""V-Half (Qi et al., Pipeline Parallelism with Controllable Memory, 2024, arXiv:2405.15362 section 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import Tasks, V, ordered
from optpipe_compiler.published.v_pattern import BuildingBlock, Pattern

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("v-half", V, splits=True)
def v_half(problem: Problem) -> Tasks:
    """Return the order with about half the memory of 1F1B: peak 2 ((P + 2) // 2) stage activations."""
    return Pattern(problem, _block).orders()


def _block(devices: int, device: int) -> BuildingBlock:
    """Forwards wait a slot per hop on the way down, none on the way up; input gradients likewise."""
    turn = 3 * devices + (0 if devices % 2 else 3)
    return BuildingBlock(2 * device, 3 * devices - 2 - device, turn - 1 + 2 * device, turn + 3 * devices - 2 - device)
