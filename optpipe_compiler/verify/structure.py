"""Rules on which ops there are: completeness, peers, layer states, waits, order, and the order of each pair."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import MESSAGES, unit_name
from optpipe_compiler.verify.placed import Ints, PlacedOp, PlacedOps, Unit, message_name, named
from optpipe_compiler.verify.report import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMED = 3
"""How many missing units a message names."""


def belongs(placed: PlacedOps) -> Iterator[Violation]:
    """Every op is of a stage of its own device and of a microbatch below setup.microbatches."""
    homes = [stage.device for stage in placed.stages]
    for place in placed.places:
        stage, (microbatch, slice) = place.stage, place.unit
        if stage >= len(homes):
            yield place.breaks("completeness", f"{place.id} on device {place.device} is of a stage that does not exist")
        elif homes[stage] != place.device:
            message = f"{place.id} is on device {place.device}, but stage {stage} is on device {homes[stage]}"
            yield place.breaks("completeness", message)
        if microbatch >= placed.microbatches:
            message = f"{place.id} on device {place.device} is beyond the {placed.microbatches} microbatches"
            yield place.breaks("completeness", message)
        if not _has_its_slice(placed, slice):
            expected = f"below {placed.slices}" if placed.slices > 1 else "none: microbatches are not cut"
            message = f"the slice of {place.id} on device {place.device} is {slice}, expected {expected}"
            yield place.breaks("completeness", message)


def _has_its_slice(placed: PlacedOps, slice: int | None) -> bool:
    return slice is None if placed.slices == 1 else slice is not None and slice < placed.slices


def unique(placed: PlacedOps) -> Iterator[Violation]:
    """No two ops have the same id."""
    for place in placed.places if len(placed.by_id) < len(placed.places) else ():
        first = placed.by_id[place.id]
        if first is not place:
            message = f"{place.id} on device {place.device} stands in the schedule already, on device {first.device}"
            yield place.breaks("completeness", message)


def complete(placed: PlacedOps) -> Iterator[Violation]:
    """Per stage and unit: one forward, its messages, and one backward or one backward_input."""
    present: dict[tuple[str, int], set[int]] = defaultdict(set)
    for place in placed.places:
        microbatch, slice = place.unit
        if microbatch < placed.microbatches and _has_its_slice(placed, slice):
            present[place.kind, place.stage].add(placed.unit_number(place.unit))
    for stage in range(len(placed.stages)):
        for kind in _kinds(placed, stage):
            yield from _missing(placed, stage, kind, present[kind, stage])
        gradients = present["backward", stage] | present["backward_input", stage]
        yield from _missing(placed, stage, "backward", gradients)


def _kinds(placed: PlacedOps, stage: int) -> Iterator[str]:
    """Kinds of which every unit of `stage` needs one op: the forward, and messages to other devices."""
    yield "forward"
    if placed.peer(stage, -1) is not None:
        yield from ("recv_activation", "send_gradient")
    if placed.peer(stage, 1) is not None:
        yield from ("send_activation", "recv_gradient")


def _missing(placed: PlacedOps, stage: int, kind: str, present: set[int]) -> Iterator[Violation]:
    """Yield one violation for all units that `present` lacks."""
    count = placed.microbatches * placed.slices
    lacking = count - len(present)
    if lacking:
        units: list[Unit] = []
        for number in range(min(len(present) + NAMED, count)):
            if number not in present and len(units) < NAMED:
                microbatch, slice = divmod(number, placed.slices)
                units.append((microbatch, slice if placed.slices > 1 else None))
        shown = ", ".join(unit_name(*unit) for unit in units) + (", ..." if lacking > len(units) else "")
        what = "microbatches" if placed.slices == 1 else "slices of microbatches"
        message = f"stage {stage} has no {kind} for {lacking} of {count} {what}: {shown}"
        ids = tuple(named(kind, stage, unit) for unit in units)
        yield Violation("completeness", message, placed.stages[stage].device, "compute", None, ids)


def split(placed: PlacedOps) -> Iterator[Violation]:
    """backward_input and backward_weight come together, and not beside a fused backward."""
    halves = ("backward_input", "backward_weight")
    whole = {(place.stage, place.unit) for place in placed.of("backward")}
    for kind, other in (halves, halves[::-1]):
        others = {(place.stage, place.unit) for place in placed.of(other)}
        for place in placed.of(kind):
            at = place.stage, place.unit
            if at not in others:
                yield place.breaks("completeness", f"{place.id} on device {place.device} has no {other}")
            if at in whole:
                fused = named("backward", *at)
                message = f"{place.id} on device {place.device} stands beside a fused {fused}"
                yield place.breaks("completeness", message, fused)


def peers(placed: PlacedOps) -> Iterator[Violation]:
    """A message goes to, or comes from, the device of the neighbouring stage, and only where that is another one."""
    for kind in MESSAGES:
        step: Literal[-1, 1] = 1 if kind in ("send_activation", "recv_gradient") else -1
        expected = [placed.peer(stage, step) for stage in range(len(placed.stages))]
        for place in placed.of(kind):
            op, stage = place.op, place.stage
            assert isinstance(op, ir.MessageOp)
            if stage >= len(expected) or op.peer == expected[stage]:
                continue
            if expected[stage] is None:
                message = f"{place.id} on device {place.device} has no stage on another device to exchange with"
                yield place.breaks("completeness", message)
            else:
                message = f"{place.id} on device {place.device} names device {op.peer} as its peer"
                yield place.breaks("peer", f"{message}, expected {expected[stage]}")


def ranges(placed: PlacedOps) -> Iterator[Violation]:
    """The layers of an offload, reload or recompute are a range inside its stage, not empty."""
    for place in placed.of("recompute", "offload", "reload"):
        if place.stage < len(placed.stages):
            first, end = placed.stages[place.stage].layers
            layers = _layers(place)
            if not first <= layers[0] < layers[1] <= end:
                message = f"{place.id} on device {place.device} has layers outside of [{first}, {end}), or none"
                yield place.breaks("state", message)


def pairs_of_copies(placed: PlacedOps) -> Iterator[Violation]:
    """Every offload has a reload of the same layers, every reload an offload."""
    for kind, other in (("offload", "reload"), ("reload", "offload")):
        for place in placed.of(kind):
            partner = named(other, place.stage, place.unit, _layers(place))
            if partner not in placed.by_id:
                yield place.breaks("state", f"{place.id} on device {place.device} has no {partner}")


def one_state(placed: PlacedOps) -> Iterator[Violation]:
    """Per unit, at most one offload or recompute names a layer."""
    treated: dict[tuple[int, Unit], list[PlacedOp]] = defaultdict(list)
    for place in placed.of("recompute", "offload"):
        if placed.by_id[place.id] is place:
            treated[place.stage, place.unit].append(place)
    for places in treated.values():
        widest, *others = sorted(places, key=_layers)
        for place in others:
            if _layers(place)[0] < _layers(widest)[1]:
                message = f"{place.id} on device {place.device} names layers that {widest.id} has already"
                yield place.breaks("state", message, widest.id)
            widest = max(widest, place, key=lambda p: _layers(p)[1])


def _layers(place: PlacedOp) -> ir.Range:
    assert isinstance(place.op, ir.SavedOp)
    return place.op.layers


def waits(placed: PlacedOps) -> Iterator[Violation]:
    """`after` lists ids of ops of the same device."""
    for place in placed.places:
        for name in place.op.after:
            target = placed.by_id.get(name)
            if target is None:
                message = f"{place.id} on device {place.device} waits for {name!r}, which is not in the schedule"
                yield place.breaks("wait", message)
            elif target.device != place.device:
                message = f"{place.id} on device {place.device} waits for {name} of device {target.device}"
                yield place.breaks("wait", message, name)


def order(placed: PlacedOps) -> Iterator[Violation]:
    """Per stage and kind, microbatches run in order; backward_input and backward count as one kind.

    Slices of one ascend on the way there and descend on the way back.
    """
    for lane in placed.lanes.values():
        latest: dict[tuple[str, int], tuple[tuple[int, int], PlacedOp]] = {}
        for place in lane:
            key = "gradient" if place.kind in ("backward", "backward_input") else place.kind, place.stage
            turn = _turn(place) if placed.slices > 1 else (place.unit[0], 0)
            latest_turn, before = latest.get(key, (turn, place))
            if turn < latest_turn:
                what = "microbatches" if place.unit[0] != before.unit[0] else "slices"
                message = f"{place.id} on device {place.device} runs after {before.id}, {what} out of order"
                yield place.breaks("order", message, before.id)
            latest[key] = turn, place


def _turn(place: PlacedOp) -> tuple[int, int]:
    """Return what grows along a lane, per stage and kind."""
    microbatch, slice = place.unit
    return microbatch, 0 if slice is None else slice if place.kind in _ASCENDING else -slice


_ASCENDING = ("forward", "send_activation", "recv_activation", "offload")
"""Kinds of ops whose slices run in order."""


def pair_order(placed: PlacedOps) -> Iterator[Violation]:
    """Both devices of a pair list the messages between them, sent and received together, in the same order."""
    messages = placed.messages
    for (begin, end), (other_begin, other_end) in zip(*map(pairwise, messages.bounds), strict=True):
        mine, theirs = messages.lower[begin:end], messages.upper[other_begin:other_end]
        if not np.array_equal(messages.of[mine], messages.of[theirs]):
            yield _first_difference(placed, mine, theirs)


def _first_difference(placed: PlacedOps, mine: Ints, theirs: Ints) -> Violation:
    """Return the first message in which two devices disagree, or the first that only one of them lists."""
    messages = placed.messages
    for number, other in zip(mine, theirs, strict=False):
        if messages.of[number] != messages.of[other]:
            place, there = placed.places[int(number)], placed.places[int(other)]
            text = (
                f"devices {place.device} and {there.device} list their messages in different orders: next comes "
                f"{message_name(place)} ({place.id}) on the one, {message_name(there)} ({there.id}) on the other"
            )
            return place.breaks("pair-order", text, there.id)
    longer: Ints = max(mine, theirs, key=len)
    place = placed.places[int(longer[min(len(mine), len(theirs))])]
    return place.breaks("pair-order", f"{place.id} on device {place.device} has no other half at its peer")
