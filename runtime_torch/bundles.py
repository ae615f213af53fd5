"""Several tensors as one: what crosses from layer to layer where layers take and return tuples.

Stages, stores and messages know one tensor per border. A bundle is a carrier tensor with the bits of all its parts, so
any dtypes pass exactly (positions, masks, activations), and gradients pass back the same way. It costs a copy. Of
several floats some may get no gradient: to tell them, the host of a GPU waits for the carrier's where their backward
begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optpipe_compiler.errors import BadInput, first_line, of_kind
from runtime_torch import engine, random_state
from runtime_torch.engine import changes
from runtime_torch.microbatch import Wrapping, current, targets_for
from runtime_torch.surroundings import autocast_now, same_attributes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

Boundary = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what crosses between two stages or layers, for one microbatch."""

Made = nn.Module | Callable[[], nn.Module]
"""A layer, or a function without arguments that makes it."""

CHANGES_INPUT = "changes in place what it is given, expected a new tensor: a stage or a recompute may begin with it"

Flow = Tensor | tuple[Tensor, ...]
"""What passes from layer to layer within a stage."""

_ALIGNMENT = 16
"""Bytes; every part starts at a multiple, so that it can be viewed as any dtype."""
_ABSENT = list(b"optpipe: absent!")
"""The first bytes of a part that has no gradient: zeros would be one, and no gradient begins so."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The shapes and dtypes of the tensors that cross a border, for one microbatch."""

    parts: tuple[Boundary, ...]
    samples: int | None = field(default=None, compare=False)
    """How many samples the microbatch has, where that is known."""
    tokens: int | None = field(default=None, compare=False)
    """How many tokens each of its sequences has, where that matters: units then have fewer."""

    def __str__(self) -> str:
        return ", ".join(map(in_words, self.parts))

    @property
    def is_single(self) -> bool:
        """Whether one tensor crosses, as it is."""
        return len(self.parts) == 1

    @property
    def boundary(self) -> Boundary:
        """Shape and dtype of the tensor that really crosses."""
        if self.is_single:
            return self.parts[0]
        *_, (end, _) = self._extents()
        return (-(-end // self.carrier.itemsize),), self.carrier

    @property
    def carrier(self) -> torch.dtype:
        """The first dtype that can have a gradient: the carrier must be able to have one where a part has one."""
        return next((dtype for _, dtype in self.parts if _has_gradient(dtype)), torch.uint8)

    def with_floats(self, dtype: torch.dtype) -> Bundle:
        """Return the same bundle with all floats in `dtype`."""
        return replace(self, parts=tuple((shape, dtype if one.is_floating_point else one) for shape, one in self.parts))

    def of(self, samples: int | None, tokens: int | None = None) -> Bundle:
        """Return the same for so many samples, and tokens in each: they are the first dimension of the parts that had
        as many there, and the second."""
        samples = self.samples if samples is None or self.samples is None else samples
        tokens = self.tokens if tokens is None or self.tokens is None else tokens
        if (samples, tokens) == (self.samples, self.tokens):
            return self
        parts = []
        for shape, dtype in self.parts:
            if samples is not None and self.samples is not None:
                shape = with_samples(shape, self.samples, samples)
            if tokens is not None and self.tokens is not None:
                shape = with_tokens(shape, self.tokens, tokens)
            parts.append((shape, dtype))
        return Bundle(tuple(parts), samples, tokens)

    def carry(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the tensor that crosses, without a gradient: the only one, or a carrier of all."""
        only = tensors[0] if self.is_single else None
        return self.join(tensors) if only is None else only

    def example(self, device: torch.device, seed: int = 0) -> Tensor:
        """Return what may cross: floats between 0 and 1, always the same, and zeros, which indices may always be."""
        generator = torch.Generator(device).manual_seed(seed)
        return self.carry([_example(shape, dtype, generator) for shape, dtype in self.parts])

    def carry_batch(self, tensors: Sequence[Sequence[Tensor]], tokens: Sequence[int | None]) -> Sequence[Tensor]:
        """Return the units (of so many `tokens`; None: of all) of several tensors as one tensor for each of them."""
        if self.is_single:
            return tensors[0]
        carriers = [
            self.of(len(parts[0]), length).join(parts)
            for parts, length in zip(zip(*tensors, strict=True), tokens, strict=True)
        ]
        return torch.split(torch.cat(carriers), [carrier.numel() for carrier in carriers])

    def slices(self, tensor: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor] | None:
        """Return the tokens of each span of what crosses; None where no part has tokens, its second dimension."""
        parts = self.parts_of(tensor)
        have = [part.dim() > 1 and part.shape[1] == self.tokens for part in parts]
        if not any(have):
            return None
        return [
            self.of(None, end - begin).carry(
                [part[:, begin:end] if has else part for part, has in zip(parts, have, strict=True)]
            )
            for begin, end in spans
        ]

    def parts_of(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in what crosses."""
        return (tensor,) if self.is_single else self.cut(tensor)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the carrier of `tensors`; differentiable."""
        carrier: Tensor = _Pack.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return carrier

    def unpack(self, carrier: Tensor) -> tuple[Tensor, ...]:
        """Return the parts, as views of the carrier; differentiable."""
        return (carrier,) if self.is_single else _Unpack.apply(self, carrier)  # type: ignore[no-untyped-call]

    def join(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Copy the bits of the parts into a new carrier; `is_absent` tells which floats are missing."""
        device = next(tensor.device for tensor in tensors if tensor is not None)
        shape, dtype = self.boundary
        carrier = torch.zeros(shape, dtype=dtype, device=device)
        bits = carrier.view(torch.uint8)
        for tensor, (_, own), (end, nbytes) in zip(tensors, self.parts, self._extents(), strict=True):
            start = end - _aligned(nbytes)
            if tensor is not None:
                bits[start : start + nbytes].copy_(_bits(tensor))
            elif nbytes and _has_gradient(own):
                bits[start : start + _ALIGNMENT].copy_(torch.tensor(_ABSENT, dtype=torch.uint8))
        return carrier

    def is_absent(self, carrier: Tensor) -> list[bool]:
        """Return for each part whether it was missing when the carrier was joined; waits for a GPU."""
        if carrier.is_meta:
            return [False] * len(self.parts)
        bits = _bits(carrier)
        starts = [end - _aligned(nbytes) if nbytes else None for end, nbytes in self._extents()]
        marks = torch.stack([bits[at : at + _ALIGNMENT] for at in starts if at is not None]).tolist()
        found = iter(marks)
        return [at is not None and next(found) == _ABSENT for at in starts]

    def cut(self, carrier: Tensor) -> tuple[Tensor, ...]:
        """Return the parts as views of the carrier."""
        bits = _bits(carrier)
        return tuple(
            bits[end - _aligned(nbytes) :][:nbytes].view(dtype).view(shape)
            for (shape, dtype), (end, nbytes) in zip(self.parts, self._extents(), strict=True)
        )

    def _extents(self) -> Iterator[tuple[int, int]]:
        """Yield each part's end in the carrier, with its padding, and its bytes."""
        end = 0
        for shape, dtype in self.parts:
            nbytes = math.prod(shape) * dtype.itemsize
            end += _aligned(nbytes)
            yield end, nbytes


def in_words(found: Boundary) -> str:
    """Say it in words."""
    return f"{str(found[1]).removeprefix('torch.')} of shape {found[0]}"


def with_samples(shape: tuple[int, ...], announced: int, samples: int) -> tuple[int, ...]:
    """Return the shape with so many samples in its first dimension, where there were `announced`."""
    return (samples, *shape[1:]) if shape and shape[0] == announced else shape


def with_tokens(shape: tuple[int, ...], announced: int, tokens: int) -> tuple[int, ...]:
    """Return the shape with so many tokens in its second dimension, where there were `announced`."""
    return (shape[0], tokens, *shape[2:]) if len(shape) > 1 and shape[1] == announced else shape


def bundle_of(found: Any, what: str) -> Bundle:
    """Return the bundle of what a layer returned: a tensor, or a tuple of tensors."""
    tensors = found if isinstance(found, tuple | list) else (found,)
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        other = next((f" with {type(one).__name__}" for one in tensors if not isinstance(one, Tensor)), "")
        kind = type(found).__name__ + (other if found is tensors else "")
        raise BadInput(f"{what} returns {kind}, expected a tensor or a tuple of tensors")
    return Bundle(tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors))


class BundledLayer(Wrapping):
    """A layer that takes or returns several tensors, on a border of a stage as one.

    Within a stage tensors pass from layer to layer as they are: what a layer only passes on is saved once for all.
    `name` is the layer's in errors.
    """

    def __init__(self, layer: nn.Module, incoming: Bundle, outgoing: Bundle, name: str, *, packs: bool) -> None:
        super().__init__()
        self.layer = layer
        self._name = name
        self._incoming, self._outgoing, self._packs = incoming, outgoing, packs

    def forward(self, x: Flow, *target: Tensor, **named: Any) -> Flow:
        """Unpack, call, pack."""
        samples, tokens = current().samples, current().tokens
        parts = x if isinstance(x, tuple) else self._incoming.of(samples, tokens).unpack(x)
        before = 0 if isinstance(x, tuple) else changes(x)
        found = self.layer(*parts, *target, **named)
        if not isinstance(x, tuple) and x.requires_grad and changes(x) != before:  # torch says so of a later layer
            raise BadInput(f"{self._name} {CHANGES_INPUT}")
        if self._outgoing.is_single:
            return found  # type: ignore[no-any-return]
        expected = self._outgoing.of(samples, tokens)
        if (other := bundle_of(found, self._name)) != expected:
            raise BadInput(f"{self._name} returned {other}, expected {expected}")
        return expected.pack(found) if self._packs else tuple(found)


def bundled(
    layer: nn.Module, incoming: Bundle, outgoing: Bundle, name: str = "a layer", *, packs: bool = True
) -> nn.Module:
    """Return `layer` as one that takes what its stage has, one tensor or a tuple, and the target; where it `packs`, it
    returns one tensor."""
    if incoming.is_single and outgoing.is_single:
        return layer
    return BundledLayer(layer, incoming, outgoing, name, packs=packs)


def trace_bundles(
    layers: Sequence[Made], inputs: Sequence[Tensor], target: Tensor | None, device: torch.device | None = None
) -> list[Bundle]:
    """Return what enters each layer, and what leaves the last, for one microbatch.

    Layers run on torch's meta device, where nothing is allocated or computed; where autocast is on for `device`, which
    the meta device does not know, on stand-ins for tensors of that device. Where one of them cannot (control flow that
    depends on values, as a router's; a kernel that has other rules there, as grouped_mm), all run on `inputs` instead,
    one after another, each made for its turn if it is a function.
    """
    is_on, dtype, _ = (False, torch.float32, False) if device is None else autocast_now(device)
    on = device if device is not None and is_on else torch.device("meta")
    without_data = engine.without_data() if is_on else nullcontext()
    with ExitStack() as stack:
        for kind in {on.type, "cpu"} if is_on else ():  # its copies of the weights are not for steps
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        try:
            if without_data is not None:
                with without_data:
                    there = [tensor.to(on) for tensor in inputs]
                return _trace(layers, there, target, partial(_on_stand_ins, on, without_data))
        except BadInput as error:
            if error.__cause__ is None:
                raise
        data = [tensor.clone() for tensor in inputs]
        return _trace(layers, data, None if target is None else target.clone(), _on_data)


def needs_data(error: BaseException) -> bool:
    """Whether what cannot be made on the meta device may be made elsewhere."""
    return isinstance(error, NotImplementedError) or "meta" in str(error)


def _trace(
    layers: Sequence[Made],
    inputs: Sequence[Tensor],
    target: Tensor | None,
    call: Callable[[Made, int, tuple[Tensor, ...], Tensor | None, bool], Any],
) -> list[Bundle]:
    bundles = [bundle_of(tuple(inputs), "the input")]
    parts = tuple(inputs)
    for index, made in enumerate(layers):
        last = index == len(layers) - 1
        try:
            sources = random_state.everywhere(torch.device("cpu"))
            if isinstance(made, nn.Module):
                sources += random_state.owned(made.modules())
            with torch.no_grad(), random_state.untouched(sources):
                found = call(made, index, parts, target, last)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            given = f"what layer {index - 1} returns" if index else "the input"
            also = (target,) if last and target is not None else ()
            raise BadInput(
                f"layer {index}: cannot be called with {given} "
                f"({', '.join(f'{tuple(part.shape)} {part.dtype}' for part in (*parts, *also))}): {first_line(error)}"
            ) from error
        bundles.append(bundle_of(found, f"layer {index}"))
        if isinstance(found, tuple | list) and len(found) == 1:
            raise BadInput(f"layer {index} returns a {type(found).__name__} of one tensor, expected the tensor itself")
        parts = tuple(found) if isinstance(found, tuple | list) else (found,)
    return [replace(bundle, samples=len(inputs[0]) if inputs[0].dim() else None) for bundle in bundles]


def layer_made(made: Made, index: int) -> nn.Module:
    """Return layer `index`: what was given, or what that makes; raise BadInput where it is no layer."""
    of_kind(f"layer {index}", made, (nn.Module, Callable), "a torch.nn.Module, or a function that makes it")
    layer = made if isinstance(made, nn.Module) else made()
    if not isinstance(layer, nn.Module):
        raise BadInput(f"layer {index} is a {type(layer).__name__}, expected a torch.nn.Module")
    return layer


def _on_stand_ins(
    device: torch.device,
    without_data: AbstractContextManager[object],
    made: Made,
    index: int,
    parts: tuple[Tensor, ...],
    target: Tensor | None,
    is_last: bool,
) -> Any:
    """Call a layer on tensors that have none: on the meta device, or in a mode in which those of any have none."""
    with without_data:
        if isinstance(made, nn.Module):
            own = {name: t.to(device) for name, t in (*made.named_parameters(), *made.named_buffers())}
            behind, named = _targets(made, target, device, is_last)
            with unchanged(made):
                return torch.func.functional_call(made, own, parts + behind, named)
        with device:
            layer = layer_made(made, index)
            owned = (*layer.parameters(), *layer.buffers())
            if device.type != "meta" or any(one.device != device for one in owned):  # it was there before
                return _on_stand_ins(device, nullcontext(), layer, index, parts, target, is_last)
            behind, named = _targets(layer, target, device, is_last)
            return layer(*parts, *behind, **named)


def _on_data(made: Made, index: int, parts: tuple[Tensor, ...], target: Tensor | None, is_last: bool) -> Any:
    """Call a layer where it lies; its buffers stay as they are."""
    layer = layer_made(made, index)
    device = next((tensor.device for tensor in (*layer.parameters(), *layer.buffers())), parts[0].device)
    own = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    behind, named = _targets(layer, target, device, is_last)
    with unchanged(layer):
        return torch.func.functional_call(layer, own, tuple(part.to(device) for part in parts) + behind, named)


@contextmanager
def unchanged(layer: nn.Module) -> Iterator[None]:
    """Within: what a layer remembers of its calls, such as a table of positions, it forgets again."""
    attributes = [one for module in layer.modules() for one in vars(module).values()]
    kept = [(one, copy(one)) for one in attributes if isinstance(one, dict | list)]
    inside = [part for one, _ in kept for part in (one.values() if isinstance(one, dict) else one)]
    own = {id(one) for one in (*layer.parameters(), *layer.buffers())}  # which others look after
    tensors = [
        (one, one.detach().clone(), changes(one))
        for one in (*inside, *attributes)
        if isinstance(one, Tensor) and id(one) not in own
    ]
    try:
        with same_attributes(layer.modules()):
            yield
    finally:
        for one, was in kept:
            one.clear()
            if isinstance(one, dict):
                one.update(was)
            else:
                one.extend(was)
        with torch.no_grad():
            for tensor, value, as_often in tensors:
                if changes(tensor) != as_often and tensor.shape == value.shape:
                    tensor.copy_(value)


def _targets(
    layer: nn.Module, target: Tensor | None, device: torch.device | str, is_last: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a layer gets of the target; nothing where there is none."""
    return ((), {}) if target is None else targets_for(layer, target.to(device), is_last=is_last)


def _bits(tensor: Tensor) -> Tensor:
    """Return all bytes, as a view where they are contiguous; of one element, whatever its stride is said to be."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _example(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        return torch.rand(shape, dtype=dtype, generator=generator, device=generator.device)
    return torch.zeros(shape, device=generator.device).to(dtype)


def _has_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class _Pack(torch.autograd.Function):
    """Parts to carrier."""

    @staticmethod
    def forward(ctx: Any, bundle: Bundle, *tensors: Tensor) -> Tensor:
        ctx.bundle = bundle
        carrier = bundle.join(tensors)
        if not _has_gradient(carrier.dtype):
            ctx.mark_non_differentiable(carrier)
        return carrier

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        parts = [part if _has_gradient(part.dtype) else None for part in ctx.bundle.cut(gradient)]
        if sum(part is not None for part in parts) > 1:  # of a single one there is a gradient, or none is sent
            absent = ctx.bundle.is_absent(gradient)
            parts = [None if is_absent else part for part, is_absent in zip(parts, absent, strict=True)]
        return None, *parts


class _Unpack(torch.autograd.Function):
    """Carrier to parts."""

    @staticmethod
    def forward(ctx: Any, bundle: Bundle, carrier: Tensor) -> tuple[Tensor, ...]:
        ctx.bundle = bundle
        ctx.set_materialize_grads(False)
        parts = bundle.cut(carrier)
        ctx.mark_non_differentiable(*(part for part in parts if not _has_gradient(part.dtype)))
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if all(gradient is None for gradient in gradients):
            return None, None
        return None, ctx.bundle.join(gradients)
