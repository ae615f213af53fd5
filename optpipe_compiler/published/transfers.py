"""When the activations of a schedule visit the host: as in PipeOffload (Wan et al., arXiv:2503.01328), or streaming.

An activation leaves as soon as its forward is done and comes back as late as its backward allows, first come first
served on each link. Where the link is too slow for that, the backwards wait. Streaming ones come back during the
backward before their own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler import machine
from optpipe_compiler.model.problem import DURATIONS, Problem, Stage
from optpipe_compiler.model.schedule import NONE, Ints, Kind, Schedule, classes, lengths, stage_links

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.published.common import Bools, Order, Recipe

BACKWARDS = (Kind.I, Kind.B)
COMPUTE = DURATIONS[: Kind.D]
NOT_THERE = np.iinfo(np.int64).min
ROUND_TRIPS = 3
"""An activation that stays no longer than so many transfers there and back is kept, as in the authors' generator."""


def timed(problem: Problem, recipe: Recipe, method: str) -> Schedule:
    """Return the schedule at its earliest without memory limits; raises Stuck when the order waits for itself."""
    if recipe.offloaded is None or not recipe.offloaded.any():
        return machine.orders.released(problem, recipe.compute, method=method)
    return (_streamed if recipe.streaming else _late)(problem, recipe.compute, recipe.offloaded, method)


def _streamed(problem: Problem, compute: Order, offloaded: Bools, method: str) -> Schedule:
    """Return the schedule in which each reload may start with the backward before its own on the same device.

    That of a device's first backward may start with the op before it. Transfers of a link run in the order of the ops
    that they serve if nothing were offloaded. For that order an op that takes no time counts as one tick: then an op
    starts later than any that it waits for, and the lanes cannot wait for each other in a circle.
    """
    paced = problem.changed(_paced)
    ticks = machine.orders.released(paced, compute, method=method).ticks
    gates = np.full(ticks.shape[1:], NONE)
    for order in compute:
        places = np.flatnonzero(np.isin(order[:, 0], BACKWARDS))
        before = np.concatenate([places[:1] - 1, places[:-1]])
        gates[order[places, 1], order[places, 2]] = machine.state.packed(*order[before].T)
    s, m = np.nonzero(offloaded)
    kind = _backwards(ticks)[s, m]
    away = np.lexsort((m, s, ticks[Kind.F, s, m] + _taken(paced)[Kind.F, s, m]))
    back = np.lexsort((m, s, ticks[kind, s, m]))
    offloads = _by_link(problem, Kind.D, s[away], m[away])
    reloads = _by_link(problem, Kind.H, s[back], m[back])
    return machine.orders.released(problem, compute, (offloads, reloads), gates, method=method)


def _paced(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    return tuple(replace(one, **{name: max(1, getattr(one, name)) for name in COMPUTE}) for one in stages)


def _taken(problem: Problem) -> Ints:
    """Return how long tasks take, in ticks, as [kind, stage, microbatch]."""
    return lengths(problem)[:, :, classes(problem)]


def _backwards(ticks: Ints) -> Ints:
    """Return as [stage, microbatch] of which kind the backward is that needs the activation."""
    return np.where(ticks[Kind.I] == NONE, Kind.B, Kind.I)


def _by_link(problem: Problem, kind: Kind, stages: Ints, microbatches: Ints) -> Order:
    """Return transfers of one kind, which are in order, for each link."""
    link = stage_links(problem)[stages]
    transfers = np.stack([np.full_like(stages, kind), stages, microbatches], axis=1)
    return [transfers[link == one] for one in range(problem.links)]


def _late(problem: Problem, compute: Order, offloaded: Bools, method: str) -> Schedule:
    """Return the schedule with the delays that the transfers of what is worth them cause, each as late as it may be.

    They are placed as if the orders ran at the times that they have if nothing is offloaded.
    """
    bare = machine.orders.released(problem, compute, method=method)
    starts, taken, backward = postponed(problem, compute, bare.ticks), _taken(problem), _backwards(bare.ticks)
    s, m = np.nonzero(offloaded)
    done, due = starts[Kind.F, s, m] + taken[Kind.F, s, m], starts[backward[s, m], s, m]
    trip = taken[Kind.D, s, m] + taken[Kind.H, s, m]
    worth_it = due - done - taken[backward[s, m], s, m] > ROUND_TRIPS * trip
    s, m, done, due = (of[worth_it] for of in (s, m, done, due))
    away, back = np.lexsort((m, s, done)), np.lexsort((m, -s, due))
    offloads = _by_link(problem, Kind.D, s[away], m[away])
    reloads = _by_link(problem, Kind.H, s[back], m[back])
    gates = _gates(compute, starts, backward, _latest_starts(reloads, starts, backward, taken[Kind.H]))
    return machine.orders.released(problem, compute, (offloads, reloads), gates, starts[Kind.F], method=method)


def _gates(compute: Order, starts: Ints, backward: Ints, latest: Ints) -> Ints:
    """Return for each reload the compute task with which it may start: the last one that leaves enough time.

    Enough for it and for the later reloads of its link, each being there when its backward would have started.
    """
    gates = np.full(latest.shape, NONE)
    for order in compute:
        kind, s, m = order.T
        needing = np.flatnonzero((kind == backward[s, m]) & (latest[s, m] != NOT_THERE))
        s_of, m_of = s[needing], m[needing]
        number = np.searchsorted(starts[kind, s, m], latest[s_of, m_of], side="right")
        gate = order[np.maximum(0, np.minimum(number, needing) - 1)]
        gates[s_of, m_of] = machine.state.packed(*gate.T)
    return gates


def _latest_starts(reloads: Order, starts: Ints, backward: Ints, lasts: Ints) -> Ints:
    """Return by [stage, microbatch] when each reload must start, at the latest; NOT_THERE if there is none.

    With transfers 1 to n of a link of length r, and d when their backwards start: the i-th starts no later than
    min over j >= i of d_j - r_i - ... - r_j.
    """
    latest = np.full(backward.shape, NOT_THERE)
    for lane in reloads:
        _, s, m = lane.T
        until = np.cumsum(lasts[s, m])
        due = starts[backward[s, m], s, m] - until
        latest[s, m] = np.minimum.accumulate(due[::-1])[::-1] + until - lasts[s, m]
    return latest


def postponed(problem: Problem, compute: Order, ticks: Ints) -> Ints:
    """Return `ticks` with each device's forwards before its first backward as late as they delay nothing else.

    What is not needed yet need not take memory yet; the authors' generator does the same.
    """
    latest, taken = ticks.copy(), _taken(problem)
    warm_up = [pair for order in compute for pair in _warm_up(order)]
    for task, following in sorted(warm_up, key=lambda pair: ticks[pair[0]], reverse=True):
        _, stage, microbatch = task
        end = latest[following]
        if stage + 1 < len(problem.stages):
            after = latest[Kind.F, stage + 1, microbatch]
            end = min(end, after - problem.stages[stage].send_activation)
        latest[task] = max(ticks[task], end - taken[task])
    return latest


def _warm_up(order: Ints) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield each forward before the first other task of a device, with the task after it."""
    others = np.flatnonzero(order[:, 0] != Kind.F)
    first = order[: others[0] + 1 if others.size else None]
    return pairwise(map(tuple, first.tolist()))
