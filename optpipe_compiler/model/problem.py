"""The scheduling problem that all planning sees: integer durations in ticks, integer memory in units.

All sums over layers and all rounding live here. `build` is exact (1 tick = 1 ns, 1 unit = 1 byte); `coarsen` rounds
for the solver and says by how much its bounds must be relaxed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from optpipe_compiler.documents.profile import in_one_stage, selected, value_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optpipe_compiler.documents.profile import Cost, Layer, Link, Machine, Profile
    from optpipe_compiler.model.placement import Layout

NS_PER_S = 10**9


@dataclass(frozen=True)
class Caps:
    """Memory caps in bytes; `host_bytes` None means unlimited."""

    device_bytes: int
    host_bytes: int | None


@dataclass(frozen=True)
class Freedom:
    """What the compiler may use besides order."""

    offload: bool = True
    recompute: bool = True
    split: bool = True


@dataclass(frozen=True)
class Stage:
    """One stage's durations (ticks) and sizes (units) per microbatch.

    `offload` and `reload` are the times while the link's other direction is busy, `*_alone` those while it is not.
    `*_extra` exists only while the op runs: its transient bytes and the messages that it reads and writes.
    """

    device: int
    forward: int
    backward_input: int
    backward_weight: int
    backward: int
    recompute: int
    offload: int
    reload: int
    offload_alone: int
    reload_alone: int
    send_activation: int
    send_gradient: int
    saved: int
    residue: int
    captured: int
    checkpoint: int
    forward_extra: int
    backward_input_extra: int
    backward_weight_extra: int
    backward_extra: int
    staying: int = 0
    """Units of `saved` that an offload leaves on the device: those of the last `staying_layers` layers."""
    staying_layers: int = 0
    incoming: int = 0
    """Units of the input that comes from the stage before, and of its gradient; part of the `*_extra` that see it."""
    outgoing: int = 0
    """Units of the output that goes to the next stage, and of its gradient; likewise."""

    @property
    def moved(self) -> int:
        """Units that an offload takes to the host."""
        return self.saved - self.staying

    @property
    def work(self) -> int:
        """Compute ticks that a microbatch costs at least, whichever way the backward is run."""
        return self.forward + min(self.backward, self.backward_input + self.backward_weight)


@dataclass(frozen=True)
class Problem:
    """One instance: fixed placement and costs, free order, split, offload and recompute under the caps."""

    devices: int
    microbatches: int
    stages: tuple[Stage, ...]
    link_of: tuple[int | None, ...]
    """Host link of each device; None: it cannot offload."""
    budget: tuple[int, ...]
    """Units per device for everything that is not static; negative when the static part alone is too large."""
    host_budget: int | None
    freedom: Freedom
    tick_ns: int = 1
    unit_bytes: int = 1
    stretch: float = 1.0
    """Largest ratio of a rounded duration to the true one: a bound in ticks x tick_ns / stretch is valid in ns."""

    @property
    def tasks(self) -> int:
        """About how many ops a schedule has."""
        return 4 * len(self.stages) * self.microbatches

    def stages_of(self, device: int) -> list[int]:
        """Return the stages that `device` owns, in model order."""
        return [index for index, stage in enumerate(self.stages) if stage.device == device]

    def can_offload(self, stage: int) -> bool:
        """Whether offloading this stage's activations is allowed, possible and of any use."""
        item = self.stages[stage]
        return self.freedom.offload and self.link_of[item.device] is not None and item.moved > 0

    def can_recompute(self, stage: int) -> bool:
        """Whether recomputing this stage frees memory at all and is allowed."""
        return self.freedom.recompute and self.stages[stage].checkpoint < self.stages[stage].saved


def build(
    profile: Profile, layout: Layout, microbatches: int, caps: Caps, freedom: Freedom, offloaded: float = 1.0
) -> Problem:
    """Return the exact problem in ns and bytes.

    An offload takes the first layers of a stage, as many as hold no more than a share `offloaded` of what it saved, and
    at least one.
    """
    layers = selected(profile.expanded_layers(), layout.selective)
    machine = profile.machine
    devices = max(layout.device_of) + 1
    stages = tuple(_stage(layers, layout, index, machine, offloaded) for index in range(layout.stages))
    fixed = [static_bytes(profile, layout, device) for device in range(devices)]
    links = host_links(machine, devices)
    link_of = [next((n for n, (members, _) in enumerate(links) if d in members), None) for d in range(devices)]
    budget = tuple(caps.device_bytes - size for size in fixed)
    return Problem(devices, microbatches, stages, tuple(link_of), budget, caps.host_bytes, freedom)


def static_bytes(profile: Profile, layout: Layout, device: int) -> int:
    """Return what `device` holds all the time: reserve, weights, gradients, optimizer state."""
    held = statics(profile.expanded_layers(), layout)
    mine = (
        sum(held[begin:end])
        for owner, (begin, end) in zip(layout.device_of, itertools.pairwise(layout.cuts), strict=True)
        if owner == device
    )
    return sum(mine) + value_of(profile.machine.reserve_bytes)


def statics(layers: Sequence[Layer], layout: Layout) -> list[int]:
    """Return the static bytes of each layer; what several layers of a tie share on one device is the first one's."""
    held = [value_of(layer.static_bytes) for layer in layers]
    seen: set[tuple[int, str]] = set()
    for owner, (begin, end) in zip(layout.device_of, itertools.pairwise(layout.cuts), strict=True):
        for index in range(begin, end):
            if (tie := layers[index].tie) is not None:
                held[index] -= value_of(layers[index].tied_bytes) * ((owner, tie) in seen)
                seen.add((owner, tie))
    return held


def host_links(machine: Machine, devices: int) -> list[tuple[list[int], Link]]:
    """Return each host link with the devices behind it; a link without devices is one for each device not named."""
    named = {device for link in machine.links for device in link.devices or ()}
    result: list[tuple[list[int], Link]] = []
    for link in machine.links:
        if link.devices is not None:
            members = [device for device in link.devices if device < devices]
            result += [(members, link)] if members else []
        else:
            result += [([device], link) for device in range(devices) if device not in named]
    return sorted(result, key=lambda pair: pair[0])


def transfer_ns(size: int, bytes_per_s: int, latency_ns: int) -> int:
    """Return latency plus bytes over bandwidth in ns, rounded half up."""
    return latency_ns + (2 * size * NS_PER_S + bytes_per_s) // (2 * bytes_per_s)


def alone(link: Link) -> tuple[int, int]:
    """Return (d2h, h2d) bytes per second while the other direction is idle."""
    return value_of(link.d2h_bytes_per_s), value_of(link.h2d_bytes_per_s)


def duplex(link: Link) -> tuple[int, int]:
    """Return (d2h, h2d) bytes per second while both directions are busy; never more than alone."""
    d2h = link.d2h_bytes_per_s if link.duplex_d2h_bytes_per_s is None else link.duplex_d2h_bytes_per_s
    h2d = link.h2d_bytes_per_s if link.duplex_h2d_bytes_per_s is None else link.duplex_h2d_bytes_per_s
    return min(value_of(d2h), alone(link)[0]), min(value_of(h2d), alone(link)[1])


def message_ns(machine: Machine, size: int, source: int, target: int) -> int:
    """Return the time of a message between two devices; 0 on the same one."""
    if source == target:
        return 0
    pair = {source, target}
    entry = next((p for p in machine.p2p if p.devices is not None and set(p.devices) == pair), None)
    entry = entry or next((p for p in machine.p2p if p.devices is None), None)
    if entry is None:
        return 0
    latency = value_of(entry.latency_ns)
    return latency if entry.bytes_per_s is None else transfer_ns(size, value_of(entry.bytes_per_s), latency)


def _total(costs: Iterable[Cost]) -> int:
    return sum(value_of(cost) for cost in costs)


def _largest(costs: Iterable[Cost]) -> int:
    return max(value_of(cost) for cost in costs)


def fused_ns(layer: Layer) -> int:
    """Return the fused backward, by default the sum of its halves."""
    if layer.backward_ns is not None:
        return value_of(layer.backward_ns)
    return value_of(layer.backward_input_ns) + value_of(layer.backward_weight_ns)


def _stage(layers: list[Layer], layout: Layout, index: int, machine: Machine, offloaded: float) -> Stage:
    mine = in_one_stage(layers[layout.cuts[index] : layout.cuts[index + 1]])
    device = layout.device_of[index]
    before, after = index > 0, index + 1 < layout.stages
    incoming = value_of(layers[layout.cuts[index] - 1].output_bytes) if before else 0
    outgoing = value_of(mine[-1].output_bytes) if after else 0
    saved = _total(layer.saved_bytes for layer in mine)
    leaving = _leaving(mine, offloaded * saved)
    staying = _total(layer.saved_bytes for layer in mine[leaving:])
    busy, alone = _transfers(machine, device, max(layout.device_of) + 1, saved - staying)
    overhead = value_of(machine.op_overhead_ns)
    messages = incoming + outgoing
    return Stage(
        device=device,
        forward=overhead + _total(layer.forward_ns for layer in mine),
        backward_input=overhead + _total(layer.backward_input_ns for layer in mine),
        backward_weight=overhead + _total(layer.backward_weight_ns for layer in mine),
        backward=overhead + sum(fused_ns(layer) for layer in mine),
        recompute=overhead + sum(recompute_ns(layer) for layer in mine),
        offload=busy[0],
        reload=busy[1],
        offload_alone=alone[0],
        reload_alone=alone[1],
        send_activation=message_ns(machine, outgoing, device, layout.device_of[index + 1]) if after else 0,
        send_gradient=message_ns(machine, incoming, device, layout.device_of[index - 1]) if before else 0,
        saved=saved,
        residue=sum(residue_bytes(layer) for layer in mine),
        captured=_total(layer.captured_bytes for layer in mine),
        checkpoint=value_of(mine[0].checkpoint_bytes),
        forward_extra=messages + _largest(layer.forward_transient_bytes for layer in mine),
        backward_input_extra=messages + _largest(layer.backward_input_transient_bytes for layer in mine),
        backward_weight_extra=_largest(layer.backward_weight_transient_bytes for layer in mine),
        backward_extra=messages + _largest(layer.backward_transient_bytes for layer in mine),
        staying=staying,
        staying_layers=len(mine) - leaving,
        incoming=incoming,
        outgoing=outgoing,
    )


def _leaving(layers: list[Layer], size: float) -> int:
    """Return how many layers, from the first on and at least one, save no more than `size` bytes together."""
    held = list(itertools.accumulate(value_of(layer.saved_bytes) for layer in layers))
    return max(1, sum(total <= size for total in held))


def recompute_ns(layer: Layer) -> int:
    """Return the time of a recomputation, by default the forward's."""
    return value_of(layer.forward_ns if layer.recompute_ns is None else layer.recompute_ns)


def residue_bytes(layer: Layer) -> int:
    """Return what stays between the two halves of the backward, by default all that was saved."""
    return value_of(layer.saved_bytes if layer.residue_bytes is None else layer.residue_bytes)


def _transfers(machine: Machine, device: int, devices: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (offload, reload) times while the other direction is busy, and alone."""
    for members, link in host_links(machine, devices):
        if device in members:
            latency = value_of(link.latency_ns)
            busy, idle = (
                (transfer_ns(size, d2h, latency), transfer_ns(size, h2d, latency))
                for d2h, h2d in (duplex(link), alone(link))
            )
            return busy, idle
    return (0, 0), (0, 0)


DURATIONS = (
    "forward",
    "backward_input",
    "backward_weight",
    "backward",
    "recompute",
    "offload",
    "reload",
    "offload_alone",
    "reload_alone",
    "send_activation",
    "send_gradient",
)
SIZES = (
    "saved",
    "residue",
    "captured",
    "checkpoint",
    "staying",
    "forward_extra",
    "backward_input_extra",
    "backward_weight_extra",
    "backward_extra",
    "incoming",
    "outgoing",
)


def coarsen(problem: Problem, reference: int = 0) -> Problem:
    """Return the problem in larger ticks and units, for the solver.

    The tick is the greatest common divisor of all durations if that leaves them small, else 1/64 of the shortest
    compute op that matters (one of at least a tenth of the mean) or less, where `reference` ticks (a known makespan)
    are then still no more than 2^15. Durations are rounded to the nearest
    tick, messages down, and `stretch` is the largest ratio by which a duration grew: scaling any true schedule by it
    and rounding its starts down gives a schedule of the coarse problem, so (coarse optimum) x tick_ns / stretch is a
    lower bound in ns. Sizes are divided by their common divisor, budgets rounded down, which loses nothing.
    """
    times = [getattr(stage, name) for stage in problem.stages for name in DURATIONS]
    tick = _tick([time for time in times if time > 0], problem, reference)
    sizes = [getattr(stage, name) for stage in problem.stages for name in SIZES]
    unit = math.gcd(*sizes) or 1
    stretch = 1.0

    def duration(name: str, value: int) -> int:
        nonlocal stretch
        rounded = value // tick if name.startswith("send") else (2 * value + tick) // (2 * tick)
        if rounded * tick > value > 0:
            stretch = max(stretch, rounded * tick / value)
        return rounded

    stages = tuple(
        replace(
            stage,
            **{name: duration(name, getattr(stage, name)) for name in DURATIONS},
            **{name: getattr(stage, name) // unit for name in SIZES},
        )
        for stage in problem.stages
    )
    return replace(
        problem,
        stages=stages,
        budget=tuple(size // unit for size in problem.budget),
        host_budget=None if problem.host_budget is None else problem.host_budget // unit,
        tick_ns=problem.tick_ns * tick,
        unit_bytes=problem.unit_bytes * unit,
        stretch=stretch,
    )


def _tick(times: list[int], problem: Problem, reference: int) -> int:
    compute = [stage.forward for stage in problem.stages] + [stage.backward for stage in problem.stages]
    shared = math.gcd(*times) if times else 1
    mean = sum(compute) // len(compute)
    shortest = min((time for time in times if 10 * time >= mean), default=1)
    if 256 * shared >= shortest:
        return shared
    fine = reference >> 15
    return max(1, min(shortest // 64, fine) if fine else shortest // 64)
