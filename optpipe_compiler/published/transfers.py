"""When the activations of a schedule visit the host: as in PipeOffload (Wan et al., arXiv:2503.01328), or streaming.

An activation leaves as soon as its forward is done and comes back as late as its backward allows, first come first
served on each link. Where the link is too slow for that, the backwards wait. Streaming ones come back during the
backward before their own.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind, Task, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.model.problem import Problem, Stage
    from optpipe_compiler.model.schedule import Schedule
    from optpipe_compiler.published.common import Order, Recipe

BACKWARDS = (Kind.I, Kind.B)
COMPUTE = ("forward", "backward_input", "backward_weight", "backward", "recompute")
ROUND_TRIPS = 3
"""An activation that stays no longer than so many transfers there and back is kept, as in the authors' generator."""


def timed(problem: Problem, recipe: Recipe, method: str) -> Schedule:
    """Return the schedule at its earliest without memory limits; raises Stuck when the order waits for itself."""
    from optpipe_compiler.machine.orders import released

    if recipe.streaming:
        return _streamed(problem, recipe, method)
    bare = released(problem, recipe.compute, method=method)
    return Transfers(problem, recipe, bare.starts).run(method) if recipe.offloaded else bare


def _streamed(problem: Problem, recipe: Recipe, method: str) -> Schedule:
    """Return the schedule in which each reload may start with the backward before its own on the same device.

    That of a device's first backward may start with the op before it. Transfers of a link run in the order of the ops
    that they serve if nothing were offloaded. For that order an op that takes no time counts as one tick: then an op
    starts later than any that it waits for, and the lanes cannot wait for each other in a circle.
    """
    from optpipe_compiler.machine.orders import released

    paced = replace(problem, stages=_paced(problem.stages), classes=tuple(map(_paced, problem.classes)))
    bare = released(paced, recipe.compute, method=method)
    offloads: list[tuple[int, Task]] = []
    reloads: list[tuple[int, Task]] = []
    gates: dict[Task, Task] = {}
    for order in recipe.compute:
        away = [task for task in order if (task.stage, task.microbatch) in recipe.offloaded]
        offloads += [(bare.end(task), task._replace(kind=Kind.D)) for task in away if task.kind is Kind.F]
        reloads += [(bare.starts[task], task._replace(kind=Kind.H)) for task in away if task.kind in BACKWARDS]
        backwards = [task for task in order if task.kind in BACKWARDS]
        first = [order[order.index(task) - 1] for task in backwards[:1]]
        gates |= {task._replace(kind=Kind.H): gate for gate, task in zip(first + backwards, backwards, strict=False)}
    lanes = [_by_link(problem, [task for _, task in sorted(served)]) for served in (offloads, reloads)]
    return released(problem, recipe.compute, (lanes[0], lanes[1]), gates, method=method)


def _paced(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    return tuple(replace(one, **{name: max(1, getattr(one, name)) for name in COMPUTE}) for one in stages)


def _by_link(problem: Problem, transfers: list[Task]) -> list[list[Task]]:
    lanes: list[list[Task]] = [[] for _ in range(_links(problem))]
    for task in transfers:
        link = problem.link_of[problem.stages[task.stage].device]
        assert link is not None
        lanes[link].append(task)
    return lanes


def _links(problem: Problem) -> int:
    return max((link for link in problem.link_of if link is not None), default=-1) + 1


class Transfers:
    """Places the transfers of a recipe whose compute tasks would run at `starts` if nothing were offloaded."""

    def __init__(self, problem: Problem, recipe: Recipe, starts: dict[Task, int]) -> None:
        self.problem = problem
        self.compute = recipe.compute
        self.starts = postponed(problem, recipe.compute, starts)
        self.backward = {(t.stage, t.microbatch): t for order in recipe.compute for t in order if t.kind in BACKWARDS}
        self.offloaded = [key for key in sorted(recipe.offloaded) if self._worth_it(key)]

    def run(self, method: str) -> Schedule:
        """Return the schedule with the delays that the transfers cause."""
        from optpipe_compiler.machine.orders import released

        offloads = self._by_link(Kind.D, lambda key: (self._done(Task(Kind.F, *key)), key[0], key[1]))
        reloads = self._by_link(Kind.H, lambda key: (self.starts[self.backward[key]], -key[0], key[1]))
        releases = {task: start for task, start in self.starts.items() if task.kind is Kind.F}
        gates = self._gates(reloads)
        return released(self.problem, self.compute, (offloads, reloads), gates, releases, method=method)

    def _done(self, task: Task) -> int:
        return self.starts[task] + duration(self.problem, task)

    def _worth_it(self, key: tuple[int, int]) -> bool:
        """Whether the activation stays so long between forward and backward that it can visit the host."""
        stage, backward = self.problem.at(*key), self.backward[key]
        stay = self.starts[backward] - self._done(Task(Kind.F, *key))
        return stay - duration(self.problem, backward) > ROUND_TRIPS * (stage.offload + stage.reload)

    def _by_link(self, kind: Kind, rank: Callable[[tuple[int, int]], tuple[int, int, int]]) -> list[list[Task]]:
        return _by_link(self.problem, [Task(kind, *key) for key in sorted(self.offloaded, key=rank)])

    def _gates(self, reloads: list[list[Task]]) -> dict[Task, Task]:
        """Return for each reload the compute task with which it may start: the last one that leaves enough time.

        Enough for it and for the later reloads of its link, each being there when its backward would have started.
        """
        latest = self._latest_starts(reloads)
        position = {task: number for order in self.compute for number, task in enumerate(order)}
        gates = {}
        for task, time in latest.items():
            order = self.compute[self.problem.stages[task.stage].device]
            number = bisect_right(order, time, key=lambda t: self.starts[t])
            number = min(number, position[self.backward[task.stage, task.microbatch]])
            gates[task] = order[max(0, number - 1)]
        return gates

    def _latest_starts(self, reloads: list[list[Task]]) -> dict[Task, int]:
        latest: dict[Task, int] = {}
        for lane in reloads:
            end: int | None = None
            for task in reversed(lane):
                due = self.starts[self.backward[task.stage, task.microbatch]]
                end = due if end is None else min(due, end)
                end = latest[task] = end - duration(self.problem, task)
        return latest


def postponed(problem: Problem, compute: Order, starts: dict[Task, int]) -> dict[Task, int]:
    """Return `starts` with each device's forwards before its first backward as late as they delay nothing else.

    What is not needed yet need not take memory yet; the authors' generator does the same.
    """
    latest = dict(starts)
    for task, following in sorted(_warm_up(compute), key=lambda pair: starts[pair[0]], reverse=True):
        end = latest[following]
        if task.stage + 1 < len(problem.stages):
            after = latest[task._replace(stage=task.stage + 1)]
            end = min(end, after - problem.stages[task.stage].send_activation)
        latest[task] = max(starts[task], end - duration(problem, task))
    return latest


def _warm_up(compute: Order) -> Iterator[tuple[Task, Task]]:
    """Yield each forward before the first other task of its device, with the task after it."""
    for order in compute:
        for task, following in pairwise(order):
            if task.kind is not Kind.F:
                break
            yield task, following
