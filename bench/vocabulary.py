"""Measure a head in parts against the whole one on this CPU: `python -m bench.vocabulary [--vocabulary N] [--parts N]`.

For fp32 and bf16, on one core: the least times and the saved bytes of the whole head and of all parts together, one
stage each, and those times by how many logits are looked at at a time (`optpipe_torch.models.vocabulary.CPU_CHUNK`).
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from optpipe_torch.models import vocabulary
from runtime_torch.bundles import bundled, trace_bundles
from runtime_torch.execution import StageExecution

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def stages(layers: Sequence[nn.Module], h: Tensor, target: Tensor) -> list[StageExecution]:
    """Return a stage for each layer of a head."""
    borders = trace_bundles(layers, [h], target)
    made = [bundled(layer, *borders[index : index + 2]) for index, layer in enumerate(layers)]
    last = len(made) - 1
    return [
        StageExecution([layer], index, is_first=False, is_last=index == last, device="cpu")
        for index, layer in enumerate(made)
    ]


def forward(chain: Sequence[StageExecution], h: Tensor, target: Tensor) -> None:
    """F of all stages."""
    for stage in chain:
        h = stage.forward(0, h, target)


def backward(chain: Sequence[StageExecution]) -> None:
    """I, then W, of all stages."""
    gradient = None
    for stage in reversed(chain):
        gradient = stage.backward_input(0, gradient)
        stage.backward_weight(0)


def timed(work: Callable[[], object], into: list[float]) -> None:
    """Note how many ms it takes."""
    start = time.perf_counter()
    work()
    into.append(1e3 * (time.perf_counter() - start))


def measure(layers: Sequence[nn.Module], h: Tensor, target: Tensor, samples: int) -> tuple[float, float, int]:
    """Return the least ms of F and of the backwards, and the saved bytes of the stage that saves most."""
    chain = stages(layers, h, target)
    forwards: list[float] = []
    backwards: list[float] = []
    for _ in range(samples + 1):
        timed(lambda: forward(chain, h, target), forwards)
        saved = max(stage.saved_bytes(0) for stage in chain)
        timed(lambda: backward(chain), backwards)
    return min(forwards), min(backwards), saved


class Whole(nn.Module):
    """The head as one layer."""

    def __init__(self, chain: Sequence[nn.Module]) -> None:
        super().__init__()
        (self.weight,) = [nn.Parameter(one.weight.detach()) for one in vocabulary.whole(chain)]  # type: ignore[arg-type]

    def forward(self, h: Tensor, *, target: Tensor) -> Tensor:
        """Return the loss."""
        logits = nn.functional.linear(h, self.weight).float()
        return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=5)
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    target = torch.randint(asked.vocabulary, (1, asked.tokens))
    for dtype in (torch.float32, torch.bfloat16):
        h = torch.randn(1, asked.tokens, asked.hidden, dtype=dtype)
        parts = [make().to(dtype) for make in vocabulary.head_parts(asked.hidden, asked.vocabulary, asked.parts)]
        for name, layers in (("whole", [Whole(parts)]), (f"{asked.parts} parts", parts)):
            f, b, saved = measure(layers, h, target, asked.samples)
            print(f"{dtype} {name}: F {f:.0f} ms, I and W {b:.0f} ms, {saved / 1e6:.1f} MB saved in a stage")
        usual = vocabulary.CPU_CHUNK
        for power in range(14, 26, 2):
            vocabulary.CPU_CHUNK = 1 << power
            f, b, _ = measure(parts, h, target, asked.samples)
            print(f"{dtype} 2^{power} logits at a time: F {f:.0f} ms, I and W {b:.0f} ms")
        vocabulary.CPU_CHUNK = usual


if __name__ == "__main__":
    main()
