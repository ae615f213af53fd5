"""Selective recompute: cheap tensors are made again in the backward; profile, plan, judge and runtime agree on it."""

from __future__ import annotations

import copy
import gc
import re
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from optpipe_compiler.compiler import Options, bounded, compile_schedule
from optpipe_compiler.documents import ir, profile
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.errors import BadInput, Infeasible
from optpipe_compiler.model.placement import layout
from optpipe_compiler.model.problem import static_bytes
from optpipe_compiler.plan.selective import selectively
from optpipe_compiler.study.pool import answers_here
from optpipe_compiler.study.sweep import Grid, SweptCosts, begin, instances, run
from optpipe_compiler.verify import check, verify
from optpipe_compiler.view.sweep import enough
from tests.instances import uniform

MB = 10**6
LIGHT = profile.Selective(saved_bytes=300 * MB, captured_bytes=150 * MB, recompute_ns=40_000, transient_bytes=100 * MB)


def costs(devices: int = 4, **light: int) -> profile.Profile:
    """Layers of 500 MB that keep 300 where cheap tensors are made again, for 4 % of a backward."""
    plain = uniform(devices, 2, d2h_ms=2.0, h2d_ms=2.0)
    layers = [structs.replace(layer, selective=structs.replace(LIGHT, **light)) for layer in plain.layers]
    return structs.replace(plain, layers=layers)


def planned(cap_mb: int, microbatches: int = 12, **options: object) -> ir.Schedule:
    chosen = Options(mem_bytes=cap_mb * MB, microbatches=microbatches, time_limit_s=1.5, reproducible=True, **options)
    return compile_schedule(costs(), chosen).schedule


def named(schedule: ir.Schedule) -> list[int]:
    return [layer for stage in schedule.stages for layer in stage.selective_layers]


@pytest.fixture(scope="module")
def tight() -> ir.Schedule:
    return planned(2000, offload=False)


def test_a_plan_chooses_it_where_memory_is_tight_and_is_faster_for_it(tight):
    assert named(tight)
    assert tight.version == 2
    assert verify(tight, costs()) == []
    without = structs.replace(costs(), layers=[structs.replace(one, selective=None) for one in costs().layers])
    options = Options(mem_bytes=2000 * MB, microbatches=12, time_limit_s=1.5, reproducible=True, offload=False)
    assert tight.forecast.makespan_ns < compile_schedule(without, options).schedule.forecast.makespan_ns


@pytest.mark.parametrize(("spare", "layers"), [(0, set()), (-1, {0, 1})])
def test_a_device_is_tight_that_cannot_hold_a_backward_beside_the_activations_of_1f1b(spare, layers):
    """Device 0 of two: two microbatches of two layers of 500 MB, and one layer's backward."""
    heavy = costs(2)
    heavy = structs.replace(heavy, layers=[structs.replace(x, backward_transient_bytes=70 * MB) for x in heavy.layers])
    linear = layout("linear", 2, 1, [1] * 4)
    cap = static_bytes(heavy, linear)[0] + (2 * 2 * 500 + 70) * MB + spare
    assert set().union(*(one.selective for one in selectively(heavy, [linear], cap))) >= layers
    assert bool(list(selectively(heavy, [linear], cap))) == bool(layers)


@pytest.mark.parametrize(("stages", "field"), [(1, "forward_transient_bytes"), (2, "output_bytes")])
def test_the_least_memory_that_a_refusal_names_is_enough(stages, field):
    """It is that of selective recompute, because of what forwards need besides what they save."""
    plain = costs(2)
    heavy = structs.replace(plain, layers=[structs.replace(layer, **{field: 1500 * MB}) for layer in plain.layers])
    options = Options(
        1, 2, devices=1, stages_per_device=stages, offload=False, time_limit_s=0.2, reproducible=True, search=False
    )
    with pytest.raises(Infeasible) as refusal:
        compile_schedule(heavy, options)
    named = re.search(r"the smallest --mem that would do is (\d+)B? ", str(refusal.value))
    assert named is not None
    least = int(named[1])
    assert compile_schedule(heavy, replace(options, mem_bytes=least)).schedule.devices[0].peak_bytes == least
    with pytest.raises(Infeasible, match=f"device 0 is 1 bytes .* would do is {least} "):
        compile_schedule(heavy, replace(options, mem_bytes=least - 1))


def unalike() -> profile.Profile:
    """A device that selective recompute helps, and one that needs more with it than without."""

    def layer(name: str, count: int, ns: int, saved: int, transient: int) -> profile.Layer:
        light = profile.Selective(
            saved_bytes=saved * MB, captured_bytes=0, recompute_ns=1, transient_bytes=transient * MB
        )
        return profile.Layer(
            name=name,
            count=count,
            forward_ns=ns,
            backward_input_ns=ns,
            backward_weight_ns=ns,
            saved_bytes=1000 * MB,
            residue_bytes=saved * MB,
            checkpoint_bytes=500 * MB,
            selective=light,
        )

    layers = [layer("helped", 2, 1000, 600, 10), layer("not", 1, 2000, 900, 3000)]
    return profile.Profile(name="unalike", machine=profile.Machine(devices=2), layers=layers)


def test_a_refusal_says_that_nothing_less_would_do_only_where_that_is_so():
    """Under a cap that is tight for both devices both have it or none, under a larger one the first alone."""
    costs = profile.parse(canonical(unalike()), "unalike")
    options = Options(1, 4, stages_per_device=1, time_limit_s=0.2, reproducible=True, search=False)

    def refusal(cap_mb: int) -> Infeasible:
        with pytest.raises(Infeasible) as refused:
            compile_schedule(costs, replace(options, mem_bytes=cap_mb * MB))
        return refused.value

    assert "; raise --mem to 2000000000 (" in str(refusal(100))
    assert (refusal(100).least_mem_bytes, refusal(100).is_smallest) == (2000 * MB, False)
    assert not bounded(costs, replace(options, mem_bytes=100 * MB)).is_smallest
    assert "; the smallest --mem that would do is 1600000000 (" in str(refusal(1599))
    assert compile_schedule(costs, replace(options, mem_bytes=1600 * MB)).schedule.devices[0].peak_bytes == 1600 * MB
    swept = instances(SweptCosts.of(costs), options, Grid((100 * MB,), (4,)))
    empty = begin(None, SweptCosts.of(costs), options)
    [(_, found)] = run(None, empty, swept, 1, answers_here)
    assert enough(2000 * MB, found) == "raise --mem to 2000000000 (2.00 GB (1.86 GiB))"


def test_a_plan_does_without_it_where_memory_is_plenty_or_recompute_is_forbidden():
    for schedule in (planned(20_000), planned(2000, recompute=False)):
        assert named(schedule) == []
        assert schedule.version == 1
        assert '"selective":' not in ir.to_text(schedule)


def test_a_published_method_is_emitted_as_published():
    assert named(planned(5000, method="1f1b")) == []


def test_stock_checkpointing_of_cheap_tensors_is_a_baseline_where_memory_is_tight(tight):
    stock = planned(3600, method="1f1b-selective", offload=False)
    assert named(stock) == list(range(8))
    assert verify(stock, costs()) == []
    assert stock.forecast.method == "1f1b-selective"
    baselines = planned(3600, offload=False).forecast.baselines
    assert baselines["1f1b-selective"].makespan_ns == stock.forecast.makespan_ns
    assert baselines["1f1b-selective"].fits
    assert not baselines["1f1b"].fits or "waits" in baselines["1f1b"].reason
    assert tight.forecast.baselines["interleaved-1f1b-selective"].kind == "stock"
    without = structs.replace(costs(), layers=[structs.replace(one, selective=None) for one in costs().layers])
    with pytest.raises(BadInput, match="1f1b-selective: is for layers that can make cheap tensors again"):
        compile_schedule(without, Options(mem_bytes=3600 * MB, microbatches=12, method="1f1b-selective"))


def test_stock_checkpointing_of_cheap_tensors_is_emitted_on_a_kept_placement_too():
    stock = check(planned(3600, method="1f1b-selective", offload=False))
    again = planned(3600, method="1f1b-selective", offload=False, keep=stock)
    assert (again.forecast.makespan_ns, named(again)) == (stock.schedule.forecast.makespan_ns, list(range(8)))
    assert named(planned(5000, method="1f1b", keep=stock)) == []


def test_a_file_of_version_1_has_no_selective_recompute(tight):
    old = ir.seal(tight)
    text = ir.to_text(structs.replace(old, version=1))
    with pytest.raises(BadInput, match=r"selective: is not a field of version 1, expected \$.version 2"):
        ir.parse(text, "old.json")
    assert ir.to_text(ir.parse(ir.to_text(tight), "new.json")) == ir.to_text(tight)


def changed(schedule: ir.Schedule, stage: int, **fields: object) -> ir.Schedule:
    stages = list(schedule.stages)
    stages[stage] = structs.replace(stages[stage], **fields)
    return ir.seal(structs.replace(schedule, stages=stages))


def test_the_judge_refuses_layers_that_are_not_the_stages_own_in_order(tight):
    for layers in ([99], [*tight.stages[0].selective_layers] * 2):
        assert {one.rule for one in verify(changed(tight, 0, selective=layers))} == {"stages"}


def test_the_judge_restates_bytes_and_times_from_the_profile(tight):
    told = verify(changed(tight, 0, selective=msgspec.UNSET), costs())
    found = {part.split(" of ")[0] for one in told for part in one.message.split("; ")}
    assert {"saved_bytes", "captured_bytes", "forward_transient_bytes", "backward_ns", "backward_input_ns"} <= found
    for field, figure in (("saved_bytes", 310), ("captured_bytes", 160), ("transient_bytes", 110)):
        assert verify(tight, costs(**{field: figure * MB}))
    assert verify(tight, costs(recompute_ns=40_001))
    nothing = structs.replace(costs(), layers=[structs.replace(one, selective=None) for one in costs().layers])
    assert any("of which the profile knows none" in one.message for one in verify(tight, nothing))


def test_a_profile_says_no_impossible_bytes():
    for light, expected in (
        ({"saved_bytes": 600 * MB}, "saved_bytes is 600000000, expected"),
        ({"captured_bytes": 600 * MB}, "captured_bytes is 600000000, expected"),
    ):
        with pytest.raises(BadInput, match=r"\$\.layers\[0\]\.selective\." + expected):
            profile.parse(canonical(costs(**light)), "p.json")


# -- the runtime


torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from optpipe_compiler.costs.models import Architecture  # noqa: E402
from optpipe_torch.models import text  # noqa: E402
from optpipe_torch.models.layers import Block  # noqa: E402
from optpipe_torch.profiler.allocator import watch  # noqa: E402
from optpipe_torch.profiler.child import measure_sizes  # noqa: E402
from optpipe_torch.profiler.layers import Benches, transient_bytes  # noqa: E402
from optpipe_torch.profiler.timer import Timer  # noqa: E402
from runtime_torch import cheap  # noqa: E402
from runtime_torch.execution import StageExecution  # noqa: E402
from runtime_torch.microbatch import Microbatch, entered  # noqa: E402

WIDTH, ROWS, LENGTH = 16, 2, 6
GPT = Architecture(kind="gpt2", layers=3, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=64, vocab=256, qkv_bias=True)
SCALARS = 64
"""Bytes that no store has: single numbers."""


class Own(nn.Module):
    """A user's layer: cheap pieces one after another, one with two inputs, one that hands its result on."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        product = cheap(lambda gate, up: F.silu(gate) * up, self.gate(y), self.up(y))
        twice = cheap(torch.tanh, product)
        return self.norm(x + self.down(twice) + self.down(product))


class Pair(nn.Module):
    """Passes two tensors on, of which one is a cheap result."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        first, second = x if isinstance(x, tuple) else (x, x)
        return self.linear(self.norm(first)) + second, self.norm(second)


class Join(nn.Module):
    def forward(self, x):
        return x[0] + x[1]


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama as modeling

    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=40, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1
    )
    table = modeling.LlamaRotaryEmbedding(config)(torch.empty(1, LENGTH, 1), torch.arange(LENGTH)[None])

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = modeling.LlamaDecoderLayer(config, 0)

        def forward(self, x):
            return self.layer(x, position_embeddings=table)

    return Layer()


MODELS = {
    "gpt": lambda: [Block(GPT, LENGTH) for _ in range(3)],
    "transformers' Llama": lambda: [llama() for _ in range(3)],
    "own": lambda: [Own() for _ in range(2)],
    "several tensors": lambda: [Pair(), Pair(), Join()],
}


def taken(layers, selective, *, fused, way):
    """Return all gradients, the saved bytes, those between the halves, and the meter's peak in the backward."""
    count = len(layers)
    stage = StageExecution(layers, 0, is_first=False, is_last=False, device="cpu", selective=selective)
    generator = torch.Generator().manual_seed(3)
    x, gradient = (torch.randn(ROWS, LENGTH, WIDTH, generator=generator) for _ in range(2))
    stage.forward(0, x, None, [(0, count)] if way == "recompute" else [(0, 1)] if way == "both" else ())
    if way in ("recompute", "both"):
        stage.recompute(0, (0, count) if way == "recompute" else (0, 1))
    if way in ("offload", "both"):
        moved = (1 if way == "both" else 0, count)
        stage.offload(0, moved)
        stage.reload(0, moved)
    saved = stage.saved_bytes(0)
    between = 0
    if fused:
        found = stage.backward(0, gradient)
    else:
        found = stage.backward_input(0, gradient)
        between = stage.meter.current_bytes
        stage.backward_weight(0)
    assert stage.meter.current_bytes == stage.host_meter.current_bytes == 0
    return [found, *(p.grad for layer in layers for p in layer.parameters())], saved, between


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("way", ["keep", "recompute", "offload", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_keeping_bit_by_bit_in_fewer_bytes(name, way, fused):
    torch.manual_seed(0)
    layers = MODELS[name]()
    expected, saved, between = taken(copy.deepcopy(layers), (), fused=fused, way="keep")
    for selective in ([0], range(len(layers))):
        found, less, stays = taken(copy.deepcopy(layers), selective, fused=fused, way=way)
        assert less < saved
        assert stays <= between
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", MODELS)
def test_between_the_halves_the_allocator_has_no_more_than_the_meter(name):
    """What pieces were computed from is freed with them, and not only counted as freed."""
    torch.manual_seed(0)
    layers = MODELS[name]()
    stage = StageExecution(layers, 0, is_first=False, is_last=False, device="cpu", selective=range(len(layers)))
    x, gradient = torch.randn(2, ROWS, LENGTH, WIDTH)
    found = []

    def op():
        stage.forward(0, x, None)
        found.append(stage.backward_input(0, gradient))

    allocated = sum(watch({"op": op})["op"])
    assert allocated <= stage.meter.current_bytes + found[0].nbytes + SCALARS


class GatedApart(nn.Module):
    """The result of an activation module is multiplied: no weight reads it."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def test_what_no_weight_reads_is_free_once_the_first_half_has_read_it():
    """Not at its end: a stage would have it of all its layers at once, and is charged for one."""
    torch.manual_seed(0)
    more = []
    for count in (1, 2, 4):
        layers = [GatedApart() for _ in range(count)]
        stage = StageExecution(layers, 0, is_first=False, is_last=False, device="cpu", selective=range(count))
        x, gradient = torch.randn(2, ROWS, LENGTH, WIDTH)
        stage.forward(0, x)
        captured = count * 3 * x.nbytes
        stage.meter.reset_peak()
        before = stage.meter.current_bytes
        stage.backward_input(0, gradient)
        more.append(stage.meter.peak_bytes - before - captured)
        stage.backward_weight(0)
    assert more[1:] == more[:1] * 2


def test_a_piece_that_saves_something_else_the_second_time_is_refused():
    from optpipe_compiler.errors import RunFailed

    turns = iter([torch.tanh, lambda x: x.sigmoid().sigmoid()])

    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(cheap(lambda y: next(turns)(y), self.linear(x)))

    stage = StageExecution([Fickle()], 0, is_first=False, is_last=False, device="cpu", selective=[0])
    x = torch.randn(ROWS, LENGTH, WIDTH)
    stage.forward(0, x)
    with pytest.raises(RunFailed, match="did not save what the forward saved"):
        stage.backward(0, x)


class AddedRMSNorm(nn.RMSNorm):
    """Norms a sum, and returns the sum, too: as kernels of others do."""

    def forward(self, x, residual):
        total = x + residual
        return super().forward(total), total


class NoisyActivation(nn.Module):
    """Has the name of what is cheap, and is not."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x.tanh())


class DroppedActivation(nn.Module):
    """Draws random numbers, and has no module that says so."""

    def forward(self, x):
        return F.dropout(x.sigmoid(), 0.5, self.training)


class Odd(nn.Module):
    """A layer with modules that are called by name, return two tensors, or draw random numbers."""

    def __init__(self):
        super().__init__()
        self.norm, self.added, self.noisy = nn.LayerNorm(WIDTH), AddedRMSNorm(WIDTH), NoisyActivation()
        self.linear, self.dropped = nn.Linear(WIDTH, WIDTH), DroppedActivation()

    def forward(self, x):
        normed, x = self.added(x, residual=self.norm(input=x))
        x = x + cheap(lambda y: F.dropout(y.cos(), 0.5), self.dropped(x))
        return x + self.linear(self.noisy(self.linear(normed)))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("way", ["keep", "recompute", "offload", "both"])
def test_modules_with_the_names_of_cheap_ones_may_do_as_they_like(way, fused):
    torch.manual_seed(0)
    layers = [Odd() for _ in range(2)]
    expected, *_ = taken(copy.deepcopy(layers), (), fused=fused, way="keep")
    torch.manual_seed(0)
    layers = [Odd() for _ in range(2)]
    found, *_ = taken(layers, range(2), fused=fused, way=way)
    assert all(map(torch.equal, found, expected))


class FollowingRMSNorm(nn.RMSNorm):
    """Changes a tensor in an attribute."""

    def __init__(self):
        super().__init__(WIDTH)
        self.mean = torch.zeros(WIDTH)

    def forward(self, x):
        before = self.mean.clone()
        self.mean.lerp_(x.detach().mean((0, 1)), 0.5)
        return super().forward(x - before)


class Growing(nn.Module):
    """Counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return (x * self.calls).tanh()


class Gated(nn.Module):
    """A feed-forward layer by its names."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act_fn = Growing()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), FollowingRMSNorm()), Gated])
def test_modules_that_change_with_each_call_are_not_made_again(make):
    found = []
    for selective in ((), (0,)):
        torch.manual_seed(0)
        stage = StageExecution([make()], 0, is_first=False, is_last=False, device="cpu", selective=selective)
        x = torch.randn(2, ROWS, LENGTH, WIDTH)
        with stage.trying():
            stage.forward(0, x[0])
            stage.discard(0)
        stage.begin()
        for microbatch in range(2):
            stage.forward(microbatch, x[microbatch])
        gradients = [stage.backward(microbatch, x[0]) for microbatch in range(2)]
        found.append([*gradients, *(p.grad for p in stage.layers[0].parameters())])
    assert all(map(torch.equal, *found))


def test_a_layer_that_is_cheap_as_a_whole_gets_its_keyword_arguments():
    class ScaledRMSNorm(nn.RMSNorm):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    layer, x = ScaledRMSNorm(WIDTH), torch.randn(ROWS, WIDTH)
    stage = StageExecution([layer], 0, is_first=False, is_last=False, device="cpu", selective=[0])
    with entered(Microbatch(keywords={"scale": 3.0, "causal": True})):
        assert torch.equal(stage.forward(0, x), 3 * F.rms_norm(x, (WIDTH,)))


class ChangesResults(nn.Module):
    """Changes in place what cheap pieces return, as an in-place dropout behind an activation does."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        y[:, 0] = 1
        inner = self.act(self.up(y))
        inner.mul_(0.5)
        return x + self.down(inner)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("way", ["keep", "recompute", "offload", "both"])
def test_a_result_that_its_layer_changes_in_place_is_not_made_again(way, fused):
    torch.manual_seed(0)
    layers = [ChangesResults(), ChangesResults()]
    expected = taken(copy.deepcopy(layers), (), fused=fused, way="keep")[0]
    found = taken(copy.deepcopy(layers), [0, 1], fused=fused, way=way)[0]
    assert all(map(torch.equal, found, expected))


def test_a_piece_that_changes_its_input_in_place_is_refused():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.inner = nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True)

        def forward(self, x):
            return self.linear(self.inner(self.linear(x)))

    class Told(Silent):
        def forward(self, x):
            return self.linear(cheap(self.inner, self.linear(x)))

    x = torch.randn(ROWS, LENGTH, WIDTH)
    taken([Silent()], [0], fused=True, way="keep")  # torch's in-place activations are not taken for cheap
    stage = StageExecution([Told()], 0, is_first=False, is_last=False, device="cpu", selective=[0])
    with pytest.raises(BadInput, match="layer 0: a cheap part changes its input in place"):
        stage.forward(0, x)


def test_a_stage_that_is_one_module_is_refused(tight):
    from runtime_torch import wrap_stages

    mine = {stage.stage: nn.Linear(2, 2) for stage in tight.stages if stage.device == 0}
    with pytest.raises(BadInput, match="is one module, but the schedule has selective recompute of single layers"):
        wrap_stages(tight, mine, 0, "cpu")


@pytest.mark.parametrize("made", [lambda: Block(GPT, LENGTH), Odd], ids=["block", "odd"])
def test_estimates_know_it_and_drop_what_the_runtime_drops(made):
    from optpipe_torch.estimates.count import count

    torch.manual_seed(0)
    layer = made()
    _, saved, _ = taken([copy.deepcopy(layer)], [], fused=False, way="keep")
    _, less, _ = taken([layer], [0], fused=False, way="keep")
    with torch.device("meta"):
        counted = count([made()], torch.empty(ROWS, LENGTH, WIDTH), None)
    light = counted.sizes.selective
    assert light is not None
    assert counted.sizes.saved - light.saved == saved - less
    assert counted.work["selective"].kernels


@pytest.mark.parametrize("granularity", ["block", "half"])
def test_a_stage_of_several_layers_needs_no_more_than_it_is_charged(granularity):
    """In a recompute above all: what its forward drops at the end of a layer must be free then."""
    sizes = {"layers": 3, "hidden": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "ffn": 172, "vocab": 256}
    config = {"kind": "llama", **sizes, "granularity": granularity}
    model = profile.Model(
        builder="transformer", config=config, microbatch_size=2, sequence_length=32, dtype="fp32", seed=0
    )
    blocks = ["attention", "ffn"] * 3 if granularity == "half" else ["block"] * 3
    names = ["embedding", *blocks, "head"]
    benches, timer = Benches(model, text.default_text()), Timer()
    measured = measure_sizes(timer, benches, names, 2**30)
    for first, end in [(1, 3), (1, 4), (2, 4)] + [(2, 5), (1, 7)] * (granularity == "half"):
        layers = [measured[name] for name in names[first:end]]
        light = [replace(one, saved=one.selective.saved, captured=one.selective.captured) for one in layers]
        found = transient_bytes(timer, benches, first, end, light, selective=True)
        dropped = {
            "forward": [one.saved - one.selective.saved for one in layers],
            "backward_input": [one.selective.transient for one in layers],
            "backward": [one.selective.transient for one in layers],
            "backward_weight": [0] * len(layers),
        }
        for op, more in dropped.items():
            charged = max(one.transient[op] + extra for one, extra in zip(layers, more, strict=True))
            assert found[op] <= charged, (first, end, op)


def test_no_garbage_is_collected_while_memory_is_watched():
    """What ops before have left would go in the middle of an op, which would seem to need less."""
    seen = []
    watch({"op": lambda: seen.append(gc.isenabled())})
    assert (seen, gc.isenabled()) == ([False], True)
