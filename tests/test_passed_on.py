"""Tensors that layers only pass on are in a stage once, whatever becomes of its layers, and within the plan's bytes."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

torch = pytest.importorskip("torch")
import test_runtime_library as case  # noqa: E402
import user_layers  # noqa: E402
from msgspec import structs  # noqa: E402

from optpipe_compiler.compiler import Options, compile_schedule  # noqa: E402
from optpipe_compiler.documents.files import canonical  # noqa: E402
from optpipe_compiler.documents.profile import Layer, Link, Machine, Model, Profile, in_one_stage, parse, value_of  # noqa: E402
from optpipe_compiler.errors import BadInput  # noqa: E402
from optpipe_compiler.verify import verify  # noqa: E402
from optpipe_torch.emulate.alone import emulate  # noqa: E402
from optpipe_torch.launch.run import run  # noqa: E402
from optpipe_torch.models import known as models  # noqa: E402
from optpipe_torch.models.text import default_text  # noqa: E402
from optpipe_torch.profiler.child import measure_sizes  # noqa: E402
from optpipe_torch.profiler.layers import Benches  # noqa: E402
from optpipe_torch.profiler.measure import MeasureOptions, measure  # noqa: E402
from optpipe_torch.profiler.timer import Timer  # noqa: E402
from runtime_torch.bundles import bundled, trace_bundles  # noqa: E402
from runtime_torch.execution import StageExecution  # noqa: E402

FIRST, COUNT = 1, 3
"""The layers of the stage: equal ones, of which each gets positions and a mask handed on."""


@cache
def borders():
    """What enters each layer."""
    makers, draw = user_layers.sentences()
    return trace_bundles(makers, *draw(torch.Generator().manual_seed(0), 2))


def stage(first=FIRST, count=COUNT):
    """Equal layers, what enters them, the gradient of what leaves them."""
    makers, draw = user_layers.sentences()
    torch.manual_seed(0)
    layers = [make() for make in makers]
    inputs, _ = draw(torch.Generator().manual_seed(0), 2)
    bundles = borders()
    with torch.no_grad():
        x = bundles[1].carry(layers[0](*inputs))
    end = first + count
    run = [bundled(layers[i], *bundles[i : i + 2], packs=i + 1 == end) for i in range(first, end)]
    shapes = [shape for shape, _ in bundles[end].parts]
    gradient = bundles[end].carry([torch.randn(shapes[0]), *[None] * (len(shapes) - 1)])
    return StageExecution(run, first, is_first=False, is_last=False, device="cpu"), x, gradient


@cache
def sizes():
    """What a layer alone saves and keeps for a recompute, and what two share."""
    one, x, _ = stage(count=1)
    one.forward(0, x)
    two, x, _ = stage(count=2)
    two.forward(0, x)
    saved = one.saved_bytes(0)
    return saved, x.nbytes, 2 * saved - two.saved_bytes(0)


def test_what_is_passed_on_is_saved_once():
    saved, carrier, shared = sizes()
    three, x, _ = stage()
    three.forward(0, x)
    assert three.saved_bytes(0) == 3 * saved - 2 * shared
    assert shared == carrier  # positions and mask, and the vectors that came with them, which no layer saves alone


def expected_gradients(x, gradient):
    part, *_ = stage()
    x = part.forward(0, x)
    found = part.backward(0, gradient)
    return found, [p.grad for layer in part.layers for p in layer.parameters()]


@pytest.mark.parametrize("reloads_first", [True, False])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("states", list(itertools.product("KOR", repeat=COUNT)), ids="".join)
def test_every_mixture_keeps_to_the_bytes_of_its_layers(states, fused, reloads_first):
    saved, checkpoint, shared = sizes()
    own = [saved, *[saved - shared] * (COUNT - 1)]
    part, x, gradient = stage()
    wanted = expected_gradients(x, gradient)
    layers = {letter: [(FIRST + i, FIRST + i + 1) for i, s in enumerate(states) if s == letter] for letter in "KOR"}
    held = {letter: sum(own[first - FIRST] for first, _ in layers[letter]) for letter in "KOR"}
    checkpoints = checkpoint * len(layers["R"])

    def within(allowed):
        assert part.meter.current_bytes <= allowed

    part.forward(0, x, recomputed=layers["R"])
    within(held["K"] + held["O"] + checkpoints)
    for range_ in layers["O"]:
        part.offload(0, range_)
    within(held["K"] + checkpoints)
    assert part.host_meter.current_bytes <= held["O"]
    back = [("reload", r) for r in layers["O"]], [("recompute", r) for r in layers["R"]]
    allowed = held["K"] + checkpoints
    for name, range_ in itertools.chain(*(back if reloads_first else reversed(back))):
        getattr(part, name)(0, range_)
        allowed += own[range_[0] - FIRST] - (checkpoint if name == "recompute" else 0)
        within(allowed)
    assert part.saved_bytes(0) == sum(own)
    assert part.host_meter.current_bytes == 0
    if fused:
        found = part.backward(0, gradient)
    else:
        found = part.backward_input(0, gradient)
        part.backward_weight(0)
    gradients = [p.grad for layer in part.layers for p in layer.parameters()]
    for mine, theirs in zip((found, *gradients), (wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert part.meter.current_bytes == 0


def test_the_first_stage_splits_behind_its_first_layer_and_shares_what_that_passes_on():
    layers, (inputs, target) = [make() for make in case.builders()], case.batch()
    microbatch = [part[:2] for part in inputs]
    bundles = trace_bundles(layers, microbatch, target[:2])
    run = [bundled(layers[i], *bundles[i : i + 2], packs=i == 3) for i in range(4)]
    part = StageExecution(run, 0, is_first=True, is_last=True, device="cpu")
    parts = tuple(microbatch)
    for layer in layers[:-1]:
        parts = layer(*parts)
    layers[-1](*parts, target[:2]).backward()
    wanted = [p.grad.clone() for layer in layers for p in layer.parameters()]
    for recomputed in ([], [(0, 2), (2, 3)], [(1, 4)], [(0, 1)]):
        for layer in layers:
            layer.zero_grad()
        part.forward(0, bundles[0].carry(microbatch), target[:2], recomputed)
        for range_ in recomputed:
            part.recompute(0, range_)
        part.backward_input(0, None)
        part.backward_weight(0)
        found = [p.grad for layer in layers for p in layer.parameters()]
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert part.meter.current_bytes == 0


# -- what layers save of their result, and the next one of its input


def saving_stage(count):
    """Layers that each save their input and their result."""
    torch.manual_seed(0)
    run = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(count)]
    return StageExecution(run, FIRST, is_first=False, is_last=False, device="cpu")


def ranges(states, first, *, joined):
    """The layers of each state by range, neighbours of one state together or apart."""
    found = {"K": [], "O": [], "R": []}
    index = first
    for state, same in itertools.groupby(states):
        count = len(list(same))
        steps = [count] if joined else [1] * count
        for step in steps:
            found[state].append((index, index + step))
            index += step
    return found


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
@pytest.mark.parametrize("states", list(itertools.product("KOR", repeat=4)), ids="".join)
def test_what_a_recomputed_layer_hands_on_is_not_kept_by_the_next(states, joined, fused):
    """The next one shares it, so it is neither charged for it, nor does it hold it, on the device or on the host."""
    x, gradient = torch.randn(3, 8), torch.randn(3, 8)
    own, checkpoint = [2 * x.nbytes, *[x.nbytes] * 3], x.nbytes
    other = saving_stage(4)
    other.forward(0, x)
    assert other.saved_bytes(0) == sum(own)
    wanted = [other.backward(0, gradient), *(p.grad for layer in other.layers for p in layer.parameters())]
    part, layers = saving_stage(4), ranges(states, FIRST, joined=joined)
    held = {letter: sum(sum(own[a - FIRST : b - FIRST]) for a, b in layers[letter]) for letter in "KOR"}
    part.forward(0, x, recomputed=layers["R"])
    assert part.meter.current_bytes <= held["K"] + held["O"] + checkpoint * len(layers["R"])
    for one in layers["O"]:
        part.offload(0, one)
    allowed = held["K"] + checkpoint * len(layers["R"])
    assert part.meter.current_bytes <= allowed
    assert part.host_meter.current_bytes <= held["O"]
    for one in layers["R"]:
        part.recompute(0, one)
        allowed += sum(own[one[0] - FIRST : one[1] - FIRST]) - checkpoint
        assert part.meter.current_bytes <= allowed
    for one in layers["O"]:
        part.reload(0, one)
    assert part.saved_bytes(0) == sum(own)
    if fused:
        found = part.backward(0, gradient)
    else:
        found = part.backward_input(0, gradient)
        part.backward_weight(0)
    for mine, theirs in zip([found, *(p.grad for one in part.layers for p in one.parameters())], wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert part.meter.current_bytes == part.host_meter.current_bytes == 0


# -- the hidden states that parts of a head pass on

PARTS = 4


@cache
def head_parts():
    """Stages of a tiny model, the number of the head's first part, and what a profile says of all parts."""
    config = {"kind": "llama", "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "ffn": 24}
    config |= {"vocab": 1024, "head_parts": PARTS}
    model = Model(builder="transformer", config=config, microbatch_size=2, sequence_length=5)
    benches = Benches(model, default_text())
    names = models.layer_names(model)
    found = measure_sizes(Timer(), benches, names, 10**9)
    return benches, names.index("head.0"), [found[name] for name in names[-PARTS:]]


def test_each_part_behind_the_second_shares_what_entered_the_one_before():
    _, _, parts = head_parts()
    entering = 2 * 5 * (16 * 4 + 2 * 4)  # hidden states and the state of the softmax
    assert [part.chain for part in parts] == [None, "head", "head", "head"]
    assert [part.shared for part in parts] == [0, *[entering] * 3]


@pytest.mark.parametrize("states", list(itertools.product("KOR", repeat=PARTS)), ids="".join)
def test_every_mixture_of_parts_keeps_to_the_bytes_of_the_profile(states):
    benches, begin, parts = head_parts()
    own = [part.saved_after(before) for before, part in zip((None, *parts), parts, strict=False)]
    assert sum(own) == sum(part.saved for part in parts) - 2 * parts[1].shared
    bench = benches.stage(begin, begin + PARTS)
    stage = bench.stage
    layers = {letter: [(begin + i, begin + i + 1) for i, s in enumerate(states) if s == letter] for letter in "KOR"}
    held = {letter: sum(own[first - begin] for first, _ in layers[letter]) for letter in "KOR"}
    checkpoints = sum(parts[first - begin].checkpoint for first, _ in layers["R"])
    loss = stage.forward(0, bench.x, bench.target, layers["R"])
    assert stage.meter.current_bytes <= held["K"] + held["O"] + checkpoints
    for range_ in layers["O"]:
        stage.offload(0, range_)
    assert stage.meter.current_bytes <= held["K"] + checkpoints
    assert stage.host_meter.current_bytes <= held["O"]
    for range_ in layers["R"]:
        stage.recompute(0, range_)
    assert stage.meter.current_bytes <= held["K"] + held["R"]
    for range_ in layers["O"]:
        stage.reload(0, range_)
    assert stage.saved_bytes(0) <= sum(own)
    residue = sum(min(part.residue, here + part.captured) for part, here in zip(parts, own, strict=True))
    stage.backward_input(0, None)
    assert stage.meter.current_bytes <= residue
    stage.backward_weight(0)
    assert stage.meter.current_bytes == stage.host_meter.current_bytes == 0
    kept = benches.stage(begin, begin + PARTS)
    torch.testing.assert_close(kept.forward(0), loss)
    kept.stage.backward(0, None)
    for mine, theirs in zip(stage.layers, kept.stage.layers, strict=True):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


LAYER = Layer(
    name="block",
    forward_ns=1,
    backward_input_ns=1,
    backward_weight_ns=1,
    saved_bytes=100,
    shared_bytes=30,
    residue_bytes=95,
    captured_bytes=10,
    checkpoint_bytes=40,
)


def test_a_stage_counts_shared_bytes_of_equal_neighbours_once():
    other = Layer(
        name="other", forward_ns=1, backward_input_ns=1, backward_weight_ns=1, saved_bytes=50, shared_bytes=50
    )
    found = in_one_stage([LAYER, LAYER, other, LAYER, LAYER])
    assert [value_of(layer.saved_bytes) for layer in found] == [100, 70, 50, 100, 70]
    assert [layer.residue_bytes for layer in found] == [95, 80, None, 95, 80]


def test_layers_of_one_chain_share_whatever_their_names():
    first, second, third = (structs.replace(LAYER, name=f"part.{n}", chain="parts" if n else None) for n in range(3))
    found = in_one_stage([first, second, third, LAYER])
    assert [value_of(layer.saved_bytes) for layer in found] == [100, 100, 70, 100]


def test_more_shared_than_saved_bytes_are_refused():
    machine = Machine(devices=2, links=[Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)])
    profile = Profile(name="p", machine=machine, layers=[LAYER])
    text = canonical(profile).replace('"shared_bytes": 30', '"shared_bytes": 130')
    with pytest.raises(BadInput, match=r"shared_bytes is 130, expected at most saved_bytes \(100\)"):
        parse(text, "p.json")


@pytest.mark.runtime
def test_a_plan_counts_them_once_and_the_run_keeps_to_it(monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    model = Model(builder="tests.user_layers:sentences", config={}, microbatch_size=2, sequence_length=1)
    profile = measure(MeasureOptions(devices=2, samples=2, of=model), lambda *_: None)
    attention = profile.layers[1]
    saved, shared = value_of(attention.saved_bytes), value_of(attention.shared_bytes)
    assert shared > 0
    together = set()
    for method in ("zb-h1", "1f1b-recompute", "po-f"):
        schedule = compile_schedule(profile, Options(mem_bytes=10**9, microbatches=4, method=method)).schedule
        assert verify(schedule, profile) == []
        for planned in schedule.stages:
            mine = [size for index, size in enumerate(planned.saved_bytes, planned.layers[0]) if 1 <= index <= 3]
            assert sum(mine) == len(mine) * saved - max(0, len(mine) - 1) * shared
            together.add(len(mine))
        report = run(schedule, steps=1, check=True)
        assert report.check is not None
        assert report.check.ok, report.check
        for rank in (0, 1):
            alone = emulate(schedule, rank, steps=1, data=b"", on_event=lambda _: None)
            assert alone.allocator_peak_bytes <= alone.promised_activation_bytes
            assert alone.peak_host_bytes <= alone.promised_host_bytes
    assert max(together) > 1
