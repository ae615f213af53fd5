"""Point-to-point messages of one device: issued in the order of the schedule, kept until they are delivered."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from runtime_torch.peers import Arrival, Peers

if TYPE_CHECKING:
    from torch import Tensor

    from runtime_torch.meter import Meter

    Work = dist.Work | Arrival


class _Message:
    """One half of a message and its buffer."""

    def __init__(self, tensor: Tensor, work: Work, *, sent: bool) -> None:
        self.tensor: Tensor | None = tensor
        self.work = work
        self.sent = sent
        self.lock = threading.Lock()
        self.done = False


class Mailbox:
    """Sends and receives over `group`, whose ranks are the schedule's devices; or to and from emulated peers.

    A send's buffer has one hold in the meter when it comes here; it is released when the delivery is waited for.
    A receive's buffer stays the receiver's.
    """

    def __init__(self, group: dist.ProcessGroup | Peers | None, meter: Meter) -> None:
        self._group = group
        self._meter = meter
        self._messages: dict[str, _Message] = {}

    def send(self, op_id: str, tensor: Tensor, peer: int) -> None:
        """Issue a send of `tensor` (contiguous) to device `peer`."""
        if isinstance(self._group, Peers):
            work: Work | None = self._group.isend(op_id, tensor)
        else:
            work = dist.isend(tensor, group=self._group, group_dst=peer)
        assert work is not None
        self._messages[op_id] = _Message(tensor, work, sent=True)

    def recv(self, op_id: str, buffer: Tensor, peer: int) -> None:
        """Issue a receive into `buffer` from device `peer`."""
        if isinstance(self._group, Peers):
            work: Work | None = self._group.irecv(op_id, buffer)
        else:
            work = dist.irecv(buffer, group=self._group, group_src=peer)
        assert work is not None
        self._messages[op_id] = _Message(buffer, work, sent=False)

    def wait(self, op_id: str) -> None:
        """Return once the message is delivered; a sent buffer is then free. May be called from any thread.

        On CUDA the current stream waits for a receive; for a send the host waits, because its memory is counted on.
        """
        message = self._messages[op_id]
        with message.lock:
            if message.tensor is None or (message.done and not message.tensor.is_cuda):
                return
            message.work.wait()
            message.done = True
            if message.sent:
                while message.tensor.is_cuda and not message.work.is_completed():
                    time.sleep(1e-5)
                self._meter.release(message.tensor.untyped_storage())
                message.tensor = None

    def drain(self) -> None:
        """Wait for everything that was issued, and forget it."""
        for op_id in list(self._messages):
            self.wait(op_id)
        self._messages.clear()
