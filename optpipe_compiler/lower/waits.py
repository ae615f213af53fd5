"""Waits: each op gets those it needs and no more.

It needs them for its data, and, when it takes memory, for enough frees of other lanes that no execution can pass the
planned peak. What is already certain when an op starts is known from vector clocks: how far each chain of events (a
device's lanes, a pair's messages) must have come.

Why it is safe: let S be any reachable state and x the last of its allocations in planned order. All allocations of S
are planned no later than x, and x waited for frees until they all fit. So no execution exceeds the planned peak.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler.lower.graph import Chain, Graph, Node, owner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Clock = NDArray[np.int32]


def planned_peaks(order: list[Node], devices: int) -> list[tuple[int, int]]:
    """Return per device the most bytes held by plan, on the device and, by its offloads, on the host."""
    held, host = [0] * devices, [0] * devices
    peaks, host_peaks = [0] * devices, [0] * devices
    pending: list[tuple[int, int, int, int, int]] = []
    for sequence, node in enumerate(order):
        while pending and pending[0][0] <= node.start:
            _, _, device, given, host_given = heapq.heappop(pending)
            held[device] -= given
            host[device] -= host_given
        device = owner(node)
        held[device] += node.taken
        host[device] += node.host_taken
        peaks[device] = max(peaks[device], held[device])
        host_peaks[device] = max(host_peaks[device], host[device])
        if node.given or node.host_given:
            heapq.heappush(pending, (node.end, sequence, device, node.given, node.host_given))
    return list(zip(peaks, host_peaks, strict=True))


class Waits:
    """The sweep that adds waits, device by device but in one planned order (clocks cross devices)."""

    def __init__(self, graph: Graph, order: list[Node], peaks: list[tuple[int, int]]) -> None:
        self.graph = graph
        self.order = order
        self.peaks = peaks
        self.column = {chain: number for number, chain in enumerate(sorted(graph.lanes))}
        devices = range(graph.problem.devices)
        self.local = {
            d: [c for c in sorted(graph.lanes) if d in ((c[1], c[2]) if c[0] == "pair" else (c[1],))] for d in devices
        }
        self.given = {(d, chain): _given(graph.lanes[chain], d) for d in devices for chain in self.local[d]}
        self.started: dict[tuple[str, int], _Started] = {
            (lane, d): _Started([self.column[chain] for chain in self.local[d]])
            for lane in ("compute", "h2d")
            for d in devices
        }
        self.host_taken = [0] * graph.problem.devices
        self.latest: list[dict[Chain, Node]] = [{} for _ in devices]
        """Per device and chain the last event that has freed memory of the device."""
        self.frees: dict[tuple[int, Chain], list[Node]] = {}
        """Per device and chain the events that free memory of the device, in order."""
        self.rank: dict[int, int] = {}
        """Where in its list each of them is, by id."""
        for chain, nodes in graph.lanes.items():
            for node in nodes:
                if node.given or node.host_given:
                    row = self.frees.setdefault((owner(node), chain), [])
                    self.rank[id(node)] = len(row)
                    row.append(node)
        self.returned = {d: np.cumsum([0, *(n.host_given for n in graph.lane("h2d", d))]) for d in devices}
        """Host bytes that the first 0, 1, ... reloads of each device give back."""

    def add(self) -> None:
        """Give every node its waits and its clock."""
        running: list[tuple[int, int, Node]] = []
        for sequence, node in enumerate(self.order):
            while running and running[0][0] <= node.start:
                self._complete(heapq.heappop(running)[2])
            clock = np.zeros(len(self.column), dtype=np.int32)
            for before in node.before:
                np.maximum(clock, before.clock, out=clock)  # type: ignore[arg-type]
            if node.chain[0] != "pair":
                clock = self._choose(node, clock)
            self._record(node, clock)
            node.clock = clock.copy()
            node.clock[self.column[node.chain]] = node.position + 1
            heapq.heappush(running, (node.end, sequence, node))

    def deliveries(self, device: int) -> list[tuple[Node, list[Node]]]:
        """After `add`: by op of the device, its sends that are delivered when the op starts, each once per lane."""
        pairs = [chain for chain in self.local[device] if chain[0] == "pair"]
        found: list[tuple[Node, list[Node]]] = []
        for lane in ("compute", "d2h", "h2d"):
            known = dict.fromkeys(pairs, 0)
            for node in self.graph.lane(lane, device):
                new: list[Node] = []
                for chain in pairs:
                    assert node.clock is not None
                    reached = int(node.clock[self.column[chain]])
                    new += [one for one in self.graph.lanes[chain][known[chain] : reached] if owner(one) == device]
                    known[chain] = reached
                if new:
                    found.append((node, new))
        return found

    def _complete(self, node: Node) -> None:
        if (node.given or node.host_given) and not node.message.startswith("recv"):
            self.latest[owner(node)][node.chain] = node

    def _record(self, node: Node, clock: Clock) -> None:
        device = node.chain[1]
        self.host_taken[device] += node.host_taken if node.chain[0] == "d2h" else 0
        if node.chain[0] in ("compute", "h2d"):
            self.started[node.chain[0], device].append(node.taken, clock)

    def _choose(self, node: Node, base: Clock) -> Clock:
        """Return the clock of the node's start after choosing the fewest waits that keep data and memory right."""
        data = self.graph.data(node)
        waits = {id(d): d for d in data}
        if (node.taken or node.host_taken) and not self._enough(node, _merge(base, data)):
            waits |= {id(n): n for n in self._memory_waits(node, _merge(base, data))}
        chosen = list(waits.values())
        for candidate in list(chosen):
            rest = [other for other in chosen if other is not candidate]
            merged = _merge(base, rest)
            if all(merged[self.column[d.chain]] > d.position for d in data) and self._enough(node, merged):
                chosen = rest
        node.waits = sorted(chosen, key=lambda n: (n.chain, n.position))
        return _merge(base, chosen)

    def _memory_waits(self, node: Node, base: Clock) -> list[Node]:
        """Wait for the earliest frees of each other lane that suffice, the cheapest lanes to wait for being last."""
        full = [
            last
            for chain, last in self.latest[node.chain[1]].items()
            if chain != node.chain and base[self.column[chain]] <= last.position
        ]
        chosen = list(full)
        for candidate in full:
            rest = [other for other in chosen if other is not candidate]
            merged = _merge(base, rest)
            if self._enough(node, merged):
                chosen = rest
                continue
            chosen = [*rest, self._earliest(node, candidate, base, rest)]
        return chosen

    def _earliest(self, node: Node, last: Node, base: Clock, rest: list[Node]) -> Node:
        """Bisect for the earliest event of a chain that is enough together with `rest`."""
        lane = self.frees[owner(last), last.chain]
        low, high = 0, self.rank[id(last)]
        while low < high:
            middle = (low + high) // 2
            if self._enough(node, _merge(base, [*rest, lane[middle]])):
                high = middle
            else:
                low = middle + 1
        return lane[low]

    def _enough(self, node: Node, clock: Clock) -> bool:
        """Whether no state in which `node` is the last start in planned order exceeds the planned peaks."""
        device = node.chain[1]
        peak, host_peak = self.peaks[device]
        if node.chain[0] == "d2h":
            h2d = ("h2d", device, 0)
            back = clock[self.column[h2d]] if h2d in self.column else 0
            return bool(self.host_taken[device] + node.host_taken - self.returned[device][back] <= host_peak)
        if node.taken == 0:
            return True
        return self._worst(node, clock) <= peak

    def _worst(self, node: Node, clock: Clock) -> int:
        """Return the most bytes held when `node` has just started, over all partners on the other allocating lane."""
        device, lane = node.chain[1], node.chain[0]
        other_lane = "h2d" if lane == "compute" else "compute"
        mine, other = self.started[lane, device], self.started[other_lane, device]
        own_taken = mine.total() + node.taken
        column = self.column.get((other_lane, device, 0))
        forced = int(clock[column]) if column is not None else 0
        partners = other.clocks(forced)  # rows: none started beyond the forced ones, then each later one
        held = own_taken + other.totals(forced)
        for index, chain in enumerate(self.local[device]):
            given = self.given[device, chain]
            if given[-1] == 0:
                continue
            reached = np.maximum(partners[:, index], clock[self.column[chain]])
            if chain == node.chain:
                reached = np.maximum(reached, node.position)
            elif chain[0] == other_lane and chain[1] == device:
                reached = np.maximum(reached, other.positions(forced))
            held = held - given[reached]
        return int(held.max())


def _given(nodes: list[Node], device: int) -> Clock:
    """Return the running total of bytes that the chain's events give back to `device`."""
    return np.concatenate([[0], np.cumsum([node.given if owner(node) == device else 0 for node in nodes])]).astype(
        np.int64
    )


def _merge(base: Clock, nodes: Iterable[Node]) -> Clock:
    merged = base
    for node in nodes:
        assert node.clock is not None
        merged = np.maximum(merged, node.clock)
    return merged


class _Started:
    """The ops of one allocating lane that have started, with columns of their clocks and the bytes taken so far."""

    def __init__(self, columns: list[int]) -> None:
        self.columns = columns
        self.rows = np.zeros((64, len(columns)), dtype=np.int32)
        self.taken = np.zeros(64, dtype=np.int64)
        self.count = 0

    def append(self, taken: int, clock: Clock) -> None:
        """Add the next op of the lane."""
        if self.count + 1 >= len(self.taken):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self.taken = np.concatenate([self.taken, np.zeros_like(self.taken)])
        self.count += 1
        self.rows[self.count] = clock[self.columns]
        self.taken[self.count] = self.taken[self.count - 1] + taken

    def total(self) -> int:
        """Bytes taken by all ops so far."""
        return int(self.taken[self.count])

    def clocks(self, forced: int) -> Clock:
        """Clocks of the states in which the first `forced`, forced + 1, ... ops have started."""
        return self.rows[forced : self.count + 1]

    def totals(self, forced: int) -> NDArray[np.int64]:
        """Bytes taken in those states."""
        return self.taken[forced : self.count + 1]

    def positions(self, forced: int) -> NDArray[np.int64]:
        """Ops that have completed in those states: all that have started but the last, and all forced ones."""
        return np.maximum(np.arange(forced, self.count + 1) - 1, forced)
