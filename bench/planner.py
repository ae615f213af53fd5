"""Measure the planner on named cases: `python -m bench.planner [--cases PATTERN] [--time-limit S] [--again] [-o FILE]`.

The search is reproducible: its seconds are counted in operations, so that a busy machine and a quiet one get the same
plans. With `--clock` they are the clock's, on all cores. Results go to a JSON file, case by case, so that an
interrupted run can go on; `--report FILE` writes the Markdown table of all results in it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import platform
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import optpipe_compiler
from bench.published import REFERENCE
from optpipe_compiler import compiler
from optpipe_compiler.compiler import Options, Progress, compile_schedule, settled
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.machine.orders import peaks
from optpipe_compiler.model.placement import Layout, stage_devices
from optpipe_compiler.model.problem import Caps, Freedom, build
from optpipe_compiler.plan import candidates
from optpipe_compiler.plan.instances import SEVERAL
from optpipe_compiler.published import METHODS, NotDefined, published

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Profile

REFERENCE_NAMES = {"unit": "unit", "6.2B": "gpt"}
GB = 10**9
LINKS = {"shared_links": "pairs", "duplex_slowdown": 1 / 0.7}
COSTS: dict[str, dict[str, object]] = {
    "unit": {"p2p_ms": 0.0, "residue_fraction": 1.0, "d2h_ms": 1.05, "h2d_ms": 1.05, **LINKS},
    # GPT 6.2B on A100: arXiv:2401.10241, Table 9; residue 32h/(34h+5as)
    "6.2B": {
        "forward_ms": 29.935,
        "backward_input_ms": 29.621,
        "backward_weight_ms": 19.388,
        "p2p_ms": 0.535,
        "residue_fraction": 0.4324,
        "d2h_ms": 27.63,
        "h2d_ms": 27.63,
        **LINKS,
    },
}
COSTS["6.2B-head"] = COSTS["6.2B"] | {"head_ms": (12.66, 9.38, 13.38)}
COSTS["6.2B-head-parts"] = COSTS["6.2B-head"] | {"head_parts": 8}
COSTS["unit-slow-links"] = COSTS["unit"] | {"d2h_ms": 3.0, "h2d_ms": 3.0}
COSTS["unit-no-links"] = COSTS["unit"]
"""Run without offloads."""
ROOMY_S = 1000.0
"""A time limit that leaves no placement out."""
SIZES = {
    "unit": ((4, 16), (8, 32), (8, 64)),
    "6.2B": ((4, 16), (8, 16), (8, 32), (8, 64)),
    "6.2B-head": ((8, 32),),
    "6.2B-head-parts": ((8, 32),),
    "unit-slow-links": ((8, 32),),
    "unit-no-links": ((8, 32),),
}
CAPS = (2.0, 1.0, 0.5, 0.375, 0.25, 0.125)
"""In whole-device activations, as multiples of the number of devices."""


@dataclass(frozen=True)
class Case:
    """One instance."""

    costs: str
    devices: int
    microbatches: int
    cap: float

    @property
    def name(self) -> str:
        return f"{self.costs} P={self.devices} M={self.microbatches} cap={self.cap:g}P"


def cases() -> list[Case]:
    table = [Case(costs, p, m, cap) for costs, sizes in SIZES.items() for p, m in sizes for cap in CAPS]
    large = [(16, 64), (32, 128), (64, 512), (8, 1024)]
    odd = [(4, 3), (8, 27), (1, 4)]
    return (
        table
        + [Case("unit", p, m, cap) for p, m in large for cap in (1.0, 0.25, 0.125)]
        + [Case("6.2B", p, m, cap) for p, m in odd for cap in (1.0, 0.25)]
    )


def profile_of(case: Case) -> Profile:
    return uniform_profile(UniformOptions(devices=case.devices, **COSTS[case.costs]))  # type: ignore[arg-type]


def options_of(case: Case) -> Options:
    return Options(
        mem_bytes=int(case.cap * case.devices * GB),
        microbatches=case.microbatches,
        offload=case.costs != "unit-no-links",
    )


def measure(case: Case, time_limit_s: float | None, *, by_clock: bool) -> dict[str, object]:
    profile = profile_of(case)
    options = replace(options_of(case), time_limit_s=time_limit_s, reproducible=not by_clock)
    improved: list[tuple[float, int]] = []

    def note(progress: Progress) -> None:
        if progress.incumbent_ns is not None and (not improved or progress.incumbent_ns < improved[-1][1]):
            improved.append((progress.elapsed_s, progress.incumbent_ns))

    begin = time.monotonic()
    result = compile_schedule(profile, options, note)
    wall = time.monotonic() - begin
    forecast = result.schedule.forecast
    work = sum(c.forward_ns + min(c.backward_ns, c.backward_input_ns + c.backward_weight_ns) for c in forecast.stages)
    ideal = work * case.microbatches / case.devices
    final = forecast.makespan_ns
    return {
        "makespan_ms": final / 1e6,
        "idle": 1 - ideal / final,
        "bound_ms": forecast.lower_bound_ns / 1e6,
        "gap": 1 - forecast.lower_bound_ns / final,
        "method": forecast.method,
        "first_s": improved[0][0],
        "within_1_percent_s": next(at for at, value in improved if value <= 1.01 * final),
        "wall_s": wall,
        "time_limit_s": result.options.time_limit_s,
        "by_clock": by_clock,
        "commit": commit(),
        "on_equal_cuts_ms": on_equal_cuts(case, profile) if case.costs.endswith("head") else None,
        **baselines(case, ideal / 1e6),
    }


def commit() -> str:
    """Return the commit that is measured, with a + where the compiler's files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "optpipe_compiler")
    return git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")


def judged(profile: Profile, options: Options, screened: int) -> tuple[candidates.Candidates, float]:
    """Try all published schedules on all placements, looking at first microbatches from so many ops on.

    Return also the seconds of the processor that it takes.
    """
    asked = settled(profile, replace(options, time_limit_s=ROOMY_S))
    one = compiler._Compilation(profile, asked, lambda _: None, time.monotonic())
    begin = time.process_time()
    with patch.object(candidates, "SCREENED", screened):
        for _ in one.candidates.steps():
            pass
    return one.candidates, time.process_time() - begin


def baselines(case: Case, ideal_ms: float) -> dict[str, object]:
    """Return the best baseline that fits, and the best that is no composition of ours; all are run in full.

    The names are those of results.json.
    """
    tried, _ = judged(profile_of(case), options_of(case), 1 << 62)
    fitting = {name: b for name, b in tried.baselines().items() if b.fits and b.makespan_ns is not None}
    found: dict[str, object] = {"baselines_commit": commit()}
    for which, names in (
        ("best_published", [*fitting]),
        ("best_of_papers_and_stock", [name for name in fitting if METHODS[name].kind != "composition"]),
    ):
        best = min(names, key=lambda name: fitting[name].makespan_ns or 0, default=None)
        taken_ms = None if best is None else (fitting[best].makespan_ns or 0) / 1e6
        found |= {
            which: best,
            f"{which}_ms": taken_ms,
            f"{which}_idle": None if taken_ms is None else 1 - ideal_ms / taken_ms,
            f"{which}_waits": best is not None and bool(fitting[best].reason),
        }
    defined = {
        name: min(one.makespan for one in several if fits_as_defined(one)) / 1e6
        for name, several in tried.tried.items()
        if any(map(fits_as_defined, several))
    }
    best = min(defined, key=lambda name: defined[name], default=None)
    return found | {"best_as_defined": best, "best_as_defined_ms": None if best is None else defined[best]}


def fits_as_defined(one: candidates.Tried) -> bool:
    """Whether a schedule fits and waits for no memory."""
    return one.makespan is not None and one.need is not None and one.need.over is None and one.as_defined is None


def on_equal_cuts(case: Case, profile: Profile) -> float | None:
    """Return the best baseline's makespan in ms where every stage has as many blocks, the last one the head beside."""
    best = None
    blocks = len(profile.expanded_layers()) - 1
    for placement, numbers in SEVERAL.items():
        for per_device in numbers:
            stages = case.devices * per_device
            if blocks % stages:
                continue
            cuts = (*range(0, blocks, blocks // stages), blocks + 1)
            cut = Layout(placement, cuts, stage_devices(placement, case.devices, per_device))
            caps = Caps(int(case.cap * case.devices * GB), None)
            problem = build(profile, cut, case.microbatches, caps, Freedom())
            for name in METHODS:
                if (placement, per_device) in METHODS[name].placements:
                    with suppress(NotDefined):
                        timed = published(problem, name)
                        if all(peak <= budget for peak, budget in zip(peaks(timed), problem.budget, strict=True)):
                            best = min(best or timed.makespan, timed.makespan)
    return None if best is None else best / 1e6


def report(results: dict[str, dict[str, object]]) -> str:
    lines = [
        "# Results",
        "",
        f"Written by `python -m bench.planner --report`; optpipe {optpipe_compiler.__version__}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}.",
        "Caps are in whole-device activations. `idle` is 1 - work of all devices / (P x makespan). `best of all` is",
        "the best baseline under the same cap; (c): a composition, a paper's order with offloads or recomputations of",
        "ours; (w): the order waits for memory, since as it is defined it needs more than the cap. `papers, stock` is",
        "the best that a paper defines or a framework runs. Baselines are judged in full, without a search, at the",
        "commit that is named below the table. They take the devices by their numbers; a plan may pass them in another",
        "order where links are shared. `independent` is the best of an independent simulator (see bench/published.py).",
        "Each case says its commit and its time limit, counted in operations on one core unless `(clock)` stands",
        "there; times until the first plan, until within 1 % of the last and in all are the clock's, of runs by the",
        "clock alone. One core that counts searches less than two by the clock: rows of the two kinds are not to be",
        "compared.",
        "How far estimated profiles are from published measurements is in [ESTIMATES.md](ESTIMATES.md).",
        "",
        "| case | makespan ms | idle | bound ms | gap | method | best of all ms (idle) | "
        "papers, stock ms (idle) | independent ms | limit s | first s | to 1% s | wall s | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases():
        row = results.get(case.name)
        if row is None:
            continue
        independent = f"{reference(case):g}" if reference(case) is not None else ""
        reached = shown(row, "best_published") or "none fits"
        others = shown(row, "best_of_papers_and_stock")
        lines.append(
            f"| {case.name} | {row['makespan_ms']:.5g} | {row['idle']:.1%} | "
            f"{row['bound_ms']:.5g} | {row['gap']:.1%} | "
            f"{row['method']} | {reached} | {others} | {independent} | "
            f"{times(row)} | {row.get('commit', 'a40807b8 or earlier')} |"
        )
    return "\n".join([*lines, "", *summary(results)]) + "\n"


def shown(row: dict[str, object], which: str) -> str:
    """Return name, ms and idle share of a baseline; "" where there is none, or the run did not keep it."""
    if not row.get(f"{which}_ms"):
        return ""
    mark = " (c)" if METHODS[str(row[which])].kind == "composition" else ""
    mark += " (w)" if row.get(f"{which}_waits") else ""
    return f"{row[which]}{mark} {row[f'{which}_ms']:.4g} ({row[f'{which}_idle']:.1%})"


def times(row: dict[str, object]) -> str:
    """Return the limit, and what the clock said."""
    if not row.get("by_clock", True):
        return f"{row['time_limit_s']:g} | | | "
    times = f"{row['first_s']:.1f} | {row['within_1_percent_s']:.1f} | {row['wall_s']:.0f}"
    return f"{row['time_limit_s']:g} (clock) | {times}"


def reference(case: Case) -> float | None:
    """Return the independent simulator's best makespan in ms, where there is one."""
    known = REFERENCE.get(REFERENCE_NAMES.get(case.costs, ""), {}).get((case.devices, case.microbatches))
    return known[CAPS.index(case.cap)] if known else None


def summary(results: dict[str, dict[str, object]]) -> list[str]:
    """Return geometric means over the cells that were run, and the cells in which a baseline is better.

    An idle share is compared with that of the better baseline, this run's or the independent one, and with that of the
    best of papers and frameworks; ratios of less than a thousandth count as one.
    """
    done = [(case, results[case.name]) for case in cases() if case.name in results]
    groups = {
        "cap <= P/2": [(c, r) for c, r in done if c.cap <= 0.5 and c.costs in REFERENCE_NAMES],
        "cap <= P/8": [(c, r) for c, r in done if c.cap <= 0.125 and c.costs in REFERENCE_NAMES],
        "loss head, baselines on our cuts": [(c, r) for c, r in done if c.costs == "6.2B-head"],
    }
    lines = [
        "Geometric means of our idle share over that of the best of all baselines, our compositions among them, and",
        "over that of the best that papers publish or frameworks run, each with what the bound allows:",
        "",
    ]
    for name, cells in groups.items():
        of_all = [(row, idle_of_best(case, row)) for case, row in cells]
        published = [(row, row.get("best_of_papers_and_stock_idle")) for _, row in cells]
        found = [compared(pairs) for pairs in (of_all, published) if any(best for _, best in pairs)]
        if found:
            lines.append(f"- {name}: {'; of papers and frameworks '.join(found)}")
        if any(row.get("best_published_waits") and "best_as_defined_ms" in row for _, row in cells):
            defined = compared([(row, idle_of_best(case, row, "best_as_defined")) for case, row in cells])
            lines.append(f"- {name}, of all baselines that fit as they are defined, without (w): {defined}")
    heads = [(r, r["on_equal_cuts_ms"]) for _, r in done if r.get("on_equal_cuts_ms")]
    if heads:
        ours = mean([row["idle"] / (1 - ideal(row) / best) for row, best in heads])
        least = mean([(1 - ideal(row) / row["bound_ms"]) / (1 - ideal(row) / best) for row, best in heads])
        shares = [1 - ideal(row) / best for row, best in heads]
        lines.append(
            f"- loss head, baselines on equal cuts (idle {min(shares):.0%} to {max(shares):.0%}): "
            f"{ours:.2f}, not below {least:.2f} ({len(heads)} cells)"
        )
    for name, cells in (("all cells", done), ("cap >= P", [(c, r) for c, r in done if c.cap >= 1])):
        ratios = [row["makespan_ms"] / row["bound_ms"] for _, row in cells]
        if ratios:
            lines.append(f"- gap to the bound, {name}: {1 - 1 / mean(ratios):.2%} ({len(ratios)} cells)")
    worse = [
        case.name
        for case, row in done
        if row["makespan_ms"] > 1.0005 * min(filter(None, (reference(case), row["best_published_ms"])), default=1e99)
    ]
    judged = sorted({str(row.get("baselines_commit", "a commit before they were kept")) for _, row in done})
    lines += ["", f"Baselines were judged at {', '.join(judged)}."]
    return [*lines, "", f"A baseline is better in: {', '.join(worse) or 'no cell'}."]


def compared(pairs: list[tuple[dict[str, object], float | None]]) -> str:
    """Return the mean share of rows in the idle shares that stand beside them, and of what their bounds leave idle."""
    ours = [row["idle"] / best for row, best in pairs if best]
    least = [(1 - ideal(row) / row["bound_ms"]) / best for row, best in pairs if best]
    return f"{mean(ours):.3f}, not below {mean(least):.3f} ({len(ours)} cells)"


def idle_of_best(case: Case, row: dict[str, object], which: str = "best_published") -> float | None:
    """Return the idle share of the best baseline."""
    of_row = row.get(f"{which}_ms", row["best_published_ms"])
    best = min(filter(None, (reference(case), of_row)), default=None)
    return None if best is None else 1 - ideal(row) / best


def ideal(row: dict[str, object]) -> float:
    """Return the makespan in ms of devices that never idle."""
    return row["makespan_ms"] * (1 - row["idle"])


def mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(math.log(max(1e-3, ratio)) for ratio in ratios) / len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="*", help="names to run, with * and ?")
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--clock", action="store_true", help="count seconds by the clock, and search on all cores")
    parser.add_argument("--again", action="store_true", help="measure cases that are in the file again")
    parser.add_argument("--baselines", action="store_true", help="judge the baselines of cases in the file again")
    parser.add_argument("-o", "--output", type=Path, default=Path("bench/results.json"))
    parser.add_argument("--report", type=Path, help="write the table of all results here and stop")
    arguments = parser.parse_args()
    results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    if arguments.report:
        arguments.report.write_text(report(results))
        return
    for case in cases():
        is_known = case.name in results
        if not fnmatch.fnmatch(case.name, arguments.cases):
            continue
        if arguments.baselines and is_known:
            results[case.name] |= baselines(case, ideal(results[case.name]))
            print(case.name, shown(results[case.name], "best_published"), flush=True)
        elif not arguments.baselines and (arguments.again or not is_known):
            results[case.name] = measure(case, arguments.time_limit, by_clock=arguments.clock)
            print(case.name, json.dumps(results[case.name]), flush=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
