"""A schedule to show: an offloading one on two devices, with published schedules to compare it with."""

from __future__ import annotations

import msgspec

from optpipe_compiler.documents import ir
from tests.instances import quick, uniform

GB = 10**9
PROFILE = uniform(2, 2, d2h_ms=0.3, h2d_ms=0.3)


def published(method: str, mem_gb: int = 9) -> ir.Schedule:
    """A published schedule of PROFILE."""
    per_device = 1 if method in ("1f1b", "gpipe") else 2
    placement = "linear" if per_device == 1 else "loop"
    return quick(PROFILE, mem_gb * GB, method=method, placement=placement, stages_per_device=per_device).schedule


def planned() -> ir.Schedule:
    """A schedule as if a search had found it; those that fit are slower, a faster one does not fit."""
    made = published("gis-offload-1", 3)
    others = {
        "gis-h-offload": published("gis-h-offload").forecast.baselines["gis-h-offload"],
        "interleaved-1f1b-recompute": published("interleaved-1f1b-recompute").forecast.baselines[
            "interleaved-1f1b-recompute"
        ],
        "interleaved-zb": msgspec.structs.replace(
            published("interleaved-zb").forecast.baselines["interleaved-zb"], fits=False
        ),
        "zb-h1": ir.Baseline(makespan_ns=None, peak_bytes=None, fits=False, reason="not for the placements searched"),
    }
    return msgspec.structs.replace(
        made, forecast=msgspec.structs.replace(made.forecast, method="windows", baselines=others)
    )
