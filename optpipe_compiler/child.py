"""A process of our own that reads pickled requests from its stdin and streams pickled answers back."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import queue
    from collections.abc import Iterator


def environment() -> dict[str, str]:
    """Return the environment for a Python process that finds the modules that this one finds, in the same order.

    Left to itself it would look for modules in the current folder first: `python -m` and `python -c` do.
    """
    folders = [folder for folder in sys.path if folder and os.pathsep not in folder]
    return os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(folders)}


@contextmanager
def as_environment() -> Iterator[None]:
    """Have multiprocessing start its processes in `environment()`."""
    before = {name: os.environ.get(name) for name in ("PYTHONSAFEPATH", "PYTHONPATH")}
    os.environ.update(environment())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Child:
    """Runs `python -m module`; whatever it sends, and None at its end, goes into `answers` with the given tag."""

    def __init__(self, module: str, answers: queue.Queue[tuple[int, Any]], tag: int = 0) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self.answers, self.tag = answers, tag
        self.last_words = ""
        """After `close`: the last line that the child wrote to stderr."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment(),
        )
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, request: object) -> None:
        """Send a request; a child that is dead counts as one that ends."""
        assert self.process.stdin is not None
        try:
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
        except BrokenPipeError:
            self.answers.put((self.tag, None))

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            while True:
                self.answers.put((self.tag, pickle.load(self.process.stdout)))
        except (EOFError, pickle.UnpicklingError, ValueError, OSError):
            self.answers.put((self.tag, None))

    def close(self) -> None:
        """End the child; once is enough."""
        if self.errors.closed:
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was not sent to a dead child is of no use
                    pipe.close()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        self.last_words = next((line for line in reversed(lines) if line.strip()), "no message")
        self.errors.close()
