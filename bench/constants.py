"""Measure the two constants of the planner that earn no makespan: `python -m bench.constants`.

`NEAR` (plan/incumbents.py): how much worse a plan may be that is compared with the best under noise. Each case is
planned once, its near plans are compared as compile does, and the plan that a smaller `NEAR` takes is executed with
other noise than chose it.

`SCREENED` (plan/candidates.py): from how many ops on a published schedule is looked at by its first microbatches. A
table says how long all of them take either way, in seconds of the processor, and whether the best is the same.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING
from unittest.mock import patch

from bench.ablation import options, profile_of
from bench.planner import Case, judged
from optpipe_compiler import compiler
from optpipe_compiler.compiler import spreads_of
from optpipe_compiler.forecast.choice import Choice
from optpipe_compiler.forecast.executions import quantiles
from optpipe_compiler.plan import incumbents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Profile

NEARS = (0.0, 0.005, 0.01, 0.02, 0.04)
NOISES = (0.1, 0.3)
NOISY = (
    Case("unit", 4, 16, 0.25),
    Case("6.2B", 4, 16, 0.25),
    Case("6.2B", 4, 16, 1.0),
    Case("6.2B", 8, 32, 0.25),
    Case("unit-slow-links", 8, 32, 0.25),
)
LARGE = (
    Case("unit", 8, 128, 0.25),
    Case("unit", 32, 128, 0.25),
    Case("unit", 32, 128, 0.125),
    Case("unit", 8, 1024, 0.25),
    Case("6.2B", 8, 1024, 0.125),
    Case("unit", 64, 512, 0.25),
    Case("unit", 64, 512, 0.125),
)
PLANNED_S = 3.0
UNSEEN = 3
"""A seed of executions that choose no plan."""


def taken(plans: list[ir.Schedule], profile: Profile, noise: float, near: float) -> int:
    """Return the number of the plan that is taken of those that are no more than `near` worse than the first."""
    choice = Choice()
    for plan in plans:
        if plan.forecast.makespan_ns <= (1 + near) * plans[0].forecast.makespan_ns:
            choice.add(plan, spreads_of(plan, profile, noise))
    return choice.best()


def near() -> Iterator[str]:
    """Yield a table: what the 95th percentile of a step is by `NEAR`, of that of the plan of least forecast."""
    yield f"| case | noise | plans | {' | '.join(f'{one:.1%}' for one in NEARS)} |"
    yield "|---|---|---|" + "---|" * len(NEARS)
    for case in NOISY:
        for noise in NOISES:
            profile, asked = profile_of(case), replace(options(case, PLANNED_S), noise=noise)
            with patch.object(incumbents, "NEAR", max(NEARS)):
                plans = [one.schedule for one in compiler.compile_schedule(profile, asked).considered]
            late = [quantiles(plan, spreads_of(plan, profile, noise), seed=UNSEEN).p95_ns for plan in plans]
            cells = (f"{late[taken(plans, profile, noise, one)] / late[0] - 1:+.2%}" for one in NEARS)
            yield f"| {case.name} | {noise:.0%} | {len(plans)} | {' | '.join(cells)} |"


def screened() -> Iterator[str]:
    """Yield a table of the time until all published schedules are judged, how many are run in full, and the best."""
    yield "| case | ops, up to | all in full | first microbatches first |"
    yield "|---|---|---|---|"
    for case in LARGE:
        cells = []
        for least in (1 << 62, 0):
            tried, seconds = judged(profile_of(case), options(case, PLANNED_S), least)
            known, winner = tried.incumbents, tried.incumbents.winner()
            run = sum(each.makespan is not None for tries in tried.tried.values() for each in tries)
            best = "none fits" if winner is None else f"best {known.reached(winner) / 1e6:g} ms"
            cells.append(f"{seconds:.1f} s, {run} in full, {best}")
        ops = max(attempt.problem.tasks for attempt in known.attempts)
        yield f"| {case.name} | {ops} | {' | '.join(cells)} |"


def main() -> None:
    """Print the tables."""
    for line in chain(near(), [""], screened()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
