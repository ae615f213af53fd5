"""Happens-before: the events of all executions, what each of them implies, and the data laws that must follow.

An op has two events, its start and its completion; the two halves of a message complete in one event, its transfer, and
have only their start on the lane. Every event lies on one *chain*, which is totally ordered: the three lanes of each
device, and the channel of each pair of devices. So a set of events that is closed under happens-before is a position
on every chain, and the least such set that holds an event is a row of positions, its clock (Mattern 1989).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import MESSAGES
from optpipe_compiler.errors import BadInput
from optpipe_compiler.verify.placed import named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe_compiler.verify.placed import Lane, Message, PlacedOp, PlacedOps, Unit
    from optpipe_compiler.verify.report import Violation

Chain = tuple[int, str] | tuple[int, int]
"""A device's lane, or the channel of a pair (lower device first)."""
Clocks = npt.NDArray[np.int32]
BLOCK = 2**27
"""So many numbers of clocks are held at a time: 512 MB, enough for all of 260,000 ops on 64 devices."""
MOST_CLOCKS = 2 * 10**9
"""Events times chains, which bounds the time that clocks take; docs/IR.md states it."""


class Events:
    """The events of a complete schedule, in chains, with the events that must come directly before each."""

    def __init__(self, placed: PlacedOps) -> None:
        self.start: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.before: list[list[int]] = []
        self.chains: dict[Chain, list[int]] = {}
        self.op_of: list[str] = []
        for device, lane in placed.lanes:
            self._add_lane(placed, device, lane)
        for (device, peer), listed in placed.channels.items():
            if device < peer:
                self._add_channel((device, peer), [message for message, _ in listed])
        for place in placed.places:
            if place.op.after:
                self.before[self.start[place.id]] += [self.done[name] for name in place.op.after]
        for place, _ in placed.receives:  # law 3: what reads a message starts after it has arrived
            self.before[self.start[placed.reader_of(place)]].append(self.done[place.id])

    def _add(self, chain: list[int], op: str) -> int:
        """Append an event to a chain: it comes after the event before it on the chain."""
        event = len(self.before)
        self.before.append(chain[-1:])
        self.op_of.append(op)
        chain.append(event)
        return event

    def _add_lane(self, placed: PlacedOps, device: int, lane: Lane) -> None:
        """Law 1: an op starts after the previous op of its lane has completed, or was issued."""
        if not placed.lanes[device, lane]:
            return
        chain = self.chains[device, lane] = []
        for place in placed.lanes[device, lane]:
            self.start[place.id] = self._add(chain, place.id)
            if place.kind not in MESSAGES:
                self.done[place.id] = self._add(chain, place.id)

    def _add_channel(self, pair: tuple[int, int], messages: list[Message]) -> None:
        """Law 3: a transfer comes after both issues and after the transfer before it in the order of the pair."""
        chain = self.chains[pair] = []
        for message in messages:
            transfer = self.done[message.send] = self.done[message.recv] = self._add(chain, message.send)
            self.before[transfer] += self.start[message.send], self.start[message.recv]


class Causality:
    """The clocks of all events: how many events of a chain are in the least closed set that holds an event.

    A clock has a number per chain. Along a chain it changes, but for the chain's own entry, only where an event comes
    after one of another chain: these, the *joins*, have a row each, and all others that of the last join before them.
    So as not to hold all rows, the chains are taken in blocks.
    """

    def __init__(self, events: Events, order: list[int]) -> None:
        self.events = events
        self.number = {chain: number for number, chain in enumerate(events.chains)}
        self.chain_of = np.zeros(len(order), np.int32)
        self.position = np.zeros(len(order), np.int32)
        """Of an event on its chain, from 1; also its own chain's entry in its clock."""
        for number, chain in enumerate(events.chains.values()):
            self.chain_of[chain] = number
            self.position[chain] = range(1, len(chain) + 1)
        if len(order) * len(events.chains) > MOST_CLOCKS:
            product = f"{len(order)} events on {len(events.chains)} lanes and channels"
            raise BadInput(f"the schedule has {product}, expected a product of at most {MOST_CLOCKS}")
        self._join(order)
        self._width = max(1, BLOCK // len(self._previous))
        self._kept: tuple[int, Clocks] | None = None

    def _join(self, order: list[int]) -> None:
        """Find the joins and number their rows from 1 on, so that rows are made of those before them; 0 is that of
        what no join comes before on its chain.

        Joins are made level by level: of one level none comes before another.
        """
        chain_of, position = self.chain_of.tolist(), self.position.tolist()
        level, latest = [0] * len(order), [0] * len(self.number)
        joins: list[int] = []
        before_joins: list[list[int]] = []
        """By join the events of other chains that come directly before it, of each chain the last one."""
        for event in order:
            before, chain = self.events.before[event], chain_of[event]
            if len(before) != (position[event] > 1):  # more than the one on its chain
                others = [one for one in before if chain_of[one] != chain]
                if len(others) > 1:
                    others = list({chain_of[one]: one for one in sorted(others, key=position.__getitem__)}.values())
                if others:
                    latest[chain] = 1 + max(latest[chain], *[level[one] for one in others])
                    joins.append(event)
                    before_joins.append(others)
            level[event] = latest[chain]

        levels = np.array([level[event] for event in joins], np.int64)
        by_level = np.argsort(levels, kind="stable")
        self._events = np.array([-1, *joins], np.int64)[np.concatenate([[0], by_level + 1])]
        """By row the join that it is of; the first is of none."""
        self._levels = np.searchsorted(levels[by_level], np.arange(1, levels.max(initial=0) + 2)) + 1
        """Where the rows of each level begin, and where the last ones end."""
        self._row = np.zeros(len(order), np.int64)
        """By event the row that its clock is of."""
        self._row[self._events[1:]] = np.arange(1, len(self._events))
        self._previous = np.zeros(len(self._events), np.int64)
        """By row the one before it on its chain."""
        for events in self.events.chains.values():
            rows = self._row[events] = np.maximum.accumulate(self._row[events])
            self._previous[rows[1:][rows[1:] > rows[:-1]]] = rows[:-1][rows[1:] > rows[:-1]]
        self._others: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        """Rows with a first event of another chain, a second one, ..., ascending, and these events."""
        having = by_level.tolist()
        while having:
            place = len(self._others)
            others_there = np.array([before_joins[number][place] for number in having])
            self._others.append((self._row[np.array(joins)[having]], others_there))
            having = [number for number in having if len(before_joins[number]) > place + 1]

    def clocks(self, wanted: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Clocks]:
        """Return, for each (events, chains), the clocks of these events on these chains, a row per event."""
        found = [np.zeros((len(events), len(chains)), np.int32) for events, chains in wanted]
        for first, block in self._blocks():
            for (events, chains), clocks in zip(wanted, found, strict=True):
                columns = [k for k, chain in enumerate(chains) if first <= chain < first + block.shape[1]]
                if columns:
                    inside = np.array([chains[k] - first for k in columns])
                    clocks[:, columns] = block[np.ix_(self._row[np.array(events)], inside)]
        for (events, chains), clocks in zip(wanted, found, strict=True):
            own = self.chain_of[np.array(events)][:, None] == np.array(chains)
            np.copyto(clocks, self.position[np.array(events)][:, None], where=own)
        return found

    def implied(self, later: Sequence[int], earlier: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return for each pair whether event `later` cannot happen without `earlier`."""
        events, others = np.asarray(later, np.int64), np.asarray(earlier, np.int64)
        chains, found = self.chain_of[others], self.position[events] >= self.position[others]
        for first, block in self._blocks():
            inside = (chains >= first) & (chains < first + block.shape[1]) & (chains != self.chain_of[events])
            reached = block[self._row[events[inside]], chains[inside] - first]
            found[inside] = reached >= self.position[others[inside]]
        return found

    def implies(self, later: int, earlier: int) -> bool:
        """Whether event `later` cannot happen without `earlier`."""
        return bool(self.implied([later], [earlier])[0])

    def _blocks(self) -> Iterator[tuple[int, Clocks]]:
        """Yield the rows of clocks on some chains after others, with the first of these chains.

        The last are kept, and come first the next time.
        """
        order = list(range(0, len(self.events.chains), self._width))
        if self._kept is not None and self._kept[0] == order[-1]:
            order.reverse()
        for first in order:
            if self._kept is None or self._kept[0] != first:
                self._kept = None
                self._kept = first, self._block(first)
            yield self._kept

    def _block(self, first: int) -> Clocks:
        """Return all rows on some chains, and a column for all others."""
        width = min(self._width, len(self.events.chains) - first)
        rows = np.zeros((len(self._events), width + 1), np.int32)

        def column_of(events: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            columns = self.chain_of[events] - first
            return np.where((columns >= 0) & (columns < width), columns, width)

        own, positions = column_of(self._events), self.position[self._events]
        others = [
            (numbers, numbers.searchsorted(self._levels), self._row[events], column_of(events), self.position[events])
            for numbers, events in self._others
        ]
        for level, (begin, end) in enumerate(pairwise(self._levels.tolist())):
            rows[begin:end] = rows[self._previous[begin:end]]
            for numbers, bounds, sources, columns, reached in others:
                now = slice(bounds[level], bounds[level + 1])
                if now.start == now.stop:
                    break  # what has no second event has no third one
                these = numbers[now]
                rows[these] = np.maximum(rows[these], rows[sources[now]])
                rows[these, columns[now]] = np.maximum(rows[these, columns[now]], reached[now])
            every = np.arange(begin, end)
            rows[every, own[begin:end]] = positions[begin:end]
        return rows[:, :width]


def execution_order(placed: PlacedOps, events: Events) -> list[int] | Violation:
    """Return the events in an order that happens-before allows, or the deadlock that forbids every execution."""
    after: list[list[int]] = [[] for _ in events.before]
    missing = [len(before) for before in events.before]
    for event, befores in enumerate(events.before):
        for before in befores:
            after[before].append(event)
    order = [event for event, count in enumerate(missing) if not count]
    for event in order:
        for later in after[event]:
            missing[later] -= 1
            if not missing[later]:
                order.append(later)
    return order if len(order) == len(missing) else _deadlock(placed, events, missing)


def _deadlock(placed: PlacedOps, events: Events, missing: list[int]) -> Violation:
    """Walk back from an event that never happens over others of that sort until one comes again: a cycle."""
    event = next(event for event, count in enumerate(missing) if count)
    walk: dict[int, None] = {}
    while event not in walk:
        walk[event] = None
        event = next(before for before in events.before[event] if missing[before])
    cycle = list(walk)[list(walk).index(event) :]
    ids = list(dict.fromkeys(events.op_of[event] for event in cycle))
    shown = ", which waits for ".join([*ids[:8], *(["..."] if len(ids) > 8 else []), ids[0]])
    return placed.by_id[ids[0]].breaks("deadlock", f"no execution can complete: {shown}", *ids[1:])


def data(placed: PlacedOps, causality: Causality) -> Iterator[Violation]:
    """Every op starts after the ops whose results it reads have completed, in every execution."""
    events = causality.events
    reads_back = _reads_back(placed)
    pairs = [
        (place, source)
        for place in placed.places
        for source in [*_sources(placed, place), *reads_back.get(place.id, ())]
        if source in events.done
    ]
    later, earlier = [events.start[place.id] for place, _ in pairs], [events.done[source] for _, source in pairs]
    for (place, source), implied in zip(pairs, causality.implied(later, earlier).tolist(), strict=True):
        if not implied:
            message = f"{place.id} on device {place.device} can start before {source} has completed"
            yield place.breaks("data", message, source)


def _sources(placed: PlacedOps, place: PlacedOp) -> list[str]:
    """Return the ids of the ops that an op needs, reloads and recomputes left out."""
    kind, stage, unit = place.kind, place.stage, place.unit
    if kind == "forward":
        earlier = [named("forward", stage, unit) for unit in _neighbour(placed, unit, -1)]
        return [named("forward", stage - 1, unit), *earlier] if stage else earlier
    if kind in ("backward_input", "backward"):
        later = [placed.gradient_of(stage, unit) for unit in _neighbour(placed, unit, 1)]
        above = [placed.gradient_of(stage + 1, unit)] if stage + 1 < len(placed.stages) else []
        return [named("forward", stage, unit), *above, *later]
    if kind == "backward_weight":
        return [named("backward_input", stage, unit)]
    if kind in ("send_activation", "offload", "recompute"):
        return [named("forward", stage, unit)]
    if kind == "send_gradient":
        return [placed.gradient_of(stage, unit)]
    if kind == "reload":
        assert isinstance(place.op, ir.Reload)
        return [named("offload", stage, unit, place.op.layers)]
    return []


def _neighbour(placed: PlacedOps, unit: Unit, step: int) -> list[Unit]:
    """Return the slice before or after a unit, whose carry, or its gradient, it reads; none at the ends."""
    slice = (unit[1] or 0) + step
    return [(unit[0], slice)] if 0 <= slice < placed.slices else []


def _reads_back(placed: PlacedOps) -> dict[str, list[str]]:
    """Return, for the first op that reads the saved layers, the reloads and recomputes that bring them back."""
    found: dict[str, list[str]] = {}
    for place in placed.of("recompute", "reload"):
        reader = placed.gradient_of(place.stage, place.unit)
        found.setdefault(reader, []).append(place.id)
    return found
