"""`run --check`: one pipelined step against the same model run without a pipeline, gradient by gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from optpipe_torch.launch.report import CheckReport
from optpipe_torch.models import known as models
from optpipe_torch.models.vocabulary import whole
from runtime_torch.microbatch import targets_for
from runtime_torch.ties import share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Model
    from runtime_torch.runner import Runner
    from runtime_torch.stages import Stages

TOLERANCE = {"fp32": 1e-4}
"""Largest difference of a gradient, relative to its parameter's largest one; other dtypes: 0.05."""
ROUNDING = torch.finfo(torch.float32).eps
"""Differences below this share of the model's largest gradient are none: of gradients that are zero in theory, such as
those of a router that chooses one expert and divides by its chance, there is rounding alone. Softmaxes, which leave it,
compute in fp32 in any dtype. In small mixtures it is 1e-10 of the largest gradient, ordinary ones are 1e-3."""

Gradients = dict[str, "Tensor | None"]


def check(
    schedule: ir.Schedule,
    runner: Runner,
    stages: Stages,
    inputs: Sequence[Tensor],
    target: Tensor,
    control: dist.ProcessGroup,
) -> CheckReport:
    """Run one step pipelined on all ranks and unpipelined on rank 0; return the comparison on every rank.

    Dropout is off in both (ranks draw from generators of their own). Gradients are cleared afterwards.
    """
    assert schedule.model is not None
    layers = {int(index): layer for index, layer in stages.module.items()}
    modes = {module: module.training for layer in layers.values() for module in layer.modules()}
    for layer in layers.values():
        layer.eval()
    result = runner.step(*inputs, target=target)
    mine = {name: None if p.grad is None else p.grad.cpu() for name, p in _parameters(layers).items()}
    for layer in layers.values():
        layer.zero_grad()
    for module, training in modes.items():
        module.training = training
    gathered: list[tuple[float | None, Gradients]] = _gather((result.loss, mine), control)
    answer: list[CheckReport | None] = [None]
    if dist.get_rank(control) == 0:
        loss = next(found for found, _ in gathered if found is not None)
        merged = {name: gradient for _, part in gathered for name, gradient in part.items()}
        device = next(iter(stages.values())).device
        whole = [tensor.to(device) for tensor in inputs], target.to(device)
        reference = unpipelined(schedule.model, *whole, schedule.setup.microbatches, schedule.setup.lengths)
        answer = [compare(loss, merged, *reference, TOLERANCE.get(schedule.model.dtype, 0.05))]
    dist.broadcast_object_list(answer, src=0, group=control)
    assert answer[0] is not None
    return answer[0]


def unpipelined(
    model: Model, inputs: Sequence[Tensor], target: Tensor, microbatches: int, lengths: Sequence[int] | None = None
) -> tuple[float, Gradients]:
    """Mean loss and mean gradients of the whole model over the microbatches, one after another, none in slices.

    Of microbatch m only the first `lengths[m]` tokens count. Heads and embeddings in parts are whole here, so that the
    chain of parts is checked, too.
    """
    layers = models.build(model)
    share(models.ties(model), {str(index): layer for index, layer in enumerate(layers)})
    for layer in layers:
        layer.to(target.device).eval()
    losses = []
    called = whole(layers)
    batch = zip(*(tensor.tensor_split(microbatches) for tensor in (*inputs, target)), strict=True)
    for number, (*parts, wanted) in enumerate(batch):
        if lengths is not None:
            *parts, wanted = (tensor[:, : lengths[number]] for tensor in (*parts, wanted))
        for layer in called:
            behind, named = targets_for(layer, wanted, is_last=layer is called[-1])
            found = layer(*parts, *behind, **named)
            parts = list(found) if isinstance(found, tuple | list) else [found]
        (loss,) = parts
        loss.backward()
        losses.append(loss.detach())
    gradients: Gradients = {}
    for name, parameter in _parameters(dict(enumerate(layers))).items():
        gradients[name] = None if parameter.grad is None else (parameter.grad / microbatches).cpu()
    return torch.stack(losses).mean().item(), gradients


def compare(
    loss: float, found: Gradients, reference_loss: float, reference: Gradients, tolerance: float
) -> CheckReport:
    """Compare two losses and two sets of gradients by name."""
    largest = max((_largest(wanted) for wanted in reference.values() if wanted is not None), default=0.0)
    least = ROUNDING * largest / tolerance
    differences = {name: _difference(found.get(name), wanted, least) for name, wanted in reference.items()}
    worst = max(differences, key=lambda name: differences[name])
    close = abs(loss - reference_loss) <= tolerance * max(1.0, abs(reference_loss))
    return CheckReport(
        ok=close and differences[worst] <= tolerance and set(found) == set(reference),
        loss=loss,
        reference_loss=reference_loss,
        parameters=len(reference),
        worst_parameter=worst,
        worst_difference=differences[worst],
        tolerance=tolerance,
    )


def _difference(found: Tensor | None, wanted: Tensor | None, least: float) -> float:
    """Largest difference relative to the largest wanted entry, to `least` at least; infinite where only one of both is
    there."""
    if found is None or wanted is None:
        return 0.0 if found is wanted else float("inf")
    difference = _largest(found - wanted) / (max(_largest(wanted), least) or 1.0)
    return difference if difference == difference else float("inf")


def _largest(gradient: Tensor) -> float:
    return gradient.abs().max().float().item() if gradient.numel() else 0.0


def _parameters(layers: dict[int, nn.Module]) -> dict[str, nn.Parameter]:
    return {
        f"layer {index}: {name}": parameter
        for index, layer in sorted(layers.items())
        for name, parameter in layer.named_parameters()
    }


def _gather(mine: tuple[float | None, Gradients], control: dist.ProcessGroup) -> list[tuple[float | None, Gradients]]:
    """All ranks' parts on rank 0; empty elsewhere."""
    first = dist.get_rank(control) == 0
    parts: list[tuple[float | None, Gradients]] | None = [(None, {})] * dist.get_world_size(control) if first else None
    dist.gather_object(mine, parts, dst=0, group=control)
    return parts or []
