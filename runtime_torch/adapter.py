"""Every touch of a private torch name: the pipelining engine, driven over a schedule file's own order.

The engine (`_PipelineScheduleRuntime`) walks the device's actions and calls the functions that `Replay` has for them;
messages it asks of `_Stage`. Recompute has no action of its own in torch: it rides on OVERLAP_F_B.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from optpipe_compiler import ir
from optpipe_compiler.errors import BadInput, MissingDependency, RunFailed
from runtime_torch.job import TORCH, check_torch
from runtime_torch.replicas import Replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch.distributed as dist
    from torch import Tensor

    from runtime_torch.replay import Replay

try:
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import (
        _Action,
        _ComputationType,
        _PipelineScheduleRuntime,
    )
except ImportError as error:
    raise MissingDependency(
        f"torch {torch.__version__} has no usable torch.distributed.pipelining; optpipe run needs torch {TORCH}"
    ) from error

_SIGNATURES = {
    "get_fwd_recv_ops": ("fwd_chunk_id",),
    "get_fwd_send_ops": ("fwd_chunk_id",),
    "get_bwd_recv_ops": ("bwd_chunk_id",),
    "get_bwd_send_ops": ("bwd_chunk_id",),
    "perform_reduce_grad": ("grad_scale_factor",),
    "scale_grads": ("grad_scale_factor",),
    "clear_runtime_states": (),
    "_prepare_forward_infra": ("num_microbatches", "args", "kwargs", "has_backward"),
    "_prepare_backward_infra": ("num_microbatches", "loss_fn", "target", "received_grad_meta", "loss_kwargs"),
    "_post_metadata_inference_cleanup": (),
}
"""The methods of the stage that `_Stage` replaces or the engine calls, with their parameters."""

_ENGINE_SIGNATURES = {
    "_prepare_schedule_with_comms": ("actions", "format"),
    "register_custom_function": ("computation_type", "custom_function"),
    "step": ("args", "target", "losses", "return_outputs", "loss_kwargs", "kwargs"),
}

_TYPES = {
    "forward": "FORWARD",
    "backward": "FULL_BACKWARD",
    "backward_input": "BACKWARD_INPUT",
    "backward_weight": "BACKWARD_WEIGHT",
    "recompute": "OVERLAP_F_B",
    "send_activation": "SEND_F",
    "recv_activation": "RECV_F",
    "send_gradient": "SEND_B",
    "recv_gradient": "RECV_B",
}


def probe(version: str = torch.__version__) -> None:
    """Raise MissingDependency where torch is out of the supported range, RunFailed where its engine is not as known."""
    check_torch(version)
    for owner, known in ((PipelineStage, _SIGNATURES), (_PipelineScheduleRuntime, _ENGINE_SIGNATURES)):
        for name, expected in known.items():
            found = _parameters(owner, name)
            if found != expected:
                raise RunFailed(
                    f"torch {version}: {owner.__name__}.{name} takes {found}, expected {expected}; "
                    "this build of torch is not supported"
                )
    missing = [name for name in (*_TYPES.values(), "REDUCE_GRAD") if not hasattr(_ComputationType, name)]
    if missing:
        raise RunFailed(f"torch {version}: the pipelining engine has no action {missing[0]}")


def _parameters(owner: type, name: str) -> tuple[str, ...] | None:
    method = getattr(owner, name, None)
    return None if method is None else tuple(inspect.signature(method).parameters)[1:]


def quiet() -> None:
    """Keep the engine from logging the whole schedule to stderr when an op fails; the error itself is enough."""
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)


class _Stage(PipelineStage):
    """A stage whose buffers and messages are `Replay`'s; the engine only calls in order."""

    def __init__(
        self,
        replay: Replay,
        modules: nn.Module,
        index: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        # Given metadata keep torch from running the model to infer it; the buffers are not made from it.
        nothing = torch.empty(0, device="meta")
        super().__init__(modules, index, count, device, input_args=nothing, output_args=nothing, group=group)
        self._replay = replay
        self._sharded = [module for module in sharded_modules(modules) if isinstance(module, FSDPModule)]

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches
        self.args_recv_info = {0: ()}
        self.act_send_info = {}

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        pass

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was inferred; sharded layers stay whole for the step."""

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 looks after its gradients."""
        return bool(self._sharded)

    def collect(self) -> None:
        """Where gradients are reduced in another dtype than the parameters', sum up the microbatches in that one."""
        for parameter in _fsdp_parameters(self._sharded):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Nothing yet: a parameter may be shared with a stage that is not done."""

    def scale_accumulated(self, grad_scale_factor: int) -> None:
        """Make means of the sums over the microbatches, of those in another dtype than the parameters'."""
        for parameter in _fsdp_parameters(self._sharded):
            if parameter.unsharded_accumulated_grad is not None:
                parameter.unsharded_accumulated_grad.div_(grad_scale_factor)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Issue the receive of an activation; nothing is left to the engine."""
        self._replay.run("recv_activation", self.stage_index, fwd_chunk_id)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Issue the receive of a gradient."""
        self._replay.run("recv_gradient", self.stage_index, bwd_chunk_id)
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Issue the send of an activation."""
        self._replay.run("send_activation", self.stage_index, fwd_chunk_id)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Issue the send of a gradient."""
        self._replay.run("send_gradient", self.stage_index, bwd_chunk_id)
        return []

    def clear_runtime_states(self) -> None:
        """`Replay` leaves nothing between steps."""


class Engine:
    """torch's schedule runtime, loaded with a schedule file's compute lanes."""

    def __init__(
        self,
        schedule: ir.Schedule,
        replay: Replay,
        modules: dict[int, nn.Module],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        probe()
        count = len(schedule.stages)
        stages = [_Stage(replay, modules[index], index, count, device, group) for index in sorted(modules)]
        self._stages, self._microbatches = stages, schedule.setup.microbatches
        self._runtime = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            stages, schedule.setup.microbatches, loss_fn=_the_output_is_the_loss, scale_grads=True
        )
        sharded = {stage.stage_index: stage for stage in stages if stage.is_sharded}
        for kind in ("forward", "backward", "backward_input", "backward_weight", "recompute"):
            after = sharded if kind.startswith("backward") else {}
            self._runtime.register_custom_function(getattr(_ComputationType, _TYPES[kind]), _call(replay, kind, after))
        actions = {device.device: _actions(device, schedule.setup.microbatches) for device in schedule.devices}
        self._runtime._prepare_schedule_with_comms(actions, format="compute_comms")

    def step(self) -> None:
        """Run one step."""
        self._runtime.fwd_recv_ops.clear()
        self._runtime.bwd_recv_ops.clear()
        before = {p: p.grad for stage in self._stages for p in stage.submod.parameters()}
        for parameter in before:
            parameter.grad = None
        self._runtime.step(return_outputs=False)
        for parameter, gradient in before.items():
            if parameter.grad is not None:
                parameter.grad.div_(self._microbatches)
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        for stage in self._stages:
            stage.scale_accumulated(self._microbatches)


def _call(replay: Replay, kind: str, sharded: dict[int, _Stage]) -> Callable[..., None]:
    """What the engine does for an action; `sharded` stages then collect their gradients."""

    def call(action: Any, ctx: Any) -> None:
        replay.run(kind, action.stage_index, action.microbatch_index)
        if action.stage_index in sharded:
            sharded[action.stage_index].collect()

    return call


def sharded_modules(layer: nn.Module) -> list[FSDPModule | Replicas]:
    """The parts of a layer that FSDP2's `fully_shard` or `replicate` was applied to, or that are wrapped in DDP."""
    found: list[FSDPModule | Replicas] = []
    for module in layer.modules():
        if isinstance(module, DistributedDataParallel):
            found.append(_replicas(module))
        elif isinstance(module, FSDPModule):
            found.append(module)
    return found


def _replicas(module: DistributedDataParallel) -> Replicas:
    if module._comm_hooks or module.static_graph or module.mixed_precision is not None:
        raise BadInput(
            "a layer is wrapped in DistributedDataParallel with a communication hook, static_graph or mixed_precision, "
            "expected none of them: gradients are averaged once per step"
        )
    return Replicas(module)


def _fsdp_parameters(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    for module in modules:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            yield from group.fsdp_params


def gather(module: FSDPModule | Replicas) -> None:
    """Make the parameters whole for a step, and let the backwards accumulate whole gradients."""
    if isinstance(module, Replicas):
        module.hold_back()
        return
    module.set_requires_gradient_sync(False)
    if not isinstance(module, ReplicateModule):
        module.set_reshard_after_forward(False)
    module.set_reshard_after_backward(False)
    module.set_is_last_backward(False)
    module.unshard()


def reduce_and_shard(module: FSDPModule | Replicas) -> None:
    """At the end of a step: average the gradients over the shards and free the whole parameters (as the engine does
    for a stage that is sharded as one module)."""
    if isinstance(module, Replicas):
        module.reduce()
        return
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    module.set_requires_gradient_sync(True)
    state = module._get_fsdp_state()
    for part in state._state_ctx.all_states:
        for group in part._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def _the_output_is_the_loss(output: Tensor, _target: object) -> Tensor:
    return output


def _actions(device: ir.Device, microbatches: int) -> list[_Action | None]:
    """The engine's actions for a compute lane, with each stage's gradient reduction after its last backward."""
    actions: list[_Action | None] = []
    left: dict[int, int] = {}
    for op in device.compute:
        actions.append(_Action(op.stage, getattr(_ComputationType, _TYPES[op.name]), op.microbatch))
        if isinstance(op, ir.Backward | ir.BackwardWeight):
            left[op.stage] = left.get(op.stage, microbatches) - 1
            if left[op.stage] == 0:
                actions.append(_Action(op.stage, _ComputationType.REDUCE_GRAD, None))
    return actions
