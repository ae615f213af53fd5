"""The model that a profile measures and `run` trains: a GPT over bytes, a known architecture, or a user's layers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from optpipe_compiler.costs.models import Architecture
from optpipe_compiler.errors import BadInput
from optpipe_torch.models import user_model
from runtime_torch.bundles import Bundle
from runtime_torch.selective import cheap
from runtime_torch.slices import WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.documents.profile import Model
    from optpipe_torch.models.user_model import Batch, UserModel
    from runtime_torch.bundles import Boundary
    from runtime_torch.slices import Carry
    from runtime_torch.ties import Names

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BYTE_VALUES = 256


class Embedding(nn.Module):
    """Byte and learned position embeddings: tokens (batch, sequence) int64 to (batch, sequence, hidden)."""

    def __init__(self, vocab: int, sequence: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(sequence, hidden)

    def forward(self, x: Tensor, *, carry: Carry = WHOLE) -> Tensor:
        """Add the two embeddings."""
        positions = torch.arange(carry.start, carry.start + x.shape[1], device=x.device)
        return self.tokens(x) + self.positions(positions)  # type: ignore[no-any-return]


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a GELU MLP four times as wide."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, *, carry: Carry = WHOLE) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        x = x + self.attend(self.attention_norm(x), carry)
        return x + self.down(cheap(F.gelu, self.up(self.mlp_norm(x))))  # type: ignore[no-any-return]

    def attend(self, x: Tensor, carry: Carry) -> Tensor:
        """Causal self-attention over the sequence."""
        batch, sequence, hidden = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = carry.attend(query, key, value)
        return self.projection(mixed.transpose(1, 2).reshape(batch, sequence, hidden))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Final norm, projection onto the vocabulary, and the loss."""

    sliceable = True

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.logits = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy (a scalar) of the next-byte predictions against `target` (batch, sequence)."""
        return F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), target.flatten())


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
        layers = _user(model).layers
        for index in range(len(layers)) if indices is None else indices:
            yield user_model.made(model, index, layers[index]).to(dtype)
        return
    makers = OWN[model.builder](model)
    for index in range(len(makers)) if indices is None else indices:
        with nullcontext() if on is None else on:
            layer = _seeded(model.seed, index, makers[index]).to(dtype)
        yield layer


def ties(model: Model) -> list[Names]:
    """Return the parameters that layers share, by their names in the state dict; models of our own share none."""
    return [] if model.builder in OWN else _user(model).all_ties()


def tied_layers(model: Model) -> list[tuple[str, int] | None]:
    """Return, for each layer, the first name of its tie and the bytes of the tied parameter; None: of no tie.

    A layer with several ties has that of its largest parameter.
    """
    found: list[tuple[str, int] | None] = [None] * layer_count(model)
    layers = [] if model.builder in OWN else _user(model).layers
    dtype = _dtype(model)
    for tie in ties(model):
        for index, path in ((int(prefix), path) for prefix, _, path in (name.partition(".") for name in tie)):
            with torch.random.fork_rng(devices=[]):
                parameters = dict(user_model.sketched(model, index, layers[index]).named_parameters())
            nbytes = parameters[path].numel() * dtype.itemsize if path in parameters else 0
            known = found[index]
            if known is None or known[1] < nbytes:
                found[index] = tie[0], nbytes
    return found


def layer_count(model: Model) -> int:
    """Return how many layers the model has."""
    return len(OWN[model.builder](model) if model.builder in OWN else _user(model).layers)


def layer_names(model: Model) -> list[str]:
    """Return the kind of each layer; layers of one kind cost the same.

    A user's layers are of one kind if torch prints them alike, their parameters have the same shapes, and so have what
    enters and leaves them; the first and the last layer are kinds of their own.
    """
    if model.builder == "transformer":
        from optpipe_torch.models.layers import kind_of

        return [kind_of(title, _architecture(model)) for title in layer_titles(model)]
    if model.builder in OWN:
        return ["embedding", *["block"] * _size(model, "layers"), "head"]
    return user_model.kinds(model, _user(model), bundles(model))


def layer_titles(model: Model) -> list[str]:
    """Return the name of each layer: that of its kind, `head.3` for a part of the head, `block.3.mlp` for a half."""
    if model.builder == "transformer":
        return [title for title, (count, _) in _named_makers(model).items() for _ in range(count)]
    return layer_names(model)


def layer_chains(model: Model) -> list[str | None]:
    """Return, for each layer, which of the others pass on what it passes on, beside those of its kind (Layer.chain)."""
    if model.builder == "transformer":
        from optpipe_torch.models.layers import chain_of

        return [chain_of(title) for title in layer_titles(model)]
    return [None] * layer_count(model)


def parameter_bytes(model: Model) -> list[int]:
    """Return the bytes of each layer's parameters, without making any; a user's function may make them all."""
    dtype = _dtype(model)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        if model.builder in OWN:
            makers = OWN[model.builder](model)
            made = {make: make() for make in dict.fromkeys(makers)}
            layers = [made[make] for make in makers]
        else:
            layers = [user_model.sketched(model, index, one) for index, one in enumerate(_user(model).layers)]
    return [sum(p.numel() for p in layer.parameters()) * dtype.itemsize for layer in layers]


def boundary(model: Model, layer_index: int) -> Boundary:
    """Return shape and dtype of the tensor that leaves a layer for one microbatch; the last layer's is the loss."""
    return boundaries(model)[layer_index]


def boundaries(model: Model) -> list[Boundary]:
    """Return `boundary` of all layers; of layers that return several tensors, that of the one that carries them."""
    return [bundle.boundary for bundle in bundles(model)[1:]]


def bundles(model: Model) -> list[Bundle]:
    """Return the tensors that enter each layer, and that leave the last; a user's layers are called without data."""
    if model.builder not in OWN:
        return user_model.bundles(model, _user(model), _dtype(model))
    batch, sequence, dtype = model.microbatch_size, model.sequence_length, _dtype(model)
    tokens = Bundle((((batch, sequence), torch.int64),))
    if model.builder == "gpt":
        hidden = Bundle((((batch, sequence, _size(model, "hidden")), dtype),))
        return [tokens, *[hidden] * (layer_count(model) - 1), Bundle((((), dtype),))]
    from optpipe_torch.models.layers import border

    architecture = _architecture(model)
    return [tokens, *(border(title, architecture, batch, sequence, dtype) for title in layer_titles(model))]


def batches(model: Model, data: bytes) -> Callable[[torch.Generator, int], Batch]:
    """Return what draws the inputs and the target of so many microbatches, the same from equal generators.

    They are the user's where the function gives them (user_model.py), else windows of `data`.
    """
    if model.builder not in OWN and (user := _user(model)).batch is not None:
        dtype = _dtype(model)
        return lambda generator, count: user_model.draw(model, user, dtype, generator, count * model.microbatch_size)

    def windows(generator: torch.Generator, microbatches: int) -> Batch:
        inputs, target = batch(model, data, generator, microbatches)
        return (inputs,), target

    return windows


def batch(model: Model, data: bytes, generator: torch.Generator, microbatches: int) -> tuple[Tensor, Tensor]:
    """Draw random windows of `data` as inputs and next-byte targets, int64 of (microbatches * batch, sequence)."""
    length = model.sequence_length
    if len(data) <= length:
        raise BadInput(f"the training text has {len(data)} bytes, expected more than the sequence length {length}")
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    starts = torch.randint(len(data) - length, (microbatches * model.microbatch_size, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].to(torch.int64)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _gpt(model: Model) -> list[Callable[[], nn.Module]]:
    """Return what makes each layer of the GPT: nothing is allocated until it is called."""
    hidden, heads, vocab = (_size(model, key) for key in ("hidden", "heads", "vocab"))
    if hidden % heads:
        raise BadInput(f"$.model.config.heads is {heads}, expected a divisor of hidden ({hidden})")
    if vocab < BYTE_VALUES:
        raise BadInput(f"$.model.config.vocab is {vocab}, expected at least {BYTE_VALUES}, one per byte value")
    return [
        partial(Embedding, vocab, model.sequence_length, hidden),
        *[partial(Block, hidden, heads)] * _size(model, "layers"),
        partial(Head, hidden, vocab),
    ]


def _transformer(model: Model) -> list[Callable[[], nn.Module]]:
    """Return what makes each layer of a known architecture (costs/models.py), whose fields are the model's config."""
    return [make for count, make in _named_makers(model).values() for _ in range(count)]


def _named_makers(model: Model) -> dict[str, tuple[int, Callable[[], nn.Module]]]:
    from optpipe_torch.models.layers import makers

    return makers(_architecture(model), model.sequence_length)


def _architecture(model: Model) -> Architecture:
    """Return the architecture; raise BadInput where the config gives none that can be trained."""
    try:
        architecture = msgspec.convert(model.config, Architecture)
    except msgspec.ValidationError as error:
        raise BadInput(f"$.model.config: {error}") from error
    if architecture.vocab < BYTE_VALUES:
        raise BadInput(f"$.model.config.vocab is {architecture.vocab}, expected at least {BYTE_VALUES}")
    if architecture.positions and model.sequence_length > architecture.positions:
        raise BadInput(
            f"$.model.sequence_length is {model.sequence_length}, expected at most the positions of the model "
            f"({architecture.positions})"
        )
    for name, parts in (("embedding_parts", architecture.embedding_parts), ("head_parts", architecture.head_parts)):
        if not 1 <= parts <= architecture.vocab:
            raise BadInput(f"$.model.config.{name} is {parts}, expected 1 to the vocabulary ({architecture.vocab})")
    return architecture


OWN: dict[str, Callable[[Model], list[Callable[[], nn.Module]]]] = {"gpt": _gpt, "transformer": _transformer}
"""The models that come with the package: an embedding, blocks, a head; embedding and head whole or in parts, blocks
whole or in halves."""


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


def _user(model: Model) -> UserModel:
    return user_model.load(model)
