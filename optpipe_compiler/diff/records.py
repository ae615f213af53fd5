"""What a comparison of two schedules finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Range

Value = int | float | str | None
Unit = int | tuple[int, int]
"""A microbatch, or the slice of one: microbatch and slice."""


@dataclass(frozen=True)
class Change:
    """A figure or a text that differs; `of` says of what: "device 1", "stage 3" or nothing."""

    name: str
    old: Value
    new: Value
    of: str = ""


@dataclass(frozen=True)
class Moved:
    """How one lane of one device is ordered anew; messages are counted as a lane of their own."""

    device: int
    lane: str
    ops: int
    """Ops that both have."""
    moved: int
    """The fewest of these that must move to turn one order into the other."""
    added: int
    removed: int
    position: int
    """Ops before the first difference."""
    old: str | None
    new: str | None
    """The ids of the ops that differ first; None: the lane has ended."""


@dataclass(frozen=True)
class Regrouped:
    """Microbatches of a stage for which something is done now (`added`) or no longer (`removed`).

    They are slices of microbatches where both schedules have as many of them.
    """

    what: str
    """An op's kind, or `split` for a backward in two halves."""
    stage: int
    layers: Range | None
    added: list[Unit]
    removed: list[Unit]


@dataclass(frozen=True)
class DifferentWaits:
    """How many waits, or known deliveries, of the ops of one device only one of the schedules has."""

    device: int
    added: int
    removed: int


@dataclass(frozen=True)
class Retimed:
    """How many ops of a lane are forecast for other times."""

    device: int
    lane: str
    ops: int


@dataclass(frozen=True)
class Difference:
    """All that differs; `same_contract`: order, waits, promises and setup are equal, so that a run does the same."""

    same_contract: bool
    comparable: bool
    """The same number of stages on the same devices; if not, there is nothing in `moved`, `regrouped` and `waits`."""
    setup: list[Change]
    stages: list[Change]
    counts: list[Change]
    moved: list[Moved]
    regrouped: list[Regrouped]
    waits: list[DifferentWaits]
    peers: list[Change]
    """Devices that messages go to or come from."""
    promises: list[Change]
    forecast: list[Change]
    deliveries: list[DifferentWaits]
    """What follows from order and waits of all devices, and files note (docs/IR.md)."""
    retimed: list[Retimed]
    """Ops that both have and that are forecast for other times."""
    baselines: list[Change]
    costs: list[Change]
    """Of a microbatch, in the mean, all its slices and all stages together; by stage where that does not tell all."""
    links: list[Change]
    origin: list[Change]
    identical: bool
    """Nothing at all differs, times of ops included."""
