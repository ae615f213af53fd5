"""The bytes of a stage and unit, as docs/IR.md scales them: a figure of a whole microbatch x tokens, rounded up."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import UnsetType

from optpipe_compiler.documents import ir
from optpipe_compiler.verify.tables import FIXED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe_compiler.verify.placed import PlacedOps


class Sizes:
    """The bytes of every op's stage and unit; units of one shape and slice have the same."""

    def __init__(self, placed: PlacedOps) -> None:
        self.stages = placed.stages
        self.setup = placed.schedule.setup
        self._is_whole = isinstance(self.setup.units, UnsetType)
        self._known: dict[tuple[int, int], UnitSizes] = {}

    def of(self, op: ir.Op) -> UnitSizes:
        """Return the bytes of the op's stage and unit."""
        key = op.stage, 0 if self._is_whole else self.setup.class_of(op.microbatch, op.slice_or_none)
        if key not in self._known:
            self._known[key] = self._of(op)
        return self._known[key]

    def _of(self, op: ir.Op) -> UnitSizes:
        stage, units = self.stages[op.stage], self.setup.units
        if isinstance(units, UnsetType):
            return UnitSizes(stage, (0, 1), 1, [])
        cuts = units.cuts[units.shape_of[op.microbatch]]
        slice = op.slice_or_none or 0
        is_last = slice == len(cuts) - 2
        return UnitSizes(stage, (cuts[slice], cuts[slice + 1]), units.tokens, cuts[:-1] if is_last else None)


class UnitSizes:
    """A stage's bytes for the tokens [begin, end) of a microbatch, of which there are `whole`, over its layers.

    `slices`: of the last slice of a microbatch, where all its slices begin; None of others.
    """

    def __init__(self, stage: ir.Stage, tokens: tuple[int, int], whole: int, slices: list[int] | None) -> None:
        self.first = stage.layers[0]
        begin, end = tokens
        self._part = end - begin, whole
        none = [0] * len(stage.saved_bytes)
        carry = None if isinstance(stage.carry, UnsetType) else stage.carry
        keys, before = (none, (none, none))
        if carry is not None:
            keys = carry.bytes
            before = carry.forward_transient_bytes, carry.backward_transient_bytes
        carried = self._scaled(keys)
        rest = self._scaled(saved - kept for saved, kept in zip(stage.saved_bytes, keys, strict=True))
        saved = [one + other for one, other in zip(rest, carried, strict=True)]
        is_last = slices is not None
        self.moved_before = [0, *accumulate(saved if is_last else rest)]
        """What an offload takes, by the layers before each: all of the last slice, without the carry of others."""
        self.all_saved = sum(saved)
        self.residue, self.captured = sum(self._scaled(stage.residue_bytes)), sum(self._scaled(stage.captured_bytes))
        self.checkpoint = self._scaled(stage.checkpoint_bytes)
        self.input, (self.output,) = self._scaled([stage.input_bytes])[0], self._scaled([stage.output_bytes])
        earlier = [[-(-one * begin // whole) for one in ones] for ones in before]
        fixed = ir.Fixed(**dict.fromkeys(FIXED, none)) if isinstance(stage.fixed, UnsetType) else stage.fixed
        forward, backward_input, backward_weight, backward = (
            _both(getattr(fixed, name), self._scaled(map(int.__sub__, getattr(stage, name), getattr(fixed, name))))
            for name in FIXED
        )
        self.forward_transient = _both(forward, earlier[0])
        self.forward = max(self.forward_transient)
        self.backward_input = max(_both(backward_input, earlier[1]))
        self.backward_weight = max(backward_weight)
        self.backward = max(_both(backward, earlier[1]))
        self.gradient = self.accumulators = 0
        """Of the carry's gradients: what this unit's backward frees, and what the first backward allocates."""
        if carry is not None:
            if not is_last:
                self.gradient = sum(self._scaled(carry.gradient_bytes))
            else:
                for start, stop in zip(slices or [], (slices or [])[1:], strict=False):
                    self.accumulators += sum(-(-one * (stop - start) // whole) for one in carry.gradient_bytes)
        self._forward_of: dict[ir.Range, int] = {}

    def _scaled(self, figures: Iterable[int]) -> list[int]:
        tokens, whole = self._part
        return [-(-one * tokens // whole) for one in figures]

    def moved(self, layers: ir.Range) -> int:
        """Return what an offload of some of the layers takes to the host."""
        return self.moved_before[layers[1] - self.first] - self.moved_before[layers[0] - self.first]

    def given_up(self, layers: ir.Range) -> int:
        """Return what a recomputed range gives up after its forward: what may leave, less its checkpoint."""
        return self.moved(layers) - self.checkpoint[layers[0] - self.first]

    def forward_of(self, layers: ir.Range) -> int:
        """Return the most transient bytes of a forward of some of the layers."""
        if layers not in self._forward_of:
            inside = slice(layers[0] - self.first, layers[1] - self.first)
            self._forward_of[layers] = max(self.forward_transient[inside])
        return self._forward_of[layers]


def _both(own: list[int], earlier: list[int]) -> list[int]:
    return [one + other for one, other in zip(own, earlier, strict=True)]
