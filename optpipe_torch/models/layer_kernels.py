"""Operations that a GPU runs as one kernel and that on other devices would fall apart into several.

Each is a torch operator with a shape function, so that `estimate_count` sees on the meta device the one operation, and
autograd the saved tensors, that a GPU would have. Elsewhere they compute the same values from torch's own parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from runtime_torch.selective import cheap

COLLECTIVES = {"optpipe.gather_sequence", "optpipe.scatter_sequence"}
"""The operators below in which tensor-parallel ranks meet."""


# -- RMSNorm


@torch.library.custom_op("optpipe::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (x * scale).to(x.dtype) * weight, scale


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("optpipe::rms_norm_backward", mutates_args=())
def _rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    normal = x * scale
    inner = gradient * weight
    dx = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype), (gradient * normal).flatten(0, -2).sum(0).to(weight.dtype)


@_rms_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_norm(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _norm_gradients(ctx, gradient, _):  # type: ignore[no-untyped-def]
    return *_rms_norm_backward(gradient, *ctx.saved_tensors), None


_rms_norm.register_autograd(_norm_gradients, setup_context=_keep_norm)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension to a root mean square of 1, then by `weight`; saves `x` and one number per row.

    From torch's parts it is many kernels, most of them on copies in fp32: GPUs have one of their own, and its backward.
    """
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normal: Tensor = _rms_norm(x, weight, eps)[0]
    return normal


# -- causal softmax, in place of scale, mask and softmax


@torch.library.custom_op("optpipe::causal_softmax", mutates_args=())
def _causal_softmax(scores: Tensor, scale: float) -> Tensor:
    queries, keys = scores.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax((scores * scale).masked_fill(later, float("-inf")), -1)


@_causal_softmax.register_fake
def _(scores: Tensor, scale: float) -> Tensor:
    return torch.empty_like(scores)


@torch.library.custom_op("optpipe::causal_softmax_backward", mutates_args=())
def _causal_softmax_backward(gradient: Tensor, mixture: Tensor, scale: float) -> Tensor:
    inner = gradient * mixture
    return (inner - mixture * inner.sum(-1, keepdim=True)) * scale


@_causal_softmax_backward.register_fake
def _(gradient: Tensor, mixture: Tensor, scale: float) -> Tensor:
    return torch.empty_like(mixture)


def _keep_softmax(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


def _softmax_gradients(ctx, gradient):  # type: ignore[no-untyped-def]
    return _causal_softmax_backward(gradient.contiguous(), ctx.saved_tensors[0], ctx.scale), None


_causal_softmax.register_autograd(_softmax_gradients, setup_context=_keep_softmax)


def math_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Causal attention that keeps the matrix of sequence x sequence, for (batch, heads, sequence, head_dim)."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mixture = _causal_softmax(query @ key.transpose(-1, -2), query.shape[-1] ** -0.5)
    return drop(mixture, dropout) @ value


def flash_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Causal attention that keeps its inputs, its output and one number per row: torch's flash kernel on GPUs.

    torch would choose on the meta device what it has for CPUs, so the kernel is named there.
    """
    if query.is_meta:
        found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, True)[0]
        return found
    grouped = query.shape[1] != key.shape[1]
    mixed: Tensor = F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=True, enable_gqa=grouped)
    return mixed


# -- dropout


def drop(x: Tensor, probability: float) -> Tensor:
    """Dropout whose mask takes one byte per element, as torch's kernel for GPUs keeps it."""
    return torch.native_dropout(x, probability, True)[0] if probability > 0 else x


# -- tensor parallelism


@torch.library.custom_op("optpipe::gather_sequence", mutates_args=())
def _gather_sequence(x: Tensor, ranks: int) -> Tensor:
    raise NotImplementedError("layers of tensor-parallel ranks are for the meta device")


@_gather_sequence.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] * ranks, *x.shape[2:]))


@torch.library.custom_op("optpipe::scatter_sequence", mutates_args=())
def _scatter_sequence(x: Tensor, ranks: int) -> Tensor:
    raise NotImplementedError("layers of tensor-parallel ranks are for the meta device")


@_scatter_sequence.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // ranks, *x.shape[2:]))


def _keep_ranks(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.ranks = inputs[1]


_gather_sequence.register_autograd(
    lambda ctx, gradient: (_scatter_sequence(gradient, ctx.ranks), None), setup_context=_keep_ranks
)
_scatter_sequence.register_autograd(
    lambda ctx, gradient: (_gather_sequence(gradient, ctx.ranks), None), setup_context=_keep_ranks
)


def gather_sequence(x: Tensor, ranks: int) -> Tensor:
    """All-gather the sequence (dimension 1) over the tensor-parallel ranks; the gradient is reduce-scattered.

    Selective recompute gathers again in the backward, as Megatron-Core does (Korthikanti et al., 2022, section 4.2.2).
    """
    return x if ranks == 1 else cheap(_gather_sequence, x, ranks)


def scatter_sequence(x: Tensor, ranks: int) -> Tensor:
    """Reduce-scatter partial sums along the sequence (dimension 1); the gradient is all-gathered."""
    return x if ranks == 1 else _scatter_sequence(x, ranks)
