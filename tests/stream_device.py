"""A device whose streams run as late as they may: what is put on one happens only when someone waits for it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from runtime_torch.meter import Meter

POISON = 0xFF


@dataclass(eq=False)
class Event:
    stream: Stream
    passed: bool = False


@dataclass(eq=False)
class Stream:
    name: str
    queue: list = field(default_factory=list)


class Streams:
    """The compute stream, one for each direction of copies, and which is the current one; `make` makes one by name."""

    def __init__(self, make):
        self.compute = make("compute")
        self._make, self._names = make, iter(("d2h", "h2d"))
        self._on = [self.compute]

    def compute_stream(self):
        return self.compute

    def new_stream(self):
        return self._make(next(self._names))

    @contextmanager
    def on(self, stream):
        self._on.append(stream)
        yield
        self._on.pop()


class LateDevice(Streams):
    """A backend of the stream lanes on CPU memory. The compute stream runs at once, as its work is real.

    The stream named `eager` runs as early as it may.
    """

    def __init__(self, eager=None):
        self.eager = eager
        super().__init__(Stream)
        self.log = []

    def record(self, stream):
        event = Event(stream, passed=stream is self.compute)
        self.log.append(("record", stream.name))
        stream.queue.append(event)
        if stream.name == self.eager:
            self.reach(event)
        return event

    def wait(self, stream, event):
        self.log.append(("wait", stream.name, event.stream.name))
        if stream is self.compute:
            self.reach(event)
        else:
            stream.queue.append(lambda: self.reach(event))

    def empty(self, nbytes):
        assert self._on[-1] is self.compute, "memory must come from the compute stream's allocator"
        self.log.append(("empty", nbytes))
        return torch.full((nbytes,), POISON, dtype=torch.uint8).untyped_storage()

    def copy(self, into, of):
        assert self._on[-1] is not self.compute
        self.log.append(("copy", self._on[-1].name, into.numel()))
        self._on[-1].queue.append(lambda: into.copy_(of))

    def reach(self, event):
        """Run the event's stream until it has passed."""
        while not event.passed:
            item = event.stream.queue.pop(0)
            if isinstance(item, Event):
                item.passed = True
            else:
                item()


class PoisoningMeter(Meter):
    """Overwrites what nobody holds any more, as an allocator would that gives it to someone else at once."""

    def __init__(self):
        super().__init__()
        self.spared = set()
        """Addresses of what the caller of a step goes on holding: its batch."""

    def release(self, storage):
        super().release(storage)
        if storage.data_ptr() not in {*self._holders, *self.spared}:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)
