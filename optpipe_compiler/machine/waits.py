"""Waits of a planned order: each op gets those it needs and no more (lower/waits.py says why they are enough).

An op needs them for its data, and, when it takes memory, for enough frees of other lanes that no execution can pass the
planned peak. What is already certain when an op starts is known from vector clocks: how far each chain of events (a
device's lanes, a pair's messages) must have come. tests/every_wait.py is the definition in plain Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optpipe_compiler.machine.compiled import compiled, entry, misses, views
from optpipe_compiler.machine.state import NONE, Ints

if TYPE_CHECKING:
    from numpy.typing import NDArray


ON_DEVICE, ON_HOST = range(2)
COMPUTE_LANE, RELOAD_LANE = range(2)
"""The lanes of a device on which memory of the device is taken."""
BASE, CERTAIN, MERGED, TRIED, FREED, WAITS, CHOSEN = range(7)
"""Rows of `scratch`: clocks on a device's chains; bytes that these have given back; lists of nodes."""
SCRATCH = 7


class Waiting(NamedTuple):
    """All nodes in planned order with their chains, and what the sweep knows of every device.

    Axes: n nodes, c chains, d devices; k is a chain of a device, places of these are device after device.
    """

    order: Ints
    before: Ints
    """[n, 3] what comes before a node without waits, NONE where there is less."""
    data: Ints
    """[n] the op of another lane whose result it reads, NONE: there is none."""
    chain: Ints
    position: Ints
    device: Ints
    taken: Ints
    """[n, 2] bytes from its start on, on the device and on the host."""
    is_lane: Ints
    """[c] whether the chain is a lane, no pair of devices."""
    turns: Ints
    """Turns of `order` at which nodes that free memory have completed, ascending; the last is never reached."""
    frees: Ints
    """These nodes."""
    clocks: NDArray[np.int32]
    """[n, c] how many events of the chain have completed whenever the node has."""
    firsts: Ints
    """[d + 1] the place of a device's first chain."""
    chains: Ints
    """[k] its number."""
    places: Ints
    """[d, c] the other way round: the chain's place after the device's first, NONE where it does not touch it."""
    givens: Ints
    """[k] where `given` begins for a chain: bytes that its first 0, 1, ... events give back to the device."""
    given: Ints
    freeing: Ints
    """[k + 1] where the nodes of a chain that free memory of the device begin in `freers`."""
    freers: Ints
    latest: Ints
    """[k] the last node in the chain's order that has freed memory of the device, NONE before there is one."""
    seen: Ints
    """[k] the places, after the first, of those chains that have freed any, those first that did so first."""
    seen_count: Ints
    peaks: Ints
    """[d, 2] bytes that may be held, on the device and on the host."""
    held: Ints
    """[d] bytes of offloads that have started, reloaded or not."""
    returned: Ints
    """Host bytes that the first 0, 1, ... reloads of a device give back, from `returns` on."""
    returns: Ints
    lanes: Ints
    """[d, 2] places, after the first, of the lanes that take memory, NONE where nothing is on one."""
    counts: Ints
    """[d, 2] how many nodes that take memory have started on such a lane."""
    takers: Ints
    """How many of the lane's first 0, 1, ... nodes take memory, from `takings[d, lane, 0]` on."""
    totals: Ints
    """Bytes taken by the first 0, 1, ... nodes that take any, from `takings[d, lane, 1]` on."""
    given_then: Ints
    """Bytes that each chain had given back when they started, from `takings[d, lane, 2]` on."""
    takings: Ints
    waits: Ints
    """The waits of all nodes."""
    spans: Ints
    """[n, 2] where those of a node begin and end."""
    scratch: Ints


_DIMENSIONS = {"takings": 3} | dict.fromkeys(
    ("before", "taken", "places", "peaks", "lanes", "counts", "spans", "scratch"), 2
)
"""Of arrays that have more than one."""


def load() -> bool:
    """Get `find_waits` ready; return whether it had to be compiled, as it was not in the cache."""
    known = misses(find_waits)
    nothing: Any = {name: np.zeros((0,) * _DIMENSIONS.get(name, 1), np.int64) for name in Waiting._fields}
    find_waits(Waiting(**nothing | {"clocks": np.zeros((0, 0), np.int32)}))
    return misses(find_waits) > known


@entry
def find_waits(x: Waiting) -> int:
    """Give every node its clock and its waits; return how many there are in all."""
    x = views(x)
    completed = count = 0
    for turn in range(x.order.shape[0]):
        node = x.order[turn]
        while x.turns[completed] <= turn:
            _free(x, x.frees[completed])
            completed += 1
        clock, chain = x.clocks[node], x.chain[node]
        for place in range(3):
            if x.before[node, place] != NONE:
                _join(clock, x.clocks[x.before[node, place]])
        x.spans[node, 0] = count
        if x.is_lane[chain]:
            waits = x.scratch[WAITS]
            for index in range(_choose(x, node)):
                _join(clock, x.clocks[waits[index]])
                x.waits[count] = waits[index]
                count += 1
            _start(x, node)
        x.spans[node, 1] = count
        clock[chain] = x.position[node] + 1
    return count


@compiled
def _join(clock: NDArray[np.int32], other: NDArray[np.int32]) -> None:
    """Let a clock be as far as another one everywhere."""
    for chain in range(clock.shape[0]):
        if clock[chain] < other[chain]:
            clock[chain] = other[chain]


@compiled
def _free(x: Waiting, node: int) -> None:
    """A node that frees memory has completed; a small message may arrive before a large one that was sent earlier."""
    d = x.device[node]
    place = x.places[d, x.chain[node]]
    latest = x.latest[x.firsts[d] + place]
    if latest == NONE:
        x.seen[x.firsts[d] + x.seen_count[d]] = place
        x.seen_count[d] += 1
    if latest == NONE or x.position[latest] < x.position[node]:
        x.latest[x.firsts[d] + place] = node


@compiled
def _lane(x: Waiting, d: int, node: int) -> int:
    """Return on which lane a node takes memory of its device."""
    return COMPUTE_LANE if x.places[d, x.chain[node]] == x.lanes[d, COMPUTE_LANE] else RELOAD_LANE


@compiled
def _start(x: Waiting, node: int) -> None:
    """A node starts on a lane, with its clock."""
    d = x.device[node]
    x.held[d] += x.taken[node, ON_HOST]
    if x.taken[node, ON_DEVICE] == 0:
        return
    first, width = x.firsts[d], x.firsts[d + 1] - x.firsts[d]
    lane = _lane(x, d, node)
    totals = x.takings[d, lane, 1] + x.counts[d, lane]
    x.totals[totals + 1] = x.totals[totals] + x.taken[node, ON_DEVICE]
    x.counts[d, lane] += 1
    if x.lanes[d, COMPUTE_LANE + RELOAD_LANE - lane] != NONE:
        row = x.takings[d, lane, 2] + x.counts[d, lane] * width
        for k in range(width):
            x.given_then[row + k] = x.given[x.givens[first + k] + x.clocks[node, x.chains[first + k]]]


@compiled
def _choose(x: Waiting, node: int) -> int:
    """Put into `scratch[WAITS]` the fewest waits that keep data and memory right for a node; return how many."""
    data, d = x.data[node], x.device[node]
    takes = x.taken[node, ON_DEVICE] > 0 or x.taken[node, ON_HOST] > 0
    if data == NONE and not takes:
        return 0
    base, certain, merged, waits = x.scratch[BASE], x.scratch[CERTAIN], x.scratch[MERGED], x.scratch[WAITS]
    for k in range(x.firsts[d + 1] - x.firsts[d]):
        base[k] = x.clocks[node, x.chains[x.firsts[d] + k]]
    count = needed = 0 if data == NONE else 1
    if needed:
        waits[0] = data
    _merge(x, d, base, WAITS, count, NONE, certain)
    is_short = takes and not _enough(x, node, certain)
    if is_short:
        for index in range(_memory_waits(x, node)):
            wait = x.scratch[CHOSEN, index]
            if needed == 0 or wait != data:
                waits[count] = wait
                count += 1
    candidate = 0
    while candidate < count:
        is_first = count - 1 == needed and (needed == 0 or (waits[0] == data and candidate == 1))
        is_enough = False
        if not (is_short and is_first):  # of which it is known that it is not enough
            _merge(x, d, base, WAITS, count, candidate, merged)
            is_enough = (data == NONE or _implies(x, d, merged, data)) and _enough(x, node, merged)
        if is_enough:
            count -= 1
            for index in range(candidate, count):
                waits[index] = waits[index + 1]
        else:
            candidate += 1
    _sort(x, count)
    return count


@compiled
def _sort(x: Waiting, count: int) -> None:
    """Sort the first nodes of `scratch[WAITS]` by chain and position."""
    waits = x.scratch[WAITS]
    for index in range(1, count):
        node, place = waits[index], index
        while place > 0 and (
            x.chain[waits[place - 1]] > x.chain[node]
            or (x.chain[waits[place - 1]] == x.chain[node] and x.position[waits[place - 1]] > x.position[node])
        ):
            waits[place] = waits[place - 1]
            place -= 1
        waits[place] = node


@compiled
def _memory_waits(x: Waiting, node: int) -> int:
    """Put into `scratch[CHOSEN]` the earliest frees of each other lane that suffice; return how many.

    Lanes that are cheap to wait for come last. `scratch[CERTAIN]` alone is not enough.
    """
    d = x.device[node]
    certain, merged, chosen = x.scratch[CERTAIN], x.scratch[MERGED], x.scratch[CHOSEN]
    count = 0
    for index in range(x.seen_count[d]):
        place = x.seen[x.firsts[d] + index]
        last = x.latest[x.firsts[d] + place]
        if x.chains[x.firsts[d] + place] != x.chain[node] and not _implies(x, d, certain, last):
            chosen[count] = last
            count += 1
    for _ in range(count):
        candidate = chosen[0]
        count -= 1
        for index in range(count):
            chosen[index] = chosen[index + 1]
        _merge(x, d, certain, CHOSEN, count, NONE, merged)
        if count == 0 or not _enough(x, node, merged):
            chosen[count] = _earliest(x, node, candidate)
            count += 1
    return count


@compiled
def _earliest(x: Waiting, node: int, last: int) -> int:
    """Bisect for the earliest event of a chain up to `last` that with `scratch[MERGED]` is enough."""
    d, merged, tried = x.device[node], x.scratch[MERGED], x.scratch[TRIED]
    place, first = x.places[d, x.chain[last]], x.firsts[d]
    begin, end = x.freeing[first + place], x.freeing[first + place + 1]
    low, high = _first(x, begin, end, merged[place]), _first(x, begin, end, x.position[last])
    while low < high:
        middle = (low + high) // 2
        for k in range(x.firsts[d + 1] - first):
            tried[k] = max(merged[k], x.clocks[x.freers[middle], x.chains[first + k]])
        if _enough(x, node, tried):
            high = middle
        else:
            low = middle + 1
    earliest: int = x.freers[low]
    return earliest


@compiled
def _first(x: Waiting, begin: int, end: int, position: int) -> int:
    """Return the place in `freers`, from begin to end, of the first node that is not before a position."""
    while begin < end:
        middle = (begin + end) // 2
        if x.position[x.freers[middle]] < position:
            begin = middle + 1
        else:
            end = middle
    return begin


@compiled
def _merge(x: Waiting, d: int, base: Ints, nodes: int, count: int, left_out: int, merged: Ints) -> None:
    """Put into `merged` what is certain where `base` is and the first nodes of a list, but one, have completed."""
    first, width = x.firsts[d], x.firsts[d + 1] - x.firsts[d]
    for k in range(width):
        merged[k] = base[k]
    for index in range(count):
        if index != left_out:
            node = x.scratch[nodes, index]
            for k in range(width):
                merged[k] = max(merged[k], x.clocks[node, x.chains[first + k]])


@compiled
def _implies(x: Waiting, d: int, clock: Ints, node: int) -> bool:
    """Whether a clock on the device's chains says that the node has completed."""
    done: bool = clock[x.places[d, x.chain[node]]] > x.position[node]
    return done


@compiled
def _enough(x: Waiting, node: int, clock: Ints) -> bool:
    """Whether no state in which `node` is the last start in planned order exceeds the planned peaks."""
    d = x.device[node]
    if x.taken[node, ON_HOST]:
        back = 0 if x.lanes[d, RELOAD_LANE] == NONE else clock[x.lanes[d, RELOAD_LANE]]
        fits: bool = x.held[d] + x.taken[node, ON_HOST] - x.returned[x.returns[d] + back] <= x.peaks[d, ON_HOST]
        return fits
    return x.taken[node, ON_DEVICE] == 0 or _fits(x, d, node, clock)


@compiled
def _fits(x: Waiting, d: int, node: int, clock: Ints) -> bool:
    """Whether there is room for a node that starts with a clock, whatever has started on the other lane.

    That is what the clock implies, or that and some of the later starts, each with its own clock.
    """
    first, width, freed = x.firsts[d], x.firsts[d + 1] - x.firsts[d], x.scratch[FREED]
    total = 0
    for k in range(width):
        freed[k] = x.given[x.givens[first + k] + clock[k]]
        total += freed[k]
    lane = _lane(x, d, node)
    other = COMPUTE_LANE + RELOAD_LANE - lane
    started = x.totals[x.takings[d, lane, 1] + x.counts[d, lane]]
    room: int = x.peaks[d, ON_DEVICE] - x.taken[node, ON_DEVICE] - started
    if x.lanes[d, other] == NONE:
        return -total <= room
    implied = x.takers[x.takings[d, other, 0] + clock[x.lanes[d, other]]]
    totals, rows = x.takings[d, other, 1], x.takings[d, other, 2]
    if x.totals[totals + implied] - total > room:
        return False
    for later in range(implied + 1, x.counts[d, other] + 1):
        held = x.totals[totals + later]
        for k in range(width):
            held -= max(x.given_then[rows + later * width + k], freed[k])
        if held > room:
            return False
    return True
