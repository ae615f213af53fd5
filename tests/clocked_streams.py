"""Streams with vector clocks, and one pool of device memory: two uses of memory that nothing orders are a race.

Happens-before as Lamport and Mattern have it: a stream's clock counts its own work; an event holds the clock of its
stream, and who waits for it knows what that knew.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

from runtime_torch import streams
from runtime_torch.lanes import LaneOps
from runtime_torch.meter import Meter
from runtime_torch.streams import StreamCarrier, StreamLanes


@dataclass(eq=False)
class Stream:
    name: str
    clock: dict[str, int] = field(default_factory=dict)

    def work(self) -> None:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1


@dataclass(eq=False)
class Storage:
    """So many bytes at an address; `holders` are those that torch counts."""

    address: int
    size: int
    holders: int = 1

    def nbytes(self) -> int:
        return self.size

    def data_ptr(self) -> int:
        return self.address


class ClockedDevice:
    """A backend of the stream lanes whose memory is given out again as soon as it is free, the oldest first."""

    def __init__(self) -> None:
        self.compute = Stream("compute")
        self.races: list[tuple[str, str]] = []
        self._names = iter(("d2h", "h2d"))
        self._on = [self.compute]
        self._free: list[tuple[int, int]] = []
        self._end = 1
        self._uses: list[tuple[int, str, int, bool, str]] = []

    def compute_stream(self):
        return self.compute

    def new_stream(self):
        return Stream(next(self._names))

    @contextmanager
    def on(self, stream):
        self._on.append(stream)
        yield
        self._on.pop()

    def record(self, stream):
        return dict(stream.clock)

    def wait(self, stream, event):
        for name, count in event.items():
            stream.clock[name] = max(stream.clock.get(name, 0), count)

    def empty(self, nbytes):
        for index in range(len(self._free)):
            if self._free[index][1] == nbytes:
                return Storage(*self._free.pop(index))
        self._end += nbytes
        return Storage(self._end - nbytes, nbytes)

    def give(self, storage):
        self._free.append((storage.address, storage.size))

    def copy(self, into, of):
        stream = self._on[-1]
        stream.work()
        for one, writes in ((into, True), (of, False)):
            if one is not None:
                self.use(stream, one, writes, stream.name)

    def use(self, stream, storage, writes, what):
        for address, name, count, wrote, before in self._uses:
            is_known = name == stream.name or stream.clock.get(name, 0) >= count
            if address == storage.address and (writes or wrote) and not is_known:
                self.races.append((before, what))
        self._uses.append((storage.address, stream.name, stream.clock.get(stream.name, 0), writes, what))


class FreeingMeter(Meter):
    """Gives to the device what nobody holds any more."""

    def __init__(self, device) -> None:
        super().__init__()
        self._device = device

    def release(self, storage):
        super().release(storage)
        if storage.data_ptr() not in self._holders:
            self._device.give(storage)


class Pool:
    """Of host memory, which no stream is held against."""

    def take(self, nbytes):
        return SimpleNamespace(nbytes=nbytes, pieces=[None])

    def give(self, host_copy):
        pass


class ClockedLanes:
    """Stream lanes over named ops: F computes, s and r send and receive, D and H offload and reload 8 bytes."""

    def __init__(self, monkeypatch, waits, messages, late=()):
        monkeypatch.setattr(streams, "references", lambda storage: storage.holders)
        monkeypatch.setattr(streams, "_parts", lambda storage, _: [storage])
        self.device = ClockedDevice()
        self.meter = FreeingMeter(self.device)
        carrier = StreamCarrier(self.device, Pool(), self.meter, Meter())
        self.arrived = {name for name in waits if name[0] in "sr"} - set(late)
        self.saved, self._away, self._mail = {}, {}, {}
        lane_of = {name: name[0] if name[0] in "DH" else "C" for name in waits}
        messages = {name: messages.get(name, []) for name in waits}
        others = {
            name: [other for other in (*waits[name], *messages[name]) if lane_of[other] != lane_of[name]]
            for name in waits
        }
        ops = ([SimpleNamespace(id=name) for name in waits if lane_of[name] == lane] for lane in "CDH")
        work = LaneOps(
            *ops, others, messages, self._deliver, self.arrived.__contains__, self._transfer, lambda op: [8], {}
        )
        self.lanes = StreamLanes(work, self.device, carrier)
        self.lanes.begin()

    def save(self, offload):
        """In an op: write what an offload will take; return it."""
        storage = self.new()
        self.saved[offload] = storage
        return storage

    def new(self):
        """In an op: write something new."""
        storage = self.device.empty(8)
        self.meter.hold(storage)
        self.use(storage, writes=True)
        return storage

    def use(self, storage, *, writes=False):
        self.device.use(self.device.compute, storage, writes, "compute")

    def send(self, name, storage):
        """In a send: let the peer read it."""
        stream = Stream(f"peer of {name}")
        self.device.wait(stream, self.device.record(self.device.compute))
        stream.work()
        self.device.use(stream, storage, False, name)
        self._mail[name] = self.device.record(stream), storage

    def run(self, name, body=lambda: None):
        self.lanes.start(name)
        self.device.compute.work()
        body()
        self.lanes.complete(name)

    def _deliver(self, name):
        if name not in self._mail:
            return
        event, storage = self._mail.pop(name)
        for stream in (self.device._on[-1], self.device.compute):
            self.device.wait(stream, event)
        self.meter.release(storage)

    def _transfer(self, op):
        if op.id[0] == "D":
            self._away[op.id[1:]] = self.lanes._carrier.take([self.saved.pop(op.id)])
        else:
            self.lanes._carrier.bring(self._away.pop(op.id[1:]))
