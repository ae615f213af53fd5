"""The judge never raises: whatever a file holds, as long as it decodes, it gets its list of violations."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from small_schedules import build_with_profile, random_shape

from optpipe_compiler.documents import ir
from optpipe_compiler.verify import Violation, verify
from optpipe_compiler.view.violations import render

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Profile

NUMBERS = [0, 1, 2, 3, 7, 100, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 10**30]
KINDS = ["forward", "backward", "backward_input", "backward_weight", "recompute", "send_activation", "recv_gradient"]


def containers(value: Any) -> list[Any]:
    """Return every dict and list inside of `value`, itself included."""
    found, queue = [], [value]
    while queue:
        item = queue.pop()
        if isinstance(item, dict | list):
            found.append(item)
            queue += item.values() if isinstance(item, dict) else item
    return [item for item in found if item]


def disturb(rng: Random, plain: Any) -> None:
    """Change one thing anywhere: a value, an entry, or the order of two entries."""
    place = rng.choice(containers(plain))
    key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    old = place[key]
    if isinstance(place, list) and rng.random() < 0.6:
        other = rng.randrange(len(place))
        action = rng.choice(["drop", "twice", "swap"])
        if action == "drop":
            del place[key]
        elif action == "twice":
            place.insert(other, old)
        else:
            place[key], place[other] = place[other], old
    elif isinstance(old, bool) or old is None or isinstance(old, int | float):
        place[key] = rng.choice([rng.choice(NUMBERS), rng.randint(0, 5), None])
    elif isinstance(old, str):
        place[key] = rng.choice([*KINDS, "forward:0:0", "offload:0:0:0-1", "forward:0", "", "optimal", "span", "h2d"])
    elif isinstance(old, list):
        place[key] = rng.choice([[], old[:1], old + old])


def disturbed(record: Any, rng: Random, times: int) -> Any:
    """Return the record after `times` changes that each leave it decodable."""
    for _ in range(times):
        plain = msgspec.to_builtins(record)
        disturb(rng, plain)
        try:
            record = msgspec.convert(plain, type(record))
        except msgspec.ValidationError:
            continue
    return record


def judge(schedule: ir.Schedule, profile: Profile | None) -> list[Violation]:
    found = verify(ir.seal(schedule), profile)
    assert all(isinstance(violation, Violation) and violation.message for violation in found)
    console = Console(width=100, quiet=True)
    console.print(render(found, schedule))
    return found


@pytest.mark.parametrize("seed", range(150))
def test_a_disturbed_schedule_is_judged_and_never_raises(seed: int) -> None:
    rng = Random(seed)
    shape = random_shape(rng, placements=[(0, 1), (0, 1, 1, 0), (0, 1, 2)], microbatches=2)
    schedule, profile = build_with_profile(shape, seed)
    for _ in range(8):
        judge(disturbed(schedule, rng, rng.randint(1, 4)), rng.choice([None, profile]))


@pytest.mark.parametrize("seed", range(60))
def test_a_schedule_is_judged_next_to_any_profile(seed: int) -> None:
    rng = Random(seed)
    schedule, profile = build_with_profile(random_shape(rng, placements=[(0, 1)], microbatches=1), seed)
    for _ in range(8):
        judge(schedule, disturbed(profile, rng, rng.randint(1, 3)))


OPS = st.lists(
    st.builds(
        dict,
        op=st.sampled_from([*KINDS, "send_gradient", "recv_activation"]),
        stage=st.integers(0, 2),
        microbatch=st.integers(0, 1),
        peer=st.integers(0, 2),
        layers=st.tuples(st.integers(0, 4), st.integers(0, 4)),
        after=st.lists(st.sampled_from(["forward:0:0", "send_activation:0:0", "reload:0:0:0-1", "x"]), max_size=2),
    ),
    max_size=8,
)
COPIES = st.lists(
    st.builds(
        dict,
        stage=st.integers(0, 2),
        microbatch=st.integers(0, 1),
        layers=st.tuples(st.integers(0, 4), st.integers(0, 4)),
        after=st.lists(st.sampled_from(["forward:0:0", "offload:0:0:0-1"]), max_size=2),
    ),
    max_size=3,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ops=st.tuples(OPS, OPS), away=st.tuples(COPIES, COPIES), back=st.tuples(COPIES, COPIES))
def test_lanes_with_any_ops_are_judged_and_never_raise(ops: Any, away: Any, back: Any) -> None:
    schedule, _ = build_with_profile(random_shape(Random(0), placements=[(0, 1)], microbatches=2))
    plain = msgspec.to_builtins(schedule)
    for device, mine, out, home in zip(plain["devices"], ops, away, back, strict=True):
        device["compute"] = mine
        device["d2h"] = [{"op": "offload", **op} for op in out]
        device["h2d"] = [{"op": "reload", **op} for op in home]
    assert judge(msgspec.convert(plain, ir.Schedule), None)
