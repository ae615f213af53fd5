"""The definition of machine/waits.py in plain Python: each op gets the waits that it needs and no more.

It needs them for its data, and, when it takes memory, for enough frees of other lanes that no execution can pass the
planned peak. What is already certain when an op starts is known from vector clocks: how far each chain of events (a
device's lanes, a pair's messages) must have come.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler.lower.graph import COMPUTE, D2H, H2D, PAIR, Chain, Graph
from optpipe_compiler.lower.waits import completions
from optpipe_compiler.model.schedule import NONE, Ints

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Clock = NDArray[np.int32]
    """By chain, how many of its events have completed."""


class Waits:
    """The sweep that adds waits, device by device but in one planned order (clocks cross devices)."""

    def __init__(self, graph: Graph, order: Ints, peaks: list[tuple[int, int]]) -> None:
        self.graph = graph
        self.order = order
        self.of: dict[int, list[int]] = {}
        """The waits of those nodes that have any."""
        self.clocks = np.zeros((len(order), len(graph.chains)), np.int32)
        """[node, chain] how many events of the chain have completed whenever the node has."""
        self._chain: list[int] = graph.chain.tolist()
        self._position: list[int] = graph.position.tolist()
        self._data: list[int] = graph.data.tolist()
        self._device: list[int] = graph.nodes.device.tolist()
        self._taken: list[int] = graph.nodes.taken.tolist()
        self._host_taken: list[int] = graph.nodes.host_taken.tolist()
        self._devices = [_Memory(graph, d, *peak) for d, peak in enumerate(peaks)]
        self._frees: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        """By device and chain the nodes that free memory of the device, in order, and their positions."""
        gives = graph.nodes.given + graph.nodes.host_given > 0
        for number, chain in enumerate(graph.chains):
            along = graph.along[number][gives[graph.along[number]]]
            for d in chain.devices:
                mine = along[graph.nodes.device[along] == d]
                self._frees[d, number] = mine.tolist(), graph.position[mine].tolist()

    def add(self) -> None:
        """Give every node its waits and its clock."""
        graph, clocks = self.graph, self.clocks
        before, is_lane = graph.before.tolist(), [chain.what != PAIR for chain in graph.chains]
        turns, frees = self._completions()
        completed = 0
        for turn, node in enumerate(self.order.tolist()):
            while turns[completed] <= turn:
                free = frees[completed]
                latest, number = self._devices[self._device[free]].latest, self._chain[free]
                latest[number] = max(latest.get(number, free), free, key=self._position.__getitem__)
                completed += 1
            clock, chain = clocks[node], self._chain[node]
            for one in before[node]:
                if one != NONE:
                    np.maximum(clock, clocks[one], out=clock)
            if is_lane[chain]:
                for wait in self._choose(node, clock):
                    np.maximum(clock, clocks[wait], out=clock)
                memory = self._devices[self._device[node]]
                memory.start(chain, self._taken[node], self._host_taken[node], clock)
            clock[chain] = self._position[node] + 1

    def _completions(self) -> tuple[list[int], list[int]]:
        """Return the turns at which nodes that free memory have completed, ascending, and the nodes.

        The last of them is none, and never completes.
        """
        nodes, turns = self.graph.nodes, completions(self.graph, self.order)
        frees = np.flatnonzero((nodes.given + nodes.host_given)[self.order] > 0)
        frees = frees[np.argsort(turns[frees], kind="stable")]
        return [*turns[frees].tolist(), len(self.order)], [*self.order[frees].tolist(), NONE]

    def _choose(self, node: int, clock: Clock) -> list[int]:
        """Return the fewest waits that keep data and memory right, where a node would start with a clock."""
        data = self._data[node]
        takes = self._taken[node] > 0 or self._host_taken[node] > 0
        if data == NONE and not takes:
            return []
        memory = self._devices[self._device[node]]
        base = clock[memory.columns]
        waits = needed = [] if data == NONE else [data]
        certain = self._merge(memory, base, needed)
        is_short = takes and not self._enough(node, certain)
        if is_short:
            waits = list(dict.fromkeys([*needed, *self._memory_waits(node, certain)]))
        for candidate in list(waits):
            rest = [other for other in waits if other != candidate]
            if is_short and rest == needed:
                continue
            merged = self._merge(memory, base, rest)
            if (data == NONE or self._implies(memory, merged, data)) and self._enough(node, merged):
                waits = rest
        if waits:
            waits.sort(key=lambda one: (self._chain[one], self._position[one]))
            self.of[node] = waits
        return waits

    def _memory_waits(self, node: int, base: Clock) -> list[int]:
        """Wait for the earliest frees of each other lane that suffice, the cheapest lanes to wait for being last.

        `base` alone is not enough.
        """
        memory = self._devices[self._device[node]]
        chosen = full = [
            last
            for chain, last in memory.latest.items()
            if chain != self._chain[node] and not self._implies(memory, base, last)
        ]
        for candidate in full:
            rest = [other for other in chosen if other != candidate]
            merged = self._merge(memory, base, rest)
            chosen = rest if rest and self._enough(node, merged) else [*rest, self._earliest(node, candidate, merged)]
        return chosen

    def _earliest(self, node: int, last: int, base: Clock) -> int:
        """Bisect for the earliest event of a chain, from what `base` implies up to `last`, that is enough."""
        memory = self._devices[self._device[node]]
        frees, positions = self._frees[self._device[last], self._chain[last]]
        low = bisect_left(positions, int(base[memory.index[self._chain[last]]]))
        high = bisect_left(positions, self._position[last])
        while low < high:
            middle = (low + high) // 2
            if self._enough(node, self._merge(memory, base, frees[middle : middle + 1])):
                high = middle
            else:
                low = middle + 1
        return frees[low]

    def _merge(self, memory: _Memory, base: Clock, nodes: Iterable[int]) -> Clock:
        """Return what is certain where `base` is and the nodes have completed, both on the device's chains."""
        merged = base
        for node in nodes:
            merged = np.maximum(merged, self.clocks[node, memory.columns])
        return merged

    def _implies(self, memory: _Memory, clock: Clock, node: int) -> bool:
        """Whether a clock on the device's chains says that the node has completed."""
        return bool(clock[memory.index[self._chain[node]]] > self._position[node])

    def _enough(self, node: int, clock: Clock) -> bool:
        """Whether no state in which `node` is the last start in planned order exceeds the planned peaks."""
        memory = self._devices[self._device[node]]
        if self._host_taken[node]:
            return memory.fits_host(self._host_taken[node], clock)
        return not self._taken[node] or memory.fits(self._chain[node], self._taken[node], clock)


class _Memory:
    """One device's memory: what its chains give back to it, and what has started on the lanes that take it."""

    def __init__(self, graph: Graph, device: int, peak: int, host_peak: int) -> None:
        nodes, self.peak, self.host_peak = graph.nodes, peak, host_peak
        local = [number for number, chain in enumerate(graph.chains) if device in chain.devices]
        self.columns = np.array(local, np.int64)
        """The numbers of its chains; clocks below are on these alone."""
        self.index = {number: index for index, number in enumerate(local)}
        self.latest: dict[int, int] = {}
        """By chain the last node in its order that has freed memory of the device, those first that did so first.

        A small message may be planned to arrive before a large one that was sent earlier.
        """
        mine = np.where(nodes.device == device, nodes.given, 0)
        sums = [_sums(mine[graph.along[number]]) for number in local]
        self._given = np.concatenate([*sums, np.empty(0, np.int64)])
        """Chain after chain, the bytes that its first 0, 1, ... events give back."""
        lengths = np.array(list(map(len, sums)), np.int64)
        self._offsets = np.cumsum(lengths) - lengths
        lanes = [self._lane(graph, what, device) for what in (COMPUTE, H2D)]
        self._started = {
            number: _Started(nodes.taken[graph.along[number]], len(local)) for number in lanes if number != NONE
        }
        self._other = {one: other for one, other in (lanes, lanes[::-1]) if other != NONE}
        """By lane that takes memory the other one, where there is one."""
        self._d2h, self._h2d = self._lane(graph, D2H, device), lanes[1]
        self._host_taken = 0
        self._returned = _sums(nodes.host_given[graph.lane(H2D, device)])
        """Host bytes that the first 0, 1, ... reloads give back."""

    @staticmethod
    def _lane(graph: Graph, what: int, device: int) -> int:
        """Return the number of a lane, NONE where nothing is on it."""
        lane = Chain(what, device, 0)
        return graph.chains.index(lane) if lane in graph.chains else NONE

    def start(self, chain: int, taken: int, host_taken: int, clock: Clock) -> None:
        """Let a node start on a lane, `clock` being that of all chains."""
        self._host_taken += host_taken
        if taken:
            freed = self._freed(clock[self.columns]) if chain in self._other else None
            self._started[chain].append(taken, freed)

    def fits_host(self, host_taken: int, clock: Clock) -> bool:
        """Whether the host has room for an offload that starts with a clock."""
        back = 0 if self._h2d == NONE else clock[self.index[self._h2d]]
        return bool(self._host_taken + host_taken - self._returned[back] <= self.host_peak)

    def fits(self, chain: int, taken: int, clock: Clock) -> bool:
        """Whether there is room for a node that starts with a clock, whatever has started on the other lane.

        That is what the clock implies, or that and some of the later starts, each with its own clock.
        """
        freed, room = self._freed(clock), self.peak - taken - self._started[chain].total
        if chain not in self._other:
            return bool(room >= -np.add.reduce(freed))
        lane = self._other[chain]
        other = self._started[lane]
        implied = other.takers[clock[self.index[lane]]]
        if other.taken[implied] - np.add.reduce(freed) > room:
            return False
        later = slice(implied + 1, other.count + 1)
        held = other.taken[later] - np.add.reduce(np.maximum(other.freed[later], freed), axis=1)
        return bool(np.maximum.reduce(held, initial=room) <= room)

    def _freed(self, clock: Clock) -> Ints:
        """Return the bytes that each chain has given back."""
        freed: Ints = self._given[self._offsets + clock]
        return freed


class _Started:
    """What takes memory on one lane and has started: bytes taken by the first 0, 1, ..., freed by each chain then."""

    def __init__(self, taken: Ints, chains: int) -> None:
        self.takers: list[int] = _sums((taken > 0).astype(np.int64)).tolist()
        """How many of the lane's first 0, 1, ... nodes take memory."""
        self.count = self.total = 0
        self.taken = np.zeros(self.takers[-1] + 1, np.int64)
        self.freed = np.zeros((self.takers[-1] + 1, chains), np.int64)

    def append(self, taken: int, freed: Ints | None) -> None:
        """Add the next node; what is freed is not asked for where no other lane takes memory."""
        self.count += 1
        self.total += taken
        self.taken[self.count] = self.total
        if freed is not None:
            self.freed[self.count] = freed


def _sums(numbers: Ints) -> Ints:
    """Return the sums of the first 0, 1, ... of them."""
    return np.concatenate([[0], np.cumsum(numbers)])
