"""What is compared: torch's own pipeline schedules with three ways to treat activations, and plans in the replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from bench.stock import llama
from bench.stock.offload import HostPool, Offloaded
from runtime_torch import Runner
from runtime_torch.bundles import trace_bundles
from runtime_torch.messages import Mailbox
from runtime_torch.replay import Replay
from runtime_torch.stages import stages_between
from runtime_torch.streams import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from optpipe_compiler.documents import ir
    from optpipe_compiler.model.placement import Layout

SCHEDULES: dict[str, tuple[str, int, str]] = {
    "1F1B": ("linear", 1, "Schedule1F1B"),
    "interleaved ZB": ("loop", 2, "ScheduleInterleavedZeroBubble"),
    "ZBV": ("v", 2, "ScheduleZBVZeroBubble"),
}
"""Placement, stages per device, and the class in torch.distributed.pipelining, by name."""
TREATMENTS = ("plain", "checkpoint", "offload")
"""What becomes of activations: kept, recomputed layer by layer in the backward, on the host until the backward."""


@dataclass(frozen=True)
class Setting:
    """What all ways share."""

    rank: int
    devices: int
    microbatches: int
    device: torch.device
    microbatch_size: int
    config: Mapping[str, Any]
    """Of llama.layers."""
    _made: dict[int, nn.Module] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tokens of one microbatch."""
        return self.microbatch_size, self.config["sequence"]

    def layer(self, index: int) -> nn.Module:
        """Return this process' layer of a number, which all ways use: a GPU has no room for one each."""
        if index not in self._made:
            self._made[index] = self.build(index)
        return self._made[index]

    def build(self, index: int) -> nn.Module:
        """Make a layer on this rank's device."""
        with self.device:
            made: nn.Module = llama.layers(**self.config)[index]()
        return made


class Way(Protocol):
    """One way to take a step: gradients of the mean loss over the microbatches are added to the parameters'."""

    def layers(self) -> dict[int, nn.Module]:
        """This rank's layers by number."""
        ...

    def step(self, tokens: Tensor, target: Tensor) -> None:
        """Take a step."""
        ...

    def watched(self) -> tuple[Callable[[Tensor, Tensor], None], int]:
        """Return the step whose memory is watched, and the bytes of its first call that stand for the host's."""
        ...


class Checkpointed(nn.Module):
    """A layer that keeps its input alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """As the layer."""
        return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]


class Stock:
    """torch's schedule. Blocks are checkpointed or offloaded one by one; embedding and head are left as they are."""

    def __init__(self, setting: Setting, name: str, treatment: str, layout: Layout) -> None:
        pool = HostPool(pinned=setting.device.type == "cuda")
        self._layers: dict[int, nn.Module] = {}
        stages, count = [], layout.stages
        for stage, owner in enumerate(layout.device_of):
            if owner != setting.rank:
                continue
            within = range(layout.cuts[stage], layout.cuts[stage + 1])
            self._layers |= {index: setting.layer(index) for index in within}
            run = [_treated(decoder_layer, treatment, pool) for decoder_layer in _whole(self._layers, within, setting)]
            stages.append(
                pipelining.PipelineStage(
                    nn.Sequential(*run), stage, count, setting.device, **_ends(setting, stage, count)
                )
            )
        made = getattr(pipelining, SCHEDULES[name][2])
        single = SCHEDULES[name][1] == 1
        self._schedule = made(stages[0] if single else stages, setting.microbatches, loss_fn=llama.loss)
        self._first, self._last = 0 in self._layers, len(llama.layers(**setting.config)) - 1 in self._layers

    def layers(self) -> dict[int, nn.Module]:
        """This rank's layers by number."""
        return self._layers

    def step(self, tokens: Tensor, target: Tensor) -> None:
        """Take a step; gradients are divided by the number of microbatches, as torch does unless told otherwise."""
        last: dict[str, Any] = {"target": target, "losses": []} if self._last else {}
        self._schedule.step(*((tokens,) if self._first else ()), **last, return_outputs=False)

    def watched(self) -> tuple[Callable[[Tensor, Tensor], None], int]:
        """The step itself; its host buffers are numpy's."""
        return self.step, 0


def _whole(layers: Mapping[int, nn.Module], within: range, setting: Setting) -> Iterator[nn.Module]:
    """The layers of a stage, those of a decoder layer as one module."""
    ends = dict(llama.decoder_layers(**setting.config))
    index = within.start
    while index < within.stop:
        end = ends.get(index, index + 1)
        yield DecoderLayer(*(layers[i] for i in range(index, end))) if index in ends else layers[index]
        index = end


class DecoderLayer(nn.Sequential):
    """What stock choices checkpoint or offload as one."""


def _treated(layer: nn.Module, treatment: str, pool: HostPool) -> nn.Module:
    if not isinstance(layer, DecoderLayer) or treatment == "plain":
        return layer
    return Checkpointed(layer) if treatment == "checkpoint" else Offloaded(layer, pool)


def _ends(setting: Setting, stage: int, count: int) -> dict[str, Tensor]:
    """Return what enters and leaves a stage: torch then asks no other rank for it."""
    config, shape = setting.config, setting.shape
    tokens = torch.zeros(shape, dtype=torch.int64, device=setting.device)
    dtype = getattr(torch, config["dtype"])
    hidden = torch.zeros(*shape, config["hidden"], dtype=dtype, device=setting.device, requires_grad=True)
    logits = torch.zeros(*shape, config["vocab"], dtype=dtype, device=setting.device)
    return {"input_args": hidden if stage else tokens, "output_args": logits if stage == count - 1 else hidden}


class Planned:
    """A schedule file in the replay."""

    def __init__(self, setting: Setting, schedule: ir.Schedule) -> None:
        makers = llama.layers(**setting.config)
        tokens = torch.zeros(setting.shape, dtype=torch.int64)
        self._setting, self._schedule = setting, schedule
        bundles = trace_bundles(makers, [tokens], tokens)
        mine = {index: setting.layer(index) for s in schedule.stages_of(setting.rank) for index in range(*s.layers)}
        self._stages = stages_between(schedule, mine, setting.rank, setting.device, bundles)
        self._runner = Runner(schedule, self._stages)

    def layers(self) -> dict[int, nn.Module]:
        """This rank's layers by number."""
        return {int(index): layer for index, layer in self._stages.module.items()}

    def step(self, tokens: Tensor, target: Tensor) -> None:
        """Take a step."""
        self._runner.step(tokens, target=target)

    def watched(self) -> tuple[Callable[[Tensor, Tensor], None], int]:
        """The replay by itself; on a CPU its copies are made in the thread that can be watched."""
        if self._setting.device.type == "cuda":
            return self.step, 0
        plan, bundles = self._schedule.devices[self._setting.rank], self._stages.bundles
        assert bundles is not None
        boundaries = [bundle.boundary for bundle in bundles[1:]]
        replay = Replay(
            self._schedule,
            self._setting.rank,
            self._stages,
            lambda stage, _: boundaries[self._schedule.stages[stage].layers[1] - 1],
            Mailbox(None, next(iter(self._stages.values())).meter),
            backend=Backend(),
        )

        def step(tokens: Tensor, target: Tensor) -> None:
            count = self._setting.microbatches
            replay.step(tokens.tensor_split(count), target.tensor_split(count))

        return step, plan.host_bytes if plan.d2h else 0


def gradients(way: Way) -> dict[str, Tensor]:
    """Return this rank's gradients by layer and parameter."""
    return {
        f"{index}.{name}": parameter.grad
        for index, layer in way.layers().items()
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def reference(setting: Setting, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all layers from the model without a pipeline, one microbatch after another."""
    count = len(llama.layers(**setting.config))
    model = {index: setting.build(index) for index in range(count)}
    for inputs, wanted in zip(
        tokens.tensor_split(setting.microbatches), target.tensor_split(setting.microbatches), strict=True
    ):
        x = inputs
        for index in range(count - 1):
            x = model[index](x)
        (model[count - 1](x, wanted) / setting.microbatches).backward()
    return {
        f"{index}.{name}": parameter.grad
        for index in model
        for name, parameter in model[index].named_parameters()
        if parameter.grad is not None
    }
