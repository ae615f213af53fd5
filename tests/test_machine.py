"""The compiled machine: as its definition in plain Python, exact in memory, safe, and finished whenever it can be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optpipe_compiler.lower import promised
from optpipe_compiler.machine import compiled
from optpipe_compiler.machine.dispatch import DONE, LATE, STUCK
from optpipe_compiler.machine.orders import peaks, retime
from optpipe_compiler.machine.state import NEVER
from optpipe_compiler.model.placement import layout
from optpipe_compiler.model.problem import Caps, Freedom, Problem, Stage, build, static_bytes
from optpipe_compiler.model.schedule import Kind, Mode, Schedule, Task
from tests.instances import problem, profiles
from tests.list_scheduler import Guide, Run, Stuck
from tests.machines import UNKNOWN_NUMBA, at_one_speed, dispatched, loaded, play, run, starts
from tests.plans import check, serial
from tests.strategies import problems

RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def guide(one: Problem, mode: Mode = Mode.KEEP, *, split: bool = True, depth: int = 1) -> Guide:
    """Backwards first, one microbatch after the other; forwards run `depth` microbatches ahead of weight gradients."""
    able = {Mode.OFFLOAD: one.can_offload, Mode.RECOMPUTE: one.can_recompute}.get(mode, lambda stage: True)
    keys = [(s, m) for s in range(len(one.stages)) for m in range(one.microbatches)]
    return Guide(
        forward={(s, m): 100 * (m - depth) + 90 for s, m in keys},
        backward={(s, m): 100 * m + 10 - s for s, m in keys},
        weight={(s, m): 100 * m + 20 for s, m in keys},
        modes={(s, m): mode if able(s) else Mode.KEEP for s, m in keys},
        fused=[not split] * len(one.stages),
        reserve=[0] * one.devices,
        holds=[False] * len(one.stages),
        waits=[False] * len(one.stages),
        recomputed_before=[0] * len(one.stages),
        reloaded_before=[0] * len(one.stages),
    )


def drawn(one: Problem, random: Random) -> Guide:
    """Any ranks that do not fall from a microbatch to the next, and any treatment that the instance allows."""

    def ranks() -> dict[tuple[int, int], int]:
        rows = [np.maximum.accumulate([random.randrange(60) for _ in range(one.microbatches)]) for _ in one.stages]
        return {(s, m): int(rank) for s, row in enumerate(rows) for m, rank in enumerate(row)}

    modes = {}
    for s in range(len(one.stages)):
        able = [Mode.KEEP, *[Mode.OFFLOAD] * one.can_offload(s), *[Mode.RECOMPUTE] * one.can_recompute(s)]
        modes |= {(s, m): random.choice(able) for m in range(one.microbatches)}
    fused = [not one.freedom.split or random.random() < 0.4 for _ in one.stages]
    reserve = [random.randrange(3) for _ in range(one.devices)]
    holds, waits = ([random.random() < 0.5 for _ in one.stages] for _ in range(2))
    before = [[random.randrange(4) for _ in one.stages] for _ in range(2)]
    return Guide(ranks(), ranks(), ranks(), modes, fused, reserve, holds, waits, *before)


def with_messages(one: Problem, random: Random) -> Problem:
    """The instance with messages that take memory."""
    sizes = [0, *(random.randrange(3) for _ in one.stages[1:]), 0]
    stages = []
    for s, stage in enumerate(one.stages):
        both = sizes[s] + sizes[s + 1]
        stages.append(
            replace(
                stage,
                incoming=sizes[s],
                outgoing=sizes[s + 1],
                forward_extra=stage.forward_extra + both,
                backward_extra=stage.backward_extra + both,
                backward_input_extra=stage.backward_input_extra + both,
            )
        )
    return replace(one, stages=tuple(stages), budget=tuple(size + random.randrange(8) for size in one.budget))


@MANY
@given(one=problems(least=0), seed=st.integers(0, 10**6))
def test_it_agrees_with_its_definition_tick_for_tick(one, seed):
    random = Random(seed)
    heavy = with_messages(one, random)
    agree(heavy, drawn(heavy, random))


def test_it_agrees_where_ops_take_no_time():
    instant = dict.fromkeys(
        ("forward", "backward_input", "backward_weight", "backward", "send_activation", "residue"), 0
    )
    one = problem(2, 2, 8, per_device=2, placement="loop", links=False, **instant)
    one = replace(one, stages=(one.stages[0], replace(one.stages[1], forward=1), *one.stages[2:]), budget=(8, 12))
    for seed in range(300):
        agree(one, drawn(one, Random(seed)))


def agree(one: Problem, by: Guide) -> None:
    x = loaded(one, by)
    status, makespan, ops = play(x, False, NEVER)
    reference = Run(one, by)
    try:
        expected = reference.play()
    except Stuck:
        assert status == STUCK
        return
    assert status == DONE
    assert starts(x) == expected
    assert ops == len(expected)
    assert makespan == max(reference.ends[task] for task in expected if task.kind < Kind.D)


@MANY
@given(profile=profiles(), microbatches=st.integers(1, 5), room=st.integers(0, 4000), seed=st.integers(0, 10**6))
def test_its_peaks_are_those_that_the_file_promises(profile, microbatches, room, seed):
    random = Random(seed)
    layers = [
        msgspec.structs.replace(layer, **{f"{name}_ns": getattr(layer, f"{name}_ns") + 1 for name in TIMES})
        for layer in profile.layers
    ]
    links = [msgspec.structs.replace(link, latency_ns=link.latency_ns + 1) for link in profile.machine.links]
    machine = msgspec.structs.replace(profile.machine, links=links)
    timed_profile = msgspec.structs.replace(profile, layers=layers, machine=machine)
    devices = profile.machine.devices
    names = ["linear", *["loop", "v"] * (len(layers) >= 2 * devices)]
    name = random.choice(names)
    place = layout(name, devices, 1 if name == "linear" else 2, [1] * len(layers))
    one = build(timed_profile, place, microbatches, Caps(10**9, None), Freedom(), random.choice([1.0, 0.5]))
    most = max(stage.saved + stage.forward_extra for stage in one.stages)
    one = replace(one, budget=(2 * most + room,) * devices)
    x = loaded(one, drawn(one, random))
    status, makespan, _ = play(x, False, NEVER)
    if status != DONE:
        return
    timed = Schedule(one, "drawn", starts(x))
    assert timed.makespan == makespan
    fixed = static_bytes(timed_profile, place)
    held = [size + int(peak) for size, peak in zip(fixed, x.devices["peak"], strict=True)]
    assert held == promised(timed, timed_profile, place)[0]


TIMES = ("forward", "backward_input", "backward_weight")


def test_the_span_is_the_longest_time_on_one_device():
    one = problem(3, 6, 100, send_activation=0, send_gradient=0)
    x = loaded(one, guide(one, split=False, depth=3))
    assert play(x, False, NEVER)[1] == (6 + 3 - 1) * 30
    assert play(x, True, NEVER)[1] == (6 + 3 - 1) * 30
    x = loaded(one, guide(one, depth=3))
    whole, _, _ = play(x, True, NEVER)
    assert whole == DONE
    assert play(x, True, NEVER)[1] == Schedule(one, "span", starts(x)).span


def cautious(stage: Stage) -> Stage:
    """The stage with the room that the list scheduler reserves: the largest transient with every op."""
    most = max(
        stage.backward_extra,
        stage.backward_input_extra + stage.captured,
        stage.backward_weight_extra,
        stage.forward_extra,
    )
    return replace(
        stage,
        backward_extra=most,
        backward_input_extra=most,
        backward_weight_extra=most,
        forward_extra=most,
        captured=0,
        residue=stage.saved,
    )


@RANDOM
@given(one=problems())
def test_lanes_data_and_memory_are_respected_and_microbatches_run_in_order_per_stage_and_kind(one):
    for timed in dispatched(one):
        check(timed)
        for kind in Kind:
            for stage in range(len(one.stages)):
                mine = [timed.starts.get(Task(kind, stage, m)) for m in range(one.microbatches)]
                there = [start for start in mine if start is not None]
                assert there == sorted(there)


@RANDOM
@given(one=problems())
def test_it_finishes_where_one_microbatch_at_a_time_fits_with_its_reserve(one):
    small = replace(one, stages=tuple(replace(s, residue=min(s.residue, s.saved)) for s in one.stages))
    for mode in Mode:
        by = guide(small, mode, split=one.freedom.split)
        reserved = replace(small, stages=tuple(map(cautious, small.stages)), host_budget=None, hosts=())
        alone = serial(reserved, split=one.freedom.split, mode=lambda s, m, by=by: by.modes[s, m])
        roomy = replace(small, host_budget=None, hosts=(), budget=tuple(peaks(alone)))
        assert len(run(roomy, by).starts) == len(alone.starts)


@RANDOM
@given(one=problems())
def test_its_schedules_follow_their_own_plans(one):
    """Never later where no transfer slows another down: a reload that waits may keep an offload from that."""
    alike = at_one_speed(one)
    for timed in dispatched(alike):
        assert retime(timed, alike).makespan <= timed.makespan


PEAKS = """
from optpipe_compiler.machine import compiled
from optpipe_compiler.machine.orders import peaks
from tests.instances import problem
from tests.plans import serial
assert not compiled._KNOWN
print(peaks(serial(problem(2, 3, 100), split=True)))
"""


def test_a_version_of_numba_that_is_not_known_compiles_it_too(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", UNKNOWN_NUMBA + PEAKS]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert said == f"{peaks(serial(problem(2, 3, 100), split=True))}\n"


def test_it_is_stuck_rather_than_above_the_budget_where_not_one_microbatch_fits():
    one = problem(1, 1, 3)
    assert play(loaded(one, guide(one)), False, NEVER)[0] == STUCK


def test_it_gives_up_as_soon_as_a_device_cannot_be_done_in_time():
    one = problem(3, 6, 100, send_activation=0, send_gradient=0)
    x = loaded(one, guide(one, split=False, depth=3))
    status, makespan, ops = play(x, False, NEVER)
    assert status == DONE
    assert play(x, False, makespan) == (DONE, makespan, ops)
    assert play(x, False, 6 * 30 - 1)[::2] == (LATE, 0)
    assert play(x, False, makespan - 1)[0] == LATE


def test_with_room_for_one_activation_it_runs_one_microbatch_at_a_time():
    one = problem(2, 3, 4, send_activation=0, send_gradient=0)
    timed = run(one, guide(one, split=False, depth=3))
    assert timed.makespan == 3 * 2 * 30
    assert [timed.starts[Task(Kind.F, 0, m)] for m in range(3)] == [0, 60, 120]


def test_with_room_for_all_it_is_as_good_as_one_forward_one_backward():
    one = problem(3, 6, 100, send_activation=0, send_gradient=0)
    assert run(one, guide(one, split=False, depth=3)).makespan == (6 + 3 - 1) * 30


def test_what_ranks_lower_goes_first():
    one = problem(1, 4, 100)
    soon, late = run(one, guide(one, depth=0)), run(one, guide(one, depth=4))
    assert [task.kind.name for task in soon.compute_lanes[0]] == ["F", "I", "W"] * 4
    assert [task.kind.name for task in late.compute_lanes[0]][:4] == ["F"] * 4


def test_every_guide_uses_only_what_is_free_to_use():
    for offload, recompute, split in ((a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)):
        freedom = Freedom(bool(offload), bool(recompute), bool(split))
        for timed in dispatched(problem(2, 3, 12, freedom=freedom)):
            assert timed.count(Kind.D) == timed.count(Kind.H)
            assert freedom.offload or timed.count(Kind.D) == 0
            assert freedom.recompute or timed.count(Kind.R) == 0
            assert freedom.split or timed.count(Kind.W) == 0


def test_an_activation_is_offloaded_recomputed_or_kept_as_the_guide_says():
    one = problem(1, 3, 8)
    by = replace(guide(one), modes={(0, 0): Mode.OFFLOAD, (0, 1): Mode.RECOMPUTE, (0, 2): Mode.KEEP})
    timed = run(one, by)
    assert [[Task(kind, 0, m) in timed.starts for kind in (Kind.D, Kind.H, Kind.R)] for m in range(3)] == [
        [True, True, False],
        [False, False, True],
        [False, False, False],
    ]


def test_what_the_host_has_no_room_for_is_kept():
    one = replace(problem(1, 3, 100), host_budget=problem(1, 3, 100).stages[0].saved)
    timed = run(one, guide(one, Mode.OFFLOAD, depth=4))
    assert 1 <= timed.count(Kind.D) < 3
    check(timed)


def test_no_more_than_one_activation_is_reloaded_ahead_while_there_are_forwards():
    one = problem(1, 6, 100, offload=1, reload=1)
    timed = run(one, guide(one, Mode.OFFLOAD, depth=2))
    last = max(start for task, start in timed.starts.items() if task.kind is Kind.F)
    events = [(start, 1) for task, start in timed.starts.items() if task.kind is Kind.H]
    events += [(start, -1) for task, start in timed.starts.items() if task.kind in (Kind.I, Kind.B)]
    levels = [sum(change for _, change in sorted(events)[: n + 1]) for n in range(len(events))]
    there = [level for level, (start, _) in zip(levels, sorted(events), strict=True) if start < last]
    assert max(there) == 1


def test_a_reserve_is_left_free_for_messages_and_no_more_than_it():
    one = problem(2, 4, 9)
    by = guide(one, depth=2)
    assert max(peaks(run(one, by))) == 8
    assert max(peaks(run(one, replace(by, reserve=[2, 2])))) == 6  # of 7: an activation and a residue


def test_what_is_compiled_runs_where_its_folder_has_no_room(monkeypatch, tmp_path):
    """`compile` refused: the output cannot be written."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiled, "_FOLDER", tmp_path)
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    assert compiled.entry(one_more)(1) == 2


def test_what_a_crash_left_half_written_is_compiled_anew(monkeypatch, tmp_path):
    """Every `compile` ended in a traceback."""
    monkeypatch.setattr(compiled, "_FOLDER", tmp_path)
    assert compiled.entry(one_more)(1) == 2
    for ending in ("nbi", "nbc"):
        for path in tmp_path.rglob(f"*.{ending}"):
            path.write_bytes(path.read_bytes()[:100])
        again, third = compiled.entry(one_more), compiled.entry(one_more)
        assert (again(1), compiled.misses(again)) == (2, 1)
        assert (third(1), compiled.misses(third)) == (2, 0)


def one_more(number):
    return number + 1
