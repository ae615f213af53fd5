"""What was found as one Markdown page, in the form of docs/GPU.md's "Recorded"."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from bench.gpu.parts import broken_promises

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Found = dict[str, Any]
STEP_WITHIN = 0.05
HIDDEN_AT_LEAST = 0.95
USED_AT_LEAST = 0.90
"""What docs/GPU.md expects."""


def page(found: Found) -> str:
    """Return the page; parts that have not run are left out."""
    lines = ["# What a GPU machine shows", "", f"Written by `{found['command']}` on {found['when']}.", ""]
    writers = {
        "machine": _machine,
        "profile": _profile,
        "plans": _plans,
        "emulate": _emulations,
        "limit": limits,
        "check": _checks,
        "stock": _stock,
        "tests": _tests,
        "trace": _trace,
    }
    for part, write in writers.items():
        if found["parts"].get(part, {}).get("found"):
            lines += [f"## {part.capitalize()}", "", *write(found["parts"][part]["found"]), ""]
    lines += ["## Failures", "", *_failures(found), ""]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]


def _failures(found: Found) -> Iterator[str]:
    every = [f"- {part}: {one}" for part, about in found["parts"].items() for one in about["failures"]]
    yield from every or ["None."]


def _machine(machine: Found) -> Iterator[str]:
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in machine["gpus"]) or "no GPU"
    yield f"{gpus}; {machine['cores']} cores ({machine['processor']}), {machine['memory_bytes'] / 2**30:.0f} GiB;"
    versions = ", ".join(f"{name} {version or 'absent'}" for name, version in machine["packages"].items())
    yield f"Python {machine['python']}, {versions}; CUDA {machine['cuda']}, NCCL {machine['nccl']};"
    yield f"OptPipe at commit {machine['commit'] or 'unknown'}."
    for name in ("nvidia_smi", "topology"):
        if machine[name]:
            yield from ("", "```", machine[name], "```")


def _profile(profile: Found) -> Iterator[str]:
    yield (
        f"{profile['model_type']}, {profile['num_hidden_layers']} blocks of {profile['hidden_size']}, "
        f"{profile['dtype']}, {profile['microbatch_size']} x {profile['sequence']} tokens per microbatch. "
        "Medians, with the interquartile range of the samples."
    )
    yield ""
    ops = ("forward", "backward_input", "backward_weight", "backward", "recompute")
    rows = [
        [layer["name"], *(_measured(layer.get(f"{op}_ns"), 1e6) for op in ops), _measured(layer["saved_bytes"], 1e9)]
        for layer in profile["layers"]
    ]
    yield from table(["layer, ms", *ops, "saved, GB"], rows)
    yield ""
    machine = profile["machine"]
    yield f"Overhead of an op {_measured(machine['op_overhead_ns'], 1e3)} µs."
    for link in machine["links"][:1]:
        speeds = [f"{way} {_measured(link.get(f'{way}_bytes_per_s'), 1e9)}" for way in COPIES]
        yield f"Host link in GB/s: {', '.join(speeds)}; latency {_measured(link['latency_ns'], 1e3)} µs."


COPIES = ("d2h", "h2d", "duplex_d2h", "duplex_h2d")


def _measured(cost: Any, unit: float) -> str:
    if not isinstance(cost, dict):
        return "-" if cost is None else f"{cost / unit:.3g}"
    spread = f" ±{cost['spread'] / max(1, cost['value']):.0%}" if cost.get("spread") else ""
    return f"{cost['value'] / unit:.3g}{spread}"


def _plans(plans: Found) -> Iterator[str]:
    rows = [
        [
            kind,
            plan["method"],
            plan["stages"],
            f"{plan['cap_bytes'] / 1e9:.3g}",
            f"{max(plan['peak_bytes']) / 1e9:.3g}",
            plan["num_offloads"],
            plan["num_recomputes"],
            f"{plan['makespan_ns'] / 1e6:.1f}",
            plan["digest"].removeprefix("sha256:")[:12],
        ]
        for kind, plan in plans.items()
    ]
    head = ["plan", "by", "stages", "cap, GB", "peak, GB", "offloads", "recomputes", "forecast, ms", "digest"]
    yield from table(head, rows)


def limits(plans: Found) -> Iterator[str]:
    """Return the lines of the part `limit`."""
    yield "Device 0 where torch's allocator may hold no more than weights, gradients, what is promised, and `room`."
    yield ""
    rows = [[kind, *_limit(report)] for kind, reports in plans.items() for report in reports]
    yield from table(["plan", "room, MiB", "step, ms", "held, GB", "asked again"], rows)


def _limit(report: Found) -> Iterator[object]:
    yield "any" if report["limit_bytes"] is None else report["room_mib"]
    spans = report["spans_ns"]
    yield "out of memory" if spans is None else f"{statistics.median(spans) / 1e6:.1f}"
    yield "-" if report["held_bytes"] is None else f"{report['held_bytes'] / 1e9:.1f}"
    yield "-" if report["retries"] is None else report["retries"]


def _emulations(plans: Found) -> Iterator[str]:
    steps = sorted({len(report["spans_ns"]) for reports in plans.values() for report in reports})
    counted = " or ".join(map(str, steps))
    yield f"Every device alone, its neighbours emulated; medians of the steps after the first, {counted} of them."
    yield ""
    rows = [[kind, *_emulation(report)] for kind, reports in plans.items() for report in reports]
    head = [
        "plan",
        "device",
        "step, ms",
        "forecast, ms",
        "ratio",
        "ops",
        "hidden",
        "planned",
        "promise, GB",
        "store",
        "allocator",
        "held",
        "host, GB",
        "host",
        "as expected",
    ]
    yield from table(head, rows)
    yield ""
    yield (
        "`step`: with the range from the fastest to the slowest. "
        f"`ratio`: measured over forecast, within {STEP_WITHIN:.0%} of 1. `ops`: the same of each op of "
        "the compute lane, median and quartiles. `hidden`: of the copies' time, behind "
        f"compute, at least {HIDDEN_AT_LEAST:.0%} of what is `planned`. `store`, `allocator`: activations at most, by "
        "the runtime's count and by torch's allocator, over the promise; the latter between "
        f"{USED_AT_LEAST:.0%} and 100%. `held`: what the allocator held of the GPU at most, over what was in use, "
        "parameters and gradients included. `host`: offloaded bytes at most, and over the promise."
    )


def _emulation(report: Found) -> list[str]:
    measured, planned = (_hidden(report[name]) for name in ("transfers", "forecast_transfers"))
    promised, spans = report["promised_activation_bytes"], report["spans_ns"]
    return [
        str(report["rank"]),
        f"{report['span_ns'] / 1e6:.1f} ({min(spans) / 1e6:.1f} to {max(spans) / 1e6:.1f})",
        f"{report['forecast_span_ns'] / 1e6:.1f}",
        f"{report['span_ns'] / report['forecast_span_ns']:.3f}",
        _ratios(report["ops"]),
        "-" if measured is None else f"{measured:.1%}",
        "-" if planned is None else f"{planned:.1%}",
        f"{promised / 1e9:.3g}",
        f"{report['peak_activation_bytes'] / promised:.1%}",
        f"{report['allocator_peak_bytes'] / promised:.1%}",
        f"{report['reserved_peak_bytes'] / report['allocated_peak_bytes']:.1%}"
        if "allocated_peak_bytes" in report
        else "-",
        f"{report['peak_host_bytes'] / 1e9:.3g}" if report["promised_host_bytes"] else "-",
        f"{report['peak_host_bytes'] / report['promised_host_bytes']:.1%}" if report["promised_host_bytes"] else "-",
        ", ".join(unexpected(report)) or "yes",
    ]


def _ratios(ops: Sequence[Found]) -> str:
    """Return median and quartiles of measured over forecast; "-" for fewer than two ops."""
    timed = [op for op in ops if op["lane"] == "compute" and op["forecast_ns"]]
    if len(timed) < 2:
        return "-"
    low, middle, high = statistics.quantiles([op["measured_ns"] / op["forecast_ns"] for op in timed], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _hidden(transfers: Found) -> float | None:
    """Return the share of the copies' time that compute hides; None without copies."""
    total = transfers["hidden_ns"] + transfers["exposed_ns"]
    return transfers["hidden_ns"] / total if total else None


def unexpected(report: Found) -> list[str]:
    """Name the figures of one device that are not as docs/GPU.md expects."""
    measured, planned = (_hidden(report[name]) for name in ("transfers", "forecast_transfers"))
    found = []
    if abs(report["span_ns"] / report["forecast_span_ns"] - 1) > STEP_WITHIN:
        found.append("step")
    if measured is not None and planned is not None and measured < HIDDEN_AT_LEAST * planned:
        found.append("hidden")
    if broken_promises(report) or report["allocator_peak_bytes"] < USED_AT_LEAST * report["promised_activation_bytes"]:
        found.append("memory")
    return found


def _checks(found: Found) -> Iterator[str]:
    yield f"Gradients against the unpipelined model, {found['devices']} devices, fp32."
    yield ""
    rows = [
        [
            kind,
            run["backend"],
            f"{run['num_offloads']} / {run['num_recomputes']}",
            "equal" if run["check"]["ok"] else "DIFFERENT",
            f"{run['check']['worst_difference']:.1e}",
            f"{run['makespan_ns'] / run['forecast_makespan_ns']:.2f}" if found["one_at_a_time"] else "-",
        ]
        for kind, run in found["plans"].items()
    ]
    yield from table(["plan", "backend", "offloads / recomputes", "gradients", "worst", "step over forecast"], rows)
    if "not_run" in found:
        yield from ("", f"Not run: {found['not_run']}.")


def _stock(found: Found) -> Iterator[str]:
    """The section of bench.stock, without its title."""
    yield from found["page"].split("\n## ", 1)[-1].splitlines()[2:]


def _tests(found: Found) -> Iterator[str]:
    for name, line in found.items():
        yield f"- `pytest -m gpu`, {name}: {line}"


def _trace(found: Found) -> Iterator[str]:
    yield (
        f"Torch's profiler, one step of device {found['device']} of the plan `{found['plan']}`: "
        f"{found['ranges_found']} of {found['ranges']} ops have a range of their name."
    )
    if "kernels_ns" in found:
        times = {"kernels": "kernels_ns", "copies out": "d2h_ns", "copies in": "h2d_ns", "on the device": "d2d_ns"}
        yield ", ".join(f"{name} {found[key] / 1e6:.1f} ms" for name, key in times.items()) + "."
