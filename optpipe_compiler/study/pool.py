"""Many independent questions in parallel: one process each, answers as they come, nothing left behind on Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from optpipe_compiler.errors import NotFound
from optpipe_compiler.processes import Ended, Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

Question = TypeVar("Question")
Answer = TypeVar("Answer")


def answers(
    function: Callable[[Question], Answer], questions: Sequence[Question], jobs: int
) -> Iterator[tuple[Question, Answer]]:
    """Yield each question with its answer, in the order in which they are found; `function` must be importable.

    Raises what `function` raises, and NotFound when a process dies. When the caller stops early, by an exception or by
    closing the iterator, all processes end, and whatever they have started.
    """
    waiting = list(reversed(questions))
    asked: dict[int, Question] = {}
    with Processes() as pool:
        idle = [pool.start(_serve, function) for _ in range(min(max(1, jobs), len(questions)))]
        while waiting or asked:
            while waiting and idle:
                number = idle.pop()
                asked[number] = waiting.pop()
                pool.send(number, asked[number])
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
