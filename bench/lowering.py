"""Measure what makes a checked file of a plan: `python -m bench.lowering [--most-tasks N]`.

Prints, for published orders of several sizes, how long lowering and judging take, in seconds and in microseconds per op
as `Problem.tasks` counts them; then how long it takes to write and to show the file, and to see what can stay.
plan/budget.py has its constants from here.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, TypeVar

from bench.planner import COSTS
from optpipe_compiler.compiler import Options, settled
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.documents.files import uncollected
from optpipe_compiler.lower import Certificate, lower
from optpipe_compiler.model.problem import Caps
from optpipe_compiler.plan.instances import instances
from optpipe_compiler.plan.spare import spared
from optpipe_compiler.published import published
from optpipe_compiler.verify import check
from optpipe_compiler.view.summary import render

if TYPE_CHECKING:
    from collections.abc import Callable

    T = TypeVar("T")

SIZES = ((8, 32, 4), (8, 1024, 1), (16, 64, 4), (32, 128, 1), (64, 512, 1))
"""Devices, microbatches, stages per device."""
ORDERS = {False: ("zb-h1", "1f1b-offload"), True: ("interleaved-zb", "interleaved-1f1b-offload")}
"""By whether a device has several stages."""
ROOMY_BYTES = 10**15


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return what a call returns, and its processor time in seconds."""
    begin = time.process_time()
    return call(), time.process_time() - begin


def row(devices: int, microbatches: int, per_device: int, name: str) -> str:
    """Return a line of the table."""
    profile = uniform_profile(UniformOptions(devices=devices, **COSTS["unit"]))  # type: ignore[arg-type]
    chosen = Options(
        mem_bytes=ROOMY_BYTES,
        microbatches=microbatches,
        placement="linear" if per_device == 1 else "loop",
        stages_per_device=per_device,
    )
    layout, problem = instances(profile, settled(profile, chosen))[0]
    plan = published(problem, name)
    certificate = Certificate("makespan", "feasible", 1, "device-work", {}, {})
    schedule, lower_s = timed(lambda: lower(plan, profile, layout, Caps(ROOMY_BYTES, None), certificate))
    checked, check_s = timed(lambda: check(schedule, profile))
    _, write_s = timed(lambda: checked.text)
    _, show_s = timed(lambda: render(schedule))
    _, spare_s = timed(lambda: spared(plan, problem.budget))
    each = 1e6 / problem.tasks
    return (
        f"| {devices} | {microbatches} | {per_device} | {name} | {problem.tasks} | {lower_s:.2f} | {check_s:.2f} | "
        f"{(lower_s + check_s) * each:.0f} | {write_s:.2f} | {show_s:.2f} | {(write_s + show_s) * each:.0f} | "
        f"{spare_s * each:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-tasks", type=int, default=10**6, help="leave larger ones out")
    arguments = parser.parse_args()
    print(
        "| devices | microbatches | stages per device | order | ops | lower s | judge s | us per op "
        "| write s | show s | us per op | spare us per op |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for devices, microbatches, per_device in SIZES:
        if 4 * devices * per_device * microbatches <= arguments.most_tasks:
            for name in ORDERS[per_device > 1]:
                with uncollected():
                    print(row(devices, microbatches, per_device, name), flush=True)


if __name__ == "__main__":
    main()
