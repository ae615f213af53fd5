"""What is known of the microbatch that layers are called for: its samples, its weight, its keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput, of_kind
from runtime_torch import engine

if TYPE_CHECKING:
    from collections.abc import Iterator

Keywords = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Slice:
    """Which part of its microbatch a unit is."""

    microbatch: int
    index: int
    starts: tuple[int, ...]
    """The position of the first token of each slice of the microbatch."""
    share: float
    """Its tokens by those of the microbatch."""
    target: Tensor | None = None
    """Of the whole microbatch."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch of a step, or a slice of one. `samples`: None as long as all microbatches are as announced."""

    weight: float = 1.0
    """What the microbatch's loss counts in the step's."""
    samples: int | None = None
    keywords: Keywords = field(default_factory=dict)
    tokens: int | None = None
    """Of the slice that is computed; None: the microbatch is as long as announced."""
    slice: Slice | None = None
    """None: it is not cut."""


_OUTSIDE = Microbatch()
_current = _OUTSIDE
_parameters: WeakKeyDictionary[nn.Module, Mapping[str, inspect.Parameter]] = WeakKeyDictionary()


def current() -> Microbatch:
    """The microbatch that is computed now; outside of steps one that counts fully."""
    return _current


def enter(microbatch: Microbatch | None) -> None:
    """Layers are called for this one from now on; None: for none."""
    global _current
    _current = microbatch or _OUTSIDE


@contextmanager
def entered(microbatch: Microbatch) -> Iterator[None]:
    """Within: layers are called for this one."""
    enter(microbatch)
    try:
        yield
    finally:
        enter(None)


def cut(
    sizes: Sequence[int], weights: Sequence[float], keywords: Sequence[Keywords] | None, call: str
) -> list[Microbatch]:
    """Return microbatches of these sizes, with these weights and keyword arguments; `call`: what was given them."""
    for number, one in enumerate(
        of_kind("keywords", () if keywords is None else keywords, Sequence, "a list of mappings")
    ):
        of_kind(f"keywords[{number}]", one, Mapping, "a mapping")
    if keywords is not None and len(keywords) != len(sizes):
        raise BadInput(f"{call} got keywords for {counted(len(keywords), 'microbatch')}, expected {len(sizes)}")
    for name, value in (item for one in keywords or () for item in one.items()):
        if isinstance(value, Tensor):
            raise BadInput(f"the keyword argument {name} is a tensor, expected another value: tensors are inputs")
    given: Sequence[Keywords] = [{}] * len(sizes) if keywords is None else keywords
    return [Microbatch(*one) for one in zip(weights, sizes, given, strict=True)]


def keywords_for(layer: nn.Module) -> dict[str, Any]:
    """The keyword arguments of the current microbatch that the layer's `forward` names, all if it takes any."""
    given = _current.keywords
    if not given:
        return {}
    names = keywords_of(layer)
    return {name: value for name, value in given.items() if names is None or name in names}


def keywords_of(layer: nn.Module) -> set[str] | None:
    """The names of the keyword arguments that a layer takes; None: any."""
    known = parameters_of(layer)
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return None
    return {name for name, one in known.items() if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}


def takes(layer: nn.Module, name: Literal["target", "carry"]) -> bool:
    """Whether a layer is given this by name, wherever in the model it is: its `forward` has `*, name`."""
    parameter = parameters_of(layer).get(name)
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY


def parameters_of(layer: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a layer's `forward` as the model has it; they are looked up once."""
    if layer not in _parameters:
        inner = engine.uncompiled(inner_layer(layer))
        if isinstance(inner, torch.jit.ScriptModule):
            raise BadInput(
                f"a layer is a {type(inner).__name__} of torch.jit, whose inputs cannot be told by name, expected the "
                "module that was scripted or traced, or torch.compile of it"
            )
        _parameters[layer] = inspect.signature(inner.forward).parameters
    return _parameters[layer]


def targets_for(
    layer: nn.Module, target: Tensor | None, *, is_last: bool
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Return what a layer gets of the target: by name where it asks for it, else the model's last layer behind its
    inputs."""
    if takes(layer, "target"):
        return (), {"target": target}
    return (target,) if is_last else (), {}


class Wrapping(nn.Module):
    """Calls `layer` with the target and the keyword arguments that it gets itself."""

    layer: nn.Module


def inner_layer(layer: nn.Module) -> nn.Module:
    """The layer as the model has it, without what wraps it."""
    while isinstance(layer, DistributedDataParallel | Wrapping) or type(layer).__name__ == "OptimizedModule":
        if isinstance(layer, DistributedDataParallel):
            layer = layer.module
        elif isinstance(layer, Wrapping):
            layer = layer.layer
        else:  # of torch.compile; with parameters in FSDP2 it is of another class
            layer = engine.uncompiled(layer)
    return layer


Added = list[tuple[Tensor, float]]
"""Losses of inner layers, and what each counts."""

_added: Added | None = None


@contextmanager
def added_losses() -> Iterator[Added]:
    """Within: a stage's forward, whose layers' losses are gathered, for its end."""
    global _added
    _added = []
    try:
        yield _added
    finally:
        _added = None


def with_losses(x: Tensor, added: Added) -> Tensor:
    """Return what leaves a stage as a tensor whose backward is that of these losses, too."""
    for loss, weight in added:
        x = _AddLoss.apply(x, loss, weight)  # type: ignore[no-untyped-call]
    return x


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return `x`, with which `loss` becomes a part of the microbatch's loss, as if the last layer had added its sum.

    For losses that arise within the model, such as those that balance the experts of a mixture: call it in any layer
    with a tensor that the layer returns. The loss counts in gradients, not in the loss that a step returns. In a step
    it hangs on what leaves the stage, whatever becomes of `x`; on `x` itself outside of one, in a piece of
    torch.compile, and in a forward that a backward runs.
    """
    weight = _current.weight * (1.0 if _current.slice is None else _current.slice.share)
    if not torch.compiler.is_compiling() and _added is not None and loss.requires_grad:
        _added.append((loss, weight))
        return x
    found: Tensor = _AddLoss.apply(x, loss, weight)  # type: ignore[no-untyped-call]
    return found


class _AddLoss(torch.autograd.Function):
    """Passes `x` and its gradient; the loss gets the weight of its microbatch as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.shape, ctx.dtype, ctx.weight = loss.shape, loss.dtype, weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient.new_full(ctx.shape, ctx.weight, dtype=ctx.dtype), None
