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
    from collections.abc import Sequence

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


def backward_input(output: GradientEdge, gradient: Tensor, leaf: Tensor) -> tuple[Tensor | None, list[Group]]:
    """Return the gradient of `leaf` and the groups that `backward_weight` needs; the graph is retained."""
    groups = find_groups(output.node, get_gradient_edge(leaf).node)
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


def find_groups(root: Node, target: Node | None) -> list[Group]:
    """Find the cuts of the graph under `root`: nodes that reach `target` and have parameters beside that way.

    Where `target` cannot be reached, `root` itself is the only cut. Parameters with a common cut share a group.
    """
    on_way: set[Node] = set()
    beside: dict[Node, list[Node]] = {}
    cuts: dict[Node, list[Node]] = {}
    for node, children in _children_first(root):
        if node is target:
            on_way.add(node)
        elif not children:
            beside[node] = [node] if hasattr(node, "variable") else []
        else:
            found = [leaf for child in children if child not in on_way for leaf in beside[child]]
            if on_way.isdisjoint(children):
                beside[node] = found
            else:
                on_way.add(node)
                if found:
                    cuts[node] = found
    if root not in on_way and beside[root]:
        cuts[root] = beside[root]
    return _merge(cuts)


def _children_first(root: Node) -> list[tuple[Node, list[Node]]]:
    """Every node under `root` with the nodes that it leads to, each after all of these."""
    order: list[tuple[Node, list[Node]]] = []
    children: dict[Node, list[Node]] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        if node not in children:
            children[node] = [child for child, _ in node.next_functions if child is not None]
            stack += [child for child in children[node] if child not in children]
        else:
            stack.pop()
            order.append((node, children[node]))
    return list(dict(order).items())


def _merge(cuts: dict[Node, list[Node]]) -> list[Group]:
    """Join the cuts that share a parameter; a parameter stands for its accumulator node here."""
    group_of: dict[Node, Group] = {}
    groups: dict[int, Group] = {}
    for node, found in cuts.items():
        group = Group(params=[], cuts=[node])
        leaves = dict.fromkeys(found)
        for other in {id(group_of[leaf]): group_of[leaf] for leaf in leaves if leaf in group_of}.values():
            group.cuts += other.cuts
            leaves.update({leaf: None for leaf, owner in group_of.items() if owner is other})
            del groups[id(other)]
        group.params = [leaf.variable for leaf in leaves]  # type: ignore[attr-defined]
        group_of.update(dict.fromkeys(leaves, group))
        groups[id(group)] = group
    return list(groups.values())
