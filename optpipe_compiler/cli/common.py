"""What several commands share: argument types, default paths, and writing a file."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optpipe_compiler.documents.units import parse_cap, printable
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console

    from optpipe_compiler.documents.ir import Schedule

PROFILE, SCHEDULE = Path("profile.json"), Path("schedule.json")


QUIET, VERBOSE = "optpipe.quiet", "optpipe.verbose"
"""Keys of click's context, for `-q` and `-v`."""


def add_common_options(command: click.Command) -> None:
    """Give a command and all below it `-h`, `-q` and `-v`."""
    command.context_settings.setdefault("help_option_names", ["-h", "--help"])
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            add_common_options(inner)
    for short, name, key, about in (
        ("-q", "--quiet", QUIET, "No progress and no notes on stderr, only errors."),
        ("-v", "--verbose", VERBOSE, "More on stderr: where defaults come from, each better plan."),
    ):
        option = click.Option(
            [short, name], is_flag=True, expose_value=False, is_eager=True, help=about, callback=_remember(key)
        )
        command.params.append(option)


def _remember(key: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            context.meta[key] = True

    return remember


def is_said(key: str) -> bool:
    """Whether `-q` or `-v` was given."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(key))


class Size(click.ParamType[int]):
    """An amount of memory such as 40GB or 37.25GiB, in bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes; the units are those of `units.parse_bytes`."""
        return value if isinstance(value, int) else parse_cap(str(value), param.opts[0] if param else "size")


class Output(click.Path):
    """A file to be written; `-`, which other tools take for the standard output, is refused rather than made a file.

    `replaces` names parameters of the same command whose file it may replace, because it is of the same kind.
    """

    def __init__(self, replaces: Iterable[str] = ()) -> None:
        super().__init__(path_type=Path)
        self.replaces = frozenset(replaces)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value == "-":
            raise BadInput(f"{param.opts[0] if param else 'output'} is '-', expected a file; /dev/stdout prints it")
        return super().convert(value, param, ctx)


STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def is_stdout(path: Path | None) -> bool:
    """Whether a file goes to the standard output: what else there is to say then goes to stderr."""
    return str(path) in STDOUT


def check_outputs(*paths: Path | None, as_json: bool, reads: Path | None = None) -> None:
    """Raise BadInput where a file cannot be written, is also read, or is printed where `--json` or another file is.

    What is read stands on the command line; `reads` is a profile that does not.
    """
    from optpipe_compiler.documents.files import check_writable

    printed = [path for path in paths if is_stdout(path)]
    if printed and as_json:
        raise BadInput(f"--json prints an object, and {printed[0]} would be printed with it: expected a file")
    if len(printed) > 1:
        raise BadInput(f"{printed[0]} is named for several files, expected it for one")
    for path in filter(None, paths):
        check_writable(path)
    _refuse_same([path for path in paths if path is not None], reads)


def _refuse_same(outputs: Sequence[Path], reads: Path | None) -> None:
    """Raise BadInput where two files to be written are one, or one is a file that the command reads."""
    from optpipe_compiler.documents.files import is_same

    for number, path in enumerate(outputs):
        if any(is_same(path, other) for other in outputs[:number]):
            raise BadInput(f"{path} is named for several files, expected it for one")
    context = click.get_current_context(silent=True)
    given = [] if context is None else [(one, context.params.get(one.name or "")) for one in context.command.params]
    for path in outputs:
        option = next((one for one, value in given if isinstance(one.type, Output) and value == path), None)
        replaces = option.type.replaces if option is not None and isinstance(option.type, Output) else frozenset()
        written = f"{option.opts[0] if option is not None else '-o'} names {path}"
        if reads is not None and is_same(path, reads):
            raise BadInput(f"{written}, which is the profile that is read, expected another file")
        for one, value in given:
            if one.name not in replaces and any(is_same(path, file) for file in _files(one, value)):
                what = f"{one.opts[0]} names, too"
                if isinstance(one, click.Argument):
                    what = f"is the {(one.metavar or 'file').strip('[].').lower()} that is read"
                raise BadInput(f"{written}, which {what}, expected another file")


FILE_OR_NAME = ("model", "gpu")
"""Options that take a name that is known, or a file; or several, with commas between them."""


def _files(parameter: click.Parameter, value: Any) -> list[Path]:
    """Return what a parameter names that is read, if it names files."""
    if value is None or isinstance(parameter.type, Output):
        return []
    if isinstance(parameter.type, click.Path):
        return list(value) if isinstance(value, tuple) else [value]
    return [Path(name.strip()) for name in value.split(",")] if parameter.name in FILE_OR_NAME else []


class Positive(click.FloatRange):
    """A finite number above 0."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number: float = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{number} is not finite.", param, ctx)
        return number


@dataclass
class JsonObject:
    """The object of `--json` in this call: whether it is asked for, and whether it is out already."""

    is_asked: bool = False
    is_printed: bool = False


JSON = JsonObject()


def _asked(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    JSON.is_asked = JSON.is_asked or value
    return value


json_option = click.option(
    "--json", "as_json", is_flag=True, is_eager=True, callback=_asked, help="Print one JSON object."
)

jobs_option = click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    show_default="one per core",
    help="Processes that plan at the same time.",
)


def units_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--slices` and `--lengths`; `units_of` reads what they say."""
    lengths = click.option(
        "--lengths", type=click.Path(path_type=Path), help="File with the tokens of each microbatch."
    )
    slices = click.option(
        "--slices", metavar="N|auto", default="1", show_default=True, help="Slices of every sequence; auto: searched."
    )
    return slices(lengths(command))


def units_of(slices: str, lengths: Path | None) -> dict[str, Any]:
    """Return what `--slices` and `--lengths` mean, as compiler.Options has it."""
    return {
        "slices": _number_of_slices(slices),
        "lengths": None if lengths is None else read_lengths(lengths),
    }


def _number_of_slices(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise BadInput(f"--slices is {text!r}, expected a number, or auto")
    return int(text)


def read_lengths(path: Path) -> tuple[int, ...]:
    """Return the tokens of each microbatch that a file lists, with blanks, commas or line ends between them."""
    from optpipe_compiler.documents.files import read_text

    words = read_text(path).replace(",", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit() or len(word) > 9 or not int(word):
            raise BadInput(
                f"{path}: has {word[:40]!r}, expected the tokens of each microbatch: whole numbers from 1 on"
            )
    if not words:
        raise BadInput(f"{path}: is empty, expected the tokens of each microbatch")
    return tuple(map(int, words))


cache_option = click.option(
    "--no-cache", "cached", is_flag=True, flag_value=False, default=True, help="Plan anew, and keep no plan."
)


def complete_methods(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return names and kinds of schedules that begin so, behind the last comma."""
    from optpipe_compiler.published import METHODS

    kinds = ["all", *dict.fromkeys(method.kind for method in METHODS.values())] if parameter.name == "methods" else []
    return _completed(incomplete, [*kinds, *METHODS])


def complete_gpus(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return names of GPUs that begin so."""
    from optpipe_compiler.costs import gpus

    return _completed(incomplete, gpus.presets())


def complete_models(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return names of models that begin so."""
    from optpipe_compiler.costs import models

    return _completed(incomplete, models.presets())


def _completed(incomplete: str, names: Iterable[str]) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in names if name.startswith(last)]


def refuse_png(path: Path | None) -> None:
    """Raise BadInput for a picture in a format that is not written."""
    if path is not None and path.suffix.lower() == ".png":
        raise BadInput(f"{str(path)!r} is a PNG, expected an .svg, which browsers show and other tools convert")


def console(*, stderr: bool = False) -> Console:
    """Return the terminal, or the pipe, that a command prints to; a closed pipe is left to `main`."""
    from optpipe_compiler.view.terminal import Terminal

    return Terminal(stderr=stderr, quiet=stderr and is_said(QUIET))


def silence_torch() -> None:
    """Keep torch from telling on stderr what is none of the user's business; what it is told once torch is there is too
    late."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def say(line: str, *, err: bool = False) -> None:
    """Print one line, whatever the names in it hold."""
    click.echo(printable(line), err=err)


def note(line: str) -> None:
    """Print one line on stderr, unless `-q` was given."""
    if not is_said(QUIET):
        say(line, err=True)


def say_json(answer: Any) -> None:
    """Print one JSON object; what a terminal could act on or not show is escaped, which means the same."""
    import json

    import msgspec

    try:
        text = msgspec.json.encode(answer).decode()
    except UnicodeEncodeError:  # names of files that are not UTF-8
        text = msgspec.json.encode(_escaped(msgspec.to_builtins(answer))).decode()
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a terminal that is not UTF-8
        text = json.dumps(json.loads(text), separators=(",", ":"))
    JSON.is_printed = True
    click.echo(printable(text))


def _escaped(answer: Any) -> Any:
    """Return the same with bytes of names that are no text as a terminal is shown them."""
    if isinstance(answer, dict):
        return {key: _escaped(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [_escaped(value) for value in answer]
    return printable(answer) if isinstance(answer, str) else answer


def plan_json(schedule: Schedule) -> dict[str, Any]:
    """Return what every `--json` says of a schedule: what it reaches, what is proven, what it takes for granted."""
    from optpipe_compiler.forecast.links import link_loads
    from optpipe_compiler.view.baselines import best
    from optpipe_compiler.view.summary import assumptions, counts

    forecast, ops_of = schedule.forecast, counts(schedule)
    return {
        "outcome": forecast.outcome,
        "method": forecast.method,
        "objective": forecast.objective,
        "makespan_ns": forecast.makespan_ns,
        "span_ns": forecast.span_ns,
        "lower_bound_ns": forecast.lower_bound_ns,
        "bound": forecast.bound,
        "gap": forecast.gap,
        "bubble_fraction": forecast.bubble_fraction,
        "microbatches": schedule.setup.microbatches,
        "cap_bytes": schedule.setup.cap_bytes,
        "host_cap_bytes": schedule.setup.host_cap_bytes,
        "num_offloads": ops_of["offload"],
        "num_recomputes": ops_of["recompute"],
        "host_links": list(link_loads(schedule)),
        "best_baseline": best(schedule),
        "assumptions": assumptions(schedule),
    }


def write(path: Path, record: Any) -> None:
    """Write a record as the canonical JSON of its file, at once or not at all."""
    from optpipe_compiler.documents.files import canonical, write_atomically

    write_atomically(path, canonical(record))
