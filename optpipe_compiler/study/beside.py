"""Planning beside training, at the lowest priority: from the schedule that runs, for measured costs."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UnsetType

from optpipe_compiler import compiler
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import parse
from optpipe_compiler.documents.profile import value_of
from optpipe_compiler.forecast.executions import durations, makespans
from optpipe_compiler.model.problem import messages_overhead_ns
from optpipe_compiler.study.planned import options_of
from optpipe_compiler.verify import check

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from optpipe_compiler.documents.profile import Profile

Taken = dict[tuple[str, int, int], float]
"""Times in ns by kind of op, stage and kind of unit (`Setup.class_of`)."""
SLOWEST_BYTES_PER_S = 10**9
"""Of messages, where the profile does not say: a guess on the slow side for the cost of a move."""

STARVED = 0.5
"""The share of its time limit that a search must have had of a processor: at the lowest priority, on cores that ranks
keep busy, it may be next to nothing."""
LONGER = 8
"""How many times its time limit a search takes then at most."""
ENDED_EARLY = 0.8
"""A search that took less of its time limit had nothing left to do."""


@dataclass(frozen=True)
class Question:
    """What runs, and what it was measured to cost."""

    profile: Profile
    schedule_text: str
    taken_ns: Taken
    """The measured times."""
    time_limit_s: float
    seed: int
    keeps_placement: bool
    refused: frozenset[str] = frozenset()
    """Digests of plans that are not wanted again."""


@dataclass(frozen=True)
class Answer:
    """The best plan that was found and is not refused, judged. All times are forecasts for the measured costs."""

    schedule_text: str
    digest: str
    present_ns: int
    """Of the schedule that runs."""
    found_ns: int
    move_ns: int
    """What moving weights is expected to take; 0 where nothing moves."""

    @property
    def gain(self) -> float:
        """The share of a step that is saved."""
        return 1 - self.found_ns / self.present_ns if self.present_ns else 0.0


def serve(line: Connection) -> None:
    """Answer questions until the parent hangs up; an error is answered by its sentence."""
    be_idle()
    while True:
        try:
            text, time_limit_s, more = line.recv()
        except EOFError:
            return
        try:
            line.send(answer(Question(schedule_text=text, time_limit_s=time_limit_s, **more)))
        except Exception as error:
            line.send(f"{type(error).__name__}: {error}")


def be_idle() -> None:
    """Take only the time that nobody else wants, on any core; a rank that starts this may be held to its own."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):
        with suppress(OSError):
            os.nice(19)


def answer(question: Question) -> Answer:
    """Search from the present schedule, and compare what is found with it."""
    present = check(ir.parse(question.schedule_text, "the present schedule"))
    units = present.schedule.setup.units
    options = replace(
        options_of(present.schedule, "the present schedule"),
        time_limit_s=question.time_limit_s,
        seed=question.seed,
        seeds=(present,),
        slices=present.schedule.setup.slices,
        units=None if isinstance(units, UnsetType) else units,
        workers=1,
    )
    if question.keeps_placement:
        options = replace(options, keep=present, placement="auto", stages_per_device=None)
    result = _searched(question.profile, options)
    plans = (one.schedule for one in (result.checked, *result.considered))
    found = next((one for one in plans if one.digest not in question.refused), present.schedule)
    is_kept = _cut(found) == _cut(present.schedule)
    return Answer(
        schedule_text=ir.to_text(found),
        digest=found.digest,
        present_ns=executed_ns(present.schedule, question.taken_ns, question.profile),
        found_ns=executed_ns(found, question.taken_ns if is_kept else {}, question.profile),
        move_ns=_move_ns(present.schedule, found, question.profile),
    )


def _searched(profile: Profile, options: compiler.Options) -> compiler.Result:
    """Search for the time limit, and again from what was found while the search had too little of a processor."""
    begin, used = time.monotonic(), _processor_s()
    result = compiler.compile_schedule(profile, options).uninterrupted()
    limit = options.time_limit_s or 0.0
    while result.schedule.forecast.outcome != "optimal" and result.wall_s >= ENDED_EARLY * limit:
        if _processor_s() - used >= STARVED * limit or time.monotonic() - begin >= LONGER * limit:
            break
        options = replace(options, seeds=(*options.seeds[:1], result.checked), seed=options.seed + 1)
        result = compiler.compile_schedule(profile, options).uninterrupted()
    return result


def _processor_s() -> float:
    """Return the processor time of this process and of those that it has started and that are over."""
    return sum(os.times()[:4])


def _cut(schedule: ir.Schedule) -> list[tuple[int, ir.Range, list[int]]]:
    return [(stage.device, stage.layers, stage.selective_layers) for stage in schedule.stages]


def executed_ns(schedule: ir.Schedule, taken_ns: Taken, profile: Profile) -> int:
    """Return what a step of the schedule takes when ops take these times; those that are not named, their forecast.

    Measured times are without what an op's messages take from the compute lane, forecasts are with it.
    """
    times, device_of = durations(schedule), [stage.device for stage in schedule.stages]
    for op in times:
        name = parse(op)
        place = name.kind, name.stage, schedule.setup.class_of(name.microbatch, name.slice)
        if place in taken_ns:
            passes = name.kind in ("forward", "backward", "backward_input")
            more = messages_overhead_ns(profile.machine, device_of, name.stage) if passes else 0
            times[op] = np.array([taken_ns[place] + more])
    return round(float(makespans(schedule, times)[0]))


def _move_ns(before: ir.Schedule, after: ir.Schedule, profile: Profile) -> int:
    """Return about how long it takes to move what is always held of the layers that change their device."""
    owners = [[s.device for s in one.stages for _ in range(*s.layers)] for one in (before, after)]
    layers = profile.expanded_layers()
    moved = sum(value_of(one.static_bytes) for one, old, new in zip(layers, *owners, strict=True) if old != new)
    speeds = [value_of(one.bytes_per_s) for one in profile.machine.p2p if one.bytes_per_s is not None]
    return moved * 10**9 // min(speeds, default=SLOWEST_BYTES_PER_S)
