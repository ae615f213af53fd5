"""The bytes that are held on each device and on the host at every moment of the forecast, by docs/IR.md's table."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from optpipe_compiler.documents import ir

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe_compiler.forecast.items import Timed, Timeline

Curve = list[tuple[int, int]]
"""Steps (ns, bytes held from then on), in order of time. Two steps at one time are a level that lasts no time."""


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


def device_curve(timeline: Timeline, device: int) -> Curve:
    """Return what `device` holds, always-there bytes included."""
    schedule, table = timeline.schedule, timeline.table
    ops = [timed for lane in ("compute", "d2h", "h2d") for timed in timeline.lanes[device, lane]]
    changes = ((timed, *table.on_device(timed.op)) for timed in ops)
    return _curve(timeline.begin_ns, schedule.setup.reserve_bytes + table.static_bytes[device], changes)


def host_curve(timeline: Timeline) -> Curve:
    """Return what the offloads of all devices hold on the host."""
    ops = [timed for (_, lane), timed_lane in timeline.lanes.items() if lane != "compute" for timed in timed_lane]
    return _curve(timeline.begin_ns, 0, ((timed, *timeline.table.on_host(timed.op)) for timed in ops))


def _curve(begin: int, held: int, changes: Iterable[tuple[Timed, int, int]]) -> Curve:
    """Return the steps; at one moment what completes is freed before what starts takes its bytes.

    What an op of no length takes it frees again in the order of its lane.
    """
    events: list[tuple[int, int, int, int]] = []
    for number, (timed, taken, given) in enumerate(changes):
        if taken:
            events.append((timed.begin_ns, 1, number, taken))
        if given:
            late = taken > 0 and timed.begin_ns == timed.end_ns
            events.append((timed.end_ns, late, number, given))
    curve = [(begin, held)]
    for now, group in groupby(sorted(events), key=itemgetter(0)):
        peak, before = 0, held
        for *_, change in group:
            held += change
            peak = max(peak, held)
        if peak > max(before, held):
            curve.append((now, peak))
        if held != curve[-1][1]:
            curve.append((now, held))
    return curve
