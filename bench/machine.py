"""Measure the compiled machine: `python -m bench.machine [--seconds S] [--report FILE]`.

Says, for pipelines of several sizes, how many ops a second it runs with everything in it (memory, messages, duplex
links), and beside it the definition in plain Python (tests/list_scheduler.py), on the same guide; then how long a new
process takes until its first run is done, compiled anew and loaded from the cache, and where the compilation goes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from bench import report
from bench.planner import COSTS, GB, commit
from optpipe_compiler.compiler import Options, settled
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.machine.orders import peaks, retime
from optpipe_compiler.machine.policy import policy, setting, value
from optpipe_compiler.machine.state import NEVER, OPS, machine
from optpipe_compiler.machine.waits import load as load_waits
from optpipe_compiler.model.schedule import Mode, Schedule
from optpipe_compiler.plan.instances import instances
from optpipe_compiler.plan.wishes import treatments, wish
from tests.list_scheduler import Guide, Run
from tests.machines import UNKNOWN_NUMBA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.machine.state import MachineState
    from optpipe_compiler.model.problem import Problem

SIZES = ((8, 32, 4), (16, 64, 4), (32, 128, 4), (64, 512, 2))
"""Devices, microbatches, stages per device."""
REFERENCE = 2_000
"""Activations up to which the definition in plain Python is run, too."""
START = """
from time import process_time
import numpy
begin = process_time()
import numba
imported = process_time() - begin
from llvmlite.binding import ffi
from bench.machine import everything
from optpipe_compiler.documents.files import uncollected

in_llvm, call = 0.0, ffi._lib_fn_wrapper.__call__

def timed(self, *arguments):
    global in_llvm
    begin = process_time()
    try:
        return call(self, *arguments)
    finally:
        in_llvm += process_time() - begin

ffi._lib_fn_wrapper.__call__ = timed
begin = process_time()
with uncollected():  # as compile has it
    everything()
print(process_time() - begin, in_llvm, imported)
"""
HEAD = """# The compiled machine

Written by `python -m bench.machine --report docs/MACHINE.md` at {commit};
{where}, numba {numba}. The list scheduler is run with everything in it: memory,
messages, duplex links. Its plan is equal, tick for tick, to that of its definition in plain Python
(`tests/list_scheduler.py`), which has the last column. Aims: 10 million ops/s on 8 devices, 3 million on 64.

"""
FIRST = """
A new process that searches, follows an order, counts memory and finds waits, each once, takes {anew_s:.1f} s of the
clock where the machine has to be compiled, and {again_s:.1f} s where it is in the cache. The compilation takes
{compiled_s:.1f} s of one core (aim: 5): {llvm_s:.1f} in LLVM, and {own_s:.1f} in numba's own analysis, in Python. From
the cache all of that takes {loaded_s:.2f} s, numba's import included (aim: 0.5). Without what `inlined.py` and
`views.py` of `optpipe_compiler/machine` change of numba's way the compilation takes {plain_s:.1f} s. What follows
orders is compiled first, and published schedules are tried while the search is: a first answer does not wait for that,
and `--time-limit` does not count it.
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


def everything() -> None:
    """Let the machine do once all that it can."""
    x, run = loaded(8, 32, 4)
    run()
    peaks(retime(Schedule(instance(8, 32, 4), "local-search", x.starts), instance(8, 32, 4)))
    load_waits()


def reference(problem: Problem, x: MachineState) -> float:
    """Return the ops a second of the definition in plain Python, with the guide that the machine has run last."""
    keys = [(s, m) for s in range(len(problem.stages)) for m in range(problem.microbatches)]

    def table(field: str) -> dict[tuple[int, int], int]:
        return {key: int(x.acts[field][key]) for key in keys}

    modes = {key: Mode(mode) for key, mode in table("mode").items()}
    fused, holds, waits = ([bool(row) for row in x.stages[name]] for name in ("fused", "holds", "waits"))
    before = [list(map(int, x.stages[name])) for name in ("recomputed_before", "reloaded_before")]
    none = [0] * problem.devices
    guide = Guide(table("forward"), table("backward"), table("weight"), modes, fused, none, holds, waits, *before)
    begin = time.perf_counter()
    starts = Run(problem, guide).play()
    return len(starts) / (time.perf_counter() - begin)


def rate(run: Callable[[], int], seconds: float) -> float:
    """Return the ops a second."""
    ops, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        ops += run()
    return ops / spent


def first_run_s(cache: str, before: str = "") -> tuple[float, float, float, float]:
    """Return the seconds from the start of a process to the end of its first run; of these, the processor's from the
    call on, those in LLVM, and those of numba's import."""
    begin = time.perf_counter()
    command, known = [sys.executable, "-W", "ignore", "-c", before + START], os.environ | {"XDG_CACHE_HOME": cache}
    said = subprocess.run(command, env=known, check=True, stdout=subprocess.PIPE, text=True).stdout
    whole_s, llvm_s, imported_s = map(float, said.split())
    return time.perf_counter() - begin, whole_s, llvm_s, imported_s


def first() -> str:
    """Return what the first run takes, and where it goes."""
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as plain:
        anew_s, whole_s, llvm_s, _ = first_run_s(cache)
        again_s, cached_s, _, imported_s = first_run_s(cache)
        plain_s = first_run_s(plain, UNKNOWN_NUMBA)[1] - cached_s
    return FIRST.format(
        anew_s=anew_s,
        again_s=again_s,
        compiled_s=whole_s - cached_s,
        llvm_s=llvm_s,
        own_s=whole_s - cached_s - llvm_s,
        loaded_s=imported_s + cached_s,
        plain_s=plain_s,
    )


def speeds(seconds: float) -> Iterator[str]:
    """Yield the table of ops a second."""
    yield "| devices | microbatches | stages per device | million ops/s | plain Python |"
    yield "|---|---|---|---|---|"
    for devices, microbatches, per_device in SIZES:
        x, run = loaded(devices, microbatches, per_device)
        run()
        problem = instance(devices, microbatches, per_device)
        is_small = x.acts.shape[0] * x.acts.shape[1] <= REFERENCE
        plain = f"{reference(problem, x) / 1e6:.4f}" if is_small else ""
        yield f"| {devices} | {microbatches} | {per_device} | {rate(run, seconds) / 1e6:.1f} | {plain} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size")
    parser.add_argument("--report", type=Path, help="write the page there, too")
    arguments = parser.parse_args()
    text = HEAD.format(commit=commit(), where=report.machine(), numba=version("numba"))
    for line in speeds(arguments.seconds):
        print(line, flush=True)
        text += line + "\n"
    last = first()
    print(last)
    if arguments.report:
        report.publish(text + last, arguments.report)


if __name__ == "__main__":
    main()
