"""`run --rank R --emulate-peers`: one device alone does all of its work, and waits for what the forecast says."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
from click.testing import CliRunner
from runtime_cases import TEXT, promise_exactly, schedule
from small_schedules import Shape

from optpipe_compiler.cli import cli
from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput
from optpipe_torch.emulate.alone import CopyTimes, emulate, transfers

pytestmark = pytest.mark.gpu


def ranges(stage, microbatch):
    return [("offload", 2 * stage, 2 * stage + 1), ("recompute", 2 * stage + 1, 2 * stage + 2)]


PLAN = Shape((0, 1, 2, 2, 1, 0), microbatches=3, fused=lambda stage, microbatch: microbatch == 1, ranges=ranges)


def plan():
    return promise_exactly(schedule(PLAN))


def emulated(schedule, rank, **options):
    events = []
    report = emulate(schedule, rank, **{"steps": 2, "data": TEXT.read_bytes(), "on_event": events.append} | options)
    return report, events


@pytest.mark.parametrize("rank", range(3))
def test_every_device_runs_alone_under_its_promise(rank):
    whole = plan()
    report, events = emulated(whole, rank)
    device = whole.devices[rank]
    lanes = (*device.compute, *device.d2h, *device.h2d)
    assert {op.op for op in report.ops} == {op.id for op in lanes if not isinstance(op, ir.MessageOp)}
    assert all(op.measured_ns > 0 for op in report.ops)
    assert 0 < report.peak_activation_bytes <= report.promised_activation_bytes
    assert 0 < report.peak_host_bytes <= report.promised_host_bytes
    assert report.transfers.hidden_ns + report.transfers.exposed_ns == pytest.approx(
        sum(op.measured_ns for op in report.ops if op.lane != "compute"), rel=0.9
    )
    assert [event["event"] for event in events] == ["step", "step"]
    assert (events[-1]["loss"] == events[-1]["loss"]) == (rank == 0)  # the last stage's device has a loss


def test_messages_arrive_no_earlier_than_their_scaled_forecast():
    whole = plan()
    report, _ = emulated(whole, 2, time_scale=3.0)
    arrivals = {
        f"forward:{op.stage}:{op.microbatch}": 3 * end
        for times in whole.forecast.times
        if (times.device, times.lane) == (2, "compute")
        for op, end in zip(whole.devices[2].compute, times.end_ns, strict=True)
        if isinstance(op, ir.RecvActivation)
    }
    assert len(arrivals) == 3
    started = {op.op: op.measured_start_ns for op in report.ops}
    assert all(started[op] >= due for op, due in arrivals.items())


def test_hidden_is_what_the_compute_lane_is_busy_for():
    ran = [("f", "compute", 0, 10), ("b", "compute", 15, 20), ("d", "d2h", 5, 17), ("h", "h2d", 30, 33)]
    assert transfers(ran) == CopyTimes(hidden_ns=7, exposed_ns=8)


def test_the_command_reports_in_words_and_in_json_and_writes_a_trace(tmp_path):
    path, trace = tmp_path / "schedule.json", tmp_path / "trace.json"
    path.write_text(ir.to_text(plan()))
    common = ["run", str(path), "--data", str(TEXT), "--rank", "1", "--emulate-peers", "--steps", "2"]
    shown = CliRunner().invoke(cli, [*common, "--trace", str(trace)], catch_exceptions=False)
    assert "device 1 alone: " in shown.output
    assert " behind compute, " in shown.output
    measured = [event for event in json.loads(trace.read_text())["traceEvents"] if "op" in event.get("args", {})]
    assert {event["pid"] for event in measured} == {1}
    found = json.loads(CliRunner().invoke(cli, [*common, "--json"], catch_exceptions=False).stdout)
    assert found["rank"] == 1
    assert found["promised_activation_bytes"] >= found["peak_activation_bytes"]


def test_what_cannot_be_emulated_is_refused(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(plan()))
    for arguments, sentence in {
        ("--rank", "0"): "--rank and --emulate-peers are given together",
        ("--emulate-peers",): "--rank and --emulate-peers are given together",
        ("--emulate-peers", "--rank", "3"): "--rank is 3, expected 0 to 2",
        ("--emulate-peers", "--rank", "0", "--check"): "--check needs all ranks",
    }.items():
        ended = CliRunner().invoke(cli, ["run", str(path), *arguments])
        assert isinstance(ended.exception, BadInput)
        assert sentence in str(ended.exception)
    with pytest.raises(BadInput, match="the schedule has no model"):
        emulated(schedule(Shape((0, 1)), model=None), 0)
