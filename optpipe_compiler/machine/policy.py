"""Policies for the list scheduler, and a local search over them.

A policy says in a few numbers what goes first and what becomes of each activation. It starts from a wished order, such
as a published one: the wished starts are the ranks, shifted for each kind of op and each turn of a device. In each of
three parts of a step (fill, middle, drain) each stage keeps, offloads or recomputes the activations of every fourth
microbatch alike. So a policy holds for any number of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_compiler.machine.compiled import compiled, entry, misses, views
from optpipe_compiler.machine.dispatch import DONE, play, work
from optpipe_compiler.machine.state import (
    FARTHEST,
    NEVER,
    OFFLOAD,
    OPS,
    RANDOM,
    RECOMPUTE,
    B,
    I,
    Ints,
    MachineState,
    back,
    below,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_compiler.model.problem import Problem

PARTS = 3
LEAD = 8
"""Times the longest forward and backward by which microbatches go before others at most."""
MOVES = {"shift": 45, "treat": 48, "split": 2, "yields": 3, "before": 3, "lead": 6}
"""How often a search takes each kind of step, in parts of their sum. Where backwards in one piece take 0.93 of their
halves, plans without steps of splits are 0.8 % longer; where memory binds, without steps of yields 0.5 % and without
those of before 0.3 (docs/ABLATION.md)."""
RECOMPUTED_BEFORE = 1
"""How many stages before its backward an activation is recomputed at first. With 2 plans with room for one activation
are 0.1 % shorter in the mean (docs/ABLATION.md)."""
RELOADED_BEFORE = 4
"""How many stages before it one is reloaded at first. With 8 these plans are as long in the mean (docs/ABLATION.md)."""
SORTS = 4
"""Units in a row, at least, that a policy may treat each in its own way (docs/ABLATION.md)."""
TRIES = 4
"""Runs of one policy, each with more room for messages than the one before, until its peaks fit. One is as good in
cases whose messages hold no memory (docs/ABLATION.md)."""


class Policy(NamedTuple):
    """Axes: k forwards, backwards, weight gradients; t turns of a device; p parts of the step; s stages; d devices."""

    shift: Ints
    """[k, t] ticks added to the wished starts."""
    modes: Ints
    """[p, s, sort] what becomes of an activation (schedule.Mode), by unit modulo the number of sorts: `SORTS`, or the
    next multiple of the slices of a microbatch."""
    fused: NDArray[np.bool_]
    """[t] whether backwards are run in one piece."""
    reserve: Ints
    """[d] units left free for messages."""
    yields: NDArray[np.bool_]
    """[sort, t] whether forwards leave room for earlier ones that are still to come (sort 0), and wait for them (1)."""
    before: Ints
    """[way, t] how many stages before its backward an activation is recomputed (way 0) and reloaded (1)."""
    lead: Ints
    """[end, what] how many microbatches at an end of the step (what 0) go before others, and by how many ticks (1): the
    first in their forwards (end 0), the last in their backwards (1)."""


class Setting(NamedTuple):
    """What policies of one instance have in common."""

    wish: Ints
    """[k, s, m] wished starts in ticks."""
    turn: Ints
    """[s] how many stages the owner has before it."""
    able: NDArray[np.bool_]
    """[mode, s] whether the stage may be treated so."""
    numbers: Ints
    """See the indices below."""
    moves: Ints
    """[move] running sums of `MOVES`."""


SCALE, WORK, WHOLE, IS_SPAN, CAN_SPLIT, SLICES = range(6)
"""Ticks of the longest forward and backward; compute ticks of a microbatch on the busiest device; microbatches of the
whole instance, of which a run may have fewer; whether the span is minimised; whether backwards may be split; slices of
a whole microbatch."""


def setting(problem: Problem, wish: Ints, whole: int, *, is_span: bool) -> Setting:
    """Return the setting of `problem`, which may have fewer microbatches than the `whole` instance."""
    able = [problem.able(s) for s in range(len(problem.stages))]
    scale = max(stage.forward + stage.backward for stage in problem.stages)
    numbers = [scale, problem.busiest, whole, is_span, problem.freedom.split, problem.slices]
    return Setting(
        np.ascontiguousarray(wish),
        np.array(problem.turn_of, dtype=np.int64),
        np.array(able).T.copy(),
        np.array(numbers, dtype=np.int64),
        np.cumsum(list(MOVES.values())),
    )


def policy(problem: Problem, modes: Ints) -> Policy:
    """Return the policy that takes a wished order as it is, with `modes` [s] all the time."""
    turns = max(len(problem.stages_of(device)) for device in range(problem.devices))
    sorts = -(-SORTS // problem.slices) * problem.slices
    return Policy(
        shift=np.zeros((3, turns), np.int64),
        modes=np.ascontiguousarray(np.broadcast_to(modes[:, None], (PARTS, len(modes), sorts)), dtype=np.int64),
        fused=np.full(turns, not problem.freedom.split),
        reserve=np.zeros(problem.devices, np.int64),
        yields=np.ones((2, turns), np.bool_),
        before=np.repeat(np.array([[RECOMPUTED_BEFORE], [RELOADED_BEFORE]]), turns, axis=1),
        lead=np.zeros((2, 2), np.int64),
    )


def copied(one: Policy) -> Policy:
    """Return a policy of its own."""
    return Policy._make(part.copy() for part in one)


def value(x: MachineState, by: Policy, given: Setting, cutoff: int) -> int:
    """Run a policy; return about what makespan or span the whole instance has, NEVER if that is beyond `cutoff`.

    Where messages make a device hold more than its budget, the policy's reserve for them grows and it is run again.
    """
    return _search(x, by, by, given, cutoff, 0, 0, 0)[0]


def load(x: MachineState, by: Policy, given: Setting) -> bool:
    """Run a policy once; return whether what runs it had to be compiled, as it was not in the cache."""
    known = misses(_search)
    value(x, copied(by), given, NEVER // 2)
    return misses(_search) > known


def climb(
    x: MachineState, by: Policy, trial: Policy, given: Setting, reached: int, ops: int, seed: int, threshold: int = 0
) -> tuple[int, int]:
    """Change the policy at random for about so many ops; return its value and the ops run.

    Kept is what is no worse than before by more than `threshold` ticks. `trial` is room for another policy.
    """
    return _search(x, by, trial, given, reached, ops, seed, threshold)[1:]


@entry
def _search(
    x: MachineState, by: Policy, trial: Policy, given: Setting, reached: int, ops: int, seed: int, threshold: int
) -> tuple[int, int, int]:
    """Be `value` without `ops`, and `climb` with them: the machine is compiled once for both.

    Returns the last policy's value, that of the last that was kept, and the ops run.
    """
    x, by, trial, given = views(x), views(by), views(trial), views(given)
    x.counts[RANDOM] = seed
    spent = 0
    while True:
        if ops:
            _copy(trial, by)
            while not _change(trial, x, given):  # what changes nothing is not run
                pass
        found = _value(x, trial, given, reached + threshold)
        spent += x.counts[OPS] + x.acts.shape[0] * x.acts.shape[1]
        if found < NEVER:
            reached = found
            if ops:
                _copy(by, trial)
        if spent >= ops:
            return found, reached, spent


@compiled
def _value(x: MachineState, by: Policy, given: Setting, cutoff: int) -> int:
    whole, short = given.numbers[WHOLE], x.acts.shape[1]
    limit = cutoff - (whole - short) * given.numbers[WORK]
    ops = 0
    result = NEVER
    for _ in range(TRIES):
        _guide(x, by, given)
        status, reached, begun = play(x, given.numbers[IS_SPAN] != 0, limit)
        ops += begun
        if status != DONE:
            break
        if not _is_over(x, by):
            result = reached if whole == short else reached + (whole - short) * _period(x)
            break
    x.counts[OPS] = ops
    return result if result <= cutoff else NEVER


@compiled
def _guide(x: MachineState, by: Policy, given: Setting) -> None:
    """Set ranks, modes, splits and reserves. The fill and the drain are as many microbatches as there are devices, or
    slices of them, and those that wait for the last slice of the first."""
    stages, count, sorts = x.acts.shape[0], x.acts.shape[1], by.modes.shape[2]
    end = x.devices.shape[0] + given.numbers[SLICES] - 1
    fill = min(count // 2, end)
    drain = min(count - fill, end)
    for s in range(stages):
        turn = given.turn[s]
        x.stages[s].fused = by.fused[turn]
        x.stages[s].holds = by.yields[0, turn]
        x.stages[s].waits = by.yields[1, turn]
        x.stages[s].recomputed_before = by.before[0, turn]
        x.stages[s].reloaded_before = by.before[1, turn]
        for m in range(count):
            act = x.acts[s, m]
            act.forward = given.wish[0, s, m] + by.shift[0, turn]
            act.backward = given.wish[1, s, m] + by.shift[1, turn]
            act.weight = given.wish[2, s, m] + by.shift[2, turn]
            part = 0 if m < fill else 1 if m < count - drain else 2
            act.mode = by.modes[part, s, m % sorts]
            if m < by.lead[0, 0]:
                act.forward -= by.lead[0, 1]
            if m >= count - by.lead[1, 0]:
                act.backward -= by.lead[1, 1]
    for d in range(x.devices.shape[0]):
        x.devices[d].reserve = by.reserve[d]


@compiled
def _is_over(x: MachineState, by: Policy) -> bool:
    """Whether a device held more than its budget; its reserve then grows by that."""
    is_over = False
    for d in range(x.devices.shape[0]):
        excess = x.devices[d].peak - x.devices[d].budget
        if excess > 0:
            is_over = True
            by.reserve[d] += excess
    return is_over


@compiled
def _period(x: MachineState) -> int:
    """Return the ticks per microbatch in the later half of the middle of the run, on the average of all stages; no less
    than what the busiest device computes."""
    count = x.acts.shape[1]
    first, last = x.units[count // 2].first, x.units[3 * count // 4].first
    passed = busiest = 0
    for d in range(x.devices.shape[0]):
        busiest = max(busiest, work(x, d, first, last))
    for s in range(x.acts.shape[0]):
        kind = B if x.stages[s].fused else I
        passed += x.starts[kind, s, back(x, last)] - x.starts[kind, s, back(x, first)]
    return max(passed // x.acts.shape[0], busiest) // max(1, last - first)


@compiled
def _copy(to: Policy, source: Policy) -> None:
    for index in range(source.shift.size):
        to.shift.flat[index] = source.shift.flat[index]
    for index in range(source.modes.size):
        to.modes.flat[index] = source.modes.flat[index]
    for index in range(source.fused.size):
        to.fused[index] = source.fused[index]
    for index in range(source.reserve.size):
        to.reserve[index] = source.reserve[index]
    for index in range(source.yields.size):
        to.yields.flat[index] = source.yields.flat[index]
    for index in range(source.before.size):
        to.before.flat[index] = source.before.flat[index]
    for index in range(source.lead.size):
        to.lead.flat[index] = source.lead.flat[index]


@compiled
def _change(by: Policy, x: MachineState, given: Setting) -> bool:
    """Take one step at random: ranks, treatment of activations, a split, what forwards leave to earlier ones, how long
    before their backwards activations come back, or which microbatches go before others.

    Returns whether that changes the policy.
    """
    draw = below(x, given.moves[5])
    if draw < given.moves[0]:
        return _shift(by, x, given)
    if draw < given.moves[1] or (draw < given.moves[2] and not given.numbers[CAN_SPLIT]):
        return _treat(by, x, given)
    if draw < given.moves[2]:
        turn = below(x, by.fused.size)
        by.fused[turn] = not by.fused[turn]
    elif draw < given.moves[3]:
        place = below(x, by.yields.size)
        by.yields.flat[place] = not by.yields.flat[place]
    elif draw < given.moves[4]:
        return _ask(by, x, given)
    else:
        return _hurry(by, x, given)
    return True


@compiled
def _shift(by: Policy, x: MachineState, given: Setting) -> bool:
    """Move one kind of op of one turn or of all; return whether it moves."""
    kind, width = below(x, 3), given.numbers[SCALE]
    change: int = -3 * width  # to 3 widths more, of standard deviation `width`
    for _ in range(3):
        change += below(x, 2 * width + 1)
    chosen = below(x, by.shift.shape[1])
    is_whole = below(x, 5) == 0
    for turn in range(by.shift.shape[1]):
        if is_whole or turn == chosen:
            by.shift[kind, turn] += change
    return change != 0


@compiled
def _ask(by: Policy, x: MachineState, given: Setting) -> bool:
    """Ask for what a turn recomputes or reloads sooner or later; return whether there is such a thing, and a change."""
    way, turn, before = below(x, 2), below(x, by.fused.size), below(x, FARTHEST + 1)
    mode, is_there = OFFLOAD if way else RECOMPUTE, False
    for s in range(x.acts.shape[0]):
        if given.turn[s] == turn:
            for p in range(PARTS):
                for sort in range(by.modes.shape[2]):
                    is_there = is_there or by.modes[p, s, sort] == mode
    is_other = is_there and by.before[way, turn] != before
    if is_other:
        by.before[way, turn] = before
    return is_other


@compiled
def _hurry(by: Policy, x: MachineState, given: Setting) -> bool:
    """Let microbatches at an end of the step go before others, one to as many as there are devices, or, one time of
    three, as they come; return whether that is a change."""
    end, count = below(x, 2), 1 + below(x, x.devices.shape[0])
    ticks = below(x, LEAD * given.numbers[SCALE] + 1) if below(x, 3) else 0
    is_other = by.lead[end, 1] != ticks or (ticks != 0 and by.lead[end, 0] != count)
    by.lead[end, 0], by.lead[end, 1] = count, ticks
    return is_other


@compiled
def _treat(by: Policy, x: MachineState, given: Setting) -> bool:
    """Keep, offload or recompute what one, some or all devices compute in a turn, in one part of the step or in all.

    Returns whether anything is treated in another way than before.
    """
    mode, sorts = below(x, RECOMPUTE + 1), by.modes.shape[2]
    least = below(x, sorts + 1)
    most = least
    if least == sorts:
        least, most = 0, sorts - 1
    elif below(x, 2):
        most += below(x, sorts - least)
    part = below(x, PARTS + 1)
    turn = below(x, by.fused.size)
    is_other = False
    low, high, width = 0, x.devices.shape[0] - 1, below(x, 3)
    if width:
        low = below(x, x.devices.shape[0])
        high = low if width == 1 else low + below(x, x.devices.shape[0] - low)
    for s in range(x.acts.shape[0]):
        if given.turn[s] == turn and low <= x.stages[s].device <= high and given.able[mode, s]:
            for p in range(PARTS):
                for sort in range(least, most + 1):
                    if part in (p, PARTS):
                        is_other = is_other or by.modes[p, s, sort] != mode
                        by.modes[p, s, sort] = mode
    return is_other
