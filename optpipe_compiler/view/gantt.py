"""The schedule as text: a compute lane per device with letters by op, and its transfer lanes where it has any."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from rich.text import Text

from optpipe_compiler.units import show_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.ir import Schedule

STYLES = {
    "forward": ("F", "blue"),
    "backward_input": ("I", "green"),
    "backward_weight": ("W", "yellow"),
    "backward": ("B", "cyan"),
    "recompute": ("R", "magenta"),
    "offload": ("v", "bright_black"),
    "reload": ("^", "bright_black"),
}
IDLE = "·"
LEGEND = "F forward  I input gradient  W weight gradient  B both  R recompute  v offload  ^ reload  · idle"

Bar = tuple[int, int, str, str]
"""start and end in ns, letter, microbatch."""


def render(schedule: Schedule, width: int) -> Text:
    """Return the chart, `width` columns wide; an op shows its letter and, where it has room, its microbatch."""
    margin = 4 + len(str(schedule.setup.devices))
    columns = max(20, width - margin - 1)
    begin = min((min(times.start_ns) for times in schedule.forecast.times), default=0)
    scale = max(1, schedule.forecast.makespan_ns) / columns
    text = Text()
    for device in schedule.devices:
        for lane, label in (("compute", str(device.device)), ("d2h", "out"), ("h2d", "in")):
            bars = _bars(schedule, device.device, lane)
            if bars:
                text.append(label.rjust(margin - 1) + " ")
                text.append_text(_row(bars, begin, scale, columns, idle=IDLE if lane == "compute" else " "))
                text.append("\n")
    text.append(" " * margin + f"0 to {show_ns(schedule.forecast.makespan_ns)}\n{LEGEND}\n", style="dim")
    return text


def _bars(schedule: Schedule, device: int, lane: str) -> list[Bar]:
    ops = getattr(schedule.devices[device], lane)
    for times in schedule.forecast.times:
        if times.device == device and times.lane == lane:
            return [
                (start, end, op.name, str(op.microbatch))
                for op, start, end in zip(ops, times.start_ns, times.end_ns, strict=True)
                if op.name in STYLES
            ]
    return []


def _row(bars: Sequence[Bar], begin: int, scale: float, columns: int, idle: str) -> Text:
    """Each column shows the op that runs at its middle; an op's first column is its letter, then its microbatch."""
    starts = [bar[0] for bar in bars]
    text, shown, offset = Text(), -1, 0
    for column in range(columns):
        moment = begin + (column + 0.5) * scale
        index = bisect_right(starts, moment) - 1
        if index < 0 or bars[index][1] <= moment:
            text.append(idle, style="dim")
            continue
        letter, style = STYLES[bars[index][2]]
        offset = offset + 1 if index == shown else 0
        shown = index
        number = bars[index][3]
        text.append(
            letter if offset == 0 else number[offset - 1] if offset <= len(number) else " ", f"black on {style}"
        )
    return text
