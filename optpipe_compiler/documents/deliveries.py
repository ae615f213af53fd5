"""Which messages of a device are delivered before an op of it starts, in every execution of the schedule.

A message's buffer is counted until it is delivered, and the promise of a schedule file counts on every delivery that
its order and waits imply, also through other devices. The file states them; for files before revision 2 they are found
in its happens-before.
"""

from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.errors import RunFailed

Node = tuple[str, str]
"""("start" | "end", op id), or ("delivered", the send's id)."""


def waits(schedule: ir.Schedule, device: int) -> dict[str, list[str]]:
    """Return, by op of `device`, the ids of its messages that are waited for before it starts, so that their buffers
    can be freed: its sends whose delivery is stated, and the receives that it reads."""
    plan = schedule.devices[device]
    if isinstance(plan.deliveries, msgspec.UnsetType):
        return implied(schedule, device)
    stated: dict[str, list[str]] = defaultdict(list)
    for entry in plan.deliveries:  # an op may have several
        stated[entry.before] += entry.sends
    received = {op.id for op in plan.compute if isinstance(op, ir.RecvActivation | ir.RecvGradient)}
    return {
        op.id: [*stated.get(op.id, ()), *(name for name in (*op.after, op.received_id) if name in received)]
        for op in plan.ops
    }


def implied(schedule: ir.Schedule, device: int) -> dict[str, list[str]]:
    """Return the same from the orders and waits of all devices, each message once per lane."""
    before, delivered = _happens_before(schedule)
    mine = [op.id for op in schedule.devices[device].compute if isinstance(op, ir.MessageOp)]
    bit = {delivered[op_id]: 1 << index for index, op_id in enumerate(mine)}
    known: dict[Node, int] = {}
    try:
        for node in TopologicalSorter(before).static_order():
            known[node] = bit.get(node, 0)
            for other in before[node]:
                known[node] |= known[other]
    except CycleError as error:
        raise RunFailed("this schedule can deadlock; `optpipe verify` shows where") from error
    result: dict[str, list[str]] = {}
    for lane in schedule.devices[device].lanes.values():
        seen = 0
        for op in lane:
            new = known["start", op.id] & ~seen
            seen |= new
            result[op.id] = [op_id for index, op_id in enumerate(mine) if new >> index & 1] if new else []
    return result


def _happens_before(schedule: ir.Schedule) -> tuple[dict[Node, list[Node]], dict[str, Node]]:
    """Return each node's predecessors, and the delivery of each message by the ids of both its halves.

    A delivery comes after both halves and after the pair's message before it; what reads a message comes after its
    delivery, and so does what waits for one of its halves.
    """
    messages = [op for device in schedule.devices for op in device.compute if isinstance(op, ir.MessageOp)]
    delivered: dict[str, Node] = {op.id: ("delivered", op.send_id) for op in messages}
    before: dict[Node, list[Node]] = defaultdict(list)
    for device in schedule.devices:
        last: dict[int, Node] = {}
        for lane in device.lanes.values():
            previous: list[Node] = []
            for op in lane:
                start, end = ("start", op.id), ("end", op.id)
                before[start] += [*previous, *(delivered.get(name, ("end", name)) for name in op.after)]
                if op.received_id in delivered:
                    before[start].append(delivered[op.received_id])
                if isinstance(op, ir.MessageOp):
                    arrival = delivered[op.id]
                    before[arrival] += [start, *([last[op.peer]] if op.peer in last else [])]
                    last[op.peer] = arrival
                before[end].append(start)
                previous = [end]
    return before, delivered
