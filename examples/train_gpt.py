"""Train a schedule's model with pipeline and data parallelism, checkpoints and a validation loss.

optpipe profile --devices 2 && optpipe compile --mem 40GB
torchrun --nproc-per-node 4 train_gpt.py schedule.json --steps 100 --save checkpoints
torchrun --nproc-per-node 4 train_gpt.py schedule.json --steps 200 --save checkpoints --resume

On each of two nodes, which share the folder of checkpoints; after a failure the same command goes on:
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint first-node:29400 \
    train_gpt.py schedule.json --steps 200 --save checkpoints --save-every 50 --resume

With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --max-restarts 3 torchrun does so itself when a rank dies.

The schedule's devices are the pipeline; the processes beyond them replicate it (DistributedDataParallel), or shard it
(FSDP2, --data-parallel shard). Gradients are averaged once per step.
Runs on GPUs where there are enough, else on CPU.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import runtime_torch
from optpipe_compiler.errors import OptPipeError
from optpipe_torch.models import known as models
from optpipe_torch.models import text


def main() -> None:
    """Parse, train, validate, save."""
    options = parse()
    device = join()
    schedule = runtime_torch.load_schedule(options.schedule)
    mesh = make_mesh(device, schedule.setup.devices)
    sharded = options.data_parallel == "shard"
    data = Data(schedule.model, schedule.setup.microbatches, mesh, device)

    inputs, target = data.training(0)
    size = schedule.model.microbatch_size
    stages = runtime_torch.build_stages(
        schedule,
        [partial(make_layer, schedule.model, index) for index in range(schedule.setup.layers)],
        mesh.get_local_rank("pipeline"),
        device,
        inputs=[one[:size] for one in inputs],
        target=target[:size],
        ties=models.ties(schedule.model),
        prepare=(
            partial(fully_shard, mesh=mesh["data"])
            if sharded
            else partial(DistributedDataParallel, process_group=mesh.get_group("data"))
        ),
    )
    tolerance = None if options.autocast else 0.05  # the profile was measured without autocast
    runner = runtime_torch.Runner(schedule, stages, group=mesh.get_group("pipeline"), bytes_tolerance=tolerance)
    optimizer = torch.optim.AdamW(stages.module.parameters(), lr=options.lr)
    first = load(options.save, stages.module, optimizer) if options.resume else 0
    if first > options.steps:
        raise SystemExit(f"the checkpoint has seen {first} steps, expected --steps of as many or more")

    for step in range(first, options.steps):
        inputs, target = data.training(step)
        with torch.autocast(device.type, torch.bfloat16, enabled=options.autocast):
            result = runner.step(*inputs, target=target)
        norm = clip(stages, options.clip, mesh, sharded=sharded)
        skipped = not math.isfinite(norm)  # the norm, and so this, is the same on all ranks
        if not skipped:
            optimizer.step()
        optimizer.zero_grad()
        say(mesh, f"step {step + 1}: loss", result.loss, f"gradient norm {norm:.4g}" + ", step skipped" * skipped)
        if options.save is not None and options.save_every and (step + 1) % options.save_every == 0:
            save(options.save, step + 1, stages.module, optimizer)
    stages.module.eval()
    inputs, target = data.validation()
    say(mesh, "validation loss", runner.eval(*inputs, target=target))
    is_saved = options.save_every and options.steps % options.save_every == 0
    if options.save is not None and not is_saved:
        save(options.save, options.steps, stages.module, optimizer)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule")
    parser.add_argument("--steps", type=int, default=20, help="steps in all, those before a resume included")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm over the whole model")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16, parameters stay as they are")
    parser.add_argument("--data-parallel", choices=["replicate", "shard"], default="replicate")
    parser.add_argument("--save", type=Path, help="folder for checkpoints")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0: one at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --save, if any")
    options = parser.parse_args()
    for name in ("resume", "save_every"):
        if getattr(options, name) and options.save is None:
            parser.error(f"--{name.replace('_', '-')} needs --save FOLDER")
    if "LOCAL_RANK" not in os.environ:
        parser.error("expected to be started by torchrun: torchrun --nproc-per-node 4 train_gpt.py schedule.json")
    return options


def join() -> torch.device:
    """Join the processes that torchrun started; return this one's device."""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # holds little more than is in use
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that wait hold up no others
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        return torch.device("cuda", local)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def make_mesh(device: torch.device, devices: int) -> DeviceMesh:
    """Return data x pipeline over all processes; the ranks of one pipeline are neighbours."""
    world = dist.get_world_size()
    if world % devices:
        raise SystemExit(f"{world} processes were started, expected a multiple of the schedule's {devices} devices")
    return init_device_mesh(device.type, (world // devices, devices), mesh_dim_names=("data", "pipeline"))


def make_layer(model: object, index: int) -> nn.Module:
    """Make one layer of the model."""
    return models.build(model, range(index, index + 1))[0]


Batch = tuple[Sequence[Tensor], Tensor]
"""Inputs and target of a step."""


class Data:
    """Random windows of the text that ships with optpipe, or what a user's function draws; what a step reads depends on
    its number alone."""

    def __init__(self, model: object, microbatches: int, mesh: DeviceMesh, device: torch.device) -> None:
        whole = text.default_text()
        cut = len(whole) * 9 // 10
        self._train, self._held_out = (models.batches(model, part) for part in (whole[:cut], whole[cut:]))
        self._microbatches, self._device = microbatches, device
        self._replica = mesh.get_local_rank("data")

    def training(self, step: int) -> Batch:
        """Return the replica's inputs and targets of a step."""
        return self._draw(self._train, 1 + step * 10_007 + self._replica)

    def validation(self) -> Batch:
        """Return text that is not trained on."""
        return self._draw(self._held_out, 0)

    def _draw(self, draws: Callable[[torch.Generator, int], Batch], seed: int) -> Batch:
        inputs, target = draws(torch.Generator().manual_seed(seed), self._microbatches)
        return [one.to(self._device) for one in inputs], target.to(self._device)


def clip(stages: runtime_torch.Stages, largest: float, mesh: DeviceMesh, *, sharded: bool) -> float:
    """Scale the gradients so that their norm over all layers, on all ranks, is at most `largest`; return the norm: no
    finite number where a gradient of any rank is none."""
    square = torch.zeros((), device=mesh.device_type)
    for gradient in local_gradients(stages.unique_parameters()):  # a tied parameter counts on one rank
        square += gradient.float().square().sum()
    dist.all_reduce(square, group=mesh.get_group("pipeline"))
    if sharded:
        dist.all_reduce(square, group=mesh.get_group("data"))
    norm = float(square.sqrt())
    for gradient in local_gradients(stages.module.parameters()):
        gradient.mul_(min(1.0, largest / (norm + 1e-6)))
    return norm


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's shards of the gradients that there are."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [one.to_local() if isinstance(one, DTensor) else one for one in gradients]


def say(mesh: DeviceMesh, what: str, loss: float | None, more: str = "") -> None:
    """Print the mean loss over the replicas, where the first replica's last stage is."""
    if loss is None:
        return
    mean = torch.tensor(loss, device=mesh.device_type)
    dist.all_reduce(mean, group=mesh.get_group("data"))
    if mesh.get_local_rank("data") == 0:
        print(f"{what} {mean.item() / mesh['data'].size():.9g} {more}".rstrip(), flush=True)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer states go by the names of parameters: a checkpoint fits any placement of the layers."""


def save(folder: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint, and only then say that it is there."""
    weights, states = get_state_dict(module, optimizer, options=FLAT)
    dcp.save({"weights": weights, "optimizer": states}, checkpoint_id=folder / f"step{step}")
    if dist.get_rank() == 0:
        (folder / "latest.tmp").write_text(str(step))
        (folder / "latest.tmp").replace(folder / "latest")


def load(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read the last checkpoint, if there is one; return how many steps it has seen."""
    if not (folder / "latest").exists():
        return 0
    said = (folder / "latest").read_text().strip()
    if not said.isdecimal() or not (folder / f"step{said}" / ".metadata").exists():
        raise SystemExit(f"{folder / 'latest'} says {said!r}, expected N of a folder stepN beside it: write it there")
    step = int(said)
    weights, states = get_state_dict(module, optimizer, options=FLAT)
    found = {"weights": weights, "optimizer": states}
    try:
        dcp.load(found, checkpoint_id=folder / f"step{step}")
    except dcp.CheckpointException as error:  # names are the same under any placement, not in other parts or halves
        said, _ = next(iter(error.failures.values()))
        raise SystemExit(
            f"{folder / f'step{step}'} cannot be read into this schedule's layers, expected a checkpoint of the same "
            f"model in as many parts and halves: {said}"
        ) from None
    set_state_dict(
        module, optimizer, model_state_dict=found["weights"], optim_state_dict=found["optimizer"], options=FLAT
    )
    return step


if __name__ == "__main__":
    try:
        main()
    except OptPipeError as error:  # its text is one sentence on what is wrong
        raise SystemExit(str(error)) from None
