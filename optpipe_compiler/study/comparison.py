"""Schedules side by side, and those of papers, stock and compositions for the same setup, before the same judge."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from optpipe_compiler import compiler
from optpipe_compiler.documents.units import LARGEST, short_bytes, show_lengths, show_ns
from optpipe_compiler.errors import BadInput, Infeasible, NotFound
from optpipe_compiler.published import METHODS
from optpipe_compiler.study.facts import Facts, facts
from optpipe_compiler.study.planned import options_of
from optpipe_compiler.study.pool import answers
from optpipe_compiler.verify import Violated, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.study.pool import Pool

PLAN_S = 5.0
"""Time limit at least of a published schedule, which is written down rather than searched."""


@dataclass(frozen=True)
class Absent:
    """A published schedule that cannot be compared, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Rows from the best to the worst, those that are missing, and in what the rows' instances differ."""

    rows: tuple[Facts, ...]
    absent: tuple[Absent, ...]
    differences: tuple[str, ...]
    """One sentence each; with any, times are comparable per microbatch at most."""

    @property
    def best(self) -> Facts | None:
        """The fastest that is safe."""
        return next((row for row in self.rows if row.safe), None)


def compare(rows: Sequence[Facts], absent: Sequence[Absent] = ()) -> Comparison:
    """Sort the rows by makespan, or per microbatch where they are of different instances."""
    different = tuple(_differences(rows))
    key = _per_microbatch if different else _makespan
    return Comparison(tuple(sorted(rows, key=key)), tuple(absent), different)


def _makespan(row: Facts) -> float:
    return row.makespan_ns


def _per_microbatch(row: Facts) -> float:
    return row.per_microbatch_ns


def _differences(rows: Sequence[Facts]) -> Iterator[str]:
    """Yield a sentence for each part of the instance in which not all rows agree."""
    parts: tuple[tuple[str, Callable[[Facts], object], Callable[[Any], str]], ...] = (
        ("costs", lambda row: row.profile_digest, lambda digest: digest[:15]),
        ("devices", lambda row: row.devices, str),
        ("microbatches", lambda row: row.microbatches, str),
        ("lengths of microbatches", lambda row: row.lengths, _lengths),
        ("caps", lambda row: row.cap_bytes, short_bytes),
        ("host caps", lambda row: row.host_cap_bytes, lambda cap: "none" if cap is None else short_bytes(cap)),
    )
    for part, value, show in parts:
        groups: dict[object, list[str]] = {}
        for row in rows:
            groups.setdefault(value(row), []).append(row.name)
        exact = len(set(map(show, groups))) < len(groups)
        if len(groups) > 1:
            shown = (f"{one if exact else show(one)} in {_some(names)}" for one, names in groups.items())
            yield f"{part} differ: " + "; ".join(shown)


def _lengths(lengths: tuple[int, ...] | None) -> str:
    if lengths is None:
        return "all as long as the costs are for"
    return show_lengths(lengths)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


# -- published schedules ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A published schedule for the instance of another one."""

    name: str
    profile: Profile
    options: compiler.Options


def chosen_methods(text: str) -> list[str]:
    """Read names or kinds separated by commas, or `all`; raise BadInput for what is neither."""
    kinds: dict[str, list[str]] = {"all": list(METHODS)}
    for name, method in METHODS.items():
        kinds.setdefault(method.kind, []).append(name)
    names: list[str] = []
    for one in map(str.strip, text.split(",")):
        if one not in kinds and one not in METHODS:
            expected = ", ".join([*kinds, *METHODS])
            raise BadInput(f"--methods names {one!r}, expected some of {expected}")
        names += kinds.get(one, [one])
    return list(dict.fromkeys(names))


def kept_by(schedule: ir.Schedule) -> ir.Checked | None:
    """Return the schedule where it was made with `--keep-placement`: its placement is the one that was kept.

    None where it was not, or where the judge rejects it.
    """
    if "keep_placement" not in schedule.provenance.options:
        return None
    try:
        return check(schedule)
    except Violated:
        return None


def options_for(schedule: ir.Schedule, method: str, name: str, keep: ir.Checked | None = None) -> compiler.Options:
    """Return the options for a published schedule on the instance of the one that is called `name`.

    They are those that the other one was compiled with, so that the result is the one that its file compares with;
    where these exclude the placements that the published one is for, these, and where they cut microbatches that the
    published one takes whole, whole ones. With `keep` it is placed as that is. Raises BadInput for options that are
    none.
    """
    limit = schedule.provenance.options.get("time_limit_s")  # on which it depends how finely microbatches may be cut
    limit_s = max(PLAN_S, limit) if isinstance(limit, int | float) else PLAN_S
    options = replace(options_of(schedule, name), method=method, time_limit_s=limit_s, workers=1)
    if not METHODS[method].sliced:
        options = replace(options, slices=1)
    if keep is not None:
        return replace(options, keep=keep, placement="auto", stages_per_device=None)
    placed = METHODS[method].placements
    if not any(options.placement in ("auto", one) and options.stages_per_device in (None, n) for one, n in placed):
        options = replace(options, stages_per_device=None)
    return replace(options, placement=placed[0][0])  # type: ignore[arg-type]  # others need not be looked at


def published_rows(
    profile: Profile,
    schedule: ir.Schedule,
    name: str,
    methods: Sequence[str],
    jobs: int,
    on_progress: Callable[[str], None] = lambda name: None,
    pool: Pool | None = None,
) -> Iterator[Facts | Absent]:
    """Yield each published schedule for the instance of the schedule called `name`, or why there is none, in order."""
    found: dict[str, Facts | Absent] = {}
    keep = kept_by(schedule)
    wanted = [Wanted(method, profile, options_for(schedule, method, name, keep)) for method in methods]
    for question, row in (pool or answers)(published_row, wanted, jobs):
        found[question.name] = row
        on_progress(question.name)
    for method in methods:
        yield found[method]


def published_row(wanted: Wanted) -> Facts | Absent:
    """Write the published schedule down in its best placement, and judge it."""
    try:
        checked = compiler.compile_schedule(wanted.profile, wanted.options).uninterrupted().checked
    except Infeasible:
        return Absent(wanted.name, _too_large(wanted, wanted.options))
    except (NotFound, BadInput) as error:
        return Absent(wanted.name, str(error).removeprefix(f"--method {wanted.name}: "))
    remark = checked.schedule.forecast.baselines[wanted.name].reason
    return facts(checked, wanted.name, remark, METHODS[wanted.name].kind)


def _too_large(wanted: Wanted, options: compiler.Options) -> str:
    """Say what the schedule would need and take if there were no caps."""
    uncapped = replace(options, mem_bytes=LARGEST, host_mem_bytes=LARGEST)
    free = facts(compiler.compile_schedule(wanted.profile, uncapped).uninterrupted().checked, wanted.name)
    if free.peak_bytes > options.mem_bytes:
        return f"does not fit: needs {short_bytes(free.peak_bytes)} and would take {show_ns(free.makespan_ns)}"
    return f"does not fit the host's memory; with enough it would take {show_ns(free.makespan_ns)}"
