"""Streams with vector clocks, and one pool of device memory: two uses of memory that nothing orders are a race.

Happens-before as Lamport and Mattern have it: a stream's clock counts its own work; an event holds the clock of its
stream, and who waits for it knows what that knew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

from stream_device import Streams

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.deliveries import waits
from runtime_torch import streams
from runtime_torch.lanes import LaneOps
from runtime_torch.meter import Meter
from runtime_torch.replay import reloads_due, transfers_begin
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


class ClockedDevice(Streams):
    """A backend of the stream lanes whose memory is given out again as soon as it is free, the oldest first.

    All free memory that would be large enough must be safe for who asks, whatever is given.
    """

    def __init__(self) -> None:
        super().__init__(Stream)
        self.races: list[tuple[str, str]] = []
        self._free: list[tuple[int, int]] = []
        self._end = 1
        self._uses: dict[int, list[tuple[str, int, bool, str]]] = {}

    def record(self, stream):
        return dict(stream.clock)

    def wait(self, stream, event):
        for name, count in event.items():
            stream.clock[name] = max(stream.clock.get(name, 0), count)

    def empty(self, nbytes):
        stream = next((one for one in reversed(self._on) if one is not self.compute), self.compute)
        for address, size in self._free:
            if size >= nbytes:
                self._check(stream, address, True, f"what {stream.name} is given")
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
        self._check(stream, storage.address, writes, what)
        uses = self._uses.setdefault(storage.address, [])
        uses.append((stream.name, stream.clock.get(stream.name, 0), writes, what))

    def _check(self, stream, address, writes, what):
        for name, count, wrote, before in self._uses.get(address, ()):
            is_known = name == stream.name or stream.clock.get(name, 0) >= count
            if (writes or wrote) and not is_known:
                self.races.append((before, what))


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


def pretend(monkeypatch):
    """Let the lanes take the storages of here for torch's."""
    monkeypatch.setattr(streams, "references", lambda storage: storage.holders)
    monkeypatch.setattr(streams, "_parts", lambda storage, _: [storage])


class ClockedLanes:
    """Stream lanes over named ops: F computes, s and r send and receive, D and H offload and reload 8 bytes."""

    def __init__(self, monkeypatch, waits, messages, late=()):
        pretend(monkeypatch)
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


class ClockedPlan:
    """One device of a schedule on such streams. Messages arrive `lag` ops late at most, at random.

    `is_timed`: reloads are put off until the offloads whose memory they need are forecast to be over, and the host may
    wait for messages.
    """

    def __init__(self, plan, device, seed, lag, *, is_timed=True):
        self._random, self._lag = Random(seed), lag
        self._stages = {stage.stage: stage for stage in plan.stages}
        self._mine = {stage.stage for stage in plan.stages_of(device)}
        self._plan = plan.devices[device]
        self.device = ClockedDevice()
        self.meter = FreeingMeter(self.device)
        self._carrier = StreamCarrier(self.device, Pool(), self.meter, Meter())
        self._saved, self._away, self._mail, self._channels, self._passed = {}, {}, {}, {}, 0
        self._arrived, self._leaving = {}, {}
        messages = waits(plan, device)
        others = {}
        for lane in self._plan.lanes.values():
            own = {op.id for op in lane}
            for op in lane:
                others[op.id] = [name for name in (*op.after, *messages[op.id]) if name not in own]
        lanes = (self._plan.compute, self._plan.d2h, self._plan.h2d)
        calls = (self._deliver, self._is_delivered, self._transfer, self._sizes)
        timed = {one.op.id: one for one in plan.timed(device, messages=True)}
        times = (reloads_due(self._plan, timed), transfers_begin(self._plan, timed)) if is_timed else ()
        self._lanes = StreamLanes(LaneOps(*lanes, others, messages, *calls, *times), self.device, self._carrier)
        self.device.is_over = lambda _: self._random.random() < 0.5
        self.device.pause = self._pause

    def races(self):
        """Run a step; return what was used by two streams that do not know of each other."""
        self._lanes.begin()
        for op in self._plan.compute:
            self._lanes.start(op.id)
            if isinstance(op, ir.MessageOp):
                self._post(op)
            else:
                self.device.compute.work()
                getattr(self, f"_{op.name}")(op, self._stages[op.stage])
            self._passed += 1
            self._lanes.complete(op.id)
        self._lanes.finish()
        return self.device.races

    def _pause(self):
        """What is under way gets nearer."""
        self._passed += 1

    # -- ops

    def _forward(self, op, stage):
        entered = self._arrived.pop(("activation", *_unit(op)), None)
        if entered is not None:
            self._use(entered, op)
        saved = {}
        for layer, size in zip(range(*stage.layers), stage.saved_bytes, strict=True):
            saved[layer] = [self._new(part, op) for part in (size // 2, size - size // 2) if part]
        self._saved[_unit(op)] = saved
        if stage.stage < len(self._stages) - 1:
            self._hand_on("activation", op, stage.stage + 1, stage.output_bytes)
        self._drop(entered)

    def _backward(self, op, stage):
        self._back(op, stage)
        self._backward_weight(op, stage)

    def _backward_input(self, op, stage):
        self._back(op, stage)
        for storages in self._saved[_unit(op)].values():
            if len(storages) > 1:
                self._drop(storages.pop())

    def _backward_weight(self, op, stage):
        for storages in self._saved.pop(_unit(op)).values():
            for storage in storages:
                self._use(storage, op)
                self._drop(storage)

    def _back(self, op, stage):
        entered = self._arrived.pop(("gradient", *_unit(op)), None)
        if entered is not None:
            self._use(entered, op)
        for storages in self._saved[_unit(op)].values():
            for storage in storages:
                self._use(storage, op)
        if stage.stage:
            self._hand_on("gradient", op, stage.stage - 1, stage.input_bytes)
        self._drop(entered)

    def _hand_on(self, what, op, to, size):
        storage = self._new(size, op)
        if to in self._mine:
            self._arrived[what, to, *_unit(op)[1:]] = storage
        else:
            self._leaving[what, *_unit(op)] = storage

    def _post(self, op):
        kind, what = op.name.split("_")
        stage = self._stages[op.stage]
        if kind == "send":
            storage = self._leaving.pop((what, *_unit(op)))
        else:
            storage = self._new(stage.input_bytes if what == "activation" else stage.output_bytes, op, writes=False)
            self._arrived[what, *_unit(op)] = storage
        channel = self._channels.setdefault(op.peer, Stream(f"peer {op.peer}"))
        self.device.wait(channel, self.device.record(self.device.compute))
        channel.work()
        self.device.use(channel, storage, kind == "recv", op.id)
        due = self._passed + self._random.randint(0, self._lag)
        self._mail[op.id] = self.device.record(channel), storage if kind == "send" else None, due

    # -- what the lanes ask for

    def _deliver(self, name):
        event, storage, due = self._mail[name]
        self.device.wait(self.device._on[-1], event)
        if storage is not None:
            self.device.wait(self.device.compute, event)
            self._drop(storage)
            self._mail[name] = event, None, due

    def _is_delivered(self, name):
        _, storage, due = self._mail[name]
        return storage is None or self._passed >= due

    def _transfer(self, op):
        if isinstance(op, ir.Offload):
            saved = {layer: self._saved[_unit(op)].pop(layer) for layer in range(*op.layers)}
            sizes = {layer: [storage.size for storage in storages] for layer, storages in saved.items()}
            copies = self._carrier.take([storage for storages in saved.values() for storage in storages])
            self._away[_unit(op), op.layers] = sizes, copies
        else:
            sizes, copies = self._away.pop((_unit(op), op.layers))
            back = iter(self._carrier.bring(copies))
            for layer, of_layer in sizes.items():
                self._saved[_unit(op)][layer] = [next(back) for _ in of_layer]

    def _sizes(self, op):
        sizes, _ = self._away.get((_unit(op), op.layers), ({}, None))
        return [size for of_layer in sizes.values() for size in of_layer]

    # -- memory

    def _new(self, size, op, *, writes=True):
        storage = self.device.empty(max(1, size))
        self.meter.hold(storage)
        if writes:
            self._use(storage, op, writes=True)
        return storage

    def _use(self, storage, op, *, writes=False):
        self.device.use(self.device.compute, storage, writes, op.id)

    def _drop(self, storage):
        if storage is not None:
            self.meter.release(storage)


def _unit(op):
    return op.stage, op.microbatch, op.slice_or_none
