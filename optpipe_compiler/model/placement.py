"""Which layers form a stage, and which device owns it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PATTERNS = ("linear", "loop", "v")
"""Names of placements that are searched."""
_BITS = 61
_NEVER = 1 << _BITS
"""More than any cost; two of them do not overflow."""


@dataclass(frozen=True)
class Layout:
    """A placement: stage s holds layers `[cuts[s], cuts[s + 1])` and runs on `device_of[s]`.

    Devices are numbered as the pipeline passes them: number n is the machine's device `order[n]`.
    """

    name: str
    cuts: tuple[int, ...]
    device_of: tuple[int, ...]
    selective: frozenset[int] = frozenset()
    """The layers that recompute their cheap tensors within their backward."""
    order: tuple[int, ...] | None = None
    """The machine's devices in the order of the pipeline; None: as the machine numbers them."""
    below_bytes: int | None = field(default=None, compare=False)
    """The caps below which it is searched; None: it is under any cap."""

    def is_searched(self, cap_bytes: int) -> bool:
        """Whether it is searched under a cap."""
        return self.below_bytes is None or cap_bytes < self.below_bytes

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.device_of)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return max(self.device_of) + 1

    @property
    def by_stage(self) -> Iterator[tuple[int, int, int]]:
        """Of each stage its device, its first layer and the one after its last."""
        return zip(self.device_of, self.cuts[:-1], self.cuts[1:], strict=True)

    @property
    def owners(self) -> tuple[int, ...]:
        """The machine's device of each stage."""
        return tuple(map(self.named, self.device_of))

    @property
    def by_number(self) -> Layout:
        """The same placement with the devices in the order of their numbers."""
        return replace(self, order=None)

    def named(self, device: int) -> int:
        """Return the number that the machine has for a device of the pipeline."""
        return device if self.order is None else self.order[device]

    @property
    def devices_by_number(self) -> list[int]:
        """The devices of the pipeline as the machine numbers them."""
        return sorted(range(self.devices), key=self.named)


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
            f"{counted(len(work), 'layer')} cannot fill {counted(devices, 'device')} x "
            f"{counted(per_device, 'stage')} per device: "
            f"expected at most {counted(len(work), 'stage')}"
        )
    return Layout(name, balanced_cuts(work, stages), stage_devices(name, devices, per_device))


def in_runs(one: Layout, sizes: Sequence[int], most: int) -> Layout:
    """Return a placement of one stage per device with a device's layers as up to `most` stages of its own.

    Each is a layer, or a run of layers where a device has more of them; by `sizes` of the layers the largest run is as
    small as can be.
    """
    cuts, owners = [0], list[int]()
    for device, begin, end in one.by_stage:
        within = balanced_cuts(sizes[begin:end], min(most, end - begin))
        cuts += [begin + cut for cut in within[1:]]
        owners += [device] * (len(within) - 1)
    return replace(one, cuts=tuple(cuts), device_of=tuple(owners))


def balanced_cuts(
    work: Sequence[int], parts: int, heads: Sequence[int] | None = None, times: int = 1
) -> tuple[int, ...]:
    """Cut `work` into `parts` non-empty runs that minimise the largest sum, then the sum of squares, then lexically.

    With prefix sums p, w the largest sum that is needed, and best(k, b) the least sum of squares of cutting the layers
    from b on into k runs of no more than that,

        best(k, b) = min over e > b with p[e] - p[b] <= w of (p[e] - p[b])^2 + best(k - 1, e).

    With `heads`, of each layer what comes before it, w is the least such that no run [b, e) has more than
    heads[b] + times (p[e] - p[b]). From a layer to the next heads may grow by `times` the layer's work at most.
    """
    sums, count = list(accumulate(work, initial=0)), len(work)
    before = [0] * count if heads is None else heads
    least = _least(sums, parts, before, times)
    room = [(least - head) // times for head in before]
    """Of a run that begins with each layer."""
    lightest = max(room)
    shift = max(0, lightest.bit_length() - (_BITS - parts.bit_length()) // 2)
    prefix = np.array([*sums, _NEVER], np.int64)
    longest = max(1, *(bisect_right(sums, sums[begin] + room[begin]) - 1 - begin for begin in range(count)))
    begins = np.arange(count + 1)
    ends = np.minimum(begins[:, None] + np.arange(1, longest + 1), count + 1)
    """[begin, length - 1]; count + 1 where there are not so many layers."""
    sizes = prefix[ends] - prefix[begins, None]
    fits = sizes <= np.array([*room, 0])[:, None]
    costs = np.where(fits, (np.minimum(sizes, lightest) >> shift) ** 2, _NEVER)
    best = [np.where(np.arange(count + 2) == count, 0, _NEVER)]
    for _ in range(parts):
        totals = np.minimum(costs + best[-1][ends], _NEVER)
        best.append(np.append(totals.min(axis=1), _NEVER))
    cuts = [0]
    for left in range(parts, 0, -1):
        begin = cuts[-1]
        cuts.append(begin + 1 + int(np.argmin(costs[begin] + best[left - 1][ends[begin]])))
    return tuple(cuts)


def _least(sums: list[int], parts: int, before: Sequence[int], times: int) -> int:
    """Return the least w for which so many runs of layers with these prefix sums have no more than that each.

    Where runs that are as long as a w lets them be are no more than `parts`, there are exactly so many, too: a run of
    several layers can be cut. No others get farther: a run that begins later ends no earlier, by what `balanced_cuts`
    asks of heads.
    """
    ends = list(pairwise(sums))
    low = max(head + times * (b - a) for head, (a, b) in zip(before, ends, strict=True))
    high = before[-1] + times * sums[-1]
    while low < high:
        middle, begin = (low + high) // 2, 0
        for _ in range(parts):
            if begin < len(ends):
                begin = bisect_right(sums, sums[begin] + (middle - before[begin]) // times) - 1
        low, high = (low, middle) if begin == len(ends) else (middle + 1, high)
    return low
