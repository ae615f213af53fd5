"""optpipe profile: measured on this machine, estimated from data sheets, or made from a few numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from optpipe_compiler.cli.common import (
    PROFILE,
    Output,
    check_outputs,
    complete_gpus,
    complete_models,
    console,
    is_stdout,
    json_option,
    note,
    say,
    say_json,
    silence_torch,
    write,
)
from optpipe_compiler.cli.estimate import (
    ESTIMATED,
    chosen,
    cut,
    dtype_option,
    estimate_options,
    granularity_option,
    load_model,
    parts_options,
    refuse,
)
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import RenderableType

    from optpipe_compiler.documents.profile import Profile
    from optpipe_torch.profiler.measure import MeasureOptions

MEASURED = {"layers": 8, "hidden": 256, "heads": 4, "seq": 128, "microbatch_size": 4, "samples": 60}
"""What is measured when nothing is said."""
CUTS = ("embedding_parts", "head_parts", "granularity")
"""Into which layers a known model is cut."""
FROM_RUN = Path("measured.json")
"""Where the profile of a run goes when nothing is said: beside the one that the run was planned with."""


@click.group(
    invoke_without_command=True, short_help="Write a cost profile: measured, estimated, or from a few numbers."
)
@click.option(
    "--devices", type=click.IntRange(min=1), help="Pipeline devices [default: the GPUs, or 2 to 4 cores; estimated: 8]."
)
@click.option("--layers", type=click.IntRange(min=1), help="Transformer blocks [default: 8].")
@click.option("--hidden", type=click.IntRange(min=1), help="Model width [default: 256].")
@click.option("--heads", type=click.IntRange(min=1), help="Attention heads [default: 4].")
@click.option(
    "--seq",
    type=click.IntRange(min=1),
    help="Sequence length [default: 128, or that of your own data; estimated: 4096].",
)
@click.option("--microbatch-size", type=click.IntRange(min=1), help="Samples [default: 4; estimated: 1].")
@click.option(
    "--model",
    metavar="MODEL",
    shell_complete=complete_models,
    help="A config.json of Hugging Face, a name (--list-models), or a package.module:function that returns layers.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="What to measure [default: cuda where there is a GPU for each device, as run has it].",
)
@click.option(
    "--samples", type=click.IntRange(min=1), help="Measurements of every time; fewer take less long [default: 60]."
)
@parts_options
@granularity_option(
    "block",
    "half",
    "auto",
    help="With --model: a block is one layer, or attention and MLP are two; auto: two where a device has at most 4 "
    "blocks [default: block].",
)
@click.option(
    "--gpu",
    metavar="GPU",
    shell_complete=complete_gpus,
    help="Estimate: a name (--list-gpus), or a JSON file of that form.",
)
@dtype_option("fp32", "bf16", "fp16", help="Weights and activations [default: fp32; estimated: bf16].")
@estimate_options
@click.option("--from-run", type=click.Path(path_type=Path), help="Take times from a trace of run --trace.")
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    help="From run: the profile of that run [default: profile.json].",
)
@click.option("--list-gpus", is_flag=True, help="Print the known GPUs.")
@click.option("--list-models", is_flag=True, help="Print the known models.")
@json_option
@click.option("-o", "--output", type=Output(), help="[default: profile.json; from a run: measured.json]")
@click.pass_context
def profile(
    context: click.Context, /, output: Path | None, list_gpus: bool, list_models: bool, as_json: bool, **options: Any
) -> None:
    """Write a cost profile: measured on this machine (a small GPT, or `--model`), derived from a model's configuration
    and a GPU's data sheet (`--model` and `--gpu`), or made from a few numbers (`optpipe profile uniform`).

    Example: optpipe profile --model llama-7b --gpu a100-80gb --devices 8 -o profile.json
    """
    if context.invoked_subcommand is not None:
        _refuse_before(context, context.invoked_subcommand)
        return
    given = {name: value for name, value in options.items() if value is not None}
    output = output or (FROM_RUN if "from_run" in given else PROFILE)
    if list_gpus or list_models:
        _list(gpus=list_gpus, models=list_models, as_json=as_json)
    elif "from_run" in given:
        _from_run(output, given, as_json=as_json)
    elif "profile" in given:
        refuse({"profile": given["profile"]}, set(), "needs --from-run")
    elif "model" in given and "gpu" in given:
        _estimate(output, given, as_json=as_json)
    elif "model" in given:
        _measure_model(output, given, as_json=as_json)
    else:
        refuse(given, {"device", "devices", *MEASURED}, "needs --model")
        _measure(output, as_json=as_json, **{"device": None, "devices": None, **MEASURED, **given})


def _refuse_before(context: click.Context, name: str) -> None:
    """Refuse options before the name of a command below `profile`, which has options of its own."""
    for param in context.command.params:
        typed = context.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if typed and param.expose_value:
            raise BadInput(f"{max(param.opts, key=len)} stands before {name}, expected the options of {name} behind it")


def _finish(
    record: Profile, output: Path, shown: Callable[[], RenderableType], told: Iterable[str], *, as_json: bool
) -> None:
    """Write the profile, unless compile would refuse it; say what is told of it, which of its numbers are noise, and
    what it holds."""
    from optpipe_compiler.costs.noise import noisy
    from optpipe_compiler.documents.files import canonical
    from optpipe_compiler.documents.profile import parse
    from optpipe_compiler.view.measured import noise_lines

    parse(canonical(record), f"{output} (not written)")
    write(output, record)
    found = noisy(record)
    for line in (*told, *noise_lines(found)):
        note(f"optpipe: {line}")
    if as_json:
        about = {"profile": str(output), "name": record.name, "digest": record.digest(), "noisy": found}
        say_json(about)
    else:
        console(stderr=is_stdout(output)).print(shown())


def _list(*, gpus: bool, models: bool, as_json: bool) -> None:
    from optpipe_compiler.costs import gpus as gpu_presets
    from optpipe_compiler.costs import models as model_presets
    from optpipe_compiler.view.estimated import gpu_table, model_table

    if as_json:
        found: dict[str, Any] = {"gpus": list(gpu_presets.presets().values())} if gpus else {}
        if models:
            found["models"] = {name: vars(model_presets.load(name)) for name in model_presets.presets()}
        say_json(found)
        return
    if gpus:
        console().print(gpu_table(gpu_presets.presets()))
    if models:
        console().print(model_table({name: model_presets.load(name) for name in model_presets.presets()}))


def _estimate(output: Path, given: dict[str, Any], *, as_json: bool) -> None:
    from optpipe_compiler.costs import gpus
    from optpipe_compiler.view.estimated import render
    from optpipe_torch.estimates.estimate import assumptions, check_devices, estimate

    refuse(
        given,
        {"model", "gpu", "attention", "accumulation", *CUTS, *ESTIMATED},
        "only measuring takes; expected no --gpu",
    )
    if given.get("dtype") == "fp32":
        raise BadInput("--dtype is fp32, expected bf16 or fp16 where there is --gpu: data sheets are read for these")
    model, told = load_model(given["model"])
    options = chosen(given, model, gpus.load(given.get("gpu", "")))
    check_devices(options)
    check_outputs(output, as_json=as_json)
    record = estimate(options)
    _finish(record, output, lambda: render(record, str(output), assumptions(options)), told, as_json=as_json)


def _from_run(output: Path, given: dict[str, Any], *, as_json: bool) -> None:
    from optpipe_compiler.costs.from_run import profile_from_run, read_run
    from optpipe_compiler.documents import profile as profiles
    from optpipe_compiler.view.from_run import render

    refuse(given, {"from_run", "profile"}, "--from-run takes from the run; expected only --profile and -o")
    base_path = given.get("profile", PROFILE)
    check_outputs(output, as_json=as_json, reads=base_path)
    base = profiles.load(base_path)
    found = profile_from_run(base, str(base_path), read_run(given["from_run"]))
    _finish(found.profile, output, lambda: render(found, str(output)), found.notes, as_json=as_json)


def _measure_model(output: Path, given: dict[str, Any], *, as_json: bool) -> None:
    """Measure a known architecture, or a user's layers, on this machine."""
    from optpipe_compiler.documents.profile import Model
    from optpipe_torch.profiler.measure import MeasureOptions

    refuse(given, set(given) - {"hidden", "heads"}, "the model itself says; expected no --model")
    refuse(given, {"model", "device", "devices", *(set(MEASURED) - {"hidden", "heads"}), "dtype", *CUTS}, "needs --gpu")
    builder, config, told = _built(given)
    model = Model(
        builder=builder,
        config=config,
        microbatch_size=given.get("microbatch_size", MEASURED["microbatch_size"]),
        sequence_length=given.get("seq", MEASURED["seq"]),
        dtype=given.get("dtype", "fp32"),
    )
    if model.dtype not in ("fp32", "bf16"):
        raise BadInput(f"--dtype is {model.dtype}, expected fp32 or bf16 where there is no --gpu")
    samples = given.get("samples", MEASURED["samples"])
    options = MeasureOptions(
        device=given.get("device"),
        devices=given.get("devices"),
        of=model,
        as_its_data="seq" not in given,
        samples=samples,
    )
    _run_measure(output, options, told, as_json=as_json)


def _built(given: dict[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """Return what builds the model, its configuration, and what is to be told of it."""
    from dataclasses import asdict, replace

    name = given["model"]
    if ":" in name and not Path(name).exists():
        if "layers" in given:
            raise BadInput(f"--layers is {given['layers']}, expected no --layers: {name} says how many there are")
        refuse(
            given, set(given) - set(CUTS), f"{name} itself says; expected none (for parts see runtime_torch.vocabulary)"
        )
        return name, {}, []
    architecture, told = load_model(name)
    whole = replace(architecture, layers=given.get("layers", architecture.layers))
    return "transformer", asdict(cut(whole, given, lambda: _devices(given))), told


def _devices(given: dict[str, Any]) -> int:
    """Return how many devices are measured with these options."""
    from optpipe_torch.launch.job import gpu_count, place_from_environment
    from optpipe_torch.profiler.measure import MeasureOptions, layout_of

    if (place := place_from_environment()) is not None:
        return place.world
    device = given.get("device")
    options = MeasureOptions(device=device, devices=given.get("devices"))
    return layout_of(options, 0 if device == "cpu" else gpu_count()).devices


def _measure(
    output: Path,
    device: Literal["cpu", "cuda"] | None,
    devices: int | None,
    layers: int,
    hidden: int,
    heads: int,
    seq: int,
    microbatch_size: int,
    samples: int,
    *,
    as_json: bool,
) -> None:
    from optpipe_torch.profiler.measure import MeasureOptions

    _run_measure(
        output,
        MeasureOptions(
            device=device,
            devices=devices,
            layers=layers,
            hidden=hidden,
            heads=heads,
            sequence_length=seq,
            microbatch_size=microbatch_size,
            samples=samples,
        ),
        as_json=as_json,
    )


def _run_measure(output: Path, options: MeasureOptions, told: Iterable[str] = (), *, as_json: bool) -> None:
    silence_torch()
    from optpipe_compiler.view.measured import MeasureBar, render
    from optpipe_torch.launch.job import gpu_count, place_from_environment
    from optpipe_torch.profiler.measure import measure, measure_in_group

    check_outputs(output, as_json=as_json)
    place = place_from_environment()
    if place is not None and place.rank > 0:
        measure_in_group(options, lambda what, part: None)
        return
    with MeasureBar(console(stderr=True)) as bar:
        measured = (measure if place is None else measure_in_group)(options, bar.update)
    assert measured is not None
    record = measured
    gpus = gpu_count() if place is None and options.device is None else 0
    if 0 < gpus < record.machine.devices:
        note(
            f"optpipe: torch sees {gpus} GPU{'s' * (gpus > 1)}, fewer than the "
            f"{counted(record.machine.devices, 'device')}, and "
            "these are costs of the CPU: --device cuda measures a GPU"
        )
    _finish(record, output, lambda: render(record, str(output)), told, as_json=as_json)


def _uniform_option(name: str, default: Any, help: str) -> Callable[[Any], Any]:
    return click.option(name, type=float, default=default, show_default=default is not None, help=help)


@profile.command()
@click.option("--devices", type=int, default=4, show_default=True)
@click.option("--layers-per-device", type=int, default=4, show_default=True)
@_uniform_option("--forward-ms", 1.0, "Forward, per device and microbatch, like all times here.")
@_uniform_option("--backward-input-ms", None, "Gradient of the input [default: the forward].")
@_uniform_option("--backward-weight-ms", None, "Gradient of the weights [default: the forward].")
@_uniform_option("--recompute-ms", None, "Recomputation [default: the forward].")
@_uniform_option("--p2p-ms", 0.05, "Message to a neighbour.")
@_uniform_option("--activation-gb", 1.0, "Activation of one microbatch on one device, GB = 10^9 bytes.")
@_uniform_option("--residue-fraction", 0.5, "Share of it kept between input and weight gradient.")
@_uniform_option("--boundary-fraction", 0.0, "Share of it kept for a recomputation.")
@_uniform_option("--d2h-ms", 1.0, "Offload of one device's whole activation of one microbatch, alone.")
@_uniform_option("--h2d-ms", 1.0, "Reload of the same, alone.")
@click.option(
    "--duplex-slowdown",
    default="1.0",
    show_default=True,
    metavar="RATIO",
    help="How much longer a transfer takes while the link's other direction is busy; 1/0.7 may be written so.",
)
@_uniform_option("--copy-share", 0.0, "Share of a transfer's time that its device's compute loses.")
@_uniform_option("--static-gb", 0.0, "Weights, gradients and optimizer state per device.")
@click.option(
    "--shared-links",
    type=click.Choice(["pairs", "none"]),
    default="none",
    show_default=True,
    help="pairs: devices 2i and 2i+1 share one host link.",
)
@click.option("--embedding-ms", metavar="F,I,W", help="An extra first layer.")
@click.option("--head-ms", metavar="F,I,W", help="An extra last layer.")
@click.option("--embedding-parts", type=int, default=1, metavar="N", help="Cut the first layer into N equal ones.")
@click.option("--head-parts", type=int, default=1, metavar="N", help="Cut the last layer into N equal ones.")
@click.option("--device-times", metavar="X,X,...", help="How long each device takes, as a multiple of these times.")
@click.option("--sliceable", is_flag=True, help="Layers can run slice by slice of a sequence (compile --slices).")
@click.option("--sequence-length", type=int, default=32768, show_default=True, help="Tokens; with --sliceable.")
@_uniform_option("--attention-share", 0.0, "Share of F and I that grows with the square of the tokens.")
@_uniform_option("--kv-fraction", 0.0, "Share of the activation that later slices read: keys and values.")
@_uniform_option("--slice-overhead-ms", 0.0, "Added to F, I and W of every slice.")
@json_option
@click.option("-o", "--output", type=Output(), default=PROFILE, show_default=True)
def uniform(
    output: Path,
    as_json: bool,
    embedding_ms: str | None,
    head_ms: str | None,
    duplex_slowdown: str,
    device_times: str | None,
    **options: Any,
) -> None:
    """Write a profile of equal layers from a handful of numbers.

    Example: optpipe profile uniform --devices 8 --activation-gb 2 --d2h-ms 1.05 --h2d-ms 1.05 --shared-links pairs
    """
    from optpipe_compiler.costs.uniform import (
        UniformOptions,
        parse_factors,
        parse_ratio,
        parse_triple,
        uniform_profile,
    )

    check_outputs(output, as_json=as_json)
    record = uniform_profile(
        UniformOptions(
            embedding_ms=parse_triple(embedding_ms, "--embedding-ms") if embedding_ms else None,
            head_ms=parse_triple(head_ms, "--head-ms") if head_ms else None,
            duplex_slowdown=parse_ratio(duplex_slowdown, "--duplex-slowdown"),
            device_times=parse_factors(device_times, "--device-times") if device_times else None,
            **options,
        )
    )
    write(output, record)
    layers = len(record.expanded_layers())
    if as_json:
        say_json({"profile": str(output), "name": record.name, "digest": record.digest(), "noisy": []})
        return
    say(
        f"{output}: {counted(record.machine.devices, 'device')}, {counted(layers, 'layer')}, all numbers manual",
        err=is_stdout(output),
    )
