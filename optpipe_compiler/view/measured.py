"""What `optpipe profile` shows while it measures, and what it found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.progress import BarColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from optpipe_compiler.documents.profile import Quantity, alike, value_of
from optpipe_compiler.documents.units import counted, printable, short_bytes, show_bytes, show_ns
from optpipe_compiler.view.bar import Bar, description_column
from optpipe_compiler.view.look import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from optpipe_compiler.costs.noise import Noisy
    from optpipe_compiler.documents.profile import Cost, Link, Profile


class MeasureBar(Bar):
    """What is being measured and how much is done; away from a terminal a line per thing that is measured."""

    def __init__(self, console: Console) -> None:
        columns = (description_column(), BarColumn(), TimeElapsedColumn())
        super().__init__(console, *columns, description="starting", total=1.0)
        self.last = ""

    def update(self, what: str, part: float) -> None:
        """Show what is measured now and the part that is done."""
        self.bar.update(self.task, description=f"measuring {what}", completed=part)
        if what != self.last:
            self.say(f"measuring {what} ({part:.0%})")
        self.last = what


def render(profile: Profile, path: str) -> RenderableType:
    """Return the layers' costs and the machine's, with spread where it was measured."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")
    for column in ("F", "I", "W", "B", "R", "saved", "residue", "static"):
        table.add_column(column, justify="right", no_wrap=True)
    for _, layer in alike(profile.layers):
        name = layer.name if layer.count == 1 else f"{layer.name} x {layer.count}"
        table.add_row(
            printable(name),
            *(
                _time(cost, "\n")
                for cost in (
                    layer.forward_ns,
                    layer.backward_input_ns,
                    layer.backward_weight_ns,
                    layer.backward_ns,
                    layer.recompute_ns,
                )
            ),
            *(_size(cost) for cost in (layer.saved_bytes, layer.residue_bytes, layer.static_bytes)),
        )
    end = f"wrote {printable(path)}; ± is the interquartile range of the samples"
    return Group(table, Text(f"{COLUMNS}; R: recomputation", "dim"), _machine(profile), Text(end))


def noise_lines(found: Sequence[Noisy]) -> list[str]:
    """Say which numbers are noise, each with its spread; nothing where there are none."""
    if not found:
        return []
    lines = [f"  {one.name}: {_shown(one)} ± {_shown(one, one.spread)}" for one in found]
    head = "not to be trusted, because their spread is more than half of what they say:"
    return [head, *lines, "profile again when nothing else runs on the machine"]


def _shown(one: Noisy, value: int | None = None) -> str:
    value = one.value if value is None else value
    return show_ns(value) if one.unit == "ns" else f"{value / 1e9:.3g} GB/s"


def _time(cost: Cost | None, between: str = " ") -> str:
    """Return a time, and its spread in parts of it where it was measured and is not 0."""
    if cost is None:
        return "-"
    if not isinstance(cost, Quantity) or not cost.samples or not cost.value:
        return show_ns(value_of(cost))
    return f"{show_ns(cost.value)}{between}±{cost.spread / cost.value:.0%}"


def _size(cost: Cost | None) -> str:
    """Return a size with three digits, as there is room for."""
    if cost is None:
        return "-"
    number, unit = short_bytes(value_of(cost)).split()
    return f"{float(number):.0f} {unit}" if float(number) >= 100 else f"{float(number):.3g} {unit}"


def _machine(profile: Profile) -> Text:
    machine = profile.machine
    lines = [
        f"{counted(machine.devices, 'device')} ({printable(machine.kind)}); {_time(machine.op_overhead_ns)} "
        "overhead per op"
    ]
    if machine.memory_bytes is not None:
        lines.append(f"memory per device {show_bytes(value_of(machine.memory_bytes))}")
    for p2p in machine.p2p:
        speed = "" if p2p.bytes_per_s is None else f" + {value_of(p2p.bytes_per_s) / 1e9:.2f} GB/s"
        pair = "" if p2p.devices is None else f" between devices {p2p.devices[0]} and {p2p.devices[1]}"
        busy = f", {_time(p2p.overhead_ns)} of each device's compute" if value_of(p2p.overhead_ns) else ""
        lines.append(f"message {_time(p2p.latency_ns)}{speed}{pair}{_origin(p2p.latency_ns)}{busy}")
    for link in machine.links:
        share = value_of(link.compute_permille)
        busy = f", {share / 10:g}% of their time taken from compute" if share else ""
        d2h, h2d = (value_of(cost) / 1e9 for cost in (link.d2h_bytes_per_s, link.h2d_bytes_per_s))
        whose = f"{_of(link)}{_origin(link.d2h_bytes_per_s)}{busy}"
        lines.append(f"host copies {d2h:.2f} GB/s out, {h2d:.2f} GB/s in{whose}")
    return Text("\n".join(lines))


def _of(link: Link) -> str:
    if link.devices is None:
        return ""
    names = ", ".join(map(str, link.devices))
    return f", one link of devices {names}" if len(link.devices) > 1 else f", device {names}"


def _origin(cost: Cost) -> str:
    return " (estimated)" if isinstance(cost, Quantity) and cost.source == "estimated" else ""
