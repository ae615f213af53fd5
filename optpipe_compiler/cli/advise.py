"""optpipe advise: which degrees of parallelism, estimated, bounded and planned."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from optpipe_compiler.cli.common import Size, complete_gpus, complete_models, console, jobs_option, note, say_json
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from optpipe_compiler.costs.gpus import Gpu
    from optpipe_compiler.costs.models import Architecture
    from optpipe_compiler.study.advise import Advice, Configuration, Costs, Degrees, Question
    from optpipe_torch.estimates.spread import Spread


@click.command(short_help="Say which degrees of parallelism are best for a model.")
@click.option("--model", "model_name", required=True, metavar="NAME|config.json", shell_complete=complete_models)
@click.option("--gpu", "gpu_name", required=True, metavar="NAME|gpu.json", shell_complete=complete_gpus)
@click.option("--gpus", type=click.IntRange(min=1), required=True, help="How many, in all.")
@click.option("--global-batch", type=click.IntRange(min=1), required=True, help="Sequences in one step.")
@click.option("--seq", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens of a sequence.")
@click.option("--mem", type=Size(), help="Cap per GPU [default: the data sheet's memory].")
@click.option("--microbatch-sizes", default="1,2,4", show_default=True, help="Sequences, those that are tried.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Of the search for one plan; 0: the best known schedule.",
)
@jobs_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def advise(
    model_name: str,
    gpu_name: str,
    gpus: int,
    global_batch: int,
    seq: int,
    mem: int | None,
    microbatch_sizes: str,
    dtype: str,
    time_limit: float,
    jobs: int,
    as_json: bool,
) -> None:
    """Say which pipeline, tensor and data parallel degrees and microbatch size are best for a model on so many GPUs.

    All ways that divide GPUs, heads and batch are bounded, the most promising planned; the best five are printed, with
    what limits each, and the commands that plan the best.

    Example: optpipe advise --model llama-3-8b --gpu h100-sxm --gpus 64 --global-batch 256 --seq 8192
    """
    from optpipe_compiler.costs import gpus as data_sheets
    from optpipe_compiler.costs import models
    from optpipe_compiler.study import advise as study
    from optpipe_compiler.study.sweep import parse_counts
    from optpipe_torch.estimates.estimate import EstimateOptions
    from optpipe_torch.estimates.spread import Spread

    model, gpu = models.load(model_name), data_sheets.load(gpu_name)
    if model.positions and seq > model.positions:
        raise BadInput(f"--seq is {seq}, expected at most the positions of the model ({model.positions})")
    question = study.Question(
        gpus=gpus,
        gpus_per_node=gpu.devices_per_node,
        batch=global_batch,
        sequence=seq,
        mem_bytes=gpu.memory_bytes if mem is None else mem,
        microbatch_sizes=parse_counts(microbatch_sizes, "--microbatch-sizes"),
        time_limit_s=time_limit,
        jobs=jobs,
    )
    options = EstimateOptions(model=model, gpu=gpu, name=model_name, sequence_length=seq, dtype=_dtype(dtype))
    advice = _asked(question, model, Spread(options, gpus))
    line = commands(advice.configurations[0], model_name, gpu, question, dtype)
    if as_json:
        say_json(_report(advice, line))
    else:
        _show(advice, line, model_name, question)


def _dtype(name: str) -> Any:
    return name


def _asked(question: Question, model: Architecture, spread: Spread) -> Advice:
    from optpipe_compiler.study import advise as study

    def costs_of(degrees: Degrees) -> Costs:
        return study.Costs(*spread.costs(degrees.pipeline, degrees.tensor, degrees.data, degrees.microbatch_size))

    def said(number: int, found: Configuration | None) -> None:
        if found is None:
            note(f"{number}: nothing fits")
        else:
            note(f"{number}: {_degrees(found.degrees)}: {found.step_ns / 1e9:.3f} s per step")

    divided = (model.heads, model.kv_heads, model.ffn, question.sequence)
    every = list(study.ways(question, model.layers + 2, divided))
    return study.advise(question, every, costs_of, said)


def _degrees(degrees: Degrees) -> str:
    return (
        f"pipeline {degrees.pipeline} x tensor {degrees.tensor} x data {degrees.data}, "
        f"{degrees.microbatches} microbatches of {degrees.microbatch_size}"
    )


def commands(best: Configuration, model: str, gpu: Gpu, question: Question, dtype: str) -> list[str]:
    """Return the lines that estimate the best configuration's costs, and plan it."""
    degrees = best.degrees
    estimated = {
        "--model": model,
        "--gpu": gpu.name,
        "--devices": degrees.pipeline,
        "--tp": degrees.tensor,
        "--dp": degrees.data,
        "--microbatch-size": degrees.microbatch_size,
        "--seq": question.sequence,
        "--dtype": dtype,
    }
    planned = {"--mem": f"{question.mem_bytes / 1e9:g}GB", "--microbatches": degrees.microbatches}
    return [
        " ".join(["optpipe", name, *(f"{key} {shlex.quote(str(value))}" for key, value in given.items())])
        for name, given in (("profile", estimated), ("compile profile.json", planned))
    ]


def _report(advice: Advice, line: list[str]) -> dict[str, Any]:
    """Return what `--json` prints."""
    about = asdict(advice)
    rows = [{**row.pop("degrees"), **row} for row in about.pop("configurations")]
    return {"configurations": rows, **about, "commands": line}


def _show(advice: Advice, line: list[str], model: str, question: Question) -> None:
    from rich.table import Table

    from optpipe_compiler.documents.units import short_bytes

    out = console()
    table = Table(box=None, pad_edge=False)
    columns = ("PP", "TP", "DP", "size", "count", "stages", "step", "bound", "tokens/s", "peak")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("limits", min_width=20)
    for row in advice.configurations:
        degrees = row.degrees
        table.add_row(
            *map(str, (degrees.pipeline, degrees.tensor, degrees.data, degrees.microbatch_size, degrees.microbatches)),
            str(row.stages_per_device),
            f"{row.step_ns / 1e9:.3f} s",
            f"{row.bound_ns / 1e9:.3f} s",
            f"{row.tokens_per_s / question.gpus:,.0f}",
            short_bytes(row.peak_bytes),
            ", ".join(row.limits),
        )
    out.print(table)
    out.print()
    out.print("PP, TP, DP: pipeline, tensor and data parallel degree; size, count: of microbatches; tokens/s: of a GPU")
    out.print(
        f"{model} on {question.gpus} GPUs, {question.batch} sequences of {question.sequence} per step: "
        f"{advice.considered} ways, {advice.too_large} too large, {advice.planned} planned"
        + (f", {advice.infeasible} of which fit nothing" if advice.infeasible else "")
        + (f"; the others take at least {advice.next_bound_ns / 1e9:.3f} s" if advice.next_bound_ns else "")
    )
    if any(row.planned_microbatches < row.degrees.microbatches for row in advice.configurations):
        out.print("longer steps are planned with 4 microbatches per device, and repeat their steady state")
    out.print()
    for command in line:
        out.print(command, soft_wrap=True, highlight=False)
