"""What planning has so far: one attempt for each placement, with its best schedule and bound.

Every phase takes the incumbents and a budget, and makes incumbents better; it may be interrupted at any moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler import machine
from optpipe_compiler.documents.units import counted
from optpipe_compiler.model.schedule import Kind, Mode, Schedule, alone_lengths, classes, figures, value

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.model import bounds
    from optpipe_compiler.model.placement import Layout
    from optpipe_compiler.model.problem import Problem
    from optpipe_compiler.plan.carried import Start


NEAR = 0.02
"""Schedules are compared under noise that are no more than this share worse than the best. In ten cases of `python -m
bench.constants` the 95th percentile of a step is at most 1.6 % below that of the plan of least forecast, as with 0.04;
with 0.01 at most 1.0 %."""
MOST_NEAR = 8
"""Of each attempt, and of all. With 4 or 16 a plan without noise is the same (docs/ABLATION.md)."""


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
    near: list[Schedule] = field(default_factory=list)
    """Schedules that fit and are nearly as good as the best, for a comparison under noise."""
    starts: list[Start] = field(default_factory=list)
    """Earlier schedules, for the local search to start from."""
    _peak: tuple[Schedule | None, int] = None, 0
    """Of the schedule that was the best when it was asked for."""

    @property
    def peak_bytes(self) -> int:
        """What the file of the best schedule would promise of its fullest device."""
        if self.best is not None and self._peak[0] is not self.best:
            self._peak = self.best, max(self.peaks(self.best)[0])
        return self._peak[1]

    @property
    def placed(self) -> tuple[str, int]:
        """The placement's name and its stages per device."""
        return self.layout.name, self.layout.stages // self.problem.devices

    @cached_property
    def has_instants(self) -> bool:
        """Whether some op may take no time: what it holds depends on the order within a moment, as lowering has it."""
        able = np.array([self.problem.able(s) for s in range(len(self.problem.stages))])
        modes = [Mode.RECOMPUTE if kind is Kind.R else Mode.OFFLOAD if kind >= Kind.D else Mode.KEEP for kind in Kind]
        return bool((alone_lengths(self.problem)[able[:, modes].T] == 0).any())

    @cached_property
    def may_overtake(self) -> bool:
        """Whether messages between two devices differ in the time that they take."""
        lags: dict[frozenset[int], set[int]] = {}
        for stages in self.problem.by_class:
            for before, after in pairwise(stages):
                if before.device != after.device:
                    pair = frozenset((before.device, after.device))
                    lags.setdefault(pair, set()).update((before.send_activation, after.send_gradient))
        return any(len(different) > 1 for different in lags.values())

    def note(self, text: str) -> None:
        """Note once what went wrong."""
        if text not in self.notes:
            self.notes.append(text)

    def is_as_lowered(self, timed: Schedule) -> bool:
        """Whether a schedule holds at its own times what its file would promise.

        Not where a message arrives before another of the same two devices that was produced earlier: the file has
        them arrive in the order in which they are produced.
        """
        return not self.has_instants and not (self.may_overtake and overtakes(timed))

    def peaks(self, timed: Schedule) -> tuple[list[int], list[int]]:
        """Return the bytes that the file of a schedule would promise: by device, and of its offloads on the host."""
        if not self.is_as_lowered(timed):
            return self.lowered(timed)
        found = machine.orders.held(timed)
        return list(map(int.__add__, self.fixed, found.peaks)), found.host_peaks

    def need(self, timed: Schedule) -> Need:
        """Return what the file of a schedule of this placement would need of the caps."""
        problem = self.problem
        peaks, host_peaks = self.peaks(timed)
        caps = map(int.__add__, self.fixed, problem.budget)
        over = [max(0, peak - cap) for peak, cap in zip(peaks, caps, strict=True)]
        on_hosts = problem.fits_hosts(host_peaks)
        return Need(max(peaks), over if any(over) or not on_hosts else None, on_hosts)


def overtakes(timed: Schedule) -> bool:
    """Whether a message arrives before another of the same two devices that was produced no later."""
    problem, ops = timed.problem, timed.columns
    owner = np.array(problem.device_of)
    is_gradient = (ops.kind == Kind.I) | (ops.kind == Kind.B)
    target = ops.stage + np.where(is_gradient, -1, 1)
    sends = (is_gradient | (ops.kind == Kind.F)) & (target >= 0) & (target < len(owner))
    stage, target, number = ops.stage[sends], target[sends], classes(problem)[ops.microbatch[sends]]
    activation, gradient = (figures(problem, name)[stage, number] for name in ("send_activation", "send_gradient"))
    arrival = ops.end[sends] + np.where(is_gradient[sends], gradient, activation)
    first, second = np.sort([owner[stage], owner[target]], axis=0)
    by = np.lexsort((-arrival, ops.end[sends], second, first))
    is_pair = (first != second)[by][1:] & (np.diff(first[by]) == 0) & (np.diff(second[by]) == 0)
    return bool((is_pair & (np.diff(arrival[by]) < 0)).any())


@dataclass(frozen=True)
class Need:
    """The memory that a schedule's file promises to keep to, and the bytes by which each device is over its cap."""

    peak_bytes: int
    over: list[int] | None
    """None if it fits."""
    on_hosts: bool = True
    """Whether the hosts have room for its offloads."""


@dataclass
class Incumbents:
    """All attempts; `report` is told the phase whenever one may have become better."""

    attempts: list[Attempt]
    objective: str
    report: Callable[[str], None]
    longer: list[Attempt] = field(default_factory=list)
    """Placements that are not searched, since it takes too long to lower and verify their schedules: what is known
    without a search is tried there."""
    further: int = 0
    """Microbatches beyond those that are planned, which repeat the steady state."""

    @property
    def all(self) -> list[Attempt]:
        """The attempts, and the placements that are not searched."""
        return [*self.attempts, *self.longer]

    def adopt(self) -> None:
        """Make the best of the longer placements an attempt if what is known there beats all that was found."""
        winner, done = self.winner(), [one for one in self.longer if one.best is not None]
        best = min(done, key=self.reached, default=None)
        if best is None or best.best is None or (winner is not None and self.reached(best) >= self.reached(winner)):
            return
        name, per_device = best.placed
        best.notes.append(
            f"{best.best.method} on a {name} of {counted(per_device, 'stage')} per device beats all that was searched; "
            "to lower and verify it took longer than the time limit has for that"
        )
        self.longer.remove(best)
        self.attempts.append(best)

    def numbered(self) -> list[Attempt]:
        """Return the attempts in which the pipeline passes the devices by their numbers, as published schedules do, and
        those of a placement that is not there so."""
        known = {attempt.layout for attempt in self.attempts}
        return [one for one in self.attempts if one.layout.order is None or one.layout.by_number not in known]

    def value(self, timed: Schedule) -> int:
        """Return the objective's value."""
        return value(timed, self.objective)

    def cost(self, timed: Schedule) -> int:
        """Return what plans are chosen by: the objective's value, and what the further microbatches take."""
        return self.value(timed) + (self.further * timed.steady if self.further else 0)

    def winner(self) -> Attempt | None:
        """Return the attempt with the best schedule; of equally good ones, that of the least peak."""
        done = [attempt for attempt in self.attempts if attempt.best is not None]
        least = min(map(self.reached, done), default=None)
        best = [attempt for attempt in done if self.reached(attempt) == least]
        return best[0] if len(best) == 1 else min(best, key=lambda one: one.peak_bytes, default=None)

    def reached(self, attempt: Attempt) -> int:
        """Return the cost of the attempt's best schedule."""
        assert attempt.best is not None
        return self.cost(attempt.best)

    def keep_near(self, attempt: Attempt, timed: Schedule) -> None:
        """Remember a schedule that fits, if it is nearly as good as the best."""
        winner = self.winner()
        if winner is None or self.cost(timed) > (1 + NEAR) * self.reached(winner):
            return
        known = {one.ticks.tobytes(): one for one in (timed, *attempt.near)}
        attempt.near = sorted(known.values(), key=self.cost)[:MOST_NEAR]

    def near(self) -> list[tuple[Attempt, Schedule]]:
        """Return the schedules that are nearly as good as the best, itself first."""
        known = self.known()
        return [each for each in known if self.cost(each[1]) <= (1 + NEAR) * self.cost(known[0][1])][:MOST_NEAR]

    def known(self) -> list[tuple[Attempt, Schedule]]:
        """Return the best schedules of all attempts and what was near to the best at its time, the best first."""
        winner = self.winner()
        if winner is None or winner.best is None:
            return []
        every = [(one, [*one.near, *([] if one.best is None else [one.best])]) for one in self.attempts]
        found = {id(timed): (one, timed) for one, several in every for timed in several if timed is not winner.best}
        return [(winner, winner.best), *sorted(found.values(), key=lambda each: self.cost(each[1]))]

    def is_better(self, attempt: Attempt, timed: Schedule) -> bool:
        """Whether `timed` is better than the attempt's best."""
        return attempt.best is None or self.cost(timed) < self.reached(attempt)

    def keep(self, attempt: Attempt, timed: Schedule, phase: str, need: Need | None = None) -> list[int] | None:
        """Make `timed` the attempt's best if it fits and is better, or remember it if it is near.

        Return by how many bytes each device is over if it does not fit.
        """
        over = (need or attempt.need(timed)).over
        if over is None:
            if self.is_better(attempt, timed):
                attempt.best = timed
                self.report(f"{phase} {attempt.layout.name}")
            self.keep_near(attempt, timed)
        return over

    def spare(self, attempt: Attempt, timed: Schedule, less: Schedule) -> list[int] | None:
        """Put `less` in the place of `timed`, one of the near ones, if it fits; return as `keep` does.

        Without transfers it may have become shorter than the best.
        """
        over = attempt.need(less).over
        if over is None:
            if attempt.best is timed or self.is_better(attempt, less):
                attempt.best = less
            attempt.near = [less if one is timed else one for one in attempt.near]
            self.report(f"sparing {attempt.layout.name}")
        return over

    def is_met(self, attempt: Attempt) -> bool:
        """Whether this placement cannot beat what is there already."""
        winner = self.winner()
        if winner is None:
            return False
        return attempt.bound.ticks + self.further * attempt.problem.busiest >= self.reached(winner)
