"""Which layers form a stage, and which device owns it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
