"""Measuring GPUs, as far as a CPU can show it: lanes on late streams, a stand-in for torch.cuda, links by topology."""

from __future__ import annotations

import io
import os
import weakref
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from rich.console import Console  # noqa: E402
from stream_device import LateDevice, PoisoningMeter, Stream  # noqa: E402

from optpipe_compiler.documents.files import canonical  # noqa: E402
from optpipe_compiler.documents.profile import parse, value_of  # noqa: E402
from optpipe_compiler.view.measured import render  # noqa: E402
from optpipe_torch.launch.worker import ALLOCATOR_SETTINGS, settle_on_gpu  # noqa: E402
from optpipe_torch.models import text  # noqa: E402
from optpipe_torch.profiler import cuda as measure_cuda  # noqa: E402
from optpipe_torch.profiler import layers as measure_layers  # noqa: E402
from optpipe_torch.profiler.copies import MICROBATCHES, _alone, _Copier, _duplex, stream_lanes, time_copies  # noqa: E402
from optpipe_torch.profiler.cuda import CudaTimer  # noqa: E402
from optpipe_torch.profiler.records import Copies, Messages, assemble  # noqa: E402
from optpipe_torch.profiler.timer import Timer  # noqa: E402
from runtime_torch.gpu_channels import CONNECTIONS  # noqa: E402
from tests import test_cli  # noqa: E402
from tests.test_measure import TINY, findings  # noqa: E402

run = test_cli.run

# -- copies on streams


class LateGauge(Timer):
    """A CPU whose copies are put on streams that run as late as they may."""

    def __init__(self) -> None:
        super().__init__()
        self.slabs: list[int] = []
        self.alive: list[weakref.ref[Any]] = []
        self.backend = LateDevice()

    def lanes(self, stage: Any, host_bytes: int) -> Any:
        def allocate(nbytes: int) -> Any:
            self.slabs.append(nbytes)
            assert not any(slab() for slab in self.alive), "one slab at a time: no page may be pinned twice"
            slab = torch.empty(nbytes, dtype=torch.uint8)
            self.alive.append(weakref.ref(slab.untyped_storage()))
            return slab

        names = cycle(("d2h", "h2d"))
        self.backend.new_stream = lambda: Stream(next(names))
        stage.meter = PoisoningMeter()
        return stream_lanes(stage, host_bytes, self.backend, allocate)


@pytest.fixture
def benches() -> measure_layers.Benches:
    return measure_layers.Benches(TINY.model(), text.default_text())


@pytest.mark.parametrize("timer", [Timer(), LateGauge()], ids=["threads", "streams"])
def test_copies_are_timed_as_often_as_asked_on_either_kind_of_lanes(timer, benches):
    copies = time_copies(timer, benches, 1, 8, bool)
    bench = benches.stage(1, 2)
    bench.forward(0)
    assert copies.nbytes == bench.stage.saved_bytes(0)
    counts = (copies.d2h, copies.h2d, copies.duplex_d2h, copies.duplex_h2d)
    assert [len(samples) for samples in counts] == [8] * 4
    assert len(copies.latency) == 16
    assert not any(slab() for slab in getattr(timer, "alive", ()))
    assert all(ns > 0 for samples in (*counts, copies.latency) for ns in samples)


def test_copies_on_streams_use_no_more_than_their_slab_and_spoil_no_gradient(benches):
    timer = LateGauge()
    bench, other = benches.stage(1, 2), benches.stage(1, 2)
    copier = _Copier(timer, bench)
    for timed in (_alone, _duplex):
        timed(copier, 8)
    assert timer.slabs == [MICROBATCHES * copier.nbytes]
    other.forward(0)
    expected = other.stage.backward(0, other.gradient)
    for microbatch in range(MICROBATCHES):
        assert torch.equal(bench.stage.backward(microbatch, bench.gradient), expected)


def test_an_offload_runs_while_another_microbatch_is_reloaded(benches):
    timer = LateGauge()
    _duplex(_Copier(timer, benches.stage(1, 2)), 4)
    waits = [entry[1:] for entry in timer.backend.log if entry[0] == "wait"]
    assert ("d2h", "h2d") in waits
    assert ("h2d", "d2h") in waits


# -- the timer of a GPU, on a stand-in for torch.cuda


@dataclass
class FakeCuda:
    """What the timer calls; time passes by being told to, memory is what tests say."""

    now_ms: float = 0.0
    allocated: int = 1000
    peak: int = 0
    calls: list[str] = field(default_factory=list)
    bus: int = 0x3B

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.now_ms)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def set_device(self, index: int) -> None:
        self.calls.append(f"set_device {index}")

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name="Fake GPU", pci_domain_id=0, pci_bus_id=self.bus, pci_device_id=index)

    def synchronize(self, device: Any) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 70_000, 80_000

    def memory_allocated(self, device: Any) -> int:
        return self.allocated

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.peak = self.allocated

    def max_memory_allocated(self, device: Any) -> int:
        return self.peak

    def allocate(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(measure_cuda.torch, "cuda", cuda)
    return cuda


def test_times_are_between_events_and_are_there_once_the_device_has_settled(fake):
    timer, times = CudaTimer(1), []
    for passed in (2.5, 0.25):
        with timer.timed(times):
            fake.now_ms += passed
        fake.now_ms += 7
    assert times == []
    timer.settle()
    assert (times, fake.calls) == ([2_500_000, 250_000], ["set_device 1", "synchronize"])
    timer.settle()
    assert len(times) == 2


def test_peaks_are_what_the_allocator_rises_by_during_each_op(fake):
    def op(*changes: int) -> Any:
        return lambda: [fake.allocate(change) for change in changes]

    assert CudaTimer(0).peaks({"a": op(500, -200, 100), "b": op(-300), "c": op(-100, 50)}) == {"a": 500, "b": 0, "c": 0}


def test_memory_is_the_whole_device_and_what_is_taken_of_it_without_tensors(fake):
    timer = CudaTimer(0)
    assert timer.memory() == (80_000, 10_000)
    assert fake.calls[-2:] == ["synchronize", "empty_cache"]
    assert timer.room_bytes(4) == 35_000


def test_the_lead_is_as_long_as_it_is_said_to_be(fake, monkeypatch):
    timer = CudaTimer(0)
    filled: list[int] = []

    def fill(count: int) -> None:
        filled.append(count)
        fake.now_ms += 0.3 * count

    monkeypatch.setattr(timer, "_fill", fill)
    timer.lead()
    timer.lead()
    assert filled == [1, 1, 17, 17]  # 17 x 0.3 ms are 5 ms and more


@pytest.mark.parametrize("found", ["0000:3a:00.0", None])
def test_a_host_link_is_named_by_machine_and_root_port(fake, monkeypatch, tmp_path, found):
    asked: list[str] = []
    monkeypatch.setattr(measure_cuda, "root_port", lambda address: asked.append(address) or found)
    (tmp_path / "boot_id").write_text("a-machine\n")
    monkeypatch.setattr(measure_cuda, "BOOT_ID", tmp_path / "boot_id")
    timer = CudaTimer(2)
    assert asked == ["0000:3b:02.0"]
    assert timer.host_link == (found and f"a-machine {found}")
    assert timer.kind == "Fake GPU"


# -- the command


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--device is cuda, expected cpu: torch sees no GPU on this machine, at least 1 needed"),
        (
            ("--model", "gpt2", "--layers", "1"),
            "--device is cuda, expected cpu: torch sees no GPU on this machine, at least 1 needed",
        ),
        (
            ("--model", "gpt2", "--gpu", "h100-sxm"),
            "--device is cuda, which only measuring takes; expected no --gpu",
        ),
        (
            ("--from-run", "run.json"),
            "--device is cuda, which --from-run takes from the run; expected only --profile and -o",
        ),
    ],
)
def test_a_device_that_cannot_be_measured_is_refused_in_one_sentence(run, monkeypatch, arguments, sentence):
    monkeypatch.setattr("optpipe_torch.profiler.measure.gpu_count", lambda: 0)
    assert test_cli.refused(run("profile", "--device", "cuda", *arguments), 2) == sentence


@pytest.mark.parametrize(
    ("gpus", "asked", "says"), [(1, (), True), (0, (), False), (2, (), False), (1, ("--device", "cpu"), False)]
)
def test_a_gpu_that_is_left_out_is_told_of(run, monkeypatch, gpus, asked, says):
    made = assemble(TINY.model(), 2, [findings()])
    monkeypatch.setattr("optpipe_torch.profiler.measure.measure", lambda *_: made)
    monkeypatch.setattr("optpipe_torch.launch.job.gpu_count", lambda: gpus)
    done = run("profile", *asked)
    assert done.code == 0, done.err
    told = "torch sees 1 GPU, fewer than the 2 devices, and these are costs of the CPU: --device cuda measures a GPU"
    assert (told in done.err) == says


# -- the profile


def on_gpu(link: str | None, *, alone: int = 1_000_000, together: int = 1_000_000, memory: int = 80) -> Any:
    found = findings(alone=alone, together=together)
    return replace(found, kind="Fake GPU", memory=(memory * 10**9, 10**9 + memory), host_link=link)


def speeds(link: Any) -> list[int]:
    return [value_of(cost) for cost in (link.d2h_bytes_per_s, link.duplex_h2d_bytes_per_s)]


def test_links_are_those_of_the_topology_with_the_bandwidth_that_its_neighbours_leave():
    found = [
        on_gpu("a", alone=1_000_000, together=1_900_000),  # turns are taken: a copy alone tells
        on_gpu("b", alone=1_000_000, together=1_600_000),
        on_gpu("a", alone=1_000_000, together=1_900_000),
        on_gpu("c", alone=1_000_000, together=3_000_000),  # more is lost than by taking turns
        on_gpu("c", alone=1_000_000, together=3_000_000),
    ]
    links = assemble(TINY.model(), 5, found).machine.links
    assert [link.devices for link in links] == [[0, 2], [1], [3, 4]]
    duplex = 8_000_000 * 10**9
    assert speeds(links[0]) == [8 * 10**9, round(duplex / 1_990_000)]
    assert speeds(links[1]) == [5 * 10**9, round(duplex / 3_190_000)]
    assert speeds(links[2]) == pytest.approx([8_000_000e9 / 1_500_000, duplex / 2_995_000])
    assert all(link.d2h_bytes_per_s.source == "measured" for link in links)


def test_where_the_topology_hides_a_link_the_bandwidths_tell_who_shares():
    (link,) = assemble(
        TINY.model(), 2, [on_gpu("a", together=1_900_000), on_gpu(None, together=1_900_000)]
    ).machine.links
    assert link.devices == [0, 1]


@pytest.mark.parametrize("known", [True, False])
def test_one_gpu_stands_for_all_devices_and_what_it_cannot_show_is_called_estimated(known):
    alone = replace(on_gpu("a" if known else None), messages=Messages(1000, 101_000))
    profile = assemble(TINY.model(), 3, [alone])
    machine = profile.machine
    assert parse(canonical(profile), "p.json") == profile
    assert profile.name.endswith("-cuda")
    sources = [(link.devices, link.h2d_bytes_per_s.source, value_of(link.h2d_bytes_per_s)) for link in machine.links]
    speed = 8 * 10**9
    if known:
        assert sources == [([0], "measured", speed), ([1], "estimated", speed), ([2], "estimated", speed)]
    else:
        assert sources == [(None, "estimated", speed)]
    (message,) = machine.p2p
    assert (message.latency_ns.source, message.latency_ns.value) == ("estimated", 20_000)
    assert (message.bytes_per_s.source, message.bytes_per_s.value) == ("estimated", speed)
    assert (machine.kind, value_of(machine.memory_bytes)) == ("Fake GPU", 80 * 10**9)


def test_devices_beyond_the_gpus_are_linked_as_the_gpus_are():
    pattern = [on_gpu("a"), on_gpu("a"), on_gpu("b")]
    links = assemble(TINY.model(), 8, pattern).machine.links
    assert sorted(link.devices for link in links) == [[0, 1], [2], [3, 4], [5], [6, 7]]
    assert {tuple(link.devices) for link in links if link.d2h_bytes_per_s.source == "measured"} == {(0, 1), (2,)}


def test_the_smallest_gpu_and_the_largest_reserve_count():
    machine = assemble(TINY.model(), 2, [on_gpu("a"), on_gpu("b", memory=40)]).machine
    assert (value_of(machine.memory_bytes), value_of(machine.reserve_bytes)) == (40 * 10**9, 10**9 + 80 + 2 * 10**9)


def test_what_is_shown_says_who_shares_a_link_and_what_is_estimated():
    out = io.StringIO()
    profile = assemble(TINY.model(), 3, [on_gpu("a"), on_gpu("a")])
    Console(file=out, width=120).print(render(profile, "p.json"))
    lines = out.getvalue().splitlines()
    assert "3 devices (Fake GPU)" in out.getvalue()
    assert "host copies 8.00 GB/s out, 8.00 GB/s in, one link of devices 0, 1" in lines
    assert "host copies 8.00 GB/s out, 8.00 GB/s in, device 2 (estimated)" in lines


def test_the_table_of_layers_fits_80_columns_with_whole_names():
    out = io.StringIO()
    path = Path(__file__).parents[1] / "bench/h100.json"
    Console(file=out, width=80).print(render(parse(path.read_text(), str(path)), "p.json"))
    lines = out.getvalue().splitlines()
    assert [line[:10].rstrip() for line in lines[1:7:2]] == ["embedding", "block x 8", "head"]
    assert lines[7] == "F: forward; I, W, B: gradients of input, weights, both; R: recomputation"
    assert max(map(len, lines)) <= 80


def test_copies_alone_are_missing_where_another_process_of_the_link_made_them():
    first, second = on_gpu("a", together=1_900_000), on_gpu("a", together=1_900_000)
    second.copies_alone = None
    (link,) = assemble(TINY.model(), 2, [first, second]).machine.links
    assert isinstance(first.copies_alone, Copies)
    assert value_of(link.d2h_bytes_per_s) == 8 * 10**9


@pytest.mark.parametrize("said", ALLOCATOR_SETTINGS)
def test_the_segments_of_an_allocator_grow_unless_the_environment_says_how_it_shall_be(said, monkeypatch):
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv(said, "max_split_size_mb:512")
    settle_on_gpu()
    assert [os.environ.get(name) for name in ALLOCATOR_SETTINGS if name != said] == [None]
    monkeypatch.delenv(said)
    settle_on_gpu()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize(("said", "found"), [(None, "32"), ("16", "16")])
def test_streams_have_work_queues_of_their_own_unless_the_environment_says_how_many_there_are(said, found, monkeypatch):
    monkeypatch.setenv(CONNECTIONS, said or "")
    if said is None:
        monkeypatch.delenv(CONNECTIONS)
    settle_on_gpu()
    assert os.environ[CONNECTIONS] == found
