"""Measure the runtime's own host time: `python -m bench.overhead [--method NAME] [--steps N] [--profile]`.

Two processes run the same order of ops, in turn on the replay and on torch's stock schedule runtime, with layers that
do next to nothing. Reported per op (messages included), a quiet step (lowest tenth) of the slower rank: the time that
passes (with the waiting for messages, which both have), and the time that the process computes on all threads. The
garbage collector is off, as in `optpipe run`.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import multiprocessing
import os
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from optpipe_compiler.driver import Options, compile_schedule
from optpipe_compiler.uniform import UniformOptions, uniform_profile
from runtime_torch.adapter import _actions, quiet
from runtime_torch.execution import StageExecution
from runtime_torch.runner import Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler import ir

WARM_UP = 5


class Last(nn.Linear):
    """The last layer as the replay calls it."""

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the output, or the loss where a target is given."""
        out = super().forward(input)
        return out if target is None else loss(out, target)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Next to nothing, too."""
    return (output - target).sum()


def order(method: str, microbatches: int) -> ir.Schedule:
    """Return a published schedule for two devices, without memory ops."""
    profile = uniform_profile(UniformOptions(devices=2, layers_per_device=1))
    options = Options(mem_bytes=10**12, microbatches=microbatches, method=method, offload=False, recompute=False)
    return compile_schedule(profile, options).schedule


def replayed(schedule: ir.Schedule, rank: int) -> Callable[[Tensor, Tensor], object]:
    """Return a step of ours."""
    device = torch.device("cpu")
    layer = (Last if rank else nn.Linear)(1, 1)
    stage = StageExecution([layer], rank, is_first=rank == 0, is_last=rank == 1, device=device)
    x = torch.ones(1, 1)
    stage.calibrate(x, x if rank else None, None if rank else x)
    steps = Steps(
        schedule,
        {rank: stage},
        {rank: layer},
        lambda _: ((1, 1), torch.float32),
        group=None,
        on=device,
        meter=stage.meter,
        host_meter=stage.host_meter,
    )
    return steps.step


def stock(schedule: ir.Schedule, rank: int) -> Callable[[Tensor, Tensor], object]:
    """Return a step of torch's runtime over the same order."""
    x = torch.ones(1, 1)
    stage = PipelineStage(
        (Last if rank else nn.Linear)(1, 1), rank, 2, torch.device("cpu"), input_args=x, output_args=x
    )
    microbatches = schedule.setup.microbatches
    runtime: Any = _PipelineScheduleRuntime([stage], microbatches, loss_fn=loss)  # type: ignore[no-untyped-call]
    actions = {device.device: _actions(device, microbatches) for device in schedule.devices}
    runtime._prepare_schedule_with_comms(actions, format="compute_comms")

    def step(inputs: Tensor, target: Tensor) -> None:
        if rank == 0:
            runtime.step(inputs)
        else:
            runtime.step(target=target, losses=[])

    return step


def measure(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Take turns with both, in step with the other process; write the samples per way."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    quiet()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    schedule = order(options.method, options.microbatches)
    ways = {"replay": replayed(schedule, rank), "torch": stock(schedule, rank)}
    samples: dict[str, list[tuple[int, int]]] = {name: [] for name in ways}
    batch = torch.ones(schedule.setup.microbatches, 1)
    profiler = cProfile.Profile()
    gc.collect()
    gc.freeze()
    gc.disable()
    for index in range(WARM_UP + options.steps):
        for name, step in ways.items():
            dist.barrier()
            start = time.perf_counter_ns(), time.process_time_ns()
            if options.profile and name == "replay" and index >= WARM_UP:
                profiler.runcall(step, batch, batch)
            else:
                step(batch, batch)
            samples[name].append((time.perf_counter_ns() - start[0], time.process_time_ns() - start[1]))
    if options.profile and rank == 0:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    count = len(schedule.devices[rank].compute)
    found = {name: [[ns / count for ns in sample] for sample in taken[WARM_UP:]] for name, taken in samples.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Print both ways and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="1f1b", help="a published schedule, see `optpipe compile --help`")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--profile", action="store_true", help="show where the replay's time goes; its times are off")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=measure, args=(rank, options, folder)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    for index, label in enumerate(("passes", "computes")):
        times = {
            name: max(statistics.quantiles((sample[index] for sample in rank[name]), n=10)[0] / 1e3 for rank in found)
            for name in found[0]
        }
        ratio = times["replay"] / times["torch"]
        print(f"{label:8}  torch {times['torch']:.1f} us, replay {times['replay']:.1f} us per op: ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
