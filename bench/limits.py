"""Measure how long a search needs: `python -m bench.limits --report docs/LIMITS.md`.

Cases of `bench.planner` are planned by the clock, on all cores, under time limits of which the last is a minute. Run
it where nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.planner import Case, commit, options_of, profile_of
from optpipe_compiler.compiler import Progress, compile_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = (
    *((Case(costs, 8, 32, cap), (2.0, 10.0, 60.0)) for costs in ("unit", "6.2B") for cap in (1.0, 0.25, 0.125)),
    *((Case("unit", 32, 128, cap), (20.0, 60.0)) for cap in (0.25, 0.125)),
    *((Case("unit", 64, 512, cap), (60.0,)) for cap in (0.25, 0.125)),
)
"""What is planned, and under which limits in seconds."""
HEADING = """# Time limits

Written by `python -m bench.limits --report docs/LIMITS.md` at {commit};
{cores} cores, Python {python}. Each plan is searched anew, by the clock and on all cores. *First*: seconds until a
schedule was there that could be returned, as when a search is interrupted; *longer*: than the plan of the last limit;
*gap*: to its proven bound. Searches of the same limit differ by what else the machine does.

| case | limit s | first s | in all s | makespan ms | longer | gap |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Planned:
    """A plan, and when it and the first one were there."""

    limit_s: float
    first_s: float
    wall_s: float
    makespan_ns: int
    bound_ns: int


def planned(case: Case, limit_s: float) -> Planned:
    """Plan a case under a time limit."""
    first: list[float] = []

    def note(progress: Progress) -> None:
        if progress.incumbent_ns is not None:
            first.append(progress.elapsed_s)

    begin = time.monotonic()
    found = compile_schedule(profile_of(case), replace(options_of(case), time_limit_s=limit_s), note)
    wall_s, forecast = time.monotonic() - begin, found.schedule.forecast
    return Planned(limit_s, first[0], wall_s, forecast.makespan_ns, forecast.lower_bound_ns)


def rows(case: Case, plans: list[Planned]) -> Iterator[str]:
    """Yield a line of the table for each plan of a case."""
    for one in plans:
        longer = one.makespan_ns / plans[-1].makespan_ns - 1
        yield (
            f"| {case.name} | {one.limit_s:g} | {one.first_s:.2f} | {one.wall_s:.1f} | {one.makespan_ns / 1e6:.5g} | "
            f"{longer:+.2%} | {1 - one.bound_ns / one.makespan_ns:.1%} |"
        )


def main() -> None:
    """Print the table, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="write the page here")
    report = parser.parse_args().report
    planned(CASES[0][0], 1.0)  # compiles the machine
    lines: list[str] = []
    for case, limits_s in CASES:
        found = list(rows(case, [planned(case, limit_s) for limit_s in limits_s]))
        print(*found, sep="\n", flush=True)
        lines += found
    if report is not None:
        heading = HEADING.format(commit=commit(), cores=os.cpu_count(), python=platform.python_version())
        report.write_text(heading + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
