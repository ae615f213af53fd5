"""What each part of the search earns: `python -m bench.ablation [--cases PATTERN] [--parts PATTERN] [--seeds N]`.

Every case is searched with everything, and with one part left out or one constant changed, in reproducible mode (the
same ops whatever the machine does meanwhile). A part's worth on a case is how much longer plans take without it, seed
by seed. The planner knows nothing of it: what is left out is patched here, in compiled code edited in a copy of it.
Parts of the local search are measured on it alone, from where it begins to climb; other parts on whole plans.

Makespans go to a JSON file, so that cases, parts and seeds can be added at another time: each stands beside plans with
everything of the same commit and the same limit. `--report FILE` writes the Markdown tables of all that is in it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest.mock import patch

from msgspec import structs

from bench.planner import COSTS, Case
from optpipe_compiler import compiler
from optpipe_compiler.compiler import Options, compile_schedule, settled, spreads_of
from optpipe_compiler.costs import gpus, models
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.documents import profile as profiles
from optpipe_compiler.forecast import choice
from optpipe_compiler.forecast.executions import quantiles
from optpipe_compiler.machine import policy
from optpipe_compiler.model import bounds
from optpipe_compiler.plan import (
    candidates,
    carried,
    cuts,
    exact,
    explore,
    fewer,
    incumbents,
    instances,
    least_memory,
    local_search,
    seeds,
    wishes,
)
from optpipe_compiler.plan.instances import in_time
from optpipe_compiler.plan.local_search import LocalSearch, Realiser, SearchedProblem
from optpipe_compiler.solver.worker import Limits
from optpipe_torch.estimates.estimate import EstimateOptions, estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.model.placement import Layout
    from optpipe_compiler.model.problem import Problem
    from optpipe_compiler.plan.local_search import Found, _Climber

    Makespans = dict[str, float]

GB = 10**9
PLACED_S = 20.0
"""The limit that says which placements the local search has, where it is measured alone."""
ROOM = Path(compiler.__file__).parent
UNSEEN = 3
"""A seed of executions that choose no plan."""
SLICEABLE = {"sliceable": True, "kv_fraction": 0.05, "boundary_fraction": 0.05, "layers_per_device": 4}
COSTS_HERE = {
    "6.2B-tied": COSTS["6.2B"] | {"head_ms": (12.66, 9.38, 13.38), "embedding_ms": (0.5, 0.0, 0.5)},
    "unit-sliced": COSTS["unit"] | SLICEABLE,
    "unit-sliced-slow": COSTS["unit-slow-links"] | SLICEABLE,
}
"""Costs of cases that are measured here alone."""


@dataclass(frozen=True)
class Group:
    """Cases of one kind, and the time limit of their plans."""

    title: str
    seconds: float
    cases: tuple[Case, ...]
    is_alone: bool = True
    """Whether the local search is measured alone."""
    asked: dict[str, object] = field(default_factory=dict)
    """What else whole plans are asked for, by its name in `Options`; with noise, what is measured is the 95th
    percentile of a step in executions whose noise chose no plan."""
    earlier: Callable[[Case], Case] | None = None
    """The case of the plan that is there already."""


BINDING = Group(
    "Where memory binds",
    3.0,
    (
        Case("unit", 8, 32, 0.25),
        Case("unit", 8, 32, 0.125),
        Case("6.2B", 8, 32, 0.25),
        Case("unit-slow-links", 8, 32, 0.25),
        Case("unit-no-links", 8, 32, 0.25),
    ),
)
LITTLE = Group(
    "An activation for all layers of a device",
    3.0,
    (Case("6.2B", 8, 16, 0.125), Case("6.2B", 8, 32, 0.125), Case("unit-slow-links", 8, 32, 0.125)),
)
HEAD = Group("A head in parts", 6.5, (Case("6.2B-head-parts", 8, 32, 0.25), Case("6.2B-head-parts", 8, 32, 0.125)))
WIDE = Group("More devices", 8.0, (Case("unit", 16, 64, 0.125),))
LONG = Group(
    "More microbatches than show how a step goes on",
    4.0,
    (Case("unit", 8, 128, 0.125), Case("6.2B", 8, 128, 0.25), Case("unit-slow-links", 4, 128, 0.25)),
)
FUSED = Group(
    "A backward in one piece takes 0.93 of its halves",
    3.0,
    (Case("6.2B-fused", 8, 32, 0.25), Case("6.2B-fused", 8, 32, 1.0)),
)
SMALL = Group(
    "Small enough for CP-SAT",
    20.0,
    (Case("unit", 4, 16, 0.25), Case("6.2B", 4, 16, 0.125), Case("6.2B", 4, 3, 1.0), Case("6.2B", 2, 8, 0.25)),
    is_alone=False,
)
MANY = Group(
    "Many devices",
    60.0,
    (
        Case("unit", 32, 128, 0.25),
        Case("unit", 32, 128, 0.125),
        Case("unit", 64, 512, 0.25),
        Case("unit", 64, 512, 0.125),
    ),
    is_alone=False,
)
WHOLE_PLANS = Group("Whole plans where memory binds", 3.0, BINDING.cases, is_alone=False)
SMALL_MEASURED = Group(
    "Small enough for CP-SAT: the measured profile",
    12.0,
    tuple(Case("measured", 2, 8, mem_mb / 2000) for mem_mb in (224, 231.4, 256)),
    is_alone=False,
)
FEW = Group(
    "One or two layers a device",
    1.0,
    (
        Case("unit-x1", 8, 32, 0.25),
        Case("6.2B-x1", 8, 32, 0.5),
        Case("unit-x2", 8, 32, 0.25),
        Case("6.2B-x2", 8, 32, 0.25),
    ),
)
VERY_MANY = Group("64 devices", 60.0, MANY.cases[2:], is_alone=False)
MEASURED = Group(
    "A measured profile: halves of decoder layers on two devices",
    3.0,
    tuple(Case("measured", 2, 8, mem_mb / 2000) for mem_mb in (231.4, 233, 240, 256)),
)
PLENTY = Group(
    "Time to climb more than once",
    22.0,
    (Case("6.2B", 8, 16, 0.125), Case("6.2B", 8, 16, 0.25), Case("6.2B", 4, 16, 0.25), Case("unit", 4, 16, 0.125)),
)
SHARED_LINKS = Group(
    "Whole plans behind shared links",
    20.0,
    (
        Case("6.2B", 8, 16, 0.125),
        Case("6.2B", 8, 16, 0.25),
        Case("6.2B", 8, 32, 0.125),
        Case("unit-slow-links", 8, 32, 0.25),
        Case("6.2B", 4, 16, 0.125),
        Case("unit", 16, 64, 0.125),
    ),
    is_alone=False,
)
SELECTED = Group(
    "Whole plans of the measured profile",
    3.0,
    (Case("measured", 2, 8, 0.112), *MEASURED.cases),
    is_alone=False,
    asked={"noise": 0.0},
)
TIGHT = Group(
    "Less room than for the layers of a device",
    3.0,
    (
        Case("6.2B", 8, 16, 0.0625),
        Case("unit", 8, 16, 0.0625),
        Case("6.2B", 8, 16, 0.04),
        Case("6.2B-x8", 4, 8, 0.0625),
        Case("6.2B", 8, 16, 0.03125),
    ),
    is_alone=False,
)
TIED = Group(
    "Embedding and head share weights",
    3.0,
    (Case("6.2B-tied", 4, 16, 0.5), Case("6.2B-tied", 4, 16, 0.35), Case("6.2B-tied", 4, 16, 0.25)),
    is_alone=False,
)
SLICED = Group(
    "Layers that run slice by slice",
    3.0,
    (Case("unit-sliced", 8, 32, 0.25), Case("unit-sliced", 8, 8, 0.125), Case("unit-sliced-slow", 8, 8, 0.0625)),
    is_alone=False,
    asked={"slices": "auto"},
)
SEEDED = Group(
    "Beside the plan of half the memory",
    3.0,
    tuple(replace(case, cap=0.25) for case in BINDING.cases[1:4]),
    is_alone=False,
    earlier=lambda case: replace(case, cap=case.cap / 2),
)
GROWN = Group(
    "Beside the plan of half the microbatches",
    3.0,
    (Case("6.2B", 8, 32, 0.25), Case("unit", 8, 32, 0.125), Case("unit-slow-links", 8, 32, 0.25)),
    is_alone=False,
    earlier=lambda case: replace(case, microbatches=case.microbatches // 2),
)
LONG_PLANS = Group("Whole plans of many microbatches", 4.0, LONG.cases, is_alone=False)
QUICK = Group("Plans of the heuristics alone", 60.0, WHOLE_PLANS.cases[1:4], is_alone=False, asked={"search": False})
NOISY = Group(
    "The 95th percentile of a step whose ops vary by 0.1",
    3.0,
    (Case("6.2B", 4, 16, 0.25), Case("6.2B", 8, 32, 0.25), Case("unit-slow-links", 8, 32, 0.25)),
    is_alone=False,
    asked={"noise": 0.1},
)
LAYERS = Group(
    "16 layers a device",
    6.5,
    (Case("6.2B-x16", 4, 16, 0.25), Case("6.2B-x16", 4, 16, 0.125)),
    is_alone=False,
)
STAGES = Group(
    "Several layers in a stage",
    3.0,
    (
        Case("unit-slow-links-x8", 8, 32, 0.25),
        Case("unit-slow-links-x8", 8, 32, 0.125),
        Case("6.2B-x8", 8, 32, 0.125),
        Case("unit-slow-links-x16", 4, 16, 0.25),
        Case("6.2B-x16", 2, 8, 0.25),
    ),
    is_alone=False,
)
V_GIVEN = Group(
    "A V of four layers in a stage",
    3.0,
    (Case("unit-slow-links-x8", 8, 32, 0.25), Case("unit-slow-links-x8", 8, 32, 0.125)),
    is_alone=False,
    asked={"placement": "v", "stages_per_device": 2},
)
LOOP_GIVEN = Group(
    "A loop of three stages, a head in parts",
    3.0,
    HEAD.cases,
    is_alone=False,
    asked={"placement": "loop", "stages_per_device": 3},
)
MODELS = Group(
    "Whole plans of models on H100s",
    4.0,
    tuple(
        Case(name, 8, 16, mem_gb / 8)
        for name, caps in (("gpt2-xl", (9, 12, 40)), ("qwen2-7b", (30, 75)), ("llama-3-8b", (30, 75)))
        for mem_gb in caps
    ),
    is_alone=False,
)
UNEVEN = Group(
    "Whole plans of models whose blocks the devices do not divide",
    8.0,
    tuple(
        Case(name, devices, {6: 24, 16: 32}[devices], mem_gb / devices)
        for name, devices, caps in (("llama-3-8b", 16, (20, 30, 45)), ("mistral-7b", 6, (40, 60)))
        for mem_gb in caps
    ),
    is_alone=False,
)
HALVES = Group(
    "Whole plans of half blocks",
    8.0,
    tuple(
        Case(f"llama-13b{gpu}-halves", 8, 16, mem_gb / 8)
        for gpu, mem_gb in (("", 36), ("", 60), ("-a100", 45), ("-a100", 60))
    ),
    is_alone=False,
)
GROUPS = (
    BINDING,
    LITTLE,
    FEW,
    WHOLE_PLANS,
    SHARED_LINKS,
    HEAD,
    WIDE,
    MANY,
    VERY_MANY,
    LONG,
    FUSED,
    SMALL,
    SMALL_MEASURED,
    MEASURED,
    PLENTY,
    SELECTED,
    TIGHT,
    TIED,
    SLICED,
    SEEDED,
    GROWN,
    LONG_PLANS,
    QUICK,
    NOISY,
    LAYERS,
    STAGES,
    V_GIVEN,
    LOOP_GIVEN,
    MODELS,
    UNEVEN,
    HALVES,
)
WHOLE = "nothing"
"""The part of a plan with everything."""


@dataclass(frozen=True)
class Part:
    """What is left out or changed: patches of the planner, or (file, before, after) in its compiled code."""

    patches: tuple[object, ...] = ()
    edits: tuple[tuple[str, str, str], ...] = ()
    groups: tuple[Group, ...] = (BINDING, HEAD)
    """Where it may matter."""


def wished(*, modulo: bool) -> object:
    """Keep one kind of wished orders, those of modulo schedules or the published ones."""
    every = wishes.names

    def names(*arguments: object) -> list[str]:
        found = every(*arguments)  # type: ignore[arg-type]
        return [name for name in found if name.startswith("modulo") == modulo]

    return patch.object(local_search, "names", names)


def moves(**shares: int) -> Part:
    return Part((patch.dict(policy.MOVES, shares),))


def search(**constants: object) -> Part:
    return Part(tuple(patch.object(local_search, name, value) for name, value in constants.items()))


def constant(room: object, name: str, value: object, *groups: Group) -> Part:
    return Part((patch.object(room, name, value),), groups=groups)


def policies(before: str, after: str) -> Part:
    return Part(edits=(("machine/policy.py", before, after),), groups=(BINDING, LITTLE, FEW, HEAD))


def back_at_first(**stages: int) -> Part:
    patches = tuple(patch.object(policy, name, before) for name, before in stages.items())
    return Part(patches, groups=(BINDING, LITTLE))


def farthest(stages: int) -> Part:
    edit = ("machine/state.py", "\nFARTHEST = 8\n", f"\nFARTHEST = {stages}\n")
    return Part(edits=(edit,), groups=(BINDING, LITTLE))


def wishes_edited(before: str, after: str) -> Part:
    return Part(edits=(("plan/wishes.py", before, after),))


def for_any_cap(found: list[tuple[Layout, Problem]], _: object) -> list[tuple[Layout, Problem]]:
    """Leave out the placements that are for small caps alone."""
    return [each for each in found if each[0].below_bytes is None]


def nothing(*_: object, **__: object) -> None:
    return None


def shares(local: float) -> tuple[object, ...]:
    return tuple(patch.object(compiler, name, local) for name in ("LOCAL_SHARE", "SMALL_SHARE"))


def quicker(profile: Profile, even: Layout) -> Iterator[Layout]:
    """The first cut of `cuts.others`, where its busiest device is lighter: the one that is not for memory."""
    return (one for one in islice(cuts.others(profile, even), 1) if cuts.lighter([even, one], profile) is one)


def to_the_end_of_one(costs: cuts._Costs, one: Layout, microbatches: int) -> tuple[int, ...]:
    """`to_the_end` where there is one stage per device."""
    return TO_THE_END(costs, one, microbatches) if one.stages == one.devices else (0,)


TO_THE_END = cuts._Costs.to_the_end
NO_WINDOWS = patch.object(exact._Exact, "polish", nothing)
NO_MODEL = patch.object(exact, "EXACT", 0)
PARTS = {
    "published schedules as candidates": Part(
        (patch.object(candidates.Candidates, "steps", lambda *_: iter(())),), groups=(WHOLE_PLANS,)
    ),
    "published orders as wishes": Part((wished(modulo=True),)),
    "modulo schedules as wishes": Part((wished(modulo=False),)),
    "first offloads by how long activations stay": Part(
        (patch.object(wishes, "STAYS", ()),), groups=(BINDING, FEW, HEAD)
    ),
    "first offloads of the lowest stages": wishes_edited("count in range(1, turns)]", "count in ()]"),
    "first recomputes of the lowest stages": wishes_edited("count in range(1, turns + 1)]", "count in ()]"),
    "first offloads and recomputes mixed": Part((patch.object(wishes, "MIXED", 1),), groups=(BINDING, FEW)),
    "offloads of a part of a stage": Part(
        (patch.object(instances, "link_share", lambda _: 1.0),), groups=(BINDING, HEAD, STAGES, V_GIVEN)
    ),
    "loops of the smallest stages": Part((patch.object(instances, "_finest", lambda *_: []),)),
    "other cuts of a placement": Part(
        tuple(patch.object(instances, name, lambda *_: iter(())) for name in ("others", "earlier")),
        groups=(BINDING, HEAD, LOOP_GIVEN),
    ),
    "cuts for memory": Part((patch.object(instances, "others", quicker),), groups=(MODELS, HEAD)),
    "cuts with more layers where the first microbatch comes earlier": Part(
        (patch.object(cuts._Costs, "to_the_end", lambda *_: (0,)),), groups=(MODELS, UNEVEN)
    ),
    "such cuts with several stages per device": Part(
        (patch.object(cuts._Costs, "to_the_end", to_the_end_of_one),), groups=(MODELS, HALVES)
    ),
    "orders of the devices but by number": constant(instances, "other_order", lambda *_: None, SHARED_LINKS),
    "sparing": Part((patch.object(compiler, "spare", nothing),), groups=(WHOLE_PLANS,)),
    "local search": Part(shares(0.0), groups=(WHOLE_PLANS,)),
    "few microbatches first": Part((patch.object(local_search, "shortened", lambda problem: problem),), groups=(LONG,)),
    "64 microbatches at least, for 4 per device": Part((patch.object(local_search, "LEAST", 0),), groups=(LONG,)),
    "fewer devices first": Part((patch.object(local_search, "narrowed", lambda _: None),), groups=(MANY,)),
    "a sixth of the time on fewer devices for a third": constant(local_search, "FEWER_SHARE", 0.17, VERY_MANY),
    "half of the time on fewer devices for a third": constant(local_search, "FEWER_SHARE", 0.5, VERY_MANY),
    "one wish of fewer devices for 3": constant(local_search, "WISHES", 1, VERY_MANY),
    "one device of 8 first for 4": constant(fewer, "ONE_OF", 8, VERY_MANY),
    "what executions take of a policy that promises less": Part(
        (patch.object(local_search, "LOOK", 1 << 62),), groups=(BINDING, LITTLE, MEASURED)
    ),
    "a look at what executions take after 2 calls for 8": Part(search(LOOK=2).patches, groups=(BINDING, MEASURED)),
    "a look at what executions take after 32 calls for 8": Part(search(LOOK=32).patches, groups=(BINDING, MEASURED)),
    "more than two climbers": Part((patch.object(local_search, "CLIMBERS", 2),), groups=(BINDING, WIDE)),
    "4 climbers for 8": search(CLIMBERS=4),
    "16 climbers for 8": search(CLIMBERS=16),
    "best pairs of other instances": Part(
        search(OTHERS=0).patches, groups=(BINDING, LITTLE, FEW, HEAD, FUSED, MEASURED)
    ),
    "thresholds where a climb stands still": Part(
        search(THRESHOLD=0.0).patches, groups=(BINDING, LITTLE, FEW, HEAD, FUSED, MEASURED)
    ),
    "thresholds from half the value": Part(search(THRESHOLD=0.005).patches, groups=(BINDING, MEASURED)),
    "thresholds from twice the value": Part(search(THRESHOLD=0.02).patches, groups=(BINDING, MEASURED)),
    "thresholds after a third of the runs": Part(search(STILL_RUNS=300).patches, groups=(BINDING, MEASURED)),
    "thresholds after twice the runs": Part(search(STILL_RUNS=1600).patches, groups=(BINDING, MEASURED)),
    "thresholds for half the runs": Part(search(COOLING_RUNS=400).patches, groups=(BINDING, MEASURED)),
    "thresholds for twice the runs": Part(search(COOLING_RUNS=1600).patches, groups=(BINDING, MEASURED)),
    "5 rounds for 10": search(ROUNDS=5),
    "20 rounds for 10": search(ROUNDS=20),
    "restarts": Part(search(RESTART_AFTER=1 << 40).patches, groups=(PLENTY,)),
    "restarts after half the time": Part(search(RESTART_AFTER=1).patches, groups=(PLENTY,)),
    "moves of ranks": moves(shift=0),
    "moves of treatments": moves(treat=0),
    "moves of what forwards leave to earlier ones": Part(moves(yields=0).patches, groups=(BINDING, FEW, HEAD)),
    "room that forwards leave to earlier ones": policies(".holds = by.yields[0, turn]", ".holds = 0"),
    "waits of forwards for earlier ones": policies(".waits = by.yields[1, turn]", ".waits = 0"),
    "waits for the first microbatches alone": Part(
        edits=(("machine/dispatch.py", "if stage.waits and", "if stage.waits and first < x.devices.shape[0] and"),),
        groups=(BINDING, FEW, HEAD),
    ),
    "room and waits for earlier forwards": Part(
        edits=(
            ("machine/policy.py", ".holds = by.yields[0, turn]", ".holds = 0"),
            ("machine/policy.py", ".waits = by.yields[1, turn]", ".waits = 0"),
        ),
        groups=(BINDING, FEW, HEAD, WIDE),
    ),
    "moves of when activations come back": Part(moves(before=0).patches, groups=(BINDING, LITTLE, MEASURED)),
    "recomputes that wait until they are due": Part(
        edits=(("machine/policy.py", ".recomputed_before = by.before[0, turn]", ".recomputed_before = 0"),),
        groups=(BINDING, LITTLE, MEASURED),
    ),
    "reloads that wait until they are due": Part(
        edits=(("machine/policy.py", ".reloaded_before = by.before[1, turn]", ".reloaded_before = 0"),),
        groups=(BINDING, LITTLE, MEASURED),
    ),
    "microbatches that go before others at an end": Part(
        moves(lead=0).patches, groups=(BINDING, LITTLE, FEW, HEAD, WIDE, MEASURED)
    ),
    "4 times the longest forward and backward for 8": policies("LEAD = 8", "LEAD = 4"),
    "16 times the longest forward and backward for 8": policies("LEAD = 8", "LEAD = 16"),
    "moves of microbatches at an end 3 for 6": Part(moves(lead=3).patches, groups=(BINDING, LITTLE)),
    "moves of microbatches at an end 12 for 6": Part(moves(lead=12).patches, groups=(BINDING, LITTLE)),
    "moves of splits": Part(moves(split=0).patches, groups=(BINDING, HEAD, FUSED)),
    "moves of ranks 20 for 45": moves(shift=20, treat=78),
    "moves of ranks 70 for 45": moves(shift=70, treat=28),
    "moves of splits 10 for 2": Part(moves(split=10).patches, groups=(FUSED,)),
    "moves that change nothing of the value": policies(
        "_value(x, trial, given, reached + threshold)", "_value(x, trial, given, reached + threshold - 1)"
    ),
    "passing over moves that change nothing of the policy": policies(
        "while not _change(trial, x, given):  # what changes nothing is not run\n                pass",
        "_change(trial, x, given)",
    ),
    "moves of ranks of all turns": policies("is_whole = below(x, 5) == 0", "is_whole = False"),
    "treatments by part of the step": policies("part = below(x, PARTS + 1)", "part = PARTS"),
    "treatments of single microbatches in a row": policies("least = below(x, sorts + 1)", "least = sorts"),
    "2 microbatches in a row for 4": Part((patch.object(policy, "SORTS", 2),), groups=(BINDING, LITTLE, FEW, HEAD)),
    "treatments of all devices at once": policies("- 1, below(x, 3)", "- 1, 1 + below(x, 2)"),
    "treatments of several devices at once": policies("- 1, below(x, 3)", "- 1, 1"),
    "recomputes before their gradients": Part(
        edits=(("machine/dispatch.py", "(is_dropped or act.gradient <= now)", "act.gradient <= now"),)
    ),
    "reloads no more than 2 ahead for 1": Part(edits=(("machine/dispatch.py", "\nAHEAD = 1\n", "\nAHEAD = 2\n"),)),
    "one run of a policy for up to 4": Part(edits=(("machine/policy.py", "\nTRIES = 4\n", "\nTRIES = 1\n"),)),
    "two runs of a policy for up to 4": Part(edits=(("machine/policy.py", "\nTRIES = 4\n", "\nTRIES = 2\n"),)),
    "0.7 of the time for the local search for 0.92": constant(compiler, "LOCAL_SHARE", 0.7, WHOLE_PLANS),
    "all of the time for the local search for 0.92": constant(compiler, "LOCAL_SHARE", 1.0, WHOLE_PLANS),
    "0.3 of the time for the local search for 0.6": constant(compiler, "SMALL_SHARE", 0.3, SMALL, SMALL_MEASURED),
    "0.9 of the time for the local search for 0.6": constant(compiler, "SMALL_SHARE", 0.9, SMALL, SMALL_MEASURED),
    "other ticks where rounded a schedule does not fit": constant(exact, "FINER", exact.FINER[:1], SMALL_MEASURED),
    "0.35 of what is left for the full model for 0.7": constant(exact, "EXACT_SHARE", 0.35, SMALL),
    "windows of 2 s for 4": constant(exact, "WINDOW_S", 2.0, SMALL),
    "windows of 8 s for 4": constant(exact, "WINDOW_S", 8.0, SMALL),
    "windows": Part((NO_WINDOWS,), groups=(SMALL,)),
    "the full model, its time to windows": Part((NO_MODEL, *shares(0.6)), groups=(SMALL,)),
    "the full model up to 48 stages x microbatches for 100": Part((patch.object(exact, "EXACT", 48),), groups=(SMALL,)),
    "windows and the full model, their time to the local search": Part(
        (NO_WINDOWS, NO_MODEL, *shares(1.0)), groups=(SMALL,)
    ),
    "selective recompute": constant(instances, "selectively", lambda *_: iter(()), SELECTED),
    "layers as stages beside each other": constant(instances, "_needed", for_any_cap, TIGHT),
    "what takes the least time for one microbatch, repeated": Part(
        (patch.object(least_memory.LeastMemory, "find_quick", nothing),), groups=(TIGHT, SELECTED)
    ),
    "cuts with ties on one device": constant(instances, "with_ties", nothing, TIED),
    "slices": constant(instances, "slicings", lambda *_: [None], SLICED),
    "earlier plans to start from": Part((patch.object(seeds, "plant", nothing),), groups=(SEEDED, GROWN)),
    "the comparison under noise": constant(choice.Choice, "best", lambda _: 0, NOISY),
    "0.005 worse than promised for 0.01": constant(explore, "MISS", 0.005, LONG_PLANS),
    "0.02 worse than promised for 0.01": constant(explore, "MISS", 0.02, LONG_PLANS),
    "0.025 of the time for heuristics alone for 0.05": constant(compiler, "QUICK_SHARE", 0.025, QUICK),
    "0.1 of the time for heuristics alone for 0.05": constant(compiler, "QUICK_SHARE", 0.1, QUICK),
    "recomputes at any time at first for 1 stage before": back_at_first(RECOMPUTED_BEFORE=0),
    "recomputes 2 stages before at first for 1": back_at_first(RECOMPUTED_BEFORE=2),
    "reloads 2 stages before at first for 4": back_at_first(RELOADED_BEFORE=2),
    "reloads 8 stages before at first for 4": back_at_first(RELOADED_BEFORE=8),
    "back at most 4 stages before for 8": farthest(4),
    "back at most 16 stages before for 8": farthest(16),
    "4 neighbouring or smallest stages for 8": constant(instances, "MOST_NEIGHBOURS", 4, LAYERS),
    "16 neighbouring or smallest stages for 8": constant(instances, "MOST_NEIGHBOURS", 16, LAYERS),
    "0.06 of the time to lower the smallest stages for 0.12": constant(instances, "FINEST_SHARE", 0.06, LAYERS),
    "microbatches added by one period, of three": constant(carried, "LONGER", (1.0,), GROWN),
    "microbatches added by 1, 1.5 and 3 periods for 1, 1.25 and 2": constant(carried, "LONGER", (1.0, 1.5, 3.0), GROWN),
    "4 near plans for 8": constant(incumbents, "MOST_NEAR", 4, WHOLE_PLANS),
    "16 near plans for 8": constant(incumbents, "MOST_NEAR", 16, WHOLE_PLANS),
}
"""What is left out, and how."""


def profile_of(case: Case) -> Profile:
    """Return the profile of a case; costs that end in `-fused` have quicker backwards, in `-x2` 2 layers a device.

    The measured one is that of `bench.stock --hidden 512 --ffn 1376 --sequence 256`, at 9d576ea on two CPU cores.
    """
    if case.costs == "measured":
        return profiles.load(Path(__file__).with_name("measured.json"))
    if case.costs in {one.costs for one in MODELS.cases + UNEVEN.cases + HALVES.cases}:
        name = case.costs.removesuffix("-halves")
        model = models.load(name.removesuffix("-a100"))
        model = replace(model, granularity=model.granularity if name == case.costs else "half")
        gpu = gpus.load("a100-80gb" if name.endswith("-a100") else "h100-sxm")
        asked = EstimateOptions(model=model, gpu=gpu, name=case.costs, devices=case.devices)
        return estimate(replace(asked, sequence_length=min(4096, model.positions or 4096)))
    name, _, layers = case.costs.partition("-x")
    costs = COSTS_HERE.get(name) or COSTS[name.removesuffix("-fused")]
    costs = costs | ({"layers_per_device": int(layers)} if layers else {})
    if name.endswith("-tied"):
        costs = costs | {"embedding_parts": case.devices, "head_parts": case.devices}
    found = uniform_profile(UniformOptions(devices=case.devices, **costs))  # type: ignore[arg-type]
    if name.endswith("-tied"):
        return tied(found, case.devices)
    if not name.endswith("-fused"):
        return found
    quicker = [structs.replace(layer, backward_ns=round(0.93 * layer.fused_ns)) for layer in found.layers]
    return structs.replace(found, layers=quicker)


def tied(profile: Profile, parts: int) -> Profile:
    """Return the profile with parts of the embedding and of the head that share their weights, 1 GB in all."""
    layers = [structs.replace(layer, count=1) for layer in profile.expanded_layers()]
    for part in range(parts):
        for place in (part, part - parts):
            shared = {"tie": f"part {part}", "static_bytes": GB // parts, "tied_bytes": GB // parts}
            layers[place] = structs.replace(layers[place], **shared)
    return structs.replace(profile, layers=layers)


def options(case: Case, seconds: float, seed: int = 0, **asked: object) -> Options:
    return Options(  # type: ignore[arg-type]
        mem_bytes=int(case.cap * case.devices * GB),
        microbatches=case.microbatches,
        offload=not case.costs.startswith("unit-no-links"),
        time_limit_s=seconds,
        seed=seed,
        reproducible=True,
        **asked,
    )


@cache
def planned_before(case: Case, seconds: float) -> ir.Checked:
    """Return the plan of a case, with everything."""
    return compile_schedule(profile_of(case), options(case, seconds)).checked


def planned_ms(case: Case, group: Group, seconds: float, seed: int) -> tuple[float, float]:
    """Return a plan's makespan, or under noise the 95th percentile, and its bound."""
    known = () if group.earlier is None else (planned_before(group.earlier(case), seconds),)
    profile = profile_of(case)
    schedule = compile_schedule(profile, options(case, seconds, seed, seeds=known, **group.asked)).schedule
    forecast, late = schedule.forecast, None
    if group.asked.get("noise"):
        late = quantiles(schedule, spreads_of(schedule, profile, group.asked["noise"]), seed=UNSEEN)  # type: ignore
    return (forecast.makespan_ns if late is None else late.p95_ns) / 1e6, forecast.lower_bound_ns / 1e6


class Alone:
    """The local search of a case, begun anew for every seed from the same policies."""

    def __init__(self, case: Case, seconds: float) -> None:
        profile, asked = profile_of(case), options(case, PLACED_S)
        asked = settled(profile, asked)
        self.seconds = seconds
        self.placed = in_time(instances.instances(profile, asked), asked)
        self.instances = [
            SearchedProblem(problem, (one.name, one.stages // problem.devices), bounds.best(problem, "makespan").ticks)
            for one, problem in self.placed
        ]
        self.climbers: list[_Climber] = []
        """What can climb, the best first."""
        with patch.object(LocalSearch, "_rounds", lambda _, pool, climbers: self.climbers.extend(climbers)):
            self._run(Limits("makespan", 0.0, 0, 1, True))

    def ms(self, seed: int) -> tuple[float, float]:
        """Return the best makespan that is reached, and the bound."""
        begun = [one.again() for one in self.climbers]
        with patch.object(LocalSearch, "_screened", lambda *_: begun):
            found = self._run(Limits("makespan", self.seconds, seed, 1, True))
        assert found is not None
        timed = Realiser(self.instances[found.instance], is_span=False).schedule(found)
        assert timed is not None
        return timed.makespan / 1e6, min(one.bound for one in self.instances) / 1e6

    def _run(self, limits: Limits) -> Found | None:
        with LocalSearch(self.instances, limits) as search:
            search._thread.join()
        assert search.error is None, search.error
        return min(search.take(0.0), key=lambda one: one.value, default=None)


def commit() -> str:
    """Return the last commit that changed the compiler, with a + where its files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOM).stdout.strip()

    return git("log", "-1", "--format=%h", "--abbrev=8", "--", ".") + ("+" if git("status", "--porcelain", ".") else "")


@dataclass(frozen=True)
class Run:
    """Plans of one case with one part left out, under one limit."""

    commit: str
    group: str
    part: str
    case: str
    seconds: float
    ms: tuple[float, ...]
    """Makespans by seed, from 0."""
    bound_ms: tuple[float, ...]
    """What the plans were proved not to fall below."""

    def is_like(self, other: Run) -> bool:
        """Whether the two are of the same search but for the part."""
        return self.place == other.place and self.commit == other.commit

    @property
    def place(self) -> tuple[str, str, float]:
        """What is searched, and how long."""
        return self.group, self.case, self.seconds


def runs_in(path: Path) -> list[Run]:
    records = json.loads(path.read_text()) if path.exists() else []
    return [
        Run(**{name: tuple(value) if isinstance(value, list) else value for name, value in record.items()})
        for record in records
    ]


def write(runs: Iterable[Run], path: Path) -> None:
    """Write a line for each run."""
    path.write_text("[\n" + ",\n".join(json.dumps(vars(run)) for run in runs) + "\n]\n")


def added(runs: list[Run], run: Run) -> list[Run]:
    """Return the runs with one more, in the place of an earlier one of that part; what stands beside it stays."""
    return [
        one
        for one in runs
        if (one.part, one.place) != (run.part, run.place) or (run.part == WHOLE and one.commit != run.commit)
    ] + [run]


def measured(known: list[Run], empty: list[Run], seeds: int) -> Iterator[Run]:
    """Yield runs of one part with more and more seeds, until each has so many, beginning with what is known."""
    part = PARTS.get(empty[0].part, Part())
    begun = [next((one for one in known if one.is_like(run) and one.part == run.part), run) for run in empty]
    if part.edits:
        yield from in_a_copy(part, [run for run in begun if len(run.ms) < seeds], seeds)
        return
    for run in begun:
        group = next(group for group in GROUPS if group.title == run.group)
        case = next(case for case in group.cases if case.name == run.case)
        if group.earlier is not None and len(run.ms) < seeds:
            planned_before(group.earlier(case), run.seconds)
        with ExitStack() as stack:
            for one in part.patches:
                stack.enter_context(one)  # type: ignore[arg-type]
            missing = range(len(run.ms), seeds)
            alone = Alone(case, run.seconds) if group.is_alone and missing else None
            for seed in missing:
                ms, bound_ms = planned_ms(case, group, run.seconds, seed) if alone is None else alone.ms(seed)
                run = replace(run, ms=(*run.ms, ms), bound_ms=(*run.bound_ms, bound_ms))
                yield run


def in_a_copy(part: Part, begun: list[Run], seeds: int) -> list[Run]:
    """Plan with everything in a copy of the compiler with the part's edits; return the runs."""
    if not begun:
        return []
    with TemporaryDirectory() as name:
        folder = Path(name)
        for room in (ROOM, Path(__file__).parent):
            shutil.copytree(room, folder / room.name, ignore=shutil.ignore_patterns("__pycache__", "ablation.json"))
        for file, before, after in part.edits:
            path = folder / ROOM.name / file
            text = path.read_text()
            assert text.count(before) == 1, (file, before)
            path.write_text(text.replace(before, after))
        found = folder / "runs.json"
        first = begun[0]
        limits = ["--seconds", str(first.seconds), "--seeds", str(seeds), "--commit", first.commit]
        cases = ["--groups", first.group, "--cases", *(run.case for run in begun)]
        command = [sys.executable, "-m", "bench.ablation", "--parts", WHOLE, "-o", str(found), *limits, *cases]
        environment = os.environ | {"PYTHONPATH": name, "XDG_CACHE_HOME": name}
        subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return [replace(run, part=first.part) for run in runs_in(found)]


# -- report


def cell(runs: list[Run], run: Run) -> tuple[float, float] | None:
    """Return by how many percent plans are longer, and the standard error (nan of one), over the seeds both have."""
    base = next((one for one in runs if one.part == WHOLE and one.is_like(run)), None)
    pairs = [] if base is None else [100 * (a / b - 1) for a, b in zip(run.ms, base.ms, strict=False)]
    if not pairs:
        return None
    error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
    return statistics.mean(pairs), error


def shown(mean: float, error: float) -> str:
    return f"{mean:+.2f}" if math.isnan(error) else f"{mean:+.2f} ± {error:.2f}"


def table(every: list[Run], group: Group) -> Iterator[str]:
    """Yield a Markdown table of what was run of a group."""
    runs = [run for run in every if run.group == group.title]
    names = [case.name for case in group.cases if any(run.case == case.name for run in runs)]
    rows = list(dict.fromkeys((run.commit, run.seconds, run.part) for run in runs if run.case in names))
    if not rows:
        return
    yield "| left out or changed | " + " | ".join(names) + " | mean | gap | limit s | seeds | commit |"
    yield "|---" * (len(names) + 6) + "|"
    for made, seconds, part in sorted(rows, key=lambda row: (row[0], row[1], row[2] != WHOLE)):
        mine = {run.case: run for run in runs if (run.commit, run.seconds, run.part) == (made, seconds, part)}
        mine = {name: run for name, run in mine.items() if name in names}
        seeds = "-".join(str(n) for n in sorted({len(run.ms) for run in mine.values()}))
        gap = statistics.mean(1 - b / a for run in mine.values() for a, b in zip(run.ms, run.bound_ms, strict=True))
        if part == WHOLE:
            cells = [f"{statistics.mean(mine[name].ms):.5g} ms" if name in mine else "" for name in names]
            whole = ""
        else:
            found = {name: cell(runs, run) for name, run in mine.items()}
            known = [one for one in found.values() if one is not None]
            cells = [shown(*one) if (one := found.get(name)) is not None else "" for name in names]
            error = math.hypot(*(error for _, error in known)) / max(1, len(known))
            whole = shown(statistics.mean(mean for mean, _ in known), error) if known else ""
        yield f"| {part} | " + " | ".join(cells) + f" | {whole} | {gap:.1%} | {seconds:g} | {seeds} | {made} |"
    yield ""


def report(runs: list[Run], head: str) -> str:
    """Return the page: its head as it was, then a table for each group of cases."""
    lines = [head.partition(MARK)[0].rstrip(), "", MARK, ""]
    for group in GROUPS:
        lines += [f"## {group.title}", "", *table(runs, group)] if any(run.group == group.title for run in runs) else []
    return "\n".join(lines).rstrip() + "\n"


MARK = "<!-- below: python -m bench.ablation --report docs/ABLATION.md -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, help="time limit of each plan, counted in ops, if not the group's")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--cases", nargs="+", default=["*"], help="names, with * and ?")
    parser.add_argument("--groups", nargs="+", default=["*"], help="titles, with * and ?")
    parser.add_argument(
        "--parts", nargs="+", default=["*"], help="names, with * and ?; `nothing` is a plan with everything"
    )
    parser.add_argument("--commit", help="what is measured, where it is not this checkout")
    parser.add_argument("-o", "--output", type=Path, default=Path("bench/ablation.json"))
    parser.add_argument("--add", type=Path, nargs="+", help="take the results of these files, too, and stop")
    parser.add_argument("--report", type=Path, help="write the tables of all results there and stop")
    chosen = parser.parse_args()
    runs = runs_in(chosen.output)
    if chosen.report:
        chosen.report.write_text(report(runs, chosen.report.read_text()))
        return
    for path in chosen.add or ():
        for run in runs_in(path):
            runs = added(runs, run)
        write(runs, chosen.output)
    if chosen.add:
        return
    parts = {name: part for name, part in PARTS.items() if is_named(name, chosen.parts)}
    groups = [group for group in GROUPS if is_named(group.title, chosen.groups)]
    used = tuple(group for group in groups if not parts or any(group in part.groups for part in parts.values()))
    whole = {WHOLE: Part(groups=used)} if is_named(WHOLE, chosen.parts) else {}
    made = chosen.commit or commit()
    for name, part in {**whole, **parts}.items():
        for group in filter(groups.__contains__, part.groups):
            cases = [case.name for case in group.cases if is_named(case.name, chosen.cases)]
            empty = [Run(made, group.title, name, case, chosen.seconds or group.seconds, (), ()) for case in cases]
            for run in measured(runs, empty, chosen.seeds) if empty else ():
                runs = added(runs, run)
                write(runs, chosen.output)
                print(run.part, run.case, *run.ms, flush=True)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    main()
