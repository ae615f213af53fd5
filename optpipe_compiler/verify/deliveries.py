"""Rules on stated deliveries: what a device says of its sends is what happens-before says, neither more nor less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from optpipe_compiler.verify.placed import LANES, SENDS, PlacedOp, PlacedOps
from optpipe_compiler.verify.report import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.documents import ir
    from optpipe_compiler.verify.causality import Causality
    from optpipe_compiler.verify.placed import Lane


def names(placed: PlacedOps) -> Iterator[Violation]:
    """Statements name ops of the device and its sends, each send once per lane."""
    for number, device in enumerate(placed.schedule.devices):
        seen: set[tuple[Lane, str]] = set()
        for entry in _stated(device):
            place = placed.by_id.get(entry.before)
            if place is None or place.device != number:
                message = f"device {number} states deliveries before {entry.before!r}, which is none of its ops"
                yield Violation("deliveries", message, number)
                continue
            for name in entry.sends:
                send = placed.by_id.get(name)
                if send is None or send.device != number or not _is_send(send):
                    message = f"device {number} states the delivery of {name!r}, which is none of its sends"
                    yield place.breaks("deliveries", message)
                elif (place.lane, name) in seen:
                    yield place.breaks("deliveries", f"device {number} states the delivery of {name} twice", name)
                seen.add((place.lane, name))


def moments(placed: PlacedOps, causality: Causality) -> Iterator[Violation]:
    """Each delivery is stated, on each lane, for the first op that starts after it in every execution."""
    events = causality.events
    asked: list[tuple[PlacedOp, PlacedOp, bool]] = []
    for number, device in enumerate(placed.schedule.devices):
        if device.deliveries is msgspec.UNSET:
            continue
        at: dict[tuple[Lane, str], int] = {}
        for entry in _stated(device):
            before = placed.by_id[entry.before]
            at |= {(before.lane, send): before.index for send in entry.sends}
        lanes = [(lane, placed.lanes[number, lane]) for lane in LANES if placed.lanes[number, lane]]
        for send in filter(_is_send, placed.lanes[number, "compute"]):
            for lane, places in lanes:
                index = at.get((lane, send.id), len(places))
                asked += [(send, places[n], n == index) for n in (index - 1, index) if 0 <= n < len(places)]
    later = [events.start[place.id] for _, place, _ in asked]
    earlier = [events.done[send.id] for send, _, _ in asked]
    for (send, place, stated), implied in zip(asked, causality.implied(later, earlier).tolist(), strict=True):
        if implied != stated:
            what = "can start before" if stated else "starts after"
            message = f"{place.id} {what} the delivery of {send.id}, which device {place.device} states otherwise"
            yield place.breaks("deliveries", message, send.id)


def _stated(device: ir.Device) -> list[ir.Delivered]:
    return [] if device.deliveries is msgspec.UNSET else device.deliveries


def _is_send(place: PlacedOp) -> bool:
    return place.kind in SENDS
