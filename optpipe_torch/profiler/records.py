"""From samples to a profile: what the measuring processes found, and how it becomes the numbers of profile.json."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import combinations, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from optpipe_compiler.costs.fit import quartiles
from optpipe_compiler.documents.profile import (
    OPS,
    P2P,
    Host,
    Layer,
    Link,
    Machine,
    Model,
    Profile,
    Quantity,
    Selective,
    Sliceable,
    value_of,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from optpipe_compiler.documents.profile import Cost

TIMED = (*OPS, "recompute")
Samples = dict[str, list[int]]
"""Samples in ns by op: forward, backward_input, backward_weight, backward, recompute."""


@dataclass
class SelectiveBytes:
    """The bytes of a profile's `Selective`."""

    saved: int
    captured: int
    transient: int


GAPS_PERMILLE = 50
"""Of a GPU's memory: what torch's caching allocator holds beside what is in use, in gaps that nothing fits. Of 80 GB it
held 0.4 to 6.8 GB beside what the plans of docs/GPU.md use, most beside the largest logits; where it may hold less it
gives gaps back, which takes time, or is out of memory."""
SLICES = 4
"""Into so many equal slices a microbatch is cut where slices are measured: the first, the last, and two to check by."""


def slice_spans(tokens: int) -> list[tuple[int, int]]:
    """Return the slices of a sequence that are measured; none of fewer tokens than slices."""
    return list(pairwise(tokens * k // SLICES for k in range(SLICES + 1))) if tokens >= SLICES else []


def sample_name(op: str, index: int | None) -> str:
    """Name the samples of one op of one slice; None: of the whole, measured in turn with its slices."""
    return f"{op} of the whole" if index is None else f"{op} of slice {index}"


@dataclass
class SlicedBytes:
    """The bytes of a profile's `Sliceable`."""

    carry: int
    forward_prefix: int = 0
    backward_prefix: int = 0
    fixed: dict[str, int] = field(default_factory=dict)
    """By op: of the layer's transient bytes."""


@dataclass
class LayerBytes:
    """Bytes of one layer and microbatch, as the profile names them."""

    saved: int
    residue: int
    captured: int
    checkpoint: int
    output: int
    static: int
    shared: int = 0
    """Of what is saved, that which the layer of its chain right before it saves, too."""
    chain: str | None = None
    """As the profile has it; None: of layers of its kind."""
    transient: dict[str, int] = field(default_factory=dict)
    """By op: forward, backward_input, backward_weight, backward."""
    own_transient: dict[str, int] = field(default_factory=dict)
    """The same of a stage of this layer alone."""
    more_saved: int = 0
    """Of what is saved, that which a stage of this layer alone does not have: of tensors that it gets a part of."""
    own_saved: int = 0
    """What a stage of this layer alone saves, where `saved` is at least the input."""
    changing: int = 0
    """Of the checkpoint, buffers that a forward changes."""
    passes_back: bool = True
    """Whether what enters it gets a gradient, or needs none: it is the model's first layer."""
    selective: SelectiveBytes | None = None
    """With selective recompute; None: the layer has nothing to recompute so."""
    sliced: SlicedBytes | None = None
    """In slices; None: the layer does not say that it can be sliced."""

    def layer(self, name: str, count: int, times: Mapping[str, Cost], cost: Callable[[int], Cost]) -> Layer:
        """Return the profile's record of `count` equal layers with these bytes, each as `cost` makes it, and with these
        times in ns by op; `selective` is what selective recompute takes."""
        whole = ("saved", "residue", "captured", "checkpoint", "output", "static", *(["shared"] if self.shared else []))
        figures: dict[str, Any] = {f"{one}_bytes": cost(getattr(self, one)) for one in whole}
        figures |= {f"{op}_transient_bytes": cost(self.transient[op]) for op in OPS}
        figures |= {f"{op}_ns": times[op] for op in TIMED}
        selective = self._selective(cost, times.get("selective", 0))
        return Layer(name=name, count=count, chain=self.chain, selective=selective, **figures)

    def _selective(self, cost: Callable[[int], Cost], recompute_ns: Cost) -> Selective | None:
        if self.selective is None:
            return None
        least = max(self.checkpoint, self.shared)
        saved = max(self.selective.saved, least)
        return Selective(
            saved_bytes=cost(saved),
            captured_bytes=cost(min(self.residue, max(self.selective.captured, self.residue - saved))),
            recompute_ns=recompute_ns,
            transient_bytes=cost(self.selective.transient),
        )

    def keep_more(self, saved: int, residue: int, captured: int) -> None:
        """Add what it keeps more beside other layers than in a stage of its own; negative: nothing."""
        saved, residue, captured = (max(0, nbytes) for nbytes in (saved, residue, captured))
        self.more_saved = saved
        self.saved += saved
        self.captured += captured
        self.residue = min(self.residue + residue + captured, self.saved + self.captured)
        if self.selective is not None:
            self.selective.saved += saved
            self.selective.captured += captured

    def saved_after(self, before: LayerBytes | None) -> int:
        """What it saves behind another layer of its stage, as `documents.profile.in_one_stage` has it."""
        return max(self.saved - self.shared, self.checkpoint) if self.follows(before) else self.saved

    def follows(self, before: LayerBytes | None) -> bool:
        """Whether both are of one chain."""
        return before is self or (before is not None and self.chain is not None and self.chain == before.chain)


@dataclass
class Copies:
    """Samples in ns of copies of `nbytes` between device and host, and of next to no bytes (`latency`)."""

    nbytes: int
    latency: list[int] = field(default_factory=list)
    d2h: list[int] = field(default_factory=list)
    h2d: list[int] = field(default_factory=list)
    duplex_d2h: list[int] = field(default_factory=list)
    duplex_h2d: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    """What copies keep the compute lane from, in thousandths of their time; none where they run beside it."""


@dataclass
class Messages:
    """Samples in ns of messages of two sizes, and of what half a large one, sent or received, takes from a core."""

    small_bytes: int
    large_bytes: int
    small: list[int] = field(default_factory=list)
    large: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    """None where the device does not wait for the host to send."""


@dataclass
class Findings:
    """What one process measured."""

    names: list[str]
    """The kind of each layer of the model."""
    overhead: Samples
    times: dict[str, Samples]
    """By kind of layer."""
    sizes: dict[str, LayerBytes]
    """By kind of layer."""
    messages: Messages
    copies: Copies
    """While all processes copied."""
    copies_alone: Copies | None
    """While only this process copied of those on its host link; of the first one on each link."""
    messages_with: dict[int, Messages] = field(default_factory=dict)
    """By neighbour, where every pair of neighbours was measured."""
    kind: str = "cpu"
    """Of the device, as the profile names it."""
    memory: tuple[int, int] | None = None
    """Bytes of the device, and those taken before any tensor; None: its memory is a share of the host's."""
    titles: list[str] = field(default_factory=list)
    """The name of each layer, where it has one of its own; empty: all have that of their kind."""
    ties: list[tuple[str, int] | None] = field(default_factory=list)
    """Of each layer: the name of its tie and the static bytes that layers of it share; empty: there are no ties."""
    sliced: dict[str, Samples] = field(default_factory=dict)
    """By kind of layer that can be sliced: samples of each op of each slice (`sample_name`)."""
    sequence_length: int | None = None
    """Of the user's own data, where these were asked for it."""
    host_link: str | None = None
    """Equal for devices that share the way to their host; None: not known who does."""
    host_memory_bytes: int = 0
    """Of the host's memory what is free or can be freed."""


def assemble(model: Model, devices: int, findings: Sequence[Findings], per_host: int | None = None) -> Profile:
    """Join what all processes found, their samples together, into the profile of `devices` devices.

    `per_host` of them stand on one machine; absent: all. What was measured on fewer GPUs than devices is taken for the
    others, too, and called estimated where it says something about them together: links and messages.
    """
    first, here = findings[0], per_host or devices
    model = structs.replace(model, sequence_length=first.sequence_length or model.sequence_length)
    overhead = _overhead(findings)
    layers: list[Layer] = []
    ties = first.ties or [None] * len(first.names)
    for (title, kind, tie), run in groupby(zip(first.titles or first.names, first.names, ties, strict=True)):
        times = {op: [t for found in findings for t in found.times[kind][op]] for op in first.times[kind]}
        layer = _layer(title, len(list(run)), times, first.sizes[kind], overhead.value, is_first=not layers)
        if kind in first.sliced and first.sizes[kind].sliced is not None:
            parts = {name: [t for found in findings for t in found.sliced[kind][name]] for name in first.sliced[kind]}
            spans = slice_spans(model.sequence_length)
            layer = structs.replace(layer, slices=_sliceable(layer, parts, spans, first.sizes[kind], overhead.value))
        if tie is not None:
            layer = structs.replace(layer, tie=tie[0], tied_bytes=_once(tie[1]))
        layers.append(layer)
    links = _links(findings, devices, here)
    memory_bytes, reserve_bytes = _memory(findings, here)
    return Profile(
        name=f"{_title(model)}-{'cpu' if first.memory is None else 'cuda'}",
        model=model,
        machine=Machine(
            devices=devices,
            kind=", ".join(dict.fromkeys(found.kind for found in findings)),
            memory_bytes=_once(memory_bytes),
            reserve_bytes=reserve_bytes,
            **_host_memory(findings, devices, here),
            op_overhead_ns=overhead,
            p2p=[] if devices == 1 else _messages(findings, links[0], devices, here),
            links=links,
        ),
        layers=layers,
        version=version_of(layers),
    )


def _overhead(findings: Sequence[Findings]) -> Quantity:
    """Return what an op takes that does next to nothing; the spread is that of the op that varies most, as the
    kinds of ops differ from each other without being noise."""
    kinds = [quantity(t for found in findings for t in found.overhead[op]) for op in findings[0].overhead]
    every = quantity(t for found in findings for samples in found.overhead.values() for t in samples)
    return structs.replace(every, spread=max(kind.spread for kind in kinds))


def _memory(findings: Sequence[Findings], per_host: int) -> tuple[int, Cost]:
    """Return a device's bytes and its reserve: the least of one; the most that is taken, and the allocator's gaps."""
    known = [found.memory for found in findings if found.memory is not None]
    if not known:
        return physical_memory() // per_host, 0
    total = min(total for total, _ in known)
    gaps = total * GAPS_PERMILLE // 1000
    return total, _estimated(max(taken for _, taken in known) + gaps)


def _host_memory(findings: Sequence[Findings], devices: int, per_host: int) -> dict[str, Any]:
    """Return the memory of the one host, or of each of several, whose devices are the ranks that were measured."""
    if devices <= per_host:
        return {"host_memory_bytes": _once(min(found.host_memory_bytes for found in findings))}
    groups = [list(range(first, min(first + per_host, devices))) for first in range(0, devices, per_host)]
    sizes = [min(findings[rank].host_memory_bytes for rank in group) for group in groups]
    return {"hosts": [Host(devices=group, memory_bytes=_once(size)) for group, size in zip(groups, sizes, strict=True)]}


def _title(model: Model) -> str:
    config = model.config
    if "layers" in config and "hidden" in config:
        return f"{config.get('kind', model.builder)}-{config['layers']}x{config['hidden']}"
    return model.builder


def _layer(name: str, count: int, times: Samples, sizes: LayerBytes, overhead_ns: int, *, is_first: bool) -> Layer:
    """Return the record of `count` equal layers; the overhead of an op is counted in the machine, not here."""

    net = {op: quantity(max(0, t - overhead_ns) for t in times[op]) for op in TIMED}
    if is_first:  # nothing is before it: its input has no gradient, and all of its backward is in W
        net["backward_input"] = _estimated(0)
    if sizes.selective:
        net["selective"] = quantity(times["selective"])
    return sizes.layer(name, count, net, _once)


def _sliceable(
    layer: Layer, times: Samples, spans: Sequence[tuple[int, int]], sizes: LayerBytes, overhead_ns: int
) -> Sliceable:
    """Return what the layer costs in slices; see `profiler.slices`.

    Slices are held against the whole that was measured in turn with them: what else ran then has touched both.
    """
    assert sizes.sliced is not None
    sliced = sizes.sliced
    attention, more = {}, {}
    for op in OPS:
        names = [sample_name(op, k) for k in (None, *range(len(spans)))]
        beside, *found = [quantity(max(0, t - overhead_ns) for t in times[name]) for name in names]
        known = value_of(getattr(layer, f"{op}_ns") or 0)
        whole = beside.value if known else 0  # nothing is before the first layer, whose input has no gradient
        if whole and op in ("forward", "backward_input"):
            one = _attention(whole, found, spans)
            attention[op] = structs.replace(
                one, value=round(one.value * known / whole), spread=round(one.spread * known / whole)
            )
        more[op] = structs.replace(
            found[0], value=max(0, round((sum(one.value for one in found) - whole) / len(spans))) if whole else 0
        )
    if "backward_input" in attention:
        most = min(value_of(layer.backward_input_ns), value_of(layer.backward_ns or layer.backward_input_ns))
        one = attention["backward_input"]
        attention["backward_input"] = structs.replace(one, value=min(one.value, most))
    return Sliceable(
        forward_attention_ns=attention.get("forward", 0),
        backward_input_attention_ns=attention.get("backward_input", 0),
        forward_overhead_ns=more["forward"],
        backward_input_overhead_ns=more["backward_input"],
        backward_weight_overhead_ns=more["backward_weight"],
        backward_overhead_ns=more["backward"],
        carry_bytes=_once(sliced.carry),
        forward_prefix_bytes=_once(sliced.forward_prefix),
        backward_prefix_bytes=_once(sliced.backward_prefix),
        **{f"{op}_fixed_bytes": _once(size) for op, size in sliced.fixed.items() if size},
    )


def _attention(whole: int, found: Sequence[Quantity], spans: Sequence[tuple[int, int]]) -> Quantity:
    """Return which part of `whole` ns is attention, by the first and the last slice.

    With f and g the shares of a slice in the tokens and in the pairs of tokens, it takes (T - X) f + X g and what every
    slice takes besides. The spread is by how much the slices between are off, or the two medians may be, if that is
    more; what is no more than its spread is no attention.
    """
    length = spans[-1][1]
    tokens = [(end - begin) / length for begin, end in spans]
    pairs = [(end**2 - begin**2) / length**2 for begin, end in spans]

    def at(k: int, x: float) -> float:
        return (whole - x) * tokens[k] + x * pairs[k]

    lever = (pairs[-1] - pairs[0]) - (tokens[-1] - tokens[0])
    x = (found[-1].value - found[0].value - whole * (tokens[-1] - tokens[0])) / lever
    x = min(max(0.0, x), float(whole))
    base = found[0].value - at(0, x)
    off = max((abs(found[k].value - base - at(k, x)) for k in range(1, len(spans) - 1)), default=0.0)
    unsure = max(one.spread / max(1, one.samples) ** 0.5 for one in (found[0], found[-1]))
    spread = round(max(off, unsure) / lever)
    value = round(x) if x > spread else 0
    return Quantity(value=value, source="measured", samples=found[0].samples, spread=spread if value else 0)


def _once(value: int) -> Quantity:
    return Quantity(value=value, source="measured", samples=1)


def _estimated(value: int) -> Quantity:
    return Quantity(value=value, source="estimated")


def _messages(findings: Sequence[Findings], link: Link, devices: int, per_host: int) -> list[P2P]:
    """Return what a message takes between any two devices, then an entry for each pair that was measured by itself.

    With several hosts that were measured the first entry is of messages between hosts, and every pair within a host has
    an entry: its own, or that of all measured pairs within hosts. Where there was no pair, messages are estimated as on
    their way through the host.
    """
    if not any(found.messages.small for found in findings):
        speed = min(value_of(link.d2h_bytes_per_s), value_of(link.h2d_bytes_per_s))
        return [P2P(latency_ns=_estimated(2 * value_of(link.latency_ns)), bytes_per_s=_estimated(speed))]
    pairs = {
        (rank, peer): [messages, findings[peer].messages_with[rank]]
        for rank, one in enumerate(findings)
        for peer, messages in sorted(one.messages_with.items())
        if rank < peer
    }
    own = {pair: structs.replace(_p2p(both), devices=pair) for pair, both in pairs.items()}
    between, within = (
        [messages for (a, b), both in pairs.items() if (a // per_host != b // per_host) is across for messages in both]
        for across in (True, False)
    )
    if not between:
        return [_p2p([found.messages for found in findings]), *own.values()]
    if within:
        usual, hosts = _p2p(within), range(0, devices, per_host)
        neighbours = [pair for first in hosts for pair in combinations(range(first, first + per_host), 2)]
        own = {pair: structs.replace(usual, devices=pair) for pair in neighbours if pair[1] < devices} | own
    return [_p2p(between), *(own[pair] for pair in sorted(own))]


def _p2p(messages: Sequence[Messages]) -> P2P:
    """Put the line through the median times of the two sizes.

    Where the larger one's spread is more than what its bytes add, latency and bandwidth cannot be told apart, and all
    time is bandwidth's: messages of a model have the larger size, for which either is right. So it is where the model's
    messages are no larger than the small one.
    """
    few = quantity(t for found in messages for t in found.small)
    many = quantity(t for found in messages for t in found.large)
    sizes = messages[0]
    busy = [t for found in messages for t in found.busy]
    overhead = quantity(busy) if busy else 0
    if sizes.large_bytes <= sizes.small_bytes or many.value - few.value <= many.spread:
        return P2P(bytes_per_s=bandwidth(many, sizes.large_bytes, 0), overhead_ns=overhead)
    speed = bandwidth(many, sizes.large_bytes - sizes.small_bytes, few.value)
    latency = max(0, few.value - round(sizes.small_bytes * 1e9 / speed.value))
    return P2P(
        latency_ns=Quantity(value=latency, source="measured", samples=few.samples, spread=few.spread),
        bytes_per_s=speed,
        overhead_ns=overhead,
    )


def _links(findings: Sequence[Findings], devices: int, per_host: int) -> list[Link]:
    """Return the host links, those of the machine's topology where it is known; of more devices, as if repeated."""
    if any(found.host_link is None for found in findings):
        links = _guessed_links(findings, devices, per_host)
        # a CPU stands for as many devices as it is asked to, a GPU for itself
        is_partial = findings[0].memory is not None and len(findings) < devices
        return [_taken_for_more(link) for link in links] if is_partial else links
    groups: dict[str | None, list[int]] = {}
    for rank, found in enumerate(findings):
        groups.setdefault(found.host_link, []).append(rank)
    links = []
    for group in groups.values():
        link = structs.replace(_known_link([findings[rank] for rank in group]), devices=group)
        links.append(link)
        for shift in range(len(findings), devices, len(findings)):
            members = [shift + rank for rank in group if shift + rank < devices]
            if members:
                links.append(structs.replace(_taken_for_more(link), devices=members))
    return links


def _known_link(sharing: Sequence[Findings]) -> Link:
    """Return the link of devices that are known to share it, and with no other.

    A link serves one transfer at a time. Copies of n devices at once then take n times as long each as their share of
    the link's time. This share counts where it is more than a copy takes alone: what the others cost beyond taking
    turns is in it. One that is not shared has the bandwidth that is left while all processes copy.
    """
    alone = sharing[0].copies_alone or sharing[0].copies
    latency = quantity(t for found in sharing for t in found.copies.latency)

    def share(ns: int) -> int:
        return latency.value + max(0, ns - latency.value) // len(sharing)

    def samples(direction: str) -> list[int]:
        shares = [share(t) for found in sharing for t in getattr(found.copies, direction)]
        by_itself = getattr(alone, direction)
        if len(sharing) == 1 or quantity(shares).value > quantity(by_itself).value:
            return shares
        return list(by_itself)

    return _link(alone.nbytes, latency, samples, alone.busy)


def _guessed_links(findings: Sequence[Findings], devices: int, per_host: int) -> list[Link]:
    """Return the host links: one for each device, or one for all devices of a host, whichever is closer to the truth.

    The copies of n processes at once run, each, at a share of the speed alone: near 1 where each core has memory
    bandwidth of its own, 1/n where the memory bus is the bottleneck. Nearer to 1/n is called shared; the bandwidths
    are then those of one process alone, else those while all processes copy.
    """
    alone = findings[0].copies_alone
    together = [found.copies for found in findings]
    shared = alone is not None and _is_shared(alone, together)
    used = [alone] if shared and alone is not None else together
    latency = quantity(t for copies in used for t in copies.latency)
    busy = [t for copies in used for t in copies.busy]
    link = _link(used[0].nbytes, latency, lambda direction: [t for c in used for t in getattr(c, direction)], busy)
    groups = [list(range(first, min(first + per_host, devices))) for first in range(0, devices, per_host)]
    return [structs.replace(link, devices=group) for group in groups] if shared else [link]


def _link(nbytes: int, latency: Quantity, samples: Callable[[str], Sequence[int]], busy: Sequence[int]) -> Link:
    def speed(direction: str) -> Quantity:
        return bandwidth(quantity(samples(direction)), nbytes, latency.value)

    return Link(
        d2h_bytes_per_s=speed("d2h"),
        h2d_bytes_per_s=speed("h2d"),
        duplex_d2h_bytes_per_s=speed("duplex_d2h"),
        duplex_h2d_bytes_per_s=speed("duplex_h2d"),
        latency_ns=latency,
        compute_permille=quantity(busy) if busy else 0,
    )


def _taken_for_more(link: Link) -> Link:
    """Return the link of a device that was not there: like this one, but estimated."""
    costs = {name: cost for name, cost in structs.asdict(link).items() if isinstance(cost, Quantity)}
    return structs.replace(link, **{name: _estimated(cost.value) for name, cost in costs.items()})


def _is_shared(alone: Copies, together: Sequence[Copies]) -> bool:
    share = quantity([*alone.d2h, *alone.h2d]).value / max(
        1, quantity([t for copies in together for t in (*copies.d2h, *copies.h2d)]).value
    )
    return len(together) > 1 and share < (1 + 1 / len(together)) / 2


def quantity(samples: Iterable[int]) -> Quantity:
    """Return the median of the samples, their number and their interquartile range."""
    values = list(samples)
    middle, spread = quartiles(values)
    return Quantity(value=round(middle), source="measured", samples=len(values), spread=round(spread))


def bandwidth(time: Quantity, nbytes: int, latency_ns: int) -> Quantity:
    """Return bytes per second of `nbytes` in `time` ns beyond the latency, with the relative spread of that time.

    Where the spread is more than that time, the latency is left out: what it leaves is noise.
    """
    net = time.value - latency_ns
    net = max(1, time.value if net <= time.spread else net)
    speed = max(1, round(nbytes * 1e9 / net))
    return Quantity(value=speed, source="measured", samples=time.samples, spread=round(speed * time.spread / net))


def physical_memory() -> int:
    """Return the bytes of RAM of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Return the bytes of RAM that are free or can be freed; all of it where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return physical_memory()
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return physical_memory() if kilobytes is None else int(kilobytes) * 1024
