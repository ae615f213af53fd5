"""What adapters of frameworks share."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe_compiler.documents import ir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def loaded(schedule: ir.Schedule | Path | str) -> ir.Schedule:
    """Return a schedule, or read its file."""
    return ir.load(schedule) if isinstance(schedule, Path | str) else schedule


@contextmanager
def keeping_dtypes(module: nn.Module) -> Iterator[None]:
    """Within: a module may be moved; its buffers, such as rotary factors, keep the dtypes in which the model made
    them."""
    kept = [(part, name, one) for part in module.modules() for name, one in part.named_buffers(recurse=False)]
    yield
    for part, name, one in kept:
        setattr(part, name, one.to(getattr(part, name).device))
