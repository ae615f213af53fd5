"""Memory over forecast time: the table of docs/IR.md, summed along the forecast's starts and ends."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from optpipe_compiler.documents import ir

if TYPE_CHECKING:
    from collections.abc import Iterable

Curve = list[tuple[int, int]]
"""Time in ns and the bytes held from then on."""


def device_curve(schedule: ir.Schedule, device: int) -> Curve:
    """Return what the device holds over the forecast, weights and reserve included."""
    mine = [stage for stage in schedule.stages if stage.device == device]
    always = schedule.setup.reserve_bytes + sum(stage.static_bytes for stage in mine)
    dropped = _dropped(schedule, device)
    changes: Curve = []
    for op, start, end in timed_ops(schedule, device):
        taken, freed = on_device(schedule.stages[op.stage], op, dropped[op.stage, op.microbatch])
        changes += [(start, taken), (end, -freed)]
    return _summed(changes, always)


def host_curve(schedule: ir.Schedule, devices: Iterable[int]) -> Curve:
    """Return what the offloads of these devices hold on the host over the forecast."""
    changes: Curve = []
    for device in devices:
        for op, start, end in timed_ops(schedule, device):
            if isinstance(op, ir.Offload):
                changes.append((start, _saved(schedule.stages[op.stage], op.layers)))
            elif isinstance(op, ir.Reload):
                changes.append((end, -_saved(schedule.stages[op.stage], op.layers)))
    return _summed(changes, 0)


def timed_ops(schedule: ir.Schedule, device: int) -> list[tuple[ir.Op, int, int]]:
    """Return the device's ops with their forecast start and end (of messages: issue and arrival), by lane."""
    lanes: dict[str, list[ir.Op]] = {
        "compute": list(schedule.devices[device].compute),
        "d2h": list(schedule.devices[device].d2h),
        "h2d": list(schedule.devices[device].h2d),
    }
    return [
        timed
        for times in schedule.forecast.times
        if times.device == device
        for timed in zip(lanes[times.lane], times.start_ns, times.end_ns, strict=True)
    ]


def on_device(stage: ir.Stage, op: ir.Op, dropped: int) -> tuple[int, int]:
    """Return the bytes that `op` takes at its start and frees at its end; `dropped`: what its forward does not keep."""
    match op:
        case ir.RecvActivation():
            return stage.input_bytes, 0
        case ir.RecvGradient():
            return stage.output_bytes, 0
        case ir.SendActivation():
            return 0, stage.output_bytes
        case ir.SendGradient():
            return 0, stage.input_bytes
        case ir.Forward():
            transient = max(stage.forward_transient_bytes)
            return sum(stage.saved_bytes) + stage.output_bytes + transient, transient + stage.input_bytes + dropped
        case ir.Offload():
            return 0, _saved(stage, op.layers)
        case ir.Reload():
            return _saved(stage, op.layers), 0
        case ir.Recompute():
            transient = max(_of(stage, stage.forward_transient_bytes, op.layers))
            return _given_up(stage, op.layers) + transient, transient
        case ir.BackwardInput():
            transient = max(stage.backward_input_transient_bytes)
            captured = sum(stage.captured_bytes)
            freed = sum(stage.saved_bytes) + captured - sum(stage.residue_bytes)
            return stage.input_bytes + captured + transient, transient + stage.output_bytes + freed
        case ir.BackwardWeight():
            transient = max(stage.backward_weight_transient_bytes)
            return transient, transient + sum(stage.residue_bytes)
        case ir.Backward():
            transient = max(stage.backward_transient_bytes)
            return stage.input_bytes + transient, transient + stage.output_bytes + sum(stage.saved_bytes)
    raise AssertionError(f"an op without an entry in the memory table: {op.name}")


def _dropped(schedule: ir.Schedule, device: int) -> dict[tuple[int, int], int]:
    """Return, per stage and microbatch, what recomputed ranges give up after the forward."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for op in schedule.devices[device].compute:
        if isinstance(op, ir.Recompute):
            found[op.stage, op.microbatch] += _given_up(schedule.stages[op.stage], op.layers)
    return found


def _given_up(stage: ir.Stage, layers: ir.Range) -> int:
    return _saved(stage, layers) - stage.checkpoint_bytes[layers[0] - stage.layers[0]]


def _saved(stage: ir.Stage, layers: ir.Range) -> int:
    return sum(_of(stage, stage.saved_bytes, layers))


def _of(stage: ir.Stage, numbers: list[int], layers: ir.Range) -> list[int]:
    return numbers[layers[0] - stage.layers[0] : layers[1] - stage.layers[0]]


def _summed(changes: Curve, level: int) -> Curve:
    """Return one point per moment; of what happens at one moment only the sum shows."""
    at: dict[int, int] = defaultdict(int)
    for time, change in changes:
        at[time] += change
    curve: Curve = []
    for time in sorted(at):
        level += at[time]
        curve.append((time, level))
    return curve
