"""Every command's help ends with an example, and the example runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from optpipe_compiler.cli import cli
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from tests import test_cli
from tests.instances import quick, uniform

if TYPE_CHECKING:
    from collections.abc import Iterator

run = test_cli.run

FASTER = {
    "advise": "--model gpt2 --gpus 4 --global-batch 8 --seq 256 --microbatch-sizes 1 --slices 1",
    "compile": "--time-limit 0.2",
    "sweep": "--time-limit 0.1",
    "explain": "--time-limit 0.1",
}
"""Options that shorten an example; of those given twice the last counts."""
SMALLER_MODEL = "--model gpt2 --devices 2 --microbatches 2"
"""Instead of a model of many layers, for a sweep."""
NEEDS_TORCH = {"profile"}
SKIPPED = {
    "run": "starts a process per device and replays for a minute; tests/test_runtime_run.py does",
}


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """All commands with the words that call them."""
    for name, command in group.commands.items():
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


COMMANDS = dict(commands(cli))


def examples(command: click.Command) -> list[str]:
    return re.findall(r"Example: (optpipe .+)$", command.help or "", flags=re.M)


@pytest.fixture(scope="module")
def texts():
    """Files that examples may name."""
    costs = uniform(2, 2, d2h_ms=0.2, h2d_ms=0.2)
    return {
        "profile.json": canonical(costs),
        "schedule.json": ir.to_text(quick(costs, 2 * 10**9, microbatches=8, method="gis").schedule),
        "old.json": ir.to_text(quick(costs, 4 * 10**9, microbatches=8, method="gpipe-recompute").schedule),
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_examples_of_that_command_and_says_one_last(name):
    found = examples(COMMANDS[name])
    assert found
    assert all(example.startswith(f"optpipe {name}") for example in found)
    assert COMMANDS[name].help.rstrip().endswith(found[-1])


@pytest.mark.parametrize(
    ("name", "example"),
    [(name, example) for name in COMMANDS if name not in SKIPPED for example in examples(COMMANDS[name])],
)
def test_the_example_runs(run, texts, name, example, monkeypatch):
    monkeypatch.setenv("OPTPIPE_CACHE", "plans")
    if name in NEEDS_TORCH or "--model" in example:
        pytest.importorskip("torch")
    for path, text in texts.items():
        Path(path).write_text(text)
    smaller = SMALLER_MODEL if name == "sweep" and "--model" in example else ""
    outcome = run(*shlex.split(example)[1:], *shlex.split(FASTER.get(name, "")), *shlex.split(smaller))
    assert outcome.code == 0, outcome.err
    for option in ("-o", "--svg", "--csv"):
        for path in re.findall(rf" {option} (\S+)", example):
            assert Path(path).exists(), path


def test_only_commands_that_exist_are_skipped_or_shortened():
    assert {*SKIPPED, *FASTER, *NEEDS_TORCH} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_an_example_are_options_of_its_command(name):
    known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    used = {word for text in examples(COMMANDS[name]) for word in shlex.split(text) if word.startswith("-")}
    assert used <= known


def test_what_may_be_left_out_stands_in_brackets():
    for name, command in commands(cli):
        for one in command.params:
            if isinstance(one, click.Argument):
                assert one.make_metavar(click.Context(command)).startswith("[") != one.required, name
