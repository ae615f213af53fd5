"""Plans that improve while training runs, and plans for noisy ops: `python -m bench.replan [-o docs/REPLAN.md]`.

A small GPT is measured on this machine and trained by two processes, from gpipe and from a plan for costs that are
wrong by up to 30%, while the planner searches beside. Plans are held against each other by one set of costs, what the
run measured; times are held against times of the same run. What shares the machine meanwhile makes steps longer, and is
stated as the system's load. The page is written anew after each row; `--only` measures some of its parts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench.forecast import forecast_ns
from bench.report import machine, publish, state
from bench.swaps import BLOCK, BLOCKS, SWAPS, beside, stalls
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.from_run import profile_from_run, read_run
from optpipe_compiler.costs.noise import KINDS
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Quantity, value_of
from optpipe_compiler.forecast.executions import quantiles
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
THRESHOLD = 0.005
NOISES = (0.05, 0.15, 0.3)
PARTS = ("training", "stall", "beside", "noise")


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


class Page:
    """What has been measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        given = {name: getattr(options, name) for name in ("steps", "plan_s", "offline_s", "noise_s", "samples")}
        words = [f"--{name.replace('_', '-')} {value:g}" for name, value in given.items()]
        words += [f"--only {part}" for part in options.only or ()]
        self._path = options.output
        self._lines = [
            "# Plans that improve while training runs",
            "",
            f"Written by `python -m bench.replan {' '.join(words)}`:",
            f"{state()}; {DEVICES} processes on {machine()}.",
        ]

    def add(self, text: str) -> None:
        """Add lines to the page, write it anew, and show its rows."""
        lines = text.splitlines()
        self._lines += lines
        print(*(line for line in lines if line.startswith("|")), sep="\n", file=sys.stderr, flush=True)
        if self._path is not None:
            self.publish()

    def publish(self) -> None:
        """Write the page, or print it."""
        publish("\n".join(self._lines) + "\n", self._path)


# -- training


@dataclass(frozen=True)
class Trained:
    """One run with the planner beside it."""

    report: Any
    trace: str
    schedules: list[ir.Schedule]
    """In the order in which they ran."""


def train(first: ir.Schedule, profile: Profile, steps: int, *, keeps: bool, plan_s: float) -> Trained:
    """Train with swaps."""
    events: list[dict[str, Any]] = []
    how = Replanning(canonical(profile), keeps, THRESHOLD, plan_s)
    report = run(first, steps=steps, data_paths=[default_path()], on_event=events.append, trace=True, replanning=how)
    assert report is not None
    known = {first.digest: first}
    for event in events:
        if event["event"] == "planned":
            gain = 1 - event["forecast_after_ns"] / event["forecast_before_ns"]
            print(f"step {event['step']}: planned, {gain:+.1%}", file=sys.stderr)
            if event["swaps"]:
                found = ir.parse(event["schedule_text"], "found")
                known[found.digest] = found
    (trace,) = (event["text"] for event in events if event["event"] == "trace")
    return Trained(report, trace, [first, *(known[swap.digest] for swap in report.swaps)])


def measured(trained: Trained, profile: Profile, *, keeps: bool) -> Profile:
    """Return the profile with the times of the run: of all its steps where its stages stayed, else of the last ones."""
    trace = json.loads(trained.trace)
    if keeps:
        trace["otherData"].pop("first_step", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        path.write_text(json.dumps(trace))
        return profile_from_run(profile, "the profile", read_run(path)).profile


def story(name: str, first: ir.Schedule, profile: Profile, options: argparse.Namespace, *, keeps: bool) -> str:
    """Train from a schedule; return a row of the table."""
    load = os.getloadavg()[0]
    trained = train(first, profile, options.steps, keeps=keeps, plan_s=options.plan_s)
    plain = run(first, steps=options.steps, data_paths=[default_path()])
    assert plain is not None
    swaps, ran = trained.report.swaps, trained.schedules
    costs = measured(trained, profile, keeps=keeps)
    settings = Options(
        mem_bytes=ROOMY,
        microbatches=MICROBATCHES,
        time_limit_s=options.offline_s,
        seeds=tuple(check(one) for one in (ran[-1], first)),
        keep=check(first) if keeps else None,
    )
    target = forecast_ns(compile_schedule(costs, settings).schedule, costs)
    values = [forecast_ns(one, costs) / target for one in ran]
    far = [number for number, value in enumerate(values) if value > 1 + NEAR]
    reached = far[-1] + 1 if far else 0
    step = "-" if reached == len(ran) else "0" if not reached else str(swaps[reached - 1].step)
    spans = [record.makespan_ns for record in trained.report.steps]
    after = spans[swaps[-1].step + 1 :] if swaps else spans[1:]
    before = spans[1 : swaps[0].step] if swaps else spans[1:]
    stood = max((swap.swap_ns / swap.measured_before_ns for swap in swaps), default=0.0)
    off = max(abs(a / b - 1) for a, b in zip(trained.report.losses, plain.losses, strict=True))
    return (
        f"| {name} | {'kept' if keeps else 'free'} | {len(swaps)} | {sum(swap.undoes for swap in swaps)} | {step} | "
        f"{values[0]:.3f} | {values[-1]:.3f} | {statistics.median(after or spans) / statistics.median(before):.2f} | "
        f"{stood:.2f} | {f'{off:.0e}' if off else 'equal'} | {load:.1f} |"
    )


TRAINING = """
A GPT of 6 blocks of 128 trains, the planner beside it; `load` is the system's when a run began (2 ranks and the planner
want 3 cores). Where the placement is `kept`, only orders are swapped. `undone`: of the swaps, those that went back,
because steps were longer. `first`, `last`: the schedules that training began and ended with, against the best plan that
was found offline for the same costs, those of the run. `within 2%`: the step from which on that was so. `step`: the
median measured step after the last swap against that before the first, in one run. `stood`: the longest that training
stood still for a swap, in steps. `losses`: equal bit by bit to a run without swaps, or the largest relative difference:
plans that mix backwards in one piece and in two on one stage add weight gradients up in another order.

| from | placement | swaps | undone | within 2% | first | last | step | stood | losses | load |
|---|---|---|---|---|---|---|---|---|---|---|"""


def training(page: Page, profile: Profile, options: argparse.Namespace) -> None:
    """Add the part of the page on training."""
    page.add(TRAINING)
    settings = Options(mem_bytes=ROOMY, microbatches=MICROBATCHES, time_limit_s=options.offline_s)
    off = wrong(profile)
    starts = {"gpipe": (gpipe(profile), profile), "costs wrong by 30%": (compile_schedule(off, settings).schedule, off)}
    for keeps in (True, False):
        for name, (first, costs) in starts.items():
            page.add(story(name, first, costs, options, keeps=keeps))


def gpipe(profile: Profile) -> ir.Schedule:
    """Return the schedule that leaves most to gain."""
    return compile_schedule(profile, Options(mem_bytes=ROOMY, microbatches=MICROBATCHES, method="gpipe")).schedule


# -- what swaps and the planner cost


STALL = f"""
## Swaps by hand

`Runner.replace` there and back, {SWAPS} times: how long training stood still, and what the next step took longer, in
steps.

| swap | layers moved | MB moved | median | worst |
|---|---|---|---|---|"""


def stall(page: Page, profile: Profile) -> None:
    """Add the part of the page on the cost of swaps."""
    first = gpipe(profile)
    settings = Options(mem_bytes=ROOMY, microbatches=MICROBATCHES)
    others = {
        "same placement": replace(settings, method="zb-h1"),
        "some layers": replace(settings, method="interleaved-1f1b", stages_per_device=2, placement="loop"),
    }
    plans = [compile_schedule(profile, one).schedule for one in others.values()]
    page.add(STALL)
    for name, found in zip(others, stalls(first, plans), strict=True):
        moved = f"{found.moved_layers} | {found.moved_bytes / 1e6:.1f}"
        page.add(f"| {name} | {moved} | {found.median:.2f} | {found.worst:.2f} |")


def busy(page: Page, profile: Profile) -> None:
    """Add the part of the page on steps beside a busy planner."""
    try:
        found = beside(gpipe(profile), canonical(profile))
    except RuntimeError as error:  # such as a planner that no core is free for
        page.add(f"\n## Steps beside a busy planner\n\nNot measured: {error}.")
        return
    page.add(
        f"""
## Steps beside a busy planner

Both ranks on one core, the planner on any other; {BLOCK} steps with it busy and {BLOCK} with it at rest, {BLOCKS} times
in turns. A step takes {found.ratio:.3f} of the time while it is busy (medians of {found.busy_steps} and
{found.rest_steps} steps in one run; the target is 1.03)."""
    )


# -- noise


NOISE = """
## Plans for noise

The same on every machine. Every op of compute is noisy by itself (log-normal, standard deviation as given). Of the
`plans` of one reproducible search within 2% of the best forecast, `least` is the one with the least forecast, `chosen`
the one of least 95th percentile; both 95th percentiles are of 2,000 executions with a seed that chose neither. Times in
ms.

| devices | cap | noise | plans | least | chosen | p95 of least | p95 of chosen | gained |
|---|---|---|---|---|---|---|---|---|"""


def noise(page: Page, seconds: float) -> None:
    """Add rows of the chosen plan against the plan with the least forecast, by executions that chose neither."""
    page.add(NOISE)
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
            page.add(
                f"| {devices} | {cap:g} GB | {level:.0%} | {len(result.considered)} | "
                f"{least.forecast.makespan_ns / 1e6:.1f} | "
                f"{chosen.forecast.makespan_ns / 1e6:.1f} | {fresh[0] / 1e6:.1f} | {fresh[1] / 1e6:.1f} | "
                f"{1 - fresh[1] / fresh[0]:+.2%} |"
            )


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of every run")
    parser.add_argument("--plan-s", type=float, default=3.0, help="the first search's time limit")
    parser.add_argument("--offline-s", type=float, default=15.0, help="of the plan to reach")
    parser.add_argument("--noise-s", type=float, default=8.0, help="of every plan for noise")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--only", action="append", choices=PARTS, help="may be given several times; default: all parts")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    parts = options.only or PARTS
    page = Page(options)
    if set(parts) - {"noise"}:
        profile = measure(MeasureOptions(devices=DEVICES, of=model(), samples=options.samples), lambda what, part: None)
        if "stall" in parts:
            stall(page, profile)
        if "beside" in parts:
            busy(page, profile)
        if "training" in parts:
            training(page, profile, options)
    if "noise" in parts:
        noise(page, options.noise_s)
    if options.output is None:
        page.publish()


if __name__ == "__main__":
    main()
