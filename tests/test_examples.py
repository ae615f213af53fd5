"""The examples' commands run as they are written."""

from __future__ import annotations

import difflib
import math
import os
import re
import subprocess
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random

import pytest

from tests.interpreter import python

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def environment(tmp_path):
    """Put `optpipe` and `torchrun` on the path."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, module in (("optpipe", "optpipe_compiler.cli"), ("torchrun", "torch.distributed.run")):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec "{python()}" -m {module} "$@"\n')
        tool.chmod(0o755)
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LIMIT": "1",
        "SAMPLES": "4",
        "STEPS": "2",
    }


def run(script: str, environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        ["sh", str(EXAMPLES / script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.runtime
def test_the_demo_measures_plans_verifies_and_trains_with_equal_gradients(environment, tmp_path):
    pytest.importorskip("torch")
    printed = run("demo.sh", environment | {"SIZE": "--hidden 64 --seq 64", "TIGHT": "7MB"}, tmp_path)
    assert printed.count("gradients equal") == 2
    assert "holds. No execution exceeds" in printed


@pytest.mark.runtime
def test_the_own_loop_example_trains_under_torchrun(environment, tmp_path):
    pytest.importorskip("torch")
    printed = run("own_loop.sh", environment, tmp_path)
    assert "step 2: loss" in printed


@pytest.mark.runtime
@pytest.mark.parametrize("script", ["own_loop.py", "train_gpt.py"])
def test_an_example_says_in_a_sentence_that_there_is_no_schedule(script, environment, tmp_path):
    pytest.importorskip("torch")
    command = f"torchrun --nproc-per-node 1 {EXAMPLES / script} missing.json"
    done = subprocess.run(
        command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert re.search(r"^missing\.json: cannot be read: No such file", done.stderr, flags=re.M), done.stderr
    assert f'{script}", line' not in done.stderr, "a traceback beside what torchrun says of itself"


@pytest.mark.runtime
def test_the_own_loop_says_in_a_sentence_that_there_are_too_few_processes(environment, tmp_path):
    pytest.importorskip("torch")
    from runtime_cases import schedule
    from small_schedules import Shape

    from optpipe_compiler.documents import ir

    (tmp_path / "schedule.json").write_text(ir.to_text(schedule(Shape((0, 1), microbatches=4))))
    command = f"torchrun --nproc-per-node 1 {EXAMPLES / 'own_loop.py'} schedule.json"
    done = subprocess.run(
        command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert re.search("^the schedule .*2 devices", done.stderr, flags=re.M), done.stderr
    assert 'own_loop.py", line' not in done.stderr, "a traceback beside what torchrun says of itself"


def test_the_picture_of_the_readme_can_be_drawn_again(environment, tmp_path):
    run("picture.sh", environment, tmp_path)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_the_a100_example_plans_without_a_gpu(environment, tmp_path):
    assert "per step by" in run("a100_6b.sh", environment, tmp_path)


def train(options: str, environment: dict[str, str], folder: Path, refusal: str = "") -> list[str]:
    """Run train_gpt.py on 2 x 2 processes; return the lines with losses. A `refusal` is what it ends with."""
    command = f"torchrun --nproc-per-node 4 {EXAMPLES / 'train_gpt.py'} schedule.json {options}"
    done = subprocess.run(
        command.split(), cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert refusal in done.stderr
    assert (done.returncode == 0) == (not refusal), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "loss" in line]


@pytest.mark.runtime
def test_the_training_script_resumes_in_shards_to_the_losses_of_replicas(environment, tmp_path):
    """That it resumes to equal losses is tested in test_nodes.py."""
    pytest.importorskip("torch")
    from runtime_cases import schedule
    from small_schedules import Shape

    from optpipe_compiler.documents import ir

    plan = schedule(Shape((0, 1), microbatches=4, ranges=lambda stage, _: [("offload", 2 * stage, 2 * stage + 1)]))
    (tmp_path / "schedule.json").write_text(ir.to_text(plan))
    straight = train("--steps 2", environment, tmp_path)
    assert [line.split(":")[0] for line in straight[:2]] == ["step 1", "step 2"]
    train("--steps 1 --save checkpoints", environment, tmp_path)
    sharded = train("--steps 2 --save checkpoints --resume --data-parallel shard", environment, tmp_path)
    for line, wanted in zip(sharded, straight[1:], strict=True):
        found, expected = (float(text.split("loss ")[1].split()[0]) for text in (line, wanted))
        assert found == pytest.approx(expected, abs=1e-4)
    latest = tmp_path / "checkpoints" / "latest"
    assert latest.read_text() == "2"
    latest.write_text("2\n")  # by hand
    train(
        "--steps 1 --save checkpoints --resume", environment, tmp_path, "has seen 2 steps, expected --steps of as many"
    )
    assert latest.read_text() == "2\n"
    latest.write_text("")
    train("--steps 3 --save checkpoints --resume", environment, tmp_path, "latest says '', expected N of a folder")


def test_the_training_script_says_in_a_sentence_that_a_checkpoint_is_of_other_layers(tmp_path):
    torch = pytest.importorskip("torch")
    from torch import distributed, nn

    spec = spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)

    def state(name: str, width: int):
        module = nn.ModuleDict({name: nn.Linear(width, 2)})
        return module, torch.optim.AdamW(module.parameters())

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        script.save(tmp_path, 3, *state("0", 2))
        assert script.load(tmp_path, *state("0", 2)) == 3
        for name, width, why in (("0", 4, "Size mismatch"), ("1", 2, "Missing key")):
            with pytest.raises(SystemExit, match=f"step3 cannot be read into this schedule's layers, .* halves: {why}"):
                script.load(tmp_path, *state(name, width))
    finally:
        distributed.destroy_process_group()


@pytest.mark.runtime
def test_the_training_script_keeps_tied_weights_equal(environment, tmp_path):
    pytest.importorskip("torch")
    import msgspec
    import torch
    from runtime_cases import tiny_profile
    from small_schedules import Builder, Shape
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Model

    model = Model(builder="tests.user_layers:tied_functions", config={}, microbatch_size=2, sequence_length=8, seed=3)
    shape = Shape((0, 1), layers_per_stage=3, microbatches=2)
    built = Builder(shape, tiny_profile(model), Random(0)).build()
    (tmp_path / "own.py").write_text("from tests import user_layers as u\ndef layers(): return u.tied_functions()\n")
    plan = msgspec.structs.replace(built, model=msgspec.structs.replace(model, builder="own:layers"))
    (tmp_path / "schedule.json").write_text(ir.to_text(ir.seal(plan)))
    path = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    train("--steps 2 --save checkpoints", environment | {"PYTHONPATH": path}, tmp_path)
    dcp_to_torch_save(tmp_path / "checkpoints" / "step2", tmp_path / "step2.pt")
    weights = torch.load(tmp_path / "step2.pt", weights_only=False)["weights"]
    assert torch.equal(weights["0.weight"], weights["5.out.weight"])


@pytest.mark.runtime
def test_the_training_script_skips_a_step_on_all_ranks_where_one_has_an_infinite_gradient(environment, tmp_path):
    pytest.importorskip("torch")
    import msgspec
    from runtime_cases import tiny_profile
    from small_schedules import Builder, Shape

    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Model

    model = Model(builder="tests.user_layers:tied_functions", config={}, microbatch_size=2, sequence_length=8, seed=3)
    built = Builder(Shape((0, 1), layers_per_stage=3, microbatches=2), tiny_profile(model), Random(0)).build()
    (tmp_path / "own.py").write_text(
        "from tests import user_layers as u\n"
        "calls = []\n"
        "def infinite(gradient):\n"
        "    calls.append(0)\n"
        "    return gradient * float('inf') if len(calls) <= 2 else gradient  # in the first step's two microbatches\n"
        "def layers():\n"
        "    made, *more = u.tied_functions()\n"
        "    def first():\n"
        "        layer = made[0]()\n"
        "        layer.weight.register_hook(infinite)\n"
        "        return layer\n"
        "    return [first, *made[1:]], *more\n"
    )
    plan = msgspec.structs.replace(built, model=msgspec.structs.replace(model, builder="own:layers"))
    (tmp_path / "schedule.json").write_text(ir.to_text(ir.seal(plan)))
    path = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    first, second, validation = train("--steps 2", environment | {"PYTHONPATH": path}, tmp_path)
    assert first.endswith(", step skipped")
    assert math.isfinite(float(second.rpartition(" ")[2]))
    assert "nan" not in second + validation


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--resume", "--resume needs --save FOLDER"),
        ("--save-every 5", "--save-every needs --save FOLDER"),
        ("", "expected to be started by torchrun"),
    ],
)
def test_the_training_script_refuses_in_a_sentence_what_it_cannot_do(environment, tmp_path, options, sentence):
    pytest.importorskip("torch")
    command = [python(), str(EXAMPLES / "train_gpt.py"), "schedule.json", *options.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


# -- frameworks


def changed(before: str, after: str) -> list[str]:
    """The lines of code that a person writes or changes to get from one script to the other."""
    lines = difflib.unified_diff(*((EXAMPLES / name).read_text().splitlines() for name in (before, after)), n=0)
    added = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    return [line for line in added if line and not line.startswith(('"""', "#", "sh "))]


def test_the_transformers_example_takes_at_most_twelve_lines_commands_included():
    script = (EXAMPLES / "transformers_pipeline.sh").read_text().splitlines()
    commands = [line for line in script if line.startswith(("optpipe", "torchrun"))]
    assert len(commands) == 3
    assert len(changed("transformers_plain.py", "transformers_pipeline.py")) + len(commands) <= 12


@pytest.mark.runtime
@pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
def test_the_lightning_example_has_the_losses_of_the_plain_loop(environment, tmp_path):
    from runtime_cases import schedule
    from small_schedules import Shape

    from optpipe_compiler.documents import ir

    plan = schedule(Shape((0, 1), microbatches=4, ranges=lambda stage, _: [("offload", 2 * stage, 2 * stage + 1)]))
    (tmp_path / "schedule.json").write_text(ir.to_text(plan))
    losses = []
    for script in ("own_loop.py", "lightning_loop.py"):
        command = f"torchrun --nproc-per-node 2 {EXAMPLES / script} schedule.json --steps 3"
        done = subprocess.run(
            command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append(re.findall(r"^step \d+: loss [\d.]+", done.stdout, flags=re.M))
    assert len(losses[0]) == 3
    assert losses[1] == losses[0]


@pytest.mark.runtime
def test_the_transformers_example_has_the_losses_of_one_device_and_saves_as_transformers_does(environment, tmp_path):
    transformers = pytest.importorskip("transformers")
    printed = run("transformers_pipeline.sh", environment, tmp_path)
    plain = subprocess.run(
        [python(), EXAMPLES / "transformers_plain.py"],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
    ).stdout
    losses = [line for line in plain.splitlines() if line.startswith("loss")]
    assert len(losses) == 3
    assert [line for line in printed.splitlines() if line.startswith("loss")] == losses
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained").config.vocab_size == 256
