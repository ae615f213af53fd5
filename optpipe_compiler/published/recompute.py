"""Activation checkpointing (Chen et al., 2016, arXiv:1604.06174) on top of an order.

A forward keeps nothing but its input, and right before its backward it is run again: as soon as the device is free. (In
frameworks a recomputation waits for the gradient, so that a step takes up to P - 1 of them longer than here.)
PipeOffload (arXiv:2503.01328) recomputes only some stages of a device, the lowest, which live longest.

Megatron-LM's `--recompute-granularity full --recompute-method uniform` recomputes all layers, `--recompute-method block
--recompute-num-layers N` the first N layers of every stage. Here a stage is recomputed as a whole or not at all: of
several stages on a device the lowest, which are as many layers, and those that live longest. What cannot be said: a
part of a stage's layers (so nothing selective with one stage per device), and kinds of tensors (Megatron's
`--recompute-granularity selective`, which recomputes the core attention or other modules within each layer); for these,
profile layers that recompute them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler.model.schedule import Ints, Kind
from optpipe_compiler.published.common import Bools, NotDefined, Order, of_stages

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.model.problem import Problem


def recomputing(
    name: str, schedule: Callable[[Problem], Order], per_device: int | None = None
) -> Callable[[Problem], Order]:
    """Return `schedule` with the lowest `per_device` stages of each device recomputed; None: all stages."""

    def recomputed(problem: Problem) -> Order:
        orders = schedule(problem)
        chosen = lowest_stages(problem, name, per_device)
        if not problem.freedom.recompute:
            raise NotDefined(f"{name} recomputes activations, which --no-recompute forbids")
        for stage in chosen:
            if not problem.can_recompute(stage):
                raise NotDefined(f"{name} recomputes stage {stage}, whose input is as large as all that it saves")
        which = of_stages(problem, chosen)
        return [again(order, which) for order in orders]

    return recomputed


def lowest_stages(problem: Problem, name: str, per_device: int | None) -> list[int]:
    """Return the lowest `per_device` stages of each device; refuse if that is all or more than there are."""
    if per_device is not None and per_device >= problem.per_device:
        raise NotDefined(f"{name} is defined for more than {per_device} stages per device, not {problem.per_device}")
    return [s for s, turn in enumerate(problem.turn_of) if per_device is None or turn < per_device]


def again(order: Ints, which: Bools) -> Ints:
    """Return the order with the activations of `which` [stage, microbatch] recomputed right before their backwards."""
    kind, stage, microbatch = order.T
    places = np.flatnonzero(np.isin(kind, (Kind.I, Kind.B)) & which[stage, microbatch])
    found = order[places]
    found[:, 0] = Kind.R
    return np.insert(order, places, found, axis=0)
