"""How steady samples are, and measuring again where they are not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from optpipe_compiler.costs.fit import quartiles
from optpipe_compiler.costs.noise import BOUND

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe_torch.profiler.records import Samples

MOST = 3
"""So often something is measured at most."""
ENOUGH = 16
"""Samples from which noise is a reason to measure again: who asks for fewer wants a profile soon."""
BUDGET_S = 20.0
"""From the first time on; after that it is not measured again."""


def relative_spread(samples: Sequence[int]) -> float:
    """Return the interquartile range over the median; of fewer than two samples 0."""
    if not samples:
        return 0.0
    middle, spread = quartiles(samples)
    return spread / max(1.0, middle)


def steadiest(take: Callable[[int], Samples], agree: Callable[[bool], bool], samples: int) -> Samples:
    """Measure with `take`, again (up to `MOST` times) while a spread is above the bound; keep each one's steadiest.

    `take` is called with how often it has been before, and returns samples by name, about `samples` of each; fewer than
    `ENOUGH` are measured once. `agree` says whether any process
    that measures at the same time wants another turn, given whether this one does: all take it, or none.
    """
    begin = time.monotonic()
    kept = take(0)
    for turn in range(1, MOST if samples >= ENOUGH else 1):
        is_noise = any(relative_spread(samples) > BOUND for samples in kept.values())
        if not agree(is_noise and time.monotonic() - begin < BUDGET_S):
            break
        kept = {name: min(kept[name], samples, key=relative_spread) for name, samples in take(turn).items()}
    return kept
