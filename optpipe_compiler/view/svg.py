"""The schedule as a self-contained SVG picture: compute and transfer lanes over time, memory against the cap."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from optpipe_compiler.documents.ops import LETTERS
from optpipe_compiler.documents.units import short_bytes, show_ns
from optpipe_compiler.view.look import LOOKS, ink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.documents.ir import Device, Schedule

WIDTH, LEFT, LANE, THIN, GAP = 1200, 70, 26, 7, 12


def render(schedule: Schedule) -> str:
    """Return the picture."""
    forecast = schedule.forecast
    begin = min((min(times.start_ns) for times in forecast.times if times.start_ns), default=0)
    scale = (WIDTH - LEFT - 10) / max(1, forecast.makespan_ns)
    rows: list[str] = []
    top = 34.0
    for device in schedule.devices:
        rows += [f'<text x="4" y="{top + LANE * 0.66:.1f}">device {device.device}</text>']
        rows += [f'<rect x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - 10}" height="{LANE}" fill="#f3f3f3"/>']
        for lane, offset, height in (("compute", 0, LANE), ("d2h", LANE + 2, THIN), ("h2d", LANE + THIN + 3, THIN)):
            rows += _bars(schedule, device, lane, top + offset, height, begin, scale)
        top += LANE + (2 * THIN + 4 if device.d2h else 0) + GAP
    rows += [f'<text x="{LEFT}" y="{top + 8:.1f}">{escape(caption(schedule))}</text>']
    total = top + 20
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total:.0f}" '
        'font-family="sans-serif" font-size="12">'
    )
    background = f'<rect width="{WIDTH}" height="{total:.0f}" fill="white"/>'
    return "\n".join([head, background, *_legend(schedule), *rows, "</svg>"]) + "\n"


def caption(schedule: Schedule) -> str:
    """Return the line below the chart: time, idle share, bound, peak."""
    forecast = schedule.forecast
    peak = max(device.peak_bytes for device in schedule.devices)
    return (
        f"{show_ns(forecast.makespan_ns)} per step, idle {forecast.bubble_fraction:.1%}, "
        f"bound {show_ns(forecast.lower_bound_ns)}; never above {short_bytes(peak)} of "
        f"{short_bytes(schedule.setup.cap_bytes)} per device"
    )


def _legend(schedule: Schedule) -> Iterator[str]:
    present = {op.name for device in schedule.devices for op in (*device.compute, *device.d2h, *device.h2d)}
    x = LEFT
    for name, look in LOOKS.items():
        if name in present:
            text = f"{LETTERS[name]} {look.words}"
            yield (
                f'<rect x="{x}" y="8" width="12" height="12" fill="{look.colour}"/>'
                f'<text x="{x + 16}" y="18">{text}</text>'
            )
            x += 30 + 7 * len(text)


def _bars(
    schedule: Schedule, device: Device, lane: str, top: float, height: float, begin: int, scale: float
) -> Iterator[str]:
    for times in schedule.forecast.times:
        if times.device != device.device or times.lane != lane:
            continue
        for op, start, end in zip(getattr(device, lane), times.start_ns, times.end_ns, strict=True):
            if op.name not in LOOKS or end == start:
                continue
            colour = LOOKS[op.name].colour
            x, width = LEFT + (start - begin) * scale, (end - start) * scale
            yield (
                f'<rect x="{x:.2f}" y="{top:.1f}" width="{max(0.5, width - 0.6):.2f}" height="{height}" '
                f'fill="{colour}"><title>{op.name} stage {op.stage} microbatch {op.microbatch}: '
                f"{show_ns(start)} to {show_ns(end)}</title></rect>"
            )
            label = f"{LETTERS[op.name]}{op.microbatch}"
            if lane == "compute" and width > 8 * len(label):
                middle = x + width / 2
                yield (
                    f'<text x="{middle:.1f}" y="{top + height * 0.66:.1f}" text-anchor="middle" fill="{ink(colour)}" '
                    f'font-size="11" pointer-events="none">{label}</text>'
                )
