"""Messages through shared memory arrive whole and in order, whoever waits for what, or say why they do not."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from test_runtime_library import start_ranks  # noqa: E402

from runtime_torch import engine, shared  # noqa: E402
from runtime_torch.messages import Mailbox  # noqa: E402
from runtime_torch.meter import Meter  # noqa: E402
from runtime_torch.shared import MOST, NUMBER, Channel, Channels  # noqa: E402

RING = 100
"""Bytes of a ring in these tests."""
FEW_S = timedelta(seconds=20)


def two_ends(ring=RING, timeout=FEW_S):
    """Both ends of a channel, in this process."""
    memory, lines = mmap.mmap(-1, 2 * ring), socket.socketpair()
    return [Channels([Channel(1 - rank, lines[rank], memory, is_lower=rank == 0)], timeout) for rank in (0, 1)]


def bytes_of(number, size):
    return torch.full((size,), number % 251, dtype=torch.uint8)


@pytest.mark.parametrize("receive_first", [True, False])
def test_a_message_arrives_whoever_comes_first(receive_first):
    ends = two_ends()
    sent, buffer = torch.arange(5, dtype=torch.float32).reshape(1, 5), torch.zeros(1, 5)
    posts = [partial(ends[0].post, sent, 1, sent=True), partial(ends[1].post, buffer, 0, sent=False)]
    for half in [post() for post in (reversed(posts) if receive_first else posts)]:
        half.wait()
    assert torch.equal(buffer, sent)


def test_a_sent_buffer_is_free_at_once_and_a_received_one_once_it_was_waited_for():
    ends, meters = two_ends(), [Meter(), Meter()]
    boxes = [Mailbox(None, meter, end) for meter, end in zip(meters, ends, strict=True)]
    sent, buffer = torch.ones(4), torch.zeros(4)
    meters[0].hold(sent.untyped_storage())
    boxes[0].send("send", sent, 1)
    assert boxes[0].is_delivered("send")
    sent.zero_()
    boxes[1].recv("recv", buffer, 0)
    boxes[1].wait("recv")
    boxes[0].drain()
    assert torch.equal(buffer, torch.ones(4))
    assert meters[0].current_bytes == 0


def test_no_channel_to_a_rank_or_too_large_a_message_is_left_to_the_group():
    end, _ = two_ends()
    assert end.post(torch.zeros(1), 7, sent=True) is None
    assert end.post(torch.zeros(RING + 1, dtype=torch.uint8), 1, sent=True) is None
    assert end.post(torch.zeros(RING, dtype=torch.uint8), 1, sent=True).is_delivered()
    assert end.post(torch.zeros(4, 4, dtype=torch.uint8)[:, :2], 1, sent=True) is None, "not contiguous"


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.booleans(), st.one_of(st.integers(0, RING), st.integers(0, RING // 8))),
        max_size=60,
    ),
    st.integers(RING // 2, 2 * RING),
)
@settings(deadline=None)
def test_everything_that_both_have_posted_arrives_in_order(acts, ring):
    """Each act is of one end: a send of so many bytes, or the receive that the other end's next send needs."""
    acts = [(end, is_send, min(size, ring)) for end, is_send, size in acts]
    ends, sizes = two_ends(ring), [[], []]
    for end, is_send, size in acts:
        if is_send:
            sizes[end].append(size)
    receives, sends, taken = [[], []], [[], []], [0, 0]
    for end, is_send, _ in acts:
        if is_send:
            number = len(sends[end])
            sends[end].append(ends[end].post(bytes_of(number, sizes[end][number]), 1 - end, sent=True))
        elif taken[end] < len(sizes[1 - end]):
            buffer = torch.full((sizes[1 - end][taken[end]],), 255, dtype=torch.uint8)
            taken[end] += 1
            receives[end].append((ends[end].post(buffer, 1 - end, sent=False), buffer))
    for end in (0, 1):  # what is still missing
        for size in sizes[1 - end][taken[end] :]:
            buffer = torch.full((size,), 255, dtype=torch.uint8)
            receives[end].append((ends[end].post(buffer, 1 - end, sent=False), buffer))
    halves = [*sends[0], *sends[1], *(half for found in receives for half, _ in found)]
    for _ in range(2 * len(halves) + 2):
        if all([half.is_delivered() for half in halves]):
            break
    for half in halves:
        half.wait()
    for found in receives:
        for number, (_, buffer) in enumerate(found):
            assert torch.equal(buffer, bytes_of(number, len(buffer)))


def test_a_full_ring_keeps_messages_with_their_sender_until_there_is_room():
    ends = two_ends()
    first, second = (ends[0].post(bytes_of(n, 60), 1, sent=True) for n in (1, 2))
    assert first.is_delivered()
    assert not second.is_delivered()
    buffers = [torch.zeros(60, dtype=torch.uint8) for _ in range(2)]
    receives = [ends[1].post(buffer, 0, sent=False) for buffer in buffers]
    assert [half.is_delivered() for half in receives] == [True, False]
    second.wait()  # copies it, now that the first one was taken
    receives[1].wait()
    assert [int(buffer[0]) for buffer in buffers] == [1, 2]


def test_more_messages_than_a_socket_is_told_of_wait_for_the_receiver():
    ends = two_ends(ring=1 << 16)
    halves = [ends[0].post(bytes_of(n, 1), 1, sent=True) for n in range(MOST + 3)]
    assert sum(half.is_delivered() for half in halves) == MOST
    buffers = [torch.zeros(1, dtype=torch.uint8) for _ in halves]
    receives = [ends[1].post(buffer, 0, sent=False) for buffer in buffers]
    for half in halves:
        half.wait()
    for half in receives:
        half.wait()
    assert [int(buffer) for buffer in buffers] == list(range(MOST + 3))


def test_threads_wait_for_messages_of_several_ranks_at_one_time():
    """Of three threads one listens; each goes on with its own message, in whatever order they come."""
    memories, lines = ([f() for _ in range(3)] for f in (lambda: mmap.mmap(-1, 2 * RING), socket.socketpair))
    mine = Channels([Channel(n + 1, lines[n][0], memories[n], is_lower=True) for n in range(3)], FEW_S)
    others = [Channels([Channel(0, lines[n][1], memories[n], is_lower=False)], FEW_S) for n in range(3)]
    for _ in range(50):
        buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(3)]
        halves = [mine.post(buffer, n + 1, sent=False) for n, buffer in enumerate(buffers)]
        threads = [threading.Thread(target=half.wait) for half in halves]
        for thread in threads:
            thread.start()
        for n in (2, 0, 1):
            others[n].post(bytes_of(n + 1, 8), 0, sent=True)
            threads[n].join(20)
            assert not threads[n].is_alive()
            assert int(buffers[n][0]) == n + 1


def test_who_only_looks_takes_nothing_from_a_thread_that_sleeps():
    """On one core the sleeper would come too late to see what there was to read, and sleep on."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        ends = two_ends()
        for number in range(100):
            buffer = torch.zeros(8, dtype=torch.uint8)
            half = ends[1].post(buffer, 0, sent=False)
            thread = threading.Thread(target=half.wait)
            thread.start()
            while not ends[1]._has_listener:
                time.sleep(1e-4)
            time.sleep(1e-3)  # now it does sleep
            ends[0].post(bytes_of(number, 8), 1, sent=True)
            ends[1].post(torch.zeros(1), 0, sent=True)
            thread.join(5)
            assert not thread.is_alive()
    finally:
        os.sched_setaffinity(0, cores)


def test_where_the_listener_is_interrupted_another_thread_listens():
    ends = two_ends()
    first, second = (ends[1].post(torch.zeros(4), 0, sent=False) for _ in range(2))
    asleep, interrupted = threading.Event(), threading.Event()
    poll = ends[1]._poll

    class Poll:
        def poll(self, _):
            asleep.set()
            interrupted.wait(20)
            ends[1]._poll = poll
            raise KeyboardInterrupt

    ends[1]._poll = Poll()

    def wait():
        with pytest.raises(KeyboardInterrupt):
            first.wait()

    threads = [threading.Thread(target=wait), threading.Thread(target=second.wait)]
    threads[0].start()
    asleep.wait(20)
    threads[1].start()
    time.sleep(0.1)  # now it waits for the other one
    interrupted.set()
    threads[0].join(20)
    time.sleep(0.1)
    for _ in range(2):
        ends[0].post(torch.ones(4), 1, sent=True)
    threads[1].join(5)
    assert not threads[1].is_alive()


def test_what_is_told_in_pieces_is_put_together():
    memory, (mine, line) = mmap.mmap(-1, 2 * RING), socket.socketpair()
    channels = Channels([Channel(0, mine, memory, is_lower=False)], FEW_S)
    memory[10:14] = bytes([1, 2, 3, 4])
    buffers = torch.zeros(2, 2, dtype=torch.uint8)
    halves = [channels.post(buffer, 0, sent=False) for buffer in buffers]
    told = NUMBER.pack(10) + NUMBER.pack(12)
    for piece in (told[:3], told[3:11], told[11:]):
        assert not halves[1].is_delivered()
        line.sendall(piece)
    for half in halves:
        half.wait()
    assert buffers.tolist() == [[1, 2], [3, 4]]
    line.close()


def test_what_was_sent_before_a_process_went_arrives_and_nothing_else_does():
    ends = two_ends()
    ends[0].post(bytes_of(9, 4), 1, sent=True)
    ends[0].close()
    buffer = torch.zeros(4, dtype=torch.uint8)
    ends[1].post(buffer, 0, sent=False).wait()
    assert int(buffer[0]) == 9
    with pytest.raises(RuntimeError, match="Connection closed by rank 0"):
        ends[1].post(buffer, 0, sent=False).wait()
    assert ends[1].post(buffer, 0, sent=True).is_delivered()  # into the ring: who sends need not learn of it
    assert ends[0].post(buffer, 1, sent=True) is None


def test_one_who_waits_in_vain_says_for_whom_and_lets_others_listen():
    ends = two_ends(timeout=timedelta(seconds=0.2))
    halves = [ends[1].post(torch.zeros(4), 0, sent=False) for _ in range(2)]
    errors = []

    def wait(half):
        with pytest.raises(RuntimeError, match=r"Timed out after 0\.2 s waiting for rank 0") as raised:
            half.wait()
        errors.append(raised)

    threads = [threading.Thread(target=wait, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 2
    ends[0].post(torch.ones(4), 1, sent=True)
    ends[0].post(torch.ones(4), 1, sent=True)
    halves[1].wait()


MEET = """
import sys, tempfile
sys.path[:0] = sys.argv[1:]
import torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from runtime_torch import engine, shared

dist.init_process_group("gloo", timeout=timedelta(seconds=77))
rank = dist.get_rank()
assert engine.timeout_of(None) == timedelta(seconds=77)
if rank == 2:  # as on another host
    shared._call = lambda name, rank: None
before = set(Path(tempfile.gettempdir()).glob("optpipe-*"))
channels = shared.connect({0, 1, 2} - {rank}, 10, None)
dist.barrier()
assert set(Path(tempfile.gettempdir()).glob("optpipe-*")) <= before
if rank == 2:
    assert channels is None
else:
    peer = 1 - rank
    assert channels.post(torch.zeros(1), 2, sent=True) is None
    for step in range(300):
        buffer = torch.zeros(10, dtype=torch.uint8)
        sent = channels.post(torch.full((10,), (step + rank) % 251, dtype=torch.uint8), peer, sent=True)
        received = channels.post(buffer, peer, sent=False)
        received.wait()
        sent.wait()
        assert buffer.tolist() == [(step + peer) % 251] * 10
    if rank == 0:
        channels.close()
    else:
        try:
            channels.post(torch.zeros(1), peer, sent=False).wait()
        except RuntimeError as error:
            print(error)
dist.barrier()
for sharing in (rank != 1, False):  # one rank, or none of them, has memory to share
    shared._can_share = lambda: sharing
    found = shared.connect({0, 1, 2} - {rank}, 10, None)
    assert found is None or sharing
    dist.barrier()
print("met", rank)
"""


@pytest.mark.runtime
def test_ranks_of_one_host_meet_and_the_others_are_left_to_the_group():
    said = [rank.communicate(timeout=300) for rank in start_ranks(MEET, world=3)]
    assert [out for out, _ in said] == ["met 0\n", "Connection closed by rank 0\nmet 1\n", "met 2\n"], said


def test_a_door_whose_name_is_too_long_is_none(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(shared.tempfile, "tempdir", str(folder))
    with shared._Door(FEW_S) as door:
        assert door.name == ""
        assert list(folder.iterdir())
    assert not list(folder.iterdir())
    assert shared._call("", 0) is None
    assert shared._call(str(Path(tmp_path, "nobody")), 0) is None


def test_a_system_without_such_memory_has_no_channels(monkeypatch):
    assert shared._can_share()

    def refuse(_):
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert not shared._can_share()
    monkeypatch.delattr(os, "memfd_create")
    assert not shared._can_share()


def test_without_private_names_a_group_has_no_timeout(monkeypatch):
    monkeypatch.setattr(engine, "_private", lambda *_: None)
    assert engine.timeout_of(object()) is None
