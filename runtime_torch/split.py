"""A backward in two halves: the input gradient now, the weight gradients later.

The first half runs autograd from the output to the input and captures the gradient that enters each *cut*: a node on
the way to the input with parameters beside it (for a linear layer, the node that owns the weight). The second half
starts from the captured gradients. What has only vectors beside it (norms, scales) is not cut: its gradients are sums
over what the first half has at hand anyway, and cost less to keep than the activation and the gradient that another
look would need. So matrices keep their input and their output's gradient until the second half, and nothing else stays.
A node whose backward somebody wrote in Python (`torch.autograd.Function`, what torch.compile makes of a layer) runs
once, in the first half, whatever it leads to: it cannot be told to compute a part, and may do more than return
gradients.

All of it is read off the graph of the one microbatch: a routed layer has another one for each.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from optpipe_compiler.errors import RunFailed
from runtime_torch import engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from torch import Tensor
    from torch.autograd.graph import Node

Captured = tuple["Tensor | None", ...]
"""The gradients that enter one node, one per output of its operation."""


@dataclass(slots=True)
class Group:
    """Cuts that share parameters, and what was captured at each."""

    leaves: list[Node]
    """The accumulators of the parameters."""
    cuts: list[Node]
    captured: dict[Node, Captured] = field(default_factory=dict)
    changes: list[int] = field(default_factory=list)
    """How often each of the captured gradients had been changed in place when it was captured."""
    passed: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    """What cuts that run once have passed on towards the parameters and nobody has accumulated."""
    sides: dict[Node, list[int]] = field(default_factory=dict)
    """Where the way from a cut leads to these parameters, too (shared ones): the edges of each cut beside that way."""
    forms: dict[GradientEdge, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    """By edge of `sides`: shape and dtype of its gradient. Empty where autograd looks after them."""

    def roots(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the second half starts, and with which gradients."""
        pairs = list(self._beside()) if self.sides else [pair for node in self.captured for pair in self._at(node)]
        pairs += self.passed
        return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]

    def accumulate_passed(self) -> None:
        """After the first half: accumulate what was passed on, unless the second half leads there, too."""
        if self.passed and all(_runs_once(cut) for cut in self.cuts):
            edges, gradients = zip(*self.passed, strict=True)
            engine.accumulate(edges, gradients, retain=True)
            self.passed.clear()

    def capture(self, node: Node, gradients: Captured) -> None:
        """The first half has come to a cut: keep what enters it."""
        self.captured[node] = gradients
        self.changes += [engine.changes(gradient) for gradient in gradients if gradient is not None]

    def check(self) -> None:
        """Raise RunFailed where a captured gradient is no longer what it was."""
        kept = [one for gradients in self.captured.values() for one in gradients if one is not None]
        if self.changes != [engine.changes(one) for one in kept]:
            raise RunFailed(
                "a layer's backward changes in place the gradient that it is given, which the second half of a split "
                "one still reads: expected a new tensor, or a schedule compiled with --no-split"
            )

    def _at(self, node: Node) -> Iterator[tuple[GradientEdge, Tensor]]:
        for index, gradient in enumerate(self.captured.get(node, ())):
            if gradient is not None:
                yield GradientEdge(node, index), gradient

    @torch.no_grad()
    def _beside(self) -> Iterator[tuple[GradientEdge, Tensor]]:
        """Run the cuts alone: autograd's engine, started at one, would take the way once more."""
        for node, captured in self.captured.items():
            found = node(*captured)  # type: ignore[operator]
            gradients = found if isinstance(found, tuple) else (found,)
            for side in self.sides[node]:
                edge, gradient = _edge(node, side), gradients[side]
                if gradient is None:
                    continue
                if edge in self.forms:
                    shape, dtype = self.forms[edge]
                    gradient = gradient.sum_to_size(shape).to(dtype)
                yield edge, gradient

    def find_forms(self) -> None:
        """After the first half, while the graph is whole: learn the forms, for which torch has no public name.

        An edge to a parameter has its form. For any other, the backward from the cut runs once more.
        """
        for node, sides in self.sides.items():
            for edge in [_edge(node, side) for side in sides]:
                like = getattr(edge.node, "variable", None)
                if like is None and (pairs := list(self._at(node))):
                    starts, gradients = zip(*pairs, strict=True)
                    (like,) = engine.capture(starts, gradients, [edge], retain=True)
                if like is not None:
                    self.forms[edge] = (like.shape, like.dtype)


@dataclass(slots=True)
class SecondHalf:
    """What the second half starts from: the cuts, and gradients of vectors that only wait to be accumulated; where the
    output does not depend on the input, the output and its gradient."""

    groups: list[Group] = field(default_factory=list)
    vectors: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    finished: list[Node] = field(default_factory=list)
    """The nodes of the first half that the second does not run again."""

    def take_finished(self) -> Iterator[object]:
        """Yield what stands for the saved tensors that nobody reads any more, and forget their nodes."""
        while self.finished:
            yield from _saved_by(self.finished.pop())

    def tensors(self) -> Iterator[Tensor]:
        """All gradients that are held until the second half."""
        yield from self.gradients
        for group in self.groups:
            for captured in group.captured.values():
                yield from (gradient for gradient in captured if gradient is not None)
            yield from (gradient for _, gradient in group.passed)


def backward_input(
    output: GradientEdge,
    gradient: Tensor,
    start: GradientEdge,
    keep: Callable[[Iterator[object]], None] = lambda handles: None,
) -> tuple[Tensor | None, SecondHalf]:
    """Return the gradient at `start` and what `backward_weight` needs; the graph is retained.

    `keep` is called first, with what stands for the saved tensors that `backward_weight` may read.
    """
    rest = SecondHalf()
    vectors: list[GradientEdge] = []
    walk = _Walk(output.node, start.node)
    if walk.leads_to[output.node] is not None:  # there is no way to `start`: all that can be computed is for weights
        return None, SecondHalf(vectors=[output], gradients=[gradient])
    keep(handle for node in walk.beside() for handle in _saved_by(node))
    below = set(_Walk(start.node, None).parameters())
    for group in walk.groups(below):
        if below.isdisjoint(group.leaves) and all(_is_plain_vector(leaf.variable) for leaf in group.leaves):  # type: ignore[attr-defined]
            vectors += _edges(group.leaves)
        else:
            rest.groups.append(group)
    handles = [
        node.register_hook(_pass_on(group, node, walk.sides_of(node)))
        if _runs_once(node)
        else node.register_prehook(_capture(group, node))
        for group in rest.groups
        for node in group.cuts
    ]
    try:
        with _explained():
            found, *gradients = engine.capture([output], [gradient], [start, *vectors], retain=True)
    finally:
        for handle in handles:
            handle.remove()
    for group in rest.groups:
        group.accumulate_passed()
    rest.groups = [group for group in rest.groups if group.captured or group.passed]
    for group in rest.groups:
        if group.sides and engine.refuses_broadcast():
            group.find_forms()
    for vector, its_gradient in zip(vectors, gradients, strict=True):
        if its_gradient is not None:
            rest.vectors.append(vector)
            rest.gradients.append(its_gradient)
    later = {node for group in rest.groups for node in walk.nodes_of(group)}
    rest.finished = [node for node in walk.leads_to if node not in later and node is not start.node]
    return found, rest


@contextmanager
def _explained() -> Iterator[None]:
    """Within: what torch says of layers whose backward cannot run in two halves is said with what to do."""
    try:
        yield
    except RuntimeError as error:
        if "donated" in str(error):
            raise RunFailed(
                "a layer is compiled so that its backward gives away what it has read, and the schedule runs backwards "
                "in two halves: set torch._functorch.config.donated_buffer = False before the first step, or compile "
                "the schedule with --no-split"
            ) from error
        if "use_reentrant" in str(error):
            raise RunFailed(
                "a layer has a torch.utils.checkpoint with use_reentrant=True, whose backward torch does not run in "
                "two halves, as the schedule does: expected use_reentrant=False, or a schedule compiled with --no-split"
            ) from error
        if "selective activation checkpoint" in str(error):
            raise RunFailed(
                "a layer has a selective torch.utils.checkpoint, whose backward torch does not run in two "
                "halves, as the schedule does: expected one that makes all of its piece again, or a schedule compiled "
                "with --no-split"
            ) from error
        raise


def _saved_by(node: Node) -> Iterator[object]:
    """Yield what the pack hook returned for each tensor that a node saved and has not freed."""
    for name in _saved_fields(type(node)):
        try:
            found = getattr(node, name)
        except RuntimeError:  # all of it is freed already
            return
        yield from (one.data for one in (found if isinstance(found, tuple | list) else (found,)))


@cache
def _saved_fields(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _edge(node: Node, side: int) -> GradientEdge:
    """Return an edge of a node that leads to another one."""
    child, index = node.next_functions[side]
    assert child is not None
    return GradientEdge(child, index)


def _edges(leaves: Sequence[Node]) -> list[GradientEdge]:
    return [GradientEdge(leaf, 0) for leaf in leaves]


def _is_plain_vector(parameter: Tensor) -> bool:
    """Hooks of a parameter's own would see its gradient in both halves, so such a parameter waits for the second."""
    return parameter.dim() <= 1 and not engine.is_hooked(parameter)


def _runs_once(node: Node) -> bool:
    """Whether somebody wrote the backward of a node in Python; one in C++ may ask what is needed, and runs twice."""
    return isinstance(node, BackwardCFunction)


def _pass_on(group: Group, node: Node, sides: Sequence[int]):  # type: ignore[no-untyped-def]
    """A hook that accumulates what a node that runs once passes on towards the parameters; where other cuts lead to
    them, too, it waits for these: hooks of the parameters, and what lies between, see the sum of all."""
    waits = len(group.cuts) > 1

    def hook(passed: Captured, gradients: Captured) -> None:
        pairs = [(_edge(node, side), gradient) for side in sides if (gradient := passed[side]) is not None]
        if waits:
            group.passed += pairs
        elif pairs:
            engine.accumulate(*zip(*pairs, strict=True), retain=True)

    return hook


def _capture(group: Group, node: Node):  # type: ignore[no-untyped-def]  # torch types the hook as untyped, too
    def hook(gradients: Captured) -> None:
        group.capture(node, gradients)

    return hook


def backward_weight(rest: SecondHalf) -> None:
    """Run the second half, group by group, and accumulate into `.grad`."""
    if rest.vectors:
        engine.accumulate(rest.vectors, rest.gradients)
    while rest.groups:
        group = rest.groups.pop()
        group.check()
        edges, gradients = group.roots()
        if edges:
            with _explained(), _hooks_passed({} if group.sides else group.captured):
                engine.accumulate(edges, gradients, _edges(group.leaves))


def backward_whole(start: GradientEdge, gradient: Tensor) -> None:
    """Accumulate the gradients of all parameters under `start`, at which `gradient` was captured."""
    leaves = _Walk(start.node, None).parameters()
    if leaves:
        outputs = [None] * start.output_nr
        with _explained(), _hooks_passed({start.node: (*outputs, gradient)}):
            engine.accumulate([start], [gradient], _edges(leaves))


@contextmanager
def _hooks_passed(captured: Mapping[Node, Captured]) -> Iterator[None]:
    """Within: nodes get what was captured at them, which has passed the hooks of their results in the first half.

    The engine calls these hooks again; what they return is not taken.
    """

    def instead(gradients: Captured) -> Callable[[Captured], Captured]:
        return lambda given: gradients + given[len(gradients) :]

    handles = [node.register_prehook(instead(gradients)) for node, gradients in captured.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Walk:
    """The graph under `root`, and in it the ways to `target`."""

    def __init__(self, root: Node, target: Node | None) -> None:
        self.leads_to: dict[Node, list[Node] | None] = {} if target is None else {target: None}
        """By node, what it leads to before the node itself: the parameters under it; None on the way to the target."""
        self.cuts: dict[Node, list[Node]] = {}
        """By cut: the parameters beside the way."""
        self._walk(root)
        if found := self.leads_to[root]:
            self.cuts[root] = found

    def _walk(self, root: Node) -> None:
        leads_to = self.leads_to
        children: dict[Node, list[Node]] = {}
        stack = [root]
        while stack:
            node = stack[-1]
            if node in leads_to:
                stack.pop()
                continue
            if node not in children:
                children[node] = _children(node)
                missing = [child for child in children[node] if child not in leads_to]
                if missing:
                    stack += missing
                    continue
            stack.pop()
            under = children[node]
            if len(under) == 1:  # as with most
                leads_to[node] = leads_to[under[0]]
            else:
                self._add(node, [leads_to[child] for child in under])

    def _add(self, node: Node, under: list[list[Node] | None]) -> None:
        found = list(dict.fromkeys(leaf for leaves in under if leaves is not None for leaf in leaves))
        if not under and hasattr(node, "variable"):
            self.leads_to[node] = [node]
        elif None not in under:
            self.leads_to[node] = found
        else:
            self.leads_to[node] = None
            if found:
                self.cuts[node] = found

    def beside(self) -> Iterator[Node]:
        """Yield the cuts, and the nodes that lead to parameters alone."""
        yield from self.cuts
        yield from (node for node, leaves in self.leads_to.items() if leaves)

    def parameters(self) -> list[Node]:
        """Return the accumulators under the root, where there is no target."""
        return next(reversed(self.leads_to.values())) or []

    def groups(self, below: AbstractSet[Node]) -> list[Group]:
        """Return the cuts, those with a common parameter together; `below` are parameters under the target."""
        groups = _merge(self.cuts)
        for group in groups:
            if not below.isdisjoint(group.leaves) or self._meet_again(group.cuts):
                group.sides = {cut: self.sides_of(cut) for cut in group.cuts if not _runs_once(cut)}
        return groups

    def sides_of(self, cut: Node) -> list[int]:
        """Return which edges of a cut lead to parameters alone."""
        return [
            side for side, (child, _) in enumerate(cut.next_functions) if child is not None and self.leads_to[child]
        ]

    def nodes_of(self, group: Group) -> set[Node]:
        """Return the nodes that W runs: where it starts, and what is on a way from there to the group's parameters."""
        leaves = set(group.leaves)
        found = {*group.captured, *(edge.node for edge, _ in group.passed)}
        stack = list(found)
        while stack:
            for child in _children(stack.pop()):
                if child not in found and not leaves.isdisjoint(self.leads_to[child] or ()):
                    found.add(child)
                    stack.append(child)
        return found

    def _meet_again(self, cuts: list[Node]) -> bool:
        """Whether one of the cuts is on another one's way to the target."""
        if len(cuts) == 1:
            return False
        leading: set[Node] = set()
        missing = set(cuts)
        for node, leaves in self.leads_to.items():  # children first
            if len(missing) == len(cuts) and node not in missing:
                continue
            follows = leaves is None and not leading.isdisjoint(_children(node))
            if node in missing and follows:
                return True
            if node in missing or follows:
                leading.add(node)
                missing.discard(node)
            if not missing:
                break
        return False


def leads_to(root: GradientEdge, target: GradientEdge) -> bool:
    """Whether a backward from `root` comes to the target's node."""
    found = {root.node}
    stack = [root.node]
    while stack:
        node = stack.pop()
        if node == target.node:
            return True
        new = [child for child in _children(node) if child not in found]
        found.update(new)
        stack += new
    return False


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _merge(cuts: dict[Node, list[Node]]) -> list[Group]:
    """Join the cuts that share a parameter."""
    group_of: dict[Node, Group] = {}
    groups: dict[int, Group] = {}
    for node, found in cuts.items():
        group = Group(leaves=[], cuts=[node])
        leaves = dict.fromkeys(found)
        for other in {id(group_of[leaf]): group_of[leaf] for leaf in leaves if leaf in group_of}.values():
            group.cuts += other.cuts
            leaves.update({leaf: None for leaf, owner in group_of.items() if owner is other})
            del groups[id(other)]
        group.leaves = list(leaves)
        group_of.update(dict.fromkeys(leaves, group))
        groups[id(group)] = group
    return list(groups.values())
