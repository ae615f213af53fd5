"""The Python interface: what a notebook does, answers that are those of the commands, errors of one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pandas as pd
import pytest

import optpipe
from optpipe_compiler import compiler, published
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from tests.test_cli import run  # noqa: F401  (a fixture)

GB = 10**9
COSTS = optpipe.uniform_profile(devices=2, layers_per_device=2, d2h_ms=0.5, h2d_ms=0.5)
SLICED = optpipe.uniform_profile(devices=2, layers_per_device=2, sliceable=True)
QUICK = {"microbatches": 4, "time_limit": 1.0, "workers": 1}


@pytest.fixture(scope="module")
def plan() -> optpipe.Plan:
    return optpipe.compile(COSTS, mem="1GB", **QUICK)


@pytest.fixture
def registry():
    """Own schedules of a test are gone after it."""
    before = dict(published.METHODS)
    yield
    published.METHODS.clear()
    published.METHODS.update(before)


def test_the_import_loads_nothing_that_takes_time():
    heavy = {"numpy", "numba", "ortools", "rich", "torch", "msgspec", "click"}
    code = f"import sys, optpipe; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_name_that_is_promised_is_there_and_documented():
    for name in optpipe.__all__:
        assert getattr(optpipe, name).__doc__, name
    assert dir(optpipe) == sorted(optpipe.__all__)
    with pytest.raises(AttributeError, match="module 'optpipe' has no attribute 'compil'"):
        optpipe.compil  # noqa: B018


def test_every_package_tells_type_checkers_its_types():
    """Without the mark all that `optpipe` and `runtime_torch` take and return is Any to a user's mypy."""
    root = Path(optpipe.__file__).parents[1]
    packages = [home.parent.name for home in root.glob("*/__init__.py") if home.parent.name.startswith(("opt", "run"))]
    assert [name for name in packages if not (root / name / "py.typed").exists()] == []
    assert {"optpipe", "optpipe_compiler", "optpipe_torch", "runtime_torch"} <= {*packages}


def test_a_plan_for_other_microbatches_keeps_the_placement_of_the_one_before(plan):
    again = optpipe.compile(COSTS, mem="2GB", start=plan, keep_placement=plan, microbatches=7, time_limit=0.0)
    where = [[(stage.device, stage.layers) for stage in one.schedule.stages] for one in (plan, again)]
    assert where[0] == where[1]
    assert again.schedule.setup.microbatches == 7


def test_a_plan_says_what_its_file_says(plan, tmp_path):
    plan.save(tmp_path / "schedule.json")
    record = ir.load(tmp_path / "schedule.json")
    assert record == plan.schedule
    assert (plan.makespan_ns, plan.lower_bound_ns) == (record.forecast.makespan_ns, record.forecast.lower_bound_ns)
    assert plan.lower_bound_ns <= plan.value_ns
    assert plan.peak_bytes == max(device.peak_bytes for device in record.devices) <= GB
    again = optpipe.read_schedule(tmp_path / "schedule.json", COSTS)
    assert (again.schedule, again.profile) == (record, COSTS)
    assert optpipe.verify(tmp_path / "schedule.json", COSTS) == []


def test_ops_are_rows_that_pandas_takes(plan):
    table = pd.DataFrame(plan.ops())
    compute = table[table.lane == "compute"]
    assert list(table.start_ns) == sorted(table.start_ns)
    assert table.end_ns.max() - table.start_ns.min() == plan.makespan_ns
    assert set(table[table.kind == "forward"].op) == {f"{s}F{m}" for s in table.stage.unique() for m in range(4)}
    busy = (compute.end_ns - compute.start_ns).sum()
    assert 1 - busy / (2 * plan.makespan_ns) == pytest.approx(plan.bubble_fraction)
    assert pd.DataFrame(plan.devices()).idle.mean() == pytest.approx(plan.bubble_fraction)
    assert len(plan.ops(messages=True)) > len(table)


def test_baselines_come_with_whose_they_are_and_those_that_fit_first(plan):
    rows = plan.baselines
    assert {row.name for row in rows} == {name for name, one in published.METHODS.items() if not one.sliced}
    fits = [row for row in rows if row.fits]
    assert rows[: len(fits)] == fits
    assert all(one.makespan_ns <= other.makespan_ns for one, other in pairwise(fits))
    assert all(plan.makespan_ns <= row.makespan_ns for row in fits)
    assert {row.kind for row in rows} == {"paper", "stock", "composition"}


def test_a_plan_shows_itself(plan, tmp_path):
    assert "<svg" in plan._repr_html_()
    ElementTree.fromstring(plan.svg())
    assert repr(plan).startswith(f"<Plan by {plan.method}: ")
    assert "baselines, same costs and cap" in str(plan)
    plan.report(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().startswith("<!")


def test_profiles_are_made_written_and_read(tmp_path, run):  # noqa: F811
    optpipe.write_profile(COSTS, tmp_path / "p.json")
    assert optpipe.read_profile(tmp_path / "p.json") == COSTS
    assert optpipe.compile(tmp_path / "p.json", mem=GB, method="gis-h-offload", **QUICK).peak_bytes <= GB
    run("profile", "uniform", "--devices", "3", "--p2p-ms", "0.2", "--head-ms", "1,2,3", "-o", "c.json")
    same = optpipe.uniform_profile(devices=3, p2p_ms=0.2, head_ms=(1, 2, 3))
    assert Path("c.json").read_text() == canonical(same)


def test_a_model_and_a_gpu_make_the_profile_that_the_command_makes(run):  # noqa: F811
    pytest.importorskip("torch")
    run("profile", "--model", "gpt2", "--gpu", "a100-80gb", "--devices", "2", "--links", "pairs", "-o", "c.json")
    assert Path("c.json").read_text() == canonical(
        optpipe.estimate_profile("gpt2", "a100-80gb", devices=2, links="pairs")
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"links": "pair"}, "links is 'pair', expected one of pairs, none"),
        ({"dtype": "fp8"}, "dtype is 'fp8', expected one of bf16, fp16"),
        ({"attention": "maths"}, "attention is 'maths', expected one of flash, math, None"),
        ({"accumulation": "fuse"}, "accumulation is 'fuse', expected one of torch, fused"),
        ({"granularity": "auto"}, "granularity is 'auto', expected one of block, half"),
        ({"sequence_length": 0}, "--seq is 0, expected 1 to"),
    ],
)
def test_an_estimate_refuses_what_it_does_not_know(options, sentence):
    pytest.importorskip("torch")
    with pytest.raises(optpipe.BadInput, match=sentence):
        optpipe.estimate_profile("gpt2", "a100-80gb", devices=2, **options)


def test_a_plan_starts_from_an_earlier_one(plan):
    more = optpipe.compile(COSTS, mem="1.1GB", microbatches=4, time_limit=0, start=plan)
    assert more.makespan_ns <= plan.makespan_ns


def test_bounds_are_those_of_plans(plan):
    low, high = optpipe.bounds(COSTS, ["1GB", 2 * GB], microbatches=4)
    assert low.lower_bound_ns <= plan.makespan_ns
    assert high.lower_bound_ns <= low.lower_bound_ns
    assert low.argument
    assert low.least_mem_bytes <= max(device.peak_bytes for device in plan.schedule.devices)


@pytest.mark.parametrize(
    "units", [{}, {"slices": 2}, {"lengths": (500, 4096, 64, 1000)}], ids=["whole", "cut", "packed"]
)
def test_bounds_say_below_which_memory_nothing_fits(units):
    costs = optpipe.uniform_profile(devices=2, layers_per_device=2, sliceable=True, sequence_length=4096)
    (row,) = optpipe.bounds(costs, "1MB", microbatches=4, **units)
    found = optpipe.compile(costs, mem=row.least_mem_bytes, **QUICK, **units)
    assert max(device.peak_bytes for device in found.schedule.devices) == row.least_mem_bytes
    with pytest.raises(optpipe.Infeasible):
        optpipe.compile(costs, mem=row.least_mem_bytes - 1, **QUICK, **units)


def test_bounds_say_that_nothing_fits_where_one_activation_would():
    """A backward needs more than the activation: between the two caps only the proof of `compile` knows."""
    costs = optpipe.uniform_profile(devices=2, layers_per_device=2)
    names = ("backward_transient_bytes", "backward_input_transient_bytes", "backward_weight_transient_bytes")
    needs = dict.fromkeys(names, 300_000_000)
    layers = [msgspec.structs.replace(one, **needs) for one in costs.layers]
    costs = msgspec.structs.replace(costs, layers=layers)
    with pytest.raises(optpipe.Infeasible) as refused:
        optpipe.compile(costs, mem="600MB", **QUICK)
    low, high = optpipe.bounds(costs, ["600MB", refused.value.least_mem_bytes], microbatches=4)
    assert low.least_mem_bytes == refused.value.least_mem_bytes > low.mem_bytes
    assert high.least_mem_bytes <= high.mem_bytes
    found = optpipe.compile(costs, mem=low.least_mem_bytes, **QUICK)
    assert found.peak_bytes == low.least_mem_bytes


def test_a_plan_explains_itself(plan):
    found = plan.explain(time_limit=0)
    assert str(found).startswith("A step takes ")
    assert "<pre" in found._repr_html_()
    table = pd.DataFrame(found.what_ifs)
    assert (table.found <= table.at_most + 1e-9).all()
    assert set(table.family) >= {"memory", "link", "microbatches"}


def test_ctrl_c_ends_a_comparison(plan, monkeypatch):
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "under_noise", interrupt)
    with pytest.raises(KeyboardInterrupt):
        plan.compare(methods="gpipe,1f1b")


def test_a_plan_is_compared_with_others_and_with_known_schedules(plan, tmp_path):
    worse = optpipe.compile(COSTS, mem="1GB", method="gis-h-offload", **QUICK)
    worse.save(tmp_path / "worse.json")
    found = plan.compare(worse, tmp_path / "worse.json", methods="gpipe,gis-h-offload")
    table = pd.DataFrame(found.rows)
    assert set(table.name) == {"this plan", "plan 2", str(tmp_path / "worse.json"), "gis-h-offload"}
    assert list(table.makespan_ns) == sorted(table.makespan_ns)
    assert found.best.makespan_ns == plan.makespan_ns
    assert found.absent["gpipe"].startswith("does not fit")
    listed = plan.compare(methods=["gpipe", "gis-h-offload"])
    assert {row.name for row in listed.rows} == {"this plan", "gis-h-offload"}
    assert listed.absent == found.absent
    assert str(plan.compare(methods=[])) == str(plan.compare(methods=""))
    assert "1F1B".lower() not in str(found)


def test_a_sweep_is_rows_sentences_and_a_picture(tmp_path):
    found = optpipe.sweep(COSTS, "1GB:3GB:3", microbatches=[4], time_limit=0, path=tmp_path / "sweep.json")
    table = pd.DataFrame(found.points)
    assert list(table.mem_bytes) == [GB, 2 * GB, 3 * GB]
    assert list(table.makespan_ns) == sorted(table.makespan_ns, reverse=True)
    assert (table.microbatches_per_s <= table.most_microbatches_per_s + 1e-9).all()
    assert any("microbatches" in sentence for sentence in found.sentences())
    assert "<svg" in found._repr_html_()
    assert "devices batches cap step" in " ".join(str(found).splitlines()[1].split())
    assert len(json.loads((tmp_path / "sweep.json").read_text())["points"]) == 3
    again = optpipe.sweep(COSTS, ["1GB", "2GB"], microbatches=[4], time_limit=0, path=tmp_path / "sweep.json")
    assert again.points == found.points
    for loss in ("2%", 2, float("nan")):
        with pytest.raises(optpipe.BadInput, match="loss is "):
            found.answers(loss)
        with pytest.raises(optpipe.BadInput, match="loss is "):
            found.sentences(loss)


TORN = r"profile: \$.layers\[0\].residue_bytes is .*, expected captured_bytes"


def torn():
    """A profile changed in Python into one that no file may hold."""
    return msgspec.structs.replace(COSTS, layers=[msgspec.structs.replace(COSTS.layers[0], saved_bytes=1)])


@pytest.mark.parametrize(
    ("mistake", "error", "sentence"),
    [
        (lambda: optpipe.compile(COSTS, mem="4"), optpipe.BadInput, "mem is 4, which is 4 bytes; did you mean 4GB?"),
        (lambda: optpipe.compile(COSTS, mem=40), optpipe.BadInput, "mem is 40, which is 40 bytes; did you mean 40GB?"),
        (lambda: optpipe.compile(COSTS), optpipe.BadInput, "mem is missing and the profile does not know"),
        (lambda: optpipe.compile(COSTS, mem=4.0), optpipe.BadInput, "mem is 4.0, expected bytes or a size such as"),
        (
            lambda: optpipe.compile(COSTS, mem=GB, limit=3),
            optpipe.BadInput,
            "got 'limit', expected some of profile, mem",
        ),
        (
            lambda: optpipe.compile(COSTS, mem=GB, objective="time"),
            optpipe.BadInput,
            "--objective is 'time', expected one of makespan, span",
        ),
        (
            lambda: optpipe.bounds(COSTS, "1GB", placement="ring"),
            optpipe.BadInput,
            "--placement is 'ring', expected one of auto, linear, loop, v",
        ),
        (
            lambda: optpipe.compile(COSTS, mem=GB, slices="some"),
            optpipe.BadInput,
            "--slices is 'some', expected at least 1",
        ),
        (
            lambda: optpipe.compile(SLICED, mem=GB, lengths=()),
            optpipe.BadInput,
            "--lengths is empty, expected the tokens",
        ),
        (lambda: optpipe.compile(COSTS, mem="1MB", **QUICK), optpipe.Infeasible, "the smallest --mem that would do"),
        (lambda: optpipe.uniform_profile(device=2), optpipe.BadInput, "got 'device', expected some of"),
        (lambda: optpipe.bounds(COSTS, GB, host_mem_bytes=3), optpipe.BadInput, "got 'host_mem_bytes', expected some"),
        (lambda: optpipe.compile(COSTS, mem_bytes="40GB"), optpipe.BadInput, "got 'mem_bytes', expected 'mem'"),
        (
            lambda: optpipe.compile(COSTS, mem=GB, microbatches=2.5),
            optpipe.BadInput,
            "microbatches is 2.5, expected a whole number or None",
        ),
        (
            lambda: optpipe.compile(COSTS, mem=GB, devices=True),
            optpipe.BadInput,
            "devices is True, expected a whole number or None",
        ),
        (lambda: optpipe.compile(COSTS, mem=GB, devices=0), optpipe.BadInput, "--devices is 0, expected at least 1"),
        (
            lambda: optpipe.compile(COSTS, mem=GB, time_limit="5"),
            optpipe.BadInput,
            "time_limit is '5', expected a number or None",
        ),
        (lambda: optpipe.compile(COSTS, mem=GB, seed=1.5), optpipe.BadInput, "seed is 1.5, expected a whole number"),
        (
            lambda: optpipe.compile(COSTS, mem=GB, offload="no"),
            optpipe.BadInput,
            "offload is 'no', expected True or False",
        ),
        (
            lambda: optpipe.compile(COSTS, mem=GB, slices=True),
            optpipe.BadInput,
            "slices is True, expected a whole number",
        ),
        (
            lambda: optpipe.compile(SLICED, mem=GB, lengths=(1, 2.5)),
            optpipe.BadInput,
            "lengths.1. is 2.5, expected a whole number",
        ),
        (lambda: optpipe.compile(3, mem=GB), optpipe.BadInput, "profile is 3, expected a path"),
        (
            lambda: optpipe.compile(COSTS, mem=GB, start=3),
            optpipe.BadInput,
            "start is 3, expected a plan, a path, or a list of these",
        ),
        (
            lambda: optpipe.bounds(COSTS, None),
            optpipe.BadInput,
            "mem is None, expected bytes, a size such as '40GB', or a list",
        ),
        (
            lambda: optpipe.sweep(COSTS, GB),
            optpipe.BadInput,
            "mem is 1000000000, expected a list of caps, or a text such as",
        ),
        (
            lambda: optpipe.sweep(COSTS, "1GB", microbatches=4),
            optpipe.BadInput,
            "microbatches is 4, expected a list, each of it a whole number",
        ),
        (lambda: optpipe.sweep(COSTS, []), optpipe.BadInput, "mem is .., expected at least one cap"),
        (
            lambda: optpipe.sweep(COSTS, [GB], microbatches=[]),
            optpipe.BadInput,
            "microbatches is .., expected at least one, or None for the default",
        ),
        (
            lambda: optpipe.sweep(COSTS, [GB], devices=()),
            optpipe.BadInput,
            "devices is .., expected at least one, or None for the default",
        ),
        (
            lambda: optpipe.sweep(COSTS, "1GB", jobs=0),
            optpipe.BadInput,
            "jobs is 0, expected a whole number of at least 1",
        ),
        (
            lambda: optpipe.sweep(COSTS, "1GB", devices=[2, 0]),
            optpipe.BadInput,
            "devices.1. is 0, expected a whole number of at least 1",
        ),
        (
            lambda: optpipe.compile(COSTS, mem=GB, workers=-3),
            optpipe.BadInput,
            "workers is -3, expected at least 0, which stands for all cores",
        ),
        (lambda: optpipe.uniform_profile(devices="2"), optpipe.BadInput, "devices is '2', expected a whole number"),
        (lambda: optpipe.uniform_profile(head_ms=(1, 2)), optpipe.BadInput, "head_ms is .1, 2., expected 3 numbers"),
        (lambda: optpipe.verify(5), optpipe.BadInput, "schedule is 5, expected a path"),
        (lambda: optpipe.read_profile("no.json"), optpipe.BadInput, "no.json: cannot be read"),
        (lambda: optpipe.write_profile(5, "no.json"), optpipe.BadInput, "profile is 5, expected a path"),
        (lambda: optpipe.write_profile(torn(), "no.json"), optpipe.BadInput, TORN),
        (lambda: optpipe.compile(torn(), mem=GB), optpipe.BadInput, TORN),
        (
            lambda: optpipe.compile(COSTS, mem=GB, on_progress=3),
            optpipe.BadInput,
            "on_progress is 3, expected a function or None",
        ),
        (
            lambda: optpipe.sweep(COSTS, [GB], on_point=4),
            optpipe.BadInput,
            "on_point is 4, expected a function or None",
        ),
        (
            lambda: optpipe.schedule("x", stages_per_device="2")(list),
            optpipe.BadInput,
            r"stages_per_device.0. is '2', expected a whole number",
        ),
        (lambda: optpipe.schedule(5)(list), optpipe.BadInput, "name is 5, expected a text"),
        (lambda: optpipe.schedule("x")(5), optpipe.BadInput, "the schedule is 5, expected a function"),
        (lambda: optpipe.primus_order(Path("a.log"), None), optpipe.BadInput, "text is .*a.log.*, expected a text"),
        (lambda: optpipe.bounds(torn(), GB), optpipe.BadInput, TORN),
    ],
)
def test_mistakes_are_one_sentence(mistake, error, sentence):
    with pytest.raises(error, match=sentence.replace("?", r"\?")) as said:
        mistake()
    assert isinstance(said.value, optpipe.OptPipeError)


@pytest.mark.parametrize(
    ("ask", "own"),
    [
        (lambda **one: optpipe.compile(COSTS, **one), {"mem", "host_mem", "time_limit", "start", "keep_placement"}),
        (lambda **one: optpipe.bounds(COSTS, GB, **one), {"mem", "microbatches", "devices"}),
        (lambda **one: optpipe.sweep(COSTS, [GB], **one), {"mem", "host_mem", "time_limit", "path", "jobs"}),
    ],
)
def test_a_name_that_is_not_taken_gets_the_list_of_those_that_are(ask, own):
    with pytest.raises(optpipe.BadInput, match="got 'no_offload', expected some of ") as said:
        ask(no_offload=True)
    names = set(str(said.value).split("some of ")[1].split(", "))
    assert own | {"offload", "slices", "noise", "workers"} <= names
    for name in {*compiler.Options.__dataclass_fields__} - names:  # inner names
        with pytest.raises(optpipe.BadInput, match=f"got '{name}'"):
            ask(**{name: 1})


def test_whole_numbers_of_numpy_are_whole_numbers(tmp_path):
    def planned(count, seed):
        return optpipe.compile(COSTS, mem=GB, microbatches=count, seed=seed, time_limit=0.5, reproducible=True)

    assert planned(np.int64(4), np.int32(1)).schedule == planned(4, 1).schedule
    swept = optpipe.sweep(COSTS, ["8GB"], microbatches=[np.int64(4)], path=tmp_path / "s.json", time_limit=0.5)
    assert [point.microbatches for point in swept.points] == [4]
    assert optpipe.compile(COSTS, mem=np.int64(GB), **QUICK).schedule.setup.cap_bytes == GB
    assert optpipe.bounds(COSTS, np.int64(GB)) == optpipe.bounds(COSTS, [np.int64(GB)]) == optpipe.bounds(COSTS, GB)


def test_a_schedule_that_does_not_hold_is_refused_and_one_without_costs_cannot_be_explained(plan, tmp_path):
    text = ir.to_text(plan.schedule).replace(f'"makespan_ns": {plan.makespan_ns}', '"makespan_ns": 1', 1)
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(optpipe.Rejected, match="makespan"):
        optpipe.read_schedule(tmp_path / "s.json")
    assert optpipe.verify(tmp_path / "s.json")
    plan.save(tmp_path / "s.json")
    with pytest.raises(optpipe.BadInput, match="explain needs the plan's costs"):
        optpipe.read_schedule(tmp_path / "s.json").explain()


# -- schedules of one's own -----------------------------------------------------------------------------------------


def gpipe(problem):
    microbatches = range(problem.microbatches)
    return [[*(f"{s}F{m}" for m in microbatches), *(f"{s}B{m}" for m in microbatches)] for s in range(problem.devices)]


def test_an_own_schedule_is_timed_judged_and_named_like_a_built_in_one(registry, tmp_path):
    optpipe.schedule("my-gpipe")(gpipe)
    mine = optpipe.compile(COSTS, mem="5GB", method="my-gpipe", **QUICK)
    known = optpipe.compile(COSTS, mem="5GB", method="gpipe", **QUICK)
    assert mine.makespan_ns == known.makespan_ns
    assert mine.method == "my-gpipe"
    searched = optpipe.compile(COSTS, mem="5GB", **QUICK)
    [row] = [row for row in searched.baselines if row.name == "my-gpipe"]
    assert (row.kind, row.makespan_ns, row.fits) == ("own", known.makespan_ns, True)
    searched.save(tmp_path / "s.json")
    del published.METHODS["my-gpipe"]
    read = optpipe.read_schedule(tmp_path / "s.json")
    assert [row.kind for row in read.baselines if row.name == "my-gpipe"] == ["own"]
    optpipe.schedule("my-gpipe")(gpipe)
    compared = {row.name: row.makespan_ns for row in searched.compare(methods="own,gpipe").rows}
    assert compared["my-gpipe"] == compared["gpipe"] == known.makespan_ns


def test_an_own_heuristic_may_offload_recompute_and_win(registry):
    @optpipe.schedule("mine", placement="loop", stages_per_device=2, source="this test")
    def mine(problem):
        gis = published.recipe(problem, "gis-h-offload")
        lists = [[f"{t.stage}{t.kind.name}{t.microbatch}" for t in order] for order in gis.tasks()]
        for stage, microbatch in np.argwhere(gis.offloaded).tolist():
            lists[problem.stages[stage].device].append(f"{stage}D{microbatch}")
        return [" ".join(order) for order in lists]

    one = optpipe.compile(COSTS, mem="1GB", method="mine", **QUICK)
    other = optpipe.compile(COSTS, mem="1GB", method="gis-h-offload", **QUICK)
    assert one.makespan_ns == other.makespan_ns
    assert [op for op in one.ops() if op.lane == "d2h"]


@pytest.mark.parametrize(
    ("lists", "sentence"),
    [
        (["0F0"], "bad returns 1 list, expected one for each of 2 devices"),
        (None, "bad returns None, expected a list of ops for each device"),
        ("0F0 0B0", "bad returns '0F0 0B0', expected a list of ops for each device"),
        ([["0F0"], None], "bad returns None for device 1, expected a list of ops"),
        ([[0, 1], [2, 3]], "bad has 0 on device 0, expected an op such as '2F0'"),
        (["0F0 0X0", ""], "bad has '0X0' on device 0, expected an op such as '2F0'"),
        (["0F0 0D0:0-1 0B0", "1F0 1B0"], "bad has '0D0:0-1' on device 0, expected no layers and no slice"),
        (["0F0.0 0B0.0", "1F0 1B0"], "bad has '0F0.0' on device 0, expected no layers and no slice"),
        (["0F0 0B0", "0F1"], "bad has '0F1' on device 1, expected stages 1 and microbatches 0 to 1"),
        (["0F0 0B0 0F1 0B1", "1F0 1B0 1F1"], "bad has 1F1 of stage 1 and microbatch 1, expected F once, and B once"),
        (["0F0 0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"], "bad has 0F0 0F0 0B0 of stage 0 and microbatch 0"),
        (["0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1"], "bad has 0B0 before 0F0, expected it behind"),
        (["0F1 0F0 0B0 0B1", "1F0 1B0 1F1 1B1"], "bad has 0F0 after microbatch 1, expected them in order"),
        (["0F0 0B0 0F1 0B1 0H0", "1F0 1B0 1F1 1B1"], "bad has '0H0' on device 0, expected none"),
        (["0F0 0R0 0B0 0F1 0B1 0D0", "1F0 1B0 1F1 1B1"], "bad has 0R0 and 0D0, expected one of them"),
    ],
)
def test_what_is_no_order_is_refused_before_it_is_timed(registry, lists, sentence):
    optpipe.schedule("bad")(lambda problem: lists)
    with pytest.raises(optpipe.BadInput, match=sentence):
        optpipe.compile(COSTS, mem="5GB", method="bad", microbatches=2)


def test_an_order_that_waits_for_itself_is_a_baseline_without_a_time(registry):
    optpipe.schedule("stuck")(lambda problem: ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    found = optpipe.compile(COSTS, mem="5GB", microbatches=2, time_limit=0)
    [row] = [row for row in found.baselines if row.name == "stuck"]
    assert (row.makespan_ns, row.fits) == (None, False)
    assert row.remark.endswith("tasks never start")


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("1f1b", {}, "'1f1b' is the name of a built-in schedule, expected another one"),
        ("a,b", {}, "'a,b' cannot name a schedule"),
        ("own", {}, "'own' cannot name a schedule"),
        ("mine", {"placement": "round"}, "mine is for 'round' with 1 stage per device, expected one of linear"),
    ],
)
def test_names_and_placements_that_cannot_be_meant_are_refused(name, options, sentence):
    with pytest.raises(optpipe.BadInput, match=sentence):
        optpipe.schedule(name, **options)(gpipe)
