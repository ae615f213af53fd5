"""What `optpipe run` shows: progress, then plan against reality per rank."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from optpipe_compiler.documents.units import counted, short_bytes, show_ns
from optpipe_compiler.view.bar import Bar, description_column

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType

    from optpipe_compiler.documents.ir import Schedule


class ReplayBar(Bar):
    """Steps done and the latest loss; away from a terminal a line per step."""

    def __init__(self, console: Console, schedule: Schedule, steps: int) -> None:
        columns = (
            description_column(),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        starting = f"starting {counted(schedule.setup.devices, 'process', 'processes')}"
        super().__init__(console, *columns, description=starting, total=steps)
        self.rehearsal = schedule.model is None

    def update(self, event: dict[str, Any]) -> None:
        """Show an event of the run."""
        if (words := _planned(event)) is not None:
            self.say(words)
            return
        if event["event"] != "step":
            self.bar.update(self.task, description=str(event["event"]))
            return
        step = int(event["step"]) + 1
        text = "rehearsing" if self.rehearsal else f"loss {event['loss']:.4f}"
        self.bar.update(self.task, completed=step, description=text)
        self.say(f"step {step}: {text}")


def _planned(event: dict[str, Any]) -> str | None:
    """Say what an event of planning beside the run is."""
    step = f"step {event.get('step')}: "
    if event["event"] == "measured":
        return f"{step}measured, {show_ns(round(event['step_ns']))} per step; planning beside the run"
    if event["event"] == "planned":
        before, after = (show_ns(event[f"forecast_{when}_ns"]) for when in ("before", "after"))
        return (
            f"{step}planned: {before} to {after} forecast, {'to be swapped in' if event['swaps'] else 'kept as it is'}"
        )
    if event["event"] == "swap":
        moved = f", {counted(event['moved_layers'], 'layer')} moved" if event["moved_layers"] else ""
        what = "steps are longer: the schedule before is back" if event["undoes"] else "swapped"
        return f"{step}{what} in {show_ns(event['swap_ns'])}{moved}"
    return f"{step}{event['said']}" if event["event"] == "planner" else None


SLOW = 1.15
"""Compute ops that take more than this times their forecast do not have the costs of their profile; on CPUs, runs right
after their profile stay below it where nothing is offloaded (docs/FORECAST.md)."""


def note(report: Any, schedule: Path, trace: Path | None, profile: str | None = "PROFILE") -> str | None:
    """Say that the profile does not hold, where compute ops are slower than it says, and how to get one that does.

    `profile` is the one that the schedule was planned with; None where `optpipe profile` takes it by default.
    """
    ratio = report.compute_ratio
    if ratio is None or ratio <= SLOW:
        return None
    again = f"optpipe run {quote(str(schedule))} --trace run.json, then " if trace is None else ""
    base = "" if profile is None else f" --profile {quote(profile)}"
    return (
        f"compute ops took {ratio:.2f} x what the profile says; for costs as in this run: "
        f"{again}optpipe profile --from-run {quote(str(trace or 'run.json'))}{base}"
    )


def render(report: Any) -> RenderableType:
    """Return loss, times, memory per rank and the check's verdict."""
    parts: list[RenderableType] = [_headline(report), _ranks(report), _kinds(report)]
    parts += [_swap(swap) for swap in report.swaps]
    if report.check is not None:
        parts.append(_check(report.check))
    return Group(*parts)


def _headline(report: Any) -> Text:
    text = Text()
    if report.mode == "train" and report.losses:
        text.append(
            f"loss {report.losses[0]:.4f} to {report.losses[-1]:.4f} in {counted(len(report.losses), 'step')}\n", "bold"
        )
    if report.makespan_ns is not None:
        ratio = report.makespan_ns / report.forecast_makespan_ns
        text.append(f"step {show_ns(round(report.makespan_ns))} measured (median), ")
        text.append(f"{show_ns(round(report.forecast_makespan_ns))} forecast: {ratio:.2f} x\n")
        text.append(f"bubble {report.bubble:.1%} measured, {report.forecast_bubble:.1%} forecast\n")
    if report.mode == "rehearsal":
        text.append(f"rehearsal with emulated layers, times x {report.time_scale:.3g}\n")
    where = "each rank on cores of its own" if report.pinned else "ranks share cores"
    text.append(f"{counted(len(report.ranks), 'process', 'processes')}, {report.backend}, {where}\n", "dim")
    return text


def _ranks(report: Any) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("rank", "stages", "peak activations", "promised", "used", "peak on host", "promised on host"):
        table.add_column(column, justify="right")
    for rank in report.ranks:
        used = rank.peak_activation_bytes / max(1, rank.promised_activation_bytes)
        table.add_row(
            str(rank.rank),
            " ".join(map(str, rank.stages)),
            short_bytes(rank.peak_activation_bytes),
            short_bytes(rank.promised_activation_bytes),
            f"{used:.0%}",
            short_bytes(rank.peak_host_bytes),
            short_bytes(rank.promised_host_bytes),
        )
    return table


def _kinds(report: Any) -> Text:
    parts = [f"{name} {time.ratio:.2f} x" for name, time in report.kinds.items()]
    return Text("\nop times measured / forecast: " + ", ".join(parts)) if parts else Text("")


def _swap(swap: Any) -> Text:
    after = "not measured" if swap.measured_after_ns is None else show_ns(swap.measured_after_ns)
    what = "swapped back" if swap.undoes else "swapped"
    return Text(
        f"{what} before step {swap.step + 1}: forecast {show_ns(swap.forecast_before_ns)} to "
        f"{show_ns(swap.forecast_after_ns)}, measured {show_ns(swap.measured_before_ns)} to {after}, stood still for "
        f"{show_ns(swap.swap_ns)}, {counted(swap.moved_layers, 'layer')} moved"
    )


def _check(check: Any) -> Text:
    verdict = "equal" if check.ok else "DIFFERENT"
    return Text(
        f"check: loss and {check.parameters} gradients {verdict} to the unpipelined model "
        f"(loss {check.loss:.6f} against {check.reference_loss:.6f}; worst gradient {check.worst_difference:.2g} "
        f"of its largest entry in {check.worst_parameter}, tolerance {check.tolerance:.0e})",
        style="bold" if check.ok else "bold red",
    )
