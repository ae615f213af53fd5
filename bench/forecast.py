"""Hold forecasts against runs: `python -m bench.forecast [--rounds N] [--steps N] [-o docs/FORECAST.md]`.

The defaults take a quarter of an hour on 2 cores, `--rounds 2 --time-limit 4 --samples 20` about half of that; the page
is written anew after each row.

For each model: measure it on this machine, plan it for two devices in all the memory that there is and in a third of
what that plan took for activations, and train it for some steps. Then measure and train again, in turns: shared
machines change their pace by the minute, so a run is held against the costs measured just before and just after it.
Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import machine, publish, state
from optpipe_compiler.compiler import Options, compile_schedule, under_noise
from optpipe_compiler.costs.models import Architecture
from optpipe_compiler.costs.noise import noisy
from optpipe_compiler.documents.profile import Model
from optpipe_compiler.forecast.executions import durations
from optpipe_compiler.lower import Certificate, lower
from optpipe_compiler.machine.orders import retime
from optpipe_compiler.model.placement import Layout
from optpipe_compiler.model.problem import Caps, Freedom, build, messages_overhead_ns
from optpipe_compiler.model.schedule import Schedule
from optpipe_compiler.plan.instances import link_share
from optpipe_compiler.plan.seeds import times_of
from optpipe_compiler.view.measured import noise_lines
from optpipe_torch.launch.run import run
from optpipe_torch.models.text import default_path
from optpipe_torch.profiler.measure import MeasureOptions, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Profile

DEVICES, MICROBATCHES = 2, 8
ROOMY = 10**12
PASSES = ("forward", "backward", "backward_input")
"""Ops whose forecast has what their messages take from the compute lane; it is not in what a run measures of them."""


def transformer(**sizes: int | str) -> Model:
    """Return a model of a known architecture."""
    config = asdict(Architecture(**({"vocab": 512, "head_dim": 32} | sizes)))  # type: ignore[arg-type]
    return Model(builder="transformer", config=config, microbatch_size=4, sequence_length=128)


MODELS = {
    "GPT over bytes, 8 x 256": MeasureOptions().model(),
    "Llama, 6 x 256": transformer(kind="llama", layers=6, hidden=256, heads=8, kv_heads=2, ffn=688),
    "GPT-2, 4 x 384": transformer(kind="gpt2", layers=4, hidden=384, heads=12, kv_heads=12, ffn=1536, positions=128),
    "Mixtral, 4 x 256, 4 experts": transformer(
        kind="mixtral", layers=4, hidden=256, heads=8, kv_heads=4, ffn=512, experts=4, experts_per_token=2
    ),
}


def plans(profile: Profile, seconds: float) -> list[tuple[str, ir.Schedule]]:
    """Return a plan with room for everything, and one under a third of its activations."""
    found = []
    cap = ROOMY
    for name in ("roomy", "tight"):
        options = Options(mem_bytes=cap, microbatches=MICROBATCHES, time_limit_s=seconds)
        schedule = compile_schedule(profile, options).schedule
        found.append((name, schedule))
        static = max(stage_bytes(schedule))
        cap = static + (max(device.peak_bytes for device in schedule.devices) - static) // 3
    return found


def stage_bytes(schedule: ir.Schedule) -> list[int]:
    """Return what each device always holds."""
    return [
        sum(stage.static_bytes for stage in schedule.stages if stage.device == device.device)
        for device in schedule.devices
    ]


def forecast_ns(schedule: ir.Schedule, profile: Profile) -> int:
    """Return what a step of the schedule would take with the costs of another profile."""
    return priced(schedule, profile).forecast.makespan_ns


def priced(schedule: ir.Schedule, profile: Profile) -> ir.Schedule:
    """Return the schedule's order with the costs of another profile, as `compile` would write it."""
    cuts = (0, *(stage.layers[1] for stage in schedule.stages))
    selective = frozenset(layer for stage in schedule.stages for layer in stage.selective_layers)
    layout = Layout("", cuts, tuple(stage.device for stage in schedule.stages), selective)
    caps, microbatches = Caps(schedule.setup.cap_bytes, None), schedule.setup.microbatches
    problem = build(profile, layout, microbatches, caps, Freedom())
    if any(op.layers != schedule.stages[op.stage].layers for device in schedule.devices for op in device.d2h):
        problem = build(profile, layout, microbatches, caps, Freedom(), link_share(problem))
    timed = retime(Schedule(problem, schedule.forecast.method, times_of(schedule)[0]), problem)
    return lower(timed, profile, layout, caps, Certificate("makespan", "feasible", 0, "none", {}, {}))


def compute_ns(schedule: ir.Schedule, profile: Profile) -> int:
    """Return what the forecast has all ops of compute take together, without what their messages take besides."""
    device_of = [stage.device for stage in schedule.stages]
    more = [messages_overhead_ns(profile.machine, device_of, stage) for stage in range(len(device_of))]
    taken = durations(schedule)
    return sum(
        round(float(taken[op.id][0])) - (more[op.stage] if op.name in PASSES else 0)
        for device in schedule.devices
        for op in device.compute
        if op.id in taken
    )


@dataclass(frozen=True)
class Trained:
    """What steps took, in ns (the median, without the first); and how much of it all ranks spent in compute ops."""

    step_ns: float
    compute_ns: float
    used: float
    """The largest activation peak of a rank over its promise."""


def train(schedule: ir.Schedule, steps: int) -> Trained:
    """Train for some steps."""
    report = run(schedule, steps=steps, data_paths=[default_path()])
    assert report is not None
    used = max(rank.peak_activation_bytes / rank.promised_activation_bytes for rank in report.ranks)
    times = [time.measured_ns for kind, time in report.kinds.items() if kind not in ("offload", "reload")]
    return Trained(statistics.median(step.makespan_ns for step in report.timed_steps), sum(times), used)


def row(name: str, cap: str, schedule: ir.Schedule, rounds: list[Round]) -> str:
    """Return a line of the table."""
    ratios = [one.trained.step_ns / one.noisy_ns for one in rounds]
    quiet, ops = (
        statistics.median(ratio)
        for ratio in (
            [one.trained.step_ns / one.forecast_ns for one in rounds],
            [one.trained.compute_ns / one.compute_ns for one in rounds],
        )
    )
    transfers = sum(len(device.d2h) for device in schedule.devices)
    forecast, noisy, measured = (
        statistics.median(values) / 1e6
        for values in (
            [one.forecast_ns for one in rounds],
            [one.noisy_ns for one in rounds],
            [one.trained.step_ns for one in rounds],
        )
    )
    return (
        f"| {name} | {cap} | {transfers} | {forecast:.0f} | {noisy:.0f} | {measured:.0f} | {quiet:.2f} | "
        f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} | {ops:.2f} | "
        f"{max(one.trained.used for one in rounds):.0%} |"
    )


@dataclass(frozen=True)
class Round:
    """A run, and what was forecast for it: means of the forecasts with the costs before and after it, in ns."""

    trained: Trained
    forecast_ns: float
    noisy_ns: float
    """For half of the steps, with the noise of the measured costs."""
    compute_ns: float
    """For the compute ops of all ranks."""


def held(schedule: ir.Schedule, trained: Trained, profiles: Sequence[Profile]) -> Round:
    """Hold a run against the costs measured before and after it."""
    found = [priced(schedule, profile) for profile in profiles]
    noisy = [under_noise(one, profile) for one, profile in zip(found, profiles, strict=True)]
    quiet = [one.forecast.makespan_ns for one in found]
    half = [ns if one is None else one.p50_ns for ns, one in zip(quiet, noisy, strict=True)]
    return Round(trained, *map(statistics.mean, (quiet, half, map(compute_ns, found, profiles))))


def rounds_of(model: Model, options: argparse.Namespace) -> dict[str, tuple[ir.Schedule, list[Round]]]:
    """Plan once, then measure and train in turns; return the rounds of each plan by the name of its cap."""

    def measured() -> Profile:
        wanted = MeasureOptions(devices=DEVICES, of=model, samples=options.samples)
        profile = measure(wanted, lambda what, part: None)
        for line in noise_lines(noisy(profile)):
            print(line, file=sys.stderr)
        return profile

    before = measured()
    found: dict[str, tuple[ir.Schedule, list[Round]]] = {
        cap: (schedule, []) for cap, schedule in plans(before, options.time_limit)
    }
    for _ in range(options.rounds):
        runs = {cap: train(schedule, options.steps) for cap, (schedule, _) in found.items()}
        after = measured()
        for cap, (schedule, rounds) in found.items():
            rounds.append(held(schedule, runs[cap], (before, after)))
        before = after
    return found


HEADER = """
Medians of all rounds, times in ms. In a round a plan trains for some steps; its forecasts are means of what `compile`
prints for the plan's order with the costs measured just before and just after it: `forecast` without noise, `p50` for
half of the steps with the spread of the measured op times, which counts what ranks lose by waiting for each other.
`measured` is the median step, from the first start to the last end of an op on any rank; the batch, the optimizer and
what ranks agree on between steps are no part of it, and of no forecast. `to forecast` and `to p50`: the step of a round
over its own forecasts; `rounds`: the least and the most of the latter. `ops`: what all compute ops took over what was
forecast for them; where it is less than `to p50`, the rest is waiting. `used` is the largest measured activation peak
of a rank over its promise, by the store, which does not see transient bytes. On CPUs the lanes of a rank share its
core: what copies take from compute is in the forecasts, between ops, and in the run, within them.

| model | cap | offloads | forecast | p50 | measured | to forecast | to p50 | rounds | ops | used |
|---|---|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9, help="of every run; the first is not counted")
    parser.add_argument("--samples", type=int, default=30, help="of every time, each time that it is measured")
    parser.add_argument("--time-limit", type=float, default=8.0, help="of every plan, in seconds")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps is too few, expected at least 2: the first is not counted")
    words = f"--rounds {options.rounds} --steps {options.steps} --samples {options.samples}"
    lines = [
        "# Plan against reality on CPUs",
        "",
        f"Written by `python -m bench.forecast {words} --time-limit {options.time_limit:g}`:",
        f"{state()}; {DEVICES} processes on {machine()}.",
        *HEADER.splitlines(),
    ]
    for name in options.model or MODELS:
        for cap, (schedule, rounds) in rounds_of(MODELS[name], options).items():
            lines.append(row(name, cap, schedule, rounds))
            print(lines[-1], file=sys.stderr)
            if options.output is not None:
                publish("\n".join(lines) + "\n", options.output)
    if options.output is None:
        publish("\n".join(lines) + "\n", None)


if __name__ == "__main__":
    main()
