"""Legal schedules for tests of the judge, built without the compiler: list scheduling, then waits and messages."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Profile

if TYPE_CHECKING:
    from collections.abc import Callable

HUGE = 10**9
Ranges = list[tuple[str, int, int]]
"""Of one stage and microbatch: ("offload" or "recompute", first layer, end layer)."""


@dataclass(frozen=True)
class Shape:
    """What to build: the device of every stage, layers per stage, and how each stage and microbatch is treated."""

    placement: tuple[int, ...] = (0, 1)
    microbatches: int = 2
    layers_per_stage: int = 2
    fused: Callable[[int, int], bool] = lambda stage, microbatch: False
    ranges: Callable[[int, int], Ranges] = lambda stage, microbatch: []
    extra_waits: int = 0
    early_receives: int = 0

    @property
    def devices(self) -> int:
        return max(self.placement) + 1


def profile_for(shape: Shape, rng: Random, *, shared: bool = True) -> Profile:
    """Return a profile with random small costs; all devices share one host link unless told otherwise."""

    def layer(number: int) -> Layer:
        saved, captured = rng.randint(5, 40), rng.randint(0, 5)
        return Layer(
            name=f"layer{number}",
            forward_ns=rng.randint(5, 30),
            backward_input_ns=rng.randint(5, 30),
            backward_weight_ns=rng.randint(5, 30),
            backward_ns=rng.choice([None, 40]),
            recompute_ns=rng.choice([None, 9]),
            saved_bytes=saved,
            residue_bytes=rng.choice([None, rng.randint(captured, saved + captured)]) if captured <= saved else None,
            captured_bytes=captured,
            checkpoint_bytes=rng.randint(0, saved),
            output_bytes=rng.randint(1, 15),
            static_bytes=rng.randint(0, 9),
            forward_transient_bytes=rng.randint(0, 9),
            backward_input_transient_bytes=rng.randint(0, 9),
            backward_weight_transient_bytes=rng.randint(0, 9),
            backward_transient_bytes=rng.randint(0, 9),
        )

    rate = 10**9
    return Profile(
        name="small",
        machine=Machine(
            devices=shape.devices,
            reserve_bytes=3,
            op_overhead_ns=2,
            p2p=[P2P(latency_ns=3, bytes_per_s=rate)],
            links=[
                Link(
                    devices=list(range(shape.devices)) if shared else None,
                    d2h_bytes_per_s=rate,
                    h2d_bytes_per_s=rate,
                    duplex_d2h_bytes_per_s=2 * rate,
                    latency_ns=1,
                )
            ],
        ),
        layers=[layer(number) for number in range(shape.layers_per_stage * len(shape.placement))],
    )


@dataclass
class Task:
    """One op with its cost, what it must come after, and the time it got."""

    op: dict[str, Any]
    lane: str
    device: int
    cost: int
    needs: list[tuple[str, int]] = field(default_factory=list)
    start: int = -1

    @property
    def id(self) -> str:
        text = f"{self.op['op']}:{self.op['stage']}:{self.op['microbatch']}"
        return text + (":{}-{}".format(*self.op["layers"]) if "layers" in self.op else "")

    @property
    def end(self) -> int:
        return self.start + self.cost


class Builder:
    """Builds one schedule; every step is a method, in order of `build`."""

    def __init__(self, shape: Shape, profile: Profile, rng: Random) -> None:
        self.shape, self.profile, self.rng = shape, profile, rng
        self.tasks: dict[str, Task] = {}
        self.latest: dict[tuple[str, int], list[str]] = {}
        self.stages = [self.stage(number) for number in range(len(shape.placement))]
        self.costs = [self.stage_cost(number) for number in range(len(shape.placement))]

    def layers(self, stage: int) -> list[Any]:
        count = self.shape.layers_per_stage
        return self.profile.expanded_layers()[stage * count : (stage + 1) * count]

    def stage(self, number: int) -> dict[str, Any]:
        mine, count, last = self.layers(number), self.shape.layers_per_stage, len(self.shape.placement) - 1
        names = ["saved", "captured", "checkpoint", "forward_transient"]
        names += ["backward_input_transient", "backward_weight_transient", "backward_transient"]
        return {
            "stage": number,
            "device": self.shape.placement[number],
            "layers": (number * count, (number + 1) * count),
            "static_bytes": sum(layer.static_bytes for layer in mine),
            "input_bytes": self.layers(number - 1)[-1].output_bytes if number else 0,
            "output_bytes": mine[-1].output_bytes if number < last else 0,
            "residue_bytes": [x.saved_bytes if x.residue_bytes is None else x.residue_bytes for x in mine],
            **{f"{name}_bytes": [getattr(layer, f"{name}_bytes") for layer in mine] for name in names},
        }

    def crosses(self, stage: int) -> bool:
        """Whether stage and the next one are on different devices."""
        placement = self.shape.placement
        return 0 <= stage < len(placement) - 1 and placement[stage] != placement[stage + 1]

    def stage_cost(self, number: int) -> dict[str, Any]:
        mine, overhead, stage = self.layers(number), 2, self.stages[number]
        return {
            "stage": number,
            "forward_ns": sum(x.forward_ns for x in mine) + overhead,
            "backward_input_ns": sum(x.backward_input_ns for x in mine) + overhead,
            "backward_weight_ns": sum(x.backward_weight_ns for x in mine) + overhead,
            "backward_ns": sum(x.backward_ns or x.backward_input_ns + x.backward_weight_ns for x in mine) + overhead,
            "recompute_ns": [x.recompute_ns or x.forward_ns for x in mine],
            "send_activation_ns": 3 + stage["output_bytes"] if self.crosses(number) else 0,
            "send_gradient_ns": 3 + stage["input_bytes"] if self.crosses(number - 1) else 0,
        }

    def add(self, kind: str, stage: int, microbatch: int, cost: int, needs: list[tuple[str, int]], **more: Any) -> str:
        """Add a task; per stage and group of kinds it comes after those of the microbatch before."""
        lane = {"offload": "d2h", "reload": "h2d"}.get(kind, "compute")
        op = {"op": kind, "stage": stage, "microbatch": microbatch, "after": [], **more}
        task = Task(op, lane, self.shape.placement[stage], cost, list(needs))
        group = "gradient" if kind in ("backward", "backward_input") else kind
        earlier = [name for name in self.latest.get((group, stage), []) if self.mb(name) < microbatch]
        task.needs += [(name, 0) for name in earlier]
        self.latest.setdefault((group, stage), []).append(task.id)
        self.tasks[task.id] = task
        return task.id

    def mb(self, name: str) -> int:
        return int(self.tasks[name].op["microbatch"])

    def add_forward(self, stage: int, microbatch: int) -> None:
        lag = self.costs[stage - 1]["send_activation_ns"] if stage else 0
        needs = [(f"forward:{stage - 1}:{microbatch}", lag)] if stage else []
        self.add("forward", stage, microbatch, self.costs[stage]["forward_ns"], needs)

    def add_backward(self, stage: int, microbatch: int) -> None:
        forward, cost = f"forward:{stage}:{microbatch}", self.costs[stage]
        needs, waits = [(forward, 0)], []
        for kind, first, end in self.shape.ranges(stage, microbatch):
            base = self.stages[stage]["layers"][0]
            inside, more = slice(first - base, end - base), {"layers": (first, end)}
            if kind == "recompute":
                time = sum(cost["recompute_ns"][inside]) + 2
                needs.append((self.add(kind, stage, microbatch, time, [(forward, 0)], **more), 0))
            else:
                time = 1 + sum(self.stages[stage]["saved_bytes"][inside])
                away = self.add("offload", stage, microbatch, time, [(forward, 0)], **more)
                back = self.add("reload", stage, microbatch, time, [(away, 0)], **more)
                self.tasks[away].op["after"] = [forward]
                self.tasks[back].op["after"] = [away]
                needs.append((back, 0))
                waits.append(back)
        if stage + 1 < len(self.shape.placement):
            needs.append((self.gradient(stage + 1, microbatch), self.costs[stage + 1]["send_gradient_ns"]))
        if self.shape.fused(stage, microbatch):
            name = self.add("backward", stage, microbatch, cost["backward_ns"], needs)
        else:
            name = self.add("backward_input", stage, microbatch, cost["backward_input_ns"], needs)
            self.add("backward_weight", stage, microbatch, cost["backward_weight_ns"], [(name, 0)])
        self.tasks[name].op["after"] = waits

    def gradient(self, stage: int, microbatch: int) -> str:
        return f"{'backward' if self.shape.fused(stage, microbatch) else 'backward_input'}:{stage}:{microbatch}"

    def place(self) -> None:
        """List scheduling: any ready task next, as early as what it needs, its lane and its link allow."""
        free: dict[Any, int] = defaultdict(int)
        missing = {name: len(task.needs) for name, task in self.tasks.items()}
        after: dict[str, list[str]] = defaultdict(list)
        for name, task in self.tasks.items():
            for need, _ in task.needs:
                after[need].append(name)
        ready = [name for name, count in missing.items() if not count]
        while ready:
            task = self.tasks[ready.pop(self.rng.randrange(len(ready)))]
            keys = [(task.device, task.lane)] + ([task.lane] if task.lane != "compute" else [])
            times = [self.tasks[name].end + lag for name, lag in task.needs]
            task.start = max([*times, *(free[key] for key in keys)])
            for key in keys:
                free[key] = task.end
            for later in after[task.id]:
                missing[later] -= 1
                ready += [later] if not missing[later] else []

    def messages(self) -> list[tuple[int, str, int, int, int]]:
        """Return (time sent, kind, sending stage, microbatch, travel), in the order of every pair."""
        found = []
        for task in self.tasks.values():
            stage, microbatch = task.op["stage"], task.op["microbatch"]
            if task.op["op"] == "forward" and self.crosses(stage):
                found.append((task.end, "activation", stage, microbatch, self.costs[stage]["send_activation_ns"]))
            if task.op["op"] in ("backward", "backward_input") and self.crosses(stage - 1):
                found.append((task.end, "gradient", stage, microbatch, self.costs[stage]["send_gradient_ns"]))
        return sorted(found)

    def compute_lane(self, device: int) -> list[tuple[dict[str, Any], int, int]]:
        """Return (op, start, end): a message stands after the ops that have ended when it is sent."""
        working = sorted((t for t in self.tasks.values() if (t.device, t.lane) == (device, "compute")), key=_start)
        lane: list[tuple[dict[str, Any], int, int]] = [(t.op, t.start, t.end) for t in working]
        slots: list[list[tuple[dict[str, Any], int, int]]] = [[] for _ in range(len(lane) + 1)]
        placement, ends = self.shape.placement, [end for _, _, end in lane]
        for time, what, stage, microbatch, travel in self.messages():
            to = stage + 1 if what == "activation" else stage - 1
            for mine, peer, half in ((stage, to, "send"), (to, stage, "recv")):
                if placement[mine] == device:
                    slot = bisect_right(ends, time)
                    issue = time if half == "send" else (lane[slot - 1][2] if slot else 0)
                    op = {"op": f"{half}_{what}", "stage": mine, "microbatch": microbatch, "after": []}
                    slots[slot].append(({**op, "peer": placement[peer]}, issue, time + travel))
        merged = slots[0][:]
        for entry, slot_entries in zip(lane, slots[1:], strict=True):
            merged += [entry, *slot_entries]
        return self.hasten(merged)

    def hasten(self, lane: list[tuple[dict[str, Any], int, int]]) -> list[tuple[dict[str, Any], int, int]]:
        """Move some receives to the front, past ops that are no messages with the same peer."""
        for _ in range(self.shape.early_receives):
            index = self.rng.randrange(len(lane))
            op, start, end = lane[index]
            while op["op"].startswith("recv") and index and lane[index - 1][0].get("peer") != op["peer"]:
                before = lane[index - 1]
                start = min(start, before[1])
                lane[index - 1], lane[index] = (op, start, end), before
                index -= 1
        return lane

    def add_waits(self, lanes: dict[tuple[int, str], list[tuple[dict[str, Any], int, int]]]) -> None:
        """Add random waits on ops of the same device that have ended in the forecast, deliveries included."""
        entries = [(device, entry) for (device, _), lane in lanes.items() for entry in lane]
        for _ in range(self.shape.extra_waits):
            device, (op, start, _) = self.rng.choice(entries)
            done = [other for at, (other, _, end) in entries if at == device and end <= start and other is not op]
            if done and not op["op"].startswith(("send", "recv")):
                name = _id(self.rng.choice(done))
                op["after"] = [*op["after"], *([name] if name not in op["after"] else [])]

    def build(self) -> ir.Schedule:
        for microbatch in range(self.shape.microbatches):
            for stage in range(len(self.shape.placement)):
                self.add_forward(stage, microbatch)
            for stage in reversed(range(len(self.shape.placement))):
                self.add_backward(stage, microbatch)
        self.place()
        lanes = {(device, "compute"): self.compute_lane(device) for device in range(self.shape.devices)}
        for device in range(self.shape.devices):
            for lane in ("d2h", "h2d"):
                mine = sorted((t for t in self.tasks.values() if (t.device, t.lane) == (device, lane)), key=_start)
                lanes[device, lane] = [(t.op, t.start, t.end) for t in mine]
        self.add_waits(lanes)
        return ir.seal(msgspec.convert(self.record(lanes), ir.Schedule))

    def record(self, lanes: dict[tuple[int, str], list[tuple[dict[str, Any], int, int]]]) -> dict[str, Any]:
        count, tasks = self.shape.devices, list(self.tasks.values())
        makespan = max(t.end for t in tasks) - min(t.start for t in tasks)
        compute = [[t for t in tasks if (t.device, t.lane) == (device, "compute")] for device in range(count)]
        spans = [max(t.end for t in mine) - min(t.start for t in mine) for mine in compute if mine]
        busy = sum(t.cost for mine in compute for t in mine)
        transfers = any(t.lane != "compute" for t in tasks)
        link = self.profile.machine.links[0]
        return {
            "digest": "",
            "setup": {
                "devices": count,
                "microbatches": self.shape.microbatches,
                "layers": len(self.profile.layers),
                "cap_bytes": HUGE,
                "host_cap_bytes": HUGE * count,
                "reserve_bytes": 3,
            },
            "model": None,
            "stages": self.stages,
            "devices": [
                {
                    "device": device,
                    "peak_bytes": HUGE,
                    "host_bytes": HUGE,
                    **{lane: [op for op, _, _ in lanes[device, lane]] for lane in ("compute", "d2h", "h2d")},
                }
                for device in range(count)
            ],
            "forecast": {
                "objective": "makespan",
                "makespan_ns": makespan,
                "span_ns": max(spans),
                "bubble_fraction": 1 - busy / (count * makespan),
                "outcome": "feasible",
                "method": "test",
                "lower_bound_ns": 1,
                "bound": "none",
                "baselines": {},
                "op_overhead_ns": 2,
                "stages": self.costs,
                "links": [
                    {
                        "devices": devices,
                        "d2h_bytes_per_s": 10**9,
                        "h2d_bytes_per_s": 10**9,
                        "duplex_d2h_bytes_per_s": 10**9,
                        "duplex_h2d_bytes_per_s": 10**9,
                        "latency_ns": 1,
                    }
                    for devices in ([link.devices] if link.devices else [[d] for d in range(count)])
                    if transfers
                ],
                "times": [
                    {"device": d, "lane": lane, "start_ns": [s for _, s, _ in ops], "end_ns": [e for _, _, e in ops]}
                    for (d, lane), ops in lanes.items()
                ],
            },
            "provenance": {"compiler": "test", "profile": "small", "profile_digest": "", "options": {}},
        }


def _start(task: Task) -> int:
    return task.start


def _id(op: dict[str, Any]) -> str:
    text = f"{op['op']}:{op['stage']}:{op['microbatch']}"
    return text + (":{}-{}".format(*op["layers"]) if "layers" in op else "")


def build(shape: Shape, seed: int = 0) -> ir.Schedule:
    """Return a legal schedule of this shape; equal seeds give equal schedules."""
    rng = Random(seed)
    return Builder(shape, profile_for(shape, rng), rng).build()


def build_with_profile(shape: Shape, seed: int = 0, *, shared: bool = True) -> tuple[ir.Schedule, Profile]:
    """Return a legal schedule together with the profile that it was built from."""
    rng = Random(seed)
    profile = profile_for(shape, rng, shared=shared)
    return Builder(shape, profile, rng).build(), profile


def random_shape(rng: Random, *, placements: list[tuple[int, ...]], microbatches: int) -> Shape:
    """Return a shape in which every stage and microbatch is split or fused, kept, offloaded or recomputed at random."""
    seed = rng.random()

    def draw(stage: int, microbatch: int, what: str) -> Random:
        return Random(f"{seed} {stage} {microbatch} {what}")

    def ranges(stage: int, microbatch: int) -> Ranges:
        mine, found, first = draw(stage, microbatch, "state"), [], 2 * stage
        for end in mine.choice([[2 * stage + 2], [2 * stage + 1, 2 * stage + 2]]):
            kind = mine.choice(["keep", "offload", "recompute"])
            if kind != "keep":
                found.append((kind, first, end))
            first = end
        return found

    return Shape(
        placement=rng.choice(placements),
        microbatches=microbatches,
        fused=lambda stage, microbatch: draw(stage, microbatch, "split").random() < 0.5,
        ranges=ranges,
        extra_waits=rng.randint(0, 12),
        early_receives=rng.randint(0, 6),
    )


def changed(schedule: ir.Schedule, change: Callable[[Any], None], *, sealed: bool = True) -> ir.Schedule:
    """Return the schedule after `change` on its plain form (dicts and lists), with a digest that fits."""
    plain = msgspec.to_builtins(schedule)
    change(plain)
    record = msgspec.convert(plain, ir.Schedule)
    return ir.seal(record) if sealed else record
