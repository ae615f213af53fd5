"""Tied weights: shared on one device, copies with one gradient on several, equal from the first step to the last."""

from __future__ import annotations

import copy
import json
import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")
import test_runtime_library as case
import torch
from test_runtime_library import alone, start_ranks  # noqa: F401 - a fixture
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import runtime_torch
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.profile import Model
from optpipe_compiler.errors import BadInput, RunFailed
from optpipe_torch.launch.run import run
from optpipe_torch.profiler.measure import MeasureOptions, measure
from runtime_torch import ties

TIE = ("0.tokens.weight", "3.logits.weight")
PLACEMENTS = {"linear": (0, 1), "v": (0, 1, 1, 0), "loop": (0, 1, 0, 1), "one device": (0, 0)}


def draw(step, replica=0):
    """All microbatches of a step."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    tokens, target = torch.randint(16, (2, 2 * case.MICROBATCHES, case.LENGTH), generator=generator)
    return (tokens, torch.rand(2 * case.MICROBATCHES, case.LENGTH, generator=generator) < 0.7), target


def whole():
    """The model without a pipeline, by layer."""
    layers = nn.ModuleDict({str(index): make() for index, make in enumerate(case.builders())})
    layers["3"].logits.weight = layers["0"].tokens.weight
    return layers


def backward(layers, step, replicas=1):
    """Accumulate the mean gradients of a step."""
    for replica in range(replicas):
        inputs, target = draw(step, replica)
        for microbatch in range(case.MICROBATCHES):
            parts = tuple(part.tensor_split(case.MICROBATCHES)[microbatch] for part in inputs)
            for index in range(case.LAYERS - 1):
                parts = layers[str(index)](*parts)
            loss = layers["3"](*parts, target.tensor_split(case.MICROBATCHES)[microbatch])
            (loss / case.MICROBATCHES / replicas).backward()


def assert_tied_gradients(module, layers):
    """Those of the tied parameter, under either name."""
    for name in TIE:
        try:
            parameter = module.get_parameter(name)
        except AttributeError:
            continue
        torch.testing.assert_close(parameter.grad, layers.get_parameter(TIE[0]).grad, msg=name)


@pytest.mark.parametrize("ranges", case.RANGES.values(), ids=case.RANGES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("placement", [(0,), (0, 0)], ids=["one stage", "two stages"])
def test_layers_of_one_device_share_the_parameter(alone, placement, fused, ranges):  # noqa: F811
    ranges = ranges if len(placement) == 2 else lambda stage, microbatch: []
    schedule = case.plan(placement, fused=fused, ranges=ranges)
    stages = runtime_torch.build_stages(schedule, case.builders(), 0, "cpu", **case.microbatch(), ties=[TIE])
    assert stages.module["0"].tokens.weight is stages.module["3"].logits.weight
    layers, (inputs, target) = whole(), draw(0)
    runtime_torch.Runner(schedule, stages).step(*inputs, target=target)
    backward(layers, 0)
    wanted = dict(layers.named_parameters())
    found = dict(stages.module.named_parameters())
    assert set(found) == set(wanted)
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=name)


@pytest.mark.parametrize(
    ("placement", "fused", "parts"), [((0,), True, 1), ((0,), False, 2), ((0, 0), True, 2), ((0, 0), False, 2)]
)
def test_a_hook_of_a_tied_parameter_sees_the_part_of_each_stage(alone, placement, fused, parts):  # noqa: F811
    schedule = case.plan(placement, fused=fused)
    stages = runtime_torch.build_stages(schedule, case.builders(), 0, "cpu", **case.microbatch(), ties=[TIE])
    weight, seen = stages.module["0"].tokens.weight, []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    inputs, target = draw(0)
    runtime_torch.Runner(schedule, stages).step(*inputs, target=target)
    assert len(seen) == parts * case.MICROBATCHES
    torch.testing.assert_close(sum(seen), weight.grad)


def test_layers_that_are_given_as_modules_are_seen_to_share(alone):  # noqa: F811
    layers = [make() for make in case.builders()]
    layers[3].logits.weight = layers[0].tokens.weight
    schedule = case.plan((0, 0))
    stages = runtime_torch.build_stages(schedule, layers, 0, "cpu", **case.microbatch())
    assert stages.module["0"].tokens.weight is stages.module["3"].logits.weight
    assert len(list(stages.module.parameters())) == len(list(whole().parameters()))
    apart = runtime_torch.build_stages(schedule, case.builders(), 0, "cpu", **case.microbatch())
    assert apart.module["0"].tokens.weight is not apart.module["3"].logits.weight


def test_a_state_dict_that_is_assigned_parts_what_is_tied_which_is_said(alone):  # noqa: F811
    schedule, (inputs, target) = case.plan((0, 0)), draw(0)
    stages = runtime_torch.build_stages(schedule, case.builders(), 0, "cpu", **case.microbatch(), ties=[TIE])
    runner = runtime_torch.Runner(schedule, stages)
    stages.module.load_state_dict(stages.module.state_dict())
    runner.step(*inputs, target=target)
    stages.module.load_state_dict(copy.deepcopy(stages.module.state_dict()), assign=True)
    with pytest.raises(
        RunFailed, match=r"3.logits.weight: the layers of this rank have 2 parameters, expected 1: they"
    ):
        runner.step(*inputs, target=target)


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
def test_copies_of_which_one_alone_was_loaded_are_refused(alone, wrapped):  # noqa: F811
    """As files of tied models have one of the names; where layers share the parameter that is enough."""
    schedule, (inputs, target) = case.plan((0, 0)), draw(0)
    shard = partial(fully_shard, mesh=init_device_mesh("cpu", (1,)))
    prepare = nn.parallel.DistributedDataParallel if wrapped == "ddp" else shard
    stages = runtime_torch.build_stages(
        schedule, case.builders(), 0, "cpu", **case.microbatch(), ties=[TIE], prepare=prepare
    )
    runner = runtime_torch.Runner(schedule, stages)
    copies = [
        one for name, one in stages.module.named_parameters() if name.endswith(("tokens.weight", "logits.weight"))
    ]
    with torch.no_grad():
        copies[0].mul_(0.5)
    with pytest.raises(BadInput, match=r"^0.tokens.weight = 3.logits.weight: tied, but the layers have other values"):
        runner.step(*inputs, target=target)
    with torch.no_grad():
        copies[1].mul_(0.51)
    runner.step(*inputs, target=target)


def test_copies_that_an_optimizer_changes_in_a_hook_are_refused(alone):  # noqa: F811
    """FSDP2 calls such hooks once, behind the last backward, when a copy has the gradient of its own layer alone."""
    schedule, (inputs, target) = case.plan((0, 0)), draw(0)
    data = init_device_mesh("cpu", (1,))
    stages = runtime_torch.build_stages(
        schedule, case.builders(), 0, "cpu", **case.microbatch(), ties=[TIE], prepare=partial(fully_shard, mesh=data)
    )
    runner = runtime_torch.Runner(schedule, stages)
    runner.step(*inputs, target=target)
    for parameter in stages.module.parameters():
        optimizer = torch.optim.SGD([parameter])
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with pytest.raises(RunFailed, match=r"3.logits.weight: tied, and one of the copies was changed within a step"):
        runner.step(*inputs, target=target)


@contextmanager
def refusing(module, is_on):
    """Within, all forwards of a stage's layers fail, if that is on."""

    def fail(*_):
        if is_on:
            raise ZeroDivisionError("on purpose")

    handles = [layer.register_forward_pre_hook(fail) for layer in module.children()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


RANK = """
import sys
sys.path[:0] = sys.argv[3:]
import torch, torch.distributed as dist
import runtime_torch, test_ties as case
from optpipe_compiler.errors import RunFailed
from test_runtime_library import builders, microbatch

dist.init_process_group("gloo")
torch.set_num_threads(1)
schedule, rank = runtime_torch.load_schedule(sys.argv[1]), dist.get_rank()
if sys.argv[2] == "functions":
    stages = runtime_torch.build_stages(schedule, builders(), rank, "cpu", **microbatch(), ties=[case.TIE])
else:
    stages = runtime_torch.build_stages(schedule, list(case.whole().values()), rank, "cpu", **microbatch())
runner = runtime_torch.Runner(schedule, stages)
layers = case.whole()
optimizers = [torch.optim.AdamW(module.parameters(), 1e-2) for module in (stages.module, layers)]
for step in range(6):
    inputs, target = case.draw(step)
    if step == 4:  # a step that the trial before it refuses leaves gradients of earlier ones as they are
        try:
            with case.refusing(stages.module.eval(), rank == 1):
                runner.step(*inputs, target=target)
        except (RunFailed, ZeroDivisionError) as error:
            refused = str(error)
        stages.module.train()
        assert refused.endswith("on purpose"), refused
        case.assert_tied_gradients(stages.module, layers)
    runner.step(*inputs, target=target)
    case.backward(layers, step)
    case.assert_tied_gradients(stages.module, layers)
    if step % 3 == 2:  # accumulated over three steps
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 2)
mine = [p for n, p in stages.module.named_parameters(remove_duplicate=False) if n in case.TIE]
found = [None, None]
dist.all_gather_object(found, mine)
copies = [copy for copies in found for copy in copies]
assert len(copies) == 2 and torch.equal(*copies)
counted = [None, None]
dist.all_gather_object(counted, sum(p.numel() for p in stages.unique_parameters()))
assert sum(counted) == sum(p.numel() for p in layers.parameters())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.runtime
@pytest.mark.parametrize("way", ["functions", "modules"])
@pytest.mark.parametrize("placement", ["linear", "v", "loop"])
def test_copies_on_two_devices_start_equal_and_stay_equal(tmp_path, placement, way):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(case.plan(PLACEMENTS[placement], fused=way == "modules")))
    for rank in start_ranks(RANK, str(path), way):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


WIDE = """
import sys
sys.path[:0] = sys.argv[1:]
import torch, torch.distributed as dist
import runtime_torch, test_runtime_library as case

class Sometimes(torch.nn.Linear):
    is_used = False
    def forward(self, x):
        return super().forward(x) if self.is_used else x * 1

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
torch.manual_seed(0)
layers = [torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), Sometimes(8, 8), case.Scores(8, 16)]
layers[2].weight = layers[1].weight
for parameter in torch.nn.ModuleList(layers).bfloat16().parameters():
    parameter.grad_dtype = torch.float32
(tokens, _), target = case.batch()
schedule = case.plan((0, 1))
stages = runtime_torch.build_stages(schedule, layers, rank, "cpu", inputs=[tokens[:2]], target=target[:2])
runner = runtime_torch.Runner(schedule, stages)
for is_used in (False, True):
    layers[2].is_used = is_used
    runner.step(tokens, target=target)
    found = [None, None]
    dist.all_gather_object(found, stages.module.get_parameter(f"{1 + rank}.weight").grad)
    assert found[0].dtype == torch.float32 and torch.equal(*found) and found[0].any()
dist.destroy_process_group()
"""


@pytest.mark.runtime
def test_gradients_of_another_dtype_are_summed_where_one_copy_has_none():
    for rank in start_ranks(WIDE):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


UNUSED = """
import sys
sys.path[:0] = sys.argv[1:]
import torch, torch.distributed as dist
import runtime_torch, test_runtime_library as case

class Sometimes(torch.nn.Linear):
    is_used = True
    def forward(self, x):
        return super().forward(x) if self.is_used else x * 1

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
shared = Sometimes(8, 8)
layers = [torch.nn.Embedding(16, 8), shared, shared, case.Scores(8, 16)]
(tokens, _), target = case.batch()
schedule = case.plan((0, 1))
stages = runtime_torch.build_stages(schedule, layers, dist.get_rank(), "cpu", inputs=[tokens[:2]], target=target[:2])
runner = runtime_torch.Runner(schedule, stages)
copies = list(stages.module[str(1 + dist.get_rank())].parameters())
runner.step(tokens, target=target)
kept = [copy.grad.clone() for copy in copies]
shared.is_used = False
runner.step(tokens, target=target)
assert all(torch.equal(copy.grad, one) for copy, one in zip(copies, kept, strict=True))
stages.module.zero_grad()
runner.step(tokens, target=target)
assert [copy.grad for copy in copies] == [None, None]
dist.destroy_process_group()
"""


@pytest.mark.runtime
def test_copies_that_no_microbatch_used_have_no_gradient():
    for rank in start_ranks(UNUSED):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


REPLICAS = """
import sys
sys.path[:0] = sys.argv[2:]
from functools import partial
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
import runtime_torch, test_ties as case
from test_runtime_library import builders, microbatch

dist.init_process_group("gloo")
torch.set_num_threads(1)
schedule = runtime_torch.load_schedule(sys.argv[1])
devices = schedule.setup.devices
mesh = init_device_mesh("cpu", (2, devices), mesh_dim_names=("data", "pipeline"))
DDP = partial(DistributedDataParallel, process_group=mesh.get_group("data"))
layers = case.whole()
case.backward(layers, 0, replicas=2)
wanted = layers.get_parameter(case.TIE[0]).grad
for prepare in (DDP, partial(fully_shard, mesh=mesh["data"])):
    stages = runtime_torch.build_stages(
        schedule,
        builders(),
        mesh.get_local_rank("pipeline"),
        "cpu",
        prepare=prepare,
        ties=[case.TIE],
        **microbatch(),
    )
    runner = runtime_torch.Runner(schedule, stages, group=mesh.get_group("pipeline"))
    inputs, target = case.draw(0, mesh.get_local_rank("data"))
    for times in (1, 2):
        runner.step(*inputs, target=target)
        tied = [p for n, p in stages.module.named_parameters() if n.replace("module.", "") in case.TIE]
        assert len(tied) == sum(str(layer) in stages.module for layer in (0, 3))
        for parameter in tied:
            found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(found, times * wanted)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.runtime
@pytest.mark.parametrize("placement", ["one device", "linear", "v"])
def test_copies_in_ddp_and_fsdp_get_the_mean_over_all_replicas(tmp_path, placement):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(case.plan(PLACEMENTS[placement], fused=False)))
    for rank in start_ranks(REPLICAS, str(path), world=2 * (1 + max(PLACEMENTS[placement]))):
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors


REFUSED = """
import json, sys
sys.path[:0] = sys.argv[3:]
import torch.distributed as dist
import runtime_torch
from test_runtime_library import builders, microbatch

dist.init_process_group("gloo")
schedule, rank = runtime_torch.load_schedule(sys.argv[1]), dist.get_rank()
ties = json.loads(sys.argv[2])[rank]
stages = runtime_torch.build_stages(schedule, builders(), rank, "cpu", ties=ties, **microbatch())
runtime_torch.Runner(schedule, stages)
"""


@pytest.mark.runtime
@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ([[TIE], []], "rank 1 was built with the ties none, rank 0 with 0.tokens.weight = 3.logits.weight"),
        (
            [[("0.tokens.weight", "3.logits.bias")]] * 2,
            "0.tokens.weight = 3.logits.bias: tied, but float32 of shape (16, 8) and float32 of shape (16,)",
        ),
    ],
    ids=["declared on one rank", "other shapes"],
)
def test_ties_that_do_not_fit_are_refused_on_all_ranks(tmp_path, declared, sentence):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(case.plan((0, 1))))
    for rank in start_ranks(REFUSED, str(path), json.dumps(declared)):
        _, errors = rank.communicate(timeout=60)
        assert f"BadInput: {sentence}" in errors


ASSIGNED = """
import sys
sys.path[:0] = sys.argv[2:]
import torch.distributed as dist
import runtime_torch, test_ties as case
from optpipe_compiler.errors import RunFailed
from test_runtime_library import builders, microbatch

dist.init_process_group("gloo")
schedule, rank = runtime_torch.load_schedule(sys.argv[1]), dist.get_rank()
stages = runtime_torch.build_stages(schedule, builders(), rank, "cpu", ties=[case.TIE], **microbatch())
runner = runtime_torch.Runner(schedule, stages)
inputs, target = case.draw(0)
runner.step(*inputs, target=target)
stages.module.load_state_dict(stages.module.state_dict(), assign=True)
try:
    runner.step(*inputs, target=target)
except RunFailed as error:
    said = str(error)
tie = "0.tokens.weight = 3.logits.weight: the layers of this rank have 2 parameters, expected 1"
assert said.startswith("rank 0: " * (rank == 1) + tie), said
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.runtime
def test_a_state_dict_that_is_assigned_is_refused_on_ranks_without_the_tie_too(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(case.plan((0, 1, 1, 0))))
    for rank in start_ranks(ASSIGNED, str(path)):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


FROZEN = """
import sys
sys.path[:0] = sys.argv[2:]
import torch, torch.distributed as dist
import runtime_torch, test_ties as case
from optpipe_compiler.errors import BadInput
from test_runtime_library import builders, microbatch

dist.init_process_group("gloo")
torch.set_num_threads(1)
schedule = runtime_torch.load_schedule(sys.argv[1])
stages = runtime_torch.build_stages(schedule, builders(), dist.get_rank(), "cpu", ties=[case.TIE], **microbatch())
mine = {n: p for n, p in stages.module.named_parameters() if n in case.TIE}
for parameter in mine.values():
    parameter.requires_grad_(False)
runner = runtime_torch.Runner(schedule, stages)
inputs, target = case.draw(0)
runner.step(*inputs, target=target)
for name in case.TIE:
    if name in mine:
        mine[name].requires_grad_(True)
    if name == case.TIE[0]:
        try:
            runner.step(*inputs, target=target)
        except BadInput as error:
            said = str(error)
        assert said.startswith("0.tokens.weight = 3.logits.weight: tied, but trained in some layers and frozen"), said
runner.step(*inputs, target=target)
layers = case.whole()
case.backward(layers, 0)
case.assert_tied_gradients(stages.module, layers)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.runtime
def test_a_tied_parameter_that_is_unfrozen_by_one_of_its_names_is_refused_on_all_ranks(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(case.plan((0, 1, 2, 2))))
    for rank in start_ranks(FROZEN, str(path), world=3):
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("0.words", "a tie names '0.words', which is no parameter, expected 0.tokens.weight"),
        ("7.weight", "a tie names '7.weight', expected a layer among 0, 1, 2, 3"),
    ],
)
def test_a_tie_of_something_else_is_refused(name, sentence):
    with pytest.raises(BadInput, match=f"^{sentence}$"):
        runtime_torch.build_stages(case.plan((0, 1)), case.builders(), 0, "cpu", ties=[(name, TIE[1])])


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (lambda weight: weight.repeat(2, 1), "float32 of shape (32, 8)"),
        (lambda weight: weight.double(), "float64 of shape (16, 8)"),
        (lambda weight: weight.detach(), "float32 of shape (16, 8), frozen"),
    ],
)
def test_parameters_of_several_kinds_on_one_device_are_refused_as_on_several(other, kind):
    layers = [make() for make in case.builders()]
    found = other(layers[3].logits.weight)
    layers[3].logits.weight = nn.Parameter(found.detach(), found.requires_grad)
    sentence = f"0.tokens.weight = 3.logits.weight: tied, but float32 of shape (16, 8) and {kind}"
    with pytest.raises(BadInput, match=f"^{re.escape(sentence)}$"):
        runtime_torch.build_stages(case.plan((0, 0)), layers, 0, "cpu", ties=[TIE])
    with pytest.raises(BadInput, match=f"^{re.escape(sentence)}$"):
        ties.share([TIE], {str(number): layer for number, layer in enumerate(layers)})


@pytest.mark.runtime
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("0.nope", "a tie names '0.nope', which is no parameter, expected 0.weight"),
        ("9.weight", "a tie names '9.weight', expected a layer among 0, 1, 2, 3, 4, 5"),
        ("head.weight", "a tie names 'head.weight', expected a layer among 0, 1, 2, 3, 4, 5"),
    ],
)
def test_a_tie_of_something_else_is_refused_before_anything_is_measured(name, sentence):
    builder = "tests.user_layers:tied_functions"
    model = Model(builder=builder, config={"tied": name}, microbatch_size=2, sequence_length=16)
    said: list[str] = []
    with pytest.raises(BadInput, match=f"^{sentence}$"):
        measure(MeasureOptions(devices=2, samples=2, of=model), lambda what, _: said.append(what))
    assert said == []


def test_ties_with_a_name_in_common_are_one():
    assert ties.merged([("9.a", "0.a"), ("4.b", "10.b"), ("2.a", "9.a")]) == [("0.a", "2.a", "9.a"), ("4.b", "10.b")]


@pytest.mark.runtime
@pytest.mark.parametrize(
    ("builder", "method"),
    [("tied_modules", "zb-h1"), ("tied_functions", "zbv"), ("tied_parts", "zb-h1"), ("tied_parts", "zbv")],
)
def test_a_tied_model_is_measured_planned_checked_and_trained(builder, method):
    model = Model(builder=f"tests.user_layers:{builder}", config={}, microbatch_size=2, sequence_length=16)
    profile = measure(MeasureOptions(devices=2, samples=2, of=model), lambda *_: None)
    schedule = compile_schedule(profile, Options(mem_bytes=10**9, microbatches=4, method=method)).schedule
    report = run(schedule, steps=2, check=True, data_paths=[Path(__file__)])
    assert report.check is not None
    assert report.check.ok, report.check
    for rank in report.ranks:
        assert rank.peak_activation_bytes <= rank.promised_activation_bytes
