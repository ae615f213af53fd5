"""The difference of two schedules in words, for who reviews a change."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from optpipe_compiler.documents.ops import unit_name
from optpipe_compiler.documents.units import counted, enumerated, printable, short_bytes, show_ns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe_compiler.diff.records import Change, Difference, DifferentWaits, Moved, Regrouped, Retimed, Unit, Value
    from optpipe_compiler.documents.ir import Schedule

NAMES = {
    "cap_bytes": "memory cap per device",
    "host_cap_bytes": "host memory cap",
    "reserve_bytes": "reserve per device",
    "peak_bytes": "promised peak",
    "host_bytes": "promised host memory",
    "largest_peak_bytes": "largest promised peak",
    "makespan_ns": "makespan",
    "span_ns": "longest device span",
    "bubble_fraction": "bubble",
    "lower_bound_ns": "proven bound",
    "bound": "argument of the bound",
    "profile_digest": "profile digest",
    "op_overhead_ns": "overhead of an op",
    "compute_permille": "thousandths of a copy's time that compute loses",
}
"""Names that need more than their underscores replaced."""
MOST_DIGITS = 17
"""Of a percentage, behind the point; numbers that are closer are told in full."""
TRUTHS = {"True": "yes", "False": "no"}


def render(difference: Difference, old: str, new: str) -> Text:
    """Return all that changed from the file named `old` to the one named `new`."""
    text = Text(printable(f"{old} -> {new}: "))
    text.append(f"{verdict(difference)}\n", style="bold")
    sections = {
        "setup": _changes(difference.setup),
        "stages": _changes(difference.stages),
        "number of ops": _changes(difference.counts),
        "order": (line for row in difference.moved for line in _moved(row)),
        "memory ops and splits": _regrouped(difference.regrouped),
        "waits": map(_waits, difference.waits),
        "other ends of messages": _changes(difference.peers),
        "promises": _changes(difference.promises),
        "known deliveries": map(_waits, difference.deliveries),
        "forecast": [*_changes(difference.forecast), *map(_retimed, difference.retimed)],
        "baselines": _first(_changes(difference.baselines)),
        "costs of a microbatch, of all stages together where none is named": _changes(difference.costs),
        "host links": _changes(difference.links),
        "origin": _changes(difference.origin),
    }
    lines: Iterable[str]
    for title, lines in sections.items():
        for index, line in enumerate(lines):
            if index == 0:
                text.append(f"\n{title}\n", style="bold")
            text.append(f"  {printable(line)}\n")
    if not difference.comparable:
        text.append("\nThe stages or their devices are others, so ops are not compared one by one.\n", style="dim")
    return text


def render_alone(schedule: Schedule, old: str, new: str, verdict: str) -> Text:
    """Return what a schedule is in two lines, where there is none before it, or after it."""
    forecast, setup = schedule.forecast, schedule.setup
    text = Text(printable(f"{old} -> {new}: "))
    text.append(f"{verdict}\n", style="bold")
    size = f"{counted(setup.devices, 'device')}, {counted(setup.microbatches, 'microbatch')}"
    peak = max((device.peak_bytes for device in schedule.devices), default=0)
    memory = f"at most {short_bytes(peak)} of {short_bytes(setup.cap_bytes)} on a device"
    line = f"  {size}: {show_ns(forecast.makespan_ns)} per step by {forecast.method}, {memory}"
    return text.append(printable(line)).append("\n")


def verdict(difference: Difference) -> str:
    """Return the answer in one line."""
    if difference.identical:
        return "no difference"
    if difference.same_contract:
        return f"only the {_beside_contract(difference)} changed; setup, order, waits and promises are the same"
    parts = {
        "setup": difference.setup,
        "stages": difference.stages,
        "order": difference.moved or not difference.comparable,
        "waits": difference.waits,
        "ends of messages": difference.peers,
        "promises": difference.promises,
    }
    return "changes " + (", ".join(name for name, found in parts.items() if found) or "what `verify` rejects")


UNTIMED = {
    "objective": "objective",
    "lower_bound_ns": "bound",
    "bound": "bound",
    "outcome": "bound",
    "method": "method",
}
"""What the forecast says that is no time of the schedule's."""


def _beside_contract(difference: Difference) -> str:
    """Say which parts differ that no run depends on: the timing alone, where that is among them."""
    said = [UNTIMED.get(change.name, "timing") for change in difference.forecast]
    said += ["timing"] * bool(difference.costs or difference.links or difference.retimed)
    said += ["known deliveries"] * bool(difference.deliveries)
    said += ["baselines"] * bool(difference.baselines) + ["origin"] * bool(difference.origin)
    words = list(dict.fromkeys(said))
    if "timing" in words:
        return "timing"
    return enumerated(words) or "numbers of records, as `verify` rejects them,"


MOST_BASELINES = 6
"""Lines of them; `--json` has all."""


def _first(lines: Iterable[str]) -> Iterator[str]:
    every = list(lines)
    yield from every[:MOST_BASELINES]
    if len(every) > MOST_BASELINES:
        yield f"and {len(every) - MOST_BASELINES} more (all are in --json)"


def _retimed(row: Retimed) -> str:
    return f"device {row.device} {row.lane}: {counted(row.ops, 'op')} at other times"


def _changes(changes: Sequence[Change]) -> Iterator[str]:
    """Yield a line per change, what changed in a column of its own."""
    labels = [f"{change.of}: {_name(change)}" if change.of else _name(change) for change in changes]
    width = max(map(len, labels), default=0)
    for label, change in zip(labels, changes, strict=True):
        old, new = _values(change)
        yield f"{label:<{width}}  {old} -> {new}{_percent(change)}"


def _name(change: Change) -> str:
    plain = change.name.removesuffix("_bytes").removesuffix("_bytes_per_s").removesuffix("_ns").replace("_", " ")
    return NAMES.get(change.name, plain)


def _values(change: Change) -> tuple[str, str]:
    """Return both values rounded, or in full where rounding hides the change."""
    rounded = tuple(_rounded(change.name, value) for value in (change.old, change.new))
    if rounded[0] != rounded[1]:
        return rounded[0], rounded[1]
    if isinstance(change.old, float) and isinstance(change.new, float):
        return _apart(change.old, change.new)
    unit = (
        " B/s"
        if change.name.endswith("_bytes_per_s")
        else " B"
        if change.name.endswith("_bytes")
        else " ns"
        if change.name.endswith("_ns")
        else ""
    )
    return f"{change.old}{unit}", f"{change.new}{unit}"


def _apart(old: float, new: float) -> tuple[str, str]:
    """Return two shares with as few digits as tell them apart."""
    pairs = ((f"{old:.{digits}%}", f"{new:.{digits}%}") for digits in range(2, MOST_DIGITS))
    return next((pair for pair in pairs if pair[0] != pair[1]), (str(old), str(new)))


def _rounded(name: str, value: Value) -> str:
    if value is None:
        return "none"
    if isinstance(value, int) and name.endswith("_bytes"):
        return short_bytes(value)
    if isinstance(value, int) and name.endswith("_bytes_per_s"):
        return f"{short_bytes(value)}/s"
    if isinstance(value, int) and name.endswith("_ns"):
        return show_ns(value)
    return f"{value:.1%}" if name == "bubble_fraction" else TRUTHS.get(str(value), str(value))


def _percent(change: Change) -> str:
    old, new, is_size = change.old, change.new, change.name.endswith(("_bytes", "_bytes_per_s", "_ns"))
    return f" ({new / old - 1:+.1%})" if is_size and isinstance(old, int) and isinstance(new, int) and old else ""


def _moved(row: Moved) -> tuple[str, str]:
    parts = [f"{row.moved} of {row.ops} ops moved"] if row.moved else []
    parts += [f"{row.added} added"] if row.added else []
    parts += [f"{row.removed} removed"] if row.removed else []
    first = f"{row.new or 'nothing'} instead of {row.old or 'nothing'}"
    return f"device {row.device} {row.lane}: {', '.join(parts)}", f"  first at position {row.position}: {first}"


def _regrouped(rows: Iterable[Regrouped]) -> Iterator[str]:
    """Say an offload and its reload, which always change together, in one line."""
    for row in rows:
        for found, added in ((row.added, True), (row.removed, False)):
            if found and row.what == "split":
                yield f"stage {row.stage}: backward {'split' if added else 'fused'} for {_numbers(found)}"
            elif found and row.what != "reload":
                what = "offload and reload" if row.what == "offload" else row.what
                where = f"stage {row.stage}, {_layers(*row.layers)}" if row.layers else f"stage {row.stage}"
                yield f"{where}: {what} {'added' if added else 'removed'} for {_numbers(found)}"


def _layers(first: int, end: int) -> str:
    return f"layer {first}" if end == first + 1 else f"layers {first}-{end - 1}"


def _numbers(units: list[Unit]) -> str:
    """Return `microbatches 0-3, 5` for [0, 1, 2, 3, 5], and `slices 0.1-0.2, 1.0` for [(0, 1), (0, 2), (1, 0)]."""

    def row(pair: tuple[int, Unit]) -> Unit:
        """Return what units have in common that follow each other: in one microbatch, slices."""
        index, unit = pair
        return unit - index if isinstance(unit, int) else (unit[0], unit[1] - index)

    def name(unit: Unit) -> str:
        return unit_name(unit) if isinstance(unit, int) else unit_name(*unit)

    runs = [[unit for _, unit in run] for _, run in groupby(enumerate(units), row)]
    shown = ", ".join(name(run[0]) if len(run) == 1 else f"{name(run[0])}-{name(run[-1])}" for run in runs)
    one, several = ("microbatch", "microbatches") if isinstance(units[0], int) else ("slice", "slices")
    return f"{several if len(units) > 1 else one} {shown}"


def _waits(row: DifferentWaits) -> str:
    return f"device {row.device}: {row.added} added, {row.removed} removed"
