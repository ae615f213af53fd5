"""Time as an axis: which moments a column of text covers, and the marks below a chart."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

STEP_COLUMNS = 12
"""Least distance of two marks on the ruler."""
UNITS = ((10**9, "s"), (10**6, "ms"), (10**3, "us"), (1, "ns"))


@dataclass(frozen=True)
class Axis:
    """The times [begin_ns, end_ns) over so many columns."""

    begin_ns: int
    end_ns: int
    columns: int

    @cached_property
    def edges(self) -> list[int]:
        """The times at which the columns begin, and the end of the last."""
        span = self.end_ns - self.begin_ns
        return [self.begin_ns + span * column // self.columns for column in range(self.columns + 1)]

    def column(self, time_ns: int) -> int:
        """Return the column that a time falls into: the last whose edge is not later.

        Where a nanosecond has several columns, it is the first of them.
        """
        last = max(0, bisect_right(self.edges, time_ns) - 1)
        return min(self.columns - 1, bisect_left(self.edges, self.edges[last]))

    def ruler(self, zero_ns: int = 0) -> str:
        """Return marks with times counted from `zero_ns`, at round distances."""
        least = max(1, (self.end_ns - self.begin_ns) * STEP_COLUMNS // self.columns)
        line = ""
        for time, label in ticks(self.begin_ns - zero_ns, self.end_ns - zero_ns, least):
            mark, at = f"│{label}", self.column(zero_ns + time)
            if at + len(mark) <= self.columns and at >= len(line):
                line = line.ljust(at) + mark
        return line


def ticks(begin_ns: int, end_ns: int, least_ns: int) -> list[tuple[int, str]]:
    """Return round times in [begin_ns, end_ns) at least `least_ns` apart, each with its label in one unit for all."""
    power = int(10 ** (len(str(least_ns)) - 1))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= least_ns)
    factor, unit = next(one for one in UNITS if end_ns >= one[0] or one[0] == 1)
    digits = max(0, len(str(factor)) - len(str(step))) if step < factor else 0
    first = -(-begin_ns // step) * step
    return [(time, f"{time / factor:.{digits}f} {unit}") for time in range(first, end_ns, step)]
