"""Forward only: a validation loss over the same ranks, without any of the schedule's memory ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from optpipe_compiler import ir
    from runtime_torch.execution import StageExecution
    from runtime_torch.replay import Boundary


def forward_only(
    schedule: ir.Schedule,
    stages: Mapping[int, StageExecution],
    boundary: Callable[[int], Boundary],
    group: dist.ProcessGroup | None,
    inputs: Tensor | None,
    target: Tensor | None,
) -> float | None:
    """Return the mean loss of all microbatches where the last stage is; `inputs` where the first is.

    All ranks take (microbatch, stage) in the same order, which cannot deadlock.
    """
    last = len(schedule.stages) - 1
    microbatches = schedule.setup.microbatches
    losses: list[Tensor] = []
    sent: list[tuple[dist.Work | None, Tensor]] = []
    for microbatch in range(microbatches):
        x: Tensor | None = None
        for index, stage in sorted(stages.items()):
            if index == 0:
                assert inputs is not None
                x = inputs.tensor_split(microbatches)[microbatch]
            elif index - 1 not in stages:
                shape, dtype = boundary(stage.first_layer - 1)
                x = torch.empty(shape, dtype=dtype, device=stage.device)
                dist.recv(x, group=group, group_src=schedule.stages[index - 1].device)
            assert x is not None
            x = _call(stage, x, None if target is None else target.tensor_split(microbatches)[microbatch])
            if index == last:
                losses.append(x)
            elif index + 1 not in stages:
                x = x.contiguous()
                sent.append((dist.isend(x, group=group, group_dst=schedule.stages[index + 1].device), x))
        while len(sent) > len(stages):
            _delivered(*sent.pop(0))
    for message in sent:
        _delivered(*message)
    return torch.stack(losses).mean().item() if losses else None


def _call(stage: StageExecution, x: Tensor, target: Tensor | None) -> Tensor:
    *rest, end = stage.layers
    for layer in rest:
        x = layer(x)
    return end(x, target) if stage.is_last else end(x)  # type: ignore[no-any-return]


def _delivered(work: dist.Work | None, _tensor: Tensor) -> None:
    if work is not None:
        work.wait()
