"""This rank's stages, from a list of layers (or of functions that make them), or from stage modules of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import NoneType

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput, of_kind
from runtime_torch.bundles import Bundle, BundledLayer, Made, bundled, layer_made, trace_bundles
from runtime_torch.execution import StageExecution
from runtime_torch.meter import Meter
from runtime_torch.microbatch import inner_layer
from runtime_torch.replicas import replicated
from runtime_torch.slices import is_sliceable
from runtime_torch.surroundings import autocast_now
from runtime_torch.ties import Ties, shared


class Stages(dict[int, StageExecution]):
    """The stages of one rank by number.

    `module` holds the layers by their number in the model: its parameters are the optimizer's, its state dict has the
    same names under any placement. `bundles`: what enters each layer and leaves the last; None where unknown.
    """

    def __init__(
        self,
        module: nn.ModuleDict,
        bundles: Sequence[Bundle] | None,
        ties: Ties,
        prepare: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.prepare = prepare
        """What was applied to each layer, if anything was: for those that come from another rank later."""
        self.module = module
        self.left: set[str] = set()
        """The layers that `prepare` has left as they are and that had no trained parameter then."""
        self.ties = ties
        self.bundles = bundles
        self.was_autocast: bool | None = None
        """Whether autocast was on when `bundles` were found; None where nobody knows."""

    @property
    def are_modules(self) -> bool:
        """Whether stages are whole modules (`wrap_stages`), not layers."""
        return any(name.startswith("stage") for name in self.module)

    def replaced(self) -> BadInput | None:
        """Return what is wrong where `module` has another layer than runs, as of one that was wrapped later."""
        for number, stage in self.items():
            layers = enumerate(stage.layers, stage.first_layer)
            run = {f"stage{number}": stage.layers[-1]} if self.are_modules else {str(i): layer for i, layer in layers}
            for name, layer in run.items():
                own = layer.layer if isinstance(layer, BundledLayer) else layer
                if name in self.module and self.module[name] is not own:
                    return BadInput(
                        f"stages.module[{name!r}] is another layer than was built, which goes on to run: expected "
                        "changes inside of a layer, or build_stages with the other one"
                    )
        return None

    def unreduced(self) -> BadInput | None:
        """Return what is wrong where a layer is trained that `prepare` has left as it is because it was frozen."""
        if trained := [name for name in self.left if trains(self.module[name])]:
            return BadInput(
                f"layer {trained[0]} is trained, and was frozen when `prepare` left it as it is: nothing averages its "
                "gradients over the replicas, expected it trained when build_stages is called, and frozen behind that"
            )
        return None

    def unique_parameters(self) -> list[nn.Parameter]:
        """The parameters of `module` without copies of tied ones that another layer counts: for a norm over ranks."""
        repeated = self.ties.repeated()
        return [parameter for parameter in self.module.parameters() if parameter not in repeated]


def build_stages(
    schedule: ir.Schedule,
    layers: Sequence[Made] | Mapping[int, Made],
    rank: int,
    device: torch.device | str,
    *,
    inputs: Sequence[Tensor] = (),
    target: Tensor | None = None,
    float_dtype: torch.dtype | None = None,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    ties: Iterable[Sequence[str]] = (),
) -> Stages:
    """Return the stages of `rank`, made of `layers`; of a mapping by layer number, only the rank's own are needed.

    Entries may be functions without arguments: only the rank's own layers are then built. `inputs` and `target` are
    one microbatch from which the shapes between the layers are found (values matter only to layers that branch on
    them); without them `Runner` needs its `boundary`. The last layer is called with the target behind its inputs and
    returns the mean loss. Layers may take and return several tensors. `prepare` is applied to each of the rank's layers
    on its device, for example `fully_shard`, or wraps them in `DistributedDataParallel`: gradients are then averaged
    once at the end of a step. Where steps run under autocast, this is called under it, too. `float_dtype` is that of
    all floats between layers where it is not what the layers return here, as under a `MixedPrecisionPolicy`.

    `ties` name the parameters that layers share, on all ranks alike: `[("0.tokens.weight", "9.logits.weight")]`. They
    are found where all layers are given as modules; what functions make on other ranks nobody can see.
    """
    of_kind("schedule", schedule, ir.Schedule, "a schedule, as load_schedule returns it")
    if isinstance(layers, nn.ModuleList | nn.Sequential):
        layers = list(layers)
    of_kind("layers", layers, (Sequence, Mapping), "a list of layers")
    for number, tensor in enumerate(of_kind("inputs", inputs, Sequence, "a list of tensors")):
        of_kind(f"inputs[{number}]", tensor, Tensor, "a tensor")
    of_kind("target", target, (Tensor, NoneType), "a tensor, or None")
    of_kind("float_dtype", float_dtype, (torch.dtype, NoneType), "a dtype of torch, or None")
    of_kind("prepare", prepare, (Callable, NoneType), "a function of a layer, or None")
    of_kind("ties", ties, Iterable, "a list of lists of names")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BadInput(f"device is {device!r}, expected one of torch, such as 'cpu' or 'cuda:0'") from error
    if isinstance(layers, Sequence) and len(layers) != schedule.setup.layers:
        raise BadInput(f"the model has {counted(len(layers), 'layer')}, the schedule is for {schedule.setup.layers}")
    bundles = None
    if inputs:
        if isinstance(layers, Mapping):
            layers = [layers[index] for index in range(schedule.setup.layers)]
        bundles = trace_bundles(layers, inputs, target, device)
        if not bundles[-1].is_single:
            raise BadInput(f"the last layer returns {bundles[-1]}, expected the scalar loss alone")
        if float_dtype is not None:
            bundles[1:-1] = [bundle.with_floats(float_dtype) for bundle in bundles[1:-1]]
    stages = stages_between(schedule, layers, rank, device, bundles, prepare, ties)
    stages.was_autocast = autocast_now(device)[0]
    return stages


def stages_between(
    schedule: ir.Schedule,
    layers: Sequence[Made] | Mapping[int, Made],
    rank: int,
    device: torch.device | str,
    bundles: Sequence[Bundle] | None,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    ties: Iterable[Sequence[str]] = (),
) -> Stages:
    """Return what `build_stages` does, where `bundles` (what enters each layer, and leaves the last) are known."""
    mine = schedule.stages_of(rank)
    if not mine:
        raise BadInput(f"rank {rank} has no stage: the schedule is for {counted(schedule.setup.devices, 'device')}")
    bundles = _with_tokens(schedule, bundles)
    built = {index: _built(layers[index], index) for stage in mine for index in range(*stage.layers)}
    whole = enumerate(layers) if isinstance(layers, Sequence) else layers.items()
    known = {str(index): made for index, made in whole if isinstance(made, nn.Module)}
    own = {str(index): layer for index, layer in built.items()}
    owner = {str(index): stage.device for stage in schedule.stages for index in range(*stage.layers)}
    tied = Ties([*ties, *shared(known | own)], owner, own, rank)
    if prepare is not None:
        tied.separate()
    built = {index: layer.to(device) for index, layer in built.items()}
    if prepare is not None:
        built = {index: _prepared(prepare, layer, index) for index, layer in built.items()}
    stages = Stages(nn.ModuleDict({str(index): layer for index, layer in built.items()}), bundles, tied, prepare)
    if prepare is not None:
        stages.left = {str(index) for index, layer in built.items() if not (trains(layer) or replicated(layer))}
    tied.unite(lambda layer: bool(replicated(layer)), dict(stages.module.items()))
    stages.update(executions(schedule, built, rank, device, bundles, (Meter(), Meter())))
    return stages


def executions(
    schedule: ir.Schedule,
    built: Mapping[int, nn.Module],
    rank: int,
    device: torch.device | str,
    bundles: Sequence[Bundle] | None,
    meters: tuple[Meter, Meter],
) -> dict[int, StageExecution]:
    """Return the stages of `rank` by number, of its layers by number."""
    found = {}
    with _whole(built.values()):
        for stage in schedule.stages_of(rank):
            run = [built[index] for index in range(*stage.layers)]
            _refuse_unsliceable(schedule, stage, run)
            if bundles is not None:
                first, end = stage.layers
                names = {index: f"rank {rank}: layer {index}" for index in range(first, end)}
                run = [
                    bundled(built[i], bundles[i], bundles[i + 1], name, packs=i + 1 == end) for i, name in names.items()
                ]
            found[stage.stage] = _execution(schedule, stage, run, device, meters)
    return found


@contextmanager
def _whole(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within: parameters are whole, as a stage must know them, to tell them from activations."""
    sharded = [part for module in modules for part in replicated(module)]
    for part in sharded:
        part.unshard()
    yield
    for part in sharded:
        part.reshard()


def wrap_stages(
    schedule: ir.Schedule,
    modules: Mapping[int, nn.Module],
    rank: int,
    device: torch.device | str,
    *,
    ties: Iterable[Sequence[str]] = (),
) -> Stages:
    """Return the stages of `rank` from whole stage modules by stage number.

    Offload and recompute then move a stage as a whole: a schedule that names part of its layers is refused. `Runner`
    needs its `boundary`, which is asked for the last layer of each stage. `ties` name parameters as in
    `("stage0.tokens.weight", "stage3.logits.weight")`.
    """
    of_kind("schedule", schedule, ir.Schedule, "a schedule, as load_schedule returns it")
    for index, module in of_kind("modules", modules, Mapping, "modules by the number of their stage").items():
        of_kind(f"modules[{index}]", module, nn.Module, "a torch.nn.Module")
    mine = schedule.stages_of(rank)
    if set(modules) != {stage.stage for stage in mine}:
        expected = [stage.stage for stage in mine]
        raise BadInput(f"rank {rank} has modules for stages {sorted(modules)}, the schedule expects {expected}")
    refuse_parts(schedule, rank)
    own = {f"stage{index}": module for index, module in modules.items()}
    tied = Ties([*ties, *shared(own)], {f"stage{stage.stage}": stage.device for stage in schedule.stages}, own, rank)
    stages = Stages(nn.ModuleDict({name: module.to(device) for name, module in own.items()}), None, tied)
    tied.unite(lambda module: bool(replicated(module)), dict(stages.module.items()))
    meters = Meter(), Meter()
    with _whole(modules.values()):
        for stage in mine:
            _refuse_unsliceable(schedule, stage, [modules[stage.stage]])
            nothing = [nn.Identity() for _ in range(stage.layers[1] - stage.layers[0] - 1)]
            stages[stage.stage] = _execution(schedule, stage, [*nothing, modules[stage.stage]], device, meters)
    return stages


def _prepared(prepare: Callable[[nn.Module], nn.Module], layer: nn.Module, index: int) -> nn.Module:
    try:
        prepared = prepare(layer)
    except RuntimeError as error:
        if "DistributedDataParallel is not needed" not in str(error):
            raise
        raise BadInput(
            f"layer {index} has no trained parameter, which DistributedDataParallel refuses: expected a `prepare` that "
            "returns such a layer as it is"
        ) from error
    of_kind(f"what prepare returns for layer {index}", prepared, nn.Module, "a torch.nn.Module")
    return prepared


def trains(layer: nn.Module) -> bool:
    """Whether a layer has a trained parameter."""
    return any(parameter.requires_grad for parameter in layer.parameters())


def refuse_parts(schedule: ir.Schedule, rank: int) -> None:
    """Raise BadInput where the schedule does something with a part of a stage, which is one module."""
    for op in (*schedule.devices[rank].compute, *schedule.devices[rank].d2h):
        whole = schedule.stages[op.stage].layers
        if tuple(getattr(op, "layers", whole)) != tuple(whole):
            raise BadInput(f"stage {op.stage} is one module, but the schedule has {op.id}: build it from its layers")
    for stage in schedule.stages_of(rank):
        if stage.selective_layers:
            raise BadInput(
                f"stage {stage.stage} is one module, but the schedule has selective recompute of single layers: build "
                "it from its layers"
            )


def _with_tokens(schedule: ir.Schedule, bundles: Sequence[Bundle] | None) -> Sequence[Bundle] | None:
    """Return the bundles with the length of the sequences, where the schedule cuts them."""
    units = schedule.setup.units
    if bundles is None or isinstance(units, msgspec.UnsetType):
        return bundles
    return [replace(bundle, tokens=units.tokens) for bundle in bundles]


def _refuse_unsliceable(schedule: ir.Schedule, stage: ir.Stage, layers: Sequence[nn.Module]) -> None:
    if schedule.setup.slices == 1:
        return
    for index, layer in enumerate(layers, stage.layers[0]):
        if not is_sliceable(layer):
            raise BadInput(
                f"layer {index} ({type(inner_layer(layer)).__name__}) does not say that it can be sliced, and the "
                f"schedule has {counted(schedule.setup.slices, 'slice')}: expected `forward(..., *, carry)`, or, "
                "where it looks at each token by itself, `sliceable = True`"
            )


def _built(made: Made, index: int) -> nn.Module:
    layer = layer_made(made, index)
    if any(map(is_lazy, (*layer.parameters(), *layer.buffers()))):
        raise BadInput(
            f"layer {index} has parameters without a shape (such as nn.LazyLinear's), expected one that was called"
        )
    return layer


def _execution(
    schedule: ir.Schedule,
    stage: ir.Stage,
    layers: Sequence[nn.Module],
    device: torch.device | str,
    meters: tuple[Meter, Meter],
) -> StageExecution:
    return StageExecution(
        layers,
        stage.layers[0],
        is_first=stage.stage == 0,
        is_last=stage.stage == len(schedule.stages) - 1,
        device=device,
        meter=meters[0],
        host_meter=meters[1],
        selective=stage.selective_layers,
    )
