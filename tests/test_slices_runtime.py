"""Layers run slice by slice: gradients and bytes of the sliced attention and of stages made of such layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from optpipe_compiler.costs.models import Architecture
from optpipe_compiler.errors import BadInput, RunFailed
from optpipe_torch.frameworks.decoder import DecoderLayer
from optpipe_torch.models import layers, vocabulary
from runtime_torch import attention, engine
from runtime_torch.bundles import bundled, trace_bundles
from runtime_torch.execution import StageExecution
from runtime_torch.meter import Meter
from runtime_torch.microbatch import Microbatch, Slice, entered
from runtime_torch.slices import WHOLE, StageCarry

TOKENS = 24
LLAMA = Architecture(kind="llama", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=256)
GPT = Architecture(
    kind="gpt2", layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=128, vocab=256, positions=24, qkv_bias=True
)
CUTS = [(0, 12, 24), (0, 5, 17, 24), (0, 6, 12, 18, 24)]
whole_cuts = pytest.mark.parametrize("cuts", CUTS, ids=["2", "3 unequal", "4"])


# -- the attention


def drawn(heads, kv_heads, dtype):
    generator = torch.Generator().manual_seed(heads)
    sizes = [heads, kv_heads, kv_heads, heads]
    return [torch.randn(2, TOKENS, count, 16, generator=generator).to(dtype) for count in sizes]


def at_once(tensors, dtype):
    query, key, value, gradient = (tensor.clone().to(dtype) for tensor in tensors)
    given = [one.requires_grad_() for one in (query, key, value)]
    result = WHOLE.attend(*(one.transpose(1, 2) for one in given))
    result.backward(gradient.transpose(1, 2))
    return [result.detach(), *(one.grad for one in given)]


def in_slices(tensors, cuts):
    meter = Meter()
    stage = StageCarry(cuts[:-1], meter)
    spans = list(pairwise(cuts))
    given = [[one[:, a:b].clone().requires_grad_() for one in tensors[:3]] for a, b in spans]
    results = [
        stage.of(index, 0, None).attend(*(one.transpose(1, 2) for one in own)) for index, own in enumerate(given)
    ]
    for index, (a, b) in reversed(list(enumerate(spans))):
        results[index].backward(tensors[3][:, a:b].transpose(1, 2))
        stage.drop(index)
    assert meter.current_bytes == 0
    return [
        torch.cat([one.detach() for one in results], 2),
        *(torch.cat([own[i].grad for own in given], 1) for i in range(3)),
    ]


def test_keys_that_change_in_place_before_a_later_slice_reads_them_are_refused():
    """Without gradients torch does not see it."""
    stage = StageCarry((0, 4), Meter())
    query, key, value = (torch.randn(1, 2, 4, 8) for _ in range(3))
    stage.of(0, 7, None).attend(query, key, value)
    key.mul_(2)
    with pytest.raises(RunFailed, match=r"layer 7: keys or values of slice 0 were changed in place after"):
        stage.of(1, 7, None).attend(query, query, value)


@whole_cuts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kernel", ["flash", "plain"])
def test_slices_attend_as_exactly_as_torch_does_at_once(monkeypatch, cuts, dtype, kv_heads, kernel):
    if kernel == "plain":
        monkeypatch.setattr(engine, "_flash", {})
        monkeypatch.setattr(attention, "SCORES", 500)
    tensors = drawn(4, kv_heads, dtype)
    exact = at_once(tensors, torch.float64)
    for found, usual, wanted in zip(in_slices(tensors, cuts), at_once(tensors, dtype), exact, strict=True):
        assert found.dtype == dtype
        mine, theirs = ((one - wanted).norm() / wanted.norm() for one in (found, usual))
        assert mine < 1.5 * theirs


def test_a_slice_keeps_its_own_tokens_alone():
    meter = Meter()
    stage = StageCarry((0, 6, 12, 18), meter)
    saved = []
    for index in range(4):
        tensors = [torch.randn(2, 6, heads, 16, requires_grad=True).transpose(1, 2) for heads in (4, 2, 2)]
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            stage.of(index, 0, None).attend(*tensors)
        saved.append(sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}.values()))
    query, logsumexp, block = 2 * 6 * 4 * 16 * 4, 2 * 6 * 4 * 4, 2 * 2 * 6 * 2 * 16 * 4
    assert saved == [2 * query + logsumexp + block] * 4
    assert meter.current_bytes == 3 * block  # nobody reads those of the last slice


# -- stages of layers


def llama(**changes):
    return built(replace(LLAMA, **changes))


def gpt():
    return built(GPT)


def built(model):
    return [make() for count, make in layers.makers(model, TOKENS).values() for _ in range(count)]


def in_parts():
    ignoring = vocabulary.head_parts(32, 256, 2, norm=partial(nn.LayerNorm, 32), ignore_index=3)
    embedding = [layers.EmbeddingPart(Architecture(**{**LLAMA_FIELDS, "embedding_parts": 2}), part) for part in (0, 1)]
    return [*embedding, layers.Block(GPT, TOKENS), *(make() for make in ignoring)]


def decoders(kind):
    """Layers of transformers, between an embedding and a head of ours."""
    transformers = pytest.importorskip("transformers")
    if kind == "llama":
        from transformers.models.llama import modeling_llama as llamas

        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2
        )
        made = [DecoderLayer(llamas.LlamaDecoderLayer(config, i), llamas.LlamaRotaryEmbedding(config)) for i in (0, 1)]
    else:
        from transformers.models.gpt2 import modeling_gpt2 as gpts

        config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, attn_pdrop=0.0, resid_pdrop=0.0)
        made = [DecoderLayer(gpts.GPT2Block(config, layer_idx=index)) for index in (0, 1)]
    return [layers.Embedding(GPT), *made, layers.Head(GPT)]


class ByPosition(nn.Module):
    """Attention of which queries or keys are learned by position: the others alone depend on the input. Where nothing
    is learned so, queries are multiplied by a cosine in fp32."""

    def __init__(self, learned=None):
        super().__init__()
        self.learned = learned
        self.mix = nn.Linear(32, 96)
        self.positions = nn.Parameter(torch.randn(TOKENS, 32)) if learned else None

    def forward(self, x, *, carry=WHOLE):
        def heads(one):
            return one.unflatten(-1, (4, 8)).transpose(1, 2)

        found = dict(zip(("query", "key", "value"), map(heads, self.mix(x).chunk(3, -1)), strict=True))
        positions = carry.start + torch.arange(x.shape[1])
        if self.learned is None:
            found["query"] = found["query"] * torch.cos(positions.float())[:, None]
        else:
            found[self.learned] = heads(self.positions[positions].expand(len(x), -1, -1))
        return x + carry.attend(**found).transpose(1, 2).flatten(2)


LLAMA_FIELDS = {name: getattr(LLAMA, name) for name in LLAMA.__dataclass_fields__}

MODELS = {
    "llama": llama,
    "llama in halves": partial(llama, granularity="half"),
    "llama in parts": partial(llama, head_parts=2, embedding_parts=2),
    "gpt-2": partial(llama, kind="gpt2", kv_heads=4, positions=64),
    "gpt": gpt,
    "ignored tokens": in_parts,
    "learned": lambda: [layers.Embedding(GPT), ByPosition("query"), ByPosition("key"), layers.Head(GPT)],
    "transformers' Llama": partial(decoders, "llama"),
    "transformers' GPT-2": partial(decoders, "gpt2"),
}


def made(name, dtype):
    torch.manual_seed(5)
    return [layer.to(dtype) for layer in MODELS[name]()]


def batch():
    generator = torch.Generator().manual_seed(1)
    inputs, target = torch.randint(256, (2, 2, TOKENS), generator=generator)
    target[0, 7:20] = 3  # so that slices have different numbers of tokens that count
    return inputs, target


def reference(model, inputs, target):
    flow = (inputs,)
    for layer in vocabulary.whole(model):
        parameters = layer.forward.__code__.co_varnames
        named = {"target": target} if "target" in parameters and "h" in parameters else {}
        behind = (target,) if layer is model[-1] and not named else ()
        found = layer(*flow, *behind, **named)
        flow = found if isinstance(found, tuple) else (found,)
    (loss,) = flow
    loss.backward()
    found = [parameter.grad for layer in model for parameter in layer.parameters()]
    for layer in model:
        layer.zero_grad()
    return loss.item(), [one.clone() for one in found]


def stages_of(model, cut, meter, inputs, target, *, selective=False):
    """Two stages, cut behind so many layers."""
    traced = trace_bundles(model, [inputs], target)
    bundles = [replace(bundle, tokens=TOKENS) for bundle in traced]
    ends = {cut - 1, len(model) - 1}
    run = [bundled(layer, bundles[i], bundles[i + 1], packs=i in ends) for i, layer in enumerate(model)]
    chosen = (range(cut), range(cut, len(model))) if selective else ((), ())
    first = StageExecution(run[:cut], 0, is_first=True, is_last=False, device="cpu", meter=meter, selective=chosen[0])
    last = StageExecution(run[cut:], cut, is_first=False, is_last=True, device="cpu", meter=meter, selective=chosen[1])
    return first, last


def run_sliced(model, cuts, how, cut=2):
    """Run one microbatch through two stages; `how`: split or fused, and what becomes of what the forwards save."""
    inputs, target = batch()
    meter = Meter()
    stages = stages_of(model, cut, meter, inputs, target, selective="selective" in how)
    spans = list(pairwise(cuts))
    parts = [Slice(0, index, cuts[:-1], (b - a) / cuts[-1], target) for index, (a, b) in enumerate(spans)]
    loss = 0.0
    ranges = [(s.first_layer, s.end_layer) for s in stages]
    for index, (a, b) in enumerate(spans):
        x = inputs[:, a:b]
        with entered(Microbatch(tokens=b - a, slice=parts[index])):
            for stage, layers_ in zip(stages, ranges, strict=True):
                recomputed = [layers_] if "recompute" in how else []
                x = stage.forward(index, x, target[:, a:b], recomputed, parts[index])
                if "offload" in how:
                    stage.offload(index, layers_)
        loss += x.item()
    for index, (a, b) in reversed(list(enumerate(spans))):
        gradient = None
        with entered(Microbatch(tokens=b - a, slice=parts[index])):
            for stage, layers_ in reversed(list(zip(stages, ranges, strict=True))):
                if "offload" in how:
                    stage.reload(index, layers_)
                if "recompute" in how:
                    stage.recompute(index, layers_)
                gradient = (stage.backward_input if "split" in how else stage.backward)(index, gradient)
    if "split" in how:
        for index in reversed(range(len(spans))):
            for stage in stages:
                stage.backward_weight(index)
    assert meter.current_bytes == 0
    return loss, [parameter.grad for layer in model for parameter in layer.parameters()]


@whole_cuts
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_whole_microbatches(name, cuts):
    model = made(name, torch.float32)
    loss, wanted = reference(model, *batch())
    for how in ("fused", "split", "split offload", "fused recompute", "split recompute", "split selective"):
        found_loss, found = run_sliced(model, cuts, how)
        assert found_loss == pytest.approx(loss, rel=1e-5)
        for one, other in zip(found, wanted, strict=True):
            assert other.abs().max() > 0
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        for layer in model:
            layer.zero_grad()


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_gradients_in_bf16_are_as_close_as_those_of_whole_microbatches(name):
    exact_loss, exact = reference(made(name, torch.float64), *batch())
    _, usual = reference(made(name, torch.bfloat16), *batch())
    loss, found = run_sliced(made(name, torch.bfloat16), CUTS[2], "split recompute")
    assert loss == pytest.approx(exact_loss, rel=0.02)

    assert off(found, exact) < 1.5 * off(usual, exact)


def off(gradients, exact):
    return sum(((one - wanted).norm() / wanted.norm()).item() for one, wanted in zip(gradients, exact, strict=True))


@pytest.mark.parametrize("how", ["fused", "split recompute"])
def test_queries_in_another_dtype_than_values_attend_under_autocast_as_in_whole_microbatches(how):
    def model():
        torch.manual_seed(5)
        return [layers.Embedding(GPT), ByPosition(), ByPosition(), layers.Head(GPT)]

    _, exact = reference(model(), *batch())
    with torch.autocast("cpu", torch.bfloat16):
        expected_loss, usual = reference(model(), *batch())
        loss, found = run_sliced(model(), CUTS[1], how)
    assert loss == pytest.approx(expected_loss, rel=0.01)
    assert off(found, exact) < 1.5 * off(usual, exact)


def test_adapted_layers_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama as llamas

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1
    )
    layer, rotary = llamas.LlamaDecoderLayer(config, 0), llamas.LlamaRotaryEmbedding(config)
    layer.self_attn.config._attn_implementation = "sdpa"
    x = torch.randn(2, TOKENS, 32)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    usual = layer(x, attention_mask=mask, position_embeddings=rotary(x, torch.arange(TOKENS)[None]))
    torch.testing.assert_close(DecoderLayer(layer, rotary)(x), usual)
    assert config._attn_implementation == "sdpa"  # of other layers


def test_attention_that_slices_cannot_have_is_refused():
    transformers = pytest.importorskip("transformers")
    from transformers.models.mistral import modeling_mistral as mistrals

    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, sliding_window=16
    )
    layer = DecoderLayer(mistrals.MistralDecoderLayer(config, 0), mistrals.MistralRotaryEmbedding(config))
    with pytest.raises(BadInput, match="MistralAttention has a sliding window of 16 tokens, expected at least as many"):
        layer(torch.randn(2, TOKENS, 32))
    with pytest.raises(BadInput, match="Linear has no attention with a config"):
        DecoderLayer(nn.Linear(4, 4))


class Recurrent(nn.GRU):
    """Begins each slice with the state that the one before has ended with, graph included."""

    def forward(self, x, *, carry=WHOLE):
        found, self.state = super().forward(x, self.state if carry.start else None)
        return found


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_a_backward_that_leads_into_the_graph_of_another_slice_is_refused(fused):
    block = [nn.Linear(8, 8), Recurrent(8, 8, batch_first=True)]
    stage = StageExecution(block, 1, is_first=False, is_last=False, device="cpu")
    for index in range(2):
        stage.forward(index, torch.randn(2, 4, 8), part=Slice(0, index, (0, 4), 0.5, None))
    ops = [stage.backward] if fused else [stage.backward_input, lambda index, _: stage.backward_weight(index)]
    with pytest.raises(
        BadInput, match="layers 1 to 2: what a layer has kept of a slice leads the backward of the next"
    ):
        for index in reversed(range(2)):
            for op in ops:
                op(index, torch.randn(2, 4, 8))


def test_a_first_layer_with_attention_over_its_own_weights_is_refused():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.block = layers.Embedding(GPT), layers.Block(GPT, TOKENS)

        def forward(self, x, *, carry=WHOLE):
            return self.block(self.embedding(x), carry=carry)

    with pytest.raises(BadInput, match="layer 0 has weights below its attention and is the model's first"):
        run_sliced([Both(), layers.Head(GPT)], CUTS[0], "split", cut=1)


def test_a_block_behind_a_frozen_embedding_is_not_called_the_first_layer():
    embedding = layers.Embedding(GPT).requires_grad_(False)
    sentence = (
        "layer 1 has weights below its attention and no layer before it has a trained parameter: .* train layer 0"
    )
    with pytest.raises(BadInput, match=sentence):
        run_sliced([embedding, layers.Block(GPT, TOKENS), layers.Head(GPT)], CUTS[0], "split", cut=2)
