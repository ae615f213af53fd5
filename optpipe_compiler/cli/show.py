"""optpipe show: a schedule in the terminal or as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from optpipe_compiler.cli.common import SCHEDULE, console, refuse_png, say
from optpipe_compiler.documents.units import parse_ns, show_ns
from optpipe_compiler.errors import BadInput


@click.command()
@click.argument("schedule_path", metavar="SCHEDULE", type=click.Path(path_type=Path), default=SCHEDULE)
@click.option("--device", "devices", type=int, multiple=True, metavar="N", help="Only this device; may be repeated.")
@click.option("--from", "begin", metavar="TIME", help="Zoom: start at a time such as 12.5ms.")
@click.option("--to", "end", metavar="TIME", help="Zoom: end at a time such as 2s.")
@click.option("--width", type=click.IntRange(min=40), help="Columns of text [default: the window's].")
@click.option("--svg", type=click.Path(path_type=Path), help="Write the chart as a picture instead.")
def show(
    schedule_path: Path,
    devices: tuple[int, ...],
    begin: str | None,
    end: str | None,
    width: int | None,
    svg: Path | None,
) -> None:
    """Show what a schedule does when, what it promises, and where its devices idle.

    Example: optpipe show schedule.json --device 0 --device 1 --from 2ms --to 12.5ms
    """
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.files import write_atomically
    from optpipe_compiler.forecast import analyse
    from optpipe_compiler.view import svg as picture
    from optpipe_compiler.view.gantt import render
    from optpipe_compiler.view.summary import summary

    refuse_png(svg)
    schedule = ir.load(schedule_path)
    for device in devices:
        if device not in range(len(schedule.devices)):
            raise BadInput(f"--device is {device}, {schedule_path} has the devices 0 to {len(schedule.devices) - 1}")
    if svg is not None:
        if devices or begin or end or width:
            raise BadInput("--svg draws the whole schedule, expected it without --device, --from, --to and --width")
        write_atomically(svg, picture.render(schedule))
        say(f"wrote {svg}")
        return
    analysis = analyse(schedule)
    out = console()
    if width is not None:
        out.width = width
    window = _window(begin, end, analysis.begin_ns, analysis.end_ns)
    height = out.height - 1 if out.is_terminal and not devices else None  # one screen, with the line of the command
    colour = out.is_terminal and not out.no_color
    out.print(render(analysis, out.width, devices or None, window, height=height, colour=colour), end="")
    out.print()
    out.print(summary(analysis))


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
