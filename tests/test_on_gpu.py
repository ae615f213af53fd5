"""What a GPU alone can show: real streams, pinned memory, events, the caching allocator, NCCL with one rank.

`pytest -m gpu` runs these on a GPU; elsewhere those that a CPU can also run do so, and the others are left out.
"""

from __future__ import annotations

import gc
import os

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from runtime_cases import TEXT  # noqa: E402
from test_runtime_streams import one_device  # noqa: E402

from optpipe_compiler.compiler import Options, compile_schedule  # noqa: E402
from optpipe_compiler.documents.files import canonical  # noqa: E402
from optpipe_compiler.documents.profile import parse, value_of  # noqa: E402
from optpipe_torch.emulate.alone import emulate  # noqa: E402
from optpipe_torch.launch.job import gpu_count  # noqa: E402
from optpipe_torch.launch.run import run  # noqa: E402
from optpipe_torch.launch.worker import settle_on_gpu  # noqa: E402
from optpipe_torch.models import text  # noqa: E402
from optpipe_torch.models.layer_kernels import rms_norm  # noqa: E402
from optpipe_torch.profiler.copies import time_copies  # noqa: E402
from optpipe_torch.profiler.cuda import CudaTimer  # noqa: E402
from optpipe_torch.profiler.layers import Benches  # noqa: E402
from optpipe_torch.profiler.measure import MeasureOptions, measure  # noqa: E402
from runtime_torch.cuda import pinned  # noqa: E402
from runtime_torch.gpu_channels import unrecorded  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.runtime]
if gpu_count():
    settle_on_gpu()  # torch reads its environment once, whichever test is the first
on_gpu = pytest.mark.skipif(gpu_count() == 0, reason="needs a GPU, and -m gpu")
SMALL = MeasureOptions(
    devices=2, device="cuda", layers=2, hidden=256, heads=4, sequence_length=128, microbatch_size=4, samples=8
)


@pytest.fixture
def timer():
    return CudaTimer(0)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("seed", range(2))
def test_a_device_alone_has_the_gradients_of_the_unpipelined_model_within_its_promise(seed, split):
    plan = one_device(seed, split=split)
    assert plan.devices[0].d2h
    report = run(plan, steps=3, data_paths=[TEXT], check=True)
    assert report.check.ok, report.check
    assert report.backend == ("nccl" if gpu_count() else "gloo")
    (rank,) = report.ranks
    assert 0 < rank.peak_activation_bytes <= rank.promised_activation_bytes
    assert 0 < rank.peak_host_bytes <= rank.promised_host_bytes
    assert len(report.losses) == 3


@on_gpu
def test_a_message_leaves_its_buffer_to_what_comes_next_on_the_stream_and_torch_alone_would_not():
    aside = torch.cuda.Stream()

    def is_used_again(sent):
        torch.cuda.synchronize()
        buffer = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
        address = buffer.data_ptr()
        with torch.cuda.stream(aside):
            torch.cuda._sleep(10**9)
        sent(buffer).record_stream(aside)  # as torch does with what is sent over NCCL
        del buffer
        return torch.empty(4 << 20, dtype=torch.uint8, device="cuda").data_ptr() == address

    assert not is_used_again(lambda buffer: buffer)
    assert is_used_again(unrecorded)


@on_gpu
def test_streams_that_wait_hold_up_no_others():
    streams = [torch.cuda.Stream() for _ in range(16)]
    numbers = [torch.zeros(1, device="cuda").add_(1) for _ in streams]  # memory and kernels are there before
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(10**9)
        late = torch.cuda.Event()
        late.record()
    ends = []
    for place, (stream, number) in enumerate(zip(streams[1:], numbers[1:], strict=True)):
        with torch.cuda.stream(stream):
            if place % 2:
                stream.wait_event(late)
            number.add_(1)
            ends.append(stream.record_event())
    for end in ends[::2]:
        end.synchronize()
    assert not late.query()


@on_gpu
def test_an_eager_group_is_known_and_can_be_split():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)
        assert dist.split_group(dist.group.WORLD, [[0]], group_desc="optpipe").size() == 1
    finally:
        dist.destroy_process_group()


@on_gpu
def test_the_allocator_has_the_segments_that_the_environment_asks_for():
    kept = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    (segment,) = (s for s in torch.cuda.memory_snapshot() if 0 <= kept.data_ptr() - s["address"] < s["total_size"])
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "")
    assert segment["is_expandable"] == ("expandable_segments:True" in settings)


@on_gpu
def test_an_op_takes_the_time_between_its_events_and_more_work_takes_longer(timer):
    few, many = [], []
    square = torch.ones(2048, 2048, device=timer.device)
    for _ in range(5):
        timer.lead()
        for into, products in ((few, 2), (many, 40)):
            with timer.timed(into):
                for _ in range(products):
                    torch.mm(square, square)
    assert few == []
    timer.settle()
    assert len(few) == len(many) == 5
    assert 0 < sorted(few)[2] < sorted(many)[2]


@on_gpu
def test_the_peak_of_an_op_is_what_the_allocator_rises_by(timer):
    def op():
        torch.empty(2**22, dtype=torch.uint8, device=timer.device)
        return torch.empty(2**21, dtype=torch.uint8, device=timer.device)

    assert timer.peaks({"op": op, "nothing": lambda: None}) == {"op": 2**22, "nothing": 0}


@on_gpu
def test_memory_is_the_whole_gpu_and_what_is_taken_without_tensors(timer):
    total, taken = timer.memory()
    assert total == torch.cuda.mem_get_info(0)[1]
    assert 0 < taken < total
    assert 0 < timer.room_bytes(1) < total


@on_gpu
def test_pinned_memory_is_copied_both_ways_and_can_be_had_again():
    for _ in range(2):  # the same pages may come back: they can only be registered anew where they were given up
        slab, values = pinned(3 * 2**20), torch.randint(256, (3 * 2**20,), dtype=torch.uint8)
        assert slab.is_pinned()
        slab.copy_(values)
        there = torch.empty_like(slab, device="cuda").copy_(slab, non_blocking=True)
        torch.cuda.synchronize()
        slab.zero_()
        slab.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(slab, values)
        del slab
        gc.collect()


@on_gpu
def test_copies_on_streams_are_timed_as_often_as_asked(timer):
    copies = time_copies(timer, Benches(SMALL.model(), text.default_text(), timer.device), 1, 8, bool)
    assert [len(t) for t in (copies.d2h, copies.h2d, copies.duplex_d2h, copies.duplex_h2d)] == [8] * 4
    assert all(ns > 0 for t in (copies.latency, copies.d2h, copies.h2d) for ns in t)


@on_gpu
def test_a_measured_gpu_runs_its_plan_under_its_promise():
    profile = measure(SMALL, lambda what, part: None)
    assert parse(canonical(profile), "p.json") == profile
    assert profile.name.endswith("-cuda")
    assert profile.machine.kind == torch.cuda.get_device_name(0)
    assert value_of(profile.machine.memory_bytes) == torch.cuda.mem_get_info(0)[1]
    whole = value_of(profile.machine.memory_bytes)  # other tests' processes are in the reserve
    plan = compile_schedule(profile, Options(mem_bytes=whole, microbatches=4, time_limit_s=1)).schedule
    for rank in range(2):
        report = emulate(plan, rank, steps=2, data=text.default_text(), on_event=lambda event: None)
        assert 0 < report.peak_activation_bytes <= report.promised_activation_bytes


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_and_its_gradients_are_those_of_exact_arithmetic(dtype):
    x, weight, gradient = (torch.randn(size, device="cuda", dtype=dtype) for size in ((3, 5, 64), (64,), (3, 5, 64)))
    found, exact = [], []
    for into, kind in ((found, dtype), (exact, torch.float64)):
        leaves = [tensor.to(kind, copy=True).requires_grad_() for tensor in (x, weight)]
        function = rms_norm if kind is dtype else _rms_norm_in_full
        out = function(*leaves, 1e-5)
        out.backward(gradient.to(kind))
        into += [out, *(leaf.grad for leaf in leaves)]
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours.double() - theirs).norm() < (1e-6 if dtype is torch.float32 else 1e-2) * theirs.norm()


def _rms_norm_in_full(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
