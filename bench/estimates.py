"""How far `optpipe profile --model` is from published measurements.

    python -m bench.estimates [--fit] [-o docs/ESTIMATES.md]

Writes docs/ESTIMATES.md; `--fit` only prints the two shares that fit best. Needs torch, no GPU.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from optpipe_compiler.costs import gpus
from optpipe_compiler.costs.models import Architecture
from optpipe_compiler.documents import profile as documents
from optpipe_compiler.documents.files import write_atomically
from optpipe_compiler.documents.profile import Profile, value_of
from optpipe_torch.estimates import time as estimate_time
from optpipe_torch.estimates.estimate import BYTES_PER_PARAMETER, RESERVE_BYTES, EstimateOptions, count_layers, estimate

OUTPUT = Path(__file__).parent.parent / "docs" / "ESTIMATES.md"
A100 = gpus.load("a100-80gb")
MEASURED = Path(__file__).parent / "h100.json"
"""What `sh bench/gpu.sh` measured (docs/GPU.md): blocks of Llama's size in bf16 on an H100."""
OPS = ("forward", "backward_input", "backward_weight")
VOCAB = 50304

ZERO_BUBBLE: dict[str, dict[str, Any]] = {
    # Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241v1. sizes: Table 3 (hidden, heads, blocks per stage,
    # stages, microbatch size; the first and the last stage have one block less); times: Table 9 (microbatches: F, B,
    # which is our I, W, comm in ms); memory: Tables 4 and 11 (GB of 1F1B at this microbatch size and at twice that)
    "1.5B": {
        "sizes": (2304, 24, 3, 8, 6),
        "times": {
            24: (18.522, 18.086, 9.337, 0.601),
            32: (18.513, 18.086, 9.331, 0.626),
            64: (18.546, 18.097, 9.321, 0.762),
        },
        "memory": (30, 57),
    },
    "6.2B": {
        "sizes": (4096, 32, 4, 8, 3),
        "times": {
            24: (29.718, 29.444, 19.927, 0.527),
            32: (29.802, 29.428, 19.530, 0.577),
            64: (29.935, 29.621, 19.388, 0.535),
        },
        "memory": (39, 66),
    },
    "14.6B": {
        "sizes": (5120, 40, 3, 16, 1),
        "times": {
            48: (11.347, 11.248, 8.132, 0.377),
            64: (11.307, 11.254, 8.101, 0.379),
            128: (11.325, 11.308, 8.109, 0.378),
        },
        "memory": (32, 50),
    },
    "28.3B": {
        "sizes": (6144, 48, 2, 32, 1),
        "times": {
            96: (10.419, 10.207, 7.715, 0.408),
            128: (10.408, 10.204, 7.703, 0.408),
            256: (10.402, 10.248, 7.698, 0.460),
        },
        "memory": (43, 72),
    },
}
FITTED = ("1.5B", "6.2B")
"""The models whose times the shares are fitted on: those of one node. The others check them."""
SEQUENCES = (4096, 8192, 16384, 32768)
PIPE_OFFLOAD = {
    # Wan et al., PipeOffload, arXiv 2503.01328v2, Figure 1 left: k by hidden size and SEQUENCES
    4096: (1.70, 1.46, 1.15, 0.80),
    5120: (1.40, 1.23, 1.00, 0.72),
    6144: (1.19, 1.07, 0.88, 0.66),
    7168: (1.03, 0.94, 0.80, 0.61),
    8192: (0.92, 0.84, 0.72, 0.56),
    10240: (0.74, 0.69, 0.61, 0.49),
}
FLASH = {
    # Dao, FlashAttention-2, arXiv 2307.08691, Table 1: TFLOP/s per A100; sizes as in GPT-3 (layers, hidden), sequence
    "GPT3-1.3B 2k": (24, 2048, 2048, 196),
    "GPT3-1.3B 8k": (24, 2048, 8192, 220),
    "GPT3-2.7B 2k": (32, 2560, 2048, 205),
    "GPT3-2.7B 8k": (32, 2560, 8192, 225),
}


def gpt(hidden: int, heads: int, *, layers: int = 1, sequence: int = 1024, dropout: float = 0.1) -> Architecture:
    """Return a model of GPT-3's form."""
    return Architecture(
        kind="gpt2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=VOCAB,
        positions=sequence,
        qkv_bias=True,
        attention_dropout=dropout,
        residual_dropout=dropout,
        embedding_dropout=dropout,
    )


def zero_bubble_options(name: str, factor: int = 1) -> EstimateOptions:
    """Return the experiment: attention with its matrix kept, fp16, gradients added up by the matrix products."""
    hidden, heads, blocks, devices, batch = ZERO_BUBBLE[name]["sizes"]
    return EstimateOptions(
        model=replace(gpt(hidden, heads, layers=blocks * devices - 2), attention="math"),
        gpu=A100,
        devices=devices,
        sequence_length=1024,
        microbatch_size=batch * factor,
        dtype="fp16",
        accumulation="fused",
    )


@cache
def zero_bubble(name: str, factor: int = 1) -> Profile:
    """Return the estimate of an experiment, its microbatches `factor` times as large."""
    return estimate(zero_bubble_options(name, factor))


def off(estimated: float, published: float) -> str:
    """Return the error in percent of the published figure."""
    return f"{100 * (estimated / published - 1):+.1f}%"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shares_table() -> str:
    """Return the constants of the time model."""
    fitted, reached = "fitted on 1.5B and 6.2B below", A100.matmul_flops_per_s / A100.flops_per_s
    flash = "{:.0%} of an A100's peak; FlashAttention-2 reports up to {}"
    forward, backward = (estimate_time.SHARES[f"attention_{way}"] for way in ("forward", "backward"))
    rows = [
        (
            "matrix products",
            "the largest measured product (`matmul_flops_per_s`)",
            estimate_time.SHARES["matmul"],
            fitted,
        ),
        ("memory", "the data sheet's bandwidth", estimate_time.MEMORY_SHARE, fitted),
        ("flash attention, forward", "as matrix products", forward, flash.format(forward * reached, "73%")),
        ("flash attention, backward", "as matrix products", backward, flash.format(backward * reached, "63%")),
        ("links between GPUs", "the data sheet's bandwidth", estimate_time.LINK_SHARE, "assumed"),
    ]
    return table(["share", "of", "value", "where from"], [[a, b, f"{c:.2f}", d] for a, b, c, d in rows])


# -- times


def stage_ms(name: str) -> tuple[float, float, float, float]:
    """Return F, I, W of one device's blocks and a message between neighbours of one node, in ms."""
    profile, blocks = zero_bubble(name), ZERO_BUBBLE[name]["sizes"][2]
    block, entry = profile.layers[1], profile.machine.p2p[-1]
    times = (block.forward_ns, block.backward_input_ns, block.backward_weight_ns)
    forward, backward_input, backward_weight = (value_of(time) * blocks / 1e6 for time in times)
    assert entry.bytes_per_s is not None
    message = value_of(entry.latency_ns) / 1e6 + value_of(block.output_bytes) * 1e3 / value_of(entry.bytes_per_s)
    return forward, backward_input, backward_weight, message


def times_table() -> str:
    rows = []
    for name, case in ZERO_BUBBLE.items():
        ours = stage_ms(name)
        for microbatches, published in case["times"].items():
            cells = [f"{a:.2f} / {b:.2f} ({off(a, b)})" for a, b in zip(ours, published, strict=True)]
            rows.append([name, str(case["sizes"][3]), str(microbatches), *cells])
    return table(["model", "P", "M", "F", "I", "W", "message"], rows)


def measured_table() -> tuple[str, dict[str, float]]:
    """Return the measured layers beside their estimates, and by layer the largest error of a time in percent."""
    measured = documents.load(MEASURED)
    assert measured.model is not None
    estimated = estimate(
        EstimateOptions(
            model=msgspec.convert(measured.model.config, Architecture),
            gpu=gpus.load("h100-sxm"),
            devices=measured.machine.devices,
            sequence_length=measured.model.sequence_length,
            microbatch_size=measured.model.microbatch_size,
            dtype="bf16",
        )
    )
    rows: list[list[str]] = []
    errors: dict[str, list[float]] = defaultdict(list)
    for ours, theirs in zip(estimated.layers, measured.layers, strict=True):
        cells = [ours.name]
        for unit, fields in (
            (1e6, ("forward_ns", "backward_input_ns", "backward_weight_ns")),
            (1e9, ("saved_bytes", "captured_bytes", "backward_transient_bytes")),
        ):
            for field in fields:
                a, b = (value_of(getattr(layer, field)) / unit for layer in (ours, theirs))
                cells.append(f"{a:.2f} / {b:.2f} ({off(a, b)})" if b else f"{a:.2f} / {b:.2f}")
                if unit == 1e6 and b:
                    errors[ours.name].append(100 * abs(a / b - 1))
        rows.append(cells)
    head = ["layer", "F, ms", "I, ms", "W, ms", "kept after F, GB", "captured by I, GB", "transient in B, GB"]
    return table(head, rows), {name: max(found) for name, found in errors.items()}


def worst(part: slice) -> tuple[float, float]:
    """Return the largest error in percent of times on the fitted rows and on the others."""
    found: dict[bool, float] = {True: 0.0, False: 0.0}
    for name, case in ZERO_BUBBLE.items():
        for published in case["times"].values():
            for a, b in zip(stage_ms(name)[part], published[part], strict=True):
                found[name in FITTED] = max(found[name in FITTED], 100 * abs(a / b - 1))
    return found[True], found[False]


def fit() -> tuple[float, float]:
    """Return the shares of matrix products and of memory whose largest relative error on the FITTED models is least."""
    cases = [
        (count_layers(zero_bubble_options(name))["block"][1].work, ZERO_BUBBLE[name]["sizes"][2], published)
        for name in FITTED
        for published in ZERO_BUBBLE[name]["times"].values()
    ]

    def error(shares: tuple[float, float]) -> float:
        estimate_time.SHARES["matmul"], estimate_time.MEMORY_SHARE = shares
        return max(
            abs(estimate_time.work_ns(work[op], A100, 1) * blocks / 1e6 / time - 1)
            for work, blocks, published in cases
            for op, time in zip(OPS, published, strict=False)
        )

    kept = estimate_time.SHARES["matmul"], estimate_time.MEMORY_SHARE
    try:
        return min(((m / 100, h / 100) for m in range(80, 101) for h in range(40, 91)), key=error)
    finally:
        estimate_time.SHARES["matmul"], estimate_time.MEMORY_SHARE = kept


def flash_table() -> str:
    rows = []
    for name, (layers, hidden, sequence, published) in FLASH.items():
        options = EstimateOptions(
            model=gpt(hidden, hidden // 128, layers=layers, sequence=sequence, dropout=0.0),
            gpu=A100,
            devices=1,
            sequence_length=sequence,
            microbatch_size=8192 // sequence,
            accumulation="fused",
        )
        profile = estimate(options)
        taken = sum(value_of(x.forward_ns) + value_of(x.backward_ns or 0) for x in profile.expanded_layers()) / 1e9
        weights = 12 * layers * hidden**2 + VOCAB * hidden
        operations = 6 * sequence * weights + 12 * layers * hidden * sequence**2
        ours = operations * options.microbatch_size / taken / 1e12
        rows.append([name, f"{ours:.0f}", str(published), off(ours, published)])
    return table(["model", "estimated", "published", "error"], rows)


# -- bytes


def first_peak_gb(profile: Profile, blocks: int, devices: int) -> float:
    """Return the peak of 1F1B in GB of the device that holds most: device d keeps P - d microbatches."""
    embedding, block, head = profile.layers

    def peak(device: int) -> int:
        layers = [block] * (blocks - (device in (0, devices - 1)))
        layers += [embedding] * (device == 0) + [head] * (device == devices - 1)
        kept = sum(value_of(layer.static_bytes) + value_of(layer.saved_bytes) * (devices - device) for layer in layers)
        transient = max(value_of(layer.backward_transient_bytes) for layer in layers)
        return kept + transient + 2 * value_of(block.output_bytes)

    return max(peak(device) for device in range(devices)) / 1e9


def memory_table() -> str:
    rows = []
    for name, case in ZERO_BUBBLE.items():
        _, _, blocks, devices, batch = case["sizes"]
        ours = [first_peak_gb(zero_bubble(name, factor), blocks, devices) for factor in (1, 2)]
        for factor, a, b in zip((1, 2), ours, case["memory"], strict=True):
            rows.append([name, str(batch * factor), f"{a:.1f}", str(b), off(a, b)])
        grown = case["memory"][1] - case["memory"][0]
        rows.append(
            [name, f"{batch} to {2 * batch}", f"{ours[1] - ours[0]:.1f}", str(grown), off(ours[1] - ours[0], grown)]
        )
    return table(["model", "microbatch", "estimated GB", "published GB", "error"], rows)


def per_token_table() -> str:
    """Compare what a block keeps with the formulas that the papers use, in bytes per token and hidden unit."""
    rows = []
    for name, case in ZERO_BUBBLE.items():
        hidden, heads, *_, batch = case["sizes"]
        block = zero_bubble(name).layers[1]
        unit = 1024 * batch * hidden
        saved, residue = (value_of(cost or 0) / unit for cost in (block.saved_bytes, block.residue_bytes))
        formula = 34 + 5 * heads * 1024 / hidden
        rows.append([f"{name}, kept after F", f"{saved:.2f}", f"34 + 5as/h = {formula:.2f}", off(saved, formula)])
        rows.append([f"{name}, kept between I and W", f"{residue:.2f}", "32", off(residue, 32)])
    options = EstimateOptions(model=gpt(4096, 32, sequence=4096), gpu=A100, dtype="fp16")
    saved = value_of(estimate(options).layers[1].saved_bytes) / (4096 * 4096)
    rows.append(["flash attention, kept after F", f"{saved:.2f}", "34", off(saved, 34)])
    return table(["block", "estimated", "published", "error"], rows)


@cache
def ratio(hidden: int, sequence: int) -> float:
    """Return k: the round trip of 20bsh bytes at 15 GB/s over our F + I + W of one block."""
    model = gpt(hidden, hidden // 128, sequence=sequence, dropout=0.0)
    options = EstimateOptions(model=model, gpu=A100, sequence_length=sequence, accumulation="fused")
    block = estimate(options).layers[1]
    compute = sum(value_of(time) for time in (block.forward_ns, block.backward_input_ns, block.backward_weight_ns))
    return 2 * 20 * sequence * hidden / 15e9 / (compute / 1e9)


def causal_formula(hidden: int, sequence: int) -> float:
    """Return PipeOffload's formula (1) at 220 TFLOP/s and 15 GB/s with half of the operations of attention."""
    return 10 / (3 * (6 * hidden + sequence / 2)) * 220e12 / 15e9


def ratio_table() -> str:
    rows = []
    for hidden, published in PIPE_OFFLOAD.items():
        pairs = [(ratio(hidden, sequence), k) for sequence, k in zip(SEQUENCES, published, strict=True)]
        rows.append([str(hidden), *(f"{a:.2f} / {b:.2f} ({off(a, b)})" for a, b in pairs)])
    return table(["hidden", *map(str, SEQUENCES)], rows)


TEXT = """# How good the estimates are

`optpipe profile --model` derives a profile from a model's configuration and a GPU's data sheet. This page compares it
with published measurements. It is written by `python -m bench.estimates`; no number here is typed in but the published.
Every cell is estimated / published (error).

## How numbers come about

**Bytes and operations** are counted: the layers of `optpipe_torch/models/layers.py` run on torch's meta device,
forwards and backwards, split as the runtime splits them. Operations come from torch's own table
(`torch.utils.flop_counter`; causal flash attention at half of full attention), kept bytes from what autograd saves,
each storage once, without weights.

**Times** are a roofline per kernel: the longer of operations / rate and bytes / bandwidth, at least {launch:.0f} us.

{shares}

Shares are fitted on the A100 alone. For other GPUs the same shares are applied to their own data sheet. `python -m
bench.estimates --fit` fits the two shares anew; it says {fitted[0]:.2f} and {fitted[1]:.2f}.

**Taken for granted**: {per_parameter} bytes per parameter (16-bit weight and gradient, fp32 weight, two fp32 moments of
Adam), {reserve:.0f} GB reserved per GPU, no overlap within an op, no time per op beyond its kernels. With tensor
parallelism all figures are those of one GPU: heads, feed-forward width and vocabulary divided, hidden states between
them split along the sequence, gathered inputs kept for the weight gradient (with selective recompute: gathered again),
collectives not overlapped. Experts get equal numbers of tokens. Sliding windows are not modelled: attention is over the
whole sequence.

## Times of a stage (Zero Bubble Pipeline Parallelism, Table 9; ms)

Qi et al., arXiv 2401.10241v1: GPT-3 like models in Megatron-LM on A100, sequence 1024, 3, 4, 3 and 2 blocks per stage.
Estimated with `--attention math --accumulation fused --dtype fp16`, dropout 0.1. The paper's B is our I.

{times}

Aim: within 15%. F, I, W: worst {fitted_worst:.1f}% on 1.5B and 6.2B (fitted: the least largest error), and
{other_worst:.1f}% on 14.6B and 28.3B (not fitted). Messages do not get there: the paper's are {slower:.0f} to
{slowest:.0f} times what NVLink needs for those bytes, so they hold more than the copy (launch, waiting, and, for 16 and
32 GPUs, the network).

## Layers of Llama's size on an H100 (measured by `sh bench/gpu.sh`)

[On GPUs](GPU.md) has the machine. Hidden 4096, 4 x 4096 tokens, vocabulary 32000, bf16, each cell estimated / measured;
the runtime's own layers with torch's kernels, nothing fused. Not fitted.

{measured}

Bytes that stay are right. A block's times are off by {block_worst:.1f}% at most, the head's by {head_worst:.1f}%.

## Rate of whole training steps with flash attention (FlashAttention-2, Table 1; TFLOP/s)

Dao, arXiv 2307.08691: GPT-3 models on 8 A100; not fitted. Estimated at 8192 tokens per microbatch (the paper does not
say its own), without optimizer step and data-parallel traffic; operations by the paper's formula.

{flash}

## Memory of 1F1B (Zero Bubble Pipeline Parallelism, Tables 4 and 11; GB)

The fullest device: weights, optimizer state, activations of its microbatches in flight, the largest transient, two
messages; no reserve. The published figures are whole GB, so that differences of two are uncertain by one in 18 to 29.

{memory_table}

## Bytes of one block, per token and hidden unit

Published: 34 + 5as/h after F (Korthikanti et al., arXiv 2205.05198, used by the zero-bubble authors for their
schedules), 32 between I and W (the zero-bubble authors' generator), 34 with flash attention (PipeOffload, Appendix C).

{per_token}

Between I and W torch keeps more than the 32 of the formula, which counts inputs and output gradients of the four
linear layers: the inputs of both norms and the gradients that enter them stay, too, as their weights need them. That
is what `optpipe run` holds, so it is what is planned.

## Transfer over compute (PipeOffload, Figure 1 left)

Wan et al., arXiv 2503.01328v2: k, the round trip of a block's activation to the host over its forward and backward. The
published figures are themselves a formula (220 TFLOP/s, 15 GB/s, full attention). Here the transfer is theirs (20bsh
bytes at 15 GB/s) and the compute is ours. Rows: hidden size; columns: sequence length.

{ratios}

Ours grow with the sequence against the published because causal flash attention does half of the operations that the
formula counts: {ratio_close} of {ratio_count} are within 15%. Against their formula with attention at half,
{causal_close} are, and the worst is off by {causal_worst:.0f}%.

## Not compared

- PipeOffload's activation memory (Figure 15): its layers recompute norms, GELU and dropout, which ours do not.
- PipeOffload's slowdowns (Figure 1 right) are of whole schedules.
- Other GPUs than an A100 and an H100: no measurements per stage were found.
"""


def report() -> str:
    """Return docs/ESTIMATES.md."""
    fitted_worst, other_worst = worst(slice(0, 3))
    measured, off_by = measured_table()
    slower = [p[3] / stage_ms(name)[3] for name, case in ZERO_BUBBLE.items() for p in case["times"].values()]
    errors = [ratio(h, s) / k - 1 for h, ks in PIPE_OFFLOAD.items() for s, k in zip(SEQUENCES, ks, strict=True)]
    causal = [ratio(h, s) / causal_formula(h, s) - 1 for h in PIPE_OFFLOAD for s in SEQUENCES]
    return TEXT.format(
        launch=estimate_time.LAUNCH_NS / 1e3,
        shares=shares_table(),
        fitted=fit(),
        per_parameter=BYTES_PER_PARAMETER,
        reserve=RESERVE_BYTES / 1e9,
        times=times_table(),
        measured=measured,
        block_worst=off_by["block"],
        head_worst=off_by["head"],
        fitted_worst=fitted_worst,
        other_worst=other_worst,
        slower=min(slower),
        slowest=max(slower),
        flash=flash_table(),
        memory_table=memory_table(),
        per_token=per_token_table(),
        ratios=ratio_table(),
        ratio_close=sum(abs(error) <= 0.15 for error in errors),
        ratio_count=len(errors),
        causal_close=sum(abs(error) <= 0.15 for error in causal),
        causal_worst=100 * max(abs(error) for error in causal),
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="only print the shares that fit best")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    if arguments.fit:
        print("matmul {:.2f}, memory {:.2f}".format(*fit()))
        return
    write_atomically(arguments.output, report())
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
