"""Real processes: a replayed schedule trains what plain autograd trains, and every failure ends the run at once."""

from __future__ import annotations

import os
import signal
import time
from random import Random

import pytest

pytest.importorskip("torch")
import runtime_cases
from runtime_cases import TEXT, schedule
from small_schedules import Shape, random_shape

from optpipe_compiler.errors import RunFailed
from runtime_torch import run
from runtime_torch.launch import _Family

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
    return [("recompute", 2 * stage, 2 * stage + 2)] if microbatch % 2 else [("recompute", 2 * stage + 1, 2 * stage + 2)]


def both(stage, microbatch):
    return [("offload", 2 * stage, 2 * stage + 1), ("recompute", 2 * stage + 1, 2 * stage + 2)]


def checked(plan, steps=1):
    events = []
    report = run(plan, steps=steps, data_paths=[TEXT], check=True, on_event=events.append)
    assert report.check is not None
    assert report.check.ok, report.check
    assert report.check.parameters == 12 * (len(plan.stages) * 2 - 2) + 5
    assert [event["event"] for event in events] == ["started", "check", *["step"] * steps]
    for rank in report.ranks:
        assert 0 < rank.peak_activation_bytes <= rank.promised_activation_bytes
        assert rank.peak_host_bytes <= rank.promised_host_bytes
    return report


@pytest.mark.parametrize("ranges", [keep, offload, recompute, both], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backward", [fused, split], ids=lambda f: f.__name__)
@pytest.mark.parametrize("placement", [LINEAR_2, V_2, LINEAR_4, V_4], ids=["linear2", "v2", "linear4", "v4"])
def test_gradients_equal_the_unpipelined_model(placement, backward, ranges):
    checked(schedule(Shape(placement, microbatches=5, fused=backward, ranges=ranges)))


@pytest.mark.parametrize("seed", range(4))
def test_any_legal_order_with_any_waits_runs(seed):
    shape = random_shape(Random(seed), placements=[LINEAR_2, LOOP_2, V_2, LINEAR_4], microbatches=6)
    checked(schedule(shape, seed))


def test_training_lowers_the_loss_and_reports_plan_against_reality():
    plan = schedule(Shape(LINEAR_2, microbatches=4, fused=mixed, ranges=both))
    report = checked(plan, steps=12)
    assert report.losses[-1] < report.losses[0] - 0.05
    assert report.makespan_ns > 0
    assert 0 <= report.bubble < 1
    assert {"forward", "backward", "backward_input", "backward_weight", "recompute", "offload", "reload"} == set(
        report.kinds
    )
    assert all(kind.ratio > 0 for kind in report.kinds.values())


def test_a_schedule_without_a_model_is_rehearsed():
    plan = schedule(Shape(V_4, microbatches=4, fused=mixed, ranges=both), model=None)
    report = run(plan, steps=2, time_scale=4.0)
    assert report.mode == "rehearsal"
    assert report.losses == [8.0, 8.0]  # every microbatch passed all stages
    assert report.forecast_makespan_ns == 4 * plan.forecast.makespan_ns
    assert report.makespan_ns == pytest.approx(report.forecast_makespan_ns, rel=0.25)
    for rank in report.ranks:
        assert 0 < rank.peak_activation_bytes <= rank.promised_activation_bytes


def test_a_killed_rank_ends_the_run_in_seconds_and_is_named():
    plan = schedule(Shape(LINEAR_2, microbatches=4), model=None)
    family = None

    def kill(event):
        if event["event"] == "step":
            os.kill(family._children[1].pid, signal.SIGKILL)

    import runtime_torch.launch as launch

    class Watched(_Family):
        def __init__(self, *args):
            nonlocal family
            super().__init__(*args)
            family = self

    original, launch._Family = launch._Family, Watched
    try:
        start = time.monotonic()
        with pytest.raises(RunFailed, match=r"rank 1 died: killed by signal 9 \(SIGKILL\)"):
            run(plan, steps=100, time_scale=5.0, on_event=kill)
    finally:
        launch._Family = original
    assert time.monotonic() - start < 20
    assert not any(child.is_alive() for child in family._children)
