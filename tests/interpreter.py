"""A stand-in for Python's interpreter that starts at once: each start is a fork of a process that has imported torch.

The program `python()` is called as `python [-m module | -c code | script] arguments`. It hands its arguments,
environment, folder and open files to the server, forwards signals to the process that the server forks for it, and
ends as that does. What imports find, and in which order, is tested with the real interpreter.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parent.parent
IMPORTED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "optpipe_torch.launch.session",
    "optpipe_compiler.compiler",
    "optpipe_compiler.machine.policy",
)
"""What takes seconds; what is not installed is left out."""
FIRST_FREE = 512
"""Above all file numbers that a program is started with."""

CLIENT = """#!{python} -SEs
import json, os, signal, socket, sys

def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True

files = [number for number in map(int, os.listdir("/proc/self/fd")) if is_open(number)]
line = socket.socket(socket.AF_UNIX)
line.connect("\\0" + {name!r})
told = [sys.argv, dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0)), files]
text = json.dumps(told).encode()
socket.send_fds(line, [len(text).to_bytes(8, "big")], files)
line.sendall(text)
for number in files:
    if number > 2:
        os.close(number)
answers = line.makefile()
child = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, lambda number, _: os.kill(child, number))
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def python() -> str:
    """Return what stands for `sys.executable`; the first call starts the server, which ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="optpipe-tests-")
    program, name = Path(folder.name, "python"), Path(folder.name).name
    program.write_text(CLIENT.format(python=sys.executable, name=name))
    program.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, name, program],
        env=os.environ | {"PYTHONPATH": ""},  # each program has its own
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        with server:  # closes its stdin, at whose end it ends with all that it has started
            folder.cleanup()

    atexit.register(end)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return str(program)


# -- the server


class Server:
    """Forks a process for each program that asks, tells it that process's id and at last how it ended."""

    def __init__(self, name: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + name)  # is no file, whose path could be too long
        self._listener.listen(64)
        self._programs: dict[int, socket.socket] = {}
        """By the id of the process."""
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> list[Any] | None:
        """Return what the program wants, in a process of its own for each; None in the server, at the end of stdin."""
        while True:
            with selectors.DefaultSelector() as selector:
                for waited in (sys.stdin, self._listener, self._woken, *self._programs.values()):
                    selector.register(waited, selectors.EVENT_READ)
                ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                self._end()
                return None
            if self._woken in ready:
                with suppress(BlockingIOError):
                    while self._woken.recv(64):
                        pass
                self._reap()
            for pid, line in list(self._programs.items()):
                if line in ready and pid in self._programs:  # the program was killed: it says nothing more
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    self._programs.pop(pid).close()
            if self._listener in ready:
                line, _ = self._listener.accept()
                wanted = self._begin(line)
                if wanted is not None:
                    return wanted

    def _begin(self, line: socket.socket) -> list[Any] | None:
        head, files, _, _ = socket.recv_fds(line, 8, 250)
        text = b""
        while len(text) < int.from_bytes(head, "big"):
            text += line.recv(1 << 16)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (line, self._listener, self._woken, self._wakes, *self._programs.values()):
                other.detach()  # or it would close what has its number by then
            wanted: list[Any] = json.loads(text)
            _take_over(files, wanted[-1])
            return wanted
        for number in files:
            os.close(number)
        self._programs[pid] = line
        with suppress(OSError):
            line.sendall(f"{pid}\n".encode())
        return None

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                line = self._programs.pop(pid, None)
                if line is not None:
                    with suppress(OSError):
                        line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                    line.close()

    def _end(self) -> None:
        """Leave no process."""
        for pid in self._programs:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _take_over(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Have the program's files under the numbers that it had them, and no others."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for number in files]
    os.closerange(0, FIRST_FREE)
    for number, wanted in zip(high, numbers, strict=True):
        os.dup2(number, wanted)
        os.close(number)


def _settle(program: str, told: Sequence[Any]) -> list[str]:
    """Be as an interpreter that has just started; return its arguments."""
    arguments, environment, folder, cores, _ = told
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - they stay open
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        stream = open(number, "w", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=number == 2 or os.isatty(number), write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.executable = program
    multiprocessing.set_executable(program)
    threads = environment.get("OMP_NUM_THREADS")
    if threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))
    return list(arguments[1:])


def _run(arguments: list[str]) -> None:
    """Run a module, code or a script as the main program."""
    import runpy

    while arguments[0] in ("-B", "-u", "-P") or arguments[0].startswith("-W"):
        taken = arguments.pop(0)
        if taken == "-W":
            arguments.pop(0)
    kind, *rest = arguments
    main = sys.modules["__main__"] = ModuleType("__main__")
    if kind == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = ["-m", *rest[1:]]
        if not hasattr(sys.modules.get(rest[0]), "__path__"):
            sys.modules.pop(rest[0], None)  # it runs again, as the main module
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        assert not kind.startswith("-"), kind
        sys.path.insert(0, str(Path(kind).resolve().parent))
        sys.argv = arguments
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


def _serve(name: str, program: str) -> None:
    sys.path[0] = str(ROOT)
    for module in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(module)
    sys.path.remove(str(ROOT))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = Server(name)
    print("ready", flush=True)
    gc.freeze()
    told = server.serve()
    if told is not None:
        _end(_code_of(lambda: _run(_settle(program, told))))


def _code_of(run: Callable[[], None]) -> int:
    """Return how a program ends, as Python's own start and end of one have it."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> NoReturn:
    """End without taking down what was imported, which takes as long as most programs here."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
