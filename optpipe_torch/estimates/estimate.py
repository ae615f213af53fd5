"""`optpipe profile --model`: a profile derived from a model's configuration and a GPU's data sheet, without the GPU.

Bytes and operations are counted on the meta device (`estimate_count`), times follow from the data sheet
(`estimate_time`). All numbers are marked `estimated`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, groupby
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from optpipe_compiler.documents.profile import OPS, P2P, Layer, Link, Machine, Profile, Quantity, Sliceable, version_of
from optpipe_compiler.errors import BadInput, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from optpipe_compiler.costs.gpus import Gpu
    from optpipe_compiler.costs.models import Architecture
    from optpipe_torch.estimates.count import Accumulation, Counted
    from optpipe_torch.profiler.records import LayerBytes

    _Placed = tuple[str, nn.Module, LayerBytes]
    """A layer in model order: its kind, itself, what one of its kind does and keeps."""

RESERVE_BYTES = 2_000_000_000
"""Context, communication buffers, workspaces, fragmentation."""
BYTES_PER_PARAMETER = 16
"""Weight 2, gradient 2, fp32 weight 4, both moments of Adam in fp32 4 each."""
SHARED_OUT = 12
"""Of these: fp32 weight and moments, of which each replica may keep its share alone."""
LARGEST_SIZE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """What is trained, and on what."""

    model: Architecture
    gpu: Gpu
    name: str = "model"
    devices: int = 8
    """Pipeline devices; each stands for `tensor_parallel` GPUs."""
    sequence_length: int = 4096
    microbatch_size: int = 1
    tensor_parallel: int = 1
    data_parallel: int = 1
    """Replicas of the pipeline, over which the optimizer's state and the fp32 weights are shared out."""
    shared_links: Literal["pairs", "none"] = "none"
    """`pairs`: GPUs 2i and 2i + 1 of a node share one host link."""
    dtype: Literal["bf16", "fp16"] = "bf16"
    accumulation: Literal["torch", "fused"] = "torch"
    """Who adds up the gradients of microbatches: an operation of its own, or the matrix product that computes them."""


def estimate(options: EstimateOptions, counted: dict[str, tuple[int, Counted]] | None = None) -> Profile:
    """Return the profile; raise BadInput for options that do not fit together, MissingDependency without torch.

    `counted`: what `count_layers` has found for the same model, microbatch and tensor parallel degree.
    """
    check(options)
    counted = count_layers(options) if counted is None else counted
    layers = [_layer(name, count, found, options) for name, (count, found) in counted.items()]
    return Profile(
        name=f"{options.name}-{options.gpu.name}",
        sequence_length=options.sequence_length,
        machine=_machine(options),
        layers=layers,
        version=version_of(layers),
    )


def assumptions(options: EstimateOptions) -> list[str]:
    """Return in words what the numbers take for granted, beside docs/ESTIMATES.md."""
    model, ranks = options.model, options.tensor_parallel
    said = [
        f"{BYTES_PER_PARAMETER} bytes per parameter: {options.dtype} weight and gradient, fp32 weight and Adam moments",
        f"{RESERVE_BYTES / 1e9:g} GB per GPU reserved for context, workspaces and fragmentation",
        "dense causal attention; nothing overlaps within an op; head and embedding have weights of their own",
    ]
    if options.data_parallel > 1:
        said.append(
            f"{SHARED_OUT} of the {BYTES_PER_PARAMETER} bytes per parameter are shared out over "
            f"{options.data_parallel} replicas; their exchange of gradients is not in the step"
        )
    if ranks > 1:
        said.append(
            f"bytes and times of one of {ranks} tensor-parallel GPUs, activations between layers split by sequence"
        )
    if model.experts:
        said.append(f"tokens spread evenly over {model.experts} experts, all of them on each device")
    if model.head_parts > 1:
        said.append("the second part of the head saves the hidden states, though the first saves them, too")
    return [*said, *options.gpu.assumed]


def check(options: EstimateOptions) -> None:
    """Refuse what cannot be divided, or cannot be meant."""
    model, ranks = options.model, options.tensor_parallel
    for option, value, largest in (
        ("--devices", options.devices, 10_000),
        ("--seq", options.sequence_length, LARGEST_SIZE),
        ("--microbatch-size", options.microbatch_size, LARGEST_SIZE),
        ("--tp", ranks, options.gpu.devices_per_node),
        ("--dp", options.data_parallel, 1_000_000),
    ):
        if not 1 <= value <= largest:
            raise BadInput(f"{option} is {value}, expected 1 to {largest}")
    for what, divided in (
        ("attention heads", model.heads),
        ("key-value heads", model.kv_heads),
        ("width of the feed-forward layers", model.ffn),
        ("sequence length", options.sequence_length),
        ("GPUs of a node", options.gpu.devices_per_node),
    ):
        if divided % ranks:
            raise BadInput(f"--tp is {ranks}, expected a divisor of the {what} ({divided})")
    for option, parts in (("--embedding-parts", model.embedding_parts), ("--head-parts", model.head_parts)):
        if not 1 <= parts <= model.vocab // ranks:
            raise BadInput(f"{option} is {parts}, expected 1 to the vocabulary ({model.vocab // ranks})")
    if model.positions and options.sequence_length > model.positions:
        raise BadInput(
            f"--seq is {options.sequence_length}, expected at most the positions of the model ({model.positions})"
        )


def check_devices(options: EstimateOptions) -> None:
    """Refuse more devices than the model has layers, for which nothing can be planned."""
    if options.devices > options.model.chain:
        raise BadInput(f"--devices is {options.devices}, expected at most the model's {options.model.chain} layers")


def count_layers(options: EstimateOptions) -> dict[str, tuple[int, Counted]]:
    """Return, per name of layers in model order, how many there are and what one of them does and keeps.

    It is the same for every GPU and any number of devices, and counted once for them.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("counting a model's layers needs torch: pip install 'optpipe[runtime]'")
    return _counted(
        options.model,
        options.sequence_length,
        options.microbatch_size,
        options.tensor_parallel,
        options.dtype,
        options.accumulation,
    )


@lru_cache(maxsize=8)
def _counted(
    model: Architecture, sequence: int, batch: int, ranks: int, of_dtype: str, accumulation: Accumulation
) -> dict[str, tuple[int, Counted]]:
    import torch

    from optpipe_torch.estimates.count import count_between
    from optpipe_torch.models.known import DTYPES
    from optpipe_torch.models.layers import border, chain_of, kind_of, makers
    from optpipe_torch.profiler.records import SLICES
    from runtime_torch.bundles import Bundle
    from runtime_torch.slices import is_sliceable

    dtype = {**DTYPES, "fp16": torch.float16}[of_dtype]
    found: dict[str, tuple[int, Counted]] = {}
    borders = [Bundle((((batch, sequence), torch.int64),))]
    line: list[_Placed] = []
    covered: set[tuple[str, ...]] = set()
    with torch.device("meta"):
        tokens = torch.empty(batch, sequence, dtype=torch.int64)
        short = sequence // SLICES
        shorter = makers(model, short, ranks) if short and short % ranks == 0 else {}
        short_borders = [Bundle((((batch, short), torch.int64),))]
        for name, (number, make) in makers(model, sequence, ranks).items():
            kind, layer = kind_of(name, model), make().to(dtype)
            target = tokens if name.startswith("head") else None
            borders.append(border(name, model, batch, sequence, dtype, ranks))
            short_borders.append(border(name, model, batch, short, dtype, ranks))
            if kind not in found:
                counted = count_between([layer], borders[-2:], target, accumulation)
                counted.sizes.static = BYTES_PER_PARAMETER * sum(p.numel() for p in layer.parameters())
                counted.sizes.chain = chain_of(name)
                if is_sliceable(layer) and shorter:
                    wanted, few = None if target is None else tokens[:, :short], [shorter[name][1]().to(dtype)]
                    counted.slice = count_between(few, short_borders[-2:], wanted, accumulation)
                found[kind] = number, counted
            found[name] = found[kind]
            if name == "block":
                _cover([found[name][1].sizes] * 2, count_between([make().to(dtype), layer], borders[-1:] * 3).sizes)
            line.append((kind, layer, found[name][1].sizes))
            for kinds, layers, alone in _rows(line, model):
                if kinds not in covered:
                    covered.add(kinds)
                    _cover(alone, count_between(layers, borders[-len(layers) - 1 :], target).sizes)
    return found


def _rows(
    line: Sequence[_Placed], model: Architecture
) -> Iterator[tuple[tuple[str, ...], list[nn.Module], list[LayerBytes]]]:
    """Yield kinds, layers and sizes of the rows that end with the last layer and pass on something else than blocks do:
    pairs where there are parts, and pairs and triples of halves of blocks."""
    for count in (2, 3):
        row = line[-count:]
        halves = all(kind.startswith("block.") for kind, _, _ in row)
        if len(row) == count and (halves or (count == 2 and model.has_parts)):
            yield tuple(kind for kind, _, _ in row), [layer for _, layer, _ in row], [sizes for _, _, sizes in row]


def _cover(alone: Sequence[LayerBytes], together: LayerBytes) -> None:
    """Raise the transient bytes of the last layer of a row where those of all do not cover a stage of it: what passes
    between.

    Two layers of a chain save together less than alone: what they share.
    """
    last = alone[-1]
    if len(alone) == 2 and last.follows(alone[0]):
        less = alone[0].saved + last.saved - together.saved
        last.shared = max(0, min(less, last.checkpoint))  # of the target each layer gets a copy of its own
    missing = dict(together.transient)
    saved = sum(one.saved_after(before) for before, one in zip((None, *alone[:-1]), alone, strict=True))
    missing["forward"] = max(0, missing["forward"] + together.saved - saved)
    captured = together.captured - sum(one.captured for one in alone)
    missing["backward_input"] = max(0, missing["backward_input"] + captured)
    covered = {op: max(one.transient[op] for one in alone) for op in missing}
    last.transient |= {op: size for op, size in missing.items() if size > covered[op]}


def _layer(name: str, number: int, counted: Counted, options: EstimateOptions) -> Layer:
    from optpipe_torch.estimates.time import work_ns

    times = {op: _estimated(work_ns(work, options.gpu, options.tensor_parallel)) for op, work in counted.work.items()}
    # a profile has no activation that is smaller than the input
    parameters = counted.sizes.static // BYTES_PER_PARAMETER
    sizes = replace(
        counted.sizes,
        saved=max(counted.sizes.saved, counted.sizes.checkpoint),
        static=(BYTES_PER_PARAMETER - SHARED_OUT) * parameters + -(-SHARED_OUT * parameters // options.data_parallel),
    )
    layer = sizes.layer(name, number, times | {"recompute": times["forward"]}, _estimated)
    return structs.replace(layer, slices=_slices(counted, options))


def _slices(counted: Counted, options: EstimateOptions) -> Sliceable | None:
    """Return what slices cost beside their share: kernels that are too small, weights that each slice reads again; and
    what attention over earlier slices needs for a while: partial results, in fp32 where they are added up."""
    if counted.slice is None:
        return None
    from optpipe_torch.estimates.time import kernel_ns, work_ns
    from optpipe_torch.profiler.records import SLICES

    attention, more, ranks = {}, {}, options.tensor_parallel
    for op in OPS:
        whole, part = counted.work[op], counted.slice.work[op]
        kernels = [kernel for kernel in whole.kernels if kernel.kind.startswith("attention")]
        attention[op] = sum(kernel_ns(kernel, options.gpu, ranks) for kernel in kernels)
        share = (work_ns(whole, options.gpu, ranks) - attention[op]) / SLICES + attention[op] / SLICES**2
        more[op] = _estimated(max(0, work_ns(part, options.gpu, ranks) - share))
    model, tokens = options.model, options.microbatch_size * options.sequence_length // ranks
    wide, own, held = 4, 2, counted.sizes.transient
    has_attention = bool(attention["forward"])
    # of each rank: all tokens, and a part of the heads
    result, block = tokens * model.heads * model.head_dim, 2 * tokens * model.kv_heads * model.head_dim
    return Sliceable(
        forward_attention_ns=_estimated(attention["forward"]),
        backward_input_attention_ns=_estimated(attention["backward_input"]),
        forward_overhead_ns=more["forward"],
        backward_input_overhead_ns=more["backward_input"],
        backward_weight_overhead_ns=more["backward_weight"],
        backward_overhead_ns=more["backward"],
        carry_bytes=_estimated(own * block * has_attention),
        forward_prefix_bytes=_estimated(max(0, (wide + own) * result - held["forward"]) * has_attention),
        backward_prefix_bytes=_estimated(
            max(0, (wide + own) * result + own * block - min(held["backward_input"], held["backward"])) * has_attention
        ),
        # weight gradients before they are added are as large for a slice
        backward_weight_fixed_bytes=_estimated(held["backward_weight"]),
        backward_fixed_bytes=_estimated(min(held["backward"], held["backward_weight"])),
    )


def _estimated(value: float) -> Quantity:
    return Quantity(value=round(value), source="estimated")


def _machine(options: EstimateOptions) -> Machine:
    gpu = options.gpu
    return Machine(
        devices=options.devices,
        kind=gpu.name if options.tensor_parallel == 1 else f"{gpu.name} x {options.tensor_parallel}",
        memory_bytes=_estimated(gpu.memory_bytes),
        reserve_bytes=_estimated(RESERVE_BYTES),
        p2p=_messages(options),
        links=_links(options),
    )


def _messages(options: EstimateOptions) -> list[P2P]:
    """Return the links between pairs: those of one node, and, where there are several nodes, the network."""
    from optpipe_torch.estimates.time import LINK_SHARE

    gpu, node = options.gpu, options.gpu.devices_per_node // options.tensor_parallel
    peer = P2P(latency_ns=_estimated(gpu.peer_latency_ns), bytes_per_s=_estimated(gpu.peer_bytes_per_s * LINK_SHARE))
    network = P2P(
        latency_ns=_estimated(gpu.network_latency_ns), bytes_per_s=_estimated(gpu.network_bytes_per_s * LINK_SHARE)
    )
    if options.devices == 1:
        return []
    if options.devices <= node:
        return [peer]
    pairs = [pair for pair in combinations(range(options.devices), 2) if pair[0] // node == pair[1] // node]
    return [network, *(structs.replace(peer, devices=pair) for pair in pairs)]


def _links(options: EstimateOptions) -> list[Link]:
    """Return the host links, all of one kind: of each pipeline device, or of two of them.

    Where a pair of GPUs shares a link, and both belong to one pipeline device, that device has half the bandwidth.
    """
    gpu, pairs = options.gpu, options.shared_links == "pairs"
    halved = 2 if pairs and options.tensor_parallel > 1 else 1
    alone, duplex = _estimated(gpu.host_bytes_per_s / halved), _estimated(gpu.host_duplex_bytes_per_s / halved)
    link = Link(
        d2h_bytes_per_s=alone,
        h2d_bytes_per_s=alone,
        duplex_d2h_bytes_per_s=duplex,
        duplex_h2d_bytes_per_s=duplex,
        latency_ns=_estimated(gpu.host_latency_ns),
    )
    if not pairs or options.tensor_parallel > 1:
        return [link]
    paired = groupby(range(options.devices), lambda d: (d // gpu.devices_per_node, d % gpu.devices_per_node // 2))
    return [structs.replace(link, devices=list(group)) for _, group in paired]
