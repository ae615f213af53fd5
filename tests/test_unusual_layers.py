"""Layers that do more than compute from their input: as in a loop of plain torch, or refused in a sentence."""

from __future__ import annotations

import copy
import random
import threading
import time
from typing import ClassVar

import pytest
from msgspec import structs

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.nn.utils.parametrizations import weight_norm  # noqa: E402
from torch.nn.utils.parametrize import cached  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import runtime_torch  # noqa: E402
from optpipe_compiler.errors import BadInput, RunFailed  # noqa: E402
from runtime_torch.carrier import DirectCarrier  # noqa: E402
from runtime_torch.execution import StageExecution  # noqa: E402
from tests.runtime_cases import promise_exactly  # noqa: E402
from tests.test_runtime_library import MICROBATCHES, Fails, alone, plan  # noqa: E402, F401

WIDTH, ROWS, STEPS = 6, 2, 2


def RECOMPUTED(stage, microbatch):
    """All layers, where stages have two."""
    return [("recompute", 2 * stage, 2 * stage + 2)]


both = pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])


class Scores(nn.Linear):
    """The last layer."""

    def __init__(self):
        super().__init__(WIDTH, 3)

    def forward(self, x, target):
        return F.cross_entropy(super().forward(x), target)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS * MICROBATCHES, WIDTH, generator=generator)
    return x, torch.randint(3, (len(x),), generator=generator)


def model(*middle):
    """A linear layer, the two given, and a loss."""
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), *(make() for make in middle), Scores()]


def pipelined(layers, schedule):
    x, target = batch(0)
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", inputs=[x[:ROWS]], target=target[:ROWS])
    return stages, runtime_torch.Runner(schedule, stages)


def in_a_loop(layers, x, target):
    """Add the gradients of the mean over microbatches, one after the other."""
    for part, its_target in zip(x.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True):
        flow = (part,)
        for layer in layers[:-1]:
            found = layer(*flow)
            flow = found if isinstance(found, tuple) else (found,)
        (layers[-1](*flow, its_target) / MICROBATCHES).backward()


def assert_trains_as_in_a_loop(layers, *, fused=True, placement=(0, 0), ranges=lambda stage, microbatch: []):
    """Gradients, None among them, and parameters of a few steps of AdamW, with weight decay."""
    plain = nn.ModuleDict({str(index): layer for index, layer in enumerate(copy.deepcopy(layers))})
    stages, runner = pipelined(layers, plan(placement, fused=fused, ranges=ranges))
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (stages.module, plain))
    for step in range(STEPS):
        x, target = batch(step)
        in_a_loop(list(plain.values()), x, target)
        runner.step(x, target=target)
        wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
        for name, parameter in stages.module.named_parameters():
            assert (parameter.grad is None) == (wanted[name] is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, wanted[name], msg=name)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(stages.module.state_dict(), plain.state_dict())


class ByName(nn.Linear):
    """Checkpoints itself, its input given by name."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return checkpoint(
            lambda *, given: F.linear(F.layer_norm(given, (WIDTH,)), self.weight), given=x, use_reentrant=False
        )


class _Attribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x = x
        ctx.save_for_backward(weight)
        return x.detach() @ weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0].T, ctx.x.detach().T @ gradient


class InAttribute(nn.Linear):
    """Its function keeps the input in an attribute."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return _Attribute.apply(x, self.weight)


@pytest.mark.parametrize("make", [ByName, InAttribute])
@both
def test_what_reads_the_input_of_a_stage_in_its_backward_finds_it(alone, make, fused):  # noqa: F811
    assert_trains_as_in_a_loop(model(make, make), fused=fused, placement=(0, 0, 0, 0))


class Entropy(nn.Linear):
    """Also returns what nobody reads, of which a gradient of zeros would be no number."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.logged = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x), torch.special.entr(torch.relu(self.logged(x)))


class Ignores(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, _):
        return super().forward(x)


class Detaches(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, also):
        return super().forward(x) + also.detach()


@pytest.mark.parametrize("reader", [Ignores, Detaches])
@pytest.mark.parametrize("placement", [(0, 0), (0, 0, 0, 0)])
@both
def test_one_of_several_tensors_that_has_no_gradient_has_none_behind_a_border(alone, reader, placement, fused):  # noqa: F811
    assert_trains_as_in_a_loop(model(Entropy, reader), fused=fused, placement=placement)
    assert_trains_as_in_a_loop(
        [Entropy(), reader(), nn.Linear(WIDTH, WIDTH), Scores()], fused=fused, placement=placement
    )


class Apart(nn.Linear):
    """Does not train what is before it; its own weights, or nothing."""

    def __init__(self, trains=True):
        super().__init__(WIDTH, WIDTH)
        self.trains = trains

    def forward(self, x):
        with torch.set_grad_enabled(self.trains):
            return super().forward(x.detach())


@pytest.mark.parametrize("trains", [True, False])
@both
def test_a_stage_that_passes_no_gradient_back_is_refused_before_the_first_step(alone, trains, fused):  # noqa: F811
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Apart(trains), Scores()]
    _, runner = pipelined(layers, plan((0, 0, 0, 0), fused=fused))
    x, target = batch(0)
    with pytest.raises(BadInput, match=r"stage 2 \(layers 2 to 2\) passes no gradient back to layer 1, .* frozen"):
        runner.step(x, target=target)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Apart(trains)), nn.Linear(WIDTH, WIDTH), nn.Identity(), Scores()]
    assert_trains_as_in_a_loop(layers, fused=fused, placement=(0, 0, 0, 0))  # as the sentence says


class ScoresToo(Scores):
    def forward(self, x, target):
        return super().forward(x, target), x


def test_a_last_layer_that_returns_more_than_the_loss_is_refused(alone):  # noqa: F811
    sentence = r"last layer returns float32 of shape \(\), float32 of shape \(2, 6\), expected the scalar loss alone"
    with pytest.raises(BadInput, match=sentence):
        pipelined([*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), ScoresToo()], plan((0, 0)))


@both
def test_frozen_layers_in_front_train_nothing(alone, fused):  # noqa: F811
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Scores()]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    assert_trains_as_in_a_loop(layers, fused=fused, placement=(0, 0, 0, 0))


@both
def test_a_weight_that_a_hook_changes_before_a_backward_reads_it_is_refused(alone, fused):  # noqa: F811
    def steps(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    stages, runner = pipelined(model(*[lambda: nn.Linear(WIDTH, WIDTH)] * 2), plan((0, 0), fused=fused))
    for parameter in stages.module.parameters():
        parameter.register_post_accumulate_grad_hook(steps)
    x, target = batch(0)
    with pytest.raises(RunFailed, match="a weight or buffer that its backward reads was changed in place"):
        runner.step(x, target=target)


class Adjacent(nn.Linear):
    """Has a sparse buffer."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("adjacent", torch.eye(WIDTH).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.adjacent, super().forward(x).T).T


class Sparsely(nn.Linear):
    """Makes a sparse tensor, which its backward reads."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return torch.sparse.mm(torch.eye(WIDTH).to_sparse(), super().forward(x).T).T


class Differentiates(nn.Linear):
    """Takes a gradient by torch.func."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.func.grad(lambda each: F.linear(each, self.weight).tanh().sum())(x)


class Forwards(nn.Linear):
    """Takes a derivative forwards, whose tensors have no memory of their own."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return torch.func.jvp(lambda each: F.linear(each, self.weight).tanh(), (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            Differentiates,
            "layer 1 takes gradients by torch.func in its forward, .* torch.autograd.grad with create_graph",
        ),
        (Forwards, "layer 1 saves a tensor for its backward that has no memory of its own"),
        (Adjacent, "layer 1: adjacent is sparse, expected a dense parameter or buffer"),
        (Sparsely, "layer 1 saves a sparse tensor for its backward, whose bytes are not counted, expected dense ones"),
    ],
)
def test_tensors_whose_bytes_cannot_be_counted_are_refused_in_a_sentence(alone, make, sentence):  # noqa: F811
    with pytest.raises(BadInput, match=sentence):
        assert_trains_as_in_a_loop(model(make, make))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("make", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(2, WIDTH))])
def test_a_layer_of_torchscript_is_refused_in_a_sentence(alone, make):  # noqa: F811
    with pytest.raises(BadInput, match=r"ule of torch.jit, .* expected the module that was scripted or traced"):
        pipelined(model(lambda: make(nn.Linear(WIDTH, WIDTH)), nn.Identity), plan((0, 0)))


def test_a_layer_in_tensor_parallelism_is_refused_in_a_sentence(alone):  # noqa: F811
    def parallel(layer):
        return parallelize_module(layer, init_device_mesh("cpu", (1,)), {"": ColwiseParallel()})

    x, target = batch(0)
    example = {"inputs": [x[:ROWS]], "target": target[:ROWS]}
    with pytest.raises(BadInput, match="layer 0: weight is a DTensor, which has no memory of its own"):
        runtime_torch.build_stages(
            plan((0, 0)), model(*[lambda: nn.Linear(WIDTH, WIDTH)] * 2), 0, "cpu", prepare=parallel, **example
        )


class Visited(nn.Linear):
    """Keeps the mean of some of what it sees, as an expert does; the trial of a later stage has nothing of it."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        if (x < 0).any():
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x - self.mean)


def test_a_recompute_is_refused_where_a_buffer_changed_that_the_trial_did_not_see(alone):  # noqa: F811
    _, runner = pipelined(model(lambda: nn.Linear(WIDTH, WIDTH), Visited), plan((0, 0), ranges=RECOMPUTED))
    x, target = batch(0)
    with pytest.raises(RunFailed, match="layer 2: its buffer mean has changed since the forward"):
        runner.step(x, target=target)


class Follows(nn.Linear):
    """Keeps a mean of what it sees in an attribute, there from the beginning or made by the first forward, replaced or
    changed in place, with its graph or without; and what it saw last, which no forward reads."""

    def __init__(self, way="replaced"):
        super().__init__(WIDTH, WIDTH)
        self.way = way
        self.mean = None if way.startswith("made") else torch.zeros(WIDTH)
        self.last = None

    def forward(self, x):
        now = x.mean(0) if self.way.endswith("with its graph") else x.detach().mean(0)
        before = torch.zeros(WIDTH) if self.mean is None else self.mean.detach()
        if self.mean is not None and self.way.endswith("in place"):
            before = before.clone()
            self.mean.lerp_(now, 0.5)
        else:
            self.mean = before.lerp(now, 0.5)
        self.last = super().forward(x * (1 + before) - before)
        return self.last


@both
@pytest.mark.parametrize("way", ["replaced", "in place", "made by the first", "with its graph", "made with its graph"])
def test_a_recompute_finds_tensors_in_attributes_as_its_forward_did(alone, way, fused):  # noqa: F811
    layers = model(lambda: Follows(way), lambda: Follows(way))
    assert_trains_as_in_a_loop(layers, fused=fused, ranges=RECOMPUTED)


def test_a_recompute_is_refused_where_a_tensor_that_the_first_forward_made_was_changed_in_place(alone):  # noqa: F811
    _, runner = pipelined(model(*[lambda: Follows("made, in place")] * 2), plan((0, 0), ranges=RECOMPUTED))
    x, target = batch(0)
    with pytest.raises(RunFailed, match="layer 1: the tensor in its attribute mean was changed in place since"):
        runner.step(x, target=target)


class Notices(nn.Linear):
    """Sets attributes where it sees numbers below zero, of which the trial of a later stage has none."""

    def __init__(self, way):
        super().__init__(WIDTH, WIDTH)
        self.way, self.seen, self.mean = way, 0, None if way == "made" else torch.zeros(WIDTH)

    def forward(self, x):
        before, seen = torch.zeros(WIDTH) if self.mean is None else self.mean.clone(), self.seen
        if (x < 0).any():
            self.seen += 1
            if self.way == "in place":
                self.mean.lerp_(x.detach().mean(0), 0.5)
            elif self.way == "taken away" and seen:
                self.mean = None
            else:
                self.mean = before.lerp(x.detach().mean(0), 0.5)
        return super().forward(x * (1 + seen) - before)


@both
@pytest.mark.parametrize("way", ["made", "replaced", "taken away"])
def test_a_recompute_finds_attributes_as_its_forward_did_where_the_trial_did_not_see_them_set(alone, way, fused):  # noqa: F811
    layers = model(lambda: Notices(way), lambda: Notices(way))
    assert_trains_as_in_a_loop(layers, fused=fused, ranges=RECOMPUTED)


def test_a_recompute_is_refused_where_a_tensor_changed_in_place_and_the_trial_did_not_see_it(alone):  # noqa: F811
    _, runner = pipelined(
        model(lambda: nn.Linear(WIDTH, WIDTH), lambda: Notices("in place")), plan((0, 0), ranges=RECOMPUTED)
    )
    x, target = batch(0)
    with pytest.raises(RunFailed, match="layer 2: the tensor in its attribute mean was changed in place since"):
        runner.step(x, target=target)


class Deletes(nn.Linear):
    """Has a tensor in an attribute that its first forward takes away."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.first = torch.full((WIDTH,), 2.0)

    def forward(self, x):
        factor = vars(self).pop("first", 1)
        return super().forward(x * factor)


@both
def test_a_recompute_finds_a_tensor_that_its_forward_took_away(alone, fused):  # noqa: F811
    assert_trains_as_in_a_loop(model(Deletes, Deletes), fused=fused, ranges=RECOMPUTED)


class Shifts(nn.Linear):
    """Changes its input, and the target."""

    def __init__(self, outputs=WIDTH, *, looks=False):
        super().__init__(WIDTH, outputs)
        self.looks = looks

    def forward(self, x, target=None):
        if target is not None:
            return F.cross_entropy(super().forward(x), target.add_(1).remainder_(3))
        if self.looks and (x > 1e9).any():  # not on the meta device
            raise ValueError
        return super().forward(x.add_(1))


@pytest.mark.parametrize("looks", [False, True])
def test_the_trial_leaves_a_batch_of_one_microbatch_as_it_was(alone, looks):  # noqa: F811
    torch.manual_seed(0)
    layers = [Shifts(looks=looks), *(nn.Linear(WIDTH, WIDTH) for _ in range(2)), Shifts(3)]
    plain = copy.deepcopy(layers)
    x, target = batch(0)
    example, its_target = x.clone(), target.clone()
    schedule = plan((0, 0), microbatches=1)
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", inputs=[example], target=its_target)
    assert torch.equal(example, x)
    assert torch.equal(its_target, target)
    runtime_torch.Runner(schedule, stages).step(example, target=its_target)
    for layer in plain[:-1]:
        x = layer(x)
    plain[-1](x, target).backward()
    for found, wanted in zip(stages.module.parameters(), nn.ModuleList(plain).parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


class Teacher(nn.Linear):
    """Follows itself, in a frozen parameter."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.slow = nn.Parameter(self.weight.detach() * 0.5, requires_grad=False)

    def forward(self, x):
        self.slow.data = self.slow.data.lerp(self.weight.data, 0.5)
        return super().forward(x) + F.linear(x, self.slow)


def test_a_frozen_parameter_that_a_forward_changes_is_refused_by_its_name(alone):  # noqa: F811
    _, runner = pipelined(model(Teacher, Teacher), plan((0, 0)))
    x, target = batch(0)
    with pytest.raises(BadInput, match="layer 1 changes its frozen parameter slow in its forward, expected a buffer"):
        runner.step(x, target=target)


class Decays(nn.Linear):
    """Changes a trained parameter in each forward."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        self.bias.data.mul_(0.99999)
        return super().forward(x)


def test_a_trained_parameter_that_each_forward_changes_is_refused_by_its_name(alone):  # noqa: F811
    _, runner = pipelined(model(Decays, Decays), plan((0, 0)))
    x, target = batch(0)
    with pytest.raises(BadInput, match="layer 1 changes its parameter bias in each forward, expected one that changes"):
        runner.step(x, target=target)


class Limits(Decays):
    """Limits its weight, which a second forward leaves as it is."""

    def forward(self, x):
        self.weight.data.clamp_(-0.2, 0.2)
        return F.linear(x, self.weight, self.bias)


class LooksUp(nn.Linear):
    """Limits the rows of a table that it looks up."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.table = nn.Embedding(9, WIDTH, max_norm=0.5)

    def forward(self, x):
        return super().forward(x) + self.table((x[:, 0] > 0).long() + 7)


@pytest.mark.parametrize("make", [Limits, LooksUp])
@pytest.mark.parametrize("ranges", [lambda stage, microbatch: [], RECOMPUTED], ids=["kept", "recomputed"])
@both
def test_a_limit_may_be_set_in_each_forward(alone, make, ranges, fused):  # noqa: F811
    layers = model(lambda: nn.Linear(WIDTH, WIDTH), make)
    with torch.no_grad():
        layers[1].weight.zero_()
        layers[1].bias.fill_(-1)  # what the trial of the next stage looks up is another row
    assert_trains_as_in_a_loop(layers, fused=fused, ranges=ranges)


class Local(nn.Linear):
    """Trains a part of its own in its forward."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.probe = nn.Linear(WIDTH, 1)

    def forward(self, x):
        if torch.is_grad_enabled():
            self.probe(x.detach()).square().mean().backward()
        return super().forward(x)


def test_the_trial_leaves_gradients_as_they_were(alone):  # noqa: F811
    assert_trains_as_in_a_loop(model(Local, Local))


class Balanced(nn.Linear):
    """Adds a loss within a checkpoint whose forward runs in the backward."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        def inner(y):
            return runtime_torch.add_loss(super(Balanced, self).forward(y), y.square().mean())

        return checkpoint(inner, x, use_reentrant=True)


def test_a_loss_that_is_added_in_a_backward_has_the_weight_of_its_microbatch(alone):  # noqa: F811
    """All forwards come before all backwards; weights are unequal."""
    layers = model(Balanced, Balanced)
    weights = [0.1 * (1 + number) for number in range(MICROBATCHES)]
    plain = nn.ModuleDict({str(index): layer for index, layer in enumerate(copy.deepcopy(layers))})
    x, target = batch(0)
    parts = zip(weights, x.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True)
    for weight, part, its_target in parts:
        flow = plain["0"](part)
        added = 0
        for name in ("1", "2"):
            added = added + flow.square().mean()
            flow = F.linear(flow, plain[name].weight, plain[name].bias)
        (weight * (plain["3"](flow, its_target) + added)).backward()
    stages, runner = pipelined(layers, plan((0, 0)))
    runner.step(x, target=target, weights=weights)
    for name, parameter in stages.module.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, msg=name)


class Dropping(nn.Linear):
    """Adds a loss to a tensor that it does not return, and keeps it where no step runs."""

    losses: ClassVar[list[torch.Tensor]] = []

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.probe = nn.Linear(WIDTH, 1)

    def forward(self, x):
        seen = self.probe(x)
        loss = seen.square().mean()
        self.losses.append(loss)
        runtime_torch.add_loss(seen, loss)
        return super().forward(x)


@pytest.mark.parametrize("placement", [(0,), (0, 0)])
@pytest.mark.parametrize("ranges", [(), ("recompute",)])
@both
def test_a_loss_counts_whatever_becomes_of_the_tensor_that_it_was_added_to(alone, placement, ranges, fused):  # noqa: F811
    layers = model(Dropping, Dropping)
    plain = nn.ModuleDict({str(index): layer for index, layer in enumerate(copy.deepcopy(layers))})
    x, target = batch(0)
    for part, its_target in zip(x.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True):
        Dropping.losses.clear()
        loss = plain["3"](plain["2"](plain["1"](plain["0"](part))), its_target)
        ((loss + sum(Dropping.losses)) / MICROBATCHES).backward()
    each = len(layers) // len(placement)
    schedule = plan(placement, fused=fused, ranges=lambda s, _: [(way, each * s, each * s + each) for way in ranges])
    stages, runner = pipelined(layers, schedule)
    runner.step(x, target=target)
    for name, parameter in stages.module.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, msg=name)


class CountingActivation(nn.Module):
    """Has the name of a cheap module, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(x) * self.calls


class NoisyActivation(nn.Module):
    """Has the name of one, and a generator."""

    def __init__(self):
        super().__init__()
        self.draw = random.Random(0)

    def forward(self, x):
        return torch.tanh(x) * self.draw.random()


@pytest.mark.parametrize("make", [CountingActivation, NoisyActivation])
def test_activations_with_a_state_of_their_own_are_not_made_again(alone, make):  # noqa: F811
    layers = model(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), make()), lambda: nn.Linear(WIDTH, WIDTH))
    plain = nn.ModuleDict({str(index): layer for index, layer in enumerate(copy.deepcopy(layers))})
    x, target = batch(0)
    in_a_loop(list(plain.values()), x, target)
    schedule = plan((0, 0))
    schedule = structs.replace(
        schedule, stages=[structs.replace(one, selective=[1]) for one in schedule.stages[:1]] + schedule.stages[1:]
    )
    stages, runner = pipelined(layers, schedule)
    assert stages[0].selective == {1}
    runner.step(x, target=target)
    for name, parameter in stages.module.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, msg=name)


def test_layers_that_share_a_module_keep_its_parameter_and_what_hangs_on_it(alone):  # noqa: F811
    inner = nn.Linear(WIDTH, WIDTH)
    weight = inner.weight
    weight.mine = True
    weight.register_hook(torch.zeros_like)
    stages, runner = pipelined([inner, nn.Sequential(inner), inner, Scores()], plan((0, 0)))
    x, target = batch(0)
    runner.step(x, target=target)
    assert stages.module["0"].weight is weight
    assert stages.module["2"].weight is weight
    assert not weight.grad.any()


def test_finding_shapes_draws_from_no_generator(alone):  # noqa: F811
    class Draws(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.draw = random.Random(0)

        def forward(self, x):
            return super().forward(x) * (1 + self.draw.random() + random.random())

    layers = model(Draws, Draws)
    before = [random.getstate(), *(layer.draw.getstate() for layer in layers[1:3])]
    pipelined(layers, plan((0, 0)))
    assert [random.getstate(), *(layer.draw.getstate() for layer in layers[1:3])] == before


def test_a_new_runner_forgets_what_a_failed_step_held(alone):  # noqa: F811
    x = torch.randn(2 * MICROBATCHES, WIDTH)
    layers = [*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), Fails(WIDTH, 1)]
    stages, runner = pipelined_on(x, layers)
    before = runner.step(x, target=x).peak_activation_bytes
    stages.module["3"].fails = True
    with pytest.raises(ValueError, match="no more"):
        runner.step(x, target=x)
    stages.module["3"].fails = False
    again = runtime_torch.Runner(plan((0, 0)), stages)
    assert stages[0].meter.current_bytes == 0
    assert [again.step(x, target=x).peak_activation_bytes for _ in range(2)] == [before, before]


@pytest.mark.parametrize("lane", ["d2h", "h2d"])
def test_a_step_that_fails_waits_for_the_copy_under_way(alone, monkeypatch, lane):  # noqa: F811
    begun, copied, copy = threading.Event(), threading.Event(), DirectCarrier._copy

    class FailsMeanwhile(Scores):
        fails = False

        def forward(self, x, target):
            forwards.append(self.fails)
            if self.fails and forwards.count(True) == 2:  # of the second microbatch
                assert begun.wait(10)
                raise ValueError("no more")
            return super().forward(x, target)

    def slowly(carrier, there, here):
        copies.append(threading.current_thread().name)
        is_slow = head.fails and copies[-1] == f"optpipe-{lane}" and copies.count(copies[-1]) == 3
        if is_slow:  # the lane's first of the second microbatch
            begun.set()
            time.sleep(0.5)
        copy(carrier, there, here)
        if is_slow:
            copied.set()

    copies, forwards, head = [], [], FailsMeanwhile()
    monkeypatch.setattr(DirectCarrier, "_copy", slowly)
    schedule = plan((0, 0), ranges=lambda stage, _: [("offload", 2 * stage, 2 * stage + 2)])
    stages, runner = pipelined([*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), head], schedule)
    x, target = batch(0)
    runner.step(x, target=target)
    copies.clear()
    head.fails = True
    with pytest.raises(ValueError, match="no more"):
        runner.step(x, target=target)
    assert copied.is_set()
    head.fails = False
    runtime_torch.Runner(schedule, stages).step(x, target=target)
    assert (stages[0].meter.current_bytes, stages[0].host_meter.current_bytes) == (0, 0)


def pipelined_on(x, layers):
    stages = runtime_torch.build_stages(plan((0, 0)), layers, 0, "cpu", inputs=[x[:2]], target=x[:2])
    return stages, runtime_torch.Runner(plan((0, 0)), stages)


class Routed(nn.Linear):
    """Saves much where its input says so, which that of the trial of a later stage does not."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        if (x < 0).any():
            x = F.linear(x.repeat(400, 1), self.weight).sigmoid()[: len(x)]
        return super().forward(x)


def test_data_that_make_layers_save_more_than_was_promised_are_told_once(alone):  # noqa: F811
    schedule = promise_exactly(plan((0, 0, 0, 0), saved=2000))
    _, runner = pipelined(model(Routed, Routed), schedule)
    x, target = batch(0)
    with pytest.warns(RuntimeWarning, match="bytes of activations, and the schedule promises"):
        runner.step(x, target=target)
    runner.step(x, target=target)


def test_layers_may_come_in_a_list_of_modules_and_lazy_ones_are_refused(alone):  # noqa: F811
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    for kind in (nn.ModuleList, lambda layers: nn.Sequential(*layers)):
        assert list(pipelined(kind([*linear, Scores()]), plan((0, 0)))[0].module) == ["0", "1", "2", "3"]
    with pytest.raises(BadInput, match="layer 2 has parameters without a shape"):
        runtime_torch.build_stages(plan((0, 0)), [*linear[:2], nn.LazyLinear(WIDTH), Scores()], 0, "cpu")


class Observes(nn.Linear):
    """Its observer is as large as what it has seen."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x):
        with torch.no_grad():
            if self.seen.numel() == 0:
                self.seen.resize_(WIDTH).zero_()
            self.seen.copy_(torch.maximum(self.seen, x.abs().amax(0)))
        return super().forward(x) / (1 + self.seen)


@pytest.mark.parametrize("ranges", [lambda *_: [], RECOMPUTED], ids=["kept", "recomputed"])
def test_a_buffer_that_grows_is_put_back_as_it_was(alone, ranges):  # noqa: F811
    assert_trains_as_in_a_loop(model(Observes, Observes), ranges=ranges)


class Lengths(nn.Linear):
    """Passes lengths along, of which none may be zero."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x), torch.full((len(x),), 2)


class Packs(nn.GRU):
    def __init__(self):
        super().__init__(WIDTH // 2, WIDTH // 2, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x.unflatten(1, (2, -1)), lengths, batch_first=True)
        found, _ = nn.utils.rnn.pad_packed_sequence(super().forward(packed)[0], batch_first=True, total_length=2)
        return found.flatten(1)


def test_what_fails_on_the_numbers_of_the_trial_says_so(alone):  # noqa: F811
    _, runner = pipelined(model(Lengths, Packs), plan((0, 0)))
    x, target = batch(0)
    with pytest.raises(RuntimeError, match="Length of all samples has to be greater than 0") as said:
        runner.step(x, target=target)
    assert "optpipe: in the trial before the first step, on made-up numbers behind stage 0" in said.value.__notes__


class Indexed(nn.Embedding):
    """Passes indices along of which only 0 is legal."""

    def __init__(self):
        super().__init__(1, WIDTH, max_norm=0.5)
        self.weight.requires_grad_(False)

    def forward(self, x, indices):
        return x + super().forward(indices)


class Zeros(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x), torch.zeros(len(x), dtype=torch.int64)


def test_the_trial_of_a_later_stage_has_indices_that_are_legal_and_frozen_weights_may_be_renormed(alone):  # noqa: F811
    assert_trains_as_in_a_loop(model(Zeros, Indexed))


class Grows(nn.Linear):
    """Keeps a table in a buffer, as large as it was ever needed."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1]).sin()
        return super().forward(x) + self.table[: x.shape[1]]


def test_a_table_that_a_forward_makes_is_made_once_more_by_a_recompute(alone):  # noqa: F811
    assert_trains_as_in_a_loop(model(Grows, Grows), ranges=RECOMPUTED)


class Named(torch.Tensor):
    """A class of one's own."""


class Names(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x).as_subclass(Named)


@both
def test_a_stage_may_end_with_a_tensor_of_a_class_of_its_own(alone, fused):  # noqa: F811
    assert_trains_as_in_a_loop(model(Names, Names), fused=fused, placement=(0, 0, 0, 0))


class Offset(nn.Module):
    """Adds a table to its input, of which torch takes the gradient of both for the same memory."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(ROWS * WIDTH))

    def forward(self, x):
        return x + self.table.view_as(x)


@both
def test_a_gradient_that_is_passed_on_stays_as_it_is_when_weights_get_more(fused):
    stage = StageExecution([Offset()], 1, is_first=False, is_last=False, device="cpu")
    gradients = [torch.randn(ROWS, WIDTH) for _ in range(3)]
    wanted, passed = [one.clone() for one in gradients], []
    for microbatch in range(3):
        stage.forward(microbatch, torch.randn(ROWS, WIDTH))
    for microbatch, gradient in enumerate(gradients):
        if fused:
            passed.append(stage.backward(microbatch, gradient))
        else:
            passed.append(stage.backward_input(microbatch, gradient))
            stage.backward_weight(microbatch)
    assert all(map(torch.equal, passed, wanted))
    assert all(map(torch.equal, gradients, wanted))
    torch.testing.assert_close(stage.layers[0].table.grad, sum(wanted).flatten())


@both
def test_a_gradient_that_a_hook_takes_away_begins_anew_with_memory_of_its_own(fused):
    layer = Offset()
    stage = StageExecution([layer], 1, is_first=False, is_last=False, device="cpu")
    taken = []

    def take(table):
        if len(taken) == 1:
            table.grad = None
        taken.append(table)

    layer.table.register_post_accumulate_grad_hook(take)
    passed = []
    for microbatch in range(4):
        stage.forward(microbatch, torch.randn(ROWS, WIDTH))
    for microbatch in range(4):
        gradient = torch.full((ROWS, WIDTH), float(microbatch))
        if fused:
            passed.append(stage.backward(microbatch, gradient))
        else:
            passed.append(stage.backward_input(microbatch, gradient))
            stage.backward_weight(microbatch)
    assert [float(one.max()) for one in passed] == [0, 1, 2, 3]
    assert layer.table.grad.eq(2 + 3).all()


class Uncertain(Scores):
    """Adds a learned number to the loss."""

    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.zeros(1))

    def forward(self, x, target):
        return super().forward(x, target) + self.number.squeeze()


@both
def test_a_learned_part_of_the_loss_leaves_the_weights_of_microbatches_as_they_are(alone, fused):  # noqa: F811
    layers = [*model(Offset, lambda: nn.Linear(WIDTH, WIDTH))[:-1], Uncertain()]
    assert_trains_as_in_a_loop(layers, fused=fused, placement=(0, 0, 0, 0))


class _Halves(torch.autograd.Function):
    """Halves the gradient, in place."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(0.5)


class Halved(Scores):
    def forward(self, x, target):
        return _Halves.apply(super().forward(x, target))


@both
def test_a_loss_may_change_in_place_the_gradient_that_it_is_given(alone, fused):  # noqa: F811
    assert_trains_as_in_a_loop([*model(nn.Tanh, nn.Tanh)[:-1], Halved()], fused=fused)


class Offsets(nn.Linear):
    """Adds parameters to a result whose backward changes in place the gradient of both."""

    def __init__(self):
        super().__init__(1, WIDTH, bias=False)

    def forward(self, x):
        return self.weight.T + _Halves.apply(x)


@both
def test_a_backward_that_changes_the_gradient_of_a_second_half_is_refused(alone, fused):  # noqa: F811
    if fused:
        assert_trains_as_in_a_loop(model(Offsets, Offsets))
        return
    with pytest.raises(RunFailed, match=r"changes in place the gradient that it is given, .* compiled with --no-split"):
        assert_trains_as_in_a_loop(model(Offsets, Offsets), fused=False)


class _InWorkspace(torch.autograd.Function):
    """Its backward returns one tensor again and again."""

    @staticmethod
    def forward(ctx, x, workspace):
        ctx.workspace = workspace
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.workspace.copy_(gradient), None


WORKSPACE = torch.empty(ROWS, WIDTH)


class InWorkspace(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(_InWorkspace.apply(x, WORKSPACE))


@both
def test_a_gradient_that_another_microbatch_changes_before_it_is_read_is_refused(alone, fused):  # noqa: F811
    said = "backward:0:0: what it passes on was changed in place since a layer's backward had returned it"
    if not fused:
        said = "layers 0 to 1: a gradient that waits for the second half of a split backward was changed in place"
    with pytest.raises(RunFailed, match=said):
        assert_trains_as_in_a_loop(model(InWorkspace, InWorkspace), fused=fused)


class ClearsUp(nn.Linear):
    """Clears its last result in its next forward."""

    last = None

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        if self.last is not None:
            self.last.zero_()
        result = super().forward(x)
        self.last = result.detach()
        return result


def test_a_result_that_the_next_forward_changes_before_it_is_read_is_refused(alone):  # noqa: F811
    with pytest.raises(RunFailed, match=r"forward:1:0: what it passes on was changed in place since a layer's forward"):
        assert_trains_as_in_a_loop(model(ClearsUp, nn.Tanh))


@both
def test_a_graph_that_microbatches_share_is_refused_with_what_to_do(alone, fused):  # noqa: F811
    layers = model(*[lambda: weight_norm(nn.Linear(WIDTH, WIDTH))] * 2)
    _, runner = pipelined(layers, plan((0, 0), fused=fused))
    x, target = batch(0)
    with cached(), pytest.raises(RunFailed, match="expected a graph for each microbatch, not one"):
        runner.step(x, target=target)
