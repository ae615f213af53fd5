"""Many independent questions in parallel: one process each, answers as they come, nothing left behind on Ctrl-C."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from optpipe_compiler.errors import NotFound
from optpipe_compiler.processes import Ended, Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Pool(Protocol):
    """Where questions are answered: `answers` or `answers_here`."""

    def __call__(
        self, function: Callable[[Question], Answer], questions: Iterable[Question], jobs: int, /
    ) -> Iterator[tuple[Question, Answer]]:
        """Yield each question with its answer."""


def pool_for(jobs: int) -> Pool:
    """Return where questions are answered: here for one job, which knows the caller's own schedules, too."""
    return answers if jobs > 1 else answers_here


def answers_here(
    function: Callable[[Question], Answer], questions: Iterable[Question], jobs: int = 1
) -> Iterator[tuple[Question, Answer]]:
    """Yield each question with its answer, one after the other in this process, which needs no importable function."""
    for question in questions:
        yield question, function(question)


def answers(
    function: Callable[[Question], Answer], questions: Iterable[Question], jobs: int
) -> Iterator[tuple[Question, Answer]]:
    """Yield each question with its answer, in the order in which they are found; `function` must be importable.

    A question is drawn when a process is free for it, so that it may depend on answers that there are by then.

    Raises what `function` raises, and NotFound when a process dies. When the caller stops early, by an exception or by
    closing the iterator, all processes end, and whatever they have started.
    """
    waiting, most = iter(questions), max(1, jobs)
    asked: dict[int, Question] = {}
    idle: list[int] = []
    with Processes() as pool:
        while True:
            for question in islice(waiting, most - len(asked)):
                number = idle.pop() if idle else pool.start(_serve, function)
                asked[number] = question
                pool.send(number, question)
            if not asked:
                return
            for number, found in pool.listen():
                if isinstance(found, Ended):
                    raise NotFound("a process that plans has died, perhaps for want of memory; fewer jobs need less")
                if isinstance(found[0], BaseException):
                    raise found[0]
                idle.append(number)
                yield asked.pop(number), found[1]


def _serve(line: Connection, function: Callable[[Any], Any]) -> None:
    """Answer questions with (None, answer) until the parent hangs up, or with (what was raised,)."""
    while True:
        try:
            question = line.recv()
        except EOFError:
            return
        try:
            line.send((None, function(question)))
        except BaseException as error:
            line.send((error,))
