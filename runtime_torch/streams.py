"""The lanes of one device on CUDA: a stream per direction, events where the schedule waits, and no waiting host.

All is issued by the thread that runs the compute lane. A transfer is issued as soon as all that it waits for has been
issued. Then the op that the compute lane issued last is in its past, and memory from the compute stream's allocator is
safe to copy into; a reload that is issued later waits for that op before it allocates. So the host, which may be many
ops ahead, waits for the delivery of a message before it issues what would make a reload later than forecast that counts
on the message's memory, as long as the compute stream has something to do. What a copy has read is freed once the
compute stream itself is ordered after the copy: not earlier, and without asking the device. A reload that would need
such memory before, in other sizes, is issued when the compute stream is forecast to have nothing to wait for. Each
lane's clock says of the other lanes how many ops it is ordered after; clocks also show which waits an earlier one
implies.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from optpipe_compiler.errors import RunFailed
from runtime_torch.carrier import DirectCarrier, HostCopy, as_bytes
from runtime_torch.engine import references
from runtime_torch.lanes import ThreadLanes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, UntypedStorage

    from optpipe_compiler.documents.ir import Op
    from runtime_torch.lanes import LaneOps
    from runtime_torch.meter import Meter
    from runtime_torch.pinned import PinnedPool

COMPUTE, D2H, H2D = range(3)


class Backend:
    """What the lanes need of a device; streams and events are its own business. A GPU's is `cuda.Cuda`.

    This one is a CPU's: whatever is put on a stream happens at once, in the caller's thread. So the order, the waits
    and the memory of a GPU's lanes can be watched on a CPU, by its allocator.
    """

    def compute_stream(self) -> Any:
        """The stream on which the caller computes."""

    def new_stream(self) -> Any:
        """Another stream."""

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Within: work is put on `stream`."""
        return nullcontext()

    def record(self, stream: Any) -> Any:
        """An event after all that has been put on `stream`."""
        return True

    def wait(self, stream: Any, event: Any) -> None:
        """Let what is put on `stream` from now on run after `event`."""

    def is_over(self, event: Any) -> bool:
        """Whether what is before an event has run."""
        return True

    def pause(self) -> None:
        """Let a moment pass on the host."""

    def empty(self, nbytes: int) -> UntypedStorage:
        """Device memory of the current stream's allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()

    def copy(self, into: Tensor, of: Tensor) -> None:
        """Put a copy on the current stream."""
        into.copy_(of)


@dataclass
class _Lane:
    """A lane's ops, stream and clock; `next` counts the ops that have been issued."""

    ops: Sequence[Op]
    stream: Any
    next: int = 0
    clock: list[int] = field(default_factory=lambda: [0, 0, 0])


@dataclass(slots=True)
class _Passed:
    """The end of an issued op: its event (where another lane waits for it) and what it is ordered after."""

    event: Any
    clock: tuple[int, ...]


class StreamLanes:
    """Lanes on streams, used as `ThreadLanes`. Offloads and reloads must copy by `carrier`."""

    def __init__(self, work: LaneOps, backend: Backend, carrier: StreamCarrier) -> None:
        self._work = work
        self._watched = work.watched()
        self._backend = backend
        self._carrier = carrier
        compute = backend.compute_stream()
        self._lanes = [
            _Lane(work.compute, compute),
            _Lane(work.d2h, backend.new_stream()),
            _Lane(work.h2d, backend.new_stream()),
        ]
        self._lane_of = {op.id: index for index, lane in enumerate(self._lanes) for op in lane.ops}
        self._place = {op.id: index for lane in self._lanes for index, op in enumerate(lane.ops)}
        self._passed: dict[str, _Passed] = {}
        self._deferred = False
        """Whether a transfer has all but the delivery of a message, or is early."""
        self._has_delivered = False
        """Whether the compute stream has waited for a message since the reloads were ordered after it."""

    def begin(self) -> None:
        """The other streams start after what the compute stream has been given so far."""
        self._passed.clear()
        self._lanes[COMPUTE].stream = self._backend.compute_stream()
        for lane in self._lanes:
            lane.next, lane.clock = 0, [0, 0, 0]
        if self._work.d2h or self._work.h2d:
            before = self._backend.record(self._lanes[COMPUTE].stream)
            for lane in self._lanes[D2H:]:
                self._backend.wait(lane.stream, before)
        self._issue_transfers()

    def start(self, op_id: str) -> None:
        """Put the waits of a compute op on its stream."""
        if self._deferred and not _is_message(op_id):
            self._await_deliveries()
        for name in self._work.waits[op_id]:
            self._issue(name)
        self._join(COMPUTE, op_id)
        self._settle()

    def complete(self, op_id: str) -> None:
        """Mark the op's end, and issue the transfers that waited for it."""
        self._pass(COMPUTE, op_id)
        if op_id in self._watched or self._deferred:
            self._issue_transfers()

    def finish(self) -> None:
        """Let the compute stream end the step after all transfers, and free what they held."""
        for index in (D2H, H2D):
            lane = self._lanes[index]
            if lane.ops:
                self._issue(lane.ops[-1].id)
                self._backend.wait(self._lanes[COMPUTE].stream, self._backend.record(lane.stream))
        self._carrier.settle(len(self._work.d2h), len(self._work.h2d))

    def abort(self, error: BaseException) -> None:
        """Nothing runs by itself."""

    # -- how

    def _issue(self, name: str) -> None:
        """Issue a transfer that is waited for, and those before it, whatever has not been delivered yet."""
        index = self._lane_of[name]
        lane = self._lanes[index]
        while lane.next <= self._place[name]:
            op = lane.ops[lane.next]
            for before in self._work.waits[op.id]:
                if self._lane_of[before] != COMPUTE:
                    self._issue(before)
                elif self._lanes[COMPUTE].next <= self._place[before]:
                    raise RunFailed(f"{op.id} was never issued: what it waits for did not run")
            self._transfer(index, op)

    def _issue_transfers(self) -> None:
        """Issue, in the lanes' order, all transfers that may start.

        Those that count on the memory of a message that is still under way are not issued: the compute stream, whose
        memory it is, would have to wait for the message, which the schedule does not ask of it.
        """
        self._deferred = False
        issued = True
        while issued:
            issued = False
            for index in (D2H, H2D):
                lane = self._lanes[index]
                while lane.next < len(lane.ops) and self._is_ready(lane.ops[lane.next]):
                    self._transfer(index, lane.ops[lane.next])
                    issued = True

    def _is_ready(self, op: Op) -> bool:
        if not all(name in self._passed for name in self._work.waits[op.id]):
            return False
        if all(map(self._work.is_delivered, self._work.messages[op.id])) and not self._is_early(op):
            return True
        self._deferred = True
        return False

    def _is_early(self, op: Op) -> bool:
        """Whether a reload would make the compute stream wait for offloads that are forecast to last longer."""
        if self._lanes[COMPUTE].next >= self._work.due.get(op.id, 0):
            return False
        before = [self._passed[name].clock[D2H] for name in self._work.waits[op.id]]
        return not self._carrier.has_room(self._work.sizes(op), max([self._lanes[H2D].clock[D2H], *before]))

    def _await_deliveries(self) -> None:
        """Let the host wait, while the compute stream has something to do, for the deliveries without which a transfer
        would be ordered after an op that is forecast to start when it has started."""
        self._issue_transfers()
        if not self._lacks_delivery():
            return
        end = self._backend.record(self._lanes[COMPUTE].stream)
        while not self._backend.is_over(end) and self._lacks_delivery():
            self._backend.pause()
            self._issue_transfers()

    def _lacks_delivery(self) -> bool:
        """Whether a transfer that is forecast to start before the next op of the compute lane lacks only deliveries."""
        coming = (lane.ops[lane.next] for lane in self._lanes[D2H:] if lane.next < len(lane.ops))
        return any(
            self._work.begins.get(op.id, len(self._place)) <= self._lanes[COMPUTE].next
            and all(name in self._passed for name in self._work.waits[op.id])
            and not self._is_early(op)
            for op in coming
        )

    def _transfer(self, index: int, op: Op) -> None:
        lane = self._lanes[index]
        with self._backend.on(lane.stream):
            self._join(index, op.id)
            self._settle()
            compute = self._lanes[COMPUTE]
            is_late = lane.clock[COMPUTE] < compute.clock[COMPUTE]
            self._carrier.enter(
                lane.next, lane.clock[D2H], compute.stream, self._catch_up, self._follow, is_late=is_late
            )
            self._work.transfer(op)
        self._pass(index, op.id)

    def _join(self, index: int, op_id: str) -> None:
        """Order the lane's stream after all that the op waits for."""
        lane = self._lanes[index]
        for name in self._work.waits[op_id]:
            passed, other = self._passed[name], self._lane_of[name]
            if passed.event is not None and lane.clock[other] < passed.clock[other]:
                self._order(lane, passed)
        for name in self._work.messages[op_id]:
            self._work.deliver(name)
            self._has_delivered = True

    def _catch_up(self, offloads: int) -> None:
        """Order the compute stream after so many offloads, of which the last is waited for by another lane."""
        self._order(self._lanes[COMPUTE], self._passed[self._work.d2h[offloads - 1].id])
        self._settle()

    def _follow(self) -> None:
        """Order the reloads after all that the compute stream has been given: its ops, and the messages and offloads
        that it waits for, may have freed what they allocate."""
        lane, compute = self._lanes[H2D], self._lanes[COMPUTE]
        is_behind = any(mine < theirs for mine, theirs in zip(lane.clock, compute.clock, strict=True))
        if is_behind or self._has_delivered:
            self._has_delivered = False
            self._order(lane, _Passed(self._backend.record(compute.stream), tuple(compute.clock)))

    def _order(self, lane: _Lane, passed: _Passed) -> None:
        self._backend.wait(lane.stream, passed.event)
        lane.clock = [max(pair) for pair in zip(lane.clock, passed.clock, strict=True)]

    def _pass(self, index: int, op_id: str) -> None:
        lane = self._lanes[index]
        lane.next += 1
        lane.clock[index] = lane.next
        if op_id in self._watched:
            event = None if _is_message(op_id) else self._backend.record(lane.stream)
            self._passed[op_id] = _Passed(event, tuple(lane.clock))

    def _settle(self) -> None:
        """Free what no stream that could get the memory can still see in use."""
        self._carrier.settle(self._lanes[COMPUTE].clock[D2H], self._lanes[D2H].clock[H2D])


@dataclass
class StreamCarrier:
    """Puts copies on the current stream; frees what they have read when the lanes say that it is safe.

    Memory that offloads have read goes back to the allocator when the compute stream is ordered after them. A reload
    that is already ordered after them may count on it earlier: it gets such storages of its sizes directly, those of
    the latest offloads first, because the compute stream may count on those of earlier ones before. Where that does not
    work out, the compute stream waits for the offloads, too.
    """

    _backend: Backend
    _pool: PinnedPool
    _meter: Meter
    _host_meter: Meter
    _leaving: deque[tuple[int, UntypedStorage, bool]] = field(default_factory=deque)
    """What offloads have read, with the number of the op, and whether nobody else held it then, nor could read it."""
    _emptied: deque[tuple[int, HostCopy]] = field(default_factory=deque)
    _op: int = 0
    _ordered_after: int = 0
    _earliest: int = 0
    """The first offload of which this op was handed a storage."""
    _is_late: bool = False
    """Whether the compute lane has gone on since the op that this one is ordered after."""
    _compute: Any = None
    _catch_up: Callable[[int], None] = lambda _: None
    _follow: Callable[[], None] = lambda: None

    def enter(
        self,
        op: int,
        ordered_after: int,
        compute: Any,
        catch_up: Callable[[int], None],
        follow: Callable[[], None],
        *,
        is_late: bool = False,
    ) -> None:
        """Op number `op` of a transfer lane begins; its stream is ordered after so many offloads.

        `catch_up` orders the compute stream after so many, too, and settles; `follow` orders the reloads' stream after
        what the compute stream has been given. An op `is_late` where that is more than its stream is ordered after.
        """
        self._op, self._ordered_after, self._compute, self._is_late = op, ordered_after, compute, is_late
        self._catch_up, self._follow = catch_up, follow
        self._earliest = ordered_after

    def has_room(self, sizes: Sequence[int], ordered_after: int) -> bool:
        """Whether a reload of storages of these sizes, ordered after so many offloads, lets the compute stream go on.

        It does where no offload has left anything that the compute stream does not know to be free, or where each size
        is found among that, and nothing older stays behind.
        """
        left = [one for one in self._leaving if one[0] < ordered_after]
        if not left:
            return True
        earliest = ordered_after
        for nbytes in sizes:
            index = _fitting(left, nbytes, ordered_after)
            if index is None:
                return False
            earliest = min(earliest, left.pop(index)[0])
        return all(op <= earliest for op, *_ in left)

    def take(self, storages: list[UntypedStorage]) -> list[HostCopy]:
        """D2H."""
        host_copies = []
        for storage in storages:
            is_ours = not self._is_late and references(storage) == self._meter.holders(storage) == 1
            host_copy = self._pool.take(storage.nbytes())
            self._host_meter.count(host_copy.nbytes)
            for piece, part in zip(host_copy.pieces, _parts(storage, host_copy), strict=True):
                self._backend.copy(piece, part)
            host_copies.append(host_copy)
            self._leaving.append((self._op, storage, is_ours))
        storages.clear()
        return host_copies

    def bring(self, host_copies: list[HostCopy]) -> list[UntypedStorage]:
        """H2D."""
        storages = []
        for host_copy in host_copies:
            storage = self._handed_over(host_copy.nbytes) or self._allocate(host_copy.nbytes)
            for piece, part in zip(host_copy.pieces, _parts(storage, host_copy), strict=True):
                self._backend.copy(part, piece)
            storages.append(storage)
            self._emptied.append((self._op, host_copy))
        host_copies.clear()
        if any(self._earliest < op < self._ordered_after for op, *_ in self._leaving):
            self._catch_up(self._ordered_after)
        return storages

    def discard(self, host_copy: HostCopy) -> None:
        """Free a host_copy at once: no copy of it may be under way."""
        self._host_meter.count(-host_copy.nbytes)
        self._pool.give(host_copy)

    def settle(self, offloads: int, reloads: int) -> None:
        """Free what the first `offloads` ops of D2H read on the device, and the first `reloads` of H2D on the host."""
        while self._leaving and self._leaving[0][0] < offloads:
            _, storage, _ = self._leaving.popleft()
            self._meter.release(storage)
        while self._emptied and self._emptied[0][0] < reloads:
            self.discard(self._emptied.popleft()[1])

    def _handed_over(self, nbytes: int) -> UntypedStorage | None:
        """A storage of this size that offloads before this op have read, and nobody else held; it stays counted."""
        index = _fitting(self._leaving, nbytes, self._ordered_after)
        if index is None:
            return None
        op, storage, _ = self._leaving[index]
        del self._leaving[index]
        self._earliest = min(self._earliest, op)
        return storage

    def _allocate(self, nbytes: int) -> UntypedStorage:
        if self._leaving and self._leaving[0][0] < self._ordered_after:
            self._catch_up(self._ordered_after)
        self._follow()
        with self._backend.on(self._compute):
            storage = self._backend.empty(nbytes)
        self._meter.hold(storage)
        return storage


def _fitting(leaving: Sequence[tuple[int, UntypedStorage, bool]], nbytes: int, ordered_after: int) -> int | None:
    """Return the last of what the first offloads, so many, have left that has this size and was nobody else's."""
    for index in reversed(range(len(leaving))):
        op, storage, is_ours = leaving[index]
        if is_ours and op < ordered_after and storage.nbytes() == nbytes:
            return index
    return None


def _is_message(op_id: str) -> bool:
    return op_id.startswith(("send", "recv"))


def _parts(storage: UntypedStorage, host_copy: HostCopy) -> Sequence[Tensor]:
    return torch.split(as_bytes(storage), [piece.numel() for piece in host_copy.pieces])


Lanes = ThreadLanes | StreamLanes
Carrier = DirectCarrier | StreamCarrier
