"""The bytes that are held on each device and on the host at every moment of the forecast, by docs/IR.md's table."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe_compiler.forecast.items import Timed, Timeline

Curve = list[tuple[int, int]]
"""Steps (ns, bytes held from then on), in order of time. Two steps at one time are a level that lasts no time."""


def device_curve(timeline: Timeline, device: int) -> Curve:
    """Return what `device` holds, always-there bytes included."""
    schedule, table = timeline.schedule, timeline.table
    ops = [timed for lane in ("compute", "d2h", "h2d") for timed in timeline.lanes[device, lane]]
    changes = ((timed, *table.on_device(timed.op)) for timed in ops)
    return _curve(timeline.begin_ns, schedule.setup.reserve_bytes + table.static_bytes[device], changes)


def host_curve(timeline: Timeline) -> Curve:
    """Return what the offloads of all devices hold on the host."""
    ops = [timed for (_, lane), timed_lane in timeline.lanes.items() if lane != "compute" for timed in timed_lane]
    return _curve(timeline.begin_ns, 0, ((timed, *timeline.table.on_host(timed.op)) for timed in ops))


def _curve(begin: int, held: int, changes: Iterable[tuple[Timed, int, int]]) -> Curve:
    """Return the steps; at one moment what completes is freed before what starts takes its bytes.

    What an op of no length takes it frees again in the order of its lane.
    """
    events: list[tuple[int, int, int, int]] = []
    for number, (timed, taken, given) in enumerate(changes):
        if taken:
            events.append((timed.begin_ns, 1, number, taken))
        if given:
            late = taken > 0 and timed.begin_ns == timed.end_ns
            events.append((timed.end_ns, late, number, given))
    curve = [(begin, held)]
    for now, group in groupby(sorted(events), key=itemgetter(0)):
        peak, before = 0, held
        for *_, change in group:
            held += change
            peak = max(peak, held)
        if peak > max(before, held):
            curve.append((now, peak))
        if held != curve[-1][1]:
            curve.append((now, held))
    return curve
