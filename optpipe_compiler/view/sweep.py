"""A sweep for people: progress, a table of all points, and what follows from them in sentences."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from optpipe_compiler.documents.units import (
    RAISE,
    SMALLEST,
    counted,
    exact_cap,
    printable,
    short_bytes,
    show_bytes,
    show_ns,
)
from optpipe_compiler.view.bar import Bar, description_column

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, RenderableType

    from optpipe_compiler.study.frontier import (
        BestDevices,
        BestGpu,
        CheapestMemory,
        EnoughMicrobatches,
        LeastCap,
        Point,
    )
    from optpipe_compiler.study.sweep import Sweep

BEYOND = "more than the GPU has"
OF_MOST, GAP, REMARKS = "of most", "gap", ""
"""Titles of columns."""


class SweepBar(Bar):
    """Points done and the latest one; away from a terminal a line per point."""

    def __init__(self, console: Console, done: int, total: int) -> None:
        columns = (TextColumn("points"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(console, *columns, description_column(), description="", total=total)
        self.bar.update(self.task, completed=done)

    def update(self, point: Point) -> None:
        """Count one more."""
        said = {"infeasible": "nothing fits", "beyond memory": BEYOND}.get(point.outcome, point.outcome)
        text = f"{place(point)}: {said if point.makespan_ns is None else show_ns(point.makespan_ns)}"
        self.bar.update(self.task, advance=1, description=text)
        self.say(text)


def place(point: Point) -> str:
    """Return where in the grid the point is."""
    return f"{line(point)}, {short_bytes(point.mem_bytes)}"


def line(point: Point) -> str:
    """Return which line of the picture the point is on."""
    return f"{_devices(point.devices, point.gpu)}, {counted(point.microbatches, 'microbatch')}"


def rate(microbatches_per_s: float, tokens: int | None) -> str:
    """Return a throughput in the unit of `unit`."""
    value = microbatches_per_s * (tokens or 1)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def unit(tokens: int | None) -> str:
    """Return the unit of throughput: tokens where the costs are of a model."""
    return "microbatches/s" if tokens is None else "tokens/s"


def table(sweep: Sweep, width: int) -> RenderableType:
    """Return a row per point, a block per number of devices and microbatches; a table per GPU, under its name.

    Where `width` is small, remarks take several lines, and columns are left out that others imply.
    """
    tokens = sweep.tokens_per_microbatch
    groups = {gpu: list(points) for gpu, points in groupby(sweep.points, key=lambda point: point.gpu)}
    columns = {gpu: _columns(points, tokens) for gpu, points in groups.items()}
    for title in (OF_MOST, _throughput(tokens), GAP):
        if any(
            _room(one, width) < max(map(len, " ".join(one[REMARKS]).split()), default=0) for one in columns.values()
        ):
            for one in columns.values():
                del one[title]
    parts: list[RenderableType] = []
    for gpu, one in columns.items():
        if gpu is not None:
            parts.append(Text("\n" * bool(parts) + printable(gpu), style="bold"))
        parts.append(_table(one, width))
    return Group(*parts)


def _throughput(tokens: int | None) -> str:
    return "micro-\nbatches/s" if tokens is None else "tokens/s"


def _columns(points: Sequence[Point], tokens: int | None) -> dict[str, list[str]]:
    """Return the cells of each column by its title; blocks are apart by an empty row."""
    best = {point.line: point.throughput for point in points if point.makespan_ns}  # the last has the largest cap
    is_cut = any((point.slices or 1) > 1 for point in points)
    microbatches = "micro-\nbatches\nx slices" if is_cut else "micro-\nbatches"
    titles = ("devices", microbatches, "cap", "step", _throughput(tokens), OF_MOST, GAP, "peak", REMARKS)
    rows: list[list[str]] = []
    last = None
    for point in points:
        if last not in (None, point.line):
            rows.append([""] * len(titles))
        head = [str(point.devices), str(point.microbatches)] if point.line != last else ["", ""]
        if is_cut and point.slices is not None:
            head[1] = f"{point.microbatches} x {point.slices}"
        last = point.line
        rows.append([*head, short_bytes(point.mem_bytes), *_cells(point, best.get(point.line, 0.0), tokens)])
    return dict(zip(titles, map(list, zip(*rows, strict=True)), strict=True))


def _room(columns: dict[str, list[str]], width: int) -> int:
    """Return what is left for remarks beside the numbers."""
    numbers = [[*title.split("\n"), *cells] for title, cells in columns.items() if title != REMARKS]
    return width - sum(max(map(len, lines)) + 1 for lines in numbers)


def _table(columns: dict[str, list[str]], width: int) -> Table:
    """Nothing is cut: remarks fold first, and numbers where even these have no room."""
    rows = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    for title, cells in shown.items():
        if title == REMARKS:
            room = max(1, min(_room(columns, width), max(map(len, cells))))
            rows.add_column(title, style="dim", overflow="fold", width=room)
        else:
            rows.add_column(title, justify="right", overflow="fold")
    for row in zip(*shown.values(), strict=True):
        rows.add_row(*row)
    return rows


def _cells(point: Point, most: float, tokens: int | None) -> list[str]:
    if point.makespan_ns is None or point.peak_bytes is None:
        said = {"infeasible": "nothing fits", "beyond memory": BEYOND}.get(point.outcome, "none found in time")
        return ["-", "-", "-", "-", "-", said]
    return [
        show_ns(point.makespan_ns),
        rate(point.throughput, tokens) if point.makespan_ns else "-",  # any number of them in no time
        f"{point.throughput / most:.1%}" if most else "-",
        f"{1 - point.lower_bound_ns / point.makespan_ns if point.makespan_ns else 0:.1%}",
        short_bytes(point.peak_bytes),
        _remark(point),
    ]


def _remark(point: Point) -> str:
    parts = [] if point.carried_from_bytes is None else [f"from {short_bytes(point.carried_from_bytes)}"]
    return ", ".join([*parts, *["unfinished"] * (point.finished is False)])


def sentences(sweep: Sweep, tolerance: float) -> Iterator[str]:
    """Yield all answers in words, and what the table's last column means."""
    from optpipe_compiler.study.frontier import answer

    answers = answer(sweep.points, tolerance)
    yield from least_sentences(answers.least_memory, sweep)
    yield from memory_sentences(answers.cheapest_memory, tolerance)
    yield from microbatch_sentences(answers.enough_microbatches, tolerance)
    yield from device_sentences(answers.best_devices, sweep.tokens_per_microbatch)
    yield from gpu_sentences(answers.best_gpus, sweep.tokens_per_microbatch)
    yield from notes(sweep)


def least_sentences(found: Sequence[LeastCap], sweep: Sweep) -> Iterator[str]:
    """Yield what memory would do where nothing fits, lines with the same answer in one sentence."""
    groups: dict[tuple[str, int], list[str]] = {}
    for one in found:
        groups.setdefault((_devices(one.devices, one.gpu), one.mem_bytes), []).append(str(one.microbatches))
    for (devices, needed), numbers in groups.items():
        count = f"{' or '.join(numbers)} {'microbatch' if numbers == ['1'] else 'microbatches'}"
        yield f"With {devices} and {count} nothing fits; {enough(needed, sweep)}."


def enough(size: int, sweep: Sweep) -> str:
    """Say which cap would do; that none below it would is known where nothing is cut into slices and all points that
    name it say so."""
    is_smallest = all(point.least_is_smallest for point in sweep.points if point.least_mem_bytes == size)
    said = SMALLEST if sweep.slicing is None and is_smallest else RAISE
    return f"{said} {exact_cap(size)} ({show_bytes(size)})"


def memory_sentences(found: Sequence[CheapestMemory], tolerance: float) -> Iterator[str]:
    """Yield what memory is enough, lines with the same answer in one sentence."""
    groups: dict[tuple[str, int, int], list[CheapestMemory]] = {}
    for one in found:
        groups.setdefault((_devices(one.devices, one.gpu), one.mem_bytes, one.largest_bytes), []).append(one)
    for (devices, cap, largest), same in groups.items():
        numbers = " or ".join(str(one.microbatches) for one in same)
        head = f"With {devices} and {numbers} {'microbatch' if numbers == '1' else 'microbatches'} "
        if cap == largest:
            yield head + f"all caps tried below {short_bytes(largest)} lose {percent(tolerance)} or more{_proof(same)}."
        else:
            yield head + (
                f"{short_bytes(cap)} is the cheapest cap tried that loses less than {percent(tolerance)} against "
                f"{short_bytes(largest)} ({max(one.loss for one in same):.1%}; by the bounds at most "
                f"{max(one.most_loss for one in same):.1%}){_proof(same)}."
            )


def _proof(found: Sequence[CheapestMemory | EnoughMicrobatches | BestDevices | BestGpu]) -> str:
    """Say whether an answer is more than a comparison of what was found."""
    return (
        ", which is proven" if all(one.decided for one in found) else ", by the plans found; the bounds leave it open"
    )


def microbatch_sentences(found: Sequence[EnoughMicrobatches], tolerance: float) -> Iterator[str]:
    """Yield how many microbatches are enough, per number of devices."""
    for one in found:
        head = f"With {_devices(one.devices, one.gpu)} under {short_bytes(one.mem_bytes)} "
        if one.microbatches == one.most:
            yield head + f"all numbers tried below {one.most} lose {percent(tolerance)} or more{_proof([one])}."
        else:
            yield head + (
                f"{counted(one.microbatches, 'microbatch')} {'is' if one.microbatches == 1 else 'are'} enough: "
                f"{one.most} would give {one.gain:.1%} more, by the bounds at most {one.most_gain:.1%}{_proof([one])}."
            )


def device_sentences(found: Sequence[BestDevices], tokens: int | None) -> Iterator[str]:
    """Yield which number of devices has the most throughput per device, caps with the same answer in one sentence."""
    for (devices, gpu), group in groupby(found, key=lambda one: (one.devices, one.gpu)):
        same = list(group)
        top = same[-1]
        where, last = f"Under {short_bytes(top.mem_bytes)}", ""
        if len(same) > 1:
            where = f"From {short_bytes(same[0].mem_bytes)} to {short_bytes(top.mem_bytes)}"
            last = f" under {short_bytes(top.mem_bytes)}"
        others = ", ".join(f"{rate(each, tokens)} with {number}" for number, each in top.others)
        yield (
            f"{where} {_devices(devices, gpu)} {'has' if devices == 1 else 'have'} the most throughput per device: "
            f"{rate(top.per_device, tokens)} {unit(tokens)}{last}, against {others}"
            f"{_proof(same)}."
        )


def gpu_sentences(found: Sequence[BestGpu], tokens: int | None) -> Iterator[str]:
    """Yield which GPU has the most throughput, together and per device."""
    for one in found:
        others = ", ".join(f"{rate(each, tokens)} with {printable(gpu)}" for gpu, each in one.others)
        yield (
            f"{printable(one.gpu)} has the most throughput{' per device' if one.per_device else ''}: "
            f"{rate(one.throughput, tokens)} {unit(tokens)} ({_devices(one.devices)}, "
            f"{counted(one.microbatches, 'microbatch')}, "
            f"{short_bytes(one.mem_bytes)}), against {others}{_proof([one])}."
        )


def _devices(number: int, gpu: str | None = None) -> str:
    return f"{number} device{'s' if number > 1 else ''}" + (f" of {printable(gpu)}" if gpu is not None else "")


def percent(share: float) -> str:
    """Return a share that a person chose, with as many digits as it has."""
    return f"{100 * share:.6g}%"


def notes(sweep: Sweep) -> Iterator[str]:
    """Yield what is planned, what the table's last column means, and what numbers are worth that were not measured."""
    if (slicing := sweep.slicing) is not None:
        yield f"Every point is planned {slicing}."
    carried = sum(point.carried_from_bytes is not None for point in sweep.points)
    if carried:
        yield (
            f"{carried} of {len(sweep.points)} points show the schedule of another cap (`from`): it is valid there, "
            "too, and faster than what was found for that cap in time."
        )
    unfinished = sum(point.finished is False and point.makespan_ns is not None for point in sweep.points)
    if unfinished:
        were, their = ("was", "its") if unfinished == 1 else ("were", "their")
        yield (
            f"{unfinished} of {len(sweep.points)} points {were} still getting better when {their} time was over "
            "(`unfinished`): a longer --time-limit may find more."
        )
    if sweep.profile_digest is None:
        yield f"All costs of {printable(sweep.profile)} are estimated from data sheets, none is measured."
