"""Planned schedules to test with: the plainest one, dispatched ones, and proven optima of tiny instances."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import reject
from ortools.sat.python import cp_model

from optpipe_compiler.machine.orders import peaks, retime
from optpipe_compiler.model.problem import DURATIONS
from optpipe_compiler.model.schedule import Kind, Mode, Schedule, Task, duration, value
from optpipe_compiler.solver import constraints, hint, variables
from optpipe_compiler.solver.worker import Limits, Request, build, configure
from tests.given_order import lane_orders, predecessors
from tests.machines import dispatched

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.model.problem import Problem
    from optpipe_compiler.solver.variables import Activation

    Force = Callable[[dict[tuple[int, int], Activation]], list[cp_model.BoundedLinearExpression]]
    """The decisions that a test takes, as constraints over the activations."""


def keep(stage: int, microbatch: int) -> Mode:
    """Keep every activation."""
    return Mode.KEEP


def serial(problem: Problem, *, split: bool, mode: Callable[[int, int], Mode] = keep) -> Schedule:
    """One op at a time, one microbatch after the other, ignoring the caps; ops of no length stand apart, too."""
    stages = range(len(problem.stages))
    starts: dict[Task, int] = {}
    clock = 0

    def run(kind: Kind, stage: int, microbatch: int, lag: int = 0) -> None:
        nonlocal clock
        task = Task(kind, stage, microbatch)
        starts[task] = clock
        clock += max(1, duration(problem, task)) + lag

    for m in range(problem.microbatches):
        for s in stages:
            run(Kind.F, s, m, problem.stages[s].send_activation)
            if mode(s, m) is Mode.OFFLOAD:
                run(Kind.D, s, m)
        for s in reversed(stages):
            if mode(s, m) is Mode.OFFLOAD:
                run(Kind.H, s, m)
            if mode(s, m) is Mode.RECOMPUTE:
                run(Kind.R, s, m)
            run(Kind.I if split else Kind.B, s, m, problem.stages[s].send_gradient)
            if split:
                run(Kind.W, s, m)
    return Schedule(problem, "serial", starts)


def check(timed: Schedule) -> None:
    """No two ops of a lane overlap, none starts before what it needs, and no device holds more than it may."""
    for lane in (*timed.compute_lanes, *lane_orders(timed).d2h, *lane_orders(timed).h2d):
        for before, after in pairwise(lane):
            assert timed.end(before) <= timed.starts[after]
    assert timed.has_copied
    for lane in timed.compute_lanes:
        for before, after in pairwise(lane):
            assert timed.end(before) + copied(timed, before)[1] + copied(timed, after)[0] <= timed.starts[after]
    for task, start in timed.starts.items():
        for before, lag in predecessors(timed.problem, task, timed.starts):
            assert timed.end(before) + lag <= start
    assert all(peak <= budget for peak, budget in zip(peaks(timed), timed.problem.budget, strict=True))
    assert timed.problem.fits_hosts(timed.host_peaks)


def copied(timed: Schedule, task: Task) -> tuple[int, int]:
    """What copies take from compute before and behind a task."""
    stage = timed.problem.at(task.stage, task.microbatch)
    if Task(Kind.D, task.stage, task.microbatch) not in timed.starts:
        return 0, 0
    before = stage.reload_busy if task.kind in (Kind.I, Kind.B) else 0
    return before, stage.offload_busy if task.kind is Kind.F else 0


def start(problem: Problem, objective: str = "makespan") -> Schedule:
    """The best dispatched schedule that follows its own plan."""
    return min((retime(timed, problem) for timed in dispatched(problem)), key=lambda timed: value(timed, objective))


def optimum(problem: Problem, kind: str = "makespan", begin: Schedule | None = None) -> int:
    """The proven optimum in ticks as `compile` searches it, from a hint; fails if it is not proven at once."""
    request = Request(begin or start(problem, kind), Limits(kind, 100, seed=0, workers=1, reproducible=True))
    model, _ = build(request)
    solver = cp_model.CpSolver()
    configure(solver, request)
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, solver.status_name(status)
    return round(solver.objective_value)


def log_of(request: Request) -> str:
    """What CP-SAT says of itself while it searches."""
    model, _ = build(request)
    solver, lines = cp_model.CpSolver(), list[str]()
    configure(solver, request)
    solver.parameters.log_search_progress, solver.parameters.log_to_stdout = True, False
    solver.log_callback = lines.append
    solver.solve(model)
    return "\n".join(lines)


def best(
    problem: Problem, force: Force = lambda activations: [], kind: str = "makespan"
) -> tuple[int, Schedule] | None:
    """The least value over all schedules that take the forced decisions, and one that has it; None: there is none.

    No hint, and a horizon in which everything can be done one after the other. An instance that takes too long to prove
    is none for a property test.
    """
    model, v = _model(problem, kind, _horizon(problem))
    for constraint in force(v.activations):
        model.add(constraint)
    solver, status = _solved(model)
    if status == cp_model.FEASIBLE:
        reject()
    if status == cp_model.INFEASIBLE:
        return None
    return round(solver.objective_value), Schedule(problem, "exact", hint.starts_of(v, solver.value))


def is_reached(problem: Problem, ticks: int, kind: str = "makespan") -> bool:
    """Whether any schedule takes at most so long: quicker to tell than how long the best takes."""
    model, v = _model(problem, kind, ticks if kind == "makespan" else _horizon(problem))
    model.add(v.makespan <= ticks)
    model.clear_objective()
    return _solved(model)[1] != cp_model.INFEASIBLE


def _model(problem: Problem, kind: str, horizon: int) -> tuple[cp_model.CpModel, variables.Variables]:
    model = cp_model.CpModel()
    v = variables.create(model, problem, horizon)
    constraints.add_all(model, problem, v)
    constraints.minimise(model, problem, v, kind)
    return model, v


def _solved(model: cp_model.CpModel) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 0.5
    status = solver.solve(model)
    if status == cp_model.UNKNOWN:
        reject()
    return solver, status


def _horizon(problem: Problem) -> int:
    return problem.microbatches * sum(getattr(stage, name) for stage in problem.stages for name in DURATIONS)
