"""The lanes of one device on a CPU: worker threads run offloads and reloads in order, with waits between the lanes.

On CUDA there are no such threads; `streams.StreamLanes` puts the same order and waits on streams.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optpipe_compiler.documents.ir import Op


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
    sizes: Callable[[Op], Sequence[int]] = lambda _: ()
    """The bytes of each storage that a reload brings back."""
    due: Mapping[str, int] = field(default_factory=dict)
    """By reload: how many ops of the compute lane are forecast to start before the last offload is over that it, or a
    reload before it, waits for."""
    begins: Mapping[str, int] = field(default_factory=dict)
    """By transfer: how many ops of the compute lane are forecast to start before it."""

    def watched(self) -> frozenset[str]:
        """The ops that an op of another lane waits for."""
        return frozenset(name for names in self.waits.values() for name in names)


class ThreadLanes:
    """Lanes whose transfers run in one thread per direction and step; an op is over when its call returns.

    The compute lane is the caller, who starts and completes its ops here; the others run themselves. When a lane fails,
    all waits raise what it failed with, and `on_failure` is told. The first failure counts.
    """

    def __init__(self, work: LaneOps, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._work = work
        self._watched = work.watched()
        self._waits = {op_id: frozenset(names) for op_id, names in work.waits.items() if names}
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._done: set[str] = set()
        """Of the watched ops those that are over in this step; messages that have been issued."""
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._moving: list[threading.Lock] = []
        """Of each thread: held while one of its transfers is under way."""

    def begin(self) -> None:
        """Start the threads of the lanes that have ops."""
        with self._changed:
            self._done.clear()
            self._failure = None
        lanes = [(name, ops) for name, ops in (("d2h", self._work.d2h), ("h2d", self._work.h2d)) if ops]
        self._moving = [threading.Lock() for _ in lanes]
        self._threads = [
            threading.Thread(target=self._run, args=(ops, moving), name=f"optpipe-{name}", daemon=True)
            for (name, ops), moving in zip(lanes, self._moving, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, op_id: str) -> None:
        """Return once an op of the compute lane may run: wait in the calling thread."""
        if names := self._waits.get(op_id):
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None or names <= self._done)
        self._check()
        for name in self._work.messages[op_id]:
            self._work.deliver(name)

    def complete(self, op_id: str) -> None:
        """An op of the compute lane has run, or a message has been issued: tell those who wait, if anyone does."""
        if op_id in self._watched:
            with self._changed:
                self._done.add(op_id)
                self._changed.notify_all()

    def finish(self) -> None:
        """Join the threads; raise what one of them failed with."""
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._check()

    def abort(self, error: BaseException) -> None:
        """The compute lane failed: wake all who wait, and return when no transfer is under way, and none will be: what
        it moves is let go next, and a transfer that went on would give it back once more."""
        self._fail(error)
        for moving in self._moving:
            with moving:
                pass

    def _fail(self, error: BaseException) -> bool:
        """A lane failed: wake all who wait; return whether it is the first failure."""
        with self._changed:
            is_first = self._failure is None
            self._failure = self._failure or error
            self._changed.notify_all()
        return is_first

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, ops: Sequence[Op], moving: threading.Lock) -> None:
        try:
            for op in ops:
                self.start(op.id)
                with moving:
                    self._check()
                    self._work.transfer(op)
                self.complete(op.id)
        except BaseException as error:
            if self._fail(error) and self._on_failure is not None:
                self._on_failure(error)
