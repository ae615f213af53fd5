"""What all commands have in common: -h, -q, -v, --json, defaults from pyproject.toml, completion, a progress line."""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from rich.console import Console

from optpipe_compiler.cli import cli
from optpipe_compiler.compiler import Progress
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.view.progress import ProgressLine
from tests.instances import quick, uniform
from tests.test_cli import FAST, refused, refused_in_json, run  # noqa: F401  (run is a fixture)
from tests.test_help import COMMANDS

GB = 10**9
COSTS = uniform(2, 1)


@pytest.fixture(scope="module")
def schedule() -> str:
    return ir.to_text(quick(COSTS, 2 * GB).schedule)


@pytest.fixture
def there(run, schedule):  # noqa: F811
    Path("schedule.json").write_text(schedule)
    return run


# -- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_short_help_and_both_are_the_same(run, name):  # noqa: F811
    short, long = run(*name.split(), "-h"), run(*name.split(), "--help")
    assert (short.code, short.out) == (0, long.out)
    assert {"-q,", "-v,", "-h,"} <= set(short.out.split())


def test_the_list_of_commands_fits_80_columns_and_cuts_no_summary(run):  # noqa: F811
    out = run("-h").out
    listed = out.split("Commands:\n")[1].split("\n\n")[0].splitlines()
    assert len(listed) == len(cli.commands)
    assert all(len(line) <= 80 and line.endswith(".") and not line.endswith("...") for line in listed), listed


@pytest.mark.parametrize("name", ["show", "bounds", "compare"])
def test_lines_that_go_into_a_file_end_where_their_text_does(there, name):
    lines = there(name, *(("--mem", "1GB,2GB") if name == "bounds" else ())).out.splitlines()
    assert len(lines) > 3
    assert [line for line in lines if line != line.rstrip()] == []


# -- --json -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("bounds", "--mem", "1GB,2GB"), {"objective", "devices", "microbatches", "assumptions", "bounds"}),
        (("show",), {"makespan_ns", "lower_bound_ns", "idle", "devices", "host_links", "assumptions"}),
        (("show", "--svg", "s.svg"), {"schedule", "svg"}),
        (("report",), {"schedule", "report"}),
        (("verify",), {"schedule", "violations", "not_proved"}),
        (("compare",), {"best", "schedules", "absent", "differences"}),
        (("export", "--to", "svg"), {"schedule", "to", "wrote"}),
        (
            ("export", "--to", "torch-csv", "--drop-memory-ops"),
            {"schedule", "to", "wrote", "torch_peak_bytes", "torch_receive_buffer_bytes"},
        ),
        (("export", "--to", "primus", "--drop-memory-ops"), {"schedule", "to", "wrote", "primus_peak_bytes"}),
        (("diff", "schedule.json", "schedule.json"), {"old", "new", "verdict"}),
        (("fmt", "schedule.json"), {"rewrote"}),
        (("profile", "uniform", "-o", "other.json"), {"profile", "name", "digest", "noisy"}),
        (("profile", "--list-gpus"), {"gpus"}),
        (("profile", "--list-models"), {"models"}),
    ],
)
def test_every_command_that_answers_does_it_as_one_json_object_too(there, arguments, keys):
    outcome = there(*arguments, "--json")
    assert outcome.code == 0, outcome.err
    assert keys <= set(json.loads(outcome.out))
    assert outcome.out.count("\n") == 1


def test_what_show_says_in_json_is_what_the_file_says(there, schedule):
    said, record = json.loads(there("show", "--json").out), ir.parse(schedule, "s")
    assert said["makespan_ns"] == record.forecast.makespan_ns
    assert [one["peak_bytes"] for one in said["devices"]] == [one.peak_bytes for one in record.devices]
    assert sum(one["share"] for one in said["idle"]) == pytest.approx(record.forecast.bubble_fraction)
    error = refused_in_json(there("show", "--json", "--device", "0"), 2)
    assert error["message"].startswith("--json has the whole schedule")


def test_a_name_that_is_no_text_is_in_json_as_a_terminal_shows_it(there, schedule):
    name = os.fsdecode(b"plan-\xff.json")
    Path(name).write_text(schedule)
    assert json.loads(there("show", name, "--json").out)["schedule"] == r"plan-\udcff.json"
    made = there("profile", "uniform", "-o", name, "--json")
    assert json.loads(made.out)["profile"] == r"plan-\udcff.json"
    assert refused_in_json(there("show", name, "--json"), 2)["message"].startswith(r"plan-\udcff.json: $.format is ")


def test_bounds_say_for_what_they_are(run):  # noqa: F811
    out = run("bounds", "--mem", "2GB").out
    assert "2 devices, 8 microbatches (default: 4 per device), host memory taken as unlimited" in out
    assert "the profile has no static bytes: weights, gradients and optimizer state count 0" in out
    assert "(default" not in run("bounds", "--mem", "2GB", "--microbatches", "8").out
    weighty = uniform(2, 1, static_gb=1)
    Path("profile.json").write_text(canonical(weighty))
    assert "static" not in run("bounds", "--mem", "9GB").out


# -- -q and -v ----------------------------------------------------------------------------------------------------


def test_quiet_leaves_results_and_errors_and_nothing_else(run):  # noqa: F811
    outcome = run("compile", "--mem", "2GB", *FAST, "-q")
    assert (outcome.code, outcome.err) == (0, "")
    assert "wrote schedule.json" in outcome.out
    assert run("-q", "compile", "--mem", "2GB", *FAST).err == ""
    assert (
        refused(run("compile", "--mem", "4", "-q"), 2)
        == "--mem is 4, which is 4 bytes; did you mean 4GB? (write 4B if not)"
    )
    assert run("compile", "--mem", "2GB", *FAST).err != ""


# -- defaults from pyproject.toml ---------------------------------------------------------------------------------


def test_defaults_come_from_the_nearest_pyproject_and_what_is_typed_comes_first(run, monkeypatch):  # noqa: F811
    Path("pyproject.toml").write_text(
        '[tool.optpipe]\nmem = "2GB"\nmicrobatches = 4\nno-recompute = true\n[tool.optpipe.compile]\ntime-limit = 1\n'
    )
    Path("below").mkdir()
    monkeypatch.chdir("below")
    Path("profile.json").write_text(canonical(COSTS))
    assert run("compile").code == 0
    options = ir.load("schedule.json").provenance.options
    assert (options["mem_bytes"], options["microbatches"], options["time_limit_s"]) == (2 * GB, 4, 1.0)
    assert options["recompute"] is False
    outcome = run("compile", "--mem", "3GB", "-v")
    assert ir.load("schedule.json").setup.cap_bytes == 3 * GB
    assert "optpipe: --microbatches has its default from " in outcome.err
    assert json.loads(run("bounds", "--mem", "1GB", "--json").out)["microbatches"] == 4
    Path("pyproject.toml").write_text("[project]\n")
    assert refused(run("compile"), 2).startswith("--mem is missing")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[tool.optpipe]\nmen = 4\n", "[tool.optpipe] has the key 'men', expected some of profile, mem, host-mem, "),
        ('[tool.optpipe]\noutput = "x"\n', "[tool.optpipe] has the key 'output', expected some of profile, mem, "),
        (
            "[tool.optpipe.compile]\nmen = 4\n",
            "[tool.optpipe.compile] has the key 'men', expected some of profile, mem",
        ),
        ("[tool.optpipe.compil]\nmem = 4\n", "[tool.optpipe] has the key 'compil', expected some of profile, mem, "),
        ("[tool.optpipe]\nmem = 4\n", "[tool.optpipe] mem: --mem is 4, which is 4 bytes; did you mean 4GB? (write 4B"),
        ('[tool.optpipe]\nmem = "4XB"\n', "[tool.optpipe] mem: --mem is '4XB', expected a size such as 40GB, "),
        ('[tool.optpipe]\nmicrobatches = "x"\n', "[tool.optpipe] microbatches is 'x': 'x' is not a valid integer."),
        ('[tool.optpipe]\nplacement = "w"\n', "[tool.optpipe] placement is 'w': 'w' is not one of 'auto', 'linear', "),
        ("[tool.optpipe]\nno-split = 1\n", "[tool.optpipe] no-split is 1, expected true or false"),
        ("[tool.optpipe]\nmem = true\n", "[tool.optpipe] mem is True, expected a value of the option"),
        ("[tool]\noptpipe = 3\n", "tool.optpipe is 3, expected a table"),
        ("[tool.optpipe\n", "is no TOML: "),
    ],
)
def test_a_bad_key_or_value_is_one_sentence_that_names_file_and_key(run, text, sentence):  # noqa: F811
    Path("pyproject.toml").write_text(text)
    assert refused(run("compile", "--microbatches", "4"), 2).startswith(f"{Path.cwd()}/pyproject.toml: {sentence}")


def test_a_value_that_only_the_command_can_refuse_names_the_file_too(run):  # noqa: F811
    Path("pyproject.toml").write_text('[tool.optpipe]\nmem = "2GB"\n[tool.optpipe.compile]\ntime-limit = -1\n')
    expected = "--time-limit is -1.0, expected seconds, at least 0"
    assert refused(run("compile"), 2) == f"{expected} ({Path.cwd()}/pyproject.toml: [tool.optpipe.compile])"
    assert refused(run("compile", "--time-limit", "-1"), 2) == expected


def test_a_file_names_no_function_to_call(run):  # noqa: F811
    Path("pyproject.toml").write_text('[tool.optpipe.profile]\nmodel = "evil:build"\n')
    assert "model is 'evil:build', which would call a function" in refused(run("profile"), 2)


def test_profile_takes_its_own_table_alone(run):  # noqa: F811
    Path("pyproject.toml").write_text("[tool.optpipe]\ndevices = 3\n[tool.optpipe.profile.uniform]\np2p-ms = 0.5\n")
    run("profile", "uniform", "-o", "made.json")
    assert Path("made.json").read_text() == canonical(uniform(4, 4, p2p_ms=0.5))


# -- completion ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "incomplete", "expected"),
    [
        (
            ["compile", "--method"],
            "gis-h-off",
            {"gis-h-offload", "gis-h-offload-1", "gis-h-offload-2", "gis-h-offload-3"},
        ),
        (["compare", "--methods"], "paper,zb-h", {"paper,zb-h1", "paper,zb-h2"}),
        (["compare", "--methods"], "st", {"stock"}),
        (["profile", "--gpu"], "h100-s", {"h100-sxm"}),
        (["sweep", "--gpu"], "a100-80gb,h100-s", {"a100-80gb,h100-sxm"}),
        (["profile", "--model"], "llama-7", {"llama-7b"}),
    ],
)
def test_a_shell_completes_methods_gpus_and_models(typed, incomplete, expected):
    found = ShellComplete(cli, {}, "optpipe", "_OPTPIPE_COMPLETE").get_completions(typed, incomplete)
    assert {one.value for one in found} == expected


# -- starting from an earlier schedule -----------------------------------------------------------------------------


def test_compile_starts_from_an_earlier_schedule_and_refuses_a_broken_one(there, schedule):
    before = ir.parse(schedule, "s").forecast.makespan_ns
    outcome = there("compile", "--mem", "2.1GB", "--microbatches", "4", "--time-limit", "0", "--from", "schedule.json")
    assert outcome.code == 0
    assert ir.load("schedule.json").forecast.makespan_ns <= before
    Path("old.json").write_text(schedule.replace(f'"makespan_ns": {before}', '"makespan_ns": 1', 1))
    sentence = refused(there("compile", "--mem", "2GB", "--from", "old.json"), 1)
    assert sentence.startswith("old.json: not taken as a start, verify rejects it: ")


def test_compile_keeps_the_placement_of_an_earlier_schedule(there, schedule):
    old = ir.parse(schedule, "s")
    arguments = ("compile", "--mem", "3GB", "--microbatches", "6", "--time-limit", "0", "--keep-placement")
    assert there(*arguments, "schedule.json", "-o", "new.json").code == 0
    new = ir.load("new.json")
    assert [(s.device, s.layers) for s in new.stages] == [(s.device, s.layers) for s in old.stages]
    sentence = refused(there(*arguments, "schedule.json", "--placement", "v"), 2)
    assert sentence.startswith("--keep-placement says which stages there are, ")


# -- the progress line ----------------------------------------------------------------------------------------------


def test_the_line_moves_every_second_by_itself_and_shows_the_limit(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("optpipe_compiler.view.progress.time.monotonic", lambda: now[0])
    out = StringIO()
    line = ProgressLine(Console(file=out, width=100), 60.0)
    shown = []
    line.state = "local search: incumbent 1.5 s"
    for seconds in (0, 1, 2):
        now[0] = 100.0 + seconds
        shown.append(line.status.status.__rich__().plain)
    assert shown == [f"{n} s of 60 s  local search: incumbent 1.5 s" for n in range(3)]
    with line:
        line.update(Progress("published", 2000, 1000, "1f1b", 0.5))
    assert out.getvalue() == "published: incumbent 2 us (1f1b)  bound 1 us  gap 50.0%  0.5 s of 60 s\n"


def test_a_command_without_a_terminal_says_the_limit(run):  # noqa: F811
    assert " of 1 s\n" in run("compile", "--mem", "2GB", "--microbatches", "4", "--time-limit", "1").err
