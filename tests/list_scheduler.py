"""The list scheduler in plain Python: the readable definition with which the compiled machine must agree tick for tick.

Whenever a device is idle it starts, of the ops that are ready and safe, the one of the lowest rank; a forward may leave
the device to one of lower rank that is still to come. Transfers start as soon as their link is free. Microbatches keep
their order within a stage. An op is *safe* if afterwards the device can still finish its activations one after the
other, in the order of their backwards' ranks (the banker's rule).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optpipe_compiler.model.memory import op_memory
from optpipe_compiler.model.schedule import Kind, Mode, Task, duration

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem, Stage

NEVER = 1 << 62
F, I, W, B, R, D, H = Kind  # noqa: E741  (torch's letter)
Key = tuple[int, int]
"""(stage, microbatch)"""


class Stuck(Exception):
    """Some ops never start."""


@dataclass
class Guide:
    """What goes first, and what becomes of activations; tables are by (stage, microbatch)."""

    forward: dict[Key, int]
    backward: dict[Key, int]
    weight: dict[Key, int]
    modes: dict[Key, Mode]
    fused: list[bool]
    """By stage."""
    reserve: list[int]
    """By device: units left free for messages."""
    holds: list[bool]
    """By stage: whether forwards leave room for earlier ones that are still to come."""
    waits: list[bool]
    """By stage: whether forwards wait for earlier ones that come before they would be over."""
    recomputed_before: list[int]
    """By stage: how many stages before its backward an activation is recomputed; 0: as soon as it may be."""
    reloaded_before: list[int]


@dataclass
class Device:
    """What a device holds and does."""

    stages: list[int]
    free_host: int
    held: int = 0
    mail: int = 0
    """Received messages that were not consumed; not in `held`."""
    leaving: int = 0
    """What offloads and messages on their way will free."""
    running: Task | None = None
    copied: int = 0
    """When its last op, and what the offload behind it takes from compute, is over."""
    rests: int = 0
    """It starts nothing earlier."""
    reloaded: set[Key] = field(default_factory=set)
    """Activations that are back, or on the way, and whose backward has not begun."""


@dataclass
class Run:
    """One run of a guide: `starts` of all ops."""

    problem: Problem
    guide: Guide
    starts: dict[Task, int] = field(default_factory=dict)
    ends: dict[Task, int] = field(default_factory=dict)
    done: set[Task] = field(default_factory=set)

    def __post_init__(self) -> None:
        problem = self.problem
        self.modes = dict(self.guide.modes)
        self.arrivals: dict[Task, int] = {}
        """When what an op produced is at the next stage."""
        self.events: list[tuple[int, int, int, int]] = []
        shares = self._host_shares()
        self.devices = [Device(problem.stages_of(d), shares[d]) for d in range(problem.devices)]
        self.transfers: dict[tuple[int, Kind], Task | None] = {
            (link, kind): None for link in problem.link_of if link is not None for kind in (D, H)
        }
        rank = self.guide.backward
        self.order = [
            sorted(
                ((s, m) for s in device.stages for m in range(problem.microbatches)),
                key=lambda k: (rank[k], -k[0], k[1]),
            )
            for device in self.devices
        ]

    def _host_shares(self) -> list[int]:
        """A device's part of each limit on it is as large as its part of what the limited devices could offload."""
        problem = self.problem
        can = [
            sum(problem.stages[s].moved for s in problem.stages_of(d) if problem.can_offload(s))
            for d in range(problem.devices)
        ]
        return [
            min(
                (
                    limit * can[d] // max(1, sum(can[other] for other in devices))
                    for devices, limit in problem.host_limits
                    if d in devices
                ),
                default=NEVER,
            )
            for d in range(problem.devices)
        ]

    # -- time ---------------------------------------------------------------------------------------------------

    def play(self) -> dict[Task, int]:
        """Run to the end and return the starts."""
        self._start(0, range(self.problem.devices))
        while self.events:
            now = self.events[0][0]
            touched: set[int] = set()
            produced: list[Task] = []
            arrived: list[Task] = []
            while self.events and self.events[0][0] == now:
                _, code, s, m = heapq.heappop(self.events)
                touched.add(self._stage(s).device)
                if code == 9:
                    continue
                if code >= 7:
                    arrived.append(Task(F if code == 7 else B, s, m))
                elif self.ends[Task(Kind(code), s, m)] == now and Task(Kind(code), s, m) not in self.done:
                    self._complete(Task(Kind(code), s, m), produced, touched)
            for task in produced:
                self._device(self._target(task)).mail += self._message(task)
                if self.arrivals[task] == now:
                    arrived.append(task)
            for task in arrived:
                sender = self._device(task.stage)
                sender.held -= self._message(task)
                sender.leaving -= self._message(task)
                touched |= {self._stage(task.stage).device, self._stage(self._target(task)).device}
            self._start(now, sorted(touched))
        left = len(self.problem.stages) * self.problem.microbatches - sum(t.kind in (W, B) for t in self.done)
        if left:
            raise Stuck(f"{left} backwards never start")
        return self.starts

    def _stage(self, s: int) -> Stage:
        return self.problem.stages[s]

    def _device(self, s: int) -> Device:
        return self.devices[self._stage(s).device]

    def _target(self, task: Task) -> int:
        return task.stage + (1 if task.kind is F else -1)

    def _message(self, task: Task) -> int:
        return self._stage(task.stage).outgoing if task.kind is F else self._stage(task.stage).incoming

    def _is_sent(self, task: Task) -> bool:
        target = self._target(task)
        inside = task.kind in (F, I, B) and 0 <= target < len(self.problem.stages)
        return inside and self._stage(target).device != self._stage(task.stage).device

    def _complete(self, task: Task, produced: list[Task], touched: set[int]) -> None:
        self.done.add(task)
        kind, s, m = task
        stage, device = self._stage(s), self._device(s)
        device.held -= op_memory(stage, kind, self.modes[s, m] is Mode.RECOMPUTE)[1]
        if kind in (D, H):
            link = self.problem.link_of[stage.device]
            assert link is not None
            self.transfers[link, kind] = None
            touched |= {d for d, other in enumerate(self.problem.link_of) if other == link}
            if kind is D:
                device.leaving -= stage.moved
            else:
                device.free_host += stage.moved
            return
        device.running = None
        is_offloaded = kind is F and self.modes[s, m] is Mode.OFFLOAD
        device.copied = self.ends[task] + (stage.offload_busy if is_offloaded else 0)
        source = s - 1 if kind is F else s + 1
        if kind in (F, I, B) and 0 <= source < len(self.problem.stages) and self._device(source) is not device:
            read = stage.incoming if kind is F else stage.outgoing
            device.mail -= read
            device.held += read
        if kind in (F, I, B) and 0 <= self._target(task) < len(self.problem.stages):
            self.arrivals[task] = self.ends[task]
            if self._is_sent(task):
                produced.append(task)
                lag = stage.send_activation if kind is F else stage.send_gradient
                self.arrivals[task] += lag
                if lag:
                    heapq.heappush(self.events, (self.arrivals[task], 7 if kind is F else 8, s, m))

    def _start(self, now: int, devices: range | list[int]) -> None:
        for d in devices:
            link = self.problem.link_of[d]
            if link is not None:
                self._start_offload(now, link)
                self._start_reload(now, link)
            if self.devices[d].running is None and self.devices[d].rests <= now:
                if self.devices[d].copied > now:
                    self._rest(d, self.devices[d].copied)
                else:
                    self._start_op(now, d)

    def _rest(self, d: int, until: int) -> None:
        """Let copies have compute for a time."""
        self.devices[d].rests = until
        heapq.heappush(self.events, (until, 9, self.devices[d].stages[0], 0))

    def _begin(self, now: int, task: Task, end: int) -> None:
        self.starts[task] = now
        self._end_at(task, end)
        self._device(task.stage).held += op_memory(self._stage(task.stage), task.kind, False)[0]

    def _end_at(self, task: Task, end: int) -> None:
        if self.ends.get(task) != end:
            self.ends[task] = end
            heapq.heappush(self.events, (end, *task))

    # -- compute ------------------------------------------------------------------------------------------------

    def _start_op(self, now: int, d: int) -> None:
        ready = [(rank, number, task) for number, (rank, task) in enumerate(self._candidates(now, d))]
        for _, _, task in sorted(ready):
            if not (task.kind is F and self._yields(now, d, task)) and self._is_granted(d, task):
                device, stage = self.devices[d], self._stage(task.stage)
                if task.kind in (I, B) and self.modes[task.stage, task.microbatch] is Mode.OFFLOAD:
                    until = device.copied + stage.reload_busy
                    if until > now:
                        self._rest(d, until)
                        return
                self._begin(now, task, now + duration(self.problem, task))
                self._call(now, task)
                device.running = task
                if self._is_sent(task):
                    device.leaving += self._message(task)
                key = task.stage, task.microbatch
                if task.kind is F:
                    self.modes[key] = self._mode(key)
                if task.kind is F and self.modes[key] is Mode.OFFLOAD:
                    device.leaving += stage.moved
                    device.free_host -= stage.moved
                if task.kind in (I, B):
                    device.reloaded.discard(key)
                return

    def _candidates(self, now: int, d: int) -> list[tuple[int, Task]]:
        """Return (rank, op) for what could run but for memory; of equal ranks the first goes first."""
        found = []
        for s in self.devices[d].stages:
            for kinds, ranks in (((F,), self.guide.forward), ((B, I), self.guide.backward), ((W,), self.guide.weight)):
                m = self._count(kinds, s)
                if m == self.problem.microbatches:
                    continue
                task = self._next(now, kinds, s, m)
                if task is not None:
                    found.append((ranks[s, m], task))
        return found

    def _yields(self, now: int, d: int, task: Task) -> bool:
        """Whether a forward leaves the device to one of lower rank, whose input is still to come."""
        problem, rank = self.problem, self.guide.forward
        _, s, m = task
        room = self._free(d)
        for other in self.devices[d].stages:
            first = self._count((F,), other)
            if other in (0, s) or first == problem.microbatches or rank[other, first] >= rank[s, m]:
                continue
            if other > s and first >= m:  # it comes from this one
                continue
            before = Task(F, other - 1, first)
            if self._arrival((F,), other - 1, first) <= now:
                continue
            taken = sum(op_memory(self._stage(one), F, False)[0] for one in (s, other))
            if self.guide.holds[s] and taken > room:
                return True
            if self._device(other - 1).running == before:
                lag = self._stage(other - 1).send_activation if self._is_sent(before) else 0
                coming = self.ends[before] + lag
            else:
                coming = self.arrivals.get(before, NEVER)
            if self.guide.waits[s] and coming < now + duration(problem, task):
                return True
        return False

    def _count(self, kinds: tuple[Kind, ...], s: int) -> int:
        if kinds == (W,) and self.guide.fused[s]:
            return self.problem.microbatches
        return sum((Task(kind, s, m) in self.starts) for kind in kinds for m in range(self.problem.microbatches))

    def _next(self, now: int, kinds: tuple[Kind, ...], s: int, m: int) -> Task | None:
        last = len(self.problem.stages) - 1
        if kinds == (F,):
            return Task(F, s, m) if s == 0 or self._arrival((F,), s - 1, m) <= now else None
        if kinds == (W,):
            return Task(W, s, m) if Task(I, s, m) in self.done else None
        if Task(F, s, m) not in self.done:
            return None
        back = {Mode.OFFLOAD: H, Mode.RECOMPUTE: R}.get(self.modes[s, m])
        is_dropped = back is R and Task(R, s, m) not in self.starts
        if not is_dropped and s < last and self._arrival((B, I), s + 1, m) > now:
            return None
        if back is None or Task(back, s, m) in self.done:
            return Task(B if self.guide.fused[s] else I, s, m)
        is_dropped = is_dropped and self._is_due(Task(R, s, m))
        return Task(R, s, m) if is_dropped else None

    def _before(self, key: Key) -> int:
        is_away = self.modes[key] is Mode.OFFLOAD
        return (self.guide.reloaded_before if is_away else self.guide.recomputed_before)[key[0]]

    def _is_due(self, task: Task) -> bool:
        """Whether the microbatch's backward, as many stages later as is asked for, has begun.

        Where there are less stages its forward of the last one.
        """
        _, s, m = task
        last, before = len(self.problem.stages) - 1, self._before((s, m))
        calls = [Task(F, last, m)] if s + before > last else [Task(kind, s + before, m) for kind in (B, I)]
        return before == 0 or any(call in self.starts for call in calls)

    def _call(self, now: int, task: Task) -> None:
        """Look again at the devices whose activations an op calls for that begins now."""
        kind, s, m = task
        last = len(self.problem.stages) - 1
        for other in range(s):
            before = self._before((other, m))
            if s - other <= before and (before == s - other if kind in (I, B) else task == Task(F, last, m)):
                heapq.heappush(self.events, (now, 9, other, 0))

    def _arrival(self, kinds: tuple[Kind, ...], s: int, m: int) -> int:
        return min(self.arrivals.get(Task(kind, s, m), NEVER) for kind in kinds)

    # -- transfers ----------------------------------------------------------------------------------------------

    def _start_offload(self, now: int, link: int) -> None:
        waiting = [
            (self.guide.forward[key], *key)
            for key, mode in self.modes.items()
            if mode is Mode.OFFLOAD
            and self.problem.link_of[self._stage(key[0]).device] == link
            and Task(F, *key) in self.done
            and Task(D, *key) not in self.starts
        ]
        if waiting and self.transfers[link, D] is None:
            _, s, m = min(waiting)
            self._transfer(now, link, Task(D, s, m))

    def _start_reload(self, now: int, link: int) -> None:
        if self.transfers[link, H] is not None:
            return
        chosen: Key | None = None
        for d, device in enumerate(self.devices):
            if self.problem.link_of[d] != link:
                continue
            away = [k for k in self.order[d] if self.modes[k] is Mode.OFFLOAD and Task(H, *k) not in self.starts]
            opening = any(self._count((F,), s) < self.problem.microbatches for s in device.stages)
            if not away or (device.reloaded and opening):
                continue
            first = away[0]
            better = chosen is None or self.guide.backward[first] < self.guide.backward[chosen]
            is_due = Task(D, *first) in self.done and self._is_due(Task(H, *first))
            if is_due and better and self._is_granted(d, Task(H, *first)):
                chosen = first
        if chosen is not None:
            self._device(chosen[0]).reloaded.add(chosen)
            self._transfer(now, link, Task(H, *chosen))

    def _transfer(self, now: int, link: int, task: Task) -> None:
        """Start a transfer; one that meets one of the other direction is slow, and slows that one down."""
        self.transfers[link, task.kind] = task
        met = self.transfers[link, H if task.kind is D else D]
        stage = self._stage(task.stage)
        length = stage.offload_alone if task.kind is D else stage.reload_alone
        if met is not None:
            length = duration(self.problem, task)
            self._end_at(met, self.starts[met] + duration(self.problem, met))
        self._begin(now, task, now + length)

    # -- memory -------------------------------------------------------------------------------------------------

    def _free(self, d: int) -> int:
        device = self.devices[d]
        return self.problem.budget[d] - device.held - max(device.mail, self.guide.reserve[d])

    def _mode(self, key: Key) -> Mode:
        """What becomes of an activation whose forward begins now: it is kept where the host has no room for it."""
        mode, stage = self.modes[key], self._stage(key[0])
        is_full = self._device(key[0]).free_host < stage.moved
        return Mode.KEEP if mode is Mode.OFFLOAD and is_full else mode

    def _is_granted(self, d: int, task: Task) -> bool:
        kind, s, m = task
        stage, key = self._stage(s), (s, m)
        taken = op_memory(stage, kind, False)[0]
        if kind is W:
            return taken <= self._free(d) or taken == 0
        if kind in (I, B, R) and taken == 0:
            return True
        if kind is F:
            given = op_memory(stage, F, self._mode(key) is Mode.RECOMPUTE)[1]
            given += stage.moved if self._mode(key) is Mode.OFFLOAD else 0
            given += self._message(task) if self._is_sent(task) else 0
        elif kind is H:
            given = 0
        else:
            given = taken - (stage.saved - stage.checkpoint if kind is R else 0)
        return self._is_safe(d, taken, given, task)

    def _is_safe(self, d: int, taken: int, given: int, granted: Task) -> bool:
        left = self._free(d) - taken
        if left < 0:
            return False
        left += given + self.devices[d].leaving
        enough = self._enough(d)
        if left >= enough:
            return True
        ahead = {(granted.stage, granted.microbatch)} if granted.kind is F else set()
        for key in self.order[d]:
            left = self._finish(d, key, left, granted, ahead)
            if left < 0 or left >= enough:
                return left >= 0
        return True

    def _finish(self, d: int, key: Key, left: int, granted: Task, ahead: set[Key]) -> int:
        """Return what is free once the activation is finished, a negative number if that gets stuck."""
        s, m = key
        if Task(W, s, m) in self.starts or Task(B, s, m) in self.starts:
            return left
        for t in self.devices[d].stages:
            if t <= s and Task(F, t, m) not in self.starts and (t, m) not in ahead:
                ahead.add((t, m))
                stage = self._stage(t)
                there = stage.incoming if t == 0 or self._arrival((F,), t - 1, m) < NEVER else 0
                if op_memory(stage, F, False)[0] + stage.incoming - there > left:
                    return -1
                left -= self._staying((t, m)) - there
        stage = self._stage(s)
        here, more = self._held(key, granted)
        if here or more:
            last = s == len(self.problem.stages) - 1
            known = Task(F, s, m) in self.done if last else self._arrival((B, I), s + 1, m) < NEVER
            outgoing = stage.outgoing if known else 0
            if more + self._extra(s) - outgoing > left:
                return -1
            left += here + outgoing
        return left

    def _extra(self, s: int) -> int:
        stage = self._stage(s)
        halves = (stage.backward_input_extra + stage.captured, stage.backward_weight_extra)
        return max(stage.forward_extra, *((stage.backward_extra,) if self.guide.fused[s] else halves))

    def _staying(self, key: Key) -> int:
        stage = self._stage(key[0])
        away = {Mode.OFFLOAD: stage.saved - stage.moved, Mode.RECOMPUTE: stage.checkpoint}
        return away.get(self.modes[key], stage.saved)

    def _held(self, key: Key, granted: Task) -> tuple[int, int]:
        """Return the units of an activation on the device now, and those that its backward will still add."""
        stage = self._stage(key[0])
        if Task(I, *key) in self.starts:
            return stage.residue, 0
        back = {Mode.OFFLOAD: H, Mode.RECOMPUTE: R}.get(self.modes[key])
        if back is None or Task(back, *key) in {*self.starts, granted}:
            return stage.saved, 0
        return self._staying(key), stage.saved - self._staying(key)

    def _enough(self, d: int) -> int:
        """Return the units with which any one microbatch can go through the device alone."""
        hold = need = 0
        for s in self.devices[d].stages:
            stage = self._stage(s)
            modes = {self.guide.modes[s, m] for m in range(self.problem.microbatches)}
            may_stay = Mode.KEEP in modes or (Mode.OFFLOAD in modes and self._host_shares()[d] < NEVER)
            away = [stage.saved - stage.moved] * (Mode.OFFLOAD in modes) + [stage.checkpoint] * (
                Mode.RECOMPUTE in modes
            )
            hold += stage.saved if may_stay else max(away)
            need = max(need, stage.saved + self._extra(s))
        return hold + need
