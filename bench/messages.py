"""What a message between two processes of one host takes: `python -m bench.messages [-o docs/MESSAGES.md]`.

Over gloo and through shared memory (runtime_torch/shared.py), in turns, each process on a core of its own. Alone: half
of a round trip. Beside compute: both processes multiply matrices all the time, and with every op each sends a message
and posts a receive, for which it waits when the next op is over, as the replay of a pipeline does; what an op takes
longer than without messages is theirs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import machine, publish, state
from optpipe_compiler.processes import Ended, Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection

RANKS = 2
SIZES = (1 << 10, 1 << 17, 1 << 19, 1 << 21, 1 << 23)
"""Bytes of a message."""
OP_S = 0.004
"""About what an op takes."""
ROUNDS = 5
OPS = 60
"""In a round, of each way."""
TRIPS = 40
WAYS = ("gloo", "shared memory")


def _rank(line: Connection, rank: int, folder: str, core: int) -> None:
    import torch
    import torch.distributed as dist

    from optpipe_torch.launch.worker import settle_on_cpu

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.sched_setaffinity(0, {core})
    settle_on_cpu()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    line.send([(size, *_measured(rank, size, torch)) for size in SIZES])
    dist.barrier()
    os._exit(0)


def _measured(rank: int, size: int, torch: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return the us of a message alone, and what it takes beside compute, by way."""
    import torch.distributed as dist

    from runtime_torch.messages import Mailbox
    from runtime_torch.meter import Meter
    from runtime_torch.shared import connect

    peer = 1 - rank
    ways = dict(zip(WAYS, (None, connect({peer}, size)), strict=True))
    boxes = {name: Mailbox(None, Meter(), shared) for name, shared in ways.items()}
    out, into = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    matrix = torch.ones(256, 256)
    multiplications = _agreed(round(OP_S / min(_seconds(lambda: torch.mm(matrix, matrix)) for _ in range(200))))
    alone: dict[str, list[float]] = {name: [] for name in ways}
    taken: dict[str, list[float]] = {name: [] for name in ("nothing", *ways)}

    def trips(box: Mailbox) -> None:
        for _ in range(TRIPS):
            for sent in (rank == 0, rank == 1):
                box.post("", out if sent else into, peer, sent=sent).wait()

    def ops(box: Mailbox | None) -> None:
        posted: list[Any] = []
        for _ in range(OPS):
            for _ in range(multiplications):
                torch.mm(matrix, matrix)
            for one in posted:
                one.wait()
            if box is not None:
                posted = [box.post("", out if sent else into, peer, sent=sent) for sent in (True, False)]
        for one in posted:
            one.wait()

    for number in range(1 + ROUNDS):
        for name, box in boxes.items():
            dist.barrier()
            alone[name].append(_seconds(lambda box=box: trips(box)) / TRIPS / 2)  # type: ignore[misc]
        for name in taken:
            dist.barrier()
            taken[name].append(_seconds(lambda name=name: ops(boxes.get(name))) / OPS)  # type: ignore[misc]
        if number == 0:
            for found in (*alone.values(), *taken.values()):
                found.clear()
    more = {name: [a - b for a, b in zip(taken[name], taken["nothing"], strict=True)] for name in ways}
    return _us(alone), _us(more)


def _agreed(number: int) -> int:
    """Return what rank 0 says."""
    import torch
    import torch.distributed as dist

    found = torch.tensor([number])
    dist.broadcast(found, 0)
    return int(found)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _us(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: 1e6 * statistics.median(found) for name, found in samples.items()}


def together() -> list[tuple[int, dict[str, float], dict[str, float]]]:
    """Run both ranks; return what rank 0 has measured."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="optpipe-") as folder, Processes() as processes:
        for rank in range(RANKS):
            processes.start(_rank, rank, folder, cores[rank % len(cores)])
        found: dict[int, Any] = {}
        while len(found) < RANKS:
            for rank, heard in processes.listen():
                if isinstance(heard, Ended) and rank not in found:
                    raise RuntimeError(f"rank {rank} died: {heard}")
                found.setdefault(rank, heard)
    return found[0]  # type: ignore[no-any-return]


HEADER = """# Messages on one host

Written by `python -m bench.messages`; {machine}, {state}.
Microseconds of one message between two processes, each on a core of its own, over gloo and through shared memory
(runtime_torch/shared.py): alone, half of a round trip; beside compute, what an op of some {op_ms:g} ms takes longer
where it sends one message and receives another. Medians of {rounds} rounds in turns.

| bytes | alone: gloo | shared memory | beside compute: gloo | shared memory |
|---|---|---|---|---|
"""


def rows(found: Iterable[tuple[int, dict[str, float], dict[str, float]]]) -> str:
    """Return the table's rows."""
    lines = []
    for size, alone, beside in found:
        cells = [f"{us[name]:.0f}" for us in (alone, beside) for name in WAYS]
        lines.append(f"| {size} | " + " | ".join(cells) + " |\n")
    return "".join(lines)


def main() -> None:
    """Write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    header = HEADER.format(machine=machine(), state=state(), op_ms=1e3 * OP_S, rounds=ROUNDS)
    from bench.messages import together  # by the name under which the processes find it

    publish(header + rows(together()), options.output)


if __name__ == "__main__":
    main()
