"""The search over placements: published schedules beside a local search, then exact search of the whole or of windows.

An Attempt is one placement with the best schedule and bound so far. The Planner improves attempts until the time is
spent or the bounds are met; it may be interrupted at any moment, the attempts then hold the best so far.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING

from optpipe_compiler.model import bounds
from optpipe_compiler.model.problem import coarsen
from optpipe_compiler.model.schedule import Kind, Schedule, Stuck, value
from optpipe_compiler.plan.candidates import Candidates
from optpipe_compiler.plan.local_search import Effort, Found, Instance, LocalSearch, Realiser
from optpipe_compiler.plan.spare import spared
from optpipe_compiler.solver.search import Searcher
from optpipe_compiler.solver.window import Window
from optpipe_compiler.solver.worker import DETERMINISTIC_PER_S, Event, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.model.placement import Layout
    from optpipe_compiler.model.problem import Problem

QUICK_SHARE = 0.05
"""Share of the time limit for the local search, where no other search follows."""
LOCAL_SHARE = 0.92
"""Share of the time that is left for the local search, where no instance is small enough for the full model."""
MOST_THREADS = 16
EXACT = 100
"""Stages x microbatches up to which the full model is searched; larger instances by core and windows."""
EXACT_SHARE = 0.7
"""Share of the time that is left for the full models of all placements, where they are small enough."""
WINDOWS = (2, 4, 6, 9, 14, 21)
"""Widths of windows, in multiples of that work."""
LOWER_S_PER_TASK = 1.5e-4
"""Seconds that lowering and verifying the result take per task, roughly."""
SPARE_S_PER_TASK = 2e-5
"""Seconds that it takes per task to see what can stay: at most four rounds of 5 us."""
WINDOW_S = 4.0
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
    """One placement: its exact problem (ns, bytes), the best schedule and the best bound so far."""

    layout: Layout
    problem: Problem
    bound: bounds.Bound
    fixed: tuple[int, ...]
    """Bytes that each device always holds."""
    lowered: Callable[[Schedule], tuple[list[int], list[int]]]
    """The peaks in bytes that lowering a schedule leads to: by device, and of its offloads on the host."""
    best: Schedule | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def placed(self) -> tuple[str, int]:
        """The placement's name and its stages per device."""
        return self.layout.name, self.layout.stages // self.problem.devices

    @property
    def is_partial(self) -> bool:
        """Whether an offload leaves a part of the activation on the device, as published schedules never do."""
        return any(stage.staying for stage in self.problem.stages)

    @cached_property
    def has_instants(self) -> bool:
        """Whether some op may take no time: what it holds depends on the order within a moment, as lowering has it."""
        problem = self.problem
        for s, stage in enumerate(problem.stages):
            lengths = [stage.forward, stage.backward, stage.backward_input, stage.backward_weight]
            lengths += [stage.recompute] * problem.can_recompute(s)
            lengths += [stage.offload_alone, stage.reload_alone] * problem.can_offload(s)
            if min(lengths) == 0:
                return True
        return False

    def need(self, timed: Schedule) -> Need:
        """Return what the file of a schedule of this placement would need of the caps."""
        from optpipe_compiler.machine.orders import held

        problem = self.problem
        if self.has_instants:
            promised, host_peaks = self.lowered(timed)
            peaks = list(map(int.__sub__, promised, self.fixed))
        else:
            peaks, host_peaks, _ = held(timed)
        over = [max(0, peak - budget) for peak, budget in zip(peaks, problem.budget, strict=True)]
        fits = not any(over) and (problem.host_budget is None or sum(host_peaks) <= problem.host_budget)
        return Need(max(map(int.__add__, self.fixed, peaks)), None if fits else over)


@dataclass(frozen=True)
class Need:
    """The memory that a schedule's file promises to keep to, and the bytes by which each device is over its cap."""

    peak_bytes: int
    over: list[int] | None
    """None if it fits."""


class Planner:
    """Improves attempts."""

    def __init__(
        self,
        attempts: list[Attempt],
        limits: Limits,
        report: Callable[[str], None],
    ) -> None:
        self.attempts = attempts
        self.limits = limits
        self.report = report
        self.begin = time.monotonic()
        self.spent = 0.0
        most = max((attempt.problem.tasks for attempt in attempts), default=0)
        self.reserve_s = lowering_s(most) + SPARE_S_PER_TASK * most
        """Time that sparing, lowering and verifying the result will take."""
        self.realise_s = 0.0
        """Time that the last policy took on the whole instance."""
        self.published = Candidates(self)
        self.steps = self.published.steps()
        """Tries one published schedule at each step."""

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

    def is_better(self, attempt: Attempt, timed: Schedule) -> bool:
        """Whether `timed` is better than the attempt's best."""
        return attempt.best is None or self.value(timed) < self._reached(attempt)

    def left(self) -> float:
        """Return the seconds that are left; in reproducible mode they are counted in deterministic time."""
        if self.limits.reproducible:
            return self.limits.time_limit_s - self.spent / DETERMINISTIC_PER_S
        return self.limits.time_limit_s - self.reserve_s - (time.monotonic() - self.begin)

    # -- candidates ---------------------------------------------------------------------------------------------

    def heuristics(self) -> None:
        """Try every published schedule that has not been tried."""
        for _ in self.steps:
            self.report("published")

    def only(self, name: str) -> None:
        """Keep the published schedule `name` alone, on every placement where it fits or can wait for its memory."""
        for _ in self.published.steps((name,)):
            self.report("published")

    def keep(self, attempt: Attempt, timed: Schedule, phase: str, need: Need | None = None) -> list[int] | None:
        """Make `timed` the attempt's best if it fits; return by how many bytes each device is over if it does not."""
        over = (need or attempt.need(timed)).over
        if over is None:
            attempt.best = timed
            self.report(f"{phase} {attempt.layout.name}")
        return over

    def _met(self, attempt: Attempt) -> bool:
        """Whether this placement cannot beat what is there already."""
        winner = self.winner()
        return winner is not None and attempt.bound.ticks >= self._reached(winner)

    # -- local search -------------------------------------------------------------------------------------------

    def _promising(self) -> list[Attempt]:
        """Return the attempts with most stages per device first: these leave most freedom."""
        return sorted(self.attempts, key=lambda a: (-a.layout.stages, a.layout.name))

    def explore(self, *, is_last: bool) -> None:
        """Search over policies, and try the published schedules meanwhile, for a share of the time."""
        small = any(len(a.problem.stages) * a.problem.microbatches <= EXACT for a in self.attempts)
        share = QUICK_SHARE if is_last else 1 - EXACT_SHARE if small else LOCAL_SHARE
        seconds = max(0.0, share * self.left())
        threads = min(MOST_THREADS, self.limits.workers or _cores())
        is_span = self.limits.objective == "span"
        effort = Effort(seconds, self.limits.seed, threads, self.limits.reproducible, is_span)
        promising = self._promising()
        instances = [Instance(a.problem, a.placed, a.bound.ticks) for a in promising]
        self.realise = cache(lambda number: Realiser(instances[number], is_span=is_span))
        with LocalSearch(instances, effort) as search:
            if self.limits.reproducible:
                self._gather(search)
            else:
                self._follow(search, time.monotonic() + seconds)
        if search.error is not None:
            self.attempts[0].notes.append(f"local search ended early: {search.error!r}")
        self.spent += seconds * DETERMINISTIC_PER_S

    def _gather(self, search: LocalSearch) -> None:
        """Take the published schedules first and the best that the search ends with then."""
        self.heuristics()
        found: list[Found] = []
        while search.is_running:
            found = (found + search.take(0.1))[-1:]
            self.report("local search")
        for one in (found + search.take(0.0))[-1:]:
            self._realise(one)

    def _follow(self, search: LocalSearch, end: float) -> None:
        """Take what comes as it comes, until `end` or until the bounds are met and all published schedules tried."""
        trying = True
        while trying or (search.is_running and time.monotonic() < end):
            trying = trying and next(self.steps, self) is None
            pause = min(max(0.2, 3 * self.realise_s), max(0.01, end - time.monotonic()))
            for found in search.take(0.0 if trying else pause)[-1:]:
                self._realise(found)
            self.report("local search")
            if not trying and all(map(self._met, self.attempts)):
                return
        for found in search.take(0.0)[-1:]:
            self._realise(found)

    def _realise(self, found: Found) -> None:
        """Run a policy on the whole instance, unless that takes longer than there is time, by what it took before."""
        begin, attempt = time.monotonic(), self._promising()[found.instance]
        late = not self.limits.reproducible and self.left() < self.realise_s
        if late and self.winner() is not None:
            return
        timed = self.realise(found.instance).schedule(found)
        if timed is not None and self.is_better(attempt, timed):
            self.keep(attempt, timed, "local search", None if attempt.has_instants else Need(0, None))
        self.realise_s = time.monotonic() - begin

    # -- what is left over --------------------------------------------------------------------------------------

    def spare(self) -> None:
        """Keep the activations of the best schedule for which there is room."""
        from optpipe_compiler.machine.orders import retime

        attempt = self.winner()
        if attempt is None or attempt.best is None:
            return
        budget = list(attempt.problem.budget)
        for number in range(4):
            if number and not self.limits.reproducible and self.left() < 0:
                return
            less = spared(attempt.best, budget)
            if less is attempt.best:
                return
            with suppress(Stuck):
                less = min(retime(less, attempt.problem), less, key=self.value)
            over = self.keep(attempt, less, "sparing")
            if over is None:
                return
            budget = [b - e for b, e in zip(budget, over, strict=True)]

    # -- exact search -------------------------------------------------------------------------------------------

    def search(self) -> None:
        """Improve the placements by exact search: small ones as a whole, the best one in windows."""
        ranked = sorted((a for a in self.attempts if a.best is not None), key=self._reached)
        with Searcher() as searcher:
            small = [a for a in ranked if len(a.problem.stages) * a.problem.microbatches <= EXACT]
            until = self.left() * (1 - EXACT_SHARE)
            for number, attempt in enumerate(small):
                if not self._met(attempt) and self.left() > until + 0.5:
                    self._full_model(searcher, attempt, (self.left() - until) / (len(small) - number))
            winner = self.winner()
            if winner is None or winner.best is None or self.left() <= 1:
                return
            if self.limits.objective == "makespan":
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
            note = f"search of placement {attempt.layout.name} ended early ({status}): {searcher.last_words}"
            if note not in attempt.notes:
                attempt.notes.append(note)
        return status

    def _improve(self, attempt: Attempt, found: Schedule, phase: str) -> None:
        """Time a solution of a coarse problem exactly and keep it if it is better."""
        from optpipe_compiler.machine.orders import retime

        try:
            timed = retime(found, attempt.problem)
        except Stuck as error:
            note = f"{phase}: a solution for placement {attempt.layout.name} could not be timed ({error})"
            attempt.notes = list(dict.fromkeys([*attempt.notes, note]))
            return
        if self.is_better(attempt, timed):
            self.keep(attempt, timed, phase)

    def _full_model(self, searcher: Searcher, attempt: Attempt, seconds: float) -> None:
        """Search the whole instance; the only search that proves bounds."""
        from optpipe_compiler.machine.orders import retime

        assert attempt.best is not None
        exact = attempt.problem
        coarse = coarsen(exact, attempt.best.makespan)
        try:
            hint = retime(attempt.best, coarse)
        except Stuck:
            return

        def on_event(event: Event) -> None:
            if event.starts is not None:
                self._improve(attempt, Schedule(coarse, "cp-sat", event.starts), "search")
            if event.bound is not None:
                ns = int(event.bound * coarse.tick_ns / coarse.stretch)
                if ns > attempt.bound.ticks:
                    attempt.bound = bounds.Bound("cp-sat", ns)
            self.report(f"search {attempt.layout.name}")

        self._run(searcher, attempt, self._request(coarse, hint, seconds), on_event)

    def _polish(self, searcher: Searcher, attempt: Attempt, timed: Schedule) -> None:
        """Improve stretch after stretch of a schedule, its ends first, with growing windows."""
        from optpipe_compiler.machine.orders import retime

        coarse = coarsen(attempt.problem, timed.makespan)
        try:
            current = retime(timed, coarse)
        except Stuck:
            return
        period = max(sum(coarse.stages[s].work for s in coarse.stages_of(d)) for d in range(coarse.devices))
        for periods in WINDOWS:
            width = int(periods * period)
            for window in _windows(current, width):
                if self.left() <= 1 or self._met(attempt):
                    return
                if _is_loose(current, window):
                    current = self._window(searcher, attempt, current, window)
            if width >= current.makespan:
                return

    def _window(self, searcher: Searcher, attempt: Attempt, current: Schedule, window: Window) -> Schedule:
        """Return the schedule with the window improved, or as it was."""
        from optpipe_compiler.machine.orders import retime

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


def lowering_s(count: int) -> float:
    """Return about how many seconds it takes to lower and verify a schedule of so many tasks."""
    return 0.2 + LOWER_S_PER_TASK * count


def _is_loose(schedule: Schedule, window: Window) -> bool:
    """Whether every device idles or recomputes in the window, without which the rest cannot move earlier."""
    for lane in schedule.plan.compute:
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


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
