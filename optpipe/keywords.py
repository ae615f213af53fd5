"""The keyword arguments of functions that have many, for type checkers and editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
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
    seed: int
    reproducible: bool
    workers: int
    noise: float | None
