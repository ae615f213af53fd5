"""Schedules side by side: a row each, the best marked, and whatever makes the comparison unequal said first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Table
from rich.text import Text

from optpipe_compiler.documents.units import counted, printable, short_bytes, show_bytes, show_ns
from optpipe_compiler.view.bar import Bar, description_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from optpipe_compiler.study.comparison import Comparison
    from optpipe_compiler.study.facts import Facts

LEGEND = (
    "peak: promised for the fullest device; host: offloaded and reloaded per step; redo: recomputation's share of the "
    "compute time"
)

IMPLIED = ("mb", "of cap", "kind")
"""Left out first: the sentences above the table name microbatches and caps, and a known schedule's name its kind."""
NAME = 14
"""Least room for the name of a schedule."""


class MethodsBar(Bar):
    """Schedules to compare with that are done."""

    def __init__(self, console: Console, methods: int) -> None:
        columns = (TextColumn("known schedules"), BarColumn(), MofNCompleteColumn())
        super().__init__(console, *columns, description_column(), description="", total=methods)

    def update(self, name: str) -> None:
        """Count one more."""
        self.bar.update(self.task, advance=1, description=name)


def render(comparison: Comparison, width: int) -> RenderableType:
    """Return warnings, table, remarks and what is missing, `width` columns wide."""
    parts: list[RenderableType] = [_warning(comparison) if comparison.differences else _headline(comparison)]
    columns = _that_fit(comparison, width)
    names = short_names([row.name for row in comparison.rows], max(NAME, _room(columns, width)))
    parts.append(_table(comparison, columns, names))
    parts.append(Text(LEGEND, style="dim"))
    for number, (row, shown) in enumerate(zip(comparison.rows, names, strict=True), start=1):
        is_numbered = shown != row.name and shown.startswith(f"#{number} ")
        parts += [Text(printable(f"#{number}: {row.name}"), style="dim")] if is_numbered else []
    for row in comparison.rows:
        parts += [Text(printable(f"{row.name}: {row.remark}"), style="dim")] if row.remark else []
        parts += [] if row.safe else [Text(printable(f"{row.name}: verify finds {_violations(row)}"), style="bold red")]
    if comparison.best is None:
        parts.append(Text("none is safe, so none is best", style="bold red"))
    if comparison.absent:
        parts.append(_absent(comparison))
    return Group(*parts)


def _warning(comparison: Comparison) -> Text:
    text = Text("these schedules are not of the same instance, so only times per microbatch are set side by side\n")
    text.stylize("bold yellow")
    for sentence in comparison.differences:
        text.append(f"  - {sentence}\n", style="yellow")
    return text


def _headline(comparison: Comparison) -> Text:
    row = comparison.rows[0]
    host = "" if row.host_cap_bytes is None else f", {short_bytes(row.host_cap_bytes)} of host memory"
    return Text(
        f"{counted(row.devices, 'device')}, {counted(row.microbatches, 'microbatch')}, cap "
        f"{show_bytes(row.cap_bytes)} per device{host}\n"
    )


def _that_fit(comparison: Comparison, width: int) -> dict[str, list[str]]:
    """Return the columns, without some that others imply where these would cut names of known schedules."""
    columns = _columns(comparison)
    wanted = max([NAME, *(len(row.name) for row in comparison.rows if row.kind)])
    for title in IMPLIED:
        if _room(columns, width) < wanted:
            columns.pop(title, None)
    return columns


def _table(comparison: Comparison, columns: dict[str, list[str]], names: list[str]) -> Table:
    """Return the table; only names are shortened where the terminal is narrow."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    table.add_column("schedule", no_wrap=True)
    for title in columns:
        table.add_column(title, justify="left" if title in ("kind", "memory") else "right", no_wrap=True)
    for number, row in enumerate(comparison.rows):
        best = row is comparison.best
        cells = [Text(column[number]) for column in columns.values()]
        cells[-1].stylize("" if row.safe else "bold red")
        style = "bold green" if best else None
        table.add_row("*" if best else "", Text(names[number]), *cells, style=style)
    return table


def _columns(comparison: Comparison) -> dict[str, list[str]]:
    """Return the cells of each column by its title."""
    rows = comparison.rows
    columns = {"kind": [row.kind or "-" for row in rows]} if any(row.kind for row in rows) else {}
    columns["makespan"] = [show_ns(row.makespan_ns) for row in rows]
    if comparison.differences:
        columns["per mb"] = [show_ns(round(row.per_microbatch_ns)) for row in rows]
        columns["mb"] = [str(row.microbatches) for row in rows]
    if any(row.slices > 1 for row in rows):
        columns["slices"] = [str(row.slices) for row in rows]
    columns["idle"] = [f"{row.bubble_fraction:.1%}" for row in rows]
    columns["peak"] = [short_bytes(row.peak_bytes) for row in rows]
    columns["of cap"] = [f"{row.peak_bytes / row.cap_bytes:.0%}" if row.cap_bytes else "-" for row in rows]
    columns["host"] = ["-" if row.host_traffic_bytes is None else _traffic(row.host_traffic_bytes) for row in rows]
    columns["redo"] = ["-" if row.recompute_fraction is None else f"{row.recompute_fraction:.0%}" for row in rows]
    if any(row.tokens_per_s is not None for row in rows):
        columns["tok/s"] = ["-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}" for row in rows]
    columns["memory"] = ["safe" if row.safe else "unsafe" for row in rows]
    return columns


def _room(columns: dict[str, list[str]], width: int) -> int:
    """Return what is left for names beside the mark and the columns."""
    return width - 3 - sum(max(len(title), *map(len, cells)) + 1 for title, cells in columns.items())


def short_names(names: Sequence[str], room: int) -> list[str]:
    """Return the names in at most so many columns each, as different as they are.

    What all paths share goes first, then the beginning of what is too long; where that leaves two alike, the middle
    goes instead, and at last a number tells them apart.
    """
    shown = [printable(name) for name in names]
    paths = {index: name.split("/") for index, name in enumerate(shown) if "/" in name}
    if len(paths) > 1 and any(len(shown[index]) > room for index in paths):
        shared = 0
        while len({parts[shared] if len(parts) > shared + 1 else index for index, parts in paths.items()}) == 1:
            shared += 1
        for index, parts in paths.items():
            shown[index] = "/".join(["…"] * (shared > 0) + parts[shared:])
    for head in (0, room // 2):
        cut = [_cut(name, room, head) for name in shown]
        if len(set(cut)) == len(set(shown)):
            return cut
    return [f"#{n} " + _cut(name, room - 1 - len(f"#{n}"), 0) for n, name in enumerate(shown, start=1)]


def _cut(name: str, room: int, head: int) -> str:
    """Leave out what is too long behind the first letters; the end of a path tells most."""
    return name if len(name) <= room else name[:head] + "…" + name[len(name) - (room - 1 - head) :]


def _traffic(size: int) -> str:
    """Two digits behind the point are of no use in a sum over all microbatches."""
    value, _, unit = short_bytes(size).partition(" ")
    return f"{float(value):.1f} {unit}" if "." in value else short_bytes(size)


def _violations(row: Facts) -> str:
    return f"{row.violations} violation{'s' if row.violations > 1 else ''}"


def _absent(comparison: Comparison) -> Table:
    table = Table(title="\nnot in the comparison", title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for one in comparison.absent:
        table.add_row(Text(one.name), Text(one.reason))
    return table
