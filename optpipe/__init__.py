"""OptPipe from Python: profiles in, verified schedules out, with a proven bound and baselines on the same costs.

    import optpipe

    profile = optpipe.uniform_profile(devices=4, activation_gb=2.0)
    plan = optpipe.compile(profile, mem="5GB", microbatches=16, time_limit=10)
    plan                        # in a notebook: the chart
    plan.makespan_ns, plan.lower_bound_ns, plan.peak_bytes
    pandas.DataFrame(plan.ops())
    plan.save("schedule.json")

Everything runs without torch but `estimate_profile`. Modules are loaded when they are first needed. Errors that a user
can cause are `OptPipeError`s, whose text is one sentence.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe.answers import Comparison, Explanation
    from optpipe.own import primus_order, schedule
    from optpipe.plans import BaselineRow, BoundRow, DeviceRow, OpRow, Plan, bounds, compile, read_schedule, verify
    from optpipe.profiles import estimate_profile, profile_from_run, read_profile, uniform_profile, write_profile
    from optpipe.sweeps import PointRow, Sweep, sweep
    from optpipe_compiler.compiler import Progress
    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.errors import BadInput, Infeasible, MissingDependency, NotFound, OptPipeError, Rejected
    from optpipe_compiler.model.problem import Problem
    from optpipe_compiler.published.common import NotDefined
    from optpipe_compiler.verify import Violation

__all__ = [
    "BadInput",
    "BaselineRow",
    "BoundRow",
    "Comparison",
    "DeviceRow",
    "Explanation",
    "Infeasible",
    "MissingDependency",
    "NotDefined",
    "NotFound",
    "OpRow",
    "OptPipeError",
    "Plan",
    "PointRow",
    "Problem",
    "Profile",
    "Progress",
    "Rejected",
    "Sweep",
    "Violation",
    "bounds",
    "compile",
    "estimate_profile",
    "primus_order",
    "profile_from_run",
    "read_profile",
    "read_schedule",
    "schedule",
    "sweep",
    "uniform_profile",
    "verify",
    "write_profile",
]

_HOMES = {
    "optpipe.answers": ("Comparison", "Explanation"),
    "optpipe.own": ("primus_order", "schedule"),
    "optpipe.plans": (
        "BaselineRow",
        "BoundRow",
        "DeviceRow",
        "OpRow",
        "Plan",
        "bounds",
        "compile",
        "read_schedule",
        "verify",
    ),
    "optpipe.profiles": (
        "estimate_profile",
        "profile_from_run",
        "read_profile",
        "uniform_profile",
        "write_profile",
    ),
    "optpipe.sweeps": ("PointRow", "Sweep", "sweep"),
    "optpipe_compiler.compiler": ("Progress",),
    "optpipe_compiler.documents.profile": ("Profile",),
    "optpipe_compiler.errors": (
        "BadInput",
        "Infeasible",
        "MissingDependency",
        "NotFound",
        "OptPipeError",
        "Rejected",
    ),
    "optpipe_compiler.model.problem": ("Problem",),
    "optpipe_compiler.published.common": ("NotDefined",),
    "optpipe_compiler.verify": ("Violation",),
}


def __getattr__(name: str) -> Any:
    """Load what is asked for, once."""
    for module, names in _HOMES.items():
        if name in names:
            found = getattr(import_module(module), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'optpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
