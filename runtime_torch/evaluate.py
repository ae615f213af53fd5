"""Forward only: a validation loss over the same ranks, without any of the schedule's memory ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from runtime_torch.microbatch import entered, keywords_for, targets_for
from runtime_torch.replay import check_output

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from optpipe_compiler.documents import ir
    from runtime_torch.batches import Batch
    from runtime_torch.bundles import Boundary
    from runtime_torch.delivery import Delivery
    from runtime_torch.execution import StageExecution
    from runtime_torch.shared import Channels


def forward_only(
    schedule: ir.Schedule,
    stages: Mapping[int, StageExecution],
    boundary: Callable[[int, int], Boundary],
    group: dist.ProcessGroup | None,
    batch: Batch,
    channels: Channels | None = None,
) -> list[Tensor]:
    """Return the losses of all microbatches where the last stage is, nothing elsewhere.

    All ranks take (microbatch, stage) in the same order, which cannot deadlock. Messages go through `channels` where
    there are any to the peer, else over `group`.
    """
    losses: list[Tensor] = []
    sent: list[tuple[dist.Work | Delivery, Tensor]] = []

    def post(x: Tensor, peer: int, *, sent: bool) -> dist.Work | Delivery:
        if channels is not None and (half := channels.post(x, peer, sent=sent)) is not None:
            return half
        work = dist.isend(x, group=group, group_dst=peer) if sent else dist.irecv(x, group=group, group_src=peer)
        assert work is not None
        return work

    for number, microbatch in enumerate(batch.units):
        x: Tensor | None = None
        for index, stage in sorted(stages.items()):
            if index == 0:
                assert batch.inputs is not None
                x = batch.inputs[number]
            elif index - 1 not in stages:
                shape, dtype = boundary(stage.first_layer - 1, number)
                x = torch.empty(shape, dtype=dtype, device=stage.device)
                post(x, schedule.stages[index - 1].device, sent=False).wait()
            assert x is not None
            with entered(microbatch):
                x = _call(stage, x, batch.targets[number] if batch.targets is not None else None)
            rank, layer = schedule.stages[index].device, stage.end_layer - 1
            check_output(x, None if stage.is_last else boundary(layer, number), f"rank {rank}: layer {layer}", number)
            if stage.is_last:
                losses.append(x)
            elif index + 1 not in stages:
                x = x.resolve_conj().resolve_neg().contiguous()
                sent.append((post(x, schedule.stages[index + 1].device, sent=True), x))
        while len(sent) > len(stages):
            sent.pop(0)[0].wait()
    for work, _ in sent:
        work.wait()
    return losses


def _call(stage: StageExecution, x: Tensor, target: Tensor | None) -> Tensor:
    for index, layer in enumerate(stage.layers, stage.first_layer):
        behind, named = targets_for(layer, target, is_last=stage.is_last and index + 1 == stage.end_layer)
        x = layer(x, *behind, **named, **keywords_for(layer))
    return x
