"""What slices of sequences are worth: `python -m bench.slices [--seconds N] [--parts PART...] [-o docs/SLICES.md]`.

Equal layers, F = I = W, messages of no time. First at Seq1F1B's own memory and placement, then with attention whose
slices differ, then under caps that need more than slices, then without host links; last how soon there is a schedule.
Plans are searched reproducibly, so what else the machine does changes nothing but the times of the last part, which
are of the processor. Rows go to a JSON file one by one, with the commit: an interrupted run goes on, and parts may be
run one at a time. A section of the page is written anew when all its rows are there, the others stay as they are; that
of real runs is bench.sliced's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.planner import commit
from bench.report import machine, publish
from optpipe_compiler.compiler import Options, Progress, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.errors import OptPipeError
from optpipe_compiler.plan.slices import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.documents.profile import Profile

    Row = dict[str, Any]
    Rows = dict[str, Row]

GB = 10**9
EQUAL = UniformOptions(devices=8, layers_per_device=4, p2p_ms=0.0, sliceable=True)
NUMBERS = (2, 4, 8, 16)
RESULTS = Path(__file__).parent / "slices.json"
MEASURED = "## Measured"
"""The page's section that bench.sliced writes."""

HEADER = """# Slices of sequences as a plan's choice

Written by `python -m bench.slices`; the last section by `python -m bench.sliced`. Layers are equal, F = I = W = 1 ms
per device and microbatch, messages take no time; memory is in activations of a device's layers for one microbatch.
Plans are searched reproducibly (as much search, whatever else runs), and every one is checked by the judge.
"""


def planned(profile: Profile, options: Options) -> Row | None:
    """Plan; None where no schedule fits or is found."""
    try:
        schedule = compile_schedule(profile, replace(options, reproducible=True)).schedule
    except OptPipeError:
        return None
    return facts(schedule)


def facts(schedule: Schedule) -> Row:
    """Return what the tables say of a schedule."""
    forecast = schedule.forecast
    return {
        "idle": forecast.bubble_fraction,
        "makespan_ns": forecast.makespan_ns,
        "bound_ns": forecast.lower_bound_ns,
        "method": forecast.method.removesuffix("-spared"),
        "slices": schedule.setup.slices,
    }


def idle_ms(plan: Row) -> float:
    return float(plan["idle"] * plan["makespan_ns"] / 1e6)


# -- at Seq1F1B's own memory


def own_memory(row: str, seconds: float) -> Row:
    """Return Seq1F1B and ours, at its memory and placement, without offload and recompute, for each number."""
    devices, microbatches = _numbers(row)
    profile = uniform_profile(replace(EQUAL, devices=devices))
    found = {}
    for number in NUMBERS:
        asked = Options(
            (number + devices - 1) * GB // number,
            microbatches,
            slices=number,
            placement="linear",
            stages_per_device=1,
            offload=False,
            recompute=False,
            time_limit_s=max(seconds, 20.0),
            search=False,
        )
        found[str(number)] = [planned(profile, replace(asked, method="seq1f1b")), planned(profile, asked)]
    return {"plans": found}


def own_memory_table(rows: Rows) -> Iterator[str]:
    yield "\n## At Seq1F1B's own memory: no offload, no recompute, one stage per device\n\n"
    yield "Seq1F1B needs (n + P - 1) / n activations and idles (P - 1) (F + B) / n; both in ms. Searches are of 1 s\n"
    yield "at least.\n\n"
    yield from _head("P", "M", *(title for n in NUMBERS for title in (f"n = {n}: Seq1F1B", "planned")))
    ratios = []
    for name, row in rows.items():
        cells = []
        for theirs, ours in row["plans"].values():
            ratios.append(idle_ms(ours) / idle_ms(theirs))
            cells += [f"{idle_ms(theirs):.3f}", f"{idle_ms(ours):.3f}"]
        yield _line(*_numbers(name), *cells)
    mean = exp(sum(map(log, ratios)) / len(ratios))
    yield f"\nPlanned to Seq1F1B: {mean:.3f} in the geometric mean of the idle times, {max(ratios):.3f} at worst.\n"


# -- with attention


def attention(row: str, seconds: float) -> Row:
    """Return Seq1F1B on slices of equal tokens and of equal time, and what is planned."""
    share, number = float(row.split()[0].partition("=")[2]), int(row.split()[1].partition("=")[2])
    profile = uniform_profile(replace(EQUAL, attention_share=share))
    asked = Options((number + 7) * GB // number, 16, slices=number, offload=False, recompute=False)
    theirs = [seq1f1b(profile, asked, which) for which in range(2)]
    return {"theirs": theirs, "ours": planned(profile, replace(asked, time_limit_s=seconds))}


def seq1f1b(profile: Profile, asked: Options, which: int) -> float:
    """Return the idle share of Seq1F1B on slices of equal tokens (0) or time (1), whatever memory these need."""
    from optpipe_compiler.model.placement import layout
    from optpipe_compiler.model.problem import Caps, Freedom, build
    from optpipe_compiler.published import published

    assert asked.microbatches is not None
    assert isinstance(asked.slices, int)
    slicing = [*cut(profile, asked, asked.slices)][which]
    where = layout("linear", profile.machine.devices, 1, [1] * len(profile.expanded_layers()))
    problem = build(profile, where, asked.microbatches, Caps(10**15, None), Freedom(), slicing=slicing)
    return published(problem, "seq1f1b").bubble_fraction


def attention_table(rows: Rows) -> Iterator[str]:
    yield "\n## With attention: slices of equal tokens take unequal time\n\n"
    yield "P = 8, M = 16, a cap of (n + P - 1) / n activations, no offload, no recompute. Idle share:\n\n"
    titles = ("Seq1F1B, equal tokens", "Seq1F1B, equal time", "planned", "by", "makespan and bound, ms")
    yield from _head("attention's share of F and I", "n", *titles)
    for name, row in rows.items():
        ours, shares = row["ours"], [f"{share:.2%}" for share in row["theirs"]]
        reached = f"{ours['makespan_ns'] / 1e6:.2f}, {ours['bound_ns'] / 1e6:.2f}"
        yield _line(*_values(name), *shares, f"{ours['idle']:.2%}", f"`{ours['method']}`", reached)


# -- under tight caps

WAYS: dict[str, dict[str, object]] = {
    "offload and recompute, whole microbatches": {"slices": 1},
    "slices": {"slices": 8, "offload": False, "recompute": False},
    "slices, offload": {"slices": 8, "recompute": False},
    "slices, recompute": {"slices": 8, "offload": False},
    "all": {"slices": "auto"},
}


def tight(row: str, seconds: float) -> Row:
    """Return what each means reaches alone, and all together."""
    cap, trip = row.removeprefix("P/").split(", ")
    trip_ms = float(trip.removesuffix(" ms"))
    fields = {"kv_fraction": 0.05, "boundary_fraction": 0.05, "d2h_ms": trip_ms / 2, "h2d_ms": trip_ms / 2}
    profile = uniform_profile(replace(EQUAL, **fields))  # type: ignore[arg-type]
    asked = Options(8 * GB // int(cap), 8, time_limit_s=seconds)
    return {way: planned(profile, replace(asked, **options)) for way, options in WAYS.items()}  # type: ignore[arg-type]


def tight_table(rows: Rows) -> Iterator[str]:
    yield "\n## Under caps of P/8 and below: slices, offload and recompute, alone and together\n\n"
    yield "P = 8, M = 8, keys and values 5% of an activation, a layer's input 5%; slices alone are 8, `all` is\n"
    yield "`--slices auto`; ms per step, and slices chosen.\n\n"
    yield from _head("cap", "round trip to the host", *WAYS, "slices of all", "bound")
    ratios = []
    for name, row in rows.items():
        found = [row[way] for way in WAYS]
        cells = ["none fits" if one is None else f"{one['makespan_ns'] / 1e6:.2f}" for one in found]
        every = found[-1]
        ratios.append(every["makespan_ns"] / min(one["makespan_ns"] for one in found[:-1] if one is not None))
        yield _line(*name.split(", "), *cells, every["slices"], f"{every['bound_ns'] / 1e6:.2f}")
    yield f"\nAll to the best of the others: {min(ratios):.4f} to {max(ratios):.4f} of its time.\n"


# -- without host links


def without_links(row: str, seconds: float) -> Row:
    """Return a plan at a quarter of 1F1B's memory, nothing but order and slices."""
    asked = Options(2 * GB, 32, offload=False, recompute=False, time_limit_s=seconds)
    return {"plan": planned(uniform_profile(EQUAL), replace(asked, slices="auto" if row == "auto" else int(row)))}


def without_links_table(rows: Rows) -> Iterator[str]:
    yield "\n## Without host links, at P/4\n\nP = 8, M = 32, no offload, no recompute.\n\n"
    yield from _head("slices", "idle share", "by", "slices chosen")
    for name, row in rows.items():
        plan = row["plan"]
        yield _line(name, f"{plan['idle']:.1%}", f"`{plan['method']}`", plan["slices"])


# -- how soon


def soon(row: str, _: float) -> Row:
    """Return the processor's time until there is a schedule, and for a whole search of the default limit."""
    microbatches, slices = _numbers(row)
    profile = uniform_profile(replace(EQUAL, kv_fraction=0.05, boundary_fraction=0.05))
    asked = Options(GB, microbatches, slices=slices, reproducible=True)
    compile_schedule(profile, replace(asked, microbatches=8, time_limit_s=0.1))  # compiles the machine
    first: list[float] = []
    begin = time.process_time()

    def note(progress: Progress) -> None:
        if progress.incumbent_ns is not None and not first:
            first.append(time.process_time() - begin)

    schedule = compile_schedule(profile, asked, note).schedule
    return {"first_s": first[0], "processor_s": time.process_time() - begin, "plan": facts(schedule)}


def soon_table(rows: Rows) -> Iterator[str]:
    yield "\n## How soon\n\nP = 8, a cap of P/8, the default time limit (60 s); seconds of one core. The\n"
    yield "search takes as many operations as two cores have time for in the limit.\n\n"
    yield from _head("M", "n", "units", "first schedule", "all of it", "makespan to bound")
    for name, row in rows.items():
        microbatches, slices = _numbers(name)
        ratio = row["plan"]["makespan_ns"] / row["plan"]["bound_ns"]
        times = f"{row['first_s']:.2f} s", f"{row['processor_s']:.0f} s"
        yield _line(microbatches, slices, microbatches * slices, *times, f"{ratio:.3f}")


# -- the page


@dataclass(frozen=True)
class Part:
    """Rows by name, each measured by itself."""

    rows: tuple[str, ...]
    measure: Callable[[str, float], Row]
    table: Callable[[Rows], Iterator[str]]


PARTS = {
    "own-memory": Part(tuple(f"P={p} M={m}" for p in (8, 16) for m in (8, 16, 32, 64)), own_memory, own_memory_table),
    "attention": Part(
        tuple(f"share={share} n={n}" for share in (0.3, 0.6) for n in (4, 8, 16)), attention, attention_table
    ),
    "tight": Part(tuple(f"P/{part}, {trip} ms" for part in (8, 16) for trip in (2, 4)), tight, tight_table),
    "no-links": Part(("1", "auto"), without_links, without_links_table),
    "soon": Part(("M=32 n=1", "M=32 n=8", "M=256 n=1"), soon, soon_table),
}


def _values(row: str) -> list[str]:
    return [word.partition("=")[2] for word in row.split()]


def _numbers(row: str) -> list[int]:
    return list(map(int, _values(row)))


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _head(*titles: str) -> Iterator[str]:
    yield _line(*titles)
    yield "|" + "---|" * len(titles) + "\n"


def sections(results: dict[str, Rows]) -> Iterator[str]:
    """Yield the sections whose rows are all there, each with its title first; they say of which commits they are."""
    for name, part in PARTS.items():
        rows = {row: results[name][row] for row in part.rows if row in results.get(name, {})}
        if len(rows) == len(part.rows):
            yield "".join(part.table(rows)).lstrip("\n") + _origin(name, list(rows.values()))


def _origin(name: str, rows: list[Row]) -> str:
    seconds = sorted({f"{row['seconds']:g}" for row in rows}, key=float)
    commits = [row["commit"] for row in rows]
    told = commits[0] if len(set(commits)) == 1 else f"{', '.join(commits)}, row by row"
    return f"\n`python -m bench.slices --parts {name} --seconds {' or '.join(seconds)}` at {told}; {machine()}.\n"


def merged(before: str, new: Iterable[str]) -> str:
    """Return a page with the new sections in place of those of the same title, or behind the others."""
    _, *known = before.split("\n## ")
    parts = {one.partition("\n")[0]: one.rstrip("\n") + "\n" for one in known}
    runs = parts.pop(MEASURED.removeprefix("## "), None)
    for section in new:
        title, _, rest = section.removeprefix("## ").partition("\n")
        parts[title] = f"{title}\n{rest}"
    every = [*parts.values(), *([] if runs is None else [runs])]
    return HEADER + "".join(f"\n## {one}" for one in every)


def main() -> None:
    """Measure what is not there yet, and print the page or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each plan")
    parser.add_argument("--parts", nargs="*", choices=PARTS, help="default: all")
    parser.add_argument("--again", action="store_true", help="also rows that are there from this commit")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the rows, which are added to")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    results: dict[str, Rows] = json.loads(options.results.read_text()) if options.results.exists() else {}
    now = commit()
    for name in options.parts or PARTS:
        rows = results.setdefault(name, {})
        for row in PARTS[name].rows:
            known = rows.get(row, {})
            if not options.again and (known.get("commit"), known.get("seconds")) == (now, options.seconds):
                continue
            rows[row] = {"commit": now, "seconds": options.seconds, **PARTS[name].measure(row, options.seconds)}
            options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {row}", file=sys.stderr, flush=True)
    before = (
        options.output.read_text(encoding="utf-8") if options.output is not None and options.output.exists() else ""
    )
    publish(merged(before, sections(results)), options.output)


if __name__ == "__main__":
    main()
