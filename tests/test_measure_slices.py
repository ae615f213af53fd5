"""What a profile says of slices: attention from two of them, the others to check by; bytes that are enough for each."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec import structs

pytest.importorskip("torch")

from test_measure import TINY, findings

from optpipe_compiler.costs import gpus
from optpipe_compiler.costs.models import load
from optpipe_compiler.costs.noise import noisy
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Model, parse, value_of
from optpipe_compiler.errors import BadInput
from optpipe_torch.estimates.estimate import EstimateOptions, estimate
from optpipe_torch.models import known as models
from optpipe_torch.models import text
from optpipe_torch.profiler.child import measure_sizes
from optpipe_torch.profiler.layers import Benches, layer_bytes, transient_bytes
from optpipe_torch.profiler.records import SlicedBytes, assemble, sample_name, slice_spans
from optpipe_torch.profiler.slices import _excesses, _hold_against_whole, slice_bytes, sliced_bench, time_slices
from optpipe_torch.profiler.timer import Timer

BLOCK_NS, ATTENTION, OVERHEAD, OP_NS = 10_000_000, 4_000_000, 100_000, 30_000


def sliced_findings(wrong_ns=0):
    """Every op of the block has that much attention; the second slice takes longer by `wrong_ns`."""
    found = findings()
    length = TINY.sequence_length
    times = {}
    for op in ("forward", "backward_input", "backward_weight", "backward"):
        attention = 0 if op == "backward_weight" else ATTENTION
        for index, (begin, end) in enumerate(slice_spans(length)):
            tokens, pairs = (end - begin) / length, (end**2 - begin**2) / length**2
            ns = (BLOCK_NS - attention) * tokens + attention * pairs + OVERHEAD + OP_NS + wrong_ns * (index == 1)
            times[sample_name(op, index)] = [round(ns)] * 3
        times[sample_name(op, None)] = [BLOCK_NS + OP_NS] * 3
    sizes = replace(found.sizes["block"], sliced=SlicedBytes(20, 3, 5))
    return replace(found, sizes={**found.sizes, "block": sizes}, sliced={"block": times})


def test_attention_and_overhead_of_slices_follow_from_their_times():
    profile = assemble(TINY.model(), 2, [sliced_findings(), sliced_findings()])
    embedding, block, _ = profile.layers
    assert embedding.slices is None
    slices = block.slices
    assert slices is not None
    assert value_of(slices.forward_attention_ns) == pytest.approx(ATTENTION, rel=1e-4)
    assert value_of(slices.backward_input_attention_ns) == pytest.approx(ATTENTION, rel=1e-4)
    for op in ("forward", "backward_input", "backward_weight", "backward"):
        assert value_of(getattr(slices, f"{op}_overhead_ns")) == pytest.approx(OVERHEAD, rel=1e-3)
    sizes = slices.carry_bytes, slices.forward_prefix_bytes, slices.backward_prefix_bytes
    assert [value_of(one) for one in sizes] == [20, 3, 5]
    assert parse(canonical(profile), "p.json") == profile
    assert noisy(profile) == []


def test_a_slice_that_fits_no_line_makes_the_attention_noise():
    profile = assemble(TINY.model(), 2, [sliced_findings(wrong_ns=1_000_000)])
    assert [one.name for one in noisy(profile)] == [
        "attention in forward of block",
        "attention in backward input of block",
    ]


MODELS = {
    "gpt": TINY.model(),
    "llama": Model(
        builder="transformer",
        config={
            "kind": "llama",
            "layers": 1,
            "hidden": 32,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "ffn": 48,
            "vocab": 256,
            "head_parts": 2,
            "granularity": "half",
        },
        microbatch_size=2,
        sequence_length=16,
        seed=0,
    ),
}


@pytest.mark.parametrize(("frozen", "sliced"), [(0, [True] * 5), (1, [True, False, True, True, True])])
def test_attention_over_weights_of_the_first_layer_that_trains_is_not_called_sliceable(frozen, sliced):
    """As a run refuses: its backward would begin below keys and values."""
    config = {"frozen": frozen}
    model = Model(builder="tests.user_layers:frozen_in_front", config=config, microbatch_size=2, sequence_length=16)
    benches = Benches(model, text.default_text())
    assert [sliced_bench(benches, index) is not None for index in range(5)] == sliced


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_of_a_layer_are_enough_for_each_of_its_slices(name):
    benches = Benches(MODELS[name], text.default_text())
    timer = Timer()
    hidden = 32 if name == "gpt" else 16
    carries, fixed = [], []
    for index in range(benches.head + 1):
        sizes = layer_bytes(benches, index)
        alone = transient_bytes(timer, benches, index, index + 1, [sizes])
        sizes.transient, sizes.own_transient = dict(alone), alone
        sliced = sliced_bench(benches, index)
        assert sliced is not None
        slice_bytes(timer, benches, index, sizes)
        assert sizes.sliced is not None
        if index == 0:  # what waits for W is the gradient of what it returned, once
            assert sizes.captured == sizes.output
        carries.append(sizes.sliced.carry)
        saved = []
        for number in range(4):
            sliced.forward(number)
            saved.append(sliced.bench.stage.saved_bytes(number))
        assert max(saved) * 4 <= sizes.saved
        for number in reversed(range(4)):
            sliced.backward_input(number)
            captured = sliced.bench.stage.captured_bytes(number)
            assert captured * 4 <= sizes.captured
            assert (captured + sliced.bench.stage.saved_bytes(number)) * 4 <= sizes.residue
        assert sizes.transient["backward_weight"] == alone["backward_weight"]  # slices make no whole larger
        for op, size in sizes.sliced.fixed.items():
            freed = sizes.saved if op == "backward" else 0  # before its peak, by the whole and not by a short slice
            assert 0 <= size <= min(sizes.transient[op], alone[op] + freed)
        fixed.append(sizes.sliced.fixed["backward_weight"])
    assert fixed[0] == 256 * 32 * 4  # the gradient of the embedding's weights, of however few tokens
    keys_and_values = 2 * 2 * 16 * hidden * 4
    assert sorted(carries)[-1] == keys_and_values
    assert sum(map(bool, carries)) == (2 if name == "gpt" else 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_the_bytes_of_selective_recompute_are_enough_for_each_slice(kind):
    """What a slice keeps, and needs in its backward, does not all shrink with its tokens."""
    known = {"kind": kind, "granularity": "half", "qk_norm": kind == "qwen3", "positions": 31 * (kind == "gpt2")}
    config = MODELS["llama"].config | known
    benches = Benches(structs.replace(MODELS["llama"], config=config, sequence_length=31), text.default_text())
    timer, names = Timer(), models.layer_names(benches.model)
    found = measure_sizes(timer, benches, names, 2**30)
    chosen = [name for name, sizes in found.items() if sizes.selective is not None]
    assert len(chosen) >= (1 if kind == "llama" else 2)
    for name in chosen:
        sizes, index = found[name], names.index(name)
        slice_bytes(timer, benches, index, sizes)
        light, into = sizes.selective, sizes.sliced
        sliced = sliced_bench(benches, index, selective=True)
        stage, tokens = sliced.bench.stage, sliced.tokens
        for number in range(4):
            sliced.forward(number)
        assert all(stage.saved_bytes(k) * tokens <= light.saved * (e - b) for k, (b, e) in enumerate(sliced.spans))
        for number, (begin, end) in reversed(list(enumerate(sliced.spans))):
            sliced.backward_input(number)
            made = stage.captured_bytes(number) + stage.result_bytes(number)
            assert made * tokens <= light.captured * (end - begin), name
        as_chosen = replace(sizes, saved=light.saved, captured=light.captured)
        halves = sliced_bench(benches, index, [(0, tokens // 2), (tokens // 2, tokens)], selective=True)
        for op in ("backward_input", "backward"):
            most, fixed = sizes.transient[op] + light.transient, into.fixed[op]
            needs = _excesses(timer, halves, as_chosen, into.carry)[op]
            for (begin, end), need in zip(halves.spans, needs, strict=True):
                own = fixed + (most - fixed) * (end - begin) / tokens + into.backward_prefix * begin / tokens
                assert need <= own + 1, (name, op)


def test_a_part_of_a_head_that_saves_little_beside_its_input_has_no_carry():
    narrow = MODELS["llama"].config | {"hidden": 128, "head_dim": 32, "head_parts": 4}  # 64 columns of 128 rows
    model = structs.replace(MODELS["llama"], config=narrow)
    benches = Benches(model, text.default_text())
    layers = models.layer_names(model)
    sizes = measure_sizes(Timer(), benches, layers, 2**30)
    second = sizes["head.1"]
    assert 0 < second.saved - second.shared < second.checkpoint
    slice_bytes(Timer(), benches, layers.index("head.1"), second)
    assert second.sliced.carry == 0


def test_every_op_of_every_slice_is_timed():
    benches = Benches(TINY.model(), text.default_text())
    sliced = [one for one in (sliced_bench(benches, index) for index in (1, 2)) if one is not None]
    times = time_slices(Timer(), sliced, 2)
    assert len(times) == 20
    assert {len(samples) for name, samples in times.items() if not name.startswith("forward")} == {4}


def test_layers_that_do_not_say_so_have_no_slices():
    model = Model(builder="tests.user_layers:layers", config={}, microbatch_size=2, sequence_length=16, seed=0)
    from optpipe_torch.models.user_functions import allow

    allow(model.builder)
    benches = Benches(model, text.default_text())
    assert [sliced_bench(benches, index) is not None for index in range(benches.head + 1)] == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("kind", "index", "sentence"),
    [
        ("convolution", 1, r"layer 1 \(Crossing\) says that it can be sliced, and its slices have another result"),
        (
            "convolution, dropout",
            1,
            r"layer 1 \(Crossing\) says that it can be sliced, and its slices have another result",
        ),
        ("detached state", 1, r"layer 1 \(Crossing\) says that it can be sliced, and its slices have another result"),
        ("state", 1, r"layer 1 \(Crossing\) says that it can be sliced, and its slices have another result"),
        ("sum", 2, r"layer 2 \(Summing\) says that it can be sliced, and its slices have another result"),
        ("dropout", 1, None),
    ],
)
def test_a_layer_that_says_wrongly_that_it_can_be_sliced_is_refused(kind, index, sentence):
    from optpipe_torch.models.user_functions import allow

    builder = "tests.user_layers:crossing"
    allow(builder)
    model = Model(builder=builder, config={"kind": kind}, microbatch_size=2, sequence_length=16, seed=0)
    benches = Benches(model, text.default_text())
    with pytest.raises(BadInput, match=sentence) if sentence else nullcontext():
        _hold_against_whole(benches, index)


def test_estimates_count_slices():
    gpu = gpus.load("h100-sxm")
    profile = estimate(EstimateOptions(model=load("llama-7b"), gpu=gpu, sequence_length=8192))
    assert profile.tokens == 8192
    embedding, block, head = profile.layers
    assert embedding.slices is not None
    assert head.slices is not None
    slices = block.slices
    assert slices is not None
    assert value_of(slices.carry_bytes) == 2 * 8192 * 4096 * 2
    assert value_of(embedding.slices.carry_bytes) == value_of(head.slices.forward_attention_ns) == 0
    share = value_of(slices.forward_attention_ns) / value_of(block.forward_ns)
    flops = 2 * 8192 * 4096 / (2 * 202_375_168 + 2 * 8192 * 4096)  # of attention, half of it masked, and of all
    assert 0.9 * flops < share < 1.4 * flops  # norms take time, too, and the kernel reaches less than products
    assert value_of(slices.backward_input_attention_ns) > 2 * value_of(slices.forward_attention_ns)
    assert 0 < value_of(slices.forward_overhead_ns) < 0.1 * value_of(block.forward_ns)
    assert parse(canonical(profile), "p.json") == profile
    experts = estimate(EstimateOptions(model=load("mixtral-8x7b"), gpu=gpu))
    assert experts.layers[1].slices is None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_what_a_short_slice_needs_says_what_every_slice_does(name, count):
    benches, timer = Benches(MODELS[name], text.default_text()), Timer()
    for index in range(benches.head + 1):
        sizes = layer_bytes(benches, index)
        sizes.own_transient = transient_bytes(timer, benches, index, index + 1, [sizes])
        sizes.transient = dict(sizes.own_transient)
        slice_bytes(timer, benches, index, sizes)
        cut = sliced_bench(benches, index, list(pairwise(16 * k // count for k in range(count + 1))))
        for op, needs in _excesses(timer, cut, sizes, sizes.sliced.carry).items():
            fixed, whole = sizes.sliced.fixed[op], sizes.transient[op]
            assert needs[0] <= fixed + (whole - fixed) / count + 1, (index, op)
        for slice in range(count):
            cut.forward(slice)
            assert cut.bench.stage.saved_bytes(slice) * count <= sizes.saved
        for slice in reversed(range(count)):
            cut.backward_input(slice)
            captured = cut.bench.stage.captured_bytes(slice)
            assert captured * count <= sizes.captured
            assert (captured + cut.bench.stage.saved_bytes(slice)) * count <= sizes.residue


def test_layers_that_keep_functions_of_their_weights_for_each_slice_are_not_said_to_be_sliceable():
    """A profile has no bytes of theirs that do not shrink, and a whole microbatch is charged for what it saves."""
    model = Model(builder="tests.user_layers:normed", config={}, microbatch_size=2, sequence_length=64)
    benches, timer = Benches(model, text.default_text()), Timer()
    sizes = layer_bytes(benches, 1)
    sizes.own_transient = transient_bytes(timer, benches, 1, 2, [sizes])
    sizes.transient = dict(sizes.own_transient)
    before = replace(sizes)
    assert sliced_bench(benches, 1) is not None
    slice_bytes(timer, benches, 1, sizes)
    assert sizes == before
    assert sizes.sliced is None
