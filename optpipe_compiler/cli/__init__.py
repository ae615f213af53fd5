"""The commands, one module each. The only room that opens paths, prints and exits."""

from __future__ import annotations

import os
import sys

import click

from optpipe_compiler import __version__
from optpipe_compiler.cli.common import say
from optpipe_compiler.cli.compare import compare
from optpipe_compiler.cli.compile import bounds, compile_command
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
from optpipe_compiler.errors import INTERRUPTED, OptPipeError

CLOSED_PIPE = 141
"""What a shell reports of any program whose reader went away: 128 + SIGPIPE."""

EXIT_CODES = """
Exit codes: 0 done, 1 rejected (verify, run --check, fmt --check, diff --exit-code), 2 bad input, 3 no schedule fits,
4 none found in time, 5 a replay failed, 6 a package is missing, 130 interrupted, 141 the reader of the output went
away.
"""


def main() -> None:
    """Run the command line; every expected failure is one sentence on stderr and its exit code."""
    try:
        code = cli(standalone_mode=False)
        sys.stdout.flush()
    except OptPipeError as error:
        say(f"optpipe: {error}", err=True)
        code = error.exit_code
    except click.exceptions.Abort:
        say("optpipe: interrupted", err=True)
        code = INTERRUPTED
    except KeyboardInterrupt:
        say("optpipe: interrupted", err=True)
        code = INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (
        BrokenPipeError,
        SystemExit,
    ) as end:  # who read stdout has seen enough (`show | head`); click exits by itself then
        if isinstance(end, SystemExit) and not end.code:  # a shell has asked for completions
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = CLOSED_PIPE
    sys.exit(code if isinstance(code, int) else 0)


@click.group(epilog=EXIT_CODES)
@click.version_option(__version__, prog_name="optpipe")
def cli() -> None:
    """Plan, verify and replay pipeline-parallel training schedules.

    \b
    optpipe profile                 measure this machine      -> profile.json
    optpipe compile --mem 40GB      plan under a memory cap   -> schedule.json
    optpipe run schedule.json       replay it
    """


for command in (
    profile,
    compile_command,
    bounds,
    verify,
    show,
    compare,
    sweep,
    explain,
    report,
    diff,
    fmt,
    export,
    run,
):
    cli.add_command(command)
