"""`python -m bench.gpu.limited SCHEDULE RANK --steps N [--room-mib M ...]`: one device where torch's allocator may hold
no more than what is promised, and so much more; one JSON object per limit, the first without one.

A promise counts what is in use. What the caching allocator holds besides, in gaps that nothing fits, is not promised:
where the GPU has no room for it, the allocator gives gaps back and asks again, which takes time, or is out of memory.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe_torch.emulate.alone import Alone

ROOMS_MIB = (4096, 2048, 1024, 512, 0)


def main() -> None:
    """Print a line per limit, until the device is out of memory."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--room-mib", type=int, nargs="+", default=ROOMS_MIB)
    options = parser.parse_args()
    import torch

    from optpipe_compiler.documents import ir
    from optpipe_torch.emulate.alone import Alone, settled
    from optpipe_torch.models.text import default_text

    schedule = ir.load(options.schedule)
    alone = Alone(schedule, options.rank, settled(), default_text(), 1.0, 0)
    found = [limited(alone, None, options.steps)]
    print(json.dumps(found[-1]), flush=True)
    for room in sorted(options.room_mib, reverse=True) if torch.cuda.is_available() else ():
        if found[-1]["spans_ns"] is None:
            break
        # between steps only weights, gradients and batches are there
        limit = torch.cuda.memory_allocated() + schedule.activation_bytes(options.rank) + room * 2**20
        found.append(limited(alone, limit, options.steps) | {"room_mib": room})
        print(json.dumps(found[-1]), flush=True)


def limited(alone: Alone, limit_bytes: int | None, steps: int) -> dict[str, Any]:
    """Return how long steps took under a limit (None: they ran out of memory), and how often the allocator gave back
    what it held to have what it was asked for."""
    import torch

    if not torch.cuda.is_available():
        return {"limit_bytes": None, "spans_ns": _spans(alone, steps), "held_bytes": None, "retries": None}
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    torch.cuda.set_per_process_memory_fraction(1.0 if limit_bytes is None else limit_bytes / total)
    try:
        spans = _spans(alone, steps)
    except torch.OutOfMemoryError:
        spans = None
    stats = torch.cuda.memory_stats()
    held, retries = stats["reserved_bytes.all.peak"], stats["num_alloc_retries"] - before
    return {"limit_bytes": limit_bytes, "spans_ns": spans, "held_bytes": held, "retries": retries}


def _spans(alone: Alone, steps: int) -> list[int]:
    """How long each step but the first took."""
    return [alone.step()[-1].end_ns for _ in range(steps)][1:]


if __name__ == "__main__":
    main()
