"""Every published schedule on the instances of the project's two reference tables, beside the figures recorded there.

    python -m bench.published [--table unit|gpt] [--case 8x32] [--all]

For each cap (in whole-device activations of one microbatch) three makespans: the figure of the reference (the authors'
generators on a neutral simulator), the best schedule whose own peak fits, and the best one when those that do not fit
run in the same order under the cap, each task waiting for its memory. `!` marks a worse figure than the reference's.

One rule differs from the reference: a transfer that meets one of the other direction of its link at any time takes as
long as if it met one all the time.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from optpipe_compiler.costs.uniform import NS_PER_MS, UniformOptions, uniform_profile
from optpipe_compiler.machine.orders import peaks, retime
from optpipe_compiler.model.placement import layout
from optpipe_compiler.model.problem import Caps, Freedom, Problem, build
from optpipe_compiler.model.schedule import Stuck
from optpipe_compiler.published import METHODS, NotDefined, published

if TYPE_CHECKING:
    from optpipe_compiler.model.schedule import Schedule

LAYERS = {1: 4, 2: 4, 3: 12, 4: 4}
"""Layers per device by stages per device: four, or, where thirds are needed, twelve of a third the size."""

CAPS = (("2P", 2.0), ("P", 1.0), ("P/2", 0.5), ("3P/8", 0.375), ("P/4", 0.25), ("P/8", 0.125))

LINKS = UniformOptions(boundary_fraction=0.0, shared_links="pairs", duplex_slowdown=1 / 0.7)
COSTS = {
    "unit": replace(LINKS, p2p_ms=0.0, residue_fraction=1.0, d2h_ms=1.05, h2d_ms=1.05),
    "gpt": replace(
        LINKS,
        forward_ms=29.935,
        backward_input_ms=29.621,
        backward_weight_ms=19.388,
        p2p_ms=0.535,
        residue_fraction=0.4324,
        d2h_ms=27.63,
        h2d_ms=27.63,
    ),
}

REFERENCE: dict[str, dict[tuple[int, int], tuple[float, ...]]] = {
    "unit": {
        (4, 16): (48.75, 48.75, 49.5, 51.0, 60.0, 68.25),
        (8, 32): (97.75, 97.75, 99.5, 102.5, 102.5, 137.25),
        (8, 64): (193.75, 193.75, 195.5, 198.0, 198.5, 265.25),
    },
    "gpt": {
        (4, 16): (1306, 1306, 1317, 1384, 1643, 1882),
        (8, 16): (1361, 1361, 1388, 1418, 1498, 2058),
        (8, 32): (2624, 2624, 2651, 2681, 2784, 3800),
        (8, 64): (5151, 5151, 5177, 5207, 5288, 7284),
    },
}


@dataclass(frozen=True)
class Found:
    """A published schedule on one placement, its makespan in ms and the highest peak in whole-device activations."""

    label: str
    makespan: float
    peak: float
    schedule: Schedule


def instance(table: str, devices: int, microbatches: int, placed: tuple[str, int], cap: float) -> Problem:
    """Return the problem of one cell on one placement; the cap is in whole-device activations."""
    placement, per_device = placed
    options = replace(COSTS[table], devices=devices, layers_per_device=LAYERS[per_device])
    cut = layout(placement, devices, per_device, [1] * (devices * LAYERS[per_device]))
    return build(uniform_profile(options), cut, microbatches, Caps(round(cap * 10**9), None), Freedom())


def candidates(table: str, devices: int, microbatches: int, cap: float, names: list[str]) -> list[Found]:
    """Return the named schedules on all their placements, the fastest first."""
    found = []
    for name in names:
        for placed in METHODS[name].placements:
            problem = instance(table, devices, microbatches, placed, cap)
            try:
                timed = published(problem, name)
            except NotDefined:
                continue
            label = f"{name} {placed[0]}-{placed[1]}"
            found.append(Found(label, timed.makespan / NS_PER_MS, max(peaks(timed)) / 10**9, timed))
    return sorted(found, key=lambda item: item.makespan)


def fitting(found: list[Found], cap: float) -> Found | None:
    """Return the fastest schedule whose peak is at most `cap`."""
    return next((item for item in found if item.peak <= cap + 1e-6), None)


def held_back(found: list[Found], cap: float, best: Found | None) -> Found | None:
    """Return the fastest schedule under `cap` when those that do not fit wait for memory; `best` fits as it is."""
    for item in found:
        if best is not None and item.makespan >= best.makespan:
            break
        problem = item.schedule.problem
        try:
            timed = retime(item.schedule, replace(problem, budget=(round(cap * 10**9),) * problem.devices))
        except Stuck:
            continue
        if best is None or timed.makespan / NS_PER_MS < best.makespan:
            best = Found(item.label, timed.makespan / NS_PER_MS, max(peaks(timed)) / 10**9, timed)
    return best


def show(found: Found | None) -> str:
    return "none" if found is None else f"{found.makespan:9.2f} {found.label}"


def main() -> None:
    """Print the tables that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--table", choices=sorted(COSTS), help="only this one of the two tables")
    parser.add_argument("--case", help="only this case, such as 8x32 for 8 devices and 32 microbatches")
    parser.add_argument("--all", action="store_true", help="list every schedule on every placement, too")
    arguments = parser.parse_args()
    tables = [arguments.table] if arguments.table else sorted(COSTS, reverse=True)
    for table in tables:
        for (devices, microbatches), reference in REFERENCE[table].items():
            if arguments.case in (None, f"{devices}x{microbatches}"):
                report(table, devices, microbatches, reference, every=arguments.all)


def report(table: str, devices: int, microbatches: int, reference: tuple[float, ...], *, every: bool) -> None:
    """Print one case."""
    begin = time.monotonic()
    fixed = [name for name in METHODS if name != "zb-memory-limited"]
    found = candidates(table, devices, microbatches, 2 * devices, fixed)
    print(f"\n{table}: P = {devices}, M = {microbatches}")
    if every:
        for item in found:
            print(f"  {item.makespan:9.2f}  peak {item.peak:6.2f}  {item.label}")
    print(f"  {'cap':5} {'reference':>9}   {'fits':42} {'fits, or waits for memory':42}")
    for (label, share), figure in zip(CAPS, reference, strict=True):
        cap = share * devices
        limited = candidates(table, devices, microbatches, cap, ["zb-memory-limited"])
        here = sorted(found + limited, key=lambda item: item.makespan)
        best = fitting(here, cap)
        waiting = held_back(here, cap, best)
        mark = "  " if waiting is not None and waiting.makespan <= figure + 0.5 * (table == "gpt") + 0.01 else " !"
        print(f"  {label:5} {figure:9.2f} {mark} {show(best):42} {show(waiting):42}")
    print(f"  {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
