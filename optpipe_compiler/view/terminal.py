"""The terminal, or the pipe, that commands print to."""

from __future__ import annotations

import re
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleDimensions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from optpipe_compiler.documents.units import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType
    from rich.segment import Segment

BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[num]?s|[kMGTP]?B|[KMGTP]iB)\b)")
JOINER = "\ufdd0"
"""Stands for the blank before a unit until lines are broken, which rich does at no-break spaces, too."""
WIDEST = 10_000
"""Columns in which no table has to fold."""
FOLDED = 10
"""Letters from which on a word may be folded."""


class Terminal(Console):
    """Strings are text: no markup is read in them, and characters that could act on a terminal are shown as escapes.

    No line ends between a number and its unit. Tables fold what has no room, and no number: where even that has none,
    lines are longer than the window. Away from a terminal lines end where their text does.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, quiet=quiet)
        if self.is_dumb_terminal:  # rich gives it 80 columns, whatever the window has
            self.size = ConsoleDimensions(*get_terminal_size())

    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to `main`."""
        raise BrokenPipeError

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; nothing is cut at the window's edge."""
        if not self.is_terminal:
            with self.capture() as captured:
                super().print(*objects, **{"crop": False, **options})
            objects, options = (re.sub(r" +\n", "\n", captured.get()),), {"end": "", "soft_wrap": True}
        super().print(*objects, **{"crop": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as text."""
        return super().render_str(BEFORE_UNIT.sub(JOINER, text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is shown."""
        if isinstance(renderable, Text):
            renderable = _joined(renderable)
        if isinstance(renderable, Table):
            options = options or self.options
            options = options.update(width=max(options.max_width, self._fit(renderable, options)))
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=printable(part.text.replace(JOINER, " "), keep="\n"))

    def _fit(self, table: Table, options: ConsoleOptions) -> int:
        """Give the columns of a table that is too wide what their words need, and the rest to the narrowest."""
        given, wide = options.max_width, options.update(max_width=WIDEST)
        if Measurement.get(self, wide, table).maximum <= given:
            return 0
        table.padding = 0, 1, 0, 0
        table.pad_edge = False
        left = given - len(table.columns) + 1
        widths, most = [], []
        for column in table.columns:
            column.overflow, column.no_wrap = "fold", False  # without wrapping even that cuts
            column._cells = [_joined(cell) if isinstance(cell, Text) else cell for cell in column.cells]
            cells = [Measurement.get(self, wide, cell) for cell in (column.header, *column.cells)]
            longest = max(cell.maximum for cell in cells)
            words = max(min(cell.minimum, FOLDED) for cell in cells)
            least = column.width or max(words, column.min_width or 0)
            widths.append(least)
            most.append(column.width or max(least, longest))
        for _ in range(left - sum(widths)):
            growing = [number for number, width in enumerate(widths) if width < most[number]]
            if not growing:
                break
            widths[min(growing, key=widths.__getitem__)] += 1
        for column, width in zip(table.columns, widths, strict=True):
            column.width = width
        return sum(widths) + len(widths) - 1


def _joined(text: Text) -> Text:
    """Return the text with its numbers and their units as words that are not broken."""
    text = text.copy()
    text.plain = BEFORE_UNIT.sub(JOINER, text.plain)
    return text
