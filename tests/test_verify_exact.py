"""The memory rule is exact: the judge's figure is neither more nor less than what some execution reaches."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from brute_force import Machine
from small_schedules import build, build_with_profile, random_shape

from optpipe_compiler.documents import ir
from optpipe_compiler.verify import verify

RULES = {"device": ("device-memory", "peak_bytes"), "host": ("host-memory", "host_bytes")}


def with_promises(schedule: ir.Schedule, most: dict[tuple[str, int], int], less: int) -> ir.Schedule:
    devices = [
        msgspec.structs.replace(
            device,
            peak_bytes=max(most["device", number] - less, 0),
            host_bytes=max(most.get(("host", number), 0) - less, 0),
        )
        for number, device in enumerate(schedule.devices)
    ]
    return ir.seal(msgspec.structs.replace(schedule, devices=devices))


def assert_exact(schedule: ir.Schedule, most: dict[tuple[str, int], int]) -> None:
    """Promising `most` is accepted, and one byte less is refused, for every device and its host share."""
    assert [v for v in verify(with_promises(schedule, most, 0)) if v.rule.endswith("-memory")] == []
    refused = {(v.rule, v.device) for v in verify(with_promises(schedule, most, 1)) if v.rule.endswith("-memory")}
    assert refused == {(RULES[where][0], device) for (where, device), count in most.items() if count}


def without_some_waits(schedule: ir.Schedule, rng: Random) -> ir.Schedule:
    """Drop waits at random: the memory rule is defined whether or not data arrives in time."""
    plain = msgspec.to_builtins(schedule)
    for device in plain["devices"]:
        for lane in ("compute", "d2h", "h2d"):
            for op in device[lane]:
                op["after"] = [name for name in op.get("after", []) if rng.random() < 0.7]
    return ir.seal(msgspec.convert(plain, ir.Schedule))


def by_cut(schedule: ir.Schedule) -> dict[tuple[str, int], int]:
    machine, devices = Machine(schedule), range(len(schedule.devices))
    return {(where, device): machine.most_by_cut(where, device) for where in ("device", "host") for device in devices}


@pytest.mark.parametrize("seed", range(60))
def test_the_worst_case_equals_the_most_that_running_every_execution_finds(seed: int) -> None:
    rng = Random(seed)
    placements = [(0,), (0, 1), (0, 0), (0, 1, 0), (0, 1, 1, 0)]
    shape = random_shape(rng, placements=placements, microbatches=rng.randint(1, 2))
    schedule = build(shape, seed)
    if seed % 2:
        schedule = without_some_waits(schedule, rng)
    most = Machine(schedule).most_by_running(limit=40_000)
    assert_exact(schedule, most if most is not None else by_cut(schedule))


@pytest.mark.parametrize("seed", range(60))
def test_the_worst_case_equals_the_heaviest_closed_set_by_minimum_cut(seed: int) -> None:
    rng = Random(1_000 + seed)
    placements = [(0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2)]
    schedule = build(random_shape(rng, placements=placements, microbatches=rng.randint(2, 5)), seed)
    if seed % 2:
        schedule = without_some_waits(schedule, rng)
    assert_exact(schedule, by_cut(schedule))


@pytest.mark.parametrize("seed", range(60))
def test_the_worst_case_of_slices_equals_the_heaviest_closed_set(seed: int) -> None:
    """With keys and values that stay, and gradients of them that add up; lengths that differ, too."""
    rng = Random(2_000 + seed)
    small = seed < 30
    placements = [(0,), (0, 1), (0, 0)] if small else [(0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0)]
    shape = random_shape(rng, placements=placements, microbatches=1 + seed % 3, slices=rng.randint(1, 3))
    schedule, profile = build_with_profile(shape, seed)
    assert verify(schedule, profile) == []
    if seed % 2:
        schedule = without_some_waits(schedule, rng)
    most = Machine(schedule).most_by_running(limit=20_000) if small else None
    assert_exact(schedule, most if most is not None else by_cut(schedule))


def test_the_two_references_agree_with_each_other() -> None:
    compared = 0
    for seed in range(12):
        machine = Machine(build(random_shape(Random(seed), placements=[(0, 1)], microbatches=1), seed))
        most = machine.most_by_running(limit=40_000)
        if most is not None:
            compared += 1
            assert all(machine.most_by_cut(where, device) == count for (where, device), count in most.items())
    assert compared >= 6
