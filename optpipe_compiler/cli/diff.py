"""optpipe diff: what changed between two schedules."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from optpipe_compiler.cli.common import console, json_option, plan_json, say_json
from optpipe_compiler.errors import BadInput


@click.command()
@click.argument("old_path", metavar="OLD", type=click.Path(path_type=Path))
@click.argument("new_path", metavar="NEW", type=click.Path(path_type=Path))
@click.option(
    "--exit-code", is_flag=True, help="Exit with 1 if a run differs; another forecast alone is no difference."
)
@json_option
@click.pass_context
def diff(context: click.Context, old_path: Path, new_path: Path, exit_code: bool, as_json: bool) -> None:
    """Say in words what changed from one schedule to another.

    /dev/null stands for none, as in git.

    Example: optpipe diff old.json schedule.json
    """
    from optpipe_compiler.diff import compare
    from optpipe_compiler.documents import ir
    from optpipe_compiler.view.diff import render, verdict

    if old_path == new_path == Path(os.devnull):
        raise BadInput(f"OLD and NEW are {os.devnull}, expected a schedule")
    if Path(os.devnull) in (old_path, new_path):
        _alone(old_path, new_path, as_json=as_json)
        context.exit(int(exit_code))
    difference = compare(ir.load(old_path), ir.load(new_path))
    if as_json:
        report = {"old": str(old_path), "new": str(new_path), "verdict": verdict(difference)}
        say_json(report | msgspec.to_builtins(difference))
    else:
        console().print(render(difference, str(old_path), str(new_path)), end="", soft_wrap=True)
    if exit_code and not difference.same_contract:
        context.exit(1)


def _alone(old_path: Path, new_path: Path, *, as_json: bool) -> None:
    """Say that a schedule is new, or removed, and what it is."""
    from optpipe_compiler.documents import ir
    from optpipe_compiler.view.diff import render_alone

    is_new = old_path == Path(os.devnull)
    schedule = ir.load(new_path if is_new else old_path)
    said = "new schedule" if is_new else "removed"
    if as_json:
        about = {"old": str(old_path), "new": str(new_path), "verdict": said, "same_contract": False}
        say_json(about | plan_json(schedule))
    else:
        console().print(render_alone(schedule, str(old_path), str(new_path), said), end="", soft_wrap=True)
