"""What the page is given: charts as columns, times in ns from each chart's begin. Equal input gives equal bytes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import LETTERS
from optpipe_compiler.forecast import HOLDERS, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe_compiler.forecast import Analysis, Curve, Gap, Item, Stack
    from optpipe_compiler.view.report.trace import Span

Columns = dict[str, Any]
REASONS = {
    Reason.START: "It starts when the schedule begins.",
    Reason.ORDER: "Its lane was busy until the end of",
    Reason.DATA: "It copies what is made by",
    Reason.MESSAGE: "Its input has just arrived from",
    Reason.TRANSFER: "It reads what was just copied by",
    Reason.LINK: "The host link that it shares was busy with",
    Reason.MEMORY: "Memory that it needs was freed just now by",
    Reason.COPIES: "Copies took the compute of its device since the end of",
    Reason.SLACK: "Nothing in the file holds it back: the forecast starts it later than it must.",
}
"""Why an op does not start earlier; its critical predecessor follows where there is one."""


def encode(value: object) -> str:
    """Return JSON that may stand in a script element: no `<` begins a tag there."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def chart(found: Analysis, name: str, title: str, measured: dict[str, Span] | None) -> Columns:
    """Return everything the page draws of one schedule."""
    schedule, setup = found.schedule, found.schedule.setup
    begin, devices = found.begin_ns, len(schedule.devices)
    return {
        "name": name,
        "title": title,
        "makespan_ns": found.end_ns - begin,
        "devices": devices,
        "pipeline": schedule.pipeline,
        "stages": [stage.layers for stage in schedule.stages],
        "nth": _turns(schedule),
        "several": len(schedule.stages) > devices,
        "measured": measured is not None,
        "lanes": [
            _lane(device, lane, items, begin, measured)
            for device in range(devices)
            for lane in ir.LANES
            for items in [found.lane(device, lane)]
        ],
        "reason": [list(REASONS).index(item.reason) for item in found.items],
        "cause": [-1 if item.predecessor is None else item.predecessor for item in found.items],
        "layers": {item.index: item.op.layers for item in found.items if isinstance(item.op, ir.SavedOp)},
        "waits": _waits(found),
        "gaps": [_gaps(found.gaps_of(device), begin) for device in range(devices)],
        "memory": [_stack(stack, setup.cap_bytes, begin) for stack in found.holders],
        "host": _host(found.host, setup.host_cap_bytes, begin) if len(found.host) > 1 else None,
    }


def _turns(schedule: ir.Schedule) -> list[int]:
    """Return for each stage how many stages of its device come before it."""
    before: Counter[int] = Counter()
    turns = []
    for stage in schedule.stages:
        turns.append(before[stage.device])
        before[stage.device] += 1
    return turns


def _lane(device: int, lane: str, items: Sequence[Item], begin: int, measured: dict[str, Span] | None) -> Columns:
    ran = (
        sorted((*measured[item.op.id], nth) for nth, item in enumerate(items) if item.op.id in measured)
        if measured
        else []
    )
    return {
        "device": device,
        "lane": lane,
        "kind": "".join(LETTERS[item.op.name] for item in items),
        "stage": [item.op.stage for item in items],
        "microbatch": [item.op.microbatch for item in items],
        **(
            {"slice": [item.op.slice_or_none for item in items]}
            if any(item.op.slice_or_none is not None for item in items)
            else {}
        ),
        "begin": [item.begin_ns - begin for item in items],
        "end": [item.end_ns - begin for item in items],
        "measured": {"begin": [r[0] for r in ran], "end": [r[1] for r in ran], "op": [r[2] for r in ran]}
        if ran
        else None,
    }


def _stack(stack: Stack, cap: int | None, begin: int) -> Columns:
    """Return the steps' times, and for each holder at which steps its bytes change, and to what."""
    held: Columns = {}
    for nth, holder in enumerate(HOLDERS):
        column = [holds[nth] for _, holds in stack]
        changes = [step for step, size in enumerate(column) if size != (column[step - 1] if step else 0)]
        if changes:
            held[holder] = {"step": changes, "bytes": [column[step] for step in changes]}
    return {"time": [time - begin for time, _ in stack], "held": held, "cap": cap}


def _host(curve: Curve, cap: int | None, begin: int) -> Columns:
    steps, sizes = list(range(len(curve))), [size for _, size in curve]
    return {
        "time": [time - begin for time, _ in curve],
        "held": {"kept": {"step": steps, "bytes": sizes}},
        "cap": cap,
    }


def _gaps(mine: Sequence[Gap], begin: int) -> Columns:
    return {
        "begin": [gap.begin_ns - begin for gap in mine],
        "end": [gap.end_ns - begin for gap in mine],
        "cause": [gap.cause.value for gap in mine],
        "resource": [gap.resource for gap in mine],
        "root": [-1 if gap.root is None else gap.root for gap in mine],
    }


def _waits(found: Analysis) -> dict[int, list[int | str]]:
    """Return what each op waits for beside the order of its lane: ops by index, deliveries by id.

    Messages issued just before an op hold it back until they have been issued, so their waits are its own.
    """
    index = {item.op.id: item.index for item in found.items}
    waits: dict[int, list[int | str]] = {}
    for op, names in _pending(found.schedule):
        if names:
            waits[index[op.id]] = [index.get(name, name) for name in dict.fromkeys(names)]
    return waits


def _pending(schedule: ir.Schedule) -> Iterator[tuple[ir.Op, list[str]]]:
    """Yield every op that takes its lane, with the waits of the messages issued before it and its own."""
    for device in schedule.devices:
        for lane in device.lanes.values():
            names: list[str] = []
            for op in lane:
                names += op.after
                if not isinstance(op, ir.MessageOp):
                    yield op, names
                    names = []
