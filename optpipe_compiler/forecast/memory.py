"""The bytes that are held on each device and on the host at every moment of the forecast, by docs/IR.md's table."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, groupby
from operator import add, itemgetter
from typing import TYPE_CHECKING

from optpipe_compiler.documents import ir

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe_compiler.forecast.items import Timed, Timeline

Curve = list[tuple[int, int]]
"""Steps (ns, bytes held from then on), in order of time. Two steps at one time are a level that lasts no time."""
Holds = tuple[int, ...]
"""Bytes by what holds them, in the order of HOLDERS."""
HOLDERS = ("static", "kept", "residue", "captured", "messages", "working")
"""What holds bytes on a device: weights, optimizer state and the reserve; what forwards keep for backwards (of
recomputed layers the checkpoint); what stays between input and weight gradient; what an input gradient adds for it
while it runs; tensors on their way between stages; what ops need only while they run."""
Stack = list[tuple[int, Holds]]
"""A curve whose levels are told apart by what holds them."""
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
            return (taken, _plus(given, _holds(kept=-dropped))) if dropped else (taken, given)
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


def _plus(one: Holds, other: Holds) -> Holds:
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


def device_stack(timeline: Timeline, device: int) -> Stack:
    """Return what `device` holds by holder, always-there bytes included."""
    schedule, table = timeline.schedule, timeline.table
    ops = [timed for lane in ("compute", "d2h", "h2d") for timed in timeline.lanes[device, lane]]
    changes = ((timed, *table.by_holder(timed.op)) for timed in ops)
    static = schedule.setup.reserve_bytes + table.static_bytes[device]
    return _stack(timeline.begin_ns, (static, *NOTHING[1:]), changes)


def host_curve(timeline: Timeline) -> Curve:
    """Return what the offloads of all devices hold on the host."""
    ops = [timed for (_, lane), timed_lane in timeline.lanes.items() if lane != "compute" for timed in timed_lane]
    changes = ((timed, *timeline.table.on_host(timed.op)) for timed in ops)
    return total(_stack(timeline.begin_ns, (0,), ((timed, (taken,), (given,)) for timed, taken, given in changes)))


def total(stack: Stack) -> Curve:
    """Return what all holders hold together, without the steps that change only what holds the bytes."""
    curve: Curve = []
    for time, holds in stack:
        held = sum(holds)
        if not curve or held != curve[-1][1]:
            curve.append((time, held))
    return curve


def _stack(begin: int, held: Holds, changes: Iterable[tuple[Timed, Holds, Holds]]) -> Stack:
    """Return the steps; at one moment what completes is freed before what starts takes its bytes.

    What an op of no length takes it frees again in the order of its lane.
    """
    events: list[tuple[int, int, int, Holds]] = []
    for number, (timed, taken, given) in enumerate(changes):
        takes = any(taken)
        if takes:
            events.append((timed.begin_ns, 1, number, taken))
        if any(given):
            late = takes and timed.begin_ns == timed.end_ns
            events.append((timed.end_ns, late, number, given))
    stack = [(begin, held)]
    for now, group in groupby(sorted(events), key=itemgetter(0)):
        before = highest = held
        for *_, change in group:
            held = _plus(held, change)
            highest = max(highest, held, key=sum)
        if sum(highest) > max(sum(before), sum(held)):
            stack.append((now, highest))
        if held != stack[-1][1]:
            stack.append((now, held))
    return stack
