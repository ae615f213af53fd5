"""What steps of any loop have cost: the ops of all ranks, and a profile of them."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

import torch.distributed as dist
from msgspec import UnsetType

from optpipe_compiler.costs.cuts import seen, told_apart
from optpipe_compiler.costs.from_run import COPIES, Run, RunOp, profile_from_run, without_each_other
from optpipe_compiler.documents.ops import parse
from optpipe_compiler.documents.traces import About, RunStage
from optpipe_compiler.forecast.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.costs.cuts import Seen
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.study.beside import Taken
    from runtime_torch.replay import StepResult
    from runtime_torch.timeline import OpTime

Steps = list[list[list["OpTime"]]]
"""By step and rank."""


def gathered(results: Sequence[StepResult], group: dist.ProcessGroup | None = None) -> Steps:
    """Return the ops of these steps of all ranks; called on all of them."""
    mine = [result.ops for result in results]
    found = [mine] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return [list(ranks) for ranks in zip(*found, strict=True)]


def profile_of(
    profile: Profile, schedule: ir.Schedule, results: Sequence[StepResult], group: dist.ProcessGroup | None = None
) -> Profile:
    """Return `profile`, with which `schedule` was planned, with the times and copy speeds that these steps had.

    Called on all ranks; every number that was seen has its spread over the ops of all steps.
    """
    return profile_from_steps(profile, schedule, gathered(results, group))


def profile_from_steps(profile: Profile, schedule: ir.Schedule, steps: Steps) -> Profile:
    """Return the same of steps that have been gathered."""
    return profile_from_run(profile, "the profile", run_of(profile, schedule, steps)).profile


CUTS = 8
"""Cuts of which is remembered what they showed, the last ones."""


class Learnt:
    """What steps of one model have told of its costs, under all cuts that ran."""

    def __init__(self, base: Profile) -> None:
        self._base = base
        self._runs: list[Seen] = []

    def add(self, schedule: ir.Schedule, steps: Steps) -> None:
        """Take note of the steps of a schedule, in place of earlier ones of the same cut."""
        found = seen(self._base, run_of(self._base, schedule, steps))
        if found.ratios:
            self._runs = [*(run for run in self._runs if run.stages != found.stages), found][-CUTS:]

    def profile(self, schedule: ir.Schedule, steps: Steps) -> Profile:
        """Return the base with what was learnt and, for the stages of the schedule, with the times of these steps."""
        self.add(schedule, steps)
        base = told_apart(self._base, self._runs) if self._runs else self._base
        return profile_from_steps(base, schedule, steps)


def run_of(profile: Profile, schedule: ir.Schedule, steps: Steps) -> Run:
    """Return the steps as costs/from_run.py takes a run."""
    setup, table = schedule.setup, Table(schedule)
    stages = [RunStage(stage.stage, stage.device, stage.layers, stage.selective_layers) for stage in schedule.stages]
    moved = {op.id: table.copied(op) for device in schedule.devices for op in (*device.d2h, *device.h2d)}
    ops = []
    for number, ranks in enumerate(steps):
        for name, _, start, end in (op for ran in ranks for op in ran):
            op = parse(name)
            nbytes = moved[name] if op.kind in COPIES else 0
            tokens = setup.tokens_of(op.microbatch, op.slice)
            ops.append(RunOp(op.kind, op.stage, number, start, end, op.layers, nbytes, tokens))
    units = None if isinstance(setup.units, UnsetType) else setup.units
    return Run("these steps", About(profile.digest(), True, 1.0, stages, units=units), ops)


def taken_ns(schedule: ir.Schedule, steps: Steps) -> Taken:
    """Return the median time of each kind of op, stage and kind of unit, without what copies take from compute."""
    share_of = {device: link.share_permille / 1000 for link in schedule.forecast.links for device in link.devices}
    found: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for device, ran in ((device, ran) for ranks in steps for device, ran in enumerate(ranks)):
        lanes: dict[str, list[tuple[str, int, int]]] = {"compute": [], "d2h": [], "h2d": []}
        for name, lane, start, end in ran:
            lanes[lane].append((name, start, end))
        spans = {lane: [(start, end) for _, start, end in ops] for lane, ops in lanes.items()}
        taken, copies = without_each_other(spans.pop("compute"), spans, share_of.get(device, 0.0))
        for lane, ops in lanes.items():
            for (name, _, _), ns in zip(ops, taken if lane == "compute" else copies[lane], strict=True):
                op = parse(name)
                found[op.kind, op.stage, schedule.setup.class_of(op.microbatch, op.slice)].append(ns)
    return {place: float(median(times)) for place, times in found.items()}
