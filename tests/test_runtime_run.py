"""Real processes: a replayed schedule trains what plain autograd trains, and every failure ends the run at once."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from random import Random

import msgspec
import pytest

pytest.importorskip("torch")
import torch
from click.testing import CliRunner
from runtime_cases import MODEL, TEXT, promise_exactly, schedule
from small_schedules import Shape, random_shape
from test_runtime_library import alone  # noqa: F401 - a fixture

import runtime_torch
from optpipe_compiler.cli import cli
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import Model
from optpipe_compiler.errors import BadInput, RunFailed
from optpipe_torch.launch import run as launch
from optpipe_torch.launch.check import TOLERANCE, compare, unpipelined
from optpipe_torch.launch.job import Job
from optpipe_torch.launch.run import run
from optpipe_torch.models import known as models
from tests.interpreter import python
from tests.processes import started

pytestmark = pytest.mark.runtime

LINEAR_2, LOOP_2, V_2 = (0, 1), (0, 1, 0, 1), (0, 1, 1, 0)
LINEAR_4, V_4 = (0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)


def fused(stage, microbatch):
    return True


def split(stage, microbatch):
    return False


def mixed(stage, microbatch):
    return (stage + microbatch) % 2 == 0


def keep(stage, microbatch):
    return []


def offload(stage, microbatch):
    return [("offload", 2 * stage, 2 * stage + 1 + microbatch % 2)]


def recompute(stage, microbatch):
    first = 2 * stage + (microbatch + 1) % 2
    return [("recompute", first, 2 * stage + 2)]


def both(stage, microbatch):
    return [("offload", 2 * stage, 2 * stage + 1), ("recompute", 2 * stage + 1, 2 * stage + 2)]


def checked(plan, steps=1):
    """Run with --check; gradients equal the unpipelined model's and no rank exceeds its promise."""
    events = []
    plan = promise_exactly(plan)
    report = run(plan, steps=steps, data_paths=[TEXT], check=True, on_event=events.append)
    assert report.check is not None
    assert report.check.ok, report.check
    assert report.check.parameters == 12 * (len(plan.stages) * 2 - 2) + 5
    assert [event["event"] for event in events] == ["started", "check", *["step"] * steps]
    for rank in report.ranks:
        assert 0 < rank.peak_activation_bytes <= rank.promised_activation_bytes
        assert rank.peak_host_bytes <= rank.promised_host_bytes
    return report


TREATED = [
    *product([LINEAR_2, V_2], [keep, offload, recompute, both]),
    *product([LINEAR_4, V_4], [both]),  # more ranks treat each stage as two do
]


@pytest.mark.parametrize("backward", [fused, split], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("placement", "ranges"), TREATED, ids=lambda one: getattr(one, "__name__", str(one)))
def test_gradients_equal_the_unpipelined_model(placement, backward, ranges):
    checked(schedule(Shape(placement, microbatches=5, fused=backward, ranges=ranges)))


@pytest.mark.parametrize("seed", range(4))
def test_any_legal_order_with_any_waits_runs(seed):
    shape = random_shape(Random(seed), placements=[LINEAR_2, LOOP_2, V_2, LINEAR_4], microbatches=6)
    checked(schedule(shape, seed))


ONE_EXPERT = {"layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "ffn": 32, "vocab": 256}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_that_are_zero_in_theory_are_no_difference_and_wrong_ones_are_found(dtype):
    config = {"kind": "mixtral", **ONE_EXPERT, "experts": 4, "experts_per_token": 1}
    model = Model(builder="transformer", config=config, microbatch_size=2, sequence_length=8, dtype=dtype)
    other = msgspec.structs.replace(model, config={**config, "attention": "math"})  # rounds otherwise
    inputs, target = models.batch(model, TEXT.read_bytes(), torch.Generator().manual_seed(0), 2)
    tolerance = TOLERANCE.get(dtype, 0.05)
    loss, reference = unpipelined(model, (inputs,), target, 2)
    _, found = unpipelined(other, (inputs,), target, 2)
    routers = [name for name in found if "router" in name]
    assert len(routers) == 2
    assert not any(torch.allclose(found[name], reference[name], rtol=0.1, atol=0.0) for name in routers)
    assert compare(loss, found, loss, reference, tolerance).ok
    for name in set(found) - set(routers):
        wrong = compare(loss, {**found, name: found[name] * 1.2}, loss, reference, tolerance)
        assert not wrong.ok
        assert wrong.worst_parameter == name


@pytest.mark.parametrize("backward", [fused, split], ids=lambda f: f.__name__)
def test_a_smaller_batch_of_a_known_model_has_its_gradients(alone, backward):  # noqa: F811
    plan = promise_exactly(schedule(Shape((0, 0, 0), microbatches=4, fused=backward, ranges=both)))
    stages = models.stages(plan.model, plan, 0, torch.device("cpu"))
    runner = runtime_torch.Runner(plan, stages)
    inputs, target = models.batch(plan.model, TEXT.read_bytes(), torch.Generator().manual_seed(0), 2)
    loss = runner.step(inputs, target=target).loss  # one sample in each of four microbatches of two
    found = {f"layer {name.replace('.', ': ', 1)}": p.grad for name, p in stages.module.named_parameters()}
    assert compare(loss, found, *unpipelined(plan.model, (inputs,), target, 4), TOLERANCE["fp32"]).ok
    assert runner.eval(inputs[:3], target=target[:3]) > 0


def test_training_lowers_the_loss_and_reports_plan_against_reality():
    plan = schedule(Shape(LINEAR_2, microbatches=4, fused=mixed, ranges=both))
    report = checked(plan, steps=12)
    assert report.mode == "train"
    assert report.losses[-1] < report.losses[0] - 0.05
    assert report.makespan_ns > 0
    assert 0 <= report.bubble < 1
    kinds = {"forward", "backward", "backward_input", "backward_weight", "recompute", "offload", "reload"}
    assert set(report.kinds) == kinds
    assert all(kind.ratio > 0 for kind in report.kinds.values())


def test_a_schedule_without_a_model_is_rehearsed():
    plan = promise_exactly(schedule(Shape(V_4, microbatches=4, fused=mixed, ranges=both), model=None))
    report = run(plan, steps=2, time_scale=4.0)
    assert report.mode == "rehearsal"
    assert report.losses == [8.0, 8.0]  # every microbatch passed all stages
    assert report.forecast_makespan_ns == 4 * plan.forecast.makespan_ns
    assert report.makespan_ns > 0.9 * report.forecast_makespan_ns
    for rank in report.ranks:
        assert 0 < rank.peak_activation_bytes <= rank.promised_activation_bytes
        assert 0 < rank.peak_host_bytes <= rank.promised_host_bytes


def test_what_a_rehearsal_would_ignore_is_refused(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(schedule(Shape(LINEAR_2, microbatches=2), model=None)))
    for arguments, sentence in {
        ("--check",): "--check needs a schedule with a model, expected no rehearsal: it has no gradients to check",
        ("--data", "none.txt"): "--data is none.txt, expected none for a rehearsal",
    }.items():
        ended = CliRunner().invoke(cli, ["run", str(path), *arguments])
        assert isinstance(ended.exception, BadInput)
        assert ended.exception.exit_code == 2
        assert sentence in str(ended.exception)


def test_a_time_scale_is_a_number_above_0_and_of_no_training(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(schedule(Shape(LINEAR_2, microbatches=2))))
    for option, value in product(("--time-scale", "--timeout"), ("0", "-1", "nan", "inf")):
        ended = CliRunner().invoke(cli, ["run", str(path), option, value])
        assert ended.exit_code == 2
        assert f"Invalid value for '{option}': {float(value)} is not " in ended.output
    ended = CliRunner().invoke(cli, ["run", str(path), "--time-scale", "2"])
    assert isinstance(ended.exception, BadInput)
    assert "--time-scale is 2, expected none in training" in str(ended.exception)


class Watched(launch.Ranks):
    """Lets a test see the processes."""

    seen: list[launch.Ranks] = []  # noqa: RUF012 - one list for all on purpose

    def __init__(self, *args):
        super().__init__(*args)
        self.seen.append(self)


def job(plan, **changes):
    text = ir.to_text(plan)
    training = plan.model is not None
    first = Job(text, training, steps=50, data=TEXT.read_bytes(), check=False, time_scale=2.0, seed=0, timeout_s=1000)
    return dataclasses.replace(first, **changes)


def failure(jobs, on_event=lambda ranks, event: None):
    """Run until it fails; return the error, and check that no process is left.

    A rank that waits for one that is gone does so for longer than pytest waits for the test.
    """
    ranks = Watched(jobs, lambda event: on_event(ranks, event))
    with pytest.raises((RunFailed, BadInput)) as caught:
        ranks.run()
    assert multiprocessing.active_children() == []
    return caught.value


@pytest.mark.parametrize("model", [MODEL, None], ids=["training", "rehearsal"])
def test_a_killed_rank_ends_the_run_at_once_and_is_named(model):
    plan = schedule(Shape(LINEAR_2, microbatches=4), model=model)
    killed = []

    def kill(ranks, event):
        if event["event"] == "step" and not killed:
            killed.append(1)
            os.kill(ranks.processes.pid(1), signal.SIGKILL)

    error = failure([job(plan)] * 2, kill)
    assert str(error) == "rank 1 died: killed by signal 9 (SIGKILL)"


def test_ranks_with_different_schedules_are_refused_by_name():
    plans = [schedule(Shape(LINEAR_2, microbatches=4), seed) for seed in (0, 1)]
    error = failure([job(plan) for plan in plans])
    assert str(error).startswith("rank 1 has another schedule than rank 0: digest sha256:")


def test_a_failing_transfer_lane_ends_the_run_while_its_rank_waits_for_a_message():
    plan = schedule(Shape(LINEAR_2, microbatches=4, fused=fused, ranges=offload))
    record = msgspec.to_builtins(plan)
    record["model"]["builder"] = "runtime_cases:lossy_layers"
    record["model"]["config"] = {"layers": 4, "hidden": 16}
    broken = ir.seal(msgspec.convert(record, ir.Schedule))
    error = failure([job(broken)] * 2)
    assert str(error).startswith("rank 1 failed: OSError: no space for a copy")


def test_an_interrupt_of_the_parent_ends_every_rank():
    plan = schedule(Shape(LINEAR_2, microbatches=4), model=None)

    def interrupt(event):
        if event["event"] == "step":
            raise KeyboardInterrupt

    ranks = Watched([job(plan)] * 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        ranks.run()
    assert multiprocessing.active_children() == []


ORPHANED = """
import os, signal, sys
from pathlib import Path
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import Model
from optpipe_torch.launch import run as launch
from optpipe_torch.launch.check import TOLERANCE, compare, unpipelined
def tell(event):
    if event["event"] == "step":
        sys.stdout.write(" ".join(str(ranks.processes.pid(rank)) for rank in range(2)))
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
job = launch.Job(Path(sys.argv[1]).read_text(), False, 50, b"", False, 2.0, 0, 60.0)
ranks = launch.Ranks([job] * 2, tell)
ranks.run()
"""


def test_no_rank_outlives_a_parent_that_is_killed(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(schedule(Shape(LINEAR_2, microbatches=4), model=None)))
    parent = subprocess.run(
        [sys.executable, "-c", ORPHANED, str(path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 2
    until = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid):
    """Whether a process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_half_precision_trains_within_its_tolerance():
    half = msgspec.structs.replace(MODEL, dtype="bf16")
    plan = schedule(Shape(LINEAR_2, microbatches=4, fused=mixed, ranges=both), model=half)
    report = run(plan, steps=1, data_paths=[TEXT], check=True)
    assert report.check.ok, report.check


def test_too_small_a_text_is_bad_input():
    plan = schedule(Shape(LINEAR_2, microbatches=4))
    error = failure([job(plan, data=b"short")] * 2)
    assert isinstance(error, BadInput)
    assert "training text" in str(error)


def test_a_wrong_world_size_is_refused(monkeypatch):
    plan = schedule(Shape(LINEAR_2, microbatches=4))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RunFailed, match="the schedule is for 2 devices, but 3 ranks were started"):
        run(plan, steps=1, data_paths=[TEXT])


JOINED = """
import sys
from pathlib import Path
from optpipe_compiler.documents import ir
from optpipe_torch.launch.run import run
report = run(ir.load(Path(sys.argv[1])), steps=2, data_paths=[Path(sys.argv[2])], check=True)
sys.stdout.write("none" if report is None else f"{report.check.ok} {len(report.losses)}")
"""


def test_under_torchrun_the_ranks_join_its_group(tmp_path):
    plan = schedule(Shape(V_2, microbatches=4, fused=mixed, ranges=both))
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(plan))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).parent.parent
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        started(
            subprocess.Popen(
                [python(), "-c", JOINED, str(path), str(TEXT)],
                env={**os.environ, **common, "RANK": str(rank), "PYTHONPATH": str(root)},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["True 2", "none"]
