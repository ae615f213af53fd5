"""The model of the comparison: a small Llama of transformers as a list of layers, decoder layers or halves of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Callable


class Embedding(nn.Embedding):
    """Tokens to hidden states."""


class Attention(nn.Module):
    """A decoder layer's first half, with the rotary tables that transformers' model passes to all of them."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: LlamaConfig, sequence: int) -> None:
        super().__init__()
        layer = _decoder_layer(config)
        self.norm, self.attention = _real(layer.input_layernorm), _real(layer.self_attn)
        table = LlamaRotaryEmbedding(config)(torch.empty(1, sequence, 1), torch.arange(sequence).unsqueeze(0))
        for name, part in zip(("cosine", "sine"), table, strict=True):
            self.register_buffer(name, part.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, sequence, hidden)."""
        seen, _ = self.attention(self.norm(x), position_embeddings=(self.cosine, self.sine), attention_mask=None)
        return x + seen  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """A decoder layer's second half."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        layer = _decoder_layer(config)
        self.norm, self.mlp = _real(layer.post_attention_layernorm), _real(layer.mlp)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, sequence, hidden)."""
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, config: LlamaConfig, sequence: int) -> None:
        super().__init__()
        self.first, self.second = Attention(config, sequence), FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, sequence, hidden)."""
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Final norm and logits; with a target the loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.logits = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the logits, or the mean loss where a target is given."""
        logits = self.logits(self.norm(x))
        return logits if target is None else loss(logits, target)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of one microbatch, in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def layers(
    *,
    blocks: int,
    hidden: int,
    ffn: int,
    heads: int,
    vocab: int,
    sequence: int,
    dtype: str,
    granularity: str = "block",
) -> list[Any]:
    """Return a function for each layer that makes it, with the same values whichever others are made."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocab,
        max_position_embeddings=sequence,
        attn_implementation="sdpa",
    )
    halves = [partial(Attention, config, sequence), partial(FeedForward, config)]
    makers: list[Callable[[], nn.Module]] = [
        partial(Embedding, vocab, hidden),
        *(halves if granularity == "half" else [partial(Block, config, sequence)]) * blocks,
        partial(Head, config),
    ]
    return [partial(_seeded, index, make, getattr(torch, dtype)) for index, make in enumerate(makers)]


def decoder_layers(*, blocks: int, granularity: str = "block", **_: Any) -> list[tuple[int, int]]:
    """Return the range of layers that each decoder layer is."""
    wide = 2 if granularity == "half" else 1
    return [(begin, begin + wide) for begin in range(1, 1 + blocks * wide, wide)]


def _decoder_layer(config: LlamaConfig) -> LlamaDecoderLayer:
    """Make one without memory: `_seeded` gives the halves that are used their values."""
    with torch.device("meta"):
        return LlamaDecoderLayer(config, 0)


def _real(module: nn.Module) -> nn.Module:
    return module.to_empty(device=torch.get_default_device())


def _seeded(index: int, make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        layer = make()
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.ones_(parameter)
    return layer.to(dtype)
