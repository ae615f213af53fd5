"""Many independent questions in parallel: one process each, answers as they come, nothing left behind on Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from optpipe_compiler.child import as_environment
from optpipe_compiler.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Pool(Protocol):
    """Where questions are answered: `answers` or `answers_here`."""

    def __call__(
        self, function: Callable[[Question], Answer], questions: Iterable[Question], jobs: int, /
    ) -> Iterator[tuple[Question, Answer]]:
        """Yield each question with its answer."""


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
    before = set(multiprocessing.active_children())
    with _pool(max(1, jobs)) as pool:
        try:
            yield from _in_turn(pool, function, questions, jobs)
        except BrokenProcessPool as error:
            raise NotFound("a process that plans has died, perhaps for want of memory; fewer jobs need less") from error
        except BaseException:
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise


def _pool(processes: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    with as_environment():  # its queues start Python's resource tracker
        return ProcessPoolExecutor(processes, context, initializer=_leave_ctrl_c_to_parent)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Deliver signals only when a process has been started as a whole: the pool would wait for one that it lost."""
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda number, frame: caught.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in caught:
            os.kill(os.getpid(), late)


def _in_turn(
    pool: ProcessPoolExecutor, function: Callable[[Question], Answer], questions: Iterable[Question], jobs: int
) -> Iterator[tuple[Question, Answer]]:
    """Keep as many questions in flight as there are processes, so that none is begun after an interruption."""
    waiting = iter(questions)
    running: dict[Future[Answer], Question] = {}
    while True:
        for question in islice(waiting, max(1, jobs) - len(running)):
            with as_environment(), _undisturbed():  # a process is started where all others are busy
                running[pool.submit(_answer, function, question)] = question
        if not running:
            return
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(done), done.result()


def _answer(function: Callable[[Question], Answer], question: Question) -> Answer:
    """Answer; being terminated meanwhile is like Ctrl-C to `function`, which ends what it has started."""
    terminated = False

    def interrupt(number: int, frame: object) -> NoReturn:
        nonlocal terminated
        terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        return function(question)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if terminated:
            os.kill(os.getpid(), signal.SIGTERM)


def _leave_ctrl_c_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
