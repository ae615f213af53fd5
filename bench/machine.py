"""Measure the compiled machine: `python -m bench.machine [--seconds S]`.

Prints, for pipelines of several sizes, how many ops a second it runs with everything in it (memory, messages, duplex
links), and beside it the definition in plain Python (tests/list_scheduler.py), on the same guide; then how long a new
process takes until its first run is done, compiled anew and loaded from the cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from bench.planner import COSTS, GB
from optpipe_compiler.compiler import Options, instances, settled
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.machine.policy import policy, setting, value
from optpipe_compiler.machine.state import A_BACKWARD, A_FORWARD, A_MODE, A_WEIGHT, FUSED, NEVER, OPS, machine
from optpipe_compiler.model.schedule import Mode
from optpipe_compiler.plan.wishes import treatments, wish
from tests.list_scheduler import Guide, Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.machine.state import MachineState
    from optpipe_compiler.model.problem import Problem

SIZES = ((8, 32, 4), (16, 64, 4), (32, 128, 4), (64, 512, 2))
"""Devices, microbatches, stages per device."""
REFERENCE = 2_000
"""Activations up to which the definition in plain Python is run, too."""
START = """
import time
from bench.machine import loaded
x, run = loaded(8, 32, 4)
run()
"""


def instance(devices: int, microbatches: int, per_device: int) -> Problem:
    """Return equal stages in a loop under a quarter of 1F1B's memory, which offloads."""
    costs = uniform_profile(UniformOptions(devices=devices, **COSTS["unit"]))  # type: ignore[arg-type]
    chosen = Options(
        mem_bytes=devices * GB // 4, microbatches=microbatches, placement="loop", stages_per_device=per_device
    )
    return instances(costs, settled(costs, chosen))[0][1]


def loaded(devices: int, microbatches: int, per_device: int) -> tuple[MachineState, Callable[[], int]]:
    """Return a machine and what runs a policy on it and returns the ops run."""
    problem = instance(devices, microbatches, per_device)
    wished = wish(problem, "modulo-1")
    given = setting(problem, wished, microbatches, is_span=False)
    by = policy(problem, next(treatments(problem, wished)))
    x = machine(problem)

    def run() -> int:
        assert value(x, by, given, NEVER // 2) < NEVER
        return int(x.counts[OPS])

    return x, run


def reference(problem: Problem, x: MachineState) -> float:
    """Return the ops a second of the definition in plain Python, with the guide that the machine has run last."""
    keys = [(s, m) for s in range(len(problem.stages)) for m in range(problem.microbatches)]

    def table(column: int) -> dict[tuple[int, int], int]:
        return {key: int(x.acts[(*key, column)]) for key in keys}

    modes = {key: Mode(mode) for key, mode in table(A_MODE).items()}
    fused = [bool(row) for row in x.stages[:, FUSED]]
    guide = Guide(table(A_FORWARD), table(A_BACKWARD), table(A_WEIGHT), modes, fused, [0] * problem.devices)
    begin = time.perf_counter()
    starts = Run(problem, guide).play()
    return len(starts) / (time.perf_counter() - begin)


def rate(run: Callable[[], int], seconds: float) -> float:
    """Return the ops a second."""
    ops, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        ops += run()
    return ops / spent


def first_run_s(cache: str) -> float:
    """Return the seconds from the start of a process to the end of its first run."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", START], env=os.environ | {"XDG_CACHE_HOME": cache}, check=True)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size")
    arguments = parser.parse_args()
    print("| devices | microbatches | stages per device | million ops/s | plain Python |")
    print("|---|---|---|---|---|")
    for devices, microbatches, per_device in SIZES:
        x, run = loaded(devices, microbatches, per_device)
        run()
        problem = instance(devices, microbatches, per_device)
        is_small = x.acts.shape[0] * x.acts.shape[1] <= REFERENCE
        plain = f"{reference(problem, x) / 1e6:.4f}" if is_small else ""
        million = rate(run, arguments.seconds) / 1e6
        print(f"| {devices} | {microbatches} | {per_device} | {million:.1f} | {plain} |", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        anew, again = first_run_s(cache), first_run_s(cache)
    print(f"\nA process until its first run is done: compiled anew {anew:.1f} s, from the cache {again:.1f} s.")


if __name__ == "__main__":
    main()
