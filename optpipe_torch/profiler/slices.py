"""What a layer costs that runs slice by slice: measured on the path of the replay, on equal slices of one microbatch.

The time of an op is taken for a line in the tokens of its slice, and, for attention, in the pairs of tokens that it
looks at: the first and the last slice have as many tokens and not as many pairs, so their difference is attention. A
slice between them says how far off that is. What all slices take together beyond the whole is their overhead.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

from optpipe_compiler.documents.profile import OPS
from optpipe_compiler.errors import BadInput
from optpipe_torch.profiler.layers import LEAST, MOST_S, WARM_UP, time_round
from optpipe_torch.profiler.records import SlicedBytes, sample_name, slice_spans
from runtime_torch.microbatch import Microbatch, Slice, entered
from runtime_torch.pieces import hold_against_whole
from runtime_torch.slices import is_sliceable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from optpipe_torch.profiler.layers import Bench, Benches
    from optpipe_torch.profiler.records import LayerBytes, Samples, SelectiveBytes
    from optpipe_torch.profiler.timer import Timer


SHORTEST = 32
"""The short slice has this part of the tokens: `--slices auto` tries no more slices than that (plan/slices.py)."""


@dataclass
class SlicedBench:
    """A stage with the slices of one microbatch that it is fed."""

    bench: Bench
    spans: list[tuple[int, int]]
    xs: list[Tensor]
    targets: list[Tensor | None]
    gradients: list[Tensor | None]
    whole_target: Tensor | None

    @property
    def tokens(self) -> int:
        """Of the microbatch."""
        return self.spans[-1][1]

    def forward(self, index: int) -> object:
        """F of a slice."""
        with self._entered(index) as part:
            return self.bench.stage.forward(index, self.xs[index], self.targets[index], part=part)

    def backward(self, index: int) -> object:
        """B."""
        with self._entered(index):
            return self.bench.stage.backward(index, self.gradients[index])

    def backward_input(self, index: int) -> object:
        """I."""
        with self._entered(index):
            return self.bench.stage.backward_input(index, self.gradients[index])

    def backward_weight(self, index: int) -> None:
        """W."""
        self.bench.stage.backward_weight(index)

    @contextmanager
    def _entered(self, index: int) -> Iterator[Slice]:
        begin, end = self.spans[index]
        starts = tuple(start for start, _ in self.spans)
        part = Slice(0, index, starts, (end - begin) / self.tokens, self.whole_target)
        with entered(Microbatch(tokens=end - begin, slice=part)):
            yield part


def sliced_bench(
    benches: Benches, index: int, spans: list[tuple[int, int]] | None = None, *, selective: bool = False
) -> SlicedBench | None:
    """Return one layer on slices (absent: those that are timed); None where it does not say that it can be sliced, or
    has no tokens to cut."""
    bench = benches.stage(index, index + 1, selective=selective)
    (layer,) = bench.stage.layers
    spans = slice_spans(benches.model.sequence_length) if spans is None else spans
    if not is_sliceable(layer) or not spans:
        return None
    targets = benches.cut(None, bench.target, spans)
    xs, gradients = benches.cut(index, bench.x, spans), benches.cut(index + 1, bench.gradient, spans)
    if xs is None or gradients is None or targets is None:
        return None
    # as they come from the stage behind: a view would hold the gradient of all slices
    own = [None if gradient is None else gradient.clone() for gradient in gradients]
    found = SlicedBench(bench, spans, [x for x in xs if x is not None], targets, own, bench.target)
    try:
        found.forward(0)
    except BadInput:  # the first layer of a model, with weights below its attention
        return None
    if 0 < index == benches.first_trained and bench.stage.carry_bytes(0):  # the same behind layers that do not train
        return None
    bench.stage.discard(0)
    return found


def slice_bytes(timer: Timer, benches: Benches, index: int, sizes: LayerBytes) -> None:
    """Measure what slices of a layer keep into `sizes`, and need while an op runs; nothing where it cannot be sliced.

    Not all that a layer keeps grows with its tokens; its bytes become such that those of a slice, scaled, are enough.
    Where they would be more than twice what the whole saves, it is not said to be one that can be sliced: each slice
    has functions of weights, as of weight norm, which a profile cannot tell from activations.
    """
    kept = _kept_in_cuts(benches, index)
    if kept is None or kept.saved > 2 * (sizes.saved - sizes.more_saved):
        return
    _hold_against_whole(benches, index)
    sizes.saved = max(sizes.saved, kept.saved + sizes.more_saved)
    sizes.captured = max(sizes.captured, kept.captured)
    sizes.residue = min(max(sizes.residue, kept.residue), sizes.saved + sizes.captured)
    sizes.sliced = SlicedBytes(min(kept.carry, sizes.saved_after(sizes) - sizes.checkpoint))
    _transient_bytes(timer, benches, index, sizes, sizes.sliced)
    if sizes.selective is not None:
        _selective_bytes(timer, benches, index, sizes, sizes.sliced, sizes.selective)


def _hold_against_whole(benches: Benches, index: int) -> None:
    """Raise BadInput where slices of a layer have another result, or pass another gradient back, than the microbatch in
    one piece: it said that it can be sliced."""
    bench = benches.stage(index, index + 1)
    spans = slice_spans(benches.model.sequence_length)
    about = bench.x, bench.target, bench.gradient, spans, Microbatch()
    hold_against_whole(bench.stage, benches.borders(index), *about)


@dataclass(frozen=True)
class _KeptBytes:
    """Bytes of a whole microbatch of which each slice's share is enough for it."""

    saved: int
    residue: int
    captured: int
    captured_and_made: int
    """What I has captured, and what selective recompute has made again in it."""
    carry: int


def _kept_in_cuts(benches: Benches, index: int, *, selective: bool = False) -> _KeptBytes | None:
    """Return what is enough for the slices of all cuts that are measured, few tokens included; None where there are no
    slices."""
    if sliced_bench(benches, index, selective=selective) is None:
        return None
    cut = (sliced_bench(benches, index, spans, selective=selective) for spans in _cuts(benches.model.sequence_length))
    every = [astuple(_kept_bytes(one)) for one in cut if one is not None]
    return _KeptBytes(*map(max, zip(*every, strict=True)))


def _kept_bytes(sliced: SlicedBench) -> _KeptBytes:
    """Run F, I and W of all slices, and measure what each keeps between them."""
    stage, slices = sliced.bench.stage, range(len(sliced.spans))
    saved, residue, captured, captured_and_made, carry = ([0 for _ in slices] for _ in range(5))
    for slice in slices:
        sliced.forward(slice)
        saved[slice] = stage.saved_bytes(slice)
        carry[slice] = stage.carry_bytes(slice)
    for slice in reversed(slices):
        sliced.backward_input(slice)
        captured[slice] = stage.captured_bytes(slice)
        residue[slice] = stage.saved_bytes(slice) + captured[slice]
        captured_and_made[slice] = captured[slice] + stage.result_bytes(slice)
    for slice in reversed(slices):
        sliced.backward_weight(slice)

    def whole(found: Sequence[int]) -> int:
        shares = [end - begin for begin, end in sliced.spans]
        return max(-(-size * sliced.tokens // share) for size, share in zip(found, shares, strict=True))

    return _KeptBytes(*map(whole, (saved, residue, captured, captured_and_made, carry)))


def _selective_bytes(
    timer: Timer, benches: Benches, index: int, sizes: LayerBytes, into: SlicedBytes, light: SelectiveBytes
) -> None:
    """Measure what slices keep, and need in their backward, of a layer with selective recompute, into `light`."""
    kept = _kept_in_cuts(benches, index, selective=True)
    assert kept is not None
    light.saved = min(max(light.saved, kept.saved + sizes.more_saved), sizes.saved)
    light.captured = max(light.captured, kept.captured_and_made)
    chosen = replace(sizes, saved=light.saved, captured=light.captured)
    for spans in _cuts(benches.model.sequence_length):
        sliced = sliced_bench(benches, index, spans, selective=True)
        if sliced is None:
            continue
        excesses = _excesses(timer, sliced, chosen, into.carry)
        for op in ("backward_input", "backward"):
            most, fixed = sizes.transient[op], into.fixed[op]
            for (begin, end), needs in zip(spans, excesses[op], strict=True):
                share = (end - begin) / sliced.tokens
                known = fixed + (most - fixed) * share + into.backward_prefix * begin / sliced.tokens
                light.transient = max(light.transient, math.ceil((needs - known) / share))


def _cuts(tokens: int) -> list[list[tuple[int, int]]]:
    """Return the cuts of which transient bytes are measured: those with a first slice of few tokens come first."""
    few = tokens // SHORTEST
    shortest = [few] if few > 1 else [1, 2]  # attention of one query has kernels of its own
    return [[(0, end), (end, tokens)] for end in (*shortest, tokens // 2)] + [slice_spans(tokens)]


def _transient_bytes(timer: Timer, benches: Benches, index: int, sizes: LayerBytes, into: SlicedBytes) -> None:
    """Measure by how much ops of slices exceed the memory table.

    A first slice with a share s of the tokens needs f + s (T - f). Those of few tokens say f; T, the layer's transient
    bytes, becomes such that it is enough for a half and a quarter of them. What later slices need beyond that is for
    the tokens before them.
    """
    tokens = benches.model.sequence_length
    cuts = _cuts(tokens)
    shortest = len(cuts) - 2
    cut = [one for one in (sliced_bench(benches, index, spans) for spans in cuts) if one is not None]
    found = [(one, _excesses(timer, one, sizes, into.carry)) for one in cut]
    for op, most in sizes.own_transient.items():
        prefix, fixed = 0, 0
        for number, (sliced, excesses) in enumerate(found):
            share, needs = sliced.spans[0][1] / tokens, excesses[op][0]
            if number < shortest:
                line = math.ceil((needs - share * most) / (1 - share))
                least = fixed = into.fixed[op] = max(fixed, min(line, max(most, math.ceil(needs))))
            else:
                least = fixed + math.ceil((needs - fixed) / share)
            sizes.transient[op] = max(sizes.transient[op], least)
        for sliced, excesses in found[shortest:]:
            for (begin, end), needs in zip(sliced.spans, excesses[op], strict=True):
                own = fixed + (sizes.transient[op] - fixed) * (end - begin) / tokens
                if begin:
                    prefix = max(prefix, math.ceil((needs - own) * tokens / begin))
        if op == "forward":
            into.forward_prefix = prefix
        elif op != "backward_weight":
            into.backward_prefix = max(into.backward_prefix, prefix)


def _excesses(timer: Timer, sliced: SlicedBench, sizes: LayerBytes, carry: int) -> dict[str, list[float]]:
    """Return by op how much each slice needs beyond the memory table without transient bytes."""
    count = len(sliced.spans)
    ascending, descending = range(count), range(count - 1, -1, -1)
    ops = {f"forward {k}": (lambda k=k: sliced.forward(k)) for k in ascending}
    ops |= {f"backward_input {k}": (lambda k=k: sliced.backward_input(k)) for k in descending}
    ops |= {f"backward_weight {k}": (lambda k=k: sliced.backward_weight(k)) for k in descending}
    ops |= {f"again {k}": (lambda k=k: sliced.forward(k)) for k in ascending}
    ops |= {f"backward {k}": (lambda k=k: sliced.backward(k)) for k in descending}
    peaks = timer.peaks(ops)
    incoming = 0 if sliced.bench.stage.is_first else sliced.bench.x.nbytes
    accumulators = carry * (sliced.tokens - (sliced.spans[-1][1] - sliced.spans[-1][0])) // sliced.tokens
    table = {
        "forward": sizes.saved + sizes.output,
        "backward_input": incoming + sizes.captured,
        "backward_weight": 0,
        "backward": incoming,
    }
    found: dict[str, list[float]] = {op: [] for op in table}
    for op, known in table.items():
        for index, (begin, end) in enumerate(sliced.spans):
            there = known * (end - begin) / sliced.tokens
            if index == count - 1 and op in ("backward", "backward_input"):
                there += accumulators
            found[op].append(peaks[f"{op} {index}"] - there)
    return found


def time_slices(timer: Timer, sliced: Sequence[SlicedBench], samples: int) -> Samples:
    """Time every op of every slice on equal layers in turn, as `time_ops` does; samples by op and slice."""
    count = len(sliced[0].spans)
    times: Samples = {sample_name(op, index): [] for op in OPS for index in (None, *range(count))}
    begin = time.monotonic()
    for turn in range(WARM_UP + samples):
        if turn >= WARM_UP + LEAST and time.monotonic() - begin > MOST_S / 2:
            break
        into: Samples = times if turn >= WARM_UP else {name: [] for name in times}
        for split in (True, False):
            whole = {op: into[sample_name(op, None)] for op in OPS}
            time_round(timer, [one.bench for one in sliced], whole, split=split)
            calls = [("forward", index, one) for index in range(count) for one in sliced]
            for op in ("backward_input", "backward_weight") if split else ("backward",):
                calls += [(op, index, one) for index in reversed(range(count)) for one in reversed(sliced)]
            for op, index, one in calls:
                run = getattr(one, op)
                with timer.timed(into[sample_name(op, index)]):
                    run(index)
        timer.settle()
    return times
