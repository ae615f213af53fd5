"""Orders of an earlier schedule on an instance of another size: other microbatches, other devices.

Times are arrays [row, stage, microbatch] in ticks; what they stand for is the order that they give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler import machine
from optpipe_compiler.model.schedule import NONE, Ints, Kind, Mode, Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.machine.policy import Policy
    from optpipe_compiler.model.problem import Problem

_TURNS = (
    ([Kind.F], 1),
    ([Kind.I, Kind.B], -1),
    ([Kind.W], -1),
    ([Kind.R], -1),
    ([Kind.D], 1),
    ([Kind.H], -1),
)
"""Kinds that take turns together, and which way slices go in them."""
LONGER = (1.0, 1.25, 2.0)
"""Multiples of the period at which microbatches are added: the longer, the fewer of them are in flight. With 1,
1.5 and 3 plans of one case are 1.3 % longer (docs/ABLATION.md)."""


def to_microbatches(starts: Ints, count: int, blocks: tuple[int, ...], slices: int = 1) -> Iterator[Ints]:
    """Yield the starts [kind, stage, unit] for `count` microbatches of `slices` units each.

    Some of the middle are left out, or blocks of the middle repeated. `blocks` are numbers of microbatches after which
    an order may repeat itself. The last starts of each have one block after the other, so that they fit wherever a
    block does.
    """
    rows, stages, units = starts.shape
    known = units // slices
    whole = starts.reshape(rows, stages, known, slices).swapaxes(2, 3).reshape(rows, stages * slices, known)
    for carried in _carried(whole, count, blocks):
        yield carried.reshape(rows, stages, slices, count).swapaxes(2, 3).reshape(rows, stages, count * slices)


def _carried(starts: Ints, count: int, blocks: tuple[int, ...]) -> Iterator[Ints]:
    known = starts.shape[2]
    if count <= known:
        yield _repeated(starts, count, 1, 0)
        return
    for block in sorted({one for one in blocks if one <= known}):
        middle = starts[:, :, (known - block) // 2 :][:, :, :block]
        times = middle[middle != NONE]
        whole = int(times.max() - times.min()) + 1
        for period in (*(int(factor * _period(starts, block)) for factor in LONGER), whole):
            yield _repeated(starts, count, block, period)


def in_turn(starts: Ints, slices: int) -> Ints:
    """Return the starts [kind, stage, unit], each at least a tick behind those of earlier units of its stage and kind.

    A block may repeat itself before it has ended. Slices ascend in forwards and offloads and descend on the way back.
    Of equal starts the shorter op would go first, which need not be the earlier slice.
    """
    rows, stages, units = starts.shape
    place = np.arange(units)
    found = starts.reshape(rows, stages, units // slices, slices).copy()
    for kinds, step in _TURNS:
        times = found[kinds].max(axis=0)[:, :, ::step].reshape(stages, units)
        latest = np.maximum.accumulate(times - place, axis=1) + place
        latest = latest.reshape(stages, units // slices, slices)[:, :, ::step]
        found[kinds] = np.where(found[kinds] == NONE, NONE, latest)
    return found.reshape(rows, stages, units)


def _source(known: int, count: int, block: int) -> Ints:
    """Return which of the known microbatches each of `count` is like: from the middle some are left out or repeated."""
    if count <= known:
        return np.delete(np.arange(known), np.arange(known - count) + count // 2)
    first = (known - block) // 2
    end = first + block
    return np.concatenate([np.arange(end), first + np.arange(count - known) % block, np.arange(end, known)])


def _period(starts: Ints, block: int) -> int:
    """Return the ticks from a microbatch of the middle to that which comes `block` later, on the average."""
    known = starts.shape[2]
    low = (known - block) // 2
    high = min(low + block, known - 1)
    both = (starts[:, :, low] != NONE) & (starts[:, :, high] != NONE)
    passed = (starts[:, :, high] - starts[:, :, low])[both]
    return max(1, int(passed.mean()) * block // max(1, high - low)) if passed.size else 1


def _repeated(starts: Ints, count: int, block: int, period: int) -> Ints:
    """Return the starts with the block in the middle repeated, each time `period` later, or some of it left out."""
    known, extra = starts.shape[2], max(0, count - starts.shape[2])
    source, end = _source(known, count, block), (known - block) // 2 + block
    later = np.zeros(count, np.int64)
    later[end : end + extra] = (np.arange(extra) // block + 1) * period
    later[end + extra :] = -(-extra // block) * period
    found: Ints = np.where(starts[:, :, source] == NONE, NONE, starts[:, :, source] + later)
    return found


@dataclass(frozen=True)
class Start:
    """An earlier schedule as the local search takes it: a wished order, and what becomes of each activation."""

    wish: Ints
    """[k, s, m] starts in ticks of forwards, backwards or input gradients, and weight gradients."""
    modes: Ints
    """[s, m] as Mode."""
    fused: Ints
    """[s, m] 1 where the backward is in one piece."""

    @staticmethod
    def of(starts: Ints, backward_input: Ints) -> Start:
        """Return the start that a schedule is: its starts [kind, stage, m]; ticks of each stage's input gradient.

        The second half of a fused backward counts as the weight gradient.
        """
        fused = starts[Kind.B] != NONE
        weight = np.where(fused, starts[Kind.B] + backward_input[:, None], starts[Kind.W])
        modes = np.where(starts[Kind.D] != NONE, Mode.OFFLOAD, np.where(starts[Kind.R] != NONE, Mode.RECOMPUTE, 0))
        wish = np.stack([starts[Kind.F], np.where(fused, starts[Kind.B], starts[Kind.I]), weight])
        return Start(wish, modes.astype(np.int64), fused.astype(np.int64))

    @staticmethod
    def of_schedule(timed: Schedule) -> Start:
        """Return the start that a planned schedule is."""
        return Start.of(timed.ticks, np.array([stage.backward_input for stage in timed.problem.stages]))

    def of_microbatches(self, count: int) -> Start:
        """Return the start for another number of microbatches."""
        known, block = self.wish.shape[2], min(2, self.wish.shape[2])
        source = _source(known, count, block)
        wish = _repeated(self.wish, count, block, _period(self.wish, block))
        return Start(wish, self.modes[:, source], self.fused[:, source])

    def of_devices(self, owners: tuple[int, ...], wanted: tuple[int, ...]) -> Start | None:
        """Return the start for stages on other devices; None where they have another number of stages each.

        `owners` and `wanted` are the device of each stage. In each turn, times are those of the devices that were as
        far along the pipeline, with straight lines between them.
        """
        before, after = turns(owners), turns(wanted)
        if before is None or after is None or before.shape[0] != after.shape[0]:
            return None
        place = np.linspace(0, before.shape[1] - 1, after.shape[1])
        low = np.floor(place).astype(np.int64)
        high, share, nearest = np.ceil(place).astype(np.int64), place - low, np.rint(place).astype(np.int64)
        wish = np.empty((3, len(wanted), self.wish.shape[2]), np.int64)
        modes, fused = (np.empty(wish.shape[1:], np.int64) for _ in range(2))
        for turn in range(after.shape[0]):
            stages = after[turn]
            lower, upper = self.wish[:, before[turn, low]], self.wish[:, before[turn, high]]
            wish[:, stages] = np.rint(lower + share[None, :, None] * (upper - lower))
            modes[stages] = self.modes[before[turn, nearest]]
            fused[stages] = self.fused[before[turn, nearest]]
        return Start(wish, modes, fused)

    def policy(self, problem: Problem) -> Policy:
        """Return the policy that treats activations as the start does, most of each part of the step."""
        stages = range(len(problem.stages))
        found = machine.policy.policy(problem, np.zeros(len(problem.stages), np.int64))
        count, sorts = self.modes.shape[1], found.modes.shape[2]
        fill = min(problem.devices, count // 2)
        drain = min(problem.devices, count - fill)
        ends = (0, fill, count - drain, count)
        for part in range(machine.policy.PARTS):
            for sort in range(sorts):
                inside = [m for m in range(ends[part], ends[part + 1]) if m % sorts == sort]
                for s in stages if inside else ():
                    mode = int(np.bincount(self.modes[s, inside], minlength=3).argmax())
                    found.modes[part, s, sort] = mode if problem.able(s)[mode] else Mode.KEEP
        if problem.freedom.split:
            for s, turn in enumerate(problem.turn_of):
                found.fused[turn] |= 2 * self.fused[s].sum() > count
        return found


def turns(owners: tuple[int, ...]) -> Ints | None:
    """Return [turn, device] the stage; None where devices have different numbers of stages."""
    mine = [[s for s, owner in enumerate(owners) if owner == device] for device in range(max(owners) + 1)]
    if len({len(stages) for stages in mine}) != 1:
        return None
    return np.array(mine, dtype=np.int64).T
