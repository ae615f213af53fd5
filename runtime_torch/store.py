"""What a forward saved for its backward: one store per (stage, microbatch) serves keep, offload and recompute.

Autograd hands every tensor that it saves to the store's pack hook and gets a slot back. Slots share *holdings*, one per
storage, so that views and shared storages are held, counted and copied once. A holding belongs to the layer during
whose forward it was first saved. Taking a holding's storage away (drop, offload, free) really frees the memory, because
the graph refers to slots only; putting an equal one back (recompute, reload) makes all its slots readable again.
"""

from __future__ import annotations

import math
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from optpipe_compiler.errors import RunFailed
from runtime_torch import engine
from runtime_torch.holdings import Constant, Geometry, Holding, Slot, geometry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import torch
    from torch import UntypedStorage

    from runtime_torch.meter import Meter
    from runtime_torch.streams import Carrier


_ANEW = (
    ": expected a forward that does the same again; of a compiled layer, one that was not compiled anew in between for "
    "another length or argument, as torch.compile(dynamic=True) has it"
)

Handle = Slot | Constant | Tensor
"""What stands for a saved tensor in the graph; a tensor for itself, as for one of another device."""


@dataclass(eq=False)
class SavedTensorStore:
    """The saved tensors of one stage and microbatch."""

    device: torch.device
    meter: Meter
    _carrier: Carrier
    """Does the copies."""
    _constants: Collection[int] = ()
    """The addresses of storages that are never stored: parameters and buffers."""
    _stays: Collection[int] = ()
    """Those of keys and values that other slices read."""
    _changed: Collection[int] = ()
    """Those of buffers that later forwards change: what is saved of them is a copy."""
    layer: int = 0
    """The layer whose forward runs now."""
    autocast: bool = False
    """Whether autocast runs and keeps its copies of the weights: they are then no more stored than the weights."""
    slots: list[Slot] = field(default_factory=list)
    """In the order of saving."""
    holdings: list[Holding] = field(default_factory=list)
    _by_address: dict[int, Holding] = field(default_factory=dict)
    _passing: set[int] = field(default_factory=set)
    """The addresses of what dropped layers have handed on and later ones still get."""
    _gone: dict[weakref.ref[Holding], tuple[UntypedStorage, list[weakref.ref[Slot]]]] = field(default_factory=dict)
    """What a whole backward frees as it reads it, and has not yet freed: its storage and its slots."""
    _pack_again: Callable[[Tensor], Handle] | None = None
    """In a recompute: what gives dropped holdings back."""

    # -- saving and reading

    def saving(self) -> saved_tensors_hooks:
        """Within: every tensor that autograd saves goes into the store, under the current `layer`."""
        return saved_tensors_hooks(self._pack, self.read)

    @contextmanager
    def refilling(self, first: int, end: int) -> Iterator[None]:
        """Within: a second forward of layers [first, end) gives their dropped holdings back, in the order of saving."""
        slots = [slot for slot in self.slots if first <= slot.layer < end]
        holdings = [holding for holding in self.holdings if first <= holding.layer < end]
        try:
            with self.refilled(slots, holdings, f"recompute of layers {first} to {end - 1}") as self._pack_again:
                yield
        finally:
            self._pack_again = None

    @contextmanager
    def refilled(
        self, slots: Iterable[Slot], holdings: Collection[Holding], what: str
    ) -> Iterator[Callable[[Tensor], Handle]]:
        """Within: what autograd saves, which is what the slots are for in their order, gives the `holdings` among
        theirs their storages back; raise RunFailed where `what` saves something else.

        The graph that is made meanwhile keeps nothing that the store does not.
        """
        left = iter(slots)

        @engine.never_compiled
        def pack(tensor: Tensor) -> Handle:
            tensor = self._lasting(tensor)
            if not self.is_constant(tensor):
                slot = next(left, None)
                if slot is None or not _matches(slot, tensor, whole=slot.holding in holdings):
                    raise RunFailed(f"{what} did not save what the forward saved{_ANEW}")
                if slot.holding.storage is None and slot.holding in holdings:
                    self.put_back(slot.holding, tensor.untyped_storage())
                if slot.holding.storage is not None:
                    return slot
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda handle: SavedTensorStore.read(self, handle)):
            yield pack
        if next(left, None) is not None:
            raise RunFailed(f"{what} saved fewer tensors than the forward did{_ANEW}")

    @property
    def is_refilling(self) -> bool:
        """Whether layers are recomputed now."""
        return self._pack_again is not None

    def save(self, tensor: Tensor) -> Handle:
        """Save a tensor beside those that autograd saves."""
        return self._pack(tensor) if self._pack_again is None else self._pack_again(tensor)

    @engine.never_compiled
    def read(self, handle: Handle) -> Tensor:
        """Return what was saved."""
        if isinstance(handle, Constant):
            handle.check()
            return handle.tensor
        if not isinstance(handle, Slot):
            return handle
        holding = handle.holding
        if handle.tensor is None:
            if holding.storage is None:
                raise RunFailed(
                    f"layer {holding.layer}: a saved tensor was read while it was not on the device: expected a graph "
                    "for each microbatch, not one that several share, as of weights under parametrize.cached()"
                )
            handle.come_back()
        handle.check()
        assert handle.tensor is not None
        return handle.tensor

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is never stored."""
        storage = tensor.untyped_storage()
        return storage.data_ptr() in self._constants or self._is_elsewhere(tensor, storage)

    def _is_elsewhere(self, tensor: Tensor, storage: UntypedStorage) -> bool:
        """Whether its memory is that of another device, of autocast, or none."""
        if storage.nbytes() == 0 or tensor.device != self.device:
            return True
        return self.autocast and self._is_weight_copy(tensor)

    def _is_weight_copy(self, tensor: Tensor) -> bool:
        node = engine.base_of(tensor).grad_fn
        if node is None or node.name() != "ToCopyBackward0":
            return False
        source = getattr(node.next_functions[0][0], "variable", None)
        return source is not None and source.untyped_storage().data_ptr() in self._constants

    def _lasting(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if tensor.untyped_storage().data_ptr() in self._changed else tensor

    @engine.never_compiled
    def _pack(self, tensor: Tensor) -> Handle:
        if self._changed:
            tensor = self._lasting(tensor)
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._constants:
            return Constant(self.layer, tensor, engine.changes(tensor))
        holding = self._by_address.get(address)
        if holding is None:
            if self._is_elsewhere(tensor, storage):
                return tensor.detach()
            holding = Holding(self.layer, storage.nbytes(), storage, address in self._stays)
            self._by_address[address] = holding
            self.holdings.append(holding)
            self.meter.hold(storage)
        slot = Slot(self.layer, holding, None)
        slot.give(tensor.detach())
        if holding.storage is None:  # dropped, but alive as the input of a recompute
            slot.take_away()
        holding.slots.append(slot)
        self.slots.append(slot)
        return slot

    def put_back(self, holding: Holding, storage: UntypedStorage) -> None:
        """The holding's storage is there again."""
        if storage.nbytes() != holding.nbytes:
            raise RunFailed(f"layer {holding.layer}: a saved tensor came back with {storage.nbytes()} bytes")
        self.meter.hold(storage)
        holding.storage = storage

    def holding_at(self, storage: UntypedStorage) -> Holding | None:
        """The holding of a storage that is alive, where a layer has saved it."""
        return self._by_address.get(storage.data_ptr())

    # -- moving

    def drop(self, first: int, end: int, kept: Sequence[Tensor] = (), handed_on: Sequence[Tensor] = ()) -> None:
        """Free what layers [first, end) saved; a recompute from `kept` brings it back.

        What later layers save of `kept`, or of what they are `handed_on`, is not theirs: it stays that of the layer
        that saved it first.
        """
        alive = _addresses(kept)
        passing = _addresses(handed_on) - alive
        for holding in self._movable(first, end):
            storage = self._detach(holding)
            address = storage.data_ptr()
            if address in alive or address in passing:
                self._by_address[address] = holding
            if address in passing:
                self._passing.add(address)
            self.meter.release(storage)

    def pass_on(self, tensors: Sequence[Tensor]) -> None:
        """The next layer begins with these tensors: of what was handed on by dropped layers, only they are alive."""
        for address in self._passing - _addresses(tensors) if self._passing else ():
            self._passing.remove(address)
            self._by_address.pop(address, None)

    def offload(self, first: int, end: int) -> None:
        """Copy what layers [first, end) saved to the host, each storage once, then free it on the device."""
        holdings = self._movable(first, end)
        storages = [self._detach(holding) for holding in holdings]
        for holding, host_copy in zip(holdings, self._carrier.take(storages), strict=True):
            holding.host_copy = host_copy

    def reload(self, first: int, end: int) -> None:
        """Allocate on the device, copy back what layers [first, end) offloaded, then free it on the host."""
        holdings = [one for one in self.holdings if first <= one.layer < end and one.host_copy is not None]
        host_copies = []
        for holding in holdings:
            assert holding.host_copy is not None
            host_copies.append(holding.host_copy)
            holding.host_copy = None
        for holding, storage in zip(holdings, self._carrier.bring(host_copies), strict=True):
            holding.storage = storage

    def host_sizes(self, first: int, end: int) -> list[int]:
        """The bytes of each storage that a reload of layers [first, end) would bring back."""
        return [one.nbytes for one in self.holdings if first <= one.layer < end and one.host_copy is not None]

    def let_go(self, kept: Collection[Holding] = ()) -> None:
        """A whole backward begins: what is saved is freed with the last node that reads it, as torch itself does,
        but for the `kept`."""
        mine = [holding for holding in self._live() if holding not in kept]
        for holding in mine:
            assert holding.storage is not None
            self._by_address.pop(holding.storage.data_ptr(), None)
            slots = [weakref.ref(slot) for slot in holding.slots]
            self._gone[weakref.ref(holding, self._give_back)] = holding.storage, slots
            holding.slots.clear()
        gone = set(mine)
        self.holdings = [holding for holding in self.holdings if holding not in gone]
        self.slots = [slot for slot in self.slots if slot.holding not in gone]

    def _give_back(self, reference: weakref.ref[Holding]) -> None:
        """Nothing refers any more to a holding that a whole backward has read."""
        if (gone := self._gone.pop(reference, None)) is not None:
            self.meter.release(gone[0])

    def keep_results(self, later: Iterable[object]) -> None:
        """A backward in two halves begins, of which the second may read what `later` stands for."""

    def finish(self, handles: Iterable[object]) -> None:
        """Free every holding of which all slots are among `handles`: nobody reads them any more."""
        finished = {handle for handle in handles if isinstance(handle, Slot)}
        for holding in self._live():
            if finished.issuperset(holding.slots):
                self.meter.release(self._detach(holding, for_good=True))

    def clear(self) -> None:
        """Free everything, on the device and on the host, whatever graph still refers to it: a hook may close over its
        own tensor, or a layer keep a result that is no part of the loss."""
        while self._gone:
            reference, (storage, slots) = self._gone.popitem()
            if (holding := reference()) is not None:
                holding.let_go()
            for slot in filter(None, (one() for one in slots)):
                slot.tensor = None
            self.meter.release(storage)
        for slot in self.slots:
            slot.tensor = None
        for holding in self.holdings:
            if holding.storage is not None:
                self.meter.release(holding.storage)
                holding.let_go()
            elif holding.host_copy is not None:
                self._carrier.discard(holding.host_copy)
                holding.host_copy = None
        self._by_address.clear()

    # -- asking

    def live_sizes(self, layers: tuple[int, int] | None = None) -> list[int]:
        """Bytes on the device of what `layers` [first, end) (absent: all) saved, of each storage."""
        return [holding.nbytes for holding in self._live(*layers or ())]

    def result_sizes(self) -> list[int]:
        """Bytes on the device of each storage that selective recompute has made again."""
        return []

    def storages(self) -> Iterable[UntypedStorage]:
        """The storages that are on the device now."""
        return (holding.storage for holding in self.holdings if holding.storage is not None)

    # -- helpers

    def _movable(self, first: int, end: int) -> list[Holding]:
        return [holding for holding in self._live(first, end) if not holding.stays]

    def _live(self, first: float = 0, end: float = math.inf) -> list[Holding]:
        return [one for one in self.holdings if one.storage is not None and first <= one.layer < end]

    def _detach(self, holding: Holding, *, for_good: bool = False) -> UntypedStorage:
        """Take the storage off a holding; the caller answers for the store's hold on it."""
        storage = holding.storage
        assert storage is not None
        self._by_address.pop(storage.data_ptr(), None)
        for slot in holding.slots:
            if not for_good:
                slot.check()
                slot.shape()
            slot.tensor = None
        holding.let_go()
        return storage


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _matches(slot: Slot, tensor: Tensor, *, whole: bool) -> bool:
    """Whether a second forward saved what the slot is for, on an equal storage if it is to take the place of the
    `whole` holding."""
    expected, found = slot.shape(), geometry(tensor)
    if whole:
        return _lies(expected) == _lies(found) and slot.holding.nbytes == tensor.untyped_storage().nbytes()
    return (expected[0], expected[2]) == (found[0], found[2])


def _lies(geometry: Geometry) -> tuple[object, ...]:
    """Return a geometry without the strides of dimensions that have one entry: a view may have others."""
    dtype, offset, size, stride, *rest = geometry
    return dtype, offset, size, [step for count, step in zip(size, stride, strict=True) if count != 1], rest
