"""Messages keep their buffers alive until they are delivered, and no longer: that is real memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from optpipe_compiler.errors import RunFailed  # noqa: E402
from runtime_torch.messages import Mailbox  # noqa: E402
from runtime_torch.meter import Meter  # noqa: E402


class Work:
    """Holds the tensor, as the works of gloo and NCCL do."""

    def __init__(self, tensors):
        self.tensors = tensors

    def wait(self):
        pass


class Group:
    def send(self, tensors, peer, tag):
        return Work(tensors)

    def recv(self, tensors, peer, tag):
        return Work(tensors)


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_buffer_is_free_once_its_delivery_was_waited_for(kind):
    meter = Meter()
    mailbox = Mailbox(Group(), meter)
    buffer = torch.zeros(100)
    storage = StorageWeakRef(buffer.untyped_storage())
    meter.hold(buffer.untyped_storage())
    getattr(mailbox, kind)("message", buffer, 1)
    if kind == "recv":
        meter.release(buffer.untyped_storage())  # by its reader, who comes after the wait
    del buffer
    assert not storage.expired()
    mailbox.wait("message")
    assert storage.expired()
    assert meter.current_bytes == 0
    mailbox.wait("message")
    mailbox.drain()
    assert meter.current_bytes == 0


def test_what_is_changed_in_place_while_it_is_sent_is_refused():
    mailbox, sent, buffer = Mailbox(Group(), Meter()), torch.zeros(4), torch.zeros(4)
    mailbox.send("send_activation:0:1", sent, 1)
    mailbox.recv("recv_activation:2:1", buffer, 1)
    sent.add_(1)
    buffer.add_(1)
    mailbox.wait("recv_activation:2:1")
    with pytest.raises(RunFailed, match=r"^send_activation:0:1 to rank 1: what is sent was changed in place before it"):
        mailbox.wait("send_activation:0:1")
