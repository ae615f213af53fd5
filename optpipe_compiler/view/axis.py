"""Columns of text as time: which moments a column covers, and the ruler below a chart."""

from __future__ import annotations

from dataclasses import dataclass

STEP_COLUMNS = 12
"""Least distance of two marks on the ruler."""
UNITS = ((10**9, "s"), (10**6, "ms"), (10**3, "us"), (1, "ns"))


@dataclass(frozen=True)
class Axis:
    """The times [begin_ns, end_ns) over so many columns."""

    begin_ns: int
    end_ns: int
    columns: int

    @property
    def edges(self) -> list[int]:
        """The times at which the columns begin, and the end of the last."""
        span = self.end_ns - self.begin_ns
        return [self.begin_ns + span * column // self.columns for column in range(self.columns + 1)]

    def column(self, time_ns: int) -> int:
        """Return the column that a time falls into: the last whose edge is not later."""
        last = ((time_ns - self.begin_ns + 1) * self.columns - 1) // max(1, self.end_ns - self.begin_ns)
        return min(self.columns - 1, max(0, last))

    def ruler(self, zero_ns: int = 0) -> str:
        """Return marks with times counted from `zero_ns`, at round distances."""
        step = self._step()
        factor, unit = next(one for one in UNITS if self.end_ns - zero_ns >= one[0] or one[0] == 1)
        digits = max(0, len(str(factor)) - len(str(step))) if step < factor else 0
        line = ""
        time = zero_ns - (zero_ns - self.begin_ns) // step * step
        while time < self.end_ns:
            mark = f"│{(time - zero_ns) / factor:.{digits}f} {unit}"
            at = self.column(time)
            if at + len(mark) <= self.columns and at >= len(line):
                line = line.ljust(at) + mark
            time += step
        return line

    def _step(self) -> int:
        least = max(1, (self.end_ns - self.begin_ns) * STEP_COLUMNS // self.columns)
        power = int(10 ** (len(str(least)) - 1))
        return next(power * times for times in (1, 2, 5, 10) if power * times >= least)
