"""Layers that say that they can be sliced: slices of a few tokens, held against the same tokens in one piece."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from optpipe_compiler.errors import BadInput
from runtime_torch import random_state
from runtime_torch.bundles import bundle_of
from runtime_torch.microbatch import Microbatch, Slice, entered, inner_layer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn

    from runtime_torch.bundles import Bundle
    from runtime_torch.execution import StageExecution

    Spans = Sequence[tuple[int, int]]

MOST_OFF = 0.05
"""So far, as a share of the largest number, slices may be off the whole by rounding."""


def hold_against_whole(
    stage: StageExecution,
    borders: tuple[Bundle, Bundle | None],
    x: Tensor,
    target: Tensor | None,
    gradient: Tensor | None,
    spans: Spans,
    unit: Microbatch,
) -> None:
    """Raise BadInput where slices of a stage have another result, or pass another gradient back, than all their tokens
    in one piece.

    `borders` are what enters and leaves the stage, with its tokens (None: the loss), `x`, `target` and `gradient` are
    of all tokens, `unit` is the microbatch that they are of. Where layers draw random numbers, which slices cannot draw
    alike, they are compared in evaluation: without dropout. Nothing is said of layers that draw there, too.
    """
    sources = [*random_state.everywhere(stage.device), *random_state.owned(_modules(stage.layers))]
    ways: tuple[AbstractContextManager[object], ...] = nullcontext(), _in_evaluation(stage.layers)
    for way in ways:
        before = random_state.now(sources)
        with way, _uncompiled():
            pairs = _compared(stage, borders, x, target, gradient, spans, unit)
        if random_state.has_changed(before):
            continue
        if any(a.shape != b.shape or (a - b).abs().max() > MOST_OFF * a.abs().max() for a, b in pairs):
            raise _unlike(stage)
        return


def _compared(
    stage: StageExecution,
    borders: tuple[Bundle, Bundle | None],
    x: Tensor,
    target: Tensor | None,
    gradient: Tensor | None,
    spans: Spans,
    unit: Microbatch,
) -> list[tuple[Tensor, Tensor]]:
    """Return results and gradients of the whole, cut, and of its slices in pairs."""
    entering, leaving = borders
    tokens, numbers = spans[-1][1], range(len(spans))
    with entered(replace(unit, tokens=tokens, slice=None)):
        result = stage.forward(0, x, target)
        passed = stage.passed_back(0, gradient)
        stage.discard(0)
    starts = tuple(begin for begin, _ in spans)
    units = [
        replace(unit, tokens=end - begin, slice=Slice(0, number, starts, (end - begin) / tokens, target))
        for number, (begin, end) in enumerate(spans)
    ]
    xs, targets, gradients = entering.slices(x, spans), None, None
    if target is not None:
        targets = replace(bundle_of(target, "the target"), tokens=tokens).slices(target, spans)
    if leaving is not None and gradient is not None:
        gradients = leaving.slices(gradient, spans)
    if xs is None or (gradients is None and leaving is not None):
        raise _unlike(stage)
    results: list[Tensor] = []
    for number, one in enumerate(units):
        with entered(one):
            wanted = None if targets is None else targets[number]
            results.append(stage.forward(number, xs[number], wanted, part=one.slice))
    all_passed: list[Tensor | None] = [None for _ in numbers]
    for number in reversed(numbers):
        with entered(units[number]):
            all_passed[number] = stage.passed_back(number, None if gradients is None else gradients[number])
    for number in numbers:
        stage.discard(number)
    pairs = [(result, torch.stack(results).sum())] if leaving is None else _pairs(leaving, result, results, spans)
    if passed is None:
        return pairs
    entry = replace(bundle_of(passed, "its first layer"), tokens=tokens) if stage.is_first else entering
    return pairs + _pairs(entry, passed, all_passed, spans)


def _pairs(border: Bundle, whole: Tensor, found: Sequence[Tensor | None], spans: Spans) -> list[tuple[Tensor, Tensor]]:
    """Return the floats of tokens that cross a border in each slice: cut from the whole, and as they were found."""
    pairs = []
    for (begin, end), cut, own in zip(spans, border.slices(whole, spans) or (), found, strict=False):
        if own is not None:
            slice_of = border.of(None, end - begin)
            alike = zip(slice_of.parts_of(cut), slice_of.parts_of(own), strict=True)
            of_tokens = [one for one in alike if one[0].dim() > 1 and one[0].shape[1] == end - begin]
            pairs += [(a.float(), b.float()) for a, b in of_tokens if a.is_floating_point()]
    return pairs


def _unlike(stage: StageExecution) -> BadInput:
    kinds = ", ".join(dict.fromkeys(type(inner_layer(layer)).__name__ for layer in stage.layers))
    who = f"layer {stage.first_layer} ({kinds}) says"
    if len(stage.layers) > 1:
        who = f"one of the layers {stage.first_layer} to {stage.end_layer - 1} ({kinds}) says wrongly"
    return BadInput(
        f"{who} that it can be sliced, and its slices have another result or gradient than the microbatch in one "
        "piece: expected a layer that looks at each token by itself, or at earlier ones by `carry.attend` alone, and "
        "whose loss is as docs/LOOP.md says of slices"
    )


@contextmanager
def _in_evaluation(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Within: layers are in evaluation, without dropout."""
    modes = [(module, module.training) for module in _modules(layers)]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _uncompiled() -> AbstractContextManager[object]:
    """Within: what torch.compile has made runs as it was written, lest it be compiled for lengths that no step has."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _modules(layers: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for layer in layers for module in layer.modules()]
