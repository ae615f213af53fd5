"""Selective recompute: what is cheap to make leaves the device after its layer's forward, and is made again when the
backward reads it.

`cheap(function, *tensors)` marks such a piece of a layer: its result and what it saves inside are dropped, its inputs
are kept. Norms, activation modules and the gated product of transformers' feed-forward layers are found in any layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator


Keeper = Callable[[Callable[..., Tensor], tuple[Any, ...]], Tensor]
"""What a layer's cheap pieces are told to: calls the function with its inputs and remembers how to do so again."""

_KEEPER: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


def cheap(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return `function(*inputs)`, to be computed again in the backward where the schedule asks for it.

    The function gets all activations as arguments, draws no random numbers, has no parameters but vectors, and returns
    one new tensor: it changes none in place. Anywhere else this is but the call.
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
    """Mark the norms, activations and gated products in a layer of torch's or transformers' modules."""
    for module in layer.modules():
        if isinstance(getattr(module, "forward", None), partial):
            continue  # marked already
        if _is_gated(module):
            module.forward = partial(_gated, module)
        elif _is_cheap(module):
            module.forward = partial(cheap, module.forward)


def _is_cheap(module: nn.Module) -> bool:
    name = type(module).__name__
    known = isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GELU | nn.SiLU) and not getattr(module, "inplace", False)
    return (known or name.endswith(("RMSNorm", "LayerNorm", "Activation"))) and all(
        parameter.dim() < 2 for parameter in module.parameters()
    )


def _is_gated(module: nn.Module) -> bool:
    """Whether it is a feed-forward layer as transformers has it in Llama's family."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")]
    return all(isinstance(part, nn.Module) for part in parts)


def _gated(module: Any, x: Tensor) -> Tensor:
    inner = cheap(lambda gate, up: module.act_fn(gate) * up, module.gate_proj(x), module.up_proj(x))
    return module.down_proj(inner)  # type: ignore[no-any-return]
