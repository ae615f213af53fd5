"""Compare cuts of layers into stages: `python -m bench.cuts`.

For placements of several passes: how much heavier than an equal share the busiest device is with even stages, with the
cut that compile takes (plan/passes.py), and at least (its bound); then what CP-SAT finds from that cut in `EFFORT`
deterministic seconds; and seconds of the processor. For Llamas by name; for random layers by kind: blocks, halves of
blocks, halves as measured, and layers like nothing real; and for the same on unequal devices: one of them slow, two
kinds, and as equal ones are measured.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import islice, pairwise
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
RANDOM = 100
EFFORT = 2.0


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


def drawn(seed: int = 1) -> Iterator[tuple[str, list[int], int, str, int]]:
    """Yield random layers: their kind, their work, devices, placement and passes; always the same ones."""
    draw = random.Random(seed)
    while True:
        devices, number, name = draw.randint(2, 16), draw.randint(2, 4), draw.choice(["loop", "v"])
        kind, count = draw.choice(["blocks", "halves", "measured halves", "any"]), draw.randint(8, 80)
        if kind == "any":
            work = [draw.randint(1, 10_000) for _ in range(count)]
        else:
            parts, head = draw.choice([1, 4, 8]), draw.randint(1_000, 6_000)
            inner = count - 1 - parts
            body = [1_000] * inner if kind == "blocks" else [333, 667] * (inner // 2)
            if kind == "measured halves":
                body = [int(item * draw.uniform(0.98, 1.02)) for item in body]
            work = [draw.choice([0, 5]), *body, *[head // parts] * parts]
        if devices * number <= len(work):
            yield kind, work, devices, name, number


@dataclass(frozen=True)
class Row:
    """The busiest device of cuts, against an equal share."""

    even: float
    found: float
    least: float
    solved: float
    found_s: float
    solved_s: float


def unequal(devices: int, draw: random.Random) -> list[int]:
    """Return the thousandths of the time that each device takes for the same work."""
    kinds = [
        [1200, *[1000] * (devices - 1)],
        [1000] * (devices // 2) + [1500] * (devices - devices // 2),
        [draw.randint(1000, 1060) for _ in range(devices)],
    ]
    found = draw.choice(kinds)
    draw.shuffle(found)
    return found


def row(work: Sequence[int], devices: int, name: str, number: int, permille: Sequence[int] | None = None) -> Row:
    """Cut these layers in each way."""
    even = layout(name, devices, number, work)
    slow = permille or [1000] * devices

    def busiest(cut: Sequence[int]) -> int:
        loads = [0] * devices
        for device, (begin, end) in zip(even.device_of, pairwise(cut), strict=True):
            loads[device] += sum(work[begin:end])
        return max(load * one // 1000 for load, one in zip(loads, slow, strict=True))

    found, found_s = timed(passes.lightest, work, even.device_of, even.cuts, permille)
    known, share = busiest(found), passes.share(work, even.device_of, permille)
    least, solved, solved_s = passes.loads(work, even.device_of, known, permille).least, found, 0.0
    if known > least:
        solved, solved_s = timed(cuts.lightest, work, even.device_of, found, (), EFFORT, permille)
    values = (busiest(even.cuts), known, least, min(known, busiest(solved)))
    of_even, of_found, of_least, of_solved = (value / share - 1 for value in values)
    return Row(of_even, of_found, of_least, of_solved, found_s, solved_s)


def timed(function: Callable[..., tuple[int, ...]], *arguments: object) -> tuple[tuple[int, ...], float]:
    """Return what a function finds, and the seconds of the processor that it took."""
    begin = time.process_time()
    return function(*arguments), time.process_time() - begin


def summary(kind: str, number: int, rows: Sequence[Row]) -> str:
    """Return a line on cuts of random layers; less than FINE is no difference."""
    lighter = [one for one in rows if one.found - one.solved > 1 / passes.FINE]
    most = max(((1 + one.found) / (1 + one.solved) - 1 for one in lighter), default=0.0)
    at_bound = sum(one.found - one.least <= 1 / passes.FINE for one in rows)
    mean, longest = sum(one.found_s for one in rows) / len(rows), max(one.found_s for one in rows)
    return f"| {kind} | {number} | {len(rows)} | {at_bound} | {len(lighter)} | {most:.2%} | {mean:.2f}, {longest:.2f} |"


def main() -> None:
    """Print the tables."""
    print("| model | placement | even | found (s) | at least | solved from found (s) |\n|---|---|---|---|---|---|")
    for name, work, devices in cases():
        for placement, number in PLACEMENTS:
            if devices * number <= len(work):
                one = row(work, devices, placement, number)
                found, solved = f"{one.found:.1%} ({one.found_s:.2f})", f"{one.solved:.1%} ({one.solved_s:.2f})"
                cells = f"{one.even:.1%} | {found} | {one.least:.1%} | {solved}"
                print(f"| {name} | {placement} {number} | {cells} |", flush=True)
    draw = random.Random(2)
    for title, is_equal in (("random layers", True), ("random layers, unequal devices", False)):
        rows = defaultdict[tuple[str, int], list[Row]](list)
        for kind, work, devices, placement, number in islice(drawn(), RANDOM):
            permille = None if is_equal else unequal(devices, draw)
            rows[kind, number].append(row(work, devices, placement, number, permille))
        print(f"\n| {title} | passes | cuts | proved by the bound | solved lighter | by at most | s: mean, longest |")
        print("|---|---|---|---|---|---|---|")
        for (kind, number), several in sorted(rows.items()):
            print(summary(kind, number, several))


if __name__ == "__main__":
    main()
