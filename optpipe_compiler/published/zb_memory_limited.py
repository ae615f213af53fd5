"""Automatic zero-bubble schedules under a memory limit (Qi et al., 2023, arXiv:2401.10241 section 3.1).

The paper's heuristic runs the pipeline on the true costs. Warm-up: as many forwards as memory takes before the first
input gradient is due. Then each round one forward and one input gradient per device; weight gradients fill what would
be a bubble of their length, or a shorter one if the bubble would make this device the worst, and make room where memory
is short. Drain: all weight gradients left. Three yes-or-no choices are tried in all combinations; the best by the
longest device span, the paper's objective, is kept. ZB-1p and ZB-2p limit memory to P and 2P microbatches.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind, Task, duration
from optpipe_compiler.published.common import LINEAR, NotDefined, Tasks, ordered

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem, Stage

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741  (torch's letter)
PROMPT_INPUT, HOLD_BACK, FILL_PARTLY = range(3)
"""The choices of a run, in order."""


@ordered("zb-memory-limited", LINEAR, splits=True)
def zb_memory_limited(problem: Problem) -> Tasks:
    """Return the order for the caps of `problem`."""
    return _limited(problem, "zb-memory-limited", list(problem.budget))


@ordered("zb-1p", LINEAR, splits=True)
def zb_1p(problem: Problem) -> Tasks:
    """Return the order for a limit of P microbatches per device, the memory of 1F1B."""
    return _limited(problem, "zb-1p", [_room(stage, problem.devices) for stage in problem.stages])


@ordered("zb-2p", LINEAR, splits=True)
def zb_2p(problem: Problem) -> Tasks:
    """Return the order for a limit of 2P microbatches per device, enough for no bubble where F = I = W."""
    return _limited(problem, "zb-2p", [_room(stage, 2 * problem.devices) for stage in problem.stages])


def _room(stage: Stage, microbatches: int) -> int:
    """Return the memory for so many activations and for what exists only while an op runs."""
    backward = max(stage.captured + stage.backward_input_extra, stage.backward_weight_extra)
    return microbatches * stage.saved + max(stage.forward_extra, backward)


def _limited(problem: Problem, name: str, limits: list[int]) -> Tasks:
    best: tuple[int, Tasks] | None = None
    done: set[tuple[bool, ...]] = set()
    for choices in product((True, False), repeat=3):
        if choices in done:
            continue
        run = _Run(problem, limits, *choices)
        try:
            run.run()
        except NotDefined as error:
            reason = error
        else:
            if best is None or run.span() < best[0]:
                best = run.span(), run.orders
        same = {choices}  # and other choices that lead to the same run
        for number in {PROMPT_INPUT, HOLD_BACK, FILL_PARTLY} - run.mattered:
            same |= {(*one[:number], not one[number], *one[number + 1 :]) for one in same}
        done |= same
    if best is None:
        raise NotDefined(f"{name}: {reason}")
    return best[1]


class _Run:
    """One run of the heuristic.

    `prompt_input`: a warm-up forward must not delay the first input gradient. `hold_back`: a device leaves out a
    forward while the next one is far behind. `fill_partly`: a weight gradient may overrun the bubble that it fills,
    even where the bubble would not be the worst.
    """

    def __init__(
        self, problem: Problem, limits: list[int], prompt_input: bool, hold_back: bool, fill_partly: bool
    ) -> None:
        self.problem = problem
        self.limits = limits
        self.prompt_input, self.hold_back, self.fill_partly = prompt_input, hold_back, fill_partly
        self.count = problem.microbatches
        size = problem.devices
        self.orders: Tasks = [[] for _ in range(size)]
        self.clock, self.held, self.idle, self.first = [0] * size, [0] * size, [0] * size, [0] * size
        self.worst = 0
        self.done = {kind: [0] * size for kind in (F, I, W)}
        self.ends: dict[Kind, list[list[int]]] = {kind: [[] for _ in range(size)] for kind in (F, I, W)}
        """When the tasks of each kind and device end."""
        self.time = {kind: [duration(problem, Task(kind, d, 0)) for d in range(size)] for kind in (F, I, W)}
        self.memory = {
            F: [(s.saved + s.forward_extra, s.forward_extra) for s in problem.stages],
            I: [
                (s.captured + s.backward_input_extra, s.backward_input_extra + s.saved + s.captured - s.residue)
                for s in problem.stages
            ],
            W: [(s.backward_weight_extra, s.backward_weight_extra + s.residue) for s in problem.stages],
        }
        self.mattered = set() if hold_back else {HOLD_BACK}
        """The choices without which, as far as is known, this run would have been another one."""

    def span(self) -> int:
        """The longest time between first start and last end of a device."""
        return max(clock - first for clock, first in zip(self.clock, self.first, strict=True))

    def run(self) -> None:
        """Run to the end; raises NotDefined where a microbatch has no room."""
        devices = range(self.problem.devices)
        self._warm_up()
        for _ in range(1, self.count):
            wanted = [self.done[F][d] < self.count and not self._held_back(d) for d in devices]
            for device in reversed(devices[:-1]):
                wanted[device] = wanted[device] and wanted[device + 1]
            for device in devices:
                if wanted[device]:
                    self._prepare(device, F)
                    self._put(device, F)
            for device in reversed(devices):
                self._prepare(device, I)
                if device == 0 and self.done[F][0] == self.count:
                    while self.done[W][0] < self.done[I][0]:
                        self._put(0, W)
                self._put(device, I)
        for device in devices:
            while self.done[W][device] < self.count:
                self._put(device, W)

    def _warm_up(self) -> None:
        """One forward everywhere, the extra forwards, then the first input gradients, the last device's first."""
        devices = range(self.problem.devices)
        for device in devices:
            self._need_room(device, F)
            self._put(device, F)
        for device, extra in enumerate(self._extra_forwards()):
            for _ in range(extra):
                self._put(device, F)
        for device in reversed(devices):
            self._need_room(device, I)
            self._put(device, I)

    def _extra_forwards(self) -> list[int]:
        """Return how many forwards fit on each device, in memory and in time, before its first input gradient.

        An earlier device runs more of them than a later one, or all that there are.
        """
        extra = [0] * self.problem.devices
        due = 0
        for device in reversed(range(self.problem.devices)):
            clock, room = self.clock[device], self.limits[device] - self.held[device]
            (taken, given), time = self.memory[F][device], self.time[F][device]
            reserve = max(taken, taken - given + self.memory[I][device][0])
            while device + 1 < self.problem.devices and extra[device] + 1 < self.count and reserve <= room:
                if (clock + time > due) != (clock >= due):
                    self.mattered.add(PROMPT_INPUT)
                if clock + time > due if self.prompt_input else clock >= due:
                    break
                room -= taken - given
                clock += time
                extra[device] += 1
            lag = self.problem.stages[device].send_gradient
            due = max(clock, due) + self.time[I][device] + lag
        for device in range(1, self.problem.devices):
            before = extra[device - 1]
            extra[device] = max(0, min(extra[device], before if before + 1 == self.count else before - 1))
        return extra

    def _held_back(self, device: int) -> bool:
        if not self.hold_back or not self._far_ahead(device):
            return False
        self.mattered.add(HOLD_BACK)
        return True

    def _far_ahead(self, device: int) -> bool:
        """Whether a forward now would only wait in front of the next device."""
        following = device + 1
        if following == self.problem.devices or self.done[F][device] < self.done[F][following] + 2:
            return False
        busy = self.clock[following] + self.time[F][following] + self.time[I][following]
        busy += self.problem.stages[device].send_activation
        if self.clock[device] >= busy:
            return True
        delay, weights = 0, self.done[W][device]
        taken, given = self.memory[F][device][0], self.memory[W][device][1] - self.memory[W][device][0]
        held = self.held[device] + taken
        while held > self.limits[device] and weights < self.done[I][device]:
            delay += self.time[W][device]
            held -= given
            weights += 1
        if self.clock[device] + self.time[F][device] + delay <= busy:
            return False
        return busy - self.clock[device] <= self.worst - self.idle[device]

    def _prepare(self, device: int, kind: Kind) -> None:
        """Run the weight gradients that make room for the next task of `kind` or fill the bubble before it."""
        self._need_room(device, kind)
        arrival = self._arrival(device, kind)
        while self._open(device) and self.clock[device] + self.time[W][device] <= arrival:
            self._put(device, W)
        bubble = arrival - self.clock[device]
        if self._open(device) and bubble > 0:
            is_worst = bubble > self.worst - self.idle[device]
            if not is_worst:
                self.mattered.add(FILL_PARTLY)
            if self.fill_partly or is_worst:
                self._put(device, W)

    def _need_room(self, device: int, kind: Kind) -> None:
        while self.held[device] + self._taken(device, kind) > self.limits[device]:
            if not self._open(device):
                raise NotDefined(f"device {device} has no room for a microbatch under this limit")
            self._put(device, W)

    def _taken(self, device: int, kind: Kind) -> int:
        taken, given = self.memory[kind][device]
        return max(taken, taken - given + self.memory[I][device][0]) if kind is F else taken

    def _open(self, device: int) -> bool:
        return self.done[W][device] < self.done[I][device]

    def _arrival(self, device: int, kind: Kind) -> int:
        """When the message that the next task of `kind` waits for is there."""
        source = device - 1 if kind is F else device + 1
        if not 0 <= source < self.problem.devices or len(self.ends[kind][source]) <= self.done[kind][device]:
            return 0
        stage = self.problem.stages[source]
        lag = stage.send_activation if kind is F else stage.send_gradient
        return self.ends[kind][source][self.done[kind][device]] + lag

    def _put(self, device: int, kind: Kind) -> None:
        number = self.done[kind][device]
        arrival = 0 if kind is W else self._arrival(device, kind)
        start = max(self.clock[device], arrival)
        if self.orders[device]:
            self.idle[device] += start - self.clock[device]
            self.worst = max(self.worst, self.idle[device])
        else:
            self.first[device] = start
        taken, given = self.memory[kind][device]
        self.held[device] += taken - given
        self.clock[device] = start + self.time[kind][device]
        self.ends[kind][device].append(self.clock[device])
        self.done[kind][device] = number + 1
        self.orders[device].append(Task(kind, device, number))
