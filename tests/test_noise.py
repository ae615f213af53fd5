"""Plans for noisy ops: the spread of a profile reaches the executions, and the choice among near plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from optpipe_compiler import compiler
from optpipe_compiler.costs.noise import BOUND, IQR_PER_SIGMA, op_spreads
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Quantity
from optpipe_compiler.errors import BadInput
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


def test_of_near_plans_the_one_with_the_least_95th_percentile_is_chosen():
    tried = []
    real = compiler._Compilation._certified

    def certified(self, winner, timed):
        checked = real(self, winner, timed)
        tried.append(checked.schedule)
        return checked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler._Compilation, "_certified", certified)
        result = quick(COSTS, 2 * GB, microbatches=8, time_limit_s=1.0, noise=0.3, reproducible=False)
    assert len(tried) > 1
    known = [compiler.under_noise(one, COSTS, 0.3) for one in tried]
    assert result.quantiles == min(known, key=lambda one: one.p95_ns)
    least = min(one.forecast.makespan_ns for one in tried)
    assert least <= result.schedule.forecast.makespan_ns <= (1 + NEAR) * least
    assert result.schedule.provenance.options["noise"] == 0.3


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


def test_noise_must_be_a_share():
    with pytest.raises(BadInput, match="--noise is 2, expected a share from 0 to 1"):
        quick(COSTS, GB, noise=2.0)


def test_the_quantiles_are_those_of_the_file():
    result = quick(noisy(0.2), GB)
    ranges = [stage.layers for stage in result.schedule.stages]
    assert result.quantiles == quantiles(result.schedule, op_spreads(noisy(0.2), ranges))
