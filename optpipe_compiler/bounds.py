"""Lower bounds that cost nothing, each with its argument. All hold for any order, split, offload and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe_compiler.problem import Problem, Stage


@dataclass(frozen=True)
class Bound:
    """A proven lower bound in ticks and the name of its argument."""

    name: str
    ticks: int


def best(problem: Problem, objective: str) -> Bound:
    """Return the largest of all bounds for the objective (`makespan` or `span`)."""
    bounds = [device_work(problem), round_trip(problem)]
    if objective == "makespan":
        bounds += [head_and_work(problem), memory_time(problem), resources(problem)]
    return max(bounds, key=lambda bound: bound.ticks)


def device_work(problem: Problem) -> Bound:
    """A device runs one op at a time: span >= M x (forward + cheaper backward) summed over its stages."""
    work = [0] * problem.devices
    for stage in problem.stages:
        work[stage.device] += problem.microbatches * _work(problem, stage)
    return Bound("device-work", max(work))


def head_and_work(problem: Problem) -> Bound:
    """Before a device's first op, a microbatch must come to it through all earlier stages; then it has all its work.

    makespan >= (forwards and messages before its first stage) + its work + (what must follow its last op). With fused
    backwards the last op is some backward, which must still travel to the first stage; with split ones it may be a
    weight gradient, which nothing follows.
    """
    result = 0
    for device in range(problem.devices):
        mine = problem.stages_of(device)
        if not mine:
            continue
        head = _head(problem, mine[0])
        tail = 0 if problem.freedom.split else min(_tail(problem, s) for s in mine)
        work = sum(_work(problem, problem.stages[s]) for s in mine)
        result = max(result, head + problem.microbatches * work + tail)
    return Bound("head-and-work", result)


def round_trip(problem: Problem) -> Bound:
    """One microbatch goes through all stages and back: F of all, then the input gradients (or backwards) of all.

    The first stage's device sees both ends of it, so the bound holds for the span, too.
    """
    stages = problem.stages
    there = sum(stage.forward + stage.send_activation for stage in stages)
    back = sum(_backward(problem, stage) + stage.send_gradient for stage in stages)
    first = stages[0]
    rest = _work(problem, first) - first.forward - _backward(problem, first)
    return Bound("round-trip", there + back + max(0, rest))


def memory_time(problem: Problem) -> Bound:
    """Little's law: memory x time. An activation occupies its device for a least time, whatever is done with it.

    Kept: from the start of its forward to the end of its backward, at least the round trip through the later stages.
    Offloaded: its forward and offload, then reload and backward. Recomputed: its forward, then again with its backward.
    The sum of bytes x least time over all activations fits into budget x (makespan - head), because nothing is resident
    before the first forward can reach the device.
    """
    result = Fraction(0)
    for device in range(problem.devices):
        mine = problem.stages_of(device)
        area = sum(problem.microbatches * _least_area(problem, s) for s in mine)
        if mine and area and problem.budget[device] > 0:
            head = _head(problem, mine[0])
            result = max(result, head + Fraction(area, problem.budget[device]))
    return Bound("memory-time", ceil(result))


def resources(problem: Problem) -> Bound:
    """Compute, memory and host link together: what one is spared, another must bear.

    Take a device, or all devices behind one link. From the time its first forward can start, each device has its work
    (a recomputation adds to it), its memory has area = sum of bytes x least time over its budget, and the link has the
    offloads. The makespan less that head is at least each of the three, so at least any weighted mean of them. In a
    weighted mean every activation chooses the cheapest of keep, offload and recompute for itself, which bounds every
    joint choice. The best weights of a grid are taken.
    """
    groups = [[device] for device in range(problem.devices)]
    links = sorted({link for link in problem.link_of if link is not None})
    groups += [[d for d in range(problem.devices) if problem.link_of[d] == link] for link in links]
    result = Fraction(0)
    for group in groups:
        mine = [problem.stages_of(device) for device in group]
        if all(mine) and all(problem.budget[device] > 0 for device in group):
            head = min(_head(problem, stages[0]) for stages in mine)
            result = max(result, head + max(_weighted(problem, group, weights) for weights in _GRID))
    return Bound("resources", ceil(result))


_STEPS = 8
_GRID = [
    (Fraction(work, _STEPS), Fraction(memory, _STEPS), Fraction(_STEPS - work - memory, _STEPS))
    for work in range(_STEPS + 1)
    for memory in range(_STEPS + 1 - work)
]
"""Weights of compute, memory and link that sum to one."""


def _weighted(problem: Problem, group: list[int], weights: tuple[Fraction, Fraction, Fraction]) -> Fraction:
    work, memory, link = weights
    total = Fraction(0)
    for device in group:
        per_area = memory / (len(group) * problem.budget[device])
        for s in problem.stages_of(device):
            stage = problem.stages[s]
            areas = _areas(problem, s)
            costs = [per_area * areas[0]]
            if problem.can_offload(s):
                costs.append(per_area * areas[1] + link * stage.offload_alone)
            if problem.can_recompute(s):
                costs.append(per_area * areas[2] + work * stage.recompute / len(group))
            total += work * _work(problem, stage) / len(group) + min(costs)
    return problem.microbatches * total


def _areas(problem: Problem, s: int) -> tuple[int, int, int]:
    """Return the least units x ticks that an activation of stage s occupies if kept, offloaded, recomputed."""
    stage, later = problem.stages[s], problem.stages[s + 1 :]
    journey = sum(t.forward + t.send_activation + t.send_gradient + _backward(problem, t) for t in later)
    end = stage.saved * stage.backward
    if problem.freedom.split:
        end = min(end, stage.saved * stage.backward_input + stage.residue * stage.backward_weight)
    kept = stage.saved * (stage.forward + stage.send_activation + journey) + end
    away = stage.saved * (stage.forward + stage.offload_alone + stage.reload_alone) + end
    return kept, away, stage.saved * (stage.forward + stage.recompute) + end


def _head(problem: Problem, s: int) -> int:
    """Return the earliest time at which the forward of stage s can start."""
    return sum(stage.forward + stage.send_activation for stage in problem.stages[:s])


def _work(problem: Problem, stage: Stage) -> int:
    return stage.work if problem.freedom.split else stage.forward + stage.backward


def _backward(problem: Problem, stage: Stage) -> int:
    """The shortest time from the start of a stage's backward to its input gradient."""
    return min(stage.backward, stage.backward_input) if problem.freedom.split else stage.backward


def _tail(problem: Problem, s: int) -> int:
    stages = problem.stages
    return sum(stages[t].send_gradient + stages[t - 1].backward for t in range(s, 0, -1))


def _least_area(problem: Problem, s: int) -> int:
    kept, away, again = _areas(problem, s)
    areas = [kept]
    if problem.can_offload(s):
        areas.append(away)
    if problem.can_recompute(s):
        areas.append(again)
    return min(areas)
