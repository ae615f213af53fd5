"""The model of the comparison: a small Llama of transformers as a list of layers, one decoder layer each."""

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


class Block(nn.Module):
    """One decoder layer, with the rotary tables that transformers' model passes to all of them."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: LlamaConfig, sequence: int) -> None:
        super().__init__()
        self.layer = LlamaDecoderLayer(config, 0)
        table = LlamaRotaryEmbedding(config)(torch.empty(1, sequence, 1), torch.arange(sequence).unsqueeze(0))
        for name, part in zip(("cosine", "sine"), table, strict=True):
            self.register_buffer(name, part.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, sequence, hidden)."""
        return self.layer(x, position_embeddings=(self.cosine, self.sine))  # type: ignore[no-any-return]


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


def layers(*, blocks: int, hidden: int, ffn: int, heads: int, vocab: int, sequence: int, dtype: str) -> list[Any]:
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
    makers: list[Callable[[], nn.Module]] = [
        partial(Embedding, vocab, hidden),
        *[partial(Block, config, sequence)] * blocks,
        partial(Head, config),
    ]
    return [partial(_seeded, index, make, getattr(torch, dtype)) for index, make in enumerate(makers)]


def _seeded(index: int, make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        layer = make()
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
    return layer.to(dtype)
