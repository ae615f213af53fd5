"""Slices of sequences, and microbatches of unequal length: planned, lowered, judged, bounded, refused."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import replace
from itertools import product
from random import Random
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedules import Shape, profile_for, random_cuts

from optpipe_compiler import compiler
from optpipe_compiler.cli import cli
from optpipe_compiler.compiler import Options, compile_schedule, settled
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.documents import ir
from optpipe_compiler.documents import profile as profiles
from optpipe_compiler.documents.profile import Layer, Machine, Profile, Selective, Sliceable
from optpipe_compiler.errors import BadInput, Infeasible
from optpipe_compiler.lower import promised
from optpipe_compiler.machine import compiled
from optpipe_compiler.machine.orders import peaks, retime
from optpipe_compiler.model import bounds
from optpipe_compiler.model.placement import layout
from optpipe_compiler.model.problem import Caps, Freedom, Problem, Slicing, build, static_bytes
from optpipe_compiler.model.schedule import NONE, Kind, Stuck, Task
from optpipe_compiler.plan.carried import in_turn
from optpipe_compiler.plan.instances import instances as searched
from optpipe_compiler.plan.local_search import shortened
from optpipe_compiler.plan.slices import cut
from optpipe_compiler.published import METHODS, NotDefined, published
from optpipe_compiler.published.common import rows
from optpipe_compiler.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterator

PLENTY = 10**12


def sliced(devices: int, **fields: float) -> Profile:
    return uniform_profile(UniformOptions(devices=devices, layers_per_device=2, sliceable=True, p2p_ms=0, **fields))


@st.composite
def instances(draw: st.DrawFn) -> tuple[Profile, Options]:
    """Layers of any costs that can be sliced, and what is asked of them."""
    rng = Random(draw(st.integers(0, 10**6)))
    devices, slices = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shape = Shape(placement=tuple(range(devices)) * 2, **random_cuts(rng, 3))
    profile = profile_for(shape, rng, shared=bool(rng.randrange(2)))
    total = sum(one.saved_bytes + one.static_bytes for one in profile.layers)
    lengths = tuple(rng.randint(slices, 12) for _ in range(3)) if draw(st.booleans()) else None
    cap = int(total / devices * draw(st.floats(0.4, 2.0))) + 60
    asked = {"slices": slices, "lengths": lengths, "seed": 1, "reproducible": True, "time_limit_s": 0.02}
    return profile, Options(cap, 3, placement=draw(st.sampled_from(["linear", "loop", "auto"])), **asked)


@settings(max_examples=30, deadline=None)
@given(instances())
def test_what_is_compiled_is_accepted_fits_and_says_its_units(case: tuple[Profile, Options]) -> None:
    profile, options = case
    try:
        schedule = compile_schedule(profile, options).schedule
    except Infeasible:
        return
    assert verify(schedule, profile) == []
    assert ir.parse(ir.to_text(schedule), "schedule.json") == schedule
    assert max(device.peak_bytes for device in schedule.devices) <= options.mem_bytes
    assert schedule.setup.slices == options.slices
    is_plain = options.slices == 1 and (options.lengths is None or set(options.lengths) == {profile.tokens})
    is_fixed = any(layer.slices is not None and layer.slices.has_fixed_bytes for layer in profile.layers)
    assert schedule.version == (1 if is_plain else 5 if is_fixed else 3)
    if options.lengths is not None and not is_plain:
        assert isinstance(schedule.setup.units, ir.Units)
        units = schedule.setup.units
        assert tuple(units.cuts[shape][-1] for shape in units.shape_of) == options.lengths


@pytest.mark.parametrize("slices", [2, 3, 5])
def test_a_long_step_is_searched_on_whole_microbatches(slices: int) -> None:
    profile, where = sliced(2), layout("linear", 2, 1, [1] * 4)
    (slicing, *_) = cut(profile, Options(0, 100), slices)
    few = shortened(build(profile, where, 100, Caps(PLENTY, None), Freedom(), slicing=slicing))
    assert slices < few.microbatches < 100 * slices
    assert few.microbatches % slices == 0


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.sliced])
def test_the_machine_counts_the_bytes_that_the_file_promises(name: str) -> None:
    """Keys and values that stay, gradients of them that add up, and transients of what is before a slice."""
    compared = 0
    for seed in range(12):
        rng = Random(seed)
        placed, per_device = METHODS[name].placements[seed % len(METHODS[name].placements)]
        slices = 4 if name == "slimpipe" else 2
        profile = profile_for(Shape(placement=(0, 1) * per_device, **random_cuts(rng, 3)), rng)
        where = layout(placed, 2, per_device, [1] * (4 * per_device))
        (slicing, *_) = cut(profile, Options(0, 4), slices)
        problem = build(profile, where, 4, Caps(PLENTY, None), Freedom(), slicing=slicing)
        try:
            timed = published(problem, name)
        except (NotDefined, Stuck):
            continue
        compared += 1
        fixed = static_bytes(profile, where)
        assert [f + p for f, p in zip(fixed, peaks(timed), strict=True)] == promised(timed, profile, where)[0]
    assert compared >= 6


# -- bounds, against the best of all orders


def orders(problem: Problem, device: int, again: set[tuple[int, int]]) -> Iterator[list[Task]]:
    """All orders of one device with one stage: each kind in its own order, with R right before its backward."""
    units = range(problem.microbatches)
    back = [problem.back(unit) for unit in units]

    def extend(order: list[Task], forwards: int, inputs: int, weights: int) -> Iterator[list[Task]]:
        if weights == len(units):
            yield order
            return
        if forwards < len(units):
            yield from extend([*order, Task(Kind.F, device, forwards)], forwards + 1, inputs, weights)
        if inputs < len(units) and back[inputs] // problem.slices * problem.slices + problem.slices <= forwards:
            unit = back[inputs]
            more = [Task(Kind.R, device, unit)] if (device, unit) in again else []
            yield from extend([*order, *more, Task(Kind.I, device, unit)], forwards, inputs + 1, weights)
        if weights < inputs:
            yield from extend([*order, Task(Kind.W, device, back[weights])], forwards, inputs, weights + 1)

    yield from extend([], 0, 0, 0)


def best(problem: Problem) -> int | None:
    """The shortest makespan over all orders and all choices of what is recomputed; None where nothing fits."""
    from optpipe_compiler.machine.orders import released

    found = []
    activations = [(s, u) for s in range(len(problem.stages)) for u in range(problem.microbatches)]
    for chosen in product((False, True), repeat=len(activations)):
        again = {one for one, is_chosen in zip(activations, chosen, strict=True) if is_chosen}
        if again and not problem.freedom.recompute:
            continue
        lanes = [list(orders(problem, device, again)) for device in range(problem.devices)]
        for compute in product(*lanes):
            try:
                free = released(problem, list(map(rows, compute)), method="any")
                found.append(retime(free, problem).makespan)
            except Stuck:
                continue
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_for_units(seed: int) -> None:
    rng = Random(seed)
    devices, microbatches, slices = [(1, 2, 2), (2, 1, 2), (2, 1, 1), (1, 1, 3)][seed % 4]
    shape = Shape(placement=tuple(range(devices)), layers_per_stage=1, **random_cuts(rng, 3))
    profile = profile_for(shape, rng)
    where = layout("linear", devices, 1, [1] * devices)
    lengths = tuple(rng.randint(slices, 12) for _ in range(microbatches))
    options = Options(0, microbatches, lengths=lengths)
    cap = sum(layer.saved_bytes for layer in profile.layers) + rng.randint(20, 80)
    freedom = Freedom(offload=False, recompute=microbatches * slices * devices <= 4)
    for slicing in cut(profile, options, slices):
        problem = build(profile, where, microbatches, Caps(cap, None), freedom, slicing=slicing)
        reached = best(problem)
        for objective in ("makespan", "span"):
            assert reached is None or bounds.best(problem, objective).ticks <= reached


# -- what slices are good for


@pytest.mark.parametrize("lengths", [None, (700, 1000, 700, 300)])
@pytest.mark.parametrize("number", [1, 3])
def test_the_work_of_a_device_is_that_of_all_its_units(number: int, lengths: tuple[int, ...] | None) -> None:
    profile = sliced(2, sequence_length=1000, attention_share=0.4)
    options = settled(profile, Options(mem_bytes=PLENTY, microbatches=4, slices=number, lengths=lengths))
    for _, problem in searched(profile, options):
        every = [[problem.at(s, unit) for unit in range(4 * number)] for s in range(len(problem.stages))]
        work = [sum(one.work for s in problem.stages_of(d) for one in every[s]) for d in range(2)]
        assert bounds.device_work(problem) == max(work)


def test_shapes_of_microbatches_are_counted_once_and_not_once_per_slice() -> None:
    class Counted(tuple[int, ...]):
        scans = 0

        def count(self, value: object) -> int:
            Counted.scans += 1
            return super().count(value)

        def __iter__(self) -> Iterator[int]:
            Counted.scans += 1
            return super().__iter__()

    alike = Slicing(8, ((0, 2, 4, 8),), Counted((0,) * 5))
    mixed = Slicing(8, ((0, 2, 4, 8), (0, 1, 2, 3)), Counted((0, 1, 1)))
    assert (alike.counts, Counted.scans) == ([5], 0)
    profile = uniform_profile(UniformOptions(devices=2, sliceable=True, sequence_length=8))
    one = layout("linear", 2, 1, [1] * len(profile.expanded_layers()))
    problem = build(profile, one, 3, Caps(10**12, None), Freedom(), slicing=mixed)
    assert bounds.head_and_work(problem) > 0
    assert (mixed.counts, Counted.scans) == ([1, 2], 1)


def test_seq1f1b_idles_and_holds_what_its_paper_says() -> None:
    options = Options(PLENTY, 8, slices=4, method="seq1f1b")
    schedule = compile_schedule(sliced(4), options).schedule
    assert schedule.forecast.makespan_ns == (8 * 3 + 3 * 3 / 4) * 1e6
    assert max(device.peak_bytes for device in schedule.devices) == (4 + 4 - 1) / 4 * 1e9


def test_the_search_beats_seq1f1b_in_its_own_memory_and_says_so() -> None:
    options = Options(int(1.75e9), 8, slices="auto", time_limit_s=0.3, reproducible=True, offload=False)
    schedule = compile_schedule(sliced(4), options).schedule
    assert schedule.setup.slices > 1
    assert schedule.forecast.makespan_ns <= (8 * 3 + 3 * 3 / 4 / 2) * 1e6
    assert {"1f1b", "seq1f1b", "slimpipe"} <= set(schedule.forecast.baselines)


def test_auto_counts_the_overhead_of_slices() -> None:
    """Of 2, 4, 8 and 16 slices, those of least overhead are best, though they need most memory."""
    profile = sliced(2, attention_share=0.3, kv_fraction=0.1, slice_overhead_ms=0.02, d2h_ms=0.5, h2d_ms=0.5)
    options = Options(int(6e8), 4, time_limit_s=0.3, reproducible=True)
    found = {
        slices: compile_schedule(profile, replace(options, slices=slices)).schedule.forecast.makespan_ns
        for slices in (1, 2, 4, 16, "auto")
    }
    assert found["auto"] <= 1.02 * min(found.values())
    assert found[16] > 1.2 * min(found.values())


@pytest.mark.parametrize(("limit_s", "most"), [(1.0, 8), (10.0, 32)])
def test_a_short_time_limit_leaves_out_slices_that_take_longer_to_try(limit_s: float, most: int) -> None:
    """A search of 1 s took 11 s."""
    options = Options(int(1.2e9), 16, slices="auto", time_limit_s=limit_s)
    profile = sliced(8, attention_share=0.3)
    assert max(problem.slices for _, problem in searched(profile, settled(profile, options))) == most


def test_the_time_limit_does_not_count_what_is_compiled_to_judge_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first plan on a machine had no time left to search."""
    told: list[str] = []
    answers = iter((False, True))
    monkeypatch.setattr(compiled, "is_kept", lambda: next(answers))
    options, begin = settled(sliced(2), Options(PLENTY, 2, slices="auto", time_limit_s=1)), time.monotonic()
    planned = compiler._Compilation(sliced(2), options, lambda progress: told.append(progress.phase), begin)
    passed = time.monotonic() - begin
    assert planned.budget.elapsed() < passed
    assert told == ["compiling the search, once on this machine"]


def test_slices_are_searched_where_few_microbatches_promise_less_than_the_work_of_all() -> None:
    slices = profiles.Sliceable(backward_input_attention_ns=10)
    layer = profiles.Layer(
        name="block",
        count=2,
        forward_ns=0,
        backward_input_ns=30,
        backward_weight_ns=20,
        backward_ns=45,
        saved_bytes=14,
        residue_bytes=12,
        checkpoint_bytes=14,
        slices=slices,
    )
    profile = profiles.Profile(name="short", sequence_length=16, machine=profiles.Machine(devices=1), layers=[layer])
    asked = Options(1, 5, slices="auto", time_limit_s=0.1, reproducible=True)
    with pytest.raises(Infeasible) as refused:
        compile_schedule(profile, asked)
    enough = compile_schedule(profile, replace(asked, mem_bytes=refused.value.least_mem_bytes)).schedule
    assert enough.setup.slices == 16


def test_a_refusal_names_what_slices_need_where_whole_microbatches_need_more() -> None:
    """It named what whole ones need."""
    profile = sliced(2, kv_fraction=0.1)
    asked = Options(1, 4, slices="auto", time_limit_s=0.1, reproducible=True, offload=False)
    with pytest.raises(Infeasible) as refused:
        compile_schedule(profile, asked)
    told = re.search(r"one microbatch at a time needs (\d+) bytes", str(refused.value))
    assert told is not None, refused.value
    least = int(told[1])
    assert str(refused.value).endswith(f"raise --mem to {least}")
    with pytest.raises(Infeasible, match="the smallest --mem that would do is") as whole:
        compile_schedule(profile, replace(asked, slices=1))
    assert least < int(re.findall(r"do is (\d+)B? ", str(whole.value))[0])
    assert compile_schedule(profile, replace(asked, mem_bytes=least)).schedule.setup.slices > 1


def test_a_cap_below_the_weights_names_no_smallest_cap_where_slices_were_not_tried() -> None:
    """It named what whole microbatches need; slices fit below that."""
    profile = sliced(2, kv_fraction=0.1, static_gb=1)
    asked = Options(1, 4, slices="auto", time_limit_s=0.1, reproducible=True, offload=False)
    with pytest.raises(Infeasible) as refused:
        compile_schedule(profile, asked)
    told = re.search(r"short; raise --mem to (\d+) ", str(refused.value))
    assert told is not None, refused.value
    assert compile_schedule(profile, replace(asked, mem_bytes=int(told[1]) - 1)).schedule.setup.slices > 1


def test_what_a_refusal_of_slices_says_is_needed_is_enough_where_the_hosts_have_little_memory() -> None:
    """It named what offloads need for which the hosts have no memory."""
    profile = sliced(2, kv_fraction=0.1, d2h_ms=0.5, h2d_ms=0.5)
    limits = {"slices": 2, "time_limit_s": 0.1, "reproducible": True, "recompute": False, "host_mem_bytes": 10**6}
    asked = Options(1, 4, **limits)
    with pytest.raises(Infeasible) as refused:
        compile_schedule(profile, asked)
    told = re.search(r"one microbatch at a time needs (\d+) bytes", str(refused.value))
    assert told is not None, refused.value
    assert compile_schedule(profile, replace(asked, mem_bytes=int(told[1]))).schedule.setup.slices > 1


def test_a_message_that_overtakes_another_counts_as_the_file_has_it() -> None:
    """Slices shrink, and with them their messages: where ops are short, later ones arrived, and were freed, before
    earlier ones. The file has messages arrive in order, so that it promised more than the cap."""
    slices = {"forward_attention_ns": 6884111, "forward_overhead_ns": 1400000, "carry_bytes": 1648981}
    sizes = {"saved_bytes": 6881346, "residue_bytes": 11000000, "captured_bytes": 5322354, "checkpoint_bytes": 2750000}
    times = {"forward_ns": 15000000, "backward_input_ns": 23250000, "backward_weight_ns": 11000000}
    transient = dict.fromkeys(("forward_transient_bytes", "backward_input_transient_bytes"), 2000000)
    block = {"name": "block", "count": 2, "output_bytes": 3000000, **times, **sizes, **transient, "slices": slices}
    head = {"name": "head", "output_bytes": 3000000, "saved_bytes": 17000000, "checkpoint_bytes": 17000000, **times}
    p2p = [{"latency_ns": 90000, "bytes_per_s": 1000000000}]
    machine = {"devices": 2, "reserve_bytes": 2000000, "time_permille": [1, 1000], "p2p": p2p}
    named = {"format": "optpipe-profile", "version": 1, "revision": 0, "name": "short ops", "sequence_length": 64}
    layers = [block, {**head, "slices": {"forward_attention_ns": 3355803}}]
    profile = profiles.parse(json.dumps({**named, "machine": machine, "layers": layers}), "profile.json")
    for cap in range(18, 24):
        asked = Options(cap * 10**6 + 1052, 2, slices=3, time_limit_s=0.1, reproducible=True)
        with suppress(Infeasible):
            assert not [note for note in compile_schedule(profile, asked).notes if "verify rejects" in note]


def test_where_weights_alone_do_not_fit_no_slices_are_tried() -> None:
    profile = sliced(2, static_gb=1.0)
    asked = settled(profile, Options(10**9, 4, slices="auto"))
    assert all(problem.slicing is None for _, problem in searched(profile, asked))
    assert any(problem.slicing for _, problem in searched(profile, replace(asked, mem_bytes=2 * 10**9)))


def test_slices_of_equal_time_shrink_as_the_sequence_grows() -> None:
    profile = sliced(2, attention_share=0.6)
    even, timely = (one for one in cut(profile, Options(0, 2), 4) if one is not None)
    sizes = [end - begin for begin, end in zip(timely.cuts[0], timely.cuts[0][1:], strict=False)]
    assert even.cuts[0] == (0, 8192, 16384, 24576, 32768)
    assert sizes == sorted(sizes, reverse=True)
    problem = build(profile, layout("linear", 2, 1, [1] * 4), 2, Caps(PLENTY, None), Freedom(), slicing=timely)
    works = [stages[0].work for stages in problem.classes]
    assert max(works) - min(works) < 1000  # ns, of 3 ms


def test_a_start_with_other_slices_is_not_taken_over_and_the_note_says_why():
    asked = Options(10**10, 2, slices=2, time_limit_s=0.0, search=False)
    first = compile_schedule(sliced(2), asked)
    again = compile_schedule(sliced(2), replace(asked, slices=1, seeds=(first.checked,)))
    assert [note for note in again.notes if "slices or lengths of microbatches that are not searched here" in note]


def test_seeds_of_slices_start_the_search() -> None:
    profile = sliced(3)
    asked = Options(int(2e9), 6, slices=4, time_limit_s=0.1, reproducible=True)
    first = compile_schedule(profile, asked)
    again = compile_schedule(profile, replace(asked, time_limit_s=0.0, seeds=(first.checked,), search=False))
    assert again.schedule.forecast.makespan_ns <= first.schedule.forecast.makespan_ns


def test_starts_that_are_brought_in_turn_are_never_equal():
    starts = np.full((len(Kind), 1, 6), NONE)
    starts[[Kind.F, Kind.I, Kind.W], 0] = [3, 9, 4, 4, 4, 20], [9, 8, 9, 2, 11, 30], [9, 8, 9, 2, 11, 30]
    found = in_turn(starts, 2)
    assert found[Kind.F, 0].tolist() == [3, 9, 10, 11, 12, 20]
    assert found[Kind.I, 0].tolist() == [9, 8, 11, 10, 31, 30]
    assert (found[Kind.D] == NONE).all()


@pytest.mark.parametrize("microbatches", [3, 5, 9])
def test_seeds_of_slices_start_other_numbers_of_microbatches(microbatches: int) -> None:
    profile = sliced(3, attention_share=0.5)
    asked = Options(int(2e9), 6, slices=4, time_limit_s=0.1, reproducible=True)
    first = compile_schedule(profile, asked)
    other = replace(asked, microbatches=microbatches, time_limit_s=0.0, seeds=(first.checked,), search=False)
    again = compile_schedule(profile, other)
    assert again.notes == ()
    assert again.schedule.setup.microbatches == microbatches
    assert (
        again.schedule.forecast.makespan_ns
        <= compile_schedule(profile, replace(other, seeds=())).schedule.forecast.makespan_ns
    )


def test_a_seed_of_other_lengths_is_not_taken_over() -> None:
    profile = sliced(2)
    asked = Options(PLENTY, 4, slices=1, time_limit_s=0.0, reproducible=True)
    lengths = (8192, 32768, 16384, 4096)
    whole, packed = (compile_schedule(profile, replace(asked, lengths=one)) for one in (None, lengths))
    for seed, other in ((whole, lengths), (packed, None)):
        again = compile_schedule(profile, replace(asked, lengths=other, seeds=(seed.checked,)))
        assert any("not taken over" in note for note in again.notes)
        assert again.schedule.setup.units == (packed if other else whole).schedule.setup.units


def test_slower_devices_get_fewer_layers_and_the_judge_knows_their_times() -> None:
    uneven = UniformOptions(devices=3, layers_per_device=4, p2p_ms=0, device_times=(1, 2, 1), sliceable=True)
    profile = uniform_profile(uneven)
    for slices in (1, 2):
        options = Options(PLENTY, 6, slices=slices, placement="linear", time_limit_s=0.2, reproducible=True)
        schedule = compile_schedule(profile, options).schedule
        sizes = [end - begin for begin, end in (stage.layers for stage in schedule.stages)]
        assert sizes[1] < min(sizes[0], sizes[2])
        equal = uniform_profile(replace(uneven, device_times=None))
        assert {violation.rule for violation in verify(schedule, equal)} == {"profile-times"}
    with pytest.raises(BadInput, match="--device-times has 1 numbers, expected one for each of 3 devices"):
        uniform_profile(replace(uneven, device_times=(1.0,)))


# -- bad input


def test_what_cannot_be_cut_is_refused_in_one_sentence() -> None:
    plain = uniform_profile(UniformOptions(devices=2))
    for profile, options, said in (
        (plain, {"slices": 2}, "--slices is 2, but layer 'layer' cannot run slice by slice, expected 1"),
        (plain, {"lengths": (4, 4)}, "--lengths needs to know how long the profile's sequences are"),
        (sliced(2), {"slices": 40_000}, "--slices is 40000, expected at most the 32768 tokens of a sequence"),
        (sliced(2), {"slices": 0}, "--slices is 0, expected at least 1"),
        (sliced(2), {"lengths": (5,)}, "--lengths has 1 lengths, expected one for each of 2"),
        (sliced(2), {"lengths": (5, 9), "slices": 6}, "--slices is 6, expected at most the 5 tokens"),
        (sliced(2), {"slices": 2, "method": "1f1b"}, "1f1b: is for microbatches not cut into slices"),
        (sliced(2), {"slices": 1, "method": "seq1f1b"}, "seq1f1b: is for microbatches cut into slices"),
    ):
        with pytest.raises(BadInput, match=said):
            compile_schedule(profile, Options(PLENTY, 2, **options))


def test_profiles_say_what_can_be_sliced_and_nothing_else() -> None:
    for options, said in (
        ({"attention_share": 0.5}, "--attention-share is 0.5 without --sliceable"),
        ({"sequence_length": 1234567}, "--sequence-length is 1234567 without --sliceable"),
        ({"sliceable": True, "kv_fraction": 1.5}, "--kv-fraction is 1.5, expected 0 to 1"),
        ({"sliceable": True, "kv_fraction": 0.8, "boundary_fraction": 0.4}, "expected at most 1 together"),
    ):
        with pytest.raises(BadInput, match=said):
            uniform_profile(UniformOptions(**options))
    plain = msgspec.to_builtins(sliced(2, kv_fraction=0.2))
    for change, said in (
        (lambda layer: layer["slices"].update(carry_bytes=10**12), r"slices.carry_bytes is 10{12}, expected"),
        (
            lambda layer: layer["slices"].update(forward_attention_ns=10**9),
            r"slices.forward_attention_ns is 10{9}, expected",
        ),
        (
            lambda layer: layer.update(backward_ns=0, slices={"backward_input_attention_ns": 1}),
            r"slices.backward_input_attention_ns is 1, expected at most backward_input_ns and backward_ns \(0\)",
        ),
    ):
        broken = json.loads(json.dumps(plain))
        change(broken["layers"][0])
        with pytest.raises(BadInput, match=said):
            profiles.parse(json.dumps(broken), "profile.json")
    del plain["sequence_length"]
    with pytest.raises(BadInput, match=r"slices is there, expected \$.sequence_length"):
        profiles.parse(json.dumps(plain), "profile.json")


def test_the_commands_plan_show_and_check_slices(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    run("profile", "uniform", "--devices", "2", "--sliceable", "--attention-share", "0.3", "--kv-fraction", "0.1")
    run("compile", "--mem", "2GB", "--microbatches", "4", "--slices", "4", "--time-limit", "0")
    assert "4 microbatches of 32768 tokens in 4 slices" in run("show")
    run("verify", "schedule.json", "--profile", "profile.json")
    (tmp_path / "lengths").write_text("32768, 1000\n20000 32768")
    run("compile", "--mem", "2GB", "--lengths", "lengths", "--slices", "2", "--time-limit", "0")
    assert "4 microbatches of 1000 to 32768 tokens in 2 slices" in run("show")
    refused = CliRunner().invoke(cli, ["compile", "--mem", "2GB", "--lengths", "profile.json"])
    assert isinstance(refused.exception, BadInput)
    assert "expected the tokens of each microbatch" in str(refused.exception)


CHEAP = {"selective": Selective(saved_bytes=40, captured_bytes=60), "residue_bytes": 60, "checkpoint_bytes": 40}


@pytest.mark.parametrize(
    ("slices", "layers", "asked"),
    [
        ({}, {}, {"lengths": (320, 320), "placement": "linear"}),
        ({"carry_gradient_bytes": 5000}, {}, {"slices": 2, "placement": "linear"}),
        ({"forward_prefix_bytes": 5000, "backward_prefix_bytes": 5000}, {}, {"slices": 2, "placement": "linear"}),
        ({}, CHEAP, {"lengths": (160, 160), "placement": "loop", "stages_per_device": 2}),
    ],
)
def test_a_cap_that_a_refusal_names_is_enough(slices, layers, asked) -> None:
    """Where a microbatch holds more than the profile's figures say of a sequence: it is longer, or has slices."""
    figures = {"saved_bytes": 100, "checkpoint_bytes": 1, "output_bytes": 1} | layers
    times = {"forward_ns": 10, "backward_input_ns": 10, "backward_weight_ns": 10}
    layer = Layer(name="l", count=16, slices=Sliceable(**slices), **times, **figures)
    profile = Profile(name="p", machine=Machine(devices=2), layers=[layer], sequence_length=16)
    asked = {"microbatches": 2, "time_limit_s": 0.0, "search": False, "reproducible": True, **asked}
    with pytest.raises(Infeasible) as refused:
        compile_schedule(profile, Options(10, **asked))
    compile_schedule(profile, Options(refused.value.least_mem_bytes, **asked))


@pytest.mark.parametrize("asked", [{"slices": 2}, {"lengths": (64, 64, 32, 64)}])
def test_a_refusal_names_what_backwards_in_halves_need_where_that_is_less(asked) -> None:
    """Whole ones were all that it tried: it named 6,000 bytes, though a published schedule fits in 2,000."""
    times = {"forward_ns": 1000, "backward_input_ns": 1000, "backward_weight_ns": 1000}
    layer = Layer(name="l", count=2, saved_bytes=1000, backward_transient_bytes=5000, slices=Sliceable(), **times)
    profile = Profile(name="p", machine=Machine(devices=2), layers=[layer], sequence_length=64)
    asked = {"recompute": False, "microbatches": 4, "time_limit_s": 0.0, "search": False, "reproducible": True, **asked}
    with pytest.raises(Infeasible) as refused:
        compile_schedule(profile, Options(999, **asked))
    assert refused.value.least_mem_bytes == 1000
    compile_schedule(profile, Options(1000, **asked))
