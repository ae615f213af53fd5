"""optpipe compare: schedules side by side, and those of papers, stock and compositions for the same setup."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from optpipe_compiler.cli.common import PROFILE, SCHEDULE, complete_methods, console, jobs_option, json_option, say_json

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.study.comparison import Absent, Comparison
    from optpipe_compiler.study.facts import Facts


@click.command(short_help="Set schedules side by side: time, idle, memory, traffic.")
@click.argument("schedule_paths", metavar="[SCHEDULE]...", type=click.Path(path_type=Path), nargs=-1)
@click.option(
    "--methods",
    shell_complete=complete_methods,
    metavar="all|KIND|NAME[,...]",
    help="Add known schedules for the first one's setup; KIND is paper, stock or composition.",
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    default=PROFILE,
    show_default=True,
    help="Costs for --methods.",
)
@jobs_option
@json_option
def compare(
    schedule_paths: tuple[Path, ...], methods: str | None, profile_path: Path, jobs: int, as_json: bool
) -> None:
    """Set schedules side by side: time, idle, memory, host traffic, recomputation, and whether they are safe.

    Example: optpipe compare schedule.json --methods 1f1b,zb-h1,gis-h --profile profile.json
    """
    from optpipe_compiler.documents import ir
    from optpipe_compiler.study.comparison import chosen_methods
    from optpipe_compiler.study.comparison import compare as side_by_side
    from optpipe_compiler.study.facts import judged
    from optpipe_compiler.view.comparison import render

    names = chosen_methods(methods) if methods is not None else []
    paths = schedule_paths or (SCHEDULE,)
    schedules = [ir.load(path) for path in paths]
    rows = [judged(schedule, str(path)) for schedule, path in zip(schedules, paths, strict=True)]
    more, absent = _published(schedules[0], str(paths[0]), names, profile_path, jobs) if names else ([], [])
    comparison = side_by_side(rows + more, absent)
    if as_json:
        say_json(_report(comparison))
    else:
        out = console()
        out.print(render(comparison, out.width))


def _published(
    schedule: Schedule, name: str, names: list[str], profile_path: Path, jobs: int
) -> tuple[list[Facts], list[Absent]]:
    from optpipe_compiler.documents import profile as profiles
    from optpipe_compiler.study.comparison import Absent, published_rows
    from optpipe_compiler.view.comparison import MethodsBar

    costs = profiles.load(profile_path)
    with MethodsBar(console(stderr=True), len(names)) as bar:
        found = list(published_rows(costs, schedule, name, names, jobs, bar.update))
    rows = [row for row in found if not isinstance(row, Absent)]
    return rows, [row for row in found if isinstance(row, Absent)]


def _report(comparison: Comparison) -> dict[str, Any]:
    """Return what `compare --json` prints."""
    return {
        "best": comparison.best.name if comparison.best else None,
        "differences": comparison.differences,
        "schedules": [
            msgspec.to_builtins(row) | {"per_microbatch_ns": row.per_microbatch_ns, "safe": row.safe}
            for row in comparison.rows
        ],
        "absent": comparison.absent,
    }
