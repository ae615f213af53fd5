"""Times and bytes of layers, measured on `StageExecution`: the path that the replay runs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from optpipe_torch.models import known as models
from optpipe_torch.models.user_functions import OWN
from optpipe_torch.profiler.records import TIMED, LayerBytes, Samples, SelectiveBytes
from runtime_torch.bundles import bundle_of, bundled
from runtime_torch.execution import StageExecution
from runtime_torch.meter import GPU_BLOCK_BYTES
from runtime_torch.microbatch import inner_layer, takes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optpipe_compiler.documents.profile import Model
    from optpipe_torch.profiler.timer import Timer
    from runtime_torch.bundles import Bundle

WARM_UP = 2
"""Rounds before the samples: allocator, caches, gradients' buffers."""
LEAST, MOST_S = 3, 40.0
"""Rounds of samples that are taken in any case, and seconds after which there are no more."""


@dataclass
class Bench:
    """A stage with what it is fed."""

    stage: StageExecution
    x: Tensor
    target: Tensor | None
    gradient: Tensor | None

    @property
    def whole(self) -> tuple[int, int]:
        """All layers of the stage."""
        return self.stage.first_layer, self.stage.end_layer

    def forward(self, microbatch: int, *, recomputed: bool = False) -> Tensor:
        """F, of which every layer or none will be recomputed."""
        return self.stage.forward(microbatch, self.x, self.target, [self.whole] if recomputed else ())


class Benches:
    """Builds stages of the model with inputs, targets and gradients such as they meet in training.

    What enters a layer is what the layers before the first of its kind make of one microbatch; gradients of what
    leaves a user's layers are random.
    """

    def __init__(self, model: Model, data: bytes, device: torch.device | str = "cpu") -> None:
        self.model = model
        self.device = torch.device(device)
        self._bundles = [replace(bundle, tokens=model.sequence_length) for bundle in models.bundles(model)]
        self.head = len(self._bundles) - 2
        self.first_trained = models.first_trained(model)
        """The first layer that trains: in one stage with those before it, all of its backward is in W."""
        inputs, target = models.batches(model, data)(torch.Generator().manual_seed(model.seed), 1)
        self.inputs = _cut_from_a_batch(self._bundles[0].carry(inputs).to(device))
        self.target = _cut_from_a_batch(target.to(device))
        self._names = models.layer_names(model)
        self._entering = self._entering_kinds()
        self._gradients: dict[Bundle, Tensor] = {}
        if model.builder in OWN:
            self._pass_back()

    def _pass_back(self) -> None:
        """Find the gradients of what leaves the layers before the head, from the loss through all parts of the head."""
        for index in reversed(range(len(self._names))):
            if not self._names[index].startswith("head"):
                return
            bench = self.stage(index, index + 1)
            bench.forward(0)
            gradient = bench.stage.backward(0, bench.gradient)
            assert gradient is not None
            self._gradients[self._bundles[index]] = gradient

    @torch.no_grad()
    def _entering_kinds(self) -> dict[str, Tensor]:
        """Return what enters the first layer of each kind; in models of our own, blocks pass on what they get."""
        entering: dict[str, Tensor] = {}
        x = self.inputs
        for index, layer in self._in_turn():
            entering.setdefault(self._names[index], x)
            if layer is not None:
                by_name = {"target": self.target} if takes(layer, "target") else {}
                x = self._bundled(index, layer.to(self.device))(x, **by_name)
                layer.to("cpu")  # one at a time on a GPU
        return entering | {self._names[self.head]: x}

    def _in_turn(self) -> Iterator[tuple[int, nn.Module | None]]:
        """Yield the layers before the last, one at a time; None for blocks of models of our own, and their halves."""
        if self.model.builder not in OWN:
            yield from islice(enumerate(models.each(self.model, None, self.device)), self.head)
            return
        for index, name in enumerate(self._names[: self.head]):
            of_block = name.partition(".")[0] == "block"
            yield index, None if of_block else next(models.each(self.model, range(index, index + 1), self.device))

    def _bundled(self, index: int, layer: nn.Module, *, packs: bool = True) -> nn.Module:
        return bundled(layer, self._bundles[index], self._bundles[index + 1], packs=packs)

    def passes_several(self, index: int) -> bool:
        """Return whether several tensors leave a layer."""
        return not self._bundles[index + 1].is_single

    @property
    def message_bytes(self) -> int:
        """Bytes of the largest tensor between two layers."""
        borders = [bundle.boundary for bundle in self._bundles[1:-1]]
        return max((math.prod(shape) * dtype.itemsize for shape, dtype in borders), default=1)

    def entering(self, index: int) -> Tensor:
        """Return what enters a layer."""
        return self._entering[self._names[index]]

    def gradient(self, index: int) -> Tensor | None:
        """Return the gradient of what leaves a layer, of floats only; None of the loss."""
        if index == self.head:
            return None
        bundle = self._bundles[index + 1]
        if bundle not in self._gradients:
            generator = torch.Generator().manual_seed(index)
            gradient = bundle.carry(
                [
                    torch.randn(shape, generator=generator).mul(1e-3).to(dtype) if dtype.is_floating_point else None
                    for shape, dtype in bundle.parts
                ]
            )
            self._gradients[bundle] = gradient.to(self.device)
        return self._gradients[bundle]

    def borders(self, index: int) -> tuple[Bundle, Bundle | None]:
        """Return what enters layer `index` and leaves it; None: the loss."""
        return self._bundles[index], None if index == self.head else self._bundles[index + 1]

    def cut(
        self, border: int | None, tensor: Tensor | None, spans: Sequence[tuple[int, int]]
    ) -> list[Tensor | None] | None:
        """Return the slices of what enters layer `border` (None: of the target); None where it has no tokens to cut."""
        if tensor is None or border == self.head + 1:
            return [None for _ in spans]
        bundle = bundle_of(tensor, "the target") if border is None else self._bundles[border]
        found = replace(bundle, tokens=self.model.sequence_length).slices(tensor, spans)
        return None if found is None else [*found]

    def stage(self, first: int, end: int, *, selective: bool = False) -> Bench:
        """Return the stage of layers [first, end), with gradient buffers; all or none with selective recompute."""
        is_last = end == self.head + 1
        built = [layer.to(self.device) for layer in models.build(self.model, range(first, end), self.device)]
        layers = [self._bundled(index, layer, packs=index + 1 == end) for index, layer in enumerate(built, first)]
        chosen = range(first, end) if selective else ()
        stage = StageExecution(
            layers,
            first,
            is_first=first == 0,
            is_last=is_last,
            device=self.device,
            selective=chosen,
            block_bytes=GPU_BLOCK_BYTES if self.device.type == "cuda" else 1,
        )
        for layer in stage.layers:
            for parameter in layer.parameters():
                parameter.grad = torch.zeros_like(parameter)
        bench = Bench(stage, self.entering(first), self.target, self.gradient(end - 1))
        if selective or any(True for layer in stage.layers for _ in layer.buffers()):
            with stage.trying():  # the bytes of buffers that change count, and what changes is not made again
                bench.forward(0)
                stage.discard(0)
        return bench


def _cut_from_a_batch(microbatch: Tensor) -> Tensor:
    """As a step has it: a forward then makes a copy of its own, which takes memory."""
    return torch.cat([microbatch, microbatch])[: len(microbatch)]


def bookkeeping_bench(device: torch.device) -> Bench:
    """Return a stage whose layer does next to nothing: what its ops take is the overhead of an op."""
    x = torch.ones(1, 1, device=device)
    stage = StageExecution([nn.Linear(1, 1, device=device)], 1, is_first=False, is_last=False, device=device)
    return Bench(stage, x, None, x)


# -- times


def time_ops(
    timer: Timer, benches: Sequence[Bench], samples: int, times: Samples, *, lead: bool = False
) -> Iterator[float]:
    """Time every op on equal stages in turn into `times`, forwards first and backwards in reverse, as in one stage.

    Going round several stages keeps their weights and activations from being warmer in the caches than in a real run.
    With `lead`, the time is the device's alone, however long the host takes to issue an op (`Timer.lead`).
    Yield the part that is done, 0 to 1, after each round.
    """
    times.update({op: [] for op in TIMED})
    rounds = WARM_UP + max(1, -(-samples // len(benches)))
    begin = time.monotonic()
    for index in range(rounds):
        if index >= WARM_UP + LEAST and time.monotonic() - begin > MOST_S:
            return
        into = times if index >= WARM_UP else {op: [] for op in times}
        if lead:
            timer.lead()
        _recompute_round(timer, benches, into)
        time_round(timer, benches, into, split=True)
        time_round(timer, benches, into, split=False)
        timer.settle()
        yield (index + 1) / rounds


def _recompute_round(timer: Timer, benches: Sequence[Bench], times: Samples) -> None:
    """The first of a round: what it does not time gives the host the lead that it has in a run."""
    for bench in benches:
        bench.forward(0, recomputed=True)
    for bench in reversed(benches):
        with timer.timed(times["recompute"]):
            bench.stage.recompute(0, bench.whole)
        bench.stage.backward(0, bench.gradient)


def time_round(timer: Timer, benches: Sequence[Bench], times: Mapping[str, list[int]], *, split: bool) -> None:
    """Time forwards and backwards of equal stages, these in halves or fused, into `times` by op."""
    for bench in benches:
        with timer.timed(times["forward"]):
            bench.forward(0)
    for bench in reversed(benches):
        with timer.timed(times["backward_input" if split else "backward"]):
            (bench.stage.backward_input if split else bench.stage.backward)(0, bench.gradient)
    for bench in reversed(benches) if split else ():
        with timer.timed(times["backward_weight"]):
            bench.stage.backward_weight(0)


# -- bytes


def layer_bytes(benches: Benches, index: int) -> LayerBytes:
    """Measure what one layer keeps, as a stage of its own; transient bytes are left empty.

    A layer that saves less than its input (a mean) is said to save as much: a profile has no smaller saved bytes.
    """
    bench = benches.stage(index, index + 1)
    output = bench.forward(0)
    saved, passes_back = bench.stage.saved_bytes(0), bench.stage.passes_back(0)
    bench.stage.backward_input(0, bench.gradient)
    captured = bench.stage.captured_bytes(0)
    residue = bench.stage.saved_bytes(0) + captured
    bench.stage.backward_weight(0)
    bench.forward(1, recomputed=True)
    checkpoint = bench.stage.checkpoint_bytes(1)
    (layer,) = bench.stage.layers
    tensors = [*layer.parameters(), *layer.buffers()]
    return LayerBytes(
        saved=max(saved, checkpoint),
        residue=residue,
        captured=captured,
        checkpoint=checkpoint,
        output=0 if bench.stage.is_last else bench.stage.occupied([output.nbytes]),
        static=bench.stage.occupied(
            size for one in tensors for size in models.kept_bytes(inner_layer(layer), one, one.itemsize)
        ),
        own_saved=saved,
        changing=max(0, checkpoint - bench.stage.occupied([bench.x.nbytes])),
        passes_back=passes_back,
    )


def selective_bytes(timer: Timer, benches: Benches, index: int, plain: LayerBytes) -> SelectiveBytes | None:
    """Measure what one layer keeps with selective recompute, beside what it keeps without (of a stage of its own); None
    where that is no less."""
    bench = benches.stage(index, index + 1, selective=True)
    bench.forward(0)
    saved = bench.stage.saved_bytes(0)
    bench.stage.backward_input(0, bench.gradient)
    captured = bench.stage.captured_bytes(0) + bench.stage.result_bytes(0)
    bench.stage.backward_weight(0)
    if max(saved, plain.checkpoint) >= plain.saved:
        return None
    light = replace(plain, saved=max(saved, plain.checkpoint), captured=captured)
    found = transient_bytes(timer, benches, index, index + 1, [light], selective=True)
    more = max(0, *(found[op] - plain.transient[op] for op in ("backward_input", "backward")))
    return SelectiveBytes(light.saved, captured, more)


def time_selective(timer: Timer, bench: Bench, samples: int) -> list[int]:
    """Time what selective recompute adds to a backward."""
    took: list[int] = []
    for number in range(WARM_UP + samples):
        bench.forward(0)
        with timer.timed(took if number >= WARM_UP else []):
            bench.stage.make_again(0)
        bench.stage.backward(0, bench.gradient)
        timer.settle()
    return took


@dataclass(frozen=True)
class PairBytes:
    """By how many bytes two layers in a row keep more as one stage than each of them alone; negative: less."""

    saved: int
    residue: int
    captured: int


def pair_bytes(benches: Benches, first: int) -> PairBytes:
    """Measure what layers `first` and `first + 1` keep together, and each alone.

    What both save of what is handed on is there once. More is kept where one hands on a part of a larger tensor, which
    a stage of its own gets, and gives back, without the rest.
    """
    saved, residue, captured = [], [], []
    for begin, end in ((first, first + 1), (first + 1, first + 2), (first, first + 2)):
        bench = benches.stage(begin, end)
        bench.forward(0)
        saved.append(bench.stage.saved_bytes(0))
        bench.stage.backward_input(0, bench.gradient)
        captured.append(bench.stage.captured_bytes(0))
        residue.append(bench.stage.saved_bytes(0) + captured[-1])
    return PairBytes(*(both - one - other for one, other, both in (saved, residue, captured)))


def transient_bytes(
    timer: Timer, benches: Benches, first: int, end: int, layers: Sequence[LayerBytes], *, selective: bool = False
) -> dict[str, int]:
    """Return per op the bytes by which the stage [first, end) exceeds the memory table of docs/IR.md without them.

    The allocator's own counts are taken (`Timer.peaks`); `layers` are the bytes of the stage's layers. Stages of
    several layers show the gradients and outputs between layers, too, which no other line of the table counts.
    Backwards of what was recomputed are measured, too: they free some of it later.
    """
    bench = benches.stage(first, end, selective=selective)
    incoming = 0 if bench.stage.is_first else bench.x.nbytes
    captured = sum(layer.captured for layer in layers)
    saved = sum(layer.saved_after(before) for before, layer in zip((None, *layers[:-1]), layers, strict=True))
    peak = timer.peaks(
        {
            "forward": lambda: bench.forward(0),
            "backward_input": lambda: bench.stage.backward_input(0, bench.gradient),
            "backward_weight": lambda: bench.stage.backward_weight(0),
            "second forward": lambda: bench.forward(1),
            "backward": lambda: bench.stage.backward(1, bench.gradient),
            "third forward": lambda: bench.forward(2, recomputed=True),
            "recompute": lambda: bench.stage.recompute(2, bench.whole),
            "backward of recomputed": lambda: bench.stage.backward(2, bench.gradient),
            "fourth forward": lambda: bench.forward(3, recomputed=True),
            "second recompute": lambda: bench.stage.recompute(3, bench.whole),
            "backward_input of recomputed": lambda: bench.stage.backward_input(3, bench.gradient),
            "backward_weight of recomputed": lambda: bench.stage.backward_weight(3),
        }
    )
    for op in ("backward", "backward_input", "backward_weight"):
        peak[op] = max(peak[op], peak[f"{op} of recomputed"])
    return {
        "forward": max(
            0, peak["forward"] - saved - layers[-1].output, peak["recompute"] - saved + layers[0].checkpoint
        ),
        "backward_input": max(0, peak["backward_input"] - incoming - captured),
        "backward_weight": max(0, peak["backward_weight"]),
        "backward": max(0, peak["backward"] - incoming),
    }
