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
from optpipe_compiler.compiler import Options, compile_schedule, link_share, under_noise
from optpipe_compiler.costs.models import Architecture
from optpipe_compiler.costs.noise import noisy
from optpipe_compiler.documents.profile import Model
from optpipe_compiler.lower.emit import lift
from optpipe_compiler.machine.orders import retime
from optpipe_compiler.model.placement import Layout
from optpipe_compiler.model.problem import Caps, Freedom, build
from optpipe_compiler.view.measured import noise_lines
from optpipe_torch.launch.run import run
from optpipe_torch.models.text import default_path
from optpipe_torch.profiler.measure import MeasureOptions, measure

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Profile

DEVICES, MICROBATCHES = 2, 8
ROOMY = 10**12


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
    cuts = (0, *(stage.layers[1] for stage in schedule.stages))
    selective = frozenset(layer for stage in schedule.stages for layer in stage.selective_layers)
    layout = Layout("", cuts, tuple(stage.device for stage in schedule.stages), selective)
    caps, microbatches = Caps(schedule.setup.cap_bytes, None), schedule.setup.microbatches
    problem = build(profile, layout, microbatches, caps, Freedom())
    if any(op.layers != schedule.stages[op.stage].layers for device in schedule.devices for op in device.d2h):
        problem = build(profile, layout, microbatches, caps, Freedom(), link_share(problem))
    return retime(lift(schedule, problem), problem).makespan


def train(schedule: ir.Schedule, steps: int) -> tuple[float, float]:
    """Return the median step in ns, and the largest activation peak of a rank over its promise."""
    report = run(schedule, steps=steps, data_paths=[default_path()])
    used = max(rank.peak_activation_bytes / rank.promised_activation_bytes for rank in report.ranks)
    return statistics.median(step.makespan_ns for step in report.steps[1:]), used


def row(name: str, cap: str, schedule: ir.Schedule, rounds: list[Round]) -> str:
    """Return a line of the table."""
    ratios = [one.measured_ns / one.forecast_ns for one in rounds]
    noisy = statistics.median(one.measured_ns / one.noisy_ns for one in rounds)
    transfers = sum(len(device.d2h) for device in schedule.devices)
    forecast = statistics.median(one.forecast_ns for one in rounds) / 1e6
    measured = statistics.median(one.measured_ns for one in rounds) / 1e6
    return (
        f"| {name} | {cap} | {transfers} | {forecast:.0f} | {measured:.0f} | {statistics.median(ratios):.2f} | "
        f"{noisy:.2f} | "
        f"{min(ratios):.2f} to {max(ratios):.2f} | {max(one.used for one in rounds):.0%} |"
    )


@dataclass(frozen=True)
class Round:
    """A run, and what was forecast for it."""

    measured_ns: float
    forecast_ns: float
    used: float
    noisy_ns: float
    """What was forecast for half of the steps, with the noise of the measured costs."""


def with_noise(schedule: ir.Schedule, profile: Profile) -> float:
    """Return by which factor the noise of a profile's ops makes half of the steps longer."""
    found = under_noise(schedule, profile)
    return 1.0 if found is None else found.p50_ns / schedule.forecast.makespan_ns


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
            forecast = (forecast_ns(schedule, before) + forecast_ns(schedule, after)) / 2
            factor = (with_noise(schedule, before) + with_noise(schedule, after)) / 2
            rounds.append(Round(runs[cap][0], forecast, runs[cap][1], forecast * factor))
        before = after
    return found


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
    lines = [
        "# Plan against reality on CPUs",
        "",
        f"Written by `python -m bench.forecast --rounds {options.rounds} --steps {options.steps} --samples "
        f"{options.samples} --time-limit {options.time_limit:g}`:",
        f"{state()}; {DEVICES} processes on {machine()}.",
        f"Medians of {options.rounds} rounds, step times in ms. A round trains for {options.steps - 1} steps; its",
        "forecast is the plan's order with the costs measured just before and just after it, `ratio` the median of",
        "what each round measured over its own forecast; `with noise`: over the forecast of half of the steps, with",
        "the spread of the measured op times (what ranks lose by waiting for each other). `used` is the largest",
        "measured activation peak of a rank over its promise, by the store, which does not see transient bytes. On",
        "CPUs the lanes of a rank share its core: forecasts count what offloads take from compute, as the profiles",
        "measure it (`compute_permille`).",
        "",
        "| model | cap | offloads | forecast | measured | ratio | with noise | of a round | used |",
        "|---|---|---|---|---|---|---|---|---|",
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
