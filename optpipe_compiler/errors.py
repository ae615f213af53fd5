"""The family of errors that a user can cause; each class owns the exit code of its failure."""

from __future__ import annotations

import reprlib
from typing import Any


class OptPipeError(Exception):
    """Base of all expected failures: its text is one clear sentence for the user."""

    exit_code = 70


class Rejected(OptPipeError):
    """A check said no: `verify` found violations, or `run --check` found a difference."""

    exit_code = 1


class BadInput(OptPipeError):
    """A file or an option is wrong; the text names the file, the JSON path, the value and what was expected."""

    exit_code = 2


class Infeasible(OptPipeError):
    """No schedule fits the caps; the text names the device, the missing bytes and the smallest cap that would do."""

    exit_code = 3

    def __init__(self, text: str, least_mem_bytes: int | None = None, *, is_smallest: bool = False) -> None:
        super().__init__(text)
        self.least_mem_bytes = least_mem_bytes
        """The cap that the text names, which would do; None where none is known."""
        self.is_smallest = is_smallest
        """Whether nothing less would do."""


class NotFound(OptPipeError):
    """The time limit ended before any schedule was found; the instance may still be feasible."""

    exit_code = 4


class RunFailed(OptPipeError):
    """A replay ended early: a rank died, timed out, or the ranks disagree; the text names the rank."""

    exit_code = 5

    def __init__(self, text: str, *, elsewhere: bool = False) -> None:
        super().__init__(text)
        self.elsewhere = elsewhere
        """Whether another rank failed, which says why."""


class MissingDependency(OptPipeError):
    """The command needs a package that is not installed; the text says how to install it."""

    exit_code = 6


def of_kind(name: str, value: Any, kinds: Any, said: str) -> Any:
    """Return the value of an argument; raise BadInput where it is of none of these kinds (as of `isinstance`),
    which are `said`."""
    if not isinstance(value, kinds):
        raise BadInput(f"{name} is {' '.join(reprlib.repr(value).split())}, expected {said}")
    return value


INTERRUPTED = 130
"""Exit code after Ctrl-C when there is no result to return."""


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; the name of its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
