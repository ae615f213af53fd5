"""Cuts near given ones, all of them moved together: no device may have more than a given load.

Walk the devices in the order of the first pass. Between two of them each pass k stands at some cut c_k; with prefix
sums p over the layers' work and signs g_k, 1 for passes in the first one's direction and -1 for others, let
A = sum over k of g_k p[c_k]. The work of the next device is the A after it less the A before it, so positions of all
passes at once are the states of a dynamic program, in which a device's load is a difference of two numbers. As every
cut stays near where it was, there are few states; those that no sequence of loads within the limit passes are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Bits = NDArray[np.uint64]

EFFORT = 10_000_000
"""Pairs of positions that are compared for one walk, at most; a hundredth of a second for each million."""
NEAR = 4
"""Times as many positions are listed as are kept of those that fit the loads, the nearest."""
ORIGINS = 64
"""Where a walk may begin that must end where it began, a pass later: a bit of a word each."""


@dataclass(frozen=True)
class CutWindow:
    """The cuts near `cuts`, for `directions` of the passes: 1 through the devices as the first one, -1 against it.

    Where all passes go round, the walk may as well begin at a later device, `phase`.
    """

    prefix: Ints
    directions: tuple[int, ...]
    cuts: tuple[int, ...]
    phase: int = 0
    slow: tuple[int, ...] | None = None
    """Thousandths of the time that the devices take for the same work, in the order of the first pass; None: equal."""

    def within(self, target: int) -> list[int] | None:
        """Return cuts in which no device has more than that; None where there are none near."""
        most = self._most_work(target)
        live = self._live(most)
        if live is None:
            return None
        positions, reached = live
        last = positions[-1]
        mine = self._bits(last, -1)
        ends = np.flatnonzero(reached[-1] & mine)
        if not ends.size:
            return None
        at = int(ends[0])
        bit = mine[at]
        found = list(self.cuts)
        for step in range(len(positions) - 1, -1, -1):
            for cut, position in zip(self._rows[step], positions[step][at].tolist(), strict=True):
                found[cut] = position
            if step:
                can = self._can_follow(positions[step - 1], positions[step][at : at + 1], step - 1, most)[:, 0]
                at = int(np.flatnonzero(can & ((reached[step - 1] & bit) != 0))[0])
        return found

    def _most_work(self, target: int) -> list[int]:
        """Return the work that each device may have, in the order of the walk: no more than there is."""
        slow = self.slow or (1000,) * self._devices
        begin = self.phase % self._devices
        there_is = int(self.prefix[-1])
        return [min(there_is, most_work(target, permille)) for permille in (*slow[begin:], *slow[:begin])]

    def _live(self, most: list[int]) -> tuple[list[Ints], list[Bits]] | None:
        """Return the positions that are reached between devices, and for each the origins it is reached from."""
        before = [0, *accumulate(most)]
        first, last = (self._sums(self._near[step]) for step in (0, -1))
        positions: list[Ints] = []
        reached: list[Bits] = []
        for step, near in enumerate(self._near):
            sums = self._sums(near)
            fits = (sums <= first.max() + before[step]) & (sums >= last.min() - (before[-1] - before[step]))
            here = near[fits][: self._most]
            if step == 0:
                bits = self._bits(here, 0)
            else:
                can = self._can_follow(positions[-1], here, step - 1, most)
                bits = np.bitwise_or.reduce(np.where(can, reached[-1][:, None], np.uint64(0)), axis=0)
            live = bits != 0
            if not live.any():
                return None
            positions.append(here[live])
            reached.append(bits[live])
        return positions, reached

    def _can_follow(self, before: Ints, after: Ints, step: int, most: list[int]) -> NDArray[np.bool_]:
        """Whether the device between has no more than it may, and a layer in each pass, [before, after]."""
        can = self._sums(after) <= (self._sums(before) + most[step])[:, None]
        # most of a window's time goes here: comparing small numbers takes a quarter of it
        small_before, small_after = (np.asfortranarray(one * self._signs, np.int32) for one in (before, after))
        for row in range(len(self._signs)):
            if self._rows[step][row] != self._rows[step + 1][row]:
                can &= small_after[:, row] > small_before[:, row, None]
        return can

    def _sums(self, positions: Ints) -> Ints:
        return np.asarray(self.prefix[positions] @ np.array(self._signs))

    def _bits(self, positions: Ints, step: int) -> Bits:
        """Return a bit per position, by where the cuts are that the walk has at its begin and at its end; 0: none."""
        rows = [self._rows[step].index(cut) for cut in self._shared]
        bits = {origin: 1 << number for number, origin in enumerate(self._origins)}
        return np.array([bits.get(tuple(one), 0) for one in positions[:, rows].tolist()], np.uint64)

    @cached_property
    def _devices(self) -> int:
        return (len(self.cuts) - 1) // len(self.directions)

    @cached_property
    def _most(self) -> int:
        """Positions that are kept between two devices."""
        return math.isqrt(EFFORT // self._devices)

    @cached_property
    def _signs(self) -> tuple[int, ...]:
        return (*self.directions, 1) if self.phase else self.directions

    @cached_property
    def _rows(self) -> list[tuple[int, ...]]:
        """The numbers of the cuts where the passes stand, before the first device and after each."""
        devices, last = self._devices, len(self.cuts) - 1
        if self.phase:  # the first pass is under way, the last one follows
            begins = range(self.phase - devices, self.phase + last - devices + 1, devices)
            return [tuple(min(max(0, begin + step), last) for begin in begins) for step in range(devices + 1)]
        begins = range(0, last, devices)
        return [
            tuple(
                begin + (step if way > 0 else devices - step)
                for begin, way in zip(begins, self.directions, strict=True)
            )
            for step in range(devices + 1)
        ]

    @cached_property
    def _shared(self) -> tuple[int, ...]:
        """The cuts at which one pass begins the walk, and another ends it."""
        inner = set(self._rows[0]) & set(self._rows[-1]) - {0, len(self.cuts) - 1}
        return tuple(sorted(inner))

    @cached_property
    def _origins(self) -> list[tuple[int, ...]]:
        near = self._grid(self._shared, _width(len(self._shared), ORIGINS))
        return [tuple(one) for one in near[:ORIGINS].tolist()]

    @cached_property
    def _near(self) -> list[Ints]:
        """Positions of the passes before the first device and after each, the nearest first."""
        found = []
        for row in self._rows:
            free = tuple(sorted(set(row) - {0, len(self.cuts) - 1}))
            near = self._grid(free, _width(len(free), NEAR * self._most))
            begin, end = np.zeros(len(near), np.int64), np.full(len(near), len(self.prefix) - 1)
            column = {0: begin, len(self.cuts) - 1: end} | dict(zip(free, near.T, strict=True))
            found.append(np.stack([column[cut] for cut in row], axis=1))
        return found

    def _grid(self, numbers: Sequence[int], width: int) -> Ints:
        """Return all positions of these cuts within so many layers of where they are, the nearest first."""
        last, layers = len(self.cuts) - 1, len(self.prefix) - 1
        ranges = [
            range(max(n, self.cuts[n] - width), min(layers - (last - n), self.cuts[n] + width) + 1) for n in numbers
        ]
        grid = np.stack([axis.ravel() for axis in np.meshgrid(*ranges, indexing="ij")], 1) if ranges else None
        if grid is None:
            return np.zeros((1, 0), np.int64)
        away = np.abs(grid - np.array([self.cuts[n] for n in numbers])).sum(axis=1)
        return grid[np.argsort(away, kind="stable")]


def most_work(load: int, permille: int) -> int:
    """Return the most work of a device for a load of no more than that, where it takes so many thousandths for it."""
    return (1000 * load + 999) // permille


def _width(dimensions: int, most: int) -> int:
    """Return how far so many cuts may move, at least 1, for no more than so many positions."""
    width = 1
    while dimensions and (2 * width + 3) ** dimensions <= most:
        width += 1
    return width
