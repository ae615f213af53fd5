"""What is searched: the placements that the options allow and the layers permit, and the problem of each."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from optpipe_compiler.documents.profile import Profile, value_of
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput
from optpipe_compiler.model import bounds
from optpipe_compiler.model.placement import Layout, in_runs, layout
from optpipe_compiler.model.problem import OPS_OF_A_UNIT, Caps, Freedom, Problem, Slicing, build, static_bytes
from optpipe_compiler.plan import seeds
from optpipe_compiler.plan.budget import LOWERING_SHARE, lowering_s, most_lowering_s
from optpipe_compiler.plan.cuts import earlier, layers_ns, lighter, most_bytes, others, with_ties
from optpipe_compiler.plan.device_order import other_order
from optpipe_compiler.plan.options import Options, Settled, settled
from optpipe_compiler.plan.selective import selectively
from optpipe_compiler.plan.slices import is_asked, largest, slicings
from optpipe_compiler.published import METHODS

if TYPE_CHECKING:
    from collections.abc import Sequence


SEVERAL: dict[str, tuple[int, ...]] = {"linear": (1,), "loop": (2, 3, 4), "v": (2, 4)}
"""Stages per device that are tried for each placement."""
MOST_TASKS = 1_000_000
"""Ops of the largest schedule that is planned: some gigabytes of memory."""
MOST_TASKS_TIMES_DEVICES = 10**8
"""Ops of it times devices. With offloads, recomputations and messages an op stands for at most 4.5 events, a device for
about 4 lanes and pairs: more is beyond what the judge answers (docs/IR.md)."""
MOST_NEIGHBOURS = 8
"""Stages of a device, at most, that run beside each other, or in a loop of the smallest stages. With 4 a plan of 16
layers a device is 1.7 % longer, with 16 1.4 % (docs/ABLATION.md)."""
FINEST_SHARE = 0.12
"""Share of the time limit that lowering and verifying may take of loops of more stages per device than in SEVERAL.
With half of it one is left out, and that plan 1.7 % longer (docs/ABLATION.md)."""


def layouts(profile: Profile, options: Settled) -> list[Layout]:
    """Return the placements that the options allow and the layers permit, the simplest first.

    Layers are cut so that no stage is heavier than need be; where another cut has a lighter heaviest device, needs
    less memory, or has its heavier devices earlier, that placement comes again (cuts.py).
    """
    most = largest(profile, options)
    if options.keep is not None:
        kept = replace(seeds.layout_or_given(options.keep.schedule), selective=frozenset())
        if options.method in METHODS:
            return [kept, *(selectively(profile, [kept], 0) if METHODS[options.method].is_selective else ())]
        return [kept, *(selectively(profile, [kept], options.mem_bytes, most) if options.recompute else ())]
    work = layers_ns(profile)
    wanted = options.stages_per_device
    every = ("loop", "v") if wanted else tuple(SEVERAL)  # of one stage per device all are linear, says `settled`
    names = every if options.placement == "auto" else (options.placement,)
    chosen = [(name, n) for name in names for n in ((wanted,) if wanted else SEVERAL[name])]
    if options.placement in ("auto", "loop") and wanted is None:
        chosen += [("loop", n) for n in _finest(len(work), options)]
    fitting = [(name, n) for name, n in chosen if options.devices * n <= len(work)]
    even = [layout(name, options.devices, n, work) for name, n in fitting or chosen[:1]]
    found = even + [other for one in even for other in others(profile, one)]
    found += earlier(profile, found, options.microbatches)
    if wanted is None and options.placement in ("auto", "linear"):
        saved = [value_of(layer.saved_bytes) for layer in profile.expanded_layers()]
        first = lighter([one for one in found if one.device_of == found[0].device_of], profile)
        below = most_bytes(profile, first, most)
        if first.stages < first.cuts[-1]:
            # where some device may not hold all of one microbatch, recompute, offload and backward go on layer by
            # layer, or by runs of layers, each of which is a stage
            found.append(replace(in_runs(first, saved, MOST_NEIGHBOURS), below_bytes=below))
    found += [tied for one in even if (tied := with_ties(profile, one)) is not None]
    if options.method is None and options.recompute:
        searched = [one for one in found if one.is_searched(options.mem_bytes)]
        found += list(selectively(profile, searched, options.mem_bytes, most))
    elif options.method in METHODS and METHODS[options.method].is_selective:
        found += list(selectively(profile, found, 0))
    return found


def _finest(layers: int, options: Settled) -> list[int]:
    """Return how many stages per device a loop of the smallest stages has, if more than those of SEVERAL.

    The smaller the stages, the shorter are fill and drain, and the finer is what memory holds; even ones pack best.
    Such plans are long: they are left out where lowering them would take the time for the search.
    """
    most = min(MOST_NEIGHBOURS, layers // options.devices)
    more = range(most, max(SEVERAL["loop"]), -1)
    even = [n for n in more if layers % (options.devices * n) == 0]
    found = (even or [*more])[:1]
    tasks = OPS_OF_A_UNIT * options.devices * options.microbatches  # per stage of a device
    return [n for n in found if lowering_s(n * tasks) <= FINEST_SHARE * options.time_limit_s]


def instances(profile: Profile, options: Settled) -> list[tuple[Layout, Problem]]:
    """Return what is searched: each placement with offloads of whole stages, and of the part that fits the links."""
    _refuse_too_large(OPS_OF_A_UNIT * options.devices * options.microbatches, options)
    caps = Caps(options.mem_bytes, options.host_mem_bytes)
    freedom = Freedom(options.offload, options.recompute, options.split)
    placed = layouts(profile, options)
    if options.slices == "auto" and all(max(static_bytes(profile, one)) >= options.mem_bytes for one in placed):
        options = replace(options, slices=1)  # no slice fits beside the weights

    def made(one: Layout, share: float, slicing: Slicing | None) -> Problem:
        return build(profile, one, options.microbatches, caps, freedom, share, slicing)

    is_free = options.placement == "auto" and options.keep is None and options.method is None
    order = other_order(profile.machine, placed[0]) if is_free else None

    def ordered(one: Layout, problem: Problem) -> tuple[Layout, Problem]:
        """Return the placement with the order of the devices in which less is lost at the ends of the step."""
        if order is None or one.order is not None or one.stages == problem.devices or problem.slicing is not None:
            return one, problem
        other = replace(one, order=order)
        every = ((one, problem), (other, made(other, 1.0, None)))
        return min(every, key=lambda pair: bounds.fill_and_drain(pair[1]))

    simplest = placed[0]
    if simplest.stages != options.devices:
        simplest = layout("linear", options.devices, 1, layers_ns(profile))
    loops = [one for one in placed if one.stages == 2 * len(set(simplest.device_of))]
    cuts = slicings(profile, options, lambda slicing: [made(one, 1.0, slicing) for one in (simplest, *loops[:1])])
    numbered = [(one, made(one, 1.0, slicing)) for slicing in cuts for one in placed]
    whole = [ordered(*each) for each in numbered]
    whole += [each for each, (chosen, _) in zip(numbered, whole, strict=True) if chosen is not each[0]]
    shares = ((one, p.slicing, link_share(p)) for one, p in whole)
    parts = [(one, made(one, share, slicing)) for one, slicing, share in shares if share < 1]
    found = whole + [(one, p) for one, p in parts if p.is_partial]
    found = _needed(found, options)

    def like(one: Layout, share: float, slicing: Slicing | None) -> Problem | None:
        if options.keep is not None and not seeds.is_placed(one, options.keep.schedule):
            return None
        by_number = one.order is None or options.keep is not None
        is_allowed = options.placement == "auto" or (options.placement == one.name and by_number)
        per_device = options.stages_per_device
        if not is_allowed or (per_device is not None and one.stages != per_device * options.devices):
            return None
        if one.devices != options.devices or not is_asked(slicing, profile, options):
            return None
        return made(one, share, slicing)

    return found + list(seeds.added(options.seeds + options.kept, profile, options.microbatches, found, like))


def _needed(found: list[tuple[Layout, Problem]], options: Settled) -> list[tuple[Layout, Problem]]:
    """Leave out what is for smaller caps, unless its bound is below all others.

    So no larger cap has a higher bound: it holds for what smaller ones search, too, and for plans that come from there.
    """
    needed = [each for each in found if each[0].is_searched(options.mem_bytes)]
    if needed == found:
        return found
    lowest = bounds.lowest([problem for _, problem in needed], options.objective)
    return [each for each in found if each in needed or bounds.best(each[1], options.objective).ticks < lowest.ticks]


def in_time(found: list[tuple[Layout, Problem]], options: Settled) -> list[tuple[Layout, Problem]]:
    """Return the instances whose schedules can be lowered and verified within the time limit.

    Raises BadInput where there is none, or where each has more ops than can be planned.
    """
    least = min(problem.tasks for _, problem in found)
    _refuse_too_large(least, options)
    most = _most_tasks(options.devices)
    chosen = [one for one in found if one[1].tasks <= most and not _is_longer(one[1], options)]
    if not chosen:
        needed_s = math.ceil(lowering_s(least) / LOWERING_SHARE)
        raise BadInput(
            f"--time-limit is {options.time_limit_s:g}, expected at least {needed_s}: lowering and verifying the some "
            f"{least} ops of {_size(options)} takes most of that"
        )
    return chosen


def beside(found: list[tuple[Layout, Problem]], options: Settled) -> list[tuple[Layout, Problem]]:
    """Return what `in_time` leaves out only for the time that its schedules take, and known schedules may be of.

    The offloads of published ones are whole; those of seeds need not be.
    """
    most = _most_tasks(options.devices)
    long = [one for one in found if one[1].tasks <= most and _is_longer(one[1], options)]
    if options.seeds or options.kept:
        return long
    return [one for one in long if not one[1].is_partial]


def _refuse_too_large(tasks: int, options: Settled) -> None:
    """Raise BadInput where the smallest schedule has so many ops that it is not planned."""
    most = _most_tasks(options.devices)
    if tasks > most:
        raise BadInput(
            f"{_size(options)} are some {tasks} ops, expected at most {most}: plan with fewer --microbatches"
        )


def _size(options: Settled) -> str:
    return f"{counted(options.microbatches, 'microbatch')} on {counted(options.devices, 'device')}"


def _most_tasks(devices: int) -> int:
    """Return the ops of the largest schedule that is planned for so many devices."""
    return min(MOST_TASKS, MOST_TASKS_TIMES_DEVICES // devices)


def _is_longer(problem: Problem, options: Settled) -> bool:
    """Whether lowering and verifying one of its schedules takes most of the time limit."""
    return lowering_s(problem.tasks) > most_lowering_s(options.time_limit_s)


def too_long(found: list[tuple[Layout, Problem]], chosen: list[tuple[Layout, Problem]], options: Settled) -> list[str]:
    """Return a sentence on the placements of which `in_time` chose none; none where there are none."""
    seen = {(one.name, one.stages) for one, _ in chosen}
    others = {(one.name, one.stages): problem for one, problem in found if (one.name, one.stages) not in seen}
    said: dict[str, list[str]] = {}
    for (name, stages), problem in others.items():
        why = (
            f"left out, since they are more than {_most_tasks(options.devices)} ops"
            if problem.tasks > _most_tasks(options.devices)
            else "not searched, published schedules alone are tried there, since lowering and verifying their ops "
            f"takes too much of {options.time_limit_s:g} s"
        )
        said.setdefault(why, []).append(f"{name} of {counted(stages // problem.devices, 'stage')}")
    return [f"{why}: {', '.join(names)} per device" for why, names in said.items()]


def link_share(problem: Problem) -> float:
    """Return which share of all activations the busiest link can offload and reload while its devices compute."""
    busy: dict[int, int] = {}
    for s, stage in enumerate(problem.stages):
        link = problem.link_of[stage.device]
        if link is not None and problem.can_offload(s):
            busy[link] = busy.get(link, 0) + max(stage.offload, stage.reload)
    return min(1.0, problem.busiest / max(1, *busy.values())) if busy else 1.0


class Least(NamedTuple):
    """What no schedule of any searched placement can beat."""

    ns: int
    """Makespan or span."""
    argument: str
    """By which that is known."""
    mem_bytes: int
    """On its fullest device: what that always holds, and one activation."""
    is_smallest: bool = True
    """Whether nothing fits less than `mem_bytes`."""


def lower_bound(profile: Profile, options: Options) -> Least:
    """Return what no schedule of any searched placement can beat, without solving."""
    chosen = settled(profile, options)
    return least_of(profile, instances(profile, chosen), chosen.objective)


def least_of(profile: Profile, found: Sequence[tuple[Layout, Problem]], objective: str) -> Least:
    """Return what no schedule of any of these placements can beat, without solving."""
    lowest = bounds.lowest([problem for _, problem in found], objective)
    needed = min(least_bytes(problem, static_bytes(profile, one)) for one, problem in found)
    return Least(lowest.ticks, lowest.name, needed)


def least_bytes(problem: Problem, fixed: Sequence[int]) -> int:
    """Return bytes that some device needs whatever its order: for what it always holds (`fixed`) and one activation."""
    return max(
        fixed[d] + max(stages[s].saved for stages in problem.by_class for s in problem.stages_of(d))
        for d in range(problem.devices)
    )
