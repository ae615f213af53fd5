"""The cost profile as it stands in profile.json: costs per layer, the machine, and where each number comes from."""

from __future__ import annotations

import hashlib
import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import structs

from optpipe_compiler.documents.files import Record, canonical, decode, read_text
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

FORMAT = "optpipe-profile"
VERSION = 2
"""2: transient bytes that do not shrink with a slice's tokens. A file has the lowest version that says all of it."""
REVISION = 0
OPS = ("forward", "backward_input", "backward_weight", "backward")
"""The compute ops of a layer, the backward in halves and fused."""
TRANSIENT = {op: f"{op}_transient_bytes" for op in OPS}
"""The field of each op's transient bytes, in profiles and schedules."""

LARGEST = 2**53
"""No time or size of a profile is larger; every JSON reader holds such integers exactly."""
MOST_LAYERS = 10_000

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Quantity(Record, frozen=True, kw_only=True):
    """A number with its origin; `spread` is the interquartile range of `samples` measurements, in the same unit."""

    value: Count
    source: Literal["measured", "estimated", "manual"]
    samples: Count = 0
    spread: Count = 0


Cost = Count | Quantity
"""A bare integer is a manual number."""


def value_of(cost: Cost) -> int:
    """Return the number itself, whatever its origin."""
    return cost.value if isinstance(cost, Quantity) else cost


class Selective(Record, frozen=True, kw_only=True):
    """What changes where a layer makes its cheap tensors (results of norms and activations) again in its backward.

    Forward, output, checkpoint and what stays between the halves of a split backward are as ever. Until the end of the
    forward all is there, so its transient bytes grow by what is then freed.
    """

    saved_bytes: Cost
    captured_bytes: Cost = 0
    """As the layer's, and cheap tensors that the weight gradient reads: backward_input makes them again."""
    recompute_ns: Cost = 0
    """Added to backward_input and to a fused backward."""
    transient_bytes: Cost = 0
    """Added to those of backward_input and of a fused backward: cheap tensors while they are read."""


class Sliceable(Record, frozen=True, kw_only=True):
    """What a layer that can run slice by slice costs besides: a slice sees its own tokens and those before it.

    Of an op of T ns, X of them attention, on a sequence of S tokens, the slice [a, b) takes
    (T - X) (b - a) / S + X (b^2 - a^2) / S^2, and its overhead. Weight gradients have no attention.
    """

    forward_attention_ns: Cost = 0
    """Part of forward_ns, and of recompute_ns."""
    backward_input_attention_ns: Cost = 0
    """Part of backward_input_ns, and of backward_ns."""
    forward_overhead_ns: Cost = 0
    """Added to every forward and recompute of a slice: kernels that are too small."""
    backward_input_overhead_ns: Cost = 0
    backward_weight_overhead_ns: Cost = 0
    backward_overhead_ns: Cost | None = None
    """Fused; the sum of the two halves when absent."""
    carry_bytes: Cost = 0
    """The part of saved_bytes that later slices read: keys and values."""
    carry_gradient_bytes: Cost | None = None
    """Of the carry's gradient while it adds up; `carry_bytes` when absent."""
    forward_prefix_bytes: Cost = 0
    """Transient bytes of a forward or recompute for the tokens before its slice, for as many as the sequence has."""
    backward_prefix_bytes: Cost = 0
    """The same of backward_input and a fused backward."""
    forward_fixed_bytes: Cost = 0
    """The part of forward_transient_bytes that does not shrink with the tokens: a slice needs all of it."""
    backward_input_fixed_bytes: Cost = 0
    backward_weight_fixed_bytes: Cost = 0
    """Weight gradients before they are added, above all."""
    backward_fixed_bytes: Cost = 0

    @property
    def fused_overhead_ns(self) -> int:
        """`backward_overhead_ns`, or the sum of the two halves."""
        if self.backward_overhead_ns is not None:
            return value_of(self.backward_overhead_ns)
        return value_of(self.backward_input_overhead_ns) + value_of(self.backward_weight_overhead_ns)

    @property
    def has_fixed_bytes(self) -> bool:
        """Whether some of the transient bytes do not shrink with the tokens."""
        return any(value_of(getattr(self, f"{op}_fixed_bytes")) for op in OPS)

    @property
    def gradient_or_carry_bytes(self) -> int:
        """`carry_gradient_bytes`, or `carry_bytes`."""
        return value_of(self.carry_bytes if self.carry_gradient_bytes is None else self.carry_gradient_bytes)


class Layer(Record, frozen=True, kw_only=True):
    """The costs of one layer and one microbatch, or of `count` equal layers in a row (each costs this much).

    Times are alone on the device's compute lane. `saved_bytes` live after the forward, `residue_bytes` (what the
    weight gradient still reads, output gradients included) between backward_input and backward_weight.
    `checkpoint_bytes` is what a recomputation that starts at this layer must keep (its input). `output_bytes` cross to
    the next layer, and as a gradient back. Transient bytes exist only while the op runs, beside what it reads, saves
    and sends. `static_bytes`: weights, gradients, optimizer state. `shared_bytes` is the part of `saved_bytes` that the
    layer of its chain right before it saves, too, such as masks that layers pass on: within a stage it is there once.
    """

    name: str
    count: Positive = 1
    forward_ns: Cost
    backward_input_ns: Cost
    backward_weight_ns: Cost
    backward_ns: Cost | None = None
    """Fused; the sum of the two halves when absent."""
    recompute_ns: Cost | None = None
    """The forward time when absent."""
    saved_bytes: Cost
    residue_bytes: Cost | None = None
    """`saved_bytes` when absent."""
    shared_bytes: Cost = 0
    chain: str | None = None
    """Layers of one chain pass on what they save and get: parts of a head behind the first. Its name when absent."""
    captured_bytes: Cost = 0
    """The part of the residue that backward_input adds: output gradients held for backward_weight."""
    checkpoint_bytes: Cost = 0
    output_bytes: Cost = 0
    static_bytes: Cost = 0
    tie: str | None = None
    """Layers of one tie share weights, as part j of an embedding and of the head do."""
    tied_bytes: Cost = 0
    """The part of `static_bytes` that a device with several layers of the tie holds once."""
    forward_transient_bytes: Cost = 0
    backward_input_transient_bytes: Cost = 0
    backward_weight_transient_bytes: Cost = 0
    backward_transient_bytes: Cost = 0
    selective: Selective | None = None
    """Absent: the layer has no cheap tensors, or nobody measured them."""
    slices: Sliceable | None = None
    """Absent: the layer needs whole sequences."""

    @property
    def fused_ns(self) -> int:
        """`backward_ns`, or the sum of the two halves."""
        if self.backward_ns is not None:
            return value_of(self.backward_ns)
        return value_of(self.backward_input_ns) + value_of(self.backward_weight_ns)

    @property
    def recompute_or_forward_ns(self) -> int:
        """`recompute_ns`, or the forward time."""
        return value_of(self.forward_ns if self.recompute_ns is None else self.recompute_ns)

    @property
    def residue_or_saved_bytes(self) -> int:
        """`residue_bytes`, or `saved_bytes`."""
        return value_of(self.saved_bytes if self.residue_bytes is None else self.residue_bytes)


class P2P(Record, frozen=True, kw_only=True):
    """Cost of a message between two devices: latency plus bytes over bandwidth (no bandwidth: latency only)."""

    devices: tuple[Count, Count] | None = None
    """The pair this entry is about; absent: every pair that has no entry of its own."""
    latency_ns: Cost = 0
    bytes_per_s: Cost | None = None
    overhead_ns: Cost = 0
    """Time that a message takes from the compute lane of each of the two, beside its own."""


class Link(Record, frozen=True, kw_only=True):
    """A host link; each direction serves one transfer at a time, of any device that shares it.

    `duplex_*` is the bandwidth while the other direction is busy too; absent: the same as alone.
    """

    devices: list[Count] | None = None
    """The devices behind this link; absent: every device not named elsewhere has such a link of its own."""
    d2h_bytes_per_s: Cost
    h2d_bytes_per_s: Cost
    duplex_d2h_bytes_per_s: Cost | None = None
    duplex_h2d_bytes_per_s: Cost | None = None
    latency_ns: Cost = 0
    compute_permille: Cost = 0
    """What a copy takes from its device's compute lane, in thousandths (at most all) of its time alone."""

    @property
    def alone(self) -> tuple[int, int]:
        """(d2h, h2d) in bytes per second while the other direction is idle."""
        return value_of(self.d2h_bytes_per_s), value_of(self.h2d_bytes_per_s)

    @property
    def duplex(self) -> tuple[int, int]:
        """(d2h, h2d) in bytes per second while both directions are busy; never more than alone."""
        d2h, h2d = self.alone
        busy_d2h, busy_h2d = self.duplex_d2h_bytes_per_s, self.duplex_h2d_bytes_per_s
        return (
            d2h if busy_d2h is None else min(d2h, value_of(busy_d2h)),
            h2d if busy_h2d is None else min(h2d, value_of(busy_h2d)),
        )


class Host(Record, frozen=True, kw_only=True):
    """A host, and the devices whose offloads go to its memory."""

    devices: Annotated[list[Count], msgspec.Meta(min_length=1)]
    memory_bytes: Cost


class Machine(Record, frozen=True, kw_only=True):
    """The devices and what connects them. No `links`: no offload."""

    devices: Positive
    kind: str = "cpu"
    memory_bytes: Cost | None = None
    """Per device; absent: unknown, `--mem` is the only cap."""
    reserve_bytes: Cost = 0
    """Per device, for what is no activation, weight or optimizer state (context, workspace, fragmentation)."""
    host_memory_bytes: Cost | None = None
    """Of all hosts, for all devices together; absent: unlimited."""
    hosts: list[Host] = msgspec.field(default_factory=list)
    """Of machines with several hosts: which devices stand on which, and its memory for them; a device that none names
    is limited by `host_memory_bytes` alone."""
    time_permille: list[Positive] | None = None
    """By device: how long its ops take, in thousandths of the layers' times; absent: 1000 everywhere."""
    op_overhead_ns: Cost = 0
    """Time that every compute op costs whatever its layers (launch, bookkeeping)."""
    p2p: list[P2P] = msgspec.field(default_factory=list)
    links: list[Link] = msgspec.field(default_factory=list)

    def host_links(self, devices: int) -> list[tuple[list[int], Link]]:
        """Return each host link with those of the first `devices` devices that are behind it; a link without devices is
        one for each device not named."""
        named = {device for link in self.links for device in link.devices or ()}
        found: list[tuple[list[int], Link]] = []
        for link in self.links:
            if link.devices is not None:
                members = [device for device in link.devices if device < devices]
                found += [(members, link)] if members else []
            else:
                found += [([device], link) for device in range(devices) if device not in named]
        return sorted(found, key=lambda pair: pair[0])

    def in_order(self, order: Sequence[int] | None) -> Machine:
        """Return the machine with device `order[n]` as number n; None, and devices beyond these: as they are."""
        if order is None:
            return self
        number = {device: n for n, device in enumerate(order)}

        def renumbered(devices: Sequence[int]) -> list[int]:
            return sorted(number.get(device, device) for device in devices)

        def pair(devices: tuple[int, int]) -> tuple[int, int]:
            first, second = renumbered(devices)
            return first, second

        times, replace = self.time_permille, structs.replace
        return replace(
            self,
            hosts=[replace(host, devices=renumbered(host.devices)) for host in self.hosts],
            time_permille=times and [times[device] for device in (*order, *range(len(order), len(times)))],
            p2p=[one if one.devices is None else replace(one, devices=pair(one.devices)) for one in self.p2p],
            links=[one if one.devices is None else replace(one, devices=renumbered(one.devices)) for one in self.links],
        )

    def p2p_of(self, first: int, second: int) -> P2P | None:
        """Return what a message between two devices costs; None: nothing."""
        own = next((one for one in self.p2p if one.devices is not None and set(one.devices) == {first, second}), None)
        return own or next((one for one in self.p2p if one.devices is None), None)

    def left_out(self, devices: int, pairs: Iterable[tuple[int, int]] = ()) -> list[str]:
        """Say what is known of some of the first `devices` devices and `pairs` of them, and not of all."""
        linked = {device for members, _ in self.host_links(devices) for device in members}
        without = [device for device in range(devices) if device not in linked]
        said = []
        if self.links and without:
            which = ", ".join(map(str, without))
            said.append(f"the profile's $.machine.links has no host link of device {which}: nothing is offloaded there")
        free = sorted({(min(pair), max(pair)) for pair in pairs if self.p2p and self.p2p_of(*pair) is None})
        if free:
            which = ", ".join(f"{first} and {second}" for first, second in free)
            said.append(f"the profile's $.machine.p2p has no entry for devices {which}: their messages take no time")
        return said


class Model(Record, frozen=True, kw_only=True):
    """The model that was measured, so that `run` can build it again."""

    builder: str
    """`gpt`, or `package.module:function`."""
    config: dict[str, int | float | str | bool] = msgspec.field(default_factory=dict)
    microbatch_size: Positive
    sequence_length: Positive
    dtype: str = "fp32"
    seed: int = 0


class Profile(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A whole profile.json."""

    format: Literal["optpipe-profile"] = "optpipe-profile"
    version: int = 1
    revision: int = REVISION
    name: str
    model: Model | None = None
    sequence_length: Positive | msgspec.UnsetType = msgspec.UNSET
    """Tokens of a sequence; absent: the model's."""
    machine: Machine
    layers: Annotated[list[Layer], msgspec.Meta(min_length=1)]

    @property
    def tokens(self) -> int | None:
        """Tokens of the microbatches that the costs are for, in each of their sequences; None where nobody knows."""
        if not isinstance(self.sequence_length, msgspec.UnsetType):
            return self.sequence_length
        return None if self.model is None else self.model.sequence_length

    def digest(self) -> str:
        """Return sha256 over the canonical text."""
        return "sha256:" + hashlib.sha256(canonical(self).encode()).hexdigest()

    def expanded_layers(self) -> list[Layer]:
        """Return one record per layer, `count` unrolled."""
        return [layer for layer in self.layers for _ in range(layer.count)]


def alike(layers: Sequence[Layer]) -> list[tuple[int, Layer]]:
    """Return the records, those of equal costs whose names differ by numbers alone, if at all, as one: `block.*.mlp`,
    with the count of all, at the index of the first."""
    found: dict[Layer, tuple[int, Layer]] = {}
    for index, layer in enumerate(layers):
        name = ".".join("*" if part.isdigit() else part for part in layer.name.split("."))
        kind = structs.replace(layer, name=name, count=1)
        if kind not in found:
            found[kind] = index, layer
        else:
            first, before = found[kind]
            found[kind] = first, structs.replace(before, name=name, count=before.count + layer.count)
    return list(found.values())


def selected(layers: Sequence[Layer], chosen: Collection[int]) -> list[Layer]:
    """Return the layers of a model, those numbered in `chosen` as they are with selective recompute."""
    return [_selectively(layer) if index in chosen else layer for index, layer in enumerate(layers)]


def _selectively(layer: Layer) -> Layer:
    light = layer.selective
    if light is None:
        return layer
    again, more = value_of(light.recompute_ns), value_of(light.transient_bytes)
    saved = value_of(layer.saved_bytes)
    return structs.replace(
        layer,
        saved_bytes=light.saved_bytes,
        residue_bytes=layer.residue_or_saved_bytes,
        captured_bytes=light.captured_bytes,
        backward_input_ns=value_of(layer.backward_input_ns) + again,
        backward_ns=layer.fused_ns + again,
        forward_transient_bytes=value_of(layer.forward_transient_bytes) + saved - value_of(light.saved_bytes),
        backward_input_transient_bytes=value_of(layer.backward_input_transient_bytes) + more,
        backward_transient_bytes=value_of(layer.backward_transient_bytes) + more,
    )


def version_of(layers: Sequence[Layer]) -> int:
    """Return the lowest version that has all fields of these layers."""
    return 2 if any(layer.slices is not None and layer.slices.has_fixed_bytes for layer in layers) else 1


@lru_cache(maxsize=4096)  # equal layers, in all placements that are compared
def of_unit(layer: Layer, tokens: tuple[int, int], whole: int, *, is_cut: bool) -> Layer:
    """Return what a layer, as it is in its stage, costs for the tokens [begin, end) of a sequence.

    Its costs are for `whole` tokens. Bytes are rounded up, times to the nearest ns; a slice (`is_cut`) has overhead.
    """
    begin, end = tokens
    slices = layer.slices or Sliceable()
    carried = value_of(slices.carry_bytes) if is_cut else 0

    def size(cost: Cost, fixed: Cost = 0) -> int:
        return value_of(fixed) - ((value_of(fixed) - value_of(cost)) * (end - begin) // whole)

    def before(cost: Cost) -> int:
        return -(-value_of(cost) * begin // whole)

    def time(cost: Cost, attention: Cost = 0, overhead: Cost = 0) -> int:
        total, quadratic = value_of(cost), value_of(attention)
        twice = 2 * ((total - quadratic) * (end - begin) * whole + quadratic * (end**2 - begin**2))
        return (twice + whole**2) // (2 * whole**2) + (value_of(overhead) if is_cut else 0)

    again = layer.recompute_or_forward_ns
    return structs.replace(
        layer,
        forward_ns=time(layer.forward_ns, slices.forward_attention_ns, slices.forward_overhead_ns),
        backward_input_ns=time(
            layer.backward_input_ns, slices.backward_input_attention_ns, slices.backward_input_overhead_ns
        ),
        backward_weight_ns=time(layer.backward_weight_ns, 0, slices.backward_weight_overhead_ns),
        backward_ns=time(layer.fused_ns, slices.backward_input_attention_ns, slices.fused_overhead_ns),
        recompute_ns=time(again, min(again, value_of(slices.forward_attention_ns)), slices.forward_overhead_ns),
        saved_bytes=size(value_of(layer.saved_bytes) - carried) + size(carried),
        residue_bytes=size(layer.residue_or_saved_bytes),
        shared_bytes=0,
        captured_bytes=size(layer.captured_bytes),
        checkpoint_bytes=size(layer.checkpoint_bytes),
        output_bytes=size(layer.output_bytes),
        forward_transient_bytes=size(layer.forward_transient_bytes, slices.forward_fixed_bytes)
        + before(slices.forward_prefix_bytes),
        backward_input_transient_bytes=size(layer.backward_input_transient_bytes, slices.backward_input_fixed_bytes)
        + before(slices.backward_prefix_bytes),
        backward_weight_transient_bytes=size(layer.backward_weight_transient_bytes, slices.backward_weight_fixed_bytes),
        backward_transient_bytes=size(layer.backward_transient_bytes, slices.backward_fixed_bytes)
        + before(slices.backward_prefix_bytes),
    )


def on_device(layer: Layer, machine: Machine, device: int) -> Layer:
    """Return what a layer costs on a device, its times rounded to the nearest ns."""
    if machine.time_permille is None or machine.time_permille[device] == 1000:
        return layer
    permille = machine.time_permille[device]

    def time(cost: Cost) -> int:
        return (2 * value_of(cost) * permille + 1000) // 2000

    return structs.replace(
        layer,
        forward_ns=time(layer.forward_ns),
        backward_input_ns=time(layer.backward_input_ns),
        backward_weight_ns=time(layer.backward_weight_ns),
        backward_ns=time(layer.fused_ns),
        recompute_ns=time(layer.recompute_or_forward_ns),
    )


def in_one_stage(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers of a stage as they are there: what one shares with the one before it is counted once.

    Where a recompute starts it needs all of its input, so no layer saves less than that.
    """
    found = list(layers[:1])
    for before, layer in itertools.pairwise(layers):
        found.append(_behind_its_chain(layer) if _chain(before) == _chain(layer) else layer)
    return found


def _chain(layer: Layer) -> str:
    return layer.name if layer.chain is None else layer.chain


def _behind_its_chain(layer: Layer) -> Layer:
    if not value_of(layer.shared_bytes):
        return layer
    saved = max(value_of(layer.saved_bytes) - value_of(layer.shared_bytes), value_of(layer.checkpoint_bytes))
    residue = min(layer.residue_or_saved_bytes, saved + value_of(layer.captured_bytes))
    return structs.replace(layer, saved_bytes=saved, residue_bytes=residue)


def load(path: Path) -> Profile:
    """Read and cross-check a profile; raise BadInput with file, JSON path, value and expectation."""
    return parse(read_text(path), str(path))


def parse(text: str, name: str) -> Profile:
    """Decode and cross-check the text of a profile; `name` stands for the file in messages."""
    profile = decode(text, Profile, name, format=FORMAT, version=VERSION, revision=REVISION)
    _check_magnitudes(msgspec.to_builtins(profile), name, "$")
    _check_layers(profile, name)
    _check_machine(profile.machine, name)
    return profile


def _check_magnitudes(value: object, name: str, path: str) -> None:
    """Refuse numbers so large that sums of them could not be held exactly."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_magnitudes(item, name, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_magnitudes(item, name, f"{path}[{index}]")
    elif isinstance(value, int) and value > LARGEST:
        raise BadInput(f"{name}: {path} is {value}, expected at most {LARGEST}")


def _check_layers(profile: Profile, name: str) -> None:
    layers = sum(layer.count for layer in profile.layers)
    if layers > MOST_LAYERS:
        raise BadInput(f"{name}: $.layers has {layers} layers with their counts, expected at most {MOST_LAYERS}")
    for index, layer in enumerate(profile.layers):
        saved = value_of(layer.saved_bytes)
        kept = value_of(layer.checkpoint_bytes)
        if kept > saved:
            raise BadInput(
                f"{name}: $.layers[{index}].checkpoint_bytes is {kept}, expected at most saved_bytes ({saved})"
            )
        if (tied := value_of(layer.tied_bytes)) > (static := value_of(layer.static_bytes)):
            raise BadInput(f"{name}: $.layers[{index}].tied_bytes is {tied}, expected at most static_bytes ({static})")
        if (shared := value_of(layer.shared_bytes)) > saved:
            raise BadInput(
                f"{name}: $.layers[{index}].shared_bytes is {shared}, expected at most saved_bytes ({saved})"
            )
        captured = value_of(layer.captured_bytes)
        residue = layer.residue_or_saved_bytes
        if not captured <= residue <= saved + captured:
            raise BadInput(
                f"{name}: $.layers[{index}].residue_bytes is {residue}, expected captured_bytes ({captured}) to "
                f"saved_bytes + captured_bytes ({saved + captured})"
            )
        if layer.selective is not None:
            _check_selective(layer, residue, f"{name}: $.layers[{index}].selective")
        if layer.slices is not None:
            _check_slices(profile, layer, layer.slices, f"{name}: $.layers[{index}].slices")


def _check_selective(layer: Layer, residue: int, path: str) -> None:
    light = layer.selective
    assert light is not None
    saved, captured = value_of(light.saved_bytes), value_of(light.captured_bytes)
    least = max(value_of(layer.checkpoint_bytes), value_of(layer.shared_bytes))
    if not least <= saved <= value_of(layer.saved_bytes):
        raise BadInput(
            f"{path}.saved_bytes is {saved}, expected checkpoint_bytes and shared_bytes ({least}) to the layer's "
            f"saved_bytes ({value_of(layer.saved_bytes)})"
        )
    if not residue - saved <= captured <= residue:
        raise BadInput(
            f"{path}.captured_bytes is {captured}, expected residue_bytes - saved_bytes ({max(0, residue - saved)}) to "
            f"the layer's residue_bytes ({residue})"
        )


def _check_slices(profile: Profile, layer: Layer, slices: Sliceable, path: str) -> None:
    if profile.tokens is None:
        raise BadInput(f"{path} is there, expected $.sequence_length, too: the tokens that it is for")
    if profile.version < 2 and slices.has_fixed_bytes:
        raise BadInput(f"{path} has fixed bytes, no fields of version {profile.version}, expected $.version 2")
    saved = value_of(layer.saved_bytes if layer.selective is None else layer.selective.saved_bytes)
    saved = max(saved - value_of(layer.shared_bytes), value_of(layer.checkpoint_bytes))
    backward = min(value_of(layer.backward_input_ns), layer.fused_ns)
    for field, most, what in (
        ("forward_attention_ns", value_of(layer.forward_ns), "forward_ns"),
        ("backward_input_attention_ns", backward, "backward_input_ns and backward_ns"),
        ("carry_bytes", saved - value_of(layer.checkpoint_bytes), "saved_bytes less shared_bytes and checkpoint_bytes"),
        *((f"{op}_fixed_bytes", value_of(getattr(layer, name)), name) for op, name in TRANSIENT.items()),
    ):
        if (found := value_of(getattr(slices, field))) > most:
            raise BadInput(f"{path}.{field} is {found}, expected at most {what} ({most})")


def _check_machine(machine: Machine, name: str) -> None:
    if machine.time_permille is not None and len(machine.time_permille) != machine.devices:
        raise BadInput(
            f"{name}: $.machine.time_permille has {len(machine.time_permille)} entries, expected one for each of "
            f"{counted(machine.devices, 'device')}"
        )
    owner: dict[int, int] = {}
    for index, link in enumerate(machine.links):
        for field in ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_d2h_bytes_per_s", "duplex_h2d_bytes_per_s"):
            cost = getattr(link, field)
            if cost is not None and value_of(cost) < 1:
                raise BadInput(f"{name}: $.machine.links[{index}].{field} is 0, expected at least 1")
        if (share := value_of(link.compute_permille)) > 1000:
            raise BadInput(f"{name}: $.machine.links[{index}].compute_permille is {share}, expected 0 to 1000")
        for device in link.devices or ():
            if device >= machine.devices:
                raise BadInput(
                    f"{name}: $.machine.links[{index}].devices names {device}, expected 0 to {machine.devices - 1}"
                )
            if device in owner:
                raise BadInput(
                    f"{name}: $.machine.links[{index}].devices names {device}, which links[{owner[device]}] has already"
                )
            owner[device] = index
    if sum(link.devices is None for link in machine.links) > 1:
        raise BadInput(f"{name}: $.machine.links: more than one entry has no devices, expected at most one default")
    _check_hosts(machine, name)
    _check_messages(machine, name)


def _check_hosts(machine: Machine, name: str) -> None:
    owner: dict[int, int] = {}
    for index, host in enumerate(machine.hosts):
        path = f"{name}: $.machine.hosts[{index}].devices names"
        for device in host.devices:
            if device >= machine.devices:
                raise BadInput(f"{path} {device}, expected 0 to {machine.devices - 1}")
            if device in owner:
                raise BadInput(f"{path} {device}, which hosts[{owner[device]}] has already")
            owner[device] = index


def _check_messages(machine: Machine, name: str) -> None:
    known: dict[frozenset[int] | None, int] = {}
    for index, entry in enumerate(machine.p2p):
        path = f"{name}: $.machine.p2p[{index}]"
        if entry.bytes_per_s is not None and value_of(entry.bytes_per_s) < 1:
            raise BadInput(f"{path}.bytes_per_s is 0, expected at least 1")
        pair = None if entry.devices is None else frozenset(entry.devices)
        if entry.devices is not None and (len(set(entry.devices)) < 2 or max(entry.devices) >= machine.devices):
            raise BadInput(
                f"{path}.devices is {list(entry.devices)}, expected two devices of 0 to {machine.devices - 1}"
            )
        if pair in known:
            about = "every other pair" if entry.devices is None else f"the pair {list(entry.devices)}"
            raise BadInput(f"{path} is about {about}, which p2p[{known[pair]}] is about already")
        known[pair] = index
