"""Child processes of a process, from /proc, and the end of those that a test has started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import Popen

STARTED: list[Callable[[], None]] = []
"""What ends each process of the present test, if it still runs; `conftest.no_process_outlives_its_test` calls them."""
HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"tests/interpreter.py")


def children(pid: int | None = None) -> list[int]:
    """Return the living children of `pid`, by default of this process, but for Python's own helpers and the tests' own.

    Its resource tracker and its fork server start with the first processes and live as long as their parent, and so
    does what starts the interpreters of tests.
    """
    found = []
    for task in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if not any(helper in _command(child) for helper in HELPERS)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:  # it ended meanwhile
        return b""


def press_ctrl_c(pid: int, *, whole_group: bool) -> None:
    """Interrupt a process, or all of its group, as a terminal does; what it does with signals is shown on failure."""
    print([line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(("Sig", "Shd"))])
    (os.killpg if whole_group else os.kill)(pid, signal.SIGINT)


def started(process: Popen[str]) -> Popen[str]:
    """Return the process, which ends with the present test if it still runs."""

    def end() -> None:
        with process:  # which closes its streams and waits for it
            process.kill()

    STARTED.append(end)
    return process


def end_started() -> None:
    """End the processes that still run."""
    while STARTED:
        STARTED.pop()()
