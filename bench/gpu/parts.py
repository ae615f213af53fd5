"""The parts of the run. Each returns what it found, for gpu.json; what goes wrong in it is added to its failures."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.commands import OPTPIPE, Failed
from bench.gpu.plans import KINDS, tight, unconstrained
from bench.gpu.sizes import ESTIMATED_ON, SMALL_PLAN_S, samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.gpu.commands import Commands
    from bench.gpu.sizes import Model, Sizes

ROOT = Path(__file__).parents[2]
Found = dict[str, Any]


@dataclass
class Bench:
    """Where a run stands."""

    sizes: Sizes
    commands: Commands
    work: Path
    """Profiles and plans, which later parts need, also those of another run."""
    out: Path
    machine: Found = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Of the part that is running."""

    @property
    def gpus(self) -> list[Found]:
        """Those that torch sees."""
        return list(self.machine.get("gpus", []))

    def limit_s(self, part: str) -> float:
        """What one command of a part may take."""
        return self.sizes.limits_s[part]

    def attempt(self, what: Callable[[], Found]) -> Found | None:
        """Return what is found; None, and a failure, where a command fails."""
        try:
            return what()
        except Failed as error:
            self.failures.append(str(error))
            return None


def machine(bench: Bench) -> Found:
    """Names, versions, and what torch sees."""
    printed = bench.commands.run([sys.executable, "-m", "bench.gpu.facts"], bench.limit_s("machine"))
    bench.machine = json.loads(printed)
    if bench.sizes.device == "cuda" and not bench.gpus:
        bench.failures.append("torch sees no GPU (--dry-run does the same on a CPU)")
    return bench.machine


# -- tests

MARKED = ("test_on_gpu.py", "test_run_emulated.py")
"""The files of tests that are marked gpu: the others need not even be imported."""
PLAIN = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
"""Torch's own choice; optpipe's commands choose the other."""
ALLOCATORS = {"plain": PLAIN, "expandable segments": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}


def tests(bench: Bench) -> Found:
    """The tests that one GPU can run, under both kinds of allocator at the same time."""
    with ThreadPoolExecutor(len(ALLOCATORS)) as pool:
        runs = {name: pool.submit(_tests, bench, settings) for name, settings in ALLOCATORS.items()}
    found = {}
    for name, future in runs.items():
        try:
            found[name] = future.result()
        except Failed as error:
            found[name] = _last_line(error.printed)
            bench.failures.append(f"tests, {name}: {error}; {found[name]}")
    return found


def _tests(bench: Bench, settings: dict[str, str]) -> str:
    """Return the last line that pytest prints."""
    if importlib.util.find_spec("pytest") is None:
        raise Failed("not run: pytest is not installed")
    one = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]} if bench.gpus else {}
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    files = [ROOT / "tests" / name for name in MARKED]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *workers, *files]
    return _last_line(bench.commands.run(command, bench.limit_s("tests"), one | settings))


def _last_line(text: str) -> str:
    return next((line.strip("= ") for line in reversed(text.splitlines()) if line.strip()), "")


# -- profile and plans


def profile(bench: Bench) -> Found:
    """Measure the large model on one GPU, which stands for all devices."""
    model = bench.sizes.large
    size = model.microbatch_size or _filling(bench, model)
    path = bench.work / "profile.json"
    _profile(bench, model, size, bench.sizes.devices, path)
    return {"microbatch_size": size, "sequence": model.sequence, "dtype": model.dtype, **model.config, **_costs(path)}


def _profile(bench: Bench, model: Model, size: int, devices: int, path: Path) -> None:
    """Write the measured profile of a model, or leave none."""
    path.unlink(missing_ok=True)
    config = path.with_suffix(".config.json")
    config.write_text(json.dumps(model.config), encoding="utf-8")
    sizes = ["--seq", str(model.sequence), "--microbatch-size", str(size), "--dtype", model.dtype]
    sizes += ["--samples", str(bench.sizes.samples)]
    place = ["--device", bench.sizes.device, "--devices", str(devices)]
    bench.commands.run([*OPTPIPE, "profile", "--model", config, *sizes, *place, "-o", path], bench.limit_s("profile"))


def _filling(bench: Bench, model: Model) -> int:
    """Return how many samples fill the GPU, by an estimate of what a block saves."""
    if not bench.gpus:
        raise Failed("not run: the model is sized by the GPU's memory, and torch sees no GPU")
    config, path = bench.work / "estimate.config.json", bench.work / "estimate.json"
    config.write_text(json.dumps(model.config), encoding="utf-8")
    how = ["--gpu", ESTIMATED_ON, "--dtype", model.dtype, "--seq", str(model.sequence), "--microbatch-size", "1"]
    command = [*OPTPIPE, "profile", "--model", config, *how, "--devices", "1", "-o", path]
    bench.commands.run(command, bench.limit_s("profile"))
    block = max(json.loads(path.read_text(encoding="utf-8"))["layers"], key=lambda layer: layer.get("count", 1))
    return samples(bench.gpus[0]["memory_bytes"], _value(block["saved_bytes"]), model.layers)


def _value(cost: int | Found) -> int:
    """Return the number of a cost that may say where it is from."""
    return int(cost["value"] if isinstance(cost, dict) else cost)


def _costs(path: Path) -> Found:
    """Return what the profile says of layers and machine."""
    profile = json.loads(path.read_text(encoding="utf-8"))
    return {"layers": profile["layers"], "machine": profile["machine"]}


def plans(bench: Bench) -> Found:
    """Compile the four plans of the large model."""
    return _compiled(bench, "profile", bench.sizes.microbatches, bench.sizes.plan_s)


def _compiled(bench: Bench, profile: str, microbatches: int, seconds: float) -> Found:
    """Return by kind what `compile` says of each plan, which lies beside the profile; all but the first at once."""
    path = bench.work / f"{profile}.json"
    if not path.exists():
        raise Failed(f"not run: {path} is missing, which the part profile writes")

    def compiled(kind: str, *options: str) -> Found:
        command = [*OPTPIPE, "compile", path, "--microbatches", str(microbatches), *options, "--json"]
        limit = ["--time-limit", str(seconds), "-o", plan_path(bench, profile, kind)]
        found = json.loads(bench.commands.run([*command, *limit], bench.limit_s("plans")))
        return {key: value for key, value in found.items() if key != "baselines"}

    for kind in KINDS:
        plan_path(bench, profile, kind).unlink(missing_ok=True)
    roomy = unconstrained(compiled, plan_path(bench, profile, "roomy"))
    found: Found = {"roomy": roomy.report}
    others = [kind for kind in KINDS if kind != "roomy"]
    with ThreadPoolExecutor(len(others)) as pool:
        runs = {kind: pool.submit(tight, compiled, kind, roomy) for kind in others}
    for kind, future in runs.items():
        if (report := bench.attempt(future.result)) is not None:
            found[kind] = report
        else:  # the plan of a cap that is met without its means
            plan_path(bench, profile, kind).unlink(missing_ok=True)
    return found


def plan_path(bench: Bench, profile: str, kind: str) -> Path:
    """Return where a plan lies."""
    return bench.work / f"{profile}-{kind}.json"


# -- runs


def check(bench: Bench) -> Found:
    """`run --check` of a small model, planned for as many devices as there are GPUs; on one GPU for one device.

    Plans that share one GPU run at the same time, as only their gradients count; on several GPUs steps are timed, too.
    """
    devices = len(bench.gpus) if bench.gpus else bench.sizes.devices
    size = bench.sizes.small.microbatch_size
    assert size is not None
    _profile(bench, bench.sizes.small, size, devices, bench.work / "check.json")
    plans = _compiled(bench, "check", 2 * devices + 2, min(bench.sizes.plan_s, SMALL_PLAN_S))
    alone = len(bench.gpus) > 1
    with ThreadPoolExecutor(1 if alone else len(plans)) as pool:
        runs = {kind: pool.submit(_checked, bench, kind) for kind in plans}
    found: Found = {"devices": devices, "one_at_a_time": alone, "plans": {}}
    for kind, future in runs.items():
        if (report := bench.attempt(future.result)) is not None:
            counts = {name: plans[kind][name] for name in ("num_offloads", "num_recomputes", "stages")}
            found["plans"][kind] = counts | report
    if len(bench.gpus) == 1:
        found["not_run"] = "several ranks: NCCL refuses two ranks on one GPU, and gloo sends no tensors of a GPU"
    return found


def _checked(bench: Bench, kind: str) -> Found:
    """Run one plan with --check; a difference is a failure."""
    steps = ["--steps", str(bench.sizes.steps), "--check", "--json"]
    report = json.loads(
        bench.commands.run([*OPTPIPE, "run", plan_path(bench, "check", kind), *steps], bench.limit_s("check"))
    )
    spans = sorted(step["makespan_ns"] for step in report["steps"][1:])
    names = ("backend", "forecast_makespan_ns", "check", "ranks")
    return {"makespan_ns": spans[len(spans) // 2], **{name: report[name] for name in names}}


def emulate(bench: Bench) -> Found:
    """Every device of every plan of the large model, one after the other; on GPUs those of one plan again with
    torch's plain allocator."""
    found: Found = {}
    for kind in KINDS:
        _emulate(bench, kind, kind, {}, found)
    if bench.gpus and found.get("recompute"):
        _emulate(bench, "recompute", "recompute, plain allocator", PLAIN, found)
    return found


def _emulate(bench: Bench, kind: str, name: str, environment: dict[str, str], into: Found) -> None:
    """Emulate one plan; what it breaks is a failure."""
    path = plan_path(bench, "profile", kind)
    if not path.exists():
        bench.failures.append(f"{name}: not run, there is no plan")
        return
    command = [sys.executable, "-m", "bench.gpu.emulated", path, "--steps", str(bench.sizes.steps)]
    try:
        printed = bench.commands.run(command, bench.limit_s("emulate"), environment)
    except Failed as error:
        bench.failures.append(f"{name}: {error}")
        printed = error.printed
    into[name] = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    for report in into[name]:
        bench.failures += [f"{name}, device {report['rank']}: {broken}" for broken in broken_promises(report)]


PROMISES = {
    "activations": ("peak_activation_bytes", "promised_activation_bytes"),
    "the allocator": ("allocator_peak_bytes", "promised_activation_bytes"),
    "the host": ("peak_host_bytes", "promised_host_bytes"),
}


def broken_promises(report: Found) -> list[str]:
    """Say where one device took more memory than its plan promises."""
    return [
        f"{name} took {report[peak]} bytes at most, {report[promised]} promised"
        for name, (peak, promised) in PROMISES.items()
        if report[peak] > report[promised]
    ]


def limit(bench: Bench) -> Found:
    """The first device of plans under a cap, where the allocator may hold little more than is promised."""
    found: Found = {}
    for kind in ("offload", "recompute"):
        path = plan_path(bench, "profile", kind)
        if not path.exists():
            bench.failures.append(f"{kind}: not run, there is no plan")
            continue
        command = [sys.executable, "-m", "bench.gpu.limited", path, 0, "--steps", str(bench.sizes.steps)]
        printed = bench.commands.run(command, bench.limit_s("limit"))
        found[kind] = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return found


def trace(bench: Bench) -> Found:
    """Torch's profiler on a device that offloads, where there is such a plan."""
    kind = next((kind for kind in ("offload", "roomy") if plan_path(bench, "profile", kind).exists()), None)
    if kind is None:
        raise Failed("not run: there is no plan")
    output = bench.out / "torch-trace.json.gz"
    command = [sys.executable, "-m", "bench.gpu.traced", plan_path(bench, "profile", kind), "0", output]
    found: Found = json.loads(bench.commands.run(command, bench.limit_s("trace")).splitlines()[-1])
    if found["ranges_found"] < found["ranges"]:
        bench.failures.append(f"{found['ranges_found']} of {found['ranges']} ops have a range of their name")
    return {"plan": kind, "device": 0, "bytes": output.stat().st_size, **found}


MICROBATCHES_OF_A_STEP = 8
"""At least, where plans are held against what users pick."""


def stock(bench: Bench) -> Found:
    """Plans against what users pick, on as many devices as there are GPUs (bench/stock)."""
    devices = len(bench.gpus) or bench.sizes.devices
    page, limit = bench.out / "stock.md", min(bench.limit_s("stock"), bench.commands.left_s)
    page.unlink(missing_ok=True)
    sizes = bench.sizes.stock | {"microbatches": max(4 * devices, MICROBATCHES_OF_A_STEP)}
    sizes |= {"devices": devices, "budget": round(limit - LAST_ROUND_S)}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    files = ["--profile", bench.work / "stock-profile.json", "-o", page]
    command = [sys.executable, "-m", "bench.stock", *options, *files]
    bench.commands.run(command, bench.limit_s("stock"))
    return {"devices": devices, "page": page.read_text(encoding="utf-8")}


LAST_ROUND_S = 30.0
"""For the round that is under way when the budget ends, and for ending all processes."""

PARTS: dict[str, Callable[[Bench], Found]] = {
    part.__name__: part for part in (machine, tests, profile, plans, check, emulate, limit, trace, stock)
}
"""In the order in which they run."""
