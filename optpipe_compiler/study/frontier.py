"""Throughput against memory: the points of a sweep, what follows from one for another, and what they answer.

A schedule is one for every cap that holds its peak, and no schedule within a cap beats the bound of a larger one, if
that looks at no fewer placements and slices (with `--slices auto` it may). So along one line (GPU, devices and
microbatches fixed) values never grow with the cap, and bounds never do either. An answer is decided where the bounds
exclude every other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from optpipe_compiler.documents.files import Record
from optpipe_compiler.documents.profile import Count, Positive
from optpipe_compiler.study.planned import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


class Point(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The best known schedule for one number of devices and microbatches under one cap."""

    gpu: str | None = None
    """Whose costs were estimated; None: those of a profile."""
    devices: Positive
    microbatches: Positive
    mem_bytes: Count
    outcome: Outcome
    makespan_ns: Count | None
    lower_bound_ns: Count
    peak_bytes: Count | None
    method: str = ""
    carried_from_bytes: Count | None = None
    """The cap whose schedule this is, because it fits and is better than what was found for this cap."""
    reason: str = ""
    finished: bool | None = None
    """Whether more time is unlikely to give a much better schedule; None in files of revision 1."""
    slices: Positive | None = None
    """Of every microbatch in this schedule; None without one, and in files of revision 2."""
    least_mem_bytes: Count | None = None
    """Where nothing fits: a cap that would do, if it is known; None in files of revision 3."""
    least_is_smallest: bool = False
    """Whether no smaller cap would do."""

    @property
    def line(self) -> tuple[str | None, int, int]:
        """What does not change along a line of the picture: GPU, devices and microbatches."""
        return self.gpu, self.devices, self.microbatches

    @property
    def throughput(self) -> float:
        """Microbatches per second; 0 without a schedule."""
        return self.microbatches * 10**9 / self.makespan_ns if self.makespan_ns else 0.0

    @property
    def ceiling(self) -> float:
        """The throughput that no schedule exceeds, in microbatches per second."""
        return self.microbatches * 10**9 / self.lower_bound_ns if self.lower_bound_ns else 0.0


def groups(points: Iterable[Point], key: Callable[[Point], tuple[Any, ...]]) -> list[list[Point]]:
    """Return the points of each GPU and key, each group from the smallest cap to the largest."""
    ordered = sorted(points, key=lambda point: (point.gpu or "", *key(point), point.mem_bytes))
    return [list(group) for _, group in groupby(ordered, key=lambda point: (point.gpu, *key(point)))]


def lines(points: Iterable[Point]) -> list[list[Point]]:
    """Return the points of each line, from the smallest cap to the largest."""
    return groups(points, lambda point: (point.devices, point.microbatches))


def frontier(points: Iterable[Point], *, carries_bounds: bool = True) -> list[Point]:
    """Return all points, line by line, with schedules carried to larger caps and bounds to smaller ones.

    Where caps choose what is searched (`--slices auto`) bounds are not carried, and that of a schedule from another cap
    is the lower of both caps'.
    """
    result: list[Point] = []
    for line in lines(points):
        carried: list[Point] = []
        for index, point in enumerate(line):
            leaner = [p for p in line[index + 1 :] if p.peak_bytes is not None and p.peak_bytes <= point.mem_bytes]
            for other in [*carried[-1:], *sorted(leaner, key=lambda p: p.makespan_ns or 0)[:1]]:
                before, point = point, _carried(point, other)
                if point is not before and not carries_bounds:
                    lower = min(before.lower_bound_ns, other.lower_bound_ns)
                    point = msgspec.structs.replace(point, lower_bound_ns=lower)
            carried.append(point)
        bound = 0
        for index in range(len(carried) - 1, -1, -1) if carries_bounds else ():
            bound = max(bound, carried[index].lower_bound_ns)
            carried[index] = _bounded(carried[index], bound)
        result += carried
    return result


def _carried(point: Point, before: Point) -> Point:
    if point.outcome == "beyond memory" or before.makespan_ns is None:
        return point
    if point.makespan_ns is not None and point.makespan_ns <= before.makespan_ns:
        return point
    return msgspec.structs.replace(
        point,
        outcome="feasible",
        makespan_ns=before.makespan_ns,
        peak_bytes=before.peak_bytes,
        method=before.method,
        carried_from_bytes=before.carried_from_bytes or before.mem_bytes,
        reason="",
        least_mem_bytes=None,
        least_is_smallest=False,
        finished=before.finished,
        slices=before.slices,
    )


def _bounded(point: Point, bound: int) -> Point:
    if point.makespan_ns is None:
        return msgspec.structs.replace(point, lower_bound_ns=bound)
    met = bound >= point.makespan_ns
    return msgspec.structs.replace(
        point, lower_bound_ns=min(bound, point.makespan_ns), outcome="optimal" if met else "feasible"
    )


# -- answers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheapestMemory:
    """The smallest cap of a line that loses less than the tolerance against the line's largest cap."""

    devices: int
    microbatches: int
    mem_bytes: int
    loss: float
    largest_bytes: int
    gpu: str | None = None
    most_loss: float = 1.0
    """What is lost at most, whatever better schedule there is for the largest cap (bound)."""
    decided: bool = False
    """Whether the bounds say so, too: this cap loses less than the tolerance, and each smaller one more."""


@dataclass(frozen=True)
class EnoughMicrobatches:
    """The fewest microbatches that lose less than the tolerance against the most, at the largest cap."""

    devices: int
    microbatches: int
    most: int
    gain: float
    """By how much the throughput of the most exceeds this one's."""
    mem_bytes: int
    gpu: str | None = None
    most_gain: float = float("inf")
    """By how much it can exceed this one's at most (bound)."""
    decided: bool = False
    """Whether the bounds say so, too: these lose less than the tolerance, and fewer lose more."""


@dataclass(frozen=True)
class BestDevices:
    """Under one cap, the number of devices with the most throughput per device, each with its best microbatches."""

    mem_bytes: int
    devices: int
    per_device: float
    """Microbatches per second and device."""
    others: tuple[tuple[int, float], ...]
    gpu: str | None = None
    decided: bool = False
    """Whether the bounds say so, too."""


@dataclass(frozen=True)
class BestGpu:
    """The GPU with the most throughput, together or per device, each GPU at its best point."""

    gpu: str
    per_device: bool
    throughput: float
    """Microbatches per second, or per second and device."""
    devices: int
    microbatches: int
    mem_bytes: int
    others: tuple[tuple[str, float], ...]
    decided: bool = False
    """Whether the bounds say so, too."""


@dataclass(frozen=True)
class LeastCap:
    """The smallest cap that would do for a line of which nothing fits any."""

    devices: int
    microbatches: int
    mem_bytes: int
    gpu: str | None = None


@dataclass(frozen=True)
class Answers:
    """All that follows from a sweep."""

    cheapest_memory: list[CheapestMemory]
    enough_microbatches: list[EnoughMicrobatches]
    best_devices: list[BestDevices]
    best_gpus: list[BestGpu]
    least_memory: list[LeastCap]


def answer(points: Sequence[Point], tolerance: float) -> Answers:
    """Answer from the points that the hardware permits."""
    possible = [point for point in points if point.outcome != "beyond memory"]
    return Answers(
        cheapest_memory(possible, tolerance),
        enough_microbatches(possible, tolerance),
        best_devices(possible),
        best_gpus(possible),
        least_memory(possible),
    )


def least_memory(points: Sequence[Point]) -> list[LeastCap]:
    """Answer for every line of which no cap has a schedule."""
    found = []
    for line in lines(points):
        known = [point.least_mem_bytes for point in line if point.least_mem_bytes is not None]
        if known and all(point.makespan_ns is None for point in line):
            found.append(LeastCap(line[0].devices, line[0].microbatches, min(known), line[0].gpu))
    return found


def cheapest_memory(points: Sequence[Point], tolerance: float) -> list[CheapestMemory]:
    """Answer for every line with a schedule at its largest cap; only lines of several caps have a choice."""
    found = []
    for line in lines(points):
        top = line[-1]
        if len(line) < 2 or not top.throughput:
            continue
        first = next(point for point in line if _loss(point, top) < tolerance or point is top)
        loss, most, decided = _loss(first, top), _most_loss(first, top), _is_decided(line, first, top, tolerance)
        mine = first.devices, first.microbatches, first.mem_bytes, loss, top.mem_bytes, first.gpu
        found.append(CheapestMemory(*mine, most, decided))
    return found


def _most_loss(point: Point, reference: Point) -> float:
    """Return what a point's schedule can lose at most against the best of the reference's cap, whatever that is."""
    return max(0.0, 1 - point.throughput / reference.ceiling) if reference.ceiling else 0.0


def _is_decided(tried: Sequence[Point], first: Point, top: Point, tolerance: float) -> bool:
    """Whether the first of those tried that loses less than the tolerance would be the same with perfect schedules."""
    before = tried[: tried.index(first)]
    excluded = all(1 - point.ceiling / top.throughput >= tolerance for point in before if _is_open(point))
    return excluded and (first is top or _most_loss(first, top) < tolerance)


def enough_microbatches(points: Sequence[Point], tolerance: float) -> list[EnoughMicrobatches]:
    """Answer for every number of devices that was tried with several numbers of microbatches at the largest cap."""
    found = []
    for mine in groups(points, lambda point: (point.devices,)):
        cap = max(point.mem_bytes for point in mine)
        tried = sorted((p for p in mine if p.mem_bytes == cap), key=lambda point: point.microbatches)
        done = [point for point in tried if point.throughput]
        if len(done) < 2:
            continue
        top = done[-1]
        first = next(point for point in done if _loss(point, top) < tolerance or point is top)
        gain, most = _gain(top, first), max(0.0, top.ceiling / first.throughput - 1)
        here = top.devices, first.microbatches, top.microbatches, gain, cap, top.gpu
        found.append(EnoughMicrobatches(*here, most, _is_decided(tried, first, top, tolerance)))
    return found


def best_devices(points: Sequence[Point]) -> list[BestDevices]:
    """Answer for every cap under which several numbers of devices were tried and one has a schedule."""
    found = []
    for mine in groups(points, lambda point: (point.mem_bytes,)):
        best: dict[int, float] = {}
        for point in mine:
            best[point.devices] = max(best.get(point.devices, 0.0), point.throughput / point.devices)
        ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))
        if len(ranked) > 1 and ranked[0][1]:
            devices, value = ranked[0]
            open_ = any(p.ceiling / p.devices > value for p in mine if p.devices != devices and _is_open(p))
            found.append(BestDevices(mine[0].mem_bytes, devices, value, tuple(ranked[1:]), mine[0].gpu, not open_))
    return found


def best_gpus(points: Sequence[Point]) -> list[BestGpu]:
    """Answer for all devices together and per device, where several GPUs were tried and one has a schedule."""
    return [*_best_gpu(points, per_device=False), *_best_gpu(points, per_device=True)]


def _best_gpu(points: Sequence[Point], *, per_device: bool) -> Iterator[BestGpu]:
    def value(point: Point) -> float:
        return point.throughput / point.devices if per_device else point.throughput

    best = {point.gpu: point for point in sorted(points, key=lambda point: (value(point), -point.mem_bytes))}
    ranked = sorted(best.values(), key=value, reverse=True)
    others = tuple((point.gpu, value(point)) for point in ranked[1:] if point.gpu is not None)
    top = ranked[0] if others else None
    if top is not None and top.gpu is not None and top.throughput:
        rest = [point for point in points if point.gpu != top.gpu and _is_open(point)]
        most = max((p.ceiling / (p.devices if per_device else 1) for p in rest), default=0.0)
        mine = top.gpu, per_device, value(top), top.devices, top.microbatches, top.mem_bytes, others
        yield BestGpu(*mine, most <= value(top))


def _is_open(point: Point) -> bool:
    """Whether some schedule may be there."""
    return point.outcome not in ("infeasible", "beyond memory")


def _gain(point: Point, reference: Point) -> float:
    return point.throughput / reference.throughput - 1


def _loss(point: Point, reference: Point) -> float:
    return 1 - point.throughput / reference.throughput
