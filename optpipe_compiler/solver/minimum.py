"""One microbatch after the other: in the smallest memory that any schedule needs, or in the least time that fits."""

from __future__ import annotations

from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import accumulate, compress, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe_compiler.errors import MissingDependency
from optpipe_compiler.model.problem import BETWEEN, DURATIONS, SIZES, Problem, Stage, coarsen
from optpipe_compiler.model.schedule import Kind, Schedule, Task, duration
from optpipe_compiler.solver.here import solver_here

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ortools.sat.python.cp_model import CpSolver


UNLIMITED = 1 << 60
EFFORT = 30
"""Deterministic time for what is solved for."""
_KINDS = (None, Kind.H, Kind.R)
"""What brings an activation back, by what becomes of it (`Problem.able`)."""
MOST_CHOICES = 1000
"""Choices of what becomes of the first activations of a device that are looked at further."""


def one_at_a_time(problem: Problem, fixed: tuple[int, ...]) -> Schedule:
    """Return a schedule that runs one microbatch after the other in the least memory any schedule can do with.

    `fixed` are the static units of each device; the largest total over devices is minimised. Of any schedule, the ops
    of microbatch 0 alone are a schedule of the instance with M = 1 that needs no more memory, and repeating the best
    one M times needs no more than once: so the instance with M = 1 decides. It is solved exactly; only the order of its
    ops matters, so all durations are 1.
    """
    single = replace(problem, microbatches=1)
    starts = _in_least(single, range(len(single.stages)), fixed)
    if not _fits_hosts(single, starts):
        starts = _in_least(single, _offloads_that_fit(single, fixed), fixed)
        if not _fits_hosts(single, starts):  # one of the devices was solved for
            starts = _solve(single, fixed)
    return repeated(problem, _serial(single, starts))


def quickly_one_at_a_time(problem: Problem) -> Schedule | None:
    """Return a schedule of one microbatch within the budgets that takes the least time to bring back what left; None
    where this finds none.

    Devices are looked at alone: what their neighbours have on its way is not counted.
    """
    single = replace(problem, microbatches=1)
    orders = []
    for device in range(problem.devices):
        kinds = _quickest(single, device)
        order = None if kinds is None else lean_order(_alone(single, device), kinds)
        if order is None:
            return None
        orders.append(order)
    starts = _merged(single, orders)
    return _serial(single, starts) if _fits_hosts(single, starts) else None


def repeated(problem: Problem, once: Schedule) -> Schedule:
    """Return a schedule of one microbatch for all of them, one after the other."""
    period = max(map(once.end, once.starts))
    starts = {
        Task(task.kind, task.stage, m): start + m * period
        for m in range(problem.microbatches)
        for task, start in once.starts.items()
    }
    return Schedule(problem, once.method, starts)


def _fits_hosts(single: Problem, starts: dict[Task, int]) -> bool:
    return single.fits_hosts(Schedule(_unit_times(single), "", starts).host_peaks)


def _in_least(single: Problem, may_leave: Collection[int], fixed: tuple[int, ...]) -> dict[Task, int]:
    """Order every device alone, of whose stages those in `may_leave` may be offloaded, in its least memory."""
    orders = []
    for device in range(single.devices):
        alone, mine = _alone(single, device), single.stages_of(device)
        kinds = [_least_left(alone, place, may_leave=s in may_leave)[1] for place, s in enumerate(mine)]
        found = lean_order(alone, kinds)
        if found is None:
            starts = _solve(alone, (fixed[device],))
            found = list(Schedule(alone, "", starts).sequence)
        orders.append(found)
    return _merged(single, orders)


def _alone(single: Problem, device: int) -> Problem:
    """Return what one device does."""
    return replace(
        single,
        devices=1,
        stages=tuple(replace(single.stages[s], device=0) for s in single.stages_of(device)),
        link_of=(single.link_of[device],),
        budget=(single.budget[device],),
        host_budget=None,
        hosts=(),
    )


def _merged(single: Problem, orders: list[list[Task]]) -> dict[Task, int]:
    """Put together the orders of all devices, each of which numbers its own stages.

    With one microbatch, forwards and backwards have one order over all devices, which every device's own order agrees
    with; what else a device does (weight gradients, transfers, recomputes) concerns no other one.
    """
    lanes = [
        [Task(task.kind, single.stages_of(device)[task.stage], 0) for task in order]
        for device, order in enumerate(orders)
    ]
    before = {task: set[Task]() for lane in lanes for task in lane}
    chain = [task for task in before if task.kind in (Kind.F, Kind.I, Kind.B)]
    chain.sort(key=lambda task: (task.kind is not Kind.F, task.stage if task.kind is Kind.F else -task.stage))
    for lane in (*lanes, chain):
        for earlier, later in pairwise(lane):
            before[later].add(earlier)
    return {task: index for index, task in enumerate(TopologicalSorter(before).static_order())}


def lean_order(alone: Problem, kinds: Sequence[Kind | None]) -> list[Task] | None:
    """Return the order of one microbatch on one device that needs the least memory; None where this finds no proof.

    `kinds` says of each stage what brings its activation back: a reload (H), a recomputation (R), or nothing if it is
    kept. For the least of all memory they are those of `_least_left`.

    Let A_s be the sum, over the stages before s, of the least that an activation can leave behind its forward: kept,
    offloaded or recomputed. While an op of stage s runs, the device holds A_s at least, as the stages before have their
    backward later. So with x the units that an op needs besides activations, no order needs less than the largest of
    A_s + saved + x_F and min(A_s + saved + x_B, max(A_s + saved + captured + x_I, residue + x_W)); a recompute needs
    what its forward did. These treatments reach that, with backwards in one piece where these fit, and weight gradients
    as soon as they fit, unless what waits for its weight gradient leaves too little to another op.
    """
    stages = alone.stages
    below = list(accumulate((_left(stage, kind) for stage, kind in zip(stages, kinds, strict=True)), initial=0))
    needs = [_needs(stage, can_split=alone.freedom.split) for stage in stages]
    cap = max(
        max(held + need.forward, min(held + need.fused, max(held + need.halves, need.weight)))
        for need, held in zip(needs, below, strict=False)
    )
    order: list[Task] = []
    for s, kind in enumerate(kinds):
        order.append(Task(Kind.F, s, 0))
        if kind is Kind.H:
            order.append(Task(Kind.D, s, 0))
    waiting: list[int] = []
    for s, kind in reversed(list(enumerate(kinds))):
        need, room = needs[s], cap - below[s] - sum(stages[w].residue for w in waiting)
        is_fused = need.fused <= room
        if min(need.fused, need.halves) > room or (kind is Kind.R and need.forward > room):
            return None
        order += [] if kind is None else [Task(kind, s, 0)]
        order.append(Task(Kind.B if is_fused else Kind.I, s, 0))
        waiting += [] if is_fused else [s]
        for w in list(waiting):
            others = sum(stages[other].residue for other in waiting if other != w)
            if below[s] + others + needs[w].weight <= cap:
                order.append(Task(Kind.W, w, 0))
                waiting.remove(w)
    return None if waiting else order


def _least_left(problem: Problem, s: int, *, may_leave: bool) -> tuple[int, Kind | None]:
    """Return the least units that an activation can leave behind its forward, and what brings it back."""
    every = [(_left(problem.stages[s], kind), kind) for kind in _KINDS]
    keeps, leaves, drops = problem.able(s)
    return min(compress(every, (keeps, leaves and may_leave, drops)), key=itemgetter(0))


def _left(stage: Stage, kind: Kind | None) -> int:
    """Return the units that an activation leaves behind its forward."""
    return stage.staying if kind is Kind.H else stage.checkpoint if kind is Kind.R else stage.saved


def _quickest(single: Problem, device: int) -> list[Kind | None] | None:
    """Return what brings back the activations of a device's stages, in their order, so that each op has room beside
    what the stages before have left, weight gradients right behind their input gradients, in the least ticks; None
    where it never has.

    Of choices for the first stages those stay that hold less than all quicker ones, `MOST_CHOICES` of them.
    """
    budget, found = single.budget[device], [(0, 0, list[Kind | None]())]
    for s in single.stages_of(device):
        stage, need = single.stages[s], _needs(single.stages[s], can_split=single.freedom.split)
        most = max(need.forward, min(need.fused, max(need.halves, need.weight)))
        ticks_of = {None: 0, Kind.H: stage.offload_alone + stage.reload_alone, Kind.R: stage.recompute}
        longer = [
            (ticks + ticks_of[kind], held + _left(stage, kind), [*kinds, kind])
            for ticks, held, kinds in found
            if held + most <= budget
            for kind in compress(_KINDS, single.able(s))
        ]
        longer.sort(key=itemgetter(0, 1))
        least = list(accumulate((held for _, held, _ in longer), min, initial=UNLIMITED))
        fewer = [one for one, before in zip(longer, least, strict=False) if one[1] < before]
        found = fewer[: MOST_CHOICES - 1] + fewer[MOST_CHOICES - 1 :][-1:]
    return found[0][2] if found else None


class _Needs(NamedTuple):
    """Units that ops of a stage need besides what the stages before have left; `weight` needs no more than that."""

    forward: int
    fused: int
    halves: int
    weight: int


def is_leaner_in_halves(problem: Problem, s: int) -> bool:
    """Whether the backwards of a stage need less as input gradients and weight gradients right behind them."""
    needs = [_needs(stages[s], can_split=problem.freedom.split) for stages in problem.by_class]
    return max(max(need.halves, need.weight) for need in needs) < max(need.fused for need in needs)


def _needs(stage: Stage, *, can_split: bool) -> _Needs:
    return _Needs(
        stage.saved + stage.forward_extra,
        stage.saved + stage.backward_extra,
        stage.saved + stage.captured + stage.backward_input_extra if can_split else UNLIMITED,
        stage.residue + stage.backward_weight_extra,
    )


def _offloads_that_fit(single: Problem, fixed: tuple[int, ...]) -> set[int]:
    """Return the stages to offload, within host memory, for which `lean_order` needs the least on the fullest device.

    All forwards come before all backwards, so what is offloaded is on the hosts at one time.
    """
    cp_model = _cp_model()
    (coarse, offset), model = _in_units(single, fixed), cp_model.CpModel()
    leaves = [model.new_bool_var(f"leaves_{s}") for s in range(len(coarse.stages))]
    in_halves = [model.new_bool_var(f"in_halves_{s}") for s in range(len(coarse.stages))]
    most = sum(abs(getattr(stage, name)) for stage in coarse.stages for name in SIZES) + max(offset, default=0)
    cap = model.new_int_var(0, most, "cap")
    for device in range(coarse.devices):
        room, held = cap - offset[device], list[Any]()
        for s in coarse.stages_of(device):
            need, below = _needs(coarse.stages[s], can_split=coarse.freedom.split), sum(held)
            model.add(below + need.forward <= room)
            model.add(below + need.fused <= room).only_enforce_if(~in_halves[s])
            if coarse.freedom.split:
                model.add(below + need.halves <= room).only_enforce_if(in_halves[s])
                model.add(need.weight <= room).only_enforce_if(in_halves[s])
            else:
                model.add(in_halves[s] == 0)
            stays, leaving = (_least_left(coarse, s, may_leave=may_leave)[0] for may_leave in (False, True))
            held.append(stays - (stays - leaving) * leaves[s])
    for devices, limit in coarse.host_limits:
        here = [s for s, stage in enumerate(coarse.stages) if stage.device in devices]
        model.add(sum(coarse.stages[s].moved * leaves[s] for s in here) <= limit)
    model.minimize(cap)
    solver = _solved(model)
    return {s for s, leaves_it in enumerate(leaves) if solver.value(leaves_it)}


def _unit_times(problem: Problem) -> Problem:
    """Return the problem with ops of one tick, and messages and what copies take from compute of none."""
    times = {name: 1 for name in DURATIONS} | {name: 0 for name in BETWEEN}
    return replace(problem, stages=tuple(replace(stage, **times) for stage in problem.stages))


def _in_units(problem: Problem, fixed: tuple[int, ...]) -> tuple[Problem, list[int]]:
    """Return the problem with ops of one tick, and what each device always holds beyond another one, in its units.

    In bytes where that is no multiple of larger units: rounded, devices that hold different amounts would look alike.
    """
    exact = _unit_times(problem)
    coarse, least = coarsen(exact), min(fixed)
    if any((size - least) % coarse.unit_bytes for size in fixed):
        coarse = exact
    return coarse, [(size - least) // coarse.unit_bytes for size in fixed]


def _serial(problem: Problem, starts: dict[Task, int]) -> Schedule:
    """Run the ops one after the other, in the order of `starts`; frees before allocations at one moment."""
    order = Schedule(problem, "", starts).sequence
    timed: dict[Task, int] = {}
    clock = 0
    for task in sorted(order, key=lambda task: (starts[task], task.kind is not Kind.D)):
        stage, is_offloaded = problem.stages[task.stage], task._replace(kind=Kind.D) in starts
        clock += stage.reload_busy if is_offloaded and task.kind in (Kind.I, Kind.B) else 0
        timed[task] = clock
        lag = 0
        if task.kind is Kind.F:
            lag = stage.send_activation + (stage.offload_busy if is_offloaded else 0)
        elif task.kind in (Kind.I, Kind.B):
            lag = stage.send_gradient
        clock += max(1, duration(problem, task)) + lag  # ops of no length must not run at one moment
    return Schedule(problem, "one-at-a-time", timed)


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingDependency("compile needs ortools: pip install ortools") from error
    return cp_model


def _solved(model: Any) -> CpSolver:
    cp_model, solver = _cp_model(), solver_here(EFFORT)
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    return solver


def _solve(single: Problem, fixed: tuple[int, ...]) -> dict[Task, int]:
    cp_model = _cp_model()
    from optpipe_compiler.solver import constraints, hint, variables

    (problem, offset), model = _in_units(single, fixed), cp_model.CpModel()
    horizon = 7 * len(problem.stages)
    v = variables.create(model, problem, horizon)
    total = sum(max(0, getattr(stage, name)) for stage in problem.stages for name in SIZES)
    cap = model.new_int_var(0, total + max(offset, default=0), "cap")
    constraints.add_all(model, problem, v, budgets=[cap - size for size in offset])
    model.minimize(cap)
    return hint.starts_of(v, _solved(model).value)
