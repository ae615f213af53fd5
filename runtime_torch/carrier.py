"""Copies of storages between a device and its host, and the accounting that goes with them.

A carrier takes storages away from the device as *host copies* and brings them back. It alone knows when a copy is over,
so it also says when what a copy has read is free: `DirectCarrier` at once, because it waits for its copies;
`streams.StreamCarrier` as soon as the streams themselves are ordered after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runtime_torch import engine

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
        pinned, sizes = self._device.type == "cuda", [storage.nbytes() for storage in storages]
        self._host_meter.count(sum(sizes))
        there = [torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned) for nbytes in sizes]
        self._copy(there, [as_bytes(storage) for storage in storages])
        while storages:
            self._meter.release(storages.pop())
        return [HostCopy([piece]) for piece in there]

    def bring(self, host_copies: list[HostCopy]) -> list[UntypedStorage]:
        """H2D: allocate on the device (held in the meter), copy back, empty the list, and free on the host."""
        pieces = [host_copy.pieces[0] for host_copy in host_copies]
        there = [torch.empty_like(piece, device=self._device) for piece in pieces]
        storages = [tensor.untyped_storage() for tensor in there]
        for storage in storages:
            self._meter.hold(storage)
        self._copy(there, pieces)
        del pieces
        while host_copies:
            self.discard(host_copies.pop())
        return storages

    def discard(self, host_copy: HostCopy) -> None:
        """Free what nobody will ask for."""
        self._host_meter.count(-host_copy.nbytes)

    def _copy(self, there: list[Tensor], here: list[Tensor]) -> None:
        engine.copy_all(there, here)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
