"""Rules on a schedule next to its profile: every byte figure and every cost is the profile's."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec

from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Profile, Selective, Sliceable, value_of
from optpipe_compiler.documents.units import counted
from optpipe_compiler.verify.forecast import transfer_ns
from optpipe_compiler.verify.report import Violation
from optpipe_compiler.verify.tables import FIXED, PER_LAYER, too_large

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Cost
    from optpipe_compiler.verify.placed import PlacedOps


def numbers(profile: Profile) -> Iterator[Violation]:
    """Every integer of the profile is below 2^63."""
    for part, name in ((profile.machine, "machine"), (profile.layers, "layers")):
        yield from too_large(msgspec.to_builtins(part), f"profile: $.{name}", "profile-numbers")


def layers(schedule: ir.Schedule, profile: Profile) -> Iterator[Violation]:
    """The stages cut as many layers as the profile has."""
    count = sum(layer.count for layer in profile.layers)
    if schedule.setup.layers != count:
        message = f"the schedule is for {counted(schedule.setup.layers, 'layer')}, the profile has {count}"
        yield Violation("profile-layers", message)


def devices(schedule: ir.Schedule, profile: Profile) -> Iterator[Violation]:
    """Where devices differ the profile knows each of them."""
    known = profile.machine.time_permille
    if known is not None and len(known) < len(schedule.devices):
        message = (
            f"the schedule has {counted(len(schedule.devices), 'device')}, the profile's times are of {len(known)}"
        )
        yield Violation("profile-times", message)


def setup(schedule: ir.Schedule, profile: Profile) -> Iterator[Violation]:
    """The reserve and the model are the profile's."""
    reserve = value_of(profile.machine.reserve_bytes)
    if schedule.setup.reserve_bytes != reserve:
        message = f"setup.reserve_bytes is {schedule.setup.reserve_bytes}, the profile has {reserve}"
        yield Violation("profile-bytes", message)
    if schedule.model != profile.model:
        yield Violation("profile-model", "the schedule's model is not the one that the profile measured")


def units(schedule: ir.Schedule, profile: Profile, expanded: list[Layer]) -> Iterator[Violation]:
    """Slices and lengths are in tokens of the profile's sequences; only layers that say how are cut."""
    units = schedule.setup.units
    if isinstance(units, msgspec.UnsetType):
        return
    if units.tokens != profile.tokens:
        message = f"setup.units.tokens is {units.tokens}, the sequences of the profile have {profile.tokens}"
        yield Violation("profile-units", message)
    if schedule.setup.slices > 1:
        whole = [layer.name for layer in expanded if layer.slices is None]
        if whole:
            yield Violation("profile-units", f"the schedule cuts sequences, which layer {whole[0]!r} needs as a whole")


def stage_bytes(placed: PlacedOps, expanded: list[Layer]) -> Iterator[Violation]:
    """Every byte figure of a stage is that of its layers; what crosses its ends is the output of the layer before."""
    tied: set[tuple[int, str]] = set()
    units = placed.schedule.setup.units
    differences = _Differences("profile-bytes")
    for stage in placed.stages:
        first, end = stage.layers
        mine = expanded[first:end]
        light = [_light(layer) if first + n in stage.selective_layers else None for n, layer in enumerate(mine)]
        yield from _unknown_light(stage, mine)
        expected: dict[str, object] = {
            field: [_bytes(layer, field, one) for layer, one in zip(mine, light, strict=True)] for field in PER_LAYER
        }
        saved = [_saved(layer, mine[n - 1] if n else None, light[n]) for n, layer in enumerate(mine)]
        expected["saved_bytes"] = saved
        expected["residue_bytes"] = [
            min(_bytes(layer, "residue_bytes", one), here + _bytes(layer, "captured_bytes", one))
            for layer, here, one in zip(mine, saved, light, strict=True)
        ]
        expected["static_bytes"] = sum(value_of(layer.static_bytes) for layer in mine) - _shared_weights(
            stage, mine, tied
        )
        expected["input_bytes"] = value_of(expanded[first - 1].output_bytes) if first else 0
        expected["output_bytes"] = value_of(expanded[end - 1].output_bytes) if end < len(expanded) else 0
        for field, figure in expected.items():
            differences.see(stage.stage, field, getattr(stage, field), figure)
        if not isinstance(stage.carry, msgspec.UnsetType):
            slices = [layer.slices or Sliceable() for layer in mine]
            differences.see(
                stage.stage, "carry.bytes", stage.carry.bytes, [value_of(one.carry_bytes) for one in slices]
            )
            gradients = [
                one.carry_bytes if one.carry_gradient_bytes is None else one.carry_gradient_bytes for one in slices
            ]
            for field, costs in (
                ("gradient_bytes", gradients),
                ("forward_transient_bytes", [one.forward_prefix_bytes for one in slices]),
                ("backward_transient_bytes", [one.backward_prefix_bytes for one in slices]),
            ):
                differences.see(stage.stage, f"carry.{field}", getattr(stage.carry, field), list(map(value_of, costs)))
        for field, parts in _fixed(mine, is_whole=isinstance(units, msgspec.UnsetType)).items():
            found = None if isinstance(stage.fixed, msgspec.UnsetType) else getattr(stage.fixed, field)
            differences.see(stage.stage, f"fixed.{field}", found, parts)
    yield from differences.violations()


def _shared_weights(stage: ir.Stage, mine: list[Layer], tied: set[tuple[int, str]]) -> int:
    """What the layers of a stage share with earlier layers of their ties on the same device, which `tied` names."""
    shared = 0
    for layer in mine:
        if layer.tie is not None:
            if (stage.device, layer.tie) in tied:
                shared += value_of(layer.tied_bytes)
            tied.add((stage.device, layer.tie))
    return shared


def _fixed(layers: list[Layer], *, is_whole: bool) -> dict[str, list[int] | None]:
    """The parts of transient bytes that do not scale with tokens; None where there are none, or units are whole."""
    found = {}
    for field in FIXED:
        name = field.replace("_transient_", "_fixed_")
        found[field] = [value_of(getattr(layer.slices or Sliceable(), name)) for layer in layers]
    if is_whole or not any(map(any, found.values())):
        return dict.fromkeys(FIXED)
    return dict(found)


def _light(layer: Layer) -> Selective:
    """What the profile says of selective recompute in a layer; nothing: that it changes nothing."""
    saved, captured = layer.saved_bytes, layer.captured_bytes
    return layer.selective or Selective(saved_bytes=saved, captured_bytes=captured)


def _unknown_light(stage: ir.Stage, mine: list[Layer]) -> Iterator[Violation]:
    for layer in stage.selective_layers:
        if mine[layer - stage.layers[0]].selective is None:
            message = f"stage {stage.stage} has selective recompute of layer {layer}, of which the profile knows none"
            yield Violation("profile-bytes", message)


def _saved(layer: Layer, before: Layer | None, light: Selective | None) -> int:
    """What a layer saves in its stage: without what the layer of its chain before it has saved, but never less than its
    input."""
    saved, shared = _bytes(layer, "saved_bytes", light), value_of(layer.shared_bytes)
    if before is None or not shared:
        return saved
    chains = [one.name if one.chain is None else one.chain for one in (before, layer)]
    if chains[0] != chains[1]:
        return saved
    return max(saved - shared, value_of(layer.checkpoint_bytes))


def _bytes(layer: Layer, field: str, light: Selective | None) -> int:
    """Return a figure of a layer, with selective recompute (`light`) or without."""
    if field == "residue_bytes" and layer.residue_bytes is None:
        return value_of(layer.saved_bytes)
    figure = value_of(getattr(layer, field))
    if light is None:
        return figure
    if field in ("saved_bytes", "captured_bytes"):
        return value_of(getattr(light, field))
    if field == "forward_transient_bytes":  # cheap tensors are freed when the forward is over
        return figure + value_of(layer.saved_bytes) - value_of(light.saved_bytes)
    if field in ("backward_input_transient_bytes", "backward_transient_bytes"):
        return figure + value_of(light.transient_bytes)
    return figure


class _Differences:
    """What stages or links have otherwise than the profile, for one rule: one cost of it is in many of them."""

    def __init__(self, rule: str, what: str = "stage") -> None:
        self.rule, self.what = rule, what
        self.fields: dict[str, list[tuple[int, object, object]]] = {}
        self.parts: list[str] = []
        """What differs once."""

    def see(self, number: int, field: str, found: object, expected: object) -> None:
        """Remember what differs."""
        if found != expected:
            self.fields.setdefault(field, []).append((number, found, expected))

    def violations(self) -> Iterator[Violation]:
        """Yield one violation, of the first difference in each field and of how many others there are; or none."""
        parts = list(self.parts)
        for field, found in self.fields.items():
            number, here, expected = found[0]
            others = len(found) - 1
            also = "" if not others else f", and {others} other {self.what}{'s' if others > 1 else ''} likewise"
            parts.append(f"{field} of {self.what} {number} is {here}, by the profile it is {expected}{also}")
        if parts:
            yield Violation(self.rule, "; ".join(parts))


def stage_times(placed: PlacedOps, profile: Profile, expanded: list[Layer]) -> Iterator[Violation]:
    """The time of a stage's op is the sum over its layers plus the overheads of an op and of its messages."""
    forecast, differences = placed.schedule.forecast, _Differences("profile-times")
    overhead = value_of(profile.machine.op_overhead_ns)
    if forecast.op_overhead_ns != overhead:
        differences.parts.append(f"forecast.op_overhead_ns is {forecast.op_overhead_ns}, the profile has {overhead}")
    for cost in forecast.stages:
        for field in ("forward_ns", "backward_input_ns", "backward_weight_ns", "backward_ns"):
            expected = sum(_layer_times(placed, profile.machine, cost, expanded, field)) + overhead
            if field != "backward_weight_ns":
                expected += _message_overheads(placed, profile.machine, cost.stage)
            differences.see(cost.stage, field, getattr(cost, field), expected)
        again = _layer_times(placed, profile.machine, cost, expanded, "recompute_ns")
        differences.see(cost.stage, "recompute_ns", cost.recompute_ns, again)
    yield from differences.violations()


def _message_overheads(placed: PlacedOps, machine: Machine, stage: int) -> int:
    """Return the overheads of the messages with the stages before and behind, where these are on other devices."""
    device, found = placed.stages[stage].device, 0
    for peer in (placed.peer(stage, -1), placed.peer(stage, 1)):
        entry = None if peer is None else _p2p(machine, device, peer)
        found += 0 if entry is None else value_of(entry.overhead_ns)
    return found


def _layer_times(
    placed: PlacedOps, machine: Machine, cost: ir.StageCost, expanded: list[Layer], field: str
) -> list[int]:
    """Return the time of one kind of op by layer, for the unit that the record is for, on the stage's device."""
    slowness = Fraction(1)
    if machine.time_permille is not None:
        slowness = Fraction(machine.time_permille[placed.stages[cost.stage].device], 1000)
    stage, found = placed.stages[cost.stage], []
    tokens, whole = _tokens(placed.schedule.setup, cost)
    for number in range(*stage.layers):
        layer, time = expanded[number], _time(expanded[number], field)
        if number in stage.selective_layers and field in ("backward_input_ns", "backward_ns"):
            time += value_of(_light(layer).recompute_ns)
        time = _of_unit(layer, field, time, tokens, whole, placed.slices > 1)
        found.append(math.floor(time * slowness + Fraction(1, 2)))
    return found


def _tokens(setup: ir.Setup, cost: ir.StageCost) -> tuple[tuple[int, int], int]:
    """Return the tokens that the costs are for, and how many those of the profile are for."""
    if isinstance(setup.units, msgspec.UnsetType) or isinstance(cost.shape, msgspec.UnsetType):
        return (0, 1), 1
    slice = 0 if isinstance(cost.slice, msgspec.UnsetType) else cost.slice
    cuts = setup.units.cuts[cost.shape]
    return (cuts[slice], cuts[slice + 1]), setup.units.tokens


def _of_unit(layer: Layer, field: str, time: int, tokens: tuple[int, int], whole: int, is_cut: bool) -> int:
    """Return (T - X) (b - a) / S + X (b^2 - a^2) / S^2, to the nearest ns, and the overhead of a slice."""
    begin, end = tokens
    slices = layer.slices or Sliceable()
    attention = {
        "forward_ns": value_of(slices.forward_attention_ns),
        "recompute_ns": min(value_of(slices.forward_attention_ns), time),
        "backward_weight_ns": 0,
    }.get(field, value_of(slices.backward_input_attention_ns))
    exact = Fraction((time - attention) * (end - begin), whole) + Fraction(attention * (end**2 - begin**2), whole**2)
    halves = value_of(slices.backward_input_overhead_ns), value_of(slices.backward_weight_overhead_ns)
    fused = sum(halves) if slices.backward_overhead_ns is None else value_of(slices.backward_overhead_ns)
    forward = value_of(slices.forward_overhead_ns)
    overhead = {"forward_ns": forward, "recompute_ns": forward, "backward_ns": fused}
    overhead |= {"backward_input_ns": halves[0], "backward_weight_ns": halves[1]}
    return math.floor(exact + Fraction(1, 2)) + (overhead[field] if is_cut else 0)


def _time(layer: Layer, field: str) -> int:
    """Return a time of a layer; absent: the sum of the halves for backward_ns, the forward for recompute_ns."""
    cost: Cost | None = getattr(layer, field)
    if cost is not None:
        return value_of(cost)
    if field == "backward_ns":
        return value_of(layer.backward_input_ns) + value_of(layer.backward_weight_ns)
    return value_of(layer.forward_ns)


def message_times(placed: PlacedOps, machine: Machine) -> Iterator[Violation]:
    """A message to another device takes latency + round(bytes * 10^9 / bandwidth) of the pair's p2p entry."""
    differences = _Differences("profile-p2p")
    for cost in placed.schedule.forecast.stages:
        stage = placed.stages[cost.stage]
        (begin, end), whole = _tokens(placed.schedule.setup, cost)
        after, before = placed.peer(stage.stage, 1), placed.peer(stage.stage, -1)
        activation = _message_ns(machine, stage.device, after, -(-stage.output_bytes * (end - begin) // whole))
        gradient = _message_ns(machine, stage.device, before, -(-stage.input_bytes * (end - begin) // whole))
        differences.see(stage.stage, "send_activation_ns", cost.send_activation_ns, activation)
        differences.see(stage.stage, "send_gradient_ns", cost.send_gradient_ns, gradient)
    yield from differences.violations()


def _message_ns(machine: Machine, device: int, peer: int | None, moved: int) -> int:
    """Return the time of a message; no entry: 0."""
    entry = None if peer is None else _p2p(machine, device, peer)
    if entry is None:
        return 0
    rate = value_of(entry.bytes_per_s) if entry.bytes_per_s is not None else 0
    return value_of(entry.latency_ns) + (transfer_ns(moved, rate) if rate else 0)


def _p2p(machine: Machine, device: int, peer: int) -> P2P | None:
    """Return the entry of two devices: their own comes before the one for every pair."""
    own = [entry for entry in machine.p2p if entry.devices is not None and set(entry.devices) == {device, peer}]
    entries = own + [entry for entry in machine.p2p if entry.devices is None]
    return entries[0] if entries else None


def links(placed: PlacedOps, machine: Machine) -> Iterator[Violation]:
    """A link of the forecast is shared by the devices that share it in the profile, with its bandwidths."""
    count, differences = len(placed.schedule.devices), _Differences("profile-links", "link")
    seen: set[tuple[int, str]] = set()
    for number, found in enumerate(placed.schedule.forecast.links):
        for device in found.devices:
            entry = _link_of(machine, device)
            if entry is None:
                message = f"forecast.links[{number}] names device {device}, which has no link in the profile"
                yield Violation("profile-links", message, device)
                continue
            shared = {peer for peer in entry.devices or (device,) if peer < count}
            if set(found.devices) != shared:
                message = f"forecast.links[{number}] is of the devices {sorted(found.devices)}, the profile's of"
                yield Violation("profile-links", f"{message} {sorted(shared)}", device)
            for field, figure in _link_figures(entry).items():
                if (number, field) not in seen:
                    seen.add((number, field))
                    differences.see(number, field, _or_zero(getattr(found, field)), figure)
    yield from differences.violations()


def _or_zero(figure: int | msgspec.UnsetType) -> int:
    return 0 if isinstance(figure, msgspec.UnsetType) else figure


def hosts(schedule: ir.Schedule, machine: Machine) -> Iterator[Violation]:
    """The hosts are the profile's: the same devices, of those that the schedule has, and all of the memory."""
    count = len(schedule.devices)
    members = [[device for device in host.devices if device < count] for host in machine.hosts]
    expected = [
        (devices, value_of(host.memory_bytes)) for devices, host in zip(members, machine.hosts, strict=True) if devices
    ]
    found = schedule.setup.hosts_or_none
    if found != expected:
        message = f"setup.hosts has {_hosts(found)}, the profile {_hosts(expected)}"
        yield Violation("profile-hosts", message)


def _hosts(hosts: list[tuple[list[int], int]]) -> str:
    said = (f"{cap} bytes for the devices {', '.join(map(str, devices))}" for devices, cap in hosts)
    return "; ".join(said) or "none"


def _link_of(machine: Machine, device: int) -> Link | None:
    """Return the link that names the device, else the one for devices that none names."""
    named = [link for link in machine.links if device in (link.devices or ())]
    return next(iter(named + [link for link in machine.links if link.devices is None]), None)


def _link_figures(link: Link) -> dict[str, int]:
    """Return what the forecast must use; with the other direction busy no bandwidth is above that alone."""
    d2h, h2d = value_of(link.d2h_bytes_per_s), value_of(link.h2d_bytes_per_s)
    busy_d2h, busy_h2d = link.duplex_d2h_bytes_per_s, link.duplex_h2d_bytes_per_s
    return {
        "d2h_bytes_per_s": d2h,
        "h2d_bytes_per_s": h2d,
        "duplex_d2h_bytes_per_s": d2h if busy_d2h is None else min(d2h, value_of(busy_d2h)),
        "duplex_h2d_bytes_per_s": h2d if busy_h2d is None else min(h2d, value_of(busy_h2d)),
        "latency_ns": value_of(link.latency_ns),
        "compute_permille": value_of(link.compute_permille),
    }
