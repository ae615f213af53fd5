"""What makes a process a good worker on a CPU: one compute thread, and freed memory that stays with it."""

from __future__ import annotations

import ctypes

import torch

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""As `malloc.h` of the GNU C library numbers them."""


def settle_on_cpu() -> None:
    """Compute in one thread; keep freed memory, as the caching allocator does on a GPU.

    Left alone, the GNU C library gives large blocks back to the system and gets them again, page by page, in every
    step. Other C libraries are left as they are.
    """
    torch.set_num_threads(1)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_MMAP_MAX, 0)
