"""Cuts of the layers for placements that pass all devices: the busiest device as light as possible.

With prefix sums p over the layers' work, stage s holding layers [c_s, c_s+1), minimise over the cuts the largest sum of
p[c_s+1] - p[c_s] over the stages of a device, times what the device takes for the same work. One pass is cut exactly.
Of several, two neighbouring passes are cut anew while the others stay: device by device in the order of the first pass,
as far as each can come within a given load, for each place that the first pass can have reached. Pairs take turns until
none gets lighter. What then is above the bound is moved, all passes at once, within windows (windows.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler.plan.windows import CutWindow, most_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Cuts = tuple[int, ...]
    Permille = Sequence[int]

FINE = 10_000
"""Loads that differ by less than such a part count as equal."""
MOST_STATES = 300_000
"""Pairs of positions, times devices, of one trial; in longer models not every border of two passes is tried."""
PHASES = 4
"""Devices at which windows begin, for loops. Of 100 random cuts of `python -m bench.cuts` CP-SAT makes one lighter in 2
deterministic seconds, by 0.09%, and none of Llamas; of 100 on unequal devices two, by 0.04 and 0.64%."""
MOST_SUMS = 300_000
"""Pairs of sums that are looked at for the bound. Layers that are alike have few; those of others lie so close to each
other that they say little."""
NOWHERE = -1


def lightest(work: Sequence[int], device_of: Sequence[int], known: Cuts, permille: Permille | None = None) -> Cuts:
    """Return cuts with the lightest busiest device that was found, none heavier than `known`.

    `work` has an entry per layer, `device_of` one per stage; every pass is through all devices, up or down. Of other
    placements, such as neighbouring stages on one device, `known` is returned. By `permille` devices take so many
    thousandths of the time for the same work; None: they are equal.
    """
    devices = max(device_of) + 1
    passes = [tuple(device_of[begin : begin + devices]) for begin in range(0, len(device_of), devices)]
    if any(sorted(one) != list(range(devices)) for one in passes):
        return known
    cuts, by = list(known), _Placed(_prefix(work), tuple(device_of), _slowness(devices, permille))
    lowest = share(work, device_of, permille)
    if len(passes) == 1:
        _lighten(by, cuts, slice(None), lowest, Loads(lowest, None), lambda most: _one_pass_within(by, most), math.inf)
        return tuple(cuts)
    possible = loads(work, device_of, by.heaviest(cuts), permille)
    seeking, left = True, dict[int, list[int]]()
    while seeking and by.heaviest(cuts) > max(possible.least, lowest + lowest // FINE):
        before = list(cuts)
        for number in range(len(passes) - 1):
            if left.get(number) != cuts:
                _improve(by, passes, cuts, number, lowest, possible)
                left[number] = list(cuts)
        seeking = by.heaviest(cuts) < by.heaviest(before)
    _move(by, passes, cuts, possible)
    return tuple(cuts)


def _slowness(devices: int, permille: Permille | None) -> tuple[int, ...]:
    """Return the thousandths of the time that each device takes for the same work."""
    return (1000,) * devices if permille is None else tuple(permille[:devices])


def share(work: Sequence[int], device_of: Sequence[int], permille: Permille | None = None) -> int:
    """Return what the busiest device plainly cannot be below: an equal share of all work, and the heaviest layer."""
    slow, total = _slowness(max(device_of) + 1, permille), sum(work)
    if set(slow) == {1000}:
        return max(-(-total // len(slow)), *work)
    return max(math.floor(total / sum(Fraction(1000, one) for one in slow)), max(work) * min(slow) // 1000)


@dataclass(frozen=True)
class Loads:
    """What the busiest device can have to compute: no less than `least`, and one of `sums` if these are known."""

    least: int
    sums: Ints | None

    def is_any(self, low: int, high: int) -> bool:
        """Whether the busiest device can have a load of [low, high]."""
        if self.sums is None:
            return high >= self.least
        return bool(np.searchsorted(self.sums, max(low, self.least)) < np.searchsorted(self.sums, high, side="right"))


def loads(work: Sequence[int], device_of: Sequence[int], known: int, permille: Permille | None = None) -> Loads:
    """Return what the busiest device can have, up to `known`, which some cut has, where each device has K stages.

    Where devices are equal:
    It is a sum r of K runs of layers, no less than `share`, nor than the heaviest layer and the K - 1 lightest; and the
    other devices have such sums, too: there are D of them with r_d <= r, and sum of r - r_d = D r - all work.
    """
    devices, prefix = max(device_of) + 1, _prefix(work)
    stages, total = len(device_of) // devices, sum(work)
    slow, lowest = _slowness(devices, permille), max(work) + sum(sorted(work)[: stages - 1])
    lowest = max(share(work, device_of, permille), lowest * min(slow) // 1000)
    if set(slow) != {1000}:
        return Loads(lowest, None)
    begins, ends = np.triu_indices(len(prefix), 1)
    runs = np.unique(prefix[ends] - prefix[begins])
    runs = runs[runs <= known]
    sums = runs
    for _ in range(stages - 1):
        if len(sums) * len(runs) > MOST_SUMS:
            return Loads(lowest, None)
        sums = _sums(sums, runs, known)
    left = MOST_SUMS
    for most in sums[sums >= lowest].tolist():
        spare = devices * most - total
        lacking = most - sums[(sums <= most) & (sums >= most - spare)]
        together = np.zeros(1, np.int64)
        for _ in range(devices):
            left -= len(together) * len(lacking)
            if left < 0:
                return Loads(int(most), sums)
            together = _sums(together, lacking, spare)
        if spare in together:
            return Loads(int(most), sums)
    return Loads(known, sums)


def _sums(some: Ints, others: Ints, most: int) -> Ints:
    """Return the different sums of one and another that are no more than that."""
    found = np.unique(some[:, None] + others)
    return found[found <= most]


def _prefix(work: Sequence[int]) -> Ints:
    return np.array(list(accumulate(work, initial=0)), np.int64)


@dataclass(frozen=True)
class _Placed:
    """The layers' work, the owner of every stage, and what each device takes for the same work."""

    prefix: Ints
    device_of: tuple[int, ...]
    slow: tuple[int, ...]

    def work(self, cuts: Sequence[int], first: int = 0) -> list[int]:
        """Return the work of each device in the stages from `first` on that `cuts` make."""
        found = [0] * len(self.slow)
        for device, (begin, end) in zip(self.device_of[first:], pairwise(cuts), strict=False):
            found[device] += int(self.prefix[end] - self.prefix[begin])
        return found

    def heaviest(self, cuts: Sequence[int]) -> int:
        """Return the load of the busiest device."""
        return max(work * permille // 1000 for work, permille in zip(self.work(cuts), self.slow, strict=True))


def _lighten(
    by: _Placed,
    cuts: list[int],
    part: slice,
    low: int,
    possible: Loads,
    within: Callable[[int], list[int] | None],
    fine: float = FINE,
) -> None:
    """Cut a part anew where that makes the busiest device lighter, whose load cannot be below `low`.

    `within` finds cuts of the part in which no device has more than a given load. The least such load is found by
    bisection, to a part of 1 / `fine`.
    """
    high = by.heaviest(cuts)
    while high - low > low // fine:
        target = (low + high) // 2
        found = within(target) if possible.is_any(low, target) else None
        if found is None:
            low = target + 1
        else:
            cuts[part] = found
            high = by.heaviest(cuts)


def _one_pass_within(by: _Placed, target: int) -> list[int] | None:
    """Return a cut of one pass in which no device has more than that; None where there is none.

    Stage by stage, a layer can be the last one if with those from the last place where the stage can begin it fits.
    """
    ends = np.arange(len(by.prefix))
    can, begins = ends == 0, []
    """Where the stage can begin; and for each stage, by where it ends, the last such place."""
    for device in by.device_of:
        last = np.maximum.accumulate(np.where(can, ends, NOWHERE))
        begin = np.concatenate([[NOWHERE], last[:-1]])
        can = (begin != NOWHERE) & (by.prefix - by.prefix[begin] <= most_work(target, by.slow[device]))
        begins.append(begin)
    if not can[-1]:
        return None
    cuts = [len(by.prefix) - 1]
    for begin in reversed(begins):
        cuts.append(int(begin[cuts[-1]]))
    return cuts[::-1]


def _improve(
    by: _Placed, passes: Sequence[tuple[int, ...]], cuts: list[int], number: int, lowest: int, possible: Loads
) -> None:
    """Cut pass `number` and the next one anew where that makes the busiest device lighter."""
    devices = len(passes[0])
    first, end = number * devices, (number + 2) * devices
    whole, mine = by.work(cuts), by.work(cuts[first : end + 1], first)
    order = passes[number]
    pair = _Pair(
        prefix=by.prefix,
        begin=cuts[first],
        border=cuts[first + devices],
        end=cuts[end],
        others=tuple(whole[device] - mine[device] for device in order),
        slow=tuple(by.slow[device] for device in order),
        turns=passes[number + 1] != order,
    )
    _lighten(by, cuts, slice(first, end + 1), lowest, possible, pair.within)


def _move(by: _Placed, passes: Sequence[tuple[int, ...]], cuts: list[int], possible: Loads) -> None:
    """Move the cuts of all passes within windows until in none, from any phase, the busiest device gets lighter."""
    devices = len(passes[0])
    directions = tuple(1 if one == passes[0] else -1 for one in passes)
    phases = sorted({n * devices // PHASES for n in range(PHASES)}) if min(directions) > 0 else [0]
    slow = tuple(by.slow[device] for device in passes[0])
    number = tried = 0
    while tried < len(phases) and (high := by.heaviest(cuts)) > possible.least + possible.least // FINE:
        window = CutWindow(by.prefix, directions, tuple(cuts), phases[number % len(phases)], slow)
        number, tried = number + 1, tried + 1
        found = window.within(high - 1) if possible.is_any(possible.least, high - 1) else None
        if found is not None:
            cuts[:], tried = found, 0
            _lighten(by, cuts, slice(None), possible.least, possible, window.within)


@dataclass(frozen=True)
class _Pair:
    """Two passes over layers [begin, end); `others` is the work of each device besides, in the first pass's order."""

    prefix: Ints
    begin: int
    border: int
    end: int
    others: tuple[int, ...]
    slow: tuple[int, ...]
    turns: bool
    """Whether the second pass goes through the devices in the other direction."""

    def within(self, target: int) -> list[int] | None:
        """Return cuts in which no device has more than that; None where there are none.

        After each device, for each place where the second pass can begin: how far it can be, by where the first one is,

            far'[c + n] = max over n of the last e with p[e] - p[far[c]] <= room - (p[c + n] - p[c]).

        A second pass in the other direction comes back from the end: its places, and its p, are counted from there on,
        and where it ends it meets the first.
        """
        if self.turns:
            p, begins = self.prefix[self.end] - self.prefix[self.end :: -1], np.zeros(1, np.int64)
        else:
            p, begins = self.prefix, self._borders()
        far = np.full((len(begins), self.end + 1), NOWHERE, np.int64)
        far[:, self.begin] = begins
        steps = []
        for index, (slow, other) in enumerate(zip(self.slow, self.others, strict=True)):
            left, best, by = len(self.others) - 1 - index, np.full_like(far, NOWHERE), np.zeros_like(far)
            for count, starts, rest in self._runs(most_work(target, slow) - other):
                known, ends = far[:, starts], starts + count
                reach = np.searchsorted(p, p[known] + rest, side="right") - 1
                if self.turns:
                    reach = np.minimum(reach, self.end - ends - 2 * left)
                else:
                    reach = np.where(ends <= begins[:, None] - left, np.minimum(reach, self.end - left), NOWHERE)
                reach = np.where((known != NOWHERE) & (reach > known), reach, NOWHERE)
                here = best[:, ends]
                by[:, ends] = np.where(reach > here, count, by[:, ends])
                best[:, ends] = np.maximum(reach, here)
            steps.append((far, by))
            far = best
        borders = np.arange(self.end + 1) if self.turns else begins
        rows = np.zeros_like(borders) if self.turns else np.arange(len(begins))
        done = np.flatnonzero(far[rows, borders] == (self.end - borders if self.turns else self.end))
        if not done.size:
            return None
        nearest = done[np.argmin(np.abs(borders[done] - self.border))]
        return self._back(steps, int(rows[nearest]), int(borders[nearest]))

    def _back(self, steps: list[tuple[Ints, Ints]], row: int, border: int) -> list[int]:
        """Return the cuts of both passes, looked up from the last device to the first."""
        first, second = [border], [self.end]
        for far, by in reversed(steps):
            first.append(first[-1] - int(by[row, first[-1]]))
            second.append(int(far[row, first[-1]]))
        return [*reversed(first), *([self.end - one for one in second[1:]] if self.turns else second[-2::-1])]

    def _borders(self) -> Ints:
        """Return where the second pass may begin: everywhere, or in long models here and there."""
        devices = len(self.others)
        every = np.arange(self.begin + devices, self.end - devices + 1)
        most = max(8, MOST_STATES // (devices * (self.end - self.begin)))
        if len(every) <= most:
            return every
        return np.unique([*every[:: -(-len(every) // most)], self.border])

    def _runs(self, most: int) -> list[tuple[int, Ints, Ints]]:
        """Return, for each number of layers, where such runs of at most that work begin, and what then is left."""
        found = []
        for count in range(1, self.end - self.begin + 1):
            starts = np.arange(self.begin, self.end + 1 - count)
            rest = most - (self.prefix[starts + count] - self.prefix[starts])
            fits = rest >= 0
            if not fits.any():
                break
            found.append((count, starts[fits], rest[fits]))
        return found
