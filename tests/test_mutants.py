"""The judge bites: schedules from the compiler are accepted, and every mutant of them is refused for the right reason.

Each mutation is re-sealed, so that the digest does not give it away, and must be refused by one of the rules that
it is about; that the forecast no longer fits the lanes is not reason enough where the contract is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from small_schedules import Shape, changed, profile_for, random_cuts

from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput, Infeasible
from optpipe_compiler.verify import verify

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Profile

SITES = 3
"""How many mutants of one kind are made of one schedule at most."""
ENOUGH = 40
"""Mutants of one kind after which no schedule gets another one."""

Plain = Any
"""The plain form of a schedule: dicts and lists."""


# --- schedules from the compiler


class Compiled(NamedTuple):
    """A schedule and the profile that it was compiled from."""

    name: str
    schedule: ir.Schedule
    profile: Profile


def uniform(devices: int, **fields: Any) -> Profile:
    options = {"boundary_fraction": 0.1, "static_gb": 0.2, "shared_links": "pairs", **fields}
    return uniform_profile(UniformOptions(devices=devices, layers_per_device=2, **options))


def uneven(devices: int, seed: int) -> Profile:
    return profile_for(Shape(placement=tuple(range(devices)) * 2), Random(seed), shared=bool(seed % 2))


def wanted() -> Iterator[tuple[str, Profile, Options]]:
    """Yield what to compile: equal and uneven layers, tight and loose caps, each placement, some with a search."""
    for devices in (2, 3, 4):
        for activations in (0.6, 0.9, 1.2, 1.6, 2.1, 3.0):
            for microbatches in (3, 5):
                options = Options(int((activations + 0.2) * 1e9), microbatches, time_limit_s=0.0)
                yield f"uniform {devices} {activations} {microbatches}", uniform(devices), options
    for share in (0.3, 1.0):
        for activations in (0.6, 1.2):
            profile = uniform(3, d2h_ms=0.3, h2d_ms=0.3, copy_share=share)
            yield f"copies {share} {activations}", profile, Options(int((activations + 0.2) * 1e9), 5, time_limit_s=0.0)
    for seed in range(20):
        devices = 2 + seed % 3
        profile = uneven(devices, seed)
        total = sum(one.saved_bytes + one.static_bytes for one in profile.layers)
        cap = int(total / devices * (0.8 + 0.15 * (seed % 8))) + 30
        options = Options(cap, 4, placement=("auto", "v", "loop")[seed % 3], time_limit_s=0.0)
        yield f"uneven {seed}", profile, options
    for seed in range(10):
        rng = Random(seed)
        shape = Shape(placement=tuple(range(2 + seed % 2)) * 2, **random_cuts(rng, 3))
        profile = profile_for(shape, rng, shared=bool(seed % 2))
        total = sum(one.saved_bytes + one.static_bytes for one in profile.layers)
        cap = int(total / shape.devices * (1 + 0.3 * (seed % 4))) + 60
        asked = {"slices": 2 + seed % 3, "lengths": (8, 12, 8) if seed % 4 == 3 else None}
        yield f"sliced {seed}", profile, Options(cap, 3, time_limit_s=0.02, reproducible=True, **asked)
    for seed in range(4):
        placement = "v" if seed % 2 else "linear"
        options = Options(
            int(1.45e9), 4, placement=placement, stages_per_device=1 + seed % 2, time_limit_s=0.5, seed=seed
        )
        yield f"searched {seed}", uniform(2 + seed % 3, p2p_ms=0.02 * seed, d2h_ms=0.5 + 0.2 * seed), options


@cache
def compiled() -> list[Compiled]:
    """Compile everything once; instances that no schedule fits are left out."""
    found = []
    for name, profile, options in wanted():
        try:
            found.append(Compiled(name, compile_schedule(profile, options).schedule, profile))
        except Infeasible:
            continue
    return found


# --- finding and changing ops in the plain form


class Site(NamedTuple):
    """An op in the plain form: its lane, a list, and its index there."""

    device: int
    lane_name: str
    lane: list[Plain]
    index: int

    @property
    def op(self) -> Plain:
        return self.lane[self.index]

    @property
    def id(self) -> str:
        return identity(self.op)


def identity(op: Plain) -> str:
    text = f"{op['op']}:{suffix_of(op)}"
    return text + (":{}-{}".format(*op["layers"]) if "layers" in op else "")


def suffix_of(op: Plain) -> str:
    """Stage and unit as they stand in ids."""
    return f"{op['stage']}:{op['microbatch']}" + (f".{op['slice']}" if "slice" in op else "")


def sites(plain: Plain, *kinds: str) -> list[Site]:
    """Return the sites of all ops of these kinds (of any kind when none is given)."""
    return [
        Site(number, lane, device[lane], index)
        for number, device in enumerate(plain["devices"])
        for lane in ("compute", "d2h", "h2d")
        for index, op in enumerate(device[lane])
        if not kinds or op["op"] in kinds
    ]


def by_id(plain: Plain) -> dict[str, Site]:
    return {site.id: site for site in sites(plain)}


def remove(plain: Plain, site: Site) -> None:
    """Take an op out with the waits on it and its times, so that only its absence is wrong."""
    name = site.id
    for times in plain["forecast"]["times"]:
        if (times["device"], times["lane"]) == (site.device, site.lane_name):
            del times["start_ns"][site.index], times["end_ns"][site.index]
    del site.lane[site.index]
    for other in sites(plain):
        other.op["after"] = [wait for wait in other.op.get("after", []) if wait != name]


def swap(first: Site, second: Site) -> None:
    first.lane[first.index], second.lane[second.index] = second.op, first.op


# --- mutations: each takes the plain form and a source of chance, and says whether it found a place


Mutation = Callable[[Plain, Random], bool]


class Kind(NamedTuple):
    """A mutation and the rules of which one must refuse it."""

    mutate: Mutation
    rules: frozenset[str]


KINDS: dict[str, Kind] = {}


def refused_by(*rules: str) -> Callable[[Mutation], Mutation]:
    def note(mutate: Mutation) -> Mutation:
        KINDS[mutate.__name__] = Kind(mutate, frozenset(rules))
        return mutate

    return note


def any_of(found: list[Site], rng: Random) -> Site | None:
    return rng.choice(found) if found else None


@refused_by("data", "deadlock")
def swap_two_ops_of_a_lane_of_which_one_reads_the_other(plain: Plain, rng: Random) -> bool:
    found, pairs = by_id(plain), []
    for site in found.values():
        suffix = suffix_of(site.op)
        sources = {
            "backward": ["forward"],
            "backward_input": ["forward"],
            "backward_weight": ["backward_input"],
            "recompute": ["forward"],
            "send_activation": ["forward"],
            "send_gradient": ["backward", "backward_input"],
        }.get(site.op["op"], [])
        pairs += [(found[f"{kind}:{suffix}"], site) for kind in sources if f"{kind}:{suffix}" in found]
    swap(*rng.choice(pairs))
    return True


@refused_by("data", "device-memory", "host-memory")
def drop_a_wait(plain: Plain, rng: Random) -> bool:
    site = any_of([site for site in sites(plain) if site.op.get("after")], rng)
    if site is None:
        return False
    site.op["after"] = [*site.op["after"]]
    site.op["after"].pop(rng.randrange(len(site.op["after"])))
    return True


def drop_one(plain: Plain, rng: Random, *kinds: str) -> bool:
    site = any_of(sites(plain, *kinds), rng)
    if site is not None:
        remove(plain, site)
    return site is not None


@refused_by("state")
def drop_a_reload(plain: Plain, rng: Random) -> bool:
    return drop_one(plain, rng, "reload")


@refused_by("state")
def drop_an_offload(plain: Plain, rng: Random) -> bool:
    return drop_one(plain, rng, "offload")


@refused_by("device-memory", "cost", "makespan", "bubble")
def drop_a_recompute(plain: Plain, rng: Random) -> bool:
    """The layers count as kept then: more memory, and a lane that is busy for less time than claimed."""
    return drop_one(plain, rng, "recompute")


@refused_by("completeness")
def drop_a_weight_gradient(plain: Plain, rng: Random) -> bool:
    return drop_one(plain, rng, "backward_weight")


@refused_by("completeness")
def drop_half_a_message(plain: Plain, rng: Random) -> bool:
    return drop_one(plain, rng, "send_activation", "recv_activation", "send_gradient", "recv_gradient")


@refused_by("completeness")
def drop_a_forward_or_backward(plain: Plain, rng: Random) -> bool:
    return drop_one(plain, rng, "forward", "backward", "backward_input")


@refused_by("caps")
def shrink_the_cap(plain: Plain, rng: Random) -> bool:
    peak = max(device["peak_bytes"] for device in plain["devices"])
    plain["setup"]["cap_bytes"] = peak - rng.choice([1, 1 + peak // 10])
    return True


@refused_by("device-memory")
def shrink_a_promised_peak(plain: Plain, rng: Random) -> bool:
    device = rng.choice(plain["devices"])
    device["peak_bytes"] -= rng.choice([1, 1 + device["peak_bytes"] // 10])
    return True


@refused_by("host-memory")
def shrink_a_promise_to_the_host(plain: Plain, rng: Random) -> bool:
    devices = [device for device in plain["devices"] if device["host_bytes"]]
    if devices:
        rng.choice(devices)["host_bytes"] -= 1
    return bool(devices)


@refused_by("completeness", "wait")
def move_an_op_to_another_device(plain: Plain, rng: Random) -> bool:
    site = any_of(sites(plain), rng)
    assert site is not None
    there = plain["devices"][(site.device + rng.randrange(1, len(plain["devices"]))) % len(plain["devices"])]
    lane = there[site.lane_name]
    lane.insert(rng.randint(0, len(lane)), site.lane.pop(site.index))
    return True


@refused_by("completeness")
def duplicate_an_op(plain: Plain, rng: Random) -> bool:
    site = any_of(sites(plain), rng)
    assert site is not None
    site.lane.insert(rng.randint(0, len(site.lane)), dict(site.op))
    return True


@refused_by("state", "wait")
def change_a_layer_range(plain: Plain, rng: Random) -> bool:
    site = any_of(sites(plain, "offload", "reload", "recompute"), rng)
    if site is None:
        return False
    (first, end), ends = site.op["layers"], plain["stages"][site.op["stage"]]["layers"]
    beyond = rng.choice([(first, ends[1] + 1), (first, first), (end, first)])
    within = [(first, end - 1), (first + 1, end)] if site.op["op"] != "recompute" else []
    site.op["layers"] = rng.choice([beyond, *within])
    return True


@refused_by("pair-order")
def swap_two_messages_on_one_side_of_a_pair(plain: Plain, rng: Random) -> bool:
    halves = sites(plain, "send_activation", "recv_activation", "send_gradient", "recv_gradient")
    first = any_of(halves, rng)
    if first is None:
        return False
    same = [
        s for s in halves if (s.device, s.op["peer"]) == (first.device, first.op["peer"]) and s.index != first.index
    ]
    second = any_of(same, rng)
    if second is not None:
        swap(first, second)
    return second is not None


@refused_by("peer")
def retarget_a_peer(plain: Plain, rng: Random) -> bool:
    site = any_of(sites(plain, "send_activation", "recv_activation", "send_gradient", "recv_gradient"), rng)
    if site is None:
        return False
    others = {*range(len(plain["devices"]) + 1)} - {site.op["peer"]}
    site.op["peer"] = rng.choice(sorted(others))
    return True


@refused_by("order")
def swap_two_microbatches_of_one_stage_and_kind(plain: Plain, rng: Random) -> bool:
    first = any_of(sites(plain), rng)
    assert first is not None
    key = (first.op["op"], first.op["stage"])
    same = [s for s in sites(plain, key[0]) if s.op["stage"] == key[1] and s.op["microbatch"] != first.op["microbatch"]]
    if not same:  # one microbatch alone is recomputed there
        return False
    swap(first, rng.choice(same))
    return True


@refused_by("order")
def swap_two_slices_of_one_microbatch(plain: Plain, rng: Random) -> bool:
    first = any_of([site for site in sites(plain) if "slice" in site.op], rng)
    if first is None:
        return False
    key = ("op", "stage", "microbatch")
    same = [s for s in sites(plain, first.op["op"]) if all(s.op[name] == first.op[name] for name in key)]
    same = [s for s in same if s.op["slice"] != first.op["slice"]]
    if same:
        swap(first, rng.choice(same))
    return bool(same)


@refused_by("data", "order")
def run_a_backward_before_that_of_a_later_slice(plain: Plain, rng: Random) -> bool:
    """Its carry would be gone, and the gradients that add up would not be complete."""
    found = by_id(plain)
    pairs = [
        (site, found[later])
        for site in found.values()
        if site.op["op"] in ("backward", "backward_input") and "slice" in site.op
        for kind in ("backward", "backward_input")
        if (later := f"{kind}:{site.op['stage']}:{site.op['microbatch']}.{site.op['slice'] + 1}") in found
    ]
    if not pairs:
        return False
    early, late = rng.choice(pairs)
    early.lane.insert(late.index, early.lane.pop(early.index))
    return True


@refused_by("data", "order", "deadlock")
def run_a_forward_before_that_of_an_earlier_slice(plain: Plain, rng: Random) -> bool:
    found = by_id(plain)
    pairs = [
        (site, found[earlier])
        for site in found.values()
        if site.op["op"] == "forward" and site.op.get("slice")
        if (earlier := f"forward:{site.op['stage']}:{site.op['microbatch']}.{site.op['slice'] - 1}") in found
    ]
    if not pairs:
        return False
    late, early = rng.choice(pairs)
    late.lane.insert(early.index, late.lane.pop(late.index))
    return True


@refused_by("completeness")
def name_a_slice_that_is_not_there(plain: Plain, rng: Random) -> bool:
    site = any_of([site for site in sites(plain, "forward", "backward", "send_gradient") if "slice" in site.op], rng)
    if site is not None:
        site.op["slice"] += 10
    return site is not None


@refused_by("profile-bytes")
def understate_what_slices_carry(plain: Plain, rng: Random) -> bool:
    found = [
        (stage["carry"], n) for stage in plain["stages"] if "carry" in stage for n in range(len(stage["saved_bytes"]))
    ]
    found = [(carry[field], n) for carry, n in found for field in ("bytes", "gradient_bytes") if carry[field][n]]
    if found:
        figures, number = rng.choice(found)
        figures[number] -= 1
    return bool(found)


@refused_by("profile-bytes")
def understate_what_does_not_shrink_with_a_slice(plain: Plain, rng: Random) -> bool:
    lists = [figures for stage in plain["stages"] for figures in stage.get("fixed", {}).values()]
    found = [(figures, n) for figures in lists for n, figure in enumerate(figures) if figure]
    if found:
        figures, number = rng.choice(found)
        figures[number] -= 1
    return bool(found)


@refused_by("cost", "profile-times", "device-memory", "host-memory", "units")
def move_a_cut(plain: Plain, rng: Random) -> bool:
    units = plain["setup"].get("units")
    if units is None or len(units["cuts"][0]) < 3:
        return False
    row = rng.choice(units["cuts"])
    row[rng.randrange(1, len(row) - 1)] += rng.choice([-1, 1])
    return True


@refused_by("deadlock", "pair-order")
def issue_a_receive_after_its_reader(plain: Plain, rng: Random) -> bool:
    site = any_of(sites(plain, "recv_activation", "recv_gradient"), rng)
    if site is None:
        return False
    kinds = ["forward"] if site.op["op"] == "recv_activation" else ["backward", "backward_input"]
    suffix = suffix_of(site.op)
    reader = next(by_id(plain)[f"{kind}:{suffix}"] for kind in kinds if f"{kind}:{suffix}" in by_id(plain))
    site.lane.insert(reader.index, site.lane.pop(site.index))
    return True


@refused_by("deadlock")
def wait_for_a_later_op_of_the_lane(plain: Plain, rng: Random) -> bool:
    late = any_of([site for site in sites(plain) if site.index], rng)
    assert late is not None
    early = late.lane[rng.randrange(late.index)]
    early["after"] = [*early.get("after", []), late.id]
    return True


def stated(plain: Plain, rng: Random) -> tuple[Plain, Plain] | None:
    """Draw a device and one of its statements of deliveries."""
    found = [(device, entry) for device in plain["devices"] for entry in device["deliveries"]]
    return rng.choice(found) if found else None


@refused_by("deliveries")
def forget_a_delivery(plain: Plain, rng: Random) -> bool:
    found = stated(plain, rng)
    if found is not None:
        found[1]["sends"].pop()
    return found is not None


@refused_by("deliveries")
def state_a_delivery_for_another_op(plain: Plain, rng: Random) -> bool:
    found = stated(plain, rng)
    if found is None:
        return False
    device, entry = found
    others = [op for lane in ("compute", "d2h", "h2d") for op in map(identity, device[lane]) if op != entry["before"]]
    device["deliveries"].append({"before": rng.choice(others), "sends": [entry["sends"].pop()]})
    return True


@refused_by("deliveries")
def state_a_delivery_twice_or_of_what_is_no_send(plain: Plain, rng: Random) -> bool:
    found = stated(plain, rng)
    if found is not None:
        device, entry = found
        entry["sends"].append(
            rng.choice([entry["sends"][0], entry["before"], identity(device["compute"][0]), "send:9:9"])
        )
    return found is not None


@refused_by("completeness")
def put_a_stage_on_another_device(plain: Plain, rng: Random) -> bool:
    stage = rng.choice(plain["stages"])
    stage["device"] = (stage["device"] + 1) % len(plain["devices"])
    return True


@refused_by("completeness")
def fuse_a_backward_but_keep_its_weight_gradient(plain: Plain, rng: Random) -> bool:
    site = any_of(sites(plain, "backward_input"), rng)
    if site is not None:
        site.op["op"] = "backward"
    return site is not None


@refused_by("profile-bytes")
def understate_what_a_layer_saves(plain: Plain, rng: Random) -> bool:
    """Only the profile can tell; it also hides what the layer needs between the two halves."""
    found = [(stage, layer) for stage in plain["stages"] for layer, saved in enumerate(stage["saved_bytes"]) if saved]
    stage, layer = rng.choice(found)
    for name in ("saved_bytes", "residue_bytes", "captured_bytes", "checkpoint_bytes"):
        stage[name][layer] = 0
    if "carry" in stage:  # which is a part of what is saved
        stage["carry"]["bytes"][layer] = 0
    return True


@refused_by("makespan")
def lie_about_the_makespan(plain: Plain, rng: Random) -> bool:
    plain["forecast"]["makespan_ns"] += rng.choice([-1, 1, 1000])
    return True


@refused_by("makespan")
def lie_about_the_span(plain: Plain, rng: Random) -> bool:
    plain["forecast"]["span_ns"] += rng.choice([-1, 1, 1000])
    return True


@refused_by("bubble")
def lie_about_the_bubble(plain: Plain, rng: Random) -> bool:
    plain["forecast"]["bubble_fraction"] += rng.choice([-0.1, -1e-8, 1e-8, 0.1])
    return True


@refused_by("bound")
def lie_about_the_bound(plain: Plain, rng: Random) -> bool:
    value = plain["forecast"][plain["forecast"]["objective"] + "_ns"]
    optimal = plain["forecast"]["lower_bound_ns"] == value
    lies = [{"lower_bound_ns": value + 1}, {"outcome": "feasible" if optimal else "optimal"}]
    plain["forecast"].update(rng.choice(lies))
    return True


@refused_by("cost", "times")
def stretch_the_forecast_of_an_op(plain: Plain, rng: Random) -> bool:
    times = rng.choice([times for times in plain["forecast"]["times"] if times["end_ns"]])
    times["end_ns"][rng.randrange(len(times["end_ns"]))] += 1
    return True


@refused_by("times")
def leave_out_what_copies_take_from_compute(plain: Plain, rng: Random) -> bool:
    """The plan is of a profile in which copies take less than this, so that some op starts too early."""
    before = sum(link.get("compute_permille", 0) for link in plain["forecast"]["links"])
    for link in plain["forecast"]["links"]:
        link["compute_permille"] = 1000
    return before == 0 and has_copies_between_ops(plain)


def has_copies_between_ops(plain: Plain) -> bool:
    """Whether some forward that is offloaded ends when the next op of its lane begins."""
    for device in plain["devices"]:
        away = {(op["stage"], op["microbatch"], op.get("slice")) for op in device["d2h"]}
        for times in plain["forecast"]["times"]:
            if (times["device"], times["lane"]) == (device["device"], "compute"):
                rows = zip(device["compute"], times["start_ns"], times["end_ns"], strict=True)
                ops = [row for row in rows if "peer" not in row[0]]
                for (op, _, end), (_, start, _) in pairwise(ops):
                    is_away = (op["stage"], op["microbatch"], op.get("slice")) in away
                    if op["op"] == "forward" and is_away and start == end:
                        return True
    return False


@refused_by("times", "link")
def start_everything_of_a_device_earlier(plain: Plain, rng: Random) -> bool:
    """Every op keeps its length and its distance to the others of its device, but not to those of other devices."""
    device = rng.randrange(len(plain["devices"]))
    mine = [times for times in plain["forecast"]["times"] if times["device"] == device and times["start_ns"]]
    room = min(times["start_ns"][0] for times in mine)
    for times in mine:
        for key in ("start_ns", "end_ns"):
            times[key] = [time - room for time in times[key]]
    return room > 0


# --- the tests


def test_the_compiler_made_at_least_fifty_schedules_with_every_state_and_none_is_refused() -> None:
    states = Counter(site.op["op"] for one in compiled() for site in sites(msgspec.to_builtins(one.schedule)))
    assert {one.name: verify(one.schedule, one.profile) for one in compiled()} == {one.name: [] for one in compiled()}
    assert len(compiled()) >= 50
    assert min(states[kind] for kind in ("offload", "reload", "recompute", "backward", "backward_weight")) >= 20


@pytest.mark.parametrize("kind", KINDS)
def test_every_mutant_of_a_compiled_schedule_is_refused(kind: str) -> None:
    applied, survivors = 0, []
    for attempt in range(SITES):
        for number, one in enumerate(compiled() if applied < ENOUGH else []):
            done: list[bool] = []
            rng = Random(f"{kind} {number} {attempt}")
            mutant = changed(
                one.schedule, lambda plain, rng=rng, done=done: done.append(KINDS[kind].mutate(plain, rng))
            )
            if done[0] and mutant != one.schedule:
                applied += 1
                if not KINDS[kind].rules & {violation.rule for violation in verify(mutant, one.profile)}:
                    survivors.append((one.name, attempt))
    assert survivors == []
    assert applied >= 20


def test_every_file_that_was_cut_short_is_refused_by_parse() -> None:
    for number, one in enumerate(compiled()):
        text = ir.to_text(one.schedule)
        assert ir.parse(text, "schedule.json") == one.schedule
        for attempt in range(SITES):
            with pytest.raises(BadInput, match=r"schedule\.json"):
                ir.parse(text[: Random(f"{number} {attempt}").randrange(len(text.rstrip()))], "schedule.json")
