"""Model configurations as Hugging Face writes them (config.json), reduced to what the costs depend on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optpipe_compiler.documents.files import parse_json, read_text, short_json
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

PRESETS = Path(__file__).parent / "models"
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
KNOWN = ("gpt2", *LLAMA_LIKE)
ALIASES = {"llama-70b": "llama-2-70b"}
"""Llama and Llama 2 are the same model in the sizes that both have; 70b is there of the second alone."""
LARGEST = 10**7
"""No layer count or width is larger; products of them stay far below 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only transformer: what its layers compute."""

    kind: str
    """Hugging Face's `model_type`."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of the feed-forward layer, of each expert where there are several."""
    vocab: int
    positions: int = 0
    """Learned positions; 0: rotary ones."""
    experts: int = 0
    """0: one feed-forward layer for all tokens."""
    experts_per_token: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    attention: Literal["flash", "math"] = "flash"
    """`math` keeps the attention matrix, as was done before flash attention."""
    embedding_parts: int = 1
    """Layers that the embedding's vocabulary is cut into."""
    head_parts: int = 1
    granularity: Literal["block", "half"] = "block"
    """`half`: attention and feed-forward of a block are layers of their own."""

    @property
    def has_parts(self) -> bool:
        """Whether embedding or head are chains of layers."""
        return self.embedding_parts > 1 or self.head_parts > 1

    @property
    def chain(self) -> int:
        """How many layers it is cut into."""
        blocks = self.layers * (2 if self.granularity == "half" else 1)
        return self.embedding_parts + blocks + self.head_parts

    @property
    def gated(self) -> bool:
        """Whether it is of Llama's family: RMSNorm, rotary positions, SwiGLU; else of GPT-2's."""
        return self.kind != "gpt2"


def presets() -> list[str]:
    """Return the names of the configurations that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def load(name: str, tell: Callable[[str], None] = lambda _: None) -> Architecture:
    """Return the model of a preset's name or of a config.json; raise BadInput with file, path, value, expectation.

    `tell` is called with a sentence where the model is taken otherwise than it is meant.
    """
    preset = ALIASES.get(name, name)
    path = PRESETS / f"{preset}.json" if preset in presets() else Path(name)
    if path.suffix != ".json" and not path.is_file():
        raise BadInput(f"--model is {name!r}, expected one of {', '.join(presets())}, or a config.json")
    config = parse_json(read_text(path), str(path))
    if not isinstance(config, dict):
        raise BadInput(f"{path}: $ is {short_json(config)}, expected an object")
    model = _Reader(config, str(path)).architecture()
    if config.get("tie_word_embeddings", model.kind == "gpt2") is True:  # what transformers takes where it is left out
        tell(f"embedding and head of {name} share their weights (tie_word_embeddings); here each has its own")
    return model


class _Reader:
    """Reads fields of one configuration, and says which one is wrong."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    def architecture(self) -> Architecture:
        kind = self.config.get("model_type")
        if kind not in KNOWN:
            raise self.wrong("model_type", f"one of {', '.join(KNOWN)}")
        model = self.gpt2() if kind == "gpt2" else self.llama(str(kind))
        if model.heads % model.kv_heads:
            raise self.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({model.heads})")
        return model

    def gpt2(self) -> Architecture:
        hidden, heads = self.integer("n_embd"), self.integer("n_head")
        if hidden % heads:
            raise self.wrong("n_head", f"a divisor of n_embd ({hidden})")
        return Architecture(
            kind="gpt2",
            layers=self.integer("n_layer"),
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            ffn=self.integer("n_inner", 4 * hidden),
            vocab=self.integer("vocab_size"),
            positions=self.integer("n_positions", 1024),
            qkv_bias=True,
            attention_dropout=self.fraction("attn_pdrop", 0.1),
            residual_dropout=self.fraction("resid_pdrop", 0.1),
            embedding_dropout=self.fraction("embd_pdrop", 0.1),
        )

    def llama(self, kind: str) -> Architecture:
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if "head_dim" not in self.config and hidden % heads:
            raise self.wrong("num_attention_heads", f"a divisor of hidden_size ({hidden})")
        experts = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}.get(kind)
        model = Architecture(
            kind=kind,
            layers=self.integer("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=self.integer("num_key_value_heads", heads),
            head_dim=self.integer("head_dim", hidden // heads),
            ffn=self.integer("moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"),
            vocab=self.integer("vocab_size"),
            experts=self.integer(experts) if experts else 0,
            experts_per_token=self.integer("num_experts_per_tok") if experts else 0,
            qkv_bias=kind == "qwen2" or self.config.get("attention_bias") is True,
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            attention_dropout=self.fraction("attention_dropout", 0.0),
        )
        if model.experts_per_token > model.experts:
            raise self.wrong("num_experts_per_tok", f"at most the experts ({model.experts})")
        if self.config.get("mlp_only_layers") or self.config.get("decoder_sparse_step", 1) != 1:
            raise self.wrong(
                "mlp_only_layers" if self.config.get("mlp_only_layers") else "decoder_sparse_step", "equal layers"
            )
        return model

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise self.wrong(key, f"an integer of 1 to {LARGEST}")
        return value

    def fraction(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise self.wrong(key, "a number of at least 0 and less than 1")
        return float(value)

    def wrong(self, key: str, expected: str) -> BadInput:
        if key not in self.config:
            return BadInput(f"{self.name}: $.{key} is missing, expected {expected}")
        return BadInput(f"{self.name}: $.{key} is {json.dumps(self.config[key])}, expected {expected}")
