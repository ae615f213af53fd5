"""A profile from a real run: the times of its ops, and the speed of its copies, in place of those of a base profile.

A run shows how long an op of a whole stage took. Its layers get shares in the proportion that the base profile gives
them. What the run did not do (a kind of op, a copy in one direction alone) stays as in the base, bytes too.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from optpipe_compiler.documents.files import LARGEST_TRACE, read_text
from optpipe_compiler.documents.profile import Layer, Link, Profile, Quantity, value_of
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

TIMES = ("forward", "backward_input", "backward_weight", "backward", "recompute")
COPIES = {"offload": "d2h", "reload": "h2d"}


class RunStage(msgspec.Struct, frozen=True):
    """Where a stage of the run was, and its layers `[first, end)`."""

    stage: int
    device: int
    layers: tuple[int, int]
    selective: list[int] = []
    """Of its layers, those with selective recompute."""


class About(msgspec.Struct, frozen=True, tag_field="format", tag="optpipe-trace"):
    """What `run --trace` says of the run."""

    profile_digest: str
    real: bool
    time_scale: float
    stages: list[RunStage]
    first_step: int = 0
    """Of the schedule that has these stages; steps before it ran another one."""


class RunOp(msgspec.Struct, frozen=True):
    """One measured op."""

    kind: str
    stage: int
    step: int
    begin_ns: int
    end_ns: int
    layers: tuple[int, int] | None = None
    nbytes: int = 0


class _Event(msgspec.Struct, frozen=True):
    ph: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class _Trace(msgspec.Struct, frozen=True):
    about: About = msgspec.field(name="otherData")
    events: list[_Event] = msgspec.field(name="traceEvents")


@dataclass(frozen=True)
class Run:
    """The ops of a run's timed steps: those after the first, which warms up, unless there is only one."""

    name: str
    about: About
    ops: list[RunOp]


@dataclass(frozen=True)
class Update:
    """One number of the run against the base: a stage's kind of op, or a link's direction."""

    what: str
    base: int
    measured: Quantity
    unit: Literal["ns", "bytes/s"]


@dataclass(frozen=True)
class FromRun:
    """The profile, and what the run changed in it."""

    profile: Profile
    changes: list[Update] = field(default_factory=list)


def read_run(path: Path) -> Run:
    """Read a trace of `optpipe run --trace`; raise BadInput if it is none, or of a rehearsal."""
    try:
        trace = msgspec.json.decode(read_text(path, LARGEST_TRACE), type=_Trace)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"{path}: is no trace of optpipe run --trace: {error}") from error
    if not trace.about.real:
        raise BadInput(f"{path}: is of a rehearsal, which takes the times of its forecast; expected a run with a model")
    ops = [_op(event) for event in trace.events if event.ph == "X" and "op" in event.args]
    ops = [op for op in ops if op.step >= trace.about.first_step]
    first = min((op.step for op in ops), default=0)
    timed = [op for op in ops if op.step > first] or ops
    if not timed:
        raise BadInput(f"{path}: has no measured op")
    return Run(str(path), trace.about, timed)


def _op(event: _Event) -> RunOp:
    args = event.args
    begin = round(event.ts * 1000)
    return msgspec.convert(
        {
            "kind": event.cat,
            "stage": args.get("stage"),
            "step": args.get("step"),
            "begin_ns": begin,
            "end_ns": begin + round(event.dur * 1000),
            "layers": args.get("layers"),
            "nbytes": args.get("bytes", 0),
        },
        RunOp,
    )


def profile_from_run(base: Profile, name: str, run: Run) -> FromRun:
    """Return `base` (the profile of the run; `name` stands for its file) with the times and copy speeds of `run`."""
    if run.about.profile_digest != base.digest():
        raise BadInput(
            f"{name}: is not the profile that the run of {run.name} was planned with: its digest is "
            f"{base.digest()[:19]}, expected {run.about.profile_digest[:19]}"
        )
    layers = base.expanded_layers()
    overhead = value_of(base.machine.op_overhead_ns)
    changes: list[Update] = []
    for stage in run.about.stages:
        for kind in TIMES:
            ops = [op for op in run.ops if (op.kind, op.stage) == (kind, stage.stage)]
            if ops:
                changes += _retime(layers, stage, kind, ops, overhead)
    links = list(base.machine.links)
    for index, link in enumerate(links):
        links[index] = _relink(link, index, base, run, changes)
    machine = msgspec.structs.replace(base.machine, links=links)
    return FromRun(msgspec.structs.replace(base, machine=machine, layers=_grouped(layers)), changes)


def _time(layer: Layer, kind: str) -> int:
    """The base time of a layer, with the defaults of the format."""
    cost = getattr(layer, f"{kind}_ns")
    if cost is not None:
        return value_of(cost)
    if kind == "backward":
        return value_of(layer.backward_input_ns) + value_of(layer.backward_weight_ns)
    return value_of(layer.forward_ns)


def _again(layer: Layer) -> int:
    """What selective recompute adds to a backward of the layer."""
    return 0 if layer.selective is None else value_of(layer.selective.recompute_ns)


def _retime(layers: list[Layer], stage: RunStage, kind: str, ops: Sequence[RunOp], overhead: int) -> list[Update]:
    """Scale `kind` of the stage's layers, in place, by the median of measured / base."""
    before = [_time(layer, kind) for layer in layers]
    again = [0] * len(layers)
    for index in stage.selective if kind in ("backward_input", "backward") else ():
        again[index] = _again(layers[index])
    ratios = []
    for op in ops:
        mine = slice(*(op.layers or stage.layers))
        expected = sum(before[mine]) + sum(again[mine])
        if expected:
            ratios.append(max(0, op.end_ns - op.begin_ns - overhead) / expected)
    if not ratios:
        return []
    middle, spread = _middle(ratios)
    for index in range(*stage.layers):
        light = layers[index].selective
        if light is not None and again[index]:
            scaled = _measured(again[index] * middle, again[index] * spread, len(ratios))
            layers[index] = msgspec.structs.replace(
                layers[index], selective=msgspec.structs.replace(light, recompute_ns=scaled)
            )
        layers[index] = msgspec.structs.replace(
            layers[index], **{f"{kind}_ns": _measured(before[index] * middle, before[index] * spread, len(ratios))}
        )
    whole = sum(before[slice(*stage.layers)]) + sum(again)
    measured = _measured(whole * middle, whole * spread, len(ratios))
    return [Update(f"{kind} of stage {stage.stage}", whole, measured, "ns")]


def _relink(link: Link, index: int, base: Profile, run: Run, changes: list[Update]) -> Link:
    """Return the link with the bandwidths that its devices' copies had, alone and against the other direction."""
    named = {device for other in base.machine.links for device in other.devices or ()}
    device_of = {stage.stage: stage.device for stage in run.about.stages}
    mine = set(link.devices) if link.devices is not None else set(device_of.values()) - named
    copies = [op for op in run.ops if op.kind in COPIES and device_of[op.stage] in mine]
    latency = value_of(link.latency_ns)
    speeds: dict[str, list[float]] = defaultdict(list)
    for op in copies:
        neighbours = mine if link.devices is not None else {device_of[op.stage]}
        against = (o for o in copies if o.kind != op.kind and device_of[o.stage] in neighbours and o.step == op.step)
        duplex = any(o.begin_ns < op.end_ns and op.begin_ns < o.end_ns for o in against)
        net = max(1, op.end_ns - op.begin_ns - latency)
        speeds[f"{'duplex_' if duplex else ''}{COPIES[op.kind]}_bytes_per_s"].append(op.nbytes * 1e9 / net)
    found: dict[str, Quantity] = {}
    for name, values in sorted(speeds.items()):
        if max(values) < 1:
            continue
        middle, spread = _middle(values)
        found[name] = _measured(max(1.0, middle), spread, len(values))
        known = getattr(link, name)
        known = getattr(link, name.removeprefix("duplex_")) if known is None else known
        changes.append(Update(f"{name} of link {index}", value_of(known), found[name], "bytes/s"))
    return msgspec.structs.replace(link, **found)


def _middle(values: Iterable[float]) -> tuple[float, float]:
    """Return median and interquartile range."""
    found = list(values)
    if len(found) < 2:
        return found[0], 0.0
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return middle, high - low


def _measured(value: float, spread: float, samples: int) -> Quantity:
    return Quantity(value=round(value), source="measured", samples=samples, spread=round(spread))


def _with_attention(layer: Layer) -> Layer:
    """Return the layer with no more attention in its times than these have now, so that it can still be sliced."""
    if layer.slices is None:
        return layer
    backward = value_of(layer.backward_input_ns)
    if layer.backward_ns is not None:
        backward = min(backward, value_of(layer.backward_ns))
    most = {"forward_attention_ns": value_of(layer.forward_ns), "backward_input_attention_ns": backward}
    over = {
        name: Quantity(value=limit, source="measured")
        for name, limit in most.items()
        if (known := getattr(layer.slices, name)) is not None and value_of(known) > limit
    }
    return msgspec.structs.replace(layer, slices=msgspec.structs.replace(layer.slices, **over)) if over else layer


def _grouped(layers: Iterable[Layer]) -> list[Layer]:
    """Put equal layers in a row into one record."""
    single = (_with_attention(msgspec.structs.replace(layer, count=1)) for layer in layers)
    return [
        msgspec.structs.replace(layer, count=len(list(equal)))
        for layer, equal in groupby(single)  # records compare by value
    ]
