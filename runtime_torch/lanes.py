"""The transfer lanes: worker threads that run a device's offloads and reloads in order, with waits between lanes."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from optpipe_compiler.ir import Op


class Board:
    """Which ops of this step have completed (messages: been issued); threads wait on it, and hear of failures."""

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._changed = threading.Condition()
        self._on_failure = on_failure
        self._done: dict[str, torch.cuda.Event | None] = {}
        self._failure: BaseException | None = None

    def reset(self) -> None:
        """Start a new step."""
        with self._changed:
            self._done.clear()
            self._failure = None

    def complete(self, op_id: str, event: torch.cuda.Event | None = None) -> None:
        """Say that an op is over; on CUDA, over when `event` has passed."""
        with self._changed:
            self._done[op_id] = event
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
        """Return once all ops have completed, on the device too."""
        for op_id in op_ids:
            with self._changed:
                self._changed.wait_for(lambda op_id=op_id: op_id in self._done or self._failure is not None)  # type: ignore[misc]
                self.check()
                event = self._done[op_id]
            if event is not None:
                event.synchronize()


class Lane:
    """One transfer lane of a device: runs `work(op)` for its ops, in a thread of its own for each step.

    On CUDA the work runs on the lane's own stream and must have synchronised with it when it returns.
    """

    def __init__(
        self, name: str, ops: Sequence[Op], work: Callable[[Op], None], board: Board, device: torch.device
    ) -> None:
        self._name = name
        self._ops = ops
        self._work = work
        self._board = board
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin a step."""
        if self._ops:
            self._thread = threading.Thread(target=self._run, name=f"optpipe-{self._name}", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait until the step's transfers are over."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        on_stream: AbstractContextManager[object] = (
            nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )
        try:
            with on_stream:
                for op in self._ops:
                    self._work(op)
        except BaseException as error:
            self._board.fail(error, tell=True)
