"""What binds in a schedule: where its devices idle, and what each variation of its instance could and did save."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from optpipe_compiler import compiler
from optpipe_compiler.forecast import analyse
from optpipe_compiler.study.planned import Instance, Planned, options_of, plan
from optpipe_compiler.study.pool import answers
from optpipe_compiler.study.variations import Variation, variations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.study.pool import Pool
    from optpipe_compiler.study.variations import Effect, Family


DECIDED = 0.005
"""Share of the time per microbatch that may lie between plan and bound where a question counts as answered."""


@dataclass(frozen=True)
class Idle:
    """The share of the makespan that a device idles, and for what: (cause, what binds, share), most first."""

    device: int
    fraction: float
    causes: tuple[tuple[str, str, float], ...]


@dataclass(frozen=True)
class WhatIf:
    """What a change saves, as shares of the time per microbatch; negative: what it costs.

    Where microbatches are of unequal length, per token.
    """

    family: Family
    text: str
    effect: Effect
    amount: str
    at_most: float
    """No schedule of the changed instance saves more."""
    found: float | None
    """None: no schedule was found."""
    value_ns: int | None
    bound_ns: int
    microbatches: int
    outcome: str
    finished: bool
    """Whether the plan is unlikely to get much better with more time (study/planned.py)."""

    @property
    def decided(self) -> bool:
        """Whether plan and bound leave less than `DECIDED` open."""
        return self.outcome == "infeasible" or (self.found is not None and self.at_most - self.found < DECIDED)


@dataclass(frozen=True)
class Explanation:
    """Everything that `explain` says; values are makespans or spans, as `objective` says."""

    objective: str
    devices: int
    microbatches: int
    cap_bytes: int
    value_ns: int
    """Of the schedule itself."""
    best_ns: int
    """The best known value of the unchanged instance, which the savings are measured against."""
    bound_ns: int
    """What no schedule of the unchanged instance can beat."""
    time_limit_s: float
    """Of each search for a change, of which there may be up to study/planned.ROUNDS."""
    finished: bool
    """Whether the best plan of the unchanged instance is."""
    bubble_fraction: float
    slices: int | Literal["auto"]
    """Into which every change cuts microbatches; auto: searched, the schedule was compiled so."""
    lengths: tuple[int, ...] | None
    """Tokens of each microbatch; None: all are as long as the costs are for."""
    idle: tuple[Idle, ...]
    what_ifs: tuple[WhatIf, ...]
    left: int = 0
    """Changes that were not planned: someone interrupted."""


def instance_of(checked: ir.Checked, profile: Profile, name: str, time_limit_s: float) -> Instance:
    """Return the instance that the schedule was compiled for; raise BadInput for options that are none.

    Where another schedule's placement was kept (`--keep-placement`), it is kept again: it is the schedule's own.
    """
    schedule = checked.schedule
    chosen = replace(options_of(schedule, name), time_limit_s=time_limit_s, workers=1)
    if "keep_placement" in schedule.provenance.options:
        chosen = replace(chosen, keep=checked, placement="auto", stages_per_device=None)
    return Instance(profile, compiler.settled(profile, chosen))


def explain(
    checked: ir.Checked,
    instance: Instance,
    jobs: int,
    on_change: Callable[[Variation], None] = lambda variation: None,
    pool: Pool | None = None,
) -> Explanation:
    """Plan every change of the instance, which must be the schedule's, and set it against the schedule.

    Each starts from the best schedule of the unchanged instance. Interrupted, it returns what there is by then; before
    the unchanged instance is planned there is nothing, and KeyboardInterrupt goes on.
    """
    asked = listed(checked.schedule, instance)
    found: dict[int, Planned] = {}
    base, *others = list(enumerate(variation.instance for variation in asked))
    for part, workers in (([base], jobs), (others, 1)):  # the unchanged instance first: there the others start from
        seed = (found[0].schedule if found else None) or checked
        kept = [(number, replace(each, cached=instance.cached)) for number, each in part]
        seeded = [(number, _with(each, seeds=(seed,), workers=workers)) for number, each in kept]
        try:
            for (number, _), planned in (pool or answers)(_plan, seeded, jobs):
                found[number] = planned
                on_change(asked[number])
        except KeyboardInterrupt:
            if not found:
                raise
            break
    numbers = sorted(found)
    explanation = summed_up(checked.schedule, [asked[n] for n in numbers], [found[n] for n in numbers])
    return replace(explanation, left=len(asked) - len(found))


def _with(instance: Instance, **options: Any) -> Instance:
    return replace(instance, options=replace(instance.options, **options))


def listed(schedule: ir.Schedule, instance: Instance) -> list[Variation]:
    """Return the changes that are worth asking about for this schedule."""
    work = [0] * schedule.setup.devices
    for cost in schedule.forecast.stages:
        work[schedule.stages[cost.stage].device] += cost.forward_ns + cost.backward_ns
    offloads = any(device.d2h for device in schedule.devices)
    selective = any(stage.selective_layers for stage in schedule.stages)
    return list(variations(instance, offloads=offloads, selective=selective, uneven=len(set(work)) > 1))


def _plan(numbered: tuple[int, Instance]) -> Planned:
    return plan(numbered[1])


def summed_up(schedule: ir.Schedule, asked: Sequence[Variation], found: Sequence[Planned]) -> Explanation:
    """Set the answers against the schedule. What is valid or proven in one instance is carried to those it holds for.

    A schedule of a restricted instance is one of the instance itself, and that one of every relaxed instance; bounds
    hold the other way round, but not where each instance chooses its own numbers of slices. Larger caps relax smaller
    ones.
    """
    forecast = schedule.forecast
    value = forecast.value_ns
    effects = [variation.effect for variation in asked]
    cap = schedule.setup.cap_bytes
    inner = [one.value_ns for each, one in zip(asked, found, strict=True) if _is_inner(each, one, cap)]
    best = min([value, *(reached for reached in inner if reached is not None)])
    wider = ("same",) if asked[0].instance.options.slices == "auto" else ("same", "relaxed")
    outer = [one.bound_ns for one, effect in zip(found, effects, strict=True) if effect in wider]
    bound = min(best, max([forecast.lower_bound_ns, *outer]))
    found = _carried(asked, found, best, bound)
    each = best / _work(asked[0])
    return Explanation(
        objective=forecast.objective,
        devices=schedule.setup.devices,
        microbatches=schedule.setup.microbatches,
        cap_bytes=schedule.setup.cap_bytes,
        value_ns=value,
        best_ns=best,
        bound_ns=bound,
        time_limit_s=asked[0].instance.options.time_limit_s or 0.0,
        finished=found[0].finished,
        bubble_fraction=forecast.bubble_fraction,
        slices=asked[0].instance.options.slices,
        lengths=schedule.setup.lengths,
        idle=idle(schedule),
        what_ifs=tuple(_what_if(c, one, each) for c, one in zip(asked, found, strict=True) if c.effect != "same"),
    )


def _is_inner(variation: Variation, planned: Planned, cap_bytes: int) -> bool:
    """Whether the plan is one of the instance itself: with more memory one may be found that needs no more."""
    needs_no_more = planned.peak_bytes is not None and planned.peak_bytes <= cap_bytes
    return variation.effect in ("same", "restricted") or (variation.family == "memory" and needs_no_more)


def _carried(asked: Sequence[Variation], found: Sequence[Planned], best: int, bound: int) -> list[Planned]:
    """Return the answers with the schedules and bounds of other instances that hold for them, too."""
    result = list(found)
    for number, variation in enumerate(asked):
        if variation.effect == "relaxed":
            result[number] = _at_least_as_good(result[number], best)
        elif variation.effect == "restricted" and variation.instance.options.slices != "auto":
            result[number] = replace(result[number], bound_ns=max(bound, result[number].bound_ns))
    memory = [number for number, variation in enumerate(asked) if variation.family == "memory"]
    for smaller, larger in reversed(list(pairwise(memory))):  # a plan may need less than its cap
        peak, value = result[larger].peak_bytes, result[larger].value_ns
        if value is not None and peak is not None and peak <= asked[smaller].instance.options.mem_bytes:
            result[smaller] = _at_least_as_good(result[smaller], value, peak)
    for smaller, larger in pairwise(memory):
        result[larger] = _at_least_as_good(result[larger], result[smaller].value_ns or best)
    for smaller, larger in reversed(list(pairwise(memory))) if asked[0].instance.options.slices != "auto" else ():
        higher = max(result[smaller].bound_ns, result[larger].bound_ns)
        result[smaller] = replace(result[smaller], bound_ns=higher)
    return result


def _at_least_as_good(planned: Planned, value: int, peak: int | None = None) -> Planned:
    if planned.value_ns is not None and planned.value_ns <= value:
        return planned
    return replace(planned, value_ns=value, outcome="feasible", reason="", peak_bytes=peak)


def _what_if(variation: Variation, planned: Planned, best_each: float) -> WhatIf:
    def saved(value: int) -> float:
        return 1 - value / _work(variation) / best_each if best_each else 0.0

    return WhatIf(
        family=variation.family,
        text=variation.text,
        effect=variation.effect,
        amount=variation.amount,
        at_most=saved(planned.bound_ns),
        found=None if planned.value_ns is None else saved(planned.value_ns),
        value_ns=planned.value_ns,
        bound_ns=planned.bound_ns,
        microbatches=variation.instance.options.microbatches,
        outcome=planned.outcome,
        finished=planned.finished,
    )


def _work(variation: Variation) -> int:
    """Return what a step does: its microbatches, or their tokens where they are of unequal length."""
    options = variation.instance.options
    return options.microbatches if options.lengths is None else sum(options.lengths)


def idle(schedule: ir.Schedule) -> tuple[Idle, ...]:
    """Return each device's idle shares by cause and what binds."""
    analysis = analyse(schedule)
    whole = max(1, analysis.end_ns - analysis.begin_ns)
    found = []
    for device in range(schedule.setup.devices):
        lost: dict[tuple[str, str], int] = {}
        for gap in analysis.gaps:
            if gap.device == device:
                key = gap.cause.value, gap.resource
                lost[key] = lost.get(key, 0) + gap.length_ns
        ranked = sorted(lost.items(), key=lambda item: (-item[1], item[0]))
        causes = tuple((*key, length / whole) for key, length in ranked)
        found.append(Idle(device, sum(lost.values()) / whole, causes))
    return tuple(found)
