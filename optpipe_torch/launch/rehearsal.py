"""Emulated stages: ops wait their (scaled) forecast times and count the bytes that they would hold.

A plan for eight devices can so be tried on two cores, with real processes, messages and waits. Tensors that cross
between stages are two numbers: how many stages the microbatch has passed, and when the message is due at its receiver.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from optpipe_compiler.documents.ops import op_id
from optpipe_torch.launch.report import forecast_durations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from optpipe_compiler.documents import ir
    from runtime_torch.execution import Layers
    from runtime_torch.meter import Meter

BOUNDARY = ((2,), torch.float64)
"""Shape and dtype of every message."""

STEP_S = 2.0
"""What one step takes when no scale is given."""

_NS = 10**9


def auto_scale(schedule: ir.Schedule) -> float:
    """The time scale at which a step takes about `STEP_S` seconds."""
    return STEP_S * _NS / max(1, schedule.forecast.makespan_ns)


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


class Paces:
    """The clocks of a device's three lanes, shared by its stages."""

    def __init__(self) -> None:
        self.compute, self.d2h, self.h2d = Pace(), Pace(), Pace()
        self.arrival = Pace()

    def arrive(self, message: Tensor) -> None:
        """Wait until a message from another device is due."""
        self.arrival.until(int(message[1].item()))


class RehearsedStage:
    """Has the methods of `StageExecution`; computes nothing."""

    def __init__(
        self, schedule: ir.Schedule, index: int, scale: float, paces: Paces, meter: Meter, host_meter: Meter
    ) -> None:
        self.stage = schedule.stages[index]
        self._cost = schedule.forecast.stages[index]
        self._overhead_ns = schedule.forecast.op_overhead_ns
        self._durations = forecast_durations(schedule, self.stage.device)
        self._is_last = index == len(schedule.stages) - 1
        self._scale = scale
        self._paces = paces
        self._meter = meter
        self._host_meter = host_meter

    def begin(self) -> None:
        """Nothing changes between steps."""

    def forward(
        self, microbatch: int, x: Tensor, target: Tensor | None = None, recomputed: Sequence[Layers] = ()
    ) -> Tensor:
        """F."""
        passed = x.reshape(-1)[0].item()
        self._meter.count(sum(self.stage.saved_bytes))
        self._spend(self._cost.forward_ns, max(self.stage.forward_transient_bytes))
        for layers in recomputed:
            self._meter.count(self._checkpoint(layers) - self._saved(layers))
        if self._is_last:
            return torch.tensor(passed + 1.0)
        return self._message(passed + 1, self._cost.send_activation_ns)

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """B."""
        self._spend(self._cost.backward_ns, max(self.stage.backward_transient_bytes))
        self._meter.count(-sum(self.stage.saved_bytes))
        return self._input_gradient(gradient)

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """I."""
        saved, captured = sum(self.stage.saved_bytes), sum(self.stage.captured_bytes)
        self._meter.count(captured)
        self._spend(self._cost.backward_input_ns, max(self.stage.backward_input_transient_bytes))
        self._meter.count(sum(self.stage.residue_bytes) - saved - captured)
        return self._input_gradient(gradient)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        self._spend(self._cost.backward_weight_ns, max(self.stage.backward_weight_transient_bytes))
        self._meter.count(-sum(self.stage.residue_bytes))

    def recompute(self, microbatch: int, layers: Layers) -> None:
        """R."""
        inside = self._inside(layers)
        self._meter.count(self._saved(layers) - self._checkpoint(layers))
        duration = sum(self._cost.recompute_ns[inside]) + self._overhead_ns
        self._spend(duration, max(self.stage.forward_transient_bytes[inside]))

    def offload(self, microbatch: int, layers: Layers) -> None:
        """D2H."""
        self._host_meter.count(self._saved(layers))
        self._paces.d2h.spend(self._transfer_ns("offload", microbatch, layers))
        self._meter.count(-self._saved(layers))

    def reload(self, microbatch: int, layers: Layers) -> None:
        """H2D."""
        self._meter.count(self._saved(layers))
        self._paces.h2d.spend(self._transfer_ns("reload", microbatch, layers))
        self._host_meter.count(-self._saved(layers))

    def _spend(self, duration_ns: int, transient_bytes: int) -> None:
        self._meter.count(transient_bytes)
        self._paces.compute.spend(round(duration_ns * self._scale))
        self._meter.count(-transient_bytes)

    def _transfer_ns(self, kind: str, microbatch: int, layers: Layers) -> int:
        op = op_id(kind, self.stage.stage, microbatch, layers)
        return round(self._durations[op] * self._scale)

    def _input_gradient(self, gradient: Tensor | None) -> Tensor | None:
        if self.stage.stage == 0:
            return None
        passed = 0.0 if gradient is None or self._is_last else gradient[0].item()
        return self._message(passed + 1, self._cost.send_gradient_ns)

    def _message(self, passed: float, travel_ns: int) -> Tensor:
        due = time.perf_counter_ns() + round(travel_ns * self._scale)
        return torch.tensor([passed, float(due)], dtype=torch.float64)

    def _inside(self, layers: Layers) -> slice:
        return slice(layers[0] - self.stage.layers[0], layers[1] - self.stage.layers[0])

    def _saved(self, layers: Layers) -> int:
        return sum(self.stage.saved_bytes[self._inside(layers)])

    def _checkpoint(self, layers: Layers) -> int:
        return self.stage.checkpoint_bytes[self._inside(layers)][0]
