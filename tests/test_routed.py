"""Mixtures of experts: another graph for every microbatch, and exact gradients all the same."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

torch = pytest.importorskip("torch")
import routed_models  # noqa: E402

from optpipe_compiler.compiler import Options, compile_schedule  # noqa: E402
from optpipe_compiler.documents.profile import Model  # noqa: E402
from optpipe_torch.launch.run import run  # noqa: E402
from optpipe_torch.models import known as models  # noqa: E402
from optpipe_torch.models import text  # noqa: E402
from optpipe_torch.profiler.measure import MeasureOptions, measure  # noqa: E402
from runtime_torch.bundles import Bundle, bundled, trace_bundles  # noqa: E402
from runtime_torch.execution import StageExecution  # noqa: E402

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
MODELS = [
    pytest.param("routed", {}, id="by hand"),
    pytest.param("mixtral", {"experts": "eager"}, id="eager", marks=needs_transformers),
    pytest.param("mixtral", {"experts": "batched_mm"}, id="batched", marks=needs_transformers),
]


def made(name, config):
    """Layers with the same values each time, and three microbatches that are routed differently."""
    makers, draw = getattr(routed_models, name)(**config)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batches = [draw(generator, 2) for _ in range(3)]
    batches.append((torch.zeros_like(batches[0][0]), batches[0][1]))  # of equal tokens: most experts get none
    return [make() for make in makers], batches


def plain(name, config):
    """Losses and summed gradients without stages."""
    layers, batches = made(name, config)
    losses = []
    for tokens, target in batches:
        parts = (tokens,)
        for layer in layers[:-1]:
            parts = layer(*parts)
        loss = layers[-1](*parts, target)
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad for layer in layers for p in layer.parameters()]


def staged(layers, batches, cuts):
    bundles = trace_bundles(layers, batches[0][:1], batches[0][1])
    wrapped = [bundled(layer, *bundles[i : i + 2]) for i, layer in enumerate(layers)]
    return [
        StageExecution(wrapped[a:b], a, is_first=a == 0, is_last=b == len(layers), device="cpu")
        for a, b in itertools.pairwise([0, *cuts, len(layers)])
    ]


def backwards(stages, microbatch, name):
    gradient = None
    for stage in reversed(stages):
        gradient = getattr(stage, name)(microbatch, gradient)


WAYS = ["keep", "offload", "recompute"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("cuts", [(), (2,)], ids=["one stage", "two stages"])
@pytest.mark.parametrize(("name", "config"), MODELS)
def test_every_microbatch_is_routed_in_its_own_way_and_split_exactly(name, config, cuts, fused, way):
    layers, batches = made(name, config)
    stages = staged(layers, batches, cuts)
    losses = []
    for microbatch, (x, target) in enumerate(batches):
        for stage in stages:
            mine = (stage.first_layer, stage.end_layer)
            x = stage.forward(microbatch, x, target if stage.is_last else None, [mine] if way == "recompute" else ())
            if way == "offload":
                stage.offload(microbatch, mine)
        losses.append(x.item())
    for microbatch, stage in itertools.product(range(len(batches)), stages):
        mine = (stage.first_layer, stage.end_layer)
        if way != "keep":
            getattr(stage, {"offload": "reload", "recompute": "recompute"}[way])(microbatch, mine)
    for microbatch in range(len(batches)):
        backwards(stages, microbatch, "backward" if fused else "backward_input")
    if not fused:
        held = [len(list(stages[-1]._passes[microbatch].store.storages())) for microbatch in range(len(batches))]
        assert (len(set(held)) > 1) == (config != {"experts": "batched_mm"})  # what the weight gradients will read
        for stage, microbatch in itertools.product(stages, range(len(batches))):
            stage.backward_weight(microbatch)
    expected, gradients = plain(name, config)
    assert losses == pytest.approx(expected)
    found = [p.grad for layer in layers for p in layer.parameters()]
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert all(stage.meter.current_bytes == 0 for stage in stages)


def test_layers_that_need_data_are_traced_on_the_data():
    layers, batches = made("routed", {})
    bundles = trace_bundles(layers, batches[0][:1], batches[0][1])
    vectors = ((2, routed_models.LENGTH, routed_models.WIDTH), torch.float32)
    assert [bundle.parts for bundle in bundles[1:]] == [*[(vectors, ((1,), torch.float32))] * 4, (((), torch.float32),)]
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())


def test_a_gradient_of_stride_zero_enters_a_bundle():
    bundle = Bundle((((3,), torch.float32), ((1,), torch.float32)))
    gradients = torch.randn(3), torch.ones(()).expand(1)
    assert gradients[1].stride() == (0,)
    carried = bundle.cut(bundle.join(gradients))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(carried, gradients, strict=True))


@pytest.mark.runtime
@pytest.mark.parametrize(("name", "config"), MODELS[:2])
def test_a_routed_model_is_measured_planned_and_trained(name, config):
    model = Model(
        builder=f"tests.routed_models:{name}", config=config, microbatch_size=2, sequence_length=routed_models.LENGTH
    )
    names = models.layer_names(model)
    assert len(names) == 5
    assert len(set(names)) == 3
    profile = measure(MeasureOptions(devices=2, samples=2, of=model), lambda *_: None)
    options = Options(mem_bytes=10**9, microbatches=4, method="zb-h1")
    report = run(compile_schedule(profile, options).schedule, steps=1, data_paths=[text.default_path()], check=True)
    assert report.check is not None
    assert report.check.ok, report.check
