"""Schedules of a tiny real GPT for the runtime's tests, legal by construction, with bytes measured on its layers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec
from small_schedules import Builder, Shape

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Model, Profile, Sliceable

if TYPE_CHECKING:
    from collections.abc import Iterable

MODEL = Model(
    builder="gpt",
    config={"hidden": 16, "heads": 2, "layers": 6, "vocab": 256},
    microbatch_size=2,
    sequence_length=8,
    seed=3,
)
TEXT = Path(__file__)


def tiny_profile(
    model: Model = MODEL, devices: int = 2, ms: int = 1, cuts: tuple[int, ...] = (), lengths: Iterable[int] = ()
) -> Profile:
    """Costs of the tiny model: made-up times of `ms` milliseconds, bytes measured where a device alone runs; with
    `cuts` enough for each of these slices, and with `lengths` for microbatches of so many tokens."""
    import torch

    from optpipe_torch.models import known as models
    from runtime_torch.execution import StageExecution

    count, bundles = models.layer_count(model), models.bundles(model)
    on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs, target = (x.to(on) for x in models.batch(model, bytes(range(256)), torch.Generator().manual_seed(0), 1))
    layers = []
    for index in range(count):
        stage = StageExecution(
            [layer.to(on) for layer in models.build(model, range(index, index + 1))],
            index,
            is_first=index == 0,
            is_last=index == count - 1,
            device=on,
        )
        x = inputs if index == 0 else _random(*bundles[index].boundary).to(on)
        wanted = target if stage.is_last else None
        gradient = None if stage.is_last else _random(*bundles[index + 1].boundary).to(on)
        stage.forward(0, x, wanted)
        saved = stage.saved_bytes(0)
        stage.backward_input(0, gradient)
        captured = stage.captured_bytes(0)
        residue = stage.saved_bytes(0) + captured
        cut = [0, 0, 0, 0] if not cuts else _in_slices(stage, cuts, x, wanted, gradient)
        parts = [saved, 0, residue, captured], cut, *(_shorter(stage, n, x, wanted, gradient) for n in lengths)
        saved, _, residue, captured = map(max, zip(*parts, strict=True))
        layers.append(
            Layer(
                name=f"layer{index}",
                forward_ns=ms * 10**6,
                backward_input_ns=ms * 10**6,
                backward_weight_ns=ms * 10**6,
                saved_bytes=saved,
                residue_bytes=residue,
                captured_bytes=captured,
                checkpoint_bytes=x.nbytes,
                output_bytes=0 if gradient is None else gradient.nbytes,
                slices=Sliceable(carry_bytes=cut[1]) if cuts else None,
            )
        )
    machine = Machine(
        devices=devices,
        p2p=[P2P(latency_ns=1000)],
        links=[Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)],
    )
    return Profile(name="tiny", machine=machine, model=model, layers=layers)


def _in_slices(stage, cuts, x, target, gradient):
    """Saved, residue and captured bytes and the carry that are enough for every slice, when scaled to its tokens: not
    all of them grow with the tokens."""
    from runtime_torch.microbatch import Slice

    spans = list(pairwise(cuts))
    found = []
    for index, (begin, end) in enumerate(spans):
        part = Slice(9, index, cuts[:-1], (end - begin) / cuts[-1], target)
        here = None if target is None else target[:, begin:end]
        stage.forward(10 + index, x[:, begin:end], here, part=part)
        found.append([stage.saved_bytes(10 + index), stage.carry_bytes(10 + index)])
    for index, (begin, end) in reversed(list(enumerate(spans))):
        stage.backward_input(10 + index, None if gradient is None else gradient[:, begin:end])
        captured = stage.captured_bytes(10 + index)
        found[index] += [captured + stage.saved_bytes(10 + index), captured]
    scaled = [[-(-size * cuts[-1] // (b - a)) for size in sizes] for sizes, (a, b) in zip(found, spans, strict=True)]
    return [max(sizes) for sizes in zip(*scaled, strict=True)]


def _shorter(stage, length, x, target, gradient):
    """The same figures that are enough for a whole microbatch of so many tokens."""
    whole = x.shape[1]
    stage.forward(20, x[:, :length], None if target is None else target[:, :length])
    saved = stage.saved_bytes(20)
    stage.backward_input(20, None if gradient is None else gradient[:, :length])
    captured = stage.captured_bytes(20)
    sizes = saved, 0, stage.saved_bytes(20) + captured, captured
    return [-(-size * whole // length) for size in sizes]


def _random(size, dtype):
    import torch

    return torch.randn(size).to(dtype)


def schedule(shape: Shape, seed: int = 0, *, model: Model | None = MODEL) -> ir.Schedule:
    """A legal schedule of the tiny model (or of the same costs without a model, to be rehearsed)."""
    layers = shape.layers_per_stage * len(shape.placement) - 2
    sized = msgspec.structs.replace(model or MODEL, config={**MODEL.config, "layers": layers})
    cuts = shape.cuts[0] if shape.cuts else ()
    profile = tiny_profile(sized, shape.devices, cuts=cuts, lengths=[each[-1] for each in shape.cuts[1:]])
    built = Builder(shape, profile, Random(seed)).build()
    return ir.seal(msgspec.structs.replace(built, model=None if model is None else sized))


def promise_exactly(plan: ir.Schedule) -> ir.Schedule:
    """The same schedule with the smallest promises that the judge accepts."""
    from optpipe_compiler.verify.causality import Causality, happens_before
    from optpipe_compiler.verify.memory import Memory
    from optpipe_compiler.verify.placed import PlacedOps

    judged = PlacedOps(plan)
    clocks = happens_before(judged)
    assert isinstance(clocks, Causality)
    memory = Memory(judged, clocks)
    devices = [
        msgspec.structs.replace(
            device,
            peak_bytes=memory.worst_on_device(device.device).held,
            host_bytes=memory.worst_on_host(device.device).held,
        )
        for device in plan.devices
    ]
    return ir.seal(msgspec.structs.replace(plan, devices=devices))


def lossy_layers(layers: int, hidden: int):
    """A model that cannot be copied to the host: offloads fail on the rank of its second half."""
    from torch import nn

    from runtime_torch import store

    class Head(nn.Linear):
        def forward(self, x, target):
            return super().forward(x).sum()

    original = store.SavedTensorStore.offload

    def offload(self, first, end):
        if first >= layers // 2:
            raise OSError("no space for a copy")
        original(self, first, end)

    store.SavedTensorStore.offload = offload
    return [nn.Embedding(256, hidden), *(nn.Linear(hidden, hidden) for _ in range(layers - 2)), Head(hidden, 1)]
