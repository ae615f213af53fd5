"""The memory table of docs/IR.md, as planning and lowering have it; a send's bytes go when it is delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Stage


def op_memory(stage: Stage, kind: Kind, recomputed: bool) -> tuple[int, int]:
    """Return the units that an op takes when it starts and gives back when it has completed (docs/IR.md, Memory).

    A forward finds its input where the message or the stage before left it, and frees it; a backward likewise the
    gradient of its output.
    """
    messages = stage.incoming + stage.outgoing
    if kind is Kind.F:
        extra = stage.forward_extra - messages
        dropped = stage.saved - stage.checkpoint if recomputed else 0
        return stage.saved + stage.outgoing + extra, extra + stage.incoming + dropped
    if kind is Kind.I:
        extra = stage.backward_input_extra - messages
        freed = stage.saved + stage.captured - stage.residue
        taken = stage.incoming + stage.captured + extra + stage.accumulators
        return taken, extra + stage.outgoing + freed + stage.gradient
    if kind is Kind.W:
        return stage.backward_weight_extra, stage.backward_weight_extra + stage.residue
    if kind is Kind.B:
        extra = stage.backward_extra - messages
        taken = stage.incoming + extra + stage.accumulators
        return taken, extra + stage.outgoing + stage.saved + stage.gradient
    if kind is Kind.R:
        extra = stage.forward_extra - messages
        return stage.saved - stage.checkpoint + extra, extra
    return (0, stage.moved) if kind is Kind.D else (stage.moved, 0)
