"""A schedule as one HTML file: a chart to zoom into with what every op waits for, and tables. No network, no server."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING

from optpipe_compiler.documents.units import printable, show_ns
from optpipe_compiler.forecast import analyse
from optpipe_compiler.view.look import for_page
from optpipe_compiler.view.report import tables
from optpipe_compiler.view.report.payload import CAUSES, REASONS, chart, encode

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.view.report.trace import Range

SCRIPTS = ("model.js", "rows.js", "draw.js", "marks.js", "card.js", "point.js")


def best_published(schedule: Schedule) -> str | None:
    """Return the fastest published schedule's name among those that fit; the schedule's own method wins a tie."""
    known = [(b.makespan_ns, name) for name, b in schedule.forecast.baselines.items() if b.fits]
    itself = schedule.forecast.method
    ranked = sorted((time, name != itself, name) for time, name in known if time is not None)
    return ranked[0][2] if ranked else None


def render(schedule: Schedule, published: Schedule | None = None, measured: dict[str, Range] | None = None) -> str:
    """Return the page; `published` is drawn above the schedule, `measured` (op id to times) below its lanes."""
    found, best = analyse(schedule), best_published(schedule)
    charts = [chart(found, _title("this schedule", schedule), measured)]
    if published is not None:
        charts.insert(0, chart(analyse(published), _title("best published", published), None))
    page = {
        "kinds": for_page(),
        "charts": charts,
        "lines": _lines(schedule, best, measured),
        "reasons": list(REASONS.values()),
        "causes": {cause.value: says for cause, says in CAUSES.items()},
    }
    setup = schedule.setup
    parts = {
        "title": tables.plain(
            f"{schedule.provenance.profile}: {setup.devices} devices, {setup.microbatches} microbatches"
        ),
        "subtitle": tables.plain(f"{len(schedule.stages)} stages, planned by {schedule.forecast.method}"),
        "summary": tables.plain(tables.summary(schedule)),
        "figures": tables.figures(schedule, best),
        "tables": tables.tables(found, best, _note(schedule, best, published), measured),
        "data": encode(page),
        "css": _part("page.css"),
        "js": "".join(_part(name) for name in SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def _title(what: str, schedule: Schedule) -> str:
    forecast = schedule.forecast
    idle = f"idle {forecast.bubble_fraction:.1%}"
    return f"{what} ({printable(forecast.method)}): {show_ns(forecast.makespan_ns)}, {idle}"


def _note(schedule: Schedule, best: str | None, published: Schedule | None) -> str:
    """Say what is above the schedule, or how to get it there."""
    if best is None:
        return "No published schedule fits this cap."
    if best == schedule.forecast.method:
        return f"This schedule is {best} itself."
    if published is None:
        return f"The line in the chart is where {best} ends; --profile draws all of it above this schedule."
    return f"{best} is drawn above this schedule."


def _lines(schedule: Schedule, best: str | None, measured: dict[str, Range] | None) -> list[dict[str, object]]:
    """Return the chart's vertical lines from left to right; a bound on one device's span is no moment of the chart."""
    forecast = schedule.forecast
    lines = [(forecast.makespan_ns, "this schedule", False)]
    if best is not None and best != forecast.method:
        lines.append((forecast.baselines[best].makespan_ns or 0, f"best published, {best}", True))
    if measured is not None:
        lines.append((max(end for _, end in measured.values()), "measured", True))
    if forecast.objective == "makespan":
        lines.append((forecast.lower_bound_ns, f"proven bound, {forecast.bound}", True))
    return [
        {"at": at, "label": f"{printable(label)}: {show_ns(at)}", "dashed": dashed}
        for at, label, dashed in sorted(lines)
    ]


def _part(name: str) -> str:
    return files("optpipe_compiler.view.report").joinpath(name).read_text(encoding="utf-8")
