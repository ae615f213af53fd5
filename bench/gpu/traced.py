"""`python -m bench.gpu.traced SCHEDULE RANK OUTPUT`: torch's profiler over one step of one device, emulated.

Writes its Chrome trace (compressed where OUTPUT ends in .gz) and prints, as JSON, how many of the device's ops have a
range of their name in it, and what kernels and copies took on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from optpipe_compiler.documents.ir import Schedule


def main() -> None:
    """Write the trace; print what is in it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    from optpipe_compiler.documents import ir

    print(json.dumps(traced(ir.load(options.schedule), options.rank, options.output)))


def traced(schedule: Schedule, rank: int, output: Path) -> dict[str, Any]:
    """Profile the second of two steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from optpipe_torch.emulate.alone import emulate
    from optpipe_torch.models.text import default_text

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * torch.cuda.is_available())]
    profiler = profile(activities=activities, acc_events=True)

    def follow(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            (profiler.start if event["step"] == 0 else profiler.stop)()

    emulate(schedule, rank, steps=2, data=default_text(), on_event=follow)
    profiler.export_chrome_trace(str(output))
    plan = schedule.devices[rank]
    copies = (*plan.d2h, *plan.h2d) if torch.cuda.is_available() else ()  # of a CPU's threads the profiler sees nothing
    ops = (op for op in (*plan.compute, *copies) if not op.name.startswith(("send", "recv")))
    ranges = {f"{op.name} {op.stage} m{op.microbatch}" for op in ops}
    events = list(profiler.events())
    named = len(ranges & {event.name for event in events})
    return {"ranges": len(ranges), "ranges_found": named, **_device_times(events, ranges)}


def _device_times(events: Sequence[Any], ranges: Collection[str]) -> dict[str, int]:
    """Return what kernels and copies took on the GPU, which also shows every range; nothing on a CPU."""
    work = [event for event in events if event.device_type.name == "CUDA" and event.name not in ranges]

    def total(kind: str) -> int:
        return round(sum(1000 * event.time_range.elapsed_us() for event in work if kind in event.name))

    kinds = {"kernels_ns": "", "d2h_ns": "Memcpy DtoH", "h2d_ns": "Memcpy HtoD", "d2d_ns": "Memcpy DtoD"}
    found = {name: total(kind) for name, kind in kinds.items()} if work else {}
    if found:
        found["kernels_ns"] -= total("Memcpy") + total("Memset")
    return found


if __name__ == "__main__":
    main()
