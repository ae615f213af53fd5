"""compile as a function: options settled, limits kept, always the best verified schedule, the proof beside it."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optpipe_compiler import compiler, processes
from optpipe_compiler.compiler import Options, Progress, Result, compile_schedule, settled
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import P2P, Host, Layer, Link, Machine, Profile
from optpipe_compiler.errors import BadInput, Infeasible
from optpipe_compiler.plan import budget, candidates, exact
from optpipe_compiler.plan.cuts import _Costs
from optpipe_compiler.plan.instances import instances, layouts, link_share, too_long
from optpipe_compiler.published import METHODS
from optpipe_compiler.solver import search
from optpipe_compiler.solver.worker import SearchEvent
from optpipe_compiler.verify import Violated, verify
from optpipe_compiler.verify.report import Violation
from tests.instances import anew, profiles, quick, uniform
from tests.processes import children

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

GB = 10**9
OPEN = uniform(3, 2)
"""Two layers per device; under OPEN_GB and with 6 microbatches no search proves its optimum in seconds."""
OPEN_BYTES = 1_100_000_000


def planned(profile: Profile = OPEN, mem_bytes: int = OPEN_BYTES, **options: Any) -> Result:
    chosen = {"microbatches": 6, "time_limit_s": 2.0, "workers": 1} | options
    on_progress = chosen.pop("on_progress", lambda progress: None)
    return compile_schedule(profile, Options(mem_bytes=mem_bytes, **chosen), on_progress)


def count(schedule: ir.Schedule, name: str) -> int:
    return sum(op.name == name for device in schedule.devices for op in (*device.compute, *device.d2h))


# -- options ------------------------------------------------------------------------------------------------------


def test_defaults_come_from_the_profile():
    machine = msgspec.structs.replace(OPEN.machine, host_memory_bytes=7 * GB)
    chosen = settled(msgspec.structs.replace(OPEN, machine=machine), Options(mem_bytes=GB))
    assert (chosen.devices, chosen.microbatches, chosen.host_mem_bytes, chosen.time_limit_s) == (3, 12, 7 * GB, 60.0)
    assert settled(OPEN, Options(mem_bytes=GB)).host_mem_bytes is None
    assert settled(uniform(9, 1), Options(mem_bytes=GB)).time_limit_s == 180.0


def test_what_is_chosen_is_kept():
    chosen = Options(mem_bytes=GB, devices=2, microbatches=5, host_mem_bytes=0, time_limit_s=0.0, slices=1)
    assert vars(settled(OPEN, chosen)) == vars(chosen)


def test_a_profile_for_more_devices_than_layers_is_refused_by_its_own_field():
    wide = msgspec.structs.replace(OPEN, machine=msgspec.structs.replace(OPEN.machine, devices=7))
    with pytest.raises(BadInput, match=r"^\$\.machine\.devices is 7, expected at most the profile's 6 layers$"):
        quick(wide, GB)
    assert settled(wide, Options(mem_bytes=GB, devices=6)).devices == 6


def test_work_beyond_what_64_bits_sum_up_is_refused_and_what_is_just_below_is_planned():
    def of(longest):
        layer = Layer(name="a", forward_ns=longest, backward_input_ns=0, backward_weight_ns=0, saved_bytes=1)
        others = msgspec.structs.replace(layer, name="b", count=29, forward_ns=1)
        return Profile(
            name="long", machine=Machine(devices=12, time_permille=[1000] + 11 * [1]), layers=[layer, others]
        )

    told = f"a microbatch takes {2**53 + 29} ns on the slowest device, expected at most {10**15}"
    with pytest.raises(BadInput, match=f"^{told}$"):
        quick(of(2**53), GB)
    assert quick(of(10**15 - 29), GB).schedule.forecast.lower_bound_ns >= 10**15 - 29
    with pytest.raises(BadInput, match=rf"^a step's ops take \d+ ns one after the other, expected at most {2**60}$"):
        quick(of(10**15 - 29), GB, microbatches=1000, time_limit_s=30.0)


@pytest.mark.parametrize("slow", ["links", "p2p", "latency"])
def test_transfers_beyond_what_64_bits_sum_up_are_refused(slow):
    size = 2**50
    slower = {
        "links": {"links": [Link(d2h_bytes_per_s=1, h2d_bytes_per_s=1)]},
        "p2p": {"p2p": [P2P(bytes_per_s=1)]},
        "latency": {"p2p": [P2P(latency_ns=2**60)]},
    }
    machine = Machine(devices=2, **slower[slow])
    layer = Layer(
        name="a", count=4, forward_ns=9, backward_input_ns=9, backward_weight_ns=9, saved_bytes=size, output_bytes=size
    )
    with pytest.raises(BadInput, match=rf" bytes at 1 bytes/s take \d+ ns on their way, expected at most {10**15}$"):
        quick(Profile(name="slow", machine=machine, layers=[layer]), 20 * size)


def test_bytes_beyond_what_64_bits_sum_up_are_refused():
    layer = Layer(name="a", count=4, forward_ns=9, backward_input_ns=9, backward_weight_ns=9, saved_bytes=2**56)
    with pytest.raises(BadInput, match=rf"^a step's ops hold \d+ bytes in all, expected at most {2**60}$"):
        quick(Profile(name="large", machine=Machine(devices=2), layers=[layer]), 2**60, microbatches=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 7}, "--devices is 7, expected at most the profile's 6 layers"),
        ({"microbatches": 0}, "--microbatches is 0, expected at least 1"),
        ({"microbatches": 10**400}, "--microbatches is far too large, expected at most 1000000000000"),
        ({"stages_per_device": -1}, "--stages-per-device is -1, expected at least 1"),
        ({"stages_per_device": 3}, "6 layers cannot fill 3 devices x 3 stages per device: expected at most 6 stages"),
    ],
)
def test_impossible_options_are_refused_by_name_value_and_expectation(options, message):
    with pytest.raises(BadInput, match=f"^{re.escape(message)}$"):
        quick(OPEN, GB, **options)


# -- published schedules of large instances -------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "microbatches"), [(0.3, 12), (0.6, 12), (2.0, 12), (2.0, 48)])
def test_looking_at_the_first_microbatches_loses_no_published_schedule_that_would_win(monkeypatch, share, microbatches):
    profile = uniform(3, 4, residue_fraction=0.5, d2h_ms=1.5, h2d_ms=1.5)
    results = {}
    for screened in (0, 10**9):
        monkeypatch.setattr(candidates, "SCREENED", screened)
        chosen = {"microbatches": microbatches, "time_limit_s": 0.0}
        results[screened] = anew(profile, int(share * 3 * GB), **chosen).schedule.forecast
    assert results[0].makespan_ns == results[10**9].makespan_ns
    reasons = [baseline.reason or "" for baseline in results[0].baselines.values()]
    assert sum("not run in full" in reason for reason in reasons) > 30
    for name, baseline in results[10**9].baselines.items():
        if results[0].baselines[name].reason and baseline.fits:
            assert baseline.makespan_ns > results[0].makespan_ns


def test_of_a_large_instance_a_schedule_is_judged_that_is_not_defined_for_as_few_microbatches_as_devices(monkeypatch):
    found = []
    for screened in (0, 10**9):
        monkeypatch.setattr(candidates, "SCREENED", screened)
        chosen = {"microbatches": 12, "time_limit_s": 0.0, "placement": "v", "stages_per_device": 2}
        found.append(anew(uniform(3, 2), 6 * GB, **chosen).schedule.forecast.baselines["dualpipev"])
    assert found[0].fits
    assert found[0] == found[1]


def test_however_short_the_time_every_published_schedule_is_judged():
    profile = uniform(3, 4)
    chosen = {"microbatches": 12, "time_limit_s": 0.0, "reproducible": False, "search": False}
    forecast = quick(profile, 6 * GB, **chosen).schedule.forecast
    judged = {name for name, baseline in forecast.baselines.items() if baseline.makespan_ns is not None}
    reasons = {name: baseline.reason or "" for name, baseline in forecast.baselines.items() if name not in judged}
    assert len(judged) > 40
    known = ("defined", "not for", "is for layers that can make cheap tensors again")
    assert all(any(words in reason for words in known) for reason in reasons.values())
    assert forecast.makespan_ns <= min(one.makespan_ns for one in forecast.baselines.values() if one.fits)


# -- cuts ---------------------------------------------------------------------------------------------------------


def uneven(*layers: tuple[int, int]) -> Profile:
    """Layers of (time, static bytes) on two devices."""
    made = [
        Layer(
            name=f"layer {n}",
            forward_ns=time_,
            backward_input_ns=time_,
            backward_weight_ns=time_,
            saved_bytes=10,
            residue_bytes=5,
            static_bytes=size,
        )
        for n, (time_, size) in enumerate(layers)
    ]
    return Profile(name="uneven", machine=Machine(devices=2), layers=made)


def test_a_placement_comes_again_where_another_cut_lightens_the_heaviest_device_or_the_fullest_one():
    profile = uneven(*((time_, 0) for time_ in (2, 2, 2, 1, 1, 1, 1, 4)))
    found = layouts(profile, settled(profile, Options(mem_bytes=GB, placement="v", stages_per_device=2)))
    assert [one.name for one in found] == ["v", "v", "v"]
    assert len({one.cuts for one in found}) == 3
    costs = _Costs(profile)
    assert costs.compute(found[1]) < costs.compute(found[0])
    assert costs.memory(found[2]) < costs.memory(found[0])
    one_by_one = quick(profile, GB, placement="v", stages_per_device=2, microbatches=8).schedule
    assert one_by_one.forecast.lower_bound_ns >= 8 * 3 * 7


def test_layers_move_away_from_weights_that_leave_no_memory():
    profile = uneven((3, 900), (3, 100), (3, 100), (3, 100))
    schedule = quick(profile, 1000).schedule
    assert schedule.stages[0].layers == (0, 1)
    assert verify(schedule, profile) == []


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [
        (1, {}, [("linear", 1)]),
        (2, {}, [("linear", 1), ("loop", 2), ("v", 2)]),
        (3, {}, [("linear", 1), ("loop", 2), ("loop", 3), ("v", 2)]),
        (4, {}, [("linear", 1), ("loop", 2), ("loop", 3), ("loop", 4), ("v", 2), ("v", 4)]),
        (4, {"stages_per_device": 1}, [("linear", 1)]),
        (4, {"stages_per_device": 3}, [("loop", 3), ("v", 3)]),
        (4, {"placement": "v"}, [("v", 2), ("v", 4)]),
        (3, {"placement": "v"}, [("v", 2)]),
        (4, {"placement": "v", "stages_per_device": 3}, [("v", 3)]),
        (4, {"placement": "linear"}, [("linear", 1)]),
    ],
)
def test_every_placement_is_searched_that_options_allow_and_layers_permit(layers, options, expected):
    profile = uniform(2, layers)
    every = layouts(profile, settled(profile, Options(mem_bytes=1000 * GB, **options)))
    found = [one for one in every if one.is_searched(1000 * GB)]
    named = [(one.name, one.stages // 2) for one in found]
    assert [*dict.fromkeys(named)] == expected
    assert len({(one.name, one.device_of, one.cuts) for one in found}) == len(found)


def test_the_options_used_are_in_the_file():
    result = quick(uniform(), 2 * GB, split=False, seed=3)
    recorded = result.schedule.provenance.options
    assert recorded == compiler.recorded(result.options)
    assert (recorded["mem_bytes"], recorded["split"], recorded["seed"], recorded["devices"]) == (2 * GB, False, 3, 2)


# -- result -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forbidden", ["offload", "recompute", "split"])
def test_what_is_forbidden_is_not_in_the_schedule(forbidden):
    name = "backward_weight" if forbidden == "split" else forbidden
    cap = GB if forbidden == "split" else 600_000_000
    assert any(count(quick(uniform(2, 2), cap, **{n: False}).schedule, name) for n in (set(NAMES) - {forbidden}))
    assert count(quick(uniform(2, 2), cap, **{forbidden: False}).schedule, name) == 0


NAMES = ("offload", "recompute", "split")


def test_search_proves_a_small_instance_optimal_and_says_what_it_proved():
    result = planned(uniform(2, 1), 2 * GB, microbatches=3)
    forecast = result.schedule.forecast
    assert (forecast.outcome, forecast.lower_bound_ns) == ("optimal", forecast.makespan_ns)
    assert forecast.makespan_ns == (3 * 3 + 1) * 1_000_000 + 50_000
    assert verify(result.schedule, uniform(2, 1)) == []


def test_the_objective_is_what_is_minimised_and_bounded():
    makespan = planned(uniform(2, 1), 9 * GB, microbatches=4).schedule.forecast
    span = planned(uniform(2, 1), 9 * GB, microbatches=4, objective="span").schedule.forecast
    assert (makespan.objective, makespan.makespan_ns, makespan.outcome) == ("makespan", 13_050_000, "optimal")
    assert (span.objective, span.span_ns, span.outcome) == ("span", 12_000_000, "optimal")
    assert span.lower_bound_ns == span.span_ns


def test_every_published_schedule_is_a_baseline_with_its_makespan_and_whether_it_fits():
    baselines = quick(uniform(2, 1), 2 * GB).schedule.forecast.baselines
    assert set(baselines) == {name for name, method in METHODS.items() if not method.sliced}
    gpipe, one = baselines["gpipe"], baselines["1f1b"]
    assert (gpipe.makespan_ns, gpipe.peak_bytes, gpipe.fits) == ((4 + 1) * 3_000_000 + 100_000, 4 * GB, False)
    assert (one.peak_bytes, one.fits) == (2 * GB, True)
    undefined = [baseline for baseline in baselines.values() if baseline.makespan_ns is None]
    assert undefined
    assert all(baseline.reason and not baseline.fits for baseline in undefined)


def test_a_published_schedule_that_the_hosts_have_no_room_for_says_so():
    known = quick(uniform(2, 2), 2 * GB, host_mem_bytes=GB // 8).schedule.forecast.baselines.values()
    said = [one for one in known if one.makespan_ns is not None and "host memory" in one.reason]
    assert said
    assert not any(one.fits for one in said)
    assert all(one.reason or one.peak_bytes > 2 * GB for one in known if one.makespan_ns is not None and not one.fits)


def test_it_is_never_worse_than_a_published_schedule_that_fits():
    for mem in (1, 2, 3):
        forecast = quick(uniform(2, 2), mem * GB).schedule.forecast
        fitting = [one.makespan_ns for one in forecast.baselines.values() if one.fits]
        assert fitting
        assert forecast.lower_bound_ns <= forecast.makespan_ns <= min(fitting)


def test_memory_and_host_memory_are_kept():
    profile = uniform(2, 2, d2h_ms=0.2, h2d_ms=0.2)
    free, some, none = (
        quick(profile, GB, recompute=False, host_mem_bytes=host, time_limit_s=2.0).schedule for host in (None, GB, 0)
    )
    assert free.forecast.makespan_ns < some.forecast.makespan_ns < none.forecast.makespan_ns
    assert sum(device.host_bytes for device in free.devices) > GB
    assert 0 < sum(device.host_bytes for device in some.devices) <= GB
    assert count(none, "offload") == 0
    assert all(device.peak_bytes <= GB for one in (free, some, none) for device in one.devices)


def test_every_host_keeps_to_its_own_memory():
    profile = uniform(3, 2, d2h_ms=0.2, h2d_ms=0.2)
    hosts = [Host(devices=[0, 1], memory_bytes=GB), Host(devices=[2], memory_bytes=0)]
    machine = msgspec.structs.replace(profile.machine, hosts=hosts)
    split = msgspec.structs.replace(profile, machine=machine)
    schedule = quick(split, GB, recompute=False).schedule
    assert schedule.version == 4
    assert schedule.setup.hosts_or_none == [([0, 1], GB), ([2], 0)]
    held = [device.host_bytes for device in schedule.devices]
    assert held[2] == 0 < held[0] + held[1] <= GB
    assert quick(split, 4 * GB, recompute=False, devices=1).schedule.setup.hosts_or_none == [([0], GB)]


def test_a_published_schedule_that_needs_more_host_memory_does_not_fit():
    forecast = quick(uniform(2, 2, d2h_ms=0.2, h2d_ms=0.2), GB, recompute=False, host_mem_bytes=0).schedule.forecast
    fitting = [one.makespan_ns for one in forecast.baselines.values() if one.fits]
    assert forecast.makespan_ns <= min(fitting)


def test_one_device_and_one_microbatch_are_enough():
    schedule = quick(uniform(1, 1), GB, microbatches=1).schedule
    assert schedule.forecast.makespan_ns == 3_000_000
    assert schedule.forecast.outcome == "optimal"


# -- least memory -------------------------------------------------------------------------------------------------


def smallest(profile: Profile, mem_bytes: int, **options: Any) -> int:
    """The smallest --mem that the refusal of `mem_bytes` names."""
    with pytest.raises(Infeasible) as caught:
        quick(profile, mem_bytes, **options)
    found = re.search(
        r"device (\d+) is (\d+) bytes .* short; the smallest --mem that would do is (\d+)B? ", str(caught.value)
    )
    assert found is not None, caught.value
    assert int(found[2]) == int(found[3]) - mem_bytes
    return int(found[3])


def never_instant(profile: Profile) -> Profile:
    return msgspec.structs.replace(profile, machine=msgspec.structs.replace(profile.machine, op_overhead_ns=1))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    profile=profiles().map(never_instant),
    microbatches=st.integers(1, 3),
    offload=st.booleans(),
    recompute=st.booleans(),
)
def test_the_smallest_memory_that_a_refusal_names_will_do_and_one_byte_less_will_not(
    profile, microbatches, offload, recompute
):
    options = {"microbatches": microbatches, "offload": offload, "recompute": recompute}
    sizes = [name for name in Layer.__struct_fields__ if name.endswith("_bytes")]
    takes = any(getattr(layer, name) for layer in profile.layers for name in sizes)
    needs = smallest(profile, 0, **options) if takes else 1
    schedule = quick(profile, needs, **options).schedule
    assert verify(schedule, profile) == []
    if needs > 1:
        assert smallest(profile, needs - 1, **options) == needs


def test_a_refusal_names_the_device_the_missing_bytes_and_the_placement():
    costs = msgspec.structs.replace(uniform(2, 1), layers=heavy(1, 3 * GB))
    with pytest.raises(Infeasible) as caught:
        quick(costs, 2 * GB, offload=False, recompute=False)
    assert str(caught.value) == (
        "no schedule fits --mem 2.00 GB (1.86 GiB): device 1 is 1000000000 bytes (1.00 GB (0.93 GiB)) short; "
        "the smallest --mem that would do is 3000000000 (3.00 GB (2.79 GiB); placement linear, 2 stages)"
    )


def test_a_cap_below_what_one_activation_takes_is_refused_without_a_search(monkeypatch):
    monkeypatch.setattr(compiler, "explore", lambda *_, **__: pytest.fail("searched"))
    assert smallest(uniform(2, 4), GB // 8) > GB // 8


def heavy(light: int, saved: int) -> list[Layer]:
    def layer(size: int) -> Layer:
        return Layer(name="l", forward_ns=5, backward_input_ns=5, backward_weight_ns=5, saved_bytes=size)

    return [layer(light), layer(saved)]


def test_a_refusal_for_want_of_host_memory_says_so():
    profile = Profile(name="p", machine=uniform(1, 2).machine, layers=heavy(GB, GB))
    assert quick(profile, GB, recompute=False, placement="loop", devices=1).schedule
    with pytest.raises(Infeasible, match=r"and --host-mem 500\.00 MB \(476\.84 MiB\): device 0 is 1000000000 bytes"):
        quick(profile, GB, recompute=False, placement="loop", devices=1, host_mem_bytes=GB // 2)


def test_ops_of_no_length_do_not_raise_the_smallest_memory():
    layer = Layer(name="l", forward_ns=0, backward_input_ns=0, backward_weight_ns=0, saved_bytes=100)
    profile = Profile(name="instant", machine=Machine(devices=1), layers=[layer])
    assert smallest(profile, 99, microbatches=3) == 100


def test_ops_of_no_length_in_one_of_two_stages_do_not_raise_the_smallest_memory():
    first = Layer(name="a", forward_ns=0, backward_input_ns=1, backward_weight_ns=1, saved_bytes=100)
    second = Layer(
        name="b",
        forward_ns=1,
        backward_input_ns=0,
        backward_weight_ns=1,
        saved_bytes=240,
        residue_bytes=19,
        backward_transient_bytes=44,
    )
    profile = Profile(name="instant", machine=Machine(devices=1), layers=[first, second])
    needs = smallest(profile, 0, microbatches=1)
    assert smallest(profile, needs - 1, microbatches=1) == needs


# -- limits and interruptions -------------------------------------------------------------------------------------


def test_progress_only_gets_better_until_the_result():
    seen: list[Progress] = []
    result = planned(time_limit_s=3.0, on_progress=seen.append)
    assert result.schedule.forecast.outcome == "feasible", "otherwise the limit does not show"
    incumbents = [one.incumbent_ns for one in seen if one.incumbent_ns is not None]
    bounds = [one.bound_ns for one in seen if one.bound_ns is not None]
    assert incumbents == sorted(incumbents, reverse=True)
    assert bounds == sorted(bounds)
    assert [one.elapsed_s for one in seen] == sorted(one.elapsed_s for one in seen)
    assert incumbents[-1] == result.schedule.forecast.makespan_ns
    assert bounds[-1] == result.schedule.forecast.lower_bound_ns
    assert 0 < seen[-1].gap == 1 - bounds[-1] / incumbents[-1]
    assert {one.phase.split()[0] for one in seen} >= {"published", "local", "search"}


def test_without_time_the_published_schedules_still_give_a_result():
    assert verify(planned(time_limit_s=0.0).schedule, OPEN) == []


def test_sizes_that_cannot_be_written_within_the_time_limit_are_refused_at_once():
    with pytest.raises(BadInput, match=r"--time-limit is 2, expected at least \d+: .* some 24000 ops of 2000 micro"):
        planned(microbatches=2000)
    with pytest.raises(
        BadInput, match="1000000 microbatches on 3 devices are some 12000000 ops, expected at most 1000000"
    ):
        planned(microbatches=10**6, time_limit_s=10**6)
    many = uniform_profile(UniformOptions(devices=1024, layers_per_device=1))
    options = settled(many, Options(OPEN_BYTES, microbatches=64))
    with pytest.raises(BadInput, match="64 microbatches on 1024 devices are some 262144 ops, expected at most 97656"):
        instances(many, options)  # what the judge would not answer


def test_under_a_short_limit_only_placements_of_few_enough_ops_are_planned():
    for limit, stages in ((2.0, {3}), (1000.0, {3, 6})):
        options = settled(OPEN, Options(OPEN_BYTES, microbatches=1000, time_limit_s=limit))
        assert {len(one.stages) for _, one in compiler.in_time(compiler.instances(OPEN, options), options)} == stages


@pytest.mark.parametrize("search", [False, True])
def test_a_published_schedule_of_a_placement_that_is_not_searched_is_the_answer_where_it_beats_the_plan(
    monkeypatch, search
):
    """Lowering is said to take so long that two stages per device are left out."""
    options: dict[str, Any] = {"mem_bytes": 3_500_000_000, "time_limit_s": 5.0, "search": search, "reproducible": True}
    fitting = {name: one for name, one in planned(**options).schedule.forecast.baselines.items() if one.fits}
    monkeypatch.setattr(budget, "LOWER_S_PER_TASK", 2.0 / (4 * 3 * 6))
    plan = planned(**options)
    assert {name: one for name, one in plan.schedule.forecast.baselines.items() if one.fits} == fitting
    assert plan.schedule.forecast.makespan_ns <= min(one.makespan_ns for one in fitting.values() if one.makespan_ns)
    assert verify(plan.schedule, OPEN) == []
    (said,) = [note for note in plan.notes if "beats all that was searched" in note]
    assert f" on a {plan.placement} of 2 stages per device beats" in said


def test_the_plan_stays_the_answer_where_no_published_schedule_of_a_longer_placement_beats_it(monkeypatch):
    monkeypatch.setattr(budget, "LOWER_S_PER_TASK", 2.0 / (4 * 3 * 6))
    plan = planned(mem_bytes=2 * GB, time_limit_s=5.0, reproducible=True)
    assert len(plan.schedule.stages) == 3
    assert not any("beats all that was searched" in note for note in plan.notes)


def test_what_fits_only_placements_that_are_not_searched_is_found_and_the_least_memory_is_that_of_all(monkeypatch):
    monkeypatch.setattr(budget, "LOWER_S_PER_TASK", 2.0 / (4 * 3 * 6))
    with pytest.raises(Infeasible, match=r"the smallest --mem that would do is 500000000 .*6 stages"):
        planned(mem_bytes=GB // 4, time_limit_s=5.0, reproducible=True)
    plan = planned(mem_bytes=GB * 6 // 10, time_limit_s=5.0, reproducible=True)
    assert len(plan.schedule.stages) == 6
    assert verify(plan.schedule, OPEN) == []


def test_an_earlier_plan_of_a_placement_that_is_not_searched_stays_the_answer_where_it_is_better(monkeypatch):
    options: dict[str, Any] = {"mem_bytes": 3_500_000_000, "time_limit_s": 5.0, "reproducible": True}
    searched = planned(**options)
    assert len(searched.schedule.stages) == 6
    monkeypatch.setattr(budget, "LOWER_S_PER_TASK", 2.0 / (4 * 3 * 6))
    assert planned(**options).schedule.forecast.makespan_ns > searched.schedule.forecast.makespan_ns
    plan = planned(**options, seeds=(searched.checked,))
    assert plan.schedule.forecast.makespan_ns <= searched.schedule.forecast.makespan_ns
    assert any("beats all that was searched" in note for note in plan.notes)
    assert not any("is not taken over" in note for note in plan.notes)


def test_a_named_schedule_of_a_placement_that_is_not_searched_is_written(monkeypatch):
    monkeypatch.setattr(budget, "LOWER_S_PER_TASK", 2.0 / (4 * 3 * 6))
    assert len(planned(method="gis-h-uniform", mem_bytes=3_500_000_000, time_limit_s=5.0).schedule.stages) == 6


def test_without_search_no_process_is_started(monkeypatch):
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(processes.Processes, "start", refuse)
    anew(OPEN, OPEN_BYTES)


@pytest.mark.parametrize("phase", ["published", "local", "search", "sparing"])
def test_ctrl_c_returns_the_best_verified_schedule_so_far_and_leaves_no_process(phase):
    seen: list[Progress] = []
    running: list[int] = []

    def press(progress: Progress) -> None:
        seen.append(progress)
        if progress.phase.startswith(phase) and progress.incumbent_ns is not None:
            running.extend(children())
            raise KeyboardInterrupt

    result = planned(time_limit_s=3.0 if phase == "sparing" else 60.0, on_progress=press)
    assert result.interrupted
    assert verify(result.schedule, OPEN) == []
    assert result.schedule.forecast.makespan_ns == seen[-1].incumbent_ns
    assert bool(running) == (phase == "search")
    assert children() == []


@pytest.mark.parametrize("step", ["lower", "spreads_of", "under_noise"])
def test_ctrl_c_behind_the_search_loses_nothing(monkeypatch, step):
    taken = getattr(compiler, step)

    def press(*arguments: object) -> object:
        monkeypatch.setattr(compiler, step, taken)
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, step, press)
    result = planned(search=False, noise=0.1)
    assert result.interrupted
    assert verify(result.schedule, OPEN) == []
    assert (result.quantiles is None) == (step == "under_noise")


@pytest.mark.parametrize("near", [False, True])
def test_a_plan_that_verify_rejects_gives_way_to_the_next_and_is_noted(monkeypatch, near):
    checked = compiler.check
    refused: list[ir.Schedule] = []

    def first(schedule: ir.Schedule, profile: Profile) -> ir.Checked:
        if not refused or (near and schedule.forecast.makespan_ns <= 1.02 * refused[0].forecast.makespan_ns):
            refused.append(schedule)
            raise Violated([Violation(rule="device-memory", message="too much")])
        return checked(schedule, profile)

    monkeypatch.setattr(compiler, "check", first)
    result = planned(time_limit_s=3.0)
    assert verify(result.schedule, OPEN) == []
    assert result.schedule.forecast.makespan_ns >= refused[0].forecast.makespan_ns
    assert any("left out that verify rejects" in note and "too much" in note for note in result.notes)


def test_without_another_plan_the_rejection_is_said(monkeypatch):
    def always(schedule: ir.Schedule, profile: Profile) -> ir.Checked:
        raise Violated([Violation(rule="device-memory", message="too much")])

    monkeypatch.setattr(compiler, "check", always)
    with pytest.raises(AssertionError, match="verify rejects"):
        planned(search=False)


def out_of_memory(line: Connection) -> None:
    line.recv()
    sys.stderr.write("out of memory\n")
    sys.exit(3)


def dead_on_arrival(line: Connection) -> None:
    raise ModuleNotFoundError("no such module")


def hanging(line: Connection) -> None:
    time.sleep(600)


@pytest.mark.parametrize(("serve", "words"), [(out_of_memory, "out of memory"), (dead_on_arrival, "no such module")])
def test_a_solver_process_that_dies_is_noted_and_the_best_schedule_is_returned(monkeypatch, serve, words):
    monkeypatch.setattr(search, "serve", serve)
    result = planned(time_limit_s=3.0, reproducible=True)
    assert verify(result.schedule, OPEN) == []
    assert not result.interrupted
    assert any("(DIED): " in note and note.endswith(words) for note in result.notes)
    assert children() == []


def test_a_solver_process_that_hangs_is_ended_and_the_best_schedule_is_returned(monkeypatch):
    monkeypatch.setattr(search, "serve", hanging)
    monkeypatch.setattr(search, "GRACE_S", 0.1)
    ends, plain = [], search.Searcher.search
    monkeypatch.setattr(search.Searcher, "search", lambda *asked: ends.append(plain(*asked)))
    result = planned(time_limit_s=3.0)
    assert verify(result.schedule, OPEN) == []
    assert set(ends) == {"KILLED"}
    assert children() == []


def answering(answer: Callable[[exact.Request], SearchEvent]) -> type:
    """A Searcher that gives one answer to every request."""

    class Fake(search.Searcher):
        def search(self, request: exact.Request, on_event: Callable[[SearchEvent], None]) -> str:
            on_event(answer(request))
            return "FEASIBLE"

    return Fake


def test_a_solution_that_cannot_be_retimed_is_passed_over(monkeypatch):
    def backwards(request: exact.Request) -> SearchEvent:
        return SearchEvent(
            "solution", starts={task: -start for task, start in request.hint.starts.items()} if request.hint else None
        )

    monkeypatch.setattr(exact, "Searcher", answering(backwards))
    assert verify(planned().schedule, OPEN) == []


def test_a_worse_solution_does_not_replace_a_better_one(monkeypatch):
    def slow(request: exact.Request) -> SearchEvent:
        hint = request.hint
        return SearchEvent(
            "solution", starts=None if hint is None else {task: 3 * begin for task, begin in hint.starts.items()}
        )

    best = quick(OPEN, OPEN_BYTES, microbatches=6, time_limit_s=2.0).schedule.forecast.makespan_ns
    monkeypatch.setattr(exact, "Searcher", answering(slow))
    assert planned(reproducible=True).schedule.forecast.makespan_ns <= best


# -- parts of activations ------------------------------------------------------------------------------------------


def test_where_the_link_is_too_slow_for_whole_activations_a_part_of_their_layers_is_offloaded():
    slow = uniform(2, 4, d2h_ms=3.0, h2d_ms=3.0, shared_links="pairs")
    options = Options(mem_bytes=1500 * 10**6, microbatches=6, placement="linear", recompute=False)
    found = compiler.instances(slow, compiler.settled(slow, options))
    whole, part = (problem for one, problem in found if one.stages == 2)
    assert [stage.staying_layers for stage in whole.stages] == [0, 0]
    assert [stage.staying_layers for stage in part.stages] == [2, 2]
    assert link_share(whole) == pytest.approx(3 / 6)
    assert verify(compiler.compile_schedule(slow, replace(options, time_limit_s=1.0)).schedule, slow) == []


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_one_stage_per_device_is_linear_whichever_way_it_goes_round(placement):
    asked, linear = (quick(uniform(2, 2), 10**9, placement=one, stages_per_device=1) for one in (placement, "linear"))
    assert asked.placement == "linear"
    assert asked.schedule.forecast.makespan_ns == linear.schedule.forecast.makespan_ns
    assert {name for name, one in asked.schedule.forecast.baselines.items() if one.fits} >= {"1f1b-recompute"}


def test_a_link_that_is_fast_enough_moves_whole_activations_only():
    fast = uniform(2, 4, d2h_ms=0.5, h2d_ms=0.5)
    options = Options(mem_bytes=10**9, placement="linear", stages_per_device=1)
    assert len(compiler.instances(fast, compiler.settled(fast, options))) == 1


# -- reproducible -------------------------------------------------------------------------------------------------


def test_reproducible_runs_give_equal_bytes_whatever_the_speed_of_the_machine(monkeypatch):
    first = planned(reproducible=True, seed=5)
    assert first.schedule.forecast.outcome == "feasible", "otherwise the limit does not show"
    clock = time.monotonic
    monkeypatch.setattr(budget.time, "monotonic", lambda: 3 * clock())
    second = planned(reproducible=True, seed=5)
    assert ir.to_text(first.schedule) == ir.to_text(second.schedule)


def test_another_seed_is_recorded():
    assert planned(seed=7, search=False).schedule.provenance.options["seed"] == 7


# -- what a profile leaves out


def test_devices_without_a_host_link_and_messages_that_cost_nothing_are_said():
    profile = uniform(4, 2)
    machine = profile.machine
    links = [msgspec.structs.replace(link, devices=[0, 1]) for link in machine.links]
    pairs = [msgspec.structs.replace(machine.p2p[0], devices=(n, n + 1)) for n in range(3)]
    partly = msgspec.structs.replace(profile, machine=msgspec.structs.replace(machine, links=links, p2p=pairs))
    assert quick(partly, 8 * GB, placement="loop", stages_per_device=2).notes[-2:] == (
        "the profile's $.machine.links has no host link of device 2, 3: nothing is offloaded there",
        "the profile's $.machine.p2p has no entry for devices 0 and 3: their messages take no time",
    )
    nowhere = msgspec.structs.replace(profile, machine=msgspec.structs.replace(machine, links=[], p2p=[]))
    for whole in (profile, nowhere):
        assert not any("$.machine" in note for note in quick(whole, 8 * GB).notes)


def test_placements_that_a_time_limit_leaves_out_are_named():
    options = settled(OPEN, Options(mem_bytes=GB, microbatches=8, time_limit_s=5.0))
    found = instances(OPEN, options)
    whole = [one for one in found if (one[0].name, one[0].stages) != ("loop", 2 * one[1].devices)]
    assert len(whole) < len(found)
    assert too_long(found, found, options) == []
    (said,) = too_long(found, whole, options)
    assert said.startswith(
        "not searched, published schedules alone are tried there, since lowering and verifying their ops"
    )
    assert said.endswith(" takes too much of 5 s: loop of 2 stages per device")
