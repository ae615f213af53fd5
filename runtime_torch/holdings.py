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

    def check(self) -> None:
        """Raise RunFailed where the tensor has been changed in place since, as torch does without hooks."""
        tensor = self.tensor
        if tensor is not None and changes(tensor) != self.changes:
            raise RunFailed(
                f"layer {self.layer}: a tensor that its backward reads was changed in place after it had been saved, "
                "expected a new tensor"
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


def laid_on(storage: UntypedStorage, geometry: Geometry) -> Tensor:
    """Return the tensor that lies so on a storage."""
    dtype, offset, size, stride, is_conj, is_neg = geometry
    found = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
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
    out_holding: Holding | None = None
    """The holding of the result, where something behind the piece saved it."""
