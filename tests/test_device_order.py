"""The pipeline passes devices that share a host link far from each other, and files name the machine's devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from optpipe_compiler.compiler import Options, compile_schedule, settled
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import P2P, Host
from optpipe_compiler.forecast import analyse
from optpipe_compiler.lower import Certificate, lower
from optpipe_compiler.model.bounds import fill_and_drain
from optpipe_compiler.model.placement import Layout, layout, stage_devices
from optpipe_compiler.model.problem import Caps, Freedom, build
from optpipe_compiler.plan.device_order import other_order
from optpipe_compiler.plan.instances import instances
from optpipe_compiler.plan.least_memory import _one_after_the_other
from optpipe_compiler.plan.seeds import layout_of
from optpipe_compiler.verify import check, verify
from optpipe_compiler.view import gantt, svg
from optpipe_compiler.view.report.payload import chart
from optpipe_compiler.view.summary import assumptions
from tests.instances import quick, uniform

GB = 10**9
PAIRS = uniform(4, 4, d2h_ms=1.05, h2d_ms=1.05, shared_links="pairs", residue_fraction=1.0)
TIGHT = GB // 2
"""Half of the activations of one microbatch on a device."""


def on(machine, count: int) -> tuple[int, ...] | None:
    return other_order(machine, layout("loop", count, 1, [1] * count))


def with_links(machine, *members: list[int]):
    (link, *_) = machine.links
    return structs.replace(machine, links=[structs.replace(link, devices=list(some)) for some in members])


EIGHT = structs.replace(PAIRS.machine, devices=8)


def test_links_are_gone_round_one_device_of_each_at_a_time():
    pairs = with_links(EIGHT, [0, 1], [2, 3], [4, 5], [6, 7])
    assert on(pairs, 8) == (0, 2, 4, 6, 1, 3, 5, 7)
    fours = with_links(EIGHT, [0, 1, 2, 3], [4, 5, 6, 7])
    assert on(fours, 8) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert on(with_links(EIGHT, [0, 1, 2], [3, 4, 5], [6, 7]), 8) == (0, 3, 6, 1, 4, 7, 2, 5)


def test_the_order_within_a_host_alone_is_free():
    pairs = with_links(EIGHT, [0, 1], [2, 3], [4, 5], [6, 7])
    two = structs.replace(
        pairs, hosts=[Host(devices=[0, 1, 2, 3], memory_bytes=GB), Host(devices=[4, 5, 6, 7], memory_bytes=GB)]
    )
    assert on(two, 8) == (0, 2, 1, 3, 4, 6, 5, 7)


def test_devices_and_links_that_differ_stay_where_they_are():
    pairs = with_links(EIGHT, [0, 1], [2, 3], [4, 5], [6, 7])
    assert on(structs.replace(pairs, time_permille=[1000] * 7 + [1100]), 8) is None
    first, *rest = pairs.links
    slower = structs.replace(first, d2h_bytes_per_s=1)
    assert on(structs.replace(pairs, links=[slower, *rest]), 8) is None
    assert on(structs.replace(pairs, links=rest), 8) is None
    assert on(structs.replace(pairs, links=[]), 8) is None
    assert on(structs.replace(pairs, links=[structs.replace(first, devices=None)]), 8) is None
    assert on(pairs, 2) is None


@given(st.permutations(range(6)))
def test_a_machine_in_another_order_has_the_same_devices(order):
    entries = [P2P(devices=(a, b), latency_ns=10 * a + b) for a in range(6) for b in range(a)]
    hosts = [Host(devices=[0, 1, 2, 3], memory_bytes=1), Host(devices=[4, 5, 6, 7], memory_bytes=2)]
    pairs = with_links(EIGHT, [0, 1], [2, 3, 6], [4, 5], [7])
    machine = structs.replace(pairs, p2p=entries, hosts=hosts, time_permille=[100 + n for n in range(8)])
    changed, whole = machine.in_order(tuple(order)), [*order, 6, 7]
    assert changed.time_permille == [100 + device for device in whole]
    for first, second in ((a, b) for a in range(6) for b in range(6) if a != b):
        assert changed.p2p_of(first, second).latency_ns == machine.p2p_of(order[first], order[second]).latency_ns
    for name in ("links", "hosts"):
        for before, after in zip(getattr(machine, name), getattr(changed, name), strict=True):
            assert sorted(whole[device] for device in after.devices) == sorted(before.devices)
    assert machine.in_order(None) is machine


def bare(problem) -> Certificate:
    return Certificate("makespan", "feasible", 0, "none", {}, {})


@settings(max_examples=30)
@given(st.permutations(range(4)), st.sampled_from([("loop", 2), ("loop", 4), ("v", 2), ("linear", 1)]))
def test_a_file_names_the_machines_devices_and_is_else_that_of_the_reordered_machine(order, placed):
    name, count = placed
    plain = layout(name, 4, count, [1] * 16)
    placed_so = replace(plain, order=tuple(order))
    reordered = structs.replace(PAIRS, machine=PAIRS.machine.in_order(tuple(order)))
    caps, freedom = Caps(64 * GB, None), Freedom()

    def file(one: Layout, profile) -> ir.Schedule:
        problem = build(profile, one, 3, caps, freedom)
        *_, offloading = _one_after_the_other(problem)
        return lower(offloading, profile, one, caps, bare(problem))

    mine, other = file(placed_so, PAIRS), file(plain, reordered)
    assert verify(mine, PAIRS) == []
    assert [device.device for device in mine.devices] == [0, 1, 2, 3]
    assert [stage.device for stage in mine.stages] == [order[stage.device] for stage in other.stages]
    for n, device in enumerate(other.devices):
        named = mine.devices[order[n]]
        peers = {op.peer for op in named.compute if isinstance(op, ir.MessageOp)}
        assert peers == {order[op.peer] for op in device.compute if isinstance(op, ir.MessageOp)}
        assert (named.peak_bytes, named.d2h, named.h2d, named.deliveries) == (
            device.peak_bytes,
            device.d2h,
            device.h2d,
            device.deliveries,
        )
    assert mine.forecast.makespan_ns == other.forecast.makespan_ns
    found = layout_of(mine)
    assert found is not None
    assert found.device_of == stage_devices(name, 4, count)
    assert found.owners == placed_so.owners


@pytest.fixture(scope="module")
def planned():
    """A plan of 4 devices whose links are short where neighbours share them."""
    options = Options(mem_bytes=TIGHT, microbatches=8, time_limit_s=4.0, reproducible=True)
    return compile_schedule(PAIRS, options).schedule


def test_where_links_are_short_neighbours_share_none(planned):
    order = list(dict.fromkeys(stage.device for stage in planned.stages))
    assert order[0] == 0
    assert all(first // 2 != second // 2 for first, second in pairwise(order))
    assert f"the pipeline passes the devices in the order {' '.join(map(str, order))}" in assumptions(planned)
    assert verify(planned, PAIRS) == []


def test_less_is_lost_at_the_ends_than_by_number():
    found = instances(PAIRS, settled(PAIRS, Options(mem_bytes=TIGHT, microbatches=8)))
    better = {one.by_number: problem for one, problem in found if one.order is not None}
    by_number = {one: problem for one, problem in found if one in better}
    assert better.keys() == by_number.keys()
    assert better
    for one, problem in by_number.items():
        assert fill_and_drain(better[one]) < fill_and_drain(problem)


def test_offloads_of_a_part_of_a_stage_come_in_both_orders():
    slow = uniform(4, 8, d2h_ms=3, h2d_ms=3, shared_links="pairs", residue_fraction=1.0)
    found = instances(slow, settled(slow, Options(mem_bytes=TIGHT, microbatches=8)))
    kinds = {None: set(), "other": set()}
    for one, problem in found:
        kinds[None if one.order is None else "other"].add((one.by_number, problem.is_partial))
    assert kinds["other"] < kinds[None]
    assert {is_partial for _, is_partial in kinds["other"]} == {False, True}


def test_where_memory_does_not_bind_devices_stay_in_the_order_of_their_numbers():
    found = instances(PAIRS, settled(PAIRS, Options(mem_bytes=8 * GB, microbatches=8)))
    assert {one.order for one, _ in found} == {None}


@pytest.mark.parametrize("options", [{"placement": "loop"}, {"method": "interleaved-1f1b-recompute"}])
def test_a_named_placement_or_schedule_takes_devices_by_their_numbers(options):
    found = instances(PAIRS, settled(PAIRS, Options(mem_bytes=TIGHT, microbatches=8, **options)))
    assert {one.order for one, _ in found} == {None}


def test_published_schedules_are_compared_by_number(planned):
    alone = compile_schedule(PAIRS, Options(mem_bytes=TIGHT, microbatches=8, method="gis-h-uniform-recompute-3"))
    assert planned.forecast.baselines["gis-h-uniform-recompute-3"].makespan_ns == alone.schedule.forecast.makespan_ns
    assert [stage.device for stage in alone.schedule.stages] == [0, 1, 2, 3] * 4


def test_an_earlier_plan_is_taken_over_with_its_order(planned):
    again = quick(PAIRS, TIGHT, microbatches=8, time_limit_s=0.0, seeds=(check(planned),)).schedule
    assert again.forecast.makespan_ns <= planned.forecast.makespan_ns
    kept = quick(PAIRS, TIGHT, microbatches=8, time_limit_s=0.0, keep=check(planned), seeds=(check(planned),)).schedule
    assert [stage.device for stage in kept.stages] == [stage.device for stage in planned.stages]
    assert kept.forecast.makespan_ns <= planned.forecast.makespan_ns


def test_an_earlier_plan_in_another_order_is_not_taken_where_the_placement_is_named(planned):
    named = quick(PAIRS, TIGHT, microbatches=8, placement="loop", seeds=(check(planned),)).schedule
    assert list(dict.fromkeys(stage.device for stage in named.stages)) == [0, 1, 2, 3]


def test_an_earlier_plan_by_number_is_where_other_orders_start(planned):
    by_number = quick(PAIRS, TIGHT, microbatches=8, placement="loop", stages_per_device=4).schedule
    better = quick(PAIRS, TIGHT, microbatches=8, time_limit_s=0.0, seeds=(check(by_number),)).schedule
    assert better.forecast.makespan_ns <= by_number.forecast.makespan_ns


def test_charts_show_the_devices_in_the_order_of_the_pipeline(planned):
    found = analyse(planned)
    order = list(dict.fromkeys(stage.device for stage in planned.stages))
    assert planned.pipeline == order != sorted(order)
    lines = gantt.render(found, 100).plain.splitlines()
    assert [int(line.split()[1]) for line in lines if line.strip().startswith("dev ")] == order
    picture = svg.render(planned)
    places = [picture.index(f">device {device}<") for device in order]
    assert places == sorted(places)
    assert chart(found, "plan", "", None)["pipeline"] == order
