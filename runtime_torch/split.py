"""A backward in two halves: the input gradient now, the weight gradients later.

The first half runs autograd from the output to the input only and captures the gradient that enters each *cut*: a node
on the way to the input with parameters beside it (for a linear layer, the node that owns the weight). The second half
starts from the captured gradients. Only public parts of torch.autograd are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.autograd.graph import Node

Captured = tuple["Tensor | None", ...]
"""The gradients that enter one node, one per output of its operation."""


@dataclass(slots=True)
class Group:
    """Cuts that share parameters, and what was captured at each."""

    params: list[Tensor]
    cuts: list[Node]
    captured: dict[Node, Captured] = field(default_factory=dict)

    def roots(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the second half starts, and with which gradients."""
        pairs = [
            (GradientEdge(node, index), gradient)
            for node in self.cuts
            for index, gradient in enumerate(self.captured.get(node, ()))
            if gradient is not None
        ]
        return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def backward_input(
    output: GradientEdge, gradient: Tensor, leaf: Tensor, params: Iterable[Tensor]
) -> tuple[Tensor | None, list[Group]]:
    """Return the gradient of `leaf` and the groups that `backward_weight` needs; the graph is retained."""
    groups = find_groups(output.node, get_gradient_edge(leaf).node, params)
    handles = [node.register_prehook(_capture(group, node)) for group in groups for node in group.cuts]
    try:
        (found,) = torch.autograd.grad([output], [leaf], [gradient], retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return found, groups


def _capture(group: Group, node: Node):  # type: ignore[no-untyped-def]  # torch types the hook as untyped, too
    def hook(gradients: Captured) -> None:
        group.captured[node] = gradients

    return hook


def backward_weight(groups: list[Group], *, accumulate: bool = True) -> None:
    """Run the second half, group by group; `accumulate` into `.grad`, or throw the gradients away (calibration)."""
    while groups:
        group = groups.pop()
        edges, gradients = group.roots()
        if not edges:
            continue
        handles = _clamps(group)
        try:
            weight_gradients(edges, gradients, group.params, accumulate=accumulate)
        finally:
            for handle in handles:
                handle.remove()


def weight_gradients(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], params: Sequence[Tensor], *, accumulate: bool
) -> None:
    """Backward from `edges` to `params` only."""
    if not params:
        return
    if accumulate:
        torch.autograd.backward(edges, gradients, inputs=params)
    else:
        torch.autograd.grad(edges, params, gradients, allow_unused=True)


def _clamps(group: Group):  # type: ignore[no-untyped-def]
    """Hooks that keep a cut's captured gradient when another cut of its group feeds it again."""
    if len(group.cuts) < 2:
        return []

    def clamp(captured: Captured):  # type: ignore[no-untyped-def]
        return lambda _: captured

    return [node.register_prehook(clamp(captured)) for node, captured in group.captured.items()]


def find_groups(root: Node, target: Node | None, params: Iterable[Tensor]) -> list[Group]:
    """Find the cuts of the graph under `root`: nodes that reach `target` and have parameters beside that way.

    Where `target` cannot be reached, `root` itself is the only cut. Parameters with a common cut share a group.
    """
    accumulators = {get_gradient_edge(p).node: p for p in params if p.requires_grad}
    on_way: dict[Node, bool] = {}
    beside: dict[Node, dict[Node, None]] = {}
    cuts: dict[Node, dict[Node, None]] = {}
    for node in _children_first(root):
        children = [child for child, _ in node.next_functions if child is not None]
        on_way[node] = node is target or any(on_way[child] for child in children)
        found = {node: None} if node in accumulators else {}
        for child in children:
            if not on_way[child]:
                found.update(beside[child])
        if on_way[node] and found:
            cuts[node] = found
        beside[node] = {} if on_way[node] else found
    if not on_way[root] and beside[root]:
        cuts[root] = beside[root]
    return _merge(cuts, accumulators)


def _children_first(root: Node) -> list[Node]:
    """Every node under `root`, each after all that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order


def _merge(cuts: dict[Node, dict[Node, None]], accumulators: dict[Node, Tensor]) -> list[Group]:
    """Join the cuts that share a parameter."""
    group_of: dict[Node, Group] = {}
    groups: dict[int, Group] = {}
    for node, found in cuts.items():
        group = Group(params=[], cuts=[node])
        new = [acc for acc in found if acc not in group_of]
        for other in {id(group_of[acc]): group_of[acc] for acc in found if acc in group_of}.values():
            group.cuts += other.cuts
            group.params += other.params
            del groups[id(other)]
        group.params += [accumulators[acc] for acc in new]
        for param in group.params:
            group_of[get_gradient_edge(param).node] = group
        groups[id(group)] = group
    return list(groups.values())
