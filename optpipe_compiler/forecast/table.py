"""The memory table of docs/IR.md, op by op of a schedule file."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, pairwise
from operator import add, sub

from msgspec import UnsetType

from optpipe_compiler.documents import ir, memory

Unit = tuple[int, int | None]
"""A microbatch and its slice, None where microbatches are not cut."""


class Table:
    """The memory table of docs/IR.md: bytes that an op adds when it starts and when it has completed."""

    def __init__(self, schedule: ir.Schedule) -> None:
        self.setup = schedule.setup
        self._stages, self._is_uniform = schedule.stages, schedule.setup.classes == 1
        self._units: dict[tuple[int, int], _UnitStage] = {}
        """By stage and class of units, as far as they were asked for: a file may name more than it has ops of."""
        self.forward_of: dict[tuple[int, int, ir.Range], int] = {}
        """The most transient bytes of a forward of some layers of a stage, as far as they were asked for."""
        self._known: dict[object, tuple[memory.Entry, tuple[int, int]]] = {}
        self.dropped: dict[tuple[int, Unit], int] = defaultdict(int)
        """What the recomputed ranges of a stage and unit give up after their forward."""
        for device in schedule.devices:
            for op in device.compute:
                if isinstance(op, ir.Recompute):
                    self.dropped[op.stage, op.unit] += self._recomputed(op)

    def on_device(self, op: ir.Op) -> tuple[int, int]:
        """Return the bytes on the device at the start and at the end of `op`; what is freed is negative."""
        return self.entry(op)[1]

    def entry(self, op: ir.Op) -> tuple[memory.Entry, tuple[int, int]]:
        """Return the same by what holds the bytes, and in all; most microbatches have the same."""
        dropped = self.dropped.get((op.stage, op.unit), 0) if self.dropped and isinstance(op, ir.Forward) else 0
        key = type(op), self._of(op), op.layers if isinstance(op, ir.SavedOp) else None, dropped
        found = self._known.get(key)
        if found is None:
            taken, given = self._by_holder(op, dropped)
            found = self._known[key] = (taken, given), (sum(taken), sum(given))
        return found

    def _by_holder(self, op: ir.Op, dropped: int) -> memory.Entry:
        match op:
            case ir.Offload():
                return memory.offload(self.copied(op))
            case ir.Reload():
                return memory.reload(self.copied(op))
            case ir.Recompute():
                return memory.recompute(self._recomputed(op), self._forward_of(op))
        return self._of(op).row(op, dropped)

    def on_host(self, op: ir.Op) -> tuple[int, int]:
        """Return the same on the host."""
        if isinstance(op, ir.Offload):
            return self.copied(op), 0
        return (0, -self.copied(op)) if isinstance(op, ir.Reload) else (0, 0)

    def copied(self, op: ir.SavedOp) -> int:
        """Return what may leave of what was saved for the layers of `op`, those of other stages left out."""
        stage = self._of(op)
        before = stage.moved_before
        first, end = (min(max(0, layer - stage.first), len(before) - 1) for layer in op.layers)
        return max(0, before[end] - before[first])

    def _of(self, op: ir.Op) -> _UnitStage:
        return self.unit(op.stage, self._class_of(op))

    def _class_of(self, op: ir.Op) -> int:
        return 0 if self._is_uniform else self.setup.class_of(op.microbatch, op.slice_or_none)

    def unit(self, stage: int, number: int) -> _UnitStage:
        """Return the bytes of a stage for a class of units."""
        key = stage, number
        if key not in self._units:
            self._units[key] = _UnitStage(self._stages[stage], self.setup, number)
        return self._units[key]

    def _recomputed(self, op: ir.Recompute) -> int:
        stage = self._of(op)
        at = max(0, op.layers[0] - stage.first)
        inside = stage.checkpoint[at : at + 1] if op.layers[0] < op.layers[1] else []
        return self.copied(op) - sum(inside)

    def _forward_of(self, op: ir.Recompute) -> int:
        key = op.stage, self._class_of(op), op.layers
        if key not in self.forward_of:
            stage = self._of(op)
            first, end = (max(0, layer - stage.first) for layer in op.layers)
            self.forward_of[key] = max(stage.forward_transient[first:end], default=0)
        return self.forward_of[key]


class _UnitStage:
    """A stage's bytes for one class of units: docs/IR.md, Units."""

    def __init__(self, stage: ir.Stage, setup: ir.Setup, number: int) -> None:
        self.first = stage.layers[0]
        self.begin, self.end, self.whole = 0, 1, 1
        self.cuts = [0, 1]
        if not isinstance(setup.units, UnsetType):
            shape, slice = divmod(number, setup.slices)
            self.cuts, self.whole = setup.units.cuts[shape], setup.units.tokens
            self.begin, self.end = self.cuts[slice], self.cuts[slice + 1]
        is_last = self.end == self.cuts[-1]
        none = [0] * len(stage.saved_bytes)
        carry = ir.Carry(bytes=none, gradient_bytes=none, forward_transient_bytes=none, backward_transient_bytes=none)
        if not isinstance(stage.carry, UnsetType):
            carry = stage.carry
        keys = self._scaled(carry.bytes)
        rest = self._scaled([saved - kept for saved, kept in zip(stage.saved_bytes, carry.bytes, strict=False)])
        saved = list(map(add, rest, keys))
        self.moved_before: list[int] = [0, *accumulate(saved if is_last else rest)]
        self.checkpoint = self._scaled(stage.checkpoint_bytes)
        forward, back = self._before(carry.forward_transient_bytes), self._before(carry.backward_transient_bytes)
        fixed = None if isinstance(stage.fixed, UnsetType) else stage.fixed
        self.forward_transient = list(map(add, self._transient(stage, fixed, "forward"), forward))
        gradients = [
            sum(-(-one * (end - begin) // self.whole) for one in carry.gradient_bytes)
            for begin, end in pairwise(self.cuts)
        ]
        self.accumulators = sum(gradients[:-1]) if is_last else 0
        self.gradient = 0 if is_last else gradients[self.cuts.index(self.begin)]
        self.saved, self.residue = sum(saved), sum(self._scaled(stage.residue_bytes))
        self.captured = sum(self._scaled(stage.captured_bytes))
        self.incoming, self.outgoing = self._scaled([stage.input_bytes, stage.output_bytes])
        self.transient = {
            "forward": self.forward_transient,
            "backward_input": list(map(add, self._transient(stage, fixed, "backward_input"), back)),
            "backward_weight": self._transient(stage, fixed, "backward_weight"),
            "backward": list(map(add, self._transient(stage, fixed, "backward"), back)),
        }

    def row(self, op: ir.Op, dropped: int) -> memory.Entry:
        """Return the row of an op of the whole stage; recomputed ranges give up `dropped` after their forward."""
        messages, slices = (self.incoming, self.outgoing), (self.accumulators, self.gradient)
        transient = max(self.transient.get(op.name, ()), default=0)
        match op:
            case ir.Forward():
                return memory.forward(self.saved, *messages, transient, dropped)
            case ir.BackwardInput():
                return memory.backward_input(self.saved, self.residue, self.captured, *messages, transient, *slices)
            case ir.BackwardWeight():
                return memory.backward_weight(self.residue, transient)
            case ir.Backward():
                return memory.backward(self.saved, *messages, transient, *slices)
            case ir.RecvActivation() | ir.RecvGradient():
                return memory.receive(self.incoming if isinstance(op, ir.RecvActivation) else self.outgoing)
            case _:
                return memory.send(self.outgoing if isinstance(op, ir.SendActivation) else self.incoming)

    def _transient(self, stage: ir.Stage, fixed: ir.Fixed | None, op: str) -> list[int]:
        whole = getattr(stage, f"{op}_transient_bytes")
        stays = [0] * len(whole) if fixed is None else getattr(fixed, f"{op}_transient_bytes")
        return list(map(add, stays, self._scaled(list(map(sub, whole, stays)))))

    def _scaled(self, figures: list[int]) -> list[int]:
        return [-(-one * (self.end - self.begin) // self.whole) for one in figures]

    def _before(self, figures: list[int]) -> list[int]:
        return [-(-one * self.begin // self.whole) for one in figures]
