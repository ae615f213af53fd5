"""optpipe compile and optpipe bounds: planning from a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optpipe_compiler.cli.common import (
    PROFILE,
    SCHEDULE,
    VERBOSE,
    Output,
    Size,
    cache_option,
    check_outputs,
    complete_methods,
    console,
    is_said,
    is_stdout,
    json_option,
    note,
    plan_json,
    say,
    say_json,
    units_of,
    units_options,
)
from optpipe_compiler.documents.units import counted, parse_cap
from optpipe_compiler.errors import BadInput, Rejected

if TYPE_CHECKING:
    from optpipe_compiler.compiler import Least


@click.command(name="compile", short_help="Plan a schedule under a memory cap, with a proven bound.")
@click.argument("profile_path", metavar="[PROFILE]", type=click.Path(path_type=Path), default=PROFILE)
@click.option("--mem", type=Size(), help="Memory cap per device, such as 40GB or 37.25GiB [default: the profile's].")
@click.option("--microbatches", type=int, help="Microbatches per step [default: 4 per device].")
@click.option("--devices", type=click.IntRange(min=1), help="Pipeline devices [default: the profile's].")
@click.option("--host-mem", type=Size(), help="Host memory for offloads, all devices [default: the profile's].")
@click.option("--placement", type=click.Choice(["auto", "linear", "loop", "v"]), default="auto", show_default=True)
@click.option("--stages-per-device", type=int, help="[default: searched]")
@click.option("--objective", type=click.Choice(["makespan", "span"]), default="makespan", show_default=True)
@click.option("--no-offload", is_flag=True)
@click.option("--no-recompute", is_flag=True)
@click.option("--no-split", is_flag=True, help="Only fused backwards.")
@click.option(
    "--time-limit",
    type=float,
    metavar="SECONDS",
    help="To search and to write. What comes before the search (bounds of all placements) and the known schedules, "
    "all of which are tried, may take longer, and so may writing one that beats the plan.  "
    "[default: 60 up to 8 devices, 180 up to 32, 270 above]",
)
@units_options
@click.option(
    "--noise",
    type=float,
    metavar="SHARE",
    help="Standard deviation of an op's time, such as 0.15 [default: the profile's spreads].",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--reproducible", is_flag=True, help="Same bytes on every run and machine; one search thread.")
@click.option(
    "--from",
    "seeds",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Start from an earlier schedule: no worse than it where it still fits. May be repeated.",
)
@click.option(
    "--keep-placement",
    "keep",
    metavar="SCHEDULE",
    type=click.Path(path_type=Path),
    help="Keep this schedule's cut and owners of stages, so that no weight moves.",
)
@click.option(
    "--method",
    shell_complete=complete_methods,
    help="Emit this known schedule instead of searching (see --list-methods).",
)
@cache_option
@click.option("--list-methods", is_flag=True, help="Tell what the known schedules are, and stop.")
@json_option
@click.option("-o", "--output", type=Output(replaces=["seeds", "keep"]), default=SCHEDULE, show_default=True)
def compile_command(
    profile_path: Path,
    output: Path,
    as_json: bool,
    mem: int | None,
    seeds: tuple[Path, ...],
    keep: Path | None,
    cached: bool,
    list_methods: bool,
    **options: Any,
) -> None:
    """Plan a schedule under a memory cap and prove how good it is.

    Example: optpipe compile profile.json --mem 40GB --microbatches 16 -o schedule.json
    """
    from optpipe_compiler import cache, compiler
    from optpipe_compiler.documents import profile as profiles
    from optpipe_compiler.documents.files import uncollected, write_atomically
    from optpipe_compiler.documents.units import show_ns
    from optpipe_compiler.view.progress import ProgressLine
    from optpipe_compiler.view.summary import render

    if list_methods:
        _list_methods(as_json=as_json)
        return
    if seeds and options["method"] is not None:
        raise BadInput(f"--from is {seeds[0]}, expected none with --method: a known schedule starts from no other")
    check_outputs(output, as_json=as_json)
    costs = profiles.load(profile_path)
    chosen = compiler.Options(
        mem_bytes=_cap(mem, costs),
        seeds=tuple(map(_checked, seeds)),
        keep=None if keep is None else _checked(keep),
        **_renamed(options),
    )
    limit_s = compiler.settled(costs, chosen).time_limit_s
    with ProgressLine(console(stderr=True), limit_s, every_plan=is_said(VERBOSE)) as line:
        result = cache.compile_schedule(costs, chosen, line.update, cache.users() if cached else None)
    with uncollected():
        write_atomically(output, result.checked.text)
    for remark in result.notes:
        note(f"optpipe: {remark}")
    if as_json:
        say_json(_report(result))
        return
    with uncollected():
        console(stderr=is_stdout(output)).print(render(result.schedule))
    if result.quantiles is not None:
        noisy = result.quantiles
        say(
            f"with the noise of ops: {show_ns(noisy.p50_ns)} in half of the steps, {show_ns(noisy.p95_ns)} in 95%",
            err=is_stdout(output),
        )
    if result.left_ns is not None:
        left = f"a plan of {show_ns(result.left_ns)} was left for this one, which is late less often under that noise"
        say(left, err=is_stdout(output))
    if result.interrupted:
        note("interrupted: this is the best schedule so far")
    click.echo(err=is_stdout(output))
    before = ", as planned before (--no-cache plans anew)" if result.is_cached else ""
    say(f"wrote {output} in {result.wall_s:.1f} s{before}", err=is_stdout(output))


def _list_methods(*, as_json: bool) -> None:
    """Print every schedule to compare with: what it is, whose, its bubble and memory."""
    from optpipe_compiler.published.listing import as_records, as_text

    if as_json:
        say_json({"methods": as_records()})
        return
    click.echo(as_text(min(console().width, 100)))


@click.command(short_help="Print lower bounds for a range of caps, without solving.")
@click.argument("profile_path", metavar="[PROFILE]", type=click.Path(path_type=Path), default=PROFILE)
@click.option("--mem", "mems", required=True, metavar="SIZE[,SIZE...]", help="Caps, such as 10GB,20GB,40GB.")
@click.option("--microbatches", type=int, help="Microbatches per step [default: 4 per device].")
@click.option("--devices", type=click.IntRange(min=1), help="Pipeline devices [default: the profile's].")
@click.option("--placement", type=click.Choice(["auto", "linear", "loop", "v"]), default="auto", show_default=True)
@click.option("--stages-per-device", type=int, help="[default: all that are searched]")
@click.option("--objective", type=click.Choice(["makespan", "span"]), default="makespan", show_default=True)
@units_options
@json_option
def bounds(profile_path: Path, mems: str, as_json: bool, **options: Any) -> None:
    """Print lower bounds for a range of caps, without solving.

    Example: optpipe bounds profile.json --mem 10GB,20GB,40GB --microbatches 16
    """
    from rich.table import Table

    from optpipe_compiler import compiler
    from optpipe_compiler.documents import profile as profiles
    from optpipe_compiler.documents.units import short_bytes, show_bytes, show_ns

    costs = profiles.load(profile_path)
    options |= units_of(options["slices"], options["lengths"])
    rows: list[tuple[int, Least]] = []
    for text in mems.split(","):
        chosen = compiler.settled(costs, compiler.Options(mem_bytes=parse_cap(text, "--mem"), **options))
        rows.append((chosen.mem_bytes, compiler.bounded(costs, chosen)))
    taken = _taken_for_granted(costs, chosen, asked=options["microbatches"] is not None)
    if as_json:
        found = [
            {"mem_bytes": cap, "lower_bound_ns": one.ns, "argument": one.argument, "least_mem_bytes": one.mem_bytes}
            for cap, one in rows
        ]
        about = {"objective": chosen.objective, "devices": chosen.devices, "microbatches": chosen.microbatches}
        say_json(about | {"assumptions": taken, "bounds": found})
        return
    table = Table("cap", f"{options['objective']} at least", "because of", box=None, pad_edge=False)
    for cap, one in rows:
        if one.mem_bytes > cap:
            size = short_bytes(one.mem_bytes)
            why = f"some device needs {size} at least" if one.is_smallest else f"{size} would do"
            table.add_row(show_bytes(cap), "nothing fits", why)
        else:
            table.add_row(show_bytes(cap), show_ns(one.ns), one.argument)
    console().print(table)
    click.echo()
    for line in taken:
        say(line)


def _taken_for_granted(costs: Any, chosen: Any, *, asked: bool) -> list[str]:
    """Say for what the bounds are, and what the profile leaves out."""
    from optpipe_compiler.documents.profile import value_of
    from optpipe_compiler.documents.units import show_hosts, show_slicing

    default = "" if asked else " (default: one per length)" if chosen.lengths else " (default: 4 per device)"
    units = show_slicing(chosen.slices, chosen.lengths)
    hosts = [host for host in costs.machine.hosts if min(host.devices) < chosen.devices]
    host = show_hosts(chosen.host_mem_bytes, [value_of(host.memory_bytes) for host in hosts])
    said = [
        f"{counted(chosen.devices, 'device')}, {counted(chosen.microbatches, 'microbatch')}{default}, host memory "
        f"{host}"
    ]
    said += [] if units is None else [units]
    if not any(value_of(layer.static_bytes) for layer in costs.layers):
        said.append("the profile has no static bytes: weights, gradients and optimizer state count 0")
    said += costs.machine.left_out(chosen.devices)
    return said


def _checked(path: Path) -> Any:
    """Return an earlier schedule that the judge has passed."""
    from optpipe_compiler.documents import ir
    from optpipe_compiler.verify import Violated, check

    try:
        return check(ir.load(path))
    except Violated as error:
        raise Rejected(f"{path}: not taken as a start, verify rejects it: {error} (optpipe verify {path})") from error


def _cap(mem: int | None, costs: Any) -> int:
    from optpipe_compiler.documents.profile import value_of

    if mem is not None:
        return mem
    if costs.machine.memory_bytes is None:
        raise BadInput("--mem is missing and the profile does not know the devices' memory; expected e.g. --mem 40GB")
    return value_of(costs.machine.memory_bytes)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Turn the command line's names into those of compiler.Options."""
    for name in ("offload", "recompute", "split"):
        options[name] = not options.pop(f"no_{name}")
    options["host_mem_bytes"] = options.pop("host_mem")
    options |= units_of(options["slices"], options["lengths"])
    options["time_limit_s"] = options.pop("time_limit")
    return options


def _report(result: Any) -> dict[str, Any]:
    """Return what `compile --json` prints."""
    from optpipe_compiler.view.baselines import OTHERS, best, kind

    schedule = result.schedule
    return {
        **plan_json(schedule),
        "interrupted": result.interrupted,
        "peak_bytes": [device.peak_bytes for device in schedule.devices],
        "host_bytes": [device.host_bytes for device in schedule.devices],
        "devices": schedule.setup.devices,
        "stages": len(schedule.stages),
        "placement": result.placement,
        "p50_ns": None if result.quantiles is None else result.quantiles.p50_ns,
        "p95_ns": None if result.quantiles is None else result.quantiles.p95_ns,
        "wall_s": result.wall_s,
        "cached": result.is_cached,
        "digest": schedule.digest,
        "best_of_papers_and_stock": best(schedule, OTHERS),
        "baselines": {
            name: {
                "makespan_ns": baseline.makespan_ns,
                "peak_bytes": baseline.peak_bytes,
                "fits": baseline.fits,
                "kind": kind(schedule, name),
                **({"reason": baseline.reason} if baseline.reason else {}),
            }
            for name, baseline in schedule.forecast.baselines.items()
        },
    }
