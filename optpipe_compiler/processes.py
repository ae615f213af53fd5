"""Processes that we start: each runs one function; all of them are heard, told and ended here.

They find the modules that this process finds, and leave its main script alone. Ctrl-C is the parent's business, and a
process whose parent is gone ends by itself, so that whatever it has started ends as well.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, answer_challenge, wait
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess
    from types import TracebackType

WAITS = forkserver.read_signed.__code__, answer_challenge.__code__
"""What a process does while its server does not yet answer; the second from Python 3.14 on."""
END_S = 2.0
"""How long a process may take to be gone when it has hung up, or was told to end."""


@dataclass(frozen=True)
class Ended:
    """A process is over; a negative code is the number of the signal that ended it."""

    code: int | None

    def __str__(self) -> str:
        if self.code is not None and self.code < 0:
            return f"killed by signal {-self.code} ({signal.Signals(-self.code).name})"
        return f"exit code {self.code}"


class Processes:
    """A context with processes that are numbered from 0 as they are started.

    `context` says how (absent: spawned). With `keeps_stderr` what they write there is not shown but kept for
    `last_words`.
    """

    def __init__(self, context: BaseContext | None = None, *, keeps_stderr: bool = False) -> None:
        self._context = context or multiprocessing.get_context("spawn")
        self._keeps_stderr = keeps_stderr
        self._started: list[BaseProcess] = []
        self._lines: dict[Connection, int] = {}
        """The open ends here of the lines to processes, and their numbers."""
        self._errors: list[IO[bytes] | None] = []

    def __enter__(self) -> Processes:
        atexit.register(self.end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self, function: Callable[..., None], *arguments: object) -> int:
        """Start a process that calls `function(line, *arguments)`, a name of a module; return its number.

        `line` sends what `listen` returns here and receives what is sent here, both pickled.
        """
        here, there = self._context.Pipe()
        errors = tempfile.NamedTemporaryFile(delete=False) if self._keeps_stderr else None  # noqa: SIM115 - end does
        process = self._context.Process(  # type: ignore[attr-defined]  # BaseContext lacks it in typeshed
            target=_begin, args=(there, pickle.dumps((function, arguments)), errors and errors.name)
        )
        number = len(self._started)
        self._started.append(process)
        self._errors.append(errors)
        self._lines[here] = number
        try:
            is_served = self._context.get_start_method() == "forkserver"
            with _surroundings(), _undisturbed(is_served=is_served):
                process.start()
        finally:
            there.close()
        return number

    def send(self, number: int, message: object) -> None:
        """Send to a process; where it is gone, `listen` tells."""
        line = next((line for line, of in self._lines.items() if of == number), None)
        if line is not None:
            with suppress(BrokenPipeError, ConnectionResetError):
                line.send(message)

    def listen(self, seconds: float | None = None, to: Collection[int] | None = None) -> list[tuple[int, Any]]:
        """Return what processes (absent: all) say within `seconds`, each with its number; at its end an `Ended`, once.

        An empty list: nothing was said. Absent `seconds`: as long as it takes.
        """
        lines = [line for line, number in self._lines.items() if to is None or number in to]
        heard: list[tuple[int, Any]] = []
        for line in wait(lines, seconds):
            assert isinstance(line, Connection)
            number = self._lines[line]
            try:
                while line.poll():
                    heard.append((number, line.recv()))
            except (EOFError, OSError, pickle.UnpicklingError):
                del self._lines[line]
                line.close()
                self._started[number].join(END_S)
                heard.append((number, Ended(self._started[number].exitcode)))
        return heard

    def last_words(self, number: int) -> str:
        """Return the last line that a process has written to stderr, where that is kept."""
        errors = self._errors[number]
        assert errors is not None
        errors.seek(0)
        lines = errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no message")

    def pid(self, number: int) -> int | None:
        """Return the id of a process."""
        return self._started[number].pid

    def kill(self, number: int) -> None:
        """End one process; `listen` tells."""
        self._started[number].kill()

    def let_end(self) -> None:
        """Wait a little for processes that have nothing left to do: they put away what their libraries have made."""
        until = time.monotonic() + END_S
        for process in self._started:
            process.join(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """Leave no process, and nothing of theirs; once is enough.

        A process that is starting one of its own ends when it has (see `_undisturbed`); others end at once.
        """
        atexit.unregister(self.end)
        begun = [process for process in self._started if process.pid is not None]
        for process in begun:
            process.terminate()
        until = time.monotonic() + END_S
        for process in begun:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
        for line in self._lines:
            line.close()
        self._lines.clear()
        for errors in self._errors:
            if errors is not None:
                errors.close()
                Path(errors.name).unlink(missing_ok=True)


def _begin(line: Connection, call: bytes, errors: str | None) -> None:
    """Be one of the processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with_parent(0.0)  # a server may be so late that nobody waits any more
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if errors is not None:
        with Path(errors).open("ab") as file:
            os.dup2(file.fileno(), 2)
        Path(errors).unlink()  # it lives as long as it is open: a parent that is killed leaves nothing
    function, arguments = pickle.loads(call)
    function(line, *arguments)
    # Locks of libraries are put away, of which Python would say that they leaked, and no more of its end is run:
    # threads of torch may abort it.
    util._exit_function()  # type: ignore[attr-defined]  # typeshed lacks it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent(seconds: float | None = None) -> None:
    """End this process if its parent ends within so many seconds; absent: as soon as it does."""
    parent = multiprocessing.parent_process()
    if parent is not None and wait([parent.sentinel], seconds):
        os._exit(1)


@contextmanager
def _surroundings() -> Iterator[None]:
    """Within, multiprocessing starts processes that find modules where this one does, in the same order.

    Left to itself Python looks in the current folder first. The main script is not run again: it may be one that has
    no guard against that, and nothing of it is needed.
    """
    folders = [folder for folder in sys.path if folder and os.pathsep not in folder]
    wanted = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(folders)}
    before = {name: os.environ.get(name) for name in wanted}
    main = sys.modules["__main__"]
    os.environ.update(wanted)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _undisturbed(*, is_served: bool) -> Iterator[None]:
    """Deliver signals only when a process has been started as a whole: a half-started one would say so on stderr.

    For Ctrl-C, which a terminal sends to all, that holds in the process, too: it begins with SIGINT blocked. Python's
    resource tracker, which starts with the first process and unblocks SIGINT when it has, is started before that.

    A server that forks (`is_served`) may import for seconds before it starts its first process. What it is to start is
    with it by then, and ends by itself when nobody waits for it: Ctrl-C is not held back then.
    """
    caught: list[int] = []
    may_raise = is_served and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def late(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code not in WAITS:
            frame = frame.f_back
        if may_raise and number == signal.SIGINT and frame is not None:
            raise KeyboardInterrupt
        caught.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    is_main = threading.current_thread() is threading.main_thread()  # no other one may say what signals do
    handlers = {n: signal.signal(n, late) for n in numbers if is_main}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if is_served:  # whose processes have its mask
            forkserver.ensure_running()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in reversed(handlers.items()):  # Ctrl-C last: it would leave the others as they are
            signal.signal(number, handler)
        for each in caught:
            os.kill(os.getpid(), each)
