"""Which degrees of parallelism: every way to spread a model over so many GPUs is bounded, the most promising planned.

A way is a pipeline, tensor and data parallel degree, a microbatch size and a number of slices. Its step cannot be
shorter than the work of its microbatches over its devices and the exchange of gradients, nor than what `compile`
proves, which takes longer to find out. The way with the least bound is next: its better bound is proved, or, where that
is done, it is planned; until the least bound is above the time of the last of the best. So nothing that was left out
can be among the best, unless a longer search had made its plan that much better than the plans of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import isqrt
from typing import TYPE_CHECKING

from optpipe_compiler.compiler import Options, lower_bound, settled
from optpipe_compiler.documents.profile import value_of
from optpipe_compiler.documents.units import counted, show_bytes
from optpipe_compiler.errors import BadInput, Infeasible
from optpipe_compiler.published import METHODS
from optpipe_compiler.study.facts import facts
from optpipe_compiler.study.planned import Instance, Planned, plan
from optpipe_compiler.study.pool import answers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.study.pool import Pool

PER_DEVICE = 4
"""Microbatches per device that are planned at most; a longer step repeats its steady state."""
SMALL = 2048
"""Microbatches times devices and slices that are planned in any time limit; larger instances get LARGE_S."""
LARGE_S = 10.0
PROVED = 10_000
"""Microbatches of a step that a bound is proved for at most: more take at least as long, and longer to prove."""
LONGEST = 64
"""Devices of a pipeline at most."""
HOLDS_ALL = ("gpipe", "gpipe-recompute", "bfs")
"""Known schedules that hold something of every microbatch before the first backward: of a longer step, more."""
NEARLY_FULL = 0.97
"""A device is said to be limited by memory from this share of the cap on."""
ONE_AT_A_TIME = "one-at-a-time"
"""How the name of a plan begins that was made where nothing else fits."""
WORTH_SAYING = 0.05
"""Shares of the step below this limit nothing."""


@dataclass(frozen=True, order=True)
class Degrees:
    """One way to spread a step over the GPUs."""

    pipeline: int
    tensor: int
    data: int
    microbatch_size: int
    """Sequences."""
    microbatches: int
    """Of one replica in one step."""
    slices: int = 1
    """Of every sequence."""


@dataclass(frozen=True)
class Costs:
    """What a way costs. Times are in ns."""

    profile: Profile
    """Of one replica's pipeline, one device for each tensor-parallel group."""
    tensor_ns: int
    """Collectives of tensor parallelism in all layers, forward and backward, for one microbatch."""
    data_ns: int
    """Exchange of gradients and weights between replicas in one step; overlaps nothing."""
    again_ns: int = 0
    """What selective recompute of all layers adds to `tensor_ns`."""


@dataclass(frozen=True, order=True)
class Candidate:
    """A way, and what its step takes at least, in ns."""

    bound_ns: int
    degrees: Degrees
    costs: Costs = field(compare=False)
    is_proved: bool = field(default=False, compare=False)
    """Whether the bound is the one that `compile` proves."""


@dataclass(frozen=True)
class Configuration:
    """A way that was planned. Shares are of the step, averaged over the devices."""

    degrees: Degrees
    step_ns: int
    bound_ns: int
    tokens_per_s: float
    peak_bytes: int
    """Of the fullest device, activations and all that stays there."""
    stages_per_device: int
    method: str
    planned_microbatches: int
    bubble_share: float
    tensor_share: float
    data_share: float
    recompute_share: float
    offloaded_bytes: int
    """By all devices of one pipeline, in the step that was planned, there and back."""
    limits: list[str]


@dataclass(frozen=True)
class Advice:
    """The best ways, best first, and how many there were."""

    configurations: list[Configuration]
    considered: int
    """Ways that divide everything evenly."""
    too_large: int
    """Of these: weights and reserve alone do not fit."""
    planned: int
    infeasible: int
    """Planned, but nothing fits, or the method alone does not or is not defined."""
    next_bound_ns: int | None
    """The bound of the best way that was not planned; None: all were."""


@dataclass(frozen=True)
class Question:
    """What is asked. `batch`: sequences in one step of all replicas."""

    gpus: int
    gpus_per_node: int
    batch: int
    sequence: int
    mem_bytes: int
    microbatch_sizes: tuple[int, ...] = (1, 2, 4)
    slices: tuple[int, ...] = (1,)
    method: str | None = None
    """Plan with this known schedule alone."""
    best: int = 5
    time_limit_s: float = 0.0
    """Of the search for one plan."""
    jobs: int = 1

    def __post_init__(self) -> None:
        """Raise BadInput for a method that is none, or for which there are no `slices`."""
        if self.method is None:
            return
        if self.method not in METHODS:
            raise BadInput(f"--method is {self.method!r}, expected one of {', '.join(METHODS)}")
        if METHODS[self.method].sliced and max(self.slices) == 1:
            raise BadInput(f"--method {self.method} is for microbatches cut into slices, expected another --slices")
        if not METHODS[self.method].sliced and 1 not in self.slices:
            raise BadInput(f"--method {self.method} is for whole microbatches, expected --slices with 1 among them")


def ways(question: Question, layers: int, divided: Iterable[int]) -> Iterator[Degrees]:
    """Yield every way that divides GPUs and batch evenly; tensor-parallel groups lie within a node and divide `divided`
    (heads, widths); a device has at least one layer. Sequences are cut into slices where microbatches are smallest
    already, and where there is a pipeline to fill."""
    numbers = tuple(divided)
    for tensor in _divisors(question.gpus):
        if question.gpus_per_node % tensor or any(number % tensor for number in numbers):
            continue
        for pipeline in _divisors(question.gpus // tensor):
            data = question.gpus // tensor // pipeline
            if pipeline > min(layers, LONGEST):
                continue
            for size in question.microbatch_sizes:
                count, left = divmod(question.batch, data * size)
                if left:
                    continue
                for slices in question.slices:
                    is_smallest = size == min(question.microbatch_sizes) and pipeline > 1
                    if slices == 1 or (is_smallest and slices <= question.sequence):
                        yield Degrees(pipeline, tensor, data, size, count, slices)


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def advise(
    question: Question,
    degrees: Iterable[Degrees],
    costs_of: Callable[[Degrees], Costs],
    on_planned: Callable[[int, Configuration | None], None] = lambda number, found: None,
    pool: Pool = answers,
    on_ways: Callable[[int], None] = lambda considered: None,
) -> Advice:
    """Return the best configurations; raise BadInput where there is no way, Infeasible where none fits.

    Ways with slices are left out where the costs know none, or the method is for whole microbatches."""
    is_cut = None if question.method is None else METHODS[question.method].sliced
    candidates, too_large, every = [], 0, list(degrees)
    for one in every:
        if is_cut not in (None, one.slices > 1):
            continue
        costs = costs_of(one)
        if one.slices > 1 and any(layer.slices is None for layer in costs.profile.layers):
            continue
        if _least_bytes(costs.profile) > question.mem_bytes:
            too_large += 1
        else:
            candidates.append(Candidate(_bound(one, costs), one, costs))
    if not candidates and not too_large:
        if is_cut is not None and any(one.slices == 1 for one in every):
            raise BadInput(f"--method {question.method} is for microbatches cut into slices, expected another --slices")
        sizes = ",".join(map(str, question.microbatch_sizes))
        raise BadInput(
            f"--gpus is {question.gpus}, --global-batch {question.batch} and --microbatch-sizes {sizes}: no degrees of "
            "parallelism make so many GPUs, expected a batch that replicas times a microbatch divide, pipelines of at "
            f"most {LONGEST} devices and the model's layers, tensor parallelism within a node that heads and widths "
            "divide"
        )
    considered = len(candidates) + too_large
    on_ways(considered)
    heapify(candidates)
    found: list[Configuration] = []
    reasons: list[str] = []
    asked: dict[int, tuple[Instance, Candidate]] = {}
    answered = 0
    for instance, planned in pool(_planned, _promising(candidates, found, question, asked), question.jobs):
        answered += 1
        candidate = asked[id(instance)][1]
        planned = _of_all(planned, candidate.degrees, question)
        configuration = _configuration(candidate, planned, question)
        if configuration is None:
            reasons.append(planned.reason)
        else:
            found.append(configuration)
        on_planned(answered, configuration)
    best = sorted(found, key=lambda one: one.step_ns)[: question.best]
    if not best:
        alone = "" if question.method is None else f" with {question.method} alone"
        raise Infeasible(
            f"no way to spread the model over {counted(question.gpus, 'GPU')} fits "
            f"{show_bytes(question.mem_bytes)} each{alone}: of "
            f"{considered}, weights and reserve alone are too large in {too_large}"
            + (f"; the most promising: {reasons[0]}" if reasons else "")
        )
    return Advice(
        configurations=best,
        considered=considered,
        too_large=too_large,
        planned=answered,
        infeasible=len(reasons),
        next_bound_ns=candidates[0].bound_ns if candidates else None,
    )


def _promising(
    candidates: list[Candidate],
    found: list[Configuration],
    question: Question,
    asked: dict[int, tuple[Instance, Candidate]],
) -> Iterator[Instance]:
    """Take from the heap what to plan next, when it is asked for, until the bound says that nothing better is left.

    `asked` gets the instances by identity, and whose they are."""
    while candidates:
        steps = sorted(configuration.step_ns for configuration in found)
        if len(steps) >= question.best and candidates[0].bound_ns > steps[question.best - 1]:
            return
        one = heappop(candidates)
        options = Options(
            mem_bytes=question.mem_bytes,
            microbatches=min(one.degrees.microbatches, PROVED),
            devices=one.degrees.pipeline,
            time_limit_s=question.time_limit_s,
            workers=1,
            reproducible=True,
            search=False,
            slices=one.degrees.slices,
            method=question.method,
        )
        profile = one.costs.profile
        if not one.is_proved:
            proved = lower_bound(profile, settled(profile, options)).ns
            bound_ns = max(one.bound_ns, proved + one.costs.data_ns)
            heappush(candidates, replace(one, bound_ns=bound_ns, is_proved=True))
            continue
        count = _planned_microbatches(one.degrees)
        limit_s = question.time_limit_s
        if count * one.degrees.pipeline * one.degrees.slices > SMALL:
            limit_s = max(limit_s, LARGE_S)
        further = one.degrees.microbatches - count
        options = replace(options, microbatches=count, further=further, time_limit_s=limit_s)
        instance = Instance(profile, settled(profile, options))
        asked[id(instance)] = instance, one  # kept, so that no other gets its id
        yield instance


def _planned(instance: Instance) -> Planned:
    """Plan; that a known schedule is not defined for a way is an answer."""
    try:
        return plan(instance)
    except BadInput as error:
        if instance.options.method is None:
            raise
        return Planned("infeasible", None, 0, reason=str(error))


def _of_all(planned: Planned, degrees: Degrees, question: Question) -> Planned:
    """Return the plan with what it holds in the whole step, or that this does not fit, where the only schedule that is
    asked for holds more of a longer step than of the microbatches that were planned."""
    if planned.schedule is None or question.method not in HOLDS_ALL:
        return planned
    schedule = planned.schedule.schedule
    more = degrees.microbatches - schedule.setup.microbatches
    held = [0] * schedule.setup.devices
    for stage in schedule.stages:
        recomputed = question.method == "gpipe-recompute"
        held[stage.device] += stage.checkpoint_bytes[0] if recomputed else sum(stage.saved_bytes)
    peak = max(device.peak_bytes + more * held[device.device] for device in schedule.devices)
    if peak <= question.mem_bytes:
        return replace(planned, peak_bytes=peak)
    reason = f"{question.method} needs {show_bytes(peak)} for {counted(degrees.microbatches, 'microbatch')}"
    return Planned("infeasible", None, planned.bound_ns, reason=reason)


def _planned_microbatches(degrees: Degrees) -> int:
    """Return how many of the step's microbatches are planned: fewer per device in long pipelines and where there are
    many slices, but a microbatch or slice for each device; a multiple of the devices where there are more, since
    interleaved schedules are for these alone."""
    devices, slices = degrees.pipeline, degrees.slices
    small = SMALL // (devices * slices)
    small = max(-(-devices // slices), small if small < devices else small - small % devices)
    return min(degrees.microbatches, PER_DEVICE * devices, small)


def _least_bytes(profile: Profile) -> int:
    """What the fullest device holds at least, however the layers are cut: an even share of the weights, the reserve."""
    layers = profile.expanded_layers()
    static = [value_of(layer.static_bytes) for layer in layers]
    reserve = value_of(profile.machine.reserve_bytes)
    return reserve + max(-(-sum(static) // profile.machine.devices), max(static))


def _work_ns(profile: Profile) -> int:
    """What all layers compute for one microbatch, with the faster of a whole backward and its halves."""
    total = 0
    for layer in profile.expanded_layers():
        halves = value_of(layer.backward_input_ns) + value_of(layer.backward_weight_ns)
        backward = halves if layer.backward_ns is None else min(halves, value_of(layer.backward_ns))
        total += value_of(layer.forward_ns) + backward
    return total


def _bound(degrees: Degrees, costs: Costs) -> int:
    """All work is done by somebody: the mean device computes microbatches x work / devices."""
    return degrees.microbatches * _work_ns(costs.profile) // degrees.pipeline + costs.data_ns


def _configuration(candidate: Candidate, planned: Planned, question: Question) -> Configuration | None:
    if planned.schedule is None or planned.value_ns is None:
        return None
    schedule, degrees, costs = planned.schedule.schedule, candidate.degrees, candidate.costs
    count = schedule.setup.microbatches
    pipeline_ns = planned.value_ns + planned.further_ns
    step_ns = max(pipeline_ns + costs.data_ns, candidate.bound_ns)
    about = facts(planned.schedule, "")
    work = (1 - schedule.forecast.bubble_fraction) * schedule.forecast.makespan_ns / count * degrees.microbatches
    again = about.recompute_fraction or 0.0
    selective = sum(len(stage.selective_layers) for stage in schedule.stages) / schedule.setup.layers
    tensor = (costs.tensor_ns + selective * costs.again_ns) * degrees.microbatches / degrees.pipeline
    shares = {
        "bubble": max(0.0, (pipeline_ns - work) / step_ns),
        "tensor": tensor / step_ns,
        "data": costs.data_ns / step_ns,
        "recompute": again * work / step_ns,
    }
    offloaded = about.host_traffic_bytes or 0
    peak = planned.peak_bytes or 0
    return Configuration(
        degrees=degrees,
        step_ns=step_ns,
        bound_ns=candidate.bound_ns,
        tokens_per_s=question.batch * question.sequence * 1e9 / step_ns,
        peak_bytes=peak,
        stages_per_device=len(schedule.stages) // degrees.pipeline,
        method=planned.method,
        planned_microbatches=count,
        offloaded_bytes=offloaded,
        limits=_limits(shares, peak, question.mem_bytes, offloaded, planned.method),
        **{f"{name}_share": share for name, share in shares.items()},
    )


def _limits(shares: dict[str, float], peak: int, cap: int, offloaded: int, method: str) -> list[str]:
    """Say what the step is longer for than its work, the largest first, and whether memory is full, or so short that
    no known schedule fits."""
    names = {
        "bubble": "bubble",
        "tensor": "tensor-parallel collectives",
        "data": "gradients between replicas",
        "recompute": "recompute",
    }
    found = [
        f"{names[name]} {share:.0%}"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= WORTH_SAYING
    ]
    if peak >= NEARLY_FULL * cap:
        found.append("memory, with offload" if offloaded else "memory")
    if method.startswith(ONE_AT_A_TIME):
        found.append("no known schedule fits, --time-limit searches")
    return found or ["nothing above 5%"]
