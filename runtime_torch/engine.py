"""Private functions of torch itself; those of its pipelining engine are in adapter.py. Both are for `job.TORCH`.

Autograd's engine is called without the checks around it, which cost more host time than many a kernel's launch: the
callers here know what they pass, edges with gradients of their shape and dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import _engine_run_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, UntypedStorage
    from torch.autograd.graph import GradientEdge


def accumulate(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], into: Sequence[Tensor | GradientEdge] = ()
) -> None:
    """Run backward from `edges` and free their graph; add to `.grad` of the leaves, or of those in `into` alone."""
    _engine_run_backward(tuple(edges), tuple(gradients), False, False, tuple(into), True, accumulate_grad=True)


def capture(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], of: Sequence[Tensor | GradientEdge], *, retain: bool
) -> tuple[Tensor | None, ...]:
    """Run backward from `edges` and return the gradients of `of`, None where there is no way to it; with `retain` the
    graph stays for another backward."""
    return _engine_run_backward(tuple(edges), tuple(gradients), retain, False, tuple(of), True, accumulate_grad=False)


_C: Any = torch._C


def is_profiled() -> bool:
    """Whether a profiler listens to this thread."""
    return bool(_C._autograd._profiler_enabled())


def references(storage: UntypedStorage) -> int:
    """Return how many objects keep the storage alive, `storage` itself included."""
    return int(_C._storage_Use_Count(storage._cdata))
