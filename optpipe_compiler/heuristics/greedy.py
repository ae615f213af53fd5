"""A memory-aware list scheduler: our own feasible start, in the spirit of OptPipe's AdaOffload.

It runs the pipeline forward in time. A device that is idle takes the first op that is ready and safe: a backward, then
the recomputation that one needs, then a forward, then a weight gradient; transfers start as soon as their link is free.
*Safe* is the banker's rule (Dijkstra, 1965): memory is granted only if afterwards the open microbatches of the device
can still be finished one after the other, so the scheduler never runs into a deadlock.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe_compiler.schedule import Kind, Mode, Schedule, Task, duration
from optpipe_compiler.simulate import Stuck, device_memory, predecessors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.problem import Problem


@dataclass(frozen=True)
class Policy:
    """One way to run the greedy scheduler."""

    name: str
    mode: Callable[[int, int], Mode]
    """What to do with the activation of (stage, microbatch)."""
    split: bool
    in_flight: int
    """Most microbatches that may be open on a device."""
    prefetch: int = 1
    """Most activations that a device may have reloaded ahead of their backward."""


def greedy(problem: Problem, policy: Policy) -> Schedule:
    """Return the schedule that `policy` leads to; raises Stuck where the policy runs out of memory.

    The banker's rule reserves for the largest of all kinds of backward, so a policy may get stuck although some order
    fits; `solver.minimum` then decides.
    """
    return Schedule(problem, policy.name, _Greedy(problem, policy).run())


def policies(problem: Problem) -> Iterator[Policy]:
    """Yield the policies worth trying, the ones most likely to be good first."""
    modes: list[tuple[str, Callable[[int, int], Mode]]] = [("keep", lambda s, m: Mode.KEEP)]
    first = {min(problem.stages_of(d)) for d in range(problem.devices) if problem.stages_of(d)}
    several = len(problem.stages) > problem.devices
    for mode, able in ((Mode.OFFLOAD, problem.can_offload), (Mode.RECOMPUTE, problem.can_recompute)):
        able_stages = {s for s in range(len(problem.stages)) if able(s)}
        if not able_stages:
            continue
        label = mode.name.lower()
        modes.append((label, _chosen(mode, able_stages, 1)))
        modes.append((f"{label}-half", _chosen(mode, able_stages, 2)))
        if several:
            modes.append((f"{label}-first", _chosen(mode, able_stages & first, 1)))
    depths = sorted({problem.devices, 2 * problem.devices, problem.microbatches})
    for label, mode_of in modes:
        for split in (True, False) if problem.freedom.split else (False,):
            for depth in depths:
                for prefetch in (1, 2) if "offload" in label else (1,):
                    name = f"greedy-{label}{'-split' if split else ''}-{depth}" + ("-ahead" if prefetch > 1 else "")
                    yield Policy(name, mode_of, split, depth, prefetch)


def _chosen(mode: Mode, stages: set[int], every: int) -> Callable[[int, int], Mode]:
    return lambda s, m: mode if s in stages and m % every == 0 else Mode.KEEP


class _Greedy:
    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem = problem
        self.policy = policy
        count, stages = problem.microbatches, range(len(problem.stages))
        self.modes = {(s, m): policy.mode(s, m) for s in stages for m in range(count)}
        self.starts: dict[Task, int] = {}
        self.done: dict[Task, int] = {}
        self.free = list(problem.budget)
        self.leaving = [0] * problem.devices
        """Units that offloads will free without needing any."""
        self.busy = [False] * problem.devices
        self.link_busy: dict[tuple[int | None, Kind], bool] = {}
        self.next_forward = [0] * len(stages)
        self.next_backward = [0] * len(stages)
        self.next_weight = [0] * len(stages)
        self.next_offload: list[list[Task]] = [[] for _ in range(problem.devices)]
        self.opened = [0] * problem.devices
        self.closed = [0] * problem.devices
        self.mine = [problem.stages_of(d) for d in range(problem.devices)]
        self.host_free = self._host_shares()
        self.total = self._task_set()

    def _host_shares(self) -> list[int]:
        problem = self.problem
        if problem.host_budget is None:
            return [1 << 60] * problem.devices
        weight = [sum(problem.stages[s].saved for s in mine if problem.can_offload(s)) for mine in self.mine]
        return [problem.host_budget * item // max(1, sum(weight)) for item in weight]

    def _task_set(self) -> set[Task]:
        tasks = set()
        for (s, m), mode in self.modes.items():
            tasks.add(Task(Kind.F, s, m))
            kinds = [Kind.I, Kind.W] if self.policy.split else [Kind.B]
            kinds += [Kind.D, Kind.H] if mode is Mode.OFFLOAD else [Kind.R] if mode is Mode.RECOMPUTE else []
            tasks.update(Task(kind, s, m) for kind in kinds)
        return tasks

    def run(self) -> dict[Task, int]:
        self.events: list[tuple[int, int, Task]] = []
        devices = range(self.problem.devices)
        self._start_all(0, devices)
        while self.events:
            now = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == now:
                _, arrival, task = heapq.heappop(self.events)
                touched |= self._arrive(task) if arrival else self._complete(now, task)
            self._start_all(now, sorted(touched))
        if len(self.done) != len(self.total):
            raise Stuck(f"{self.policy.name}: {len(self.total) - len(self.done)} tasks never start")
        return self.starts

    def _arrive(self, task: Task) -> set[int]:
        """A message of `task` has reached the neighbour."""
        neighbour = task.stage + (1 if task.kind is Kind.F else -1)
        return {self.problem.stages[neighbour].device}

    def _complete(self, now: int, task: Task) -> set[int]:
        problem, stage = self.problem, self.problem.stages[task.stage]
        device = stage.device
        self.done[task] = now
        self.free[device] += self._memory(task)[1]
        touched = {device}
        if task.kind in (Kind.D, Kind.H):
            link = problem.link_of[device]
            self.link_busy[link, task.kind] = False
            self.leaving[device] -= stage.saved if task.kind is Kind.D else 0
            touched |= {d for d in range(problem.devices) if problem.link_of[d] == link}
            if task.kind is Kind.H:
                self.host_free[device] += stage.saved
        else:
            self.busy[device] = False
        if task.kind is Kind.F and task.stage + 1 < len(problem.stages):
            heapq.heappush(self.events, (now + stage.send_activation, 1, task))
        if task.kind in (Kind.I, Kind.B) and task.stage > 0:
            heapq.heappush(self.events, (now + stage.send_gradient, 1, task))
        if task.kind in (Kind.B, Kind.W) and task.stage == self.mine[device][0]:
            self.closed[device] += 1
        if task.kind is Kind.F and self.modes[task.stage, task.microbatch] is Mode.OFFLOAD:
            self.next_offload[device].append(Task(Kind.D, task.stage, task.microbatch))
        return touched

    def _memory(self, task: Task) -> tuple[int, int]:
        recomputed = self.modes[task.stage, task.microbatch] is Mode.RECOMPUTE
        return device_memory(self.problem, task, recomputed)

    def _start_all(self, now: int, devices: range | list[int]) -> None:
        for device in devices:
            while self._start_transfer(now, device) or (not self.busy[device] and self._start_compute(now, device)):
                pass

    def _begin(self, now: int, task: Task) -> bool:
        device = self.problem.stages[task.stage].device
        self.free[device] -= self._memory(task)[0]
        if task.kind is Kind.F and self.modes[task.stage, task.microbatch] is Mode.OFFLOAD:
            self.leaving[device] += self.problem.stages[task.stage].saved
        self.starts[task] = now
        heapq.heappush(self.events, (now + duration(self.problem, task), 0, task))
        if task.kind in (Kind.D, Kind.H):
            self.link_busy[self.problem.link_of[device], task.kind] = True
        else:
            self.busy[device] = True
        return True

    def _ready(self, now: int, task: Task) -> bool:
        return all(
            before in self.done and self.done[before] + lag <= now
            for before, lag in predecessors(self.problem, task, self.total)
        )

    def _start_transfer(self, now: int, device: int) -> bool:
        link = self.problem.link_of[device]
        if link is None:
            return False
        queue = self.next_offload[device]
        if queue and not self.link_busy.get((link, Kind.D)):
            saved = self.problem.stages[queue[0].stage].saved
            if self.host_free[device] >= saved:
                self.host_free[device] -= saved
                return self._begin(now, queue.pop(0))
        if not self.link_busy.get((link, Kind.H)):
            task = self._next_reload(device)
            if task is not None and self._ready(now, task) and self._safe(device, task):
                return self._begin(now, task)
        return False

    def _next_reload(self, device: int) -> Task | None:
        """The first activation in the order of backwards that is away, if its microbatch is wholly forward here."""
        ahead = 0
        for microbatch, stage in self._backward_order(device):
            if self.modes[stage, microbatch] is not Mode.OFFLOAD:
                continue
            task = Task(Kind.H, stage, microbatch)
            if task not in self.starts:
                forwards = all(Task(Kind.F, s, microbatch) in self.done for s in self.mine[device])
                return task if forwards else None
            ahead += 1
            if ahead >= self.policy.prefetch:
                return None
        return None

    def _backward_order(self, device: int) -> Iterator[tuple[int, int]]:
        """Yield (microbatch, stage) in the order in which this device will run their backwards."""
        begin = min(self.next_backward[s] for s in self.mine[device])
        for microbatch in range(begin, self.problem.microbatches):
            for stage in reversed(self.mine[device]):
                if self.next_backward[stage] <= microbatch:
                    yield microbatch, stage

    def _start_compute(self, now: int, device: int) -> bool:
        for choose in (self._backward, self._recompute, self._forward, self._weight):
            task = choose(now, device)
            if task is not None:
                return self._begin(now, task)
        return False

    def _backward(self, now: int, device: int) -> Task | None:
        kind = Kind.I if self.policy.split else Kind.B
        for stage in sorted(self.mine[device], key=lambda s: (self.next_backward[s], -s)):
            task = Task(kind, stage, self.next_backward[stage])
            if task in self.total and self._ready(now, task) and self._safe(device, task):
                self.next_backward[stage] += 1
                return task
        return None

    def _recompute(self, now: int, device: int) -> Task | None:
        kind = Kind.I if self.policy.split else Kind.B
        for stage in sorted(self.mine[device], key=lambda s: (self.next_backward[s], -s)):
            microbatch = self.next_backward[stage]
            task = Task(Kind.R, stage, microbatch)
            if task not in self.total or task in self.starts or not self._ready(now, task):
                continue
            backward = Task(kind, stage, microbatch)
            waits = [p for p, _ in predecessors(self.problem, backward, self.total) if p != task]
            if all(p in self.starts for p in waits) and self._safe(device, task):
                return task
        return None

    def _forward(self, now: int, device: int) -> Task | None:
        for stage in sorted(self.mine[device], key=lambda s: (self.next_forward[s], -s)):
            task = Task(Kind.F, stage, self.next_forward[stage])
            if task not in self.total or not self._ready(now, task):
                continue
            opens = stage == self.mine[device][0]
            if opens and self.opened[device] - self.closed[device] >= self.policy.in_flight:
                continue
            if self._safe(device, task):
                self.next_forward[stage] += 1
                self.opened[device] += opens
                return task
        return None

    def _weight(self, now: int, device: int) -> Task | None:
        if not self.policy.split:
            return None
        for stage in sorted(self.mine[device], key=lambda s: (self.next_weight[s], -s)):
            task = Task(Kind.W, stage, self.next_weight[stage])
            if task in self.total and self._ready(now, task) and self._memory(task)[0] <= self.free[device]:
                self.next_weight[stage] += 1
                return task
        return None

    def _safe(self, device: int, task: Task) -> bool:
        """Banker's rule: after granting `task` its memory, every open microbatch can be finished in order."""
        taken, given = self._memory(task)
        free = self.free[device] - taken
        if free < 0:
            return False
        free += given + self.leaving[device]
        if task.kind is Kind.F and self.modes[task.stage, task.microbatch] is Mode.OFFLOAD:
            free += self.problem.stages[task.stage].saved
        begin = min((self.next_weight if self.policy.split else self.next_backward)[s] for s in self.mine[device])
        end = max(self.next_forward[s] for s in self.mine[device]) + (task.kind is Kind.F)
        for microbatch in range(begin, min(end, self.problem.microbatches)):
            left = self._finish(device, microbatch, task, free)
            if left is None:
                return False
            free = left
        return True

    def _finish(self, device: int, microbatch: int, granted: Task, free: int) -> int | None:
        """Run the rest of `microbatch` alone, starting with `free` units: what is free then, None if it gets stuck."""
        resident: list[tuple[int, int]] = []
        for stage in self.mine[device]:
            item = self.problem.stages[stage]
            forward = Task(Kind.F, stage, microbatch)
            if forward in self.starts or forward == granted:
                resident.append(self._resident(stage, microbatch, granted))
                continue
            if item.saved + item.forward_extra > free:
                return None
            mode = self.modes[stage, microbatch]
            kept = item.saved if mode is Mode.KEEP else item.checkpoint if mode is Mode.RECOMPUTE else 0
            free -= kept
            resident.append((kept, item.saved - kept))
        for stage, (there, more) in zip(reversed(self.mine[device]), reversed(resident), strict=True):
            item = self.problem.stages[stage]
            if there or more:
                extra = max(item.backward_extra, item.backward_input_extra + item.captured, item.backward_weight_extra)
                if more + extra > free:
                    return None
                free += there
        return free

    def _resident(self, stage: int, microbatch: int, granted: Task) -> tuple[int, int]:
        """Return the units of one activation on the device now, and those that its backward will still add."""
        item = self.problem.stages[stage]
        mode = self.modes[stage, microbatch]

        def is_begun(kind: Kind) -> bool:
            return Task(kind, stage, microbatch) in self.starts or Task(kind, stage, microbatch) == granted

        if is_begun(Kind.B) or is_begun(Kind.W):
            return 0, 0
        if is_begun(Kind.I):
            return item.residue, 0
        if mode is Mode.KEEP or is_begun(Kind.R) or is_begun(Kind.H):
            return item.saved, 0
        if mode is Mode.RECOMPUTE:
            return item.checkpoint, item.saved - item.checkpoint
        return 0, item.saved
