"""The compiled machine as tests load it: with a guide in plain Python, or with the first policies of a search."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from optpipe_compiler.machine import dispatch, orders
from optpipe_compiler.machine.compiled import entry, views
from optpipe_compiler.machine.dispatch import DONE
from optpipe_compiler.machine.policy import Setting, policy, setting, value
from optpipe_compiler.machine.state import (
    NEVER,
    NONE,
    MachineState,
    machine,
)
from optpipe_compiler.model.schedule import Kind, Schedule, Stuck, Task
from optpipe_compiler.plan.wishes import names, treatments, wish
from optpipe_compiler.published import NotDefined
from optpipe_compiler.published.common import rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.machine.policy import Policy
    from optpipe_compiler.model.problem import Problem, Stage
    from tests.given_order import LaneOrders
    from tests.list_scheduler import Guide


UNKNOWN_NUMBA = """
from types import SimpleNamespace
import numba
numba.version_info = SimpleNamespace(short=(0, 99))
"""
"""Code that makes numba's version one that `machine.compiled` does not know, where it runs first."""


@entry
def play(x: MachineState, is_span: bool, cutoff: int) -> tuple[int, int, int]:
    """Run the list scheduler: see `dispatch.play`."""
    return dispatch.play(views(x), is_span, cutoff)


def loaded(problem: Problem, guide: Guide) -> MachineState:
    """The machine of `problem`, ready to run `guide`."""
    x = machine(problem)
    for kind, table in (("forward", guide.forward), ("backward", guide.backward), ("weight", guide.weight)):
        for key, rank in table.items():
            x.acts[kind][key] = rank
    for key, mode in guide.modes.items():
        x.acts["mode"][key] = int(mode)
    x.stages["fused"] = guide.fused
    x.stages["holds"], x.stages["waits"] = guide.holds, guide.waits
    x.stages["recomputed_before"], x.stages["reloaded_before"] = guide.recomputed_before, guide.reloaded_before
    x.devices["reserve"] = guide.reserve
    return x


def starts(x: MachineState) -> dict[Task, int]:
    """The starts of all ops of the machine's last run."""
    kinds, stages, microbatches = x.starts.shape
    return {
        Task(Kind(k), s, m): int(x.starts[k, s, m])
        for k in range(kinds)
        for s in range(stages)
        for m in range(microbatches)
        if x.starts[k, s, m] >= 0
    }


def run(problem: Problem, guide: Guide) -> Schedule:
    """The schedule of a guide; fails if it does not come to an end."""
    x = loaded(problem, guide)
    status, makespan, ops = play(x, False, NEVER)
    assert status == DONE
    timed = Schedule(problem, "by-hand", starts(x))
    assert timed.makespan == makespan
    assert len(timed.starts) == ops
    return timed


def first_policies(problem: Problem) -> Iterator[tuple[Policy, Setting]]:
    """The policies from which a search starts, with what they are for."""
    placed = ("linear", 1) if len(problem.stages) == problem.devices else ("loop", 2)
    for name in names(problem, placed):
        with suppress(NotDefined, Stuck):
            wished = wish(problem, name)
            for modes in treatments(problem, wished):
                yield policy(problem, modes), setting(problem, wished, problem.microbatches, is_span=False)


def at_one_speed(problem: Problem) -> Problem:
    """The problem with transfers that are no slower beside one that goes the other way."""

    def same(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        return tuple(replace(s, offload_alone=s.offload, reload_alone=s.reload) for s in stages)

    return replace(problem, stages=same(problem.stages), classes=tuple(map(same, problem.classes)))


def dispatched(problem: Problem) -> Iterator[Schedule]:
    """What the first policies lead to, where they do not run out of memory."""
    x = machine(problem)
    for one, given in first_policies(problem):
        if value(x, one, given, NEVER // 2) < NEVER:
            yield Schedule(problem, "local-search", starts(x))


def simulate(problem: Problem, plan: LaneOrders, method: str) -> Schedule:
    """Return the earliest schedule that follows `plan` under the caps of `problem`, by the compiled machine.

    Raises Stuck when the plan waits for itself or its memory never comes.
    """
    x = machine(problem)
    x.devices["host_budget"] = plan.host_limit
    x.acts["backward"] = NONE
    lanes = [*map(rows, (*plan.compute, *plan.d2h, *plan.h2d))]
    given = orders._arrays(problem, lanes, [*map(rows, plan.allocations)])
    return orders._followed(problem, x, given, method)
