"""Published schedules as candidates: each is timed, kept if it fits and is better, and remembered for comparison."""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from optpipe_compiler import machine
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.units import exact_cap, short_bytes, show_bytes, show_ns
from optpipe_compiler.errors import BadInput, Infeasible
from optpipe_compiler.model.schedule import Schedule, Stuck
from optpipe_compiler.published import METHODS, NotDefined, earliest, is_for, published, recipe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from optpipe_compiler.model.problem import Problem, Stage
    from optpipe_compiler.plan.incumbents import Attempt, Incumbents, Need

SCREENED = 200_000
"""Ops of an instance from which on a published schedule is tried on few microbatches first. By `python -m
bench.constants` all of 64 devices with 512 microbatches then take 23 s for 51; all of 8 with 1,024, which have fewer
ops, take 11 to 15 s in full. The best of them was the same either way in all seven cases."""
FILLED = 0.5
"""Part of the time beside work, in as many microbatches as there are devices, that more of them may fill: the smaller,
the fewer are run in full. With it the best is run in full in all seven cases."""


EXACT_ENOUGH = 0.001
"""Share of the least cap of a schedule by which the one that a refusal names may be larger."""


@dataclass(frozen=True)
class Tried:
    """A published schedule on one placement: how long it takes and what it needs, or why that is not known."""

    makespan: int | None = None
    need: Need | None = None
    reason: str | None = None
    value: int = 0
    """Of the objective."""
    as_defined: tuple[int, int] | None = None
    """Makespan and peak of the schedule as it is defined, where this is the same order waiting for memory."""
    is_searched: bool = True
    """Whether its placement is searched under the cap that it needs."""


@dataclass(frozen=True)
class _Promise:
    """What the first microbatches of a published schedule say about all of them: hardly less than these ticks."""

    ticks: float
    attempt: Attempt
    name: str


class Candidates:
    """Tries published schedules on every placement that they are for; `tried` says how each one went."""

    def __init__(self, incumbents: Incumbents) -> None:
        self.incumbents = incumbents
        self._all_selective = max((one.layout.selective for one in incumbents.all), key=len)
        self.tried: dict[str, list[Tried]] = {}
        """For each name, one entry per placement, and one more where it fits that only by waiting for memory.

        Placements with selective recompute count for those alone that are for all layers with it.
        """

    def steps(self, names: Iterable[str] | None = None) -> Iterator[None]:
        """Try the schedules of these names, or all, one at each step, and keep those that fit and are better.

        Those of large instances are looked at with few microbatches first; what is promising then is tried in full,
        the most promising first.
        """
        promising: list[_Promise] = []
        pairs = [
            (attempt, name)
            for attempt in self._searched()
            for name in (METHODS if names is None else names)
            if self._is_for(name, attempt) and not attempt.problem.is_partial
        ]
        for attempt, name in pairs:
            outcome = self._screened(attempt, name)
            if isinstance(outcome, _Promise):
                promising.append(outcome)
            else:
                self._remember(attempt, name, outcome)
            yield
        for one in sorted(promising, key=lambda promise: promise.ticks):
            worse = self._worse(one)
            outcome = [Tried(reason=worse)] if worse else self._whole(one.attempt, one.name)
            self._remember(one.attempt, one.name, outcome)
            yield

    def take(self, name: str, cap_bytes: int) -> None:
        """Keep the schedule `name` of METHODS on the best placement that it is for.

        Raises Infeasible where it fits none, BadInput where it is defined on none.
        """
        if name not in METHODS:
            raise BadInput(f"--method is {name!r}, expected one of {', '.join(METHODS)}")
        for _ in self.steps((name,)):
            self.incumbents.report("published")
        self.incumbents.adopt()
        if self.incumbents.winner() is not None:
            return
        tried = self.tried.get(name, [])
        needs = [one.need for one in tried if one.need is not None]
        caps = (one.need.peak_bytes for one in tried if one.need is not None and one.need.on_hosts and one.is_searched)
        least = min(caps, default=None)
        if least is not None:
            least = self._least_waiting(name, cap_bytes, least)
            raise Infeasible(
                f"{name} does not fit --mem {show_bytes(cap_bytes)}: it needs {least} bytes "
                f"({show_bytes(least)}) on its fullest device; raise --mem to {exact_cap(least)}",
                least,
            )
        if needs:
            raise Infeasible(f"{name} does not fit: its offloads need more host memory; raise --host-mem")
        reasons = sorted({one.reason for one in tried if one.reason is not None})
        is_cut = METHODS[name].sliced
        if not any((attempt.problem.slices > 1) == is_cut for attempt in self.incumbents.all):
            reasons = [f"is for microbatches {'' if is_cut else 'not '}cut into slices, expected another --slices"]
        raise BadInput(f"--method {name}: {'; '.join(reasons) or METHODS[name].not_searched}")

    def _least_waiting(self, name: str, cap_bytes: int, enough: int) -> int:
        """Return a cap of at most `enough` bytes, what the schedule needs as it is defined, under which it fits where
        its ops wait for memory: the least, but for a share of `EXACT_ENOUGH`."""
        for attempt in self._searched():
            if not self._is_for(name, attempt) or attempt.problem.is_partial or _is_large(attempt.problem):
                continue
            with suppress(NotDefined, Stuck):
                timed, low, below = earliest(published(attempt.problem, name)), cap_bytes, attempt.layout.below_bytes
                if below is not None and below <= enough:
                    if not _fits_waiting(attempt, timed, below - 1 - cap_bytes):
                        continue
                    enough = below - 1
                while enough - low > max(1, EXACT_ENOUGH * enough):
                    middle = (low + enough) // 2
                    if _fits_waiting(attempt, timed, middle - cap_bytes):
                        enough = middle
                    else:
                        low = middle
        return enough

    def baselines(self) -> dict[str, ir.Baseline]:
        """Return papers, stock and compositions to compare with: each at its best that fits, over its placements.

        Those of slices are there where slices are searched, those of whole microbatches where these are.
        """
        kinds = {attempt.problem.slices > 1 for attempt in self.incumbents.all}
        return {name: self._baseline(name) for name, method in METHODS.items() if method.sliced in kinds}

    def _baseline(self, name: str) -> ir.Baseline:
        tried, whose = self.tried.get(name, []), METHODS[name].kind
        kind = UNSET if whose == "own" else whose  # older tools know three kinds
        could = any(self._is_for(name, attempt) for attempt in self.incumbents.attempts)
        reasons = [one.reason for one in tried if one.reason is not None]
        reason = next(iter(reasons), ir.NOT_TRIED if could else METHODS[name].not_searched)
        known = [(one, one.need) for one in tried if one.makespan is not None and one.need is not None]
        if not known:
            return ir.Baseline(makespan_ns=None, peak_bytes=None, fits=False, reason=reason, kind=kind)
        best, need = min(known, key=lambda one: (one[1].over is not None, one[0].value, one[1].peak_bytes))
        reason = ""
        if best.as_defined is not None:
            makespan_ns, peak = best.as_defined
            reason = f"waits for memory; as defined it takes {show_ns(makespan_ns)} and needs {short_bytes(peak)}"
        if not need.on_hosts:
            reason = "its offloads need more host memory"
        fits = need.over is None
        return ir.Baseline(makespan_ns=best.makespan, peak_bytes=need.peak_bytes, fits=fits, reason=reason, kind=kind)

    def _remember(self, attempt: Attempt, name: str, outcome: list[Tried]) -> None:
        if METHODS[name].is_selective or not attempt.layout.selective:
            self.tried.setdefault(name, []).extend(outcome)

    def _searched(self) -> list[Attempt]:
        """Return the placements on which published schedules are tried."""
        searched = sorted(self.incumbents.numbered(), key=lambda a: (a.placed != ("linear", 1), -a.layout.stages))
        return [*searched, *(one for one in self.incumbents.longer if one.layout.order is None)]

    def _is_for(self, name: str, attempt: Attempt) -> bool:
        """Whether the schedule is worth trying there: the selective ones where all layers are that can."""
        return is_for(name, attempt.placed, is_sliced=attempt.problem.slices > 1) and (
            not METHODS[name].is_selective or (attempt.layout.selective == self._all_selective != frozenset())
        )

    def _screened(self, attempt: Attempt, name: str) -> list[Tried] | _Promise:
        """Try a schedule in full where that is quick, else by its first microbatches.

        Published schedules repeat themselves, so that their peak does not shrink with more microbatches. Transfers,
        left out here, only make them slower, and so does waiting for memory.
        """
        try:
            if not _is_large(attempt.problem):
                return self._whole(attempt, name)
            first = _first(attempt.problem, name)
            promise = _Promise(self._grown(first, attempt), attempt, name)
            if worse := self._worse(promise):
                return [Tried(reason=worse)]
            short, away = first.problem, _offloaded(first.problem, name)
            if any(map(operator.gt, _least_peaks(first, away), short.budget)):
                reason = f"needs more memory by its first {short.microbatches} microbatches, {ir.NOT_IN_FULL}"
                try:
                    waiting = machine.orders.retime(published(short, name) if away else first, short)
                except Stuck:
                    return [Tried(reason=reason)]
                promise = replace(promise, ticks=self._grown(waiting, attempt))
                if self._worse(promise):
                    return [Tried(reason=f"{reason}, and slower where it waits for that")]
            return promise
        except (NotDefined, Stuck) as error:
            return [Tried(reason=str(error))]

    def _grown(self, timed: Schedule, attempt: Attempt) -> float:
        """Return about the least value of a schedule for all microbatches, from its first m of M.

        A device that computes w in m microbatches computes M / m times that. What the schedule of m takes beside the
        busiest one's w goes on while it fills and drains, though more microbatches may fill a part `FILLED` of it:

            value(M) >= w M / m + (1 - FILLED) (value(m) - w).
        """
        busiest = float(max(timed.computed))
        rest = self.incumbents.value(timed) - busiest
        return busiest * attempt.problem.microbatches / timed.problem.microbatches + (1 - FILLED) * rest

    def _worse(self, one: _Promise) -> str:
        """Say that a schedule cannot beat what there is; "" if it can."""
        done = [self.incumbents.value(other.best) for other in self.incumbents.all if other.best is not None]
        if one.ticks <= min(done, default=math.inf):
            return ""
        return f"slower by its first microbatches, {ir.NOT_IN_FULL}"

    def _whole(self, attempt: Attempt, name: str) -> list[Tried]:
        """Time a schedule, and where it does not fit also the same orders under the caps; keep what is better."""
        try:
            timed = earliest(published(attempt.problem, name))
        except (NotDefined, Stuck) as error:
            return [Tried(reason=str(error))]
        found = [self._kept(attempt, timed)]
        if (need := found[0].need) is not None and need.over is not None:
            with suppress(Stuck):  # each op waiting for its memory
                waiting = self._kept(attempt, machine.orders.retime(timed, attempt.problem, f"{name}-waiting"))
                found.append(replace(waiting, as_defined=(timed.makespan, need.peak_bytes)))
        return found

    def _kept(self, attempt: Attempt, timed: Schedule) -> Tried:
        """Keep a schedule if it fits and is better; return how it went."""
        incumbents, need = self.incumbents, attempt.need(timed)
        incumbents.keep(attempt, timed, "published", need)
        is_searched = attempt.layout.is_searched(need.peak_bytes)
        return Tried(timed.makespan, need, value=incumbents.value(timed), is_searched=is_searched)


def _is_large(problem: Problem) -> bool:
    """Whether published schedules take so long to time that the hopeless ones are passed over: where equal microbatches
    are more than show how a schedule goes on."""
    is_uniform = problem.slicing is None or len(problem.slicing.cuts) == 1
    return problem.tasks >= SCREENED and is_uniform and problem.whole > 2 * problem.devices


def _fits_waiting(attempt: Attempt, timed: Schedule, more: int) -> bool:
    """Whether the orders of a schedule fit with so many bytes more on every device, each op waiting for its memory."""
    caps = [size + more for size in attempt.problem.budget]
    try:
        waiting = machine.orders.retime(timed, replace(attempt.problem, budget=tuple(caps)))
    except Stuck:
        return False
    peaks, host_peaks = attempt.peaks(waiting)
    fits = all(peak <= always + cap for peak, always, cap in zip(peaks, attempt.fixed, caps, strict=True))
    return fits and attempt.problem.fits_hosts(host_peaks)


def _first(problem: Problem, name: str) -> Schedule:
    """Return a published schedule of as many microbatches as there are devices, or of twice as many where it is not
    defined for so few; an instance that `_is_large` has more than these."""
    few = problem.devices * problem.slices
    with suppress(NotDefined):
        return published(replace(problem, microbatches=few), name, transfers=False)
    return published(replace(problem, microbatches=2 * few), name, transfers=False)


def _least_peaks(timed: Schedule, away: set[int]) -> list[int]:
    """Return the peaks per device as if the activations of the stages `away` took no memory."""

    def emptied(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        return tuple(
            replace(stage, saved=0, staying=0, residue=0, captured=0, checkpoint=0) if s in away else stage
            for s, stage in enumerate(stages)
        )

    return machine.orders.peaks(Schedule(timed.problem.changed(emptied), timed.method, timed.ticks))


def _offloaded(problem: Problem, name: str) -> set[int]:
    """Return the stages of which the published schedule offloads activations."""
    offloaded = recipe(problem, name).offloaded
    return set() if offloaded is None else set(np.flatnonzero(offloaded.any(axis=1)).tolist())
