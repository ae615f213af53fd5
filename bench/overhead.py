"""Measure the runtime's own host time: `python -m bench.overhead [--method NAME ...] [-o docs/OVERHEAD.md]`.

One process per rank runs the rank's ops, in turn on the replay and on torch's stock schedule runtime, with layers that
do next to nothing and torch's fake process group, which delivers at once: so nothing is waited for, and what is left is
the time that the host works. Reported per op (messages included): the processor time of the thread in a quiet step
(lowest tenth). The garbage collector is off, as in `optpipe run`.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import multiprocessing
import pstats
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.report import machine, publish
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from runtime_torch import engine
from runtime_torch.execution import StageExecution
from runtime_torch.messages import Mailbox
from runtime_torch.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.documents import ir

TYPES = {
    "forward": "FORWARD",
    "backward": "FULL_BACKWARD",
    "backward_input": "BACKWARD_INPUT",
    "backward_weight": "BACKWARD_WEIGHT",
    "send_activation": "SEND_F",
    "recv_activation": "RECV_F",
    "send_gradient": "SEND_B",
    "recv_gradient": "RECV_B",
}
METHODS = ("1f1b", "interleaved-1f1b", "zb-h1", "zbv")
WARM_UP = 5


class Last(nn.Linear):
    """The last layer as the replay calls it."""

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the output, or the loss where a target is given."""
        out = super().forward(input)
        return out if target is None else loss(out, target)


class StockStage(PipelineStage):
    """torch's stage, spared the vote on how shapes are found: the fake group brings no votes."""

    def _warmup_forward_vote(self, *_: Any, **__: Any) -> Tensor:
        return torch.ones(1)

    def _warmup_backward_result(self, *_: Any, **__: Any) -> Tensor:
        return torch.ones(1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Next to nothing, too."""
    return (output - target).sum()


def order(method: str, devices: int, microbatches: int) -> ir.Schedule:
    """Return a published schedule without memory ops."""
    profile = uniform_profile(UniformOptions(devices=devices, layers_per_device=2))
    options = Options(mem_bytes=10**12, microbatches=microbatches, method=method, offload=False, recompute=False)
    return compile_schedule(profile, options).schedule


def replayed(schedule: ir.Schedule, rank: int) -> Callable[[Tensor, Tensor], object]:
    """Return a step of ours; a stage is one layer, however many the schedule counts."""
    on, last = torch.device("cpu"), len(schedule.stages) - 1
    stages = {}
    for index in _stages_of(schedule, rank):
        stages[index] = StageExecution(
            [_layer(schedule, index)], index, is_first=index == 0, is_last=index == last, device=on
        )
    first = next(iter(stages.values()))
    for stage in stages.values():
        stage.meter, stage.host_meter = first.meter, first.host_meter
    replay = Replay(
        schedule,
        rank,
        stages,
        lambda *_: ((1, 1), torch.float32),
        Mailbox(None, first.meter),
    )
    return lambda inputs, target: replay.step(inputs.split(1), target.split(1))


def stock(schedule: ir.Schedule, rank: int) -> Callable[[Tensor, Tensor], object]:
    """Return a step of torch's runtime over the same order."""
    count, microbatches = len(schedule.stages), schedule.setup.microbatches
    mine = _stages_of(schedule, rank)
    x, between = torch.ones(1, 1), torch.ones(1, 1, requires_grad=True)
    stages = [
        StockStage(
            _layer(schedule, index),
            index,
            count,
            torch.device("cpu"),
            input_args=between if index else x,
            output_args=x if index == count - 1 else between,
        )
        for index in mine
    ]
    runtime: Any = _PipelineScheduleRuntime(stages, microbatches, loss_fn=loss)  # type: ignore[no-untyped-call]
    actions = {device.device: _actions(device) for device in schedule.devices}
    if (waits_added := getattr(schedules, "_add_wait_send", None)) is not None:  # since torch 2.15 these are actions
        actions = waits_added(actions)
    runtime._prepare_schedule_with_comms(actions, format="compute_comms")

    def step(inputs: Tensor, target: Tensor) -> None:
        args = (inputs,) if 0 in mine else ()
        last = {"target": target, "losses": []} if count - 1 in mine else {}
        runtime.step(*args, **last, return_outputs=False)

    return step


def _actions(device: ir.Device) -> list[_Action]:
    types = {op: getattr(_ComputationType, name) for op, name in TYPES.items()}
    return [_Action(op.stage, types[op.name], op.microbatch) for op in device.compute]


def _stages_of(schedule: ir.Schedule, rank: int) -> list[int]:
    return [stage.stage for stage in schedule.stages if stage.device == rank]


def _layer(schedule: ir.Schedule, index: int) -> nn.Module:
    return (Last if index == len(schedule.stages) - 1 else nn.Linear)(1, 1)


def measure(options: argparse.Namespace, method: str, rank: int, is_public: bool) -> dict[str, float]:
    """Take turns with both, ours on public names of torch alone where asked; return the us per op of each way."""
    torch.set_num_threads(1)
    if is_public:
        engine.use_public_names()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=options.devices)
    schedule = order(method, options.devices, options.microbatches)
    ways = {"replay": replayed(schedule, rank), "torch": stock(schedule, rank)}
    samples: dict[str, list[int]] = {name: [] for name in ways}
    batch = torch.ones(schedule.setup.microbatches, 1)
    profilers = {name: cProfile.Profile() for name in ways}
    gc.collect()
    gc.freeze()
    gc.disable()
    for index in range(WARM_UP + options.steps):
        for name, step in ways.items():
            start = time.thread_time_ns()
            if options.profile and index >= WARM_UP:
                profilers[name].runcall(step, batch, batch)
            else:
                step(batch, batch)
            samples[name].append(time.thread_time_ns() - start)
    if options.profile:
        for name in ways:
            pstats.Stats(profilers[name]).sort_stats("tottime").print_stats(30)
    count = len(schedule.devices[rank].compute)
    return {name: statistics.quantiles(taken[WARM_UP:], n=10)[0] / count / 1e3 for name, taken in samples.items()}


HEADER = """# The runtime's own host time

Written by `python -m bench.overhead`; {machine}, torch {torch}.
Microseconds of processor time per op (messages included) of a quiet step, on layers that do next to nothing: our replay
and torch's stock schedule runtime on the same order, without memory ops. What autograd and the layer itself take is in
both; "public" is the replay without autograd's private entry (runtime_torch/engine.py). torch does not split the first
stage of a split schedule: its I is empty there and its W a whole backward; the replay runs both halves, and that is
what the first rank of such schedules shows.

| schedule | rank | torch | replay | ratio | public | ratio |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Print both ways and their ratio, rank by rank; write them as a table where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", action="append", help=f"published schedules, default {', '.join(METHODS)}")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--profile", action="store_true", help="show where the time goes; the times are then too long")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    for method in options.method or METHODS:
        for rank in range(options.devices):
            cells = []
            for is_public in (False, True):
                with context.Pool(1) as pool:
                    us = pool.apply(measure, (options, method, rank, is_public))
                cells += [us["replay"], us["replay"] / us["torch"], us["torch"]]
            ours, ratio, stock_us, public, public_ratio, _ = cells
            rows.append(
                f"| {method} | {rank} | {stock_us:.1f} | {ours:.1f} | {ratio:.2f} | {public:.1f} | {public_ratio:.2f} |"
            )
            print(rows[-1], flush=True)
    if options.output is not None:
        header = HEADER.format(machine=machine(), torch=torch.__version__)
        publish(header + "\n".join(rows) + "\n", options.output)


if __name__ == "__main__":
    main()
