"""A first compile on a machine: published schedules come at once; the time limit does not count what numba takes."""

from __future__ import annotations

import time

import pytest
from instances import problem
from machines import first_policies

from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.machine import compiled
from optpipe_compiler.machine.policy import load
from optpipe_compiler.machine.state import machine
from optpipe_compiler.plan import explore
from optpipe_compiler.plan.budget import Budget, Limits

LIMIT_S, COMPILING_S = 1.0, 1.5


def test_seconds_that_are_not_counted_are_left():
    budget = Budget(Limits("makespan", 100.0, 0, 1, reproducible=False), 0, begin=time.monotonic() - 10)
    before = budget.elapsed()
    budget.stop()
    time.sleep(0.05)
    assert budget.elapsed() == pytest.approx(before, abs=0.04)
    assert budget.go_on(counted=False) >= 0.05
    assert budget.elapsed() == pytest.approx(before, abs=0.04)
    budget.stop()
    time.sleep(0.05)
    budget.go_on(counted=True)
    assert budget.elapsed() >= before + 0.05


@pytest.mark.parametrize("had_to", [True, False])
def test_a_search_that_had_to_be_compiled_has_its_time_all_the_same(monkeypatch, had_to):
    def slow(instance):
        time.sleep(COMPILING_S)
        return had_to

    monkeypatch.setattr(explore, "load", slow)
    seen = []
    options = Options(mem_bytes=10**10, microbatches=16, time_limit_s=LIMIT_S)
    result = compile_schedule(uniform_profile(UniformOptions(devices=2)), options, seen.append)
    assert any(one.incumbent_ns is not None and one.elapsed_s < LIMIT_S for one in seen)
    assert len([note for note in result.notes if "once on this machine" in note]) == had_to
    assert (max(one.elapsed_s for one in seen) >= COMPILING_S) != had_to
    assert result.wall_s >= COMPILING_S


def test_what_has_been_compiled_is_not_compiled_again():
    one = problem(2, 4, 100)
    kept, given = next(first_policies(one))
    load(machine(one), kept, given)
    assert not load(machine(one), kept, given)


def test_progress_says_that_the_search_is_compiled_from_the_start(monkeypatch):
    monkeypatch.setattr(compiled, "is_kept", lambda: False)
    seen = []
    options = Options(mem_bytes=10**10, microbatches=4, time_limit_s=LIMIT_S)
    compile_schedule(uniform_profile(UniformOptions(devices=2)), options, seen.append)
    assert seen[0].phase == "compiling the search, once on this machine"
    assert seen[0].incumbent_ns is None
    assert seen[-1].phase == "lowering and verifying"
