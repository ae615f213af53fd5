"""Several nodes, as two groups of torchrun on this machine: equal losses, also where a run goes on."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
from runtime_cases import schedule
from small_schedules import Shape

from optpipe_compiler.documents import ir
from tests.interpreter import python
from tests.processes import started

ROOT = Path(__file__).parent.parent
TRAIN = str(ROOT / "examples" / "train_gpt.py")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def two_nodes(folder: Path, *command: str, options: str = "", **variables: str) -> list[str]:
    """Run a command in two groups of one process each; return the lines with losses."""
    torchrun = f"-m torch.distributed.run --nnodes 2 --nproc-per-node 1 {options} --rdzv-backend c10d --rdzv-endpoint"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    address = f"127.0.0.1:{free_port()}"
    nodes = [
        started(
            subprocess.Popen(
                [python(), *torchrun.split(), address, *command],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        for _ in range(2)
    ]
    said = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    return sorted(re.findall("^step .*|^validation .*", "\n".join(said), flags=re.M))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("nodes")
    plan = schedule(Shape((0, 1), microbatches=4, ranges=lambda stage, _: [("offload", 2 * stage, 2 * stage + 1)]))
    (path / "schedule.json").write_text(ir.to_text(plan))
    return path


@pytest.fixture(scope="module")
def straight(folder):
    """What four steps say that nothing interrupts."""
    said = two_nodes(folder, TRAIN, "schedule.json", "--steps", "4")
    assert [line[:6] for line in said] == ["step 1", "step 2", "step 3", "step 4", "valida"]
    return said


@pytest.mark.runtime
def test_two_nodes_started_again_with_the_same_command_go_on_where_the_last_checkpoint_is(folder, straight):
    saved = ["schedule.json", "--save", "checkpoints", "--save-every", "1", "--resume"]
    assert two_nodes(folder, TRAIN, *saved, "--steps", "2")[:2] == straight[:2]
    assert two_nodes(folder, TRAIN, *saved, "--steps", "4") == straight[2:]


DIES = """
import os, runpy, signal, sys
from runtime_torch.runner import Runner

step, steps = Runner.step, []

def mortal(self, *inputs, **named):
    steps.append(None)
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], len(steps)) == ("0", "1", 3):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *inputs, **named)

Runner.step = mortal
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.runtime
def test_a_rank_that_dies_is_started_again_by_torchrun_and_all_go_on_from_the_last_checkpoint(folder, straight):
    (folder / "dies.py").write_text(DIES)
    saved = ["schedule.json", "--steps", "4", "--save", "others", "--save-every", "1", "--resume"]
    options = {"options": "--max-restarts 1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert two_nodes(folder, "dies.py", TRAIN, *saved, **options) == straight
