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
from optpipe_compiler.errors import BadInput
from optpipe_compiler.verify.placed import NONE, named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe_compiler.verify.placed import Ints, PlacedOps
    from optpipe_compiler.verify.report import Violation

Chain = tuple[int, str] | tuple[int, int]
"""A device's lane, or the channel of a pair (lower device first)."""
Clocks = npt.NDArray[np.int32]
BLOCK = 2**27
"""So many numbers of clocks are held at a time: 512 MB, enough for all of 260,000 ops on 64 devices."""
MOST_CLOCKS = 2 * 10**9
"""Events times chains, which bounds the time that clocks take; docs/IR.md states it."""


class Events:
    """The events of a complete schedule, chain by chain, and what must come before each beside those of its chain.

    A *run* is a part of a chain of which only the first event comes after one of another chain.
    """

    def __init__(self, placed: PlacedOps) -> None:
        columns, messages = placed.columns, placed.messages
        self._placed = placed
        of_op = np.where(columns.is_message, 1, 2)
        self._on_lanes = on_lanes = int(of_op.sum())
        self.start = np.cumsum(of_op) - of_op
        """By number of op: law 1, an op starts after the previous op of its lane has completed, or was issued."""
        self.done = self.start + 1
        transfers = on_lanes + np.arange(len(messages.lower))
        self.done[messages.lower] = self.done[messages.upper] = transfers
        self.count = on_lanes + len(transfers)

        lanes = [(key, places[0].number) for key, places in placed.lanes.items() if places]
        pairs = [divmod(pair, len(placed.schedule.devices)) for pair in messages.pairs.tolist()]
        self.chains: list[Chain] = [*(key for key, _ in lanes), *pairs]
        channels = on_lanes + np.array(messages.bounds[0], np.int64)
        self.begins = np.concatenate([self.start[[first for _, first in lanes]], channels])
        """Where the events of each chain begin, and where the last ones end."""
        self.chain_of = np.repeat(np.arange(len(self.chains)), np.diff(self.begins))
        self.position = np.arange(self.count) - self.begins[self.chain_of] + 1
        """Of an event on its chain, from 1."""

        self.later, self.earlier = self._between_chains(transfers)
        """In pairs, an event and one that must come before it."""
        begins_run = self.position == 1
        begins_run[self.later] = True
        self.run = np.cumsum(begins_run) - 1
        """By event."""
        self.firsts = np.flatnonzero(begins_run)
        """By run, its first event."""

    def _between_chains(self, transfers: Ints) -> tuple[Ints, Ints]:
        """Law 3: a transfer comes after both issues and after the transfer before it in the order of the pair; and what
        reads a message starts after it has arrived. Waits that the order of the lane fulfils are left out."""
        placed, messages = self._placed, self._placed.messages
        sends, receives = messages.sends, messages.receives
        waiting, awaited = placed.waits
        later = np.concatenate([transfers, transfers, self.start[waiting], self.start[placed.partners(receives)]])
        earlier = np.concatenate([self.start[sends], self.start[receives], self.done[awaited], self.done[receives]])
        unsaid = (self.chain_of[later] != self.chain_of[earlier]) | (later <= earlier)
        return later[unsaid], earlier[unsaid]

    def op_of(self, event: int) -> str:
        """Return the id of the op that an event is of; of a transfer, that of the send."""
        if event >= self._on_lanes:
            number = int(self._placed.messages.sends[event - self._on_lanes])
        else:
            number = int(np.searchsorted(self.start, event, side="right")) - 1
        return self._placed.places[number].id


NEVER = -1


def happens_before(placed: PlacedOps) -> Causality | Violation:
    """Return the clocks of a complete schedule, or the deadlock that forbids every execution."""
    events = Events(placed)
    level = _levels(events)
    return _deadlock(placed, events, level) if (level == NEVER).any() else Causality(events, level)


def _levels(events: Events) -> Ints:
    """Return by run how many runs stand one behind the other before it, NEVER where one of them waits for it.

    Of one level none comes before another.
    """
    runs = len(events.firsts)
    later, earlier = events.run[events.later], events.run[events.earlier]
    behind = np.flatnonzero(events.position[events.firsts] > 1)
    later, earlier = np.concatenate([behind, later]), np.concatenate([behind - 1, earlier])
    missing = np.bincount(later, minlength=runs).tolist()
    followers = later[np.argsort(earlier, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(earlier, minlength=runs)).tolist()
    level = [0] * runs
    order = [run for run, count in enumerate(missing) if not count]
    for run in order:
        above = level[run] + 1
        for follower in followers[ends[run - 1] if run else 0 : ends[run]]:
            if level[follower] < above:
                level[follower] = above
            missing[follower] -= 1
            if not missing[follower]:
                order.append(follower)
    return np.where(np.array(missing, np.int64) > 0, NEVER, np.array(level, np.int64))


class Causality:
    """The clocks of all events: how many events of a chain are in the least closed set that holds an event.

    A clock has a number per chain. Along a chain it changes, but for the chain's own entry, only where a run begins: so
    runs have a row each. So as not to hold all rows, the chains are taken in blocks. `level` is that of `_levels`.
    """

    def __init__(self, events: Events, level: Ints) -> None:
        self.events, self.chain_of, self.position = events, events.chain_of, events.position
        self.number = {chain: number for number, chain in enumerate(events.chains)}
        if events.count * len(events.chains) > MOST_CLOCKS:
            product = f"{events.count} events on {len(events.chains)} lanes and channels"
            raise BadInput(f"the schedule has {product}, expected a product of at most {MOST_CLOCKS}")
        by_level = np.argsort(level, kind="stable")
        self._events = events.firsts[by_level]
        """By row the first event of its run: rows are made of those before them, level by level."""
        self._levels = np.searchsorted(level[by_level], np.arange(level.max(initial=0) + 2))
        """Where the rows of each level begin, and where the last ones end."""
        row_of = np.empty_like(by_level)
        row_of[by_level] = np.arange(len(by_level))
        self._row = row_of[events.run]
        """By event the row that its clock is of."""
        self._behind = np.where(self.position[self._events] > 1, row_of[by_level - 1], NONE)
        """By row the one before it on its chain, NONE where there is none."""
        rows, chains, reached = self._row[events.later], self.chain_of[events.earlier], self.position[events.earlier]
        by_row = np.lexsort((reached, chains, rows))
        rows, chains, earlier = rows[by_row], chains[by_row], events.earlier[by_row]
        is_last = np.append((rows[1:] != rows[:-1]) | (chains[1:] != chains[:-1]), np.ones(min(1, len(rows)), bool))
        rows, earlier = rows[is_last], earlier[is_last]
        turns = np.arange(len(rows)) - np.searchsorted(rows, rows)
        by_turn = np.argsort(turns, kind="stable")
        ends = np.cumsum(np.bincount(turns))[:-1]
        self._others = list(zip(np.split(rows[by_turn], ends), np.split(earlier[by_turn], ends), strict=True))
        """Rows with a first other chain that they come after, a second one, ..., ascending; and its last such event."""
        self._width = max(1, BLOCK // max(1, len(self._events)))
        self._kept: tuple[int, Clocks] | None = None

    def clocks(self, wanted: Sequence[tuple[Ints, Sequence[int]]]) -> list[Clocks]:
        """Return, for each (events, chains), the clocks of these events on these chains, a row per event."""
        found = [np.zeros((len(events), len(chains)), np.int32) for events, chains in wanted]
        for first, block in self._blocks():
            for (events, chains), clocks in zip(wanted, found, strict=True):
                columns = [k for k, chain in enumerate(chains) if first <= chain < first + block.shape[1]]
                if columns:
                    inside = np.array([chains[k] - first for k in columns])
                    clocks[:, columns] = block[np.ix_(self._row[events], inside)]
        for (events, chains), clocks in zip(wanted, found, strict=True):
            own = self.chain_of[events][:, None] == np.array(chains)
            np.copyto(clocks, self.position[events][:, None], where=own)
        return found

    def implied(self, later: Ints, earlier: Ints) -> npt.NDArray[np.bool_]:
        """Return for each pair whether event `later` cannot happen without `earlier`."""
        chains = self.chain_of[earlier]
        found: npt.NDArray[np.bool_] = self.position[later] >= self.position[earlier]
        for first, block in self._blocks():
            inside = (chains >= first) & (chains < first + block.shape[1]) & (chains != self.chain_of[later])
            reached = block[self._row[later[inside]], chains[inside] - first]
            found[inside] = reached >= self.position[earlier[inside]]
        return found

    def implies(self, later: int, earlier: int) -> bool:
        """Whether event `later` cannot happen without `earlier`."""
        return bool(self.implied(np.array([later]), np.array([earlier]))[0])

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
        rows = np.zeros((len(self._events) + 1, width + 1), np.int32)
        """The last stands for none."""

        def column_of(events: Ints) -> Ints:
            columns = self.chain_of[events] - first
            return np.where((columns >= 0) & (columns < width), columns, width)

        own, positions = column_of(self._events), self.position[self._events]
        others = [
            (numbers, numbers.searchsorted(self._levels), self._row[events], column_of(events), self.position[events])
            for numbers, events in self._others
        ]
        for level, (begin, end) in enumerate(pairwise(self._levels.tolist())):
            rows[begin:end] = rows[self._behind[begin:end]]
            for numbers, bounds, sources, columns, reached in others:
                now = slice(bounds[level], bounds[level + 1])
                if now.start == now.stop:
                    break  # what has no second event has no third one
                these = numbers[now]
                rows[these] = np.maximum(rows[these], rows[sources[now]])
                rows[these, columns[now]] = np.maximum(rows[these, columns[now]], reached[now])
            every = np.arange(begin, end)
            rows[every, own[begin:end]] = positions[begin:end]
        return rows[:-1, :width]


def _deadlock(placed: PlacedOps, events: Events, level: Ints) -> Violation:
    """Walk back from an event that never happens over others of that sort until one comes again: a cycle."""
    never = level[events.run] == NEVER
    behind = never & (events.position > 1) & np.roll(never, 1)
    waits = never[events.earlier] & ~behind[events.later]
    awaited = np.arange(events.count) - 1
    awaited[events.later[waits][::-1]] = events.earlier[waits][::-1]
    """Of an event that never happens, the first of that sort that must come before it."""
    event, walk = int(np.argmax(never)), dict[int, None]()
    while event not in walk:
        walk[event] = None
        event = int(awaited[event])
    cycle = list(walk)[list(walk).index(event) :]
    ids = list(dict.fromkeys(events.op_of(event) for event in cycle))
    shown = ", which waits for ".join([*ids[:8], *(["..."] if len(ids) > 8 else []), ids[0]])
    return placed.by_id[ids[0]].breaks("deadlock", f"no execution can complete: {shown}", *ids[1:])


def data(placed: PlacedOps, causality: Causality) -> Iterator[Violation]:
    """Every op starts after the ops whose results it reads have completed, in every execution."""
    events = causality.events
    readers, sources = _reads(placed)
    missing = ~causality.implied(events.start[readers], events.done[sources])
    for reader, source in zip(readers[missing].tolist(), sources[missing].tolist(), strict=True):
        place, other = placed.places[reader], placed.places[source]
        message = f"{place.id} on device {place.device} can start before {other.id} has completed"
        yield place.breaks("data", message, other.id)


def _reads(placed: PlacedOps) -> tuple[Ints, Ints]:
    """Return in pairs an op and one whose result it reads, in the order of the file."""
    stage, unit, slice = placed.columns.stage, placed.columns.unit, placed.columns.unit % placed.slices
    forwards, backwards = placed.numbers("forward"), placed.numbers("backward", "backward_input")
    weights, gradient_sends = placed.numbers("backward_weight"), placed.numbers("send_gradient")
    of_forward = placed.numbers("backward", "backward_input", "send_activation", "offload", "recompute")
    with_earlier, with_later = forwards[slice[forwards] > 0], backwards[slice[backwards] < placed.slices - 1]
    restoring = placed.of("recompute", "reload")
    restored = placed.numbers("recompute", "reload")
    offloaded = [
        (place.number, placed.by_id[named("offload", place.stage, place.unit, place.op.layers)].number)
        for place in restoring
        if isinstance(place.op, ir.Reload)
    ]
    reloads, offloads = np.array(offloaded, np.int64).reshape(-1, 2).T
    pairs = [
        (forwards, placed.find("forward", stage[forwards] - 1, unit[forwards])),
        (with_earlier, placed.find("forward", stage[with_earlier], unit[with_earlier] - 1)),
        (of_forward, placed.find("forward", stage[of_forward], unit[of_forward])),
        (backwards, placed.gradients(stage[backwards] + 1, unit[backwards])),
        (with_later, placed.gradients(stage[with_later], unit[with_later] + 1)),
        (weights, placed.find("backward_input", stage[weights], unit[weights])),
        (gradient_sends, placed.gradients(stage[gradient_sends], unit[gradient_sends])),
        (reloads, offloads),
        # what reads the saved layers first reads what brings them back
        (placed.gradients(stage[restored], unit[restored]), restored),
    ]
    readers, sources = (np.concatenate(column) for column in zip(*pairs, strict=True))
    there = np.flatnonzero(sources != NONE)
    there = there[np.argsort(readers[there], kind="stable")]
    return readers[there], sources[there]
