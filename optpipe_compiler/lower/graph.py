"""The partial order of a schedule: nodes for ops, message halves and deliveries, with their unconditional edges.

Every op has a place in one total order (planned end, then planned order). A receive is issued before the first op of
its device that stands later in it than the message's producer. Both devices of a pair therefore list their messages in
the same order, whichever way they flow.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optpipe_compiler.model.memory import op_memory
from optpipe_compiler.model.schedule import Kind, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from optpipe_compiler.documents import ir
    from optpipe_compiler.model.schedule import Schedule

Chain = tuple[str, int, int]
"""A sequence of events that happen in a fixed order: (lane, device, 0), or ("pair", device, device)."""


@dataclass(eq=False)
class Node:
    """One op of a lane, an issue of a message half, or the delivery of a message."""

    chain: Chain
    stage: int
    microbatch: int
    """Or unit (Problem)."""
    start: int
    end: int
    task: Task | None = None
    message: str = ""
    peer: int = -1
    layers: tuple[int, int] = (0, 0)
    """Of an op on saved activations: the layers whose they are."""
    taken: int = 0
    given: int = 0
    host_taken: int = 0
    host_given: int = 0
    position: int = -1
    before: list[Node] = field(default_factory=list)
    waits: list[Node] = field(default_factory=list)
    clock: NDArray[np.int32] | None = None
    """Per chain, how many of its events have completed whenever this one has."""


class Graph:
    """All nodes with their unconditional predecessors: lane order, messages, hand-overs."""

    def __init__(self, schedule: Schedule, stages: Sequence[ir.Stage]) -> None:
        self.schedule = schedule
        self.stages = stages
        self.problem = schedule.problem
        self.nodes: dict[Task, Node] = {}
        self.lanes: dict[Chain, list[Node]] = defaultdict(list)
        plan = schedule.plan
        for device, tasks in enumerate(plan.compute):
            self.lanes["compute", device, 0] = [self._task_node("compute", device, task) for task in tasks]
        for lane, links in (("d2h", plan.d2h), ("h2d", plan.h2d)):
            for tasks in links:
                for task in tasks:
                    device = self.problem.stages[task.stage].device
                    self.lanes[lane, device, 0].append(self._task_node(lane, device, task))
        self._add_messages()
        for nodes in self.lanes.values():
            for position, node in enumerate(nodes):
                node.position = position
                if position:
                    node.before.append(nodes[position - 1])

    def lane(self, name: str, device: int) -> list[Node]:
        """Return the nodes of one lane in order."""
        return self.lanes.get((name, device, 0), [])

    def _task_node(self, lane: str, device: int, task: Task) -> Node:
        start = self.schedule.starts[task]
        node = Node((lane, device, 0), task.stage, task.microbatch, start, self.schedule.end(task), task)
        recomputed = Task(Kind.R, task.stage, task.microbatch) in self.schedule.starts
        stage = self.problem.at(task.stage, task.microbatch)
        node.taken, node.given = op_memory(stage, task.kind, recomputed)
        begin, end = self.stages[task.stage].layers
        node.layers = begin, end
        if task.kind in (Kind.D, Kind.H):
            node.layers = begin, end - stage.staying_layers
            node.host_taken, node.host_given = node.given, node.taken
        self.nodes[task] = node
        return node

    def _add_messages(self) -> None:
        sequence = {task: number for number, task in enumerate(self.schedule.sequence)}
        producers = sorted(self.nodes, key=lambda task: (self.schedule.end(task), sequence[task]))
        rank = {task: number for number, task in enumerate(producers)}
        gaps: dict[tuple[int, int], list[tuple[int, Node]]] = defaultdict(list)
        lanes = self.schedule.plan.compute
        index = {task: number for lane in lanes for number, task in enumerate(lane)}
        ends = [[rank[task] for task in lane] for lane in lanes]
        for place, task in enumerate(producers):
            producer = self.nodes[task]
            for send, receive, delivery in self._message(producer):
                gaps[send.chain[1], index[task] + 1].append((place, send))
                target = receive.chain[1]
                gap = bisect_left(ends[target], place)
                follower = self.lane("compute", target)[gap]
                receive.start = receive.end = min(follower.start, producer.end)
                gaps[target, gap].append((place, receive))
                self._deliver(delivery, send, receive)
        for device in range(self.problem.devices):
            self._insert(device, gaps)

    def _message(self, producer: Node) -> Iterable[tuple[Node, Node, Node]]:
        """Yield (send, receive, delivery) of the message that this op produces, if it produces one."""
        task = producer.task
        assert task is not None
        step, what = (1, "activation") if task.kind is Kind.F else (-1, "gradient")
        target = task.stage + step
        if task.kind not in (Kind.F, Kind.I, Kind.B) or not 0 <= target < len(self.stages):
            return
        source_device, device = self.stages[task.stage].device, self.stages[target].device
        if source_device == device:
            return
        stage = self.problem.at(task.stage, task.microbatch)
        lag = stage.send_activation if step > 0 else stage.send_gradient
        size = stage.outgoing if step > 0 else stage.incoming
        now, arrival = producer.end, producer.end + lag
        send = Node(("compute", source_device, 0), task.stage, task.microbatch, now, now, None, f"send_{what}", device)
        receive = Node(("compute", device, 0), target, task.microbatch, now, now, None, f"recv_{what}", source_device)
        receive.taken = size
        pair = ("pair", min(source_device, device), max(source_device, device))
        delivery = Node(pair, task.stage, task.microbatch, arrival, arrival, None, f"send_{what}", source_device)
        delivery.given = size
        yield send, receive, delivery

    def _deliver(self, delivery: Node, send: Node, receive: Node) -> None:
        delivery.before += [send, receive]
        self.lanes[delivery.chain].append(delivery)
        kinds = (Kind.F,) if receive.message == "recv_activation" else (Kind.I, Kind.B)
        consumer = next(
            node for kind in kinds if (node := self.nodes.get(Task(kind, receive.stage, receive.microbatch)))
        )
        consumer.before.append(delivery)

    def _insert(self, device: int, gaps: dict[tuple[int, int], list[tuple[int, Node]]]) -> None:
        lane = self.lane("compute", device)
        merged: list[Node] = []
        for position in range(len(lane) + 1):
            merged += [node for _, node in sorted(gaps.get((device, position), []), key=lambda item: item[0])]
            merged += lane[position : position + 1]
        self.lanes["compute", device, 0] = merged

    def order(self) -> list[Node]:
        """Return all nodes in planned order, predecessors first."""
        followers: dict[int, list[Node]] = defaultdict(list)
        missing: dict[int, int] = {}
        everything = [node for nodes in self.lanes.values() for node in nodes]
        sequence = {id(node): number for number, node in enumerate(everything)}
        for node in everything:
            missing[id(node)] = len(node.before)
            for before in node.before:
                followers[id(before)].append(node)
        for waiting in self._data_waits():
            missing[id(waiting[0])] += 1
            followers[id(waiting[1])].append(waiting[0])
        heap = [(n.start, n.end, sequence[id(n)], n) for n in everything if not missing[id(n)]]
        heapq.heapify(heap)
        result: list[Node] = []
        while heap:
            node = heapq.heappop(heap)[3]
            result.append(node)
            for follower in followers[id(node)]:
                missing[id(follower)] -= 1
                if not missing[id(follower)]:
                    heapq.heappush(heap, (follower.start, follower.end, sequence[id(follower)], follower))
        assert len(result) == len(everything), "the planned order waits for itself"
        return result

    def _data_waits(self) -> list[tuple[Node, Node]]:
        return [(node, before) for node in self.nodes.values() for before in self.data(node)]

    def data(self, node: Node) -> list[Node]:
        """Return the ops of other lanes of the device whose result this op reads."""
        task = node.task
        if task is None:
            return []
        if task.kind is Kind.D:
            return [self.nodes[Task(Kind.F, task.stage, task.microbatch)]]
        if task.kind is Kind.H:
            return [self.nodes[Task(Kind.D, task.stage, task.microbatch)]]
        reload = self.nodes.get(Task(Kind.H, task.stage, task.microbatch))
        return [reload] if task.kind in (Kind.I, Kind.B) and reload is not None else []


def owner(node: Node) -> int:
    """Return the device whose memory the node changes: for a delivery, the sender."""
    return node.peer if node.chain[0] == "pair" else node.chain[1]
