"""Executions of a schedule's contract: what a step takes when ops take other times than forecast.

Order, waits and messages are those of docs/IR.md (happens-before); nothing else holds an op back, but for links that
several devices share, whose transfers keep the order of the forecast. Many executions are run at once: each time is an
array with one entry for each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import parse
from optpipe_compiler.forecast.copies import NO_COPIES, busy_by_op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Times = NDArray[np.float64]

MOST, LEAST = 16384, 256
"""Executions of which quantiles are taken: the 95th percentile of twice as many as the most has a standard error of
0.02% where ops have 30% of noise (docs/REPLAN.md); that of the least stands on a dozen."""
WORK = 2**20
"""Devices, times units, times executions: larger schedules are executed less often."""
AT_ONCE = 1024
"""Executions in one array: as quick as more, and small enough to stay near the processor."""
Spreads = dict[tuple[str, int], float]
"""By kind of op and stage: the standard deviation of its time, as a share of it."""
_DRAWS = {
    "forward": 0,
    "backward": 1,
    "backward_input": 1,
    "backward_weight": 2,
    "recompute": 3,
    "offload": 4,
    "reload": 5,
}
"""Which of the draws of its stage and unit an op takes; where several have other layers, each takes one of its own."""


@dataclass(frozen=True)
class Quantiles:
    """What a step takes, in ns, over seeded executions with noise."""

    p50_ns: int
    p95_ns: int


def quantiles(schedule: ir.Schedule, spreads: Spreads, *, count: int | None = None, seed: int = 0) -> Quantiles:
    """Return median and 95th percentile of a step's time over noisy executions (None: as many as `enough`)."""
    found = executed(schedule, spreads, enough(schedule) if count is None else count, seed)
    return Quantiles(*(round(float(q)) for q in np.quantile(found, (0.5, 0.95))))


def enough(schedule: ir.Schedule) -> int:
    """Return how many executions a schedule's quantiles are taken of, by devices and units alone."""
    setup = schedule.setup
    return min(MOST, max(LEAST, WORK // (setup.devices * setup.microbatches * setup.slices)))


def executed(schedule: ir.Schedule, spreads: Spreads, count: int, seed: int) -> Times:
    """Return a step's times in ns over `count` executions in which each op is noisy by itself.

    Times are log-normal with the forecast as their median, as an op can take much longer and hardly any shorter.
    Execution n of one seed draws the same for the same op of any schedule with as many stages, so that schedules can be
    compared execution by execution.
    """
    contract = Contract(schedule)
    noise = _Noise(contract, spreads, seed)
    sizes = [min(AT_ONCE, count - first) for first in range(0, count, AT_ONCE)]
    return np.concatenate([contract.run(size, noise.drawn(size)) for size in sizes])


def durations(schedule: ir.Schedule) -> dict[str, Times]:
    """Return the forecast's time in ns of every op of compute, d2h and h2d by id, as arrays of one execution."""
    return {op.id: np.array([ns], np.float64) for op, ns in _forecast(schedule)}


def _forecast(schedule: ir.Schedule) -> Iterator[tuple[ir.Op, int]]:
    return ((one.op, one.end_ns - one.start_ns) for one in schedule.timed())


def makespans(schedule: ir.Schedule, taken: Mapping[str, Times]) -> Times:
    """Return what each execution takes, in ns, when ops take `taken` (by id; arrays of equal length)."""
    contract = Contract(schedule)
    times = [event.ns if event.op is None else taken[event.op.id] for event in contract.events]
    return contract.run(max(map(np.size, taken.values())), times.__getitem__)


class Event(NamedTuple):
    """An op of compute or a copy, or (without op) a message's way or the later of several events."""

    op: ir.Op | None
    ns: int
    """What the forecast has it take."""
    needs: tuple[int, ...]
    """The events that it waits for; none: it starts with the step."""


class Contract:
    """A schedule's events, each behind those that it waits for."""

    def __init__(self, schedule: ir.Schedule) -> None:
        self.schedule = schedule
        self.events: list[Event] = []
        self._lanes: list[tuple[int, Sequence[ir.Op]]] = [
            (device.device, lane) for device in schedule.devices for lane in device.lanes.values()
        ]
        self._next = [0] * len(self._lanes)
        self._last: list[int | None] = [None] * len(self._lanes)
        """With which event each lane has come to where it is; None: the start of the step."""
        self._over: dict[str, int | None] = {}
        """With which event each op is over: a message when it has arrived."""
        self._issued: dict[str, int | None] = {}
        self._pairs: dict[tuple[int, int], _Pair] = defaultdict(_Pair)
        self._behind = self._shared_links()
        self._ns = {op.id: ns for op, ns in _forecast(schedule)}
        self._busy = busy_by_op(schedule)
        self._computed: dict[int, tuple[int, int]] = {}
        """By lane of compute: the last op that takes time, and what the copies behind it take in ns."""
        for device in schedule.devices:
            for op in device.compute:
                if isinstance(op, ir.MessageOp) and device.device < op.peer:
                    self._pairs[device.device, op.peer].order.append(op.send_id)
        self._order()

    def run(self, count: int, taken: Callable[[int], Times | float]) -> Times:
        """Return what `count` executions take, in ns; `taken`: what an event takes in each, by its number."""
        rows: dict[int, Times] = {}
        spare: list[Times] = []
        ends = np.zeros(count)
        for number, (event, over) in enumerate(zip(self.events, self._over_after, strict=True)):
            row = spare.pop() if spare else np.empty(count)
            needs = event.needs
            if len(needs) > 1:
                np.maximum(rows[needs[0]], rows[needs[1]], out=row)
                for more in needs[2:]:
                    np.maximum(row, rows[more], out=row)
                row += taken(number)
            elif needs:
                np.add(rows[needs[0]], taken(number), out=row)
            else:
                row[:] = taken(number)
            if event.op is not None and number in over:  # nothing follows
                np.maximum(ends, row, out=ends)
            rows[number] = row
            spare += [rows.pop(done) for done in over]
        return ends

    @cached_property
    def _over_after(self) -> list[list[int]]:
        """Return the events that nothing reads after each event: itself, where nothing waits for it."""
        last = list(range(len(self.events)))
        for number, event in enumerate(self.events):
            for need in event.needs:
                last[need] = number
        found: list[list[int]] = [[] for _ in self.events]
        for number, reader in enumerate(last):
            found[reader].append(number)
        return found

    # -- the order of the events

    def _shared_links(self) -> dict[str, str]:
        """Return the transfer that each one follows on a link of several devices, by the forecast's order.

        What takes no time does not hold the link: at one moment ops that wait for each other may have any order.
        """
        found: dict[str, str] = {}
        for link in self.schedule.forecast.links:
            for name in ("d2h", "h2d") if len(link.devices) > 1 else ():
                on_link = [one for one in self.schedule.timed() if one.lane == name and one.device in link.devices]
                order = sorted((one.start_ns, one.end_ns, one.op.id) for one in on_link if one.start_ns < one.end_ns)
                found |= {after[2]: before[2] for before, after in pairwise(order)}
        return found

    def _order(self) -> None:
        moved = True
        while moved:
            moved = False
            for number, (device, lane) in enumerate(self._lanes):
                while self._next[number] < len(lane) and self._take(number, device, lane[self._next[number]]):
                    self._next[number] += 1
                    moved = True
            for pair in self._pairs.values():
                moved = self._transfer(pair) or moved
        assert all(n == len(lane) for n, (_, lane) in zip(self._next, self._lanes, strict=True))

    def _take(self, number: int, device: int, op: ir.Op) -> bool:
        """Take the next op of a lane if all that it waits for is there."""
        needs = list(op.after)
        other = op.stage + (-1 if isinstance(op, ir.Forward) else 1)
        reads = 0 <= other < len(self.schedule.stages) and self._owner(other) != device
        if reads and op.received_id is not None:
            needs.append(op.received_id)
        name = op.id
        if name in self._behind:
            needs.append(self._behind[name])
        if any(need not in self._over for need in needs):
            return False
        before = [self._last[number], *(self._over[need] for need in needs)]
        if isinstance(op, ir.MessageOp):
            self._issued[name] = self._last[number] = self._later(before)
            return True
        if self._busy and isinstance(op, ir.ComputeOp):
            copies, behind = self._busy.get(name, NO_COPIES)
            last, taken = self._computed.get(number, (None, 0))
            if last is not None and copies + taken:
                before.append(self._add(None, copies + taken, [last]))
        over = self._over[name] = self._last[number] = self._add(op, self._ns[name], before)
        if self._busy and isinstance(op, ir.ComputeOp):
            self._computed[number] = over, behind
        return True

    def _transfer(self, pair: _Pair) -> bool:
        """Let the messages of a pair pass whose halves have been issued."""
        before = pair.done
        while pair.done < len(pair.order):
            send = pair.order[pair.done]
            receive, cost = self._other_half(send)
            if send not in self._issued or receive not in self._issued:
                break
            passed = self._add(None, cost, [self._issued[send], self._issued[receive], pair.last])
            pair.last = self._over[send] = self._over[receive] = passed
            pair.done += 1
        return pair.done > before

    def _later(self, events: Sequence[int | None]) -> int | None:
        """Return the event with which all of these are over."""
        found = {event for event in events if event is not None}
        return self._add(None, 0, events) if len(found) > 1 else next(iter(found), None)

    def _add(self, op: ir.Op | None, ns: int, needs: Sequence[int | None]) -> int:
        self.events.append(Event(op, ns, tuple(dict.fromkeys(need for need in needs if need is not None))))
        return len(self.events) - 1

    def _other_half(self, send: str) -> tuple[str, int]:
        """Return the receive of a send, and what the message takes in ns."""
        name = parse(send)
        setup = self.schedule.setup
        number = setup.class_of(name.microbatch, name.slice or 0)
        costs = self.schedule.forecast.stages[name.stage * setup.classes + number]
        if name.kind == "send_activation":
            other = name._replace(kind="recv_activation", stage=name.stage + 1)
            return other.id, costs.send_activation_ns
        return name._replace(kind="recv_gradient", stage=name.stage - 1).id, costs.send_gradient_ns

    def _owner(self, stage: int) -> int:
        return self.schedule.stages[stage].device


@dataclass
class _Pair:
    """The channel of two devices: the messages between them, in order, and the last one that has passed."""

    order: list[str] = field(default_factory=list)
    """Ids of the sends."""
    done: int = 0
    last: int | None = None


class _Noise:
    """What noisy ops take, drawn unit by unit as executions come to them: in one order for all schedules."""

    def __init__(self, contract: Contract, spreads: Spreads, seed: int) -> None:
        self._events = contract.events
        self._seed, self._arrays = seed, 0
        self._places = _places(contract, spreads)
        self._uses = Counter(place[0] for place in self._places if place is not None)
        rows = 1 + max((place[1] for place in self._places if place is not None), default=-1)
        self._sigmas = np.zeros((rows, 1), np.float32)
        for event, place in zip(self._events, self._places, strict=True):
            if event.op is not None and place is not None:
                spread = spreads[event.op.name, event.op.stage]
                self._sigmas[place[1]] = np.sqrt(np.log1p(spread**2))

    def drawn(self, size: int) -> Callable[[int], Times | float]:
        """Return what each event takes in the next `size` executions; each is asked for once, in order."""
        array, self._arrays = self._arrays, self._arrays + 1
        factors: dict[int, NDArray[np.float32]] = {}
        uses = self._uses.copy()

        def taken(number: int) -> Times | float:
            event, place = self._events[number], self._places[number]
            if place is None:
                return event.ns
            unit, row = place
            if unit not in factors:
                random = np.random.default_rng((self._seed, array, unit))
                draws = random.standard_normal((len(self._sigmas), size), np.float32)
                factors[unit] = np.exp(draws * self._sigmas)
            uses[unit] -= 1
            block = factors[unit] if uses[unit] else factors.pop(unit)
            times: Times = event.ns * block[row].astype(np.float64)
            return times

        return taken


def _places(contract: Contract, spreads: Spreads) -> list[tuple[int, int] | None]:
    """Return the unit of each event and which of the unit's draws it takes; None where it is not noisy."""
    setup, stages = contract.schedule.setup, len(contract.schedule.stages)
    found: list[tuple[int, int] | None] = []
    parts: Counter[tuple[str, int, int]] = Counter()
    for event in contract.events:
        if event.op is None or not spreads.get((event.op.name, event.op.stage)):
            found.append(None)
            continue
        unit = event.op.microbatch * setup.slices + (event.op.slice_or_none or 0)
        draw, part = _DRAWS[event.op.name], (event.op.name, event.op.stage, unit)
        draw += 3 * parts[part]  # of those with layers
        parts[part] += 1
        found.append((unit, draw * stages + event.op.stage))
    return found
