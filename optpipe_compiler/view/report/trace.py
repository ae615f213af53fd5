"""Reading what was measured: Chrome traces with a range per op, by `optpipe run --trace` or torch's profiler."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from optpipe_compiler.documents import traces
from optpipe_compiler.documents.files import check_digest
from optpipe_compiler.documents.ops import range_name
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.documents.traces import About, ReadEvent, Trace

Span = tuple[int, int]
"""Begin and end in ns."""


@dataclass(frozen=True)
class Measured:
    """When the ops of a schedule ran, by op id, in ns from the forecast's begin on.

    Where only some devices were measured, their first op is as late as in the forecast.
    """

    ran: dict[str, Span]
    devices: tuple[int, ...] | None = None
    """Those that were measured; None: all."""
    time_scales: tuple[float, ...] = ()
    """Other than 1, that times of a run were divided by."""
    swaps: tuple[TraceSwap, ...] = ()
    """What the traces tell of changes to other schedules, in order."""

    @property
    def end_ns(self) -> int:
        """When the last op ended."""
        return max(end for _, end in self.ran.values())

    @property
    def span_ns(self) -> int:
        """From the begin of the first op to the end of the last."""
        return self.end_ns - min(begin for begin, _ in self.ran.values())


class TraceSwap(msgspec.Struct, frozen=True):
    """A change to another schedule while the run went on, as `run --replan --trace` says it; times in ns."""

    step: int
    digest: str
    forecast_before_ns: int
    forecast_after_ns: int
    measured_before_ns: int
    swap_ns: int
    moved_layers: int
    measured_after_ns: int | None = None
    undoes: bool = False
    """Whether it went back to the schedule before the last swap."""


def _swaps(path: Path, trace: Trace) -> list[TraceSwap]:
    return traces.said(path, trace.about.get("swaps", []), list[TraceSwap], "trace of optpipe run --replan")


def _steps_of(digest: str, swaps: Sequence[TraceSwap]) -> list[range] | None:
    """Return the steps that ran a schedule, which may have come more than once; None: all steps, or nothing is said."""
    if not swaps:
        return None
    turns = [range(*ends) for ends in pairwise([0, *(swap.step for swap in swaps), 2**31])]
    first = swaps[1].digest if len(swaps) > 1 and swaps[1].undoes else None
    found = [
        turn for turn, name in zip(turns, [first, *(swap.digest for swap in swaps)], strict=True) if name == digest
    ]
    return found or turns[:1]


def measured(paths: Sequence[Path], schedule: Schedule) -> Measured:
    """Return when each op ran in the last step of the traces.

    An op is found by its id in `args.op`, by its kind there with `args.stage` and `args.microbatch`, or by a name such
    as `forward 3 m2` or torch's `PP:3F2`; `args.step` tells steps apart. Raises BadInput if a file is no trace, is of
    another schedule, or has no op of this one.
    """
    names = _names(schedule)
    found: dict[str, tuple[int, Span, int]] = {}
    scales, changes = set(), set()
    for clock, path in enumerate(paths):
        before = len(found)
        trace = traces.read(path)
        swaps = _swaps(path, trace)
        changes |= {*swaps}
        steps = _steps_of(schedule.digest, swaps)
        about = None
        if trace.about.get("format") == traces.FORMAT:
            about = traces.about_run(path, trace)
            _check_schedule(path, about, swaps, schedule)
        scale = 1.0 if about is None else about.time_scale
        scales.add(scale)
        for step, op_id, ran in _ranges(trace, names, scale):
            if steps is not None and not any(step in turn for turn in steps):
                continue
            if op_id not in found or (step, ran) > found[op_id][:2]:
                found[op_id] = step, ran, SHARED if about is None else clock
        if len(found) == before:
            raise BadInput(f"{path}: has no range of an op of this schedule, expected names such as PP:0F0 or args.op")
    ran_last = _aligned(found, schedule)
    devices = sorted({device.device for device in schedule.devices if any(op.id in ran_last for op in device.ops)})
    return Measured(
        ran_last,
        tuple(devices) if len(devices) < len(schedule.devices) else None,
        tuple(sorted(scales - {1.0})),
        tuple(sorted(changes, key=lambda swap: swap.step)),
    )


SHARED = -1
"""The clock of all traces of torch's profiler; every run has its own."""


def _check_schedule(path: Path, about: About, swaps: Sequence[TraceSwap], schedule: Schedule) -> None:
    """Refuse the trace of a run in which the schedule had no turn."""
    turns = {about.first_schedule, *(swap.digest for swap in swaps)}
    if schedule.digest not in turns:
        check_digest(about.schedule, schedule.digest, f"{path}: is the trace of a run of another schedule")


def _aligned(found: dict[str, tuple[int, Span, int]], schedule: Schedule) -> dict[str, Span]:
    """Return the ops of the last step; of each clock the first begins when the forecast has the first of these."""
    last = max(step for step, _, _ in found.values())
    ran_last = {op_id: (ran, clock) for op_id, (step, ran, clock) in found.items() if step == last}
    planned = {op.id: start for _, _, op, start, _ in schedule.timed()}
    first = min(planned.values())
    late: dict[int, int] = {}
    for clock in {clock for _, clock in ran_last.values()}:
        mine = {op_id: begin for op_id, ((begin, _), of) in ran_last.items() if of == clock}
        late[clock] = min(planned[op_id] for op_id in mine) - first - min(mine.values())
    return {op_id: (begin + late[clock], end + late[clock]) for op_id, ((begin, end), clock) in ran_last.items()}


def _ranges(trace: Trace, names: dict[str, str], scale: float) -> Iterator[tuple[int, str, Span]]:
    """Yield step, op id and times / scale of every event that is an op; what ran on a GPU rather than its launch."""
    events = trace.ranges()
    on_gpu = [event for event in events if event.cat == "gpu_user_annotation"]
    for event in on_gpu or events:
        op_id = next((names[name] for name in _called(event) if name in names), None)
        if op_id is not None:
            step = event.args.get("step", 0)
            begin = trace.base_ns + round(event.ts * 1000 / scale)
            yield step if isinstance(step, int) else 0, op_id, (begin, begin + round(event.dur * 1000 / scale))


def _called(event: ReadEvent) -> Iterator[str]:
    """Yield what an event may call its op, the surest first."""
    op = event.args.get("op")
    yield str(op)
    yield range_name(str(op), event.args.get("stage", -1), event.args.get("microbatch", -1))
    yield event.name.removeprefix("PP:")


def _names(schedule: Schedule) -> dict[str, str]:
    """Return the op id for every name that a trace may give an op that takes time."""
    names: dict[str, str] = {}
    for device in schedule.devices:
        for op in device.ops:
            if re.match("send_|recv_", op.name):
                continue
            names[op.id] = op.id
            names[range_name(op.name, op.stage, *op.unit)] = op.id
            names[op.text] = op.id
    return names
