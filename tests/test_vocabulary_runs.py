"""Head and embedding in parts in a pipeline: library, ties, and from `profile` to `run --check`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import test_runtime_library as case  # noqa: E402
from test_runtime_library import alone, start_ranks  # noqa: E402, F401 - a fixture
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import runtime_torch  # noqa: E402
from optpipe_compiler.documents import ir  # noqa: E402
from optpipe_compiler.documents import profile as profiles  # noqa: E402
from optpipe_compiler.errors import BadInput  # noqa: E402
from optpipe_torch.models import vocabulary  # noqa: E402
from tests.test_cli import optpipe, refused, run  # noqa: E402, F401 - fixtures

HIDDEN, SIZE, LENGTH = 8, 17, 5
TIES = [("0.weight", "2.weight"), ("1.weight", "3.weight")]


def makers():
    """Two parts of an embedding, two of a head."""
    parts = [*vocabulary.embedding_parts(HIDDEN, SIZE, 2), *vocabulary.head_parts(HIDDEN, SIZE, 2)]
    return [partial(case.seeded, index, make) for index, make in enumerate(parts)]


def draw(samples=2 * case.MICROBATCHES):
    """A batch of tokens and targets."""
    return torch.randint(SIZE, (2, samples, LENGTH), generator=torch.Generator().manual_seed(0))


def reference(tied=False, samples=2 * case.MICROBATCHES):
    """Loss and gradients by name of the whole model."""
    layers = [make() for make in makers()]
    if tied:
        layers[2].weight, layers[3].weight = layers[0].weight, layers[1].weight
    embedding, head = vocabulary.whole(layers)
    tokens, target = draw(samples)
    loss = head(embedding(tokens), target=target)
    loss.backward()
    named = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)}).named_parameters(remove_duplicate=False)
    return loss.item(), {name: parameter.grad for name, parameter in named}


def assert_gradients(module, wanted):
    for name, parameter in module.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)


def microbatch():
    tokens, target = draw()
    return {"inputs": [tokens[:2]], "target": target[:2]}


@pytest.mark.parametrize("ranges", case.RANGES.values(), ids=case.RANGES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("ties", [(), TIES], ids=["untied", "tied"])
def test_parts_train_as_the_whole_head_and_embedding(alone, ranges, fused, ties):  # noqa: F811
    schedule = case.plan((0, 0), fused=fused, ranges=ranges)
    stages = runtime_torch.build_stages(schedule, makers(), 0, "cpu", **microbatch(), ties=ties)
    runner = runtime_torch.Runner(schedule, stages)
    tokens, target = draw()
    wanted_loss, wanted = reference(tied=bool(ties))
    assert runner.eval(tokens, target=target) == pytest.approx(wanted_loss)
    assert runner.step(tokens, target=target).loss == pytest.approx(wanted_loss)
    assert_gradients(stages.module, wanted)


@pytest.mark.parametrize("prepare", [DistributedDataParallel, fully_shard], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_parts_are_replicated_as_other_layers_are(alone, prepare, fused):  # noqa: F811
    schedule = case.plan((0, 0), fused=fused)
    mesh = init_device_mesh("cpu", (1,))
    wrapped = prepare if prepare is DistributedDataParallel else partial(prepare, mesh=mesh)
    stages = runtime_torch.build_stages(schedule, makers(), 0, "cpu", **microbatch(), prepare=wrapped)
    tokens, target = draw()
    loss, wanted = reference()
    assert runtime_torch.Runner(schedule, stages).step(tokens, target=target).loss == pytest.approx(loss)
    for name, parameter in stages.module.named_parameters():
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(found, wanted[name.replace("module.", "")], msg=name)


def test_a_batch_may_be_smaller_than_announced(alone):  # noqa: F811
    schedule = case.plan((0, 0))
    stages = runtime_torch.build_stages(schedule, makers(), 0, "cpu", **microbatch())
    tokens, target = draw(2)
    result = runtime_torch.Runner(schedule, stages).step(tokens, target=target)
    loss, wanted = reference(samples=2)
    assert result.loss == pytest.approx(loss)
    assert_gradients(stages.module, wanted)


def test_a_target_that_no_layer_gets_is_missed_by_name(alone):  # noqa: F811
    schedule = case.plan((0, 0))
    stages = runtime_torch.build_stages(schedule, makers(), 0, "cpu", **microbatch())
    with pytest.raises(BadInput, match=r"step\(\) needs a target on the rank of the last stage"):
        runtime_torch.Runner(schedule, stages).step(draw()[0])
    with pytest.raises(BadInput, match=r"layer 2: cannot be called with what layer 1 returns .*'target'"):
        runtime_torch.build_stages(schedule, makers(), 0, "cpu", inputs=[draw()[0][:2]])


RANK = """
import sys
sys.path[:0] = sys.argv[2:]
import torch, torch.distributed as dist
import runtime_torch, test_vocabulary_runs as case

dist.init_process_group("gloo")
torch.set_num_threads(1)
schedule, rank = runtime_torch.load_schedule(sys.argv[1]), dist.get_rank()
stages = runtime_torch.build_stages(schedule, case.makers(), rank, "cpu", **case.microbatch(), ties=case.TIES)
runner = runtime_torch.Runner(schedule, stages)
tokens, target = case.draw()
loss, wanted = case.reference(tied=True)
result = runner.step(*([tokens] if rank == 0 else []), target=target)
assert result.loss is None or abs(result.loss - loss) < 1e-5
case.assert_gradients(stages.module, wanted)
local = {name for name, other in case.TIES if name[0] in stages.module and other[0] in stages.module}
assert len(list(stages.module.parameters())) == len(stages.module) - len(local)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.runtime
@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 1)], ids=["part by part", "embedding and head apart"])
def test_tied_parts_are_shared_where_they_meet_and_summed_where_not(tmp_path, placement):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(case.plan(placement, fused=False)))
    for rank in start_ranks(RANK, str(path)):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


MISSING = """
import sys
sys.path[:0] = sys.argv[2:]
import torch, torch.distributed as dist
import runtime_torch, test_vocabulary_runs as case

dist.init_process_group("gloo")
schedule, rank = runtime_torch.load_schedule(sys.argv[1]), dist.get_rank()
stages = runtime_torch.build_stages(schedule, case.makers(), rank, "cpu", **case.microbatch())
runtime_torch.Runner(schedule, stages).step(case.draw()[0], target=case.draw()[1] if rank else None)
"""


@pytest.mark.runtime
def test_a_rank_with_a_part_of_the_head_needs_the_target(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(case.plan((0, 1, 0, 1))))
    first, second = start_ranks(MISSING, str(path))
    _, errors = first.communicate(timeout=60)
    second.kill()
    second.communicate()
    assert "BadInput: step() needs a target on each rank with a layer that asks for it" in errors


# -- commands


def parts_of(name):
    """The names of the profile's layers that begin so."""
    return [one.name for one in profiles.load(Path("profile.json")).expanded_layers() if one.name.startswith(name)]


@pytest.mark.runtime
@pytest.mark.parametrize(
    ("model", "dtype", "parts", "method"),
    [
        ("gpt2", "fp32", ("--head-parts", "auto", "--embedding-parts", "2"), "zbv"),
        ("llama", "bf16", ("--head-parts", "4"), "interleaved-1f1b"),
        ("llama", "fp32", ("--head-parts", "3", "--embedding-parts", "3"), None),
        ("gpt2", "fp32", ("--head-parts", "4"), "1f1b"),
    ],
)
def test_a_model_in_parts_is_measured_planned_checked_and_trained(optpipe, model, dtype, parts, method):  # noqa: F811
    sizes = ("--devices", 2, "--device", "cpu", "--seq", 16, "--microbatch-size", 2, "--samples", 4)
    optpipe("profile", "--model", f"{model}.json", *sizes, "--dtype", dtype, *parts)
    count = 2 if parts[1] == "auto" else int(parts[1])
    assert parts_of("head") == [f"head.{part}" for part in range(count)]
    by_method = ("--method", method) if method else ("--time-limit", 0.5)
    optpipe("compile", "--mem", "1GB", "--microbatches", 4, *by_method)
    optpipe("verify", "schedule.json", "--profile", "profile.json")
    assert "forward" in optpipe("show", "schedule.json")
    answer = json.loads(optpipe("run", "schedule.json", "--check", "--steps", 2, "--json").splitlines()[-1])
    assert answer["check"]["ok"], answer["check"]
    for rank in answer["ranks"]:
        assert rank["peak_activation_bytes"] <= rank["promised_activation_bytes"]


def test_a_plan_counts_what_parts_of_one_stage_pass_on_once(optpipe, run):  # noqa: F811
    model = ("profile", "--model", "llama.json", "--gpu", "a100-80gb", "--devices", 2, "--seq", 64)
    optpipe(*model, "--head-parts", 4, "--embedding-parts", 2)
    optpipe("compile", "--method", "1f1b", "--microbatches", 4, "--mem", "40GB")
    layers = profiles.load(Path("profile.json")).expanded_layers()
    shared = [profiles.value_of(layer.shared_bytes) for layer in layers[-4:]]
    assert shared == [0, *[64 * (16 * 2 + 2 * 4)] * 3]  # hidden states in bf16, and the state of the softmax
    planned = json.loads(Path("schedule.json").read_text())["stages"][-1]
    first, end = planned["layers"]
    assert len(layers) - 1 > first
    assert end == len(layers)
    mine = layers[first:]
    expected = [profiles.value_of(layer.saved_bytes) for layer in mine]
    for n in range(1, len(mine)):
        if mine[n].chain is not None and mine[n].chain == mine[n - 1].chain:
            expected[n] -= profiles.value_of(mine[n].shared_bytes)
    assert planned["saved_bytes"] == expected
    assert sum(expected) < sum(profiles.value_of(layer.saved_bytes) for layer in mine)
    optpipe("verify", "schedule.json", "--profile", "profile.json")
    plain = json.loads(Path("profile.json").read_text())
    assert [layer.pop("chain", None) for layer in plain["layers"]].count("head")
    Path("profile.json").write_text(json.dumps(plain))
    outcome = run("verify", "schedule.json", "--profile", "profile.json")
    assert outcome.code == 1
    assert "saved_bytes of stage 1 is" in outcome.out + outcome.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--head-parts", "2"), "--head-parts is 2, which needs --model"),
        (
            ("--model", "gpt2.json", "--head-parts", "400"),
            "--head-parts is 400, expected at most the vocabulary (301)",
        ),
        (
            ("--model", "tests.user_layers:layers", "--embedding-parts", "2"),
            "--embedding-parts is 2, which tests.user_layers:layers itself says; expected none "
            "(for parts see runtime_torch.vocabulary)",
        ),
        (
            ("--model", "llama.json", "--gpu", "a100-80gb", "--tp", "2", "--head-parts", "200"),
            "--head-parts is 200, expected 1 to the vocabulary (149)",
        ),
    ],
)
def test_parts_that_cannot_be_are_refused(optpipe, run, arguments, sentence):  # noqa: F811
    assert refused(run("profile", *arguments), 2) == sentence


def test_what_is_no_number_of_parts_is_refused(optpipe, run):  # noqa: F811
    outcome = run("profile", "--model", "gpt2.json", "--head-parts", "many")
    assert outcome.code == 2
    assert "Invalid value for '--head-parts': 'many' is not a valid integer" in outcome.err


def test_an_estimate_has_a_part_for_each_device(optpipe):  # noqa: F811
    optpipe("profile", "--model", "llama-7b", "--gpu", "a100-80gb", "--devices", 4, "--head-parts", "auto")
    assert parts_of("") == ["embedding", *["block"] * 32, *(f"head.{part}" for part in range(4))]


def test_a_report_names_parts_and_halves(optpipe):  # noqa: F811
    model = ("profile", "--model", "llama.json", "--gpu", "a100-80gb", "--devices", 2, "--head-parts", "2")
    optpipe(*model, "--granularity", "half")
    optpipe("compile", "--method", "1f1b", "--microbatches", 4, "--mem", "40GB")
    optpipe("report", "schedule.json", "--profile", "profile.json")
    page = Path("report.html").read_text()
    assert '"names":["embedding","block.0.attention","block.0.mlp"' in page
    assert '"head.0","head.1"]' in page


def test_a_csv_for_torch_says_that_parts_need_the_target(optpipe, run):  # noqa: F811
    for parts, said in ((2, True), (1, False)):
        model = ("profile", "--model", "llama.json", "--gpu", "a100-80gb", "--devices", 2, "--head-parts", parts)
        optpipe(*model)
        optpipe("compile", "--method", "1f1b", "--microbatches", 4, "--mem", "40GB")
        outcome = run("export", "schedule.json", "--to", "torch-csv", "--profile", "profile.json")
        assert outcome.code == 0
        assert ("the head is in parts, each of which needs the target" in outcome.err) is said


def test_torchtitan_has_no_parts(optpipe, run):  # noqa: F811
    optpipe("profile", "--model", "llama.json", "--gpu", "a100-80gb", "--devices", 2, "--head-parts", "2")
    optpipe("compile", "--method", "1f1b", "--microbatches", 4, "--mem", "40GB")
    outcome = run("export", "schedule.json", "--to", "torchtitan", "--profile", "profile.json", "-o", "out.py")
    assert refused(outcome, 2) == "the profile has a layer head.0: torchtitan has the embedding and the head whole"
