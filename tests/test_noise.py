"""Plans for noisy ops: the spread of a profile reaches the executions, and the choice among near plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from optpipe_compiler import compiler
from optpipe_compiler.costs.noise import BOUND, IQR_PER_SIGMA, op_spreads
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Quantity
from optpipe_compiler.documents.units import show_ns
from optpipe_compiler.errors import BadInput
from optpipe_compiler.forecast import choice
from optpipe_compiler.forecast.choice import CHANCE, CHOOSES, Choice, is_late_less_often
from optpipe_compiler.forecast.executions import quantiles
from optpipe_compiler.plan.incumbents import NEAR
from tests.instances import quick, uniform
from tests.test_cli import FAST, run  # noqa: F401  (a fixture)

GB = 10**9
COSTS = uniform(2, 4, d2h_ms=0.5, h2d_ms=0.5)


def noisy(share: float):
    """The costs as if their forwards had been measured with such an interquartile range."""
    layer = COSTS.layers[0]
    forward = Quantity(value=10**6, source="measured", samples=30, spread=round(share * 10**6))
    return structs.replace(COSTS, layers=[structs.replace(layer, forward_ns=forward)])


def test_the_spread_of_a_stage_is_that_of_its_layers_together():
    found = op_spreads(noisy(0.1), [(0, 3), (3, 8)])
    assert found["forward", 0] == pytest.approx(0.1 / IQR_PER_SIGMA)
    assert found["recompute", 1] == found["forward", 1]  # not measured by itself
    assert ("backward", 0) not in found
    assert op_spreads(COSTS, [(0, 8)]) == {}
    assert op_spreads(noisy(5.0), [(0, 8)])["forward", 0] == BOUND


def test_near_plans_are_compared_under_noise(monkeypatch):
    monkeypatch.setattr(compiler, "GRACE_S", 60.0)  # however busy the machine is
    result = quick(COSTS, 2 * GB, microbatches=8, time_limit_s=1.0, noise=0.3, reproducible=False)
    least, *others = (one.schedule.forecast.makespan_ns for one in result.considered)
    assert others
    assert all(least <= other <= (1 + NEAR) * least for other in others)
    assert result.checked in result.considered
    again = Choice()
    for one in result.considered:
        again.add(one.schedule, compiler.spreads_of(one.schedule, COSTS, 0.3))
    assert result.considered[again.best()] is result.checked
    assert result.quantiles == compiler.under_noise(result.schedule, COSTS, 0.3)
    assert result.schedule.provenance.options["noise"] == 0.3


def steps(seed: int) -> np.ndarray:
    return 100 * np.exp(0.05 * np.random.default_rng(seed).standard_normal(4000))


@pytest.mark.parametrize(
    ("one", "better"),
    [
        (lambda least, seed: least * 0.99, True),
        (
            lambda least, seed: least * 0.99 * np.exp(0.01 * np.random.default_rng(99 + seed).standard_normal(4000)),
            True,
        ),
        (lambda least, seed: least * 1.01, False),
        (lambda least, seed: least * (0.99 if seed == CHOOSES else 1.0), False),  # lucky where it was chosen
        (lambda least, seed: steps(99 + seed), False),  # equal, if not in the same executions
        (lambda least, seed: np.minimum(least, np.quantile(least, 0.94)) + 0.1, True),  # longer but for the late ones
    ],
)
def test_another_plan_than_that_of_the_least_forecast_is_taken_where_it_is_surely_late_less_often(
    monkeypatch, one, better
):
    made = {"least": steps, "one": lambda seed: one(steps(seed), seed)}
    monkeypatch.setattr(choice, "executed", lambda plan, spreads, count, seed: made[plan](seed))
    monkeypatch.setattr(choice, "enough", lambda plan: 4000)
    found = Choice()
    assert found.best() == 0
    for name in made:
        found.add(name, {})
    assert found.best() == int(better)


def test_equal_plans_pass_for_different_ones_as_rarely_as_is_said():
    limit = float(np.quantile(steps(0), 0.95))
    found = sum(is_late_less_often(steps(2 * seed), steps(2 * seed + 1), limit) for seed in range(1000))
    assert found <= 1000 * CHANCE + 4  # with 1 expected, more than 5 come once in 1,700 times


def test_without_noise_the_least_forecast_is_chosen_and_nothing_is_said(run):  # noqa: F811
    assert quick(COSTS, GB).quantiles is None
    assert json.loads(run("compile", "--mem", "2GB", "--json", *FAST).out)["p95_ns"] is None
    assert "noise" not in run("compile", "--mem", "2GB", *FAST).out


def test_compile_prints_the_quantiles_of_a_noisy_profile(run):  # noqa: F811
    Path("profile.json").write_text(canonical(noisy(0.2)))
    found = json.loads(run("compile", "--mem", "2GB", "--json", *FAST).out)
    assert found["makespan_ns"] < found["p50_ns"] < found["p95_ns"]
    more = json.loads(run("compile", "--mem", "2GB", "--json", "--noise", "0.3", *FAST).out)
    assert more["p95_ns"] > found["p95_ns"]
    assert "with the noise of ops: " in run("compile", "--mem", "2GB", *FAST).out
    assert run("compile", "--mem", "2GB", "--noise", "7", *FAST).code == 2


def test_compile_says_which_forecast_was_left(run, monkeypatch):  # noqa: F811
    best, other = quick(COSTS, GB), quick(COSTS, GB, method="1f1b-recompute")
    both = best.checked, other.checked
    assert replace(best, considered=both).left_ns is None
    least = replace(other, considered=both).left_ns
    assert least == best.schedule.forecast.makespan_ns < other.schedule.forecast.makespan_ns
    monkeypatch.setattr(compiler.Result, "left_ns", least)
    assert f"a plan of {show_ns(least)} was left for this one" in run("compile", "--mem", "2GB", *FAST).out


def test_noise_must_be_a_share():
    with pytest.raises(BadInput, match="--noise is 2, expected a share from 0 to 1"):
        quick(COSTS, GB, noise=2.0)


def test_the_quantiles_are_those_of_the_file():
    result = quick(noisy(0.2), GB)
    ranges = [stage.layers for stage in result.schedule.stages]
    assert result.quantiles == quantiles(result.schedule, op_spreads(noisy(0.2), ranges))
