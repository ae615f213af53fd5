"""Pinned host memory for offloads: one slab of exactly the bytes that the plan promises, given out in pieces.

A request is served from one gap where one is large enough, else from several, so that it fails only if the sum of all
gaps is too small: the promise is then kept whatever sizes come and go, and in whichever order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.errors import RunFailed
from runtime_torch.carrier import HostCopy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class PinnedPool:
    """`allocate(nbytes)` makes the slab (uint8) when it is first needed."""

    def __init__(self, nbytes: int, allocate: Callable[[int], Tensor]) -> None:
        self._nbytes = nbytes
        self._allocate = allocate
        self._slab: Tensor | None = None
        self._gaps: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []
        """Start and end, by start; no two touch."""

    @property
    def free_bytes(self) -> int:
        """Of all gaps."""
        return sum(end - start for start, end in self._gaps)

    def take(self, nbytes: int) -> HostCopy:
        """Return `nbytes` of the slab; RunFailed where that is more than is free."""
        if nbytes > self.free_bytes:
            raise RunFailed(
                f"an offload needs {nbytes} bytes of pinned host memory, but of the {self._nbytes} bytes that the "
                f"schedule promises only {self.free_bytes} are free: the profile's saved bytes are too small"
            )
        if self._slab is None:
            self._slab = self._allocate(self._nbytes)
        fitting = [gap for gap in self._gaps if gap[1] - gap[0] >= nbytes]
        order = [min(fitting, key=lambda gap: gap[1] - gap[0])] if fitting else list(self._gaps)
        pieces = []
        for start, end in order:
            used = min(nbytes, end - start)
            if used == 0:
                break
            index = self._gaps.index((start, end))
            self._gaps[index : index + 1] = [(start + used, end)] if start + used < end else []
            pieces.append(self._slab[start : start + used])
            nbytes -= used
        return HostCopy(pieces)

    def close(self) -> None:
        """Let the slab go; nothing may be in it, and nothing is taken any more."""
        self._slab, self._nbytes, self._gaps = None, 0, []

    def give(self, host_copy: HostCopy) -> None:
        """Take a host_copy's pieces back."""
        gaps = sorted([*self._gaps, *(_range(piece) for piece in host_copy.pieces)])
        self._gaps = []
        for start, end in gaps:
            if self._gaps and self._gaps[-1][1] == start:
                self._gaps[-1] = self._gaps[-1][0], end
            else:
                self._gaps.append((start, end))


def _range(piece: Tensor) -> tuple[int, int]:
    start = int(piece.storage_offset())
    return start, start + piece.numel()
