"""A schedule of more devices than there are: every op waits for its forecast time, with real processes and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from optpipe_torch.launch import rehearsal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from optpipe_compiler.documents import ir


class Rehearsed:
    """See `ways.Way`; `scale` is that of all times."""

    def __init__(self, schedule: ir.Schedule, scale: float) -> None:
        self._schedule = schedule
        self._replay = rehearsal.replay(schedule, dist.get_rank(), scale)

    def layers(self) -> dict[int, nn.Module]:
        """None: nothing is computed."""
        return {}

    def step(self, tokens: Tensor, target: Tensor) -> None:
        """Take a step."""
        batch = rehearsal.batch(self._schedule)
        self._replay.step(batch, batch)

    def watched(self) -> tuple[Callable[[Tensor, Tensor], None], int]:
        """A rehearsal holds no memory: what counts is the promise of its file."""
        raise NotImplementedError
