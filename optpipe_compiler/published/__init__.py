"""The schedules that plans are compared with, by name: one file for each paper, or pattern of several.

Each is a function from a Problem to the compute order of every device, or to a `Recipe` that also names the activations
to offload; it raises NotDefined, with the reason, where it is not defined. `METHODS` lists them with their kind:

* paper: a paper defines all of it, the parameters that it leaves open set by us (a group, a number of stages).
* stock: what training frameworks run.
* composition: an order of a paper with offloads or recomputations that neither a paper nor a framework combines with
  it.

Orders of our own are in plan/modulo.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from optpipe_compiler import machine
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput
from optpipe_compiler.model.neighbours import is_linear, joined, runs
from optpipe_compiler.model.placement import PATTERNS
from optpipe_compiler.model.schedule import Kind, Schedule, Stuck, Task
from optpipe_compiler.published.alternating import (
    bfs,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    one_f_one_b,
    seq1f1b,
    seq1f1b_interleaved,
    seq1f1b_interleaved_zb,
    seq1f1b_zb,
    slimpipe,
    zb_h1,
    zb_h2,
)
from optpipe_compiler.published.common import NotDefined, Order, Recipe, rows
from optpipe_compiler.published.dualpipev import dualpipev
from optpipe_compiler.published.gis import gis, gis_h, gis_h_uniform, gis_m
from optpipe_compiler.published.hanayo import hanayo
from optpipe_compiler.published.own import OwnOrder, recipe_of
from optpipe_compiler.published.pipeoffload import offloading, po_h, streaming
from optpipe_compiler.published.recompute import recomputing
from optpipe_compiler.published.transfers import timed
from optpipe_compiler.published.v_pattern import v_half, v_min
from optpipe_compiler.published.zb_memory_limited import zb_1p, zb_2p, zb_memory_limited
from optpipe_compiler.published.zbv import zbv

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.documents.ir import BaselineKind
    from optpipe_compiler.model.problem import Problem

Placed = tuple[str, int]
"""A placement's name and its stages per device."""

LINEAR: tuple[Placed, ...] = (("linear", 1),)
LOOP: tuple[Placed, ...] = (("loop", 2), ("loop", 4))
LOOP_ANY: tuple[Placed, ...] = (("loop", 2), ("loop", 3), ("loop", 4))
V: tuple[Placed, ...] = (("v", 2),)
WAVES: tuple[Placed, ...] = (("v", 2), ("v", 4))


@dataclass(frozen=True)
class Method:
    """A schedule to compare with: how it is made, the placements worth trying, whose it is, and what to cite.

    The citation of a composition is that of its order; for stock it names a framework that has it.
    """

    order: Callable[[Problem], Order | Recipe]
    placements: tuple[Placed, ...]
    kind: BaselineKind | Literal["own"]
    """own: registered from outside of this package."""
    source: str
    is_selective: bool = False
    """Whether it is for layers that all make their cheap tensors again in their backward, where they can."""
    sliced: bool = False
    """Whether it is for microbatches that are cut into slices, or else for whole ones."""

    @property
    def not_searched(self) -> str:
        """Say which placements it is for."""
        if self.is_selective:
            return "is for layers that can make cheap tensors again, under a cap that does not hold all of them"
        return f"is for a {self.placed} per device, which is not searched here"

    @property
    def placed(self) -> str:
        """The placements that it is for: `loop of 2 or 4 stages`."""
        counts = [str(count) for _, count in self.placements]
        several = " or ".join([", ".join(counts[:-1]), counts[-1]] if len(counts) > 1 else counts)
        return f"{self.placements[0][0]} of {several} {'stage' if several == '1' else 'stages'}"


_1F1B = "arXiv:2006.09503"
_INTERLEAVED = "arXiv:2104.04473"
_ZERO_BUBBLE = "arXiv:2401.10241"
_CONTROLLABLE = "arXiv:2405.15362"
_PIPEOFFLOAD = "arXiv:2503.01328"
_SEQ1F1B = "arXiv:2406.03488"
_CHECKPOINTING = "Megatron-LM"
_HOOKS = "torchtune"


def _treated(
    make: Callable[..., Callable[[Problem], Order | Recipe]],
    name: str,
    order: Callable[[Problem], Order],
    placements: tuple[Placed, ...],
    kind: BaselineKind,
    source: str,
    numbers: tuple[int | None, ...] = (None,),
    *,
    sliced: bool = False,
) -> dict[str, Method]:
    """Return an order with activations of its lowest stages recomputed or offloaded; of so many, None: of all."""
    found: dict[str, Method] = {}
    for number in numbers:
        full = f"{name}-{'recompute' if make is recomputing else 'offload'}" + (f"-{number}" if number else "")
        more = tuple(one for one in placements if one[1] > (number or 0))
        found[full] = Method(make(full, order, number), more, kind, source, sliced=sliced)
    return found


_SOME = (1, 2, 3)
METHODS: dict[str, Method] = {
    "gpipe": Method(gpipe, LINEAR, "paper", "arXiv:1811.06965"),
    **_treated(recomputing, "gpipe", gpipe, LINEAR, "paper", "arXiv:1811.06965"),
    "1f1b": Method(one_f_one_b, LINEAR, "paper", _1F1B),
    "interleaved-1f1b": Method(interleaved_1f1b, LOOP, "paper", _INTERLEAVED),
    "bfs": Method(bfs, LOOP, "paper", "arXiv:2211.05953"),
    "hanayo": Method(hanayo, WAVES, "paper", "arXiv:2308.15762"),
    "zb-h1": Method(zb_h1, LINEAR, "paper", _ZERO_BUBBLE),
    "zb-h2": Method(zb_h2, LINEAR, "paper", _ZERO_BUBBLE),
    "zb-1p": Method(zb_1p, LINEAR, "paper", _ZERO_BUBBLE),
    "zb-2p": Method(zb_2p, LINEAR, "paper", _ZERO_BUBBLE),
    "zb-memory-limited": Method(zb_memory_limited, LINEAR, "paper", _ZERO_BUBBLE),
    "zbv": Method(zbv, V, "paper", _ZERO_BUBBLE),
    "v-half": Method(v_half, V, "paper", _CONTROLLABLE),
    "v-min": Method(v_min, V, "paper", _CONTROLLABLE),
    "dualpipev": Method(dualpipev, V, "paper", "github.com/deepseek-ai/DualPipe"),
    "gis": Method(gis, LOOP_ANY, "paper", _PIPEOFFLOAD),
    "gis-m": Method(gis_m, LOOP_ANY, "paper", _PIPEOFFLOAD),
    "gis-h": Method(gis_h, LOOP_ANY, "paper", _PIPEOFFLOAD),
    "gis-h-uniform": Method(gis_h_uniform, LOOP_ANY, "paper", _PIPEOFFLOAD),
    "po-h": Method(po_h, LOOP_ANY, "paper", _PIPEOFFLOAD),
    "po-f": Method(offloading("po-f", gis_h_uniform), LOOP_ANY, "paper", _PIPEOFFLOAD),
    "po-1": Method(offloading("po-1", gis_h_uniform, 1), LOOP_ANY[1:], "paper", _PIPEOFFLOAD),
    "po-3": Method(offloading("po-3", gis_h_uniform, 3), LOOP_ANY[2:], "paper", _PIPEOFFLOAD),
    "interleaved-zb": Method(interleaved_zb, LOOP, "stock", f"torch, {_ZERO_BUBBLE}"),
    **_treated(recomputing, "1f1b", one_f_one_b, LINEAR, "stock", _CHECKPOINTING),
    **_treated(recomputing, "interleaved-1f1b", interleaved_1f1b, LOOP, "stock", _CHECKPOINTING, (None, *_SOME)),
    **_treated(streaming, "1f1b", one_f_one_b, LINEAR, "stock", _HOOKS),
    **_treated(streaming, "interleaved-1f1b", interleaved_1f1b, LOOP, "stock", _HOOKS),
    "1f1b-selective": Method(one_f_one_b, LINEAR, "stock", _CHECKPOINTING, is_selective=True),
    "interleaved-1f1b-selective": Method(interleaved_1f1b, LOOP, "stock", _CHECKPOINTING, is_selective=True),
    **_treated(offloading, "gis", gis, LOOP_ANY, "composition", _PIPEOFFLOAD, (*_SOME, None)),
    **_treated(offloading, "gis-m", gis_m, LOOP_ANY, "composition", _PIPEOFFLOAD, _SOME),
    **_treated(offloading, "gis-h", gis_h, LOOP_ANY, "composition", _PIPEOFFLOAD, (*_SOME, None)),
    **_treated(recomputing, "gis", gis, LOOP_ANY, "composition", _PIPEOFFLOAD),
    **_treated(recomputing, "gis-h", gis_h, LOOP_ANY, "composition", _PIPEOFFLOAD, (*_SOME, None)),
    **_treated(recomputing, "gis-h-uniform", gis_h_uniform, LOOP_ANY, "composition", _PIPEOFFLOAD, (*_SOME, None)),
    **_treated(recomputing, "interleaved-zb", interleaved_zb, LOOP, "composition", _ZERO_BUBBLE),
    "seq1f1b": Method(seq1f1b, LINEAR, "paper", _SEQ1F1B, sliced=True),
    "seq1f1b-zb": Method(seq1f1b_zb, LINEAR, "paper", _SEQ1F1B, sliced=True),
    "seq1f1b-interleaved": Method(seq1f1b_interleaved, LOOP, "paper", _SEQ1F1B, sliced=True),
    "seq1f1b-interleaved-zb": Method(seq1f1b_interleaved_zb, LOOP, "paper", _SEQ1F1B, sliced=True),
    "slimpipe": Method(slimpipe, LOOP, "paper", "arXiv:2504.14519", sliced=True),
    **_treated(recomputing, "seq1f1b", seq1f1b, LINEAR, "composition", _SEQ1F1B, sliced=True),
    **_treated(streaming, "seq1f1b", seq1f1b, LINEAR, "composition", _SEQ1F1B, sliced=True),
}


def register(name: str, order: OwnOrder, placements: tuple[Placed, ...], source: str) -> None:
    """Add a schedule from outside of this package; raise BadInput for a name that is built in, or no placement."""
    if name in METHODS and METHODS[name].kind != "own":
        raise BadInput(f"{name!r} is the name of a built-in schedule, expected another one")
    if not name or not name.isprintable() or "," in name or name in ("all", "paper", "stock", "composition", "own"):
        raise BadInput(f"{name!r} cannot name a schedule, expected printable text without commas")
    if not placements or any(one not in PATTERNS or count < 1 for one, count in placements):
        said = ", ".join(f"{one!r} with {counted(count, 'stage')} per device" for one, count in placements)
        raise BadInput(
            f"{name} is for {said or 'no placement'}, expected one of {', '.join(PATTERNS)} and at least 1 stage "
            "per device"
        )
    METHODS[name] = Method(lambda problem: recipe_of(name, problem, order), placements, "own", source)


def published(problem: Problem, name: str, *, transfers: bool = True) -> Schedule:
    """Return the published schedule `name`, timed on the costs of `problem` but without its caps.

    Whether it fits is decided by what it holds. Where it does not, `machine.orders.retime` runs the same orders under
    the caps, each task waiting for its memory (or raises Stuck). Without `transfers` nothing is offloaded, which is
    faster to time and a schedule that is no slower. Raises NotDefined where the paper does not define it.
    """
    whole = recipe(problem, name)
    return timed(problem, whole if transfers else Recipe(whole.compute), name)


def earliest(late: Schedule) -> Schedule:
    """Return the same orders at their earliest in no more memory: transfers are timed to come as late as they may."""
    if not late.count(Kind.D):
        return late
    try:
        early = machine.orders.retime(late, replace(late.problem, budget=tuple(machine.orders.peaks(late))))
    except Stuck:  # ops of no length hold memory for no time and keep others from starting; messages may come earlier
        return late
    return min(Schedule(late.problem, late.method, early.ticks), late, key=lambda one: one.makespan)


def recipe(problem: Problem, name: str) -> Recipe:
    """Return who computes what in which order, and what visits the host, in the published schedule `name`.

    Where the model passes every device once, its stages are ordered as one, and run one after the other within its
    place in the order: each is offloaded, reloaded and recomputed by itself, as saved-tensor hooks and activation
    checkpointing do.
    """
    if METHODS[name].sliced != (problem.slices > 1):
        what = "that are cut into slices" if METHODS[name].sliced else "that are not cut into slices"
        raise NotDefined(f"{name} is for microbatches {what}")
    is_lifted = is_linear(problem) or (_is_on_one_device(problem) and LINEAR[0] in METHODS[name].placements)
    found = METHODS[name].order(joined(problem) if is_lifted else problem)
    whole = found if isinstance(found, Recipe) else Recipe(found)
    return _lifted(problem, whole, runs(problem)) if is_lifted else whole


def _is_on_one_device(problem: Problem) -> bool:
    """Whether one device owns several stages: a linear placement and a loop are the same there."""
    return problem.devices == 1 < len(problem.stages)


def _lifted(problem: Problem, coarse: Recipe, ranges: list[range]) -> Recipe:
    """Return a recipe of joined stages for the stages of each of them."""
    compute = []
    for order in coarse.tasks():
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
        compute.append(rows(fine))
    if coarse.offloaded is None:
        return Recipe(compute)
    offloaded = coarse.offloaded.repeat(list(map(len, ranges)), axis=0)
    offloaded[[s for s in range(len(problem.stages)) if not problem.can_offload(s)]] = False
    return Recipe(compute, offloaded, streaming=coarse.streaming)


def is_for(name: str, placed: Placed, *, is_sliced: bool = False) -> bool:
    """Whether the published schedule is worth trying on the placement; neighbouring stages count as one."""
    one = placed if placed[0] != "linear" else ("linear", 1)
    return one in METHODS[name].placements and METHODS[name].sliced == is_sliced


__all__ = [
    "METHODS",
    "Method",
    "NotDefined",
    "Recipe",
    "earliest",
    "is_for",
    "published",
    "recipe",
    "register",
]
