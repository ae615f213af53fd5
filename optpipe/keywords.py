"""The keyword arguments of functions that have many, for type checkers and editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    Triple = tuple[float, float, float]


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


def known(options: CompileKeywords | UniformKeywords, record: type) -> dict[str, Any]:
    """Return the options; type checkers see names that the record has not, others get a sentence."""
    names: Mapping[str, Any] = record.__dataclass_fields__  # type: ignore[attr-defined]
    for name in options:
        if name not in names:
            raise BadInput(f"got {name!r}, expected some of {', '.join(names)}")
    return {**options}
