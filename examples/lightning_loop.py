"""A planned pipeline in Lightning: examples/own_loop.py as a LightningModule with manual optimization.

torchrun --nproc-per-node 2 lightning_loop.py schedule.json
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, IterableDataset

import runtime_torch
from optpipe_compiler.errors import OptPipeError
from optpipe_torch.models import known as models
from optpipe_torch.models import text

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pipeline(DDPStrategy):
    """Joins the processes of torchrun, and leaves the model alone: each rank has other layers, not a replica."""

    def configure_ddp(self) -> None:
        """Do not wrap the module in DistributedDataParallel."""


class Planned(lightning.LightningModule):
    """The stages of one rank."""

    def __init__(self, schedule: Any) -> None:
        super().__init__()
        self.automatic_optimization = False  # a step of the runner has forwards and backwards in one call
        self.schedule = schedule

    def configure_model(self) -> None:
        """Build this rank's layers, when the ranks have met."""
        model = self.schedule.model
        layers = [partial(make_layer, model, index) for index in range(self.schedule.setup.layers)]
        tokens = torch.zeros(model.microbatch_size, model.sequence_length, dtype=torch.int64)
        stages = runtime_torch.build_stages(
            self.schedule, layers, dist.get_rank(), self.device, inputs=[tokens], target=tokens
        )
        self.layers = stages.module  # what Lightning sees: parameters, training mode, state dict
        self.runner = runtime_torch.Runner(self.schedule, stages)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of this rank's layers."""
        return torch.optim.AdamW(self.layers.parameters(), lr=3e-4)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        """Run all microbatches of a step; every rank reads the whole batch."""
        inputs, target = batch
        result = self.runner.step(inputs, target=target)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        if result.loss is not None:
            print(f"step {index + 1}: loss {result.loss:.4f}", flush=True)


class Steps(IterableDataset):
    """The batches of all steps, equal on all ranks."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield models.batch(self.schedule.model, text.default_text(), generator, self.schedule.setup.microbatches)


def make_layer(model: object, index: int) -> torch.nn.Module:
    """Make one layer of the model."""
    return models.build(model, range(index, index + 1))[0]


def main() -> None:
    """Train the schedule's model on the text that ships with optpipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    schedule = runtime_torch.load_schedule(arguments.schedule)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=schedule.setup.devices,
        strategy=Pipeline(process_group_backend="gloo"),
        max_steps=arguments.steps,
        use_distributed_sampler=False,  # no rank has data of its own
        enable_checkpointing=False,  # Lightning would save the layers of rank 0; examples/train_gpt.py saves all
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Planned(schedule), DataLoader(Steps(schedule), batch_size=None))


if __name__ == "__main__":
    try:
        main()
    except OptPipeError as error:  # its text is one sentence on what is wrong
        raise SystemExit(str(error)) from None
