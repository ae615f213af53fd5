"""Questions answered in processes of their own: all of them, errors as they are, and no process left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from optpipe_compiler.errors import BadInput, NotFound
from optpipe_compiler.study.pool import answers
from tests.processes import children


def square(number: int) -> int:
    return number * number


def refuse(number: int) -> int:
    raise BadInput(f"{number} is too much")


def die(number: int) -> int:
    os._exit(9)


def test_every_question_is_answered_once_whatever_the_number_of_jobs():
    questions = [3, 1, 2, 5]
    for jobs in (1, 2):
        found = list(answers(square, questions, jobs))
        assert sorted(found) == [(1, 1), (2, 4), (3, 9), (5, 25)]
    assert list(answers(square, [], 2)) == []


def test_an_error_of_a_question_is_the_callers():
    with pytest.raises(BadInput, match="4 is too much"):
        list(answers(refuse, [4], 1))


def test_a_process_that_dies_is_one_sentence():
    with pytest.raises(NotFound, match="a process that plans has died"):
        list(answers(die, [1, 2], 1))


def test_a_caller_that_stops_early_leaves_no_process_behind():
    found = answers(square, [1, 2, 3], 2)
    next(found)
    assert children()
    found.close()
    assert children() == []


def test_a_script_that_starts_processes_needs_no_guard(tmp_path):
    (tmp_path / "script.py").write_text(
        "from optpipe_compiler.study.pool import answers\nprint('once')\nprint(list(answers(abs, [-1, -2], 1)))\n"
    )
    command = [sys.executable, "script.py"]
    found = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (found.stderr, found.stdout) == ("", "once\n[(-1, 1), (-2, 2)]\n")
