"""Plans: made by the compiler or read from files, always verified; what they promise, and how good they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from optpipe.keywords import CompileKeywords, checked, checked_all, known
from optpipe.profiles import PathLike, as_profile
from optpipe_compiler import cache as _cache
from optpipe_compiler import compiler
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import write_atomically
from optpipe_compiler.documents.profile import Profile, value_of
from optpipe_compiler.documents.units import counted, parse_cap
from optpipe_compiler.errors import BadInput, Rejected
from optpipe_compiler.verify import Violated, Violation, check
from optpipe_compiler.verify import verify as _verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.answers import Comparison, Explanation

Size = int | str
"""Bytes, or a text such as `40GB` or `37.25GiB`."""


@dataclass(frozen=True)
class OpRow:
    """An op with its forecast times, counted from the start of the schedule."""

    op: str
    """Stage, letter and microbatch: `2F0`; see docs/IR.md."""
    kind: str
    device: int
    lane: Literal["compute", "d2h", "h2d"]
    stage: int
    microbatch: int
    slice: int | None
    """Of the microbatch; None where microbatches are not cut."""
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class DeviceRow:
    """What a device promises: the most that it holds in any execution, and what it does."""

    device: int
    peak_bytes: int
    cap_bytes: int
    host_bytes: int
    idle: float
    """Share of the makespan in which it computes nothing."""
    offloads: int
    recomputes: int


@dataclass(frozen=True)
class BaselineRow:
    """A schedule that the plan is compared with, on the same costs and under the same cap."""

    name: str
    kind: str
    """paper, stock, composition or own."""
    makespan_ns: int | None
    """None where it is not defined for this instance."""
    peak_bytes: int | None
    fits: bool
    remark: str


@dataclass(frozen=True)
class BoundRow:
    """What no schedule within a cap can beat, and by which argument."""

    mem_bytes: int
    lower_bound_ns: int
    argument: str
    least_mem_bytes: int
    """Where it is more than `mem_bytes` nothing fits, and this is what `compile` names in its refusal. Else, and always
    with slices or unequal lengths, of which `compile` may name more, what every schedule needs on some device: what
    that always holds, and one activation."""


class Plan:
    """A verified schedule. In a notebook it shows its chart; `print` gives its summary."""

    def __init__(self, checked: ir.Checked, profile: Profile | None = None, *, interrupted: bool = False) -> None:
        self.checked = checked
        self.profile = profile
        """The costs that it was planned with, if they are known: `explain` and `compare` need them."""
        self.interrupted = interrupted
        """Whether Ctrl-C ended the search, which then returned the best so far."""

    @property
    def schedule(self) -> ir.Schedule:
        """The record of the schedule file (docs/IR.md)."""
        return self.checked.schedule

    @property
    def makespan_ns(self) -> int:
        """From the first start to the last end of a step, in ns."""
        return self.schedule.forecast.makespan_ns

    @property
    def value_ns(self) -> int:
        """What was minimised: the makespan, or the longest span of a device."""
        return self.schedule.forecast.value_ns

    @property
    def lower_bound_ns(self) -> int:
        """What no schedule of the placements searched can beat (proven), in ns."""
        return self.schedule.forecast.lower_bound_ns

    @property
    def gap(self) -> float:
        """(value - bound) / value."""
        return self.schedule.forecast.gap

    @property
    def outcome(self) -> str:
        """`optimal` where bound and value meet, else `feasible`."""
        return self.schedule.forecast.outcome

    @property
    def method(self) -> str:
        """What made the schedule."""
        return self.schedule.forecast.method

    @property
    def bubble_fraction(self) -> float:
        """Compute-idle time / (devices x makespan)."""
        return self.schedule.forecast.bubble_fraction

    @property
    def peak_bytes(self) -> int:
        """The most that the fullest device holds, in any execution that order and waits allow (proven)."""
        return max(device.peak_bytes for device in self.schedule.devices)

    @property
    def baselines(self) -> list[BaselineRow]:
        """The schedules of papers, stock ones, compositions and your own: those that fit first, then by time."""
        from optpipe_compiler.view.baselines import kind

        rows = [
            BaselineRow(name, kind(self.schedule, name), one.makespan_ns, one.peak_bytes, one.fits, one.reason)
            for name, one in self.schedule.forecast.baselines.items()
        ]
        return sorted(rows, key=lambda row: (not row.fits, row.makespan_ns is None, row.makespan_ns or 0))

    def ops(self, *, messages: bool = False) -> list[OpRow]:
        """Return all ops by start, as rows that pandas.DataFrame takes; with the issues of messages if asked for."""
        found = [
            OpRow(op.text, op.name, device, lane, op.stage, op.microbatch, op.slice_or_none, start, end)
            for device, lane, op, start, end in self.schedule.timed(messages=messages)
        ]
        return sorted(found, key=lambda row: (row.start_ns, row.device, row.lane))

    def devices(self) -> list[DeviceRow]:
        """Return what each device promises."""
        busy = [0] * len(self.schedule.devices)
        for row in self.ops():
            busy[row.device] += row.end_ns - row.start_ns if row.lane == "compute" else 0
        return [
            DeviceRow(
                device=one.device,
                peak_bytes=one.peak_bytes,
                cap_bytes=self.schedule.setup.cap_bytes,
                host_bytes=one.host_bytes,
                idle=1 - busy[n] / self.makespan_ns if self.makespan_ns else 0.0,
                offloads=len(one.d2h),
                recomputes=sum(op.name == "recompute" for op in one.compute),
            )
            for n, one in enumerate(self.schedule.devices)
        ]

    def save(self, path: PathLike = "schedule.json") -> None:
        """Write the schedule file, which `optpipe verify`, `show` and `run` read."""
        write_atomically(Path(checked("path", path, "path")), ir.to_text(self.schedule))

    def report(self, path: PathLike = "report.html") -> None:
        """Write the HTML page that `optpipe report` writes."""
        from optpipe_compiler.view.report import render

        names = [layer.name for layer in self.profile.expanded_layers()] if self.profile else ()
        write_atomically(Path(checked("path", path, "path")), render(self.schedule, names=names))

    def svg(self) -> str:
        """Return the chart as an SVG picture."""
        from optpipe_compiler.view import svg

        return svg.render(self.schedule)

    def explain(self, *, time_limit: float = 5.0, jobs: int = 1, cache: bool = True) -> Explanation:
        """Say what binds: where devices idle, and what more memory, faster links and other changes would save.

        Each change is planned from this plan on in up to three searches of `time_limit` seconds, and bounded. `jobs`
        above 1 plans in as many processes; `cache` as in `compile`.
        """
        from optpipe.answers import explained

        checked("time_limit", time_limit, "float")
        checked("jobs", jobs, "count")
        return explained(self.checked, self.profile, time_limit, jobs, cached=cache)

    def compare(self, *others: Plan | PathLike, methods: str | Sequence[str] = "all", jobs: int = 1) -> Comparison:
        """Set this plan beside others and known schedules for the same instance, before the same judge.

        `methods` names kinds (paper, stock, composition, own) or schedules, in a list or separated by commas; "" for
        none. Known schedules need the plan's profile. `jobs` as in `explain`.
        """
        from optpipe.answers import compared

        names = methods if isinstance(methods, str) else ",".join(checked_all("methods", methods, "str"))
        checked("jobs", jobs, "count")
        rows = [("this plan", self.checked)]
        for number, other in enumerate(others, start=2):
            rows.append((f"plan {number}" if isinstance(other, Plan) else str(other), as_plan(other).checked))
        return compared(rows, self.profile, names, jobs)

    def __str__(self) -> str:
        from optpipe.shown import text
        from optpipe_compiler.view.summary import render

        return text(render(self.schedule))

    def __repr__(self) -> str:
        from optpipe_compiler.documents.units import short_bytes, show_ns

        setup = self.schedule.setup
        return (
            f"<Plan by {self.method}: {show_ns(self.makespan_ns)} (bound {show_ns(self.lower_bound_ns)}, "
            f"{self.outcome}), {counted(setup.devices, 'device')}, {counted(setup.microbatches, 'microbatch')}, "
            f"at most {short_bytes(self.peak_bytes)} of {short_bytes(setup.cap_bytes)}>"
        )

    def _repr_html_(self) -> str:
        return f'<div style="max-width:1200px">{self.svg()}</div>'


def compile(
    profile: Profile | PathLike,
    *,
    mem: Size | None = None,
    microbatches: int | None = None,
    devices: int | None = None,
    host_mem: Size | None = None,
    time_limit: float | None = None,
    method: str | None = None,
    start: Plan | PathLike | Sequence[Plan | PathLike] = (),
    keep_placement: Plan | PathLike | None = None,
    cache: bool = True,
    on_progress: Callable[[compiler.Progress], None] | None = None,
    **options: Unpack[CompileKeywords],
) -> Plan:
    """Plan a schedule under a memory cap, and prove how good it is.

    `mem` is the cap per device, in bytes or as a text such as "40GB" (default: the profile's); `host_mem` that of all
    offloads together. `microbatches` per step (default: 4 per device). `time_limit` in seconds. `method` emits a known
    schedule instead of searching. `start` names earlier plans: the result is no worse than one that still fits.
    `keep_placement` names one whose cut and owners of stages are kept, so that no weight moves. With `cache` an equal
    question is answered from the user's cache folder, and others start from near plans there. `options` are those of
    the command: `placement`, `stages_per_device`, `objective`, `offload`, `recompute`, `split` (False forbids them),
    `slices`, `lengths`, `seed`, `reproducible`, `workers`, `noise`.
    Raises Infeasible with a `mem` that would do (the smallest where it says so), NotFound when the time is over before
    there is any plan, and BadInput. Ctrl-C returns the best plan so far.
    """
    more = known(options, compiler.Options, CompileKeywords, compile)
    costs = as_profile(profile)
    starts = [start] if isinstance(start, Plan | str | Path) else start
    if not isinstance(starts, Iterable):
        raise BadInput(f"start is {starts!r}, expected a plan, a path, or a list of these")
    chosen = compiler.Options(
        mem_bytes=_cap(mem, costs),
        microbatches=checked("microbatches", microbatches, "int", is_optional=True),
        devices=checked("devices", devices, "int", is_optional=True),
        host_mem_bytes=None if host_mem is None else size(host_mem, "host_mem"),
        time_limit_s=checked("time_limit", time_limit, "float", is_optional=True),
        method=checked("method", method, "str", is_optional=True),
        seeds=tuple(as_plan(one).checked for one in starts),
        keep=None if keep_placement is None else as_plan(keep_placement).checked,
        **more,
    )
    say = checked("on_progress", on_progress, "function", is_optional=True)
    kept = _cache.users() if cache else None
    result = _cache.compile_schedule(costs, chosen, say or (lambda progress: None), kept)
    return Plan(result.checked, costs, interrupted=result.interrupted)


def read_schedule(path: PathLike, profile: Profile | PathLike | None = None) -> Plan:
    """Read a schedule file and verify it, with the profile also its costs; raise Rejected for what does not hold."""
    costs = None if profile is None else as_profile(profile)
    try:
        return Plan(check(ir.load(Path(checked("path", path, "path"))), costs), costs)
    except Violated as error:
        raise Rejected(f"{path}: {error}") from error


def verify(schedule: Plan | PathLike, profile: Profile | PathLike | None = None) -> list[Violation]:
    """Return everything that the independent judge finds wrong; [] for a schedule that holds its promises."""
    record = schedule.schedule if isinstance(schedule, Plan) else ir.load(Path(checked("schedule", schedule, "path")))
    return _verify(record, None if profile is None else as_profile(profile))


def bounds(
    profile: Profile | PathLike,
    mem: Size | Sequence[Size],
    *,
    microbatches: int | None = None,
    devices: int | None = None,
    **options: Unpack[CompileKeywords],
) -> list[BoundRow]:
    """Return what no schedule can beat under each cap, without solving."""
    more = known(options, compiler.Options, CompileKeywords, bounds)
    costs, rows = as_profile(profile), []
    microbatches = checked("microbatches", microbatches, "int", is_optional=True)
    devices = checked("devices", devices, "int", is_optional=True)
    if not isinstance(mem, Integral | str | Sequence):
        raise BadInput(f"mem is {mem!r}, expected bytes, a size such as '40GB', or a list of these")
    for one in [mem] if isinstance(mem, Integral | str) else mem:
        cap = size(one, "mem")
        given = compiler.Options(mem_bytes=cap, microbatches=microbatches, devices=devices, **more)
        least = compiler.bounded(costs, given)
        rows.append(BoundRow(cap, least.ns, least.argument, least.mem_bytes))
    return rows


def as_plan(plan: Plan | PathLike) -> Plan:
    """Return the plan, read and verified if it is given by its path."""
    return plan if isinstance(plan, Plan) else read_schedule(checked("the plan", plan, "path"))


def size(value: Size, name: str) -> int:
    """Return bytes; a text without a unit is refused where it can hardly be meant."""
    if isinstance(value, str):
        return parse_cap(value, name)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise BadInput(f"{name} is {value!r}, expected bytes or a size such as '40GB'")
    return parse_cap(str(value), name)


def _cap(mem: Size | None, profile: Profile) -> int:
    if mem is not None:
        return size(mem, "mem")
    if profile.machine.memory_bytes is None:
        raise BadInput("mem is missing and the profile does not know the devices' memory; expected e.g. mem='40GB'")
    return value_of(profile.machine.memory_bytes)
