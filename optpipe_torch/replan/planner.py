"""The planner's process, as rank 0 sees it: one question at a time, and a deadline for the answer.

A thread sends the question and waits for the answer, so that no step waits for a planner that is starting, starved or
stopped.
"""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass
from threading import Thread
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


@dataclass(frozen=True)
class Lost:
    """The planner is gone; why, as a sentence."""

    why: str


def _serve(line: Connection) -> None:
    """Be the planner; its modules are imported in its process alone."""
    from optpipe_compiler.study.beside import serve

    serve(line)


class Planner:
    """A process that plans; it is started at once, so that no step waits for that."""

    def __init__(self) -> None:
        self.is_alive = False
        self.took_ns = 0
        """What the last answer took."""
        self.start()

    def start(self) -> None:
        """Start the process; again, where it is gone."""
        self._processes = Processes(keeps_stderr=True)
        self._processes.__enter__()
        self._number = self._processes.start(_serve)
        self._talk: Thread | None = None
        self._said: Answer | str | Ended | None = None
        self._deadline_s = 0.0
        self.is_alive = True
        atexit.register(self.end)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return self._talk is not None

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return self._processes.pid(self._number)

    def ask(self, *, schedule: ir.Schedule, time_limit_s: float, **question: Any) -> None:
        """Send a question."""
        self._deadline_s = time.monotonic() + max(LEAST_S, PATIENCE * time_limit_s)
        self._said = None
        self._talk = Thread(target=self._converse, args=(schedule, time_limit_s, question), daemon=True)
        self._talk.start()

    def _converse(self, schedule: ir.Schedule, time_limit_s: float, question: dict[str, Any]) -> None:
        begin = time.monotonic()
        self._processes.send(self._number, (ir.to_text(schedule), time_limit_s, question))
        for _, heard in self._processes.listen():
            self._said = heard
        self.took_ns = round((time.monotonic() - begin) * 1e9)

    def hear(self) -> Answer | str | Lost | None:
        """Return an answer, a sentence on why there is none, or that the planner is lost; None: nothing has come yet.

        Never waits.
        """
        if self._talk is None:
            return None
        if self._talk.is_alive():
            if time.monotonic() <= self._deadline_s:
                return None
            self.end()
            return Lost("the planner gave no answer in time and was ended")
        self._talk = None
        if self._said is None or isinstance(self._said, Ended):
            words = self._processes.last_words(self._number)
            self.end()
            return Lost(f"the planner died: {self._said} ({words})")
        return self._said

    def end(self) -> None:
        """End the process."""
        atexit.unregister(self.end)
        self.is_alive = False
        if self._talk is not None:  # it wakes up when the process is gone
            self._processes.kill(self._number)
            self._talk.join()
            self._talk = None
        self._processes.end()
