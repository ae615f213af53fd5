"""What users pick, as schedule files on given costs: for rehearsals of more devices than there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.published import METHODS, Method
from optpipe_compiler.published.pipeoffload import streaming
from optpipe_compiler.published.recompute import recomputing

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.profile import Profile

PLENTY = 10**15


def stock_order(profile: Profile, order: str, treatment: str, microbatches: int) -> ir.Schedule:
    """Return the order with every stage's activations kept, recomputed right before the backward, or offloaded.

    Offloads overlap with compute here, which torch's hooks do not do unless one writes that oneself.
    """
    base = METHODS[order]
    name = {"plain": order, "checkpoint": f"{order}-recompute", "offload": f"{order}-offload"}[treatment]
    made = {"plain": None, "checkpoint": recomputing, "offload": streaming}[treatment]
    if name not in METHODS and made is not None:
        METHODS[name] = Method(made(name, base.order), base.placements, "composition", base.source)
    placement, several = {"1f1b": ("linear", None), "interleaved-zb": ("loop", 2), "zbv": ("v", 2)}[order]
    # one byte less than all would make room for stages of one layer, which a device of 1F1B then has
    options = Options(
        mem_bytes=PLENTY,
        microbatches=microbatches,
        placement=placement,  # type: ignore[arg-type]
        stages_per_device=several or 1,
        method=name,
        time_limit_s=60.0,
    )
    return compile_schedule(profile, options).schedule
