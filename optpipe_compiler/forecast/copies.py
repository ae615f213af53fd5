"""What copies take from the compute lane of their device, by the links' `compute_permille` (docs/IR.md, Forecast)."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from optpipe_compiler.documents import ir
from optpipe_compiler.forecast.table import Table

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import LinkCost, Schedule

Busy = tuple[int, int]
"""ns before an op, and behind it, in which its copies have the compute lane."""
NO_COPIES = (0, 0)


def busy_by_op(schedule: Schedule) -> dict[str, Busy]:
    """Return, by id of a compute op, what its copies take before and behind it; ops without such copies are left out.

    Behind a forward these are its offloads, before the first backward of a unit its reloads.
    """
    found: dict[str, Busy] = {}
    if not any(link.share_permille for link in schedule.forecast.links):
        return found
    link_of = {device: link for link in schedule.forecast.links for device in link.devices}
    table = Table(schedule)
    for device in schedule.devices:
        link = link_of.get(device.device)
        if link is None:
            continue
        taken: dict[tuple[str, int, tuple[int, int | None]], int] = defaultdict(int)
        copies: list[ir.SavedOp] = [*device.d2h, *device.h2d]
        for copy in copies:
            taken[copy.name, copy.stage, copy.unit] += _busy_ns(copy, table.copied(copy), link)
        for op in device.compute:
            is_forward = isinstance(op, ir.Forward)
            if is_forward or isinstance(op, ir.Backward | ir.BackwardInput):
                busy = taken["offload" if is_forward else "reload", op.stage, op.unit]
                if busy:
                    found[op.id] = (0, busy) if is_forward else (busy, 0)
    return found


def _busy_ns(copy: ir.SavedOp, size: int, link: LinkCost) -> int:
    speed = link.d2h_bytes_per_s if isinstance(copy, ir.Offload) else link.h2d_bytes_per_s
    alone = link.latency_ns + (2 * size * 10**9 + speed) // (2 * speed)
    return (2 * alone * link.share_permille + 1000) // 2000
