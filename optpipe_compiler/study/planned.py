"""One instance, planned until it is finished: what came out, or why nothing did. Picklable, for other processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from optpipe_compiler import cache, compiler
from optpipe_compiler.documents.files import said_by
from optpipe_compiler.documents.profile import value_of
from optpipe_compiler.documents.units import short_bytes
from optpipe_compiler.errors import BadInput, Infeasible, NotFound

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Profile

Outcome = Literal["optimal", "feasible", "infeasible", "not found", "beyond memory"]
"""`infeasible`: proven that nothing fits. `beyond memory`: not planned, the GPU has less memory than the cap."""

ROUNDS = 3
"""Searches of one instance at most, each of which starts from what the one before has found."""
STEP = 0.002
"""A plan is finished when the second half of a search has made it better by less than this share."""


@dataclass(frozen=True)
class Instance:
    """Costs and options; `gpu` is what the costs were estimated for, if they were."""

    profile: Profile
    options: compiler.Settled
    gpu: str | None = None
    cached: bool = False
    """Whether plans that were made before are used, and new ones kept."""


@dataclass(frozen=True)
class Planned:
    """The objective's value (None without a schedule) and its bound, in ns; `reason` says why there is none."""

    outcome: Outcome
    value_ns: int | None
    bound_ns: int
    method: str = ""
    peak_bytes: int | None = None
    reason: str = ""
    least_mem_bytes: int | None = None
    """Where nothing fits: a cap that would do, if it is known."""
    least_is_smallest: bool = False
    """Whether no smaller cap would do."""
    finished: bool = True
    """Whether more time for the search is unlikely to give much: see STEP."""
    schedule: ir.Checked | None = None
    further_ns: int = 0
    """What the further microbatches of the options take."""


def plan(instance: Instance) -> Planned:
    """Plan the instance until it is finished, each search within the time limit, or for ROUNDS of them.

    That nothing fits, or was found in time, is an answer too. Raises BadInput, and KeyboardInterrupt when interrupted.
    """
    memory, cap = instance.profile.machine.memory_bytes, instance.options.mem_bytes
    if instance.gpu is not None and memory is not None and value_of(memory) < cap:
        reason = f"{instance.gpu} has {short_bytes(value_of(memory))}, less than the cap of {short_bytes(cap)}"
        return Planned("beyond memory", None, 0, reason=reason)
    bound = compiler.lower_bound(instance.profile, instance.options).ns
    options = instance.options
    rounds = ROUNDS if options.time_limit_s and not options.reproducible else 1
    for number in range(rounds):
        try:
            found = _searched(replace(instance, options=options), bound)
        except Infeasible as error:
            return Planned(
                "infeasible",
                None,
                bound,
                reason=str(error),
                least_mem_bytes=error.least_mem_bytes,
                least_is_smallest=error.is_smallest,
            )
        except NotFound as error:
            return Planned("not found", None, bound, reason=str(error), finished=False)
        if found.finished or number == rounds - 1 or found.schedule is None:
            break
        options = replace(options, seeds=(found.schedule,), seed=options.seed + 1)
    return found


def _searched(instance: Instance, bound: int) -> Planned:
    """Return what one search finds."""
    halfway = cache.Halfway(instance.options.time_limit_s)
    kept = cache.users() if instance.cached else None
    result = cache.compile_schedule(instance.profile, instance.options, halfway.see, kept).uninterrupted()
    schedule, forecast = result.schedule, result.schedule.forecast
    return Planned(
        outcome=forecast.outcome,
        value_ns=forecast.value_ns,
        bound_ns=max(bound, forecast.lower_bound_ns),
        method=forecast.method,
        peak_bytes=max(device.peak_bytes for device in schedule.devices),
        finished=forecast.outcome == "optimal" or _is_near(forecast.value_ns, halfway.value_ns),
        schedule=result.checked,
        further_ns=result.further_ns,
    )


def _is_near(value_ns: int, halfway_ns: int | None) -> bool:
    return halfway_ns is not None and value_ns >= (1 - STEP) * halfway_ns


def options_of(schedule: ir.Schedule, name: str) -> compiler.Options:
    """Return the options that a schedule was compiled with, without its time limit; `name` stands for the file.

    Microbatches have the lengths and the number of slices of the schedule; `auto` slices where it was compiled so.
    Raises BadInput for what are none.
    """
    setup, recorded = schedule.setup, schedule.provenance.options
    kept = ("placement", "stages_per_device", "offload", "recompute", "split", "seed")
    options = {key: recorded[key] for key in kept if key in recorded} | {
        "mem_bytes": setup.cap_bytes,
        "microbatches": setup.microbatches,
        "devices": setup.devices,
        "host_mem_bytes": setup.host_cap_bytes,
        "objective": schedule.forecast.objective,
        "slices": "auto" if recorded.get("slices") == "auto" else setup.slices,
        "lengths": setup.lengths,
    }
    try:
        return msgspec.convert(options, compiler.Options)
    except msgspec.ValidationError as error:
        raise BadInput(f"{name}: $.provenance.options are none of `compile`: {said_by(error)}") from error
