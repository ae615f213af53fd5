"""The layers that estimates count compute what they should: against torch's own functions and a plain reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812

from optpipe_compiler.costs.models import Architecture  # noqa: E402
from optpipe_torch.models import (  # noqa: E402
    layer_kernels,
    layers,
)

MODEL = Architecture(kind="mixtral", layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=50)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random(*shape: int):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_the_rms_norm_is_torchs():
    x, weight = random(2, 3, 8), random(8)
    ours, theirs = layer_kernels.rms_norm(x, weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # its scale is fp32
    gradient = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (x, weight), gradient),
        torch.autograd.grad(theirs, (x, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attend", [layer_kernels.math_attention, layer_kernels.flash_attention])
def test_attention_is_torchs(attend):
    query, key, value = random(2, 4, 6, 8), random(2, 2, 6, 8), random(2, 2, 6, 8)
    ours = attend(query, key, value, 0.0)
    theirs = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, theirs)
    gradient = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (query, key, value), gradient),
        torch.autograd.grad(theirs, (query, key, value), gradient),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_rotation_keeps_lengths_and_depends_on_the_distance_only():
    cosine, sine = layers.rotation(10, 4)
    vector = torch.randn(4)
    turned = layers.rotate(vector.expand(1, 1, 10, 4), cosine, sine)[0, 0]
    torch.testing.assert_close(turned.norm(dim=-1), vector.norm().expand(10))
    products = turned @ turned.T
    torch.testing.assert_close(products.diagonal(1), products[0, 1].expand(9))


def test_experts_mix_what_each_chosen_expert_says_while_none_is_full():
    experts = layers.Experts(replace(MODEL, experts=2, experts_per_token=2))  # every token goes to both: never full
    x = torch.randn(2, 6, 16)
    weight = torch.softmax(experts.router(x), -1)
    said = [(F.silu(x @ experts.gate[e]) * (x @ experts.up[e])) @ experts.down[e] for e in range(2)]
    torch.testing.assert_close(experts(x), sum(weight[..., e : e + 1] * said[e] for e in range(2)))


def test_an_expert_drops_the_tokens_that_exceed_its_share():
    experts = layers.Experts(replace(MODEL, experts=4, experts_per_token=1))
    place, capacity = experts.places(torch.tensor([0, 0, 0, 1, 2, 2, 2, 2]))
    assert capacity == 2
    assert place.tolist() == [0, 1, 8, 2, 4, 5, 8, 8]


def test_a_block_sees_no_later_token():
    block = layers.Block(replace(MODEL, kind="llama"), 6)
    x = torch.randn(1, 6, 16)
    changed = x.clone()
    changed[:, 4:] += 1
    torch.testing.assert_close(block(x)[:, :4], block(changed)[:, :4])
    assert not torch.allclose(block(x)[:, 4:], block(changed)[:, 4:])


def test_the_layers_of_a_model_train():
    made = [make() for count, make in layers.makers(MODEL, 6).values() for _ in range(count)]
    tokens = torch.randint(50, (2, 6))
    x = made[0](tokens)
    for layer in made[1:-1]:
        x = layer(x)
    loss = made[-1](x, tokens)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for layer in made for p in layer.parameters())


def test_tensor_parallel_layers_say_that_they_are_for_counting():
    block = layers.Block(replace(MODEL, kind="llama"), 6, 2)
    with pytest.raises(NotImplementedError, match="meta device"):
        block(torch.randn(1, 3, 16))
