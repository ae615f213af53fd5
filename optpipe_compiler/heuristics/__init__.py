"""Published schedules by name, one file each, and our own memory-aware greedy start.

A published schedule is a function from a Problem to the compute order of every device; it raises NotDefined, with the
reason, where its paper does not define it. `PUBLISHED` lists them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from optpipe_compiler.heuristics.common import NotDefined
from optpipe_compiler.heuristics.gpipe import gpipe
from optpipe_compiler.heuristics.one_f_one_b import one_f_one_b
from optpipe_compiler.heuristics.zb_h1 import zb_h1
from optpipe_compiler.schedule import Plan, Schedule
from optpipe_compiler.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.problem import Problem
    from optpipe_compiler.schedule import Task

PUBLISHED: dict[str, Callable[[Problem], list[list[Task]]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
}

UNLIMITED = 1 << 60


def published(problem: Problem, name: str) -> Schedule:
    """Return the published schedule `name`, timed on the costs of `problem` but without its caps.

    Whether it fits is decided by its peak. Raises NotDefined where the paper does not define it.
    """
    order = PUBLISHED[name](problem)
    lanes = tuple(map(tuple, order))
    links = max((link for link in problem.link_of if link is not None), default=-1) + 1
    plan = Plan(lanes, ((),) * links, ((),) * links, lanes, (0,) * problem.devices)
    free = replace(problem, budget=(UNLIMITED,) * problem.devices)
    timed = simulate(free, plan, name)
    return Schedule(problem, name, timed.starts)


__all__ = ["PUBLISHED", "NotDefined", "published"]
