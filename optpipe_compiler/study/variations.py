"""What-if variations of an instance: more memory, a faster link, no offload, other microbatches, even layers, a head
in parts."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs

from optpipe_compiler.documents.profile import OPS, Sliceable, value_of
from optpipe_compiler.documents.units import short_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from optpipe_compiler.documents.profile import Cost, Layer, Profile
    from optpipe_compiler.study.planned import Instance

MORE_MEMORY = (10, 25, 50, 100)
"""Percent by which the cap is raised."""
LIGHT = 0.25
"""Part of a common layer's work below which a head is not asked about in parts. With a head of half a block, 32 devices
idle 19 % where it is whole and 5 % where it is in parts (docs/VOCABULARY.md)."""

Effect = Literal["same", "relaxed", "restricted", "different"]
"""relaxed: every schedule of the instance is one of the changed one, too, and no slower; restricted: the reverse."""
Family = Literal[
    "same", "memory", "link", "copies", "messages", "offload", "selective", "microbatches", "head", "layers"
]


@dataclass(frozen=True)
class Variation:
    """A variation: `text` names it in a table, `amount` says how much in a sentence."""

    family: Family
    text: str
    effect: Effect
    instance: Instance
    amount: str = ""


def variations(instance: Instance, *, offloads: bool, uneven: bool, selective: bool = False) -> Iterator[Variation]:
    """Yield the instance unchanged and all variations that change anything; its options must be settled.

    `offloads`, `selective`: whether the schedule at hand has any offload, or selective recompute; `uneven`: whether one
    of its devices has more work than another. Where a placement is kept, the layers stay as they are.
    """
    profile, options = instance.profile, instance.options
    yield Variation("same", "nothing", "same", instance)
    for percent in MORE_MEMORY:
        more = options.mem_bytes * percent // 100
        amount = f"{short_bytes(more)} more per device (+{percent}%)"
        text = f"memory +{percent}%"
        yield Variation("memory", text, "relaxed", _with(instance, mem_bytes=options.mem_bytes + more), amount)
    if profile.machine.links and options.offload:
        yield Variation("link", "host links x 2", "relaxed", replace(instance, profile=_faster_links(profile)))
    if options.offload and any(value_of(link.compute_permille) for link in profile.machine.links):
        links = [structs.replace(link, compute_permille=0) for link in profile.machine.links]
        machine = structs.replace(profile.machine, links=links)
        beside = replace(instance, profile=structs.replace(profile, machine=machine))
        yield Variation("copies", "compute of copies x 0", "relaxed", beside)
    p2p = profile.machine.p2p if options.devices > 1 else []
    if any(value_of(e.latency_ns) or value_of(e.overhead_ns) or e.bytes_per_s is not None for e in p2p):
        machine = structs.replace(profile.machine, p2p=[])
        free = replace(instance, profile=structs.replace(profile, machine=machine))
        yield Variation("messages", "messages x 0", "relaxed", free)
    if offloads and options.offload:
        yield Variation("offload", "no offload", "restricted", _with(instance, offload=False))
    if selective:
        layers = [structs.replace(layer, selective=None) for layer in profile.layers]
        without = replace(instance, profile=structs.replace(profile, layers=layers))
        yield Variation("selective", "no selective recompute", "restricted", without)
    more = options.microbatches + (options.microbatches + 1) // 2
    lengths = options.lengths and tuple(islice(cycle(options.lengths), more))  # those of the first ones come again
    others = _with(instance, microbatches=more, lengths=lengths)
    yield Variation("microbatches", f"{more} microbatches", "different", others, str(more))
    if options.keep is not None:
        return
    parts = _head_in_parts(instance)
    if parts is not None:
        count = f"{options.devices} parts"
        yield Variation("head", f"head in {count}", "different", replace(instance, profile=parts), count)
    if uneven:
        yield Variation("layers", "even layers", "different", replace(instance, profile=_even(instance)))


def _with(instance: Instance, **options: Any) -> Instance:
    return replace(instance, options=replace(instance.options, **options))


def _faster_links(profile: Profile) -> Profile:
    """Double every bandwidth of the host links and halve their latency."""

    def twice(cost: Cost | None) -> int | None:
        return None if cost is None else 2 * value_of(cost)

    links = [
        structs.replace(
            link,
            d2h_bytes_per_s=twice(link.d2h_bytes_per_s),
            h2d_bytes_per_s=twice(link.h2d_bytes_per_s),
            duplex_d2h_bytes_per_s=twice(link.duplex_d2h_bytes_per_s),
            duplex_h2d_bytes_per_s=twice(link.duplex_h2d_bytes_per_s),
            latency_ns=value_of(link.latency_ns) // 2,
        )
        for link in profile.machine.links
    ]
    return structs.replace(profile, machine=structs.replace(profile.machine, links=links))


# -- other layers -------------------------------------------------------------------------------------------------

SHARED = (
    "forward_ns",
    "backward_input_ns",
    "backward_weight_ns",
    "backward_ns",
    "recompute_ns",
    "saved_bytes",
    "residue_bytes",
    "captured_bytes",
    "static_bytes",
)
"""What layers share out among them; messages, checkpoints and transient bytes do not shrink with a layer."""
DEFAULTS = {
    "backward_ns": "fused_ns",
    "recompute_ns": "recompute_or_forward_ns",
    "residue_bytes": "residue_or_saved_bytes",
}
"""Costs that may be absent, and what says the cost then."""
SHARED_SLICES = (
    "forward_attention_ns",
    "backward_input_attention_ns",
    "forward_overhead_ns",
    "backward_input_overhead_ns",
    "backward_weight_overhead_ns",
    "carry_bytes",
)
"""The same of what slices of a layer cost besides."""
AVERAGED = (
    "output_bytes",
    "checkpoint_bytes",
    "forward_transient_bytes",
    "backward_input_transient_bytes",
    "backward_weight_transient_bytes",
    "backward_transient_bytes",
)


def _head_in_parts(instance: Instance) -> Profile | None:
    """Return the same model with its last layer in as many parts as devices; None where that is no heavy head.

    Each part has its share of the work, the weights and the transient bytes, and passes its input on. It saves that and
    its share of the logits, whose gradient takes their place between the two halves of a backward.
    """
    layers, devices = instance.profile.expanded_layers(), instance.options.devices
    *others, head = layers
    if devices < 2 or not others or value_of(head.output_bytes) or any(one.name == head.name for one in others):
        return None
    if _without_number(others[-1].name) == _without_number(head.name):  # in parts already
        return None
    if _work(head) < LIGHT * median(map(_work, others)):
        return None
    if head.slices is not None and value_of(head.slices.carry_bytes):
        return None
    passed, captured = value_of(others[-1].output_bytes), _of(head, "captured_bytes")
    shared = {
        name: round(_of(head, name) / devices) for name in SHARED if name.endswith("_ns") or name == "static_bytes"
    }
    shared |= {name: round(_of(head, name) / devices) for name in AVERAGED if "transient" in name}

    def kept(name: str) -> int:
        nbytes = _of(head, name)
        return (own := min(nbytes, passed)) + round((nbytes - own) / devices)

    saved, captured = kept("saved_bytes"), round(captured / devices)
    residue = min(kept("residue_bytes"), saved + captured)
    if captured:  # whole heads may save their logits several times, parts do not
        saved = min(saved, residue)
    part = structs.replace(
        head,
        name="head-part",
        saved_bytes=saved,
        residue_bytes=residue,
        captured_bytes=captured,
        checkpoint_bytes=min(value_of(head.checkpoint_bytes), saved),
        shared_bytes=min(passed, saved),
        tied_bytes=0,
        tie=None,
        selective=None,
        slices=None if head.slices is None else _attention_in_parts(head.slices, devices),
        **shared,
    )
    first = structs.replace(part, count=devices - 1, output_bytes=passed)
    return structs.replace(instance.profile, layers=[*instance.profile.layers[:-1], first, part])


def _without_number(name: str) -> str:
    """Return what parts of a head have in common: head.3 of known models, HeadPart-2 of a user's layers."""
    return re.sub(r"[.-]\d+$", "", name)


def _attention_in_parts(slices: Sliceable, parts: int) -> Sliceable:
    """Return what slices of a part cost besides: as much overhead, its share of the attention."""
    return structs.replace(
        slices,
        forward_attention_ns=value_of(slices.forward_attention_ns) // parts,
        backward_input_attention_ns=value_of(slices.backward_input_attention_ns) // parts,
        **{f"{op}_fixed_bytes": value_of(getattr(slices, f"{op}_fixed_bytes")) // parts for op in OPS},
    )


def _work(layer: Layer) -> int:
    return _of(layer, "forward_ns") + layer.fused_ns


def _even(instance: Instance) -> Profile:
    """Return the same work and bytes in equal layers, about as many, the same number for every device."""
    layers, devices = instance.profile.expanded_layers(), instance.options.devices
    count = devices * (len(layers) // devices)
    shared = {name: round(sum(_of(layer, name) for layer in layers) / count) for name in SHARED}
    averaged = {name: round(fmean(_of(layer, name) for layer in layers)) for name in AVERAGED}
    saved, captured = shared["saved_bytes"], shared["captured_bytes"]
    averaged["checkpoint_bytes"] = min(averaged["checkpoint_bytes"], saved)
    shared["residue_bytes"] = min(max(shared["residue_bytes"], captured), saved + captured)
    own = {"shared_bytes": 0, "tied_bytes": 0, "tie": None, "selective": None}  # what the first layer has by itself
    layer = structs.replace(layers[0], name="even", count=count, **own, **shared, **averaged)
    layer = structs.replace(layer, slices=_even_slices(layer, [one.slices for one in layers]))
    return structs.replace(instance.profile, layers=[layer])


def _even_slices(layer: Layer, slices: list[Sliceable | None]) -> Sliceable | None:
    """Return what slices of the even `layer` cost besides; None where one of the layers cannot run slice by slice."""
    known = [one for one in slices if one is not None]
    if len(known) < len(slices):
        return None

    def share(costs: Iterable[int]) -> int:
        return round(sum(costs) / layer.count)

    shared = {name: share(value_of(getattr(one, name)) for one in known) for name in SHARED_SLICES}
    shared["forward_attention_ns"] = min(shared["forward_attention_ns"], value_of(layer.forward_ns))
    least = min(value_of(layer.backward_input_ns), layer.fused_ns)
    shared["backward_input_attention_ns"] = min(shared["backward_input_attention_ns"], least)
    room = value_of(layer.saved_bytes) - value_of(layer.checkpoint_bytes)
    shared["carry_bytes"] = min(shared["carry_bytes"], room)
    return Sliceable(
        **shared,
        backward_overhead_ns=share(one.fused_overhead_ns for one in known),
        carry_gradient_bytes=share(one.gradient_or_carry_bytes for one in known),
        forward_prefix_bytes=round(fmean(value_of(one.forward_prefix_bytes) for one in known)),
        backward_prefix_bytes=round(fmean(value_of(one.backward_prefix_bytes) for one in known)),
        **{
            f"{op}_fixed_bytes": min(
                round(fmean(value_of(getattr(one, f"{op}_fixed_bytes")) for one in known)),
                value_of(getattr(layer, f"{op}_transient_bytes")),
            )
            for op in OPS
        },
    )


def _of(layer: Layer, name: str) -> int:
    """Return a cost of a layer."""
    return value_of(getattr(layer, DEFAULTS.get(name, name)))
