"""Copies of storages between a device and its host, and the accounting that goes with them.

A carrier takes storages away from the device as *host copies* and brings them back. It alone knows when a copy is over,
so it also says when what a copy has read is free: `DirectCarrier` at once, because it waits for its copies;
`streams.StreamCarrier` as soon as the streams themselves are ordered after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

    from runtime_torch.meter import Meter


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The bytes of one storage on the host, in one or several pieces (uint8, one dimension)."""

    pieces: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(piece.numel() for piece in self.pieces)


def as_bytes(storage: UntypedStorage) -> Tensor:
    """Return a uint8 tensor of shape (nbytes,) over `storage`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass
class DirectCarrier:
    """Copies on the current stream and returns when they are over; may be used from several threads.

    Device bytes are counted in one meter, host bytes in another.
    """

    _device: torch.device
    _meter: Meter
    _host_meter: Meter

    def take(self, storages: list[UntypedStorage]) -> list[HostCopy]:
        """D2H: copy to the host, empty the list, and free on the device what no one else holds."""
        host_copies = []
        for storage in storages:
            self._host_meter.count(storage.nbytes())
            there = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            host_copies.append(HostCopy([there.copy_(as_bytes(storage), non_blocking=True)]))
        self._finish()
        while storages:
            self._meter.release(storages.pop())
        return host_copies

    def bring(self, host_copies: list[HostCopy]) -> list[UntypedStorage]:
        """H2D: allocate on the device (held in the meter), copy back, empty the list, and free on the host."""
        storages = []
        for host_copy in host_copies:
            there = torch.empty(host_copy.nbytes, dtype=torch.uint8, device=self._device)
            self._meter.hold(there.untyped_storage())
            there.copy_(host_copy.pieces[0], non_blocking=True)
            storages.append(there.untyped_storage())
        self._finish()
        while host_copies:
            self.discard(host_copies.pop())
        return storages

    def discard(self, host_copy: HostCopy) -> None:
        """Free what nobody will ask for."""
        self._host_meter.count(-host_copy.nbytes)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
