"""A plan for which lowering adds too few waits: a forward and a reload that start early hold more than planned."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from optpipe_compiler.compiler import Options, instances, settled
from optpipe_compiler.documents.profile import Profile
from optpipe_compiler.lower import Certificate, lower
from optpipe_compiler.model.problem import Caps
from optpipe_compiler.model.schedule import Kind, Schedule, Task
from optpipe_compiler.verify import verify

SAVED = Path(__file__).parent / "golden" / "forward-and-reload-early.json"


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="device 0 can hold 164 bytes, 4 more than the 160 that lowering plans"
)
def test_an_early_forward_and_an_early_reload_hold_no_more_than_planned():
    saved = json.loads(SAVED.read_text())
    profile = msgspec.convert(saved["profile"], Profile)
    options = settled(profile, Options(165, 3, lengths=(3, 11, 8), placement="loop"))
    found, problem = next(one for one in instances(profile, options) if one[0].stages == 8)
    starts = {Task(Kind(kind), stage, microbatch): tick for kind, stage, microbatch, tick in saved["starts"]}
    certificate = Certificate("makespan", "feasible", 0, "device-work", {}, {})
    plan = lower(Schedule(problem, "local-search", starts), profile, found, Caps(165, None), certificate)
    assert verify(plan, profile) == []
