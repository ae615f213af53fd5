"""Violations for people: every message and, where it has a place, the ops around that place with it marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from optpipe_compiler.documents import ir
    from optpipe_compiler.verify import Violation

AROUND = 3
"""How many ops are shown on either side of an op."""
MARK = "bold red"
MOST = 50
"""Violations that are shown."""


class Spot(NamedTuple):
    """A place in the schedule: device and lane as they stand in the file, and its position on the lane."""

    device: int
    lane: str
    position: int


def render(violations: Sequence[Violation], schedule: ir.Schedule) -> RenderableType:
    """Return all violations, numbered, each followed by its grid where it has a place."""
    if not violations:
        return Text("no violations")
    count = f"{len(violations)} violation{'s' if len(violations) > 1 else ''}"
    spots = _spots(schedule)
    parts: list[RenderableType] = [Text(count, style="bold")]
    for number, violation in enumerate(violations[:MOST], start=1):
        parts.append(Text.assemble(f"{number}. ", (violation.rule, MARK), f": {violation.message}"))
        grid = _grid(violation, schedule, spots)
        if grid is not None:
            parts.append(grid)
    if len(violations) > MOST:
        parts.append(Text(f"and {len(violations) - MOST} more, which --json lists", style="bold"))
    return Group(*parts)


def _lanes(schedule: ir.Schedule) -> Iterable[tuple[int, str, Sequence[ir.Op]]]:
    for number, device in enumerate(schedule.devices):
        yield from ((number, "compute", device.compute), (number, "d2h", device.d2h), (number, "h2d", device.h2d))


def _spots(schedule: ir.Schedule) -> dict[str, Spot]:
    """Return where each op stands; of several ops with one id, where the first does."""
    spots: dict[str, Spot] = {}
    for number, lane, ops in _lanes(schedule):
        for index, op in enumerate(ops):
            spots.setdefault(op.id, Spot(number, lane, index))
    return spots


def _grid(violation: Violation, schedule: ir.Schedule, spots: dict[str, Spot]) -> Table | None:
    """Return one row per lane that the violation is about, the offending op first; None when it has no place."""
    if violation.device is None or violation.lane is None or violation.index is None:
        return None
    own = Spot(violation.device, violation.lane, violation.index)
    marked = dict.fromkeys([own, *(spots[name] for name in violation.ops if name in spots)])
    lanes: dict[tuple[int, str], list[int]] = {}
    for spot in marked:
        lanes.setdefault((spot.device, spot.lane), []).append(spot.position)
    table = Table.grid(padding=(0, 1))
    listed = {(number, lane): ops for number, lane, ops in _lanes(schedule)}
    for (number, lane), indices in lanes.items():
        table.add_row(f"   device {number} {lane:<7} |", _window(listed[number, lane], sorted(indices)))
    return table


def _window(ops: Sequence[ir.Op], marked: list[int]) -> Text:
    """Return the ops around the marked ones, `[2F0]` for a marked one, `..` where some are left out."""
    near = {i for mark in marked for i in range(mark - AROUND, mark + AROUND + 1)}
    shown = sorted(i for i in near if 0 <= i < len(ops))
    text = Text()
    for before, index in zip([-1, *shown], shown, strict=False):
        if index > before + 1:
            text.append(".. ")
        text.append(*((f"[{ops[index].text}]", MARK) if index in marked else (ops[index].text,)))
        text.append(" ")
    if shown and shown[-1] < len(ops) - 1:
        text.append("..")
    return text
