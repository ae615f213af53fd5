"""The commands. The only place that opens paths, prints and exits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from optpipe_compiler import __version__
from optpipe_compiler.errors import INTERRUPTED, BadInput, MissingDependency, OptPipeError, Rejected
from optpipe_compiler.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

PROFILE, SCHEDULE = Path("profile.json"), Path("schedule.json")

EXIT_CODES = """
Exit codes: 0 done, 1 rejected (verify, run --check), 2 bad input, 3 no schedule fits, 4 none found in time,
5 a replay failed, 6 a package is missing, 130 interrupted.
"""


class _Bytes(click.ParamType[int]):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else parse_bytes(str(value), param.opts[0] if param else "size")


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def main() -> None:
    """Run the command line; every expected failure is one sentence on stderr and its exit code."""
    try:
        code = cli(standalone_mode=False)
    except OptPipeError as error:
        click.echo(f"optpipe: {error}", err=True)
        code = error.exit_code
    except click.exceptions.Abort:
        click.echo("optpipe: interrupted", err=True)
        code = INTERRUPTED
    except KeyboardInterrupt:
        click.echo("optpipe: interrupted", err=True)
        code = INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        code = 141
    sys.exit(code if isinstance(code, int) else 0)


@click.group(epilog=EXIT_CODES)
@click.version_option(__version__, prog_name="optpipe")
def cli() -> None:
    """Plan, verify and replay pipeline-parallel training schedules.

    \b
    optpipe profile                 measure this machine      -> profile.json
    optpipe compile --mem 40GB      plan under a memory cap   -> schedule.json
    optpipe run schedule.json       replay it
    """


@cli.group(invoke_without_command=True)
@click.option("--devices", type=click.IntRange(min=1), help="Pipeline devices [default: the cores, 2 to 4].")
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True, help="Transformer blocks.")
@click.option("--hidden", type=click.IntRange(min=1), default=256, show_default=True, help="Model width.")
@click.option("--heads", type=click.IntRange(min=1), default=4, show_default=True, help="Attention heads.")
@click.option("--seq", type=click.IntRange(min=1), default=128, show_default=True, help="Sequence length in bytes.")
@click.option("--microbatch-size", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=PROFILE, show_default=True)
@click.pass_context
def profile(context: click.Context, /, **options: Any) -> None:
    """Write a cost profile: measured on this machine, or made from a few numbers (`optpipe profile uniform`).

    Example: optpipe profile -o profile.json
    """
    if context.invoked_subcommand is None:
        _measure(**options)


def _measure(
    output: Path, devices: int | None, layers: int, hidden: int, heads: int, seq: int, microbatch_size: int
) -> None:
    from optpipe_compiler.files import check_writable
    from optpipe_compiler.view.measured import MeasureBar, render
    from runtime_torch.measure import MeasureOptions, measure

    check_writable(output)
    options = MeasureOptions(
        devices=devices,
        layers=layers,
        hidden=hidden,
        heads=heads,
        sequence_length=seq,
        microbatch_size=microbatch_size,
    )
    with MeasureBar(_console(stderr=True)) as bar:
        measured = measure(options, bar.update)
    _write(output, measured)
    _console().print(render(measured, str(output)))


def _write(path: Path, record: Any) -> None:
    from optpipe_compiler.files import canonical, write_atomically

    write_atomically(path, canonical(record))


def _uniform_option(name: str, default: Any, help: str) -> Callable[[Any], Any]:
    return click.option(name, type=float, default=default, show_default=default is not None, help=help)


@profile.command()
@click.option("--devices", type=int, default=4, show_default=True)
@click.option("--layers-per-device", type=int, default=4, show_default=True)
@_uniform_option("--forward-ms", 1.0, "Forward, per device and microbatch, like all times here.")
@_uniform_option("--backward-input-ms", 1.0, "Gradient of the input.")
@_uniform_option("--backward-weight-ms", 1.0, "Gradient of the weights.")
@_uniform_option("--recompute-ms", None, "Recomputation [default: the forward].")
@_uniform_option("--p2p-ms", 0.05, "Message to a neighbour.")
@_uniform_option("--activation-gb", 1.0, "Activation of one microbatch on one device, GB = 10^9 bytes.")
@_uniform_option("--residue-fraction", 0.5, "Share of it kept between input and weight gradient.")
@_uniform_option("--boundary-fraction", 0.0, "Share of it kept for a recomputation.")
@_uniform_option("--d2h-ms", 1.0, "Offload of one device's whole activation of one microbatch, alone.")
@_uniform_option("--h2d-ms", 1.0, "Reload of the same, alone.")
@click.option(
    "--duplex-slowdown",
    default="1.0",
    show_default=True,
    metavar="RATIO",
    help="How much longer a transfer takes while the link's other direction is busy; 1/0.7 may be written so.",
)
@_uniform_option("--static-gb", 0.0, "Weights, gradients and optimizer state per device.")
@click.option(
    "--shared-links",
    type=click.Choice(["pairs", "none"]),
    default="none",
    show_default=True,
    help="pairs: devices 2i and 2i+1 share one host link.",
)
@click.option("--embedding-ms", metavar="F,I,W", help="An extra first layer.")
@click.option("--head-ms", metavar="F,I,W", help="An extra last layer.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=PROFILE, show_default=True)
def uniform(output: Path, embedding_ms: str | None, head_ms: str | None, duplex_slowdown: str, **options: Any) -> None:
    """Write a profile of equal layers from a handful of numbers.

    Example: optpipe profile uniform --devices 8 --activation-gb 2 --d2h-ms 1.05 --h2d-ms 1.05 --shared-links pairs
    """
    from optpipe_compiler.uniform import UniformOptions, parse_ratio, parse_triple, uniform_profile

    record = uniform_profile(
        UniformOptions(
            embedding_ms=parse_triple(embedding_ms, "--embedding-ms") if embedding_ms else None,
            head_ms=parse_triple(head_ms, "--head-ms") if head_ms else None,
            duplex_slowdown=parse_ratio(duplex_slowdown, "--duplex-slowdown"),
            **options,
        )
    )
    _write(output, record)
    layers = len(record.expanded_layers())
    click.echo(f"{output}: {record.machine.devices} devices, {layers} layers, all numbers manual")


@cli.command(name="compile")
@click.argument("profile_path", metavar="[PROFILE]", type=click.Path(path_type=Path), default=PROFILE)
@click.option("--mem", type=_Bytes(), help="Memory cap per device, such as 40GB or 37.25GiB [default: the profile's].")
@click.option("--microbatches", type=int, help="Microbatches per step [default: 4 per device].")
@click.option("--devices", type=click.IntRange(min=1), help="Pipeline devices [default: the profile's].")
@click.option("--host-mem", type=_Bytes(), help="Host memory for offloads, all devices [default: the profile's].")
@click.option("--placement", type=click.Choice(["auto", "linear", "loop", "v"]), default="auto", show_default=True)
@click.option("--stages-per-device", type=int, help="[default: searched]")
@click.option("--objective", type=click.Choice(["makespan", "span"]), default="makespan", show_default=True)
@click.option("--no-offload", is_flag=True)
@click.option("--no-recompute", is_flag=True)
@click.option("--no-split", is_flag=True, help="Only fused backwards.")
@click.option("--time-limit", type=float, metavar="SECONDS", help="[default: 60 up to 8 devices, 180 above]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--reproducible", is_flag=True, help="Same bytes on every run and machine; one search thread.")
@click.option("--method", help="Emit this published schedule instead of searching (see --list-methods).")
@click.option("--list-methods", is_flag=True, help="List the published schedules and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=SCHEDULE, show_default=True)
def compile_command(
    profile_path: Path, output: Path, as_json: bool, mem: int | None, list_methods: bool, **options: Any
) -> None:
    """Plan a schedule under a memory cap and prove how good it is.

    Example: optpipe compile profile.json --mem 40GB --microbatches 16 -o schedule.json
    """
    from optpipe_compiler import driver, ir
    from optpipe_compiler import profile as profiles
    from optpipe_compiler.files import check_writable, write_atomically
    from optpipe_compiler.view.progress import ProgressLine
    from optpipe_compiler.view.summary import render

    if list_methods:
        _list_methods()
        return
    check_writable(output)
    costs = profiles.load(profile_path)
    chosen = driver.Options(mem_bytes=_cap(mem, costs), **_renamed(options))
    with ProgressLine(_console(stderr=True)) as line:
        result = driver.compile_schedule(costs, chosen, line.update)
    write_atomically(output, ir.to_text(result.schedule))
    for note in result.notes:
        click.echo(f"optpipe: {note}", err=True)
    if as_json:
        click.echo(msgspec.json.encode(_report(result)))
        return
    _console().print(render(result.schedule))
    if result.interrupted:
        click.echo("interrupted: this is the best schedule so far", err=True)
    click.echo(f"\nwrote {output} in {result.wall_s:.1f} s")


def _list_methods() -> None:
    """Print every published schedule with the placements that it is tried on."""
    from rich.table import Table

    from optpipe_compiler.heuristics import PLACEMENTS

    table = Table(box=None, pad_edge=False)
    table.add_column("method")
    table.add_column("placement and stages per device")
    for name, places in PLACEMENTS.items():
        table.add_row(name, ", ".join(f"{placement} {number}" for placement, number in places))
    _console().print(table)


@cli.command()
@click.argument("profile_path", metavar="[PROFILE]", type=click.Path(path_type=Path), default=PROFILE)
@click.option("--mem", "mems", required=True, metavar="SIZE[,SIZE...]", help="Caps, such as 10GB,20GB,40GB.")
@click.option("--microbatches", type=int, help="Microbatches per step [default: 4 per device].")
@click.option("--devices", type=click.IntRange(min=1), help="Pipeline devices [default: the profile's].")
@click.option("--placement", type=click.Choice(["auto", "linear", "loop", "v"]), default="auto", show_default=True)
@click.option("--stages-per-device", type=int, help="[default: all that are searched]")
@click.option("--objective", type=click.Choice(["makespan", "span"]), default="makespan", show_default=True)
def bounds(profile_path: Path, mems: str, **options: Any) -> None:
    """Print lower bounds for a range of caps, without solving.

    Example: optpipe bounds profile.json --mem 10GB,20GB,40GB --microbatches 16
    """
    from rich.table import Table

    from optpipe_compiler import driver
    from optpipe_compiler import profile as profiles
    from optpipe_compiler.units import show_bytes, show_ns

    costs = profiles.load(profile_path)
    table = Table("cap", f"{options['objective']} at least", "because of", box=None, pad_edge=False)
    for text in mems.split(","):
        cap = parse_bytes(text, "--mem")
        reached, name = driver.lower_bound(costs, driver.Options(mem_bytes=cap, **options))
        table.add_row(show_bytes(cap), show_ns(reached), name)
    _console().print(table)


def _cap(mem: int | None, costs: Any) -> int:
    from optpipe_compiler.profile import value_of

    if mem is not None:
        return mem
    if costs.machine.memory_bytes is None:
        raise BadInput("--mem is missing and the profile does not know the devices' memory; expected e.g. --mem 40GB")
    return value_of(costs.machine.memory_bytes)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Turn the command line's names into those of driver.Options."""
    for name in ("offload", "recompute", "split"):
        options[name] = not options.pop(f"no_{name}")
    options["host_mem_bytes"] = options.pop("host_mem")
    options["time_limit_s"] = options.pop("time_limit")
    return options


def _report(result: Any) -> dict[str, Any]:
    """Return what `compile --json` prints."""
    from optpipe_compiler.view.summary import count, gap

    schedule = result.schedule
    forecast = schedule.forecast
    return {
        "outcome": forecast.outcome,
        "interrupted": result.interrupted,
        "method": forecast.method,
        "objective": forecast.objective,
        "makespan_ns": forecast.makespan_ns,
        "span_ns": forecast.span_ns,
        "lower_bound_ns": forecast.lower_bound_ns,
        "bound": forecast.bound,
        "gap": gap(schedule),
        "bubble_fraction": forecast.bubble_fraction,
        "peak_bytes": [device.peak_bytes for device in schedule.devices],
        "host_bytes": [device.host_bytes for device in schedule.devices],
        "cap_bytes": schedule.setup.cap_bytes,
        "host_cap_bytes": schedule.setup.host_cap_bytes,
        "devices": schedule.setup.devices,
        "stages": len(schedule.stages),
        "placement": result.placement,
        "microbatches": schedule.setup.microbatches,
        "num_offloads": count(schedule, "offload"),
        "num_recomputes": count(schedule, "recompute"),
        "wall_s": result.wall_s,
        "digest": schedule.digest,
        "baselines": {
            name: {
                "makespan_ns": baseline.makespan_ns,
                "peak_bytes": baseline.peak_bytes,
                "fits": baseline.fits,
                **({"reason": baseline.reason} if baseline.reason else {}),
            }
            for name, baseline in forecast.baselines.items()
        },
    }


@cli.command()
@click.argument("schedule_path", metavar="SCHEDULE", type=click.Path(path_type=Path), default=SCHEDULE)
@click.option("--profile", "profile_path", type=click.Path(path_type=Path), help="Check the costs against it, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(schedule_path: Path, profile_path: Path | None, as_json: bool) -> None:
    """Check a schedule from its file alone: complete, ordered, free of deadlock, and never above its caps.

    Needs neither ortools nor torch. Example: optpipe verify schedule.json --profile profile.json
    """
    from optpipe_compiler import ir
    from optpipe_compiler import profile as profiles
    from optpipe_compiler.verify import verify as judge
    from optpipe_compiler.view.violations import render

    schedule = ir.load(schedule_path)
    violations = judge(schedule, profiles.load(profile_path) if profile_path else None)
    if as_json:
        click.echo(msgspec.json.encode({"schedule": str(schedule_path), "violations": violations}))
    elif violations:
        _console().print(render(violations, schedule))
    else:
        peak = max(device.peak_bytes for device in schedule.devices)
        click.echo(f"{schedule_path}: holds. No execution exceeds {peak} bytes on any device.")
    if violations:
        raise Rejected(f"{schedule_path}: {len(violations)} violation{'s' if len(violations) > 1 else ''}")


@cli.command()
@click.argument("schedule_path", metavar="SCHEDULE", type=click.Path(path_type=Path), default=SCHEDULE)
@click.option("--svg", type=click.Path(path_type=Path), help="Write the chart as a picture instead.")
def show(schedule_path: Path, svg: Path | None) -> None:
    """Show what a schedule promises and how good it is.

    Example: optpipe show schedule.json --svg schedule.svg
    """
    from optpipe_compiler import ir
    from optpipe_compiler.files import write_atomically
    from optpipe_compiler.view import svg as picture
    from optpipe_compiler.view.gantt import render as chart
    from optpipe_compiler.view.summary import render

    schedule = ir.load(schedule_path)
    if svg is not None:
        write_atomically(svg, picture.render(schedule))
        click.echo(f"wrote {svg}")
        return
    console = _console()
    console.print(chart(schedule, console.width))
    console.print(render(schedule))


@cli.command()
@click.argument("schedule_path", metavar="SCHEDULE", type=click.Path(path_type=Path), default=SCHEDULE)
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Training steps.")
@click.option("--data", type=click.Path(path_type=Path), multiple=True, help="Text files to train on.")
@click.option("--check", is_flag=True, help="Compare loss and gradients with the unpipelined model first.")
@click.option("--time-scale", type=float, help="Rehearsals: how much slower than forecast [default: 2 s a step].")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def run(schedule_path: Path, as_json: bool, data: tuple[Path, ...], **options: Any) -> None:
    """Replay a schedule: one process per device, real messages, real gradients.

    A schedule of a measured profile trains its model; one of a hand-written profile is rehearsed with emulated layers.

    Example: optpipe run schedule.json --steps 20 --check
    """
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("run needs torch: pip install 'optpipe[runtime]'")
    from optpipe_compiler import ir
    from optpipe_compiler.view.replay import ReplayBar, render
    from runtime_torch.launch import run as replay
    from runtime_torch.text import default_path

    schedule = ir.load(schedule_path)
    _judged(schedule, schedule_path)
    with ReplayBar(_console(stderr=True), schedule, options["steps"]) as bar:
        report = replay(schedule, data_paths=list(data) or [default_path()], on_event=bar.update, **options)
    if report is None:  # a rank of a group that torchrun started: rank 0 prints
        return
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        _console().print(render(report))
    if report.check is not None and not report.check.ok:
        raise Rejected("run --check: loss or gradients differ from the unpipelined model")


def _judged(schedule: Any, path: Path) -> None:
    """Refuse to run what `verify` rejects."""
    from optpipe_compiler.verify import verify as judge

    violations = judge(schedule)
    if violations:
        raise Rejected(f"{path}: not run, verify rejects it: {violations[0].message} (optpipe verify {path})")


if __name__ == "__main__":
    main()
