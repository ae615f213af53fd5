"""Which layers form a stage, and which device owns it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_BITS = 61
_NEVER = 1 << _BITS
"""More than any cost; two of them do not overflow."""


@dataclass(frozen=True)
class Layout:
    """A placement: stage s holds layers `[cuts[s], cuts[s + 1])` and runs on `device_of[s]`."""

    name: str
    cuts: tuple[int, ...]
    device_of: tuple[int, ...]
    selective: frozenset[int] = frozenset()
    """The layers that recompute their cheap tensors within their backward."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.device_of)


def stage_devices(name: str, devices: int, per_device: int) -> tuple[int, ...]:
    """Return the device of each stage: `linear` passes once, neighbours first, `loop` goes round, `v` turns back."""
    if name == "linear":
        return tuple(device for device in range(devices) for _ in range(per_device))
    passes = (
        range(devices) if name != "v" or turn % 2 == 0 else reversed(range(devices)) for turn in range(per_device)
    )
    return tuple(device for one in passes for device in one)


def layout(name: str, devices: int, per_device: int, work: Sequence[int]) -> Layout:
    """Cut `work` (one entry per layer) into devices x per_device stages, the heaviest device as light as possible."""
    stages = devices * per_device
    if stages > len(work):
        raise BadInput(
            f"{len(work)} layers cannot fill {devices} devices x {per_device} stages per device: "
            f"expected at most {len(work)} stages"
        )
    return Layout(name, _balanced_cuts(work, stages), stage_devices(name, devices, per_device))


def by_layers(one: Layout) -> Layout:
    """Return a placement of one stage per device with each layer as a stage of its own, on the same device."""
    owners: list[int] = []
    for device, (begin, end) in zip(one.device_of, pairwise(one.cuts), strict=True):
        owners += [device] * (end - begin)
    return replace(one, cuts=tuple(range(one.cuts[-1] + 1)), device_of=tuple(owners))


def _balanced_cuts(work: Sequence[int], parts: int) -> tuple[int, ...]:
    """Cut `work` into `parts` non-empty runs that minimise the largest sum, then the sum of squares, then lexically.

    With prefix sums p and best(k, b) the least cost of cutting the layers from b on into k runs,
    best(k, b) = min over e > b of cost(p[e] - p[b]) + best(k - 1, e), where + is the maximum or the sum:
    O(parts x layers^2) steps of numpy.
    """
    prefix = np.array(list(accumulate(work, initial=0)), dtype=np.int64)
    sizes = prefix[None, :] - prefix[:, None]
    lightest = int(_best(sizes, parts, np.maximum)[parts][0])
    shift = max(0, lightest.bit_length() - (_BITS - parts.bit_length()) // 2)
    rounded = sizes >> shift
    costs = np.where(sizes <= lightest, rounded * rounded, _NEVER)
    best = _best(costs, parts, np.add)
    cuts = [0]
    for left in range(parts, 0, -1):
        begin = cuts[-1]
        totals = costs[begin, begin + 1 :] + best[left - 1][begin + 1 :]
        cuts.append(begin + 1 + int(np.argmin(totals)))
    return tuple(cuts)


def _best(costs: NDArray[np.int64], parts: int, join: np.ufunc) -> list[NDArray[np.int64]]:
    """Return per number of runs, 0 to `parts`, the least joined cost from each layer on; costs[begin, end] of a run."""
    count = len(costs) - 1
    rows = [np.where(np.arange(count + 1) == count, 0, _NEVER)]
    later = np.tri(count + 1, k=0, dtype=bool)  # end <= begin: no run
    for _ in range(parts):
        rows.append(np.where(later, _NEVER, np.minimum(join(costs, rows[-1][None, :]), _NEVER)).min(axis=1))
    return rows
