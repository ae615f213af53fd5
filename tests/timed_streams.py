"""Streams on which every op takes its forecast time, the host being ahead: how long the lanes of a GPU would take.

The host takes no time but that for which it waits. Messages of other devices arrive as forecast; those that are sent
are delivered as long after the stream got there as forecast.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from optpipe_compiler.documents import ir
from optpipe_torch.models import known as models
from optpipe_torch.models.text import default_text
from runtime_torch import replay
from runtime_torch.batches import Batches
from runtime_torch.delivery import Delivery
from runtime_torch.messages import Mailbox
from runtime_torch.streams import Backend, StreamLanes


@dataclass
class TimedStream:
    end_ns: int = 0


@dataclass
class TimedDevice(Backend):
    compute: TimedStream = field(default_factory=TimedStream)
    host_ns: int = 0

    def compute_stream(self):
        return self.compute

    def new_stream(self):
        return TimedStream()

    def record(self, stream):
        return stream.end_ns

    def wait(self, stream, event):
        stream.end_ns = max(stream.end_ns, event)

    def is_over(self, event):
        return event <= self.host_ns

    def pause(self):
        self.host_ns += PAUSE_NS


PAUSE_NS = 20_000


@dataclass
class TimedDelivery(Delivery):
    device: TimedDevice
    due_ns: int

    def wait(self):
        self.device.compute.end_ns = max(self.device.compute.end_ns, self.due_ns)

    def is_delivered(self):
        return self.device.host_ns >= self.due_ns


class TimedMailbox(Mailbox):
    """Messages of neighbours that are on time."""

    def __init__(self, schedule, rank, device, meter):
        super().__init__(None, meter)
        self._device, self._begin_ns = device, 0
        self._times = {
            timed.op.id: (timed.start_ns, timed.end_ns)
            for timed in schedule.timed(rank, messages=True)
            if isinstance(timed.op, ir.MessageOp)
        }

    def begin(self):
        self._begin_ns = self._device.host_ns = self._device.compute.end_ns

    def post(self, op_id, tensor, peer, *, sent):
        start, end = self._times[op_id]
        return TimedDelivery(self._device, self._device.compute.end_ns + end - start if sent else self._begin_ns + end)


def timed_lanes(schedule, rank):
    """Return stream lanes whose ops take what the schedule says."""
    forecast_ns = {timed.op.id: timed.end_ns - timed.start_ns for timed in schedule.timed(rank)}

    class TimedLanes(StreamLanes):
        def _pass(self, index, op_id):
            self._lanes[index].stream.end_ns += forecast_ns.get(op_id, 0)
            super()._pass(index, op_id)

    return TimedLanes


def step_ns(monkeypatch, schedule, rank=0):
    """Return how long the second step of a schedule takes on such streams of one device."""
    monkeypatch.setattr(replay, "StreamLanes", timed_lanes(schedule, rank))
    device, cpu = TimedDevice(), torch.device("cpu")
    stages = models.stages(schedule.model, schedule, rank, cpu, on=cpu)
    batches = Batches(schedule, stages, None, None)
    inputs, target = models.batches(schedule.model, default_text())(torch.Generator(), schedule.setup.microbatches)
    batch = batches.cut_all(inputs, target)
    run = replay.Replay(
        schedule,
        rank,
        stages,
        lambda stage, unit: batches.boundary(schedule.stages[stage].layers[1] - 1, unit),
        TimedMailbox(schedule, rank, device, next(iter(stages.values())).meter),
        backend=device,
    )
    ends = []
    for _ in range(2):
        run.step(batch.inputs, batch.targets, batch.units)
        ends.append(device.compute.end_ns)
    return ends[1] - ends[0]
