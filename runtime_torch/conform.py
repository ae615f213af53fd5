"""Before the first step: do all ranks have the same schedule, and are the stages those of its profile?"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch.bundles import bundle_of, in_words
from runtime_torch.execution import StageExecution
from runtime_torch.microbatch import entered, keywords_of
from runtime_torch.pieces import hold_against_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from runtime_torch.batches import Batch
    from runtime_torch.bundles import Boundary, Bundle
    from runtime_torch.stages import Stages

BYTES_TOLERANCE = 0.05
"""A stage may save this share more than its profile says; with more the promise of the peak would be void."""
_SLACK_BYTES = 4096


def agree(schedule: ir.Schedule, group: dist.ProcessGroup | None) -> bool:
    """Compare digests over all ranks of `group` before any work; return whether all of them are on one host."""
    mine = (schedule.digest, socket.gethostname())
    found: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    for rank, (digest, _) in enumerate(found):
        if digest != found[0][0]:
            raise RunFailed(f"rank {rank} has another schedule than rank 0: digest {digest}, not {found[0][0]}")
    return len({host for _, host in found}) == 1


def any_rank(mine: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether something is so on any rank of `group`."""
    found = [mine] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return any(found)


def taken_by_name(stages: Stages, group: dist.ProcessGroup | None) -> set[str] | None:
    """Return the names of the keyword arguments that layers take on any rank of `group`; None: some layer takes all."""
    by_layer = [keywords_of(layer) for stage in stages.values() for layer in stage.layers]
    found: list[list[set[str] | None]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(found, by_layer, group=group)
    names: set[str] = set()
    for of_layer in (one for of_rank in found for one in of_rank):
        if of_layer is None:
            return None
        names |= of_layer
    return names


def prepare(
    schedule: ir.Schedule,
    stages: Mapping[int, StageExecution],
    bundle: Callable[[int, int], Bundle],
    batch: Batch,
    bytes_tolerance: float | None,
) -> None:
    """Hold the stages against their profile: run each forward once, on a throw-away microbatch, slice by slice; hold
    parts of a slice against it.

    `bundle` tells what leaves a layer; a stage that is not the first gets an example of it. The first microbatch of the
    batch has as many samples as any. Random states, buffers and gradients stay as they were. Raises BadInput where a
    stage does not match.
    """
    for index, stage in sorted(stages.items()):
        before = stage.marks()
        _try(schedule, stage, index, bundle, batch, bytes_tolerance)
        if (after := stage.marks()) == before:
            continue
        _try(schedule, stage, index, bundle, batch, bytes_tolerance)
        for (layer, name), mark in stage.marks().items():
            if mark != after[layer, name]:  # again: a limit, and numbers to begin with, are set once
                raise BadInput(
                    f"layer {layer} changes its parameter {name} in each forward, expected one that changes between "
                    "steps alone, or a buffer, which is put back where a forward is repeated"
                )


def _try(
    schedule: ir.Schedule,
    stage: StageExecution,
    index: int,
    bundle: Callable[[int, int], Bundle],
    batch: Batch,
    bytes_tolerance: float | None,
) -> None:
    """Run the forward of a stage once."""
    trial = _trial(stage)
    with stage.trying():
        for number, unit in enumerate(batch.units[: schedule.setup.slices]):
            if stage.is_first and batch.inputs is not None:
                x = batch.inputs[number].clone()  # which layers may change
            else:
                x = bundle(stage.first_layer - 1, number).example(stage.device)
            target = None if batch.targets is None else batch.targets[number].clone()
            try:
                with entered(unit):
                    out = trial.forward(number, x, target, part=unit.slice)
            except Exception as error:
                error.add_note("optpipe: in the trial before the first step, on made-up numbers behind stage 0")
                raise
            expected = None if stage.is_last else bundle(stage.end_layer - 1, number).boundary
            _conform(schedule, schedule.stages[index], trial, number, out, expected, bytes_tolerance)
            trial.discard(number)
        if schedule.setup.slices > 1:
            _hold_a_slice_against_its_parts(stage, bundle, batch)


def _hold_a_slice_against_its_parts(stage: StageExecution, bundle: Callable[[int, int], Bundle], batch: Batch) -> None:
    """Raise BadInput where the first slice, cut in two, is another: no layer is sliced that says so wrongly.

    So it takes no more memory than a slice does. It is cut where kernels like it, in multiples of a power of two.
    """
    unit = batch.units[0]
    tokens = unit.tokens or 0
    if tokens < 2:
        return
    if stage.is_first and batch.inputs is not None:
        x = batch.inputs[0].clone()
        entering = bundle_of(x, "the input") if x.dim() > 1 else bundle(-1, 0)
    else:
        entering = bundle(stage.first_layer - 1, 0)
        x = entering.example(stage.device)
    leaving = None if stage.is_last else bundle(stage.end_layer - 1, 0)
    borders = replace(entering, tokens=tokens), leaving and replace(leaving, tokens=tokens)
    target = None if batch.targets is None else batch.targets[0].clone()
    gradient = None if leaving is None else leaving.example(stage.device, seed=1)
    step = min(tokens & -tokens, tokens // 2)
    half = tokens // 2 // step * step
    hold_against_whole(_trial(stage), borders, x, target, gradient, [(0, half), (half, tokens)], unit)


def _conform(
    schedule: ir.Schedule,
    planned: ir.Stage,
    trial: StageExecution,
    unit: int,
    out: Tensor,
    expected: Boundary | None,
    bytes_tolerance: float | None,
) -> None:
    """Raise BadInput where the forward of a unit of the first microbatch does not match the profile; `expected`: shape
    and dtype of its output."""
    name = f"stage {planned.stage} (layers {planned.layers[0]} to {planned.layers[1] - 1})"
    found = tuple(out.shape), out.dtype
    if found != (expected or ((), out.dtype)):
        wanted = "the scalar loss" if expected is None else in_words(expected)
        also = ""
        if expected is not None and found[0] == expected[0] and found[1].is_floating_point:
            also = f", or build_stages(float_dtype={found[1]}) where all layers return it"
        raise BadInput(f"{name} returns {in_words(found)}, expected {wanted}{also}")
    if not trial.passes_back(unit):
        raise BadInput(
            f"{name} passes no gradient back to layer {planned.layers[0] - 1}, as where a layer calls detach() or "
            "computes under no_grad(), expected frozen parameters (requires_grad_(False)) instead, or the layers up to "
            "there as one, the model's first"
        )
    if bytes_tolerance is None:
        return
    units, (begin, end), whole = schedule.setup.units, (0, 1), 1
    if not isinstance(units, msgspec.UnsetType):
        (begin, end), whole = schedule.setup.tokens_of(0, unit) or (0, 0), units.tokens
    what = "per microbatch" if schedule.setup.slices == 1 else f"per slice of {end - begin} tokens"
    figures = [(f"saves {{}} bytes {what}", trial.saved_bytes(unit), planned.saved_bytes)]
    if isinstance(planned.carry, ir.Carry):
        kept = trial.carry_bytes(unit)
        figures.append((f"keeps {{}} bytes of keys and values {what}", kept, planned.carry.bytes))
    for said, nbytes, by_layer in figures:
        most = -(-sum(by_layer) * (end - begin) // whole)
        if nbytes > most * (1 + bytes_tolerance) + _SLACK_BYTES:
            raise BadInput(
                f"{name} {said.format(nbytes)} for its backward, its profile says {most}: more than "
                f"{bytes_tolerance:.0%} above; profile this model again on batches like these, and compile"
            )


def _trial(stage: StageExecution) -> StageExecution:
    """Return the stage with stores of its own."""
    return StageExecution(
        stage.layers,
        stage.first_layer,
        is_first=stage.is_first,
        is_last=stage.is_last,
        device=stage.device,
        selective=stage.selective,
    )
