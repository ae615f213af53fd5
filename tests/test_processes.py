"""Processes that we start, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

WORK = """
import multiprocessing

def work(line):
    global lock
    lock = multiprocessing.RLock()  # as tqdm makes one, which torch.compile uses
    line.send("done")
"""
MAIN = """
from optpipe_compiler.processes import Processes
from work import work

if __name__ == "__main__":
    with Processes() as processes:
        processes.start(work)
        print(processes.listen(60)[:1])  # its end may be heard at once
        processes.let_end()
"""


def test_a_process_that_has_done_its_work_puts_away_what_it_has_made(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "main.py").write_text(MAIN)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[(0, 'done')]\n", "")


SERVED = """
import multiprocessing
import os
import signal
import sys
import threading
import time
from optpipe_compiler.processes import Processes
from work import work

def press():
    while sys._current_frames()[threading.main_thread().ident].f_code.co_name != "read_signed":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["slow"])
    threading.Thread(target=press).start()
    try:
        with Processes(server) as processes:
            processes.start(work)
    except KeyboardInterrupt:
        print(os.path.exists("imported"))
"""


SLOW = """
import threading
import time

start = threading.Thread.start

def late(thread):
    if getattr(thread._target, "__name__", "") == "_end_with_parent":
        threading.Timer(0.5, start, [thread]).start()
    else:
        start(thread)

threading.Thread.start = late
time.sleep(5)
open("imported", "w").close()
"""
"""What a server imports on a crowded machine: long, and threads begin late."""


def test_ctrl_c_is_answered_while_a_server_still_imports(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "main.py").write_text(SERVED)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert (tmp_path / "imported").exists(), "the server has ended by itself"
