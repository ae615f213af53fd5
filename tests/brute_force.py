"""The memory rule a second and a third time, for tests: by running every execution, and by a minimum cut.

Written from docs/IR.md alone, in another shape than the judge: a machine with lanes and channels that takes steps, a
table of bytes, and two ways to find the most that it can hold.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir

LANES = ("compute", "d2h", "h2d")
INFINITE = 10**12


@dataclass
class Step:
    """One step of a component: what it adds to devices and hosts, and how far other components must be."""

    device_bytes: dict[int, int]
    host_bytes: dict[int, int]
    needs: list[tuple[int, int]]


def _unit(op: dict[str, Any]) -> str:
    return f"{op['microbatch']}.{op['slice']}" if "slice" in op else str(op["microbatch"])


def _id(op: dict[str, Any]) -> str:
    text = f"{op['op']}:{op['stage']}:{_unit(op)}"
    return text + (":{}-{}".format(*op["layers"]) if "layers" in op else "")


class Machine:
    """Components (lanes and channels) as lists of steps; a state is how many steps each has taken."""

    def __init__(self, schedule: ir.Schedule) -> None:
        self.plain = msgspec.to_builtins(schedule)
        self.stages = self.plain["stages"]
        self.components: list[list[Step]] = []
        self.issued: dict[str, tuple[int, int]] = {}
        self.completed: dict[str, tuple[int, int]] = {}
        ops = [op for device in self.plain["devices"] for lane in LANES for op in device[lane]]
        self.recomputed = [op for op in ops if op["op"] == "recompute"]
        todo: list[tuple[Step, list[str]]] = []
        for device in self.plain["devices"]:
            for lane in LANES:
                todo += self.add_lane(device["device"], device[lane])
        for low, device in enumerate(self.plain["devices"]):
            for high in range(low + 1, len(self.plain["devices"])):
                self.add_channel([op for op in device["compute"] if op.get("peer") == high])
        for step, names in todo:
            step.needs += [self.completed[name] for name in names]

    def add_lane(self, device: int, ops: list[dict[str, Any]]) -> list[tuple[Step, list[str]]]:
        steps: list[Step] = []
        number, todo = len(self.components), []
        for op in ops:
            on, off = self.table(op)
            host = sum(self.leaving(op)) if op["op"] in ("offload", "reload") else 0
            begin = Step({device: on}, {device: host if op["op"] == "offload" else 0}, [])
            steps.append(begin)
            self.issued[_id(op)] = (number, len(steps))
            todo.append((begin, [*op.get("after", []), *self.arrivals(op)]))
            if "peer" not in op:
                steps.append(Step({device: off}, {device: -host if op["op"] == "reload" else 0}, []))
                self.completed[_id(op)] = (number, len(steps))
        self.components.append(steps)
        return todo

    def arrivals(self, op: dict[str, Any]) -> list[str]:
        """The receive that the runtime itself waits for before `op`, where there is one."""
        kind, stage = op["op"], op["stage"]
        if kind == "forward" and stage and self.device(stage - 1) != self.device(stage):
            return [f"recv_activation:{stage}:{_unit(op)}"]
        last = stage == len(self.stages) - 1
        if kind in ("backward", "backward_input") and not last and self.device(stage + 1) != self.device(stage):
            return [f"recv_gradient:{stage}:{_unit(op)}"]
        return []

    def device(self, stage: int) -> int:
        return int(self.stages[stage]["device"])

    def add_channel(self, ops: list[dict[str, Any]]) -> None:
        """`ops` are the messages of a pair as the lower device lists them."""
        steps: list[Step] = []
        number = len(self.components)
        for op in ops:
            way, what = op["op"].split("_")
            up = (what == "activation") == (way == "send")
            other = f"{'recv' if way == 'send' else 'send'}_{what}:{op['stage'] + (1 if up else -1)}:{_unit(op)}"
            sender = op["stage"] if way == "send" else op["stage"] + (1 if up else -1)
            freed = self.up(self.stages[sender]["output_bytes" if what == "activation" else "input_bytes"], op)
            steps.append(Step({self.device(sender): -freed}, {}, [self.issued[_id(op)], self.issued[other]]))
            self.completed[_id(op)] = self.completed[other] = (number, len(steps))
        self.components.append(steps)

    def of(self, op: dict[str, Any], name: str) -> list[int]:
        stage = self.stages[op["stage"]]
        first, end = op.get("layers", stage["layers"])
        base = stage["layers"][0]
        return [self.up(one, op) for one in stage[f"{name}_bytes"][first - base : end - base]]

    def tokens(self, op: dict[str, Any]) -> tuple[int, int, int]:
        """Begin and end of the op's unit, and how many tokens the figures are for."""
        units = self.plain["setup"].get("units")
        if units is None:
            return 0, 1, 1
        cuts, number = units["cuts"][units["shape_of"][op["microbatch"]]], op.get("slice", 0)
        return cuts[number], cuts[number + 1], units["tokens"]

    def up(self, figure: int, op: dict[str, Any]) -> int:
        begin, end, whole = self.tokens(op)
        return ceil(Fraction(figure * (end - begin), whole))

    def carried(self, op: dict[str, Any], name: str, *, prefix: bool = False) -> list[int]:
        """A list of the stage's carry for the op's layers, for its own tokens or for those before them."""
        stage = self.stages[op["stage"]]
        first, end = op.get("layers", stage["layers"])
        base = stage["layers"][0]
        figures = stage.get("carry", {}).get(name, [0] * len(stage["saved_bytes"]))[first - base : end - base]
        begin, _, whole = self.tokens(op)
        return [ceil(Fraction(one * begin, whole)) if prefix else self.up(one, op) for one in figures]

    def is_last(self, op: dict[str, Any]) -> bool:
        units = self.plain["setup"].get("units")
        return units is None or op.get("slice", 0) == len(units["cuts"][0]) - 2

    def rest(self, op: dict[str, Any]) -> list[int]:
        """Per layer, what is saved and is no key or value."""
        stage = self.stages[op["stage"]]
        first, end = op.get("layers", stage["layers"])
        base = stage["layers"][0]
        inside = slice(first - base, end - base)
        keys = stage.get("carry", {}).get("bytes", [0] * len(stage["saved_bytes"]))
        return [self.up(a - b, op) for a, b in zip(stage["saved_bytes"][inside], keys[inside], strict=True)]

    def saved(self, op: dict[str, Any]) -> list[int]:
        return [a + b for a, b in zip(self.rest(op), self.carried(op, "bytes"), strict=True)]

    def leaving(self, op: dict[str, Any]) -> list[int]:
        return self.saved(op) if self.is_last(op) else self.rest(op)

    def transient(self, op: dict[str, Any], name: str) -> int:
        way = "forward" if name == "forward" else "backward"
        prefix = [0] * 99 if "weight" in name else self.carried(op, f"{way}_transient_bytes", prefix=True)
        stage = self.stages[op["stage"]]
        first, end = op.get("layers", stage["layers"])
        inside = slice(first - stage["layers"][0], end - stage["layers"][0])
        whole = stage[f"{name}_transient_bytes"]
        stays = stage.get("fixed", {}).get(f"{name}_transient_bytes", [0] * len(whole))
        own = [fixed + self.up(all_of_it - fixed, op) for fixed, all_of_it in zip(stays, whole, strict=True)][inside]
        return max(a + b for a, b in zip(own, prefix, strict=False))

    def accumulators(self, op: dict[str, Any]) -> tuple[int, int]:
        """Gradients of keys and values: all start with the first backward of the microbatch, and end with their own."""
        if not self.is_last(op):
            return 0, sum(self.carried(op, "gradient_bytes"))
        earlier = [{**op, "slice": number} for number in range(op.get("slice", 0))]
        return sum(sum(self.carried(one, "gradient_bytes")) for one in earlier), 0

    def table(self, op: dict[str, Any]) -> tuple[int, int]:
        """The table of docs/IR.md, row by row."""
        stage, kind = self.stages[op["stage"]], op["op"]
        saved, leaving = sum(self.saved(op)), sum(self.leaving(op))
        into, out = self.up(stage["input_bytes"], op), self.up(stage["output_bytes"], op)
        if kind == "recv_activation":
            return into, 0
        if kind == "recv_gradient":
            return out, 0
        if kind == "forward":
            transient, end = self.transient(op, "forward"), 0
            for again in self.recomputed:
                if (again["stage"], _unit(again)) == (op["stage"], _unit(op)):
                    end += -sum(self.leaving(again)) + self.of(again, "checkpoint")[0]
            return saved + out + transient, end - transient - into
        if kind == "offload":
            return 0, -leaving
        if kind == "reload":
            return leaving, 0
        if kind == "recompute":
            transient = self.transient(op, "forward")
            return leaving - self.of(op, "checkpoint")[0] + transient, -transient
        residue, captured = sum(self.of(op, "residue")), sum(self.of(op, "captured"))
        if kind == "backward_input":
            transient, (begun, ended) = self.transient(op, "backward_input"), self.accumulators(op)
            return into + captured + transient + begun, -transient - out - ended - (saved + captured - residue)
        if kind == "backward_weight":
            transient = self.transient(op, "backward_weight")
            return transient, -transient - residue
        if kind == "backward":
            transient, (begun, ended) = self.transient(op, "backward"), self.accumulators(op)
            return into + transient + begun, -transient - out - ended - saved
        return 0, 0  # a send: what it frees, it frees when delivered

    def always(self, device: int) -> int:
        static = sum(stage["static_bytes"] for stage in self.stages if stage["device"] == device)
        return int(self.plain["setup"]["reserve_bytes"]) + static

    def most_by_running(self, limit: int) -> dict[tuple[str, int], int] | None:
        """Take every step that is possible in every state; None when there are more than `limit` states."""
        first = tuple(0 for _ in self.components)
        seen, queue = {first}, deque([first])
        most: dict[tuple[str, int], int] = defaultdict(int)
        while queue:
            state = queue.popleft()
            self.note(state, most)
            for number, taken in enumerate(state):
                steps = self.components[number]
                if taken < len(steps) and all(state[other] >= count for other, count in steps[taken].needs):
                    after = (*state[:number], taken + 1, *state[number + 1 :])
                    if after not in seen:
                        seen.add(after)
                        queue.append(after)
            if len(seen) > limit:
                return None
        return dict(most)

    def note(self, state: tuple[int, ...], most: dict[tuple[str, int], int]) -> None:
        held: dict[tuple[str, int], int] = defaultdict(int)
        for device in range(len(self.plain["devices"])):
            held["device", device] = self.always(device)
        for steps, taken in zip(self.components, state, strict=True):
            for step in steps[:taken]:
                for device, count in step.device_bytes.items():
                    held["device", device] += count
                for device, count in step.host_bytes.items():
                    held["host", device] += count
        for key, count in held.items():
            most[key] = max(most[key], count)

    def most_by_cut(self, where: str, device: int) -> int:
        """The heaviest set of steps that is closed under `needs` (Picard 1976): positive weights less a minimum cut."""
        number = {(c, i): None for c, steps in enumerate(self.components) for i in range(len(steps))}
        index = {key: at for at, key in enumerate(number)}
        network = Network(len(index) + 2)
        source, sink, total = len(index), len(index) + 1, 0
        for (c, i), node in index.items():
            step = self.components[c][i]
            weight = (step.device_bytes if where == "device" else step.host_bytes).get(device, 0)
            total += max(weight, 0)
            if weight > 0:
                network.edge(source, node, weight)
            if weight < 0:
                network.edge(node, sink, -weight)
            for other, count in [*step.needs, (c, i)]:
                if count:
                    network.edge(node, index[other, count - 1], INFINITE)
        return total - network.flow(source, sink) + (self.always(device) if where == "device" else 0)


class Network:
    """Maximum flow by shortest augmenting paths, level by level (Dinic 1970)."""

    def __init__(self, nodes: int) -> None:
        self.out: list[list[int]] = [[] for _ in range(nodes)]
        self.to: list[int] = []
        self.left: list[int] = []

    def edge(self, tail: int, head: int, capacity: int) -> None:
        for at, (a, b, c) in enumerate(((tail, head, capacity), (head, tail, 0)), start=len(self.to)):
            self.out[a].append(at)
            self.to.append(b)
            self.left.append(c)

    def levels(self, source: int) -> list[int]:
        level = [-1] * len(self.out)
        level[source], queue = 0, deque([source])
        while queue:
            node = queue.popleft()
            for at in self.out[node]:
                if self.left[at] and level[self.to[at]] < 0:
                    level[self.to[at]] = level[node] + 1
                    queue.append(self.to[at])
        return level

    def push(self, node: int, sink: int, most: int, level: list[int], following: list[int]) -> int:
        """Push one path on, by hand-kept stack, so that long chains do not exhaust Python's."""
        path: list[int] = []
        here = node
        while here != sink:
            if following[here] == len(self.out[here]):
                if not path:
                    return 0
                level[here] = -1
                here = self.to[path.pop() ^ 1]
                following[here] += 1
                continue
            at = self.out[here][following[here]]
            if self.left[at] and level[self.to[at]] == level[here] + 1:
                path.append(at)
                here = self.to[at]
            else:
                following[here] += 1
        pushed = min([most, *(self.left[at] for at in path)])
        for at in path:
            self.left[at] -= pushed
            self.left[at ^ 1] += pushed
        return pushed

    def flow(self, source: int, sink: int) -> int:
        total = 0
        while (level := self.levels(source))[sink] >= 0:
            following = [0] * len(self.out)
            while pushed := self.push(source, sink, INFINITE, level, following):
                total += pushed
        return total
