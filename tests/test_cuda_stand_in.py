"""Messages, times and pinned memory of a GPU, as far as a stand-in for torch.cuda shows them on a CPU."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from optpipe_compiler.errors import RunFailed  # noqa: E402
from optpipe_torch.emulate.peers import Arrival  # noqa: E402
from runtime_torch import cuda, gpu_channels, messages, timeline  # noqa: E402
from runtime_torch.gpu_channels import GpuChannels  # noqa: E402
from runtime_torch.messages import Mailbox  # noqa: E402
from runtime_torch.meter import Meter  # noqa: E402
from runtime_torch.timeline import OpRecorder  # noqa: E402


@dataclass(eq=False)
class Stream:
    name: str
    device: str = "gpu"
    log: list = field(default_factory=list)

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.stream.name}")


class Event:
    """Has happened once the test says so."""

    def __init__(self, enable_timing=False):
        self.happened, self.at_ms, self.stream = False, None, None

    def record(self, stream=None):
        self.stream = stream
        if stream is not None and hasattr(stream, "now_ms"):
            self.at_ms = stream.now_ms

    def query(self):
        return self.happened

    def synchronize(self):
        self.happened = True

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


class FakeCuda:
    """Streams by name, the current one, and what was asked of them in order."""

    def __init__(self):
        self.log, self.events = [], []
        self.current = Stream("compute", log=self.log)
        self.made = 0

    def Stream(self, device):
        self.made += 1
        return Stream(f"channel {self.made}", log=self.log)

    def Event(self, enable_timing=False):
        self.events.append(Event(enable_timing))
        return self.events[-1]

    def current_stream(self, device):
        return self.current

    def synchronize(self, device):
        self.log.append("synchronize")

    @contextmanager
    def stream(self, stream):
        self.current, before = stream, self.current
        yield
        self.current = before


class OnGpu:
    """A tensor that says it is on a GPU."""

    is_cuda, device = True, "gpu"

    def __init__(self):
        self.storage = torch.zeros(100).untyped_storage()

    def untyped_storage(self):
        return self.storage


class Group:
    def __init__(self, device):
        self.device = device

    def send(self, tensors, peer, tag):
        def wait():
            self.device.log.append(f"{self.device.current.name} joins {peer}")

        return SimpleNamespace(held=tensors, wait=wait)

    recv = send


def on_gpu(device, meter=None):
    return Mailbox(None, meter or Meter(), GpuChannels(Group(device), "gpu"))


@pytest.fixture
def device(monkeypatch):
    fake = FakeCuda()
    for module in (messages, gpu_channels, timeline):
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=fake))
    monkeypatch.setattr(gpu_channels, "unrecorded", lambda tensor: tensor)
    return fake


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_delivery_is_waited_for_by_streams_and_holds_no_buffer(device, kind):
    meter, buffer = Meter(), OnGpu()
    mailbox = on_gpu(device, meter)
    storage = StorageWeakRef(buffer.untyped_storage())
    meter.hold(buffer.untyped_storage())
    getattr(mailbox, kind)("message", buffer, 1)
    assert device.log == ["channel 1 joins 1"]
    device.current = Stream("d2h", log=device.log)
    mailbox.wait("message")
    # what is sent may be waited for on another stream than that of its memory, which is given away after the delivery
    owner = ["compute waits for channel 1"] if kind == "send" else []
    assert device.log[1:] == ["d2h waits for channel 1", *owner]
    if kind == "recv":
        meter.release(buffer.untyped_storage())
    assert meter.current_bytes == 0
    del buffer
    assert storage.expired()
    mailbox.wait("message")  # by another stream: the event is still there
    assert device.log[-1] == "d2h waits for channel 1"


def test_messages_of_two_peers_are_delivered_on_streams_of_their_own(device):
    mailbox = on_gpu(device)
    for number, peer in enumerate((1, 2, 1)):
        mailbox.recv(str(number), OnGpu(), peer)
    assert device.log == ["channel 1 joins 1", "channel 2 joins 2", "channel 1 joins 1"]


def test_a_sent_buffer_can_be_freed_without_waiting_once_its_event_has_happened(device):
    mailbox, buffer = on_gpu(device), OnGpu()
    mailbox.send("message", buffer, 1)
    assert not mailbox.is_delivered("message")
    device.events[-1].happened = True
    assert mailbox.is_delivered("message")


def test_what_an_emulated_peer_gets_arrives_after_it_is_computed():
    event = Event()
    arrival = Arrival(0, event)
    assert not arrival.is_delivered()
    arrival.wait()
    assert event.happened
    assert arrival.is_delivered()


def test_times_between_events_are_put_on_the_hosts_clock(device, monkeypatch):
    monkeypatch.setattr(timeline.time, "perf_counter_ns", lambda: 5_000_000)
    times = OpRecorder(SimpleNamespace(type="cuda"))
    device.current.now_ms = 100.0
    times.begin()
    marks = []
    for device.current.now_ms in (101.0, 103.5, 104.0):
        marks.append(times.now())
    times.add("late", "compute", marks[1], marks[2])
    times.add("early", "compute", marks[0], marks[1])
    found = times.collect()
    assert [(op.op_id, op.start_ns, op.end_ns) for op in found] == [
        ("early", 6_000_000, 8_500_000),
        ("late", 8_500_000, 9_000_000),
    ]
    assert device.log == ["synchronize", "synchronize"]


def test_pinned_memory_is_registered_once_and_given_up_with_its_last_tensor(monkeypatch):
    gc.collect()  # what other tests have left would be given up to this one's runtime
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: calls.append(("register", address, nbytes)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unregister", address)),
    )
    monkeypatch.setattr(cuda.torch.cuda, "cudart", lambda: runtime)
    with torch.device("meta"):  # the default device of a loop
        slab = cuda.pinned(5000)
    assert slab.device.type == "cpu"
    address, part = slab.data_ptr(), slab[10:20]
    assert calls == [("register", address, 5000)]
    del slab
    gc.collect()
    assert len(calls) == 1
    del part
    gc.collect()
    assert calls[1:] == [("unregister", address)]


def test_memory_that_cannot_be_pinned_is_a_failure_that_says_how_much(monkeypatch):
    runtime = SimpleNamespace(cudaHostRegister=lambda *arguments: 2)
    monkeypatch.setattr(cuda.torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(RunFailed, match=r"5000 bytes of pinned host memory.*cudaHostRegister says error 2"):
        cuda.pinned(5000)
    with pytest.raises(RunFailed, match="bytes of pinned host memory, which the schedule's offloads need, cannot be"):
        cuda.pinned(2**62)
