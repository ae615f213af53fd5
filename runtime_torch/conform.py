"""Before the first step: do all ranks have the same schedule, and are the stages those of its profile?"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch.bundles import in_words
from runtime_torch.execution import StageExecution
from runtime_torch.microbatch import entered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from runtime_torch.batches import Batch
    from runtime_torch.bundles import Boundary
    from runtime_torch.microbatch import Slice

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


def prepare(
    schedule: ir.Schedule,
    stages: Mapping[int, StageExecution],
    boundary: Callable[[int, int], Boundary],
    batch: Batch,
    bytes_tolerance: float | None,
) -> None:
    """Hold the stages against their profile, on a throw-away microbatch, slice by slice.

    The first microbatch of the batch has as many samples as any.
    """

    def zeros(layer: int, stage: StageExecution, unit: int) -> Tensor:
        shape, dtype = boundary(layer, unit)
        return torch.zeros(shape, dtype=dtype, device=stage.device)

    for index, stage in sorted(stages.items()):
        trial = _trial(stage)
        for unit in range(schedule.setup.slices):
            is_input = stage.is_first and batch.inputs is not None
            x = batch.inputs[unit] if is_input and batch.inputs else zeros(stage.first_layer - 1, stage, unit)
            wanted = None if batch.targets is None else batch.targets[unit]
            expected = None if stage.is_last else boundary(stage.end_layer - 1, unit)
            one, share = batch.units[unit], _tokens(schedule, unit)
            with entered(one):
                conform(schedule.stages[index], trial, x, wanted, expected, bytes_tolerance, one.slice, share)


def _tokens(schedule: ir.Schedule, unit: int) -> tuple[int, int]:
    """Return the tokens of a unit of the first microbatch, and of the one that the figures of the stages are for."""
    units = schedule.setup.units
    if isinstance(units, msgspec.UnsetType):
        return 1, 1
    begin, end = schedule.setup.tokens_of(0, unit) or (0, 0)
    return end - begin, units.tokens


def conform(
    planned: ir.Stage,
    trial: StageExecution,
    x: Tensor,
    target: Tensor | None,
    expected: Boundary | None,
    bytes_tolerance: float | None,
    part: Slice | None = None,
    tokens: tuple[int, int] = (1, 1),
) -> None:
    """Run a stage forward once; raise BadInput where it does not match the profile.

    `trial` has stores of its own. `expected`: shape and dtype of its output. `tokens`: those of the unit, and those
    that the bytes of the stage are for. Random state stays as it was, no gradient is made.
    """
    unit = 0 if part is None else part.index
    name = f"stage {planned.stage} (layers {planned.layers[0]} to {planned.layers[1] - 1})"
    devices = [trial.device] if trial.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        out = trial.forward(unit, x, target, part=part)
    found = tuple(out.shape), out.dtype
    if expected is not None and found != expected:
        raise BadInput(f"{name} returns {in_words(found)}, expected {in_words(expected)}")
    if expected is None and out.dim():
        raise BadInput(f"{name} returns {in_words(found)}, expected the scalar loss")
    said = "" if part is None else f" of {tokens[0]} tokens"
    what = f"per {'microbatch' if part is None else 'slice'}{said}"
    saved, kept = trial.saved_bytes(unit), trial.carry_bytes(unit)
    trial.discard(unit)
    _hold(name, f"saves {{}} bytes {what}", saved, planned.saved_bytes, tokens, bytes_tolerance)
    if isinstance(planned.carry, ir.Carry):
        _hold(name, f"keeps {{}} bytes of keys and values {what}", kept, planned.carry.bytes, tokens, bytes_tolerance)


def _hold(
    name: str, what: str, found: int, planned: Sequence[int], tokens: tuple[int, int], bytes_tolerance: float | None
) -> None:
    if bytes_tolerance is None:
        return
    most = -(-sum(planned) * tokens[0] // tokens[1])
    if found > most * (1 + bytes_tolerance) + _SLACK_BYTES:
        raise BadInput(
            f"{name} {what.format(found)} for its backward, its profile says {most}: more than {bytes_tolerance:.0%} "
            "above; profile this model again and compile"
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
