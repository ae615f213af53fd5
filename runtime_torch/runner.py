"""A schedule in a training loop: build this rank's stages from a list of layers, then call `step`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch.adapter import Engine, gather, reduce_and_shard, sharded_modules
from runtime_torch.conform import BYTES_TOLERANCE, agree, prepare
from runtime_torch.evaluate import forward_only
from runtime_torch.replay import Boundary, Replay, StageOps
from runtime_torch.stages import Stages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optpipe_compiler import ir
    from runtime_torch.execution import StageExecution
    from runtime_torch.meter import Meter
    from runtime_torch.timeline import OpTime


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step on this rank. `loss` (mean over the microbatches) only where the last stage is."""

    loss: float | None
    start_ns: int
    end_ns: int
    """First start and last end over the rank's ops, transfers included; the machine's monotonic clock."""
    busy_ns: int
    """Sum of the compute ops."""
    peak_activation_bytes: int
    peak_host_bytes: int
    ops: list[OpTime]

    @property
    def step_ns(self) -> int:
        """This rank's span."""
        return self.end_ns - self.start_ns

    @property
    def bubble(self) -> float:
        """The share of the span in which this rank's compute lane was idle."""
        return 1 - self.busy_ns / max(1, self.step_ns)


class Runner:
    """Replays a schedule on this rank; used like a schedule of torch.distributed.pipelining.

    `stages` come from `build_stages` or `wrap_stages`; `boundary(layer)` gives shape and dtype of what leaves a layer
    (absent: as `build_stages` found). The ranks of `group` (the default group when None) are the schedule's devices;
    they compare digests here. `bytes_tolerance`: the share by which a stage may save more than its profile says
    before the first step refuses; None: any. `on_failure` is called, in its thread, when a transfer lane fails; `step`
    raises the same error as soon as the compute lane is free to do so.
    """

    def __init__(
        self,
        schedule: ir.Schedule,
        stages: Mapping[int, StageExecution],
        boundary: Callable[[int], Boundary] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        bytes_tolerance: float | None = BYTES_TOLERANCE,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        known = boundary or (stages.boundary if isinstance(stages, Stages) else None)
        if known is None:
            raise BadInput("the shapes between layers are not known: give build_stages(inputs=...) or boundary=")
        first = next(iter(stages.values()))
        self.schedule = schedule
        self._boundary: Callable[[int], Boundary] = known
        self._stages = stages
        self._bundle = stages.inputs if isinstance(stages, Stages) else None
        self._group = group
        self._bytes_tolerance = bytes_tolerance
        self._ready = False
        self._steps = Steps(
            schedule,
            stages,
            {index: nn.ModuleList(stage.layers) for index, stage in stages.items()},
            lambda stage: known(schedule.stages[stage].layers[1] - 1),
            group=group,
            on=first.device,
            meter=first.meter,
            host_meter=first.host_meter,
            on_failure=on_failure,
        )
        agree(schedule, group)
        self._ties = stages.ties if isinstance(stages, Stages) else None
        if self._ties is not None:
            self._ties.join(group)
        self._sharded = [m for stage in stages.values() for layer in stage.layers for m in sharded_modules(layer)]

    @property
    def promised_activation_bytes(self) -> int:
        """What the schedule promises at most: its peak without static, reserve."""
        return self._steps.promised_activation_bytes

    def step(
        self, *inputs: Tensor | None, target: Tensor | None = None, losses: list[Tensor] | None = None
    ) -> StepResult:
        """Run all microbatches once and accumulate the mean gradient into the parameters.

        `inputs` and `target` are whole batches, cut along their first dimension; they may be None or absent on ranks
        without the first or the last stage. `losses` is filled with each microbatch's loss where the last stage is.
        """
        whole = self._whole(inputs, target)
        if self._ties is not None:
            self._ties.begin()
        for module in self._sharded:
            gather(module)
        if not self._ready:
            prepare(self.schedule, self._stages, self._boundary, whole, target, self._bytes_tolerance)
            self._ready = True
        result = self._steps.step(whole, target, losses)
        for module in self._sharded:
            reduce_and_shard(module)
        if self._ties is not None:
            self._ties.finish(self._group)
        return result

    @torch.no_grad()
    def eval(self, *inputs: Tensor | None, target: Tensor | None = None) -> float | None:
        """Run all microbatches forward only; return their mean loss where the last stage is, else None.

        Whether layers are in training mode is the caller's business.
        """
        whole = self._whole(inputs, target)
        for module in self._sharded:
            gather(module)
        loss = forward_only(self.schedule, self._stages, self._boundary, self._group, whole, target)
        for module in self._sharded:
            module.reshard()
        return loss

    def _whole(self, inputs: Sequence[Tensor | None], target: Tensor | None) -> Tensor | None:
        """Check the batch, and return the first stage's input as one tensor with the microbatches along its first
        dimension."""
        microbatches = self.schedule.setup.microbatches
        given = [tensor for tensor in inputs if tensor is not None]
        if 0 in self._stages and not given:
            raise BadInput("step() needs inputs on the rank of the first stage")
        if len(self.schedule.stages) - 1 in self._stages and target is None:
            raise BadInput("step() needs a target on the rank of the last stage")
        for tensor in (*given, *(() if target is None else (target,))):
            if tensor.dim() == 0 or tensor.shape[0] % microbatches:
                raise BadInput(
                    f"a batch has the shape {tuple(tensor.shape)}, expected a first dimension that is a multiple of "
                    f"the {microbatches} microbatches"
                )
        if 0 not in self._stages:
            return None
        bundle = self._bundle
        if bundle is None or bundle.is_single:
            if len(given) > 1:
                raise BadInput(f"step() got {len(given)} inputs, expected one (build_stages was given one)")
            return given[0]
        if len(given) != len(bundle.parts):
            raise BadInput(f"step() got {len(given)} inputs, expected {len(bundle.parts)} as build_stages was given")
        return bundle.carry_batch(given, microbatches)


class Steps:
    """The engine and the replay of one rank, over real stages or rehearsed ones."""

    def __init__(
        self,
        schedule: ir.Schedule,
        stages: Mapping[int, StageOps],
        modules: dict[int, nn.Module],
        boundary: Callable[[int], Boundary],
        *,
        group: dist.ProcessGroup | None,
        on: torch.device,
        meter: Meter,
        host_meter: Meter,
        message_bytes: Callable[[int], int] | None = None,
        on_arrival: Callable[[Tensor], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        if world != schedule.setup.devices:
            raise RunFailed(f"the schedule is for {schedule.setup.devices} devices, but {world} ranks take part")
        expected = {stage.stage for stage in schedule.stages if stage.device == rank}
        if set(stages) != expected:
            raise BadInput(f"rank {rank} has stages {sorted(stages)}, the schedule expects {sorted(expected)}")
        self.plan = schedule.devices[rank]
        self._schedule = schedule
        self._meter, self._host_meter = meter, host_meter
        self._replay = Replay(
            schedule,
            rank,
            stages,
            boundary,
            group=group,
            on=on,
            meter=meter,
            message_bytes=message_bytes,
            on_arrival=on_arrival,
            on_failure=on_failure,
        )
        self._engine = Engine(schedule, self._replay, modules, on, group)
        self._has_first = 0 in stages
        self._has_last = len(schedule.stages) - 1 in stages
        self._static_bytes = sum(stage.static_bytes for stage in schedule.stages if stage.device == rank)

    @property
    def promised_activation_bytes(self) -> int:
        """The device's promised peak without static and reserve bytes."""
        return self.plan.peak_bytes - self._static_bytes - self._schedule.setup.reserve_bytes

    def step(self, inputs: Tensor | None, target: Tensor | None, losses: list[Tensor] | None = None) -> StepResult:
        """Run all microbatches once; `inputs` where the first stage is, `target` where the last is."""
        microbatches = self._schedule.setup.microbatches
        mine = inputs if self._has_first else None
        wanted = target if self._has_last else None
        self._meter.reset_peak()
        self._host_meter.reset_peak()
        self._replay.begin(
            None if mine is None else mine.tensor_split(microbatches),
            None if wanted is None else wanted.tensor_split(microbatches),
        )
        try:
            self._engine.step()
        except BaseException as error:
            self._replay.abort(error)
            raise
        ops = self._replay.finish()
        found = self._replay.losses
        if losses is not None:
            losses[:] = [] if found is None else found.clone().unbind()
        return self._result(ops, None if found is None else found.mean().item())

    def _result(self, ops: list[OpTime], loss: float | None) -> StepResult:
        return StepResult(
            loss=loss,
            start_ns=min(op.start_ns for op in ops),
            end_ns=max(op.end_ns for op in ops),
            busy_ns=sum(op.end_ns - op.start_ns for op in ops if op.lane == "compute"),
            peak_activation_bytes=self._meter.peak_bytes,
            peak_host_bytes=self._host_meter.peak_bytes,
            ops=ops,
        )
