"""CP-SAT in the process that compiles, for what takes a moment; the search has processes of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver


def solver_here(effort: float) -> CpSolver:
    """Return a solver of one thread with so much deterministic time, which leaves Ctrl-C as it is.

    Left alone it takes SIGINT over and then leaves the system's default: the next Ctrl-C would end the process.
    It looks for no symmetries: with two that are none, ortools 9.15 ended the process (a failed check, or SIGSEGV).
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    solver.parameters.catch_sigint_signal = False
    solver.parameters.symmetry_level = 0
    return solver
