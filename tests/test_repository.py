"""What docs/REPO.md promises: hooks, commands in the text, the diff in git, completion, and the exit codes."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from small_schedules import Shape, build, changed

from optpipe_compiler import errors
from optpipe_compiler.cli import cli
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.errors import INTERRUPTED, OptPipeError
from tests.instances import quick, uniform

ROOT = Path(__file__).parent.parent
HOOKS = ROOT / ".pre-commit-hooks.yaml"
TEXT = (ROOT / "docs" / "REPO.md").read_text()


@pytest.fixture
def environment(tmp_path):
    """Put `optpipe` of this interpreter on the path."""
    tool = tmp_path / "bin" / "optpipe"
    tool.parent.mkdir()
    tool.write_text(f"#!{sys.executable}\nimport sys\nfrom optpipe_compiler.cli import main\nmain()\n")
    tool.chmod(0o755)
    return os.environ | {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def shell(environment, tmp_path):
    """Run a command line in a directory with a profile and its schedule."""
    folder = tmp_path / "repository"
    folder.mkdir()
    costs = uniform(2, 1)
    (folder / "profile.json").write_text(canonical(costs))
    (folder / "schedule.json").write_text(ir.to_text(quick(costs, 4 * 10**9, method="1f1b").schedule))

    def run(line: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line], cwd=folder, env=environment | more, capture_output=True, text=True, timeout=60
        )

    run.folder = folder
    return run


def hooks() -> dict[str, dict[str, str]]:
    """The hook file, which uses one level of YAML only."""
    found: dict[str, dict[str, str]] = {}
    for block in HOOKS.read_text().split("- id: ")[1:]:
        name, *rows = block.splitlines()
        assert all(re.fullmatch(r"  \w+: .+", row) for row in rows), rows
        found[name] = dict(row.strip().split(": ", 1) for row in rows)
    return found


# -- hooks --------------------------------------------------------------------------------------------------------


def test_the_hooks_are_what_pre_commit_expects():
    assert set(hooks()) == {"optpipe-verify", "optpipe-fmt"}
    for hook in hooks().values():
        assert hook["language"] == "python"
        assert {"name", "description", "entry", "files"} <= set(hook)


@pytest.mark.parametrize(
    ("path", "which"),
    [
        ("schedule.json", {"optpipe-verify", "optpipe-fmt"}),
        ("plans/schedule-8.json", {"optpipe-verify", "optpipe-fmt"}),
        ("profile.json", {"optpipe-fmt"}),
        ("plans/profile.a100.json", {"optpipe-fmt"}),
        ("reschedule.json", set()),
        ("schedule.json.bak", set()),
        ("package.json", set()),
    ],
)
def test_a_hook_looks_at_files_by_name(path, which):
    assert {name for name, hook in hooks().items() if re.search(hook["files"], path)} == which


def test_the_verify_hook_takes_several_files_and_fails_on_a_bad_one(shell):
    entry = hooks()["optpipe-verify"]["entry"]
    shutil.copy(shell.folder / "schedule.json", shell.folder / "schedule-2.json")
    done = shell(f"{entry} schedule.json schedule-2.json")
    assert (done.returncode, done.stderr) == (0, "")
    *names, claimed = (line.split(":")[0] for line in done.stdout.splitlines())
    assert (names, claimed) == (["schedule.json", "schedule-2.json"], "Taken from the file, not proved")
    broken = changed(ir.load(shell.folder / "schedule.json"), lambda plain: plain["setup"].update(cap_bytes=1))
    (shell.folder / "schedule-2.json").write_text(ir.to_text(broken))
    done = shell(f"{entry} schedule.json schedule-2.json")
    assert done.returncode == 1
    assert re.fullmatch(r"optpipe: schedule-2\.json: \d violations?\n", done.stderr)
    assert "schedule.json: holds." in done.stdout


def test_the_fmt_hook_takes_several_files_and_changes_those_that_need_it(shell):
    entry = hooks()["optpipe-fmt"]["entry"]
    wanted = (shell.folder / "profile.json").read_bytes()
    (shell.folder / "profile.json").write_bytes(wanted.replace(b"\n", b" "))
    done = shell(f"{entry} schedule.json profile.json")
    assert (done.returncode, done.stdout) == (0, "rewrote profile.json\n")
    assert (shell.folder / "profile.json").read_bytes() == wanted


# -- verify with several files ------------------------------------------------------------------------------------


def test_verify_reports_every_file_and_counts_by_file(shell):
    schedule = ir.load(shell.folder / "schedule.json")
    for name in ("a", "b"):
        broken = changed(schedule, lambda plain: plain["devices"][0].update(peak_bytes=10**10))
        (shell.folder / f"{name}.json").write_text(ir.to_text(broken))
    done = shell("optpipe verify a.json schedule.json b.json --profile profile.json")
    assert done.returncode == 1
    assert done.stderr == "optpipe: a.json: 1 violation, b.json: 1 violation\n"
    done = shell("optpipe verify a.json schedule.json --json")
    assert [len(one["violations"]) for one in json.loads(done.stdout)["schedules"]] == [1, 0]


# -- the text -----------------------------------------------------------------------------------------------------


def commands_in_the_text() -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.S | re.M)
    lines = [line.split("   #")[0] for language, block in blocks if not language for line in block.splitlines()]
    return [line for line in lines if line.startswith("optpipe ")]


@pytest.mark.parametrize("line", commands_in_the_text())
def test_commands_of_the_text_run(shell, line):
    done = shell(line)
    assert done.returncode == 0, done.stderr


def test_the_steps_for_ci_run(shell):
    (block,) = re.findall(r"- run: \|\n(.*?)```", TEXT, flags=re.S)
    install, *steps = block.split("\n")
    assert install.strip().startswith("pip install")
    assert shell("set -e\n" + "\n".join(step.strip() for step in steps)).returncode == 0


def test_the_snippet_for_pre_commit_names_hooks_that_exist():
    assert set(re.findall(r"- id: (\S+)", TEXT)) == set(hooks())


def test_files_that_the_text_names_are_written(shell):
    for line in commands_in_the_text():
        if line.startswith("optpipe export"):
            shell(line)
    named = set(re.findall(r"\bschedule\w*(?:\.trace)?\.(?:json|csv|py|svg)\b", TEXT.split("## For other tools")[1]))
    assert named == {"schedule.json", "schedule.trace.json", "schedule.csv", "schedule_torchtitan.py", "schedule.svg"}
    assert named <= {path.name for path in shell.folder.iterdir()}


@pytest.fixture
def committed(shell):
    """A git repository in which the schedule was changed after the commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    author = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = shell("git init -q . && git add . && git commit -q -m one", GIT_CONFIG_GLOBAL="/dev/null", **author)
    assert done.returncode == 0, done.stderr
    (shell.folder / "schedule.json").write_text(ir.to_text(build(Shape((0, 1), microbatches=3))))
    return shell


def test_the_last_commit_is_compared_as_the_text_says(committed):
    (line,) = re.findall(r"^git show .*$", TEXT, flags=re.M)
    done = committed(line)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("/dev/stdin -> schedule.json: changes setup")


def test_git_diff_speaks_in_words_as_the_text_says(committed):
    (line,) = re.findall(r"^git config .*$", TEXT, flags=re.M)
    (attributes,) = re.findall(r"`(schedule\*\.json diff=optpipe)`", TEXT)
    (committed.folder / ".gitattributes").write_text(attributes + "\n")
    assert committed(line).returncode == 0
    done = committed("git --no-pager diff")
    assert done.returncode == 0, done.stderr
    assert ": changes setup" in done.stdout
    assert committed("mv schedule.json schedule-2.json && git add -N schedule-2.json").returncode == 0
    done = committed("git --no-pager diff --no-renames")
    assert done.stderr == ""
    assert [line.rpartition(": ")[2] for line in done.stdout.splitlines()[::2]] == ["new schedule", "removed"]


# -- completion ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell, name):
    done = shell("optpipe", _OPTPIPE_COMPLETE=f"{name}_source")
    assert done.returncode == 0
    assert "_OPTPIPE_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("optpipe comp", {"compile"}),
        ("optpipe export --t", {"--to"}),
        ("optpipe export --to torch", {"torch-csv", "torchtitan"}),
    ],
)
def test_words_are_completed(shell, typed, words):
    count = len(shlex.split(typed)) - 1
    done = shell("optpipe", _OPTPIPE_COMPLETE="bash_complete", COMP_WORDS=typed, COMP_CWORD=str(count))
    found = {line.split(",")[1] for line in done.stdout.splitlines()}
    assert words <= found
    assert all(word.startswith(typed.split()[-1]) for word in found)


# -- exit codes ---------------------------------------------------------------------------------------------------


def test_the_page_of_commands_lists_every_exit_code_and_no_other():
    page = (ROOT / "docs" / "COMMANDS.md").read_text()
    table = re.search(r"^\| exit code \| meaning \|\n\|[-| ]+\|\n((?:\|.*\|\n)+)", page, re.M)
    assert table is not None, "docs/COMMANDS.md has no table of exit codes"
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", table[1], flags=re.M))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OptPipeError)]
    codes = {kind.exit_code for kind in kinds} | {0, INTERRUPTED}
    assert len(kinds) == len(codes) - 2, "two failures share an exit code"
    signals = {128 + signal.SIGPIPE, 128 + signal.SIGTERM}
    assert {int(code) for code in rows} - signals == codes


def _options(command: click.Command) -> set[str]:
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return {name for option in command.params for name in option.opts if name.startswith("--")}.union(
        *map(_options, inner)
    )


def test_every_option_is_on_a_page():
    pages = "\n".join(page.read_text() for page in PAGES)
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", pages))
    assert _options(cli) - found == {"--version"}


# -- links


PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "runtime_torch" / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_to_files_and_headings_that_exist(page):
    """`make docs` checks the links of docs/ as well; this needs no sphinx, and looks at the other pages, too."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        if re.match(r"https?://", path):
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M) if heading else []
        assert not heading or heading in [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings], (
            link
        )


def test_every_page_of_the_docs_is_in_the_site():
    index = (ROOT / "docs" / "index.md").read_text()
    listed = re.findall(r"^[A-Z_]+$", index, re.M)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "docs").glob("[A-Z]*.md"))
    assert set(listed) == set(re.findall(r"\((\w+)\.md\)", index))


# -- the Makefile


def skips_without_torch(path: Path) -> bool:
    """Whether a test module asks for torch, or for a package of ours that needs it, before it uses it."""
    asked = [
        call.args[0].value
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.importorskip"
    ]
    return any(name.partition(".")[0] in ("torch", "optpipe_torch", "runtime_torch") for name in asked)


def test_another_torch_is_tested_with_every_file_that_needs_torch():
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py") if skips_without_torch(path)}
    command = ["make", "--dry-run", "test-torch", "TORCH=torch==2.11.0", f"PYTHON={sys.executable}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    recipe = [shlex.split(line) for line in done.stdout.splitlines()]
    assert len(wanted) > 30
    assert set(recipe[-1][3:]) == wanted
    assert all(line[0].startswith(".venv-torch2.11.0/") for line in recipe[1:])
    assert "torch==2.11.0" in recipe[-2]
