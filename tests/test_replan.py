"""Planning while training: costs are measured, better plans swapped in; training goes on whatever the planner does."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from itertools import combinations
from pathlib import Path
from random import Random

import msgspec
import pytest

pytest.importorskip("torch")
from runtime_cases import TEXT, tiny_profile
from test_runtime_library import LAYERS, alone, batch, builders, microbatch, start_ranks  # noqa: F401  (a fixture)

import runtime_torch
from optpipe_compiler.costs.from_run import read_run
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Model, Profile, Quantity, value_of
from optpipe_compiler.errors import BadInput
from optpipe_compiler.study import beside
from optpipe_compiler.view.replay import ReplayBar
from optpipe_compiler.view.report import render
from optpipe_compiler.view.report.trace import measured
from optpipe_torch.launch.job import Replanning
from optpipe_torch.launch.run import run as launch
from optpipe_torch.launch.trace import chrome_trace
from optpipe_torch.models import user_functions
from optpipe_torch.replan import Replanner, planner, profile_of
from optpipe_torch.replan.replanner import RESTARTS
from optpipe_torch.replan.trial import TRIAL, is_longer
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


def lopsided(profile: Profile) -> Profile:
    """Costs for which the last layer is a stage of its own, in time and in memory, which it is not worth."""
    layers = profile.expanded_layers()
    saved = sum(value_of(layer.saved_bytes) for layer in layers)
    layers[-1] = msgspec.structs.replace(layers[-1], forward_ns=2 * 10**7, saved_bytes=saved)
    found = msgspec.structs.replace(profile, layers=[msgspec.structs.replace(layer, count=1) for layer in layers])
    last = len(layers) - 1
    assert [stage.layers for stage in poor(found, 2).stages] == [(0, last), (last, last + 1)]
    return found


RANK = """
import sys
profile_path, schedule_path, keeps, slower = sys.argv[1], sys.argv[2], sys.argv[3] == "keep", sys.argv[3] == "slower"
sys.path[:0] = sys.argv[4:]
import dataclasses, time
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
        time.sleep(0.02 if replans and not replanner.swaps else 0.0)  # a planner that is idle needs a core
        if slower and rank == 1 and runner.schedule.digest != schedule.digest:
            result = dataclasses.replace(result, end_ns=result.end_ns + 10**9)
        if replans and replanner.after(result) is not None and len(replanner.swaps) == 1 + slower:
            done = len(losses) + 5
    if replans:
        replanner.close()
        first, *others = replanner.swaps
        assert first.measured_after_ns > 0
        assert (first.moved_layers == 0) == keeps, replanner.swaps
        assert first.digest != schedule.digest
        assert rank or [event["event"] for event in events][:3] == ["measured", "planned", "swap"], events
        assert [swap.undoes for swap in others[:1]] == [True] * slower
        assert not slower or others[0].digest == schedule.digest and others[0].moved_layers == first.moved_layers
        assert rank or not slower or len(replanner._learnt._runs) == 2  # what was undone has told of costs, too
        assert runner.schedule.digest == replanner.swaps[-1].digest
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
@pytest.mark.parametrize("way", ["keep", "slower"])
def test_a_loop_swaps_in_a_better_plan_and_trains_what_it_would_have_trained(tmp_path, way):
    """Weights move, and back again: as if steps were longer after the swap; or the placement is kept."""
    profile = costs(2) if way == "keep" else lopsided(costs(2))
    schedule = poor(profile, 8)
    (tmp_path / "profile.json").write_text(canonical(profile))
    (tmp_path / "schedule.json").write_text(canonical(schedule))
    arguments = [str(tmp_path / "profile.json"), str(tmp_path / "schedule.json"), way]
    for rank in start_ranks(RANK, *arguments):
        _, errors = rank.communicate(timeout=250)
        assert rank.returncode == 0, errors


REPLICAS = """
import sys
profile_path, schedule_path, kind = sys.argv[1:4]
sys.path[:0] = sys.argv[4:]
import time
from functools import partial
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import runtime_torch, test_runtime_library as case
from optpipe_torch.replan import Replanner

dist.init_process_group("gloo")
torch.set_num_threads(1)
case.MICROBATCHES = 8
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
replica = mesh.get_local_rank("data")
ddp = partial(DistributedDataParallel, process_group=mesh.get_group("data"))
prepare = partial(fully_shard, mesh=mesh["data"]) if kind == "fsdp" else ddp

def train(most, replans):
    schedule = runtime_torch.load_schedule(schedule_path)
    rank = mesh.get_local_rank("pipeline")
    stages = runtime_torch.build_stages(schedule, case.builders(), rank, "cpu", prepare=prepare, **case.microbatch())
    runner = runtime_torch.Runner(schedule, stages, group=mesh.get_group("pipeline"))
    optimizer = torch.optim.AdamW(stages.module.parameters(), lr=0.01)
    if kind == "watched" and replica == 1:  # as what logs gradients does on some ranks alone
        for parameter in stages.module.parameters():
            parameter.register_hook(lambda gradient: None)
    inputs, target = case.batch()
    target = (target + replica) % 16
    losses, over = [], torch.zeros(1)
    if replans:
        replanner = Replanner(runner, profile_path, optimizer=optimizer, keeps_placement=False, threshold=0.001,
                              plan_s=1.0)
    while len(losses) < most and not over:
        result = runner.step(*inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss)
        if replans:
            replanner.after(result)
            time.sleep(0.02)
            over += bool(replanner.notes or (replanner.swaps and replanner.swaps[-1].measured_after_ns))
            dist.all_reduce(over)
    if replans:
        replanner.close()
        if kind == "ddp":
            assert replanner.swaps[0].moved_layers
            assert runner.schedule.digest == replanner.swaps[-1].digest
        elif dist.get_rank() == 0:
            said = replanner.notes[0].said
            why = "has parts in FSDP2 or DDP, which cannot move" if kind == "fsdp" else "has a hook, which would stay"
            assert why in said, said
            assert said.endswith("the placement is kept from now on"), said
            assert runner.schedule.digest == schedule.digest
    gathered = [None] * 4
    dist.all_gather_object(gathered, losses)
    return [max(x for x in step if x is not None) for step in zip(*gathered)], len(losses)

found, steps = train(20000, True)
assert steps < 20000
plain, _ = train(steps, False)
assert found == plain
dist.destroy_process_group()
"""


@pytest.mark.runtime
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "watched"])
def test_replicas_swap_together_and_what_cannot_move_is_refused_by_name(tmp_path, kind):
    profile = lopsided(costs(2))
    (tmp_path / "profile.json").write_text(canonical(profile))
    (tmp_path / "schedule.json").write_text(canonical(poor(profile, 8)))
    for rank in start_ranks(REPLICAS, str(tmp_path / "profile.json"), str(tmp_path / "schedule.json"), kind, world=4):
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
            time.sleep(0.01)  # for the planner, which is idle where the cores are busy
        assert until()
        replanner.close()

    return runner, profile, train


def test_a_planner_that_dies_is_started_again_and_answers(loop):
    runner, profile, train = loop
    said = []
    replanner = Replanner(runner, profile, threshold=0.99, plan_s=0.2, on_event=said.append)
    os.kill(replanner._planner.pid, signal.SIGKILL)
    train(replanner, lambda: any(event["event"] == "planned" for event in said))
    assert [event["event"] for event in said] == ["measured", "planner", "measured", "planned"]
    assert "the planner died: killed by signal 9 (SIGKILL)" in said[1]["said"]
    assert "it is started again" in said[1]["said"]
    assert [note.said for note in replanner.notes] == [said[1]["said"]]


def test_a_planner_that_is_stopped_or_dies_all_the_time_is_given_up_and_training_goes_on(loop, monkeypatch):
    runner, profile, train = loop
    monkeypatch.setattr(planner, "LEAST_S", 0.0)
    monkeypatch.setattr(planner, "PATIENCE", 0)
    said, pids = [], set()
    replanner = Replanner(runner, profile, on_event=said.append, plan_s=30.0)
    os.kill(replanner._planner.pid, signal.SIGSTOP)

    def is_given_up():
        pids.add(replanner._planner.pid)
        return sum(event["event"] == "planner" for event in said) == 1 + RESTARTS

    train(replanner, is_given_up)
    notes = [note.said for note in replanner.notes]
    assert all("gave no answer in time and was ended" in note for note in notes)
    assert "training goes on with the present schedule" in notes[-1]
    assert len(pids) == 1 + RESTARTS
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert replanner.swaps == []


def test_a_question_that_no_planner_reads_holds_no_step_up():
    """A stopped planner takes no more than fits into its pipe."""
    asked = planner.Planner()
    os.kill(asked.pid, signal.SIGSTOP)
    asked.ask(schedule=poor(costs(2), 2), time_limit_s=1.0, profile=b"0" * 10**7)
    assert asked.hear() is None
    asked.end()  # a question that held the step up would have held it up for ever


class Offering:
    """A planner that finds the same plan again and again, a tenth better than what runs."""

    is_alive, is_busy, took_ns, pid = True, False, 7, None

    def __init__(self, schedule):
        self.schedule, self.questions, self.answers = schedule, [], []

    def ask(self, **question):
        self.questions.append(question)
        self.answers = [beside.Answer(canonical(self.schedule), self.schedule.digest, 100, 90, 0)]

    def hear(self):
        return self.answers.pop() if self.answers else None

    def end(self):
        self.is_alive = False


@pytest.fixture
def offered(loop):
    """Train with a plan that is offered; steps take 100 ms, after a swap so many, all off by up to a tenth."""
    runner, profile, _ = loop
    first, other = runner.schedule, quick(profile, GB, method="1f1b", microbatches=2).schedule
    assert first.digest != other.digest
    inputs, target = batch()

    def train(milliseconds, steps=60, *, is_drift=False):
        """With `is_drift` steps take as long from the first swap on, whatever runs."""
        said, draw = [], Random(0)
        replanner = Replanner(runner, profile, on_event=said.append)
        replanner.close()
        replanner._planner = Offering(other)
        for _ in range(steps):
            result = runner.step(*inputs, target=target)
            is_before = runner.schedule is first and not (is_drift and replanner.swaps)
            took = (100 if is_before else milliseconds) * draw.uniform(0.9, 1.1) * 10**6
            replanner.after(dataclasses.replace(result, end_ns=result.start_ns + round(took)))
        return replanner, said, first, other

    return train


def test_a_plan_that_turns_out_slower_is_undone_and_not_taken_again(offered):
    replanner, said, first, other = offered(125)
    swap, back = replanner.swaps
    assert [(one.digest, one.undoes) for one in replanner.swaps] == [(other.digest, False), (first.digest, True)]
    assert replanner.schedule is first
    assert back.step == swap.step + 1 + TRIAL + 1  # the first warms up; the last is seen one step later
    assert (swap.forecast_before_ns, swap.forecast_after_ns) == (100, 90)
    assert (back.forecast_before_ns, back.forecast_after_ns) == (90, 100)
    for before, after, one in ((100, 125, swap), (125, 100, back)):
        assert one.measured_before_ns == pytest.approx(before * 10**6, rel=0.1)
        assert one.measured_after_ns == pytest.approx(after * 10**6, rel=0.1)
    assert [event["swaps"] for event in said if event["event"] == "planned"] == [True, False, False]
    assert [question["refused"] for question in replanner._planner.questions] == [set(), {other.digest}, {other.digest}]


def test_a_plan_that_was_undone_while_the_machine_became_slower_is_taken_once_more(offered):
    replanner, _, first, other = offered(125, is_drift=True)
    assert [(one.digest, one.undoes) for one in replanner.swaps] == [
        (other.digest, False),
        (first.digest, True),
        (other.digest, False),
    ]
    assert replanner.schedule.digest == other.digest


@pytest.mark.parametrize("milliseconds", [80, 100, 103])
def test_a_plan_that_is_slower_by_no_more_than_noise_explains_stays(offered, milliseconds):
    replanner, said, _, other = offered(milliseconds)
    assert [one.digest for one in replanner.swaps] == [other.digest]
    assert replanner.schedule.digest == other.digest
    assert [event["swaps"] for event in said if event["event"] == "planned"] == [True, False, False, False]


def test_steps_are_longer_where_hardly_a_pair_says_otherwise():
    steady, longer = [100.0, 101, 102, 103, 104], [110.0, 111, 112, 113, 114]
    assert is_longer(longer, steady, 0.05)
    assert not is_longer(longer, steady, 0.1)
    assert not is_longer(steady, longer, 0.0)
    assert is_longer([*longer[1:], 102.5], steady, 0.0)  # two pairs of 25 may say otherwise
    assert not is_longer([*longer[1:], 101.5], steady, 0.0)
    assert not is_longer([], steady, 0.0)


def test_equal_steps_pass_for_longer_ones_as_rarely_as_is_said():
    ways = [set(after) for after in combinations(range(2 * TRIAL), TRIAL)]
    assert sum(is_longer(after, set(range(2 * TRIAL)) - after, 0.0) for after in ways) == 4
    assert len(ways) == 252


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


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"profile": 5}, "profile is 5, expected a profile or its path"),
        ({"runner": 5}, "runner is 5, expected a Runner"),
        ({"optimizer": 5}, "optimizer is 5, expected one of torch, a list"),
        ({"optimizer": iter(())}, "optimizer is <.*>, expected one of torch, a list"),
        ({"on_event": 5}, "on_event is 5, expected a function"),
        ({"threshold": "2%"}, "threshold is '2%', expected a share"),
        ({"plan_s": None}, "plan_s is None, expected a number of seconds"),
        ({"window": 0}, "window is 0, expected at least 1 step"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_the_replanner(loop, wrong, sentence):
    runner, profile, _ = loop
    with pytest.raises(BadInput, match=sentence):
        Replanner(**{"runner": runner, "profile": profile, **wrong})


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
    for words in (("--threshold", "0.1"), ("--plan-time", "5"), ("--keep-placement",), ("--profile", "costs.json")):
        outcome = run("run", "schedule.json", *words)
        assert (outcome.code, outcome.err.count("\n")) == (2, 1)
        assert f"{words[0]} says how --replan plans, expected --replan" in outcome.err


BUILDER = "tests.user_layers:paced"


@pytest.mark.runtime
@pytest.mark.parametrize("way", ["moved", "sliced"])
def test_the_command_swaps_trains_the_same_and_shows_it_everywhere(run, monkeypatch, way):  # noqa: F811
    keeps = way != "moved"
    flag = Path("swapped").absolute()
    update = ReplayBar.update
    is_saved = []

    def watched(bar, event):
        update(bar, event)
        if event["event"] == "swap":
            flag.touch()
        elif flag.exists():
            is_saved.append(Path("last.json").exists() and Path("costs.json").exists())

    monkeypatch.setattr(ReplayBar, "update", watched)
    monkeypatch.setattr(user_functions, "_allowed", {BUILDER})  # this process measures the model, too
    model = Model(builder=BUILDER, config={"flag": str(flag)}, microbatch_size=2, sequence_length=8)
    profile = tiny_profile(model, cuts=(0, 4, 8) if way == "sliced" else ())
    profile = profile if keeps else lopsided(profile)
    first = poor(profile, 4)
    if way == "sliced":
        first = quick(profile, GB, method="seq1f1b", microbatches=4, slices=2).schedule
    Path("profile.json").write_text(canonical(profile))
    Path("schedule.json").write_text(canonical(first))
    train = ("--model", BUILDER, "--seed", "5", "--json")
    replan = ("--replan", "--plan-time", "0.5", "--threshold", "0.001", *["--keep-placement"] * keeps)
    files = ("--trace", "run.json", "--save", "last.json", "--save-profile", "costs.json")
    outcome = run("run", "schedule.json", "--steps", "60", *train, *replan, *files)
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    swap = found["swaps"][0]
    assert flag.exists(), found["planner"]
    assert is_saved
    assert all(is_saved)
    assert found["losses"] == json.loads(run("run", "schedule.json", "--steps", "60", *train).out)["losses"]
    assert len(found["losses"]) == 60
    assert (swap["moved_layers"] == 0) == (swap["moved_bytes"] == 0) == keeps
    assert 0 < swap["forecast_after_ns"] < swap["forecast_before_ns"]
    assert min(swap[name] for name in ("measured_before_ns", "measured_after_ns", "swap_ns", "planning_ns")) > 0
    assert f"step {swap['step']}: swapped in" in outcome.err
    last = ir.load("last.json")
    assert last.digest == found["swaps"][-1]["digest"]
    assert last.setup == first.setup
    assert run("verify", "last.json", "--profile", "costs.json").code == 0
    for name, schedule in (("schedule.json", first), ("last.json", last)):
        assert run("report", name, "--trace", "run.json", "-o", "page.html").code == 0
        page = Path("page.html").read_text()
        rows = re.findall(r"<tr[^>]*><td>(\d+)(?: \(back\))?</td><td>(sha256:\w+)</td>.*?</tr>", page)
        assert rows == [(str(one["step"]), one["digest"][:15]) for one in found["swaps"]]
        drawn = measured([Path("run.json")], schedule).ran
        assert {op.id for device in schedule.devices for op in device.compute if op.name == "forward"} <= drawn.keys()
    assert run("profile", "--from-run", "run.json", "--profile", "profile.json").code == 0
    again = run("run", "last.json", "--steps", "1", *train, "--replan", "--profile", "costs.json")
    assert again.code == 0, again.err


@pytest.mark.parametrize("swaps", [0, 1, 2])
def test_a_run_that_is_interrupted_has_saved_what_ran_last_or_says_that_nothing_was_swapped(
    run,  # noqa: F811
    monkeypatch,
    swaps,
):
    def interrupted(schedule, *, on_event, **options):
        for number in range(swaps):
            said = {"text": f"plan {number}", "profile_text": f"costs {number}"}
            on_event({"event": "schedule", "is_last": False, **said})
        raise KeyboardInterrupt

    monkeypatch.setattr("optpipe_torch.launch.run.run", interrupted)
    profile = tiny_profile()
    Path("profile.json").write_text(canonical(profile))
    Path("schedule.json").write_text(canonical(poor(profile, 4)))
    Path("last.json").write_text("before")
    outcome = run("run", "--replan", "--save", "last.json", "--save-profile", "costs.json")
    assert (outcome.code, outcome.out) == (130, "")
    said = "as of the last swap" if swaps else "not written, nothing was swapped"
    assert outcome.err == f"optpipe: last.json and costs.json: {said}\n\noptpipe: interrupted\n"
    assert Path("last.json").read_text() == (f"plan {swaps - 1}" if swaps else "before")
    assert Path("costs.json").exists() == bool(swaps)


@pytest.mark.runtime
def test_a_run_that_finds_nothing_in_time_ends_with_the_schedule_that_it_began_with():
    profile = tiny_profile()
    schedule = quick(profile, GB, method="1f1b", microbatches=2).schedule
    events = []
    how = Replanning(canonical(profile), True, 0.9, 60.0)
    report = launch(schedule, steps=7, data_paths=[TEXT], on_event=events.append, replanning=how)
    assert report.swaps == []
    assert len(report.losses) == 7
    (text,) = (event["text"] for event in events if event["event"] == "schedule")
    assert text == canonical(schedule)
    assert [event["step"] for event in events if event["event"] == "measured"] == [6]


def test_the_planner_answers_for_measured_costs():
    profile = costs(2)
    schedule = poor(profile, 4)
    slow = msgspec.structs.replace(profile, layers=[msgspec.structs.replace(profile.layers[0], forward_ns=2 * 10**6)])
    taken = {("forward", stage.stage, 0): 2.0 * 2 * 10**6 for stage in schedule.stages}
    question = beside.Question(slow, canonical(schedule), taken, 0.5, 0, keeps_placement=True)
    answer = beside.answer(question)
    assert answer.present_ns == quick(slow, GB, method="gpipe", microbatches=4).schedule.forecast.makespan_ns
    assert answer.found_ns < answer.present_ns
    assert answer.move_ns == 0
    assert 0 < answer.gain < 1


def test_a_search_that_had_hardly_any_of_a_processor_goes_on_from_what_it_found(monkeypatch):
    asked, clock = [], iter(range(0, 1000))
    real = beside.compiler.compile_schedule

    def compile_schedule(profile, options):
        asked.append(options)
        result = real(profile, options)
        forecast = msgspec.structs.replace(result.schedule.forecast, outcome="feasible")
        unproved = msgspec.structs.replace(result.schedule, forecast=forecast)
        checked = dataclasses.replace(result.checked, schedule=unproved)
        return dataclasses.replace(result, checked=checked, wall_s=options.time_limit_s)

    monkeypatch.setattr(beside.compiler, "compile_schedule", compile_schedule)
    monkeypatch.setattr(beside, "_processor_s", lambda: 0.04 * next(clock))
    question = beside.Question(costs(2), canonical(poor(costs(2), 2)), {}, 0.2, 0, keeps_placement=True)
    beside.answer(question)
    assert [options.seed for options in asked] == [0, 1, 2]  # after 0.12 s of a processor
    assert all(len(options.seeds) == 2 for options in asked[1:])


def test_plans_that_are_refused_are_not_offered_again():
    question = beside.Question(costs(2), canonical(poor(costs(2), 4)), {}, 0.3, 0, keeps_placement=True)
    first = beside.answer(question)
    again = beside.answer(dataclasses.replace(question, refused=frozenset({first.digest})))
    assert first.digest != again.digest


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
        assert measured([path], schedule).end_ns == schedule.forecast.makespan_ns
    with pytest.raises(BadInput, match="is the trace of a run of another schedule"):
        measured([path], quick(costs(2), GB, microbatches=4, time_limit_s=0.0).schedule)


def test_the_report_of_a_trace_shows_the_swap(tmp_path):
    path, _, second = swapped(tmp_path)
    ran = measured([path], second)
    page = render(second, measured=ran, swaps=ran.swaps)
    assert "Swaps while the run went on" in page
    assert second.digest[:15] in page
    assert "9 ns to 8 ns" in page
    assert "Swaps while" not in render(second, measured=measured([path], second))
