"""Which degrees of parallelism: all ways are bounded, the promising planned, and the best of these are best of all."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from math import prod

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from optpipe_compiler.cli.advise import _seconds
from optpipe_compiler.compiler import Options, settled
from optpipe_compiler.costs import gpus
from optpipe_compiler.costs.gpus import GpuFile
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import value_of
from optpipe_compiler.errors import BadInput, Infeasible
from optpipe_compiler.study.advise import (
    LONGEST,
    Costs,
    Degrees,
    Question,
    _divisors,
    _planned_microbatches,
    advise,
    ways,
)
from optpipe_compiler.study.planned import Instance, plan
from optpipe_compiler.study.pool import answers_here
from tests.instances import uniform
from tests.test_cli import TINY, run  # noqa: F401 - a fixture

MB = 10**6
QUESTION = Question(gpus=4, gpus_per_node=4, batch=8, sequence=128, mem_bytes=10**12, microbatch_sizes=(1, 2), best=3)


@given(st.integers(1, 64), st.sampled_from([1, 4, 8]), st.integers(1, 96), st.integers(1, 12), st.integers(1, 64))
def test_every_way_divides_gpus_batch_heads_and_layers(gpus, node, batch, layers, heads):
    question = replace(QUESTION, gpus=gpus, gpus_per_node=node, batch=batch, slices=(1, 2, 256))
    found = list(ways(question, layers, [heads]))
    assert len(set(found)) == len(found)
    for one in found:
        assert prod((one.pipeline, one.tensor, one.data)) == gpus
        assert prod((one.data, one.microbatch_size, one.microbatches)) == batch
        assert node % one.tensor == heads % one.tensor == 0
        assert one.pipeline <= layers
        assert one.slices == 1 or (one.pipeline > 1 == one.microbatch_size and one.slices <= question.sequence)
    if batch % gpus == 0:
        assert any(one.data == gpus for one in found)
    assert _divisors(gpus) == [one for one in range(1, gpus + 1) if gpus % one == 0]


@given(st.integers(1, LONGEST), st.integers(1, 10**4), st.sampled_from([1, 2, 4, 8]))
def test_what_is_planned_of_a_step_is_small_and_has_a_unit_for_each_device(pipeline, microbatches, slices):
    count = _planned_microbatches(Degrees(pipeline, 1, 1, 1, microbatches, slices))
    assert count <= min(microbatches, 4 * pipeline)
    assert count * slices >= min(pipeline, microbatches * slices)
    assert count * pipeline * slices <= max(2048, pipeline * (pipeline + slices - 1))
    assert count % pipeline == 0 or count == microbatches or count < pipeline


def costs(degrees: Degrees, *, tensor_ns: int = 2 * MB, data_ns: int = 10 * MB, **changes: float) -> Costs:
    """Eight layers, halved by tensor parallelism, doubled by microbatches of two; exchanges cost time of their own."""
    work = degrees.microbatch_size / degrees.tensor * 8 / degrees.pipeline
    layers = {f"{op}_ms": work * ms for op, ms in (("forward", 1.0), ("backward_input", 1.0), ("backward_weight", 1.0))}
    profile = uniform(degrees.pipeline, 8 // degrees.pipeline, **layers, p2p_ms=0.01, **changes)
    return Costs(profile, tensor_ns * (degrees.tensor > 1), data_ns * (degrees.data > 1))


def asked(question: Question = QUESTION, costs_of=costs):
    return advise(question, ways(question, 8, [4]), costs_of, pool=answers_here)


def test_the_best_of_those_planned_are_the_best_of_all():
    found = asked()
    every = asked(replace(QUESTION, best=10**6))
    assert every.next_bound_ns is None
    assert every.planned == found.considered > found.planned
    assert found.next_bound_ns > found.configurations[-1].step_ns
    steps = [row.step_ns for row in every.configurations]
    assert steps == sorted(steps)
    assert [row.degrees for row in found.configurations] == [row.degrees for row in every.configurations[:3]]
    assert all(row.bound_ns <= row.step_ns for row in every.configurations)


def test_one_microbatch_after_another_on_one_device_takes_its_work():
    alone = replace(QUESTION, gpus=1)
    (row, *_) = asked(alone).configurations
    assert row.degrees == Degrees(1, 1, 1, 1, 8)
    assert row.planned_microbatches == 4
    assert row.step_ns == row.bound_ns == 8 * 8 * 3 * MB
    assert row.limits == ["nothing above 5%"]
    assert row.tokens_per_s == pytest.approx(8 * 128 / (row.step_ns / 1e9))


def test_a_long_step_under_a_tight_cap_takes_as_long_as_its_plan():
    """Memory lets devices idle between any two microbatches: no lane is busy all the time."""
    profile = uniform(4, 2, p2p_ms=0.01, d2h_ms=20.0, h2d_ms=20.0, boundary_fraction=0.9)
    tight = replace(QUESTION, batch=64, mem_bytes=10**9, microbatch_sizes=(1,))
    (row,) = advise(tight, [Degrees(4, 1, 1, 1, 64)], lambda _: Costs(profile, 0, 0), pool=answers_here).configurations
    options = Options(mem_bytes=10**9, microbatches=64, devices=4, time_limit_s=0.0, workers=1, search=False)
    whole = plan(Instance(profile, settled(profile, replace(options, reproducible=True))))
    assert row.planned_microbatches == 16
    assert row.step_ns == pytest.approx(whole.value_ns, rel=0.02)
    assert row.step_ns >= row.bound_ns


def test_a_plan_is_chosen_for_the_whole_step_and_not_for_the_microbatches_that_are_planned():
    """Two stages per device fill the pipeline sooner; one per device is even, and better in the long run."""
    base = uniform(2, 2)
    layers = [
        structs.replace(
            base.layers[0],
            count=1,
            forward_ns=ms * MB,
            backward_input_ns=ms * MB,
            backward_weight_ns=MB,
            backward_ns=(ms + 1) * MB,
        )
        for ms in (32, 28, 27, 33)
    ]
    profile = structs.replace(base, layers=layers)

    def best(count):
        long = replace(QUESTION, gpus=2, batch=count, microbatch_sizes=(1,))
        degrees = [Degrees(2, 1, 1, 1, count)]
        return advise(long, degrees, lambda _: Costs(profile, 0, 0), pool=answers_here).configurations[0]

    short, long = best(8), best(200)
    assert (short.stages_per_device, long.stages_per_device) == (2, 1)
    assert short.planned_microbatches == long.planned_microbatches == 8
    assert long.step_ns < 1.01 * long.bound_ns


def test_a_step_of_any_length_is_answered():
    (row, *_) = asked(replace(QUESTION, gpus=1, batch=10**8, microbatch_sizes=(1,))).configurations
    assert row.step_ns == row.bound_ns == 10**8 * 8 * 3 * MB


def test_slices_are_best_where_whole_microbatches_cannot_fill_the_pipeline():
    few = replace(QUESTION, batch=2, slices=(1, 4))
    degrees = list(ways(few, 8, [1]))

    def sliceable(one):
        return costs(one, data_ns=10**12, sliceable=True, sequence_length=128)

    found = advise(few, degrees, sliceable, pool=answers_here).configurations
    assert found[0].degrees == Degrees(4, 1, 1, 1, 2, 4)
    assert found[0].step_ns < min(row.step_ns for row in found if row.degrees.slices == 1)
    told = []
    whole = advise(few, degrees, costs, pool=answers_here, on_ways=told.append)
    assert {row.degrees.slices for row in whole.configurations} == {1}
    assert told == [whole.considered] == [sum(one.slices == 1 for one in degrees)]


def test_one_schedule_alone_is_planned_where_it_is_asked_for_and_defined():
    found = asked(replace(QUESTION, method="interleaved-1f1b", batch=6, best=100))
    assert {row.method for row in found.configurations} == {"interleaved-1f1b"}
    assert all(row.degrees.microbatches % row.degrees.pipeline == 0 for row in found.configurations)
    assert found.infeasible > 0


@pytest.mark.parametrize("method", ["gpipe", "gpipe-recompute", "bfs"])
def test_a_schedule_that_holds_all_microbatches_needs_memory_for_the_whole_step(method):
    profile = uniform(4, 4, boundary_fraction=0.25)
    many, degrees = replace(QUESTION, batch=36, method=method), [Degrees(4, 1, 1, 1, 36)]
    options = Options(mem_bytes=10**12, microbatches=36, devices=4, method=method, search=False, reproducible=True)
    whole = plan(Instance(profile, settled(profile, replace(options, time_limit_s=0.0, workers=1))))
    (row,) = advise(many, degrees, lambda _: Costs(profile, 0, 0), pool=answers_here).configurations
    assert (row.planned_microbatches, row.peak_bytes) == (16, whole.peak_bytes)
    short = replace(many, mem_bytes=whole.peak_bytes - 1)
    with pytest.raises(Infeasible, match=rf"the most promising: {method} needs .* for 36 microbatches"):
        advise(short, degrees, lambda _: Costs(profile, 0, 0), pool=answers_here)


def test_that_no_known_schedule_fits_is_said(monkeypatch):
    def last(instance):
        return replace(plan(instance), method="one-at-a-time")

    monkeypatch.setattr("optpipe_compiler.study.advise.plan", last)
    (row, *_) = asked(replace(QUESTION, gpus=1)).configurations
    assert row.limits == ["no known schedule fits, --time-limit searches"]


def test_what_costs_time_is_avoided_and_named():
    def slow_network(degrees):
        return costs(degrees, data_ns=10**10)

    def slow_collectives(degrees):
        return costs(degrees, tensor_ns=10**10)

    assert {row.degrees.data for row in asked(costs_of=slow_network).configurations} == {1}
    everything = asked(replace(QUESTION, best=100), slow_collectives).configurations
    assert any("tensor-parallel collectives" in limit for row in everything for limit in row.limits)
    named = asked(replace(QUESTION, best=100), slow_network).configurations
    assert named[-1].limits[0].startswith("gradients between replicas ")


def test_a_tight_cap_is_named_and_weights_that_are_too_large_are_not_planned():
    def heavy(degrees):
        return costs(degrees, activation_gb=0.8, static_gb=8 / degrees.pipeline, d2h_ms=0.1, h2d_ms=0.1)

    found = asked(replace(QUESTION, mem_bytes=3 * 10**9), heavy)
    assert found.too_large > 0
    assert {row.degrees.pipeline for row in found.configurations} == {4}
    assert all(row.peak_bytes <= 3 * 10**9 for row in found.configurations)
    with pytest.raises(Infeasible, match=r"fits 1.00 GB .* weights and reserve alone are too large in "):
        asked(replace(QUESTION, mem_bytes=10**9), heavy)

    def wide(degrees):
        return costs(degrees, activation_gb=8)

    with pytest.raises(Infeasible, match="too large in 0; the most promising: "):
        asked(replace(QUESTION, mem_bytes=9 * 10**8), wide)


def test_that_one_schedule_does_not_fit_is_not_said_of_all():
    tight = replace(QUESTION, gpus=4, batch=8, mem_bytes=5 * 10**9, microbatch_sizes=(1,))
    degrees = [Degrees(4, 1, 1, 1, 8)]
    assert advise(tight, degrees, costs, pool=answers_here).infeasible == 0
    with pytest.raises(Infeasible, match=r"fits 5.00 GB \(.*\) each with gpipe alone: of 1, "):
        advise(replace(tight, method="gpipe"), degrees, costs, pool=answers_here)


def test_a_method_that_is_none_or_has_no_slices_to_run_is_refused_before_anything_is_estimated():
    with pytest.raises(BadInput, match="--method is 'best', expected one of gpipe"):
        replace(QUESTION, method="best")
    with pytest.raises(BadInput, match="--method seq1f1b is for microbatches cut into slices"):
        replace(QUESTION, method="seq1f1b", slices=(1,))
    with pytest.raises(BadInput, match="--method gpipe is for whole microbatches, expected --slices with 1 among them"):
        replace(QUESTION, method="gpipe", slices=(2, 4))
    with pytest.raises(BadInput, match="--method seq1f1b is for microbatches cut into slices"):  # no pipeline to fill
        asked(replace(QUESTION, gpus=1, method="seq1f1b", slices=(1, 2)))


def test_what_there_is_no_way_for_is_refused():
    with pytest.raises(BadInput, match="--gpus is 7, --global-batch 5 and --microbatch-sizes 1,"):
        advise(replace(QUESTION, gpus=7, batch=5), ways(replace(QUESTION, gpus=7, batch=5), 3, [4]), costs)


def test_the_command_prints_the_lines_that_plan_the_best(run, tmp_path):  # noqa: F811
    pytest.importorskip("torch")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY["llama"]))
    sheet = gpus.presets()["h100-sxm"]
    known = GpuFile(format="optpipe-gpus", version=1, revision=0, gpus=[structs.replace(sheet, name="ours")])
    (tmp_path / "gpu.json").write_bytes(msgspec.json.encode(known))
    asking = (
        "advise --model tiny.json --gpu gpu.json --gpus 4 --global-batch 2 --seq 64 --microbatch-sizes 1 --jobs 1 "
        "--mem 37.3GiB --links pairs"
    )
    found = run(*asking.split(), "--json")
    assert found.code == 0, found.err
    answer = json.loads(found.out)
    assert answer["planned"] <= answer["considered"]
    best = answer["configurations"][0]
    assert best["pipeline"] * best["tensor"] * best["data"] == 4
    assert {"microbatch_size", "slices", "stages_per_device", "limits"} <= set(best)
    for command in answer["commands"]:
        done = run(*shlex.split(command)[1:], *(["--time-limit", "1"] if "compile" in command else []))
        assert done.code == 0, done.err
    assert ir.load(tmp_path / "schedule.json").forecast.makespan_ns <= best["step_ns"]
    shown = run(*asking.split())
    assert f"ways: {answer['considered']};" in shown.err
    assert shown.out.splitlines()[-2:] == answer["commands"]
    assert "limits" in shown.out.splitlines()[0]


def test_replicas_share_the_optimizer_out():
    pytest.importorskip("torch")
    from optpipe_compiler.costs import models
    from optpipe_torch.estimates.estimate import EstimateOptions, estimate
    from optpipe_torch.estimates.spread import Spread

    options = EstimateOptions(model=models.load("gpt2"), gpu=gpus.load("a100-80gb"), devices=2, sequence_length=128)
    alone = [value_of(layer.static_bytes) for layer in estimate(options).expanded_layers()]
    spread = Spread(options, gpus=16)
    profile, tensor_ns, data_ns, again_ns = spread.costs(2, 1, 8, 1)
    shared = [value_of(layer.static_bytes) for layer in profile.expanded_layers()]
    assert [size - 16 * (size // 16) for size in alone] == [0] * len(alone)
    assert shared == [4 * (size // 16) + -(-12 * (size // 16) // 8) for size in alone]
    assert tensor_ns == again_ns == 0
    parameters = sum(alone) / 16 / 2
    assert data_ns == pytest.approx(14 * 20_000 + 4 * parameters * 7 / 8 / (0.8 * 25e9) * 1e9, rel=1e-6)
    pair, one = spread.costs(2, 2, 1, 1), spread.costs(1, 2, 1, 1)
    assert pair[1:] == (one[1], 0, one[3])
    assert 0 < pair[3] < pair[1] / 2  # inputs are gathered again: of four collectives forwards and four backwards, two


def test_the_page_is_what_the_answers_say():
    pytest.importorskip("torch")
    from bench import advise as bench

    assert bench.page(json.loads(bench.ANSWERS.read_text())) == bench.PAGE.read_text()


def test_short_steps_are_told_apart():
    assert [_seconds(ns) for ns in (10_534_000, 10_551_000, 1_234_567_890)] == ["0.01053", "0.01055", "1.235"]
