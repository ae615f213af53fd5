"""optpipe report: a schedule as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from optpipe_compiler.cli.common import SCHEDULE, say, say_json
from optpipe_compiler.errors import BadInput


@click.command(short_help="Write one HTML page with the whole schedule to zoom into.")
@click.argument("schedule_path", metavar="SCHEDULE", type=click.Path(path_type=Path), default=SCHEDULE)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    help="The profile it was compiled from, to draw the best baseline above it.",
)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A measured trace: of run --trace, or of torch's profiler (one per rank: repeat the option).",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def report(
    schedule_path: Path, output: Path, profile_path: Path | None, traces: tuple[Path, ...], as_json: bool
) -> None:
    """Write one HTML page with the whole schedule to zoom into: ops, what each waited for, memory, the bound.

    Example: optpipe report schedule.json --profile profile.json -o report.html
    """
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.files import check_writable, write_atomically
    from optpipe_compiler.view.report import render
    from optpipe_compiler.view.report.trace import measured

    check_writable(output)
    schedule = ir.load(schedule_path)
    ran = measured(traces, schedule) if traces else None
    above = _best_baseline(schedule, schedule_path, profile_path) if profile_path else None
    write_atomically(output, render(schedule, above, ran))
    if as_json:
        say_json({"schedule": str(schedule_path), "report": str(output)})
    else:
        say(f"wrote {output}")


def _best_baseline(schedule: Any, schedule_path: Path, profile_path: Path) -> Any:
    """Return the best of papers, stock and compositions for the same instance; None if it is the schedule itself."""
    from optpipe_compiler import compiler
    from optpipe_compiler.documents import profile as profiles
    from optpipe_compiler.study.comparison import options_for
    from optpipe_compiler.view.baselines import best as best_baseline

    costs, came_from = profiles.load(profile_path), schedule.provenance
    if costs.digest() != came_from.profile_digest:
        raise BadInput(
            f"{profile_path}: is not the profile that {schedule_path} was compiled from: its digest is "
            f"{costs.digest()[:19]}, expected {came_from.profile_digest[:19]}"
        )
    best = best_baseline(schedule)
    if best is None or best == schedule.forecast.method:
        return None
    options = options_for(schedule, best, str(schedule_path))
    return compiler.compile_schedule(costs, options).schedule
