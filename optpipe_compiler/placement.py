"""Which layers form a stage, and which device owns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

PLACEMENTS = ("linear", "loop", "v")


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

    Dynamic programming over prefixes: O(parts x layers^2), layers being at most a few hundred.
    """
    prefix = [0]
    for item in work:
        prefix.append(prefix[-1] + item)
    count = len(work)
    best: list[tuple[int, int, tuple[int, ...]] | None] = [None] * (count + 1)
    best[0] = (0, 0, (0,))
    for part in range(1, parts + 1):
        row: list[tuple[int, int, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(part, count - (parts - part) + 1):
            row[end] = min(
                (max(state[0], size), state[1] + size * size, (*state[2], end))
                for begin in range(part - 1, end)
                if (state := best[begin]) is not None
                for size in (prefix[end] - prefix[begin],)
            )
        best = row
    final = best[count]
    assert final is not None
    return final[2]
