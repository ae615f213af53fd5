"""The recipe of examples/torchtitan_plain.py in a planned pipeline, with the lines that it takes.

sh torchtitan_planned.sh
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from optpipe_torch.frameworks.torchtitan import layers_of, planned


def plain() -> Trainer.Config:
    """Return the recipe."""
    config = llama3_debugmodel()
    config.training.num_tokens_per_microbatch_per_dp_rank = 64
    config.training.num_tokens_per_train_step = 256
    config.training.disable_cuda_graphs = True
    config.activation_checkpoint = None
    return config


def layers() -> object:
    """Return what `optpipe profile` measures."""
    return layers_of(plain())


def pipeline() -> Trainer.Config:
    """Return the recipe with the schedule's pipeline."""
    return planned(plain(), "schedule.json")
