"""The one file that touches private torch names says what it needs; deliveries follow from order and waits."""

from __future__ import annotations

from random import Random

import pytest

pytest.importorskip("torch")
from small_schedules import Shape, build, changed, random_shape

from optpipe_compiler import ir
from optpipe_compiler.errors import MissingDependency, RunFailed
from optpipe_compiler.verify import causality
from optpipe_compiler.verify.plan import Plan
from runtime_torch import adapter, deliveries


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0", "2.1.30", "3.0"])
def test_torch_outside_the_supported_range_is_refused_in_one_sentence(version):
    with pytest.raises(MissingDependency, match=rf"optpipe run needs torch 2\.13, found {version}: pip install"):
        adapter.probe(version)


def test_the_installed_torch_is_as_the_adapter_knows_it():
    adapter.probe()


def test_a_changed_engine_is_refused_by_the_name_that_changed(monkeypatch):
    monkeypatch.setitem(adapter._SIGNATURES, "forward_one_chunk", ("chunk",))
    with pytest.raises(RunFailed, match=r"PipelineStage\.forward_one_chunk takes"):
        adapter.probe()


def test_a_missing_action_is_refused(monkeypatch):
    monkeypatch.setitem(adapter._TYPES, "recompute", "NO_SUCH_ACTION")
    with pytest.raises(RunFailed, match="no action NO_SUCH_ACTION"):
        adapter.probe()


@pytest.mark.parametrize("seed", range(12))
def test_implied_deliveries_are_those_of_the_independent_judge(seed):
    rng = Random(seed)
    shape = random_shape(rng, placements=[(0, 1), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)], microbatches=4)
    plan = build(shape, seed)
    judged = Plan(plan)
    events = causality.Events(judged)
    order = causality.execution_order(judged, events)
    assert isinstance(order, list)
    clocks = causality.Causality(events, order)
    for device in plan.devices:
        implied = deliveries.implied(plan, device.device)
        messages = [op.id for op in device.compute if isinstance(op, ir.MessageOp)]
        for lane in (device.compute, device.d2h, device.h2d):
            known: set[str] = set()
            for op in lane:
                assert known.isdisjoint(implied[op.id])
                known.update(implied[op.id])
                start = events.start[op.id]
                expected = {name for name in messages if clocks.implies(start, events.done[name])}
                assert known == expected, op.id


def test_a_schedule_that_can_deadlock_is_refused():
    def swap(record):
        lane = record["devices"][0]["compute"]
        lane.insert(0, lane.pop(next(i for i, op in enumerate(lane) if op["op"] == "backward_input")))

    with pytest.raises(RunFailed, match="can deadlock"):
        deliveries.implied(changed(build(Shape((0, 1))), swap), 0)
