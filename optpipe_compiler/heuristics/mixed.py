"""Published orders with kept, offloaded and recomputed activations mixed: our own candidates where memory is tight.

A table says, for each stage of a device and for even and odd microbatches, what becomes of the activation. Tables are
tried on a shortened instance, because a steady state does not depend on the number of microbatches: first those that
treat all microbatches alike, then changes of single entries of the best ones. The order is that of a published
schedule; where its memory does not fit, its ops wait for memory (`simulate`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from optpipe_compiler.heuristics.common import NotDefined, Recipe
from optpipe_compiler.heuristics.transfers import timed
from optpipe_compiler.schedule import Kind, Mode, Schedule
from optpipe_compiler.simulate import Stuck, retime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from optpipe_compiler.heuristics.common import Order
    from optpipe_compiler.problem import Problem
    from optpipe_compiler.schedule import Task

Table = tuple[tuple[Mode, Mode], ...]
"""Per stage of a device (in model order): the mode of even and of odd microbatches."""

S_PER_TASK = 25e-6
"""Seconds that timing costs per task, roughly; turns a time budget into a number of trials that is reproducible."""
CLIMBED = 3
"""How many of the best tables are improved entry by entry."""


@dataclass(frozen=True)
class Trial:
    """One table on one order, and the makespan it led to on the shortened instance."""

    makespan: int
    name: str
    table: Table


def mixed(
    problem: Problem,
    orders: dict[str, Callable[[Problem], Order | Recipe]],
    seconds: float,
    seed: int,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Iterator[Schedule]:
    """Yield schedules for `problem` after about `seconds` of trials on the shortened instance, the best first.

    The number of trials follows from `seconds` and the instance's size alone; `out_of_time` may end them sooner.
    """
    short = replace(problem, microbatches=min(problem.microbatches, 3 * problem.devices))
    if not orders:
        return
    tasks = 4 * len(problem.stages) * short.microbatches
    left = max(0, int(seconds / (S_PER_TASK * tasks)))
    best: dict[tuple[str, Table], Trial] = {}
    for name, table in itertools.islice(_uniform(problem, orders, Random(seed)), left // 2):
        if out_of_time():
            break
        _try(short, orders, name, table, best)
    yield from _whole(problem, orders, sorted(best.values(), key=_rank)[:CLIMBED])
    first = sorted(best.values(), key=_rank)[:CLIMBED]
    climbed = [_climb(short, orders, trial, left // (2 * CLIMBED), seed, out_of_time) for trial in first]
    yield from _whole(problem, orders, sorted(climbed, key=_rank))


def _rank(trial: Trial) -> tuple[int, str, Table]:
    return trial.makespan, trial.name, trial.table


def _uniform(
    problem: Problem, orders: dict[str, Callable[[Problem], Order | Recipe]], random: Random
) -> Iterator[tuple[str, Table]]:
    """Yield every order with every table that treats all microbatches alike, shuffled."""
    per_device = max(len(problem.stages_of(d)) for d in range(problem.devices))
    modes = [mode for mode in Mode if _possible(problem, mode)]
    pairs = [
        (name, tuple((mode, mode) for mode in choice))
        for name in orders
        for choice in itertools.product(modes, repeat=per_device)
    ]
    random.shuffle(pairs)
    yield from pairs


def _possible(problem: Problem, mode: Mode) -> bool:
    able = {Mode.OFFLOAD: problem.can_offload, Mode.RECOMPUTE: problem.can_recompute}.get(mode)
    return able is None or any(able(s) for s in range(len(problem.stages)))


def _climb(
    problem: Problem,
    orders: dict[str, Callable[[Problem], Order | Recipe]],
    trial: Trial,
    evaluations: int,
    seed: int,
    out_of_time: Callable[[], bool],
) -> Trial:
    """Change single entries of the table while that helps."""
    seen: dict[tuple[str, Table], Trial] = {(trial.name, trial.table): trial}
    random = Random(seed)
    best = trial
    for _ in range(evaluations):
        if out_of_time():
            break
        stage, odd = random.randrange(len(best.table)), random.randrange(2)
        mode = random.choice([mode for mode in Mode if _possible(problem, mode)])
        row = tuple(mode if number == odd else old for number, old in enumerate(best.table[stage]))
        table = (*best.table[:stage], row, *best.table[stage + 1 :])
        if (best.name, table) not in seen:
            found = _try(problem, orders, best.name, table, seen)  # type: ignore[arg-type]
            if found is not None and found.makespan < best.makespan:
                best = found
    return best


def _try(
    problem: Problem,
    orders: dict[str, Callable[[Problem], Order | Recipe]],
    name: str,
    table: Table,
    seen: dict[tuple[str, Table], Trial],
) -> Trial | None:
    schedule = _build(problem, orders[name], name, table)
    if schedule is None:
        return None
    seen[name, table] = Trial(schedule.makespan, name, table)
    return seen[name, table]


def _whole(
    problem: Problem, orders: dict[str, Callable[[Problem], Order | Recipe]], trials: Iterable[Trial]
) -> Iterator[Schedule]:
    for trial in trials:
        schedule = _build(problem, orders[trial.name], trial.name, trial.table)
        if schedule is not None:
            yield schedule


def _build(problem: Problem, order: Callable[[Problem], Order | Recipe], name: str, table: Table) -> Schedule | None:
    """Return the order with the table's modes under the caps; None where it is not defined or gets stuck."""
    local = {s: number for d in range(problem.devices) for number, s in enumerate(problem.stages_of(d))}

    def mode(stage: int, microbatch: int) -> Mode:
        wanted = table[local[stage]][microbatch % 2]
        able = {Mode.OFFLOAD: problem.can_offload, Mode.RECOMPUTE: problem.can_recompute}.get(wanted)
        return wanted if able is None or able(stage) else Mode.KEEP

    try:
        lanes = order(problem)
        assert not isinstance(lanes, Recipe)
        compute = [list(_again(lane, mode)) for lane in lanes]
        away = frozenset(
            (s, m)
            for s in range(len(problem.stages))
            for m in range(problem.microbatches)
            if mode(s, m) is Mode.OFFLOAD
        )
        free = Schedule(problem, f"mixed-{name}", timed(problem, Recipe(compute, away)))
        return retime(free, problem)
    except (NotDefined, Stuck):
        return None


def _again(order: list[Task], mode: Callable[[int, int], Mode]) -> Iterable[Task]:
    for task in order:
        if task.kind in (Kind.I, Kind.B) and mode(task.stage, task.microbatch) is Mode.RECOMPUTE:
            yield task._replace(kind=Kind.R)
        yield task
