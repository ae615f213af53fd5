"""In one's own loop: stages from layers, builders or modules, several tensors per border, and clear refusals."""

from __future__ import annotations

import copy
import os
import re
import socket
import subprocess
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from small_schedules import Builder, Shape
from torch import nn
from torch.distributed.fsdp import fully_shard

import runtime_torch
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Profile
from optpipe_compiler.errors import BadInput, RunFailed
from optpipe_compiler.view.report.trace import measured
from runtime_torch import engine, vocabulary
from tests.interpreter import python
from tests.processes import started

HIDDEN, LENGTH, LAYERS, MICROBATCHES = 8, 5, 4, 2


class Embed(nn.Module):
    """Tokens and a mask to activation, positions and mask."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, HIDDEN)

    def forward(self, tokens, mask):
        return self.tokens(tokens), torch.arange(LENGTH, device=tokens.device).expand_as(tokens), mask


class Block(nn.Module):
    """A layer that reads all three and passes them on."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, positions, mask):
        return x + torch.tanh(self.mix(x + self.positions(positions))) * mask[..., None], positions, mask


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Linear(HIDDEN, 16)

    def forward(self, x, positions, mask, target):
        assert positions.dtype == torch.int64
        assert mask.dtype == torch.bool
        return nn.functional.cross_entropy(self.logits(x).flatten(0, 1), target.flatten())


MAKERS = [Embed, *[Block] * (LAYERS - 2), Head]


def seeded(index, make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        return make()


def builders():
    return [partial(seeded, index, make) for index, make in enumerate(MAKERS)]


def batch():
    generator = torch.Generator().manual_seed(0)
    tokens, target = torch.randint(16, (2, 2 * MICROBATCHES, LENGTH), generator=generator)
    return (tokens, torch.rand(2 * MICROBATCHES, LENGTH, generator=generator) < 0.7), target


def plan(
    placement,
    *,
    fused=True,
    ranges=lambda stage, microbatch: [],
    saved=10**6,
    layers=LAYERS,
    microbatches=MICROBATCHES,
):
    """A legal schedule for four layers of any kind, or another number of them."""
    layer = Layer(
        name="layer",
        forward_ns=10**6,
        backward_input_ns=10**6,
        backward_weight_ns=10**6,
        saved_bytes=saved,
        output_bytes=512,
    )
    links = [Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)]
    machine = Machine(devices=1 + max(placement), p2p=[P2P(latency_ns=1000)], links=links)
    shape = Shape(
        placement,
        layers_per_stage=layers // len(placement),
        microbatches=microbatches,
        fused=lambda *_: fused,
        ranges=ranges,
    )
    return Builder(shape, Profile(name="hand", machine=machine, layers=[layer] * layers), Random(0)).build()


@pytest.fixture
def alone(tmp_path):
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reference():
    """Loss and gradients of the same layers without a pipeline."""
    inputs, target = batch()
    layers = [make() for make in builders()]
    losses = []
    for microbatch in range(MICROBATCHES):
        parts = tuple(part.tensor_split(MICROBATCHES)[microbatch] for part in inputs)
        for layer in layers[:-1]:
            parts = layer(*parts)
        losses.append(layers[-1](*parts, target.tensor_split(MICROBATCHES)[microbatch]))
    torch.stack(losses).mean().backward()
    return torch.stack(losses).mean().item(), nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})


def microbatch():
    inputs, target = batch()
    return {"inputs": [part[:2] for part in inputs], "target": target[:2]}


def assert_equal_gradients(module, steps=1):
    wanted = dict(reference()[1].named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, steps * wanted[name].grad, msg=name)


class Scores(nn.Linear):
    def forward(self, x, target):
        return nn.functional.cross_entropy(super().forward(x).flatten(0, 1), target.flatten())


def test_the_loop_in_the_rooms_readme_trains(alone, tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", Path(runtime_torch.__file__).with_name("README.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    Path("schedule.json").write_text(ir.to_text(plan((0,))))
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)  # the fixture has done so
    layers = [nn.Embedding(16, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), Scores(HIDDEN, 16)]
    before = [layer.weight.detach().clone() for layer in layers]
    tokens = torch.randint(16, (2, LENGTH))
    whole = torch.randint(16, (2 * MICROBATCHES, LENGTH))
    exec(code, {"layers": layers, "device": "cpu", "tokens": tokens, "batches": [(whole, whole)]})
    for layer, weight in zip(layers, before, strict=True):
        assert not torch.equal(layer.weight, weight)


def test_the_head_in_parts_of_the_page_on_loops_trains(alone):
    page = Path(runtime_torch.__file__).parent.parent / "docs" / "LOOP.md"
    (code,) = re.findall(r"```python\n(from runtime_torch import vocabulary.*?)```", page.read_text(), re.S)
    inputs = torch.randint(16, (2 * MICROBATCHES, LENGTH))
    tensors = {"inputs": inputs, "targets": inputs, "tokens": inputs[:2], "target": inputs[:2]}
    sizes = {"hidden": HIDDEN, "schedule": plan((0,), layers=20), "rank": 0, "device": "cpu"}
    names = {"nn": nn, "partial": partial, "runtime_torch": runtime_torch, "Block": partial(nn.Linear, HIDDEN, HIDDEN)}
    exec(code, found := {**names, **sizes, **tensors})
    assert all(parameter.grad is not None for parameter in found["stages"].module.parameters())


RANGES = {
    "keep": lambda stage, microbatch: [],
    "offload": lambda stage, microbatch: [("offload", 2 * stage, 2 * stage + 2)],
    "recompute": lambda stage, microbatch: [("recompute", 2 * stage, 2 * stage + 2)],
}


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_layers_may_pass_several_tensors_of_any_dtype_along(alone, fused, ranges):
    inputs, target = batch()
    schedule = plan((0, 0), fused=fused, ranges=ranges)
    stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch())
    losses = []
    result = runtime_torch.Runner(schedule, stages).step(*inputs, target=target, losses=losses)
    assert result.loss == pytest.approx(reference()[0])
    assert len(losses) == MICROBATCHES
    assert_equal_gradients(stages.module)


class Spectrum(nn.Linear):
    """To the frequencies, conjugated; beside them twice the same, or what entered."""

    def __init__(self, *, twice):
        super().__init__(HIDDEN, HIDDEN)
        self.twice = twice

    def forward(self, x):
        found = torch.fft.fft(super().forward(x)).conj()
        return found, (2 * found if self.twice else x)


class Back(nn.Linear):
    def __init__(self):
        super().__init__(HIDDEN, HIDDEN)

    def forward(self, one, other):
        return torch.fft.ifft(one.conj()).real + super().forward(other.abs())


@pytest.mark.parametrize("twice", [True, False])
def test_complex_numbers_that_pass_along_with_others_have_gradients(alone, twice):
    torch.manual_seed(0)
    layers = [nn.Embedding(16, HIDDEN), Spectrum(twice=twice), Back(), Scores(HIDDEN, 16)]
    whole = copy.deepcopy(layers)
    embedding, spectrum, back, scores = whole
    tokens = torch.randint(16, (2 * MICROBATCHES, LENGTH))
    schedule = plan((0, 0), fused=False)
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", inputs=[tokens[:2]], target=tokens[:2])
    runtime_torch.Runner(schedule, stages).step(tokens, target=tokens)
    scores(back(*spectrum(embedding(tokens))), tokens).backward()
    for found, expected in zip(stages.module.parameters(), nn.ModuleList(whole).parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_the_gradients_of_steps_without_an_optimizer_between_them_add_up(alone, fused):
    inputs, target = batch()
    schedule = plan((0, 0), fused=fused)
    stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch())
    runner = runtime_torch.Runner(schedule, stages)
    for step in range(3):
        runner.step(*inputs, target=target)
        assert_equal_gradients(stages.module, step + 1)


class Remembers(nn.Linear):
    """A layer that counts its calls in Python."""

    calls = 0

    def __init__(self):
        super().__init__(HIDDEN, HIDDEN)
        self.seen = []
        self.total = torch.zeros(1)

    def forward(self, x):
        self.calls += 1
        self.total += 1  # on the meta device, too
        self.seen.append(self.calls)
        return super().forward(x) / self.calls - self.total


@pytest.mark.parametrize("prepare", [None, nn.parallel.DistributedDataParallel], ids=["plain", "ddp"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_a_layer_remembers_nothing_of_the_trial_before_the_first_step(alone, fused, prepare):
    torch.manual_seed(0)
    layers = [nn.Embedding(16, HIDDEN), Remembers(), Remembers(), Scores(HIDDEN, 16)]
    whole = copy.deepcopy(layers)
    tokens = torch.randint(16, (2 * MICROBATCHES, LENGTH))
    schedule = plan((0, 0), fused=fused)
    stages = runtime_torch.build_stages(
        schedule, layers, 0, "cpu", inputs=[tokens[:2]], target=tokens[:2], prepare=prepare
    )
    runtime_torch.Runner(schedule, stages).step(tokens, target=tokens)
    assert layers[1].seen == layers[2].seen == [1, 2]
    for part in tokens.split(2):
        (whole[-1](nn.Sequential(*whole[:-1])(part), part) / MICROBATCHES).backward()
    for found, expected in zip(stages.module.parameters(), nn.ModuleList(whole).parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


class Statistics(nn.Module):
    """A layer that reads a mean of all that has passed, and changes it first: in place, or by another tensor."""

    def __init__(self, *, in_place):
        super().__init__()
        self.mix, self.norm, self.in_place = nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(LENGTH), in_place
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x):
        x = self.mix(x)
        if self.training:
            mean = self.mean + x.detach().mean((0, 1))
            self.mean = self.mean.copy_(mean) if self.in_place else mean
        return x + torch.tanh(self.norm(x) * self.mean)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_running_statistics_change_once_per_microbatch_and_backwards_read_those_of_their_forward(
    alone, fused, ranges, in_place
):
    torch.manual_seed(0)
    layers = [nn.Embedding(16, HIDDEN), *(Statistics(in_place=in_place) for _ in range(2)), Scores(HIDDEN, 16)]
    whole = nn.ModuleDict({str(index): copy.deepcopy(layer) for index, layer in enumerate(layers)})
    schedule = plan((0, 0), fused=fused, ranges=ranges)
    tokens = torch.randint(16, (2 * MICROBATCHES, LENGTH))
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", inputs=[tokens[:2]], target=tokens[:2])
    runner = runtime_torch.Runner(schedule, stages)
    stages.module.eval()
    runner.step(tokens, target=tokens)
    stages.module.train()
    stages.module.zero_grad()
    for _ in range(2):
        result = runner.step(tokens, target=tokens)
        for part in tokens.tensor_split(MICROBATCHES):
            x = part
            for layer in list(whole.values())[:-1]:
                x = layer(x)
            (whole["3"](x, part) / MICROBATCHES).backward()
    assert result.peak_activation_bytes <= runner.promised_activation_bytes
    for found, expected in zip(stages.module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    for found, expected in zip(stages.module.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_statistics_that_were_frozen_alone_change_once_per_microbatch_from_then_on(alone, ranges):
    torch.manual_seed(0)
    layers = [nn.Embedding(16, HIDDEN), *(Statistics(in_place=True) for _ in range(2)), Scores(HIDDEN, 16)]
    whole = copy.deepcopy(layers)
    tokens = torch.randint(16, (2 * MICROBATCHES, LENGTH))
    schedule = plan((0, 0), ranges=ranges)
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", inputs=[tokens[:2]], target=tokens[:2])
    runner = runtime_torch.Runner(schedule, stages)
    for training in (False, True):
        for layer in (*layers[1:3], *whole[1:3]):
            layer.norm.train(training)
        runner.step(tokens, target=tokens)
        for part in tokens.tensor_split(MICROBATCHES):
            x = part
            for layer in whole[:-1]:
                x = layer(x)
            (whole[-1](x, part) / MICROBATCHES).backward()
    for found, expected in zip(stages.module.parameters(), nn.ModuleList(whole).parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    for found, expected in zip(stages.module.buffers(), nn.ModuleList(whole).buffers(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.fixture
def public_only(monkeypatch):
    """torch without its private names."""
    for name in ("_run_backward", "_profiler_enabled", "_use_count", "_hooks", "_base", "_copy_each"):
        monkeypatch.setattr(engine, name, getattr(engine, name))
    monkeypatch.setattr(engine, "_flash", dict(engine._flash))  # is emptied
    engine.use_public_names()


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_no_private_name_of_torch_is_needed(alone, public_only, fused, ranges):
    inputs, target = batch()
    schedule = plan((0, 0), fused=fused, ranges=ranges)
    stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch())
    runtime_torch.Runner(schedule, stages).step(*inputs, target=target)
    assert_equal_gradients(stages.module)


def test_a_layer_that_was_put_in_the_place_of_another_later_is_refused(alone):
    inputs, target = batch()
    stages = runtime_torch.build_stages(plan((0, 0)), builders(), 0, "cpu", **microbatch())
    runner = runtime_torch.Runner(plan((0, 0)), stages)
    own, stages.module["3"] = stages.module["3"], nn.Sequential(stages.module["3"])
    for call in (runner.step, runner.eval):
        with pytest.raises(BadInput, match=r"stages.module\['3'\] is another layer than was built"):
            call(*inputs, target=target)
    stages.module["3"] = own
    assert runner.step(*inputs, target=target).loss == reference()[0]


def test_a_validation_loss_is_that_of_a_step_and_makes_no_gradient(alone):
    inputs, target = batch()
    schedule = plan((0, 0))
    stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch())
    assert runtime_torch.Runner(schedule, stages).eval(*inputs, target=target) == pytest.approx(reference()[0])
    assert all(parameter.grad is None for parameter in stages.module.parameters())


def test_a_validation_loss_may_be_taken_in_inference_mode(alone):
    inputs, target = batch()
    schedule = plan((0, 0))
    stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch())
    runner = runtime_torch.Runner(schedule, stages)
    with torch.inference_mode():
        loss = runner.eval(*inputs, target=target)
    assert loss == pytest.approx(reference()[0])
    runner.step(*inputs, target=target)
    assert_equal_gradients(stages.module)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_where_gradients_are_off_is_refused(alone, off):
    inputs, target = batch()
    schedule = plan((0,))
    stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch())
    runner = runtime_torch.Runner(schedule, stages)
    with off(), pytest.raises(BadInput, match=r"gradients are off \(no_grad, inference_mode\), expected eval\(\)"):
        runner.step(*inputs, target=target)
    runner.step(*inputs, target=target)
    assert_equal_gradients(stages.module)


def test_only_the_layers_of_the_rank_are_built():
    built = []

    def counted(index):
        layer = builders()[index]()
        if next(layer.parameters()).device.type != "meta":
            built.append(index)
        return layer

    makers = [partial(counted, index) for index in range(LAYERS)]
    stages = runtime_torch.build_stages(plan((0, 1)), makers, 1, "cpu", **microbatch())
    assert built == [2, 3]
    assert {name.split(".")[0] for name in stages.module.state_dict()} == {"2", "3"}


def test_functions_may_return_layers_that_were_there_before():
    layers = [make() for make in builders()]
    stages = runtime_torch.build_stages(
        plan((0, 0)),
        [partial(dict.get, dict(enumerate(layers)), index) for index in range(LAYERS)],
        0,
        "cpu",
        **microbatch(),
    )
    assert [*stages.module.values()] == layers
    assert {parameter.device.type for parameter in stages.module.parameters()} == {"cpu"}


def test_every_op_is_a_named_range_that_report_reads_from_torchs_profiler(alone, tmp_path):
    inputs, target = batch()
    schedule = plan((0, 0), fused=False, ranges=RANGES["offload"])
    stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch())
    runner = runtime_torch.Runner(schedule, stages)
    runner.step(*inputs, target=target)
    with torch.profiler.profile() as profiler:
        runner.step(*inputs, target=target)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    device = schedule.devices[0]
    assert {op.id for op in device.compute} <= set(measured([tmp_path / "trace.json"], schedule).ran)
    names = {event.name for event in profiler.events()}
    assert {f"{op.name} {op.stage} m{op.microbatch}" for op in device.compute} <= names


class Whole(nn.Module):
    """Half of a model as one module."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x, *target):
        x = self.layers(x)
        return x if not target else ((x - target[0]) ** 2).mean()


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "FSDP2"])
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_stage_modules_of_ones_own_are_run_as_a_whole(alone, ranges, is_sharded):
    torch.manual_seed(0)
    schedule = plan((0, 0), ranges=ranges)
    modules = {stage: Whole([nn.Linear(HIDDEN, HIDDEN), nn.Tanh()]) for stage in (0, 1)}
    plain = nn.ModuleList(copy.deepcopy(modules).values())
    if is_sharded:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for module in modules.values():
            fully_shard(module, mesh=mesh)
    stages = runtime_torch.wrap_stages(schedule, modules, 0, "cpu")
    runner = runtime_torch.Runner(schedule, stages, lambda layer: (() if layer == 3 else (2, HIDDEN), torch.float32))
    x, target = torch.randn(2, 2 * MICROBATCHES, HIDDEN)
    result = runner.step(x, target=target)
    loss = plain[1](plain[0](x), target)
    wanted = torch.autograd.grad(loss, list(plain.parameters()))
    assert result.loss == pytest.approx(loss.item())
    for parameter, gradient in zip(stages.module.parameters(), wanted, strict=True):
        found = parameter.grad.full_tensor() if is_sharded else parameter.grad
        torch.testing.assert_close(found, gradient)


def test_a_stage_module_cannot_serve_a_schedule_that_names_part_of_its_layers():
    schedule = plan((0, 0), ranges=lambda stage, microbatch: [("offload", 2 * stage, 2 * stage + 1)])
    with pytest.raises(BadInput, match="stage 0 is one module, but the schedule has offload:0:"):
        runtime_torch.wrap_stages(schedule, {0: nn.Identity(), 1: nn.Identity()}, 0, "cpu")


def test_another_number_of_layers_is_refused():
    with pytest.raises(BadInput, match="the model has 3 layers, the schedule is for 4"):
        runtime_torch.build_stages(plan((0, 1)), builders()[:3], 0, "cpu")


def test_layers_that_do_not_fit_each_other_are_refused_before_any_is_built():
    makers = [builders()[0], nn.Linear(HIDDEN, HIDDEN).__class__, *builders()[2:]]
    makers[1] = partial(nn.Linear, HIDDEN, HIDDEN)
    with pytest.raises(BadInput, match=r"layer 1: cannot be called with what layer 0 returns \(\(2, 5, 8\)"):
        runtime_torch.build_stages(plan((0, 1)), makers, 0, "cpu", **microbatch())


class WithNothing(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


def test_what_a_tuple_has_beside_tensors_is_named():
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    layers = [nn.Embedding(16, HIDDEN), *(WithNothing(HIDDEN, HIDDEN) for _ in range(2)), Scores(HIDDEN, 16)]
    with pytest.raises(BadInput, match="layer 1 returns tuple with NoneType, expected a tensor or a tuple of tensors"):
        runtime_torch.build_stages(plan((0, 0)), layers, 0, "cpu", inputs=[tokens], target=tokens)


class Remembering(nn.Linear):
    """A layer that makes a table at its first call, by the length that it meets."""

    def __init__(self):
        super().__init__(HIDDEN, HIDDEN)
        self.table, self.tables = None, {}

    def forward(self, x):
        if self.table is None:
            self.table = self.tables[x.shape[1]] = torch.ones(x.shape[1], 1, device=x.device)
        return super().forward(x * self.table * self.tables[x.shape[1]])


def test_layers_remember_nothing_of_the_call_that_finds_shapes(alone):
    tokens = torch.zeros(2 * MICROBATCHES, LENGTH, dtype=torch.int64)
    layers = [nn.Embedding(16, HIDDEN), Remembering(), Remembering(), Scores(HIDDEN, 16)]
    schedule = plan((0, 0))
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", inputs=[tokens[:2]], target=tokens[:2])
    assert layers[1].table is None
    assert layers[1].tables == {}
    runtime_torch.Runner(schedule, stages).step(tokens, target=tokens)
    assert layers[1].table.device.type == "cpu"


class Averaging(nn.Linear):
    """A layer whose forward changes a tensor in a dictionary, and one in a list, in place."""

    def __init__(self):
        super().__init__(HIDDEN, HIDDEN)
        self.means, self.counts = {"x": torch.zeros(())}, [torch.zeros(())]

    def forward(self, x):
        self.means["x"].add_(x.detach().mean())
        self.counts[0].add_(1)
        return super().forward(x)


def test_the_trial_leaves_tensors_in_dictionaries_and_lists_as_they_were(alone):
    tokens = torch.zeros(2 * MICROBATCHES, LENGTH, dtype=torch.int64)
    layers = [nn.Embedding(16, HIDDEN), Averaging(), nn.Linear(HIDDEN, HIDDEN), Scores(HIDDEN, 16)]
    stages = runtime_torch.build_stages(plan((0, 0)), layers, 0, "cpu", inputs=[tokens[:2]], target=tokens[:2])
    runtime_torch.Runner(plan((0, 0)), stages).step(tokens, target=tokens)
    assert layers[1].counts[0] == MICROBATCHES
    torch.testing.assert_close(layers[1].means["x"], MICROBATCHES * layers[0](tokens[:2]).detach().mean())


class Wrapped(nn.Linear):
    def forward(self, x):
        return (super().forward(x),)


def test_a_layer_that_returns_a_tuple_of_one_tensor_is_refused():
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    layers = [nn.Embedding(16, HIDDEN), Wrapped(HIDDEN, HIDDEN), Wrapped(HIDDEN, HIDDEN), Scores(HIDDEN, 16)]
    with pytest.raises(BadInput, match="layer 1 returns a tuple of one tensor, expected the tensor itself"):
        runtime_torch.build_stages(plan((0, 0)), layers, 0, "cpu", inputs=[tokens], target=tokens)


class Normed(nn.Linear):
    """What torch.compile takes for a layer's own code: that of torch's modules alone it runs eagerly."""

    def __init__(self):
        super().__init__(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        return nn.functional.gelu(super().forward(self.norm(x)))


def eager_pieces():
    return nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU())


@pytest.mark.parametrize("make", [Normed, eager_pieces], ids=["compiled", "eager pieces"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_compiled_layers_have_the_gradients_of_others(alone, make, fused):
    import torch._dynamo.config
    import torch._functorch.config

    torch.manual_seed(0)
    inner = [make() for _ in range(2)]
    layers = [nn.Embedding(16, HIDDEN), *inner, Scores(HIDDEN, 16)]
    whole = nn.Sequential(*map(copy.deepcopy, layers[:-1]))
    head = copy.deepcopy(layers[-1])
    for layer in inner:
        layer.compile(backend="aot_eager")
    is_compiled = "CompiledFunction" in type(inner[0](torch.ones(1, HIDDEN)).grad_fn).__name__
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    assert is_compiled == (make is Normed or release >= (2, 15))
    tokens = torch.randint(16, (2 * MICROBATCHES, LENGTH))
    schedule = plan((0, 0), fused=fused)
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", inputs=[tokens[:2]], target=tokens[:2])
    runner = runtime_torch.Runner(schedule, stages)
    with (
        torch._functorch.config.patch(donated_buffer=fused),
        torch._dynamo.config.patch(error_on_recompile=not is_compiled),
    ):
        runner.step(tokens, target=tokens)
    head(whole(tokens), tokens).backward()
    for found, expected in zip(stages.module.parameters(), [*whole.parameters(), *head.parameters()], strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


class NamedScores(nn.Linear):
    def forward(self, x, *, target):
        return nn.functional.cross_entropy(super().forward(x).flatten(0, 1), target.flatten())


class Scaled(nn.Linear):
    def forward(self, x, *, scale):
        return x + scale * super().forward(x).tanh()


def test_what_torch_compile_returns_is_given_what_the_layer_in_it_names(alone):
    layers = [nn.Embedding(16, HIDDEN), Scaled(HIDDEN, HIDDEN), Normed(), NamedScores(HIDDEN, 16)]
    tokens = torch.randint(16, (2 * MICROBATCHES, LENGTH))
    found = []
    for given in (layers, [layers[0], *(torch.compile(layer, backend="eager") for layer in layers[1:])]):
        makers = [partial(lambda layer: layer, layer) for layer in given]
        stages = runtime_torch.build_stages(plan((0, 0)), makers, 0, "cpu")
        runner = runtime_torch.Runner(plan((0, 0)), stages, lambda layer: ((2, LENGTH, HIDDEN), torch.float32))
        found.append(runner.step(tokens, target=tokens, keywords=[{"scale": 2.0}, {"scale": 3.0}]).loss)
    assert found[0] == found[1]


def test_a_recompute_of_a_layer_that_was_compiled_anew_since_its_forward_is_refused_with_what_to_do(alone):
    import torch._dynamo

    tokens = torch.randint(16, (2 * MICROBATCHES, LENGTH))
    kinds = (0, "offload"), (1, "recompute")
    schedule = plan((0, 0), ranges=lambda stage, _: [(k, 2 * stage + i, 2 * stage + i + 1) for i, k in kinds])
    inner = nn.Linear(HIDDEN, HIDDEN), Scores(HIDDEN, 16)
    for dynamic in (None, True):
        torch._dynamo.reset()
        scaled = torch.compile(Scaled(HIDDEN, HIDDEN), backend="aot_eager", dynamic=dynamic)
        layers = [nn.Embedding(16, HIDDEN), scaled, *inner]
        makers = [partial(lambda layer: layer, layer) for layer in layers]
        stages = runtime_torch.build_stages(schedule, makers, 0, "cpu")
        runner = runtime_torch.Runner(schedule, stages, lambda layer: ((2, LENGTH, HIDDEN), torch.float32))
        step = partial(runner.step, tokens, target=tokens, keywords=[{"scale": 1.0}, {"scale": 2.0}])
        if dynamic:
            step()
        else:
            with pytest.raises(RunFailed, match=r"layers 1 to 1 .* torch.compile\(dynamic=True\)"):
                step()


def test_what_torch_says_of_a_compiled_backward_in_two_halves_is_told_in_ones_own_words(alone, monkeypatch):
    def refuses(*arguments, **ways):
        raise RuntimeError("This backward function was compiled with non-empty donated buffers which requires")

    inputs, target = batch()
    schedule = plan((0, 0), fused=False)
    stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch())
    monkeypatch.setattr(engine, "capture", refuses)
    with pytest.raises(RunFailed, match=r"donated_buffer = False before the first step, or compile the schedule with"):
        runtime_torch.Runner(schedule, stages).step(*inputs, target=target)


def test_a_model_that_saves_more_than_its_profile_says_is_refused(alone):
    inputs, target = batch()
    schedule = plan((0, 0), saved=10)
    stages = runtime_torch.build_stages(
        schedule, [*builders()[:1], *[wide] * 2, builders()[3]], 0, "cpu", **microbatch()
    )
    message = r"stage 0 \(layers 0 to 1\) saves \d+ bytes per microbatch for its backward, its profile says 20: more th"
    with pytest.raises(BadInput, match=message):
        runtime_torch.Runner(schedule, stages).step(*inputs, target=target)
    assert runtime_torch.Runner(schedule, stages, bytes_tolerance=None).step(*inputs, target=target).loss is not None


def test_layers_that_are_trained_from_a_later_step_on_are_held_against_the_profile_then(alone):
    inputs, target = batch()
    schedule = plan((0, 0), saved=10)
    layers = [made() for made in (*builders()[:1], wide, *builders()[2:])]
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", **microbatch())
    runner = runtime_torch.Runner(schedule, stages)
    for layer in layers[:2]:
        layer.requires_grad_(False)
    runner.step(*inputs, target=target)
    layers[0].requires_grad_(True)
    with pytest.raises(BadInput, match=r"stage 0 \(layers 0 to 1\) saves \d+ bytes per microbatch for its backward"):
        runner.step(*inputs, target=target)


class Wide(Block):
    """Saves far more than a block."""

    def forward(self, x, positions, mask):
        big = torch.tanh(x.repeat(1, 1, 100))
        return super().forward(x + big[..., :HIDDEN] * big.mean(), positions, mask)


def wide():
    return Wide()


def test_a_stage_with_another_output_than_said_is_refused(alone):
    schedule = plan((0, 0))
    modules = {stage: Whole([nn.Linear(HIDDEN, HIDDEN)]) for stage in (0, 1)}
    stages = runtime_torch.wrap_stages(schedule, modules, 0, "cpu")
    runner = runtime_torch.Runner(schedule, stages, lambda layer: ((2, HIDDEN), torch.bfloat16))
    x, target = torch.randn(2, 2 * MICROBATCHES, HIDDEN)
    with pytest.raises(
        BadInput, match=r"stage 0 .* returns float32 of shape \(2, 8\), expected bfloat16 of shape .* or"
    ):
        runner.step(x, target=target)


def test_a_step_under_autocast_is_refused_where_nobody_said_what_passes_between_layers(alone):
    layers, schedule = [*(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS - 1)), Scores(HIDDEN, 16)], plan((0, 0))
    x, target = torch.randn(2 * MICROBATCHES, LENGTH, HIDDEN), torch.zeros(2 * MICROBATCHES, LENGTH, dtype=torch.long)
    example = {"inputs": [x[:2]], "target": target[:2]}
    runner = runtime_torch.Runner(schedule, runtime_torch.build_stages(schedule, layers, 0, "cpu", **example))
    said = runtime_torch.build_stages(schedule, layers, 0, "cpu", float_dtype=torch.bfloat16, **example)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(BadInput, match=r"returns bfloat16 .*, or build_stages\(float_dtype=torch.bfloat16\) where"):
            runner.step(x, target=target)
        with pytest.raises(BadInput, match=r"; build_stages was called without autocast, step\(\) under autocast: exp"):
            runner.step(x, target=target)
        runtime_torch.Runner(schedule, said).step(x, target=target)
        there = runtime_torch.build_stages(schedule, layers, 0, "cpu", **example)
    with pytest.raises(BadInput, match=r"; build_stages was called under autocast, step\(\) without autocast: exp"):
        runtime_torch.Runner(schedule, there).step(x, target=target)


class Lookup(nn.Module):
    """Branches on values, so that shapes are found on data; under autocast it returns float32."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, HIDDEN)

    def forward(self, tokens):
        return self.tokens(tokens) * (1.0 if tokens.sum() > 0 else 2.0)


@pytest.mark.parametrize("first", [partial(nn.Embedding, 16, HIDDEN), Lookup], ids=["stand-ins", "data"])
@pytest.mark.parametrize("makes", [False, True], ids=["layers", "functions"])
def test_what_passes_between_layers_under_autocast_is_found_under_it(alone, first, makes):
    """Hidden states in bfloat16 and in float32, and the state of a head in parts, which is in float32 always."""
    parts = vocabulary.head_parts(HIDDEN, 16, 2)
    made = [partial(seeded, *each) for each in enumerate([first, partial(nn.Linear, HIDDEN, HIDDEN), *parts])]
    whole, layers = ([make() for make in made] for _ in range(2))
    tokens = torch.randint(1, 16, (2 * MICROBATCHES, LENGTH))
    schedule, before = plan((0, 0, 0, 0)), torch.random.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        stages = runtime_torch.build_stages(
            schedule, made if makes else layers, 0, "cpu", inputs=[tokens[:2]], target=tokens[:2]
        )
        assert torch.equal(torch.random.get_rng_state(), before)
        assert [str(one) for one in stages.bundles[1:-1]] == [
            "float32 of shape (2, 5, 8)",
            "bfloat16 of shape (2, 5, 8)",
            "bfloat16 of shape (2, 5, 8), float32 of shape (2, 5, 2)",
        ]
        loss = runtime_torch.Runner(schedule, stages).step(tokens, target=tokens).loss
        head = vocabulary.whole(whole)[-1]
        losses = [head(whole[1](whole[0](part)), target=part) for part in tokens.split(2)]
    torch.stack(losses).mean().backward()
    assert loss == pytest.approx(torch.stack(losses).mean().item(), rel=1e-2)
    for parameter, wanted in zip(stages.module.parameters(), nn.ModuleList(whole).parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=0.05, atol=2e-3)


def test_one_region_of_autocast_around_steps_and_optimizer_trains_as_one_around_each_step(alone):
    torch.manual_seed(0)
    layers = [nn.Embedding(16, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), Scores(HIDDEN, 16)]
    tokens, schedule = torch.randint(16, (2 * MICROBATCHES, LENGTH)), plan((0, 0))
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    found = []
    for region in (autocast, nullcontext):
        with autocast():
            given = {"inputs": [tokens[:2]], "target": tokens[:2]}
            stages = runtime_torch.build_stages(schedule, copy.deepcopy(layers), 0, "cpu", **given)
        runner = runtime_torch.Runner(schedule, stages)
        optimizer = torch.optim.SGD(stages.module.parameters(), lr=1.0)
        losses = []
        with nullcontext() if region is autocast else autocast():
            for _ in range(3):
                with region():
                    losses += [runner.eval(tokens, target=tokens), runner.step(tokens, target=tokens).loss]
                optimizer.step()
                optimizer.zero_grad()
        found.append(losses)
    assert found[0] == found[1]
    assert found[0][0] != found[0][2] != found[0][4]


class Counts(nn.Module):
    """Counts in place in one of the tensors that pass along."""

    def forward(self, x, positions, mask):
        positions += 1
        return x, positions, mask


class Shifted(nn.Module):
    """Tokens to other tokens."""

    def forward(self, tokens):
        return (tokens + 1) % 16


@pytest.mark.parametrize(
    ("layers", "several", "sentence"),
    [
        (
            [nn.Embedding(16, HIDDEN), nn.Identity(), nn.ReLU(inplace=True), Scores(HIDDEN, 16)],
            False,
            "layer 2 changes in",
        ),
        (
            [Embed(), Block(), Counts(), Head()],
            True,
            "layer 2 changes in place what it is given, expected a new tensor",
        ),
        ([Shifted(), Shifted(), nn.Embedding(16, HIDDEN), Scores(HIDDEN, 16)], False, "layer 1 returns int64 alone"),
    ],
    ids=["one tensor", "several", "integers"],
)
def test_a_stage_that_cannot_begin_with_its_first_layer_is_refused_by_its_number(alone, layers, several, sentence):
    inputs, target = batch()
    inputs = inputs if several else inputs[:1]
    schedule = plan((0, 0))
    example = [tensor[:2] for tensor in inputs]
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", inputs=example, target=target[:2])
    with pytest.raises(BadInput, match=sentence):
        runtime_torch.Runner(schedule, stages).step(*inputs, target=target)


def test_batches_that_cannot_be_cut_or_are_missing_are_refused(alone):
    inputs, target = batch()
    schedule = plan((0, 0))
    stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch())
    runner = runtime_torch.Runner(schedule, stages)
    with pytest.raises(BadInput, match=r"the target has the shape \(4, 5\), expected 3 in its first dimension for the"):
        runner.step(*(part[:3] for part in inputs), target=target)
    with pytest.raises(BadInput, match="has 1 sample, expected at least one for each of 2 microbatches"):
        runner.step(*(part[:1] for part in inputs), target=target[:1])
    with pytest.raises(BadInput, match="has 8 samples in 2 microbatches, expected at most 2 in each"):
        runner.step(*(torch.cat([part, part]) for part in inputs), target=torch.cat([target, target]))
    with pytest.raises(BadInput, match=r"input 1 of step.. is float32 of shape .4, 5., expected bool of shape .2, 5."):
        runner.step(inputs[0], inputs[1].float(), target=target)
    with pytest.raises(BadInput, match="got 3 weights, expected one for each of 2 microbatches"):
        runner.step(*inputs, target=target, weights=[1.0, 0.0, 0.0])
    with pytest.raises(BadInput, match="got keywords for 1 microbatch, expected 2"):
        runner.step(*inputs, target=target, keywords=[{}])
    with pytest.raises(BadInput, match="the keyword argument scale is a tensor"):
        runner.step(*inputs, target=target, keywords=[{"scale": torch.ones(1)}, {}])
    with pytest.raises(BadInput, match=r"the target has the shape \(4, 5\), expected 2 in its first dimension for the"):
        runner.step(*(part[:2] for part in inputs), target=target)
    with pytest.raises(BadInput, match="got 1 inputs, expected 2"):
        runner.step(inputs[0], target=target)
    with pytest.raises(BadInput, match="needs a target"):
        runner.step(*inputs)
    with pytest.raises(BadInput, match=r"eval.. needs a target"):
        runner.eval(*inputs)
    with pytest.raises(BadInput, match=r"step.. got .*, expected tensors, the inputs one by one"):
        runner.step(list(inputs), target=target)
    with pytest.raises(BadInput, match="the shapes between layers are not known"):
        runtime_torch.Runner(schedule, runtime_torch.build_stages(schedule, builders(), 0, "cpu"))


def test_arguments_of_another_kind_are_refused_and_leave_the_runner_usable(alone):
    inputs, target = batch()
    schedule = plan((0, 0))
    stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch())
    runner = runtime_torch.Runner(schedule, stages)
    build = partial(runtime_torch.build_stages, schedule, builders(), 0)
    step = partial(runner.step, *inputs, target=target)
    mistakes = {
        "path is 5, expected a path": lambda: runtime_torch.load_schedule(5),
        "schedule is 's.json', expected a schedule, as": lambda: runtime_torch.Runner("s.json", stages),
        "stages is .*, expected those of build_stages": lambda: runtime_torch.Runner(schedule, []),
        "schedule is 't.json', expected a schedule, as": lambda: runner.replace("t.json"),
        "schedule is 'u.json', expected a schedule, as": lambda: runtime_torch.build_stages("u.json", [], 0, "cpu"),
        "layers is .*, expected a list": lambda: runtime_torch.build_stages(schedule, iter(builders()), 0, "cpu"),
        "inputs is tensor.*, expected a list of tensors": lambda: build("cpu", inputs=inputs[0]),
        "device is 'gpu', expected one of torch": lambda: build("gpu"),
        "weights is 0.5, expected a list": lambda: step(weights=0.5),
        r"weights\[0\] is 'a', expected a number": lambda: step(weights=["a"] * 2),
        "keywords is 3, expected a list of mappings": lambda: step(keywords=3),
        r"keywords\[1\] is 4, expected a mapping": lambda: step(keywords=[{}, 4]),
        "prepare is 7, expected a function of a layer": lambda: build("cpu", prepare=7),
        "what prepare returns for layer 0 is None, expected a torch": lambda: build("cpu", prepare=lambda layer: None),
        "target is 8, expected a tensor": lambda: build("cpu", target=8),
        "float_dtype is 'bf16', expected a dtype": lambda: build("cpu", float_dtype="bf16"),
        "ties is 9, expected a list": lambda: build("cpu", ties=9),
        "layer 0 is 5, expected a torch.nn.Module, or a function": lambda: runtime_torch.build_stages(
            schedule, [5] * 4, 0, "cpu"
        ),
        "layer 1 is a NoneType, expected a torch.nn.Module": lambda: runtime_torch.build_stages(
            schedule, [*builders()[:1], lambda: None, *builders()[2:]], 0, "cpu", **microbatch()
        ),
        r"modules\[0\] is 5, expected a torch.nn.Module": lambda: runtime_torch.wrap_stages(schedule, {0: 5}, 0, "cpu"),
        "boundary is 5, expected a function": lambda: runtime_torch.Runner(schedule, stages, 5),
        "on_failure is 5, expected a function": lambda: runtime_torch.Runner(schedule, stages, on_failure=5),
        "bytes_tolerance is 'a', expected a number": lambda: runtime_torch.Runner(
            schedule, stages, bytes_tolerance="a"
        ),
        "optimizer is 5, expected one of torch, a list": lambda: runner.replace(schedule, 5),
        r"optimizer\[0\] is 5, expected one of torch": lambda: runner.replace(schedule, [5]),
        r"losses is \(\), expected a list": lambda: step(losses=()),
        "losses is 6, expected a list": lambda: runner.eval(*inputs, target=target, losses=6),
    }
    for sentence, mistake in mistakes.items():
        with pytest.raises(BadInput, match=sentence) as said:
            mistake()
        assert "\n" not in str(said.value)
    assert step().loss is not None


class Squares(nn.Linear):
    def forward(self, x, target):
        return (super().forward(x) - target).square().mean()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_a_batch_that_other_ops_made_with_gradients_is_refused_and_a_leaf_gets_its_own(alone, fused):
    torch.manual_seed(0)
    layers = [*(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS - 1)), Squares(HIDDEN, HIDDEN)]
    whole, encoder = copy.deepcopy(layers), nn.Linear(HIDDEN, HIDDEN)
    x, target = torch.randn(2, 2 * MICROBATCHES, HIDDEN)
    schedule = plan((0, 0), fused=fused)
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", inputs=[x[:2]], target=target[:2])
    runner = runtime_torch.Runner(schedule, stages)
    with pytest.raises(BadInput, match=r"input 0 of step.. is the result of other ops with gradients, expected it det"):
        runner.step(encoder(x), target=target)
    with pytest.raises(BadInput, match=r"the target of step.. is the result of other ops with gradients, expected it"):
        runner.step(x, target=encoder(target))
    assert runner.eval(encoder(x), target=target) is not None
    given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    runner.step(given, target=target)
    whole[-1](nn.Sequential(*whole[:-1])(expected), target).backward()
    torch.testing.assert_close(given.grad, expected.grad)


def test_one_of_several_inputs_that_needs_a_gradient_is_refused(alone):
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x * mask)

    x = torch.randn(2 * MICROBATCHES, HIDDEN)
    layers = [Masked(HIDDEN, HIDDEN), *(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS - 2)), Squares(HIDDEN, HIDDEN)]
    stages = runtime_torch.build_stages(plan((0, 0)), layers, 0, "cpu", inputs=[x[:2], x[:2]], target=x[:2])
    runner = runtime_torch.Runner(plan((0, 0)), stages)
    with pytest.raises(BadInput, match=r"input 1 of step.. needs a gradient, expected none where there are several in"):
        runner.step(x, x.clone().requires_grad_(), target=x)


class Fails(nn.Linear):
    fails = False

    def forward(self, x, target):
        if self.fails:
            raise ValueError("no more")
        return super().forward(x).square().mean()


def test_a_runner_takes_no_step_after_one_that_failed_in_the_middle(alone):
    x = torch.randn(2 * MICROBATCHES, HIDDEN)
    layers = [nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), Fails(HIDDEN, 1)]
    stages = runtime_torch.build_stages(plan((0, 0)), layers, 0, "cpu", inputs=[x[:2]], target=x[:2])
    runner = runtime_torch.Runner(plan((0, 0)), stages)
    runner.step(x, target=x)
    stages.module["3"].fails = True
    with pytest.raises(ValueError, match="no more"):
        runner.step(x, target=x)
    with pytest.raises(RunFailed, match="an earlier step, eval or replace of this Runner ended in the middle"):
        runner.step(x, target=x)


@pytest.mark.parametrize("place", ["batches.go_on", "runner.go_on", "runner.agree_on"])
def test_a_runner_takes_no_step_after_an_agreement_that_was_interrupted(alone, monkeypatch, place):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    inputs, target = batch()
    stages = runtime_torch.build_stages(plan((0, 0)), builders(), 0, "cpu", **microbatch())
    runner = runtime_torch.Runner(plan((0, 0)), stages)
    with monkeypatch.context() as changed:
        changed.setattr(f"runtime_torch.{place}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.replace(plan((0, 0))) if "agree" in place else runner.step(*inputs, target=target)
    with pytest.raises(RunFailed, match="an earlier step, eval or replace of this Runner ended in the middle"):
        runner.step(*inputs, target=target)


class Masked(nn.Embedding):
    """Passes a mask along that is the same for all samples."""

    def forward(self, tokens, mask):
        return super().forward(tokens) * mask[:1, :, None]


def test_an_input_that_all_samples_share_is_refused(alone):
    tokens, shared = torch.zeros(2 * MICROBATCHES, LENGTH, dtype=torch.int64), torch.ones(2 * MICROBATCHES, LENGTH)
    layers = [Masked(16, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), Scores(HIDDEN, 16)]
    schedule = plan((0, 0))
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", inputs=[tokens[:2], shared], target=tokens[:2])
    with pytest.raises(BadInput, match=r"input 1 has the shape .4, 5., expected 8 in its first dimension for the"):
        runtime_torch.Runner(schedule, stages).step(tokens, shared, target=tokens)
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", inputs=[tokens[:2], shared[:1]], target=tokens[:2])
    with pytest.raises(BadInput, match=r"input 1 has the shape .1, 5. in a microbatch, expected samples along its fi"):
        runtime_torch.Runner(schedule, stages)


RANK = """
import sys
sys.path[:0] = sys.argv[2:]
import torch, torch.distributed as dist
import runtime_torch, test_runtime_library as case
dist.init_process_group("gloo")
torch.set_num_threads(1)
schedule = runtime_torch.load_schedule(sys.argv[1])
rank = dist.get_rank()
stages = runtime_torch.build_stages(schedule, case.builders(), rank, "cpu", **case.microbatch())
runner = runtime_torch.Runner(schedule, stages)
inputs, target = case.batch()
before = runner.eval(*inputs, target=target)
loss = runner.step(*inputs, target=target).loss
assert (loss is None) == (len(schedule.stages) - 1 not in stages)
assert loss is None or abs(loss - case.reference()[0]) < 1e-5 and abs(before - loss) < 1e-6
case.assert_equal_gradients(stages.module)
dist.destroy_process_group()
"""


END = """
import os
sys.stdout.flush()
os._exit(0)  # torch's threads may abort a Python that shuts down while they hand over what they have sent
"""


def start_ranks(code, *arguments, world=2, each=lambda rank: (), **environment):
    """Start a script, which imports sys, once per rank with torchrun's environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = Path(__file__).parent
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"GLOO_SOCKET_IFNAME": "lo"}
    return [
        started(
            subprocess.Popen(
                [python(), "-c", code + END, *arguments, *each(rank), str(here), str(here.parent)],
                env={**os.environ, **common, "RANK": str(rank), **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        for rank in range(world)
    ]


@pytest.mark.runtime
@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 1, 0)], ids=["linear", "v"])
def test_two_ranks_train_and_validate_a_model_with_several_inputs(tmp_path, placement):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(plan(placement, fused=False)))
    for rank in start_ranks(RANK, str(path)):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


WRONG = """
import sys
sys.path[:0] = sys.argv[1:]
import torch, torch.distributed as dist, runtime_torch
from optpipe_compiler.errors import BadInput, RunFailed
import test_runtime_library as case

dist.init_process_group("gloo")
rank = dist.get_rank()
schedule = case.plan((0, 1))
torch.manual_seed(0)
layers = [torch.nn.Embedding(16, case.HIDDEN), *(torch.nn.Linear(case.HIDDEN, case.HIDDEN) for _ in range(2))]
layers.append(case.Scores(case.HIDDEN, 16))
tokens = torch.randint(16, (2 * case.MICROBATCHES, case.LENGTH))
stages = runtime_torch.build_stages(schedule, layers, rank, "cpu", inputs=[tokens[:2]], target=tokens[:2])
runner = runtime_torch.Runner(schedule, stages)
right = {"target": tokens}
for call, wrong_on, sentence, (inputs, given) in [
    (runner.step, 1, "TypeError|RuntimeError|ValueError", (tokens, {"target": tokens.float()})),  # in the trial
    (runner.step, 1, "needs a target on the rank of the last stage", (tokens, {})),
    (runner.eval, 1, "needs a target on the rank of the last stage", (tokens, {})),
    (runner.step, 0, "needs inputs on the rank of the first stage", (None, right)),
    (runner.step, 0, "int32 of shape", (tokens.int(), right)),
    (runner.step, 1, "expected tensors", (tokens, {"target": "text"})),
    (runner.step, 1, "expected 4 in its first dimension", (tokens, {"target": tokens[:3]})),
    (runner.eval, 1, "expected 4 in its first dimension", (tokens, {"target": tokens[:3]})),
    (runner.step, 1, "got 3 weights", (tokens, right | {"weights": [1.0] * 3})),
    (runner.step, 0, "got keywords for 3 microbatches", (tokens, right | {"keywords": [{}] * 3})),
    (runner.step, 0, "argument casual, which no layer takes", (tokens, right | {"keywords": [{"casual": 1}] * 2})),
    (runner.step, 1, r"weights[1] of step() is nan, expected", (tokens, right | {"weights": [1.0, float("nan")]})),
    (runner.step, 1, "expected a list that is filled", (tokens, right | {"losses": ()})),
]:
    try:
        call(inputs, **given) if rank == wrong_on else call(tokens, **right)
    except (BadInput, RunFailed) as error:
        text = str(error)
        assert rank == wrong_on or text.startswith(f"rank {wrong_on}: "), text
        assert any(part in text for part in sentence.split("|")), (text, sentence)
    except (TypeError, RuntimeError, ValueError):
        assert rank == wrong_on
    else:
        raise AssertionError(sentence)
runner.step(tokens, **right, weights=[0.25, 0.75])  # the ranks are still together
losses = []
for part in tokens.split(2):
    x = part
    for layer in layers[:-1]:
        x = layer(x)
    losses.append(layers[-1](x, part))
own = list(stages.module.parameters())
wanted = torch.autograd.grad(0.25 * losses[0] + 0.75 * losses[1], own)
for parameter, gradient in zip(own, wanted, strict=True):
    torch.testing.assert_close(parameter.grad, gradient)
for _ in range(2):  # what is raised in the middle of an evaluation leaves messages behind
    try:
        runner.eval(tokens, target=tokens.float())
    except Exception as error:
        last = str(error)
assert "an earlier step, eval or replace of this Runner ended in the middle" in last, last
"""


@pytest.mark.runtime
def test_what_one_rank_is_given_wrongly_is_refused_on_all():
    for rank in start_ranks(WRONG):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


FAILING = """
import sys
sys.path[:0] = sys.argv[1:]
from datetime import timedelta
import pytest, torch, torch.distributed as dist, runtime_torch
from optpipe_compiler.errors import RunFailed
import test_runtime_library as case

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
schedule = case.plan((0, 1))
stages = runtime_torch.build_stages(schedule, case.builders(), rank, "cpu", **case.microbatch())
inputs, target = case.batch()

def fails(*_):
    raise error

def late(layer):  # when all that the other rank waits for was sent
    count = iter(range(case.MICROBATCHES))
    return layer.tokens.weight.register_hook(lambda _: fails() if next(count) + 1 == case.MICROBATCHES else None)

early = torch.nn.Module.register_forward_pre_hook
for call, at, layer, hooked, kind, said in (
    ("step", 1, "3", lambda layer: early(layer, fails), RuntimeError, "Connection closed by rank 1"),
    ("eval", 1, "3", lambda layer: early(layer, fails), RunFailed, "eval() failed on rank 1, where"),
    ("step", 0, "0", late, RunFailed, "step() failed on rank 0, where its error is"),
):
    for error in (ValueError("no more"), KeyboardInterrupt("no more")):
        runner = runtime_torch.Runner(schedule, stages)
        runner.step(*inputs, target=target)
        hook = hooked(stages.module[layer]) if rank == at else None
        with pytest.raises(type(error) if rank == at else kind) as raised:
            getattr(runner, call)(*inputs, target=target)
        assert ("no more" if rank == at else said) in str(raised.value), raised.value
        with pytest.raises(RunFailed, match="ended in the middle"):
            runner.step(*inputs, target=target)
        if hook is not None:
            hook.remove()
runner = runtime_torch.Runner(schedule, stages)
stages.module.zero_grad()
runner.step(*inputs, target=target)
case.assert_equal_gradients(stages.module)
dist.destroy_process_group()
"""


@pytest.mark.runtime
def test_what_one_rank_fails_with_ends_the_wait_of_the_others_and_a_new_runner_goes_on():
    for rank in start_ranks(FAILING):
        _, errors = rank.communicate(timeout=100)
        assert rank.returncode == 0, errors


@pytest.mark.runtime
def test_ranks_with_different_schedules_all_say_so(tmp_path):
    first = plan((0, 1))
    other = ir.seal(msgspec.structs.replace(first, setup=msgspec.structs.replace(first.setup, cap_bytes=10**13)))
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    for path, schedule in zip(paths, (first, other), strict=True):
        path.write_text(ir.to_text(schedule))
    ranks = start_ranks(RANK, each=lambda rank: (str(paths[rank]),))
    for rank in ranks:
        assert "RunFailed: rank 1 has another schedule than rank 0" in rank.communicate(timeout=60)[1]
