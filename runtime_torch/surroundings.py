"""What a forward depends on besides its input and random state: autocast, buffers, numbers and tensors in attributes;
restored when it is repeated."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime_torch.engine import changes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

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
        now = getattr(self.module, self.name)
        return now is not self.tensor or changes(now) != self.changes or not torch.equal(now, self.value)


def buffers_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module and the tensors that it has in attributes, without those of modules in it."""
    yield from module.named_buffers(recurse=False)
    yield from ((name, value) for name, value in vars(module).items() if _is_state(value))


def _is_state(value: object) -> bool:
    """Whether a tensor may go from one forward to the next: with a graph it would lead into a backward that is over."""
    if type(value) is not Tensor:
        return False
    return not (value.requires_grad or value.is_nested) and value.layout is torch.strided


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


PlainAttribute = tuple["nn.Module", str]
"""A module and the name of an attribute with a plain value that forwards set, such as how often it was called, or with
a tensor that the first of them makes."""
_ABSENT = object()


def attributes_set_since(before: Iterable[tuple[nn.Module, dict[str, Any]]]) -> list[PlainAttribute]:
    """Return the attributes with plain values that modules have now, and had not, or not so, before; and those with
    tensors that had none."""
    return [
        (module, name)
        for module, had in before
        for name, value in vars(module).items()
        if (isinstance(value, int | float | str | None) and had.get(name, _ABSENT) is not value)
        or (_is_state(value) and not isinstance(had.get(name), Tensor))
    ]


@dataclass(frozen=True, slots=True, eq=False)
class AttributeState:
    """The value of an attribute at some time; of a tensor how often it had been changed in place."""

    module: nn.Module
    name: str
    value: Any
    changes: int

    def is_lost(self) -> bool:
        """Whether the tensor that it was has another value now."""
        return isinstance(self.value, Tensor) and changes(self.value) != self.changes


def attributes_now(attributes: Iterable[PlainAttribute]) -> list[AttributeState]:
    """Return the present values of attributes."""
    found = ((module, name, vars(module).get(name, _ABSENT)) for module, name in attributes)
    return [AttributeState(*one, changes(one[2]) if isinstance(one[2], Tensor) else 0) for one in found]


def put_attributes(states: Iterable[AttributeState]) -> None:
    """Let attributes be as they were."""
    for state in states:
        module, name, value = state.module, state.name, state.value
        if value is _ABSENT:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = value
