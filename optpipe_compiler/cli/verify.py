"""optpipe verify: the independent judge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from optpipe_compiler.cli.common import SCHEDULE, console, json_option, say, say_json
from optpipe_compiler.errors import Rejected

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.verify import Violation


@click.command(short_help="Check schedules: complete, free of deadlock, within their caps.")
@click.argument("schedule_paths", metavar="[SCHEDULE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--profile", "profile_path", type=click.Path(path_type=Path), help="Check the costs against it, too.")
@json_option
def verify(schedule_paths: tuple[Path, ...], profile_path: Path | None, as_json: bool) -> None:
    """Check schedules from their files alone: complete, ordered, free of deadlock, and never above their caps.

    Without a name it is schedule.json. The answer names what no file can prove, such as that a plan is optimal.
    Needs neither ortools nor torch.

    Example: optpipe verify schedule.json --profile profile.json
    """
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents import profile as profiles
    from optpipe_compiler.verify import not_proved
    from optpipe_compiler.verify import verify as judge

    schedules = {path: ir.load(path) for path in schedule_paths or (SCHEDULE,)}
    profile = profiles.load(profile_path) if profile_path else None
    found = {path: judge(schedule, profile) for path, schedule in schedules.items()}
    claimed = not_proved(profile)
    if as_json:
        verdicts = [
            {"schedule": str(path), "violations": violations, "not_proved": list(claimed)}
            for path, violations in found.items()
        ]
        say_json(verdicts[0] if len(verdicts) == 1 else {"schedules": verdicts})
    else:
        for path, violations in found.items():
            _print(path, schedules[path], violations)
        if not all(found.values()):
            say(f"Taken from the file, not proved: {', '.join(claimed.values())}.")
    rejected = [_count(path, violations) for path, violations in found.items() if violations]
    if rejected:
        raise Rejected(", ".join(rejected))


def _print(path: Path, schedule: Schedule, violations: list[Violation]) -> None:
    from optpipe_compiler.documents.units import show_bytes
    from optpipe_compiler.view.violations import render

    if violations:
        console().print(render(violations, schedule))
    else:
        peak = max(device.peak_bytes for device in schedule.devices)
        say(f"{path}: holds. No execution exceeds {show_bytes(peak)} on any device.")


def _count(path: Path, violations: list[Violation]) -> str:
    return f"{path}: {len(violations)} violation{'s' if len(violations) > 1 else ''}"
