"""What a comparison says about one schedule: `judged` for what was read from a file, `facts` for what is checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from optpipe_compiler.forecast.table import Table
from optpipe_compiler.verify import Violated, check

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir


@dataclass(frozen=True)
class Facts:
    """One row of a comparison. What needs the ops themselves is None where the judge rejects the file."""

    name: str
    profile_digest: str
    devices: int
    microbatches: int
    cap_bytes: int
    host_cap_bytes: int | None
    makespan_ns: int
    bubble_fraction: float
    peak_bytes: int
    """Of the fullest device, in any execution."""
    violations: int
    """What `verify` finds; 0: safe."""
    host_traffic_bytes: int | None
    """Offloaded and reloaded bytes of all devices in one step."""
    recompute_fraction: float | None
    """Share of recomputation in the compute time of all devices."""
    tokens_per_s: float | None
    """None where the costs are of no model."""
    slices: int = 1
    """Of every microbatch."""
    lengths: tuple[int, ...] | None = None
    """Tokens of each microbatch; None: all are as long as the costs are for."""
    remark: str = ""
    kind: str = ""
    """Of a schedule to compare with: paper, stock or composition."""

    @property
    def per_microbatch_ns(self) -> float:
        """Makespan / microbatches."""
        return self.makespan_ns / self.microbatches

    @property
    def safe(self) -> bool:
        """Whether the judge has no objection."""
        return not self.violations


def judged(schedule: ir.Schedule, name: str) -> Facts:
    """Judge a schedule, and read the numbers that the verdict allows."""
    try:
        return facts(check(schedule), name)
    except Violated as error:
        return replace(_stated(schedule, name), violations=len(error.violations))


def facts(checked: ir.Checked, name: str, remark: str = "", kind: str = "") -> Facts:
    """Read the numbers of a checked schedule."""
    return replace(
        _stated(checked.schedule, name),
        host_traffic_bytes=_host_traffic(checked.schedule),
        recompute_fraction=_recompute_fraction(checked.schedule),
        remark=remark,
        kind=kind,
    )


def _stated(schedule: ir.Schedule, name: str) -> Facts:
    """Return what the records say, whatever the ops are."""
    setup, forecast, model = schedule.setup, schedule.forecast, schedule.model
    tokens = None
    if model is not None and forecast.makespan_ns:
        lengths = setup.lengths
        per_step = setup.microbatches * model.sequence_length if lengths is None else sum(lengths)
        tokens = model.microbatch_size * per_step * 10**9 / forecast.makespan_ns
    return Facts(
        name=name,
        profile_digest=schedule.provenance.profile_digest,
        devices=setup.devices,
        microbatches=setup.microbatches,
        cap_bytes=setup.cap_bytes,
        host_cap_bytes=setup.host_cap_bytes,
        makespan_ns=forecast.makespan_ns,
        bubble_fraction=forecast.bubble_fraction,
        peak_bytes=max((device.peak_bytes for device in schedule.devices), default=0),
        violations=0,
        host_traffic_bytes=None,
        recompute_fraction=None,
        tokens_per_s=tokens,
        slices=setup.slices,
        lengths=setup.lengths,
    )


def _host_traffic(schedule: ir.Schedule) -> int:
    table = Table(schedule)
    return sum(table.copied(op) for device in schedule.devices for op in (*device.d2h, *device.h2d))


def _recompute_fraction(schedule: ir.Schedule) -> float:
    again = whole = 0
    for _, lane, op, start, end in schedule.timed():
        if lane == "compute":
            whole += end - start
            again += end - start if op.name == "recompute" else 0
    return again / whole if whole else 0.0
