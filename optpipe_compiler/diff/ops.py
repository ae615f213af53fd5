"""Op by op: what was added, removed and moved, what is split, offloaded or recomputed now, and which waits are new."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec

from optpipe_compiler.diff.records import Change, DifferentWaits, Moved, Regrouped, Retimed
from optpipe_compiler.documents import ir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe_compiler.diff.records import Unit


def _lanes(device: ir.Device) -> dict[str, list[ir.Op]]:
    return {
        "compute": [op for op in device.compute if not isinstance(op, ir.MessageOp)],
        "messages": [op for op in device.compute if isinstance(op, ir.MessageOp)],
        "d2h": list(device.d2h),
        "h2d": list(device.h2d),
    }


def _ops(schedule: ir.Schedule) -> list[ir.Op]:
    return [op for device in schedule.devices for op in device.ops]


def counts(schedule: ir.Schedule) -> Counter[str]:
    """Return how many ops of each kind there are."""
    return Counter(op.name for op in _ops(schedule))


def moved(old: ir.Schedule, new: ir.Schedule) -> list[Moved]:
    """Return the lanes whose order differs."""
    found = []
    for before, after in zip(old.devices, new.devices, strict=False):
        lanes = zip(_lanes(before).items(), _lanes(after).values(), strict=True)
        rows = (
            _lane(before.device, lane, [op.id for op in ops], [op.id for op in others])
            for (lane, ops), others in lanes
            if ops != others
        )
        found += [row for row in rows if row is not None]
    return found


def _lane(device: int, lane: str, old: list[str], new: list[str]) -> Moved | None:
    if old == new:
        return None
    place = {name: index for index, name in enumerate(old)}
    kept = [place[name] for name in new if name in place]
    pairs = enumerate(zip_longest(old, new))
    position, (first, other) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
    moved = len(kept) - longest_rise(kept)
    return Moved(device, lane, len(kept), moved, len(new) - len(kept), len(old) - len(kept), position, first, other)


def longest_rise(numbers: Sequence[int]) -> int:
    """Return the length of the longest increasing subsequence, by patience sorting."""
    tops: list[int] = []
    for number in numbers:
        at = bisect_left(tops, number)
        tops[at : at + 1] = [number]
    return len(tops)


def regrouped(old: ir.Schedule, new: ir.Schedule) -> list[Regrouped]:
    """Return memory ops and splits that were added or removed, by stage and layers."""
    by_slice = old.setup.slices == new.setup.slices > 1
    before, after = _groups(old, by_slice=by_slice), _groups(new, by_slice=by_slice)
    found = []
    for what, stage, layers in sorted(before.keys() | after.keys(), key=lambda key: (key[1], key[0], key[2] or ())):
        had, has = before.get((what, stage, layers), set()), after.get((what, stage, layers), set())
        if had != has:
            added, removed = (sorted(units, key=_place) for units in (has - had, had - has))
            found.append(Regrouped(what, stage, layers, added, removed))
    return found


def _place(unit: Unit) -> tuple[int, int]:
    return (unit, 0) if isinstance(unit, int) else unit


def _groups(schedule: ir.Schedule, *, by_slice: bool) -> dict[tuple[str, int, ir.Range | None], set[Unit]]:
    found: dict[tuple[str, int, ir.Range | None], set[Unit]] = defaultdict(set)
    for op in _ops(schedule):
        unit = (op.microbatch, op.slice_or_none or 0) if by_slice else op.microbatch
        if isinstance(op, ir.SavedOp):
            found[op.name, op.stage, op.layers].add(unit)
        elif isinstance(op, ir.BackwardInput):
            found["split", op.stage, None].add(unit)
    return found


def waits(old: ir.Schedule, new: ir.Schedule) -> list[DifferentWaits]:
    """Return the devices whose ops wait for others."""

    def of(device: ir.Device) -> Counter[tuple[str, str]]:
        return Counter((op.id, name) for op in device.ops for name in op.after)

    return _by_device(old, new, of)


def deliveries(old: ir.Schedule, new: ir.Schedule) -> list[DifferentWaits]:
    """Return the devices that know other deliveries."""

    def of(device: ir.Device) -> Counter[tuple[str, str]]:
        noted = [] if isinstance(device.deliveries, msgspec.UnsetType) else device.deliveries
        return Counter((one.before, send) for one in noted for send in one.sends)

    return _by_device(old, new, of)


def _by_device(
    old: ir.Schedule, new: ir.Schedule, of: Callable[[ir.Device], Counter[tuple[str, str]]]
) -> list[DifferentWaits]:
    pairs = [(before.device, of(before), of(after)) for before, after in zip(old.devices, new.devices, strict=False)]
    return [
        DifferentWaits(device, (has - had).total(), (had - has).total()) for device, had, has in pairs if had != has
    ]


def peers(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    """Return the messages that have another device at their other end."""

    def of(schedule: ir.Schedule) -> dict[str, int]:
        return {op.id: op.peer for op in _ops(schedule) if isinstance(op, ir.MessageOp)}

    before, after = of(old), of(new)
    return [Change("device", before[op], after[op], op) for op in before if after.get(op, before[op]) != before[op]]


def retimed(old: ir.Schedule, new: ir.Schedule) -> list[Retimed]:
    """Return how many ops of each lane are forecast for other times."""

    def of(schedule: ir.Schedule) -> dict[tuple[int, ir.Lane], list[tuple[Sequence[ir.Op], ir.Times]]]:
        found = defaultdict(list)
        for times in schedule.forecast.times:
            ops = schedule.devices[times.device].lanes[times.lane] if times.device < len(schedule.devices) else ()
            found[times.device, times.lane].append((ops, times))
        return found

    def by_id(lanes: list[tuple[Sequence[ir.Op], ir.Times]]) -> dict[str, tuple[int, int]]:
        rows = (zip(ops, times.start_ns, times.end_ns, strict=False) for ops, times in lanes)  # of rejected files, too
        return {op.id: (start, end) for row in rows for op, start, end in row}

    after, found = of(new), []
    for at, lanes in of(old).items():
        if lanes != after[at]:
            has = by_id(after[at])
            count = sum(has.get(op, times) != times for op, times in by_id(lanes).items())
            found += [Retimed(*at, count)] if count else []
    return found
