"""A stage whose every op is a named range for profilers and NVTX: `forward 3 m2` is microbatch 2 on stage 3."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch.profiler import record_function

from optpipe_compiler.documents.ops import range_name
from runtime_torch.engine import is_profiled
from runtime_torch.execution import StageExecution

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from runtime_torch.execution import Layers


_SILENCE = nullcontext()


class NamedStage(StageExecution):
    """A `StageExecution` that tells a profiler, where one listens, what it is doing."""

    stage = 0
    """The number in the names."""

    def _range(self, kind: str, microbatch: int) -> AbstractContextManager[object]:
        if not is_profiled():
            return _SILENCE
        return record_function(range_name(kind, self.stage, microbatch))

    def forward(
        self, microbatch: int, x: Tensor, target: Tensor | None = None, recomputed: Sequence[Layers] = ()
    ) -> Tensor:
        """F."""
        with self._range("forward", microbatch):
            return super().forward(microbatch, x, target, recomputed)

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """B."""
        with self._range("backward", microbatch):
            return super().backward(microbatch, gradient)

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """I."""
        with self._range("backward_input", microbatch):
            return super().backward_input(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        with self._range("backward_weight", microbatch):
            super().backward_weight(microbatch)

    def recompute(self, microbatch: int, layers: Layers) -> None:
        """R."""
        with self._range("recompute", microbatch):
            super().recompute(microbatch, layers)

    def offload(self, microbatch: int, layers: Layers) -> None:
        """D2H."""
        with self._range("offload", microbatch):
            super().offload(microbatch, layers)

    def reload(self, microbatch: int, layers: Layers) -> None:
        """H2D."""
        with self._range("reload", microbatch):
            super().reload(microbatch, layers)
