"""Chrome traces (the JSON Trace Event Format): of `optpipe run --trace` or torch's profiler as they are read, and the
text of ours: the events of a file, and what it says of itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import LARGEST_TRACE, read_text, said_by
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

T = TypeVar("T")
TraceEvent = dict[str, Any]
"""An event as it is written."""
FORMAT = "optpipe-trace"
"""What a trace of `optpipe run --trace` says that it is."""


class ReadEvent(msgspec.Struct, frozen=True):
    """What counts of an event; times in microseconds."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class Trace(msgspec.Struct, frozen=True):
    """A trace file; torch's times count from `baseTimeNanoseconds`."""

    events: list[ReadEvent] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    about: dict[str, Any] = msgspec.field(name="otherData", default_factory=dict)

    def ranges(self) -> list[ReadEvent]:
        """Return the events that last for some time."""
        return [event for event in self.events if event.ph == "X"]


class RunStage(msgspec.Struct, frozen=True):
    """Where a stage of the run was, and its layers `[first, end)`."""

    stage: int
    device: Annotated[int, msgspec.Meta(ge=0, lt=ir.MOST_DEVICES)]
    layers: tuple[int, int]
    selective: list[int] = []
    """Of its layers, those with selective recompute."""


class About(msgspec.Struct, frozen=True, tag_field="format", tag=FORMAT):
    """What `run --trace` says of the run."""

    profile_digest: str
    real: bool
    time_scale: Annotated[float, msgspec.Meta(gt=0)]
    """What the forecast's times are multiplied by."""
    stages: list[RunStage]
    first_step: int = 0
    """Of the schedule that has these stages; steps before it ran another one."""
    units: ir.Units | None = None
    """Of a schedule with slices, or with microbatches of unequal length."""
    schedule: str = ""
    """The digest of the last schedule that ran."""
    first_schedule: str | None = None
    """The digest of the first one; None: the last is the only one."""


def read(path: Path) -> Trace:
    """Read a trace; raise BadInput where the file is none."""
    try:
        return msgspec.json.decode(read_text(path, LARGEST_TRACE), type=Trace)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"{path}: is no Chrome trace: {said_by(error)}") from error


def said(path: Path, what: object, kind: type[T], expected: str) -> T:
    """Return a part of what a trace says of itself as a record; raise BadInput where it is none."""
    try:
        return msgspec.convert(what, kind)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: is no {expected}: {said_by(error)}") from error


def about_run(path: Path, trace: Trace) -> About:
    """Return what a trace of `optpipe run --trace` says of the run; raise BadInput where it is no such trace."""
    return said(path, trace.about, About, "trace of optpipe run --trace")


def to_text(events: Iterable[TraceEvent], about: Mapping[str, Any]) -> str:
    """Return the file, one event per line; `about` is what it says of itself."""
    lines = ",\n".join(map(json.JSONEncoder(separators=(",", ":")).encode, events))
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{lines}\n]}}\n'


def naming(what: str, process: int, thread: int, **args: str | int) -> TraceEvent:
    """Return the event that names or orders a process or a thread."""
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
