"""`python -m bench.gpu.emulated SCHEDULE --steps N`: every device of a plan alone, one JSON object per line.

As `optpipe run --rank R --emulate-peers --json` for each rank, in one process: importing torch and starting CUDA takes
longer than the steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule


def main() -> None:
    """Print a line per device."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts memory on a CPU, says when it starts
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    from optpipe_compiler.documents import ir

    schedule = ir.load(options.schedule)
    for rank in range(schedule.setup.devices):
        print(json.dumps(emulated(schedule, rank, options.steps)), flush=True)


def emulated(schedule: Schedule, rank: int, steps: int) -> dict[str, Any]:
    """Return the report of one device; on a GPU with what its allocator needed beyond what was asked for."""
    import torch

    from optpipe_torch.emulate.alone import emulate
    from optpipe_torch.models.text import default_text

    gc.collect()  # lanes and carriers of the device before this one know each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    report = asdict(emulate(schedule, rank, steps=steps, data=default_text(), on_event=lambda event: None))
    return report | _allocator() | {"promised_peak_bytes": schedule.devices[rank].peak_bytes}


def _allocator() -> dict[str, int]:
    """Return what the caching allocator held and handed out at most, and what its rounding added to that."""
    import torch

    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    allocated, requested = (stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "requested"))
    return {
        "reserved_peak_bytes": stats["reserved_bytes.all.peak"],
        "allocated_peak_bytes": allocated,
        "rounding_bytes": allocated - requested,
    }


if __name__ == "__main__":
    main()
