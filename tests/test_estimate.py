"""`optpipe profile --model`: counts agree with formulas and with real runs, times with published measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_fields

torch = pytest.importorskip("torch")

from bench import estimates  # noqa: E402
from optpipe_compiler.costs import gpus, models  # noqa: E402
from optpipe_compiler.documents.files import canonical  # noqa: E402
from optpipe_compiler.documents.profile import Quantity, parse, value_of  # noqa: E402
from optpipe_compiler.errors import BadInput, MissingDependency  # noqa: E402
from optpipe_compiler.verify import verify  # noqa: E402
from optpipe_compiler.view.estimated import gpu_table, render  # noqa: E402
from optpipe_compiler.view.text import as_text  # noqa: E402
from optpipe_torch.estimates import estimate as estimating  # noqa: E402
from optpipe_torch.estimates import time as estimate_time  # noqa: E402
from optpipe_torch.estimates.count import count  # noqa: E402
from optpipe_torch.estimates.estimate import EstimateOptions, assumptions, count_layers, estimate  # noqa: E402
from optpipe_torch.estimates.work import Kernel  # noqa: E402
from optpipe_torch.models.layers import Block, makers  # noqa: E402
from tests.instances import quick  # noqa: E402
from tests.test_measure import saved_by  # noqa: E402

A100 = gpus.load("a100-80gb")
GPT = replace(models.load("gpt2"), layers=4)
LLAMA = models.Architecture(
    kind="llama", layers=4, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=160, vocab=1000, attention="math"
)
MIXTRAL = replace(LLAMA, kind="mixtral", experts=4, experts_per_token=2)
QWEN = replace(LLAMA, kind="qwen3", qk_norm=True, qkv_bias=True)


def options(model: models.Architecture = GPT, **others: Any) -> EstimateOptions:
    sequence = min(model.positions or 256, 256)
    return EstimateOptions(**{"model": model, "gpu": A100, "devices": 4, "sequence_length": sequence, **others})


def block(model: models.Architecture, **others: Any):
    return count_layers(options(model, **others))["block"][1]


# -- bytes


@pytest.mark.parametrize(("attention", "squares"), [("math", 5), ("flash", 0)])
def test_a_gpt_block_keeps_what_the_literature_says(attention, squares):
    batch, sequence, hidden, heads = 2, 256, 768, 12
    sizes = block(replace(GPT, attention=attention), microbatch_size=batch).sizes
    expected = batch * sequence * (34 * hidden + squares * heads * sequence)
    rows = batch * sequence
    statistics = 4 * 4 * rows + (4 * heads * rows if attention == "flash" else 0)  # fp32 mean and scale; logsumexp
    assert expected + statistics <= sizes.saved <= expected + statistics + 64  # the flash kernel's random state


def test_a_llama_block_keeps_its_inputs_of_norms_matrices_and_attention():
    batch, sequence = 2, 256
    model = replace(LLAMA, attention="flash")
    sizes = block(model, microbatch_size=batch).sizes
    heads, groups = model.heads * model.head_dim, model.kv_heads * model.head_dim
    # two norms' inputs and outputs; rotated q and k, the joint qkv that v is part of, attention's output;
    # gate, its activation, up, their product
    values = 4 * model.hidden + (heads + groups) + (heads + 2 * groups) + heads + 4 * model.ffn
    statistics = 4 * 2 + 4 * model.heads
    expected = batch * sequence * (2 * values + statistics)
    assert expected <= sizes.saved <= expected + 64


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL, QWEN, replace(GPT, positions=256, attention="math")])
def test_the_meta_device_keeps_what_a_real_run_keeps(model):
    counted = count_layers(options(model, microbatch_size=2))
    x = torch.randn(2, 256, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(model.vocab, (2, 256))
    for name, (_, make) in makers(model, 256).items():
        layer = make().to(torch.bfloat16)
        inputs = {"embedding": (tokens,), "block": (x,), "head": (x, tokens)}[name]
        buffers = sum(b.nbytes for b in layer.buffers())  # autograd's count has them, ours does not
        norms = sum(isinstance(part, torch.nn.LayerNorm) for part in layer.modules())
        narrower = norms * 2 * 512 * 2  # their statistics are 2 bytes wide on a CPU, 4 on a GPU
        assert 0 <= saved_by(layer, *inputs) + narrower - counted[name][1].sizes.saved <= buffers, name


def test_between_i_and_w_the_inputs_of_the_weights_and_their_gradients_are_kept():
    sizes = block(replace(GPT, attention="math")).sizes
    unit = 2 * 256 * 768
    gradients = 3 + 1 + 4 + 1  # of what leaves the four linear layers
    inputs = 1 + 1 + 1 + 4
    norms = 4 * 2 * 768  # the gradients of their own weights, ready
    assert sizes.captured == gradients * unit + norms
    assert sizes.residue == (gradients + inputs) * unit + norms


def test_sizes_that_follow_from_the_shapes():
    counted = count_layers(options(GPT, microbatch_size=2))
    sizes = {name: found.sizes for name, (_, found) in counted.items()}
    boundary = 2 * 256 * 768 * 2
    assert [sizes[name].output for name in sizes] == [boundary, boundary, 0]
    assert [sizes[name].checkpoint for name in sizes] == [2 * 256 * 8, boundary, boundary]
    parameters = 12 * 768**2 + 13 * 768
    assert sizes["block"].static == 16 * parameters
    assert sizes["embedding"].static == 16 * 768 * (50257 + 1024)


def test_the_transient_bytes_of_a_block_cover_two_in_a_row():
    model = options(LLAMA, microbatch_size=2)
    one = count_layers(model)["block"][1].sizes
    with torch.device("meta"):
        layers = [Block(LLAMA, 256).to(torch.bfloat16) for _ in range(3)]
        x = torch.empty(2, 256, 64, dtype=torch.bfloat16)
    three = count(layers, x, None).sizes
    assert three.saved == 3 * one.saved
    assert all(three.transient[op] <= one.transient[op] for op in one.transient)


# -- operations


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL, replace(GPT, attention="math")])
def test_operations_are_those_of_torchs_counter(model):
    from torch.utils.flop_counter import FlopCounterMode

    work = block(model).work
    with torch.device("meta"):
        layer = Block(model, 256).to(torch.bfloat16)
        x = torch.empty(1, 256, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output = layer(x)
        forward = counter.get_total_flops()
        output.sum().backward()
    assert work["forward"].flops == forward
    assert work["backward"].flops == counter.get_total_flops() - forward
    assert work["backward_input"].flops + work["backward_weight"].flops == work["backward"].flops


def test_causal_flash_attention_counts_half_whatever_the_groups():
    for kv_heads in (8, 4, 1):
        model = replace(LLAMA, attention="flash", kv_heads=kv_heads)
        kernels = {
            k.kind: k.flops for k in block(model).work["forward"].kernels + block(model).work["backward"].kernels
        }
        product = 2 * 8 * 256 * 256 * 8
        assert kernels["attention_forward"] == 2 * product // 2
        assert kernels["attention_backward"] == 5 * product // 2


def test_experts_cost_what_their_tokens_cost_and_weigh_what_they_are():
    one, four = block(replace(LLAMA, ffn=2 * 160)), block(MIXTRAL)
    router = 2 * 256 * 64 * 4
    assert four.work["forward"].flops == one.work["forward"].flops + router
    weights = 3 * 64 * 160
    assert four.sizes.static - one.sizes.static == 16 * (4 * weights - 2 * weights + 64 * 4)


# -- times


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic_and_never_less_than_a_launch():
    def time(flops: int, nbytes: int, kind: str = "matmul") -> float:
        return estimate_time.kernel_ns(Kernel("k", kind, flops, nbytes), A100, 4)

    rate = A100.matmul_flops_per_s * estimate_time.SHARES["matmul"]
    assert time(10**12, 10) == pytest.approx(1e21 / rate)
    bandwidth = A100.memory_bytes_per_s * estimate_time.MEMORY_SHARE
    assert time(10, 10**10) == pytest.approx(1e19 / bandwidth)
    assert time(1, 1) == estimate_time.LAUNCH_NS
    moved = 10**9 * 3 / 4
    link = A100.collective_bytes_per_s * estimate_time.LINK_SHARE
    assert time(0, 10**9, "collective") == pytest.approx(A100.peer_latency_ns + moved * 1e9 / link)


def test_published_times_are_met_within_fifteen_percent():
    fitted, others = estimates.worst(slice(0, 3))
    assert fitted <= 15
    assert others <= 15


def test_the_shares_are_what_fits_best():
    assert estimates.fit() == (estimate_time.SHARES["matmul"], estimate_time.MEMORY_SHARE)


def test_published_memory_is_met_within_five_percent():
    for name, case in estimates.ZERO_BUBBLE.items():
        _, _, blocks, devices, _ = case["sizes"]
        for factor, published in zip((1, 2), case["memory"], strict=True):
            ours = estimates.first_peak_gb(estimates.zero_bubble(name, factor), blocks, devices)
            assert abs(ours / published - 1) <= 0.05, name


# -- tensor parallelism


def test_tensor_parallel_ranks_share_weights_work_and_sequence():
    model = replace(LLAMA, attention="flash")
    whole, half = block(model), block(model, tensor_parallel=2)
    assert half.sizes.output == whole.sizes.output // 2
    assert whole.sizes.static // 2 < half.sizes.static < whole.sizes.static // 2 + 16 * 3 * 64
    assert half.work["forward"].flops == whole.work["forward"].flops // 2
    collectives = {op: sum(k.kind == "collective" for k in half.work[op].kernels) for op in half.work}
    assert collectives == {"forward": 4, "backward_input": 4, "backward_weight": 0, "backward": 4, "selective": 2}


def test_selective_recompute_keeps_no_gathered_inputs():
    model = replace(LLAMA, attention="flash")
    whole, half = block(model).sizes, block(model, tensor_parallel=2).sizes
    assert half.saved >= whole.saved / 2 + 2 * half.output  # of both norms: the whole sequence instead of a part
    assert half.selective.saved == pytest.approx(whole.selective.saved / 2, rel=0.01)


# -- head and embedding in parts

PARTS = replace(LLAMA, vocab=4000, embedding_parts=4, head_parts=4)


def test_parts_have_names_of_their_own_and_share_weights_and_work_of_the_whole():
    parts = count_layers(options(PARTS))
    whole = count_layers(options(replace(PARTS, embedding_parts=1, head_parts=1)))
    for name in ("embedding", "head"):
        mine = [found for title, (_, found) in parts.items() if title.partition(".")[0] == name]
        assert [title for title in parts if title.startswith(name)] == [f"{name}.{part}" for part in range(4)]
        assert sum(found.sizes.static for found in mine) == whole[name][1].sizes.static
        for op in ("forward", "backward_input", "backward_weight", "backward"):
            assert sum(found.work[op].flops for found in mine) == whole[name][1].work[op].flops
    assert parts["block"][1].work == whole["block"][1].work


def test_a_part_of_the_head_keeps_its_logits_and_what_enters_it_and_then_their_gradient():
    sizes = {title: found.sizes for title, (_, found) in count_layers(options(PARTS)).items()}
    logits, hidden, state, small = 256 * 1000 * 2, 256 * 64 * 2, 256 * 8, 256 * (8 + 4 + 8)
    assert sizes["head.1"].saved == logits + hidden + state + small
    assert sizes["head.1"].residue == logits + hidden + state
    assert sizes["head.1"].captured == logits
    assert sizes["head.1"].output == sizes["head.1"].checkpoint == hidden + state
    assert sizes["head.3"].output == 0
    assert sizes["embedding.1"].output == hidden + 256 * 8
    assert sizes["embedding.3"].output == hidden


@pytest.mark.parametrize("name", ["head.0", "head.1", "head.3", "embedding.1"])
def test_the_meta_device_keeps_of_a_part_what_a_stage_keeps(name):
    from optpipe_torch.models.layers import border
    from runtime_torch.bundles import bundled
    from runtime_torch.execution import StageExecution

    titles = list(makers(PARTS, 256))
    incoming, outgoing = (
        border(title, PARTS, 1, 256, torch.bfloat16) for title in (titles[titles.index(name) - 1], name)
    )
    layer = bundled(makers(PARTS, 256)[name][1]().to(torch.bfloat16), incoming, outgoing)
    stage = StageExecution([layer], 0, is_first=False, is_last=name == "head.3", device="cpu")
    shape, dtype = incoming.boundary
    stage.forward(0, torch.zeros(shape, dtype=dtype), torch.zeros(1, 256, dtype=torch.int64))
    sizes = count_layers(options(PARTS))[name][1].sizes
    assert stage.saved_bytes(0) == sizes.saved


def test_a_head_in_parts_changes_nothing_of_how_a_block_runs_backward():
    """Weight gradients of all that follows the embedding were counted as if they were made at once. (Behind an
    embedding a whole backward holds the gradient of its output, which is counted elsewhere as that of the input.)"""
    whole, parts = (block(replace(PARTS, embedding_parts=1, head_parts=n)).sizes for n in (1, 4))
    more = {op: size - whole.transient[op] for op, size in parts.transient.items()}
    assert more["backward_input"] == more["backward_weight"] == 0
    assert more["backward"] <= whole.output


def test_the_transient_bytes_of_parts_cover_two_in_a_row():
    from optpipe_torch.models.layers import border
    from runtime_torch.bundles import bundled

    counted = {title: found.sizes for title, (_, found) in count_layers(options(PARTS)).items()}
    with torch.device("meta"):
        made = {title: make().to(torch.bfloat16) for title, (_, make) in makers(PARTS, 256).items()}
        pairs = [("head.0", "head.1"), ("head.1", "head.2"), ("head.2", "head.3")]
        for pair in [*pairs, ("block", "head.0"), ("embedding.1", "embedding.2"), ("embedding.3", "block")]:
            titles = list(made)
            places = [titles.index(title) for title in pair]
            borders = [border(titles[i], PARTS, 1, 256, torch.bfloat16) for i in range(places[0] - 1, places[1] + 1)]
            layers = [bundled(made[title], *borders[i : i + 2], packs=i == 1) for i, title in enumerate(pair)]
            shape, dtype = borders[0].boundary
            target = torch.empty(1, 256, dtype=torch.int64) if pair[1].startswith("head") else None
            two = count(layers, torch.empty(shape, dtype=dtype), target).sizes
            one = [counted[title] for title in pair]
            saved = one[0].saved + one[1].saved_after(one[0])
            rise = two.transient["forward"] + two.saved + two.output
            assert rise <= saved + one[1].output + max(sizes.transient["forward"] for sizes in one), pair
            for op in ("backward_weight", "backward"):
                assert two.transient[op] <= max(sizes.transient[op] for sizes in one), (pair, op)
            rise = two.transient["backward_input"] + two.captured
            captured = sum(sizes.captured for sizes in one)
            assert rise <= captured + max(sizes.transient["backward_input"] for sizes in one), pair


def test_tensor_parallel_parts_share_work_and_sequence():
    whole, half = count_layers(options(PARTS)), count_layers(options(PARTS, tensor_parallel=2))
    for title in ("head.0", "head.1", "head.3"):
        assert half[title][1].work["forward"].flops == whole[title][1].work["forward"].flops // 2
        collectives = {op: sum(k.kind == "collective" for k in w.kernels) for op, w in half[title][1].work.items()}
        assert collectives == {"forward": 1, "backward_input": 1, "backward_weight": 0, "backward": 1, "selective": 1}
    assert half["embedding.1"][1].sizes.output < whole["embedding.1"][1].sizes.output
    with pytest.raises(BadInput, match=r"--head-parts is 3000, expected 1 to the vocabulary \(2000\)"):
        estimating.check(options(replace(PARTS, head_parts=3000), tensor_parallel=2))


def test_gradients_added_by_the_matrix_product_save_traffic_only_in_w():
    own, fused = block(LLAMA), block(LLAMA, accumulation="fused")
    assert fused.sizes == own.sizes
    for op in ("forward", "backward_input"):
        assert fused.work[op].kernels == own.work[op].kernels
    assert len(fused.work["backward_weight"].kernels) < len(own.work["backward_weight"].kernels)


# -- the profile


@pytest.mark.parametrize("model", [GPT, LLAMA, MIXTRAL, QWEN])
def test_every_number_of_the_profile_is_estimated_and_the_file_reads_back(model):
    profile = estimate(options(model, shared_links="pairs"))
    assert parse(canonical(profile), "p.json") == profile
    assert [(layer.name, layer.count) for layer in profile.layers] == [("embedding", 1), ("block", 4), ("head", 1)]
    quantities = [v for layer in profile.layers for v in vars_of(layer).values() if isinstance(v, Quantity)]
    assert len(quantities) == 15 * 3
    assert {quantity.source for quantity in quantities} == {"estimated"}
    assert value_of(profile.layers[0].backward_input_ns) == 0
    assert all(value_of(layer.forward_ns) > 0 for layer in profile.layers)


def vars_of(record: Any) -> dict[str, Any]:
    return {field: getattr(record, field) for field in record.__struct_fields__}


def test_it_plans_and_the_plan_holds():
    profile = estimate(options(GPT, microbatch_size=4))
    planned = quick(profile, 10 * 10**9)
    assert verify(planned.schedule, profile) == []


def test_messages_cross_nodes_where_the_devices_do():
    assert len(estimate(options(devices=8)).machine.p2p) == 1
    assert estimate(options(devices=1)).machine.p2p == []
    network, *pairs = estimate(options(devices=12)).machine.p2p
    assert network.devices is None
    assert value_of(network.bytes_per_s or 0) < value_of(pairs[0].bytes_per_s or 0)
    assert {pair.devices for pair in pairs} == {
        (a, b) for group in (range(8), range(8, 12)) for a in group for b in group if a < b
    }
    (_, *pairs) = estimate(options(devices=4, tensor_parallel=4)).machine.p2p
    assert [pair.devices for pair in pairs] == [(0, 1), (2, 3)]


def test_host_links_are_shared_by_pairs_of_gpus():
    (own,) = estimate(options()).machine.links
    assert own.devices is None
    shared = estimate(options(devices=5, shared_links="pairs")).machine.links
    assert [link.devices for link in shared] == [[0, 1], [2, 3], [4]]
    assert {value_of(link.d2h_bytes_per_s) for link in shared} == {value_of(own.d2h_bytes_per_s)}
    three = options(devices=7, shared_links="pairs", gpu=replace_fields(A100, devices_per_node=3))
    assert [link.devices for link in estimate(three).machine.links] == [[0, 1], [2], [3, 4], [5], [6]]
    (halved,) = estimate(options(shared_links="pairs", tensor_parallel=2)).machine.links
    assert value_of(halved.d2h_bytes_per_s) == value_of(own.d2h_bytes_per_s) // 2


def test_what_is_taken_for_granted_is_said():
    assert "16 bytes per parameter" in assumptions(options())[0]
    assert any("2 tensor-parallel GPUs" in line for line in assumptions(options(tensor_parallel=2)))
    assert any("4 experts" in line for line in assumptions(options(MIXTRAL)))
    assert any(line.startswith("12 of the 16 bytes per parameter") for line in assumptions(options(data_parallel=2)))


def test_in_eighty_columns_no_number_of_an_estimate_is_cut():
    found = estimate(options(devices=1))
    layer = replace_fields(
        found.layers[1],
        count=32,
        **dict.fromkeys(("forward_ns", "backward_input_ns", "backward_weight_ns", "backward_ns"), 35_700_000),
        **dict.fromkeys(("saved_bytes", "residue_bytes", "output_bytes", "static_bytes"), 11_113_100_000),
    )
    profile = replace_fields(found, layers=[layer])
    text = as_text(render(profile, "profile.json", []), 80)
    assert text.count("11113.1") == 4
    assert "static\n" in text
    assert "1 pipeline device (" in text
    assert "\nF: forward; I, W, B: gradients of input, weights, both\n" in text


def test_in_eighty_columns_the_gpus_are_told_in_full():
    said = as_text(gpu_table({"mi300x": gpus.load("mi300x")}), 80)
    assert all(word in said for word in gpus.load("mi300x").description.split())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tensor_parallel": 5}, "--tp is 5, expected a divisor of the attention heads (12)"),
        ({"tensor_parallel": 9}, "--tp is 9, expected 1 to 8"),
        ({"model": replace(LLAMA, kv_heads=1), "tensor_parallel": 2}, "--tp is 2, expected a divisor of the key-value"),
        ({"sequence_length": 251, "tensor_parallel": 2}, "--tp is 2, expected a divisor of the sequence length (251)"),
        ({"sequence_length": 2048}, "--seq is 2048, expected at most the positions of the model (1024)"),
        ({"devices": 0}, "--devices is 0, expected 1 to 10000"),
        ({"microbatch_size": 2**30}, "--microbatch-size is 1073741824, expected 1 to 1048576"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(BadInput) as caught:
        estimate(options(**wrong))
    assert str(caught.value).startswith(said)


def test_without_torch_the_sentence_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(estimating.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'optpipe\[runtime\]'"):
        estimate(options())
