"""Lower bounds that cost nothing, each with its argument. All hold for any order, split, offload and recomputation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain, compress, pairwise, starmap
from math import ceil
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_compiler.model.schedule import Mode
from optpipe_compiler.model.unit_bounds import (
    Area,
    backward_of,
    countings,
    device_work,
    head_and_work,
    heads_of,
    least_areas,
    memory_time,
    round_trip,
    work_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe_compiler.model.problem import Problem, Stage


@dataclass(frozen=True)
class Bound:
    """A proven lower bound in ticks and the name of its argument."""

    name: str
    ticks: int


@lru_cache(256)
def best(problem: Problem, objective: str) -> Bound:
    """Return the largest of all bounds for the objective (`makespan` or `span`)."""
    return max(starmap(Bound, by_name(problem, objective).items()), key=lambda bound: bound.ticks)


def lowest(problems: Iterable[Problem], objective: str) -> Bound:
    """Return the least that `best` says of any problem; it is not asked of those that quicker bounds rule out."""
    quick = [(max(_quick(problem, objective).values()), number, problem) for number, problem in enumerate(problems)]
    found: Bound | None = None
    for ticks, _, problem in sorted(quick, key=lambda one: one[:2]):
        if found is None or ticks < found.ticks:
            each = best(problem, objective)
            found = each if found is None or each.ticks < found.ticks else found
    assert found is not None
    return found


def by_name(problem: Problem, objective: str) -> dict[str, int]:
    """Return all bounds for the objective."""
    found = _quick(problem, objective)
    if objective == "makespan":
        found["memory-time"] = memory_time(problem)
        if problem.slicing is None:
            found |= {"resources": resources(problem), "fill-and-drain": fill_and_drain(problem)}
            found |= {"slots": slots(problem), "one-by-one": one_by_one(problem)}
    return found


def _quick(problem: Problem, objective: str) -> dict[str, int]:
    """Return the bounds that take no time."""
    return {
        "device-work": device_work(problem),
        "round-trip": round_trip(problem),
        "head-and-work": head_and_work(problem, objective),
    }


def resources(problem: Problem) -> int:
    """Compute, memory and host link together: what one is spared, another must bear.

    Take a device, or all devices behind one link. From the time its first forward can start, each device has its work
    (a recomputation adds to it), its memory has area = sum of bytes x least time over its budget, and the link has the
    transfers. The makespan less that head is at least each of the three, so at least any weighted mean of them. In a
    weighted mean every activation chooses the cheapest of keep, offload and recompute for itself, which bounds every
    joint choice. It holds for any weights; good ones are searched for.

    A transfer that meets one of the other direction takes longer. Let offloads alone on the link take x in all and
    others p, reloads alone y and others q. Those alone share no time with the other direction, so the link has
    x + y + max(p, q) >= x + y + l p + (1 - l) q for any 0 <= l <= 1, and an offloaded activation costs it at least

        min(offload alone, l offload) + min(reload alone, (1 - l) reload).
    """
    groups, heads, found = _groups(problem), heads_of(problem), []
    known: dict[_Shares, _Mean] = {}
    for fits in countings(problem):
        (areas,) = least_areas(problem, fits)
        rooms = [budget * max(1, number) for budget, number in zip(problem.budget, fits, strict=True)]
        for group in groups:
            mine = [problem.stages_of(device) for device in group]
            if all(mine) and all(problem.budget[device] > 0 for device in group):
                head = min(heads[stages[0]] for stages in mine)
                shares = _shares(problem, mine, areas, rooms)
                if shares not in known:
                    known[shares] = shares.heaviest()
                found.append((head + problem.microbatches * known[shares].about, head, shares))
    result = Fraction(0)
    for about, head, shares in sorted(found, key=itemgetter(0), reverse=True):
        if about * (1 + _ROUNDING) > result:  # fractions take their time
            result = max(result, head + problem.microbatches * shares.mean(known[shares]))
    return ceil(result)


_ROUNDING = 1e-9
"""More than sums of floating-point numbers are rounded by, as a share."""

Transfers = tuple[int, int, int, int]
"""Ticks of an offload alone on its link, of one that meets a reload, and so of a reload."""


class _Mean(NamedTuple):
    """A weighted mean of compute, memory and link, rounded, and the weights of the first two."""

    about: float
    work: float
    memory: float


class _Activation(NamedTuple):
    """What the options of an activation cost: see `options`."""

    able: tuple[bool, ...]
    area: Area
    room: int
    """The device's budget, as often as `area` counts it."""
    recompute: int
    transfers: Transfers


class _Shares(NamedTuple):
    """What a microbatch costs a group of devices behind one link (or one device): the options of each activation."""

    devices: int
    """How many there are."""
    work: int
    activations: tuple[_Activation, ...]

    def options(self) -> list[list[tuple[Fraction, Fraction, Fraction]]]:
        """Return what keeping, offloading and recomputing an activation takes, as far as it may: ticks of compute, of
        memory (area over budget) and of the link, each as a mean over the devices."""
        none, found = Fraction(0), []
        alike = Counter(one.transfers for one in self.activations if one.able[Mode.OFFLOAD])
        share = _of_offloads(tuple(sorted(alike.items())))
        for one in self.activations:
            kept, away, again = (Fraction(area, self.devices * one.room) for area in one.area)
            recompute = Fraction(one.recompute, self.devices)
            every = (none, kept, none), (none, away, _on_link(one.transfers, share)), (recompute, again, none)
            found.append([*compress(every, one.able)])
        return found

    def heaviest(self) -> _Mean:
        """Return the largest weighted mean found: the best weights of a grid, then of ever finer ones around them."""
        filled = [[*options, *options[:1] * (3 - len(options))] for options in self.options()]
        options = np.array(filled, np.float64)  # [activation, option, resource]
        best, near, step = np.array([1.0, 0.0]), _GRID, 1 / _STEPS
        while True:
            inside = near[(near >= 0).all(axis=1) & (near.sum(axis=1) <= 1)]
            tried = np.concatenate([best[None], inside])
            work, memory = tried.T
            chosen = (options @ np.stack([work, memory, 1 - work - memory])).min(axis=1)
            means = work * (self.work / self.devices) + chosen.sum(axis=0)
            at = np.argmax(means)
            best = tried[at]
            if step < _FINEST:
                return _Mean(float(means[at]), *best.tolist())
            step /= _FINER
            near = best + _AROUND * step

    def mean(self, of: _Mean) -> Fraction:
        """Return the mean of these weights, not rounded."""
        work, memory = Fraction(of.work), Fraction(of.memory)
        chosen = (min(work * c + memory * a + (1 - work - memory) * t for c, a, t in one) for one in self.options())
        return work * self.work / self.devices + sum(chosen)


def _shares(problem: Problem, mine: list[list[int]], areas: list[Area], rooms: Sequence[int]) -> _Shares:
    """Return those of the stages `mine` of each device of a group."""
    numbers = [*chain.from_iterable(mine)]
    activations = []
    for s in numbers:
        stage = problem.stages[s]
        transfers = stage.offload_alone, stage.offload, stage.reload_alone, stage.reload
        activations.append(_Activation(problem.able(s), areas[s], rooms[stage.device], stage.recompute, transfers))
    return _Shares(len(mine), _work_of(problem, numbers), tuple(activations))


def _on_link(transfers: Transfers, share: Fraction) -> Fraction:
    """Return the least ticks of a link for the transfers of an activation; `share` is l of `resources`."""
    offload_alone, offload, reload_alone, reload = transfers
    return min(Fraction(offload_alone), share * offload) + min(Fraction(reload_alone), (1 - share) * reload)


@lru_cache(256)
def _of_offloads(counts: tuple[tuple[Transfers, int], ...]) -> Fraction:
    """Return l of `resources` for which all transfers together cost their link most, of those of its longest offload:
    their cost is concave in l, with a turn where an offload alone and one that meets another cost the same, and one
    where reloads do. `counts` says how many transfers are alike."""
    longest = max((transfers for transfers, _ in counts), key=itemgetter(1), default=(0, 0, 0, 0))
    offload_alone, offload, reload_alone, reload = longest
    if not offload or not reload:
        return Fraction(1)
    turns = Fraction(offload_alone, offload), 1 - Fraction(reload_alone, reload)

    def cost(share: Fraction) -> Fraction:
        return sum((count * _on_link(transfers, share) for transfers, count in counts), start=Fraction(0))

    return max((Fraction(1), Fraction(0), *turns), key=cost)


_STEPS, _FINER = 8, 4
"""Grids of eighths, then of a quarter of the step before."""
_FINEST = 1 / 1024
"""Of bench/planner.py's cases without links or with slow ones, finer steps change no bound by a thousandth."""
_GRID = np.array([(x, y) for x in range(_STEPS + 1) for y in range(_STEPS + 1)]) / _STEPS
_AROUND = np.array([(x, y) for x in range(-2 * _FINER, 2 * _FINER + 1) for y in range(-2 * _FINER, 2 * _FINER + 1)])


def _groups(problem: Problem) -> list[list[int]]:
    """Return every device by itself, and all devices behind each link that is shared."""
    links = sorted({link for link in problem.link_of if link is not None})
    behind = [[d for d, one in enumerate(problem.link_of) if one == link] for link in links]
    return [[device] for device in range(problem.devices)] + [group for group in behind if len(group) > 1]


def fill_and_drain(problem: Problem) -> int:
    """What memory and link let a device do before its first backward can come, and after its last forward.

    Until the first microbatch has been through all stages and back to the device's last stage, the device can only run
    forwards. What they save must stay (memory), be offloaded by then (link), or be dropped and recomputed later (work).
    So the time until then is filled as far as budget and link go; of what is left, each tick is lost now, or is bought
    with a recomputation. Reversed in time the same holds after the device's last forward, which its microbatch still
    follows through the later stages and back through all: what backwards and weight gradients read then was there, is
    reloaded by then, or is recomputed. A recomputation may serve both ends, and is counted once.

    A device's last input gradient, which is of its first stage s, still has its way home: through all earlier stages,
    and a weight gradient behind it. Meanwhile the device can only run weight gradients: its own, and those whose
    residues all were in memory beside its activation when it began. With n = (budget - saved(s)) // least residue

        lost at the end >= way home from s - weight gradient of s
                           - min(n x longest weight gradient, (budget - saved(s)) x max of weight gradient / residue).

    What a link has not moved to its end counts as in memory: of transfers that take x ticks at the least, no more than
    ticks // x are over.

    Devices that share a link share what it can move, from the end of their first forward on: the mean over them is
    bounded. makespan >= mean of work + losses. As in `head_and_work` it also holds of a device's last stages alone.
    """
    result, ways, trips = Fraction(0), _ways_back(problem), _trips(problem)
    heads, most = heads_of(problem), 2 * round_trip(problem)
    for group in _groups(problem):
        parts = [problem.stages_of(device) for device in group]
        if all(parts) and all(problem.budget[device] > 0 for device in group):
            alone = parts[0] if len(parts) == 1 else []
            for several in [parts, *([mine] for mine in _last_of(problem, alone, most))]:
                ends = [_Ends(problem, mine, heads, trips, ways) for mine in several]
                work = problem.microbatches * sum(_work_of(problem, mine) for mine in several)
                result = max(result, Fraction(work + _lost(problem, ends)) / len(several))
    return ceil(result)


def _last_of(problem: Problem, mine: list[int], most: int) -> Iterator[list[int]]:
    """Yield a device's stages without the first, the first two, ..., while these have less than `most` ticks of work:
    by more the ends of the others are hardly longer."""
    for k in range(1, len(mine)):
        if problem.microbatches * _work_of(problem, mine[:k]) < most:
            yield mine[k:]


def _work_of(problem: Problem, several: Iterable[int]) -> int:
    return sum(work_of(problem, problem.stages[s]) for s in several)


class _Ends:
    """The two ends of one device: how long they last at least, and how much work memory and link allow in them.

    `mine` are its stages, in their order; the rest are those of `heads_of`, `_trips` and `_ways_back`.
    """

    def __init__(self, problem: Problem, mine: list[int], heads: list[int], trips: list[int], ways: list[int]) -> None:
        stages, last = problem.stages, mine[-1]
        own = [stages[s] for s in mine]
        budget, microbatches = problem.budget[own[0].device], problem.microbatches
        self.head = heads[mine[0]]
        self.first = self.head + own[0].forward
        """When the first activation is there, which the link may take."""
        self.fill = heads[last] - self.head + stages[last].forward + trips[last]
        """From the first forward that can come to the first backward that can come."""
        self.drain = trips[last] + sum(backward_of(problem, t) + t.send_gradient for t in stages[: last + 1])
        """From the end of the last forward to the end of all."""
        way = own[0].send_gradient + ways[mine[0] - 1] if mine[0] else 0
        weights = [(stage.backward_weight, stage.residue) for stage in own] if problem.freedom.split else []
        beside = max(0, budget - own[0].saved)
        least = min((residue for _, residue in weights), default=0)
        left = max(1, beside) * _densest(weights)  # those that hold nothing wait however little is left
        if least:
            left = min(left, Fraction(beside // least * max(ticks for ticks, _ in weights)))
        behind = own[0].backward_weight if problem.freedom.split else 0
        self.tail = max(Fraction(0), way - behind - left)
        """Lost behind the last input gradient."""
        self.forwards = microbatches * sum(stage.forward for stage in own)
        self.backwards = microbatches * sum(_after(problem, stage) for stage in own)
        forwards_per_unit = _densest((stage.forward, stage.saved) for stage in own)
        backwards_per_unit = _densest([*((_after(problem, stage), stage.saved) for stage in own), *weights])
        self.kept_forwards, self.kept_backwards = budget * forwards_per_unit, budget * backwards_per_unit
        away = [stages[s] for s in mine if problem.can_offload(s)]
        self.moved_forwards = [
            (max(Fraction(0), stage.forward - forwards_per_unit * stage.staying), stage.offload_alone) for stage in away
        ]
        """Of each stage, forward ticks of an activation that the link takes, less those that the part which stays is
        worth, and ticks of the link; and backward ticks of one that it brings."""
        self.moved_backwards = [
            (max(Fraction(0), _after(problem, stage) - backwards_per_unit * stage.staying), stage.reload_alone)
            for stage in away
        ]
        again = [stages[s] for s in mine if problem.can_recompute(s)]
        self.forwards_per_recompute = _densest((stage.forward, stage.recompute) for stage in again)
        self.backwards_per_recompute = _densest(
            (stage.recompute + _after(problem, stage), stage.recompute) for stage in again
        )
        self.is_recompute_free = not all(stage.recompute for stage in again)
        self.are_apart = self.forwards > self.fill
        """Whether the last forward surely comes after the first backward."""


def _lost(problem: Problem, ends: list[_Ends]) -> Fraction:
    """Return the least sum, over the devices of a group, of idle and recomputation ticks at their ends."""
    heads = sum(end.head for end in ends)
    link_fill = max(end.head + end.fill for end in ends) - min(end.first for end in ends)
    link_drain = max(end.drain for end in ends)
    offloads = [one for end in ends for one in end.moved_forwards]
    reloads = [one for end in ends for one in end.moved_backwards]
    filled = _filled([(end.kept_forwards, end.forwards) for end in ends], _moved(link_fill, offloads))
    drained = _filled([(end.kept_backwards, end.backwards) for end in ends], _moved(link_drain, reloads))
    fill = max(Fraction(0), sum(end.fill for end in ends) - filled)
    drain = max(Fraction(0), sum(end.drain for end in ends) - drained)
    tails = sum(end.tail for end in ends)
    if any(end.is_recompute_free for end in ends):  # which buys all of both
        fill = drain = Fraction(0)
    rates = max(e.forwards_per_recompute for e in ends), max(e.backwards_per_recompute for e in ends)

    def least(fill: Fraction, drain: Fraction) -> Fraction:
        """Return what is lost with the best number of recomputations."""

        def lost(recomputed: Fraction) -> Fraction:
            at_start, at_end = (part - rate * recomputed for part, rate in zip((fill, drain), rates, strict=True))
            return recomputed + max(Fraction(0), at_start) + max(tails, at_end)

        parts = zip((fill, max(Fraction(0), drain - tails)), rates, strict=True)
        return min(map(lost, [Fraction(0)] + [part / rate for part, rate in parts if rate]))

    if all(end.are_apart for end in ends):
        return heads + least(fill, drain)
    return heads + max(least(fill, Fraction(0)), least(Fraction(0), drain))


def _filled(devices: list[tuple[Fraction, int]], moved: Fraction) -> Fraction:
    """Return the most ticks of work that memory (each device has its own) and the link allow, of what there is."""
    return min(
        sum((min(kept, Fraction(there)) for kept, there in devices), moved), Fraction(sum(t for _, t in devices))
    )


def _moved(window: int, transfers: list[tuple[Fraction, int]]) -> Fraction:
    """Return the most work that whole transfers, of (ticks of work, ticks of the link), are worth in a window."""
    moved = window * _densest(transfers)
    shortest = min((ticks for _, ticks in transfers), default=0)
    return min(moved, window // shortest * max(worth for worth, _ in transfers)) if shortest else moved


def _densest(pairs: Iterable[tuple[Fraction | int, int]]) -> Fraction:
    """Return the most ticks per unit; what needs no units counts as more than there can be."""
    return max(
        (Fraction(ticks) / size if size else Fraction(ticks) * 2**40 for ticks, size in set(pairs)), default=Fraction(0)
    )


def _after(problem: Problem, stage: Stage) -> int:
    """Compute ticks of a stage's backward at least."""
    return work_of(problem, stage) - stage.forward


def slots(problem: Problem) -> int:
    """Where K activations fit at a time, microbatch m + K starts only after one of the first m + 1 is over.

    Take stage s of device d. A microbatch is in flight at s from the start of its forward to the end of its input
    gradient or fused backward. All that time it holds at least floor(s) = min(saved; checkpoint, if it can be
    recomputed; staying, if it can be offloaded), and floor(i) for each earlier stage i of d, where it is in flight too.
    When the last of c in flight begins its forward, it holds all that it saves and what the op needs besides; so does,
    when c is the most there ever are, the first whose backward begins then. Hence c <= K with

        K = 1 + (budget(d) - max(extra of F, extra of the backward) - saved(s) - sum of floor(i), i < s of d)
              // sum of floor(i), i <= s of d.

    In flight it is for at least T(s), the way through all later stages and back, messages included. Let F(m) be the
    start of the m-th forward at s, m from 0. When F(m + K) starts, at most K - 1 earlier ones are in flight, so m + 1
    are over, one of which began no sooner than F(m). So F(m + K) >= F(m) + T, and with Q = ceil(M / K) - 1

        F(Q K) >= head(s) + Q T(s), where head(s) is the earliest that a forward can reach s.

    Then the last r = M - Q K microbatches (1 <= r <= K) have their forwards from s on and all their backwards still to
    come. For every stage u from s on, and for every device e that has one from s on, the first of which is u:

        makespan >= head(s) + Q T(s) + way from s to u + r x work + way back.

    work is forward and backward of u; or of e, the forwards of its stages from s on and the backwards of all of them. A
    backward counts by the shorter of input gradient and fused backward, and the last one still has the way back to
    stage 0 before it. Or, of a device, it counts with its weight gradient, which need not be waited for on a way back.

    With split backwards K and T are also taken to the end of the weight gradient: T is longer by that, and each of the
    others holds at least min(floor(s), residue) at s, and nothing that is sure at earlier stages.

    For equal stages, one on each of P devices, fused, without messages: (F + B) (Q P + r + P - 1).
    """
    result, trips = 0, _trips(problem)
    rest_of = _Rest(problem)
    for s in reversed(range(len(problem.stages))):
        rest_of.begin_at(s)
        for fit, time in _in_flight(problem, s, problem.stages[s].forward + trips[s]):
            rounds = -(-problem.microbatches // fit) - 1
            if rounds:
                result = max(result, rounds * time + rest_of(problem.microbatches - rounds * fit))
    return result


def one_by_one(problem: Problem) -> int:
    """Where a whole activation leaves no room beside it, a device's activations share nothing of its time.

    Let a device's budget be less than saved(s) + min(saved(t), residue(t)) for all of its stages s and t. While it
    holds a whole activation, it then holds none other and no residue of another. It does from the start of a forward to
    its end, or to the end of the offload, or to the start of the backward where the activation is kept; and from the
    start of a reload or recomputation to that of the weight gradient or to the end of a fused backward. Two weight
    gradients share no time either: they are computed one after the other. So the least times of all of these add up:

        makespan >= head(d) + M x sum over s of min(kept, offloaded, recomputed)

    kept: F, the way through the later stages and back, and the backward. Offloaded: F, D, H and the backward, transfers
    alone on their link. Recomputed: F, R and the backward.
    """
    result, heads, trips = 0, heads_of(problem), _trips(problem)

    def between(s: int) -> int:
        stage = problem.stages[s]
        return min(compress((trips[s], stage.offload_alone + stage.reload_alone, stage.recompute), problem.able(s)))

    for device in range(problem.devices):
        numbers = problem.stages_of(device)
        mine = [problem.stages[s] for s in numbers]
        smallest = min((stage.saved for stage in mine), default=0)
        beside = min((min(s.saved, s.residue) if problem.freedom.split else s.saved for s in mine), default=0)
        if mine and problem.budget[device] < smallest + beside:
            ticks = _work_of(problem, numbers) + sum(map(between, numbers))
            result = max(result, heads[numbers[0]] + problem.microbatches * ticks)
    return result


def _trips(problem: Problem) -> list[int]:
    """Return for each stage the ticks from the end of its forward to the arrival of the gradient that comes back."""
    trips = [0]
    for before, stage in reversed([*pairwise(problem.stages)]):
        there_and_back = stage.forward + backward_of(problem, stage)
        trips.append(trips[-1] + before.send_activation + there_and_back + stage.send_gradient)
    return trips[::-1]


class _Rest:
    """The least time of the last microbatches from a stage on, with the way to that stage before."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        stages = problem.stages
        self.heads = heads_of(problem)
        self.home = [way - backward_of(problem, stage) for way, stage in zip(_ways_back(problem), stages, strict=True)]
        """From the end of a stage's backward, by its shortest time, to the end of all."""
        self.stages: list[tuple[int, int]] = []
        """(work, ways) of each stage from s on: r microbatches take r x work + ways."""
        self.devices: dict[int, list[tuple[int, int]]] = {}
        """Likewise of each device that has a stage from s on: what the gradients need of it, and all its work."""

    def begin_at(self, s: int) -> None:
        """Let stage s be the first; it is called for one stage after the other from the last on."""
        problem, stage = self.problem, self.problem.stages[s]
        mine = problem.stages_of(stage.device)
        forward = sum(problem.stages[i].forward for i in mine if i >= s)
        back = sum(backward_of(problem, problem.stages[i]) for i in mine)
        after = sum(_after(problem, problem.stages[i]) for i in mine)
        home = min(self.home[i] for i in mine)
        self.stages.append((stage.forward + backward_of(problem, stage), self.heads[s] + self.home[s]))
        self.devices[stage.device] = [(forward + back, self.heads[s] + home), (forward + after, self.heads[s])]

    def __call__(self, microbatches: int) -> int:
        """Return the least time of so many."""
        lines = chain(self.stages, *self.devices.values())
        return max(microbatches * work + ways for work, ways in lines)


def _in_flight(problem: Problem, s: int, flight: int) -> Iterator[tuple[int, int]]:
    """Yield (K, T) of stage s: how many microbatches can be in flight there at a time, and for how many ticks at least.

    `flight`: from the start of a forward to the arrival of its gradient.
    """
    stage = problem.stages[s]
    earlier = sum(_floor(problem, i) for i in problem.stages_of(stage.device) if i < s)
    floor = _floor(problem, s)
    room = problem.budget[stage.device] - stage.saved - earlier
    extra = stage.backward_extra
    if problem.freedom.split:
        extra = min(extra, stage.backward_input_extra + stage.captured)
        if min(floor, stage.residue) > 0:
            others = (room - stage.forward_extra) // min(floor, stage.residue)
            yield max(1, 1 + others), flight + _after(problem, stage)
    if earlier + floor > 0:
        others = (room - max(stage.forward_extra, extra)) // (earlier + floor)
        yield max(1, 1 + others), flight + backward_of(problem, stage)


def _floor(problem: Problem, s: int) -> int:
    """Return the least units that an activation of stage s holds at any time between its forward and its backward."""
    stage = problem.stages[s]
    return min(compress((stage.saved, stage.staying, stage.checkpoint), problem.able(s)))


def _ways_back(problem: Problem) -> list[int]:
    """Return for each stage the ticks from the start of a microbatch's backward there to the end of all its ops."""
    ways: list[int] = []
    for stage in problem.stages:
        below = ways[-1] if ways else 0
        ways.append(max(_after(problem, stage), backward_of(problem, stage) + stage.send_gradient + below))
    return ways
