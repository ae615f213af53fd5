"""The planner's process, as rank 0 sees it: one question at a time, and a deadline for the answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from optpipe_compiler.documents import ir
from optpipe_compiler.processes import Ended, Processes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from optpipe_compiler.study.beside import Answer

PATIENCE = 20
"""How many times its time limit a search may take, at the lowest priority, before the planner is given up."""
LEAST_S = 120.0
"""What it may take at least: a first search may have to compile the planner's machine."""


def _serve(line: Connection) -> None:
    """Be the planner; its modules are imported in its process alone."""
    from optpipe_compiler.study.beside import serve

    serve(line)


class Planner:
    """A process that plans; it is started at once, so that no step waits for that."""

    def __init__(self) -> None:
        self._processes = Processes(keeps_stderr=True)
        self._processes.__enter__()
        self._number = self._processes.start(_serve)
        self._asked_s: float | None = None
        self._deadline_s = 0.0
        self.is_alive = True
        self.took_ns = 0
        """What the last answer took."""

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return self._asked_s is not None

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return self._processes.pid(self._number)

    def ask(self, *, schedule: ir.Schedule, time_limit_s: float, **question: Any) -> None:
        """Send a question."""
        self._asked_s = time.monotonic()
        self._deadline_s = self._asked_s + max(LEAST_S, PATIENCE * time_limit_s)
        self._processes.send(self._number, (ir.to_text(schedule), time_limit_s, question))

    def hear(self) -> Answer | str | None:
        """Return an answer, or a sentence on what went wrong; None: nothing has come yet. Never waits."""
        if not self.is_alive:
            return None
        for _, heard in self._processes.listen(0.0):
            if isinstance(heard, Ended):
                words = self._processes.last_words(self._number)
                self.end()
                return f"the planner died: {heard} ({words}); training goes on with the present schedule"
            assert self._asked_s is not None
            self.took_ns = round((time.monotonic() - self._asked_s) * 1e9)
            self._asked_s = None
            return heard  # type: ignore[no-any-return]
        if self._asked_s is not None and time.monotonic() > self._deadline_s:
            self.end()
            return "the planner gave no answer in time and was ended; training goes on with the present schedule"
        return None

    def end(self) -> None:
        """End the process."""
        self.is_alive, self._asked_s = False, None
        self._processes.end()
