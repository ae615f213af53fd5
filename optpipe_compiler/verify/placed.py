"""The schedule as the rules read it: every op with its place, found by id, and the neighbours of every stage.

Rules that go over all ops read them as columns of numbers; `PlacedOp` has what a violation says of one.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import MESSAGES, op_id, unit_name
from optpipe_compiler.verify.report import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

Lane = Literal["compute", "d2h", "h2d"]
Unit = tuple[int, int | None]
"""A microbatch and its slice, None where microbatches are not cut."""
LANES: tuple[Lane, ...] = ("compute", "d2h", "h2d")
Ints = npt.NDArray[np.int64]
NONE = -1
SENDS = ("send_activation", "send_gradient")
KINDS = tuple(kind.name for kind in ir.OPS)
CODES = {name: code for code, name in enumerate(KINDS)}
"""By kind of op its number in columns."""
IS_GRADIENT = np.array(["gradient" in kind for kind in KINDS])
"""By that number, of messages, whether it is a gradient that goes."""
_STEP = {"send_activation": 0, "recv_activation": -1, "send_gradient": 0, "recv_gradient": 1}
"""By kind of half, how far from its own stage the one is that sends the message."""


class PlacedOp(msgspec.Struct, frozen=True, gc=False):
    """An op and where it stands; `device` counts the schedule's devices in file order."""

    number: int
    """Among all ops of the schedule, in the order of the file."""
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


class OpColumns(NamedTuple):
    """Numbers of all ops, by the op's own number."""

    device: Ints
    kind: Ints
    stage: Ints
    unit: Ints
    """PlacedOps.unit_number."""
    is_message: npt.NDArray[np.bool_]


class PlacedOps:
    """The ops of a schedule by lane and by id; of several ops with one id the first counts.

    What says "complete" can be asked only where the rules on completeness, peers and waits find nothing.
    """

    def __init__(self, schedule: ir.Schedule) -> None:
        self.schedule = schedule
        self.stages = schedule.stages
        self.microbatches = schedule.setup.microbatches
        self.slices = schedule.setup.slices
        self.places: list[PlacedOp] = []
        self.lanes: dict[tuple[int, Lane], list[PlacedOp]] = {}
        for number, device in enumerate(schedule.devices):
            for lane, ops in _lanes_of(device):
                places = self.lanes[number, lane] = _places(number, lane, ops, len(self.places))
                self.places += places
        self.by_id = {place.id: place for place in reversed(self.places)}
        self._of_kind: dict[str, list[PlacedOp]] = defaultdict(list)
        for place in self.places:
            self._of_kind[place.kind].append(place)

    def of(self, *kinds: str) -> list[PlacedOp]:
        """Return all ops of these kinds, kind by kind in the order of the file."""
        return [place for kind in kinds for place in self._of_kind.get(kind, ())]

    def peer(self, stage: int, step: Literal[-1, 1]) -> int | None:
        """Return the device of the stage before or after `stage` where a message must cross to it, else None."""
        other = stage + step
        if not 0 <= other < len(self.stages) or self.stages[other].device == self.stages[stage].device:
            return None
        return self.stages[other].device

    def unit_number(self, unit: Unit) -> int:
        """Return microbatch x slices + slice."""
        return unit[0] * self.slices + (unit[1] or 0)

    @cached_property
    def columns(self) -> OpColumns:
        """All ops as columns; complete."""
        places = self.places
        return OpColumns(
            device=_ints([place.device for place in places]),
            kind=_ints([CODES[place.kind] for place in places]),
            stage=_ints([place.stage for place in places]),
            unit=_ints([self.unit_number(place.unit) for place in places]),
            is_message=np.array([place.kind in MESSAGES for place in places], bool),
        )

    def numbers(self, *kinds: str) -> Ints:
        """Return the numbers of the ops of these kinds, kind by kind; complete."""
        return _ints([place.number for place in self.of(*kinds)])

    def find(self, kind: str, stage: Ints, unit: Ints) -> Ints:
        """Return the number of each op of a kind without layers, NONE where there is none; complete."""
        inside = (stage >= 0) & (stage < len(self.stages))
        return np.where(inside, self._tables[kind][np.where(inside, stage, 0), unit], NONE)

    def gradients(self, stage: Ints, unit: Ints) -> Ints:
        """Return the number of the op that makes the gradient of each stage's input, as `find` does; complete."""
        split = self.find("backward_input", stage, unit)
        return np.where(split == NONE, self.find("backward", stage, unit), split)

    @cached_property
    def _tables(self) -> dict[str, Ints]:
        """By kind, the op of each [stage, unit]."""
        tables = {}
        for kind in KINDS:
            table = np.full((len(self.stages), self.microbatches * self.slices), NONE, np.int64)
            mine = self.numbers(kind)
            table[self.columns.stage[mine], self.columns.unit[mine]] = mine
            tables[kind] = table
        return tables

    @cached_property
    def classes(self) -> Ints:
        """By op, which of the setup's classes its unit is of; complete."""
        units = self.schedule.setup.units
        if isinstance(units, msgspec.UnsetType):
            return np.zeros(len(self.places), np.int64)
        microbatch, slice = np.divmod(self.columns.unit, self.slices)
        return _ints(units.shape_of)[microbatch] * self.slices + slice

    @cached_property
    def layers(self) -> Ints:
        """By op, a number that stands for its layers; 0 where it has none."""
        known: dict[ir.Range, int] = {}
        found = np.zeros(len(self.places), np.int64)
        for place in self.of("recompute", "offload", "reload"):
            assert isinstance(place.op, ir.SavedOp)
            found[place.number] = known.setdefault(place.op.layers, 1 + len(known))
        return found

    def alike(self, ops: Ints, extra: Ints) -> tuple[list[PlacedOp], Ints]:
        """Put ops of one kind, stage, class of units and `extra` number together; complete.

        Return an op of each group, and by op of `ops` the number of its group.
        """
        classes = self.schedule.setup.classes
        whole = (self.columns.kind[ops] * len(self.stages) + self.columns.stage[ops]) * classes + self.classes[ops]
        whole = np.unique(whole, return_inverse=True)[1]
        code = whole * (1 + extra.max(initial=0)) + extra
        _, first, group = np.unique(code, return_index=True, return_inverse=True)
        return [self.places[number] for number in ops[first].tolist()], group

    @cached_property
    def waits(self) -> tuple[Ints, Ints]:
        """The ops that wait, and beside each an op that it waits for, in the order of the file; complete."""
        pairs = [(place.number, self.by_id[name].number) for place in self.places for name in place.op.after]
        later, earlier = _ints(pairs).reshape(-1, 2).T
        return later, earlier

    def partners(self, halves: Ints) -> Ints:
        """Return the op of each half's stage and unit that makes what it sends, or reads what it receives; complete."""
        kind, stage, unit = (column[halves] for column in self.columns[1:4])
        return np.where(IS_GRADIENT[kind], self.gradients(stage, unit), self.find("forward", stage, unit))

    @cached_property
    def messages(self) -> MessageHalves:
        """The halves of all messages; complete but for the order of each pair."""
        return MessageHalves(self)


class MessageHalves:
    """The halves of all messages, pair by pair: those that the device with the lower number lists, in its order, and
    those of the other one."""

    def __init__(self, placed: PlacedOps) -> None:
        columns = placed.columns
        halves = np.flatnonzero(columns.is_message)
        ops = [placed.places[number].op for number in halves.tolist()]
        device, peer = columns.device[halves], _ints([op.peer for op in ops if isinstance(op, ir.MessageOp)])
        pair = np.minimum(device, peer) * len(placed.schedule.devices) + np.maximum(device, peer)
        by_pair = np.argsort(pair, kind="stable")
        halves, pair, is_lower = halves[by_pair], pair[by_pair], (device < peer)[by_pair]
        self.lower, self.upper = halves[is_lower], halves[~is_lower]
        """Numbers of ops."""
        self.pairs = np.unique(pair)
        self.bounds = [
            np.append(np.searchsorted(pair[mine], self.pairs), np.count_nonzero(mine)).tolist()
            for mine in (is_lower, ~is_lower)
        ]
        """Where the halves of each pair begin in `lower` and in `upper`, and where the last ones end."""
        step = _ints([_STEP.get(kind, 0) for kind in KINDS])
        sender = IS_GRADIENT[columns.kind] * len(placed.stages) + columns.stage + step[columns.kind]
        self.of = sender * (placed.microbatches * placed.slices) + columns.unit
        """By half, the number of its message."""
        self.is_send = np.isin(columns.kind, [CODES[kind] for kind in SENDS])

    @cached_property
    def sends(self) -> Ints:
        """The sending half of each message; where the order of each pair is right."""
        return np.where(self.is_send[self.lower], self.lower, self.upper)

    @cached_property
    def receives(self) -> Ints:
        """The other halves."""
        return np.where(self.is_send[self.lower], self.upper, self.lower)


def message_name(place: PlacedOp) -> str:
    """Return what a half sends or receives in words."""
    what, stage = place.kind.split("_")[1], place.stage + _STEP[place.kind]
    return f"the {what} of stage {stage}, microbatch {unit_name(*place.unit)}"


def named(kind: str, stage: int, unit: Unit, layers: ir.Range | None = None) -> str:
    """Return the id of an op of a unit."""
    return op_id(kind, stage, unit[0], layers, unit[1])


def _lanes_of(device: ir.Device) -> list[tuple[Lane, Sequence[ir.Op]]]:
    return [("compute", device.compute), ("d2h", device.d2h), ("h2d", device.h2d)]


def _places(device: int, lane: Lane, ops: Sequence[ir.Op], first: int) -> list[PlacedOp]:
    """Return the ops of a lane; the first has the number `first`."""
    places = []
    for index, op in enumerate(ops):
        unit = op.microbatch, None if op.slice is msgspec.UNSET else op.slice
        places.append(PlacedOp(first + index, device, lane, index, op, op.id, op.name, op.stage, unit))
    return places


def _ints(numbers: Sequence[Any]) -> Ints:
    return np.array(numbers, np.int64)
