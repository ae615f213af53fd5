"""A given order at its earliest, in plain Python: the definition with which the compiled machine must agree.

The rules of memory are those of docs/IR.md for messages that take no memory; what messages hold is held against what
lowering promises. Also the memory curve of a timed schedule, by the same rules.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from optpipe_compiler.model.schedule import Kind, Schedule, Stuck, Task, duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from optpipe_compiler.model.problem import Problem


class LaneOrders(NamedTuple):
    """The order of every lane: `compute` per device, `d2h` and `h2d` per host link.

    `allocations` is the order, per device, in which tasks of compute and h2d take memory: where it is short, a later
    one waits for an earlier one. `host_limit` is the host memory that each device's offloads may hold (units).
    """

    compute: tuple[tuple[Task, ...], ...]
    d2h: tuple[tuple[Task, ...], ...]
    h2d: tuple[tuple[Task, ...], ...]
    allocations: tuple[tuple[Task, ...], ...]
    host_limit: tuple[int, ...]


def lane_orders(schedule: Schedule) -> LaneOrders:
    """The order of every lane, read off the start times."""
    problem = schedule.problem
    transfers: dict[Kind, list[list[Task]]] = {kind: [[] for _ in range(problem.links)] for kind in (Kind.D, Kind.H)}
    allocations: list[list[Task]] = [[] for _ in range(problem.devices)]
    for task in schedule.sequence:
        device = problem.stages[task.stage].device
        link = problem.link_of[device]
        if task.kind in transfers and link is not None:
            transfers[task.kind][link].append(task)
        if task.kind is not Kind.D:
            allocations[device].append(task)
    every = (schedule.compute_lanes, transfers[Kind.D], transfers[Kind.H], allocations)
    return LaneOrders(*(tuple(map(tuple, lanes)) for lanes in every), schedule.host_peaks)


def predecessors(problem: Problem, task: Task, present: set[Task] | dict[Task, int]) -> Iterator[tuple[Task, int]]:
    """Yield what must complete before `task` starts, with the extra delay of a message; `present` are all tasks."""
    kind, stage, microbatch = task
    last = len(problem.stages) - 1
    if kind is Kind.F:
        if stage > 0:
            yield Task(Kind.F, stage - 1, microbatch), problem.stages[stage - 1].send_activation
        return
    if kind is Kind.W:
        yield Task(Kind.I, stage, microbatch), 0
        return
    if kind is Kind.H:
        yield Task(Kind.D, stage, microbatch), 0
        return
    yield Task(Kind.F, stage, microbatch), 0
    if kind in (Kind.I, Kind.B):
        if stage < last:
            fused = Task(Kind.B, stage + 1, microbatch)
            after = fused if fused in present else Task(Kind.I, stage + 1, microbatch)
            yield after, problem.stages[stage + 1].send_gradient
        for restore in (Task(Kind.H, stage, microbatch), Task(Kind.R, stage, microbatch)):
            if restore in present:
                yield restore, 0


def device_memory(problem: Problem, task: Task, recomputed: bool) -> tuple[int, int]:
    """Return what `task` takes on its device when it starts and gives back when it has completed (units)."""
    s = problem.stages[task.stage]
    if task.kind is Kind.F:
        return s.saved + s.forward_extra, s.forward_extra + (s.saved - s.checkpoint if recomputed else 0)
    if task.kind is Kind.I:
        return s.captured + s.backward_input_extra, s.backward_input_extra + s.saved + s.captured - s.residue
    if task.kind is Kind.W:
        return s.backward_weight_extra, s.backward_weight_extra + s.residue
    if task.kind is Kind.B:
        return s.backward_extra, s.backward_extra + s.saved
    if task.kind is Kind.R:
        return s.saved - s.checkpoint + s.forward_extra, s.forward_extra
    return (0, s.moved) if task.kind is Kind.D else (s.moved, 0)


def simulate(problem: Problem, plan: LaneOrders, method: str) -> Schedule:
    """Return the earliest schedule that follows `plan` under the caps of `problem`.

    A task starts once its lane is free, its predecessors have completed and its memory is there. A transfer takes the
    longer time as soon as the other direction of its link starts one before it is over. A task that takes
    memory before an earlier one of the plan's `allocations` does so only while the earlier one still fits.

    Raises Stuck when the plan waits for itself or its memory never comes.
    """
    return Schedule(problem, method, _Replay(problem, plan).run())


class _Lane:
    """One serial resource: its tasks in order, the next one, and whether one is running."""

    __slots__ = ("next", "running", "tasks")

    def __init__(self, tasks: tuple[Task, ...]) -> None:
        self.tasks = tasks
        self.next = 0
        self.running: Task | None = None


class _Replay:
    """The event loop of `simulate`."""

    def __init__(self, problem: Problem, plan: LaneOrders) -> None:
        self.problem = problem
        self.plan = plan
        self.compute = [_Lane(tasks) for tasks in plan.compute]
        self.d2h = [_Lane(tasks) for tasks in plan.d2h]
        self.h2d = [_Lane(tasks) for tasks in plan.h2d]
        self.tasks = {task for lanes in (plan.compute, plan.d2h, plan.h2d) for lane in lanes for task in lane}
        self.starts: dict[Task, int] = {}
        self.ends: dict[Task, int] = {}
        self.free = list(problem.budget)
        self.host_free = list(plan.host_limit)
        self.claimed = [0] * problem.devices
        self.memory = {
            task: device_memory(problem, task, Task(Kind.R, task.stage, task.microbatch) in self.tasks)
            for task in self.tasks
        }
        self.copied = [0] * problem.devices
        """By device: when the last task of compute, and what the offload behind it takes from compute, is over."""
        self._link_precedence()

    def _link_precedence(self) -> None:
        self.missing: dict[Task, int] = {}
        self.ready = dict.fromkeys(self.tasks, 0)
        self.followers: dict[Task, list[tuple[Task, int]]] = {task: [] for task in self.tasks}
        for task in self.tasks:
            count = 0
            for before, lag in predecessors(self.problem, task, self.tasks):
                self.followers[before].append((task, lag))
                count += 1
            self.missing[task] = count

    def run(self) -> dict[Task, int]:
        """Process completions and arrivals in time order; after each moment start what can start."""
        self.events: list[tuple[int, int, Task]] = []  # (time, 0: completion | 1: arrival, task)
        self._start_all(0, range(self.problem.devices))
        while self.events:
            now = self.events[0][0]
            touched: dict[int, None] = {}
            while self.events and self.events[0][0] == now:
                _, arrival, task = heapq.heappop(self.events)
                touched[self.problem.stages[task.stage].device] = None
                if not arrival and self.ends[task] == now:
                    self._complete(now, task, touched)
            self._start_all(now, touched)
        if len(self.starts) != len(self.tasks):
            raise Stuck(f"{len(self.tasks) - len(self.starts)} of {len(self.tasks)} tasks never start")
        return self.starts

    def _complete(self, now: int, task: Task, touched: dict[int, None]) -> None:
        stage = self.problem.stages[task.stage]
        self.free[stage.device] += self.memory[task][1]
        self._lane_of(task).running = None
        if task.kind not in (Kind.D, Kind.H):
            is_offloaded = task.kind is Kind.F and task._replace(kind=Kind.D) in self.tasks
            self.copied[stage.device] = now + (stage.offload_busy if is_offloaded else 0)
        if task.kind is Kind.H:
            self.host_free[stage.device] += stage.moved
        if task.kind in (Kind.D, Kind.H):
            link = self.problem.link_of[stage.device]
            touched.update(dict.fromkeys(d for d, other in enumerate(self.problem.link_of) if other == link))
        for follower, lag in self.followers[task]:
            self.missing[follower] -= 1
            self.ready[follower] = max(self.ready[follower], now + lag)
            if self.missing[follower] == 0:
                if self.ready[follower] > now:
                    heapq.heappush(self.events, (self.ready[follower], 1, follower))
                else:
                    touched[self.problem.stages[follower.stage].device] = None

    def _lane_of(self, task: Task) -> _Lane:
        device = self.problem.stages[task.stage].device
        if task.kind not in (Kind.D, Kind.H):
            return self.compute[device]
        link = self.problem.link_of[device]
        assert link is not None
        return (self.d2h if task.kind is Kind.D else self.h2d)[link]

    def _start_all(self, now: int, devices: Iterable[int]) -> None:
        for device in devices:
            lanes = [self.compute[device]]
            link = self.problem.link_of[device]
            if link is not None and self.d2h:
                lanes += [self.d2h[link], self.h2d[link]]
            while any([self._start_next(now, lane) for lane in lanes]):
                pass

    def _start_next(self, now: int, lane: _Lane) -> bool:
        if lane.running is not None or lane.next == len(lane.tasks):
            return False
        task = lane.tasks[lane.next]
        if self.missing[task] or self.ready[task] > now or self._gives_way(now, task) or not self._fits(task):
            return False
        device = self.problem.stages[task.stage].device
        self.free[device] -= self.memory[task][0]
        if task.kind is Kind.D:
            self.host_free[device] -= self.problem.stages[task.stage].moved
        lane.running = task
        lane.next += 1
        self.starts[task] = now
        self._end_at(task, now + self._length(task))
        return True

    def _gives_way(self, now: int, task: Task) -> bool:
        """Whether copies have compute until later; the task is then tried again when they are done."""
        if task.kind in (Kind.D, Kind.H):
            return False
        stage = self.problem.stages[task.stage]
        is_reloaded = task.kind in (Kind.I, Kind.B) and task._replace(kind=Kind.H) in self.tasks
        until = self.copied[stage.device] + (stage.reload_busy if is_reloaded else 0)
        if until > now:
            heapq.heappush(self.events, (until, 1, task))
        return until > now

    def _length(self, task: Task) -> int:
        """Return how long the task takes; a transfer that meets one of the other direction slows that one down."""
        if task.kind not in (Kind.D, Kind.H):
            return duration(self.problem, task)
        link = self.problem.link_of[self.problem.stages[task.stage].device]
        assert link is not None
        met = (self.h2d if task.kind is Kind.D else self.d2h)[link].running
        if met is None:
            stage = self.problem.stages[task.stage]
            return stage.offload_alone if task.kind is Kind.D else stage.reload_alone
        self._end_at(met, self.starts[met] + duration(self.problem, met))
        return duration(self.problem, task)

    def _end_at(self, task: Task, end: int) -> None:
        """Let the task complete at `end`; an event for an earlier end no longer counts."""
        if self.ends.get(task) != end:
            self.ends[task] = end
            heapq.heappush(self.events, (end, 0, task))

    def _fits(self, task: Task) -> bool:
        """Whether the memory is there, also for the tasks that the plan lets take theirs earlier."""
        device = self.problem.stages[task.stage].device
        if task.kind is Kind.D:
            return self.host_free[device] >= self.problem.stages[task.stage].moved
        order = self.plan.allocations[device]
        position = self.claimed[device]
        while position < len(order) and order[position] in self.starts:
            position += 1
        self.claimed[device] = position
        need = self.memory[task][0]
        while order[position] != task:
            if order[position] not in self.starts:
                need += self.memory[order[position]][0]
            position += 1
            if need > self.free[device]:
                return False
        return need <= self.free[device]


def memory_curve(schedule: Schedule, device: int) -> list[tuple[int, int]]:
    """Return (tick, units held) at every start of an op on `device`, static part excluded.

    What completes at the tick of a start is freed before it, unless it starts later in the planned order.
    """
    curve: list[tuple[int, int]] = []
    running: list[tuple[int, int]] = []
    held = 0
    for task in schedule.sequence:
        if schedule.problem.stages[task.stage].device != device:
            continue
        start = schedule.starts[task]
        while running and running[0][0] <= start:
            held -= heapq.heappop(running)[1]
        recomputed = Task(Kind.R, task.stage, task.microbatch) in schedule.starts
        taken, given = device_memory(schedule.problem, task, recomputed)
        held += taken
        heapq.heappush(running, (schedule.end(task), given))
        curve.append((start, held))
    return curve


def peaks(schedule: Schedule) -> list[int]:
    """Return the most units that each device holds at one time, static part excluded."""
    return [max((held for _, held in memory_curve(schedule, d)), default=0) for d in range(schedule.problem.devices)]
