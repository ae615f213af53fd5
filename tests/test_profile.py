"""The profile: what a person may leave out, and what is cross-checked."""

from __future__ import annotations

import json
import pickle
from typing import Any

import msgspec
import pytest

from optpipe_compiler.documents import ir, profile
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Model, Quantity, value_of
from optpipe_compiler.errors import BadInput
from optpipe_compiler.verify import verify
from tests.instances import quick, uniform

TEN_LINES = """{
 "format": "optpipe-profile", "version": 1, "revision": 0, "name": "by hand",
 "machine": {"devices": 2,
  "links": [{"d2h_bytes_per_s": 20000000000, "h2d_bytes_per_s": 20000000000}]},
 "layers": [
  {"name": "embedding", "forward_ns": 10000, "backward_input_ns": 0, "backward_weight_ns": 5000, "saved_bytes": 1000},
  {"name": "block", "count": 6, "forward_ns": 500000, "backward_input_ns": 500000, "backward_weight_ns": 400000,
   "saved_bytes": 5000000, "output_bytes": 1000000},
  {"name": "head", "forward_ns": 300000, "backward_input_ns": 300000, "backward_weight_ns": 200000, "saved_bytes": 20}]
}
"""


def plain() -> dict[str, Any]:
    """The ten lines as plain objects, to be changed."""
    return json.loads(TEN_LINES)


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(BadInput) as caught:
        profile.parse(json.dumps(raw), "p.json")
    return str(caught.value)


def test_ten_lines_by_hand_are_enough_to_compile():
    assert len(TEN_LINES.splitlines()) == 10
    costs = profile.parse(TEN_LINES, "p.json")
    schedule = quick(costs, 30_000_000, microbatches=4).schedule
    assert verify(schedule, costs) == []
    assert schedule.setup.layers == 8


def test_a_count_stands_for_that_many_equal_layers():
    costs = profile.parse(TEN_LINES, "p.json")
    assert [layer.name for layer in costs.expanded_layers()] == ["embedding", *["block"] * 6, "head"]
    raw = plain()
    raw["layers"][1:2] = [raw["layers"][1] | {"count": 1}] * 6
    unrolled = profile.parse(json.dumps(raw), "p.json")
    planned, same = (quick(one, 30_000_000).schedule for one in (costs, unrolled))
    assert (planned.stages, planned.devices, planned.forecast) == (same.stages, same.devices, same.forecast)


def test_a_bare_number_is_the_same_cost_as_a_quantity_with_its_origin():
    costs = profile.parse(TEN_LINES, "p.json")
    raw = plain()
    for layer in raw["layers"]:
        for name, number in layer.items():
            if name not in ("name", "count"):
                layer[name] = {"value": number, "source": "measured", "samples": 9, "spread": 3}
    measured = profile.parse(json.dumps(raw), "p.json")
    assert measured.layers[0].forward_ns == Quantity(value=10000, source="measured", samples=9, spread=3)
    assert value_of(measured.layers[0].forward_ns) == value_of(costs.layers[0].forward_ns) == 10000
    planned, same = (quick(one, 30_000_000).schedule for one in (costs, measured))
    assert planned.digest == same.digest
    assert planned.forecast == same.forecast


def test_the_digest_changes_with_any_number():
    costs = uniform()
    machine = msgspec.structs.replace(costs.machine, op_overhead_ns=1)
    assert costs.digest() == uniform().digest()
    assert costs.digest() != msgspec.structs.replace(costs, machine=machine).digest()


def test_a_profile_has_the_same_digest_in_another_process():
    """Also with the defaults of texts: a copy of one is no longer the default itself."""
    model = Model(builder="gpt", microbatch_size=2, sequence_length=8)
    costs = msgspec.structs.replace(uniform(2, 1), model=model)
    copy = pickle.loads(pickle.dumps(costs))
    assert (copy, copy.digest()) == (costs, costs.digest())
    schedule = quick(costs, 10**10).schedule
    assert ir.contract_digest(pickle.loads(pickle.dumps(schedule))) == schedule.digest


def test_a_profile_reads_back_from_its_own_text():
    for costs in (profile.parse(TEN_LINES, "p.json"), uniform(shared_links="pairs", head_ms=(1, 1, 1))):
        text = canonical(costs)
        assert profile.parse(text, "p.json") == costs
        assert canonical(profile.parse(text, "p.json")) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint_bytes": 1001}, "checkpoint_bytes is 1001, expected at most saved_bytes (1000)"),
        (
            {"residue_bytes": 1001},
            "residue_bytes is 1001, expected captured_bytes (0) to saved_bytes + captured_bytes (1000)",
        ),
        (
            {"residue_bytes": 9, "captured_bytes": 10},
            "residue_bytes is 9, expected captured_bytes (10) to saved_bytes + captured_bytes (1010)",
        ),
        (
            {"checkpoint_bytes": {"value": 1001, "source": "measured"}},
            "checkpoint_bytes is 1001, expected at most saved_bytes (1000)",
        ),
    ],
)
def test_bytes_that_contradict_each_other_are_refused(change, message):
    raw = plain()
    raw["layers"][0] |= change
    assert refusal(raw) == f"p.json: $.layers[0].{message}"


@pytest.mark.parametrize("change", [{"checkpoint_bytes": 1000}, {"residue_bytes": 1010, "captured_bytes": 10}])
def test_bytes_at_the_edge_of_what_is_possible_are_accepted(change):
    raw = plain()
    raw["layers"][0] |= change
    assert len(profile.parse(json.dumps(raw), "p.json").layers) == 3


LINK = {"d2h_bytes_per_s": 1, "h2d_bytes_per_s": 1}


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([LINK | {"d2h_bytes_per_s": 0}], "$.machine.links[0].d2h_bytes_per_s is 0, expected at least 1"),
        ([LINK | {"duplex_h2d_bytes_per_s": 0}], "$.machine.links[0].duplex_h2d_bytes_per_s is 0, expected at least 1"),
        ([LINK, LINK | {"devices": [0, 2]}], "$.machine.links[1].devices names 2, expected 0 to 1"),
        (
            [LINK | {"devices": [0]}, LINK | {"devices": [1, 0]}],
            "$.machine.links[1].devices names 0, which links[0] has already",
        ),
        ([LINK, LINK], "$.machine.links: more than one entry has no devices, expected at most one default"),
    ],
)
def test_links_that_contradict_each_other_are_refused(links, message):
    raw = plain()
    raw["machine"]["links"] = links
    assert refusal(raw) == f"p.json: {message}"


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([{"devices": [0, 2], "memory_bytes": 1}], "[0].devices names 2, expected 0 to 1"),
        ([{"devices": [1], "memory_bytes": 1}] * 2, "[1].devices names 1, which hosts[0] has already"),
        ([{"devices": [], "memory_bytes": 1}], "[0].devices is []: expected a list of length >= 1"),
    ],
)
def test_hosts_that_contradict_each_other_are_refused(hosts, message):
    raw = plain()
    raw["machine"]["hosts"] = hosts
    assert refusal(raw) == f"p.json: $.machine.hosts{message}"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"bytes_per_s": 0}], "[0].bytes_per_s is 0, expected at least 1"),
        ([{"devices": [0, 2]}], "[0].devices is [0, 2], expected two devices of 0 to 1"),
        ([{"devices": [1, 1]}], "[0].devices is [1, 1], expected two devices of 0 to 1"),
        ([{"devices": [-1, 0]}], "[0].devices[0] is -1: expected an integer >= 0"),
        ([{"devices": [0, 1]}, {"devices": [1, 0]}], "[1] is about the pair [1, 0], which p2p[0] is about already"),
        ([{}, {"latency_ns": 3}], "[1] is about every other pair, which p2p[0] is about already"),
    ],
)
def test_message_costs_that_contradict_each_other_are_refused(messages, expected):
    raw = plain()
    raw["machine"]["p2p"] = messages
    assert refusal(raw) == f"p.json: $.machine.p2p{expected}"


def test_a_pair_with_its_own_cost_beside_the_default_is_accepted():
    raw = plain()
    raw["machine"]["p2p"] = [{"latency_ns": 5}, {"devices": [1, 0], "latency_ns": 7}]
    assert len(profile.parse(json.dumps(raw), "p.json").machine.p2p) == 2


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("saved_bytes", 2**62, f"$.layers[0].saved_bytes is {2**62}, expected at most {2**53}"),
        ("count", 10**12, "expected at most 10000"),
    ],
)
def test_absurdly_large_numbers_are_refused_before_anything_is_computed(field, value, says):
    layer = {"name": "l", "forward_ns": 1, "backward_input_ns": 1, "backward_weight_ns": 1, "saved_bytes": 1}
    raw = {"format": "optpipe-profile", "version": 1, "revision": 0, "name": "x", "machine": {"devices": 1}}
    with pytest.raises(BadInput) as refusal:
        profile.parse(json.dumps(raw | {"layers": [layer | {field: value}]}), "p.json")
    assert says in str(refusal.value)
