"""What each part of the search earns: `python -m bench.ablation [--seconds S] [--seeds N] [-o FILE]`.

Every case is planned with everything, and with one part left out, in reproducible mode (the same ops whatever the
machine does meanwhile). A part's worth on a case is how much longer the plan takes without it, on the mean over seeds.
What is left out is patched here; the planner knows nothing of it.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from bench.planner import COSTS, Case, commit
from optpipe_compiler import compiler
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.machine import policy
from optpipe_compiler.plan import candidates, exact, local_search, wishes

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = (
    Case("unit", 4, 16, 0.375),
    Case("unit", 8, 32, 0.25),
    Case("unit", 8, 32, 0.125),
    Case("6.2B", 8, 32, 0.25),
    Case("unit-slow-links", 8, 32, 0.25),
    Case("unit-no-links", 8, 32, 0.25),
    Case("6.2B-head-parts", 8, 32, 0.25),
)
GB = 10**9


def without_wishes(kept: str) -> object:
    """Keep the wished orders whose names begin so, or those that do not."""
    every = wishes.names

    def names(*arguments: object) -> list[str]:
        found = every(*arguments)  # type: ignore[arg-type]
        return [name for name in found if name.startswith("modulo") == (kept == "modulo")]

    return patch.object(local_search, "names", names)


def without_move(name: str) -> object:
    return patch.dict(policy.MOVES, {name: 0})


def nothing(*_: object, **__: object) -> None:
    return None


PARTS: dict[str, tuple[object, ...]] = {
    "published schedules as candidates": (patch.object(candidates.Candidates, "steps", lambda *_: iter(())),),
    "published orders as wishes": (without_wishes("modulo"),),
    "modulo schedules as wishes": (without_wishes("published"),),
    "first offloads by how long activations stay": (patch.object(wishes, "STAYS", ()),),
    "moves of ranks": (without_move("shift"),),
    "moves of treatments": (without_move("treat"),),
    "moves of splits": (without_move("split"),),
    "going on from the best": (patch.object(local_search.LocalSearch, "_restart", nothing),),
    "more than two climbers": (patch.object(local_search, "CLIMBERS", 2),),
    "few microbatches first": (patch.object(local_search, "shortened", lambda problem: problem),),
    "local search": tuple(patch.object(compiler, name, 0.0) for name in ("LOCAL_SHARE", "SMALL_SHARE")),
    "windows": (patch.object(exact._Exact, "polish", nothing),),
    "the full model": (patch.object(exact, "EXACT", 0),),
}
"""What is left out, and how."""


@contextmanager
def left_out(part: str) -> Iterator[None]:
    with ExitStack() as stack:
        for one in PARTS.get(part, ()):
            stack.enter_context(one)  # type: ignore[arg-type]
        yield


def reached_ms(case: Case, seconds: float, seed: int) -> float:
    """Return the makespan of the plan."""
    profile = uniform_profile(UniformOptions(devices=case.devices, **COSTS[case.costs]))  # type: ignore[arg-type]
    options = Options(
        mem_bytes=int(case.cap * case.devices * GB),
        microbatches=case.microbatches,
        offload=case.costs != "unit-no-links",
        time_limit_s=seconds,
        seed=seed,
        reproducible=True,
    )
    return compile_schedule(profile, options).schedule.forecast.makespan_ns / 1e6


def table(cases: list[Case], parts: list[str], seconds: float, seeds: int) -> Iterator[str]:
    """Yield the lines of a Markdown table: per part, how many percent longer the plans take without it."""
    yield "| left out | " + " | ".join(case.name for case in cases) + " |"
    yield "|---" * (1 + len(cases)) + "|"
    whole = {case: [reached_ms(case, seconds, seed) for seed in range(seeds)] for case in cases}
    yield "| *nothing (ms)* | " + " | ".join(f"{statistics.mean(whole[case]):.1f}" for case in cases) + " |"
    for part in parts:
        cells = []
        for case in cases:
            with left_out(part):
                found = [reached_ms(case, seconds, seed) for seed in range(seeds)]
            cells.append(f"{statistics.mean(found) / statistics.mean(whole[case]) - 1:+.1%}")
        yield f"| {part} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="time limit of each plan, counted in ops")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--cases", default="*", help="names, with * and ?")
    parser.add_argument("--parts", default="*", help="names, with * and ?")
    parser.add_argument("-o", "--output")
    chosen = parser.parse_args()
    cases = [case for case in CASES if fnmatch.fnmatch(case.name, chosen.cases)]
    parts = [part for part in PARTS if fnmatch.fnmatch(part, chosen.parts)]
    lines = [f"Commit {commit()}, {chosen.seconds:g} s each, mean of {chosen.seeds} seeds.", ""]
    for line in table(cases, parts, chosen.seconds, chosen.seeds):
        print(line, flush=True)
        lines.append(line)
    if chosen.output:
        Path(chosen.output).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
