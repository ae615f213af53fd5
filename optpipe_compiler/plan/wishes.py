"""Wished orders, from which the local search starts: published schedules, and a steady state without bubbles.

A wish is an array [k, s, m] of the starts, in ticks, of forwards (k = 0), backwards or input gradients (1) and weight
gradients (2). It minds neither memory nor links: the list scheduler does, taking the wished starts for ranks.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler.model.neighbours import is_linear, joined, runs
from optpipe_compiler.model.schedule import Ints, Mode
from optpipe_compiler.plan.carried import Start
from optpipe_compiler.plan.modulo import modulo
from optpipe_compiler.published import METHODS, Placed, is_for, published

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.model.problem import Problem

Wish = Ints
ORDERS = (
    "gis",
    "gis-m",
    "gis-h",
    "gis-h-uniform",
    "interleaved-zb",
    "zbv",
    "v-half",
    "v-min",
    "zb-h1",
    "zb-h2",
    "seq1f1b-zb",
    "seq1f1b-interleaved-zb",
    "slimpipe",
)
"""Published orders that are worth a wish: each is among the 8 that climb in some case of bench.starts (hanayo was in
none of 103); the others are special cases of these or of `modulo`."""
STAYS = (0.5, 1.5, 3.0, 5.0)
"""Activations are offloaded at first that stay longer than so many transfers there and back; by bench.starts such a
treatment is the best at first in 31 of 103 cases, and with one layer a device plans are 0.6 % longer without
them (docs/ABLATION.md)."""
MIXED = 4
"""Of so many stages of a device, from the lowest on, some are offloaded and some recomputed at first. Without these
plans are 1.9 % longer where links are slow (docs/ABLATION.md)."""


def names(problem: Problem, placed: Placed) -> list[str]:
    """Return the wished orders that the placement has."""
    groups = sorted({1, 2, max(1, problem.devices // 2), problem.devices} & set(range(1, problem.devices + 1)))
    steady = [f"modulo-{group}{back}" for group in groups for back in ("", "-back")]
    own = [name for name, method in METHODS.items() if method.kind == "own"]
    return steady + [name for name in (*ORDERS, *own) if is_for(name, placed, is_sliced=problem.slices > 1)]


def wish(problem: Problem, name: str) -> Wish:
    """Return the wished starts; raises NotDefined where the published schedule is not for this instance."""
    if name.startswith("modulo"):
        if is_linear(problem):
            return _lifted(problem, runs(problem), wish(joined(problem), name))
        return modulo(problem, int(name.split("-")[1]), not name.endswith("back"))
    return Start.of_schedule(published(problem, name, transfers=False)).wish


def _lifted(problem: Problem, ranges: list[range], coarse: Wish) -> Wish:
    """Let neighbouring stages run one after the other within the time that is wished for all of them."""
    result = np.empty((3, len(problem.stages), problem.microbatches), np.int64)
    for row, name in enumerate(("forward", "backward_input", "backward_weight")):
        for joint, run in enumerate(ranges):
            passed = 0
            for s in run if name == "forward" else reversed(run):
                result[row, s] = coarse[row, joint] + passed
                passed += getattr(problem.stages[s], name)
    return result


def treatments(problem: Problem, wished: Wish) -> Iterator[Ints]:
    """Yield what may become of the activations of each stage [s] at first, as Mode."""
    stages = range(len(problem.stages))
    turn = problem.turn_of
    middle = problem.microbatches // 2
    stay = [int(wished[1, s, middle] - wished[0, s, middle]) - problem.stages[s].forward for s in stages]
    trip = [problem.stages[s].offload + problem.stages[s].reload for s in stages]
    movable = {s for s in stages if problem.can_offload(s)}
    again = {s for s in stages if problem.can_recompute(s)}
    turns = 1 + max(turn)

    def lowest(count: int, mode: Mode) -> dict[int, Mode]:
        return {s: mode for s in (movable if mode is Mode.OFFLOAD else again) if turn[s] < count}

    tables = [{s: Mode.OFFLOAD for s in movable if stay[s] > trips * trip[s]} for trips in STAYS]
    # as PipeOffload does: the lowest stages of every device, whose activations live longest
    tables += [lowest(count, Mode.OFFLOAD) for count in range(1, turns)]
    tables += [lowest(count, Mode.RECOMPUTE) for count in range(1, turns + 1)]
    tables += [{}]
    if movable:
        for count, more in combinations(range(1, min(turns, MIXED) + 1), 2):
            tables += [lowest(more, Mode.OFFLOAD) | lowest(count, Mode.RECOMPUTE)]
            tables += [lowest(more, Mode.RECOMPUTE) | lowest(count, Mode.OFFLOAD)]
    for modes in dict.fromkeys(tuple(int(table.get(s, Mode.KEEP)) for s in stages) for table in tables):
        yield np.array(modes, dtype=np.int64)
