"""The schedule as the rules read it: every op with its place, found by id, and the neighbours of every stage."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import op_id, unit_name
from optpipe_compiler.verify.report import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

Lane = Literal["compute", "d2h", "h2d"]
Unit = tuple[int, int | None]
"""A microbatch and its slice, None where microbatches are not cut."""
LANES: tuple[Lane, ...] = ("compute", "d2h", "h2d")


class PlacedOp(msgspec.Struct, frozen=True, gc=False):
    """An op and where it stands; `device` counts the schedule's devices in file order."""

    device: int
    lane: Lane
    index: int
    op: ir.Op
    id: str
    kind: str
    """The op's name in files."""
    stage: int
    unit: Unit

    def breaks(self, rule: str, message: str, *others: str) -> Violation:
        """Return a violation of `rule` at this op; `others` are further ops that it is about."""
        return Violation(rule, message, self.device, self.lane, self.index, (self.id, *others))


class PlacedOps:
    """The ops of a schedule by lane and by id; of several ops with one id the first counts."""

    def __init__(self, schedule: ir.Schedule) -> None:
        self.schedule = schedule
        self.stages = schedule.stages
        self.microbatches = schedule.setup.microbatches
        self.slices = schedule.setup.slices
        self.lanes: dict[tuple[int, Lane], list[PlacedOp]] = {
            (number, lane): _places(number, lane, ops)
            for number, device in enumerate(schedule.devices)
            for lane, ops in _lanes_of(device)
        }
        self.places = [place for lane in self.lanes.values() for place in lane]
        self.by_id = {place.id: place for place in reversed(self.places)}
        self._of_kind: dict[str, list[PlacedOp]] = defaultdict(list)
        for place in self.places:
            self._of_kind[place.kind].append(place)
        self._split = {(place.stage, place.unit): place.id for place in self.of("backward_input")}

    def of(self, *kinds: str) -> list[PlacedOp]:
        """Return all ops of these kinds, kind by kind in the order of the file."""
        return [place for kind in kinds for place in self._of_kind.get(kind, ())]

    @cached_property
    def halves(self) -> list[tuple[PlacedOp, Message]]:
        """All sends and receives with their messages, kind by kind."""
        known: dict[tuple[str, int, Unit], Message] = {}
        found = []
        for kind, (what, step) in _HALVES.items():
            for place in self.of(kind):
                key = what, place.stage + step, place.unit
                if (message := known.get(key)) is None:
                    message = known[key] = Message.of(*key)
                found.append((place, message))
        return found

    @property
    def sends(self) -> list[tuple[PlacedOp, Message]]:
        """All sends with their messages."""
        return [half for half in self.halves if half[0].kind in SENDS]

    @property
    def receives(self) -> list[tuple[PlacedOp, Message]]:
        """All receives with their messages."""
        return [half for half in self.halves if half[0].kind not in SENDS]

    @cached_property
    def channels(self) -> dict[tuple[int, int], list[tuple[Message, PlacedOp]]]:
        """Per device and peer, the messages between them in the order in which the device lists them."""
        listed: dict[tuple[int, int], list[tuple[Message, PlacedOp]]] = defaultdict(list)
        for place, message in sorted(self.halves, key=lambda half: (half[0].device, half[0].index)):
            assert isinstance(place.op, ir.MessageOp)
            listed[place.device, place.op.peer].append((message, place))
        return listed

    def peer(self, stage: int, step: Literal[-1, 1]) -> int | None:
        """Return the device of the stage before or after `stage` where a message must cross to it, else None."""
        other = stage + step
        if not 0 <= other < len(self.stages) or self.stages[other].device == self.stages[stage].device:
            return None
        return self.stages[other].device

    def gradient_of(self, stage: int, unit: Unit) -> str:
        """Return the id of the op that makes the gradient of the stage's input: `backward_input` or `backward`."""
        return self._split.get((stage, unit)) or named("backward", stage, unit)

    def reader_of(self, receive: PlacedOp) -> str:
        """Return the id of the op that reads what a receive brings."""
        if receive.kind == "recv_activation":
            return named("forward", receive.stage, receive.unit)
        return self.gradient_of(receive.stage, receive.unit)


def named(kind: str, stage: int, unit: Unit, layers: ir.Range | None = None) -> str:
    """Return the id of an op of a unit."""
    return op_id(kind, stage, unit[0], layers, unit[1])


def _lanes_of(device: ir.Device) -> list[tuple[Lane, Sequence[ir.Op]]]:
    return [("compute", device.compute), ("d2h", device.d2h), ("h2d", device.h2d)]


def _places(device: int, lane: Lane, ops: Sequence[ir.Op]) -> list[PlacedOp]:
    places = []
    for index, op in enumerate(ops):
        kind, stage = op.name, op.stage
        unit = op.microbatch, None if op.slice is msgspec.UNSET else op.slice
        layers = op.layers if isinstance(op, ir.SavedOp) else None
        places.append(PlacedOp(device, lane, index, op, named(kind, stage, unit, layers), kind, stage, unit))
    return places


class Message(msgspec.Struct, frozen=True, gc=False):
    """What two halves have in common: the tensor that `stage` sends."""

    what: str
    """activation or gradient"""
    stage: int
    unit: Unit
    send: str
    """Id of the sending half."""
    recv: str
    """Id of the receiving half."""

    @classmethod
    def of(cls, what: str, stage: int, unit: Unit) -> Message:
        """Return the message with the ids of its halves."""
        receiver = stage + 1 if what == "activation" else stage - 1
        return cls(what, stage, unit, named(f"send_{what}", stage, unit), named(f"recv_{what}", receiver, unit))

    def __str__(self) -> str:
        return f"the {self.what} of stage {self.stage}, microbatch {unit_name(*self.unit)}"


_HALVES = {
    "send_activation": ("activation", 0),
    "recv_activation": ("activation", -1),
    "send_gradient": ("gradient", 0),
    "recv_gradient": ("gradient", 1),
}
"""By kind of op what its message is, and how far from its own stage the one is that sends it."""
SENDS = ("send_activation", "send_gradient")
