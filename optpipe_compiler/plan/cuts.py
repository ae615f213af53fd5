"""Other cuts of the layers than the even one: for devices that are more equal, or that need less memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import ceil
from typing import TYPE_CHECKING

from optpipe_compiler.documents.profile import TRANSIENT, Layer, Profile, Sliceable, value_of
from optpipe_compiler.model.placement import Layout, balanced_cuts
from optpipe_compiler.plan import passes
from optpipe_compiler.solver.cuts import lightest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Numbers = list[int]

FIGURES = 16
"""Figures of a layer, no fewer, that are rounded up by themselves."""
MOST_STAGES = 48
"""Stages up to which cuts are moved step by step; the time for it grows with the cube."""


def others(profile: Profile, even: Layout) -> list[Layout]:
    """Return up to two other cuts of a placement: with a lighter heaviest device, and with a leaner fullest one.

    The lean one comes at every cap: what fits under a small one must not be better than what is found under more.
    Of qwen2-7b and gpt2-xl on 8 devices it makes the better plans, also where memory is plentiful (docs/ABLATION.md).
    """
    costs, found = _Costs(profile), [even]
    lowest = passes.share(costs.layers, even.device_of, costs.permille)
    if (costs.differ or even.stages > even.devices) and costs.compute(even)[0] > lowest:
        quick = _lightest(even, costs)
        if costs.compute(quick)[0] < costs.compute(even)[0]:
            found.append(quick)
    if even.stages <= MOST_STAGES:
        lean = recut(even, costs.memory)
        if costs.memory(lean)[0] < costs.memory(even)[0] and lean not in found:
            found.append(lean)
    return found[1:]


def earlier(profile: Profile, found: Sequence[Layout], microbatches: int) -> Iterator[Layout]:
    """Yield placements cut such that the heavier devices stand where the first microbatch comes earlier.

    With one stage per device such a cut, exact if devices are equal, comes where it needs less time than the others
    that are found of this placement. With several, where it needs less than all cuts that are moved step by step: fewer
    stages may then need no more than smaller ones do, which costs the search and earns nothing. It is not looked for
    where that would take devices less than their equal share, or stages of less than a layer in the first pass.
    """
    costs = _Costs(profile)
    by_owners: dict[tuple[int, ...], list[Layout]] = {}
    for one in found:
        by_owners.setdefault(one.device_of, []).append(one)

    def needed(one: Layout) -> tuple[int, ...]:
        return costs.to_the_end(one, microbatches)

    least = min((needed(one) for one in found if one.stages <= MOST_STAGES), default=())
    for owners, several in by_owners.items():
        before, devices = min(several, key=needed), max(owners) + 1
        equal = 1000 * microbatches * passes.share(costs.layers, owners, costs.permille)
        if len(owners) == devices and not costs.differ:
            cuts = balanced_cuts(costs.layers, devices, costs.forward[:-1], microbatches)
            early, bound = replace(before, cuts=cuts), needed(before)
        elif len(owners) <= MOST_STAGES and equal + costs.first_ps(devices) < least[0]:
            early, bound = recut(before, needed), least
        else:
            continue
        if needed(early)[0] < bound[0]:
            yield early


def layers_ns(profile: Profile) -> Numbers:
    """Return what each layer takes, forward and backward."""
    return [value_of(layer.forward_ns) + layer.fused_ns for layer in profile.expanded_layers()]


def lighter(several: list[Layout], profile: Profile) -> Layout:
    """Return the one whose busiest device is lightest."""
    return min(several, key=_Costs(profile).compute)


def with_ties(profile: Profile, one: Layout) -> Layout | None:
    """Return the placement cut so that the layers of each tie are on one device, the heaviest device as light as can
    be; None where there are no ties, where they are so already, or where no such cut was found."""
    layers = profile.expanded_layers()
    named: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.tie is not None:
            named.setdefault(layer.tie, []).append(index)
    pairs = [pair for members in named.values() for pair in pairwise(members)]
    if all(_are_together(one, pairs)):
        return None
    with suppress(ImportError):
        costs = _Costs(profile)
        found = replace(one, cuts=lightest(costs.layers, one.device_of, one.cuts, pairs, permille=costs.permille))
        return found if all(_are_together(found, pairs)) else None
    return None


def _are_together(one: Layout, pairs: list[tuple[int, int]]) -> Iterator[bool]:
    owner = [device for device, a, b in one.by_stage for _ in range(a, b)]
    return (owner[first] == owner[second] for first, second in pairs)


def most_bytes(profile: Profile, one: Layout, largest: Largest) -> int:
    """Return no less than any device needs to run one microbatch after the other, the largest one, too."""
    costs, layers = _Costs(profile), profile.expanded_layers()
    held = costs.per_device(one, list(accumulate(map(largest.most_bytes, layers), initial=0)))
    for device, begin, _ in one.by_stage:
        held[device] += 2 * largest.of(value_of(layers[begin - 1].output_bytes)) if begin else 0
    return costs.reserve + max(map(int.__add__, costs.per_device(one, costs.static), held))


@dataclass(frozen=True)
class Largest:
    """The largest microbatch: its length in sequences of the profile, at least 1, and how many slices it may have."""

    length: Fraction = Fraction(1)
    slices: int = 1

    def of(self, nbytes: int) -> int:
        """Return no less than figures of a layer, which come to so much for a sequence of the profile, come to for all
        slices, each rounded up."""
        is_whole = self.slices == self.length == 1
        return nbytes if is_whole else ceil(nbytes * self.length) + FIGURES * self.slices

    def saved_bytes(self, layer: Layer) -> int:
        """Return no less than stays of a layer between forward and backward: with slices, the gradients of its carry,
        too."""
        return self.of(value_of(layer.saved_bytes) + self._in_slices(layer).gradient_or_carry_bytes)

    def running_bytes(self, layer: Layer) -> int:
        """Return no less than a forward or a whole backward needs while it runs: with slices, for earlier ones, too."""
        slices = self._in_slices(layer)
        forward = value_of(layer.forward_transient_bytes) + value_of(slices.forward_prefix_bytes)
        backward = value_of(layer.backward_transient_bytes) + value_of(slices.backward_prefix_bytes)
        return self.of(max(forward, backward))

    def most_bytes(self, layer: Layer) -> int:
        """Return no less than one microbatch can make the layer's device hold at one time, on the layer's account."""
        slices = self._in_slices(layer)
        sizes = (
            layer.residue_or_saved_bytes,
            layer.captured_bytes,
            layer.checkpoint_bytes,
            *(getattr(layer, name) for name in TRANSIENT.values()),
            slices.forward_prefix_bytes,
            slices.backward_prefix_bytes,
        )
        others = sum(map(value_of, sizes)) + 4 * value_of(layer.output_bytes)
        return self.saved_bytes(layer) + self.of(others)

    def _in_slices(self, layer: Layer) -> Sliceable:
        """Return what a layer costs besides where microbatches are cut: nothing where they are whole."""
        return layer.slices if layer.slices is not None and self.slices > 1 else Sliceable()


WHOLE = Largest()


def _lightest(even: Layout, costs: _Costs) -> Layout:
    """Return the cut with the lightest heaviest device that is found."""
    found = replace(even, cuts=passes.lightest(costs.layers, even.device_of, even.cuts, costs.permille))
    found = min(even, found, key=costs.compute)
    return recut(found, costs.compute) if even.stages <= MOST_STAGES else found


def recut(one: Layout, cost: Callable[[Layout], tuple[int, ...]]) -> Layout:
    """Return the layout with its cuts moved as long as that lowers `cost`.

    A step takes a layer from one stage and gives one to another; the stages between them pass theirs on.
    """
    least = cost(one)
    while lower := next((changed for changed in _neighbours(one) if cost(changed) < least), None):
        one, least = lower, cost(lower)
    return one


def _neighbours(one: Layout) -> Iterator[Layout]:
    """Yield the layouts in which the cuts from one to another stand one layer earlier or later."""
    for first in range(1, one.stages):
        for last in range(first, one.stages):
            for step in (-1, 1):
                moved = tuple(cut + step if first <= n <= last else cut for n, cut in enumerate(one.cuts))
                if moved[first - 1] < moved[first] and moved[last] < moved[last + 1]:
                    yield replace(one, cuts=moved)


class _Costs:
    """What a cut costs its devices, from running sums over the layers."""

    def __init__(self, profile: Profile) -> None:
        layers = profile.expanded_layers()

        def sums(of: Callable[[Layer], int]) -> Numbers:
            return list(accumulate(map(of, layers), initial=0))

        self.permille = profile.machine.time_permille or [1000] * len(layers)
        """Thousandths of the time that each device takes for the same work; there are no more devices than layers."""
        self.differ = len(set(self.permille)) > 1
        """Whether the same work takes some devices longer than others."""
        self.reserve = value_of(profile.machine.reserve_bytes)
        self.layers = layers_ns(profile)
        self.work = list(accumulate(self.layers, initial=0))
        self.forward = sums(lambda layer: value_of(layer.forward_ns))
        self.static = sums(lambda layer: value_of(layer.static_bytes))
        self.saved = sums(lambda layer: value_of(layer.saved_bytes))

    def compute(self, one: Layout) -> tuple[int, int]:
        """Return the busiest device's ns for one microbatch, then the sum over devices of its squares."""
        work = self.per_device(one, self.work)
        load = [ns * permille // 1000 for ns, permille in zip(work, self.permille, strict=False)]
        return max(load), sum(ns * ns for ns in load)

    def to_the_end(self, one: Layout, microbatches: int) -> tuple[int, ...]:
        """Return the ps that each device takes at least, the longest first: the first microbatch's way to a stage, then
        all work of this stage and its device's later ones."""
        stages = [(d, self.permille[d], a, b) for d, a, b in one.by_stage]
        ways = accumulate((permille * (self.forward[b] - self.forward[a]) for _, permille, a, b in stages), initial=0)
        work, most = [0] * one.devices, [0] * one.devices
        for (device, permille, a, b), way in reversed(list(zip(stages, ways, strict=False))):
            work[device] += permille * (self.work[b] - self.work[a])
            most[device] = max(most[device], way + microbatches * work[device])
        return tuple(sorted(most, reverse=True))

    def first_ps(self, devices: int) -> int:
        """Return the ps of a microbatch's way to the last device of the first pass at least: a layer on each other."""
        return self.forward[devices - 1] * min(self.permille[:devices])

    def memory(self, one: Layout) -> tuple[int, int, int]:
        """Return the most bytes of a device: always held and its largest activation; then `compute`."""
        largest = [0] * one.devices
        for device, begin, end in one.by_stage:
            largest[device] = max(largest[device], self.saved[end] - self.saved[begin])
        held = self.per_device(one, self.static)
        return max(map(int.__add__, held, largest)), *self.compute(one)

    def per_device(self, one: Layout, sums: Numbers) -> Numbers:
        """Return what the layers of each device come to, from running sums over the layers."""
        total = [0] * one.devices
        for device, begin, end in one.by_stage:
            total[device] += sums[end] - sums[begin]
        return total
