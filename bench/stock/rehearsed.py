"""A schedule of more devices than there are: every op waits for its forecast time, with real processes and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from optpipe_torch.launch import rehearsal
from runtime_torch.meter import Meter
from runtime_torch.microbatch import Microbatch
from runtime_torch.runner import Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from optpipe_compiler.documents import ir


class Rehearsed:
    """See `ways.Way`; `scale` is that of all times."""

    def __init__(self, schedule: ir.Schedule, scale: float) -> None:
        paces, meter, host_meter = rehearsal.Paces(), Meter(), Meter()
        mine = [stage.stage for stage in schedule.stages if stage.device == dist.get_rank()]
        self._count = schedule.setup.microbatches
        self._steps = Steps(
            schedule,
            {i: rehearsal.RehearsedStage(schedule, i, scale, paces, meter, host_meter) for i in mine},
            lambda *_: rehearsal.BOUNDARY,
            group=None,
            on=torch.device("cpu"),
            meter=meter,
            host_meter=host_meter,
            message_bytes=lambda stage: schedule.stages[stage].output_bytes,
            on_arrival=paces.arrive,
        )

    def layers(self) -> dict[int, nn.Module]:
        """None: nothing is computed."""
        return {}

    def step(self, tokens: Tensor, target: Tensor) -> None:
        """Take a step."""
        batch = torch.zeros(self._count, 2, dtype=torch.float64).unbind()
        self._steps.step(batch, batch, [Microbatch(1 / self._count)] * self._count)

    def watched(self) -> tuple[Callable[[Tensor, Tensor], None], int]:
        """A rehearsal holds no memory: what counts is the promise of its file."""
        raise NotImplementedError
