"""Tied weights: parameters that several layers share, on whichever ranks these layers are.

A tie is a list of names as the state dict has them: `("0.tokens.weight", "9.logits.weight")`. Layers of one rank share
the parameter itself. Layers of different ranks, and layers that FSDP2 or DDP looks after, have a copy each: copies
start equal, and at the end of a step all of them get the sum of the gradients that this step added to any of them, so
that equal optimizers keep them equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch import engine
from runtime_torch.replicas import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Names = tuple[str, ...]
"""The names of one tied parameter."""
SAMPLES = 64
"""Numbers of a tied parameter that are compared in each step."""
MOST_APART = 0.1
"""The share of their norm by which those of two copies may differ: optimizers that round at random let them drift."""


def shared(layers: Mapping[str, nn.Module]) -> list[Names]:
    """Return the ties of layers that have the same parameter already; one name for each layer."""
    found: dict[nn.Parameter, list[str]] = {}
    for prefix, layer in layers.items():
        for name, parameter in layer.named_parameters():
            found.setdefault(parameter, []).append(f"{prefix}.{name}")
    return [tuple(names) for names in found.values() if len(names) > 1]


def merged(ties: Iterable[Sequence[str]]) -> list[Names]:
    """Return the ties with those that have a name in common joined; every tie in the order of the model."""
    groups: list[set[str]] = []
    for tie in ties:
        names = set(tie)
        joined = [group for group in groups if group & names]
        groups = [group for group in groups if not group & names]
        groups.append(names.union(*joined))
    in_order = [tuple(sorted(group, key=_in_model_order)) for group in groups]
    return sorted(in_order, key=lambda tie: _in_model_order(tie[0]))


def _in_model_order(name: str) -> tuple[int, str]:
    prefix, _, rest = name.partition(".")
    return int("".join(filter(str.isdigit, prefix)) or 0), rest


def layer_of(name: str, layers: Iterable[str]) -> str:
    """Return the layer of a parameter that a tie names; BadInput where it is none of `layers`."""
    prefix = name.partition(".")[0]
    if prefix not in (known := list(layers)):
        raise BadInput(f"a tie names {name!r}, expected a layer among {', '.join(known)}")
    return prefix


def named(name: str, layers: Mapping[str, nn.Module]) -> nn.Parameter:
    """Return the parameter that a tie names as the state dict has it; BadInput where there is none."""
    prefix, _, path = name.partition(".")
    known = dict(layers[prefix].named_parameters(remove_duplicate=False)) if prefix in layers else {}
    if path not in known:
        instead = ", ".join(f"{prefix}.{one}" for one in known) if prefix in layers else f"a layer of {[*layers]}"
        raise BadInput(f"a tie names {name!r}, which is no parameter, expected {instead or 'none of this layer'}")
    return known[path]


def share(ties: Iterable[Sequence[str]], layers: Mapping[str, nn.Module]) -> None:
    """Let layers of one process share their tied parameters: all get that of the first."""
    for tie in merged(ties):
        first, *others = places = [_Place.of(name, layers) for name in tie]
        _refuse_unlike(tie, [_kind(place.parameter) for place in places])
        for other in others:
            other.put(first.parameter)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a layer has a parameter: the same before and after FSDP2 or DDP took the layer over."""

    layer: str
    spots: list[tuple[nn.Module, str]]
    """The modules that have it, and under which name."""

    @classmethod
    def of(cls, name: str, layers: Mapping[str, nn.Module]) -> _Place:
        """Find it by its name in the state dict; BadInput where there is none."""
        wanted, prefix = named(name, layers), name.partition(".")[0]
        own = [
            (module, attribute)
            for module in layers[prefix].modules()
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter is wanted
        ]
        return cls(prefix, own)

    @property
    def parameter(self) -> nn.Parameter:
        """As it is now."""
        module, attribute = self.spots[0]
        found: nn.Parameter = getattr(module, attribute)
        return found

    def put(self, parameter: nn.Parameter) -> None:
        """Let the layer have this one."""
        for module, attribute in self.spots:
            setattr(module, attribute, parameter)


@dataclass(slots=True)
class _Tie:
    """One tied parameter, as a rank has it."""

    names: Names
    owners: list[int]
    """The ranks that have it, in ascending order."""
    first: int
    """The rank of its first name."""
    places: list[_Place]
    """On this rank."""
    before: dict[nn.Parameter, Tensor | None] = field(default_factory=dict)
    """While a step runs: the gradients of the steps before it."""
    changes: list[int] = field(default_factory=list)
    """How often each of these copies had been changed in place when it began."""
    joined: list[type] = field(default_factory=list)
    """The kinds of this rank's copies between steps: whole ones, or shards of FSDP2."""

    def parameters(self) -> list[nn.Parameter]:
        """This rank's copies."""
        return list(dict.fromkeys(place.parameter for place in self.places))

    def between_steps(self) -> list[nn.Parameter]:
        """This rank's copies, as many as there were, which FSDP2 must have sharded again after the last step."""
        copies = self.parameters()
        if len(copies) != len(self.joined):
            raise RunFailed(
                f"{_show([self.names])}: the layers of this rank have {len(copies)} parameters, expected "
                f"{len(self.joined)}: they are tied, and load_state_dict(assign=True) gives each layer one of its own"
            )
        if [type(parameter.data) for parameter in copies] != self.joined:
            raise RunFailed(f"{_show([self.names])}: FSDP2 left tied parameters whole, expected shards between steps")
        return copies

    def has_changed(self) -> bool:
        """Whether a copy is another one than at the step's begin."""
        return self.changes != [engine.changes(parameter) for parameter in self.before]

    @property
    def is_whole(self) -> bool:
        """Whether all of it is one parameter of this rank, to which autograd itself adds everything."""
        return len(self.owners) == 1 and len(self.parameters()) == 1


class Ties:
    """The tied parameters that this rank has a part in.

    `owner` says for each layer (or stage module) by its name in the state dict which rank has it, `layers` are this
    rank's own before `prepare`.
    """

    def __init__(
        self, declared: Iterable[Sequence[str]], owner: Mapping[str, int], layers: Mapping[str, nn.Module], rank: int
    ) -> None:
        self._rank = rank
        self._has_copies = False
        """Whether a tied parameter is more than one on any rank, or on several."""
        self._ties: list[_Tie] = []
        for names in merged(declared):
            ranks = [owner[layer_of(name, owner)] for name in names]
            mine = [_Place.of(name, layers) for name, one in zip(names, ranks, strict=True) if one == rank]
            _refuse_unlike(names, [_kind(place.parameter) for place in mine])
            self._ties.append(_Tie(names, sorted(set(ranks)), ranks[0], mine))

    def separate(self) -> None:
        """Give each layer a parameter of its own, before FSDP2 or DDP may look after them."""
        for tie in (one for one in self._ties if one.places):
            first = tie.places[0].spots
            for place in (one for one in tie.places[1:] if not any(spot in first for spot in one.spots)):
                like = tie.places[0].parameter
                own = nn.Parameter(like.detach().clone(), place.parameter.requires_grad)
                place.put(engine.with_gradients_in(own, engine.gradient_dtype(like)))

    def unite(self, is_replicated: Callable[[nn.Module], bool], layers: Mapping[str, nn.Module]) -> None:
        """Let layers share the parameter again where nothing else looks after them."""
        for tie in self._ties:
            free = [place for place in tie.places if not is_replicated(layers[place.layer])]
            for place in free[1:]:
                place.put(free[0].parameter)

    def join(self, group: dist.ProcessGroup | None) -> None:
        """Hold the ties of all ranks against each other, and let all copies start as the first in model order.

        Raises BadInput on all ranks alike.
        """
        across = [tie for tie in self._ties if len(tie.owners) > 1]
        mine = [(tie.names, [_kind(parameter) for parameter in tie.parameters()]) for tie in across]
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (mine, any(not tie.is_whole for tie in self._ties)), group=group)
        found = [ties for ties, _ in gathered]
        self._has_copies = any(has_copies for _, has_copies in gathered)
        for rank, ties in enumerate(found):
            theirs, first = ([names for names, _ in one] for one in (ties, found[0]))
            if theirs != first:
                raise BadInput(f"rank {rank} was built with the ties {_show(theirs)}, rank 0 with {_show(first)}")
        for tie, *ranks in zip(across, *found, strict=True):
            _refuse_unlike(tie.names, [kind for _, own in ranks for kind in own])
        with torch.no_grad():
            for tie in self._ties:
                tie.joined = [type(parameter.data) for parameter in tie.parameters()]
                self._start_equal(tie, group)

    def _start_equal(self, tie: _Tie, group: dist.ProcessGroup | None) -> None:
        copies = [_local(parameter) for parameter in tie.parameters()]
        if not copies:
            return
        value = copies[0]
        if len(tie.owners) > 1:
            value = self._exchanged(tie, value.contiguous(), group)[tie.owners.index(tie.first)]
        for one in copies:
            one.copy_(value)

    def names(self) -> list[Names]:
        """What is tied, over all ranks."""
        return [tie.names for tie in self._ties]

    def repeated(self) -> set[nn.Parameter]:
        """This rank's copies of parameters that come first elsewhere, or in another layer of this rank."""
        return {one for tie in self._ties for one in tie.parameters()[tie.first == self._rank :]}

    def problem(self) -> RunFailed | None:
        """Return what is wrong, between steps, with the copies of this rank, of which the others do not know."""
        try:
            for tie in self._shared_out():
                tie.between_steps()
        except RunFailed as error:
            return error
        return None

    def begin(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """A step begins: put aside what earlier steps left.

        Raises BadInput on all ranks alike where some copies of a parameter are trained and others frozen, or have other
        values.
        """
        if self._has_copies:
            self._compare(group, device)
        for tie in self._shared_out():
            tie.before = {parameter: parameter.grad for parameter in tie.between_steps()}
            tie.changes = [engine.changes(parameter) for parameter in tie.before]
            for parameter in tie.before:
                parameter.grad = None

    def give_back(self) -> None:
        """The step that began does not come: what earlier ones left is there again."""
        for tie in self._shared_out():
            for parameter, before in tie.before.items():
                parameter.grad = before
            tie.before.clear()

    @torch.no_grad()
    def _compare(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Raise BadInput on all ranks where copies are not trained alike, or have become other parameters."""
        message = torch.full((len(self._ties), 2, 1 + SAMPLES), -torch.inf, dtype=torch.float64, device=device)
        for own, tie in zip(message, self._ties, strict=True):
            for one in tie.parameters():
                own[0 if one.requires_grad else 1, 0] = 1
                numbers = _samples(_local(one))
                torch.maximum(own[:, 1:], torch.stack([numbers, -numbers]), out=own[:, 1:])
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
        for tie, ((trained, *largest), (frozen, *smallest)) in zip(self._ties, message.tolist(), strict=True):
            if trained == frozen == 1:
                raise BadInput(
                    f"{_show([tie.names])}: tied, but trained in some layers and frozen in others, expected "
                    "requires_grad set alike by each of its names, on all ranks"
                )
            apart = math.hypot(*(a + b for a, b in zip(largest, smallest, strict=True)))
            if MOST_APART * math.hypot(*largest) < apart < math.inf:
                raise BadInput(
                    f"{_show([tie.names])}: tied, but the layers have other values, as where weights were loaded or "
                    "made under one of the names after the Runner, expected the same under each of them, or before "
                    "the Runner, which lets all begin as the first"
                )

    @torch.no_grad()
    def finish(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """A step is over: add up what it added to all copies, and give the sum to each; where it added to none, none
        gets a gradient, as without copies: an optimizer leaves such a parameter as it is.

        Raises RunFailed on all ranks alike where a copy was changed meanwhile: the others do not know.
        """
        added = self._added(group, device)
        for tie in self._shared_out():
            copies = tie.between_steps()
            own = [_dense(_local(parameter.grad)) for parameter in copies if parameter.grad is not None]
            if tie.names not in added:
                for parameter, before in tie.before.items():
                    parameter.grad = before
                tie.before.clear()
                continue
            total = reduce(torch.add, own) if own else _local(engine.no_gradient(copies[0]))
            if len(tie.owners) > 1:
                total = reduce(torch.add, self._exchanged(tie, total.contiguous(), group))
            for parameter, before in zip(copies, tie.before.values(), strict=True):
                _add(parameter, before, total)
            tie.before.clear()

    def _added(self, group: dist.ProcessGroup | None, device: torch.device) -> set[Names]:
        """Return the ties of which a copy on any rank has a gradient; raise RunFailed where one was changed."""
        if not self._has_copies:
            return set()
        has_any = [any(one.grad is not None for one in tie.parameters()) for tie in self._ties]
        have_changed = [bool(tie.before) and tie.has_changed() for tie in self._ties]
        message = torch.tensor([has_any, have_changed], dtype=torch.int32, device=device)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
        has_any, have_changed = message.tolist()
        if changed := [tie.names for tie, found in zip(self._ties, have_changed, strict=True) if found]:
            raise RunFailed(
                f"{_show(changed)}: tied, and one of the copies was changed within a step, by an optimizer that steps "
                "in a hook or by max_norm, which the other copies do not see: expected changes between steps alone"
            )
        return {tie.names for tie, found in zip(self._ties, has_any, strict=True) if found}

    def _shared_out(self) -> Iterator[_Tie]:
        """The ties of several copies that are trained."""
        for tie in self._ties:
            if tie.places and not tie.is_whole and tie.places[0].parameter.requires_grad:
                yield tie

    def _exchanged(self, tie: _Tie, mine: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
        """Send `mine` to the other owners; return everybody's, in the order of the ranks."""
        found = {rank: mine if rank == self._rank else torch.empty_like(mine) for rank in tie.owners}
        messages = []
        for rank, tensor in found.items():
            if rank != self._rank:
                messages.append(dist.P2POp(dist.isend, mine, group=group, group_peer=rank))
                messages.append(dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank))
        for message in dist.batch_isend_irecv(messages):
            message.wait()
        return list(found.values())


def _add(parameter: nn.Parameter, before: Tensor | None, total: Tensor) -> None:
    """Make the parameter's gradient that of the earlier steps and `total`, which stays as it is."""
    now = parameter.grad
    if now is None or now.is_sparse:
        now = parameter.grad = engine.no_gradient(parameter)
    _local(now).copy_(total)
    if before is not None:
        parameter.grad = now.add_(before) if before.is_sparse else before.add_(now)


def _dense(gradient: Tensor) -> Tensor:
    """An embedding's may be sparse, a head's is not."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _samples(tensor: Tensor) -> Tensor:
    """Return the sizes of some of its numbers, as many of any tensor."""
    found = tensor.detach().flatten()
    found = found[:: max(1, len(found) // SAMPLES)][:SAMPLES].abs().double()
    return torch.nn.functional.pad(found, (0, SAMPLES - len(found)))


def _kind(parameter: nn.Parameter) -> str:
    """What copies have in common."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    shard = f" in shards of {tuple(_local(parameter).shape)}" if is_dtensor(parameter) else ""
    gradient = engine.gradient_dtype(parameter)
    other = "" if gradient == parameter.dtype else f" with gradients in {str(gradient).removeprefix('torch.')}"
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{dtype} of shape {tuple(parameter.shape)}{shard}{other}{frozen}"


def _refuse_unlike(names: Names, kinds: Iterable[str]) -> None:
    """Raise BadInput where copies of a parameter are of several kinds: which of them all would get nobody says."""
    if len(different := dict.fromkeys(kinds)) > 1:
        raise BadInput(f"{_show([names])}: tied, but {' and '.join(different)}")


def _show(ties: Iterable[Names]) -> str:
    return "; ".join(" = ".join(names) for names in ties) or "none"
