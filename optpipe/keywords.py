"""The keyword arguments of functions that have many, for type checkers and editors."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args, get_type_hints

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    Triple = tuple[float, float, float]


class UniformKeywords(TypedDict, total=False):
    """What costs/uniform.UniformOptions has."""

    devices: int
    layers_per_device: int
    forward_ms: float
    backward_input_ms: float | None
    backward_weight_ms: float | None
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
    device_times: tuple[float, ...] | None
    sliceable: bool
    sequence_length: int
    attention_share: float
    kv_fraction: float
    slice_overhead_ms: float


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
KINDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "int": ((Integral,), "a whole number"),
    "count": ((Integral,), "a whole number of at least 1"),
    "float": ((Integral, float), "a number"),
    "bool": ((bool,), "True or False"),
    "str": ((str,), "a text"),
    "path": ((str, Path), "a path"),
    "function": ((Callable,), "a function"),
}


def known(
    options: CompileKeywords | UniformKeywords, record: type, keywords: type, function: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Return the options; type checkers see names and values that are not taken, others get a sentence.

    Taken are those of `keywords`, which are fields of `record`; a function takes its own arguments beside them.
    """
    fields: Mapping[str, Any] = record.__dataclass_fields__  # type: ignore[attr-defined]
    arguments = {} if function is None else signature(function).parameters
    own = [name for name, one in arguments.items() if one.kind is not Parameter.VAR_KEYWORD]
    names = [*own, *keywords.__annotations__]
    found = {}
    for name, value in options.items():
        if name in RENAMED and RENAMED[name] in names:
            raise BadInput(f"got {name!r}, expected {RENAMED[name]!r}")
        if name not in keywords.__annotations__:
            raise BadInput(f"got {name!r}, expected some of {', '.join(names)}")
        found[name] = _checked_by(name, value, fields[name].type)
    return found


def _checked_by(name: str, value: object, annotation: str) -> object:
    """Return the value; raise BadInput for one that a field with this annotation does not take."""
    kinds = [kind.strip() for kind in annotation.split("|")]
    if any(kind.startswith("Literal") for kind in kinds) and isinstance(value, str):
        return value  # which texts there are is said where they are chosen from
    if kinds[0].startswith("tuple") or kinds[0] == "Triple":
        kind, length = "int" if "int" in kinds[0] else "float", 3 if kinds[0] == "Triple" else 0
        return checked_all(name, value, kind, is_optional="None" in kinds, length=length)
    if kinds[0] in KINDS:
        return checked(name, value, kinds[0], is_optional="None" in kinds)
    return checked(name, value, "str") if kinds[0].startswith("Literal") else value


def checked(name: str, value: Any, kind: str, *, is_optional: bool = False) -> Any:
    """Return the value of an argument, numpy's integers as Python's; raise BadInput where it is not of its kind, a key
    of KINDS."""
    types, said = KINDS[kind]
    is_bool = isinstance(value, bool) and bool not in types
    is_small = kind == "count" and isinstance(value, Integral) and value < 1
    if (value is None and is_optional) or (isinstance(value, types) and not is_bool and not is_small):
        return int(value) if type(value).__module__ == "numpy" and isinstance(value, Integral) else value
    raise BadInput(f"{name} is {reprlib.repr(value)}, expected {said}{' or None' if is_optional else ''}")


def checked_all(name: str, values: Any, kind: str, *, is_optional: bool = False, length: int = 0) -> Any:
    """Return the values of an argument; raise BadInput where it has none, others than `length`, or of another kind."""
    if values is None and is_optional:
        return values
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise BadInput(f"{name} is {reprlib.repr(values)}, expected a list, each of it {KINDS[kind][1]}")
    if len(values) != (length or len(values)):
        raise BadInput(f"{name} is {reprlib.repr(values)}, expected {length} numbers")
    return tuple(checked(f"{name}[{number}]", value, kind) for number, value in enumerate(values))


def chosen(function: Callable[..., Any], **values: Any) -> None:
    """Raise BadInput for a value that the annotation of its argument, a Literal, does not have."""
    for name, value in values.items():
        if value not in (choices := get_args(get_type_hints(function)[name])):
            raise BadInput(f"{name} is {reprlib.repr(value)}, expected one of {', '.join(map(str, choices))}")
