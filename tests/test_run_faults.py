"""Faults and disturbances: one sentence each and an exit code, or the right loss under the promised memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
from click.testing import CliRunner
from runtime_cases import TEXT, promise_exactly, schedule
from small_schedules import Shape
from test_runtime_library import start_ranks

from optpipe_compiler.cli import cli
from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput, RunFailed
from optpipe_torch.launch import run as launch
from optpipe_torch.launch.job import Job
from optpipe_torch.launch.run import run
from tests.interpreter import python
from tests.processes import started

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
from optpipe_compiler.documents import ir
from optpipe_compiler.errors import OptPipeError
from optpipe_torch.launch.run import run
def tell(event):
    if event["event"] == "step":
        print("step", flush=True)
try:
    plan = ir.load(Path(sys.argv[1]))
    text = [Path(sys.argv[2]) / "faulty_models.py"] if plan.model else []
    run(plan, steps=100000, data_paths=text, on_event=tell)
except OptPipeError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_under_torchrun_a_killed_rank_ends_the_others(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(schedule(Shape((0, 1), microbatches=4))))
    first, second = start_ranks(JOINED, str(path))
    assert first.stdout.readline() == "step\n"
    os.kill(second.pid, signal.SIGKILL)
    _, errors = first.communicate(timeout=30)
    second.communicate(timeout=5)
    assert first.returncode == RunFailed.exit_code
    told = [line.startswith("rank 0 stopped, because it lost another rank (") for line in errors.splitlines()]
    assert sum(told) == 1, errors


@pytest.mark.parametrize("way", ["shared", "gloo"])
def test_a_message_that_does_not_come_in_time_is_named_with_its_rank(way):
    waits = f"""
import sys
sys.path[:0] = sys.argv[1:]
from datetime import timedelta
import torch, torch.distributed as dist
from optpipe_torch.launch.run import _expected
from runtime_torch.messages import Mailbox
from runtime_torch.meter import Meter
from runtime_torch.shared import Channels
import test_shared_messages as case

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
if dist.get_rank() == 0:
    group = dist.new_group(timeout=timedelta(seconds=1))
    ends = case.two_ends(timeout=timedelta(seconds=1)) if "{way}" == "shared" else [None]
    mailbox = Mailbox(group, Meter(), ends[0])
    mailbox.recv("recv_activation:1:2", torch.empty(4), 1)
    try:
        mailbox.wait("recv_activation:1:2")
    except RuntimeError as error:
        print(_expected(error, 0))
else:
    dist.new_group(timeout=timedelta(seconds=1))
dist.barrier()
"""
    first, second = start_ranks(waits)
    said, errors = first.communicate(timeout=100)
    second.communicate(timeout=30)
    start = (
        "rank 0 stopped, because it waited too long for another rank (RuntimeError: recv_activation:1:2 from rank 1: "
    )
    assert said.startswith(start), said + errors
    assert "Timed out" in said


def test_under_torchrun_a_wrong_world_size_is_told_by_every_rank(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(schedule(Shape((0, 1), microbatches=4), model=None)))
    for number, rank in enumerate(start_ranks(JOINED, str(path), world=3)):
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == RunFailed.exit_code
        wanted = f"rank {number}: the schedule is for 2 devices, but 3 ranks were started"
        assert errors.splitlines()[-1] == wanted


def test_a_stopped_rank_ends_the_run_by_its_timeout_and_is_named():
    plan = schedule(Shape((0, 1), microbatches=4), model=None)

    def stop(event):
        if event["event"] == "step" and event["step"] == 1:
            os.kill(ranks.processes.pid(1), signal.SIGSTOP)

    ranks = launch.Ranks([Job(ir.to_text(plan), False, 10_000, b"", False, 1.0, 0, 3.0)] * 2, stop)
    with pytest.raises(RunFailed, match=r"^rank 1 is stopped \(SIGSTOP\), and the run has waited for it for 3 s"):
        ranks.run()
    assert multiprocessing.active_children() == []


def test_a_run_that_is_terminated_leaves_no_process_and_no_temporary_folder(tmp_path):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "schedule.json").write_text(ir.to_text(schedule(Shape((0, 1), microbatches=4), model=None)))
    root = Path(__file__).parent.parent
    process = started(
        subprocess.Popen(
            [sys.executable, "-m", "optpipe_compiler.cli", "run", "--steps", "100000"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path / "temporary")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    said: list[str] = []
    while not said or (said[-1] and not said[-1].startswith("step 2")):
        said.append(process.stderr.readline())
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert said[-1], said  # it has ended by itself
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[-1] == "optpipe: terminated"
    assert [path.name for path in (tmp_path / "temporary").iterdir() if path.name.startswith("optpipe")] == []
    until = time.monotonic() + 10
    while (left := _naming(str(tmp_path))) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []


@pytest.mark.parametrize(("length", "how"), [(75, "forkserver"), (76, "spawn")])
def test_a_long_path_of_temporary_files_has_no_place_for_a_socket(length, how, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/" + "t" * (length - 1))
    assert launch.context(training=False).get_start_method() == how


def _naming(folder):
    """The processes whose current folder it is."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((entry / "cwd").readlink()) == folder:
                found.append(int(entry.name))
    return found


def test_that_another_rank_has_failed_is_never_what_a_run_ends_with_where_that_says_why():
    echo, error = RunFailed("step() failed on rank 1, where its error is", elsewhere=True), RunFailed("no more")
    assert [launch._is_echo(one) for one in (echo, error)] == [True, False]
    assert str(launch._expected(echo, 0)).startswith("rank 0 stopped, because it lost another rank (step() failed on ")


def test_a_taken_port_ends_every_rank_with_one_sentence(tmp_path):
    (tmp_path / "schedule.json").write_text(ir.to_text(schedule(Shape((0, 1), microbatches=4), model=None)))
    root = Path(__file__).parent.parent
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        ranks = [
            started(
                subprocess.Popen(
                    [python(), "-m", "optpipe_compiler.cli", "run", "--timeout", "3"],
                    cwd=tmp_path,
                    env={**os.environ, **group, "RANK": str(rank), "PYTHONPATH": str(root)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        for number, rank in enumerate(ranks):
            _, errors = rank.communicate(timeout=120)
            assert rank.returncode == RunFailed.exit_code
            assert errors.startswith(f"optpipe: rank {number} did not meet the other ranks")
            assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RANK", "x", "a number from 0 to 1"),
        ("RANK", "2", "a number from 0 to 1"),
        ("RANK", "-1", "a number from 0 to 1"),
        ("WORLD_SIZE", "", "a number of at least 1"),
        ("WORLD_SIZE", "0", "a number of at least 1"),
        ("LOCAL_RANK", "1.5", "a number from 0 to 1"),
    ],
)
def test_a_place_in_the_environment_that_is_none_is_bad_input(monkeypatch, name, value, expected):
    for variable, number in ({"RANK": "0", "WORLD_SIZE": "2"} | {name: value}).items():
        monkeypatch.setenv(variable, number)
    with pytest.raises(BadInput) as refused:
        run(schedule(Shape((0, 1), microbatches=4)), steps=1, data_paths=[TEXT])
    assert str(refused.value) == f"the environment's {name} is {value!r}, expected {expected}"
