"""What several commands share: argument types, default paths, and writing a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optpipe_compiler.documents.units import parse_cap, printable
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

PROFILE, SCHEDULE = Path("profile.json"), Path("schedule.json")


class Size(click.ParamType[int]):
    """An amount of memory such as 40GB or 37.25GiB, in bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes; the units are those of `units.parse_bytes`."""
        return value if isinstance(value, int) else parse_cap(str(value), param.opts[0] if param else "size")


jobs_option = click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    show_default="one per core",
    help="Processes that plan at the same time.",
)


def refuse_png(path: Path | None) -> None:
    """Raise BadInput for a picture in a format that is not written."""
    if path is not None and path.suffix.lower() == ".png":
        raise BadInput(f"{str(path)!r} is a PNG, expected an .svg, which browsers show and other tools convert")


def console(*, stderr: bool = False) -> Console:
    """Return the terminal, or the pipe, that a command prints to; a closed pipe is left to `main`.

    Strings are text: no markup is read in them, and characters that could act on a terminal are shown as escapes.
    """
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for part in super().render(renderable, options):
                yield part if part.control else part._replace(text=printable(part.text, keep="\n"))

    return Output(stderr=stderr, highlight=False, markup=False, emoji=False)


def say(line: str, *, err: bool = False) -> None:
    """Print one line, whatever the names in it hold."""
    click.echo(printable(line), err=err)


def say_json(answer: Any) -> None:
    """Print one JSON object; what a terminal could act on is escaped, which means the same in JSON."""
    import msgspec

    click.echo(printable(msgspec.json.encode(answer).decode()))


def write(path: Path, record: Any) -> None:
    """Write a record as the canonical JSON of its file, at once or not at all."""
    from optpipe_compiler.documents.files import canonical, write_atomically

    write_atomically(path, canonical(record))
