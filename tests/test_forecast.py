"""What binds: the reasons why ops start when they do, memory curves, and the causes of idle time."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, given, reject, settings
from hypothesis import strategies as st

from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput, Infeasible, NotFound
from optpipe_compiler.forecast import HOLDERS, Analysis, Cause, Item, Reason, analyse
from optpipe_compiler.lower import Certificate, lower, promised
from optpipe_compiler.machine.orders import retime
from optpipe_compiler.model.placement import layout
from optpipe_compiler.model.problem import Caps, Freedom, build, busy_ns
from optpipe_compiler.model.schedule import Mode, Stuck
from optpipe_compiler.published import METHODS, NotDefined
from optpipe_compiler.published import published as publish
from tests.instances import profiles, quick, uniform
from tests.plans import serial

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Profile

GB = 10**9
SHARED = {"shared_links": "pairs", "d2h_ms": 1.5, "h2d_ms": 1.5, "activation_gb": 1.0}


@cache
def published(method: str) -> Analysis | None:
    """A published schedule on four devices with shared host links, a heavy head and room for it."""
    profile = uniform(4, 4, head_ms=(0.6, 0.6, 0.6), **SHARED)
    try:
        return analyse(quick(profile, 100 * GB, microbatches=8, method=method).schedule)
    except (Infeasible, NotFound, BadInput):
        return None


def travel(analysis: Analysis, before: Item, item: Item) -> int:
    """How long the message between two ops takes by the forecast's costs."""
    cost = analysis.schedule.forecast.stages[before.op.stage]
    return cost.send_activation_ns if isinstance(item.op, ir.Forward) else cost.send_gradient_ns


def explains(analysis: Analysis, item: Item) -> bool:
    """Whether what the analysis says an op waited for ends when it starts, and is what the reason says."""
    if item.reason is Reason.START:
        return item.predecessor is None and item.begin_ns == analysis.begin_ns
    if item.predecessor is None:
        return False
    before = analysis.items[item.predecessor]
    late = before.end_ns == item.begin_ns
    same = (before.op.stage, before.op.microbatch) == (item.op.stage, item.op.microbatch)
    link = next((link.devices for link in analysis.schedule.forecast.links if item.device in link.devices), [])
    match item.reason:
        case Reason.ORDER:
            return late and (before.device, before.lane) == (item.device, item.lane) and before.index == item.index - 1
        case Reason.MESSAGE:
            neighbours = abs(before.op.stage - item.op.stage) == 1 and before.op.microbatch == item.op.microbatch
            return neighbours and before.end_ns + travel(analysis, before, item) == item.begin_ns
        case Reason.DATA:
            return late and same and isinstance(before.op, ir.Forward) and isinstance(item.op, ir.Offload)
        case Reason.TRANSFER:
            return late and same and before.lane == ("d2h" if item.lane == "h2d" else "h2d")
        case Reason.LINK:
            return (
                late
                and before.lane == item.lane != "compute"
                and before.device in link
                and before.device != item.device
            )
        case Reason.MEMORY:
            return before.end_ns <= item.begin_ns and (
                before.device == item.device or starts_with_another(analysis, item)
            )
        case Reason.COPIES:
            follows = (before.device, before.index) == (item.device, item.index - 1)
            return follows and item.begin_ns - before.end_ns == taken(analysis, before, item)
    return False


def taken(analysis: Analysis, before: Item, item: Item) -> int:
    """What copies take from compute between two ops."""
    copies = [one for one in analysis.items if one.lane != "compute"]
    behind = [one for one in copies if one.lane == "d2h" and isinstance(before.op, ir.Forward)]
    ahead = [one for one in copies if one.lane == "h2d" and isinstance(item.op, ir.Backward | ir.BackwardInput)]
    mine = [one for one in behind if (one.op.stage, one.op.unit) == (before.op.stage, before.op.unit)]
    mine += [one for one in ahead if (one.op.stage, one.op.unit) == (item.op.stage, item.op.unit)]
    return sum(busy_ns(one.end_ns - one.begin_ns, share_of(analysis, one.device)) for one in mine)


def share_of(analysis: Analysis, device: int) -> int:
    """The links of these tests are as fast with both directions busy."""
    return next(link.share_permille for link in analysis.schedule.forecast.links if device in link.devices)


def starts_with_another(analysis: Analysis, item: Item) -> bool:
    """Whether an op of the device's other lanes that waited for the same starts at the same time."""
    return any(
        (other.device, other.begin_ns, other.predecessor) == (item.device, item.begin_ns, item.predecessor)
        for other in analysis.items
        if other.lane != item.lane
    )


def peaks(analysis: Analysis) -> list[int]:
    """The most that each device holds by the forecast."""
    return [max(held for _, held in curve) for curve in analysis.memory]


def check(analysis: Analysis) -> None:
    """What must hold for every schedule that compile writes."""
    schedule = analysis.schedule
    unexplained = [item for item in analysis.items if not explains(analysis, item)]
    assert unexplained == []
    assert sum(analysis.shares().values()) == pytest.approx(schedule.forecast.bubble_fraction, abs=1e-12)
    compute = sum(item.end_ns - item.begin_ns for item in analysis.items if item.lane == "compute")
    assert analysis.bubble_ns == len(schedule.devices) * schedule.forecast.makespan_ns - compute
    assert all(peak <= device.peak_bytes for peak, device in zip(peaks(analysis), schedule.devices, strict=True))
    assert max(held for _, held in analysis.host) <= sum(device.host_bytes for device in schedule.devices)
    assert analysis.host[-1][1] == 0
    for curve in (*analysis.memory, analysis.host):
        assert [time for time, _ in curve] == sorted(time for time, _ in curve)
    for curve, device in zip(analysis.memory, schedule.devices, strict=True):
        static = sum(stage.static_bytes for stage in schedule.stages if stage.device == device.device)
        assert curve[-1][1] == static + schedule.setup.reserve_bytes
    for curve, stack in zip(analysis.memory, analysis.holders, strict=True):
        assert set(curve) <= {(time, sum(holds)) for time, holds in stack}
        assert all(size >= 0 for _, holds in stack for size in holds)
        assert {holds[HOLDERS.index("static")] for _, holds in stack} == {curve[-1][1]}


@pytest.mark.parametrize("method", METHODS)
def test_every_start_and_every_gap_of_a_published_schedule_is_explained(method):
    analysis = published(method)
    if analysis is not None:
        check(analysis)
        assert peaks(analysis) == [device.peak_bytes for device in analysis.schedule.devices]


def test_most_published_schedules_were_analysed():
    assert sum(published(method) is not None for method in METHODS) > len(METHODS) // 2


CERTIFICATE = Certificate("makespan", "feasible", 0, "none", {}, {})


def lowered(profile: Profile, method: str, microbatches: int, tightness: float) -> ir.Schedule:
    """A published order, each op waiting for memory under a cap of that share of what it takes without one.

    Where it gets stuck, the cap is larger: an instance costs more to draw than to try.
    """
    devices, (name, per_device) = profile.machine.devices, METHODS[method].placements[0]
    assume(devices * per_device <= len(profile.expanded_layers()))
    where = layout(name, devices, per_device, [1] * len(profile.expanded_layers()))
    try:
        timed = publish(build(profile, where, microbatches, Caps(10**9, None), Freedom()), method)
    except (NotDefined, Stuck):
        reject()
    most = max(promised(timed, profile, where)[0])
    kept = None
    for share in (tightness, (tightness + 1) / 2, 1.0):
        caps = Caps(int(most * share), None)
        with suppress(Stuck):
            kept = retime(timed, build(profile, where, microbatches, caps, Freedom()))
            break
    assume(kept is not None)
    return lower(kept, profile, where, caps, CERTIFICATE)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(
    profile=profiles(),
    method=st.sampled_from(["gpipe", "1f1b", "zb-h2", "1f1b-recompute", "zbv", "gis", "gis-h-offload", "gis-offload"]),
    microbatches=st.integers(1, 6),
    tightness=st.floats(0.3, 1.0),
)
def test_every_start_and_every_gap_is_explained_whatever_the_costs(profile, method, microbatches, tightness):
    check(analyse(lowered(profile, method, microbatches, tightness)))


# -- causes -------------------------------------------------------------------------------------------------------


def causes(analysis: Analysis) -> dict[str, float]:
    """The share of each cause with its resource, as text."""
    return {f"{cause.value} {resource}".strip(): share for (cause, resource), share in analysis.shares().items()}


def compiled(profile, cap_gb: float, **options: object) -> Analysis:
    return analyse(quick(profile, int(cap_gb * GB), **options).schedule)


def test_a_pipeline_that_only_fills_and_drains_idles_for_nothing_else():
    analysis = compiled(uniform(4, 1, p2p_ms=0.0), 100, microbatches=8, method="gpipe")
    assert set(causes(analysis)) == {"fill", "drain"}
    ends = [gap for gap in analysis.gaps if analysis.begin_ns in (gap.begin_ns,) or gap.end_ns == analysis.end_ns]
    assert {gap.length_ns for gap in ends if gap.cause is Cause.FILL} == {10**6, 2 * 10**6, 3 * 10**6}


def test_one_microbatch_waits_for_nothing_but_its_way_there_and_back():
    assert set(causes(compiled(uniform(3, 1), 100, microbatches=1))) == {"fill", "drain"}


def test_the_heavy_device_is_named_where_the_others_wait_for_it():
    profile = uniform(2, 1, p2p_ms=0.0, head_ms=(6.0, 6.0, 6.0))
    found = causes(compiled(profile, 100, microbatches=12, method="1f1b"))
    assert found["imbalance device 1"] > 0.2
    assert set(found) == {"imbalance device 1", "fill", "drain"}


def test_the_device_whose_memory_holds_forwards_back_is_named():
    profile = uniform(4, 1, residue_fraction=1.0)
    options = {"placement": "linear", "stages_per_device": 1, "offload": False, "recompute": False, "split": False}
    found = causes(compiled(profile, 1.0, microbatches=6, **options))
    assert found["memory memory of device 0"] > 0.4
    assert set(found) <= {"fill", "drain", "memory memory of device 0"}


def test_the_link_that_backwards_wait_for_is_named():
    """One microbatch after the other, everything offloaded and brought back at once."""
    profile, caps = uniform(2, 1, d2h_ms=3.0, h2d_ms=3.0), Caps(100 * GB, None)
    where = layout("linear", 2, 1, [1, 1])
    exact = build(profile, where, 3, caps, Freedom())
    timed = retime(serial(exact, split=False, mode=lambda stage, microbatch: Mode.OFFLOAD), exact)
    analysis = analyse(lower(timed, profile, where, caps, CERTIFICATE))
    waiting = {gap.resource for gap in analysis.gaps if gap.device == 1 and gap.cause is Cause.TRANSFER}
    assert waiting == {"link 1 h2d"}
    assert sum(share for name, share in causes(analysis).items() if name.startswith("transfer link")) > 0.2


def test_copies_that_take_compute_are_named():
    """Four stages on a device, each with 50 us for its copies in either direction, all taken from compute."""
    profile = uniform(2, 4, p2p_ms=0.0, d2h_ms=0.2, h2d_ms=0.2, copy_share=1.0)
    analysis = compiled(profile, 100, microbatches=6, method="interleaved-1f1b-offload")
    assert [item for item in analysis.items if not explains(analysis, item)] == []
    assert {gap.length_ns for gap in analysis.gaps if gap.cause is Cause.COPIES} == {50_000, 2 * 50_000}
    assert sum(share for name, share in causes(analysis).items() if name.startswith("copies device")) > 0.02


def test_an_order_that_leaves_room_unused_is_named():
    options = {"placement": "linear", "stages_per_device": 1, "method": "zb-memory-limited"}
    found = causes(compiled(uniform(4, 4), 2.0, microbatches=12, **options))
    assert found["order device 1"] > 0.3


def test_a_cap_with_more_room_turns_memory_into_order():
    """The same times under a larger cap: what memory held back before, only the order holds back then."""
    profile = uniform(4, 1, residue_fraction=1.0)
    options = {"placement": "linear", "stages_per_device": 1, "offload": False, "recompute": False, "split": False}
    schedule = quick(profile, GB, microbatches=6, **options).schedule
    roomy = msgspec.structs.replace(schedule, setup=msgspec.structs.replace(schedule.setup, cap_bytes=100 * GB))
    tight, loose = causes(analyse(schedule)), causes(analyse(roomy))
    assert tight["memory memory of device 0"] == loose["order device 0"]
    assert sum(tight.values()) == pytest.approx(sum(loose.values()))


def delayed(schedule: ir.Schedule, by_ns: int) -> ir.Schedule:
    """The schedule with the last op of device 0 later than anything asks for."""
    times = [
        msgspec.structs.replace(
            one,
            start_ns=[*one.start_ns[:-1], one.start_ns[-1] + by_ns],
            end_ns=[*one.end_ns[:-1], one.end_ns[-1] + by_ns],
        )
        if (one.device, one.lane) == (0, "compute")
        else one
        for one in schedule.forecast.times
    ]
    return msgspec.structs.replace(schedule, forecast=msgspec.structs.replace(schedule.forecast, times=times))


def test_an_op_that_nothing_keeps_is_slack():
    schedule = quick(uniform(2, 1), 100 * GB).schedule
    analysis = analyse(delayed(schedule, 7))
    late = [item for item in analysis.items if item.reason is Reason.SLACK]
    assert [item.device for item in late] == [0]
    assert [(gap.cause, gap.length_ns) for gap in analysis.gaps if gap.cause is Cause.SLACK] == [(Cause.SLACK, 7)]


# -- chains, curves, damage ---------------------------------------------------------------------------------------


def test_the_critical_path_has_no_hole_and_is_as_long_as_the_makespan():
    analysis = compiled(uniform(4, 4, p2p_ms=0.0), 100, microbatches=8, method="1f1b")
    path = analysis.critical_path()
    assert path[0].begin_ns == analysis.begin_ns
    assert sum(item.end_ns - item.begin_ns for item in path) == analysis.schedule.forecast.makespan_ns


def test_a_forecast_that_does_not_fit_its_lanes_is_refused_in_one_sentence():
    schedule = quick(uniform(2, 1), 100 * GB).schedule
    times = schedule.forecast.times
    for broken in (
        times[1:],
        [*times, times[0]],
        [msgspec.structs.replace(times[0], end_ns=times[0].end_ns[1:]), *times[1:]],
    ):
        forecast = msgspec.structs.replace(schedule.forecast, times=broken)
        with pytest.raises(BadInput, match=r"forecast.times of the compute lane of device 0 .*optpipe verify"):
            analyse(msgspec.structs.replace(schedule, forecast=forecast))
    with pytest.raises(BadInput, match="begin before"):
        analyse(delayed(schedule, -(10**6)))
