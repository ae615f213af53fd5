"""A user's model as `optpipe profile --model tests.user_layers:layers` finds it: a function that returns layers."""

from __future__ import annotations

from torch import Tensor, nn


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
