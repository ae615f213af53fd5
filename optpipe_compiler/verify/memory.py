"""The memory rule: the most that a device, and its share of the host, can hold in any execution.

The state of an execution is a set of events closed under happens-before. All allocations of a device lie on two
chains: the starts of its compute lane and of its h2d lane. Let c and h be the last of these starts in a closed set: the
least closed set that holds c and h has the same allocations, and no more frees. So the maximum over all closed sets is
the maximum over the pairs (c, h), each allowed to be absent, of the sum over the least closed set of both; on every
chain that set reaches to the later of the two clocks. Bytes on the host are allocated on the d2h lane alone, so there
the single starts are enough. (No allocation is negative and no completion allocates: the rules on tables see to it.)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from optpipe_compiler import ir
from optpipe_compiler.verify.report import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.verify.causality import Causality
    from optpipe_compiler.verify.plan import Lane, Plan

Numbers = npt.NDArray[Any]


class Table:
    """The memory table of docs/IR.md: bytes that an op adds when it starts and when it has completed."""

    def __init__(self, plan: Plan) -> None:
        self.stages = plan.stages
        self.recomputed: dict[tuple[int, int], list[ir.Range]] = defaultdict(list)
        for place in plan.places:
            if isinstance(place.op, ir.Recompute):
                self.recomputed[place.op.stage, place.op.microbatch].append(place.op.layers)

    def on_device(self, op: ir.Op) -> tuple[int, int]:
        """Return the bytes on the device that `op` adds at its start and at its end (frees are negative)."""
        stage = self.stages[op.stage]
        saved, residue, captured = map(sum, (stage.saved_bytes, stage.residue_bytes, stage.captured_bytes))
        match op:
            case ir.RecvActivation():
                return stage.input_bytes, 0
            case ir.RecvGradient():
                return stage.output_bytes, 0
            case ir.SendActivation():
                return 0, -stage.output_bytes
            case ir.SendGradient():
                return 0, -stage.input_bytes
            case ir.Forward():
                transient = max(stage.forward_transient_bytes)
                dropped = sum(self.dropped(stage, layers) for layers in self.recomputed[op.stage, op.microbatch])
                return saved + stage.output_bytes + transient, -transient - stage.input_bytes - dropped
            case ir.Offload():
                return 0, -_saved(stage, op.layers)
            case ir.Reload():
                return _saved(stage, op.layers), 0
            case ir.Recompute():
                transient = max(_of(stage, stage.forward_transient_bytes, op.layers))
                return self.dropped(stage, op.layers) + transient, -transient
            case ir.BackwardInput():
                transient = max(stage.backward_input_transient_bytes)
                freed = saved + captured - residue
                return stage.input_bytes + captured + transient, -transient - stage.output_bytes - freed
            case ir.BackwardWeight():
                transient = max(stage.backward_weight_transient_bytes)
                return transient, -transient - residue
            case ir.Backward():
                transient = max(stage.backward_transient_bytes)
                return stage.input_bytes + transient, -transient - stage.output_bytes - saved
        raise AssertionError(f"an op without an entry in the memory table: {op.name}")

    def on_host(self, op: ir.Op) -> tuple[int, int]:
        """Return the bytes on the host that `op` adds at its start and at its end."""
        match op:
            case ir.Offload():
                return _saved(self.stages[op.stage], op.layers), 0
            case ir.Reload():
                return 0, -_saved(self.stages[op.stage], op.layers)
        return 0, 0

    def dropped(self, stage: ir.Stage, layers: ir.Range) -> int:
        """Return what a recomputed range gives up after its forward: saved bytes less its checkpoint."""
        return _saved(stage, layers) - stage.checkpoint_bytes[layers[0] - stage.layers[0]]


def _of(stage: ir.Stage, numbers: list[int], layers: ir.Range) -> list[int]:
    offset = stage.layers[0]
    return numbers[layers[0] - offset : layers[1] - offset]


def _saved(stage: ir.Stage, layers: ir.Range) -> int:
    return sum(_of(stage, stage.saved_bytes, layers))


@dataclass(frozen=True)
class Worst:
    """The most that can be held, and the ops that have just started then."""

    held: int
    ops: tuple[str, ...]


class Memory:
    """The bytes that every event adds, on its device and on the host, ready to be summed over closed sets."""

    def __init__(self, plan: Plan, causality: Causality) -> None:
        self.plan = plan
        self.causality = causality
        self.events = causality.events
        table = Table(plan)
        self.device: dict[tuple[int, int], int] = defaultdict(int)
        self.host: dict[tuple[int, int], int] = defaultdict(int)
        for place in plan.places:
            for weights, (start, end) in (
                (self.device, table.on_device(place.op)),
                (self.host, table.on_host(place.op)),
            ):
                weights[place.device, self.events.start[place.id]] += start
                weights[place.device, self.events.done[place.id]] += end

    def worst_on_device(self, device: int) -> Worst:
        """Return the maximum over all closed sets of what they hold on `device`, always-there bytes included.

        Memory is taken by starts on two lanes, so a maximum is the least set with some last start on each of them. Two
        starts of which one implies the other make no set that one of them does not make alone.
        """
        compute, reloads = self._starts(device, "compute"), self._starts(device, "h2d")
        sums = self._sums(device, self.device)
        clocks, others = self._rows(compute, sums), self._rows(reloads, sums)
        alone = _held(sums, clocks), _held(sums, others)
        rows = [int(np.argmax(held)) for held in alone]
        best, where = max((int(alone[0][rows[0]]), (rows[0], 0)), (int(alone[1][rows[1]]), (0, rows[1])))
        for number, (first, end) in enumerate(self._neither(device, compute, reloads), 1):
            if first < end:
                held = _held(sums, np.maximum(clocks[first:end], others[number]))
                index = int(np.argmax(held))
                if held[index] > best:
                    best, where = int(held[index]), (first + index, number)
        pair = [starts[at - 1] for starts, at in zip((compute, reloads), where, strict=True) if at]
        return Worst(self._always(device) + best, tuple(self.events.op_of[event] for event in pair))

    def _neither(self, device: int, compute: list[int], reloads: list[int]) -> list[tuple[int, int]]:
        """Return, for each reload, which rows `[first, end)` of the compute lane's starts it does not imply and that
        do not imply it; both change only one way along their lanes."""
        lanes = [self.causality.number[device, lane] for lane in ("compute", "h2d")]
        clock = self.causality.clock
        first = np.searchsorted(clock[compute, lanes[0]], clock[reloads, lanes[0]], side="right")
        end = np.searchsorted(clock[compute, lanes[1]], clock[reloads, lanes[1]], side="left")
        return [(int(low) + 1, int(high) + 1) for low, high in zip(first, end, strict=True)]

    def worst_on_host(self, device: int) -> Worst:
        """Return the maximum over all closed sets of what the offloads of `device` hold on the host."""
        starts = self._starts(device, "d2h")
        sums = self._sums(device, self.host)
        held = _held(sums, self._rows(starts, sums))
        index = int(np.argmax(held))
        return Worst(int(held[index]), (self.events.op_of[starts[index - 1]],) if index else ())

    def _always(self, device: int) -> int:
        static = sum(stage.static_bytes for stage in self.plan.stages if stage.device == device)
        return self.plan.schedule.setup.reserve_bytes + static

    def _starts(self, device: int, lane: Lane) -> list[int]:
        return [self.events.start[place.id] for place in self.plan.lanes[device, lane]]

    def _rows(self, starts: list[int], sums: dict[int, Numbers]) -> npt.NDArray[np.int32]:
        """Return the clocks of `starts` under a row of zeros, which stands for no start at all; a column per sum."""
        none = np.zeros((1, len(sums)), np.int32)
        return np.concatenate([none, self.causality.clock[np.ix_(starts, list(sums))]])

    def _sums(self, device: int, weights: dict[tuple[int, int], int]) -> dict[int, Numbers]:
        """Return, per chain with a weight on `device`, the sum of its first n events for every n."""
        sums: dict[int, Numbers] = {}
        for chain, events in self.events.chains.items():
            if device in chain:
                added = [weights.get((device, event), 0) for event in events]
                if any(added):
                    kind = np.int64 if sum(map(abs, added)) < 2**56 else object
                    sums[self.causality.number[chain]] = np.cumsum([0, *added], dtype=kind)
        return sums


def _held(sums: dict[int, Numbers], clocks: npt.NDArray[np.int32]) -> Numbers:
    """Return what the closed sets with these clocks hold, one number per row."""
    held: Numbers = np.zeros(len(clocks), np.int64)
    for column, sums_of_chain in enumerate(sums.values()):
        held = held + sums_of_chain[clocks[:, column]]
    return held


def memory(plan: Plan, causality: Causality) -> Iterator[Violation]:
    """In every execution and at every moment device d holds at most peak_bytes, and on the host at most host_bytes."""
    state = Memory(plan, causality)
    for number, device in enumerate(plan.schedule.devices):
        for rule, worst, promised, name in (
            ("device-memory", state.worst_on_device(number), device.peak_bytes, "peak_bytes"),
            ("host-memory", state.worst_on_host(number), device.host_bytes, "host_bytes"),
        ):
            if worst.held > promised:
                yield _exceeds(plan, number, rule, worst, f"{name} ({promised})", worst.held - promised)


def _exceeds(plan: Plan, device: int, rule: str, worst: Worst, promise: str, excess: int) -> Violation:
    where = "on the host" if rule == "host-memory" else "at once"
    moment = f", when {' and '.join(worst.ops)} start as early as order and waits allow" if worst.ops else ""
    message = f"device {device} can hold {worst.held} bytes {where}, {excess} more than {promise}{moment}"
    if not worst.ops:
        return Violation(rule, message, device)
    return plan.by_id[worst.ops[0]].breaks(rule, message, *worst.ops[1:])
