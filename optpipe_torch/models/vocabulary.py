"""Head and embedding in parts: the vocabulary cut into a chain of layers, each of which has some of its rows.

A part of the head gets the hidden states `h` and `state`, and passes both on. `state` holds two numbers for each token:
the logarithm L of the sum of the exponentials of all logits so far (online softmax), and t, the logits weighed by the
target's distribution so far. With z = h W^T of this part and q the target's distribution over its rows,

    L' = log(exp(L) + sum exp(z)),    t' = t + sum q z,    and after the last part: loss = L - t.

Both are differentiable: dL'/dz = exp(z - L'), which is the softmax once L' is that of all parts, and the gradient of h
adds up on the way back. So the chain has loss and gradients of the whole head, within rounding. q is one at the target,
or, with label smoothing e, 1 - e there and e / vocabulary everywhere.

A part keeps h and z for its backward, in the dtype of z; the gradient of z takes the place of z between the two halves
of a split backward. To keep h alone and compute z once more is what a recomputation of the layer does.

An embedding in parts adds the rows of each part to the hidden states and passes the tokens on.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from optpipe_compiler.errors import BadInput
from runtime_torch.slices import WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime_torch.slices import Carry

CPU_CHUNK, CHUNK = 1 << 18, 1 << 24
"""Logits that are looked at at a time, in fp32. On a CPU the caches hold them (`python -m bench.vocabulary` with 512
tokens: F, I and W of 4 parts take 605 ms in fp32 and 177 ms in bf16, with 2^14 670 and 250, with 2^24 648 and 193).
Elsewhere a chunk is large against the launches of its kernels (some 4 us each): 2^24 logits move 0.3 GB."""


def rows_of(vocabulary: int, part: int, parts: int) -> range:
    """Return the rows of a part; the first parts have one more where they cannot all have as many."""
    if not 1 <= parts <= vocabulary:
        raise BadInput(f"a vocabulary of {vocabulary} is cut into {parts} parts, expected 1 to {vocabulary}")
    each, more = divmod(vocabulary, parts)
    first = part * each + min(part, more)
    return range(first, first + each + (part < more))


def embedding_parts(hidden: int, vocabulary: int, parts: int) -> list[Callable[[], nn.Module]]:
    """Return what makes the layers of an embedding: the first takes tokens, the last returns hidden states alone."""
    rows_of(vocabulary, 0, parts)
    return [partial(EmbeddingPart, hidden, vocabulary, part, parts) for part in range(parts)]


def head_parts(
    hidden: int,
    vocabulary: int,
    parts: int,
    *,
    norm: Callable[[], nn.Module] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> list[Callable[[], nn.Module]]:
    """Return what makes the layers of a head: the first takes hidden states, the last returns the loss.

    `norm` makes what the first part applies to them. The others are as in torch's `cross_entropy`, without weights.
    """
    rows_of(vocabulary, 0, parts)
    said = {"norm": norm, "ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    return [partial(HeadPart, hidden, vocabulary, part, parts, **said) for part in range(parts)]  # type: ignore[arg-type]


class _Part(nn.Module):
    """Some rows of a matrix of (vocabulary, hidden)."""

    def __init__(self, hidden: int, vocabulary: int, part: int, parts: int) -> None:
        super().__init__()
        self.rows = rows_of(vocabulary, part, parts)
        self.vocabulary, self.part, self.parts = vocabulary, part, parts
        self.weight = nn.Parameter(torch.empty(len(self.rows), hidden))

    @property
    def is_last(self) -> bool:
        """Whether no other part follows."""
        return self.part == self.parts - 1

    def extra_repr(self) -> str:
        """Equal for parts that cost the same."""
        return f"{len(self.rows)} of {self.vocabulary} rows"


class EmbeddingPart(_Part):
    """Adds what its rows say: (hidden states, tokens) to the same; the first takes tokens (int64), the last returns
    hidden states."""

    def __init__(self, hidden: int, vocabulary: int, part: int, parts: int) -> None:
        super().__init__(hidden, vocabulary, part, parts)
        nn.init.normal_(self.weight)

    def forward(
        self, x: Tensor, tokens: Tensor | None = None, *, carry: Carry = WHOLE
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Add the rows of those tokens that are in this part."""
        if tokens is None:
            tokens = x
            _refuse_outside(tokens, self.vocabulary, "a token")
            x = self.begin(self.look_up(tokens), tokens, carry)
        else:
            x = x + self.look_up(tokens)
        return self.end(x) if self.is_last else (x, tokens)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the rows of the tokens, zeros for those of other parts.

        Where another part has the token, any row will do: spread over all of them, none is written by many at once in
        the backward.
        """
        index = tokens - self.rows.start
        inside = (index >= 0) & (index < len(self.rows))
        found = F.embedding(index.remainder_(len(self.rows)), self.weight)
        return found.mul_(inside.unsqueeze(-1))

    def begin(self, x: Tensor, tokens: Tensor, carry: Carry) -> Tensor:
        """Return what the first part passes on; the place for learned positions, from `carry.start` on."""
        return x

    def end(self, x: Tensor) -> Tensor:
        """Return what leaves the last part."""
        return x


class HeadPart(_Part):
    """Adds its logits to the loss: (hidden states, state) to the same; the first takes hidden states, the last returns
    the loss.

    Hidden states are (..., hidden), targets (...) int64, the state (..., 2) in fp32 (fp64 for hidden states in fp64).
    """

    def __init__(
        self,
        hidden: int,
        vocabulary: int,
        part: int,
        parts: int,
        *,
        norm: Callable[[], nn.Module] | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__(hidden, vocabulary, part, parts)
        if reduction not in ("mean", "sum"):
            raise BadInput(f"reduction is {reduction!r}, expected 'mean' or 'sum'")
        self.norm = norm() if norm is not None and part == 0 else None
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        nn.init.normal_(self.weight, std=hidden**-0.5)

    def forward(
        self, h: Tensor, state: Tensor | None = None, *, target: Tensor, carry: Carry = WHOLE
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the hidden states and the new state, or the loss."""
        if state is None:
            h = h if self.norm is None else self.norm(h)
            state = _nothing_yet(h, target)
        share, peak = self.label_smoothing / self.vocabulary, 1.0 - self.label_smoothing
        state = _Fold.apply(self.logits(h), state, target, self.rows.start, share, peak)  # type: ignore[no-untyped-call]
        return self.loss(state, target, carry) if self.is_last else (h, state)

    def logits(self, h: Tensor) -> Tensor:
        """Return those of this part's rows."""
        return F.linear(h, self.weight)

    def loss(self, state: Tensor, target: Tensor, carry: Carry = WHOLE) -> Tensor:
        """Return the loss, of fp32, when all parts are in the state; of a slice, what it adds to the microbatch's."""
        logarithm, weighed = state.unbind(-1)
        counts = target != self.ignore_index
        _refuse_outside(target.where(counts, 0), self.vocabulary, "a target that is not ignore_index")
        total = torch.where(counts, logarithm - weighed, 0).sum()
        return total if self.reduction == "sum" else total / (carry.whole(target) != self.ignore_index).sum()


def _refuse_outside(rows: Tensor, vocabulary: int, what: str) -> None:
    """Raise RuntimeError for rows that no part has, as whole layers refuse them; a GPU's stream does it later."""
    refuse_unless = getattr(torch, "_assert_async", None)
    if refuse_unless is not None and not rows.is_meta:
        inside = ((rows >= 0) & (rows < vocabulary)).all()
        refuse_unless(inside, f"{what} is outside of the vocabulary of {vocabulary}")


def _nothing_yet(h: Tensor, target: Tensor) -> Tensor:
    dtype = torch.promote_types(h.dtype, torch.float32)
    state = torch.zeros(*target.shape, 2, dtype=dtype, device=h.device)
    state[..., 0] = float("-inf")
    return state


class _Fold(torch.autograd.Function):
    """Takes logits (..., rows) into the state (..., 2), in chunks of tokens.

    A token's distribution is `share` everywhere, and `peak` more at the target.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, state: Tensor, target: Tensor, first: int, share: float, peak: float
    ) -> Tensor:
        logits, state = logits.contiguous(), state.contiguous()
        folded = torch.empty_like(state)
        decay = torch.empty_like(state[..., 0])
        for z, before, after, fades, wanted in _chunks(logits, state, folded, decay, target):
            row, inside = _place(wanted, first, z.shape[-1])
            # of the largest logit: its logarithm of the softmax is small, whatever the logits
            largest = z.amax(-1).to(state.dtype)
            own = largest - torch.log_softmax(z, -1, dtype=state.dtype).amax(-1)
            own.masked_fill_(largest == float("-inf"), torch.finfo(own.dtype).min)  # all rows are masked: next to none
            torch.logaddexp(before[:, 0], own, out=after[:, 0])
            torch.exp(before[:, 0] - after[:, 0], out=fades)
            weighed = torch.where(inside, z.gather(-1, row).to(state.dtype) * peak, 0)
            if share:
                weighed += z.sum(-1, keepdim=True, dtype=state.dtype) * share
            torch.add(before[:, 1:], weighed, out=after[:, 1:])
        ctx.save_for_backward(logits, folded, decay, target)
        ctx.first, ctx.share, ctx.peak = first, share, peak
        return folded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, folded, decay, target = ctx.saved_tensors
        found = torch.empty_like(logits)
        for z, dz, after, given, wanted in _chunks(logits, found, folded, gradient.contiguous(), target):
            row, inside = _place(wanted, ctx.first, z.shape[-1])
            of_sum, of_weighed = given[:, :1], given[:, 1:]
            wide = torch.sub(z, after[:, :1]).exp_()
            at_target = wide.gather(-1, row) * of_sum + torch.where(inside, of_weighed * ctx.peak, 0)
            if ctx.share:
                torch.addcmul(of_weighed * ctx.share, wide, of_sum, out=dz)
                at_target += of_weighed * ctx.share
            else:
                torch.mul(wide, of_sum, out=dz)
            dz.scatter_(-1, row, at_target.to(dz.dtype))
        back = torch.stack((gradient[..., 0] * decay, gradient[..., 1]), -1) if ctx.needs_input_grad[1] else None
        return found, back, None, None, None, None


def _chunks(logits: Tensor, *others: Tensor) -> zip[tuple[Tensor, ...]]:
    """Cut all tensors alike into some tokens each, with the dimensions of the tokens as one; contiguous ones are not
    copied."""
    dims = logits.dim() - 1
    count = max(1, (CPU_CHUNK if logits.is_cpu else CHUNK) // logits.shape[-1])
    return zip(*(torch.split(x.reshape(-1, *x.shape[dims:]), count) for x in (logits, *others)), strict=True)


def _place(target: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the row of each target in this part, (tokens, 1), and whether it is in this part: elsewhere any row."""
    row = target.unsqueeze(-1) - first
    inside = (row >= 0) & (row < rows)
    return row.clamp_(0, rows - 1), inside


# -- the whole layers that chains of parts stand for


def whole(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers with every chain of parts as one layer on the same parameters: torch's own `embedding` and
    `cross_entropy` on the whole vocabulary, to compare with."""
    found: list[nn.Module] = []
    for kind, run in groupby(layers, type):
        chain = list(run)
        parts = [one for one in chain if isinstance(one, _Part)]
        if parts and [one.part for one in parts] == list(range(parts[0].parts)):
            found.append((_WholeHead if issubclass(kind, HeadPart) else _WholeEmbedding)(chain))
        else:
            found += chain
    return found


class _Whole(nn.Module):
    def __init__(self, chain: Sequence[nn.Module]) -> None:
        super().__init__()
        self.chain = nn.ModuleList(chain)

    @property
    def weight(self) -> Tensor:
        return torch.cat([part.weight for part in self.chain])  # type: ignore[misc]


class _WholeEmbedding(_Whole):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.chain[0].begin(F.embedding(tokens, self.weight), tokens, WHOLE)  # type: ignore[operator]
        return self.chain[-1].end(x)  # type: ignore[operator,no-any-return]


class _WholeHead(_Whole):
    def forward(self, h: Tensor, *, target: Tensor) -> Tensor:
        part = self.chain[0]
        assert isinstance(part, HeadPart)
        logits = F.linear(h if part.norm is None else part.norm(h), self.weight).flatten(0, -2)
        return F.cross_entropy(
            logits.to(torch.promote_types(h.dtype, torch.float32)),
            target.flatten(),
            ignore_index=part.ignore_index,
            label_smoothing=part.label_smoothing,
            reduction=part.reduction,
        )
