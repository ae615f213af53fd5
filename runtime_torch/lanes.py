"""The lanes of one device on a CPU: worker threads run offloads and reloads in order, with waits between the lanes.

On CUDA there are no such threads; `streams.StreamLanes` puts the same order and waits on streams.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from optpipe_compiler.documents.ir import Op


class Lanes(Protocol):
    """Starts ops when all that they wait for is over. The compute lane is the caller; the others run themselves."""

    def begin(self) -> None:
        """Start a step."""
        ...

    def start(self, op_id: str) -> None:
        """Return once an op of the compute lane may run."""
        ...

    def complete(self, op_id: str) -> None:
        """An op of the compute lane has run; a message has been issued."""
        ...

    def finish(self) -> None:
        """Wait until the step's transfers are over."""
        ...

    def abort(self, error: BaseException) -> None:
        """The compute lane failed: let the transfers end."""
        ...


@dataclass(frozen=True)
class LaneOps:
    """What the lanes of one device run, and what each op waits for."""

    compute: Sequence[Op]
    d2h: Sequence[Op]
    h2d: Sequence[Op]
    waits: Mapping[str, Sequence[str]]
    """By op: the ops of other lanes to be over, and messages to be issued there, before it starts."""
    messages: Mapping[str, Sequence[str]]
    """By op: the messages to be delivered before it starts."""
    deliver: Callable[[str], None]
    """Wait for the delivery of a message that has been issued."""
    is_delivered: Callable[[str], bool]
    """Whether that would not take any waiting."""
    transfer: Callable[[Op], None]
    """Do an offload or a reload."""

    def watched(self) -> frozenset[str]:
        """The ops that an op of another lane waits for."""
        return frozenset(name for names in self.waits.values() for name in names)


class Completions:
    """Which ops of this step have completed (messages: been issued); threads wait on it, and hear of failures."""

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._changed = threading.Condition()
        self._on_failure = on_failure
        self._done: set[str] = set()
        self._failure: BaseException | None = None

    def reset(self) -> None:
        """Start a new step."""
        with self._changed:
            self._done.clear()
            self._failure = None

    def complete(self, op_id: str) -> None:
        """Say that an op is over."""
        with self._changed:
            self._done.add(op_id)
            self._changed.notify_all()

    def fail(self, error: BaseException, *, tell: bool = False) -> None:
        """Wake all who wait; their waits raise `error`. The first failure counts, and is told to `on_failure`."""
        with self._changed:
            first, self._failure = self._failure is None, self._failure or error
            self._changed.notify_all()
        if first and tell and self._on_failure is not None:
            self._on_failure(error)

    def check(self) -> None:
        """Raise what another thread failed with, if any did."""
        if self._failure is not None:
            raise self._failure

    def wait(self, op_ids: Iterable[str]) -> None:
        """Return once all ops have completed."""
        for op_id in op_ids:
            with self._changed:
                self._changed.wait_for(lambda op_id=op_id: op_id in self._done or self._failure is not None)  # type: ignore[misc]
                self.check()


class ThreadLanes:
    """Lanes whose transfers run in one thread per direction and step; an op is over when its call returns."""

    def __init__(self, work: LaneOps, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._work = work
        self._watched = work.watched()
        self._waits = {op_id: names for op_id, names in work.waits.items() if names}
        self._completions = Completions(on_failure)
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Start the threads of the lanes that have ops."""
        self._completions.reset()
        self._threads = [
            threading.Thread(target=self._run, args=(ops,), name=f"optpipe-{name}", daemon=True)
            for name, ops in (("d2h", self._work.d2h), ("h2d", self._work.h2d))
            if ops
        ]
        for thread in self._threads:
            thread.start()

    def start(self, op_id: str) -> None:
        """Wait in the calling thread."""
        self._completions.check()
        if op_id in self._waits:
            self._completions.wait(self._waits[op_id])
        for name in self._work.messages[op_id]:
            self._work.deliver(name)

    def complete(self, op_id: str) -> None:
        """Tell those who wait, if anyone does."""
        if op_id in self._watched:
            self._completions.complete(op_id)

    def finish(self) -> None:
        """Join the threads; raise what one of them failed with."""
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._completions.check()

    def abort(self, error: BaseException) -> None:
        """Wake the threads."""
        self._completions.fail(error)

    def _run(self, ops: Sequence[Op]) -> None:
        try:
            for op in ops:
                self.start(op.id)
                self._work.transfer(op)
                self.complete(op.id)
        except BaseException as error:
            self._completions.fail(error, tell=True)
