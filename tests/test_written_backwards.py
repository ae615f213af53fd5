"""Layers with a `torch.autograd.Function` beside whose input there are parameters: its backward runs once, whether the
schedule splits backwards or not, and gradients are those of a loop of plain torch."""

from __future__ import annotations

import inspect
from functools import partial
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.autograd.graph import get_gradient_edge  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402

from optpipe_compiler.errors import RunFailed  # noqa: E402
from runtime_torch import engine, split  # noqa: E402
from runtime_torch.execution import StageExecution  # noqa: E402
from tests.test_runtime_library import MICROBATCHES, alone, plan  # noqa: E402, F401
from tests.test_unusual_layers import (  # noqa: E402
    WIDTH,
    Scores,
    assert_trains_as_in_a_loop,
    batch,
    both,
    model,
    pipelined,
)


class _Linear(torch.autograd.Function):
    """Notes its backwards in `ran`; the gradient of the bias has a row per token, which autograd adds up."""

    ran: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        _Linear.ran.append(len(gradient))
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x, gradient


class _Scaled(torch.autograd.Function):
    """Finds its gradients in the forward and scales them in place in the backward, as fused losses do."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(weight.detach().clone(), x.detach().clone(), x.new_ones(1))
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        weight, x, scale = ctx.saved_tensors
        scale.mul_(2)
        found = gradient @ weight * scale / 2, gradient.T @ x * scale / 2, gradient.sum(0) * scale / 2
        weight.zero_()
        x.zero_()
        return found


class _Fused(torch.autograd.Function):
    """Adds to a buffer of gradients itself, as fused kernels do, and returns none."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad += gradient.T @ x
        return gradient @ ctx.weight.detach(), None, gradient.sum(0)


class _InGrad(_Fused):
    """Adds to the weight's `.grad` itself."""

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        added = gradient.T @ x
        ctx.weight.grad = added if ctx.weight.grad is None else ctx.weight.grad.add_(added)
        return gradient @ ctx.weight.detach(), None, gradient.sum(0)


class Written(nn.Linear):
    function = _Linear

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return self.function.apply(x, self.weight, self.bias)


class Scaled(Written):
    function = _Scaled


class Hooked(Written):
    """Hooks look at its gradients, the second after the first."""

    def __init__(self):
        super().__init__()
        self.weight.register_hook(lambda gradient: gradient * 2)
        self.bias.register_hook(torch.sin)

    def __deepcopy__(self, memo):
        other = type(self)()
        other.load_state_dict(self.state_dict())
        return other


class HookedTwice(Hooked):
    """Its function runs twice, one on the other's way or beside it; the hooks see the sum of both."""

    on_one_way = True

    def forward(self, x):
        first = super().forward(x)
        return super().forward(torch.tanh(first)) if self.on_one_way else first * super().forward(torch.sin(x))


class HookedBeside(HookedTwice):
    on_one_way = False


class Accumulated(HookedTwice):
    """A hook changes what has been accumulated for a microbatch."""

    def __init__(self):
        Written.__init__(self)
        self.weight.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(weight):
        weight.grad.mul_(0.5)


class _Rounded(torch.autograd.Function):
    """Passes the gradient on times a scale, which it then changes in place."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight.new_ones(1))
        return torch.round(weight * 8) / 8

    @staticmethod
    def backward(ctx, gradient):
        (scale,) = ctx.saved_tensors
        found = gradient * scale
        scale.mul_(2)
        return found


class Rounded(Written):
    """Its weight is computed by a function that is written, for two others."""

    def forward(self, x):
        weight = _Rounded.apply(self.weight)
        return self.function.apply(torch.tanh(self.function.apply(x, weight, self.bias)), weight, self.bias)


class Derived(Written):
    """Its weight is computed, and used by two functions."""

    def forward(self, x):
        weight = torch.exp(self.weight) * self.weight
        return self.function.apply(self.function.apply(x, weight, self.bias), weight.T, self.bias)


class Mixed(Written):
    """Its weight, computed or not, is read by a function that is written and one of torch's, on one way or on two."""

    computed, on_one_way, begins = False, True, True

    def forward(self, x):
        weight = torch.exp(self.weight) if self.computed else self.weight
        ways = [
            lambda x: self.function.apply(x, weight, self.bias),
            lambda x: F.linear(x, weight, self.bias),
        ]
        first, second = ways if self.begins else reversed(ways)
        return second(torch.tanh(first(x))) if self.on_one_way else first(x) * second(x)


KINDS = [
    Written,
    Scaled,
    Hooked,
    HookedTwice,
    HookedBeside,
    Accumulated,
    Rounded,
    Derived,
    *(
        type(
            f"Mixed{computed:d}{on_one_way:d}{begins:d}",
            (Mixed,),
            {"computed": computed, "on_one_way": on_one_way, "begins": begins},
        )
        for computed in (False, True)
        for on_one_way in (False, True)
        for begins in (False, True)
    ),
]


@pytest.fixture(params=["private", "public"])
def names(request, monkeypatch):
    """With the private names of torch and without."""
    if request.param == "public":
        for name in ("_run_backward", "_profiler_enabled", "_use_count", "_hooks", "_base", "_copy_each"):
            monkeypatch.setattr(engine, name, None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("placement", [(0, 0), (0, 0, 0, 0)], ids=["two stages", "four"])
@both
def test_gradients_are_those_of_a_loop(alone, names, kind, placement, fused):  # noqa: F811
    assert_trains_as_in_a_loop(model(kind, kind), fused=fused, placement=placement)


@pytest.mark.parametrize("kind", [Written, Derived, KINDS[-1]], ids=lambda kind: kind.__name__)
@both
def test_gradients_are_those_of_a_loop_where_layers_recompute(alone, kind, fused):  # noqa: F811
    assert_trains_as_in_a_loop(
        model(kind, kind), fused=fused, ranges=lambda stage, microbatch: [("recompute", 2 * stage, 2 * stage + 2)]
    )


class _Undone(torch.autograd.Function):
    """Overwrites its result in the backward, as layers that compute their input from it do."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        found = torch.tanh(F.linear(x, weight, bias))
        ctx.save_for_backward(x, weight, found)
        return found

    @staticmethod
    def backward(ctx, gradient):
        x, weight, found = ctx.saved_tensors
        before = gradient * (1 - found * found)
        found.zero_()
        return before @ weight, before.T @ x, before.sum(0)


@pytest.mark.parametrize("way", [None, "recompute", "offload"])
@both
def test_what_a_backward_overwrites_is_not_read_by_a_second_half(alone, way, fused):  # noqa: F811
    """The next layer has saved it, too; in a whole backward nobody reads it any more."""
    layers = model(type("Undone", (Written,), {"function": _Undone}), lambda: nn.Linear(WIDTH, WIDTH))

    def trains():
        assert_trains_as_in_a_loop(
            layers,
            fused=fused,
            placement=(0,),
            ranges=lambda stage, microbatch: [(way, 0, 4)] if way else [],
        )

    if fused:
        trains()
        return
    with pytest.raises(RunFailed, match=r"layer \d: a tensor that its backward reads was changed .* with --no-split"):
        trains()


class Checkpointed(Written):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class KeepsProducts(nn.Linear):
    """Checkpoints all but its products."""

    said: ClassVar[dict[str, bool]] = {}

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(
            lambda each: super(KeepsProducts, self).forward(each).tanh(),
            x,
            use_reentrant=False,
            context_fn=kept,
            **self.said,
        )


class ShowsProducts(KeepsProducts):
    said: ClassVar[dict[str, bool]] = {"respect_saved_tensors_hooks": True}


@both
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Checkpointed, r"with use_reentrant=True, .* expected use_reentrant=False, or a schedule"),
        (KeepsProducts, r"a layer has a selective torch.utils.checkpoint, .* or a schedule compiled with"),
    ],
)
def test_a_checkpoint_that_torch_does_not_split_trains_as_in_a_loop_or_is_refused(alone, make, sentence, fused):  # noqa: F811
    layers = model(make, make)
    if fused:
        assert_trains_as_in_a_loop(layers)
        return
    with pytest.raises(RunFailed, match=sentence):
        assert_trains_as_in_a_loop(layers, fused=False)


def test_what_a_selective_checkpoint_keeps_counts_where_it_is_shown():
    if "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters:
        pytest.skip("torch shows it since 2.14")
    found = []
    for make in (KeepsProducts, ShowsProducts):
        stage = StageExecution([make()], 1, is_first=False, is_last=False, device="cpu")
        stage.forward(0, torch.ones(2, WIDTH))
        found.append(stage.saved_bytes(0))
    assert found == [4 * 2 * WIDTH, 2 * 4 * 2 * WIDTH]  # the input, and the product


@both
def test_a_written_backward_runs_once_for_each_microbatch(alone, fused):  # noqa: F811
    _, runner = pipelined(model(Written, nn.Identity), plan((0, 0), fused=fused))
    x, target = batch(0)
    runner.step(x, target=target)
    _Linear.ran.clear()
    runner.step(x, target=target)
    assert len(_Linear.ran) == MICROBATCHES


@both
def test_gradients_that_a_function_adds_up_itself_are_added_once(alone, fused):  # noqa: F811
    layers = model(type("Fuses", (Written,), {"function": _Fused}), nn.Identity)
    plain = [Written(), nn.Identity()]
    plain[0].load_state_dict(layers[1].state_dict())
    layers[1].weight.main_grad = torch.zeros(WIDTH, WIDTH)
    stages, runner = pipelined(layers, plan((0, 0), fused=fused))
    weight = next(parameter for name, parameter in stages.module.named_parameters() if name == "1.weight")
    weight.main_grad.zero_()
    x, target = batch(0)
    runner.step(x, target=target)
    for part, its_target in zip(x.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True):
        (layers[3](plain[0](layers[0](part)), its_target) / MICROBATCHES).backward()
    torch.testing.assert_close(weight.main_grad, plain[0].weight.grad)
    assert weight.grad is None
    assert isinstance(layers[3], Scores)


@both
def test_a_function_that_keeps_its_weight_may_add_to_its_gradient(alone, fused):  # noqa: F811
    make = type("AddsToGrad", (Written,), {"function": _InGrad})
    assert_trains_as_in_a_loop(model(make, make), fused=fused)


def test_gradients_that_wait_for_the_second_half_are_told_of():
    layer = type("Reads", (Mixed,), {"on_one_way": False})()
    x = torch.randn(2, WIDTH, requires_grad=True)
    output = layer(x)
    _, rest = split.backward_input(get_gradient_edge(output), torch.ones_like(output), get_gradient_edge(x))
    assert sorted(tensor.numel() for tensor in rest.tensors()) == [WIDTH, 2 * WIDTH, WIDTH * WIDTH]
