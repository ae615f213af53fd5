"""Large and hostile files: every command that reads schedules answers them, or refuses them by a stated limit."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from large_schedules import serial

from optpipe_compiler.cli import cli
from optpipe_compiler.documents import files, ir
from optpipe_compiler.errors import BadInput, Rejected
from optpipe_compiler.forecast import analyse
from optpipe_compiler.model.problem import OPS_OF_A_UNIT
from optpipe_compiler.plan.instances import MOST_TASKS
from optpipe_compiler.verify import causality, verify

ROUND = [stage % 8 for stage in range(1500)]
CASES = {
    "many ops": lambda: serial(range(8), 250, gpipe=True),
    "offloads on one device": lambda: serial([0], 2000, gpipe=True, offload=True),
    "many stages": lambda: serial(ROUND, 1),
    "many stages on one device": lambda: serial([0] * 2000, 2),
    "recomputes of many layers": lambda: serial([0], 1500, layers=9000, recompute=True),
    "many devices": lambda: serial(range(300), 2, empty_devices=24),
}


@cache
def text(case: str) -> str:
    return ir.to_text(CASES[case]())


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(line: str):
    return CliRunner().invoke(cli, [*line.split(), "schedule.json"])


@pytest.mark.parametrize("case", CASES)
def test_large_files_are_answered_by_every_command(case):
    Path("schedule.json").write_text(text(case))
    assert Path("schedule.json").stat().st_size < 10**7
    for command in ("verify", "show", "report", "diff schedule.json", "fmt --check", "compare"):
        done = run(command)
        assert done.exit_code == 0, (command, done.exception)
    for kind in ("svg", "chrome-trace", "torch-csv"):
        done = run(f"export --to {kind} --drop-memory-ops")
        assert done.exit_code == 0, (kind, done.exception)


BEYOND = {
    "has 1025 devices, expected at most 1024": lambda: serial([0], 2, empty_devices=1024),
    "has 10001 layers in $.stages, expected at most 10000": lambda: serial([0], 1, layers=10_001),
}


@pytest.mark.parametrize("said", BEYOND)
def test_files_beyond_the_limits_are_refused_by_every_command(said):
    Path("schedule.json").write_text(ir.to_text(BEYOND[said]()))
    for command in ("verify", "show", "report", "diff schedule.json", "fmt", "compare", "export --to svg"):
        done = run(command)
        assert isinstance(done.exception, BadInput), command
        assert str(done.exception) == f"schedule.json: {said}"


def test_a_file_that_never_ends_is_refused():
    with pytest.raises(BadInput, match=r"^/dev/zero: is too large, expected at most 3 MB$"):
        files.read_text(Path("/dev/zero"), 3 * 10**6)


def test_the_largest_schedule_that_is_planned_is_read():
    plan = serial(range(8), 250, offload=True)
    tasks = OPS_OF_A_UNIT * 8 * 250
    assert 2 * len(ir.to_text(plan)) / tasks * MOST_TASKS <= files.LARGEST_FILE  # others say twice as much of an op


def test_clocks_beyond_their_limit_are_refused(monkeypatch):
    schedule = serial(range(4), 3)
    assert verify(schedule) == []
    monkeypatch.setattr(causality, "MOST_CLOCKS", 100)
    with pytest.raises(BadInput, match="events on 7 lanes and channels, expected a product of at most 100"):
        verify(schedule)


def test_numbers_of_devices_and_microbatches_that_the_file_does_not_list_take_no_memory():
    schedule = serial([0, 1], 2)
    setup = msgspec.structs.replace(schedule.setup, devices=1000, microbatches=10**15, layers=10**15)
    Path("schedule.json").write_text(ir.to_text(ir.seal(msgspec.structs.replace(schedule, setup=setup))))
    assert run("show").exit_code == run("report").exit_code == run("diff /dev/null").exit_code == 0
    assert isinstance(run("verify").exception, Rejected)
    assert run("diff schedule.json").output == "schedule.json -> schedule.json: no difference\n"


def test_a_file_without_devices_is_shown_and_compared():
    schedule = serial([0, 1], 2)
    forecast = msgspec.structs.replace(schedule.forecast, times=[])
    empty = ir.seal(msgspec.structs.replace(schedule, devices=[], forecast=forecast))
    Path("schedule.json").write_text(ir.to_text(empty))
    for command in ("show", "show --svg a.svg", "report", "diff /dev/null", "diff schedule.json"):
        assert run(command).exit_code == 0, command
    assert isinstance(run("verify").exception, Rejected)


@pytest.mark.parametrize(
    ("cuts", "microbatch", "slice"),
    [([[0, 4], [0, 5]], 2, msgspec.UNSET), ([[0, 2, 4]], 2, 0), ([[0, 2, 4]], 1, 2)],
)
def test_an_op_of_a_unit_that_the_file_does_not_know_is_refused(cuts, microbatch, slice):
    schedule = serial([0], 2)
    units = ir.Units(tokens=4, cuts=cuts, shape_of=[0, 0])
    device = schedule.devices[0]
    op = msgspec.structs.replace(device.compute[0], microbatch=microbatch, slice=slice)
    device = msgspec.structs.replace(device, compute=[op, *device.compute[1:]])
    setup = msgspec.structs.replace(schedule.setup, units=units)
    wrong = ir.seal(msgspec.structs.replace(schedule, setup=setup, devices=[device]))
    Path("schedule.json").write_text(ir.to_text(wrong))
    for command in ("show", "show --svg a.svg", "report"):
        error = run(command).exception
        assert isinstance(error, BadInput), command
        assert "of which setup.units does not say the tokens" in str(error)
    assert isinstance(run("verify").exception, Rejected)


def test_an_op_that_lacks_its_slice_is_shown_as_rejected():
    schedule = serial([0], 2)
    units = ir.Units(tokens=4, cuts=[[0, 2, 4]], shape_of=[0, 0])
    device = schedule.devices[0]
    op = msgspec.structs.replace(device.compute[0], slice=1)
    device = msgspec.structs.replace(device, compute=[op, *device.compute[1:]])
    setup = msgspec.structs.replace(schedule.setup, units=units)
    wrong = ir.seal(msgspec.structs.replace(schedule, setup=setup, devices=[device]))
    Path("schedule.json").write_text(ir.to_text(wrong))
    assert run("show").exit_code == run("report").exit_code == 0
    assert isinstance(run("verify").exception, Rejected)


@pytest.mark.parametrize("device", [2, 2**64])
def test_a_stage_on_a_device_that_the_file_does_not_list_is_shown_as_rejected(device):
    schedule = serial([0, 1], 2)
    stages = [msgspec.structs.replace(schedule.stages[0], device=device), schedule.stages[1]]
    Path("schedule.json").write_text(ir.to_text(ir.seal(msgspec.structs.replace(schedule, stages=stages))))
    assert run("show").exit_code == run("report").exit_code == 0
    assert isinstance(run("verify").exception, Rejected)


def test_shapes_that_no_microbatch_has_take_no_memory():
    schedule = serial([0] * 1000, 1)
    units = ir.Units(tokens=1, cuts=[[0, 1]] * 50_000, shape_of=[0])
    setup = msgspec.structs.replace(schedule.setup, units=units)
    Path("schedule.json").write_text(ir.to_text(ir.seal(msgspec.structs.replace(schedule, setup=setup))))
    assert run("show").exit_code == 0
    assert isinstance(run("verify").exception, Rejected)


def test_of_many_violations_the_first_are_shown_and_all_are_listed():
    schedule = serial(range(4), 1000)
    forecast = schedule.forecast
    stages = [msgspec.structs.replace(cost, forward_ns=cost.forward_ns + 1) for cost in forecast.stages]
    wrong = msgspec.structs.replace(schedule, forecast=msgspec.structs.replace(forecast, stages=stages))
    Path("schedule.json").write_text(ir.to_text(wrong))
    shown = run("verify")
    assert "schedule.json: 4000 violations" in str(shown.exception)
    assert "and 3950 more, which --json lists" in shown.output
    assert "\n50. " in shown.output
    assert "\n51. " not in shown.output
    assert len(json.loads(run("verify --json").output)["violations"]) == 4000


def test_ops_of_no_length_that_wait_for_each_other_end_every_walk():
    schedule = serial([0, 0], 2, offload=True)
    device = schedule.devices[0]
    compute = [msgspec.structs.replace(op, after=["offload:1:1:1-2"]) for op in device.compute]
    d2h = [msgspec.structs.replace(op, after=["backward:0:1"]) for op in device.d2h]
    wrong = msgspec.structs.replace(schedule, devices=[msgspec.structs.replace(device, compute=compute, d2h=d2h)])
    times = [
        msgspec.structs.replace(
            lane, start_ns=[9 * (n > 0) for n in range(len(lane.start_ns))], end_ns=[9 for _ in lane.end_ns]
        )
        for lane in schedule.forecast.times
    ]
    found = analyse(msgspec.structs.replace(wrong, forecast=msgspec.structs.replace(schedule.forecast, times=times)))
    for item in found.items:
        assert found.chain(item)[-1].predecessor is None
