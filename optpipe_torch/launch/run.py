"""Start one process per device on this machine, or join the group that torchrun started; end them all together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.units import printable
from optpipe_compiler.errors import BadInput, MissingDependency, OptPipeError, RunFailed
from optpipe_compiler.processes import Ended, Processes
from optpipe_torch.launch.job import (
    Job,
    Place,
    Replanning,
    RunEvent,
    check_torch,
    place_from_environment,
    shares_of_cores,
)
from optpipe_torch.models import text, user_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext

    from optpipe_torch.launch.report import RunReport

GRACE_S = 1.0
"""After the first failure: how long to listen for others, to find the one that started it."""
START_S = 120.0
"""How long the ranks may take to import torch and to meet, even if `timeout_s` is less."""


def run(
    schedule: ir.Schedule,
    *,
    steps: int = 10,
    data_paths: Sequence[Path] = (),
    check: bool = False,
    time_scale: float | None = None,
    seed: int = 0,
    on_event: Callable[[RunEvent], None] | None = None,
    timeout_s: float = 600.0,
    trace: bool = False,
    model: str | None = None,
    replanning: Replanning | None = None,
) -> RunReport | None:
    """Replay `schedule`: train its model for `steps` on the bytes of `data_paths` (default: a text that ships with
    optpipe), or rehearse it if it has none. Under torchrun, ranks other than 0 return None.

    `on_event` is called with {"event": "started" | "check" | "step", ...} as things happen (under torchrun on rank 0
    only); with `trace`, at the end, with {"event": "trace", "text": a Chrome trace of all ranks}. A rank that dies or
    fails ends the run within seconds: RunFailed names it. `timeout_s`: how long a rank waits for another's message
    before it gives up, and the run for a next step. `model`: the schedule's own `package.module:function`, which then
    is called wherever it lies; otherwise only functions of the project in the current folder are (user_functions.py).
    `replanning`: measure, plan beside training and swap; `on_event` then also hears what `Replanner` tells, and
    {"event": "schedule", "is_last": ..., "text": ..., "profile_text": ...} after each swap and at the end: the schedule
    that runs, or that training ended with, and the profile that it was planned with.
    """
    check_torch()
    if replanning is not None and schedule.model is None:
        raise BadInput("--replan needs a schedule with a model, expected no rehearsal: it has the forecast's times")
    training = schedule.model is not None
    if training and time_scale is not None:
        raise BadInput(
            f"--time-scale is {time_scale:g}, expected none in training: it slows down rehearsals and emulated peers"
        )
    if not training:
        _refuse_training(check=check, data_paths=data_paths)
    if model is not None:
        user_functions.allow(model)
    if schedule.model is not None:
        user_functions.refuse_foreign(schedule.model.builder)
    job = Job(
        schedule_text=ir.to_text(schedule),
        training=training,
        steps=steps,
        data=(text.read(data_paths) if data_paths else text.default_text()) if training else b"",
        check=check,
        time_scale=time_scale,
        seed=seed,
        timeout_s=timeout_s,
        trace=trace,
        replanning=replanning,
        allowed=model,
    )
    tell = on_event or (lambda _: None)
    place = place_from_environment()
    if place is None:
        return Ranks([job] * schedule.setup.devices, tell).run()
    return _join(job, place, tell)


def _refuse_training(*, check: bool, data_paths: Sequence[Path]) -> None:
    """Refuse what only training does; a rehearsal would ignore it."""
    if check:
        raise BadInput("--check needs a schedule with a model, expected no rehearsal: it has no gradients to check")
    if data_paths:
        raise BadInput(
            f"--data is {data_paths[0]}, expected none for a rehearsal: a schedule without a model reads no text"
        )


def _join(job: Job, place: Place, tell: Callable[[RunEvent], None]) -> RunReport | None:
    """Be one rank of a group that torchrun started."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or it writes stack traces beside the sentence
    from optpipe_torch.launch import session

    for number in (signal.SIGTERM, signal.SIGHUP):  # a rank in the middle of a message could not run a handler
        signal.signal(number, signal.SIG_DFL)

    def give_up(error: BaseException) -> None:
        sys.stderr.write(f"optpipe: {printable(str(_expected(error, place.rank)))}\n")
        os._exit(RunFailed.exit_code)

    try:
        report = session.work(job, place, tell, give_up)
    except OptPipeError:
        raise
    except Exception as error:
        raise _expected(error, place.rank) from error
    return report if place.rank == 0 else None


class Ranks:
    """The processes of one run on this machine, one per job, and their ends."""

    def __init__(self, jobs: Sequence[Job], tell: Callable[[RunEvent], None]) -> None:
        self._jobs = jobs
        self._tell = tell
        self._begun = False
        self._finished: dict[int, RunReport] = {}
        self._failed: dict[int, tuple[OptPipeError, bool]] = {}
        """By rank: what happened, and whether it may be but the echo of another rank's end."""
        self.processes = Processes(context(training=jobs[0].training))

    def run(self) -> RunReport:
        """Start, listen, end."""
        with tempfile.TemporaryDirectory(prefix="optpipe-") as folder, self.processes:
            cores = shares_of_cores(len(self._jobs))
            for rank, job in enumerate(self._jobs):
                place = Place(rank, len(self._jobs), f"file://{folder}/store", rank)
                self.processes.start(_rank, replace(job, pinned=bool(cores[rank])), place, cores[rank])
            while len(self._finished) < len(self._jobs):
                allowed = self._jobs[0].timeout_s
                heard = self._listen(GRACE_S + (allowed if self._begun else max(allowed, START_S)))
                if self._failed:
                    self._raise_failure()
                if not heard:
                    raise self._silence()
            self.processes.let_end()
            return self._finished[0]

    def _listen(self, seconds: float) -> bool:
        """Take in what ranks say, and who has ended; return whether anything was heard within `seconds`."""
        heard = self.processes.listen(seconds)
        for rank, event in heard:
            if isinstance(event, Ended):
                if rank not in self._finished:
                    self._failed.setdefault(rank, (RunFailed(f"rank {rank} died: {event}"), False))
            elif event["event"] == "finished":
                self._finished[rank] = event["report"]
            elif event["event"] == "failed":
                self._failed.setdefault(rank, (event["error"], event["echo"]))
            else:
                self._begun = True
                self._tell(event)
        return bool(heard)

    def _raise_failure(self) -> None:
        """Listen a little longer, then name the rank that failed first: a death before an error before an echo."""
        until = time.monotonic() + GRACE_S
        while all(echo for _, echo in self._failed.values()) and (left := until - time.monotonic()) > 0:
            self._listen(left)
        error, echo = min(self._failed.values(), key=lambda failure: failure[1])
        raise self._silence() if echo and self._stopped() else error

    def _silence(self) -> RunFailed:
        """Return what to say when nobody has got on for as long as a rank may wait."""
        waited = f"for {self._jobs[0].timeout_s:g} s (--timeout)"
        if stopped := self._stopped():
            names = ", ".join(map(str, stopped))
            return RunFailed(f"rank {names} is stopped (SIGSTOP), and the run has waited for it {waited}")
        return RunFailed(f"no rank has finished a step {waited}")

    def _stopped(self) -> list[int]:
        """Return the ranks whose processes are stopped, where the system tells."""
        return [rank for rank in range(len(self._jobs)) if _state(self.processes.pid(rank)) in ("T", "t")]


LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Bytes of the folder for temporary files: a socket's path has at most 107."""


def context(*, training: bool) -> BaseContext:
    """Fork from a server that has imported torch once, which saves seconds per process; spawn where there are GPUs.

    The server listens on a socket in the folder for temporary files, whose path must be short.
    """
    is_long = len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER
    if is_long or Path("/proc/driver/nvidia").exists() or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    optimizer = ["torch._dynamo"] if training else []  # what torch.optim imports when it is first used
    server.set_forkserver_preload([*optimizer, "optpipe_torch.launch.session"])
    return server


def _rank(line: Connection, job: Job, place: Place, cores: list[int]) -> None:
    """The process of one rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    lock = threading.Lock()

    def say(event: RunEvent) -> None:
        with lock:
            line.send(event)

    def fail(error: BaseException) -> None:
        say({"event": "failed", "error": _expected(error, place.rank), "echo": _is_echo(error)})

    try:
        if cores:
            os.sched_setaffinity(0, cores)
        if job.allowed is not None:
            user_functions.allow(job.allowed)
        from optpipe_torch.launch import session

        report = session.work(job, place, say, fail)
        say({"event": "finished", "report": report})
    except BaseException as error:
        fail(error)
    line.close()


def _expected(error: BaseException, rank: int) -> OptPipeError:
    """The error that the parent raises for this one."""
    if isinstance(error, BadInput | MissingDependency):
        return error
    sentence = _sentence(error)
    if _is_echo(error):
        why = "waited too long for" if "Timed out" in sentence else "lost"
        return RunFailed(f"rank {rank} stopped, because it {why} another rank ({sentence})")
    return RunFailed(sentence if sentence.startswith("rank ") else f"rank {rank} failed: {sentence}")


def _is_echo(error: BaseException) -> bool:
    """Whether an error is what a rank sees when another one has gone."""
    words = "Connection closed", "Connection reset", "Broken pipe", "Timed out", "gloo", "NCCL"
    has_lost_another = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return has_lost_another or (isinstance(error, RunFailed) and error.elsewhere)


def _sentence(error: BaseException) -> str:
    """An error in one line: an expected one as it is, another with its type and the place it came from."""
    if isinstance(error, OptPipeError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    if _is_out_of_host_memory(error):
        return (
            f"no host memory for offloaded activations ({lines[0][:200]}); compile with a smaller --host-mem, or lift "
            "the limit on locked memory (ulimit -l)"
        )
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {lines[0][:300]}{place}"


def _is_out_of_host_memory(error: BaseException) -> bool:
    """Whether an allocation of (pinned) host memory failed; torch says so in a RuntimeError of either kind."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and ("DefaultCPUAllocator" in text or "cudaHostAlloc" in text or "cudaHostRegister" in text)
    )


def _state(pid: int | None) -> str:
    """Return the letter of a process's state, as `ps` has it; nothing where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
