"""Waits on the compiled machine: as their definition in plain Python finds them."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optpipe_compiler.lower.graph import NONE, Graph
from optpipe_compiler.lower.waits import Waits, planned_peaks
from optpipe_compiler.model.schedule import Stuck
from tests import every_wait
from tests.given_order import lane_orders
from tests.machines import dispatched, simulate
from tests.strategies import problems
from tests.test_orders import shuffled

if TYPE_CHECKING:
    from optpipe_compiler.model.schedule import Schedule

MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def planned(graph: Graph) -> list[int]:
    """Return all nodes, each as soon as all that it needs is there, of these the first by start, end and chain."""
    nodes = graph.nodes
    needs = {n: {int(one) for one in (*graph.before[n], graph.data[n]) if one != NONE} for n in range(len(nodes.start))}
    keys = list(zip(nodes.start.tolist(), nodes.end.tolist(), graph.chain.tolist(), graph.position, strict=True))
    found: list[int] = []
    while needs:
        best = min((node for node, several in needs.items() if needs.keys().isdisjoint(several)), key=keys.__getitem__)
        found.append(best)
        del needs[best]
    return found


def agrees(timed: Schedule, room: int) -> int:
    """Say that both find the same, with so many bytes above the planned peaks; return how many nodes wait."""
    graph = Graph(timed)
    order = graph.order()
    assert order.tolist() == planned(graph)
    peaks = [(peak + room, host + room) for peak, host in planned_peaks(graph, order)]
    expected = every_wait.Waits(graph, order, peaks)
    expected.add()
    found = Waits(graph, order, peaks)
    assert found.of == expected.of
    assert (found.clocks == expected.clocks).all()
    return len(found.of)


@MANY
@given(one=problems(least=0), seed=st.integers(0, 10**6), more=st.integers(-2, 6), room=st.integers(0, 3))
def test_they_are_those_of_the_definition(one, seed, more, room):
    random = Random(seed)
    tight = replace(one, budget=tuple(max(0, size + more) for size in one.budget))
    for timed in dispatched(one):
        agrees(timed, room)
        try:
            agrees(simulate(tight, shuffled(lane_orders(timed), random), ""), room)
        except Stuck:
            continue
