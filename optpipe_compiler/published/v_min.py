"""V-Min (Qi et al., Pipeline Parallelism with Controllable Memory, 2024, arXiv:2405.15362 section 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import Tasks, V, ordered
from optpipe_compiler.published.v_pattern import BuildingBlock, Pattern

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("v-min", V, splits=True)
def v_min(problem: Problem) -> Tasks:
    """Return the order with about a third of the memory of 1F1B: peak 2 ((P + 4) // 3) stage activations."""
    return Pattern(problem, _block).orders()


def _block(devices: int, device: int) -> BuildingBlock:
    """No pass waits; where P is a multiple of 3 two slots before the gradients keep repetitions apart."""
    turn = 2 * devices + (0 if devices % 3 else 2)
    return BuildingBlock(device, 2 * devices - 1 - device, turn + device, turn + 2 * devices - 1 - device)
