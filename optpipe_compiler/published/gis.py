"""Generalised interleaved schedules GIS and GIS-H (Wan et al., PipeOffload, 2025, arXiv:2503.01328).

Interleaved 1F1B in groups of g microbatches, with half the extra warm-up per hop. The smaller the group, the sooner an
activation is used again, and the longer a microbatch waits between two stages of a device.

In the uniform form of GIS-H, on which PipeOffload is built, microbatches enter one by one at equal distances, as when a
building block is repeated (arXiv:2405.15362 section 2), not in groups. The memory of a device is as in GIS-H, but
steady, and each stage's share of it is proportional to how long its activations live: offloading the lower half of the
stages leaves a quarter of the memory and not a half.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind, Task
from optpipe_compiler.published.alternating import alternating, handed_over_early
from optpipe_compiler.published.common import LOOP, Tasks, ordered

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("gis", LOOP)
def gis(problem: Problem) -> Tasks:
    """Return the order for g = P: peak P(v - 1) + P stage activations on the first device."""
    return _generalised(problem, problem.devices)


@ordered("gis-h", LOOP)
def gis_h(problem: Problem) -> Tasks:
    """Return the order for g = ceil(P / 2): peak g(v - 1) + P stage activations, (P - g)(v - 1) more bubble slots."""
    return _generalised(problem, _half_group(problem))


@ordered("gis-m", LOOP)
def gis_m(problem: Problem) -> Tasks:
    """Return the order half-way between the two, g = ceil(3P / 4); the paper allows every g from ceil(P / 2) to P."""
    return _generalised(problem, (3 * problem.devices + 3) // 4)


def _half_group(problem: Problem) -> int:
    """Return the smallest group for which the paper defines the schedule: ceil(P / 2)."""
    return (problem.devices + 1) // 2


def _generalised(problem: Problem, group: int) -> Tasks:
    """Return the order: device d runs g(v - 1) + P - d - 1 stage forwards, then F and B in turn.

    The last group may be smaller (the paper has none such): its missing microbatches are left out of the order.
    """
    return handed_over_early(problem, alternating(problem, group))


@ordered("gis-h-uniform", LOOP)
def gis_h_uniform(problem: Problem) -> Tasks:
    """Return the order of the building block: one microbatch every 3v slots, g = ceil(P / 2) of them between stages.

    Peak g(v - 1) + P + gcd(g, v) - 1 stage activations, the last part because slots that collide are shifted.
    """
    per_device = problem.per_device
    group = _half_group(problem)
    turns = per_device // gcd(per_device, group)
    offsets = [3 * (group * turn + turn // turns) for turn in range(per_device)]
    return handed_over_early(problem, [_order(problem, device, offsets) for device in range(problem.devices)])


def _order(problem: Problem, device: int, offsets: list[int]) -> list[Task]:
    """Return the order of one device; it passes forwards on after one slot and backwards after two."""
    mine = problem.stages_of(device)
    turn_back = offsets[-1] + 3 * (problem.devices - 1 - device) + 1
    slots = []
    for microbatch in range(problem.microbatches):
        begin = 3 * len(mine) * microbatch
        for at, down, up in zip(offsets, mine, reversed(mine), strict=True):
            slots.append((begin + at, Task(Kind.F, down, microbatch)))
            slots.append((begin + turn_back + at, Task(Kind.B, up, microbatch)))
    return [task for _, task in sorted(slots)]
