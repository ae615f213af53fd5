"""A training loop of your own around a schedule, started by torchrun with one process per device.

torchrun --nproc-per-node 2 own_loop.py schedule.json
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import runtime_torch
from runtime_torch import models, text


def main() -> None:
    """Train the schedule's model on the text that ships with optpipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    schedule = runtime_torch.load_schedule(arguments.schedule)
    layers = models.build(schedule.model)  # any list of layers that the profile was measured for
    stages = runtime_torch.build_stages(schedule, layers, dist.get_rank(), "cpu")
    runner = runtime_torch.Runner(schedule, stages, lambda layer: models.boundary(schedule.model, layer))
    parameters = [p for stage in stages.values() for layer in stage.layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4)

    generator = torch.Generator().manual_seed(0)
    for step in range(arguments.steps):
        inputs, target = models.batch(schedule.model, text.default_text(), generator, schedule.setup.microbatches)
        result = runner.step(inputs, target)
        optimizer.step()
        optimizer.zero_grad()
        if result.loss is not None:
            print(
                f"step {step + 1}: loss {result.loss:.4f}, {result.peak_activation_bytes} bytes of activations at most"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
