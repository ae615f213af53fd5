"""Executions of a contract: without noise they are the forecast, with noise no op starts before what it waits for."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs

from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Profile
from optpipe_compiler.errors import Infeasible
from optpipe_compiler.forecast.executions import durations, executed, makespans, quantiles
from optpipe_compiler.study.beside import executed_ns
from tests.instances import profiles, quick, uniform
from tests.small_schedules import Builder, Shape, profile_for

GB = 10**9
KINDS = ("forward", "backward", "backward_input", "backward_weight", "recompute", "offload", "reload")
PLAN = quick(uniform(2, 4, d2h_ms=0.5, h2d_ms=0.5, shared_links="pairs"), GB, time_limit_s=1.0).schedule


def spread(schedule, share):
    return {(kind, stage.stage): share for kind in KINDS for stage in schedule.stages}


@settings(max_examples=15, deadline=None)
@given(profiles(), st.integers(1, 5), st.sampled_from([1.0, 0.6]))
def test_without_noise_an_execution_takes_no_longer_than_forecast(profile, microbatches, share):
    roomy = quick(profile, 10**6, microbatches=microbatches).schedule
    try:
        plan = quick(profile, int(share * max(d.peak_bytes for d in roomy.devices)), microbatches=microbatches).schedule
    except Infeasible:
        plan = roomy
    found = makespans(plan, durations(plan))
    messages = sum(cost.send_activation_ns + cost.send_gradient_ns for cost in plan.forecast.stages)
    # a channel serves one message at a time, which the forecast does not count
    assert found[0] <= plan.forecast.makespan_ns + messages * microbatches


def test_without_noise_and_messages_at_one_time_the_execution_is_the_forecast():
    assert makespans(PLAN, durations(PLAN)).tolist() == [PLAN.forecast.makespan_ns]
    assert quantiles(PLAN, {}).p95_ns == PLAN.forecast.makespan_ns


@pytest.mark.parametrize("seed", range(6))
def test_longer_ops_never_make_a_step_shorter(seed):
    random = Random(seed)
    shape = Shape((0, 1, 1, 0) if seed % 2 else (0, 1, 2), microbatches=3)
    plan = Builder(shape, profile_for(shape, random), random).build()
    before = durations(plan)
    longer = {op: np.array([time[0], time[0] + random.randint(0, 30)]) for op, time in before.items()}
    found = makespans(plan, longer)
    assert found[0] <= found[1] <= found[0] + sum(time[1] - time[0] for time in longer.values())


def test_noise_costs_time_and_more_noise_more():
    found = [quantiles(PLAN, spread(PLAN, share)) for share in (0.05, 0.15, 0.3)]
    assert PLAN.forecast.makespan_ns < found[0].p50_ns < found[1].p50_ns < found[2].p50_ns
    assert all(one.p50_ns < one.p95_ns for one in found)
    assert found[1] == quantiles(PLAN, spread(PLAN, 0.15))
    assert found[1] != quantiles(PLAN, spread(PLAN, 0.15), seed=1)


def test_executions_of_one_seed_have_the_same_noise_for_the_same_ops_of_any_schedule():
    one, other = (executed(PLAN, spread(PLAN, share), 1500, seed=3) for share in (0.05, 0.1))
    assert np.corrcoef(one, other)[0, 1] > 0.8
    assert (executed(PLAN, spread(PLAN, 0.05), 1200, seed=3)[:1024] == one[:1024]).all()
    apart = executed(PLAN, spread(PLAN, 0.05), 1500, seed=4)
    assert abs(np.corrcoef(one, apart)[0, 1]) < 0.2


def test_slices_are_executed_as_forecast_but_for_messages_that_share_a_channel():
    profile = uniform(4, 2, p2p_ms=0.0, sliceable=True, sequence_length=4096, attention_share=0.3)
    plan = quick(profile, 40 * GB, microbatches=4, slices=4, method="seq1f1b").schedule
    assert makespans(plan, durations(plan)).tolist() == [plan.forecast.makespan_ns]


def test_copies_take_compute_in_executions_as_in_the_forecast():
    costs = uniform(2, 4, p2p_ms=0.0, d2h_ms=0.2, h2d_ms=0.2, copy_share=1.0)
    plan = quick(costs, 100 * GB, microbatches=6, method="interleaved-1f1b-offload").schedule
    assert makespans(plan, durations(plan)).tolist() == [plan.forecast.makespan_ns]
    links = [structs.replace(one, compute_permille=UNSET) for one in plan.forecast.links]
    free = structs.replace(plan, forecast=structs.replace(plan.forecast, links=links))
    assert makespans(free, durations(plan))[0] < plan.forecast.makespan_ns


def test_copies_of_no_length_at_one_moment_are_executed_in_the_order_of_their_lanes():
    times = {"backward_input_ns": 5, "backward_weight_ns": 5, "saved_bytes": 10}  # 10 bytes are away in 0 ns
    layers = [Layer(name=f"layer{n}", forward_ns=0 if n % 2 else 5, **times) for n in range(6)]
    link = Link(devices=[0, 1, 2], d2h_bytes_per_s=10**12, h2d_bytes_per_s=10**12)
    profile = Profile(name="instants", machine=Machine(devices=3, links=[link]), layers=layers)
    options = Options(mem_bytes=10**4, microbatches=12, method="interleaved-1f1b-offload", noise=0.1)
    result = compile_schedule(profile, options)
    assert result.quantiles is not None
    plan = result.schedule
    assert makespans(plan, durations(plan)).tolist() == [plan.forecast.makespan_ns]


def test_measured_ops_take_what_their_messages_take_besides():
    """Ops are measured without it, and forecasts count it: equal times give an equal step."""
    costs = uniform_profile(UniformOptions(devices=2))
    machine = structs.replace(costs.machine, p2p=[P2P(latency_ns=50_000, overhead_ns=300_000)])
    profile = structs.replace(costs, machine=machine)
    schedule = compile_schedule(profile, Options(10**14, 4, method="1f1b")).schedule
    measured = {
        (kind, cost.stage, 0): getattr(cost, f"{kind}_ns") - 300_000
        for cost in schedule.forecast.stages
        for kind in ("forward", "backward")
    }
    forecast = schedule.forecast.makespan_ns
    assert executed_ns(schedule, measured, profile) == executed_ns(schedule, {}, profile) == forecast
