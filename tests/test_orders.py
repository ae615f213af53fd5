"""A given order on the compiled machine: as its definition in plain Python; what it holds, as the file promises."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optpipe_compiler.lower import promised
from optpipe_compiler.machine.orders import held, retime
from optpipe_compiler.model.placement import layout
from optpipe_compiler.model.problem import Caps, Freedom, build, static_bytes
from optpipe_compiler.model.schedule import Kind, Stuck, Task
from tests import given_order
from tests.given_order import LaneOrders, lane_orders
from tests.instances import profiles
from tests.machines import dispatched, simulate
from tests.strategies import problems

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Profile

MANY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def shuffled(plan: LaneOrders, random: Random) -> LaneOrders:
    """The plan with some neighbours of its lanes exchanged: often one that gets stuck, else another one."""

    def swapped(lanes: tuple[tuple[Task, ...], ...]) -> tuple[tuple[Task, ...], ...]:
        result = []
        for lane in map(list, lanes):
            for _ in range(random.randrange(3) if len(lane) > 1 else 0):
                place = random.randrange(len(lane) - 1)
                lane[place : place + 2] = reversed(lane[place : place + 2])
            result.append(tuple(lane))
        return tuple(result)

    return LaneOrders(*map(swapped, plan[:4]), plan.host_limit)


@MANY
@given(one=problems(least=0), seed=st.integers(0, 10**6), more=st.integers(-2, 6))
def test_it_agrees_with_its_definition_tick_for_tick(one, seed, more):
    random = Random(seed)
    budget = tuple(max(0, size + more) for size in one.budget)
    for timed in dispatched(one):
        plan = lane_orders(timed) if random.random() < 0.3 else shuffled(lane_orders(timed), random)
        given_problem = replace(one, budget=budget)
        try:
            expected = given_order.simulate(given_problem, plan, "").starts
        except Stuck:
            expected = None
        try:
            found = simulate(given_problem, plan, "").starts
        except Stuck:
            found = None
        assert found == expected


def without_instants(profile: Profile) -> Profile:
    """What ops of no length hold depends on their order within a moment, which lowering makes."""
    times = ("forward_ns", "backward_input_ns", "backward_weight_ns")
    layers = [
        msgspec.structs.replace(layer, **{name: getattr(layer, name) + 1 for name in times}) for layer in profile.layers
    ]
    links = [msgspec.structs.replace(link, latency_ns=link.latency_ns + 1) for link in profile.machine.links]
    return msgspec.structs.replace(
        profile, layers=layers, machine=msgspec.structs.replace(profile.machine, links=links)
    )


@MANY
@given(profile=profiles(), microbatches=st.integers(1, 5), room=st.integers(0, 4000), seed=st.integers(0, 10**6))
def test_what_it_holds_is_what_the_file_promises(profile, microbatches, room, seed):
    random = Random(seed)
    devices, count = profile.machine.devices, len(profile.layers)
    name = random.choice(["linear", *["loop", "v"] * (count >= 2 * devices)])
    place = layout(name, devices, 1 if name == "linear" else 2, [1] * count)
    profile = without_instants(profile)
    one = build(profile, place, microbatches, Caps(10**9, None), Freedom(), random.choice([1.0, 0.5]))
    most = max(stage.saved + stage.forward_extra for stage in one.stages)
    one = replace(one, budget=(2 * most + room,) * devices)
    for timed in dispatched(one):
        fixed = static_bytes(profile, place)
        roomy = replace(one, budget=(10**12,) * devices)
        anywhere = lane_orders(timed)._replace(host_limit=(10**12,) * devices)
        for other in (timed, given_order.simulate(roomy, anywhere, "")):
            peaks, host_peaks, _ = held(other)
            assert ([size + peak for size, peak in zip(fixed, peaks, strict=True)], host_peaks) == promised(
                other, profile, place
            )
        try:
            again = retime(timed, one)
        except Stuck:
            continue
        assert all(np.less_equal(held(again).peaks, one.budget))


@MANY
@given(one=problems())
def test_what_each_op_holds_is_the_memory_curve(one):
    for timed in dispatched(one):
        levels = held(timed).levels
        for device in range(one.devices):
            mine = [n for n, task in enumerate(timed.sequence) if one.stages[task.stage].device == device]
            curve = [level for _, level in given_order.memory_curve(timed, device)]
            kinds = [timed.sequence[n].kind for n in mine]
            assert [int(levels[n]) for n, kind in zip(mine, kinds, strict=True) if kind is not Kind.D] == [
                level for level, kind in zip(curve, kinds, strict=True) if kind is not Kind.D
            ]
