"""A transfer takes its link's time alone only while none of the other direction runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from optpipe_compiler.model.schedule import Kind
from optpipe_compiler.verify import verify
from tests.instances import problem, quick, uniform
from tests.machines import dispatched

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir


@pytest.fixture(scope="module")
def offloading() -> ir.Schedule:
    """Pairs of devices behind links whose directions slow each other down to a half."""
    costs = uniform(4, 2, shared_links="pairs", duplex_slowdown=2.0, d2h_ms=0.7, h2d_ms=0.7)
    schedule = quick(costs, 3 * 10**9, microbatches=8, recompute=False, method="gis-h-offload").schedule
    assert verify(schedule, costs) == []
    return schedule


def transfers(schedule: ir.Schedule) -> list[tuple[int, str, int, int, int]]:
    """Return (device, lane, index, start, end) of every transfer."""
    return [
        (times.device, times.lane, index, start, end)
        for times in schedule.forecast.times
        if times.lane != "compute"
        for index, (start, end) in enumerate(zip(times.start_ns, times.end_ns, strict=True))
    ]


def test_a_plan_has_transfers_of_both_lengths_and_only_those_that_meet_are_slow(offloading):
    rows = transfers(offloading)
    shortest = min(end - start for _, _, _, start, end in rows)
    lengths = set()
    for device, lane, _, start, end in rows:
        meets = any(s < end and start < e for d, other, _, s, e in rows if other != lane and d // 2 == device // 2)
        assert (end - start == shortest) != meets
        lengths.add(end - start)
    assert len(lengths) == 2


def test_a_transfer_that_claims_the_other_speed_is_refused(offloading):
    rows = transfers(offloading)
    shortest = min(end - start for _, _, _, start, end in rows)
    for device, lane, index, start, end in rows:
        other = 2 * shortest if end - start == shortest else shortest
        times = list(offloading.forecast.times)
        place = next(n for n, one in enumerate(times) if (one.device, one.lane) == (device, lane))
        ends = list(times[place].end_ns)
        ends[index] = start + other
        times[place] = msgspec.structs.replace(times[place], end_ns=ends)
        forecast = msgspec.structs.replace(offloading.forecast, times=times)
        assert verify(msgspec.structs.replace(offloading, forecast=forecast)) != []


@pytest.mark.parametrize("cap", [4, 6, 8])
def test_every_timing_agrees_on_which_transfers_are_alone(cap):
    one = problem(2, 6, cap, offload=12, reload=12, offload_alone=7, reload_alone=5)
    offloading = [timed for timed in dispatched(one) if timed.count(Kind.D)]
    assert offloading
    for schedule in offloading:
        moving = [task for task in schedule.starts if task.kind in (Kind.D, Kind.H)]
        for task in moving:
            link = one.link_of[one.stages[task.stage].device]
            meets = any(
                schedule.starts[other] < schedule.end(task) and schedule.starts[task] < schedule.end(other)
                for other in moving
                if other.kind is not task.kind and one.link_of[one.stages[other.stage].device] == link
            )
            assert schedule.is_alone(task) != meets
