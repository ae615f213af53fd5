"""Building blocks for a V of stages (Qi et al., Pipeline Parallelism with Controllable Memory, 2024, arXiv:2405.15362).

Section 2: the passes of one microbatch, the building block, are laid out once and repeated every six slots (F = I = W =
one slot per stage); weight gradients fill the gaps. Then the schedule is squeezed, and the passes of warm-up and drain
are moved forward in time, as far as data and the peak of the steady state allow. Section 3: V-Half and V-Min.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import accumulate, pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from optpipe_compiler.model.schedule import Kind, Task
from optpipe_compiler.published.common import Tasks, V, ordered

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.model.problem import Problem

PERIOD = 6
Slots = dict[Task, int]


class BuildingBlock(NamedTuple):
    """Slots of one microbatch on one device: forwards down and up the V, input gradients down and up again."""

    forward_down: int
    forward_up: int
    input_up: int
    input_down: int


@ordered("v-half", V, splits=True)
def v_half(problem: Problem) -> Tasks:
    """Return the order with about half the memory of 1F1B: peak 2 ((P + 2) // 2) stage activations."""
    return Pattern(problem, _half_block).orders()


def _half_block(devices: int, device: int) -> BuildingBlock:
    """Forwards wait a slot per hop on the way down, none on the way up; input gradients likewise."""
    turn = 3 * devices + (0 if devices % 2 else 3)
    return BuildingBlock(2 * device, 3 * devices - 2 - device, turn - 1 + 2 * device, turn + 3 * devices - 2 - device)


@ordered("v-min", V, splits=True)
def v_min(problem: Problem) -> Tasks:
    """Return the order with about a third of the memory of 1F1B: peak 2 ((P + 4) // 3) stage activations."""
    return Pattern(problem, _least_block).orders()


def _least_block(devices: int, device: int) -> BuildingBlock:
    """No pass waits; where P is a multiple of 3 two slots before the gradients keep repetitions apart."""
    turn = 2 * devices + (0 if devices % 3 else 2)
    return BuildingBlock(device, 2 * devices - 1 - device, turn + device, turn + 2 * devices - 1 - device)


class Pattern:
    """Per device the slots of its passes: `block(devices, device)`, repeated for all microbatches, and improved."""

    def __init__(self, problem: Problem, block: Callable[[int, int], BuildingBlock]) -> None:
        self.devices = problem.devices
        self.count = problem.microbatches
        self.last = 2 * problem.devices - 1
        self.rows: list[Slots] = []
        for device in range(problem.devices):
            slots = block(problem.devices, device)
            assert len({slot % PERIOD for slot in slots}) == 4, "the block collides with its repetition"
            passes = zip(((Kind.F, 0), (Kind.F, 1), (Kind.I, 1), (Kind.I, 0)), slots, strict=True)
            self.rows.append(
                {
                    Task(kind, self.last - device if up else device, m): slot + PERIOD * m
                    for (kind, up), slot in passes
                    for m in range(self.count)
                }
            )

    def orders(self) -> Tasks:
        """Fill, compact, squeeze and tighten the pattern, then read off the order."""
        self.rows = [with_weights(row) for row in self.rows]
        peak = max(max(_levels(row)) for row in self.rows)
        first_input, last_forward = Task(Kind.I, 0, 0), Task(Kind.F, 0, self.count - 1)
        self._compact(peak, after=self.rows[0][first_input])
        self._compact(peak, first=self.rows[0][last_forward] + 1)
        self._squeeze()
        self._tighten_drain(self.rows[0][last_forward], peak)
        return [sorted(row, key=lambda task: row[task]) for row in self.rows]

    def _owner(self, stage: int) -> int:
        return min(stage, self.last - stage)

    def _slot(self, task: Task) -> int:
        return self.rows[self._owner(task.stage)].get(task, -1)

    def _earliest(self, task: Task) -> int:
        """The first slot that data and the order of microbatches allow."""
        kind, stage, microbatch = task
        if kind is Kind.F:
            before = Task(kind, stage - 1, microbatch)
        elif kind is Kind.W:
            before = Task(Kind.I, stage, microbatch)
        else:
            before = Task(kind, stage + 1, microbatch) if stage < self.last else Task(Kind.F, stage, microbatch)
        return 1 + max(self._slot(before), self._slot(Task(kind, stage, microbatch - 1)))

    def _passes(self, first: int = 0, after: float = inf) -> list[tuple[int, int, Task]]:
        """Return the passes in slots from the first to before another: slot, device and task, in this order."""
        every = ((slot, device, task) for device, row in enumerate(self.rows) for task, slot in row.items())
        return sorted(one for one in every if first <= one[0] < after)

    def _compact(self, peak: int, first: int = 0, after: float = inf) -> None:
        """Move each pass of these slots, which are those of the warm-up or the drain, to the first that it may have."""
        taken = [set(row.values()) for row in self.rows]
        levels = [_levels(row) for row in self.rows]
        for slot, device, task in self._passes(first, after):
            level = levels[device]
            least = self._earliest(task)
            if task.kind is Kind.F:
                least = max([least, *(t + 1 for t in range(least, slot) if level[t] >= peak)])
            to = next((t for t in range(least, slot) if t not in taken[device]), slot)
            taken[device].remove(slot)
            taken[device].add(to)
            self.rows[device][task] = to
            change = {Kind.F: 1, Kind.W: -1}.get(task.kind, 0)
            for t in range(to, slot):
                level[t] += change

    def _squeeze(self) -> None:
        """Let every pass run as soon as its device and its data are there, the order kept."""
        free = [0] * self.devices
        for _, device, task in self._passes():
            start = max(free[device], self._earliest(task))
            self.rows[device][task] = start
            free[device] = start + 1

    def _tighten_drain(self, border: int, peak: int) -> None:
        """Move the drain's passes forward once more, now ahead of weight gradients, which fill the gaps left."""
        start = border - 2 * PERIOD
        held = [_Held.at(row, start) for row in self.rows]
        self.rows = [{task: slot for task, slot in row.items() if task.kind is not Kind.W} for row in self.rows]
        drains = [{task: slot for task, slot in row.items() if slot > start} for row in self.rows]
        for slot, device, task in self._passes(border + 1):
            drain = drains[device]
            taken = set(drain.values())
            for to in range(max(self._earliest(task), start + 1), slot):
                if to in taken:
                    continue
                drain[task] = self.rows[device][task] = to
                if held[device].highest(drain) <= peak:
                    break
                drain[task] = self.rows[device][task] = slot
        self.rows = [with_weights(row) for row in self.rows]


class _Held(NamedTuple):
    """Where a device stands after `slot`: stage activations held, weight gradients due."""

    slot: int
    level: int
    due: int

    @classmethod
    def at(cls, row: Slots, slot: int) -> _Held:
        count = Counter(task.kind for task, when in row.items() if when <= slot)
        return cls(slot, count[Kind.F] - count[Kind.W], count[Kind.I] - count[Kind.W])

    def highest(self, passes: Slots) -> int:
        """Return the most that is held if `passes` follow and weight gradients fill the gaps between them."""
        slot, level, due = self
        top = level
        for following, task in sorted((slot, task) for task, slot in passes.items()):
            filled = min(due, following - slot - 1)
            level += (task.kind is Kind.F) - filled
            due += (task.kind is Kind.I) - filled
            slot, top = following, max(top, level)
        return top


def with_weights(row: Slots) -> Slots:
    """Return the row with the weight gradients in its gaps, each as soon as one is due."""
    result = dict(row)
    waiting: deque[Task] = deque()
    passes = sorted((slot, task) for task, slot in row.items())
    for (slot, task), (following, _) in pairwise([*passes, (passes[-1][0] + 1 + len(row), passes[-1][1])]):
        if task.kind is Kind.I:
            waiting.append(task._replace(kind=Kind.W))
        for gap in range(slot + 1, following):
            if not waiting:
                break
            result[waiting.popleft()] = gap
    return result


def _levels(row: Slots) -> list[int]:
    """Return how many stage activations are held after each slot."""
    changes = [0] * (max(row.values()) + 1)
    for task, slot in row.items():
        changes[slot] += {Kind.F: 1, Kind.W: -1}.get(task.kind, 0)
    return list(accumulate(changes))
