"""The commands as a person or a script meets them: exit codes, one clear sentence, clean stdout, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import pytest

from optpipe_compiler import cli, compiler
from optpipe_compiler.documents import ir, profile
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.errors import BadInput, Infeasible, MissingDependency, NotFound, Rejected, RunFailed
from optpipe_compiler.plan.options import TIME_LIMITS
from optpipe_compiler.published import METHODS
from optpipe_compiler.verify import verify
from tests.instances import quick, uniform
from tests.processes import children, press_ctrl_c, started

if TYPE_CHECKING:
    from collections.abc import Iterator

GB = 10**9
ROOT = Path(__file__).parent.parent
FAST = ("--microbatches", "4", "--time-limit", "0.3")


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command in an empty directory with a small profile.json; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text(canonical(uniform(2, 1)))

    def command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["optpipe", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return Outcome(ended.value.code, out, err)

    return command


TINY = {
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 301, "n_positions": 32},
    "llama": {
        "model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 299,
        "intermediate_size": 24,
    },
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2,
        "vocab_size": 299, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@pytest.fixture
def optpipe(run):
    """Run a command that succeeds, beside tiny models; return what it prints."""
    for name, config in TINY.items():
        Path(f"{name}.json").write_text(json.dumps(config))

    def command(*arguments):
        found = run(*map(str, arguments))
        assert found.code == 0, found.err
        return found.out

    return command


def refused(outcome: Outcome, code: int) -> str:
    """The one sentence of a failure: nothing on stdout, one line on stderr, no traceback."""
    assert (outcome.code, outcome.out) == (code, "")
    assert "Traceback" not in outcome.err
    lines = [line for line in outcome.err.splitlines() if line.startswith("optpipe: ")]
    assert len(lines) == 1
    assert outcome.err.rstrip().endswith(lines[0])
    return lines[0].removeprefix("optpipe: ")


def refused_in_json(outcome: Outcome, code: int) -> dict[str, Any]:
    """The error of a failure with `--json`: one object on stdout with the sentence that is on stderr, too."""
    (error,) = json.loads(outcome.out).values()
    assert outcome.out.count("\n") == 1
    assert error["exit_code"] == code
    assert refused(Outcome(outcome.code, "", outcome.err), code) == error["message"]
    return error


# -- exit codes and sentences -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("compile", "none.json", "--mem", "2GB"), "none.json: cannot be read: No such file or directory"),
        (("verify", "none.json"), "none.json: cannot be read: No such file or directory"),
        (("show", "none.json"), "none.json: cannot be read: No such file or directory"),
        (("verify", "."), ".: cannot be read: Is a directory"),
        (("verify", "profile.json"), 'profile.json: $.format is "optpipe-profile", expected "optpipe-schedule"'),
        (("compile", "--mem", "40XB"), "--mem is '40XB', expected a size such as 40GB, 37.25GiB or 512MB"),
        (("compile", "--mem", "2GB", "--host-mem", "x"), "--host-mem is 'x', expected a size such as 40GB, "),
        (("compile",), "--mem is missing and the profile does not know the devices' memory; expected e.g. --mem 40GB"),
        (("compile", "--mem", "2GB", "--from", "p.json", "--method", "1f1b"), "--from is p.json, expected none with"),
        (("compile", "--mem", "2GB", "--microbatches", "0"), "--microbatches is 0, expected at least 1"),
        (("compile", "--mem", "2GB", "--devices", "3"), "--devices is 3, expected at most the profile's 2 layers"),
        (
            ("profile", "--model", "llama-7b", "--gpu", "h100-sxm", "--devices", "35"),
            "--devices is 35, expected at most the model's 34 layers",
        ),
        (
            ("profile", "--model", "gpt2", "--gpu", "h100-sxm", "--granularity", "half", "--devices", "27"),
            "--devices is 27, expected at most the model's 26 layers",
        ),
        (
            ("compile", "--mem", "2GB", "--placement", "v", "--stages-per-device", "2"),
            "2 layers cannot fill 2 devices x 2 stages per device: expected at most 2 stages",
        ),
        (("profile", "uniform", "--devices", "0"), "--devices is 0, expected 1 to 10000"),
        (("profile", "--devices", "8", "uniform"), "--devices stands before uniform, expected the options of uniform "),
        (("profile", "-o", "p.json", "uniform"), "--output stands before uniform, expected the options of uniform "),
        (("profile", "uniform", "--head-ms", "1,2"), "--head-ms is '1,2', expected three numbers F,I,W in ms, "),
        (
            ("compile", "-", "--mem", "2GB"),
            "-: cannot be read: No such file or directory; /dev/stdin reads what",
        ),
        (("profile", "uniform", "-o", "no/p.json"), "no/p.json: cannot be written: No such file or directory"),
    ],
)
def test_bad_input_is_refused_with_exit_code_2_and_one_sentence(run, arguments, sentence):
    assert refused(run(*arguments), 2).startswith(sentence)
    assert [path.name for path in Path().iterdir()] == ["profile.json"]


OUTPUTS = [
    ("-o", ("compile", "--mem", "2GB")),
    ("-o", ("sweep", "--mem", "2GB")),
    ("-o", ("profile", "uniform")),
    ("-o", ("profile",)),
    ("-o", ("report",)),
    ("-o", ("export", "--to", "svg")),
    ("--svg", ("show",)),
    ("--svg", ("sweep", "--mem", "2GB")),
    ("--trace", ("run",)),
    ("--save", ("run", "--replan")),
    ("--save-profile", ("run", "--replan")),
]


@pytest.mark.parametrize(("option", "command"), OUTPUTS)
def test_no_file_is_named_as_other_tools_name_their_output(run, option, command):
    assert refused(run(*command, option, "-"), 2) == f"{option} is '-', expected a file; /dev/stdout prints it"
    assert [path.name for path in Path().iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("compile", "--mem", "2GB", "-o", "profile.json"), "-o names profile.json, which is the profile that is read"),
        (("compile", "--mem", "2GB", "-o", "link.json"), "-o names link.json, which is the profile that is read"),
        (("compile", "--mem", "2GB", "--lengths", "t", "-o", "t"), "-o names t, which --lengths names, too"),
        (("sweep", "--mem", "2GB", "--svg", "profile.json"), "--svg names profile.json, which is the profile that is"),
        (("sweep", "--mem", "2GB", "-o", "s.json", "--svg", "./s.json"), "s.json is named for several files"),
        (("sweep", "--mem", "2GB", "--model", "llama.json", "--gpu", "a100-80gb,g.json", "-o", "g.json"), "-o names g"),
        (
            ("profile", "--model", "llama.json", "--gpu", "a100-80gb", "--devices", "2", "-o", "llama.json"),
            "-o names llama.json, which",
        ),
        (("profile", "--from-run", "run.json", "-o", "run.json"), "-o names run.json, which --from-run names, too"),
        (("profile", "--from-run", "run.json", "-o", "profile.json"), "-o names profile.json, which is the profile"),
        (("show", "--svg", "schedule.json"), "--svg names schedule.json, which is the schedule that is read"),
        (("report", "-o", "schedule.json"), "-o names schedule.json, which is the schedule that is read"),
        (("report", "--trace", "t.json", "--trace", "u.json", "-o", "u.json"), "-o names u.json, which --trace names"),
        (("export", "--to", "svg", "-o", "schedule.json"), "-o names schedule.json, which is the schedule that is"),
        (("export", "schedule.svg", "--to", "svg"), "-o names schedule.svg, which is the schedule that is read"),
        (("run", "--trace", "schedule.json"), "--trace names schedule.json, which is the schedule that is read"),
        (("run", "--replan", "--save", "profile.json"), "--save names profile.json, which --profile names, too"),
    ],
)
def test_no_file_that_is_read_is_written_over(run, arguments, sentence):
    text = ir.to_text(quick(uniform(2, 1), 2 * GB).schedule)
    for name in ("schedule.json", "schedule.svg"):
        Path(name).write_text(text)
    Path("llama.json").write_text(json.dumps(TINY["llama"]))
    Path("link.json").symlink_to("profile.json")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    said = refused(run(*arguments), 2)
    assert said.startswith(sentence)
    assert said.endswith((", expected another file", ", expected it for one"))
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_a_schedule_may_replace_the_one_that_it_starts_from(run):
    schedule = Path("schedule.json")
    assert run("compile", "--mem", "2GB", *FAST).code == 0
    first = schedule.read_bytes()
    for option in ("--from", "--keep-placement"):
        assert run("compile", "--mem", "3GB", *FAST, option, "schedule.json").code == 0
        assert schedule.read_bytes() != first


def test_torchtitans_table_is_not_written_over_the_schedule(run):
    Path("plan.csv").write_text(ir.to_text(quick(uniform(2, 1), 2 * GB, offload=False, recompute=False).schedule))
    said = refused(run("export", "plan.csv", "--to", "torchtitan"), 2)
    assert said == "-o names plan.csv, which is the schedule that is read, expected another file"


@pytest.mark.parametrize(
    "arguments",
    [
        ("compile", "--mem", "2GB", "--time-limit", "0"),
        ("sweep", "--mem", "2GB,3GB", "--time-limit", "0", "-j", "1"),
        ("profile", "uniform"),
    ],
)
def test_a_printed_file_is_alone_on_stdout(run, arguments):
    """/dev/stdout is another one here: what is captured is what is said beside the file."""
    outcome = run(*arguments, "-o", "/dev/stdout")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err
    assert refused_in_json(run(*arguments, "--json", "-o", "/dev/stdout"), 2)["message"] == (
        "--json prints an object, and /dev/stdout would be printed with it: expected a file"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("compile", "--memory", "2GB"), "Error: No such option"),
        (("compile", "--placement", "w", "--mem", "2GB"), "Error: Invalid value for '--placement': 'w' is not one of"),
        (("compile", "--time-limit", "soon"), "Error: Invalid value for '--time-limit': 'soon' is not a valid float."),
        (("compile", "--devices", "0", "--mem", "2GB"), "Error: Invalid value for '--devices': 0 is not in the range"),
        (("comple",), "Error: No such command 'comple'."),
    ],
)
def test_a_wrong_command_line_ends_with_exit_code_2_and_how_to_get_help(run, arguments, sentence):
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert sentence in outcome.err
    assert "--help' for help." in outcome.err


def test_a_truncated_profile_or_schedule_is_refused(run):
    text = Path("profile.json").read_text()
    Path("profile.json").write_text(text[: len(text) // 2])
    assert refused(run("compile", "--mem", "2GB"), 2).startswith("profile.json: is not complete JSON: ")
    Path("schedule.json").write_text(ir.to_text(quick(uniform(2, 1), 2 * GB).schedule)[:-20])
    for command in ("verify", "show"):
        assert refused(run(command, "schedule.json"), 2).startswith("schedule.json: is not complete JSON: ")
    pytest.importorskip("torch")
    assert refused(run("run", "schedule.json"), 2).startswith("schedule.json: is not complete JSON: ")


def test_a_wrong_value_in_a_profile_is_named_by_path_value_and_expectation(run):
    Path("profile.json").write_text(
        Path("profile.json").read_text().replace('"saved_bytes": 1000000000', '"saved_bytes": -1')
    )
    sentence = "profile.json: $.layers[0].saved_bytes is -1: expected an integer >= 0"
    assert refused(run("compile", "--mem", "2GB"), 2) == sentence


def test_a_cap_that_cannot_fit_ends_with_exit_code_3_and_the_smallest_that_would_do(run):
    sentence = refused(run("compile", "--mem", "0.5GB", "--no-offload", *FAST), 3)
    found = re.search(r"device (\d) is (\d+) bytes .* short; the smallest --mem that would do is (\d+) ", sentence)
    assert found is not None
    smallest = int(found[3])
    assert int(found[2]) == smallest - 500_000_000
    assert not Path("schedule.json").exists()
    assert run("compile", "--mem", str(smallest), "--no-offload", *FAST).code == 0
    again = refused(run("compile", "--mem", str(smallest - 1), "--no-offload", *FAST), 3)
    assert f"is 1 bytes (1 B) short; the smallest --mem that would do is {smallest} " in again


def test_the_smallest_cap_can_be_pasted_where_a_profile_counts_in_bytes(run):
    Path("profile.json").write_text(re.sub(r"(_bytes\": \d+)000000\b", r"\1", Path("profile.json").read_text()))
    sentence = refused(run("compile", "--mem", "500B", "--no-offload", *FAST), 3)
    found = re.search(r"the smallest --mem that would do is (\S+) ", sentence)
    assert found is not None
    assert run("compile", "--mem", found[1], "--no-offload", *FAST).code == 0


def test_the_cap_that_a_published_schedule_needs_can_be_pasted(run):
    Path("profile.json").write_text(re.sub(r"(_bytes\": \d+)000000\b", r"\1", Path("profile.json").read_text()))
    asked = ("--method", "gpipe", "--microbatches", "4", *FAST)
    found = re.search(r"raise --mem to (\S+)$", refused(run("compile", "--mem", "500B", *asked), 3))
    assert found is not None
    assert run("compile", "--mem", found[1], *asked).code == 0


def test_a_published_schedule_that_lacks_host_memory_alone_is_not_said_to_lack_that_of_devices(run):
    asked = ("--method", "1f1b-offload", "--microbatches", "4", *FAST)
    assert run("compile", "--mem", "2GB", *asked).code == 0
    sentence = refused(run("compile", "--mem", "2GB", "--host-mem", "1B", *asked), 3)
    assert sentence == "1f1b-offload does not fit: its offloads need more host memory; raise --host-mem"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Rejected("no"), 1),
        (BadInput("no"), 2),
        (Infeasible("no"), 3),
        (NotFound("no"), 4),
        (RunFailed("no"), 5),
        (MissingDependency("no"), 6),
    ],
)
def test_every_failure_ends_with_its_own_exit_code(run, monkeypatch, error, code):
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(compiler, "compile_schedule", fail)
    assert refused(run("compile", "--mem", "2GB"), code) == "no"


def test_a_replay_that_fails_ends_with_exit_code_5(run, monkeypatch):
    pytest.importorskip("torch")
    import optpipe_torch.launch.run

    def fail(*arguments: object, **options: object) -> None:
        raise RunFailed("rank 1 died")

    monkeypatch.setattr(optpipe_torch.launch.run, "run", fail)
    run("compile", "--mem", "2GB", *FAST)
    outcome = run("run", "schedule.json")
    assert outcome.code == 5
    assert outcome.err.splitlines()[-1] == "optpipe: rank 1 died"


def test_the_help_of_every_exit_code_is_in_the_help(run):
    text = " ".join(run("--help").out.split())
    codes = {kind.exit_code for kind in (Rejected, BadInput, Infeasible, NotFound, RunFailed, MissingDependency)}
    assert codes == {1, 2, 3, 4, 5, 6}
    assert all(f"{code} " in text.split("Exit codes:")[1] for code in (0, *codes, 130))


def test_a_path_that_cannot_be_written_is_refused_before_the_work(run, monkeypatch):
    monkeypatch.setattr(compiler, "compile_schedule", lambda *arguments: pytest.fail("the work was done"))
    sentence = "no/s.json: cannot be written: No such file or directory"
    assert refused(run("compile", "--mem", "2GB", "-o", "no/s.json"), 2) == sentence
    assert refused(run("profile", "-o", "no/s.json"), 2) == sentence


@pytest.mark.parametrize("limit", [pytest.param("nan"), pytest.param("-1")])
def test_a_time_limit_that_cannot_be_meant_is_refused(run, limit):
    assert refused(run("compile", "--mem", "2GB", "--time-limit", limit), 2).startswith(f"--time-limit is {limit}")


def test_a_published_schedule_is_written_on_demand(run):
    report = json.loads(run("compile", "--mem", "2GB", "--method", "1f1b", "--microbatches", "4", "--json").out)
    assert report["method"] == "1f1b"
    assert report["makespan_ns"] == report["baselines"]["1f1b"]["makespan_ns"]
    assert run("verify", "--profile", "profile.json").code == 0


def test_a_published_schedule_that_does_not_fit_ends_with_exit_code_3_and_an_unknown_one_with_2(run):
    sentence = refused(run("compile", "--mem", "2GB", "--method", "gpipe", "--microbatches", "4"), 3)
    assert "gpipe does not fit --mem 2.00 GB (1.86 GiB): it needs 4000000000 bytes" in sentence
    assert refused(run("compile", "--mem", "2GB", "--method", "best"), 2).startswith(
        "--method is 'best', expected one of"
    )
    assert [path.name for path in Path().iterdir()] == ["profile.json"]


def test_all_published_schedules_are_listed_without_a_profile(run):
    Path("profile.json").unlink()
    outcome = run("compile", "--list-methods")
    assert outcome.code == 0
    heads = [line.split()[0] for line in outcome.out.splitlines() if line and line[0] != " "]
    assert [word for word in heads if word in METHODS] == list(METHODS)
    found = json.loads(run("compile", "--list-methods", "--json").out)["methods"]
    assert [method["name"] for method in found] == list(METHODS)
    assert all(method["kind"] and method["stages_per_device"] and method["says"] for method in found)


def test_bounds_of_several_caps_are_printed_without_solving(run):
    outcome = run("bounds", "--mem", "1GB,2GB,9GB", "--microbatches", "4")
    assert outcome.code == 0
    rows = [line.split() for line in outcome.out.splitlines()[1:4]]
    assert [" ".join(row[:2]) for row in rows] == ["1.00 GB", "2.00 GB", "9.00 GB"]
    assert rows[0][4] > rows[2][4]
    assert refused(run("bounds", "--mem", "1GB,x"), 2).startswith("--mem is 'x', expected a size such as ")


def test_bounds_say_where_nothing_fits(run):
    outcome = run("bounds", "--mem", "1MB,2GB", "--microbatches", "4")
    low, high = outcome.out.splitlines()[1:3]
    assert "nothing fits" in low and "some device needs " in low
    assert "nothing fits" not in high
    found = json.loads(run("bounds", "--mem", "1MB", "--microbatches", "4", "--json").out)["bounds"]
    needed = found[0]["least_mem_bytes"]
    assert refused(run("compile", "--mem", f"{needed - 1}B", "--microbatches", "4", "--time-limit", "1"), 3)


# -- what is printed where ----------------------------------------------------------------------------------------

FIELDS = {
    "outcome": str,
    "method": str,
    "makespan_ns": int,
    "lower_bound_ns": int,
    "gap": float,
    "bubble_fraction": float,
    "peak_bytes": list,
    "cap_bytes": int,
    "num_offloads": int,
    "num_recomputes": int,
    "wall_s": float,
    "cached": bool,
    "baselines": dict,
}
"""What issue 2 asks of `compile --json`."""


def test_json_is_exactly_one_object_with_the_promised_fields(run):
    outcome = run("compile", "--mem", "2GB", "--json", *FAST)
    assert outcome.code == 0
    assert len(outcome.out.splitlines()) == 1
    report = json.loads(outcome.out)
    assert {name: type(report[name]) for name in FIELDS} == FIELDS
    schedule = ir.load("schedule.json")
    assert report["makespan_ns"] == schedule.forecast.makespan_ns
    assert report["peak_bytes"] == [device.peak_bytes for device in schedule.devices]
    assert report["gap"] == 1 - report["lower_bound_ns"] / report["makespan_ns"]
    assert report["cap_bytes"] == 2 * GB
    assert set(report["baselines"]) == {name for name, method in METHODS.items() if not method.sliced}
    for baseline in report["baselines"].values():
        assert {"makespan_ns", "peak_bytes", "fits"} <= set(baseline)
        assert (baseline["makespan_ns"] is None) == ("reason" in baseline)


def with_json(group: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands that have `--json`."""
    for name, command in group.commands.items():
        if any("--json" in option.opts for option in command.params):
            yield *names, name
        if isinstance(command, click.Group):
            yield from with_json(command, *names, name)


@pytest.mark.parametrize("command", list(with_json(cli.cli)), ids=" ".join)
def test_a_command_that_fails_with_json_prints_the_error_as_its_object(run, command):
    outcome = run(*command, "--json", "--zzz")
    assert outcome.code == 2
    message = "No such option '--zzz'."
    assert json.loads(outcome.out) == {"error": {"exit_code": 2, "message": message}}
    assert message in outcome.err
    assert run(*command, "--zzz").out == ""


def test_every_kind_of_failure_is_an_object_where_json_is_asked_for(run, monkeypatch):
    Path("pyproject.toml").write_text("[tool.optpipe.bounds]\njson = true\n")
    assert refused_in_json(run("bounds", "none.json", "--mem", "1GB"), 2)["message"].startswith("none.json: cannot be")
    for asked in (("--no-offload",), ("--method", "gpipe")):
        error = refused_in_json(run("compile", "--mem", "0.5GB", *asked, "--json", *FAST), 3)
        assert error["least_mem_bytes"] > GB / 2
        assert str(error["least_mem_bytes"]) in error["message"]

    def fail(error: BaseException) -> Outcome:
        def failing(*arguments: object) -> None:
            raise error

        monkeypatch.setattr(compiler, "compile_schedule", failing)
        return run("compile", "--mem", "2GB", "--json")

    assert refused_in_json(fail(KeyboardInterrupt()), 130) == {"exit_code": 130, "message": "interrupted"}
    outcome = fail(ValueError("odd\nand more"))
    assert json.loads(outcome.out)["error"] == {"exit_code": 70, "message": "a defect of optpipe: ValueError: odd"}
    assert "Traceback" in outcome.err


def test_a_verdict_that_rejects_is_the_only_object(run):
    Path("profile.json").write_text(Path("profile.json").read_text().replace("\n", "\n\n", 1))
    outcome = run("fmt", "--check", "--json", "profile.json")
    assert (outcome.code, json.loads(outcome.out)) == (1, {"would_change": ["profile.json"]})


@pytest.mark.parametrize(("rank", "printed"), [("0", 1), ("1", 0)])
def test_of_the_ranks_that_torchrun_started_the_first_prints_the_error(run, monkeypatch, rank, printed):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(cli, "_end_rank", lambda code: None)
    outcome = run("verify", "none.json", "--json")
    assert (outcome.code, outcome.out.count("\n")) == (2, printed)


def test_json_counts_what_the_schedule_does(run):
    Path("profile.json").write_text(canonical(uniform(2, 2, d2h_ms=0.2, h2d_ms=0.2)))
    report = json.loads(run("compile", "--mem", "1GB", "--json", "--no-recompute", *FAST).out)
    assert report["num_offloads"] == Path("schedule.json").read_text().count('"op": "offload"') > 0
    assert report["num_recomputes"] == 0
    report = json.loads(run("compile", "--mem", "1GB", "--json", "--no-offload", *FAST).out)
    assert report["num_recomputes"] == Path("schedule.json").read_text().count('"op": "recompute"') > 0
    assert report["num_offloads"] == 0


def test_the_summary_is_on_stdout_and_the_progress_on_stderr(run):
    outcome = run("compile", "--mem", "2GB", *FAST)
    assert outcome.code == 0
    text = " ".join(outcome.out.split())
    assert "cap per device 2.00 GB (1.86 GiB): covers weights, gradients and optimizer state" in text
    assert "proven bound" in text
    assert "1f1b" in text
    assert "wrote schedule.json in" in text
    assert "incumbent" not in text
    assert all("incumbent" in line and "bound" in line and "gap" in line for line in outcome.err.splitlines())
    assert outcome.err


def test_what_is_compiled_verifies_and_shows(run):
    assert run("compile", "--mem", "2GB", *FAST, "-o", "a.json").code == 0
    outcome = run("verify", "a.json", "--profile", "profile.json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("a.json: holds. No execution exceeds 2.00 GB (1.86 GiB) on any device.\n")
    assert outcome.out.splitlines()[-1] == (
        "Taken from the file, not proved: the bound, the outcome, the baselines' times, the provenance."
    )
    alone = json.loads(run("verify", "a.json", "--json").out)
    beside = json.loads(run("verify", "a.json", "--profile", "profile.json", "--json").out)
    assert alone["schedule"] == "a.json"
    assert alone["violations"] == beside["violations"] == []
    claimed = ["$.forecast.lower_bound_ns", "$.forecast.outcome", "$.forecast.baselines", "$.provenance"]
    assert beside["not_proved"] == claimed
    assert alone["not_proved"] == [*claimed, "$.stages", "$.forecast.stages", "$.forecast.links"]
    assert run("verify", "a.json").out.splitlines()[-1].endswith("all sizes, times, bandwidths.")
    shown = run("show", "a.json")
    assert (shown.code, shown.err) == (0, "")
    assert "F forward" in shown.out


def test_a_false_claim_to_be_optimal_passes_and_is_named_as_not_proved(run):
    record = quick(uniform(2, 1), 2 * GB, method="1f1b").schedule
    assert record.forecast.outcome == "feasible"
    claim = {"lower_bound_ns": record.forecast.makespan_ns, "outcome": "optimal"}
    forecast = msgspec.structs.replace(record.forecast, objective="makespan", **claim)
    Path("claim.json").write_text(ir.to_text(msgspec.structs.replace(record, forecast=forecast)))
    verdict = json.loads(run("verify", "claim.json", "--json").out)
    assert verdict["violations"] == []
    assert {"$.forecast.lower_bound_ns", "$.forecast.outcome"} <= set(verdict["not_proved"])


def test_a_schedule_that_breaks_its_promise_ends_verify_with_exit_code_1_and_is_not_run(run):
    schedule = quick(uniform(2, 1), 2 * GB).schedule
    text = ir.to_text(schedule).replace('"peak_bytes": 2000000000', '"peak_bytes": 1999999999')
    digest = ir.contract_digest(ir.decode(text, ir.Schedule, "", format=ir.FORMAT, version=1, revision=0))
    Path("bad.json").write_text(text.replace(schedule.digest, digest))
    outcome = run("verify", "bad.json")
    assert outcome.code == 1
    assert "device-memory" in outcome.out
    assert re.fullmatch(r"optpipe: bad\.json: \d+ violations?\n", outcome.err)
    assert len(json.loads(run("verify", "bad.json", "--json").out)["violations"]) >= 1
    pytest.importorskip("torch")
    assert refused(run("run", "bad.json"), 1).startswith("bad.json: not run, verify rejects it: ")


def test_a_profile_is_written_where_it_is_asked_to_and_named_as_typed(run):
    name = "a[b] long enough to be broken over two lines by anything that fills paragraphs to eighty columns.json"
    outcome = run("profile", "uniform", "--devices", "3", "--layers-per-device", "2", "-o", name)
    assert outcome == Outcome(0, f"{name}: 3 devices, 6 layers, all numbers manual\n", "")
    assert profile.load(Path(name)) == uniform(3, 2)


def test_every_option_of_a_uniform_profile_reaches_it(run):
    arguments = "--forward-ms 2 --backward-input-ms 3 --backward-weight-ms 1 --recompute-ms 1.5 --p2p-ms 0.2 "
    arguments += "--activation-gb 2 --residue-fraction 0.25 --boundary-fraction 0.1 --d2h-ms 1.05 --h2d-ms 2.1 "
    arguments += "--static-gb 4 --shared-links pairs --duplex-slowdown 1/0.7 --embedding-ms 0.1,0,0.2 --head-ms 1,1,1"
    arguments += " --embedding-parts 2 --head-parts 3"
    assert run("profile", "uniform", "--devices", "2", "--layers-per-device", "2", *arguments.split()).code == 0
    assert profile.load(Path("profile.json")) == uniform(
        2,
        2,
        forward_ms=2,
        backward_input_ms=3,
        backward_weight_ms=1,
        recompute_ms=1.5,
        p2p_ms=0.2,
        activation_gb=2,
        residue_fraction=0.25,
        boundary_fraction=0.1,
        d2h_ms=1.05,
        h2d_ms=2.1,
        static_gb=4,
        shared_links="pairs",
        duplex_slowdown=1 / 0.7,
        embedding_ms=(0.1, 0, 0.2),
        head_ms=(1, 1, 1),
        embedding_parts=2,
        head_parts=3,
    )


def test_every_option_of_compile_reaches_the_planner(run, monkeypatch):
    chosen: list[compiler.Options] = []

    def stop(costs: object, options: compiler.Options, *others: object) -> None:
        chosen.append(options)
        raise NotFound("stop here")

    monkeypatch.setattr(compiler, "compile_schedule", stop)
    run("compile", "--mem", "3GB")
    assert chosen.pop() == compiler.Options(mem_bytes=3 * GB)
    arguments = "--mem 1GiB --microbatches 5 --devices 2 --host-mem 3MB --placement v --stages-per-device 2 --seed 9 "
    arguments += "--objective span --no-offload --no-recompute --no-split --time-limit 2.5 --reproducible"
    run("compile", *arguments.split())
    assert chosen == [
        compiler.Options(
            mem_bytes=2**30,
            microbatches=5,
            devices=2,
            host_mem_bytes=3_000_000,
            placement="v",
            stages_per_device=2,
            objective="span",
            offload=False,
            recompute=False,
            split=False,
            time_limit_s=2.5,
            seed=9,
            reproducible=True,
        )
    ]


def test_the_cap_comes_from_the_profile_if_it_knows_the_devices_memory(run):
    text = Path("profile.json").read_text().replace('"kind": "uniform"', '"kind": "gpu", "memory_bytes": 3000000000')
    Path("profile.json").write_text(text)
    assert json.loads(run("compile", "--json", *FAST).out)["cap_bytes"] == 3 * GB


def commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """All commands below a click group, groups that run by themselves included."""
    found = []
    for name, command in group.commands.items():
        found.append((*path, name))
        found += commands(command, (*path, name)) if hasattr(command, "commands") else []
    return found


@pytest.mark.parametrize("command", commands(cli.cli), ids=" ".join)
def test_the_help_of_every_command_shows_an_example_of_itself(run, command):
    outcome = run(*command, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"Example: optpipe {' '.join(command)} " in " ".join(outcome.out.split())


def test_the_help_of_compile_names_the_time_limits_of_the_planner(run):
    (few, first), (more, second), (_, last) = TIME_LIMITS
    limits = f"[default: {first:g} up to {few} devices, {second:g} up to {more}, {last:g} above]"
    assert limits in " ".join(run("compile", "--help").out.split())


def test_the_version_is_printed(run):
    assert re.fullmatch(r"optpipe, version \d+\.\d+\.\d+\n", run("--version").out)


# -- interruptions ------------------------------------------------------------------------------------------------


def test_an_interruption_before_there_is_anything_to_return_ends_with_exit_code_130(run, monkeypatch):
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "compile_schedule", interrupt)
    assert refused(run("compile", "--mem", "2GB"), 130) == "interrupted"


def test_an_interruption_while_a_report_times_a_baseline_ends_with_exit_code_130(run, monkeypatch):
    Path("schedule.json").write_text(ir.to_text(quick(uniform(2, 1), 2 * GB).schedule))

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "under_noise", interrupt)
    assert refused(run("report", "--profile", "profile.json"), 130) == "interrupted"
    assert not Path("report.html").exists()


def test_an_interruption_before_the_first_schedule_ends_with_exit_code_130(run, monkeypatch):
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "explore", interrupt)
    refused(run("compile", "--mem", "2GB"), 130)


def start(*arguments: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a command as a process of its own, in a process group of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "100"}
    environment |= options.pop("environment", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command = [sys.executable, "-m", "optpipe_compiler.cli", *arguments]
    return started(subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **pipes))


@pytest.mark.parametrize("whole_group", [False, True], ids=["kill -INT", "terminal"])
def test_ctrl_c_in_the_middle_of_a_search_writes_the_best_schedule_so_far(tmp_path, whole_group):
    costs = uniform(3, 2)
    (tmp_path / "profile.json").write_text(canonical(costs))
    arguments = ("compile", "--mem", "1.1GB", "--microbatches", "6", "--time-limit", "30")
    with start(*arguments, folder=tmp_path) as process:
        begun = next(line for line in process.stderr if line.startswith("search "))
        solvers = children(process.pid)
        press_ctrl_c(process.pid, whole_group=whole_group)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted: this is the best schedule so far"
    assert "wrote schedule.json" in out
    schedule = ir.load(tmp_path / "schedule.json")
    assert verify(schedule, costs) == []
    assert solvers, begun
    assert not any(Path(f"/proc/{pid}").exists() for pid in solvers)


def test_a_reader_that_closes_the_pipe_early_sees_no_traceback(tmp_path):
    (tmp_path / "schedule.json").write_text(ir.to_text(quick(uniform(2, 1), 2 * GB).schedule))
    with start("show", folder=tmp_path) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


# -- colour -------------------------------------------------------------------------------------------------------


def test_nothing_written_to_a_pipe_has_escape_codes(tmp_path):
    (tmp_path / "profile.json").write_text(canonical(uniform(2, 1)))
    for arguments in (("compile", "--mem", "2GB", *FAST), ("show",), ("verify",), ("--help",)):
        with start(*arguments, folder=tmp_path) as process:
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "\x1b" not in out + err
        assert out


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_is_coloured_unless_no_color_is_set(tmp_path, environment, coloured):
    (tmp_path / "schedule.json").write_text(ir.to_text(quick(uniform(2, 1), 2 * GB).schedule))
    terminal, end = pty.openpty()
    with start("show", folder=tmp_path, stdout=end, stderr=end, environment=environment) as process:
        os.close(end)
        text = read_all(terminal)
    assert process.returncode == 0
    assert " forward" in text
    assert bool(re.search(r"\x1b\[[\d;]*(3|4|9|10)\d", text)) == coloured


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "unknown"}, {"NO_COLOR": "1"}], ids=str)
def test_without_colours_an_op_is_as_long_as_its_line(tmp_path, environment):
    (tmp_path / "schedule.json").write_text(ir.to_text(quick(uniform(2, 1), 4 * GB, method="gpipe").schedule))
    terminal, end = pty.openpty()
    with start("show", "--width", "90", folder=tmp_path, stdout=end, stderr=end, environment=environment) as process:
        os.close(end)
        text = read_all(terminal)
    assert process.returncode == 0
    assert re.search(r"dev 0 .*F0-+F1-+F2-+F3-+", re.sub(r"\x1b\[[\d;]*m", "", text))


def test_an_output_that_is_not_utf_8_has_question_marks_and_json_has_escapes(tmp_path):
    (tmp_path / "schedule.json").write_text(ir.to_text(quick(uniform(2, 1), 2 * GB).schedule))
    (tmp_path / "日.json").write_text((tmp_path / "schedule.json").read_text())
    environment = {"PYTHONIOENCODING": "ascii"}
    with start("show", "日.json", folder=tmp_path, environment=environment) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert " mem ??" in out
    with start("show", "日.json", "--json", folder=tmp_path, environment=environment) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.isascii()
    assert json.loads(out)["schedule"] == "日.json"


def read_all(terminal: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode()


# -- outputs that cannot be written, and signals -------------------------------------------------------------------


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line with `optpipe` in it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = line.replace("optpipe", f"{sys.executable} -m optpipe_compiler.cli")
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


ANSWERS = ("verify s.json", "verify s.json --json", "show s.json", "diff s.json t.json", "bounds --mem 2GB", "--help")


@pytest.mark.parametrize("command", ANSWERS)
def test_an_output_that_is_full_or_closed_ends_with_2_and_never_with_1(run, tmp_path, command):
    for name in ("s.json", "t.json"):
        Path(name).write_text(ir.to_text(quick(uniform(2, 1), 2 * GB, method="1f1b").schedule))
    full = shell(f"optpipe {command} > /dev/full", tmp_path)
    assert full.returncode == 2
    assert full.stderr == "optpipe: the output cannot be written: No space left on device\n"
    closed = shell(f"optpipe {command} >&-", tmp_path)
    assert closed.returncode == 2
    assert closed.stderr.startswith("optpipe: the output is closed")
    for nobody in ("2> /dev/full", "2>&-"):
        assert shell(f"optpipe {command} {nobody}", tmp_path).returncode == 0
        assert shell(f"optpipe {command} > /dev/full {nobody}", tmp_path).returncode == 2
        assert shell(f"optpipe verify missing.json {nobody}", tmp_path).returncode == 2


def test_a_file_that_is_full_is_bad_output(run):
    Path("s.json").write_text(ir.to_text(quick(uniform(2, 1), 2 * GB, method="1f1b").schedule))
    sentence = refused(run("export", "s.json", "--to", "svg", "-o", "/dev/full"), 2)
    assert sentence == "/dev/full: cannot be written: No space left on device"


def test_a_defect_ends_with_70_and_not_with_1(run, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(ir, "load", fail)
    outcome = run("verify", "s.json")
    assert outcome.code == 70
    assert outcome.err.startswith("Traceback")


@pytest.mark.parametrize(
    ("number", "command"),
    [(signal.SIGTERM, "compile --mem 1.1GB"), (signal.SIGHUP, "sweep --mem 1GB:2GB:9 -j 2")],
)
def test_a_command_that_is_terminated_leaves_no_process_and_no_temporary_file(run, tmp_path, number, command):
    Path("profile.json").write_text(canonical(uniform(3, 2)))
    heard = {"preexec_fn": lambda: signal.signal(number, signal.SIG_DFL)}  # as it is not for tests under nohup
    process = start(*command.split(), "--microbatches", "6", "--time-limit", "12", folder=tmp_path, **heard)
    until = time.monotonic() + 55  # a first search may have to compile the machine
    while not (started := children(process.pid)) and time.monotonic() < until:
        time.sleep(0.02)
    assert started
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == "optpipe: terminated"
    until = time.monotonic() + 5  # a search that goes on does so for 9 s
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_what_is_one_is_told_in_the_singular(run):
    one = ("--devices", "1", "--layers-per-device", "1")
    said = [
        run("profile", "uniform", *one).out,
        run("compile", "--mem", "2GB", "--microbatches", "1", "--time-limit", "0").out,
        run("bounds", "--mem", "2GB", "--microbatches", "1").out,
        run("compare", "schedule.json", "--profile", "profile.json", "--methods", "1f1b").out,
        run("sweep", "--mem", "2GB,3GB", "--microbatches", "1", "--time-limit", "0", "-j", "1").out,
        run("compile", "--mem", "2GB", "--devices", "2").err,
    ]
    assert "1 device, 1 layer," in said[0]
    assert "1 device, 1 stage, 1 microbatch" in said[1]
    assert "1 fused backward," in said[1]
    for words in said:
        assert words
        assert (
            re.search(r"\b1 (devices|layers|stages|microbatches|fused backwards|offloads|recomputes)\b", words) is None
        )
