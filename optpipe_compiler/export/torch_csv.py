"""The CSV of compute ops that torch.distributed.pipelining loads (`_PipelineScheduleRuntime._load_csv`).

tests/test_export_torch.py trains with it on torch 2.11 to 2.15; 2.11 cannot start a V over gloo.

One row per rank, cells such as `2F0` (stage, letter, microbatch) in the order in which they run, no header. torch adds
the messages itself. The format has no waits and no memory ops. Stage 0 does not split in torch's runtime: its `I` runs
nothing and its `W` the whole backward, so everything that it saved would stay until `W`. The rows say `B` where the
plan has that `I`: this may cost time and never memory.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.export.whole import refuse_units, without_memory_ops

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


def as_torch_runs_it(checked: ir.Checked) -> ir.Schedule:
    """Return the contract that is left: `without_memory_ops`, stage 0 fused. The forecast is the old one."""
    left = without_memory_ops(checked)
    devices = [msgspec.structs.replace(device, compute=list(_fused(device.compute))) for device in left.devices]
    return msgspec.structs.replace(left, devices=devices)


def receive_buffers(schedule: ir.Schedule) -> list[int]:
    """Return the bytes of each device's receive buffers, of which torch keeps one per message for the whole run.

    Peaks count a message from its arrival until it is used.
    """
    units, lengths = schedule.setup.units, schedule.setup.lengths
    share = Fraction(lengths[0], units.tokens) if lengths and isinstance(units, ir.Units) else 1
    found = [0] * len(schedule.devices)
    for first, second in pairwise(schedule.stages):
        if first.device != second.device:
            found[second.device] += schedule.setup.microbatches * ceil(share * second.input_bytes)
            found[first.device] += schedule.setup.microbatches * ceil(share * first.output_bytes)
    return found


def _fused(lane: Iterable[ir.ComputeOp]) -> Iterator[ir.ComputeOp]:
    for op in lane:
        if isinstance(op, ir.BackwardInput) and op.stage == 0:
            yield ir.Backward(stage=0, microbatch=op.microbatch)
        elif not (isinstance(op, ir.BackwardWeight) and op.stage == 0):
            yield op


def _cells(lane: Iterable[ir.Op]) -> Iterator[str]:
    return (op.text for op in lane if op.name in KINDS)
