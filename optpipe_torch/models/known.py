"""The model that a profile measures and `run` trains: a GPT over bytes, a known architecture, or a user's layers."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from optpipe_compiler.costs.models import Architecture
from optpipe_compiler.documents.files import said_by
from optpipe_compiler.errors import BadInput
from optpipe_torch.models import layers, user_model
from optpipe_torch.models.user_functions import OWN
from runtime_torch.bundles import Bundle
from runtime_torch.microbatch import inner_layer
from runtime_torch.stages import stages_between
from runtime_torch.ties import layer_of, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Model
    from optpipe_torch.models.user_model import DrawnBatch, UserModel
    from runtime_torch.stages import Stages
    from runtime_torch.ties import Names

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BYTE_VALUES = 256


def build(model: Model, indices: range | None = None, on: torch.device | None = None) -> list[nn.Module]:
    """Build the layers `indices` of the model (all when None), the same values whichever others are built.

    `on`: where known models are made, with values of that device's random numbers; where values do not matter this
    saves seconds per layer on a GPU. None, and a user's layers: on the CPU.

    The last layer of a model is called as `layer(x, target)` and returns the scalar loss, the others as `layer(x)`; a
    user's layers may take and return several tensors. A user's function is called with the model's config and returns
    the whole list of layers, or of functions without arguments that make them: then only the layers asked for are made.
    """
    return list(each(model, indices, on))


def each(model: Model, indices: range | None = None, on: torch.device | None = None) -> Iterator[nn.Module]:
    """Yield what `build` returns; layers that functions make are made one at a time."""
    dtype = _dtype(model)
    if model.builder not in OWN:
        own = _user(model, touched=True).layers
        for index in range(len(own)) if indices is None else indices:
            yield user_model.made(model, index, own[index]).to(dtype)
        return
    makers = _makers(model)
    for index in range(len(makers)) if indices is None else indices:
        with nullcontext() if on is None else on:
            layer = _seeded(model.seed, index, makers[index]).to(dtype)
        yield layer


def stages(
    model: Model, schedule: ir.Schedule, rank: int, device: torch.device, on: torch.device | None = None
) -> Stages:
    """Return the stages of a rank of the schedule, of whose layers alone are built (`on`: see `build`)."""
    mine = [range(*stage.layers) for stage in schedule.stages_of(rank)]
    built = {index: layer for own in mine for index, layer in zip(own, build(model, own, on), strict=True)}
    return stages_between(schedule, built, rank, device, bundles(model), ties=ties(model))


def ties(model: Model) -> list[Names]:
    """Return the parameters that layers share, by their names in the state dict; models of our own share none."""
    return [] if model.builder in OWN else _user(model).all_ties()


class TiedLayer(NamedTuple):
    """The tie of a layer."""

    name: str
    """Its first name."""
    nbytes: int
    """Of the tied parameter."""
    kept_bytes: int
    """The same with what is kept of it for the whole step."""


def tied_layers(model: Model) -> list[TiedLayer | None]:
    """Return the tie of each layer; None: it has none.

    A layer with several ties has that of its largest parameter. Raises BadInput for a name of no parameter.
    """
    found: list[TiedLayer | None] = [None] * layer_count(model)
    own = [] if model.builder in OWN else _user(model).layers
    dtype = _dtype(model)
    for tie in ties(model):
        for name in tie:
            prefix = layer_of(name, map(str, range(len(own))))
            index = int(prefix)
            with torch.random.fork_rng(devices=[]):
                layer = user_model.sketched(model, index, own[index])
            tied = named(name, {prefix: layer})
            nbytes, known = tied.numel() * dtype.itemsize, found[index]
            if known is None or known.nbytes < nbytes:
                found[index] = TiedLayer(tie[0], nbytes, sum(kept_bytes(inner_layer(layer), tied, dtype.itemsize)))
    return found


def kept_bytes(layer: nn.Module, tensor: Tensor, itemsize: int) -> list[int]:
    """Return the bytes of what is kept for the whole step: of a weight also gradients and both moments of AdamW, unless
    the layer says another number for each of its weights."""
    said: int | None = getattr(layer, "bytes_per_parameter", None)
    if not tensor.requires_grad or said is None:
        return [tensor.numel() * itemsize] * (4 if tensor.requires_grad else 1)
    return [tensor.numel() * said]


def layer_count(model: Model) -> int:
    """Return how many layers the model has."""
    return len(_makers(model) if model.builder in OWN else _user(model).layers)


def layer_names(model: Model) -> list[str]:
    """Return the kind of each layer; layers of one kind cost the same.

    A user's layers are of one kind if they look alike (`user_model.kinds`).
    """
    if model.builder in OWN:
        return [layers.kind_of(title, _architecture(model)) for title in layer_titles(model)]
    return user_model.kinds(model, _user(model), bundles(model))


def first_trained(model: Model) -> int:
    """Return the first layer with a parameter that trains; 0 where there is none."""
    return 0 if model.builder in OWN else user_model.first_trained(model, _user(model))


def layer_titles(model: Model) -> list[str]:
    """Return the name of each layer: that of its kind, `head.3` for a part of the head, `block.3.mlp` for a half."""
    if model.builder in OWN:
        return [title for title, (count, _) in _named_makers(model).items() for _ in range(count)]
    return layer_names(model)


def layer_chains(model: Model) -> list[str | None]:
    """Return, for each layer, which of the others pass on what it passes on, beside those of its kind (Layer.chain)."""
    if model.builder in OWN:
        return [layers.chain_of(title) for title in layer_titles(model)]
    return [None] * layer_count(model)


def parameter_bytes(model: Model) -> list[int]:
    """Return the bytes of each layer's parameters, without making any; a user's function may make them all.

    It is called without a device of ours: `from_pretrained` loads weights, and refuses to on the meta device.
    """
    dtype = _dtype(model)
    if model.builder in OWN:
        makers = _makers(model)
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            made = {make: make() for make in dict.fromkeys(makers)}
        found = [made[make] for make in makers]
    else:
        found = [user_model.sketched(model, index, one) for index, one in enumerate(_user(model).layers)]
    return [sum(p.numel() for p in layer.parameters()) * dtype.itemsize for layer in found]


def bundles(model: Model) -> list[Bundle]:
    """Return the tensors that enter each layer, and that leave the last; a user's layers are called without data."""
    if model.builder not in OWN:
        return user_model.bundles(model, _user(model), _dtype(model))
    batch, sequence, dtype = model.microbatch_size, model.sequence_length, _dtype(model)
    tokens = Bundle((((batch, sequence), torch.int64),))
    architecture = _architecture(model)
    behind = (layers.border(title, architecture, batch, sequence, dtype) for title in layer_titles(model))
    return [replace(bundle, samples=batch) for bundle in (tokens, *behind)]


def batches(model: Model, data: bytes) -> Callable[[torch.Generator, int], DrawnBatch]:
    """Return what draws the inputs and the target of so many microbatches, the same from equal generators.

    They are the user's where the function gives them (user_model.py), else windows of `data`.
    """
    if model.builder not in OWN and (user := _user(model)).batch is not None:
        dtype, drawing = _dtype(model), replace(user, layers=[])  # which may be all of the model
        return lambda generator, count: user_model.draw(model, drawing, dtype, generator, count * model.microbatch_size)

    def windows(generator: torch.Generator, microbatches: int) -> DrawnBatch:
        inputs, target = batch(model, data, generator, microbatches)
        return (inputs,), target

    return windows


def as_long_as_its_data(model: Model) -> Model:
    """Return a model of a user's own data with the length of these: of tokens, whole numbers of (samples, sequence),
    the second dimension of the first input, else 1, so that a sample counts for one token. Others as they are."""
    if model.builder in OWN or (user := _user(model)).batch is None:
        return model
    generator = torch.Generator().manual_seed(model.seed)
    (first, *_), _ = user_model.draw(model, user, _dtype(model), generator, model.microbatch_size)
    is_tokens = first.dim() == 2 and not (first.is_floating_point() or first.is_complex())
    return msgspec.structs.replace(model, sequence_length=max(1, first.shape[1]) if is_tokens else 1)


def batch(model: Model, data: bytes, generator: torch.Generator, microbatches: int) -> tuple[Tensor, Tensor]:
    """Draw random windows of `data` as inputs and next-byte targets, int64 of (microbatches * batch, sequence)."""
    length = model.sequence_length
    if len(data) <= length:
        raise BadInput(f"the training text has {len(data)} bytes, expected more than the sequence length {length}")
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    starts = torch.randint(len(data) - length, (microbatches * model.microbatch_size, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].to(torch.int64)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _makers(model: Model) -> list[Callable[[], nn.Module]]:
    """Return what makes each layer of a known architecture: nothing is allocated until it is called."""
    return [make for count, make in _named_makers(model).values() for _ in range(count)]


def _named_makers(model: Model) -> dict[str, tuple[int, Callable[[], nn.Module]]]:
    return layers.makers(_architecture(model), model.sequence_length)


def _gpt(model: Model) -> Architecture:
    """Return the GPT over bytes: GPT-2's layers with feed-forward layers four times as wide, without dropout."""
    hidden, heads = _size(model, "hidden"), _size(model, "heads")
    if hidden % heads:
        raise BadInput(f"$.model.config.heads is {heads}, expected a divisor of hidden ({hidden})")
    return Architecture(
        kind="gpt2",
        layers=_size(model, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=_size(model, "vocab"),
        positions=model.sequence_length,
        qkv_bias=True,
    )


def _architecture(model: Model) -> Architecture:
    """Return the architecture, whose fields (costs/models.py) are the config of a transformer; raise BadInput where the
    config gives none that can be trained."""
    try:
        architecture = _gpt(model) if model.builder == "gpt" else msgspec.convert(model.config, Architecture)
    except msgspec.ValidationError as error:
        raise BadInput(f"$.model.config: {said_by(error)}") from error
    if architecture.vocab < BYTE_VALUES:
        raise BadInput(
            f"$.model.config.vocab is {architecture.vocab}, expected at least {BYTE_VALUES}, one per byte value"
        )
    if architecture.positions and model.sequence_length > architecture.positions:
        raise BadInput(
            f"$.model.sequence_length is {model.sequence_length}, expected at most the positions of the model "
            f"({architecture.positions})"
        )
    for name, parts in (("embedding_parts", architecture.embedding_parts), ("head_parts", architecture.head_parts)):
        if not 1 <= parts <= architecture.vocab:
            raise BadInput(f"$.model.config.{name} is {parts}, expected 1 to the vocabulary ({architecture.vocab})")
    return architecture


def _size(model: Model, key: str) -> int:
    value = model.config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"$.model.config.{key} is {value!r}, expected an integer of at least 1")
    return value


def _dtype(model: Model) -> torch.dtype:
    if model.dtype not in DTYPES:
        raise BadInput(f"$.model.dtype is {model.dtype!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[model.dtype]


def _seeded(seed: int, index: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a layer whose weights depend on seed and index alone; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + index)
        layer = make()
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
    return layer


_untouched: list[tuple[Model, UserModel]] | None = None
"""Of the function that was called last, within `called_seldom`: what it returned, unless layers of it were built."""


@contextmanager
def called_seldom() -> Iterator[None]:
    """Within: a user's function is called again only where layers of what it returned are in use, as they change then.
    Loading weights may take it long."""
    global _untouched
    _untouched = []
    try:
        yield
    finally:
        _untouched = None


def _user(model: Model, *, touched: bool = False) -> UserModel:
    """Return what the user's function returns; `touched`: its layers will be in use."""
    if _untouched is None:
        return user_model.load(model)
    there = [user for known, user in _untouched if _calls(known) == _calls(model)] or [user_model.load(model)]
    _untouched[:] = [] if touched else [(model, there[0])]
    return there[0]


def _calls(model: Model) -> tuple[object, ...]:
    """Return what `user_model.load` depends on."""
    return model.builder, model.config, model.seed
