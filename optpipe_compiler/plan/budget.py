"""How long to search: seconds of a clock, or deterministic time that stands for them, with the same control flow."""

from __future__ import annotations

import time

from optpipe_compiler.solver.worker import DETERMINISTIC_PER_S, Limits

LOWER_S_PER_TASK = 8e-5
"""Seconds that lowering and verifying the result take per task; `python -m bench.lowering` measures 3 to 8e-5."""
GRACE_S = 2.0
"""Seconds beyond the time limit that lowering and verifying a schedule may take."""
LOWERING_SHARE = 0.5
"""Share of the time limit that lowering and verifying a schedule may take; instances of more ops are left out."""
AFTER_S_PER_TASK = 9e-5
"""Seconds that a command takes per task to write and to show the result; `bench.lowering` measures 5 to 9e-5."""
SPARE_S_PER_TASK = 2e-5
"""Seconds that it takes per task to see what can stay: at most four rounds of 5 us."""
STEPS, STEPS_NS = 20_000, 6_000_000
"""Steps of a loop, and the time in which a machine does them that takes as long as these constants say. By `python -m
bench.limits` plans of 2 s are 0.3 % shorter in the mean where it takes 3 ms."""
FEW_TASKS = 70_000
"""Tasks up to which that counts: of more the caches hold less, and 262,144 took 79 us each on a machine of 3 ms. With
40,000 plans of 20 s for 32 devices are 0.4 % longer in the mean (four runs of docs/LIMITS.md's two cases)."""


class Budget:
    """What is left of the limits for planning.

    `tasks`: of the largest schedule that may have to be written; `begin`: when the time began, by `time.monotonic`.
    """

    def __init__(self, limits: Limits, tasks: int, begin: float) -> None:
        self.limits = limits
        self._begin = begin
        self._stopped: float | None = None
        self.spent = 0.0
        """Deterministic time, in units of the solver."""
        reserve_s = lowering_s(tasks) + (SPARE_S_PER_TASK + AFTER_S_PER_TASK) * tasks
        self.reserve_s = reserve_s * (_pace() if tasks <= FEW_TASKS else 1.0)
        """Time that sparing, lowering, verifying, writing and showing the result will take."""
        self.is_interrupted = False
        """Whether someone has asked for the best so far."""

    def left(self) -> float:
        """Return the seconds that are left; in reproducible mode they are counted in deterministic time."""
        if self.limits.reproducible:
            return self.limits.time_limit_s - self.spent / DETERMINISTIC_PER_S
        return self.limits.time_limit_s - self.reserve_s - self.elapsed()

    def elapsed(self) -> float:
        """Return the seconds of the clock that count."""
        return (time.monotonic() if self._stopped is None else self._stopped) - self._begin

    def stop(self) -> None:
        """Count no time until `go_on`."""
        self._stopped = time.monotonic()

    def go_on(self, *, counted: bool) -> float:
        """Count again, also what has passed since `stop` if `counted`; return its seconds."""
        assert self._stopped is not None
        passed = time.monotonic() - self._stopped
        self._begin += 0.0 if counted else passed
        self._stopped = None
        return passed

    def is_over(self) -> bool:
        """Whether nothing more may begin: the clock says so, where it decides, or who has interrupted the search."""
        return self.is_interrupted or (not self.limits.reproducible and self.left() < 0)


def _pace() -> float:
    """Return what share of the time that the constants say this machine takes now, no more than all of it."""
    took_ns = []
    for _ in range(3):
        begin, made = time.perf_counter_ns(), dict[tuple[int, int], tuple[int, int]]()
        for number in range(STEPS):
            made[number % 97, number % 13] = number, number + 1
        took_ns.append(time.perf_counter_ns() - begin)
    return min(1.0, sorted(took_ns)[1] / STEPS_NS)


def lowering_s(count: int) -> float:
    """Return about how many seconds it takes to lower and verify a schedule of so many tasks."""
    return 0.2 + LOWER_S_PER_TASK * count


def most_lowering_s(limit_s: float) -> float:
    """Return how many seconds lowering and verifying may take under a time limit."""
    return max(GRACE_S, LOWERING_SHARE * limit_s)
