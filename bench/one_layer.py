"""Plans in the memory of one or two layers: `python -m bench.one_layer [--seconds N] [-o docs/ONE_LAYER.md]`.

Where a device has room for the activations of one layer or two, people run 1F1B with full activation checkpointing.
Caps leave that room beside what a device always holds; plans are compared with that choice under whatever memory it
needs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import machine, publish, state
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.errors import Infeasible, NotFound

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.documents.profile import Profile

GB = 10**9
PLENTY = 10**15
LAYERS = 4
"""On a device."""
MICROBATCHES = 4
"""For each device."""
DEVICES = (2, 4, 8)
ROOM = (1, 2)
"""In layers' activations on a device."""
ROUND_TRIPS = (0.5, 1.0, 1.5, 2.0)
"""Time of a device's activations to the host and back over its compute time: k of PipeOffload (arXiv:2503.01328)."""

HEADER = """# In the memory of one layer

Written by `python -m bench.one_layer --seconds {seconds:g}` at {state}; {machine}.
Equal layers, {layers} on a device, F = I = W, messages of a fiftieth of F, {microbatches} microbatches for each device.
A cap leaves room for the activations of one layer or two on a device. *k* is the time that all activations of a device
take to the host and back over its compute time: beyond 1 a link cannot carry all of them. Stock is 1F1B with every
layer recomputed (full activation checkpointing), under whatever memory it needs. Plans are searched {seconds:g} s each
(reproducibly: as much search, whatever else runs); ms per step.

With room for one layer nothing can be copied beside a layer that computes: an offloaded layer has to be gone before the
next one begins, so that a link's speed hardly matters, and a plan wins by its order and by what need not be recomputed.
*At most*: how much faster than the stock choice a plan can be, by the proven bound.

| devices | room | k | 1F1B, full checkpointing | plan | by | faster by | bound | at most |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Case:
    """One row."""

    devices: int
    room: int
    k: float

    def profile(self) -> Profile:
        """Return the costs."""
        copies = self.k * 3.0 / 2
        return uniform_profile(
            UniformOptions(devices=self.devices, layers_per_device=LAYERS, p2p_ms=0.02, d2h_ms=copies, h2d_ms=copies)
        )

    def cap(self) -> int:
        """Return the bytes of so many layers' activations."""
        return self.room * GB // LAYERS


def planned(profile: Profile, case: Case, cap: int, seconds: float, method: str | None = None) -> Schedule | None:
    """Return a plan, or a published schedule; None where none is found."""
    options = Options(
        mem_bytes=cap,
        microbatches=MICROBATCHES * case.devices,
        method=method,
        time_limit_s=seconds,
        reproducible=True,
    )
    try:
        return compile_schedule(profile, options).schedule
    except (Infeasible, NotFound):
        return None


def row(case: Case, seconds: float) -> str:
    """Return a line of the table."""
    profile = case.profile()
    stock = planned(profile, case, PLENTY, seconds, "1f1b-recompute")
    assert stock is not None
    usual = stock.forecast.makespan_ns
    head = f"| {case.devices} | {case.room} | {case.k:g} | {usual / 1e6:.2f} |"
    found = planned(profile, case, case.cap(), seconds)
    if found is None:
        return f"{head} none found | | | | |\n"
    plan = found.forecast
    return (
        f"{head} {plan.makespan_ns / 1e6:.2f} | `{plan.method}` | {usual / plan.makespan_ns - 1:.1%} | "
        f"{plan.lower_bound_ns / 1e6:.2f} | {usual / plan.lower_bound_ns - 1:.1%} |\n"
    )


def main() -> None:
    """Print the rows; write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each plan")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    text = HEADER.format(
        seconds=options.seconds, state=state(), machine=machine(), layers=LAYERS, microbatches=MICROBATCHES
    )
    print(text, end="")
    for case in (Case(devices, room, k) for devices in DEVICES for room in ROOM for k in ROUND_TRIPS):
        line = row(case, options.seconds)
        print(line, end="", flush=True)
        text += line
    if options.output is not None:
        publish(text, options.output)


if __name__ == "__main__":
    main()
