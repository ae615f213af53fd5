"""How much longer or shorter measured ops are than their base says: what grows with the tokens, and attention apart.

An op takes c (L f + O) + a X g, with L, X and O the base's ns of a whole microbatch that grow with the tokens, of
attention, and of what a slice takes besides, and f and g its unit's shares of the tokens and of the pairs of tokens. Of
units of one length, c and a cannot be told apart and are the same.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

APART = 0.1
"""The least singular value, of columns of length 1, from which on c and a are told apart: noise in the times is noise
in them up to 1 / APART times as large."""


class Sample(NamedTuple):
    """One op, in ns: L f + O and X g of its base, and what it took without the overhead of an op."""

    unit: Hashable
    """Equal for ops of one base."""
    linear: float
    attention: float
    took: float


@dataclass(frozen=True)
class Fit:
    """What the base's times are multiplied by."""

    linear: Mapping[str, float]
    """c, by kind of op."""
    attention: Mapping[str, float]
    """a, by kind of op: the same for all where it is told apart, else c."""
    spread: Mapping[str, float]
    """The interquartile range of an op's time over what the factors say, by kind."""
    off: Mapping[str, float]
    """By how much the median of one unit is off what the factors say, at most, by kind, as a share."""
    is_apart: bool
    """Whether c and a were told apart."""


def fitted(samples: Mapping[str, Sequence[Sample]]) -> Fit:
    """Return the factors for ops of kinds that have the same attention, none of them without samples."""
    linear = _apart(samples)
    is_apart = linear is not None
    if linear is None:
        linear = {
            kind: _middle(one.took / (one.linear + one.attention) for one in ops) for kind, ops in samples.items()
        }
    shared = linear.pop("", 0.0)
    attention = {kind: shared if is_apart else linear[kind] for kind in samples}
    spread, off = {}, {}
    for kind, ops in samples.items():
        by_unit = defaultdict(list)
        for one in ops:
            said = linear[kind] * one.linear + attention[kind] * one.attention
            by_unit[one.unit].append(one.took / said if said else 1.0)
        spread[kind] = quartiles(ratio for ratios in by_unit.values() for ratio in ratios)[1]
        off[kind] = max(abs(_middle(ratios) - 1) for ratios in by_unit.values())
    return Fit(linear, attention, spread, off, is_apart)


def quartiles(values: Iterable[float]) -> tuple[float, float]:
    """Return median and interquartile range."""
    found = list(values)
    if len(found) < 2:
        return found[0], 0.0
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return middle, high - low


def _middle(values: Iterable[float]) -> float:
    return quartiles(values)[0]


def _apart(samples: Mapping[str, Sequence[Sample]]) -> dict[str, float] | None:
    """Return c by kind and, by "", a: the least squares of relative errors of units' medians; None: not told apart."""
    kinds = list(samples)
    rows, weights = [], []
    for column, kind in enumerate(kinds):
        by_unit = defaultdict(list)
        for one in samples[kind]:
            by_unit[one.unit].append(one)
        for ops in by_unit.values():
            took = _middle(one.took for one in ops)
            if took > 0:
                row = [0.0] * (len(kinds) + 1)
                row[column], row[-1] = ops[0].linear / took, ops[0].attention / took
                rows.append(row)
                weights.append(math.sqrt(len(ops)))
    table = np.array(rows).reshape(-1, len(kinds) + 1) * np.array(weights)[:, None]
    lengths = np.linalg.norm(table, axis=0)
    if len(rows) <= len(kinds) or not lengths.all():
        return None
    if np.linalg.svd(table / lengths, compute_uv=False)[-1] < APART:
        return None
    found = _not_negative(table, np.array(weights))
    return dict(zip([*kinds, ""], map(float, found), strict=True))


def _not_negative(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the least squares solution of which no entry is negative: those that would be are 0."""
    found = np.zeros(table.shape[1])
    used = np.ones(table.shape[1], dtype=bool)
    while used.any():
        some = np.linalg.lstsq(table[:, used], wanted, rcond=None)[0]
        if (some >= 0).all():
            found[used] = some
            break
        used[np.flatnonzero(used)[np.argmin(some)]] = False
    return found
