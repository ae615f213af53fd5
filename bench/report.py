"""What the benches' pages have in common: where and of what they were measured, and where they go."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def machine() -> str:
    """Say what measured."""
    return f"{os.cpu_count()} cores, Python {platform.python_version()}"


def state() -> str:
    """Say what was measured, and what else ran: the commit, and the system's load of the last minute."""
    git = ("git", "-C", str(Path(__file__).parent))
    found = [
        subprocess.run([*git, *words], capture_output=True, text=True, check=False).stdout.strip()
        for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", "*.py"))
    ]
    changed = " with changes" if found[1] else ""
    return f"commit {found[0] or 'unknown'}{changed}, load {os.getloadavg()[0]:.1f} when it began"


def publish(text: str, path: Path | None) -> None:
    """Write a page, or print it."""
    if path is None:
        print(text, end="")
    else:
        path.write_text(text, encoding="utf-8")
