"""A schedule in a training loop: build this rank's stages from a list of layers, then call `step`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe_compiler import ir
from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch.adapter import Engine
from runtime_torch.execution import StageExecution
from runtime_torch.replay import Boundary, Replay, StageOps
from runtime_torch.store import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    """Replays a schedule on this rank.

    `stages` come from `build_stages`; `boundary(layer)` gives shape and dtype of what leaves a layer. The ranks of
    `group` (the default group when None) are the schedule's devices. `on_failure` is called, in its thread, when a
    transfer lane fails; `step` raises the same error as soon as the compute lane is free to do so.
    """

    def __init__(
        self,
        schedule: ir.Schedule,
        stages: Mapping[int, StageExecution],
        boundary: Callable[[int], Boundary],
        *,
        group: dist.ProcessGroup | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        first = next(iter(stages.values()))
        self._boundary = boundary
        self._stages = stages
        self._calibrated = False
        self._steps = Steps(
            schedule,
            stages,
            {index: nn.ModuleList(stage.layers) for index, stage in stages.items()},
            lambda stage: boundary(schedule.stages[stage].layers[1] - 1),
            group=group,
            on=first.device,
            meter=first.meter,
            host_meter=first.host_meter,
            on_failure=on_failure,
        )
        self.schedule = schedule
        self._split = {op.stage for op in self._steps.plan.compute if isinstance(op, ir.BackwardInput)}

    @property
    def promised_activation_bytes(self) -> int:
        """What the schedule promises at most: its peak without static, reserve."""
        return self._steps.promised_activation_bytes

    def step(self, inputs: Tensor | None = None, target: Tensor | None = None) -> StepResult:
        """Run all microbatches once and accumulate the mean gradient into the parameters.

        `inputs` and `target` are whole batches, cut along their first dimension; they may be None on ranks without
        the first or the last stage.
        """
        if not self._calibrated:
            self._calibrate(inputs, target)
        return self._steps.step(inputs, target)

    def _calibrate(self, inputs: Tensor | None, target: Tensor | None) -> None:
        """Let the stages with split backwards learn what their weight gradients read."""
        microbatches = self.schedule.setup.microbatches
        for index in sorted(self._split):
            stage = self._stages[index]
            x = _first(inputs, microbatches) if stage.is_first else self._zeros(stage.first_layer - 1, stage)
            wanted = _first(target, microbatches) if stage.is_last else None
            gradient = None if stage.is_last else self._zeros(stage.end_layer - 1, stage)
            stage.calibrate(x, wanted, gradient)
        self._calibrated = True

    def _zeros(self, layer: int, stage: StageExecution) -> Tensor:
        shape, dtype = self._boundary(layer)
        return torch.zeros(shape, dtype=dtype, device=stage.device)


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

    def step(self, inputs: Tensor | None, target: Tensor | None) -> StepResult:
        """Run all microbatches once."""
        microbatches = self._schedule.setup.microbatches
        if self._has_first and inputs is None:
            raise BadInput("step() needs inputs on the rank of the first stage")
        if self._has_last and target is None:
            raise BadInput("step() needs a target on the rank of the last stage")
        mine = (inputs,) if self._has_first and inputs is not None else ()
        wanted = target if self._has_last else None
        losses: list[Tensor] = []
        self._meter.reset_peak()
        self._host_meter.reset_peak()
        self._replay.begin(None if wanted is None else wanted.tensor_split(microbatches))
        try:
            self._engine.step(*mine, target=wanted, losses=losses)
        except BaseException as error:
            self._replay.abort(error)
            raise
        return self._result(self._replay.finish(), losses)

    def _result(self, ops: list[OpTime], losses: list[Tensor]) -> StepResult:
        return StepResult(
            loss=torch.stack(losses).mean().item() if losses else None,
            start_ns=min(op.start_ns for op in ops),
            end_ns=max(op.end_ns for op in ops),
            busy_ns=sum(op.end_ns - op.start_ns for op in ops if op.lane == "compute"),
            peak_activation_bytes=self._meter.peak_bytes,
            peak_host_bytes=self._host_meter.peak_bytes,
            ops=ops,
        )


def build_stages(
    schedule: ir.Schedule, layers: Mapping[int, nn.Module] | Sequence[nn.Module], rank: int, device: torch.device | str
) -> dict[int, StageExecution]:
    """Return the stages of `rank` by number, made of `layers` (by global index; only the rank's own are needed)."""
    meter, host_meter = Meter(), Meter()
    return {
        stage.stage: StageExecution(
            [layers[index].to(device) for index in range(*stage.layers)],
            stage.layers[0],
            is_first=stage.stage == 0,
            is_last=stage.stage == len(schedule.stages) - 1,
            device=device,
            meter=meter,
            host_meter=host_meter,
        )
        for stage in schedule.stages
        if stage.device == rank
    }


def _first(batch: Tensor | None, microbatches: int) -> Tensor:
    if batch is None:
        raise BadInput("step() needs inputs on the rank of the first stage and a target on that of the last")
    return batch.tensor_split(microbatches)[0]
