"""Replicas of a pipeline in DDP or FSDP2: the mean gradients over all microbatches of all replicas, reduced once."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from test_runtime_library import HIDDEN, LENGTH, MICROBATCHES, Scores, batch, builders, microbatch, plan, start_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import runtime_torch
from optpipe_compiler.errors import BadInput
from runtime_torch.swap import Mover

REPLICAS = """
import sys
sys.path[:0] = sys.argv[1:]
from functools import partial
import torch, torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
import runtime_torch, test_runtime_library as case

dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "pipeline"))
data = mesh["data"]
mixed = partial(MixedPrecisionPolicy, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DDP = partial(DistributedDataParallel, process_group=mesh.get_group("data"))
KINDS = {
    "DDP": (DDP, None, 1e-6),
    "replicate": (partial(replicate, mesh=data), None, 1e-6),
    "sharded": (partial(fully_shard, mesh=data), None, 1e-6),
    "mixed": (partial(fully_shard, mesh=data, mp_policy=mixed()), torch.bfloat16, 0.05),
    "mixed, floats between": (partial(fully_shard, mesh=data, mp_policy=mixed(output_dtype=torch.float32)), None, 0.05),
}

def nested(layer, root):
    for part in layer.children():
        fully_shard(part, mesh=data)
    return fully_shard(layer, mesh=data) if root else layer

KINDS |= {
    "within a sharded layer": (partial(nested, root=True), None, 1e-6),
    "only within": (partial(nested, root=False), None, 1e-6),
    "never resharded": (partial(fully_shard, mesh=data, reshard_after_forward=False), None, 1e-6),
    "replicate, mixed": (partial(replicate, mesh=data, mp_policy=mixed()), torch.bfloat16, 0.05),
}

def batch(replica):
    generator = torch.Generator().manual_seed(replica)
    tokens, target = torch.randint(16, (2, 2 * case.MICROBATCHES, case.LENGTH), generator=generator)
    return (tokens, torch.rand(2 * case.MICROBATCHES, case.LENGTH, generator=generator) < 0.7), target

wanted = {}
for replica in range(2):
    case.batch = partial(batch, replica)
    for name, parameter in case.reference()[1].named_parameters():
        wanted[name] = wanted.get(name, 0) + parameter.grad / 2

for kind, (prepare, floats, tolerance) in KINDS.items():
    for fused in (True, False):
        schedule = case.plan((0, 0), fused=fused, ranges=case.RANGES["recompute" if fused else "offload"])
        stages = runtime_torch.build_stages(
            schedule, case.builders(), 0, "cpu", prepare=prepare, float_dtype=floats, **case.microbatch()
        )
        runner = runtime_torch.Runner(schedule, stages, group=mesh.get_group("pipeline"))
        inputs, target = batch(dist.get_rank())
        for steps in range(1, 4):  # gradients add up
            with torch.profiler.profile() as profiler:
                runner.step(*inputs, target=target)
            reductions = sum(event.name in ("gloo:all_reduce", "gloo:reduce_scatter") for event in profiler.events())
            wanted_reductions = 6 if kind in ("within a sharded layer", "only within") else case.LAYERS
            assert reductions == wanted_reductions, (kind, fused, reductions)
            for name, parameter in stages.module.named_parameters():
                found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                expected = steps * wanted[name.replace("module.", "")]
                difference = (found - expected).abs().max() / expected.abs().max()
                assert difference < tolerance, (kind, fused, name, difference)
        assert runner.eval(*inputs, target=target) > 0
dist.destroy_process_group()
"""


@pytest.mark.runtime
def test_replicas_reduce_the_mean_gradients_once_per_step_and_steps_add_up():
    for rank in start_ranks(REPLICAS, KINETO_LOG_LEVEL="99"):
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors


@pytest.fixture
def alone(tmp_path):
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_communication_hook_is_refused_since_nothing_would_call_it(alone):
    def wrapped(layer: nn.Module) -> nn.Module:
        module = DistributedDataParallel(layer)
        module.register_comm_hook(None, allreduce_hook)
        return module

    with pytest.raises(BadInput, match="DistributedDataParallel with a communication hook, static_graph or mixed"):
        runtime_torch.build_stages(plan((0, 0)), builders(), 0, "cpu", prepare=wrapped, **microbatch())


def by_hooks(layer: nn.Module) -> nn.Module:
    return pytest.importorskip("torch.distributed._composable.replicate").replicate(layer)


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (
            partial(FullyShardedDataParallel, device_id=torch.device("cpu")),
            "FullyShardedDataParallel, FSDP of the first",
        ),
        (by_hooks, "_composable.replicate, DDP by hooks"),
        (lambda layer: nn.Sequential(by_hooks(layer)), "_composable.replicate, DDP by hooks"),
    ],
)
def test_what_reduces_in_each_backward_is_refused(alone, wrap, kind):
    with pytest.raises(BadInput, match=rf"in .*{kind}.*, expected fully_shard \(FSDP2\) or DistributedDataParallel"):
        runtime_torch.build_stages(plan((0, 0)), builders(), 0, "cpu", prepare=wrap, **microbatch())


@pytest.mark.parametrize("around", [False, True])
def test_modules_that_one_call_has_sharded_are_refused_unless_the_layer_around_them_is_sharded_too(alone, around):
    mesh = init_device_mesh("cpu", (1,))

    def shard(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Sequential):
            fully_shard(list(layer), mesh=mesh)
        return layer if isinstance(layer, nn.Sequential) and not around else fully_shard(layer, mesh=mesh)

    pairs = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)) for _ in range(2)]
    layers = [nn.Embedding(16, HIDDEN), *pairs, Scores(HIDDEN, 16)]
    given = {"prepare": shard, "inputs": [TOKENS[:2]], "target": TOKENS[:2]}
    if not around:
        with pytest.raises(BadInput, match=r"modules that one fully_shard\(\[...\]\) took together, and none around"):
            runtime_torch.build_stages(plan((0, 0)), layers, 0, "cpu", **given)
        return
    runner = runtime_torch.Runner(plan((0, 0)), runtime_torch.build_stages(plan((0, 0)), layers, 0, "cpu", **given))
    losses = [runner.step(TOKENS, target=TOKENS).loss for _ in range(2)]
    assert losses[0] == losses[1] > 0


def test_a_layer_without_a_trained_parameter_is_refused_in_ddp_in_one_sentence(alone):
    def wrapped(layer: nn.Module) -> nn.Module:
        return DistributedDataParallel(layer.requires_grad_(False))

    with pytest.raises(BadInput, match="layer 0 has no trained parameter, which DistributedDataParallel refuses"):
        runtime_torch.build_stages(plan((0, 0)), builders(), 0, "cpu", prepare=wrapped, **microbatch())


def wrapped_where_trained(layer: nn.Module) -> nn.Module:
    return DistributedDataParallel(layer) if any(p.requires_grad for p in layer.parameters()) else layer


@pytest.mark.parametrize("prepare", [wrapped_where_trained, lambda layer: layer], ids=["replicas", "none"])
def test_a_layer_that_was_not_wrapped_because_it_was_frozen_is_refused_once_it_trains(alone, prepare):
    layers = model()
    layers[1].requires_grad_(False)
    stages = runtime_torch.build_stages(
        plan((0, 0)), layers, 0, "cpu", prepare=prepare, inputs=[TOKENS[:2]], target=TOKENS[:2]
    )
    runner = runtime_torch.Runner(plan((0, 0)), stages)
    before = runner.step(TOKENS, target=TOKENS).loss
    layers[1].requires_grad_()
    if prepare is wrapped_where_trained:
        with pytest.raises(BadInput, match="layer 1 is trained, and was frozen when `prepare` left it as it is"):
            runner.step(TOKENS, target=TOKENS)
        layers[1].requires_grad_(False)
    assert runner.step(TOKENS, target=TOKENS).loss == before


def test_a_parameter_that_came_after_fully_shard_is_refused(alone):
    shard = partial(fully_shard, mesh=init_device_mesh("cpu", (1,)))
    stages = runtime_torch.build_stages(
        plan((0, 0)), model(), 0, "cpu", prepare=shard, inputs=[TOKENS[:2]], target=TOKENS[:2]
    )
    runner = runtime_torch.Runner(plan((0, 0)), stages)
    runner.step(TOKENS, target=TOKENS)
    stages.module["2"].adapter = nn.Linear(HIDDEN, HIDDEN)
    with pytest.raises(BadInput, match=r"parameter adapter.weight, which came after fully_shard: nothing averages"):
        runner.step(TOKENS, target=TOKENS)
    stages.module["2"].adapter.requires_grad_(False)
    assert runner.step(TOKENS, target=TOKENS).loss > 0


def test_a_frozen_layer_in_ddp_does_not_move(alone):
    layers = model()
    stages = runtime_torch.build_stages(
        plan((0, 0)), layers, 0, "cpu", prepare=DistributedDataParallel, inputs=[TOKENS[:2]], target=TOKENS[:2]
    )
    layers[1].requires_grad_(False)
    with pytest.raises(BadInput, match="layer 1 cannot move: it has no trained parameter now, and Distributed"):
        Mover(stages, 0).pack([(1, 0, 1)])


class Fails(torch.autograd.Function):
    """Its backward raises when the number of its calls is `at`."""

    calls, at = 0, 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Fails.calls += 1
        if Fails.calls == Fails.at:
            raise ValueError("no more")
        return gradient


class Fragile(nn.Linear):
    def forward(self, x):
        return Fails.apply(super().forward(x))


class Picky(Scores):
    def forward(self, x, target):
        if target.max() > 15:
            raise ValueError("no such token")
        return super().forward(x, target)


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(16, HIDDEN), Fragile(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), Picky(HIDDEN, 16)]


def gradients(tokens: Tensor) -> list[Tensor]:
    """Of the same layers without a pipeline."""
    whole = nn.ModuleList(model())
    embedding, *inner, scores = whole
    scores(nn.Sequential(*inner)(embedding(tokens)), tokens).backward()
    return [parameter.grad for parameter in whole.parameters()]


TOKENS = torch.arange(2 * MICROBATCHES * LENGTH).view(-1, LENGTH) % 16
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("calls", [False, True], ids=["steps alone", "a call of a layer between"])
def test_a_layer_that_is_called_before_an_optimizer_steps_trains_on_with_what_that_made(alone, calls):
    """Outside of a step the call leaves the whole parameters, and the optimizer changes the shards."""
    schedule, (inputs, target) = plan((0, 0)), batch()
    shard = partial(fully_shard, mesh=init_device_mesh("cpu", (1,)))
    losses = []
    for prepare in (None, shard):
        stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", prepare=prepare, **microbatch())
        runner = runtime_torch.Runner(schedule, stages)
        optimizer = torch.optim.SGD(stages.module.parameters(), lr=0.5)
        for _ in range(2):
            runner.step(*inputs, target=target)
            if calls:
                with torch.no_grad():
                    stages.module["0"](*inputs)
            optimizer.step()
            optimizer.zero_grad()
        losses.append((runner.eval(*inputs, target=target), runner.step(*inputs, target=target).loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_after_a_refusal_shards_are_shards_and_the_next_step_runs(alone):
    layers = model()
    layers[3].weight = layers[0].weight
    schedule = plan((0, 0))
    shard = partial(fully_shard, mesh=init_device_mesh("cpu", (1,)))
    stages = runtime_torch.build_stages(
        schedule, layers, 0, "cpu", prepare=shard, inputs=[TOKENS[:2]], target=TOKENS[:2]
    )
    runner = runtime_torch.Runner(schedule, stages)
    with pytest.raises(ValueError, match="no such token"):
        runner.step(TOKENS, target=TOKENS + 16)
    assert all(isinstance(parameter.data, DTensor) for parameter in stages.module.parameters())
    assert runner.step(TOKENS, target=TOKENS).loss > 0


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED], ids=["plain", "mixed"])
def test_a_runner_after_a_backward_that_failed_has_no_gradients_of_it(alone, monkeypatch, policy, fused):
    schedule = plan((0, 0), fused=fused)
    shard = partial(fully_shard, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    stages = runtime_torch.build_stages(
        schedule,
        model(),
        0,
        "cpu",
        prepare=shard,
        float_dtype=policy.param_dtype,
        inputs=[TOKENS[:2]],
        target=TOKENS[:2],
    )
    monkeypatch.setattr(Fails, "at", Fails.calls + 2)
    with pytest.raises(ValueError, match="no more"):
        runtime_torch.Runner(schedule, stages).step(TOKENS, target=TOKENS)
    if not hasattr(FSDPModule, "reset_iter_state"):  # before torch 2.13
        with pytest.raises(BadInput, match="expected it made and sharded anew"):
            runtime_torch.Runner(schedule, stages)
        return
    runner = runtime_torch.Runner(schedule, stages)
    stages.module.zero_grad()
    runner.step(TOKENS, target=TOKENS)
    for parameter, wanted in zip(stages.module.parameters(), gradients(TOKENS), strict=True):
        difference = (parameter.grad.full_tensor() - wanted).abs().max() / wanted.abs().max()
        assert difference < (0.05 if policy is MIXED else 1e-5)


def test_sparse_gradients_in_ddp_stay_sparse(alone):
    layers = model()
    layers[0].sparse = True
    schedule = plan((0, 0), fused=False)
    stages = runtime_torch.build_stages(
        schedule, layers, 0, "cpu", prepare=DistributedDataParallel, inputs=[TOKENS[:2]], target=TOKENS[:2]
    )
    runner = runtime_torch.Runner(schedule, stages)
    tokens = TOKENS % 3
    for _ in range(2):
        runner.step(tokens, target=tokens)
    first, *others = (parameter.grad for parameter in stages.module.parameters())
    assert first.is_sparse
    assert first.coalesce().indices().tolist() == [[0, 1, 2]]
    for found, wanted in zip([first.to_dense(), *others], gradients(tokens), strict=True):
        torch.testing.assert_close(found, 2 * wanted)
