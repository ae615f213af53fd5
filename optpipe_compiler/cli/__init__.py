"""The commands, one module each. The only room that opens paths, prints and exits."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, TextIO

import click

from optpipe_compiler import __version__
from optpipe_compiler.cli.advise import advise
from optpipe_compiler.cli.cache import cache
from optpipe_compiler.cli.common import JSON, add_common_options, say, say_json
from optpipe_compiler.cli.compare import compare
from optpipe_compiler.cli.compile import bounds, compile_command
from optpipe_compiler.cli.defaults import defaults, nearest
from optpipe_compiler.cli.diff import diff
from optpipe_compiler.cli.explain import explain
from optpipe_compiler.cli.export import export
from optpipe_compiler.cli.fmt import fmt
from optpipe_compiler.cli.profile import profile
from optpipe_compiler.cli.report import report
from optpipe_compiler.cli.run import run
from optpipe_compiler.cli.show import show
from optpipe_compiler.cli.sweep import sweep
from optpipe_compiler.cli.verify import verify
from optpipe_compiler.errors import INTERRUPTED, BadInput, Infeasible, OptPipeError, first_line

CLOSED_PIPE = 141
"""What a shell reports of any program whose reader went away: 128 + SIGPIPE."""

EXIT_CODES = """
Exit codes: 0 done, 1 rejected (verify, run --check, fmt --check, diff --exit-code), 2 bad input, or an output that
cannot be written, 3 no schedule fits, 4 none found in time, 5 a replay failed, 6 a package is missing, 70 a defect of
optpipe, 130 interrupted, 141 the reader of the output went away, 143 terminated.
"""


UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of an output that is full or closed, whichever command writes to it."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP: what was started is ended, what is temporary removed, and no result returned."""


def main() -> None:
    """Run the command line; every expected failure is one sentence on stderr and its exit code."""
    if sys.stderr is None:  # closed by the caller; the next file to be opened must not take its number
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 has no blocks and lines: it shows `?`
    ending = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in ending:
        signal.signal(number, _terminate)
    try:
        code = _run()
    finally:
        for number in ending:  # who calls this as a function gets its process back as it was
            signal.signal(number, signal.SIG_DFL)
        _flush_errors()
    if "TORCHELASTIC_RUN_ID" in os.environ and "torch.distributed" in sys.modules:
        _end_rank(code)
    sys.exit(code)


def _end_rank(code: int) -> NoReturn:
    """End a rank of torchrun without shutting Python down.

    Threads of gloo that still let go of what was sent take Python's lock, and a Python that shuts down ends them in a
    way that aborts the process.
    """
    sys.stdout.flush()
    os._exit(code)


def _run() -> int:
    """Run the command line and return its exit code."""
    JSON.is_asked, JSON.is_printed = "--json" in sys.argv, False
    try:
        if sys.stdout is None:
            raise BadInput("the output is closed, expected one that can be written to, such as /dev/null")
        code = cli(standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except OptPipeError as error:
        least = error.least_mem_bytes if isinstance(error, Infeasible) else None
        return _fail(str(error) + _origin(str(error)), error.exit_code, least)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        return _answer(error.format_message(), error.exit_code)
    except Terminated as end:
        return _fail("terminated", 128 + int(str(end)))
    except (
        BrokenPipeError,
        SystemExit,
    ) as end:  # who reads has seen enough (`show | head`); click exits by itself then
        if isinstance(end, SystemExit) and not end.code:  # a shell has asked for completions
            raise
        return _drop_output(CLOSED_PIPE)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            return _defect(error)
        return _fail(f"the output cannot be written: {error.strerror}", _drop_output(BadInput.exit_code))
    except Exception as error:
        return _defect(error)


def _origin(sentence: str) -> str:
    """Name the file that an option in the sentence has its value from, if it was not typed."""
    typed = {argument.partition("=")[0] for argument in sys.argv}
    for key, where in TAKEN.items():
        if f"--{key} " in sentence and f"--{key}" not in typed:
            return f" ({where})"
    return ""


def _fail(sentence: str, code: int, least_mem_bytes: int | None = None) -> int:
    """Say why on stderr, if that can be written to, and return the exit code."""
    with suppress(OSError):
        say(f"optpipe: {sentence}", err=True)
    return _answer(sentence, code, least_mem_bytes)


def _defect(error: Exception) -> int:
    with suppress(OSError):
        traceback.print_exc()
    return _answer(f"a defect of optpipe: {type(error).__name__}: {first_line(error)}", OptPipeError.exit_code)


def _answer(sentence: str, code: int, least_mem_bytes: int | None = None) -> int:
    """Print what failed as the object of `--json`, unless that is out already; return the exit code.

    Of the ranks that torchrun started the first prints, as it does where nothing fails.
    """
    is_first = "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"
    if JSON.is_asked and not JSON.is_printed and is_first and sys.stdout is not None:
        known = {} if least_mem_bytes is None else {"least_mem_bytes": least_mem_bytes}
        try:
            say_json({"error": {"exit_code": code, "message": sentence, **known}})
            sys.stdout.flush()
        except OSError:
            _drop_output(code)
    return code


def _drop_output(code: int) -> int:
    """Send nowhere what is still to be written to stdout, so that Python does not fail over it at its end."""
    _drop(sys.stdout)
    return code


def _drop(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _flush_errors() -> None:
    """Where stderr cannot be written to, forget what it still holds: Python would end with 120 over it."""
    try:
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise Terminated(str(number))


TAKEN: dict[str, str] = {}
"""Options of this call whose defaults come from a file, and where they stand."""


@click.group(epilog=EXIT_CODES)
@click.version_option(__version__, "-V", "--version", prog_name="optpipe")
@click.pass_context
def cli(context: click.Context) -> None:
    """Plan, verify and replay pipeline-parallel training schedules.

    \b
    optpipe profile                 measure this machine      -> profile.json
    optpipe compile --mem 40GB      plan under a memory cap   -> schedule.json
    optpipe run schedule.json       replay it

    Defaults of options stand in [tool.optpipe] of pyproject.toml.
    """
    TAKEN.clear()
    path, chosen = nearest(Path.cwd()), context.invoked_subcommand or ""
    if path is not None and chosen in cli.commands:
        context.default_map, origins = defaults(cli, chosen, path)
        TAKEN.update(origins)
        if {"-v", "--verbose"} & set(sys.argv):
            for key, where in origins.items():
                say(f"optpipe: --{key} has its default from {where}", err=True)


for command in (
    profile,
    compile_command,
    bounds,
    verify,
    show,
    compare,
    sweep,
    advise,
    explain,
    report,
    diff,
    fmt,
    export,
    run,
    cache,
):
    cli.add_command(command)
add_common_options(cli)
