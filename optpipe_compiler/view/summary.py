"""What `compile` and `show` say about a schedule: result, proof, comparison, devices, assumptions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec import UnsetType
from rich.console import Group
from rich.table import Table
from rich.text import Text

from optpipe_compiler.documents.units import (
    counted,
    printable,
    short_bytes,
    show_bytes,
    show_hosts,
    show_layers,
    show_ns,
)
from optpipe_compiler.forecast import Cause, analyse
from optpipe_compiler.forecast.links import link_loads
from optpipe_compiler.view.baselines import OTHERS, best, faster, kind, missing, ranked, whose
from optpipe_compiler.view.look import BAR_COLOUR

if TYPE_CHECKING:
    from rich.console import RenderableType

    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.forecast import Analysis
    from optpipe_compiler.forecast.links import LinkLoad

SHOWN = 6
"""Baselines that the summary lists; the file has all."""
NAMED = 2
"""Resources that a cause of idling lists."""
BAR = 12
BOUNDS = {
    "device-work": "the busiest device's work",
    "head-and-work": "a device's work and the way to it",
    "round-trip": "a microbatch's way there and back",
    "fill-and-drain": "what memory and link let a device do at its two ends",
    "slots": "how many whole activations fit at a time",
    "memory-time": "bytes x time under the cap",
    "one-by-one": "a whole activation leaves no room beside it",
    "resources": "compute, memory and host link",
    "cp-sat": "exhaustive search",
}
MEANINGS = {
    Cause.FILL: "the pipeline fills",
    Cause.DRAIN: "the pipeline empties",
    Cause.SLACK: "later than anything asks for",
}


def render(schedule: Schedule) -> RenderableType:
    """Return the whole summary of a schedule."""
    return summary(analyse(schedule))


def summary(analysis: Analysis) -> RenderableType:
    """Return the whole summary of an analysed schedule."""
    schedule = analysis.schedule
    return Group(
        _headline(schedule), _bubble(analysis), _comparison(schedule), _devices(analysis), _assumptions(schedule)
    )


def counts(schedule: Schedule) -> Counter[str]:
    """Return how many ops of each kind the schedule has."""
    return Counter(op.name for device in schedule.devices for op in device.ops)


def selective_layers(schedule: Schedule) -> list[int]:
    """Return the layers with selective recompute, in order."""
    return [layer for stage in schedule.stages for layer in stage.selective_layers]


def _headline(schedule: Schedule) -> Table:
    forecast, setup = schedule.forecast, schedule.setup
    table = Table.grid(padding=(0, 2))
    time = Text(show_ns(forecast.makespan_ns), style="bold")
    time.append(f" per step by {printable(forecast.method)}", style="not bold")
    if forecast.objective != "makespan":
        time.append(f"; {forecast.objective} {show_ns(forecast.value_ns)}", style="not bold")
    argument = printable(forecast.bound)
    bound = f"{show_ns(forecast.lower_bound_ns)}, {BOUNDS.get(argument, argument)} ({argument})"
    sizes = {"device": setup.devices, "stage": len(schedule.stages), "microbatch": setup.microbatches}
    size = ", ".join(counted(number, name) for name, number in sizes.items()) + units(schedule)
    kinds = (("backward", "fused backward"), ("offload", "offload"), ("recompute", "recompute"))
    ops_of = counts(schedule)
    ops = ", ".join([f"{ops_of['backward_weight']} split", *(counted(ops_of[name], word) for name, word in kinds)])
    table.add_row("makespan", time)
    table.add_row("proven bound", bound)
    table.add_row("gap", f"{forecast.gap:.2%}: {forecast.outcome}")
    for label, name in (("best of all", best(schedule)), ("papers, stock", best(schedule, OTHERS))):
        if name is not None:
            table.add_row(label, printable(f"{whose(schedule, name)}: this is {faster(schedule, name)}"))
    table.add_row("size", size)
    table.add_row("ops", ops)
    if layers := selective_layers(schedule):
        table.add_row(
            "selective", f"norms and activations of layers {show_layers(layers)} recomputed in their backward"
        )
    table.add_row("memory", _fullest(schedule))
    for first, second in link_sentences(schedule):
        table.add_row("host links", first)
        table.add_row("", second)
    return table


def units(schedule: Schedule) -> str:
    """Say into how many slices microbatches are cut, and how long they are."""
    units = schedule.setup.units
    if isinstance(units, UnsetType):
        return ""
    lengths = sorted({cuts[-1] for cuts in units.cuts})
    tokens = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return f" of {tokens} tokens" + (f" in {schedule.setup.slices} slices" if schedule.setup.slices > 1 else "")


def link_sentences(schedule: Schedule) -> list[tuple[str, str]]:
    """Say k of each host link, links alike together, and what offloading over it does: two lines each.

    Nothing where the plan was not to offload.
    """
    if schedule.provenance.options.get("offload") is False or schedule.setup.host_cap_bytes == 0:
        return []
    alike: dict[tuple[object, ...], list[LinkLoad]] = {}
    for one in link_loads(schedule):
        alike.setdefault((one.round_trip_ns, one.compute_ns, one.load, one.share, len(one.devices)), []).append(one)
    return [_link(same, is_one_of_several=len(alike) > 1) for same in alike.values()]


def _link(same: list[LinkLoad], *, is_one_of_several: bool) -> tuple[str, str]:
    one, behind = same[0], len(same[0].devices)
    of = f"{len(same)} of {behind} device{'s' if behind > 1 else ''}"
    if is_one_of_several:
        of += f" ({'; '.join(', '.join(map(str, each.devices)) for each in same)})"
    words = {
        "free": "offload is free",
        "fits": "offload fits the link",
        "pays": f"offload pays, for {1 / one.load:.0%} of the activations",
        "does not pay": "offload does not pay",
    }
    trip = f"round trip {show_ns(one.round_trip_ns)}, compute {show_ns(one.compute_ns)}"
    taken = f", copies take {one.share:.0%} of their time from compute" if one.share else ""
    busy = f"busy {one.load:.0%} of the time" if one.load < 10 else f"{one.load:,.0f} times the time of compute"
    said = f"{words[one.verdict]} (all of them: {busy}{taken})"
    return f"{of}: k {one.k:.2f} ({trip})", said


def _fullest(schedule: Schedule) -> str:
    device = max(schedule.devices, key=lambda one: one.peak_bytes, default=None)
    cap = schedule.setup.cap_bytes
    if device is None or not cap:
        return "no cap"
    share = device.peak_bytes / cap
    said = "less than 1%" if 0 < share < 0.005 else f"at most {share:.0%}"
    return f"{said} of {short_bytes(cap)} on a device"


def _bubble(analysis: Analysis) -> RenderableType:
    """How much of all device time is idle, split by cause, each with the resources that bind."""
    shares = analysis.shares()
    causes: dict[Cause, list[tuple[str, float]]] = {}
    for (cause, resource), share in shares.items():
        causes.setdefault(cause, []).append((resource, share))
    ranked = sorted(causes.items(), key=lambda one: -sum(share for _, share in one[1]))
    whole = sum(shares.values())
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(justify="right")
    table.add_row("bubble", f"{whole:.2%}", "", "of all device time is idle")
    for cause, parts in ranked:
        share = sum(part for _, part in parts)
        table.add_row(f"  {cause.value}", f"{share:.2%}", _bar(share / whole), _resources(cause, parts))
    return Group(table, Text())


def _bar(share: float) -> Text:
    eighths = round(8 * BAR * share)
    return Text(("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()).ljust(BAR), style=BAR_COLOUR)


def _resources(cause: Cause, parts: list[tuple[str, float]]) -> str:
    """Name what binds; a resource that stands for several is not repeated."""
    if len(parts) == 1 and parts[0][0] == "":
        return MEANINGS[cause]
    shown = [f"{resource.removeprefix('memory of ')} {share:.2%}" for resource, share in parts[:NAMED]]
    more = [f"+{len(parts) - NAMED} more"] if len(parts) > NAMED else []
    return ", ".join(shown + more)


def _comparison(schedule: Schedule) -> RenderableType:
    """The best that fit of papers, stock and compositions, one that does not if none does, and how many are left out.

    The best of papers and stock is among them.
    """
    known = ranked(schedule)
    fitting = sum(row[2].fits for row in known)
    shown = known[: min(SHOWN, max(1, fitting))]
    shown += [row for row in known if row[1] == best(schedule, OTHERS) and row not in shown]
    table = Table(title="baselines, same costs and cap", title_justify="left", box=None, pad_edge=False)
    for column in ("schedule", "kind", "makespan", "peak", "fits", "against this"):
        table.add_column(column, justify="left" if column in ("schedule", "kind") else "right")
    for makespan, name, baseline in shown:
        ratio = makespan / max(1, schedule.forecast.makespan_ns) - 1
        peak = "-" if baseline.peak_bytes is None else short_bytes(baseline.peak_bytes)
        cells = (printable(name), kind(schedule, name), show_ns(makespan), peak)
        table.add_row(*cells, "yes" if baseline.fits else "no", f"{ratio:+.1%} time")
    count = len(schedule.forecast.baselines)
    note = ", ".join([f"{fitting} of {count} fit", f"{len(known) - fitting} do not", *missing(schedule)])
    return Group(table, Text(note, style="dim"))


def _devices(analysis: Analysis) -> Table:
    schedule = analysis.schedule
    note = "R, D: activations that are recomputed, offloaded"
    table = Table(
        title="\ndevices", title_justify="left", caption=note, caption_justify="left", box=None, pad_edge=False
    )
    for column in ("device", "idle", "static", "peak", "of cap", "host", "R", "D"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("layers")
    whole = max(1, analysis.end_ns - analysis.begin_ns)
    for number, device in enumerate(schedule.devices):
        mine = schedule.stages_of(device.device)
        idle = analysis.idle_ns(number) / whole
        table.add_row(
            str(device.device),
            f"{idle:.1%}",
            short_bytes(schedule.static_bytes(device.device) + schedule.setup.reserve_bytes),
            short_bytes(device.peak_bytes),
            f"{device.peak_bytes / schedule.setup.cap_bytes:.0%}" if schedule.setup.cap_bytes else "-",
            short_bytes(device.host_bytes),
            str(sum(op.name == "recompute" for op in device.compute)),
            str(len(device.d2h)),
            " ".join(_range(*stage.layers) for stage in mine),
        )
    return table


def _range(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}-{end - 1}"


def assumptions(schedule: Schedule) -> list[str]:
    """Return in words what the numbers take for granted; what is missing in the profile first."""
    setup = schedule.setup
    held = sum(device.host_bytes for device in schedule.devices)
    host = show_hosts(setup.host_cap_bytes, [cap for _, cap in setup.hosts_or_none])
    together = "" if setup.hosts_or_none else ", all devices together"
    weightless = ["the profile has no static bytes: weights, gradients and optimizer state count 0"]
    order = schedule.pipeline
    passed = [f"the pipeline passes the devices in the order {' '.join(map(str, order))}"]
    return [
        *(passed if order != sorted(order) else []),
        *(weightless if not any(stage.static_bytes for stage in schedule.stages) else []),
        *_free_messages(schedule),
        f"cap per device {show_bytes(setup.cap_bytes)}: covers weights, gradients and optimizer state, a reserve of "
        f"{show_bytes(setup.reserve_bytes)}, activations, messages and what ops need while they run",
        f"host memory for offloads: {host}{together}; this schedule may hold {short_bytes(held)} there"
        if schedule.forecast.links or held
        else "the profile has no host link: nothing is offloaded",
        "the promised peaks hold for every execution that the order and the waits allow, not only at forecast times",
        "a transfer takes the time alone on its link only if none of the other direction overlaps it",
        "microbatches run in order per stage and kind; a stage's activation is kept, recomputed, or offloaded, whole "
        "or its first layers, as many as fit the link; the bound is over such schedules and the placements searched",
    ]


def _free_messages(schedule: Schedule) -> list[str]:
    """Say between which devices that send messages to each other these take no time."""
    owners = {stage.stage: stage.device for stage in schedule.stages}
    longest: dict[tuple[int, int], int] = {}
    for cost in schedule.forecast.stages:
        mine = owners.get(cost.stage)
        for stage, ns in ((cost.stage + 1, cost.send_activation_ns), (cost.stage - 1, cost.send_gradient_ns)):
            peer = owners.get(stage)
            if mine is not None and peer is not None and mine != peer:
                pair = min(mine, peer), max(mine, peer)
                longest[pair] = max(longest.get(pair, 0), ns)
    free = sorted(pair for pair, ns in longest.items() if not ns)
    which = "" if len(free) == len(longest) else " " + ", ".join(f"{first} and {second}" for first, second in free)
    return [f"the profile has no cost of messages between devices{which}: they take no time"] if free else []


def _assumptions(schedule: Schedule) -> Table:
    table = Table.grid(padding=(0, 1))
    table.title, table.title_justify = "\nassumptions", "left"
    for line in assumptions(schedule):
        table.add_row("-", line)
    return table
