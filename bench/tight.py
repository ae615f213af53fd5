"""Measure what fits at all: `python -m bench.tight [--instances N]`.

Prints the least memory that does with and without placements that are for little memory (plan/instances.py). Then, for
random layers on one to three devices behind a slow link, with that memory or little more, how much longer plans are
without what takes the least time for one microbatch, repeated (`LeastMemory.find_quick`, plan/least_memory.py): what
the local search begins with holds too much there, and it may end with much longer ones.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING
from unittest.mock import patch

from bench.ablation import for_any_cap, profile_of
from bench.ablation import options as options_of
from bench.planner import Case
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.documents.profile import Layer, Link, Machine, Profile
from optpipe_compiler.errors import Infeasible
from optpipe_compiler.plan import instances
from optpipe_compiler.plan.least_memory import LeastMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

MB = 10**6
LIMIT_S = 0.5
"""Of each plan, counted in ops."""
FOR_LITTLE = (
    ("selective recompute", "selectively", lambda *_: iter(()), Case("measured", 2, 8, 0.0005)),
    ("layers as stages beside each other", "_needed", for_any_cap, Case("6.2B-x8", 8, 8, 0.0005)),
)
"""Placements, what makes them and what stands for it where it is left out, and a case that never fits."""


def least_mb(case: Case) -> float:
    """Return the least memory that a refusal names."""
    try:
        compile_schedule(profile_of(case), options_of(case, LIMIT_S))
    except Infeasible as error:
        return (error.least_mem_bytes or 0) / MB
    raise AssertionError(f"{case.name} fits")


def drawn(draw: random.Random) -> tuple[Profile, int]:
    """Return random costs and a number of microbatches."""
    devices = draw.randint(1, 3)
    layers = []
    for number in range(draw.randint(max(3, devices), 8)):
        saved = draw.choice([50, 100, 200])
        layers.append(
            Layer(
                name=f"layer {number}",
                forward_ns=draw.choice([100_000, 500_000, 2_000_000]),
                backward_input_ns=draw.choice([100_000, 1_000_000]),
                backward_weight_ns=draw.choice([100_000, 500_000]),
                saved_bytes=saved * MB,
                checkpoint_bytes=draw.choice([0, 10]) * MB,
                output_bytes=draw.choice([0, 1, 10]) * MB,
                static_bytes=draw.choice([0, 0, 0, 100]) * MB,
                residue_bytes=draw.choice([50, saved]) * MB,
                forward_transient_bytes=draw.choice([0, 0, 10]) * MB,
                backward_transient_bytes=draw.choice([0, 30]) * MB,
            )
        )
    link = Link(d2h_bytes_per_s=draw.choice([10**9, 10**10]), h2d_bytes_per_s=draw.choice([10**9, 10**11]))
    return Profile(name="slow link", machine=Machine(devices=devices, links=[link]), layers=layers), draw.randint(1, 6)


def compared() -> Iterator[tuple[int, int]]:
    """Yield the makespans of plans in ns, with everything and without it."""
    draw = random.Random(1)
    while True:
        profile, microbatches = drawn(draw)
        more = draw.choice([1, 1.02, 1.1, 1.3])
        options = Options(MB, microbatches, time_limit_s=LIMIT_S, reproducible=True)
        try:
            compile_schedule(profile, options)
        except Infeasible as error:
            if error.least_mem_bytes is None:
                continue
            options = replace(options, mem_bytes=int(error.least_mem_bytes * more))
        found = compile_schedule(profile, options).schedule.forecast.makespan_ns
        with patch.object(LeastMemory, "find_quick", lambda _: None):
            yield found, compile_schedule(profile, options).schedule.forecast.makespan_ns


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=60)
    count = parser.parse_args().instances
    for title, name, instead, case in FOR_LITTLE:
        found = least_mb(case)
        with patch.object(instances, name, instead):
            print(f"{case.costs}: {found:.1f} MB with {title}, {least_mb(case):.1f} without")
    ratios = [without / found for found, without in islice(compared(), count)]
    longer = [ratio for ratio in ratios if ratio > 1.001]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(
        f"{len(longer)} of {len(ratios)} plans are longer without it, by up to {max(ratios):.2f} times, {mean:.3f} in"
    )
    print(f"the geometric mean; {sum(ratio < 0.999 for ratio in ratios)} are shorter")


if __name__ == "__main__":
    main()
