"""optpipe show: a schedule in the terminal or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optpipe_compiler.cli.common import (
    SCHEDULE,
    Output,
    check_outputs,
    console,
    is_stdout,
    json_option,
    note,
    plan_json,
    refuse_png,
    say,
    say_json,
)
from optpipe_compiler.documents.units import parse_ns, printable, show_ns
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from optpipe_compiler.forecast import Analysis


@click.command(short_help="Show a schedule in the terminal: what runs when, and why it idles.")
@click.argument("schedule_path", metavar="[SCHEDULE]", type=click.Path(path_type=Path), default=SCHEDULE)
@click.option("--device", "devices", type=int, multiple=True, metavar="N", help="Only this device; may be repeated.")
@click.option("--from", "begin", metavar="TIME", help="Zoom: start at a time such as 12.5ms.")
@click.option("--to", "end", metavar="TIME", help="Zoom: end at a time such as 2s.")
@click.option("--width", type=click.IntRange(min=40), help="Columns of text [default: the window's].")
@click.option("--svg", type=Output(), help="Write the chart as a picture instead.")
@json_option
def show(
    schedule_path: Path,
    devices: tuple[int, ...],
    begin: str | None,
    end: str | None,
    width: int | None,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Show what a schedule does when, what it promises, and where its devices idle.

    Example: optpipe show schedule.json --device 0 --device 1 --from 2ms --to 12.5ms
    """
    from rich.text import Text

    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.files import write_atomically
    from optpipe_compiler.forecast import analyse
    from optpipe_compiler.verify import rejects
    from optpipe_compiler.view import svg as picture
    from optpipe_compiler.view.gantt import render
    from optpipe_compiler.view.summary import summary

    refuse_png(svg)
    check_outputs(svg, as_json=as_json)
    schedule = ir.load(schedule_path)
    for device in devices:
        if device not in range(len(schedule.devices)):
            raise BadInput(f"--device is {device}, {schedule_path} has the devices 0 to {len(schedule.devices) - 1}")
    rejected = rejects(schedule)
    if svg is not None:
        if devices or begin or end or width:
            raise BadInput("--svg draws the whole schedule, expected it without --device, --from, --to and --width")
        write_atomically(svg, picture.render(schedule))
        if as_json:
            say_json({"schedule": str(schedule_path), "svg": str(svg), "rejected": rejected})
        else:
            if rejected:
                note(f"optpipe: {printable(rejected)}")
            say(f"wrote {svg}", err=is_stdout(svg))
        return
    analysis = analyse(schedule)
    if as_json:
        if devices or begin or end or width:
            raise BadInput("--json has the whole schedule, expected it without --device, --from, --to and --width")
        say_json(_report(analysis, schedule_path, rejected))
        return
    out = console()
    if width is not None:
        out.width = width
    window = _window(begin, end, analysis.begin_ns, analysis.end_ns)
    warning = Text(printable(rejected), style="bold") if rejected else None
    taken = 1 if warning is None else 1 + len(warning.wrap(out, out.width))
    height = out.height - taken if out.is_terminal and not devices else None  # one screen, with the command's line
    colour = out.is_terminal and not out.no_color and out.color_system is not None  # None: TERM=dumb
    if warning is not None:
        out.print(warning)
    out.print(render(analysis, out.width, devices or None, window, height=height, colour=colour), end="")
    out.print()
    out.print(summary(analysis))


def _report(analysis: Analysis, path: Path, rejected: str | None) -> dict[str, Any]:
    """Return what `show --json` prints: what the summary says; the ops are in the file itself."""
    schedule, whole = analysis.schedule, max(1, analysis.end_ns - analysis.begin_ns)
    return {
        "schedule": str(path),
        "rejected": rejected,
        **plan_json(schedule),
        "idle": [{"cause": c.value, "resource": r, "share": share} for (c, r), share in analysis.shares().items()],
        "devices": [
            {
                "device": device.device,
                "idle": analysis.idle_ns(number) / whole,
                "peak_bytes": device.peak_bytes,
                "host_bytes": device.host_bytes,
            }
            for number, device in enumerate(schedule.devices)
        ],
    }


def _window(begin: str | None, end: str | None, first_ns: int, last_ns: int) -> tuple[int, int]:
    """Return the times to show; what people write counts from the start of the schedule."""
    start = first_ns + (parse_ns(begin, "--from") if begin else 0)
    stop = min(last_ns, first_ns + parse_ns(end, "--to")) if end else last_ns
    if start >= stop and (begin or end):
        whole = show_ns(last_ns - first_ns)
        raise BadInput(
            f"--from {begin or 0} to {end or whole} is no time of the schedule, expected a part of 0 to {whole}"
        )
    return start, stop
