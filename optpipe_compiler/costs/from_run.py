"""A profile from a real run: the times of its ops, and the speed of its copies, in place of those of a base profile.

A run shows how long an op of a whole stage took. Its layers get shares in the proportion that the base profile gives
them. Of units of several lengths, slices among them, it shows what grows with the tokens and what is attention
(fit.py). What the run did not do stays as in the base, bytes too, but for the times of ops that do the same work as
others that it did: a fused backward and its halves, a recompute and its forward are as much slower or faster as those.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from optpipe_compiler.costs.fit import Sample, fitted, quartiles
from optpipe_compiler.documents import traces
from optpipe_compiler.documents.files import check_digest, said_by
from optpipe_compiler.documents.profile import Layer, Link, Profile, Quantity, Sliceable, value_of
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from optpipe_compiler.costs.fit import Fit
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Machine
    from optpipe_compiler.documents.traces import About, RunStage

Span = tuple[int, int]
"""Begin and end in ns."""
COPIES = {"offload": "d2h", "reload": "h2d"}
OFF = 0.15
"""By how much the ops of one unit may be off what a profile can say of them before that is noted."""


class RunOp(msgspec.Struct, frozen=True):
    """One measured op."""

    kind: str
    stage: int
    step: int
    begin_ns: int
    end_ns: int
    layers: tuple[int, int] | None = None
    nbytes: int = 0
    tokens: tuple[int, int] | None = None
    """Of its unit within the microbatch, [begin, end); None: all, as many as the profile is for."""


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
    """The profile, what the run changed in it, and what it saw that a profile cannot say."""

    profile: Profile
    changes: list[Update] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_run(path: Path) -> Run:
    """Read a trace of `optpipe run --trace`; raise BadInput if it is none, or of a rehearsal."""
    trace = traces.read(path)
    about = traces.about_run(path, trace)
    if not about.real:
        raise BadInput(f"{path}: is of a rehearsal, which takes the times of its forecast; expected a run with a model")
    events = [event for event in trace.ranges() if "op" in event.args]
    try:
        ops = [_op(event, about.units) for event in events]
    except (msgspec.ValidationError, LookupError, TypeError) as error:
        raise BadInput(f"{path}: has an op that is none of its schedule: {said_by(error)}") from error
    ops = [op for op in ops if op.step >= about.first_step]
    if missing := {op.stage for op in ops} - {stage.stage for stage in about.stages}:
        raise BadInput(f"{path}: has ops of stage {min(missing)}, which $.otherData.stages does not have")
    if about.units is None and any("slice" in event.args for event in events):
        raise BadInput(
            f"{path}: is of a schedule with slices and does not say where they are cut, expected a trace of this "
            "version of optpipe run --trace"
        )
    first = min((op.step for op in ops), default=0)
    timed = [op for op in ops if op.step > first] or ops
    if not timed:
        raise BadInput(f"{path}: has no measured op")
    return Run(str(path), about, timed)


def _op(event: traces.ReadEvent, units: ir.Units | None) -> RunOp:
    args = event.args
    begin = round(event.ts * 1000)
    tokens = None if units is None else units.tokens_of(args["microbatch"], args.get("slice"))
    return msgspec.convert(
        {
            "kind": event.cat,
            "stage": args.get("stage"),
            "step": args.get("step"),
            "begin_ns": begin,
            "end_ns": begin + round(event.dur * 1000),
            "layers": args.get("layers"),
            "nbytes": args.get("bytes", 0),
            "tokens": tokens,
        },
        RunOp,
    )


def profile_from_run(base: Profile, name: str, run: Run) -> FromRun:
    """Return `base` (the profile of the run; `name` stands for its file) with the times and copy speeds of `run`."""
    planned = f"{name}: is not the profile that the run of {run.name} was planned with"
    check_digest(base.digest(), run.about.profile_digest, planned)
    layers = base.expanded_layers()
    run = replace(run, ops=_undisturbed(run, base.machine))
    ops: dict[tuple[int, str], list[RunOp]] = defaultdict(list)
    for op in run.ops:
        ops[op.stage, op.kind].append(op)
    changes: list[Update] = []
    notes: list[str] = []
    for stage in run.about.stages:
        retimed = _Retimed(base, stage, layers, run.about.units, ops)
        layers[slice(*stage.layers)] = retimed.layers()
        changes += retimed.changes
        notes += retimed.notes
    links = list(base.machine.links)
    for index, link in enumerate(links):
        links[index] = _relink(link, index, base, run, changes)
    machine = msgspec.structs.replace(base.machine, links=links)
    return FromRun(msgspec.structs.replace(base, machine=machine, layers=_grouped(layers)), changes, notes)


def without_each_other(
    ops: Sequence[Span], copies: Mapping[str, Sequence[Span]], share: float
) -> tuple[list[int], dict[str, list[int]]]:
    """Return what the ops of compute and the copies (by lane) of a device would have taken without each other, in ns.

    Copies take `share` of their time from compute: while both run, each goes on at 1 / (1 + share) of its speed.
    """
    lost = share / (1 + share)
    beside = sum((_overlaps(ops, lane) for lane in copies.values()), np.zeros(len(ops)))
    return _shorter(ops, lost * beside), {
        lane: _shorter(spans, lost * _overlaps(spans, ops)) for lane, spans in copies.items()
    }


def _shorter(spans: Sequence[Span], lost_ns: NDArray[np.float64]) -> list[int]:
    return [max(0, round(end - begin - ns)) for (begin, end), ns in zip(spans, lost_ns.tolist(), strict=True)]


def _overlaps(spans: Sequence[Span], others: Sequence[Span]) -> NDArray[np.float64]:
    """Return for how long others, of which no two overlap, run beside each span."""
    if not spans or not others:
        return np.zeros(len(spans))
    times = np.array(sorted(others), np.float64)
    run = np.concatenate([[0.0], np.repeat(np.cumsum(times[:, 1] - times[:, 0]), 2)[:-1]])
    reached: NDArray[np.float64] = np.interp(np.array(spans, np.float64), times.ravel(), run)
    return reached[:, 1] - reached[:, 0]


def _undisturbed(run: Run, machine: Machine) -> list[RunOp]:
    """Return the ops without the time that copies took from compute, and compute from copies."""
    if not any(value_of(link.compute_permille) for link in machine.links):
        return run.ops
    device_of = {stage.stage: stage.device for stage in run.about.stages}
    links = machine.host_links(1 + max(device_of.values()))
    share_of = {device: value_of(link.compute_permille) / 1000 for members, link in links for device in members}
    groups: dict[tuple[int, int], list[RunOp]] = defaultdict(list)
    for op in run.ops:
        groups[device_of[op.stage], op.step].append(op)
    found = []
    for (device, _), ops in groups.items():
        share = share_of.get(device, 0.0)
        lanes: dict[str, list[RunOp]] = {"compute": [], "d2h": [], "h2d": []}
        for op in ops:
            lanes[COPIES.get(op.kind, "compute")].append(op)
        spans = {lane: [(op.begin_ns, op.end_ns) for op in mine] for lane, mine in lanes.items()}
        taken, copies = without_each_other(spans.pop("compute"), spans, share)
        for lane, mine in lanes.items():
            found += [
                msgspec.structs.replace(op, end_ns=op.begin_ns + ns)
                for op, ns in zip(mine, taken if lane == "compute" else copies[lane], strict=True)
            ]
    return found


class _Base:
    """The times of a layer in ns, with the defaults of the format; those of attention and of slices by kind of op."""

    def __init__(self, layer: Layer, *, is_selective: bool) -> None:
        slices = layer.slices or Sliceable()
        self.again = value_of(layer.selective.recompute_ns) if is_selective and layer.selective is not None else 0
        """What selective recompute adds to backward_input and to a fused backward."""
        self.time = {
            "forward": value_of(layer.forward_ns),
            "backward_input": value_of(layer.backward_input_ns),
            "backward_weight": value_of(layer.backward_weight_ns),
            "backward": layer.fused_ns,
            "recompute": layer.recompute_or_forward_ns,
        }
        self.attention = dict.fromkeys(self.time, 0) | {
            "forward": value_of(slices.forward_attention_ns),
            "backward_input": value_of(slices.backward_input_attention_ns),
            "backward": value_of(slices.backward_input_attention_ns),
            "recompute": min(self.time["recompute"], value_of(slices.forward_attention_ns)),
        }
        self.overhead = {
            "forward": value_of(slices.forward_overhead_ns),
            "backward_input": value_of(slices.backward_input_overhead_ns),
            "backward_weight": value_of(slices.backward_weight_overhead_ns),
            "backward": slices.fused_overhead_ns,
            "recompute": value_of(slices.forward_overhead_ns),
        }

    def linear(self, kind: str) -> int:
        """What grows with the tokens."""
        return self.time[kind] - self.attention[kind] + (self.again if kind in ("backward_input", "backward") else 0)


def times_of(layer: Layer) -> dict[str, int]:
    """Return what the ops of a layer take in ns, by kind, with the defaults of the format."""
    return _Base(layer, is_selective=False).time


GROUPS = (("forward",), ("backward_input", "backward"), ("backward_weight",), ("recompute",))
"""Kinds of ops with the same attention."""
ALIKE = {
    "backward": ("backward_input", "backward_weight"),
    "backward_input": ("backward",),
    "backward_weight": ("backward",),
    "recompute": ("forward",),
}
"""Ops that do the same work as others."""


class _Retimed:
    """The layers of a stage with the times of its ops."""

    def __init__(
        self,
        base: Profile,
        stage: RunStage,
        layers: Sequence[Layer],
        units: ir.Units | None,
        ops: Mapping[tuple[int, str], Sequence[RunOp]],
    ) -> None:
        machine = base.machine
        self._first = stage.layers[0]
        self._layers = layers[slice(*stage.layers)]
        numbers = range(*stage.layers)
        self._bases = [_Base(layers[n], is_selective=n in stage.selective) for n in numbers]
        self._speed = 1.0 if machine.time_permille is None else machine.time_permille[stage.device] / 1000
        self._overhead = value_of(machine.op_overhead_ns)
        self._whole = 1 if units is None else units.tokens
        self._is_cut = units is not None and units.slices > 1
        self.changes: list[Update] = []
        self.notes: list[str] = []
        self._factors: dict[str, tuple[float, float]] = {}
        """By kind, what is told of it: the factors of its linear and of its attention part."""
        self._spread: dict[str, tuple[float, int]] = {}
        """By kind that was measured: the interquartile range as a share, and how many ops."""
        for group in GROUPS:
            samples = {kind: self._samples(kind, ops.get((stage.stage, kind), ())) for kind in group}
            samples = {kind: found for kind, found in samples.items() if found}
            if samples:
                self._take(stage.stage, samples, fitted(samples))

    def _samples(self, kind: str, ops: Sequence[RunOp]) -> list[Sample]:
        found = []
        for op in ops:
            mine = self._bases if op.layers is None else self._bases[slice(*(n - self._first for n in op.layers))]
            begin, end = op.tokens or (0, self._whole)
            tokens, pairs = (end - begin) / self._whole, (end**2 - begin**2) / self._whole**2
            linear = sum(one.linear(kind) * tokens + one.overhead[kind] * self._is_cut for one in mine) * self._speed
            attention = sum(one.attention[kind] for one in mine) * pairs * self._speed
            took = max(0, op.end_ns - op.begin_ns - self._overhead)
            if linear + attention:
                found.append(Sample((op.layers, op.tokens), linear, attention, took))
        return found

    def _take(self, stage: int, samples: Mapping[str, Sequence[Sample]], found: Fit) -> None:
        for kind, ops in samples.items():
            linear, attention = self._factors[kind] = found.linear[kind], found.attention[kind]
            spread, count = self._spread[kind] = found.spread[kind], len(ops)
            parts = [sum(one.linear(kind) for one in self._bases), sum(one.attention[kind] for one in self._bases)]
            told = [(f"{kind} of stage {stage}", sum(parts), linear * parts[0] + attention * parts[1])]
            if found.is_apart and parts[1]:
                told.append((f"attention in {kind} of stage {stage}", parts[1], attention * parts[1]))
            for what, before, after in told:
                measured = _measured(after * self._speed, spread * after * self._speed, count)
                self.changes.append(Update(what, round(before * self._speed), measured, "ns"))
            if found.off[kind] > OFF:
                self.notes.append(
                    f"{kind} of stage {stage}: the ops of one unit are {found.off[kind]:.0%} off what tokens and "
                    "attention say of them"
                )

    def layers(self) -> list[Layer]:
        """Return the layers."""
        return [self._layer(layer, base) for layer, base in zip(self._layers, self._bases, strict=True)]

    def _layer(self, layer: Layer, base: _Base) -> Layer:
        changed: dict[str, Any] = {}
        for kind in base.time:
            factors = self._factors.get(kind) or self._like(kind)
            is_default = getattr(layer, f"{kind}_ns") is None
            if factors is not None and (kind in self._spread or not is_default):
                linear = base.time[kind] - base.attention[kind]
                changed[f"{kind}_ns"] = self._cost(kind, factors[0] * linear + factors[1] * base.attention[kind])
        if layer.selective is not None and base.again:
            kind = "backward_input" if "backward_input" in self._spread else "backward"
            if kind in self._spread:
                again = self._cost(kind, self._factors[kind][0] * base.again)
                changed["selective"] = msgspec.structs.replace(layer.selective, recompute_ns=again)
        if layer.slices is not None:
            changed["slices"] = self._slices(layer.slices, base)
        return msgspec.structs.replace(layer, **changed)

    def _slices(self, slices: Sliceable, base: _Base) -> Sliceable:
        """Return what a slice costs besides, with the attention that all kinds of ops have room for."""
        changed: dict[str, Quantity] = {}
        for kind in ("forward", "backward_input", "backward"):
            if kind in self._factors:
                value = self._factors[kind][1] * base.attention[kind]
                name = f"{'forward' if kind == 'forward' else 'backward_input'}_attention_ns"
                known = changed.get(name)
                if known is None or value < known.value:
                    changed[name] = self._cost(kind, value)
        for kind in ("forward", "backward_input", "backward_weight", "backward"):
            factors = self._factors.get(kind) or self._like(kind)
            is_default = getattr(slices, f"{kind}_overhead_ns") is None
            if factors is not None and (kind in self._spread or not is_default):
                changed[f"{kind}_overhead_ns"] = self._cost(kind, factors[0] * base.overhead[kind])
        return msgspec.structs.replace(slices, **changed)

    def _like(self, kind: str) -> tuple[float, float] | None:
        """Return the factors of a kind that was not measured, by those that do the same work; None: of none."""
        known = [self._factors[other] for other in ALIKE.get(kind, ()) if other in self._factors]
        if len(known) < len(ALIKE.get(kind, (kind,))):
            return None
        if len(known) == 1:
            return known[0]
        weights = [sum(one.linear(other) for one in self._bases) for other in ALIKE[kind]]
        total = sum(weights) or 1
        return sum(factor * w for (factor, _), w in zip(known, weights, strict=True)) / total, known[0][1]

    def _cost(self, kind: str, value: float) -> Quantity:
        """Return a number that was measured, or that follows from others."""
        if kind not in self._spread:
            return Quantity(value=round(value), source="estimated")
        spread, count = self._spread[kind]
        return _measured(value, spread * value, count)


def _relink(link: Link, index: int, base: Profile, run: Run, changes: list[Update]) -> Link:
    """Return the link with the bandwidths that its devices' copies had, alone and against the other direction.

    In a plan a link serves one copy of a direction at a time. So copies that went beside others of their direction
    count only where none went without, and each with its part of the link's time.
    """
    device_of = {stage.stage: stage.device for stage in run.about.stages}
    links = base.machine.host_links(1 + max(device_of.values()))
    mine = {device for members, one in links if one is link for device in members}
    through: dict[tuple[int, int], list[RunOp]] = defaultdict(list)
    for op in run.ops:
        if op.kind in COPIES and (device := device_of[op.stage]) in mine:
            through[-1 if link.devices is not None else device, op.step].append(op)
    latency = value_of(link.latency_ns)
    speeds: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for op, is_duplex, took in (found for copies in through.values() for found in _copied(copies)):
        is_beside = took < op.end_ns - op.begin_ns - 0.5
        speed = op.nbytes * 1e9 / max(1.0, took - latency)
        speeds[f"{'duplex_' if is_duplex else ''}{COPIES[op.kind]}_bytes_per_s"][is_beside].append(speed)
    found: dict[str, Quantity] = {}
    for name, (by_themselves, beside_others) in sorted(speeds.items()):
        values = by_themselves or beside_others
        if max(values) < 1:
            continue
        middle, spread = quartiles(values)
        found[name] = _measured(max(1.0, middle), spread, len(values))
        known = getattr(link, name)
        known = getattr(link, name.removeprefix("duplex_")) if known is None else known
        changes.append(Update(f"{name} of link {index}", value_of(known), found[name], "bytes/s"))
    return msgspec.structs.replace(link, **found)


def _copied(copies: Sequence[RunOp]) -> Iterator[tuple[RunOp, bool, float]]:
    """Yield each copy of a link, whether the other direction was busy meanwhile, and how much of the link's time it had
    in ns: of n copies of a direction at once, each has the n-th part."""
    ways = {kind: [op for op in copies if op.kind == kind] for kind in COPIES}
    spans = {kind: np.array([(op.begin_ns, op.end_ns) for op in ops], np.float64) for kind, ops in ways.items()}
    offloads, reloads = spans.values()
    for ops, own, others in zip(ways.values(), (offloads, reloads), (reloads, offloads), strict=True):
        if ops:
            busy, had = _integrals(own, others)[0], _integrals(own, own)[1]
            yield from zip(ops, (busy > 0).tolist(), had.tolist(), strict=True)


def _integrals(spans: NDArray[np.float64], others: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Return, over each of `spans`, for how long any of `others` runs, and the integral of 1 over how many do."""
    if not len(others):
        return np.zeros(len(spans)), np.zeros(len(spans))
    times, places = np.unique(others, return_inverse=True)
    changes = np.zeros(len(times))
    np.add.at(changes, places.reshape(others.shape), [1, -1])
    running, lasts = np.cumsum(changes)[:-1], np.diff(times)
    parts = lasts * (running > 0), lasts * (running > 0) / np.maximum(running, 1)
    reached = (np.interp(spans, times, np.concatenate([[0.0], np.cumsum(part)])) for part in parts)
    return tuple(at[:, 1] - at[:, 0] for at in reached)


def _measured(value: float, spread: float, samples: int) -> Quantity:
    return Quantity(value=round(value), source="measured", samples=samples, spread=round(spread))


def _grouped(layers: Iterable[Layer]) -> list[Layer]:
    """Put equal layers in a row into one record."""
    single = (msgspec.structs.replace(layer, count=1) for layer in layers)
    return [
        msgspec.structs.replace(layer, count=len(list(equal)))
        for layer, equal in groupby(single)  # records compare by value
    ]
