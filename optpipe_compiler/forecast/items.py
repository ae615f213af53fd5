"""Every op that takes a lane, with its times, and what it waited for.

The *critical predecessor* of an op is the op because of which it does not start earlier: the predecessor's end, plus
the time of a message, or of copies that take the lane, where they are between them, is its start. Where several are
equally late, the first `Reason` in the order of the enum is given.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum
from functools import cached_property
from itertools import count, pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import LETTERS, unit_name
from optpipe_compiler.errors import BadInput
from optpipe_compiler.forecast.copies import NO_COPIES, busy_by_op
from optpipe_compiler.forecast.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe_compiler.forecast.table import Unit


class Reason(Enum):
    """Why an op does not start earlier."""

    START = "start"
    """It starts when the schedule begins."""
    ORDER = "order"
    """The previous op of its lane has just ended."""
    DATA = "data"
    """The op of the same device whose result it copies has just ended: a forward before its offload."""
    MESSAGE = "message"
    """Its activation or gradient has just arrived from another device."""
    TRANSFER = "transfer"
    """A transfer of what it reads has just ended: a reload before its backward, an offload before its reload."""
    LINK = "link"
    """Another device's transfer in the same direction has just left the link that they share."""
    MEMORY = "memory"
    """Bytes that it counts on were freed just now, on the device or, for an offload, on the host; or it took bytes when
    an op of the device whose turn was before has started, and waited for the same as that one."""
    COPIES = "copies"
    """The op of its lane before it has ended, and since then copies took the device's compute."""
    SLACK = "slack"
    """Nothing in the file: the forecast starts it later than it must, as schedules that run one op at a time do."""


class Item(msgspec.Struct, frozen=True, gc=False):
    """An op that takes its lane for some time; sends and receives are none."""

    index: int
    device: int
    lane: ir.Lane
    position: int
    """In the file's lane, messages counted."""
    op: ir.Op
    begin_ns: int
    end_ns: int
    label: str
    """Letter and microbatch, with the stage where a device has several: `F3`, `F3.1` is stage 3, microbatch 1. Where
    microbatches are cut the slice comes last: `F0.2`, `F3.0.2`."""
    reason: Reason
    predecessor: int | None
    """Index of the critical predecessor; None for START and SLACK."""


NO_ITEM = -1
At = tuple[int, "Unit"]
"""Stage and unit of an op."""


class Timed(msgspec.Struct, frozen=True, gc=False):
    """An op of any kind as the forecast has it."""

    device: int
    lane: ir.Lane
    position: int
    op: ir.Op
    at: At
    begin_ns: int
    end_ns: int
    index: int
    """Of its item; NO_ITEM of sends and receives."""


class Timeline:
    """The forecast of a schedule, op by op."""

    def __init__(self, schedule: ir.Schedule) -> None:
        self.schedule = schedule
        given: dict[tuple[int, ir.Lane], list[ir.Times]] = defaultdict(list)
        for times in schedule.forecast.times:
            given[times.device, times.lane].append(times)
        everywhere = [(device, lane) for device in range(len(schedule.devices)) for lane in ir.LANES]
        items = count()
        self.lanes = {(d, lane): _timed(schedule, d, lane, given[d, lane], items) for d, lane in everywhere}
        self.table = Table(schedule)
        self.bytes_of = {key: [self.table.entry(timed.op) for timed in lane] for key, lane in self.lanes.items()}
        """By lane, what each op of `lanes` adds."""
        self.working = [timed for lane in self.lanes.values() for timed in lane if timed.index != NO_ITEM]
        self.begin_ns = min((timed.begin_ns for timed in self.working), default=0)


class ReasonedTimeline(Timeline):
    """The same, and why each op that takes its lane starts when it does."""

    def __init__(self, schedule: ir.Schedule) -> None:
        super().__init__(schedule)
        self._busy = busy_by_op(schedule)
        self.link_of = {device: n for n, link in enumerate(schedule.forecast.links) for device in link.devices}
        self._of_kind: dict[str, dict[At, Timed]] = {kind.name: {} for kind in ir.OPS}
        self._offloads: dict[tuple[At, ir.Range], Timed] = {}
        self._restored: dict[At, list[tuple[Reason, Timed]]] = defaultdict(list)
        self._held_until: dict[tuple[int, ir.Lane, int], list[Timed]] = defaultdict(list)
        self._previous: list[Timed | None] = []
        """By item the working op before it on its lane; likewise the messages issued between the two."""
        self._issues: list[list[Timed]] = []
        self._walk_lanes()
        self._index()
        self.inputs = [self._inputs(timed) for timed in self.working]
        """By item."""
        several = len(schedule.stages) > len({stage.device for stage in schedule.stages})
        critical = [self._critical(timed) for timed in self.working]
        found = self._acyclic([self._turn(timed, critical) for timed in self.working])
        self.items = [self._item(timed, several, *one) for timed, one in zip(self.working, found, strict=True)]

    def _walk_lanes(self) -> None:
        """Note for each op the working op before it on its lane and the messages issued between the two."""
        for lane in self.lanes.values():
            last: Timed | None = None
            issues: list[Timed] = []
            for timed in lane:
                if timed.index == NO_ITEM:
                    issues.append(timed)
                    continue
                self._issues.append(issues)
                self._previous.append(last)
                last, issues = timed, []

    def _index(self) -> None:
        """Index all ops by stage and unit, and transfers by link and end."""
        for lane in self.lanes.values():
            for timed in lane:
                self._of_kind[timed.op.name][timed.at] = timed
        for timed in self.working:
            if isinstance(timed.op, ir.Offload):
                self._offloads[timed.at, timed.op.layers] = timed
            elif isinstance(timed.op, ir.Reload | ir.Recompute):
                reason = Reason.TRANSFER if timed.lane == "h2d" else Reason.ORDER
                self._restored[timed.at].append((reason, timed))
            if timed.lane != "compute" and timed.device in self.link_of:
                self._held_until[self.link_of[timed.device], timed.lane, timed.end_ns].append(timed)

    @cached_property
    def _by_id(self) -> dict[str, Timed]:
        return {timed.op.id: timed for lane in self.lanes.values() for timed in lane}

    @cached_property
    def _freed_at(self) -> dict[tuple[int, int], list[Timed]]:
        """By device and end, everything that frees bytes."""
        found = defaultdict(list)
        for key, lane in self.lanes.items():
            for timed, (_, (_, given)) in zip(lane, self.bytes_of[key], strict=True):
                if given < 0:
                    found[timed.device, timed.end_ns].append(timed)
        return found

    @cached_property
    def _taking(self) -> dict[tuple[int, int], list[Timed]]:
        """By device and start, the working ops that may take bytes there."""
        found = defaultdict(list)
        for timed in self.working:
            if timed.lane != "d2h":
                found[timed.device, timed.begin_ns].append(timed)
        return found

    def _item(self, timed: Timed, several: bool, reason: Reason, predecessor: int | None) -> Item:
        stage = f"{timed.op.stage}." if several else ""
        label = f"{LETTERS[timed.op.name]}{stage}{unit_name(*timed.at[1])}"
        return Item(
            index=timed.index,
            device=timed.device,
            lane=timed.lane,
            position=timed.position,
            op=timed.op,
            begin_ns=timed.begin_ns,
            end_ns=timed.end_ns,
            label=label,
            reason=reason,
            predecessor=predecessor,
        )

    def _critical(self, timed: Timed) -> tuple[Reason, int | None]:
        if timed.begin_ns == self.begin_ns:
            return Reason.START, None
        for reason, found in self._waited_for(timed):
            if found.end_ns != timed.begin_ns:
                continue
            producer = self._producer(found)
            if producer is not None and producer.index != timed.index:
                return reason, producer.index
        previous = self._previous[timed.index]
        if previous is not None and timed.begin_ns - previous.end_ns == self._taken_between(previous, timed) > 0:
            return Reason.COPIES, previous.index
        return Reason.SLACK, None

    def _taken_between(self, before: Timed, after: Timed) -> int:
        """Return what copies take from the lane between two ops that follow each other on it."""
        return self._busy.get(before.op.id, NO_COPIES)[1] + self._busy.get(after.op.id, NO_COPIES)[0]

    def _acyclic(self, critical: list[tuple[Reason, int | None]]) -> list[tuple[Reason, int | None]]:
        """Let ops wait for nothing whose walk back never ends: ops that take no time and wait for each other."""
        nobody = len(critical)
        reached = np.array([*(nobody if one is None else one for _, one in critical), nobody])
        for _ in range(nobody.bit_length()):  # twice as far each time
            reached = reached[reached]
        ends = (reached == nobody).tolist()
        return [one if ends[index] else (Reason.SLACK, None) for index, one in enumerate(critical)]

    def _turn(self, timed: Timed, critical: list[tuple[Reason, int | None]]) -> tuple[Reason, int | None]:
        """Return why an op starts; where nothing has just ended for it, why the op starts whose turn was before."""
        reason, predecessor = critical[timed.index]
        if reason is Reason.SLACK and self.table.on_device(timed.op)[0]:
            for other in self._taking.get((timed.device, timed.begin_ns), ()):
                if critical[other.index][1] is not None and other.lane != timed.lane:
                    return Reason.MEMORY, critical[other.index][1]
        return reason, predecessor

    def _waited_for(self, timed: Timed) -> Iterator[tuple[Reason, Timed]]:
        """Yield what an op waits for, in the order of `Reason`."""
        previous, inputs = self._previous[timed.index], self.inputs[timed.index]
        if previous is not None:
            yield Reason.ORDER, previous
        yield from (source for source in inputs if source[0] is not Reason.ORDER)
        if timed.lane != "compute" and timed.device in self.link_of:
            busy = self._held_until.get((self.link_of[timed.device], timed.lane, timed.begin_ns), ())
            yield from ((Reason.LINK, other) for other in busy if other.device != timed.device)
        for waiting in (timed, *self._issues[timed.index]):
            yield from ((Reason.MEMORY, self._by_id[name]) for name in waiting.op.after if name in self._by_id)
        if not isinstance(timed.op, ir.Offload):  # frees that other waits imply are not named in the file
            yield from ((Reason.MEMORY, freed) for freed in self._freed_at.get((timed.device, timed.begin_ns), ()))

    def _inputs(self, timed: Timed) -> list[tuple[Reason, Timed]]:
        """Return what must have completed for an op to have its data, but for ORDER as `Reason` has it.

        What makes a message is there beside its receive.
        """
        of, at, (stage, unit) = self._of_kind, timed.at, timed.at
        found: list[tuple[Reason, Timed | None]] = []
        match timed.op:
            case ir.Forward():
                found = [(Reason.ORDER, of["forward"].get((stage - 1, unit)))]
                found += [(Reason.MESSAGE, of["recv_activation"].get(at))]
            case ir.Backward() | ir.BackwardInput():
                found = [(Reason.ORDER, of["forward"].get(at)), (Reason.ORDER, self._gradient((stage + 1, unit)))]
                found += [(Reason.MESSAGE, of["recv_gradient"].get(at)), *self._restored.get(at, ())]
            case ir.BackwardWeight():
                found = [(Reason.ORDER, of["backward_input"].get(at))]
            case ir.Recompute():
                found = [(Reason.ORDER, of["forward"].get(at))]
            case ir.Offload():
                found = [(Reason.DATA, of["forward"].get(at))]
            case ir.Reload():
                found = [(Reason.TRANSFER, self._offloads.get((at, timed.op.layers)))]
        return [(reason, source) for reason, source in found if source is not None]

    def feeds(self, item: Item) -> bool:
        """Return whether an op reads what its critical predecessor makes."""
        return any(source.index == item.predecessor for _, source in self.inputs[item.index])

    def ready_ns(self, item: Item) -> int:
        """Return when an op had its data; a compute op without what reloads bring back."""
        inputs = self.inputs[item.index]
        brought = item.lane == "compute"
        ends = (source.end_ns for reason, source in inputs if not (brought and reason is Reason.TRANSFER))
        return max(ends, default=self.begin_ns)

    def _producer(self, timed: Timed) -> Timed | None:
        """Return the op that makes a message; any other op is its own producer."""
        stage, unit = timed.at
        match timed.op:
            case ir.SendActivation():
                return self._of_kind["forward"].get(timed.at)
            case ir.RecvActivation():
                return self._of_kind["forward"].get((stage - 1, unit))
            case ir.RecvGradient():
                return self._gradient((stage + 1, unit))
            case ir.SendGradient():
                return self._gradient(timed.at)
        return timed

    def _gradient(self, at: At) -> Timed | None:
        """Return the op that makes the gradient of the stage's input."""
        return self._of_kind["backward"].get(at) or self._of_kind["backward_input"].get(at)


def _timed(
    schedule: ir.Schedule, device: int, lane: ir.Lane, found: Sequence[ir.Times], items: Iterator[int]
) -> list[Timed]:
    """Return a lane of a device as the forecast has it; `items` counts what is no message."""
    ops: Sequence[ir.Op] = getattr(schedule.devices[device], lane)
    starts, ends = (found[0].start_ns, found[0].end_ns) if found else ([], [])
    at = f"the {lane} lane of device {device}"
    if len(found) > 1 or not len(starts) == len(ends) == len(ops):
        raise _broken(f"forecast.times of {at} has {len(starts)} starts and {len(ends)} ends for {len(ops)} ops")
    timed = [
        Timed(
            device,
            lane,
            position,
            op,
            (op.stage, op.unit),
            begin,
            end,
            NO_ITEM if isinstance(op, ir.MessageOp) else next(items),
        )
        for position, (op, begin, end) in enumerate(zip(ops, starts, ends, strict=True))
    ]
    for before, after in pairwise(one for one in timed if one.index != NO_ITEM):
        if not before.begin_ns <= before.end_ns <= after.begin_ns <= after.end_ns:
            raise _broken(f"forecast.times of {at} has {after.op.id} begin before {before.op.id} has ended")
    for one in timed:
        if one.op.stage >= len(schedule.stages):
            raise _broken(f"{one.op.id} on {at} is of a stage that the file does not list")
        if not schedule.setup.has_unit(*one.op.unit):
            raise _broken(f"{one.op.id} on {at} is of a unit of which setup.units does not say the tokens")
    return timed


def _broken(what: str) -> BadInput:
    return BadInput(f"{what}; `optpipe verify` lists everything that is wrong with a schedule")
