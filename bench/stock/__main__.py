"""Plans against what users pick today: `python -m bench.stock [--devices N] [-o docs/STOCK.md]`.

On the model of llama.py, in the same processes: torch's 1F1B, interleaved zero bubble and ZBV, each plain, with every
block checkpointed, with saved tensors on the host; then plans under the peak that each of them reaches, and under parts
of 1F1B's. Peaks are the allocator's, steps are taken in turns, gradients are held against the model without a pipeline.
With more devices than cores or GPUs, the same orders are rehearsed: ops wait for their forecast times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from bench.stock import llama
from bench.stock.crew import Crew, FailedWayError, Spec
from bench.stock.page import INTRO, page
from bench.stock.ways import SCHEDULES, TREATMENTS, Setting
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import Model, value_of
from optpipe_compiler.errors import Infeasible, NotFound
from optpipe_compiler.model.placement import layout
from optpipe_torch.launch.rehearsal import STEP_S, auto_scale
from optpipe_torch.profiler.measure import MeasureOptions, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.model.placement import Layout

ORDERS = {"1F1B": "1f1b", "interleaved ZB": "interleaved-zb", "ZBV": "zbv"}
PARTS = (2, 4, 8)
"""Parts of 1F1B's activations that are planned for, too."""
PLENTY = 10**15


@dataclass
class Choice:
    """A way with all that was found of it."""

    name: str
    treatment: str = ""
    """Of a stock schedule; empty: a plan."""
    spec: Spec | None = None
    peak_bytes: int | None = None
    """Of the fullest device: weights, gradients, optimizer state and all that the step holds besides."""
    cap_bytes: int | None = None
    """Of a plan."""
    error: float | None = None
    failure: str = ""
    checked: ir.Checked | None = None
    """Of a plan."""
    method: str = ""
    forecast_s: float | None = None
    """Of a plan, and of what is rehearsed, at its scale."""
    samples: list[float] = field(default_factory=list)
    """Seconds of each round's step."""

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.samples)


@dataclass
class Found:
    """All that the page shows."""

    setting: Setting
    what: str
    stock: list[Choice]
    plans: list[Choice]
    activations: int
    """Of plain 1F1B's fullest device, in bytes."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--microbatches", type=int, help="default: 4 per device")
    parser.add_argument("--blocks", type=int, default=4, help="per device")
    parser.add_argument(
        "--granularity", choices=("block", "half"), default="half", help="what plans move; rehearsals take blocks"
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=688)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPUs, bfloat16 on GPUs")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no round begins")
    parser.add_argument("--samples", type=int, default=40, help="of every time in the profile")
    parser.add_argument("--plan-s", type=float, default=20.0, help="seconds for each plan")
    parser.add_argument(
        "--step-s",
        type=float,
        default=STEP_S,
        help="seconds that plain 1F1B's step takes where it is rehearsed: the longer, the less counts what the "
        "processes themselves need of the few cores",
    )
    parser.add_argument("--profile", type=Path, help="a profile of this model that was measured before, or is kept")
    parser.add_argument("-o", "--output", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and print or write the page."""
    chosen = options()
    found = compare(chosen)
    text = page(found, _command(), _commit())
    print(text)
    if chosen.output is not None:
        _put(text, chosen.output)


def compare(options: argparse.Namespace) -> Found:
    """Measure the profile, the stock choices' peaks, plan under them, and time all; Ctrl-C ends the rounds."""
    begin = time.monotonic()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpus, cores = gpus >= options.devices, len(os.sched_getaffinity(0))
    dtype = options.dtype or ("bfloat16" if on_gpus else "float32")
    rehearsed = not on_gpus and options.devices > cores
    config = {
        "blocks": options.blocks * options.devices,
        "hidden": options.hidden,
        "ffn": options.ffn,
        "heads": options.hidden // 64,
        "vocab": options.vocab,
        "sequence": options.sequence,
        "dtype": dtype,
        "granularity": "block" if rehearsed else options.granularity,
    }
    setting = Setting(
        rank=0,
        devices=options.devices,
        microbatches=options.microbatches or 4 * options.devices,
        device=torch.device("cuda" if on_gpus else "cpu"),
        microbatch_size=options.microbatch_size,
        config=config,
    )
    profile = _profile(options.profile, setting, options.samples)
    with Crew(setting) as crew:
        if rehearsed:
            found = _rehearsed(crew, setting, profile, options.plan_s, options.step_s)
        else:
            found = _computed(crew, setting, profile, options.plan_s)
        chosen = [one for one in (*found.stock, *found.plans) if one.spec is not None and not one.failure]
        _say(f"{len(chosen)} ways in turns, {options.rounds} rounds")
        rounds: list[list[float]] = []
        with suppress(KeyboardInterrupt):
            for times in crew.time([one.spec for one in chosen if one.spec is not None], options.rounds):
                rounds.append(times)
                _say(f"round {len(rounds)}: {sum(times):.1f} s")
                if time.monotonic() - begin > options.budget:
                    break
        if not rounds:
            sys.exit("no round of steps was taken")
    for one, samples in zip(chosen, zip(*rounds, strict=True), strict=True):
        one.samples = list(samples)
    return found


def _profile(path: Path | None, setting: Setting, samples: int) -> Profile:
    """Return the costs of the model on these devices; measured where no file has them, and kept there."""
    from optpipe_compiler.documents import profile as documents
    from optpipe_compiler.documents.files import canonical

    model = Model(
        builder="bench.stock.llama:layers",
        config=dict(setting.config),
        microbatch_size=setting.microbatch_size,
        sequence_length=setting.config["sequence"],
        dtype={"float32": "fp32", "bfloat16": "bf16"}[setting.config["dtype"]],
    )
    if path is not None and path.exists():
        known = documents.load(path)
        return known if known.model == model else _grown(known, model, setting)
    _say("profile")
    measured = measure(
        MeasureOptions(devices=setting.devices, of=model, samples=samples, timeout_s=900), lambda *_: None
    )
    if path is not None:
        path.write_text(canonical(measured), encoding="utf-8")
    return measured


def _grown(known: Profile, model: Model, setting: Setting) -> Profile:
    """Return the profile of fewer devices for more: as many blocks each, links and messages as they were."""
    assert known.model is not None
    blocks = max(known.layers, key=lambda layer: layer.count)
    layers = [structs.replace(one, count=setting.config["blocks"]) if one is blocks else one for one in known.layers]
    everyone = list(range(setting.devices))
    links = [
        structs.replace(link, devices=None if link.devices is None else everyone) for link in known.machine.links[:1]
    ]
    p2p = [one for one in known.machine.p2p if one.devices is None]
    machine = structs.replace(known.machine, devices=setting.devices, links=links, p2p=p2p)
    return structs.replace(known, model=model, layers=layers, machine=machine)


# -- computed


def _computed(crew: Crew, setting: Setting, profile: Profile, seconds: float) -> Found:
    statics = [value_of(layer.static_bytes) for layer in profile.expanded_layers()]
    work = [value_of(layer.forward_ns) + layer.fused_ns for layer in profile.expanded_layers()]
    stock = []
    activations, held = 0, [0] * setting.devices
    for name, (placement, several, _) in SCHEDULES.items():
        placed = _cut_between_blocks(layout(placement, setting.devices, several, _of_blocks(work, setting)), setting)
        for treatment in TREATMENTS:
            one = Choice(name, treatment, Spec(f"{name} {treatment}", (name, treatment), placed))
            seen = _watch(crew, one, _static(statics, placed, setting.devices))
            if seen is not None and (name, treatment) == ("1F1B", "plain"):
                activations, held = max(seen), [*map(int.__add__, _static(statics, placed, setting.devices), seen)]
            stock.append(one)
    linear = layout("linear", setting.devices, 1, _of_blocks(work, setting))
    static = _static(statics, _cut_between_blocks(linear, setting), setting.devices)
    caps = {one.peak_bytes: f"as {one.name} {one.treatment}" for one in stock if one.peak_bytes is not None}
    for part in PARTS:
        rises = [total - fixed for total, fixed in zip(held, static, strict=True)]
        caps[max(fixed + rise // part for fixed, rise in zip(static, rises, strict=True))] = f"1/{part} of 1F1B"
    plans = []
    for cap, name in sorted(caps.items()):
        plan = Choice(name, cap_bytes=cap)
        plans.append(plan)
        _plan(plan, plans, profile, setting, seconds)
        if plan.spec is not None:
            placed_on = [stage.device for stage in ir.parse(plan.spec.schedule_text, name).stages]
            cuts = [stage.layers[0] for stage in ir.parse(plan.spec.schedule_text, name).stages]
            fixed = [0] * setting.devices
            for device, (begin, end) in zip(placed_on, pairwise([*cuts, len(statics)]), strict=True):
                fixed[device] += sum(statics[begin:end])
            _watch(crew, plan, fixed)
    on_gpus = setting.device.type == "cuda"
    where = torch.cuda.get_device_name(0) if on_gpus else "CPU cores, one thread each"
    size = f"hidden {setting.config['hidden']}, sequence {setting.config['sequence']}"
    what = f"{setting.devices} process{'es' * (setting.devices > 1)} on {where}; {size}"
    return Found(setting, what, stock, plans, activations)


def _of_blocks(work: Sequence[int], setting: Setting) -> list[int]:
    """Return the work of embedding, decoder layers and head."""
    within = llama.decoder_layers(**setting.config)
    return [work[0], *(sum(work[begin:end]) for begin, end in within), work[-1]]


def _cut_between_blocks(placed: Layout, setting: Setting) -> Layout:
    """Return a cut of embedding, decoder layers and head as one of the layers that plans move."""
    within = llama.decoder_layers(**setting.config)
    head = within[-1][1]
    begins = [0, *(begin for begin, _ in within), head, head + 1]
    return replace(placed, cuts=tuple(begins[cut] for cut in placed.cuts))


def _static(statics: Sequence[int], placed: Layout, devices: int) -> list[int]:
    """Return the bytes of weights, gradients and optimizer state by device."""
    held = [0] * devices
    for device, begin, end in placed.by_stage:
        held[device] += sum(statics[begin:end])
    return held


def _watch(crew: Crew, one: Choice, static: Sequence[int]) -> list[int] | None:
    """Fill in peak and error; return what each rank's step holds beside the static bytes."""
    assert one.spec is not None
    _say(f"memory of {one.spec.name}")
    try:
        seen = crew.watch(one.spec)
    except FailedWayError as failure:
        one.failure = str(failure)
        _say(f"  failed: {failure}")
        return None
    one.peak_bytes = max(fixed + rank.peak_bytes for fixed, rank in zip(static, seen, strict=True))
    one.error = max(rank.error for rank in seen)
    _say(f"  {one.peak_bytes / 1e6:.1f} MB, gradients differ by {one.error:.0e}")
    return [rank.peak_bytes for rank in seen]


def _plan(
    plan: Choice,
    plans: Sequence[Choice],
    profile: Profile,
    setting: Setting,
    seconds: float,
    scale: float | None = None,
) -> None:
    """Plan from the plan for less memory, which is one for more."""
    assert plan.cap_bytes is not None
    _say(f"plan {plan.name}")
    seeds = tuple(one.checked for one in plans if one.checked is not None)[-1:]
    mem_bytes = plan.cap_bytes + value_of(profile.machine.reserve_bytes)  # contexts of GPUs are in no way's peak
    options = Options(mem_bytes=mem_bytes, microbatches=setting.microbatches, time_limit_s=seconds, seeds=seeds)
    try:
        plan.checked = compile_schedule(profile, options).checked
    except (Infeasible, NotFound) as failure:
        plan.failure = str(failure)
        return
    schedule = plan.checked.schedule
    plan.method = schedule.forecast.method
    plan.forecast_s = schedule.forecast.makespan_ns * (scale or 1.0) / 1e9
    plan.spec = Spec(f"plan {plan.name}", schedule_text=ir.to_text(schedule), time_scale=scale)


# -- rehearsed


def _rehearsed(crew: Crew, setting: Setting, profile: Profile, seconds: float, step_s: float) -> Found:
    from bench.stock.orders import stock_order

    _say("orders")
    stock, scale = [], None
    for name, order in ORDERS.items():
        for treatment in TREATMENTS:
            one = Choice(name, treatment)
            stock.append(one)
            schedule = stock_order(profile, order, treatment, setting.microbatches)
            scale = scale or auto_scale(schedule, step_s)
            one.peak_bytes = max(device.peak_bytes for device in schedule.devices)
            one.forecast_s = schedule.forecast.makespan_ns * scale / 1e9
            one.spec = Spec(f"{name} {treatment}", schedule_text=ir.to_text(schedule), time_scale=scale)
    plain = ir.parse(stock[0].spec.schedule_text, "1F1B") if stock[0].spec is not None else None
    assert plain is not None
    static = [sum(s.static_bytes for s in plain.stages if s.device == d.device) for d in plain.devices]
    rises = [device.peak_bytes - fixed for device, fixed in zip(plain.devices, static, strict=True)]
    caps = {one.peak_bytes: f"as {one.name} {one.treatment}" for one in stock if one.peak_bytes is not None}
    for part in PARTS:
        caps[max(fixed + rise // part for fixed, rise in zip(static, rises, strict=True))] = f"1/{part} of 1F1B"
    plans = []
    for cap, name in sorted(caps.items()):
        plan = Choice(name, cap_bytes=cap)
        plans.append(plan)
        _plan(plan, plans, profile, setting, seconds, scale)
        if plan.spec is not None:
            plan.peak_bytes = max(d.peak_bytes for d in ir.parse(plan.spec.schedule_text, name).devices)
    return Found(setting, f"{setting.devices} processes that rehearse the costs", stock, plans, max(rises))


# -- the page


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _command() -> str:
    """Return the command without the files that it was given."""
    words = iter(sys.argv[1:])
    shown = []
    for word in words:
        if word in ("--profile", "-o", "--output"):
            next(words)
        else:
            shown.append(word)
    return " ".join(["python -m bench.stock", *shown])


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "no commit"


def _put(text: str, path: Path) -> None:
    """Replace the part of the page that the same command wrote, or add it."""
    known = (path.read_text(encoding="utf-8") if path.exists() else INTRO).split("\n## ")
    title = text.splitlines()[0].removeprefix("## ")
    parts: list[Any] = [part for part in known if part.splitlines()[:1] != [title]]
    path.write_text(
        "\n## ".join([*(part.rstrip() + "\n" for part in parts), text.removeprefix("## ")]), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
