"""Lowering: what it promises is exact, what it waits for is needed, and it can be read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from optpipe_compiler.compiler import Options, settled
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Profile, Sliceable
from optpipe_compiler.errors import Infeasible
from optpipe_compiler.lower import Certificate, lower
from optpipe_compiler.model.placement import Layout, layout
from optpipe_compiler.model.problem import Caps, Freedom, Slicing, build
from optpipe_compiler.model.schedule import Kind, Mode, Schedule, Task
from optpipe_compiler.plan.instances import instances
from optpipe_compiler.plan.seeds import times_of
from optpipe_compiler.verify import verify
from tests.instances import anew, profiles, quick, uniform
from tests.list_scheduler import Guide
from tests.machines import dispatched, run

GOLDEN = Path(__file__).parent / "golden"
SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def waits(schedule: ir.Schedule) -> list[tuple[int, str, int, int]]:
    """Return (device, lane, op index, wait index) of every wait."""
    return [
        (device.device, lane, index, number)
        for device in schedule.devices
        for lane in ("compute", "d2h", "h2d")
        for index, op in enumerate(getattr(device, lane))
        for number in range(len(op.after))
    ]


def without(schedule: ir.Schedule, place: tuple[int, str, int, int]) -> ir.Schedule:
    """Return the schedule with one wait dropped, sealed again."""
    device, lane, index, number = place
    ops = list(getattr(schedule.devices[device], lane))
    after = [wait for position, wait in enumerate(ops[index].after) if position != number]
    ops[index] = msgspec.structs.replace(ops[index], after=after)
    devices = list(schedule.devices)
    devices[device] = msgspec.structs.replace(devices[device], **{lane: ops})
    return ir.seal(msgspec.structs.replace(schedule, devices=devices))


def tight_when_hurried() -> Profile:
    """Under a tight cap, the messages of a published schedule with quicker transfers wait too long to fit."""
    names = [
        "forward_ns",
        "backward_input_ns",
        "backward_weight_ns",
        "saved_bytes",
        "residue_bytes",
        "captured_bytes",
        "checkpoint_bytes",
        "output_bytes",
        "static_bytes",
        "forward_transient_bytes",
        "backward_input_transient_bytes",
        "backward_weight_transient_bytes",
        "backward_transient_bytes",
    ]
    costs = (
        (16, 151, 51, 207, 269, 100, 1, 17, 33, 37, 28, 28, 21),
        (83, 130, 218, 364, 366, 40, 82, 3, 26, 44, 4, 59, 54),
        (172, 293, 36, 899, 101, 24, 254, 43, 3, 60, 30, 27, 3),
        (239, 76, 299, 306, 107, 0, 258, 30, 60, 45, 47, 45, 35),
    )
    link = Link(devices=[0, 1], d2h_bytes_per_s=2 * 10**9, h2d_bytes_per_s=10**9)
    machine = Machine(devices=2, p2p=[P2P(latency_ns=14)], links=[link], op_overhead_ns=5)
    layers = [Layer(name=f"layer{n}", **dict(zip(names, row, strict=True))) for n, row in enumerate(costs)]
    return Profile(name="tight when hurried", machine=machine, layers=layers)


@SLOW
@example(profile=tight_when_hurried(), tightness=0.37789965747452664, microbatches=4, split=False)
@given(profile=profiles(), tightness=st.floats(0.2, 1.0), microbatches=st.integers(1, 5), split=st.booleans())
def test_whatever_is_planned_is_accepted_by_the_judge_and_every_wait_is_needed(profile, tightness, microbatches, split):
    roomy = quick(profile, 10**6, microbatches=microbatches, split=split).schedule
    peak = max(device.peak_bytes for device in roomy.devices)
    try:
        schedule = quick(profile, int(peak * tightness), microbatches=microbatches, split=split).schedule
    except Infeasible:
        schedule = roomy
    assert verify(schedule, profile) == []
    for place in waits(schedule)[:12]:
        assert verify(without(schedule, place)) != [], place


@SLOW
@given(profile=profiles(), microbatches=st.integers(1, 4))
def test_a_lowered_schedule_lifts_to_the_starts_it_came_from(profile, microbatches):
    schedule = quick(profile, 10**6, microbatches=microbatches).schedule
    cuts = (*(stage.layers[0] for stage in schedule.stages), schedule.setup.layers)
    layout = Layout("", cuts, tuple(stage.device for stage in schedule.stages))
    exact = build(profile, layout, microbatches, Caps(10**6, None), Freedom())
    lifted = Schedule(exact, "", times_of(schedule)[0])
    assert lifted.makespan == schedule.forecast.makespan_ns
    assert lifted.bubble_fraction == pytest.approx(schedule.forecast.bubble_fraction)


def test_a_promised_peak_one_byte_lower_is_refused():
    schedule = quick(uniform(), 2 * 10**9).schedule
    for number, device in enumerate(schedule.devices):
        devices = list(schedule.devices)
        devices[number] = msgspec.structs.replace(device, peak_bytes=device.peak_bytes - 1)
        mutant = ir.seal(msgspec.structs.replace(schedule, devices=devices))
        assert {violation.rule for violation in verify(mutant)} == {"device-memory"}


def test_equal_input_gives_equal_bytes():
    first, second = (ir.to_text(anew(uniform(), 2 * 10**9).schedule) for _ in range(2))
    assert first == second


def test_other_times_that_lead_to_the_same_order_change_only_the_forecast():
    slow = {"forward_ms": 2.0, "backward_input_ms": 2.0, "backward_weight_ms": 2.0, "p2p_ms": 0.1}
    slow |= {"d2h_ms": 2.0, "h2d_ms": 2.0}
    first, second = (quick(profile, 2 * 10**9).schedule for profile in (uniform(), uniform(**slow)))
    assert first.digest == second.digest
    assert first.devices == second.devices
    assert 2 * first.forecast.makespan_ns == second.forecast.makespan_ns


def test_an_offload_of_a_part_moves_its_first_layers_and_the_judge_accepts_it():
    costs, caps = uniform(2, 4, d2h_ms=3.0, h2d_ms=3.0), Caps(2 * 10**9, None)
    place = layout("linear", 2, 1, [1] * 8)
    one = build(costs, place, 6, caps, Freedom(), 0.5)
    keys = [(s, m) for s in range(2) for m in range(6)]
    ranks = {(s, m): m for s, m in keys}
    off = [False, False]
    by = Guide(ranks, ranks, ranks, dict.fromkeys(keys, Mode.OFFLOAD), off, [0, 0], off, off, [0, 0], [0, 0])
    timed = run(one, by)
    certificate = Certificate("makespan", "feasible", 1, "device-work", {}, {})
    schedule = lower(timed, costs, place, caps, certificate)
    assert verify(schedule, costs) == []
    assert {tuple(op.layers) for device in schedule.devices for op in (*device.d2h, *device.h2d)} == {(0, 2), (4, 6)}
    assert (times_of(schedule)[0] == timed.ticks).all()


def test_small_messages_that_arrive_before_large_ones_sent_earlier_leave_no_wait_out():
    """A forward and a reload that started early could hold 164 bytes where 160 were planned."""
    saved = json.loads((GOLDEN / "forward-and-reload-early.json").read_text())
    profile = msgspec.convert(saved["profile"], Profile)
    options = settled(profile, Options(165, 3, lengths=(3, 11, 8), placement="loop"))
    found, problem = next(one for one in instances(profile, options) if one[0].stages == 8)
    starts = {Task(Kind(kind), stage, microbatch): tick for kind, stage, microbatch, tick in saved["starts"]}
    certificate = Certificate("makespan", "feasible", 0, "device-work", {}, {})
    plan = lower(Schedule(problem, "local-search", starts), profile, found, Caps(165, None), certificate)
    assert verify(plan, profile) == []


@pytest.mark.parametrize(
    ("devices", "lengths", "budget"),
    [
        (2, (23, 10, 46, 48, 16, 9, 28, 15), 1_287_431_654),
        (2, (23, 6, 17, 31, 39), 563_711_184),
        (3, (34, 9, 27, 11, 51, 14, 58, 26), 550_107_867),
        (3, (46, 39, 54, 33, 63, 19), 934_460_112),
    ],
)
def test_the_judge_accepts_plans_in_which_messages_overtake(devices, lengths, budget):
    """Ops that read short messages start by plan before longer ones are there that the pair delivers first."""
    costs, caps = uniform(devices, 2), Caps(10**12, None)
    layers = [
        msgspec.structs.replace(layer, count=1, slices=Sliceable(), output_bytes=30_000_000)
        for layer in costs.expanded_layers()
    ]
    machine = msgspec.structs.replace(costs.machine, p2p=[P2P(bytes_per_s=5 * 10**9)])
    costs = msgspec.structs.replace(costs, layers=layers, machine=machine, sequence_length=64)
    shapes = sorted(set(lengths))
    slicing = Slicing(64, tuple((0, length) for length in shapes), tuple(map(shapes.index, lengths)))
    place = layout("loop", devices, 2, [1] * len(layers))
    one = replace(build(costs, place, len(lengths), caps, Freedom(), 1.0, slicing), budget=(budget,) * devices)
    certificate = Certificate("makespan", "feasible", 0, "device-work", {}, {})
    for timed in dispatched(one):
        assert verify(lower(timed, costs, place, caps, certificate), costs) == []
