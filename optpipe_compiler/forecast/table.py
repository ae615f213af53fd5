"""The memory table of docs/IR.md for what reads schedule files; planning and the judge have their own."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from optpipe_compiler.documents import ir


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
        entry = self.entries[op.stage].get(type(op))
        if isinstance(op, ir.Forward):
            taken, given = self.entries[op.stage][ir.Forward]
            return taken, given - self.dropped.get((op.stage, op.microbatch), 0)
        if entry is not None:
            return entry
        assert isinstance(op, ir.SavedOp)
        if isinstance(op, ir.Recompute):
            extra = self._forward_of(op)
            return self._recomputed(op) + extra, -extra
        return (0, -self.copied(op)) if isinstance(op, ir.Offload) else (self.copied(op), 0)

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


def _entries(stage: ir.Stage) -> dict[type[ir.Op], tuple[int, int]]:
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
        ir.RecvActivation: (before, 0),
        ir.RecvGradient: (after, 0),
        ir.SendActivation: (0, -after),
        ir.SendGradient: (0, -before),
        ir.Forward: (saved + after + forward, -forward - before),
        ir.BackwardInput: (before + captured + split_input, -split_input - after - (saved + captured - residue)),
        ir.BackwardWeight: (split_weight, -split_weight - residue),
        ir.Backward: (before + fused, -fused - after - saved),
    }
