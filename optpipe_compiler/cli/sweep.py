"""optpipe sweep: what memory buys, over caps, microbatches, numbers of devices and GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from optpipe_compiler.cli.common import (
    PROFILE,
    Output,
    Size,
    cache_option,
    check_outputs,
    complete_gpus,
    complete_models,
    console,
    is_stdout,
    jobs_option,
    json_option,
    note,
    refuse_png,
    say,
    say_json,
    units_of,
    units_options,
    write,
)
from optpipe_compiler.cli.estimate import (
    ESTIMATED,
    chosen,
    dtype_option,
    estimate_options,
    granularity_option,
    load_model,
    refuse,
)
from optpipe_compiler.errors import BadInput, Infeasible, NotFound

if TYPE_CHECKING:
    from optpipe_compiler.costs.models import Architecture
    from optpipe_compiler.study.planned import Instance
    from optpipe_compiler.study.sweep import Sweep, SweptCosts

FOR_ESTIMATES = (
    "model", "gpu", "seq", "microbatch_size", "tp", "dp", "links", "dtype", "attention", "accumulation", "granularity",
)  # fmt: skip


@click.command(short_help="Plan for a range of caps: how throughput grows with memory.")
@click.argument("profile_path", metavar="[PROFILE]", type=click.Path(path_type=Path), required=False)
@click.option("--mem", "mems", required=True, metavar="FROM:TO:COUNT", help="Caps: 10GB:80GB:8, or 10GB,20GB,40GB.")
@click.option("--microbatches", metavar="N[,N...]", help="Microbatches per step [default: 4 per device].")
@click.option("--devices", metavar="N[,N...]", help="Pipeline devices [default: the profile's; estimated: 8].")
@click.option(
    "--model",
    metavar="CONFIG",
    shell_complete=complete_models,
    help="Instead of PROFILE: a model as in profile --model.",
)
@click.option(
    "--gpu", metavar="GPU[,GPU...]", shell_complete=complete_gpus, help="Its GPUs, to be compared, as in profile --gpu."
)
@click.option("--seq", type=click.IntRange(min=1), help="Estimate: sequence length [default: 4096].")
@click.option("--microbatch-size", type=click.IntRange(min=1), help="Estimate: [default: 1].")
@estimate_options
@dtype_option("bf16", "fp16", help="Estimate: weights and activations [default: bf16].")
@granularity_option("block", "half", help="Estimate: blocks as layers, or their halves [default: block].")
@click.option("--host-mem", type=Size(), help="Host memory for offloads, all devices [default: the profile's].")
@click.option("--no-offload", is_flag=True)
@click.option("--no-recompute", is_flag=True)
@click.option("--no-split", is_flag=True, help="Only fused backwards.")
@units_options
@click.option(
    "--time-limit",
    type=float,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Per search; a point gets up to 3.",
)
@click.option("--loss", default="2%", show_default=True, help="What may be lost in the answers.")
@jobs_option
@cache_option
@click.option("--svg", type=Output(), help="Draw the picture, too.")
@json_option
@click.option("-o", "--output", type=Output(), default=Path("sweep.json"), show_default=True)
def sweep(
    profile_path: Path | None,
    mems: str,
    loss: str,
    jobs: int,
    cached: bool,
    svg: Path | None,
    as_json: bool,
    output: Path,
    **options: Any,
) -> None:
    """Plan for every cap of a range: how throughput grows with memory, and how much of it is enough.

    Points are written as they are found; the same command continues where it was interrupted, and a larger grid adds
    to what is there. Costs are those of PROFILE, or estimated for each GPU.

    Example: optpipe sweep --model llama-7b --gpu a100-80gb,h100-sxm --mem 10GB:80GB:4

    Example: optpipe sweep profile.json --mem 10GB:80GB:8 --microbatches 16,32 --svg sweep.svg
    """
    from optpipe_compiler import compiler
    from optpipe_compiler.documents.files import write_atomically
    from optpipe_compiler.study import sweep as study
    from optpipe_compiler.view import frontier_svg

    tolerance = _share(loss)
    given = {name: options[name] for name in FOR_ESTIMATES if options[name] is not None}
    grid = study.Grid(
        study.parse_caps(mems, "--mem"),
        study.parse_counts(options["microbatches"], "--microbatches"),
        study.parse_counts(options["devices"], "--devices") or ((ESTIMATED["devices"],) if given else ()),
    )
    refuse_png(svg)
    check_outputs(output, svg, as_json=as_json, reads=None if given else profile_path or PROFILE)
    costs, told = _costs(profile_path, given)
    common = compiler.Options(
        mem_bytes=0,
        host_mem_bytes=options["host_mem"],
        time_limit_s=options["time_limit"],
        offload=not options["no_offload"],
        recompute=not options["no_recompute"],
        split=not options["no_split"],
        **units_of(options["slices"], options["lengths"]),
    )
    asked = study.instances(costs, common, grid, cached=cached)
    found = study.begin(_kept(output), costs, common)
    todo = study.missing(found, asked)
    found, left = _plan(output, found, todo, jobs)
    if _kept(output) is None:
        write(output, found)
    for said in told:
        note(f"optpipe: {said}")
    if svg is not None:
        write_atomically(svg, frontier_svg.render(found))
    if as_json:
        say_json(_report(found, left, tolerance))
    else:
        is_printed = is_stdout(output) or is_stdout(svg)
        _show(found, tolerance, stderr=is_printed)
        click.echo(err=is_printed)
        say("wrote " + " and ".join(str(path) for path in (output, svg) if path is not None), err=is_printed)
    if left:
        points = "1 point is" if left == 1 else f"{left} points are"
        note(f"interrupted: {points} left; the same command continues")
    else:
        _refuse_nothing(found)


def _costs(profile_path: Path | None, given: dict[str, Any]) -> tuple[SweptCosts, list[str]]:
    """Return the costs of the profile, or of the model on each GPU, and what is to be told of the model."""
    from optpipe_compiler.documents import profile as profiles
    from optpipe_compiler.study.sweep import SweptCosts

    if profile_path is not None and given:
        name, value = next(iter(given.items()))
        option = f"--{name.replace('_', '-')}"
        raise BadInput(f"PROFILE is {profile_path} and {option} is {value}, expected a profile or --model and --gpu")
    if not given:
        return SweptCosts.of(profiles.load(profile_path or PROFILE)), []
    if "model" not in given:
        refuse(given, set(), "needs --model")
    model, told = load_model(given["model"])
    return _estimated(model, given), told


def _estimated(model: Architecture, given: dict[str, Any]) -> SweptCosts:
    """Estimate for as many devices as there are layers; fewer of them cost the same, so one profile does for all."""
    from dataclasses import asdict

    from optpipe_compiler.costs import gpus
    from optpipe_compiler.study.sweep import SweptCosts
    from optpipe_torch.estimates.estimate import estimate

    wanted = [gpus.load(name.strip()) for name in given.get("gpu", "").split(",")]
    if len({gpu.name for gpu in wanted}) < len(wanted):
        raise BadInput(f"--gpu is {given['gpu']!r}, expected different GPUs")
    layers = model.layers * (2 if given.get("granularity") == "half" else 1) + 2
    every = [chosen({**given, "devices": layers}, model, gpu) for gpu in wanted]
    first = every[0]
    common = {name: value for name, value in vars(first).items() if name not in ("name", "model", "gpu", "devices")}
    return SweptCosts(
        first.name,
        {one.gpu.name: estimate(one) for one in every},
        first.microbatch_size * first.sequence_length,
        {**asdict(first.model), **common},
        tokens=first.sequence_length,
    )


def _share(text: str) -> float:
    """Read `2%` or `0.02`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise BadInput(f"--loss is {text!r}, expected a share such as 2% or 0.02")
    return value


def _plan(output: Path, found: Sweep, todo: list[Instance], jobs: int) -> tuple[Sweep, int]:
    """Plan until done or interrupted; return what there is and how many points are left."""
    from optpipe_compiler.study.sweep import run
    from optpipe_compiler.view.sweep import SweepBar

    done, left = len(found.points), len(todo)
    with SweepBar(console(stderr=True), done, done + left) as bar:
        try:
            for point, now in run(_kept(output), found, todo, jobs):
                found, left = now, left - 1
                bar.update(point)
        except KeyboardInterrupt:
            if not found.points:
                raise
    return found, left


def _refuse_nothing(found: Sweep) -> None:
    """Raise what `compile` would where no point has a plan."""
    from optpipe_compiler.study.frontier import least_memory
    from optpipe_compiler.view.sweep import enough

    points = found.points
    if any(point.makespan_ns is not None for point in points):
        return
    where = "the one point" if len(points) == 1 else f"any of the {len(points)} points"
    if any(point.outcome == "not found" for point in points):
        raise NotFound(f"no schedule was found within the time limit for {where}")
    least = min(least_memory(points), key=lambda one: one.mem_bytes, default=None)
    if least is not None:
        raise Infeasible(f"nothing fits {where}; {enough(least.mem_bytes, found)}")
    raise Infeasible(f"nothing fits {where}; of the last: {points[-1].reason}")


def _kept(output: Path) -> Path | None:
    """Return the file that holds each point when it is found; what is printed is so once, at the end."""
    return None if is_stdout(output) else output


def _show(found: Sweep, tolerance: float, *, stderr: bool) -> None:
    from optpipe_compiler.view import sweep as view

    out = console(stderr=stderr)
    out.print(view.table(found, out.width))
    out.print()
    for sentence in view.sentences(found, tolerance):
        out.print(sentence)


def _report(found: Sweep, left: int, tolerance: float) -> dict[str, Any]:
    """Return what `sweep --json` prints: the file's content and the answers."""
    from optpipe_compiler.study.frontier import answer

    answers = vars(answer(found.points, tolerance))
    return {**msgspec.to_builtins(found), "points_left": left, "loss": tolerance, **answers}
