"""The solver's process: answers each Request with Events.

A process of its own, because some presolve steps of CP-SAT cannot be interrupted and its memory limit is not enforced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from ortools.sat.python import cp_model

    from optpipe_compiler.model.schedule import Schedule, Task
    from optpipe_compiler.solver.window import Window


@dataclass(frozen=True)
class Limits:
    """How long and how to search."""

    objective: str
    time_limit_s: float
    seed: int
    workers: int
    reproducible: bool

    @property
    def is_span(self) -> bool:
        """Whether the span is minimised, not the makespan."""
        return self.objective == "span"

    @property
    def threads(self) -> int:
        """How many threads may search: one per core that this process may use, if not said otherwise."""
        return self.workers or _cores()


@dataclass(frozen=True)
class Request:
    """One search: a schedule of a coarse problem as hint and upper bound, and the limits.

    With a `window` only that stretch of the hint is searched, else the whole schedule.
    """

    hint: Schedule
    limits: Limits
    window: Window | None = None


@dataclass(frozen=True)
class SearchEvent:
    """What the search reports: better starts, a better bound (ticks), its end by a status name; nothing: it goes on."""

    starts: dict[Task, int] | None = None
    bound: int | None = None
    status: str | None = None
    spent: float = 0.0
    """Deterministic time of the search."""


DETERMINISTIC_PER_S = 0.25
"""CP-SAT deterministic time units granted per second of time limit in reproducible mode (one worker does 0.3 to 1)."""


def build(request: Request) -> tuple[cp_model.CpModel, Callable[[Callable[..., int]], dict[Task, int]]]:
    """Build the model with its hint; also return what makes starts of a solution's values."""
    from ortools.sat.python import cp_model

    from optpipe_compiler.solver import constraints, hint, variables, window

    model, known, objective = cp_model.CpModel(), request.hint, request.limits.objective
    if request.window is not None:
        return model, window.WindowModel(model, known, request.window, objective).starts
    horizon = max(map(known.end, known.starts))
    if request.limits.is_span:  # a shorter span may need a longer makespan
        horizon *= 2
    v = variables.create(model, known.problem, horizon)
    constraints.add_all(model, known.problem, v)
    constraints.minimise(model, known.problem, v, objective)
    hint.add_hint(model, v, known, objective)
    return model, lambda read: hint.starts_of(v, read)


def configure(solver: cp_model.CpSolver, request: Request) -> None:
    """Set the search's parameters."""
    p, limits = solver.parameters, request.limits
    p.random_seed = limits.seed % 2**31  # of 32 bits, with a sign
    p.num_workers = 1 if limits.reproducible else limits.workers
    p.ignore_subsolvers.append("variables_shaving")  # cannot be interrupted in 9.15
    p.catch_sigint_signal = False
    if limits.reproducible:
        p.max_deterministic_time = limits.time_limit_s * DETERMINISTIC_PER_S
    else:
        p.max_time_in_seconds = limits.time_limit_s


def solve(request: Request, send: Callable[[SearchEvent], None]) -> None:
    """Run the search and send a SearchEvent for every improvement."""
    from ortools.sat.python import cp_model

    model, read_starts = build(request)
    solver = cp_model.CpSolver()
    configure(solver, request)

    class Improved(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            send(SearchEvent(starts=read_starts(self.value)))

    solver.best_bound_callback = lambda bound: send(SearchEvent(bound=round(bound)))
    status = solver.solve(model, Improved())
    name = solver.status_name(status)
    bound = round(solver.best_objective_bound) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    send(SearchEvent(bound=bound, status=name, spent=solver.response_proto.deterministic_time))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def serve(line: Connection) -> None:
    """Answer requests until the parent hangs up."""
    while True:
        try:
            request = line.recv()
        except EOFError:
            return
        solve(request, line.send)
