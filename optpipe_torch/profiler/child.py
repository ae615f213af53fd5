"""What each measuring process does: layers, messages and host copies, in step with the other processes."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from optpipe_compiler.documents.units import counted, show_bytes
from optpipe_compiler.errors import BadInput
from optpipe_torch.launch.worker import settle_on_cpu
from optpipe_torch.models import known as models
from optpipe_torch.models import text
from optpipe_torch.models.user_functions import OWN
from optpipe_torch.profiler.copies import time_copies
from optpipe_torch.profiler.layers import (
    Benches,
    bookkeeping_bench,
    layer_bytes,
    pair_bytes,
    selective_bytes,
    time_ops,
    time_selective,
    transient_bytes,
)
from optpipe_torch.profiler.records import Findings, LayerBytes, Messages, Samples, available_memory
from optpipe_torch.profiler.slices import slice_bytes, sliced_bench, time_slices
from optpipe_torch.profiler.spread import steadiest
from optpipe_torch.profiler.timer import Timer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe_compiler.documents.profile import Model
    from optpipe_torch.launch.job import Place
    from optpipe_torch.profiler.layers import Bench, PairBytes

GROUP_TIMEOUT = timedelta(seconds=120)
MOST_EQUAL = 4
"""So many equal layers are timed in turn, as many as a device may own; more would only take memory."""
SHARE_OF_SLICES = 3
"""Slices get this part of the samples of whole microbatches: each sample is of all slices."""
LAYERS_OF_A_STAGE = 12
"""A stage of so many layers shows all that passes between them."""
SMALL_MESSAGE = 1024
"""Bytes of the message that shows the latency."""


@dataclass(frozen=True)
class Asked:
    """For how many devices a profile is measured."""

    devices: int
    said: str
    """Who asked for them, in words that begin a sentence."""

    def check(self, layers: int) -> None:
        """Refuse more devices than layers, for which nothing can be planned."""
        if self.devices > layers:
            raise BadInput(f"{self.said}, expected at most the model's {counted(layers, 'layer')}")


@dataclass(frozen=True)
class Measuring:
    """What is measured, and how often."""

    model: Model
    samples: int
    as_its_data: bool = False
    """Whether a model of a user's own data is as long as these."""


def find(
    place: Place,
    asked: Asked,
    how: Measuring,
    say: Callable[[str, float], None],
    *,
    cores: Sequence[int],
    on_gpu: bool,
) -> Findings:
    """Measure everything on this process, while the others do the same; `say` what and how far.

    It measures the GPU of its local rank, or the cores that it is pinned to (none: not pinned).
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if cores:
        os.sched_setaffinity(0, cores)
    with _joined(place, on_gpu=on_gpu) as timer, models.called_seldom():
        return _find(timer, place, asked, how, say)


def find_in_group(
    place: Place, how: Measuring, say: Callable[[str, float], None], *, on_gpu: bool
) -> list[Findings] | None:
    """Measure as one rank of a group that torchrun started, messages between all neighbours; all findings on rank 0."""
    with _joined(place, on_gpu=on_gpu) as timer:
        asked = Asked(place.world, f"torchrun started {counted(place.world, 'rank')}")
        with models.called_seldom():
            mine = _find(timer, place, asked, how, say)
        for first in (0, 1):  # 0-1, 2-3, ..., then 1-2, 3-4, ...
            peer = ((place.rank + first) ^ 1) - first
            dist.barrier()
            if 0 <= peer < place.world:
                mine.messages_with[peer] = time_messages(
                    timer, place.rank, peer, mine.messages.large_bytes, 5 * how.samples
                )
        findings = [mine] * place.world if place.rank == 0 else None
        dist.gather_object(mine, findings)
        return findings


@contextmanager
def _joined(place: Place, *, on_gpu: bool) -> Iterator[Timer]:
    """Take the place among the other processes, and what measures there.

    After a failure the group is left as it is: to take it down could mean to wait for the others.
    """
    timer = _timer(place.local_rank if on_gpu else None)
    dist.init_process_group(
        "gloo", init_method=place.meet, rank=place.rank, world_size=place.world, timeout=GROUP_TIMEOUT
    )
    timer.join(place.world)
    yield timer
    dist.destroy_process_group()


def _timer(gpu: int | None) -> Timer:
    if gpu is None:
        settle_on_cpu()
        return Timer()
    from optpipe_torch.profiler.cuda import CudaTimer

    return CudaTimer(gpu)


def _find(timer: Timer, place: Place, asked: Asked, how: Measuring, say: Callable[[str, float], None]) -> Findings:
    model, samples = how.model, how.samples
    if how.as_its_data:
        model = models.as_long_as_its_data(model)
    names = models.layer_names(model)
    asked.check(len(names))
    ties = [tie and (tie.name, tie.kept_bytes) for tie in models.tied_layers(model)]
    room = timer.room_bytes(place.world)
    _refuse_too_large(model, room)
    benches = Benches(model, text.default_text(), timer.device)
    say("bytes of the layers", 0.05)
    sizes = measure_sizes(timer, benches, names, room)
    if asked.devices > 1:
        _refuse_without_gradient(names, sizes)
    for name in sizes:
        slice_bytes(timer, benches, names.index(name), sizes[name])
    say("messages", 0.15)
    timer.share({place.rank - 1, place.rank + 1} & set(range(place.world)), benches.message_bytes)
    messages = Messages(SMALL_MESSAGE, benches.message_bytes)
    if (peer := place.rank ^ 1) < place.world:
        messages = time_messages(timer, place.rank, peer, benches.message_bytes, 5 * samples)
    dist.barrier()
    say("bookkeeping", 0.2)
    overhead = _overhead(timer, samples)
    equal = {name: max(1, min(MOST_EQUAL, room // max(1, size.static))) for name, size in sizes.items()}
    times = _time_kinds(timer, benches, names, equal, samples, say)
    for name, size in sizes.items():
        if size.selective is not None:
            index = names.index(name)
            times[name]["selective"] = time_selective(timer, benches.stage(index, index + 1, selective=True), samples)
    dist.barrier()
    say("times of slices", 0.8)
    sliced_times = {
        name: _time_slices(timer, benches, names, name, equal[name], samples)
        for name, size in sizes.items()
        if size.sliced is not None
    }
    dist.barrier()
    say("host copies of all processes at once", 0.85)
    copied = names.index(most_copied(names, sizes))
    copies = time_copies(timer, benches, copied, 2 * samples, _any_process)
    is_first = _is_first_on_its_link(timer, place)
    say("host copies alone", 0.93)
    copies_alone = time_copies(timer, benches, copied, 2 * samples, bool) if is_first else None
    dist.barrier()
    say("done", 1.0)
    del benches
    return Findings(
        names,
        overhead,
        times,
        sizes,
        messages,
        copies,
        copies_alone,
        kind=timer.kind,
        memory=timer.memory(),
        titles=models.layer_titles(model) if model.builder in OWN else [],
        host_link=timer.host_link,
        host_memory_bytes=available_memory(),
        sliced=sliced_times,
        ties=ties,
        sequence_length=model.sequence_length,
    )


def _is_first_on_its_link(timer: Timer, place: Place) -> bool:
    """Whether this process copies alone for those that share its host link, or for all where links are not known."""
    links: list[str | None] = [None] * place.world
    dist.all_gather_object(links, timer.host_link)
    return place.rank == (0 if None in links else links.index(timer.host_link))


# -- layers


def common(names: list[str]) -> str:
    """Return the most frequent kind of layer, of those that are neither first nor last where there are such."""
    inner = names[1:-1] or names
    return max(dict.fromkeys(inner), key=inner.count)


def most_copied(names: list[str], sizes: dict[str, LayerBytes]) -> str:
    """Return the kind of layer that saves most in all, of those that are neither first nor last where one of them saves
    anything: its copies show how fast copies are."""
    inner = names[1:-1]
    some = inner if any(sizes[name].own_saved for name in inner) else names
    return max(dict.fromkeys(some), key=lambda name: some.count(name) * sizes[name].own_saved)


def _refuse_without_gradient(names: list[str], sizes: dict[str, LayerBytes]) -> None:
    """Refuse a layer that passes no gradient back: a stage behind the first may not have it."""
    for index, name in enumerate(names):
        if not sizes[name].passes_back:
            raise BadInput(
                f"layer {index} passes no gradient back to layer {index - 1}, as where it calls detach() or computes "
                "under no_grad(), and stages behind the first must: expected frozen parameters "
                "(requires_grad_(False)) instead, or the layers up to there as one, the model's first"
            )


def _refuse_too_large(model: Model, room: int) -> None:
    """Refuse a model of which one layer with its gradients does not fit the memory of a measuring process."""
    largest = 2 * max(models.parameter_bytes(model))
    if largest > room:
        raise BadInput(
            f"the largest layer and its gradients take {show_bytes(largest)}, and a measuring process has "
            f"{show_bytes(room)}: measure a smaller model, or estimate this one with --gpu"
        )


def measure_sizes(timer: Timer, benches: Benches, names: list[str], room: int) -> dict[str, LayerBytes]:
    """Return the bytes of each kind of layer; stages of several layers are built where they fit `room` bytes.

    A layer has the transient bytes of a stage of its own. A stage needs those of the layer in it that needs most, and
    of several layers more, by the gradients and outputs that pass from layer to layer: this is counted for that layer,
    not for its neighbours, which stand in other stages without it (a block without the head and its logits).
    """
    sizes = {name: layer_bytes(benches, names.index(name)) for name in dict.fromkeys(names)}
    _put_changing(names, sizes)
    for name, chain in zip(names, models.layer_chains(benches.model), strict=True):
        sizes[name].chain = chain
    for name in sizes:
        index = names.index(name)
        sizes[name].own_transient = transient_bytes(timer, benches, index, index + 1, [sizes[name]])
        sizes[name].transient = dict(sizes[name].own_transient)
        sizes[name].selective = selective_bytes(timer, benches, index, sizes[name])
    _put_together(benches, names, sizes, room)
    _put_first(benches, names, sizes, room)
    for first, end in _telling_stages(names, benches.first_trained):
        if sum(sizes[name].static for name in names[first:end]) > room:
            continue
        of_stage = [sizes[name] for name in names[first:end]]
        for op, excess in transient_bytes(timer, benches, first, end, of_stage).items():
            most = max(of_stage, key=lambda layer: layer.transient[op])
            most.transient[op] = max(most.transient[op], excess)
    return sizes


def _put_changing(names: list[str], sizes: dict[str, LayerBytes]) -> None:
    """Add to the checkpoint of each layer the buffers that forwards of the layers behind it change: where these are
    recomputed with it, theirs are kept, too."""
    for name, layer in sizes.items():
        layer.checkpoint += sum(sizes[behind].changing for behind in names[names.index(name) + 1 :])
        layer.saved = max(layer.saved, layer.checkpoint)


def _put_together(benches: Benches, names: list[str], sizes: dict[str, LayerBytes], room: int) -> None:
    """Measure what two layers in a row share, and add to their bytes what they keep more than each of them alone."""
    pairs: dict[tuple[str, str], PairBytes] = {}
    for index, pair in enumerate(pairwise(names)):
        if pair not in pairs and sum(sizes[name].static for name in pair) <= room:
            pairs[pair] = pair_bytes(benches, index)
    for name, layer in sizes.items():
        behind = [(before, found) for (before, second), found in pairs.items() if second == name]
        ahead = [found for (first, _), found in pairs.items() if first == name]
        shared = [-found.saved for before, found in behind if layer.follows(sizes[before])]
        layer.shared = max(0, min(shared, default=0))
        layer.keep_more(
            max((found.saved for _, found in behind), default=0),
            max((found.residue - max(0, found.captured) for _, found in behind), default=0),
            max((found.captured for found in ahead), default=0),
        )


def _put_first(benches: Benches, names: list[str], sizes: dict[str, LayerBytes], room: int) -> None:
    """Add to the bytes of the first layer that trains what it keeps from I to W in one stage with those before it.

    Nobody asks for the gradient of what enters it there. So all of its backward is in W, and waits for the gradient of
    what it returned.
    """
    first = benches.first_trained
    *before, layer = (sizes[name] for name in names[: first + 1])
    if not before or sum(sizes[name].static for name in names[: first + 1]) > room:
        return
    bench = benches.stage(0, first + 1)
    bench.forward(0)
    bench.stage.backward_input(0, bench.gradient)
    captured = bench.stage.captured_bytes(0)
    residue = bench.stage.saved_bytes(0) + captured
    bench.stage.backward_weight(0)
    layer.captured = max(layer.captured, captured - sum(one.captured for one in before))
    residue = max(layer.residue, layer.captured, residue - sum(one.residue for one in before))
    layer.residue = min(residue, layer.saved + layer.captured)


def _telling_stages(names: list[str], first_trained: int) -> list[tuple[int, int]]:
    """Stages of two and of three layers, each row of kinds that there is; from the first layer on to each other kind,
    as nothing is before them that their gradient is for, and to the first that trains; and all of a small model. Those
    of few kinds come first."""
    stages: dict[tuple[str, ...], tuple[int, int]] = {}
    for first in range(len(names) - 1):
        for end in range(first + 2, min(first + 3, len(names)) + 1):
            stages.setdefault(tuple(names[first:end]), (first, end))
    if first_trained:
        stages[tuple(names[: first_trained + 1])] = 0, first_trained + 1
    most = min(LAYERS_OF_A_STAGE, len(names))
    for end in range(2, most + 1):
        if end == most or names[end - 1] not in names[: end - 1]:
            stages[tuple(names[:end])] = 0, end
    return sorted(stages.values(), key=lambda stage: (len(set(names[slice(*stage)])), stage))


def _overhead(timer: Timer, samples: int) -> Samples:
    """Time ops that do next to nothing."""
    return _time_kind(timer, [bookkeeping_bench(timer.device)], 5 * samples, lambda *_: None, lead=True)


def _any_process(mine: bool) -> bool:
    """Whether any of the measuring processes says yes; all of them call this."""
    flag = torch.tensor(int(mine))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _time_kinds(
    timer: Timer,
    benches: Benches,
    names: list[str],
    equal: dict[str, int],
    samples: int,
    say: Callable[[str, float], None],
) -> dict[str, Samples]:
    """Time each kind of layer on up to `equal` layers of it; the commonest one last."""
    times: dict[str, Samples] = {}
    main = common(names)
    others = [name for name in dict.fromkeys(names) if name != main]
    done = 0.2
    for name, part in (*((name, 0.1 / len(others)) for name in others), (main, 0.5)):
        own = [index for index, other in enumerate(names) if other == name][: equal[name]]
        stages = [benches.stage(index, index + 1) for index in own]
        dist.barrier()
        wanted = samples if name == main else 2 * samples
        times[name] = _time_kind(timer, stages, wanted, _telling(say, f"times of the {name}", done, part))
        done += part
    return times


def _time_slices(timer: Timer, benches: Benches, names: list[str], name: str, equal: int, samples: int) -> Samples:
    """Time the slices of a kind of layer on up to `equal` layers of it; each sample is of all its slices."""
    own = [index for index, other in enumerate(names) if other == name][:equal]
    sliced = [one for one in (sliced_bench(benches, index) for index in own) if one is not None]
    dist.barrier()
    rounds = max(3, -(-samples // (SHARE_OF_SLICES * len(sliced))))
    return steadiest(lambda turn: time_slices(timer, sliced, rounds), _any_process, samples)


def _time_kind(
    timer: Timer, stages: list[Bench], samples: int, tell: Callable[[int, float], None], *, lead: bool = False
) -> Samples:
    """Time equal layers; `tell` which turn it is, and how much of it is done. `lead` is that of `time_ops`."""

    def take(turn: int) -> Samples:
        times: Samples = {}
        for progress in time_ops(timer, stages, samples, times, lead=lead):
            tell(turn, progress)
        return times

    return steadiest(take, _any_process, samples)


def _telling(say: Callable[[str, float], None], what: str, done: float, part: float) -> Callable[[int, float], None]:
    """Return what tells of turns that are `part` of everything; those after the first add nothing to what is done."""
    return lambda turn, progress: say(what + ", again" * (turn > 0), done + part * (progress if turn == 0 else 1.0))


# -- messages


def time_messages(timer: Timer, rank: int, peer: int, nbytes: int, samples: int) -> Messages:
    """Time messages between two processes, one way, by halves of round trips, while other pairs do the same."""
    small, large = (torch.zeros(size, dtype=torch.uint8, device=timer.device) for size in (SMALL_MESSAGE, nbytes))

    def take(turn: int) -> Samples:
        found: Samples = {"small": [], "large": [], "busy": []}
        for _ in range(5 + samples):
            timer.lead()
            _round_trip(timer, rank, peer, small)  # both begin the next one at the same time
            # in turn, so that what else runs on the machine touches both alike
            with timer.timed(found["small"]):
                _round_trip(timer, rank, peer, small)
            with timer.timed(found["large"]), timer.busy(found["busy"]):
                _round_trip(timer, rank, peer, large)
            timer.settle()
        return {name: [ns // 2 for ns in taken[5:]] for name, taken in found.items() if taken}

    return Messages(SMALL_MESSAGE, nbytes, **steadiest(take, lambda mine: _either(peer, mine), samples))


def _either(peer: int, mine: bool) -> bool:
    """Whether this process or its peer says yes; both of them call this."""
    flag, other = torch.tensor([int(mine)]), torch.zeros(1, dtype=torch.int64)
    for work in (dist.isend(flag, peer), dist.irecv(other, peer)):
        assert work is not None
        work.wait()
    return bool(flag) or bool(other)


def _round_trip(timer: Timer, rank: int, peer: int, data: torch.Tensor) -> None:
    """There and back; on a GPU it is the stream that waits."""
    for sent in (rank < peer, rank > peer):
        timer.post(data, peer, sent=sent).wait()
