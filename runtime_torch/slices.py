"""A microbatch run slice by slice: what a layer keeps of earlier slices for the later ones, its carry.

A layer that can be sliced names the carry, as layers name the target, and calls it for what crosses slices:

    def forward(self, x, *, carry=runtime_torch.WHOLE):
        positions = carry.start + torch.arange(x.shape[1])
        ...
        mixed = carry.attend(query, key, value)  # causal, over this slice and those before it

`WHOLE` is the carry of a microbatch in one piece, so the layer is the same with and without slices, and any other
caller leaves the argument out. A layer that looks at each token by itself says so: `sliceable = True`.

Keys and values of a slice live from its forward to the end of its own backward, and are neither offloaded nor
recomputed; autograd saves them beside queries and result, and nothing of other slices. Forwards ascend, backwards
descend: the backward of a slice adds to the gradients of the keys and values before it, which start with the
microbatch's first backward, and takes over its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch import attention, engine
from runtime_torch.microbatch import inner_layer, takes
from runtime_torch.replicas import class_of
from runtime_torch.surroundings import autocast_now

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from runtime_torch.meter import Meter


class Carry:
    """What a layer knows of the slice that it is called for; this one is that of a whole microbatch."""

    start: int = 0
    """The position of the first token."""
    is_whole: bool = True
    """Whether the microbatch is in one piece."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
        """Return causal attention over this slice and those before it, without dropout.

        All are (batch, heads, tokens, head width), keys and values may have fewer heads that divide those of the
        queries; `scale` is head width ** -0.5 where it is not given. The result is a transposed view of (batch, tokens,
        heads, head width), as torch's.
        """
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)

    def whole(self, target: Tensor) -> Tensor:
        """Return the target of all tokens of the microbatch: for losses that count some tokens only.

        A layer that names both `target` and `carry` returns its tokens' part of the microbatch's loss, such as the sum
        over its own tokens divided by the count over all of them; one that does not name the carry returns the mean
        over its own tokens, which the runtime weighs by their number.
        """
        return target


WHOLE = Carry()
"""The carry of a microbatch in one piece."""

BY_TOKEN = (nn.Identity, nn.Linear, nn.Embedding, nn.RMSNorm, nn.Dropout)
"""Layers of torch that look at each token by itself."""


def is_sliceable(layer: nn.Module) -> bool:
    """Whether a layer says that it can be sliced: by its `sliceable`, or, without that, by naming the carry."""
    inner = inner_layer(layer)
    said = getattr(inner, "sliceable", None)
    return takes(layer, "carry") or class_of(inner) in BY_TOKEN if said is None else bool(said)


@dataclass(slots=True)
class _Kept:
    """Keys and values of one slice at one place of a stage, and what was added to their gradients so far."""

    block: attention.KeysValues
    needs_gradient: bool
    changes: list[int]
    """How often each of the block had been changed in place."""
    gradients: list[Tensor] = field(default_factory=list)


class StageCarry:
    """What one stage keeps of one microbatch's slices; `starts` are the positions at which they begin.

    Bytes are counted in `meter`: keys and values until `drop`, the sums of their gradients until their own backward.
    """

    def __init__(self, starts: tuple[int, ...], meter: Meter) -> None:
        self.starts = starts
        self.last = len(starts) - 1
        """The slice that no other reads: its keys and values are saved like anything else."""
        self._meter = meter
        self._kept: list[dict[tuple[int, int], _Kept]] = [{} for _ in starts]
        """By slice: by layer and number of the attention in it."""
        self.addresses: set[int] = set()
        """Of all keys and values."""

    def of(self, index: int, layer: int, target: Tensor | None) -> SliceCarry:
        """Return what a layer gets for slice `index`; `target` is that of the whole microbatch."""
        return SliceCarry(self, index, layer, target)

    def has_kept(self, index: int, layers: Collection[int]) -> bool:
        """Whether one of these layers keeps anything of a slice."""
        return any(layer in layers for layer, _ in self._kept[index])

    def sizes(self, index: int) -> list[int]:
        """Bytes of each of the keys and values of one slice that are kept for others."""
        return [one.nbytes for kept in self._kept[index].values() for one in kept.block]

    def drop(self, index: int) -> None:
        """The backward of a slice is over."""
        for kept in self._kept[index].values():
            for one in (*kept.block, *kept.gradients):
                self._meter.release(one.untyped_storage())
            self.addresses -= {one.untyped_storage().data_ptr() for one in kept.block}
        self._kept[index].clear()

    def clear(self) -> None:
        """No backward will come."""
        for index in range(len(self.starts)):
            self.drop(index)

    # -- for the attention

    def keep(self, index: int, place: tuple[int, int], block: attention.KeysValues, needs_gradient: bool) -> None:
        """Keep a slice's own block for later ones; the second forward of a recompute finds it kept."""
        if index == self.last or place in self._kept[index]:
            return
        self._kept[index][place] = _Kept(block, needs_gradient, [engine.changes(one) for one in block])
        for one in block:
            self._meter.hold(one.untyped_storage())
            self.addresses.add(one.untyped_storage().data_ptr())

    def block(self, index: int, place: tuple[int, int]) -> attention.KeysValues:
        """Return the keys and values of a slice."""
        if place not in self._kept[index]:
            raise RunFailed(f"layer {place[0]}: keys and values of slice {index} are gone, or were never there")
        kept = self._kept[index][place]
        if kept.changes != [engine.changes(one) for one in kept.block]:
            raise RunFailed(
                f"layer {place[0]}: keys or values of slice {index} were changed in place after its attention, and "
                "later slices read them, expected a new tensor"
            )
        return kept.block

    def add(self, index: int, place: tuple[int, int], gradients: Sequence[Tensor]) -> None:
        """Add to the gradients of a slice's block, where anybody asks for them."""
        kept = self._kept[index][place]
        for total, one in zip(kept.gradients, gradients, strict=False):
            total.add_(one)
        if kept.gradients or not kept.needs_gradient:
            return
        kept.gradients = [one.contiguous() for one in gradients]
        for one in kept.gradients:
            self._meter.hold(one.untyped_storage())

    def take(self, index: int, place: tuple[int, int]) -> list[Tensor]:
        """Return what later slices have added to the gradients of a slice's block, and forget it; empty: nothing."""
        if index == self.last:
            return []
        kept = self._kept[index][place]
        found, kept.gradients = kept.gradients, []
        for one in found:
            self._meter.release(one.untyped_storage())
        return found


class SliceCarry(Carry):
    """What one layer gets for one slice; good for one call of the layer."""

    is_whole = False

    def __init__(self, stage: StageCarry, index: int, layer: int, target: Tensor | None) -> None:
        self.start = stage.starts[index]
        self._stage, self._index, self._layer = stage, index, layer
        self._target = target
        self._count = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
        """See `Carry.attend`; under autocast all are in its dtype, as torch's attention has them."""
        enabled, dtype, _ = autocast_now(query.device)
        if enabled:
            query, key, value = (one if one.dtype == torch.float64 else one.to(dtype) for one in (query, key, value))
        place = self._layer, self._count
        self._count += 1
        about = self._stage, self._index, place, scale
        found: Tensor = _Attend.apply(query, key, value, *about)  # type: ignore[no-untyped-call]
        return found

    def whole(self, target: Tensor) -> Tensor:
        """See `Carry.whole`."""
        if self._target is None:
            raise BadInput(f"layer {self._layer} asks for the whole target, and this rank was given none")
        return self._target


class _Attend(torch.autograd.Function):
    """Attention of one slice."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        stage: StageCarry,
        index: int,
        place: tuple[int, int],
        scale: float | None,
    ) -> Tensor:
        needs = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        query, own = _alone(query), (_alone(key), _alone(value))
        stage.keep(index, place, own, needs)
        blocks = [stage.block(earlier, place) for earlier in range(index)]
        found, logsumexp = attention.forward(query, [*blocks, own], scale)
        result = torch.empty_like(found.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        result.copy_(found)  # so that the next projection's input, (batch, tokens, all heads), is the same memory
        ctx.save_for_backward(query, *own, result, logsumexp)
        ctx.stage, ctx.index, ctx.place, ctx.scale = stage, index, place, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, result, logsumexp = ctx.saved_tensors
        stage, index, place = ctx.stage, ctx.index, ctx.place
        given = gradient.contiguous(), query
        about = result.contiguous(), logsumexp, ctx.scale
        dq, dk, dv = attention.backward(*given, (key, value), *about, own=True)
        if index:
            dq = dq.to(logsumexp.dtype)
        for earlier in range(index):
            part, *its = attention.backward(*given, stage.block(earlier, place), *about, own=False)
            dq += part
            stage.add(earlier, place, its)
        for own, later in zip((dk, dv), stage.take(index, place) or (None, None), strict=True):
            if later is not None:
                own += later
        return dq.to(query.dtype), dk, dv, None, None, None, None


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous, on a storage of its own size: what is kept keeps nothing else alive."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
