"""A memory-aware list scheduler under a guide: ranks say what goes first, the machine says when it can.

It runs the pipeline forward in time. Whenever a device is idle it starts, of the ops that are ready and safe, the one
of the lowest rank; transfers start as soon as their link is free. Microbatches keep their order within a stage. *Safe*
is the banker's rule (Dijkstra, 1965): memory is granted only if afterwards the device can still finish its activations
one after the other, in the order of their backwards' ranks; so there is no deadlock if the ranks make sense. A run
costs some microseconds per op, so that a search over guides (`tuning`) can afford thousands.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe_compiler.schedule import Kind, Mode, Schedule, Task
from optpipe_compiler.simulate import Stuck, device_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.problem import Problem

Ranks = list[list[int]]
"""[stage][microbatch]; lower goes first. Only ops of one device are compared."""

NEVER = 1 << 62
F, I, W, B, R, D, H = (int(kind) for kind in Kind)  # noqa: E741  (torch's letter)
KEEP, OFFLOAD, RECOMPUTE = (int(mode) for mode in Mode)


@dataclass(frozen=True)
class Guide:
    """What the dispatcher follows. Tables are [stage][microbatch]; ranks never fall from a microbatch to the next."""

    name: str
    forward: Ranks
    backward: Ranks
    weight: Ranks
    offload: Ranks
    reload: Ranks
    modes: list[list[int]]
    """What becomes of each activation, as Mode; an offload that the host has no room for is kept."""
    fused: list[bool]
    """Per stage: whether its backward is run in one piece."""
    ahead: int
    """Most activations that a device may have reloaded ahead of their backward, while it has forwards to run."""


class Dispatcher:
    """Runs guides on one problem; host memory is shared out between the devices once and for all."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        stages = problem.stages
        self.device = [stage.device for stage in stages]
        self.mine = [problem.stages_of(device) for device in range(problem.devices)]
        self.members: dict[int, list[int]] = {}
        for device, link in enumerate(problem.link_of):
            if link is not None:
                self.members.setdefault(link, []).append(device)
        self.length = [
            [s.forward, s.backward_input, s.backward_weight, s.backward, s.recompute, s.offload, s.reload]
            for s in stages
        ]
        self.alone = [{D: s.offload_alone, H: s.reload_alone} for s in stages]
        self.memory = [
            [[device_memory(problem, Task(kind, s, 0), again) for kind in Kind] for again in (False, True)]
            for s in range(len(stages))
        ]
        self.moved = [stage.moved for stage in stages]
        self.extra = [
            max(
                0 if not problem.freedom.split else s.backward_input_extra + s.captured,
                0 if not problem.freedom.split else s.backward_weight_extra,
                s.backward_extra,
                s.forward_extra,
            )
            for s in stages
        ]
        self.host = self._host_shares()
        self.ops = 0
        """Ops that all runs so far have started."""

    def _host_shares(self) -> list[int]:
        problem = self.problem
        if problem.host_budget is None:
            return [NEVER] * problem.devices
        weight = [sum(self.moved[s] for s in mine if problem.can_offload(s)) for mine in self.mine]
        return [problem.host_budget * item // max(1, sum(weight)) for item in weight]

    def run(self, guide: Guide, cutoff: int = NEVER) -> Run | None:
        """Return the run of `guide`, None as soon as it cannot end by `cutoff`; raises Stuck if memory runs out."""
        run = Run(self, guide)
        try:
            return run if run.play(cutoff) else None
        finally:
            self.ops += len(run.starts)


class Run:
    """One run: the starts of all ops, and the time at which the last one ends."""

    def __init__(self, setup: Dispatcher, guide: Guide) -> None:
        problem = setup.problem
        self.setup, self.problem, self.guide = setup, problem, guide
        stages, count = len(problem.stages), problem.microbatches
        devices = range(problem.devices)
        self.modes = guide.modes if problem.host_budget is None else [list(row) for row in guide.modes]
        self.starts: dict[tuple[int, int, int], int] = {}
        self.makespan = 0
        self.begun_forward, self.begun_backward, self.begun_weight = [0] * stages, [0] * stages, [0] * stages
        self.done_forward, self.done_backward, self.done_weight = [0] * stages, [0] * stages, [0] * stages
        self.input = [[NEVER] * count for _ in range(stages)]
        """When the input of a forward is there."""
        self.input[0] = [0] * count
        self.gradient = [[NEVER] * count for _ in range(stages)]
        """When the output gradient that a backward needs is there."""
        self.where = [[0] * count for _ in range(stages)]
        """The last of F, D, H, R that has begun (+ 10 once it is over) for each activation."""
        self.free = list(problem.budget)
        self.host = list(setup.host)
        self.leaving = [0] * problem.devices
        """Units that offloads will free without needing any."""
        self.busy = [False] * problem.devices
        self.on_link: dict[int, dict[int, tuple[int, int, int] | None]] = {n: {D: None, H: None} for n in setup.members}
        self.to_leave: dict[int, list[tuple[int, int, int]]] = {link: [] for link in setup.members}
        self.to_return = [
            sorted((guide.reload[s][m], s, m) for s in mine for m in range(count) if guide.modes[s][m] == OFFLOAD)
            for mine in setup.mine
        ]
        self.returned, self.ahead = [0] * problem.devices, [0] * problem.devices
        self.opening = [count * len(mine) for mine in setup.mine]
        """Forwards that a device has not begun."""
        self.order = [sorted((guide.backward[s][m], -s, m) for s in mine for m in range(count)) for mine in setup.mine]
        """The order in which a device would finish its activations: (rank, -stage, microbatch)."""
        self.finished = [0] * problem.devices
        """How many of them, from the first on, it has finished."""
        self.enough = [self._enough(d) for d in devices]
        self.remaining = [self._work(d) for d in devices]
        self.ends: dict[tuple[int, int, int], int] = {}
        self.events: list[tuple[int, int, int, int]] = []
        self.split = [not fused for fused in guide.fused]

    def schedule(self) -> Schedule:
        """Return the run as a schedule."""
        starts = {Task(Kind(kind), s, m): start for (kind, s, m), start in self.starts.items()}
        return Schedule(self.problem, self.guide.name, starts)

    def period(self) -> float:
        """Return the ticks per microbatch in the middle of the run, on the average of all stages."""
        first, last = self.problem.microbatches // 4, 3 * self.problem.microbatches // 4
        passed = 0
        for s, fused in enumerate(self.guide.fused):
            kind = B if fused else I
            passed += self.starts[kind, s, last] - self.starts[kind, s, first]
        return passed / (len(self.problem.stages) * (last - first))

    def _enough(self, device: int) -> int:
        """Return the units with which any one microbatch can go through the device alone."""
        hold = need = 0
        for s in self.setup.mine[device]:
            stage, modes = self.problem.stages[s], self.modes[s]
            may_stay = KEEP in modes or (OFFLOAD in modes and self.problem.host_budget is not None)
            away = max(stage.staying if OFFLOAD in modes else 0, stage.checkpoint if RECOMPUTE in modes else 0)
            hold += stage.saved if may_stay else away
            need = max(need, stage.saved + self.setup.extra[s])
        return hold + need

    def _work(self, device: int) -> int:
        total = 0
        for s in self.setup.mine[device]:
            length = self.setup.length[s]
            backward = length[B] if self.guide.fused[s] else length[I] + length[W]
            total += self.problem.microbatches * (length[F] + backward)
            total += length[R] * self.modes[s].count(RECOMPUTE)
        return total

    def play(self, cutoff: int) -> bool:
        """Run until nothing is left, or return False as soon as a device can no longer be done by `cutoff`."""
        self.cutoff = cutoff
        events = self.events
        if not self._start_all(0, range(self.problem.devices)):
            return False
        while events:
            now = events[0][0]
            touched: set[int] = set()
            while events and events[0][0] == now:
                _, kind, s, m = heapq.heappop(events)
                if kind < 0:
                    touched.add(self.setup.device[s])
                elif self.ends[kind, s, m] == now:
                    self._complete(now, kind, s, m, touched)
            if not self._start_all(now, sorted(touched)):
                return False
        left = len(self.problem.stages) * self.problem.microbatches - sum(self.done_weight)
        if left:
            raise Stuck(f"{self.guide.name}: {left} backwards never start")
        return True

    def _start_all(self, now: int, devices: Sequence[int]) -> bool:
        for device in devices:
            link = self.problem.link_of[device]
            if link is not None:
                self._start_transfers(now, link)
            while not self.busy[device]:
                chosen = self._choose(now, device)
                if chosen is None:
                    break
                if now + self.remaining[device] > self.cutoff:
                    return False
                self._begin(now, *chosen)
        return True

    # -- compute ------------------------------------------------------------------------------------------------

    def _choose(self, now: int, device: int) -> tuple[int, int, int] | None:
        """Return the (kind, stage, microbatch) of the lowest rank that may start now."""
        best: tuple[int, int, int] | None = None
        lowest, count, free = NEVER, self.problem.microbatches, self.free[device]
        guide, memory = self.guide, self.setup.memory
        for s in self.setup.mine[device]:
            m = self.begun_forward[s]
            if m < count and self.input[s][m] <= now and guide.forward[s][m] < lowest:
                taken = memory[s][0][F][0]
                if taken <= free and self._forward_is_safe(device, s, m, taken):
                    best, lowest = (F, s, m), guide.forward[s][m]
            m = self.begun_backward[s]
            if m < count and self.gradient[s][m] <= now and guide.backward[s][m] < lowest:
                kind = self._backward(device, s, m, free)
                if kind is not None:
                    best, lowest = (kind, s, m), guide.backward[s][m]
            m = self.begun_weight[s]
            ready = m < self.done_backward[s] and self.split[s] and memory[s][0][W][0] <= free
            if ready and guide.weight[s][m] < lowest:
                best, lowest = (W, s, m), guide.weight[s][m]
        return best

    def _forward_is_safe(self, device: int, s: int, m: int, taken: int) -> bool:
        mode = self.modes[s][m]
        if mode == OFFLOAD and self.host[device] < self.setup.moved[s]:
            self.modes[s][m] = mode = KEEP
            self.to_return[device].remove((self.guide.reload[s][m], s, m))
        given = self.setup.memory[s][mode == RECOMPUTE][F][1] + (self.setup.moved[s] if mode == OFFLOAD else 0)
        return self._safe(device, taken, given, (F, s, m))

    def _backward(self, device: int, s: int, m: int, free: int) -> int | None:
        """Return the kind of op with which the backward of (s, m) may go on now, None if it may not."""
        mode, where = self.modes[s][m], self.where[s][m]
        if mode == RECOMPUTE and where == F + 10:
            kind = R
        elif (mode == KEEP and where == F + 10) or where in (H + 10, R + 10):
            kind = I if self.split[s] else B
        else:
            return None
        taken = self.setup.memory[s][0][kind][0]
        kept = self.problem.stages[s].saved - self.problem.stages[s].checkpoint if kind == R else 0
        return kind if taken <= free and self._safe(device, taken, taken - kept, (kind, s, m)) else None

    def _begin(self, now: int, kind: int, s: int, m: int) -> None:
        device = self.setup.device[s]
        self.free[device] -= self.setup.memory[s][kind == R][kind][0]
        length = self.setup.length[s][kind]
        self.remaining[device] -= length
        self.busy[device] = True
        if kind == F:
            self.begun_forward[s] += 1
            self.opening[device] -= 1
            self.where[s][m] = F
            if self.modes[s][m] == OFFLOAD:
                self.leaving[device] += self.setup.moved[s]
                self.host[device] -= self.setup.moved[s]
        elif kind == W:
            self.begun_weight[s] += 1
        elif kind == R:
            self.where[s][m] = R
        else:
            self.begun_backward[s] += 1
            if self.modes[s][m] == OFFLOAD:
                self.ahead[device] -= 1
        self.starts[kind, s, m] = now
        self._end_at(kind, s, m, now + length)

    # -- transfers ----------------------------------------------------------------------------------------------

    def _start_transfers(self, now: int, link: int) -> None:
        lanes = self.on_link[link]
        if lanes[D] is None and self.to_leave[link]:
            _, s, m = heapq.heappop(self.to_leave[link])
            self._transfer(now, link, D, s, m)
        if lanes[H] is None:
            item = self._next_back(link)
            if item is not None:
                _, s, m = item
                device = self.setup.device[s]
                self.free[device] -= self.setup.moved[s]
                self.returned[device] += 1
                self.ahead[device] += 1
                self._transfer(now, link, H, s, m)

    def _next_back(self, link: int) -> tuple[int, int, int] | None:
        """Return (rank, stage, microbatch) of what the link's devices need back first, None if it must wait."""
        chosen: tuple[int, int, int] | None = None
        for device in self.setup.members[link]:
            queue, position = self.to_return[device], self.returned[device]
            if position == len(queue) or (self.ahead[device] >= self.guide.ahead and self.opening[device]):
                continue
            _, s, m = item = queue[position]
            is_first = self.where[s][m] == D + 10 and (chosen is None or item < chosen)
            if is_first and self._safe(device, self.setup.moved[s], 0, (H, s, m)):
                chosen = item
        return chosen

    def _transfer(self, now: int, link: int, kind: int, s: int, m: int) -> None:
        """Start a transfer; one that meets one of the other direction is slow, and slows that one down."""
        lanes, met = self.on_link[link], self.on_link[link][H if kind == D else D]
        lanes[kind] = (kind, s, m)
        self.where[s][m] = kind
        self.starts[kind, s, m] = now
        if met is None:
            self._end_at(kind, s, m, now + self.setup.alone[s][kind])
        else:
            self._end_at(*met, self.starts[met] + self.setup.length[met[1]][met[0]])
            self._end_at(kind, s, m, now + self.setup.length[s][kind])

    def _end_at(self, kind: int, s: int, m: int, end: int) -> None:
        """Let the op complete at `end`; an event for an earlier end no longer counts."""
        if self.ends.get((kind, s, m)) != end:
            self.ends[kind, s, m] = end
            heapq.heappush(self.events, (end, kind, s, m))

    # -- completions --------------------------------------------------------------------------------------------

    def _complete(self, now: int, kind: int, s: int, m: int, touched: set[int]) -> None:
        setup = self.setup
        device = setup.device[s]
        touched.add(device)
        mode = self.modes[s][m]
        self.free[device] += setup.memory[s][mode == RECOMPUTE][kind][1]
        self.makespan = max(self.makespan, now)
        if kind in (D, H):
            link = self.problem.link_of[device]
            assert link is not None
            self.on_link[link][kind] = None
            touched.update(setup.members[link])
            self.where[s][m] = kind + 10
            if kind == D:
                self.leaving[device] -= setup.moved[s]
            else:
                self.host[device] += setup.moved[s]
            return
        self.busy[device] = False
        if kind == F:
            self._forward_done(now, s, m, touched)
        elif kind == R:
            self.where[s][m] = R + 10
        elif kind != W:
            self.done_backward[s] += 1
            if s:
                self._deliver(now + self.problem.stages[s].send_gradient, now, self.gradient, s - 1, m, touched)
        if kind in (W, B):
            self.done_weight[s] += 1
            order, done, first = self.order[device], self.done_weight, self.finished[device]
            while first < len(order) and order[first][2] < done[-order[first][1]]:
                first += 1
            self.finished[device] = first

    def _forward_done(self, now: int, s: int, m: int, touched: set[int]) -> None:
        self.done_forward[s] += 1
        self.where[s][m] = F + 10
        if self.modes[s][m] == OFFLOAD:
            link = self.problem.link_of[self.setup.device[s]]
            assert link is not None
            heapq.heappush(self.to_leave[link], (self.guide.offload[s][m], s, m))
        if s + 1 < len(self.problem.stages):
            self._deliver(now + self.problem.stages[s].send_activation, now, self.input, s + 1, m, touched)
        else:
            self.gradient[s][m] = now

    def _deliver(self, time: int, now: int, messages: list[list[int]], s: int, m: int, touched: set[int]) -> None:
        messages[s][m] = time
        if time > now:
            heapq.heappush(self.events, (time, -1, s, m))
        else:
            touched.add(self.setup.device[s])

    # -- memory -------------------------------------------------------------------------------------------------

    def _safe(self, device: int, taken: int, given: int, granted: tuple[int, int, int]) -> bool:
        """Banker's rule: after `granted` took and gave its memory, all activations can be finished in order."""
        free = self.free[device] - taken
        if free < 0:
            return False
        free += given + self.leaving[device]
        enough, mine = self.enough[device], self.setup.mine[device]
        if free >= enough:
            return True
        ahead = {granted[1:]} if granted[0] == F else set()
        order = self.order[device]
        for position in range(self.finished[device], len(order)):
            _, above, m = order[position]
            left = self._finish(mine, -above, m, free, granted, ahead)
            if left is None:
                return False
            free = left
            if free >= enough:
                return True
        return True

    def _finish(
        self, mine: list[int], s: int, m: int, free: int, granted: tuple[int, int, int], ahead: set[tuple[int, int]]
    ) -> int | None:
        """Finish activation (s, m), starting with `free` units: what is free then, None if it gets stuck.

        The microbatch's forwards up to stage s that have not begun are run first, and join `ahead`.
        """
        for t in mine:
            if t > s:
                break
            if m < self.begun_forward[t] or (t, m) in ahead:
                continue
            stage, mode = self.problem.stages[t], self.modes[t][m]
            if stage.saved + stage.forward_extra > free:
                return None
            free -= stage.saved if mode == KEEP else stage.checkpoint if mode == RECOMPUTE else stage.staying
            ahead.add((t, m))
        there, more = self._held(s, m, granted)
        if there or more:
            if more + self.setup.extra[s] > free:
                return None
            free += there
        return free

    def _held(self, s: int, m: int, granted: tuple[int, int, int]) -> tuple[int, int]:
        """Return the units of one activation on the device now, and those that its backward will still add."""
        stage, mode, where = self.problem.stages[s], self.modes[s][m], self.where[s][m]
        if m < self.begun_weight[s] or (m < self.begun_backward[s] and not self.split[s]):
            return 0, 0
        if m < self.begun_backward[s]:
            return stage.residue, 0
        if mode == KEEP or where in (H, H + 10, R, R + 10) or (granted[0] in (H, R) and granted[1:] == (s, m)):
            return stage.saved, 0
        kept = stage.checkpoint if mode == RECOMPUTE else stage.staying
        return kept, stage.saved - kept
