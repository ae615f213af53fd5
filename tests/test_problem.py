"""From layers to stages: sums, messages, transfers, links; and what coarsening may and may not lose."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from optpipe_compiler.documents.profile import P2P, Host, Layer, Link, Machine, Profile, Quantity
from optpipe_compiler.model.placement import Layout, layout
from optpipe_compiler.model.problem import (
    DURATIONS,
    SIZES,
    Caps,
    Freedom,
    Problem,
    build,
    coarsen,
    message_ns,
    transfer_ns,
)
from optpipe_compiler.model.schedule import Schedule, duration
from tests.given_order import predecessors
from tests.instances import problem, uniform
from tests.plans import serial

THREE = [
    Layer(
        name="a",
        forward_ns=10,
        backward_input_ns=20,
        backward_weight_ns=30,
        saved_bytes=100,
        checkpoint_bytes=7,
        output_bytes=5,
        static_bytes=1000,
        forward_transient_bytes=3,
        backward_input_transient_bytes=4,
        backward_weight_transient_bytes=9,
        backward_transient_bytes=6,
    ),
    Layer(
        name="b",
        forward_ns=Quantity(value=11, source="measured"),
        backward_input_ns=21,
        backward_weight_ns=31,
        backward_ns=50,
        recompute_ns=8,
        saved_bytes=200,
        residue_bytes=90,
        captured_bytes=30,
        checkpoint_bytes=17,
        output_bytes=6,
        static_bytes=2000,
        forward_transient_bytes=2,
        backward_input_transient_bytes=8,
        backward_weight_transient_bytes=1,
        backward_transient_bytes=7,
    ),
    Layer(name="c", forward_ns=12, backward_input_ns=22, backward_weight_ns=32, saved_bytes=300, static_bytes=4000),
]
TWO_ON_ZERO = Layout("linear", (0, 2, 3), (0, 1))


def built(machine: Machine, layout: Layout = TWO_ON_ZERO, **caps: int) -> Problem:
    profile = Profile(name="three", machine=machine, layers=THREE)
    return build(profile, layout, 4, Caps(caps.get("mem", 10**6), caps.get("host")), Freedom())


def test_a_stage_costs_the_sum_of_its_layers_and_each_op_its_overhead_once():
    stage = built(Machine(devices=2, op_overhead_ns=1000)).stages[0]
    assert {name: getattr(stage, name) for name in DURATIONS} == {
        "forward": 1000 + 10 + 11,
        "backward_input": 1000 + 20 + 21,
        "backward_weight": 1000 + 30 + 31,
        "backward": 1000 + (20 + 30) + 50,
        "recompute": 1000 + 10 + 8,
        "offload": 0,
        "reload": 0,
        "offload_alone": 0,
        "reload_alone": 0,
        "offload_busy": 0,
        "reload_busy": 0,
        "send_activation": 0,
        "send_gradient": 0,
    }


def test_ops_that_pass_something_to_or_from_another_device_take_its_overhead():
    every, own = P2P(overhead_ns=100), P2P(devices=(1, 0), overhead_ns=7)
    looped = Layout("loop", (0, 1, 2, 3), (0, 1, 1))
    for p2p, each in (([every], 100), ([every, own], 7)):
        stages = built(Machine(devices=2, p2p=p2p), looped).stages
        for field in ("forward", "backward_input", "backward"):
            free = [getattr(stage, field) for stage in built(Machine(devices=2), looped).stages]
            assert [getattr(stage, field) - rest for stage, rest in zip(stages, free, strict=True)] == [each, each, 0]
        assert [stage.backward_weight for stage in stages] == [30, 31, 32]
        assert [stage.recompute for stage in stages] == [10, 8, 12]


def test_kept_bytes_add_up_and_transient_bytes_do_not():
    stage = built(Machine(devices=2)).stages[0]
    message = 6  # to stage 1; stage 0 receives none
    assert {name: getattr(stage, name) for name in SIZES} == {
        "saved": 100 + 200,
        "residue": 100 + 90,
        "captured": 30,
        "checkpoint": 7,
        "staying": 0,
        "forward_extra": 3 + message,
        "backward_input_extra": 8 + message,
        "backward_weight_extra": 9,
        "backward_extra": 7 + message,
        "incoming": 0,
        "outgoing": message,
        "accumulators": 0,
        "gradient": 0,
    }


def test_the_last_stage_sends_nothing_on_and_reads_what_the_one_before_sends():
    machine = Machine(devices=2, p2p=[P2P(latency_ns=100, bytes_per_s=10**9)])
    first, last = built(machine).stages
    assert (first.send_activation, first.send_gradient) == (106, 0)
    assert (last.send_activation, last.send_gradient) == (0, 106)
    assert last.forward_extra == last.backward_extra == 6


def test_messages_between_stages_of_one_device_take_no_time_but_their_memory():
    machine = Machine(devices=1, p2p=[P2P(latency_ns=100)])
    first, second, third = built(machine, Layout("v", (0, 1, 2, 3), (0, 0, 0))).stages
    assert first.send_activation == second.send_gradient == 0
    assert (first.forward_extra, second.forward_extra, third.forward_extra) == (3 + 5, 2 + 5 + 6, 6)


def test_a_pair_has_its_own_message_cost_whichever_way_it_is_named():
    own = P2P(devices=(1, 0), latency_ns=7)
    machine = Machine(devices=3, p2p=[P2P(latency_ns=5, bytes_per_s=10**9), own])
    assert [message_ns(machine, 40, a, b) for a, b in ((0, 1), (1, 0), (1, 2), (2, 2))] == [7, 7, 45, 0]
    assert message_ns(Machine(devices=3, p2p=[own]), 40, 1, 2) == 0


@pytest.mark.parametrize(
    ("size", "bytes_per_s", "expected"),
    [
        *[(0, 1, 0), (1, 10**9, 1), (3, 2 * 10**9, 2), (1, 2 * 10**9, 1), (1, 2 * 10**9 + 1, 0)],
        (10**15, 3 * 10**9, 10**15 // 3),
    ],
)
def test_transfer_times_are_rounded_half_up(size, bytes_per_s, expected):
    assert transfer_ns(size, bytes_per_s, 0) == expected
    assert transfer_ns(size, bytes_per_s, 50) == 50 + expected


def test_transfers_have_a_time_alone_and_one_while_the_other_direction_is_busy():
    link = Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9, duplex_d2h_bytes_per_s=5 * 10**8, latency_ns=1)
    stage = built(Machine(devices=2, links=[link])).stages[0]
    assert (stage.offload_alone, stage.reload_alone) == (1 + 300, 1 + 300)
    assert (stage.offload, stage.reload) == (1 + 600, 1 + 300)


def test_copies_take_a_share_of_their_time_alone_from_compute():
    link = Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=2 * 10**9, duplex_d2h_bytes_per_s=5 * 10**8, latency_ns=1)
    stage = built(Machine(devices=2, links=[structs.replace(link, compute_permille=500)])).stages[0]
    assert (stage.offload_busy, stage.reload_busy) == (151, 76)  # of 301 and 151, half up
    stage = built(Machine(devices=2, links=[link])).stages[0]
    assert (stage.offload_busy, stage.reload_busy) == (0, 0)


def test_a_link_is_never_faster_with_both_directions_busy():
    link = Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9, duplex_h2d_bytes_per_s=3 * 10**9)
    stage = built(Machine(devices=2, links=[link])).stages[0]
    assert stage.reload == stage.reload_alone == 300


def test_a_link_without_devices_is_one_for_each_device_not_named():
    own = Link(d2h_bytes_per_s=1, h2d_bytes_per_s=1)
    shared = Link(devices=[0, 2, 5], d2h_bytes_per_s=2, h2d_bytes_per_s=2)
    machine = Machine(devices=6, links=[own, shared])
    assert machine.host_links(4) == [([0, 2], shared), ([1], own), ([3], own)]
    assert Machine(devices=6, links=[shared]).host_links(2) == [([0], shared)]
    assert built(Machine(devices=2, links=[shared])).link_of == (0, None)
    assert built(Machine(devices=2, links=[own])).link_of == (0, 1)


def test_a_device_without_a_link_cannot_offload():
    one = built(Machine(devices=2, links=[Link(devices=[1], d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)]))
    assert [one.can_offload(stage) for stage in (0, 1)] == [False, True]
    assert not replace(one, freedom=Freedom(offload=False)).can_offload(1)


def test_a_recomputation_that_keeps_everything_is_of_no_use():
    one = built(Machine(devices=2))
    useless = replace(one, stages=tuple(replace(stage, checkpoint=stage.saved) for stage in one.stages))
    assert one.can_recompute(0)
    assert not replace(one, freedom=Freedom(recompute=False)).can_recompute(0)
    assert not useless.can_recompute(0)


def test_the_budget_is_the_cap_without_reserve_and_static_bytes():
    one = built(Machine(devices=2, reserve_bytes=50), mem=10_000, host=77)
    assert one.budget == (10_000 - 50 - 3000, 10_000 - 50 - 4000)
    assert one.host_budget == 77
    assert one.host_limits == [((0, 1), 77)]
    assert built(Machine(devices=2, reserve_bytes=50), mem=100).budget[0] < 0


def test_the_hosts_are_those_with_devices_of_the_problem():
    hosts = [Host(devices=[1, 4], memory_bytes=30), Host(devices=[5], memory_bytes=9)]
    one = built(Machine(devices=6, hosts=hosts))
    assert one.hosts == (((1,), 30),)
    assert one.fits_hosts((10**9, 30))
    assert not one.fits_hosts((0, 31))
    coarse = coarsen(replace(problem(2, 1, 100), hosts=(((0,), 9),)))
    assert (coarse.unit_bytes, coarse.hosts) == (2, (((0,), 4),))


# -- coarsening ---------------------------------------------------------------------------------------------------


def test_durations_with_a_large_common_divisor_are_kept_exactly():
    exact = problem(2, 2, 8)
    big = replace(
        exact, stages=tuple(scaled(stage, 1_000_000, 512) for stage in exact.stages), budget=(8 * 512 + 511,) * 2
    )
    coarse = coarsen(big)
    assert coarse.stages == tuple(scaled(stage, 1, 1, 2) for stage in exact.stages)
    assert (coarse.tick_ns, coarse.unit_bytes, coarse.stretch) == (1_000_000, 1024, 1.0)
    assert coarse.budget == (4, 4)


def scaled(stage, ticks: int, units: int, divide: int = 1):
    return replace(
        stage,
        **{name: getattr(stage, name) * ticks for name in DURATIONS},
        **{name: getattr(stage, name) * units // divide for name in SIZES},
    )


@st.composite
def uneven(draw: st.DrawFn) -> Problem:
    """A problem whose durations have no common divisor worth the name, some of them tiny."""
    time = st.one_of(st.integers(0, 200), st.integers(10_000, 10_000_000))
    one = problem(2, draw(st.integers(1, 3)), 1000)
    stages = tuple(
        replace(s, **{name: draw(time) for name in DURATIONS} | {"forward": draw(st.integers(10_000, 10**6))})
        for s in one.stages
    )
    return replace(one, stages=stages)


@given(exact=uneven(), reference=st.sampled_from([0, 10**6, 10**9]))
def test_stretch_is_the_most_that_any_duration_grew(exact, reference):
    coarse = coarsen(exact, reference)
    tick = coarse.tick_ns
    grown = [1.0]
    for fine, rough in zip(exact.stages, coarse.stages, strict=True):
        for name in DURATIONS:
            true, rounded = getattr(fine, name), getattr(rough, name) * tick
            is_down = name.startswith("send") or name.endswith("busy")
            assert abs(rounded - true) <= (tick - 1 if is_down else tick / 2)
            if is_down:
                assert rounded <= true
            elif true:
                grown.append(rounded / true)
    assert coarse.stretch == max(grown)


@given(exact=uneven(), split=st.booleans())
def test_a_true_schedule_stretched_and_rounded_down_is_one_of_the_coarse_problem(exact, split):
    """The argument for the bound: starts x stretch / tick, rounded down, keep every lane and every message."""
    coarse = coarsen(exact)
    scale = Fraction(coarse.stretch) / coarse.tick_ns * (1 + Fraction(1, 2**50))  # stretch is a rounded float
    true = serial(exact, split=split)
    rough = Schedule(coarse, "", {task: int(start * scale) for task, start in true.starts.items()})
    order = sorted(true.starts, key=lambda task: true.starts[task])
    for before, after in pairwise(order):
        assert rough.starts[before] + duration(coarse, before) <= rough.starts[after]
    for task in order:
        for before, lag in predecessors(coarse, task, rough.starts):
            assert rough.end(before) + lag <= rough.starts[task]
    assert rough.makespan <= true.makespan * scale


def test_the_tick_is_fine_against_the_shortest_op_that_matters_and_bounded_by_the_horizon():
    one = problem(2, 2, 8)
    prime = replace(one, stages=tuple(replace(stage, forward=1_000_003, backward=2_000_003) for stage in one.stages))
    compute = replace(prime, stages=tuple(scaled_times(stage, 1_000_003) for stage in prime.stages))
    assert coarsen(compute).tick_ns <= 1_000_003 // 64
    assert coarsen(compute, reference=10**9).tick_ns == 1_000_003 // 64
    assert coarsen(compute, reference=2**15 * 100).tick_ns == 100


def scaled_times(stage, forward: int):
    return replace(stage, **{name: forward + 2 * number for number, name in enumerate(DURATIONS)})


def test_an_offload_of_a_share_takes_the_first_layers_that_hold_no_more_and_at_least_one():
    costs = uniform(2, 4, d2h_ms=2.0, h2d_ms=1.0)  # 0.25 GB a layer
    place = layout("linear", 2, 1, [1] * 8)
    caps = Caps(10**9, None)
    for share, layers in ((1.0, 4), (0.99, 3), (0.5, 2), (0.49, 1), (0.0, 1)):
        stage = build(costs, place, 4, caps, Freedom(), share).stages[1]
        assert (stage.saved, stage.moved, stage.staying_layers) == (10**9, layers * 250 * 10**6, 4 - layers)
        assert (stage.offload, stage.reload) == (layers * 500_000, layers * 250_000)
