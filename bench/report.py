"""What the benches' pages have in common: where they were measured, and where they go."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def machine() -> str:
    """Say what measured."""
    return f"{os.cpu_count()} cores, Python {platform.python_version()}"


def publish(text: str, path: Path | None) -> None:
    """Write a page, or print it."""
    if path is None:
        print(text, end="")
    else:
        path.write_text(text, encoding="utf-8")
