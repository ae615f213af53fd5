"""Streams on which every op takes its forecast time, the host being ahead: how long the lanes of a GPU would take."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from optpipe_torch.models import known as models
from optpipe_torch.models.text import default_text
from runtime_torch import replay
from runtime_torch.batches import Batches
from runtime_torch.messages import Mailbox
from runtime_torch.streams import Backend, StreamLanes


@dataclass
class TimedStream:
    end_ns: int = 0


@dataclass
class TimedDevice(Backend):
    compute: TimedStream = field(default_factory=TimedStream)

    def compute_stream(self):
        return self.compute

    def new_stream(self):
        return TimedStream()

    def record(self, stream):
        return stream.end_ns

    def wait(self, stream, event):
        stream.end_ns = max(stream.end_ns, event)


def timed_lanes(schedule):
    """Return stream lanes whose ops take what the schedule says."""
    forecast_ns = {timed.op.id: timed.end_ns - timed.start_ns for timed in schedule.timed(0)}

    class TimedLanes(StreamLanes):
        def _pass(self, index, op_id):
            self._lanes[index].stream.end_ns += forecast_ns[op_id]
            super()._pass(index, op_id)

    return TimedLanes


def step_ns(monkeypatch, schedule):
    """Return how long the second step of a schedule for one device takes on such streams."""
    monkeypatch.setattr(replay, "StreamLanes", timed_lanes(schedule))
    device, cpu = TimedDevice(), torch.device("cpu")
    stages = models.stages(schedule.model, schedule, 0, cpu, on=cpu)
    batches = Batches(schedule, stages, None, None)
    inputs, target = models.batches(schedule.model, default_text())(torch.Generator(), schedule.setup.microbatches)
    batch = batches.cut_all(inputs, target)
    run = replay.Replay(
        schedule,
        0,
        stages,
        lambda stage, unit: batches.boundary(schedule.stages[stage].layers[1] - 1, unit),
        Mailbox(None, next(iter(stages.values())).meter),
        backend=device,
    )
    ends = []
    for _ in range(2):
        run.step(batch.inputs, batch.targets, batch.units)
        ends.append(device.compute.end_ns)
    return ends[1] - ends[0]
