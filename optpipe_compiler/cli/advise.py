"""optpipe advise: which degrees of parallelism, estimated, bounded and planned."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import click

from optpipe_compiler.cli.common import (
    Size,
    complete_gpus,
    complete_methods,
    complete_models,
    console,
    jobs_option,
    json_option,
    note,
    say_json,
)
from optpipe_compiler.cli.estimate import load_model
from optpipe_compiler.documents.units import counted

if TYPE_CHECKING:
    from optpipe_compiler.costs.models import Architecture
    from optpipe_compiler.study.advise import Advice, Configuration, Costs, Degrees, Question
    from optpipe_torch.estimates.spread import Spread


@click.command(short_help="Say which degrees of parallelism are best for a model.")
@click.option("--model", "model_name", required=True, metavar="NAME|config.json", shell_complete=complete_models)
@click.option("--gpu", "gpu_name", required=True, metavar="NAME|gpu.json", shell_complete=complete_gpus)
@click.option("--gpus", type=click.IntRange(1, 1_000_000), required=True, help="How many, in all.")
@click.option("--global-batch", type=click.IntRange(1, 10**9), required=True, help="Sequences in one step.")
@click.option("--seq", type=click.IntRange(min=1), help="Tokens of a sequence [default: 4096, or learned positions].")
@click.option("--mem", type=Size(), help="Cap per GPU [default: the data sheet's memory].")
@click.option("--microbatch-sizes", default="1,2,4", show_default=True, help="Sequences, those that are tried.")
@click.option(
    "--slices", default="1,2,4", show_default=True, help="Of a sequence, those that are tried with the smallest size."
)
@click.option(
    "--links", type=click.Choice(["pairs", "none"]), default="none", show_default=True, help="pairs: of GPUs share one."
)
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True)
@click.option("--method", shell_complete=complete_methods, help="Plan with this known schedule alone.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Of the search for one plan; 0: the best known schedule.",
)
@jobs_option
@json_option
def advise(
    model_name: str,
    gpu_name: str,
    gpus: int,
    global_batch: int,
    seq: int | None,
    mem: int | None,
    microbatch_sizes: str,
    slices: str,
    links: Literal["pairs", "none"],
    dtype: Literal["bf16", "fp16"],
    method: str | None,
    time_limit: float,
    jobs: int,
    as_json: bool,
) -> None:
    """Say which pipeline, tensor and data parallel degrees, microbatch size and slices are best for a model.

    All ways that divide GPUs, heads and batch are bounded, the most promising planned; the best five are printed, with
    what limits each, and the commands that plan the best.

    Example: optpipe advise --model llama-3-8b --gpu h100-sxm --gpus 64 --global-batch 256 --seq 8192
    """
    from optpipe_compiler.costs import gpus as data_sheets
    from optpipe_compiler.documents.units import show_bytes
    from optpipe_compiler.errors import BadInput
    from optpipe_compiler.study import advise as study
    from optpipe_compiler.study.sweep import parse_counts
    from optpipe_torch.estimates.estimate import EstimateOptions, check
    from optpipe_torch.estimates.spread import Spread

    model, told = load_model(model_name)
    gpu = data_sheets.load(gpu_name)
    if seq is None:
        seq = model.positions or 4096
    if mem is not None and mem > gpu.memory_bytes:
        raise BadInput(
            f"--mem is {show_bytes(mem)}, expected at most what {gpu.name} has: {show_bytes(gpu.memory_bytes)}"
        )
    question = study.Question(
        gpus=gpus,
        gpus_per_node=gpu.devices_per_node,
        batch=global_batch,
        sequence=seq,
        mem_bytes=gpu.memory_bytes if mem is None else mem,
        microbatch_sizes=parse_counts(microbatch_sizes, "--microbatch-sizes"),
        slices=parse_counts(slices, "--slices"),
        method=method,
        time_limit_s=time_limit,
        jobs=jobs,
    )
    options = EstimateOptions(
        model=model, gpu=gpu, name=model_name, sequence_length=seq, dtype=dtype, shared_links=links
    )
    check(options)
    advice = _asked(question, model, Spread(options, gpus))
    for said in told:
        note(f"optpipe: {said}")
    estimated: dict[str, str | int] = {
        "--model": model_name,
        "--gpu": gpu_name,
        "--seq": seq,
        "--dtype": dtype,
        "--links": links,
    }
    line = commands(advice.configurations[0], estimated, question)
    if as_json:
        say_json(_report(advice, line))
    else:
        _show(advice, line, model_name, question)


def _asked(question: Question, model: Architecture, spread: Spread) -> Advice:
    from optpipe_compiler.study import advise as study
    from optpipe_compiler.study.pool import pool_for

    def costs_of(degrees: Degrees) -> Costs:
        return study.Costs(*spread.costs(degrees.pipeline, degrees.tensor, degrees.data, degrees.microbatch_size))

    def said_ways(considered: int) -> None:
        note(f"ways: {considered}; the most promising are planned")

    def said(number: int, found: Configuration | None) -> None:
        if found is None:
            note(f"{number}: {_nothing(question)}")
        else:
            note(f"{number}: {_degrees(found.degrees)}: {_seconds(found.step_ns)} s per step")

    divided = (model.heads, model.kv_heads, model.ffn, question.sequence)
    every = list(study.ways(question, model.layers + 2, divided))
    note("the costs of each way are estimated")  # which tell whether there are ways with slices
    return study.advise(question, every, costs_of, said, pool_for(question.jobs), said_ways)


def _nothing(question: Question) -> str:
    """Say what no plan for a way means."""
    return "nothing fits" if question.method is None else f"{question.method} does not fit, or is not defined"


def _degrees(degrees: Degrees) -> str:
    return (
        f"pipeline {degrees.pipeline} x tensor {degrees.tensor} x data {degrees.data}, "
        f"{counted(degrees.microbatches, 'microbatch')} of {degrees.microbatch_size}"
        + (f" in {degrees.slices} slices" if degrees.slices > 1 else "")
    )


def commands(best: Configuration, estimated: dict[str, str | int], question: Question) -> list[str]:
    """Return the lines that estimate the best configuration's costs, and plan it."""
    degrees = best.degrees
    spread = {
        "--devices": degrees.pipeline,
        "--tp": degrees.tensor,
        "--dp": degrees.data,
        "--microbatch-size": degrees.microbatch_size,
    }
    giga, left = divmod(question.mem_bytes, 10**9)
    planned = {"--mem": f"{question.mem_bytes}B" if left else f"{giga}GB", "--microbatches": degrees.microbatches}
    if degrees.slices > 1:
        planned["--slices"] = degrees.slices
    if question.method is not None:
        planned["--method"] = question.method
    return [
        " ".join(["optpipe", name, *(f"{key} {shlex.quote(str(value))}" for key, value in given.items())])
        for name, given in (("profile", {**estimated, **spread}), ("compile profile.json", planned))
    ]


def _report(advice: Advice, line: list[str]) -> dict[str, Any]:
    """Return what `--json` prints."""
    about = asdict(advice)
    rows = [{**row.pop("degrees"), **row} for row in about.pop("configurations")]
    return {"configurations": rows, **about, "commands": line}


def _shorter(limits: list[str]) -> str:
    """Return limits for a narrow column; the legend says what the letters mean."""
    text = ", ".join(limits)
    return text.replace("tensor-parallel collectives", "TP").replace("gradients between replicas", "DP")


def _seconds(ns: int) -> str:
    """Return seconds with three digits at least behind the point, and as many as tell steps of a percent apart."""
    return f"{ns / 1e9:.{3 if ns >= 10**8 else 5}f}"


def _show(advice: Advice, line: list[str], model: str, question: Question) -> None:
    from rich.table import Table

    out = console()
    rows = [(row, row.degrees) for row in advice.configurations]
    columns: dict[str, list[object]] = {
        "PP": [degrees.pipeline for _, degrees in rows],
        "TP": [degrees.tensor for _, degrees in rows],
        "DP": [degrees.data for _, degrees in rows],
        "size": [degrees.microbatch_size for _, degrees in rows],
        "count": [degrees.microbatches for _, degrees in rows],
        "slices": [degrees.slices for _, degrees in rows],
        "stages": [row.stages_per_device for row, _ in rows],
        "step": [_seconds(row.step_ns) for row, _ in rows],
        "bound": [_seconds(row.bound_ns) for row, _ in rows],
        "tokens/s": [f"{row.tokens_per_s / question.gpus:,.0f}" for row, _ in rows],
        "GB": [f"{row.peak_bytes / 1e9:.1f}" for row, _ in rows],
    }
    if set(columns["slices"]) == {1}:
        del columns["slices"]
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("limits", min_width=12)
    for number, (row, _) in enumerate(rows):
        table.add_row(*(str(cells[number]) for cells in columns.values()), _shorter(row.limits))
    out.print(table)
    out.print()
    out.print(
        "PP, TP, DP: pipeline, tensor and data parallel degree; size, count: of microbatches; stages: of a device; "
        "step, bound: s, the pipeline and the exchange of gradients; tokens/s: of a GPU; GB: the most on a device; "
        "limits: what takes time beside the work, TP collectives of tensor parallelism, DP gradients between replicas"
    )
    out.print(
        f"{model} on {counted(question.gpus, 'GPU')}, {counted(question.batch, 'sequence')} of {question.sequence} "
        f"per step: {counted(advice.considered, 'way')}, {advice.too_large} too large, {advice.planned} planned"
        + (f"; in {advice.infeasible} of these {_nothing(question)}" if advice.infeasible else "")
        + (f"; the others take at least {_seconds(advice.next_bound_ns)} s" if advice.next_bound_ns else "")
    )
    if any(row.planned_microbatches < row.degrees.microbatches for row in advice.configurations):
        out.print("longer steps are planned with at most 4 microbatches per device, and repeat their steady state")
    out.print()
    for command in line:
        out.print(command, soft_wrap=True, highlight=False)
