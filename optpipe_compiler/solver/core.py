"""The cyclic core: one microbatch's ops, repeated every `period` ticks, that fit a device's lanes and memory at once.

Modulo scheduling (Lam, 1988; for pipelines Qi et al., arXiv:2405.15362 section 3). Start t of an op is split into
t = period x turn + phase; lanes and memory are then laws about phases alone, so the model's size does not depend on the
number of microbatches. An activation that is resident for `length` = period x whole + rest occupies memory `whole`
times all through the period, and once more for `rest` ticks from its phase on. The shortest latency is sought, which
makes fill and drain short. Transfers are taken to be as slow as in both directions at once, which they mostly are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optpipe_compiler.schedule import Kind, Schedule, Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from ortools.sat.python import cp_model

    from optpipe_compiler.problem import Problem

    Var = cp_model.IntVar
    Expr = cp_model.LinearExpr


@dataclass
class _Memory:
    """One device's residencies: intervals over two periods, and what fills whole periods."""

    intervals: list[cp_model.IntervalVar] = field(default_factory=list)
    demands: list[int] = field(default_factory=list)
    constant: list[Expr] = field(default_factory=list)


class Model:
    """The core's model for one period."""

    def __init__(self, model: cp_model.CpModel, problem: Problem, period: int) -> None:
        self.model = model
        self.problem = problem
        self.period = period
        self.horizon = 3 * sum(s.forward + s.backward + s.send_activation + s.send_gradient for s in problem.stages)
        self.lanes: dict[tuple[str, int | None], list[cp_model.IntervalVar]] = {}
        self.memory = [_Memory() for _ in range(problem.devices)]
        self.start: dict[tuple[Kind, int], Var] = {}
        self.offload: list[Var] = []
        self.recompute: list[Var] = []
        for s in range(len(problem.stages)):
            self._stage(s)
        self._data()
        self._capacities()
        model.add(self.start[Kind.F, 0] < period)
        latency = model.new_int_var(0, self.horizon, "latency")
        for s, stage in enumerate(problem.stages):
            model.add(latency >= self.start[Kind.W, s] + stage.backward_weight)
        model.minimize(latency)

    def _op(self, kind: Kind, s: int, length: int, lane: tuple[str, int | None], present: Var | None) -> None:
        name = f"{kind.name}_{s}"
        start = self.model.new_int_var(0, self.horizon, name)
        phase = self._phase(start, name)
        self.start[kind, s] = start
        for copy in (0, self.period) if length else ():
            at = phase + copy
            if present is None:
                interval = self.model.new_fixed_size_interval_var(at, length, name)
            else:
                interval = self.model.new_optional_fixed_size_interval_var(at, length, present, name)
            self.lanes.setdefault(lane, []).append(interval)

    def _phase(self, time: Expr, name: str) -> Var:
        turn = self.model.new_int_var(0, self.horizon // self.period + 1, f"{name}_turn")
        phase = self.model.new_int_var(0, self.period - 1, f"{name}_phase")
        self.model.add(time == self.period * turn + phase)
        return phase

    def _stage(self, s: int) -> None:
        problem, stage = self.problem, self.problem.stages[s]
        compute, link = ("compute", stage.device), problem.link_of[stage.device]
        self.offload.append(self._choice(problem.can_offload(s)))
        self.recompute.append(self._choice(problem.can_recompute(s)))
        offload, recompute = self.offload[s], self.recompute[s]
        self.model.add_at_most_one(offload, recompute)
        self._op(Kind.F, s, stage.forward, compute, None)
        self._op(Kind.I, s, stage.backward_input, compute, None)
        self._op(Kind.W, s, stage.backward_weight, compute, None)
        self._op(Kind.R, s, stage.recompute, compute, recompute)
        self._op(Kind.D, s, stage.offload, ("d2h", link), offload)
        self._op(Kind.H, s, stage.reload, ("h2d", link), offload)
        self._residencies(s)

    def _choice(self, possible: bool) -> Var:
        return self.model.new_bool_var("") if possible else self.model.new_constant(0)

    def _residencies(self, s: int) -> None:
        stage, at = self.problem.stages[s], {kind: self.start[kind, s] for kind in Kind if kind is not Kind.B}
        offload, recompute = self.offload[s], self.recompute[s]
        late = self.model.new_int_var(0, self.horizon, f"late_{s}")
        self.model.add(late == at[Kind.F]).only_enforce_if(~offload, ~recompute)
        self.model.add(late == at[Kind.H]).only_enforce_if(offload)
        self.model.add(late == at[Kind.R]).only_enforce_if(recompute)
        forward_end = at[Kind.F] + stage.forward
        backward_end, weight_end = at[Kind.I] + stage.backward_input, at[Kind.W] + stage.backward_weight
        both = min(stage.saved, stage.residue)
        growth = stage.residue - both
        self._hold(s, late, weight_end, both, None)
        self._hold(s, late, backward_end, stage.saved - both, None)
        self._hold(s, at[Kind.I], weight_end, growth, None)
        self._hold(s, at[Kind.F], at[Kind.D] + stage.offload, stage.saved, offload)
        self._hold(s, at[Kind.F], forward_end, stage.saved, recompute)
        self._hold(s, forward_end, at[Kind.R], stage.checkpoint, recompute)
        self._hold(s, at[Kind.F], forward_end, stage.forward_extra, None)
        self._hold(s, at[Kind.I], backward_end, stage.backward_input_extra + stage.captured - growth, None)
        self._hold(s, at[Kind.W], weight_end, stage.backward_weight_extra, None)
        self._hold(s, at[Kind.R], at[Kind.R] + stage.recompute, stage.forward_extra, recompute)

    def _hold(self, s: int, begin: Expr, end: Expr, demand: int, present: Var | None) -> None:
        """Occupy `demand` units over [begin, end) of every microbatch."""
        if demand <= 0:
            return
        model, memory = self.model, self.memory[self.problem.stages[s].device]
        name = f"held_{s}_{len(memory.demands)}"
        length = model.new_int_var(0, self.horizon, f"{name}_length")
        whole = model.new_int_var(0, self.horizon // self.period + 1, f"{name}_whole")
        rest = model.new_int_var(0, self.period - 1, f"{name}_rest")
        model.add(length == self.period * whole + rest)
        span = model.add(length == end - begin)
        if present is not None:
            span.only_enforce_if(present)
            model.add(length == 0).only_enforce_if(~present)
        phase = self._phase(begin, name)
        memory.constant.append(demand * whole)
        for copy in (0, self.period):
            over = model.new_int_var(0, 3 * self.period, f"{name}_end")
            interval = (
                model.new_interval_var(phase + copy, rest, over, name)
                if present is None
                else model.new_optional_interval_var(phase + copy, rest, over, present, name)
            )
            memory.intervals.append(interval)
            memory.demands.append(demand)

    def _data(self) -> None:
        model, at = self.model, self.start
        for s, stage in enumerate(self.problem.stages):
            if s:
                before = self.problem.stages[s - 1]
                model.add(at[Kind.F, s] >= at[Kind.F, s - 1] + before.forward + before.send_activation)
                model.add(at[Kind.I, s - 1] >= at[Kind.I, s] + stage.backward_input + stage.send_gradient)
            forward_end = at[Kind.F, s] + stage.forward
            model.add(at[Kind.I, s] >= forward_end)
            model.add(at[Kind.W, s] >= at[Kind.I, s] + stage.backward_input)
            model.add(at[Kind.D, s] >= forward_end)
            model.add(at[Kind.R, s] >= forward_end)
            model.add(at[Kind.H, s] >= at[Kind.D, s] + stage.offload)
            model.add(at[Kind.I, s] >= at[Kind.H, s] + stage.reload).only_enforce_if(self.offload[s])
            model.add(at[Kind.I, s] >= at[Kind.R, s] + stage.recompute).only_enforce_if(self.recompute[s])

    def _capacities(self) -> None:
        for lane in self.lanes.values():
            self.model.add_no_overlap(lane)
        for memory, budget in zip(self.memory, self.problem.budget, strict=True):
            if memory.intervals:
                room = self.model.new_int_var(0, budget, "room")
                self.model.add(room + sum(memory.constant) <= budget)
                self.model.add_cumulative(memory.intervals, memory.demands, room)

    def starts(self, read: Callable[[cp_model.LinearExprT], int]) -> dict[Task, int]:
        """Return the starts of microbatch 0; the others follow at multiples of the period."""
        return {
            Task(kind, s, 0): read(start)
            for (kind, s), start in self.start.items()
            if (kind not in (Kind.D, Kind.H) or read(self.offload[s]))
            and (kind is not Kind.R or read(self.recompute[s]))
        }


def unroll(problem: Problem, pattern: dict[Task, int], period: int) -> Schedule:
    """Return the schedule that repeats `pattern` for every microbatch."""
    starts = {
        Task(task.kind, task.stage, m): start + m * period
        for m in range(problem.microbatches)
        for task, start in pattern.items()
    }
    return Schedule(problem, "cyclic-core", starts)
