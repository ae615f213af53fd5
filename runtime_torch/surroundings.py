"""What a forward depends on besides its input and random state: autocast, buffers, numbers and tensors in attributes;
restored when it is repeated."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime_torch.engine import changes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from torch import nn
    from typing_extensions import TypeIs

Autocast = tuple[bool, torch.dtype, bool]
"""Whether it is on, its dtype, and whether it keeps its copies of the weights."""


_NOTHING = nullcontext()


def autocast_now(device: torch.device) -> Autocast:
    """Return how autocast is set for a kind of device."""
    kind = device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def autocast_as(then: Autocast, device: torch.device) -> torch.autocast:
    """Within: autocast is as it was then."""
    enabled, dtype, cached = then
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=cached)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Within: autocast is off, as it is in a backward behind the region, where each op has the dtypes of its forward.

    A backward inside of the region would cast those again that a layer computes in fp32.
    """
    if not torch.is_autocast_enabled(device.type):
        return _NOTHING
    _, dtype, cached = autocast_now(device)
    return autocast_as((False, dtype, cached), device)


@dataclass(frozen=True, slots=True, eq=False)
class BufferState:
    """A buffer of a module, or a tensor in an attribute, and its value at some time."""

    module: nn.Module
    name: str
    tensor: Tensor
    value: Tensor
    changes: int

    def has_changed(self) -> bool:
        """Whether the module has another buffer now, or another value in it."""
        now = getattr(self.module, self.name, None)
        return now is not self.tensor or changes(now) != self.changes or not torch.equal(now, self.value)


def buffers_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module and the tensors that it has in attributes, without those of modules in it."""
    yield from module.named_buffers(recurse=False)
    yield from ((name, value) for name, value in vars(module).items() if _is_state(value))


def _is_state(value: object) -> bool:
    """Whether a tensor may go from one forward to the next: with a graph it would lead into a backward that is over."""
    return _is_dense(value) and not value.requires_grad


def _is_dense(value: object) -> TypeIs[Tensor]:
    return type(value) is Tensor and not value.is_nested and value.layout is torch.strided


def buffers_now(modules: Iterable[nn.Module]) -> list[BufferState]:
    """Return what `buffers_of` has of each module."""
    return [
        BufferState(module, name, buffer, buffer.detach().clone(), changes(buffer))
        for module in modules
        for name, buffer in buffers_of(module)
    ]


@torch.no_grad()
def put_buffers(states: Iterable[BufferState]) -> None:
    """Let buffers be as they were."""
    for state in states:
        is_replaced = getattr(state.module, state.name, None) is not state.tensor
        setattr(state.module, state.name, state.tensor)
        if is_replaced and changes(state.tensor) == state.changes:
            continue
        if state.tensor.shape != state.value.shape:  # as observers of quantization make theirs larger
            state.tensor.resize_(state.value.shape)
        state.tensor.copy_(state.value)


Attributes = dict[str, Any]
"""Of a module, without what every module has."""
_PLAIN = int, float, str, NoneType
_OF_EVERY = frozenset(vars(torch.nn.Module()))


def _kept(module: nn.Module) -> Attributes:
    """Return the attributes with plain values, such as how often the module was called, and those with tensors."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_EVERY and (isinstance(value, _PLAIN) or _is_dense(value))
    }


def _without_graph(value: object) -> object:
    """Return a tensor as one of the same memory that leads into no backward, anything else as it is."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def sets_attributes(module: nn.Module, had: Attributes) -> bool:
    """Whether a module has attributes with plain values or tensors now that it had not, or not so, before."""
    return any(name not in had or had[name] is not value for name, value in _kept(module).items())


@dataclass(frozen=True, slots=True, eq=False)
class AttributeState:
    """The attributes of a module at some time, and how often each tensor among them had been changed in place."""

    module: nn.Module
    names: AbstractSet[str]
    """Of all attributes."""
    kept: Attributes
    changes: dict[str, int]

    def lost(self, restored: Collection[int]) -> Iterator[tuple[nn.Module, str]]:
        """Yield which tensors have another value now, but for those that are restored, by identity."""
        for name, as_often in self.changes.items():
            tensor = self.kept[name]
            if id(tensor) not in restored and changes(tensor) != as_often:
                yield self.module, name


def attributes_now(modules: Iterable[nn.Module]) -> list[AttributeState]:
    """Return the present attributes of modules."""
    found = []
    for module in modules:
        kept = _kept(module)
        as_often = {name: changes(value) for name, value in kept.items() if isinstance(value, Tensor)}
        kept = {name: _without_graph(value) for name, value in kept.items()}
        found.append(AttributeState(module, set(vars(module)), kept, as_often))
    return found


def put_attributes(states: Iterable[AttributeState]) -> None:
    """Let attributes be as they were, but for what was neither a plain value nor a tensor."""
    for state in states:
        attributes = vars(state.module)
        if new := attributes.keys() - state.names:
            for name in new & _kept(state.module).keys():
                del attributes[name]
        attributes.update(state.kept)


@contextmanager
def same_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within: attributes of modules may be set; afterwards they are as now."""
    now = [(vars(module), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for attributes, were in now:
            attributes.clear()
            attributes.update(were)
