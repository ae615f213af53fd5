"""What slices are worth in real runs: `python -m bench.sliced [--seconds N] [--rounds N] [-o docs/SLICES.md]`.

A small Llama of long sequences on 2 processes: profiled, planned whole and in slices under the same caps, and trained.
Runs take turns, and only ratios within a round are kept: what else the machine does then touches all of them. With
`-o` the section `## Measured` of the page is written anew.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.planner import commit
from bench.report import machine
from bench.slices import MEASURED as TITLE
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.documents import profile as profiles
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Model, value_of
from optpipe_compiler.errors import Infeasible, NotFound
from optpipe_torch.launch.run import run
from optpipe_torch.profiler.measure import MeasureOptions, measure

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.documents.profile import Profile

DEVICES, STEPS = 2, 3
NUMBERS = (1, 4, 8)

TEXT = """{title}

Written by `python -m bench.sliced --seconds {seconds:g} --rounds {rounds}` at {commit}; {machine}, with other
programs running. A Llama of {layers} blocks of {hidden}, sequences of {tokens} tokens in {dtype},
{microbatches} microbatches of one on 2 processes; {attention:.0%} of a block's forward is attention. Plans took
{seconds:g} s each. Each round runs all plans of a cap one after the other, {steps} steps each; a ratio is the median
step's time over that of the plan for whole microbatches in the same round: the median of the rounds, and the least and
the most. Gradients of every plan were compared with the model without a pipeline. Activations are the most that the two
devices held, of what the plan promises.

| cap, MB | slices | forecast | measured | idle, forecast | idle, measured | activations, MB | offloads, recomputes |
|---|---|---|---|---|---|---|---|
{rows}
"""


@dataclass
class Way:
    """One plan and what its runs took."""

    slices: int
    plan: Schedule | None
    steps_ns: list[float] = field(default_factory=list)
    """Of each round."""
    idle: list[float] = field(default_factory=list)
    held_bytes: int = 0
    promised_bytes: int = 0


def model(options: argparse.Namespace) -> Model:
    """Return the model that is trained."""
    hidden = options.hidden
    return Model(
        builder="transformer",
        config={
            "kind": "llama",
            "layers": options.layers,
            "hidden": hidden,
            "heads": hidden // 64,
            "kv_heads": hidden // 64,
            "head_dim": 64,
            "ffn": hidden * 8 // 3,
            "vocab": 256,
        },
        microbatch_size=1,
        sequence_length=options.tokens,
        seed=0,
    )


def planned(profile: Profile, cap: int, slices: int, options: argparse.Namespace) -> Schedule | None:
    """Return the plan; None where none fits or is found."""
    asked = Options(
        mem_bytes=cap,
        microbatches=options.microbatches,
        slices=slices,
        time_limit_s=options.seconds,
        reproducible=True,
    )
    try:
        return compile_schedule(profile, asked).schedule
    except (Infeasible, NotFound):
        return None


def caps(profile: Profile, options: argparse.Namespace) -> list[int]:
    """Return what whole microbatches take when they may take all, and as much with half of the activations."""
    roomy = planned(profile, 10**12, 1, options)
    assert roomy is not None
    peak = max(device.peak_bytes for device in roomy.devices)
    static = max(
        sum(stage.static_bytes for stage in roomy.stages if stage.device == device) for device in range(DEVICES)
    )
    return [peak, static + (peak - static) // 2]


def compare(ways: list[Way], rounds: int) -> None:
    """Run all plans in turn, so often."""
    text = [Path(__file__)]
    for number in range(rounds):
        for way in ways:
            if way.plan is None:
                continue
            report = run(way.plan, steps=STEPS, data_paths=text, check=number == 0)
            if report.check is not None and not report.check.ok:
                raise SystemExit(f"{way.slices} slices: {report.check}")
            assert report.makespan_ns is not None
            assert report.bubble is not None
            way.steps_ns.append(report.makespan_ns)
            way.idle.append(report.bubble)
            way.held_bytes = max(way.held_bytes, *(rank.peak_activation_bytes for rank in report.ranks))
            way.promised_bytes = max(rank.promised_activation_bytes for rank in report.ranks)
            print(f"round {number}: {way.slices} slices {report.makespan_ns / 1e6:.0f} ms", file=sys.stderr, flush=True)


def row(cap: int, way: Way, whole: Way) -> str:
    """Return a line of the table."""
    if way.plan is None:
        return f"| {cap / 1e6:.0f} | {way.slices} | none fits | | | | | |"
    ops = [op.name for device in way.plan.devices for op in (*device.compute, *device.d2h)]
    forecast, measured = "1", "1"
    if whole.plan is None:
        forecast = measured = ""
    elif way is not whole:
        ratios = [mine / theirs for mine, theirs in zip(way.steps_ns, whole.steps_ns, strict=True)]
        forecast = f"{way.plan.forecast.makespan_ns / whole.plan.forecast.makespan_ns:.2f}"
        measured = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return (
        f"| {cap / 1e6:.0f} | {way.slices} | {forecast} | {measured} | {way.plan.forecast.bubble_fraction:.1%} "
        f"| {median(way.idle):.1%} | {way.held_bytes / 1e6:.1f} of {way.promised_bytes / 1e6:.1f} "
        f"| {ops.count('offload')}, {ops.count('recompute')} |"
    )


def put(section: str, path: Path) -> None:
    """Write the section into a page, in place of the one that it has."""
    before, _, after = path.read_text(encoding="utf-8").partition(TITLE + "\n")
    following = after.find("\n## ")
    rest = "" if following < 0 else after[following:]
    path.write_text(before.rstrip("\n") + "\n\n" + section + rest, encoding="utf-8")


def main() -> None:
    """Print the section, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each plan")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=12, help="of the profile")
    parser.add_argument("--profile", type=Path, help="measured before")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.profile is not None and options.profile.exists():
        profile = profiles.load(options.profile)
    else:
        found = MeasureOptions(devices=DEVICES, device="cpu", of=model(options), samples=options.samples)
        profile = measure(found, lambda what, part: print(f"{part:.0%} {what}", file=sys.stderr, flush=True))
        if options.profile is not None:
            options.profile.write_text(canonical(profile), encoding="utf-8")
    rows = []
    for cap in caps(profile, options):
        ways = [Way(slices, planned(profile, cap, slices, options)) for slices in NUMBERS]
        compare(ways, options.rounds)
        rows += [row(cap, way, ways[0]) for way in ways]
        print("\n".join(rows[-len(ways) :]), file=sys.stderr, flush=True)
    block = max(profile.layers, key=lambda layer: layer.count)
    assert profile.model is not None
    assert block.slices is not None
    section = TEXT.format(
        title=TITLE,
        seconds=options.seconds,
        rounds=options.rounds,
        commit=commit(),
        machine=machine(),
        layers=profile.model.config["layers"],
        hidden=profile.model.config["hidden"],
        tokens=profile.model.sequence_length,
        dtype=profile.model.dtype,
        microbatches=options.microbatches,
        attention=value_of(block.slices.forward_attention_ns) / value_of(block.forward_ns),
        steps=STEPS,
        rows="\n".join(rows),
    )
    if options.output is None:
        print(section, end="")
    else:
        put(section, options.output)


if __name__ == "__main__":
    main()
