"""Legal schedules for tests of the judge, built without the compiler: list scheduling, then waits and messages."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import OPS, P2P, Layer, Link, Machine, Profile, Sliceable

if TYPE_CHECKING:
    from collections.abc import Callable

HUGE = 10**9
Ranges = list[tuple[str, int, int]]
"""Of one stage and unit: ("offload" or "recompute", first layer, end layer)."""
Unit = Any
"""A microbatch, or of one that is cut its text with a slice, such as `0.1`: as it stands in ids."""


@dataclass(frozen=True)
class Shape:
    """What to build: the device of every stage, layers per stage, and how each stage and microbatch is treated."""

    placement: tuple[int, ...] = (0, 1)
    microbatches: int = 2
    layers_per_stage: int = 2
    fused: Callable[[int, Unit], bool] = lambda stage, microbatch: False
    ranges: Callable[[int, Unit], Ranges] = lambda stage, microbatch: []
    extra_waits: int = 0
    early_receives: int = 0
    tokens: int = 1
    cuts: tuple[tuple[int, ...], ...] = ()
    """By shape of microbatches, of which there are as many as rows, in turns; none: whole microbatches alone."""

    @property
    def devices(self) -> int:
        return max(self.placement) + 1

    @property
    def slices(self) -> int:
        return len(self.cuts[0]) - 1 if self.cuts else 1

    def units(self, microbatch: int) -> list[Unit]:
        """The units of a microbatch, as forwards take them."""
        return [microbatch] if self.slices == 1 else [f"{microbatch}.{k}" for k in range(self.slices)]

    def of_op(self, unit: Unit) -> dict[str, int]:
        """The fields of an op that name its unit."""
        microbatch, _, number = str(unit).partition(".")
        return {"microbatch": int(microbatch)} | ({"slice": int(number)} if number else {})

    def range_of(self, unit: Unit) -> tuple[int, int]:
        """The tokens of a unit."""
        if not self.cuts:
            return 0, self.tokens
        op = self.of_op(unit)
        cuts, number = self.cuts[op["microbatch"] % len(self.cuts)], op.get("slice", 0)
        return cuts[number], cuts[number + 1]

    def scaled(self, figure: int, unit: Unit) -> int:
        """Bytes of a whole microbatch for a unit of it."""
        begin, end = self.range_of(unit)
        return ceil(Fraction(figure * (end - begin), self.tokens))


def profile_for(shape: Shape, rng: Random, *, shared: bool = True) -> Profile:
    """Return a profile with random small costs; all devices share one host link unless told otherwise."""

    def layer(number: int) -> Layer:
        saved, captured = rng.randint(5, 40), rng.randint(0, 5)
        kept = rng.randint(0, saved) if shape.cuts else saved
        found = Layer(
            name=f"layer{number}",
            slices=_sliceable(rng, saved - kept) if shape.cuts else None,
            forward_ns=rng.randint(5, 30),
            backward_input_ns=rng.randint(5, 30),
            backward_weight_ns=rng.randint(5, 30),
            backward_ns=rng.choice([None, 40]),
            recompute_ns=rng.choice([None, 9]),
            saved_bytes=saved,
            residue_bytes=rng.choice([None, rng.randint(captured, saved + captured)]) if captured <= saved else None,
            captured_bytes=captured,
            checkpoint_bytes=rng.randint(0, kept),
            output_bytes=rng.randint(1, 15),
            static_bytes=rng.randint(0, 9),
            **{f"{op}_transient_bytes": rng.randint(0, 9) for op in OPS},
        )
        return _with_fixed(found, Random(number)) if shape.cuts else found

    rate = 10**9
    return Profile(
        name="small",
        **({"sequence_length": shape.tokens, "version": 2} if shape.cuts else {}),
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


def _with_fixed(layer: Layer, rng: Random) -> Layer:
    """Of each op, any part of its transient bytes does not shrink with the tokens."""
    fixed = {f"{op}_fixed_bytes": rng.randint(0, getattr(layer, f"{op}_transient_bytes")) for op in OPS}
    return msgspec.structs.replace(layer, slices=msgspec.structs.replace(layer.slices, **fixed))


def _sliceable(rng: Random, carry: int) -> Sliceable:
    return Sliceable(
        forward_attention_ns=rng.randint(0, 5),
        backward_input_attention_ns=rng.randint(0, 5),
        forward_overhead_ns=rng.randint(0, 3),
        backward_input_overhead_ns=rng.randint(0, 3),
        backward_weight_overhead_ns=rng.randint(0, 3),
        backward_overhead_ns=rng.choice([None, 2]),
        carry_bytes=carry,
        carry_gradient_bytes=rng.choice([None, 2 * carry]),
        forward_prefix_bytes=rng.randint(0, 9),
        backward_prefix_bytes=rng.randint(0, 9),
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
        return _id(self.op)

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

    def costs(self, stage: int, unit: Unit) -> dict[str, Any]:
        """What the ops of a stage and unit take."""
        return self.stage_cost(stage, unit)

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
            **({"carry": self.carry(mine)} if self.shape.slices > 1 else {}),
            **self.fixed(mine),
        }

    def fixed(self, mine: list[Any]) -> dict[str, Any]:
        if not self.shape.cuts:
            return {}
        found = {f"{op}_transient_bytes": [getattr(layer.slices, f"{op}_fixed_bytes") for layer in mine] for op in OPS}
        return {"fixed": found} if any(map(any, found.values())) else {}

    def carry(self, mine: list[Any]) -> dict[str, Any]:
        slices = [layer.slices for layer in mine]
        gradients = [x.carry_gradient_bytes for x in slices]
        return {
            "bytes": [x.carry_bytes for x in slices],
            "gradient_bytes": [x.carry_bytes if g is None else g for x, g in zip(slices, gradients, strict=True)],
            "forward_transient_bytes": [x.forward_prefix_bytes for x in slices],
            "backward_transient_bytes": [x.backward_prefix_bytes for x in slices],
        }

    def crosses(self, stage: int) -> bool:
        """Whether stage and the next one are on different devices."""
        placement = self.shape.placement
        return 0 <= stage < len(placement) - 1 and placement[stage] != placement[stage + 1]

    def stage_cost(self, number: int, unit: Unit) -> dict[str, Any]:
        mine, stage = self.layers(number), self.stages[number]
        size = self.shape.scaled

        def times(field: str, unset: Callable[[Any], int] = lambda layer: 0) -> list[int]:
            return [self.time(x, field, getattr(x, field) or unset(x), unit) for x in mine]

        fused = times("backward_ns", lambda x: x.backward_input_ns + x.backward_weight_ns)
        return {
            "stage": number,
            "forward_ns": sum(times("forward_ns")) + 2,
            "backward_input_ns": sum(times("backward_input_ns")) + 2,
            "backward_weight_ns": sum(times("backward_weight_ns")) + 2,
            "backward_ns": sum(fused) + 2,
            "recompute_ns": times("recompute_ns", lambda x: x.forward_ns),
            "send_activation_ns": 3 + size(stage["output_bytes"], unit) if self.crosses(number) else 0,
            "send_gradient_ns": 3 + size(stage["input_bytes"], unit) if self.crosses(number - 1) else 0,
        }

    def time(self, layer: Any, field: str, whole: int, unit: Unit) -> int:
        """What an op of a layer takes for a unit: (T - X) t / S + X (b^2 - a^2) / S^2, and what a slice costs."""
        (begin, end), count = self.shape.range_of(unit), self.shape.tokens
        slices = layer.slices
        if slices is None:
            return whole
        attention = 0 if "weight" in field else slices.backward_input_attention_ns
        if field in ("forward_ns", "recompute_ns"):
            attention = min(whole, slices.forward_attention_ns)
        exact = Fraction((whole - attention) * (end - begin), count) + attention * (
            Fraction(end, count) ** 2 - Fraction(begin, count) ** 2
        )
        more = getattr(slices, field.replace("recompute", "forward").replace("_ns", "_overhead_ns"))
        if more is None:
            more = slices.backward_input_overhead_ns + slices.backward_weight_overhead_ns
        return floor(exact + Fraction(1, 2)) + (more if self.shape.slices > 1 else 0)

    def moved(self, stage: int, unit: Unit, inside: slice) -> int:
        """What an offload of some layers takes to the host: without the keys and values that later slices read."""
        record, size = self.stages[stage], self.shape.scaled
        saved = record["saved_bytes"][inside]
        if "carry" not in record:
            return sum(size(one, unit) for one in saved)
        carried = record["carry"]["bytes"][inside]
        is_last = self.shape.of_op(unit)["slice"] == self.shape.slices - 1
        rest = sum(size(one - kept, unit) for one, kept in zip(saved, carried, strict=True))
        return rest + (sum(size(kept, unit) for kept in carried) if is_last else 0)

    def add(self, kind: str, stage: int, microbatch: Unit, cost: int, needs: list[tuple[str, int]], **more: Any) -> str:
        """Add a task; per stage and group of kinds it comes after those of the units before."""
        lane = {"offload": "d2h", "reload": "h2d"}.get(kind, "compute")
        op = {"op": kind, "stage": stage, **self.shape.of_op(microbatch), "after": [], **more}
        task = Task(op, lane, self.shape.placement[stage], cost, list(needs))
        group = "gradient" if kind in ("backward", "backward_input") else kind
        for name in self.latest.get((group, stage), []):
            other = self.tasks[name]
            if _turn(other.op) < _turn(op):
                task.needs.append((name, 0))
            elif _turn(other.op) > _turn(op):
                other.needs.append((task.id, 0))
        self.latest.setdefault((group, stage), []).append(task.id)
        self.tasks[task.id] = task
        return task.id

    def add_forward(self, stage: int, microbatch: Unit) -> None:
        lag = self.costs(stage - 1, microbatch)["send_activation_ns"] if stage else 0
        needs = [(f"forward:{stage - 1}:{microbatch}", lag)] if stage else []
        self.add("forward", stage, microbatch, self.costs(stage, microbatch)["forward_ns"], needs)

    def add_backward(self, stage: int, microbatch: Unit) -> None:
        forward, cost = f"forward:{stage}:{microbatch}", self.costs(stage, microbatch)
        needs, waits = [(forward, 0)], []
        for kind, first, end in self.shape.ranges(stage, microbatch):
            base = self.stages[stage]["layers"][0]
            inside, more = slice(first - base, end - base), {"layers": (first, end)}
            if kind == "recompute":
                time = sum(cost["recompute_ns"][inside]) + 2
                needs.append((self.add(kind, stage, microbatch, time, [(forward, 0)], **more), 0))
            else:
                time = 1 + self.moved(stage, microbatch, inside)
                away = self.add("offload", stage, microbatch, time, [(forward, 0)], **more)
                back = self.add("reload", stage, microbatch, time, [(away, 0)], **more)
                self.tasks[away].op["after"] = [forward]
                self.tasks[back].op["after"] = [away]
                needs.append((back, 0))
                waits.append(back)
        if stage + 1 < len(self.shape.placement):
            needs.append((self.gradient(stage + 1, microbatch), self.costs(stage + 1, microbatch)["send_gradient_ns"]))
        if self.shape.fused(stage, microbatch):
            name = self.add("backward", stage, microbatch, cost["backward_ns"], needs)
        else:
            name = self.add("backward_input", stage, microbatch, cost["backward_input_ns"], needs)
            self.add("backward_weight", stage, microbatch, cost["backward_weight_ns"], [(name, 0)])
        self.tasks[name].op["after"] = waits

    def gradient(self, stage: int, microbatch: Unit) -> str:
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

    def messages(self) -> list[tuple[int, str, int, Unit, int]]:
        """Return (time sent, kind, sending stage, unit, travel), in the order of every pair."""
        found = []
        for task in self.tasks.values():
            stage, microbatch = task.op["stage"], _unit(task.op)
            if task.op["op"] == "forward" and self.crosses(stage):
                found.append(
                    (task.end, "activation", stage, microbatch, self.costs(stage, microbatch)["send_activation_ns"])
                )
            if task.op["op"] in ("backward", "backward_input") and self.crosses(stage - 1):
                found.append(
                    (task.end, "gradient", stage, microbatch, self.costs(stage, microbatch)["send_gradient_ns"])
                )
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
                    op = {"op": f"{half}_{what}", "stage": mine, **self.shape.of_op(microbatch), "after": []}
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
            for unit in self.shape.units(microbatch):
                for stage in range(len(self.shape.placement)):
                    self.add_forward(stage, unit)
            for unit in reversed(self.shape.units(microbatch)):
                for stage in reversed(range(len(self.shape.placement))):
                    self.add_backward(stage, unit)
        self.place()
        lanes = {(device, "compute"): self.compute_lane(device) for device in range(self.shape.devices)}
        for device in range(self.shape.devices):
            for lane in ("d2h", "h2d"):
                mine = sorted((t for t in self.tasks.values() if (t.device, t.lane) == (device, lane)), key=_start)
                lanes[device, lane] = [(t.op, t.start, t.end) for t in mine]
        self.add_waits(lanes)
        return ir.seal(msgspec.convert(self.record(lanes), ir.Schedule))

    def units(self) -> dict[str, Any]:
        shapes = [microbatch % len(self.shape.cuts) for microbatch in range(self.shape.microbatches)]
        return {"tokens": self.shape.tokens, "cuts": list(map(list, self.shape.cuts)), "shape_of": shapes}

    def cost_records(self) -> list[dict[str, Any]]:
        if not self.shape.cuts:
            return [self.costs(stage, 0) for stage in range(len(self.stages))]
        kinds = [(row, unit) for row in range(len(self.shape.cuts)) for unit in self.shape.units(row)]
        return [
            {**self.costs(stage, unit), "shape": row, "slice": self.shape.of_op(unit).get("slice", 0)}
            for stage in range(len(self.stages))
            for row, unit in kinds
        ]

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
                **({"units": self.units()} if self.shape.cuts else {}),
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
                "stages": self.cost_records(),
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


def _unit(op: dict[str, Any]) -> Unit:
    return f"{op['microbatch']}.{op['slice']}" if "slice" in op else op["microbatch"]


def _turn(op: dict[str, Any]) -> tuple[int, int]:
    """In which order ops of one kind run: slices ascend on the way there and descend on the way back."""
    there = op["op"] in ("forward", "offload")
    return op["microbatch"], op.get("slice", 0) * (1 if there else -1)


def _id(op: dict[str, Any]) -> str:
    text = f"{op['op']}:{op['stage']}:{_unit(op)}"
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


def random_cuts(rng: Random, slices: int) -> dict[str, Any]:
    """Return tokens, and one or two shapes of microbatches that are cut into so many slices anywhere."""
    tokens = rng.choice([7, 8, 16])
    lengths = [tokens] if rng.random() < 0.5 else [tokens, rng.randint(slices, 2 * tokens)]
    cuts = [(0, *sorted(rng.sample(range(1, length), slices - 1)), length) for length in lengths]
    return {"tokens": tokens, "cuts": tuple(cuts)}


def random_shape(
    rng: Random, *, placements: list[tuple[int, ...]], microbatches: int, slices: int | None = None
) -> Shape:
    """Return a shape in which every stage and unit is split or fused, kept, offloaded or recomputed at random."""
    seed = rng.random()
    cut = {} if slices is None else random_cuts(rng, slices)

    def draw(stage: int, microbatch: Unit, what: str) -> Random:
        return Random(f"{seed} {stage} {microbatch} {what}")

    def ranges(stage: int, microbatch: Unit) -> Ranges:
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
        **cut,
    )


def changed(schedule: ir.Schedule, change: Callable[[Any], None], *, sealed: bool = True) -> ir.Schedule:
    """Return the schedule after `change` on its plain form (dicts and lists), with a digest that fits."""
    plain = msgspec.to_builtins(schedule)
    change(plain)
    record = msgspec.convert(plain, ir.Schedule)
    return ir.seal(record) if sealed else record
