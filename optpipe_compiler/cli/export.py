"""optpipe export: a schedule in the formats of other tools."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optpipe_compiler.cli.common import (
    SCHEDULE,
    Output,
    check_outputs,
    console,
    is_stdout,
    json_option,
    note,
    refuse_png,
    say,
    say_json,
)
from optpipe_compiler.errors import BadInput, Rejected

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Checked, Schedule
    from optpipe_compiler.documents.profile import Profile

ENDINGS = {
    "chrome-trace": ".trace.json",
    "torch-csv": ".csv",
    "torchtitan": "_torchtitan.py",
    "megatron-layout": ".megatron.txt",
    "primus": "_primus.py",
    "svg": ".svg",
}
TOOLS = {"torch-csv": "torch", "torchtitan": "torch", "primus": "Primus"}
"""Who runs the order of a format that has no waits and memory ops."""
FILES = {"torch": "torch's CSV", "Primus": "Primus's table"}


@click.command()
@click.argument("schedule_path", metavar="[SCHEDULE]", type=click.Path(path_type=Path), default=SCHEDULE)
@click.option("--to", "kind", type=click.Choice(list(ENDINGS)), required=True)
@click.option("-o", "--output", type=Output(), help="[default: the schedule's name with a new ending]")
@click.option("--drop-memory-ops", is_flag=True, help="torch, Primus: leave out offloads, reloads and recomputes.")
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    help="torch, Megatron, Primus: layer names, of the profile it was compiled from.",
)
@json_option
def export(
    schedule_path: Path, kind: str, output: Path | None, drop_memory_ops: bool, profile_path: Path | None, as_json: bool
) -> None:
    """Write a schedule for another tool.

    \b
    chrome-trace     timeline with memory for ui.perfetto.dev
    torch-csv        compute ops as torch.distributed.pipelining loads them
    torchtitan       that CSV and the settings for torchtitan 0.3
    megatron-layout  the cut as one line of arguments for Megatron-Core
    primus           the table of compute ops and messages as a module for Primus
    svg              the chart as a picture

    Example: optpipe export schedule.json --to chrome-trace
    """
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.files import is_special
    from optpipe_compiler.export.torch_csv import receive_buffers

    refuse_png(output)
    if output is None and is_special(schedule_path):
        raise BadInput(f"{schedule_path}: is no name that the output could be named after, expected one: -o FILE")
    path = output or _default(schedule_path, kind)
    check_outputs(path, as_json=as_json)
    checked = _checked(ir.load(schedule_path), schedule_path)
    profile = None if profile_path is None else _profile(profile_path, checked.schedule, schedule_path)
    tool = TOOLS.get(kind)
    if tool is not None:
        _refuse_loss(checked.schedule, schedule_path, drop_memory_ops, FILES[tool])
    if kind == "megatron-layout":
        files = {path: _layout(checked, profile, silent=as_json or is_stdout(path))}
    elif kind == "primus":
        from optpipe_compiler.export import primus

        files = {path: primus.render(checked, profile)}
        _say_what_layers_are(checked, profile)
    elif kind == "torchtitan":
        files = _for_torchtitan(path, checked, profile, as_json=as_json)
    elif kind == "torch-csv":
        files = _for_torch(path, checked)
        _say_who_gets_the_target(checked, profile)
    else:
        files = {path: _picture(checked, kind)}
    for where, content in files.items():
        _write(where, content, silent=as_json)
    about: dict[str, Any] = {"schedule": str(schedule_path), "to": kind, "wrote": list(map(str, files))}
    if tool is not None:
        peaks = _peaks(checked, tool)
        about[f"{tool.lower()}_peak_bytes"] = peaks
        if tool == "torch":
            about["torch_receive_buffer_bytes"] = receive_buffers(checked.schedule)
        if not as_json:
            _say_peaks(checked, tool, peaks, stderr=is_special(path))
    if as_json:
        say_json(about)


def _picture(checked: Checked, kind: str) -> str:
    from optpipe_compiler.export import chrome_trace
    from optpipe_compiler.view import svg

    return svg.render(checked.schedule) if kind == "svg" else chrome_trace.render(checked)


def _layout(checked: Checked, profile: Profile | None, *, silent: bool) -> str:
    """Return the line, which is printed, too, to be pasted."""
    from optpipe_compiler.documents.units import enumerated
    from optpipe_compiler.export import megatron

    line = megatron.render(checked, profile)
    if not silent:
        say(line)
    note(f"optpipe: Megatron runs the cut in its own order, without {enumerated(_left(checked.schedule))}: other peaks")
    _say_what_layers_are(checked, profile)
    return line + "\n"


def _left(schedule: Schedule) -> list[str]:
    """Return what of a plan stays behind where its cut alone is handed over."""
    left = {
        "waits": True,
        "memory ops": True,
        "slices": schedule.setup.slices > 1,
        "unequal lengths of microbatches": len(set(schedule.setup.lengths or ())) > 1,
        "selective recompute": any(stage.selective_layers for stage in schedule.stages),
    }
    return [what for what, is_there in left.items() if is_there]


def _say_what_layers_are(checked: Checked, profile: Profile | None) -> None:
    """Say where nothing tells the embedding and the head from other layers."""
    from optpipe_compiler.export.ends import ends, unlike_blocks

    embedding, head = ends(checked.schedule, profile, "")
    if profile is not None:
        for line in unlike_blocks(profile, embedding=embedding, head=head):
            note(f"optpipe: {line}")
    elif not embedding and not head:
        note(
            f"optpipe: all {checked.schedule.setup.layers} layers are taken for decoder layers: with --profile, an "
            "embedding and a head are told by name"
        )


def _say_who_gets_the_target(checked: Checked, profile: Profile | None) -> None:
    """Say that torch's pipelines lack what parts of a head need."""
    from optpipe_compiler.export.ends import head_is_in_parts

    if head_is_in_parts(checked.schedule, profile):
        note(
            "optpipe: the head is in parts, each of which needs the target; torch gives it to the loss alone: stage "
            "modules have to bring it along"
        )


def _for_torchtitan(path: Path, checked: Checked, profile: Profile | None, *, as_json: bool) -> dict[Path, str]:
    from optpipe_compiler.export import torchtitan

    if path.suffix != ".py":
        raise BadInput(f"-o is {str(path)!r}, expected a Python file; the CSV is written beside it")
    table = path.with_name(path.stem.removesuffix("_torchtitan") + ENDINGS["torch-csv"])
    check_outputs(path, table, as_json=as_json)
    settings = torchtitan.render(checked, profile, table.name, path.stem)
    _say_what_layers_are(checked, profile)
    return _for_torch(table, checked) | {path: settings}


def _for_torch(path: Path, checked: Checked) -> dict[Path, str]:
    from optpipe_compiler.export import torch_csv

    return {path: torch_csv.render(checked)}


def _default(schedule_path: Path, kind: str) -> Path:
    """Name the output after the schedule; what is to be imported gets a name that Python can import."""
    stem = schedule_path.stem
    if kind in ("torchtitan", "primus"):
        stem = re.sub(r"\W", "_", stem)
    return schedule_path.with_name(stem + ENDINGS[kind])


def _profile(path: Path, schedule: Schedule, schedule_path: Path) -> Profile:
    """Return the profile; raise BadInput where it is another than the schedule's: names of others are other layers'."""
    from optpipe_compiler.documents import profile as profiles
    from optpipe_compiler.documents.files import check_digest

    found = profiles.load(path)
    compiled = f"{path}: is not the profile that {schedule_path} was compiled from"
    check_digest(found.digest(), schedule.provenance.profile_digest, compiled)
    return found


def _checked(schedule: Schedule, path: Path) -> Checked:
    from optpipe_compiler.verify import Violated, check

    try:
        return check(schedule)
    except Violated as error:
        raise Rejected(f"{path}: not exported, verify rejects it: {error} (optpipe verify {path})") from error


def _refuse_loss(schedule: Schedule, path: Path, drop_memory_ops: bool, what: str) -> None:
    from optpipe_compiler.documents.units import counted, enumerated, show_layers
    from optpipe_compiler.export.whole import memory_ops, refuse_units

    refuse_units(schedule, str(path), what)
    if layers := [layer for stage in schedule.stages for layer in stage.selective_layers]:
        raise BadInput(
            f"{path}: has selective recompute of layers {show_layers(layers)}, which {what} cannot carry, and no "
            "bytes of these layers without it; expected a schedule compiled with --no-recompute"
        )
    lost = memory_ops(schedule)
    if lost and not drop_memory_ops:
        shown = enumerated([counted(count, kind) for kind, count in sorted(lost.items())])
        raise BadInput(
            f"{path}: has {shown}, which {what} cannot carry; expected a schedule compiled with --no-offload "
            "--no-recompute, or --drop-memory-ops to export it without them"
        )


def _write(path: Path, content: str, *, silent: bool) -> None:
    from optpipe_compiler.documents.files import is_special, write_atomically

    write_atomically(path, content)
    if not silent:
        say(f"wrote {path}", err=is_special(path))


def _peaks(checked: Checked, tool: str) -> list[int]:
    """Return what every device can hold when the tool runs the order without waits and memory ops."""
    from optpipe_compiler.export.torch_csv import as_torch_runs_it
    from optpipe_compiler.export.whole import without_memory_ops
    from optpipe_compiler.verify.peaks import peaks

    return peaks((as_torch_runs_it if tool == "torch" else without_memory_ops)(checked))


def _say_peaks(checked: Checked, tool: str, found: list[int], *, stderr: bool) -> None:
    """Say what every device can hold when the tool runs the order without waits and memory ops."""
    from rich.table import Table

    from optpipe_compiler.documents.units import short_bytes
    from optpipe_compiler.export.torch_csv import receive_buffers

    schedule = checked.schedule
    cap = schedule.setup.cap_bytes
    table = Table(box=None, pad_edge=False)
    for column in ("device", "planned peak", f"peak in {tool}", "cap"):
        table.add_column(column, justify="right")
    table.add_column()
    for device, peak in zip(schedule.devices, found, strict=True):
        verdict = f"{short_bytes(peak - cap)} over" if peak > cap else "fits"
        row = (device.device, short_bytes(device.peak_bytes), short_bytes(peak), short_bytes(cap), verdict)
        table.add_row(*map(str, row))
    console(stderr=stderr).print(table)
    if tool == "torch" and (most := max(receive_buffers(schedule))):
        say(
            f"beside them torch keeps a receive buffer per message for the whole run, up to {short_bytes(most)} on a "
            "device; the peaks count a message from its arrival until its use",
            err=stderr,
        )
    if lengths := schedule.setup.lengths:
        note(f"optpipe: these are peaks of microbatches of {lengths[0]} tokens, which the file does not say")
    if max(found) > cap:
        note("optpipe: without its waits and memory ops the schedule does not fit the cap")
