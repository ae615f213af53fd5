"""`run --trace`: one file of all ranks that Perfetto, `report` and `profile --from-run` read."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
from click.testing import CliRunner
from runtime_cases import schedule
from small_schedules import Shape

from optpipe_compiler.cli import cli
from optpipe_compiler.documents import ir
from optpipe_compiler.view.report.trace import TraceSwap, _steps_of, measured
from optpipe_torch.launch.trace import chrome_trace

BOTH = Shape(
    (0, 1),
    microbatches=3,
    ranges=lambda stage, microbatch: [
        ("offload", 2 * stage, 2 * stage + 1),
        ("recompute", 2 * stage + 1, 2 * stage + 2),
    ],
)


def timed(plan):
    """Ids of the ops that take time."""
    return {
        op.id
        for device in plan.devices
        for op in (*device.compute, *device.d2h, *device.h2d)
        if not isinstance(op, ir.MessageOp)
    }


def invoke(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.runtime
@pytest.mark.parametrize("real", [True, False], ids=["training", "rehearsal"])
def test_a_run_writes_every_op_of_every_rank_beside_its_forecast_and_report_reads_it(tmp_path, real):
    plan = schedule(BOTH, **({} if real else {"model": None}))
    path, trace, page = tmp_path / "schedule.json", tmp_path / "trace.json", tmp_path / "report.html"
    path.write_text(ir.to_text(plan))
    steps = ["--steps", 2, *([] if real else ["--time-scale", 1])]
    assert invoke("run", path, *steps, "--trace", trace).exit_code == 0
    written = json.loads(trace.read_text())
    events = [event for event in written["traceEvents"] if event["ph"] == "X"]
    for step in (0, 1):
        ran = [e["args"]["op"] for e in events if e["cat"] != "forecast" and e["args"]["step"] == step]
        planned = [e["args"]["forecast"] for e in events if e["cat"] == "forecast" and e["args"]["step"] == step]
        assert sorted(ran) == sorted(planned) == sorted(timed(plan))
    assert set(measured([trace], plan).ran) == timed(plan)
    assert invoke("report", path, "--trace", trace, "-o", page).exit_code == 0
    assert page.stat().st_size > 10_000


def test_lanes_of_forecast_and_measured_stand_side_by_side():
    plan = schedule(BOTH, model=None)
    ran = [[("forward:0:0", "compute", 5000, 9000)], [("offload:1:0:2-3", "d2h", 7000, 8000)]]
    events = json.loads(chrome_trace([(plan, [ran])], time_scale=2.0))["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes = ["compute forecast", "compute measured", "d2h forecast", "d2h measured", "h2d forecast", "h2d measured"]
    assert [threads[0, tid] for tid in range(6)] == lanes
    forward, offload = (e for e in events if e["ph"] == "X" and "op" in e["args"])
    assert (forward["ts"], forward["dur"], threads[0, forward["tid"]]) == (0, 4, "compute measured")
    assert (offload["ts"], offload["dur"], threads[1, offload["tid"]]) == (2, 1, "d2h measured")
    assert offload["args"]["bytes"] == plan.stages[1].saved_bytes[0]
    forecast = next(e for e in events if e["ph"] == "X" and e["args"].get("forecast") == "forward:0:0")
    assert forecast["dur"] == 2 * plan.forecast.stages[0].forward_ns / 1000


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(schedule(BOTH, model=None)))
    ended = CliRunner().invoke(cli, ["run", str(path), "--trace", str(tmp_path / "no" / "trace.json")])
    assert ended.exit_code != 0
    assert "step" not in ended.output


def test_a_schedule_that_came_twice_has_the_steps_of_both_times():
    def swap(step, digest, *, undoes=False):
        return TraceSwap(step, digest, 2, 1, 2, 1, 0, undoes=undoes)

    back = [swap(10, "other"), swap(20, "first", undoes=True)]
    assert _steps_of("first", back) == [range(10), range(20, 2**31)]
    assert _steps_of("other", back) == [range(10, 20)]
    assert _steps_of("first", back[:1]) == [range(10)]
    assert _steps_of("first", []) is None
