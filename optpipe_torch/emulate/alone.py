"""`run --rank R --emulate-peers`: one device of a larger pipeline on its own, against its forecast.

Its compute, copies, allocator and store are real; the neighbours' messages arrive at their forecast times. So one GPU
tells how a pipeline of many would run, and whether the device's share of memory is as promised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

from optpipe_compiler.errors import BadInput
from optpipe_torch.emulate.peers import Peers
from optpipe_torch.launch.trace import chrome_trace
from optpipe_torch.launch.worker import settle_on_cpu, settle_on_gpu
from optpipe_torch.models import known as models
from optpipe_torch.profiler.timer import Timer
from runtime_torch.batches import Batches
from runtime_torch.conform import BYTES_TOLERANCE, prepare
from runtime_torch.replay import Replay
from runtime_torch.streams import Backend
from runtime_torch.timeline import OpTime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optpipe_compiler.documents import ir
    from optpipe_torch.launch.job import RunEvent


@dataclass(frozen=True, slots=True)
class OpReport:
    """One op: forecast (scaled) and median measured, in ns from the start of the step."""

    op: str
    lane: str
    forecast_start_ns: int
    forecast_ns: int
    measured_start_ns: int
    measured_ns: int


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """Time of a device's copies in a step: while its compute lane was busy (hidden), and while it was not."""

    hidden_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class EmulationReport:
    """One device against its forecast; times are medians over the steps after the first."""

    rank: int
    device: str
    steps: int
    time_scale: float
    span_ns: int
    spans_ns: list[int]
    """Of each step after the first."""
    forecast_span_ns: int
    transfers: CopyTimes
    forecast_transfers: CopyTimes
    peak_activation_bytes: int
    promised_activation_bytes: int
    peak_host_bytes: int
    promised_host_bytes: int
    allocator_peak_bytes: int
    """What torch's allocator handed out at most in one more step, beyond what it held before. On a CPU the transfers of
    that step are done at once, in the compute lane's thread, which is the one that can be watched."""
    ops: list[OpReport]


def emulate(
    schedule: ir.Schedule,
    rank: int,
    *,
    steps: int,
    data: bytes,
    time_scale: float = 1.0,
    seed: int = 0,
    on_event: Callable[[RunEvent], None],
    trace: bool = False,
) -> EmulationReport:
    """Replay device `rank` of `schedule` for `steps` in this process, on a GPU where there is one."""
    if schedule.model is None:
        raise BadInput("the schedule has no model to run (its profile was not measured): --emulate-peers needs one")
    if not 0 <= rank < schedule.setup.devices:
        raise BadInput(f"--rank is {rank}, expected 0 to {schedule.setup.devices - 1}")
    alone = Alone(schedule, rank, settled(), data, time_scale, seed)
    runs: list[list[OpTime]] = []
    for number in range(steps):
        runs.append(alone.step())
        span = runs[-1][-1].end_ns
        on_event({"event": "step", "step": number, "steps": steps, "loss": alone.loss, "makespan_ns": span})
    alone.measure_allocator()
    if trace:
        nobody: list[OpTime] = []
        devices = [[run if other == rank else nobody for other in range(schedule.setup.devices)] for run in runs]
        on_event({"event": "trace", "text": chrome_trace([(schedule, devices)], time_scale)})
    return alone.report(runs)


def settled() -> torch.device:
    """Prepare this process for a GPU where there is one, else for the CPU; return it."""
    if torch.cuda.is_available():
        settle_on_gpu()
        return torch.device("cuda", torch.cuda.current_device())
    settle_on_cpu()
    return torch.device("cpu")


class Alone:
    """The device and its replay."""

    def __init__(
        self, schedule: ir.Schedule, rank: int, device: torch.device, data: bytes, time_scale: float, seed: int
    ) -> None:
        assert schedule.model is not None
        torch.manual_seed(seed)
        model = schedule.model
        self._schedule, self._rank, self._device, self._scale = schedule, rank, device, time_scale
        self._stages = models.stages(model, schedule, rank, device, on=device)
        microbatches = schedule.setup.microbatches
        inputs, target = models.batches(model, data)(torch.Generator().manual_seed(seed), microbatches)
        batches = Batches(schedule, self._stages, None, None)
        self._batch = batches.cut_all([one.to(device) for one in inputs], target.to(device))
        prepare(schedule, self._stages, batches.bundle, self._batch, BYTES_TOLERANCE)
        carriers = [bundle.boundary for bundle in models.bundles(model)[1:] if not bundle.is_single]
        self._peers = Peers(schedule, rank, time_scale, next(iter(self._stages.values())).meter, zeros=carriers)
        self._make_replay = partial(
            Replay,
            schedule,
            rank,
            self._stages,
            lambda stage, unit: batches.boundary(schedule.stages[stage].layers[1] - 1, unit),
            self._peers,
        )
        self._replay = self._make_replay()
        for parameter in self._stages.module.parameters():  # gradients are static memory
            parameter.grad = torch.zeros_like(parameter)
        self._peaks: list[tuple[int, int]] = []
        self._allocator_peak = 0
        self.loss = float("nan")

    def step(self) -> list[OpTime]:
        """Run the device's ops once; return when each ran, from the start of the step, by end."""
        batch = self._batch
        result = self._replay.step(batch.inputs, batch.targets, batch.units)
        start = self._peers.start_ns
        self._stages.module.zero_grad(set_to_none=False)
        self._peaks.append((result.peak_activation_bytes, result.peak_host_bytes))
        self.loss = float("nan") if result.loss is None else result.loss
        ran = [op.later(-start) for op in result.ops]
        return sorted(ran, key=lambda op: op.end_ns)

    def measure_allocator(self) -> None:
        """One more step, watched by the allocator; the peaks of those before it stay as they are."""
        peaks = list(self._peaks)
        if self._device.type == "cuda":
            from optpipe_torch.profiler.cuda import CudaTimer

            timer: Timer = CudaTimer(self._device.index)
        else:
            timer = Timer()
            self._replay = self._make_replay(backend=Backend())
            self.step()  # makes the slab on the host
        self._allocator_peak = timer.peaks({"step": self.step})["step"]
        self._peaks = peaks

    def report(self, runs: Sequence[Sequence[OpTime]]) -> EmulationReport:
        """Put the steps together."""
        schedule, plan = self._schedule, self._schedule.devices[self._rank]
        timed = runs[1:] or runs
        planned = list(self._planned())
        found = {op_id: [(s, e) for run in timed for name, _, s, e in run if name == op_id] for op_id, *_ in planned}
        ops = [
            OpReport(
                op=op_id,
                lane=lane,
                forecast_start_ns=start,
                forecast_ns=end - start,
                measured_start_ns=round(median(s for s, _ in found[op_id])),
                measured_ns=round(median(e - s for s, e in found[op_id])),
            )
            for op_id, lane, start, end in planned
        ]
        measured = [transfers(run) for run in timed]
        spans = [_span(run) for run in timed]
        return EmulationReport(
            rank=self._rank,
            device=str(self._device),
            steps=len(runs),
            time_scale=self._scale,
            span_ns=round(median(spans)),
            spans_ns=spans,
            forecast_span_ns=_span(planned),
            transfers=CopyTimes(
                round(median(t.hidden_ns for t in measured)), round(median(t.exposed_ns for t in measured))
            ),
            forecast_transfers=transfers(planned),
            peak_activation_bytes=max(peak for peak, _ in self._peaks),
            promised_activation_bytes=schedule.activation_bytes(self._rank),
            peak_host_bytes=max(peak for _, peak in self._peaks),
            promised_host_bytes=plan.host_bytes,
            allocator_peak_bytes=self._allocator_peak,
            ops=ops,
        )

    def _planned(self) -> Iterable[OpTime]:
        for _, lane, op, start, end in self._schedule.timed(self._rank):
            yield OpTime(op.id, lane, round(start * self._scale), round(end * self._scale))


def transfers(ran: Sequence[OpTime]) -> CopyTimes:
    """Return how much of the copies' time the compute lane was busy for."""
    busy = [(start, end) for _, lane, start, end in ran if lane == "compute"]
    copies = [(start, end) for _, lane, start, end in ran if lane != "compute"]
    hidden = sum(max(0, min(end, e) - max(start, s)) for start, end in copies for s, e in busy)
    return CopyTimes(hidden, sum(end - start for start, end in copies) - hidden)


def _span(ran: Sequence[OpTime]) -> int:
    return max(end for *_, end in ran) - min(start for _, _, start, _ in ran)
