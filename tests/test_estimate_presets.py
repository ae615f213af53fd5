"""Presets and configurations: what is known by name, and the sentence for each wrong file."""

from __future__ import annotations

import importlib.util
import json

import pytest
from click.testing import CliRunner

from optpipe_compiler.cli import cli
from optpipe_compiler.costs import gpus, models
from optpipe_compiler.documents import profile as profiles
from optpipe_compiler.errors import BadInput

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 500,
}


@pytest.fixture
def config(tmp_path):
    """Write a configuration that differs from a good one; None takes a field away."""

    def write(**changes):
        path = tmp_path / "config.json"
        found = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
        path.write_text(json.dumps(found))
        return path

    return write


def test_every_gpu_has_its_sources_and_rates_that_can_be():
    known = gpus.presets()
    assert {"a100-40gb", "a100-80gb", "a100-80gb-pcie", "h100-sxm", "h100-pcie", "h200-sxm", "b200", "mi300x"} <= set(
        known
    )
    for name, gpu in known.items():
        assert gpu.name == name
        assert all(source.startswith("https://") for source in gpu.source)
        assert gpu.matmul_flops_per_s < gpu.flops_per_s
        assert gpu.host_duplex_bytes_per_s <= gpu.host_bytes_per_s
        assert gpu.peer_bytes_per_s <= gpu.collective_bytes_per_s


def test_a_users_gpu_is_a_file_of_the_same_form(tmp_path):
    text = json.loads(gpus.PRESETS.read_text())
    text["gpus"] = [{**text["gpus"][0], "name": "mine"}]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(text))
    assert gpus.load(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_bytes": 0}, "$.gpus[0].memory_bytes is 0: expected an integer >= 1"),
        ({"memory_bytes": "80GB"}, '$.gpus[0].memory_bytes is "80GB": expected an integer'),
        ({"source": []}, "$.gpus[0].source is []: expected a list of length >= 1"),
        ({"colour": "green"}, "$.gpus[0].colour: is not a known field"),
    ],
)
def test_a_wrong_gpu_file_is_named_with_path_and_value(tmp_path, change, said):
    text = json.loads(gpus.PRESETS.read_text())
    text["gpus"] = [{**text["gpus"][0], **change}]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(text))
    with pytest.raises(BadInput) as caught:
        gpus.load(str(path))
    assert str(caught.value).startswith(f"{path}: {said}")


def test_names_that_are_not_known_list_those_that_are(tmp_path):
    with pytest.raises(BadInput, match=r"--gpu is 'h1000', expected one of a100-40gb, .*, or a JSON file of that form"):
        gpus.load("h1000")
    with pytest.raises(BadInput, match=r"--model is 'llama', expected one of gpt2, .*, or a config.json"):
        models.load("llama")
    with pytest.raises(BadInput, match=r"gpus has 9 entries, expected 1"):
        gpus.load(str(gpus.PRESETS))
    with pytest.raises(BadInput, match=r"none\.json: cannot be read: No such file"):
        models.load(str(tmp_path / "none.json"))


def parameters(model: models.Architecture) -> float:
    """Billions of weights; norms and biases left out."""
    attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    matrices = 3 if model.gated else 2
    ffn = matrices * model.hidden * model.ffn * max(1, model.experts)
    tables = 2 if model.gated else 1  # GPT-2 has one table for both ends
    return (model.layers * (attention + ffn) + tables * model.vocab * model.hidden) / 1e9


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.124),
        ("gpt2-xl", 1.56),
        ("llama-7b", 6.74),
        ("llama-13b", 13.0),
        ("llama-2-70b", 69.0),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.6),
        ("mistral-7b", 7.24),
        ("qwen2-7b", 7.6),
        ("qwen3-8b", 8.2),
        ("mixtral-8x7b", 46.7),
    ],
)
def test_the_models_that_come_with_it_are_as_large_as_they_are_known_to_be(name, billions):
    assert parameters(models.load(name)) == pytest.approx(billions, rel=0.01)
    assert name in models.presets()


def test_what_a_configuration_leaves_out_is_what_hugging_face_takes(config):
    model = models.load(str(config()))
    assert (model.kv_heads, model.head_dim, model.attention_dropout, model.positions) == (4, 16, 0.0, 0)
    assert models.load(str(config(model_type="qwen2"))).qkv_bias
    moe = config(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32)
    model = models.load(str(moe))
    assert (model.ffn, model.experts, model.experts_per_token, model.head_dim, model.qk_norm) == (32, 8, 2, 32, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "bert"}, '$.model_type is "bert", expected one of gpt2, llama, '),
        ({"model_type": None}, "$.model_type is missing, expected one of gpt2, llama, "),
        ({"model_type": ["llama"]}, '$.model_type is ["llama"], expected one of gpt2, llama, '),
        ({"hidden_size": None}, "$.hidden_size is missing, expected an integer of 1 to 10000000"),
        ({"hidden_size": 0}, "$.hidden_size is 0, expected an integer of 1 to 10000000"),
        ({"vocab_size": 3.5}, "$.vocab_size is 3.5, expected an integer of 1 to 10000000"),
        ({"num_hidden_layers": True}, "$.num_hidden_layers is true, expected an integer of 1 to 10000000"),
        ({"num_attention_heads": 5}, "$.num_attention_heads is 5, expected a divisor of hidden_size (64)"),
        ({"num_key_value_heads": 3}, "$.num_key_value_heads is 3, expected a divisor of num_attention_heads (4)"),
        ({"attention_dropout": 1}, "$.attention_dropout is 1, expected a number of at least 0 and less than 1"),
        ({"model_type": "mixtral"}, "$.num_local_experts is missing, expected an integer of 1 to 10000000"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "$.num_experts_per_tok is 3, expected at most the experts (2)",
        ),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 5}, "$.n_head is 5, expected a divisor of n_embd (64)"),
    ],
)
def test_a_wrong_configuration_is_named_with_path_and_value(config, changes, said):
    path = config(**changes)
    with pytest.raises(BadInput) as caught:
        models.load(str(path))
    assert str(caught.value).startswith(f"{path}: {said}")


@pytest.mark.parametrize(("text", "said"), [("{", "is not complete JSON"), ("[1]", "$ is [1], expected an object")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, said):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        models.load(str(path))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"tie_word_embeddings": True}, 1), ({"tie_word_embeddings": False}, 0), ({}, 0)],
)
def test_a_configuration_that_ties_its_weights_is_told_to_be_taken_without(config, changes, told):
    said: list[str] = []
    path = config(**changes)
    models.load(str(path), said.append)
    sentence = f"embedding and head of {path} share their weights (tie_word_embeddings); here each has its own"
    assert said == [sentence] * told


def test_gpt2_is_tied_unless_its_configuration_says_otherwise():
    said: list[str] = []
    models.load("gpt2", said.append)
    models.load("llama-7b", said.append)
    assert len(said) == 1


# -- the command


def run(*arguments: str):
    return CliRunner().invoke(cli, ["profile", *arguments])


def test_presets_are_listed():
    assert "h100-sxm" in run("--list-gpus").output
    assert "mixtral-8x7b" in run("--list-models").output


def test_a_profile_is_written_from_names_alone(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "profile.json"
    ended = run("--model", "gpt2", "--gpu", "h100-sxm", "--seq", "256", "--links", "pairs", "-o", str(path))
    assert ended.exit_code == 0, ended.output
    assert "embedding and head of gpt2 share their weights" in ended.stderr
    profile = profiles.load(path)
    assert profile.name == "gpt2-h100-sxm"
    assert profile.machine.devices == 8
    assert "all numbers are estimated" in ended.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "gpt2", "--tp", "2"), "--tp is 2, which needs --gpu"),
        (("--model", "gpt2", "--hidden", "64"), "--hidden is 64, which the model itself says; expected no --model"),
        (("--model", "gpt2", "--dtype", "fp16"), "--dtype is fp16, expected fp32 or bf16 where there is no --gpu"),
        (
            ("--model", "gpt2", "--gpu", "b200", "--dtype", "fp32"),
            "--dtype is fp32, expected bf16 or fp16 where there is",
        ),
        (("--model", "no.such:layers", "--layers", "3"), "--layers is 3, expected no --layers: no.such:layers says"),
        pytest.param(
            ("--model", "gpt2", "--seq", "2000"),
            "$.model.sequence_length is 2000, expected at most the positions",
            marks=needs_torch,
        ),
        (("--gpu", "h100-sxm"), "--gpu is h100-sxm, which needs --model"),
        (("--tp", "2"), "--tp is 2, which needs --model"),
        (("--profile", "q.json"), "--profile is q.json, which needs --from-run"),
        (("--model", "gpt2", "--gpu", "b200", "--profile", "q.json"), "--profile is q.json, which needs --from-run"),
        (("--model", "gpt2", "--gpu", "b200", "--layers", "3"), "--layers is 3, which only measuring takes"),
        (("--model", "gpt2", "--gpu", "b200", "-o", "/nowhere/p.json"), "/nowhere/p.json: cannot be written"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, said):
    ended = run(*arguments)
    assert isinstance(ended.exception, BadInput)
    assert str(ended.exception).startswith(said)
