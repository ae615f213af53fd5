"""The largest sum over pairs of starts on two lanes, without trying all pairs.

Row c of `clocks` says, for every chain k, how many events of k the start c implies; row h of `others` says the same of
the starts of the other lane. A pair holds the sum over the chains of S_k[max(C_k[c], H_k[h])], where S_k[n] is what the
first n events of k add up to. Clocks only grow along a lane. So for each h there is, on each chain, one c from which on
C_k[c] is the later; these crossings cut the c that h may be paired with into segments, in each of which the sum is a
constant of h plus the sum over the crossed chains of S_k[C_k[c]]. That sum's maximum over a segment is a range maximum,
looked up in a sparse table (Bender and Farach-Colton 2000) of the set of crossed chains, of which there are few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Numbers = npt.NDArray[Any]
MOST_CHAINS = 62
"""Sets of chains are bits of 64-bit integers."""
MOST_SETS = 1000
"""Beyond so many, their tables take longer than all pairs do."""


class LargestPair(NamedTuple):
    """The largest sum, and the rows of the two lanes that have it."""

    held: int
    first: int
    other: int


def best_pair(
    sums: Sequence[Numbers], clocks: Numbers, others: Numbers, low: Numbers, high: Numbers
) -> LargestPair | None:
    """Return the best of all pairs (c, h) with `low[h] <= c < high[h]`; None where there is no pair."""
    rows = np.flatnonzero(low < high)
    if not len(rows):
        return None
    others, low, high = others[rows], low[rows], high[rows]
    by_first = np.stack([column[clocks[:, k]] for k, column in enumerate(sums)])
    by_other = np.stack([column[others[:, k]] for k, column in enumerate(sums)])
    search = _by_segments if len(sums) <= MOST_CHAINS else _one_by_one
    held, first, number = search(by_first, by_other, clocks, others, low, high)
    return LargestPair(held, first, int(rows[number]))


def _one_by_one(
    by_first: Numbers, by_other: Numbers, clocks: Numbers, others: Numbers, low: Numbers, high: Numbers
) -> LargestPair:
    """Try every pair, one h after the other. From one to the next only the chains are summed anew on which more is
    implied: few, as each of their events is implied anew once."""
    best: LargestPair | None = None
    held = by_first.sum(axis=0)
    reached: Numbers = np.zeros_like(by_other[:, 0])
    """By chain what the h before adds to the c before its crossing."""
    crossings = np.stack([np.searchsorted(clocks[:, k], others[:, k], side="right") for k in range(len(by_first))])
    crossed = [0] * len(by_first)
    changes = np.diff(others, axis=0, prepend=-1) != 0
    for number, (begin, end) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        for k in np.flatnonzero(changes[number]).tolist():
            before, crossing = crossed[k], int(crossings[k, number])
            held[:before] += by_other[k, number] - reached[k]
            held[before:crossing] += by_other[k, number] - by_first[k, before:crossing]
            crossed[k], reached[k] = crossing, by_other[k, number]
        index = begin + int(np.argmax(held[begin:end]))
        if best is None or held[index] > best.held:
            best = LargestPair(int(held[index]), index, number)
    assert best is not None
    return best


def _by_segments(
    by_first: Numbers, by_other: Numbers, clocks: Numbers, others: Numbers, low: Numbers, high: Numbers
) -> LargestPair:
    """Look the maximum of every segment up, the segments of one set of crossed chains together."""
    begins, ends, crossed, constants = _segments(by_other, clocks, others, low, high)
    sets = np.unique(crossed[begins < ends]).tolist()
    if len(sets) > MOST_SETS:
        return _one_by_one(by_first, by_other, clocks, others, low, high)
    best: LargestPair | None = None
    for chains in sets:
        which = np.nonzero((crossed == chains) & (begins < ends))
        inside = [k for k in range(len(by_first)) if chains >> k & 1]
        total = by_first[inside].sum(axis=0)
        held = _range_maxima(total, begins[which], ends[which]) + constants[which]
        at = int(np.argmax(held))
        if best is None or held[at] > best.held:
            begin, end = int(begins[which][at]), int(ends[which][at])
            best = LargestPair(int(held[at]), begin + int(np.argmax(total[begin:end])), int(which[0][at]))
    assert best is not None
    return best


def _segments(
    by_other: Numbers, clocks: Numbers, others: Numbers, low: Numbers, high: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return begins, ends, sets of crossed chains and constants of all segments: a row per h, a column per segment."""
    chains = len(by_other)
    crossings = [np.searchsorted(clocks[:, k], others[:, k], side="right") for k in range(chains)]
    clipped = np.clip(np.stack(crossings, axis=1), low[:, None], high[:, None])
    order = np.argsort(clipped, axis=1, kind="stable")
    cuts = np.take_along_axis(clipped, order, axis=1)
    begins = np.concatenate([low[:, None], cuts], axis=1)
    ends = np.concatenate([cuts, high[:, None]], axis=1)
    none = np.zeros((len(low), 1), np.int64)
    crossed = np.concatenate([none, np.cumsum(np.int64(1) << order.astype(np.int64), axis=1)], axis=1)
    gone = np.cumsum(np.take_along_axis(by_other.T, order, axis=1), axis=1)
    constants = by_other.sum(axis=0)[:, None] - np.concatenate([none.astype(gone.dtype), gone], axis=1)
    return begins, ends, crossed, constants


def _range_maxima(numbers: Numbers, begins: Numbers, ends: Numbers) -> Numbers:
    """Return the maximum of `numbers[begin:end]` for every pair of bounds; no range is empty."""
    powers = np.frexp(ends - begins)[1] - 1
    longest = int(powers.max())
    maxima = np.empty(len(begins), numbers.dtype)
    level = numbers
    for power in range(longest + 1):
        which = powers == power
        maxima[which] = np.maximum(level[begins[which]], level[ends[which] - (1 << power)])
        if power < longest:
            level = np.maximum(level[: -(1 << power)], level[1 << power :])
    return maxima
