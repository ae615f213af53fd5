"""Plans that improve while training runs, and plans for noisy ops: `python -m bench.replan [-o docs/REPLAN.md]`.

A small GPT is measured on this machine and trained by two processes, from gpipe and from a plan for costs that are
wrong by up to 30%, while the planner searches beside. Plans are held against each other by one set of costs, what the
run measured; times are held against times of the same run. What shares the machine meanwhile makes steps longer, and is
stated as the system's load. The page is written anew after each row.

`--only` measures some of its parts, `--row` some of the rows on training, such as `--row "costs wrong by 30%, free"`;
what the page has of the others stays. Swaps by hand take half a minute on two free cores, steps beside the planner two
minutes, each row on training about two, plans for noise some minutes on one core, whatever else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bench.forecast import forecast_ns
from bench.planner import commit
from bench.report import machine, publish, state
from bench.swaps import BLOCK, BLOCKS, SWAPS, beside, stalls
from optpipe_compiler.compiler import Options, compile_schedule, spreads_of
from optpipe_compiler.costs.cuts import seen, told_apart
from optpipe_compiler.costs.from_run import Run, profile_from_run, read_run
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Quantity, value_of
from optpipe_compiler.documents.traces import About, RunStage
from optpipe_compiler.forecast.choice import Choice
from optpipe_compiler.forecast.executions import executed
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
CASES = ((4, 2.0), (4, 4.0), (8, 2.0), (8, 4.0))
"""Devices, and the cap of each in GB."""
FRESH, PARTS, FRESH_SEED = 32768, 32, 7
"""Executions that compare two plans; in so many parts, whose differences give the standard error; and their seed."""


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


HEADER = "# Plans that improve while training runs\n"
TITLES = {
    "stall": "Swaps by hand",
    "beside": "Steps beside a busy planner",
    "training": "Training with the planner beside",
    "noise": "Plans for noise",
}


class Page:
    """Parts in their order: those that a file has, and in the place of some of them those that are measured now."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
        found = dict(part.split("\n", 1) for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:])
        self._parts = {part: found[title] for part, title in TITLES.items() if title in found}

    def begin(self, part: str, head: str) -> None:
        """Write a part anew; its first rows follow."""
        self._parts[part] = f"\n{head.strip()}\n"

    def add(self, part: str, row: str) -> None:
        """Add a row to a part, write the page anew, and show the row."""
        self._parts[part] += f"{row}\n"
        print(row, file=sys.stderr, flush=True)
        if self._path is not None:
            self.publish()

    def rows(self, part: str) -> list[str]:
        """Return the rows of a part's table."""
        return re.findall(r"^\| .*", self._parts.get(part, ""), flags=re.MULTILINE)[1:]

    def has(self, part: str, text: str) -> bool:
        """Whether a part says this."""
        return text in self._parts.get(part, "")

    def publish(self) -> None:
        """Write the page, or print it."""
        parts = [
            f"\n## {title}\n{self._parts[part].rstrip()}\n" for part, title in TITLES.items() if part in self._parts
        ]
        publish(HEADER + "".join(parts), self._path)


def measured_by(part: str, options: argparse.Namespace, *names: str) -> str:
    """Return the sentence that says how a part was measured."""
    words = [f"--{name.replace('_', '-')} {getattr(options, name):g}" for name in names]
    return f"Measured by `{' '.join(['python -m bench.replan --only', part, *words])}`"


def on_this_machine() -> str:
    """Return what was measured, and on what."""
    return f"{state()}; {DEVICES} processes on {machine()}."


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


def measured(trained: Trained, profile: Profile) -> Profile:
    """Return the profile with what the run's steps tell of layers and devices, under all cuts that ran.

    What stages took says nothing of the shares of their layers, so the profile is what the machine was measured to
    take, not what training began with.
    """
    trace = json.loads(trained.trace)
    trace["otherData"].pop("first_step", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        path.write_text(json.dumps(trace))
        whole = read_run(path)
    begins = [0, *(swap.step for swap in trained.report.swaps), len(trained.report.steps)]
    runs = []
    for schedule, (begin, end) in zip(trained.schedules, pairwise(begins), strict=True):
        if ops := [op for op in whole.ops if begin < op.step < end]:
            stages = [RunStage(one.stage, one.device, one.layers, one.selective_layers) for one in schedule.stages]
            runs.append(Run(whole.name, About(profile.digest(), True, 1.0, stages), ops))
    base = told_apart(profile, [seen(profile, run) for run in runs])
    last = replace(runs[-1], about=msgspec.structs.replace(runs[-1].about, profile_digest=base.digest()))
    return profile_from_run(base, "the profile", last).profile


def adds_in_order(schedule: ir.Schedule) -> bool:
    """Return whether each stage adds up the weight gradients of its microbatches in their order.

    A microbatch's own gradient is the same bit by bit whether its backward is in one piece or in two
    (tests/test_runtime_execution.py); a sum depends on the order.
    """
    found: dict[int, list[int]] = {stage.stage: [] for stage in schedule.stages}
    for op in (op for device in schedule.devices for op in device.compute):
        if isinstance(op, ir.Backward | ir.BackwardWeight):
            found[op.stage].append(op.microbatch)
    return all(order == sorted(order) for order in found.values())


def story(
    name: str, first: ir.Schedule, begin: Profile, profile: Profile, options: argparse.Namespace, *, keeps: bool
) -> str:
    """Train from a schedule and the profile that it was planned with; return a row of the table.

    `profile` is what the machine was measured to take.
    """
    load = os.getloadavg()[0]
    trained = train(first, begin, options.steps, keeps=keeps, plan_s=options.plan_s)
    plain = run(first, steps=options.steps, data_paths=[default_path()])
    assert plain is not None
    swaps, ran = trained.report.swaps, trained.schedules
    costs = measured(trained, profile)
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
    losses = f"{off:.0e}" if off else "equal"
    if not all(map(adds_in_order, ran)):
        losses += ", other order"
    return (
        f"{row_key(name, keeps=keeps)}{len(swaps)} | {sum(swap.undoes for swap in swaps)} | {step} | "
        f"{values[0]:.3f} | {values[-1]:.3f} | {statistics.median(after or spans) / statistics.median(before):.2f} | "
        f"{stood:.2f} | {losses} | {load:.1f} | {commit()} |"
    )


def row_key(name: str, *, keeps: bool) -> str:
    """Return how a row begins."""
    return f"| {name} | {'kept' if keeps else 'free'} | "


TRAINING = """
A GPT of 6 blocks of 128 trains, the planner beside it; `load` is the system's when a run began (2 ranks and the planner
want 3 cores). Where the placement is `kept`, only orders are swapped. `undone`: of the swaps, those that went back,
because steps were longer. `first`, `last`: the schedules that training began and ended with, against the best plan that
was found offline for the same costs: those that were measured before the run, corrected by what its steps tell of
layers and devices. `within 2%`: the step from which on that was so. `step`: the median measured step after the last
swap against that before the first, in one run. `stood`: the longest that training stood still for a swap, in steps.
`losses`: equal bit by bit to a run without swaps, or the largest relative difference.
Each microbatch's gradient is the same bit by bit, in one piece or in two; a plan that mixes both on a stage may add
those of several microbatches up in another order than theirs, which is said.

| from | placement | swaps | undone | within 2% | first | last | step | stood | losses | load | commit |
|---|---|---|---|---|---|---|---|---|---|---|---|"""
STARTS = ("gpipe", "costs wrong by 30%")
ROWS = {f"{name}, {'kept' if keeps else 'free'}": (name, keeps) for keeps in (True, False) for name in STARTS}


def training(page: Page, profile: Profile, options: argparse.Namespace) -> None:
    """Add the part of the page on training: the rows that are asked for, and those that the page has from before."""
    how = f"{measured_by('training', options, 'steps', 'plan_s', 'offline_s', 'samples')};"
    before = page.rows("training") if page.has("training", how) else []
    page.begin("training", f"{how} {DEVICES} processes on {machine()}.\n{TRAINING}")
    settings = Options(mem_bytes=ROOMY, microbatches=MICROBATCHES, time_limit_s=options.offline_s)
    for row, (name, keeps) in ROWS.items():
        if options.row is None or row in options.row:
            costs = profile if name == "gpipe" else wrong(profile)
            first = gpipe(profile) if name == "gpipe" else compile_schedule(costs, settings).schedule
            page.add("training", story(name, first, costs, profile, options, keeps=keeps))
        else:
            for known in before:
                if known.startswith(row_key(name, keeps=keeps)):
                    page.add("training", known)


def gpipe(profile: Profile) -> ir.Schedule:
    """Return the schedule that leaves most to gain."""
    return compile_schedule(profile, Options(mem_bytes=ROOMY, microbatches=MICROBATCHES, method="gpipe")).schedule


# -- what swaps and the planner cost


STALL = f"""
`Runner.replace` there and back, {SWAPS} times: how long training stood still, and what the next step took longer, in
steps.

| swap | layers moved | MB moved | median | worst |
|---|---|---|---|---|"""


def stall(page: Page, profile: Profile, options: argparse.Namespace) -> None:
    """Add the part of the page on the cost of swaps."""
    first = gpipe(profile)
    settings = Options(mem_bytes=ROOMY, microbatches=MICROBATCHES)
    others = {
        "same placement": replace(settings, method="zb-h1"),
        "some layers": replace(settings, method="interleaved-1f1b", stages_per_device=2, placement="loop"),
    }
    plans = [compile_schedule(profile, one).schedule for one in others.values()]
    page.begin("stall", f"{measured_by('stall', options, 'samples')}: {on_this_machine()}\n{STALL}")
    for name, found in zip(others, stalls(first, plans), strict=True):
        moved = f"{found.moved_layers} | {found.moved_bytes / 1e6:.1f}"
        page.add("stall", f"| {name} | {moved} | {found.median:.2f} | {found.worst:.2f} |")


def busy(page: Page, profile: Profile, options: argparse.Namespace) -> None:
    """Add the part of the page on steps beside a busy planner."""
    page.begin("beside", f"{measured_by('beside', options, 'samples')}: {on_this_machine()}\n")
    try:
        found = beside(gpipe(profile), canonical(profile))
    except RuntimeError as error:  # such as a planner that no core is free for
        page.add("beside", f"\nNot measured: {error}.")
        return
    page.add(
        "beside",
        f"""
Both ranks on one core, the planner on any other; {BLOCK} steps with it busy and {BLOCK} with it at rest, {BLOCKS} times
in turns. A step takes {found.ratio:.3f} of the time while it is busy (medians of {found.busy_steps} and
{found.rest_steps} steps in one run; the target is 1.03).""",
    )


# -- noise


NOISE = f"""
The same on every machine. Every op of compute is noisy by itself (log-normal, standard deviation as given). Of the
`plans` of one reproducible search within 2% of the best forecast, `least` is the one with the least forecast, `chosen`
the one that `compile --noise` takes; times in ms. Both 95th percentiles are of {FRESH:,} executions with seeds that
chose neither, and with the same noise for both plans; their standard errors, and that of what is gained, in brackets.
Executions let one message of a pair of devices pass at a time, as channels do; forecasts do not count that.

| devices | cap | noise | plans | least | chosen | p95 of least | p95 of chosen | gained |
|---|---|---|---|---|---|---|---|---|"""


def noise(page: Page, options: argparse.Namespace) -> None:
    """Add rows of the chosen plan against the plan with the least forecast, by executions that chose neither."""
    page.begin("noise", f"{measured_by('noise', options, 'noise_s')}, commit {commit()}.\n{NOISE}")
    for devices, cap in CASES:
        profile = uniform_profile(
            UniformOptions(devices=devices, layers_per_device=4, activation_gb=1.0, d2h_ms=4.0, h2d_ms=4.0, p2p_ms=0.3)
        )
        asked = Options(
            mem_bytes=int(cap * 10**9), microbatches=4 * devices, time_limit_s=options.noise_s, reproducible=True
        )
        found = [one.schedule for one in compile_schedule(profile, replace(asked, noise=NOISES[0])).considered]
        for level in NOISES:
            choice = Choice()
            for one in found:
                choice.add(one, spreads_of(one, profile, level))
            least, chosen = found[0], found[choice.best()]
            taken = [executed(one, spreads_of(one, profile, level), FRESH, FRESH_SEED) for one in (least, chosen)]
            late = np.array([np.quantile(each.reshape(PARTS, -1), 0.95, axis=1) for each in taken])
            whole = [float(np.quantile(each, 0.95)) for each in taken]
            errors = late.std(axis=1, ddof=1) / PARTS**0.5 / whole
            gained = (1 - late[1] / late[0]).std(ddof=1) / PARTS**0.5
            forecasts = [one.forecast.makespan_ns / 1e6 for one in (least, chosen)]
            page.add(
                "noise",
                f"| {devices} | {cap:g} GB | {level:.0%} | {len(found)} | "
                f"{forecasts[0]:.2f} | {forecasts[1]:.2f} | {whole[0] / 1e6:.2f} ({errors[0]:.3%}) | "
                f"{whole[1] / 1e6:.2f} ({errors[1]:.3%}) | {1 - whole[1] / whole[0]:+.2%} ({gained:.3%}) |",
            )


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of every run")
    parser.add_argument("--plan-s", type=float, default=1.5, help="the first search's time limit")
    parser.add_argument("--offline-s", type=float, default=8.0, help="of the plan to reach")
    parser.add_argument("--noise-s", type=float, default=4.0, help="of every plan for noise")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument(
        "--only", action="append", choices=TITLES, help="may be given several times; default: all parts"
    )
    parser.add_argument("--row", action="append", choices=ROWS, help="of those on training; default: all")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    parts = options.only or TITLES
    page = Page(options.output)
    if set(parts) - {"noise"}:
        profile = measure(MeasureOptions(devices=DEVICES, of=model(), samples=options.samples), lambda what, part: None)
        if "stall" in parts:
            stall(page, profile, options)
        if "beside" in parts:
            busy(page, profile, options)
        if "training" in parts:
            training(page, profile, options)
    if "noise" in parts:
        noise(page, options)
    if options.output is None:
        page.publish()


if __name__ == "__main__":
    main()
