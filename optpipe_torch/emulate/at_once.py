"""A CPU as the stream lanes see it: whatever is put on a stream happens at once, in the caller's thread.

So the order, the waits and the memory of the lanes of a GPU can be watched on a CPU, by its allocator.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor, UntypedStorage


class AtOnce:
    """See `streams.Backend`."""

    def compute_stream(self) -> None:
        """There is but one."""

    def new_stream(self) -> None:
        """There is but one."""

    def on(self, stream: None) -> AbstractContextManager[object]:
        """Nothing changes."""
        return nullcontext()

    def record(self, stream: None) -> bool:
        """All of it has happened."""
        return True

    def wait(self, stream: None, event: bool) -> None:
        """It has happened."""

    def empty(self, nbytes: int) -> UntypedStorage:
        """The CPU's memory."""
        return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()

    def copy(self, into: Tensor, of: Tensor) -> None:
        """Now."""
        into.copy_(of)
