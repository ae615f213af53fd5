"""Sweeps: what memory, microbatches and devices buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from optpipe import shown
from optpipe.keywords import CompileKeywords, checked, checked_all, known
from optpipe.plans import Size, size
from optpipe.profiles import PathLike, as_profile
from optpipe_compiler import compiler
from optpipe_compiler.errors import BadInput
from optpipe_compiler.study import sweep as _sweep
from optpipe_compiler.study.frontier import Answers, answer
from optpipe_compiler.study.pool import pool_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.documents.profile import Profile


@dataclass(frozen=True)
class PointRow:
    """The best known plan for one number of devices and microbatches under one cap."""

    devices: int
    microbatches: int
    mem_bytes: int
    outcome: str
    makespan_ns: int | None
    lower_bound_ns: int
    peak_bytes: int | None
    microbatches_per_s: float
    most_microbatches_per_s: float
    """By the bound."""
    method: str
    carried_from_bytes: int | None
    """The cap whose plan this is, where that is better than what was found for this one."""
    finished: bool | None
    """Whether more time is unlikely to give a much better plan."""
    slices: int | None
    """Of every microbatch in this plan; None without one."""


class Sweep:
    """Plans over a grid; `points` are rows for pandas, `sentences` what follows. A notebook shows the picture."""

    def __init__(self, record: _sweep.Sweep) -> None:
        self.record = record

    @property
    def points(self) -> list[PointRow]:
        """All points, line by line from the smallest cap to the largest; more memory is never slower."""
        return [
            PointRow(
                devices=one.devices,
                microbatches=one.microbatches,
                mem_bytes=one.mem_bytes,
                outcome=one.outcome,
                makespan_ns=one.makespan_ns,
                lower_bound_ns=one.lower_bound_ns,
                peak_bytes=one.peak_bytes,
                microbatches_per_s=one.throughput,
                most_microbatches_per_s=one.ceiling,
                method=one.method,
                carried_from_bytes=one.carried_from_bytes,
                finished=one.finished,
                slices=one.slices,
            )
            for one in self.record.points
        ]

    def answers(self, loss: float = 0.02) -> Answers:
        """Return how much memory and how many microbatches are enough to lose less than `loss`, and whether proven."""
        return answer(self.record.points, _share(loss))

    def sentences(self, loss: float = 0.02) -> list[str]:
        """Return the answers in words."""
        from optpipe_compiler.view.sweep import sentences

        return list(sentences(self.record, _share(loss)))

    def svg(self) -> str:
        """Return throughput against memory as an SVG picture."""
        from optpipe_compiler.view import frontier_svg

        return frontier_svg.render(self.record)

    def __str__(self) -> str:
        from optpipe_compiler.view.sweep import table

        return "\n".join([shown.text(table(self.record, shown.WIDTH)), "", *self.sentences()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f'<div style="max-width:1000px">{self.svg()}</div>' + shown.html("\n".join(self.sentences()))


def sweep(
    profile: Profile | PathLike,
    mem: str | Sequence[Size],
    *,
    microbatches: Sequence[int] | None = None,
    devices: Sequence[int] | None = None,
    host_mem: Size | None = None,
    time_limit: float = 10.0,
    path: PathLike | None = None,
    jobs: int = 1,
    cache: bool = True,
    on_point: Callable[[PointRow], None] | None = None,
    **options: Unpack[CompileKeywords],
) -> Sweep:
    """Plan for every cap, number of microbatches and of devices, each plan starting from that of a smaller cap.

    `mem` is a list of caps, or a text such as "10GB:80GB:8" or "10GB,20GB". `time_limit` is in seconds per search, of
    which a point gets up to three. Without `microbatches` there are 4 per device, without `devices` those of the
    profile. With `path` points are written there as they are found, and a sweep that is there goes on. `jobs` above 1
    plans in as many processes.
    """
    costs = _sweep.SweptCosts.of(as_profile(profile))
    checked("time_limit", time_limit, "float")
    checked("jobs", jobs, "count")
    checked("on_point", on_point, "function", is_optional=True)
    counts = {name: _counts(name, values) for name, values in (("microbatches", microbatches), ("devices", devices))}
    if not isinstance(mem, Sequence):
        raise BadInput(f"mem is {mem!r}, expected a list of caps, or a text such as '10GB:80GB:8'")
    caps = _sweep.parse_caps(mem, "mem") if isinstance(mem, str) else tuple(sorted({size(one, "mem") for one in mem}))
    if not caps:
        raise BadInput(f"mem is {mem!r}, expected at least one cap")
    common = compiler.Options(
        mem_bytes=0,
        host_mem_bytes=None if host_mem is None else size(host_mem, "host_mem"),
        time_limit_s=time_limit,
        **known(options, compiler.Options, CompileKeywords, sweep),
    )
    where = None if path is None else Path(checked("path", path, "path"))
    grid = _sweep.Grid(caps, **counts)
    asked = _sweep.instances(costs, common, grid, cached=cache)
    found = _sweep.begin(where, costs, common)
    todo = _sweep.missing(found, asked)
    for point, now in _sweep.run(where, found, todo, jobs, pool_for(jobs)):
        found = now
        if on_point is not None:
            on_point(next(row for row, one in zip(Sweep(now).points, now.points, strict=True) if one == point))
    return Sweep(found)


def _counts(name: str, values: Sequence[int] | None) -> tuple[int, ...]:
    """Return numbers that are asked for, none for the default; raise BadInput for a list without any."""
    found: tuple[int, ...] = checked_all(name, values, "count", is_optional=True) or ()
    if values is not None and not found:
        raise BadInput(f"{name} is {values!r}, expected at least one, or None for the default")
    return found


def _share(loss: float) -> float:
    if not 0 < checked("loss", loss, "float") < 1:
        raise BadInput(f"loss is {loss}, expected a share above 0 and below 1")
    return loss
