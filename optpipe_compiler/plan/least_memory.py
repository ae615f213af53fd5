"""Where no schedule was found: one microbatch after the other with the least memory, or the proof that none fits.

With slices or unequal lengths there is no proof: what is tried keeps, offloads or recomputes every activation.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from optpipe_compiler.documents.units import show_bytes
from optpipe_compiler.errors import Infeasible
from optpipe_compiler.model.schedule import Kind, Schedule, Stuck, Task
from optpipe_compiler.published import Recipe, earliest
from optpipe_compiler.published.transfers import timed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.model.problem import Caps, Problem
    from optpipe_compiler.plan.incumbents import Attempt, Incumbents


def one_microbatch_at_a_time(incumbents: Incumbents, caps: Caps) -> None:
    """Solve for the least memory of each placement; raise Infeasible where none fits the caps."""
    from optpipe_compiler.solver.minimum import one_at_a_time

    best: tuple[int, int, Attempt] | None = None
    equal = [attempt for attempt in incumbents.attempts if attempt.problem.slicing is None]
    cut = [attempt for attempt in incumbents.attempts if attempt.problem.slicing is not None]
    least = _tried(incumbents, cut)
    if not equal and least is not None and incumbents.winner() is None:
        raise Infeasible(
            f"no schedule of slices or unequal lengths was found that fits --mem {show_bytes(caps.device_bytes)}: one "
            f"microbatch at a time needs {least} bytes ({show_bytes(least)}) per device; raise --mem"
        )
    for attempt in equal:
        problem, devices, fixed = attempt.problem, range(attempt.problem.devices), attempt.fixed
        least = max(fixed[d] + max(problem.stages[s].saved for s in problem.stages_of(d)) for d in devices)
        if attempt.is_partial or (best is not None and least >= max(best[0], caps.device_bytes + 1)):
            continue  # whole offloads need no more memory; or one stage alone needs more than another placement
        timed = one_at_a_time(attempt.problem, fixed)
        if incumbents.keep(attempt, timed, "least memory") is None:
            continue
        needed, _ = attempt.peaks(timed)
        worst = max(devices, key=lambda d: needed[d])
        if best is None or needed[worst] < best[0]:
            best = needed[worst], worst, attempt
    if best is not None and incumbents.winner() is None:
        raise _refusal(*best, caps)


def _tried(incumbents: Incumbents, attempts: list[Attempt]) -> int | None:
    """Try one microbatch after the other on these placements; return the least bytes per device that it needs."""
    needed: list[int] = []
    for attempt in attempts:
        for found in _one_after_the_other(attempt.problem):
            incumbents.keep(attempt, found, "least memory")
            needed.append(max(attempt.peaks(found)[0]))
    return min(needed, default=None)


def _one_after_the_other(problem: Problem) -> Iterator[Schedule]:
    """Yield schedules that begin a microbatch when the one before is done, with one treatment of all activations."""
    stages = range(len(problem.stages))
    lanes: list[list[Task]] = [[] for _ in range(problem.devices)]
    for first in range(0, problem.microbatches, problem.slices):
        units = range(first, first + problem.slices)
        for unit in units:
            for s in stages:
                lanes[problem.stages[s].device].append(Task(Kind.F, s, unit))
        for unit in reversed(units):
            for s in reversed(stages):
                lanes[problem.stages[s].device].append(Task(Kind.B, s, unit))
    again = {s for s in stages if problem.can_recompute(s)}
    away = frozenset((s, u) for s in stages if problem.can_offload(s) for u in range(problem.microbatches))
    recomputed = [[part for task in lane for part in _again(task, again)] for lane in lanes]
    found = [(lanes, frozenset[tuple[int, int]]()), (recomputed, frozenset[tuple[int, int]]()), (lanes, away)]
    for compute, offloaded in found:
        with suppress(Stuck):
            recipe = Recipe(compute, offloaded, streaming=bool(offloaded))
            yield earliest(timed(problem, recipe, "one-at-a-time"))


def _again(task: Task, stages: set[int]) -> list[Task]:
    return [task._replace(kind=Kind.R), task] if task.kind is Kind.B and task.stage in stages else [task]


def _refusal(needed: int, device: int, attempt: Attempt, caps: Caps) -> Infeasible:
    cap = caps.device_bytes
    place = f"placement {attempt.layout.name}, {attempt.layout.stages} stages"
    host = "" if caps.host_bytes is None else f" and --host-mem {show_bytes(caps.host_bytes)}"
    if attempt.problem.hosts:
        host += " and the memory of the profile's hosts"
    if needed <= cap:
        return Infeasible(f"no schedule fits{host}: offloading needs more host memory; raise --host-mem or --mem")
    return Infeasible(
        f"no schedule fits --mem {show_bytes(cap)}{host}: device {device} is {needed - cap} bytes "
        f"({show_bytes(needed - cap)}) short; the smallest --mem that would do is {needed} "
        f"({show_bytes(needed)}; {place})"
    )
