"""Why a schedule takes as long as it does: what each op waits for, what is held when, and where devices idle.

`analyse` reads the contract and the forecast of one schedule file and nothing else. A view asks it for items (ops with
times and what they waited for), memory curves and gaps; the definitions are in the modules of the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from optpipe_compiler.documents.files import uncollected
from optpipe_compiler.documents.memory import HOLDERS
from optpipe_compiler.forecast.gaps import Gap, find_gaps
from optpipe_compiler.forecast.items import Item, Reason, ReasonedTimeline
from optpipe_compiler.forecast.lines import Cause
from optpipe_compiler.forecast.memory import Curve, Stack, device_stack, host_curve, total

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule

__all__ = ["HOLDERS", "Analysis", "Cause", "Curve", "Gap", "Item", "Reason", "Stack", "analyse"]


@dataclass(frozen=True)
class Analysis:
    """A schedule with everything derived from it."""

    schedule: Schedule
    begin_ns: int
    """First start of an op that takes its lane; forecasts of `compile` begin at 0."""
    end_ns: int
    items: list[Item]
    """By device (in file order), lane (compute, d2h, h2d) and position; `items[i].index == i`."""
    memory: list[Curve]
    """Per device: (ns, bytes held from then on)."""
    holders: list[Stack]
    """The same by what holds the bytes, in the order of HOLDERS."""
    host: Curve
    """What the offloads of all devices hold on the host together."""
    gaps: list[Gap]
    """By device and time. Their lengths sum to the bubble: devices x makespan - compute time."""

    @cached_property
    def _lanes(self) -> dict[tuple[int, str], list[Item]]:
        return {key: list(lane) for key, lane in groupby(self.items, key=attrgetter("device", "lane"))}

    @cached_property
    def _gaps_of(self) -> dict[int, list[Gap]]:
        return {device: list(gaps) for device, gaps in groupby(self.gaps, key=attrgetter("device"))}

    def gaps_of(self, device: int) -> list[Gap]:
        """Return the gaps of one compute lane in order."""
        return self._gaps_of.get(device, [])

    def idle_ns(self, device: int) -> int:
        """Return how long one compute lane idles."""
        return sum(gap.length_ns for gap in self.gaps_of(device))

    @property
    def bubble_ns(self) -> int:
        """Compute-idle time of all devices together."""
        return sum(gap.length_ns for gap in self.gaps)

    def lane(self, device: int, lane: str) -> list[Item]:
        """Return the items of one lane in order."""
        return self._lanes.get((device, lane), [])

    def chain(self, item: Item) -> list[Item]:
        """Return `item` and its critical predecessors, back to one that starts at the beginning or has none."""
        found = [item]
        while found[-1].predecessor is not None:
            found.append(self.items[found[-1].predecessor])
        return found

    def critical_path(self) -> list[Item]:
        """Return the chain of the op that ends last, in order of time."""
        return self.chain(max(self.items, key=lambda item: item.end_ns))[::-1] if self.items else []

    def shares(self) -> dict[tuple[Cause, str], float]:
        """Return the part of all device time (devices x makespan) lost per cause and binding resource, most first."""
        whole = max(1, (self.end_ns - self.begin_ns) * len(self.schedule.devices))
        lost: dict[tuple[Cause, str], int] = {}
        for gap in self.gaps:
            lost[gap.cause, gap.resource] = lost.get((gap.cause, gap.resource), 0) + gap.length_ns
        ranked = sorted(lost.items(), key=lambda one: (-one[1], one[0][0].value, one[0][1]))
        return {key: length / whole for key, length in ranked}


@uncollected()
def analyse(schedule: Schedule) -> Analysis:
    """Return the analysis of a schedule; raise BadInput where its forecast does not fit its lanes."""
    timeline = ReasonedTimeline(schedule)
    items = timeline.items
    begin = min((item.begin_ns for item in items), default=0)
    end = max((item.end_ns for item in items), default=0)
    stacks = [device_stack(timeline, device) for device in range(len(schedule.devices))]
    curves = [total(stack) for stack in stacks]
    host = host_curve(timeline)
    return Analysis(
        schedule=schedule,
        begin_ns=begin,
        end_ns=end,
        items=items,
        memory=curves,
        holders=stacks,
        host=host,
        gaps=find_gaps(timeline, curves, begin, end),
    )
