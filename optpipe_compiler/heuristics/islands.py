"""Tuning in processes of its own: an island reads its task from stdin and streams the policies that it finds.

Each island tries its share of the wished orders of all placements, then improves the best ones on its own, with random
numbers of its own. How far it gets is counted in ops dispatched or in seconds; the former is the same on every machine.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from optpipe_compiler.child import Child
from optpipe_compiler.heuristics import NotDefined
from optpipe_compiler.heuristics.narrow import narrowed, widened
from optpipe_compiler.heuristics.tuning import Policy, Tuner
from optpipe_compiler.simulate import Stuck

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from optpipe_compiler.problem import Problem

CLIMBED = 4
"""How many wishes are improved for a share of the time, before the best one gets the rest."""
CLIMB_SHARE = 0.1
SCREEN_SHARE = 0.3
"""Share of the time for trying all wishes."""
PATIENCE = 4.0
"""How many times its time an island may take until it has found anything at all."""
NARROW_SHARE = 0.4
"""Share of the time for tuning narrow pipelines first, where there are many devices."""
SLACK = 1.2
"""A wish is dropped once it is so many times worse than the best one."""
HEAT = 0.001
"""How much worse, relatively, a step may be at first, on the average."""
COOL = 0.8
"""Share of a climb after which no step may be worse."""
TRIAL_OPS = 30
"""A trial takes as long as dispatching so many ops, beside those that it dispatches."""
WHOLE = 4096
"""Stages x microbatches up to which instances are not shortened if they have at most 4 microbatches per device."""


@dataclass(frozen=True)
class Place:
    """One placement: its problem, what it is called, and what it cannot beat."""

    problem: Problem
    placed: tuple[str, int]
    bound: int


@dataclass(frozen=True)
class Quest:
    """What one island is to do."""

    places: tuple[Place, ...]
    number: int
    islands: int
    seed: int
    seconds: float
    ops: int | None
    """If given, this many ops are dispatched instead of watching the clock."""
    is_narrow_first: bool = True
    """Whether pipelines of many devices are tuned on few first."""


@dataclass(frozen=True)
class Found:
    """A policy for places[place], and about what makespan (ticks) it leads to."""

    place: int
    policy: Policy
    value: int


def shortened(problem: Problem) -> Problem:
    """Return the problem with no more microbatches than show its fill, its middle and its drain."""
    devices, stages = problem.devices, len(problem.stages)
    few = 4 * devices if 4 * devices * stages <= WHOLE else 2 * devices
    return replace(problem, microbatches=min(problem.microbatches, max(4, few)))


class _Budget:
    """Says which share of the time is over."""

    def __init__(self, quest: Quest) -> None:
        self.quest = quest
        self.begin = time.monotonic()
        self.ops = 0

    def used(self) -> float:
        if self.quest.ops is not None:
            return self.ops / max(1, self.quest.ops)
        return (time.monotonic() - self.begin) / max(1e-9, self.quest.seconds)


@dataclass
class _Climber:
    """The best policy of one wish on one place."""

    place: int
    policy: Policy
    value: int
    tuner: Tuner = field(repr=False)


class Exploration:
    """What one island does."""

    def __init__(self, quest: Quest) -> None:
        self.quest = quest
        self.budget = _Budget(quest)
        self.random = Random(f"{quest.seed}/{quest.number}")
        self.tuners = [Tuner(shortened(place.problem), place.placed) for place in quest.places]
        self.best = 1 << 62
        self.chosen: list[_Climber] = []
        """The best policies of the best wishes, once they were run."""

    def run(self) -> Iterator[Found]:
        """Screen all wishes, climb from the best few, then from the best one."""
        climbers: list[_Climber] = []
        seeds = list(self._seeds())
        screened = self.budget.used() + SCREEN_SHARE * (1 - self.budget.used())
        for place, tuner, policy in itertools.chain(seeds, self._firsts()):
            if self.budget.used() > (screened if climbers else PATIENCE):
                break
            if self._is_hopeless(place):
                continue
            value = self._value(tuner, place, policy, int(SLACK * self.best) if climbers else 1 << 62)
            if value is not None:
                climbers.append(_Climber(place, policy, value, tuner))
                yield from self._better(climbers[-1])
        chosen = self.chosen
        for one in sorted(climbers, key=lambda c: c.value):
            if len(chosen) < CLIMBED and all((one.place, one.policy.wish) != (c.place, c.policy.wish) for c in chosen):
                chosen.append(one)
        begin = self.budget.used()
        for number, one in enumerate(chosen):
            yield from self._climb(one, begin + (number + 1) * CLIMB_SHARE * (1 - begin))
        for one in sorted(chosen, key=lambda c: c.value)[:1]:
            yield from self._climb(one, 1.0)

    def _seeds(self) -> Iterator[tuple[int, Tuner, Policy]]:
        """Yield what narrow pipelines suggest for wide ones."""
        narrow = [narrowed(place.problem) if self.quest.is_narrow_first else None for place in self.quest.places]
        there = [(number, problem) for number, problem in enumerate(narrow) if problem is not None]
        if not there:
            return
        quest = replace(
            self.quest,
            places=tuple(replace(self.quest.places[number], problem=problem, bound=0) for number, problem in there),
            is_narrow_first=False,
            seconds=NARROW_SHARE * self.quest.seconds,
            ops=None if self.quest.ops is None else int(NARROW_SHARE * self.quest.ops),
        )
        exploration = Exploration(quest)
        for _ in exploration.run():
            pass
        self.budget.ops += exploration.budget.ops
        for one in exploration.chosen:
            number, problem = there[one.place]
            for policy in widened(one.policy, problem, self.tuners[number].problem):
                yield number, self.tuners[number], policy

    def _firsts(self) -> Iterator[tuple[int, Tuner, Policy]]:
        """Yield this island's share of the first policies: one of each wish, our own wishes first, then a second."""
        names = [(place, name) for place, tuner in enumerate(self.tuners) for name in tuner.names()]
        names.sort(key=lambda pair: not pair[1].startswith("lockstep"))
        mine = names[self.quest.number :: self.quest.islands]
        queues: dict[tuple[int, str], list[Policy]] = {}
        turn = 0
        while turn == 0 or any(turn < len(queue) for queue in queues.values()):
            for place, name in mine:
                if turn == 0:
                    queues[place, name] = self._policies(self.tuners[place], name)
                if turn < len(queues[place, name]):
                    yield place, self.tuners[place], queues[place, name][turn]
            turn += 1

    def _policies(self, tuner: Tuner, name: str) -> list[Policy]:
        with suppress(NotDefined, Stuck):
            return list(tuner.first(name))
        return []

    def _is_hopeless(self, place: int) -> bool:
        """Whether the placement cannot beat what is there already."""
        return self.quest.places[place].bound >= self.best

    def _value(self, tuner: Tuner, place: int, policy: Policy, cutoff: int) -> int | None:
        """Return about what makespan the policy leads to on the whole instance, None if that is beyond `cutoff`."""
        whole, short = self.quest.places[place].problem.microbatches, tuner.problem.microbatches
        more = (whole - short) * tuner.work
        begun = tuner.dispatcher.ops
        run = tuner.run(policy, cutoff - more)
        self.budget.ops += TRIAL_OPS + tuner.dispatcher.ops - begun
        if run is None:
            return None
        if whole == short:
            return run.makespan
        return run.makespan + int((whole - short) * max(tuner.work, run.period()))

    def _climb(self, climber: _Climber, until: float) -> Iterator[Found]:
        """Change the policy step by step; how much worse it may get on the way shrinks to nothing (annealing)."""
        begin = self.budget.used()
        policy, value = climber.policy, climber.value
        while (now := self.budget.used()) < until and not self._is_hopeless(climber.place):
            heat = HEAT * climber.value * max(0.0, 1 - (now - begin) / (COOL * (until - begin)))
            cutoff = value + int(heat * self.random.expovariate(1))
            changed = climber.tuner.changed(policy, self.random)
            reached = self._value(climber.tuner, climber.place, changed, cutoff)
            if reached is not None and reached <= cutoff:
                policy, value = changed, reached
            if value < climber.value:
                climber.policy, climber.value = policy, value
                yield from self._better(climber)

    def _better(self, climber: _Climber) -> Iterator[Found]:
        if climber.value < self.best:
            self.best = climber.value
            yield Found(climber.place, climber.policy, climber.value)


class Islands:
    """A context that runs one process per quest."""

    def __init__(self, quests: Sequence[Quest]) -> None:
        self.answers: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.children = [Child("optpipe_compiler.heuristics.islands", self.answers, quest.number) for quest in quests]
        for child, quest in zip(self.children, quests, strict=True):
            child.send(quest)
        self.running = {quest.number for quest in quests}
        self.unfinished: list[int] = []
        """Islands that died before they were done."""

    def __enter__(self) -> Islands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            child.close()

    def wait(self, timeout_s: float) -> list[tuple[int, Found]]:
        """Return what arrives within the time: (island, best policy so far), at most one for each island."""
        newest: dict[int, Found] = {}
        try:
            self._take(self.answers.get(timeout=timeout_s), newest)
            while True:
                self._take(self.answers.get_nowait(), newest)
        except queue.Empty:
            return sorted(newest.items())

    def _take(self, answer: tuple[int, Any], newest: dict[int, Found]) -> None:
        number, found = answer
        if isinstance(found, Found):
            newest[number] = found
        elif number in self.running:
            self.running.remove(number)
            if found is None:
                self.unfinished.append(number)

    def last_words(self) -> str:
        """Return what the first island that died wrote last."""
        child = self.children[self.unfinished[0]]
        child.close()
        return child.last_words


DONE = "done"


def main() -> None:
    """Serve one quest."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business; it ends this process
    if hasattr(os, "nice"):
        os.nice(5)  # the parent, which tries published schedules meanwhile, goes first
    quest = pickle.load(sys.stdin.buffer)
    for answer in itertools.chain(Exploration(quest).run(), (DONE,)):
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    from optpipe_compiler.heuristics import islands  # so that pickled classes have their importable name

    islands.main()
