"""A schedule in a training loop: build this rank's stages from a list of layers, then call `step`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from numbers import Real
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput, OptPipeError, RunFailed, of_kind
from runtime_torch.batches import Batch, Batches
from runtime_torch.conform import BYTES_TOLERANCE, agree, any_rank, prepare, taken_by_name
from runtime_torch.evaluate import forward_only
from runtime_torch.gpu_channels import GpuChannels
from runtime_torch.messages import Mailbox
from runtime_torch.replay import Replay, StepResult, weighted
from runtime_torch.replicas import replicated
from runtime_torch.shared import Channels, channels_of
from runtime_torch.stages import Stages, refuse_parts
from runtime_torch.swap import Mover, Swap, agree_on, is_same_cut, moves, restaged, several
from runtime_torch.together import go_on, raised_on_all, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from runtime_torch.bundles import Boundary
    from runtime_torch.microbatch import Keywords
    from runtime_torch.replicas import Replicas, Shards
    from runtime_torch.swap import Move


class Runner:
    """Replays a schedule on this rank; used like a schedule of torch.distributed.pipelining.

    `stages` come from `build_stages` or `wrap_stages`; `boundary(layer)` gives shape and dtype of what leaves a layer
    (absent: as `build_stages` found). The ranks of `group` (the default group when None) are the schedule's devices;
    they compare digests here. `bytes_tolerance`: the share by which a stage may save more than its profile says
    before the first step refuses; None: any. `on_failure` is called, in its thread, when a transfer lane fails; `step`
    raises the same error as soon as the compute lane is free to do so.
    """

    def __init__(
        self,
        schedule: ir.Schedule,
        stages: Stages,
        boundary: Callable[[int], Boundary] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        bytes_tolerance: float | None = BYTES_TOLERANCE,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        of_kind("schedule", schedule, ir.Schedule, "a schedule, as load_schedule returns it")
        of_kind("stages", stages, Stages, "those of build_stages or wrap_stages")
        of_kind("boundary", boundary, (Callable, NoneType), "a function of a layer's number, or None")
        of_kind("bytes_tolerance", bytes_tolerance, (Real, NoneType), "a number, or None for any")
        of_kind("on_failure", on_failure, (Callable, NoneType), "a function of an error, or None")
        world = dist.get_world_size(group)
        if world != schedule.setup.devices:
            raise RunFailed(
                f"the schedule is for {counted(schedule.setup.devices, 'device')}, but the group has "
                f"{counted(world, 'rank')}"
            )
        self._batches = Batches(schedule, stages, boundary, group)
        self.schedule = schedule
        self._stages = stages
        self._boundary = boundary
        self._group = group
        self._tolerance = bytes_tolerance
        self._on_failure = on_failure
        self._has_failed = False
        """Whether a step, an evaluation or a replacement was left in the middle."""
        self._has_warned = False
        self._ready: list[bool] | None = None
        """Which modules and parameters trained when the stages were held against the profile; None: they were not yet.
        """
        agree(schedule, group)
        self._batches.keywords = taken_by_name(stages, group)
        _forget(stages)
        self._channels: Channels | GpuChannels | None = None
        self._device = next(iter(stages.values())).device
        self._replay = self._replayed(schedule, stages)
        self._replicated = _replicated(stages)
        self._has_replicas = any_rank(any(self._replicated.values()), group)
        stages.ties.join(group)

    @property
    def promised_activation_bytes(self) -> int:
        """What the schedule promises at most: its peak without static, reserve."""
        return self.schedule.activation_bytes(dist.get_rank(self._group))

    def step(
        self,
        *inputs: Tensor | None,
        target: Tensor | None = None,
        weights: Sequence[float] | Tensor | None = None,
        keywords: Sequence[Keywords] | None = None,
        losses: list[Tensor] | None = None,
    ) -> StepResult:
        """Run all microbatches once and add the gradient of the step's loss to that of the parameters.

        `inputs` and `target` are whole batches, cut along their first dimension; inputs may be None or absent on ranks
        without the first stage, the target on ranks of which no layer gets it. A batch may be smaller than the
        microbatches that were announced, not larger. The step's loss is the sum of the microbatches' losses times
        `weights`, which count where the last stage is; absent: the mean over the samples. `keywords`: by microbatch,
        keyword arguments (no tensors) for this rank's layers that name them. `losses` is filled with each microbatch's
        loss where the last stage is.
        """
        self._refuse_failed()
        self._reshard()
        torch.clear_autocast_cache()  # in one region with an optimizer its copies are those of weights before
        modes = [module.training for module in self._stages.module.modules()]
        modes += [parameter.requires_grad for parameter in self._stages.module.parameters()]
        is_new = self._ready != modes  # they change other buffers than in evaluation, and save more than frozen
        problem: Exception | None = _problem_with(losses) or self._stages.replaced() or self._stages.ties.problem()
        if problem is None and is_new and self._has_replicas:
            problem = self._stages.unreduced() or self._unsharded()
        if not torch.is_grad_enabled():
            problem = BadInput(
                "step() was called where gradients are off (no_grad, inference_mode), expected eval() there"
            )
        with self._in_one_piece(raises_together=True):
            batch, any_is_new = self._batches.divide(inputs, target, weights, keywords, problem, asks=is_new)
            self._stages.ties.begin(self._group, self._device)
            for part in self._parts():
                part.gather()
            if any_is_new:
                try:
                    go_on(self._refused(batch, modes) if is_new else None, self._group, self._device)
                except Exception:
                    for part in self._parts():
                        part.leave()
                    self._stages.ties.give_back()
                    self._batches.forget()
                    raise
        with self._in_one_piece():
            with self._on_all("step()"):
                result = self._replay.step(batch.inputs, batch.targets, batch.units, losses)
                for part in self._parts():
                    part.reduce()
            self._stages.ties.finish(self._group, self._device)
        self._hold_against_promise(result)
        return result

    def _refused(self, batch: Batch, modes: list[bool]) -> Exception | None:
        """Hold the stages in these modes against the profile, in a trial; return what is wrong with them."""
        try:
            prepare(self.schedule, self._stages, self._batches.bundle, batch, self._tolerance)
        except Exception as error:
            is_on, was_on = torch.is_autocast_enabled(self._device.type), self._stages.was_autocast
            if not isinstance(error, BadInput) or was_on in (None, is_on):
                return error
            ways = {True: "under autocast", False: "without autocast"}
            return BadInput(
                f"{error}; build_stages was called {ways[was_on]}, step() {ways[is_on]}: expected both alike"
            )
        self._ready = modes
        return None

    def _hold_against_promise(self, result: StepResult) -> None:
        """Warn, once, where layers save more for these data than they did in the trial before the first step."""
        promised, took = self.promised_activation_bytes, result.peak_activation_bytes
        if self._has_warned or self._tolerance is None or took <= promised * (1 + self._tolerance):
            return
        self._has_warned = True
        warnings.warn(
            f"rank {dist.get_rank(self._group)}: a step held {took} bytes of activations, and the schedule promises "
            f"{promised}: what layers save depends on the data, expected a profile of the largest",
            RuntimeWarning,
            stacklevel=3,
        )

    @torch.no_grad()
    def eval(
        self,
        *inputs: Tensor | None,
        target: Tensor | None = None,
        keywords: Sequence[Keywords] | None = None,
        losses: list[Tensor] | None = None,
    ) -> float | None:
        """Run a batch of any number of samples forward only, in as many microbatches as that takes; return the mean
        loss over the samples where the last stage is, else None.

        Whether layers are in training mode is the caller's business. `keywords` and `losses` are as in `step`.
        """
        self._refuse_failed()
        self._reshard()
        torch.clear_autocast_cache()
        is_alone = dist.get_world_size(self._group) == 1  # nobody waits for what does not come
        with nullcontext() if is_alone else self._in_one_piece(raises_together=True):
            problem = _problem_with(losses) or self._stages.replaced()
            batch, _ = self._batches.divide(inputs, target, None, keywords, problem, forward_only=True)
            for part in self._parts():
                part.gather()
        channels = self._channels if isinstance(self._channels, Channels) else None
        with nullcontext() if is_alone else self._in_one_piece(), self._on_all("eval()"):
            boundary = self._batches.boundary
            found = forward_only(self.schedule, self._stages, boundary, self._group, batch, channels)
        self._reshard()
        if losses is not None:
            losses[:] = found
        return weighted(found, batch.units) if found else None

    def replace(
        self,
        schedule: ir.Schedule,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> Swap:
        """Go on with another schedule; called on all ranks between two steps, with one that `verify` has passed.

        It is for as many devices, microbatches and layers. Where stages are the same layers on the same ranks, nothing
        moves. Otherwise layers move with their gradients and with what `optimizer` (one, several, or () for none) keeps
        for them; `stages.module` and the optimizer's groups then have this rank's. Layers in DDP are wrapped again.
        Raises BadInput on all ranks, with nothing changed, where a layer cannot move (FSDP2, ties, whole stage modules)
        and RunFailed where ranks name different schedules. What fails on a rank while layers move is raised on all, and
        leaves the Runner in the middle. `group`: all ranks of all replicas of the pipeline, where there are several:
        their new schedules are compared, and what one of these cannot move all of them keep. The new stages are held
        against the profile in the next step. After a move other ranks may have the first and the last stage, and need
        `inputs` and `target`.
        """
        begin = time.perf_counter_ns()
        self._refuse_failed()
        rank, stages = dist.get_rank(self._group), self._stages
        mover = Mover(stages, rank)
        problem: BadInput | None = None
        wanted: list[Move] = []
        packages: dict[int, Any] = {}
        same = False
        try:
            of_kind("schedule", schedule, ir.Schedule, "a schedule, as load_schedule returns it")
            mover.optimizers = several(optimizer)
            same = is_same_cut(self.schedule, schedule)
            wanted = moves(self.schedule, schedule)
            if not same:
                if wanted and optimizer is None:
                    raise BadInput("layers move to other ranks, expected replace(schedule, optimizer), or () for none")
                packages = mover.pack(wanted)
            elif stages.are_modules:
                refuse_parts(schedule, rank)
        except BadInput as error:
            problem = error
        refused: OptPipeError | None = None
        with self._in_one_piece(raises_together=True):
            try:
                packages = agree_on(schedule, problem, packages, (mover.said, mover.options), self._group)
            except OptPipeError as error:
                refused = error
                if group is None:
                    raise
            if group is not None:
                go_on(refused, group, self._device)
                agree(schedule, group)
        moved = 0
        with self._in_one_piece():
            if not same:
                everyone = self._group if group is None else group
                moved = mover.move(wanted, packages, self._group, everyone)
                with raised_on_all(everyone, self._device):
                    found = restaged(schedule, stages, rank)
                    stages.clear()
                    stages.update(found)
                    batches = Batches(schedule, stages, self._boundary, self._group)
                    batches.go_on_from(self._batches)
                    self._batches, self._ready = batches, None
                    self._replicated = _replicated(stages)
            self.schedule = schedule
            self._replay.close()
            self._replay = self._replayed(schedule, stages)
        return Swap(len(wanted), moved, time.perf_counter_ns() - begin)

    @contextmanager
    def _in_one_piece(self, *, raises_together: bool = False) -> Iterator[None]:
        """Within: what all ranks do together. Where it ends in the middle, this Runner does no other, and ranks of this
        host that wait for its messages are told. Where it `raises_together`, it does so at its end: an interruption
        alone leaves it in the middle."""
        self._has_failed = True
        try:
            yield
        except BaseException as error:
            self._has_failed = not (raises_together and isinstance(error, Exception))
            if self._has_failed:
                self._leave()
            raise
        self._has_failed = False

    @contextmanager
    def _on_all(self, what: str) -> Iterator[None]:
        """Within: ops in which ranks wait for messages. Where those of any rank end with an error, all ranks raise:
        none goes on from a step that another has not come through."""
        failed: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failed = error
            self._leave()
            raise
        finally:
            told(failed, what, self._group, self._device)

    def _leave(self) -> None:
        if isinstance(self._channels, Channels):
            self._channels.leave()

    def _refuse_failed(self) -> None:
        if self._has_failed:
            raise RunFailed("an earlier step, eval or replace of this Runner ended in the middle: make a new one")

    def _replayed(self, schedule: ir.Schedule, stages: Stages) -> Replay:
        first = next(iter(stages.values()))
        return Replay(
            schedule,
            dist.get_rank(self._group),
            stages,
            lambda stage, unit: self._batches.boundary(schedule.stages[stage].layers[1] - 1, unit),
            Mailbox(self._group, first.meter, self._met(schedule, first.device)),
            on_weights=self._collect,
            on_failure=self._on_failure,
        )

    def _met(self, schedule: ir.Schedule, device: torch.device) -> Channels | GpuChannels | None:
        """Return the channels for the messages of a schedule; called by all ranks at one time."""
        if device.type == "cuda":
            if not isinstance(self._channels, GpuChannels):
                self._channels = GpuChannels(self._group, device)
            self._channels.meet(schedule)
            return self._channels
        if isinstance(self._channels, Channels):
            self._channels.close()
        self._channels = channels_of(schedule, self._group)
        return self._channels

    def _unsharded(self) -> BadInput | None:
        if added := [name for part in self._parts() if (name := part.added()) is not None]:
            return BadInput(
                f"a layer in FSDP2 has the trained parameter {added[0]}, which came after fully_shard: nothing "
                "averages its gradients over the replicas, expected adapters in layers before they are sharded"
            )
        return None

    def _parts(self) -> list[Shards | Replicas]:
        return [part for parts in self._replicated.values() for part in parts]

    def _reshard(self) -> None:
        """Free the whole parameters: a forward outside of steps leaves them, and optimizers change the shards alone."""
        for part in self._parts():
            part.reshard()

    def _collect(self, stage: int) -> None:
        for part in self._replicated[stage]:
            part.collect()


def _problem_with(losses: object) -> BadInput | None:
    if isinstance(losses, list | NoneType):
        return None
    return BadInput(f"losses is {losses!r}, expected a list that is filled, or None")


def _forget(stages: Stages) -> None:
    """Let go what a step that was left in the middle held of these stages."""
    for stage in stages.values():
        stage.forget()
    for stage in stages.values():  # what waited in messages
        stage.meter.forget()
        stage.host_meter.forget()


def _replicated(stages: Stages) -> dict[int, list[Shards | Replicas]]:
    """Return the parts of each stage in DDP or FSDP2."""
    return {index: [part for layer in stage.layers for part in replicated(layer)] for index, stage in stages.items()}
