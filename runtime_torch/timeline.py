"""When ops really ran: host clock on CPU, events on CUDA; nanoseconds of the machine's monotonic clock."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.profiler import record_function

from optpipe_compiler.documents.ops import range_name
from runtime_torch.engine import is_profiled

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from optpipe_compiler.documents import ir


class OpTime(NamedTuple):
    """One op as it ran."""

    op_id: str
    lane: str
    start_ns: int
    end_ns: int

    def later(self, ns: int) -> OpTime:
        """Return it by another clock."""
        return self._replace(start_ns=self.start_ns + ns, end_ns=self.end_ns + ns)


_SILENCE = nullcontext()


def told_to_profiler(op: ir.Op) -> AbstractContextManager[object]:
    """Tell a profiler, where one listens, that an op runs within: `forward 3 m2` is microbatch 2 on stage 3."""
    if not is_profiled():
        return _SILENCE
    return record_function(range_name(op.name, op.stage, op.microbatch, op.slice_or_none))


class OpRecorder:
    """Collects the marks of one step and turns them into times at its end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple[str, str, int | torch.cuda.Event, int | torch.cuda.Event]] = []
        self._origin: torch.cuda.Event | None = None
        self._origin_ns = 0

    def begin(self) -> None:
        """Start a step."""
        self._marks.clear()
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
            self._origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._origin.record(torch.cuda.current_stream(self._device))
            self._origin.synchronize()
            self._origin_ns = time.perf_counter_ns()

    def now(self) -> int | torch.cuda.Event:
        """Mark this point of the compute lane."""
        if not self._is_cuda:
            return time.perf_counter_ns()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, op_id: str, lane: str, start: int | torch.cuda.Event, end: int | torch.cuda.Event) -> None:
        """Record an op; called from any thread."""
        self._marks.append((op_id, lane, start, end))

    def collect(self) -> list[OpTime]:
        """Return the step's ops by start."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        ops = [OpTime(name, lane, self._ns(start), self._ns(end)) for name, lane, start, end in self._marks]
        return sorted(ops, key=lambda op: op.start_ns)

    def _ns(self, mark: int | torch.cuda.Event) -> int:
        if isinstance(mark, int):
            return mark
        assert self._origin is not None
        return self._origin_ns + round(float(self._origin.elapsed_time(mark)) * 1e6)
