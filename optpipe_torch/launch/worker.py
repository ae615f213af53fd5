"""What makes a process a good worker: on a CPU one compute thread, and freed memory that stays with it; on a GPU an
allocator that holds little more than is in use, and streams that do not wait for each other."""

from __future__ import annotations

import ctypes
import os

import torch

from runtime_torch.gpu_channels import CONNECTIONS

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""As `malloc.h` of the GNU C library numbers them."""


def settle_on_cpu() -> None:
    """Compute in one thread; keep freed memory, as the caching allocator does on a GPU.

    Left alone, the GNU C library gives large blocks back to the system and gets them again, page by page, in every
    step. So does a heap of each thread's own, where lanes take memory that others give back: all share one. Other C
    libraries are left as they are.
    """
    torch.set_num_threads(1)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_MMAP_MAX, 0)
    mallopt(_ARENA_MAX, 1)


ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch is told how its allocator shall be, by environment."""
MOST_CONNECTIONS = "32"
"""Work queues of a GPU, of which CUDA makes 8 unless it is told."""


def settle_on_gpu() -> None:
    """Let the segments of the caching allocator grow and streams have work queues of their own, unless the environment
    says how it shall be.

    With segments as they are it held 4 to 24% more of an H100 than was in use at most (docs/GPU.md), which no promise
    of a schedule counts. Streams that share a queue wait for each other, and a replay has two for each peer beside
    those of compute and copies. To be called before anything is put on a GPU: the environment is read then.
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    os.environ.setdefault(CONNECTIONS, MOST_CONNECTIONS)
