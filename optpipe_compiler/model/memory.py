"""What planning and lowering take of the memory table: what an op of a stage takes and gives back, in units."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.documents import memory
from optpipe_compiler.model.schedule import Kind

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Stage


def op_memory(stage: Stage, kind: Kind, recomputed: bool) -> tuple[int, int]:
    """Return the units that an op takes when it starts and gives back when it has completed."""
    taken, added = _row(stage, kind, recomputed)
    return sum(taken), -sum(added)


def _row(stage: Stage, kind: Kind, recomputed: bool) -> memory.Entry:
    incoming, outgoing = stage.incoming, stage.outgoing
    messages, dropped = incoming + outgoing, stage.saved - stage.checkpoint
    slices = stage.accumulators, stage.gradient
    match kind:
        case Kind.F:
            extra = stage.forward_extra - messages
            return memory.forward(stage.saved, incoming, outgoing, extra, dropped if recomputed else 0)
        case Kind.I:
            extra = stage.backward_input_extra - messages
            return memory.backward_input(stage.saved, stage.residue, stage.captured, incoming, outgoing, extra, *slices)
        case Kind.W:
            return memory.backward_weight(stage.residue, stage.backward_weight_extra)
        case Kind.B:
            return memory.backward(stage.saved, incoming, outgoing, stage.backward_extra - messages, *slices)
        case Kind.R:
            return memory.recompute(dropped, stage.forward_extra - messages)
        case Kind.D:
            return memory.offload(stage.moved)
        case Kind.H:
            return memory.reload(stage.moved)
