"""Batches of other sizes than announced, weighed microbatches, losses of inner layers, keyword arguments."""

from __future__ import annotations

import weakref
from functools import partial

import pytest

pytest.importorskip("torch")
import torch
from test_runtime_library import HIDDEN, LENGTH, MAKERS, MICROBATCHES, RANGES, alone, plan, seeded, start_ranks
from torch import nn

import runtime_torch
from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput

__all__ = ["alone"]
IGNORED = -100


class Balanced(nn.Module):
    """A layer with a loss of its own, and a keyword argument."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, positions, mask, *, scale=1.0):
        mixed = torch.tanh(self.mix(x)) * scale
        return runtime_torch.add_loss(x + mixed, mixed.pow(2).mean().reshape(1)), positions, mask


class TokenHead(nn.Module):
    """The mean loss over the targets that count."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Linear(HIDDEN, 16)

    def forward(self, x, positions, mask, target):
        return nn.functional.cross_entropy(self.logits(x).flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def makers(*inner, head=None):
    kinds = [MAKERS[0], *inner, head or MAKERS[-1]]
    return [partial(seeded, index, make) for index, make in enumerate(kinds)]


PLAIN = makers(*MAKERS[1:-1])
BALANCED = makers(Balanced, Balanced, head=TokenHead)


def batch(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens, target = torch.randint(16, (2, samples, LENGTH), generator=generator)
    return (tokens, torch.rand(samples, LENGTH, generator=generator) < 0.7), target


def announced(size=2):
    inputs, target = batch(size)
    return {"inputs": inputs, "target": target}


def reference(functions, inputs, target, sizes, weights, keywords=None):
    """Weighed loss and gradients of the same layers without a pipeline, microbatch by microbatch."""
    layers = nn.ModuleDict({str(index): make() for index, make in enumerate(functions)})
    *inner, head = layers.values()
    total = 0.0
    wanted = {name: torch.zeros_like(parameter) for name, parameter in layers.named_parameters()}
    for number, (*parts, answer) in enumerate(zip(*(t.split(sizes) for t in (*inputs, target)), strict=True)):
        for layer in inner:
            parts = layer(*parts, **(keywords[number] if keywords and isinstance(layer, Balanced) else {}))
        loss = head(*parts, answer)
        total += weights[number] * loss.item()
        for name, gradient in zip(wanted, torch.autograd.grad(loss, list(layers.parameters())), strict=True):
            wanted[name] += weights[number] * gradient
    return total, wanted


@pytest.mark.parametrize("name", ["x", "mask", "target"])
def test_a_keyword_argument_with_the_name_of_an_input_is_refused_and_leaves_the_runner_usable(alone, name):
    schedule = plan((0, 0))
    stages = runtime_torch.build_stages(schedule, BALANCED, 0, "cpu", **announced())
    runner = runtime_torch.Runner(schedule, stages)
    inputs, target = batch(2 * MICROBATCHES)
    loss = runner.step(*inputs, target=target).loss
    for call in (runner.step, runner.eval):
        with pytest.raises(BadInput, match=f"the keyword argument {name} has the name of what layer [23] is given"):
            call(*inputs, target=target, keywords=[{}, {name: 1}])
    with pytest.raises(BadInput, match=r"eval\(\) got keywords for 1 microbatch, expected 2"):
        runner.eval(*inputs, target=target, keywords=[{"scale": 1.0}])
    assert runner.step(*inputs, target=target).loss == loss


class Longer(MAKERS[1]):
    """Passes a longer mask on when told to."""

    longer = False

    def forward(self, x, positions, mask):
        x, positions, mask = super().forward(x, positions, mask)
        return x, positions, mask.repeat(1, 2) if self.longer else mask


def assert_gradients(stages, wanted):
    found = dict(stages.module.named_parameters())
    assert found
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("samples", [2, 3])
def test_a_smaller_batch_gives_the_mean_over_its_samples(alone, samples, fused, ranges):
    schedule = plan((0, 0), fused=fused, ranges=ranges)
    stages = runtime_torch.build_stages(schedule, PLAIN, 0, "cpu", **announced())
    runner = runtime_torch.Runner(schedule, stages)
    whole, target = batch(2 * MICROBATCHES)
    runner.step(*whole, target=target)
    stages.module.zero_grad()
    inputs, target = batch(samples, seed=1)
    result = runner.step(*inputs, target=target)
    loss, wanted = reference(PLAIN, inputs, target, [samples - 1, 1], [(samples - 1) / samples, 1 / samples])
    assert result.loss == pytest.approx(loss)
    assert_gradients(stages, wanted)


@pytest.mark.parametrize("samples", [1, 7])
def test_validation_takes_any_number_of_samples(alone, samples):
    schedule = plan((0, 0))
    stages = runtime_torch.build_stages(schedule, PLAIN, 0, "cpu", **announced())
    inputs, target = batch(samples)
    losses = []
    found = runtime_torch.Runner(schedule, stages).eval(*inputs, target=target, losses=losses)
    assert found == pytest.approx(reference(PLAIN, inputs, target, [samples], [1.0])[0])
    assert len(losses) == (samples + 1) // 2


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_weights_make_the_mean_over_the_targets_that_count(alone, fused):
    functions = makers(*MAKERS[1:-1], head=TokenHead)
    inputs, target = batch(4)
    target[0], target[3, :3] = IGNORED, IGNORED
    counts = [(part != IGNORED).sum().item() for part in target.split(2)]
    schedule = plan((0, 0), fused=fused)
    stages = runtime_torch.build_stages(schedule, functions, 0, "cpu", **announced())
    weights = [count / sum(counts) for count in counts]
    result = runtime_torch.Runner(schedule, stages).step(*inputs, target=target, weights=weights)
    loss, wanted = reference(functions, inputs, target, [4], [1.0])
    assert counts == [5, 7]
    assert result.loss == pytest.approx(loss)
    assert_gradients(stages, wanted)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_a_microbatch_without_targets_that_count_weighs_nothing(alone, fused):
    functions = makers(*MAKERS[1:-1], head=TokenHead)
    inputs, target = batch(4)
    target[:2] = IGNORED
    stages = runtime_torch.build_stages(plan((0, 0), fused=fused), functions, 0, "cpu", **announced())
    losses = []
    runner = runtime_torch.Runner(plan((0, 0), fused=fused), stages)
    result = runner.step(*inputs, target=target, weights=[0.0, 1.0], losses=losses)
    loss, wanted = reference(functions, inputs, target, [4], [1.0])
    assert losses[0].isnan()
    assert result.loss == pytest.approx(loss)
    assert_gradients(stages, wanted)


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_a_loss_of_an_inner_layer_counts_as_a_part_of_its_microbatchs(alone, fused, ranges):
    inputs, target = batch(4)
    schedule = plan((0, 0), fused=fused, ranges=ranges)
    stages = runtime_torch.build_stages(schedule, BALANCED, 0, "cpu", **announced())
    how = {"weights": [0.25, 0.5], "keywords": [{"scale": 2.0}, {"scale": 0.5}]}
    result = runtime_torch.Runner(schedule, stages).step(*inputs, target=target, **how)
    loss, wanted = reference(BALANCED, inputs, target, [2, 2], **how)
    assert result.loss == pytest.approx(loss)
    assert_gradients(stages, wanted)


class Scale(float):
    """A keyword argument that can be watched."""


def test_a_step_keeps_no_keyword_argument_to_the_next(alone):
    inputs, target = batch(4)
    stages = runtime_torch.build_stages(plan((0, 0)), BALANCED, 0, "cpu", **announced())
    runner = runtime_torch.Runner(plan((0, 0)), stages)
    scale = Scale(2.0)
    runner.step(*inputs, target=target, keywords=[{"scale": scale}] * 2)
    kept = weakref.ref(scale)
    del scale
    assert kept() is None


def test_outside_of_steps_an_inner_loss_counts_as_if_its_sum_had_been_added():
    x, loss = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    (2 * runtime_torch.add_loss(x, loss)).sum().backward()
    assert x.grad.tolist() == [2, 2]
    assert loss.grad.tolist() == [1, 1, 1]


class Wayward(MAKERS[1]):
    """Changes its mind about what it returns."""

    dtype = torch.float32

    def forward(self, x):
        return torch.tanh(self.mix(x)).to(self.dtype)


class Only(nn.Module):
    """A head of one input."""

    def forward(self, x, target):
        return (x - target).pow(2).mean()


@pytest.mark.parametrize("step", ["step", "eval"])
def test_another_tensor_than_announced_is_refused_by_rank_and_layer_in_any_step(alone, step):
    functions = [partial(seeded, index, make) for index, make in enumerate([*[Wayward] * 3, Only])]
    schedule = plan((0, 0))
    x, target = torch.randn(2, 4, HIDDEN)
    stages = runtime_torch.build_stages(schedule, functions, 0, "cpu", inputs=[x[:2]], target=target[:2])
    runner = runtime_torch.Runner(schedule, stages)
    runner.step(x, target=target)
    stages.module["1"].dtype = torch.float64
    message = r"rank 0: layer 1 returned float64 of shape \(2, 8\) for microbatch 0, expected float32 of shape \(2, 8\)"
    with pytest.raises(BadInput, match=message) as caught:
        getattr(runner, step)(x, target=target)
    assert step == "eval" or caught.value.__notes__ == ["optpipe: rank 0 failed in forward:0:0"]


def test_of_several_tensors_each_is_held_against_what_was_announced(alone):
    functions = makers(Longer, Longer)
    schedule = plan((0, 0))
    stages = runtime_torch.build_stages(schedule, functions, 0, "cpu", **announced())
    runner = runtime_torch.Runner(schedule, stages)
    inputs, target = batch(3)
    runner.step(*inputs, target=target)
    stages.module["2"].longer = True
    message = (
        r"rank 0: layer 2 returned float32 .*, bool of shape \(2, 10\), expected float32 .*, bool of shape \(2, 5\)"
    )
    with pytest.raises(BadInput, match=message):
        runner.step(*inputs, target=target)


RANK = """
import sys
sys.path[:0] = sys.argv[2:]
import torch.distributed as dist
import runtime_torch, test_batches as case
dist.init_process_group("gloo")
schedule = runtime_torch.load_schedule(sys.argv[1])
stages = runtime_torch.build_stages(schedule, case.BALANCED, dist.get_rank(), "cpu", **case.announced())
runner = runtime_torch.Runner(schedule, stages)
has_last = len(schedule.stages) - 1 in stages

def mine(samples):
    inputs, target = case.batch(samples, seed=samples)
    return inputs if 0 in stages else (), target if has_last else None

for samples in (7, 4, 3):
    inputs, target = mine(samples)
    loss = runner.eval(*inputs, target=target)
    wanted = case.reference(case.BALANCED, *case.batch(samples, seed=samples), [samples], [1.0])[0]
    assert loss is None if not has_last else abs(loss - wanted) < 1e-5
weights = [0.25, 0.5]
result = runner.step(*inputs, target=target, weights=weights if has_last else None)
loss, wanted = case.reference(case.BALANCED, *case.batch(3, seed=3), [2, 1], weights)
assert result.loss is None if not has_last else abs(result.loss - loss) < 1e-5
case.assert_gradients(stages, wanted)
dist.destroy_process_group()
"""


@pytest.mark.runtime
@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 2, 3), (0, 1, 1, 0)], ids=["two", "four", "v"])
def test_ranks_learn_samples_and_weights_from_those_that_have_them(tmp_path, placement):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(plan(placement, fused=False)))
    for rank in start_ranks(RANK, str(path), world=1 + max(placement)):
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors


FAILING = """
import sys
sys.path[:0] = sys.argv[2:]
import torch.distributed as dist
import runtime_torch, test_batches as case

def broken(*_):
    raise ValueError("no more")

dist.init_process_group("gloo")
schedule = runtime_torch.load_schedule(sys.argv[1])
stages = runtime_torch.build_stages(schedule, case.PLAIN, dist.get_rank(), "cpu", **case.announced())
runner = runtime_torch.Runner(schedule, stages)
inputs, target = case.batch(4)
runner.step(*inputs, target=target)
if dist.get_rank() == 0:
    stages.module["1"].forward = broken
try:
    runner.step(*inputs, target=target)
except Exception:  # what Python itself does, but for the end: torch's threads may abort a Python that shuts down
    import os
    sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    os._exit(1)
"""


@pytest.mark.runtime
def test_a_failure_in_a_loop_of_ones_own_is_one_sentence_per_rank_beside_pythons_traceback(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(plan((0, 1))))
    for number, rank in enumerate(start_ranks(FAILING, str(path))):
        _, errors = rank.communicate(timeout=60)
        outside = [line.removeprefix(f"[rank{number}]: ") for line in errors.strip().splitlines()]
        assert outside[0] == "Traceback (most recent call last):", errors
        assert outside[-1] == f"optpipe: rank {number} failed in forward:{number}:0", errors
        assert outside[-2].startswith("ValueError: no more" if number == 0 else "RuntimeError: "), errors
        assert all(line.startswith("  ") for line in outside[1:-2]), errors


def test_a_batch_that_was_refused_says_nothing_of_later_ones(alone):
    """Neither a target that is too long, nor, where nobody announced a size, a validation of fewer samples."""
    schedule = plan((0, 0))
    layers = [nn.Linear(HIDDEN, HIDDEN) for _ in range(3)]
    x = torch.ones(2 * MICROBATCHES, HIDDEN)
    announced = runtime_torch.build_stages(schedule, [*layers, Distance()], 0, "cpu", inputs=[x[:2]], target=x[:2])
    runner = runtime_torch.Runner(schedule, announced)
    with pytest.raises(RuntimeError, match="size of tensor"):
        runner.step(x, target=torch.cat([x, x]))
    wanted = runner.step(x, target=x).loss
    modules = {0: nn.Sequential(*layers[:2]), 1: Last(layers[2])}
    stages = runtime_torch.wrap_stages(schedule, modules, 0, "cpu")
    runner = runtime_torch.Runner(schedule, stages, lambda layer: ((2, HIDDEN), torch.float32))
    with pytest.raises(BadInput, match=r"returned float32 of shape \(1, 8\) for microbatch 0"):
        runner.eval(x[:2], target=x[:2])
    assert runner.step(x, target=x).loss == wanted
    with pytest.raises(BadInput, match="expected at most 2 in each"):
        runner.step(torch.cat([x, x]), target=torch.cat([x, x]))


class Distance(nn.Module):
    def forward(self, x, target):
        return (x - target).square().mean()


class Last(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.loss = layer, Distance()

    def forward(self, x, target):
        return self.loss(self.layer(x), target)
