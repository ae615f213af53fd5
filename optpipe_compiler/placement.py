"""Which layers form a stage, and which device owns it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True)
class Layout:
    """A placement: stage s holds layers `[cuts[s], cuts[s + 1])` and runs on `device_of[s]`."""

    name: str
    cuts: tuple[int, ...]
    device_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.device_of)


def stage_devices(name: str, devices: int, per_device: int) -> tuple[int, ...]:
    """Return the device of each stage: `linear` and `loop` go round, `v` turns back after every pass."""
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
    if name == "linear" and per_device != 1:
        raise BadInput(f"placement linear has 1 stage per device, not {per_device}; expected loop or v")
    return Layout(name, _balanced_cuts(work, stages), stage_devices(name, devices, per_device))


def recut(one: Layout, cost: Callable[[Layout], tuple[int, ...]]) -> Layout:
    """Return the layout with its cuts moved as long as that lowers `cost`.

    A step takes a layer from one stage and gives one to another; the stages between them pass theirs on.
    """
    value, seeking = cost(one), True
    while seeking:
        seeking = False
        for changed in _neighbours(one):
            if (lower := cost(changed)) < value:
                one, value, seeking = changed, lower, True
                break
    return one


def _neighbours(one: Layout) -> Iterator[Layout]:
    """Yield the layouts in which the cuts from one to another stand one layer earlier or later."""
    for first in range(1, one.stages):
        for last in range(first, one.stages):
            for step in (-1, 1):
                moved = tuple(cut + step if first <= n <= last else cut for n, cut in enumerate(one.cuts))
                if moved[first - 1] < moved[first] and moved[last] < moved[last + 1]:
                    yield replace(one, cuts=moved)


def _balanced_cuts(work: Sequence[int], parts: int) -> tuple[int, ...]:
    """Cut `work` into `parts` non-empty runs that minimise the largest sum, then the sum of squares.

    Dynamic programming over prefixes, once for each: O(parts x layers^2), layers being at most a few hundred.
    """
    prefix = list(accumulate(work, initial=0))
    lightest = _best_cuts(prefix, parts, prefix[-1], lambda value, size: max(value, size))[0]
    return _best_cuts(prefix, parts, lightest, lambda value, size: value + size * size)[1]


def _best_cuts(
    prefix: Sequence[int], parts: int, limit: int, extend: Callable[[int, int], int]
) -> tuple[int, tuple[int, ...]]:
    """Return the least value and its cuts; `extend` adds a run to a value, and no run may sum to more than `limit`."""
    count = len(prefix) - 1
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for part in range(1, parts + 1):
        row = {}
        for end in range(part, count - (parts - part) + 1):
            options = [
                (extend(value, size), (*cuts, end))
                for begin, (value, cuts) in best.items()
                if begin < end and (size := prefix[end] - prefix[begin]) <= limit
            ]
            if options:
                row[end] = min(options)
        best = row
    return best[count]
