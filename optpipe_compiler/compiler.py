"""compile: profile and options in, verified schedule out. Ties the rooms together and owns the time budget."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from optpipe_compiler import machine
from optpipe_compiler.costs.noise import COST_OF, op_spreads
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import uncollected
from optpipe_compiler.errors import Infeasible, MissingDependency, NotFound
from optpipe_compiler.forecast.choice import Choice
from optpipe_compiler.forecast.executions import Quantiles, Spreads, quantiles
from optpipe_compiler.lower import Certificate, lower, promised
from optpipe_compiler.model import bounds
from optpipe_compiler.model.problem import Caps, Problem, static_bytes
from optpipe_compiler.plan import seeds
from optpipe_compiler.plan.budget import Budget
from optpipe_compiler.plan.candidates import Candidates
from optpipe_compiler.plan.exact import exact, is_small
from optpipe_compiler.plan.explore import LOCAL_SHARE, QUICK_SHARE, SMALL_SHARE, explore
from optpipe_compiler.plan.incumbents import Attempt, Incumbents
from optpipe_compiler.plan.instances import (
    Least,
    beside,
    in_time,
    instances,
    least_of,
    lower_bound,
    too_long,
)
from optpipe_compiler.plan.least_memory import LeastMemory
from optpipe_compiler.plan.options import Options, Settled, recorded, settled
from optpipe_compiler.plan.spare import spare
from optpipe_compiler.verify import Violated, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.model.placement import Layout
    from optpipe_compiler.model.schedule import Schedule

__all__ = [
    "Least",
    "Options",
    "Progress",
    "Result",
    "Settled",
    "bounded",
    "compile_schedule",
    "left_out",
    "lower_bound",
    "placement_of",
    "recorded",
    "settled",
    "spreads_of",
    "under_noise",
]


@dataclass(frozen=True)
class Progress:
    """Where the search stands: values in ns, None while unknown."""

    phase: str
    incumbent_ns: int | None
    bound_ns: int | None
    method: str
    elapsed_s: float

    @property
    def gap(self) -> float | None:
        """(incumbent - bound) / incumbent."""
        if self.incumbent_ns is None or self.bound_ns is None or not self.incumbent_ns:
            return None
        return max(0.0, 1 - self.bound_ns / self.incumbent_ns)


@dataclass(frozen=True)
class Result:
    """A checked schedule, the options as they were used, and how it went."""

    checked: ir.Checked
    options: Options
    placement: str
    interrupted: bool
    wall_s: float
    notes: tuple[str, ...] = ()
    """What went wrong on the way without preventing a result."""
    quantiles: Quantiles | None = None
    """What a step takes with noise; None where no noise is known."""
    considered: tuple[ir.Checked, ...] = ()
    """The plans that were compared under noise, the least forecast first."""
    is_cached: bool = False
    """Whether it was planned before (cache.py)."""
    further_ns: int = 0
    """What the further microbatches of the options take."""
    left_before_ns: int | None = None
    """What `left_ns` was when it was planned, of an answer that is kept."""

    @property
    def schedule(self) -> ir.Schedule:
        """The schedule itself."""
        return self.checked.schedule

    @property
    def left_ns(self) -> int | None:
        """The forecast of a shorter plan that was left since it is late more often under noise; None: there is none."""
        if self.is_cached:
            return self.left_before_ns
        least = min((one.schedule.forecast.makespan_ns for one in self.considered), default=None)
        return None if least == self.schedule.forecast.makespan_ns else least

    def uninterrupted(self) -> Result:
        """Return this; raise KeyboardInterrupt where Ctrl-C has ended the search: for those that plan several times."""
        if self.interrupted:
            raise KeyboardInterrupt
        return self


def compile_schedule(
    profile: Profile,
    options: Options,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    begin: float | None = None,
) -> Result:
    """Return the best verified schedule found within the limits, by a clock that began at `begin` (absent: now).

    Raises Infeasible when no schedule fits, BadInput for impossible options. KeyboardInterrupt during the search ends
    it and returns the best so far.
    """
    machine.require()
    with uncollected():
        return _Compilation(profile, settled(profile, options), on_progress, begin or time.monotonic()).run()


def bounded(profile: Profile, options: Options) -> Least:
    """Return `lower_bound`, and where `compile` proves that nothing fits, the least memory that its refusal names.

    One microbatch is looked at alone: more of them need no more. With slices there is no proof; nor is there one where
    ortools is missing and has to be asked.
    """
    chosen = settled(profile, options)
    every = instances(profile, chosen)
    least = least_of(profile, every, chosen.objective)
    if chosen.slices != 1 or chosen.lengths is not None:
        return least
    caps = Caps(chosen.mem_bytes, chosen.host_mem_bytes)
    nothing = bounds.Bound(least.argument, 0)
    attempts = [_attempt(profile, one, replace(problem, microbatches=1), nothing) for one, problem in every]
    found = Incumbents(attempts, chosen.objective, lambda phase: None)
    no_time = replace(chosen.limits, time_limit_s=0.0, reproducible=False)
    memory = LeastMemory(found, caps, Budget(no_time, 1, time.monotonic()))
    try:
        memory.find()
        memory.refuse()
    except Infeasible as error:
        if error.least_mem_bytes is None:
            return least
        return least._replace(mem_bytes=error.least_mem_bytes, is_smallest=error.is_smallest)
    except MissingDependency:
        return least
    return least


def _attempt(profile: Profile, one: Layout, problem: Problem, bound: bounds.Bound) -> Attempt:
    lowered = partial(promised, profile=profile, layout=one)
    return Attempt(one, problem, bound, tuple(static_bytes(profile, one)), lowered)


GRACE_S = 1.0
GRACE_SHARE = 0.1
"""Seconds and share of the time limit beyond it, for the comparison of near plans under noise."""


def under_noise(schedule: ir.Schedule, profile: Profile, noise: float | None = None) -> Quantiles | None:
    """Return what a step takes over seeded executions of the contract, with the profile's spreads or a given one.

    `noise` is the standard deviation of every op of compute as a share of its time. None where no noise is known.
    """
    spreads = spreads_of(schedule, profile, noise)
    return quantiles(schedule, spreads) if spreads else None


def spreads_of(schedule: ir.Schedule, profile: Profile, noise: float | None = None) -> Spreads:
    """Return the noise of the ops of a schedule, by kind and stage; nothing where no noise is known."""
    ranges = [stage.layers for stage in schedule.stages]
    spreads = op_spreads(profile, ranges)
    if noise is not None:
        spreads = {(kind, number): noise for kind in COST_OF for number in range(len(ranges))}
    return spreads if any(spreads.values()) else {}


def placement_of(schedule: ir.Schedule) -> str:
    """Return the name of a schedule's placement, `given` where it is none of those that are searched."""
    return seeds.layout_or_given(schedule).name


def left_out(schedule: ir.Schedule, profile: Profile) -> list[str]:
    """Say what the profile leaves out of what the schedule needs, and is taken for nothing."""
    sends = [(op, plan.device) for plan in schedule.devices for op in plan.compute if isinstance(op, ir.MessageOp)]
    return profile.machine.left_out(schedule.setup.devices, {(device, op.peer) for op, device in sends})


class _Compilation:
    def __init__(
        self, profile: Profile, options: Settled, on_progress: Callable[[Progress], None], begin: float
    ) -> None:
        self.profile = profile
        self.options = options
        self.on_progress = on_progress
        self.begin = begin
        self.caps = Caps(options.mem_bytes, options.host_mem_bytes)
        every, compiled_s = self._instances()
        chosen = in_time(every, options)
        attempts, longer = (
            [_attempt(profile, one, problem, bounds.best(problem, options.objective)) for one, problem in several]
            for several in (chosen, beside(every, options))
        )
        attempts[0].notes += too_long(every, chosen, options)
        self.incumbents = Incumbents(attempts, options.objective, self._report, longer, options.further)
        self.candidates = Candidates(self.incumbents)
        self.budget = Budget(options.limits, max(attempt.problem.tasks for attempt in attempts), begin + compiled_s)

    def _instances(self) -> tuple[list[tuple[Layout, Problem]], float]:
        """Return what is searched, and the seconds to make it if what numbers of slices are judged by was compiled."""
        from optpipe_compiler.machine.compiled import is_kept

        begin, compiles = time.monotonic(), self.options.slices == "auto" and not is_kept()
        if compiles:
            self.on_progress(Progress("compiling the search, once on this machine", None, None, "", begin - self.begin))
        found = instances(self.profile, self.options)
        return found, time.monotonic() - begin if compiles and is_kept() else 0.0

    def run(self) -> Result:
        """Plan until the time is spent; then certify and verify the best schedule.

        Whenever it is interrupted, what is there is spared, certified and verified; a second time ends that, too.
        """
        with self._interruptible():
            if self.options.method is not None:
                self.candidates.take(self.options.method, self.caps.device_bytes)
            else:
                self._search()
        if self.options.method is None:
            with self._interruptible():
                spare(self.incumbents, self.budget)
        if self.incumbents.winner() is None and self.budget.is_interrupted:
            raise KeyboardInterrupt
        if self.incumbents.winner() is None:
            raise NotFound("no schedule was found within the time limit")
        found: list[tuple[Attempt, Schedule, ir.Checked]] = []
        taken, noisy = 0, None
        with self._interruptible():
            taken = self._compare(found)
        if not found:
            self._compare(found)
        attempt, timed, checked = found[taken]
        with self._interruptible():
            noisy = under_noise(checked.schedule, self.profile, self.options.noise)
        notes = tuple(note for each in self.incumbents.attempts for note in each.notes)
        notes += tuple(left_out(checked.schedule, self.profile))
        return Result(
            checked,
            self.options,
            placement=attempt.layout.name,
            interrupted=self.budget.is_interrupted,
            wall_s=time.monotonic() - self.begin,
            notes=notes,
            quantiles=noisy,
            considered=tuple(checked for *_, checked in found),
            further_ns=self.options.further * timed.steady if self.options.further else 0,
        )

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Within, Ctrl-C ends what is being done; what comes behind does only what it must."""
        try:
            yield
        except KeyboardInterrupt:
            self.budget.is_interrupted = True

    def _compare(self, found: list[tuple[Attempt, Schedule, ir.Checked]]) -> int:
        """Add to `found` the best schedule, under noise several nearly as good ones; return the number of the best.

        Where verify rejects all of these, the next best that is known is taken.
        """
        limits = self.budget.limits
        most_s = limits.time_limit_s * (1 + GRACE_SHARE) + GRACE_S
        choice, rejected, near = Choice(), None, len(self.incumbents.near())
        for number, (attempt, timed) in enumerate(self.incumbents.known()):
            if found and number >= near:
                break
            begin = time.monotonic()
            try:
                checked = self._certified(attempt, timed)
            except Violated as error:
                rejected = error
                attempt.notes.append(f"a plan was left out that verify rejects, please report it: {error}")
                continue
            found.append((attempt, timed, checked))
            spreads = spreads_of(checked.schedule, self.profile, self.options.noise)
            is_asked = self.options.method is not None or self.budget.is_interrupted
            if not spreads or limits.is_span or is_asked:
                break
            choice.add(checked.schedule, spreads)
            took_s = time.monotonic() - begin
            # as long as the next one takes, and as long as it takes to confirm the choice
            if not limits.reproducible and self.budget.elapsed() + 2 * took_s > most_s:
                break
        if not found:
            raise AssertionError("the compiler made schedules that verify rejects") from rejected
        return choice.best()

    def _search(self) -> None:
        """The phases in order, each of which makes incumbents better."""
        seeds.plant(self.incumbents, self.options.seeds, self.options.kept)
        any_small = any(map(is_small, self.incumbents.attempts))
        share = QUICK_SHARE if not self.options.search else SMALL_SHARE if any_small else LOCAL_SHARE
        least = LeastMemory(self.incumbents, self.caps, self.budget, may_slice=self.options.slices != 1)
        if not least.is_hopeless():
            explore(self.incumbents, self.candidates, self.budget, least, share=share)
        self.incumbents.adopt()
        if self.incumbents.winner() is None:
            least.find()
            least.refuse()
        least.find_quick()
        if self.options.search:
            exact(self.incumbents, self.budget)

    def _bound(self) -> bounds.Bound:
        """Return what no searched placement can beat: the smallest of their bounds."""
        return min((attempt.bound for attempt in self.incumbents.attempts), key=lambda bound: bound.ticks)

    def _report(self, phase: str) -> None:
        winner = self.incumbents.winner()
        best = None if winner is None else winner.best
        reached = None if best is None else self.incumbents.value(best)
        self.on_progress(
            Progress(
                phase=phase,
                incumbent_ns=reached,
                bound_ns=self._bound().ticks if reached is None else min(self._bound().ticks, reached),
                method="" if best is None else best.method,
                elapsed_s=self.budget.elapsed(),
            )
        )

    def _certified(self, winner: Attempt, timed: Schedule) -> ir.Checked:
        self._report("lowering and verifying")
        bound, reached = self._bound(), self.incumbents.value(timed)
        certificate = Certificate(
            objective=self.options.objective,
            outcome="optimal" if bound.ticks >= reached else "feasible",
            lower_bound_ns=min(bound.ticks, reached),
            bound=bound.name,
            baselines=self.candidates.baselines(),
            options=recorded(self.options),
        )
        return check(lower(timed, self.profile, winner.layout, self.caps, certificate), self.profile)
