"""Schedules that are written outside of this package: their ops as text, checked before anything is timed."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from optpipe_compiler.documents.ops import parse
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput
from optpipe_compiler.model.schedule import KINDS, Kind, Task
from optpipe_compiler.published.common import Recipe, Tasks, rows

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


class OwnOrder(Protocol):
    """A function from an instance to the ops of every device, in order."""

    def __call__(self, problem: Problem, /) -> Sequence[str | Iterable[str]]:
        """Return for each device a list of ops such as `2F0`, or one text with blanks between them."""


def recipe_of(name: str, problem: Problem, order: OwnOrder) -> Recipe:
    """Return the order of `problem` as a recipe; raise BadInput for what is no complete order."""
    lists = _lists(name, order(problem))
    if len(lists) != problem.devices:
        raise BadInput(
            f"{name} returns {counted(len(lists), 'list')}, expected one for each of "
            f"{counted(problem.devices, 'device')}"
        )
    compute: Tasks = []
    offloaded: set[tuple[int, int]] = set()
    for device, texts in enumerate(lists):
        tasks = [_task(name, text, device, problem) for text in texts]
        offloaded |= {(task.stage, task.microbatch) for task in tasks if task.kind is Kind.D}
        compute.append([task for task in tasks if task.kind is not Kind.D])
    _check(name, problem, compute, offloaded)
    away = np.zeros((len(problem.stages), problem.microbatches), np.bool_)
    away[tuple(np.array([*offloaded], np.int64).reshape(-1, 2).T)] = True
    return Recipe([rows(tasks) for tasks in compute], away)


def _lists(name: str, found: object) -> list[list[str]]:
    """Return the texts of each device; raise BadInput for what a function returned and is no list of texts."""
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise BadInput(f"{name} returns {reprlib.repr(found)}, expected a list of ops for each device")
    lists = []
    for device, one in enumerate(found):
        if not isinstance(one, Iterable):
            raise BadInput(f"{name} returns {reprlib.repr(one)} for device {device}, expected a list of ops")
        texts = one.split() if isinstance(one, str) else list(one)
        for text in texts:
            if not isinstance(text, str):
                raise BadInput(f"{name} has {reprlib.repr(text)} on device {device}, expected an op such as '2F0'")
        lists.append(texts)
    return lists


def _task(name: str, text: str, device: int, problem: Problem) -> Task:
    where = f"{name} has {text!r} on device {device}"
    try:
        op = parse(text, whole=True)
        task = Task(KINDS[op.kind], op.stage, op.microbatch)
    except (BadInput, KeyError) as error:
        raise BadInput(f"{where}, expected an op such as '2F0'") from error
    if task.kind is Kind.H:
        raise BadInput(f"{where}, expected none: an activation with D is reloaded, too")
    if op.layers is not None or op.slice is not None:
        raise BadInput(f"{where}, expected no layers and no slice: of whole stages")
    mine = problem.stages_of(device)
    if task.stage not in mine or task.microbatch >= problem.microbatches:
        stages = ", ".join(map(str, mine))
        raise BadInput(f"{where}, expected stages {stages} and microbatches 0 to {problem.microbatches - 1}")
    return task


def _check(name: str, problem: Problem, compute: Tasks, offloaded: set[tuple[int, int]]) -> None:
    """Every stage and microbatch has one forward and one backward, whole or in halves, in the order of microbatches."""
    counts = Counter(task for order in compute for task in order)
    for s in range(len(problem.stages)):
        for m in range(problem.microbatches):
            n = {kind: counts[Task(kind, s, m)] for kind in Kind}
            backwards = n[Kind.B], n[Kind.I], n[Kind.W]
            if n[Kind.F] != 1 or backwards not in ((1, 0, 0), (0, 1, 1)) or n[Kind.R] > 1:
                found = " ".join(f"{s}{kind.name}{m}" for kind in Kind for _ in range(n[kind])) or "nothing"
                raise BadInput(
                    f"{name} has {found} of stage {s} and microbatch {m}, expected F once, and B once or I and W"
                )
            if n[Kind.R] and (s, m) in offloaded:
                raise BadInput(f"{name} has {s}R{m} and {s}D{m}, expected one of them")
    for order in compute:
        _check_order(name, order)


def _check_order(name: str, order: list[Task]) -> None:
    place = {task: n for n, task in enumerate(order)}
    last: dict[tuple[str, int], int] = {}
    for task in order:
        kind, s, m = task
        before = {Kind.W: (Kind.I,), Kind.F: ()}.get(kind, (Kind.F, Kind.R))
        for other in (Task(one, s, m) for one in before if one is not kind):
            if place.get(other, -1) > place[task]:
                raise BadInput(f"{name} has {s}{kind.name}{m} before {s}{other.kind.name}{m}, expected it behind")
        row = ("B" if kind is Kind.I else kind.name, s)
        if last.get(row, -1) > m:
            raise BadInput(f"{name} has {s}{kind.name}{m} after microbatch {last[row]}, expected them in order")
        last[row] = m
