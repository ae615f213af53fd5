"""How long counted work takes on a GPU: a roofline with four shares, and links at their bandwidth.

A kernel takes the longer of its arithmetic and its memory traffic, and never less than a launch. The shares are what
training kernels were seen to reach; docs/ESTIMATES.md says where they come from and how far off they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe_compiler.costs.gpus import Gpu
    from optpipe_torch.estimates.work import Kernel, Work

SHARES = {"matmul": 0.93, "attention_forward": 0.70, "attention_backward": 0.58}
"""Of the rate that the GPU's largest matrix products reach."""
MEMORY_SHARE = 0.59
"""Of the memory bandwidth."""
LINK_SHARE = 0.8
"""Of the bandwidth between GPUs."""
LAUNCH_NS = 4_000
"""No kernel takes less."""


def work_ns(work: Work, gpu: Gpu, ranks: int) -> int:
    """Return the time of one op; its collectives are among `ranks` GPUs and overlap nothing."""
    return round(sum(kernel_ns(kernel, gpu, ranks) for kernel in work.kernels))


def kernel_ns(kernel: Kernel, gpu: Gpu, ranks: int) -> float:
    """Return the time of one kernel."""
    if kernel.kind == "collective":
        moved = kernel.nbytes * (ranks - 1) / ranks
        return gpu.peer_latency_ns + moved * 1e9 / (gpu.collective_bytes_per_s * LINK_SHARE)
    arithmetic = kernel.flops * 1e9 / (gpu.matmul_flops_per_s * SHARES.get(kernel.kind, 1))
    traffic = kernel.nbytes * 1e9 / (gpu.memory_bytes_per_s * MEMORY_SHARE)
    return max(LAUNCH_NS, arithmetic, traffic)
