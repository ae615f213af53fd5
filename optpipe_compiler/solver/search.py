"""The parent's side of searches: one child process that serves them, ended in time."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any

from optpipe_compiler.child import Child
from optpipe_compiler.solver.worker import Event, Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

GRACE_S = 1.0
"""How much longer than its limit a search may take before its process is killed."""


class Searcher:
    """A context that keeps a solver process; a search that had to be killed costs the next one a new process."""

    def __init__(self) -> None:
        self.child: Child | None = None
        self.last_words = ""
        """The last line that the child which ended last wrote to stderr."""

    def __enter__(self) -> Searcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def search(self, request: Request, on_event: Callable[[Event], None]) -> str:
        """Run `request`, calling `on_event` for each Event; return the final status name.

        The child is killed when it overruns its time limit (status "KILLED") or when `on_event` raises, as it does on
        KeyboardInterrupt. A child that dies by itself, out of memory say, gives "DIED".
        """
        stop_at = time.monotonic() + request.time_limit_s + GRACE_S
        done = False
        if self.child is None:
            events: queue.Queue[tuple[int, Any]] = queue.Queue()
            self.child = Child("optpipe_compiler.solver.worker", events)
        events = self.child.answers
        try:
            self.child.send(request)
            while True:
                left = stop_at - time.monotonic()
                if left <= 0 and not request.reproducible:
                    return "KILLED"
                try:
                    _, event = events.get(timeout=min(0.5, max(0.01, left)) if left > 0 else 0.5)
                except queue.Empty:
                    on_event(Event("tick"))
                    continue
                if event is None:
                    return "DIED"
                on_event(event)
                if event.kind == "end":
                    done = True
                    return str(event.text)
        finally:
            if not done:
                self.close()

    def close(self) -> None:
        """End the child."""
        if self.child is not None:
            self.child.close()
            self.last_words = self.child.last_words
            self.child = None
