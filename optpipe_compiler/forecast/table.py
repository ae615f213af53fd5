"""The memory table of docs/IR.md for what reads schedule files; planning and the judge have their own."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, pairwise
from operator import add

from msgspec import UnsetType

from optpipe_compiler.documents import ir

Unit = tuple[int, int | None]
Holds = tuple[int, ...]
"""Bytes by what holds them, in the order of HOLDERS."""
HOLDERS = ("static", "kept", "residue", "captured", "messages", "working")
"""What holds bytes on a device: weights, optimizer state and the reserve; what forwards keep for backwards (of
recomputed layers the checkpoint), and gradients of keys and values that add up; what stays between input and weight
gradient; what an input gradient adds for it while it runs; tensors on their way between stages; what ops need only
while they run."""
NOTHING: Holds = (0,) * len(HOLDERS)


class Table:
    """The memory table of docs/IR.md: bytes that an op adds when it starts and when it has completed."""

    def __init__(self, schedule: ir.Schedule) -> None:
        self.setup = schedule.setup
        self.stages = [
            [_UnitStage(stage, schedule.setup, number) for number in range(schedule.setup.classes)]
            for stage in schedule.stages
        ]
        self.forward_of: dict[tuple[int, int, ir.Range], int] = {}
        """The most transient bytes of a forward of some layers of a stage, as far as they were asked for."""
        self._known: dict[object, tuple[tuple[Holds, Holds], tuple[int, int]]] = {}
        self.dropped: dict[tuple[int, Unit], int] = defaultdict(int)
        """What the recomputed ranges of a stage and unit give up after their forward."""
        for device in schedule.devices:
            for op in device.compute:
                if isinstance(op, ir.Recompute):
                    self.dropped[op.stage, op.unit] += self._recomputed(op)

    def on_device(self, op: ir.Op) -> tuple[int, int]:
        """Return the bytes on the device at the start and at the end of `op`; what is freed is negative."""
        return self._entry(op)[1]

    def by_holder(self, op: ir.Op) -> tuple[Holds, Holds]:
        """Return the same by what holds the bytes."""
        return self._entry(op)[0]

    def _entry(self, op: ir.Op) -> tuple[tuple[Holds, Holds], tuple[int, int]]:
        """Return the bytes of an op by holder and in all; they are the same for most microbatches."""
        dropped = self.dropped.get((op.stage, op.unit), 0) if self.dropped and isinstance(op, ir.Forward) else 0
        key = type(op), self._of(op), op.layers if isinstance(op, ir.SavedOp) else None, dropped
        found = self._known.get(key)
        if found is None:
            taken, given = self._by_holder(op, dropped)
            found = self._known[key] = (taken, given), (sum(taken), sum(given))
        return found

    def _by_holder(self, op: ir.Op, dropped: int) -> tuple[Holds, Holds]:
        entry = self._of(op).entries.get(type(op))
        if entry is not None:
            return entry[0], plus(entry[1], _holds(kept=-dropped))
        assert isinstance(op, ir.SavedOp)
        if isinstance(op, ir.Recompute):
            extra = self._forward_of(op)
            return _holds(kept=self._recomputed(op), working=extra), _holds(working=-extra)
        copied = self.copied(op)
        return (NOTHING, _holds(kept=-copied)) if isinstance(op, ir.Offload) else (_holds(kept=copied), NOTHING)

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
        classes = self.stages[op.stage]
        return classes[self.setup.class_of(op.microbatch, op.slice_or_none)] if len(classes) > 1 else classes[0]

    def _recomputed(self, op: ir.Recompute) -> int:
        stage = self._of(op)
        at = max(0, op.layers[0] - stage.first)
        inside = stage.checkpoint[at : at + 1] if op.layers[0] < op.layers[1] else []
        return self.copied(op) - sum(inside)

    def _forward_of(self, op: ir.Recompute) -> int:
        key = op.stage, self.setup.class_of(op.microbatch, op.slice_or_none), op.layers
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
        self.forward_transient = list(map(add, self._scaled(stage.forward_transient_bytes), forward))
        gradients = [
            sum(-(-one * (end - begin) // self.whole) for one in carry.gradient_bytes)
            for begin, end in pairwise(self.cuts)
        ]
        self.entries = _entries(
            saved=sum(saved),
            residue=sum(self._scaled(stage.residue_bytes)),
            captured=sum(self._scaled(stage.captured_bytes)),
            before=self._scaled([stage.input_bytes])[0],
            after=self._scaled([stage.output_bytes])[0],
            transients=(
                self.forward_transient,
                list(map(add, self._scaled(stage.backward_input_transient_bytes), back)),
                self._scaled(stage.backward_weight_transient_bytes),
                list(map(add, self._scaled(stage.backward_transient_bytes), back)),
            ),
            begun=sum(gradients[:-1]) if is_last else 0,
            ended=0 if is_last else gradients[self.cuts.index(self.begin)],
        )

    def _scaled(self, figures: list[int]) -> list[int]:
        return [-(-one * (self.end - self.begin) // self.whole) for one in figures]

    def _before(self, figures: list[int]) -> list[int]:
        return [-(-one * self.begin // self.whole) for one in figures]


def _holds(*, kept: int = 0, residue: int = 0, captured: int = 0, messages: int = 0, working: int = 0) -> Holds:
    return 0, kept, residue, captured, messages, working


def plus(one: Holds, other: Holds) -> Holds:
    """Return the sum by holder."""
    return tuple(map(add, one, other))


def _entries(
    *,
    saved: int,
    residue: int,
    captured: int,
    before: int,
    after: int,
    transients: tuple[list[int], list[int], list[int], list[int]],
    begun: int,
    ended: int,
) -> dict[type[ir.Op], tuple[Holds, Holds]]:
    """Return the table's rows for one stage and class of units, those apart that depend on layers.

    `begun` and `ended`: gradients of keys and values that add up from a backward on, and until one.
    """
    forward, split_input, split_weight, fused = (max(sizes, default=0) for sizes in transients)
    return {
        ir.RecvActivation: (_holds(messages=before), NOTHING),
        ir.RecvGradient: (_holds(messages=after), NOTHING),
        ir.SendActivation: (NOTHING, _holds(messages=-after)),
        ir.SendGradient: (NOTHING, _holds(messages=-before)),
        ir.Forward: (
            _holds(kept=saved, messages=after, working=forward),
            _holds(messages=-before, working=-forward),
        ),
        ir.BackwardInput: (
            _holds(kept=begun, captured=captured, messages=before, working=split_input),
            _holds(kept=-saved - ended, residue=residue, captured=-captured, messages=-after, working=-split_input),
        ),
        ir.BackwardWeight: (_holds(working=split_weight), _holds(residue=-residue, working=-split_weight)),
        ir.Backward: (
            _holds(kept=begun, messages=before, working=fused),
            _holds(kept=-saved - ended, messages=-after, working=-fused),
        ),
    }
