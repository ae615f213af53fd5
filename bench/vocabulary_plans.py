"""What a head in parts is worth by vocabulary: `python -m bench.vocabulary_plans [--seconds N] [-o FILE]`.

The models and sizes of Vocabulary Parallelism (arXiv:2411.05288) as operation counts: a block of a sequence of s tokens
and width h takes s h (72 h + 12 s), the head 6 s h V, where V is the vocabulary.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.planner import GB, commit
from bench.report import machine, publish
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule

TOKENS, MICROBATCHES = 2048, 128
VOCABULARIES = (32, 64, 128, 256)
"""In units of 1024 tokens."""
OPERATIONS_PER_MS = 150e9
"""Half of what an A100 does in bf16; nothing depends on it but the unit."""

HEADER = """# A head in parts, by vocabulary

Written by `python -m bench.vocabulary_plans {options}` at {commit}; {machine}.
The models of Vocabulary Parallelism (arXiv:2411.05288) as operation counts: blocks of s h (72 h + 12 s), a head of
6 s h V; {tokens} tokens, {microbatches} microbatches, no messages, a cap of P + 2 activations of a device's blocks,
neither offload nor recompute. Idle shares of the plans, {seconds:g} s each (reproducibly: as much search, whatever
else runs), and what their bounds allow at least: the head as one layer on cuts of whole layers, and in as many parts
as devices. Microbatches are {whole}.

| devices | blocks, width | vocabulary | head in blocks | whole head | at least | in parts | at least | faster by |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Size:
    """A model and its devices."""

    devices: int
    blocks: int
    width: int


SIZES = (Size(8, 32, 3072), Size(16, 48, 4096), Size(32, 64, 5120))


def planned(size: Size, vocabulary: int, parts: int, seconds: float, slices: int) -> Schedule:
    """Return the plan. Of a microbatch in slices, keys and values (4 of 34 parts of an activation) serve later ones."""
    third = TOKENS * size.width * (24 * size.width + 4 * TOKENS) / OPERATIONS_PER_MS
    head = 2 * TOKENS * size.width * vocabulary * 1024 / OPERATIONS_PER_MS
    per_device = size.blocks // size.devices
    attention = 4 * TOKENS * TOKENS * size.width / OPERATIONS_PER_MS
    profile = uniform_profile(
        UniformOptions(
            devices=size.devices,
            layers_per_device=per_device,
            forward_ms=per_device * third,
            backward_input_ms=per_device * (third + attention),
            backward_weight_ms=per_device * (third - attention),
            p2p_ms=0.0,
            residue_fraction=1.0,
            head_ms=(head, head, head) if vocabulary else None,
            head_parts=parts,
            sliceable=True,
            sequence_length=TOKENS,
            attention_share=attention / third,
            kv_fraction=4 / 34,
        )
    )
    options = Options(
        mem_bytes=(size.devices + 2) * GB,
        microbatches=MICROBATCHES,
        offload=False,
        recompute=False,
        time_limit_s=seconds,
        slices=slices,
        reproducible=True,
    )
    return compile_schedule(profile, options).schedule


def row(size: Size, vocabulary: int, seconds: float, slices: int) -> str:
    """Plan with the head whole and in parts, or without one."""
    start = f"| {size.devices} | {size.blocks}, {size.width} |"
    whole = planned(size, vocabulary, 1, seconds, slices)
    if not vocabulary:
        return f"{start} none | 0.0 | {_idle(whole)} | {_least(whole)} |  |  |  |"
    parts = planned(size, vocabulary, size.devices, seconds, slices)
    block = 72 * size.width + 12 * TOKENS
    cells = [f"{_idle(one)} | {_least(one)}" for one in (whole, parts)]
    faster = whole.forecast.makespan_ns / parts.forecast.makespan_ns - 1
    return f"{start} {vocabulary}K | {6 * vocabulary * 1024 / block:.1f} | {' | '.join(cells)} | {faster:.1%} |"


def _idle(schedule: Schedule) -> str:
    return f"{schedule.forecast.bubble_fraction:.1%}"


def _least(schedule: Schedule) -> str:
    """Return the idle share of a schedule that is as short as the bound."""
    forecast = schedule.forecast
    return f"{1 - (1 - forecast.bubble_fraction) * forecast.makespan_ns / forecast.lower_bound_ns:.1%}"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each plan")
    parser.add_argument("--devices", type=int, action="append", help="default: all")
    parser.add_argument(
        "--vocabulary", type=int, action="append", help="in units of 1024 tokens; 0: no head; default: 32 to 256"
    )
    parser.add_argument("--slices", type=int, default=1, help="of every microbatch")
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    rows = []
    for size in (one for one in SIZES if not chosen.devices or one.devices in chosen.devices):
        for vocabulary in chosen.vocabulary or VOCABULARIES:
            rows.append(row(size, vocabulary, chosen.seconds, chosen.slices))
            print(rows[-1], flush=True)
    asked = [f"--seconds {chosen.seconds:g}"]
    asked += [f"--devices {number}" for number in chosen.devices or ()]
    asked += [f"--vocabulary {number}" for number in chosen.vocabulary or ()]
    asked += [f"--slices {chosen.slices}"] if chosen.slices > 1 else []
    header = HEADER.format(
        options=" ".join(asked),
        seconds=chosen.seconds,
        commit=commit(),
        machine=machine(),
        tokens=TOKENS,
        microbatches=MICROBATCHES,
        whole=f"in {chosen.slices} slices" if chosen.slices > 1 else "whole",
    )
    publish(header + "\n".join(rows) + "\n", chosen.output)


if __name__ == "__main__":
    main()
