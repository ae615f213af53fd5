"""The schedule as text: per device its ops over time, its transfers, and its memory against the cap."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from optpipe_compiler.documents.ops import LETTERS
from optpipe_compiler.documents.units import short_bytes
from optpipe_compiler.view.axis import Axis
from optpipe_compiler.view.look import LOOKS, ink

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe_compiler.forecast import Analysis, Curve, Item

LEFT, RIGHT = 7, 5
"""Columns for labels on the left, for the peak on the right."""
NARROWEST = 40
IDLE = "·"
BLOCKS = " ▁▂▃▄▅▆▇█"
LEVELS = ((0.75, "#44bb99"), (1.0, "#ddaa33"))
"""Colours of memory up to a share of the cap."""
OVER = "#ee6677"


def render(
    analysis: Analysis,
    width: int,
    devices: Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
    *,
    colour: bool = True,
) -> Text:
    """Return the chart, `width` columns wide, of some devices and of the times `window` (ns).

    An op shows its letter and, where it has room, its microbatch; all but the first stage of a device are lighter.
    """
    begin, end = window or (analysis.begin_ns, analysis.end_ns)
    axis = Axis(begin, max(end, begin + 1), max(NARROWEST, width) - LEFT - RIGHT)
    transfers = any(item.lane != "compute" for item in analysis.items)
    text = Text(no_wrap=True, overflow="crop")
    for device in range(len(analysis.memory)) if devices is None else devices:
        _line(text, f"dev {device}", _ops(analysis.lane(device, "compute"), axis, analysis, colour=colour))
        for lane in ("d2h", "h2d") if transfers else ():
            _line(text, lane, _transfers(analysis.lane(device, lane), axis))
        cap = analysis.schedule.setup.cap_bytes
        _line(text, "mem", *_memory(analysis.memory[device], axis, cap, None))
    if any(held for _, held in analysis.host):
        cap_or_peak = analysis.schedule.setup.host_cap_bytes or max(held for _, held in analysis.host)
        _line(text, "host", *_memory(analysis.host, axis, cap_or_peak, LOOKS["offload"].colour))
    _line(text, "", Text(axis.ruler(analysis.begin_ns), style="dim"))
    text.append_text(_legend(analysis, width, colour=colour))
    return text


def _line(text: Text, label: str, row: Text, note: str = "") -> None:
    text.append(label.rjust(LEFT - 1) + " ", style="dim" if label[:3] != "dev" else "")
    text.append_text(row)
    text.append(f" {note}\n" if note else "\n", style="dim")


def _cells(items: Iterable[Item], axis: Axis) -> list[Item | None]:
    """Return per column one op that runs in it, or None.

    Where several kinds of ops share columns, what a column does not show is owed to the next, so that over some columns
    each kind, and idling, has its share.
    """
    edges = axis.edges
    inside: list[dict[str, tuple[int, Item | None]]] = [{} for _ in range(axis.columns)]
    for column in range(axis.columns):
        inside[column][IDLE] = edges[column + 1] - edges[column], None
    for item in items:
        if item.end_ns <= axis.begin_ns or item.begin_ns >= axis.end_ns:
            continue
        for column in range(axis.column(item.begin_ns), axis.column(item.end_ns) + 1):
            part = min(item.end_ns, edges[column + 1]) - max(item.begin_ns, edges[column])
            kinds = inside[column]
            sofar, longest = kinds.get(item.op.name, (0, item))
            kinds[item.op.name] = sofar + part, longest if 2 * part < sofar + part else item
            kinds[IDLE] = kinds[IDLE][0] - part, None
    return list(_shown(inside))


def _shown(inside: list[dict[str, tuple[int, Item | None]]]) -> Iterator[Item | None]:
    owed: dict[str, int] = defaultdict(int)
    for kinds in inside:
        for kind, (part, _) in kinds.items():
            owed[kind] += part
        kind = max((kind for kind, (part, _) in kinds.items() if part), key=lambda kind: owed[kind], default=IDLE)
        owed[kind] -= sum(part for part, _ in kinds.values())
        yield kinds[kind][1]


def _ops(items: Sequence[Item], axis: Axis, analysis: Analysis, *, colour: bool) -> Text:
    row = Text()
    first = {stage.device: stage.stage for stage in reversed(analysis.schedule.stages)}
    for item, run in groupby(_cells(items, axis)):
        columns = len(list(run))
        if item is None:
            row.append(IDLE * columns, style="dim")
            continue
        letter, shade = LETTERS[item.op.name], LOOKS[item.op.name].colour
        label = f"{letter}{item.op.microbatch}"
        label = label if len(label) <= columns else letter
        if item.op.stage != first.get(item.device):
            shade = _lighter(shade)
        row.append(label.ljust(columns, " " if colour else "-"), style=f"{ink(shade)} on {shade}")
    return row


def _lighter(colour: str) -> str:
    """Return a colour moved a third of the way to white."""
    parts = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{part + (255 - part) // 3:02x}" for part in parts)


def _transfers(items: Sequence[Item], axis: Axis) -> Text:
    row = Text()
    for item, run in groupby(_cells(items, axis)):
        columns = len(list(run))
        if item is None:
            row.append(" " * columns)
        else:
            row.append(("╺" if columns > 1 else "") + "━" * (columns - (columns > 1)), style=LOOKS[item.op.name].colour)
    return row


def _memory(curve: Curve, axis: Axis, cap: int, colour: str | None) -> tuple[Text, str]:
    """Return a strip with the most that is held in each column against the cap, and the most of all columns."""
    times = np.array([time for time, _ in curve])
    held = np.array([size for _, size in curve], dtype=float)
    edges = np.array(axis.edges)
    firsts = np.maximum(0, np.searchsorted(times, edges[:-1], "right") - 1)
    lasts = np.maximum(np.searchsorted(times, edges[1:]), firsts + 1)
    shares = [held[first:last].max() / max(1, cap) for first, last in zip(firsts, lasts, strict=True)]
    row = Text()
    for share in shares:
        block = BLOCKS[min(8, max(1, int(np.ceil(8 * share)))) if share > 0 else 0]
        row.append(block, style=colour or next((shade for level, shade in LEVELS if share <= level), OVER))
    if colour is not None:
        return row, ""
    return row, f"{max(shares):.0%}".rjust(RIGHT - 1)


def _legend(analysis: Analysis, width: int, *, colour: bool) -> Text:
    present = {item.op.name: item.lane for item in analysis.items}
    entries = [
        (f" {LETTERS[kind]} ", look.words, f"{ink(look.colour)} on {look.colour}")
        if present[kind] == "compute"
        else ("━", look.words, look.colour)
        for kind, look in LOOKS.items()
        if kind in present
    ]
    entries += [(IDLE, "idle", "dim")]
    text, used = Text(" " * LEFT), LEFT
    for mark, words, style in entries:
        mark = mark if colour else mark.strip()
        if used + len(mark) + len(words) + 3 > width:
            text.append("\n" + " " * LEFT)
            used = LEFT
        text.append(mark, style=style)
        text.append(f" {words}  ", style="dim")
        used += len(mark) + len(words) + 3
    cap = f"mem: of the cap of {short_bytes(analysis.schedule.setup.cap_bytes)}"
    text.append(("" if used + len(cap) <= width else "\n" + " " * LEFT) + cap + "\n", style="dim")
    return text
