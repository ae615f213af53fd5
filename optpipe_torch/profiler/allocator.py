"""What torch's allocator of host memory hands out and takes back, by torch's profiler."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler import profile, record_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


def watch(ops: Mapping[str, Callable[[], object]]) -> dict[str, list[int]]:
    """Run the ops in order; return by how many bytes the allocator rises or falls (negative), each time, during each.

    What an op returns lives until its end. Allocations of other threads are not seen. The events are read as the
    profiler records them: its tree of them, which `torch.profiler.profile(acc_events=True)` builds, takes longer than
    most ops.
    """
    with no_collection(), profile(profile_memory=True, use_kineto=True) as profiler:
        for name, op in ops.items():
            with record_function(name):
                kept = op()
            del kept
    results: Any = profiler.kineto_results
    events = results.events()
    changes = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda e: e[0])
    spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name() in ops}
    return {name: [size for at, size in changes if start <= at <= end] for name, (start, end) in spans.items()}


@contextmanager
def no_collection() -> Iterator[None]:
    """Within: no garbage is collected. What ops before have left would go in the middle of one that is watched."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def highest(changes: Iterable[int]) -> int:
    """Return the most that changes add up to on their way; at least 0."""
    return max(accumulate(changes, initial=0))
