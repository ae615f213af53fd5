"""Where layers draw random numbers: the state of each source, kept and put back where a forward is repeated.

Sources are the global generators of torch (of the CPU and of a stage's device), Python and numpy, and the generators
that a layer, or a module in it, has in an attribute, also in a list or a dictionary there.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Source:
    """A generator of random numbers."""

    state: Callable[[], Any]
    """Return its state, to be compared with `==`: no tensor, because on a CPU, too, it is no activation."""
    put: Callable[[Any], object]
    """Let its state be what it was."""


State = list[tuple[Source, Any]]


def of_torch(device: torch.device) -> list[Source]:
    """Return torch's global generators: of the CPU, and of a device."""
    found = [Source(lambda: _bytes(torch.get_rng_state()), lambda state: torch.set_rng_state(_tensor(state)))]
    if device.type != "cpu":
        there = torch.get_device_module(device)
        found.append(
            Source(
                lambda: _bytes(there.get_rng_state(device)),
                lambda state: there.set_rng_state(_tensor(state), device),
            )
        )
    return found


def everywhere(device: torch.device) -> list[Source]:
    """Return all global generators."""
    in_numpy = _in_numpy(lambda: np.random.get_state(legacy=False), np.random.set_state)  # noqa: NPY002
    return [*of_torch(device), Source(random.getstate, random.setstate), in_numpy]


def owned(modules: Iterable[nn.Module]) -> list[Source]:
    """Return the generators that modules have in attributes, also within lists and dictionaries there, each once."""
    found: dict[int, object] = {}
    for module in modules:
        _gather(vars(module), found)
    return [source for value in found.values() if (source := _source(value)) is not None]


def _gather(values: Collection[object], found: dict[int, object]) -> None:
    """Add to what is found, by identity, these values and what containers among them have."""
    for value in values.values() if isinstance(values, Mapping) else values:
        if id(value) not in found:
            found[id(value)] = value
            if isinstance(value, dict | list | tuple | set):
                _gather(value, found)


def now(sources: Iterable[Source]) -> State:
    """Return the present state of each."""
    return [(source, source.state()) for source in sources]


def has_changed(since: State) -> bool:
    """Return whether numbers were drawn from any source."""
    return any(source.state() != state for source, state in since)


@contextmanager
def restored(then: State) -> Iterator[None]:
    """Within: sources go on from a state of before; afterwards from that of the present."""
    with untouched(source for source, _ in then):
        _put(then)
        yield


@contextmanager
def untouched(sources: Iterable[Source]) -> Iterator[None]:
    """Within: sources may be drawn from; afterwards they go on from the present state."""
    before = now(sources)
    try:
        yield
    finally:
        _put(before)


def _put(states: State) -> None:
    for source, state in states:
        source.put(state)


def _source(one: object) -> Source | None:
    if isinstance(one, torch.Generator):
        return Source(lambda: _bytes(one.get_state()), lambda state: one.set_state(_tensor(state)))
    if isinstance(one, random.Random) and not isinstance(one, random.SystemRandom):
        return Source(one.getstate, one.setstate)
    if isinstance(one, np.random.Generator):
        return _in_numpy(lambda: one.bit_generator.state, partial(setattr, one.bit_generator, "state"))
    if isinstance(one, np.random.RandomState):
        return _in_numpy(lambda: one.get_state(legacy=False), one.set_state)
    return None


def _in_numpy(state: Callable[[], Any], put: Callable[[Any], None]) -> Source:
    """Return a source whose state is a dictionary with arrays in it."""
    return Source(lambda: pickle.dumps(state()), lambda pickled: put(pickle.loads(pickled)))


def _bytes(state: Tensor) -> bytes:
    return bytes(state.numpy())


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
