"""The most memory that every device can hold, as a number instead of a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.verify.causality import Causality, Events, execution_order
from optpipe_compiler.verify.memory import Memory
from optpipe_compiler.verify.placed import PlacedOps

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir


def peaks(schedule: ir.Schedule) -> list[int]:
    """Return per device the maximum over all executions that order and waits allow; the ops are complete and sound."""
    placed = PlacedOps(schedule)
    events = Events(placed)
    order = execution_order(placed, events)
    if not isinstance(order, list):
        raise AssertionError(order.message)
    memory = Memory(placed, Causality(events, order))
    return [memory.worst_on_device(device).held for device in range(len(schedule.devices))]
