"""Lanes on streams: order and waits of the schedule, memory given back when it is safe, and no earlier."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest
from msgspec import structs

torch = pytest.importorskip("torch")
from clocked_streams import ClockedLanes, ClockedPlan, pretend  # noqa: E402
from instances import quick, uniform  # noqa: E402
from runtime_cases import MODEL, TEXT, promise_exactly, schedule  # noqa: E402
from small_schedules import Shape  # noqa: E402
from stream_device import LateDevice, PoisoningMeter  # noqa: E402
from timed_streams import step_ns  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from optpipe_compiler.documents import ir  # noqa: E402
from optpipe_compiler.errors import RunFailed  # noqa: E402
from optpipe_torch.models import known as models  # noqa: E402
from runtime_torch import engine, replay  # noqa: E402
from runtime_torch.execution import StageExecution  # noqa: E402
from runtime_torch.lanes import LaneOps  # noqa: E402
from runtime_torch.messages import Mailbox  # noqa: E402
from runtime_torch.meter import Meter  # noqa: E402
from runtime_torch.pinned import PinnedPool  # noqa: E402
from runtime_torch.replay import Replay  # noqa: E402
from runtime_torch.streams import StreamCarrier, StreamLanes  # noqa: E402


def pageable(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


# -- real stages, streams that run as late as they may


def some_ranges(seed):
    """Per stage and microbatch: layers kept, offloaded together or one by one, or recomputed, by chance."""
    rng = Random(seed)

    def ranges(stage, microbatch):
        first = 2 * stage
        return rng.choice(
            [
                [],
                [("offload", first, first + 1)],
                [("offload", first, first + 2)],
                [("offload", first, first + 1), ("offload", first + 1, first + 2)],
                [("offload", first, first + 1), ("recompute", first + 1, first + 2)],
            ]
        )

    return ranges


def one_device(seed, *, split):
    shape = Shape(
        (0, 0, 0), microbatches=5, fused=lambda s, m: not split, ranges=some_ranges(seed), extra_waits=seed % 3
    )
    return promise_exactly(schedule(shape, seed))


def steps(plan, meter, host_meter, backend, count=2):
    """Run the plan on one device, without an engine; return the gradients after each step."""
    model = plan.model
    stages = {
        stage.stage: StageExecution(
            models.build(model, range(*stage.layers)),
            stage.layers[0],
            is_first=stage.stage == 0,
            is_last=stage.stage == len(plan.stages) - 1,
            device="cpu",
            meter=meter,
            host_meter=host_meter,
        )
        for stage in plan.stages
    }
    boundaries = [models.bundles(model)[stage.layers[1]].boundary for stage in plan.stages]
    replay = Replay(
        plan,
        0,
        stages,
        lambda stage, _: boundaries[stage],
        Mailbox(None, meter),
        backend=backend,
    )
    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        inputs, targets = models.batch(model, TEXT.read_bytes(), generator, plan.setup.microbatches)
        cut = [[part.clone() for part in batch.tensor_split(plan.setup.microbatches)] for batch in (inputs, targets)]
        if isinstance(meter, PoisoningMeter):
            meter.spared = {part.data_ptr() for parts in cut for part in parts}
        replay.step(cut[0], cut[1])
        found.append(
            [p.grad.clone() for stage in stages.values() for layer in stage.layers for p in layer.parameters()]
        )
    return found


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("eager", [None, "d2h", "h2d"])
@pytest.mark.parametrize("seed", range(4))
def test_streams_at_any_pace_and_poisoned_memory_give_the_gradients_of_threads(seed, split, eager):
    plan = one_device(seed, split=split)
    meter, host, device = PoisoningMeter(), Meter(), LateDevice(eager)
    expected = steps(plan, Meter(), Meter(), None)
    for mine, theirs in zip(steps(plan, meter, host, device), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    promised = plan.devices[0].peak_bytes - plan.setup.reserve_bytes - sum(s.static_bytes for s in plan.stages)
    assert 0.9 * promised <= meter.peak_bytes <= promised
    assert 0 < host.peak_bytes <= plan.devices[0].host_bytes
    assert (meter.current_bytes, host.current_bytes) == (0, 0)
    assert any(kind == "copy" for kind, *_ in device.log)


@pytest.mark.parametrize("eager", [None, "d2h", "h2d"])
def test_the_promise_holds_where_torch_does_not_say_who_else_holds_a_storage(monkeypatch, eager):
    monkeypatch.setattr(engine, "_use_count", None)
    test_streams_at_any_pace_and_poisoned_memory_give_the_gradients_of_threads(0, True, eager)


def test_a_replay_that_is_closed_holds_no_host_memory():
    slabs = []

    def allocate(nbytes):
        slabs.append(pageable(nbytes))
        return slabs[-1]

    pool = PinnedPool(100, allocate)
    copy = pool.take(60)
    pool.give(copy)
    del copy
    storage = StorageWeakRef(slabs.pop().untyped_storage())
    assert not storage.expired()
    pool.close()
    assert storage.expired()
    with pytest.raises(RunFailed, match="only 0 are free"):
        pool.take(1)


def test_a_device_without_transfers_has_no_events():
    plan = schedule(Shape((0, 0), microbatches=2))
    device = LateDevice()
    steps(plan, Meter(), Meter(), device)
    assert device.log == []
    assert plan.model is not None
    assert plan.model.builder == MODEL.builder


# -- the calls, one by one


class Lanes:
    """Stream lanes over named ops; a transfer copies storages of the given sizes."""

    def __init__(self, waits, *, sizes=None, host_bytes=1000, messages=None, due=None):
        self.device, self.meter, self.host = LateDevice(), Meter(), Meter()
        self.sizes = sizes or {}
        self.host_copies = {}
        names = [name for name in waits]
        self.delivered = []
        self.arrived = {name for name in names if name[0] in "sr"}
        pool = PinnedPool(host_bytes, pageable)
        self.carrier = StreamCarrier(self.device, pool, self.meter, self.host)
        work = LaneOps(
            *([Named(name) for name in names if name[0] in kinds] for kinds in ("Fsr", "D", "H")),
            waits,
            {name: (messages or {}).get(name, []) for name in names},
            self.delivered.append,
            self.arrived.__contains__,
            self.transfer,
            lambda op: [copy.nbytes for copy in self.host_copies[op.id[1:]]],
            due or {},
        )
        self.lanes = StreamLanes(work, self.device, self.carrier)

    def transfer(self, op):
        if op.id[0] == "D":
            storages = [pageable(size).untyped_storage() for size in self.sizes.get(op.id, [8])]
            for storage in storages:
                self.meter.hold(storage)
            self.host_copies[op.id[1:]] = self.carrier.take(storages)
        else:
            self.carrier.bring(self.host_copies.pop(op.id[1:]))

    def run(self, *names):
        """Run ops of the compute lane; return what was called."""
        self.device.log.clear()
        for name in names:
            self.lanes.start(name)
            self.lanes.complete(name)
        return list(self.device.log)


class Named:
    def __init__(self, name):
        self.id = name


ONE = {"F0": [], "F1": [], "F2": ["H0"], "D0": ["F0"], "H0": ["F1", "D0"]}


def test_a_reload_takes_over_only_what_nobody_else_held():
    """A layer may save its own output, which still waits to be sent, or a mask that it keeps for later."""
    for held in (False, True):
        device = LateDevice("d2h")
        meter, caught_up = Meter(), []
        carrier = StreamCarrier(device, PinnedPool(100, pageable), meter, Meter())
        output, other = pageable(8), pageable(8)
        address = output.data_ptr()
        storages = [other.untyped_storage(), output.untyped_storage()]
        for storage in storages:
            meter.hold(storage)
        kept = output if held else None
        del output, other, storage
        host_copies = []
        with device.on(device.new_stream()):
            for op in range(2):
                carrier.enter(op, 0, device.compute, caught_up.append, lambda: None)
                host_copies += carrier.take([storages.pop(0)])
            carrier.settle(1, 0)
            carrier.enter(0, 2, device.compute, caught_up.append, lambda: None)
            (there,) = carrier.bring(host_copies[:1])
        assert (there.data_ptr() == address) == (not held)
        assert caught_up == ([2] if held else [])
        del kept


def test_a_reload_takes_over_from_the_latest_offload_as_the_compute_stream_counts_on_the_earlier_ones():
    """F2 waits for D0 alone, and gets its memory, whatever H0 was handed when it was issued after D1."""
    lanes = Lanes({"F0": [], "F1": [], "F2": ["D0"], "F3": ["H0"], "D0": ["F0"], "D1": ["F0"], "H0": ["D1"]})
    lanes.lanes.begin()
    lanes.run("F0", "F1")
    assert lanes.meter.current_bytes == 16
    lanes.run("F2")
    assert lanes.meter.current_bytes == 8


def test_a_transfer_that_counts_on_a_sent_messages_memory_is_issued_when_it_was_delivered_or_is_waited_for():
    """Else the compute stream, whose memory it is, would wait for the message at once: the schedule does not say so."""
    waits = {"F0": [], "s0": [], "F1": [], "F2": ["H0"], "D0": ["F0"], "H0": ["D0", "s0"]}
    for early in (True, False):
        lanes = Lanes(waits, messages={"H0": ["s0"]})
        lanes.arrived.clear()
        lanes.lanes.begin()
        lanes.run("F0", "s0")
        assert lanes.delivered == []
        if early:
            lanes.arrived.add("s0")
        lanes.run("F1")
        assert lanes.delivered == (["s0"] if early else [])
        lanes.run("F2")
        assert lanes.delivered == ["s0"]


def test_events_are_recorded_and_waited_for_where_the_schedule_waits_and_nowhere_else():
    lanes = Lanes(ONE)
    lanes.lanes.begin()
    assert lanes.run("F0") == [("record", "compute"), ("wait", "d2h", "compute"), ("copy", "d2h", 8), ("record", "d2h")]
    assert lanes.run("F1") == [
        ("record", "compute"),
        ("wait", "h2d", "compute"),
        ("wait", "h2d", "d2h"),
        ("copy", "h2d", 8),
        ("record", "h2d"),
    ]
    assert lanes.run("F2") == [("wait", "compute", "h2d")]


def test_a_wait_that_an_earlier_one_implies_is_no_event():
    lanes = Lanes({"F0": [], "F1": ["D0"], "F2": ["D0", "H0"], "F3": ["D0"], "D0": ["F0"], "H0": ["D0", "F0"]})
    lanes.lanes.begin()
    assert [call for call in lanes.run("F0") if call[0] == "wait"] == [
        ("wait", "d2h", "compute"),
        ("wait", "h2d", "d2h"),
    ]
    assert lanes.run("F1") == [("wait", "compute", "d2h")]
    assert lanes.run("F2") == [("wait", "compute", "h2d")]
    assert lanes.run("F3") == []


def test_what_an_offload_read_is_free_when_the_compute_stream_is_ordered_after_it():
    lanes = Lanes({"F0": [], "F1": [], "F2": ["D0"], "D0": ["F0"]})
    lanes.lanes.begin()
    lanes.run("F0")
    assert (lanes.meter.current_bytes, lanes.host.current_bytes) == (8, 8)
    lanes.run("F1")
    assert lanes.meter.current_bytes == 8
    lanes.run("F2")
    assert lanes.meter.current_bytes == 0


def test_a_reload_gets_memory_that_only_its_own_stream_knows_to_be_free():
    lanes = Lanes({"F0": [], "F1": ["H0"], "D0": ["F0"], "D1": ["F0"], "H0": ["D1"]})
    lanes.lanes.begin()
    calls = lanes.run("F0")
    assert not any(kind == "empty" for kind, *_ in calls)
    assert lanes.meter.peak_bytes == 16
    assert lanes.meter.current_bytes == 16  # two storages: what D0 or D1 left is H0's, the other is not yet known free


def test_where_no_storage_fits_the_compute_stream_waits_for_the_offloads_before_it_allocates():
    lanes = Lanes({"F0": [], "D0": ["F0"], "D1": ["F0"], "H0": ["D1"]}, sizes={"D0": [6], "D1": [2, 2]})
    lanes.lanes.begin()
    del lanes.host_copies
    lanes.host_copies = Fixed({"0": [5]}, lanes)
    calls = lanes.run("F0")
    assert calls[-3:-1] == [("wait", "compute", "d2h"), ("empty", 5)]
    assert lanes.meter.current_bytes == 5


def test_a_reload_that_no_storage_fits_is_issued_when_the_offloads_are_forecast_to_be_over():
    """Else F1 would wait for D1; and what F1 frees is not the reload's before F1 is over."""
    waits = {"F0": [], "F1": [], "F2": [], "F3": ["H0"], "D0": ["F0"], "D1": ["F0"], "H0": ["D1"]}
    lanes = Lanes(waits, sizes={"D0": [6], "D1": [2, 2]}, due={"H0": 2})
    lanes.host_copies = Fixed({"0": [5]}, lanes)
    lanes.lanes.begin()
    lanes.run("F0")
    assert lanes.run("F1") == [
        ("wait", "h2d", "d2h"),
        ("wait", "compute", "d2h"),
        ("record", "compute"),
        ("wait", "h2d", "compute"),
        ("empty", 5),
        ("copy", "h2d", 5),
        ("record", "h2d"),
    ]
    assert lanes.run("F2") == []


def test_a_reload_that_is_early_is_issued_where_it_is_waited_for():
    waits = {"F0": [], "F1": ["H0"], "D0": ["F0"], "D1": ["F0"], "H0": ["D1"]}
    lanes = Lanes(waits, sizes={"D0": [6], "D1": [2, 2]}, due={"H0": 2})
    lanes.host_copies = Fixed({"0": [5]}, lanes)
    lanes.lanes.begin()
    assert ("empty", 5) not in lanes.run("F0")
    assert ("empty", 5) in lanes.run("F1")


def test_a_reload_that_is_handed_all_of_its_memory_is_never_early():
    waits = {"F0": [], "F1": [], "F2": ["H0"], "D0": ["F0"], "D1": ["F0"], "H0": ["D1"]}
    lanes = Lanes(waits, sizes={"D0": [6], "D1": [6]}, due={"H0": 2})
    lanes.lanes.begin()
    assert ("copy", "h2d", 6) in lanes.run("F0")


def test_a_reload_after_a_late_message_allocates_nothing_that_a_running_op_may_have_freed():
    waits = {"F0": [], "s0": [], "F1": [], "F2": ["H0"], "D0": ["F0"], "H0": ["D0", "s0"]}
    lanes = Lanes(waits, messages={"H0": ["s0"]}, sizes={"D0": [6]})
    lanes.arrived.clear()
    lanes.lanes.begin()
    lanes.run("F0", "s0")
    lanes.carrier.settle(1, 0)  # what the offload read is free
    lanes.arrived.add("s0")
    calls = lanes.run("F1")
    assert calls.index(("wait", "h2d", "compute")) < calls.index(("empty", 6))


# -- races: with vector clocks, memory being given out again at once


def test_a_reload_that_was_put_off_writes_nothing_that_an_offload_still_reads(monkeypatch):
    """A receive has the compute stream wait for an offload, which frees what that read; the reload comes behind it."""
    waits = {
        **{"F0": [], "F1": [], "send0": [], "recv0": ["D1"], "F2": ["H0"]},
        **{"D0": ["F0"], "D1": ["F1"], "H0": ["D0", "send0"]},
    }
    one = ClockedLanes(monkeypatch, waits, {"H0": ["send0"]}, late=["send0"])
    one.run("F0", lambda: one.save("D0"))
    sent = []
    one.run("F1", lambda: (one.save("D1"), sent.append(one.new())))
    one.run("send0", lambda: one.send("send0", sent[0]))
    one.run("recv0", lambda: (one.new(), one.arrived.add("send0")))
    one.run("F2")
    one.lanes.finish()
    assert one.device.races == []


def test_a_reload_writes_nothing_that_is_still_being_sent(monkeypatch):
    """An offload waits for a message, whose buffer is free then, and a reload behind it allocates."""
    waits = {
        **{"F0": [], "F1": [], "send0": [], "F2": [], "F3": ["H0"]},
        **{"D0": ["F0"], "D1": ["F1", "send0"], "H0": ["D0", "F2"]},
    }
    one = ClockedLanes(monkeypatch, waits, {"D1": ["send0"]}, late=["send0"])
    one.run("F0", lambda: setattr(one.save("D0"), "holders", 2))  # so that the reload allocates
    sent = []
    one.run("F1", lambda: (one.save("D1"), sent.append(one.new())))
    one.run("send0", lambda: one.send("send0", sent[0]))
    one.run("F2", lambda: one.arrived.add("send0"))
    one.run("F3")
    one.lanes.finish()
    assert one.device.races == []


@pytest.mark.parametrize("late", [[], ["send0"]])
def test_what_is_offloaded_late_is_not_handed_on_while_a_later_op_reads_it(monkeypatch, late):
    """The offload of what the next stage on the device reads, too, comes behind one that waits for a reload."""
    waits = {
        **{"F0": [], "F1": [], "send0": [], "F2": [], "F3": [], "F4": ["H1"]},
        **{"D0": ["F0"], "D1": ["F1", "H0"], "D2": ["F2"], "H0": ["D0", "send0"], "H1": ["D1"], "H2": ["D2"]},
    }
    one = ClockedLanes(monkeypatch, waits, {"H0": ["send0"]}, late)
    one.run("F0", lambda: one.save("D0"))
    found = []
    one.run("F1", lambda: (one.save("D1"), found.append(one.new())))
    one.run("send0", lambda: one.send("send0", found[0]))

    def both_save():
        found.append(one.save("D2"))
        found[1].holders = 2
        one.meter.hold(found[1])

    def read():
        one.use(found[1])
        found[1].holders -= 1
        one.meter.release(found[1])

    one.run("F2", both_save)
    one.arrived.add("send0")
    one.run("F3", read)
    one.run("F4")
    one.lanes.finish()
    assert one.device.races == []


@pytest.mark.parametrize(("placement", "cap_gb"), [("loop", 2.0), ("v", 2.5)])
def test_no_plan_lets_two_streams_use_memory_that_nothing_orders(monkeypatch, placement, cap_gb):
    """Messages as large as half an activation; each in 72 runs had a race in two where reloads followed the last op
    alone."""
    pretend(monkeypatch)
    layers = [structs.replace(layer, output_bytes=2 * 10**8) for layer in uniform(3, 4).layers]
    profile = structs.replace(uniform(3, 4), layers=layers)
    options = {"microbatches": 8, "time_limit_s": 0.5, "search": True, "recompute": False, "placement": placement}
    plan = quick(profile, int(cap_gb * 10**9), **options).schedule
    offloading = [device.device for device in plan.devices if device.d2h]
    assert len(offloading) == 3
    for device, seed in itertools.product(offloading, range(24)):
        one = ClockedPlan(plan, device, seed, lag=(0, 2, 5, 20)[seed % 4], is_timed=seed % 2 == 0)
        assert one.races() == []


def test_what_another_holds_without_a_tensor_is_not_handed_on():
    """Of two stages that save one storage, one may have taken its tensors off: torch then counts one object."""
    device, meter = LateDevice("d2h"), Meter()
    carrier = StreamCarrier(device, PinnedPool(100, pageable), meter, Meter())
    storage = pageable(8).untyped_storage()
    address = storage.data_ptr()
    meter.hold(storage)
    meter.hold(storage)
    with device.on(device.new_stream()):
        carrier.enter(0, 0, device.compute, lambda _: None, lambda: None)
        storages = [storage]
        del storage
        copies = carrier.take(storages)
        carrier.enter(0, 1, device.compute, lambda _: None, lambda: None)
        (there,) = carrier.bring(copies)
    assert there.data_ptr() != address


HALVES = Path(__file__).parent / "h100_halves.json"
"""A plan for halves of a Llama's decoder layers on one H100, with 46 offloads; an attention saves other sizes than a
feed-forward."""


def narrow(plan):
    """Return the plan for a model of a 64th of its width."""
    sizes = {"hidden": 64, "ffn": 172, "heads": 1, "kv_heads": 1, "head_dim": 64, "vocab": 512, "sequence": 64}
    config = plan.model.config | {name: size for name, size in sizes.items() if name in plan.model.config}
    return structs.replace(plan, model=structs.replace(plan.model, config=config, sequence_length=64))


def test_streams_take_no_longer_than_forecast_where_layers_save_different_sizes(monkeypatch):
    plan = ir.load(HALVES)
    small = narrow(plan)
    assert step_ns(monkeypatch, small) <= 1.001 * plan.forecast.makespan_ns
    monkeypatch.setattr(replay, "reloads_due", lambda *_: {})  # as soon as they may: what an H100 took 532 ms for
    assert 1.05 * plan.forecast.makespan_ns < step_ns(monkeypatch, small)


class Fixed(dict):
    """Parcels of another size than what was offloaded."""

    def __init__(self, sizes, lanes):
        super().__init__()
        self.sizes, self.lanes = sizes, lanes

    def __getitem__(self, name):
        return [pageable(size) for size in self.sizes[name]]

    def pop(self, name):
        return [self.lanes.carrier._pool.take(size) for size in self.sizes[name]]


def test_host_memory_is_used_again_only_when_the_offloads_stream_knows_the_reload():
    waits = {"F0": [], "F1": [], "D0": ["F0"], "D1": ["F1", "H0"], "H0": ["D0"]}
    lanes = Lanes(waits, host_bytes=8)
    lanes.lanes.begin()
    lanes.run("F0", "F1")
    assert lanes.host.peak_bytes == 8
    lanes = Lanes({**waits, "D1": ["F1"]}, host_bytes=8)
    lanes.lanes.begin()
    lanes.run("F0")
    with pytest.raises(RunFailed, match=r"8 bytes of pinned host memory, but of the 8 bytes .* only 0 are free"):
        lanes.run("F1")


def test_deliveries_are_waited_for_on_the_stream_of_the_op():
    lanes = Lanes({"F0": [], "s0": [], "D0": ["F0", "s0"]}, messages={"D0": ["s0"]})
    lanes.lanes.begin()
    assert lanes.run("F0") == [("record", "compute")]
    assert lanes.delivered == []
    lanes.run("s0")
    assert lanes.delivered == ["s0"]


def test_the_step_ends_after_all_transfers_and_frees_everything():
    lanes = Lanes({"F0": [], "D0": ["F0"], "H0": ["D0"]})
    lanes.lanes.begin()
    lanes.run("F0")
    lanes.device.log.clear()
    lanes.lanes.finish()
    assert [call for call in lanes.device.log if call[0] == "wait"] == [
        ("wait", "compute", "d2h"),
        ("wait", "compute", "h2d"),
    ]
    assert lanes.host.current_bytes == 0


def test_a_transfer_that_was_never_issued_is_reported():
    lanes = Lanes(ONE)
    lanes.lanes.begin()
    with pytest.raises(RunFailed, match="D0 was never issued"):
        lanes.lanes.finish()


# -- pinned memory


def test_the_pool_serves_whatever_fits_in_the_sum_of_its_gaps():
    made = []
    pool = PinnedPool(100, lambda nbytes: made.append(nbytes) or pageable(nbytes))
    host_copies = [pool.take(25) for _ in range(4)]
    pool.give(host_copies[0])
    pool.give(host_copies[2])
    scattered = pool.take(40)
    assert [piece.numel() for piece in scattered.pieces] == [25, 15]
    assert pool.free_bytes == 10
    with pytest.raises(RunFailed, match="only 10 are free"):
        pool.take(11)
    for host_copy in (scattered, host_copies[1], host_copies[3]):
        pool.give(host_copy)
    whole = pool.take(100)
    assert [piece.numel() for piece in whole.pieces] == [100]
    assert made == [100]


@pytest.mark.parametrize("seed", range(5))
def test_pieces_in_use_never_overlap(seed):
    rng, pool, used = Random(seed), PinnedPool(64, pageable), []
    for _ in range(200):
        wanted = rng.randint(1, 20)
        if wanted <= pool.free_bytes:
            used.append(pool.take(wanted))
            assert used[-1].nbytes == wanted
        elif used:
            pool.give(used.pop(rng.randrange(len(used))))
        taken = [i for p in used for s in p.pieces for i in range(s.storage_offset(), s.storage_offset() + s.numel())]
        assert len(taken) == len(set(taken)) == 64 - pool.free_bytes


OFFLOADS = Path(__file__).parent / "h100_offloads.json"
"""A plan for a Llama on four H100, whose first device reloads into memory that its messages leave."""


def test_a_reload_into_a_message_s_memory_starts_when_the_message_is_delivered_however_far_the_host_is(monkeypatch):
    plan = ir.load(OFFLOADS)
    small = narrow(plan)
    forecast_ns = max(timed.end_ns for timed in plan.timed(0))
    assert step_ns(monkeypatch, small) <= 1.001 * forecast_ns
    monkeypatch.setattr(replay, "transfers_begin", lambda *_: {})  # the host goes on: what an H100 took 909 ms for
    assert 1.02 * forecast_ns < step_ns(monkeypatch, small)
