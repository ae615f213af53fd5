"""Executions of a schedule's contract: what a step takes when ops take other times than forecast.

Order, waits and messages are those of docs/IR.md (happens-before); nothing else holds an op back, but for links that
several devices share, whose transfers keep the order of the forecast. Many executions are run at once: each time is an
array with one entry for each.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import op_id, parse
from optpipe_compiler.forecast.copies import NO_COPIES, busy_ns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Times = NDArray[np.float64]

EXECUTIONS = 200
"""Of which the quantiles are taken: the 95th percentile then stands on ten."""
Spreads = dict[tuple[str, int], float]
"""By kind of op and stage: the standard deviation of its time, as a share of it."""


@dataclass(frozen=True)
class Quantiles:
    """What a step takes, in ns, over seeded executions with noise."""

    p50_ns: int
    p95_ns: int


def quantiles(schedule: ir.Schedule, spreads: Spreads, *, count: int = EXECUTIONS, seed: int = 0) -> Quantiles:
    """Return median and 95th percentile of a step's time over executions in which each op is noisy by itself.

    Times are log-normal with the forecast as their median, as an op can take much longer and hardly any shorter.
    """
    random = np.random.default_rng(seed)
    noisy: dict[str, Times] = {}
    for op, duration in durations(schedule).items():
        name = parse(op)
        spread = spreads.get((name.kind, name.stage), 0.0)
        noisy[op] = duration * np.exp(random.standard_normal(count) * np.sqrt(np.log1p(spread**2)))
    found = makespans(schedule, noisy)
    return Quantiles(*(round(float(q)) for q in np.quantile(found, (0.5, 0.95))))


def durations(schedule: ir.Schedule) -> dict[str, Times]:
    """Return the forecast's time in ns of every op of compute, d2h and h2d by id, as arrays of one execution."""
    found = {}
    for times in schedule.forecast.times:
        ops = getattr(schedule.devices[times.device], times.lane)
        for op, start, end in zip(ops, times.start_ns, times.end_ns, strict=True):
            if not isinstance(op, ir.MessageOp):
                found[op.id] = np.array([end - start], np.float64)
    return found


def makespans(schedule: ir.Schedule, taken: Mapping[str, Times]) -> Times:
    """Return what each execution takes, in ns, when ops take `taken` (by id; arrays of equal length)."""
    return _Execution(schedule, taken).run()


@dataclass
class _Pair:
    """The channel of two devices: the messages between them, in order, and when the last one was over."""

    order: list[str] = field(default_factory=list)
    """Ids of the sends."""
    done: int = 0
    free: Any = 0.0


class _Execution:
    def __init__(self, schedule: ir.Schedule, taken: Mapping[str, Times]) -> None:
        self.schedule = schedule
        self.taken = taken
        self.lanes: list[tuple[int, Sequence[ir.Op]]] = [
            (device.device, lane) for device in schedule.devices for lane in (device.compute, device.d2h, device.h2d)
        ]
        self.next = [0] * len(self.lanes)
        self.clock: list[Any] = [0.0] * len(self.lanes)
        self.over: dict[str, Any] = {}
        """When each op is over: a message when it has arrived."""
        self.issued: dict[str, Any] = {}
        self.pairs: dict[tuple[int, int], _Pair] = defaultdict(_Pair)
        self.behind = self._shared_links()
        self.busy = busy_ns(schedule)
        self.free: dict[int, Any] = {}
        """By lane of compute: when the last op that takes time, and the copies behind it, are over."""
        self.first: Any = None
        for device in schedule.devices:
            for op in device.compute:
                if isinstance(op, ir.MessageOp) and device.device < op.peer:
                    self.pairs[device.device, op.peer].order.append(_send_of(op))

    def _shared_links(self) -> dict[str, str]:
        """Return the transfer that each one follows on a link of several devices, by the forecast's order."""
        found: dict[str, str] = {}
        for link in self.schedule.forecast.links:
            for name in ("d2h", "h2d") if len(link.devices) > 1 else ():
                order = []
                for times in self.schedule.forecast.times:
                    if times.lane == name and times.device in link.devices:
                        ops = getattr(self.schedule.devices[times.device], name)
                        order += [
                            (start, end, op.id)
                            for op, start, end in zip(ops, times.start_ns, times.end_ns, strict=True)
                        ]
                order.sort()
                found |= {after[2]: before[2] for before, after in pairwise(order)}
        return found

    def run(self) -> Times:
        moved = True
        while moved:
            moved = False
            for number, (device, lane) in enumerate(self.lanes):
                while self.next[number] < len(lane) and self._run(number, device, lane[self.next[number]]):
                    self.next[number] += 1
                    moved = True
            for pair in self.pairs.values():
                moved = self._transfer(pair) or moved
        assert all(n == len(lane) for n, (_, lane) in zip(self.next, self.lanes, strict=True))
        last = self.over.keys() & self.taken.keys()
        ends: Any = 0.0
        for op in last:
            ends = np.maximum(ends, self.over[op])
        result: Times = np.atleast_1d(ends - self.first)
        return result

    def _run(self, number: int, device: int, op: ir.Op) -> bool:
        """Run the next op of a lane if what it waits for is over."""
        needs = list(op.after)
        if isinstance(op, ir.Forward) and op.stage and self._owner(op.stage - 1) != device:
            needs.append(op_id("recv_activation", op.stage, op.microbatch, None, op.slice_or_none))
        last = op.stage + 1 == len(self.schedule.stages)
        if isinstance(op, ir.Backward | ir.BackwardInput) and not last and self._owner(op.stage + 1) != device:
            needs.append(op_id("recv_gradient", op.stage, op.microbatch, None, op.slice_or_none))
        if op.id in self.behind:
            needs.append(self.behind[op.id])
        if any(need not in self.over for need in needs):
            return False
        start = self.clock[number]
        for need in needs:
            start = np.maximum(start, self.over[need])
        if isinstance(op, ir.MessageOp):
            self.issued[op.id] = self.clock[number] = start
            return True
        before, after = self.busy.get(op.id, NO_COPIES)
        if number in self.free:
            start = np.maximum(start, self.free[number] + before)
        self.first = start if self.first is None else np.minimum(self.first, start)
        self.clock[number] = self.over[op.id] = start + self.taken[op.id]
        if self.busy and isinstance(op, ir.ComputeOp):
            self.free[number] = self.over[op.id] + after
        return True

    def _transfer(self, pair: _Pair) -> bool:
        """Let the messages of a pair pass whose halves have been issued."""
        before = pair.done
        while pair.done < len(pair.order):
            send = pair.order[pair.done]
            receive, cost = self._other_half(send)
            if send not in self.issued or receive not in self.issued:
                break
            begin = np.maximum(np.maximum(self.issued[send], self.issued[receive]), pair.free)
            pair.free = self.over[send] = self.over[receive] = begin + cost
            pair.done += 1
        return pair.done > before

    def _other_half(self, send: str) -> tuple[str, int]:
        """Return the receive of a send, and what the message takes in ns."""
        name = parse(send)
        setup = self.schedule.setup
        number = setup.class_of(name.microbatch, name.slice or 0)
        costs = self.schedule.forecast.stages[name.stage * setup.classes + number]
        if name.kind == "send_activation":
            other = name._replace(kind="recv_activation", stage=name.stage + 1)
            return other.id, costs.send_activation_ns
        return name._replace(kind="recv_gradient", stage=name.stage - 1).id, costs.send_gradient_ns

    def _owner(self, stage: int) -> int:
        return self.schedule.stages[stage].device


def _send_of(op: ir.MessageOp) -> str:
    """Return the id of the sending half."""
    if isinstance(op, ir.RecvActivation):
        return op_id("send_activation", op.stage - 1, op.microbatch, None, op.slice_or_none)
    if isinstance(op, ir.RecvGradient):
        return op_id("send_gradient", op.stage + 1, op.microbatch, None, op.slice_or_none)
    return op.id
