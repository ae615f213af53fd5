"""`optpipe advise` against the degrees of parallelism that others have published: writes docs/ADVISE.md.

`python -m bench.advise` asks for every published configuration of CASES (an hour on two cores), `--only NAME` for
some; answers are kept in bench/advise.json with their commit, so that the page can be written again with `--page`.
Plans are reproducible: they do not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs

from optpipe_compiler.costs import gpus
from optpipe_compiler.costs.models import Architecture
from optpipe_compiler.documents.profile import selected
from optpipe_compiler.errors import Infeasible
from optpipe_compiler.study import advise as study
from optpipe_torch.estimates.estimate import EstimateOptions
from optpipe_torch.estimates.spread import Spread

if TYPE_CHECKING:
    from optpipe_compiler.costs.gpus import Gpu

ROOT = Path(__file__).parent.parent
ANSWERS = ROOT / "bench" / "advise.json"
PAGE = ROOT / "docs" / "ADVISE.md"


CHECKPOINTED = "interleaved-1f1b-recompute"
"""Interleaved 1F1B with full recomputation."""
ALONE = "1f1b-recompute"
"""The same without a pipeline."""
PEAK_FLOPS = 312e12
"""Of an A100, in 16 bits."""
PARTS = ("ours", "ours_as_run", "theirs", "theirs_as_run", "rival", "rival_as_run")


@dataclass(frozen=True)
class Case:
    """A published configuration."""

    name: str
    source: str
    model: Architecture
    gpu: Gpu
    gpus: int
    batch: int
    sequence: int
    pipeline: int
    tensor: int
    tflops: float | None = None
    """Per GPU, as published, by the source's formula."""
    tokens_per_s: float | None = None
    """Per GPU, as published."""
    rival: tuple[int, int] | None = None
    """Pipeline and tensor parallel degree with which the source compares its own."""
    schedule: str = CHECKPOINTED
    """What the source ran."""
    is_light: bool = False
    """Whether the source's layers always have selective recompute: norms, activations, gathered inputs."""
    sizes: tuple[int, ...] = (1, 2, 4)
    """Of microbatches, for the source's degrees."""
    mfu: float | None = None
    """As published, of PEAK_FLOPS, by the formula of the source's repository."""
    links: Literal["pairs", "none"] = "none"

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Pipeline, tensor, data."""
        return self.pipeline, self.tensor, self.gpus // self.pipeline // self.tensor

    @property
    def published_step_s(self) -> float | None:
        """What a step takes at the published rate: Narayanan et al., Eq. 3 (recomputation included); of MFU,
        Megatron-Core's num_floating_point_operations (full attention, nothing recomputed)."""
        m, tokens = self.model, self.batch * self.sequence
        if self.tokens_per_s is not None:
            return tokens / (self.tokens_per_s * self.gpus)
        if self.mfu is not None:
            per_layer = 1 + m.kv_heads / m.heads + self.sequence / m.hidden + m.ffn / m.hidden
            flops = 12 * tokens * m.layers * m.hidden**2 * (per_layer + m.vocab / (2 * m.layers * m.hidden))
            return flops / (self.mfu * PEAK_FLOPS * self.gpus)
        if self.tflops is None:
            return None
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


def grouped(layers: int, hidden: int, heads: int, sequence: int) -> Architecture:
    """PipeOffload's GPT with dropout, flash attention and 8 groups of queries. The paper does not tell its vocabulary:
    its six models have the parameters that it says with 32,000."""
    return replace(
        gpt(layers, hidden, heads), kv_heads=8, vocab=32000, positions=sequence, attention="flash"
    )  # fmt: skip


A100, H100 = gpus.load("a100-80gb"), gpus.load("h100-sxm")
H100_96 = structs.replace(H100, name="h100 96 GB", memory_bytes=96 * 10**9, memory_bytes_per_s=2_400_000_000_000)
"""torchtitan's: HBM2e, 500 W; what its matrix products reach under this limit is not known, and taken as without."""
MEGATRON = "Narayanan et al., arXiv:2104.04473, Table 1"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
OFFLOAD = "Wan et al., arXiv:2503.01328 (PipeOffload), Table 2 and Figure 11"
PURE: dict[str, Any] = {"rival": (4, 8), "schedule": "po-f", "links": "pairs", "is_light": True, "sizes": (1,)}
"""Microbatches of one are those of its repository's script (examples/pretrain_offload.sh)."""
CASES = [
    Case("18.4B", MEGATRON, gpt(40, 6144, 48), A100, 256, 1024, 2048, 1, 8, tflops=135),
    Case("39.1B", MEGATRON, gpt(48, 8192, 64), A100, 512, 1536, 2048, 2, 8, tflops=138),
    Case("76.1B", MEGATRON, gpt(60, 10240, 80), A100, 1024, 1792, 2048, 4, 8, tflops=140),
    Case("145.6B", MEGATRON, gpt(80, 12288, 96), A100, 1536, 2304, 2048, 8, 8, tflops=148),
    Case(
        "42.9B", f"{OFFLOAD}; rate: Figure 15", grouped(62, 8192, 64, 16384), A100, 32, 256, 16384, 32, 1,
        mfu=0.65, **PURE,
    ),
    Case("66.6B", OFFLOAD, grouped(62, 10240, 80, 16384), A100, 32, 256, 16384, 32, 1, **PURE),
    Case("83.8B", OFFLOAD, grouped(78, 10240, 80, 8192), A100, 32, 256, 8192, 32, 1, **PURE),
    Case(
        "Llama 3.1 70B", f"{TITAN}, Table 4", llama(80, 8192, 64, 28672), H100_96, 256, 512, 8192, 1, 8,
        tokens_per_s=876,
    ),
    Case(
        "Llama 3.1 405B", f"{TITAN}, Table 5", llama(126, 16384, 128, 53248), H100_96, 512, 256, 8192, 8, 8,
        tokens_per_s=128,
    ),
]  # fmt: skip


class Asked:
    """One case's questions, by part: each is a row, rows, or a whole answer of `advise`; None: nothing fits."""

    def __init__(self, case: Case, jobs: int) -> None:
        gpu = case.gpu
        options = EstimateOptions(
            model=case.model, gpu=gpu, name=case.name, sequence_length=case.sequence, shared_links=case.links
        )
        self.case = case
        self.spread = Spread(options, case.gpus)
        self.question = study.Question(
            gpus=case.gpus,
            gpus_per_node=gpu.devices_per_node,
            batch=case.batch,
            sequence=case.sequence,
            mem_bytes=gpu.memory_bytes,
            jobs=jobs,
        )
        divided = (case.model.heads, case.model.kv_heads, case.model.ffn, case.sequence)
        self.ways = list(study.ways(self.question, case.model.layers + 2, divided))

    def part(self, name: str, ours: dict[str, Any] | None) -> dict[str, Any] | None:
        """Answer one of PARTS; `ours`: what the first of them is."""
        case = self.case
        if name == "ours":
            return self.advice(self.ways)
        pipeline, tensor = case.pipeline, case.tensor
        if name == "ours_as_run" and ours is not None:
            pipeline, tensor = (ours["configurations"][0]["degrees"][key] for key in ("pipeline", "tensor"))
        if name.startswith("rival"):
            if case.rival is None:
                return None
            pipeline, tensor = case.rival
        sizes = self.question.microbatch_sizes if name.startswith("ours") else case.sizes
        own = [way for way in self.ways if (way.pipeline, way.tensor) == (pipeline, tensor)]
        own = [way for way in own if way.microbatch_size in sizes]
        ran = {"ours": case.schedule, "theirs": case.schedule, "rival": "interleaved-1f1b"}
        method = ran[name.removesuffix("_as_run")] if name.endswith("_as_run") else None
        found = self.advice(own, method if method is None or pipeline > 1 else ALONE)
        return found and found["configurations"][0]

    def advice(self, some: list[study.Degrees], method: str | None = None) -> dict[str, Any] | None:
        costs_of = self.light_costs_of if self.case.is_light and method is not None else self.costs_of
        try:
            found = study.advise(replace(self.question, method=method), some, costs_of, say) if some else None
        except Infeasible as error:
            print(f"  {error}", file=sys.stderr)
            return None
        return found and asdict(found)

    def costs_of(self, one: study.Degrees) -> study.Costs:
        return study.Costs(*self.spread.costs(one.pipeline, one.tensor, one.data, one.microbatch_size))

    def light_costs_of(self, one: study.Degrees) -> study.Costs:
        """The costs of layers that cannot but have selective recompute."""
        costs = self.costs_of(one)
        layers = costs.profile.layers
        light = [structs.replace(each, selective=None) for each in selected(layers, range(len(layers)))]
        profile = structs.replace(costs.profile, layers=light)
        return replace(costs, profile=profile, tensor_ns=costs.tensor_ns + costs.again_ns)


def say(number: int, found: study.Configuration | None) -> None:
    print(f"  {number}: {found and (found.degrees, found.step_ns / 1e9)}", file=sys.stderr)


HEADER = """# Advice against published choices

`optpipe advise` says which pipeline, tensor and data parallel degrees, which microbatch size and how many slices are
best for a model on so many GPUs. This page asks it for configurations that others have published. It is written by
`python -m bench.advise`; no number here is typed in but the published degrees and rates. Plans are reproducible, and
each section names the commit that made them.

## How it is found

Every way that divides GPUs, batch, heads and widths is estimated ([Estimates](ESTIMATES.md)): weights and gradients on
every replica, the optimizer's state shared out over the replicas, collectives of tensor parallelism within a node, the
exchange of gradients once per step as a ring that overlaps nothing. A step is at least the work of its microbatches
over its devices, and what `compile` proves of it under the GPU's memory. Ways are planned in the order of this bound,
until the next one is above the fifth best step: what was not planned cannot be among the five at this effort. Steps of
more than 4 microbatches per device (fewer above 22 devices) are planned with 4, and repeat their steady state.
Pipelines have 64 devices at most. Here sequences stay whole, as in the sources; `advise` tries 2 and 4 slices, too.

Not in it: context and expert parallelism, FSDP's gathering of weights in every microbatch, fp8, overlap of
collectives with compute (torchtitan's AsyncTP) and of the gradients' exchange with the last backwards, the optimizer's
own time, a limit of the hosts' memory.

## Is theirs among our five, and what does ours promise over it

*theirs, planned*: our plan of their degrees with the best microbatch of 1, 2 and 4, which the sources do not tell
(torchtitan's 70B runs its 16 sequences at once); *published*: the step at the rate that they measured, with full
recomputation (Megatron-LM: Eq. 3 of the paper; torchtitan: in fp8). *Ours over theirs* compares our plan of our best
degrees with our plan of theirs: both are estimates.

| model | GPUs, batch | theirs (PP x TP x DP) | our best, microbatch | theirs among the five | ours, s \
| theirs, planned, s | ours over theirs | published, s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""

READING = """
Estimated stages miss measured ones ([Estimates](ESTIMATES.md)) by more than most of these differences, and not equally
for all degrees: ways that differ by a few percent are equal, as far as estimates can tell, and worth trying both. So it
is with 42.9B, whose published degrees fall short of the fifth row by less than a percent.

Where theirs is not among the five, it stands below them in the tables. What those of Megatron-LM and torchtitan have in
common: tensor parallelism over the whole node keeps the pipeline short, and its collectives take more time than the
longer pipelines of our plans idle. Two errors of the estimates speak for ours: messages between stages took several
times as long where they were measured, which a longer pipeline feels more, and offloads have the hosts' memory without
limit. A source's degrees are also those that suit its schedule: 1F1B with full recomputation needs less memory and
idles more in long pipelines.
"""

AS_RUN = """
## With the schedule that they ran

A source's degrees are good for the schedule that it ran. Here theirs and ours run as the source did: Megatron-LM's and
torchtitan's with interleaved 1F1B and full recomputation, without a pipeline with full recomputation; PipeOffload's
with all activations offloaded (po-f).

| model | ours (PP x TP x DP, microbatch), s | theirs, s | ours over theirs: so | planned | theirs over published \
| commit |
| --- | --- | --- | --- | --- | --- | --- |
"""

AS_RUN_READING = """
The degrees differ as much so as with our plans: what ours promise over theirs comes from the estimated costs of the
degrees, above all from collectives that nothing overlaps, and not from the plans. Megatron-LM's steps took longer than
estimated; torchtitan's ran in fp8 with overlapped collectives, which works against the estimates' other errors.
"""

RIVALS = """
## Pure pipeline parallelism against tensor parallelism

PipeOffload's Figure 11 compares its schedule on 32 devices (po-f, all activations offloaded) with tensor parallelism of
8 and interleaved 1F1B on 4, and finds pure pipelines 12 to 19% faster (section 5.4). *As they ran it*: with these
schedules, and with layers that always have selective recompute, as theirs do (Appendix C); *planned*: with ours, on
both sides. Pairs of GPUs share a host link, as in the paper; microbatches are one sequence. *GB*: the most on a device,
weights and all. *Published*: the step at the MFU of po-f in Figure 15, which has numbers for 42.9B alone; Figure 11 is
a drawing.

| model | 32 x 1 x 1: as they ran it, s (GB) | published, s | planned, s (GB) | 4 x 8 x 1: as they ran it, s (GB) \
| planned, s (GB) | pure pipeline faster by: as they ran it | planned | commit |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""

RIVALS_READING = """
42.9B is as the paper says, and 66.6B nearly, planned or as they ran it. 83.8B is not: embedding, head and 78 blocks are
80 layers on 32 devices, of which the fullest has 3 where 2.5 were even, and a step takes a fifth longer than its work;
on 4 devices they divide evenly.
The paper does not say how it cut this model.
"""

NOTHING = "nothing fits"
RUN = {"theirs", "theirs_as_run", "rival", "rival_as_run"}


def shown(degrees: dict[str, int]) -> str:
    return f"{degrees['pipeline']} x {degrees['tensor']} x {degrees['data']}, {degrees['microbatch_size']}"


def seconds(row: dict[str, Any] | None) -> str:
    return NOTHING if row is None else f"{row['step_ns'] / 1e9:.2f}"


def held(row: dict[str, Any] | None) -> str:
    """Return the step and what the fullest device holds."""
    return NOTHING if row is None else f"{seconds(row)} ({row['peak_bytes'] / 1e9:.1f})"


def published(case: Case) -> str:
    """Return the published step in s."""
    return "" if case.published_step_s is None else f"{case.published_step_s:.2f}"


def commits(answer: dict[str, Any], *parts: str) -> str:
    """Return at which commits the parts of a case were answered."""
    return ", ".join(dict.fromkeys(answer["commits"][part] for part in parts))


def over(row: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """Return by how much the first takes longer."""
    return "" if row is None or other is None else f"{row['step_ns'] / other['step_ns'] - 1:+.1%}"


def among(case: Case, rows: list[dict[str, Any]], theirs: dict[str, Any] | None) -> str:
    """Return the place of the published degrees among the rows, or how far behind the last they are."""
    degrees = [tuple(row["degrees"][key] for key in ("pipeline", "tensor", "data")) for row in rows]
    if case.degrees in degrees:
        return f"number {degrees.index(case.degrees) + 1}"
    return "no" if theirs is None else f"no, {theirs['step_ns'] / rows[-1]['step_ns'] - 1:.2%} behind the last"


def page(answers: dict[str, dict[str, Any]]) -> str:
    """Return docs/ADVISE.md."""
    text = HEADER
    known = [case for case in CASES if {"ours", "theirs"} <= set(answers.get(case.name, {}))]
    for case in known:
        answer = answers[case.name]
        rows, theirs = answer["ours"]["configurations"], answer["theirs"]
        text += (
            f"| {case.name} | {case.gpus} {case.gpu.name}, {case.batch} x {case.sequence} "
            f"| {' x '.join(map(str, case.degrees))} | {shown(rows[0]['degrees'])} | {among(case, rows, theirs)} "
            f"| {seconds(rows[0])} | {seconds(theirs)} | {over(rows[0], theirs)} "
            f"| {published(case)} |\n"
        )
    text += READING
    text += as_run(
        [(case, one) for case in known if set(one := answers[case.name]) >= {"ours_as_run", "theirs_as_run"}]
    )
    text += rivals([(case, one) for case in CASES if set(one := answers.get(case.name, {})) >= RUN and case.rival])
    for case in known:
        text += section(case, answers[case.name])
    left = [case.name for case in CASES if case not in known]
    return text + (f"\n## Not compared\n\n{', '.join(left)}: our best is not asked for yet.\n" if left else "")


def as_run(answers: list[tuple[Case, dict[str, Any]]]) -> str:
    """Return what ours and theirs take with the published schedule."""
    text = AS_RUN if answers else ""
    for case, answer in answers:
        ours, theirs, step_s = answer["ours_as_run"], answer["theirs_as_run"], case.published_step_s
        planned = over(answer["ours"]["configurations"][0], answer["theirs"])
        text += (
            f"| {case.name} | {placed(ours)} | {placed(theirs)} | {over(ours, theirs)} | {planned} "
            f"| {'' if None in (step_s, theirs) else format(theirs['step_ns'] / 1e9 / step_s - 1, '+.1%')} "
            f"| {commits(answer, 'ours_as_run', 'theirs_as_run')} |\n"
        )
    return text + (AS_RUN_READING if answers else "")


def placed(row: dict[str, Any] | None) -> str:
    """Return degrees and step."""
    return NOTHING if row is None else f"{shown(row['degrees'])}: {seconds(row)}"


def rivals(answers: list[tuple[Case, dict[str, Any]]]) -> str:
    """Return what pure pipelines are worth."""
    text = RIVALS if answers else ""
    for case, found in answers:
        run, planned, rival_run, rival = (found[name] for name in ("theirs_as_run", "theirs", "rival_as_run", "rival"))
        text += (
            f"| {case.name} | {held(run)} | {published(case)} | {held(planned)} | {held(rival_run)} | {held(rival)} "
            f"| {over(rival_run, run)} | {over(rival, planned)} | {commits(found, *sorted(RUN))} |\n"
        )
    return text + (RIVALS_READING if answers else "")


def section(case: Case, answer: dict[str, Any]) -> str:
    """Return the five of one case, and theirs where it is not among them."""
    found, theirs = answer["ours"], answer["theirs"]
    text = f"\n## {case.name}\n\n{case.source}. {found['considered']} ways, {found['too_large']} with too large "
    text += f"weights,\n{found['planned']} planned; at commit {commits(answer, 'ours', 'theirs')}.\n\n"
    text += (
        "| PP x TP x DP, microbatch | stages | step, s | at least, s | peak, GB | limited by |\n| --- "
        + "| --- " * 5
        + "|\n"
    )
    rows = found["configurations"]
    for row in rows:
        text += line(row, shown(row["degrees"]))
    if theirs is not None and among(case, rows, theirs).startswith("no"):
        text += line(theirs, f"theirs: {shown(theirs['degrees'])}")
    return text


def line(row: dict[str, Any], name: str) -> str:
    return (
        f"| {name} | {row['stages_per_device']} | {row['step_ns'] / 1e9:.2f} "
        f"| {row['bound_ns'] / 1e9:.2f} | {row['peak_bytes'] / 1e9:.1f} | {', '.join(row['limits'])} |\n"
    )


def commit() -> str:
    """Return the commit that answers, with a plus where more than pages and answers was changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!bench/*.json")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def main() -> None:
    """Ask, keep, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--page", action="store_true", help="write the page from what is kept")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    options = parser.parse_args()
    answers = json.loads(options.answers.read_text()) if options.answers.exists() else {}
    for case in CASES:
        if not options.page and (options.only is None or case.name in options.only):
            asked = Asked(case, options.jobs)
            kept = answers.setdefault(case.name, {})
            for part in options.part or PARTS:
                print(f"{case.name}: {part}", file=sys.stderr)
                kept[part] = asked.part(part, kept.get("ours"))
                kept.setdefault("commits", {})[part] = commit()
                options.answers.write_text(json.dumps(answers, indent=1) + "\n")
    PAGE.write_text(page(answers))


if __name__ == "__main__":
    main()
