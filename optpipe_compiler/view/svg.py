"""The schedule as a self-contained SVG picture: lanes over a time axis, memory by holder against the cap, the bound."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from optpipe_compiler.documents.ops import LETTERS, unit_name
from optpipe_compiler.documents.units import printable, short_bytes, show_ns
from optpipe_compiler.forecast import HOLDERS, analyse
from optpipe_compiler.view.axis import ticks
from optpipe_compiler.view.look import HELD, IDLE, LOOKS, ink

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.forecast import Analysis, Item, Stack
    from optpipe_compiler.view.look import Look

WIDTH, LEFT, RIGHT = 1200, 92, 14
LANE, THIN, MEMORY, GAP = 26, 7, 34, 14
FLOOR = 0.28
"""Part of a lane's height that idle time takes, as on the page."""
HEAD = 62
PAPER, INK, MUTED, RULE, LANE_COLOUR = "#ffffff", "#1a1f26", "#586271", "#dce0e6", "#eef0f3"


def render(schedule: Schedule) -> str:
    """Return the picture."""
    return _Picture(analyse(schedule)).text()


def caption(schedule: Schedule) -> str:
    """Return the line below the chart: time, idle share, bound, peak."""
    forecast = schedule.forecast
    peak = max((device.peak_bytes for device in schedule.devices), default=0)
    return (
        f"{show_ns(forecast.makespan_ns)} per step, idle {forecast.bubble_fraction:.1%}, "
        f"bound {show_ns(forecast.lower_bound_ns)}; never above {short_bytes(peak)} of "
        f"{short_bytes(schedule.setup.cap_bytes)} per device"
    )


class _Picture:
    """Rows from top to bottom; all times are drawn from the schedule's first start."""

    def __init__(self, found: Analysis) -> None:
        self.found, self.schedule = found, found.schedule
        self.scale = (WIDTH - LEFT - RIGHT) / max(1, found.end_ns - found.begin_ns)
        self.cap = found.schedule.setup.cap_bytes
        self.several = len(self.schedule.stages) > len(self.schedule.devices)

    def x(self, time_ns: int) -> float:
        """Return where a moment is."""
        return LEFT + (time_ns - self.found.begin_ns) * self.scale

    def text(self) -> str:
        rows: list[str] = []
        top = float(HEAD)
        for device in self.schedule.pipeline:
            rows += self._device(device, top)
            top += self._height(device)
        bottom = top - GAP + 6
        body = [*self._grid(bottom), *rows, *self._bound(bottom), *self._axis(bottom)]
        total = bottom + 66
        label = escape(printable(caption(self.schedule)))
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total:.0f}" '
                f'font-family="sans-serif" font-size="12" fill="{INK}" role="img" aria-label="{label}">',
                f'<rect width="{WIDTH}" height="{total:.0f}" fill="{PAPER}"/>',
                *self._legend(),
                *body,
                f'<text x="{LEFT}" y="{bottom + 56:.1f}">{label}</text>',
                "</svg>\n",
            ]
        )

    def _height(self, device: int) -> float:
        return LANE + 2 + (2 * THIN + 3 if self._copies(device) else 0) + MEMORY + GAP

    def _copies(self, device: int) -> bool:
        return any(self.found.lane(device, lane) for lane in ("d2h", "h2d"))

    # -- one device -------------------------------------------------------------------------------------------

    def _device(self, device: int, top: float) -> Iterator[str]:
        yield _text(6, top + LANE * 0.66, f"device {device}", bold=True)
        yield _rect(LEFT, top, WIDTH - LEFT - RIGHT, LANE, LANE_COLOUR)
        yield from self._gaps(device, top)
        yield from self._bars(self.found.lane(device, "compute"), top, LANE)
        below = top + LANE + 2
        if self._copies(device):
            for lane in ("d2h", "h2d"):
                yield from self._bars(self.found.lane(device, lane), below, THIN)
                below += THIN + 1
            below += 1
        yield from self._memory(device, below)

    def _gaps(self, device: int, top: float) -> Iterator[str]:
        height = LANE * FLOOR
        for gap in self.found.gaps_of(device):
            words = f"idle {show_ns(gap.length_ns)}: {gap.cause.value}" + (f", {gap.resource}" if gap.resource else "")
            width = max(0.5, gap.length_ns * self.scale)
            colour = IDLE[gap.cause].colour
            yield _rect(self.x(gap.begin_ns), top + LANE - height, width, height, colour, words)

    def _bars(self, items: Sequence[Item], top: float, height: float) -> Iterator[str]:
        begin = self.found.begin_ns
        for item in items:
            op, colour = item.op, LOOKS[item.op.name].colour
            length = item.end_ns - item.begin_ns
            if not length:
                continue
            x, width = self.x(item.begin_ns), length * self.scale
            words = (
                f"{op.name} stage {op.stage} microbatch {unit_name(*op.unit)}: "
                f"{show_ns(item.begin_ns - begin)} to {show_ns(item.end_ns - begin)}"
            )
            yield _rect(x, top, max(0.5, width - 0.6), height, colour, words)
            label = f"{op.stage if self.several else ''}{LETTERS[op.name]}{unit_name(*op.unit)}"
            label = label if width > 7 * len(label) + 2 else f"{LETTERS[op.name]}{unit_name(*op.unit)}"
            if height == LANE and width > 7 * len(label) + 2:
                yield (
                    f'<text x="{x + width / 2:.1f}" y="{top + height * 0.66:.1f}" text-anchor="middle" '
                    f'fill="{ink(colour)}" font-size="11" pointer-events="none">{label}</text>'
                )

    def _memory(self, device: int, top: float) -> Iterator[str]:
        """Draw what each holder holds, stacked, and the cap as a dashed line."""
        stack, base = self.found.holders[device], top + MEMORY
        peak = max(sum(holds) for _, holds in stack)
        most = max(peak, self.cap, 1)
        yield _text(6, top + 13, "memory", colour=MUTED, size=10)
        yield _text(6, top + 25, f"{short_bytes(peak)}", colour=MUTED, size=10)
        for nth, holder in reversed(list(enumerate(HOLDERS))):
            if any(holds[nth] for _, holds in stack):
                points = self._outline(stack, nth, base, (MEMORY - 2) / most)
                yield f'<polygon points="{points}" fill="{HELD[holder].colour}"><title>{holder}</title></polygon>'
        if self.cap:
            y = base - (MEMORY - 2) * self.cap / most
            yield _line(LEFT, y, WIDTH - RIGHT, y, dashes="4 3")

    def _outline(self, stack: Stack, nth: int, base: float, scale: float) -> str:
        """Return the corners of what the holders up to the n-th hold together; those above are painted before."""
        corners = [f"{self.x(stack[0][0]):.1f},{base:.1f}"]
        ends = [*(time for time, _ in stack[1:]), self.found.end_ns]
        for (time, holds), end in zip(stack, ends, strict=True):
            y = base - sum(holds[: nth + 1]) * scale
            corners += [f"{self.x(time):.1f},{y:.1f}", f"{self.x(end):.1f},{y:.1f}"]
        return " ".join([*corners, f"{self.x(self.found.end_ns):.1f},{base:.1f}"])

    # -- axis and bound ---------------------------------------------------------------------------------------

    def _ticks(self) -> list[tuple[int, str]]:
        length = self.found.end_ns - self.found.begin_ns
        return ticks(0, max(1, length), least_ns=max(1, length // 12))

    def _grid(self, bottom: float) -> Iterator[str]:
        for time, _ in self._ticks():
            x = self.x(self.found.begin_ns + time)
            yield _line(x, HEAD - 6, x, bottom, colour=RULE)

    def _axis(self, bottom: float) -> Iterator[str]:
        yield _line(LEFT, bottom, WIDTH - RIGHT, bottom)
        for time, label in self._ticks():
            x = self.x(self.found.begin_ns + time)
            yield _line(x, bottom, x, bottom + 5)
            anchor = "start" if time == 0 else "middle"
            yield _text(x, bottom + 18, label, colour=MUTED, anchor=anchor)

    def _bound(self, bottom: float) -> Iterator[str]:
        """Draw the proven bound where it is a moment of the chart: one on a device's span is none."""
        forecast = self.schedule.forecast
        if forecast.objective == "makespan":
            x = self.x(self.found.begin_ns + forecast.lower_bound_ns)
            yield _line(x, HEAD - 6, x, bottom + 26, dashes="5 4", width=1.4)
            label = f"proven bound {show_ns(forecast.lower_bound_ns)} ({forecast.bound})"
            yield _text(x - 5, bottom + 36, label, anchor="end")

    def _legend(self) -> Iterator[str]:
        kinds = {item.op.name for item in self.found.items}
        causes = {gap.cause for gap in self.found.gaps}
        held = {name for nth, name in enumerate(HOLDERS) if any(h[nth] for s in self.found.holders for _, h in s)}
        ops = [(f"{LETTERS[name]} {look.words}", look) for name, look in LOOKS.items() if name in kinds]
        yield from _swatches("", ops, 6)
        yield from _swatches("idle", [(cause.value, look) for cause, look in IDLE.items() if cause in causes], 22)
        yield from _swatches("memory", [(name, look) for name, look in HELD.items() if name in held], 38)
        if self.cap:
            yield _line(WIDTH - RIGHT - 132, 43, WIDTH - RIGHT - 106, 43, dashes="4 3")
            yield _text(WIDTH - RIGHT, 47, f"cap {short_bytes(self.cap)}", anchor="end", size=11)


def _swatches(title: str, entries: Iterable[tuple[str, Look]], top: float) -> Iterator[str]:
    x = float(LEFT)
    if title:
        yield _text(6, top + 9, title, colour=MUTED, size=11)
    for words, look in entries:
        yield _rect(x, top, 10, 10, look.colour) + _text(x + 14, top + 9, words, size=11)
        x += 30 + 6.1 * len(words)


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    box = f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:g}" fill="{colour}"'
    return f"{box}><title>{escape(printable(title))}</title></rect>" if title else f"{box}/>"


def _line(
    x1: float, y1: float, x2: float, y2: float, *, colour: str = INK, dashes: str = "", width: float = 1.0
) -> str:
    style = f' stroke-dasharray="{dashes}"' if dashes else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"{style}/>'


def _text(
    x: float, y: float, words: str, *, colour: str = INK, size: int = 12, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}{weight}>{escape(printable(words))}</text>"
