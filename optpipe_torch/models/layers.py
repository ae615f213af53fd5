"""The layers of GPT-2, Llama and Mixtral style models as torch modules, whole or as one tensor-parallel rank has them.

Hidden states are (batch, sequence, hidden). With several tensor-parallel ranks, heads, feed-forward width and
vocabulary are divided, and between attention and feed-forward layers each rank holds its part of the sequence (sequence
parallelism): it is gathered before and reduce-scattered after them. The gathered input is kept for the weight gradient,
as torch's tensor parallelism does, or, with selective recompute, gathered again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from optpipe_torch.models import vocabulary
from optpipe_torch.models.layer_kernels import (
    drop,
    flash_attention,
    gather_sequence,
    math_attention,
    rms_norm,
    scatter_sequence,
)
from runtime_torch.bundles import Bundle
from runtime_torch.selective import cheap
from runtime_torch.slices import WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.costs.models import Architecture
    from runtime_torch.slices import Carry

ROTARY_BASE = 10_000.0


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return rms_norm(x, self.weight, 1e-6)


def norm(model: Architecture) -> nn.Module:
    """Return the norm that the model's family uses."""
    return RMSNorm(model.hidden) if model.gated else nn.LayerNorm(model.hidden)


class Embedding(nn.Module):
    """Tokens (batch, sequence) int64 to hidden states, with GPT-2's learned positions."""

    def __init__(self, model: Architecture, ranks: int = 1) -> None:
        super().__init__()
        self.ranks, self.dropout = ranks, model.embedding_dropout
        self.tokens = nn.Embedding(-(-model.vocab // ranks), model.hidden)
        self.positions = nn.Embedding(model.positions, model.hidden) if model.positions else None

    def forward(self, x: Tensor, *, carry: Carry = WHOLE) -> Tensor:
        """Look up; a rank's part of the vocabulary gives a partial sum."""
        hidden = self.tokens(x)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(carry.start, carry.start + x.shape[1], device=x.device))
        return drop(scatter_sequence(hidden, self.ranks), self.dropout if self.training else 0.0)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values; rotary positions in Llama's family."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, model: Architecture, sequence: int, ranks: int = 1) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = model.heads // ranks, model.kv_heads // ranks, model.head_dim
        self.ranks, self.dropout = ranks, model.attention_dropout
        self.attend = math_attention if model.attention == "math" else flash_attention
        self.rotary = model.gated
        if self.rotary:
            cosine, sine = rotation(sequence, self.width)
            self.register_buffer("cosine", cosine, persistent=False)
            self.register_buffer("sine", sine, persistent=False)
        self.qkv = nn.Linear(model.hidden, (self.heads + 2 * self.kv_heads) * self.width, bias=model.qkv_bias)
        self.query_norm = RMSNorm(self.width) if model.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(self.width) if model.qk_norm else nn.Identity()
        self.projection = nn.Linear(self.heads * self.width, model.hidden, bias=not model.gated)

    def forward(self, x: Tensor, carry: Carry = WHOLE) -> Tensor:
        """Keep the shape."""
        qkv = self.qkv(gather_sequence(x, self.ranks))
        batch, sequence, _ = qkv.shape
        parts = qkv.view(batch, sequence, -1, self.width).split([self.heads, self.kv_heads, self.kv_heads], 2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary:
            here = slice(carry.start, carry.start + sequence)
            query, key = (rotate(part, self.cosine[here], self.sine[here]) for part in (query, key))
        dropout = self.dropout if self.training else 0.0
        if not carry.is_whole:
            mixed = carry.attend(query, key, value)
        elif self.attend is math_attention and not dropout:  # scores and their softmax; a flash kernel keeps neither
            mixed = cheap(self.attend, query, key, value, dropout)
        else:
            mixed = self.attend(query, key, value, dropout)
        return scatter_sequence(self.projection(mixed.transpose(1, 2).reshape(batch, sequence, -1)), self.ranks)


def _attention_is_sliceable(model: Architecture) -> bool:
    """Whether slices of a sequence can be attended to one after another: by a flash kernel, without dropout."""
    return model.attention == "flash" and not model.attention_dropout


def rotation(sequence: int, width: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary positions, (sequence, width)."""
    frequency = ROTARY_BASE ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(sequence, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the two halves of each head by the position's angles."""
    left, right = x.chunk(2, -1)
    return x * cosine + torch.cat((-right, left), -1) * sine


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product."""
    return F.silu(gate) * up


class FeedForward(nn.Module):
    """GPT-2's GELU layer or Llama's SwiGLU."""

    def __init__(self, model: Architecture, ranks: int = 1) -> None:
        super().__init__()
        self.ranks, self.gated, width = ranks, model.gated, model.ffn // ranks
        self.up = nn.Linear(model.hidden, width, bias=not model.gated)
        self.gate = nn.Linear(model.hidden, width, bias=False) if model.gated else None
        self.down = nn.Linear(width, model.hidden, bias=not model.gated)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        x = gather_sequence(x, self.ranks)
        inner = cheap(F.gelu, self.up(x)) if self.gate is None else cheap(gated, self.gate(x), self.up(x))
        return scatter_sequence(self.down(inner), self.ranks)


class Experts(nn.Module):
    """Mixtral's layer: each token goes to the `experts_per_token` experts that its router prefers.

    Every expert takes as many tokens as it would get were they spread evenly; what exceeds that is dropped, as in
    GShard with a capacity factor of 1.
    """

    def __init__(self, model: Architecture, ranks: int = 1) -> None:
        super().__init__()
        self.ranks, self.experts, self.chosen = ranks, model.experts, model.experts_per_token
        width = model.ffn // ranks
        self.router = nn.Linear(model.hidden, model.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(model.experts, model.hidden, width))
        self.up = nn.Parameter(torch.empty(model.experts, model.hidden, width))
        self.down = nn.Parameter(torch.empty(model.experts, width, model.hidden))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        gathered = gather_sequence(x, self.ranks)
        tokens = gathered.flatten(0, 1)
        weight, expert = torch.softmax(self.router(tokens).float(), -1).topk(self.chosen, -1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype).flatten()
        order = expert.flatten().argsort(stable=True)
        place, capacity = self.places(expert.flatten()[order])
        source = order // self.chosen
        sent = tokens.new_zeros(self.experts * capacity + 1, tokens.shape[1])
        sent = sent.index_copy(0, place, tokens.index_select(0, source))
        mixed = self.apply_experts(sent[:-1].view(self.experts, capacity, -1))
        back = torch.cat((mixed.flatten(0, 1), mixed.new_zeros(1, tokens.shape[1]))).index_select(0, place)
        summed = torch.zeros_like(tokens).index_add(0, source, back * weight.index_select(0, order).unsqueeze(-1))
        return scatter_sequence(summed.view_as(gathered), self.ranks)

    def places(self, expert: Tensor) -> tuple[Tensor, int]:
        """Return the row of each routed token among all experts' rows (the last row: dropped), and rows per expert."""
        capacity = -(-expert.numel() // self.experts)
        first = torch.searchsorted(expert, torch.arange(self.experts, device=expert.device))
        rank = torch.arange(expert.numel(), device=expert.device) - first[expert]
        return torch.where(rank < capacity, expert * capacity + rank, self.experts * capacity), capacity

    def apply_experts(self, x: Tensor) -> Tensor:
        """SwiGLU of every expert on its rows: (experts, rows, hidden) to the same shape."""
        return cheap(gated, x @ self.gate, x @ self.up) @ self.down


class AttentionHalf(nn.Module):
    """The first half of `Block`: norm, attention, residual; its parameters have the names that they have there."""

    def __init__(self, model: Architecture, sequence: int, ranks: int = 1) -> None:
        super().__init__()
        self.dropout = model.residual_dropout
        self.attention_norm = norm(model)
        self.attention = Attention(model, sequence, ranks)
        self.sliceable = _attention_is_sliceable(model)

    def forward(self, x: Tensor, *, carry: Carry = WHOLE) -> Tensor:
        """Keep the shape."""
        return x + drop(self.attention(self.attention_norm(x), carry), self.dropout if self.training else 0.0)


class MlpHalf(nn.Module):
    """The second half of `Block`: norm, MLP or all experts with their router, residual."""

    def __init__(self, model: Architecture, ranks: int = 1) -> None:
        super().__init__()
        self.dropout = model.residual_dropout
        self.ffn_norm = norm(model)
        self.ffn = (Experts if model.experts else FeedForward)(model, ranks)
        self.sliceable = not model.experts  # whose capacity is that of all tokens

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return x + drop(self.ffn(self.ffn_norm(x)), self.dropout if self.training else 0.0)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, model: Architecture, sequence: int, ranks: int = 1) -> None:
        super().__init__()
        self.dropout = model.residual_dropout
        self.attention_norm, self.ffn_norm = norm(model), norm(model)
        self.attention = Attention(model, sequence, ranks)
        self.ffn = (Experts if model.experts else FeedForward)(model, ranks)
        self.sliceable = _attention_is_sliceable(model) and not model.experts

    def forward(self, x: Tensor, *, carry: Carry = WHOLE) -> Tensor:
        """Keep the shape."""
        dropout = self.dropout if self.training else 0.0
        x = x + drop(self.attention(self.attention_norm(x), carry), dropout)
        return x + drop(self.ffn(self.ffn_norm(x)), dropout)


class Head(nn.Module):
    """Final norm, projection onto the vocabulary, and the loss over fp32 logits."""

    sliceable = True

    def __init__(self, model: Architecture, ranks: int = 1) -> None:
        super().__init__()
        self.ranks = ranks
        self.norm = norm(model)
        self.logits = nn.Linear(model.hidden, -(-model.vocab // ranks), bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy against `target` (batch, sequence)."""
        logits = self.logits(gather_sequence(self.norm(x), self.ranks)).float()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class EmbeddingPart(vocabulary.EmbeddingPart):
    """Some rows of `Embedding`: the first part adds the positions, the last drops out."""

    def __init__(self, model: Architecture, part: int, ranks: int = 1) -> None:
        super().__init__(model.hidden, -(-model.vocab // ranks), part, model.embedding_parts)
        self.ranks, self.dropout = ranks, model.embedding_dropout
        self.positions = nn.Embedding(model.positions, model.hidden) if model.positions and part == 0 else None

    def look_up(self, tokens: Tensor) -> Tensor:
        """Sum over the ranks' rows, each rank its part of the sequence."""
        return scatter_sequence(super().look_up(tokens), self.ranks)

    def begin(self, x: Tensor, tokens: Tensor, carry: Carry) -> Tensor:
        """Add the positions."""
        if self.positions is None:
            return x
        end = carry.start + tokens.shape[1] // self.ranks
        return x + self.positions(torch.arange(carry.start, end, device=tokens.device))  # type: ignore[no-any-return]

    def end(self, x: Tensor) -> Tensor:
        """Drop out."""
        return drop(x, self.dropout if self.training else 0.0)


class HeadPart(vocabulary.HeadPart):
    """Some rows of `Head`: the first part has the norm, the last returns the loss."""

    def __init__(self, model: Architecture, part: int, ranks: int = 1) -> None:
        super().__init__(model.hidden, -(-model.vocab // ranks), part, model.head_parts, norm=partial(norm, model))
        self.ranks = ranks

    def logits(self, h: Tensor) -> Tensor:
        """Return those of this part's rows, for the whole sequence."""
        return super().logits(gather_sequence(h, self.ranks))


def makers(model: Architecture, sequence: int, ranks: int = 1) -> dict[str, tuple[int, Callable[[], nn.Module]]]:
    """Return, per name of layers in model order, how many there are and what makes one; parts and halves of blocks have
    numbers."""
    return {
        **_chain("embedding", model.embedding_parts, Embedding, EmbeddingPart, model, ranks),
        **_blocks(model, sequence, ranks),
        **_chain("head", model.head_parts, Head, HeadPart, model, ranks),
    }


def _blocks(model: Architecture, sequence: int, ranks: int) -> dict[str, tuple[int, Callable[[], nn.Module]]]:
    if model.granularity == "block":
        return {"block": (model.layers, partial(Block, model, sequence, ranks))}
    halves: dict[str, Callable[[], nn.Module]] = {
        "attention": partial(AttentionHalf, model, sequence, ranks),
        "mlp": partial(MlpHalf, model, ranks),
    }
    return {f"block.{index}.{half}": (1, make) for index in range(model.layers) for half, make in halves.items()}


def _chain(
    name: str,
    parts: int,
    whole: Callable[[Architecture, int], nn.Module],
    part: Callable[[Architecture, int, int], nn.Module],
    model: Architecture,
    ranks: int,
) -> dict[str, tuple[int, Callable[[], nn.Module]]]:
    if parts == 1:
        return {name: (1, partial(whole, model, ranks))}
    return {f"{name}.{index}": (1, partial(part, model, index, ranks)) for index in range(parts)}


def kind_of(name: str, model: Architecture) -> str:
    """Return the name of the first layer that costs what this one does: parts between the first and the last are alike
    (where they cannot have equally many rows, the first of them has one more), and so are halves of blocks."""
    chain, _, index = name.partition(".")
    if chain == "block":
        return f"block.0.{index.partition('.')[2]}" if index else name
    parts = model.head_parts if chain == "head" else model.embedding_parts
    return f"{chain}.1" if index and 0 < int(index) < parts - 1 else name


def chain_of(name: str) -> str | None:
    """Return the chain of layers that pass on what they save and get: parts of the head behind the first, whose hidden
    states its norm makes. None: of no chain."""
    chain, _, index = name.partition(".")
    return chain if chain == "head" and index and int(index) > 0 else None


def border(name: str, model: Architecture, batch: int, sequence: int, dtype: torch.dtype, ranks: int = 1) -> Bundle:
    """Return what leaves a layer for one microbatch: hidden states, and what parts pass on beside them; or the loss."""
    chain, _, index = name.partition(".")
    parts = model.head_parts if chain == "head" else model.embedding_parts
    last = chain == "block" or not index or int(index) == parts - 1
    hidden = (batch, sequence // ranks, model.hidden), dtype
    if chain == "head" and last:
        return Bundle((((), torch.float32),))
    if last:
        return Bundle((hidden,))
    tokens, state = ((batch, sequence), torch.int64), ((batch, sequence, 2), torch.float32)
    return Bundle((hidden, state if chain == "head" else tokens))
