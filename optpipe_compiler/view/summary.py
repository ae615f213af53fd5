"""What `compile` and `show` say about a schedule: result, proof, comparison, devices, assumptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from optpipe_compiler.units import short_bytes, show_bytes, show_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from optpipe_compiler.ir import Device, Op, Schedule

SHOWN = 6
"""Published schedules that the summary lists; the file has all."""
LETTERS = {
    "forward": "F",
    "backward_input": "I",
    "backward_weight": "W",
    "backward": "B",
    "recompute": "R",
}


def render(schedule: Schedule) -> RenderableType:
    """Return the whole summary."""
    return Group(_headline(schedule), _comparison(schedule), _devices(schedule), _assumptions(schedule))


def gap(schedule: Schedule) -> float:
    """Return (value - bound) / value for the objective's value."""
    value = reached(schedule)
    return 1 - schedule.forecast.lower_bound_ns / value if value else 0.0


def reached(schedule: Schedule) -> int:
    """Return the value of the objective in ns."""
    forecast = schedule.forecast
    return forecast.makespan_ns if forecast.objective == "makespan" else forecast.span_ns


def count(schedule: Schedule, name: str) -> int:
    """Return how many ops of one kind the schedule has."""
    return sum(op.name == name for device in schedule.devices for lane in _lanes(device) for op in lane)


def _lanes(device: Device) -> tuple[Sequence[Op], ...]:
    return device.compute, device.d2h, device.h2d


def _headline(schedule: Schedule) -> Text:
    forecast, setup = schedule.forecast, schedule.setup
    text = Text()
    text.append(f"{show_ns(forecast.makespan_ns)}", style="bold")
    text.append(f" per step by {forecast.method}: {setup.devices} devices, {len(schedule.stages)} stages, ")
    text.append(f"{setup.microbatches} microbatches; idle {forecast.bubble_fraction:.1%}\n")
    text.append(f"{forecast.objective} {show_ns(reached(schedule))}, proven bound ")
    text.append(f"{show_ns(forecast.lower_bound_ns)} ({forecast.bound}), gap {gap(schedule):.2%}: {forecast.outcome}\n")
    text.append(f"{count(schedule, 'offload')} offloads, {count(schedule, 'recompute')} recomputes, ")
    text.append(f"{count(schedule, 'backward_weight')} split and {count(schedule, 'backward')} fused backwards\n")
    return text


def _comparison(schedule: Schedule) -> RenderableType:
    """The best published schedules that fit, one that does not if none does, and how many are left out."""
    known = [(b.makespan_ns, b, name) for name, b in schedule.forecast.baselines.items() if b.makespan_ns is not None]
    ranked = sorted(known, key=lambda row: (not row[1].fits, row[0], row[2]))
    fitting = sum(row[1].fits for row in ranked)
    shown = ranked[: min(SHOWN, max(1, fitting))]
    table = Table(title="published schedules, same costs and cap", title_justify="left", box=None, pad_edge=False)
    for column in ("schedule", "makespan", "peak", "fits", "against this"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for makespan, baseline, name in shown:
        ratio = makespan / max(1, schedule.forecast.makespan_ns) - 1
        peak = "-" if baseline.peak_bytes is None else short_bytes(baseline.peak_bytes)
        table.add_row(name, show_ns(makespan), peak, "yes" if baseline.fits else "no", f"{ratio:+.1%} time")
    count = len(schedule.forecast.baselines)
    note = f"{fitting} of {count} published schedules fit, {len(known) - fitting} do not, "
    return Group(table, Text(note + f"{count - len(known)} are not defined here or were not tried", style="dim"))


def _devices(schedule: Schedule) -> Table:
    table = Table(title="\ndevices", title_justify="left", box=None, pad_edge=False)
    for column in (
        "device",
        "layers",
        "static",
        "promised peak",
        "of cap",
        "host",
        "F",
        "I",
        "W",
        "B",
        "R",
        "off",
        "re",
    ):
        table.add_column(column, justify="right")
    for device in schedule.devices:
        mine = [stage for stage in schedule.stages if stage.device == device.device]
        names = [op.name for op in device.compute]
        table.add_row(
            str(device.device),
            " ".join(_range(*stage.layers) for stage in mine),
            short_bytes(sum(stage.static_bytes for stage in mine) + schedule.setup.reserve_bytes),
            short_bytes(device.peak_bytes),
            f"{device.peak_bytes / schedule.setup.cap_bytes:.0%}" if schedule.setup.cap_bytes else "-",
            short_bytes(device.host_bytes),
            *(str(names.count(name)) for name in LETTERS),
            str(len(device.d2h)),
            str(len(device.h2d)),
        )
    return table


def _range(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}-{end - 1}"


def _assumptions(schedule: Schedule) -> Text:
    setup = schedule.setup
    host = "unlimited" if setup.host_cap_bytes is None else show_bytes(setup.host_cap_bytes)
    lines = [
        f"cap per device {show_bytes(setup.cap_bytes)}: covers weights, gradients and optimizer state, a reserve of "
        f"{show_bytes(setup.reserve_bytes)}, activations, messages and what ops need while they run",
        f"host memory for offloads: {host}, all devices together",
        "the promised peaks hold for every execution that the order and the waits allow, not only at forecast times",
        "a transfer takes the time alone on its link only if none of the other direction overlaps it",
        "microbatches run in order per stage and kind; a stage's activation is kept, offloaded or recomputed whole; "
        "the bound is over such schedules and the placements searched",
    ]
    return Text("\nassumptions\n" + "\n".join(f"  - {line}" for line in lines))
