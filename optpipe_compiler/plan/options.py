"""What a user may choose, and the defaults of what was not chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from optpipe_compiler.documents import ir  # noqa: TC001  (msgspec reads the types of Options)
from optpipe_compiler.documents.profile import Profile, value_of
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput
from optpipe_compiler.model.problem import LONGEST_NS
from optpipe_compiler.solver.worker import Limits

TIME_LIMITS = ((8, 60.0), (32, 180.0), (math.inf, 270.0))
"""Time limits in seconds up to so many devices."""


Placement = Literal["auto", "linear", "loop", "v"]
Objective = Literal["makespan", "span"]


@dataclass(frozen=True)
class Options:
    """Everything a user may choose; None stands for the default that `settled` fills in."""

    mem_bytes: int
    microbatches: int | None = None
    devices: int | None = None
    host_mem_bytes: int | None = None
    placement: Placement = "auto"
    stages_per_device: int | None = None
    objective: Objective = "makespan"
    offload: bool = True
    recompute: bool = True
    split: bool = True
    time_limit_s: float | None = None
    seed: int = 0
    reproducible: bool = False
    method: str | None = None
    """Emit this schedule of published.METHODS alone instead of searching."""
    search: bool = True
    """Whether to run the exact search after the heuristics."""
    workers: int = 0
    """Search threads; 0: one per core."""
    slices: int | Literal["auto"] = 1
    """Slices of every microbatch; auto: searched where all layers can run slice by slice, else 1."""
    lengths: tuple[int, ...] | None = None
    """Tokens of each microbatch; None: all are as long as the profile's."""
    units: ir.Units | None = None
    """Where an earlier schedule cuts microbatches, and how long they are; it stands for `slices` and `lengths`."""
    seeds: tuple[ir.Checked, ...] = ()
    """Earlier schedules; the result is no worse than one of them that still fits (plan/seeds.py)."""
    kept: tuple[ir.Checked, ...] = ()
    """More of them, that the user has not named: nothing is said of those that cannot be taken over."""
    noise: float | None = None
    """The standard deviation of an op's time as a share of it, for all ops; None: as the profile says."""
    further: int = 0
    """Microbatches of a longer step, which repeat the plan's steady state: the plan is one that is best for all."""
    keep: ir.Checked | None = None
    """The schedule whose cut and owners of stages are kept, so that no weight moves."""


@dataclass(frozen=True)
class Settled(Options):
    """Options with every default filled in."""

    microbatches: int = 0
    devices: int = 0
    time_limit_s: float = 0.0

    @property
    def limits(self) -> Limits:
        """How long and how to search."""
        return Limits(self.objective, self.time_limit_s, self.seed, self.workers, self.reproducible)


RECORDED = (
    *("mem_bytes", "host_mem_bytes", "microbatches", "devices", "placement", "stages_per_device", "objective"),
    *("offload", "recompute", "split", "time_limit_s", "seed", "reproducible", "method"),
)
"""Options that a file always tells."""
MOST = 10**12
"""Devices, microbatches and stages at most: far more than can be planned, of which bounds can still be told."""


def settled(profile: Profile, options: Options) -> Settled:
    """Return the options with every default filled in from the profile; raises BadInput for impossible ones."""
    for name in ("devices", "microbatches", "stages_per_device"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise BadInput(f"--{name.replace('_', '-')} is {number}, expected at least 1")
        if number is not None and number > MOST:
            raise BadInput(f"--{name.replace('_', '-')} is far too large, expected at most {MOST}")
    kept = None if options.keep is None else options.keep.schedule.setup
    devices = options.devices or (profile.machine.devices if kept is None else kept.devices)
    named = f"--devices is {devices}" if options.devices or kept else f"$.machine.devices is {devices}"
    layers = len(profile.expanded_layers())
    if kept is not None:
        _check_kept(kept, options, devices, layers)
    if (known := profile.machine.time_permille) is not None and devices > len(known):
        raise BadInput(f"{named}, expected at most the {len(known)} whose times the profile has")
    work = sum(value_of(one.forward_ns) + one.fused_ns for one in profile.expanded_layers())
    if (work := work * max([1000, *(known or ())]) // 1000) > LONGEST_NS:
        raise BadInput(f"a microbatch takes {work} ns on the slowest device, expected at most {LONGEST_NS}")
    if devices > layers:
        raise BadInput(f"{named}, expected at most the profile's {counted(layers, 'layer')}")
    for name, choices in (("placement", get_args(Placement)), ("objective", get_args(Objective))):
        if getattr(options, name) not in choices:
            raise BadInput(f"--{name} is {getattr(options, name)!r}, expected one of {', '.join(choices)}")
    if options.workers < 0:
        raise BadInput(f"workers is {options.workers}, expected at least 0, which stands for all cores")
    if options.noise is not None and not 0 <= options.noise <= 1:
        raise BadInput(f"--noise is {options.noise:g}, expected a share from 0 to 1")
    limit = options.time_limit_s
    if limit is not None and not 0 <= limit < float("inf"):
        raise BadInput(f"--time-limit is {limit}, expected seconds, at least 0")
    if (units := options.units) is not None:
        lengths = tuple(units.cuts[shape][-1] for shape in units.shape_of)
        options = replace(options, slices=units.slices, lengths=lengths)
    host = options.host_mem_bytes
    if host is None and profile.machine.host_memory_bytes is not None:
        host = value_of(profile.machine.host_memory_bytes)
    count = len(options.lengths) if options.lengths is not None else 4 * devices
    found = dict(
        devices=devices,
        microbatches=options.microbatches or count,
        placement="linear" if options.stages_per_device == 1 else options.placement,  # whichever way a pass goes round
        slices=1 if options.slices == "auto" and not _is_sliceable(profile) else options.slices,
        host_mem_bytes=host,
        time_limit_s=next(s for most, s in TIME_LIMITS if devices <= most) if limit is None else limit,
    )
    chosen = Settled(**vars(options) | found)
    _check_units(profile, chosen)
    return chosen


def _check_kept(kept: ir.Setup, options: Options, devices: int, layers: int) -> None:
    """Raise BadInput where the placement of a schedule cannot be kept."""
    for what, found, expected in (("devices", kept.devices, devices), ("layers", kept.layers, layers)):
        if found != expected:
            raise BadInput(f"--keep-placement names a schedule of {found} {what}, expected {expected}")
    if options.placement != "auto" or options.stages_per_device is not None:
        raise BadInput("--keep-placement says which stages there are, expected no --placement, no --stages-per-device")


def recorded(options: Options) -> dict[str, str | int | float | bool | None]:
    """Return the options that shaped the result, for the file's provenance."""
    return {
        **{name: getattr(options, name) for name in RECORDED},
        **({} if options.noise is None else {"noise": options.noise}),
        **({} if options.keep is None else {"keep_placement": options.keep.schedule.digest}),
        **({} if options.slices == 1 else {"slices": options.slices}),
    }


def _check_units(profile: Profile, options: Options) -> None:
    """Raise BadInput for slices or lengths that the profile does not allow, in one sentence."""
    lengths, number, tokens = options.lengths, options.slices, profile.tokens
    if options.units is not None and options.units.tokens != tokens:
        raise BadInput(f"the profile is for sequences of {tokens} tokens, expected {options.units.tokens}")
    if number != "auto" and (not isinstance(number, int) or number < 1):
        raise BadInput(f"--slices is {number!r}, expected at least 1, or auto")
    if lengths is not None:
        if tokens is None:
            raise BadInput("--lengths needs to know how long the profile's sequences are, expected $.sequence_length")
        if not lengths:
            raise BadInput("--lengths is empty, expected the tokens of each microbatch")
        if len(lengths) != options.microbatches:
            raise BadInput(f"--lengths has {len(lengths)} lengths, expected one for each of {options.microbatches}")
        if min(lengths) < 1:
            raise BadInput(f"--lengths has a length of {min(lengths)}, expected at least 1 token")
    if number == "auto" or number == 1:
        return
    unable = next((layer.name for layer in profile.layers if layer.slices is None), None)
    if unable is not None:
        raise BadInput(f"--slices is {number}, but layer {unable!r} cannot run slice by slice, expected 1")
    shortest = min(lengths or (tokens or 1,))
    if number > shortest:
        raise BadInput(f"--slices is {number}, expected at most the {shortest} tokens of a sequence")


def _is_sliceable(profile: Profile) -> bool:
    """Whether all layers can run slice by slice."""
    return profile.tokens is not None and all(layer.slices is not None for layer in profile.layers)
