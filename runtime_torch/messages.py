"""Point-to-point messages of one device: issued in the order of the schedule, kept until they are delivered."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from optpipe_compiler.errors import RunFailed, first_line
from runtime_torch import engine
from runtime_torch.delivery import Delivery

if TYPE_CHECKING:
    from torch import Tensor

    from runtime_torch.gpu_channels import GpuChannels
    from runtime_torch.meter import Meter
    from runtime_torch.shared import Channels


Issued = dist.Work | Delivery


class _Message:
    """One half of a message and its buffer; on CUDA also the stream whose allocator the buffer goes back to."""

    def __init__(self, tensor: Tensor, work: Issued, peer: int, *, sent: bool) -> None:
        self.peer = peer
        is_copied = isinstance(work, Delivery) and work.is_delivered()
        self.changes = engine.changes(tensor) if sent and not is_copied else None
        """How often what is sent had been changed in place; None: it may be."""
        self.tensor: Tensor | None = tensor
        self.work: Issued | None = work
        self.sent = sent
        self.stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        self.lock = threading.Lock()


class Mailbox:
    """Sends and receives through `channels` where there are any to the peer, else over `group`; ranks are devices.

    A send's buffer has one hold in the meter when it comes here; it is released when the delivery is waited for.
    A receive's buffer is the receiver's. Neither is held here any longer than that.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, meter: Meter, channels: Channels | GpuChannels | None = None
    ) -> None:
        self._given = group
        self._channels = channels
        self._meter = meter
        self._messages: dict[str, _Message] = {}

    def begin(self) -> None:
        """A step begins now."""

    def send(self, op_id: str, tensor: Tensor, peer: int) -> None:
        """Issue a send of `tensor` (contiguous) to device `peer`."""
        self._issue(op_id, tensor, peer, sent=True)

    def recv(self, op_id: str, buffer: Tensor, peer: int) -> None:
        """Issue a receive into `buffer` from device `peer`."""
        self._issue(op_id, buffer, peer, sent=False)

    def _issue(self, op_id: str, tensor: Tensor, peer: int, *, sent: bool) -> None:
        self._messages[op_id] = _Message(tensor, self.post(op_id, tensor, peer, sent=sent), peer, sent=sent)

    def post(self, op_id: str, tensor: Tensor, peer: int, *, sent: bool) -> Issued:
        """Put half a message on its way; what carries messages in place of a group does it otherwise."""
        if self._channels is not None and (half := self._channels.post(tensor, peer, sent=sent)) is not None:
            return half
        # the default group is not kept: it could not end before Python does, whose end its threads may then abort
        group = dist.group.WORLD if self._given is None else self._given
        assert group is not None
        return (group.send if sent else group.recv)([tensor], peer, 0)

    def wait(self, op_id: str) -> None:
        """Return once the message is delivered; a sent buffer is then free. May be called from any thread.

        On CUDA it is the current stream that waits, not the host; and for a sent buffer the stream that it came from,
        so that what takes its memory next runs after the delivery. Raises RuntimeError, which names the message and the
        rank, where the wait timed out or the rank has gone.
        """
        message = self._messages[op_id]
        if message.work is None:
            return
        with message.lock:
            if message.work is None:
                return
            try:
                message.work.wait()
            except RuntimeError as error:
                way = f"{op_id} {'to' if message.sent else 'from'} rank {message.peer}"
                raise RuntimeError(f"{way}: {first_line(error)}") from None
            if message.tensor is not None and message.sent:
                if message.stream is not None:
                    with torch.cuda.stream(message.stream):
                        message.work.wait()
                if message.changes not in (None, engine.changes(message.tensor)):
                    raise RunFailed(
                        f"{op_id} to rank {message.peer}: what is sent was changed in place before it was delivered, "
                        "expected a new tensor from each forward and backward of a layer"
                    )
                self._meter.release(message.tensor.untyped_storage())
            message.tensor = None
            if message.stream is None:
                message.work = None

    def is_delivered(self, op_id: str) -> bool:
        """Whether the buffer of a sent message can be freed without any waiting; True of what was received."""
        message = self._messages[op_id]
        if message.tensor is None or not message.sent or message.work is None:
            return True
        return isinstance(message.work, Delivery) and message.work.is_delivered()

    def drain(self) -> None:
        """Wait for everything that was issued, and forget it."""
        for op_id in list(self._messages):
            self.wait(op_id)
        self._messages.clear()
