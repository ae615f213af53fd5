"""A step's batch, cut into microbatches in the same way on all ranks, none of them larger than was announced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe_compiler.errors import BadInput
from runtime_torch.bundles import resized, show
from runtime_torch.microbatch import cut, takes_target
from runtime_torch.stages import Stages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optpipe_compiler.documents import ir
    from runtime_torch.bundles import Boundary
    from runtime_torch.execution import StageExecution
    from runtime_torch.microbatch import Keywords, Microbatch


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch by microbatches; `inputs` where the first stage is, `targets` where a layer gets them."""

    inputs: Sequence[Tensor] | None
    targets: Sequence[Tensor] | None
    microbatches: Sequence[Microbatch]


class Batches:
    """Cuts batches, and knows the shapes between the layers for each microbatch of the latest one.

    The rank of the first stage tells the others how many samples there are, that of the last what the microbatches
    weigh: two small broadcasts at the start of a step.
    """

    def __init__(
        self,
        schedule: ir.Schedule,
        stages: Mapping[int, StageExecution],
        boundary: Callable[[int], Boundary] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        bundles = stages.bundles if isinstance(stages, Stages) else None
        if bundles is None and boundary is None:
            raise BadInput("the shapes between layers are not known: give build_stages(inputs=...) or boundary=")
        self._count = schedule.setup.microbatches
        self._group = group
        self._ends = schedule.stages[0].device, schedule.stages[-1].device
        self._has_first = 0 in stages
        self._has_last = len(schedule.stages) - 1 in stages
        self._gets_target = self._has_last or any(
            takes_target(layer) for stage in stages.values() for layer in stage.layers
        )
        self._device = next(iter(stages.values())).device
        self._given = boundary
        self._bundles = bundles
        self._inputs = bundles[0] if bundles else None
        self._announced = self._inputs.samples if self._inputs else None
        """The samples of a whole microbatch; where nobody said, those of the first step."""
        self._sizes: list[int] = []
        self._rows: dict[str, int] = {}

    def go_on_from(self, other: Batches) -> None:
        """Expect batches as another division of the same schedule's size did."""
        self._announced, self._sizes, self._rows = other._announced, other._sizes, other._rows

    def boundary(self, layer: int, microbatch: int) -> Boundary:
        """Return shape and dtype of what leaves a layer."""
        size = self._sizes[microbatch]
        if self._given is None:
            assert self._bundles is not None
            return self._bundles[layer + 1].of(size).boundary
        shape, dtype = self._given(layer)
        return (shape if self._announced is None else resized(shape, self._announced, size)), dtype

    def divide(
        self,
        inputs: Sequence[Tensor | None],
        target: Tensor | None,
        weights: Sequence[float] | Tensor | None,
        keywords: Sequence[Keywords] | None,
        *,
        forward_only: bool = False,
    ) -> Batch:
        """Agree with the other ranks, and cut this rank's part; a step has as many microbatches as the schedule."""
        given = self._checked(inputs, target)
        (samples,) = self._told(self._ends[0], [len(given[0])] if given else [0])
        self._sizes = self._sized(int(samples), forward_only=forward_only)
        return Batch(
            self._carried(given) if given else None,
            self._split(target, "the target") if target is not None and self._gets_target else None,
            cut(self._sizes, self._weights(weights), keywords),
        )

    def _checked(self, inputs: Sequence[Tensor | None], target: Tensor | None) -> list[Tensor]:
        """Return the inputs; raise BadInput where this rank lacks something, or has another kind of tensor."""
        given = [tensor for tensor in inputs if tensor is not None]
        if self._gets_target and target is None:
            where = "the rank of the last stage" if self._has_last else "each rank with a layer that asks for it"
            raise BadInput(f"step() needs a target on {where}")
        for tensor in (*given, *(() if target is None else (target,))):
            if tensor.dim() == 0 or len(tensor) == 0:
                raise BadInput(
                    f"a batch has the shape {tuple(tensor.shape)}, expected samples along its first dimension"
                )
        if not self._has_first:
            return []
        if not given:
            raise BadInput("step() needs inputs on the rank of the first stage")
        if self._inputs is not None or len(given) > 1:
            self._hold_against(() if self._inputs is None else self._inputs.parts, given)
        return given

    def _hold_against(self, parts: Sequence[Boundary], given: Sequence[Tensor]) -> None:
        count = max(1, len(parts))
        if len(given) != count:
            raise BadInput(f"step() got {len(given)} inputs, expected {count} (as build_stages was given)")
        for index, (tensor, (shape, dtype)) in enumerate(zip(given, parts, strict=True)):
            if tensor.dtype != dtype or tuple(tensor.shape[1:]) != shape[1:]:
                raise BadInput(
                    f"input {index} of step() is {show((tuple(tensor.shape), tensor.dtype))}, expected "
                    f"{show((shape, dtype))} for each microbatch, as build_stages was given"
                )

    def _told(self, source: int, values: Sequence[float]) -> Sequence[float]:
        """Return the values that rank `source` has; the others' are only as many."""
        if dist.get_world_size(self._group) == 1:
            return values
        message = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.broadcast(message, group=self._group, group_src=source)
        told: list[float] = message.tolist()
        return told

    def _sized(self, samples: int, *, forward_only: bool) -> list[int]:
        """Return the samples of each microbatch, as many as can be."""
        count = self._count
        if forward_only and self._announced is not None:
            count = max(1, -(-samples // self._announced))
        if samples < count:
            raise BadInput(f"a batch has {samples} samples, expected at least one for each of {count} microbatches")
        small, larger = divmod(samples, count)
        sizes = [small + 1] * larger + [small] * (count - larger)
        if self._announced is None:
            self._announced = sizes[0]
        if sizes[0] > self._announced:
            raise BadInput(
                f"a batch has {samples} samples in {count} microbatches, expected at most {self._announced} in each: "
                "the promised memory is for these"
            )
        return sizes

    def _weights(self, weights: Sequence[float] | Tensor | None) -> Sequence[float]:
        """Return what the microbatches weigh, as the rank of the last stage says."""
        count, samples = len(self._sizes), sum(self._sizes)
        own = [size / samples for size in self._sizes] if weights is None else [float(weight) for weight in weights]
        if len(own) != count:
            raise BadInput(f"step() got {len(own)} weights, expected one for each of {count} microbatches")
        return self._told(self._ends[1], own)

    def _carried(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the first stage's input by microbatch, as one tensor each."""
        parts = [self._split(tensor, f"input {index}") for index, tensor in enumerate(given)]
        return parts[0] if self._inputs is None else self._inputs.carry_batch(parts)

    def _split(self, tensor: Tensor, name: str) -> Sequence[Tensor]:
        """Cut along the first dimension, which has as many rows for each sample as in the first batch."""
        samples = sum(self._sizes)
        rows = self._rows.setdefault(name, max(1, len(tensor) // samples))
        if len(tensor) != rows * samples:
            raise BadInput(
                f"{name} has the shape {tuple(tensor.shape)}, expected {rows * samples} in its first dimension for the "
                f"batch's {samples} samples"
            )
        return torch.split(tensor, [rows * size for size in self._sizes])


def weighted(losses: Sequence[Tensor], microbatches: Sequence[Microbatch]) -> float:
    """Return the sum of the losses times their weights."""
    found: list[float] = torch.stack(list(losses)).tolist()
    return sum(loss * one.weight for loss, one in zip(found, microbatches, strict=True))
