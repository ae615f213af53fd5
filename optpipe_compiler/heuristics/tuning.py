"""A search over guides for the dispatcher: from wished orders to good schedules, thousands of runs a minute.

A policy says in a few numbers what goes first and what becomes of each activation; with a wished order (a published
one, or `lockstep`) it makes a guide. The search runs all wished orders of all placements once, then changes the
policies of the best few, one step at a time, keeping what is no worse. Runs are on an instance with few microbatches: a
policy treats those in the middle alike, so it holds for any number of them.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe_compiler.heuristics import PLACEMENTS, published
from optpipe_compiler.heuristics.dispatch import Dispatcher, Guide, Ranks
from optpipe_compiler.heuristics.lockstep import lockstep
from optpipe_compiler.schedule import Kind, Mode, Schedule, Task
from optpipe_compiler.simulate import Stuck

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from optpipe_compiler.heuristics.dispatch import Run
    from optpipe_compiler.problem import Problem

ORDERS = (
    "gis",
    "gis-m",
    "gis-h",
    "gis-h-uniform",
    "interleaved-zb",
    "hanayo",
    "zbv",
    "v-half",
    "v-min",
    "zb-h1",
    "zb-h2",
)
"""Published orders that are worth a wish; the others are special cases of these or of `lockstep`."""
STAYS = (0.5, 3.0, 1.5, 5.0)
"""First policies offload what stays longer than so many transfers there and back."""
PARTS = 3
"""Fill, middle and drain."""
PARITY = 2
"""Activations of even and of odd microbatches may be treated differently."""


@dataclass
class Policy:
    """What goes first, and what becomes of activations; `shift` is [kind][fill, middle, drain][stage of the device]."""

    wish: str
    shift: list[list[list[int]]]
    """Ticks added to the wished starts."""
    slope: list[int]
    """Ticks added per device, for each kind."""
    fill: int
    """Microbatches that count as the fill; and as the drain."""
    drain: int
    modes: list[list[list[int]]]
    """[fill, middle, drain][stage][parity of the microbatch]"""
    fused: list[bool]
    """Per stage of a device."""
    ahead: int


class Tuner:
    """The policies of one placement."""

    def __init__(self, problem: Problem, placed: tuple[str, int]) -> None:
        self.problem = problem
        self.placed = placed
        self.dispatcher = Dispatcher(problem)
        self.local = {s: n for d in range(problem.devices) for n, s in enumerate(problem.stages_of(d))}
        self.turns = max(self.local.values()) + 1
        self.scale = max(stage.forward + stage.backward for stage in problem.stages)
        self.offloads = [s for s in self.local if problem.can_offload(s)]
        self.recomputes = [s for s in self.local if problem.can_recompute(s)]
        self.work = max(sum(problem.stages[s].work for s in mine) for mine in self.dispatcher.mine)
        """Compute ticks of one microbatch on the busiest device."""
        self._wishes: dict[str, tuple[Ranks, Ranks, Ranks]] = {}

    def names(self) -> Iterator[str]:
        """Yield the wished orders that this placement has."""
        half = max(1, self.problem.devices // 2)
        for group in sorted({1, 2, half, self.problem.devices} & set(range(1, self.problem.devices + 1))):
            yield f"lockstep-{group}"
            yield f"lockstep-{group}-back"
        for name in ORDERS:
            if self.placed in PLACEMENTS[name]:
                yield name

    def wish(self, name: str) -> tuple[Ranks, Ranks, Ranks]:
        """Return the wished starts of forwards, backwards and weight gradients; raises NotDefined."""
        if name not in self._wishes:
            self._wishes[name] = self._read(name)
        return self._wishes[name]

    def _read(self, name: str) -> tuple[Ranks, Ranks, Ranks]:
        if name.startswith("lockstep"):
            return lockstep(self.problem, int(name.split("-")[1]), not name.endswith("back"))
        starts = published(self.problem, name).starts
        stages, count = self.problem.stages, range(self.problem.microbatches)

        def start(kind: Kind, s: int, m: int) -> int:
            found = starts.get(Task(kind, s, m))
            if found is None:
                found = starts[Task(Kind.B, s, m)] + (stages[s].backward_input if kind is Kind.W else 0)
            return found

        forward, backward, weight = (
            [[start(kind, s, m) for m in count] for s in range(len(stages))] for kind in (Kind.F, Kind.I, Kind.W)
        )
        return forward, backward, weight

    def first(self, name: str) -> Iterator[Policy]:
        """Yield the policies to begin with."""
        forward, backward, _ = self.wish(name)
        middle = self.problem.microbatches // 2
        stays = {s: backward[s][middle] - forward[s][middle] - self.problem.stages[s].forward for s in self.local}
        away = {s: self.problem.stages[s].offload + self.problem.stages[s].reload for s in self.offloads}
        able = {Mode.OFFLOAD: set(self.offloads), Mode.RECOMPUTE: set(self.recomputes), Mode.KEEP: set(self.local)}
        tables = [self._table(Mode.OFFLOAD, {s for s in away if stays[s] > n * away[s]}) for n in STAYS]
        for turn in range(1, self.turns):  # as PipeOffload does: the lowest stages of every device
            tables.append(self._table(Mode.OFFLOAD, {s for s in away if self.local[s] < turn}))
        tables += [self._table(mode, able[mode]) for mode in (Mode.RECOMPUTE, Mode.KEEP)]
        seen = []
        for table in tables:
            if table not in seen:
                seen.append(table)
                yield self._policy(name, table)

    def _table(self, mode: Mode, stages: set[int]) -> list[list[int]]:
        return [[int(mode if s in stages else Mode.KEEP)] * PARITY for s in sorted(self.local)]

    def _policy(self, name: str, modes: list[list[int]]) -> Policy:
        devices = self.problem.devices
        return Policy(
            wish=name,
            shift=[[[0] * self.turns for _ in range(PARTS)] for _ in range(3)],
            slope=[0, 0, 0],
            fill=devices,
            drain=devices,
            modes=[[list(row) for row in modes] for _ in range(PARTS)],
            fused=[not self.problem.freedom.split] * self.turns,
            ahead=1,
        )

    def guide(self, policy: Policy) -> Guide:
        """Return what the dispatcher follows under the policy."""
        count = self.problem.microbatches
        fill = min(policy.fill, count // 2)
        drain = min(policy.drain, count - fill)
        ranks = []
        for kind, wished in enumerate(self.wish(policy.wish)):
            table = []
            for s, row in enumerate(wished):
                tilt = policy.slope[kind] * self.problem.stages[s].device
                begin, middle, end = (tilt + part[self.local[s]] for part in policy.shift[kind])
                shifted = (
                    [time + begin for time in row[:fill]]
                    + [time + middle for time in row[fill : count - drain]]
                    + [time + end for time in row[count - drain :]]
                )
                table.append(list(itertools.accumulate(shifted, max)))
            ranks.append(table)
        parts = [0 if m < fill else 1 if m < count - drain else 2 for m in range(count)]
        modes = [
            [policy.modes[part][s][m % PARITY] for m, part in enumerate(parts)] for s in range(len(self.problem.stages))
        ]
        fused = [policy.fused[self.local[s]] for s in range(len(self.problem.stages))]
        forward, backward, weight = ranks
        return Guide("dispatch", forward, backward, weight, forward, backward, modes, fused, policy.ahead)

    def run(self, policy: Policy, cutoff: int) -> Run | None:
        """Return the run of the policy, None if it does not end by `cutoff` or at all."""
        try:
            return self.dispatcher.run(self.guide(policy), cutoff)
        except Stuck:
            return None

    def schedule(self, policy: Policy) -> Schedule | None:
        """Return the schedule of the policy, None if it runs out of memory."""
        run = self.run(policy, 1 << 62)
        return None if run is None else run.schedule()

    def changed(self, policy: Policy, random: Random) -> Policy:
        """Return the policy with one to three steps taken at random."""
        result = copy.deepcopy(policy)
        for _ in range(random.choice((1, 1, 2, 3))):
            draw = random.random()
            if draw < 0.4:
                self._shift(result, random)
            elif draw < 0.5:
                result.slope[random.randrange(3)] += int(random.gauss(0, 0.3) * self.scale)
            elif draw < 0.6:
                length = random.randrange(1, 2 * self.problem.devices + 1)
                if random.random() < 0.5:
                    result.fill = length
                else:
                    result.drain = length
            elif draw < 0.95:
                self._treat(result, random)
            elif self.problem.freedom.split and draw < 0.96:
                turn = random.randrange(self.turns)
                result.fused[turn] = not result.fused[turn]
            else:
                result.ahead = random.choice((1, 1, 2, 3))
        return result

    def _shift(self, policy: Policy, random: Random) -> None:
        row = policy.shift[random.randrange(3)][random.randrange(PARTS)]
        width = random.choice((0.3, 1, 3)) * self.scale
        if random.random() < 0.2:
            change = int(random.gauss(0, width))
            row[:] = [old + change for old in row]
        else:
            row[random.randrange(self.turns)] += int(random.gauss(0, width))

    def _treat(self, policy: Policy, random: Random) -> None:
        """Give a range of devices, for one of their stages, another mode."""
        mode = random.choice((Mode.KEEP, Mode.OFFLOAD, Mode.RECOMPUTE))
        able = {Mode.OFFLOAD: self.offloads, Mode.RECOMPUTE: self.recomputes}.get(mode)
        parities = random.choice(((0,), (1,), (0, 1)))
        parts = random.choice(((0, 1, 2), (0,), (1,), (2,)))
        turn = random.randrange(self.turns)
        low = random.randrange(self.problem.devices)
        high = low if random.random() < 0.5 else random.randrange(low, self.problem.devices)
        for s, local in self.local.items():
            if local == turn and low <= self.problem.stages[s].device <= high and (able is None or s in able):
                for part, parity in itertools.product(parts, parities):
                    policy.modes[part][s][parity] = int(mode)
