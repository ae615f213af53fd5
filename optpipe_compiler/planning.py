"""The search over placements: published schedules, greedy starts, then exact search, cyclic cores and windows.

An Attempt is one placement with the best schedule and bound so far. The Planner improves attempts until the time is
spent or the bounds are met; it may be interrupted at any moment, the attempts then hold the best so far.
"""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from optpipe_compiler import bounds
from optpipe_compiler.heuristics import PLACEMENTS, PUBLISHED, NotDefined, hurried, published
from optpipe_compiler.heuristics.greedy import greedy, policies
from optpipe_compiler.heuristics.mixed import mixed
from optpipe_compiler.problem import coarsen
from optpipe_compiler.schedule import Schedule, value
from optpipe_compiler.simulate import Stuck, peaks, retime
from optpipe_compiler.solver.core import unroll
from optpipe_compiler.solver.search import Searcher
from optpipe_compiler.solver.window import Window
from optpipe_compiler.solver.worker import DETERMINISTIC_PER_S, Event, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from optpipe_compiler.heuristics.greedy import Policy
    from optpipe_compiler.placement import Layout
    from optpipe_compiler.problem import Problem

PUBLISHED_SHARE = 0.6
"""Share of the time limit after which published schedules are no longer tried, if there is one that fits."""
GREEDY_SHARE = 0.15
"""Share of the time limit that greedy schedules may take."""
GREEDY_S_PER_TASK = 2e-4
"""What a greedy schedule costs in seconds per task, roughly; stands for the clock in reproducible mode."""
MIXED_SHARE = 0.25
"""Share of the time limit for mixing kept, offloaded and recomputed activations on published orders."""
MIXED_ORDERS = (
    "gis",
    "gis-m",
    "gis-h",
    "gis-h-uniform",
    "interleaved-zb",
    "zbv",
    "v-half",
    "v-min",
    "hanayo",
    "1f1b",
    "zb-h1",
)
CORE_SHARE = 0.1
"""Share of the time limit for the cyclic core of one placement."""
EXACT = 100
"""Stages x microbatches up to which the full model is searched; larger instances by core and windows."""
EXACT_SHARE = 0.5
"""Share of the time that is left for the full models of all placements."""
CORE_STAGES = 24
"""Stages up to which a cyclic core is searched."""
PERIODS = (100, 104, 109, 117, 125)
"""Periods of the core that are tried, in percent of the busiest device's work per microbatch."""
WINDOWS = (6, 9, 14, 21)
"""Widths of windows, in multiples of that work."""
RESERVE = 50
"""Lowering, comparing and verifying the result take about this many times as long as judging a candidate."""
WINDOW_S = 6.0
"""Time limit of one window."""


@dataclass(frozen=True)
class Limits:
    """How long and how to search."""

    objective: str
    time_limit_s: float
    seed: int
    workers: int
    reproducible: bool


@dataclass
class Attempt:
    """One placement: its exact problem, the best schedule and the best bound so far (ns)."""

    layout: Layout
    problem: Problem
    bound: bounds.Bound
    margin: list[int]
    """Bytes per device kept free for messages beyond what planning counts."""
    best: Schedule | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def placed(self) -> tuple[str, int]:
        """The placement's name and its stages per device."""
        return self.layout.name, self.layout.stages // self.problem.devices

    def tightened(self) -> Problem:
        """Return the problem with the margin taken off its budgets."""
        budget = tuple(b - m for b, m in zip(self.problem.budget, self.margin, strict=True))
        return replace(self.problem, budget=budget)


class Planner:
    """Improves attempts; `judge` returns None for a schedule that may be kept, else the bytes over per device."""

    def __init__(
        self,
        attempts: list[Attempt],
        limits: Limits,
        judge: Callable[[Attempt, Schedule], list[int] | None],
        report: Callable[[str], None],
    ) -> None:
        self.attempts = attempts
        self.limits = limits
        self.judge = judge
        self.report = report
        self.begin = time.monotonic()
        self.spent = 0.0
        self.reserve_s = 0.2
        """Time that lowering and verifying the result will take, estimated from the first schedule that is judged."""
        self.published: dict[str, list[tuple[Attempt, Schedule | str]]] = {}
        """Each published schedule on each placement that it is for, or why it is not defined there."""

    def value(self, timed: Schedule) -> int:
        """Return what is minimised."""
        return value(timed, self.limits.objective)

    def winner(self) -> Attempt | None:
        """Return the attempt with the best schedule."""
        done = [attempt for attempt in self.attempts if attempt.best is not None]
        return min(done, key=lambda attempt: self._reached(attempt), default=None)

    def _reached(self, attempt: Attempt) -> int:
        assert attempt.best is not None
        return self.value(attempt.best)

    def left(self) -> float:
        """Return the seconds that are left; in reproducible mode they are counted in deterministic time."""
        if self.limits.reproducible:
            return self.limits.time_limit_s - self.spent / DETERMINISTIC_PER_S
        return self.limits.time_limit_s - self.reserve_s - (time.monotonic() - self.begin)

    # -- candidates ---------------------------------------------------------------------------------------------

    def heuristics(self) -> None:
        """Try every published schedule and as many greedy ones as their share of the time allows."""
        for _ in range(6):
            excess: dict[int, list[int]] = {}
            self.published.clear()
            for attempt, timed in itertools.chain(self._published(), self._mixed(), self._greedy()):
                if attempt.best is None or self.value(timed) < self._reached(attempt):
                    over = self.keep(attempt, timed, "heuristics")
                    if over is not None:
                        old = excess.get(id(attempt), over)
                        excess[id(attempt)] = list(map(min, old, over))
            stuck = [a for a in self.attempts if a.best is None and id(a) in excess]
            if not stuck or self.winner() is not None:
                return
            for attempt in stuck:
                attempt.margin = [m + e for m, e in zip(attempt.margin, excess[id(attempt)], strict=True)]

    def only(self, name: str) -> None:
        """Keep the published schedule `name` alone, on every placement where it fits or can wait for its memory."""
        for attempt, timed in self._published((name,)):
            self.keep(attempt, timed, name)

    def keep(self, attempt: Attempt, timed: Schedule, phase: str) -> list[int] | None:
        """Make `timed` the attempt's best unless the judge objects; return what it said."""
        begin = time.monotonic()
        over = self.judge(attempt, timed)
        self.reserve_s = max(self.reserve_s, RESERVE * (time.monotonic() - begin))
        if over is None:
            attempt.best = Schedule(attempt.problem, timed.method, timed.starts)
            self.report(f"{phase} {attempt.layout.name}")
        return over

    def _published(self, names: Iterable[str] = PUBLISHED) -> Iterator[tuple[Attempt, Schedule]]:
        late = self._stopwatch(PUBLISHED_SHARE * self.limits.time_limit_s)
        for attempt in sorted(self.attempts, key=lambda a: (a.placed != ("linear", 1), -a.layout.stages)):
            problem = attempt.tightened()
            for name in names:
                if attempt.placed not in PLACEMENTS[name]:
                    continue
                if late() and self.winner() is not None:
                    self.published.setdefault(name, []).append((attempt, "not tried for want of time"))
                    continue
                try:
                    timed = published(problem, name)
                except NotDefined as error:
                    self.published.setdefault(name, []).append((attempt, str(error)))
                    continue
                fast = hurried(timed)
                self.published.setdefault(name, []).append((attempt, fast))
                if all(peak <= budget for peak, budget in zip(peaks(fast), problem.budget, strict=True)):
                    yield attempt, fast
                elif not self._met(attempt):
                    with suppress(Stuck):  # the same orders, each op waiting for its memory
                        yield attempt, retime(timed, problem)

    def _mixed(self) -> Iterator[tuple[Attempt, Schedule]]:
        """Mix modes on the published orders of each placement, unless memory is so plenty that a bound is met."""
        ranked = sorted(self.attempts, key=lambda a: (a.best is None, self._reached(a) if a.best else 0))
        for number, attempt in enumerate(ranked):
            if self._met(attempt):
                continue
            problem = attempt.tightened()
            orders = {name: PUBLISHED[name] for name in MIXED_ORDERS if attempt.placed in PLACEMENTS[name]}
            share = min(MIXED_SHARE * self.limits.time_limit_s, self.left()) / 2 ** (number + 1)
            for timed in mixed(problem, orders, share, self.limits.seed, self._stopwatch(share)):
                yield attempt, timed

    def _stopwatch(self, seconds: float) -> Callable[[], bool]:
        """Return what says whether `seconds` from now have passed; never, in reproducible mode."""
        end = time.monotonic() + seconds
        return lambda: not self.limits.reproducible and time.monotonic() > end

    def _greedy(self) -> Iterator[tuple[Attempt, Schedule]]:
        """Take turns over the placements, the policies of each in their order."""
        begin, share, estimate = time.monotonic(), GREEDY_SHARE * self.limits.time_limit_s, 0.0

        def each(attempt: Attempt) -> list[tuple[Attempt, Policy]]:
            return [(attempt, policy) for policy in policies(attempt.tightened())]

        for turn in itertools.zip_longest(*map(each, self.attempts)):
            for pair in turn:
                if pair is None or self._met(pair[0]):
                    continue
                used = estimate if self.limits.reproducible else time.monotonic() - begin
                if used > share and self.winner() is not None:
                    return
                problem = pair[0].tightened()
                estimate += GREEDY_S_PER_TASK * 3 * len(problem.stages) * problem.microbatches
                try:
                    timed = greedy(problem, pair[1])
                    yield pair[0], min(timed, retime(timed, problem), key=self.value)
                except Stuck:
                    continue

    def _met(self, attempt: Attempt) -> bool:
        """Whether this placement cannot beat what is there already."""
        winner = self.winner()
        return winner is not None and attempt.bound.ticks >= self._reached(winner)

    # -- exact search -------------------------------------------------------------------------------------------

    def search(self) -> None:
        """Improve the placements by exact search, the most promising first."""
        ranked = sorted((a for a in self.attempts if a.best is not None), key=self._reached)
        with Searcher() as searcher:
            small = [a for a in ranked if len(a.problem.stages) * a.problem.microbatches <= EXACT]
            until = self.left() * (1 - EXACT_SHARE)
            for number, attempt in enumerate(small):
                if not self._met(attempt) and self.left() > until + 0.5:
                    self._full_model(searcher, attempt, (self.left() - until) / (len(small) - number))
            cores = [self._core(searcher, attempt) for attempt in ranked[:2] if not self._met(attempt)]
            for attempt, timed in filter(None, cores):
                self._polish(searcher, attempt, timed, ends_only=True)
            winner = self.winner()
            if winner is not None and winner.best is not None and self.limits.objective == "makespan":
                self._polish(searcher, winner, winner.best)

    def _request(self, problem: Problem, hint: Schedule | None, seconds: float, **more: object) -> Request:
        return Request(
            problem=problem,
            hint=hint,
            objective=self.limits.objective,
            time_limit_s=max(0.5, min(seconds, self.left())),
            seed=self.limits.seed,
            workers=self.limits.workers,
            reproducible=self.limits.reproducible,
            **more,  # type: ignore[arg-type]
        )

    def _run(self, searcher: Searcher, attempt: Attempt, request: Request, on_event: Callable[[Event], None]) -> str:
        def listen(event: Event) -> None:
            self.spent += event.spent
            on_event(event)

        status = searcher.search(request, listen)
        if status in ("DIED", "MODEL_INVALID"):
            note = f"search of placement {attempt.layout.name} ended early ({status}): {searcher.last_words()}"
            if note not in attempt.notes:
                attempt.notes.append(note)
        return status

    def _improve(self, attempt: Attempt, found: Schedule, phase: str) -> Schedule | None:
        """Time a solution of a coarse problem exactly and keep it if it is better; None if it cannot be timed."""
        try:
            timed = retime(found, attempt.tightened())
        except Stuck as error:
            note = f"{phase}: a solution for placement {attempt.layout.name} could not be timed ({error})"
            attempt.notes = list(dict.fromkeys([*attempt.notes, note]))
            return None
        if attempt.best is None or self.value(timed) < self._reached(attempt):
            self.keep(attempt, timed, phase)
        return timed

    def _full_model(self, searcher: Searcher, attempt: Attempt, seconds: float) -> None:
        """Search the whole instance; the only search that proves bounds."""
        assert attempt.best is not None
        exact = attempt.tightened()
        coarse = coarsen(exact, attempt.best.makespan)
        try:
            hint = retime(attempt.best, coarse)
        except Stuck:
            return

        def on_event(event: Event) -> None:
            if event.starts is not None:
                self._improve(attempt, Schedule(coarse, "cp-sat", event.starts), "search")
            if event.bound is not None and not any(attempt.margin):
                ns = int(event.bound * coarse.tick_ns / coarse.stretch)
                if ns > attempt.bound.ticks:
                    attempt.bound = bounds.Bound("cp-sat", ns)
            self.report(f"search {attempt.layout.name}")

        self._run(searcher, attempt, self._request(coarse, hint, seconds), on_event)

    def _core(self, searcher: Searcher, attempt: Attempt) -> tuple[Attempt, Schedule] | None:
        """Search a cyclic core, at longer periods until there is one or none could win; return it unrolled."""
        exact = attempt.tightened()
        coarse = coarsen(exact)
        winner = self.winner()
        if len(coarse.stages) > CORE_STAGES or not coarse.freedom.split or coarse.microbatches < 4 or winner is None:
            return None
        work = max(sum(coarse.stages[s].work for s in coarse.stages_of(d)) for d in range(coarse.devices))
        until = self.left() - CORE_SHARE * self.limits.time_limit_s
        for period in dict.fromkeys(-(-work * percent // 100) for percent in PERIODS):
            steady = period * coarse.tick_ns * (coarse.microbatches - 1)
            if steady >= self._reached(winner) or self.left() <= max(1, until):
                break
            found: list[Schedule] = []

            def on_event(event: Event, period: int = period, found: list[Schedule] = found) -> None:
                if event.starts is not None:
                    found.append(unroll(coarse, event.starts, period))
                self.report(f"core {attempt.layout.name}")

            request = self._request(coarse, None, (self.left() - until) / 2, period=period)
            self._run(searcher, attempt, request, on_event)
            if found:
                timed = self._improve(attempt, found[-1], "core")
                return None if timed is None else (attempt, timed)
        return None

    def _polish(self, searcher: Searcher, attempt: Attempt, timed: Schedule, *, ends_only: bool = False) -> None:
        """Improve stretch after stretch of a schedule: its ends, then all of it, with growing windows."""
        exact = attempt.tightened()
        coarse = coarsen(exact, timed.makespan)
        try:
            current = retime(timed, coarse)
        except Stuck:
            return
        period = max(sum(coarse.stages[s].work for s in coarse.stages_of(d)) for d in range(coarse.devices))
        for periods in WINDOWS:
            width = int(periods * period)
            for window in _windows(current, width, ends_only):
                if self.left() <= 1 or self._met(attempt):
                    return
                current = self._window(searcher, attempt, current, window)
            if ends_only or width >= current.makespan:
                return

    def _window(self, searcher: Searcher, attempt: Attempt, current: Schedule, window: Window) -> Schedule:
        """Return the schedule with the window improved, or as it was."""
        best = current

        def on_event(event: Event) -> None:
            nonlocal best
            if event.starts is not None:
                found = Schedule(current.problem, "windows", event.starts)
                with suppress(Stuck):
                    found = min(found, retime(found, current.problem), key=self.value)
                if found.makespan < best.makespan:
                    best = found
                    self._improve(attempt, found, "window")
            self.report(f"windows {attempt.layout.name}")

        self._run(searcher, attempt, self._request(current.problem, current, WINDOW_S, window=window), on_event)
        return best


def _windows(schedule: Schedule, width: int, ends_only: bool) -> Iterator[Window]:
    """Yield the first and the last stretch of `width` ticks, then, by half widths, those between."""
    yield Window(0, width)
    end = max(map(schedule.end, schedule.starts))
    if width < end:
        yield Window(max(0, end - width), end)
        if not ends_only:
            for begin in range(width // 2, end - width, max(1, width // 2)):
                yield Window(begin, begin + width)
