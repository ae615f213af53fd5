"""What a plan answers by planning more: what binds, and how it compares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe import shown
from optpipe.plans import Plan, as_plan
from optpipe_compiler.errors import BadInput
from optpipe_compiler.study import comparison as _comparison
from optpipe_compiler.study import explain as _explain
from optpipe_compiler.study.facts import facts
from optpipe_compiler.study.pool import Pool, answers, answers_here

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.profiles import PathLike
    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.study.explain import WhatIf
    from optpipe_compiler.study.facts import Facts


class Explanation:
    """What binds in a plan; `print` gives sentences and a table, `what_ifs` the rows."""

    def __init__(self, record: _explain.Explanation) -> None:
        self.record = record
        """All numbers: value, best and bound of the unchanged instance, idle shares by cause."""

    @property
    def what_ifs(self) -> list[WhatIf]:
        """The changes: what each saves by the plan found, and at most by its bound, as shares of time."""
        return list(self.record.what_ifs)

    def __str__(self) -> str:
        from optpipe_compiler.view.explanation import render

        return shown.text(render(self.record))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return shown.html(str(self))


class Comparison:
    """Schedules side by side, the best first; `rows` are what pandas takes."""

    def __init__(self, record: _comparison.Comparison) -> None:
        self.record = record

    @property
    def rows(self) -> list[Facts]:
        """A row for each schedule, the fastest first."""
        return list(self.record.rows)

    @property
    def absent(self) -> dict[str, str]:
        """Known schedules that are not in the comparison, and why."""
        return {one.name: one.reason for one in self.record.absent}

    @property
    def best(self) -> Facts | None:
        """The fastest that is safe."""
        return self.record.best

    def __str__(self) -> str:
        from optpipe_compiler.view.comparison import render

        return shown.text(render(self.record, shown.WIDTH))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return shown.html(str(self))


def explained(plan: Plan, time_limit: float, jobs: int) -> Explanation:
    """Return what binds in the plan."""
    instance = _explain.instance_of(plan.schedule, _profile(plan, "explain"), "the plan", time_limit)
    return Explanation(_explain.explain(plan.checked, instance, jobs, pool=_pool(jobs)))


def compared(plan: Plan, others: Sequence[Plan | PathLike], methods: str, jobs: int) -> Comparison:
    """Return the plan beside others and known schedules."""
    rows = [facts(plan.checked, "this plan")]
    for number, other in enumerate(others, start=2):
        rows.append(facts(as_plan(other).checked, f"plan {number}" if isinstance(other, Plan) else str(other)))
    absent = []
    if methods:
        names = _comparison.chosen_methods(methods)
        costs = _profile(plan, "compare")
        for row in _comparison.published_rows(costs, plan.schedule, "the plan", names, jobs, pool=_pool(jobs)):
            if isinstance(row, _comparison.Absent):
                absent.append(row)
            else:
                rows.append(row)
    return Comparison(_comparison.compare(rows, absent))


def _pool(jobs: int) -> Pool:
    """Return where questions are answered: here for one job, which knows your own schedules, too."""
    return answers if jobs > 1 else answers_here


def _profile(plan: Plan, what: str) -> Profile:
    if plan.profile is None:
        raise BadInput(f"{what} needs the plan's costs, expected read_schedule(path, profile=...)")
    return plan.profile
