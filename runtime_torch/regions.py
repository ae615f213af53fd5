"""The cheap pieces of a stage and microbatch: what they saved is dropped after their layer's forward and made again."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optpipe_compiler.errors import BadInput
from runtime_torch import engine, random_state
from runtime_torch.holdings import Holding, Region, Slot
from runtime_torch.selective import told_to
from runtime_torch.store import Handle, SavedTensorStore
from runtime_torch.surroundings import autocast_as, autocast_now

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator


@dataclass(eq=False)
class SelectiveStore(SavedTensorStore):
    """The saved tensors of a stage and microbatch of which layers have cheap pieces."""

    _regions: list[Region] = field(default_factory=list)
    _unread: dict[Holding, set[Slot]] = field(default_factory=dict)
    """Of holdings that were made again: what is still to be read."""
    _later: frozenset[Slot] = frozenset()
    """What the second half of a split backward may read: results stay for it once they are made again."""

    @contextmanager
    def selective(self, layer: int) -> Iterator[None]:
        """Within: the forward of a layer, or its recompute, whose cheap pieces are dropped at its end."""
        with told_to(self.cheap):
            yield
        for region in self._regions:
            if region.layer == layer:
                if region.out is not None:
                    self._settle(region, region.out)
                for holding in region.holdings:
                    self._take_off(holding)

    def cheap(self, function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> Tensor:
        """In a layer's forward, or in its recompute, which meets the pieces of the forward once more."""
        kept = tuple(self.save(one) if isinstance(one, Tensor) else one for one in inputs)
        if self.is_refilling:
            with told_to(None):
                return function(*inputs)
        needs = [isinstance(one, Tensor) and one.requires_grad for one in inputs]
        region = Region(self.layer, function, kept, needs, len(self.holdings), autocast_now(self.device))
        first = len(self.slots)
        versions = [engine.changes(one) for one in inputs if isinstance(one, Tensor)]
        before = random_state.now(random_state.of_torch(self.device))
        with told_to(None):
            out = function(*inputs)
        if versions != [engine.changes(one) for one in inputs if isinstance(one, Tensor)]:
            raise BadInput(f"layer {self.layer}: a cheap part changes its input in place, expected a new tensor")
        if not isinstance(out, Tensor) or random_state.has_changed(before):
            return out  # such as a norm that also returns what it normed, or a dropout: it stays as it is
        region.slots = self.slots[first:]
        region.holdings = self.holdings[region.begin :]
        region.out, region.changes = out.detach(), engine.changes(out)
        self._regions.append(region)
        return out

    def make_again(self) -> None:
        """Make everything again."""
        for region in self._regions:
            if any(holding.storage is None for holding in region.holdings):
                self._fill(region)

    def result_sizes(self) -> list[int]:
        """Bytes on the device of each storage that cheap pieces have made again."""
        return [one.nbytes for region in self._regions for one in region.holdings if one.storage is not None]

    # -- what reading and finishing change

    def let_go(self, kept: Collection[Holding] = ()) -> None:
        """Keep what pieces are made again from, and what of them is dropped."""
        needed = {slot.holding for region in self._regions for slot in (*_slots_among(region.inputs), *region.slots)}
        made = {holding for region in self._regions for holding in region.holdings}
        super().let_go({*kept, *needed, *made})

    def keep_results(self, later: Iterable[object]) -> None:
        """A backward in two halves begins: results that are made again stay where the second reads them."""
        self._later = frozenset(handle for handle in later if isinstance(handle, Slot))

    def finish(self, handles: Iterable[object]) -> None:
        """Also free the inputs of pieces that nobody computes again after the first half of a split backward."""
        finished = {handle for handle in handles if isinstance(handle, Slot)}
        for region in reversed(self._regions):
            result = region.out_holding
            is_there = result is None or result.storage is not None or finished.issuperset(result.slots)
            if is_there and finished.issuperset(region.slots):
                for slot in _slots_among(region.inputs):
                    if slot in slot.holding.slots:
                        slot.holding.slots.remove(slot)
                        slot.tensor = None  # the holding frees its storage without asking this one
        super().finish(finished)

    def read(self, handle: Handle) -> Tensor:
        """Make it again where a cheap piece dropped it, and drop a holding once more when all of it was read."""
        region = handle.holding.region if isinstance(handle, Slot) else None
        if not isinstance(handle, Slot) or region is None:
            return super().read(handle)
        holding = handle.holding
        if handle.tensor is None and holding.storage is None:
            self._fill(region)
        found = super().read(handle)
        unread = self._unread.get(holding)
        if unread is not None:
            unread.discard(handle)
            if not unread and not (holding is region.out_holding and self._later.intersection(holding.slots)):
                del self._unread[holding]
                self._take_off(holding)
        return found

    # -- how

    def _settle(self, region: Region, out: Tensor) -> None:
        """After the forward of its layer: find out what a piece can do without; a result that the layer has changed in
        place since stays, for the piece alone would not make it so again."""
        inputs = {handle.holding for handle in _slots_among(region.inputs)}
        region.holdings = [holding for holding in region.holdings if holding not in inputs]
        result = self.holding_at(out.untyped_storage()) if engine.changes(out) == region.changes else None
        if result is not None and result not in inputs and result in self.holdings[region.begin :]:
            region.out_holding = result
            if result not in region.holdings:
                region.holdings.append(result)
        for holding in region.holdings:
            holding.region = region
        region.out = None

    def _fill(self, region: Region) -> None:
        """Make again what a piece saved, and its result."""
        given = [self.read(one) if isinstance(one, Handle) else one for one in region.inputs]
        fresh = [
            one.detach().requires_grad_(needs) if isinstance(one, Tensor) else one
            for one, needs in zip(given, region.needs, strict=True)
        ]
        with (
            torch.enable_grad(),
            autocast_as(region.autocast, self.device),
            self.refilled(region.slots, region.holdings, f"a cheap part of layer {region.layer}"),
            told_to(None),
        ):
            out = region.function(*fresh)
        if region.out_holding is not None and region.out_holding.storage is None:
            self.put_back(region.out_holding, out.untyped_storage())
        for holding in region.holdings:
            self._unread[holding] = set(holding.slots)

    def _take_off(self, holding: Holding) -> None:
        """Free a holding on the device; how to make it again is known."""
        if holding.storage is not None:
            self.meter.release(self._detach(holding))


def _slots_among(inputs: tuple[Any, ...]) -> list[Slot]:
    return [one for one in inputs if isinstance(one, Slot)]
