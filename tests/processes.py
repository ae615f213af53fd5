"""Child processes of a process, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def children(pid: int | None = None) -> list[int]:
    """Return the living children of `pid`, by default of this process, but for Python's own helpers.

    Its resource tracker and its fork server start with the first processes and live as long as their parent.
    """
    found = []
    for task in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if not any(helper in _command(child) for helper in HELPERS)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:  # it ended meanwhile
        return b""
