"""Blocks as two layers, attention and MLP: names, gradients and costs of the whole block, from profile to run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from msgspec import structs  # noqa: E402

from optpipe_compiler.cli.estimate import FEW_BLOCKS, cut  # noqa: E402
from optpipe_compiler.compiler import Options, compile_schedule  # noqa: E402
from optpipe_compiler.costs import gpus  # noqa: E402
from optpipe_compiler.costs.models import Architecture  # noqa: E402
from optpipe_compiler.costs.noise import noisy  # noqa: E402
from optpipe_compiler.documents import profile as profiles  # noqa: E402
from optpipe_compiler.documents.files import canonical  # noqa: E402
from optpipe_compiler.documents.profile import Layer, Machine, Model, Profile, Quantity, alike, value_of  # noqa: E402
from optpipe_compiler.verify import verify  # noqa: E402
from optpipe_torch.emulate.alone import emulate  # noqa: E402
from optpipe_torch.estimates.count import count  # noqa: E402
from optpipe_torch.estimates.estimate import EstimateOptions, count_layers, estimate  # noqa: E402
from optpipe_torch.models import known as models  # noqa: E402
from optpipe_torch.models.layers import AttentionHalf, Block, MlpHalf, makers  # noqa: E402
from optpipe_torch.models.text import default_text  # noqa: E402
from optpipe_torch.profiler.child import measure_sizes  # noqa: E402
from optpipe_torch.profiler.layers import Benches, time_ops  # noqa: E402
from optpipe_torch.profiler.measure import MeasureOptions, measure  # noqa: E402
from optpipe_torch.profiler.timer import Timer  # noqa: E402
from tests.test_cli import optpipe, refused, run  # noqa: E402, F401 - fixtures

GPT = Architecture(
    kind="gpt2", layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=300, positions=64, qkv_bias=True
)
LLAMA = Architecture(kind="llama", layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=300)
MIXTRAL = replace(LLAMA, kind="mixtral", layers=2, ffn=24, experts=4, experts_per_token=2)
KINDS = {"gpt2": GPT, "llama": LLAMA, "mixtral": MIXTRAL}
DROPOUT = replace(GPT, residual_dropout=0.1, attention_dropout=0.1, attention="math")
SEQUENCE = 16


def in_halves(model: Architecture) -> Architecture:
    return replace(model, granularity="half")


def record(model: Architecture) -> Model:
    return Model(builder="transformer", config=asdict(model), microbatch_size=2, sequence_length=SEQUENCE)


# -- the layers


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_halves_have_names_of_their_own_and_are_of_two_kinds(model):
    half = record(in_halves(replace(model, head_parts=2)))
    halves = [(f"block.{index}.attention", f"block.{index}.mlp") for index in range(model.layers)]
    titles = ["embedding", *(name for pair in halves for name in pair), "head.0", "head.1"]
    assert models.layer_titles(half) == titles
    kinds = ["block.0.attention", "block.0.mlp"] * model.layers
    assert models.layer_names(half) == ["embedding", *kinds, "head.0", "head.1"]
    layers = models.build(half)
    assert len(layers) == models.layer_count(half)
    assert models.parameter_bytes(half) == [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    x, _ = models.batch(half, default_text(), torch.Generator().manual_seed(0), 1)
    for layer, bundle in zip(layers[:-2], models.bundles(half)[1:], strict=False):
        x = layer(x)
        assert bundle.parts == ((tuple(x.shape), x.dtype),)


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_two_halves_are_the_block_with_its_names_output_and_gradients(model):
    torch.manual_seed(0)
    halves = AttentionHalf(model, SEQUENCE), MlpHalf(model)
    block = Block(model, SEQUENCE)
    block.load_state_dict({name: tensor for half in halves for name, tensor in half.state_dict().items()})
    x = torch.randn(2, SEQUENCE, model.hidden, requires_grad=True)
    outputs = block(x), halves[1](halves[0](x))
    torch.testing.assert_close(*outputs)
    wanted = dict(block.named_parameters())
    mine = {name: parameter for half in halves for name, parameter in half.named_parameters()}
    assert set(mine) == set(wanted)
    found = torch.autograd.grad(outputs[1].square().sum(), [x, *(mine[name] for name in wanted)])
    for a, b in zip(found, torch.autograd.grad(outputs[0].square().sum(), [x, *wanted.values()]), strict=True):
        torch.testing.assert_close(a, b)


def test_profiles_that_do_not_say_how_fine_they_are_have_whole_blocks():
    config = asdict(LLAMA)
    del config["granularity"]
    assert models.layer_titles(structs.replace(record(LLAMA), config=config)) == ["embedding", *["block"] * 3, "head"]


# -- estimates


def options(model: Architecture, **others: int) -> EstimateOptions:
    return EstimateOptions(model=model, gpu=gpus.load("a100-80gb"), sequence_length=64, **others)


OPS = ("forward", "backward_input", "backward_weight", "backward")
SUMS = ("saved", "residue", "captured", "static")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", [*KINDS.values(), DROPOUT], ids=[*KINDS, "dropout"])
def test_estimated_halves_do_and_keep_together_exactly_what_the_block_does(model, ranks):
    block = count_layers(options(model, tensor_parallel=ranks))
    half = count_layers(options(in_halves(model), tensor_parallel=ranks))
    halves = [f"block.{index}.{name}" for index in range(model.layers) for name in ("attention", "mlp")]
    assert list(half) == ["embedding", *halves, "head"]
    whole, both = block["block"][1], [half["block.1.attention"][1], half["block.1.mlp"][1]]
    for op in OPS:
        kernels = [kernel for one in (both if op == "forward" else reversed(both)) for kernel in one.work[op].kernels]
        assert sorted(map(str, kernels)) == sorted(map(str, whole.work[op].kernels)), op
    for size in SUMS:
        assert sum(getattr(one.sizes, size) for one in both) == getattr(whole.sizes, size), size
    assert {one.sizes.output for one in both} == {whole.sizes.output}
    assert {one.sizes.checkpoint for one in both} == {whole.sizes.checkpoint}
    for name in ("embedding", "head"):
        assert half[name][1] == block[name][1]


@pytest.mark.parametrize("model", [*KINDS.values(), DROPOUT], ids=[*KINDS, "dropout"])
def test_the_transient_bytes_of_halves_cover_several_in_a_row(model):
    counted = {title: found.sizes for title, (_, found) in count_layers(options(in_halves(model))).items()}
    with torch.device("meta"):
        made = {title: make().to(torch.bfloat16) for title, (_, make) in makers(in_halves(model), 64).items()}
        x = torch.empty(1, 64, model.hidden, dtype=torch.bfloat16)
        titles = list(made)[1:-1]
        for begin, end in ((0, 2), (1, 3), (0, 3), (1, 4), (0, 4)):
            run = titles[begin:end]
            together, alone = count([made[title] for title in run], x, None).sizes, [counted[title] for title in run]
            most = {op: max(sizes.transient[op] for sizes in alone) for op in OPS}
            assert together.saved + together.transient["forward"] <= sum(s.saved for s in alone) + most["forward"]
            captured = sum(sizes.captured for sizes in alone)
            assert together.captured + together.transient["backward_input"] <= captured + most["backward_input"]
            for op in ("backward_weight", "backward"):
                assert together.transient[op] <= most[op], (run, op)


@pytest.mark.parametrize("model", [LLAMA, replace(LLAMA, embedding_parts=3, head_parts=4)], ids=["whole", "parts"])
def test_an_estimate_in_halves_is_a_profile(model):
    whole, half = (estimate(options(one)) for one in (model, in_halves(model)))
    assert profiles.parse(canonical(half), "p.json") == half
    for field in ("forward_ns", "backward_input_ns", "backward_weight_ns", "saved_bytes", "static_bytes"):
        sums = [sum(value_of(getattr(one, field)) for one in profile.expanded_layers()) for profile in (whole, half)]
        assert abs(sums[0] - sums[1]) <= (model.layers if field.endswith("_ns") else 0)  # every time is rounded


# -- measured


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_measured_halves_keep_together_what_the_block_keeps(model):
    found = []
    for one in (model, in_halves(model)):
        benches = Benches(record(one), default_text())
        found.append(measure_sizes(Timer(), benches, models.layer_names(record(one)), 10**9))
    whole, half = found[0]["block"], [found[1][name] for name in ("block.0.attention", "block.0.mlp")]
    for size in SUMS:
        assert sum(getattr(one, size) for one in half) == getattr(whole, size), size
    assert {one.checkpoint for one in half} == {one.output for one in half} == {whole.output}
    assert {one.shared for one in half} == {0}


def test_measured_halves_take_together_as_long_as_the_block():
    model = replace(LLAMA, layers=1, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=688)
    least: dict[str, int] = {}
    benches = {one: Benches(record(one), default_text()) for one in (model, in_halves(model))}
    stages = {"block": (model, 1), "attention": (in_halves(model), 1), "mlp": (in_halves(model), 2)}
    built = {name: benches[one].stage(index, index + 1) for name, (one, index) in stages.items()}
    for _ in range(4):  # in turn: what else runs on the machine touches all of them
        for name, bench in built.items():
            times: dict[str, list[int]] = {}
            for _ in time_ops(Timer(), [bench], 5, times):
                pass
            taken = sum(min(times[op]) for op in ("forward", "backward_input", "backward_weight"))
            least[name] = min(taken, least.get(name, taken))
    assert 0.6 < (least["attention"] + least["mlp"]) / least["block"] < 1.6, least


@pytest.mark.runtime
@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_the_allocator_keeps_to_the_promise_for_halves(model, monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    profile = measure(MeasureOptions(devices=2, samples=2, of=record(in_halves(model))), lambda *_: None)
    for method in ("zb-h1", "1f1b-recompute", "po-f"):
        schedule = compile_schedule(profile, Options(mem_bytes=10**9, microbatches=4, method=method)).schedule
        assert verify(schedule, profile) == []
        for rank in (0, 1):
            alone = emulate(schedule, rank, steps=1, data=default_text(), on_event=lambda _: None)
            assert alone.allocator_peak_bytes <= alone.promised_activation_bytes, (method, rank)


# -- what is shown


def test_layers_that_differ_by_number_alone_are_shown_as_one():
    half = estimate(options(in_halves(replace(LLAMA, head_parts=5))))
    shown = [(layer.name, layer.count) for _, layer in alike(half.layers)]
    assert shown == [
        ("embedding", 1), ("block.*.attention", 3), ("block.*.mlp", 3), ("head.0", 1), ("head.*", 3), ("head.4", 1)
    ]  # fmt: skip


def test_layers_of_two_kinds_in_turn_are_shown_as_two():
    kinds = {n: Layer(name=n, forward_ns=1, backward_input_ns=1, backward_weight_ns=1, saved_bytes=1) for n in "ab"}
    other = structs.replace(kinds["b"], forward_ns=2)
    layers = [kinds["a"], structs.replace(kinds["b"], count=2), kinds["a"], kinds["b"], other]
    shown = [(index, layer.name, layer.count) for index, layer in alike(layers)]
    assert shown == [(0, "a", 2), (1, "b", 3), (4, "b", 1)]


def test_noise_of_a_kind_of_layer_is_named_once_and_counts_for_all_of_them():
    calm, loud = (Quantity(value=1000, source="measured", samples=9, spread=spread) for spread in (0, 600))
    costs = {"backward_input_ns": calm, "backward_weight_ns": calm, "saved_bytes": 1}
    halves = [Layer(name=f"block.{n}.mlp", forward_ns=loud, **costs) for n in range(100)]
    found = noisy(Profile(name="p", machine=Machine(devices=1), layers=halves))
    assert [(one.path, one.name) for one in found] == [("$.layers[0].forward_ns", "forward of block.*.mlp")]


# -- commands


def names():
    return [one.name for one in profiles.load(Path("profile.json")).expanded_layers()]


@pytest.mark.runtime
@pytest.mark.parametrize(
    ("model", "how", "method"),
    [
        ("gpt2", ("--granularity", "half", "--head-parts", "2"), "zbv"),
        ("mixtral", ("--granularity", "half"), "po-f"),
        ("llama", ("--granularity", "auto", "--dtype", "bf16"), None),
    ],
)
def test_a_model_in_halves_is_measured_planned_checked_and_trained(optpipe, model, how, method):  # noqa: F811
    optpipe("profile", "--model", f"{model}.json", "--devices", 2, "--device", "cpu", "--seq", 16, "--samples", 4, *how)
    assert names()[1:5] == ["block.0.attention", "block.0.mlp", "block.1.attention", "block.1.mlp"]
    by_method = ("--method", method) if method else ("--time-limit", 0.5)
    optpipe("compile", "--mem", "1GB", "--microbatches", 4, *by_method)
    optpipe("verify", "schedule.json", "--profile", "profile.json")
    assert "forward" in optpipe("show", "schedule.json")
    answer = json.loads(optpipe("run", "schedule.json", "--check", "--steps", 2, "--json").splitlines()[-1])
    assert answer["check"]["ok"], answer["check"]
    for rank in answer["ranks"]:
        assert rank["peak_activation_bytes"] <= rank["promised_activation_bytes"]


def test_auto_takes_halves_where_a_device_has_few_blocks():
    for layers, wanted in ((4 * FEW_BLOCKS, "half"), (4 * FEW_BLOCKS + 1, "block")):
        assert cut(replace(LLAMA, layers=layers), {"granularity": "auto"}, lambda: 4).granularity == wanted
    assert cut(LLAMA, {}, lambda: 4).granularity == "block"


@pytest.mark.parametrize(("devices", "name"), [(7, "block"), (8, "block.0.attention")])
def test_auto_counts_the_devices_of_an_estimate(optpipe, devices, name):  # noqa: F811
    optpipe("profile", "--model", "llama-7b", "--gpu", "a100-80gb", "--devices", devices, "--granularity", "auto")
    assert names()[1] == name


def test_a_sweep_plans_with_halves(optpipe):  # noqa: F811
    sweep = ("sweep", "--model", "llama.json", "--gpu", "a100-80gb", "--seq", 64, "--mem", "4GB", "--devices", 7)
    optpipe(*sweep, "--microbatches", 7, "--time-limit", 1, "--granularity", "half")
    found = json.loads(Path("sweep.json").read_text())
    assert found["options"]["granularity"] == "half"
    assert found["points"][0]["devices"] == 7  # five layers of whole blocks would not do


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--granularity", "half"), "--granularity is half, which needs --model"),
        (
            ("--model", "tests.user_layers:layers", "--granularity", "half"),
            "--granularity is half, which tests.user_layers:layers itself says; expected none "
            "(for parts see runtime_torch.vocabulary)",
        ),
    ],
)
def test_halves_of_what_has_no_known_blocks_are_refused(optpipe, run, arguments, sentence):  # noqa: F811
    assert refused(run("profile", *arguments), 2) == sentence


def test_torchtitan_has_whole_blocks(optpipe, run):  # noqa: F811
    optpipe("profile", "--model", "llama.json", "--gpu", "a100-80gb", "--devices", 2, "--granularity", "half")
    optpipe("compile", "--method", "1f1b", "--microbatches", 4, "--mem", "40GB")
    outcome = run("export", "schedule.json", "--to", "torchtitan", "--profile", "profile.json", "-o", "out.py")
    assert refused(outcome, 2) == "the profile has a layer block.0.attention: torchtitan has blocks whole"
