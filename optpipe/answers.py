"""What a plan answers by planning more: what binds, and how it compares."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from optpipe import shown
from optpipe_compiler.errors import BadInput
from optpipe_compiler.study import comparison as _comparison
from optpipe_compiler.study import explain as _explain
from optpipe_compiler.study.facts import facts
from optpipe_compiler.study.pool import pool_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.documents import ir
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


def explained(checked: ir.Checked, costs: Profile | None, time_limit: float, jobs: int, *, cached: bool) -> Explanation:
    """Return what binds in a plan."""
    instance = _explain.instance_of(checked, _given(costs, "explain"), "the plan", time_limit)
    instance = replace(instance, cached=cached)
    return Explanation(_explain.explain(checked, instance, jobs, pool=pool_for(jobs)))


def compared(plans: Sequence[tuple[str, ir.Checked]], costs: Profile | None, methods: str, jobs: int) -> Comparison:
    """Return named plans beside each other, and known schedules on the first one's costs."""
    rows = [facts(checked, name) for name, checked in plans]
    absent = []
    if methods:
        names = _comparison.chosen_methods(methods)
        first = plans[0][1].schedule
        known = _given(costs, "compare")
        for row in _comparison.published_rows(known, first, "the plan", names, jobs, pool=pool_for(jobs)):
            if isinstance(row, _comparison.Absent):
                absent.append(row)
            else:
                rows.append(row)
    return Comparison(_comparison.compare(rows, absent))


def _given(costs: Profile | None, what: str) -> Profile:
    if costs is None:
        raise BadInput(f"{what} needs the plan's costs, expected read_schedule(path, profile=...)")
    return costs
