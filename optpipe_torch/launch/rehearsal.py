"""Emulated stages: ops wait their (scaled) forecast times and count the bytes that they would hold.

A plan for eight devices can so be tried on two cores, with real processes, messages and waits. Tensors that cross
between stages are two numbers: how many stages the microbatch has passed, and when the message is due at its receiver.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from optpipe_compiler.documents.memory import HOLDERS
from optpipe_compiler.documents.ops import op_id
from optpipe_compiler.forecast.copies import NO_COPIES, busy_by_op
from optpipe_compiler.forecast.table import Table
from optpipe_torch.launch.report import forecast_durations
from runtime_torch.messages import Mailbox
from runtime_torch.meter import Meter
from runtime_torch.replay import Replay
from runtime_torch.shared import channels_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from optpipe_compiler.documents import ir
    from runtime_torch.execution import Layers
    from runtime_torch.microbatch import Slice

BOUNDARY = ((2,), torch.float64)
"""Shape and dtype of every message."""

STEP_S = 2.0
"""What one step takes when no scale is given."""

_NS = 10**9
_MESSAGES = HOLDERS.index("messages")


def auto_scale(schedule: ir.Schedule, step_s: float = STEP_S) -> float:
    """The time scale at which a step takes about `step_s` seconds."""
    return step_s * _NS / max(1, schedule.forecast.makespan_ns)


class Pace:
    """The clock of one lane: waits out durations; what a sleep oversleeps, the next one makes good."""

    def __init__(self) -> None:
        self._debt_ns = 0

    def spend(self, duration_ns: int) -> None:
        """Return `duration_ns` from now."""
        self.until(time.perf_counter_ns() + duration_ns - self._debt_ns)

    def until(self, deadline_ns: int) -> None:
        """Return at `deadline_ns` of the monotonic clock."""
        now = time.perf_counter_ns()
        if deadline_ns > now:
            time.sleep((deadline_ns - now) / _NS)
            now = time.perf_counter_ns()
        self._debt_ns = max(0, now - deadline_ns)


class RehearsedDevice:
    """The clocks and bytes of one device, shared by its stages."""

    def __init__(self, schedule: ir.Schedule, rank: int, scale: float) -> None:
        self.schedule = schedule
        self.scale = scale
        self.meter, self.host_meter = Meter(), Meter()
        plan = schedule.devices[rank]
        self._ops = {op.id: op for op in plan.ops}
        self._durations = forecast_durations(schedule, rank)
        self._bytes = Table(schedule)
        self._compute, self._arrival = Pace(), Pace()
        self._copies = {"offload": Pace(), "reload": Pace()}
        self._busy = busy_by_op(schedule)
        self._free_ns = 0
        """When the last compute op, and what the copies behind it take from compute, is over."""

    def arrive(self, message: Tensor) -> None:
        """Wait until a message from another device is due."""
        self._arrival.until(int(message[1].item()))

    def run(self, kind: str, stage: int, unit: int, layers: Layers | None = None) -> None:
        """Wait as long as the op takes, and count its bytes but for messages, which the replay counts."""
        microbatch, slice = divmod(unit, self.schedule.setup.slices)
        op = self._ops[op_id(kind, stage, microbatch, layers, slice if self.schedule.setup.slices > 1 else None)]
        before, after = self._busy.get(op.id, NO_COPIES)
        due_ns = self._free_ns + round(before * self.scale)
        if kind not in self._copies and due_ns > time.perf_counter_ns():
            self._compute.until(due_ns)
        taken, given = self._bytes.entry(op)[0]
        host_taken, host_given = self._bytes.on_host(op)
        self.meter.count(sum(taken) - taken[_MESSAGES])
        self.host_meter.count(host_taken)
        self._copies.get(kind, self._compute).spend(round(self._durations[op.id] * self.scale))
        self.meter.count(sum(given) - given[_MESSAGES])
        self.host_meter.count(host_given)
        if kind not in self._copies:
            self._free_ns = time.perf_counter_ns() + round(after * self.scale)

    def class_of(self, unit: int) -> int:
        """Return the number of the units that cost as much."""
        return self.schedule.setup.class_of(*divmod(unit, self.schedule.setup.slices))

    def message_bytes(self, stage: int, unit: int) -> int:
        """Return the bytes of what leaves a stage, for one unit."""
        return self._bytes.unit(stage, self.class_of(unit)).outgoing


class RehearsedMailbox(Mailbox):
    """Messages that arrive when they are due."""

    def __init__(self, device: RehearsedDevice) -> None:
        super().__init__(None, device.meter, channels_of(device.schedule, None))
        self._device = device

    def wait(self, op_id: str) -> None:
        """Return once the message is delivered, and due."""
        message = self._messages[op_id]
        buffer = None if message.sent else message.tensor
        super().wait(op_id)
        if buffer is not None:
            self._device.arrive(buffer)


def replay(
    schedule: ir.Schedule, rank: int, scale: float, on_failure: Callable[[BaseException], None] | None = None
) -> Replay:
    """Return the replay of a rank whose stages compute nothing."""
    device = RehearsedDevice(schedule, rank, scale)
    return Replay(
        schedule,
        rank,
        {stage.stage: RehearsedStage(device, stage.stage) for stage in schedule.stages_of(rank)},
        lambda *_: BOUNDARY,
        RehearsedMailbox(device),
        message_bytes=device.message_bytes,
        on_failure=on_failure,
    )


def batch(schedule: ir.Schedule) -> Sequence[Tensor]:
    """Return inputs, or targets, of a step: one for each unit."""
    shape, dtype = BOUNDARY
    return torch.zeros(schedule.setup.microbatches * schedule.setup.slices, *shape, dtype=dtype).unbind()


class RehearsedStage:
    """Has the methods of `StageExecution`; computes nothing."""

    def __init__(self, device: RehearsedDevice, index: int) -> None:
        self._device = device
        self._index = index
        self.device, self.meter, self.host_meter = torch.device("cpu"), device.meter, device.host_meter
        self._is_last = index == len(device.schedule.stages) - 1

    def begin(self) -> None:
        """Nothing changes between steps."""

    def forward(
        self,
        microbatch: int,
        x: Tensor,
        target: Tensor | None = None,
        recomputed: Sequence[Layers] = (),
        part: Slice | None = None,
    ) -> Tensor:
        """F."""
        passed = x.reshape(-1)[0].item()
        self._device.run("forward", self._index, microbatch)
        if self._is_last:
            return torch.tensor((passed + 1.0) / self._device.schedule.setup.slices)
        return self._message(passed + 1, self._cost(microbatch).send_activation_ns)

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """B."""
        self._device.run("backward", self._index, microbatch)
        return self._input_gradient(microbatch, gradient)

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """I."""
        self._device.run("backward_input", self._index, microbatch)
        return self._input_gradient(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        self._device.run("backward_weight", self._index, microbatch)

    def recompute(self, microbatch: int, layers: Layers) -> None:
        """R."""
        self._device.run("recompute", self._index, microbatch, layers)

    def offload(self, microbatch: int, layers: Layers) -> None:
        """D2H."""
        self._device.run("offload", self._index, microbatch, layers)

    def reload(self, microbatch: int, layers: Layers) -> None:
        """H2D."""
        self._device.run("reload", self._index, microbatch, layers)

    def _cost(self, unit: int) -> ir.StageCost:
        schedule = self._device.schedule
        return schedule.forecast.stages[self._index * schedule.setup.classes + self._device.class_of(unit)]

    def _input_gradient(self, unit: int, gradient: Tensor | None) -> Tensor | None:
        if self._index == 0:
            return None
        passed = 0.0 if gradient is None or self._is_last else gradient[0].item()
        return self._message(passed + 1, self._cost(unit).send_gradient_ns)

    def _message(self, passed: float, travel_ns: int) -> Tensor:
        due = time.perf_counter_ns() + round(travel_ns * self._device.scale)
        return torch.tensor([passed, float(due)], dtype=torch.float64)
