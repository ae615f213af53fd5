"""Earlier schedules as first candidates: their orders and what they do with activations, timed on the new instance.

A seed counts where the instance has its placement and microbatches and permits what it does. A placement that is not
searched by itself is added, if the options permit it. The result is then no worse than a seed that still fits.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UnsetType

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import value_of
from optpipe_compiler.model.placement import Layout, stage_devices
from optpipe_compiler.model.problem import Slicing
from optpipe_compiler.model.schedule import NONE, Ints, Kind, Schedule, Stuck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.model.problem import Problem, Stage
    from optpipe_compiler.plan.incumbents import Incumbents

KINDS = {
    "forward": Kind.F,
    "backward_input": Kind.I,
    "backward_weight": Kind.W,
    "backward": Kind.B,
    "recompute": Kind.R,
    "offload": Kind.D,
    "reload": Kind.H,
}
PLACEMENTS = ("linear", "loop", "v")


def added(
    seeds: Iterable[ir.Checked],
    profile: Profile,
    known: list[tuple[Layout, Problem]],
    like: Callable[[Layout, float, Slicing | None], Problem | None],
) -> Iterator[tuple[Layout, Problem]]:
    """Yield the instances of seeds that are not among the known ones.

    `like` makes the instance of a placement with that share of the saved bytes offloaded; None: the options forbid it.
    """
    found = list(known)
    for seed in seeds:
        layout = layout_of(seed.schedule)
        if layout is None or layout.cuts[-1] != len(profile.expanded_layers()):
            continue
        if any(one == replace(layout, name=one.name) and _read(seed.schedule, problem, one) for one, problem in found):
            continue
        problem = like(layout, offloaded_share(seed.schedule, profile), slicing_of(seed.schedule))
        if problem is not None and _read(seed.schedule, problem, layout) is not None:
            found.append((layout, problem))
            yield found[-1]


def plant(incumbents: Incumbents, seeds: Iterable[ir.Checked]) -> None:
    """Make each seed the best of its placement if it fits and is better."""
    for seed in seeds:
        for attempt in incumbents.attempts:
            for timed in _timed(seed.schedule, attempt.problem, attempt.layout):
                if incumbents.is_better(attempt, timed):
                    incumbents.keep(attempt, timed, "seed")


def layout_of(schedule: ir.Schedule) -> Layout | None:
    """Return the placement that a file has; None where it is none of those that are searched."""
    owners = tuple(stage.device for stage in schedule.stages)
    devices = schedule.setup.devices
    per_device, rest = divmod(len(owners), devices)
    patterns = [] if rest else [name for name in PLACEMENTS if owners == stage_devices(name, devices, per_device)]
    if not patterns and list(owners) == sorted(owners) and set(owners) == set(range(devices)):
        patterns = ["linear"]  # neighbouring stages, not the same number on every device
    return Layout(patterns[0], _cuts(schedule), owners, _selective(schedule)) if patterns else None


def slicing_of(schedule: ir.Schedule) -> Slicing | None:
    """Return how a file cuts microbatches, and how long they are."""
    units = schedule.setup.units
    if isinstance(units, UnsetType):
        return None
    return Slicing(units.tokens, tuple(map(tuple, units.cuts)), tuple(units.shape_of))


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


def _selective(schedule: ir.Schedule) -> frozenset[int]:
    return frozenset(layer for stage in schedule.stages for layer in stage.selective_layers)


def _timed(seed: ir.Schedule, problem: Problem, layout: Layout) -> Iterator[Schedule]:
    """Yield the seed at its own times where no op takes longer now, and its orders at their earliest."""
    from optpipe_compiler.machine.orders import retime

    found = _read(seed, problem, layout)
    if found is None:
        return
    timed, ends = found
    columns = timed.columns
    is_sent = all(
        stage.send_activation <= cost.send_activation_ns and stage.send_gradient <= cost.send_gradient_ns
        for stage, cost in zip(_by_stage(problem), seed.forecast.stages, strict=True)
    )
    if is_sent and (columns.end <= ends[columns.kind, columns.stage, columns.microbatch]).all():
        yield timed
    with suppress(Stuck):
        yield retime(timed, problem)


def _by_stage(problem: Problem) -> list[Stage]:
    """Return the figures of each stage and class of units, in the order of a file's costs."""
    every = problem.classes or (problem.stages,)
    return [stages[s] for s in range(len(problem.stages)) for stages in every]


def _read(seed: ir.Schedule, problem: Problem, layout: Layout) -> tuple[Schedule, Ints] | None:
    """Return the seed's ops at its own starts, and their ends; None where the instance has not the same ops."""
    if layout.cuts != _cuts(seed) or layout.device_of != tuple(stage.device for stage in seed.stages):
        return None
    if layout.selective != _selective(seed):
        return None
    if (seed.setup.devices, seed.setup.microbatches) != (problem.devices, problem.whole):
        return None
    if slicing_of(seed) != problem.slicing:
        return None
    shape = len(Kind), len(problem.stages), problem.microbatches
    starts, ends = np.full(shape, NONE, np.int64), np.full(shape, NONE, np.int64)
    for times in seed.forecast.times:
        ops = getattr(seed.devices[times.device], times.lane)
        for op, start, end in zip(ops, times.start_ns, times.end_ns, strict=True):
            if op.name in KINDS:
                place = KINDS[op.name], op.stage, op.microbatch * problem.slices + (op.slice_or_none or 0)
                if starts[place] != NONE or not _is_possible(op, problem, layout):
                    return None
                starts[place], ends[place] = start, end
    return Schedule(problem, seed.forecast.method, starts), ends


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
