"""The CSV of compute ops that torch.distributed.pipelining loads (`_PipelineScheduleRuntime._load_csv`).

tests/test_export_torch.py trains with it on torch 2.11 to 2.15; 2.11 cannot start a V over gloo.

One row per rank, cells such as `2F0` (stage, letter, microbatch) in the order in which they run, no header. torch adds
the messages itself. The format has no waits and no memory ops. Stage 0 does not split in torch's runtime: its `I` runs
nothing and its `W` the whole backward, so everything that it saved would stay until `W`. The rows say `B` where the
plan has that `I`: this may cost time and never memory.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.export.whole import refuse_units

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

KINDS = ("forward", "backward_input", "backward_weight", "backward")


def render(checked: ir.Checked) -> str:
    """Return the file of a schedule; what torch cannot run is left out as in `as_torch_runs_it`.

    Raise BadInput for a schedule that `refuse_units` refuses.
    """
    refuse_units(checked.schedule, "the schedule", "torch's CSV")
    rows = (_cells(device.compute) for device in as_torch_runs_it(checked).devices)
    return "".join(",".join(row) + "\n" for row in rows)


def memory_ops(schedule: ir.Schedule) -> Counter[str]:
    """Return how many ops of each kind the format cannot carry."""
    lanes = (lane for device in schedule.devices for lane in device.lanes.values())
    return Counter(op.name for lane in lanes for op in lane if isinstance(op, ir.SavedOp))


def as_torch_runs_it(checked: ir.Checked) -> ir.Schedule:
    """Return the contract that is left: every activation kept, no waits, stage 0 fused. The forecast is the old one."""
    devices = [
        msgspec.structs.replace(device, compute=list(_left(device.compute)), d2h=[], h2d=[])
        for device in checked.schedule.devices
    ]
    return msgspec.structs.replace(checked.schedule, devices=devices)


def _left(lane: Iterable[ir.ComputeOp]) -> Iterator[ir.ComputeOp]:
    for op in lane:
        if isinstance(op, ir.BackwardInput) and op.stage == 0:
            yield ir.Backward(stage=0, microbatch=op.microbatch)
        elif not (isinstance(op, ir.Recompute) or (isinstance(op, ir.BackwardWeight) and op.stage == 0)):
            yield msgspec.structs.replace(op, after=[])


def _cells(lane: Iterable[ir.Op]) -> Iterator[str]:
    return (op.text for op in lane if op.name in KINDS)
