"""A schedule as one HTML file: a chart to zoom into with what every op waits for, and tables. No network, no server."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING

from optpipe_compiler.documents.units import counted, printable, show_ns
from optpipe_compiler.forecast import analyse
from optpipe_compiler.view.baselines import OTHERS, is_itself, whose
from optpipe_compiler.view.baselines import best as best_of
from optpipe_compiler.view.look import HELD, IDLE, for_page
from optpipe_compiler.view.report import tables
from optpipe_compiler.view.report.payload import REASONS, chart, encode
from optpipe_compiler.view.summary import units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.view.report.trace import Measured, TraceSwap

SCRIPTS = ("model.js", "rows.js", "draw.js", "memory.js", "marks.js", "card.js", "range.js", "point.js", "controls.js")


def render(
    schedule: Schedule,
    baselines: Sequence[Schedule] = (),
    measured: Measured | None = None,
    swaps: Sequence[TraceSwap] = (),
    names: Sequence[str] = (),
) -> str:
    """Return the page: the schedule first, `measured` in it, and below it one of `baselines`.

    The reader chooses which; the first is shown at the beginning. `swaps` of the run get a table. `names` are those of
    the layers, where they are known: what an op runs may be a half of a block or a part of the head.
    """
    found = analyse(schedule)
    ran = None if measured is None else measured.ran
    charts = [chart(found, printable(schedule.forecast.method), _title("this schedule", schedule), ran)]
    for other in baselines:
        name = other.forecast.method
        title = whose(schedule, name) if name in schedule.forecast.baselines else name
        charts.append(chart(analyse(other), printable(name), _title("baseline", other, title), None))
    page = {
        "kinds": for_page(),
        "charts": charts,
        "lines": _lines(schedule, measured),
        "reasons": list(REASONS.values()),
        "causes": {cause.value: {"says": look.words, "colour": look.colour} for cause, look in IDLE.items()},
        "holders": {name: {"says": look.words, "colour": look.colour} for name, look in HELD.items()},
        "microbatches": schedule.setup.microbatches,
        "names": list(map(printable, names)),
    }
    setup = schedule.setup
    drawn = [other.forecast.method for other in baselines]
    parts = {
        "title": tables.plain(
            f"{schedule.provenance.profile}: {counted(setup.devices, 'device')}, "
            f"{counted(setup.microbatches, 'microbatch')}{units(schedule)}"
        ),
        "subtitle": tables.plain(f"{counted(len(schedule.stages), 'stage')}, planned by {schedule.forecast.method}"),
        "summary": tables.plain(tables.summary(schedule)),
        "figures": tables.figures(found),
        "idle": tables.idle(found),
        "tables": tables.tables(found, drawn, measured, swaps),
        "data": encode(page),
        "css": _part("page.css"),
        "js": "".join(_part(name) for name in SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def _title(what: str, schedule: Schedule, name: str | None = None) -> str:
    forecast = schedule.forecast
    idle = f"idle {forecast.bubble_fraction:.1%}"
    return f"{what} ({printable(name or forecast.method)}): {show_ns(forecast.makespan_ns)}, {idle}"


def _lines(schedule: Schedule, measured: Measured | None) -> list[dict[str, object]]:
    """Return the chart's vertical lines from left to right; a bound on one device's span is no moment of the chart."""
    forecast = schedule.forecast
    lines = [(forecast.makespan_ns, "this schedule", False)]
    best = {
        name: what
        for what, name in (("best of papers and stock", best_of(schedule, OTHERS)), ("best of all", best_of(schedule)))
    }
    for name, what in best.items():
        if name is not None and not is_itself(schedule, name):
            lines.append((forecast.baselines[name].makespan_ns or 0, f"{what}, {name}", True))
    if measured is not None:
        lines.append((measured.end_ns, "measured", True))
    if forecast.objective == "makespan":
        lines.append((forecast.lower_bound_ns, f"proven bound, {forecast.bound}", True))
    return [
        {"at": at, "label": f"{printable(label)}: {show_ns(at)}", "dashed": dashed}
        for at, label, dashed in sorted(lines)
    ]


def _part(name: str) -> str:
    return files("optpipe_compiler.view.report").joinpath(name).read_text(encoding="utf-8")
