"""The parent's side of searches: one process that serves them, ended in time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from optpipe_compiler.processes import Ended, Processes
from optpipe_compiler.solver.worker import Request, SearchEvent, serve

if TYPE_CHECKING:
    from collections.abc import Callable

GRACE_S = 1.0
"""How much longer than its limit a search may take before its process is killed."""


class Searcher:
    """A context that keeps a solver process; a search that had to be killed costs the next one a new process."""

    def __init__(self) -> None:
        self._processes = Processes(keeps_stderr=True)
        self._number: int | None = None
        self.last_words = ""
        """The last line that the process which ended last wrote to stderr."""

    def __enter__(self) -> Searcher:
        self._processes.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def search(self, request: Request, on_event: Callable[[SearchEvent], None]) -> str:
        """Run `request`, calling `on_event` for each SearchEvent; return the final status name.

        The process is killed when it overruns its time limit (status "KILLED") or when `on_event` raises, as it does on
        KeyboardInterrupt. One that dies by itself, out of memory say, gives "DIED".
        """
        stop_at = time.monotonic() + request.limits.time_limit_s + GRACE_S
        done = False
        try:
            if self._number is None:
                self._number = self._processes.start(serve)
            self._processes.send(self._number, request)
            while True:
                left = stop_at - time.monotonic()
                if left <= 0 and not request.limits.reproducible:
                    return "KILLED"
                heard = self._processes.listen(min(0.5, max(0.01, left)) if left > 0 else 0.5)
                if not heard:
                    on_event(SearchEvent())
                for _, event in heard:
                    if isinstance(event, Ended):
                        return "DIED"
                    on_event(event)
                    if event.status is not None:
                        done = True
                        return str(event.status)
        finally:
            if not done:
                self.close()

    def close(self) -> None:
        """End the process."""
        if self._number is not None:
            self.last_words = self._processes.last_words(self._number)
            self._number = None
        self._processes.end()
