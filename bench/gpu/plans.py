"""The plans: one with room, two under caps that take offloads or recomputes to meet, one of split backwards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.gpu.commands import Failed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRIES = 6
"""Caps that are tried for a tight plan: the last interval is a sixtieth of the roomy plan's activations."""
KINDS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "roomy": ((), None),
    "offload": (("--no-recompute",), "num_offloads"),
    "recompute": (("--no-offload",), "num_recomputes"),
    "split": (("--method", "zb-h1"), None),
}
"""Options of `compile`, and what the plan must have for its name."""


@dataclass(frozen=True)
class Roomy:
    """The plan under no other cap than the device's memory."""

    report: dict[str, Any]
    base_bytes: int
    """What the device of most weights holds without activations."""

    def cap_bytes(self, share: float) -> int:
        """Return the cap that leaves this share of its activations."""
        return self.base_bytes + int(share * (max(self.report["peak_bytes"]) - self.base_bytes))


def unconstrained(compiled: Callable[..., dict[str, Any]], path: Path) -> Roomy:
    """Compile the roomy plan to `path`."""
    report = compiled("roomy")
    schedule = json.loads(path.read_text(encoding="utf-8"))
    static = [0] * len(schedule["devices"])
    for stage in schedule["stages"]:
        static[stage["device"]] += stage["static_bytes"]
    return Roomy(report, max(static) + schedule["setup"]["reserve_bytes"])


def tight(compiled: Callable[..., dict[str, Any]], kind: str, roomy: Roomy) -> dict[str, Any]:
    """Compile a plan of another kind: under a cap, found by bisection, that is enough, but not without its means."""
    options, means = KINDS[kind]
    if means is None:
        return compiled(kind, *options)
    low, high, last = 0.0, 1.0, "every cap is met without any"
    for _ in range(TRIES):
        share = (low + high) / 2
        try:
            report = compiled(kind, "--mem", str(roomy.cap_bytes(share)), *options)
        except Failed as error:
            low, last = share, str(error)
            continue
        if report[means]:
            return report
        high = share
    raise Failed(f"{kind}: no such plan between {low:.2f} and {high:.2f} of the roomy one's activations; {last}")
