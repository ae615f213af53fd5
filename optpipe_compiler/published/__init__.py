"""Published schedules by name, one file each.

A published schedule is a function from a Problem to the compute order of every device, or to a `Recipe` that also names
the activations to offload; it raises NotDefined, with the reason, where its paper does not define it. `PUBLISHED` lists
them, `PLACEMENTS` the placements and stages per device worth trying for each. Our own orders are in plan/modulo.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.model.neighbours import is_linear, joined, runs
from optpipe_compiler.model.schedule import Kind, Task
from optpipe_compiler.published.bfs import bfs
from optpipe_compiler.published.common import NotDefined, Order, Recipe
from optpipe_compiler.published.dualpipev import dualpipev
from optpipe_compiler.published.gis import gis, gis_h, gis_m
from optpipe_compiler.published.gis_uniform import gis_h_uniform
from optpipe_compiler.published.gpipe import gpipe
from optpipe_compiler.published.hanayo import hanayo
from optpipe_compiler.published.interleaved_1f1b import interleaved_1f1b
from optpipe_compiler.published.interleaved_zb import interleaved_zb
from optpipe_compiler.published.one_f_one_b import one_f_one_b
from optpipe_compiler.published.pipeoffload import offloading, po_f, po_h
from optpipe_compiler.published.recompute import recomputing
from optpipe_compiler.published.transfers import timed
from optpipe_compiler.published.v_half import v_half
from optpipe_compiler.published.v_min import v_min
from optpipe_compiler.published.zb_h1 import zb_h1
from optpipe_compiler.published.zb_h2 import zb_h2
from optpipe_compiler.published.zb_memory_limited import zb_1p, zb_2p, zb_memory_limited
from optpipe_compiler.published.zbv import zbv

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.model.problem import Problem
    from optpipe_compiler.model.schedule import Schedule

Placed = tuple[str, int]
"""A placement's name and its stages per device."""

LINEAR: tuple[Placed, ...] = (("linear", 1),)
LOOP: tuple[Placed, ...] = (("loop", 2), ("loop", 4))
LOOP_ANY: tuple[Placed, ...] = (("loop", 2), ("loop", 3), ("loop", 4))
V: tuple[Placed, ...] = (("v", 2),)
WAVES: tuple[Placed, ...] = (("v", 2), ("v", 4))

_CATALOGUE: dict[str, tuple[Callable[[Problem], Order | Recipe], tuple[Placed, ...]]] = {
    "gpipe": (gpipe, LINEAR),
    "1f1b": (one_f_one_b, LINEAR),
    "interleaved-1f1b": (interleaved_1f1b, LOOP),
    "bfs": (bfs, LOOP),
    "hanayo": (hanayo, WAVES),
    "zb-h1": (zb_h1, LINEAR),
    "zb-h2": (zb_h2, LINEAR),
    "zb-1p": (zb_1p, LINEAR),
    "zb-2p": (zb_2p, LINEAR),
    "zb-memory-limited": (zb_memory_limited, LINEAR),
    "interleaved-zb": (interleaved_zb, LOOP),
    "zbv": (zbv, V),
    "v-half": (v_half, V),
    "v-min": (v_min, V),
    "dualpipev": (dualpipev, V),
    "gis": (gis, LOOP_ANY),
    "gis-m": (gis_m, LOOP_ANY),
    "gis-h": (gis_h, LOOP_ANY),
    "gis-h-uniform": (gis_h_uniform, LOOP_ANY),
    "po-h": (po_h, LOOP_ANY),
    "po-f": (po_f, LOOP_ANY),
    "po-1": (offloading("po-1", gis_h_uniform, 1), LOOP_ANY[1:]),
    "po-3": (offloading("po-3", gis_h_uniform, 3), LOOP_ANY[2:]),
    "gis-offload-1": (offloading("gis-offload-1", gis, 1), LOOP_ANY),
    "gis-offload-2": (offloading("gis-offload-2", gis, 2), LOOP_ANY[1:]),
    "gis-offload-3": (offloading("gis-offload-3", gis, 3), LOOP_ANY[2:]),
    "gis-offload": (offloading("gis-offload", gis), LOOP_ANY),
    "gis-m-offload-1": (offloading("gis-m-offload-1", gis_m, 1), LOOP_ANY),
    "gis-m-offload-2": (offloading("gis-m-offload-2", gis_m, 2), LOOP_ANY[1:]),
    "gis-m-offload-3": (offloading("gis-m-offload-3", gis_m, 3), LOOP_ANY[2:]),
    "gis-h-offload-1": (offloading("gis-h-offload-1", gis_h, 1), LOOP_ANY),
    "gis-h-offload-2": (offloading("gis-h-offload-2", gis_h, 2), LOOP_ANY[1:]),
    "gis-h-offload-3": (offloading("gis-h-offload-3", gis_h, 3), LOOP_ANY[2:]),
    "gis-h-offload": (offloading("gis-h-offload", gis_h), LOOP_ANY),
    "gpipe-recompute": (recomputing("gpipe-recompute", gpipe), LINEAR),
    "1f1b-recompute": (recomputing("1f1b-recompute", one_f_one_b), LINEAR),
    "interleaved-1f1b-recompute": (recomputing("interleaved-1f1b-recompute", interleaved_1f1b), LOOP),
    "interleaved-zb-recompute": (recomputing("interleaved-zb-recompute", interleaved_zb), LOOP),
    "gis-recompute": (recomputing("gis-recompute", gis), LOOP_ANY),
    "gis-h-recompute-1": (recomputing("gis-h-recompute-1", gis_h, 1), LOOP_ANY),
    "gis-h-recompute-2": (recomputing("gis-h-recompute-2", gis_h, 2), LOOP_ANY[1:]),
    "gis-h-recompute-3": (recomputing("gis-h-recompute-3", gis_h, 3), LOOP_ANY[2:]),
    "gis-h-recompute": (recomputing("gis-h-recompute", gis_h), LOOP_ANY),
    "gis-h-uniform-recompute-1": (recomputing("gis-h-uniform-recompute-1", gis_h_uniform, 1), LOOP_ANY),
    "gis-h-uniform-recompute-2": (recomputing("gis-h-uniform-recompute-2", gis_h_uniform, 2), LOOP_ANY[1:]),
    "gis-h-uniform-recompute-3": (recomputing("gis-h-uniform-recompute-3", gis_h_uniform, 3), LOOP_ANY[2:]),
    "gis-h-uniform-recompute": (recomputing("gis-h-uniform-recompute", gis_h_uniform), LOOP_ANY),
}

PUBLISHED: dict[str, Callable[[Problem], Order | Recipe]] = {name: entry[0] for name, entry in _CATALOGUE.items()}
PLACEMENTS: dict[str, tuple[Placed, ...]] = {name: entry[1] for name, entry in _CATALOGUE.items()}


def published(problem: Problem, name: str, *, transfers: bool = True) -> Schedule:
    """Return the published schedule `name`, timed on the costs of `problem` but without its caps.

    Whether it fits is decided by what it holds. Where it does not, `machine.orders.retime` runs the same orders under
    the caps, each task waiting for its memory (or raises Stuck). Without `transfers` nothing is offloaded, which is
    faster to time and a schedule that is no slower. Raises NotDefined where the paper does not define it.
    """
    whole = recipe(problem, name)
    return timed(problem, whole if transfers else Recipe(whole.compute), name)


def recipe(problem: Problem, name: str) -> Recipe:
    """Return who computes what in which order, and what visits the host, in the published schedule `name`.

    Where the model passes every device once, its stages are ordered as one, and run one after the other within its
    place in the order: each is offloaded, reloaded and recomputed by itself, as saved-tensor hooks and activation
    checkpointing do.
    """
    is_lifted = is_linear(problem)
    found = PUBLISHED[name](joined(problem) if is_lifted else problem)
    whole = found if isinstance(found, Recipe) else Recipe(found)
    return _lifted(problem, whole, runs(problem)) if is_lifted else whole


def _lifted(problem: Problem, coarse: Recipe, ranges: list[range]) -> Recipe:
    """Return a recipe of joined stages for the stages of each of them."""
    compute = []
    for order in coarse.compute:
        fine: list[Task] = []
        again: set[tuple[int, int]] = set()
        for kind, joint, m in order:
            if kind is Kind.R:  # right before its backward, stage by stage
                again.add((joint, m))
                continue
            for s in ranges[joint] if kind is Kind.F else reversed(ranges[joint]):
                if kind in (Kind.I, Kind.B) and (joint, m) in again and problem.can_recompute(s):
                    fine.append(Task(Kind.R, s, m))
                fine.append(Task(kind, s, m))
        compute.append(fine)
    offloaded = ((s, m) for joint, m in coarse.offloaded for s in ranges[joint] if problem.can_offload(s))
    return Recipe(compute, frozenset(offloaded))


def is_for(name: str, placed: Placed) -> bool:
    """Whether the published schedule is worth trying on the placement; neighbouring stages count as one."""
    return (placed if placed[0] != "linear" else ("linear", 1)) in PLACEMENTS[name]


__all__ = ["PLACEMENTS", "PUBLISHED", "NotDefined", "Recipe", "is_for", "published", "recipe"]
