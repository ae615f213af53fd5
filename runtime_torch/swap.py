"""Another schedule between two steps: what may be swapped, and how layers move to another rank.

A layer moves with its parameters and buffers, what earlier steps left in `.grad`, and what the optimizer keeps for each
parameter. Nothing is changed before all ranks have said that they can.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from optpipe_compiler.errors import BadInput, RunFailed, first_line, of_kind
from runtime_torch import engine
from runtime_torch.replicas import replicated
from runtime_torch.stages import executions, trains
from runtime_torch.together import raised_on_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.documents import ir
    from runtime_torch.execution import StageExecution
    from runtime_torch.stages import Stages

Move = tuple[int, int, int]
"""A layer, the rank that has it, and the rank that gets it."""
TensorKind = tuple[tuple[int, ...], torch.dtype, bool, bool, torch.dtype | None]
"""Shape, dtype, whether it is a parameter, whether it needs a gradient, and the dtype of that."""


@dataclass(frozen=True, slots=True)
class Swap:
    """What `Runner.replace` did."""

    moved_layers: int
    """Over all ranks."""
    moved_bytes: int
    """That this rank sent and received."""
    wall_ns: int


@dataclass(frozen=True, slots=True)
class _Package:
    """A layer on its way: its structure and optimizer state, pickled, and the tensors in it, by number."""

    text: bytes
    kinds: list[TensorKind]


class _Packer(pickle.Pickler):
    """Pickles all but the tensors of one device."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self.device = device
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, one: Any) -> int | None:
        if not isinstance(one, Tensor) or one.device != self.device:
            return None
        if id(one) not in self._numbers:
            self._numbers[id(one)] = len(self.tensors)
            self.tensors.append(one)
        return self._numbers[id(one)]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def moves(before: ir.Schedule, after: ir.Schedule) -> list[Move]:
    """Return the layers that change their rank, in model order; raise BadInput where the schedules do not compare."""
    for name in ("devices", "microbatches", "layers"):
        old, new = getattr(before.setup, name), getattr(after.setup, name)
        if old != new:
            raise BadInput(f"the schedule is for {new} {name}, expected {old}, as the one that it replaces")
    if before.setup.units != after.setup.units:
        raise BadInput(
            "the schedule cuts microbatches into other slices than the one that it replaces, expected the same"
        )
    owners = [_owners(schedule) for schedule in (before, after)]
    if missing := set(range(after.setup.devices)) - set(owners[1]):
        raise BadInput(f"rank {min(missing)} has no stage in the schedule, expected one on every rank")
    return [(layer, *pair) for layer, pair in enumerate(zip(*owners, strict=True)) if pair[0] != pair[1]]


def is_same_cut(before: ir.Schedule, after: ir.Schedule) -> bool:
    """Whether stages are the same layers on the same ranks, with the same selective recompute."""
    old, new = ([(s.device, s.layers, s.selective_layers) for s in one.stages] for one in (before, after))
    return old == new


def several(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return what was given as the optimizer as a list; raise BadInput for another kind."""
    of_kind("optimizer", optimizer, (Optimizer, Sequence, NoneType), "one of torch, a list of them, or () for none")
    found = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    for number, one in enumerate(found):
        of_kind(f"optimizer[{number}]", one, Optimizer, "one of torch")
    return found


def _owners(schedule: ir.Schedule) -> list[int]:
    return [stage.device for stage in schedule.stages for _ in range(*stage.layers)]


class Mover:
    """Takes this rank's part in moving layers; made on every rank, whether it has a part or not."""

    def __init__(self, stages: Stages, rank: int) -> None:
        self._stages = stages
        self.optimizers: Sequence[Optimizer] = ()
        self._rank = rank
        self._device = next(iter(stages.values())).device
        self._packages: dict[int, tuple[_Package, list[Tensor]]] = {}

    @property
    def said(self) -> str:
        """The optimizers in words, with the number of their groups: the same on all ranks where layers move."""
        kinds = [f"{type(one).__name__} ({len(one.param_groups)})" for one in self.optimizers]
        return " and ".join(kinds) or "none"

    @property
    def options(self) -> dict[str, Any]:
        """What groups of the optimizers say of their parameters, such as a learning rate, by where that stands."""
        return {
            f"optimizer[{place}].param_groups[{number}][{name!r}]": _plain(value)
            for place, one in enumerate(self.optimizers)
            for number, group in enumerate(one.param_groups)
            for name, value in group.items()
            if name not in ("params", "param_names")
        }

    def pack(self, wanted: Sequence[Move]) -> dict[int, _Package]:
        """Return what leaves this rank; raise BadInput, naming the layer, where it cannot, or where stages cannot be
        cut so."""
        stages = self._stages
        if stages.are_modules:
            raise BadInput("the stages are whole modules, expected a schedule with the same stages on the same ranks")
        if wanted and (ties := stages.ties.names()):
            raise BadInput(
                f"{' = '.join(ties[0])} are tied, expected a schedule with every layer on the rank where it is"
            )
        for layer, source, _ in wanted:
            if source == self._rank:
                self._packages[layer] = self._packed(layer, stages.module[str(layer)])
        return {layer: package for layer, (package, _) in self._packages.items()}

    def _packed(self, number: int, layer: nn.Module) -> tuple[_Package, list[Tensor]]:
        wrapped = isinstance(layer, DistributedDataParallel)
        if wrapped and self._stages.prepare is None:
            raise BadInput(f"layer {number} is wrapped in DDP, expected build_stages(prepare=...) to wrap it again")
        if not wrapped and replicated(layer):
            raise BadInput(
                f"layer {number} has parts in FSDP2 or DDP, which cannot move, expected a schedule with the same "
                "stages on the same ranks"
            )
        if wrapped and not trains(layer):
            raise BadInput(
                f"layer {number} cannot move: it has no trained parameter now, and DistributedDataParallel, which it "
                "is in, would not take it again"
            )
        inner: nn.Module = layer.module if isinstance(layer, DistributedDataParallel) else layer
        for name, parameter in inner.named_parameters():
            if engine.has_hooks(parameter):
                raise BadInput(f"layer {number} cannot move: its parameter {name} has a hook, which would stay behind")
        for name, module in inner.named_modules():
            if parametrize.is_parametrized(module):
                raise BadInput(
                    f"layer {number} cannot move: {name or 'it'} is parametrized (torch.nn.utils.parametrize), and so "
                    "cannot be pickled"
                )
        if any(map(engine.is_compiled, inner.modules())):
            raise BadInput(
                f"layer {number} cannot move: it, or a module in it, is compiled by its compile(), which would stay "
                "behind, expected torch.compile(module)"
            )
        own = {id(parameter) for parameter in self._stages.module.parameters()}
        kept, others, found = [], self._others(), list(self._aside())
        aside = [(keeper, other) for keeper, other in found if id(other) not in own]
        keepers = {id(other): keeper for keeper, other in found}
        for name, parameter in inner.named_parameters():
            groups = [_kept(optimizer, parameter) for optimizer in self.optimizers]
            if id(parameter) in keepers:
                raise BadInput(
                    f"layer {number} cannot move: {keepers[id(parameter)]} has its parameter {name} in an attribute of "
                    "its own, too, such as a list, or an optimizer that it wraps, where it would stay: expected it in "
                    "param_groups alone"
                )
            if parameter.requires_grad and others and not any(groups):
                raise BadInput(
                    f"layer {number} cannot move: its parameter {name} is in no optimizer, and {others[0][0]} has "
                    "tensors of no layer, such as copies in fp32, which would stay behind"
                )
            for keeper, other in others:
                if other.shape == parameter.shape and other.dtype != parameter.dtype:
                    raise BadInput(
                        f"layer {number} cannot move: {keeper} has a tensor of no layer with the shape of its "
                        f"parameter {name} in {other.dtype}, such as a copy, which would stay behind"
                    )
            for keeper, other in aside:
                if other.shape == parameter.shape:
                    raise BadInput(
                        f"layer {number} cannot move: {keeper} has a tensor with the shape of its parameter {name} in "
                        "an attribute of its own, such as a copy, which would stay behind: expected it in the "
                        "optimizer's state"
                    )
            kept.append((parameter, parameter.grad, vars(parameter), groups))
        file = io.BytesIO()
        packer = _Packer(file, self._device)
        try:
            packer.dump((inner, kept, wrapped, str(number) in self._stages.left))
        except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"layer {number} cannot move: {first_line(error)}") from error
        _refuse_special(number, inner, packer.tensors)
        kinds = [_kind(tensor) for tensor in packer.tensors]
        return _Package(file.getvalue(), kinds), packer.tensors

    def _others(self) -> list[tuple[str, Tensor]]:
        """What optimizers have and no layer of this rank, with the kind of the optimizer."""
        own = {id(parameter) for parameter in self._stages.module.parameters()}
        held = [
            (type(one).__name__, p) for one in self.optimizers for group in one.param_groups for p in group["params"]
        ]
        return [(kind, p) for kind, p in held if id(p) not in own]

    def _aside(self) -> Iterator[tuple[str, Tensor]]:
        """What optimizers have in attributes of their own, with the kind of the optimizer: copies, and parameters that
        they have a second time, outside of their groups."""
        for one in self.optimizers:
            seen = set[int]()
            public = {id(tensor) for tensor in _tensors_in((one.param_groups, one.state, one.defaults), seen)}
            groups = {id(parameter) for group in one.param_groups for parameter in group["params"]}
            found = _tensors_in(vars(one), seen)
            yield from (
                (type(one).__name__, other) for other in found if id(other) in groups or id(other) not in public
            )

    @torch.no_grad()
    def move(
        self,
        wanted: Sequence[Move],
        packages: Mapping[int, _Package],
        group: dist.ProcessGroup | None,
        everyone: dist.ProcessGroup | None,
    ) -> int:
        """Move the layers one after the other; return the bytes that this rank sent and received.

        What fails on a rank is raised on all ranks of `everyone` (replicas of the pipeline included) before the next
        message, or the next layer in DDP: nobody waits for it.
        """
        layers = dict(self._stages.module.items())
        passed = 0
        for layer, source, target in wanted:
            tensors: list[Tensor] = []
            with raised_on_all(everyone, self._device):
                if target == self._rank:
                    tensors = [self._empty(kind) for kind in packages[layer].kinds]
            if source == self._rank:
                passed += _pass_on(self._packages.pop(layer)[1], dist.isend, target, group)
                self._forget(layers.pop(str(layer)))
                self._stages.left.discard(str(layer))
            elif target == self._rank:
                passed += _pass_on(tensors, dist.irecv, source, group)
            found: list[tuple[nn.Module, bool]] = []
            with raised_on_all(everyone, self._device):
                if target == self._rank:
                    found.append(self._unpacked(str(layer), packages[layer], tensors))
            with raised_on_all(everyone, self._device):
                for inner, is_wrapped in found:
                    layers[str(layer)] = self._wrapped(inner) if is_wrapped else inner
        self._stages.module.clear()
        self._stages.module.update({name: layers[name] for name in sorted(layers, key=int)})
        self._put_in_order()
        return passed

    def _put_in_order(self) -> None:
        """Let groups have parameters in the order of the model, as those of an optimizer that is made anew: a state
        dict of an optimizer goes by their places."""
        places = {id(parameter): place for place, parameter in enumerate(self._stages.module.parameters())}
        for group in (group for one in self.optimizers for group in one.param_groups):
            own = [places.get(id(parameter), len(places)) for parameter in group["params"]]
            order = sorted(range(len(own)), key=own.__getitem__)
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [group[key][number] for number in order]

    def _empty(self, kind: TensorKind) -> Tensor:
        shape, dtype, is_parameter, needs_gradient, gradient_dtype = kind
        found = torch.empty(shape, dtype=dtype, device=self._device)
        if not is_parameter:
            return found.requires_grad_(needs_gradient)
        return engine.with_gradients_in(nn.Parameter(found, needs_gradient), gradient_dtype)

    def _unpacked(self, name: str, package: _Package, tensors: Sequence[Tensor]) -> tuple[nn.Module, bool]:
        """Return the layer, and whether it was wrapped."""
        inner, kept, wrapped, was_left = _Unpacker(io.BytesIO(package.text), tensors).load()
        for parameter, gradient, attributes, groups in kept:
            parameter.grad = gradient
            vars(parameter).update(attributes)
            for optimizer, known in zip(self.optimizers, groups, strict=True):
                if known is not None:
                    number, own_name, state = known
                    group = optimizer.param_groups[number]
                    if own_name is not None and ("param_names" in group or not group["params"]):
                        group.setdefault("param_names", []).append(own_name)
                    else:
                        group.pop("param_names", None)
                    group["params"].append(parameter)
                    if state:
                        optimizer.state[parameter] = state
        if was_left:
            self._stages.left.add(name)
        return inner, wrapped

    def _wrapped(self, inner: nn.Module) -> nn.Module:
        assert self._stages.prepare is not None
        with torch.enable_grad():
            return self._stages.prepare(inner)

    def _forget(self, layer: nn.Module) -> None:
        gone = {id(parameter) for parameter in layer.parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                stays = [id(parameter) not in gone for parameter in group["params"]]
                for key in ("params", "param_names"):
                    if key in group:
                        group[key] = [one for one, kept in zip(group[key], stays, strict=True) if kept]
            for parameter in layer.parameters():
                optimizer.state.pop(parameter, None)


def _tensors_in(one: object, seen: set[int]) -> Iterator[Tensor]:
    """Return the tensors in containers and optimizers that were not `seen`."""
    if isinstance(one, Tensor):
        yield one
    elif isinstance(one, Mapping | list | tuple | Optimizer) and id(one) not in seen:
        seen.add(id(one))
        inside = vars(one) if isinstance(one, Optimizer) else one
        for part in inside.values() if isinstance(inside, Mapping) else inside:
            yield from _tensors_in(part, seen)


def _kind(tensor: Tensor) -> TensorKind:
    is_parameter = isinstance(tensor, nn.Parameter)
    gradient_dtype = engine.gradient_dtype(tensor) if is_parameter else None
    return tuple(tensor.shape), tensor.dtype, is_parameter, tensor.requires_grad, gradient_dtype


def _refuse_special(number: int, layer: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Raise BadInput where a tensor of a layer is more than its numbers, which is all that moves."""
    own = dict(layer.named_parameters()) | dict(layer.named_buffers())
    names = {id(tensor): name for name, tensor in own.items()}
    names |= {id(p.grad): f"the gradient of {name}" for name, p in layer.named_parameters() if p.grad is not None}
    for one in tensors:
        name, what = names.get(id(one), "a tensor that it or the optimizer keeps"), None
        if type(one) not in (Tensor, nn.Parameter):
            what = f"is of the class {type(one).__name__}"
        elif one.layout is not torch.strided:
            what = "is sparse"
        elif one.is_quantized:
            what = "is quantized"
        if what is not None:
            raise BadInput(f"layer {number} cannot move: {name} {what}, expected a plain tensor")
    gradients = {id(parameter.grad) for parameter in layer.parameters()}
    spans = sorted((*_span(one), names[id(one)]) for one in tensors if id(one) in names and id(one) not in gradients)
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise BadInput(
                f"layer {number} cannot move: {first} and {second} share memory, expected each to have its own"
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses between which a tensor's numbers are."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _kept(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[int, str | None, dict[str, Any]] | None:
    """Return the number of the parameter's group, its name there, and what the optimizer keeps for it."""
    for number, group in enumerate(optimizer.param_groups):
        for index, one in enumerate(group["params"]):
            if one is parameter:
                name = group["param_names"][index] if "param_names" in group else None
                return number, name, dict(optimizer.state.get(parameter, {}))
    return None


def _pass_on(tensors: Sequence[Tensor], way: Callable[..., Any], peer: int, group: dist.ProcessGroup | None) -> int:
    """Send or receive tensors as bytes, whatever their dtype; return how many."""
    whole = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors if tensor.numel()]
    parts = [tensor.contiguous() for tensor in whole]
    flat = [part.view(-1).view(torch.uint8) for part in parts]
    if flat:
        for work in dist.batch_isend_irecv([dist.P2POp(way, one, group=group, group_peer=peer) for one in flat]):
            work.wait()
    return sum(part.nbytes for part in parts)


def _plain(value: Any) -> Any:
    """Return what tells two values apart, of numbers and words, several of them too; of anything else nothing."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if isinstance(value, int | float | str) else None


def agree_on(
    schedule: ir.Schedule,
    error: Exception | None,
    packages: Mapping[int, _Package],
    optimizers: tuple[str, Mapping[str, Any]],
    group: dist.ProcessGroup | None,
) -> dict[int, _Package]:
    """Compare digests over all ranks, and where layers move `optimizers` (in words, and their options), and return all
    packages; raise on all ranks what kept any of them."""
    mine = getattr(schedule, "digest", ""), None if error is None else str(error), packages, *optimizers
    found: list[Any] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    if error is not None:
        raise error
    for rank, (digest, said, *_) in enumerate(found):
        if said is not None:
            raise BadInput(f"rank {rank} keeps its schedule: {said}")
        if digest != found[0][0]:
            raise RunFailed(f"rank {rank} has another schedule than rank 0: digest {digest}, not {found[0][0]}")
    everyones = {layer: package for _, _, theirs, *_ in found for layer, package in theirs.items()}
    for rank, (_, _, _, theirs, options) in enumerate(found if everyones else ()):
        if theirs != found[0][3]:
            raise BadInput(
                f"layers move to other ranks, and rank {rank} has other optimizers (groups) than rank 0: {theirs}, not "
                f'{found[0][3]}, expected the same on all ranks; a group may be empty: AdamW([{{"params": []}}])'
            )
        for where in dict.fromkeys((*found[0][4], *options)):
            values = [f"{one[where]!r}" if where in one else "not there" for one in (options, found[0][4])]
            if values[0] != values[1]:
                raise BadInput(
                    f"layers move to other ranks, and {where} is {values[0]} on rank {rank} and {values[1]} on rank 0, "
                    "expected the same on all ranks, where a layer's parameters come into the group of the same number"
                )
    return everyones


def restaged(schedule: ir.Schedule, stages: Stages, rank: int) -> dict[int, StageExecution]:
    """Return the rank's stages as the schedule cuts them, of the layers that it has."""
    old = next(iter(stages.values()))
    layers = {int(name): layer for name, layer in stages.module.items()}
    return executions(schedule, layers, rank, old.device, stages.bundles, (old.meter, old.host_meter))
