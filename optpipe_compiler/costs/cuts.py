"""Costs of layers and of devices, told apart by runs of one model under several cuts.

A run shows what a stage takes, not which of its layers take it, nor whether its device is slow. Runs of other cuts show
other sums. An op of kind k of stage s takes g d x, in run e: g[e] is the machine's pace in that run, d the speed of the
stage's device, and x the mean over the stage's layers of how much longer than the base k takes on them. Of all that
explain what was seen, those are taken in which layers and devices are least off what the base says: the logarithms are
fitted by least squares, with priors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from optpipe_compiler.costs.from_run import ALIKE, profile_from_run, times_of
from optpipe_compiler.documents.profile import Quantity, value_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from optpipe_compiler.costs.from_run import Run
    from optpipe_compiler.documents.profile import Cost, Layer, Profile

DEVICE, LAYER, SEEN = 0.05, 0.15, 0.03
"""Standard deviations of logarithms: by how much a device, and a layer's kind of op, may be off what the base says, and
the median of an op of a run off what it takes. By `python -m bench.replan --only training` on two equal cores, from
gpipe: with 0.15 for devices the last plan was 6 and 9% above the offline best, after 6 and 7 swaps; with 0.05 in
docs/REPLAN.md 3.6%, after 4."""
ITERATIONS = 5
"""Of Gauss and Newton; a sum of exponentials is all that is not linear."""
Place = tuple[int, str]
"""A stage, or a run of layers that no cut has parted, and a kind of op."""


@dataclass(frozen=True)
class Seen:
    """What a run showed."""

    stages: list[tuple[int, tuple[int, int]]]
    """Device and layers of each."""
    ratios: dict[Place, float]
    """How many times what the base says ops took."""


def seen(base: Profile, run: Run) -> Seen:
    """Return what a run shows of the costs in `base`, its profile."""
    layers, found = (one.expanded_layers() for one in (base, profile_from_run(base, "the base", run).profile))
    ratios: dict[Place, float] = {}
    for number, stage in enumerate(run.about.stages):
        mine = slice(*stage.layers)
        before, after = ([times_of(layer) for layer in some[mine]] for some in (layers, found))
        for kind in before[0]:
            costs = [getattr(layer, f"{kind}_ns") for layer in found[mine]]
            sums = [sum(times[kind] for times in some) for some in (before, after)]
            if all(isinstance(cost, Quantity) and cost.source == "measured" for cost in costs) and all(sums):
                ratios[number, kind] = sums[1] / sums[0]
    return Seen([(stage.device, stage.layers) for stage in run.about.stages], ratios)


def told_apart(base: Profile, runs: Sequence[Seen]) -> Profile:
    """Return `base` with the costs of layers and the speeds of devices that the runs tell, at the pace of the last.

    Each run shows at least one op.
    """
    fit = _Fit(base, runs)
    fit.solve()
    layers = [
        _scaled(layer, {kind: fit.factor(number, kind) for kind in times_of(layer)})
        for number, layer in enumerate(base.expanded_layers())
    ]
    known = base.machine.time_permille or [1000] * base.machine.devices
    speeds = [max(1, round(one * factor)) for one, factor in zip(known, fit.speeds(), strict=True)]
    machine = msgspec.structs.replace(base.machine, time_permille=speeds)
    return msgspec.structs.replace(base, machine=machine, layers=layers)


class _Fit:
    def __init__(self, base: Profile, runs: Sequence[Seen]) -> None:
        self._runs = runs
        edges = sorted({edge for run in runs for _, layers in run.stages for edge in layers})
        self._pieces = list(pairwise(edges))
        times = [times_of(layer) for layer in base.expanded_layers()]
        self._base = {
            (number, kind): sum(one[kind] for one in times[slice(*piece)])
            for number, piece in enumerate(self._pieces)
            for kind in times[0]
        }
        self._devices = base.machine.devices
        layers = {place: self._devices + number for number, place in enumerate(self._base)}
        self._column: Mapping[Place, int] = layers
        self._pace = self._devices + len(layers)
        """The column of the first run's pace; before it are those of devices and of pieces."""
        self._found: NDArray[np.float64] = np.zeros(self._pace + len(runs))
        self._inside = [[self._pieces_of(layers) for _, layers in run.stages] for run in runs]
        self._seen = {
            (piece, kind)
            for run, inside in zip(runs, self._inside, strict=True)
            for stage, kind in run.ratios
            for piece in inside[stage]
        }

    def _pieces_of(self, layers: tuple[int, int]) -> list[int]:
        return [n for n, piece in enumerate(self._pieces) if layers[0] <= piece[0] and piece[1] <= layers[1]]

    def solve(self) -> None:
        """Find the logarithms; the pace of a run has no prior."""
        kinds = [self._devices, self._pace - self._devices, len(self._runs)]
        priors = np.diag(np.repeat([DEVICE**-2, LAYER**-2, 0.0], kinds)) * SEEN**2
        for _ in range(ITERATIONS):
            rows, wanted = self._linear()
            self._found = np.linalg.solve(rows.T @ rows + priors, rows.T @ wanted).astype(np.float64)

    def _linear(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what was seen as linear equations, near what has been found."""
        rows, wanted = [], []
        for number, run in enumerate(self._runs):
            for (stage, kind), ratio in run.ratios.items():
                device, inside = run.stages[stage][0], self._inside[number][stage]
                base = np.array([self._base[n, kind] for n in inside], np.float64)
                columns = [self._column[n, kind] for n in inside]
                now = base * np.exp(self._found[columns])
                weights = now / now.sum()
                row = np.zeros(len(self._found))
                row[columns] = weights
                row[device] = row[self._pace + number] = 1
                rows.append(row)
                wanted.append(np.log(ratio * base.sum() / now.sum()) + weights @ self._found[columns])
        return np.array(rows).reshape(-1, len(self._found)), np.array(wanted)

    def factor(self, layer: int, kind: str) -> float:
        """Return how many times what the base says an op of a layer takes, on a device with the base's speed.

        An op that was never seen is as much slower as those that do the same work.
        """
        (piece,) = (number for number, (first, end) in enumerate(self._pieces) if first <= layer < end)
        kinds = [one for one in ALIKE.get(kind, ()) if (piece, one) in self._seen]
        if (piece, kind) in self._seen or not kinds:
            kinds = [kind]
        weights = np.array([max(1, self._base[piece, one]) for one in kinds], np.float64)
        logs = self._found[[self._column[piece, one] for one in kinds]]
        return float(np.exp(logs + self._found[-1]) @ weights / weights.sum())

    def speeds(self) -> list[float]:
        """Return how many times what the base says ops take on each device."""
        return [float(one) for one in np.exp(self._found[: self._devices])]


def _scaled(layer: Layer, factors: Mapping[str, float]) -> Layer:
    """Return a layer whose ops take so many times what they took."""
    changed: dict[str, Cost] = {}
    for kind, factor in factors.items():
        cost: Cost | None = getattr(layer, f"{kind}_ns")
        if cost is not None:
            changed[f"{kind}_ns"] = _times(cost, factor)
    slices = layer.slices
    if slices is not None:
        more = {f"{kind}_attention_ns": kind for kind in ("forward", "backward_input")}
        attention = {name: _times(getattr(slices, name), factors[kind]) for name, kind in more.items()}
        slices = msgspec.structs.replace(slices, **attention)
    return msgspec.structs.replace(layer, count=1, slices=slices, **changed)


def _times(cost: Cost, factor: float) -> Cost:
    value = round(value_of(cost) * factor)
    return Quantity(value=value, source="estimated") if isinstance(cost, Quantity) else value
