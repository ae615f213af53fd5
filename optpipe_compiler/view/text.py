"""What a terminal would show, as text: for notebooks and files."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def as_text(renderable: RenderableType, width: int) -> str:
    """Return what a terminal of so many columns would show, without colours."""
    from rich.console import Console

    out = StringIO()
    Console(file=out, width=width, highlight=False, markup=False, emoji=False, no_color=True).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
