"""optpipe explain: what binds in a schedule, from re-solved and bounded variations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from optpipe_compiler.cli.common import PROFILE, SCHEDULE, cache_option, console, jobs_option, json_option, say_json
from optpipe_compiler.errors import Rejected

if TYPE_CHECKING:
    from optpipe_compiler.study.explain import Explanation


@click.command(short_help="Say what binds, and what more memory or bandwidth would save.")
@click.argument("schedule_path", metavar="[SCHEDULE]", type=click.Path(path_type=Path), default=SCHEDULE)
@click.option("--profile", "profile_path", type=click.Path(path_type=Path), default=PROFILE, show_default=True)
@click.option(
    "--time-limit",
    type=float,
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Per search; a change gets up to 3.",
)
@jobs_option
@cache_option
@json_option
def explain(schedule_path: Path, profile_path: Path, time_limit: float, jobs: int, cached: bool, as_json: bool) -> None:
    """Say what binds: where devices idle, and what more memory, faster links and other changes would save.

    Each change is planned from the schedule on, until more time gives little, and bounded: what is found can be had,
    what the bound excludes cannot, and what lies between is not decided.

    Example: optpipe explain schedule.json --profile profile.json --time-limit 5
    """
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents import profile as profiles
    from optpipe_compiler.study import explain as study
    from optpipe_compiler.verify import Violated, check
    from optpipe_compiler.view.explanation import ChangesBar, render

    schedule, costs = ir.load(schedule_path), profiles.load(profile_path)
    try:
        checked = check(schedule, costs)
    except Violated as error:
        raise Rejected(f"{schedule_path}: not explained, verify rejects it with {profile_path}: {error}") from error
    instance = replace(study.instance_of(checked, costs, str(schedule_path), time_limit), cached=cached)
    with ChangesBar(console(stderr=True), len(study.listed(schedule, instance))) as bar:
        explanation = study.explain(checked, instance, jobs, bar.update)
    if as_json:
        say_json(_report(explanation))
    else:
        console().print(render(explanation))


def _report(explanation: Explanation) -> dict[str, Any]:
    """Return what `explain --json` prints."""
    report: dict[str, Any] = msgspec.to_builtins(explanation)
    for said, one in zip(report["what_ifs"], explanation.what_ifs, strict=True):
        said["decided"] = one.decided
    return report
