"""Every rule of the judge: a smallest legal schedule that it accepts, and the smallest change that it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_schedules import Shape, build, build_with_profile, changed

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import P2P, Host, Link, Model, Quantity
from optpipe_compiler.verify import Violated, Violation, causality, check, memory, verify
from optpipe_compiler.verify.placed import PlacedOps
from tests.instances import quick, uniform

ROOT = Path(__file__).parents[1]
Change = Callable[[Any], None]

PLAIN = Shape()
MIXED = Shape(
    fused=lambda stage, microbatch: microbatch == 1,
    ranges=lambda stage, microbatch: [
        ("offload", 2 * stage, 2 * stage + 1),
        ("recompute", 2 * stage + 1, 2 * stage + 2),
    ],
)
SHAPES = {
    "one device": Shape(placement=(0,), microbatches=3),
    "two devices": PLAIN,
    "two devices, every state": MIXED,
    "a loop of two stages per device": Shape(placement=(0, 1, 0, 1), ranges=MIXED.ranges, fused=MIXED.fused),
    "a V of two stages per device": Shape(placement=(0, 1, 1, 0), ranges=MIXED.ranges, fused=MIXED.fused),
    "three devices": Shape(placement=(0, 1, 2), microbatches=3, ranges=MIXED.ranges),
    "a device without a stage": Shape(placement=(0, 2)),
}


def rules(schedule: ir.Schedule) -> set[str]:
    return {violation.rule for violation in verify(schedule)}


def find(plain: Any, name: str) -> tuple[list[Any], int]:
    """Return the lane, as a list of plain ops, and the index of the op with this id."""
    for device in plain["devices"]:
        for lane in ("compute", "d2h", "h2d"):
            for index, op in enumerate(device[lane]):
                if identity(op) == name:
                    return device[lane], index
    raise KeyError(name)


def identity(op: Any) -> str:
    text = f"{op['op']}:{op['stage']}:{op['microbatch']}"
    return text + (":{}-{}".format(*op["layers"]) if "layers" in op else "")


def drop(name: str) -> Change:
    """Remove an op, the waits on it, and its forecast."""

    def change(plain: Any) -> None:
        lane, index = find(plain, name)
        for device in plain["devices"]:
            for key in ("compute", "d2h", "h2d"):
                if device[key] is lane:
                    for times in plain["forecast"]["times"]:
                        if (times["device"], times["lane"]) == (device["device"], key):
                            del times["start_ns"][index], times["end_ns"][index]
                for op in device[key]:
                    op["after"] = [other for other in op.get("after", []) if other != name]
        del lane[index]

    return change


def swap(first: str, second: str) -> Change:
    def change(plain: Any) -> None:
        (lane, i), (other, j) = find(plain, first), find(plain, second)
        lane[i], other[j] = other[j], lane[i]

    return change


def put(name: str, **fields: Any) -> Change:
    """Set fields of an op."""

    def change(plain: Any) -> None:
        lane, index = find(plain, name)
        lane[index].update(fields)

    return change


def put_in(*path: Any) -> Change:
    """Set what stands at path[:-1] to path[-1], or apply it when it is a function."""

    def change(plain: Any) -> None:
        *steps, last, value = path
        for step in steps:
            plain = plain[step]
        plain[last] = value(plain[last]) if callable(value) else value

    return change


def refused(schedule: ir.Schedule, change: Change, rule: str) -> Violation:
    """Assert that the change breaks `rule` (whatever else it breaks) and return that violation."""
    assert verify(schedule) == []
    found = [violation for violation in verify(changed(schedule, change)) if violation.rule == rule]
    assert found, f"{rule} not among {rules(changed(schedule, change))}"
    return found[0]


@pytest.mark.parametrize("name", SHAPES)
def test_a_legal_schedule_is_accepted_with_and_without_its_profile(name: str) -> None:
    schedule, profile = build_with_profile(SHAPES[name])
    assert verify(schedule) == []
    assert verify(schedule, profile) == []


def test_what_was_checked_is_another_type_and_holds_the_schedule() -> None:
    schedule, profile = build_with_profile(PLAIN)
    assert check(schedule, profile) == ir.Checked(schedule)


def test_a_schedule_that_breaks_a_rule_is_not_checked_and_all_violations_are_said() -> None:
    wrong = changed(build(PLAIN), put_in("setup", "cap_bytes", 1))
    with pytest.raises(Violated) as caught:
        check(wrong)
    assert caught.value.violations == verify(wrong)
    assert str(caught.value) == verify(wrong)[0].message


def test_the_judge_imports_neither_planning_nor_solver_nor_torch() -> None:
    code = "import sys, optpipe_compiler.verify; print(*[m for m in sys.modules if m[:3] in ('opt', 'ort', 'tor')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    shared = {"optpipe_compiler", "optpipe_compiler.errors"}
    loaded = set(done.stdout.split()) - shared
    rooms = ("optpipe_compiler.verify", "optpipe_compiler.documents")
    assert {name for name in loaded if not name.startswith(rooms)} == set()


# --- tables


def test_a_number_that_64_bits_do_not_hold_is_refused_and_the_largest_that_they_hold_is_not() -> None:
    assert verify(changed(build(PLAIN), put_in("setup", "cap_bytes", 2**63 - 1))) == []
    refused(build(PLAIN), put_in("setup", "cap_bytes", 2**63), "numbers")


def test_sums_beyond_64_bits_are_formed_without_loss() -> None:
    schedule = changed(build(PLAIN), put_in("stages", 0, "saved_bytes", [2**62, 2**62]))
    held = worst(schedule).worst_on_device(0).held
    assert held > 2**64
    assert f"can hold {held} bytes" in next(v.message for v in verify(schedule) if v.rule == "device-memory")


@pytest.mark.parametrize(
    "change",
    [put_in("setup", "devices", 3), put_in("devices", 0, "device", 1), put_in("devices", lambda ds: ds[:1])],
)
def test_devices_that_are_not_numbered_as_setup_says_are_refused(change: Change) -> None:
    refused(build(PLAIN), change, "devices")


@pytest.mark.parametrize(
    "change",
    [
        put_in("stages", 0, "stage", 1),
        put_in("stages", 1, "device", 2),
        put_in("stages", 0, "layers", [0, 1]),
        put_in("stages", 1, "layers", [2, 2]),
        put_in("stages", 1, "layers", [1, 3]),
        put_in("stages", []),
        put_in("setup", "layers", 5),
        put_in("stages", 0, "saved_bytes", [1]),
        put_in("stages", 0, "backward_transient_bytes", [1, 1, 1]),
        put_in("stages", 0, "input_bytes", 1),
        put_in("stages", 1, "output_bytes", 1),
        put_in("stages", 1, "input_bytes", lambda old: old + 1),
        put_in("stages", 0, "checkpoint_bytes", [41, 0]),
        put_in("stages", 0, "residue_bytes", [46, 0]),
    ],
)
def test_stages_that_do_not_cut_the_model_or_whose_bytes_contradict_each_other_are_refused(change: Change) -> None:
    refused(build(PLAIN), change, "stages")


def test_a_peak_at_the_cap_is_accepted_and_above_it_refused() -> None:
    schedule = build(PLAIN)
    peak = schedule.devices[1].peak_bytes
    assert verify(changed(schedule, put_in("setup", "cap_bytes", peak))) == []
    assert refused(schedule, put_in("setup", "cap_bytes", peak - 1), "caps").device == 0


def test_the_host_cap_covers_all_devices_together_and_may_be_absent() -> None:
    schedule = build(MIXED)
    total = sum(device.host_bytes for device in schedule.devices)
    assert verify(changed(schedule, put_in("setup", "host_cap_bytes", total))) == []
    assert verify(changed(schedule, put_in("setup", "host_cap_bytes", None))) == []
    refused(schedule, put_in("setup", "host_cap_bytes", total - 1), "caps")


def test_each_host_has_a_cap_for_the_devices_that_stand_on_it() -> None:
    schedule, profile = build_with_profile(MIXED)
    held = [device.host_bytes for device in schedule.devices]
    assert all(held)

    def put(*hosts: tuple[list[int], int]) -> Change:
        return put_in("setup", "hosts", [{"devices": devices, "cap_bytes": cap} for devices, cap in hosts])

    for hosts in ([([0], held[0]), ([1], held[1])], [([0, 1], sum(held))], [([1], held[1])]):
        allowed = changed(schedule, put(*hosts))
        assert (allowed.version, verify(allowed)) == (4, [])
    refused(schedule, put(([0], held[0] + held[1]), ([1], held[1] - 1)), "caps")
    refused(schedule, put(([0, 1], sum(held) - 1)), "caps")
    refused(schedule, put(([0, 2], sum(held))), "hosts")
    refused(schedule, put(([0], sum(held)), ([1, 0], sum(held))), "hosts")
    hosts = [Host(devices=[1, 3], memory_bytes=held[1]), Host(devices=[2], memory_bytes=1)]
    other = msgspec.structs.replace(profile, machine=msgspec.structs.replace(profile.machine, hosts=hosts))
    assert verify(changed(schedule, put(([1], held[1]))), other) == []
    for wrong in (schedule, changed(schedule, put(([1], held[1] + 1))), changed(schedule, put(([0, 1], 10**10)))):
        assert {violation.rule for violation in verify(wrong, other)} == {"profile-hosts"}


def test_a_contract_that_was_edited_under_its_digest_is_refused() -> None:
    edited = changed(build(PLAIN), put_in("setup", "cap_bytes", lambda old: old + 1), sealed=False)
    assert rules(edited) == {"digest"}


# --- which ops there are


@pytest.mark.parametrize(
    "name",
    [
        "forward:0:1",
        "send_activation:0:0",
        "recv_activation:1:0",
        "send_gradient:1:1",
        "recv_gradient:0:1",
        "backward_weight:1:0",
        "backward_input:1:0",
        "backward:0:1",
    ],
)
def test_a_missing_op_is_refused(name: str) -> None:
    assert refused(build(MIXED), drop(name), "completeness").ops


def test_an_op_that_stands_twice_is_refused_at_the_second_place() -> None:
    def twice(plain: Any) -> None:
        lane, index = find(plain, "forward:1:0")
        lane.append(lane[index])

    found = refused(build(PLAIN), twice, "completeness")
    assert (found.device, found.lane, found.index) == (1, "compute", len(build(PLAIN).devices[1].compute))


def test_an_op_on_a_device_that_does_not_own_its_stage_is_refused() -> None:
    def move(plain: Any) -> None:
        lane, index = find(plain, "backward_weight:1:1")
        plain["devices"][0]["compute"].append(lane.pop(index))

    found = refused(build(PLAIN), move, "completeness")
    assert found.message == "backward_weight:1:1 is on device 0, but stage 1 is on device 1"


@pytest.mark.parametrize("fields", [{"stage": 2}, {"microbatch": 2}])
def test_an_op_of_a_stage_or_microbatch_that_does_not_exist_is_refused(fields: dict[str, int]) -> None:
    refused(build(PLAIN), put("backward_weight:1:1", **fields), "completeness")


def test_a_fused_backward_beside_the_two_halves_is_refused() -> None:
    def add(plain: Any) -> None:
        lane, index = find(plain, "backward_input:1:1")
        lane.append({**lane[index], "op": "backward"})

    refused(build(PLAIN), add, "completeness")


def test_a_message_between_stages_of_one_device_is_refused() -> None:
    def add(plain: Any) -> None:
        plain["devices"][1]["compute"].append({"op": "send_activation", "stage": 1, "microbatch": 0, "peer": 0})

    refused(build(SHAPES["a V of two stages per device"]), add, "completeness")


def test_a_message_with_the_wrong_peer_is_refused() -> None:
    refused(build(SHAPES["three devices"]), put("send_activation:0:0", peer=2), "peer")


@pytest.mark.parametrize("layers", [[0, 0], [1, 0], [0, 3], [2, 3]])
def test_layers_outside_of_the_stage_or_none_at_all_are_refused(layers: list[int]) -> None:
    refused(build(MIXED), put("recompute:0:0:1-2", layers=layers), "state")


@pytest.mark.parametrize("name", ["offload:0:0:0-1", "reload:0:0:0-1"])
def test_an_offload_without_its_reload_and_the_reverse_are_refused(name: str) -> None:
    refused(build(MIXED), drop(name), "state")


def test_a_layer_in_two_states_is_refused() -> None:
    found = refused(build(MIXED), put("recompute:0:0:1-2", layers=[0, 2]), "state")
    assert set(found.ops) == {"recompute:0:0:0-2", "offload:0:0:0-1"}


def test_a_wait_for_an_op_of_another_device_or_of_none_is_refused() -> None:
    assert verify(changed(build(PLAIN), put("backward_weight:0:1", after=["forward:0:0"]))) == []
    refused(build(PLAIN), put("backward_weight:0:1", after=["forward:1:0"]), "wait")
    refused(build(PLAIN), put("backward_weight:0:1", after=["forward:0:9"]), "wait")


def test_microbatches_of_one_stage_and_kind_out_of_order_are_refused() -> None:
    found = refused(build(PLAIN), swap("backward_weight:1:0", "backward_weight:1:1"), "order")
    assert found.ops == ("backward_weight:1:0", "backward_weight:1:1")


def test_a_pair_of_devices_that_disagree_on_the_order_of_their_messages_is_refused() -> None:
    found = refused(build(PLAIN), swap("recv_activation:1:0", "recv_activation:1:1"), "pair-order")
    assert set(found.ops) == {"send_activation:0:0", "recv_activation:1:1"}


# --- executions


def test_a_wait_for_a_later_op_of_the_same_lane_is_a_deadlock() -> None:
    found = refused(build(PLAIN), put("forward:0:0", after=["backward_weight:0:1"]), "deadlock")
    assert {"forward:0:0", "backward_weight:0:1"} <= set(found.ops)


def test_a_receive_that_stands_behind_its_reader_is_a_deadlock() -> None:
    schedule = build(Shape(microbatches=1))
    found = refused(schedule, swap("recv_activation:1:0", "forward:1:0"), "deadlock")
    assert {"forward:1:0", "recv_activation:1:0"} <= set(found.ops)


@pytest.mark.parametrize(
    ("name", "after", "source"),
    [
        ("offload:0:0:0-1", [], "forward:0:0"),
        ("reload:0:0:0-1", [], "offload:0:0:0-1"),
        ("backward_input:0:0", [], "reload:0:0:0-1"),
    ],
)
def test_an_op_that_does_not_wait_for_what_it_reads_is_refused(name: str, after: list[str], source: str) -> None:
    found = refused(build(MIXED), put(name, after=after), "data")
    assert found.ops == (name, source)


@pytest.mark.parametrize(
    ("early", "late"),
    [
        ("forward:0:0", "send_activation:0:0"),
        ("backward_input:1:0", "send_gradient:1:0"),
        ("backward_input:1:0", "backward_weight:1:0"),
    ],
)
def test_an_op_that_stands_before_what_it_reads_is_refused(early: str, late: str) -> None:
    assert "data" in rules(changed(build(MIXED), swap(early, late)))


@pytest.mark.parametrize("early", ["recompute:0:0:0-2", "forward:0:0"])
def test_a_recompute_stands_between_its_forward_and_the_backward(early: str) -> None:
    schedule = build(Shape(placement=(0,), microbatches=1, ranges=lambda stage, microbatch: [("recompute", 0, 2)]))
    late = "backward_input:0:0" if early.startswith("recompute") else "recompute:0:0:0-2"
    assert refused(schedule, swap(early, late), "data").ops == (late, early)


def test_stages_on_one_device_need_no_message_but_their_order() -> None:
    schedule = build(Shape(placement=(0, 0), microbatches=1))
    assert refused(schedule, swap("forward:0:0", "forward:1:0"), "data").ops == ("forward:1:0", "forward:0:0")


def worst(schedule: ir.Schedule) -> memory.Memory:
    plan = PlacedOps(schedule)
    clocks = causality.happens_before(plan)
    assert isinstance(clocks, causality.Causality)
    return memory.Memory(plan, clocks)


@pytest.mark.parametrize("name", SHAPES)
def test_a_promise_of_the_worst_case_is_accepted_and_one_byte_less_refused(name: str) -> None:
    schedule = build(SHAPES[name])
    for number in range(len(schedule.devices)):
        peak = worst(schedule).worst_on_device(number).held
        assert verify(changed(schedule, put_in("devices", number, "peak_bytes", peak))) == []
        found = refused(schedule, put_in("devices", number, "peak_bytes", peak - 1), "device-memory")
        assert found.device == number
        assert f"can hold {peak} bytes" in found.message


def test_a_host_promise_of_the_worst_case_is_accepted_and_one_byte_less_refused() -> None:
    schedule = build(MIXED)
    held = worst(schedule).worst_on_host(0).held
    assert verify(changed(schedule, put_in("devices", 0, "host_bytes", held))) == []
    refused(schedule, put_in("devices", 0, "host_bytes", held - 1), "host-memory")


def test_a_reload_can_start_while_a_forward_runs_unless_a_wait_forbids_it() -> None:
    shape = Shape((0,), 2, 1, ranges=lambda stage, microbatch: [("offload", 0, 1)] if microbatch == 0 else [])
    schedule = build(shape, seed=2)
    stage = schedule.stages[0]
    forward = stage.saved_bytes[0] + stage.forward_transient_bytes[0]
    always = schedule.setup.reserve_bytes + stage.static_bytes
    free = changed(schedule, put("forward:0:1", after=["offload:0:0:0-1"]))
    assert worst(free).worst_on_device(0).held == always + forward + stage.saved_bytes[0]


def test_a_delivery_that_is_waited_for_frees_the_sent_tensor() -> None:
    large = changed(build(PLAIN), put_in("stages", 0, "output_bytes", 1_000))
    schedule = changed(large, put_in("stages", 1, "input_bytes", 1_000))
    held = {}
    for after in ([], ["send_activation:0:0"]):
        waiting = changed(schedule, put("forward:0:1", after=after))
        held[len(after)] = worst(waiting).worst_on_device(0).held
    assert held[0] - held[1] == 1_000


# --- the forecast


def test_an_op_that_is_forecast_to_take_other_than_its_cost_is_refused() -> None:
    found = refused(build(PLAIN), put_in("forecast", "times", 0, "end_ns", 0, lambda old: old + 1), "cost")
    assert (found.device, found.index) == (0, 0)


@pytest.mark.parametrize(
    "change",
    [
        put_in("forecast", "stages", lambda old: old[:1]),
        put_in("forecast", "stages", lambda old: old[::-1]),
        put_in("forecast", "stages", 0, "recompute_ns", [1]),
        put_in("forecast", "stages", 1, "send_activation_ns", 1),
        put_in("forecast", "stages", 0, "send_gradient_ns", 1),
        put_in("forecast", "op_overhead_ns", 3),
        put_in("forecast", "links", 0, "h2d_bytes_per_s", 1),
    ],
)
def test_cost_records_that_do_not_fit_the_schedule_are_refused(change: Change) -> None:
    refused(build(MIXED), change, "cost")


@pytest.mark.parametrize(
    "change",
    [
        put_in("forecast", "times", lambda old: old[1:]),
        put_in("forecast", "times", lambda old: [*old, old[0]]),
        put_in("forecast", "times", 0, "device", 7),
        put_in("forecast", "times", 0, "end_ns", lambda old: old[1:]),
    ],
)
def test_a_timetable_with_missing_or_foreign_entries_is_refused(change: Change) -> None:
    refused(build(PLAIN), change, "times")


def shift(name: str, by: int) -> Change:
    """Move an op's forecast without changing its length."""

    def change(plain: Any) -> None:
        lane, index = find(plain, name)
        for device in plain["devices"]:
            for key in ("compute", "d2h", "h2d"):
                for times in plain["forecast"]["times"]:
                    if device[key] is lane and (times["device"], times["lane"]) == (device["device"], key):
                        times["start_ns"][index] += by
                        times["end_ns"][index] += by

    return change


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("forward:0:0", 1),
        ("forward:1:0", -1),
        ("send_activation:0:0", 1),
        ("recv_gradient:0:1", 1),
        ("backward_weight:1:0", -1),
    ],
)
def test_a_forecast_that_is_no_execution_is_refused(name: str, by: int) -> None:
    refused(build(MIXED, seed=3), shift(name, by), "times")


def test_a_forecast_that_ignores_a_wait_is_refused() -> None:
    schedule = build(Shape(placement=(0,), microbatches=1, ranges=lambda stage, microbatch: [("offload", 0, 1)]))
    refused(schedule, shift("reload:0:0:0-1", -1), "times")


def test_a_receive_that_is_issued_after_its_send_is_refused() -> None:
    schedule = build(Shape(microbatches=1))
    lane = [op.id for op in schedule.devices[1].compute]
    sends = [op.id for op in schedule.devices[0].compute]
    sent = schedule.forecast.times[0].start_ns[sends.index("send_activation:0:0")]
    for delay, accepted in ((0, True), (1, False)):
        start = put_in("forecast", "times", 1, "start_ns", lane.index("recv_activation:1:0"), sent + delay)
        assert (verify(changed(schedule, start)) == []) == accepted


def test_transfers_of_two_devices_may_not_overlap_on_one_link_and_may_on_two() -> None:
    schedule = build(MIXED)
    lanes = [(times.device, times.lane) for times in schedule.forecast.times]
    mine, theirs = lanes.index((0, "d2h")), lanes.index((1, "d2h"))
    move = schedule.forecast.times[theirs].start_ns[0] - schedule.forecast.times[mine].start_ns[0]
    refused(schedule, shift(schedule.devices[0].d2h[0].id, move), "link")
    apart, profile = build_with_profile(MIXED, shared=False)
    assert verify(apart, profile) == []


@pytest.mark.parametrize(
    "links",
    [
        lambda old: [],
        lambda old: [{**old[0], "devices": [0]}],
        lambda old: [old[0], old[0]],
        lambda old: [{**old[0], "devices": [0, 1, 2]}],
        lambda old: [{**old[0], "devices": [0, 1, 1]}],
    ],
)
def test_a_device_with_transfers_is_behind_exactly_one_link(links: Callable[[Any], Any]) -> None:
    refused(build(MIXED), put_in("forecast", "links", links), "link")


@pytest.mark.parametrize("figure", ["makespan_ns", "span_ns"])
@pytest.mark.parametrize("lie", [-1, 1])
def test_a_makespan_or_span_that_the_times_do_not_give_is_refused(figure: str, lie: int) -> None:
    refused(build(MIXED), put_in("forecast", figure, lambda old: old + lie), "makespan")


def test_a_bubble_fraction_is_accepted_within_1e_9_and_refused_beyond() -> None:
    assert verify(changed(build(MIXED), put_in("forecast", "bubble_fraction", lambda old: old + 5e-10))) == []
    for lie in (lambda old: old + 2e-9, lambda old: old - 2e-9, lambda old: 1e300):
        refused(build(MIXED), put_in("forecast", "bubble_fraction", lie), "bubble")


def test_a_bubble_fraction_that_is_no_number_is_refused() -> None:
    schedule = build(PLAIN)
    forecast = msgspec.structs.replace(schedule.forecast, bubble_fraction=float("nan"))
    assert rules(msgspec.structs.replace(schedule, forecast=forecast)) == {"bubble"}


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize(
    ("below", "outcome", "accepted"),
    [
        (0, "optimal", True),
        (1, "feasible", True),
        (-1, "feasible", False),
        (0, "feasible", False),
        (1, "optimal", False),
    ],
)
def test_the_bound_is_at_most_the_value_and_optimal_when_they_meet(
    objective: str, below: int, outcome: str, accepted: bool
) -> None:
    schedule = build(PLAIN)
    bound = getattr(schedule.forecast, f"{objective}_ns") - below

    def claim(plain: Any) -> None:
        plain["forecast"].update(objective=objective, lower_bound_ns=bound, outcome=outcome)

    assert rules(changed(schedule, claim)) == (set() if accepted else {"bound"})


# --- next to the profile


@pytest.mark.parametrize(
    ("part", "change", "rule"),
    [
        ("layers", lambda layers: layers[1:], "profile-layers"),
        ("layers", lambda layers: [{**layers[0], "count": 10**15}, *layers[1:]], "profile-layers"),
        ("layers", lambda layers: [{**layers[0], "saved_bytes": 2**63}, *layers[1:]], "profile-numbers"),
        ("layers", lambda layers: [{**layers[0], "saved_bytes": 99}, *layers[1:]], "profile-bytes"),
        ("layers", lambda layers: [{**layers[0], "static_bytes": 99}, *layers[1:]], "profile-bytes"),
        ("layers", lambda layers: [layers[0], {**layers[1], "output_bytes": 99}, *layers[2:]], "profile-bytes"),
        ("layers", lambda layers: [{**layers[0], "forward_ns": 99}, *layers[1:]], "profile-times"),
        ("layers", lambda layers: [{**layers[0], "backward_ns": 99}, *layers[1:]], "profile-times"),
        ("layers", lambda layers: [{**layers[0], "recompute_ns": 99}, *layers[1:]], "profile-times"),
        ("machine", lambda machine: {**machine, "op_overhead_ns": 1}, "profile-times"),
        ("machine", lambda machine: {**machine, "p2p": [{"overhead_ns": 1}]}, "profile-times"),
        ("machine", lambda machine: {**machine, "reserve_bytes": 1}, "profile-bytes"),
        ("machine", lambda machine: {**machine, "p2p": []}, "profile-p2p"),
        ("machine", lambda machine: {**machine, "links": []}, "profile-links"),
    ],
)
def test_a_schedule_that_differs_from_its_profile_is_refused(part: str, change: Any, rule: str) -> None:
    schedule, profile = build_with_profile(MIXED)
    plain = msgspec.to_builtins(profile)
    plain[part] = change(plain[part])
    found = verify(schedule, msgspec.convert(plain, type(profile)))
    assert rule in {violation.rule for violation in found}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda costs: costs["layers"][0].update(forward_ns=10**6 + 1),
            "forward_ns of stage 0 is 1000000, by the profile it is 1000001, and 3 other stages likewise; recompute_ns",
        ),
        (lambda costs: costs["layers"][0].update(saved_bytes=10**9 + 8), "saved_bytes of stage 0 is "),
        (lambda costs: costs["machine"].update(op_overhead_ns=5), "forecast.op_overhead_ns is 0, the profile has 5; "),
        (lambda costs: costs["machine"]["links"][0].update(latency_ns=7), "latency_ns of link 0 is 0, by the profile "),
        (
            lambda costs: costs["machine"]["links"][0].update(compute_permille=7),
            "compute_permille of link 0 is 0, by the profile it is 7",
        ),
        (lambda costs: costs["machine"]["p2p"][0].update(latency_ns=7), "send_activation_ns of stage 0 is 50000, "),
    ],
)
def test_one_changed_cost_is_one_line_however_many_stages_have_it(change: Any, said: str) -> None:
    costs = uniform(4, 1)
    schedule = quick(costs, 9 * 10**9, method="1f1b").schedule
    plain = msgspec.to_builtins(costs)
    change(plain)
    [found] = verify(schedule, msgspec.convert(plain, type(costs)))
    assert found.message.startswith(said)


def test_the_model_of_the_schedule_is_the_one_that_the_profile_measured() -> None:
    schedule, profile = build_with_profile(PLAIN)
    model = Model(builder="gpt", microbatch_size=1, sequence_length=8)
    found = verify(schedule, msgspec.structs.replace(profile, model=model))
    assert [violation.rule for violation in found] == ["profile-model"]


def test_a_pair_has_its_own_message_cost_before_the_cost_of_every_pair() -> None:
    schedule, profile = build_with_profile(PLAIN)
    shared = profile.machine.p2p[0]
    for own, accepted in ((shared.bytes_per_s, True), (1, False), (None, False)):
        entry = P2P(devices=(1, 0), latency_ns=Quantity(value=3, source="measured"), bytes_per_s=own)
        machine = msgspec.structs.replace(profile.machine, p2p=[P2P(), entry])
        found = verify(schedule, msgspec.structs.replace(profile, machine=machine))
        assert (found == []) == accepted


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({}, True),
        ({"duplex_h2d_bytes_per_s": 10**9}, True),
        ({"duplex_d2h_bytes_per_s": None}, True),
        ({"duplex_d2h_bytes_per_s": 5}, False),
        ({"h2d_bytes_per_s": 5}, False),
        ({"latency_ns": 2}, False),
        ({"devices": [0]}, False),
        ({"devices": None}, False),
    ],
)
def test_links_have_the_bandwidths_of_the_profile_and_are_shared_as_there(fields: Any, accepted: bool) -> None:
    schedule, profile = build_with_profile(MIXED)
    link: Link = msgspec.structs.replace(profile.machine.links[0], **fields)
    machine = msgspec.structs.replace(profile.machine, links=[link])
    assert (verify(schedule, msgspec.structs.replace(profile, machine=machine)) == []) == accepted
