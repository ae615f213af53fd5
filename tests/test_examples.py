"""The examples' commands run as they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def environment(tmp_path):
    """Put `optpipe` and `torchrun` of this interpreter on the path."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, module in (("optpipe", "optpipe_compiler.cli"), ("torchrun", "torch.distributed.run")):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        tool.chmod(0o755)
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LIMIT": "3",
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
    printed = run("demo.sh", environment, tmp_path)
    assert printed.count("gradients equal") == 2
    assert "holds. No execution exceeds" in printed


@pytest.mark.runtime
def test_the_own_loop_example_trains_under_torchrun(environment, tmp_path):
    printed = run("own_loop.sh", environment, tmp_path)
    assert "step 2: loss" in printed


def test_the_picture_of_the_readme_can_be_drawn_again(environment, tmp_path):
    run("picture.sh", environment, tmp_path)
    assert (tmp_path / "schedule.svg").read_text().startswith("<svg ")


def test_the_a100_example_plans_without_a_gpu(environment, tmp_path):
    assert "per step by" in run("a100_6b.sh", environment, tmp_path)
