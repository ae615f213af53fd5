"""What measuring needs of a device: its clock, its memory, its lanes and its messages."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from optpipe_torch.profiler.allocator import highest, watch
from optpipe_torch.profiler.records import available_memory
from runtime_torch.lanes import ThreadLanes
from runtime_torch.shared import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from runtime_torch.execution import StageExecution
    from runtime_torch.lanes import LaneOps
    from runtime_torch.messages import Issued
    from runtime_torch.shared import Channels
    from runtime_torch.streams import Lanes


SWEPT_BYTES = 64 << 20
"""Twice the last cache of most CPUs."""


class Timer:
    """All in which measuring differs from one kind of device to another; here a core of the host, where what an op
    takes is what its call takes. `cuda.CudaTimer` is a GPU's."""

    kind = "cpu"
    """As the profile names it."""
    host_link: str | None = None
    """Names the link by which the device reaches its host, among those of all hosts; None: not known."""
    group: dist.ProcessGroup | None = None
    """Carries messages between devices; None: the default group."""
    _channels: Channels | None = None

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._swept: torch.Tensor | None = None

    def join(self, processes: int) -> None:
        """Make the group for messages; called by all processes when they have met."""

    def share(self, peers: Collection[int], largest_bytes: int) -> None:
        """Share memory for messages with others, as the replay does; called by all processes at one time."""
        self._channels = connect(peers, largest_bytes)

    def post(self, data: torch.Tensor, peer: int, *, sent: bool) -> Issued:
        """Send a message, or receive it, on the way that the replay takes."""
        if self._channels is not None and (half := self._channels.post(data, peer, sent=sent)) is not None:
            return half
        work = (dist.isend if sent else dist.irecv)(data, peer, self.group)
        assert work is not None
        return work

    @contextmanager
    def timed(self, into: list[int]) -> Iterator[None]:
        """Within: one op, whose ns are in `into` after the next `settle`."""
        start = time.perf_counter_ns()
        yield
        into.append(time.perf_counter_ns() - start)

    @contextmanager
    def busy(self, into: list[int]) -> Iterator[None]:
        """Within: messages or host copies; the ns that they take from compute are in `into`. None, if they run beside.

        By the processor's clock: other threads take their time from the only core, or from another one.
        """
        clock = time.process_time_ns if len(os.sched_getaffinity(0)) == 1 else time.thread_time_ns
        start = clock()
        yield
        into.append(clock() - start)

    def sweep(self) -> None:
        """Leave nothing in the caches of what will be copied: in a step, other ops come between."""
        if self._swept is None:
            self._swept = torch.zeros(SWEPT_BYTES // 8, dtype=torch.int64)
        self._swept.add_(1)

    def settle(self) -> None:
        """Wait for all ops that were timed."""

    def lead(self) -> None:
        """Occupy the device for longer than the host takes to issue what follows, so that its time is the device's."""

    def peaks(self, ops: Mapping[str, Callable[[], object]]) -> dict[str, int]:
        """Run the ops in order; return by how many bytes the allocator rises at most during each, over its start.

        What an op returns lives until its end. Here by torch.profiler's memory events.
        """
        return {name: highest(changes) for name, changes in watch(ops).items()}

    def lanes(self, stage: StageExecution, host_bytes: int) -> Callable[[LaneOps], Lanes]:
        """Let the stage offload up to `host_bytes` as in a run, from its next forward on; return its lanes' maker."""
        return ThreadLanes

    def room_bytes(self, processes: int) -> int:
        """Memory that this process may fill with one thing, where `processes` stand on the host: half of its share."""
        return available_memory() // (2 * processes)

    def memory(self) -> tuple[int, int] | None:
        """Return the device's bytes, and those taken while the process holds no tensor; None: it uses the host's."""
        return None
