"""Which of several plans is best under noise: that of the least forecast, unless another is surely late less often.

Plans are compared by the 95th percentile of their steps. Executions are samples, and the least of several samples is
often the luckiest: so the plan with the least percentile is taken only where it is late significantly less often than
the one with the least forecast, in executions that have the same noise, and again in others that did not choose it.
"""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler.forecast.executions import enough, executed

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir
    from optpipe_compiler.forecast.executions import Spreads, Times

CHOOSES, CONFIRMS = 1, 2
"""Seeds of the executions."""
CHANCE = 0.001
"""How often two plans that are late equally often may pass for different ones, in either of the two comparisons."""
LATE = 0.95
"""A step is late that takes longer than this quantile of those of the plan with the least forecast."""


class Choice:
    """Plans in the order of their forecasts, the least first."""

    def __init__(self) -> None:
        self._plans: list[tuple[ir.Schedule, Spreads]] = []
        self._taken: list[Times] = []

    def add(self, schedule: ir.Schedule, spreads: Spreads) -> None:
        """Add a plan; it is executed as soon as there is another one to compare it with."""
        self._plans.append((schedule, spreads))
        if len(self._plans) > 1:
            self._taken += [self._executed(plan, CHOOSES) for plan in range(len(self._taken), len(self._plans))]

    def best(self) -> int:
        """Return the number of the plan to take."""
        if not self._taken:
            return 0
        reached = [float(np.quantile(taken, LATE)) for taken in self._taken]
        best = reached.index(min(reached))
        if not is_late_less_often(self._taken[best], self._taken[0], reached[0]):
            return 0
        one, other = (self._executed(plan, CONFIRMS) for plan in (best, 0))
        return best if is_late_less_often(one, other, reached[0]) else 0

    def _executed(self, plan: int, seed: int) -> Times:
        return executed(*self._plans[plan], enough(self._plans[0][0]), seed)


def is_late_less_often(one: Times, other: Times, limit_ns: float) -> bool:
    """Return whether `one` takes longer than the limit in fewer executions than `other`, more surely than by chance.

    Only those executions tell in which just one of both is late; if both were late equally often, each were as likely
    to be that one (the sign test).
    """
    fewer = int(np.count_nonzero((one <= limit_ns) & (other > limit_ns)))
    more = int(np.count_nonzero((one > limit_ns) & (other <= limit_ns)))
    by_chance: float = sum(comb(fewer + more, k) for k in range(more + 1)) / 2 ** (fewer + more)
    return by_chance <= CHANCE
