"""The section of docs/STOCK.md that one command writes."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from bench.report import machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.stock.__main__ import Choice, Found


INTRO = """# Plans against what users pick

Written by `python -m bench.stock`, one section for each number of devices and size of model. A small Llama of
transformers, one decoder layer per block, is trained in the same processes by torch.distributed.pipelining (1F1B,
interleaved zero bubble, ZBV; each plain, with every block under torch.utils.checkpoint, with saved tensors in host
memory) and by plans in the replay, compiled under the peak that each of these reaches and under parts of plain 1F1B's
activations. torch gets the same balanced cut of the layers as plans start from. Where ranks compute, plans move halves
of decoder layers; torch's schedules cut, recompute and offload whole ones, as frameworks do.

*Peak*: of the fullest device, weights, gradients and Adam's moments by their sizes and all else that torch's allocator
hands out, torch's own receive buffers included; host copies are not counted for either. *Gradients*: the largest
difference from the model without a pipeline, relative to the largest entry of its parameter. Ways take their steps in
turns; *spread* is the interquartile range over the median, and *faster by* the median of the rounds' ratios with its
quartiles. Another column holds a plan against choices that need as much memory or more. Where there are fewer cores
and GPUs than devices, the same orders are rehearsed: ops take their costs, all scaled alike (`--step-s`), peaks are
what the files promise, and offloads of torch's orders overlap with compute, which `save_on_cpu` does not do.
"""


def page(found: Found, command: str, commit: str) -> str:
    """Return it as Markdown."""
    return "\n".join(_lines(found, command, commit)) + "\n"


def _lines(found: Found, command: str, commit: str) -> Iterator[str]:
    setting = found.setting
    config = ", ".join(f"{key} {value}" for key, value in setting.config.items())
    yield f"## {found.what}"
    yield ""
    rounds = max(len(one.samples) for one in found.stock)
    yield f"`{command}` at {commit}, {machine()}."
    yield f"{config}; {setting.microbatches} microbatches of {setting.microbatch_size}; {rounds} rounds."
    yield f"Plain 1F1B holds {_mb(found.activations)} MB of activations on its fullest device."
    yield ""
    yield "| torch's schedule | activations | peak MB | forecast s | s per step | spread | gradients differ by |"
    yield "|---|---|---|---|---|---|---|"
    for one in found.stock:
        yield f"| {one.name} | {one.treatment} | {_row(one)} |"
    yield ""
    yield (
        "| plan | cap MB | peak MB | forecast s | s per step | spread | gradients differ by | best stock that fits the "
        "cap | plan is faster by | best stock of this peak or more | plan is faster by |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for plan in found.plans:
        name = f"{plan.name} ({plan.method})" if plan.method else plan.name
        yield f"| {name} | {_mb(plan.cap_bytes)} | {_row(plan)} | {_against(plan, found.stock)} |"


def _row(one: Choice) -> str:
    if one.failure:
        return f" | | | {one.failure.splitlines()[0][:160]} |"
    error = "" if one.error is None else f"{one.error:.0e}"
    forecast = "" if one.forecast_s is None else f"{one.forecast_s:.3f}"
    return f"{_mb(one.peak_bytes)} | {forecast} | {one.seconds:.3f} | {_spread(one.samples)} | {error}"


def _against(plan: Choice, stock: Sequence[Choice]) -> str:
    """The fastest stock choices that hold no more than the plan's cap, and no less than its peak, each with the ratio
    by rounds."""
    known = [(one, one.peak_bytes) for one in stock if one.samples and one.peak_bytes is not None]
    if not plan.samples or plan.cap_bytes is None or plan.peak_bytes is None:
        return " | | | "
    fitting = [one for one, peak in known if peak <= plan.cap_bytes]
    larger = [one for one, peak in known if peak >= plan.peak_bytes]
    return f"{_best(plan, fitting)} | {_best(plan, larger)}"


def _best(plan: Choice, among: Sequence[Choice]) -> str:
    if not among:
        return "none | "
    best = min(among, key=lambda one: one.seconds)
    ratios = [theirs / ours - 1 for theirs, ours in zip(best.samples, plan.samples, strict=True)]
    low, middle, high = _quartiles(ratios)
    return f"{best.name} {best.treatment} | {middle:+.1%} ({low:+.1%} to {high:+.1%})"


def _spread(samples: Sequence[float]) -> str:
    low, middle, high = _quartiles(samples)
    return f"{(high - low) / middle:.1%}"


def _quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def _mb(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.1f}"
