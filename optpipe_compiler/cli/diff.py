"""optpipe diff: what changed between two schedules."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from optpipe_compiler.cli.common import console, say_json


@click.command()
@click.argument("old_path", metavar="OLD", type=click.Path(path_type=Path))
@click.argument("new_path", metavar="NEW", type=click.Path(path_type=Path))
@click.option(
    "--exit-code", is_flag=True, help="Exit with 1 if a run differs; another forecast alone is no difference."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def diff(context: click.Context, old_path: Path, new_path: Path, exit_code: bool, as_json: bool) -> None:
    """Say in words what changed from one schedule to another.

    Example: optpipe diff old.json schedule.json
    """
    from optpipe_compiler.diff import compare
    from optpipe_compiler.documents import ir
    from optpipe_compiler.view.diff import render, verdict

    difference = compare(ir.load(old_path), ir.load(new_path))
    if as_json:
        report = {"old": str(old_path), "new": str(new_path), "verdict": verdict(difference)}
        say_json(report | msgspec.to_builtins(difference))
    else:
        console().print(render(difference, str(old_path), str(new_path)), end="", soft_wrap=True)
    if exit_code and not difference.same_contract:
        context.exit(1)
