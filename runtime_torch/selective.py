"""Selective recompute: what is cheap to make leaves the device after its layer's forward, and is made again when the
backward reads it.

`cheap(function, *tensors)` marks such a piece of a layer: its result and what it saves inside are dropped, its inputs
are kept. Norms, activation modules and the gated product of transformers' feed-forward layers are found in any layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from runtime_torch import random_state

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


Keeper = Callable[[Callable[..., Tensor], tuple[Any, ...]], Tensor]
"""What a layer's cheap pieces are told to: calls the function with its inputs and remembers how to do so again."""

_KEEPER: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


def cheap(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return `function(*inputs)`, to be computed again in the backward where the schedule asks for it.

    The function gets all activations as arguments, has no parameters but vectors, and returns one new tensor, changing
    none in place. One that draws random numbers, or returns more, and any function elsewhere, is but called.
    """
    keeper = _KEEPER.get()
    return function(*inputs) if keeper is None else keeper(function, inputs)


@contextmanager
def told_to(keeper: Keeper | None) -> Iterator[None]:
    """Within: cheap pieces are told to `keeper`."""
    token = _KEEPER.set(keeper)
    try:
        yield
    finally:
        _KEEPER.reset(token)


def find_cheap(layer: nn.Module) -> None:
    """Mark the norms, activations and gated products in a layer of torch's or transformers' modules.

    What only has their name, and modules of its own inside, such as a dropout, is none of them; nor is one with buffers
    or a generator of its own, which a second forward would find changed.
    """
    for module in layer.modules():
        if isinstance(getattr(module, "forward", None), partial):
            continue  # marked already
        if _is_gated(module):
            module.forward = partial(_gated, module)
        elif _is_cheap(module):
            module.forward = update_wrapper(partial(_cheaply, module.forward), module.forward)


def leave(layer: nn.Module, changed: Collection[nn.Module]) -> None:
    """Take for cheap no more what has one of the `changed` modules in it: its forward does more than compute."""
    for module in layer.modules():
        function = getattr(vars(module).get("forward"), "func", None)
        if function is _cheaply or function is _gated:
            piece: Any = module if function is _cheaply else module.act_fn
            if any(part in changed for part in piece.modules()):
                del module.forward


def _cheaply(forward: Callable[..., Tensor], *inputs: Any, **named: Any) -> Tensor:
    """Call a module's forward as a cheap piece, of which inputs may be given by name."""

    def called(*given: Any) -> Tensor:
        behind = dict(zip(named, given[len(inputs) :], strict=True))
        return forward(*given[: len(inputs)], **behind)

    return cheap(called, *inputs, *named.values()) if named else cheap(forward, *inputs)


def _is_cheap(module: nn.Module) -> bool:
    name = type(module).__name__
    known = isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GELU | nn.SiLU) and not getattr(module, "inplace", False)
    named = name.endswith(("RMSNorm", "LayerNorm", "Activation")) and not any(True for _ in module.children())
    is_repeatable = next(module.buffers(), None) is None and not random_state.owned([module])
    return (known or named) and is_repeatable and all(parameter.dim() < 2 for parameter in module.parameters())


def _is_gated(module: nn.Module) -> bool:
    """Whether it is a feed-forward layer as transformers has it in Llama's family."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")]
    return all(isinstance(part, nn.Module) for part in parts)


def _gated(module: Any, x: Tensor) -> Tensor:
    inner = cheap(lambda gate, up: module.act_fn(gate) * up, module.gate_proj(x), module.up_proj(x))
    return module.down_proj(inner)  # type: ignore[no-any-return]
