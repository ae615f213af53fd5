"""The frontier as a self-contained SVG picture: throughput against memory, a line per GPU, devices and microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from optpipe_compiler.documents.units import printable, short_bytes, show_ns
from optpipe_compiler.view.sweep import BEYOND, line, rate, unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe_compiler.study.frontier import Point
    from optpipe_compiler.study.sweep import Sweep

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#555555")
"""Paul Tol's bright palette, which the colour-blind can tell apart; marks differ in form as well."""
WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 80, 210, 46, 62
MARK = 4.5
LABEL = 15
"""Least distance of two labels."""
LETTER = 6
"""Width of a letter, on average."""


@dataclass(frozen=True)
class Scale:
    """A linear scale from values to pixels, with ticks at round values."""

    low: float
    high: float
    begin: float
    end: float
    step: float

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Return the round values from low to high."""
        first = math.ceil(self.low / self.step - 1e-9)
        return [n * self.step for n in range(first, math.floor(self.high / self.step + 1e-9) + 1)]


def render(sweep: Sweep) -> str:
    """Return the picture; caps under which nothing fits are crosses on the axis."""
    tokens = sweep.tokens_per_microbatch
    groups = [list(group) for _, group in groupby(sweep.points, key=lambda point: point.line)]
    caps = [point.mem_bytes for point in sweep.points]
    x = _axis(min(caps, default=0), max(caps, default=1), LEFT, WIDTH - RIGHT)
    shown = [point for point in sweep.points if point.makespan_ns]
    values = [value * (tokens or 1) for point in shown for value in (point.throughput, point.ceiling)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    y = _axis(0.0 if low < high / 2 else low - (high - low) / 4, high, HEIGHT - BOTTOM, TOP)
    width = max([WIDTH, *(WIDTH - RIGHT + 34 + LETTER * len(line(group[0])) for group in groups)])
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
        *_frame(x, y, f"throughput, {unit(tokens)}"),
    ]
    for number, group in enumerate(groups):
        rows += _line(group, number, x, y, tokens)
    rows += _labels(groups, y, tokens, width)
    return "\n".join([*rows, "</svg>"]) + "\n"


def _axis(low: float, high: float, begin: float, end: float) -> Scale:
    """Cover low to high with three to eight round steps."""
    if high <= low:
        low, high = 0.0, 2 * high or 1.0
    rough = (high - low) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = power * min((factor for factor in (1, 2, 5, 10) if factor * power >= rough), default=10)
    return Scale(math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step, begin, end, step)


def _frame(x: Scale, y: Scale, title: str) -> Iterator[str]:
    for value in y.ticks():
        at = y.at(value)
        yield f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#e4e4e4"/>'
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#333">{value:,.6g}</text>'
    bottom = HEIGHT - BOTTOM
    for value in x.ticks():
        at = x.at(value)
        yield f'<line x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 5}" stroke="#333"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 20}" text-anchor="middle" fill="#333">{_size(value)}</text>'
    yield f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" stroke="#333"/>'
    yield f'<text x="{LEFT - 68}" y="24" fill="#333" font-weight="bold">{title}</text>'
    yield (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 18}" text-anchor="middle" fill="#333" '
        'font-weight="bold">memory cap per device</text>'
    )


def _size(value: float) -> str:
    number, _, name = short_bytes(round(value)).partition(" ")
    return f"{float(number):g} {name}"


def _line(group: Sequence[Point], number: int, x: Scale, y: Scale, tokens: int | None) -> Iterator[str]:
    colour, factor = COLOURS[number % len(COLOURS)], tokens or 1
    shown = [point for point in group if point.makespan_ns]
    bound = " ".join(f"{x.at(p.mem_bytes):.1f},{y.at(p.ceiling * factor):.1f}" for p in shown)
    found = " ".join(f"{x.at(p.mem_bytes):.1f},{y.at(p.throughput * factor):.1f}" for p in shown)
    yield f'<polyline points="{bound}" fill="none" stroke="{colour}" stroke-width="1" stroke-dasharray="2 3"/>'
    yield f'<polyline points="{found}" fill="none" stroke="{colour}" stroke-width="2.2" stroke-linejoin="round"/>'
    for point in group:
        at = x.at(point.mem_bytes)
        if point.makespan_ns:
            tip = (
                f"{line(point)}, {short_bytes(point.mem_bytes)}: {rate(point.throughput, tokens)} {unit(tokens)}, "
                f"{show_ns(point.makespan_ns)} per step by {point.method}; at most {rate(point.ceiling, tokens)}"
            )
            yield _mark(number, at, y.at(point.throughput * factor), colour, tip)
        else:
            tip = f"{line(point)}, {short_bytes(point.mem_bytes)}: {point.outcome}"
            yield _cross(at + (number % 5 - 2) * 9, HEIGHT - BOTTOM - 8, colour, tip)


def _mark(number: int, x: float, y: float, colour: str, tip: str) -> str:
    """Return a circle, square, triangle or diamond."""
    form, inner = number % 4, f"<title>{escape(printable(tip))}</title>"
    style = f'fill="{colour}" stroke="white"'
    if form == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{MARK}" {style}>{inner}</circle>'
    offsets = (
        ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        ((0, -1.3), (1.2, 0.9), (-1.2, 0.9)),
        ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
    )[form - 1]
    corners = " ".join(f"{x + a * MARK:.1f},{y + b * MARK:.1f}" for a, b in offsets)
    return f'<polygon points="{corners}" {style}>{inner}</polygon>'


def _cross(x: float, y: float, colour: str, tip: str) -> str:
    path = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
    inner = f"<title>{escape(printable(tip))}</title>"
    return f'<path d="{path}" stroke="{colour}" stroke-width="2" fill="none">{inner}</path>'


def _labels(groups: Sequence[Sequence[Point]], y: Scale, tokens: int | None, width: int) -> Iterator[str]:
    """Yield a label at the end of each line, pushed apart where they would overlap, then what dashes and crosses."""
    ends = []
    for number, group in enumerate(groups):
        shown = [point for point in group if point.makespan_ns]
        value = y.at(shown[-1].throughput * (tokens or 1)) if shown else float(HEIGHT - BOTTOM)
        ends.append((value, number, line(group[-1])))
    top, bottom = float(TOP), float(HEIGHT - BOTTOM)
    below = top - LABEL
    ordered = sorted(ends)
    for position, (value, number, text) in enumerate(ordered):
        room = bottom - LABEL * (len(ordered) - 1 - position)
        below = min(max(value, below + LABEL), max(room, below + LABEL))
        colour = COLOURS[number % len(COLOURS)]
        yield _mark(number, WIDTH - RIGHT + 16, below, colour, text)
        yield f'<text x="{WIDTH - RIGHT + 26}" y="{below + 4:.1f}" fill="#333">{escape(printable(text))}</text>'
    note = "dashed: proven bound"
    if any(not point.makespan_ns for group in groups for point in group):
        note += "; cross: nothing fits, or none was found in time"
    if any(point.outcome == "beyond memory" for group in groups for point in group):
        note += f", or {BEYOND}"
    yield f'<text x="{width - 10}" y="24" text-anchor="end" fill="#333">{note}</text>'
