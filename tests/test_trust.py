"""What files and folders can make our processes run: the user's own model, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput
from optpipe_torch.models import user_functions
from optpipe_torch.models.user_functions import import_function, refuse_foreign

ROOT = Path(__file__).parent.parent
MODEL = """
import pathlib
pathlib.Path("called").touch()
def model():
    return []
from subprocess import run
from os import system
from installed import theirs
"""
HOSTILE = """
import pathlib
pathlib.Path({mark!r}).touch()
raise ImportError("this file only happens to lie here")
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project in the current folder beside an installed package; modules are forgotten afterwards."""
    here, site = tmp_path / "project", tmp_path / "lib" / "site-packages"
    for folder in (here / "package" / "inner", here / "environment" / "inside", site, tmp_path / "outside"):
        folder.mkdir(parents=True)
    (here / "mine.py").write_text(MODEL)
    (here / "package" / "__init__.py").touch()
    (here / "package" / "inner" / "model.py").write_text(MODEL)
    (site / "installed.py").write_text("def theirs(): return []\n")
    (tmp_path / "outside" / "elsewhere.py").write_text(MODEL)
    (here / "link.py").symlink_to(tmp_path / "outside" / "elsewhere.py")
    (here / "links").symlink_to(tmp_path / "outside")
    (here / "environment" / "pyvenv.cfg").touch()
    (here / "environment" / "inside" / "hidden.py").write_text(MODEL)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path, str(site), str(tmp_path / "outside")])
    monkeypatch.setattr(user_functions, "_allowed", set())
    before = set(sys.modules)
    yield here
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("builder", ["mine:model", "package.inner.model:model"])
def test_a_file_may_have_a_function_of_the_project_called(project, builder):
    refuse_foreign(builder)
    assert not (project / "called").exists()
    assert import_function(builder)() == []


FOREIGN = {
    "os:system": "module 'os' is part of Python",
    "sys:exit": "module 'sys' is part of Python",
    "os.path:join": "module 'os' is part of Python",
    "subprocess:run": "subprocess.py",
    "json.tool:main": "json/__init__.py",
    "click:echo": "click/__init__.py",
    "installed:theirs": "site-packages/installed.py",
    "optpipe_compiler.cli:main": "optpipe_compiler/__init__.py",
    "elsewhere:model": "outside/elsewhere.py",
    "link:model": "link.py",
    "links.elsewhere:model": "links/elsewhere.py",
    "environment.inside.hidden:model": "environment/inside/hidden.py",
    "mine.os:system": "No module named 'mine.os'",
    "package:__loader__": None,
    "nowhere:model": "No module named 'nowhere'",
}


@pytest.mark.parametrize("builder", FOREIGN)
def test_a_function_from_elsewhere_is_refused_before_anything_is_imported(project, builder):
    before = set(sys.modules)
    with pytest.raises(BadInput) as refused:
        import_function(builder)
    if FOREIGN[builder] is not None:
        assert FOREIGN[builder] in str(refused.value)
        assert set(sys.modules) == before
    assert not (project / "called").exists()


ODD = ["", ":", "mine", "mine:", ":model", "..mine:model", "../mine:model", "mine.:model", ".mine:model", "mine:a.b"]
ODD += ["mine:model()", "mine\0:model", "a b:c", "mine:mo\u202edel", "class:model", "mine:model:model", "/mine:model"]


@pytest.mark.parametrize("builder", ODD)
def test_a_name_that_is_no_module_and_function_is_refused(project, builder):
    with pytest.raises(BadInput, match=r"expected 'gpt' or 'transformer', or an importable package\.module:function"):
        import_function(builder)
    assert not (project / "called").exists()


@pytest.mark.parametrize("builder", ["mine:run", "mine:system", "mine:theirs", "mine:__class__"])
def test_what_a_module_of_the_project_has_imported_from_elsewhere_is_refused(project, builder):
    with pytest.raises(BadInput, match="which a file alone may not call: it comes from"):
        import_function(builder)


def test_what_is_no_function_of_any_module_is_refused(project):
    with pytest.raises(BadInput, match="importable"):
        import_function("mine:pathlib")


@pytest.mark.parametrize("is_named", [False, True])
def test_what_is_not_found_says_where_it_was_looked_for(project, is_named):
    if is_named:
        user_functions.allow("nowhere:model")
    with pytest.raises(BadInput, match=re.escape(f"No module named 'nowhere' below {project}, the current folder")):
        import_function("nowhere:model")


@pytest.mark.parametrize("builder", ["installed:theirs", "link:model", "mine:theirs"])
def test_a_function_that_the_command_line_names_is_called_wherever_it_lies(project, builder):
    user_functions.allow(builder)
    assert import_function(builder)() == []


@pytest.mark.parametrize("builder", ["mine.py:model", "nowhere:model", "mine:missing"])
def test_what_the_command_line_names_and_cannot_be_called_is_refused_as_it_was_typed(project, builder):
    user_functions.allow(builder)
    with pytest.raises(BadInput, match=rf"^--model is '{builder}', expected an importable package\.module:function: "):
        import_function(builder)


def test_in_a_folder_of_installed_packages_nothing_is_the_projects(project, monkeypatch):
    monkeypatch.chdir(project.parent / "lib" / "site-packages")
    with pytest.raises(BadInput, match=r"installed\.py"):
        import_function("installed:theirs")


# -- commands


def optpipe(folder, *arguments, start=None, **more):
    """Run the command in a process of its own, as its console script starts."""
    script = folder.parent / "bin" / "optpipe"
    script.parent.mkdir(exist_ok=True)
    script.write_text("from optpipe_compiler.cli import main\n\nif __name__ == '__main__':\n    main()\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **more}
    command = [*(start or [sys.executable, str(script)]), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def naming(builder, config):
    """A schedule that is sound but for the function that it names."""
    from runtime_cases import schedule
    from small_schedules import Shape

    plan = schedule(Shape((0, 1), microbatches=2))
    model = msgspec.structs.replace(plan.model, builder=builder, config=config)
    return ir.to_text(ir.seal(msgspec.structs.replace(plan, model=model)))


@pytest.mark.runtime
@pytest.mark.parametrize("alone", [(), ("--rank", "0", "--emulate-peers")])
def test_run_refuses_a_schedule_that_names_a_program(tmp_path, alone):
    pytest.importorskip("torch")
    (tmp_path / "schedule.json").write_text(naming("os:system", {"command": "touch called"}))
    ended = optpipe(tmp_path, "run", *alone)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("optpipe: schedule.json: $.model.builder is 'os:system', which a file alone may not")
    assert len(ended.stderr.splitlines()) == 1
    ended = optpipe(tmp_path, "run", "--model", "os:popen")
    assert ended.returncode == 2
    assert "--model is os:popen, expected the schedule's own" in ended.stderr
    assert not (tmp_path / "called").exists()


SMALL_MODEL = """
import torch
from torch import nn
class Head(nn.Linear):
    def forward(self, x, target):
        return nn.functional.cross_entropy(super().forward(x).flatten(0, 1), target.flatten())
def model():
    return [nn.Embedding(256, 64), *(nn.Linear(64, 64) for _ in range(2)), Head(64, 256)]
"""


@pytest.fixture
def littered(tmp_path):
    """A folder with a model, and with files that have the names of modules that every command imports."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.py").write_text(SMALL_MODEL)
    names = ["heapq", "torch", "msgspec", "numpy", "click", "rich", "ortools", "struct", "socket", "pickle", "queue"]
    for name in names:
        (here / f"{name}.py").write_text(HOSTILE.format(mark=str(here / "executed")))
    return here


COMMANDS = """
profile uniform --devices 2 --layers-per-device 2 -o uniform.json
compile uniform.json --mem 10GB --time-limit 0.5 -o plan.json
compile uniform.json --mem 3GB --time-limit 0.5 --microbatches 4 --no-offload -o schedule.json
bounds uniform.json --mem 4GB
verify schedule.json --profile uniform.json
show schedule.json
compare schedule.json --methods 1f1b,gpipe --profile uniform.json
explain schedule.json --profile uniform.json --time-limit 0.1 --jobs 1
sweep uniform.json --mem 3GB:4GB:2 --time-limit 0.1 --jobs 1
report schedule.json --profile uniform.json -o report.html
diff schedule.json plan.json
fmt schedule.json
export schedule.json --to svg -o plan.svg
profile --model gpt2 --gpu a100-80gb --devices 2 -o estimated.json
"""


@pytest.mark.runtime
@pytest.mark.parametrize(
    ("start", "count"), [(None, None), ([sys.executable, "-m", "optpipe_compiler.cli"], 3)], ids=["script", "module"]
)
def test_no_command_imports_modules_that_lie_in_the_current_folder(littered, start, count):
    """Every command as a script; started as a module, which is seen to before any command, some of them."""
    pytest.importorskip("torch")
    for line in COMMANDS.strip().splitlines()[:count]:
        ended = optpipe(littered, *line.split(), start=start)
        assert ended.returncode == 0, (line, ended.stderr)
        assert not (littered / "executed").exists(), line


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]


@pytest.mark.runtime
def test_users_models_come_from_the_current_folder_after_everything_else(littered, tmp_path):
    pytest.importorskip("torch")
    profile = ("profile", "--model", "mine:model", "--devices", "2", "--seq", "32", "--samples", "4")
    assert (ended := optpipe(littered, *profile)).returncode == 0, ended.stderr
    compiling = ("compile", "--mem", "1GB", "--microbatches", "2", "--time-limit", "0.5")
    assert (ended := optpipe(littered, *compiling)).returncode == 0, ended.stderr
    assert (ended := optpipe(littered, "run", "--steps", "1", "--check")).returncode == 0, ended.stderr
    alone = ("run", "--steps", "2", "--rank", "1", "--emulate-peers")
    assert (ended := optpipe(littered, *alone)).returncode == 0, ended.stderr
    launcher = ["-P", *TORCHRUN[1:], sys.executable, str(tmp_path / "bin" / "optpipe")]
    for arguments in (("run", "--steps", "1"), (*profile[:3], *profile[5:], "-o", "joined.json")):
        ended = optpipe(littered, *arguments, start=[sys.executable, *launcher], OMP_NUM_THREADS="1")
        assert ended.returncode == 0, ended.stderr
    assert not (littered / "executed").exists()
