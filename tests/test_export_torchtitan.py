"""The settings for torchtitan: a module that sets its options to the schedule's stages, devices and CSV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from small_schedules import Shape, build

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import Model
from optpipe_compiler.errors import BadInput
from optpipe_compiler.export.torchtitan import render, schedule_class
from optpipe_compiler.verify import check
from tests.instances import quick, uniform

ENDS = {"embedding_ms": (0.1, 0.0, 0.1), "head_ms": (0.1, 0.1, 0.1)}


def loaded(text: str, path: Any, blocks: int | None = None) -> Any:
    """The config after the module's function, and the module's names; `blocks`: the model's, if not as planned."""
    names: dict[str, Any] = {"__file__": str(path / "plan_torchtitan.py")}
    exec(compile(text, "plan_torchtitan.py", "exec"), names)
    planned = sum(name.startswith("layers.") for part in names["MODULES"] for name in part)
    model = SimpleNamespace(layers=[None] * (planned if blocks is None else blocks))
    config = SimpleNamespace(
        training=SimpleNamespace(), parallelism=SimpleNamespace(), model_spec=SimpleNamespace(model=model)
    )
    assert names["with_schedule"](config) is config
    return config, names


def placed(*devices: int, microbatches: int = 3) -> ir.Schedule:
    return build(Shape(devices, microbatches=microbatches))


def test_a_loop_sets_degree_microbatches_schedule_csv_and_modules(tmp_path):
    config, names = loaded(render(check(placed(0, 1, 0, 1)), None, "plan.csv", "plan_torchtitan"), tmp_path)
    assert vars(config.training) == {"local_batch_size": 3, "disable_cuda_graphs": True}
    assert config.activation_checkpoint is None
    assert vars(config.parallelism) == {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_schedule": "PipelineScheduleMulti",
        "pipeline_parallel_schedule_csv": str(tmp_path / "plan.csv"),
        "module_fqns_per_model_part": [
            ["tok_embeddings", "layers.0", "layers.1"],
            ["layers.2", "layers.3"],
            ["layers.4", "layers.5"],
            ["layers.6", "layers.7", "norm", "lm_head"],
        ],
    }
    assert "from plan_torchtitan import with_schedule" in names["__doc__"]
    assert "All layers are taken for blocks" in names["__doc__"]


@pytest.mark.parametrize("blocks", [3, 5])
def test_a_model_of_another_depth_is_refused_since_torchtitan_would_train_the_layers_that_are_named(tmp_path, blocks):
    costs = uniform(2, 2, **ENDS)
    text = render(check(quick(costs, 10**10, method="1f1b").schedule), costs, "plan.csv", "plan")
    with pytest.raises(ValueError, match=f"the model has {blocks} layers, the schedule is for 4"):
        loaded(text, tmp_path, blocks)


def test_a_file_name_with_quotes_stays_one_string(tmp_path):
    config, _ = loaded(render(check(placed(0, 1)), None, 'a "b".csv', "plan"), tmp_path)
    assert config.parallelism.pipeline_parallel_schedule_csv == str(tmp_path / 'a "b".csv')


def test_the_profile_names_an_embedding_and_a_head(tmp_path):
    costs = uniform(2, 2, **ENDS)
    schedule = quick(costs, 10**10, method="1f1b").schedule
    config, names = loaded(render(check(schedule), costs, "plan.csv", "plan"), tmp_path)
    parts = config.parallelism.module_fqns_per_model_part
    assert [name for part in parts for name in part] == [
        "tok_embeddings",
        *(f"layers.{block}" for block in range(4)),
        "norm",
        "lm_head",
    ]
    assert len(parts[0]) == schedule.stages[0].layers[1]
    assert "costs are not planned" not in names["__doc__"]


def test_what_the_profile_does_not_hold_is_said(tmp_path):
    costs = uniform(2, 2)
    _, names = loaded(render(check(quick(costs, 10**10, method="1f1b").schedule), costs, "plan.csv", "plan"), tmp_path)
    assert "no layer for tok_embeddings and norm and lm_head: their costs are not planned" in names["__doc__"]


def test_a_measured_gpt_has_ends_and_its_microbatch_size(tmp_path):
    model = Model(builder="gpt", microbatch_size=4, sequence_length=8)
    schedule = ir.seal(msgspec.structs.replace(placed(0, 1), model=model))
    config, _ = loaded(render(check(schedule), None, "plan.csv", "plan"), tmp_path)
    assert config.parallelism.module_fqns_per_model_part == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "norm", "lm_head"],
    ]
    assert config.parallelism.pipeline_parallel_microbatch_size == 4
    assert config.training.local_batch_size == 12


def test_of_a_model_that_a_function_makes_only_the_profile_tells_the_ends_and_what_samples_are(tmp_path):
    model = Model(builder="recipe:layers", microbatch_size=4, sequence_length=8)
    plan = check(ir.seal(msgspec.structs.replace(placed(0, 1), model=model)))
    with pytest.raises(
        BadInput, match=r"^the schedule's model is recipe:layers, a function: expected --profile, whose"
    ):
        render(plan, None, "plan.csv", "plan")
    config, _ = loaded(render(plan, uniform(2, 2), "plan.csv", "plan"), tmp_path)
    assert config.parallelism.pipeline_parallel_microbatch_size == 4


def test_a_profile_of_another_model_is_refused():
    with pytest.raises(BadInput, match=r"the profile has 6 layers, expected the schedule's 4"):
        render(check(placed(0, 1)), uniform(2, 3), "plan.csv", "plan")


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        (["embedding.0", "embedding.1", "block", "head"], "the embedding and the head whole"),
        (["embedding", "block", "head-part", "head-part"], "the embedding and the head whole"),
        (["EmbeddingPart", "Block", "HeadPart", "HeadPart-2"], "the embedding and the head whole"),
        (["embedding", "block.0.attention", "block.0.mlp", "head"], "blocks whole"),
    ],
)
def test_parts_and_halves_are_refused_by_their_names(layers, what):
    costs = uniform(2, 2)
    costs = msgspec.structs.replace(
        costs, layers=[msgspec.structs.replace(costs.layers[0], name=name, count=1) for name in layers]
    )
    with pytest.raises(BadInput, match=f"^the profile has a layer .*: torchtitan has {what}$"):
        render(check(placed(0, 1)), costs, "plan.csv", "plan")


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ((0, 1), "PipelineScheduleMulti"),
        ((0, 1, 2, 0, 1, 2), "PipelineScheduleMulti"),
        ((0, 1, 1, 0), "ZBVZeroBubble"),
        ((0, 1, 2, 2, 1, 0), "ZBVZeroBubble"),
    ],
)
def test_the_schedule_names_the_placement(devices, name):
    assert schedule_class(placed(*devices, microbatches=1)) == name
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    assert schedules.get_schedule_class(name)


@pytest.mark.parametrize("devices", [(0, 1, 1, 0, 0, 1, 1, 0), (1, 0), (0, 1, 0), (0, 0, 1, 1), (0,)])
def test_placements_that_torchtitan_does_not_know_are_refused(devices):
    with pytest.raises(BadInput, match=r"^torchtitan (cannot place|has no pipeline)"):
        schedule_class(placed(*devices, microbatches=1))
