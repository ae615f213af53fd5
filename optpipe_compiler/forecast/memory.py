"""The bytes that are held on each device and on the host at every moment of the forecast, by docs/IR.md's table."""

from __future__ import annotations

from itertools import chain, groupby
from operator import add, itemgetter
from typing import TYPE_CHECKING

from optpipe_compiler.documents.ir import LANES
from optpipe_compiler.documents.memory import NOTHING, Holds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from optpipe_compiler.forecast.items import Timed, Timeline

Curve = list[tuple[int, int]]
"""Steps (ns, bytes held from then on), in order of time. Two steps at one time are a level that lasts no time."""
Stack = list[tuple[int, Holds]]
"""A curve whose levels are told apart by what holds them."""


def device_stack(timeline: Timeline, device: int) -> Stack:
    """Return what `device` holds by holder, always-there bytes included."""
    schedule, lanes = timeline.schedule, [(device, lane) for lane in LANES]
    entries = (zip(timeline.lanes[key], timeline.bytes_of[key], strict=True) for key in lanes)
    changes = ((timed, *by_holder) for timed, (by_holder, _) in chain.from_iterable(entries))
    static = schedule.setup.reserve_bytes + schedule.static_bytes(device)
    return _stack(timeline.begin_ns, (static, *NOTHING[1:]), changes)


def host_curve(timeline: Timeline, devices: Collection[int] | None = None) -> Curve:
    """Return what the offloads of these devices (None: of all) hold on their hosts."""
    ops = [
        timed
        for (device, lane), timed_lane in timeline.lanes.items()
        if lane != "compute" and (devices is None or device in devices)
        for timed in timed_lane
    ]
    changes = ((timed, *timeline.table.on_host(timed.op)) for timed in ops)
    return total(_stack(timeline.begin_ns, (0,), ((timed, (taken,), (given,)) for timed, taken, given in changes)))


def total(stack: Stack) -> Curve:
    """Return what all holders hold together, without the steps that change only what holds the bytes."""
    curve: Curve = []
    for time, holds in stack:
        held = sum(holds)
        if not curve or held != curve[-1][1]:
            curve.append((time, held))
    return curve


def _stack(begin: int, held: Holds, changes: Iterable[tuple[Timed, Holds, Holds]]) -> Stack:
    """Return the steps; at one moment what completes is freed before what starts takes its bytes.

    What an op of no length takes it frees again in the order of its lane.
    """
    events: list[tuple[int, int, int, Holds]] = []
    for number, (timed, taken, given) in enumerate(changes):
        takes = any(taken)
        if takes:
            events.append((timed.begin_ns, 1, number, taken))
        if any(given):
            late = takes and timed.begin_ns == timed.end_ns
            events.append((timed.end_ns, late, number, given))
    stack, total = [(begin, held)], sum(held)
    for now, group in groupby(sorted(events), key=itemgetter(0)):
        before = most = total
        highest = held
        for *_, change in group:
            held = tuple(map(add, held, change))
            total += sum(change)
            if total > most:
                highest, most = held, total
        if most > max(before, total):
            stack.append((now, highest))
        if held != stack[-1][1]:
            stack.append((now, held))
    return stack
