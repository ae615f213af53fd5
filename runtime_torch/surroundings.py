"""What a forward depends on besides its input: random state, autocast, buffers; restored when it is repeated."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runtime_torch.engine import changes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

Autocast = tuple[bool, torch.dtype, bool]
"""Whether it is on, its dtype, and whether it keeps its copies of the weights."""


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
    enabled, dtype, cached = autocast_now(device)
    return autocast_as((False, dtype, cached), device) if enabled else nullcontext()


def random_now(device: torch.device) -> tuple[bytes, bytes | None]:
    """Return torch's random state, and that of a device: bytes, so that it is kept out of torch's memory."""
    on_device = None if device.type == "cpu" else bytes(torch.get_device_module(device).get_rng_state(device).numpy())
    return bytes(torch.get_rng_state().numpy()), on_device


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Random states are kept out of torch's memory: on a CPU, too, they are no activations."""

    cpu_random: bytes
    device_random: bytes | None
    python_random: tuple[Any, ...]
    numpy_random: dict[str, Any]
    """Of numpy's global generator: layers are dropped by it, or by Python's, here and there."""
    autocast: Autocast

    @classmethod
    def now(cls, device: torch.device) -> Surroundings:
        """Return those of the present."""
        return cls(*random_now(device), random.getstate(), _numpy_random(), autocast_now(device))

    @contextmanager
    def restored(self, device: torch.device) -> Iterator[None]:
        """Within: random state and autocast as they were then, and gradients; afterwards as they were before."""
        devices = [] if self.device_random is None else [device]
        with torch.random.fork_rng(devices, device_type=device.type), _forked():
            torch.set_rng_state(_tensor(self.cpu_random))
            if self.device_random is not None:
                torch.get_device_module(device).set_rng_state(_tensor(self.device_random), device)
            random.setstate(self.python_random)
            np.random.set_state(self.numpy_random)
            with torch.enable_grad(), autocast_as(self.autocast, device):
                yield


@contextmanager
def _forked() -> Iterator[None]:
    """Within: Python's and numpy's random states may change; afterwards they are as they were before."""
    in_python, in_numpy = random.getstate(), _numpy_random()
    try:
        yield
    finally:
        random.setstate(in_python)
        np.random.set_state(in_numpy)


def _numpy_random() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    return state


@dataclass(frozen=True, slots=True, eq=False)
class BufferState:
    """A buffer of a module, and its value at some time."""

    module: nn.Module
    name: str
    tensor: Tensor
    value: Tensor
    changes: int

    def has_changed(self) -> bool:
        """Whether the module has another buffer now, or another value in it."""
        now = getattr(self.module, self.name)
        return now is not self.tensor or changes(now) != self.changes or not torch.equal(now, self.value)


def buffers_now(modules: Iterable[nn.Module]) -> list[BufferState]:
    """Return the buffers of modules, without those of modules in them."""
    return [
        BufferState(module, name, buffer, buffer.detach().clone(), changes(buffer))
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]


@torch.no_grad()
def put_buffers(states: Iterable[BufferState]) -> None:
    """Let buffers be as they were."""
    for state in states:
        setattr(state.module, state.name, state.tensor)
        state.tensor.copy_(state.value)


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
