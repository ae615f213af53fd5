"""Saved storages, the tensors on them, and the cheap pieces that make some of them again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from optpipe_compiler.errors import RunFailed
from runtime_torch.engine import changes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, UntypedStorage

    from runtime_torch.carrier import HostCopy
    from runtime_torch.surroundings import Autocast


@dataclass(slots=True, eq=False, weakref_slot=True)
class Holding:
    """One saved storage: on the device (`storage`), on the host (`host_copy`), or for the time being nowhere."""

    layer: int
    nbytes: int
    storage: UntypedStorage | None
    stays: bool
    """Whether other slices read it: it is neither dropped nor offloaded."""
    host_copy: HostCopy | None = None
    slots: list[Slot] = field(default_factory=list)
    region: Region | None = None
    """The cheap piece that makes it again (regions.py)."""
    _whole: Tensor | None = None
    """All of a storage that came back: what lies on it are views of it, so that torch counts changes for all of them
    together."""
    _changes: int = 0
    """How often `_whole` had been changed in place when it came back."""

    def lay(self, geometry: Geometry) -> tuple[Tensor, int]:
        """Return a tensor that lies so on the storage (a copy, of a negative), and how often it was changed in place
        but for changes since that came back, which a backward may have made by way of another tensor."""
        if self._whole is None:
            assert self.storage is not None
            self._whole = _all_of(self.storage, geometry[0])
            self._changes = changes(self._whole)
        found = laid_on(self._whole, geometry)
        return found, changes(found) - (changes(self._whole) - self._changes)

    def let_go(self) -> None:
        """The storage leaves the device."""
        self.storage = self._whole = None


@dataclass(slots=True, eq=False)
class Constant:
    """A saved weight, or a buffer that no forward changes: it stays where it is."""

    layer: int
    tensor: Tensor
    changes: int
    """How often it had been changed in place when it was saved."""

    def check(self) -> None:
        """Raise RunFailed where it has been changed since, as torch does without hooks."""
        if changes(self.tensor) != self.changes:
            raise RunFailed(
                f"layer {self.layer}: a weight or buffer that its backward reads was changed in place after the "
                "forward, by an optimizer that steps in a hook, or by a forward of a later microbatch or a recompute, "
                "expected changes between steps alone"
            )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slot:
    """One saved tensor: a geometry on a holding's storage."""

    layer: int
    holding: Holding
    tensor: Tensor | None
    geometry: Geometry | None = None
    """Known once the holding has been taken away."""
    changes: int = 0
    """How often `tensor` had been changed in place when it was saved, or came back."""

    def give(self, tensor: Tensor) -> None:
        """Keep a tensor."""
        self.changes, self.tensor = changes(tensor), tensor

    def come_back(self) -> None:
        """Lie on the holding's storage again."""
        assert self.geometry is not None
        self.tensor, self.changes = self.holding.lay(self.geometry)

    def check(self) -> None:
        """Raise RunFailed where the tensor has been changed in place since, as torch does without hooks."""
        tensor = self.tensor
        if tensor is not None and changes(tensor) != self.changes:
            raise RunFailed(
                f"layer {self.layer}: a tensor that its backward reads was changed in place after it had been saved, "
                "expected a new tensor; where a backward of another layer changes it, as a function of your own may, "
                "expected a schedule compiled with --no-split"
            )

    def take_away(self) -> None:
        """Keep the geometry alone."""
        self.shape()
        self.tensor = None

    def shape(self) -> Geometry:
        """The slot's geometry, on the device or not."""
        tensor = self.tensor
        if self.geometry is None and tensor is not None:  # another thread may be taking the tensor away
            self.geometry = geometry(tensor)
        assert self.geometry is not None
        return self.geometry


Geometry = tuple[torch.dtype, int, torch.Size, tuple[int, ...], bool, bool]


def geometry(tensor: Tensor) -> Geometry:
    """Return how a tensor lies on its storage, and whether it is the conjugate or the negative of what is there."""
    lies = tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
    return *lies, tensor.is_conj(), tensor.is_neg()


def _all_of(storage: UntypedStorage, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of all numbers of a storage: its bytes, where it does not divide into such numbers."""
    count, rest = divmod(storage.nbytes(), dtype.itemsize)
    if rest:
        return _all_of(storage, torch.uint8)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (count,), (1,))


def laid_on(whole: Tensor, geometry: Geometry) -> Tensor:
    """Return the view that lies so on all of a storage."""
    dtype, offset, size, stride, is_conj, is_neg = geometry
    if whole.dtype != dtype:
        numbers = whole.view(torch.uint8)
        whole = numbers[: len(numbers) // dtype.itemsize * dtype.itemsize].view(dtype)
    found = whole.as_strided(size, stride, offset)
    found = found.conj() if is_conj else found
    return found.neg() if is_neg else found


@dataclass(slots=True, eq=False)
class Region:
    """One cheap piece of one layer and microbatch."""

    layer: int
    function: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    """Slots of the activations among them, the others as they are."""
    needs: list[bool]
    """Of the inputs: whether they need a gradient."""
    begin: int
    """How many holdings the store had before."""
    autocast: Autocast
    slots: list[Slot] = field(default_factory=list)
    """What the piece saved inside."""
    holdings: list[Holding] = field(default_factory=list)
    """What is dropped and made again."""
    out: Tensor | None = None
    """Its result, alive until the layer's end, so that nothing else has its address."""
    changes: int = 0
    """How often the result had been changed in place when the piece returned it."""
    out_holding: Holding | None = None
    """The holding of the result, where something behind the piece saved it."""
