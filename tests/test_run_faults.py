"""Faults and disturbances: one sentence each and an exit code, or the right loss under the promised memory."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import pytest

pytest.importorskip("torch")
from click.testing import CliRunner
from runtime_cases import TEXT, promise_exactly, schedule
from small_schedules import Shape
from test_runtime_library import start_ranks

from optpipe_compiler import ir
from optpipe_compiler.cli import cli
from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch import run

pytestmark = pytest.mark.runtime


def ranges(stage, microbatch):
    return [("offload", 2 * stage, 2 * stage + 1), ("recompute", 2 * stage + 1, 2 * stage + 2)]


SHAPE = Shape((0, 1), microbatches=4, fused=lambda stage, microbatch: microbatch % 2 == 0, ranges=ranges)


def disturbed(builder, **config):
    """The tiny model's schedule with the smallest promises, its layers made by `faulty_models:builder`."""
    plan = promise_exactly(schedule(SHAPE))
    changed = msgspec.structs.replace(
        plan.model, builder=f"faulty_models:{builder}", config={**plan.model.config, **config}
    )
    return ir.seal(msgspec.structs.replace(plan, model=changed))


@pytest.mark.parametrize("kind", ["slow_device", "stalled_copies", "jitter"])
def test_under_delays_gradients_are_right_and_memory_stays_under_the_promise(kind):
    plan = disturbed("gpt", kind=kind)
    report = run(plan, steps=2, data_paths=[TEXT], check=True)
    assert report.check.ok, report.check
    for rank in report.ranks:
        assert 0 < rank.peak_activation_bytes <= rank.promised_activation_bytes
        assert 0 < rank.peak_host_bytes <= rank.promised_host_bytes


FAULTS = {
    "fewer": (BadInput, {}, "the model has 5 layers, the schedule is for 6"),
    "fatter": (BadInput, {}, "bytes per microbatch for its backward, its profile says"),
    "gpt": (RunFailed, {"kind": "no_host_memory"}, "no host memory for offloaded activations ("),
}


@pytest.mark.parametrize("builder", FAULTS)
def test_a_fault_is_one_sentence_and_its_exit_code(tmp_path, builder):
    error, config, sentence = FAULTS[builder]
    plan = schedule(Shape((0, 1, 0), microbatches=4, ranges=ranges))
    changed = msgspec.structs.replace(
        plan.model, builder=f"faulty_models:{builder}", config={**plan.model.config, **config}
    )
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(ir.seal(msgspec.structs.replace(plan, model=changed))))
    ended = CliRunner().invoke(cli, ["run", str(path), "--data", str(TEXT)])
    assert isinstance(ended.exception, error), ended.output
    assert ended.exception.exit_code == {BadInput: 2, RunFailed: 5}[error]
    assert sentence in str(ended.exception)
    assert "\n" not in str(ended.exception)


JOINED = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from optpipe_compiler import ir
from optpipe_compiler.errors import OptPipeError
from runtime_torch import run
def tell(event):
    if event["event"] == "step":
        print("step", flush=True)
try:
    run(ir.load(Path(sys.argv[1])), steps=100000, data_paths=[Path(sys.argv[2]) / "faulty_models.py"], on_event=tell)
except OptPipeError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_under_torchrun_a_killed_rank_ends_the_others_within_ten_seconds(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(schedule(Shape((0, 1), microbatches=4))))
    first, second = start_ranks(JOINED, str(path))
    assert first.stdout.readline() == "step\n"
    os.kill(second.pid, signal.SIGKILL)
    killed = time.monotonic()
    _, errors = first.communicate(timeout=30)
    second.communicate(timeout=5)
    assert time.monotonic() - killed < 10
    assert first.returncode == RunFailed.exit_code
    told = [line.startswith("rank 0 stopped, because it lost another rank (") for line in errors.splitlines()]
    assert sum(told) == 1, errors


def test_under_torchrun_a_wrong_world_size_is_told_by_every_rank(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(schedule(Shape((0, 1), microbatches=4), model=None)))
    for number, rank in enumerate(start_ranks(JOINED, str(path), world=3)):
        _, errors = rank.communicate(timeout=30)
        assert rank.returncode == RunFailed.exit_code
        wanted = f"rank {number}: the schedule is for 2 devices, but 3 ranks were started"
        assert errors.splitlines()[-1] == wanted
