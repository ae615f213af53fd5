"""Layers in data parallelism: their gradients are reduced once per step, not by each microbatch's backward."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from optpipe_compiler.errors import BadInput
from runtime_torch import engine

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether that is a DTensor. Nothing is one before its module is imported, which takes half as long as torch."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _is_fsdp(module: object) -> TypeIs[FSDPModule]:
    """Whether that is a module of FSDP2, whose module is not imported for the question either."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def class_of(module: nn.Module) -> type:
    """The class of a module as its author has it: FSDP2 gives it one that inherits from that, too."""
    return type(module).__bases__[-1] if _is_fsdp(module) else type(module)


def is_looked_after(layer: nn.Module) -> bool:
    """Whether DDP or FSDP2 looks after the layer or a part of it."""
    return any(isinstance(part, DistributedDataParallel) or _is_fsdp(part) for part in layer.modules())


def replicated(layer: nn.Module) -> list[Shards | Replicas]:
    """The outermost parts of a layer that `fully_shard` or `replicate` was applied to, or that are wrapped in DDP.

    Raises BadInput for what reduces in each backward and cannot be told not to.
    """
    if isinstance(layer, DistributedDataParallel):
        return [Replicas(layer)]
    if _is_fsdp(layer):
        return [Shards(layer)]
    _refuse_others(layer)
    return [part for child in layer.children() for part in replicated(child)]


def _refuse_others(layer: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(layer, fsdp.FullyShardedDataParallel):
        kind = "FullyShardedDataParallel, FSDP of the first kind"
    elif engine.is_in_composable_ddp(layer):
        kind = "torch.distributed._composable.replicate, DDP by hooks"
    else:
        return
    raise BadInput(
        f"a layer is in {kind}, expected fully_shard (FSDP2) or DistributedDataParallel: gradients are averaged once "
        "per step"
    )


class Shards:
    """A module of FSDP2 (`fully_shard` or `replicate`), with those inside of it."""

    def __init__(self, module: nn.Module) -> None:
        if engine.is_sharded_with_others(module):
            raise BadInput(
                "a layer has modules that one fully_shard([...]) took together, and none around them: expected "
                "fully_shard(layer) behind it, or a call for each module"
            )
        self._module = module
        self._parts = [part for part in module.modules() if _is_fsdp(part)]
        self._device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        if self._is_whole:  # a step has failed in the middle
            self._begin_anew()
        self.reshard()
        self._is_sharded = any(
            is_dtensor(parameter) and any(place.is_shard() for place in parameter.placements)
            for parameter in module.parameters()
        )
        self._ignored = {parameter for parameter in module.parameters() if not is_dtensor(parameter)}

    def added(self) -> str | None:
        """Return, between steps, the name of a trained parameter that came later: FSDP2 knows nothing of it."""
        named = self._module.named_parameters()
        return next((name for name, p in named if p.requires_grad and not (is_dtensor(p) or p in self._ignored)), None)

    def unshard(self) -> None:
        """Make the parameters whole."""
        for part in self._parts:
            part.unshard()

    def reshard(self) -> None:
        """Free the whole parameters."""
        for part in self._parts:
            part.reshard()

    def leave(self) -> None:
        """Free the whole parameters after a forward that may have raised, behind which FSDP would keep them."""
        for part in self._parts:
            self._pass(part)
        self.reshard()

    @property
    def _is_whole(self) -> bool:
        return {is_dtensor(parameter) for parameter in self._module.parameters()} == {False}

    def _begin_anew(self) -> None:
        """Forget the step that failed, with the gradients of what it had run."""
        reset = getattr(self._module, "reset_iter_state", None)
        if reset is None:
            raise BadInput(
                "a layer in FSDP2 has whole parameters, as a step that failed leaves them: expected it made and "
                "sharded anew, or torch 2.13"
            )
        for parameter in self._module.parameters():
            parameter.grad = None
        for part in self._parts:
            engine.forget_unreduced(part)
        reset()

    def gather(self) -> None:
        """Make the parameters whole for a step, and let its backwards accumulate whole gradients."""
        self._set(reduces=False)
        if self._is_sharded:
            self._parts[0].set_reshard_after_forward(False)
        self.unshard()

    def reduce(self) -> None:
        """End a step: average its gradients over the replicas, add them to the parameters' and free the whole ones."""
        self._set(reduces=True)
        self.collect()

    def _set(self, *, reduces: bool) -> None:
        outermost = self._parts[0]
        outermost.set_requires_gradient_sync(reduces)
        outermost.set_reshard_after_backward(reduces)
        outermost.set_is_last_backward(reduces)

    def collect(self) -> None:
        """After a backward that FSDP did not see: take its gradients over, in the dtype that they are reduced in.

        A backward that computes nothing is run: at its end FSDP looks after the gradients that are there already.
        """
        with torch.enable_grad():
            self._pass(self._module).backward()  # type: ignore[no-untyped-call]

    def _pass(self, module: nn.Module) -> Tensor:
        """Call a module of FSDP without its own forward."""
        own = module.__dict__.get("forward")
        module.forward = _identity
        try:
            found: Tensor = module(torch.zeros((), device=self._device, requires_grad=True))
        finally:
            del module.forward
            if own is not None:
                module.forward = own
        return found


def _identity(x: Tensor) -> Tensor:
    return x.clone()


class Replicas:
    """A module in DistributedDataParallel."""

    def __init__(self, module: DistributedDataParallel) -> None:
        hooked = getattr(module, "_comm_hooks", ())  # there is no public way to ask
        if hooked or module.static_graph or module.mixed_precision is not None:
            raise BadInput(
                "a layer is wrapped in DistributedDataParallel with a communication hook, static_graph or "
                "mixed_precision, expected none of them: gradients are averaged once per step"
            )
        self._module = module

    def added(self) -> None:
        """All parameters that there are have their gradients averaged."""

    def unshard(self) -> None:
        """Every replica has the whole parameters."""

    def reshard(self) -> None:
        """And keeps them."""

    def gather(self) -> None:
        """Let forwards and backwards be local, as in `no_sync`, from now on: also those outside of a runner's steps."""
        self._module.require_backward_grad_sync = False
        self._module.require_forward_param_sync = False

    def leave(self) -> None:
        """Nothing is to be freed."""

    def collect(self) -> None:
        """Gradients are where they belong."""

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients, zero where this replica did not use a parameter; buffers are the first replica's.

        What earlier steps left is the same on all replicas, so the average leaves it as it is. A parameter that no
        replica used has no gradient, as in DDP.
        """
        group = self._module.process_group
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        gradients = [engine.no_gradient(p) if p.grad is None else p.grad for p in trained]
        if trained:
            used = gradients[0].new_tensor([parameter.grad is not None for parameter in trained])
            flat = torch.cat([*(gradient.to_dense().flatten() for gradient in gradients), used])
            dist.all_reduce(flat.div_(dist.get_world_size(group)), group=group)
            *parts, used = torch.split(flat, [*(parameter.numel() for parameter in trained), len(trained)])
            for parameter, gradient, part, one in zip(trained, gradients, parts, used.tolist(), strict=True):
                parameter.grad = _with_values(gradient, part.view(gradient.shape)) if one else None
        if self._module.broadcast_buffers:
            for buffer in self._module.buffers():
                dist.broadcast(buffer, group=group, group_src=0)


def _with_values(gradient: Tensor, values: Tensor) -> Tensor:
    """Give a gradient these values: in place, or, of an embedding's sparse one, with the rows that are not zero."""
    if gradient.is_sparse:
        return values.to_sparse(gradient.sparse_dim()).to(gradient.dtype)
    return gradient.copy_(values)
