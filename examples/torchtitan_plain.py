"""A recipe of torchtitan on one device: what examples/torchtitan_planned.py starts from.

torchrun -m torchtitan.train --module torchtitan_plain --config plain
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


def plain() -> Trainer.Config:
    """Return the recipe."""
    config = llama3_debugmodel()
    config.training.num_tokens_per_microbatch_per_dp_rank = 64
    config.training.num_tokens_per_train_step = 256
    config.training.disable_cuda_graphs = True
    config.activation_checkpoint = None
    return config
