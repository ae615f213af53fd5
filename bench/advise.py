"""`optpipe advise` against the degrees of parallelism that others have published: writes docs/ADVISE.md.

`python -m bench.advise` asks for every published configuration of CASES (half an hour on two cores), `--only NAME` for
some; answers are kept in bench/advise.json, so that the page can be written again with `--page`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from optpipe_compiler.costs import gpus
from optpipe_compiler.costs.models import Architecture
from optpipe_compiler.errors import Infeasible
from optpipe_compiler.study import advise as study
from optpipe_torch.estimates.estimate import EstimateOptions
from optpipe_torch.estimates.spread import Spread

ROOT = Path(__file__).parent.parent
ANSWERS = ROOT / "bench" / "advise.json"
PAGE = ROOT / "docs" / "ADVISE.md"


@dataclass(frozen=True)
class Case:
    """A published configuration; the sources do not say how large the microbatches are."""

    name: str
    source: str
    model: Architecture
    gpu: str
    gpus: int
    batch: int
    sequence: int
    pipeline: int
    tensor: int
    tflops: float | None = None
    """Per GPU, as published, by the source's formula."""

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Pipeline, tensor, data."""
        return self.pipeline, self.tensor, self.gpus // self.pipeline // self.tensor

    @property
    def published_step_s(self) -> float | None:
        """What a step takes at the published rate: Narayanan et al., Eq. 3 (recomputation included)."""
        if self.tflops is None:
            return None
        m, tokens = self.model, self.batch * self.sequence
        flops = 96 * tokens * m.layers * m.hidden**2
        flops *= 1 + self.sequence / (6 * m.hidden) + m.vocab / (16 * m.layers * m.hidden)
        return flops / (self.tflops * 1e12 * self.gpus)


def gpt(layers: int, hidden: int, heads: int) -> Architecture:
    """Megatron-LM's GPT with dropout; the attention matrix is kept, as it was in 2021."""
    return Architecture(
        kind="gpt2", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads,
        ffn=4 * hidden, vocab=51200, positions=2048, qkv_bias=True, attention_dropout=0.1, residual_dropout=0.1,
        embedding_dropout=0.1, attention="math",
    )  # fmt: skip


def llama(layers: int, hidden: int, heads: int, ffn: int) -> Architecture:
    """Llama 3.1."""
    return Architecture(
        kind="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_dim=hidden // heads, ffn=ffn,
        vocab=128256,
    )  # fmt: skip


MEGATRON = "Narayanan et al., arXiv:2104.04473, Table 1"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
CASES = [
    Case("18.4B", MEGATRON, gpt(40, 6144, 48), "a100-80gb", 256, 1024, 2048, 1, 8, 135),
    Case("39.1B", MEGATRON, gpt(48, 8192, 64), "a100-80gb", 512, 1536, 2048, 2, 8, 138),
    Case("76.1B", MEGATRON, gpt(60, 10240, 80), "a100-80gb", 1024, 1792, 2048, 4, 8, 140),
    Case("145.6B", MEGATRON, gpt(80, 12288, 96), "a100-80gb", 1536, 2304, 2048, 8, 8, 148),
    Case("Llama 3.1 70B", f"{TITAN}, Table 4", llama(80, 8192, 64, 28672), "h100-sxm", 256, 512, 8192, 1, 8),
    Case("Llama 3.1 405B", f"{TITAN}, Table 5", llama(126, 16384, 128, 53248), "h100-sxm", 512, 256, 8192, 8, 8),
]


def answer(case: Case, jobs: int) -> dict[str, object]:
    """Ask for the best, and for the published degrees alone."""
    gpu = gpus.load(case.gpu)
    options = EstimateOptions(model=case.model, gpu=gpu, name=case.name, sequence_length=case.sequence)
    spread = Spread(options, case.gpus)
    question = study.Question(
        gpus=case.gpus,
        gpus_per_node=gpu.devices_per_node,
        batch=case.batch,
        sequence=case.sequence,
        mem_bytes=gpu.memory_bytes,
        jobs=jobs,
    )

    def costs_of(one: study.Degrees) -> study.Costs:
        return study.Costs(*spread.costs(one.pipeline, one.tensor, one.data, one.microbatch_size))

    divided = (case.model.heads, case.model.kv_heads, case.model.ffn, case.sequence)
    ways = list(study.ways(question, case.model.layers + 2, divided))

    def say(number: int, found: study.Configuration | None) -> None:
        print(f"  {number}: {found and (found.degrees, found.step_ns / 1e9)}", file=sys.stderr)

    try:
        own = [way for way in ways if (way.pipeline, way.tensor, way.data) == case.degrees]
        theirs = study.advise(question, own, costs_of, say).configurations[0]
    except Infeasible:
        theirs = None
    found = study.advise(question, ways, costs_of, say)
    return {"ours": asdict(found), "theirs": theirs and asdict(theirs), "published_s": case.published_step_s}


HEADER = """# Advice against published choices

`optpipe advise` says which pipeline, tensor and data parallel degrees and which microbatch size are best for a model on
so many GPUs. This page asks it for configurations that others have published. It is written by
`python -m bench.advise`; no number here is typed in but the published degrees and rates.

## How it is found

Every way that divides GPUs, batch, heads and widths is estimated ([Estimates](ESTIMATES.md)): weights and gradients on
every replica, the optimizer's state shared out over the replicas, collectives of tensor parallelism within a node, the
exchange of gradients once per step as a ring that overlaps nothing. A step is at least the work of its microbatches
over its devices, and what `compile` proves of it under the GPU's memory. Ways are planned in the order of this bound,
until the next one is above the fifth best step: what was not planned cannot be among the five at this effort. Steps of
more than 4 microbatches per device (fewer above 22 devices) are planned with 4, and repeat their steady state.
Pipelines have 64 devices at most.

Not in it: context and expert parallelism, FSDP's gathering of weights in every microbatch, fp8, overlap of the
gradients' exchange with the last backwards, the optimizer's own time.

## Is theirs among our five, and what does ours promise over it

*theirs, planned*: our plan of their degrees, with the best microbatch, which the sources do not tell; *published*: the
step at the rate that they measured (Eq. 3 of the paper, whose operations include full recomputation). *Ours over
theirs* compares our plan of our best degrees with our plan of theirs.

| model | GPUs, batch | theirs (PP x TP x DP) | our best, microbatch | theirs among the five | ours, s \
| theirs, planned, s | ours over theirs | published, s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def shown(degrees: dict[str, int]) -> str:
    return f"{degrees['pipeline']} x {degrees['tensor']} x {degrees['data']}, {degrees['microbatch_size']}"


def page(answers: dict[str, dict]) -> str:  # type: ignore[type-arg]
    """Return docs/ADVISE.md."""
    text = HEADER
    for case in CASES:
        if case.name not in answers:
            continue
        found, theirs = answers[case.name]["ours"], answers[case.name]["theirs"]
        rows, published = found["configurations"], case.published_step_s
        degrees = [tuple(row["degrees"][key] for key in ("pipeline", "tensor", "data")) for row in rows]
        among = f"number {degrees.index(case.degrees) + 1}" if case.degrees in degrees else "no"
        own = " x ".join(map(str, case.degrees))
        best = rows[0]["step_ns"]
        text += (
            f"| {case.name} | {case.gpus} {case.gpu}, {case.batch} x {case.sequence} | {own} "
            f"| {shown(rows[0]['degrees'])} | {among} "
            f"| {best / 1e9:.2f} | {'nothing fits' if theirs is None else format(theirs['step_ns'] / 1e9, '.2f')} "
            f"| {'' if theirs is None else format(best / theirs['step_ns'] - 1, '+.1%')} "
            f"| {'' if published is None else format(published, '.2f')} |\n"
        )
    for case in CASES:
        if case.name in answers:
            text += section(case, answers[case.name]["ours"])
    left = ", ".join(one.name for one in CASES if one.name not in answers) or "None of the cases"
    return text + (
        f"\n## Not compared\n\n- {left}: not asked yet.\n"
        "- The tables of PipeOffload (pipeline against tensor parallel at 42.9B, 66.6B, 83.8B): "
        "their\n  configurations were not at hand when this page was written.\n"
    )


def section(case: Case, found: dict) -> str:  # type: ignore[type-arg]
    """Return the five of one case."""
    text = f"\n## {case.name}\n\n{case.source}. {found['considered']} ways, {found['too_large']} with too large "
    text += f"weights,\n{found['planned']} planned.\n\n"
    text += (
        "| PP x TP x DP, microbatch | stages | step, s | at least, s | peak, GB | limited by |\n| --- "
        + "| --- " * 5
        + "|\n"
    )
    for row in found["configurations"]:
        text += (
            f"| {shown(row['degrees'])} | {row['stages_per_device']} | {row['step_ns'] / 1e9:.2f} "
            f"| {row['bound_ns'] / 1e9:.2f} | {row['peak_bytes'] / 1e9:.1f} | {', '.join(row['limits'])} |\n"
        )
    return text


def main() -> None:
    """Ask, keep, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--page", action="store_true", help="write the page from what is kept")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    answers = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    for case in CASES:
        if not options.page and (options.only is None or case.name in options.only):
            print(case.name, file=sys.stderr)
            answers[case.name] = answer(case, options.jobs)
            ANSWERS.write_text(json.dumps(answers, indent=1) + "\n")
    PAGE.write_text(page(answers))


if __name__ == "__main__":
    main()
