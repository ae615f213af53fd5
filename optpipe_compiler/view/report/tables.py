"""The parts of the page that are text: figures in the header, and tables that need no JavaScript."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING

from optpipe_compiler.documents.units import counted, printable, short_bytes, show_layers, show_ns
from optpipe_compiler.view.baselines import OTHERS, best, is_itself, kind, missing, ranked, whose
from optpipe_compiler.view.look import IDLE
from optpipe_compiler.view.summary import counts, selective_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optpipe_compiler.documents.ir import Baseline, Schedule
    from optpipe_compiler.forecast import Analysis, Cause
    from optpipe_compiler.view.report.trace import Measured, TraceSwap


def plain(text: str) -> str:
    """Return text as HTML, with characters that could reorder or hide others as escapes."""
    return escape(printable(text))


def figures(found: Analysis) -> str:
    """Return the header's list of what matters most."""
    schedule = found.schedule
    forecast, setup = schedule.forecast, schedule.setup
    peak = max((device.peak_bytes for device in schedule.devices), default=0)
    host = sum(device.host_bytes for device in schedule.devices)
    rows = [
        ("makespan", show_ns(forecast.makespan_ns), ""),
        (
            "proven bound" if forecast.objective == "makespan" else "proven bound on the span",
            show_ns(forecast.lower_bound_ns),
            forecast.bound,
        ),
        ("gap", f"{forecast.gap:.2%}", forecast.outcome),
        ("idle (bubble)", f"{forecast.bubble_fraction:.1%}", _most(found)),
        ("highest peak", short_bytes(peak), f"promised, of {short_bytes(setup.cap_bytes)}"),
    ]
    if host:
        cap = "" if setup.host_cap_bytes is None else f", of {short_bytes(setup.host_cap_bytes)}"
        rows.append(("host memory", short_bytes(host), f"promised{cap}"))
    for label, name in (("best of all", best(schedule)), ("best of papers and stock", best(schedule, OTHERS))):
        if name is not None:
            makespan = forecast.baselines[name].makespan_ns or 0
            rows.append((label, show_ns(makespan), f"{whose(schedule, name)}, {_against(makespan, schedule)}"))
    return "\n".join(
        f"<div><dt>{plain(name)}</dt><dd>{plain(value)} <small>{plain(note)}</small></dd></div>"
        for name, value, note in rows
    )


def _most(found: Analysis) -> str:
    """Name the two causes that cost the most."""
    lost: dict[str, float] = {}
    for (cause, _), share in found.shares().items():
        lost[cause.value] = lost.get(cause.value, 0.0) + share
    most = sorted(lost.items(), key=lambda one: -one[1])[:2]
    return ", ".join(f"{cause} {share:.1%}" for cause, share in most)


def summary(schedule: Schedule) -> str:
    """Return the schedule in one sentence, for those who do not see the chart."""
    forecast, setup = schedule.forecast, schedule.setup
    return (
        f"Gantt chart of {counted(setup.devices, 'device')}, {counted(len(schedule.stages), 'stage')} and "
        f"{counted(setup.microbatches, 'microbatch')}: "
        f"{show_ns(forecast.makespan_ns)} per step, idle {forecast.bubble_fraction:.1%}, proven bound "
        f"{show_ns(forecast.lower_bound_ns)}. The tables that follow have the same in numbers."
    )


def tables(found: Analysis, drawn: Sequence[str], measured: Measured | None, swaps: Sequence[TraceSwap] = ()) -> str:
    """Return the tables beside the chart, `drawn` names the baselines that the chart can show."""
    schedule = found.schedule
    parts = [_baselines(schedule, drawn), _devices(found), _promises(schedule)]
    if swaps:
        parts.insert(0, _swaps(schedule, swaps))
    return "\n".join(parts if measured is None else [_measured(found, measured), *parts])


def _swaps(schedule: Schedule, swaps: Sequence[TraceSwap]) -> str:
    """Return a row for each change to another schedule while the run went on."""
    rows = [
        (
            "best" if swap.digest == schedule.digest else "",
            [
                f"{swap.step} (back)" if swap.undoes else str(swap.step),
                plain(swap.digest[:15]),
                f"{show_ns(swap.forecast_before_ns)} to {show_ns(swap.forecast_after_ns)}",
                f"{show_ns(swap.measured_before_ns)} to "
                + ("-" if swap.measured_after_ns is None else show_ns(swap.measured_after_ns)),
                show_ns(swap.swap_ns),
                str(swap.moved_layers),
            ],
        )
        for swap in swaps
    ]
    names = ["first step", "schedule", "forecast", "measured", "stood still", "layers moved"]
    text = (
        "Swaps while the run went on; bold: the schedule of this page. Steps count from 0. Back: steps were longer "
        "with the last schedule, and the one before it went on."
    )
    return _block("Swaps", names, rows, text, opened=True)


def _measured(found: Analysis, measured: Measured) -> str:
    """Compare the time of all ops of a kind, forecast and measured, over the ops that the trace has."""
    forecast: Counter[str] = Counter()
    took: Counter[str] = Counter()
    for item in found.items:
        if item.op.id in measured.ran:
            begin, end = measured.ran[item.op.id]
            forecast[item.op.name] += item.end_ns - item.begin_ns
            took[item.op.name] += end - begin
    rows = [("", name, forecast[name], took[name]) for name in took]
    rows.append(("best", _step(measured), _planned_ns(found, measured), measured.span_ns))
    cells = [(look, [name, show_ns(planned), show_ns(ran), _ratio(ran, planned)]) for look, name, planned, ran in rows]
    whose = "all devices together" if measured.devices is None else f"of {_devices_of(measured.devices)} alone"
    text = f"Sums over the {len(measured.ran)} of {len(found.items)} ops that the trace has, {whose}."
    if measured.time_scales:
        scales = " and ".join(f"{scale:.3g}" for scale in measured.time_scales)
        text += f" Measured times are divided by the time scale of their run, {scales}."
    return _block("Forecast and measured", ["ops", "forecast", "measured", "ratio"], cells, text, opened=True)


def _step(measured: Measured) -> str:
    return "step" if measured.devices is None else f"step of {_devices_of(measured.devices)}"


def _devices_of(numbers: Sequence[int]) -> str:
    return f"device{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _planned_ns(found: Analysis, measured: Measured) -> int:
    """Return from when to when the measured devices are forecast to run."""
    items = [item for item in found.items if measured.devices is None or item.device in measured.devices]
    return max(item.end_ns for item in items) - min(item.begin_ns for item in items)


def _ratio(measured_ns: int, forecast_ns: int) -> str:
    return f"{measured_ns / forecast_ns:.2f} x" if forecast_ns else "-"


def _baselines(schedule: Schedule, drawn: Sequence[str]) -> str:
    known, marked = ranked(schedule), (best(schedule), best(schedule, OTHERS))
    rows = []
    for makespan, name, baseline in known:
        look = "best" if name in marked else "" if baseline.fits else "off"
        cells = [plain(name), kind(schedule, name), show_ns(makespan), _against(makespan, schedule), _peak(baseline)]
        if name in drawn:
            cells[0] = f'<button type="button" data-chart="{drawn.index(name) + 1}">{cells[0]}</button>'
        rows.append((look, cells))
    notes = [
        _how_to_draw(schedule, drawn),
        "Bold: the best of all, and of papers and stock. Grey: does not fit the cap.",
    ]
    if others := missing(schedule):
        notes.append(f"Not in the table: {', '.join(others)}.")
    columns = ["schedule", "kind", "makespan", "to this", "peak"]
    return _block("Baselines, same costs", columns, rows, plain(" ".join(notes)), opened=True)


def _how_to_draw(schedule: Schedule, drawn: Sequence[str]) -> str:
    """Say which baselines the chart can show, and how to get more of them."""
    found = best(schedule)
    if found is None:
        return "None fits this cap."
    if drawn:
        return (
            "A name that is underlined is drawn below this schedule when clicked; report --baseline NAME adds others."
        )
    if is_itself(schedule, found):
        return f"This schedule is {found} itself."
    return f"The line in the chart is where {found} ends; report --profile draws all of it below this schedule."


def idle(found: Analysis) -> str:
    """Show the parts of devices x makespan lost by cause, and the resource that binds most of each."""
    lost: Counter[Cause] = Counter()
    binding: dict[Cause, Counter[str]] = {}
    for gap in found.gaps:
        lost[gap.cause] += gap.length_ns
        binding.setdefault(gap.cause, Counter())[gap.resource] += gap.length_ns
    whole = max(1, (found.end_ns - found.begin_ns) * len(found.schedule.devices))
    rows = []
    for cause, time in lost.most_common():
        (resource, most), others = binding[cause].most_common(1)[0], len(binding[cause]) - 1
        where = f"{resource} ({most / time:.0%})" if others else resource
        swatch = f'<i style="background:{IDLE[cause].colour}"></i>'
        name = f'<button type="button" class="cause" data-cause="{cause.value}">{swatch}{cause.value}</button>'
        rows.append(("", [name, f"{time / whole:.2%}", plain(where) or IDLE[cause].words]))
    note = "Parts of devices x makespan. A cause that is clicked shows its gaps in the chart, the longest first."
    if not rows:
        return _block("Where the idle time goes", ["cause"], [("", ["No device idles."])], "", opened=True)
    return _block("Where the idle time goes", ["cause", "share", "what binds most of it"], rows, note, opened=True)


def _devices(found: Analysis) -> str:
    schedule = found.schedule
    rows = []
    for device in schedule.devices:
        mine = schedule.stages_of(device.device)
        idle = found.idle_ns(device.device) / max(1, found.end_ns - found.begin_ns)
        layers = ", ".join(
            f"{first}-{end - 1}" if end > first + 1 else f"{first}" for first, end in (s.layers for s in mine)
        )
        host = short_bytes(device.host_bytes) if device.host_bytes else "-"
        rows.append(("", [str(device.device), layers, short_bytes(device.peak_bytes), host, f"{idle:.1%}"]))
    return _block("Devices", ["device", "layers", "promised peak", "host", "idle"], rows, "")


def _selective(schedule: Schedule) -> list[str]:
    layers = selective_layers(schedule)
    if not layers:
        return []
    return [f"Selective recompute: norms and activations of layers {show_layers(layers)} again in their backward."]


def _promises(schedule: Schedule) -> str:
    setup, ops = schedule.setup, counts(schedule)
    lines = [
        f"{counted(ops['offload'], 'offload')}, {counted(ops['recompute'], 'recomputation')}, "
        f"{ops['backward_weight']} split and {counted(ops['backward'], 'fused backward')}.",
        *_selective(schedule),
        f"The cap of {short_bytes(setup.cap_bytes)} covers weights, gradients, optimizer state, a reserve of "
        f"{short_bytes(setup.reserve_bytes)}, activations, messages and what ops need while they run.",
        "Promised peaks hold for every execution that order and waits allow; the curves show the forecast one.",
        f"Profile {schedule.provenance.profile}, {schedule.provenance.compiler}, {schedule.digest[:19]}.",
    ]
    items = "".join(f"<li>{plain(line)}</li>" for line in lines)
    return f"<details><summary>What is promised</summary><ul>{items}</ul></details>"


def _block(
    title: str, columns: Sequence[str], rows: Iterable[tuple[str, list[str]]], note: str, *, opened: bool = False
) -> str:
    """Return a table that can be folded; cells and note are HTML, rows come with their class."""
    head = "".join(f'<th scope="col">{plain(name)}</th>' for name in columns)
    body = "\n".join(
        f'<tr class="{look}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" for look, cells in rows
    )
    below = f'<p class="note">{note}</p>' if note else ""
    return (
        f"<details{' open' if opened else ''}><summary>{plain(title)}</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>{below}</details>"
    )


def _against(makespan: int, schedule: Schedule) -> str:
    return f"{makespan / max(1, schedule.forecast.makespan_ns) - 1:+.1%}"


def _peak(baseline: Baseline) -> str:
    return "-" if baseline.peak_bytes is None else short_bytes(baseline.peak_bytes)
