"""Plan against reality as one Chrome trace (Perfetto, chrome://tracing): per device and lane, forecast above measured.

`optpipe report --trace` draws it over the schedule, `optpipe profile --from-run` makes a profile of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import range_name
from optpipe_compiler.documents.traces import FORMAT, naming, to_text
from optpipe_compiler.forecast.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe_compiler.documents.traces import TraceEvent
    from runtime_torch.timeline import OpTime


THREADS: dict[str, int] = {lane: 2 * number for number, lane in enumerate(ir.LANES)}
"""By lane: that of the forecast; what was measured is below it."""


def chrome_trace(
    eras: Sequence[tuple[ir.Schedule, Sequence[Sequence[Sequence[OpTime]]]]],
    time_scale: float = 1.0,
    swaps: Sequence[dict[str, Any]] = (),
) -> str:
    """Return the file for the schedules in turn and their steps, each the ops of every device; one event per line.

    Each step's forecast starts with its first op. `time_scale`: what the forecast's times are multiplied by. `swaps`:
    what is known of the changes from one schedule to the next; each is a mark, too.
    """
    origin = _start(eras[0][1][0])
    schedule = eras[-1][0]
    events, first = list(_names(schedule)), 0
    for number, (one, steps) in enumerate(eras):
        ops = {op.id: op for device in one.devices for op in device.ops}
        table = Table(one)
        if number:
            events.append(_mark(one, first, _start(steps[0]) - origin))
        for step, devices in enumerate(steps, start=first):
            shift = _start(devices) - origin
            for device, ran in enumerate(devices):
                events += _forecast(one, device, step, shift, time_scale)
                events += [_measured(table, ops[op[0]], device, step, op, origin) for op in ran]
        first += len(steps)
    about: dict[str, Any] = {
        "format": FORMAT,
        "schedule": schedule.digest,
        "profile_digest": eras[0][0].provenance.profile_digest,  # others were planned with what this run measured
        "real": schedule.model is not None,
        "time_scale": time_scale,
        "stages": [
            {
                "stage": stage.stage,
                "device": stage.device,
                "layers": list(stage.layers),
                "selective": stage.selective_layers,
            }
            for stage in schedule.stages
        ],
    }
    if len(eras) > 1:
        first_step = first - len(eras[-1][1])
        about |= {"first_step": first_step, "first_schedule": eras[0][0].digest, "swaps": list(swaps)}
    if not isinstance(units := schedule.setup.units, msgspec.UnsetType):
        about["units"] = msgspec.to_builtins(units)
    return to_text(events, about)


def _mark(schedule: ir.Schedule, step: int, shift: int) -> TraceEvent:
    """Return a mark through all lanes where another schedule begins."""
    about = {"schedule": schedule.digest, "step": step}
    return {"ph": "i", "s": "g", "name": "swap", "pid": 0, "tid": 0, "ts": shift / 1000, "args": about}


def _start(devices: Sequence[Sequence[OpTime]]) -> int:
    return min(start for ran in devices for _, _, start, _ in ran)


def _names(schedule: ir.Schedule) -> Iterator[TraceEvent]:
    """Name and order processes (devices) and threads (lanes); lanes without ops get no thread."""
    for device in schedule.devices:
        number = device.device
        stages = ", ".join(str(stage.stage) for stage in schedule.stages_of(number))
        yield naming("process_name", number, 0, name=f"device {number}: stages {stages}")
        yield naming("process_sort_index", number, 0, sort_index=number)
        for lane in ir.LANES:
            if getattr(device, lane):
                for thread, source in ((THREADS[lane], "forecast"), (THREADS[lane] + 1, "measured")):
                    yield naming("thread_name", number, thread, name=f"{lane} {source}")
                    yield naming("thread_sort_index", number, thread, sort_index=thread)


def _forecast(schedule: ir.Schedule, device: int, step: int, shift: int, scale: float) -> Iterator[TraceEvent]:
    """Yield what was forecast for a step; named so that no reader takes it for a measured op."""
    for _, lane, op, start, end in schedule.timed(device):
        yield {
            "ph": "X",
            "name": f"forecast {_name(op)}",
            "cat": "forecast",
            "pid": device,
            "tid": THREADS[lane],
            "ts": (shift + start * scale) / 1000,
            "dur": (end - start) * scale / 1000,
            "args": {"forecast": op.id, "step": step},
        }


def _measured(table: Table, op: ir.Op, device: int, step: int, ran: OpTime, origin: int) -> TraceEvent:
    _, lane, start, end = ran
    about: dict[str, Any] = {"op": op.id, "kind": op.name, "stage": op.stage, "microbatch": op.microbatch, "step": step}
    if op.slice_or_none is not None:
        about["slice"] = op.slice_or_none
    if isinstance(op, ir.SavedOp):
        about["layers"] = list(op.layers)
    if isinstance(op, ir.Offload | ir.Reload):
        about["bytes"] = table.copied(op)
    return {
        "ph": "X",
        "name": _name(op),
        "cat": op.name,
        "pid": device,
        "tid": THREADS[lane] + 1,
        "ts": (start - origin) / 1000,
        "dur": (end - start) / 1000,
        "args": about,
    }


def _name(op: ir.Op) -> str:
    return range_name(op.name, op.stage, op.microbatch, op.slice_or_none)
