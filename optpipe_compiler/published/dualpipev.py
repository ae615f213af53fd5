"""DualPipeV (DeepSeek, 2025, github.com/deepseek-ai/DualPipe): DualPipe (arXiv:2412.19437 section 3.2.1) cut in half.

Where the original overlaps a forward with a backward on one device, this order runs the forward and then the backward:
our devices run one op at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.documents.units import counted
from optpipe_compiler.model.schedule import Kind
from optpipe_compiler.published.common import NotDefined, Tasks, V, numbered, ordered

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem

F, I, W, B = Kind.F, Kind.I, Kind.W, Kind.B  # noqa: E741  (torch's letter)


@ordered("dualpipev", V, splits=True)
def dualpipev(problem: Problem) -> Tasks:
    """Return the order in its eight phases; peak 2P + 1 stage activations; at least 2P microbatches."""
    if problem.microbatches < 2 * problem.devices:
        raise NotDefined(
            f"dualpipev needs at least {counted(2 * problem.devices, 'microbatch')} on "
            f"{counted(problem.devices, 'device')}, "
            f"not {problem.microbatches}"
        )
    return [numbered(_steps(problem, device), problem.microbatches) for device in range(problem.devices)]


def _steps(problem: Problem, device: int) -> list[tuple[Kind, int]]:
    """Return what one device does; `down` is its first stage, `up` its second."""
    down, up = problem.stages_of(device)
    ahead = problem.devices - device - 1
    steps = [(F, down)] * (2 * ahead) + [(F, down), (F, up)] * (device + 1) + [(I, up), (W, up), (F, up)] * ahead
    steps += [(F, down), (B, up), (F, up), (B, down)] * (problem.microbatches - 2 * problem.devices + device + 1)
    steps += [(B, up), (F, up), (B, down)] * ahead
    return steps + _drain(device, ahead, down, up)


def _drain(device: int, ahead: int, down: int, up: int) -> list[tuple[Kind, int]]:
    """Return the end: half way through the last backwards, weight gradients are split off and put off."""
    inputs = [up, down] * (device + 1) + [down] * ahead
    fused = 2 * ((device + 1) // 2) + (0 if device % 2 else 1)
    late = inputs[fused:]
    steps: list[tuple[Kind, int]] = [(B, stage) for stage in inputs[:fused]]
    waiting = list(late)
    for number, stage in enumerate(late):
        if fused + number >= 2 * (device + 1):
            steps.append((W, waiting.pop(0)))
        steps.append((I, stage))
    return steps + [(W, stage) for stage in waiting]
