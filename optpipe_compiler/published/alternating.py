"""1F1B and its kin: a warm-up of forwards, then a forward and a backward in turn, then the backwards that are left.

They differ in the warm-up, in how many microbatches go through a stage of a device before its next stage, and in how
many weight gradients wait. GIS (gis.py) is one of them, too.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind, Task
from optpipe_compiler.published.common import LINEAR, LOOP, NotDefined, Tasks, ordered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe_compiler.model.problem import Problem


# -- GPipe (Huang et al., 2019, arXiv:1811.06965 section 2.3) and its form on a loop, breadth-first pipeline parallelism
# (Lamy-Poirier, 2022, arXiv:2211.05953 section 4): all forwards, then all backwards


@ordered("gpipe", LINEAR)
def gpipe(problem: Problem) -> Tasks:
    """Return the order; peak M microbatches, bubble (P - 1)(F + B).

    The paper recomputes every activation but its boundary: that is gpipe-recompute. It draws the backwards in reverse;
    here the microbatches keep their order, which changes neither bubble nor peak.
    """
    return _all_forwards_first(problem)


@ordered("bfs", LOOP)
def bfs(problem: Problem) -> Tasks:
    """Return the order: each stage takes all microbatches before the next.

    Peak M microbatches, bubble (P - 1)(F + B) / v where M >= P. The microbatches of a backward keep their order.
    """
    return _all_forwards_first(problem)


def _all_forwards_first(problem: Problem) -> Tasks:
    """Return per device its stages' forwards, stage by stage, then their backwards from the last stage to the first."""
    every = len(problem.stages) * problem.microbatches
    return _in_turn(problem, problem.microbatches, [every] * problem.devices)


# -- 1F1B (PipeDream-Flush; Narayanan et al., 2021, arXiv:2006.09503 section 3.2; interleaved: Narayanan et al.,
# Megatron-LM, 2021, arXiv:2104.04473 section 2.2.2)


@ordered("1f1b", LINEAR)
def one_f_one_b(problem: Problem) -> Tasks:
    """Return the order: device d runs P - d - 1 forwards, then alternates; peak min(M, P - d) microbatches."""
    return alternating(problem)


@ordered("interleaved-1f1b", LOOP)
def interleaved_1f1b(problem: Problem) -> Tasks:
    """Return the order: device d runs (v - 1)P + 2(P - d - 1) stage forwards, then alternates.

    Peak (v - 1)P + 2(P - d) - 1 stage activations, bubble (P - 1)(F + B) / v. As in the paper, M is a multiple of P;
    for other M see `gis`, the same groups with a shorter warm-up.
    """
    devices, count = problem.devices, problem.microbatches
    if count % devices:
        raise NotDefined(f"interleaved-1f1b needs a number of microbatches divisible by {devices} devices, not {count}")
    return alternating(problem, devices, per_hop=2)


# -- zero bubble (Qi et al., 2023, arXiv:2401.10241 sections 2.1 and 2.2): weight gradients wait and fill the end


@ordered("zb-h1", LINEAR, splits=True)
def zb_h1(problem: Problem) -> Tasks:
    """Return the order: 1F1B with split backwards, weight gradients put off while at most P microbatches are open.

    Device d warms up with P - d forwards like 1F1B and puts off its first d weight gradients, so that every device
    holds at most P microbatches between their forward and their weight gradient; the ones put off fill the drain.
    """
    return _put_off(alternating(problem), range(problem.devices))


@ordered("zb-h2", LINEAR, splits=True)
def zb_h2(problem: Problem) -> Tasks:
    """Return the order: like ZB-H1, but with enough forwards before the first backward to leave no bubble at all.

    Device d warms up with 2(P - d) - 1 forwards and puts off its first 2d weight gradients: at most 2P - 1 microbatches
    are open anywhere, and with F = I = W no device idles between its first and its last op (M >= 2P - 1).
    """
    return _put_off(alternating(problem, per_hop=2), range(0, 2 * problem.devices, 2))


@ordered("interleaved-zb", LOOP, splits=True)
def interleaved_zb(problem: Problem) -> Tasks:
    """Return ZB-H1 on a loop, as torch's ScheduleInterleavedZeroBubble and the paper's authors have it.

    Device d runs (v - 1)g + P - d - 1 stage forwards, then F and I in turn; d W are put off. Peak vP stage activations
    where M is a multiple of P. A round has g = M / max(1, M // P) microbatches, which must be a whole number (torch's
    relaxation of Megatron's rule).
    """
    rounds = max(1, problem.microbatches // problem.devices)
    if problem.microbatches % rounds:
        raise NotDefined(
            f"interleaved-zb runs {rounds} rounds, which do not divide {problem.microbatches} microbatches"
        )
    return _put_off(alternating(problem, problem.microbatches // rounds), range(problem.devices))


# -- Seq1F1B (Sun et al., 2024, arXiv:2406.03488 section 3) and SlimPipe (Li et al., 2025, arXiv:2504.14519): slices of
# sequences; the paper's Seq1F1B-I and its form of ZB1P do to interleaved 1F1B and to ZB-H1 what Seq1F1B does to 1F1B


@ordered("seq1f1b", LINEAR)
def seq1f1b(problem: Problem) -> Tasks:
    """Return the order: device d runs P - d + n - 2 forwards, then alternates; peak (P + n - 1) / n microbatches."""
    return alternating(problem)


@ordered("seq1f1b-zb", LINEAR, splits=True)
def seq1f1b_zb(problem: Problem) -> Tasks:
    """Return the order: ZB-H1 on slices, its warm-up longer by n - 1 of them; peak (P + n - 1) / n microbatches."""
    return _put_off(alternating(problem), range(problem.devices))


@ordered("seq1f1b-interleaved", LOOP)
def seq1f1b_interleaved(problem: Problem) -> Tasks:
    """Return the order: interleaved 1F1B in groups of P slices, the warm-up longer by n - 1 slices.

    Slices of a microbatch are of one group: n divides P, and P divides the number of slices.
    """
    return _of_slices(problem, "seq1f1b-interleaved", problem.devices)


@ordered("seq1f1b-interleaved-zb", LOOP, splits=True)
def seq1f1b_interleaved_zb(problem: Problem) -> Tasks:
    """Return the order: the interleaved form with split backwards; device d puts its first d weight gradients off."""
    return _put_off(_of_slices(problem, "seq1f1b-interleaved-zb", problem.devices), range(problem.devices))


@ordered("slimpipe", LOOP)
def slimpipe(problem: Problem) -> Tasks:
    """Return the order: interleaved 1F1B in groups of one microbatch; peak 1 + 2 (P - 1) / (n v) microbatches.

    All slices of a microbatch go through a stage of a device before the next one begins, so n is a multiple of P. (The
    paper evens out the work of attention by sending keys and values between devices, which this file format does not
    have: choose slices of equal time instead.)
    """
    if problem.slices % problem.devices:
        raise NotDefined(
            f"slimpipe needs a number of slices divisible by {problem.devices} devices, not {problem.slices}"
        )
    return _of_slices(problem, "slimpipe", problem.slices)


def _of_slices(problem: Problem, name: str, group: int) -> Tasks:
    """Return interleaved 1F1B in groups of so many slices, which are whole microbatches."""
    if group % problem.slices or problem.microbatches % group:
        raise NotDefined(
            f"{name} runs groups of {group} slices, which {problem.slices} slices of each of {problem.whole} "
            "microbatches do not fill"
        )
    return alternating(problem, group, per_hop=2)


# -- what they have in common


def alternating(problem: Problem, group: int = 1, per_hop: int = 1) -> Tasks:
    """Return the order: device d runs (v - 1) g + n - 1 + h (P - d - 1) stage forwards, then F and B in turn.

    `per_hop` is h. The first backward is that of the first microbatch's last slice in the last stage: forwards of n
    slices ascend, and backwards descend. The last group may be smaller than g.
    """
    first = (problem.per_device - 1) * group + problem.slices - 1
    warmups = [first + per_hop * (problem.devices - device - 1) for device in range(problem.devices)]
    return _in_turn(problem, group, warmups)


def _in_turn(problem: Problem, group: int, warmups: list[int]) -> Tasks:
    """Return per device its warm-up of so many forwards, then forward and backward in turn, then the backwards left.

    `group` microbatches go through each of its stages in turn, then the next `group`. Those that a last group lacks are
    left out of the order in the end.
    """
    orders, padded = [], -(-problem.microbatches // group) * group
    for device, warmup in enumerate(warmups):
        mine = problem.stages_of(device)
        forwards = _grouped(Kind.F, mine, padded, group)
        backwards = _grouped(Kind.B, mine[::-1], padded, group)
        steady = [task for pair in zip(forwards[warmup:], backwards, strict=False) for task in pair]
        order = forwards[:warmup] + steady + backwards[len(forwards[warmup:]) :]
        orders.append([_in_units(problem, task) for task in order if task.microbatch < problem.microbatches])
    return orders


def _grouped(kind: Kind, stages: list[int], microbatches: int, group: int) -> list[Task]:
    firsts = range(0, microbatches, group)
    return [Task(kind, s, m) for first in firsts for s in stages for m in range(first, first + group)]


def _in_units(problem: Problem, task: Task) -> Task:
    """Return the task at a position of its stage's forwards or backwards: of slices these descend."""
    return task if task.kind is Kind.F else Task(task.kind, task.stage, problem.back(task.microbatch))


def handed_over_early(problem: Problem, orders: Tasks) -> Tasks:
    """Return orders with every B as I and W in a row, where a split is allowed and costs nothing.

    Nothing else moves: the gradient merely leaves for the next device before the weight gradient is computed, as in the
    generators of the zero-bubble authors, and not after it, as in Megatron.
    """
    is_free = all(s.backward_input + s.backward_weight <= s.backward for s in problem.stages)
    return _put_off(orders, [0] * len(orders)) if problem.freedom.split and is_free else orders


def _put_off(orders: Tasks, numbers: Iterable[int]) -> Tasks:
    """Return orders with split backwards: so many weight gradients of each device wait for later ones, or for the end.

    Each B becomes I, followed by the weight gradient that is so many places behind.
    """
    found: Tasks = []
    for order, number in zip(orders, numbers, strict=True):
        mine: list[Task] = []
        due: deque[Task] = deque()
        for task in order:
            if task.kind is not Kind.B:
                mine.append(task)
                continue
            mine.append(Task(Kind.I, task.stage, task.microbatch))
            due.append(Task(Kind.W, task.stage, task.microbatch))
            if len(due) > number:
                mine.append(due.popleft())
        found.append([*mine, *due])
    return found
