"""A step's batch, cut into microbatches and their slices in the same way on all ranks, none larger than announced."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput, of_kind
from runtime_torch.bundles import Bundle, in_words, with_samples, with_tokens
from runtime_torch.microbatch import Slice, cut, parameters_of, takes
from runtime_torch.together import go_on, raise_together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe_compiler.documents import ir
    from runtime_torch.bundles import Boundary
    from runtime_torch.microbatch import Keywords, Microbatch
    from runtime_torch.stages import Stages


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch by units: microbatches or slices of them, in the order of both; `inputs` where the first stage is,
    `targets` where a layer gets them."""

    inputs: Sequence[Tensor] | None
    targets: Sequence[Tensor] | None
    units: Sequence[Microbatch]


class Batches:
    """Cuts batches, and knows the shapes between the layers for each microbatch of the latest one.

    The rank of the first stage tells the others how many samples there are, that of the last what the microbatches
    weigh, and each whether it was called rightly: one small message at the start of a step.
    """

    def __init__(
        self,
        schedule: ir.Schedule,
        stages: Stages,
        boundary: Callable[[int], Boundary] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        bundles = stages.bundles
        if bundles is None and boundary is None:
            raise BadInput("the shapes between layers are not known: give build_stages(inputs=...) or boundary=")
        _check_lengths(schedule.setup)
        self._setup = schedule.setup
        self._count = schedule.setup.microbatches
        self._units: list[tuple[int, int | None]] = []
        """Of the latest batch: each unit's microbatch and tokens; None: as many as announced."""
        self._group = group
        self._has_first = 0 in stages
        self._has_last = len(schedule.stages) - 1 in stages
        self._gets_target = self._has_last or any(
            takes(layer, "target") for stage in stages.values() for layer in stage.layers
        )
        self._taken = _taken(stages, bundles)
        self.keywords: set[str] | None = None
        """The names of the keyword arguments that layers of any rank take; None: any."""
        self._device = next(iter(stages.values())).device
        self._given = boundary
        self._bundles = bundles
        self._inputs = bundles[0] if bundles else None
        self._announced = self._inputs.samples if self._inputs else None
        """The samples of a whole microbatch; where nobody said, those of the first step."""
        self._sizes: list[int] = []
        self._rows = _rows_in(self._inputs.parts, self._announced) if self._inputs and self._announced else {}
        """Of each input, and of the target once there was one: how many entries of its first dimension a sample has."""
        self._known: tuple[int | None, dict[str, int]] = self._announced, self._rows
        """Both as they were before the latest batch."""

    def go_on_from(self, other: Batches) -> None:
        """Expect batches as another division of the same schedule's size did."""
        self._announced, self._sizes, self._rows = other._announced, other._sizes, other._rows
        self.keywords = other.keywords

    def boundary(self, layer: int, unit: int) -> Boundary:
        """Return shape and dtype of what leaves a layer."""
        return self.bundle(layer, unit).boundary

    def bundle(self, layer: int, unit: int) -> Bundle:
        """Return what leaves a layer."""
        microbatch, tokens = self._units[unit]
        size = self._sizes[microbatch]
        if self._given is None:
            assert self._bundles is not None
            return self._bundles[layer + 1].of(size, tokens)
        shape, dtype = self._given(layer)
        shape = shape if self._announced is None else with_samples(shape, self._announced, size)
        return Bundle(((shape if tokens is None else with_tokens(shape, self._tokens(), tokens), dtype),))

    def divide(
        self,
        inputs: Sequence[Tensor | None],
        target: Tensor | None,
        weights: Sequence[float] | Tensor | None,
        keywords: Sequence[Keywords] | None,
        problem: Exception | None = None,
        *,
        asks: bool = False,
        forward_only: bool = False,
    ) -> tuple[Batch, bool]:
        """Agree with the other ranks, and cut this rank's part; a step has as many microbatches as the schedule.

        What is wrong on any rank, as a `problem` found before, is raised on all. Also returned: whether any `asks`.
        """
        self._known = self._announced, dict(self._rows)
        given: list[Tensor] = []
        own: list[float] | None = None
        call = "eval()" if forward_only else "step()"
        try:
            if problem is not None:
                raise problem
            given = self._checked(inputs, target, call)
            if not forward_only:
                _refuse_gradients(given, target if self._gets_target else None)
            own = None if weights is None else self._numbers(weights)
        except Exception as error:
            problem = error
        samples, told = self._told(len(given[0]) if given else 0, own, problem)
        batch: Batch | None = None
        try:
            self._sizes = self._sized(samples, forward_only=forward_only)
            own = [size / samples for size in self._sizes] if told is None else told
            microbatches = cut(self._sizes, own, keywords, call)
            self._refuse_names(microbatches, call)
            batch = self._divided(given, target, microbatches, whole=forward_only)
        except Exception as error:
            problem = error
        any_asks = go_on(problem, self._group, self._device, asks=asks)
        assert batch is not None
        return batch, any_asks

    def forget(self) -> None:
        """The batch that was cut last was refused by a layer: it says nothing of later ones."""
        self._announced, self._rows = self._known

    def cut_all(self, inputs: Sequence[Tensor], target: Tensor) -> Batch:
        """Cut a step's batch for a device that runs without the others, and so agrees with nobody."""
        self._sizes = self._sized(len(inputs[0]), forward_only=False)
        microbatches = cut(self._sizes, [1 / self._count] * self._count, None, "step()")
        return self._divided(inputs, target, microbatches, whole=False)

    def _divided(
        self, given: Sequence[Tensor], target: Tensor | None, microbatches: Sequence[Microbatch], *, whole: bool
    ) -> Batch:
        """Cut this rank's part into the microbatches, and these, unless they are `whole`, into their units."""
        inputs = [self._split(tensor, f"input {index}") for index, tensor in enumerate(given)]
        targets = self._split(target, "the target") if target is not None and self._gets_target else None
        self._units = [(number, None) for number in range(len(self._sizes))]
        if not whole and not isinstance(self._setup.units, msgspec.UnsetType):
            inputs, targets, microbatches = self._units_of(inputs, targets, microbatches)
        if self._inputs is None or not inputs:
            return Batch(inputs[0] if inputs else None, targets, microbatches)
        lengths = [tokens for _, tokens in self._units]
        return Batch(self._inputs.carry_batch(inputs, lengths), targets, microbatches)

    def _units_of(
        self, inputs: Sequence[Sequence[Tensor]], targets: Sequence[Tensor] | None, microbatches: Sequence[Microbatch]
    ) -> tuple[list[Sequence[Tensor]], Sequence[Tensor] | None, list[Microbatch]]:
        """Cut every microbatch into its slices, or to its length."""
        setup = self._setup
        numbers = [(m, index) for m in range(self._count) for index in range(setup.slices)]
        spans = [(*number, *(setup.tokens_of(*number) or (0, 0))) for number in numbers]
        self._units = [(m, end - begin) for m, _, begin, end in spans]

        def cut_all(parts: Sequence[Tensor], name: str, *, needed: bool) -> list[Tensor]:
            return [self._tokens_in(parts[m], begin, end, name, needed=needed) for m, _, begin, end in spans]

        units = [replace(microbatches[m], tokens=end - begin) for m, _, begin, end in spans]
        if setup.slices > 1:
            ends = {m: end for m, _, _, end in spans}
            begins = [begin for _, _, begin, _ in spans]
            starts = {m: tuple(begins[m * setup.slices : (m + 1) * setup.slices]) for m in ends}
            wholes = {
                m: None if targets is None else self._tokens_in(targets[m], 0, end, "the target", needed=True)
                for m, end in ends.items()
            }
            units = [
                replace(unit, slice=Slice(m, index, starts[m], (end - begin) / ends[m], wholes[m]))
                for unit, (m, index, begin, end) in zip(units, spans, strict=True)
            ]
        shortened: list[Sequence[Tensor]] = [
            cut_all(parts, f"input {index}", needed=len(inputs) == 1) for index, parts in enumerate(inputs)
        ]
        return shortened, None if targets is None else cut_all(targets, "the target", needed=True), units

    def _tokens_in(self, tensor: Tensor, begin: int, end: int, name: str, *, needed: bool) -> Tensor:
        """Cut along the second dimension, where that is of tokens."""
        tokens = self._tokens()
        if tensor.dim() > 1 and tensor.shape[1] == tokens:
            return tensor[:, begin:end]
        if needed:
            raise BadInput(
                f"{name} has the shape {tuple(tensor.shape)} in a microbatch, expected {tokens} tokens along its "
                "second dimension: the schedule cuts them"
            )
        return tensor

    def _tokens(self) -> int:
        """Return the tokens that each sequence of a batch has."""
        assert not isinstance(self._setup.units, msgspec.UnsetType)
        return self._setup.units.tokens

    def _checked(self, inputs: Sequence[Tensor | None], target: Tensor | None, call: str) -> list[Tensor]:
        """Return the inputs; raise BadInput where this rank lacks something, or has another kind of tensor."""
        given = [tensor for tensor in inputs if tensor is not None]
        if self._gets_target and target is None:
            where = "the rank of the last stage" if self._has_last else "each rank with a layer that asks for it"
            raise BadInput(f"{call} needs a target on {where}")
        for tensor in (*given, *(() if target is None else (target,))):
            if not isinstance(tensor, Tensor):
                raise BadInput(f"{call} got {type(tensor).__name__}, expected tensors, the inputs one by one")
            if tensor.dim() == 0 or len(tensor) == 0:
                raise BadInput(
                    f"a batch has the shape {tuple(tensor.shape)}, expected samples along its first dimension"
                )
        if not self._has_first:
            return []
        if not given:
            raise BadInput(f"{call} needs inputs on the rank of the first stage")
        if self._inputs is not None or len(given) > 1:
            self._hold_against(() if self._inputs is None else self._inputs.parts, given, call)
        return given

    def _hold_against(self, parts: Sequence[Boundary], given: Sequence[Tensor], call: str) -> None:
        count = max(1, len(parts))
        if len(given) != count:
            raise BadInput(f"{call} got {len(given)} inputs, expected {count} (as build_stages was given)")
        for index, (tensor, (shape, dtype)) in enumerate(zip(given, parts, strict=True)):
            if tensor.dtype != dtype or tuple(tensor.shape[1:]) != shape[1:]:
                raise BadInput(
                    f"input {index} of {call} is {in_words((tuple(tensor.shape), tensor.dtype))}, expected "
                    f"{in_words((shape, dtype))} for each microbatch, as build_stages was given"
                )

    def _told(
        self, samples: int, weights: Sequence[float] | None, problem: Exception | None
    ) -> tuple[int, list[float] | None]:
        """Return the samples that the rank of the first stage has, and the weights of the last; raise on all ranks what
        is wrong on any."""
        values = [float(problem is not None)] + [0.0] * (2 + self._count)
        if self._has_first:
            values[1] = samples
        if self._has_last and weights is not None:
            values[2:] = [1.0, *weights]
        if dist.get_world_size(self._group) > 1:
            message = torch.tensor(values, dtype=torch.float64, device=self._device)
            dist.all_reduce(message, group=self._group)
            values = message.tolist()
        if values[0]:
            raise_together(problem, self._group)
        return int(values[1]), values[3:] if values[2] else None

    def _sized(self, samples: int, *, forward_only: bool) -> list[int]:
        """Return the samples of each microbatch, as many as can be."""
        count = self._count
        if forward_only and self._announced is not None:
            count = max(1, -(-samples // self._announced))
        if samples < count:
            raise BadInput(
                f"a batch has {counted(samples, 'sample')}, expected at least one for each of "
                f"{counted(count, 'microbatch')}"
            )
        small, larger = divmod(samples, count)
        sizes = [small + 1] * larger + [small] * (count - larger)
        if self._announced is None and not forward_only:
            self._announced = sizes[0]
        if sizes[0] > (self._announced or sizes[0]):
            raise BadInput(
                f"a batch has {counted(samples, 'sample')} in {counted(count, 'microbatch')}, expected at most "
                f"{self._announced} in each: the promised memory is for these"
            )
        return sizes

    def _refuse_names(self, microbatches: Sequence[Microbatch], call: str) -> None:
        """Raise BadInput where a keyword argument has the name of what a layer is given anyway, or that none takes."""
        for name in (name for one in microbatches for name in one.keywords):
            if name in self._taken:
                raise BadInput(
                    f"the keyword argument {name} has the name of what layer {self._taken[name]} is given anyway: an "
                    "input, the target or the carry; expected another name"
                )
            if self.keywords is not None and name not in self.keywords:
                raise BadInput(
                    f"{call} got the keyword argument {name}, which no layer takes; expected a name that the forward "
                    "of a layer has"
                )

    def _numbers(self, weights: Sequence[float] | Tensor) -> list[float]:
        """Return what the microbatches weigh as numbers."""
        given = enumerate(of_kind("weights", weights, Iterable, "a list of numbers"))
        own = [float(of_kind(f"weights[{number}]", one, (Real, Tensor), "a number")) for number, one in given]
        for number, one in enumerate(own):
            if not math.isfinite(one):
                raise BadInput(f"weights[{number}] of step() is {one}, expected a finite number")
        if len(own) != self._count:
            raise BadInput(
                f"step() got {counted(len(own), 'weight')}, expected one for each of "
                f"{counted(self._count, 'microbatch')}"
            )
        return own

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


def _refuse_gradients(inputs: Sequence[Tensor], target: Tensor | None) -> None:
    """Raise BadInput where gradients should leave a step through what it is given, and do not.

    All microbatches would run backward through what made a batch, of which the first frees all; several inputs cross as
    one tensor, which has their bits alone.
    """
    names = [f"input {index}" for index in range(len(inputs))]
    for name, tensor in zip((*names, "the target"), (*inputs, target), strict=True):
        if tensor is not None and tensor.grad_fn is not None:
            raise BadInput(
                f"{name} of step() is the result of other ops with gradients, expected it detached: what is trained "
                "with the model is one of its layers"
            )
    for name, tensor in zip(names, inputs, strict=True):
        if len(inputs) > 1 and tensor.requires_grad:
            raise BadInput(f"{name} of step() needs a gradient, expected none where there are several inputs")


def _taken(stages: Stages, bundles: Sequence[Bundle] | None) -> dict[str, int]:
    """Return by name, as layers call them, what the replay gives to a layer itself, and to which."""
    found: dict[str, int] = {}
    for stage in stages.values():
        for index, layer in enumerate(stage.layers, stage.first_layer):
            by_name = [name for name in ("target", "carry") if takes(layer, name)]
            count = 1 if bundles is None else len(bundles[index].parts)
            if stage.is_last and index + 1 == stage.end_layer and "target" not in by_name:
                count += 1
            known = parameters_of(layer).values()
            behind = [one for one in known if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)][:count]
            by_name += [one.name for one in behind if one.kind is one.POSITIONAL_OR_KEYWORD]
            found.update(dict.fromkeys(by_name, index))
    return found


def _rows_in(parts: Sequence[Boundary], samples: int) -> dict[str, int]:
    """Return how many entries of its first dimension each input of a microbatch has for a sample."""
    found = {}
    for index, (shape, _) in enumerate(parts):
        if not shape or shape[0] % samples:
            raise BadInput(
                f"input {index} has the shape {shape} in a microbatch, expected samples along its first dimension: "
                f"{samples}, as input 0 has, or a multiple"
            )
        found[f"input {index}"] = shape[0] // samples
    return found


def _check_lengths(setup: ir.Setup) -> None:
    """Raise BadInput where a microbatch is longer than the sequences that it is cut from."""
    if isinstance(setup.units, msgspec.UnsetType):
        return
    longest = max(cut[-1] for cut in setup.units.cuts)
    if longest > setup.units.tokens:
        raise BadInput(
            f"$.setup.units: a microbatch has {longest} tokens, expected at most the {setup.units.tokens} of the "
            "profile's sequences: of each batch the first so many tokens are read; profile longer sequences"
        )
