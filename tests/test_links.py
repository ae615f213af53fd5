"""k of the host links: what it is, when offloading is free, pays or does not, and where it is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from optpipe_compiler.documents import ir
from optpipe_compiler.forecast.links import link_loads
from optpipe_compiler.view.summary import assumptions, link_sentences
from tests.instances import quick, uniform
from tests.test_cli import run  # noqa: F401  (a fixture)

GB = 10**9


@pytest.mark.parametrize(
    ("options", "k", "load", "verdict"),
    [
        ({"d2h_ms": 1.0, "h2d_ms": 0.5}, 0.5, 1 / 3, "free"),
        ({"d2h_ms": 2.7, "h2d_ms": 2.7}, 1.8, 0.9, "free"),  # both directions at once
        ({"d2h_ms": 1.0, "h2d_ms": 0.5, "shared_links": "pairs"}, 1.0, 2 / 3, "free"),
        ({"d2h_ms": 2.0, "h2d_ms": 2.0, "shared_links": "pairs"}, 8 / 3, 4 / 3, "pays"),
        ({"d2h_ms": 2.0, "h2d_ms": 2.0, "duplex_slowdown": 2.0}, 4 / 3, 4 / 3, "pays"),
        ({"d2h_ms": 9.0, "h2d_ms": 9.0}, 6.0, 3.0, "does not pay"),
        ({"d2h_ms": 1.0, "h2d_ms": 0.5, "copy_share": 0.25}, 0.5, 1 / 3, "fits"),
    ],
)
def test_k_is_the_round_trip_over_the_compute_time_and_the_load_decides(options, k, load, verdict):
    for one in link_loads(quick(uniform(2, 1, **options), 2 * GB, time_limit_s=0.0).schedule):
        assert (one.k, one.load) == (pytest.approx(k, rel=1e-5), pytest.approx(load, rel=1e-5))
        assert one.verdict == verdict


def test_offload_is_not_called_free_where_copies_take_compute():
    schedule = quick(uniform(2, 1, d2h_ms=0.5, h2d_ms=0.5, copy_share=0.25), 2 * GB, time_limit_s=0.0).schedule
    said = "offload fits the link (all of them: busy 17% of the time, copies take 25% of their time from compute)"
    assert [second for _, second in link_sentences(schedule)] == [said]


def test_a_link_that_takes_many_times_the_compute_is_said_in_times():
    schedule = quick(uniform(2, 1, d2h_ms=1e6, h2d_ms=1e6), 2 * GB, time_limit_s=0.0).schedule
    said = "offload does not pay (all of them: 333,333 times the time of compute)"
    assert [second for _, second in link_sentences(schedule)] == [said]


def test_where_there_are_no_links_there_is_no_k():
    costs = uniform(2, 2)
    bare = structs.replace(costs, machine=structs.replace(costs.machine, links=[]))
    assert list(link_loads(quick(bare, 3 * GB, time_limit_s=0.0).schedule)) == []


@pytest.mark.parametrize("options", [{"offload": False}, {"host_mem_bytes": 0}], ids=str)
def test_links_are_not_spoken_of_where_nothing_may_be_offloaded(options):
    costs = uniform(2, 2, d2h_ms=0.5, h2d_ms=0.5)
    assert link_sentences(quick(costs, 3 * GB, time_limit_s=0.0).schedule)
    assert link_sentences(quick(costs, 3 * GB, time_limit_s=0.0, **options).schedule) == []


def test_links_that_are_not_alike_are_told_apart_by_their_devices():
    costs = uniform(3, 2, d2h_ms=0.5, h2d_ms=0.5)
    links = [structs.replace(costs.machine.links[0], devices=devices) for devices in ([0, 2], [1])]
    shared = structs.replace(costs, machine=structs.replace(costs.machine, links=links))
    said = [first for first, _ in link_sentences(quick(shared, 3 * GB, time_limit_s=0.0).schedule)]
    assert [sentence.partition(":")[0] for sentence in said] == ["1 of 2 devices (0, 2)", "1 of 1 device (1)"]


def test_the_summary_and_json_say_k_and_what_is_taken_for_granted(run):  # noqa: F811
    schedule = quick(uniform(2, 2, d2h_ms=0.5, h2d_ms=0.5), GB, recompute=False, time_limit_s=0.0).schedule
    Path("schedule.json").write_text(ir.to_text(schedule))
    shown = run("show").out
    out = " ".join(shown.split())
    assert "host links     2 of 1 device: k 0.33 (round trip 1 ms, compute 3 ms)" in shown
    assert "offload is free (all of them: busy 17% of the time)" in out
    assert "the profile has no static bytes: weights, gradients and optimizer state count 0" in out
    held = sum(device.host_bytes for device in schedule.devices)
    assert held > 0
    assert f"taken as unlimited, all devices together; this schedule may hold {held / 1e9:.2f} GB there" in out
    assert [one["k"] for one in json.loads(run("show", "--json").out)["host_links"]] == [pytest.approx(1 / 3)] * 2
    assert "messages between devices" not in out
    weighty = quick(uniform(2, 2, static_gb=1), 4 * GB, host_mem_bytes=5 * GB, time_limit_s=0.0).schedule
    said = " ".join(assumptions(weighty))
    assert "static bytes" not in said
    assert "host memory for offloads: 5.00 GB (4.66 GiB), all devices together" in said


def test_the_summary_says_between_which_devices_messages_take_no_time():
    plain = uniform(3, 2)
    machine = plain.machine
    some = [structs.replace(machine.p2p[0], devices=(n, n + 1)) for n in range(2)]  # 0 and 2 have none
    for p2p, said in (
        (machine.p2p, ""),
        (some, "the profile has no cost of messages between devices 0 and 2: they take no time"),
        ([], "the profile has no cost of messages between devices: they take no time"),
    ):
        profile = structs.replace(plain, machine=structs.replace(machine, p2p=p2p))
        made = quick(profile, 8 * GB, microbatches=3, method="interleaved-1f1b").schedule
        assert [line for line in assumptions(made) if "messages between" in line] == ([said] if said else [])
    linear = structs.replace(plain, machine=structs.replace(machine, p2p=some))
    made = quick(linear, 8 * GB, method="1f1b").schedule  # sends nothing between 0 and 2
    assert not any("messages between" in line for line in assumptions(made))
