"""Placements with selective recompute: where layers make cheap tensors again in their backward, more of them fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from optpipe_compiler.documents.profile import Profile, value_of
from optpipe_compiler.model.problem import static_bytes
from optpipe_compiler.plan.cuts import WHOLE, Largest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe_compiler.model.placement import Layout


def selectively(
    profile: Profile, found: Sequence[Layout], cap_bytes: int, largest: Largest = WHOLE
) -> Iterator[Layout]:
    """Yield the placements again, with selective recompute of all layers, and of those on tight devices alone.

    A device is tight that cannot hold what 1F1B holds there, or, in placements of several passes, what as many
    microbatches as there are devices leave on it, while the forward or backward runs that needs most besides. On others
    one microbatch at a time fits as they are, so the least cap of a refusal does not depend on who is tight.
    """
    layers = profile.expanded_layers()
    able = {index for index, layer in enumerate(layers) if layer.selective is not None}
    saved = list(map(largest.saved_bytes, layers))
    sent = [largest.of(value_of(layer.output_bytes)) for layer in layers]
    transient = list(map(largest.running_bytes, layers))
    for one in found:
        owned: list[set[int]] = [set() for _ in range(one.devices)]
        besides = [0] * one.devices
        for device, begin, end in one.by_stage:
            owned[device] |= set(range(begin, end))
            messages = sum(sent[cut - 1] for cut in (begin, end) if 0 < cut < len(layers))
            besides[device] = max(besides[device], messages + max(transient[begin:end]))
        tight: set[int] = set()
        for device, (mine, always) in enumerate(zip(owned, static_bytes(profile, one), strict=True)):
            inflight = one.devices - (device if one.name == "linear" else 0)
            held = inflight * sum(saved[layer] for layer in mine)
            if always + held + besides[device] > cap_bytes:
                tight |= mine & able
        for chosen in {frozenset(tight): None, frozenset(able if tight else ()): None}:
            if chosen:
                yield replace(one, selective=chosen)
