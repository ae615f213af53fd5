"""The full model of slices and of microbatches of unequal length: their order, their carry, their costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model
from small_schedules import Shape, profile_for, random_cuts

from optpipe_compiler import compiler
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.documents.profile import Layer, Link, Machine, Profile, Sliceable
from optpipe_compiler.machine.orders import peaks, retime
from optpipe_compiler.model.placement import layout
from optpipe_compiler.model.problem import Caps, Freedom, Problem, Slicing, build, coarsen
from optpipe_compiler.model.schedule import Kind, Schedule
from optpipe_compiler.plan.slices import cut
from optpipe_compiler.solver.window import Window, WindowModel
from optpipe_compiler.solver.worker import Limits, Request, SearchEvent, solve
from optpipe_compiler.verify import verify
from tests import plans, test_slices
from tests.machines import dispatched
from tests.strategies import problems

UNIFORM = UniformOptions(
    devices=2,
    layers_per_device=1,
    sliceable=True,
    attention_share=0.4,
    kv_fraction=0.2,
    boundary_fraction=0.1,
    p2p_ms=0,
    d2h_ms=0.5,
    h2d_ms=0.5,
)


def sliced(cap: float, slices: int = 3, lengths: tuple[int, ...] = (32_768, 20_000), **fields: object) -> Problem:
    """Two devices and microbatches, each of some slices, in the solver's ticks and units; the cap in activations."""
    profile = uniform_profile(replace(UNIFORM, **fields))  # type: ignore[arg-type]
    (slicing, *_) = cut(profile, Options(0, len(lengths), lengths=lengths), slices)
    where = layout("linear", profile.machine.devices, 1, [1] * profile.machine.devices)
    caps = Caps(int(cap * 1e9), None)
    return coarsen(build(profile, where, len(lengths), caps, Freedom(), slicing=slicing))


@pytest.mark.parametrize("kind", ["makespan", "span"])
@pytest.mark.parametrize(("cap", "slices"), [(0.75, 3), (2.0, 3), (1.2, 1)])
def test_every_hint_of_units_is_complete_and_feasible_with_its_value(cap, slices, kind):
    one, kinds = sliced(cap, slices), set()
    for timed in dispatched(one):
        fates = (timed.count(Kind.D) > 0, timed.count(Kind.R) > 0, timed.count(Kind.W) > 0)
        if fates in kinds:
            continue
        kinds.add(fates)
        log = plans.log_of(Request(timed, Limits(kind, 0.1, seed=0, workers=1, reproducible=True)))
        value = timed.makespan if kind == "makespan" else timed.span
        assert f"The solution hint is complete and is feasible. Its objective value is {value}." in log
    assert len(kinds) > 1


@pytest.mark.parametrize("seed", range(16))
def test_the_best_of_one_device_is_that_of_all_orders(seed):
    """Where there are no messages the model's memory is the machine's: keys, values and their gradients included."""
    rng = Random(seed)
    microbatches, slices = [(1, 3), (2, 2), (1, 2), (2, 1)][seed % 4]
    profile = profile_for(Shape(placement=(0,), layers_per_stage=1, **random_cuts(rng, 3)), rng)
    lengths = tuple(rng.randint(slices, 12) for _ in range(microbatches))
    (slicing, *_) = cut(profile, Options(0, microbatches, lengths=lengths), slices)
    cap = sum(layer.saved_bytes for layer in profile.layers) + rng.randint(20, 80)
    freedom = Freedom(offload=False, recompute=microbatches * slices <= 3)
    where = layout("linear", 1, 1, [1])
    one = build(profile, where, microbatches, Caps(cap, None), freedom, slicing=slicing)
    found = plans.best(one, lambda activations: [a.split == 1 for a in activations.values()])
    assert (None if found is None else found[0]) == test_slices.best(one)


def test_slices_ascend_in_forwards_and_descend_in_backwards():
    one = sliced(4.0, 2, (32_768,), devices=1)
    for name, is_ascending in (
        ("forward", True),
        ("away", True),
        ("backward", False),
        ("weight", False),
        ("back", False),
        ("again", False),
    ):
        reached = {
            order: plans.best(one, lambda a, name=name, order=order: [_earlier(a, name, first=order)])
            for order in (0, 1)
        }
        assert reached[0 if is_ascending else 1] is not None
        assert reached[1 if is_ascending else 0] is None


def test_a_slice_that_is_not_recomputed_does_not_hold_up_the_recomputation_of_an_earlier_one():
    one = sliced(4.0, 2, (32_768,), devices=1)

    def again_at_once(a):
        over = a[0, 0].again + one.at(0, 0).recompute
        return [a[0, 0].recompute == 1, a[0, 1].keep == 1, over <= a[0, 1].forward]

    assert plans.best(one, again_at_once) is not None


def _earlier(a, name, *, first):
    return getattr(a[0, first], name) < getattr(a[0, 1 - first], name)


def test_what_the_last_slice_alone_can_give_up_it_can_in_the_solvers_units_too():
    """Of 3000 bytes, all keys and values, those of the first slice stay: what leaves is half a unit of a mean slice."""
    keys = Sliceable(carry_bytes=3000, carry_gradient_bytes=0)
    layer = Layer(name="l", forward_ns=30, backward_input_ns=30, backward_weight_ns=30, saved_bytes=3000, slices=keys)
    machine = Machine(devices=1, links=[Link(d2h_bytes_per_s=10**12, h2d_bytes_per_s=10**12)])
    profile = Profile(name="keys", machine=machine, layers=[layer], sequence_length=3)
    slicing = Slicing(3, ((0, 2, 3),), (0,))
    one = build(profile, layout("linear", 1, 1, [1]), 1, Caps(3000, None), Freedom(), slicing=slicing)
    coarse = coarsen(one)
    assert coarse.unit_bytes == 1000
    assert coarse.able(0) == one.able(0) == (True, True, True)
    for name in ("offload", "recompute"):
        assert plans.best(coarse, lambda a, name=name: [getattr(a[0, 1], name) == 1]) is not None


def test_windows_of_slices_keep_what_is_outside_and_every_law():
    one = sliced(0.75, 3, (32_768, 20_000, 32_768))
    begin = max(dispatched(one), key=lambda timed: timed.makespan)
    for window in (Window(0, begin.makespan // 2), Window(begin.makespan // 3, begin.makespan)):
        events: list[SearchEvent] = []
        solve(Request(begin, Limits("makespan", 1.0, 0, 1, reproducible=True), window), events.append)
        found = [Schedule(one, "windows", event.starts) for event in events if event.starts is not None]
        assert found
        assert found[-1].makespan <= begin.makespan
        again = retime(found[-1], one)
        assert again.makespan <= begin.makespan
        assert all(peak <= budget for peak, budget in zip(peaks(again), one.budget, strict=True))


def test_windows_know_what_the_copies_of_each_unit_take_from_compute():
    """They took those of the mean one."""
    one = sliced(0.75, 2, (32_768, 20_000), copy_share=1.0)
    begin = next(timed for timed in dispatched(one) if timed.count(Kind.D))
    model = WindowModel(cp_model.CpModel(), begin, Window(0, begin.makespan // 2), "makespan")
    assert {task: model._busy(task) for task in begin.starts} == {
        task: plans.copied(begin, task) for task in begin.starts
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(one=problems(devices=3, stages=3), part=st.sampled_from([(0, 2), (1, 2), (1, 1)]))
def test_windows_for_the_span_promise_no_less_than_they_reach_and_never_lengthen_it(one, part):
    """What the model calls the span is that of the schedule which it leads to."""
    begin = max(dispatched(one), key=lambda timed: timed.span, default=None)
    assume(begin is not None)
    first, last = part
    window = Window(first * begin.makespan // 3, begin.makespan * last // 2 + 1)
    events: list[SearchEvent] = []
    solve(Request(begin, Limits("span", 1.0, 0, 1, reproducible=True), window), events.append)
    found = [Schedule(one, "windows", event.starts) for event in events if event.starts is not None]
    spans = [begin.span, *(timed.span for timed in found)]
    assert found
    assert all(later <= before for before, later in pairwise(spans))
    for timed in found:
        assert all(peak <= budget for peak, budget in zip(peaks(timed), one.budget, strict=True))
    if events[-1].status == "OPTIMAL" and (first, last) == (0, 2):
        assert spans[-1] == events[-1].bound


@pytest.mark.parametrize(("mem_bytes", "earns"), [(10**9, "bound"), (13 * 10**8, "method")])
def test_small_instances_of_slices_are_searched_and_bounded_by_the_full_model(monkeypatch, mem_bytes, earns):
    monkeypatch.setattr(compiler, "spare", lambda *_: None)  # it names itself in the method of what it changes
    profile = uniform_profile(UNIFORM)
    options = Options(mem_bytes, 2, slices=2, offload=False, time_limit_s=4.0, reproducible=True)
    searched, without = (compile_schedule(profile, replace(options, search=one)).schedule for one in (True, False))
    assert verify(searched, profile) == []
    assert getattr(searched.forecast, earns) == "cp-sat" != getattr(without.forecast, earns)
    assert searched.forecast.makespan_ns - without.forecast.makespan_ns < (earns == "bound")
    assert searched.forecast.lower_bound_ns > without.forecast.lower_bound_ns
