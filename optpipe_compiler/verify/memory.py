"""The memory rule: the most that a device, and its share of the host, can hold in any execution.

The state of an execution is a set of events closed under happens-before. All allocations of a device lie on two
chains: the starts of its compute lane and of its h2d lane. Let c and h be the last of these starts in a closed set: the
least closed set that holds c and h has the same allocations, and no more frees. So the maximum over all closed sets is
the maximum over the pairs (c, h), each allowed to be absent, of the sum over the least closed set of both; on every
chain that set reaches to the later of the two clocks. Bytes on the host are allocated on the d2h lane alone, so there
the single starts are enough. (No allocation is negative and no completion allocates: the rules on tables see to it.)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from optpipe_compiler.documents import ir
from optpipe_compiler.verify.pairs import best_pair
from optpipe_compiler.verify.placed import NONE
from optpipe_compiler.verify.report import Violation
from optpipe_compiler.verify.sizes import Sizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe_compiler.verify.causality import Causality, Clocks, Events
    from optpipe_compiler.verify.placed import Ints, Lane, PlacedOps, Unit

Numbers = npt.NDArray[Any]


class Table:
    """The memory table of docs/IR.md: bytes that an op adds when it starts and when it has completed."""

    def __init__(self, placed: PlacedOps) -> None:
        self._placed = placed
        self.sizes = Sizes(placed)
        self.dropped: dict[tuple[int, Unit], int] = defaultdict(int)
        """What the recomputed ranges of a stage and unit give up after their forward."""
        for place in placed.of("recompute"):
            assert isinstance(place.op, ir.Recompute)
            self.dropped[place.stage, place.unit] += self.sizes.of(place.op).given_up(place.op.layers)

    def on_device(self, op: ir.Op) -> tuple[int, int]:
        """Return the bytes on the device that `op` adds at its start and at its end (frees are negative)."""
        sizes = self.sizes.of(op)
        match op:
            case ir.RecvActivation():
                return sizes.input, 0
            case ir.RecvGradient():
                return sizes.output, 0
            case ir.SendActivation():
                return 0, -sizes.output
            case ir.SendGradient():
                return 0, -sizes.input
            case ir.Forward():
                taken = sizes.all_saved + sizes.output + sizes.forward
                return taken, -sizes.forward - sizes.input - self.dropped.get((op.stage, op.unit), 0)
            case ir.Offload():
                return 0, -sizes.moved(op.layers)
            case ir.Reload():
                return sizes.moved(op.layers), 0
            case ir.Recompute():
                transient = sizes.forward_of(op.layers)
                return sizes.given_up(op.layers) + transient, -transient
            case ir.BackwardInput():
                freed = sizes.all_saved + sizes.captured - sizes.residue + sizes.gradient
                taken = sizes.input + sizes.captured + sizes.backward_input + sizes.accumulators
                return taken, -sizes.backward_input - sizes.output - freed
            case ir.BackwardWeight():
                return sizes.backward_weight, -sizes.backward_weight - sizes.residue
            case ir.Backward():
                taken = sizes.input + sizes.backward + sizes.accumulators
                return taken, -sizes.backward - sizes.output - sizes.gradient - sizes.all_saved
        raise AssertionError(f"an op without an entry in the memory table: {op.name}")

    def weights(self, events: Events) -> tuple[_Weights, _Weights]:
        """Return what events add on the device, and on the host; of a complete schedule."""
        placed = self._placed
        ops, copies = np.arange(len(placed.places)), placed.numbers("offload", "reload")
        told_apart, amounts = placed.layers.copy(), dict[int, int]()
        """By op, what its bytes depend on beside what `alike` asks for: of forwards, how much they give up."""
        stages = np.array([stage for stage, _ in self.dropped], np.int64)
        units = np.array([placed.unit_number(unit) for _, unit in self.dropped], np.int64)
        numbers = [amounts.setdefault(dropped, 1 + len(amounts)) for dropped in self.dropped.values()]
        told_apart[placed.find("forward", stages, units)] = numbers
        groups, group = placed.alike(ops, told_apart)
        on_device = _Weights(placed, events, ops, [self.on_device(place.op) for place in groups], group)
        groups, group = placed.alike(copies, told_apart[copies])
        return on_device, _Weights(placed, events, copies, [self.on_host(place.op) for place in groups], group)

    def on_host(self, op: ir.Op) -> tuple[int, int]:
        """Return the bytes on the host that `op` adds at its start and at its end."""
        match op:
            case ir.Offload():
                return self.sizes.of(op).moved(op.layers), 0
            case ir.Reload():
                return 0, -self.sizes.of(op).moved(op.layers)
        return 0, 0


class _Weights:
    """The bytes that each event adds, on the one device whose memory it changes: for a message the sender's.

    `changes` are the bytes that groups of `ops` (PlacedOps.alike) add at their start and at their end.
    """

    def __init__(
        self, placed: PlacedOps, events: Events, ops: Ints, changes: Sequence[tuple[int, int]], group: Ints
    ) -> None:
        counts = np.bincount(group, minlength=len(changes)).tolist()
        most = sum(count * sum(map(abs, added)) for count, added in zip(counts, changes, strict=True))
        self._weights: Numbers = np.zeros(events.count, np.int64 if most < 2**62 else object)
        self._device = np.full(events.count, NONE)
        for moments, place in ((events.start, 0), (events.done, 1)):
            weights: Numbers = np.array([added[place] for added in changes], self._weights.dtype)[group]
            changing = weights != 0
            at, device = moments[ops[changing]], placed.columns.device[ops[changing]]
            self._weights[at], self._device[at] = weights[changing], device

    def of(self, device: int, begin: int, end: int) -> Numbers:
        """Return what the events [begin, end) add on a device."""
        found: Numbers = np.where(self._device[begin:end] == device, self._weights[begin:end], 0)
        return found


@dataclass(frozen=True)
class Worst:
    """The most that can be held, and the ops that have just started then."""

    held: int
    ops: tuple[str, ...]


class Memory:
    """The bytes that every event adds, on its device and on the host, ready to be summed over closed sets."""

    def __init__(self, placed: PlacedOps, causality: Causality) -> None:
        self.placed = placed
        self.events = causality.events
        self._number = causality.number
        self._always = [placed.schedule.setup.reserve_bytes] * len(placed.schedule.devices)
        for stage in placed.stages:
            self._always[stage.device] += stage.static_bytes
        table = Table(placed)
        device, host = table.weights(self.events)
        chains_of: dict[int, list[int]] = defaultdict(list)
        for number, chain in enumerate(self.events.chains):
            for end_of_chain in {chain[0], *(chain[1:] if isinstance(chain[1], int) else ())}:
                chains_of[end_of_chain].append(number)
        count = range(len(self._always))
        self._device = [self._sums(number, chains_of[number], device) for number in count]
        self._host = [self._sums(number, chains_of[number], host) for number in count]
        self._clocks = self._rows(causality)

    def _sums(self, device: int, chains: list[int], weights: _Weights) -> dict[int, Numbers]:
        """Return, per chain that `device` is on, the sum of its first n events for every n; the lanes come first."""
        begins = self.events.begins.tolist()
        added = [(chain, weights.of(device, begins[chain], begins[chain + 1])) for chain in chains]
        return {
            chain: np.concatenate([[0], np.cumsum(ones)])
            for chain, ones in added
            if ones.any() or isinstance(self.events.chains[chain][1], str)
        }

    def _rows(self, causality: Causality) -> dict[tuple[int, Lane], Clocks]:
        """Return the clocks of the starts of each lane, on the chains whose sums are asked for, under a row of zeros,
        which stands for no start at all."""
        lanes = [(key, places) for key, places in self.placed.lanes.items() if places]
        sums = {"compute": self._device, "d2h": self._host, "h2d": self._device}
        wanted = [
            (self.events.start[places[0].number : places[-1].number + 1], list(sums[lane][device]))
            for (device, lane), places in lanes
        ]
        found = causality.clocks(wanted)
        none = [np.zeros((1, clocks.shape[1]), np.int32) for clocks in found]
        return {key: np.concatenate(pair) for (key, _), *pair in zip(lanes, none, found, strict=True)}

    def worst_on_device(self, device: int) -> Worst:
        """Return the maximum over all closed sets of what they hold on `device`, always-there bytes included.

        Memory is taken by starts on two lanes, so a maximum is the least set with some last start on each of them. Two
        starts of which one implies the other make no set that one of them does not make alone.
        """
        lanes: tuple[Lane, Lane] = ("compute", "h2d")
        sums = list(self._device[device].values())
        compute, reloads = (self._clocks.get((device, lane)) for lane in lanes)
        best = 0
        ops: tuple[str, ...] = ()
        for lane, clocks in zip(lanes, (compute, reloads), strict=True):
            if clocks is not None:
                held = _held(sums, clocks)
                index = int(np.argmax(held))
                if held[index] > best:
                    best, ops = int(held[index]), self._ops(device, (lane, index))
        if compute is not None and reloads is not None:
            chains = list(self._device[device])
            on_compute, on_reloads = (chains.index(self._number[device, lane]) for lane in lanes)
            low, high = _neither(compute, reloads, on_compute, on_reloads)
            pair = best_pair(sums, compute, reloads, low, high)
            if pair is not None and pair.held > best:
                best, ops = pair.held, self._ops(device, ("compute", pair.first), ("h2d", pair.other))
        return Worst(self._always[device] + best, ops)

    def worst_on_host(self, device: int) -> Worst:
        """Return the maximum over all closed sets of what the offloads of `device` hold on the host."""
        clocks = self._clocks.get((device, "d2h"))
        if clocks is None:
            return Worst(0, ())
        held = _held(list(self._host[device].values()), clocks)
        index = int(np.argmax(held))
        return Worst(int(held[index]), self._ops(device, ("d2h", index)))

    def _ops(self, device: int, *rows: tuple[Lane, int]) -> tuple[str, ...]:
        """Return the ops that start in these rows; the first row of a lane is no start."""
        return tuple(self.placed.lanes[device, lane][row - 1].id for lane, row in rows if row)


def _held(sums: Sequence[Numbers], clocks: Clocks) -> Numbers:
    """Return what the closed sets with these clocks hold, one number per row."""
    held: Numbers = np.zeros(len(clocks), np.int64)
    for column, sums_of_chain in enumerate(sums):
        held = held + sums_of_chain[clocks[:, column]]
    return held


def _neither(compute: Clocks, reloads: Clocks, on_compute: int, on_reloads: int) -> tuple[Numbers, Numbers]:
    """Return, for each start of the h2d lane, which rows `[low, high)` of the compute lane it does not imply and that
    do not imply it; both change only one way along their lanes. The last two are the columns of the lanes."""
    low = np.searchsorted(compute[:, on_compute], reloads[:, on_compute], side="right")
    high = np.searchsorted(compute[:, on_reloads], reloads[:, on_reloads], side="left")
    return low, high


def memory(placed: PlacedOps, causality: Causality) -> Iterator[Violation]:
    """In every execution and at every moment device d holds at most peak_bytes, and on the host at most host_bytes."""
    state = Memory(placed, causality)
    for number, device in enumerate(placed.schedule.devices):
        for rule, worst, promised, name in (
            ("device-memory", state.worst_on_device(number), device.peak_bytes, "peak_bytes"),
            ("host-memory", state.worst_on_host(number), device.host_bytes, "host_bytes"),
        ):
            if worst.held > promised:
                yield _exceeds(placed, number, rule, worst, f"{name} ({promised})", worst.held - promised)


def _exceeds(placed: PlacedOps, device: int, rule: str, worst: Worst, promise: str, excess: int) -> Violation:
    where = "on the host" if rule == "host-memory" else "at once"
    moment = f", when {' and '.join(worst.ops)} start as early as order and waits allow" if worst.ops else ""
    message = f"device {device} can hold {worst.held} bytes {where}, {excess} more than {promise}{moment}"
    if not worst.ops:
        return Violation(rule, message, device)
    return placed.by_id[worst.ops[0]].breaks(rule, message, *worst.ops[1:])
