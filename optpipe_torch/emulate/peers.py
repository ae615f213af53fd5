"""Neighbours that exist only in the forecast: their messages arrive when the schedule file says, scaled."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from optpipe_compiler.documents import ir
from runtime_torch.delivery import Delivery
from runtime_torch.messages import Mailbox

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from runtime_torch.bundles import Boundary
    from runtime_torch.meter import Meter

_NS = 10**9


@dataclass(frozen=True)
class Arrival(Delivery):
    """A message that arrives at a time known before."""

    _due_ns: int
    _after: torch.cuda.Event | None

    def wait(self) -> None:
        """Return when the message has arrived; on CUDA, what a sent tensor is made of is then complete."""
        if self._after is not None:
            self._after.synchronize()
        left = self._due_ns - time.perf_counter_ns()
        if left > 0:
            time.sleep(left / _NS)

    def is_delivered(self) -> bool:
        """Whether it has arrived."""
        return time.perf_counter_ns() >= self._due_ns and (self._after is None or bool(self._after.query()))  # type: ignore[no-untyped-call]


class Peers(Mailbox):
    """Stands for the process group of a single device: what is received is random, what is sent goes nowhere.

    `zeros`: shapes and dtypes of which zeros are received, because the bits of several tensors are not random floats.
    """

    def __init__(
        self, schedule: ir.Schedule, device: int, time_scale: float, meter: Meter, zeros: Collection[Boundary]
    ) -> None:
        super().__init__(None, meter)
        self._times = {
            op.id: (round(start * time_scale), round(end * time_scale))
            for _, _, op, start, end in schedule.timed(device, messages=True)
            if isinstance(op, ir.MessageOp)
        }
        self._zeros = zeros
        self._payloads: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self.start_ns = 0
        """When the step began, on the monotonic clock."""

    def begin(self) -> None:
        """Let the forecast's time begin now."""
        self.start_ns = time.perf_counter_ns()

    def post(self, op_id: str, tensor: Tensor, peer: int, *, sent: bool) -> Arrival:
        """Deliver after the forecast's travel time; arrive at the forecast's time, or at once where that is over."""
        return self._sent(op_id, tensor) if sent else self._received(op_id, tensor)

    def _sent(self, op_id: str, tensor: Tensor) -> Arrival:
        start, end = self._times[op_id]
        event = None
        if tensor.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Arrival(time.perf_counter_ns() + end - start, event)

    def _received(self, op_id: str, buffer: Tensor) -> Arrival:
        key = buffer.shape, buffer.dtype
        if key not in self._payloads:
            payload = torch.zeros_like(buffer)
            random = payload.is_floating_point() and (tuple(buffer.shape), buffer.dtype) not in self._zeros
            self._payloads[key] = payload.normal_(std=0.02) if random else payload
        buffer.copy_(self._payloads[key], non_blocking=True)
        return Arrival(self.start_ns + self._times[op_id][1], None)
