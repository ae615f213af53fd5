"""One device's share of a schedule: its ops in order, with their waits, tensors handed from op to op.

`step` walks the compute lane; the transfer lanes run beside it. Order and waits of the schedule are followed to the
letter. Its times are ignored, but for when a GPU's host issues a reload that could make its compute stream wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.deliveries import waits
from optpipe_compiler.documents.ops import op_id
from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch import engine
from runtime_torch.bundles import Boundary, in_words
from runtime_torch.cuda import Cuda, pinned
from runtime_torch.execution import StageExecution
from runtime_torch.lanes import LaneOps, ThreadLanes
from runtime_torch.microbatch import Microbatch, enter
from runtime_torch.pinned import PinnedPool
from runtime_torch.streams import StreamCarrier, StreamLanes
from runtime_torch.timeline import OpRecorder, OpTime, told_to_profiler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from runtime_torch.execution import Layers
    from runtime_torch.messages import Mailbox
    from runtime_torch.meter import Meter
    from runtime_torch.microbatch import Slice
    from runtime_torch.streams import Backend, Lanes

Mark = int | torch.cuda.Event
"""A point of the timeline: host time in ns, or an event on a stream."""


class StageOps(Protocol):
    """What a stage can do: `StageExecution`, or its stand-in in a rehearsal; all of a device have the same meters.

    What is called a microbatch is the number of a unit: microbatch x slices + slice.
    """

    device: torch.device
    meter: Meter
    host_meter: Meter

    def begin(self) -> None:
        """A step begins."""

    def forward(
        self,
        microbatch: int,
        x: Tensor,
        target: Tensor | None = None,
        recomputed: Sequence[Layers] = (),
        part: Slice | None = None,
    ) -> Tensor:
        """F."""

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """B."""

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """I."""

    def backward_weight(self, microbatch: int) -> None:
        """W."""

    def recompute(self, microbatch: int, layers: Layers) -> None:
        """R."""

    def offload(self, microbatch: int, layers: Layers) -> None:
        """D2H."""

    def reload(self, microbatch: int, layers: Layers) -> None:
        """H2D."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step on this rank. `loss` only where the last stage is."""

    loss: float | None
    start_ns: int
    end_ns: int
    """First start and last end over the rank's ops, transfers included; the machine's monotonic clock."""
    busy_ns: int
    """Sum of the compute ops."""
    peak_activation_bytes: int
    peak_host_bytes: int
    ops: list[OpTime]

    @property
    def step_ns(self) -> int:
        """This rank's span."""
        return self.end_ns - self.start_ns

    @property
    def bubble(self) -> float:
        """The share of the span in which this rank's compute lane was idle."""
        return 1 - self.busy_ns / max(1, self.step_ns)


@dataclass(frozen=True, slots=True)
class _Due:
    """An op of the compute lane, with what is asked for at each step."""

    op: ir.Op
    id: str
    run: Callable[[_Due, int, int], None]
    unit: int
    sends: str
    """Of a forward or backward whose result another device needs: the id of the message."""


@dataclass(frozen=True, slots=True)
class _Passed:
    """A tensor that one op has made for another; meanwhile others run."""

    tensor: Tensor
    changes: int | None = None
    """How often it had been changed in place; None: no layer has it."""

    def taken(self, op_id: str) -> Tensor:
        """Return the tensor; raise RunFailed where the layer that returned it has changed it since."""
        if self.changes is not None and engine.changes(self.tensor) != self.changes:
            way = "backward" if "backward" in op_id or "gradient" in op_id else "forward"
            raise RunFailed(
                f"{op_id}: what it passes on was changed in place since a layer's {way} had returned it, expected a "
                "new tensor from each: other microbatches run before it is read"
            )
        return self.tensor


class Replay:
    """Runs one device's ops, step by step, over real stages or rehearsed ones.

    `stages`: this device's stages by number. `boundary(stage, unit)`: shape and dtype of an output of `stage`.
    `message_bytes(stage, unit)`: what an output counts in the meter, where its tensor is a stand-in. `on_weights`:
    called with the stage after each of its W. `on_failure`: see `Runner`. `backend`: of the streams that the transfers
    run on (CUDA has its own); None: in threads.
    """

    def __init__(
        self,
        schedule: ir.Schedule,
        device: int,
        stages: Mapping[int, StageOps],
        boundary: Callable[[int, int], Boundary],
        mailbox: Mailbox,
        *,
        message_bytes: Callable[[int, int], int] | None = None,
        on_weights: Callable[[int], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
        backend: Backend | None = None,
    ) -> None:
        expected = [stage.stage for stage in schedule.stages_of(device)]
        if sorted(stages) != expected:
            raise BadInput(f"rank {device} has stages {sorted(stages)}, the schedule expects {expected}")
        self.plan = schedule.devices[device]
        self.stages = stages
        self.last_stage = len(schedule.stages) - 1
        self._microbatches = schedule.setup.microbatches
        self._slices = schedule.setup.slices
        self._boundary = boundary
        first = next(iter(stages.values()))
        self._on, self._meter, self._host_meter = first.device, first.meter, first.host_meter
        self._message_bytes = message_bytes
        self._on_weights = on_weights
        self._names = {
            stage.stage: f"rank {device}: layer {stage.layers[1] - 1}" for stage in schedule.stages_of(device)
        }
        """What an output is said to come from."""
        self._mailbox = mailbox
        self._timeline = OpRecorder(self._on)
        backend = Cuda(self._on) if self._on.type == "cuda" else backend
        self._pool: PinnedPool | None = None
        self._lanes = self._make_lanes(schedule, on_failure, backend)
        self._recomputed: dict[tuple[int, int], list[Layers]] = defaultdict(list)
        for op in self.plan.compute:
            if isinstance(op, ir.Recompute):
                self._recomputed[op.stage, self._unit(op)].append(op.layers)
        ways: dict[str, Callable[[_Due, int, int], None]] = {
            "forward": self._forward,
            "backward": self._backward,
            "backward_input": self._backward,
            "backward_weight": self._backward_weight,
            "recompute": self._recompute,
            "send_activation": self._send,
            "send_gradient": self._send,
            "recv_activation": self._recv,
            "recv_gradient": self._recv,
        }
        self._order = [_Due(op, op.id, ways[op.name], self._unit(op), self._sending(op)) for op in self.plan.compute]
        self._inputs: Sequence[Tensor] | None = None
        self._targets: Sequence[Tensor] | None = None
        self._announced: Sequence[Microbatch] = [Microbatch(1 / self._microbatches)] * self._microbatches * self._slices
        self._units: Sequence[Microbatch] = self._announced
        """This step's."""
        self._losses: Tensor | None = None
        """This step's, by unit, where the last stage is; in one buffer for all steps, so that none adds to it."""
        self._activations: dict[tuple[int, int], _Passed] = {}
        self._gradients: dict[tuple[int, int], _Passed] = {}
        self._outbox: dict[str, _Passed] = {}

    def _make_lanes(
        self,
        schedule: ir.Schedule,
        on_failure: Callable[[BaseException], None] | None,
        backend: Backend | None,
    ) -> Lanes:
        plan = self.plan
        messages = waits(schedule, plan.device)
        times = {timed.op.id: timed for timed in schedule.timed(plan.device, messages=True)}
        others: dict[str, list[str]] = {}
        for lane in plan.lanes.values():
            own = {op.id for op in lane}
            for op in lane:
                others[op.id] = [name for name in (*op.after, *messages[op.id]) if name not in own]
        work = LaneOps(
            plan.compute,
            plan.d2h,
            plan.h2d,
            others,
            messages,
            self._mailbox.wait,
            self._mailbox.is_delivered,
            self._transfer,
            self._reload_sizes,
            reloads_due(plan, times),
            transfers_begin(plan, times),
        )
        if backend is None:
            return ThreadLanes(work, on_failure)
        self._pool = PinnedPool(plan.host_bytes, pinned if self._on.type == "cuda" else _pageable)
        carrier = StreamCarrier(backend, self._pool, self._meter, self._host_meter)
        for stage in self.stages.values():
            if isinstance(stage, StageExecution):
                stage.carrier = carrier
        return StreamLanes(work, backend, carrier)

    def _unit(self, op: ir.Op) -> int:
        return op.microbatch * self._slices + (op.slice_or_none or 0)

    def _sending(self, op: ir.Op) -> str:
        kind = "send_activation" if isinstance(op, ir.Forward) else "send_gradient"
        return op_id(kind, op.stage, op.microbatch, None, op.slice_or_none)

    def close(self) -> None:
        """Let the host memory of offloads go: another replay may need as much. There are no more steps."""
        if self._pool is not None:
            self._pool.close()

    # -- a step

    def step(
        self,
        inputs: Sequence[Tensor] | None,
        targets: Sequence[Tensor] | None,
        units: Sequence[Microbatch] | None = None,
        losses: list[Tensor] | None = None,
    ) -> StepResult:
        """Run all ops once.

        All are by unit: `inputs` where the first stage is, `targets` where layers get them. What the backwards add to
        the parameters is the gradient of the sum of the losses times the weights of `units` (absent: the mean over the
        microbatches). `losses` is filled with each microbatch's loss where the last stage is.
        """
        self._inputs, self._targets = inputs, targets
        self._units = units = self._announced if units is None else units
        self._meter.reset_peak()
        self._host_meter.reset_peak()
        self._timeline.begin()
        for stage in self.stages.values():
            stage.begin()
        self._lanes.begin()
        self._mailbox.begin()
        try:
            for due in self._order:
                due.run(due, due.op.stage, due.unit)
        except BaseException as error:
            error.add_note(f"optpipe: rank {self.plan.device} failed in {due.id}")
            self._lanes.abort(error)
            raise
        finally:
            enter(None)
        self._lanes.finish()
        self._mailbox.drain()
        self._inputs = self._targets = None
        self._units = self._announced  # what they know, such as keyword arguments, is the loop's again
        ops = self._timeline.collect()
        found = [] if self._losses is None else self._losses.view(-1, self._slices).sum(1).unbind()
        if losses is not None:
            losses[:] = found
        return StepResult(
            loss=weighted(found, units[:: self._slices]) if found else None,
            start_ns=min(op.start_ns for op in ops),
            end_ns=max(op.end_ns for op in ops),
            busy_ns=sum(op.end_ns - op.start_ns for op in ops if op.lane == "compute"),
            peak_activation_bytes=self._meter.peak_bytes,
            peak_host_bytes=self._host_meter.peak_bytes,
            ops=ops,
        )

    # -- ops of the compute lane

    def _forward(self, due: _Due, stage: int, unit: int) -> None:
        if stage == 0:
            assert self._inputs is not None
            x, own = self._inputs[unit], None
        else:
            x = own = self._activations.pop((stage, unit)).taken(due.id)
        start = self._start(due)
        target = None if self._targets is None else self._targets[unit]
        enter(self._units[unit])
        with told_to_profiler(due.op):
            recomputed = self._recomputed.get((stage, unit), ())
            out = self.stages[stage].forward(unit, x, target, recomputed, self._units[unit].slice)
        expected = None if stage == self.last_stage else self._boundary(stage, unit)
        check_output(out, expected, self._names[stage], due.op.microbatch)
        if stage == self.last_stage:
            if self._losses is None or self._losses.dtype != out.dtype:
                self._losses = torch.zeros(self._microbatches * self._slices, dtype=out.dtype, device=out.device)
            self._losses[unit].copy_(out)
            # by the step's loss; a new one each time, since a backward may change what it is given
            self._gradients[stage, unit] = _Passed(torch.full_like(out, self._units[unit].weight))
        else:
            out = self._keep(out, stage, unit)
        if own is not None:
            self._meter.release(own.untyped_storage())
        del x, own
        if stage + 1 in self.stages:
            self._activations[stage + 1, unit] = _Passed(out, engine.changes(out))
        elif stage != self.last_stage:
            self._outbox[due.sends] = _Passed(out, engine.changes(out))
        self._end(due, start)

    def _backward(self, due: _Due, stage: int, unit: int) -> None:
        gradient = self._gradients.pop((stage, unit)).taken(due.id)
        start = self._start(due)
        enter(self._units[unit])
        execution = self.stages[stage]
        fused = isinstance(due.op, ir.Backward)
        with told_to_profiler(due.op):
            found = (execution.backward if fused else execution.backward_input)(unit, gradient)
        if stage > 0:
            if found is None:
                raise RunFailed(f"{due.id}: the stage's output does not depend on its input")
            found = self._keep(found, stage - 1, unit)
        if stage != self.last_stage:
            self._meter.release(gradient.untyped_storage())
        del gradient
        if found is not None and stage - 1 in self.stages:
            self._gradients[stage - 1, unit] = _Passed(found, engine.changes(found))
        elif found is not None:
            self._outbox[due.sends] = _Passed(found, engine.changes(found))
        self._end(due, start)

    def _backward_weight(self, due: _Due, stage: int, unit: int) -> None:
        start = self._start(due)
        enter(self._units[unit])
        with told_to_profiler(due.op):
            self.stages[stage].backward_weight(unit)
        if self._on_weights is not None:
            self._on_weights(stage)
        self._end(due, start)

    def _recompute(self, due: _Due, stage: int, unit: int) -> None:
        assert isinstance(due.op, ir.Recompute)
        start = self._start(due)
        enter(self._units[unit])
        with told_to_profiler(due.op):
            self.stages[stage].recompute(unit, due.op.layers)
        self._end(due, start)

    def _send(self, due: _Due, stage: int, unit: int) -> None:
        assert isinstance(due.op, ir.MessageOp)
        self._lanes.start(due.id)
        self._mailbox.send(due.id, self._outbox.pop(due.id).taken(due.id), due.op.peer)
        self._lanes.complete(due.id)

    def _recv(self, due: _Due, stage: int, unit: int) -> None:
        assert isinstance(due.op, ir.MessageOp)
        self._lanes.start(due.id)
        activation = isinstance(due.op, ir.RecvActivation)
        border = stage - 1 if activation else stage
        shape, dtype = self._boundary(border, unit)
        buffer = self._hold(torch.empty(shape, dtype=dtype, device=self._on), border, unit)
        (self._activations if activation else self._gradients)[stage, unit] = _Passed(buffer)
        self._mailbox.recv(due.id, buffer, due.op.peer)
        self._lanes.complete(due.id)

    # -- how

    def _transfer(self, op: ir.Op) -> None:
        """One offload or reload, where its lane runs it: in a thread, or on a stream."""
        assert isinstance(op, ir.Offload | ir.Reload)
        execution, there = self.stages[op.stage], isinstance(op, ir.Offload)
        start = self._timeline.now()
        with told_to_profiler(op):
            (execution.offload if there else execution.reload)(self._unit(op), op.layers)
        self._timeline.add(op.id, "d2h" if there else "h2d", start, self._timeline.now())

    def _reload_sizes(self, op: ir.Op) -> Sequence[int]:
        """The bytes of each storage that a reload brings back; nothing is known of a stand-in's."""
        stage = self.stages[op.stage]
        if isinstance(stage, StageExecution) and isinstance(op, ir.Reload):
            return stage.reload_sizes(self._unit(op), op.layers)
        return ()

    def _start(self, due: _Due) -> Mark:
        """Wait for all that the op needs; return its start."""
        self._lanes.start(due.id)
        return self._timeline.now()

    def _end(self, due: _Due, start: Mark) -> None:
        self._timeline.add(due.id, "compute", start, self._timeline.now())
        self._lanes.complete(due.id)

    def _keep(self, tensor: Tensor, border: int, unit: int) -> Tensor:
        """Take over what crosses to another stage: contiguous, on a storage of its own size, and counted."""
        tensor = tensor.resolve_conj().resolve_neg()  # a message has the bits alone
        if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return self._hold(tensor, border, unit)

    def _hold(self, tensor: Tensor, border: int, unit: int) -> Tensor:
        nbytes = None if self._message_bytes is None else self._message_bytes(border, unit)
        self._meter.hold(tensor.untyped_storage(), nbytes)
        return tensor


def transfers_begin(plan: ir.Device, times: Mapping[str, ir.OpForecast]) -> dict[str, int]:
    """Return by offload and reload how many ops of the compute lane are forecast to start before it."""
    starts = [times[op.id].start_ns for op in plan.compute]
    return {op.id: bisect_left(starts, times[op.id].start_ns) for op in (*plan.d2h, *plan.h2d)}


def reloads_due(plan: ir.Device, times: Mapping[str, ir.OpForecast]) -> dict[str, int]:
    """Return by reload how many ops of the compute lane are forecast to start before the last offload is over that it,
    or a reload before it, waits for."""
    starts = [times[op.id].start_ns for op in plan.compute]
    ends = {op.id: times[op.id].end_ns for op in plan.d2h}
    found, last = {}, 0
    for op in plan.h2d:
        last = max([last, *(ends.get(name, 0) for name in op.after)])
        found[op.id] = bisect_left(starts, last)
    return found


def weighted(losses: Sequence[Tensor], microbatches: Sequence[Microbatch]) -> float:
    """Return the sum of the losses times their weights; what weighs nothing may be no number, as a mean of nothing."""
    found: list[float] = torch.stack(list(losses)).tolist()
    return sum(loss * one.weight for loss, one in zip(found, microbatches, strict=True) if one.weight)


def check_output(out: Tensor, expected: Boundary | None, name: str, microbatch: int) -> None:
    """Raise BadInput where a layer returns another tensor than the next one counts on; None: than the loss."""
    shape, dtype = expected or ((), out.dtype)
    if out.shape != shape or out.dtype != dtype:
        wanted = "the scalar loss" if expected is None else in_words(expected)
        raise BadInput(
            f"{name} returned {in_words((tuple(out.shape), out.dtype))} for microbatch {microbatch}, expected {wanted}"
        )


def _pageable(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
