"""Whether steps have become longer: step times of two schedules, or of two moments, compared pair by pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

TRIAL = 5
"""Steps on each side. The first one with a schedule, which warms up, is none of them; the planner rests meanwhile."""
DOUBT = 0.1
"""The share of all pairs that may say otherwise. Of 5 and 5 steps of one and the same schedule, whatever their times'
distribution, no more than 1.6% pass for longer ones (the rank-sum test of Mann and Whitney: 4 orders of 252)."""


def is_longer(after: Collection[float], before: Collection[float], share: float) -> bool:
    """Return whether steps take longer than they did by more than a share, beyond what noise explains."""
    otherwise = sum(late <= (1 + share) * early for late in after for early in before)
    return bool(after and before) and otherwise <= DOUBT * len(after) * len(before)
