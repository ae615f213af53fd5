"""Counts activation bytes on one device or host, each storage once however many hold it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import UntypedStorage

GPU_BLOCK_BYTES = 512
"""torch's allocator for GPUs gives out multiples of this (its `kMinBlockSize`), for scalars, too."""


def rounded_up(nbytes: int, block_bytes: int) -> int:
    """Return the multiple of `block_bytes` that `nbytes` take."""
    return -(-nbytes // block_bytes) * block_bytes


class Meter:
    """Bytes of activation storages that live on one device, each storage once however many hold it; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector of garbage may release within
        self._holders: dict[int, tuple[int, int]] = {}
        self.current_bytes = 0
        self.peak_bytes = 0

    def hold(self, storage: UntypedStorage, nbytes: int | None = None) -> None:
        """Count `storage` from now on (as `nbytes` where it stands for more); the holder keeps it until `release`."""
        key = storage.data_ptr()
        with self._lock:
            holders, size = self._holders.get(key, (0, storage.nbytes() if nbytes is None else nbytes))
            self._holders[key] = holders + 1, size
            if holders == 0:
                self._add(size)

    def release(self, storage: UntypedStorage) -> None:
        """Undo one `hold`; the bytes stop counting with the last holder."""
        key = storage.data_ptr()
        with self._lock:
            holders, size = self._holders.pop(key)
            if holders > 1:
                self._holders[key] = holders - 1, size
            else:
                self._add(-size)

    def holders(self, storage: UntypedStorage) -> int:
        """Return how many hold `storage`."""
        return self._holders[storage.data_ptr()][0]

    def forget(self) -> None:
        """Nobody holds anything any more."""
        with self._lock:
            self._holders.clear()
            self.current_bytes = 0

    def count(self, nbytes: int) -> None:
        """Add bytes that no storage stands for (rehearsal); negative to take them away."""
        with self._lock:
            self._add(nbytes)

    def reset_peak(self) -> None:
        """Let the peak start again from what lives now."""
        with self._lock:
            self.peak_bytes = self.current_bytes

    def _add(self, nbytes: int) -> None:
        self.current_bytes += nbytes
        if self.current_bytes > self.peak_bytes:  # quicker than max()
            self.peak_bytes = self.current_bytes
