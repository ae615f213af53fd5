"""The forecast as a trace for Perfetto and chrome://tracing (the JSON Trace Event Format).

A process per device, a thread per lane, a slice per op; arrows for messages and from an offload to its reload; counters
for memory against the caps. Perfetto colours slices by their name without digits, so a name is torch's cell: `2F0`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import LETTERS, op_id, unit_name
from optpipe_compiler.documents.traces import naming, to_text
from optpipe_compiler.forecast.items import Timeline
from optpipe_compiler.forecast.memory import device_stack, host_curve, total

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.documents.traces import TraceEvent
    from optpipe_compiler.forecast.memory import Curve

Slices = dict[str, "TraceEvent"]
"""The slice of every op that has one, by the op's id."""

LANE_NAMES = {"compute": "compute", "d2h": "offload (device to host)", "h2d": "reload (host to device)"}
CELLS = LETTERS | {"offload": " offload ", "reload": " reload "}
"""What stands between stage and microbatch; nothing is written on a copy but its name."""


def render(checked: ir.Checked) -> str:
    """Return the file, one event per line."""
    schedule = checked.schedule
    slices = _slices(schedule)
    events = [*_names(schedule), *slices.values(), *_arrows(schedule, slices), *_counters(schedule)]
    about = {
        "schedule": schedule.digest,
        "method": schedule.forecast.method,
        "profile": schedule.provenance.profile,
        "makespan_ns": schedule.forecast.makespan_ns,
        "bubble_fraction": schedule.forecast.bubble_fraction,
    }
    return to_text(events, about)


def _names(schedule: ir.Schedule) -> Iterator[TraceEvent]:
    """Name and order processes and threads; lanes without ops get no thread."""
    for device in schedule.devices:
        layers = [stage.layers for stage in schedule.stages_of(device.device)]
        shown = ", ".join(f"{first}-{end - 1}" if end > first + 1 else str(first) for first, end in layers)
        yield naming("process_name", device.device, 0, name=f"device {device.device}: layers {shown}")
        yield naming("process_sort_index", device.device, 0, sort_index=device.device)
        for number, (lane, name) in enumerate(LANE_NAMES.items()):
            if getattr(device, lane):
                yield naming("thread_name", device.device, number, name=name)
                yield naming("thread_sort_index", device.device, number, sort_index=number)
    if _offloads(schedule):
        yield naming("process_name", len(schedule.devices), 0, name="host")
        yield naming("process_sort_index", len(schedule.devices), 0, sort_index=len(schedule.devices))


def _slices(schedule: ir.Schedule) -> Slices:
    threads = {kind: 0 for kind in CELLS} | {"offload": 1, "reload": 2}
    found: Slices = {}
    for device in schedule.devices:
        for _, _, op, start, end in schedule.timed(device.device):
            if op.name in CELLS:
                found[op.id] = {
                    "ph": "X",
                    "name": f"{op.stage}{CELLS[op.name]}{unit_name(*op.unit)}",
                    "cat": op.name,
                    "pid": device.device,
                    "tid": threads[op.name],
                    "ts": start / 1000,
                    "dur": (end - start) / 1000,
                    "args": _details(op),
                }
    return found


def _details(op: ir.Op) -> dict[str, Any]:
    """Return what a viewer shows of a selected op."""
    about: dict[str, Any] = {"op": op.name, "stage": op.stage, "microbatch": op.microbatch}
    if op.slice_or_none is not None:
        about["slice"] = op.slice_or_none
    if isinstance(op, ir.SavedOp):
        about["layers"] = f"{op.layers[0]}-{op.layers[1] - 1}"
    if op.after:
        about["waits for"] = ", ".join(op.after)
    return about


def _arrows(schedule: ir.Schedule, slices: Slices) -> Iterator[TraceEvent]:
    """Draw messages from the op that makes a tensor to the op that reads it, and offloads to their reloads."""
    number = 0
    for device in schedule.devices:
        for op in (*device.compute, *device.d2h):
            for name, source, target in _arrow(op, slices):
                number += 1
                common = {"cat": name, "name": name, "id": number}
                yield {"ph": "s", **common, **_middle(slices[source])}
                yield {"ph": "f", "bp": "e", **common, **_middle(slices[target])}


def _arrow(op: ir.Op, slices: Slices) -> Iterator[tuple[str, str, str]]:
    """Yield name, source and target of the arrow that belongs to `op`, by id."""
    stage, (microbatch, part) = op.stage, op.unit
    match op:
        case ir.SendActivation():
            forward, later = (op_id("forward", one, microbatch, None, part) for one in (stage, stage + 1))
            yield "activation", forward, later
        case ir.SendGradient():
            yield "gradient", _gradient(slices, stage, op), _gradient(slices, stage - 1, op)
        case ir.Offload():
            yield "offloaded", op.id, op_id("reload", stage, microbatch, op.layers, part)


def _gradient(slices: Slices, stage: int, op: ir.Op) -> str:
    split = op_id("backward_input", stage, op.microbatch, None, op.slice_or_none)
    return split if split in slices else op_id("backward", stage, op.microbatch, None, op.slice_or_none)


def _middle(of: TraceEvent) -> TraceEvent:
    """Return a moment that no other slice of the thread shares."""
    return {"pid": of["pid"], "tid": of["tid"], "ts": of["ts"] + of["dur"] / 2}


def _counters(schedule: ir.Schedule) -> Iterator[TraceEvent]:
    setup, timeline = schedule.setup, Timeline(schedule)
    for device in schedule.devices:
        held = total(device_stack(timeline, device.device))
        yield from _counter(device.device, "device memory", held, setup.cap_bytes)
        if device.d2h:
            yield from _counter(device.device, "host memory", host_curve(timeline, [device.device]), None)
    if _offloads(schedule):
        yield from _counter(len(schedule.devices), "host memory", host_curve(timeline), setup.host_cap_bytes)


def _counter(process: int, name: str, curve: Curve, cap: int | None) -> Iterator[TraceEvent]:
    for time, held in curve:
        yield {"ph": "C", "name": name, "pid": process, "ts": time / 1000, "args": {"bytes": held}}
    if cap is not None and curve:
        for time, _ in (curve[0], curve[-1]):
            yield {"ph": "C", "name": f"{name} cap", "pid": process, "ts": time / 1000, "args": {"bytes": cap}}


def _offloads(schedule: ir.Schedule) -> bool:
    return any(device.d2h for device in schedule.devices)
