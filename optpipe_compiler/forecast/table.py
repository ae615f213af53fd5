"""The memory table of docs/IR.md for what reads schedule files; planning and the judge have their own."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from operator import add

from optpipe_compiler.documents import ir

Holds = tuple[int, ...]
"""Bytes by what holds them, in the order of HOLDERS."""
HOLDERS = ("static", "kept", "residue", "captured", "messages", "working")
"""What holds bytes on a device: weights, optimizer state and the reserve; what forwards keep for backwards (of
recomputed layers the checkpoint); what stays between input and weight gradient; what an input gradient adds for it
while it runs; tensors on their way between stages; what ops need only while they run."""
NOTHING: Holds = (0,) * len(HOLDERS)


class Table:
    """The memory table of docs/IR.md: bytes that an op adds when it starts and when it has completed."""

    def __init__(self, schedule: ir.Schedule) -> None:
        self.stages = schedule.stages
        self.entries = [_entries(stage) for stage in schedule.stages]
        self.saved_before = [[0, *accumulate(stage.saved_bytes)] for stage in schedule.stages]
        self.static_bytes: dict[int, int] = defaultdict(int)
        """Of all stages of a device."""
        for stage in schedule.stages:
            self.static_bytes[stage.device] += stage.static_bytes
        self.forward_of: dict[tuple[int, ir.Range], int] = {}
        """The most transient bytes of a forward of some layers of a stage, as far as they were asked for."""
        self.dropped: dict[tuple[int, int], int] = defaultdict(int)
        """What the recomputed ranges of a stage and microbatch give up after their forward."""
        for device in schedule.devices:
            for op in device.compute:
                if isinstance(op, ir.Recompute):
                    self.dropped[op.stage, op.microbatch] += self._recomputed(op)

    def on_device(self, op: ir.Op) -> tuple[int, int]:
        """Return the bytes on the device at the start and at the end of `op`; what is freed is negative."""
        taken, given = self.by_holder(op)
        return sum(taken), sum(given)

    def by_holder(self, op: ir.Op) -> tuple[Holds, Holds]:
        """Return the same by what holds the bytes."""
        entry = self.entries[op.stage].get(type(op))
        if isinstance(op, ir.Forward):
            taken, given = self.entries[op.stage][ir.Forward]
            dropped = self.dropped.get((op.stage, op.microbatch), 0)
            return (taken, plus(given, _holds(kept=-dropped))) if dropped else (taken, given)
        if entry is not None:
            return entry
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
        """Return what was saved for the layers of `op`, those of other stages left out."""
        before = self.saved_before[op.stage]
        first, end = (min(max(0, layer - self.stages[op.stage].layers[0]), len(before) - 1) for layer in op.layers)
        return max(0, before[end] - before[first])

    def _recomputed(self, op: ir.Recompute) -> int:
        at = max(0, op.layers[0] - self.stages[op.stage].layers[0])
        inside = self.stages[op.stage].checkpoint_bytes[at : at + 1] if op.layers[0] < op.layers[1] else []
        return self.copied(op) - sum(inside)

    def _forward_of(self, op: ir.Recompute) -> int:
        key = op.stage, op.layers
        if key not in self.forward_of:
            stage = self.stages[op.stage]
            first, end = (max(0, layer - stage.layers[0]) for layer in op.layers)
            self.forward_of[key] = max(stage.forward_transient_bytes[first:end], default=0)
        return self.forward_of[key]


def _holds(*, kept: int = 0, residue: int = 0, captured: int = 0, messages: int = 0, working: int = 0) -> Holds:
    return 0, kept, residue, captured, messages, working


def plus(one: Holds, other: Holds) -> Holds:
    """Return the sum by holder."""
    return tuple(map(add, one, other))


def _entries(stage: ir.Stage) -> dict[type[ir.Op], tuple[Holds, Holds]]:
    """Return the table's rows for one stage, those apart that depend on layers."""
    saved, residue, captured = sum(stage.saved_bytes), sum(stage.residue_bytes), sum(stage.captured_bytes)
    before, after = stage.input_bytes, stage.output_bytes
    transients = (
        stage.forward_transient_bytes,
        stage.backward_input_transient_bytes,
        stage.backward_weight_transient_bytes,
        stage.backward_transient_bytes,
    )
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
            _holds(captured=captured, messages=before, working=split_input),
            _holds(kept=-saved, residue=residue, captured=-captured, messages=-after, working=-split_input),
        ),
        ir.BackwardWeight: (_holds(working=split_weight), _holds(residue=-residue, working=-split_weight)),
        ir.Backward: (
            _holds(messages=before, working=fused),
            _holds(kept=-saved, messages=-after, working=-fused),
        ),
    }
