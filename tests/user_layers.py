"""Users' models as `optpipe profile --model tests.user_layers:layers` finds them: functions that return layers."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from optpipe_compiler.documents.profile import Model
from optpipe_torch.models import known
from runtime_torch import vocabulary
from runtime_torch.slices import WHOLE, Carry

if TYPE_CHECKING:
    from collections.abc import Callable


class Mixer(nn.Module):
    """A residual layer of any two widths."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return x + self.down(self.up(x).relu())


class Scorer(nn.Module):
    """The last layer: the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 256)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), target.flatten())


def layers(width: int = 48) -> list[nn.Module]:
    """Return two kinds of inner layers, of which one is there twice, and a wider border between them."""
    return [
        nn.Embedding(256, width),
        Mixer(width, 2 * width),
        Mixer(width, 2 * width),
        nn.Linear(width, 2 * width),
        Mixer(2 * width, width),
        Scorer(2 * width),
    ]


class Joined(nn.Module):
    """Hands on a part of a larger tensor, which nothing saves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return (torch.cat([x, x], -1) + self.out(self.norm(x)))[..., : x.shape[-1]]


class Saves(nn.Module):
    """Saves what it hands on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return torch.tanh(self.out(x))


def unlike(width: int = 32) -> list[nn.Module]:
    """Return layers of which few are alike."""
    inner = [Mixer(width, 4 * width), Joined(width), Joined(width), nn.LayerNorm(width), Saves(width), Saves(width)]
    return [nn.Embedding(256, width), *inner, Mixer(width, width), Scorer(width)]


class Normed(nn.Module):
    """Keeps what it makes of its weights for each slice."""

    sliceable = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return x + torch.relu(self.out(x))


def normed(width: int = 32) -> list[nn.Module]:
    """Return two layers with weight norm."""
    return [nn.Embedding(256, width), Normed(width), Normed(width), Scorer(width)]


class Apart(nn.Linear):
    """Does not train what is before it."""

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return super().forward(x.detach())


def apart(width: int = 32) -> list[nn.Module]:
    """Return layers of which one passes no gradient back."""
    return [nn.Embedding(256, width), Mixer(width, width), Apart(width, width), Scorer(width)]


class Looks(nn.Module):
    """Attention, and a layer of its own behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.act = nn.GELU()

    def forward(self, x: Tensor, *, carry: Carry = WHOLE) -> Tensor:
        """Keep the shape."""
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.act(self.out(carry.attend(query, key, value).transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def frozen_in_front(frozen: int, width: int = 32) -> list[nn.Module]:
    """Return layers of which so many, the first ones, do not train."""
    layers = [nn.Embedding(256, width), *(Looks(width) for _ in range(4)), Scorer(width)]
    for one in layers[:frozen]:
        one.requires_grad_(False)
    return layers


def mostly_frozen(width: int = 32) -> list[nn.Module]:
    """Return layers of which most save nothing: frozen matrices."""
    inner = [nn.Linear(width, width).requires_grad_(False) for _ in range(4)]
    return [nn.Embedding(256, width), *inner, Mixer(width, 4 * width), Scorer(width)]


# -- steps that wait


def paced(flag: str, wait_s: float = 0.7) -> tuple[list[nn.Module], Callable[..., object]]:
    """Return a small GPT, and a batch that takes its time until a file is there: a planner beside it may be slow."""

    def batch(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
        time.sleep(0 if Path(flag).exists() else wait_s)
        tokens = torch.randint(256, (samples, 9), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    config = {"layers": 4, "hidden": 16, "heads": 2, "vocab": 256}
    return known.build(Model(builder="gpt", config=config, microbatch_size=1, sequence_length=8)), batch


# -- tied weights


class Words256(nn.Embedding):
    """Bytes to vectors."""

    def __init__(self, width: int) -> None:
        super().__init__(256, width)


def tied_modules(width: int = 16) -> list[nn.Module]:
    """Return layers of which the first and the last have the same matrix."""
    layers = [Words256(width), *(Mixer(width, 2 * width) for _ in range(4)), Scorer(width)]
    layers[-1].out.weight = layers[0].weight
    return layers


def tied_functions(
    width: int = 16, tied: str = "0.weight"
) -> tuple[list[Callable[[], nn.Module]], None, list[tuple[str, str]]]:
    """Return what makes such layers, no data of their own, and the tie."""
    makers = [partial(Words256, width), *[partial(Mixer, width, 2 * width)] * 4, partial(Scorer, width)]
    return makers, None, [(tied, "5.out.weight")]


def tied_parts(width: int = 16) -> tuple[list[Callable[[], nn.Module]], None, list[tuple[str, str]]]:
    """Return what makes an embedding and a head in three parts each, of which those with equal rows share them."""
    makers = [
        *vocabulary.embedding_parts(width, 256, 3),
        *[partial(Mixer, width, 2 * width)] * 2,
        *vocabulary.head_parts(width, 256, 3, norm=partial(nn.LayerNorm, width)),
    ]
    return makers, None, [(f"{part}.weight", f"{5 + part}.weight") for part in range(3)]


# -- images


class Residual(nn.Module):
    """A convolution beside the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.GroupNorm(2, channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return x + self.mix(self.norm(x).relu())


class Classifier(nn.Module):
    """The loss of a class per image."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(channels, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(self.out(x.mean(dim=(2, 3))), target)


def draw_images(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
    """Return noise and its classes."""
    return torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(10, (samples,), generator=generator)


def images(channels: int = 8) -> tuple[list[nn.Module], Callable[..., object]]:
    """Return the layers of a small network for images, and the images."""
    layers = [nn.Conv2d(3, channels, 3, padding=1), *(Residual(channels) for _ in range(3)), Classifier(channels, 10)]
    return layers, draw_images


class Running(Residual):
    """With running statistics, which each forward changes."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.norm = nn.BatchNorm2d(channels)  # type: ignore[assignment]


def running(channels: int = 8) -> tuple[list[nn.Module], Callable[..., object]]:
    """Return the layers of a small network with running statistics, and the images."""
    layers = [nn.Conv2d(3, channels, 3, padding=1), *(Running(channels) for _ in range(3)), Classifier(channels, 10)]
    return layers, draw_images


# -- tokens with positions and a mask, all of which the layers pass along

VOCABULARY, LENGTH = 1000, 12
Sentence = tuple[Tensor, Tensor, Tensor]


class Words(nn.Module):
    """Tokens to vectors; positions and mask go on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Sentence:
        """Return vectors, positions and mask."""
        return self.tokens(tokens), positions, mask


class Attention(nn.Module):
    """Attention to what the mask lets through; positions are told again in each layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(LENGTH, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Sentence:
        """Keep the shapes."""
        query, key, value = self.qkv(x + self.positions(positions)).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.out(mixed), positions, mask


class Guess(nn.Module):
    """The loss of a word at each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        assert (positions.dtype, mask.dtype) == (torch.int64, torch.bool)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), target.flatten())


def draw_sentences(generator: torch.Generator, samples: int) -> tuple[Sentence, Tensor]:
    """Return words at shuffled positions, of which each sees those before it and itself."""
    tokens, target = torch.randint(VOCABULARY, (2, samples, LENGTH), generator=generator)
    positions = torch.rand(samples, LENGTH, generator=generator).argsort()
    return (tokens, positions, positions[:, :, None] >= positions[:, None, :]), target


def sentences(width: int = 16) -> tuple[list[Callable[[], nn.Module]], Callable[..., object]]:
    """Return what makes the layers, and the sentences."""
    return [partial(Words, width), *[partial(Attention, width)] * 3, partial(Guess, width)], draw_sentences


class Crossing(nn.Module):
    """Says that it can be sliced, and looks at other tokens of its slice, or keeps what it found, on its own."""

    sliceable = True

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.mix = nn.Conv1d(width, width, 3) if "convolution" in kind else nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(0.2 if "dropout" in kind else 0.0)
        self.state: Tensor | None = None

    def forward(self, x: Tensor, *, carry: Carry = WHOLE) -> Tensor:
        """Mix the tokens."""
        if "convolution" in self.kind:
            return x + self.drop(self.mix(nn.functional.pad(x.transpose(1, 2), (2, 0)))).transpose(1, 2)  # type: ignore[no-any-return]
        found, state = self.mix(x, self.state if carry.start else None)
        self.state = state.detach() if self.kind == "detached state" else state
        return found  # type: ignore[no-any-return]


class Summing(Scorer):
    """The sum over the tokens, which is not weighed by their number."""

    sliceable = True

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the sum of the cross-entropies."""
        return super().forward(x, target) * target.numel()


def crossing(kind: str) -> list[nn.Module]:
    """Return layers of which one says wrongly that it can be sliced."""
    inner = nn.Linear(8, 8) if kind == "sum" else nn.Dropout(0.5) if kind == "dropout" else Crossing(8, kind)
    return [nn.Embedding(256, 8), inner, Summing(8) if kind == "sum" else Scorer(8)]
