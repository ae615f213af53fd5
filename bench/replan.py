"""Plans that improve while training runs, and plans for noisy ops: `python -m bench.replan [-o docs/REPLAN.md]`.

A small GPT is measured on this machine and trained by two processes, from gpipe and from a plan for costs that are
wrong by up to 30%, while the planner searches beside. Forecasts of different plans are held against each other by one
set of costs, the medians of the whole run; times are held against times of the same run. What shares the machine
meanwhile makes steps longer, and is stated as the system's load.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench.report import machine, publish
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.noise import KINDS
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Quantity, value_of
from optpipe_compiler.forecast.executions import quantiles
from optpipe_compiler.study.beside import executed_ns
from optpipe_compiler.verify import check
from optpipe_torch.launch.job import Replanning
from optpipe_torch.launch.run import run
from optpipe_torch.models.text import default_path
from optpipe_torch.profiler.measure import MeasureOptions, measure

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Cost, Model, Profile

DEVICES, MICROBATCHES = 2, 8
ROOMY = 10**12
NEAR = 0.02
WRONG = 0.3
NOISES = (0.05, 0.15, 0.3)


def model() -> Model:
    """Return a GPT small enough for many steps."""
    found = MeasureOptions().model()
    return msgspec.structs.replace(found, config={**found.config, "hidden": 128, "layers": 6}, sequence_length=64)


def wrong(profile: Profile, seed: int = 0) -> Profile:
    """Return the profile with every layer's times wrong by up to `WRONG`, each kind by itself."""
    draw = random.Random(seed)

    def off(cost: Cost | None) -> Cost | None:
        return (
            None
            if cost is None
            else Quantity(value=round(value_of(cost) * draw.uniform(1 - WRONG, 1 + WRONG)), source="manual")
        )

    names = ("forward_ns", "backward_input_ns", "backward_weight_ns", "backward_ns")
    layers = [
        msgspec.structs.replace(one, count=1, slices=None, **{name: off(getattr(one, name)) for name in names})
        for one in profile.expanded_layers()
    ]
    return msgspec.structs.replace(profile, layers=layers)


@dataclass(frozen=True)
class Trained:
    """One run with the planner beside it."""

    events: list[dict[str, Any]]
    report: Any
    trace: str

    def of(self, name: str) -> list[dict[str, Any]]:
        """The events of a name."""
        return [event for event in self.events if event["event"] == name]


def train(schedule: ir.Schedule, profile: Profile, steps: int, *, keeps: bool, plan_s: float) -> Trained:
    """Train with swaps."""
    events: list[dict[str, Any]] = []
    how = Replanning(canonical(profile), keeps, 0.005, plan_s)
    report = run(schedule, steps=steps, data_paths=[default_path()], on_event=events.append, trace=True, replanning=how)
    (trace,) = (event["text"] for event in events if event["event"] == "trace")
    return Trained(events, report, trace)


def medians(trace: str) -> dict[tuple[str, int], float]:
    """Return the median time of each kind of op and stage over the whole run."""
    taken: dict[tuple[str, int], list[float]] = {}
    for event in json.loads(trace)["traceEvents"]:
        if event["ph"] == "X" and "op" in event["args"] and event["args"]["step"]:
            taken.setdefault((event["cat"], event["args"]["stage"]), []).append(event["dur"] * 1000)
    return {place: statistics.median(times) for place, times in taken.items()}


def story(name: str, first: ir.Schedule, profile: Profile, options: argparse.Namespace, *, keeps: bool) -> list[str]:
    """Train from a schedule; return a row of the table, and one of swaps."""
    load = os.getloadavg()[0]
    trained = train(first, profile, options.steps, keeps=keeps, plan_s=options.plan_s)
    plain = run(first, steps=options.steps, data_paths=[default_path()])
    assert plain is not None
    swaps = trained.report.swaps
    found = [ir.parse(event["schedule_text"], "found") for event in trained.of("planned") if event["swaps"]]
    ran = [first, *found[: len(swaps)]]
    costs, last = medians(trained.trace), ran[-1]
    kept = check(last)
    settings = Options(
        mem_bytes=ROOMY,
        microbatches=MICROBATCHES,
        time_limit_s=options.offline_s,
        seeds=(kept,),
        keep=kept if keeps else None,
    )
    best = compile_schedule(retimed(profile, last, costs), settings).schedule
    values = [executed_ns(one, costs) for one in ran] if keeps else [one.forecast.makespan_ns for one in ran]
    target = executed_ns(best, costs) if keeps else best.forecast.makespan_ns
    within = next((n for n, value in enumerate(values) if value <= (1 + NEAR) * target), None)
    step = "-" if within is None else "0" if within == 0 else str(swaps[within - 1].step)
    spans = [record.makespan_ns for record in trained.report.steps]
    around = [
        (swap.swap_ns / statistics.median(spans[max(1, swap.step - 5) : swap.step + 5]), swap.moved_layers)
        for swap in swaps
    ]
    still = max((share for share, moved in around if not moved), default=None)
    moving = max((share for share, moved in around if moved), default=None)
    equal = trained.report.losses == plain.losses
    after = spans[swaps[-1].step + 1 :] if swaps else spans[1:]
    before = spans[1 : swaps[0].step] if swaps else spans[1:]
    row = (
        f"| {name} | {'kept' if keeps else 'free'} | {len(swaps)} | {step} | {values[0] / target:.3f} | "
        f"{values[-1] / target:.3f} | {statistics.median(after or spans) / statistics.median(before or spans):.2f} | "
        f"{share(still)} | {share(moving)} | {'equal' if equal else 'DIFFERENT'} | {load:.1f} |"
    )
    print(row, file=sys.stderr)
    return [row]


def retimed(profile: Profile, schedule: ir.Schedule, costs: dict[tuple[str, int], float]) -> Profile:
    """Return the profile with the measured medians of a schedule's stages shared by their layers."""
    layers = [msgspec.structs.replace(one, count=1, slices=None) for one in profile.expanded_layers()]
    for stage in schedule.stages:
        mine = range(*stage.layers)
        for kind, field in KINDS.items():
            if (kind, stage.stage) not in costs or field == "recompute_ns":
                continue
            total = sum(value_of(getattr(layers[n], field) or 0) for n in mine) or 1
            for n in mine:
                known = getattr(layers[n], field)
                if known is not None:
                    scaled = round(value_of(known) * costs[kind, stage.stage] / total)
                    layers[n] = msgspec.structs.replace(layers[n], **{field: scaled})
    machine = msgspec.structs.replace(profile.machine, op_overhead_ns=0)
    return msgspec.structs.replace(profile, layers=layers, machine=machine)


def share(value: float | None) -> str:
    """Show a share of a step."""
    return "-" if value is None else f"{value:.2f}"


def beside(profile: Profile, options: argparse.Namespace) -> tuple[float, int, int]:
    """Return how much longer steps take while the planner is busy, on one device, so that one of two cores is free."""
    alone = msgspec.structs.replace(profile, machine=msgspec.structs.replace(profile.machine, devices=1))
    schedule = compile_schedule(alone, Options(mem_bytes=ROOMY, microbatches=MICROBATCHES, method="gpipe")).schedule
    trained = train(schedule, alone, options.steps, keeps=True, plan_s=options.plan_s)
    busy: set[int] = set()
    begun = None
    for event in trained.events:
        if event["event"] == "measured":
            begun = event["step"]
        elif event["event"] in ("planned", "planner") and begun is not None:
            busy |= set(range(begun + 1, event["step"]))
            begun = None
    spans = {n: record.makespan_ns for n, record in enumerate(trained.report.steps) if n > 5}
    during = [span for n, span in spans.items() if n in busy]
    without = [span for n, span in spans.items() if n not in busy]
    if not during or not without:
        return float("nan"), len(during), len(without)
    return statistics.median(during) / statistics.median(without), len(during), len(without)


def noise(seconds: float) -> list[str]:
    """Return rows of the chosen plan against the plan with the least forecast, by executions that chose neither."""
    rows = []
    for devices, cap in ((4, 2.0), (4, 4.0), (8, 4.0)):
        profile = uniform_profile(
            UniformOptions(devices=devices, layers_per_device=4, activation_gb=1.0, d2h_ms=4.0, h2d_ms=4.0, p2p_ms=0.3)
        )
        options = Options(mem_bytes=int(cap * 10**9), microbatches=4 * devices, time_limit_s=seconds, reproducible=True)
        for level in NOISES:
            result = compile_schedule(profile, replace(options, noise=level))
            least, chosen = result.considered[0].schedule, result.schedule
            fresh = []
            for schedule in (least, chosen):
                spreads = {(kind, stage.stage): level for kind in KINDS for stage in schedule.stages}
                fresh.append(quantiles(schedule, spreads, count=2000, seed=7).p95_ns)
            rows.append(
                f"| {devices} | {cap:g} GB | {level:.0%} | {len(result.considered)} | "
                f"{least.forecast.makespan_ns / 1e6:.1f} | "
                f"{chosen.forecast.makespan_ns / 1e6:.1f} | {fresh[0] / 1e6:.1f} | {fresh[1] / 1e6:.1f} | "
                f"{1 - fresh[1] / fresh[0]:+.2%} |"
            )
            print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of every run")
    parser.add_argument("--plan-s", type=float, default=5.0, help="the first search's time limit")
    parser.add_argument("--offline-s", type=float, default=20.0, help="of the plan to reach")
    parser.add_argument("--noise-s", type=float, default=8.0, help="of every plan for noise")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--only", choices=("training", "noise"), help="default: both")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    lines = ["# Plans that improve while training runs"]
    if options.only != "noise":
        lines += training(options)
    if options.only != "training":
        lines += for_noise(noise(options.noise_s), options)
    publish("\n".join(lines) + "\n", options.output)


def training(options: argparse.Namespace) -> list[str]:
    """Return the part of the page on training."""
    profile = measure(MeasureOptions(devices=DEVICES, of=model(), samples=options.samples), lambda what, part: None)
    settings = Options(mem_bytes=ROOMY, microbatches=MICROBATCHES, time_limit_s=5.0)
    gpipe = compile_schedule(profile, replace(settings, method="gpipe")).schedule
    off = wrong(profile)
    misled = compile_schedule(off, settings).schedule
    table = []
    for keeps in (True, False):  # what takes ranks of their own first, the planner alone last
        table += story("gpipe", gpipe, profile, options, keeps=keeps)
        table += story("costs wrong by 30%", misled, off, options, keeps=keeps)
    ratio, during, without = beside(profile, options)
    print(f"beside the planner: {ratio:.3f} ({during}, {without} steps)", file=sys.stderr)
    return trained_page(table, (ratio, during, without), options)


def command(options: argparse.Namespace) -> str:
    """Return how the page is written again."""
    given = {name: getattr(options, name) for name in ("steps", "plan_s", "offline_s", "noise_s", "samples")}
    words = [f"--{name.replace('_', '-')} {value:g}" for name, value in given.items()]
    return f"python -m bench.replan {' '.join(words)}"


def trained_page(table: list[str], slower: tuple[float, int, int], options: argparse.Namespace) -> list[str]:
    """Return the lines of the training part."""
    return [
        "",
        f"Written by `{command(options)}`;",
        f"{DEVICES} processes on {machine()}. A GPT of 6 blocks of 128 trains for {options.steps} steps, the planner",
        "beside it; `load` is the system's when the run began (2 ranks and the planner want 3 cores). Where",
        "the placement is `kept`, only orders are swapped. `first`, `last`: the schedules that training began",
        f"and ended with, against the best plan that {options.offline_s:g} s offline found for the same costs,",
        "the medians of the run (where layers may move: each plan's own forecast). `within 2%`: the step from",
        "which on that was so. `step`: the median measured step after the last swap against that before",
        "the first, in one run. `stall`: the longest swap, as a share of the steps around it, with the same",
        "placement, and with layers moved. `losses`: against a run without swaps, bit by bit.",
        "",
        "| from | placement | swaps | within 2% | first | last | step | stall, kept | stall, moved | losses | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *table,
        "",
        f"With one rank, so that a core may be free: steps take {slower[0]:.3f} of the time while the planner is busy",
        f"({slower[1]} steps) as while it is not ({slower[2]} steps), in the same run.",
        "",
    ]


def for_noise(rows: list[str], options: argparse.Namespace) -> list[str]:
    """Return the lines of the part on noise."""
    return [
        "",
        "## Plans for noise",
        "",
        f"Written by `python -m bench.replan --only noise --noise-s {options.noise_s:g}`, the same on every machine.",
        "Every op of compute is noisy by itself (log-normal, standard deviation as given). Of the `plans` of",
        "one reproducible search within 2% of the best forecast, `least` is the one with the least forecast,",
        "`chosen` the one of least 95th percentile; both 95th percentiles are of 2,000 executions with a seed",
        "that chose neither. Times in ms.",
        "",
        "| devices | cap | noise | plans | least | chosen | p95 of least | p95 of chosen | gained |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]


if __name__ == "__main__":
    main()
