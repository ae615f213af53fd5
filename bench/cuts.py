"""Compare cuts of Llamas into stages: `python -m bench.cuts`.

For placements of several passes: how much heavier than an equal share the busiest device is with even stages, cut pass
by pass (plan/passes.py), solved for by CP-SAT from the even cut and from that one; and seconds of the processor.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from optpipe_compiler.costs import gpus, models
from optpipe_compiler.documents.profile import value_of
from optpipe_compiler.model.placement import layout
from optpipe_compiler.plan import passes
from optpipe_compiler.solver import cuts
from optpipe_torch.estimates.estimate import EstimateOptions, estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MODELS = (("llama-7b", 8), ("llama-7b", 16), ("llama-2-70b", 16), ("llama-2-70b", 32))
PLACEMENTS = (("loop", 2), ("loop", 3), ("loop", 4), ("v", 2), ("v", 4))


def cases() -> Iterator[tuple[str, list[int], int]]:
    """Yield names, the work of layers in ns, and devices."""
    for name, devices in MODELS:
        for granularity in ("block", "half"):
            for parts in (1, devices):
                model = replace(models.load(name), head_parts=parts, granularity=granularity)
                options = EstimateOptions(model=model, gpu=gpus.load("h100-sxm"), name=name, devices=devices)
                layers = estimate(options).expanded_layers()
                work = [value_of(layer.forward_ns) + layer.fused_ns for layer in layers]
                yield f"{name}, {granularity}s, head in {parts}, P={devices}", work, devices


def over(work: Sequence[int], owners: Sequence[int], cut: Sequence[int]) -> float:
    """Return by which part of the least possible the busiest device is above it."""
    loads = [0] * (max(owners) + 1)
    for device, (begin, end) in zip(owners, pairwise(cut), strict=True):
        loads[device] += sum(work[begin:end])
    return max(loads) / passes.least(work, owners) - 1


def timed(function: Callable[..., tuple[int, ...]], *arguments: object) -> tuple[tuple[int, ...], float]:
    """Return what a function finds, and the seconds of the processor that it took."""
    begin = time.process_time()
    return function(*arguments), time.process_time() - begin


def main() -> None:
    """Print the table."""
    print(
        "| model | placement | even | by passes (s) | solved (s) | solved from passes (s) |\n|---|---|---|---|---|---|"
    )
    for name, work, devices in cases():
        for placement, number in PLACEMENTS:
            if devices * number > len(work):
                continue
            even = layout(placement, devices, number, work)
            by_passes, passes_s = timed(passes.lightest, work, even.device_of, even.cuts)
            solved, solved_s = timed(cuts.lightest, work, even.device_of, even.cuts)
            both, both_s = timed(cuts.lightest, work, even.device_of, by_passes)
            found = ((by_passes, passes_s), (solved, solved_s), (both, both_s))
            cells = " | ".join(f"{over(work, even.device_of, cut):.1%} ({spent:.2f})" for cut, spent in found)
            print(
                f"| {name} | {placement} {number} | {over(work, even.device_of, even.cuts):.1%} | {cells} |", flush=True
            )


if __name__ == "__main__":
    main()
