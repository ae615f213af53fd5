"""Hold forecasts against runs: `python -m bench.forecast [--steps N] [--time-limit S] [-o docs/FORECAST.md]`.

For each model: measure it on this machine, plan it for two devices in all the memory that there is and in a third of
what that plan took for activations, and train it for some steps. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe_compiler.driver import Options, compile_schedule
from optpipe_compiler.presets.models import Architecture
from optpipe_compiler.profile import Model
from runtime_torch import run
from runtime_torch.measure import MeasureOptions, measure
from runtime_torch.text import default_path

if TYPE_CHECKING:
    from optpipe_compiler import ir
    from optpipe_compiler.profile import Profile

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


def row(name: str, cap: str, schedule: ir.Schedule, steps: int) -> str:
    """Train and return a line of the table."""
    report = run(schedule, steps=steps, data_paths=[default_path()])
    times = [step.makespan_ns / 1e6 for step in report.steps[1:]]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    forecast = schedule.forecast.makespan_ns / 1e6
    transfers = sum(len(device.d2h) for device in schedule.devices)
    used = max(rank.peak_activation_bytes / rank.promised_activation_bytes for rank in report.ranks)
    return (
        f"| {name} | {cap} | {transfers} | {forecast:.0f} | {middle:.0f} ({low:.0f} to {high:.0f}) | "
        f"{middle / forecast:.2f} | {used:.0%} |"
    )


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=13, help="of every run; the first is not counted")
    parser.add_argument("--time-limit", type=float, default=8.0, help="of every plan, in seconds")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    lines = [
        "# Plan against reality on CPUs",
        "",
        f"Written by `python -m bench.forecast`; {DEVICES} processes on {os.cpu_count()} cores, "
        f"Python {platform.python_version()}.",
        "Step times in ms: the median of the steps after the first, and its quartiles. `used` is the largest measured",
        "activation peak of a rank over its promise. On CPUs the lanes of a rank share its core, so offloads take",
        "time from compute, which no forecast counts; on GPUs they do not.",
        "",
        "| model | cap | offloads | forecast | measured | ratio | used |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, model in MODELS.items():
        profile = measure(MeasureOptions(devices=DEVICES, of=model), lambda what, part: None)
        for cap, schedule in plans(profile, options.time_limit):
            lines.append(row(name, cap, schedule, options.steps))
            print(lines[-1], file=sys.stderr)
    text = "\n".join(lines) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
