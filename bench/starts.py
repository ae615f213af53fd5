"""Where the local search starts from: `python -m bench.starts [--cases PATTERN ...]`.

Every wished order is run with each first treatment of activations, and the best pairs of placement and order climb.
The table says of each order and treatment in how many cases it is among those, and in how many it is the best of all.
An order or treatment that is in none could be left out without a change.

With `--order` it says how much worse the best pair of the first ones is than the best of all, for parts of the pairs:
where time is short, only so many are run. In the order of `bounds`, as they come, or with `steady` states first.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np

from bench.ablation import FUSED, Alone, is_named
from bench.planner import Case, cases
from optpipe_compiler.plan import wishes
from optpipe_compiler.plan.local_search import CLIMBERS, in_order, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.plan.local_search import _Climber


FEW_AND_MANY = tuple(
    Case(f"{costs}-x{layers}", 8, 32, cap)
    for costs in ("unit", "6.2B", "unit-slow-links", "unit-no-links")
    for layers in (1, 2, 16)
    for cap in (0.5, 0.25, 0.125)
)
"""Of as many layers on each device."""


def starts(case: Case) -> list[tuple[str, str, str]]:
    """Return placement, order and treatment of the pairs that climb, the best first."""
    alone, names = Alone(case, 0.0), []
    for climber in alone.climbers[:CLIMBERS]:
        layout, whole = alone.placed[climber.best.instance]
        part = " of parts" if whole.is_partial else ""
        placement = f"{layout.name}-{layout.stages // whole.devices}{part}"
        names.append((placement, climber.best.wish, treatment(alone, climber)))
    return names


def treatment(alone: Alone, climber: _Climber) -> str:
    """Return the first rule that treats the activations so."""
    problem = shortened(alone.instances[climber.best.instance].problem)
    wished = alone.instances[climber.best.instance].wish(problem, climber.best.wish)
    modes = climber.best.policy.modes[0, :, 0]
    if not modes.any():
        return "keep"
    for stay in wishes.STAYS:
        with patch.object(wishes, "STAYS", (stay,)):
            if np.array_equal(next(wishes.treatments(problem, wished)), modes):
                return f"offload what stays {stay:g} transfers"
    kind = {1: "offload", 2: "recompute"}[int(modes.max())]
    turn = {s: n for d in range(problem.devices) for n, s in enumerate(problem.stages_of(d))}
    lowest = 1 + max(turn[s] for s in range(len(modes)) if modes[s])
    return f"{kind} the lowest {lowest}" if lowest <= max(turn.values()) else f"{kind} all"


PARTS = (0.1, 0.2, 0.3, 0.5, 0.75)
"""Of all pairs."""


def steady_first(pairs: Sequence[tuple[int, str]], _: object) -> list[tuple[int, str]]:
    """Return them with steady states first, whatever the placement: an order to compare with."""
    return sorted(pairs, key=lambda pair: not pair[1].startswith("modulo"))


ORDERS = {"bounds": in_order, "steady": steady_first}


def worse(case: Case, order: str) -> list[float]:
    """Return by how much the best of the first pairs is worse than the best of all, for each of `PARTS`; infinity where
    there is none."""
    alone = Alone(case, 0.0)
    reached = {(one.best.instance, one.best.wish): one.best.value for one in alone.climbers}
    numbers = [n for n, (layout, _) in enumerate(alone.placed) if layout.order is None]  # others are run behind them
    listed = [(n, name) for n in numbers for name in alone.instances[n].names(shortened(alone.instances[n].problem))]
    found = [reached.get(pair, math.inf) for pair in ORDERS[order](listed, alone.instances)]
    best = min(found)
    return [min(found[: max(1, round(part * len(found)))]) / best - 1 for part in PARTS]


def print_order(chosen: Sequence[Case], order: str) -> None:
    """Print a table of `worse`."""
    print("| case | " + " | ".join(f"{part:.0%}" for part in PARTS) + " |\n" + "|---" * (1 + len(PARTS)) + "|")
    rows = []
    for case in chosen:
        rows.append(worse(case, order))
        print(f"| {case.name} | " + " | ".join(f"{one:.2%}" for one in rows[-1]) + " |", flush=True)
    there = [f"{sum(one == 0 for one in column)} of {len(chosen)}" for column in zip(*rows, strict=True)]
    print(f"| the best is there | {' | '.join(there)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["*"], help="names, with * and ?")
    parser.add_argument("--order", choices=[*ORDERS], help="say how good the first pairs are, in this order")
    options = parser.parse_args()
    chosen = [case for case in (*cases(), *FUSED.cases, *FEW_AND_MANY) if is_named(case.name, options.cases)]
    if options.order is not None:
        print_order(chosen, options.order)
        return
    climbing: list[Counter[str]] = [Counter(), Counter(), Counter()]
    best: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for case in chosen:
        found = starts(case)
        print(f"# {case.name}: {found}", flush=True)
        for n, (many, first) in enumerate(zip(climbing, best, strict=True)):
            many.update({one[n] for one in found})
            with suppress(IndexError):
                first[found[0][n]] += 1
    for title, many, first in zip(("placement", "order", "treatment"), climbing, best, strict=True):
        print(f"\n| {title} | climbs in | is the best in | of {len(chosen)} cases |\n|---|---|---|---|")
        for name, count in many.most_common():
            print(f"| {name} | {count} | {first[name]} | |")


if __name__ == "__main__":
    main()
