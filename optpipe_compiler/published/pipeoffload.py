"""PipeOffload (Wan et al., 2025, arXiv:2503.01328): generalised interleaved schedules with activations on the host.

The lowest stages of a device live longest, so the paper offloads those first, each entirely or not at all: all of them
(PO-F) where the link is fast enough, half of them (PO-H) or fewer where it is not. It pairs the devices behind one
switch, so that one sends while the other receives; in our model that is the two directions of a shared link.

`transfers` says when they travel, and which ones stay too shortly to be worth the trip. On a link that is too slow the
transfers delay the computation; the authors' generator refuses such a number of stages instead.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from optpipe_compiler.published.common import NotDefined, Order, Recipe, of_stages
from optpipe_compiler.published.gis import gis_h_uniform
from optpipe_compiler.published.recompute import lowest_stages

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.model.problem import Problem


def po_h(problem: Problem) -> Recipe:
    """Return uniform GIS-H with the lower half of each device's stages offloaded; of an odd number, the larger half."""
    return offloading("po-h", gis_h_uniform, (problem.per_device + 1) // 2)(problem)


def offloading(
    name: str, schedule: Callable[[Problem], Order], per_device: int | None = None, *, streaming: bool = False
) -> Callable[[Problem], Recipe]:
    """Return `schedule` with the lowest `per_device` stages of each device offloaded; None: all stages.

    `streaming`: as soon as they are computed, and reloaded just before their backward, as saved-tensor hooks do,
    however soon that is. Training frameworks have this as a switch: torchtune's OffloadActivations and
    TransformerEngine's CPU offloading copy on streams of their own, so that an offload overlaps what the device
    computes next, and a reload the backward before its own. A hook works tensor by tensor or layer by layer. Here a
    whole stage is copied at a time, so that a stage of several layers is not yet on its way while it is computed, and
    is back before the first of them is needed.
    """

    def offloaded(problem: Problem) -> Recipe:
        orders = schedule(problem)
        chosen = lowest_stages(problem, name, per_device)
        if not problem.freedom.offload:
            raise NotDefined(f"{name} offloads activations, which --no-offload forbids")
        for stage in chosen:
            if not problem.can_offload(stage):
                where = f"device {problem.stages[stage].device}"
                raise NotDefined(f"{name} offloads stage {stage}, but {where} has no host link or nothing to move")
        return Recipe(orders, of_stages(problem, chosen), streaming=streaming)

    return offloaded


streaming = partial(offloading, streaming=True)
