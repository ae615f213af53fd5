"""A policy for many devices from one for fewer of them, on which the same search takes a small part of the time.

The policy of a long pipeline says little more than that of a shorter one with the same stages: what a device does in a
turn, and how that changes from the first device to the last.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler import machine
from optpipe_compiler.model.neighbours import LARGEST
from optpipe_compiler.model.schedule import Mode
from optpipe_compiler.plan.carried import turns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.machine.policy import Policy
    from optpipe_compiler.model.problem import Problem, Stage

MANY = 64
"""Devices from which policies are searched on fewer of them first; it earns nothing with 32 (docs/ABLATION.md)."""
ONE_OF = 4
"""One device of so many is left."""


def narrowed(problem: Problem) -> Problem | None:
    """Return the problem of every fourth device with the stages that it has; None where there are few, or they differ.

    As many activations are in flight on a device as it has devices behind it, so memory for them shrinks with the
    number of devices. The first and the last device are always left.
    """
    count, left = problem.devices, problem.devices // ONE_OF
    if count < MANY or turns(problem.device_of) is None:
        return None
    chosen = np.rint(np.linspace(0, count - 1, left)).astype(int).tolist()
    number = {device: index for index, device in enumerate(chosen)}

    def kept(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        return tuple(replace(one, device=number[one.device]) for one in stages if one.device in number)

    hosts = []
    for devices, most in problem.hosts:
        here = tuple(number[device] for device in devices if device in number)
        if here:
            hosts.append((here, most * len(here) * left // (len(devices) * count)))
    limit = problem.host_budget
    return replace(
        problem.changed(kept),
        devices=left,
        link_of=tuple(_links(problem, chosen)),
        budget=tuple(_budget(problem, device, left) for device in chosen),
        host_budget=None if limit is None else limit * left * left // (count * count),
        hosts=tuple(hosts),
    )


def _links(problem: Problem, chosen: list[int]) -> Iterator[int | None]:
    """Yield the link of each device that is left: as many devices share one as do now, in a row or far from each other
    (device_order.py)."""
    behind = [device for device, link in enumerate(problem.link_of) if link == problem.link_of[0]]
    links, rest = divmod(len(chosen), len(behind))
    if None not in problem.link_of and len(behind) > 1 and behind[1] > 1 and links and not rest:
        yield from (number % links for number in range(len(chosen)))
        return
    link, room = -1, 0
    for device in chosen:
        now = problem.link_of[device]
        if now is None:
            yield None
            continue
        if not room:
            link, room = link + 1, problem.link_of.count(now)
        yield link
        room -= 1


def _budget(problem: Problem, device: int, left: int) -> int:
    """Return the budget of a device with fewer others: what its ops need while they run, and a part of the rest."""
    mine = [problem.stages[s] for s in problem.stages_of(device)]
    running: int = max(getattr(stage, name) for stage in mine for name in LARGEST)
    return running + (problem.budget[device] - running) * left // problem.devices


def widened(one: Policy, narrow: Problem, wide: Problem) -> Iterator[Policy]:
    """Yield policies for all devices: each treats activations as the nearest device that was left does.

    Ranks are shifted by as many ticks, or by as many more as there are more devices.
    """
    before, after = turns(narrow.device_of), turns(wide.device_of)
    assert before is not None
    assert after is not None
    nearest = np.rint(np.linspace(0, narrow.devices - 1, wide.devices)).astype(int)
    modes = np.empty((one.modes.shape[0], len(wide.stages), one.modes.shape[2]), np.int64)
    modes[:, after] = one.modes[:, before[:, nearest]]
    stages = range(len(wide.stages))
    able = np.array([*map(wide.able, stages)])
    modes = np.where(able[np.array(stages)[:, None], modes], modes, Mode.KEEP)
    for factor in (1, wide.devices / narrow.devices):
        yield machine.policy.copied(one)._replace(
            modes=modes.copy(),
            shift=np.rint(one.shift * factor).astype(np.int64),
            reserve=np.zeros(wide.devices, np.int64),
        )
