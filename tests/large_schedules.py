"""Sound schedules of any size, made in linear time: one op after the other on all devices together."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from optpipe_compiler.documents import ir

if TYPE_CHECKING:
    from collections.abc import Iterable

COST, COPY, CAP = 10, 2, 2**50
PER_LAYER = ("saved", "residue", "captured", "checkpoint", "forward_transient")
TRANSIENT = ("backward_input_transient", "backward_weight_transient", "backward_transient")


def serial(
    placement: Iterable[int],
    microbatches: int,
    *,
    layers: int = 1,
    gpipe: bool = False,
    offload: bool = False,
    recompute: bool = False,
    empty_devices: int = 0,
) -> ir.Schedule:
    """Return a schedule with so many layers per stage; with `gpipe` all forwards come before all backwards."""
    return _Serial(list(placement), microbatches, layers, offload, recompute).build(gpipe, empty_devices)


class _Serial:
    """A clock, and what every lane of every device has run so far."""

    def __init__(self, placement: list[int], microbatches: int, layers: int, offload: bool, recompute: bool) -> None:
        self.placement, self.microbatches, self.layers = placement, microbatches, layers
        self.offload, self.recompute = offload, recompute
        self.now = 0
        self.lanes: dict[tuple[int, str], list[tuple[dict[str, Any], int, int]]] = defaultdict(list)

    def build(self, gpipe: bool, empty_devices: int) -> ir.Schedule:
        for microbatch in range(self.microbatches):
            self.forward(microbatch)
            if not gpipe:
                self.backward(microbatch)
        for microbatch in range(self.microbatches if gpipe else 0):
            self.backward(microbatch)
        return self.schedule(max(self.placement) + 1 + empty_devices)

    def add(self, lane: str, kind: str, stage: int, microbatch: int, cost: int, **more: Any) -> None:
        device = self.placement[stage]
        op = {"op": kind, "stage": stage, "microbatch": microbatch, "after": [], **more}
        self.lanes[device, lane].append((op, self.now, self.now + cost))
        self.now += cost

    def send(self, what: str, stage: int, microbatch: int, step: int) -> None:
        """Hand the result of `stage` to its neighbour, in a message where that is on another device."""
        here, there = self.placement[stage], self.placement[stage + step]
        if here != there:
            self.add("compute", f"send_{what}", stage, microbatch, 0, peer=there)
            self.add("compute", f"recv_{what}", stage + step, microbatch, 0, peer=here)

    def forward(self, microbatch: int) -> None:
        last = len(self.placement) - 1
        for stage in range(last + 1):
            self.add("compute", "forward", stage, microbatch, COST)
            if stage < last:
                self.send("activation", stage, microbatch, 1)
            if self.offload:
                after = [f"forward:{stage}:{microbatch}"]
                self.add("d2h", "offload", stage, microbatch, COPY, after=after, layers=self.range(stage))

    def backward(self, microbatch: int) -> None:
        for stage in reversed(range(len(self.placement))):
            after = []
            first, end = self.range(stage)
            if self.offload:
                name = f"{stage}:{microbatch}:{first}-{end}"
                self.add("h2d", "reload", stage, microbatch, COPY, after=[f"offload:{name}"], layers=(first, end))
                after = [f"reload:{name}"]
            if self.recompute:
                self.add("compute", "recompute", stage, microbatch, self.layers, layers=(first, end))
            self.add("compute", "backward", stage, microbatch, COST, after=after)
            if stage:
                self.send("gradient", stage, microbatch, -1)

    def range(self, stage: int) -> tuple[int, int]:
        return stage * self.layers, (stage + 1) * self.layers

    def schedule(self, devices: int) -> ir.Schedule:
        stages = [self.stage(number) for number in range(len(self.placement))]
        busy = sum(end - start for (_, lane), ops in self.lanes.items() if lane == "compute" for _, start, end in ops)
        working = [
            (start, end)
            for (_, lane), ops in self.lanes.items()
            for op, start, end in ops
            if not op["op"].startswith(("send", "recv"))
        ]
        span = max(
            max(end for _, _, end in ops) - min(start for _, start, _ in ops)
            for (_, lane), ops in self.lanes.items()
            if lane == "compute"
        )
        whole = max(end for _, end in working) - min(start for start, _ in working)
        record = {
            "digest": "",
            "setup": {
                "devices": devices,
                "microbatches": self.microbatches,
                "layers": self.layers * len(self.placement),
                "cap_bytes": CAP,
                "host_cap_bytes": None,
                "reserve_bytes": 0,
            },
            "model": None,
            "stages": stages,
            "devices": [self.device(number) for number in range(devices)],
            "forecast": {
                "objective": "makespan",
                "makespan_ns": whole,
                "span_ns": span,
                "bubble_fraction": 1 - busy / (whole * devices),
                "outcome": "feasible",
                "method": "serial",
                "lower_bound_ns": 0,
                "bound": "none",
                "baselines": {},
                "op_overhead_ns": 0,
                "stages": [self.cost(number) for number in range(len(self.placement))],
                "links": [self.link(range(devices))] if self.offload else [],
                "times": [
                    {
                        "device": device,
                        "lane": lane,
                        "start_ns": [start for _, start, _ in ops],
                        "end_ns": [end for _, _, end in ops],
                    }
                    for (device, lane), ops in self.lanes.items()
                ],
            },
            "provenance": {"compiler": "test", "profile": "test", "profile_digest": "", "options": {}},
        }
        return ir.seal(msgspec.convert(record, ir.Schedule))

    def stage(self, number: int) -> dict[str, Any]:
        last = len(self.placement) - 1
        return {
            "stage": number,
            "device": self.placement[number],
            "layers": self.range(number),
            "static_bytes": 1,
            "input_bytes": 1 if number else 0,
            "output_bytes": 1 if number < last else 0,
            **{f"{name}_bytes": [1] * self.layers for name in PER_LAYER},
            **{f"{name}_bytes": [0] * self.layers for name in TRANSIENT},
        }

    def device(self, number: int) -> dict[str, Any]:
        lanes = {lane: [op for op, _, _ in self.lanes.get((number, lane), [])] for lane in ("compute", "d2h", "h2d")}
        return {"device": number, "peak_bytes": CAP, "host_bytes": CAP, **lanes}

    def cost(self, number: int) -> dict[str, Any]:
        times = {f"{name}_ns": COST for name in ("forward", "backward_input", "backward_weight", "backward")}
        return {
            "stage": number,
            **times,
            "recompute_ns": [1] * self.layers,
            "send_activation_ns": 0,
            "send_gradient_ns": 0,
        }

    def link(self, devices: Iterable[int]) -> dict[str, Any]:
        rates = ("d2h", "h2d", "duplex_d2h", "duplex_h2d")
        fast = {f"{rate}_bytes_per_s": 10**18 for rate in rates}
        return {"devices": list(devices), **fast, "latency_ns": COPY}
