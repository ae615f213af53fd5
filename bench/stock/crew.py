"""The processes of a comparison, one per rank: they build ways when asked to, watch their memory and time their steps.

A way that fails leaves its peers waiting for messages that never come: the processes are then ended and started anew.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bench.stock.rehearsed import Rehearsed
from bench.stock.ways import Planned, Setting, Stock, Way, gradients, reference
from optpipe_compiler.documents import ir
from optpipe_compiler.processes import Ended, Processes
from optpipe_torch.launch.job import shares_of_cores
from optpipe_torch.launch.run import context
from optpipe_torch.launch.worker import settle_on_cpu
from optpipe_torch.profiler.allocator import highest, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    from torch import Tensor

    from optpipe_compiler.model.placement import Layout

LIMIT_S = 900.0
"""Until the peers of a way that failed are given up."""


@dataclass(frozen=True)
class Spec:
    """A way, as a process can be told of it: a torch schedule with a treatment on a layout, or a schedule file."""

    name: str
    stock: tuple[str, str] | None = None
    layout: Layout | None = None
    schedule_text: str = ""
    time_scale: float | None = None
    """Rehearsed, at this scale; None: computed."""


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a way: bytes beside weights and gradients, and the worst relative error of a gradient."""

    peak_bytes: int
    error: float


class FailedWayError(Exception):
    """A way that cannot be run, in the words of the rank that failed first."""


class Crew:
    """The ranks' processes; every question is put to all of them, and answered by all."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._processes: Processes | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="optpipe-stock-")
        self._starts = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def watch(self, spec: Spec) -> list[Seen]:
        """Return what each rank saw."""
        return self._ask("watch", spec)

    def time(self, specs: Sequence[Spec], rounds: int) -> Iterator[list[float]]:
        """Yield for each round the seconds of a step of each way, all ranks together, taken in turns."""
        self._ask("build", list(specs))
        for number in range(rounds):
            yield self._ask("round", number)[0]

    def _ask(self, *question: object) -> Any:
        processes = self._processes or self._start()
        ranks = range(self._setting.devices)
        for rank in ranks:
            processes.send(rank, question)
        answers: list[Any] = [None] * len(ranks)
        left, end = set(ranks), time.monotonic() + LIMIT_S
        while left:
            heard = processes.listen(max(0.0, end - time.monotonic()))
            if not heard:
                self._end()
                raise FailedWayError(f"no answer within {LIMIT_S:g} s")
            for rank, answer in heard:
                left.discard(rank)
                kind, answers[rank] = ("failed", f"its process: {answer}") if isinstance(answer, Ended) else answer
                if kind == "failed":
                    self._end()
                    raise FailedWayError(answers[rank])
        return answers

    def _start(self) -> Processes:
        self._starts += 1
        store = Path(self._folder.name) / str(self._starts)
        cores = shares_of_cores(self._setting.devices)
        self._processes = Processes(context(training=True))
        for rank in range(self._setting.devices):
            self._processes.start(_serve, replace(self._setting, rank=rank), cores[rank], str(store))
        return self._processes

    def _end(self) -> None:
        if self._processes is not None:
            self._processes.end()
        self._processes = None


# -- in a rank's process


def _serve(line: Connection, setting: Setting, cores: Sequence[int], store: str) -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if cores and setting.device.type == "cpu":
        os.sched_setaffinity(0, cores)
    if setting.device.type == "cuda":
        setting = replace(setting, device=torch.device("cuda", setting.rank))
        torch.cuda.set_device(setting.device)
    else:
        settle_on_cpu()
    dist.init_process_group(
        "nccl" if setting.device.type == "cuda" else "gloo",
        device_id=setting.device if setting.device.type == "cuda" else None,
        init_method=f"file://{store}",
        rank=setting.rank,
        world_size=setting.devices,
        timeout=timedelta(seconds=LIMIT_S),
    )
    ways: list[Way] = []
    expected: dict[str, Tensor] = {}
    while True:
        try:
            what, *arguments = line.recv()
        except EOFError:
            return
        try:
            if what == "watch":
                expected = expected or reference(setting, *_batch(setting))
                line.send(("answer", _watch(setting, expected, *arguments)))
            elif what == "build":
                ways = [_build(setting, spec) for spec in arguments[0]]
                _round(setting, ways, 0)
                gc.collect()
                gc.freeze()
                line.send(("answer", None))
            else:
                line.send(("answer", _round(setting, ways, *arguments)))
        except Exception as error:
            if os.environ.get("OPTPIPE_STOCK_TRACEBACK"):
                traceback.print_exc()
            causes = [error]
            while (cause := causes[-1].__cause__) is not None:
                causes.append(cause)  # type: ignore[arg-type]
            first = next(iter(str(causes[-1]).splitlines()), "")
            line.send(("failed", f"{type(causes[-1]).__name__}: {first}"))


def _build(setting: Setting, spec: Spec) -> Way:
    if spec.stock is not None:
        assert spec.layout is not None
        way: Way = Stock(setting, *spec.stock, spec.layout)
    else:
        schedule = ir.parse(spec.schedule_text, spec.name)
        way = Planned(setting, schedule) if spec.time_scale is None else Rehearsed(schedule, spec.time_scale)
    for layer in way.layers().values():
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
    return way


def _clear(way: Way) -> None:
    for layer in way.layers().values():
        layer.zero_grad(set_to_none=False)


def _batch(setting: Setting) -> tuple[Tensor, Tensor]:
    count, sequence = setting.microbatches * setting.microbatch_size, setting.config["sequence"]
    drawn = torch.randint(setting.config["vocab"], (count, sequence + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1].contiguous().to(setting.device), drawn[:, 1:].contiguous().to(setting.device)


def _watch(setting: Setting, expected: Mapping[str, Tensor], spec: Spec) -> Seen:
    """Two steps, of which the first may make what stays, and before them one whose gradients are held against those of
    the model without a pipeline."""
    way, (tokens, target) = _build(setting, spec), _batch(setting)
    way.step(tokens, target)
    error = max(
        (found - expected[name]).abs().max().item() / max(1e-30, expected[name].abs().max().item())
        for name, found in gradients(way).items()
    )
    del way
    gc.collect()
    way = _build(setting, spec)
    step, on_host = way.watched()
    dist.barrier()
    peak = (_watched_on_gpu if setting.device.type == "cuda" else _watched_on_cpu)(step, tokens, target) - on_host
    del way, step
    gc.collect()
    return Seen(peak, error)


def _watched_on_gpu(step: Callable[[Tensor, Tensor], None], tokens: Tensor, target: Tensor) -> int:
    before = torch.cuda.memory_allocated()
    step(tokens, target)
    torch.cuda.reset_peak_memory_stats()
    step(tokens, target)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _watched_on_cpu(step: Callable[[Tensor, Tensor], None], tokens: Tensor, target: Tensor) -> int:
    """The allocator's own events, by torch's profiler, of the thread that computes."""
    changes = watch(dict.fromkeys(("first", "second"), lambda: step(tokens, target)))
    return sum(changes["first"]) + highest(changes["second"])


def _round(setting: Setting, ways: Sequence[Way], number: int) -> list[float]:
    """Take a step of each way, every other round in reverse; no garbage is collected within."""
    batch, times = _batch(setting), {}
    for index in range(len(ways)) if number % 2 else reversed(range(len(ways))):
        gc.collect()
        gc.disable()
        dist.barrier()
        start = time.perf_counter()
        ways[index].step(*batch)
        if setting.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        times[index] = time.perf_counter() - start
        gc.enable()
        _clear(ways[index])
    return [times[index] for index in range(len(ways))]
