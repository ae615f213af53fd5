"""What each schedule to compare with is, in words and formulas; `compile --list-methods` and docs/METHODS.md show it.

A formula is in the symbols of SYMBOLS. It holds for stages of equal cost and messages of no time, and is checked
against the machine by tests/test_methods.py. Where a paper gives none, words say what it claims or what decides.
"""

from __future__ import annotations

import re
from typing import NamedTuple

SYMBOLS = {
    "P": "devices",
    "M": "microbatches of a step",
    "v": "stages of a device",
    "n": "slices of a microbatch, of equal time",
    "F, I, W, B": "forward, input gradient, weight gradient and both, of all stages of a device, one microbatch",
    "bubble": "idle time of a device",
    "memory": "of the fullest device, in activations of all its stages for one microbatch",
}

CITATIONS = {
    "arXiv:1811.06965": "Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    "arXiv:2006.09503": "Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training",
    "arXiv:2104.04473": "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters",
    "arXiv:2211.05953": "Lamy-Poirier, Breadth-First Pipeline Parallelism",
    "arXiv:2308.15762": "Liu et al., Hanayo: Harnessing Wave-like Pipeline Parallelism",
    "arXiv:2401.10241": "Qi et al., Zero Bubble Pipeline Parallelism",
    "arXiv:2405.15362": "Qi et al., Pipeline Parallelism with Controllable Memory",
    "arXiv:2503.01328": "Wan et al., PipeOffload: Improving Scalability of Pipeline Parallelism",
    "arXiv:2406.03488": "Sun et al., Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Models",
    "arXiv:2504.14519": "Li et al., SlimPipe: Memory-Thrifty and Efficient Pipeline Parallelism for Long-Context LLMs",
    "github.com/deepseek-ai/DualPipe": "DeepSeek, DualPipe",
    "Megatron-LM": "NVIDIA, Megatron-LM: activation recomputation",
    "torch": "PyTorch, torch.distributed.pipelining: ScheduleInterleavedZeroBubble",
    "torchtune": "PyTorch, torchtune: OffloadActivations; TransformerEngine has the same as CPU offloading",
}
"""Whose the sources of METHODS are."""


class Description(NamedTuple):
    """Of one method: what it does, its bubble and its memory, each a formula or words."""

    says: str
    bubble: str
    memory: str


_GROUPS = "(P - 1) * (F + I) / v + (P - {g}) * (v - 1) * F / v"
_GROUPED = "({g} * (v - 1) + P) / v"
_HALF, _MIDDLE = "ceil(P / 2)", "ceil(3 * P / 4)"


def _streamed(says: str, order: str, more: str = "") -> Description:
    return Description(
        f"{says} with every activation copied to the host by hooks as soon as it is there, and back in time.",
        f"as {order} where all activations fit through the link",
        f"what is on its way to the host and back{more}",
    )


DESCRIPTIONS = {
    "gpipe": Description("All forwards, then all backwards.", "(P - 1) * (F + B)", "M"),
    "gpipe-recompute": Description(
        "GPipe as its paper has it: every forward is run again right before its backward.",
        "(P - 1) * (F + B)",
        "1",
    ),
    "1f1b": Description(
        "PipeDream-Flush: device d runs P - d - 1 forwards, then a forward and a backward in turn.",
        "(P - 1) * (F + B)",
        "min(M, P)",
    ),
    "interleaved-1f1b": Description(
        "1F1B on a loop of stages, in groups of P microbatches, as Megatron-LM runs it; M is a multiple of P.",
        "(P - 1) * (F + B) / v",
        "P + (P - 1) / v",
    ),
    "bfs": Description(
        "Breadth first: each stage of a loop takes all microbatches before the next.",
        "(P - 1) * (F + B) / v",
        "M",
    ),
    "hanayo": Description(
        "Waves: a microbatch goes down and up the devices v / 2 times.",
        "falls with the number of waves",
        "at most P",
    ),
    "zb-h1": Description(
        "1F1B with split backwards; weight gradients that are put off fill the end.",
        "(P - 1) * (F + I - W)",
        "P",
    ),
    "zb-h2": Description(
        "As ZB-H1, with enough forwards ahead to leave no gap.",
        "none between a device's first and last op where F = I = W",
        "2 * P - 1",
    ),
    "zb-1p": Description(
        "The zero-bubble heuristic on the true costs, with the memory of 1F1B.",
        "(P - 1) * (F + I - W) where F = I = W",
        "P",
    ),
    "zb-2p": Description(
        "The zero-bubble heuristic on the true costs, with twice the memory of 1F1B.",
        "none between a device's first and last op where F = I = W",
        "2 * P",
    ),
    "zb-memory-limited": Description(
        "The zero-bubble heuristic on the true costs, with what memory the cap leaves.",
        "the smaller, the more memory",
        "what the cap allows",
    ),
    "zbv": Description(
        "Zero bubble on a V of two stages a device: the memory of 1F1B, alike on all devices.",
        "none between a device's first and last op where F = I = W",
        "P",
    ),
    "v-half": Description(
        "A building block on a V that is repeated for each microbatch, with half the memory of 1F1B.",
        "at most about half of 1F1B's where F = I = W",
        "(P + 2) // 2",
    ),
    "v-min": Description(
        "A building block on a V that is repeated for each microbatch, with a third of the memory of 1F1B.",
        "at most about two thirds of 1F1B's where F = I = W",
        "(P + 4) // 3",
    ),
    "dualpipev": Description(
        "DualPipe cut in half: a V, here without its overlap of a forward and a backward on one device.",
        "(P - 1) * (F + I - W) / v where F = I = W",
        "P + 1 / 2",
    ),
    "gis": Description(
        "Interleaved 1F1B with split backwards and half the extra forwards ahead.",
        "(P - 1) * (F + I) / v",
        "P",
    ),
    "gis-m": Description(
        "GIS in groups of ceil(3 P / 4) microbatches, half-way between GIS and GIS-H.",
        _GROUPS.format(g=_MIDDLE) + " where groups are whole",
        _GROUPED.format(g=_MIDDLE),
    ),
    "gis-h": Description(
        "GIS in groups of ceil(P / 2) microbatches: about half the memory for a somewhat larger bubble.",
        _GROUPS.format(g=_HALF) + " where groups are whole",
        _GROUPED.format(g=_HALF),
    ),
    "gis-h-uniform": Description(
        "GIS-H as a building block that is repeated at equal distances, so that its memory is steady.",
        "somewhat more than gis-h",
        f"({_HALF} * (v - 1) + P + gcd({_HALF}, v) - 1) / v",
    ),
    "po-h": Description(
        "PipeOffload: uniform GIS-H with the lower half of each device's stages on the host.",
        "as gis-h-uniform where half of the activations fit through the link",
        "about a quarter of interleaved 1F1B's",
    ),
    "po-f": Description(
        "PipeOffload: uniform GIS-H with every activation on the host that stays long enough.",
        "as gis-h-uniform where all activations fit through the link",
        "what is on its way to the host and back",
    ),
    "interleaved-zb": Description(
        "ZB-H1 on a loop of stages, as torch runs it; M is a whole number of rounds.",
        "(P - 1) * (F + I - W) / v",
        "P",
    ),
    "seq1f1b": Description(
        "1F1B on slices of sequences: forwards ascend, backwards descend; the warm-up is n - 1 slices longer.",
        "(P - 1) * (F + B) / n",
        "(P + n - 1) / n",
    ),
    "seq1f1b-zb": Description(
        "ZB-H1 on slices; weight gradients that are put off fill the end.",
        "(P - 1) * (F + I - W) / n",
        "(P + n - 1) / n",
    ),
    "seq1f1b-interleaved": Description(
        "Interleaved 1F1B in groups of P slices, n of which are a microbatch.",
        "(P - 1) * (F + B) / (n * v)",
        "(v * P + P + n - 2) / (n * v)",
    ),
    "seq1f1b-interleaved-zb": Description(
        "seq1f1b-interleaved with split backwards; device d puts off its first d weight gradients.",
        "(P - 1) * (F + I - W) / (n * v)",
        "(v * P + P + n - 2) / (n * v)",
    ),
    "slimpipe": Description(
        "Interleaved 1F1B on slices, one microbatch after the other; n is a multiple of P.",
        "(P - 1) * (F + B) / (n * v)",
        "1 + 2 * (P - 1) / (n * v)",
    ),
    "seq1f1b-recompute": Description(
        "seq1f1b with every forward run again right before its backward.",
        "as seq1f1b, beside M * F more work",
        "1 / n, and the keys and values of a microbatch",
    ),
    "seq1f1b-offload": _streamed("seq1f1b", "seq1f1b", ", and the keys and values that later slices read"),
    "1f1b-offload": _streamed("1F1B", "1f1b"),
    "interleaved-1f1b-offload": _streamed("Interleaved 1F1B", "interleaved-1f1b"),
}


def describe(name: str) -> Description | None:
    """Return the description of a method; None for one that is none of METHODS' own."""
    if name in DESCRIPTIONS:
        return DESCRIPTIONS[name]
    if name in ("po-1", "po-3"):
        return _offloaded("gis-h-uniform", name[-1])
    parts = re.fullmatch(r"(.+?)-(selective$|recompute|offload)(?:-(\d))?", name)
    if parts is None or parts[1] not in DESCRIPTIONS:
        return None
    order, what, number = parts.groups()
    if what == "selective":
        return _selectively(order)
    return _offloaded(order, number) if what == "offload" else _recomputed(order, number)


def _selectively(order: str) -> Description:
    return Description(
        f"{order} with results of norms and activation functions made again inside every backward.",
        f"as {order}, with backwards that take somewhat longer",
        f"that of {order} less these results",
    )


def _offloaded(order: str, number: str | None) -> Description:
    which = f"the lowest {number} of each device's stages" if number else "every activation that stays long enough"
    return Description(
        f"{order} with {which} on the host.",
        f"as {order} where these activations fit through the link",
        f"that of {order} less what is on the host",
    )


def _recomputed(order: str, number: str | None) -> Description:
    bubble = f"as {order}, beside M * F more work"
    if number is None:
        says = f"{order} with every forward run again right before its backward."
        memory = {"1f1b": "1", "interleaved-zb": "P / v"}.get(order, "1 / v")  # the latter puts weight gradients off
        return Description(says, bubble, memory)
    return Description(
        f"{order} with the lowest {number} of each device's stages run again right before their backwards.",
        f"as {order}, beside M * F * {number} / v more work",
        f"that of {order} less these stages' activations",
    )
