"""Every activation offloaded as soon as it is computed and reloaded just before its backward, as saved-tensor hooks do.

Training frameworks have this as a switch: torchtune's OffloadActivations and TransformerEngine's CPU offloading copy on
streams of their own, so that an offload overlaps what the device computes next, and a reload the backward before its
own. No activation is left out, however soon its backward is.

A hook works tensor by tensor or layer by layer. Here a whole stage is copied at a time, so that a stage of several
layers is not yet on its way while it is computed, and is back before the first of its layers is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.pipeoffload import offloading

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.model.problem import Problem
    from optpipe_compiler.published.common import Order, Recipe


def streaming(name: str, schedule: Callable[[Problem], Order]) -> Callable[[Problem], Recipe]:
    """Return `schedule` with every activation offloaded."""
    return offloading(name, schedule, streaming=True)
