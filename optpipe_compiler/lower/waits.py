"""Waits: each op gets those it needs and no more; the machine finds them in one sweep (machine/waits.py says how).

Why it is safe: let S be any reachable state and x the last of its allocations in planned order. All allocations of S
are planned no later than x, and x waited for frees until they all fit. So no execution exceeds the planned peak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler import machine
from optpipe_compiler.lower.graph import COMPUTE, H2D, LANES, PAIR, Chain, Graph
from optpipe_compiler.model.schedule import NONE, Ints

if TYPE_CHECKING:
    from optpipe_compiler.machine.waits import Waiting


def completions(graph: Graph, order: Ints) -> Ints:
    """Return by turn of `order` the first turn at which its node has completed by plan, and at all later ones.

    Where a message overtakes another one of its pair, a node may start earlier than those before it in `order`: only
    what ends before all later nodes start is over, as none may wait for what ends after its own start.
    """
    starts = np.minimum.accumulate(graph.nodes.start[order][::-1])[::-1]
    return np.maximum(np.arange(len(order)) + 1, np.searchsorted(starts, graph.nodes.end[order], side="left"))


def planned_peaks(graph: Graph, order: Ints) -> list[tuple[int, int]]:
    """Return per device the most bytes held by plan, on the device and, by its offloads, on the host."""
    nodes, turn, device = graph.nodes, np.arange(len(order)), graph.nodes.device[order]
    when = np.concatenate([2 * turn + 1, 2 * completions(graph, order)])  # at one turn memory is freed first
    owner = np.concatenate([device, device])
    changes = [
        np.concatenate([taken[order], -given[order]])
        for taken, given in ((nodes.taken, nodes.given), (nodes.host_taken, nodes.host_given))
    ]
    peaks = []
    for d in range(graph.problem.devices):
        mine = np.flatnonzero(owner == d)
        mine = mine[np.argsort(when[mine], kind="stable")]
        on_device, on_host = (int(np.cumsum(each[mine]).max(initial=0)) for each in changes)
        peaks.append((on_device, on_host))
    return peaks


class Waits:
    """The waits of all nodes, added device by device but in one planned order (clocks cross devices)."""

    def __init__(self, graph: Graph, order: Ints, peaks: list[tuple[int, int]]) -> None:
        self.graph = graph
        found = _waiting(graph, order, peaks)
        machine.waits.find_waits(found)
        self.clocks = found.clocks
        """[node, chain] how many events of the chain have completed whenever the node has."""
        waits = found.waits.tolist()
        having = np.flatnonzero(found.spans[:, 1] > found.spans[:, 0])
        spans = zip(having.tolist(), *found.spans[having].T.tolist(), strict=True)
        self.of: dict[int, list[int]] = {node: waits[begin:end] for node, begin, end in spans}
        """The waits of those nodes that have any."""

    def deliveries(self, device: int) -> list[tuple[int, list[int]]]:
        """By op of the device, its sends that are delivered when the op starts, each once per lane."""
        graph = self.graph
        found: dict[int, list[int]] = {}
        for lane in LANES:
            nodes = graph.lane(lane, device)
            known: list[tuple[int, int]] = []
            for number, chain in enumerate(graph.chains):
                if chain.what == PAIR and device in chain.devices:
                    reached = self.clocks[nodes, number]
                    mine = graph.along[number][graph.nodes.device[graph.along[number]] == device]
                    first = np.searchsorted(reached, graph.position[mine], side="right")
                    told = first < len(nodes)
                    known += zip(first[told].tolist(), mine[told].tolist(), strict=True)
            for first, delivery in sorted(known, key=lambda one: one[0]):
                found.setdefault(int(nodes[first]), []).append(delivery - graph.messages * 2)
        return list(found.items())


def _waiting(graph: Graph, order: Ints, peaks: list[tuple[int, int]]) -> Waiting:
    """Return what the machine goes through, before the first node."""
    nodes, devices, chains = graph.nodes, graph.problem.devices, range(len(graph.chains))
    local = [[c for c in chains if d in graph.chains[c].devices] for d in range(devices)]
    widths = np.array(list(map(len, local)), np.int64)
    places = np.full((devices, len(chains)), NONE, np.int64)
    given, freers = [], []
    """Of each chain of each device, in turn."""
    for d, numbers in enumerate(local):
        places[d, numbers] = np.arange(len(numbers))
        for number in numbers:
            along = graph.along[number]
            along_given = np.where(nodes.device[along] == d, nodes.given[along], 0)
            given.append(_sums(along_given))
            freers.append(along[(along_given > 0) | ((nodes.device[along] == d) & (nodes.host_given[along] > 0))])

    lanes = [[_place(graph, numbers, what, d) for what in (COMPUTE, H2D)] for d, numbers in enumerate(local)]
    takers = [_sums((nodes.taken[graph.lane(what, d)] > 0) * 1) for d in range(devices) for what in (COMPUTE, H2D)]
    totals = [one[-1] + 1 for one in takers]
    rows = [total * width for total, width in zip(totals, np.repeat(widths, 2), strict=True)]
    takings = np.stack([_begins(takers), _sums(totals)[:-1], _sums(rows)[:-1]], axis=1)
    returned = [_sums(nodes.host_given[graph.lane(H2D, d)]) for d in range(devices)]

    turns = completions(graph, order)
    frees = np.flatnonzero((nodes.given + nodes.host_given)[order] > 0)
    frees = frees[np.argsort(turns[frees], kind="stable")]
    taken = np.stack([nodes.taken, nodes.host_taken], axis=1)
    waiting = (graph.data != NONE) | (taken > 0).any(axis=1)
    return machine.waits.Waiting(
        order=order,
        before=graph.before,
        data=graph.data,
        chain=graph.chain,
        position=graph.position,
        device=nodes.device,
        taken=taken,
        is_lane=np.array([chain.what != PAIR for chain in graph.chains], np.int64),
        turns=np.append(turns[frees], len(order)),
        frees=np.append(order[frees], NONE),
        clocks=np.zeros((len(order), len(chains)), np.int32),
        firsts=_sums(widths),
        chains=np.array([c for numbers in local for c in numbers], np.int64),
        places=places,
        givens=_begins(given),
        given=_joined(given),
        freeing=_sums(list(map(len, freers))),
        freers=_joined(freers),
        latest=np.full(sum(widths), NONE, np.int64),
        seen=np.full(sum(widths), NONE, np.int64),
        seen_count=np.zeros(devices, np.int64),
        peaks=np.array(peaks, np.int64),
        held=np.zeros(devices, np.int64),
        returned=_joined(returned),
        returns=_begins(returned),
        lanes=np.array(lanes, np.int64),
        counts=np.zeros((devices, 2), np.int64),
        takers=_joined(takers),
        totals=np.zeros(sum(totals), np.int64),
        given_then=np.zeros(sum(rows), np.int64),
        takings=takings.reshape(devices, 2, 3),
        waits=np.full(int(widths[nodes.device[waiting]].sum()), NONE, np.int64),
        spans=np.zeros((len(order), 2), np.int64),
        scratch=np.zeros((machine.waits.SCRATCH, int(widths.max(initial=0)) + 1), np.int64),
    )


def _place(graph: Graph, local: list[int], what: int, device: int) -> int:
    """Return the place of a lane among the chains of its device, NONE where nothing is on it."""
    lane = Chain(what, device, 0)
    return local.index(graph.chains.index(lane)) if lane in graph.chains else NONE


def _joined(arrays: list[Ints]) -> Ints:
    return np.concatenate([*arrays, np.empty(0, np.int64)])


def _begins(arrays: list[Ints]) -> Ints:
    """Return where each of some arrays begins where one follows the other."""
    return _sums(list(map(len, arrays)))[:-1]


def _sums(numbers: Ints | list[int]) -> Ints:
    """Return the sums of the first 0, 1, ... of them."""
    return np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)])
