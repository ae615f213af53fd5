"""Data sheets of GPUs: peak rates, memory, and what connects a GPU to its peers and to its host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from optpipe_compiler.documents.files import Record, decode, read_text
from optpipe_compiler.errors import BadInput

FORMAT = "optpipe-gpus"
VERSION = 1
REVISION = 0
PRESETS = Path(__file__).parent / "gpus.json"

Rate = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Gpu(Record, frozen=True, kw_only=True):
    """One kind of GPU in the machine it is sold in; all bandwidths are those of one direction."""

    name: str
    description: str
    flops_per_s: Rate
    """Peak of dense bf16 and fp16 matrix products."""
    matmul_flops_per_s: Rate
    """The most that a large matrix product was measured to reach."""
    memory_bytes: Rate
    memory_bytes_per_s: Rate
    peer_bytes_per_s: Rate
    """A message to another GPU of the node."""
    collective_bytes_per_s: Rate
    """All links to the other GPUs of the node together."""
    peer_latency_ns: Size
    devices_per_node: Rate
    network_bytes_per_s: Rate
    """A message to a GPU of another node."""
    network_latency_ns: Size
    host_bytes_per_s: Rate
    """A copy to or from pinned memory of the host, alone."""
    host_duplex_bytes_per_s: Rate
    """The same while the other direction is busy."""
    host_latency_ns: Size
    source: Annotated[list[str], msgspec.Meta(min_length=1)]
    """Where the figures come from."""
    assumed: list[str] = msgspec.field(default_factory=list)
    """Which figures are on no data sheet."""


class GpuFile(Record, frozen=True, kw_only=True):
    """gpus.json, and a user's file of the same form."""

    format: Literal["optpipe-gpus"]
    version: int
    revision: int
    gpus: Annotated[list[Gpu], msgspec.Meta(min_length=1)]


def presets() -> dict[str, Gpu]:
    """Return the GPUs that are known by name."""
    return {gpu.name: gpu for gpu in _read(PRESETS)}


def load(name: str) -> Gpu:
    """Return a preset by its name, or the only GPU of a file; raise BadInput naming what was wrong."""
    known = presets()
    if name in known:
        return known[name]
    if not name:
        raise BadInput(f"--gpu is missing, expected one of {', '.join(known)}, or a JSON file of that form")
    path = Path(name)
    if path.suffix != ".json" and not path.is_file():
        raise BadInput(f"--gpu is {name!r}, expected one of {', '.join(known)}, or a JSON file of that form")
    gpus = _read(path)
    if len(gpus) != 1:
        raise BadInput(f"{path}: $.gpus has {len(gpus)} entries, expected 1")
    return gpus[0]


def _read(path: Path) -> list[Gpu]:
    return decode(read_text(path), GpuFile, str(path), format=FORMAT, version=VERSION, revision=REVISION).gpus
