"""Planning beside training, at the lowest priority: from the schedule that runs, for measured costs."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler import compiler
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import parse
from optpipe_compiler.documents.profile import value_of
from optpipe_compiler.forecast.executions import durations, makespans
from optpipe_compiler.study.planned import options_of
from optpipe_compiler.verify import check

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from optpipe_compiler.documents.profile import Profile

SLOWEST_BYTES_PER_S = 10**9
"""Of messages, where the profile does not say: a guess on the slow side for the cost of a move."""


@dataclass(frozen=True)
class Question:
    """What runs, and what it was measured to cost."""

    profile: Profile
    schedule_text: str
    taken_ns: dict[tuple[str, int], float]
    """By kind of op and stage: the measured time."""
    time_limit_s: float
    seed: int
    keeps_placement: bool


@dataclass(frozen=True)
class Answer:
    """The best plan that was found, judged. All times are forecasts for the measured costs."""

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
    options = replace(
        options_of(present.schedule, "the present schedule"),
        time_limit_s=question.time_limit_s,
        seed=question.seed,
        seeds=(present,),
        workers=1,
    )
    if question.keeps_placement:
        options = replace(options, keep=present, placement="auto", stages_per_device=None)
    found = compiler.compile_schedule(question.profile, options).schedule
    return Answer(
        schedule_text=ir.to_text(found),
        digest=found.digest,
        present_ns=executed_ns(present.schedule, question.taken_ns),
        found_ns=round(float(makespans(found, durations(found))[0])),
        move_ns=_move_ns(present.schedule, found, question.profile),
    )


def executed_ns(schedule: ir.Schedule, taken_ns: dict[tuple[str, int], float]) -> int:
    """Return what a step of the schedule takes when ops take these times; those that are not named, their forecast."""
    times = durations(schedule)
    for op in times:
        name = parse(op)
        if (name.kind, name.stage) in taken_ns:
            times[op] = np.array([taken_ns[name.kind, name.stage]])
    return round(float(makespans(schedule, times)[0]))


def _move_ns(before: ir.Schedule, after: ir.Schedule, profile: Profile) -> int:
    """Return about how long it takes to move what is always held of the layers that change their device."""
    owners = [[s.device for s in one.stages for _ in range(*s.layers)] for one in (before, after)]
    layers = profile.expanded_layers()
    moved = sum(value_of(one.static_bytes) for one, old, new in zip(layers, *owners, strict=True) if old != new)
    speeds = [value_of(one.bytes_per_s) for one in profile.machine.p2p if one.bytes_per_s is not None]
    return moved * 10**9 // min(speeds, default=SLOWEST_BYTES_PER_S)
