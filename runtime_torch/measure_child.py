"""What each measuring process does: messages, layers and host copies, in step with the other processes."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from optpipe_compiler.errors import BadInput
from optpipe_compiler.units import show_bytes
from runtime_torch import models, text
from runtime_torch.measure_layers import Bench, Benches, bookkeeping_bench, layer_bytes, time_ops, transient_bytes
from runtime_torch.measure_profile import (
    Copies,
    Findings,
    LayerBytes,
    Messages,
    Times,
    available_memory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.profile import Model

GROUP_TIMEOUT = timedelta(seconds=120)
MOST_EQUAL = 4
"""So many equal layers are timed in turn, as many as a device may own; more would only take memory."""
MOST_LAYERS = 12
"""A stage of so many layers shows all that passes between them."""
MICROBATCHES = 4
"""In flight while host copies are timed."""
SMALL_MESSAGE = 1024
"""Bytes of the message that shows the latency."""


@dataclass(frozen=True)
class Place:
    """Which of the measuring processes this is, and where it runs."""

    rank: int
    processes: int
    core: int | None
    """None: not pinned."""
    meet: str
    """Where the processes find each other, as torch.distributed names it."""


def find(place: Place, model: Model, samples: int, say: Callable[[str, float], None]) -> Findings:
    """Measure everything on this process, while the others do the same; `say` what and how far."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with _joined(place):
        return _find(place, model, samples, say)


def find_in_group(place: Place, model: Model, samples: int, say: Callable[[str, float], None]) -> list[Findings] | None:
    """Measure as one rank of a group that torchrun started, messages between all neighbours; all findings on rank 0."""
    with _joined(place):
        mine = _find(place, model, samples, say)
        for first in (0, 1):  # 0-1, 2-3, ..., then 1-2, 3-4, ...
            peer = ((place.rank + first) ^ 1) - first
            dist.barrier()
            if 0 <= peer < place.processes:
                mine.messages_with[peer] = time_messages(place.rank, peer, mine.messages.large_bytes, 5 * samples)
        findings = [mine] * place.processes if place.rank == 0 else None
        dist.gather_object(mine, findings)
        return findings


@contextmanager
def _joined(place: Place) -> Iterator[None]:
    torch.set_num_threads(1)
    if place.core is not None:
        os.sched_setaffinity(0, {place.core})
    dist.init_process_group(
        "gloo", init_method=place.meet, rank=place.rank, world_size=place.processes, timeout=GROUP_TIMEOUT
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _find(place: Place, model: Model, samples: int, say: Callable[[str, float], None]) -> Findings:
    names = models.layer_names(model)
    room = available_memory() // (2 * place.processes)
    _refuse_too_large(model, room)
    benches = Benches(model, text.default_text())
    say("bytes of the layers", 0.05)
    sizes = measure_sizes(benches, names, room)
    say("messages", 0.15)
    messages = Messages(SMALL_MESSAGE, benches.message_bytes)
    if (peer := place.rank ^ 1) < place.processes:
        messages = time_messages(place.rank, peer, benches.message_bytes, 5 * samples)
    dist.barrier()
    say("bookkeeping", 0.2)
    overhead: Times = {}
    for _ in time_ops([bookkeeping_bench()], 5 * samples, overhead):
        pass
    equal = {name: max(1, min(MOST_EQUAL, room // max(1, size.static))) for name, size in sizes.items()}
    times = _time_kinds(benches, names, equal, samples, say)
    dist.barrier()
    say("host copies of all processes at once", 0.85)
    block = names.index(common(names))
    copies = time_copies(benches, block, 2 * samples)
    dist.barrier()
    say("host copies alone", 0.93)
    copies_alone = time_copies(benches, block, 2 * samples) if place.rank == 0 else None
    dist.barrier()
    say("done", 1.0)
    return Findings(names, overhead, times, sizes, messages, copies, copies_alone)


# -- layers


def common(names: list[str]) -> str:
    """Return the most frequent kind of layer, of those that are neither first nor last where there are such."""
    inner = names[1:-1] or names
    return max(dict.fromkeys(inner), key=inner.count)


def _refuse_too_large(model: Model, room: int) -> None:
    """Refuse a model of which one layer with its gradients does not fit the memory of a measuring process."""
    largest = 2 * max(models.parameter_bytes(model))
    if largest > room:
        raise BadInput(
            f"the largest layer and its gradients take {show_bytes(largest)}, and a measuring process has "
            f"{show_bytes(room)}: measure a smaller model, or estimate this one with --gpu"
        )


def measure_sizes(benches: Benches, names: list[str], room: int) -> dict[str, LayerBytes]:
    """Return the bytes of each kind of layer; stages of several layers are built where they fit `room` bytes.

    A layer has the transient bytes of a stage of its own. What stages of several layers need beyond that, by the
    gradients and outputs that pass from layer to layer, is counted for the inner layers in them, of which every such
    stage has one, but for the whole of a model of two layers.
    """
    sizes = {name: layer_bytes(benches, names.index(name)) for name in dict.fromkeys(names)}
    for name in sizes:
        index = names.index(name)
        sizes[name].transient = transient_bytes(benches, index, index + 1, [sizes[name]])
    for first, end in _telling_stages(len(names)):
        if sum(sizes[name].static for name in names[first:end]) > room:
            continue
        found = transient_bytes(benches, first, end, [sizes[name] for name in names[first:end]])
        for name in dict.fromkeys(names[max(1, first) : min(end, len(names) - 1)] or names[first:end]):
            own = sizes[name].transient
            sizes[name].transient = {op: max(own[op], found[op]) for op in own}
    return sizes


def _telling_stages(count: int) -> list[tuple[int, int]]:
    """Stages of several layers in every position: at the start, inside, at the end, and all of a small model."""
    stages = {(0, 2), (0, 3), (1, 3), (count - 3, count), (count - 2, count), (0, min(count, MOST_LAYERS))}
    return sorted((first, end) for first, end in stages if first >= 0 and end <= count)


def _time_kinds(
    benches: Benches, names: list[str], equal: dict[str, int], samples: int, say: Callable[[str, float], None]
) -> dict[str, Times]:
    """Time each kind of layer on up to `equal` layers of it; the commonest one last."""
    times: dict[str, Times] = {}
    main = common(names)
    others = [name for name in dict.fromkeys(names) if name != main]
    done = 0.2
    for name, part in (*((name, 0.1 / len(others)) for name in others), (main, 0.55)):
        own = [index for index, other in enumerate(names) if other == name][: equal[name]]
        stages = [benches.stage(index, index + 1) for index in own]
        dist.barrier()
        wanted = samples if name == main else 2 * samples
        for progress in time_ops(stages, wanted, times.setdefault(name, {})):
            say(f"times of the {name}", done + part * progress)
        done += part
    return times


# -- messages


def time_messages(rank: int, peer: int, nbytes: int, samples: int) -> Messages:
    """Time messages between two processes, one way, by halves of round trips, while other pairs do the same."""
    messages = Messages(SMALL_MESSAGE, nbytes)
    small, large = (torch.zeros(size, dtype=torch.uint8) for size in (SMALL_MESSAGE, nbytes))
    for index in range(5 + samples):
        # in turn, so that what else runs on the machine touches both alike
        few, many = _round_trip(rank, peer, small), _round_trip(rank, peer, large)
        if index >= 5:
            messages.small.append(few // 2)
            messages.large.append(many // 2)
    return messages


def _round_trip(rank: int, peer: int, data: torch.Tensor) -> int:
    start = time.perf_counter_ns()
    if rank < peer:
        _wait(dist.isend(data, peer))
        _wait(dist.irecv(data, peer))
    else:
        _wait(dist.irecv(data, peer))
        _wait(dist.isend(data, peer))
    return time.perf_counter_ns() - start


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


# -- host copies


def time_copies(benches: Benches, block: int, samples: int) -> Copies:
    """Time offloads and reloads of what one block saved: alone, then one while the other runs, on lanes' threads."""
    bench = benches.stage(block, block + 1)
    for microbatch in range(MICROBATCHES):
        bench.forward(microbatch)
    copies = Copies(bench.stage.saved_bytes(0))
    _in_thread(lambda: _alone(bench, samples, copies.d2h, copies.h2d))
    tiny = bookkeeping_bench()
    for microbatch in range(MICROBATCHES):
        tiny.forward(microbatch)
    _in_thread(lambda: _alone(tiny, samples, copies.latency, copies.latency))
    _duplex(bench, samples, copies)
    return copies


def _alone(bench: Bench, samples: int, d2h: list[int], h2d: list[int]) -> None:
    """Offload several microbatches, then reload them, so that none is still warm in the caches."""
    for index in range(1 + max(1, samples // MICROBATCHES)):
        out = [_timed(bench.stage.offload, microbatch, bench.whole) for microbatch in range(MICROBATCHES)]
        back = [_timed(bench.stage.reload, microbatch, bench.whole) for microbatch in range(MICROBATCHES)]
        if index > 0:
            d2h.extend(out)
            h2d.extend(back)


def _duplex(bench: Bench, samples: int, copies: Copies) -> None:
    """Two threads start together, round by round: one offloads a microbatch while the other reloads another."""
    barrier = threading.Barrier(2, timeout=GROUP_TIMEOUT.total_seconds())
    half = MICROBATCHES // 2
    for microbatch in range(half, MICROBATCHES):
        bench.stage.offload(microbatch, bench.whole)

    def lane(op: Callable[[int, tuple[int, int]], None], first: int, into: list[int]) -> None:
        for index in range(samples):
            barrier.wait()
            into.append(_timed(op, (first + index) % MICROBATCHES, bench.whole))

    h2d = threading.Thread(target=lane, args=(bench.stage.reload, half, copies.duplex_h2d))
    h2d.start()
    lane(bench.stage.offload, 0, copies.duplex_d2h)
    h2d.join()


def _timed(op: Callable[[int, tuple[int, int]], None], microbatch: int, layers: tuple[int, int]) -> int:
    start = time.perf_counter_ns()
    op(microbatch, layers)
    return time.perf_counter_ns() - start


def _in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
