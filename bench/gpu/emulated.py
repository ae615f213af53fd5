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
    from optpipe_compiler.ir import Schedule


def main() -> None:
    """Print a line per device."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts memory on a CPU, says when it starts
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    from optpipe_compiler import ir

    schedule = ir.load(options.schedule)
    for rank in range(schedule.setup.devices):
        print(json.dumps(emulated(schedule, rank, options.steps)), flush=True)


def emulated(schedule: Schedule, rank: int, steps: int) -> dict[str, Any]:
    """Return the report of one device, with what the caching allocator had to reserve for it in all."""
    import torch

    from runtime_torch.emulate import emulate
    from runtime_torch.text import default_text

    gc.collect()  # lanes and carriers of the device before this one know each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    report = asdict(emulate(schedule, rank, steps=steps, data=default_text(), on_event=lambda event: None))
    reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
    return report | {"reserved_peak_bytes": reserved, "promised_peak_bytes": schedule.devices[rank].peak_bytes}


if __name__ == "__main__":
    main()
