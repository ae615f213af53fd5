"""A complete hint from a schedule, and a schedule's starts from a solution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind, Schedule, Task, value

if TYPE_CHECKING:
    from collections.abc import Callable

    from ortools.sat.python import cp_model

    from optpipe_compiler.solver.variables import Variables


def add_hint(model: cp_model.CpModel, v: Variables, schedule: Schedule, objective: str) -> None:
    """Hint every variable, those of absent tasks included: only complete hints help CP-SAT."""
    hints: dict[int, int] = {v.makespan.index: value(schedule, objective)}
    previous: dict[int, dict[str, int]] = {}
    aways = _aways(schedule, v)
    for s, m in sorted(v.activations, key=lambda one: (one[0], schedule.problem.back(one[1]))):
        numbers = of_activation(schedule, s, m, previous.get(s, {}) | {"away": aways[s, m]})
        previous[s] = numbers
        hints |= {getattr(v.activations[s, m], name).index: number for name, number in numbers.items()}
    for length, start, end in v.lengths:
        hints[length.index] = min(v.horizon, max(0, _evaluate(end, hints) - _evaluate(start, hints)))
    hints |= {share.index: peak for share, peak in zip(v.shares, schedule.host_peaks, strict=False)}
    for index, number in hints.items():
        model.add_hint(model.get_int_var_from_proto_index(index), number)


def _aways(schedule: Schedule, v: Variables) -> dict[tuple[int, int], int]:
    """Return when each offload starts; one that is absent right after its forward and the offload before it."""
    found: dict[tuple[int, int], int] = {}
    for s, m in sorted(v.activations):
        at_least = max(schedule.end(Task(Kind.F, s, m)), found.get((s, m - 1), 0))
        found[s, m] = schedule.starts.get(Task(Kind.D, s, m), at_least)
    return found


def _evaluate(expression: cp_model.LinearExprT, hints: dict[int, int]) -> int:
    from ortools.sat.python import cp_model

    if isinstance(expression, int):
        return expression
    assert isinstance(expression, cp_model.LinearExpr)
    flat = cp_model.FlatIntExpr(expression)
    return flat.offset + sum(c * hints[var.index] for var, c in zip(flat.vars, flat.coeffs, strict=True))


def of_activation(schedule: Schedule, s: int, m: int, before: dict[str, int]) -> dict[str, int]:
    """Return the value of every field of an Activation; absent tasks stand right after their predecessors."""
    starts = schedule.starts
    fused = Task(Kind.B, s, m) in starts
    offload, recompute = Task(Kind.D, s, m) in starts, Task(Kind.R, s, m) in starts
    forward, backward = Task(Kind.F, s, m), Task(Kind.B if fused else Kind.I, s, m)
    forward_end, backward_end = schedule.end(forward), schedule.end(backward)

    def start(kind: Kind, at_least: int, name: str) -> int:
        return starts.get(Task(kind, s, m), max(at_least, before.get(name, 0)))

    stage = schedule.problem.at(s, m)
    away, back = start(Kind.D, forward_end, "away"), start(Kind.H, 0, "back")
    away_alone = stage.offload_alone < stage.offload and offload and schedule.is_alone(Task(Kind.D, s, m))
    back_alone = stage.reload_alone < stage.reload and offload and schedule.is_alone(Task(Kind.H, s, m))
    again = start(Kind.R, forward_end if schedule.problem.slices == 1 else 0, "again")
    return {
        "forward": starts[forward],
        "backward": starts[backward],
        "backward_end": backward_end,
        "split": not fused,
        "weight": start(Kind.W, backward_end, "weight"),
        "release": backward_end if fused else schedule.end(Task(Kind.W, s, m)),
        "keep": not (offload or recompute),
        "offload": offload,
        "recompute": recompute,
        "away": away,
        "away_end": away + (stage.offload_alone if away_alone else stage.offload),
        "away_alone": away_alone,
        "back": back,
        "back_end": back + (stage.reload_alone if back_alone else stage.reload),
        "back_alone": back_alone,
        "again": again,
        "late": back if offload else again if recompute else starts[forward],
    }


def starts_of(v: Variables, read: Callable[[cp_model.LinearExprT], int]) -> dict[Task, int]:
    """Return the start of every task that is present in the solution that `read` gives the values of."""
    return {
        Task(kind, s, m): read(start)
        for (s, m), a in v.activations.items()
        for kind, (start, present) in a.ops().items()
        if present is None or read(present)
    }
