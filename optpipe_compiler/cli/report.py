"""optpipe report: a schedule as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from optpipe_compiler.cli.common import SCHEDULE, Output, check_outputs, console, is_stdout, json_option, say, say_json
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.documents.ir import BaselineKind, Schedule
    from optpipe_compiler.documents.profile import Profile

BASELINE_KINDS: tuple[BaselineKind, ...] = ("paper", "stock", "composition")


@click.command(short_help="Write one HTML page with the whole schedule to zoom into.")
@click.argument("schedule_path", metavar="[SCHEDULE]", type=click.Path(path_type=Path), default=SCHEDULE)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    help="The profile it was compiled from, to name layers and draw baselines below it.",
)
@click.option(
    "--baseline",
    "wanted",
    multiple=True,
    metavar="NAME",
    help="Draw this baseline; repeat it, or say all. [default: the best of papers, stock, compositions]",
)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A measured trace: of run --trace, or of torch's profiler (one per rank: repeat the option).",
)
@click.option("-o", "--output", type=Output(), default=Path("report.html"), show_default=True)
@json_option
def report(
    schedule_path: Path,
    output: Path,
    profile_path: Path | None,
    wanted: tuple[str, ...],
    traces: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Write one HTML page with the whole schedule to zoom into: ops, what each waited for, memory, the bound.

    Example: optpipe report schedule.json --profile profile.json -o report.html
    """
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.files import write_atomically
    from optpipe_compiler.view.progress import StatusLine
    from optpipe_compiler.view.report import render
    from optpipe_compiler.view.report.trace import measured

    check_outputs(output, as_json=as_json)
    schedule = ir.load(schedule_path)
    if wanted and profile_path is None:
        raise BadInput("--baseline needs the costs to time it with, expected --profile profile.json")
    with StatusLine(console(stderr=True)) as steps:
        ran = measured(traces, schedule) if traces else None
        costs = _costs(schedule, schedule_path, profile_path) if profile_path else None
        below = list(_baselines(schedule, schedule_path, costs, wanted, steps.say)) if costs else []
        steps.say(f"drawing {len(below) + 1} schedules" if below else "drawing the schedule")
        names = [layer.name for layer in costs.expanded_layers()] if costs else ()
        page = render(schedule, below, ran, ran.swaps if ran else (), names)
        write_atomically(output, page)
    if as_json:
        say_json({"schedule": str(schedule_path), "report": str(output)})
    else:
        say(f"wrote {output}", err=is_stdout(output))


def _costs(schedule: Schedule, schedule_path: Path, profile_path: Path) -> Profile:
    """Return the profile; raise BadInput where it is another than the schedule's."""
    from optpipe_compiler.documents import profile as profiles
    from optpipe_compiler.documents.files import check_digest

    costs = profiles.load(profile_path)
    compiled = f"{profile_path}: is not the profile that {schedule_path} was compiled from"
    check_digest(costs.digest(), schedule.provenance.profile_digest, compiled)
    return costs


def _baselines(
    schedule: Schedule, schedule_path: Path, costs: Profile, wanted: tuple[str, ...], tell: Callable[[str], None]
) -> Iterator[Schedule]:
    """Yield baselines for the same instance, the best first; the schedule itself is none."""
    from optpipe_compiler import compiler
    from optpipe_compiler.study.comparison import kept_by, options_for

    names, keep = _chosen(schedule, wanted), kept_by(schedule)
    for number, name in enumerate(names, start=1):
        tell(f"timing baseline {number} of {len(names)}, {name}")
        options = options_for(schedule, name, str(schedule_path), keep)
        yield compiler.compile_schedule(costs, options).uninterrupted().schedule


def _chosen(schedule: Schedule, wanted: tuple[str, ...]) -> list[str]:
    """Return the names of the baselines to draw, the best first, without those that a user has registered."""
    from optpipe_compiler.published import METHODS
    from optpipe_compiler.view.baselines import best, is_itself, ranked

    fits = [name for _, name, baseline in ranked(schedule) if baseline.fits]
    fitting = [name for name in fits if name in METHODS and not is_itself(schedule, name)]
    for name in wanted:
        if name != "all" and name not in fitting:
            some = ", ".join(fitting[:5]) + (", ..." if len(fitting) > 5 else "") or "none"
            why = "does not fit this cap here" if name in schedule.forecast.baselines else "the schedule does not know"
            if name in fits:
                why = "is this schedule itself" if name in METHODS else "optpipe itself does not know"
            raise BadInput(f"--baseline is {name!r}, which {why}; those that fit: {some}")
    if not wanted:
        wanted = tuple(filter(None, (best(schedule), *(best(schedule, (kind,)) for kind in BASELINE_KINDS))))
    return [name for name in fitting if "all" in wanted or name in wanted]
