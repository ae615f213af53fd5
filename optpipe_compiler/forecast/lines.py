"""Ops that stood in line: ready, but not let in by a resource. `gaps` blames idle time on them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from optpipe_compiler.documents import ir
from optpipe_compiler.forecast.items import Reason
from optpipe_compiler.forecast.memory import host_curve

if TYPE_CHECKING:
    from optpipe_compiler.forecast.items import Item, ReasonedTimeline
    from optpipe_compiler.forecast.memory import Curve

Queue = tuple[str, int]
"""A serial resource: ("compute", device), or ("d2h" or "h2d", link)."""


class Cause(Enum):
    """Why a compute lane idles; the docstring of `gaps` has the definitions."""

    FILL = "fill"
    DRAIN = "drain"
    MEMORY = "memory"
    TRANSFER = "transfer"
    COPIES = "copies"
    IMBALANCE = "imbalance"
    ORDER = "order"
    SLACK = "slack"


class Line(msgspec.Struct, frozen=True, gc=False):
    """How long an op stood in line, and for what."""

    wait_ns: int
    cause: Cause
    resource: str


class Lines:
    """Finds out for what an op stood in line."""

    def __init__(self, timeline: ReasonedTimeline, curves: list[Curve]) -> None:
        self.timeline = timeline
        self.setup = timeline.schedule.setup
        self.curves = [_Levels(curve) for curve in curves]
        self.hosts = [
            (set(devices), _Levels(host_curve(timeline, set(devices))), cap) for devices, cap in self.setup.host_caps
        ]
        queues: dict[Queue, list[Item]] = defaultdict(list)
        for item in timeline.items:
            queues[self._queue_of(item)].append(item)
        self.queues = {queue: _Busy(items, timeline.begin_ns) for queue, items in queues.items()}

    def of(self, item: Item) -> Line | None:
        """Return the line in which an op stood, None if it started when its data was there."""
        wait = item.begin_ns - self.timeline.ready_ns(item)
        if wait <= 0:
            return None
        match item.reason:
            case Reason.SLACK:
                return Line(wait, Cause.SLACK, "")
            case Reason.MEMORY:
                return Line(wait, Cause.MEMORY, self._memory_of(item))
            case Reason.COPIES:
                return Line(wait, Cause.COPIES, self._resource(item))
            case Reason.TRANSFER if item.lane == "compute":
                reload = self.timeline.items[item.predecessor or 0]
                return Line(wait, Cause.TRANSFER, self._resource(reload))
            case Reason.ORDER | Reason.LINK if not self.timeline.feeds(item):
                busy = self.queues[self._queue_of(item)]
                idle, slot = busy.idle(item.begin_ns - wait, item.begin_ns)
                if idle < max(1, item.end_ns - item.begin_ns):
                    cause = Cause.IMBALANCE if item.lane == "compute" else Cause.TRANSFER
                    return Line(wait, cause, self._resource(item))
                if not self._fits(item, slot):
                    return Line(wait, Cause.MEMORY, self._memory_of(item))
                return Line(wait, Cause.ORDER, self._resource(item))
        return None

    def _fits(self, item: Item, slot: int) -> bool:
        """Whether the memory would have let `item` start just before `slot` and hold its bytes from then on."""
        if isinstance(item.op, ir.Offload):
            limits = [(levels, cap) for devices, levels, cap in self.hosts if item.device in devices]
            taken, given = self.timeline.table.on_host(item.op)
        else:
            limits = [(self.curves[item.device], self.setup.cap_bytes)]
            taken, given = self.timeline.table.on_device(item.op)
        return all(
            levels.before(slot) + taken <= cap and levels.highest(slot, item.begin_ns) + taken + given <= cap
            for levels, cap in limits
        )

    def _queue_of(self, item: Item) -> Queue:
        return item.lane, item.device if item.lane == "compute" else self.timeline.link_of.get(item.device, -1)

    def _resource(self, item: Item) -> str:
        lane, number = self._queue_of(item)
        return f"device {number}" if lane == "compute" else f"link {number} {lane}"

    def _memory_of(self, item: Item) -> str:
        return "host memory" if isinstance(item.op, ir.Offload) else f"memory of device {item.device}"


class _Busy:
    """When one serial resource is busy."""

    def __init__(self, items: list[Item], begin_ns: int) -> None:
        items = sorted(items, key=lambda item: (item.begin_ns, item.end_ns))
        self.begins = [item.begin_ns for item in items]
        self.ends = list(accumulate((item.end_ns for item in items), max))
        self.busy = list(accumulate((item.end_ns - item.begin_ns for item in items), initial=0))
        before = [begin_ns, *self.ends]
        self.idle_until = list(
            accumulate(
                (begin if begin > end else None for begin, end in zip(self.begins, before, strict=False)),
                lambda last, begin: last if begin is None else begin,
                initial=begin_ns,
            )
        )

    def idle(self, begin: int, end: int) -> tuple[int, int]:
        """Return how long it idles within [begin, end), where an op begins, and the end of the last such time."""
        first, last = bisect_right(self.ends, begin), bisect_left(self.begins, end)
        inside = self.busy[last] - self.busy[first] if last > first else 0
        if last > first and self.begins[first] < begin:
            inside -= begin - self.begins[first]
        at = end if not last or self.ends[last - 1] < end else self.idle_until[last]
        return end - begin - inside, at


class _Levels:
    """A memory curve to look levels up in."""

    def __init__(self, curve: Curve) -> None:
        self.times = [time for time, _ in curve]
        self.highest_of = [np.array([held for _, held in curve])]
        """Row j: the most of 2^j steps of the curve, from each step on."""
        while 1 << len(self.highest_of) <= len(curve):
            last, half = self.highest_of[-1], 1 << (len(self.highest_of) - 1)
            self.highest_of.append(np.maximum(last[:-half], last[half:]))

    def before(self, time: int) -> int:
        """Return what is held just before `time`."""
        return int(self.highest_of[0][max(0, bisect_left(self.times, time) - 1)])

    def highest(self, begin: int, end: int) -> int:
        """Return the most that is held within [begin, end)."""
        first = max(0, bisect_right(self.times, begin) - 1)
        last = max(bisect_left(self.times, end), first + 1)
        row = (last - first).bit_length() - 1
        return int(max(self.highest_of[row][first], self.highest_of[row][last - (1 << row)]))
