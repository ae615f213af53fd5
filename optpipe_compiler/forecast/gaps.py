"""Where compute lanes idle, and which resource binds there.

The bubble of a device is the time within the makespan in which its compute lane runs nothing; it falls into gaps
between ops. Each gap has one cause. To find it, walk from the op that ends the gap to its critical predecessor, to
that one's, and so on. The walk has no slack: each op on it starts the moment its predecessor (or the message from it)
lets it. An op *stood in line* from when its inputs were there to its start, unless it read what its predecessor made.
The gap is blamed on the first op of the walk that stood in line for at least as long as the gap lasts: without that
line the gap could be gone. What the op stood in line for is

* memory: it waited for bytes to be freed; or it ran in the order of its lane, but while it was ready the lane idled for
  as long as the op takes, and there its bytes would not have fitted under the cap.
* transfer: it waited for a reload, or it is a transfer and its link was busy.
* copies: it was ready, and copies took the compute of its device.
* imbalance: it was ready, and its device was busy with other work for (nearly) all that time.
* order: it was ready, the lane idled for as long as it takes, there was room, and the order has it later all the same.
* slack: the forecast starts it later than anything in the file asks for.

A gap that lasts exactly as long as the copies around it take is blamed on these. Two causes are for the ends of the
pipeline:

* fill: the time before a device's first op, and gaps whose walk reaches the start of the schedule before an op that
  stood in line for as long: the pipeline has not come that far.
* drain: the time after a device's last op, and gaps after its last forward, when nothing new can enter, unless an op
  stood in line for memory or transfers after that forward, for as long as the gap lasts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_compiler.documents import ir
from optpipe_compiler.forecast.items import Reason
from optpipe_compiler.forecast.lines import Cause, Lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.forecast.items import Item, ReasonedTimeline
    from optpipe_compiler.forecast.memory import Curve


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a compute lane idles."""

    device: int
    begin_ns: int
    end_ns: int
    cause: Cause
    resource: str
    """What binds: `memory of device 0`, `host memory`, `link 1 d2h`, `device 7`; empty for fill, drain and slack."""
    root: int | None
    """Index of the item that stood in line; None where nothing did."""

    @property
    def length_ns(self) -> int:
        """How long the lane idles."""
        return self.end_ns - self.begin_ns


Blame = tuple[Cause, str, int | None]
LONGEST = 2**62
"""ns; waits beyond are all alike."""


def find_gaps(timeline: ReasonedTimeline, curves: list[Curve], begin_ns: int, end_ns: int) -> list[Gap]:
    """Return the gaps of all compute lanes, by device and time."""
    lanes: list[list[Item]] = [[] for _ in curves]
    for item in timeline.items:
        if item.lane == "compute":
            lanes[item.device].append(item)
    idle = [one for device, lane in enumerate(lanes) for one in _idle(device, lane, begin_ns, end_ns)]
    blamed = _blamed(timeline, Lines(timeline, curves), [one for one in idle if one.blame is None])
    return [
        Gap(one.device, one.begin_ns, one.end_ns, *(next(blamed) if one.blame is None else one.blame)) for one in idle
    ]


AT_THE_END = (Cause.MEMORY, Cause.TRANSFER, Cause.COPIES, Cause.SLACK)
"""What a gap after the last forward may be blamed on."""


class _Idle(NamedTuple):
    """A time in which a compute lane idles."""

    device: int
    begin_ns: int
    end_ns: int
    blame: Blame | None
    """None: a walk from the op that ends it says."""
    op: int = -1
    """The item of that op."""
    last_forward: int | None = None
    """When the last forward of the lane has ended, for what is behind it."""


def _idle(device: int, lane: list[Item], begin_ns: int, end_ns: int) -> Iterator[_Idle]:
    """Yield when one compute lane idles."""
    last_forward = max((item.end_ns for item in lane if isinstance(item.op, ir.Forward)), default=begin_ns)
    idle_from = begin_ns
    for item in lane:
        if idle_from < item.begin_ns:
            blame: Blame | None = None
            if item.reason is Reason.COPIES:
                blame = Cause.COPIES, f"device {device}", item.index
            elif item is lane[0]:
                blame = Cause.FILL, "", None
            behind = last_forward if idle_from >= last_forward else None
            yield _Idle(device, idle_from, item.begin_ns, blame, item.index, behind)
        idle_from = item.end_ns
    if idle_from < end_ns:
        yield _Idle(device, idle_from, end_ns, (Cause.DRAIN if lane else Cause.FILL, "", None))


def _blamed(timeline: ReasonedTimeline, lines: Lines, gaps: list[_Idle]) -> Iterator[Blame]:
    """Walk from gaps to what is to blame."""
    found = [lines.of(item) for item in timeline.items]
    waits = [-1 if line is None else line.wait_ns for line in found]
    late = [-1 if line is None or line.cause not in AT_THE_END else line.wait_ns for line in found]
    predecessors = [item.predecessor for item in timeline.items]
    ops, lengths = [gap.op for gap in gaps], [gap.end_ns - gap.begin_ns for gap in gaps]
    roots = zip(*(_first(predecessors, one, ops, lengths) for one in (waits, late)), strict=True)
    for gap, (before, behind) in zip(gaps, roots, strict=True):
        root = before if gap.last_forward is None else behind
        line = None if root is None else found[root]
        if root is None or line is None:
            yield (Cause.FILL if gap.last_forward is None else Cause.DRAIN), "", None
        elif gap.last_forward is not None and timeline.items[root].begin_ns <= gap.last_forward:
            yield Cause.DRAIN, "", None
        else:
            yield line.cause, line.resource, root


def _first(predecessors: list[int | None], waits: list[int], ops: list[int], lengths: list[int]) -> list[int | None]:
    """Return, among each op, its critical predecessor, that one's and so on, the first that waits for its length.

    Row j holds for each op where 2^j steps lead, and the longest wait of the ops passed on the way.
    """
    nobody = len(waits)
    after = [np.array([*(nobody if one is None else one for one in predecessors), nobody])]
    longest = [np.array([*(min(wait, LONGEST) for wait in waits), -1])]
    while 1 << len(after) <= nobody:
        step = after[-1]
        longest.append(np.maximum(longest[-1], longest[-1][step]))
        after.append(step[step])
    at, length = np.array(ops, np.int64), np.array([min(one, LONGEST) for one in lengths], np.int64)
    for step, most in zip(reversed(after), reversed(longest), strict=True):
        at = np.where(most[at] < length, step[at], at)
    return [
        one if waited else None for one, waited in zip(at.tolist(), (longest[0][at] >= length).tolist(), strict=True)
    ]
