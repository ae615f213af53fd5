"""Tuning a pipeline of many devices on one of few: a narrow pipeline takes a hundredth of the time to dispatch.

What the best policies of the narrow pipeline say of the fill, the middle and the drain, of the stages of a device and
of the devices near the ends, is stretched to the wide one, where the search goes on from there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from optpipe_compiler.heuristics.tuning import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.problem import Problem

DEVICES = 8
"""About how many devices a narrow pipeline has."""
WIDE = 16
"""Devices from which on a pipeline is tuned on a narrow one first."""


def narrowed(problem: Problem) -> Problem | None:
    """Return the problem on every n-th host link's devices, with an n-th of the microbatches and of the memory.

    None where it has few devices, or where no stage would fit.
    """
    if problem.devices < WIDE:
        return None
    factor = problem.devices // DEVICES
    groups: dict[tuple[bool, int], list[int]] = {}
    for device, link in enumerate(problem.link_of):
        groups.setdefault((link is None, device if link is None else link), []).append(device)
    taken = sorted(device for group in list(groups.values())[factor - 1 :: factor] for device in group)
    number = {device: index for index, device in enumerate(taken)}
    stages = tuple(replace(one, device=number[one.device]) for one in problem.stages if one.device in number)
    links = {link: index for index, link in enumerate(dict.fromkeys(problem.link_of[device] for device in taken))}
    narrow = replace(
        problem,
        devices=len(taken),
        microbatches=max(1, problem.microbatches // factor),
        stages=stages,
        link_of=tuple(None if problem.link_of[d] is None else links[problem.link_of[d]] for d in taken),
        budget=tuple(problem.budget[device] // factor for device in taken),
        host_budget=None if problem.host_budget is None else problem.host_budget // factor**2,
    )
    fits = all(stage.saved + stage.forward_extra <= narrow.budget[stage.device] for stage in stages)
    return narrow if len(taken) > 1 and fits else None


def widened(policy: Policy, narrow: Problem, wide: Problem) -> Iterator[Policy]:
    """Yield what a policy of the narrow pipeline may be for the wide one: its shifts stretched, or as they are."""
    factor = wide.devices / narrow.devices
    counterpart = _counterparts(narrow, wide)
    for stretch in (factor, 1.0):
        yield Policy(
            wish=_wish(policy.wish, narrow.devices, wide.devices),
            shift=[[[int(stretch * ticks) for ticks in row] for row in part] for part in policy.shift],
            slope=[int(stretch * ticks / factor) for ticks in policy.slope],
            fill=max(1, int(factor * policy.fill)),
            drain=max(1, int(factor * policy.drain)),
            modes=[[list(table[s]) for s in counterpart] for table in policy.modes],
            fused=list(policy.fused),
            ahead=policy.ahead,
        )


def _counterparts(narrow: Problem, wide: Problem) -> list[int]:
    """Return, for each stage of the wide pipeline, the narrow one's stage at the same turn and about the same place."""
    own = [narrow.stages_of(device) for device in range(narrow.devices)]
    turn = {s: n for device in range(wide.devices) for n, s in enumerate(wide.stages_of(device))}
    return [own[stage.device * narrow.devices // wide.devices][turn[s]] for s, stage in enumerate(wide.stages)]


def _wish(name: str, narrow: int, wide: int) -> str:
    """Return the wished order of the wide pipeline; groups of all or half of the devices stay that."""
    if not name.startswith("lockstep"):
        return name
    group, *back = name.split("-")[1:]
    same = {narrow: wide, narrow // 2: wide // 2}.get(int(group), int(group))
    return "-".join(["lockstep", str(same), *back])
