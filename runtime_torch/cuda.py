"""CUDA as the stream lanes see it."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING

import torch

from optpipe_compiler.errors import RunFailed
from runtime_torch.streams import Backend

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor, UntypedStorage


class Cuda(Backend):
    """Streams, events and memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute_stream(self) -> torch.cuda.Stream:
        """The current stream."""
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> torch.cuda.Stream:
        """A stream of its own."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Make `stream` the current one."""
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event without time."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """On the device; the host goes on."""
        stream.wait_event(event)

    def is_over(self, event: torch.cuda.Event) -> bool:
        """Without waiting."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def pause(self) -> None:
        """Let other threads of the host have a turn: a sleep lasts as long as some kernels do."""
        time.sleep(0)

    def empty(self, nbytes: int) -> UntypedStorage:
        """From the current stream's pool."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device).untyped_storage()

    def copy(self, into: Tensor, of: Tensor) -> None:
        """Asynchronous, as the host side is pinned."""
        into.copy_(of, non_blocking=True)


def pinned(nbytes: int) -> Tensor:
    """Return exactly `nbytes` of pinned memory; torch's own pinned allocator would round up to a power of two."""
    failed = f"{nbytes} bytes of pinned host memory, which the schedule's offloads need, cannot be had"
    try:
        slab = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise RunFailed(failed) from error
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(slab.data_ptr(), nbytes, 0))
    if code:
        raise RunFailed(f"{failed}: cudaHostRegister says error {code}")
    weakref.finalize(slab.untyped_storage(), runtime.cudaHostUnregister, slab.data_ptr())
    return slab
