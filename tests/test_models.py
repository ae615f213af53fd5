"""The model that `run` trains, and the text that it trains on."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from optpipe_compiler.costs.models import Architecture  # noqa: E402
from optpipe_compiler.documents.profile import Model  # noqa: E402
from optpipe_compiler.errors import BadInput  # noqa: E402
from optpipe_torch.models import known as models  # noqa: E402
from optpipe_torch.models import (  # noqa: E402
    text,
    user_functions,
    vocabulary,
)
from runtime_torch.bundles import bundle_of  # noqa: E402

SMALL = Model(
    builder="gpt",
    config={"layers": 3, "hidden": 32, "heads": 2, "vocab": 256},
    microbatch_size=2,
    sequence_length=16,
    seed=7,
)


def weights(layers: list[nn.Module]) -> list[Any]:
    return [parameter.detach() for layer in layers for parameter in layer.parameters()]


def equal(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def loss_of(layers: list[nn.Module], inputs: Any, targets: Any) -> Any:
    x = inputs
    for layer in layers[:-1]:
        x = layer(x)
    return layers[-1](x, targets)


def test_a_rank_that_builds_only_its_layers_gets_the_same_weights():
    whole = models.build(SMALL)
    assert len(whole) == models.layer_count(SMALL) == 5
    for indices in (range(0, 2), range(2, 5), range(4, 5)):
        assert equal(weights(models.build(SMALL, indices)), weights(whole[indices.start : indices.stop]))
    assert models.build(SMALL, range(2, 2)) == []


def test_layers_are_made_where_they_are_wanted_with_the_same_shapes():
    here, there = models.build(SMALL), models.build(SMALL, None, torch.device("meta"))
    assert {parameter.device.type for parameter in weights(there)} == {"meta"}
    assert [p.shape for p in weights(there)] == [p.shape for p in weights(here)]
    assert equal(weights(models.build(SMALL, None, torch.device("cpu"))), weights(here))


def test_layers_and_seeds_differ():
    first, second = models.build(SMALL, range(1, 3))
    assert not torch.equal(first.ffn.up.weight, second.ffn.up.weight)
    other = models.build(msgspec.structs.replace(SMALL, seed=8), range(1, 2))
    assert not equal(weights([first]), weights(other))


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    models.build(SMALL)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_boundary_is_what_leaves_each_layer(dtype):
    model = msgspec.structs.replace(SMALL, dtype=dtype)
    layers = models.build(model)
    x, target = models.batch(model, text.default_text(), torch.Generator().manual_seed(0), 1)
    for index, layer in enumerate(layers):
        x = layer(x, target) if index == len(layers) - 1 else layer(x)
        assert (tuple(x.shape), x.dtype) == models.bundles(model)[index + 1].boundary


def test_names_say_which_layers_are_alike():
    assert models.layer_names(SMALL) == ["embedding", "block", "block", "block", "head"]


def test_a_batch_is_windows_of_the_text_and_the_bytes_after_each():
    data = bytes(range(256)) * 2
    inputs, targets = models.batch(SMALL, data, torch.Generator().manual_seed(3), 4)
    assert inputs.shape == targets.shape == (4 * 2, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal((inputs + 1) % 256, targets)
    again, _ = models.batch(SMALL, data, torch.Generator().manual_seed(3), 4)
    assert torch.equal(inputs, again)


def test_a_text_of_one_window_is_just_enough():
    inputs, targets = models.batch(SMALL, bytes(range(17)), torch.Generator(), 1)
    assert inputs[0].tolist() == list(range(16))
    assert targets[0].tolist() == list(range(1, 17))
    with pytest.raises(BadInput, match="has 16 bytes, expected more than the sequence length 16"):
        models.batch(SMALL, bytes(16), torch.Generator(), 1)


def test_attention_looks_only_back():
    layers = models.build(SMALL, range(0, 2))
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 9] = 5
    difference = (layers[1](layers[0](tokens)) - layers[1](layers[0](changed))).abs().sum(-1)[0]
    assert difference[:9].max() == 0
    assert difference[9:].min() > 0


def test_training_on_the_shipped_text_lowers_the_loss():
    layers = models.build(SMALL)
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(30):
        loss = loss_of(layers, *models.batch(SMALL, text.default_text(), generator, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.545, abs=0.1)  # ln 256: nothing is known yet
    assert losses[-1] < losses[0] - 1.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "config.heads is 3, expected a divisor of hidden"),
        ({"vocab": 100}, "config.vocab is 100, expected at least 256"),
        ({"layers": 0}, "config.layers is 0, expected an integer of at least 1"),
        ({"hidden": "wide"}, "config.hidden is 'wide', expected an integer"),
    ],
)
def test_a_bad_config_is_refused_by_path(change, message):
    with pytest.raises(BadInput, match=message):
        models.build(msgspec.structs.replace(SMALL, config={**SMALL.config, **change}))


def test_an_unknown_dtype_is_refused():
    with pytest.raises(BadInput, match=r"\$.model.dtype is 'fp64', expected one of fp32, bf16"):
        models.build(msgspec.structs.replace(SMALL, dtype="fp64"))


class Scorer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 256)

    def forward(self, x: Any, target: Any) -> Any:
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), target.flatten())


def user_layers(width: int) -> list[nn.Module]:
    return [nn.Embedding(256, width), nn.Linear(width, width), Scorer(width)]


@pytest.fixture
def user_model(monkeypatch: pytest.MonkeyPatch) -> Model:
    module = ModuleType("optpipe_test_user")
    module.layers = user_layers  # type: ignore[attr-defined]
    module.nothing = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optpipe_test_user", module)
    for name in ("layers", "nothing", "missing"):
        user_functions.allow(f"optpipe_test_user:{name}")
    return msgspec.structs.replace(SMALL, builder="optpipe_test_user:layers", config={"width": 12})


def test_a_users_function_gives_the_layers(user_model):
    whole = models.build(user_model)
    assert len(whole) == models.layer_count(user_model) == 3
    assert equal(weights(models.build(user_model, range(1, 3))), weights(whole[1:]))
    assert models.bundles(user_model)[1].boundary == ((2, 16, 12), torch.float32)
    assert models.bundles(user_model)[3].boundary == ((), torch.float32)
    assert len(set(models.layer_names(user_model))) == 3


def test_layers_that_torch_prints_alike_are_of_one_kind_but_for_the_first_and_the_last(monkeypatch):
    def layers(count: int) -> list[Any]:
        inner: list[Any] = [nn.Linear(12, 12, bias=index != 3) for index in range(count)]
        inner[1].compile(backend="eager")
        inner[4] = torch.compile(inner[4], backend="eager")
        return [nn.Embedding(256, 12), *inner, lambda: nn.Linear(12, 12), Scorer(12)]

    module = ModuleType("optpipe_test_kinds")
    module.layers = layers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optpipe_test_kinds", module)
    user_functions.allow("optpipe_test_kinds:layers")
    model = msgspec.structs.replace(SMALL, builder="optpipe_test_kinds:layers", config={"count": 5})
    linear = ["Linear", "Linear-2", "Linear", "Linear-3", "Linear-4"]
    assert models.layer_names(model) == ["Embedding", *linear, "Linear", "Scorer"]
    assert models.parameter_bytes(model) == [4 * n for n in (3072, 156, 156, 156, 144, 156, 156, 12 * 256 + 256)]


class Unlike(nn.Module):
    """Its attributes say what it costs; torch prints none of them."""

    def __init__(self, number: int, rows: int = 1, dropout: float = 0.1, **attributes: Any) -> None:
        super().__init__()
        self.out, self.number, self.name, self.rate = nn.Linear(12, 12), number, f"layers.{number}", 0.1 * number + 0.1
        self.register_buffer("table", torch.zeros(rows, 12))
        self.drop = nn.Dropout(dropout)
        for name, value in {"window": None, "heads": 4, "again": False, "rate": self.rate, **attributes}.items():
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.drop(self.out(x))


def test_layers_that_cost_otherwise_by_what_torch_does_not_print_are_not_of_one_kind(monkeypatch):
    """`profile` measured the first of them, and took it for all."""
    others: list[dict[str, Any]] = [
        {},
        {},
        {"rows": 2},
        {"again": True},
        {"heads": 2},
        {"window": 8},
        {"rate": 0.0},
        {},
    ]

    def layers(in_eval: int) -> list[Any]:
        inner = [Unlike(number, **one) for number, one in enumerate(others)]
        inner[in_eval].eval()
        return [nn.Embedding(256, 12), *inner, Scorer(12)]

    module = ModuleType("optpipe_test_attributes")
    module.layers = layers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optpipe_test_attributes", module)
    user_functions.allow("optpipe_test_attributes:layers")
    model = msgspec.structs.replace(SMALL, builder="optpipe_test_attributes:layers", config={"in_eval": 1})
    _, first, *inner, _ = models.layer_names(model)
    assert first == inner[-1] == "Unlike"  # whatever their numbers, names and rates are
    assert inner[:-1] == [f"Unlike-{number}" for number in range(2, 8)]
    everyone = {"in_eval": len(others) - 1}
    _, first, second, *_, last, _ = models.layer_names(msgspec.structs.replace(model, config=everyone))
    assert first == second != last


@pytest.mark.parametrize(
    "values",
    [(128, 256, 512, 1024), (8, 16, 24, 32), (1.0, 2.0, 1.0, 2.0), ((8, 0), (16, 0), (24, 0), (32, 0))],
    ids=str,
)
def test_windows_and_capacities_make_layers_unlike(monkeypatch, values):
    """A number that is another one in each layer was taken for its own, a fraction for a rate; tuples did not count."""
    module = ModuleType("optpipe_test_windows")
    module.layers = lambda: [  # type: ignore[attr-defined]
        nn.Embedding(256, 12),
        Unlike(0),
        *(Unlike(number, limit=value) for number, value in enumerate(values, 1)),
        Scorer(12),
    ]
    monkeypatch.setitem(sys.modules, "optpipe_test_windows", module)
    user_functions.allow("optpipe_test_windows:layers")
    model = msgspec.structs.replace(SMALL, builder="optpipe_test_windows:layers", config={})
    assert len(set(models.layer_names(model)[2:-1])) == len(set(values))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_numbers_of_layers_do_not_make_them_unlike(monkeypatch, count):
    module = ModuleType("optpipe_test_numbers")
    module.layers = lambda: [nn.Embedding(256, 12), *map(Unlike, range(count)), Scorer(12)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optpipe_test_numbers", module)
    user_functions.allow("optpipe_test_numbers:layers")
    model = msgspec.structs.replace(SMALL, builder="optpipe_test_numbers:layers", config={})
    assert models.layer_names(model) == ["Embedding", *["Unlike"] * count, "Scorer"]


ARCHITECTURES = {
    "llama": Architecture(
        kind="llama", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=300, qkv_bias=True
    ),
    "gpt2": Architecture(
        kind="gpt2", layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=256, positions=16,
        residual_dropout=0.1,
    ),
    "mixtral": Architecture(
        kind="mixtral", layers=1, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=24, vocab=256, experts=4,
        experts_per_token=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_known_architecture_is_built_layer_by_layer_and_learns(name):
    model = msgspec.structs.replace(SMALL, builder="transformer", config=asdict(ARCHITECTURES[name]))
    layers = models.build(model)
    assert models.layer_names(model) == ["embedding", *["block"] * ARCHITECTURES[name].layers, "head"]
    assert equal(weights(models.build(model, range(1, 2))), weights(layers[1:2]))
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    assert models.parameter_bytes(model) == sizes
    inputs, targets = models.batch(model, text.default_text(), torch.Generator().manual_seed(0), 1)
    x, shapes = inputs, []
    for layer in layers[:-1]:
        x = layer(x)
        shapes.append((tuple(x.shape), x.dtype))
    shapes.append(((), layers[-1](x, targets).dtype))
    assert shapes == [one.boundary for one in models.bundles(model)[1:]]
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=3e-3)
    losses = []
    for _ in range(30):
        loss = loss_of(layers, inputs, targets)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_in_parts_is_the_whole_model(name):
    architecture = replace(ARCHITECTURES[name], embedding_parts=4, head_parts=3, residual_dropout=0.0)
    model = msgspec.structs.replace(SMALL, builder="transformer", config=asdict(architecture))
    layers = models.build(model)
    blocks = ["block"] * architecture.layers
    embedding = [f"embedding.{part}" for part in range(4)]
    assert models.layer_titles(model) == [*embedding, *blocks, "head.0", "head.1", "head.2"]
    assert models.layer_names(model) == [
        "embedding.0", "embedding.1", "embedding.1", "embedding.3", *blocks, "head.0", "head.1", "head.2"
    ]  # fmt: skip
    assert models.parameter_bytes(model) == [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    inputs, target = models.batch(model, text.default_text(), torch.Generator().manual_seed(0), 1)
    flow, borders = (inputs,), [bundle_of(inputs, "")]
    for layer in layers:
        found = layer(*flow, **({"target": target} if layer in layers[-3:] else {}))
        borders.append(bundle_of(found, ""))
        flow = found if isinstance(found, tuple) else (found,)
    assert borders == models.bundles(model)
    joined = vocabulary.whole(layers)
    assert len(joined) == architecture.layers + 2
    x = inputs
    for layer in joined[:-1]:
        x = layer(x)
    loss = joined[-1](x, target=target)
    torch.testing.assert_close(flow[0], loss)
    parameters = [p for layer in layers for p in layer.parameters()]
    for a, b in zip(*(torch.autograd.grad(one, parameters) for one in (flow[0], loss)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": 100}, r"\$.model.config.vocab is 100, expected at least 256"),
        ({"head_parts": 0}, r"\$.model.config.head_parts is 0, expected 1 to the vocabulary \(256\)"),
        ({"positions": 8}, r"\$.model.sequence_length is 16, expected at most the positions of the model \(8\)"),
        ({"hidden": "wide"}, r"\$.model.config: Expected an integer, got a string"),
    ],
)
def test_a_bad_architecture_is_refused_by_path(change, message):
    config = asdict(ARCHITECTURES["gpt2"]) | change
    with pytest.raises(BadInput, match=message):
        models.build(msgspec.structs.replace(SMALL, builder="transformer", config=config))


@pytest.mark.parametrize("builder", ["no.such.module:layers", "optpipe_test_user:none", "json", "gtp", "", ":f"])
def test_a_builder_that_cannot_be_imported_is_refused(user_model, builder):
    with pytest.raises(BadInput, match=r"expected 'gpt' or 'transformer', or an importable package\.module:function"):
        models.build(msgspec.structs.replace(user_model, builder=builder))


def test_a_builder_that_returns_no_list_of_layers_is_refused(user_model):
    with pytest.raises(BadInput, match="returned NoneType, expected a list of layers"):
        models.build(msgspec.structs.replace(user_model, builder="optpipe_test_user:nothing", config={}))


def test_the_shipped_text_is_plain_prose():
    data = text.default_text()
    assert 15_000 <= len(data) <= 20_000
    data.decode("ascii")
    lines = [line for line in data.splitlines() if len(line) > 40]
    assert len(set(lines)) == len(lines)


def test_files_are_read_in_order_and_wrong_ones_are_named(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_bytes(b"a" * 600)
    second.write_bytes(b"b" * 600)
    assert text.read([second, first]) == b"b" * 600 + b"a" * 600
    with pytest.raises(BadInput, match=r"a\.txt: has 600 bytes of text, expected at least 1024"):
        text.read([first])
    with pytest.raises(BadInput, match=r"c\.txt: cannot be read: No such file"):
        text.read([first, tmp_path / "c.txt"])


def test_an_installed_copy_of_the_text_comes_first(tmp_path, monkeypatch):
    installed = tmp_path / "text.txt"
    installed.write_bytes(b"x" * 2000)
    monkeypatch.setattr(text, "_PLACES", (tmp_path / "none.txt", installed))
    assert text.default_text() == b"x" * 2000


def test_a_builder_may_return_functions_of_which_only_the_needed_are_called(monkeypatch):
    made = []

    def layer(index, width):
        if torch.empty(0).device.type != "meta":
            made.append(index)
        return [nn.Embedding(256, width), nn.Linear(width, width), Loss()][index]

    class Loss(nn.Module):
        def forward(self, x, target):
            return x.sum() + target.sum()

    def builder(width):
        return [lambda index=index: layer(index, width) for index in range(3)]

    monkeypatch.setattr(sys.modules[__name__], "lazy_builder", builder, raising=False)
    lazy = Model(builder=f"{__name__}:lazy_builder", config={"width": 4}, microbatch_size=2, sequence_length=3)
    assert [one.boundary for one in models.bundles(lazy)[1:]] == [((2, 3, 4), torch.float32)] * 2 + [
        ((), torch.float32)
    ]
    assert models.layer_count(lazy) == 3
    (first,), (again,) = models.build(lazy, range(1, 2)), models.build(lazy, range(1, 2))
    assert made == [1, 1]
    assert torch.equal(first.weight, again.weight)


GOOD = [nn.Embedding(256, 4), Scorer(4)]


def tokens(generator: Any, samples: int) -> Any:
    return torch.randint(256, (samples, 3), generator=generator)


class Pair(nn.Module):
    def forward(self, x: Any) -> Any:
        return x, x


class Whole(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.argmax(-1)


class PerSample(nn.Module):
    def forward(self, x: Any, target: Any) -> Any:
        return x.mean(dim=(1, 2))


DATA = {
    "a tuple that is none": ((1, 2, 3), "returned a tuple of 3, expected a list of layers, (layers, batch) or (layers"),
    "no ties": ((GOOD, None, ["0.weight"]), "returned the ties ['0.weight'], expected lists of two names or more"),
    "no layers": ([], "returned no layers"),
    "no function": ((GOOD, None), "returned (layers, NoneType), expected a function as second: batch(generator, n)"),
    "no target": ((GOOD, tokens), "batch(generator, 2) returned Tensor, expected (inputs, target)"),
    "a target that is none": (
        (GOOD, lambda g, n: (tokens(g, n), None)),
        "returned NoneType as a target, expected a tensor",
    ),
    "an input that is none": (
        (GOOD, lambda g, n: ([[1]], tokens(g, n))),
        "returned list as an input, expected a tensor",
    ),
    "no inputs": ((GOOD, lambda g, n: ((), tokens(g, n))), "batch(generator, 2) returned no inputs"),
    "other samples": (
        (GOOD, lambda g, n: (tokens(g, 3), tokens(g, n))),
        "batch(generator, 2) returned an input of shape (3, 3), expected a first dimension of 2",
    ),
    "a scalar target": (
        (GOOD, lambda g, n: (tokens(g, n), torch.tensor(1))),
        "returned a target of shape (), expected a first dimension of 2",
    ),
    "data of its own mind": (
        (GOOD, lambda g, n: (torch.rand(n, 3).argsort(), tokens(g, n))),
        "batch drew other values from an equal generator, expected to depend on it alone",
    ),
    "two inputs for one": (
        (GOOD, lambda g, n: ((tokens(g, n), tokens(g, n)), tokens(g, n))),
        "layer 0: cannot be called with the input ((2, 3) torch.int64, (2, 3) torch.int64): ",
    ),
    "two outputs for one": (
        [GOOD[0], Pair(), GOOD[1]],
        "layer 2: cannot be called with what layer 1 returns ((2, 16, 4) torch.float32, (2, 16, 4) torch.float32, ",
    ),
    "no floats": ([GOOD[0], Whole(), *GOOD], "layer 1 returns torch.int64, expected floats, or some among its tensors"),
    "no scalar": ([GOOD[0], PerSample()], "the last layer returns shape (2,), expected the scalar loss"),
}


@pytest.mark.parametrize(
    ("shape", "dtype", "length"),
    [((3,), torch.int64, 3), ((), torch.int64, 1), ((3,), torch.float32, 1), ((3, 8, 8), torch.uint8, 1)],
)
def test_a_sample_of_the_users_data_is_as_long_as_its_tokens_or_one(user_model, monkeypatch, shape, dtype, length):
    found = GOOD, lambda generator, samples: (torch.zeros(samples, *shape, dtype=dtype), torch.zeros(samples))
    monkeypatch.setattr(sys.modules["optpipe_test_user"], "layers", lambda width: found)
    assert models.as_long_as_its_data(user_model).sequence_length == length
    monkeypatch.setattr(sys.modules["optpipe_test_user"], "layers", lambda width: GOOD)
    assert models.as_long_as_its_data(user_model) == user_model


@pytest.mark.parametrize("case", DATA)
def test_what_a_users_function_must_not_return_is_named_in_one_sentence(user_model, monkeypatch, case):
    found, sentence = DATA[case]
    monkeypatch.setattr(sys.modules["optpipe_test_user"], "layers", lambda width: found)
    with pytest.raises(BadInput) as refused:
        [one.boundary for one in models.bundles(user_model)[1:]]
    assert str(refused.value).startswith("--model 'optpipe_test_user:layers': ")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_data_of_a_users_own_is_drawn_per_sample_with_floats_as_the_layers_have_them(dtype):
    model = Model(builder="tests.user_layers:images", config={}, microbatch_size=3, sequence_length=1, dtype=dtype)
    (images,), classes = models.batches(model, b"")(torch.Generator().manual_seed(5), 4)
    assert (images.shape, images.dtype) == ((12, 3, 8, 8), models.DTYPES[dtype])
    assert (classes.shape, classes.dtype) == ((12,), torch.int64)
    (again,), _ = models.batches(model, b"")(torch.Generator().manual_seed(5), 4)
    assert torch.equal(images, again)


def test_layers_that_pass_several_tensors_along_are_known_by_all_of_them():
    model = Model(builder="tests.user_layers:sentences", config={"width": 4}, microbatch_size=2, sequence_length=1)
    inner = (((2, 12, 4), torch.float32), ((2, 12), torch.int64), ((2, 12, 12), torch.bool))
    ids = ((2, 12), torch.int64), *inner[1:]
    assert [bundle.parts for bundle in models.bundles(model)] == [ids, *[inner] * 4, (((), torch.float32),)]
    carried = 4 * (2 * 12 * 4) + 8 * (2 * 12) + 2 * 12 * 12
    assert models.bundles(model)[1].boundary == ((carried // 4,), torch.float32)
    assert models.layer_names(model) == ["Words", *["Attention"] * 3, "Guess"]


def test_a_users_function_is_called_again_only_where_its_layers_are_in_use(monkeypatch):
    """Each question called it, which is slow where it loads weights."""
    calls = []
    module = ModuleType("optpipe_test_calls")

    def layers() -> list[Any]:
        calls.append(len(calls))
        return [nn.Embedding(256, 12), nn.Linear(12, 12), Scorer(12)]

    module.layers = layers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optpipe_test_calls", module)
    user_functions.allow("optpipe_test_calls:layers")
    model = msgspec.structs.replace(SMALL, builder="optpipe_test_calls:layers", config={})
    with models.called_seldom():
        assert len(models.layer_names(model)) == models.layer_count(model) == len(models.parameter_bytes(model))
        models.first_trained(model), models.tied_layers(model), models.bundles(model), models.batches(model, b"")
        assert calls == [0]
        first = models.build(model)
        assert calls == [0]
        assert torch.equal(first[1].weight, models.build(model)[1].weight)
        assert calls == [0, 1]
        nn.init.zeros_(first[1].weight)
        models.layer_names(model)
        assert models.build(msgspec.structs.replace(model, seed=1))[1].weight.any()
        assert calls == [0, 1, 2, 3]
        assert models.build(model)[1].weight.any()
    models.layer_count(model), models.layer_count(model)
    assert calls == list(range(7))
