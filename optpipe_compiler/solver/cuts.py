"""The cut of the layers into stages whose busiest device is lightest, for a given owner of every stage."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from optpipe_compiler.solver.here import solver_here

if TYPE_CHECKING:
    from collections.abc import Sequence

    Cuts = tuple[int, ...]

EFFORT = 1.0
"""Deterministic time of a search if not said otherwise: about a second."""
RESOLUTION = 1_000_000
"""Parts of the whole work in which the search counts; what is nearer to each other counts as equal."""


def lightest(
    work: Sequence[int],
    device_of: Sequence[int],
    known: Cuts,
    together: Sequence[tuple[int, int]] = (),
    effort: float = EFFORT,
    permille: Sequence[int] | None = None,
) -> Cuts:
    """Return cuts that minimise the work of the busiest device, or `known` where nothing lighter was found.

    With stage s holding layers [c_s, c_s+1) and prefix sums p over the layers' work, minimise z subject to
    1000 z >= q_d times the sum of p[c_s+1] - p[c_s] over the stages of device d, and c_s < c_s+1; `permille` has the
    q_d, the thousandths of the time that a device takes for the same work, 1000 if not said otherwise. Layers that are
    `together` are on one device: with a in stage s of device d and b in stage t, c_s <= a < c_s+1, c_t <= b < c_t+1,
    and t is of device d. `effort` is deterministic time.
    """
    from ortools.sat.python import cp_model

    stages, layers = len(device_of), len(work)
    scale = max(1, sum(work) // RESOLUTION)
    prefix = list(accumulate((item // scale for item in work), initial=0))
    model = cp_model.CpModel()
    cuts = [model.new_int_var(s, layers - (stages - s), f"c{s}") for s in range(stages + 1)]
    before = [model.new_int_var(0, prefix[-1], f"p{s}") for s in range(stages + 1)]
    slowness = permille or [1000] * (max(device_of) + 1)
    busiest = model.new_int_var(0, prefix[-1] * max(slowness) // 1000 + 1, "z")
    model.add(cuts[0] == 0)
    model.add(cuts[stages] == layers)
    for s in range(stages + 1):
        model.add_element(cuts[s], prefix, before[s])
        model.add_hint(cuts[s], known[s])
    for s in range(stages):
        model.add(cuts[s] < cuts[s + 1])
    for device in set(device_of):
        mine = [s for s in range(stages) if device_of[s] == device]
        model.add(sum(before[s + 1] - before[s] for s in mine) * slowness[device] <= 1000 * busiest)
    owners = {}
    for layer in sorted({layer for pair in together for layer in pair}):
        stage = model.new_int_var(0, stages - 1, f"s{layer}")
        begin, end = (model.new_int_var(0, layers, f"{name}{layer}") for name in "be")
        owners[layer] = model.new_int_var(0, max(device_of), f"d{layer}")
        model.add_element(stage, cuts[:-1], begin)
        model.add_element(stage, cuts[1:], end)
        model.add_element(stage, list(device_of), owners[layer])
        model.add(begin <= layer)
        model.add(end > layer)
    for first, second in together:
        model.add(owners[first] == owners[second])
    model.minimize(busiest)
    solver = solver_here(effort)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return known
    return tuple(solver.value(cut) for cut in cuts)
