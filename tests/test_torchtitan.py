"""torchtitan's trainer, as titan.py makes its calls, around our replay: equal losses and gradients."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("torch")
import titan
import torch
from small_schedules import Builder, Shape
from test_examples import EXAMPLES, changed, environment, run  # noqa: F401
from test_runtime_library import start_ranks
from torch import nn

from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Profile
from optpipe_compiler.errors import BadInput
from optpipe_compiler.export.ends import ends
from optpipe_torch.frameworks.torchtitan import layers_of, parts_of, planned
from optpipe_torch.profiler.layers import Bench, layer_bytes
from runtime_torch.execution import StageExecution
from tests.instances import uniform
from tests.interpreter import python

MICROBATCHES = 4
RANGES = {
    (0, 1): lambda stage, _: [("offload", 3 * stage, 3 * stage + 2)],
    (0, 1, 0): lambda stage, _: [("recompute", 2 * stage, 2 * stage + 1), ("offload", 2 * stage + 1, 2 * stage + 2)],
}


def plan(placement, *, fused=False, layers=6):
    layer = Layer(
        name="layer",
        forward_ns=10**6,
        backward_input_ns=10**6,
        backward_weight_ns=10**6,
        saved_bytes=10**6,
        output_bytes=64 * titan.DIM * 4,
    )
    links = [Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)]
    machine = Machine(devices=2, p2p=[P2P(latency_ns=1000)], links=links)
    shape = Shape(
        placement,
        layers_per_stage=layers // len(placement),
        microbatches=MICROBATCHES,
        fused=lambda *_: fused,
        ranges=RANGES[placement] if layers == 6 else lambda *_: [],
    )
    return Builder(shape, Profile(name="hand", machine=machine, layers=[layer] * layers), Random(0)).build()


def recipe(**training):
    config = titan.llama3_debugmodel()
    vars(config.training).update(training)
    return config


def hold(schedule, replicas=1, dtype="float32", tolerance=1e-4):
    """Two steps and a validation of a pipeline against those of one device with all replicas' batches."""
    config = planned(recipe(mixed_precision_param=dtype, num_tokens_per_train_step=256 * replicas), schedule)
    config.data_parallel = replicas
    trainer, alone = titan.Trainer(config), titan.Trainer(recipe())
    drawn = alone.batch

    def everything(step):
        for replica in range(replicas):
            alone.dims.rank = lambda _, replica=replica: replica
            yield from drawn(step)

    alone.batch = everything
    for step in range(2):
        loss, wanted = trainer.train_step(step), alone.train_step(step)
        if loss is not None and replicas == 1:
            assert abs(loss - wanted) < tolerance, (step, loss, wanted)
        if step == 0:  # of equal weights
            expected = alone.gradients()
            found = trainer.gradients()
            assert found
            for name, gradient in found.items():
                difference = (gradient - expected[name]).abs().max() / expected[name].abs().max()
                assert difference < tolerance, (name, difference)
    value, wanted = trainer.validate(5), alone.validate(5)
    if value is not None and replicas == 1:
        assert abs(value - wanted) < 300 * tolerance
    return {name for part in trainer.parts for name in part.state_dict()}


START = """
import sys
sys.path[:0] = sys.argv[1:]
import torch, torch.distributed as dist
import titan, test_torchtitan as case
dist.init_process_group("gloo")
torch.set_num_threads(1)
"""

PIPELINES = (
    START
    + """
for placement in case.RANGES:
    for fused in (False, True):
        names = case.hold(case.plan(placement, fused=fused))
        everything = [None, None]
        dist.all_gather_object(everything, names)
        assert not everything[0] & everything[1]
        with torch.device("meta"):
            assert everything[0] | everything[1] == set(titan.ModelConfig().build().state_dict())
dist.destroy_process_group()
"""
)

REPLICAS = (
    START
    + """
case.hold(case.plan((0, 1)), 2)
case.hold(case.plan((0, 1, 0)), 2, "bfloat16", 0.1)
dist.destroy_process_group()
"""
)


@pytest.mark.runtime
@pytest.mark.parametrize(("script", "world"), [(PIPELINES, 2), (REPLICAS, 4)], ids=["pipeline", "sharded replicas"])
def test_the_trainer_has_losses_gradients_and_names_of_the_whole_model(script, world):
    for rank in start_ranks(script, world=world):
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors


@pytest.mark.runtime
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs torchtitan")
@pytest.mark.parametrize(("world", "backend"), [(2, "spmd_types"), (4, "partial_dtensor")])
def test_torchtitans_own_model_has_the_gradients_of_the_whole_one(world, backend):
    here = Path(__file__).parent
    command = f"-m torch.distributed.run --standalone --nproc-per-node {world} {here / 'titan_itself.py'} {backend}"
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [python(), *command.split()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def with_torchtitan(environment, tmp_path):  # noqa: F811
    """An environment with a package of torchtitan's name that is titan.py."""
    package = tmp_path / "stand_in" / "torchtitan"
    (package / "models" / "llama3").mkdir(parents=True)
    (package / "models" / "llama3" / "config_registry.py").write_text("from titan import llama3_debugmodel\n")
    (package / "trainer.py").write_text("from titan import Trainer\n")
    (package / "train.py").write_text("from titan import main\nmain()\n")
    paths = [str(tmp_path / "stand_in"), str(Path(titan.__file__).parent), environment["PYTHONPATH"]]
    return environment | {"PYTHONPATH": ":".join(paths)}


def losses(text):
    return [line for line in text.splitlines() if line.startswith("step")]


@pytest.mark.runtime
def test_the_example_has_the_losses_of_one_device(with_torchtitan, tmp_path):
    printed = run("torchtitan_planned.sh", with_torchtitan, tmp_path)
    plain = subprocess.run(
        [python(), "-m", "torchtitan.train", "--module", "torchtitan_plain", "--config", "plain"],
        cwd=EXAMPLES,
        env=with_torchtitan,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert len(losses(plain)) == 3
    assert losses(printed) == losses(plain)


def test_the_example_takes_at_most_ten_lines_commands_included():
    script = (EXAMPLES / "torchtitan_planned.sh").read_text().splitlines()
    commands = [line for line in script if line.startswith(("optpipe", "torchrun"))]
    assert len(commands) == 3
    assert len(changed("torchtitan_plain.py", "torchtitan_planned.py")) + len(commands) <= 10


def test_layers_to_measure_keep_their_buffers_in_the_models_dtype():
    layers, batch = layers_of(titan.llama3_debugmodel())
    tokens, target = batch(torch.Generator().manual_seed(0), 64)
    x = tokens
    for index, make in enumerate(layers):
        layer = make().to(torch.bfloat16)
        assert {buffer.dtype for buffer in layer.buffers()} <= {torch.float32}
        x = layer(x, target) if index == len(layers) - 1 else layer(x)
    assert x.shape == ()
    assert repr(layers[1]()) == repr(layers[2]())


def test_a_profile_of_tokens_is_not_for_frameworks_whose_samples_are_sequences():
    layers, _ = layers_of(titan.llama3_debugmodel())
    names = {type(layer()).__name__ for layer in layers}
    assert len(names) == 2
    for name in names:
        costs = uniform(2, 3)
        costs = msgspec.structs.replace(
            costs, layers=[msgspec.structs.replace(one, name=f"{name}-2") for one in costs.layers]
        )
        for tool in ("torchtitan", "Megatron"):
            with pytest.raises(BadInput, match=f"a layer {name}-2, .* tokens, those of {tool} are sequences; expected"):
                ends(plan((0, 1)), costs, tool)


@pytest.mark.parametrize(("placement", "name"), [((0, 1), "1F1B"), ((0, 1, 0), "ZBVZeroBubble")])
def test_the_rank_with_the_last_stage_logs_the_loss(placement, name):
    config = planned(titan.llama3_debugmodel(), plan(placement))
    assert config.parallelism.pipeline_parallel_schedule == name


def test_the_loss_is_compiled_for_a_profile_if_it_is_in_training(monkeypatch):
    config, made = titan.llama3_debugmodel(), []
    monkeypatch.setattr(config.loss, "build", lambda **how: made.append(titan.Chunked(**how)) or made[-1])
    layers_of(config)
    assert made[0].compile_config is config.compile


def test_masks_are_made_once_for_a_layer_that_is_measured(monkeypatch):
    made = []
    monkeypatch.setattr(titan.Decoder, "get_attention_masks", lambda _, positions: made.append(positions))
    layers, _ = layers_of(titan.llama3_debugmodel())
    block = layers[1]()
    for _ in range(3):
        block(torch.zeros(64, titan.DIM))
    assert len(made) == 1


@pytest.mark.parametrize(
    ("dtype", "shares", "wanted"), [("float32", -1, 20), ("bfloat16", -1, 18), ("bfloat16", 4, 2 + 4 + 4)]
)
def test_a_profile_counts_what_fsdp_keeps_of_weights_whatever_dtype_is_measured(dtype, shares, wanted):
    config = recipe(mixed_precision_param=dtype)
    config.parallelism.data_parallel_shard_degree = shares
    block = layers_of(config)[0][1]().to(torch.bfloat16)
    stage = StageExecution([block], 1, is_first=False, is_last=False, device="cpu")
    x = torch.zeros(64, titan.DIM, dtype=torch.bfloat16)
    benches = SimpleNamespace(stage=lambda *_: Bench(stage, x, None, torch.ones_like(x)))
    buffers = sum(buffer.nbytes for buffer in block.buffers())
    assert layer_bytes(benches, 1).static == buffers + wanted * sum(p.numel() for p in block.parameters())


# -- refusals


def test_a_recipe_of_the_release_0_3_is_refused():
    config = titan.llama3_debugmodel()
    del config.parallelism.num_pp_microbatches
    with pytest.raises(BadInput, match=r"release 0\.3\.0 is older"):
        layers_of(config)
    with pytest.raises(BadInput, match=r"release 0\.3\.0 is older"):
        planned(config, plan((0, 1)))


def built(schedule, *, dims=None, **changes):
    """Call the `pipelining_fn` as the trainer does, with other values of a recipe by section and name."""
    config = planned(titan.llama3_debugmodel(), schedule)
    for name, value in changes.items():
        section, _, key = name.partition("__")
        setattr(getattr(config, section) if key else config, key or section, value)
    off = {"pp": 2, "tp_enabled": False, "cp_enabled": False, "ep_enabled": False}
    with torch.device("meta"):
        model = titan.ModelConfig().build()
    return config.model_spec.pipelining_fn(
        model,
        parallel_dims=SimpleNamespace(**(off | (dims or {}))),
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=config.model_spec.model,
        parallelize_fn=titan.parallelize,
        loss_fn=titan.Chunked(),
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"parallelism__num_pp_microbatches": 3}, r"num_pp_microbatches is 3, expected 4 as the schedule has"),
        ({"activation_checkpoint": "full"}, r"activation_checkpoint is set, expected None: "),
        ({"compile__enable": True, "compile__components": ["model"]}, r"compile.components has 'model', expected none"),
        ({"training__enable_cpu_offload": True}, r"training.enable_cpu_offload is on, expected off"),
    ],
)
def test_recipes_that_ask_for_what_the_replay_does_not_do_are_refused(changes, what):
    with pytest.raises(BadInput, match=f"^torchtitan: .*{what}"):
        built(plan((0, 1)), **changes)


@pytest.mark.parametrize(("name", "kind"), [("tp", "tensor"), ("cp", "context"), ("ep", "expert")])
def test_other_parallelism_is_refused(name, kind):
    with pytest.raises(BadInput, match=f"^torchtitan: parallelism.{kind}_parallel_degree is above 1, expected 1"):
        built(plan((0, 1)), dims={f"{name}_enabled": True})


def test_models_that_are_no_dense_decoder_are_refused():
    decoder = titan.Decoder(titan.ModelConfig())
    decoder.layers["1"].moe = nn.Linear(1, 1)
    with pytest.raises(BadInput, match=r"^torchtitan: block 1 is a mixture of experts, expected dense blocks: "):
        parts_of(decoder)
    decoder = titan.Decoder(titan.ModelConfig())
    decoder.vision_encoder = nn.Linear(1, 1)
    with pytest.raises(BadInput, match=r"^torchtitan: the model has the parts .*'vision_encoder'], expected "):
        parts_of(decoder)
    decoder = titan.Decoder(titan.ModelConfig())
    decoder.enable_weight_tying = True
    with pytest.raises(BadInput, match=r"^torchtitan: the model ties embedding and head, expected "):
        parts_of(decoder)


def test_a_schedule_of_another_depth_is_refused():
    with pytest.raises(BadInput, match=r"^torchtitan: the model has 6 layers \(.*\), expected 4 as the schedule has: "):
        built(plan((0, 1), layers=4))
