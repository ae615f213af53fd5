"""Improve a stretch of a schedule while the rest keeps its shape.

Ops that run in the window [begin, end) are free. Ops before it stay. Ops after it all move earlier by the same amount,
and that amount is maximised; in a window that reaches the end of the schedule the makespan is minimised instead. Where
the objective is the span, that is minimised in every window: for each device, its last end, less that amount where it
is after the window, minus its first start. The model has only the microbatches that have an op in the window, so its
size does not grow with their number.

Why the rest stays feasible: every free op completes at the latest where the window ended, or where it completed before
if that was later, less the amount. So at any time after the window the state of every lane and of the memory is that
of the old schedule, moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind, Schedule, Task, duration
from optpipe_compiler.solver import constraints, hint
from optpipe_compiler.solver.variables import Activation, Variables, create_activation

if TYPE_CHECKING:
    from collections.abc import Callable

    from ortools.sat.python import cp_model


@dataclass(frozen=True)
class Window:
    """A stretch of time in ticks."""

    begin: int
    end: int


class WindowModel:
    """The window's model; `variables` covers the microbatches that it touches."""

    def __init__(self, model: cp_model.CpModel, schedule: Schedule, window: Window, objective: str) -> None:
        self.model = model
        self.schedule = schedule
        self.window = window
        self.last = max(map(schedule.end, schedule.starts))
        self.closing = window.end >= self.last
        self.gain = model.new_int_var(0, 0 if self.closing else window.end - window.begin, "gain")
        touched = {task.microbatch for task in schedule.starts if self._runs(task)}
        slices = schedule.problem.slices  # of a microbatch all, or none
        self.microbatches = range(min(touched) // slices * slices, (max(touched) // slices + 1) * slices)
        stages = range(len(schedule.problem.stages))
        activations = {(s, m): self._activation(s, m) for s in stages for m in self.microbatches}
        self.variables = Variables(self.last, activations, model.new_int_var(0, self.last, "makespan"))
        constraints.add_all(model, schedule.problem, self.variables)
        if objective == "span":
            self._bound_spans()
        else:
            self._bound_makespan()
        model.minimize(self.variables.makespan)
        model.add_hint(self.gain, 0)
        hint.add_hint(model, self.variables, schedule, objective)

    def _runs(self, task: Task) -> bool:
        """Whether a task, or what its copies take from compute, runs in the window."""
        before, after = self._busy(task)
        begin, end = self.schedule.starts[task] - before, self.schedule.end(task) + after
        return begin < self.window.end and end > self.window.begin

    def _busy(self, task: Task) -> tuple[int, int]:
        """Return the ticks before and behind a task in which its copies take compute, in the old schedule."""
        stage = self.schedule.problem.at(task.stage, task.microbatch)
        if task._replace(kind=Kind.D) not in self.schedule.starts:
            return 0, 0
        before = stage.reload_busy if task.kind in (Kind.I, Kind.B) else 0
        return before, stage.offload_busy if task.kind is Kind.F else 0

    def _free(self, task: Task) -> bool:
        return self.window.begin <= self.schedule.starts[task] < self.window.end

    def _activation(self, s: int, m: int) -> Activation:
        """Variables for what is free; constants, moved by the gain after the window, for the rest."""
        present = [task for kind in Kind if (task := Task(kind, s, m)) in self.schedule.starts]
        whole = all(self._free(task) for task in present)
        made = create_activation(self.model, self.schedule.problem, s, m, self.last)
        values = hint.of_activation(self.schedule, s, m, {})
        for task in present:
            start = made.ops()[task.kind][0]
            self.model.add(start >= self.window.begin if self._free(task) else start == self._moved(task))
        if not whole:
            for name in ("split", "keep", "offload", "recompute"):
                self.model.add(getattr(made, name) == int(values[name]))
        if not self.closing:
            self._bound_ends(made, s, m)
        self._bound_begin(made, s, m)
        return made

    def _bound_ends(self, made: Activation, s: int, m: int) -> None:
        """A free op is over where the window ended, or where it was over before if that was later, less the gain."""
        ends = {Kind.I: made.backward_end, Kind.B: made.backward_end, Kind.D: made.away_end, Kind.H: made.back_end}
        """Of ops whose length is not fixed."""
        for kind, (start, present) in made.ops().items():
            task = Task(kind, s, m)
            old = self.schedule.starts.get(task)
            if old is not None and not self._free(task):
                continue
            end = self.window.end
            if old is not None:
                end = max(end, self.schedule.end(task) + self._busy(task)[1])
            latest = end - self.gain
            if kind is Kind.F and (busy := self.schedule.problem.at(s, m).offload_busy):
                latest -= busy * made.offload
            law = self.model.add(ends.get(kind, start + duration(self.schedule.problem, task)) <= latest)
            if present is not None:
                law.only_enforce_if(present)

    def _bound_begin(self, made: Activation, s: int, m: int) -> None:
        """What the reload of a free backward takes from compute is in the window, or where it was before."""
        busy = self.schedule.problem.at(s, m).reload_busy
        for task in (Task(Kind.I, s, m), Task(Kind.B, s, m)):
            if busy and task in self.schedule.starts and self._free(task):
                least = min(self.window.begin, self.schedule.starts[task] - self._busy(task)[0])
                self.model.add(made.backward - busy * made.offload >= least)

    def _bound_makespan(self) -> None:
        v = self.variables
        if self.closing:
            for a in v.activations.values():
                self.model.add(v.makespan >= a.release)
        else:
            self.model.add(v.makespan == self.last - self.gain)

    def _bound_spans(self) -> None:
        """From the first start to the last end on the compute lane of each device."""
        v, schedule = self.variables, self.schedule
        for lane in filter(None, schedule.compute_lanes):
            first = lane[0]
            begin: cp_model.LinearExpr | int = self._moved(first)
            if first.microbatch in self.microbatches:
                begin = v.activations[first.stage, first.microbatch].forward
            outside = [task for task in lane if task.microbatch not in self.microbatches]
            for task in outside[-1:]:
                self.model.add(v.makespan + begin >= self._moved(task) + duration(schedule.problem, task))
            for s, m in {(task.stage, task.microbatch) for task in lane} & v.activations.keys():
                self.model.add(v.makespan + begin >= v.activations[s, m].release)

    def _moved(self, task: Task) -> cp_model.LinearExpr | int:
        """Return when a task starts that is not free."""
        start = self.schedule.starts[task]
        return start - self.gain if start >= self.window.end else start

    def starts(self, read: Callable[[cp_model.LinearExprT], int]) -> dict[Task, int]:
        """Return the whole schedule's starts with the window's solution in it."""
        gain = read(self.gain)
        starts = {
            task: start - gain if start >= self.window.end else start
            for task, start in self.schedule.starts.items()
            if task.microbatch not in self.microbatches
        }
        return starts | hint.starts_of(self.variables, read)
