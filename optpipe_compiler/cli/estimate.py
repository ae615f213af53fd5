"""What `profile --model` and `sweep --model` share: options of an estimate, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.costs.gpus import Gpu
    from optpipe_compiler.costs.models import Architecture
    from optpipe_torch.estimates.estimate import EstimateOptions

AUTO = "auto"
"""As many parts as devices: a last pass of one part on each device gives all the same work."""


FEW_BLOCKS = 4
"""Blocks per device up to which `--granularity auto` takes halves.

Measured with `profile --model llama-7b --gpu a100-80gb --granularity half`, then `compile --time-limit 40` (20 where
marked *), as makespan against whole blocks, by `--devices`, `--mem` and `--microbatches`: with 8 blocks on a device
(4, 40GB, 16*) -1.1%; with 4 (8, 40GB, 32) -9.6%, (8, 27GB, 32*) -3.9%; with 3 (11, 24GB, 44*) -0.6%; with 2 (16, 30GB,
64) -4.0%, (16, 21GB, 64) +6.9%. The bound is 2 to 16% lower in all of them: where halves are slower, the plan of whole
blocks was not found in that time, and so whole blocks stay the default.
"""


class Parts(click.ParamType):  # type: ignore[type-arg]  # not generic in older clicks
    """A number of parts, or `auto`."""

    name = "parts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the number, or `auto`."""
        if value == AUTO:
            return AUTO
        found: int = click.IntRange(1, 10_000).convert(value, param, ctx)
        return found


Command = TypeVar("Command", bound="Callable[..., Any]")

ESTIMATED: dict[str, Any] = {
    "devices": 8,
    "seq": 4096,
    "microbatch_size": 1,
    "tp": 1,
    "dp": 1,
    "links": "none",
    "dtype": "bf16",
}
"""What is estimated when nothing is said."""

OPTIONS = (
    click.option("--tp", type=click.IntRange(min=1), help="Estimate: tensor-parallel GPUs per device [default: 1]."),
    click.option(
        "--dp", type=click.IntRange(min=1), help="Estimate: replicas that share the optimizer out [default: 1]."
    ),
    click.option("--links", type=click.Choice(["pairs", "none"]), help="Estimate: pairs of GPUs share a host link."),
    click.option(
        "--attention", type=click.Choice(["flash", "math"]), help="Estimate: math keeps the attention matrix."
    ),
    click.option(
        "--accumulation", type=click.Choice(["torch", "fused"]), help="Estimate: gradients added by the matmul."
    ),
)


def estimate_options(command: Command) -> Command:
    """Add the options that both commands spell and explain alike."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def parts_options(command: Command) -> Command:
    """Add `--embedding-parts` and `--head-parts`."""
    for name in ("head", "embedding"):
        about = f"With --model: cut the {name}'s vocabulary into N layers; auto: one for each device [default: 1]."
        command = click.option(f"--{name}-parts", type=Parts(), metavar="N|auto", help=about)(command)
    return command


def granularity_option(*values: str, help: str) -> Callable[[Command], Command]:
    """Add `--granularity`, of which not every command takes every value."""
    return click.option("--granularity", type=click.Choice(values), help=help)


def load_model(name: str) -> tuple[Architecture, list[str]]:
    """Return the known model, and what is to be said once nothing is refused: how it is taken otherwise than meant."""
    from optpipe_compiler.costs import models

    told: list[str] = []
    return models.load(name, told.append), told


def cut(model: Architecture, given: dict[str, Any], devices: Callable[[], int]) -> Architecture:
    """Return the model with the layers that were asked for: parts of head and embedding, blocks whole or in halves."""
    from dataclasses import replace

    named = {name: given[name] for name in ("embedding_parts", "head_parts") if name in given}
    for name, parts in named.items():
        if parts == AUTO:
            named[name] = devices()
        elif parts > model.vocab:
            option = f"--{name.replace('_', '-')}"
            raise BadInput(f"{option} is {parts}, expected at most the vocabulary ({model.vocab})")
    if (wanted := given.get("granularity", model.granularity)) == AUTO:
        wanted = "half" if model.layers <= FEW_BLOCKS * devices() else "block"
    return replace(model, **named, granularity=wanted)


def dtype_option(*dtypes: str, help: str) -> Callable[[Command], Command]:
    """Add `--dtype`, of which not every command takes every value."""
    return click.option("--dtype", type=click.Choice(dtypes), help=help)


def refuse(given: dict[str, Any], allowed: set[str], reason: str) -> None:
    """Refuse options of the other way to come by costs."""
    for name, value in given.items():
        if name not in allowed:
            raise BadInput(f"--{name.replace('_', '-')} is {value}, which {reason}")


def chosen(given: dict[str, Any], model: Architecture, gpu: Gpu) -> EstimateOptions:
    """Return what to estimate from the options that were given."""
    from dataclasses import replace

    from optpipe_torch.estimates.estimate import EstimateOptions

    values = {**ESTIMATED, **given}
    if "seq" not in given and model.positions:
        values["seq"] = model.positions
    return EstimateOptions(
        model=cut(
            replace(model, attention=given.get("attention", model.attention)), given, lambda: int(values["devices"])
        ),
        gpu=gpu,
        name=Path(given["model"]).stem if Path(given["model"]).stem != "config" else model.kind,
        devices=values["devices"],
        sequence_length=values["seq"],
        microbatch_size=values["microbatch_size"],
        tensor_parallel=values["tp"],
        data_parallel=values["dp"],
        shared_links=values["links"],
        dtype=values["dtype"],
        accumulation=values.get("accumulation", "torch"),
    )
