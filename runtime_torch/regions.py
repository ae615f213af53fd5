"""The cheap pieces of a stage and microbatch: what they saved is dropped after their layer's forward and made again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch import engine
from runtime_torch.selective import told_to
from runtime_torch.units import Region, Slot, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import UntypedStorage


class Store(Protocol):
    """What the pieces need of the store of their stage and microbatch (store.py)."""

    device: torch.device
    layer: int
    units: list[Unit]
    slots: list[Slot]

    @property
    def is_refilling(self) -> bool:
        """Whether a recompute runs."""

    def save(self, tensor: Tensor) -> Slot | Tensor:
        """Keep a tensor."""

    def read(self, handle: Slot | Tensor) -> Tensor:
        """Return a kept tensor."""

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is never stored."""

    def refill(self, slot: Slot | None, tensor: Tensor, what: str, units: Collection[Unit]) -> None:
        """Put back what a slot has lost."""

    def put_back(self, unit: Unit, storage: UntypedStorage) -> None:
        """Put back what a unit has lost."""

    def take_off(self, unit: Unit) -> None:
        """Take a unit's storage off the device."""

    def unit_at(self, storage: UntypedStorage) -> Unit | None:
        """Return the unit of a storage."""


class Regions:
    """The cheap pieces of one stage and microbatch, on the saved tensors of its store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._regions: list[Region] = []
        self._unread: dict[Unit, set[Slot]] = {}
        """Of units that were made again: what is still to be read."""
        self.keeps_results = False
        """Whether results stay once they are made again: between the halves of a split backward."""

    def cheap(self, function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> Tensor:
        """In a layer's forward, or in its recompute, which meets the pieces of the forward once more."""
        store = self._store
        kept = tuple(store.save(one) if isinstance(one, Tensor) else one for one in inputs)
        if store.is_refilling:
            with told_to(None):
                return function(*inputs)
        region = Region(store.layer, function, kept, len(store.units))
        region.needs = [isinstance(one, Tensor) and one.requires_grad for one in inputs]
        kind = store.device.type
        region.autocast = (
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.is_autocast_cache_enabled(),
        )
        first = len(store.slots)
        versions = [engine.changes(one) for one in inputs if isinstance(one, Tensor)]
        with told_to(None):
            out = function(*inputs)
        if versions != [engine.changes(one) for one in inputs if isinstance(one, Tensor)]:
            raise BadInput(f"layer {store.layer}: a cheap part changes its input in place, expected a new tensor")
        region.slots = store.slots[first:]
        region.units = store.units[region.begin :]
        region.out = out.detach()
        self._regions.append(region)
        return out

    def end_layer(self, layer: int) -> None:
        """The forward of a layer is over: drop what its pieces made."""
        for region in self._regions:
            if region.layer != layer:
                continue
            if region.out is not None:
                self._settle(region, region.out.untyped_storage())
            for unit in region.units:
                self._store.take_off(unit)

    def _settle(self, region: Region, storage: UntypedStorage) -> None:
        inputs = {handle.unit for handle in _slots_among(region.inputs)}
        region.units = [unit for unit in region.units if unit not in inputs]
        result = self._store.unit_at(storage)
        if result is not None and result not in inputs and result in self._store.units[region.begin :]:
            region.out_unit = result
            if result not in region.units:
                region.units.append(result)
        for unit in region.units:
            unit.region = region
        region.out = None

    def fill(self, region: Region) -> None:
        """Make again what a piece saved, and its result."""
        store = self._store
        given = [store.read(one) if _is_saved(one) else one for one in region.inputs]
        fresh = [
            one.detach().requires_grad_(needs) if isinstance(one, Tensor) else one
            for one, needs in zip(given, region.needs, strict=True)
        ]
        slots = iter(region.slots)

        def pack(tensor: Tensor) -> Tensor:
            if not store.is_constant(tensor):
                store.refill(next(slots, None), tensor, f"a cheap part of layer {region.layer}", region.units)
            return tensor.detach()

        enabled, dtype, cached = region.autocast
        with (
            torch.enable_grad(),
            torch.autocast(store.device.type, dtype, enabled=enabled, cache_enabled=cached),
            saved_tensors_hooks(pack, _same),
            told_to(None),
        ):
            out = region.function(*fresh)
        if next(slots, None) is not None:
            raise RunFailed(f"a cheap part of layer {region.layer} saved fewer tensors than in its forward")
        if region.out_unit is not None and region.out_unit.storage is None:
            store.put_back(region.out_unit, out.untyped_storage())
        for unit in region.units:
            self._unread[unit] = set(unit.slots)

    def fill_all(self) -> None:
        """Make everything again."""
        for region in self._regions:
            if any(unit.storage is None for unit in region.units):
                self.fill(region)

    def has_read(self, slot: Slot) -> None:
        """Drop a unit again when all of it was read."""
        unit = slot.unit
        assert unit.region is not None
        unread = self._unread.get(unit)
        if unread is None:
            return
        unread.discard(slot)
        if not unread and not (self.keeps_results and unit is unit.region.out_unit):
            del self._unread[unit]
            self._store.take_off(unit)

    def let_go(self, finished: Collection[object]) -> None:
        """After the first half of a split backward: pieces that nobody computes again need their inputs no longer."""
        for region in reversed(self._regions):
            result = region.out_unit
            is_there = result is None or result.storage is not None or all(slot in finished for slot in result.slots)
            if is_there and all(slot in finished for slot in region.slots):
                for slot in _slots_among(region.inputs):
                    if slot in slot.unit.slots:
                        slot.unit.slots.remove(slot)
                        slot.tensor = None  # the unit frees its storage without asking this one

    def result_bytes(self) -> int:
        """Bytes of what was made again and is still there."""
        return sum(unit.nbytes for region in self._regions for unit in region.units if unit.storage is not None)


def _is_saved(one: object) -> bool:
    return isinstance(one, Tensor) or hasattr(one, "unit")


def _slots_among(inputs: tuple[Any, ...]) -> list[Slot]:
    return [one for one in inputs if hasattr(one, "unit")]


def _same(tensor: Tensor) -> Tensor:
    return tensor
