"""A grid of GPUs, devices, microbatches and caps, planned in parallel; the file holds what is done and is continued."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Literal

import msgspec

from optpipe_compiler import compiler
from optpipe_compiler.documents.files import Record, canonical, decode, read_text, write_atomically
from optpipe_compiler.documents.units import parse_cap, show_slicing
from optpipe_compiler.errors import BadInput
from optpipe_compiler.study.frontier import Point, frontier
from optpipe_compiler.study.planned import Instance, plan
from optpipe_compiler.study.pool import answers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from optpipe_compiler.compiler import Options
    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.study.planned import Planned
    from optpipe_compiler.study.pool import Pool

FORMAT = "optpipe-sweep"
VERSION = 1
REVISION = 4
"""1: GPUs. 2: whether a point is finished. 3: slices, and lengths of microbatches. 4: the least memory that
would do."""

BEFORE = {"slices": 1, "lengths": None, "noise": None}
"""What files of earlier revisions were planned with and do not say."""

Scalar = str | int | float | bool | None


class Sweep(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A whole sweep.json: whose points these are, and the points that are done."""

    format: Literal["optpipe-sweep"] = "optpipe-sweep"
    version: int = VERSION
    revision: int = REVISION
    profile: str
    """The profile's name; the model's where its costs are estimated."""
    profile_digest: str | None
    gpu_profile_digests: dict[str, str] = msgspec.field(default_factory=dict)
    """Of the estimated profile of each GPU; where there are any, `profile_digest` is None."""
    options: dict[str, Scalar]
    """What all points have in common."""
    tokens_per_microbatch: int | None
    """On the average, where microbatches are of unequal length."""
    points: list[Point]

    @property
    def slicing(self) -> str | None:
        """In words how all plans cut microbatches, and how long these are; None where neither was said."""
        slices, lengths = self.options.get("slices"), self.options.get("lengths")
        each = tuple(map(int, lengths.split(","))) if isinstance(lengths, str) else None
        return show_slicing(slices if isinstance(slices, int | str) else 1, each)


@dataclass(frozen=True)
class SweptCosts:
    """What is swept over: one profile, or one per GPU, estimated from the same `options`."""

    name: str
    profiles: Mapping[str | None, Profile]
    """By GPU; None: a profile that was not estimated here."""
    tokens_per_microbatch: int | None
    options: dict[str, Scalar] = field(default_factory=dict)

    tokens: int | None = None
    """Of a sequence; None where nobody knows."""

    def tokens_of(self, lengths: tuple[int, ...] | None) -> int | None:
        """Return the tokens of a microbatch, on the average where they are of unequal length."""
        if lengths is None or self.tokens_per_microbatch is None or self.tokens is None:
            return self.tokens_per_microbatch
        return round(self.tokens_per_microbatch / self.tokens * sum(lengths) / len(lengths))

    @staticmethod
    def of(profile: Profile) -> SweptCosts:
        """Return the costs of one profile."""
        model = profile.model
        tokens = None if model is None else model.microbatch_size * model.sequence_length
        return SweptCosts(profile.name, {None: profile}, tokens, tokens=profile.tokens)


@dataclass(frozen=True)
class Grid:
    """What varies; None of devices and microbatches is the default of `compile`."""

    mem_bytes: tuple[int, ...]
    microbatches: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()


def parse_caps(text: str, option: str) -> tuple[int, ...]:
    """Read caps: `10GB:80GB:8` (from, to, how many, evenly spaced) or `10GB,20GB,40GB`."""
    if ":" not in text:
        return tuple(sorted({parse_cap(part, option) for part in text.split(",")}))
    parts = text.split(":")
    count = int(parts[2]) if len(parts) == 3 and parts[2].strip().isdecimal() and len(parts[2]) <= 9 else 0
    if not 2 <= count <= 1000:
        raise BadInput(f"{option} is {text!r}, expected FROM:TO:COUNT with a count of 2 to 1000, such as 10GB:80GB:8")
    low, high = parse_cap(parts[0], option), parse_cap(parts[1], option)
    if low >= high:
        raise BadInput(f"{option} is {text!r}, expected FROM to be less than TO")
    return tuple(sorted({low + (high - low) * step // (count - 1) for step in range(count)}))


def parse_counts(text: str | None, option: str) -> tuple[int, ...]:
    """Read positive numbers separated by commas; none for no text."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= 9 and int(part) >= 1 for part in parts):
        raise BadInput(f"{option} is {text!r}, expected numbers of at least 1, such as 4,8")
    return tuple(sorted(set(map(int, parts))))


def begin(path: Path | None, costs: SweptCosts, common: Options) -> Sweep:
    """Return what is in the file, or an empty sweep; raise BadInput where the file is of other costs or options."""
    varies = (
        *("mem_bytes", "microbatches", "devices", "further", "workers", "seeds", "kept", "keep"),
        *("units", "lengths"),
    )
    digests = {gpu: profile.digest() for gpu, profile in costs.profiles.items()}
    lengths = None if common.lengths is None else ",".join(map(str, common.lengths))
    fixed = {name: value for name, value in asdict(common).items() if name not in varies} | {"lengths": lengths}
    empty = Sweep(
        profile=costs.name,
        profile_digest=digests.get(None),
        gpu_profile_digests={gpu: digest for gpu, digest in digests.items() if gpu is not None},
        options=fixed | costs.options,
        tokens_per_microbatch=costs.tokens_of(common.lengths),
        points=[],
    )
    if path is None or not path.is_file():
        return empty
    found = decode(read_text(path), Sweep, str(path), format=FORMAT, version=VERSION, revision=REVISION)
    again = "name another file with -o, or delete this one"
    if (found.profile_digest is None) != (empty.profile_digest is None):
        raise BadInput(f"{path}: is of {_origin(found)}, expected one of {_origin(empty)}; {again}")
    for name, value in empty.options.items():
        before = found.options.get(name, BEFORE.get(name))
        if before != value:
            raise BadInput(f"{path}: $.options.{name} is {before!r}, expected {value!r}; {again}")
    known = _digests(found)
    for where, digest in _digests(empty).items():
        if known.get(where, digest) != digest:
            raise BadInput(
                f"{path}: $.{where} is {known[where][:15]}.. ({found.profile}), expected that of "
                f"{empty.profile}, {digest[:15]}..; {again}"
            )
    all_gpus = found.gpu_profile_digests | empty.gpu_profile_digests
    return msgspec.structs.replace(found, revision=REVISION, gpu_profile_digests=all_gpus)


def _origin(sweep: Sweep) -> str:
    return f"{sweep.profile} on GPUs" if sweep.profile_digest is None else f"the profile {sweep.profile}"


def _digests(sweep: Sweep) -> dict[str, str]:
    """Return the digests by where they are in the file."""
    if sweep.profile_digest is not None:
        return {"profile_digest": sweep.profile_digest}
    return {f"gpu_profile_digests.{gpu}": digest for gpu, digest in sweep.gpu_profile_digests.items()}


def instances(costs: SweptCosts, common: Options, grid: Grid, *, cached: bool = False) -> list[Instance]:
    """Return those of the grid; raise BadInput for impossible ones."""
    found = []
    for gpu, profile in costs.profiles.items():
        for devices in grid.devices or (profile.machine.devices,):
            usual = 4 * devices if common.lengths is None else len(common.lengths)
            for microbatches, cap in product(grid.microbatches or (usual,), grid.mem_bytes):
                asked = devices if grid.devices else None
                options = replace(common, devices=asked, microbatches=microbatches, mem_bytes=cap, workers=1)
                found.append(Instance(profile, compiler.settled(profile, options), gpu, cached))
    return found


def missing(sweep: Sweep, asked: list[Instance]) -> list[Instance]:
    """Return the instances that the sweep has no point for."""
    done = {_place(point) for point in sweep.points}
    return [one for one in asked if (*_line(one), one.options.mem_bytes) not in done]


def run(
    path: Path | None, sweep: Sweep, instances: list[Instance], jobs: int, pool: Pool | None = None
) -> Iterator[tuple[Point, Sweep]]:
    """Plan the instances; yield each new point and the sweep with it, which the file, if any, then holds.

    Each starts from the best schedule that was found by then for a smaller cap of the same line.
    """
    best: dict[tuple[object, ...], list[Planned]] = {}
    for instance, planned in (pool or answers)(plan, _seeded(instances, best), jobs):
        best.setdefault(_line(instance), []).append(planned)
        new = _point(instance, planned)
        points = frontier([*sweep.points, new], carries_bounds=instance.options.slices != "auto")
        sweep = msgspec.structs.replace(sweep, points=points)
        if path is not None:
            write_atomically(path, canonical(sweep))
        yield next(point for point in points if _place(point) == _place(new)), sweep


def _seeded(instances: list[Instance], best: Mapping[tuple[object, ...], list[Planned]]) -> Iterator[Instance]:
    """Yield each instance, when it is asked for, with the best schedule so far that fits it."""
    for instance in instances:
        known = [one for one in best.get(_line(instance), ()) if (one.peak_bytes or 0) <= instance.options.mem_bytes]
        fitting = sorted((one for one in known if one.schedule is not None), key=lambda one: one.value_ns or 0)
        seeds = tuple(one.schedule for one in fitting[:1] if one.schedule is not None)
        yield replace(instance, options=replace(instance.options, seeds=seeds))


def _line(instance: Instance) -> tuple[object, ...]:
    return instance.gpu, instance.options.devices, instance.options.microbatches


def _place(point: Point) -> tuple[str | None, int, int, int]:
    return *point.line, point.mem_bytes


def _point(instance: Instance, planned: Planned) -> Point:
    options = instance.options
    return Point(
        gpu=instance.gpu,
        devices=options.devices,
        microbatches=options.microbatches,
        mem_bytes=options.mem_bytes,
        outcome=planned.outcome,
        makespan_ns=planned.value_ns,
        lower_bound_ns=planned.bound_ns,
        peak_bytes=planned.peak_bytes,
        method=planned.method,
        reason=planned.reason,
        least_mem_bytes=planned.least_mem_bytes,
        least_is_smallest=planned.least_is_smallest,
        finished=planned.finished,
        slices=None if planned.schedule is None else planned.schedule.schedule.setup.slices,
    )
