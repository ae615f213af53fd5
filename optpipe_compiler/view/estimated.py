"""What `optpipe profile --model` derived, and what it took for granted; the tables of presets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from optpipe_compiler.documents.profile import alike, value_of
from optpipe_compiler.documents.units import counted, printable, short_bytes, show_ns
from optpipe_compiler.view.look import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import RenderableType

    from optpipe_compiler.costs.gpus import Gpu
    from optpipe_compiler.costs.models import Architecture
    from optpipe_compiler.documents.profile import Profile


def render(profile: Profile, path: str, assumed: Iterable[str]) -> RenderableType:
    """Return the layers' costs, the machine's, and the assumptions."""
    table = Table(box=None, pad_edge=False)
    table.add_column("\nlayer", min_width=10)  # the one that wraps where the terminal is narrow
    for column in ("F\nms", "I\nms", "W\nms", "B\nms", "saved\nMB", "I to W\nMB", "message\nMB", "static\nMB"):
        table.add_column(column, justify="right", no_wrap=True)
    for _, layer in alike(profile.layers):
        times = (layer.forward_ns, layer.backward_input_ns, layer.backward_weight_ns, layer.backward_ns)
        sizes = (layer.saved_bytes, layer.residue_bytes, layer.output_bytes, layer.static_bytes)
        table.add_row(
            printable(layer.name if layer.count == 1 else f"{layer.name} x {layer.count}"),
            *("-" if cost is None else f"{value_of(cost) / 1e6:.2f}" for cost in times),
            *("-" if cost is None else f"{value_of(cost) / 1e6:.1f}" for cost in sizes),
        )
    points = Table.grid(padding=(0, 1))
    for line in assumed:
        points.add_row("-", printable(line))
    end = Text(f"all numbers are estimated (docs/ESTIMATES.md)\nwrote {printable(path)}")
    return Group(table, Text(COLUMNS, "dim"), Text(""), Text(_machine(profile)), points, end)


def _machine(profile: Profile) -> str:
    machine = profile.machine
    memory = "" if machine.memory_bytes is None else f", {short_bytes(value_of(machine.memory_bytes))} each"
    parts = [f"{counted(machine.devices, 'pipeline device')} ({machine.kind}){memory}"]
    kinds = dict.fromkeys((value_of(entry.latency_ns), value_of(entry.bytes_per_s or 0)) for entry in machine.p2p)
    where = (" between nodes", " within one") if len(kinds) > 1 else ("",)
    for (latency, speed), place in zip(kinds, where, strict=False):
        parts.append(f"message{place} {show_ns(latency)} + {speed / 1e9:.3g} GB/s")
    if machine.links:
        link = machine.links[0]
        owner = "shared by pairs" if link.devices is not None else "of each device"
        parts.append(f"host link {value_of(link.d2h_bytes_per_s) / 1e9:.3g} GB/s each way, {owner}")
    return "; ".join(parts)


def gpu_table(gpus: Mapping[str, Gpu]) -> RenderableType:
    """Return the presets, one per line."""
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for column in ("TFLOP/s", "reached", "memory", "TB/s", "peer", "network", "host"):
        table.add_column(column, justify="right", min_width=len(column))
    table.add_column("what it is")
    for gpu in gpus.values():
        rates = (gpu.peer_bytes_per_s, gpu.network_bytes_per_s, gpu.host_bytes_per_s)
        table.add_row(
            gpu.name,
            f"{gpu.flops_per_s / 1e12:.0f}",
            f"{gpu.matmul_flops_per_s / 1e12:.0f}",
            f"{gpu.memory_bytes / 1e9:.0f} GB",
            f"{gpu.memory_bytes_per_s / 1e12:.2f}",
            *(f"{rate / 1e9:.0f}" for rate in rates),
            gpu.description,
        )
    note = "TFLOP/s: dense bf16 peak, and what large matrix products reach. peer, network, host: GB/s in one direction."
    return Group(table, Text(note))


def model_table(models: Mapping[str, Architecture]) -> RenderableType:
    """Return the configurations that come with the package, one per line."""
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("kind")
    for column in ("blocks", "hidden", "heads", "kv heads", "ffn", "experts", "vocab"):
        table.add_column(column, justify="right")
    for name, model in models.items():
        sizes = (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.experts or "-", model.vocab)
        table.add_row(name, model.kind, *(str(size) for size in sizes))
    return table
