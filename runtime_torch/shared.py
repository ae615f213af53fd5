"""Messages between processes of one host through memory that they share: none needs a thread to arrive.

gloo sends through the system's network, and a thread of its own takes what comes: two copies by the system on either
side, and where all cores compute, that thread waits for one. Here a pair of ranks has a ring of memory for each
direction. A sent message is copied into the ring, and its buffer is free; it is copied out as soon as its receive has
been posted and the receiver posts another one, or waits for any message. What has happened is told over a socket of the
pair, so that a process that waits sleeps until there is something to do. docs/MESSAGES.md has both ways.

Both ranks post the messages of a direction in the same order (docs/IR.md), so nothing but their places in the ring has
to be told. A message for which the ring has no room stays with its sender, who copies it when it next posts or waits.
So every message that both have posted arrives, whatever else they wait for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections import deque
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import torch
import torch.distributed as dist

from optpipe_compiler.documents import ir
from runtime_torch.delivery import Delivery
from runtime_torch.engine import timeout_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    T = TypeVar("T")

ROOM = 8
"""So many of the largest messages fit into a ring."""
LEAST_BYTES = 1 << 20
"""Of a ring."""
MOST = 64
"""Messages in a ring: so many can be told of before anyone listens, since they fit into the socket."""
NUMBER = struct.Struct("<q")
"""What is told: where in the ring a message begins, or `TAKEN`."""
TAKEN = -1
"""The oldest message has been copied out."""
LISTEN_BYTES = 1 << 12
TIMEOUT = timedelta(minutes=30)
"""How long a message is waited for where the group does not say."""


class Channels:
    """The channels to those ranks of a group with whom this process shares memory; for any number of threads."""

    def __init__(self, channels: Collection[Channel], timeout: timedelta) -> None:
        self._by_peer = {channel.peer: channel for channel in channels}
        self._by_socket = {channel.line.fileno(): channel for channel in channels}
        self._timeout_s = timeout.total_seconds()
        self._changed = threading.Condition()
        self._has_listener = False
        """Whether a thread sleeps until another process tells something; meanwhile only it listens."""
        self._poll = select.poll()
        for number in self._by_socket:
            self._poll.register(number, select.POLLIN)
        self._end = weakref.finalize(self, _close, [channel.line for channel in channels])

    def post(self, tensor: Tensor, peer: int, *, sent: bool) -> Delivery | None:
        """Send a contiguous tensor, or receive into it; None where there is no channel, or a message is too large."""
        channel = self._by_peer.get(peer)
        if channel is None or tensor.nbytes > channel.most_bytes or not tensor.is_contiguous():
            return None
        half = _Half(self, channel, tensor)
        with self._changed:
            if sent:
                channel.sends.append(half)
                channel.copy_sends()
            else:
                channel.receives.append(half)
            if not half.is_over:
                self._advance(channel)
        return half

    def is_over(self, half: _Half) -> bool:
        """Whether a message has come, or was copied into the ring; without waiting."""
        with self._changed:
            if not half.is_over:
                self._advance(half.channel)
            return half.is_over

    def wait(self, half: _Half) -> None:
        """Wait until it is; meanwhile all other messages go on.

        Raises RuntimeError where the other process has gone, or says nothing for too long.
        """
        end = time.monotonic() + self._timeout_s
        with self._changed:
            while not half.is_over:
                self._advance(half.channel)
                if half.is_over:
                    return
                peer, left_s = half.channel.peer, end - time.monotonic()
                if half.channel.is_closed:
                    raise RuntimeError(f"Connection closed by rank {peer}")
                if left_s <= 0:
                    raise RuntimeError(f"Timed out after {self._timeout_s:g} s waiting for rank {peer}")
                if self._has_listener:
                    self._changed.wait(left_s)
                else:
                    self._listen(left_s)

    def close(self) -> None:
        """Let all go; who still waits for this process learns that it has gone."""
        with self._changed:
            self._by_peer.clear()
            self._end()

    def leave(self) -> None:
        """Take and give nothing any more: who waits for this process learns it, and nothing here waits any longer."""
        for channel in self._by_socket.values():
            with suppress(OSError):  # the other process has gone, or all was let go here
                channel.line.shutdown(socket.SHUT_RDWR)

    def _advance(self, channel: Channel) -> None:
        """Copy what can be copied. What a sleeping thread waits for is not read behind its back: it would sleep on."""
        channel.advance(listen=not self._has_listener)

    def _listen(self, most_s: float) -> None:
        """Sleep until another process tells something, and let all go on with that."""
        self._has_listener = True
        self._changed.release()
        try:
            told = self._poll.poll(1 + 1000 * most_s)
        finally:
            self._changed.acquire()
            self._has_listener = False
            self._changed.notify_all()  # also where this thread was interrupted: another one listens then
        for number, _ in told:
            channel = self._by_socket[number]
            channel.advance(listen=True)
            if channel.is_closed:
                self._poll.unregister(number)


class _Half(Delivery):
    """A send or a receive that was posted."""

    def __init__(self, channels: Channels, channel: Channel, tensor: Tensor) -> None:
        self._channels = channels
        self.channel = channel
        self.nbytes = tensor.nbytes
        self.is_over = False
        self._tensor = tensor

    def wait(self) -> None:
        """Return when it was delivered."""
        self._channels.wait(self)

    def is_delivered(self) -> bool:
        """Whether it was delivered, without waiting."""
        return self._channels.is_over(self)

    def copy(self, place: int, *, sent: bool) -> None:
        """Copy into the ring, to or from that address, and be over; torch's views take longer than small messages."""
        mine = self._tensor.data_ptr()
        into, of = (place, mine) if sent else (mine, place)
        ctypes.memmove(into, of, self.nbytes)
        self.is_over = True


class Channel:
    """Both directions between two processes; `memory` has first the ring of the lower rank's messages."""

    def __init__(self, peer: int, line: socket.socket, memory: mmap.mmap, *, is_lower: bool) -> None:
        self.peer, self.line = peer, line
        self.most_bytes = len(memory) // 2
        """Of a message: all of a ring."""
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        lower = self._memory.data_ptr()
        upper = lower + self.most_bytes
        self._out, self._in = (lower, upper) if is_lower else (upper, lower)
        """Where the rings begin."""
        self.sends: deque[_Half] = deque()
        """Those that had no room yet."""
        self.receives: deque[_Half] = deque()
        """Those whose message has not come yet."""
        self.is_closed = False
        """Whether the other process has gone."""
        self._placed: deque[tuple[int, int]] = deque()
        """Begin and end in the ring of what was sent and not yet copied out."""
        self._arrived: deque[int] = deque()
        """Where in the ring what has come begins."""
        self._told = b""

    def advance(self, *, listen: bool) -> None:
        """Copy what can be copied; `listen`: look at what the other process has told, too."""
        if listen:
            self._listen()
        while self.receives and self._arrived:
            self.receives.popleft().copy(self._in + self._arrived.popleft(), sent=False)
            self._tell(TAKEN)
        self.copy_sends()

    def copy_sends(self) -> None:
        """Copy the sends for which the ring has room, as far as is known."""
        while self.sends and (begin := self._place(self.sends[0].nbytes)) is not None:
            half = self.sends.popleft()
            half.copy(self._out + begin, sent=True)
            self._placed.append((begin, begin + half.nbytes))
            self._tell(begin)

    def _place(self, nbytes: int) -> int | None:
        """Return where in the ring there is room: at its begin where it is empty, so that it stays in the cache."""
        if not self._placed:
            return 0
        if len(self._placed) == MOST:
            return None
        first, last = self._placed[0][0], self._placed[-1][1]
        if first < last:
            return last if last + nbytes <= self.most_bytes else 0 if nbytes <= first else None
        return last if last + nbytes <= first else None

    def _listen(self) -> None:
        while not self.is_closed:
            try:
                told = self.line.recv(LISTEN_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                told = b""
            self.is_closed = not told
            self._told += told
            whole = len(self._told) - len(self._told) % NUMBER.size
            for (number,) in NUMBER.iter_unpack(self._told[:whole]):
                if number == TAKEN:
                    self._placed.popleft()
                else:
                    self._arrived.append(number)
            self._told = self._told[whole:]

    def _tell(self, number: int) -> None:
        with suppress(ConnectionError):  # a process that has gone needs nothing; who waits for it is told
            self.line.sendall(NUMBER.pack(number))


def _close(lines: Collection[socket.socket]) -> None:
    for line in lines:
        line.close()


# -- meeting


def channels_of(schedule: ir.Schedule, group: dist.ProcessGroup | None) -> Channels | None:
    """Return the channels for this rank's messages of a schedule; called by all ranks of the group at one time."""
    ops = schedule.devices[dist.get_rank(group)].compute
    peers = {op.peer for op in ops if isinstance(op, ir.MessageOp)}
    return connect(peers, max(stage.output_bytes for stage in schedule.stages), group)


def connect(peers: Collection[int], largest_bytes: int, group: dist.ProcessGroup | None = None) -> Channels | None:
    """Share memory with those of `peers` that are on this host; called by all ranks of the group at one time.

    Every rank is a peer of its peers. A message may have `ROOM` times `largest_bytes`. None where there is nobody to
    share with, or the system has no such memory. Raises TimeoutError where a peer does not come.
    """
    rank, timeout = dist.get_rank(group), timeout_of(group) or TIMEOUT
    channels = list[Channel]()
    with _Door(timeout) if _can_share() else nullcontext() as door:
        names = _gathered("" if door is None else door.name, group)
        called = {peer: line for peer in peers if peer < rank and door and (line := _call(names[peer], rank))}
        callers = sum(rank in lower for lower in _gathered(list(called), group))
        for peer, line in (door.answer() for _ in range(callers) if door):
            number = os.memfd_create("optpipe")
            os.ftruncate(number, 2 * max(LEAST_BYTES, ROOM * largest_bytes))
            socket.send_fds(line, [b"m"], [number])
            channels.append(_channel(peer, line, number, is_lower=True))
    for peer, line in called.items():
        _, (number,), _, _ = socket.recv_fds(line, 1, 1)
        channels.append(_channel(peer, line, number, is_lower=False))
    return Channels(channels, timeout) if channels else None


class _Door:
    """A socket in the file system, in a folder for this user alone, through which others of this host come."""

    def __init__(self, timeout: timedelta) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="optpipe-", ignore_cleanup_errors=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout.total_seconds())
        self.name = str(Path(self._folder.name, "door"))
        try:
            self._socket.bind(self.name)
            self._socket.listen(socket.SOMAXCONN)
        except OSError:  # its name is too long, say: then nobody comes
            self.name = ""

    def answer(self) -> tuple[int, socket.socket]:
        """Wait for someone; return its rank and the line to it."""
        line, _ = self._socket.accept()
        line.setblocking(True)
        (rank,) = NUMBER.unpack(line.recv(NUMBER.size, socket.MSG_WAITALL))
        return rank, line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._folder.cleanup()


def _can_share() -> bool:
    """Whether this system has memory without a name, and lets a process hand it on."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "send_fds"):
        return False
    with suppress(OSError):
        os.close(os.memfd_create("optpipe"))
        return True
    return False


def _gathered(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    found = [mine] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _call(name: str, rank: int) -> socket.socket | None:
    """Return a line to who has opened the door of that name; None where there is none on this host."""
    if not name:
        return None
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(name)
        line.sendall(NUMBER.pack(rank))
    except OSError:
        line.close()
        return None
    return line


def _channel(peer: int, line: socket.socket, number: int, *, is_lower: bool) -> Channel:
    memory = mmap.mmap(number, 0)
    os.close(number)
    return Channel(peer, line, memory, is_lower=is_lower)
