"""What torch's allocator of host memory hands out and takes back, by torch's profiler."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler import profile, record_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


def watch(ops: Mapping[str, Callable[[], object]]) -> dict[str, list[int]]:
    """Run the ops in order; return by how many bytes the allocator rises or falls (negative), each time, during each.

    What an op returns lives until its end. Allocations of other threads are not seen, nor is what was there before the
    first op when it is given back. The events are read as the profiler records them: its tree of them, which
    `torch.profiler.profile(acc_events=True)` builds, takes longer than most ops.
    """
    with no_collection(), profile(profile_memory=True, use_kineto=True) as profiler:
        for name, op in ops.items():
            with record_function(name):
                kept = op()
            del kept
    results: Any = profiler.kineto_results
    events = results.events()
    memory = ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    changes = list(_own(sorted(memory, key=lambda e: e[0])))
    spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name() in ops}
    return {name: [size for at, size in changes if start <= at <= end] for name, (start, end) in spans.items()}


def _own(changes: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Leave out what gives back more blocks of a size than were handed out.

    They are older than the profiler. It says nothing of most of them, but now and then takes one for a block of an
    earlier time that it was on, at the same address, of any size.
    """
    there: Counter[int] = Counter()
    for at, size in changes:
        there[abs(size)] += 1 if size > 0 else -1
        if there[abs(size)] >= 0:
            yield at, size
        else:
            there[abs(size)] = 0


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
