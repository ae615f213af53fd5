"""A user's model: the layers that `package.module:function` returns and, where it gives them, its data."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optpipe_compiler.errors import BadInput
from optpipe_torch.models.user_functions import import_function, origin
from runtime_torch.bundles import Bundle, Made, needs_data, trace_bundles
from runtime_torch.engine import is_compiled
from runtime_torch.microbatch import inner_layer
from runtime_torch.ties import merged, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe_compiler.documents.profile import Model
    from runtime_torch.ties import Names

DrawnBatch = tuple[tuple[Tensor, ...], Tensor]
"""Inputs and target of several samples, which are numbered along the first dimension of every tensor."""


@dataclass(frozen=True, slots=True)
class UserModel:
    """What the function returns: a list of layers, `(layers, batch)`, or `(layers, batch, ties)`.

    Instead of layers there may be a causal language model of transformers.

    `batch(generator, samples)` returns `(inputs, target)`: a tensor or a tuple of tensors, and a tensor, on the CPU and
    with `samples` entries along each first dimension. For a model of transformers that takes more than tokens the
    inputs are a mapping, as tokenizers give it. It depends on `generator` alone: every rank draws the same.
    None: windows of text. `ties` name the parameters that layers share: `[("0.weight", "9.weight")]`.
    """

    layers: list[Made]
    batch: Callable[[torch.Generator, int], Any] | None = None
    ties: Sequence[Sequence[str]] = ()

    def all_ties(self) -> list[Names]:
        """Those that are named, and those of layers that are there already."""
        there = {str(index): one for index, one in enumerate(self.layers) if isinstance(one, nn.Module)}
        return merged([*self.ties, *shared(there)])


def load(model: Model) -> UserModel:
    """Import the function, which must be the user's own, and call it with the model's config under its seed."""
    function = import_function(model.builder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        found = function(**model.config)
    several = isinstance(found, tuple) and len(found) in (2, 3)
    layers, batch, ties = (*found, ())[:3] if several else (found, None, ())
    if hasattr(layers, "get_output_embeddings"):
        from optpipe_torch.frameworks.transformers import layers_of

        names = _names_of_inputs(model, batch)
        try:
            layers = layers_of(layers, names or ("input_ids",), shifted=batch is None)
        except BadInput as error:
            raise _refused(model, f"returned a model that cannot be cut: {error}") from error
        batch = partial(_in_order, batch, names) if names else batch
    if not isinstance(layers, list | nn.ModuleList) or not all(callable(layer) for layer in layers):
        raise _refused(
            model, f"returned {_type(found)}, expected a list of layers, (layers, batch) or (layers, batch, ties)"
        )
    if not layers:
        raise _refused(model, "returned no layers")
    if several and not callable(batch) and not (batch is None and ties):
        raise _refused(model, f"returned (layers, {_type(batch)}), expected a function as second: batch(generator, n)")
    if not isinstance(ties, list | tuple) or not all(_is_tie(tie) for tie in ties):
        raise _refused(model, f"returned the ties {ties!r}, expected lists of two names or more such as 0.weight")
    return UserModel(list(layers), batch, ties)


def _names_of_inputs(model: Model, batch: object) -> tuple[str, ...]:
    """Return what a batch for a model of transformers names its inputs; nothing where it is tokens alone."""
    if not callable(batch):
        return ()
    found = batch(torch.Generator().manual_seed(model.seed), 1)
    inputs = found[0] if isinstance(found, tuple) and found else None
    if isinstance(inputs, tuple | list) and len(inputs) > 1:
        raise _refused(
            model,
            f"batch(generator, 1) returned {len(inputs)} inputs for a model of transformers, expected their names, "
            "too: {'input_ids': ..., 'attention_mask': ...}",
        )
    return tuple(inputs) if isinstance(inputs, Mapping) else ()


def _in_order(
    batch: Callable[[torch.Generator, int], Any], names: Sequence[str], generator: torch.Generator, samples: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Draw a batch whose inputs have names; return them in the order of these."""
    inputs, target = batch(generator, samples)
    return tuple(inputs[name] for name in names), target


def _is_tie(tie: object) -> bool:
    return isinstance(tie, list | tuple) and len(tie) > 1 and all(isinstance(name, str) for name in tie)


def made(model: Model, index: int, one: Made) -> nn.Module:
    """Return a layer, made under a seed of its own where it is not there yet."""
    if isinstance(one, nn.Module):
        return one
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed * 1_000_003 + index)
        return one()


def sketched(model: Model, index: int, one: Made) -> nn.Module:
    """Return a layer on the meta device, or as it is where it is there already or cannot be made without data."""
    try:
        with torch.device("meta"):
            return made(model, index, one)
    except (RuntimeError, TypeError) as error:
        if not needs_data(error):
            raise
        return made(model, index, one)


def draw(model: Model, user: UserModel, dtype: torch.dtype, generator: torch.Generator, samples: int) -> DrawnBatch:
    """Draw a batch of the user's own data; floats become `dtype`, as the layers' parameters do."""
    assert user.batch is not None
    found = user.batch(generator, samples)
    call = f"batch(generator, {samples})"
    if not isinstance(found, tuple) or len(found) != 2:
        raise _refused(model, f"{call} returned {_type(found)}, expected (inputs, target)")
    inputs, target = found
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    if not inputs:
        raise _refused(model, f"{call} returned no inputs")
    for tensor, name in (*((tensor, "an input") for tensor in inputs), (target, "a target")):
        if not isinstance(tensor, Tensor):
            raise _refused(model, f"{call} returned {_type(tensor)} as {name}, expected a tensor")
        if tensor.dim() == 0 or tensor.shape[0] != samples:
            raise _refused(
                model,
                f"{call} returned {name} of shape {tuple(tensor.shape)}, expected a first dimension of {samples}",
            )
    *inputs, target = (_as(tensor.detach(), dtype) for tensor in (*inputs, target))
    return tuple(inputs), target


def bundles(model: Model, user: UserModel, dtype: torch.dtype) -> list[Bundle]:
    """Return what enters each layer, and what leaves the last, for one microbatch.

    The layers are called on torch's meta device, or, where they need data, one after another on what is drawn.
    """
    inputs, target = _sample(model, user, dtype)
    makers = [partial(_converted, model, index, one, dtype) for index, one in enumerate(user.layers)]
    try:
        found = trace_bundles(makers, inputs, target)
    except BadInput as error:
        raise _refused(model, str(error)) from error
    for index, bundle in enumerate(found[1:-1]):
        if not bundle.carrier.is_floating_point:
            returned = ", ".join(str(dtype) for _, dtype in bundle.parts)
            raise _refused(model, f"layer {index} returns {returned}, expected floats, or some among its tensors")
    if not found[-1].is_single or found[-1].parts[0][0] != ():
        shapes = ", ".join(str(shape) for shape, _ in found[-1].parts)
        raise _refused(model, f"the last layer returns shape {shapes}, expected the scalar loss")
    return found


def first_trained(model: Model, user: UserModel) -> int:
    """Return the first layer with a parameter that trains, in which the backwards of the first stage end; 0: none."""
    layers = (sketched(model, index, one) for index, one in enumerate(user.layers))
    return next((n for n, one in enumerate(layers) if any(p.requires_grad for p in one.parameters())), 0)


def kinds(model: Model, user: UserModel, borders: Sequence[Bundle]) -> list[str]:
    """Return the kind of each layer.

    Layers are of one kind if torch prints them alike, the same modules are compiled, their parameters and buffers have
    the same shapes, and so have what enters and leaves them, and their modules have the same flags, texts and numbers
    in attributes, but for numbers of the layers; the first layer, the first that trains and the last are kinds of their
    own.
    """
    alone = (0, first_trained(model, user), len(user.layers) - 1)
    types, kinds, numbers = list[str](), list[object](), list[_Numbers]()
    for index, one in enumerate(user.layers):
        layer = sketched(model, index, one)
        sizes = tuple((tuple(p.shape), p.requires_grad) for p in layer.parameters())
        compiled = tuple(is_compiled(one) for one in layer.modules())
        said, own = _attributes(layer)
        types.append(type(inner_layer(layer)).__name__)
        number = index if index in alone else None
        kinds.append((number, repr(layer), sizes, compiled, said, *borders[index : index + 2]))
        numbers.append(own)
    kinds = _told_by_numbers(kinds, numbers)
    names: dict[object, str] = {}
    for kind, name in zip(kinds, types, strict=True):
        if kind not in names:
            same = sum(known.partition("-")[0] == name for known in names.values())
            names[kind] = name + (f"-{same + 1}" if same else "")
    return [names[kind] for kind in kinds]


_Numbers = dict[tuple[str, str], tuple[int | float, ...]]
"""Numbers in attributes, by the class and the name: of each such module of a layer."""


def _attributes(layer: nn.Module) -> tuple[object, _Numbers]:
    """Return what torch need not print of a layer and its costs may depend on: its buffers, and flags, texts without
    figures, and whether numbers are 0, in attributes of its modules, or in tuples there; and their numbers."""
    said: Counter[object] = Counter()
    numbers: _Numbers = {}
    for module in layer.modules():
        kind = type(module).__name__
        said.update((kind, name, tuple(one.shape)) for name, one in module.named_buffers(recurse=False))
        for name, value in _plain(module):
            if type(value) in (int, float):
                numbers[kind, name] = (*numbers.get((kind, name), ()), value)
                said[kind, name, type(value), type(value) is int or value != 0] += 1
            elif value is None or type(value) is bool or (type(value) is str and not any(map(str.isdigit, value))):
                said[kind, name, str(value)] += 1
    return frozenset(said.items()), numbers


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the public attributes of a module with their names, of tuples and lists what is in them."""
    for name, value in vars(module).items():
        if not name.startswith("_"):
            yield from [(f"{name}[]", one) for one in value] if type(value) in (tuple, list) else [(name, value)]


def _told_by_numbers(kinds: Sequence[object], numbers: Sequence[_Numbers]) -> list[object]:
    """Return the kinds with the numbers of each layer, but for those that are the layers' own."""
    groups: dict[object, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    found = list(kinds)
    for indices in groups.values():
        for place in numbers[indices[0]]:
            of_layers = [numbers[index][place] for index in indices]
            if not all(_are_own(indices, values) for values in zip(*of_layers, strict=True)):
                for index, values in zip(indices, of_layers, strict=True):
                    found[index] = found[index], values
    return found


def _are_own(indices: Sequence[int], values: Sequence[int | float]) -> bool:
    """Whether numbers, one of each layer, say nothing of what the layers cost: all are the same, or count the layers,
    of the model or of their kind, up or down, or are fractions of which no two are the same, as a rate that grows."""
    steps = [after - before for before, after in pairwise(values)]
    distances = [after - before for before, after in pairwise(indices)]
    if all(step == 0 for step in steps):
        return True
    if type(values[0]) is float:
        return len(set(values)) == len(values)
    return any(
        [abs(step) for step in steps] == of and len({step > 0 for step in steps}) == 1
        for of in (distances, [1] * len(steps))
    )


def _sample(model: Model, user: UserModel, dtype: torch.dtype) -> DrawnBatch:
    """One microbatch, drawn twice, since ranks that draw different data train nothing."""
    if user.batch is None:
        tokens = torch.zeros(model.microbatch_size, model.sequence_length, dtype=torch.int64)
        return (tokens,), tokens
    first, again = (
        draw(model, user, dtype, torch.Generator().manual_seed(model.seed), model.microbatch_size) for _ in range(2)
    )
    for one, other in zip((*first[0], first[1]), (*again[0], again[1]), strict=True):
        if not torch.equal(one, other):
            raise _refused(model, "batch drew other values from an equal generator, expected to depend on it alone")
    return first


def _converted(model: Model, index: int, one: Made, dtype: torch.dtype) -> nn.Module:
    """A copy of layers that are there already: nothing of theirs may change."""
    return (copy.deepcopy(one) if isinstance(one, nn.Module) else made(model, index, one)).to(dtype)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _refused(model: Model, what: str) -> BadInput:
    return BadInput(f"{origin(model.builder)} {model.builder!r}: {what}")


def _type(found: object) -> str:
    name = type(found).__name__
    return f"a {name} of {len(found)}" if isinstance(found, tuple) else name
