"""Child processes of a process, from /proc, and scripts that run in processes forked from one with torch."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from types import ModuleType
from typing import TYPE_CHECKING

from optpipe_compiler.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from subprocess import Popen

STARTED: list[Callable[[], None]] = []
"""What ends each script of the present test, if it still runs; `conftest.no_script_outlives_its_test` calls them."""
HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def children(pid: int | None = None) -> list[int]:
    """Return the living children of `pid`, by default of this process, but for Python's own helpers.

    Its resource tracker and its fork server start with the first processes and live as long as their parent.
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


class Script:
    """A script in a process that has imported torch already, which takes seconds; to be used as a subprocess.Popen."""

    def __init__(self, code: str, arguments: list[str], environment: dict[str, str]) -> None:
        from optpipe_torch.launch.run import context

        self.returncode: int | None = None
        self._folder = tempfile.mkdtemp()
        self._processes = Processes(context(training=True))
        self._processes.__enter__()
        self._number = self._processes.start(_run_script, code, arguments, environment, self._folder)
        STARTED.append(self.end)

    def kill(self) -> None:
        """End it."""
        self._processes.kill(self._number)

    def end(self) -> None:
        """End it and leave nothing of it; more than once is harmless."""
        self._processes.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; return what it has written to stdout and stderr."""
        heard = self._processes.listen(timeout)
        self._processes.end()
        said = tuple(Path(self._folder, name).read_text() for name in STREAMS)
        self.end()
        if not heard:
            raise TimeoutExpired("a script", timeout, *said)
        self.returncode = heard[0][1].code
        return said


def started(process: Popen[str]) -> Popen[str]:
    """Return the process, which ends with the present test if it still runs."""

    def end() -> None:
        with process:  # which closes its streams and waits for it
            process.kill()

    STARTED.append(end)
    return process


def end_started() -> None:
    """End the scripts that still run."""
    while STARTED:
        STARTED.pop()()


STREAMS = ("stdout", "stderr")


def _run_script(line: Connection, code: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    for number, name in enumerate(STREAMS, 1):
        with Path(folder, name).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<script>", "exec"), main.__dict__)
