"""Ops as named ranges for profilers and NVTX: `forward 3 m2` is microbatch 2 on stage 3."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch.profiler import record_function

from optpipe_compiler.documents.ops import range_name
from runtime_torch.engine import is_profiled

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from optpipe_compiler.documents import ir

_SILENCE = nullcontext()


def named(op: ir.Op) -> AbstractContextManager[object]:
    """Tell a profiler, where one listens, that an op runs within."""
    if not is_profiled():
        return _SILENCE
    return record_function(range_name(op.name, op.stage, op.microbatch, op.slice_or_none))
