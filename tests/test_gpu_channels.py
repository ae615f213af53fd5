"""Channels between GPUs, as far as a CPU shows them: who meets whom in which order, and whose memory is sent."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from instances import quick, uniform  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from optpipe_compiler.errors import BadInput  # noqa: E402
from runtime_torch import gpu_channels  # noqa: E402
from runtime_torch.gpu_channels import CONNECTIONS, GpuChannels, pairs_of, rounds, unrecorded  # noqa: E402

DEVICES = 4
FLOATS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]


class Group:
    """Says what is sent and received over it; `bound` is the GPU that it was made for, if it was made eagerly."""

    def __init__(self, log, bound=None, name="group"):
        self.log, self.bound_device_id, self.name = log, bound, name

    def send(self, tensors, peer, tag):
        self.log.append((self.name, "send", peer))
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors, peer, tag):
        self.log.append((self.name, "recv", peer))
        return SimpleNamespace(wait=lambda: None)


class Distributed:
    """torch.distributed of one rank, which may split its group."""

    def __init__(self, rank, log):
        self.rank, self.log, self.splits = rank, log, []
        self.group = SimpleNamespace(WORLD=None)

    def get_rank(self, group):
        return self.rank

    def split_group(self, group, ranks, *, group_desc):
        self.splits.append(ranks)
        mine = [one for one in ranks if self.rank in one]
        return Group(self.log, group.bound_device_id, f"pair {mine[0]}") if mine else None


@pytest.fixture(scope="module")
def ring():
    """A plan for a ring of devices: each has messages with the next one, and the last with the first."""
    plan = quick(uniform(DEVICES, 2), 10**12, placement="loop", stages_per_device=2).schedule
    assert pairs_of(plan) == {(0, 1), (1, 2), (2, 3), (0, 3)}
    return plan


@pytest.fixture
def met(ring, monkeypatch):
    """Returns what each rank does to meet the others, and its channels."""

    def meet(bound=None, schedules=None):
        found = []
        for rank in range(DEVICES):
            log = []
            one = Distributed(rank, log)
            monkeypatch.setattr(gpu_channels, "dist", one)
            channels = GpuChannels(Group(log, bound), torch.device("cpu"))
            for schedule in schedules or [ring]:
                channels.meet(schedule)
            found.append((one, channels))
        return found

    return meet


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1])))
def test_rounds_have_every_pair_once_and_no_device_twice(pairs):
    found = rounds(pairs)
    assert sorted(itertools.chain(*found)) == sorted(pairs)
    assert all(len(set(itertools.chain(*one))) == 2 * len(one) for one in found)
    assert rounds(sorted(pairs, reverse=True)) == found


def test_ranks_of_a_lazy_group_meet_once_in_an_order_that_cannot_stand_still(met):
    left = [[(what, peer) for _, what, peer in one.log] for one, _ in met()]
    assert [len(one) for one in left] == [2] * DEVICES
    while any(left):
        together = [
            (rank, peer)
            for rank, mine in enumerate(left)
            for what, peer in mine[:1]
            if what == "send" and left[peer][:1] == [("recv", rank)]
        ]
        assert together
        for rank in itertools.chain(*together):
            left[rank].pop(0)


def test_an_eager_group_is_split_into_pairs_by_all_ranks_alike(met):
    ranks = met(bound="gpu")
    assert ranks[0][0].splits == [[[0, 1], [2, 3]], [[0, 3], [1, 2]]]
    assert all(one.splits == ranks[0][0].splits for one, _ in ranks)
    assert not any(one.log for one, _ in ranks)


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ("gpu", [("pair [0, 3]", "send", 0), ("pair [2, 3]", "recv", 0)]),
        (None, [("group", "send", 0), ("group", "recv", 2)]),
    ],
    ids=["eager", "lazy"],
)
def test_a_message_goes_over_the_channel_of_its_pair(met, monkeypatch, bound, expected):
    one, channels = met(bound)[3]
    monkeypatch.setattr(gpu_channels, "_OnStream", lambda work, stream: work)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    one.log.clear()
    channels.post(torch.zeros(3), 0, sent=True)
    channels.post(torch.zeros(3), 2, sent=False)
    assert one.log == expected


def test_another_schedule_makes_only_the_channels_that_are_missing(met, ring):
    line = quick(uniform(DEVICES, 2), 10**12, placement="linear").schedule
    (first, _), *_ = met("gpu", [line, ring, line])
    assert first.splits == [[[0, 1], [2, 3]], [[1, 2]], [[0, 3]]]


def test_a_group_that_cannot_be_split_is_refused(monkeypatch, ring):
    def split_group(*arguments, **options):
        raise RuntimeError("No device associated with the default pg")

    monkeypatch.setattr(gpu_channels, "dist", SimpleNamespace(get_rank=lambda group: 0, split_group=split_group))
    with pytest.raises(BadInput, match=r"cannot be split into pairs of devices \(No device associated"):
        GpuChannels(Group([], "gpu"), torch.device("cpu")).meet(ring)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "TORCH_NCCL_BLOCKING_WAIT is set, expected not"),
        (CONNECTIONS, "1", f"{CONNECTIONS} is 1, expected 32, and no less than 8"),
    ],
)
def test_settings_that_make_messages_wait_for_each_other_are_refused(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=said):
        GpuChannels(Group([]), torch.device("cpu"))


def test_a_single_element_is_sent_whatever_its_stride():
    buffer = torch.arange(10.0)[5:].as_strided((1, 1), (7, 3))
    assert unrecorded(buffer).view(torch.float32).tolist() == [5.0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_sent_is_the_memory_of_the_buffer_and_keeps_it(shape, dtype):
    buffer = torch.ones(shape).to(dtype)
    storage = StorageWeakRef(buffer.untyped_storage())
    sent = unrecorded(buffer)
    assert sent.nbytes == buffer.nbytes
    assert sent.data_ptr() == buffer.data_ptr()
    sent.zero_()
    assert not buffer.float().any()
    del buffer
    assert not storage.expired()
    del sent
    assert storage.expired()
