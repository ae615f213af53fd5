"""Times of host copies: offloads and reloads of what one layer saved, on the lanes that a run has."""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager, nullcontext
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

from optpipe_compiler.documents import ir
from optpipe_torch.profiler.layers import bookkeeping_bench
from optpipe_torch.profiler.records import Copies
from optpipe_torch.profiler.spread import steadiest
from runtime_torch.lanes import LaneOps
from runtime_torch.pinned import PinnedPool
from runtime_torch.streams import StreamCarrier, StreamLanes
from runtime_torch.timeline import OpRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from optpipe_torch.profiler.layers import Bench, Benches
    from optpipe_torch.profiler.records import Samples
    from optpipe_torch.profiler.timer import Timer
    from runtime_torch.execution import StageExecution
    from runtime_torch.streams import Backend, Lanes

MICROBATCHES = 4
"""In flight while host copies are timed; even."""
LEAST, MOST_S = 2, 6.0
"""Runs of all microbatches that are timed in any case, and seconds after which there are no more."""


def time_copies(timer: Timer, benches: Benches, layer: int, samples: int, agree: Callable[[bool], bool]) -> Copies:
    """Time offloads and reloads of what `layer` saved: alone, then one while the other runs; `agree` as `steadiest`."""
    latency = _time_latency(timer, samples, agree)
    gc.collect()  # lanes and carrier know each other: only now their memory is free, and no page is pinned twice
    copies = _time_layer(timer, benches.stage(layer, layer + 1), samples, agree)
    copies.latency = latency
    gc.collect()
    return copies


def _time_latency(timer: Timer, samples: int, agree: Callable[[bool], bool]) -> list[int]:
    """Time copies of next to no bytes."""
    with _copier(timer, bookkeeping_bench(timer.device)) as copier:
        times = steadiest(lambda turn: _alone(copier, samples), agree, samples)
        return [*times["d2h"], *times["h2d"]]


def _time_layer(timer: Timer, bench: Bench, samples: int, agree: Callable[[bool], bool]) -> Copies:
    """Time copies of what a layer saved; their latency is left empty."""
    with _copier(timer, bench) as copier:
        alone = steadiest(lambda turn: _alone(copier, samples), agree, samples)
        duplex = steadiest(lambda turn: _duplex(copier, samples), agree, samples)
        return Copies(copier.nbytes, **alone, duplex_d2h=duplex["d2h"], duplex_h2d=duplex["h2d"])


def stream_lanes(
    stage: StageExecution, host_bytes: int, backend: Backend, allocate: Callable[[int], Tensor]
) -> Callable[[LaneOps], Lanes]:
    """Let the stage copy on streams, to a slab of `host_bytes`; return what makes lanes that issue its copies."""
    carrier = StreamCarrier(backend, PinnedPool(host_bytes, allocate), stage.meter, stage.host_meter)
    stage.carrier = carrier
    return lambda work: StreamLanes(work, backend, carrier)


@contextmanager
def _copier(timer: Timer, bench: Bench) -> Iterator[_Copier]:
    """Within: copies; at the end their microbatches are over, which is what frees the memory of their graphs."""
    copier = _Copier(timer, bench)
    yield copier
    for microbatch in range(MICROBATCHES):
        bench.stage.backward(microbatch, bench.gradient)


class _Copier:
    """A bench with all its microbatches in flight, and lanes that move what they saved."""

    def __init__(self, timer: Timer, bench: Bench) -> None:
        self._bench = bench
        self._timer = timer
        self._timeline = OpRecorder(timer.device)
        bench.forward(0)
        self.nbytes = bench.stage.saved_bytes(0)
        bench.stage.backward(0, bench.gradient)
        self._lanes = timer.lanes(bench.stage, MICROBATCHES * self.nbytes)
        for microbatch in range(MICROBATCHES):  # each on an input of its own: what was offloaded may be written to
            target = None if bench.target is None else bench.target.clone()
            bench.stage.forward(microbatch, bench.x.clone(), target)

    def lanes(self, out: Sequence[int], back: Sequence[int]) -> Lanes:
        """Return lanes that offload some microbatches, or reload some, or both at once in pairs."""
        d2h = [ir.Offload(stage=0, microbatch=m, layers=self._bench.whole) for m in out]
        h2d = [ir.Reload(stage=0, microbatch=m, layers=self._bench.whole) for m in back]
        waits: dict[str, list[str]] = {op.id: [] for op in chain(d2h, h2d)}
        for index in range(1, min(len(d2h), len(h2d))):  # a pair starts when the one before it is over
            waits[d2h[index].id] = [h2d[index - 1].id]
            waits[h2d[index].id] = [d2h[index - 1].id]
        none: Mapping[str, Sequence[str]] = {op_id: () for op_id in waits}
        return self._lanes(LaneOps([], d2h, h2d, waits, none, lambda _: None, lambda _: True, self._transfer))

    def run(self, lanes: Lanes, busy: list[int] | None = None) -> tuple[list[int], list[int]]:
        """Run them once; return the ns of each offload and of each reload; `busy` gets what all take from compute."""
        self._timer.sweep()
        self._timeline.begin()
        with nullcontext() if busy is None else self._timer.busy(busy):
            lanes.begin()
            lanes.finish()
        ran = self._timeline.collect()
        d2h, h2d = ([op.end_ns - op.start_ns for op in ran if op.lane == lane] for lane in ("d2h", "h2d"))
        return d2h, h2d

    def _transfer(self, op: ir.Op) -> None:
        assert isinstance(op, ir.Offload | ir.Reload)
        stage, there = self._bench.stage, isinstance(op, ir.Offload)
        start = self._timeline.now()
        (stage.offload if there else stage.reload)(op.microbatch, op.layers)
        self._timeline.add(op.id, "d2h" if there else "h2d", start, self._timeline.now())


def _alone(copier: _Copier, samples: int) -> Samples:
    """Offload several microbatches, then reload them."""
    everyone = range(MICROBATCHES)
    out, back = copier.lanes(everyone, ()), copier.lanes((), everyone)
    return _repeat(copier, [out, back], samples, with_busy=True)


def _duplex(copier: _Copier, samples: int) -> Samples:
    """Offload each microbatch while the one half-way round is reloaded."""
    half = MICROBATCHES // 2
    later = range(half, MICROBATCHES)
    copier.run(copier.lanes(later, ()))
    found = _repeat(copier, [copier.lanes(range(MICROBATCHES), [*later, *range(half)])], samples)
    copier.run(copier.lanes((), later))
    return found


def _repeat(copier: _Copier, lanes: Sequence[Lanes], samples: int, *, with_busy: bool = False) -> Samples:
    """Run the lanes until there are so many samples of each direction, or time is up; the first run is not counted.

    `busy` is then of each run, in thousandths of what its copies take at the median: not of what they took, as other
    processes may have had the core for a while.
    """
    found: Samples = {"d2h": [], "h2d": []}
    busy: list[int] = []
    for one in lanes:
        copier.run(one)
    begin = time.monotonic()
    for index in range(max(1, samples // MICROBATCHES)):
        if index >= LEAST and time.monotonic() - begin > MOST_S:
            break
        taken: list[int] = []
        for one in lanes:
            out, back = copier.run(one, taken if with_busy else None)
            found["d2h"] += out
            found["h2d"] += back
        if taken:
            busy.append(sum(taken))
    if busy:
        usual = MICROBATCHES * (median(found["d2h"]) + median(found["h2d"]))
        found["busy"] = [min(1000, round(1000 * ns / max(1, usual))) for ns in busy]
    return found
