"""`python -m bench.gpu.facts`: what machine this is, as one JSON object."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "numba", "ortools", "msgspec", "click", "rich", "transformers", "triton")
QUERY = "name,driver_version,memory.total,clocks.max.sm,pcie.link.gen.max,pcie.link.width.max,power.limit"


def facts() -> dict[str, Any]:
    """Return names, versions and sizes; None where something is not there."""
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": {name: _version(name) for name in PACKAGES},
        "environment": {name: value for name, value in sorted(os.environ.items()) if _tells(name)},
        "nvidia_smi": _printed(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]),
        "topology": _printed(["nvidia-smi", "topo", "-m"]),
        "commit": _printed(["git", "rev-parse", "HEAD"]),
        **_torch(),
    }


def _tells(name: str) -> bool:
    return name.startswith(("CUDA_", "NCCL_", "TORCH_", "PYTORCH_")) or name == "OMP_NUM_THREADS"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _printed(command: list[str]) -> str | None:
    """Return what a tool prints; None where it is missing or has nothing to say."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return re.sub(r"\x1b\[\d*m", "", done.stdout).strip() if done.returncode == 0 else None


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _torch() -> dict[str, Any]:
    """What torch says of itself and of the GPUs that it sees."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        found: Any = torch.cuda.get_device_properties(index)
        capability = f"{found.major}.{found.minor}"
        gpus.append({"name": found.name, "memory_bytes": found.total_memory, "capability": capability})
    nccl: Any = torch.cuda.nccl.version() if gpus else None
    return {
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpus else None,
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
