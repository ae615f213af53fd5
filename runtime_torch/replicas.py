"""Layers in DistributedDataParallel: their gradients are averaged once per step, not by each microbatch's backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class Replicas:
    """One such layer, with the methods of FSDP2's modules that a runner calls."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module

    def unshard(self) -> None:
        """Every replica has the whole parameters."""

    def reshard(self) -> None:
        """And keeps them."""

    def hold_back(self) -> None:
        """Let forwards and backwards be local, as in `no_sync`, from now on: also those outside of a runner's steps."""
        self._module.require_backward_grad_sync = False
        self._module.require_forward_param_sync = False

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients, zero where this replica did not use a parameter; buffers are the first replica's.

        A parameter that no replica used has no gradient, as in DDP.
        """
        group = self._module.process_group
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        if trained:
            used = gradients[0].new_tensor([parameter.grad is not None for parameter in trained])
            flat = torch.cat([*(gradient.flatten() for gradient in gradients), used])
            dist.all_reduce(flat.div_(dist.get_world_size(group)), group=group)
            *parts, used = torch.split(flat, [*(parameter.numel() for parameter in trained), len(trained)])
            for parameter, gradient, part, one in zip(trained, gradients, parts, used.tolist(), strict=True):
                parameter.grad = gradient.copy_(part.view_as(gradient)) if one else None
        if self._module.broadcast_buffers:
            for buffer in self._module.buffers():
                dist.broadcast(buffer, group=group, group_src=0)
