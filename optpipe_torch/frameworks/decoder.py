"""Decoder layers of transformers as layers that can be run slice by slice."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optpipe_compiler.errors import BadInput
from runtime_torch.slices import WHOLE

if TYPE_CHECKING:
    from runtime_torch.slices import Carry

_NAME = "optpipe_slices"
"""Of the attention below among those of transformers."""


class DecoderLayer(nn.Module):
    """A decoder layer of transformers, such as `LlamaDecoderLayer`, that takes hidden states and returns them.

        DecoderLayer(LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config))

    `rotary` makes the position embeddings; None for models with learned positions. The layer's attention becomes one
    over slices: causal, without padding, sliding windows or dropout. Its cache stays empty.
    """

    def __init__(self, layer: nn.Module, rotary: nn.Module | None = None) -> None:
        from transformers import AttentionInterface

        super().__init__()
        self.layer, self.rotary = layer, rotary
        AttentionInterface.register(_NAME, _attend)
        configs: dict[int, Any] = {}
        attending = [module for module in layer.modules() if hasattr(module, "config")]
        if not attending:
            raise BadInput(f"{type(layer).__name__} has no attention with a config, expected a layer of transformers")
        for module in attending:
            own = configs.setdefault(id(module.config), copy.copy(module.config))
            own._attn_implementation = _NAME
            module.config = own

    def forward(self, x: Tensor, *, carry: Carry = WHOLE) -> Tensor:
        """Map (batch, tokens, hidden) to the same shape."""
        positions = torch.arange(carry.start, carry.start + x.shape[1], device=x.device).unsqueeze(0)
        embedded = {} if self.rotary is None else {"position_embeddings": self.rotary(x, positions)}
        found = self.layer(x, position_ids=positions, carry=carry, **embedded)
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    carry: Carry = WHOLE,
    **_: object,
) -> tuple[Tensor, None]:
    """See transformers' own attention functions; the result is (batch, tokens, heads, head width)."""
    if attention_mask is not None or dropout or softcap is not None:
        what = "an attention mask" if attention_mask is not None else "dropout" if dropout else "soft capping"
        raise BadInput(f"{type(module).__name__} has {what}, expected plain causal attention: it is run in slices")
    if sliding_window is not None and carry.start + query.shape[2] > sliding_window:
        raise BadInput(
            f"{type(module).__name__} has a sliding window of {sliding_window} tokens, expected at least as many as "
            "the sequence has: it is run in slices"
        )
    return carry.attend(query, key, value, scale=scaling).transpose(1, 2), None
