"""The scheduling problem that all planning sees: integer durations in ticks, integer memory in units.

All sums over layers and all rounding live here. `build` is exact (1 tick = 1 ns, 1 unit = 1 byte); `coarsen` rounds
for the solver and says by how much its bounds must be relaxed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

from optpipe_compiler.documents.profile import in_one_stage, of_unit, on_device, selected, value_of
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optpipe_compiler.documents.ir import Units
    from optpipe_compiler.documents.profile import Cost, Layer, Machine, Profile
    from optpipe_compiler.model.placement import Layout

NS_PER_S = 10**9
LONGEST_NS = 10**15
"""A transfer, and the work of a microbatch, at most, 11 days: sums are exact in 64 bits, in thousandths, too."""
Ticks = int
Size = int

OPS_OF_A_UNIT = 4
"""About how many ops a schedule has for each stage and unit."""


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
class Slicing:
    """How long microbatches are, and where they are cut into slices; all have the same number of slices."""

    tokens: int
    """Of the sequences that the profile's costs are for."""
    cuts: tuple[tuple[int, ...], ...]
    """By shape of microbatches: the token at which each slice begins, and the length."""
    shape_of: tuple[int, ...]
    """By microbatch."""

    @staticmethod
    def of(units: Units) -> Slicing:
        """Return the slicing that a file has."""
        return Slicing(units.tokens, tuple(map(tuple, units.cuts)), tuple(units.shape_of))

    @property
    def slices(self) -> int:
        """Slices of a microbatch."""
        return len(self.cuts[0]) - 1

    @cached_property
    def counts(self) -> list[int]:
        """Microbatches of each shape."""
        if len(self.cuts) == 1:
            return [len(self.shape_of)]  # may be 10^8
        of_shape = Counter(self.shape_of)
        return [of_shape[shape] for shape in range(len(self.cuts))]

    @property
    def class_counts(self) -> list[int]:
        """Units of each shape and slice."""
        return [count for count in self.counts for _ in range(self.slices)]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each microbatch."""
        return tuple(self.cuts[shape][-1] for shape in self.shape_of)


@dataclass(frozen=True)
class Stage:
    """One stage's durations (ticks) and sizes (units) per unit: a microbatch, or a slice of one.

    `offload` and `reload` are the times while the link's other direction is busy, `*_alone` those while it is not.
    `*_busy` is what the copies take from compute: the lane runs nothing for so long behind the forward of what is
    offloaded, and before the first backward of what was reloaded. `*_extra` exists only while the op runs: its
    transient bytes and the messages that it reads and writes.
    """

    device: int
    forward: Ticks
    backward_input: Ticks
    backward_weight: Ticks
    backward: Ticks
    recompute: Ticks
    offload: Ticks
    reload: Ticks
    offload_alone: Ticks
    reload_alone: Ticks
    send_activation: Ticks
    send_gradient: Ticks
    saved: Size
    residue: Size
    captured: Size
    checkpoint: Size
    forward_extra: Size
    backward_input_extra: Size
    backward_weight_extra: Size
    backward_extra: Size
    staying: Size = 0
    """Units of `saved` that an offload leaves on the device: those of the last `staying_layers` layers, and the carry,
    keys and values that later slices read. A recompute leaves the carry, too: it is part of `checkpoint`."""
    staying_layers: int = 0
    incoming: Size = 0
    """Units of the input that comes from the stage before, and of its gradient; part of the `*_extra` that see it."""
    outgoing: Size = 0
    """Units of the output that goes to the next stage, and of its gradient; likewise."""
    accumulators: Size = 0
    """Units that the backward of the last slice takes for the gradients of all carried keys and values."""
    offload_busy: Ticks = 0
    reload_busy: Ticks = 0
    gradient: Size = 0
    """Units of these that the end of the unit's own backward frees."""

    @property
    def moved(self) -> int:
        """Units that an offload takes to the host."""
        return self.saved - self.staying

    @property
    def work(self) -> int:
        """Compute ticks that a microbatch costs at least, whichever way the backward is run."""
        return self.forward + min(self.backward, self.backward_input + self.backward_weight)


DURATIONS, SIZES = (tuple(one.name for one in fields(Stage) if one.type == of) for of in ("Ticks", "Size"))
"""The figures of a stage; first the durations of ops, by `schedule.Kind`."""
BETWEEN = ("send_activation", "send_gradient", "offload_busy", "reload_busy")
"""Durations of what is no op."""


@dataclass(frozen=True)
class Problem:
    """One instance: fixed placement and costs, free order, split, offload and recompute under the caps.

    What flows are units: microbatches or, where they are cut, all their slices; unit u is slice u % slices of
    microbatch u // slices. Forwards run in the order of units, backwards of both kinds by microbatch, slices
    descending: the one at position j is of unit `back(j)`, and that of unit u at position `back(u)`. Planning calls a
    unit a microbatch.
    """

    devices: int
    microbatches: int
    """Units."""
    stages: tuple[Stage, ...]
    """Of the mean unit, rounded down; `classes` has those of all units where they may differ."""
    link_of: tuple[int | None, ...]
    """Host link of each device; None: it cannot offload."""
    budget: tuple[int, ...]
    """Units per device for everything that is not static; negative when the static part alone is too large."""
    host_budget: int | None
    """Units for the offloads of all devices; None: unlimited."""
    freedom: Freedom
    tick_ns: int = 1
    unit_bytes: int = 1
    stretch: float = 1.0
    """Largest ratio of a rounded duration to the true one: a bound in ticks x tick_ns / stretch is valid in ns."""
    slicing: Slicing | None = None
    classes: tuple[tuple[Stage, ...], ...] = ()
    """By shape and slice, the figures of each stage; empty where, and only where, there is no `slicing`."""
    hosts: tuple[tuple[tuple[int, ...], int], ...] = ()
    """Of each host its devices, and units for their offloads; a device is on one host at most."""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    def __hash__(self) -> int:
        """Problems are keys of caches, and those of slices have many figures: they are hashed once."""
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        """Leave out the hash: that of None differs from process to process."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def host_limits(self) -> list[tuple[tuple[int, ...], int]]:
        """Which devices' offloads together have which limit in units: those of a host, and all."""
        every = [] if self.host_budget is None else [(tuple(range(self.devices)), self.host_budget)]
        return [*self.hosts, *every]

    def fits_hosts(self, host_peaks: Sequence[int]) -> bool:
        """Whether devices whose offloads hold at most this, each, keep to all limits in every execution."""
        return all(sum(host_peaks[d] for d in devices) <= limit for devices, limit in self.host_limits)

    @property
    def slices(self) -> int:
        """Units of a microbatch."""
        return 1 if self.slicing is None else self.slicing.slices

    @property
    def whole(self) -> int:
        """Microbatches."""
        return self.microbatches // self.slices

    def back(self, unit: int) -> int:
        """Return the position of a unit among the backwards of a stage, or the unit at a position: it is the same."""
        return unit + self.slices - 1 - 2 * (unit % self.slices)

    def class_of(self, unit: int) -> int:
        """Return which of `classes` a unit belongs to."""
        if self.slicing is None:
            return 0
        return self.slicing.shape_of[unit // self.slices] * self.slices + unit % self.slices

    def at(self, stage: int, unit: int) -> Stage:
        """Return the figures of a stage for a unit."""
        return self.by_class[self.class_of(unit)][stage]

    @property
    def by_class(self) -> tuple[tuple[Stage, ...], ...]:
        """The figures of all stages by class of units; one class where all units are whole and equal."""
        return self.classes or (self.stages,)

    @property
    def device_of(self) -> tuple[int, ...]:
        """The device of each stage."""
        return tuple(stage.device for stage in self.stages)

    @property
    def is_partial(self) -> bool:
        """Whether an offload leaves layers of some stage on the device, as published schedules never do."""
        return any(stage.staying_layers for stage in self.stages)

    @property
    def links(self) -> int:
        """Number of host links."""
        return 1 + max((link for link in self.link_of if link is not None), default=-1)

    @property
    def busiest(self) -> int:
        """Compute ticks that a microbatch costs the busiest device at least."""
        return max(sum(self.stages[s].work for s in self.stages_of(d)) for d in range(self.devices))

    def sum_of(self, names: Sequence[str]) -> int:
        """Return what these figures of all stages and units add up to, each unit's as the largest one's."""
        of_units: list[int] = [sum(getattr(s, name) for s in of for name in names) for of in self.by_class]
        return self.microbatches * max(of_units)

    def changed(self, of: Callable[[tuple[Stage, ...]], tuple[Stage, ...]]) -> Problem:
        """Return the problem with the stages of each class changed."""
        return replace(self, stages=of(self.stages), classes=tuple(map(of, self.classes)))

    @property
    def per_device(self) -> int:
        """Stages of a device, where all have as many."""
        return len(self.stages) // self.devices

    @property
    def turn_of(self) -> list[int]:
        """How many stages the owner of each has before it."""
        before, found = [0] * self.devices, []
        for stage in self.stages:
            found.append(before[stage.device])
            before[stage.device] += 1
        return found

    @property
    def tasks(self) -> int:
        """About how many ops a schedule has."""
        return OPS_OF_A_UNIT * len(self.stages) * self.microbatches

    def stages_of(self, device: int) -> list[int]:
        """Return the stages that `device` owns, in model order."""
        return [index for index, stage in enumerate(self.stages) if stage.device == device]

    def can_offload(self, stage: int) -> bool:
        """Whether offloading this stage's activations is allowed, possible and of any use."""
        here = self.link_of[self.stages[stage].device]
        return self.freedom.offload and here is not None and self._can_shrink[stage][0]

    def can_recompute(self, stage: int) -> bool:
        """Whether recomputing this stage frees memory at all and is allowed."""
        return self.freedom.recompute and self._can_shrink[stage][1]

    @cached_property
    def _can_shrink(self) -> list[tuple[bool, bool]]:
        """By stage, whether an offload moves anything of some unit, and whether a recompute makes it hold less.

        The mean unit, rounded down, does not say so: the last slice alone may give up what later ones would read.
        """
        of_stages = zip(*self.by_class, strict=True)
        return [(any(one.moved > 0 for one in of), any(one.checkpoint < one.saved for one in of)) for of in of_stages]

    def able(self, stage: int) -> tuple[bool, bool, bool]:
        """Return what may become of this stage's activations, by `schedule.Mode`."""
        return True, self.can_offload(stage), self.can_recompute(stage)


def build(
    profile: Profile,
    layout: Layout,
    microbatches: int,
    caps: Caps,
    freedom: Freedom,
    offloaded: float = 1.0,
    slicing: Slicing | None = None,
) -> Problem:
    """Return the exact problem in ns and bytes.

    An offload takes the first layers of a stage, as many as hold no more than a share `offloaded` of what it saved, and
    at least one.
    """
    layers = selected(profile.expanded_layers(), layout.selective)
    machine = profile.machine.in_order(layout.order)
    devices = layout.devices
    classes = _classes(layers, layout, machine, offloaded, slicing)
    stages = _mean(classes, slicing)
    links = machine.host_links(devices)
    link_of = [next((n for n, (members, _) in enumerate(links) if d in members), None) for d in range(devices)]
    budget = tuple(caps.device_bytes - size for size in static_bytes(profile, layout))
    units = microbatches * (1 if slicing is None else slicing.slices)
    problem = Problem(
        devices, units, stages, tuple(link_of), budget, caps.host_bytes, freedom, hosts=hosts_of(machine, devices)
    )
    return problem if slicing is None else replace(problem, slicing=slicing, classes=classes)


def hosts_of(machine: Machine, devices: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return the machine's hosts with the first `devices` devices on them: which of these, and bytes for offloads."""
    found = ((tuple(d for d in host.devices if d < devices), value_of(host.memory_bytes)) for host in machine.hosts)
    return tuple((members, limit) for members, limit in found if members)


def _classes(
    layers: list[Layer], layout: Layout, machine: Machine, offloaded: float, slicing: Slicing | None
) -> tuple[tuple[Stage, ...], ...]:
    """Return the figures of each stage by shape and slice."""
    parts: list[_Part | None] = [None]
    if slicing is not None:
        parts = [_Part(slicing, cuts, slice) for cuts in slicing.cuts for slice in range(slicing.slices)]
    return tuple(
        tuple(_stage(layers, layout, index, machine, offloaded, part) for index in range(layout.stages))
        for part in parts
    )


def _mean(classes: tuple[tuple[Stage, ...], ...], slicing: Slicing | None) -> tuple[Stage, ...]:
    """Return the figures of the mean unit, each rounded down."""
    if slicing is None:
        return classes[0]
    count = slicing.class_counts

    def mean(index: int) -> Stage:
        ones = [stages[index] for stages in classes]
        means = {
            name: sum(map(int.__mul__, count, (getattr(one, name) for one in ones))) // sum(count)
            for name in (*DURATIONS, *SIZES)
        }
        return replace(ones[0], **means)

    return tuple(map(mean, range(len(classes[0]))))


class _Part:
    """A slice of a microbatch: what its layers cost, and what it carries."""

    def __init__(self, slicing: Slicing, cuts: tuple[int, ...], slice: int) -> None:
        self.tokens = cuts[slice], cuts[slice + 1]
        self.whole = slicing.tokens
        self.is_cut = slicing.slices > 1
        self.is_last = slice == slicing.slices - 1
        self.lengths = [end - begin for begin, end in itertools.pairwise(cuts)]

    def of(self, layers: list[Layer]) -> list[Layer]:
        """Return what layers that are in one stage, or send to another, cost for the slice."""
        return [of_unit(layer, self.tokens, self.whole, is_cut=self.is_cut) for layer in layers]

    def carried(self, layer: Layer) -> int:
        """Return the units of keys and values that stay for later slices."""
        if self.is_last or layer.slices is None:
            return 0
        return self._scaled(value_of(layer.slices.carry_bytes), self.tokens[1] - self.tokens[0])

    def gradients(self, layers: list[Layer]) -> tuple[int, int]:
        """Return the units of gradients of carries that the slice's backward takes, and gives back."""
        figures = [layer.slices.gradient_or_carry_bytes for layer in layers if layer.slices is not None]
        if self.is_last:
            return sum(self._scaled(one, length) for length in self.lengths[:-1] for one in figures), 0
        return 0, sum(self._scaled(one, self.tokens[1] - self.tokens[0]) for one in figures)

    def _scaled(self, size: int, tokens: int) -> int:
        return -(-size * tokens // self.whole)


def static_bytes(profile: Profile, layout: Layout) -> list[int]:
    """Return what each device holds all the time: reserve, weights, gradients, optimizer state."""
    held = statics(profile.expanded_layers(), layout)
    found = [value_of(profile.machine.reserve_bytes)] * layout.devices
    for owner, begin, end in layout.by_stage:
        found[owner] += sum(held[begin:end])
    return found


def statics(layers: Sequence[Layer], layout: Layout) -> list[int]:
    """Return the static bytes of each layer; what several layers of a tie share on one device is the first one's."""
    held = [value_of(layer.static_bytes) for layer in layers]
    seen: set[tuple[int, str]] = set()
    for owner, begin, end in layout.by_stage:
        for index in range(begin, end):
            if (tie := layers[index].tie) is not None:
                held[index] -= value_of(layers[index].tied_bytes) * ((owner, tie) in seen)
                seen.add((owner, tie))
    return held


def transfer_ns(size: int, bytes_per_s: int, latency_ns: int) -> int:
    """Return latency plus bytes over bandwidth in ns, rounded half up; raise BadInput where that is too long."""
    found = latency_ns + (2 * size * NS_PER_S + bytes_per_s) // (2 * bytes_per_s)
    if found > LONGEST_NS:
        raise BadInput(
            f"{size} bytes at {bytes_per_s} bytes/s take {found} ns on their way, expected at most {LONGEST_NS}"
        )
    return found


def message_ns(machine: Machine, size: int, source: int, target: int) -> int:
    """Return the time of a message between two devices; 0 on the same one."""
    entry = None if source == target else machine.p2p_of(source, target)
    if entry is None:
        return 0
    size, speed = (0, 1) if entry.bytes_per_s is None else (size, value_of(entry.bytes_per_s))
    return transfer_ns(size, speed, value_of(entry.latency_ns))


def messages_overhead_ns(machine: Machine, device_of: Sequence[int], stage: int) -> int:
    """Return what a forward's or a backward's messages take from its device's compute lane; `device_of` by stage.

    An activation comes and one goes; a gradient comes from where that went, and one goes to where that came from.
    """
    device, found = device_of[stage], 0
    for other in (stage - 1, stage + 1):
        if 0 <= other < len(device_of) and device_of[other] != device:
            entry = machine.p2p_of(device, device_of[other])
            found += 0 if entry is None else value_of(entry.overhead_ns)
    return found


def _total(costs: Iterable[Cost]) -> int:
    return sum(value_of(cost) for cost in costs)


def _largest(costs: Iterable[Cost]) -> int:
    return max(value_of(cost) for cost in costs)


def _stage(
    layers: list[Layer], layout: Layout, index: int, machine: Machine, offloaded: float, part: _Part | None
) -> Stage:
    mine = in_one_stage(layers[layout.cuts[index] : layout.cuts[index + 1]])
    device = layout.device_of[index]
    before, after = index > 0, index + 1 < layout.stages
    leaving = _leaving(mine, offloaded * _total(layer.saved_bytes for layer in mine))
    source = layers[layout.cuts[index] - 1 :][:1] if before else []
    carried = [0] * len(mine)
    accumulators = gradient = 0
    if part is not None:
        carried, (accumulators, gradient) = [part.carried(layer) for layer in mine], part.gradients(mine)
        mine, source = part.of(mine), part.of(source)
    mine = [on_device(layer, machine, device) for layer in mine]
    incoming = _total(layer.output_bytes for layer in source)
    outgoing = value_of(mine[-1].output_bytes) if after else 0
    saved = _total(layer.saved_bytes for layer in mine)
    staying = _total(layer.saved_bytes for layer in mine[leaving:]) + sum(carried[:leaving])
    overhead = value_of(machine.op_overhead_ns)
    moved = overhead + messages_overhead_ns(machine, layout.device_of, index)
    messages = incoming + outgoing
    return Stage(
        device=device,
        forward=moved + _total(layer.forward_ns for layer in mine),
        backward_input=moved + _total(layer.backward_input_ns for layer in mine),
        backward_weight=overhead + _total(layer.backward_weight_ns for layer in mine),
        backward=moved + sum(layer.fused_ns for layer in mine),
        recompute=overhead + sum(layer.recompute_or_forward_ns for layer in mine),
        **_transfers(machine, device, layout.devices, saved - staying),
        send_activation=message_ns(machine, outgoing, device, layout.device_of[index + 1]) if after else 0,
        send_gradient=message_ns(machine, incoming, device, layout.device_of[index - 1]) if before else 0,
        saved=saved,
        residue=sum(layer.residue_or_saved_bytes for layer in mine),
        captured=_total(layer.captured_bytes for layer in mine),
        checkpoint=value_of(mine[0].checkpoint_bytes) + sum(carried),
        forward_extra=messages + _largest(layer.forward_transient_bytes for layer in mine),
        backward_input_extra=messages + _largest(layer.backward_input_transient_bytes for layer in mine),
        backward_weight_extra=_largest(layer.backward_weight_transient_bytes for layer in mine),
        backward_extra=messages + _largest(layer.backward_transient_bytes for layer in mine),
        staying=staying,
        staying_layers=len(mine) - leaving,
        incoming=incoming,
        outgoing=outgoing,
        accumulators=accumulators,
        gradient=gradient,
    )


def _leaving(layers: list[Layer], size: float) -> int:
    """Return how many layers, from the first on and at least one, save no more than `size` bytes together."""
    held = list(itertools.accumulate(value_of(layer.saved_bytes) for layer in layers))
    return max(1, sum(total <= size for total in held))


def busy_ns(copy_ns: int, permille: int) -> int:
    """Return what a copy takes from compute, rounded half up; `copy_ns` is its time alone."""
    return (2 * copy_ns * permille + 1000) // 2000


def _transfers(machine: Machine, device: int, devices: int, size: int) -> dict[str, int]:
    """Return the durations of a stage's copies, by their names: of so many bytes, 0 without a host link."""
    found = {f"{copy}{when}": 0 for copy in ("offload", "reload") for when in ("", "_alone", "_busy")}
    for link in (link for members, link in machine.host_links(devices) if device in members):
        latency = value_of(link.latency_ns)
        for copy, duplex, speed in zip(("offload", "reload"), link.duplex, link.alone, strict=True):
            alone = transfer_ns(size, speed, latency)
            found |= {copy: transfer_ns(size, duplex, latency), f"{copy}_alone": alone}
            found[f"{copy}_busy"] = busy_ns(alone, value_of(link.compute_permille))
        return found
    return found


def coarsen(problem: Problem, reference: int = 0) -> Problem:
    """Return the problem in larger ticks and units, for the solver.

    The tick is the greatest common divisor of all durations if that leaves them small, else 1/64 of the shortest
    compute op that matters (one of at least a tenth of the mean) or less, where `reference` ticks (a known makespan)
    are then still no more than 2^15. Durations are rounded to the nearest tick, messages and what copies take from
    compute down, and `stretch` is the largest ratio by which a duration grew: scaling any true schedule by it and
    rounding its ends down gives a schedule of the coarse problem, whose optimum so is a bound (`proven_ns`). Sizes are
    divided by their common divisor, budgets rounded down, which loses nothing.
    """
    every = [stage for stages in problem.by_class for stage in stages]
    times = [getattr(stage, name) for stage in every for name in DURATIONS]
    tick = _tick([time for time in times if time > 0], problem, reference)
    sizes = [getattr(stage, name) for stage in every for name in SIZES]
    unit = math.gcd(*sizes) or 1
    stretch = 1.0

    def duration(name: str, value: int) -> int:
        nonlocal stretch
        rounded = value // tick if name in BETWEEN else (2 * value + tick) // (2 * tick)
        if rounded * tick > value > 0:
            stretch = max(stretch, rounded * tick / value)
        return rounded

    def coarse(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        return tuple(
            replace(
                stage,
                **{name: duration(name, getattr(stage, name)) for name in DURATIONS},
                **{name: getattr(stage, name) // unit for name in SIZES},
            )
            for stage in stages
        )

    return replace(
        problem.changed(coarse),
        budget=tuple(size // unit for size in problem.budget),
        host_budget=None if problem.host_budget is None else problem.host_budget // unit,
        hosts=tuple((devices, limit // unit) for devices, limit in problem.hosts),
        tick_ns=problem.tick_ns * tick,
        unit_bytes=problem.unit_bytes * unit,
        stretch=stretch,
    )


def proven_ns(coarse: Problem, ticks: int, *, is_span: bool) -> int:
    """Return a lower bound in ns from one in ticks of the coarse problem.

    A makespan begins at 0 and ends at a time that is rounded down. A span of one of several devices begins at a time
    that is rounded, too, so it may have grown by less than a tick: in the true problem an op may do best to start
    between two ticks, even where all times are whole ticks.
    """
    if not is_span or coarse.devices == 1:
        return int(ticks * coarse.tick_ns / coarse.stretch)
    less = int((ticks - 1) * coarse.tick_ns / coarse.stretch)
    return less + 1 if coarse.stretch == 1 else less


def _tick(times: list[int], problem: Problem, reference: int) -> int:
    compute = [stage.forward for stage in problem.stages] + [stage.backward for stage in problem.stages]
    shared = math.gcd(*times) if times else 1
    mean = sum(compute) // len(compute)
    shortest = min((time for time in times if 10 * time >= mean), default=1)
    if 256 * shared >= shortest:
        return shared
    fine = reference >> 15
    return max(1, min(shortest // 64, fine) if fine else shortest // 64)
