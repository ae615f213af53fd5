"""Which numbers of a measured profile are not to be trusted: those whose samples differ by as much as they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from optpipe_compiler.documents.profile import Quantity, alike, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe_compiler.documents.profile import Cost, Layer, Profile

BOUND = 0.5
"""The interquartile range, as a part of the median, above which a number is noise; on an idle machine that of a
block's ops is at most 0.18 (docs/REPEAT.md)."""
MATTERS = 0.01
"""The part of a microbatch's compute time by which a time must be uncertain to be named."""
OPS_PER_STAGE = 3
"""That have an overhead: F, I and W."""
TIMES = ("forward_ns", "backward_input_ns", "backward_weight_ns", "backward_ns", "recompute_ns")
ATTENTION = ("forward_attention_ns", "backward_input_attention_ns")
SPEEDS = ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_d2h_bytes_per_s", "duplex_h2d_bytes_per_s")


@dataclass(frozen=True)
class Noisy:
    """A number with its interquartile range, and where it is in the profile."""

    path: str
    name: str
    value: int
    spread: int
    unit: Literal["ns", "bytes/s"]


def noisy(profile: Profile) -> list[Noisy]:
    """Return the numbers of a profile that are noise; what takes next to nothing of a step is left out."""
    machine = profile.machine
    overhead = value_of(machine.op_overhead_ns)
    total = sum(_work(layer) * layer.count for layer in profile.layers)
    found: list[Noisy] = []
    if _is_noise(machine.op_overhead_ns) and _matters(machine.op_overhead_ns, OPS_PER_STAGE * machine.devices, total):
        found += _named("$.machine.op_overhead_ns", "the overhead of an op", machine.op_overhead_ns, "ns")
    for index, layer in alike(profile.layers):
        for field in TIMES:
            cost = getattr(layer, field)
            # an op takes its overhead, too: nothing but the sum was measured
            if _is_noise(cost, beside=overhead) and _matters(cost, layer.count, total):
                op = field.removesuffix("_ns").replace("_", " ")
                found += _named(f"$.layers[{index}].{field}", f"{op} of {layer.name}", cost, "ns")
        for field in ATTENTION if layer.slices is not None else ():
            cost = getattr(layer.slices, field)
            if _is_noise(cost) and _matters(cost, layer.count, total):
                op = field.removesuffix("_attention_ns").replace("_", " ")
                name = f"attention in {op} of {layer.name}"
                found += _named(f"$.layers[{index}].slices.{field}", name, cost, "ns")
    return [*found, *_messages(profile, total), *_links(profile)]


IQR_PER_SIGMA = 1.349
"""Of a normal distribution."""
COST_OF = {
    "forward": "forward_ns",
    "backward_input": "backward_input_ns",
    "backward_weight": "backward_weight_ns",
    "backward": "backward_ns",
    "recompute": "recompute_ns",
}
"""Ops of compute, and the times of a layer that they are sums of."""


def op_spreads(profile: Profile, stages: Sequence[tuple[int, int]]) -> dict[tuple[str, int], float]:
    """Return, by kind of op and stage, the standard deviation of its time as a share of it; empty without any spread.

    `stages` are the layers `[first, end)` of each. What disturbs an op disturbs all of its layers, so their spreads add
    up; what is not said is that of the halves or of the forward, as times are.
    """
    layers = profile.expanded_layers()
    overhead = value_of(profile.machine.op_overhead_ns)
    found = {}
    for number, (first, end) in enumerate(stages):
        for kind in COST_OF:
            costs = [cost for layer in layers[first:end] for cost in _costs(layer, kind)]
            total = overhead + sum(map(value_of, costs))
            spread = sum(cost.spread for cost in costs if isinstance(cost, Quantity)) / IQR_PER_SIGMA
            if total and spread:
                found[kind, number] = min(BOUND, spread / total)
    return found


def _costs(layer: Layer, kind: str) -> list[Cost]:
    own: Cost | None = getattr(layer, COST_OF[kind])
    if own is not None:
        return [own]
    return [layer.backward_input_ns, layer.backward_weight_ns] if kind == "backward" else [layer.forward_ns]


def _messages(profile: Profile, total: int) -> Iterator[Noisy]:
    for index, entry in enumerate(profile.machine.p2p):
        path, name = f"$.machine.p2p[{index}]", "messages" + _between(entry.devices)
        if _is_noise(entry.latency_ns) and _matters(entry.latency_ns, 2, total):
            yield from _named(f"{path}.latency_ns", f"latency of {name}", entry.latency_ns, "ns")
        if _is_noise(entry.overhead_ns) and _matters(entry.overhead_ns, 2, total):
            yield from _named(f"{path}.overhead_ns", f"overhead of {name}", entry.overhead_ns, "ns")
        if _is_noise(entry.bytes_per_s):
            yield from _named(f"{path}.bytes_per_s", f"speed of {name}", entry.bytes_per_s, "bytes/s")


def _links(profile: Profile) -> Iterator[Noisy]:
    for index, link in enumerate(profile.machine.links):
        for field in SPEEDS:
            if _is_noise(getattr(link, field)):
                way = field.removesuffix("_bytes_per_s").replace("_", " ")
                name = f"speed of {way} copies" + _between(link.devices)
                yield from _named(f"$.machine.links[{index}].{field}", name, getattr(link, field), "bytes/s")


def _between(devices: Sequence[int] | None) -> str:
    return "" if devices is None else f" of device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"


def _is_noise(cost: Cost | None, beside: int = 0) -> bool:
    return isinstance(cost, Quantity) and cost.spread > BOUND * (cost.value + beside)


def _matters(cost: Cost | None, count: int, total: int) -> bool:
    """Whether the uncertainty of what happens `count` times per microbatch is a part of its compute time."""
    return isinstance(cost, Quantity) and cost.spread * count > MATTERS * total


def _named(path: str, name: str, cost: Cost | None, unit: Literal["ns", "bytes/s"]) -> Iterator[Noisy]:
    assert isinstance(cost, Quantity)
    yield Noisy(path, name, cost.value, cost.spread, unit)


def _work(layer: Layer) -> int:
    """What a microbatch takes on one layer: F, and both halves of its backward."""
    return sum(map(value_of, (layer.forward_ns, layer.backward_input_ns, layer.backward_weight_ns)))
