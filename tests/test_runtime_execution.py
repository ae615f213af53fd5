"""Stage execution: every way to buy memory gives the gradients of plain autograd, and gives the memory back."""

from __future__ import annotations

import copy
import gc
import itertools
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from optpipe_compiler.errors import RunFailed  # noqa: E402
from runtime_torch import engine, random_state  # noqa: E402
from runtime_torch.carrier import DirectCarrier  # noqa: E402
from runtime_torch.execution import StageExecution  # noqa: E402
from runtime_torch.meter import Meter  # noqa: E402

WIDTH, VOCAB, ROWS, LENGTH = 8, 11, 2, 5


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x):
        return self.token(x) + self.position(torch.arange(x.shape[1]))


class Block(nn.Module):
    """Attention over a fused projection (views of one storage), dropout, MLP."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.runs = []
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((WIDTH,), 0.9))

    def forward(self, x):
        self.runs.append(None)
        q, k, v = (t.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed)) * self.scale
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x, target):
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), target.flatten())


def model(blocks=3, dropout=0.0):
    torch.manual_seed(0)
    return [Embedding(), *(Block(dropout) for _ in range(blocks)), Head()]


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(VOCAB, (3 * ROWS, LENGTH + 1), generator=generator)
    return whole[ROWS : 2 * ROWS, :-1], whole[ROWS : 2 * ROWS, 1:]


def plain(layers, x, target):
    """Loss and gradients of plain autograd, random state seeded with 5."""
    layers = copy.deepcopy(layers)
    torch.manual_seed(5)
    for layer in layers[:-1]:
        x = layer(x)
    loss = layers[-1](x, target)
    loss.backward()
    return loss.detach(), [p.grad for layer in layers for p in layer.parameters()]


def stages(layers, cuts, meter=None, host=None):
    bounds = [0, *cuts, len(layers)]
    meter, host = meter or Meter(), host or Meter()
    return [
        StageExecution(
            layers[a:b],
            a,
            is_first=a == 0,
            is_last=b == len(layers),
            device="cpu",
            meter=meter,
            host_meter=host,
        )
        for a, b in itertools.pairwise(bounds)
    ]


def replay(parts, x, target, *, fused=True, recomputed=(), offloaded=()):
    """One microbatch through all stages, with the given ranges recomputed or offloaded; return the loss."""
    torch.manual_seed(5)
    for part in parts:
        mine = [r for r in recomputed if part.first_layer <= r[0] < part.end_layer]
        x = part.forward(0, x, target if part.is_last else None, mine)
    for part in parts:
        for layers in offloaded:
            if part.first_layer <= layers[0] < part.end_layer:
                part.offload(0, layers)
                assert part.saved_bytes(0, layers) == 0
    gradient = None
    for part in reversed(parts):
        for layers in offloaded:
            if part.first_layer <= layers[0] < part.end_layer:
                part.reload(0, layers)
        for layers in recomputed:
            if part.first_layer <= layers[0] < part.end_layer:
                part.recompute(0, layers)
        gradient = part.backward(0, gradient) if fused else part.backward_input(0, gradient)
    if not fused:
        for part in parts:
            part.backward_weight(0)
    return x


WAYS = {
    "keep": {},
    "offload": {"offloaded": [(0, 1), (1, 3), (4, 5)]},
    "recompute": {"recomputed": [(0, 1), (1, 3), (3, 4), (4, 5)]},
    "part of each stage": {"recomputed": [(2, 3)], "offloaded": [(1, 2), (3, 4)]},
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cuts", [(), (3,), (1, 3, 4)], ids=["one stage", "two stages", "four stages"])
def test_every_way_gives_the_gradients_of_plain_autograd_bit_by_bit(cuts, way, fused, dropout):
    layers, (x, target) = model(dropout=dropout), batch()
    loss, gradients = plain(layers, x, target)
    meter, host = Meter(), Meter()
    parts = stages(layers, cuts, meter, host)
    assert replay(parts, x, target, fused=fused, **WAYS[way]).item() == loss.item()
    found = [p.grad for layer in layers for p in layer.parameters()]
    for mine, theirs in zip(found, gradients, strict=True):
        assert torch.equal(mine, theirs)
    assert (meter.current_bytes, host.current_bytes) == (0, 0)
    assert meter.peak_bytes > 0
    assert (host.peak_bytes > 0) == ("offloaded" in WAYS[way])


def test_gradients_add_up_over_microbatches_and_mixed_backwards():
    layers = model()
    parts = stages(layers, (2,))
    total = None
    for seed, fused in ((1, True), (2, False), (3, True)):
        x, target = batch(seed)
        _, gradients = plain(layers, x, target)
        total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
        replay(parts, x, target, fused=fused)
    for mine, theirs in zip([p.grad for layer in layers for p in layer.parameters()], total, strict=True):
        torch.testing.assert_close(mine, theirs)


class Dropping(nn.Module):
    """Scales by numbers of Python's and of numpy's global generator, as layers are dropped here and there."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return x + self.block(x) * random.random() * np.random.random()  # noqa: NPY002


def test_a_recompute_draws_the_numbers_of_its_forward_from_python_and_numpy_too():
    first, *blocks, last = model()
    layers, (x, target) = [first, *map(Dropping, blocks), last], batch()

    def seeded():
        random.seed(3)
        np.random.seed(4)  # noqa: NPY002

    seeded()
    _, gradients = plain(layers, x, target)
    drawn = random.random(), np.random.random()  # noqa: NPY002
    seeded()
    replay(stages(layers, (3,)), x, target, fused=False, recomputed=[(1, 3), (3, 4)])
    # as if nothing had been drawn again
    assert (random.random(), np.random.random()) == drawn  # noqa: NPY002
    for mine, theirs in zip([p.grad for layer in layers for p in layer.parameters()], gradients, strict=True):
        assert torch.equal(mine, theirs)


class Owning(nn.Module):
    """Scales by numbers of its own generators."""

    def __init__(self, block):
        super().__init__()
        self.block = block
        self.own(
            in_torch=torch.Generator().manual_seed(0),
            in_python=random.Random(1),
            in_numpy=np.random.default_rng(2),
            old_numpy=np.random.RandomState(3),
        )

    def own(self, **generators):
        vars(self).update(generators)

    def forward(self, x):
        by_numpy = self.in_numpy.random() * self.old_numpy.random_sample()
        return x + self.block(x) * torch.rand((), generator=self.in_torch) * self.in_python.random() * by_numpy


class Keeping(Owning):
    """Has its generators in a dictionary, in which there are lists."""

    def own(self, **generators):
        self.kept = {"in lists": {name: [one] for name, one in generators.items()}}
        self.kept["itself"] = self.kept

    def __getattr__(self, name):
        kept = vars(self)["kept"]["in lists"]
        return kept[name][0] if name in kept else super().__getattr__(name)


@pytest.mark.parametrize("owning", [Owning, Keeping])
def test_a_recompute_draws_the_numbers_of_its_forward_from_generators_of_the_layers_too(owning):
    first, *blocks, last = model()
    x, target = batch()
    layers = [first, *map(owning, blocks), last]
    _, gradients = plain(layers, x, target)
    replay(stages(layers, (3,)), x, target, fused=False, recomputed=[(1, 3), (3, 4)])
    for mine, theirs in zip([p.grad for layer in layers for p in layer.parameters()], gradients, strict=True):
        assert torch.equal(mine, theirs)
    once = random.Random(1)
    once.random()
    for layer in layers[1:-1]:  # as if nothing had been drawn again
        assert layer.in_python.getstate() == once.getstate()


class Counting(nn.Module):
    """Scales by how often it was called, and by whether it was before."""

    def __init__(self, block):
        super().__init__()
        self.block, self.calls = block, 0

    def forward(self, x):
        self.calls += 1
        scale = 1.0 if hasattr(self, "seen") else 0.5
        self.seen = True
        return x + self.block(x) * scale / self.calls


def test_a_recompute_counts_as_its_forward_did():
    first, *blocks, last = model()
    x, target = batch()
    layers = [first, *map(Counting, blocks), last]
    _, gradients = plain(layers, x, target)
    parts = stages(layers, (3,))
    flow = x
    for stage in parts:  # a trial says what forwards count
        with stage.trying():
            flow = stage.forward(0, flow, target)
            stage.discard(0)
    replay(parts, x, target, fused=False, recomputed=[(1, 3), (3, 4)])
    for mine, theirs in zip([p.grad for layer in layers for p in layer.parameters()], gradients, strict=True):
        assert torch.equal(mine, theirs)
    assert [layer.calls for layer in layers[1:-1]] == [1] * len(blocks)  # as if nothing had been called again


def test_a_trial_leaves_every_random_state_as_it_was():
    layers = [Owning(Dropping(nn.Linear(4, 4)))]
    stage = StageExecution(layers, 0, is_first=True, is_last=False, device="cpu")
    random.seed(3)
    np.random.seed(4)  # noqa: NPY002
    torch.manual_seed(5)
    before = random_state.now([*random_state.everywhere(stage.device), *random_state.owned(layers[0].modules())])
    with stage.trying():
        stage.forward(0, torch.rand(2, 4))
        assert random_state.has_changed(before)
    assert not random_state.has_changed(before)


def test_an_activation_is_saved_once_where_an_attribute_was_that_the_forward_replaced():
    class Replaces(nn.Linear):
        def __init__(self):
            super().__init__(64, 64)
            self.last = torch.zeros(8, 64)

        def forward(self, x):
            self.last = torch.zeros(8, 64)
            y = super().forward(x)
            return y.sin() * y.cos() * y

    stage = StageExecution([Replaces()], 0, is_first=False, is_last=False, device="cpu")
    x, found = torch.randn(8, 64), set()
    with stage.trying():
        stage.forward(0, x)
        stage.discard(0)
    for microbatch in range(8):
        stage.begin()
        stage.forward(microbatch, x)
        found.add(stage.saved_bytes(microbatch))
    assert len(found) == 1


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_a_recompute_runs_each_forward_exactly_once_more(fused):
    layers, (x, target) = model(), batch()
    parts = stages(layers, (3,))
    for block in layers[1:4]:
        block.runs.clear()
    replay(parts, x, target, fused=fused, recomputed=[(1, 2), (3, 4)])
    assert [len(block.runs) for block in layers[1:4]] == [2, 1, 2]


def test_views_and_shared_storages_are_counted_and_copied_once():
    class Views(nn.Module):
        def forward(self, x, target):
            a, b = x.chunk(2, -1)
            return (a * b * a.sin() * b).sum()

    part = StageExecution([Views()], 0, is_first=False, is_last=True, device="cpu")
    x = torch.randn(4, 6)
    part.forward(0, x, torch.zeros(1))
    saved = part.saved_bytes(0)
    distinct = {"x": x.nbytes, "a*b": x.nbytes // 2, "sin": x.nbytes // 2, "a*b*sin": x.nbytes // 2}
    assert saved == sum(distinct.values())
    part.offload(0, (0, 1))
    assert (part.saved_bytes(0), part.host_meter.current_bytes) == (0, saved)
    part.reload(0, (0, 1))
    assert (part.saved_bytes(0), part.host_meter.current_bytes) == (saved, 0)


def test_copies_on_the_host_lie_there_whatever_the_default_device():
    part = StageExecution([nn.Linear(4, 4)], 1, is_first=False, is_last=False, device="cpu")
    x = torch.randn(2, 4)
    with torch.device("meta"):  # as `torch.set_default_device("cuda")` of a loop
        part.forward(0, x)
        part.offload(0, (1, 2))
        part.reload(0, (1, 2))
        part.backward(0, x)
    assert torch.equal(part.layers[0].weight.grad, x.T @ x)


class CountingCarrier(DirectCarrier):
    """Notes the address of every storage that it moves."""

    def __init__(self, part):
        super().__init__(part.device, part.meter, part.host_meter)
        self.out, self.back = [], []

    def take(self, storages):
        self.out += [storage.data_ptr() for storage in storages]
        return super().take(storages)

    def bring(self, host_copies):
        self.back += [host_copy.pieces[0].data_ptr() for host_copy in host_copies]
        return super().bring(host_copies)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_an_offload_moves_each_saved_storage_exactly_once_and_no_parameter_or_buffer(fused):
    layers, (x, target) = model(), batch()
    part = stages(layers, ())[0]
    part.carrier = carrier = CountingCarrier(part)
    part.forward(0, x, target)
    saved = {storage.data_ptr() for storage in part._passes[0].store.storages()}
    constants = {t.untyped_storage().data_ptr() for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    for layers_ in ((0, 2), (2, 5)):
        part.offload(0, layers_)
    assert len(carrier.out) == len(saved)
    assert set(carrier.out) == saved
    assert saved.isdisjoint(constants)
    for layers_ in ((2, 5), (0, 2)):
        part.reload(0, layers_)
    assert len(carrier.back) == len(set(carrier.back)) == len(saved)
    if fused:
        part.backward(0, None)
    else:
        part.backward_input(0, None)
        part.backward_weight(0)
    assert (len(carrier.out), len(carrier.back)) == (len(saved), len(saved))


@pytest.mark.parametrize("way", ["offload", "recompute"])
def test_non_contiguous_saved_tensors_come_back_as_they_were(way):
    class Strides(nn.Module):
        def forward(self, x):
            wide = x.exp()
            return (wide.t()[1:] * wide[:, ::2].t()[:1].expand(5, -1)).sin()

    x, gradient = torch.randn(4, 6), torch.randn(5, 4)
    part = StageExecution([Strides()], 0, is_first=False, is_last=False, device="cpu")
    whole = x.clone().requires_grad_()
    Strides()(whole).backward(gradient)
    part.forward(0, x, recomputed=[(0, 1)] if way == "recompute" else ())
    if way == "offload":
        assert part.saved_bytes(0) == 96 + 80  # exp's output, of which all else are views, and the sine's input
        part.offload(0, (0, 1))
        part.reload(0, (0, 1))
    else:
        part.recompute(0, (0, 1))
        assert part.saved_bytes(0) == 96 + 80
    assert torch.equal(part.backward(0, gradient), whole.grad)


@pytest.mark.parametrize("way", ["offload", "recompute"])
def test_conjugates_and_negatives_that_torch_keeps_as_views_come_back_as_they_were(way):
    class Correlation(nn.Module):
        def forward(self, x):
            spectrum = torch.fft.fft(x)
            conjugate = spectrum.roll(1, 0).conj()
            found = spectrum * conjugate
            return found.real + conjugate.imag * x.sin()

    x, gradient = torch.randn(4, 6), torch.randn(4, 6)
    assert torch.fft.fft(x).conj().is_conj()
    assert torch.fft.fft(x).conj().imag.is_neg()
    part = StageExecution([Correlation()], 0, is_first=False, is_last=False, device="cpu")
    whole = x.clone().requires_grad_()
    Correlation()(whole).backward(gradient)
    part.forward(0, x, recomputed=[(0, 1)] if way == "recompute" else ())
    if way == "offload":
        part.offload(0, (0, 1))
        part.reload(0, (0, 1))
    else:
        part.recompute(0, (0, 1))
    assert torch.equal(part.backward(0, gradient), whole.grad)


@pytest.fixture(params=["private names", "public names"])
def names(request, monkeypatch):
    """torch with its private names, and without."""
    if request.param == "public names":
        for name in ("_run_backward", "_profiler_enabled", "_use_count", "_hooks", "_base", "_copy_each"):
            monkeypatch.setattr(engine, name, getattr(engine, name))
        monkeypatch.setattr(engine, "_flash", dict(engine._flash))  # is emptied
        engine.use_public_names()


@pytest.mark.parametrize("way", ["offload", "recompute"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_dropout_under_autocast_gives_the_gradients_of_keeping_bit_by_bit(names, way, fused):
    layers, (x, target) = model(dropout=0.4), batch()
    parts = stages(layers, (3,))

    def gradients(**ways):
        for layer in layers:
            layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            replay(parts, x, target, fused=fused, **ways)
        return [p.grad.clone() for layer in layers for p in layer.parameters()]

    kept = gradients()
    for mine, theirs in zip(gradients(**WAYS[way]), kept, strict=True):
        assert torch.equal(mine, theirs)


class Exact(nn.Linear):
    """A layer that computes in fp32 whatever autocast says."""

    def forward(self, x, target=None):
        with torch.autocast("cpu", enabled=False):
            out = super().forward(x.float())
        return out.tanh() if target is None else F.cross_entropy(out.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_a_step_under_autocast_has_the_gradients_of_a_backward_behind_it(names, fused):
    torch.manual_seed(0)
    layers, (x, target) = [Embedding(), Exact(WIDTH, WIDTH), Exact(WIDTH, VOCAB)], batch()
    parts = stages(layers, (1, 2))
    whole = copy.deepcopy(layers)
    with torch.autocast("cpu", torch.bfloat16):
        replay(parts, x, target, fused=fused)
        loss = whole[2](whole[1](whole[0](x)), target)
    loss.backward()
    for mine, theirs in zip(layers, whole, strict=True):
        for found, expected in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(found.grad, expected.grad)


def test_parameters_and_buffers_are_not_stored():
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    part = StageExecution([linear, nn.Identity()], 3, is_first=False, is_last=False, device="cpu")
    x = torch.randn(ROWS, WIDTH)
    part.forward(0, x)
    assert part.saved_bytes(0) == x.nbytes


def test_between_input_and_weight_gradient_only_what_the_weight_gradient_reads_stays():
    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    part = StageExecution([mlp], 0, is_first=False, is_last=False, device="cpu")
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    part.forward(0, x)
    assert part.saved_bytes(0) == x.nbytes + 4 * x.nbytes + 4 * x.nbytes  # x, the GELU's input, its output
    part.backward_input(0, gradient)
    assert part.saved_bytes(0) == x.nbytes + 4 * x.nbytes  # the inputs of the two linear layers
    assert part.captured_bytes(0) == x.nbytes + 4 * x.nbytes  # the gradients of their outputs
    assert part.meter.current_bytes == 10 * x.nbytes
    part.backward_weight(0)
    assert part.meter.current_bytes == 0


class RMSNorm(nn.Module):
    """Written out, as models have it that are older than torch's own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(WIDTH), lambda: nn.RMSNorm(WIDTH), RMSNorm])
def test_norms_keep_nothing_but_their_own_gradients_for_the_weight_gradient(norm):
    part = StageExecution([nn.Sequential(norm(), nn.Tanh())], 0, is_first=False, is_last=False, device="cpu")
    x, gradient = torch.randn(64, WIDTH), torch.randn(64, WIDTH)
    part.forward(0, x)
    part.backward_input(0, gradient)
    parameters = list(part.layers[0].parameters())
    assert part.saved_bytes(0) == 0
    assert part.captured_bytes(0) == sum(p.nbytes for p in parameters)
    assert all(p.grad is None for p in parameters)
    part.backward_weight(0)
    found = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    part.layers[0](x).backward(gradient)
    assert all(torch.equal(mine, p.grad) for mine, p in zip(found, parameters, strict=True))


def test_a_transformer_block_keeps_the_inputs_and_output_gradients_of_its_linear_layers_and_nothing_else():
    x, gradient = torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, LENGTH, WIDTH)
    part = StageExecution([Block()], 1, is_first=False, is_last=False, device="cpu")
    part.forward(0, x)
    part.backward_input(0, gradient)
    inputs, outputs = 1 + 1 + 1 + 4, 3 + 1 + 4 + 1  # of qkv, out, up, down, in boundaries
    norms = 4 * WIDTH * 4
    assert part.meter.current_bytes == (inputs + outputs) * x.nbytes + norms


def test_a_parameter_with_a_hook_of_its_own_sees_its_gradient_once():
    norm, x, gradient = nn.LayerNorm(WIDTH), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    for parameter in norm.parameters():
        parameter.register_hook(lambda g: 2 * g)
    norm(x).backward(gradient)
    expected = [p.grad.clone() for p in norm.parameters()]
    norm.zero_grad()
    part = StageExecution([norm], 0, is_first=False, is_last=False, device="cpu")
    part.forward(0, x)
    part.backward_input(0, gradient)
    part.backward_weight(0)
    assert all(torch.equal(p.grad, e) for p, e in zip(norm.parameters(), expected, strict=True))


def test_a_module_of_any_other_kind_splits_too():
    class Bilinear(nn.Module):
        """A matrix and a scale that meet the way to the input at the same node."""

        def __init__(self):
            super().__init__()
            self.matrix, self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

        def forward(self, x):
            return torch.einsum("...i,ij,...j->...i", x, self.matrix * self.scale, x.tanh())

    layer, x, gradient = Bilinear(), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    layer(x).backward(gradient)
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    part = StageExecution([layer], 0, is_first=False, is_last=False, device="cpu")
    part.forward(0, x, recomputed=[(0, 1)])
    part.recompute(0, (0, 1))
    part.backward_input(0, gradient)
    part.backward_weight(0)
    for parameter, theirs in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, theirs)


def test_a_first_layer_with_many_branches_that_meet_again_splits_in_no_time():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Embedding(VOCAB, WIDTH)
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(60))

        def forward(self, x):
            x = self.token(x)
            for scale in self.scales:
                x = x + (x * scale).tanh()
            return x * 1e-3

    deep, (x, _) = Deep(), batch()
    part = StageExecution([deep], 0, is_first=True, is_last=False, device="cpu")
    gradient = torch.randn(ROWS, LENGTH, WIDTH)
    part.forward(0, x)
    part.backward_input(0, gradient)
    part.backward_weight(0)
    found = [p.grad.clone() for p in deep.parameters()]
    deep.zero_grad()
    deep(x).backward(gradient)
    assert all(torch.equal(mine, p.grad) for mine, p in zip(found, deep.parameters(), strict=True))


def test_the_first_stage_splits_at_its_first_output_with_a_gradient():
    layers, (x, _) = model(), batch()
    first = stages(layers, (3,))[0]
    first.forward(0, x)
    first.backward_input(0, torch.ones(ROWS, LENGTH, WIDTH))
    assert all(p.grad is None for layer in layers for p in layer.parameters())
    assert first.captured_bytes(0) > 0
    first.backward_weight(0)
    assert all(p.grad is not None for layer in layers[:3] for p in layer.parameters())


def test_memory_is_really_free_when_the_meter_says_so():
    saved = []

    class Spy(nn.Module):
        def forward(self, x):
            y = x.exp()
            saved.append(StorageWeakRef(y.untyped_storage()))
            return y * 2

    part = StageExecution([Spy(), Spy(), Spy()], 0, is_first=False, is_last=False, device="cpu")
    part.forward(0, torch.randn(4), recomputed=[(1, 2)])
    assert [ref.expired() for ref in saved] == [False, True, False]
    part.offload(0, (0, 1))
    assert [ref.expired() for ref in saved] == [True, True, False]
    assert part.meter.current_bytes == 2 * 16  # what layer 2 saved, and layer 1's checkpoint
    assert part.checkpoint_bytes(0) == 16


@pytest.mark.parametrize("selective", [False, True])
def test_a_whole_backward_frees_what_is_saved_as_it_reads_it(selective):
    """When the gradient of a block's output is known, all that was saved behind it is free; from what cheap pieces are
    made again stays."""
    meter, seen = Meter(), []
    first, second = Block(), Block()

    class Watched(nn.Module):
        def forward(self, x):
            x = x * 1.0
            x.register_hook(lambda _: seen.append(meter.current_bytes))
            return x

    layers = [first, Watched(), second]
    stage = StageExecution(
        layers,
        1,
        is_first=False,
        is_last=False,
        device="cpu",
        meter=meter,
        host_meter=Meter(),
        selective=[3] if selective else [],
    )
    x = torch.randn(ROWS, LENGTH, WIDTH)
    out = stage.forward(0, x)
    behind = stage.saved_bytes(0, (3, 4))
    before = meter.current_bytes
    stage.backward(0, torch.ones_like(out))
    (left,) = seen
    assert before - behind <= left < before if selective else left == before - behind < before
    assert meter.current_bytes == 0


def test_the_input_is_free_once_the_forward_is_over_and_nothing_saved_it():
    class Twice(nn.Module):
        def forward(self, x):
            return x * 2

    part = StageExecution([Twice()], 0, is_first=False, is_last=False, device="cpu")
    x = torch.randn(4)
    gone = StorageWeakRef(x.untyped_storage())
    part.forward(0, x)
    del x
    assert gone.expired()
    assert torch.equal(part.backward(0, torch.ones(4)), torch.full((4,), 2.0))


def test_an_address_used_again_after_a_drop_is_another_storage():
    class Exp(nn.Module):
        def forward(self, x):
            return x.exp() * 0.1

    part = StageExecution([Exp() for _ in range(8)], 0, is_first=False, is_last=False, device="cpu")
    x = torch.randn(64)
    recomputed = [(1, 2), (3, 4), (5, 6)]
    part.forward(0, x, recomputed=recomputed)
    assert part.saved_bytes(0) == 5 * x.nbytes
    for layers in recomputed:
        part.recompute(0, layers)
    assert part.saved_bytes(0) == 8 * x.nbytes
    y = x.clone().requires_grad_()
    z = y
    for _ in range(8):
        z = z.exp() * 0.1
    z.sum().backward()
    assert torch.equal(part.backward(0, torch.ones(64)), y.grad)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_nothing_of_a_microbatch_is_left_after_its_backward_even_without_the_garbage_collector(fused):
    layers, (x, target) = model(), batch()
    part = stages(layers, ())[0]
    gc.collect()
    gc.disable()
    try:
        part.forward(0, x, target, [(1, 2)])
        part.recompute(0, (1, 2))
        saved = [StorageWeakRef(storage) for storage in part._passes[0].store.storages()]
        if fused:
            part.backward(0, None)
        else:
            part.backward_input(0, None)
            gone = sum(ref.expired() for ref in saved)
            assert 0 < gone < len(saved)
            assert len(saved) - gone == len(list(part._passes[0].store.storages()))
            part.backward_weight(0)
        assert len(saved) > 20
        assert all(ref.expired() for ref in saved)
    finally:
        gc.enable()
    assert not part._passes


class InPlace(nn.Module):
    """Changes the result of a sigmoid, which its backward reads."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.sigmoid(self.linear(x))
        z = y * 1
        return y.mul_(2) + z


@pytest.mark.parametrize("way", ["kept", "halves", "recomputed", "offloaded"])
def test_a_saved_tensor_that_is_changed_in_place_is_refused_as_torch_does(way):
    layer, x = InPlace(), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        layer(x).sum().backward()
    part = StageExecution([layer], 1, is_first=False, is_last=False, device="cpu")

    def step():
        part.forward(0, x, None, [(1, 2)] if way == "recomputed" else [])
        if way == "offloaded":
            part.offload(0, (1, 2))
        elif way == "halves":
            part.backward_input(0, torch.ones(2, 4))
        else:
            part.backward(0, torch.ones(2, 4))

    with pytest.raises(RunFailed, match="layer 1: a tensor that its backward reads was changed in place"):
        step()


class Shifts(nn.Module):
    """Changes its input, which no backward reads."""

    def forward(self, x):
        return x.add_(1).sin()


@pytest.mark.parametrize("layers", [(0, 3), (1, 2), (2, 3)], ids=str)
def test_an_input_that_is_changed_in_place_is_no_input_of_a_recompute(layers):
    torch.manual_seed(0)
    shifts = layers[0]
    model = [Shifts() if index == shifts else nn.Identity() for index in range(3)]
    part = StageExecution([*model, nn.Linear(4, 4)], 0, is_first=True, is_last=False, device="cpu")
    part.forward(0, torch.randn(2, 4), None, [layers])
    with pytest.raises(RunFailed, match=f"layer {shifts}: its input was changed in place"):
        part.recompute(0, layers)


class Kept(nn.Module):
    """Keeps what is no part of the loss: a probe, or a hook that closes over its own tensor."""

    def __init__(self, what):
        super().__init__()
        self.linear, self.what, self.probe = nn.Linear(8, 8), what, None

    def forward(self, x):
        hidden = torch.relu(self.linear(x))
        if self.what == "probe":
            self.probe = (hidden * hidden).mean()
        elif self.what == "cycle":
            hidden.register_hook(lambda gradient: gradient * (1 + 0 * hidden.detach()))
        return hidden


@pytest.mark.parametrize("recomputed", [[], [(1, 3)]], ids=["kept", "recomputed"])
@pytest.mark.parametrize("what", ["probe", "cycle"])
def test_a_whole_backward_leaves_nothing_whatever_still_refers_to_the_graph(what, recomputed):
    meter = Meter()
    part = StageExecution([Kept(what), Kept(what)], 1, is_first=False, is_last=False, device="cpu", meter=meter)
    gc.collect()
    gc.disable()
    try:
        for microbatch in range(3):
            part.forward(microbatch, torch.randn(4, 8), None, recomputed)
            for layers in recomputed:
                part.recompute(microbatch, layers)
            saved = [StorageWeakRef(storage) for storage in part._passes[microbatch].store.storages()]
            part.backward(microbatch, torch.ones(4, 8))
            assert saved
            assert meter.current_bytes == 0
            # a cycle holds its own tensor, and the graph of a recompute the input that it began with
            assert what == "cycle" or recomputed or all(ref.expired() for ref in saved)
    finally:
        gc.enable()


def test_the_output_may_be_freed_by_its_receiver():
    part = StageExecution([nn.Linear(4, 4)], 0, is_first=False, is_last=False, device="cpu")
    x = torch.randn(2, 4)
    out = part.forward(0, x)
    expected = torch.ones(2, 4) @ part.layers[0].weight
    out.fill_(float("nan"))
    torch.testing.assert_close(part.backward(0, torch.ones(2, 4)), expected)


def test_autocast_is_restored_for_a_recompute():
    layers, (x, target) = model(), batch()
    parts = stages(layers, (3,))

    def gradients(recomputed):
        for layer in layers:
            layer.zero_grad()
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            h = parts[0].forward(0, x, None, recomputed[:1])
            parts[1].forward(0, h, target, recomputed[1:])
        for part, layers_ in zip(parts, recomputed, strict=False):
            part.recompute(0, layers_)
        parts[0].backward(0, parts[1].backward(0, None))
        return [p.grad.clone() for layer in layers for p in layer.parameters()]

    for a, b in zip(gradients([]), gradients([(1, 3), (3, 4)]), strict=True):
        assert torch.equal(a, b)


def test_one_sample_s_part_of_a_sequence_is_recomputed_under_autocast():
    """A cut of one sample keeps the stride of the whole sequence, a view of it does not."""
    stage = StageExecution([nn.Embedding(16, 8), nn.Linear(8, 8)], 0, is_first=True, is_last=False, device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        out = stage.forward(0, torch.arange(12)[None, :5], recomputed=[(0, 1)])
        stage.recompute(0, (0, 1))
    stage.backward(0, torch.ones_like(out))
    assert all(parameter.grad.any() for layer in stage.layers for parameter in layer.parameters())


@pytest.mark.parametrize("way", ["keep", "offload", "recompute"])
def test_autocast_copies_of_weights_are_not_stored_and_those_of_inputs_do_not_outlive_their_microbatch(way):
    """Until its region ends autocast holds on to the copies of leaves: of weights, which is good, and of inputs."""
    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    part = StageExecution([mlp], 0, is_first=False, is_last=False, device="cpu")
    x, gradient = torch.randn(64, WIDTH), torch.randn(64, WIDTH).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        for microbatch in range(2):
            part.forward(microbatch, x, recomputed=[(0, 1)] if way == "recompute" else ())
            if way == "recompute":
                part.recompute(microbatch, (0, 1))
            saved = [StorageWeakRef(storage) for storage in part._passes[microbatch].store.storages()]
            assert part.saved_bytes(microbatch) == (x.nbytes + 4 * x.nbytes + 4 * x.nbytes) // 2
            if way == "offload":
                part.offload(microbatch, (0, 1))
                assert part.host_meter.current_bytes == 9 * x.nbytes // 2
                part.reload(microbatch, (0, 1))
            part.backward(microbatch, gradient)
            assert all(one.expired() for one in saved)
    assert part.meter.current_bytes == 0
    assert part.host_meter.current_bytes == 0


def test_a_backward_before_its_recompute_is_refused():
    layers, (x, _) = model(), batch()
    first = stages(layers, (3,))[0]
    first.forward(0, x, recomputed=[(1, 2)])
    with pytest.raises(RunFailed, match="before the recompute"):
        first.backward(0, torch.ones(ROWS, LENGTH, WIDTH))


def test_a_backward_before_its_reload_is_refused():
    layers, (x, _) = model(), batch()
    first = stages(layers, (3,))[0]
    first.forward(0, x)
    first.offload(0, (1, 2))
    with pytest.raises(RunFailed, match="not on the device"):
        first.backward(0, torch.ones(ROWS, LENGTH, WIDTH))


def test_a_forward_that_changes_on_recompute_is_refused():
    class Fickle(nn.Module):
        runs = iter(range(2))

        def forward(self, x):
            return x[: 4 - next(self.runs)].exp()

    part = StageExecution([Fickle()], 0, is_first=False, is_last=False, device="cpu")
    part.forward(0, torch.randn(4), recomputed=[(0, 1)])
    with pytest.raises(RunFailed, match="did not save what"):
        part.recompute(0, (0, 1))


def test_a_parameter_used_twice_in_a_stage_gets_its_whole_gradient():
    shared = nn.Linear(WIDTH, WIDTH)
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    shared(shared(x).tanh()).backward(gradient)
    expected = [p.grad.clone() for p in shared.parameters()]
    shared.zero_grad()
    part = StageExecution([shared, nn.Tanh(), shared], 0, is_first=False, is_last=False, device="cpu")
    part.forward(0, x)
    part.backward_input(0, gradient)
    part.backward_weight(0)
    for mine, theirs in zip((p.grad for p in shared.parameters()), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


class Reparametrized(nn.Module):
    """A weight and a vector that are made of parameters once and used twice, the second time on the first one's way."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.hooked = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        weight, scale, hooked = self.weight.tanh(), self.scale.double().exp(), self.hooked.sin()
        for _ in range(2):
            x = ((x * scale).float() @ weight + hooked).tanh()
        return x


class Halved(nn.Linear):
    """Halves the gradients of its input and of its result, which is that of the very node with the weight."""

    def forward(self, x):
        out = super().forward(x)
        for one in (x, out):
            if one.requires_grad:
                one.register_hook(lambda gradient: gradient / 2)
        return out


@pytest.mark.parametrize("is_first", [True, False], ids=["first stage", "inner stage"])
def test_hooks_of_activations_change_gradients_once(names, is_first):
    torch.manual_seed(0)
    layers, x, gradient = [Halved(WIDTH, WIDTH) for _ in range(3)], torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    nn.Sequential(*layers)(x).backward(gradient)
    expected = [p.grad.clone() for layer in layers for p in layer.parameters()]
    nn.Sequential(*layers).zero_grad()
    part = StageExecution(layers, 0, is_first=is_first, is_last=False, device="cpu")
    part.forward(0, x)
    part.backward_input(0, gradient)
    part.backward_weight(0)
    for mine, theirs in zip((p.grad for layer in layers for p in layer.parameters()), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach()).tanh()


def test_a_first_stage_may_detach_what_its_first_layer_returns(names):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Detached(WIDTH, WIDTH)]
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    nn.Sequential(*layers)(x).backward(gradient)
    expected = [p.grad.clone() for p in layers[1].parameters()]
    layers[1].zero_grad()
    part = StageExecution(layers, 0, is_first=True, is_last=False, device="cpu")
    part.forward(0, x)
    part.backward_input(0, gradient)
    assert all(p.grad is None for p in layers[1].parameters())
    assert part.captured_bytes(0) == gradient.nbytes
    part.backward_weight(0)
    assert all(p.grad is None for p in layers[0].parameters())
    assert all(torch.equal(p.grad, e) for p, e in zip(layers[1].parameters(), expected, strict=True))
    assert part.meter.current_bytes == 0


def test_weights_that_take_the_place_of_others_between_steps_are_no_activations():
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    part = StageExecution([layer], 1, is_first=False, is_last=False, device="cpu")
    part.forward(0, x)
    saved = part.saved_bytes(0)
    part.backward(0, x)
    old = StorageWeakRef(layer.weight.untyped_storage())
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    gc.collect()
    assert old.expired()
    part.begin()
    part.forward(1, x)
    assert part.saved_bytes(1) == saved


@pytest.mark.parametrize("is_first", [True, False], ids=["first stage", "inner stage"])
def test_what_is_made_of_parameters_once_and_used_twice_gives_whole_gradients(names, is_first):
    torch.manual_seed(0)
    layer = Reparametrized()
    seen = []
    layer.hooked.register_hook(lambda gradient: seen.append(gradient.clone()))
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    entry = nn.Linear(WIDTH, WIDTH)
    layer(entry(x)).backward(gradient)
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    seen.clear()
    part = StageExecution([entry, layer], 0, is_first=is_first, is_last=False, device="cpu")
    part.forward(0, x)
    part.backward_input(0, gradient)
    part.backward_weight(0)
    for mine, theirs in zip((p.grad for p in layer.parameters()), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert sum(len(one.shape) for one in seen) == 1
