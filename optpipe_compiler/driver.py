"""compile: profile and options in, verified schedule out. Ties the rooms together and owns the time budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from optpipe_compiler import bounds, ir
from optpipe_compiler.errors import BadInput, Infeasible, NotFound
from optpipe_compiler.heuristics import PUBLISHED, NotDefined, published
from optpipe_compiler.heuristics.greedy import greedy, policies
from optpipe_compiler.lower import Certificate, lower
from optpipe_compiler.placement import Layout, layout
from optpipe_compiler.problem import Caps, Freedom, Problem, build, coarsen, fused_ns, static_bytes
from optpipe_compiler.profile import value_of
from optpipe_compiler.schedule import Schedule, value
from optpipe_compiler.simulate import Stuck, peaks, retime
from optpipe_compiler.units import show_bytes
from optpipe_compiler.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.profile import Profile
    from optpipe_compiler.solver.worker import Event

SEARCH_LIMIT = 4000
"""Stages x microbatches up to which the full model is built; above it only the heuristics run."""

SEVERAL = (2,)
"""Stages per device that are tried beside one."""
HEURISTIC_SHARE = 0.3
"""Share of the time limit that the heuristics may take, over all placements."""


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
    search: bool = True
    """Whether to run the exact search after the heuristics."""
    workers: int = 0
    """Search threads; 0: one per core."""


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


@dataclass
class _Attempt:
    """One placement: its exact problem, best schedule and best bound so far (ns)."""

    layout: Layout
    problem: Problem
    bound: bounds.Bound
    best: Schedule | None = None
    file: ir.Schedule | None = None
    proved: bool = False
    margin: list[int] = field(default_factory=list)


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
    host = options.host_mem_bytes
    if host is None and profile.machine.host_memory_bytes is not None:
        host = value_of(profile.machine.host_memory_bytes)
    limit = options.time_limit_s
    return replace(
        options,
        devices=devices,
        microbatches=options.microbatches or 4 * devices,
        host_mem_bytes=host,
        time_limit_s=(60.0 if devices <= 8 else 180.0) if limit is None else limit,
    )


def layouts(profile: Profile, options: Options) -> list[Layout]:
    """Return the placements that the options allow and the layers permit, the simplest first."""
    assert options.devices is not None
    work = [value_of(layer.forward_ns) + fused_ns(layer) for layer in profile.expanded_layers()]
    wanted = options.stages_per_device
    searched = {"linear": (1,), "loop": SEVERAL, "v": SEVERAL}
    if options.placement != "auto":
        chosen = [(options.placement, n) for n in ((wanted,) if wanted else searched[options.placement])]
    elif wanted is not None:
        chosen = [("linear", 1)] if wanted == 1 else [("loop", wanted), ("v", wanted)]
    else:
        chosen = [(name, n) for name, numbers in searched.items() for n in numbers]
    fitting = [(name, n) for name, n in chosen if options.devices * n <= len(work)]
    return [layout(name, options.devices, n, work) for name, n in fitting or chosen[:1]]


def compile_schedule(
    profile: Profile, options: Options, on_progress: Callable[[Progress], None] = lambda progress: None
) -> Result:
    """Return the best verified schedule found within the limits.

    Raises Infeasible when no schedule fits, BadInput for impossible options. KeyboardInterrupt during the search ends
    it and returns the best so far.
    """
    return _Compilation(profile, settled(profile, options), on_progress).run()


class _Compilation:
    def __init__(self, profile: Profile, options: Options, on_progress: Callable[[Progress], None]) -> None:
        assert options.microbatches is not None
        assert options.time_limit_s is not None
        self.profile = profile
        self.options = options
        self.on_progress = on_progress
        self.begin = time.monotonic()
        self.stop_at = self.begin + options.time_limit_s
        self.interrupted = False
        self.caps = Caps(options.mem_bytes, options.host_mem_bytes)
        freedom = Freedom(options.offload, options.recompute, options.split)
        self.attempts = []
        for one in layouts(profile, options):
            problem = build(profile, one, options.microbatches, self.caps, freedom)
            attempt = _Attempt(one, problem, bounds.best(problem, options.objective))
            attempt.margin = [0] * problem.devices
            self.attempts.append(attempt)
        self.baselines = self._published_baselines()

    def run(self) -> Result:
        try:
            for attempt in self.attempts:
                self._heuristics(attempt)
            if not any(attempt.best for attempt in self.attempts):
                self._one_at_a_time()
            if self.options.search:
                self._search()
        except KeyboardInterrupt:
            self.interrupted = True
        winner = self._winner()
        if winner is None:
            raise NotFound("interrupted before the first schedule was found")
        schedule = self._certified(winner)
        return Result(schedule, self.options, winner.layout.name, self.interrupted, time.monotonic() - self.begin)

    # -- candidates ---------------------------------------------------------------------------------------------

    def _published_baselines(self) -> dict[str, ir.Baseline]:
        """Evaluate each published schedule on the first placement that it is defined for, through the lowering."""
        result = {}
        for name in PUBLISHED:
            reason = "no placement"
            for attempt in self.attempts:
                try:
                    timed = published(attempt.problem, name)
                except NotDefined as error:
                    reason = str(error)
                    continue
                devices = self._lowered(attempt, timed).devices
                peak = max(device.peak_bytes for device in devices)
                fits = peak <= self.caps.device_bytes
                result[name] = ir.Baseline(makespan_ns=timed.makespan, peak_bytes=peak, fits=fits)
                break
            else:
                result[name] = ir.Baseline(makespan_ns=None, peak_bytes=None, fits=False, reason=reason)
        return result

    def _candidates(self, attempt: _Attempt) -> Iterator[Schedule]:
        """Yield the published schedules that fit by plan, then greedy ones while their share of the time lasts."""
        problem = self._tightened(attempt)
        for name in PUBLISHED:
            try:
                timed = published(problem, name)
            except NotDefined:
                continue
            if all(peak <= budget for peak, budget in zip(peaks(timed), problem.budget, strict=True)):
                yield timed
        share = HEURISTIC_SHARE * (self.stop_at - self.begin) / len(self.attempts)
        until = time.monotonic() + share
        for policy in policies(problem):
            if not self.options.reproducible and time.monotonic() > until:
                return
            try:
                timed = greedy(problem, policy)
                yield min(timed, retime(timed, problem), key=self._value)
            except Stuck:
                continue

    def _tightened(self, attempt: _Attempt) -> Problem:
        budget = tuple(b - m for b, m in zip(attempt.problem.budget, attempt.margin, strict=True))
        return replace(attempt.problem, budget=budget)

    def _heuristics(self, attempt: _Attempt) -> None:
        """Try all candidates; where messages break the cap of every one, plan again with that much less memory."""
        for _ in range(6):
            excess: list[int] | None = None
            for timed in self._candidates(attempt):
                if attempt.best is None or self._value(timed) < self._value(attempt.best):
                    over = self._accept(attempt, timed)
                    if over is not None:
                        excess = over if excess is None else list(map(min, excess, over))
            if attempt.best is not None or excess is None:
                return
            attempt.margin = [m + e for m, e in zip(attempt.margin, excess, strict=True)]

    def _one_at_a_time(self) -> None:
        """No heuristic found anything: solve for the least memory; either it fits or the instance is infeasible."""
        from optpipe_compiler.solver.minimum import one_at_a_time

        best: tuple[int, int, _Attempt] | None = None
        for attempt in self.attempts:
            devices = range(attempt.problem.devices)
            fixed = tuple(static_bytes(self.profile, attempt.layout, d) for d in devices)
            timed = one_at_a_time(attempt.problem, fixed)
            if self._accept(attempt, timed) is None:
                continue
            needed = [device.peak_bytes for device in self._lowered(attempt, timed).devices]
            worst = max(devices, key=lambda d: needed[d])
            if best is None or needed[worst] < best[0]:
                best = needed[worst], worst, attempt
        if best is not None and not any(attempt.best for attempt in self.attempts):
            self._refuse(*best)

    def _refuse(self, needed: int, device: int, attempt: _Attempt) -> None:
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

    # -- exact search -------------------------------------------------------------------------------------------

    def _search(self) -> None:
        """Run the full model on each placement, the most promising first, sharing the time that is left."""
        order = sorted((a for a in self.attempts if a.best), key=lambda a: self._value(a.best))  # type: ignore[arg-type]
        for number, attempt in enumerate(order):
            tasks = len(attempt.problem.stages) * attempt.problem.microbatches
            left = self.stop_at - time.monotonic()
            if left <= 0.5 or tasks > SEARCH_LIMIT or self._closed(attempt):
                continue
            self._full_model(attempt, left / (len(order) - number))

    def _closed(self, attempt: _Attempt) -> bool:
        """Whether the bound says that this placement cannot beat what is there already."""
        winner = self._winner()
        return winner is not None and attempt.bound.ticks >= self._value(winner.best)  # type: ignore[arg-type]

    def _full_model(self, attempt: _Attempt, seconds: float) -> None:
        from optpipe_compiler.solver.search import search
        from optpipe_compiler.solver.worker import Request

        assert attempt.best is not None
        exact = self._tightened(attempt)
        coarse = coarsen(exact, attempt.best.makespan)
        try:
            hint = retime(attempt.best, coarse)
        except Stuck:
            return

        def on_event(event: Event) -> None:
            if event.starts is not None:
                timed = retime(Schedule(coarse, "cp-sat", event.starts), exact)
                if attempt.best is None or self._value(timed) < self._value(attempt.best):
                    self._accept(attempt, timed)
            if event.bound is not None and not any(attempt.margin):
                ns = int(event.bound * coarse.tick_ns / coarse.stretch)
                if ns > attempt.bound.ticks:
                    attempt.bound = bounds.Bound("cp-sat", ns)
            self._report(f"search {attempt.layout.name}")

        request = Request(
            problem=coarse,
            hint=hint,
            objective=self.options.objective,
            time_limit_s=seconds,
            seed=self.options.seed,
            workers=self.options.workers,
            reproducible=self.options.reproducible,
        )
        search(request, on_event, time.monotonic() + seconds)

    # -- results ------------------------------------------------------------------------------------------------

    def _value(self, timed: Schedule) -> int:
        return value(timed, self.options.objective)

    def _winner(self) -> _Attempt | None:
        done = [attempt for attempt in self.attempts if attempt.best is not None]
        return min(done, key=lambda a: self._value(a.best), default=None)  # type: ignore[arg-type]

    def _lowered(self, attempt: _Attempt, timed: Schedule) -> ir.Schedule:
        exact = Schedule(attempt.problem, timed.method, timed.starts)
        draft = Certificate(self.options.objective, "feasible", 0, "none", {}, {})
        return lower(exact, self.profile, attempt.layout, self.caps, draft)

    def _accept(self, attempt: _Attempt, timed: Schedule) -> list[int] | None:
        """Keep `timed` if its file keeps to the caps: None; else the bytes by which each device is over."""
        file = self._lowered(attempt, timed)
        over = [max(0, device.peak_bytes - self.caps.device_bytes) for device in file.devices]
        host = sum(device.host_bytes for device in file.devices)
        if any(over) or (self.caps.host_bytes is not None and host > self.caps.host_bytes):
            return over
        attempt.best, attempt.file = Schedule(attempt.problem, timed.method, timed.starts), file
        self._report("heuristics")
        return None

    def _bound(self) -> bounds.Bound:
        """Return what no searched placement can beat: the smallest of their bounds."""
        return min((attempt.bound for attempt in self.attempts), key=lambda bound: bound.ticks)

    def _report(self, phase: str) -> None:
        winner = self._winner()
        best = None if winner is None or winner.best is None else winner.best
        self.on_progress(
            Progress(
                phase=phase,
                incumbent_ns=None if best is None else self._value(best),
                bound_ns=min(self._bound().ticks, self._value(best)) if best else self._bound().ticks,
                method="" if best is None else best.method,
                elapsed_s=time.monotonic() - self.begin,
            )
        )

    def _certified(self, winner: _Attempt) -> ir.Schedule:
        assert winner.best is not None
        bound, reached = self._bound(), self._value(winner.best)
        certificate = Certificate(
            objective=self.options.objective,
            outcome="optimal" if bound.ticks >= reached else "feasible",
            lower_bound_ns=min(bound.ticks, reached),
            bound=bound.name,
            baselines=self.baselines,
            options=_recorded(self.options),
        )
        schedule = lower(winner.best, self.profile, winner.layout, self.caps, certificate)
        violations = verify(schedule, self.profile)
        assert not violations, f"the compiler made a schedule that verify rejects: {violations[0]}"
        return schedule


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
    }
