"""Models with routed layers (mixtures of experts), whose graphs differ from microbatch to microbatch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY, LENGTH, WIDTH, EXPERTS = 32, 6, 16, 4


class Tokens(nn.Module):
    """Tokens to vectors, and an auxiliary loss of shape (1,) that the layers add to."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors and no loss yet."""
        x = self.table(tokens)
        return x, x.new_zeros(1)


class Routed(nn.Module):
    """Each token goes to the two experts that the router prefers; an expert without tokens does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)

    def forward(self, x: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the shapes."""
        tokens = self.norm(x).flatten(0, 1)
        chances = self.router(tokens).softmax(-1)
        weights, chosen = chances.topk(2, dim=-1)
        mixed = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            row, place = torch.where(chosen == expert)
            inner = nn.functional.silu(nn.functional.linear(tokens[row], self.up[expert]))
            outer = nn.functional.linear(inner, self.down[expert])
            mixed = mixed.index_add(0, row, outer * weights[row, place, None])
        share = nn.functional.one_hot(chosen, EXPERTS).float().mean((0, 1))
        return x + mixed.view_as(x), auxiliary + (share * chances.mean(0)).sum()


class Loss(nn.Module):
    """Cross-entropy and the auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, auxiliary: Tensor, target: Tensor) -> Tensor:
        """Return their sum."""
        found = nn.functional.cross_entropy(self.logits(x).flatten(0, 1), target.flatten())
        return found + auxiliary.squeeze(0) / 10


Layers = list["Callable[[], nn.Module]"]


def draw(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
    """Return random tokens."""
    tokens, target = torch.randint(VOCABULARY, (2, samples, LENGTH), generator=generator)
    return tokens, target


def routed(layers: int = 3) -> tuple[Layers, Callable[..., object]]:
    """Return a model of `layers` routed layers, and random tokens."""
    return [Tokens, *[Routed] * layers, Loss], draw


# -- transformers' Mixtral


class MixtralTokens(nn.Module):
    """Tokens to vectors, rotary tables and no auxiliary loss yet."""

    def __init__(self, config: object) -> None:
        from transformers.models.mixtral import modeling_mixtral as mixtral

        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary = mixtral.MixtralRotaryEmbedding(config)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return vectors, cosine, sine, auxiliary loss."""
        x = self.table(tokens)
        cosine, sine = self.rotary(x, torch.arange(tokens.shape[1], device=tokens.device)[None])
        return x, cosine, sine, x.new_zeros(1)


class MixtralLayer(nn.Module):
    """A decoder layer, and the load-balancing loss of its router."""

    def __init__(self, config: object) -> None:
        from transformers.models.mixtral import modeling_mixtral as mixtral

        super().__init__()
        self.block = mixtral.MixtralDecoderLayer(config, 0)
        self._balance = mixtral.load_balancing_loss_func
        self.block.mlp.gate.register_forward_hook(self._keep)
        for parameter in self.block.parameters():
            nn.init.normal_(parameter, std=0.2)
        self._logits: list[Tensor] = []

    def _keep(self, _module: nn.Module, _inputs: object, found: tuple[Tensor, ...]) -> None:
        self._logits.append(found[0])

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, auxiliary: Tensor) -> tuple[Tensor, ...]:
        """Keep the shapes."""
        x = self.block(x, position_embeddings=(cosine, sine))
        return x, cosine, sine, auxiliary + self._balance((self._logits.pop(),), EXPERTS, 2)


class MixtralLoss(Loss):
    """As above."""

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, auxiliary: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        """Return the sum of both losses."""
        return super().forward(x, auxiliary, target)


def mixtral(experts: str = "eager", layers: int = 3) -> tuple[Layers, Callable[..., object]]:
    """Return a small Mixtral with random weights, and random tokens."""
    from transformers import MixtralConfig

    config = MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_hidden_layers=1,
    )
    config._attn_implementation = "sdpa"
    config._experts_implementation = experts
    return [
        partial(MixtralTokens, config),
        *[partial(MixtralLayer, config)] * layers,
        MixtralLoss,
    ], draw
