"""What a forward saved for its backward: one store per (stage, microbatch) serves keep, offload and recompute.

Autograd hands every tensor that it saves to the store's pack hook and gets a slot back. Slots share *units*, one per
storage, so that views and shared storages are held, counted and copied once. A unit belongs to the layer during whose
forward it was first saved. Taking a unit's storage away (drop, offload, free) really frees the memory, because the
graph refers to slots only; putting an equal one back (recompute, reload) makes all its slots readable again.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from optpipe_compiler.errors import RunFailed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from torch import Tensor, UntypedStorage


class Meter:
    """Bytes of activation storages that live on one device, each storage once however many hold it; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)


class Unit:
    """One saved storage: on the device (`storage`), on the host (`host`), or for the time being nowhere."""

    __slots__ = ("host", "layer", "nbytes", "slots", "storage")

    def __init__(self, layer: int, storage: UntypedStorage) -> None:
        self.layer = layer
        self.nbytes = storage.nbytes()
        self.storage: UntypedStorage | None = storage
        self.host: Tensor | None = None
        self.slots: list[Slot] = []


class Slot:
    """One saved tensor: a geometry on a unit's storage."""

    __slots__ = ("geometry", "index", "layer", "tensor", "unit")

    def __init__(self, index: int, layer: int, unit: Unit, tensor: Tensor) -> None:
        self.index = index
        self.layer = layer
        self.unit = unit
        self.tensor: Tensor | None = tensor
        self.geometry: Geometry | None = None
        """Known once the unit has been taken away."""

    def shape(self) -> Geometry:
        """The slot's geometry, on the device or not."""
        if self.geometry is None:
            assert self.tensor is not None
            self.geometry = _geometry(self.tensor)
        return self.geometry


Geometry = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]


def _geometry(tensor: Tensor) -> Geometry:
    return tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()


def as_bytes(storage: UntypedStorage) -> Tensor:
    """Return a uint8 tensor of shape (nbytes,) over `storage`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class SavedTensorStore:
    """The saved tensors of one stage and microbatch.

    `constants` are addresses of storages that are never stored: parameters and buffers. `compute_stream` is the CUDA
    stream that reads reloaded tensors; None on other devices.
    """

    def __init__(
        self,
        device: torch.device,
        meter: Meter,
        host_meter: Meter,
        constants: Collection[int] = (),
        compute_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.device = device
        self.layer = 0
        """The layer whose forward runs now."""
        self.reads: set[int] | None = None
        """While not None: collects the indices of the slots that a backward reads."""
        self.meter = meter
        self._host_meter = host_meter
        self._constants = constants
        self._compute_stream = compute_stream
        self._slots: list[Slot] = []
        self._units: list[Unit] = []
        self._by_address: dict[int, Unit] = {}

    # -- saving and reading

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within: every tensor that autograd saves goes into the store, under the current `layer`."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._by_address.clear()

    @contextmanager
    def refilling(self, first: int, end: int) -> Iterator[None]:
        """Within: a second forward of layers [first, end) gives their dropped units back, in the order of saving."""
        slots = iter([slot for slot in self._slots if first <= slot.layer < end])

        def pack(tensor: Tensor) -> Tensor:
            if not self._is_constant(tensor):
                self._refill(next(slots, None), tensor, first, end)
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, _identity):
            yield
        if next(slots, None) is not None:
            raise RunFailed(f"recompute of layers {first} to {end - 1} saved fewer tensors than their forward did")

    def _is_constant(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage.data_ptr() in self._constants or storage.nbytes() == 0 or tensor.device != self.device

    def _pack(self, tensor: Tensor) -> Slot | Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        unit = self._by_address.get(address)
        if unit is None:
            if self._is_constant(tensor):
                return tensor.detach()
            unit = Unit(self.layer, storage)
            self._by_address[address] = unit
            self._units.append(unit)
            self.meter.hold(storage)
        slot = Slot(len(self._slots), self.layer, unit, tensor.detach())
        unit.slots.append(slot)
        self._slots.append(slot)
        return slot

    def _unpack(self, handle: Slot | Tensor) -> Tensor:
        if not isinstance(handle, Slot):
            return handle
        if self.reads is not None:
            self.reads.add(handle.index)
        if handle.tensor is None:
            storage = handle.unit.storage
            if storage is None:
                raise RunFailed(f"layer {handle.unit.layer}: a saved tensor was read while it was not on the device")
            assert handle.geometry is not None
            dtype, offset, size, stride = handle.geometry
            handle.tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
        return handle.tensor

    def _refill(self, slot: Slot | None, tensor: Tensor, first: int, end: int) -> None:
        storage = tensor.untyped_storage()
        if slot is None or slot.shape() != _geometry(tensor) or slot.unit.nbytes != storage.nbytes():
            raise RunFailed(f"recompute of layers {first} to {end - 1} did not save what their forward saved")
        if slot.unit.storage is None and first <= slot.unit.layer < end:
            self._attach(slot.unit, storage)

    # -- moving

    def drop(self, first: int, end: int) -> None:
        """Free what layers [first, end) saved; a recompute brings it back."""
        for unit in self._live(first, end):
            self._detach(unit)

    def offload(self, first: int, end: int) -> None:
        """Copy what layers [first, end) saved to the host, each storage once, then free it on the device."""
        units = self._live(first, end)
        pinned = self.device.type == "cuda"
        for unit in units:
            assert unit.storage is not None
            unit.host = torch.empty(unit.nbytes, dtype=torch.uint8, pin_memory=pinned)
            self._host_meter.hold(unit.host.untyped_storage())
            unit.host.copy_(as_bytes(unit.storage), non_blocking=True)
        self._synchronize()
        for unit in units:
            self._detach(unit)

    def reload(self, first: int, end: int) -> None:
        """Allocate on the device, copy back what layers [first, end) offloaded, then free it on the host."""
        units = [unit for unit in self._units if first <= unit.layer < end and unit.host is not None]
        for unit in units:
            assert unit.host is not None
            there = torch.empty(unit.nbytes, dtype=torch.uint8, device=self.device)
            self._attach(unit, there.untyped_storage())
            there.copy_(unit.host, non_blocking=True)
            if self._compute_stream is not None:
                there.record_stream(self._compute_stream)
        self._synchronize()
        for unit in units:
            self._forget_host(unit)

    def keep_only(self, needed: Collection[int]) -> None:
        """Free every unit of which no slot is in `needed` (indices of slots)."""
        for unit in self._live():
            if not any(slot.index in needed for slot in unit.slots):
                self._detach(unit, for_good=True)

    def clear(self) -> None:
        """Free everything, on the device and on the host."""
        for unit in self._live():
            self._detach(unit, for_good=True)
        for unit in self._units:
            self._forget_host(unit)

    # -- asking

    def live_bytes(self, layers: tuple[int, int] | None = None) -> int:
        """Bytes on the device of what `layers` [first, end) (absent: all) saved, each storage once."""
        return sum(unit.nbytes for unit in self._live(*(layers or (None, None))))

    def storages(self) -> Iterable[UntypedStorage]:
        """The storages that are on the device now."""
        return (unit.storage for unit in self._units if unit.storage is not None)

    # -- helpers

    def _live(self, first: int | None = None, end: int | None = None) -> list[Unit]:
        return [
            unit
            for unit in self._units
            if unit.storage is not None and (first is None or unit.layer >= first) and (end is None or unit.layer < end)
        ]

    def _attach(self, unit: Unit, storage: UntypedStorage) -> None:
        self.meter.hold(storage)
        unit.storage = storage

    def _detach(self, unit: Unit, *, for_good: bool = False) -> None:
        assert unit.storage is not None
        self._by_address.pop(unit.storage.data_ptr(), None)
        self.meter.release(unit.storage)
        for slot in unit.slots:
            if not for_good:
                slot.shape()
            slot.tensor = None
        unit.storage = None

    def _forget_host(self, unit: Unit) -> None:
        if unit.host is not None:
            self._host_meter.release(unit.host.untyped_storage())
            unit.host = None

    def _synchronize(self) -> None:
        """Wait for the copies just issued: they must not outlive the storages that they read."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _identity(tensor: Tensor) -> Tensor:
    return tensor
