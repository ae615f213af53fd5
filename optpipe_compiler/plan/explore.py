"""Published schedules beside the local search over policies, on every placement."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING

from optpipe_compiler.errors import MissingDependency
from optpipe_compiler.plan.incumbents import Attempt, Incumbents, Need
from optpipe_compiler.plan.local_search import LOOK_S, Found, LocalSearch, Realiser, SearchedProblem, load
from optpipe_compiler.solver.worker import DETERMINISTIC_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.plan.budget import Budget
    from optpipe_compiler.plan.candidates import Candidates
    from optpipe_compiler.plan.least_memory import LeastMemory

QUICK_SHARE = 0.05
"""Share of the time limit for the local search, where no other search follows. With half of it plans of 60 s are 0.1 %
longer in the mean, with twice of it 0.1 and 1.0 % shorter in two cases (docs/ABLATION.md)."""
LOCAL_SHARE = 0.92
"""Share of the time that is left for the local search, where no instance is small enough for the full model. With 0.7
or 1 plans are 0.1 % longer in the mean (docs/ABLATION.md)."""
SMALL_SHARE = 0.6
"""The same where one is (docs/ABLATION.md)."""
SOON_SHARE = 0.05
"""Share of the time limit in which a published schedule is looked for before anything else, until one fits."""
MOST_THREADS = 16
MISS = 0.01
"""Share of what a policy promised by which it may be worse on the whole instance. With half or twice of it plans of 128
microbatches are the same (docs/ABLATION.md)."""


def explore(
    incumbents: Incumbents, candidates: Candidates, budget: Budget, least: LeastMemory, *, share: float
) -> None:
    """Search over policies for a share of the time that is left, and try all published schedules meanwhile.

    Where nothing fits when half of that is over, `least` has the time until the end. Raises Infeasible if that proves
    that nothing ever will.
    """
    limits = budget.limits
    # those with most stages per device first: these leave most freedom; selective recompute takes what time is left
    promising = sorted(incumbents.attempts, key=lambda a: (bool(a.layout.selective), -a.layout.stages, a.layout.name))
    by_number = {(a.layout, a.problem.is_partial): n for n, a in enumerate(promising) if a.layout.order is None}
    instances = []
    for a in promising:
        reorders = None if a.layout.order is None else by_number.get((a.layout.by_number, a.problem.is_partial))
        instances.append(SearchedProblem(a.problem, a.placed, a.bound.ticks, tuple(a.starts), reorders))
    steps = candidates.steps()
    if not limits.reproducible:
        _load(instances[0], incumbents, steps, budget)
    seconds = max(0.0, share * budget.left())
    mine = replace(limits, time_limit_s=seconds, workers=min(MOST_THREADS, limits.threads))
    with LocalSearch(instances, mine) as search:
        found = _Exploration(incumbents, promising, steps, budget, search)
        if limits.reproducible:
            found.gather()
        else:
            found.follow(time.monotonic() + seconds, time.monotonic() + seconds / 2, least)
        found.compare()
    if search.error is not None:
        incumbents.attempts[0].notes.append(f"local search ended early: {search.error!r}")
    budget.spent += seconds * DETERMINISTIC_PER_S


def _load(instance: SearchedProblem, incumbents: Incumbents, steps: Iterator[None], budget: Budget) -> None:
    """Get ready what the search runs on, and try published schedules meanwhile.

    Where it has to be compiled, once on a machine, the time limit does not count that.
    """
    from optpipe_compiler.machine.compiled import is_kept

    compiled: list[bool] = []
    phase = "published" if is_kept() else "compiling the search, once on this machine"

    def get_ready() -> None:
        with suppress(Exception):  # which the search then meets, too, and says so
            compiled.append(load(instance))

    budget.stop()
    incumbents.report(phase)
    try:
        is_more, soon = True, time.monotonic() + SOON_SHARE * budget.limits.time_limit_s
        while is_more and incumbents.winner() is None and time.monotonic() < soon:
            is_more = next(steps, steps) is None  # the first has the little that they run on compiled before the rest
            incumbents.report(phase)
        loading = Thread(target=get_ready, daemon=True)
        loading.start()
        while loading.is_alive():
            is_more = is_more and next(steps, steps) is None
            if not is_more:
                loading.join(LOOK_S)
            incumbents.report(phase)
    finally:
        passed = budget.go_on(counted=not any(compiled))
    if any(compiled):
        note = f"the search was compiled in {passed:.1f} s, once on this machine: the time limit does not count them"
        incumbents.attempts[0].notes.append(note)


@dataclass
class _Exploration:
    """One run of the search; `attempts` are those of its instances, in their order."""

    incumbents: Incumbents
    attempts: list[Attempt]
    steps: Iterator[None]
    budget: Budget
    search: LocalSearch
    realise_s: float = 0.0
    """Time that the last policy took on the whole instance."""

    def __post_init__(self) -> None:
        is_span = self.budget.limits.is_span
        self.realiser = cache(lambda number: Realiser(self.search.instances[number], is_span=is_span))

    def gather(self) -> None:
        """Take the published schedules first and the best that the search ends with then."""
        for _ in self.steps:
            self.incumbents.report("published")
        found: list[Found] = []
        while self.search.is_running:
            found += self.search.take(0.1)
            self.incumbents.report("local search")
        self._realise_best(found + self.search.take(0.0))

    def follow(self, end: float, half: float, least: LeastMemory) -> None:
        """Take what comes as it comes, until `end` or until the bounds are met and all published schedules tried.

        After `half` of the time this thread, where it has nothing yet, solves for the least memory. Where that does not
        fit either, published schedules, which need more, are tried only if the search finds something.
        """
        trying, incumbents = True, self.incumbents
        while trying or (self.search.is_running and time.monotonic() < end):
            trying = trying and next(self.steps, self) is None
            pause = min(max(0.2, 3 * self.realise_s), max(0.01, end - time.monotonic()))
            self._realise_best(self.search.take(0.0 if trying else pause))
            incumbents.report("local search")
            if not trying and all(map(incumbents.is_met, incumbents.attempts)):
                break
            if incumbents.winner() is None and half <= time.monotonic():
                with suppress(MissingDependency):  # the search may still find something
                    least.find()
                    if least.is_proof:
                        least.refuse()
                    trying = trying and incumbents.winner() is not None
                half = math.inf
        self._realise_best(self.search.take(0.0))
        if incumbents.winner() is not None:
            for _ in self.steps:
                incumbents.report("published")

    def compare(self) -> None:
        """Take the others that were still climbing, too: near plans are compared under noise."""
        for found in self.search.climbing():
            if not self.budget.is_over():
                self._realise(found)

    def _realise_best(self, found: list[Found]) -> None:
        """Run policies on the whole instance, the best (the last) first, until one does there what it promised.

        What was searched on few microbatches may fit these alone, and hold too much, or wait, when there are more.
        """
        for one in reversed(found):
            if self._realise(one):
                return

    def _realise(self, found: Found) -> bool:
        """Run a policy on the whole instance, unless that takes longer than there is time, by what it took before.

        Return whether it is no worse than it promised, by more than `MISS`, or there was no time.
        """
        begin, attempt = time.monotonic(), self.attempts[found.instance]
        late = not self.budget.limits.reproducible and self.budget.left() < self.realise_s
        if late and self.incumbents.winner() is not None:
            return True
        timed = self.realiser(found.instance).schedule(found)
        if timed is not None:
            need = Need(0, None) if attempt.is_as_lowered(timed) else None
            self.incumbents.keep(attempt, timed, "local search", need)
        self.realise_s = time.monotonic() - begin
        return timed is not None and self.incumbents.value(timed) <= (1 + MISS) * found.value
