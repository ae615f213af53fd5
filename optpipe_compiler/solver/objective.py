"""What the full model minimises."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from optpipe_compiler.model.problem import Problem
    from optpipe_compiler.solver.variables import Variables


def minimise(model: cp_model.CpModel, problem: Problem, v: Variables, objective: str) -> None:
    """Minimise the makespan, or the longest span of one device (first start to last end on its compute lane)."""
    last = problem.back(problem.microbatches - 1)
    if objective == "makespan":
        model.add(v.activations[0, 0].forward == 0)
        for s in range(len(problem.stages)):
            model.add(v.makespan >= v.activations[s, last].backward_end)
        for a in v.activations.values():
            model.add(v.makespan >= a.release)
    else:
        first = {d: min(problem.stages_of(d)) for d in range(problem.devices) if problem.stages_of(d)}
        for (s, _), a in v.activations.items():
            begin = v.activations[first[problem.stages[s].device], 0].forward
            model.add(v.makespan >= a.release - begin)
    model.minimize(v.makespan)
