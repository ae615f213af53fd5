"""One device's share of a schedule: its ops in order, with their waits, tensors handed from op to op.

The engine (adapter.py) calls one method per op of the compute lane; the transfer lanes run beside it. Order and waits
of the schedule are followed to the letter, its times are ignored.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from optpipe_compiler import ir
from optpipe_compiler.errors import RunFailed
from runtime_torch import deliveries
from runtime_torch.lanes import Board, Lane
from runtime_torch.messages import Mailbox
from runtime_torch.timeline import OpTime, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from runtime_torch.execution import Layers
    from runtime_torch.store import Meter

Boundary = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what crosses between two stages or layers, for one microbatch."""


class StageOps(Protocol):
    """What a stage can do: `StageExecution`, or its stand-in in a rehearsal."""

    def forward(
        self, microbatch: int, x: Tensor, target: Tensor | None = None, recomputed: Sequence[Layers] = ()
    ) -> Tensor:
        """F."""
        ...

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """B."""
        ...

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """I."""
        ...

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        ...

    def recompute(self, microbatch: int, layers: Layers) -> None:
        """R."""
        ...

    def offload(self, microbatch: int, layers: Layers) -> None:
        """D2H."""
        ...

    def reload(self, microbatch: int, layers: Layers) -> None:
        """H2D."""
        ...


class Replay:
    """Runs one device's ops, step by step.

    `stages`: this device's stages by number. `boundary(stage)`: shape and dtype of the output of `stage`.
    `message_bytes(stage)`: what that output counts in the meter, where its tensor is only a stand-in. `on_arrival`:
    called with a tensor from another device before the op that reads it starts. `on_failure`: see `Runner`.
    """

    def __init__(
        self,
        schedule: ir.Schedule,
        device: int,
        stages: Mapping[int, StageOps],
        boundary: Callable[[int], Boundary],
        *,
        group: dist.ProcessGroup | None,
        on: torch.device,
        meter: Meter,
        message_bytes: Callable[[int], int] | None = None,
        on_arrival: Callable[[Tensor], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.plan = schedule.devices[device]
        self.stages = stages
        self.last_stage = len(schedule.stages) - 1
        self._boundary = boundary
        self._on = on
        self._meter = meter
        self._message_bytes = message_bytes
        self._on_arrival = on_arrival
        self._mailbox = Mailbox(group, meter)
        self._board = Board(on_failure)
        self._timeline = Timeline(on)
        self._messages = deliveries.implied(schedule, device)
        self._waits: dict[str, list[str]] = {}
        for lane in (self.plan.compute, self.plan.d2h, self.plan.h2d):
            self._plan_waits(lane)
        self._received = {op.id for op in self.plan.compute if isinstance(op, ir.RecvActivation | ir.RecvGradient)}
        self._recomputed: dict[tuple[int, int], list[Layers]] = defaultdict(list)
        for op in self.plan.compute:
            if isinstance(op, ir.Recompute):
                self._recomputed[op.stage, op.microbatch].append(op.layers)
        self._transfers = [
            Lane("d2h", self.plan.d2h, self._transfer, self._board, on),
            Lane("h2d", self.plan.h2d, self._transfer, self._board, on),
        ]
        self._remaining: Iterator[ir.Op] = iter(())
        self._targets: Sequence[Tensor] | None = None
        self._activations: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._outbox: dict[str, Tensor] = {}

    def _plan_waits(self, lane: Sequence[ir.Op]) -> None:
        """For each op: the ops of other lanes to be over, and messages to be issued there, before it starts."""
        own = {op.id for op in lane}
        for op in lane:
            self._waits[op.id] = [name for name in (*op.after, *self._messages[op.id]) if name not in own]

    # -- a step

    def begin(self, targets: Sequence[Tensor] | None) -> None:
        """Start a step; `targets` by microbatch, needed by the last stage."""
        self._board.reset()
        self._timeline.begin()
        self._remaining = iter(self.plan.compute)
        self._targets = targets
        for lane in self._transfers:
            lane.start()

    def finish(self) -> list[OpTime]:
        """End a step: all transfers and messages over, nothing left behind; return when each op ran."""
        for lane in self._transfers:
            lane.join()
        self._board.check()
        self._mailbox.drain()
        left = next(self._remaining, None)
        if left is not None:
            raise RunFailed(f"device {self.plan.device}: the engine left out {left.id}")
        return self._timeline.collect()

    def abort(self, error: BaseException) -> None:
        """The compute lane failed: let the transfer lanes end."""
        self._board.fail(error)

    # -- ops of the compute lane, called by the engine

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        """F; `x` is the microbatch itself on the first stage."""
        op = self._next("forward", stage, microbatch)
        own = x is None
        x = self._activations.pop((stage, microbatch)) if x is None else x
        self._arrived(op, x if own else None)
        target = self._targets[microbatch] if self._targets is not None and stage == self.last_stage else None
        with self._timed(op):
            ranges = self._recomputed.get((stage, microbatch), ())
            out = self.stages[stage].forward(microbatch, x, target, ranges)
            if stage != self.last_stage:
                out = self._keep(out, stage)
        if own:
            self._meter.release(x.untyped_storage())
        del x
        if stage + 1 in self.stages:
            self._activations[stage + 1, microbatch] = out
        elif stage != self.last_stage:
            self._outbox[f"send_activation:{stage}:{microbatch}"] = out
        self._complete(op)
        return out

    def backward(self, stage: int, microbatch: int, *, fused: bool) -> None:
        """B, or I."""
        op = self._next("backward" if fused else "backward_input", stage, microbatch)
        gradient = None if stage == self.last_stage else self._gradients.pop((stage, microbatch))
        self._arrived(op, gradient)
        execution = self.stages[stage]
        with self._timed(op):
            found = (execution.backward if fused else execution.backward_input)(microbatch, gradient)
            if stage > 0:
                if found is None:
                    raise RunFailed(f"{op.id}: the stage's output does not depend on its input")
                found = self._keep(found, stage - 1)
        if gradient is not None:
            self._meter.release(gradient.untyped_storage())
        del gradient
        if found is not None and stage - 1 in self.stages:
            self._gradients[stage - 1, microbatch] = found
        elif found is not None:
            self._outbox[f"send_gradient:{stage}:{microbatch}"] = found
        self._complete(op)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """W."""
        op = self._next("backward_weight", stage, microbatch)
        self._arrived(op, None)
        with self._timed(op):
            self.stages[stage].backward_weight(microbatch)
        self._complete(op)

    def recompute(self, stage: int, microbatch: int) -> None:
        """R: the range is the op's own."""
        op = self._next("recompute", stage, microbatch)
        assert isinstance(op, ir.Recompute)
        self._arrived(op, None)
        with self._timed(op):
            self.stages[stage].recompute(microbatch, op.layers)
        self._complete(op)

    def send(self, kind: str, stage: int, microbatch: int) -> None:
        """Issue a send."""
        op = self._next(kind, stage, microbatch)
        assert isinstance(op, ir.MessageOp)
        self._await(op)
        self._mailbox.send(op.id, self._outbox.pop(op.id), op.peer)
        self._board.complete(op.id)

    def recv(self, kind: str, stage: int, microbatch: int) -> None:
        """Issue a receive into a buffer made for it."""
        op = self._next(kind, stage, microbatch)
        assert isinstance(op, ir.MessageOp)
        self._await(op)
        border = stage - 1 if kind == "recv_activation" else stage
        shape, dtype = self._boundary(border)
        buffer = self._hold(torch.empty(shape, dtype=dtype, device=self._on), border)
        (self._activations if kind == "recv_activation" else self._gradients)[stage, microbatch] = buffer
        self._mailbox.recv(op.id, buffer, op.peer)
        self._board.complete(op.id)

    # -- how

    def _transfer(self, op: ir.Op) -> None:
        """One offload or reload, in its lane's thread."""
        assert isinstance(op, ir.Offload | ir.Reload)
        self._await(op)
        execution, there = self.stages[op.stage], isinstance(op, ir.Offload)
        start = time.perf_counter_ns()
        (execution.offload if there else execution.reload)(op.microbatch, op.layers)
        self._timeline.add(op.id, "d2h" if there else "h2d", start, time.perf_counter_ns())
        self._board.complete(op.id)

    def _next(self, kind: str, stage: int, microbatch: int) -> ir.Op:
        op = next(self._remaining, None)
        if op is None or (op.name, op.stage, op.microbatch) != (kind, stage, microbatch):
            raise RunFailed(
                f"device {self.plan.device}: the engine runs {kind}:{stage}:{microbatch} "
                f"where the schedule says {op.id if op else 'nothing'}"
            )
        return op

    def _await(self, op: ir.Op) -> None:
        """Wait for all that must be over before `op` starts."""
        self._board.check()
        self._board.wait(self._waits[op.id])
        for name in self._messages[op.id]:
            self._mailbox.wait(name)

    def _arrived(self, op: ir.Op, tensor: Tensor | None) -> None:
        """Wait for all that `op` needs; `tensor` is what it reads from another stage."""
        self._await(op)
        if tensor is not None and self._on_arrival is not None and deliveries.received_for(op)[0] in self._received:
            self._on_arrival(tensor)

    @contextmanager
    def _timed(self, op: ir.Op) -> Iterator[None]:
        start = self._timeline.now()
        yield
        self._timeline.add(op.id, "compute", start, self._timeline.now())

    def _complete(self, op: ir.Op) -> None:
        event = None
        if self._on.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._board.complete(op.id, event)

    def _keep(self, tensor: Tensor, border: int) -> Tensor:
        """Take over what crosses to another stage: contiguous, on a storage of its own size, and counted."""
        if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return self._hold(tensor, border)

    def _hold(self, tensor: Tensor, border: int) -> Tensor:
        nbytes = None if self._message_bytes is None else self._message_bytes(border)
        self._meter.hold(tensor.untyped_storage(), nbytes)
        return tensor
