"""Questions answered in processes of their own: all of them, errors as they are, and no process left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optpipe_compiler.errors import BadInput, NotFound
from optpipe_compiler.study.pool import answers
from tests.processes import children

ROOT = Path(__file__).parent.parent


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


def test_ctrl_c_does_not_reach_the_first_process_before_it_can_ignore_it():
    """With the first one Python starts a helper of its own, and unblocks the signal when it has."""
    script = """
import signal
from multiprocessing import util
from optpipe_compiler.study.pool import answers

def is_blocked():
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

def watched(path, arguments, fds, start=util.spawnv_passfds):
    if "spawn_main" in str(arguments):
        print(is_blocked())
    return start(path, arguments, fds)

util.spawnv_passfds = watched
print(sorted(answers(abs, [-1, -2], 2)), is_blocked(), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout == "True\nTrue\n[(-2, 2), (-1, 1)] False True\n", said.stderr
