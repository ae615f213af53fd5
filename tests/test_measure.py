"""`optpipe profile`: what it finds agrees with independent counts, and its processes never stay behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import subprocess
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

torch = pytest.importorskip("torch")

from optpipe_compiler.compiler import Options, compile_schedule  # noqa: E402
from optpipe_compiler.costs.models import Architecture  # noqa: E402
from optpipe_compiler.documents.files import canonical  # noqa: E402
from optpipe_compiler.documents.profile import Model, Profile, Quantity, parse, value_of  # noqa: E402
from optpipe_compiler.errors import BadInput, RunFailed  # noqa: E402
from optpipe_torch.emulate.alone import emulate  # noqa: E402
from optpipe_torch.launch import (  # noqa: E402
    job,
    session,
)
from optpipe_torch.launch.run import run  # noqa: E402
from optpipe_torch.models import known as models  # noqa: E402
from optpipe_torch.models import text  # noqa: E402
from optpipe_torch.profiler import layers as measure_layers  # noqa: E402
from optpipe_torch.profiler import records as measure_profile  # noqa: E402
from optpipe_torch.profiler.child import measure_sizes, most_copied  # noqa: E402
from optpipe_torch.profiler.copies import time_copies  # noqa: E402
from optpipe_torch.profiler.measure import MeasureOptions, layout_of, measure, measure_in_group  # noqa: E402
from optpipe_torch.profiler.records import TIMED, Copies, Findings, LayerBytes, Messages, assemble  # noqa: E402
from optpipe_torch.profiler.timer import Timer  # noqa: E402
from tests.interpreter import python  # noqa: E402

TINY = MeasureOptions(devices=2, layers=2, hidden=32, heads=2, sequence_length=16, microbatch_size=2, samples=4)


THREE = replace(TINY, layers=3)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")


@pytest.fixture(scope="module")
def benches() -> measure_layers.Benches:
    return measure_layers.Benches(THREE.model(), text.default_text())


@pytest.fixture(scope="module")
def sizes(benches: measure_layers.Benches) -> dict[str, LayerBytes]:
    return measure_sizes(Timer(), benches, models.layer_names(THREE.model()), 10**9)


def saved_by(layer: Any, *inputs: Any) -> int:
    """Bytes of the distinct storages, parameters apart, that autograd itself keeps for a layer's backward."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    found: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # kept alive: no address twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = layer(*inputs)
    assert kept.requires_grad
    return sum(storage.nbytes() for address, storage in found.items() if address not in weights)


# -- bytes


def test_saved_bytes_agree_with_autograds_own_count(benches, sizes):
    embedding, block, *_, head = models.build(THREE.model())
    x = benches.entering(1).clone().requires_grad_()
    assert sizes["embedding"].saved == saved_by(embedding, benches.inputs.clone())
    assert sizes["block"].saved == saved_by(block, x)
    assert sizes["head"].saved == saved_by(head, x, benches.target.clone())


def test_sizes_that_follow_from_the_shapes(sizes):
    boundary = 2 * 16 * 32 * 4
    tokens = 2 * 16 * 8
    assert [sizes[name].output for name in ("embedding", "block", "head")] == [boundary, boundary, 0]
    assert [sizes[name].checkpoint for name in ("embedding", "block", "head")] == [tokens, boundary, boundary]
    hidden = 32
    assert sizes["head"].static == 4 * 4 * (2 * hidden + 256 * hidden)
    assert sizes["embedding"].static == 4 * 4 * (256 + 16) * hidden


def test_what_stays_for_the_weight_gradient_is_part_of_what_was_saved_and_captured(sizes):
    for layer in sizes.values():
        assert layer.captured <= layer.residue < layer.saved + layer.captured + 1
    block = sizes["block"]
    assert 0 < block.residue - block.captured < block.saved
    # of the four linear layers: output gradients 3 + 1 + 4 + 1 and inputs 1 + 1 + 1 + 4 times as wide as the boundary
    norms = 4 * 32 * 4
    assert block.captured == 9 * block.output + norms
    assert block.residue == 16 * block.output + norms
    assert block.residue < block.saved
    # the embedding has no input gradient: all that it holds until W is its tokens and its output's gradient
    assert sizes["embedding"].captured == sizes["embedding"].output


def test_the_memory_table_with_these_bytes_covers_stages_that_were_not_measured(benches, sizes):
    names = models.layer_names(THREE.model())
    for first, end in [(0, 4), (1, 4), (1, 5), (2, 4)]:
        layers = [sizes[name] for name in names[first:end]]
        excess = measure_layers.transient_bytes(Timer(), benches, first, end, layers)
        allowed = {op: max(layer.transient[op] for layer in layers) for op in excess}
        assert all(excess[op] <= allowed[op] for op in excess), (first, end, excess, allowed)


def test_layers_of_which_few_are_alike_need_no_more_in_any_stage_than_they_are_charged():
    """Some hand on a part of a larger tensor, which is there until the next layer's backward, some what they save."""
    model = Model(builder="tests.user_layers:unlike", config={}, microbatch_size=2, sequence_length=16)
    found, names = measure_layers.Benches(model, text.default_text()), models.layer_names(model)
    sizes = measure_sizes(Timer(), found, names, 10**9)
    boundary = 2 * 16 * 32 * 4
    assert {name: size.more_saved for name, size in sizes.items() if size.more_saved} == {
        "Joined": boundary,
        "LayerNorm": boundary,
    }
    assert {name: size.shared for name, size in sizes.items() if size.shared} == {"Saves": boundary}
    for first, end in combinations(range(len(names) + 1), 2):
        layers = [sizes[name] for name in names[first:end]]
        bench = found.stage(first, end)
        bench.forward(0)
        saved = sum(layer.saved_after(before) for before, layer in zip((None, *layers[:-1]), layers, strict=True))
        assert bench.stage.saved_bytes(0) <= saved
        bench.stage.backward_input(0, bench.gradient)
        captured = bench.stage.captured_bytes(0)
        assert captured <= sum(layer.captured for layer in layers)
        assert bench.stage.saved_bytes(0) + captured <= sum(layer.residue for layer in layers)
        excess = measure_layers.transient_bytes(Timer(), found, first, end, layers)
        allowed = {op: max(layer.transient[op] for layer in layers) for op in excess}
        assert all(excess[op] <= allowed[op] for op in excess), (first, end, excess, allowed)


@pytest.mark.parametrize("frozen", [1, 3])
def test_stages_that_begin_with_layers_that_do_not_train_need_no_more_than_they_are_charged(frozen):
    """All of the backward of the first layer that trains is in W: nobody asks for the gradient of what enters it."""
    config = {"frozen": frozen}
    model = Model(builder="tests.user_layers:frozen_in_front", config=config, microbatch_size=2, sequence_length=16)
    found, names = measure_layers.Benches(model, text.default_text()), models.layer_names(model)
    assert names.count(names[frozen]) == 1
    sizes = measure_sizes(Timer(), found, names, 10**9)
    for end in range(1, len(names) + 1):
        layers = [sizes[name] for name in names[:end]]
        bench = found.stage(0, end)
        bench.forward(0)
        assert bench.stage.saved_bytes(0) <= sum(layer.saved for layer in layers)
        bench.stage.backward_input(0, bench.gradient)
        captured = bench.stage.captured_bytes(0)
        assert captured <= sum(layer.captured for layer in layers)
        assert bench.stage.saved_bytes(0) + captured <= sum(layer.residue for layer in layers)
        excess = measure_layers.transient_bytes(Timer(), found, 0, end, layers)
        assert all(excess[op] <= max(layer.transient[op] for layer in layers) for op in excess), (end, excess)


def test_layers_that_are_recomputed_together_keep_no_more_than_the_first_is_charged():
    """The running statistics of all of them, as their forwards found them."""
    model = Model(builder="tests.user_layers:running", config={}, microbatch_size=2, sequence_length=1)
    found, names = measure_layers.Benches(model, b""), models.layer_names(model)
    sizes = measure_sizes(Timer(), found, names, 10**9)
    assert sizes["Running"].checkpoint == 2 * 8 * 8 * 8 * 4 + 3 * (2 * 8 * 4 + 8)
    for first, end in combinations(range(len(names) + 1), 2):
        bench = found.stage(first, end)
        bench.forward(0, recomputed=True)
        assert bench.stage.checkpoint_bytes(0) <= sizes[names[first]].checkpoint
        layers = [sizes[name] for name in names[first:end]]
        excess = measure_layers.transient_bytes(Timer(), found, first, end, layers)
        assert all(excess[op] <= max(layer.transient[op] for layer in layers) for op in excess), (first, end, excess)


def test_blocks_are_not_charged_for_the_heads_logits():
    model = THREE.model()
    model = structs.replace(model, config=model.config | {"vocab": 8192})
    found = measure_sizes(Timer(), measure_layers.Benches(model, text.default_text()), models.layer_names(model), 10**9)
    logits = 2 * 16 * 8192 * 4
    assert found["head"].transient["backward"] >= logits
    assert max(found["block"].transient.values()) < logits / 8


def test_a_backward_of_what_was_recomputed_needs_no_more_than_is_measured():
    """It frees a result that the layer saves, such as that of a tanh, later than a backward of what was kept."""
    model = Model(builder="tests.user_layers:unlike", config={}, microbatch_size=2, sequence_length=16)
    benches, index = measure_layers.Benches(model, text.default_text()), 5
    sizes = measure_layers.layer_bytes(benches, index)
    found = measure_layers.transient_bytes(Timer(), benches, index, index + 1, [sizes])
    bench = benches.stage(index, index + 1)
    ops = {
        "forward": lambda: bench.forward(0, recomputed=True),
        "recompute": lambda: bench.stage.recompute(0, bench.whole),
        "backward": lambda: bench.stage.backward(0, bench.gradient),
    }
    peaks = Timer().peaks(ops)
    assert peaks["backward"] - bench.x.nbytes <= found["backward"]


def test_the_peak_counts_what_an_op_frees_before_its_end():
    def op() -> Any:
        torch.empty(1000, dtype=torch.uint8)
        return torch.empty(300, dtype=torch.uint8)

    def three() -> Any:
        return [torch.empty(500, dtype=torch.uint8) for _ in range(3)]

    peaks = Timer().peaks({"one": op, "nothing": lambda: None, "three": three})
    assert peaks == {"one": 1000, "nothing": 0, "three": 1500}


def test_what_enters_a_users_layer_is_what_the_layers_before_it_make_and_only_floats_have_gradients():
    model = OTHERS["sentences"]
    found = measure_layers.Benches(model, b"")
    (_, positions, mask), target = models.batches(model, b"")(torch.Generator().manual_seed(model.seed), 1)
    attention, guess = models.bundles(model)[1], models.bundles(model)[4]
    for bundle, index in ((attention, 3), (guess, 4)):
        x, *others = bundle.cut(found.entering(index))
        assert [torch.equal(one, other) for one, other in zip(others, (positions, mask), strict=True)] == [True, True]
        assert x.abs().max() > 0
    vectors, *others = attention.cut(found.gradient(2))
    assert 0 < vectors.abs().max() < 0.01
    assert not any(one.any() for one in others)
    assert torch.equal(found.target, target)
    assert found.message_bytes == attention.boundary[0][0] * 4


def test_a_layer_that_saves_less_than_its_input_is_said_to_save_as_much():
    found = measure_layers.layer_bytes(measure_layers.Benches(OTHERS["images"], b""), 4)
    assert found.saved == found.checkpoint == 2 * 8 * 8 * 8 * 4


def test_copies_are_timed_of_layers_that_save_something():
    """Those of which there are most save nothing: a link was said to take one byte a second."""
    model = Model(builder="tests.user_layers:mostly_frozen", config={}, microbatch_size=2, sequence_length=16)
    found, names = measure_layers.Benches(model, text.default_text()), models.layer_names(model)
    sizes = {name: measure_layers.layer_bytes(found, names.index(name)) for name in dict.fromkeys(names)}
    assert (names.count("Linear"), sizes["Linear"].own_saved) == (4, 0)
    assert most_copied(names, sizes) == "Mixer"
    frozen = [name for name in names if name != "Mixer"]
    assert most_copied(frozen, sizes) == "Scorer"


# -- times


def test_every_op_is_timed_as_often_as_asked(benches):
    times: dict[str, list[int]] = {}
    parts = list(measure_layers.time_ops(Timer(), [benches.stage(1, 2), benches.stage(2, 3)], 4, times))
    assert parts == sorted(parts)
    assert parts[-1] == 1
    assert {op: len(samples) for op, samples in times.items()} == {
        "forward": 8,
        "backward_input": 4,
        "backward_weight": 4,
        "backward": 4,
        "recompute": 4,
    }
    assert all(t > 0 for samples in times.values() for t in samples)


def test_a_quantity_is_median_count_and_interquartile_range():
    found = measure_profile.quantity([10, 1000, 20, 40, 30])
    assert found == Quantity(value=30, source="measured", samples=5, spread=20)
    assert measure_profile.quantity([7]) == Quantity(value=7, source="measured", samples=1)


# -- the profile


def findings(alone: int = 1_000_000, together: int = 1_000_000, small: int = 80_000, large: int = 180_000) -> Findings:
    def times(ns: int) -> dict[str, list[int]]:
        return {op: [ns] * 3 for op in TIMED}

    sizes = LayerBytes(
        saved=90, residue=50, captured=10, checkpoint=8, output=8, static=64, transient=dict.fromkeys(OPS_WITH_BYTES, 5)
    )
    copies = {
        ns: Copies(8_000_000, [10_000] * 3, [ns + 10_000] * 3, [ns + 10_000] * 3, [2 * ns] * 3, [2 * ns] * 3)
        for ns in (alone, together)
    }
    kinds = ("embedding", "block", "head")
    return Findings(
        names=["embedding", "block", "block", "head"],
        overhead=times(30_000),
        times={kind: times(ns) for kind, ns in zip(kinds, (100_000, 10_030_000, 20_000), strict=True)},
        sizes=dict.fromkeys(kinds, sizes),
        messages=Messages(1000, 101_000, [small] * 3, [large] * 3),
        copies=copies[together],
        copies_alone=copies[alone],
    )


OPS_WITH_BYTES = ("forward", "backward_input", "backward_weight", "backward")


def test_the_overhead_of_an_op_is_counted_once_and_equal_layers_share_a_record():
    profile = assemble(TINY.model(), 2, [findings(), findings()])
    assert [(layer.name, layer.count) for layer in profile.layers] == [("embedding", 1), ("block", 2), ("head", 1)]
    assert value_of(profile.machine.op_overhead_ns) == 30_000
    embedding, block, head = profile.layers
    assert block.forward_ns == Quantity(value=10_000_000, source="measured", samples=6)
    assert value_of(embedding.backward_input_ns) == 0
    assert value_of(embedding.backward_weight_ns) == 70_000
    assert value_of(head.forward_ns) == 0  # less than the overhead: never negative
    assert parse(canonical(profile), "p.json") == profile


def test_messages_are_the_line_through_two_sizes():
    (entry,) = assemble(TINY.model(), 2, [findings()]).machine.p2p
    assert entry.bytes_per_s is not None
    assert value_of(entry.bytes_per_s) == 10**9  # 100,000 more bytes take 100,000 ns more
    assert value_of(entry.latency_ns) == 79_000
    (entry,) = assemble(TINY.model(), 2, [findings(small=300_000, large=202_000)]).machine.p2p
    assert entry.bytes_per_s is not None
    assert (value_of(entry.latency_ns), value_of(entry.bytes_per_s)) == (0, 500_000_000)
    assert assemble(TINY.model(), 1, [findings()]).machine.p2p == []


def test_on_several_hosts_their_memory_and_the_links_between_them_are_told_apart():
    def rank(number: int) -> Findings:
        within, across = (80_000, 180_000), (300_000, 1_300_000)
        peers = {peer: across if {number, peer} == {2, 3} else within for peer in (number - 1, number + 1)}
        messages = {
            peer: Messages(1000, 101_000, [small], [large]) for peer, (small, large) in peers.items() if 0 <= peer < 6
        }
        return replace(findings(), messages_with=messages, host_memory_bytes=10**9 + number)

    machine = assemble(TINY.model(), 6, [rank(number) for number in range(6)], 3).machine
    assert [entry.devices for entry in machine.p2p] == [None, (0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (3, 5), (4, 5)]
    between, within = 10**8, [10**9] * 3
    assert [value_of(entry.bytes_per_s or 0) for entry in machine.p2p] == [between, *within, between, *within]
    hosts = [(host.devices, value_of(host.memory_bytes)) for host in machine.hosts]
    assert hosts == [([0, 1, 2], 10**9), ([3, 4, 5], 10**9 + 3)]
    assert machine.host_memory_bytes is None
    alone = assemble(TINY.model(), 6, [rank(number) for number in range(6)], 6).machine
    assert (alone.hosts, value_of(alone.host_memory_bytes or 0)) == ([], 10**9)


@pytest.mark.parametrize(("together", "shared"), [(1_000_000, False), (1_250_000, False), (1_900_000, True)])
def test_a_link_is_shared_when_copies_at_once_halve_each_other(together, shared):
    found = [findings(together=together), findings(together=together)]
    (link,) = assemble(TINY.model(), 2, found).machine.links
    assert link.devices == ([0, 1] if shared else None)
    expected_ns = 1_000_000 if shared else together
    assert value_of(link.d2h_bytes_per_s) == round(8_000_000 * 1e9 / expected_ns)
    assert value_of(link.duplex_h2d_bytes_per_s or 0) == round(8_000_000 * 1e9 / (2 * expected_ns - 10_000))
    assert value_of(link.latency_ns) == 10_000


# -- processes


@pytest.mark.parametrize(
    ("cores", "asked", "devices", "shares"),
    [
        (1, None, 2, [[], []]),
        (2, None, 2, [[10], [11]]),
        (3, None, 3, [[10], [11], [12]]),
        (8, None, 4, [[10, 11], [12, 13], [14, 15], [16, 17]]),
        (2, 8, 8, [[10], [11]]),
        (4, 1, 1, [[10, 11, 12, 13]]),
    ],
)
def test_one_process_per_device_up_to_the_cores_with_the_cores_that_a_run_gives_it(
    monkeypatch, cores, asked, devices, shares
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 10 + cores)))
    layout = layout_of(MeasureOptions(devices=asked))
    assert (layout.devices, layout.processes, layout.on_gpus) == (devices, len(shares), False)
    assert layout.cores == shares


@pytest.mark.parametrize(
    ("gpus", "device", "asked", "expected"),
    [
        (1, None, None, ("cpu", 3, 3)),  # as a run of two devices and more
        (1, None, 1, ("gpus", 1, 1)),
        (4, None, None, ("gpus", 4, 4)),
        (4, None, 5, ("cpu", 5, 3)),
        (4, None, 2, ("gpus", 2, 2)),
        (4, "cpu", None, ("cpu", 3, 3)),
        (1, "cuda", None, ("gpus", 2, 1)),
        (1, "cuda", 8, ("gpus", 8, 1)),
        (4, "cuda", 8, ("gpus", 8, 4)),
    ],
)
def test_gpus_are_measured_where_a_run_trains_on_them_or_when_asked_to(monkeypatch, gpus, device, asked, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    layout = layout_of(MeasureOptions(device=device, devices=asked), gpus)
    assert ("gpus" if layout.on_gpus else "cpu", layout.devices, layout.processes) == expected


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_run_trains_on_gpus_where_each_rank_of_this_machine_can_have_one(monkeypatch, count):
    monkeypatch.setattr(session, "gpu_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    device = session._device(job.Place(rank=3, world=4, meet="", local_rank=1), training=True)
    assert str(device) == ("cuda:1" if count == 2 else "cpu")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("optpipe_torch.profiler.measure.gpu_count", lambda: 0)
    sentence = "--device is cuda, expected cpu: torch sees no GPU on this machine, at least 1 needed"
    with pytest.raises(BadInput, match=f"^{sentence}$"):
        measure(replace(TINY, device="cuda"), lambda *_: None)


def test_fewer_gpus_than_ranks_of_a_group_are_refused(monkeypatch):
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("optpipe_torch.profiler.measure.gpu_count", lambda: 3)
    with pytest.raises(BadInput, match="torch sees 3 GPUs on this machine, at least 4 needed"):
        measure_in_group(replace(TINY, devices=None, device="cuda"), lambda *_: None)


def test_no_devices_is_refused():
    with pytest.raises(BadInput, match="--devices is 0, expected at least 1"):
        layout_of(MeasureOptions(devices=0))


@pytest.mark.runtime
def test_more_devices_than_layers_are_refused_before_anything_is_measured():
    said: list[str] = []
    with pytest.raises(BadInput, match=r"^--devices is 5, expected at most the model's 4 layers$"):
        measure(replace(TINY, devices=5), lambda what, part: said.append(what))
    assert said == []


@pytest.mark.runtime
def test_a_layer_that_passes_no_gradient_back_is_refused_before_anything_is_timed():
    said: list[str] = []
    model = Model(builder="tests.user_layers:apart", config={}, microbatch_size=2, sequence_length=16)
    with pytest.raises(BadInput, match=r"^layer 2 passes no gradient back to layer 1, .* as one, the model's first$"):
        measure(replace(TINY, of=model), lambda what, part: said.append(what))
    assert said == ["bytes of the layers"]


@pytest.mark.runtime
def test_measuring_gives_a_profile_that_reads_back():
    said: list[tuple[str, float]] = []
    profile = measure(TINY, lambda what, part: said.append((what, part)))
    assert parse(canonical(profile), "p.json") == profile
    assert [part for _, part in said] == pytest.approx(sorted(part for _, part in said))
    assert said[-1] == ("done", 1)
    assert multiprocessing.active_children() == []
    assert profile.model == TINY.model()
    assert profile.machine.devices == 2
    assert [(layer.name, layer.count) for layer in profile.layers] == [("embedding", 1), ("block", 2), ("head", 1)]
    block = profile.layers[1]
    for cost in (block.forward_ns, block.backward_input_ns, block.backward_weight_ns, block.backward_ns):
        assert isinstance(cost, Quantity)
        assert cost.source == "measured"
        assert cost.samples >= 8  # 4 of each of 2 processes
        assert cost.value > 0
    (link,) = profile.machine.links
    assert value_of(link.d2h_bytes_per_s) > 10**6
    (pair,) = profile.machine.p2p
    assert pair.bytes_per_s is not None
    assert 0 < value_of(profile.machine.host_memory_bytes or 0) <= measure_profile.physical_memory()


@pytest.mark.runtime
def test_one_device_needs_no_messages():
    profile = measure(replace(TINY, devices=1, device="cpu"), lambda *_: None)
    assert profile.machine.devices == 1
    assert profile.machine.p2p == []


@pytest.mark.runtime
def test_a_bad_model_is_refused_by_its_field():
    with pytest.raises(BadInput, match=r"config\.heads is 3, expected a divisor"):
        measure(replace(TINY, heads=3), lambda *_: None)
    assert multiprocessing.active_children() == []


@pytest.mark.runtime
def test_a_killed_process_ends_the_measurement_with_its_number():
    def kill(what: str, part: float) -> None:
        for process in multiprocessing.active_children():
            os.kill(process.pid or 0, signal.SIGKILL)

    with pytest.raises(RunFailed, match=r"process [01] of 2 died \(killed by signal 9 \(SIGKILL\)\)"):
        measure(TINY, kill)
    assert multiprocessing.active_children() == []


@pytest.mark.runtime
def test_ctrl_c_leaves_no_process_behind():
    def interrupt(what: str, part: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(TINY, interrupt)
    assert multiprocessing.active_children() == []


@pytest.mark.runtime
def test_a_measurement_that_is_silent_for_too_long_is_ended():
    with pytest.raises(RunFailed, match=r"measuring anything ended: no answer from process 0, 1 for 0\.01 s"):
        measure(replace(TINY, timeout_s=0.01), lambda *_: None)
    assert multiprocessing.active_children() == []


def test_a_measurement_may_take_as_long_as_it_goes_on(monkeypatch):
    words: list[list[tuple[int, Any]]] = [[(0, ("times of the block", 0.3))], [(0, ("times of the head", 0.4))], []]
    waited: list[float] = []

    class Said(nullcontext[Any]):
        def start(self, *_: object) -> None: ...

        def listen(self, seconds: float, _: object) -> list[tuple[int, Any]]:
            waited.append(seconds)
            return words[len(waited) - 1]

    monkeypatch.setattr("optpipe_torch.profiler.measure.Processes", lambda how: Said(Said()))
    with pytest.raises(RunFailed, match="measuring times of the head ended: no answer from process 0, 1 for 9 s"):
        measure(replace(TINY, timeout_s=9), lambda *_: None)
    assert waited == [9, 9, 9]


OTHERS = {
    "llama": Model(
        builder="transformer",
        config=asdict(
            Architecture(kind="llama", layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=256)
        ),
        microbatch_size=2,
        sequence_length=16,
    ),
    "user": Model(builder="tests.user_layers:layers", config={}, microbatch_size=2, sequence_length=16),
    "images": Model(builder="tests.user_layers:images", config={}, microbatch_size=2, sequence_length=1),
    "sentences": Model(builder="tests.user_layers:sentences", config={}, microbatch_size=2, sequence_length=1),
}
KINDS = {
    "llama": [("embedding", 1), ("block", 3), ("head", 1)],
    "user": [("Embedding", 1), ("Mixer", 2), ("Linear", 1), ("Mixer-2", 1), ("Scorer", 1)],
    "images": [("Conv2d", 1), ("Residual", 3), ("Classifier", 1)],
    "sentences": [("Words", 1), ("Attention", 3), ("Guess", 1)],
}


@pytest.mark.runtime
def test_a_model_of_images_that_nobody_said_a_length_of_has_one_token_for_each():
    unsaid = structs.replace(OTHERS["images"], sequence_length=128)
    profile = measure(replace(TINY, of=unsaid, as_its_data=True, samples=1), lambda what, part: None)
    assert profile.model == OTHERS["images"]


@pytest.mark.runtime
@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_was_measured_is_planned_and_trained_under_its_promise(name):
    profile = measure(replace(TINY, of=OTHERS[name]), lambda what, part: None)
    assert profile.model == OTHERS[name]
    assert [(layer.name, layer.count) for layer in profile.layers] == KINDS[name]
    options = Options(mem_bytes=10**9, microbatches=4, time_limit_s=0.2, search=False)
    schedule = compile_schedule(profile, options).schedule
    report = run(schedule, steps=2, data_paths=[text.default_path()], check=True)
    assert report.check is not None
    assert report.check.ok, report.check
    alone = [emulate(schedule, rank, steps=1, data=text.default_text(), on_event=lambda _: None) for rank in (0, 1)]
    for rank in (*report.ranks, *alone):
        assert 0 < rank.peak_activation_bytes <= rank.promised_activation_bytes
    scratch_bytes = 16_384  # of convolutions of a few kB, whichever sizes they have
    for rank in alone:
        assert rank.allocator_peak_bytes <= rank.promised_activation_bytes + scratch_bytes * (name == "images")


@pytest.fixture(scope="module")
def six_layers() -> Profile:
    options = replace(TINY, layers=6, hidden=64, sequence_length=64, microbatch_size=4, samples=1)
    return measure(options, lambda what, part: None)


@pytest.mark.runtime
@pytest.mark.parametrize("plan", ["zb-h1", "interleaved-1f1b", "1f1b-recompute", "v-half", "po-f", 2.5, 3, 3.4])
def test_the_allocator_itself_keeps_to_the_promise_and_comes_near_it(six_layers, plan):
    """Published schedules, and plans for a part of the memory that GPipe takes, with as many offloads as that needs."""
    if isinstance(plan, str):
        options = Options(mem_bytes=10**9, microbatches=4, method=plan)
    else:
        gpipe = compile_schedule(six_layers, Options(mem_bytes=10**9, microbatches=4, method="gpipe")).schedule
        static = max(stage.static_bytes for stage in gpipe.stages)
        cap = static + int((max(device.peak_bytes for device in gpipe.devices) - static) / plan)
        options = Options(mem_bytes=cap, microbatches=4, time_limit_s=0.5, search=False, recompute=False)
    schedule = compile_schedule(six_layers, options).schedule
    if isinstance(plan, str):
        assert any(device.d2h for device in schedule.devices) == (plan == "po-f")
    for rank in (0, 1):
        report = emulate(schedule, rank, steps=1, data=text.default_text(), on_event=lambda _: None)
        assert 0.9 * report.promised_activation_bytes <= report.allocator_peak_bytes
        assert report.allocator_peak_bytes <= report.promised_activation_bytes
        assert report.peak_host_bytes <= report.promised_host_bytes


@pytest.mark.runtime
def test_copies_take_their_time_from_the_compute_of_the_only_core(benches):
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        taken = time_copies(Timer(), benches, 1, 16, bool).busy
    finally:
        os.sched_setaffinity(0, everywhere)
    assert 500 < statistics.median(taken) <= 1000


@pytest.mark.runtime
def test_a_model_whose_layers_do_not_fit_is_refused_before_any_is_made():
    huge = Architecture(
        kind="llama", layers=1, hidden=1 << 16, heads=64, kv_heads=64, head_dim=1 << 10, ffn=1 << 20, vocab=256
    )
    model = Model(builder="transformer", config=asdict(huge), microbatch_size=1, sequence_length=8)
    with pytest.raises(BadInput, match=r"its gradients take \S+ [GT]B .*estimate this one"):
        measure(replace(TINY, of=model), lambda what, part: None)


@pytest.mark.runtime
def test_under_torchrun_the_ranks_are_the_devices_and_every_pair_of_neighbours_is_measured(tmp_path):
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["-m", "optpipe_compiler.cli"]
    sizes = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--microbatch-size", "2"]
    sizes += ["--samples", "4"]
    root = str(Path(__file__).parents[1])
    ended = subprocess.run(
        [*command, "profile", *sizes],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("wrote profile.json") == 1
    profile = parse((tmp_path / "profile.json").read_text(), "profile.json")
    assert profile.machine.devices == 3
    assert [pair.devices for pair in profile.machine.p2p] == [None, (0, 1), (1, 2)]


def test_devices_other_than_torchruns_ranks_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="--devices is 3, expected none: torchrun started 2 ranks"):
        measure_in_group(replace(TINY, devices=3), lambda what, part: None)
