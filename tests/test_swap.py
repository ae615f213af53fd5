"""Another schedule between two steps: losses, gradients, weights and optimizer state are as without a swap."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("torch")
import torch
from test_runtime_library import RANGES, alone, batch, builders, microbatch, plan, start_ranks  # noqa: F401  (a fixture)
from torch import nn

import runtime_torch
from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch import conform
from runtime_torch.swap import is_same_cut, moves

TRAIN = """
import sys
sys.path[:0] = sys.argv[1:]
import torch, torch.distributed as dist
from functools import partial
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import runtime_torch, test_runtime_library as case
from optpipe_compiler.documents import ir
from optpipe_compiler.errors import BadInput, RunFailed

dist.init_process_group("gloo")
torch.set_num_threads(1)
STEPS = 6

def train(schedules, group=None, prepare=None, rank=None, data=0):
    '''Losses by step, and this rank's weights, gradients and optimizer state after the last, by name.'''
    rank = dist.get_rank() if rank is None else rank
    torch.manual_seed(data)
    shapes = case.microbatch()
    stages = runtime_torch.build_stages(schedules[0], case.builders(), rank, "cpu", prepare=prepare, **shapes)
    runner = runtime_torch.Runner(schedules[0], stages, group=group)
    module = stages.module
    matrices = [(name, p) for name, p in module.named_parameters() if p.dim() > 1]
    vectors = [(name, p) for name, p in module.named_parameters() if p.dim() == 1]
    named = len(vectors) > 0  # torch gives an empty group no names
    optimizer = torch.optim.AdamW([
        {"params": matrices if named else [p for _, p in matrices], "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ], lr=0.1)
    for name, p in module.named_parameters():
        p.called = name
    losses, swaps = [], []
    inputs, target = case.batch()
    if data:
        target = (target + data) % 16
    for step in range(STEPS):
        if step and step < len(schedules):
            swaps.append(runner.replace(schedules[step], optimizer))
            assert stages.module is module
            assert runner.schedule is schedules[step]
        result = runner.step(*inputs, target=target)
        losses.append(result.loss)
        if step % 2:  # every second step adds to gradients that may have moved
            optimizer.step()
            optimizer.zero_grad()
    runner.eval(*inputs, target=target)
    runner.step(*inputs, target=target)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in module.parameters()}
    names = {p: name for name, p in module.named_parameters()}
    assert all(p.called == name for p, name in names.items())
    known = [g for g in optimizer.param_groups if "param_names" in g]
    assert all([names[p] for p in g["params"]] == g["param_names"] for g in known)
    order = [id(p) for p in module.parameters()]  # a state dict of the optimizer fits one that is made anew
    for group in optimizer.param_groups:
        assert [id(p) for p in group["params"]] == sorted(map(id, group["params"]), key=order.index)
    assert len(known) == 2 or dist.get_world_size() == 3
    state = {}
    for name, p in module.named_parameters():
        decay = next(g["weight_decay"] for g in optimizer.param_groups if any(q is p for q in g["params"]))
        state[name.replace("module.", "")] = [p.detach(), p.grad, decay, *optimizer.state[p].values()]
    return losses, state, swaps

def together(found, group=None):
    losses, state, swaps = found
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, (losses, state), group=group)
    merged = {}
    for _, part in parts:
        assert not merged.keys() & part.keys()
        merged |= part
    return [next(loss for loss in step if loss is not None) for step in zip(*(one for one, _ in parts))], merged

def assert_equal(found, wanted):
    assert found[0] == wanted[0], (found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    for name, tensors in wanted[1].items():
        for a, b in zip(found[1][name], tensors, strict=True):
            assert a == b if isinstance(a, float) else torch.equal(a, b), name
"""

ORDERS = (
    TRAIN
    + """
first, *others = [case.plan((0, 1), fused=False, ranges=ranges) for ranges in case.RANGES.values()]
wanted = together(train([first]))
found = train([first, *others, first, others[0]])
assert_equal(together(found), wanted)
assert all(swap.moved_bytes == swap.moved_layers == 0 for swap in found[2])
dist.destroy_process_group()
"""
)

PLACEMENTS = (
    TRAIN
    + """
world = dist.get_world_size()
chosen = [(0, 1), (0, 1, 1, 0), (1, 0), (0, 1, 0, 1)] if world == 2 else [(0, 1, 2, 1), (2, 0, 1, 0), (1, 0, 2, 2)]
plans = [case.plan(one, fused=False, ranges=case.RANGES["keep"]) for one in chosen]
wanted = together(train(plans[:1]))
found = train([*plans, plans[0]])
assert_equal(together(found), wanted)
assert any(swap.moved_bytes for swap in found[2])
dist.destroy_process_group()
"""
)

REPLICAS = (
    TRAIN
    + """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
pipeline, data = mesh.get_group("pipeline"), mesh.get_group("data")
plans = [case.plan(one, fused=False) for one in ((0, 1), (0, 1, 1, 0), (1, 0))]
wrap = partial(DistributedDataParallel, process_group=data)
here = {"rank": mesh.get_local_rank("pipeline"), "data": mesh.get_local_rank("data")}
place = {"group": pipeline, "prepare": wrap, **here}
wanted = together(train(plans[:1], **place), pipeline)
assert_equal(together(train(plans, **place), pipeline), wanted)
place["prepare"] = partial(fully_shard, mesh=mesh["data"])
same = case.plan((0, 1), fused=False, ranges=case.RANGES["recompute"])
wanted = train(plans[:1], **place)
found = train([plans[0], same], **place)
assert found[0] == wanted[0]
try:
    train(plans, **place)
except BadInput as error:
    said = str(error)
else:
    raise AssertionError("moved")
assert "has parts in FSDP2 or DDP, which cannot move" in said, said
dist.destroy_process_group()
"""
)

UNLIKE_REPLICAS = (
    TRAIN
    + """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
rank, replica = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
plans = [case.plan(one, fused=False) for one in ((0, 1), (0, 1, 1, 0), (1, 0))]
wrap = partial(DistributedDataParallel, process_group=mesh.get_group("data"))
stages = runtime_torch.build_stages(plans[0], case.builders(), rank, "cpu", prepare=wrap, **case.microbatch())
runner = runtime_torch.Runner(plans[0], stages, group=mesh.get_group("pipeline"))
inputs, target = case.batch()
before = runner.step(*inputs, target=target).loss
try:
    runner.replace(plans[1 + replica], (), group=dist.group.WORLD)
except RunFailed as error:
    said = str(error)
else:
    raise AssertionError("moved")
assert "rank 2 has another schedule than rank 0: digest" in said, said
assert runner.schedule is plans[0]
assert runner.step(*inputs, target=target).loss == before
assert runner.replace(plans[2], (), group=dist.group.WORLD).moved_layers == 4
dist.destroy_process_group()
"""
)

REFUSED = (
    TRAIN
    + """
rank = dist.get_rank()
plans = [case.plan(one, fused=False) for one in ((0, 1), (1, 0))]
stages = runtime_torch.build_stages(plans[0], case.builders(), rank, "cpu", **case.microbatch())
runner = runtime_torch.Runner(plans[0], stages)
inputs, target = case.batch()
before = runner.step(*inputs, target=target).loss
head = stages.module["3"] if rank == 1 else torch.nn.Linear(1, 1)
groups = [{"params": [p]} for p in stages.module.parameters()]
masters = [p.detach().double() for p in stages.module.parameters()]
both = [p.detach().requires_grad_() for p in masters] + list(stages.module.parameters())
adam = torch.optim.AdamW

class Keeper(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params)
        self.copies = {p: [p.detach().clone()] for p in self.param_groups[0]["params"]}

class Wrapper(torch.optim.Optimizer):
    '''Steps by another one, as ZeroRedundancyOptimizer does.'''

    def __init__(self, params):
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"])

class Special(torch.nn.Parameter):
    pass

def subclass(head):
    head.mine = Special(torch.ones(2))

def sparse(head):
    head.mine = torch.nn.Parameter(torch.ones(2))
    head.mine.grad = torch.zeros(2).to_sparse()

def quantized(head):
    head.mine = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)

def sharing(head):
    head.register_buffer("all", torch.zeros(4))
    head.register_buffer("some", head.all[1:])

def parametrized(head):
    return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))

class Unwilling:
    def __reduce__(self):
        raise RuntimeError("only through state_dict()\\nsee elsewhere")

for broken, schedule, optimizer, word in (
    (None, plans[1], None, "expected replace(schedule, optimizer)"),
    (lambda: None, plans[1], (), "layer 3 cannot move"),
    (Unwilling(), plans[1], (), "layer 3 cannot move: only through state_dict()"),
    (subclass, plans[1], (), "layer 3 cannot move: mine is of the class Special, expected a plain tensor"),
    (sparse, plans[1], (), "layer 3 cannot move: the gradient of mine is sparse, expected a plain tensor"),
    (quantized, plans[1], (), "layer 3 cannot move: a tensor that it or the optimizer keeps is quantized"),
    (sharing, plans[1], (), "layer 3 cannot move: all and some share memory, expected each to have its own"),
    (None, case.plan((0, 1), fused=rank == 0), None, "rank 1 has another schedule than rank 0"),
    (None, plans[1], adam(groups[:rank + 1]), "other optimizers (groups) than rank 0: AdamW (2), not AdamW (1)"),
    (None, plans[1], adam(groups) if rank == 0 else (), "rank 1 has other optimizers (groups) than rank 0: none, not"),
    (None, plans[1], adam(both[len(masters):], lr=0.1 * (1 + rank)), "['lr'] is 0.2 on rank 1 and 0.1 on rank 0"),
    (None, plans[1], adam(masters), "is in no optimizer, and AdamW has tensors of no layer"),
    (None, plans[1], adam(both), "AdamW has a tensor of no layer with the shape of its parameter"),
    (None, plans[1] if rank == 0 else "there", (), "schedule is 'there', expected a schedule"),
    (None, plans[1], () if rank == 0 else [3], "optimizer[0] is 3, expected one of torch"),
    (None, plans[1], Keeper(stages.module.parameters()) if rank else (), "cannot move: Keeper has a tensor with the"),
    (None, plans[1], Wrapper(stages.module.parameters()), "cannot move: Wrapper has its parameter"),
    ("compiled", plans[1], (), "layer 3 cannot move: it, or a module in it, is compiled by its compile()"),
    (parametrized, plans[1], (), "layer 3 cannot move: broken is parametrized (torch.nn.utils.parametrize), and so"),
    ("hook", plans[1], (), "layer 3 cannot move: its parameter logits.weight has a hook"),
):
    head._modules.pop("broken", None)
    head.broken = broken
    for name in ("mine", "all", "some"):
        if hasattr(head, name):
            delattr(head, name)
    if broken in (subclass, sparse, quantized, sharing, parametrized):
        head.broken = broken(head)
    head._compiled_call_impl = None
    if broken == "compiled":
        head.compile(backend="eager")
    if broken == "hook" and rank == 1:
        head.logits.weight.register_hook(torch.neg)
    weights = [p.clone() for p in stages.module.parameters()]
    try:
        runner.replace(schedule, optimizer)
    except Exception as error:
        assert word in str(error) and "elsewhere" not in str(error), (rank, error)
    else:
        raise AssertionError(word)
    assert runner.schedule is plans[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, stages.module.parameters(), strict=True))
assert runner.step(*inputs, target=target).loss == before
dist.destroy_process_group()
"""
)


VIEWS = (
    TRAIN
    + """
class Conjugated(torch.nn.Linear):
    def __init__(self):
        super().__init__(case.HIDDEN, case.HIDDEN)
        self.register_buffer("turn", torch.full((case.HIDDEN,), 1 + 2j).conj())

    def forward(self, x):
        return super().forward(x) + (self.turn * 1j).real

makers = [partial(case.seeded, i, make) for i, make in enumerate([
    partial(torch.nn.Embedding, 16, case.HIDDEN), Conjugated, Conjugated, partial(case.Scores, case.HIDDEN, 16)
])]
(tokens, _), target = case.batch()
plans = [case.plan(one) for one in ((0, 1), (1, 0))]
stages = runtime_torch.build_stages(plans[0], makers, dist.get_rank(), "cpu", inputs=[tokens[:2]], target=target[:2])
runner = runtime_torch.Runner(plans[0], stages)
before = runner.step(tokens, target=target).loss
assert runner.replace(plans[1], ()).moved_layers == 4
after = runner.step(tokens, target=target).loss
losses = [None] * 2
dist.all_gather_object(losses, (before, after))
assert losses[0][1] == losses[1][0], losses
dist.destroy_process_group()
"""
)


WIDE = (
    TRAIN
    + """
def made(index):
    layer = case.seeded(index, [partial(torch.nn.Embedding, 16, 8), *[partial(torch.nn.Linear, 8, 8)] * 2,
                                partial(case.Scores, 8, 16)][index]).bfloat16()
    for parameter in layer.parameters():
        parameter.grad_dtype = torch.float32
    return layer

(tokens, _), target = case.batch()
plans = [case.plan(one) for one in ((0, 1), (1, 0))]
makers = [partial(made, index) for index in range(4)]
stages = runtime_torch.build_stages(plans[0], makers, dist.get_rank(), "cpu", inputs=[tokens[:2]], target=target[:2])
runner = runtime_torch.Runner(plans[0], stages)
for step in range(2):
    runner.step(tokens, target=target)
    gradients = {name: p.grad.clone() for name, p in stages.module.named_parameters()}
    assert all(one.dtype == torch.float32 for one in gradients.values())
    found = [None] * 2
    dist.all_gather_object(found, gradients)
    assert step or not runner.replace(plans[1], ()).moved_layers < 4
    was = before if step else found[0] | found[1]
    before = found[0] | found[1]
    for name, gradient in before.items():
        assert torch.equal(gradient, was[name] * (1 + step)), name
dist.destroy_process_group()
"""
)


BROKEN = (
    TRAIN
    + """
rank = dist.get_rank()
plans = [case.plan(one) for one in ((0, 1), (1, 0))]
fails_on = None

class Fragile(case.Block):
    def __setstate__(self, state):
        if fails_on == rank:
            raise ValueError("not on this rank")
        super().__setstate__(state)

makers = [partial(case.seeded, i, make) for i, make in enumerate([case.Embed, Fragile, Fragile, case.Head])]
for where in range(2):
    fails_on = None
    stages = runtime_torch.build_stages(plans[0], makers, rank, "cpu", **case.microbatch())
    runner = runtime_torch.Runner(plans[0], stages)
    fails_on = where
    try:
        runner.replace(plans[1], ())
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(where)
    wanted = "ValueError: not on this rank"
    assert said == (wanted if rank == where else f"RunFailed: rank {where}: {wanted}"), said
dist.destroy_process_group()
"""
)


@pytest.mark.runtime
@pytest.mark.parametrize(
    ("code", "world"),
    [
        (WIDE, 2),
        (VIEWS, 2),
        (ORDERS, 2),
        (PLACEMENTS, 2),
        (PLACEMENTS, 3),
        (REPLICAS, 4),
        (UNLIKE_REPLICAS, 4),
        (REFUSED, 2),
        (BROKEN, 2),
    ],
    ids=[
        "wide",
        "views",
        "orders",
        "placements",
        "placements of three",
        "replicas",
        "replicas with other schedules",
        "refused",
        "broken",
    ],
)
def test_training_goes_on_as_without_a_swap(code, world):
    for rank in start_ranks(code, world=world):
        _, errors = rank.communicate(timeout=200)
        assert rank.returncode == 0, errors


def test_what_moves_is_every_layer_with_another_owner():
    before, after = plan((0, 1)), plan((0, 1, 1, 0))
    assert moves(before, after) == [(1, 0, 1), (3, 1, 0)]
    assert not is_same_cut(before, after)
    assert is_same_cut(before, plan((0, 1), fused=True))


def test_a_schedule_of_another_size_is_refused(alone):  # noqa: F811
    schedule = plan((0, 0))
    runner = runtime_torch.Runner(schedule, runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch()))
    setup = msgspec.structs.replace(schedule.setup, microbatches=3)
    with pytest.raises(BadInput, match="for 3 microbatches, expected 2"):
        runner.replace(msgspec.structs.replace(schedule, setup=setup))


def test_stages_that_are_whole_modules_keep_their_placement_and_are_not_cut(alone):  # noqa: F811
    schedule = plan((0, 0))
    modules = {0: nn.Linear(4, 4), 1: nn.Sequential(nn.Linear(4, 4))}
    stages = runtime_torch.wrap_stages(schedule, modules, 0, "cpu")
    runner = runtime_torch.Runner(schedule, stages, lambda layer: ((2, 4), torch.float32))
    runner.replace(plan((0, 0), ranges=RANGES["recompute"]))
    part = plan((0, 0), ranges=lambda stage, microbatch: [("recompute", 2 * stage, 2 * stage + 1)])
    with pytest.raises(BadInput, match="is one module, but the schedule has recompute:0:0:0-1"):
        runner.replace(part)
    with pytest.raises(BadInput, match="the stages are whole modules"):
        runner.replace(plan((0,)))


def test_a_runner_that_was_left_half_replaced_takes_no_step(alone, monkeypatch):  # noqa: F811
    inputs, target = batch()
    runner = runtime_torch.Runner(
        plan((0, 0)), runtime_torch.build_stages(plan((0, 0)), builders(), 0, "cpu", **microbatch())
    )

    def full(*_):
        raise RuntimeError("no memory is left")

    monkeypatch.setattr("runtime_torch.runner.restaged", full)
    with pytest.raises(RuntimeError, match="no memory"):
        runner.replace(plan((0, 0, 0, 0)))
    for call in (lambda: runner.step(*inputs, target=target), lambda: runner.eval(*inputs, target=target)):
        with pytest.raises(RunFailed, match="ended in the middle: make a new one"):
            call()


def test_other_cuts_on_one_rank_move_nothing_and_are_held_against_the_profile(alone, monkeypatch):  # noqa: F811
    monkeypatch.setattr(conform, "_SLACK_BYTES", 0)
    inputs, target = batch()
    schedule = plan((0, 0))
    stages = runtime_torch.build_stages(schedule, builders(), 0, "cpu", **microbatch())
    runner = runtime_torch.Runner(schedule, stages)
    loss = runner.step(*inputs, target=target).loss
    assert runner.replace(plan((0, 0, 0, 0))).moved_layers == 0
    assert len(stages) == 4
    assert runner.step(*inputs, target=target).loss == loss
    runner.replace(plan((0, 0), saved=1))
    runner.replace(plan((0,), saved=1))
    with pytest.raises(BadInput, match="its profile says 4: more than 5% above"):
        runner.step(*inputs, target=target)
