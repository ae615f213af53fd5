"""A training loop of your own around a schedule, started by torchrun with one process per device.

torchrun --nproc-per-node 2 own_loop.py schedule.json
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist

import runtime_torch
from optpipe_compiler.errors import OptPipeError
from optpipe_torch.models import known as models
from optpipe_torch.models import text


def make_layer(model: object, index: int) -> torch.nn.Module:
    """Make one layer of the model."""
    return models.build(model, range(index, index + 1))[0]


def main() -> None:
    """Train the schedule's model on the text that ships with optpipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    schedule = runtime_torch.load_schedule(arguments.schedule)
    model, microbatches = schedule.model, schedule.setup.microbatches

    # any list of layers that the profile was measured for, or of functions that make them; this rank builds its own
    layers = [partial(make_layer, model, index) for index in range(schedule.setup.layers)]
    tokens = torch.zeros(model.microbatch_size, model.sequence_length, dtype=torch.int64)
    stages = runtime_torch.build_stages(schedule, layers, dist.get_rank(), "cpu", inputs=[tokens], target=tokens)
    runner = runtime_torch.Runner(schedule, stages)
    optimizer = torch.optim.AdamW(stages.module.parameters(), lr=3e-4)

    generator = torch.Generator().manual_seed(0)
    for step in range(arguments.steps):
        inputs, target = models.batch(schedule.model, text.default_text(), generator, microbatches)
        result = runner.step(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
        if result.loss is not None:
            print(
                f"step {step + 1}: loss {result.loss:.4f}, {result.peak_activation_bytes} bytes of activations at most"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except OptPipeError as error:  # its text is one sentence on what is wrong
        raise SystemExit(str(error)) from None
