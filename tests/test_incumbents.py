"""What planning has so far: which of several schedules is the best."""

from __future__ import annotations

import pytest

from optpipe_compiler.model import bounds
from optpipe_compiler.model.placement import Layout
from optpipe_compiler.plan.candidates import Candidates
from optpipe_compiler.plan.incumbents import Attempt, Incumbents
from tests.instances import problem


@pytest.mark.parametrize("fixed", [(0, 7), (7, 0)])
def test_of_two_cuts_with_one_time_the_file_and_its_baseline_are_of_that_with_the_lower_peak(fixed):
    one = problem(2, 3, 100)
    attempts = [
        Attempt(Layout("linear", cuts, (0, 1)), one, bounds.best(one, "makespan"), (each, each), lambda _: ([], []))
        for cuts, each in zip(((0, 1, 3), (0, 2, 3)), fixed, strict=True)
    ]
    incumbents = Incumbents(attempts, "makespan", lambda _: None)
    candidates = Candidates(incumbents)
    candidates.take("1f1b", 107)
    lower = attempts[fixed.index(0)]
    assert incumbents.winner() is lower
    assert candidates.baselines()["1f1b"].peak_bytes == lower.peak_bytes == min(one.peak_bytes for one in attempts)
    assert incumbents.near()[0][0] is lower
