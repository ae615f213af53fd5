"""Messages between GPUs: each pair of devices has a communicator and a stream of its own.

NCCL serves what is sent and received over one communicator one after the other. A schedule says in which order the
messages of a pair of devices are delivered, and leaves open that of two pairs (docs/IR.md): a receive that is posted
early must not hold up what other devices wait for. In a group that was made lazily torch gives each pair a communicator
of its own. In one that was made eagerly (`init_process_group(device_id=...)`) all messages go over that of the group;
so each pair gets a group that is split off.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput
from runtime_torch.delivery import Delivery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

Pair = tuple[int, int]
"""Two devices, the lower first."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LEAST_CONNECTIONS = 8
"""CUDA's default. Streams that share one of a GPU's work queues wait for each other: with a single queue a message that
is waited for keeps those behind it from being sent, which others may wait for."""


class GpuChannels:
    """The channels of this rank to others of `group` (None: the default one)."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        _refuse_settings()
        self._given = group
        self._device = device
        self._known: set[Pair] = set()
        """Pairs of all ranks whose channels have been made."""
        self._split: dict[int, tuple[dist.ProcessGroup, int]] = {}
        """By peer: the group of this pair alone, and the peer's rank there."""
        self._streams: dict[int, torch.cuda.Stream] = {}
        """By peer: it waits for the messages of the pair in their order."""

    def meet(self, schedule: ir.Schedule) -> None:
        """Make the channels that a schedule needs and that are not there yet; called by all ranks at one time.

        No step then waits for two ranks to find each other. Raises BadInput where a group cannot be split.
        """
        group, rank = self._group(), dist.get_rank(self._given)
        for disjoint in rounds(pairs_of(schedule) - self._known):
            mine = next((pair for pair in disjoint if rank in pair), None)
            peer = None if mine is None else sum(mine) - rank
            if group.bound_device_id is not None:
                found = _split_off(group, disjoint)
                if peer is not None and found is not None:
                    self._split[peer] = found, int(peer > rank)
            elif peer is not None:
                token = torch.zeros(1, dtype=torch.uint8, device=self._device)
                (group.send if rank < peer else group.recv)([token], peer, 0).wait()
            self._known |= set(disjoint)

    def post(self, tensor: Tensor, peer: int, *, sent: bool) -> Delivery:
        """Send a contiguous tensor, or receive into it. Nothing here holds its memory: who waits for the delivery may
        give it away then, to what runs behind that on the stream that waited."""
        group, number = self._split.get(peer, (self._group(), peer))
        work = (group.send if sent else group.recv)([unrecorded(tensor)], number, 0)
        if peer not in self._streams:
            self._streams[peer] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return _OnStream(work, self._streams[peer])

    def _group(self) -> dist.ProcessGroup:
        """The default group is not kept: it could not end before Python does, whose end its threads may then abort."""
        group = dist.group.WORLD if self._given is None else self._given
        assert group is not None
        return group


class _OnStream(Delivery):
    """The delivery of a message as an event of the pair's stream: the work itself would hold the buffer."""

    def __init__(self, work: dist.Work, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            work.wait()
            self._event.record(stream)

    def wait(self) -> None:
        """Let the current stream wait."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_delivered(self) -> bool:
        """Whether it has happened."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]


def unrecorded(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor under an owner that the caching allocator does not know.

    torch records the stream of a message on its buffer, and a buffer that was recorded is not used again before the
    allocator has seen that stream get there: where the host is ahead, freed buffers pile up beside what was promised.
    Here streams wait for the delivery before a buffer is freed.
    """
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return from_dlpack(to_dlpack(flat))


def pairs_of(schedule: ir.Schedule) -> set[Pair]:
    """Return the pairs of devices between which there are messages."""
    return {
        (min(device, op.peer), max(device, op.peer))
        for device, plan in enumerate(schedule.devices)
        for op in plan.compute
        if isinstance(op, ir.MessageOp)
    }


def rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Return the pairs in rounds, in each of which no device meets two others: the same on all ranks."""
    found: list[list[Pair]] = []
    for pair in sorted(pairs):
        for one in found:
            if all(set(pair).isdisjoint(other) for other in one):
                one.append(pair)
                break
        else:
            found.append([pair])
    return found


def _split_off(group: dist.ProcessGroup, disjoint: list[Pair]) -> dist.ProcessGroup | None:
    try:
        return dist.split_group(group, [list(pair) for pair in disjoint], group_desc="optpipe")
    except RuntimeError as error:
        raise BadInput(
            f"the process group cannot be split into pairs of devices ({error}): expected NCCL of 2.18 or later, and "
            "device_id either for the default group or for none"
        ) from error


def _refuse_settings() -> None:
    """Raise BadInput for an environment in which messages wait for what waits for them."""
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0"):
        raise BadInput("TORCH_NCCL_BLOCKING_WAIT is set, expected not: messages must not hold up the host")
    connections = os.environ.get(CONNECTIONS, "")
    if connections.isdecimal() and int(connections) < LEAST_CONNECTIONS:
        raise BadInput(
            f"{CONNECTIONS} is {connections}, expected 32, and no less than {LEAST_CONNECTIONS}: messages must not "
            "hold up each other"
        )
