"""What slices of sequences are worth: `python -m bench.slices [--seconds N] [-o docs/SLICES.md]`.

Equal layers, F = I = W, messages of no time. First at Seq1F1B's own memory and placement, then with attention whose
slices differ, then under caps that need more than slices, then without host links; last how soon there is a schedule.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING

from bench.planner import commit
from bench.report import machine, publish
from optpipe_compiler.compiler import Options, Progress, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.errors import OptPipeError
from optpipe_compiler.plan.slices import cut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.documents.profile import Profile

GB = 10**9
EQUAL = UniformOptions(devices=8, layers_per_device=4, p2p_ms=0.0, sliceable=True)
SIZES = [(devices, microbatches) for devices in (8, 16) for microbatches in (8, 16, 32, 64)]
NUMBERS = (2, 4, 8, 16)

HEADER = """# Slices of sequences as a plan's choice

Written by `python -m bench.slices --seconds {seconds:g}` at {commit}; {machine}. Layers are equal, F = I = W = 1 ms per
device and microbatch, messages take no time; memory is in activations of a device's layers for one microbatch. Plans
are searched reproducibly (as much search, whatever else runs), and every one is checked by the judge.
"""


@dataclass(frozen=True)
class Planned:
    """A plan's idle time in ms, its idle share, its method; None where none fits."""

    idle_ms: float
    share: float
    method: str
    slices: int
    makespan_ms: float
    bound_ms: float


def planned(profile: Profile, options: Options) -> Planned | None:
    """Plan; None where no schedule fits or is found."""
    try:
        schedule = compile_schedule(profile, options).schedule
    except OptPipeError:
        return None
    return facts(schedule)


def facts(schedule: Schedule) -> Planned:
    """Return what the tables say of a schedule."""
    forecast = schedule.forecast
    idle = forecast.bubble_fraction * forecast.makespan_ns / 1e6
    return Planned(
        idle,
        forecast.bubble_fraction,
        forecast.method.removesuffix("-spared"),
        schedule.setup.slices,
        forecast.makespan_ns / 1e6,
        forecast.lower_bound_ns / 1e6,
    )


def own_memory(seconds: float) -> Iterator[str]:
    """At Seq1F1B's own memory and placement, without offload and recompute: its idle time and ours."""
    yield "\n## At Seq1F1B's own memory: no offload, no recompute, one stage per device\n\n"
    yield "Seq1F1B needs (n + P - 1) / n activations and idles (P - 1) (F + B) / n; both in ms.\n\n"
    yield "| P | M | " + " | ".join(f"n = {n}: Seq1F1B" + " | planned" for n in NUMBERS) + " |\n"
    yield "|---|---|" + "---|---|" * len(NUMBERS) + "\n"
    ratios = []
    for devices, microbatches in SIZES:
        cells = []
        for number in NUMBERS:
            profile = uniform_profile(replace(EQUAL, devices=devices))
            asked = Options(
                (number + devices - 1) * GB // number,
                microbatches,
                slices=number,
                placement="linear",
                stages_per_device=1,
                offload=False,
                recompute=False,
                time_limit_s=max(seconds, 20.0),
                reproducible=True,
                search=False,
            )
            theirs, ours = planned(profile, replace(asked, method="seq1f1b")), planned(profile, asked)
            assert theirs is not None
            assert ours is not None
            ratios.append(ours.idle_ms / theirs.idle_ms)
            cells += [f"{theirs.idle_ms:.3f}", f"{ours.idle_ms:.3f}"]
        yield f"| {devices} | {microbatches} | " + " | ".join(cells) + " |\n"
    mean = exp(sum(map(log, ratios)) / len(ratios))
    yield f"\nPlanned to Seq1F1B: {mean:.3f} in the geometric mean of the idle times, {max(ratios):.3f} at worst.\n"


def attention(seconds: float) -> Iterator[str]:
    """Slices whose times differ: Seq1F1B on equal tokens and on equal times, and what is planned."""
    yield "\n## With attention: slices of equal tokens take unequal time\n\n"
    yield "P = 8, M = 16, a cap of (n + P - 1) / n activations, no offload, no recompute. Idle share:\n\n"
    yield "| attention's share of F and I | n | Seq1F1B, equal tokens | Seq1F1B, equal time | planned | by | bound |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for share in (0.3, 0.6):
        profile = uniform_profile(replace(EQUAL, attention_share=share))
        for number in (4, 8, 16):
            asked = Options((number + 7) * GB // number, 16, slices=number, offload=False, recompute=False)
            asked = replace(asked, time_limit_s=seconds, reproducible=True)
            ways = [seq1f1b(profile, asked, which) for which in range(2)]
            ours = planned(profile, asked)
            cells = [_share(one) for one in (*ways, ours)]
            named = "" if ours is None else f"`{ours.method}` | {ours.makespan_ms:.2f} ms of {ours.bound_ms:.2f}"
            yield f"| {share} | {number} | " + " | ".join(cells) + f" | {named} |\n"


def seq1f1b(profile: Profile, asked: Options, which: int) -> Planned | None:
    """Return Seq1F1B on slices of equal tokens (0) or of equal time (1), whatever memory these need."""
    from optpipe_compiler.model.placement import layout
    from optpipe_compiler.model.problem import Caps, Freedom, build
    from optpipe_compiler.published import published

    assert asked.microbatches is not None
    devices = profile.machine.devices
    assert isinstance(asked.slices, int)
    slicing = [*cut(profile, asked, asked.slices)][which]
    where = layout("linear", devices, 1, [1] * len(profile.expanded_layers()))
    problem = build(profile, where, asked.microbatches, Caps(10**15, None), Freedom(), slicing=slicing)
    timed = published(problem, "seq1f1b")
    idle = timed.bubble_fraction * timed.makespan / 1e6
    return Planned(idle, timed.bubble_fraction, "seq1f1b", asked.slices, timed.makespan / 1e6, 0.0)


def tight(seconds: float) -> Iterator[str]:
    """Under caps below what slices alone need: each means alone, and all together."""
    yield "\n## Under caps of P/8 and below: slices, offload and recompute, alone and together\n\n"
    yield "P = 8, M = 8, keys and values 5% of an activation, a layer's input 5%; ms per step.\n\n"
    yield "| cap | round trip to the host | offload and recompute, whole microbatches | slices | slices, offload | "
    yield "slices, recompute | all | bound |\n|---|---|---|---|---|---|---|---|\n"
    for part in (8, 16):
        for trip in (1.0, 2.0):
            profile = uniform_profile(
                replace(EQUAL, kv_fraction=0.05, boundary_fraction=0.05, d2h_ms=trip, h2d_ms=trip)
            )
            asked = Options(8 * GB // part, 8, slices="auto", time_limit_s=seconds, reproducible=True)
            found = [
                planned(profile, replace(asked, slices=1)),
                planned(profile, replace(asked, slices=8, offload=False, recompute=False)),
                planned(profile, replace(asked, slices=8, recompute=False)),
                planned(profile, replace(asked, slices=8, offload=False)),
                planned(profile, asked),
            ]
            cells = ["none fits" if one is None else f"{one.makespan_ms:.2f}" for one in found]
            bound = "" if found[-1] is None else f"{found[-1].bound_ms:.2f}"
            yield f"| P/{part} | {2 * trip:g} ms | " + " | ".join(cells) + f" | {bound} |\n"


def without_links(seconds: float) -> Iterator[str]:
    """A quarter of 1F1B's memory, nothing but order and slices."""
    yield "\n## Without host links, at P/4\n\n"
    yield "P = 8, M = 32, no offload, no recompute.\n\n"
    yield "| slices | idle share | by | slices chosen |\n|---|---|---|---|\n"
    profile = uniform_profile(EQUAL)
    for slices in (1, "auto"):
        asked = Options(2 * GB, 32, offload=False, recompute=False, time_limit_s=seconds, reproducible=True)
        ours = planned(profile, replace(asked, slices=slices))  # type: ignore[arg-type]
        assert ours is not None
        yield f"| {slices} | {ours.share:.1%} | `{ours.method}` | {ours.slices} |\n"


def soon(_: float) -> Iterator[str]:
    """How soon there is a first schedule, and how long the whole takes, by the default limit."""
    yield "\n## How soon\n\nP = 8, M = 32, the default time limit; wall time on this machine.\n\n"
    yield "| n | units | first schedule | all of it | makespan to bound |\n|---|---|---|---|---|\n"
    profile = uniform_profile(replace(EQUAL, kv_fraction=0.05, boundary_fraction=0.05))
    for slices in (1, 8):
        first: list[float] = []

        def note(progress: Progress, first: list[float] = first) -> None:
            if progress.incumbent_ns is not None and not first:
                first.append(progress.elapsed_s)

        begin = time.monotonic()
        schedule = compile_schedule(profile, Options(GB, 32, slices=slices), note).schedule
        forecast, units = schedule.forecast, 32 * slices
        ratio = forecast.makespan_ns / forecast.lower_bound_ns
        yield f"| {slices} | {units} | {first[0]:.1f} s | {time.monotonic() - begin:.0f} s | {ratio:.3f} |\n"


def _share(one: Planned | None) -> str:
    return "none fits" if one is None else f"{one.share:.2%}"


PARTS = {"own-memory": own_memory, "attention": attention, "tight": tight, "no-links": without_links, "soon": soon}


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each plan")
    parser.add_argument("--parts", nargs="*", choices=PARTS, help="default: all")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    text = HEADER.format(seconds=options.seconds, commit=commit(), machine=machine())
    for name in options.parts or PARTS:
        for line in PARTS[name](options.seconds):
            print(line, end="", flush=True)
            text += line
    publish(text, options.output)


if __name__ == "__main__":
    main()
