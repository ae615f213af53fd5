"""The trace for Perfetto: slices, arrows and counters say what the schedule says."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from small_schedules import Shape, build, random_shape

from optpipe_compiler.export.chrome_trace import CELLS, LANE_NAMES, render
from optpipe_compiler.forecast import analyse
from optpipe_compiler.forecast import table as forecast_table
from optpipe_compiler.verify import check
from optpipe_compiler.verify.memory import Table
from optpipe_compiler.verify.placed import PlacedOps

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir

PLACEMENTS = [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2)]


def drawn(seed: int) -> ir.Schedule:
    return build(random_shape(Random(seed), placements=PLACEMENTS, microbatches=4), seed)


def events(schedule: ir.Schedule, phase: str) -> list[dict[str, Any]]:
    trace = json.loads(render(check(schedule)))
    assert trace["displayTimeUnit"] == "ms"
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("seed", range(4))
def test_every_op_that_takes_time_is_one_slice_at_its_forecast_time(seed):
    schedule = drawn(seed)
    expected = Counter(
        (device.device, op.name, op.stage, op.microbatch, start / 1000, (end - start) / 1000)
        for device in schedule.devices
        for _, _, op, start, end in schedule.timed(device.device)
    )
    slices = events(schedule, "X")
    found = Counter(
        (event["pid"], event["cat"], event["args"]["stage"], event["args"]["microbatch"], event["ts"], event["dur"])
        for event in slices
    )
    assert found == expected
    assert {event["cat"] for event in slices} <= set(CELLS)


@pytest.mark.parametrize("seed", range(4))
def test_slices_of_one_thread_follow_one_another(seed):
    threads = defaultdict(list)
    for event in events(drawn(seed), "X"):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(sorted(spans)))


def test_a_slice_is_named_like_a_cell_of_torch_and_says_what_it_waits_for():
    schedule = build(
        Shape((0, 1), microbatches=1, ranges=lambda stage, microbatch: [("offload", 2 * stage, 2 * stage + 2)])
    )
    slices = {event["args"]["op"]: event for event in events(schedule, "X") if event["args"]["stage"] == 1}
    assert slices["forward"]["name"] == "1F0"
    assert slices["reload"]["name"] == "1 reload 0"
    assert slices["reload"]["args"]["layers"] == "2-3"
    assert slices["reload"]["args"]["waits for"] == ", ".join(schedule.devices[1].h2d[0].after)


def test_devices_are_processes_and_lanes_are_threads_by_name_and_in_order():
    schedule = build(Shape((0, 1, 0), ranges=lambda stage, microbatch: [("offload", 2, 4)] if stage == 1 else []))
    named: dict[str, dict[Any, Any]] = defaultdict(dict)
    for event in events(schedule, "M"):
        (value,) = event["args"].values()
        named[event["name"]][event["pid"], event["tid"]] = value
    assert named["process_name"] == {
        (0, 0): "device 0: layers 0-1, 4-5",
        (1, 0): "device 1: layers 2-3",
        (2, 0): "host",
    }
    assert named["process_sort_index"] == {(0, 0): 0, (1, 0): 1, (2, 0): 2}
    lanes = dict(enumerate(LANE_NAMES.values()))
    assert named["thread_name"] == {(0, 0): lanes[0], **{(1, number): name for number, name in lanes.items()}}
    assert named["thread_sort_index"] == {key: key[1] for key in named["thread_name"]}


@pytest.mark.parametrize("seed", range(4))
def test_arrows_lead_from_the_op_that_makes_a_tensor_to_the_one_that_reads_it(seed):
    schedule = drawn(seed)
    slices = events(schedule, "X")

    def around(event: dict[str, Any]) -> dict[str, Any]:
        (found,) = [
            one
            for one in slices
            if (one["pid"], one["tid"]) == (event["pid"], event["tid"])
            and one["ts"] < event["ts"] < one["ts"] + one["dur"]
        ]
        return found

    starts = {event["id"]: event for event in events(schedule, "s")}
    ends = {event["id"]: event for event in events(schedule, "f")}
    assert starts.keys() == ends.keys()
    assert all(end["bp"] == "e" for end in ends.values())
    sent = Counter(op.name for device in schedule.devices for op in (*device.compute, *device.d2h))
    found = Counter(event["name"] for event in starts.values())
    assert found["activation"] == sent["send_activation"] > 0
    assert found["gradient"] == sent["send_gradient"] > 0
    assert found["offloaded"] == sent["offload"]
    steps = {"activation": 1, "gradient": -1, "offloaded": 0}
    for number, event in starts.items():
        source, target = around(event), around(ends[number])
        assert target["args"]["stage"] - source["args"]["stage"] == steps[event["name"]]
        assert target["args"]["microbatch"] == source["args"]["microbatch"]
        assert source["ts"] + source["dur"] <= target["ts"] + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_memory_is_counted_by_the_table_of_the_judge(seed):
    schedule = drawn(seed)
    plan = PlacedOps(schedule)
    table, judge = forecast_table.Table(schedule), Table(plan)
    for place in plan.places:
        assert table.on_device(place.op) == judge.on_device(place.op), place.id


@pytest.mark.parametrize("seed", range(6))
def test_memory_starts_and_ends_with_what_is_always_there_and_stays_below_the_promise(seed):
    from runtime_cases import promise_exactly

    schedule = promise_exactly(drawn(seed))
    curves = counters(schedule)
    for device in schedule.devices:
        mine = [stage for stage in schedule.stages if stage.device == device.device]
        always = schedule.setup.reserve_bytes + sum(stage.static_bytes for stage in mine)
        held = curves[device.device, "device memory"]
        assert held[0] == held[-1] == always == min(held)
        assert always < max(held) <= device.peak_bytes
        host = curves.get((device.device, "host memory"), [])
        assert bool(host) == bool(device.d2h)
        assert not host or host[0] == host[-1] == 0 < max(host) <= device.host_bytes


def test_counters_show_memory_of_every_device_and_of_the_host_against_the_caps():
    schedule = build(Shape((0, 1), ranges=lambda stage, microbatch: [("offload", 2, 4)] if stage == 1 else []))
    found = counters(schedule)
    own = {(device, f"device memory{cap}") for device in (0, 1) for cap in ("", " cap")}
    assert set(found) == own | {(1, "host memory"), (2, "host memory"), (2, "host memory cap")}
    for device, curve in enumerate(analyse(schedule).memory):
        assert found[device, "device memory"] == [held for _, held in curve]
    assert set(found[0, "device memory cap"]) == {schedule.setup.cap_bytes}
    assert set(found[2, "host memory cap"]) == {schedule.setup.host_cap_bytes}
    assert found[1, "host memory"] == found[2, "host memory"]


def counters(schedule: ir.Schedule) -> dict[tuple[int, str], list[int]]:
    """The bytes of each counter in order, by process and name."""
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for event in events(schedule, "C"):
        found[event["pid"], event["name"]].append(event["args"]["bytes"])
    return found


def test_without_offloads_there_is_no_host():
    schedule = build(Shape((0, 1)))
    assert {event["pid"] for phase in "MXC" for event in events(schedule, phase)} == {0, 1}
    assert {event["tid"] for event in events(schedule, "X")} == {0}
