"""Real processes: schedules whose microbatches are cut into slices train what whole microbatches train."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import msgspec
import pytest

pytest.importorskip("torch")

import torch
from runtime_cases import MODEL, TEXT, promise_exactly, schedule, tiny_profile
from small_schedules import Shape
from test_runtime_library import alone, start_ranks  # noqa: F401  (a fixture)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from user_layers import Scorer, crossing

import runtime_torch
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput
from optpipe_compiler.verify import verify
from optpipe_torch.launch.run import run
from optpipe_torch.models import known as models
from runtime_torch.batches import Batches

LINEAR_2, LOOP_2, V_2, LINEAR_4 = (0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 3)
TWO, THREE, FOUR = ((0, 3, 8),), ((0, 2, 5, 8),), ((0, 2, 4, 6, 8),)


def by_turns(*kinds):
    """One kind of treatment of a stage and unit after the other."""

    def of(stage, unit):
        microbatch, _, number = str(unit).partition(".")
        return kinds[(stage + int(microbatch) + int(number or 0)) % len(kinds)]

    return of


def moved(*kinds):
    """Ranges of the two layers of a stage: all of them, or the second alone."""

    def ranges(stage, unit):
        microbatch, _, number = str(unit).partition(".")
        first, end = 2 * stage + (int(microbatch) + int(number or 0)) % 2, 2 * stage + 2
        return [(kind, layer, layer + 1) for kind, layer in zip(kinds, range(first, end), strict=False)]

    return ranges


CASES = {
    "2 slices, kept, fused": (LINEAR_2, TWO, by_turns(True), moved()),
    "3 slices, offloaded and recomputed, split": (V_2, THREE, by_turns(False), moved("offload", "recompute")),
    "4 slices on 4 devices, recomputed": (LINEAR_4, FOUR, by_turns(True, False), moved("recompute")),
    "offloaded, split, in a loop": (LOOP_2, TWO, by_turns(False), moved("offload")),
    "two lengths in slices": (LINEAR_2, ((0, 3, 8), (0, 4, 5)), by_turns(True, False), moved("recompute")),
    "two lengths, whole": (LINEAR_2, ((0, 8), (0, 5)), by_turns(True, False), moved("offload")),
}


@pytest.mark.runtime
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_unpipelined_model(case):
    placement, cuts, fused, ranges = CASES[case]
    plan = schedule(Shape(placement, microbatches=3, fused=fused, ranges=ranges, tokens=8, cuts=cuts))
    plan = promise_exactly(plan)
    assert verify(plan) == []
    report = run(plan, steps=1, data_paths=[TEXT], check=True)
    assert report.check is not None
    assert report.check.ok, report.check
    for rank in report.ranks:
        assert 0 < rank.peak_activation_bytes <= rank.promised_activation_bytes
        assert rank.peak_host_bytes <= rank.promised_host_bytes


@pytest.mark.runtime
@pytest.mark.parametrize("devices", [2, 4])
def test_what_is_compiled_under_a_tight_cap_runs(devices):
    model = msgspec.structs.replace(MODEL, config={**MODEL.config, "layers": 6}, sequence_length=24)
    profile = tiny_profile(model, devices, cuts=(0, 8, 16, 24))
    options = Options(mem_bytes=10**9, microbatches=3, slices=3, time_limit_s=4.0, search=False, reproducible=True)
    roomy = compile_schedule(profile, options).schedule
    tight = max(device.peak_bytes for device in roomy.devices) * 3 // 5
    plan = compile_schedule(profile, dataclasses.replace(options, mem_bytes=tight)).schedule
    assert plan.setup.slices == 3
    kinds = {op.name for device in plan.devices for op in (*device.compute, *device.d2h)}
    assert kinds & {"offload", "recompute"}
    report = run(plan, steps=1, data_paths=[TEXT], check=True)
    assert report.check is not None
    assert report.check.ok, report.check
    for rank in report.ranks:
        assert 0 < rank.peak_activation_bytes <= rank.promised_activation_bytes
        assert rank.peak_host_bytes <= rank.promised_host_bytes


@pytest.mark.runtime
def test_slices_are_rehearsed():
    shape = Shape(V_2, microbatches=3, fused=by_turns(False), ranges=moved("offload"), tokens=8, cuts=THREE)
    plan = promise_exactly(schedule(shape, model=None))
    report = run(plan, steps=2, time_scale=2.0)
    assert report.losses == pytest.approx([4.0, 4.0])  # every microbatch passed all stages
    for rank in report.ranks:
        assert 0 < rank.peak_activation_bytes <= rank.promised_activation_bytes


REPLICAS = """
import sys
sys.path[:0] = sys.argv[1:]
from functools import partial
import msgspec, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
import runtime_torch, test_run_slices as case
from optpipe_torch.launch.check import unpipelined
from optpipe_torch.models import known as models

dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "pipeline"))
DDP = partial(DistributedDataParallel, process_group=mesh.get_group("data"))

def batch(model, replica):
    return models.batch(model, bytes(range(256)), torch.Generator().manual_seed(replica), 3)

for prepare in (DDP, partial(fully_shard, mesh=mesh["data"])):
    for fused in (True, False):
        moved = case.moved("recompute" if fused else "offload")
        shape = case.Shape((0, 0), microbatches=3, fused=case.by_turns(fused), ranges=moved, tokens=8, cuts=case.THREE)
        schedule = case.promise_exactly(case.schedule(shape))
        model = schedule.model
        wanted = {}
        for replica in range(2):
            inputs, target = batch(model, replica)
            for name, gradient in unpipelined(model, [inputs], target, 3)[1].items():
                wanted[name] = wanted.get(name, 0) + gradient / 2
        inputs, target = batch(model, dist.get_rank())
        stages = runtime_torch.build_stages(
            schedule, models.build(model), 0, "cpu", inputs=[inputs[:2]], target=target[:2], prepare=prepare
        )
        runner = runtime_torch.Runner(schedule, stages, group=mesh.get_group("pipeline"))
        for steps in (1, 2):  # gradients add up
            runner.step(inputs, target=target)
            for name, parameter in stages.module.named_parameters():
                number, _, rest = name.replace("module.", "").partition(".")
                found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                expected = steps * wanted[f"layer {number}: {rest}"]
                difference = (found - expected).abs().max() / expected.abs().max()
                assert difference < 1e-5, (prepare, fused, name, difference)
        assert runner.eval(inputs, target=target) > 0
dist.destroy_process_group()
"""


@pytest.mark.runtime
def test_replicas_and_shards_of_sliced_pipelines_have_the_mean_gradients():
    for rank in start_ranks(REPLICAS):
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors


# -- what is refused


class Mixing(nn.Linear):
    """Says nothing about slices."""


def built(plan, layers, **more):
    inputs, target = models.batch(MODEL, bytes(range(256)), torch.Generator().manual_seed(0), 1)
    return runtime_torch.build_stages(plan, layers, 0, "cpu", inputs=[inputs], target=target, **more)


def test_layers_that_do_not_say_that_they_can_be_sliced_are_refused():
    plan = schedule(Shape((0, 0), tokens=8, cuts=TWO))
    layers = models.build(plan.model)
    layers[1] = Mixing(16, 16)
    with pytest.raises(BadInput, match=r"layer 1 \(Mixing\) does not say that it can be sliced, and the schedule"):
        built(plan, layers)


def first_step(kind):
    """The first step of layers whose second one, or last one, is of this kind, in two slices."""
    plan = schedule(Shape((0,), layers_per_stage=3, microbatches=2, tokens=8, cuts=TWO))
    embedding, inner, head = crossing(kind)
    layers = [embedding, nn.Sequential(inner) if kind == "dropout" else inner, head]
    layers[1].sliceable = head.sliceable = True
    inputs, target = models.batch(MODEL, bytes(range(256)), torch.Generator().manual_seed(0), 2)
    stages = built(plan, layers)
    return runtime_torch.Runner(plan, stages, bytes_tolerance=None).step(inputs, target=target)


@pytest.mark.parametrize("kind", ["convolution", "convolution, dropout", "detached state", "sum"])
def test_layers_that_say_wrongly_that_they_can_be_sliced_are_refused_in_the_first_step(alone, kind):  # noqa: F811
    """As where a profile is estimated or written by hand: nothing has held their slices against the whole."""
    with pytest.raises(BadInput, match=r"one of the layers 0 to 2 .* says wrongly that it can be sliced, and its"):
        first_step(kind)


def test_layers_that_draw_random_numbers_can_be_sliced(alone):  # noqa: F811
    assert first_step("dropout").loss > 0


class Product(torch.autograd.Function):
    """A linear layer's product, with a backward of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.flatten(0, 1).t() @ gradient.flatten(0, 1)


class OwnProduct(nn.Module):
    sliceable = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))

    def forward(self, x):
        return Product.apply(x, self.weight)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_backward_of_its_own_adds_nothing_to_gradients_in_the_trial_before_the_first_step(alone, sharded):  # noqa: F811
    torch.manual_seed(0)
    plan = schedule(Shape((0, 0), microbatches=2, tokens=8, cuts=TWO))
    layers = [nn.Embedding(256, 8), OwnProduct(), OwnProduct(), Scorer(8)]
    layers[3].sliceable = True
    whole = nn.ModuleList(copy.deepcopy(layers))
    inputs, target = models.batch(MODEL, bytes(range(256)), torch.Generator().manual_seed(0), 2)
    whole[3](nn.Sequential(*whole[:3])(inputs), target).backward()
    prepare = partial(fully_shard, mesh=init_device_mesh("cpu", (1,))) if sharded else None
    stages, seen = built(plan, layers, prepare=prepare), []
    for parameter in stages.module.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)  # where an optimizer may step
    runtime_torch.Runner(plan, stages, bytes_tolerance=None).step(inputs, target=target)
    assert len(seen) == len(list(whole.parameters())) * (1 if sharded else 2 * 2)
    for found, wanted in zip(stages.module.parameters(), whole.parameters(), strict=True):
        gradient = found.grad.full_tensor() if sharded else found.grad
        torch.testing.assert_close(gradient, wanted.grad)


def test_a_batch_without_the_tokens_that_are_cut_is_refused():
    plan = schedule(Shape((0, 0), microbatches=1, tokens=8, cuts=TWO))
    stages = built(plan, models.build(plan.model))
    batches = Batches(plan, stages, None, None)
    inputs, target = models.batch(MODEL, bytes(range(256)), torch.Generator().manual_seed(0), 1)
    with pytest.raises(BadInput, match=r"the target has the shape \(2, 7\) in a microbatch, expected 8 tokens"):
        batches.cut_all([inputs], target[:, :7])


def test_microbatches_longer_than_the_sequences_they_are_cut_from_are_refused():
    plan = schedule(Shape((0, 0), microbatches=2, tokens=8, cuts=((0, 8), (0, 5))))
    stages = built(plan, models.build(plan.model))
    units = msgspec.structs.replace(plan.setup.units, tokens=7)
    longer = ir.seal(msgspec.structs.replace(plan, setup=msgspec.structs.replace(plan.setup, units=units)))
    with pytest.raises(BadInput, match=r"\$\.setup\.units: a microbatch has 8 tokens, expected at most the 7 of"):
        Batches(longer, stages, None, None)
