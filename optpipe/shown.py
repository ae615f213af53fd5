"""How results show themselves: as text of a fixed width, and as HTML that holds that text."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 100
"""Columns of text."""


def text(renderable: RenderableType) -> str:
    """Return what a terminal of WIDTH columns would show."""
    from optpipe_compiler.view.text import as_text

    return as_text(renderable, WIDTH)


def html(shown: str) -> str:
    """Return text as HTML."""
    return f'<pre style="line-height:1.2">{escape(shown)}</pre>'
