"""Rules on which ops there are: completeness, peers, layer states, waits, order, and the order of each pair."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import unit_name
from optpipe_compiler.verify.plan import Message, PlacedOp, Plan, Unit, message_of, named, unit_of
from optpipe_compiler.verify.report import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMED = 3
"""How many missing units a message names."""


def belongs(plan: Plan) -> Iterator[Violation]:
    """Every op is of a stage of its own device and of a microbatch below setup.microbatches."""
    for place in plan.places:
        op = place.op
        if op.stage >= len(plan.stages):
            yield place.breaks("completeness", f"{place.id} on device {place.device} is of a stage that does not exist")
        elif (home := plan.stages[op.stage].device) != place.device:
            message = f"{place.id} is on device {place.device}, but stage {op.stage} is on device {home}"
            yield place.breaks("completeness", message)
        if op.microbatch >= plan.microbatches:
            message = f"{place.id} on device {place.device} is beyond the {plan.microbatches} microbatches"
            yield place.breaks("completeness", message)
        if not _has_its_slice(plan, op):
            expected = f"below {plan.slices}" if plan.slices > 1 else "none: microbatches are not cut"
            message = f"the slice of {place.id} on device {place.device} is {op.slice_or_none}, expected {expected}"
            yield place.breaks("completeness", message)


def _has_its_slice(plan: Plan, op: ir.Op) -> bool:
    slice = op.slice_or_none
    return slice is None if plan.slices == 1 else slice is not None and slice < plan.slices


def unique(plan: Plan) -> Iterator[Violation]:
    """No two ops have the same id."""
    for place in plan.places:
        first = plan.by_id[place.id]
        if first is not place:
            message = f"{place.id} on device {place.device} stands in the schedule already, on device {first.device}"
            yield place.breaks("completeness", message)


def complete(plan: Plan) -> Iterator[Violation]:
    """Per stage and unit: one forward, its messages, and one backward or one backward_input."""
    present: dict[tuple[str, int], set[int]] = defaultdict(set)
    for place in plan.places:
        if place.op.microbatch < plan.microbatches and _has_its_slice(plan, place.op):
            number = place.op.microbatch * plan.slices + (place.op.slice_or_none or 0)
            present[place.op.name, place.op.stage].add(number)
    for stage in range(len(plan.stages)):
        for kind in _kinds(plan, stage):
            yield from _missing(plan, stage, kind, present[kind, stage])
        gradients = present["backward", stage] | present["backward_input", stage]
        yield from _missing(plan, stage, "backward", gradients)


def _kinds(plan: Plan, stage: int) -> Iterator[str]:
    """Kinds of which every unit of `stage` needs one op: the forward, and messages to other devices."""
    yield "forward"
    if plan.peer(stage, -1) is not None:
        yield from ("recv_activation", "send_gradient")
    if plan.peer(stage, 1) is not None:
        yield from ("send_activation", "recv_gradient")


def _missing(plan: Plan, stage: int, kind: str, present: set[int]) -> Iterator[Violation]:
    """Yield one violation for all units that `present` lacks."""
    count = plan.microbatches * plan.slices
    lacking = count - len(present)
    if lacking:
        units: list[Unit] = []
        for number in range(min(len(present) + NAMED, count)):
            if number not in present and len(units) < NAMED:
                microbatch, slice = divmod(number, plan.slices)
                units.append((microbatch, slice if plan.slices > 1 else None))
        shown = ", ".join(unit_name(*unit) for unit in units) + (", ..." if lacking > len(units) else "")
        what = "microbatches" if plan.slices == 1 else "slices of microbatches"
        message = f"stage {stage} has no {kind} for {lacking} of {count} {what}: {shown}"
        ids = tuple(named(kind, stage, unit) for unit in units)
        yield Violation("completeness", message, plan.stages[stage].device, "compute", None, ids)


def split(plan: Plan) -> Iterator[Violation]:
    """backward_input and backward_weight come together, and not beside a fused backward."""
    for place in plan.places:
        at = place.op.stage, unit_of(place.op)
        if isinstance(place.op, ir.BackwardInput) and named("backward_weight", *at) not in plan.by_id:
            yield place.breaks("completeness", f"{place.id} on device {place.device} has no backward_weight")
        if isinstance(place.op, ir.BackwardWeight) and named("backward_input", *at) not in plan.by_id:
            yield place.breaks("completeness", f"{place.id} on device {place.device} has no backward_input")
        fused = named("backward", *at)
        if isinstance(place.op, ir.BackwardInput | ir.BackwardWeight) and fused in plan.by_id:
            message = f"{place.id} on device {place.device} stands beside a fused {fused}"
            yield place.breaks("completeness", message, fused)


def peers(plan: Plan) -> Iterator[Violation]:
    """A message goes to, or comes from, the device of the neighbouring stage, and only where that is another one."""
    for place in plan.places:
        op = place.op
        if not isinstance(op, ir.MessageOp) or op.stage >= len(plan.stages):
            continue
        expected = plan.peer(op.stage, 1 if isinstance(op, ir.SendActivation | ir.RecvGradient) else -1)
        if expected is None:
            message = f"{place.id} on device {place.device} has no stage on another device to exchange with"
            yield place.breaks("completeness", message)
        elif op.peer != expected:
            message = f"{place.id} on device {place.device} names device {op.peer} as its peer, expected {expected}"
            yield place.breaks("peer", message)


def ranges(plan: Plan) -> Iterator[Violation]:
    """The layers of an offload, reload or recompute are a range inside its stage, not empty."""
    for place in plan.places:
        op = place.op
        if isinstance(op, ir.SavedOp) and op.stage < len(plan.stages):
            first, end = plan.stages[op.stage].layers
            if not first <= op.layers[0] < op.layers[1] <= end:
                message = f"{place.id} on device {place.device} has layers outside of [{first}, {end}), or none"
                yield place.breaks("state", message)


def pairs_of_copies(plan: Plan) -> Iterator[Violation]:
    """Every offload has a reload of the same layers, every reload an offload."""
    for place in plan.places:
        for kind, other in ((ir.Offload, "reload"), (ir.Reload, "offload")):
            if isinstance(place.op, kind):
                partner = named(other, place.op.stage, unit_of(place.op), place.op.layers)
                if partner not in plan.by_id:
                    yield place.breaks("state", f"{place.id} on device {place.device} has no {partner}")


def one_state(plan: Plan) -> Iterator[Violation]:
    """Per unit, at most one offload or recompute names a layer."""
    treated: dict[tuple[int, Unit], list[PlacedOp]] = defaultdict(list)
    for place in plan.by_id.values():
        if isinstance(place.op, ir.Offload | ir.Recompute):
            treated[place.op.stage, unit_of(place.op)].append(place)
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


def waits(plan: Plan) -> Iterator[Violation]:
    """`after` lists ids of ops of the same device."""
    for place in plan.places:
        for name in place.op.after:
            target = plan.by_id.get(name)
            if target is None:
                message = f"{place.id} on device {place.device} waits for {name!r}, which is not in the schedule"
                yield place.breaks("wait", message)
            elif target.device != place.device:
                message = f"{place.id} on device {place.device} waits for {name} of device {target.device}"
                yield place.breaks("wait", message, name)


def order(plan: Plan) -> Iterator[Violation]:
    """Per stage and kind, microbatches run in order; backward_input and backward count as one kind.

    Slices of one ascend on the way there and descend on the way back.
    """
    for lane in plan.lanes.values():
        latest: dict[tuple[str, int], PlacedOp] = {}
        for place in lane:
            kind = "gradient" if isinstance(place.op, ir.Backward | ir.BackwardInput) else place.op.name
            before = latest.setdefault((kind, place.op.stage), place)
            if _turn(place.op) < _turn(before.op):
                what = "microbatches" if place.op.microbatch != before.op.microbatch else "slices"
                message = f"{place.id} on device {place.device} runs after {before.id}, {what} out of order"
                yield place.breaks("order", message, before.id)
            latest[kind, place.op.stage] = place


def _turn(op: ir.Op) -> tuple[int, int]:
    """Return what grows along a lane, per stage and kind."""
    slice = op.slice_or_none or 0
    there = isinstance(op, ir.Forward | ir.SendActivation | ir.RecvActivation | ir.Offload)
    return op.microbatch, slice if there else -slice


def pair_order(plan: Plan) -> Iterator[Violation]:
    """Both devices of a pair list the messages between them, sent and received together, in the same order."""
    listed = messages_by_pair(plan)
    for (device, peer), mine in listed.items():
        theirs = listed.get((peer, device), [])
        if device < peer and [message for message, _ in mine] != [message for message, _ in theirs]:
            yield from _first_difference(mine, theirs)


def messages_by_pair(plan: Plan) -> dict[tuple[int, int], list[tuple[Message, PlacedOp]]]:
    """Return, per device and peer, the messages between them in the order in which the device lists them."""
    listed: dict[tuple[int, int], list[tuple[Message, PlacedOp]]] = defaultdict(list)
    for place in plan.places:
        message = message_of(place.op)
        if message is not None and isinstance(place.op, ir.MessageOp):
            listed[place.device, place.op.peer].append((message, place))
    return listed


def _first_difference(
    mine: list[tuple[Message, PlacedOp]], theirs: list[tuple[Message, PlacedOp]]
) -> Iterator[Violation]:
    """Yield the first message in which two devices disagree, or the first that only one of them lists."""
    for (message, place), (other, there) in zip(mine, theirs, strict=False):
        if message != other:
            text = (
                f"devices {place.device} and {there.device} list their messages in different orders: "
                f"next comes {message} ({place.id}) on the one, {other} ({there.id}) on the other"
            )
            yield place.breaks("pair-order", text, there.id)
            return
    longer = max(mine, theirs, key=len)
    _, place = longer[min(len(mine), len(theirs))]
    yield place.breaks("pair-order", f"{place.id} on device {place.device} has no other half at its peer")
