"""What one rank does in a run: join, agree on the schedule, check, train or rehearse, report."""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from optpipe_compiler.documents import ir
from optpipe_compiler.documents import profile as profiles
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput, RunFailed, first_line
from optpipe_torch.launch import rehearsal
from optpipe_torch.launch.check import check
from optpipe_torch.launch.job import gpu_count, ranks_here
from optpipe_torch.launch.report import KindTime, RankReport, RunReport, StepRecord, forecast_durations
from optpipe_torch.launch.trace import chrome_trace
from optpipe_torch.launch.worker import settle_on_cpu, settle_on_gpu
from optpipe_torch.models import known as models
from optpipe_torch.replan.measured import gathered
from optpipe_torch.replan.replanner import Replanner
from runtime_torch.conform import agree
from runtime_torch.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_torch.launch.job import Job, Place, RunEvent
    from optpipe_torch.launch.report import CheckReport
    from optpipe_torch.models.user_model import DrawnBatch
    from optpipe_torch.replan.measured import Steps
    from optpipe_torch.replan.records import SwapRecord
    from runtime_torch.replay import StepResult
    from runtime_torch.timeline import OpTime

    Tell = Callable[[RunEvent], None]
    Failed = Callable[[BaseException], None]

LEARNING_RATE = 3e-4
MEET_S = 60.0
"""How long the ranks may take to find each other once they have started: another program may hold their port."""


def work(job: Job, place: Place, on_event: Tell, on_failure: Failed) -> RunReport:
    """Do a rank's share of a run and return the report, the same on every rank. Only rank 0 calls `on_event`.

    `on_failure` is called at once when a transfer lane fails, in its thread: the rank may be waiting for a message
    that will never come.
    """
    schedule = ir.parse(job.schedule_text, "the schedule")
    if place.world != schedule.setup.devices:
        raise RunFailed(
            f"rank {place.rank}: the schedule is for {counted(schedule.setup.devices, 'device')}, but "
            f"{counted(place.world, 'rank')} were started"
        )
    device = _device(place, training=schedule.model is not None)
    if device.type == "cpu":
        settle_on_cpu()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=_meet(place, job.timeout_s, on_failure),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=job.timeout_s),
    )
    try:
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=job.timeout_s))
        one_host = agree(schedule, control)
        tell = on_event if place.rank == 0 else lambda _: None
        tell({"event": "started", "devices": place.world, "backend": backend, "training": schedule.model is not None})
        kind = _Rehearsal if schedule.model is None else _Training
        report = kind(job, schedule, device, control, one_host, tell, on_failure).run()
        return replace(report, backend=backend, pinned=job.pinned)
    finally:
        dist.destroy_process_group()


def _meet(place: Place, timeout_s: float, on_failure: Failed) -> Store:
    """Return the store through which the ranks find each other; raise RunFailed, or tell it, where they do not in time.

    torch waits without an end for a program that holds the port and says nothing, so a timer ends this rank then.
    """
    allowed = min(MEET_S, timeout_s)
    late = RunFailed(f"rank {place.rank} did not meet the other ranks within {allowed:g} s: is their port taken?")
    timer = threading.Timer(allowed + 1, on_failure, (late,))
    timer.daemon = True
    timer.start()
    try:
        store, _, _ = next(rendezvous(place.meet, place.rank, place.world, timeout=timedelta(seconds=allowed)))
    except (RuntimeError, ValueError) as error:
        raise RunFailed(f"rank {place.rank} did not meet the other ranks: {first_line(error)}") from error
    finally:
        timer.cancel()
    store.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore("optpipe", store)


def _device(place: Place, *, training: bool) -> torch.device:
    if training and gpu_count() >= ranks_here(place.world):
        settle_on_gpu()
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


@dataclass
class _Session(ABC):
    """The steps of a run and their bookkeeping; what a step is, is said by the two kinds below."""

    mode: ClassVar[Literal["train", "rehearsal"]]
    job: Job
    schedule: ir.Schedule
    device: torch.device
    control: dist.ProcessGroup
    one_host: bool
    tell: Tell
    on_failure: Failed
    time_scale: float = 1.0
    replanner: Replanner | None = None

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.control)
        self._records: list[StepRecord] = []
        self._results: list[StepResult] = []
        self._begins = [(0, self.schedule)]
        """The first step of each schedule, and the schedule."""

    def run(self) -> RunReport:
        """Everything after joining."""
        self.prepare()
        checked = self.check() if self.job.check else None
        if checked is not None:
            self.tell({"event": "check", "check": checked})
        if checked is None or checked.ok:
            for number in range(self.job.steps):
                self._one_step(number)
        if self.job.trace and self._results:
            self._trace()
        if self.replanner is not None:
            self.replanner.close()
            self._tell_schedule(self.replanner, is_last=True)
        return self._report(checked)

    def _tell_schedule(self, replanner: Replanner, *, is_last: bool) -> None:
        """Tell which schedule runs, and the costs that it was planned for, which rank 0 has."""
        if (costs := replanner.profile) is not None:
            texts = {"text": ir.to_text(self.schedule), "profile_text": canonical(costs)}
            self.tell({"event": "schedule", "is_last": is_last, **texts})

    @abstractmethod
    def prepare(self) -> None:
        """Build what steps need."""

    def check(self) -> CheckReport | None:
        """Compare with the unpipelined model, where there is one."""
        return None

    @abstractmethod
    def step(self) -> StepResult:
        """One step on this rank."""

    def _one_step(self, number: int) -> None:
        dist.barrier(group=self.control)
        result = self.step()
        record = self._share(result)
        self._records.append(record)
        self._results.append(result)
        _collect_garbage(first=number == 0)
        is_last = number + 1 == self.job.steps
        if self.replanner is not None and self.replanner.after(result, is_last=is_last) is not None:
            self.schedule = self.replanner.schedule
            self._begins.append((number + 1, self.schedule))
            self._tell_schedule(self.replanner, is_last=False)
        self.tell(
            {
                "event": "step",
                "step": number,
                "steps": self.job.steps,
                "loss": record.loss,
                "makespan_ns": record.makespan_ns,
                "bubble": record.bubble,
            }
        )

    def _share(self, result: StepResult) -> StepRecord:
        """Put the ranks' results of one step together; on several hosts, each rank's clock starts with its own step."""
        origin = 0 if self.one_host else result.start_ns
        nan = float("nan")
        loss = nan if result.loss is None else result.loss
        span = (result.start_ns - origin, result.end_ns - origin)
        mine = torch.tensor([loss, *span, result.busy_ns], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.control))]
        dist.all_gather(parts, mine, group=self.control)
        losses = [part[0].item() for part in parts if part[0] == part[0]]
        makespan = max(part[2].item() for part in parts) - min(part[1].item() for part in parts)
        busy = sum(part[3].item() for part in parts)
        return StepRecord(losses[0] if losses else nan, makespan, 1 - busy / (len(parts) * makespan))

    def _trace(self) -> None:
        """Tell the ops of all ranks as one trace."""
        steps = gathered(self._results, self.control)
        if not self.one_host:  # clocks differ: each rank's step starts at the same moment
            steps = [[_from_its_start(ran) for ran in ranks] for ranks in steps]
        if self.rank == 0:
            text = chrome_trace(self._eras(steps), self.time_scale, [asdict(swap) for swap in self._swaps()])
            self.tell({"event": "trace", "text": text})

    def _eras(self, steps: Steps) -> list[tuple[ir.Schedule, Steps]]:
        """Return the schedules in turn with their steps."""
        ends = [first for first, _ in self._begins[1:]] + [len(steps)]
        return [(one, steps[first:end]) for (first, one), end in zip(self._begins, ends, strict=True) if first < end]

    def _report(self, checked: CheckReport | None) -> RunReport:
        mine = self._rank_report()
        ranks: list[RankReport] = [mine] * dist.get_world_size(self.control)
        dist.all_gather_object(ranks, mine, group=self.control)
        return RunReport(
            mode=self.mode,
            backend="",
            pinned=False,
            time_scale=self.time_scale,
            steps=self._records,
            forecast_makespan_ns=self._last()[1].forecast.makespan_ns * self.time_scale,
            forecast_bubble=self._last()[1].forecast.bubble_fraction,
            ranks=ranks,
            check=checked,
            swaps=self._swaps(),
            planner=[] if self.replanner is None else self.replanner.notes,
            first_timed=self._last()[0] + 1,
        )

    def _swaps(self) -> list[SwapRecord]:
        return [] if self.replanner is None else self.replanner.swaps

    def _last(self) -> tuple[int, ir.Schedule]:
        """Return the first step of the last schedule that has run, and the schedule."""
        return next(era for era in reversed(self._begins) if era[0] < max(1, len(self._results)))

    def _rank_report(self) -> RankReport:
        first, schedule = self._last()
        timed = self._results[first + 1 :] or self._results[first:]
        plan, mine = schedule.devices[self.rank], self._results[first:]
        return RankReport(
            rank=self.rank,
            stages=[stage.stage for stage in schedule.stages_of(self.rank)],
            peak_activation_bytes=max((result.peak_activation_bytes for result in mine), default=0),
            promised_activation_bytes=schedule.activation_bytes(self.rank),
            peak_host_bytes=max((result.peak_host_bytes for result in mine), default=0),
            promised_host_bytes=plan.host_bytes,
            busy_ns=median([result.busy_ns for result in timed] or [0]),
            kinds=self._kinds(timed),
        )

    def _kinds(self, timed: list[StepResult]) -> dict[str, KindTime]:
        """Measured and forecast time of each kind of op in an average step."""
        forecast = forecast_durations(self._last()[1], self.rank)
        measured: dict[str, float] = {}
        planned: dict[str, float] = {}
        for result in timed:
            for op in result.ops:
                kind = op.op_id.split(":", 1)[0]
                measured[kind] = measured.get(kind, 0) + (op.end_ns - op.start_ns) / len(timed)
                planned[kind] = planned.get(kind, 0) + forecast[op.op_id] * self.time_scale / len(timed)
        return {kind: KindTime(measured[kind], planned[kind]) for kind in measured}


def _from_its_start(ran: list[OpTime]) -> list[OpTime]:
    start = min(op.start_ns for op in ran)
    return [op.later(-start) for op in ran]


def _collect_garbage(*, first: bool) -> None:
    """Between steps instead of within; what the first step left (modules, plans) is not looked at again."""
    gc.collect()
    if first:
        gc.freeze()
        gc.disable()


class _Training(_Session):
    """Real layers, AdamW on each rank's own parameters, random windows of the text or the user's data, the same on all
    ranks."""

    mode = "train"

    def prepare(self) -> None:
        """Build this rank's layers, and only these."""
        model = self.schedule.model
        assert model is not None
        expected = self.schedule.setup.layers
        with models.called_seldom():
            if (found := models.layer_count(model)) != expected:
                raise BadInput(f"the model has {counted(found, 'layer')}, the schedule is for {expected}")
            torch.manual_seed(self.job.seed + self.rank)
            self._stages = models.stages(model, self.schedule, self.rank, self.device)
            self._draw = models.batches(model, self.job.data)
        self._runner = Runner(self.schedule, self._stages, on_failure=self.on_failure)
        parameters = list(self._stages.module.parameters())
        self._optimizer = torch.optim.AdamW([{"params": parameters}], lr=LEARNING_RATE)
        self._generator = torch.Generator().manual_seed(self.job.seed)
        if (how := self.job.replanning) is not None:
            self.replanner = Replanner(
                self._runner,
                profiles.parse(how.profile_text, "the profile"),
                optimizer=self._optimizer,
                keeps_placement=how.keeps_placement,
                threshold=how.threshold,
                plan_s=how.plan_s,
                group=self.control,
                on_event=self.tell,
            )

    def check(self) -> CheckReport:
        """One step on a batch of its own."""
        generator = torch.Generator().manual_seed(self.job.seed + 1)
        inputs, target = self._batch(generator)
        return check(self.schedule, self._runner, self._stages, inputs, target, self.control)

    def step(self) -> StepResult:
        """Gradients of one batch, then the optimizer (outside the step's time)."""
        inputs, target = self._batch(self._generator)
        result = self._runner.step(*inputs, target=target)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return result

    def _batch(self, generator: torch.Generator) -> DrawnBatch:
        inputs, target = self._draw(generator, self.schedule.setup.microbatches)
        return tuple(tensor.to(self.device) for tensor in inputs), target.to(self.device)


class _Rehearsal(_Session):
    """Emulated stages in real processes."""

    mode = "rehearsal"

    def prepare(self) -> None:
        """Set up the clocks and meters."""
        schedule, scale = self.schedule, self.job.time_scale
        self.time_scale = rehearsal.auto_scale(schedule) if scale is None else scale
        self._replay = rehearsal.replay(schedule, self.rank, self.time_scale, self.on_failure)

    def step(self) -> StepResult:
        """One rehearsed step."""
        batch = rehearsal.batch(self.schedule)
        return self._replay.step(batch, batch)
