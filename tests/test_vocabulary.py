"""Head and embedding in parts: loss and gradients of the whole ones, whatever is kept, moved or computed again."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402

from optpipe_compiler.errors import BadInput  # noqa: E402
from optpipe_torch.models import vocabulary  # noqa: E402
from runtime_torch.bundles import bundled, trace_bundles  # noqa: E402
from runtime_torch.execution import StageExecution  # noqa: E402

HIDDEN = 12


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def chain(makers, dtype=torch.float32):
    return [make().to(dtype) for make in makers]


def call(layers, x, **last):
    """Call a chain of layers that pass several tensors along."""
    for layer in layers:
        x = layer(*(x if isinstance(x, tuple) else (x,)), **last)
    return x


def draw(vocabulary_size, dtype=torch.float32, shape=(2, 7)):
    h = torch.randn(*shape, HIDDEN, dtype=dtype, requires_grad=True)
    return h, torch.randint(vocabulary_size, shape)


def gradients(loss, h, layers):
    return torch.autograd.grad(loss, (h, *(p for layer in layers for p in layer.parameters())))


SMOOTHED = {"plain": {}, "smoothed": {"label_smoothing": 0.1}, "sum": {"reduction": "sum", "ignore_index": 3}}


@pytest.mark.parametrize("said", SMOOTHED.values(), ids=SMOOTHED)
@pytest.mark.parametrize(("size", "parts"), [(50, 1), (50, 7), (257, 4), (8, 8)])
def test_loss_and_gradients_are_those_of_torchs_cross_entropy(size, parts, said):
    h, target = draw(size)
    target[0, :3] = said.get("ignore_index", -100)
    layers = chain(vocabulary.head_parts(HIDDEN, size, parts, norm=lambda: nn.LayerNorm(HIDDEN), **said))
    weight = torch.cat([layer.weight for layer in layers])
    logits = F.linear(layers[0].norm(h), weight).flatten(0, 1)
    theirs = F.cross_entropy(logits, target.flatten(), **said)
    ours = call(layers, h, target=target)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, h, layers), gradients(theirs, h, layers), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrong", [-100, -1, 50])
def test_targets_and_tokens_that_no_part_has_are_refused(wrong):
    h, target = draw(50)
    target[1, 2] = wrong
    head, embedding = (chain(make(HIDDEN, 50, 3)) for make in (vocabulary.head_parts, vocabulary.embedding_parts))
    with pytest.raises(RuntimeError, match="a token is outside of the vocabulary of 50"):
        call(embedding, target)
    ignoring = chain(vocabulary.head_parts(HIDDEN, 50, 3, ignore_index=wrong))
    assert call(ignoring, h, target=target).isfinite()
    if wrong != head[-1].ignore_index:
        with pytest.raises(RuntimeError, match="a target that is not ignore_index is outside of the vocabulary of 50"):
            call(head, h, target=target)


def test_where_all_targets_are_ignored_loss_and_gradients_are_torchs():
    h, target = draw(50)
    target.fill_(-100)
    layers = chain(vocabulary.head_parts(HIDDEN, 50, 3))
    ours = call(layers, h, target=target)
    assert ours.isnan()
    assert all(gradient.eq(0).all() for gradient in gradients(ours, h, layers))


@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_large_and_small_logits_lose_nothing(scale):
    h, target = draw(40)
    layers = chain(vocabulary.head_parts(HIDDEN, 40, 5))
    weight = torch.cat([layer.weight for layer in layers])
    theirs = F.cross_entropy(F.linear(h * scale, weight).flatten(0, 1), target.flatten())
    ours = call(layers, h * scale, target=target)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, h, layers), gradients(theirs, h, layers), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * scale)


class Padded(vocabulary.HeadPart):
    """A part of a head of which some rows are no words."""

    def logits(self, h):
        return super().logits(h).masked_fill(torch.tensor([row in PADDING for row in self.rows]), float("-inf"))


PADDING = (0, 1, 2, 7, 8)


@pytest.mark.parametrize("parts", [1, 3, 9])
def test_rows_that_are_masked_are_as_none_also_where_a_part_has_no_others(parts):
    h, _ = draw(9)
    target = torch.randint(3, 7, (2, 7))
    layers = [Padded(HIDDEN, 9, part, parts) for part in range(parts)]
    logits = F.linear(h, torch.cat([layer.weight for layer in layers])[3:7])
    theirs = F.cross_entropy(logits.flatten(0, 1), target.flatten() - 3)
    ours = call(layers, h, target=target)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, h, layers), gradients(theirs, h, layers), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_that_of_finite_differences():
    h, target = draw(9, torch.float64, (3,))
    target[1] = -100
    layers = chain(vocabulary.head_parts(HIDDEN, 9, 3, label_smoothing=0.2), torch.float64)
    assert torch.autograd.gradcheck(lambda x: call(layers, x, target=target), (h,))


def test_in_bf16_the_chain_is_as_near_to_fp32_as_the_whole_head():
    h, target = draw(300, torch.bfloat16, (4, 32))
    layers = chain(vocabulary.head_parts(HIDDEN, 300, 4), torch.bfloat16)
    exact = [layer.weight.detach().float().requires_grad_() for layer in layers]
    x = h.detach().float().requires_grad_()
    loss = F.cross_entropy(F.linear(x, torch.cat(exact)).flatten(0, 1), target.flatten())
    wanted = torch.autograd.grad(loss, (x, *exact))
    (reference,) = vocabulary.whole(layers)
    errors = []
    for found in (call(layers, h, target=target), reference(h, target=target)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, loss, rtol=2e-3, atol=0)
        pairs = zip(gradients(found, h, layers), wanted, strict=True)
        errors.append(max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in pairs))
    assert errors[0] < max(0.02, 1.5 * errors[1])


def test_logits_are_looked_at_in_chunks(monkeypatch):
    h, target = draw(50)
    layers = chain(vocabulary.head_parts(HIDDEN, 50, 2, label_smoothing=0.1))
    found = []
    for chunk in (1, 100, 1 << 20):
        monkeypatch.setattr(vocabulary, "CPU_CHUNK", chunk)
        loss = call(layers, h, target=target)
        found.append((loss, *gradients(loss, h, layers)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize(("size", "parts"), [(50, 1), (50, 7), (8, 8)])
def test_an_embedding_in_parts_is_the_whole_one(size, parts):
    tokens = torch.randint(size, (3, 20))
    layers = chain(vocabulary.embedding_parts(HIDDEN, size, parts))
    weights = [layer.weight for layer in layers]
    ours, theirs = call(layers, tokens), F.embedding(tokens, torch.cat(weights))
    torch.testing.assert_close(ours, theirs)
    gradient = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, weights, gradient), torch.autograd.grad(theirs, weights, gradient), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_the_rows_of_the_parts_are_the_vocabulary():
    for size, parts in itertools.product((1, 7, 50), (1, 2, 7)):
        if parts > size:
            continue
        rows = [vocabulary.rows_of(size, part, parts) for part in range(parts)]
        assert list(itertools.chain(*rows)) == list(range(size))
        assert max(map(len, rows)) - min(map(len, rows)) <= 1
    for parts in (0, 8):
        with pytest.raises(BadInput, match=f"a vocabulary of 7 is cut into {parts} parts, expected 1 to 7"):
            vocabulary.head_parts(HIDDEN, 7, parts)


def test_whole_joins_complete_chains_alone():
    embedding, head = (chain(makers) for makers in (
        vocabulary.embedding_parts(HIDDEN, 50, 3), vocabulary.head_parts(HIDDEN, 50, 2)))  # fmt: skip
    middle = nn.Linear(HIDDEN, HIDDEN)
    joined = vocabulary.whole([*embedding, middle, *head])
    assert [len(list(layer.parameters())) for layer in joined] == [3, 2, 2]
    assert vocabulary.whole([*embedding[:2], middle, *head[1:]]) == [*embedding[:2], middle, *head[1:]]
    tokens = torch.randint(50, (2, 5))
    torch.testing.assert_close(
        joined[2](middle(joined[0](tokens)), target=tokens), call(head, middle(call(embedding, tokens)), target=tokens)
    )


# -- as stages


def stages(layers, x, target):
    """Each layer of a chain as a stage of its own."""
    borders = trace_bundles(layers, [x.detach()], target)
    last = len(layers) - 1
    return borders, [
        StageExecution([bundled(layer, borders[i], borders[i + 1])], i, is_first=False, is_last=i == last, device="cpu")
        for i, layer in enumerate(layers)
    ]


def pass_through(executions, x, target, mixture):
    """Run F and the backwards of microbatch 0 stage by stage, each in its state of `mixture`; return loss and dh."""
    kept = {}
    for i, (stage, state) in enumerate(zip(executions, mixture, strict=True)):
        kept[i] = (i, i + 1)
        x = stage.forward(0, x, target, [kept[i]] if state == "recompute" else ())
        if state == "offload":
            stage.offload(0, kept[i])
            assert stage.saved_bytes(0) == 0
    loss, gradient = x, None
    for i, stage in reversed(list(enumerate(executions))):
        if mixture[i] == "recompute":
            stage.recompute(0, kept[i])
        if mixture[i] == "offload":
            stage.reload(0, kept[i])
        gradient = stage.backward_input(0, gradient)
        stage.backward_weight(0)
    return loss, gradient


STATES = ("keep", "offload", "recompute")


@pytest.mark.parametrize("mixture", list(itertools.product(STATES, repeat=3)), ids="-".join)
def test_every_mixture_of_states_has_the_gradients_of_the_whole_head(mixture):
    h, target = draw(50)
    layers = chain(vocabulary.head_parts(HIDDEN, 50, 3, norm=lambda: nn.LayerNorm(HIDDEN)))
    _, executions = stages(layers, h, target)
    loss, gradient = pass_through(executions, h, target, mixture)
    (reference,) = vocabulary.whole(layers)
    wanted = reference(h, target=target)
    torch.testing.assert_close(loss, wanted.detach())
    parameters = [p for layer in layers for p in layer.parameters()]
    for a, b in zip((gradient, *(p.grad for p in parameters)), gradients(wanted, h, layers), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert all(stage.meter.current_bytes == stage.host_meter.current_bytes == 0 for stage in executions)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_part_keeps_its_share_of_the_logits_and_the_hidden_states(parts):
    tokens, size = 14, 4096
    h, target = draw(size)
    layers = chain(vocabulary.head_parts(HIDDEN, size, parts))
    _, executions = stages(layers, h, target)
    x = h
    for stage in executions:
        entered = x.nbytes
        x = stage.forward(0, x, target)
        logits = tokens * size // parts * 4
        extra = tokens * (8 + 4 + 8 + 8)  # state, decay, target, and what the loss keeps
        assert logits + tokens * HIDDEN * 4 <= stage.saved_bytes(0) <= logits + entered + 2 * extra
    gradient = None
    for stage in reversed(executions):
        gradient = stage.backward_input(0, gradient)
        captured = stage.captured_bytes(0)
        assert captured == tokens * size // parts * 4  # the gradient of the logits, instead of the logits
        assert stage.saved_bytes(0) <= tokens * HIDDEN * 4 + 2 * extra
        stage.backward_weight(0)


def test_parts_of_one_stage_keep_the_hidden_states_once():
    h, target = draw(512)
    layers = chain(vocabulary.head_parts(HIDDEN, 512, 4))
    borders = trace_bundles(layers, [h.detach()], target)
    inside = [bundled(layer, borders[i], borders[i + 1], packs=i == 3) for i, layer in enumerate(layers)]
    stage = StageExecution(inside, 0, is_first=False, is_last=True, device="cpu")
    loss = stage.forward(0, h, target)
    small = 14 * 4 * 40
    assert stage.saved_bytes(0) <= 14 * 4 * (512 + HIDDEN) + small
    (reference,) = vocabulary.whole(layers)
    torch.testing.assert_close(loss, reference(h, target=target).detach())
    found = stage.backward(0, None)
    torch.testing.assert_close(found, gradients(reference(h, target=target), h, layers)[0], rtol=1e-4, atol=1e-6)
