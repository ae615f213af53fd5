"""Profiles: read, made from a few numbers, from a model and a data sheet, or from a run; and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Unpack

from optpipe.keywords import UniformKeywords, checked, chosen, known
from optpipe_compiler.costs.uniform import UniformOptions
from optpipe_compiler.costs.uniform import uniform_profile as _uniform_profile
from optpipe_compiler.documents import profile as _profiles
from optpipe_compiler.documents.files import canonical, write_atomically
from optpipe_compiler.documents.profile import Profile

PathLike = str | Path


def read_profile(path: PathLike) -> Profile:
    """Read a profile.json; raise BadInput with file, JSON path, value and expectation for what is none."""
    return _profiles.load(Path(checked("path", path, "path")))


def write_profile(profile: Profile, path: PathLike) -> None:
    """Write a profile as the canonical text of its file, at once or not at all."""
    write_atomically(Path(checked("path", path, "path")), canonical(as_profile(profile)))


def uniform_profile(**options: Unpack[UniformKeywords]) -> Profile:
    """Return a profile of equal layers from a few numbers, as `optpipe profile uniform` makes it.

    Times are in ms and sizes in GB (10^9 bytes), for one device's share of one microbatch; the default is a
    forward of 1 ms, and input and weight gradient take as long as the forward, as in the zero-bubble papers. Raises
    BadInput for a value that cannot be meant.
    """
    return _uniform_profile(UniformOptions(**known(options, UniformOptions, UniformKeywords)))


def estimate_profile(
    model: PathLike,
    gpu: str,
    *,
    devices: int = 8,
    sequence_length: int | None = None,
    microbatch_size: int = 1,
    tensor_parallel: int = 1,
    links: Literal["pairs", "none"] = "none",
    dtype: Literal["bf16", "fp16"] = "bf16",
    attention: Literal["flash", "math", None] = None,
    accumulation: Literal["torch", "fused"] = "torch",
    granularity: Literal["block", "half"] = "block",
    embedding_parts: int = 1,
    head_parts: int = 1,
) -> Profile:
    """Estimate a profile from a model's configuration and a GPU's data sheet, as `optpipe profile --model --gpu` does.

    `model` is a config.json of Hugging Face or one of the known names (`optpipe profile --list-models`), `gpu` a name
    (`--list-gpus`) or a JSON file of that form. Bytes and operations are counted by torch on its meta device: raises
    MissingDependency without torch, BadInput for what does not fit together.
    """
    from dataclasses import replace

    from optpipe_compiler.costs import gpus, models
    from optpipe_torch.estimates.estimate import EstimateOptions, check_devices, estimate

    checked("model", model, "path")
    checked("gpu", gpu, "str")
    numbers = {
        "devices": devices,
        "microbatch_size": microbatch_size,
        "tensor_parallel": tensor_parallel,
        "embedding_parts": embedding_parts,
        "head_parts": head_parts,
    }
    for name, number in numbers.items():
        checked(name, number, "int")
    checked("sequence_length", sequence_length, "int", is_optional=True)
    named = {"links": links, "dtype": dtype, "attention": attention}
    chosen(estimate_profile, **named, accumulation=accumulation, granularity=granularity)
    found = models.load(str(model))
    cut: dict[str, Any] = {"granularity": granularity, "embedding_parts": embedding_parts, "head_parts": head_parts}
    architecture = replace(found, attention=attention or found.attention, **cut)
    stem = Path(model).stem
    options = EstimateOptions(
        model=architecture,
        gpu=gpus.load(gpu),
        name=stem if stem != "config" else architecture.kind,
        devices=devices,
        sequence_length=architecture.positions or 4096 if sequence_length is None else sequence_length,
        microbatch_size=microbatch_size,
        tensor_parallel=tensor_parallel,
        shared_links=links,
        dtype=dtype,
        accumulation=accumulation,
    )
    check_devices(options)
    return estimate(options)


def profile_from_run(trace: PathLike, profile: Profile | PathLike) -> Profile:
    """Return the profile of a run with the times that its trace (`optpipe run --trace`) has measured.

    `profile` is the one that the run was planned with; raises BadInput for another one.
    """
    from optpipe_compiler.costs import from_run

    base = as_profile(profile)
    name = "profile" if isinstance(profile, Profile) else str(profile)
    return from_run.profile_from_run(base, name, from_run.read_run(Path(checked("trace", trace, "path")))).profile


def as_profile(profile: Profile | PathLike) -> Profile:
    """Return the profile, read if it is given by its path, else cross-checked as a file is."""
    if not isinstance(profile, Profile):
        return read_profile(checked("profile", profile, "path"))
    _profiles.parse(canonical(profile), "profile")
    return profile
