"""Measuring on a GPU: times of its streams, bytes of its allocator, pinned copies, NCCL; not imported elsewhere."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from optpipe_torch.launch.worker import settle_on_gpu
from optpipe_torch.profiler.allocator import no_collection
from optpipe_torch.profiler.copies import stream_lanes
from optpipe_torch.profiler.timer import Timer
from optpipe_torch.profiler.topology import pci_address, root_port
from runtime_torch.cuda import Cuda, pinned

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from runtime_torch.execution import StageExecution
    from runtime_torch.lanes import LaneOps
    from runtime_torch.streams import Lanes

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Tells machines apart, also where all of them are called localhost."""
LEAD_NS = 5_000_000
"""The host issues a round of small ops or messages in less."""
LEAD_SIZE = 2048
"""Rows and columns of the matrices that are multiplied meanwhile."""


class CudaTimer(Timer):
    """One GPU of this machine.

    An op's time is that between two events around it on the compute stream, as in a run (`timeline.py`). The host does
    not wait between ops, so what is timed is the device's work where the host is ahead of it, and the host's where the
    kernels are too small for that: in a run, too, the slower of both counts.
    """

    def __init__(self, index: int) -> None:
        settle_on_gpu()
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        properties: Any = torch.cuda.get_device_properties(index)
        self.kind = str(properties.name)
        port = root_port(pci_address(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id))
        self.host_link = None if port is None else f"{BOOT_ID.read_text(encoding='ascii').strip()} {port}"
        self.group: dist.ProcessGroup | None = None
        self._under_way: list[tuple[list[int], torch.cuda.Event, torch.cuda.Event]] = []
        self._fillers = 0

    def join(self, processes: int) -> None:
        """NCCL, beside the default group on the hosts."""
        if processes > 1:
            self.group = dist.new_group(backend="nccl", timeout=timedelta(seconds=120))

    def share(self, peers: Collection[int], largest_bytes: int) -> None:
        """Nothing: NCCL shares what there is to share."""

    @contextmanager
    def timed(self, into: list[int]) -> Iterator[None]:
        """By events on the current stream."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        yield
        end.record()
        self._under_way.append((into, start, end))

    @contextmanager
    def busy(self, into: list[int]) -> Iterator[None]:
        """Messages and copies are on streams of their own; what these take from compute is not measured."""
        yield

    def sweep(self) -> None:
        """Nothing: what copies read and write is in the GPU's memory and in pinned pages, not in the host's caches."""

    def settle(self) -> None:
        """Wait for the device, then read the events."""
        torch.cuda.synchronize(self.device)
        for into, start, end in self._under_way:
            into.append(round(start.elapsed_time(end) * 1e6))
        self._under_way.clear()

    def lead(self) -> None:
        """Put products of matrices on the stream."""
        if not self._fillers:
            took: list[int] = []
            for _ in range(2):  # the first sets the library up
                with self.timed(took):
                    self._fill(1)
            self.settle()
            self._fillers = -(-LEAD_NS // max(1, took[-1]))
        self._fill(self._fillers)

    def _fill(self, count: int) -> None:
        matrix = torch.ones(LEAD_SIZE, LEAD_SIZE, device=self.device)
        product = torch.empty_like(matrix)
        for _ in range(count):
            torch.mm(matrix, matrix, out=product)

    def peaks(self, ops: Mapping[str, Callable[[], object]]) -> dict[str, int]:
        """By the caching allocator's own count, which includes its rounding."""
        gc.collect()  # stages that know their lanes: a GPU may not have room for those measured before, too
        found = {}
        with no_collection():
            for name, op in ops.items():
                torch.cuda.reset_peak_memory_stats(self.device)
                before = torch.cuda.memory_allocated(self.device)
                kept = op()
                found[name] = torch.cuda.max_memory_allocated(self.device) - before
                del kept
        return found

    def lanes(self, stage: StageExecution, host_bytes: int) -> Callable[[LaneOps], Lanes]:
        """Streams and pinned memory."""
        return stream_lanes(stage, host_bytes, Cuda(self.device), pinned)

    def room_bytes(self, processes: int) -> int:
        """Half of what is free; each process has a GPU of its own."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free // 2

    def memory(self) -> tuple[int, int]:
        """Taken are the context, the workspaces of libraries, NCCL's buffers, and what others hold."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total, total - free
