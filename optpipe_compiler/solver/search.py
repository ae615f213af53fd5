"""The parent's side of searches: one child process that serves them, ended in time."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from optpipe_compiler.solver.worker import Event, Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

GRACE_S = 1.0
"""How much longer than its limit a search may take before its process is killed."""


class Searcher:
    """A context that keeps a solver process; a search that had to be killed costs the next one a new process."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.events: queue.Queue[Event | None] = queue.Queue()
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by __exit__)

    def __enter__(self) -> Searcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self.errors.close()

    def last_words(self) -> str:
        """Return the last line that a child wrote to stderr."""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no message")

    def search(self, request: Request, on_event: Callable[[Event], None]) -> str:
        """Run `request`, calling `on_event` for each Event; return the final status name.

        The child is killed when it overruns its time limit (status "KILLED") or when `on_event` raises, as it does on
        KeyboardInterrupt. A child that dies by itself, out of memory say, gives "DIED".
        """
        stop_at = time.monotonic() + request.time_limit_s + GRACE_S
        done = False
        try:
            self._send(request)
            while True:
                left = stop_at - time.monotonic()
                if left <= 0 and not request.reproducible:
                    return "KILLED"
                try:
                    event = self.events.get(timeout=min(0.5, max(0.01, left)) if left > 0 else 0.5)
                except queue.Empty:
                    on_event(Event("tick"))
                    continue
                if event is None:
                    return "DIED"
                on_event(event)
                if event.kind == "end":
                    done = True
                    return event.text
        finally:
            if not done:
                self.close()

    def _send(self, request: Request) -> None:
        if self.child is None:
            self.events = queue.Queue()
            self.child = subprocess.Popen(
                [sys.executable, "-m", "optpipe_compiler.solver.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            threading.Thread(target=_read, args=(self.child, self.events), daemon=True).start()
        assert self.child.stdin is not None
        try:
            pickle.dump(request, self.child.stdin)
            self.child.stdin.flush()
        except BrokenPipeError:
            self.events.put(None)

    def close(self) -> None:
        """End the child."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            for pipe in (self.child.stdin, self.child.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # what was not sent to a dead child is of no use
                        pipe.close()
            self.child = None


def _read(child: subprocess.Popen[bytes], events: queue.Queue[Event | None]) -> None:
    assert child.stdout is not None
    try:
        while True:
            events.put(pickle.load(child.stdout))
    except (EOFError, pickle.UnpicklingError, ValueError, OSError):
        events.put(None)
