"""Where no schedule was found: one microbatch after the other with the least memory, or the proof that none fits.

With slices or unequal lengths there is no proof: what is tried keeps, offloads or recomputes every activation.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from optpipe_compiler import machine
from optpipe_compiler.documents.units import RAISE, SMALLEST, counted, exact_cap, show_bytes
from optpipe_compiler.errors import Infeasible
from optpipe_compiler.model.schedule import Kind, Schedule, Stuck, Task
from optpipe_compiler.plan.instances import least_bytes
from optpipe_compiler.published import Recipe, earliest
from optpipe_compiler.published.common import of_stages, rows
from optpipe_compiler.published.recompute import again
from optpipe_compiler.published.transfers import timed
from optpipe_compiler.solver import minimum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.model.placement import Layout
    from optpipe_compiler.model.problem import Caps, Problem
    from optpipe_compiler.plan.budget import Budget
    from optpipe_compiler.plan.incumbents import Attempt, Incumbents


class LeastMemory:
    """One microbatch after the other on each placement, found once."""

    def __init__(self, incumbents: Incumbents, caps: Caps, budget: Budget, *, may_slice: bool = False) -> None:
        self.incumbents = incumbents
        self.caps = caps
        self.budget = budget
        self.is_proof = all(attempt.problem.slicing is None for attempt in incumbents.all)
        """Whether no schedule fits at all where none of these does."""
        self.is_smallest = self.is_proof and not may_slice
        """Whether nothing less would do: slices may, which are not tried where the weights alone do not fit."""
        self._refusal: Infeasible | None = None
        self._is_found = False

    def is_hopeless(self) -> bool:
        """Whether on every placement some device has no room for one activation beside what it always holds."""
        return all(_at_least(attempt) > self.caps.device_bytes for attempt in self.incumbents.all)

    def find_quick(self) -> None:
        """Keep on each placement what takes the least time for one microbatch, repeated, if it is the best so far.

        A device begins its next microbatch as soon as there is room.
        """
        for attempt in self.incumbents.attempts:
            problem, winner = attempt.problem, self.incumbents.winner()
            once = None if problem.slicing else minimum.quickly_one_at_a_time(problem)
            if once is None or (winner is not None and self._soonest(once, problem) >= self.incumbents.reached(winner)):
                continue
            timed = minimum.repeated(problem, once)
            with suppress(Stuck):
                timed = machine.orders.retime(timed, problem)
            self.incumbents.keep(attempt, timed, "least memory")

    def _soonest(self, once: Schedule, problem: Problem) -> int:
        """Return what repeating this schedule of one microbatch cannot be below: the rest of the busiest device."""
        return self.incumbents.cost(once) + (problem.microbatches - 1) * max(once.computed)

    def find(self) -> None:
        """Keep on each placement what fits in the least time, then what is solved for to need the least memory.

        Once something fits, no more is solved for than there is time for. Until then it goes on: a refusal names the
        least memory of all placements.
        """
        if self._is_found:
            return
        incumbents, cap = self.incumbents, self.caps.device_bytes
        self.find_quick()
        # where hosts have room for them, whole offloads need no more memory than those of a part
        every = [
            (n, one) for n, one in enumerate(incumbents.all) if not one.problem.is_partial or one.problem.host_limits
        ]
        cut = [attempt for _, attempt in every if attempt.problem.slicing is not None]
        least = _tried(incumbents, cut, cap)
        if least is not None:
            self._refusal = Infeasible(
                f"no schedule of slices or unequal lengths was found that fits --mem {show_bytes(cap)}: one microbatch "
                f"at a time needs {least} bytes ({show_bytes(least)}) per device; {RAISE} {exact_cap(least)}",
                least,
            )
        best: tuple[int, int, int, Attempt] | None = None
        whole = [(n, attempt) for n, attempt in every if attempt.problem.slicing is None]
        for number, attempt in sorted(whole, key=lambda one: _at_least(one[1])):
            # one stage alone needs more than another placement
            if best is not None and _at_least(attempt) >= max(best[0], cap + 1):
                continue
            if incumbents.winner() is not None and self.budget.is_over():
                break
            timed = minimum.one_at_a_time(attempt.problem, attempt.fixed)
            if incumbents.keep(attempt, timed, "least memory") is None:
                continue
            peaks, _ = attempt.peaks(timed)
            worst = max(range(attempt.problem.devices), key=peaks.__getitem__)
            if best is None or (peaks[worst], number) < best[:2]:
                best = peaks[worst], number, worst, attempt
        if best is not None and (least is None or best[0] <= least):
            needed, _, device, attempt = best
            may_mix = needed > cap and _may_mix([attempt for _, attempt in whole], needed)
            is_smallest = self.is_smallest and not may_mix
            self._refusal = _refusal(needed, device, attempt, self.caps, is_smallest=is_smallest)
        incumbents.adopt()
        self._is_found = True

    def refuse(self) -> None:
        """Raise Infeasible if nothing has fitted so far."""
        if self._refusal is not None and self.incumbents.winner() is None:
            raise self._refusal


def _at_least(attempt: Attempt) -> int:
    return least_bytes(attempt.problem, attempt.fixed)


def _may_mix(whole: list[Attempt], needed: int) -> bool:
    """Whether less than `needed` may do where other devices have selective recompute.

    Which of them do is tried by the cap (selective.py), and on some devices it takes more than it spares.
    """
    alike: dict[Layout, list[Attempt]] = {}
    for attempt in whole:
        alike.setdefault(replace(attempt.layout, selective=frozenset()), []).append(attempt)
    for several in alike.values():
        if any(attempt.layout.selective for attempt in several):
            rows = [_least_of_devices(attempt) for attempt in several]
            if max(map(min, zip(*rows, strict=True))) < needed:
                return True
    return False


def _least_of_devices(attempt: Attempt) -> list[int]:
    """Return the least bytes of each device, for one microbatch at a time, whatever the hosts have room for."""
    problem = replace(attempt.problem, host_budget=None, hosts=())
    return attempt.peaks(minimum.one_at_a_time(problem, attempt.fixed))[0]


def _tried(incumbents: Incumbents, attempts: list[Attempt], cap_bytes: int) -> int | None:
    """Try one microbatch after the other on these placements, unless it neither fits nor needs less than on others.

    Return the least bytes per device that it needs within the memory of the hosts.
    """
    least: int | None = None
    for attempt in sorted(attempts, key=_at_least):
        if least is not None and _at_least(attempt) >= max(least, cap_bytes + 1):
            break
        for found in _one_after_the_other(attempt.problem):
            incumbents.keep(attempt, found, "least memory")
            peaks, host_peaks = attempt.peaks(found)
            if attempt.problem.fits_hosts(host_peaks):
                least = max(peaks) if least is None else min(least, max(peaks))
    return least


def _one_after_the_other(problem: Problem) -> Iterator[Schedule]:
    """Yield schedules that begin a microbatch when the one before is done, with one treatment of all activations.

    Backwards are in halves where these need less.
    """
    stages = range(len(problem.stages))
    backward = [(Kind.I, Kind.W) if minimum.is_leaner_in_halves(problem, s) else (Kind.B,) for s in stages]
    lanes: list[list[Task]] = [[] for _ in range(problem.devices)]
    for first in range(0, problem.microbatches, problem.slices):
        units = range(first, first + problem.slices)
        for unit in units:
            for s in stages:
                lanes[problem.stages[s].device].append(Task(Kind.F, s, unit))
        for unit in reversed(units):
            for s in reversed(stages):
                lanes[problem.stages[s].device] += [Task(kind, s, unit) for kind in backward[s]]
    orders = [rows(lane) for lane in lanes]
    recomputed = of_stages(problem, filter(problem.can_recompute, stages))
    away = of_stages(problem, filter(problem.can_offload, stages))
    found = [Recipe(orders), Recipe([again(order, recomputed) for order in orders])]
    for recipe in [*found, Recipe(orders, away, streaming=True)]:
        with suppress(Stuck):
            yield earliest(timed(problem, recipe, "one-at-a-time"))


def _refusal(needed: int, device: int, attempt: Attempt, caps: Caps, *, is_smallest: bool) -> Infeasible:
    cap = caps.device_bytes
    place = f"placement {attempt.layout.name}, {counted(attempt.layout.stages, 'stage')}"
    host = "" if caps.host_bytes is None else f" and --host-mem {show_bytes(caps.host_bytes)}"
    if attempt.problem.hosts:
        host += " and the memory of the profile's hosts"
    named = attempt.layout.named(device)
    enough = SMALLEST if is_smallest else RAISE
    if needed <= cap:
        return Infeasible(f"no schedule fits{host}: offloading needs more host memory; raise --host-mem or --mem")
    return Infeasible(
        f"no schedule fits --mem {show_bytes(cap)}{host}: device {named} is {needed - cap} bytes "
        f"({show_bytes(needed - cap)}) short; {enough} {exact_cap(needed)} "
        f"({show_bytes(needed)}; {place})",
        needed,
        is_smallest=is_smallest,
    )
