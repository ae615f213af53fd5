"""The schedule as the rules read it: every op with its place, found by id, and the neighbours of every stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import op_id, unit_name
from optpipe_compiler.verify.report import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

Lane = Literal["compute", "d2h", "h2d"]
Unit = tuple[int, int | None]
"""A microbatch and its slice, None where microbatches are not cut."""
LANES: tuple[Lane, ...] = ("compute", "d2h", "h2d")


@dataclass(frozen=True, slots=True)
class PlacedOp:
    """An op and where it stands; `device` counts the schedule's devices in file order."""

    device: int
    lane: Lane
    index: int
    op: ir.Op
    id: str

    def breaks(self, rule: str, message: str, *others: str) -> Violation:
        """Return a violation of `rule` at this op; `others` are further ops that it is about."""
        return Violation(rule, message, self.device, self.lane, self.index, (self.id, *others))


class Plan:
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
        self.by_id: dict[str, PlacedOp] = {}
        for place in self.places:
            self.by_id.setdefault(place.id, place)

    def peer(self, stage: int, step: Literal[-1, 1]) -> int | None:
        """Return the device of the stage before or after `stage` where a message must cross to it, else None."""
        other = stage + step
        if not 0 <= other < len(self.stages) or self.stages[other].device == self.stages[stage].device:
            return None
        return self.stages[other].device

    def gradient_of(self, stage: int, unit: Unit) -> str:
        """Return the id of the op that makes the gradient of the stage's input: `backward_input` or `backward`."""
        split = named("backward_input", stage, unit)
        return split if split in self.by_id else named("backward", stage, unit)


def named(kind: str, stage: int, unit: Unit, layers: ir.Range | None = None) -> str:
    """Return the id of an op of a unit."""
    return op_id(kind, stage, unit[0], layers, unit[1])


def unit_of(op: ir.Op) -> Unit:
    """Return the op's unit."""
    return op.microbatch, op.slice_or_none


def _lanes_of(device: ir.Device) -> list[tuple[Lane, Sequence[ir.Op]]]:
    return [("compute", device.compute), ("d2h", device.d2h), ("h2d", device.h2d)]


def _places(device: int, lane: Lane, ops: Sequence[ir.Op]) -> list[PlacedOp]:
    return [PlacedOp(device, lane, index, op, op.id) for index, op in enumerate(ops)]


@dataclass(frozen=True, slots=True)
class Message:
    """What two halves have in common: the tensor that `stage` sends."""

    what: Literal["activation", "gradient"]
    stage: int
    unit: Unit

    def __str__(self) -> str:
        return f"the {self.what} of stage {self.stage}, microbatch {unit_name(*self.unit)}"

    @property
    def send(self) -> str:
        """Id of the sending half."""
        return named(f"send_{self.what}", self.stage, self.unit)

    @property
    def recv(self) -> str:
        """Id of the receiving half."""
        receiver = self.stage + 1 if self.what == "activation" else self.stage - 1
        return named(f"recv_{self.what}", receiver, self.unit)


def message_of(op: ir.Op) -> Message | None:
    """Return the message that a send or receive is one half of; None for other ops."""
    match op:
        case ir.SendActivation():
            return Message("activation", op.stage, unit_of(op))
        case ir.RecvActivation():
            return Message("activation", op.stage - 1, unit_of(op))
        case ir.SendGradient():
            return Message("gradient", op.stage, unit_of(op))
        case ir.RecvGradient():
            return Message("gradient", op.stage + 1, unit_of(op))
    return None
