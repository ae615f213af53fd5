"""Two ranks on this machine, for bench.replan: what a swap by hand costs, and what a busy planner costs steps."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optpipe_compiler.documents import ir
from optpipe_compiler.documents import profile as profiles
from optpipe_compiler.processes import Ended, Processes

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from torch.optim import Optimizer

    from runtime_torch.runner import Runner

RANKS = 2
WARM_UP = 3
SWAPS = 5
"""Of each kind there and back; the first of each is not counted."""
BLOCK = 15
"""Steps in a row with the planner busy, and then with the planner at rest."""
BLOCKS = 6
"""Of each kind, in turns: shared machines change their pace by the minute."""
QUESTION_S = 2.0
"""The time limit of a search; when one is over the next is asked for."""


@dataclass(frozen=True)
class Stall:
    """What swaps of one kind took, over a median step before them; each includes what the next step takes longer."""

    median: float
    worst: float
    moved_layers: int
    moved_bytes: int


@dataclass(frozen=True)
class Beside:
    """Median steps in ns with the planner busy and at rest, and how many there were of each."""

    busy_ns: float
    rest_ns: float
    busy_steps: int
    rest_steps: int

    @property
    def ratio(self) -> float:
        """Busy over rest."""
        return self.busy_ns / self.rest_ns


def stalls(first: ir.Schedule, others: list[ir.Schedule]) -> list[Stall]:
    """Swap from the first schedule to each of the others and back, several times."""
    return _together(_swap, [ir.to_text(one) for one in (first, *others)])  # type: ignore[no-any-return]


def beside(schedule: ir.Schedule, profile_text: str) -> Beside:
    """Train on one core, and plan beside it on the others."""
    return _together(_plan, ir.to_text(schedule), profile_text, on_one_core=True)  # type: ignore[no-any-return]


def _together(work: Callable[..., Any], *arguments: object, on_one_core: bool = False) -> Any:
    """Run `work` on both ranks; return what it returns on rank 0."""
    with tempfile.TemporaryDirectory(prefix="optpipe-") as folder, Processes() as processes:
        for rank in range(RANKS):
            core = min(os.sched_getaffinity(0)) if on_one_core else None
            processes.start(_rank, rank, folder, core, work, arguments)
        found: dict[int, Any] = {}
        while len(found) < RANKS:
            for rank, heard in processes.listen():
                if isinstance(heard, Ended) and rank not in found:
                    raise RuntimeError(f"rank {rank} died: {heard}")
                found.setdefault(rank, heard)
    return found[0]


def _rank(
    line: Connection, rank: int, folder: str, core: int | None, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    from optpipe_torch.launch.worker import settle_on_cpu

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if core is not None:
        os.sched_setaffinity(0, {core})
    settle_on_cpu()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    line.send(work(*arguments))
    dist.barrier()
    os._exit(0)


class _Loop:
    """A training loop on this rank."""

    def __init__(self, schedule: ir.Schedule) -> None:
        import torch
        import torch.distributed as dist

        from optpipe_torch.models import known as models
        from optpipe_torch.models.text import default_text
        from runtime_torch.runner import Runner

        model = schedule.model
        assert model is not None
        rank = dist.get_rank()
        stages = models.stages(model, schedule, rank, torch.device("cpu"))
        self.runner: Runner = Runner(schedule, stages)
        self.optimizer: Optimizer = torch.optim.AdamW([{"params": list(stages.module.parameters())}], lr=1e-4)
        draw = models.batches(model, default_text())
        self.inputs, self.target = draw(torch.Generator().manual_seed(0), schedule.setup.microbatches)

    def step(self) -> int:
        """Run a step; return the ns that it took, the optimizer left out, on the slowest rank."""
        import torch.distributed as dist

        dist.barrier()
        begin = time.perf_counter_ns()
        self.runner.step(*self.inputs, target=self.target)
        took = slowest(time.perf_counter_ns() - begin)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return took


def slowest(ns: int) -> int:
    """Return the largest of all ranks' times."""
    import torch
    import torch.distributed as dist

    found = torch.tensor([ns])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def _swap(texts: list[str]) -> list[Stall]:
    first, *others = (ir.parse(text, "a schedule") for text in texts)
    loop = _Loop(first)
    for _ in range(WARM_UP):
        loop.step()
    found = []
    for other in others:
        shares, moved = [], (0, 0)
        for number in range(2 * SWAPS):
            usual = statistics.median(loop.step() for _ in range(2))
            begin = time.perf_counter_ns()
            done = loop.runner.replace(first if number % 2 else other, loop.optimizer)
            swapped = slowest(time.perf_counter_ns() - begin)
            after = loop.step()
            later = statistics.median(loop.step() for _ in range(2))
            if number > 1:
                shares.append((swapped + max(0, after - later)) / usual)
            moved = done.moved_layers, slowest(done.moved_bytes)
        found.append(Stall(statistics.median(shares), max(shares), *moved))
    return found


def _plan(text: str, profile_text: str) -> Beside | None:
    import torch
    import torch.distributed as dist

    from optpipe_torch.replan.planner import Lost, Planner

    schedule, profile = ir.parse(text, "a schedule"), profiles.parse(profile_text, "the profile")
    loop = _Loop(schedule)
    planner = Planner() if dist.get_rank() == 0 else None
    taken: dict[bool, list[int]] = {True: [], False: []}
    asked = 0

    def hear() -> bool:
        """Whether the planner is busy; the same on both ranks."""
        if planner is not None and isinstance(heard := planner.hear(), Lost | str):
            raise RuntimeError(str(heard))
        busy = torch.tensor([planner is not None and planner.is_busy])
        dist.broadcast(busy, 0)
        return bool(busy)

    def ask() -> None:
        nonlocal asked
        asked += 1
        if planner is not None:
            planner.ask(
                profile=profile,
                schedule=schedule,
                taken_ns={},
                time_limit_s=QUESTION_S,
                seed=asked,
                keeps_placement=True,
            )

    ask()
    while hear():  # imports, and the first search
        time.sleep(0.1)
    for block in range(2 * BLOCKS):
        for number in range(BLOCK):
            is_busy = hear()
            if block % 2 == 0 and not is_busy:
                ask()
                is_busy = True
            took = loop.step()
            if number > 1 and is_busy == (block % 2 == 0) and (is_busy == hear()):
                taken[is_busy].append(took)
        while hear():
            time.sleep(0.05)
    if planner is None:
        return None
    planner.end()
    busy, rest = taken[True], taken[False]
    return Beside(statistics.median(busy), statistics.median(rest), len(busy), len(rest))
