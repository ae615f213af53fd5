"""Exact search by CP-SAT: small instances as a whole, the best schedule of larger ones in windows."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from optpipe_compiler import machine
from optpipe_compiler.model import bounds
from optpipe_compiler.model.problem import coarsen, proven_ns
from optpipe_compiler.model.schedule import Kind, Schedule, Stuck
from optpipe_compiler.solver.search import Searcher
from optpipe_compiler.solver.window import Window
from optpipe_compiler.solver.worker import Request, SearchEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.plan.budget import Budget
    from optpipe_compiler.plan.incumbents import Attempt, Incumbents

EXACT = 100
"""Stages x microbatches up to which the full model is searched; larger instances by core and windows. With 48 plans of
two cases are 0.5 % shorter and 0.1 % longer, of one seed (docs/ABLATION.md)."""
FINER = (4, 5, 6, 7, 8, 10, 12)
"""How fine ticks are tried, in quarters, until a schedule fits (docs/ABLATION.md)."""
EXACT_SHARE = 0.7
"""Share of the time that is left for the full models of all placements, where they are small enough. They are there for
the proof of tiny instances: windows alone find the same plans in three cases of docs/ABLATION.md."""
WINDOWS = (2, 4, 6, 9, 14, 21)
"""Widths of windows, in multiples of the busiest device's work on one microbatch. Without windows a plan of 2 devices
and 8 microbatches is 1.6 % longer, even if the local search has their time (docs/ABLATION.md)."""
WINDOW_S = 4.0
"""Time limit of one window. With half or twice of it plans differ by 0.1 % at most in the mean (docs/ABLATION.md)."""


def is_small(attempt: Attempt) -> bool:
    """Whether the full model of a placement can be searched."""
    return len(attempt.problem.stages) * attempt.problem.microbatches <= EXACT


def exact(incumbents: Incumbents, budget: Budget) -> None:
    """Search small placements as a whole, then the best one in windows; without ortools note that this is left out."""
    winner = incumbents.winner()
    if winner is not None and find_spec("ortools") is None:
        winner.notes.append("the exact search is left out: No module named 'ortools'")
        return
    ranked = sorted((a for a in incumbents.attempts if a.best is not None), key=incumbents.reached)
    with Searcher() as searcher:
        search = _Exact(incumbents, budget, searcher)
        small, until = list(filter(is_small, ranked)), budget.left() * (1 - EXACT_SHARE)
        proven = math.inf
        for number, attempt in enumerate(small):
            if attempt.bound.ticks >= proven:  # what is proven of all placements is the lowest bound of them
                continue
            if not incumbents.is_met(attempt) and budget.left() > until + 0.5:
                search.full_model(attempt, (budget.left() - until) / (len(small) - number))
            proven = min(proven, attempt.bound.ticks)
        winner = incumbents.winner()
        if winner is not None and budget.left() > 1:
            search.polish(winner)


@dataclass
class _Exact:
    incumbents: Incumbents
    budget: Budget
    searcher: Searcher

    def _run(
        self,
        attempt: Attempt,
        hint: Schedule,
        seconds: float,
        on_event: Callable[[SearchEvent], None],
        window: Window | None = None,
    ) -> None:
        """Search the whole hint, or a window of it, for so long or as long as there is time."""

        def listen(event: SearchEvent) -> None:
            self.budget.spent += event.spent
            on_event(event)

        limits = replace(self.budget.limits, time_limit_s=max(0.5, min(seconds, self.budget.left())))
        status = self.searcher.search(Request(hint, limits, window), listen)
        if status in ("DIED", "MODEL_INVALID"):
            attempt.note(
                f"search of placement {attempt.layout.name} ended early ({status}): {self.searcher.last_words}"
            )

    def _improve(self, attempt: Attempt, found: Schedule, phase: str) -> None:
        """Time a solution of a coarse problem exactly and keep it if it is better."""
        try:
            timed = machine.orders.retime(found, attempt.problem)
        except Stuck as error:
            attempt.note(f"{phase}: a solution for placement {attempt.layout.name} could not be timed ({error})")
            return
        if self.incumbents.is_better(attempt, timed):
            self.incumbents.keep(attempt, timed, phase)

    def _coarse(self, attempt: Attempt) -> Schedule | None:
        """Return the attempt's best schedule in larger ticks and units; None where rounded it does not fit.

        Where memory is short there may be no room for a message that, rounded, comes an op too soon: other ticks are
        tried then.
        """
        best, problem = attempt.best, attempt.problem
        assert best is not None
        for parts in FINER:
            with suppress(Stuck):
                return machine.orders.retime(best, coarsen(problem, best.makespan * FINER[0] // parts))
            if self.budget.left() <= 1:
                break
        return None

    def full_model(self, attempt: Attempt, seconds: float) -> None:
        """Search the whole instance; the only search that proves bounds."""
        hint = self._coarse(attempt)
        if hint is None:
            return
        coarse = hint.problem

        def on_event(event: SearchEvent) -> None:
            if event.starts is not None:
                self._improve(attempt, Schedule(coarse, "cp-sat", event.starts), "search")
            if event.bound is not None:
                ns = proven_ns(coarse, event.bound, is_span=self.budget.limits.is_span)
                if ns > attempt.bound.ticks:
                    attempt.bound = bounds.Bound("cp-sat", ns)
            self.incumbents.report(f"search {attempt.layout.name}")

        self._run(attempt, hint, seconds, on_event)

    def polish(self, attempt: Attempt) -> None:
        """Improve stretch after stretch of the best schedule, its ends first, with growing windows."""
        current = self._coarse(attempt)
        if current is None:
            return
        for periods in WINDOWS:
            width = periods * current.problem.busiest
            for window in _windows(current, width):
                if self.budget.left() <= 1 or self.incumbents.is_met(attempt):
                    return
                if _is_loose(current, window):
                    current = self._window(attempt, current, window)
            if width >= current.makespan:
                return

    def _window(self, attempt: Attempt, current: Schedule, window: Window) -> Schedule:
        """Return the schedule with the window improved, or as it was."""
        best, is_span = current, self.budget.limits.is_span

        def on_event(event: SearchEvent) -> None:
            nonlocal best
            if event.starts is not None:
                found = Schedule(current.problem, "windows", event.starts)
                with suppress(Stuck):  # ops start as soon as they may, however short a later start would make the span
                    early = machine.orders.retime(found, current.problem)
                    found = early if is_span else min(found, early, key=self.incumbents.value)
                if self.incumbents.value(found) < self.incumbents.value(best):
                    best = found
                    self._improve(attempt, found, "window")
            self.incumbents.report(f"windows {attempt.layout.name}")

        self._run(attempt, current, WINDOW_S, on_event, window)
        return best


def _is_loose(schedule: Schedule, window: Window) -> bool:
    """Whether every device idles or recomputes in the window, without which the rest cannot move earlier."""
    for lane in schedule.compute_lanes:
        inside = ((max(schedule.starts[t], window.begin), min(schedule.end(t), window.end), t) for t in lane)
        busy = sum(max(0, end - begin) for begin, end, task in inside if task.kind is not Kind.R)
        if busy >= window.end - window.begin:
            return False
    return True


def _windows(schedule: Schedule, width: int) -> Iterator[Window]:
    """Yield the first and the last stretch of `width` ticks, then, by half widths, those between."""
    yield Window(0, width)
    end = max(map(schedule.end, schedule.starts))
    if width < end:
        yield Window(max(0, end - width), end)
        for begin in range(width // 2, end - width, max(1, width // 2)):
            yield Window(begin, begin + width)
