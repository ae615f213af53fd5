"""Which torch the replay takes, and that it needs no private name; deliveries follow from order and waits."""

from __future__ import annotations

import re
from random import Random
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("torch")
import torch
from small_schedules import Shape, build, changed, random_shape
from torch.autograd import graph

from optpipe_compiler.documents import deliveries, ir
from optpipe_compiler.errors import MissingDependency, RunFailed
from optpipe_compiler.verify import causality, verify
from optpipe_compiler.verify.placed import PlacedOps
from optpipe_torch.launch.job import check_torch
from runtime_torch import engine
from tests.instances import quick, uniform


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0", "2.1.30", "3.0", "2.16.0a0+git1"])
def test_torch_outside_the_supported_range_is_refused_in_one_sentence(version):
    message = rf"optpipe run needs torch >=2\.11,<2\.16, found {re.escape(version)}: pip install 'torch>=2.11,<2.16'"
    with pytest.raises(MissingDependency, match=message):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1.post2", None])
def test_supported_versions_are_accepted(version):
    check_torch(version)


def changed_arguments(edges, gradients, keep_graph=False):
    return ()


def gradients_off_by_one(*arguments, **options):
    return tuple(gradient + 1 for gradient in graph._engine_run_backward(*arguments, **options))


@pytest.mark.parametrize("found", [None, changed_arguments, gradients_off_by_one])
def test_a_private_way_into_autograd_that_is_gone_or_has_changed_is_not_taken(found):
    assert engine._probed(found) is None
    assert engine._probed(graph._engine_run_backward) is graph._engine_run_backward


class KeptApart:
    unsharded_accumulated_grad: object = 1.0


class KeptInParameter:
    unsharded_accumulated_grad = property(lambda self: 1.0)


@pytest.mark.parametrize(("kind", "left"), [(KeptApart, None), (KeptInParameter, 1.0)], ids=["2.13", "2.15"])
def test_unreduced_gradients_are_forgotten_where_fsdp_keeps_them_apart(kind, left):
    parameter = kind()
    state = SimpleNamespace(_fsdp_param_groups=[SimpleNamespace(fsdp_params=[parameter])])
    engine.forget_unreduced(SimpleNamespace(_get_fsdp_state=lambda: state))
    assert parameter.unsharded_accumulated_grad == left


@pytest.mark.parametrize("seed", range(12))
def test_implied_deliveries_are_those_of_the_independent_judge(seed):
    rng = Random(seed)
    shape = random_shape(rng, placements=[(0, 1), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)], microbatches=4)
    plan = build(shape, seed)
    judged = PlacedOps(plan)
    clocks = causality.happens_before(judged)
    assert isinstance(clocks, causality.Causality)
    events = clocks.events
    for device in plan.devices:
        implied = deliveries.implied(plan, device.device)
        messages = [op.id for op in device.compute if isinstance(op, ir.MessageOp)]
        for lane in device.lanes.values():
            known: set[str] = set()
            for op in lane:
                assert known.isdisjoint(implied[op.id])
                known.update(implied[op.id])
                start = events.start[judged.by_id[op.id].number]
                expected = {name for name in messages if clocks.implies(start, events.done[judged.by_id[name].number])}
                assert known == expected, op.id


def test_a_compiled_file_states_what_files_of_old_leave_to_the_reader():
    plan = quick(uniform(3, 2), 2 * 10**9, microbatches=6).schedule
    for device in plan.devices:
        sends = {op.id for op in device.compute if isinstance(op, ir.SendActivation | ir.SendGradient)}
        old = msgspec.structs.replace(device, deliveries=msgspec.UNSET)
        devices = [old if one is device else one for one in plan.devices]
        derived = deliveries.waits(msgspec.structs.replace(plan, devices=devices), device.device)
        stated = deliveries.waits(plan, device.device)
        assert device.deliveries
        assert {op: sends.intersection(names) for op, names in stated.items()} == {
            op: sends.intersection(names) for op, names in derived.items()
        }


def test_what_is_stated_of_an_op_in_several_entries_counts_together():
    plan = quick(uniform(4, 1), 10**10, microbatches=6, method="1f1b").schedule
    assert any(len(entry.sends) > 1 for device in plan.devices for entry in device.deliveries)

    def parted_of(device: ir.Device) -> ir.Device:
        each = [ir.Delivered(before=one.before, sends=[send]) for one in device.deliveries for send in one.sends]
        return msgspec.structs.replace(device, deliveries=each)

    parted = msgspec.structs.replace(plan, devices=[*map(parted_of, plan.devices)])
    assert verify(parted) == []
    for device in plan.devices:
        assert deliveries.waits(parted, device.device) == deliveries.waits(plan, device.device)


def test_a_schedule_that_can_deadlock_is_refused():
    def swap(record):
        lane = record["devices"][0]["compute"]
        lane.insert(0, lane.pop(next(i for i, op in enumerate(lane) if op["op"] == "backward_input")))

    with pytest.raises(RunFailed, match="can deadlock"):
        deliveries.implied(changed(build(Shape((0, 1))), swap), 0)


@pytest.mark.parametrize("private", [True, False])
def test_all_are_copied_in_one_call_or_in_several(monkeypatch, private):
    if not private:
        monkeypatch.setattr(engine, "_copy_each", None)
    here = [torch.arange(3), torch.zeros(0), torch.ones(2, 2, dtype=torch.uint8)]
    there = [torch.full_like(one, 7) for one in here]
    engine.copy_all(there, here)
    engine.copy_all([], [])
    assert all(map(torch.equal, there, here))
