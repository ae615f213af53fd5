"""Rules on stated deliveries: what a device says of its sends is what happens-before says, neither more nor less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from optpipe_compiler.verify.placed import LANES, SENDS, PlacedOp, PlacedOps
from optpipe_compiler.verify.report import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from optpipe_compiler.documents import ir
    from optpipe_compiler.verify.causality import Causality
    from optpipe_compiler.verify.placed import Ints, Lane


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
    asked: list[tuple[Ints, Ints, npt.NDArray[np.bool_]]] = []
    """Sends, ops of a lane, and whether the one is said to be delivered when the other starts."""
    for number, device in enumerate(placed.schedule.devices):
        if device.deliveries is msgspec.UNSET:
            continue
        sends = np.array([place.number for place in placed.lanes[number, "compute"] if _is_send(place)], np.int64)
        stated: dict[Lane, list[tuple[int, int]]] = {lane: [] for lane in LANES}
        for entry in _stated(device):
            before = placed.by_id[entry.before]
            stated[before.lane] += [(placed.by_id[send].number, before.number) for send in entry.sends]
        for lane in LANES:
            places = placed.lanes[number, lane]
            if places:
                first, end = places[0].number, places[-1].number + 1
                told, befores = np.array(stated[lane], np.int64).reshape(-1, 2).T
                at = np.full(len(sends), end)
                at[np.searchsorted(sends, told)] = befores
                earlier, now = at > first, at < end
                asked += [
                    (sends[earlier], at[earlier] - 1, np.zeros(np.count_nonzero(earlier), bool)),
                    (sends[now], at[now], np.ones(np.count_nonzero(now), bool)),
                ]
    if not asked:
        return
    sends, ops, said = (np.concatenate(column) for column in zip(*asked, strict=True))
    implied = causality.implied(causality.events.start[ops], causality.events.done[sends])
    for wrong in np.flatnonzero(implied != said).tolist():
        send, place = placed.places[sends[wrong]], placed.places[ops[wrong]]
        what = "can start before" if said[wrong] else "starts after"
        message = f"{place.id} {what} the delivery of {send.id}, which device {place.device} states otherwise"
        yield place.breaks("deliveries", message, send.id)


def _stated(device: ir.Device) -> list[ir.Delivered]:
    return [] if device.deliveries is msgspec.UNSET else device.deliveries


def _is_send(place: PlacedOp) -> bool:
    return place.kind in SENDS
