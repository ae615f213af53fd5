"""Models of transformers as layers: equal losses and gradients, their names, and folders that it reads again."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import torch.distributed as dist
import transformers
from small_schedules import Builder, Shape
from torch import nn

import runtime_torch
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Model, Profile
from optpipe_compiler.errors import BadInput
from optpipe_torch.frameworks.transformers import layers_of, own_names, pipelined, save_pretrained, state_dict
from optpipe_torch.models import known
from tests.interpreter import python
from tests.processes import started

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
KINDS = {
    "llama": GROUPED,
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "qwen3": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 4},
    "gemma2": {**GROUPED, "sliding_window": 4},
    "gemma3_text": {**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "bloom": {"hidden_dropout": 0.0},
    "phi3": {**GROUPED, "sliding_window": 4},
    "olmo2": GROUPED,
    "cohere": GROUPED,
    "granite": {**GROUPED, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen3_moe": {**GROUPED, **EXPERTS, "num_experts": 4},
    "deepseek_v3": {**LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8},
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "sliding_window": 4},
}


def make(kind: str = "llama", attention: str | None = None, **changes: object) -> nn.Module:
    """A tiny model with random weights, the same in every process."""
    sizes = SIZES | KINDS[kind] | changes
    if "layer_types" in sizes:
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    config = transformers.AutoConfig.for_model(kind, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def tokens(samples: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 300, (samples, length), generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def through(layers: list[nn.Module], *inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    for layer in layers[:-1]:
        found = layer(*inputs)
        inputs = found if isinstance(found, tuple) else (found,)
    return layers[-1](*inputs, target)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_have_the_models_own_loss_gradients_and_names(kind):
    model = make(kind)
    wanted = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    wanted.backward()
    expected = gradients(model)
    layers = layers_of(model)
    assert len(layers) == model.config.num_hidden_layers + 2
    loss = through(layers, tokens(), target=tokens())
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    found = gradients(model)
    assert set(found) == set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)
    stages = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})
    assert set(own_names(stages.state_dict())) == set(model.state_dict())


@pytest.mark.parametrize(
    ("kind", "attention"),
    [(kind, way) for kind in ("llama", "gemma3_text", "gpt2") for way in ("sdpa", "eager")] + [("bloom", "eager")],
)
def test_masks_and_positions_are_passed_along(kind, attention):
    names = ["attention_mask"] if kind == "bloom" else ["attention_mask", "position_ids"]
    model = make(kind, attention)
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, :3] = 0
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    given = {name: given[name] for name in names}
    wanted = model(input_ids=tokens(), labels=tokens(), use_cache=False, **given).loss
    loss = through(layers_of(model, ["input_ids", *names]), tokens(), *given.values(), target=tokens())
    torch.testing.assert_close(loss, wanted)
    assert not torch.allclose(loss, through(layers_of(model), tokens(), target=tokens()))


def test_packed_sequences_do_not_see_each_other():
    model, positions = make(), torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(2, 7)
    wanted = model(input_ids=tokens(), labels=tokens(), position_ids=positions, use_cache=False).loss
    loss = through(layers_of(model, ["input_ids", "position_ids"]), tokens(), positions, target=tokens())
    torch.testing.assert_close(loss, wanted)
    assert not torch.allclose(loss, through(layers_of(model), tokens(), target=tokens()))


def test_targets_may_be_shifted_already():
    model, batch = make(), tokens(length=8)
    loss = through(layers_of(model, shifted=True), batch[:, :-1], target=batch[:, 1:])
    logits = model(input_ids=batch[:, :-1]).logits
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))


def test_a_forward_that_leaves_its_layer_out_is_no_forward_on_zeros():
    layer = layers_of(make("opt"))[1].train()
    layer.whole.model.decoder.layerdrop = 1.0
    with pytest.raises(RuntimeError, match="did not call the part that this layer has"):
        layer(torch.ones(2, 7, 32))


def test_the_model_itself_works_as_before():
    model = make()
    before = model(input_ids=tokens(), labels=tokens()).loss
    layers_of(model)
    assert torch.equal(model(input_ids=tokens(), labels=tokens()).loss, before)


def test_the_frequencies_of_rotary_positions_keep_their_precision():
    layer = layers_of(make())[1].to(torch.bfloat16)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in layer.buffers()} == {torch.float32}


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (lambda: nn.Linear(2, 2), ["input_ids"], "got Linear, expected a causal language model of transformers"),
        (make, ["tokens"], r"inputs are \['tokens'\], expected 'input_ids' and any of attention_mask, position_ids"),
        (partial(make, "mixtral", output_router_logits=True), ["input_ids"], "output_router_logits"),
        (partial(make, "opt", layerdrop=0.5), ["input_ids"], "OPTForCausalLM is configured with layerdrop 0.5"),
        (
            lambda: transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, is_decoder=True)),
            ["input_ids"],
            "BertLMHeadModel has its layers in bert.encoder, which is not called with input_ids",
        ),
        (
            lambda: transformers.CTRLLMHeadModel(transformers.CTRLConfig(n_embd=32, n_layer=2, n_head=2, dff=48)),
            ["input_ids"],
            "CTRLLMHeadModel cannot be cut into layers: ",
        ),
    ],
    ids=["other", "inputs", "routers", "layerdrop", "bert", "in-place"],
)
def test_what_cannot_be_cut_is_refused_in_a_sentence(model, inputs, message):
    with pytest.raises(BadInput, match=message):
        layers_of(model(), inputs)


# -- for the commands


def for_commands(kind: str = "gemma3_text", folder: str | None = None, **changes: object) -> nn.Module:
    """What `--model tests.test_transformers:for_commands` calls."""
    if folder is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    return make(kind, **changes)


COMMAND = partial(Model, builder="tests.test_transformers:for_commands", microbatch_size=2, sequence_length=7, seed=0)


def test_a_function_for_the_commands_may_return_the_model():
    model = COMMAND(config={"tie_word_embeddings": True})
    names = known.layer_names(model)
    assert names == ["Embedding", *["DecoderLayer", "DecoderLayer-2"] * 2, "Head"]  # sliding and full attention
    assert known.bundles(model)[1].boundary == ((2, 7, 32), torch.float32)
    assert known.ties(model) == [("0.whole.model.embed_tokens.weight", "5.whole.lm_head.weight")]


def test_a_function_for_the_commands_may_load_weights(tmp_path):
    make().save_pretrained(tmp_path)
    model = COMMAND(config={"folder": str(tmp_path)})
    assert known.parameter_bytes(model) == known.parameter_bytes(COMMAND(config={"kind": "llama"}))
    assert known.layer_names(model) == ["Embedding", *["DecoderLayer"] * 3, "Head"]


def with_masks(*, named: bool) -> object:
    """A model, and batches as tokenizers give them (or without names), behind which come labels."""

    def batch(generator: torch.Generator, samples: int) -> object:
        drawn = torch.randint(300, (samples, 7), generator=generator)
        mask = torch.ones_like(drawn)
        mask[:, 5:] = 0
        inputs = {"input_ids": drawn, "attention_mask": mask}
        return inputs if named else tuple(inputs.values()), drawn.masked_fill(mask == 0, -100)

    return make("llama"), batch


MASKED = partial(COMMAND, builder="tests.test_transformers:with_masks", dtype="fp32")


def test_a_function_for_the_commands_may_return_batches_as_tokenizers_give_them():
    model = MASKED(config={"named": True})
    assert known.bundles(model)[1].parts == (((2, 7, 32), torch.float32), ((2, 7), torch.int64))
    (drawn, mask), labels = known.batches(model, b"")(torch.Generator().manual_seed(0), 1)
    wanted = make("llama")(input_ids=drawn, attention_mask=mask, labels=labels, use_cache=False).loss
    layers = layers_of(make("llama"), ["input_ids", "attention_mask"])
    torch.testing.assert_close(through(layers, drawn, mask, target=labels), wanted)


def test_inputs_for_a_model_of_transformers_that_have_no_names_are_refused():
    with pytest.raises(BadInput, match="returned 2 inputs for a model of transformers, expected their names, too"):
        known.layer_count(MASKED(config={"named": False}))


@pytest.mark.parametrize("kind", ["mixtral", "gpt2"], ids=["kernels for bf16 alone", "a look for padding"])
def test_models_that_the_meta_device_cannot_run_are_run_on_data(kind):
    model = COMMAND(config={"kind": kind}, dtype="fp32")
    assert known.layer_names(model) == ["Embedding", *["DecoderLayer"] * 3, "Head"]
    assert len(known.parameter_bytes(model)) == 5


def test_a_function_that_returns_another_model_is_refused():
    model = COMMAND(config={"kind": "mixtral", "output_router_logits": True})
    with pytest.raises(BadInput, match=r"builder .*:for_commands': returned a model that cannot be cut: Mixtral"):
        known.layer_count(model)


# -- trained in a pipeline


def plan(placement: tuple[int, ...], layers: int = 6) -> ir.Schedule:
    """A legal schedule that offloads, recomputes and splits, for layers of any sizes."""
    each = layers // len(placement)
    layer = Layer(
        name="layer",
        forward_ns=10**6,
        backward_input_ns=10**6,
        backward_weight_ns=10**6,
        saved_bytes=10**6,
        output_bytes=512,
    )
    links = [Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)]
    machine = Machine(devices=1 + max(placement), p2p=[P2P(latency_ns=1000)], links=links)
    kinds = ("offload", "recompute")
    shape = Shape(
        placement,
        layers_per_stage=each,
        microbatches=2,
        ranges=lambda stage, microbatch: [(kinds[(stage + microbatch) % 2], each * stage, each * stage + each)],
    )
    return Builder(shape, Profile(name="hand", machine=machine, layers=[layer] * layers), Random(0)).build()


def trained_alone(steps: int) -> nn.Module:
    """Train on whole batches without a pipeline."""
    model = make("qwen2", num_hidden_layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(input_ids=tokens(4), labels=tokens(4)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(placement: tuple[int, ...], steps: int, folder: Path, start: Path | None = None) -> None:
    """What each rank does."""
    model = make("qwen2", num_hidden_layers=4)
    if start is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(start)
    schedule = plan(placement)
    example = tokens(4)[:2]
    rank = dist.get_rank()
    stages = runtime_torch.build_stages(schedule, layers_of(model), rank, "cpu", inputs=[example], target=example)
    runner = runtime_torch.Runner(schedule, stages)
    optimizer = torch.optim.SGD(stages.unique_parameters() + list(stages.ties.repeated()), lr=0.1)
    for _ in range(steps):
        runner.step(tokens(4), target=tokens(4))
        optimizer.step()
        optimizer.zero_grad()
    save_pretrained(model, stages, folder)


PROCESS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import transformers
transformers.logging.disable_progress_bar()
sys.path[:0] = [{tests!r}]
import test_transformers
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method={store!r}, rank=int(sys.argv[1]), world_size=2)
test_transformers.train({placement!r}, {steps}, Path({folder!r}), {start!r})
dist.destroy_process_group()
"""


def two_ranks(tmp_path: Path, name: str, **told: object) -> Path:
    folder = tmp_path / name
    told |= {"tests": str(Path(__file__).parent), "store": f"file://{tmp_path}/{name}-store", "folder": str(folder)}
    code = PROCESS.format(**told)
    ranks = [
        started(subprocess.Popen([python(), "-W", "ignore", "-c", code, str(rank)], stderr=subprocess.PIPE, text=True))
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return folder


@pytest.mark.runtime
def test_two_ranks_train_save_and_go_on_from_the_folder_under_another_placement(tmp_path):
    saved = two_ranks(tmp_path, "saved", placement=(0, 1, 0), steps=2, start=None)
    again = two_ranks(tmp_path, "again", placement=(1, 0), steps=1, start=str(saved))
    for folder, steps in ((saved, 2), (again, 3)):
        found = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert found.lm_head.weight is found.model.embed_tokens.weight  # tied
        for name, parameter in trained_alone(steps).named_parameters():
            torch.testing.assert_close(found.state_dict()[name], parameter, msg=name)


@pytest.fixture
def alone(tmp_path):
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_call_builds_the_pipeline_from_a_batch_as_tokenizers_give_it(alone, tmp_path):
    (tmp_path / "schedule.json").write_text(ir.to_text(plan((0, 0), layers=6)))
    batch = {"input_ids": tokens(4), "attention_mask": torch.ones(4, 7, dtype=torch.int64), "labels": tokens(4)}
    model = make(num_hidden_layers=4)
    wanted = model(input_ids=tokens(4), labels=tokens(4)).loss.item()
    runner, stages = pipelined(model, tmp_path / "schedule.json", batch, device="cpu")
    assert runner.step(batch["input_ids"], batch["attention_mask"], target=batch["labels"]).loss == pytest.approx(
        wanted
    )
    assert set(state_dict(stages)) == set(model.state_dict())
