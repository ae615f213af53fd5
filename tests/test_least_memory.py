"""One microbatch at a time is looked for within the time limit, counted in what is done instead of in seconds."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.documents.profile import Layer, Link, Machine, Profile
from optpipe_compiler.errors import Infeasible
from optpipe_compiler.model import bounds
from optpipe_compiler.model.placement import Layout
from optpipe_compiler.model.problem import Caps
from optpipe_compiler.plan import candidates, explore
from optpipe_compiler.plan.budget import Budget, Limits
from optpipe_compiler.plan.candidates import Candidates
from optpipe_compiler.plan.incumbents import Attempt, Incumbents
from optpipe_compiler.plan.least_memory import LeastMemory
from optpipe_compiler.published import earliest, published
from optpipe_compiler.solver import minimum
from tests.instances import problem, quick, uniform

LIMIT, SOLVE = 20, 6
"""Of a clock that ticks with each look at what the search has found, and with each solve by so much."""


class Clock:
    """Ticks when something is done; the search finds nothing."""

    is_running = True
    error = None

    def __init__(self) -> None:
        self.now = 0.0
        self.solved: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        return 0

    def take(self, timeout_s: float) -> list[object]:
        self.now += 1
        return []

    def climbing(self) -> list[object]:
        return []

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def clock(monkeypatch) -> Clock:
    ticking, real = Clock(), minimum.one_at_a_time

    def one_at_a_time(*arguments):
        ticking.solved.append(ticking.now)
        ticking.now += SOLVE
        return real(*arguments)

    monkeypatch.setattr(minimum, "one_at_a_time", one_at_a_time)
    monkeypatch.setattr("optpipe_compiler.plan.explore.time", ticking)
    monkeypatch.setattr("optpipe_compiler.plan.budget.time", ticking)
    monkeypatch.setattr(explore, "LocalSearch", lambda *_: ticking)
    monkeypatch.setattr(explore, "load", lambda _: False)
    monkeypatch.setattr(Candidates, "steps", lambda self: iter([None] * 3))
    return ticking


def searched(budget_units: int, placements: int) -> Incumbents:
    """Search where no published schedule fits, nor anything else but one microbatch at a time."""
    one = problem(2, 3, budget_units)
    attempts = [
        Attempt(Layout(name, (0, 1, 2), (0, 1)), one, bounds.best(one, "makespan"), (0, 0), lambda _: ([], []))
        for name in ("linear", "loop", "v")[:placements]
    ]
    incumbents = Incumbents(attempts, "makespan", lambda _: None)
    budget = Budget(Limits("makespan", LIMIT, 0, 1, reproducible=False), 0, begin=0.0)
    budget.reserve_s = 0.0
    least = LeastMemory(incumbents, Caps(budget_units, None), budget)
    explore.explore(incumbents, Candidates(incumbents), budget, least, share=1.0)
    return incumbents


def test_it_begins_at_half_of_the_time_and_what_fits_ends_it_in_time(clock):
    found = searched(100, placements=3)
    assert found.winner() is not None
    assert clock.solved == [LIMIT / 2, LIMIT / 2 + SOLVE]  # a third solve would begin too late
    assert clock.now <= LIMIT + SOLVE


def test_what_can_never_fit_is_refused_before_the_end(clock):
    with pytest.raises(Infeasible, match="the smallest --mem that would do is"):
        searched(1, placements=1)
    assert clock.solved == [LIMIT / 2]
    assert clock.now <= LIMIT


@pytest.mark.parametrize(("budget_units", "all_tried"), [(1, False), (100, True)])
def test_published_schedules_are_waited_for_only_where_something_fits(clock, monkeypatch, budget_units, all_tried):
    tried: list[int] = []

    def step(number: int) -> None:
        tried.append(number)
        clock.now += 0.1

    monkeypatch.setattr(Candidates, "steps", lambda self: map(step, range(5 * LIMIT)))
    monkeypatch.setattr(LeastMemory, "refuse", lambda self: None)  # as where slices leave it without a proof
    searched(budget_units, placements=1)
    assert (len(tried) == 5 * LIMIT) == all_tried
    assert all_tried or clock.now <= LIMIT + 1


def test_the_search_goes_on_where_the_solver_is_missing(clock, monkeypatch):
    missing = SimpleNamespace(calls=0)

    def none(*_):
        missing.calls += 1
        raise explore.MissingDependency("compile needs ortools: pip install ortools")

    monkeypatch.setattr(minimum, "one_at_a_time", none)
    assert searched(1, placements=1).winner() is None
    assert missing.calls == 1
    assert LIMIT <= clock.now <= LIMIT + 1
    assert searched(100, placements=1).winner() is not None


def test_slow_links_leave_plans_as_good_as_those_without_offloads():
    """Where all treatments that the search begins with hold too much, recomputing takes a hundredth of offloading."""
    saved, left = (50, 200, 100, 100, 100, 50, 200), (0, 10, 0, 10, 10, 0, 0)
    residues, outputs = (50, 100, 100, 100, 50, 50, 200), (1, 0, 1, 10, 10, 10, 0)
    layers = [
        Layer(
            name=f"l{index}",
            forward_ns=500_000,
            backward_input_ns=1_000_000,
            backward_weight_ns=500_000,
            saved_bytes=saved[index] * 10**6,
            checkpoint_bytes=left[index] * 10**6,
            output_bytes=outputs[index] * 10**6,
            static_bytes=10**8 if index == 4 else 0,
            residue_bytes=residues[index] * 10**6,
            forward_transient_bytes=10**7 if index in (3, 4) else 0,
            backward_transient_bytes=0 if index else 3 * 10**7,
        )
        for index in range(7)
    ]
    link = Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**11)
    profile = Profile(name="slow links", machine=Machine(devices=3, links=[link]), layers=layers)
    found, without = (quick(profile, 230 * 10**6, microbatches=3, offload=offload) for offload in (True, False))
    assert found.schedule.forecast.makespan_ns <= 1.05 * without.schedule.forecast.makespan_ns


def test_one_microbatch_at_a_time_never_takes_the_place_of_something_better():
    one = problem(2, 3, 100)
    layout = Layout("linear", (0, 1, 2), (0, 1))
    attempt = Attempt(layout, one, bounds.best(one, "makespan"), (0, 0), lambda _: ([], []))
    incumbents = Incumbents([attempt], "makespan", lambda _: None)
    best = earliest(published(one, "1f1b"))
    assert incumbents.keep(attempt, best, "published") is None
    budget = Budget(Limits("makespan", LIMIT, 0, 1, reproducible=False), 0, begin=time.monotonic())
    LeastMemory(incumbents, Caps(100, None), budget).find()
    assert attempt.best is best


def test_a_quicker_machine_keeps_less_time_back_and_a_slower_one_no_more(monkeypatch):
    limits, reserves_s = Limits("makespan", LIMIT, 0, 1, reproducible=False), []
    for steps_ns in (1, 10**12):
        monkeypatch.setattr("optpipe_compiler.plan.budget.STEPS_NS", steps_ns)
        reserves_s.append(Budget(limits, 1000, begin=0.0).reserve_s)
    assert reserves_s[0] == pytest.approx(0.2 + 1000 * 19e-5)
    assert 0 < reserves_s[1] < 0.5 * reserves_s[0]
    assert Budget(limits, 10**6, begin=0.0).reserve_s == pytest.approx(0.2 + 10**6 * 19e-5)


def test_a_schedule_that_fits_by_waiting_names_a_cap_that_is_enough_for_that():
    """As it is defined it needs the activations of all layers at one time, 1 GB."""
    profile = uniform(1, 3, boundary_fraction=0.05, d2h_ms=9.0, h2d_ms=9.0)
    options = Options(mem_bytes=250_000_000, microbatches=1, method="1f1b-offload")
    with pytest.raises(Infeasible, match="raise --mem to") as refused:
        compile_schedule(profile, options)
    enough = refused.value.least_mem_bytes
    assert enough < 10**9 / 2
    found = compile_schedule(profile, replace(options, mem_bytes=enough)).schedule
    assert found.forecast.method == "1f1b-offload-waiting"
    assert max(device.peak_bytes for device in found.devices) <= enough


def test_the_smallest_cap_is_enough_where_what_comes_in_from_the_device_before_makes_it_so():
    """Layer by layer device 1 needs 4,500 + 1,000 + 125 bytes, as one stage 375 more."""
    times = {"backward_input_ns": 10, "backward_weight_ns": 10, "residue_bytes": 0}
    first = Layer(name="a", forward_ns=100, saved_bytes=1500, output_bytes=1000, **times)
    other = Layer(name="b", forward_ns=10, saved_bytes=125, static_bytes=4500, **times)
    rest = Layer(name="c", count=3, forward_ns=10, saved_bytes=125, **times)
    profile = Profile(name="p", machine=Machine(devices=2), layers=[first, other, rest])
    asked = {"microbatches": 2, "placement": "linear", "time_limit_s": 0.0}
    with pytest.raises(Infeasible, match="the smallest --mem that would do is 5625B"):
        quick(profile, 5624, **asked)
    assert max(device.peak_bytes for device in quick(profile, 5625, **asked).schedule.devices) == 5625


def test_the_smallest_cap_counts_offloads_of_a_part_where_the_host_has_no_room_for_the_whole():
    """Two stages of two layers each: one layer of the first is away while the second runs."""
    times = {"forward_ns": 20, "backward_input_ns": 20, "backward_weight_ns": 20}
    layer = Layer(name="l", count=4, saved_bytes=100, residue_bytes=0, **times)
    link = Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)
    profile = Profile(name="p", machine=Machine(devices=1, host_memory_bytes=100, links=[link]), layers=[layer])
    asked = {"microbatches": 2, "stages_per_device": 2, "recompute": False, "time_limit_s": 0.0}
    with pytest.raises(Infeasible, match="the smallest --mem that would do is 300B"):
        quick(profile, 299, **asked)
    assert [device.peak_bytes for device in quick(profile, 300, **asked).schedule.devices] == [300]


def test_the_smallest_cap_counts_what_devices_always_hold_to_the_byte():
    """Where the host has room for half of what could leave, both devices offload the first of their two stages."""
    times = {"forward_ns": 20, "backward_input_ns": 20, "backward_weight_ns": 20, "checkpoint_bytes": 1000}
    layers = [Layer(name=f"l{n}", saved_bytes=1000, static_bytes=int(n == 1), **times) for n in range(4)]
    link = Link(d2h_bytes_per_s=10**12, h2d_bytes_per_s=10**12)
    profile = Profile(name="p", machine=Machine(devices=2, host_memory_bytes=2000, links=[link]), layers=layers)
    asked = {"microbatches": 2, "placement": "loop", "stages_per_device": 2, "recompute": False, "time_limit_s": 0.0}
    with pytest.raises(Infeasible, match="the smallest --mem that would do is 1001B"):
        quick(profile, 1000, **asked)
    assert max(device.peak_bytes for device in quick(profile, 1001, **asked).schedule.devices) == 1001


def test_the_cap_that_a_known_schedule_needs_is_enough_for_it():
    """The first layer of a device needs much in its backward: layer by layer when the others are over, but that is
    tried only where one microbatch may not fit."""
    times = {"forward_ns": 10, "backward_input_ns": 10, "backward_weight_ns": 10, "residue_bytes": 0}
    first = Layer(name="a", saved_bytes=1000, backward_transient_bytes=4000, **times)
    rest = Layer(name="b", count=3, saved_bytes=1000, **times)
    profile = Profile(name="p", machine=Machine(devices=6), layers=[first, rest] * 6)
    with pytest.raises(Infeasible, match="raise --mem to 28000") as refused:
        quick(profile, 10_000, microbatches=8, method="1f1b")
    quick(profile, refused.value.least_mem_bytes, microbatches=8, method="1f1b")


def test_a_known_schedule_of_few_bytes_is_refused_with_a_cap(monkeypatch):
    """Of which less than a thousandth is no byte."""
    tried = []

    def fits(*_) -> bool:
        tried.append(True)
        assert len(tried) < 100
        return False

    monkeypatch.setattr(candidates, "_fits_waiting", fits)
    layer = Layer(name="l", count=2, forward_ns=1, backward_input_ns=1, backward_weight_ns=1, saved_bytes=10)
    with pytest.raises(Infeasible, match="raise --mem to 20B"):
        quick(Profile(name="p", machine=Machine(devices=2), layers=[layer]), 10, method="1f1b")
