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
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler.documents import ir
from optpipe_compiler.forecast.items import Reason
from optpipe_compiler.forecast.lines import Cause, Lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.forecast.items import Item, Timeline
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


def find_gaps(timeline: Timeline, curves: list[Curve], begin_ns: int, end_ns: int) -> list[Gap]:
    """Return the gaps of all compute lanes, by device and time."""
    search = _Search(timeline, Lines(timeline, curves))
    lanes: list[list[Item]] = [[] for _ in curves]
    for item in timeline.items:
        if item.lane == "compute":
            lanes[item.device].append(item)
    return [gap for device, lane in enumerate(lanes) for gap in search.of_lane(device, lane, begin_ns, end_ns)]


AT_THE_END = (Cause.MEMORY, Cause.TRANSFER, Cause.COPIES, Cause.SLACK)
"""What a gap after the last forward may be blamed on."""


class _Search:
    """Walks from gaps to what is to blame."""

    def __init__(self, timeline: Timeline, lines: Lines) -> None:
        self.items = timeline.items
        self.lines = [lines.of(item) for item in timeline.items]
        waits = [-1 if line is None else line.wait_ns for line in self.lines]
        late = [
            wait if line is not None and line.cause in AT_THE_END else -1
            for line, wait in zip(self.lines, waits, strict=True)
        ]
        predecessors = [item.predecessor for item in timeline.items]
        self.any = _Ancestors(predecessors, waits)
        self.at_the_end = _Ancestors(predecessors, late)

    def of_lane(self, device: int, lane: list[Item], begin_ns: int, end_ns: int) -> Iterator[Gap]:
        """Yield the gaps of one compute lane."""
        last_forward = max((item.end_ns for item in lane if isinstance(item.op, ir.Forward)), default=begin_ns)
        idle_from = begin_ns
        for item in lane:
            if idle_from < item.begin_ns:
                blame: Blame = Cause.FILL, "", None
                if item.reason is Reason.COPIES:
                    blame = Cause.COPIES, f"device {device}", item.index
                elif item is not lane[0]:
                    blame = self.blame(
                        item, item.begin_ns - idle_from, last_forward if idle_from >= last_forward else None
                    )
                yield Gap(device, idle_from, item.begin_ns, *blame)
            idle_from = item.end_ns
        if idle_from < end_ns:
            yield Gap(device, idle_from, end_ns, Cause.DRAIN if lane else Cause.FILL, "", None)

    def blame(self, item: Item, length_ns: int, last_forward: int | None) -> Blame:
        """Return cause, resource and item for a gap of that length before `item`."""
        walk = self.any if last_forward is None else self.at_the_end
        found = walk.first(item.index, length_ns)
        line = None if found is None else self.lines[found]
        if found is None or line is None or (last_forward is not None and self.items[found].begin_ns <= last_forward):
            return (Cause.FILL if last_forward is None else Cause.DRAIN), "", None
        return line.cause, line.resource, found


class _Ancestors:
    """Finds, among an op, its critical predecessor, that one's and so on, the first that stood in line for so long.

    Row j holds for each op where 2^j steps lead, and the longest wait of the ops passed on the way.
    """

    def __init__(self, predecessors: list[int | None], waits: list[int]) -> None:
        nobody = len(waits)
        self.after = [np.array([*(nobody if one is None else one for one in predecessors), nobody])]
        self.longest = [np.array([*(min(wait, LONGEST) for wait in waits), -1])]
        while 1 << len(self.after) <= nobody:
            step, longest = self.after[-1], self.longest[-1]
            self.after.append(step[step])
            self.longest.append(np.maximum(longest, longest[step]))

    def first(self, item: int, wait_ns: int) -> int | None:
        """Return the first from `item` on that stood in line for at least `wait_ns`; None where none did."""
        for after, longest in zip(reversed(self.after), reversed(self.longest), strict=True):
            if longest[item] < min(wait_ns, LONGEST):
                item = int(after[item])
        return item if self.longest[0][item] >= min(wait_ns, LONGEST) else None
