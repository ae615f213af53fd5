"""Memory over forecast time: the table of docs/IR.md, summed along the forecast's starts and ends."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from optpipe_compiler.forecast.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from optpipe_compiler.documents import ir

Curve = list[tuple[int, int]]
"""Time in ns and the bytes held from then on."""


def device_curve(schedule: ir.Schedule, device: int) -> Curve:
    """Return what the device holds over the forecast, weights and reserve included."""
    table = Table(schedule)
    always = schedule.setup.reserve_bytes + schedule.static_bytes(device)
    return _summed(_changes(schedule, device, table.on_device), always)


def host_curve(schedule: ir.Schedule, devices: Iterable[int]) -> Curve:
    """Return what the offloads of these devices hold on the host over the forecast."""
    on_host = Table(schedule).on_host
    changes = (change for device in devices for change in _changes(schedule, device, on_host))
    return _summed(((time, size) for time, size in changes if size), 0)


def _changes(
    schedule: ir.Schedule, device: int, table: Callable[[ir.Op], tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    for _, _, op, start, end in schedule.timed(device, messages=True):
        yield from zip((start, end), table(op), strict=True)


def _summed(changes: Iterable[tuple[int, int]], level: int) -> Curve:
    """Return one point per moment; of what happens at one moment only the sum shows."""
    at: dict[int, int] = defaultdict(int)
    for time, change in changes:
        at[time] += change
    curve: Curve = []
    for time in sorted(at):
        level += at[time]
        curve.append((time, level))
    return curve
