"""How large the model and the runs are: on GPUs by their memory, in a dry run as small as they may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SMALL_PLAN_S = 2.0
"""For which a plan of the small model is searched."""
FILL = 0.3
"""Of a GPU's memory, which the activations of 1F1B's first device shall take."""
ESTIMATED_ON = "h100-sxm"
"""A known GPU for the estimate that tells how many bytes a layer saves; they do not depend on it."""


@dataclass(frozen=True)
class Model:
    """A configuration as Hugging Face writes it, and what it is fed."""

    config: dict[str, Any]
    sequence: int
    dtype: str
    microbatch_size: int | None = None
    """Samples; None: as many as fill the GPU."""

    @property
    def layers(self) -> int:
        """Blocks."""
        return int(self.config["num_hidden_layers"])


def _llama(layers: int, hidden: int, heads: int, ffn: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
    }


TINY = Model(_llama(4, 64, 4, 172, 256), sequence=32, dtype="fp32", microbatch_size=2)


@dataclass(frozen=True)
class Sizes:
    """What is run, on what, and for how long at most."""

    device: str
    large: Model
    """Is planned for `devices`, and each of them is emulated."""
    small: Model
    """Its gradients are compared; in fp32, so that the tolerance is narrow."""
    devices: int
    microbatches: int
    steps: int
    """Of every run; the first is not timed."""
    plan_s: float
    """For which a plan of the large model is searched."""
    stock: dict[str, float]
    """Options of bench.stock: its model, for how long a plan is searched, and how often steps are timed."""
    samples: int = 60
    """Of every time in a profile."""
    limits_s: dict[str, float] = field(default_factory=dict)
    """By part: what one of its commands may take."""


ON_GPUS = Sizes(
    device="cuda",
    large=Model(_llama(8, 4096, 32, 11008, 32000), sequence=4096, dtype="bf16"),
    small=Model(_llama(4, 512, 8, 1376, 1024), sequence=256, dtype="fp32", microbatch_size=4),
    devices=4,
    microbatches=8,
    steps=4,
    plan_s=6,
    samples=20,
    stock={
        "blocks": 4,
        "hidden": 4096,
        "ffn": 11008,
        "vocab": 32000,
        "sequence": 4096,
        "samples": 10,
        "plan-s": 3,
        "rounds": 4,
    },
    limits_s={
        "machine": 60,
        "tests": 120,
        "profile": 180,
        "plans": 40,
        "check": 60,
        "emulate": 120,
        "limit": 60,
        "trace": 60,
        "stock": 280,
    },
)
DRY = Sizes(
    device="cpu",
    large=Model(TINY.config, sequence=32, dtype="bf16", microbatch_size=2),
    small=TINY,
    devices=2,
    microbatches=4,
    steps=2,
    plan_s=0.2,
    stock={
        "blocks": 1,
        "hidden": 64,
        "ffn": 96,
        "vocab": 256,
        "sequence": 16,
        "samples": 4,
        "plan-s": 0.2,
        "rounds": 1,
    },
    samples=4,
    limits_s=dict.fromkeys(
        ("machine", "tests", "profile", "plans", "check", "emulate", "limit", "trace", "stock"), 200
    ),
)
"""The same on a CPU, where it takes half a minute."""


def samples(memory_bytes: int, saved_bytes: int, blocks: int) -> int:
    """Return the microbatch size with which 1F1B's first device fills its part of the memory.

    That device holds one microbatch per device of the pipeline, so one microbatch of all `blocks`, of which each saves
    `saved_bytes` per sample.
    """
    return max(1, int(FILL * memory_bytes / (saved_bytes * blocks)))
