"""One instance, planned: what came out, or why nothing did. Picklable, so that other processes can plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from optpipe_compiler import compiler
from optpipe_compiler.documents.profile import value_of
from optpipe_compiler.documents.units import short_bytes
from optpipe_compiler.errors import Infeasible, NotFound

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Profile

Outcome = Literal["optimal", "feasible", "infeasible", "not found", "beyond memory"]
"""`infeasible`: proven that nothing fits. `beyond memory`: not planned, the GPU has less memory than the cap."""


@dataclass(frozen=True)
class Instance:
    """Costs and options; `gpu` is what the costs were estimated for, if they were."""

    profile: Profile
    options: compiler.Options
    gpu: str | None = None


@dataclass(frozen=True)
class Planned:
    """The objective's value (None without a schedule) and its bound, in ns; `reason` says why there is none."""

    outcome: Outcome
    value_ns: int | None
    bound_ns: int
    method: str = ""
    peak_bytes: int | None = None
    reason: str = ""


def plan(instance: Instance) -> Planned:
    """Plan the instance; that nothing fits, or was found in time, is an answer too. Raises BadInput."""
    memory, cap = instance.profile.machine.memory_bytes, instance.options.mem_bytes
    if instance.gpu is not None and memory is not None and value_of(memory) < cap:
        reason = f"{instance.gpu} has {short_bytes(value_of(memory))}, less than the cap of {short_bytes(cap)}"
        return Planned("beyond memory", None, 0, reason=reason)
    bound, _ = compiler.lower_bound(instance.profile, instance.options)
    try:
        schedule = compiler.compile_schedule(instance.profile, instance.options).schedule
    except Infeasible as error:
        return Planned("infeasible", None, bound, reason=str(error))
    except NotFound as error:
        return Planned("not found", None, bound, reason=str(error))
    forecast = schedule.forecast
    return Planned(
        outcome=forecast.outcome,
        value_ns=forecast.makespan_ns if forecast.objective == "makespan" else forecast.span_ns,
        bound_ns=max(bound, forecast.lower_bound_ns),
        method=forecast.method,
        peak_bytes=max(device.peak_bytes for device in schedule.devices),
    )
