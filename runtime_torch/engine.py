"""Autograd's engine without the checks around it, which cost more host time than many a kernel's launch.

The callers here know what they pass: edges with gradients of their shape and dtype. Beside adapter.py the only touch of
a private torch name; both are for the torch that `job.TORCH` names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.autograd.graph import _engine_run_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
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
