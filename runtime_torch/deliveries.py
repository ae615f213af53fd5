"""Which messages the replay waits for before an op starts.

A message's buffer is counted until it is delivered, and the promise of a schedule file counts on every delivery that
its order and waits imply, also through other devices. So before an op starts, the replay waits for exactly these
messages of its device: they are complete, or about to be, and their buffers can be freed. The file states them; for
files before revision 2 they are found in its happens-before.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import op_id
from optpipe_compiler.errors import RunFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optpipe_compiler.documents.ir import Schedule

Waits = dict[str, list[str]]
"""By op of a device: the ids of its sends and receives that are waited for before it starts."""
Node = tuple[str, str]
"""("start" | "end", op id), or ("delivered", the send's id)."""


def waits(schedule: Schedule, device: int) -> Waits:
    """Return what each op of `device` waits for: stated deliveries of its sends, and the receives that it reads."""
    plan = schedule.devices[device]
    if plan.deliveries is msgspec.UNSET:
        return implied(schedule, device)
    stated = {entry.before: entry.sends for entry in plan.deliveries}
    received = {op.id for op in plan.compute if isinstance(op, ir.RecvActivation | ir.RecvGradient)}
    return {
        op.id: [*stated.get(op.id, ()), *(name for name in (*op.after, *received_for(op)) if name in received)]
        for lane in _lanes(plan)
        for op in lane
    }


def implied(schedule: Schedule, device: int) -> Waits:
    """Return the same from the orders and waits of all devices, each message once per lane."""
    graph = _Graph(schedule)
    mine = [op.id for op in schedule.devices[device].compute if isinstance(op, ir.MessageOp)]
    bit = {graph.delivered[op_id]: 1 << index for index, op_id in enumerate(mine)}
    known: dict[Node, int] = {}
    for node in graph.in_order():
        known[node] = bit.get(node, 0)
        for before in graph.before[node]:
            known[node] |= known[before]
    result: dict[str, list[str]] = {}
    for lane in _lanes(schedule.devices[device]):
        seen = 0
        for op in lane:
            new = known["start", op.id] & ~seen
            seen |= new
            result[op.id] = [op_id for index, op_id in enumerate(mine) if new >> index & 1] if new else []
    return result


def sender_id(op: ir.Op) -> str:
    """The id of the message's send, whichever half `op` is."""
    if isinstance(op, ir.RecvActivation):
        return op_id("send_activation", op.stage - 1, op.microbatch, None, op.slice_or_none)
    if isinstance(op, ir.RecvGradient):
        return op_id("send_gradient", op.stage + 1, op.microbatch, None, op.slice_or_none)
    return op.id


def _lanes(device: ir.Device) -> tuple[Sequence[ir.Op], ...]:
    return device.compute, device.d2h, device.h2d


class _Graph:
    """Edges of happens-before, as each node's predecessors."""

    def __init__(self, schedule: Schedule) -> None:
        self.before: dict[Node, list[Node]] = defaultdict(list)
        self.delivered: dict[str, Node] = {}
        for device in schedule.devices:
            for op in device.compute:
                if isinstance(op, ir.MessageOp):
                    self.delivered[op.id] = ("delivered", sender_id(op))
        for device in schedule.devices:
            for lane in _lanes(device):
                self._add_lane(lane)
        for device in schedule.devices:
            self._add_messages(device)

    def _add_lane(self, lane: Iterable[ir.Op]) -> None:
        previous: Node | None = None
        for op in lane:
            start, end = ("start", op.id), ("end", op.id)
            self.before[start] += [self.delivered.get(name, ("end", name)) for name in op.after]
            if previous is not None:
                self.before[start].append(previous)
            self.before[end].append(start)
            previous = end

    def _add_messages(self, device: ir.Device) -> None:
        """Both halves before the delivery, the pair's messages one after another, a consumer after its receive."""
        last: dict[int, Node] = {}
        for op in device.compute:
            if isinstance(op, ir.MessageOp):
                delivered = self.delivered[op.id]
                self.before[delivered].append(("start", op.id))
                if op.peer in last:
                    self.before[delivered].append(last[op.peer])
                last[op.peer] = delivered
            else:
                self.before["start", op.id] += [
                    self.delivered[name] for name in received_for(op) if name in self.delivered
                ]

    def in_order(self) -> list[Node]:
        """Every node after its predecessors; a cycle means that the schedule can deadlock."""
        after: dict[Node, list[Node]] = defaultdict(list)
        missing: dict[Node, int] = {}
        for node, before in self.before.items():
            missing[node] = len(before)
            for other in before:
                after[other].append(node)
                missing.setdefault(other, 0)
        ready = [node for node, count in missing.items() if count == 0]
        order: list[Node] = []
        while ready:
            node = ready.pop()
            order.append(node)
            for other in after[node]:
                missing[other] -= 1
                if missing[other] == 0:
                    ready.append(other)
        if len(order) < len(missing):
            raise RunFailed("this schedule can deadlock; `optpipe verify` shows where")
        for node in order:
            self.before.setdefault(node, [])
        return order


def received_for(op: ir.Op) -> list[str]:
    """The ids of the receives that a compute op reads, where its neighbour is on another device."""
    if isinstance(op, ir.Forward):
        return [op_id("recv_activation", op.stage, op.microbatch, None, op.slice_or_none)]
    if isinstance(op, ir.Backward | ir.BackwardInput):
        return [op_id("recv_gradient", op.stage, op.microbatch, None, op.slice_or_none)]
    return []
