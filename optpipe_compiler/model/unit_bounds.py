"""Lower bounds of units, which are whole microbatches, or slices of them; bounds.py has those of equal microbatches.

On every stage forwards run in the order of units, and backwards by microbatch with slices descending: so the first
backward of a microbatch comes after all of its forwards on the last stage. Not here are the bounds whose arguments
count equal activations.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, compress, zip_longest
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.model.problem import Problem, Stage

LEFT = 1.02
"""Sizes are counted by how many fit where at least a fiftieth more than these would."""


class Area(NamedTuple):
    """Units x ticks that an activation occupies at the least if it is kept, offloaded, recomputed."""

    kept: int
    away: int
    again: int


def work_of(problem: Problem, stage: Stage) -> int:
    """Return the compute ticks that a unit costs at least."""
    return stage.work if problem.freedom.split else stage.forward + stage.backward


def backward_of(problem: Problem, stage: Stage) -> int:
    """Return the shortest time from the start of a unit's backward to its input gradient."""
    return min(stage.backward, stage.backward_input) if problem.freedom.split else stage.backward


def device_work(problem: Problem) -> int:
    """A device runs one op at a time: span >= sum of work over its stages and all units."""
    return max(sum(work for _, work in works) for works in _works(problem))


def _works(problem: Problem) -> list[list[tuple[int, int]]]:
    """Return, by device, its stages in their order, each with the work of all units there."""
    units = list(zip(_counts(problem), problem.by_class, strict=True))
    works = [sum(count * work_of(problem, stages[s]) for count, stages in units) for s in range(len(problem.stages))]
    return [[(s, works[s]) for s in problem.stages_of(device)] for device in range(problem.devices)]


def _counts(problem: Problem) -> list[int]:
    """Return the number of units of each class."""
    return [problem.microbatches] if problem.slicing is None else problem.slicing.class_counts


def head_and_work(problem: Problem, objective: str = "makespan") -> int:
    """makespan >= (the first unit's way to stage s) + (work of the device's stages from s on) + (what must follow).

    It holds of every stage s: a device may begin with a light stage and end with a heavy one, such as an embedding and
    a loss head. The last op of a device is a weight gradient, which nothing follows, or, with fused backwards, that of
    the last microbatch's first slice, whose gradient still travels to the first stage. A span begins and ends at the
    first stage of the device.
    """
    result, numbers = 0, range(len(problem.stages))
    last = problem.by_class[problem.class_of(problem.back(problem.microbatches - 1))]
    heads = heads_of(problem)
    homes = [*accumulate((last[s].send_gradient + last[s - 1].backward for s in numbers[1:]), initial=0)]
    if problem.freedom.split:
        homes = [0 for _ in homes]
    for works in _works(problem):
        total, begin = 0, works[0][0] if works and objective == "span" else 0
        for s, work in reversed(works):
            total += work
            result = max(result, heads[s] - heads[begin] + total + homes[s] - homes[begin])
    return result


def heads_of(problem: Problem) -> list[int]:
    """Return the earliest time at which a forward of each stage can start: that of the first unit."""
    first = problem.by_class[problem.class_of(0)]
    return [*accumulate((stage.forward + stage.send_activation for stage in first[:-1]), initial=0)]


def round_trip(problem: Problem) -> int:
    """makespan and span >= the critical path of a microbatch: forwards of its slices ascending, backwards descending.

    With f(s, k) the earliest end of the forward of slice k on stage s,
    f(s, k) = max(f(s - 1, k) + message, f(s, k - 1)) + forward, the first of which `came` holds; likewise back from the
    last stage and slice. The first stage's device sees both ends.
    """
    n, result = problem.slices, 0
    for first in range(0, problem.microbatches, n) if _shapes(problem) > 1 else (0,):
        units = [problem.by_class[problem.class_of(first + k)] for k in range(n)]
        came = [0] * n
        for s in range(len(problem.stages)):
            end = 0
            for k in range(n):
                end = max(came[k], end) + units[k][s].forward
                came[k] = end + units[k][s].send_activation
        came = came[-1:] * n
        for s in reversed(range(len(problem.stages))):
            end = 0
            for k in reversed(range(n)):
                end = max(came[k], end) + backward_of(problem, units[k][s])
                came[k] = end + units[k][s].send_gradient
        rest = work_of(problem, units[0][0]) - units[0][0].forward - backward_of(problem, units[0][0])
        result = max(result, end + max(0, rest))
    return result


def _shapes(problem: Problem) -> int:
    return 1 if problem.slicing is None else len(problem.slicing.cuts)


def memory_time(problem: Problem) -> int:
    """Little's law: sum of (bytes x least time) over all activations <= budget x (makespan - head).

    Keys and values, and their gradients, count as the rest of an activation does: the former are a part of it, and
    those of the latter are left out. It holds of sizes as they are, and of those of `counted`.
    """
    result, counts, heads = Fraction(0), _counts(problem), heads_of(problem)
    for fits in countings(problem):
        areas = least_areas(problem, fits)
        for device in range(problem.devices):
            mine = problem.stages_of(device)
            area = sum(
                count * min(compress(areas[number][s], problem.able(s)))
                for number, count in enumerate(counts)
                for s in mine
            )
            if mine and area and problem.budget[device] > 0:
                room = problem.budget[device] * max(1, fits[device])
                result = max(result, heads[mine[0]] + Fraction(area, room))
    return ceil(result)


def counted(size: int, budget: int, fits: int) -> int:
    """Return a size, in parts of 1 / `fits` of a unit, such that what fits into the budget still does.

    It is u(x) = x if (k + 1) x is an integer, else floor((k + 1) x) / k, of x = size / budget with k = `fits`, a dual
    feasible function (Lueker, 1983; Fekete and Schepers, Mathematical Programming 91, 2001): sizes of which k fit, and
    no more, count 1 / k of the budget each, whatever is left over. With `fits` of 0 a size counts as it is.
    """
    if not fits:
        return size
    whole, rest = divmod((fits + 1) * size, budget)
    return whole * budget if rest else fits * size


def countings(problem: Problem) -> list[list[int]]:
    """Return, by device, numbers of activations to count sizes by: first 0, then those that fit of its stages each,
    where much of the budget is left over with so many."""
    found: list[list[int]] = []
    for device, budget in enumerate(problem.budget):
        saved = {problem.stages[s].saved for s in problem.stages_of(device)}
        numbers = {budget // size for size in saved if 0 < size <= budget and budget > LEFT * (budget // size) * size}
        found.append([0, *sorted(numbers)])
    return [*map(list, zip_longest(*found, fillvalue=0))]


def least_areas(problem: Problem, fits: Sequence[int]) -> list[list[Area]]:
    """Return the least areas of an activation by class and stage; sizes are those of `counted` with `fits` by device.

    Between the start of its forward and that of its backward at stage s lie: its own way through the later stages,
    then the forwards of all later slices on the last stage, then their backwards there, then its own way back. What an
    offload or a recompute leaves on the device stays all that time.
    """
    n, found = problem.slices, []
    for shape in range(_shapes(problem)):
        units = problem.by_class[shape * n : (shape + 1) * n]
        turn = [units[k][-1].forward + backward_of(problem, units[k][-1]) for k in range(n)]
        later = [*accumulate(reversed(turn[1:]), initial=0)][::-1]
        for stages, way in zip(units, later, strict=True):
            areas: list[Area] = []
            for s in reversed(range(len(stages))):
                stage = stages[s]
                budget, number = problem.budget[stage.device], fits[stage.device]
                sizes = stage.saved, stage.staying, stage.checkpoint, stage.residue
                saved, staying, checkpoint, residue = (counted(size, budget, number) for size in sizes)
                stay = stage.forward + stage.send_activation + way
                end = saved * stage.backward
                if problem.freedom.split:
                    end = min(end, saved * stage.backward_input + residue * stage.backward_weight)
                copied = stage.forward + stage.offload_alone + stage.reload_alone
                again = checkpoint * max(0, stay - stage.forward - stage.recompute)
                areas.append(
                    Area(
                        saved * stay + end,
                        (saved - staying) * copied + staying * stay + end,
                        saved * (stage.forward + stage.recompute) + again + end,
                    )
                )
                way += stage.forward + stage.send_activation + backward_of(problem, stage) + stage.send_gradient
            found.append(areas[::-1])
    return found
