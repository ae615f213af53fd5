"""compile: profile and options in, verified schedule out. Ties the rooms together and owns the time budget."""

from __future__ import annotations

import gc
import math
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from msgspec import UNSET

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import value_of
from optpipe_compiler.documents.units import short_bytes, show_bytes, show_ns
from optpipe_compiler.errors import BadInput, Infeasible, NotFound
from optpipe_compiler.lower import Certificate, lower, promised
from optpipe_compiler.model import bounds
from optpipe_compiler.model.placement import Layout, by_layers, layout
from optpipe_compiler.model.problem import Caps, Freedom, build, fused_ns, static_bytes
from optpipe_compiler.plan import seeds
from optpipe_compiler.plan.budget import Budget, Limits, lowering_s
from optpipe_compiler.plan.candidates import Candidates
from optpipe_compiler.plan.cuts import most_bytes, others
from optpipe_compiler.plan.exact import exact, is_small
from optpipe_compiler.plan.explore import LOCAL_SHARE, QUICK_SHARE, SMALL_SHARE, explore
from optpipe_compiler.plan.incumbents import Attempt, Incumbents
from optpipe_compiler.plan.spare import spare
from optpipe_compiler.published import METHODS, is_for
from optpipe_compiler.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.model.problem import Problem

SEVERAL: dict[str, tuple[int, ...]] = {"linear": (1,), "loop": (2, 3, 4), "v": (2, 4)}
"""Stages per device that are tried for each placement."""
GRACE_S = 2.0
"""Seconds beyond the time limit that lowering and verifying a schedule may take."""
LOWERING_SHARE = 0.7
"""Share of the time limit that lowering and verifying a schedule may take; placements of more ops are left out."""
MOST_TASKS = 1_000_000
"""Ops of the largest schedule that is planned: some gigabytes of memory."""
MOST_NEIGHBOURS = 8
"""Layers of a device up to which each is tried as a stage of its own."""
TIME_LIMITS = ((8, 60.0), (32, 180.0), (math.inf, 270.0))
"""Time limits in seconds up to so many devices."""


@dataclass(frozen=True)
class Options:
    """Everything a user may choose; None stands for the default that `settled` fills in."""

    mem_bytes: int
    microbatches: int | None = None
    devices: int | None = None
    host_mem_bytes: int | None = None
    placement: Literal["auto", "linear", "loop", "v"] = "auto"
    stages_per_device: int | None = None
    objective: Literal["makespan", "span"] = "makespan"
    offload: bool = True
    recompute: bool = True
    split: bool = True
    time_limit_s: float | None = None
    seed: int = 0
    reproducible: bool = False
    method: str | None = None
    """Emit this schedule of published.METHODS alone instead of searching."""
    search: bool = True
    """Whether to run the exact search after the heuristics."""
    workers: int = 0
    """Search threads; 0: one per core."""
    seeds: tuple[ir.Checked, ...] = ()
    """Earlier schedules; the result is no worse than one of them that still fits (plan/seeds.py)."""


@dataclass(frozen=True)
class Progress:
    """Where the search stands: values in ns, None while unknown."""

    phase: str
    incumbent_ns: int | None
    bound_ns: int | None
    method: str
    elapsed_s: float

    @property
    def gap(self) -> float | None:
        """(incumbent - bound) / incumbent."""
        if self.incumbent_ns is None or self.bound_ns is None or not self.incumbent_ns:
            return None
        return max(0.0, 1 - self.bound_ns / self.incumbent_ns)


@dataclass(frozen=True)
class Result:
    """A verified schedule, the options as they were used, and how it went."""

    schedule: ir.Schedule
    options: Options
    placement: str
    interrupted: bool
    wall_s: float
    notes: tuple[str, ...] = ()
    """What went wrong on the way without preventing a result."""


def settled(profile: Profile, options: Options) -> Options:
    """Return the options with every default filled in from the profile; raises BadInput for impossible ones."""
    devices = options.devices or profile.machine.devices
    layers = len(profile.expanded_layers())
    if devices > layers:
        raise BadInput(f"--devices is {devices}, expected at most the profile's {layers} layers")
    for name in ("microbatches", "stages_per_device"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise BadInput(f"--{name.replace('_', '-')} is {number}, expected at least 1")
    limit = options.time_limit_s
    if limit is not None and not 0 <= limit < float("inf"):
        raise BadInput(f"--time-limit is {limit}, expected seconds, at least 0")
    host = options.host_mem_bytes
    if host is None and profile.machine.host_memory_bytes is not None:
        host = value_of(profile.machine.host_memory_bytes)
    return replace(
        options,
        devices=devices,
        microbatches=options.microbatches or 4 * devices,
        host_mem_bytes=host,
        time_limit_s=next(s for most, s in TIME_LIMITS if devices <= most) if limit is None else limit,
    )


def layouts(profile: Profile, options: Options) -> list[Layout]:
    """Return the placements that the options allow and the layers permit, the simplest first.

    Layers are cut so that no stage is heavier than need be; where another cut has a lighter heaviest device or needs
    less memory, that placement comes again (cuts.py).
    """
    assert options.devices is not None
    work = [value_of(layer.forward_ns) + fused_ns(layer) for layer in profile.expanded_layers()]
    wanted = options.stages_per_device
    if options.placement != "auto":
        chosen: list[tuple[str, int]] = [
            (options.placement, n) for n in ((wanted,) if wanted else SEVERAL[options.placement])
        ]
    elif wanted is not None:
        chosen = [("linear", 1)] if wanted == 1 else [("loop", wanted), ("v", wanted)]
    else:
        chosen = [(name, n) for name, numbers in SEVERAL.items() for n in numbers]
    fitting = [(name, n) for name, n in chosen if options.devices * n <= len(work)]
    even = [layout(name, options.devices, n, work) for name, n in fitting or chosen[:1]]
    found = even + [other for one in even for other in others(profile, one, options.mem_bytes)]
    if wanted is None and options.placement in ("auto", "linear"):
        found += [by_layers(one) for one in found[:1] if _is_tight(profile, one, options.mem_bytes)]
    return found


def _is_tight(profile: Profile, one: Layout, cap_bytes: int) -> bool:
    """Whether some device may not hold all of one microbatch, and none has too many layers.

    Then recompute, offload and backward go on layer by layer, each layer being a stage.
    """
    most = max(end - begin for begin, end in pairwise(one.cuts))
    return 1 < most <= MOST_NEIGHBOURS and cap_bytes < most_bytes(profile, one)


def instances(profile: Profile, options: Options) -> list[tuple[Layout, Problem]]:
    """Return what is searched: each placement with offloads of whole stages, and of the part that fits the links."""
    assert options.microbatches is not None
    caps = Caps(options.mem_bytes, options.host_mem_bytes)
    freedom = Freedom(options.offload, options.recompute, options.split)
    whole = [(one, build(profile, one, options.microbatches, caps, freedom)) for one in layouts(profile, options)]
    parts = [(one, build(profile, one, options.microbatches, caps, freedom, link_share(p))) for one, p in whole]
    found = whole + [(one, p) for one, p in parts if any(stage.staying for stage in p.stages)]

    def like(one: Layout, share: float) -> Problem | None:
        assert options.microbatches is not None
        is_allowed = options.placement in ("auto", one.name)
        per_device = options.stages_per_device
        if not is_allowed or (per_device is not None and one.stages != per_device * (options.devices or 0)):
            return None
        return build(profile, one, options.microbatches, caps, freedom, share)

    return found + list(seeds.added(options.seeds, profile, found, like))


def in_time(found: list[tuple[Layout, Problem]], options: Options) -> list[tuple[Layout, Problem]]:
    """Return the instances whose schedules can be lowered and verified within the time limit.

    Raises BadInput where there is none, or where each has more than MOST_TASKS ops.
    """
    assert options.time_limit_s is not None
    least = min(problem.tasks for _, problem in found)
    what = f"{options.microbatches} microbatches on {options.devices} devices"
    if least > MOST_TASKS:
        raise BadInput(f"{what} are some {least} ops, expected at most {MOST_TASKS}: plan with fewer --microbatches")
    most_s = max(GRACE_S, LOWERING_SHARE * options.time_limit_s)
    chosen = [one for one in found if one[1].tasks <= MOST_TASKS and lowering_s(one[1].tasks) <= most_s]
    if not chosen:
        needed_s = math.ceil(lowering_s(least) / LOWERING_SHARE)
        raise BadInput(
            f"--time-limit is {options.time_limit_s:g}, expected at least {needed_s}: lowering and verifying the some "
            f"{least} ops of {what} takes most of that"
        )
    return chosen


def link_share(problem: Problem) -> float:
    """Return which share of all activations the busiest link can offload and reload while its devices compute."""
    work = max(sum(problem.stages[s].work for s in problem.stages_of(d)) for d in range(problem.devices))
    busy: dict[int, int] = {}
    for s, stage in enumerate(problem.stages):
        link = problem.link_of[stage.device]
        if link is not None and problem.can_offload(s):
            busy[link] = busy.get(link, 0) + max(stage.offload, stage.reload)
    return min(1.0, work / max(1, *busy.values())) if busy else 1.0


def lower_bound(profile: Profile, options: Options) -> tuple[int, str]:
    """Return what no schedule of any searched placement can beat, in ns, without solving; and its argument's name."""
    chosen = settled(profile, options)
    found = [bounds.best(problem, chosen.objective) for _, problem in instances(profile, chosen)]
    lowest = min(found, key=lambda bound: bound.ticks)
    return lowest.ticks, lowest.name


def compile_schedule(
    profile: Profile, options: Options, on_progress: Callable[[Progress], None] = lambda progress: None
) -> Result:
    """Return the best verified schedule found within the limits.

    Raises Infeasible when no schedule fits, BadInput for impossible options. KeyboardInterrupt during the search ends
    it and returns the best so far.
    """
    with uncollected():
        return _Compilation(profile, settled(profile, options), on_progress).run()


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, no garbage is collected: planning holds millions of records and makes no cycles to speak of."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Compilation:
    def __init__(self, profile: Profile, options: Options, on_progress: Callable[[Progress], None]) -> None:
        assert options.microbatches is not None
        assert options.time_limit_s is not None
        self.profile = profile
        self.options = options
        self.on_progress = on_progress
        self.begin = time.monotonic()
        self.caps = Caps(options.mem_bytes, options.host_mem_bytes)
        attempts = [
            Attempt(
                one,
                problem,
                bounds.best(problem, options.objective),
                fixed=tuple(static_bytes(profile, one, device) for device in range(problem.devices)),
                lowered=partial(promised, profile=profile, layout=one),
            )
            for one, problem in in_time(instances(profile, options), options)
        ]
        limits = Limits(options.objective, options.time_limit_s, options.seed, options.workers, options.reproducible)
        self.incumbents = Incumbents(attempts, options.objective, self._report)
        self.candidates = Candidates(self.incumbents)
        self.budget = Budget(limits, max(attempt.problem.tasks for attempt in attempts))

    def run(self) -> Result:
        """Plan until the time is spent; then certify and verify the best schedule."""
        interrupted = False
        try:
            if self.options.method is not None:
                self._named(self.options.method)
            else:
                self._search()
        except KeyboardInterrupt:
            interrupted = True
        if self.options.method is None:
            with suppress(KeyboardInterrupt):
                spare(self.incumbents, self.budget)
        winner = self.incumbents.winner()
        if winner is None and interrupted:
            raise KeyboardInterrupt
        if winner is None:
            raise NotFound("no schedule was found within the time limit")
        schedule = self._certified(winner)
        notes = tuple(note for attempt in self.incumbents.attempts for note in attempt.notes)
        return Result(schedule, self.options, winner.layout.name, interrupted, time.monotonic() - self.begin, notes)

    def _search(self) -> None:
        """The phases in order, each of which makes incumbents better."""
        seeds.plant(self.incumbents, self.options.seeds)
        any_small = any(map(is_small, self.incumbents.attempts))
        share = QUICK_SHARE if not self.options.search else SMALL_SHARE if any_small else LOCAL_SHARE
        explore(self.incumbents, self.candidates, self.budget, share=share)
        if self.incumbents.winner() is None:
            self._one_at_a_time()
        if self.options.search:
            exact(self.incumbents, self.budget)

    def _named(self, name: str) -> None:
        """Take the schedule `name` of published.METHODS on the best placement that it is for, if it fits."""
        if name not in METHODS:
            raise BadInput(f"--method is {name!r}, expected one of {', '.join(METHODS)}")
        for _ in self.candidates.steps((name,)):
            self._report("published")
        if self.incumbents.winner() is not None:
            return
        tried = self.candidates.tried.get(name, [])
        needed = [one.need.peak_bytes for one in tried if one.need is not None]
        if needed:
            raise Infeasible(
                f"{name} does not fit --mem {show_bytes(self.caps.device_bytes)}: it needs {min(needed)} bytes "
                f"({show_bytes(min(needed))}) on its fullest device"
            )
        reasons = sorted({one.reason for one in tried if one.reason is not None})
        raise BadInput(f"--method {name}: {'; '.join(reasons) or METHODS[name].not_searched}")

    def _one_at_a_time(self) -> None:
        """No heuristic found anything: solve for the least memory; either it fits or the instance is infeasible."""
        from optpipe_compiler.solver.minimum import one_at_a_time

        best: tuple[int, int, Attempt] | None = None
        for attempt in self.incumbents.attempts:
            problem, devices, fixed = attempt.problem, range(attempt.problem.devices), attempt.fixed
            least = max(fixed[d] + max(problem.stages[s].saved for s in problem.stages_of(d)) for d in devices)
            if attempt.is_partial or (best is not None and least >= max(best[0], self.caps.device_bytes + 1)):
                continue  # whole offloads need no more memory; or one stage alone needs more than another placement
            timed = one_at_a_time(attempt.problem, fixed)
            if self.incumbents.keep(attempt, timed, "least memory") is None:
                continue
            needed, _ = attempt.peaks(timed)
            worst = max(devices, key=lambda d: needed[d])
            if best is None or needed[worst] < best[0]:
                best = needed[worst], worst, attempt
        if best is not None and self.incumbents.winner() is None:
            self._refuse(*best)

    def _refuse(self, needed: int, device: int, attempt: Attempt) -> None:
        cap = self.caps.device_bytes
        place = f"placement {attempt.layout.name}, {attempt.layout.stages} stages"
        host = "" if self.caps.host_bytes is None else f" and --host-mem {show_bytes(self.caps.host_bytes)}"
        if needed <= cap:
            raise Infeasible(f"no schedule fits{host}: offloading needs more host memory; raise --host-mem or --mem")
        raise Infeasible(
            f"no schedule fits --mem {show_bytes(cap)}{host}: device {device} is {needed - cap} bytes "
            f"({show_bytes(needed - cap)}) short; the smallest --mem that would do is {needed} "
            f"({show_bytes(needed)}; {place})"
        )

    def _baselines(self) -> dict[str, ir.Baseline]:
        """Compare with papers, stock and compositions: each at its best that fits over the placements it is for."""
        return {name: self._baseline(name) for name in METHODS}

    def _baseline(self, name: str) -> ir.Baseline:
        tried, whose = self.candidates.tried.get(name, []), METHODS[name].kind
        kind = UNSET if whose == "own" else whose  # older tools know three kinds
        could = any(is_for(name, attempt.placed) for attempt in self.incumbents.attempts)
        reasons = [one.reason for one in tried if one.reason is not None]
        reason = next(iter(reasons), "not tried" if could else METHODS[name].not_searched)
        known = [(one, one.need) for one in tried if one.makespan is not None and one.need is not None]
        if not known:
            return ir.Baseline(makespan_ns=None, peak_bytes=None, fits=False, reason=reason, kind=kind)
        best, need = min(known, key=lambda one: (one[1].over is not None, one[0].value))
        remark = "" if best.as_defined is None else _waits(*best.as_defined)
        fits = need.over is None
        return ir.Baseline(makespan_ns=best.makespan, peak_bytes=need.peak_bytes, fits=fits, reason=remark, kind=kind)

    def _bound(self) -> bounds.Bound:
        """Return what no searched placement can beat: the smallest of their bounds."""
        return min((attempt.bound for attempt in self.incumbents.attempts), key=lambda bound: bound.ticks)

    def _report(self, phase: str) -> None:
        winner = self.incumbents.winner()
        best = None if winner is None else winner.best
        reached = None if best is None else self.incumbents.value(best)
        self.on_progress(
            Progress(
                phase=phase,
                incumbent_ns=reached,
                bound_ns=self._bound().ticks if reached is None else min(self._bound().ticks, reached),
                method="" if best is None else best.method,
                elapsed_s=time.monotonic() - self.begin,
            )
        )

    def _certified(self, winner: Attempt) -> ir.Schedule:
        assert winner.best is not None
        bound, reached = self._bound(), self.incumbents.value(winner.best)
        certificate = Certificate(
            objective=self.options.objective,
            outcome="optimal" if bound.ticks >= reached else "feasible",
            lower_bound_ns=min(bound.ticks, reached),
            bound=bound.name,
            baselines=self._baselines(),
            options=_recorded(self.options),
        )
        schedule = lower(winner.best, self.profile, winner.layout, self.caps, certificate)
        violations = verify(schedule, self.profile)
        assert not violations, f"the compiler made a schedule that verify rejects: {violations[0]}"
        return schedule


def _waits(makespan_ns: int, peak_bytes: int) -> str:
    return f"waits for memory; as defined it takes {show_ns(makespan_ns)} and needs {short_bytes(peak_bytes)}"


def _recorded(options: Options) -> dict[str, str | int | float | bool | None]:
    """Return the options that shaped the result, for the file's provenance."""
    return {
        "mem_bytes": options.mem_bytes,
        "host_mem_bytes": options.host_mem_bytes,
        "microbatches": options.microbatches,
        "devices": options.devices,
        "placement": options.placement,
        "stages_per_device": options.stages_per_device,
        "objective": options.objective,
        "offload": options.offload,
        "recompute": options.recompute,
        "split": options.split,
        "time_limit_s": options.time_limit_s,
        "seed": options.seed,
        "reproducible": options.reproducible,
        "method": options.method,
    }
