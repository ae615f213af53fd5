"""What `optpipe run --emulate-peers` shows: one device against its forecast, op kind by op kind and the worst ops."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from optpipe_compiler.documents.ops import parse
from optpipe_compiler.documents.units import counted, short_bytes, show_ns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

WORST = 5
"""So many ops are named."""


def render(report: Any) -> RenderableType:
    """Return span, memory, transfers, and measured against forecast per kind of op."""
    return Group(_headline(report), _kinds(report.ops), Text(), _worst(report.ops))


def _headline(report: Any) -> Text:
    text = Text()
    ratio = report.span_ns / max(1, report.forecast_span_ns)
    text.append(
        f"device {report.rank} alone: {show_ns(report.span_ns)} a step measured (median), "
        f"{show_ns(report.forecast_span_ns)} forecast: {ratio:.2f} x\n",
        "bold",
    )
    used = report.peak_activation_bytes / max(1, report.promised_activation_bytes)
    text.append(
        f"activations {short_bytes(report.peak_activation_bytes)} at most, "
        f"{short_bytes(report.promised_activation_bytes)} promised: {used:.0%} used\n"
    )
    if report.promised_host_bytes:
        text.append(
            f"on host {short_bytes(report.peak_host_bytes)} at most, "
            f"{short_bytes(report.promised_host_bytes)} promised\n"
        )
    text.append(f"allocator {short_bytes(report.allocator_peak_bytes)} at most above what it began with\n")
    for name, transfers in (("measured", report.transfers), ("forecast", report.forecast_transfers)):
        total = transfers.hidden_ns + transfers.exposed_ns
        if total:
            text.append(
                f"transfers {name}: {show_ns(transfers.hidden_ns)} behind compute, "
                f"{show_ns(transfers.exposed_ns)} exposed ({transfers.hidden_ns / total:.1%} hidden)\n"
            )
    text.append(
        f"{counted(report.steps, 'step')} on {report.device}, neighbours emulated, times x {report.time_scale:g}\n",
        "dim",
    )
    return text


def _table(columns: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    first, *rest = columns
    table.add_column(first)
    for column in rest:
        table.add_column(column, justify="right")
    return table


def _kinds(ops: Iterable[Any]) -> Table:
    table = _table(("op", "count", "forecast each", "measured each", "ratio"))
    kinds: dict[str, list[Any]] = defaultdict(list)
    for op in ops:
        name = parse(op.op)
        kinds[f"{name.kind} {name.stage}"].append(op)
    for kind, found in kinds.items():
        forecast = round(sum(op.forecast_ns for op in found) / len(found))
        measured = round(sum(op.measured_ns for op in found) / len(found))
        ratio = f"{measured / forecast:.2f} x" if forecast else ""
        table.add_row(kind, str(len(found)), show_ns(forecast), show_ns(measured), ratio)
    return table


def _worst(ops: Iterable[Any]) -> Table:
    table = _table(("furthest from forecast", "forecast start", "measured", "forecast takes", "measured"))
    found = sorted(ops, key=lambda op: -abs(op.measured_ns - op.forecast_ns))
    for op in found[:WORST]:
        times = (op.forecast_start_ns, op.measured_start_ns, op.forecast_ns, op.measured_ns)
        table.add_row(op.op, *map(show_ns, times))
    return table
