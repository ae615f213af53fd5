"""`optpipe profile`: measures this machine on a real model, in processes pinned and grouped as `run` has them.

The measuring itself is in `child.py`, in processes of its own, all at the same time, so that what they cost each other
is in the figures. `records.py` makes the profile of what they found.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from optpipe_compiler.documents.profile import Model
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput, MissingDependency, OptPipeError, RunFailed, first_line
from optpipe_compiler.processes import Ended, Processes
from optpipe_torch.launch.job import Place, gpu_count, place_from_environment, ranks_here, shares_of_cores
from optpipe_torch.launch.run import context
from optpipe_torch.models.user_functions import allow
from optpipe_torch.profiler.records import assemble

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from optpipe_compiler.documents.profile import Profile
    from optpipe_torch.profiler.records import Findings


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure; the defaults give blocks of some 10 ms on one core, large against message and bookkeeping."""

    devices: int | None = None
    """None: one per core, at least 2 and at most 4; one per GPU, at least 2, where GPUs are measured."""
    device: Literal["cpu", "cuda"] | None = None
    """None: GPUs where `run` trains on them, which is where there is one for each device."""
    of: Model | None = None
    """The model; None: a GPT over bytes of the sizes below."""
    as_its_data: bool = False
    """Whether a model of a user's own data is as long as these, whatever it says."""
    layers: int = 8
    """Blocks, beside the embedding and the head."""
    hidden: int = 256
    heads: int = 4
    sequence_length: int = 128
    microbatch_size: int = 4
    seed: int = 0
    samples: int = 60
    """Of every time; a cheap op gets more."""
    timeout_s: float = 300
    """So long no process may say anything: each round of samples does."""

    def model(self) -> Model:
        """Return the record by which `run` builds this model again."""
        if self.of is not None:
            return self.of
        return Model(
            builder="gpt",
            config={"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "vocab": 256},
            microbatch_size=self.microbatch_size,
            sequence_length=self.sequence_length,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Arrangement:
    """How the measuring processes stand on the machine."""

    devices: int
    processes: int
    cores: list[list[int]]
    """Of each process; empty: fewer cores than processes, the system may move them."""
    on_gpus: bool
    """Each process measures the GPU of its number."""


def measure(options: MeasureOptions, on_progress: Callable[[str, float], None]) -> Profile:
    """Measure this machine and return its profile; takes about half a minute with the default options.

    `on_progress` is called with what is being measured and the part that is done, 0 to 1.

    Raise BadInput for options that cannot be, MissingDependency without torch, RunFailed when a process dies, fails or
    all are silent for `timeout_s`. All processes are gone when it returns or raises, Ctrl-C included.
    """
    _need_torch()
    layout = layout_of(options, 0 if options.device == "cpu" else gpu_count())
    model = options.model()
    return assemble(model, layout.devices, _run_processes(options, layout, on_progress))


def measure_in_group(options: MeasureOptions, on_progress: Callable[[str, float], None]) -> Profile | None:
    """Measure as one rank of a group that torchrun started, which may stand on several machines.

    The ranks are the devices; messages are measured between all neighbours. Return the profile on rank 0, None on the
    others. Raise as `measure` does.
    """
    _need_torch()
    from optpipe_torch.profiler.child import Measuring, find_in_group

    allow(options.model().builder)

    group = place_from_environment()
    assert group is not None
    if options.devices not in (None, group.world):
        raise BadInput(
            f"--devices is {options.devices}, expected none: torchrun started {counted(group.world, 'rank')}"
        )
    here = ranks_here(group.world)
    on_gpus = _on_gpus(options, gpu_count(), processes=here, least=here)
    say = on_progress if group.rank == 0 else lambda what, part: None
    how = Measuring(options.model(), options.samples, as_its_data=options.as_its_data)
    findings = find_in_group(group, how, say, on_gpu=on_gpus)
    return None if findings is None else assemble(options.model(), group.world, findings, here)


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("measuring needs torch: pip install 'optpipe[runtime]'")


def layout_of(options: MeasureOptions, gpus: int = 0) -> Arrangement:
    """Return one process per device, but not more than GPUs, or than cores (two at least: messages need a pair)."""
    for option, value in (("--devices", options.devices), ("--layers", options.layers), ("--samples", options.samples)):
        if value is not None and value < 1:
            raise BadInput(f"{option} is {value}, expected at least 1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_gpus = _on_gpus(options, gpus, processes=options.devices or 2, least=1)
    usual = max(2, gpus) if on_gpus else min(4, max(2, cores))
    devices = options.devices or usual
    processes = min(devices, gpus if on_gpus else max(2, cores))
    return Arrangement(devices=devices, processes=processes, cores=shares_of_cores(processes), on_gpus=on_gpus)


def _on_gpus(options: MeasureOptions, gpus: int, *, processes: int, least: int) -> bool:
    """Whether to measure GPUs: when asked to, which takes `least`, or where there is one for each of `processes`."""
    if options.device == "cuda" and gpus < least:
        found = f"{gpus or 'no'} GPU{'s' * (gpus > 1)}"
        raise BadInput(f"--device is cuda, expected cpu: torch sees {found} on this machine, at least {least} needed")
    return options.device == "cuda" or (options.device is None and gpus >= processes)


# -- the processes


def _run_processes(
    options: MeasureOptions, layout: Arrangement, on_progress: Callable[[str, float], None]
) -> list[Findings]:
    """Return what the processes found by rank; raise the error of one, or RunFailed when one is gone or all are silent.

    The time is that since the last word: how long all of it takes depends on the model's size and kinds of layers.
    """
    doing = "anything"
    found: dict[int, Findings] = {}
    how = context(training=False)
    with tempfile.TemporaryDirectory(prefix="optpipe-profile-") as folder, Processes(how) as processes:
        ranks = range(layout.processes)
        for rank in ranks:
            processes.start(_measure, rank, layout, options, str(Path(folder) / "store"))
        while len(found) < len(ranks):
            missing = [rank for rank in ranks if rank not in found]
            heard = processes.listen(options.timeout_s, missing)
            if not heard:
                late = ", ".join(map(str, missing))
                raise RunFailed(f"measuring {doing} ended: no answer from process {late} for {options.timeout_s:g} s")
            for rank, said in heard:
                if isinstance(said, OptPipeError):
                    raise said
                if isinstance(said, tuple):
                    doing = said[0]
                    on_progress(*said)
                elif not isinstance(said, Ended):
                    found[rank] = said
                elif rank not in found:
                    raise RunFailed(f"measuring ended because process {rank} of {len(ranks)} died ({said})")
        processes.let_end()
    return [found[rank] for rank in ranks]


def _measure(line: Connection, rank: int, layout: Arrangement, options: MeasureOptions, store: str) -> None:
    """Measure in a process of its own: send (what, part that is done) meanwhile, then the findings or an error."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from optpipe_torch.profiler.child import Asked, Measuring, find

    def say(what: str, part: float) -> None:
        if rank == 0:
            line.send((what, part))

    allow(options.model().builder)
    place = Place(rank, layout.processes, f"file://{store}", rank)
    by_default = " by default" if options.devices is None else ""
    asked = Asked(layout.devices, f"--devices is {layout.devices}{by_default}")
    cores, on_gpu = layout.cores[rank], layout.on_gpus
    try:
        how = Measuring(options.model(), options.samples, as_its_data=options.as_its_data)
        found = find(place, asked, how, say, cores=cores, on_gpu=on_gpu)
        line.send(found)
    except OptPipeError as error:
        line.send(error)
    except Exception as error:
        name = f"process {rank} of {layout.processes}"
        line.send(RunFailed(f"measuring ended because {name} failed: {type(error).__name__}: {first_line(error)}"))
