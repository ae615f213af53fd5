"""The judge's search over pairs of starts, and its clocks in blocks, against the plain way to do the same."""

from __future__ import annotations

from random import Random
from time import process_time

import msgspec
import numpy as np
import pytest
from small_schedules import Shape, build, random_shape

from optpipe_compiler.verify import causality, memory, pairs
from optpipe_compiler.verify.pairs import best_pair
from optpipe_compiler.verify.placed import PlacedOps

BIG = 2**70
"""No sum of such numbers fits 64 bits."""


def random_case(rng: Random, *, most: int, chains: int):
    """Sums per chain, clocks that grow along two lanes, and windows."""
    lengths = [rng.randint(1, 6) for _ in range(chains)]
    kind = object if most > 2**40 else np.int64
    sums = [np.cumsum(np.array([0, *(rng.randint(-most, most) for _ in range(n))], kind)) for n in lengths]
    rows, others = rng.randint(1, 30), rng.randint(1, 12)

    def lane(count: int):
        return np.array([sorted(rng.randint(0, n) for _ in range(count)) for n in lengths], np.int32).T

    low = np.array([rng.randint(0, rows) for _ in range(others)])
    high = np.array([rng.randint(0, rows) for _ in range(others)])
    return sums, lane(rows), lane(others), low, high


def naive(sums, clocks, others, low, high):
    """Try every pair, in Python's integers."""
    found = [
        sum(int(column[max(clocks[c][k], others[h][k])]) for k, column in enumerate(sums))
        for h in range(len(others))
        for c in range(low[h], high[h])
    ]
    return max(found, default=None)


@pytest.mark.parametrize("most", [3, 100, BIG])
@pytest.mark.parametrize("way", ["segments", "too many sets", "too many chains"])
def test_the_best_pair_is_that_of_all_pairs(monkeypatch, most, way):
    monkeypatch.setattr(pairs, "MOST_SETS", 0 if way == "too many sets" else 1000)
    monkeypatch.setattr(pairs, "MOST_CHAINS", 0 if way == "too many chains" else 62)
    rng = Random(7)
    for _ in range(300):
        case = random_case(rng, most=most, chains=rng.randint(1, 6))
        found, expected = best_pair(*case), naive(*case)
        assert (None if found is None else found.held) == expected
        if found is not None:
            sums, clocks, others, low, high = case
            assert low[found.other] <= found.first < high[found.other]
            reached = np.maximum(clocks[found.first], others[found.other])
            assert sum(int(column[n]) for column, n in zip(sums, reached, strict=True)) == expected


def test_only_chains_that_change_are_summed_anew():
    chains, events, rows, others = 70, 600, 30_000, 600
    rng = np.random.default_rng(5)
    sums = [np.arange(events + 1) * (-1 if k else 1) for k in range(chains)]
    clocks = np.sort(rng.integers(0, events + 1, (rows, chains)), axis=0)

    def seconds(implied):
        begin = process_time()
        assert best_pair(sums, clocks, implied, np.zeros(others, int), np.full(others, rows)) is not None
        return process_time() - begin

    on_all = np.repeat(np.arange(others)[:, None] * events // others, chains, axis=1)
    on_one = np.where(np.arange(chains) == 0, on_all, 0)
    of_all = min(seconds(on_all) for _ in range(3))
    assert min(seconds(on_one) for _ in range(3)) < 0.5 * of_all


def judged(schedule):
    plan = PlacedOps(schedule)
    return plan, causality.happens_before(plan)


def plain_clocks(events, clocks):
    """Of each event how many of every chain are among what comes before it, event by event."""
    found = np.zeros((len(clocks.position), len(clocks.number)), np.int64)
    before = list(zip(events.earlier.tolist(), events.later.tolist(), strict=True))
    before += [(event - 1, event) for event in range(len(found)) if clocks.position[event] > 1]
    found[range(len(found)), clocks.chain_of] = clocks.position
    known = None
    while known is None or not np.array_equal(known, found):
        known = found.copy()
        for earlier, later in before:
            found[later] = np.maximum(found[later], found[earlier])
    return found


@pytest.mark.parametrize("block", [1, 50, 1000])
def test_clocks_of_joins_in_blocks_are_those_of_all_events(monkeypatch, block):
    rng = Random(3)
    for seed in range(3):
        schedule = build(random_shape(rng, placements=[(0, 1, 0), (0, 1, 1, 0), (0, 1, 2)], microbatches=2), seed)
        plan, whole = judged(schedule)
        monkeypatch.setattr(causality, "BLOCK", block)
        _, parts = judged(schedule)
        monkeypatch.undo()
        plain = plain_clocks(whole.events, whole)
        events, chains = np.arange(len(whole.position)), range(len(whole.number))
        later, earlier = np.indices((len(events), len(events))).reshape(2, -1)
        implied = plain[later, whole.chain_of[earlier]] >= whole.position[earlier]
        for clocks in (whole, parts):
            assert np.array_equal(clocks.clocks([(events, chains)])[0], plain)
            assert np.array_equal(clocks.implied(later, earlier), implied)
        for device in range(len(schedule.devices)):
            worst = [memory.Memory(plan, clocks).worst_on_device(device).held for clocks in (whole, parts)]
            assert worst[0] == worst[1]


FACTOR = 2**61


def multiplied(record):
    """The record with all its bytes multiplied."""
    changes = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name.endswith("_bytes") and value is not None:
            changes[name] = [one * FACTOR for one in value] if isinstance(value, list) else value * FACTOR
    return msgspec.structs.replace(record, **changes)


def test_sums_beyond_64_bits_are_exact():
    schedule = build(Shape((0, 1, 0), microbatches=3, ranges=lambda stage, _: [("offload", 2 * stage, 2 * stage + 1)]))
    stages = [multiplied(stage) for stage in schedule.stages]
    larger = msgspec.structs.replace(schedule, stages=stages, setup=multiplied(schedule.setup))
    small, large = (memory.Memory(*judged(one)) for one in (schedule, larger))
    for device in range(2):
        assert large.worst_on_device(device).held == FACTOR * small.worst_on_device(device).held > 2**64
        assert large.worst_on_host(device).held == FACTOR * small.worst_on_host(device).held
