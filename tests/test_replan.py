"""Planning while training: costs are measured, better plans swapped in; training goes on whatever the planner does."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
from runtime_cases import TEXT, tiny_profile
from test_runtime_library import LAYERS, alone, batch, builders, microbatch, start_ranks  # noqa: F401  (a fixture)

import runtime_torch
from optpipe_compiler.costs.from_run import read_run
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Profile, Quantity
from optpipe_compiler.errors import BadInput
from optpipe_compiler.study import beside
from optpipe_compiler.view.report import render
from optpipe_compiler.view.report.trace import measured, swaps
from optpipe_torch.launch.job import Replanning
from optpipe_torch.launch.run import run as launch
from optpipe_torch.launch.trace import chrome_trace
from optpipe_torch.replan import Replanner, planner, profile_of
from tests.instances import quick
from tests.test_cli import run  # noqa: F401  (a fixture)

GB = 10**9


def costs(devices: int, **layer: int) -> Profile:
    times = {"forward_ns": 10**6, "backward_input_ns": 10**6, "backward_weight_ns": 10**6}
    sizes = {"saved_bytes": 10**6, "output_bytes": 10**4, "static_bytes": 10**4}
    links = [Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)]
    machine = Machine(devices=devices, p2p=[P2P(latency_ns=1000, bytes_per_s=10**9)], links=links)
    return Profile(name="hand", machine=machine, layers=[Layer(name="layer", count=LAYERS, **(times | sizes | layer))])


def poor(profile: Profile, microbatches: int):
    """A plan that leaves much to gain."""
    return quick(profile, GB, method="gpipe", microbatches=microbatches).schedule


RANK = """
import sys
profile_path, schedule_path, keeps = sys.argv[1], sys.argv[2], sys.argv[3] == "keep"
sys.path[:0] = sys.argv[4:]
import time
import torch, torch.distributed as dist
import runtime_torch, test_runtime_library as case
from optpipe_torch.replan import Replanner

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
case.MICROBATCHES = 8

def train(steps, replans):
    schedule = runtime_torch.load_schedule(schedule_path)
    stages = runtime_torch.build_stages(schedule, case.builders(), rank, "cpu", **case.microbatch())
    runner = runtime_torch.Runner(schedule, stages)
    optimizer = torch.optim.AdamW(stages.module.parameters(), lr=0.01)
    inputs, target = case.batch()
    losses, events, done = [], [], steps
    if replans:
        replanner = Replanner(runner, profile_path, optimizer=optimizer, keeps_placement=keeps, threshold=0.001,
                              plan_s=1.0, on_event=events.append)
    while len(losses) < done:
        result = runner.step(*inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss)
        if replans and replanner.after(result) is not None and done == steps:
            done = len(losses) + 5
    if replans:
        replanner.close()
        assert replanner.swaps, events
        assert replanner.swaps[0].measured_after_ns > 0
        assert (replanner.swaps[0].moved_layers == 0) or not keeps
        assert runner.schedule.digest == replanner.swaps[-1].digest != schedule.digest
        assert rank or [event["event"] for event in events][:3] == ["measured", "planned", "swap"], events
    gathered = [None, None]
    dist.all_gather_object(gathered, ({name: p.detach() for name, p in stages.module.named_parameters()}, losses))
    weights = gathered[0][0] | gathered[1][0]
    return weights, [next(x for x in pair if x is not None) for pair in zip(gathered[0][1], gathered[1][1])]

found, losses = train(20000, True)
wanted, plain = train(len(losses), False)
assert losses == plain
for name, weight in wanted.items():
    assert torch.equal(found[name], weight), name
dist.destroy_process_group()
"""


@pytest.mark.runtime
@pytest.mark.parametrize("keeps", ["keep", "move"])
def test_a_loop_swaps_in_a_better_plan_and_trains_what_it_would_have_trained(tmp_path, keeps):
    profile = costs(2)
    (tmp_path / "profile.json").write_text(canonical(profile))
    (tmp_path / "schedule.json").write_text(canonical(poor(profile, 8)))
    arguments = [str(tmp_path / "profile.json"), str(tmp_path / "schedule.json"), keeps]
    for rank in start_ranks(RANK, *arguments):
        _, errors = rank.communicate(timeout=250)
        assert rank.returncode == 0, errors


@pytest.fixture
def loop(alone):  # noqa: F811
    """A runner on one device, its profile, and a function that trains until something is said."""
    profile = costs(1)
    schedule = poor(profile, 2)
    runner = runtime_torch.Runner(schedule, runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch()))
    inputs, target = batch()

    def train(replanner: Replanner, until, seconds: float = 120.0):
        end = time.monotonic() + seconds
        while not until() and time.monotonic() < end:
            replanner.after(runner.step(*inputs, target=target))
        assert until()
        replanner.close()

    return runner, profile, train


def test_a_planner_that_dies_is_reported_once_and_training_goes_on(loop):
    runner, profile, train = loop
    said = []
    replanner = Replanner(runner, profile, on_event=said.append)
    os.kill(replanner._planner.pid, signal.SIGKILL)
    steps = []
    train(replanner, lambda: steps.append(0) or len(steps) > 30)
    assert [event["event"] for event in said if event["event"] == "planner"] == ["planner"]
    assert "the planner died: killed by signal 9" in said[-1]["said"] or "the planner died" in said[0]["said"]


def test_a_plan_that_never_comes_is_given_up(loop, monkeypatch):
    runner, profile, train = loop
    monkeypatch.setattr(planner, "LEAST_S", 0.0)
    monkeypatch.setattr(planner, "PATIENCE", 0)
    said = []
    replanner = Replanner(runner, profile, on_event=said.append, plan_s=30.0)
    pid = replanner._planner.pid
    train(replanner, lambda: any(event["event"] == "planner" for event in said))
    assert "gave no answer in time" in said[-1]["said"]
    assert not Path(f"/proc/{pid}").exists()
    assert replanner.swaps == []


def test_a_plan_that_is_not_better_by_the_threshold_is_not_swapped_in(loop):
    runner, profile, train = loop
    said = []
    before = runner.schedule
    replanner = Replanner(runner, profile, threshold=0.99, plan_s=0.2, on_event=said.append)
    train(replanner, lambda: any(event["event"] == "planned" for event in said))
    assert not next(event for event in said if event["event"] == "planned")["swaps"]
    assert (runner.schedule, replanner.swaps) == (before, [])


def test_a_search_that_fails_is_said_and_is_no_end(loop, monkeypatch):
    runner, profile, train = loop
    said = []
    replanner = Replanner(runner, profile, plan_s=float("nan"), on_event=said.append)
    train(replanner, lambda: any(event["event"] == "planner" for event in said))
    assert "BadInput" in next(event for event in said if event["event"] == "planner")["said"]


def test_a_profile_of_another_schedule_is_refused(loop):
    runner, _, _ = loop
    with pytest.raises(BadInput, match="was planned with another profile"):
        Replanner(runner, costs(1, forward_ns=7))


def test_the_costs_of_any_loop_make_a_profile_with_its_noise(loop):
    runner, profile, _ = loop
    inputs, target = batch()
    results = [runner.step(*inputs, target=target) for _ in range(3)]
    found = profile_of(profile, runner.schedule, results)
    took = [op.end_ns - op.start_ns for result in results for op in result.ops if op.op_id.startswith("forward")]
    times = [layer.forward_ns for layer in found.expanded_layers()]
    assert all(isinstance(time, Quantity) and time.source == "measured" and time.samples == 6 for time in times)
    assert min(took) <= sum(time.value for time in times) <= max(took)


def test_the_command_refuses_what_cannot_be_planned_anew(run):  # noqa: F811
    schedule = poor(costs(2), 2)
    Path("schedule.json").write_text(canonical(schedule))
    outcome = run("run", "schedule.json", "--replan")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "profile.json: is not the profile that schedule.json was planned with" in outcome.err
    Path("costs.json").write_text(canonical(costs(2)))
    outcome = run("run", "schedule.json", "--replan", "--profile", "costs.json")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "--replan needs a schedule with a model" in outcome.err


@pytest.mark.runtime
def test_a_run_that_finds_nothing_in_time_ends_with_the_schedule_that_it_began_with():
    profile = tiny_profile()
    schedule = quick(profile, GB, method="1f1b", microbatches=2).schedule
    events = []
    how = Replanning(canonical(profile), True, 0.9, 60.0)
    report = launch(schedule, steps=5, data_paths=[TEXT], on_event=events.append, replanning=how)
    assert report.swaps == []
    assert len(report.losses) == 5
    (text,) = (event["text"] for event in events if event["event"] == "schedule")
    assert text == canonical(schedule)
    assert [event["step"] for event in events if event["event"] == "measured"] == [4]


def test_the_planner_answers_for_measured_costs():
    profile = costs(2)
    schedule = poor(profile, 4)
    slow = msgspec.structs.replace(profile, layers=[msgspec.structs.replace(profile.layers[0], forward_ns=2 * 10**6)])
    taken = {("forward", stage.stage): 2.0 * 2 * 10**6 for stage in schedule.stages}
    question = beside.Question(slow, canonical(schedule), taken, 0.5, 0, keeps_placement=True)
    answer = beside.answer(question)
    assert answer.present_ns == quick(slow, GB, method="gpipe", microbatches=4).schedule.forecast.makespan_ns
    assert answer.found_ns < answer.present_ns
    assert answer.move_ns == 0
    assert 0 < answer.gain < 1


# -- the record -----------------------------------------------------------------------------------------------------


def swapped(tmp_path):
    """A trace of two steps with one schedule and two with another, and both schedules."""
    first, second = poor(costs(2), 2), quick(costs(2), GB, microbatches=2, time_limit_s=0.0).schedule

    def ran(schedule, late):
        ops = [[], []]
        for times in schedule.forecast.times:
            lane = getattr(schedule.devices[times.device], times.lane)
            for op, start, end in zip(lane, times.start_ns, times.end_ns, strict=True):
                if not op.name.startswith(("send", "recv")):
                    ops[times.device].append((op.id, times.lane, late + start, late + end))
        return ops

    eras = [(first, [ran(first, 0), ran(first, GB)]), (second, [ran(second, 2 * GB), ran(second, 3 * GB)])]
    record = {"step": 2, "digest": second.digest, "forecast_before_ns": 9, "forecast_after_ns": 8, "swap_ns": 5}
    record |= {"measured_before_ns": 11, "measured_after_ns": None, "moved_layers": 0, "moved_bytes": 0}
    path = tmp_path / "run.json"
    text = chrome_trace(eras, swaps=[record | {"planning_ns": 1}])
    path.write_text(text.replace('"real": false', '"real": true'))  # as if the costs had a model
    return path, first, second


def test_a_trace_tells_which_steps_ran_which_schedule(tmp_path):
    path, first, second = swapped(tmp_path)
    events = json.loads(path.read_text())["traceEvents"]
    (mark,) = [event for event in events if event["name"] == "swap"]
    assert (mark["ts"], mark["args"]["step"]) == (2 * 10**6, 2)
    assert {op.step for op in read_run(path).ops} == {3}
    for schedule in (first, second):
        end = max(end for _, end in measured([path], schedule).values())
        assert end == schedule.forecast.makespan_ns


def test_the_report_of_a_trace_shows_the_swap(tmp_path):
    path, _, second = swapped(tmp_path)
    page = render(second, measured=measured([path], second), swaps=swaps([path]))
    assert "Swaps while the run went on" in page
    assert second.digest[:15] in page
    assert "9 ns to 8 ns" in page
    assert "Swaps while" not in render(second, measured=measured([path], second))
