"""Automatic zero-bubble schedules under a memory limit (Qi et al., 2023, arXiv:2401.10241 section 3.1).

The paper's heuristic runs the pipeline on the true costs. Warm-up: as many forwards as memory takes before the first
input gradient is due. Then each round one forward and one input gradient per device; weight gradients fill what would
be a bubble of their length, or a shorter one if the bubble would make this device the worst, and make room where memory
is short. Drain: all weight gradients left. Three yes-or-no choices are tried in all combinations; the best by the
longest device span, the paper's objective, is kept. ZB-1p and ZB-2p limit memory to P and 2P microbatches.
"""

from __future__ import annotations

from itertools import count, product
from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind, Task, duration
from optpipe_compiler.published.common import LINEAR, NotDefined, Tasks, ordered

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    best: _Run | None = None
    done: set[tuple[bool, ...]] = set()
    for choices in product((True, False), repeat=3):
        if choices in done:
            continue
        run = _Run(problem, limits, *choices)
        try:
            if run.is_within(None if best is None else best.span()):
                best = run
        except NotDefined as error:
            reason = error
        same = {choices}  # and other choices that lead to the same run
        for number in {PROMPT_INPUT, HOLD_BACK, FILL_PARTLY} - run.mattered:
            same |= {(*one[:number], not one[number], *one[number + 1 :]) for one in same}
        done |= same
    if best is None:
        raise NotDefined(f"{name}: {reason}")
    return [list(device.tasks()) for device in best.devices]


class _Device:
    """What a device's ops take, how far it is, and when the ops end that others wait for."""

    def __init__(self, problem: Problem, number: int, limit: int) -> None:
        stage = problem.stages[number]
        self.number, self.limit, self.count = number, limit, problem.microbatches
        self.forward, self.input, self.weight = (duration(problem, Task(kind, number, 0)) for kind in (F, I, W))
        self.send_activation, self.send_gradient = stage.send_activation, stage.send_gradient
        self.saved, self.residue = stage.saved, stage.residue
        self.input_needs = stage.captured + stage.backward_input_extra
        self.forward_needs = stage.saved + stage.forward_extra
        self.room = max(self.forward_needs, stage.saved + self.input_needs)
        """For a forward, and for an input gradient behind it."""
        self.clock = self.held = self.idle = self.first = 0
        self.forwards: list[int] = []
        self.inputs: list[int] = []
        """When forwards and input gradients end."""
        self.weights = 0
        """Weight gradients that are done."""
        self.order: list[Kind] = []

    @property
    def is_open(self) -> bool:
        """Whether a weight gradient can run."""
        return self.weights < len(self.inputs)

    def put_weight(self) -> None:
        """Run the next weight gradient."""
        self.held -= self.residue
        self.clock += self.weight
        self.weights += 1
        self.order.append(W)

    def span(self) -> int:
        """From the first start to the end of all that is left, without waiting."""
        left = (self.count - len(self.forwards)) * self.forward + (self.count - len(self.inputs)) * self.input
        return self.clock - self.first + left + (self.count - self.weights) * self.weight

    def tasks(self) -> Iterator[Task]:
        """Yield its order."""
        numbers = {kind: count() for kind in (F, I, W)}
        for kind in self.order:
            yield Task(kind, self.number, next(numbers[kind]))


class _Run:
    """One run of the heuristic.

    `prompt_input`: a warm-up forward must not delay the first input gradient. `hold_back`: a device leaves out a
    forward while the next one is far behind. `fill_partly`: a weight gradient may overrun the bubble that it fills,
    even where the bubble would not be the worst.
    """

    def __init__(
        self, problem: Problem, limits: list[int], prompt_input: bool, hold_back: bool, fill_partly: bool
    ) -> None:
        self.prompt_input, self.hold_back, self.fill_partly = prompt_input, hold_back, fill_partly
        self.count = problem.microbatches
        self.devices = [_Device(problem, number, limit) for number, limit in enumerate(limits)]
        self.worst = 0
        """The most that a device has idled."""
        self.mattered = set() if hold_back else {HOLD_BACK}
        """The choices without which, as far as is known, this run would have been another one."""

    def span(self) -> int:
        """The longest time between first start and last end of a device; before the end it takes no less."""
        return max(device.span() for device in self.devices)

    def is_within(self, most: int | None) -> bool:
        """Run to the end, as long as the span is below `most`; raises NotDefined where a microbatch has no room."""
        devices = self.devices
        self._warm_up()
        for _ in range(1, self.count):
            if most is not None and self.span() >= most:
                return False
            wanted = [len(device.forwards) < self.count and not self._held_back(device) for device in devices]
            for number in reversed(range(len(devices) - 1)):
                wanted[number] = wanted[number] and wanted[number + 1]
            for device, is_wanted in zip(devices, wanted, strict=True):
                if is_wanted:
                    self._put_forward(device, self._prepared(device, device.room, self._activation(device)))
            for device in reversed(devices):
                arrival = self._prepared(device, device.input_needs, self._gradient(device))
                if device is devices[0] and len(device.forwards) == self.count:
                    while device.is_open:
                        device.put_weight()
                self._put_input(device, arrival)
        for device in devices:
            while device.weights < self.count:
                device.put_weight()
        return most is None or self.span() < most

    def _warm_up(self) -> None:
        """One forward everywhere, the extra forwards, then the first input gradients, the last device's first."""
        for device in self.devices:
            self._make_room(device, device.room)
            self._put_forward(device, self._activation(device))
        for device, extra in zip(self.devices, self._extra_forwards(), strict=True):
            for _ in range(extra):
                self._put_forward(device, self._activation(device))
        for device in reversed(self.devices):
            self._make_room(device, device.input_needs)
            self._put_input(device, self._gradient(device))

    def _extra_forwards(self) -> list[int]:
        """Return how many forwards fit on each device, in memory and in time, before its first input gradient.

        An earlier device runs more of them than a later one, or all that there are.
        """
        last = len(self.devices) - 1
        extra = [0] * len(self.devices)
        due = 0
        for number, device in reversed(list(enumerate(self.devices))):
            clock, room = device.clock, device.limit - device.held
            while number < last and extra[number] + 1 < self.count and device.room <= room:
                if (clock + device.forward > due) != (clock >= due):
                    self.mattered.add(PROMPT_INPUT)
                if clock + device.forward > due if self.prompt_input else clock >= due:
                    break
                room -= device.saved
                clock += device.forward
                extra[number] += 1
            due = max(clock, due) + device.input + device.send_gradient
        for number in range(1, len(extra)):
            before = extra[number - 1]
            extra[number] = max(0, min(extra[number], before if before + 1 == self.count else before - 1))
        return extra

    def _held_back(self, device: _Device) -> bool:
        if not self.hold_back or not self._is_far_ahead(device):
            return False
        self.mattered.add(HOLD_BACK)
        return True

    def _is_far_ahead(self, device: _Device) -> bool:
        """Whether a forward now would only wait in front of the next device."""
        if device is self.devices[-1]:
            return False
        following = self.devices[device.number + 1]
        if len(device.forwards) < len(following.forwards) + 2:
            return False
        busy = following.clock + following.forward + following.input + device.send_activation
        if device.clock >= busy:
            return True
        delay, weights, held = 0, device.weights, device.held + device.forward_needs
        while held > device.limit and weights < len(device.inputs):
            delay += device.weight
            held -= device.residue
            weights += 1
        if device.clock + device.forward + delay <= busy:
            return False
        return busy - device.clock <= self.worst - device.idle

    def _prepared(self, device: _Device, needs: int, arrival: int) -> int:
        """Run the weight gradients that make room for an op or fill the bubble before it; return its arrival."""
        self._make_room(device, needs)
        while device.clock + device.weight <= arrival and device.is_open:
            device.put_weight()
        bubble = arrival - device.clock
        if bubble > 0 and device.is_open:
            is_worst = bubble > self.worst - device.idle
            if not is_worst:
                self.mattered.add(FILL_PARTLY)
            if self.fill_partly or is_worst:
                device.put_weight()
        return arrival

    @staticmethod
    def _make_room(device: _Device, needs: int) -> None:
        while device.held + needs > device.limit:
            if not device.is_open:
                raise NotDefined(f"device {device.number} has no room for a microbatch under this limit")
            device.put_weight()

    def _activation(self, device: _Device) -> int:
        """When the activation that the next forward waits for is there."""
        if device is self.devices[0]:
            return 0
        before = self.devices[device.number - 1]  # which has run more forwards than this one
        return before.forwards[len(device.forwards)] + before.send_activation

    def _gradient(self, device: _Device) -> int:
        """When the gradient that the next input gradient waits for is there."""
        if device is self.devices[-1]:
            return 0
        after = self.devices[device.number + 1]  # which has run its input gradient of this round
        return after.inputs[len(device.inputs)] + after.send_gradient

    def _put_forward(self, device: _Device, arrival: int) -> None:
        self._begin(device, arrival)
        device.held += device.saved
        device.clock += device.forward
        device.forwards.append(device.clock)
        device.order.append(F)

    def _put_input(self, device: _Device, arrival: int) -> None:
        self._begin(device, arrival)
        device.held += device.residue - device.saved
        device.clock += device.input
        device.inputs.append(device.clock)
        device.order.append(I)

    def _begin(self, device: _Device, arrival: int) -> None:
        """Wait for a message."""
        if not device.order:
            device.first = device.clock = arrival
        elif arrival > device.clock:
            device.idle += arrival - device.clock
            device.clock = arrival
            self.worst = max(self.worst, device.idle)
