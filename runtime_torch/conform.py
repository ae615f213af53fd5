"""Before the first step: do all ranks have the same schedule, and are the stages those of its profile?"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch.bundles import show
from runtime_torch.execution import StageExecution

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from optpipe_compiler.documents import ir
    from runtime_torch.bundles import Boundary

BYTES_TOLERANCE = 0.05
"""A stage may save this share more than its profile says; with more the promise of the peak would be void."""
_SLACK_BYTES = 4096


def agree(schedule: ir.Schedule, group: dist.ProcessGroup | None) -> bool:
    """Compare digests over all ranks of `group` before any work; return whether all of them are on one host."""
    mine = (schedule.digest, socket.gethostname())
    found: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    for rank, (digest, _) in enumerate(found):
        if digest != found[0][0]:
            raise RunFailed(f"rank {rank} has another schedule than rank 0: digest {digest}, not {found[0][0]}")
    return len({host for _, host in found}) == 1


def prepare(
    schedule: ir.Schedule,
    stages: Mapping[int, StageExecution],
    boundary: Callable[[int, int], Boundary],
    inputs: Sequence[Tensor] | None,
    targets: Sequence[Tensor] | None,
    bytes_tolerance: float | None,
) -> None:
    """Hold the stages against their profile, on a throw-away microbatch.

    `inputs` and `targets` are a step's, by microbatch; the first is as large as any.
    """

    def zeros(layer: int, stage: StageExecution) -> Tensor:
        shape, dtype = boundary(layer, 0)
        return torch.zeros(shape, dtype=dtype, device=stage.device)

    for index, stage in sorted(stages.items()):
        x = inputs[0] if stage.is_first and inputs is not None else zeros(stage.first_layer - 1, stage)
        wanted = None if targets is None else targets[0]
        expected = None if stage.is_last else boundary(stage.end_layer - 1, 0)
        conform(schedule.stages[index], stage, x, wanted, expected, bytes_tolerance)


def conform(
    planned: ir.Stage,
    stage: StageExecution,
    x: Tensor,
    target: Tensor | None,
    expected: Boundary | None,
    bytes_tolerance: float | None,
) -> None:
    """Run `stage` forward once, on stores of its own; raise BadInput where it does not match the profile.

    `expected`: shape and dtype of its output. Random state stays as it was, no gradient is made.
    """
    name = f"stage {planned.stage} (layers {planned.layers[0]} to {planned.layers[1] - 1})"
    trial = StageExecution(
        stage.layers,
        stage.first_layer,
        is_first=stage.is_first,
        is_last=stage.is_last,
        device=stage.device,
        selective=stage.selective,
    )
    devices = [stage.device] if stage.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        out = trial.forward(0, x, target)
    found = tuple(out.shape), out.dtype
    if expected is not None and found != expected:
        raise BadInput(f"{name} returns {show(found)}, expected {show(expected)}")
    if expected is None and out.dim():
        raise BadInput(f"{name} returns {show(found)}, expected the scalar loss")
    saved, planned_bytes = trial.saved_bytes(0), sum(planned.saved_bytes)
    if bytes_tolerance is not None and saved > planned_bytes * (1 + bytes_tolerance) + _SLACK_BYTES:
        raise BadInput(
            f"{name} saves {saved} bytes per microbatch for its backward, its profile says {planned_bytes}: more than "
            f"{bytes_tolerance:.0%} above; profile this model again and compile"
        )
