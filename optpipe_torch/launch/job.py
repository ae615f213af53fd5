"""What the ranks of a run are told, and where each of them is; does without torch, so that the parent starts fast."""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from typing import Any

from optpipe_compiler.errors import BadInput, MissingDependency

TORCH = ((2, 11), (2, 16))
"""From the first of these versions to below the second: those that the tests were run with (`make test-torch`)."""

RunEvent = dict[str, Any]
"""{"event": "started" | "check" | "step" | "trace", ...}; steps count from 0."""


@dataclass(frozen=True, slots=True)
class Replanning:
    """How a run improves its plan."""

    profile_text: str
    keeps_placement: bool
    threshold: float
    plan_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of a run are told."""

    schedule_text: str
    training: bool
    steps: int
    data: bytes
    check: bool
    time_scale: float | None
    seed: int
    timeout_s: float
    pinned: bool = False
    trace: bool = False
    replanning: Replanning | None = None
    allowed: str | None = None
    """The function that the command line names; the schedule may have it called wherever it lies."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: its number, of how many, and how they meet (torch's `init_method`)."""

    rank: int
    world: int
    meet: str
    local_rank: int


def place_from_environment() -> Place | None:
    """This process's place in a group started by torchrun; None where there is none."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    world = _number("WORLD_SIZE", 1, None)
    rank = _number("RANK", 0, world - 1)
    return Place(rank, world, "env://", _number("LOCAL_RANK", 0, world - 1, default=rank))


def _number(name: str, least: int, most: int | None, default: int = 0) -> int:
    """Return a whole number from the environment; raise BadInput naming the variable."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal() or not least <= int(value) <= (int(value) if most is None else most):
        expected = f"a number of at least {least}" if most is None else f"a number from {least} to {most}"
        raise BadInput(f"the environment's {name} is {value!r}, expected {expected}")
    return int(value)


def ranks_here(world: int) -> int:
    """How many of a group's ranks stand on this machine."""
    return _number("LOCAL_WORLD_SIZE", 1, None, default=world)


def gpu_count() -> int:
    """How many GPUs torch can use here. Where each rank can have one, a run trains on them; else on the CPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def shares_of_cores(ranks: int) -> list[list[int]]:
    """Each rank's share of this process's cores; empty lists where there are fewer cores than ranks."""
    if not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(ranks)]
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    return [cores[rank * each : (rank + 1) * each] for rank in range(ranks)]


def check_torch(version: str | None = None) -> None:
    """Raise MissingDependency where torch (absent: the installed one) is outside the supported range."""
    version = importlib.metadata.version("torch") if version is None else version
    first, end = TORCH
    if not first <= tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < end:
        wanted = f">={first[0]}.{first[1]},<{end[0]}.{end[1]}"
        raise MissingDependency(f"optpipe run needs torch {wanted}, found {version}: pip install 'torch{wanted}'")
