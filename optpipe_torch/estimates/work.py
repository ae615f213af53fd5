"""What one operation of torch does: floating-point operations by torch's own table, bytes by its operands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from optpipe_torch.models.layer_kernels import COLLECTIVES

aten = torch.ops.aten
FREE = {
    aten.detach,
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.empty_strided,
    aten._unsafe_view,
    aten.lift_fresh,
}
"""Operations that touch no memory, beside views."""
LOOK_UPS = {aten.embedding, aten.index_select, aten.gather, aten.index}
"""Operations that read as many elements of their first operand as they write."""
ATTENTION_FORWARD = aten._scaled_dot_product_flash_attention
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_backward


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation: `kind` is matmul, attention_forward, attention_backward, collective or memory."""

    name: str
    kind: str
    flops: int
    nbytes: int
    """Read and written; for a collective, of the whole sequence."""


@dataclass
class Work:
    """What one op of the pipeline does: its kernels in order, and by how much memory rises at most."""

    kernels: list[Kernel] = field(default_factory=list)
    rise_bytes: int = 0

    @property
    def flops(self) -> int:
        """All floating-point operations."""
        return sum(kernel.flops for kernel in self.kernels)


def kernel_of(func: Any, args: Any, kwargs: Any, out: Any) -> Kernel | None:
    """Return what `func` did with these arguments and this result; None where it touched no memory."""
    packet = func.overloadpacket
    if packet in FREE or func.is_view:
        return None
    name = str(packet)
    results = sum(_nbytes(tensor) for tensor in tensors_of(out))
    if name in COLLECTIVES:
        return Kernel(name, "collective", 0, max(results, _nbytes(args[0])))
    if packet in LOOK_UPS:
        return Kernel(name, "memory", 0, 2 * results)
    nbytes = results + sum(_nbytes(tensor) for tensor in tensors_of((args, kwargs)))
    if packet is ATTENTION_FORWARD or packet is ATTENTION_BACKWARD:
        kind = "attention_forward" if packet is ATTENTION_FORWARD else "attention_backward"
        return Kernel(name, kind, _attention_flops(packet, args), nbytes)
    if packet in flop_registry:
        return Kernel(name, "matmul", int(flop_registry[packet](*args, **kwargs, out_val=out)), nbytes)
    return Kernel(name, "memory", 0, nbytes)


def _attention_flops(packet: Any, args: Any) -> int:
    """Return the operations of causal flash attention: torch's count for full attention, halved.

    Grouped keys and values count as often as they are read.
    """
    tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
    backward = packet is ATTENTION_BACKWARD
    gradient, tensors = (tensors[:1], tensors[1:]) if backward else ([], tensors)
    query, key, value = tensors[:3]
    groups = query.shape[1] // key.shape[1]
    shapes = [*gradient, query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)]
    return int(flop_registry[packet](*shapes)) // 2


def tensors_of(tree: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    """Bytes of distinct elements: what is expanded is read once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
