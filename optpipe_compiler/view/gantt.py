"""The schedule as text: per device its ops over time, its transfers, and its memory against the cap."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.text import Text

from optpipe_compiler.documents.ops import LETTERS, unit_name
from optpipe_compiler.documents.units import short_bytes
from optpipe_compiler.view.axis import Axis
from optpipe_compiler.view.look import LEVELS, LOOKS, OVER, ink

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe_compiler.forecast import Analysis, Curve, Item

LEFT, RIGHT = 7, 5
"""Columns for labels on the left, for the peak on the right."""
NARROWEST = 40
BLANK = "·"
BLOCKS = " ▁▂▃▄▅▆▇█"


class Detail(NamedTuple):
    """What a chart shows of which devices."""

    devices: Sequence[int]
    memory: bool = True
    transfers: bool = True


def render(
    analysis: Analysis,
    width: int,
    devices: Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
    *,
    height: int | None = None,
    colour: bool = True,
) -> Text:
    """Return the chart, `width` columns wide, of some devices and of the times `window` (ns).

    An op shows its letter and, where it has room, its microbatch; all but the first stage of a device are lighter. With
    `height` it has at most so many lines, as far as one device allows: transfers are left out, then memory, then
    devices, which a last line says.
    """
    begin, end = window or (analysis.begin_ns, analysis.end_ns)
    axis = Axis(begin, max(end, begin + 1), max(NARROWEST, width) - LEFT - RIGHT)
    everything = Detail(analysis.schedule.pipeline if devices is None else devices)
    for detail in _details(everything, height):
        text = _chart(analysis, width, axis, detail, colour=colour)
        if detail != everything:
            _note(text, analysis, everything, detail)
        if height is None or len(text.plain.splitlines()) <= height:
            break
    return text


def _details(everything: Detail, height: int | None) -> Iterator[Detail]:
    """Yield what may be shown, the most first; fewer devices are evenly apart, the first and the last among them."""
    yield everything
    if height is None:
        return
    yield everything._replace(transfers=False)
    count = len(everything.devices)
    for number in range(count, 0, -1):
        apart = [everything.devices[round(at * (count - 1) / max(1, number - 1))] for at in range(number)]
        yield Detail(apart, memory=False, transfers=False)


def _note(text: Text, analysis: Analysis, everything: Detail, detail: Detail) -> None:
    """Say what is left out and how to see it."""
    left = ["transfers"] if any(item.lane != "compute" for item in analysis.items) else []
    left += [] if detail.memory else ["memory"]
    missing = len(everything.devices) - len(detail.devices)
    left += [f"{missing} of {len(everything.devices)} devices"] if missing else []
    if left:
        text.append(f"{' ' * LEFT}no room for {' and '.join(left)}: --device N, a larger window\n", style="dim")


def _chart(analysis: Analysis, width: int, axis: Axis, detail: Detail, *, colour: bool) -> Text:
    transfers = detail.transfers and any(item.lane != "compute" for item in analysis.items)
    text = Text(no_wrap=True, overflow="crop")
    cap = analysis.schedule.setup.cap_bytes
    for device in detail.devices:
        memory = _memory(analysis.memory[device], axis, cap, None)
        ops = _ops(analysis.lane(device, "compute"), axis, analysis, colour=colour)
        _line(text, f"dev {device}" if device < 100 else f"d {device}", ops, "" if detail.memory else memory[1])
        for lane in ("d2h", "h2d") if transfers else ():
            _line(text, lane, _transfers(analysis.lane(device, lane), axis))
        if detail.memory:
            _line(text, "mem", *memory)
    if transfers and any(held for _, held in analysis.host):
        cap_or_peak = analysis.schedule.setup.host_cap_bytes or max(held for _, held in analysis.host)
        _line(text, "host", *_memory(analysis.host, axis, cap_or_peak, LOOKS["offload"].colour))
    _line(text, "", Text(axis.ruler(analysis.begin_ns), style="dim"))
    text.append_text(_legend(analysis, width, transfers=transfers, memory=detail.memory, colour=colour))
    return text


def _line(text: Text, label: str, row: Text, note: str = "") -> None:
    text.append(label.rjust(LEFT - 1) + " ", style="" if label.startswith(("dev ", "d ")) else "dim")
    text.append_text(row)
    text.append(f" {note}\n" if note else "\n", style="dim")


def _cells(items: Iterable[Item], axis: Axis) -> list[Item | None]:
    """Return per column one op that runs in it, or None.

    Where several kinds of ops share columns, what a column does not show is owed to the next, so that over some columns
    each kind, and idling, has its share. Of several columns of one nanosecond all show the same.
    """
    edges = axis.edges
    inside: list[dict[str, tuple[int, Item | None]]] = [{} for _ in range(axis.columns)]
    for column in range(axis.columns):
        inside[column][BLANK] = edges[column + 1] - edges[column], None
    for item in items:
        if item.end_ns <= axis.begin_ns or item.begin_ns >= axis.end_ns:
            continue
        for column in range(axis.column(item.begin_ns), axis.column(item.end_ns) + 1):
            part = min(item.end_ns, edges[column + 1]) - max(item.begin_ns, edges[column])
            kinds = inside[column]
            sofar, longest = kinds.get(item.op.name, (0, item))
            kinds[item.op.name] = sofar + part, longest if 2 * part < sofar + part else item
            kinds[BLANK] = kinds[BLANK][0] - part, None
    shown = list(_shown(inside))
    for column in reversed(range(axis.columns - 1)):
        if edges[column] == edges[column + 1]:
            shown[column] = shown[column + 1]
    return shown


def _shown(inside: list[dict[str, tuple[int, Item | None]]]) -> Iterator[Item | None]:
    owed: dict[str, int] = defaultdict(int)
    for kinds in inside:
        for kind, (part, _) in kinds.items():
            owed[kind] += part
        kind = max((kind for kind, (part, _) in kinds.items() if part), key=lambda kind: owed[kind], default=BLANK)
        owed[kind] -= sum(part for part, _ in kinds.values())
        yield kinds[kind][1]


def _ops(items: Sequence[Item], axis: Axis, analysis: Analysis, *, colour: bool) -> Text:
    row = Text()
    first = {stage.device: stage.stage for stage in reversed(analysis.schedule.stages)}
    for item, run in groupby(_cells(items, axis)):
        columns = len(list(run))
        if item is None:
            row.append(BLANK * columns, style="dim")
            continue
        letter, shade = LETTERS[item.op.name], LOOKS[item.op.name].colour
        label = f"{letter}{unit_name(*item.op.unit)}"
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
    """Return a thick line where transfers take most of the time, a thin one where there are any."""
    row = Text()
    some: list[Item | None] = [None] * axis.columns
    for one in items:
        if one.begin_ns < one.end_ns and one.end_ns > axis.begin_ns and one.begin_ns < axis.end_ns:
            for column in range(axis.column(one.begin_ns), axis.column(one.end_ns - 1) + 1):
                some[column] = one
    for (item, any_item), run in groupby(zip(_cells(items, axis), some, strict=True)):
        columns = len(list(run))
        if item is not None:
            row.append(("╺" if columns > 1 else "") + "━" * (columns - (columns > 1)), style=LOOKS[item.op.name].colour)
        elif any_item is not None:
            row.append("─" * columns, style=LOOKS[any_item.op.name].colour)
        else:
            row.append(" " * columns)
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


def _legend(analysis: Analysis, width: int, *, transfers: bool, memory: bool, colour: bool) -> Text:
    present = {item.op.name: item.lane for item in analysis.items if transfers or item.lane == "compute"}
    entries = [
        (f" {LETTERS[kind]} ", look.words, f"{ink(look.colour)} on {look.colour}")
        if present[kind] == "compute"
        else ("━", look.words, look.colour)
        for kind, look in LOOKS.items()
        if kind in present
    ]
    entries += [(BLANK, "idle", "dim")]
    text, used = Text(" " * LEFT), LEFT
    for mark, words, style in entries:
        mark = mark if colour else mark.strip()
        if used + len(mark) + len(words) + 3 > width:
            text.append("\n" + " " * LEFT)
            used = LEFT
        text.append(mark, style=style)
        text.append(f" {words}  ", style="dim")
        used += len(mark) + len(words) + 3
    cap = f"{'mem' if memory else '%'}: of the cap of {short_bytes(analysis.schedule.setup.cap_bytes)}"
    text.append(("" if used + len(cap) <= width else "\n" + " " * LEFT) + cap + "\n", style="dim")
    return text
