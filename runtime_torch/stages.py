"""This rank's stages, from a list of layers (or of functions that make them), or from stage modules of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optpipe_compiler.errors import BadInput
from runtime_torch.adapter import sharded_modules
from runtime_torch.bundles import Bundle, Made, bundled, trace_bundles
from runtime_torch.execution import StageExecution
from runtime_torch.meter import Meter
from runtime_torch.named import NamedStage

if TYPE_CHECKING:
    from optpipe_compiler import ir
    from runtime_torch.replay import Boundary


class Stages(dict[int, StageExecution]):
    """The stages of one rank by number.

    `module` holds the layers by their number in the model: its parameters are the optimizer's, its state dict has the
    same names under any placement. `boundary(layer)`: shape and dtype of what leaves a layer; None where unknown.
    """

    def __init__(self, module: nn.ModuleDict, bundles: Sequence[Bundle] | None) -> None:
        super().__init__()
        self.module = module
        self.inputs = None if bundles is None else bundles[0]
        self.boundary: Callable[[int], Boundary] | None = (
            None if bundles is None else lambda layer: bundles[layer + 1].boundary
        )


def build_stages(
    schedule: ir.Schedule,
    layers: Sequence[Made] | Mapping[int, Made],
    rank: int,
    device: torch.device | str,
    *,
    inputs: Sequence[Tensor] = (),
    target: Tensor | None = None,
    float_dtype: torch.dtype | None = None,
    prepare: Callable[[nn.Module], nn.Module] = lambda layer: layer,
) -> Stages:
    """Return the stages of `rank`, made of `layers`; of a mapping by layer number, only the rank's own are needed.

    Entries may be functions without arguments: only the rank's own layers are then built. `inputs` and `target` are
    one microbatch from which the shapes between the layers are found (values matter only to layers that branch on
    them); without them `Runner` needs its `boundary`. The last layer is called with the target behind its inputs and returns the mean loss. Layers
    may take and return several tensors. `prepare` is applied to each of the rank's layers on its device, for example
    `fully_shard`, or wraps them in `DistributedDataParallel`: gradients are then averaged once at the end of a step.
    `float_dtype` is that of the floats between layers where it is not what the layers alone return, for example under
    a `MixedPrecisionPolicy`.
    """
    _count(schedule, layers)
    bundles = None
    if inputs:
        if isinstance(layers, Mapping):
            layers = [layers[index] for index in range(schedule.setup.layers)]
        bundles = trace_bundles(layers, inputs, target)
        if float_dtype is not None:
            bundles[1:-1] = [bundle.with_floats(float_dtype) for bundle in bundles[1:-1]]
    return stages_between(schedule, layers, rank, device, bundles, prepare)


def stages_between(
    schedule: ir.Schedule,
    layers: Sequence[Made] | Mapping[int, Made],
    rank: int,
    device: torch.device | str,
    bundles: Sequence[Bundle] | None,
    prepare: Callable[[nn.Module], nn.Module] = lambda layer: layer,
) -> Stages:
    """Return what `build_stages` does, where `bundles` (what enters each layer, and leaves the last) are known."""
    mine = [stage for stage in schedule.stages if stage.device == rank]
    if not mine:
        raise BadInput(f"rank {rank} has no stage: the schedule is for {schedule.setup.devices} devices")
    built = {index: _built(layers[index], index) for stage in mine for index in range(*stage.layers)}
    whole = enumerate(layers) if isinstance(layers, Sequence) else layers.items()
    known = {index: made for index, made in whole if isinstance(made, nn.Module)}
    refuse_tied(schedule, {**known, **built})
    built = {index: prepare(layer.to(device)) for index, layer in built.items()}
    stages = Stages(nn.ModuleDict({str(index): layer for index, layer in built.items()}), bundles)
    sharded = [module for layer in built.values() for module in sharded_modules(layer)]
    for module in sharded:  # a stage must know the whole parameters, to tell them from activations
        module.unshard()
    meters = Meter(), Meter()
    for stage in mine:
        own = [built[index] for index in range(*stage.layers)]
        if bundles is not None:
            own = [bundled(built[i], bundles[i], bundles[i + 1]) for i in range(*stage.layers)]
        stages[stage.stage] = _execution(schedule, stage, own, device, meters)
    for module in sharded:
        module.reshard()
    return stages


def wrap_stages(
    schedule: ir.Schedule, modules: Mapping[int, nn.Module], rank: int, device: torch.device | str
) -> Stages:
    """Return the stages of `rank` from whole stage modules by stage number.

    Offload and recompute then move a stage as a whole: a schedule that names part of its layers is refused. `Runner`
    needs its `boundary`, which is asked for the last layer of each stage.
    """
    mine = [stage for stage in schedule.stages if stage.device == rank]
    if set(modules) != {stage.stage for stage in mine}:
        expected = [stage.stage for stage in mine]
        raise BadInput(f"rank {rank} has modules for stages {sorted(modules)}, the schedule expects {expected}")
    for op in (*schedule.devices[rank].compute, *schedule.devices[rank].d2h):
        whole = schedule.stages[op.stage].layers
        if tuple(getattr(op, "layers", whole)) != tuple(whole):
            raise BadInput(f"stage {op.stage} is one module, but the schedule has {op.id}: build it from its layers")
    stages = Stages(nn.ModuleDict({f"stage{index}": modules[index].to(device) for index in modules}), None)
    meters = Meter(), Meter()
    for stage in mine:
        nothing = [nn.Identity() for _ in range(stage.layers[1] - stage.layers[0] - 1)]
        stages[stage.stage] = _execution(schedule, stage, [*nothing, modules[stage.stage]], device, meters)
    return stages


def refuse_tied(schedule: ir.Schedule, layers: Mapping[int, nn.Module]) -> None:
    """Raise BadInput where two stages share a parameter."""
    stage_of = {index: stage.stage for stage in schedule.stages for index in range(*stage.layers)}
    owner: dict[int, tuple[int, str]] = {}
    for index, layer in layers.items():
        for name, parameter in layer.named_parameters():
            first, other = owner.setdefault(id(parameter), (index, name))
            if stage_of[first] != stage_of[index]:
                raise BadInput(
                    f"layers {first} and {index} share a parameter ({other} and {name}), but are in stages "
                    f"{stage_of[first]} and {stage_of[index]}: tied weights across stages are not supported, "
                    "give each layer its own"
                )


def _count(schedule: ir.Schedule, layers: Sequence[Any] | Mapping[int, Any]) -> None:
    if isinstance(layers, Sequence) and len(layers) != schedule.setup.layers:
        raise BadInput(f"the model has {len(layers)} layers, the schedule is for {schedule.setup.layers}")


def _built(made: Made, index: int) -> nn.Module:
    layer = made if isinstance(made, nn.Module) else made()
    if not isinstance(layer, nn.Module):
        raise BadInput(f"layer {index} is a {type(layer).__name__}, expected a torch.nn.Module")
    return layer


def _execution(
    schedule: ir.Schedule,
    stage: ir.Stage,
    layers: Sequence[nn.Module],
    device: torch.device | str,
    meters: tuple[Meter, Meter],
) -> StageExecution:
    execution = NamedStage(
        layers,
        stage.layers[0],
        is_first=stage.stage == 0,
        is_last=stage.stage == len(schedule.stages) - 1,
        device=device,
        meter=meters[0],
        host_meter=meters[1],
    )
    execution.stage = stage.stage
    return execution
