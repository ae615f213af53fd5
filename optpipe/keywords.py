"""The keyword arguments of functions that have many, for type checkers and editors."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    Triple = tuple[float, float, float]

T = TypeVar("T")


class UniformKeywords(TypedDict, total=False):
    """What costs/uniform.UniformOptions has."""

    devices: int
    layers_per_device: int
    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    recompute_ms: float | None
    p2p_ms: float
    activation_gb: float
    residue_fraction: float
    boundary_fraction: float
    d2h_ms: float
    h2d_ms: float
    static_gb: float
    shared_links: Literal["pairs", "none"]
    duplex_slowdown: float
    copy_share: float
    embedding_ms: Triple | None
    head_ms: Triple | None
    embedding_parts: int
    head_parts: int


class CompileKeywords(TypedDict, total=False):
    """What `compile` and `sweep` pass on to compiler.Options as it is."""

    placement: Literal["auto", "linear", "loop", "v"]
    stages_per_device: int | None
    objective: Literal["makespan", "span"]
    offload: bool
    recompute: bool
    split: bool
    slices: int | Literal["auto"]
    lengths: tuple[int, ...]
    seed: int
    reproducible: bool
    workers: int
    noise: float | None


RENAMED = {
    "mem_bytes": "mem",
    "host_mem_bytes": "host_mem",
    "time_limit_s": "time_limit",
    "seeds": "start",
    "keep": "keep_placement",
    "units": "slices",
}
"""Options that functions take under other names."""
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "True or False"),
    "str": ((str,), "a text"),
    "path": ((str, Path), "a path"),
}


def known(options: CompileKeywords | UniformKeywords, record: type) -> dict[str, Any]:
    """Return the options; type checkers see names and values that the record does not take, others get a sentence."""
    fields: Mapping[str, Any] = record.__dataclass_fields__  # type: ignore[attr-defined]
    for name, value in options.items():
        if name in RENAMED and name in fields:
            raise BadInput(f"got {name!r}, expected {RENAMED[name]!r}")
        if name not in fields:
            raise BadInput(f"got {name!r}, expected some of {', '.join(fields)}")
        _check_type(name, value, fields[name].type)
    return {**options}


def _check_type(name: str, value: object, annotation: str) -> None:
    """Raise BadInput for a value that a field with this annotation does not take."""
    kinds = [kind.strip() for kind in annotation.split("|")]
    if any(kind.startswith("Literal") for kind in kinds) and isinstance(value, str):
        return  # which texts there are is said where they are chosen from
    if kinds[0].startswith("tuple") or kinds[0] == "Triple":
        kind, length = "int" if "int" in kinds[0] else "float", 3 if kinds[0] == "Triple" else 0
        checked_all(name, value, kind, is_optional="None" in kinds, length=length)
    elif kinds[0] in KINDS:
        checked(name, value, kinds[0], is_optional="None" in kinds)
    elif kinds[0].startswith("Literal"):
        checked(name, value, "str")


def checked(name: str, value: T, kind: str, *, is_optional: bool = False) -> T:
    """Return the value of an argument; raise BadInput where it is not of its kind, a key of KINDS."""
    types, said = KINDS[kind]
    is_bool = isinstance(value, bool) and bool not in types
    if (value is None and is_optional) or (isinstance(value, types) and not is_bool):
        return value
    raise BadInput(f"{name} is {reprlib.repr(value)}, expected {said}{' or None' if is_optional else ''}")


def checked_all(name: str, values: T, kind: str, *, is_optional: bool = False, length: int = 0) -> T:
    """Return the values of an argument; raise BadInput where it has none, others than `length`, or of another kind."""
    if values is None and is_optional:
        return values
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise BadInput(f"{name} is {reprlib.repr(values)}, expected a list, each of it {KINDS[kind][1]}")
    if len(values) != (length or len(values)):
        raise BadInput(f"{name} is {reprlib.repr(values)}, expected {length} numbers")
    for number, value in enumerate(values):
        checked(f"{name}[{number}]", value, kind)
    return values
