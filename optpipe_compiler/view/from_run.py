"""What `optpipe profile --from-run` shows: what the run changed in its profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from optpipe_compiler.documents.units import printable, show_ns

if TYPE_CHECKING:
    from rich.console import RenderableType

    from optpipe_compiler.costs.from_run import FromRun, Update


def render(found: FromRun, path: str) -> RenderableType:
    """Return one row per number that was measured, against the base profile."""
    table = Table(box=None, pad_edge=False)
    table.add_column("measured in the run")
    for column in ("profile said", "run says", "± spread", "samples", "ratio"):
        table.add_column(column, justify="right")
    for change in found.changes:
        value = change.measured.value
        table.add_row(
            printable(change.what),
            _show(change, change.base),
            _show(change, value),
            _show(change, change.measured.spread),
            str(change.measured.samples),
            f"{value / change.base:.2f} x" if change.base else "",
        )
    return Group(table, Text(f"\nwrote {printable(path)}; all else is as before; ± is the interquartile range", "dim"))


def _show(change: Update, value: int) -> str:
    return show_ns(value) if change.unit == "ns" else f"{value / 1e9:.2f} GB/s"
