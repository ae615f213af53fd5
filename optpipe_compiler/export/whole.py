"""What formats of compute ops alone can carry: whole microbatches of one length, without waits and memory ops.

torch cuts a batch into equal microbatches, and receives into buffers of one shape. Primus's launcher, too, takes one
shape for all messages, from the sequence length of the run.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def refuse_units(schedule: ir.Schedule, name: str, what: str) -> None:
    """Raise BadInput for slices and for microbatches of unequal length; `name` stands for the schedule's file."""
    setup = schedule.setup
    if setup.slices > 1:
        raise BadInput(
            f"{name}: $.setup.units has {setup.slices} slices per microbatch, which {what} cannot carry; expected a "
            "schedule of whole microbatches (optpipe compile --slices 1)"
        )
    lengths = setup.lengths or (0,)
    if (least := min(lengths)) < (most := max(lengths)):
        raise BadInput(
            f"{name}: $.setup.units has microbatches of {least} to {most} tokens, which {what} cannot carry; expected "
            "microbatches of one length (optpipe compile without --lengths)"
        )


def memory_ops(schedule: ir.Schedule) -> Counter[str]:
    """Return how many ops of each kind the format cannot carry."""
    lanes = (lane for device in schedule.devices for lane in device.lanes.values())
    return Counter(op.name for lane in lanes for op in lane if isinstance(op, ir.SavedOp))


def without_memory_ops(checked: ir.Checked) -> ir.Schedule:
    """Return the contract that is left: every activation kept, no waits. The forecast is the old one."""
    devices = [
        msgspec.structs.replace(device, compute=list(_left(device.compute)), d2h=[], h2d=[])
        for device in checked.schedule.devices
    ]
    return msgspec.structs.replace(checked.schedule, devices=devices)


def _left(lane: Iterable[ir.ComputeOp]) -> Iterator[ir.ComputeOp]:
    return (msgspec.structs.replace(op, after=[]) for op in lane if not isinstance(op, ir.Recompute))
