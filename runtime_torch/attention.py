"""Causal attention of one slice of a sequence over itself and the slices before it, block by block.

With s_j the logarithm of the sums of exponentials (logsumexp) of block j and o_j its own result, the whole is

    s = log sum_j exp(s_j),    o = sum_j exp(s_j - s) o_j,

and the gradients of each block follow from the block's keys and values, the whole's s and o and the gradient of o: a
flash kernel's backward computes exp(q k - s) itself. So nothing is put together: what a slice keeps is its queries, its
keys and values, o and s, whatever the number of slices before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime_torch import engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one slice, each (batch, key-value heads, tokens, head width), contiguous."""

SCORES = 1 << 24
"""Scores that are looked at at a time where there is no flash kernel: 64 MB of fp32."""
_WIDEST = 256
"""Head width that torch's flash kernel on CUDA takes; it takes multiples of 8."""


def forward(query: Tensor, blocks: Sequence[KeysValues], scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the result and its logsumexp, of `query` over all of `blocks`, of which the last is the slice's own.

    `query` is (batch, heads, tokens, head width), contiguous, and so is the result, in the dtype of `query`; the
    logsumexp is (batch, heads, tokens) in fp32, or fp64 where `query` is. Of the own block each token sees those up to
    itself, of the others all.
    """
    *earlier, own = blocks
    result, logsumexp = _attend(*_grouped(query, own), causal=True, scale=scale)
    result, logsumexp = result.reshape(query.shape), logsumexp.reshape(query.shape[:-1]).contiguous()
    if not earlier:
        return result, logsumexp
    total = result.to(logsumexp.dtype)
    del result
    for block in earlier:
        part, its_sum = _attend(_folded(query, block), *block, causal=False, scale=scale)
        its_sum = its_sum.reshape(logsumexp.shape).contiguous()
        both = torch.logaddexp(logsumexp, its_sum)
        total.mul_(logsumexp.sub_(both).exp_().unsqueeze(-1))
        total.addcmul_(part.reshape(query.shape).to(total.dtype), its_sum.sub_(both).exp_().unsqueeze(-1))
        logsumexp = both
    return total.to(query.dtype), logsumexp


def backward(
    gradient: Tensor,
    query: Tensor,
    block: KeysValues,
    result: Tensor,
    logsumexp: Tensor,
    scale: float | None,
    *,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what one block adds to the gradient of the query, and the gradients of the block's keys and values.

    All are contiguous; `result` and `logsumexp` are those of all blocks together.
    """
    if not own:
        sums = _folded(logsumexp.unsqueeze(-1), block).squeeze(-1)
        folded = _folded(gradient, block), _folded(query, block)
        found = _differentiate(*folded, *block, _folded(result, block), sums, False, scale)
        return found[0].reshape(query.shape), found[1], found[2]
    grouped, key, value = _grouped(query, block)
    about = result.view(grouped.shape), logsumexp.view(grouped.shape[:-1])
    found = _differentiate(gradient.view(grouped.shape), grouped, key, value, *about, True, scale)
    dk, dv = (one.sum(1).view_as(block[0]) if one.shape[1] > 1 else one.reshape(block[0].shape) for one in found[1:])
    return found[0].reshape(query.shape), dk, dv


def _grouped(query: Tensor, block: KeysValues) -> tuple[Tensor, Tensor, Tensor]:
    """Return views in which every key-value head is a sample, and the heads are those that read it: for the own block,
    whose mask has to meet each head's tokens by themselves."""
    _, heads, tokens, width = query.shape
    groups = heads // block[0].shape[1]
    key, value = (one.view(-1, 1, tokens, width).expand(-1, groups, -1, -1) for one in block)
    return query.view(-1, groups, tokens, width), key, value


def _folded(query: Tensor, block: KeysValues) -> Tensor:
    """Return a view in which the tokens of all heads that read one key-value head are tokens of one head: without a
    mask they are alike."""
    return query.view(query.shape[0], block[0].shape[1], -1, query.shape[-1])


# -- one block


def _attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    kernels = _kernels(query)
    if kernels is None:
        return _plain(query, key, value, causal=causal, scale=scale)
    out, logsumexp, *_ = kernels[0](query, key, value, 0.0, causal, scale=scale)
    return out, logsumexp


def _differentiate(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float | None,
) -> Sequence[Tensor]:
    given = gradient, query, key, value, result, logsumexp
    kernels = _kernels(query)
    if kernels is None:
        return _plain_backward(*given, causal=causal, scale=scale)
    if query.is_cuda:
        nothing = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the random state of no dropout
        lengths = None, None, query.shape[2], key.shape[2]
        on_cuda: Sequence[Tensor] = kernels[1](*given, *lengths, 0.0, causal, nothing, nothing, scale=scale)
        return on_cuda
    on_cpu: Sequence[Tensor] = kernels[1](*given, 0.0, causal, scale=scale)
    return on_cpu


def _kernels(query: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the flash kernel that takes these queries, and its backward."""
    width = query.shape[-1]
    fits = query.dtype in (torch.float16, torch.bfloat16) and width <= _WIDEST and width % 8 == 0
    return engine.flash_kernels(query.device.type) if query.is_cpu or (query.is_cuda and fits) else None


def _plain(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """In plain operations, some tokens at a time."""
    wide = torch.promote_types(query.dtype, torch.float32)
    parts, sums = [], []
    for first, rows in _rows(query, key):
        scores = _scores(rows, key, first, wide, causal=causal, scale=scale)
        sums.append(scores.logsumexp(-1))
        parts.append((scores.sub_(sums[-1].unsqueeze(-1)).exp_() @ value.to(wide)).to(query.dtype))
    return torch.cat(parts, 2), torch.cat(sums, 2)


def _plain_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logsumexp: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    dq = torch.empty_like(query)
    dk, dv = (torch.zeros(one.shape, dtype=wide, device=one.device) for one in (key, value))
    for first, rows in _rows(query, key):
        some = slice(first, first + rows.shape[2])
        mixture = _scores(rows, key, first, wide, causal=causal, scale=scale).sub_(logsumexp[:, :, some, None]).exp_()
        given = gradient[:, :, some].to(wide)
        dv += mixture.transpose(-1, -2) @ given
        inner = given @ value.to(wide).transpose(-1, -2)
        inner -= (given * result[:, :, some].to(wide)).sum(-1, keepdim=True)
        inner.mul_(mixture).mul_(factor)
        dq[:, :, some] = inner @ key.to(wide)
        dk += inner.transpose(-1, -2) @ rows.to(wide)
    return dq, dk.to(key.dtype), dv.to(value.dtype)


def _rows(query: Tensor, key: Tensor) -> list[tuple[int, Tensor]]:
    count = max(1, SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    starts = range(0, query.shape[2], count)
    return list(zip(starts, torch.split(query, count, 2), strict=True))


def _scores(rows: Tensor, key: Tensor, first: int, wide: torch.dtype, *, causal: bool, scale: float | None) -> Tensor:
    factor = rows.shape[-1] ** -0.5 if scale is None else scale
    scores = (rows.to(wide) @ key.to(wide).transpose(-1, -2)).mul_(factor)
    if causal:
        later = torch.ones(rows.shape[2], key.shape[2], dtype=torch.bool, device=rows.device).triu_(1 + first)
        scores.masked_fill_(later, float("-inf"))
    return scores
