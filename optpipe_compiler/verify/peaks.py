"""The most memory that every device can hold, as a number instead of a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.verify.causality import happens_before
from optpipe_compiler.verify.memory import Memory
from optpipe_compiler.verify.placed import PlacedOps
from optpipe_compiler.verify.report import Violation

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir


def peaks(schedule: ir.Schedule) -> list[int]:
    """Return per device the maximum over all executions that order and waits allow; the ops are complete and sound."""
    placed = PlacedOps(schedule)
    clocks = happens_before(placed)
    if isinstance(clocks, Violation):
        raise AssertionError(clocks.message)
    memory = Memory(placed, clocks)
    return [memory.worst_on_device(device).held for device in range(len(schedule.devices))]
