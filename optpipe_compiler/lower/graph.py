"""The partial order of a schedule: nodes for ops, message halves and deliveries, with their unconditional edges.

Every op has a place in one total order (planned end, then planned order). A receive is issued before the first op of
its device that stands later in it than the message's producer. Both devices of a pair therefore list their messages in
the same order, whichever way they flow.

Nodes are numbers: first the ops as `Schedule.columns` has them, then of all messages the sends, the receives and the
deliveries. A chain is a sequence of nodes that happen in a fixed order: a lane of a device, or the messages of a pair.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_compiler.model.memory import op_memory
from optpipe_compiler.model.schedule import NONE, Ints, Kind, Schedule, classes, figures

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem

COMPUTE, D2H, H2D, PAIR = range(4)
"""What a chain is."""
LANES = (COMPUTE, D2H, H2D)
SEND_ACTIVATION, SEND_GRADIENT, RECV_ACTIVATION, RECV_GRADIENT = range(7, 11)
"""Kinds of nodes beside those of ops; a delivery is of the kind of its send."""
_LANE = np.array([COMPUTE] * 5 + [D2H, H2D])
"""By kind of op."""
_STEP = np.array([1, -1, 0, -1, 0, 0, 0])
"""By kind of op, from its stage to the one that its result goes to; 0: to none."""


class Nodes(NamedTuple):
    """All nodes, an entry of each array for each."""

    kind: Ints
    stage: Ints
    unit: Ints
    """Microbatch, or slice of one (Problem)."""
    device: Ints
    """Whose lane it is on, and whose memory it changes: for a delivery, the sender."""
    peer: Ints
    """The other device of a message."""
    start: Ints
    end: Ints
    taken: Ints
    """Bytes on the device from the start on; `given`: freed at the end; likewise on the host."""
    given: Ints
    host_taken: Ints
    host_given: Ints


class Chain(NamedTuple):
    """What a chain is, and whose: the device of a lane (and 0), the devices of a pair (the lower first)."""

    what: int
    device: int
    other: int

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that it touches."""
        return (self.device, self.other) if self.what == PAIR else (self.device,)


class Graph:
    """All nodes with their chains and unconditional predecessors: lane order, messages, hand-overs."""

    def __init__(self, schedule: Schedule) -> None:
        problem, ops = schedule.problem, schedule.columns
        owner = np.array(problem.device_of)
        count, device = len(ops.kind), owner[ops.stage]
        sequence = _inverse(schedule.rows)
        by_end = np.lexsort((sequence, ops.end))
        place = _inverse(by_end)
        target = ops.stage + _STEP[ops.kind]
        sends = (target != ops.stage) & (target >= 0) & (target < len(owner))
        sends[sends] = owner[target[sends]] != device[sends]
        producers = by_end[sends[by_end]]
        messages, targets = np.arange(len(producers)), target[producers]

        on_compute = np.flatnonzero(_LANE[ops.kind] == COMPUTE)
        lanes = on_compute[np.lexsort((sequence[on_compute], device[on_compute]))]
        """The ops of all compute lanes, device by device."""
        index = sequence.copy()
        index[lanes] = np.arange(len(lanes))
        """Of an op of a compute lane in `lanes`; of a transfer in the planned order."""
        gaps = np.searchsorted(device[lanes] * count + place[lanes], owner[targets] * count + place[producers])
        """Of a receive: the op in `lanes` before which it is issued."""
        issued = np.minimum(ops.start[lanes[gaps]], ops.end[producers])

        self.problem = problem
        self.ops, self.messages = count, len(producers)
        self.nodes = _nodes(problem, schedule, producers, targets, issued)
        what = np.concatenate([_LANE[ops.kind], np.full(2 * len(messages), COMPUTE), np.full(len(messages), PAIR)])
        at = np.concatenate([index, index[producers] + 1, gaps, messages])
        is_op = np.arange(len(what)) < count
        message = np.concatenate([np.zeros(count, np.int64), messages, messages, messages])
        self.chains, self.chain = _chains(self.nodes, what, problem.devices)
        """All chains that have nodes, lane by lane and device by device; and the number of each node's."""
        along = np.lexsort((message, is_op, at, self.chain))
        lengths = np.bincount(self.chain, minlength=len(self.chains))
        begins = np.cumsum(lengths) - lengths
        self.along = np.split(along, begins[1:])
        """The nodes of each chain in order."""
        self.position = _inverse(along) - begins[self.chain]

        number = np.full(schedule.ticks.shape, NONE, np.int64)
        number[ops.kind, ops.stage, ops.microbatch] = np.arange(count)
        previous = np.full(len(what), NONE, np.int64)
        previous[along[1:]] = np.where(self.position[along[1:]] > 0, along[:-1], NONE)
        self.before = np.full((len(what), 3), NONE, np.int64)
        """[node, 3] its predecessors, NONE where there are fewer."""
        self.before[:, 0] = previous
        self._add_messages(number)
        self.data = np.full(len(what), NONE, np.int64)
        """By node, the op of another lane of its device whose result it reads; NONE: there is none."""
        for kind, source in ((Kind.D, Kind.F), (Kind.H, Kind.D), (Kind.I, Kind.H), (Kind.B, Kind.H)):
            which = np.flatnonzero(ops.kind == kind)
            self.data[which] = number[source, ops.stage[which], ops.microbatch[which]]

    def _add_messages(self, number: Ints) -> None:
        """A delivery comes after both halves, and what reads the message after the delivery."""
        sends = np.arange(self.ops, self.ops + self.messages)
        receives, deliveries = sends + self.messages, sends + 2 * self.messages
        self.before[deliveries, 1], self.before[deliveries, 2] = sends, receives
        kind, stage, unit = (column[receives] for column in self.nodes[:3])
        split = number[Kind.I, stage, unit]
        gradient = np.where(split == NONE, number[Kind.B, stage, unit], split)
        readers = np.where(kind == RECV_ACTIVATION, number[Kind.F, stage, unit], gradient)
        self.before[readers, 1] = deliveries

    def lane(self, what: int, device: int) -> Ints:
        """Return the nodes of one lane in order."""
        chain = Chain(what, device, 0)
        return self.along[self.chains.index(chain)] if chain in self.chains else np.empty(0, np.int64)

    def order(self) -> Ints:
        """Return all nodes in planned order, predecessors first."""
        nodes = self.nodes
        by_time = np.lexsort((self.position, self.chain, nodes.end, nodes.start))
        rank = _inverse(by_time)
        needed = np.concatenate([self.before, self.data[:, None]], axis=1)
        later, column = np.nonzero(needed != NONE)
        earlier, later = rank[needed[later, column]], rank[later]
        wrong = earlier > later
        if wrong.any():  # some op takes no time, or a message overtakes another: sorted anew is what these stretch over
            first, last = (np.bincount(ends[wrong], minlength=len(rank)) for ends in (later, earlier))
            goes_on = np.cumsum(first - last) > 0
            among = goes_on | np.append(False, goes_on[:-1])
            place, inside, some = np.cumsum(among) - 1, among[earlier] & among[later], by_time[among]
            by_time[among] = some[_sorted(place[earlier[inside]], place[later[inside]], len(some))]
        return by_time


def _sorted(earlier: Ints, later: Ints, count: int) -> Ints:
    """Return the numbers below `count`, each as soon as all its `earlier` ones are there, the least first."""
    missing = np.bincount(later, minlength=count).tolist()
    followers = later[np.argsort(earlier, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(earlier, minlength=count)).tolist()
    heap = [number for number in range(count) if not missing[number]]
    result: list[int] = []
    while heap:
        number = heapq.heappop(heap)
        result.append(number)
        for follower in followers[ends[number - 1] if number else 0 : ends[number]]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(heap, follower)
    assert len(result) == count, "the planned order waits for itself"
    return np.array(result, np.int64)


def _nodes(problem: Problem, schedule: Schedule, producers: Ints, targets: Ints, issued: Ints) -> Nodes:
    """Return all nodes; `producers` are the ops that make messages, in order, `targets` the stages that these go to."""
    ops, owner = schedule.columns, np.array(problem.device_of)
    number, none, no_op = classes(problem), np.zeros(len(producers), np.int64), np.full(len(ops.kind), NONE)

    def each(name: str) -> Ints:
        """Figures of the messages' stages."""
        return figures(problem, name)[stage, number[unit]]

    stage, unit, now = ops.stage[producers], ops.microbatch[producers], ops.end[producers]
    is_gradient = targets < stage
    arrival = now + np.where(is_gradient, each("send_gradient"), each("send_activation"))
    size = np.where(is_gradient, each("incoming"), each("outgoing"))
    source, device = owner[stage], owner[targets]
    recomputed = schedule.ticks[Kind.R, ops.stage, ops.microbatch] != NONE
    taken, given = _memory(problem)[recomputed.astype(np.int64), ops.kind, ops.stage, number[ops.microbatch]].T
    moves = ops.kind >= Kind.D
    kind = is_gradient + SEND_ACTIVATION
    return Nodes(
        kind=np.concatenate([ops.kind, kind, is_gradient + RECV_ACTIVATION, kind]),
        stage=np.concatenate([ops.stage, stage, targets, stage]),
        unit=np.concatenate([ops.microbatch, unit, unit, unit]),
        device=np.concatenate([owner[ops.stage], source, device, source]),
        peer=np.concatenate([no_op, device, source, device]),
        start=np.concatenate([ops.start, now, issued, arrival]),
        end=np.concatenate([ops.end, now, issued, arrival]),
        taken=np.concatenate([taken, none, size, none]),
        given=np.concatenate([given, none, none, size]),
        host_taken=np.concatenate([given * moves, none, none, none]),
        host_given=np.concatenate([taken * moves, none, none, none]),
    )


def _memory(problem: Problem) -> Ints:
    """Return [whether recomputed, kind, stage, class of units, 2] what an op takes and gives back."""
    stages = range(len(problem.stages))
    return np.array(
        [
            [[[op_memory(one[s], kind, again) for one in problem.by_class] for s in stages] for kind in Kind]
            for again in (False, True)
        ]
    )


def _chains(nodes: Nodes, what: Ints, devices: int) -> tuple[list[Chain], Ints]:
    """Return all chains, sorted, and the number of each node's."""
    is_pair = what == PAIR
    first = np.where(is_pair, np.minimum(nodes.device, nodes.peer), nodes.device)
    other = np.where(is_pair, np.maximum(nodes.device, nodes.peer), 0)
    codes, chain = np.unique((what * devices + first) * devices + other, return_inverse=True)
    rest, others = np.divmod(codes, devices)
    rows = np.stack([*np.divmod(rest, devices), others], axis=1).tolist()
    return [Chain(*row) for row in rows], chain


def _inverse(order: Ints) -> Ints:
    """Return where each number stands in `order`."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place
