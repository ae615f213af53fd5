"""The machine that runs a pipeline in time and memory, compiled by numba; the only importer of it.

`state` holds the arrays, `memory` what ops and messages hold and whether a grant is safe, `dispatch` the event loop,
`policy` the few numbers that steer it and a local search over them, `orders` runs of given orders and times, `waits`
what an order must wait for; `compiled`, `inlined` and `views` say how numba compiles all of it.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from optpipe_compiler.errors import MissingDependency

if TYPE_CHECKING:
    from types import ModuleType

    from optpipe_compiler.machine import orders, policy, state, waits

__all__ = ["orders", "policy", "require", "state", "waits"]


def __getattr__(name: str) -> ModuleType:
    """Import a module of this room when it is first asked for: numba takes its time, and few commands need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def require() -> None:
    """Say why the machine cannot be imported; raises MissingDependency.

    To be asked before threads import it: of two that fail at once, one does not get the error that says why.
    """
    if find_spec("numba") is None:
        raise MissingDependency("planning needs numba: pip install numba")
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        raise MissingDependency("planning compiles with numba: NUMBA_DISABLE_JIT is set, expected not to be")
