"""Earlier schedules as first candidates: their orders and what they do with activations, timed on the new instance.

A seed counts where the instance has its placement and permits what it does. A placement that is not searched by itself
is added, if the options permit it. The result is then no worse than a seed of as many microbatches that still fits. For
other microbatches its order is shortened or repeated in the middle; for other devices it is where the search starts.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UnsetType

from optpipe_compiler import machine
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import Profile, value_of
from optpipe_compiler.model.placement import PATTERNS, Layout, stage_devices
from optpipe_compiler.model.problem import Problem, Slicing
from optpipe_compiler.model.schedule import KINDS, NONE, Ints, Kind, Schedule, Stuck
from optpipe_compiler.plan.carried import Start, in_turn, to_microbatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optpipe_compiler.plan.incumbents import Attempt, Incumbents


def added(
    seeds: Iterable[ir.Checked],
    profile: Profile,
    microbatches: int,
    known: list[tuple[Layout, Problem]],
    like: Callable[[Layout, float, Slicing | None], Problem | None],
) -> Iterator[tuple[Layout, Problem]]:
    """Yield the instances of seeds that are not among the known ones.

    `like` makes the instance of a placement with that share of the saved bytes offloaded; None: the options forbid it.
    """
    found = list(known)
    for seed in seeds:
        layout = layout_or_given(seed.schedule)
        if layout.cuts[-1] != len(profile.expanded_layers()):
            continue
        if any(one == replace(layout, name=one.name) and _read(seed.schedule, problem, one) for one, problem in found):
            continue
        problem = like(layout, offloaded_share(seed.schedule, profile), slicing_of(seed.schedule, microbatches))
        if problem is not None and _read(seed.schedule, problem, layout) is not None:
            found.append((layout, problem))
            yield found[-1]


def plant(incumbents: Incumbents, named: Sequence[ir.Checked], kept: Sequence[ir.Checked] = ()) -> None:
    """Make each seed the best of its placement if it fits and is better; note named ones that none can take over."""
    for number, seed in enumerate([*named, *kept]):
        taken = False
        for attempt in incumbents.all:
            for timed in _timed(seed.schedule, attempt.problem, attempt.layout):
                taken = True
                if incumbents.is_better(attempt, timed):
                    incumbents.keep(attempt, timed, "seed")
        for attempt in incumbents.attempts:
            if (start := _elsewhere(seed.schedule, attempt)) is not None:
                attempt.starts.append(start)
                taken = True
        if not taken and number < len(named):
            incumbents.attempts[0].notes.append(
                f"start {number + 1} ({seed.schedule.digest[:15]}) has a placement, ops, slices or lengths of "
                "microbatches that are not searched here: it is not taken over"
            )
    for attempt in incumbents.attempts:
        if attempt.best is not None and attempt.problem.slicing is None:
            start = Start.of_schedule(attempt.best)
            same = attempt.layout.by_number, attempt.problem.is_partial
            for other in incumbents.attempts:  # in every order of the devices
                if (other.layout.by_number, other.problem.is_partial) == same:
                    other.starts.append(start)


def layout_of(schedule: ir.Schedule) -> Layout | None:
    """Return the placement that a file has; None where it is none of those that are searched."""
    devices = schedule.setup.devices
    owners = _owners(schedule)
    order = tuple(dict.fromkeys(owners))
    if len(order) < devices:
        return None
    device_of = tuple(map(order.index, owners))
    per_device, rest = divmod(len(owners), devices)
    patterns = [] if rest else [name for name in PATTERNS if device_of == stage_devices(name, devices, per_device)]
    if not patterns and list(device_of) == sorted(device_of):
        patterns = ["linear"]  # neighbouring stages, not the same number on every device
    if not patterns:
        return None
    is_named = order == tuple(range(devices))
    return Layout(patterns[0], _cuts(schedule), device_of, _selective(schedule), None if is_named else order)


def layout_or_given(schedule: ir.Schedule) -> Layout:
    """Return the placement that a file has, whether it would be searched or not."""
    return layout_of(schedule) or Layout("given", _cuts(schedule), _owners(schedule), _selective(schedule))


def is_placed(one: Layout, schedule: ir.Schedule) -> bool:
    """Whether cut and owners are those of the schedule, so that no weight moves."""
    return (one.cuts, one.owners) == (_cuts(schedule), _owners(schedule))


def slicing_of(schedule: ir.Schedule, microbatches: int | None = None) -> Slicing | None:
    """Return how a file cuts microbatches, and how long they are; for another number of equal ones where asked."""
    units = schedule.setup.units
    if isinstance(units, UnsetType):
        return None
    found = Slicing.of(units)
    is_other = microbatches is not None and len(units.cuts) == 1
    return replace(found, shape_of=(0,) * (microbatches or 0)) if is_other else found


def offloaded_share(schedule: ir.Schedule, profile: Profile) -> float:
    """Return the share of saved bytes for which `build` offloads the layers that the file does; 1 where it has none."""
    layers = profile.expanded_layers()
    shares = []
    for op in (op for device in schedule.devices for op in device.d2h):
        first, end = schedule.stages[op.stage].layers
        held = list(accumulate(value_of(layer.saved_bytes) for layer in layers[first:end]))
        shares.append((held[op.layers[1] - first - 1] + 0.5) / (held[-1] + 0.5))  # between this layer and the next
    return max(shares, default=1.0)


def _cuts(schedule: ir.Schedule) -> tuple[int, ...]:
    return 0, *(stage.layers[1] for stage in schedule.stages)


def _owners(schedule: ir.Schedule) -> tuple[int, ...]:
    return tuple(stage.device for stage in schedule.stages)


def _selective(schedule: ir.Schedule) -> frozenset[int]:
    return frozenset(layer for stage in schedule.stages for layer in stage.selective_layers)


def _timed(seed: ir.Schedule, problem: Problem, layout: Layout) -> Iterator[Schedule]:
    """Yield the seed at its own times where no op takes longer now, and its orders at their earliest."""
    found = _read(seed, problem, layout)
    if found is None:
        return
    starts, ends = found
    count = seed.setup.microbatches
    if count != problem.whole:
        for carried in to_microbatches(starts, problem.whole, (1, 2, problem.devices), problem.slices):
            with suppress(Stuck):
                timed = Schedule(problem, seed.forecast.method, in_turn(carried, problem.slices))
                yield machine.orders.retime(timed, problem)
        return
    timed = Schedule(problem, seed.forecast.method, starts)
    columns = timed.columns
    by_stage = chain.from_iterable(zip(*problem.by_class, strict=True))  # as a file has its costs
    is_sent = all(
        stage.send_activation <= cost.send_activation_ns and stage.send_gradient <= cost.send_gradient_ns
        for stage, cost in zip(by_stage, seed.forecast.stages, strict=True)
    )
    is_possible = is_sent and timed.has_copied and timed.has_links_in_turn
    if is_possible and (columns.end <= ends[columns.kind, columns.stage, columns.microbatch]).all():
        yield timed
    with suppress(Stuck):
        yield machine.orders.retime(timed, problem)


def _elsewhere(seed: ir.Schedule, attempt: Attempt) -> Start | None:
    """Return where the search starts from a seed of other devices; None where it has the same, or another pattern."""
    found = layout_of(seed)
    if found is None or seed.setup.devices == attempt.problem.devices or found.name != attempt.layout.name:
        return None
    if slicing_of(seed) is not None or attempt.problem.slicing is not None:
        return None
    starts, _ = times_of(seed)
    halves = np.array([cost.backward_input_ns for cost in seed.forecast.stages])
    moved = Start.of(starts, halves).of_devices(found.device_of, attempt.layout.device_of)
    return None if moved is None else moved.of_microbatches(attempt.problem.microbatches)


def _read(seed: ir.Schedule, problem: Problem, layout: Layout) -> tuple[Ints, Ints] | None:
    """Return starts and ends [kind, stage, unit] of the seed; None where the instance has not the same ops."""
    if not is_placed(layout, seed) or layout.selective != _selective(seed):
        return None
    if seed.setup.devices != problem.devices or slicing_of(seed, problem.whole) != problem.slicing:
        return None
    lanes = (op for device in seed.devices for op in device.ops)
    if not all(_is_possible(op, problem, layout) for op in lanes if op.name in KINDS):
        return None
    return times_of(seed)


def times_of(seed: ir.Schedule) -> tuple[Ints, Ints]:
    """Return starts and ends [kind, stage, unit]; of several recomputes or copies of one stage the last."""
    shape = len(Kind), len(seed.stages), seed.setup.microbatches * seed.setup.slices
    starts, ends = np.full(shape, NONE, np.int64), np.full(shape, NONE, np.int64)
    for _, _, op, start, end in seed.timed():
        if op.name in KINDS:
            unit = op.microbatch * seed.setup.slices + (op.slice_or_none or 0)
            place = KINDS[op.name], op.stage, unit
            starts[place], ends[place] = start, end
    return starts, ends


def _is_possible(op: ir.Op, problem: Problem, layout: Layout) -> bool:
    """Whether the instance permits the op: splits, recomputes of whole stages, and offloads of the same layers."""
    kind = KINDS[op.name]
    if kind in (Kind.I, Kind.W):
        return problem.freedom.split
    if isinstance(op, ir.SavedOp):
        first, end = layout.cuts[op.stage], layout.cuts[op.stage + 1]
        leaving = end if kind is Kind.R else end - problem.stages[op.stage].staying_layers
        possible = problem.can_recompute(op.stage) if kind is Kind.R else problem.can_offload(op.stage)
        return possible and op.layers == (first, leaving)
    return True
