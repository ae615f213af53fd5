"""Saved tensors on the host until the backward reads them, as `torch.autograd.graph.save_on_cpu` has them.

Three things are in stock's favour: weights stay where they are (as torchtune's hook has it), a tensor that several
nodes save is copied once, and host buffers are kept for the next microbatch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from collections.abc import Iterable


class HostPool:
    """Buffers on the host by size; on a CPU they are none of the memory that torch's allocator hands out."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = {}

    def take(self, nbytes: int) -> Tensor:
        """Return a buffer of so many bytes."""
        free = self._free.setdefault(nbytes, [])
        if free:
            return free.pop()
        if self._pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(np.empty(nbytes, np.uint8))

    def give(self, buffer: Tensor) -> None:
        """Take it back."""
        self._free[buffer.nbytes].append(buffer)


class _OnHost:
    """A saved tensor's copy; the buffer goes back to the pool with it."""

    __slots__ = ("__weakref__", "buffer", "device", "dtype", "shape")

    def __init__(self, tensor: Tensor, pool: HostPool) -> None:
        self.dtype, self.shape, self.device = tensor.dtype, tensor.shape, tensor.device
        self.buffer = pool.take(tensor.nbytes)
        self.buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        weakref.finalize(self, pool.give, self.buffer)

    def back(self) -> Tensor:
        """Return a copy on the device."""
        found = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return found.copy_(self.buffer.view(self.dtype).view(self.shape))


class Offloaded(nn.Module):
    """A layer whose saved tensors stay on the host."""

    def __init__(self, layer: nn.Module, pool: HostPool) -> None:
        super().__init__()
        self.layer = layer
        self._pool = pool
        self._constants = set(_addresses([*layer.parameters(), *layer.buffers()]))

    def forward(self, x: Tensor) -> Tensor:
        """As the layer."""
        there: dict[tuple[object, ...], _OnHost] = {}
        keep: list[Tensor] = []  # an address stands for one tensor as long as the tensor lives

        def pack(tensor: Tensor) -> Tensor | _OnHost:
            if tensor.untyped_storage().data_ptr() in self._constants or not tensor.numel():
                return tensor
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in there:
                keep.append(tensor)
                there[key] = _OnHost(tensor, self._pool)
            return there[key]

        def unpack(saved: Tensor | _OnHost) -> Tensor:
            return saved.back() if isinstance(saved, _OnHost) else saved

        with saved_tensors_hooks(pack, unpack):
            out = self.layer(x)
        keep.clear()
        there.clear()
        return out  # type: ignore[no-any-return]


def _addresses(tensors: Iterable[Tensor]) -> Iterable[int]:
    return (tensor.untyped_storage().data_ptr() for tensor in tensors)
