"""Point-to-point messages of one device: issued in the order of the schedule, kept until they are delivered."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from runtime_torch.peers import Arrival, Peers

if TYPE_CHECKING:
    from torch import Tensor

    from runtime_torch.meter import Meter

    Work = dist.Work | Arrival


class _Message:
    """One half of a message and its buffer; on CUDA also the stream whose allocator the buffer goes back to."""

    def __init__(self, tensor: Tensor, work: Work, *, sent: bool) -> None:
        self.tensor: Tensor | None = tensor
        self.work = work
        self.sent = sent
        self.stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        self.lock = threading.Lock()
        self.done = False


class Mailbox:
    """Sends and receives over `group`, whose ranks are the schedule's devices; or to and from emulated peers.

    A send's buffer has one hold in the meter when it comes here; it is released when the delivery is waited for.
    A receive's buffer stays the receiver's.
    """

    def __init__(self, group: dist.ProcessGroup | Peers | None, meter: Meter) -> None:
        self._group = dist.group.WORLD if group is None else group
        self._meter = meter
        self._messages: dict[str, _Message] = {}

    def send(self, op_id: str, tensor: Tensor, peer: int) -> None:
        """Issue a send of `tensor` (contiguous) to device `peer`."""
        if isinstance(self._group, Peers):
            work: Work = self._group.isend(op_id, tensor)
        else:
            assert self._group is not None
            work = self._group.send([tensor], peer, 0)
        self._messages[op_id] = _Message(tensor, work, sent=True)

    def recv(self, op_id: str, buffer: Tensor, peer: int) -> None:
        """Issue a receive into `buffer` from device `peer`."""
        if isinstance(self._group, Peers):
            work: Work = self._group.irecv(op_id, buffer)
        else:
            assert self._group is not None
            work = self._group.recv([buffer], peer, 0)
        self._messages[op_id] = _Message(buffer, work, sent=False)

    def wait(self, op_id: str) -> None:
        """Return once the message is delivered; a sent buffer is then free. May be called from any thread.

        On CUDA it is the current stream that waits, not the host; and for a sent buffer the stream that it came from,
        so that what takes its memory next runs after the delivery.
        """
        message = self._messages[op_id]
        if message.done and message.stream is None:
            return
        with message.lock:
            if message.done and message.stream is None:
                return
            message.work.wait()
            if message.tensor is not None and message.sent:
                if message.stream is not None:
                    with torch.cuda.stream(message.stream):
                        message.work.wait()
                self._meter.release(message.tensor.untyped_storage())
                message.tensor = None
            message.done = True

    def drain(self) -> None:
        """Wait for everything that was issued, and forget it."""
        for op_id in list(self._messages):
            self.wait(op_id)
        self._messages.clear()
