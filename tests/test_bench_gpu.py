"""`sh bench/gpu.sh`: a dry run is complete, and a failure is named and does not stop what comes after it."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import redirect_stdout
from importlib.metadata import distribution, version
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from optpipe_compiler.cli import cli

torch = pytest.importorskip("torch")
from bench.gpu import __main__ as command  # noqa: E402
from bench.gpu import emulated, facts, limited, parts, plans, traced  # noqa: E402
from bench.gpu.commands import OPTPIPE, Commands, Failed  # noqa: E402
from bench.gpu.page import limits, page, unexpected  # noqa: E402
from bench.gpu.sizes import DRY, ON_GPUS, samples  # noqa: E402
from bench.stock import __main__ as stock  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu.sh"
REPORT = {
    "rank": 0,
    "span_ns": 104,
    "spans_ns": [102, 104, 107],
    "forecast_span_ns": 100,
    "transfers": {"hidden_ns": 96, "exposed_ns": 4},
    "forecast_transfers": {"hidden_ns": 100, "exposed_ns": 0},
    "peak_activation_bytes": 900,
    "promised_activation_bytes": 1000,
    "allocator_peak_bytes": 950,
    "peak_host_bytes": 10,
    "promised_host_bytes": 10,
    "ops": [
        {"lane": "compute", "forecast_ns": 10, "measured_ns": 12},
        {"lane": "compute", "forecast_ns": 10, "measured_ns": 10},
        {"lane": "compute", "forecast_ns": 10, "measured_ns": 11},
        {"lane": "d2h", "forecast_ns": 10, "measured_ns": 90},
    ],
}


class InThisProcess(Commands):
    """Runs commands here, one at a time: each of some twenty would import torch again."""

    turn = threading.Lock()

    def run(self, command, limit_s, environment=None):
        with self.turn:
            return self.run_alone(command)

    def run_alone(self, command):
        words = list(map(str, command))
        if tuple(words[:3]) == OPTPIPE:
            ended = CliRunner().invoke(cli, words[3:])
            if ended.exit_code:
                raise Failed(f"{' '.join(words[2:4])}: exit code {ended.exit_code}: {ended.output}")
            return ended.stdout
        module = importlib.import_module(words[2])
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
            patch.setattr(sys, "argv", words[2:])
            if words[2] == "bench.gpu.facts":
                print(json.dumps(module.facts()))
            else:
                module.main()
        return printed.getvalue()


@pytest.mark.runtime
def test_the_script_says_what_machine_this_is(tmp_path):
    done = subprocess.run(
        ["sh", SCRIPT, "--dry-run", "--out", tmp_path / "out", "--work", tmp_path / "work", "machine"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": ":".join(filter(None, sys.path))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bench.gpu.facts" in (tmp_path / "out" / "gpu.log").read_text()
    assert f"torch {version('torch')}, " in (tmp_path / "out" / "gpu.md").read_text()


@pytest.mark.runtime
def test_a_dry_run_finds_everything_that_a_run_on_gpus_does(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "Commands", InThisProcess)
    out = tmp_path / "out"
    some = ["profile", "plans", "check", "emulate", "limit", "trace"]  # without the tests, of which this is one
    command.run(command.Options(some, True, out, tmp_path / "work", 250))
    found = json.loads((out / "gpu.json").read_text())["parts"]
    assert list(found) == ["machine", *some]
    assert [part["failures"] for part in found.values()] == [[]] * len(found)
    assert found["machine"]["found"]["packages"]["torch"]
    compiled = found["plans"]["found"]
    assert compiled["offload"]["num_offloads"] > 0
    assert compiled["recompute"]["num_recomputes"] > 0
    assert compiled["split"]["method"] == "zb-h1"
    emulated = found["emulate"]["found"]
    assert list(emulated) == list(plans.KINDS)
    assert all([report["rank"] for report in reports] == [0, 1] for reports in emulated.values())
    assert all(run["check"]["ok"] for run in found["check"]["found"]["plans"].values())
    assert found["trace"]["found"]["ranges_found"] == found["trace"]["found"]["ranges"] > 0
    assert all(len(one["spans_ns"]) == 1 for reports in found["limit"]["found"].values() for one in reports)
    text = (out / "gpu.md").read_text()
    assert all(f"| {kind} | 1 | " in text for kind in plans.KINDS)
    assert {path.name for path in out.iterdir()} == {
        "gpu.json",
        "gpu.md",
        "gpu.log",
        "files.zip",
        "torch-trace.json.gz",
    }
    assert "profile-offload.json" in zipfile.ZipFile(out / "files.zip").namelist()


class Scripted(Commands):
    """Answers commands instead of running them; those that contain a word of `broken` fail."""

    def __init__(self, answers=None, broken=()):
        self.answers, self.broken, self.ran = answers or {}, broken, []

    def run(self, command, limit_s, environment=None):
        words = list(map(str, command))
        self.ran.append((words, environment))
        for word in self.broken:
            if word in words:
                raise Failed(f"{word} is broken", "printed before\n")
        return next((answer for word, answer in self.answers.items() if word in words), "{}")


def test_a_failure_is_listed_and_the_parts_after_it_run(tmp_path, monkeypatch, capsys):
    def breaks(bench):
        raise Failed("x is broken")

    def half(bench):
        bench.failures.append("y is broken")
        return {"plain": "1 passed"}

    monkeypatch.setattr(command, "PARTS", {"machine": lambda bench: {}, "profile": breaks, "tests": half})
    monkeypatch.setattr(sys, "argv", ["gpu.sh", "--dry-run", "--out", str(tmp_path), "--work", str(tmp_path / "w")])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    assert capsys.readouterr().out.endswith("2 failed\n- profile: x is broken\n- tests: y is broken\n")
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert found["profile"]["found"] is None
    assert found["tests"]["found"] == {"plain": "1 passed"}
    assert "- profile: x is broken" in (tmp_path / "gpu.md").read_text()


def test_a_part_that_cannot_read_an_answer_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "PARTS", {"machine": lambda bench: {}, "a": lambda bench: {}["b"], "c": lambda _: {}})
    found = command.run(command.Options([], True, tmp_path, tmp_path / "w", 10))["parts"]
    assert found["a"]["failures"] == ["KeyError: 'b'"]
    assert found["c"]["failures"] == []


def test_a_profile_or_plan_that_fails_leaves_no_older_one_behind(tmp_path):
    for name in ("profile", *(f"profile-{kind}" for kind in plans.KINDS)):
        (tmp_path / f"{name}.json").write_text("{}")
    at = bench(tmp_path, Scripted(broken=["compile", "profile"]))
    with pytest.raises(Failed, match="compile is broken"):
        parts.plans(at)
    with pytest.raises(Failed, match="profile is broken"):
        parts.profile(at)
    assert {path.name for path in tmp_path.iterdir()} == {"profile.config.json"}


def test_what_other_parts_found_before_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "PARTS", {"machine": lambda bench: {}, "a": lambda bench: {"new": 1}})
    (tmp_path / "gpu.json").write_text(json.dumps({"parts": {"b": {"found": {"old": 1}, "failures": []}}}))
    found = command.run(command.Options(["a"], True, tmp_path, tmp_path / "w", 10))
    kept = {name: part["found"] for name, part in found["parts"].items()}
    assert kept == {"b": {"old": 1}, "machine": {}, "a": {"new": 1}}


def test_a_part_that_is_not_known_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        command.options(["emulates"])
    assert ended.value.code == 2
    assert "PART is emulates, expected one of machine, tests, profile, plans" in capsys.readouterr().err


def bench(tmp_path, commands, sizes=DRY, **more):
    return parts.Bench(sizes, commands, tmp_path, tmp_path, **more)


def test_tests_run_under_both_allocators_on_one_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    commands = Scripted({"pytest": "..\n==== 2 passed in 1 s ====\n"})
    found = parts.tests(bench(tmp_path, commands, machine={"gpus": [{}, {}]}))
    assert found == {"plain": "2 passed in 1 s", "expandable segments": "2 passed in 1 s"}
    environments = [environment for _, environment in commands.ran]
    one = {"CUDA_VISIBLE_DEVICES": "0"}
    for setting in ("expandable_segments:False", "expandable_segments:True"):
        assert {"PYTORCH_ALLOC_CONF": setting} | one in environments
    assert len(environments) == 2


def test_plans_are_held_against_what_users_pick_on_as_many_devices_as_gpus(tmp_path):
    class Writing(Scripted):
        left_s = 100.0

        def run(self, command, limit_s, environment=None):
            command[command.index("-o") + 1].write_text("# Plans\n\n## 2 processes\n\nof them")
            return super().run(command, limit_s)

    at = parts.Bench(ON_GPUS, Writing(), tmp_path, tmp_path, machine={"gpus": [{}, {}]})
    found = parts.stock(at)
    ((words, _),) = at.commands.ran
    assert [words[words.index(name) + 1] for name in ("--devices", "--microbatches", "--budget")] == ["2", "8", "70"]
    assert stock.options(words[3:]).hidden == 4096
    text = page({"command": "x", "when": "now", "parts": {"stock": {"found": found, "failures": []}}})
    assert "\n## Stock\n\nof them\n" in text


def test_all_tests_for_gpus_are_run():
    marked = {
        path.name for path in Path(__file__).parent.glob("test_*.py") if "pytest.mark." + "gpu" in path.read_text()
    }
    assert marked == set(parts.MARKED)


def test_failing_tests_are_named_with_what_pytest_says(tmp_path):
    at = bench(tmp_path, Scripted(broken=["pytest"]))
    assert parts.tests(at) == dict.fromkeys(parts.ALLOCATORS, "printed before")
    assert at.failures == [f"tests, {name}: pytest is broken; printed before" for name in parts.ALLOCATORS]


def test_the_model_fills_its_share_of_the_gpu_by_an_estimate_of_what_a_block_saves(tmp_path):
    estimate = {"layers": [{"saved_bytes": 1}, {"count": 8, "saved_bytes": {"value": 900_000_000}}, {"saved_bytes": 5}]}
    (tmp_path / "estimate.json").write_text(json.dumps(estimate))
    written = json.dumps({"layers": [], "machine": {}})

    class Writing(Scripted):
        def run(self, command, limit_s, environment=None):
            (tmp_path / "profile.json").write_text(written)
            return super().run(command, limit_s, environment)

    commands = Writing()
    found = parts.profile(bench(tmp_path, commands, ON_GPUS, machine={"gpus": [{"memory_bytes": 150 * 10**9}]}))
    assert found["microbatch_size"] == 6
    (_, measured) = [words for words, _ in commands.ran]
    assert [measured[measured.index(option) + 1] for option in ("--device", "--microbatch-size", "--dtype")] == [
        "cuda",
        "6",
        "bf16",
    ]
    assert samples(10**9, 10**12, 8) == 1


def test_without_a_gpu_nothing_is_measured_for_one(tmp_path):
    at = bench(tmp_path, Scripted({"bench.gpu.facts": '{"gpus": []}'}), ON_GPUS)
    parts.machine(at)
    assert at.failures == ["torch sees no GPU (--dry-run does the same on a CPU)"]
    with pytest.raises(Failed, match="torch sees no GPU"):
        parts.profile(at)


def test_a_tight_plan_is_looked_for_where_its_means_are_needed():
    tried = []

    def compiled(kind, _, cap, *options):
        tried.append(int(cap))
        if int(cap) < 400:
            raise Failed("nothing fits")
        return {"num_offloads": int(int(cap) < 450)}

    roomy = plans.Roomy({"peak_bytes": [900, 1100]}, base_bytes=100)
    assert plans.tight(compiled, "offload", roomy) == {"num_offloads": 1}
    assert tried == [600, 350, 475, 412]
    with pytest.raises(Failed, match=r"^recompute: no such plan between 0\.98 and 1\.00 .*; nothing fits$"):
        plans.tight(lambda *_: compiled("", "", "0"), "recompute", roomy)


def test_figures_that_are_not_as_expected_are_named_and_broken_promises_are_failures():
    assert unexpected(REPORT) == []
    assert unexpected(REPORT | {"span_ns": 106}) == ["step"]
    assert unexpected(REPORT | {"transfers": {"hidden_ns": 94, "exposed_ns": 6}}) == ["hidden"]
    assert unexpected(REPORT | {"allocator_peak_bytes": 899}) == ["memory"]
    assert parts.broken_promises(REPORT | {"allocator_peak_bytes": 999}) == []
    above = REPORT | {"peak_activation_bytes": 1001, "allocator_peak_bytes": 1002, "peak_host_bytes": 11}
    assert parts.broken_promises(above) == [
        "activations took 1001 bytes at most, 1000 promised",
        "the allocator took 1002 bytes at most, 1000 promised",
        "the host took 11 bytes at most, 10 promised",
    ]


def test_devices_before_one_that_fails_are_kept(tmp_path):
    for kind in ("roomy", "split"):
        (tmp_path / f"profile-{kind}.json").write_text("{}")
    commands = Scripted({"bench.gpu.emulated": json.dumps(REPORT | {"span_ns": 200, "peak_host_bytes": 11}) + "\n"})
    at = bench(tmp_path, commands)
    found = parts.emulate(at)
    assert [kind for kind, reports in found.items() if reports] == ["roomy", "split"]
    assert at.failures.count("offload: not run, there is no plan") == 1
    assert "roomy, device 0: the host took 11 bytes at most, 10 promised" in at.failures
    text = page({"command": "", "when": "", "parts": {"emulate": {"found": found, "failures": at.failures}}})
    assert "medians of the steps after the first, 3 of them." in text
    begin = "| roomy | 0 | 0.0 (0.0 to 0.0) | 0.0 | 2.000 | 1.10 (1.00 to 1.20) | 96.0% | 100.0% | 1e-06 | "
    assert f"{begin}90.0% | 95.0% | - | 1.1e-08 | 110.0% | step, memory |" in text


def test_on_a_gpu_one_plan_is_emulated_with_the_plain_allocator_too(tmp_path):
    for kind in plans.KINDS:
        (tmp_path / f"profile-{kind}.json").write_text("{}")
    more = {"reserved_peak_bytes": 1200, "allocated_peak_bytes": 1000}
    commands = Scripted({"bench.gpu.emulated": json.dumps(REPORT | more) + "\n"})
    at = bench(tmp_path, commands, machine={"gpus": [{}]})
    found = parts.emulate(at)
    assert list(found) == [*plans.KINDS, "recompute, plain allocator"]
    assert [environment for _, environment in commands.ran] == [{}] * len(plans.KINDS) + [parts.PLAIN]
    text = page({"command": "", "when": "", "parts": {"emulate": {"found": found, "failures": at.failures}}})
    assert "| 120.0% |" in text


def test_the_page_of_a_gpu_names_it_and_says_what_has_not_run():
    machine = {
        "gpus": [{"name": "Fake GPU", "memory_bytes": 80 * 2**30}],
        "cores": 16,
        "processor": "CPU",
        "memory_bytes": 128 * 2**30,
        "packages": {"torch": "2.11.0", "ortools": None},
        "python": "3.12",
        "cuda": "13.0",
        "nccl": "2.28",
        "nvidia_smi": "name, driver_version",
        "topology": None,
        "commit": None,
    }
    checked = {"ok": False, "worst_difference": 0.5}
    run = {
        "num_offloads": 3,
        "num_recomputes": 0,
        "backend": "nccl",
        "makespan_ns": 3,
        "forecast_makespan_ns": 2,
        "check": checked,
    }
    check = {"devices": 1, "one_at_a_time": False, "plans": {"offload": run}, "not_run": "several ranks"}
    trace = {"plan": "offload", "device": 0, "ranges": 5, "ranges_found": 5}
    times = {"kernels_ns": 9_000_000, "d2h_ns": 1_000_000, "h2d_ns": 2_000_000, "d2d_ns": 0}
    found = {"machine": machine, "check": check, "trace": trace | times}
    text = page({"command": "", "when": "", "parts": {k: {"found": v, "failures": []} for k, v in found.items()}})
    assert "Fake GPU (80 GiB); 16 cores (CPU), 128 GiB;" in text
    assert "torch 2.11.0, ortools absent; CUDA 13.0, NCCL 2.28;\nOptPipe at commit unknown." in text
    assert "```\nname, driver_version\n```" in text
    assert "| offload | nccl | 3 / 0 | DIFFERENT | 5.0e-01 | - |\n\nNot run: several ranks." in text
    assert "kernels 9.0 ms, copies out 1.0 ms, copies in 2.0 ms, on the device 0.0 ms." in text


# -- what the processes on a GPU do, on stand-ins for torch.cuda


def test_ranges_that_the_profiler_shows_on_the_gpu_are_no_kernels():
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda us=us: us))
        for name, kind, us in [
            ("forward 0 m0", cuda, 100.0),
            ("gemm", cuda, 50.0),
            ("gemm", cpu, 70.0),
            ("Memcpy DtoH (Device -> Pinned)", cuda, 3.0),
            ("Memcpy HtoD (Pinned -> Device)", cuda, 4.5),
            ("Memset (Device)", cuda, 1.0),
        ]
    ]
    found = traced._device_times(events, {"forward 0 m0"})
    assert found == {"kernels_ns": 50_000, "d2h_ns": 3000, "h2d_ns": 4500, "d2d_ns": 0}
    assert traced._device_times(events[2:3], set()) == {}


def test_the_allocators_rounding_is_what_it_took_beyond_what_was_asked(monkeypatch):
    assert emulated._allocator() == {}
    stats = {"allocated_bytes.all.peak": 700, "requested_bytes.all.peak": 690, "reserved_bytes.all.peak": 1000}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    found = {"reserved_peak_bytes": 1000, "allocated_peak_bytes": 700, "rounding_bytes": 10}
    assert emulated._allocator() == found


def test_a_device_that_is_out_of_memory_under_a_limit_says_so(monkeypatch):
    stats = iter([{"num_alloc_retries": 3}, {"num_alloc_retries": 5, "reserved_bytes.all.peak": 640}] * 2)
    fractions, spans = [], iter([10, 12, 11])

    class Step:
        def step(self):
            if fractions[-1] < 0.5:
                raise torch.OutOfMemoryError
            return [SimpleNamespace(end_ns=next(spans))]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: next(stats))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    found = limited.limited(Step(), 650, 3)
    assert found == {"limit_bytes": 650, "spans_ns": [12, 11], "held_bytes": 640, "retries": 2}
    out = limited.limited(Step(), 450, 3)
    assert (out["spans_ns"], fractions) == (None, [0.65, 0.45])
    lines = list(limits({"offload": [found | {"room_mib": 0}, out | {"room_mib": 0}]}))
    assert lines[-2:] == ["| offload | 0 | 0.0 | 0.0 | 2 |", "| offload | 0 | out of memory | 0.0 | 2 |"]


def test_facts_name_every_gpu_that_torch_sees(monkeypatch):
    gpu = SimpleNamespace(name="Fake GPU", total_memory=80, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = facts.facts()
    assert found["gpus"] == [{"name": "Fake GPU", "memory_bytes": 80, "capability": "9.0"}] * 2
    assert (found["nccl"], found["environment"]["CUDA_VISIBLE_DEVICES"]) == ("2.28.3", "0,1")


# -- commands


def test_a_command_that_is_late_is_ended_with_all_that_it_started(tmp_path):
    commands = Commands(tmp_path / "log", 100)
    mark = tmp_path / "alive"
    script = f"echo begun; (sleep 1.5; touch {mark}) & wait"
    with pytest.raises(Failed, match=r"^sh -c .*: ended after 0 s, its limit$") as failed:
        commands.run(["sh", "-c", script], 0.4)
    assert failed.value.printed == "begun\n"
    time.sleep(1.5)
    assert not mark.exists()
    assert "begun" in (tmp_path / "log").read_text()


def test_a_command_that_fails_says_so_with_its_last_line(tmp_path):
    commands = Commands(tmp_path / "log", 100)
    with pytest.raises(Failed, match=r"^python -c .*: exit code 3: no such thing$"):
        commands.run([sys.executable, "-c", "import sys; print('no such thing', file=sys.stderr); sys.exit(3)"], 60)
    assert commands.run([sys.executable, "-c", "import os; print(os.environ['A'])"], 60, {"A": "b"}) == "b\n"


def test_nothing_starts_when_the_budget_is_spent(tmp_path):
    with pytest.raises(Failed, match=r"^true: not started, no time is left$"):
        Commands(tmp_path / "log", 0).run(["true"], 60)


# -- the script


def wheel(folder, name, version):
    """A package of one empty module."""
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


def link_pip(python):
    """Give an environment the pip of this one: to install it anew takes as long as all else that pip does here."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    for name in {path.parts[0] for path in distribution("pip").files or () if path.parts[0].startswith("pip")}:
        (packages / name).symlink_to(distribution("pip").locate_file(name))


def test_wheels_go_into_an_environment_of_their_own_beside_what_the_interpreter_has(tmp_path):
    """The interpreter is of an environment, as on machines where torch is in one; its packages stay as they are."""
    if subprocess.run([sys._base_executable, "-c", "import msgspec"], capture_output=True, check=False).returncode == 0:
        pytest.skip("the system has the package that is to be missing")
    machine, environment, wheels = tmp_path / "machine", tmp_path / "environment", tmp_path / "wheels"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", machine], check=True, timeout=100)
    wheels.mkdir()
    python = str(machine / "bin" / "python")
    link_pip(python)
    for name, number in (("msgspec", "99.1"), ("rich", "99.1")):
        wheel(wheels, name, number)
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-index", "--find-links", wheels, "rich"], check=True, timeout=100
    )
    wheel(wheels, "rich", "99.2")
    done = subprocess.run(
        ["sh", SCRIPT, "--help"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": python, "WHEELS": str(wheels), "VENV": str(environment)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: bench/gpu.sh" in done.stdout
    assert "bench/gpu.sh: ortools>=" in done.stderr
    assert "msgspec" not in done.stderr
    asked = "from importlib.metadata import version; print(version('msgspec'), version('rich'))"
    for where, expected in ((environment / "bin" / "python", "99.1 99.1"), (Path(python), None)):
        told = subprocess.run([where, "-c", asked], capture_output=True, text=True, timeout=60, check=False)
        assert (told.stdout.strip() or None) == expected
