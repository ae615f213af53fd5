"""Measure split backwards of one transformer block: `python -m bench.backwards [--hidden N] [--samples N]`.

Ours (what the replay runs) against torch's own (`stage_backward_input`, `stage_backward_weight`): the bytes that stay
between the two halves, saved tensors and gradients, and the time of each half; and the fused backward for comparison.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed.pipelining import _backward as torchs
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe_torch.models.known import build
from optpipe_torch.profiler.measure import MeasureOptions
from runtime_torch.execution import StageExecution

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


@dataclass
class Found:
    """Samples of one way, and its bytes."""

    saved_bytes: int = 0
    residue_bytes: int = 0
    times: dict[str, list[int]] = field(default_factory=dict)

    def timed(self, name: str, work: Callable[[], object]) -> object:
        """Run `work`, keep its time under `name`, return its result."""
        start = time.perf_counter_ns()
        result = work()
        self.times.setdefault(name, []).append(time.perf_counter_ns() - start)
        return result


def ours(block: nn.Module, x: Tensor, gradient: Tensor, found: Found) -> None:
    """One microbatch in two halves on the stage execution, and one fused."""
    stage = StageExecution([block], 0, is_first=False, is_last=False, device="cpu")
    stage.forward(0, x)
    found.saved_bytes = stage.saved_bytes(0)
    found.timed("input", lambda: stage.backward_input(0, gradient))
    found.residue_bytes = stage.meter.current_bytes
    found.timed("weight", lambda: stage.backward_weight(0))
    stage.forward(0, x)
    found.timed("fused", lambda: stage.backward(0, gradient))


def stock(block: nn.Module, x: Tensor, gradient: Tensor, found: Found) -> None:
    """One microbatch in two halves as torch's own schedules have it."""
    constants = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved: dict[int, tuple[StorageWeakRef, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constants:
            saved[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        return tensor

    leaf = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = [block(leaf)]
    weights = list(block.parameters())
    found.saved_bytes = sum(nbytes for _, nbytes in saved.values())
    halves = found.timed("input", lambda: torchs.stage_backward_input(output, [gradient], [leaf], iter(weights)))
    assert isinstance(halves, tuple)
    _, groups = halves
    output.clear()
    captured = [g.untyped_storage() for group in groups for grads in group["grads"] for g in grads if g is not None]
    left = {storage.data_ptr(): storage.nbytes() for storage in captured}
    left |= {address: nbytes for address, (ref, nbytes) in saved.items() if not ref.expired()}  # type: ignore[no-untyped-call]
    found.residue_bytes = sum(left.values())
    del captured
    found.timed("weight", lambda: torchs.stage_backward_weight(iter(weights), groups))


def compare(hidden: int, samples: int) -> dict[str, Found]:
    """Take the samples of both ways in turn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MeasureOptions(layers=1, hidden=hidden, heads=hidden // 64).model()
    (block,), x = build(model, range(1, 2)), torch.randn(4, 128, hidden)
    gradient = torch.randn_like(x)
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ways = {"ours": (ours, Found()), "torch": (stock, Found())}
    for index in range(samples + 2):
        for way, found in ways.values():
            way(block, x, gradient, found)
            if index < 2:
                found.times.clear()
    return {name: found for name, (_, found) in ways.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--samples", type=int, default=30)
    options = parser.parse_args()
    for name, found in compare(options.hidden, options.samples).items():
        times = ", ".join(f"{op} {statistics.median(ns) / 1e6:.2f} ms" for op, ns in found.times.items())
        print(f"{name:5}  saved {found.saved_bytes:,}  between the halves {found.residue_bytes:,} bytes  {times}")


if __name__ == "__main__":
    main()
