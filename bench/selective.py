"""What selective recompute is worth: `python -m bench.selective [--seconds N] [-o docs/SELECTIVE.md]`.

A Llama of 7 billion parameters, estimated on 8 GPUs, under caps that leave room for P/2, P/4 and P/8 activations of a
device's layers: planned with and without selective recompute, once with a host link and once without.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from bench.planner import commit
from bench.report import machine, publish
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs import gpus, models
from optpipe_compiler.documents.profile import Profile, value_of
from optpipe_compiler.errors import Infeasible, NotFound
from optpipe_compiler.model.placement import layout
from optpipe_compiler.model.problem import static_bytes
from optpipe_torch.estimates.estimate import EstimateOptions, estimate

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule

DEVICES, MICROBATCHES = 8, 32
PARTS = (2, 4, 8)

HEADER = """# Selective recompute as a plan's choice

Written by `python -m bench.selective --seconds {seconds:g}` at {commit}; {machine}.
{model} on {devices} x {gpu}, estimated, the head in {devices} parts, {microbatches} microbatches. A block saves
{saved:.0f} MB, with its norms and activation functions made again in the backward {light:.0f} MB ({less:.0%} less), for
{more:.1%} of its time. A cap leaves room for that part of P activations of the fullest device's layers beside what it
always holds; ms per step (idle share), planned
{seconds:g} s each (reproducibly: as much search, whatever else runs).

| cap | ways | without | with selective recompute | layers that have it | step is shorter by |
|---|---|---|---|---|---|
"""


def caps(profile: Profile) -> dict[str, int]:
    """Return the caps by name."""
    layers = profile.expanded_layers()
    even = layout("linear", DEVICES, 1, [value_of(layer.forward_ns) + layer.fused_ns for layer in layers])
    activation = max(
        sum(value_of(layer.saved_bytes) for layer in layers[even.cuts[device] : even.cuts[device + 1]])
        for device in range(DEVICES)
    )
    always = max(static_bytes(profile, even))
    return {f"P/{part}": always + DEVICES * activation // part for part in PARTS}


def planned(profile: Profile, cap: int, seconds: float, *, offload: bool) -> Schedule | None:
    """Return the plan; None where none fits or is found."""
    options = Options(
        mem_bytes=cap, microbatches=MICROBATCHES, offload=offload, time_limit_s=seconds, reproducible=True
    )
    try:
        return compile_schedule(profile, options).schedule
    except (Infeasible, NotFound):
        return None


def row(name: str, profile: Profile, cap: int, seconds: float, *, offload: bool) -> str:
    """Plan with and without, and compare."""
    layers = [structs.replace(layer, selective=None) for layer in profile.layers]
    without = planned(structs.replace(profile, layers=layers), cap, seconds, offload=offload)
    chosen = planned(profile, cap, seconds, offload=offload)
    count = 0 if chosen is None else sum(len(stage.selective_layers) for stage in chosen.stages)
    saved = ""
    if without is not None and chosen is not None:
        saved = f"{1 - chosen.forecast.makespan_ns / without.forecast.makespan_ns:.1%}"
    ways = "all" if offload else "no offload"
    return f"| {name} | {ways} | {_time(without)} | {_time(chosen)} | {count} | {saved} |"


def _time(schedule: Schedule | None) -> str:
    if schedule is None:
        return "none fits"
    return f"{schedule.forecast.makespan_ns / 1e6:,.1f} ({schedule.forecast.bubble_fraction:.1%})"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-7b")
    parser.add_argument("--gpu", default="h100-sxm")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each plan")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    gpu = gpus.load(options.gpu)
    model = replace(models.load(options.model), head_parts=DEVICES)
    profile = estimate(EstimateOptions(model=model, gpu=gpu, name=options.model, devices=DEVICES))
    block = max(profile.layers, key=lambda layer: layer.count)
    assert block.selective is not None
    saved, light = value_of(block.saved_bytes), value_of(block.selective.saved_bytes)
    rows = []
    for offload in (True, False):
        for name, cap in caps(profile).items():
            rows.append(row(name, profile, cap, options.seconds, offload=offload))
            print(rows[-1], flush=True)
    header = HEADER.format(
        seconds=options.seconds,
        commit=commit(),
        machine=machine(),
        model=options.model,
        devices=DEVICES,
        gpu=gpu.name,
        microbatches=MICROBATCHES,
        saved=saved / 1e6,
        light=light / 1e6,
        less=1 - light / saved,
        more=value_of(block.selective.recompute_ns) / (value_of(block.forward_ns) + block.fused_ns),
    )
    publish(header + "\n".join(rows) + "\n", options.output)


if __name__ == "__main__":
    main()
